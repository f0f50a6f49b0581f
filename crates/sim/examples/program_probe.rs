//! Prints how each program behaves on plain caches: generation speed, instruction mix, lines touched, and misses per
//! thousand instructions.
//!
//! Misses are those of an instruction cache of 16 KiB and of 16-way LRU data caches from 32 KiB to 4 MiB, in the second
//! half of 8 M accesses; threads take turns by batch. Usage: `cargo run --release -p cachemate-sim --example
//! program_probe [NAME...]`

use cachemate_core::{Access, AccessKind};
use cachemate_sim::kernels::{INSTRUCTION_BYTES, Options, build_program, programs};
use std::collections::HashSet;
struct ProbeCache {
    ways: usize,
    mask: u64,
    tags: Vec<u64>,
    miss: u64,
}
impl ProbeCache {
    fn new(kb: u64, ways: usize) -> Self {
        let sets = kb * 1024 / 64 / ways as u64;
        ProbeCache {
            ways,
            mask: sets - 1,
            tags: vec![u64::MAX; (sets as usize) * ways],
            miss: 0,
        }
    }
    fn access(&mut self, line: u64) -> bool {
        let set = ((line ^ line >> 17) & self.mask) as usize * self.ways;
        let set_tags = &mut self.tags[set..set + self.ways];
        match set_tags.iter().position(|&t| t == line) {
            Some(p) => {
                set_tags[..=p].rotate_right(1);
                true
            }
            None => {
                set_tags.rotate_right(1);
                set_tags[0] = line;
                self.miss += 1;
                false
            }
        }
    }
}
fn main() {
    let requested_names: Vec<String> = std::env::args().skip(1).collect();
    println!(
        "{:12} {:>6} {:>5} {:>5} {:>6} {:>7} {:>7} | I16K | D {:>6} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6}",
        "name",
        "M/s",
        "ipa",
        "st%",
        "dep%",
        "touchMB",
        "codeKB",
        32,
        64,
        128,
        256,
        512,
        1024,
        2048,
        4096
    );
    for spec in programs() {
        if !requested_names.is_empty() && !requested_names.contains(&spec.name) {
            continue;
        }
        let mut threads = build_program(&spec.name, 1, &Options::default())
            .unwrap()
            .threads;
        let mut batch: Vec<Access> = Vec::new();
        let start = std::time::Instant::now();
        let mut access_count = 0u64;
        while access_count < 4_000_000 {
            for s in threads.iter_mut() {
                batch.clear();
                s.next_batch(&mut batch);
                access_count += batch.len() as u64;
            }
        }
        let speed = access_count as f64 / start.elapsed().as_secs_f64() / 1e6;
        let mut caches: Vec<ProbeCache> = [32, 64, 128, 256, 512, 1024, 2048, 4096]
            .iter()
            .map(|&k| ProbeCache::new(k, if k < 64 { 8 } else { 16 }))
            .collect();
        let mut icache = ProbeCache::new(16, 4);
        let (mut acc, mut instr, mut st, mut dep) = (0u64, 0u64, 0u64, 0u64);
        let mut lines = HashSet::new();
        let mut code = HashSet::new();
        let mut pc = 0;
        let mut last = 0;
        let total = 8_000_000;
        let mut base = [0u64; 8];
        let mut ibase = 0;
        let mut instr0 = 0;
        while acc < total {
            for s in threads.iter_mut() {
                batch.clear();
                s.next_batch(&mut batch);
                for a in &batch {
                    instr += a.instructions();
                    let end = pc + a.instructions() * INSTRUCTION_BYTES;
                    for l in pc / 64..end.div_ceil(64) {
                        if l != last {
                            last = l;
                            code.insert(l);
                            icache.access(l);
                        }
                    }
                    pc = end;
                    match a.kind() {
                        AccessKind::Jump => pc = a.address(),
                        AccessKind::Compute => {}
                        k => {
                            acc += 1;
                            if acc == total / 2 {
                                for (b, c) in base.iter_mut().zip(&caches) {
                                    *b = c.miss;
                                }
                                ibase = icache.miss;
                                instr0 = instr;
                            }
                            if k == AccessKind::Store {
                                st += 1
                            }
                            if a.is_dependent() {
                                dep += 1
                            }
                            let line = a.address() / 64;
                            lines.insert(line);
                            for c in &mut caches {
                                c.access(line);
                            }
                        }
                    }
                }
            }
        }
        let ki = (instr - instr0) as f64 / 1e3;
        print!(
            "{:12} {:6.0} {:5.2} {:5.1} {:6.1} {:7.1} {:7.1} | {:4.1} | D",
            spec.name,
            speed,
            instr as f64 / acc as f64,
            st as f64 * 100. / acc as f64,
            dep as f64 * 100. / acc as f64,
            lines.len() as f64 * 64e-6,
            code.len() as f64 / 16.,
            (icache.miss - ibase) as f64 / ki
        );
        for (b, c) in base.iter().zip(&caches) {
            print!(" {:6.2}", (c.miss - b) as f64 / ki);
        }
        println!();
    }
}
