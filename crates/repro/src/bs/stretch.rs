//! Replays a stretch of a program's run access by access, for the exact reuse times that watchpoints sample.
//!
//! Access streams do not depend on the machine, so a stretch that a thread ran there can be replayed afterward. Lines
//! are those of the last level; a fetched line of code counts as an access. Reuse times are counted backward to the
//! previous touch, so that none is cut off at the end of the stretch. For this purpose, accesses are also followed
//! for `history_instr` before the stretch.

use std::collections::HashMap;

use cachemate_core::{Access, AccessKind, SplitMix64};
use cachemate_locality::reuse::{ReuseSampler, ReuseTimes};

use crate::ReproError;
use crate::setup::{WorkloadJob, failed};

const LINE_BYTES: u64 = 64;
/// Line of the machine's instruction cache, and size of an instruction.
const CODE_LINE_BYTES: u64 = 32;
const INSTRUCTION_BYTES: u64 = 4;

/// A range of a job's instructions.
#[derive(Clone, Copy, Debug)]
pub struct InstructionSpan {
    pub history_instr: u64,
    pub instr: u64,
}

/// Reuse times of several streams, each with the number of accesses from which they were computed.
pub struct ReuseTimesByFilter {
    pub all_accesses: CountedReuse,
    /// Reuse times of data accesses, without code.
    pub data: CountedReuse,
    /// Reuse times of accesses that miss in a quarter of the first-level caches.
    pub behind: CountedReuse,
    /// Reuse times as watchpoints report them, at some locations, until the stretch ends.
    pub watched: ReuseTimes,
}

#[derive(Default)]
pub struct CountedReuse {
    pub times: ReuseTimes,
    pub accesses: f64,
    now: u64,
}

impl CountedReuse {
    /// Records a touch of a line whose last touch was at that time.
    fn touch(&mut self, last: &mut Option<u64>, is_measured: bool) {
        if is_measured {
            self.times.add(last.map(|last| self.now - last - 1));
            self.accesses += 1.0;
        }
        *last = Some(self.now);
        self.now += 1;
    }
}

/// A quarter of a first-level cache, the share of one of four threads: random replacement, four ways.
struct QuarterL1 {
    sets: Vec<[u64; 4]>,
    random: SplitMix64,
}

impl QuarterL1 {
    fn new(lines: usize) -> Self {
        QuarterL1 { sets: vec![[u64::MAX; 4]; lines / 4], random: SplitMix64::new(1) }
    }
    fn access_line(&mut self, line: u64, fill: bool) -> bool {
        let count = self.sets.len() as u64;
        let set = &mut self.sets[(line % count) as usize];
        let is_hit = set.contains(&line);
        if !is_hit && fill {
            set[self.random.draw_below(4) as usize] = line;
        }
        is_hit
    }
}

/// Time of a line's last touch, in three clocks: all accesses, data accesses, and accesses that reach the next level.
#[derive(Default)]
struct LastTouch {
    all_accesses: Option<u64>,
    data: Option<u64>,
    behind: Option<u64>,
}

struct StretchReader {
    reuse: ReuseTimesByFilter,
    sampler: ReuseSampler,
    last_touches: HashMap<u64, LastTouch>,
    l1_data: QuarterL1,
    l1_code: QuarterL1,
    next_code: u64,
    fetched: u64,
}

impl StretchReader {
    fn touch(&mut self, line: u64, data: bool, passes: bool, is_measured: bool) {
        let last = self.last_touches.entry(line).or_default();
        self.reuse.all_accesses.touch(&mut last.all_accesses, is_measured);
        if data {
            self.reuse.data.touch(&mut last.data, is_measured);
        }
        if passes {
            self.reuse.behind.touch(&mut last.behind, is_measured);
        }
        if is_measured {
            self.sampler.touch(line);
        }
    }

    fn read(&mut self, access: Access, is_measured: bool) {
        let mut remaining = access.instructions();
        while remaining > 0 {
            let line = self.next_code / CODE_LINE_BYTES;
            if line != self.fetched {
                self.fetched = line;
                let passes = !self.l1_code.access_line(line, true);
                self.touch(self.next_code / LINE_BYTES, false, passes, is_measured);
            }
            let line_instr =
                (CODE_LINE_BYTES - self.next_code % CODE_LINE_BYTES).div_ceil(INSTRUCTION_BYTES).min(remaining);
            self.next_code += line_instr * INSTRUCTION_BYTES;
            remaining -= line_instr;
        }
        let line = access.address() / LINE_BYTES;
        // Lines have 16 bytes; stores write through and fill no line.
        match access.kind() {
            AccessKind::Load => {
                let passes = !self.l1_data.access_line(access.address() / 16, true);
                self.touch(line, true, passes, is_measured);
            }
            AccessKind::Store => self.touch(line, true, true, is_measured),
            AccessKind::Jump => (self.next_code, self.fetched) = (access.address(), u64::MAX),
            AccessKind::Compute => {}
        }
    }
}

pub fn read(job: &WorkloadJob, span: InstructionSpan, locations: u32) -> Result<ReuseTimesByFilter, ReproError> {
    let mut source = job.start_threads(0)?.into_iter().next().ok_or_else(|| failed(&job.name)("no thread"))?;
    // About three instructions per access; each location stands for this many accesses.
    let one_in = (span.instr / 3 / u64::from(locations)).max(1) as u32;
    let empty_reuse = || CountedReuse::default();
    let mut reader = StretchReader {
        reuse: ReuseTimesByFilter {
            all_accesses: empty_reuse(),
            data: empty_reuse(),
            behind: empty_reuse(),
            watched: ReuseTimes::new(),
        },
        sampler: ReuseSampler::new(one_in, job.seed),
        last_touches: HashMap::new(),
        l1_data: QuarterL1::new(128),
        l1_code: QuarterL1::new(128),
        next_code: 0,
        fetched: u64::MAX,
    };
    let (mut passed_instr, mut batch) = (0, Vec::new());
    while passed_instr < span.history_instr + span.instr {
        batch.clear();
        source.next_batch(&mut batch);
        if batch.is_empty() {
            return Err(failed(&job.name)("the program ended within the stretch"));
        }
        for &access in &batch {
            reader.read(access, passed_instr >= span.history_instr);
            passed_instr += access.instructions();
        }
    }
    let mut reuse = reader.reuse;
    reuse.watched = reader.sampler.finish();
    Ok(reuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are exact reuse times those of the stream, for code and data together, and does a sampler agree on average?
    #[test]
    fn a_stretch_knows_every_reuse() {
        let span = InstructionSpan { history_instr: 600_000, instr: 600_000 };
        let reuse = read(&WorkloadJob::new("twolf", 3), span, 20_000).unwrap();
        assert!(reuse.all_accesses.accesses > reuse.data.accesses && reuse.data.accesses > reuse.behind.accesses * 0.5);
        assert_eq!(reuse.all_accesses.times.samples(), reuse.all_accesses.accesses);
        let short_share = |times: &ReuseTimes| {
            times.buckets().filter(|bucket| bucket.high < 1_000).map(|bucket| bucket.weight).sum::<f64>()
                / times.samples()
        };
        assert!((short_share(&reuse.all_accesses.times) - short_share(&reuse.watched)).abs() < 0.03);
        assert!(short_share(&reuse.all_accesses.times) > short_share(&reuse.behind.times));
    }
}
