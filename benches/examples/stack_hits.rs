//! The fraction of a program's L1 misses that find their line in an L2. The simulator's programs are compared with
//! those measured on a POWER5 (thesis RM, Table 5.5 column g), as in the table of docs/validation.md. `cargo run
//! --release -p cachemate-bench --example stack_hits`
//!
//! As in the thesis, a log contains 163 840 misses of a 32 KB 4-way L1 with 128-byte lines that stores do not fill. Its
//! first half warms an LRU stack of 15 360 lines; hits are counted in the second half. The log starts after 60 M
//! accesses (in the thesis after 10^10 instructions) and contains no prefetches.

use cachemate_core::AccessKind;
use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
use cachemate_locality::stack::StackDistances;
use cachemate_sim::kernels::{Options, build_program};
use std::error::Error;

/// Program, and measured percentage.
const MEASURED: [(&str, u32); 21] = [
    ("ammp", 95),
    ("applu", 70),
    ("apsi", 88),
    ("art", 76),
    ("bzip2", 97),
    ("crafty", 98),
    ("equake", 48),
    ("gap", 65),
    ("gzip", 99),
    ("libquantum", 0),
    ("mcf", 50),
    ("mcf-2006", 53),
    ("mesa", 98),
    ("mgrid", 72),
    ("omnetpp", 86),
    ("parser", 98),
    ("povray", 100),
    ("swim", 51),
    ("twolf", 100),
    ("vortex", 88),
    ("vpr", 99),
];
const LOG: usize = 163_840;
const STACK_LINES: u64 = 15_360;
const SKIP: usize = 60_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    println!("| program | measured | simulated |");
    println!("|---|---|---|");
    for (name, measured) in MEASURED {
        let mut thread = build_program(name, 1, &Options::default())?
            .threads
            .remove(0);
        let mut first = CacheSim::new(
            CacheGeometry::from_bytes(32 << 10, 128, 4, 1)?,
            Replacement::Lru,
        )?;
        let (mut batch, mut lines, mut log, mut access_count) =
            (Vec::new(), Vec::new(), Vec::new(), 0);
        while access_count < SKIP || log.len() < LOG {
            batch.clear();
            lines.clear();
            thread.next_batch(&mut batch);
            lines.extend(
                batch
                    .iter()
                    .filter(|a| a.kind() == AccessKind::Load)
                    .map(|access| access.address() >> 7),
            );
            first.push_collecting(&lines, &mut log);
            access_count += batch.len();
            if access_count < SKIP {
                log.clear();
            }
        }
        let (mut warm, mut full_log) = (StackDistances::new(), StackDistances::new());
        warm.push(&log[..LOG / 2])?;
        full_log.push(&log[..LOG])?;
        let missed =
            full_log.finish()?.misses_at(STACK_LINES) - warm.finish()?.misses_at(STACK_LINES);
        println!(
            "| {name} | {measured} % | {:.0} % |",
            100.0 - 100.0 * missed as f64 / (LOG / 2) as f64
        );
    }
    Ok(())
}
