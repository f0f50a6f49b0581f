//! Replays a stretch of a program's run access by access, for the exact reuse times that watchpoints sample.
//!
//! Access streams do not depend on the machine, so a stretch that a thread ran there can be replayed afterward. Lines
//! are those of the last level; a fetched line of code counts as an access. Reuse times are counted backward to the
//! previous touch, so that none is cut off at the end of the stretch. For this purpose, accesses are also followed
//! for `history_instr` before the stretch.

use std::collections::HashMap;

use cachemate_core::{Access, AccessKind, SplitMix64};
use cachemate_locality::reuse::{ReuseSampler, ReuseTimes};

use crate::Result;
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
    pub data_accesses: CountedReuse,
    /// Reuse times of accesses that miss in a quarter of the first-level caches.
    pub behind_l1: CountedReuse,
    /// Reuse times as watchpoints report them, at some locations, until the stretch ends.
    pub watched_times: ReuseTimes,
}

#[derive(Default)]
pub struct CountedReuse {
    pub times: ReuseTimes,
    pub accesses: f64,
    access_count: u64,
}

impl CountedReuse {
    /// Records a touch of a line whose last touch was at that time.
    fn record_touch(&mut self, last_touch: &mut Option<u64>, is_measured: bool) {
        if is_measured {
            self.times
                .add(last_touch.map(|last| self.access_count - last - 1));
            self.accesses += 1.0;
        }
        *last_touch = Some(self.access_count);
        self.access_count += 1;
    }
}

/// A quarter of a first-level cache, the share of one of four threads: random replacement, four ways.
struct QuarterL1 {
    sets: Vec<[u64; 4]>,
    random: SplitMix64,
}

impl QuarterL1 {
    fn new(lines: usize) -> Self {
        QuarterL1 {
            sets: vec![[u64::MAX; 4]; lines / 4],
            random: SplitMix64::new(1),
        }
    }
    fn access_line(&mut self, line: u64, should_fill: bool) -> bool {
        let count = self.sets.len() as u64;
        let set = &mut self.sets[(line % count) as usize];
        let is_hit = set.contains(&line);
        if !is_hit && should_fill {
            set[self.random.draw_below(4) as usize] = line;
        }
        is_hit
    }
}

/// Time of a line's last touch, in three clocks: all accesses, data accesses, and accesses that reach the next level.
#[derive(Default)]
struct LastTouch {
    all_accesses: Option<u64>,
    data_access: Option<u64>,
    behind_l1: Option<u64>,
}

struct StretchReader {
    reuse: ReuseTimesByFilter,
    sampler: ReuseSampler,
    last_touches: HashMap<u64, LastTouch>,
    l1_data: QuarterL1,
    l1_code: QuarterL1,
    next_code_address: u64,
    last_fetched_line: u64,
}

impl StretchReader {
    fn record_line_touch(&mut self, line: u64, is_data: bool, is_l1_miss: bool, is_measured: bool) {
        let last_touches = self.last_touches.entry(line).or_default();
        self.reuse
            .all_accesses
            .record_touch(&mut last_touches.all_accesses, is_measured);
        if is_data {
            self.reuse
                .data_accesses
                .record_touch(&mut last_touches.data_access, is_measured);
        }
        if is_l1_miss {
            self.reuse
                .behind_l1
                .record_touch(&mut last_touches.behind_l1, is_measured);
        }
        if is_measured {
            self.sampler.touch(line);
        }
    }

    fn record_access(&mut self, access: Access, is_measured: bool) {
        let mut remaining_instr = access.instructions();
        while remaining_instr > 0 {
            let line = self.next_code_address / CODE_LINE_BYTES;
            if line != self.last_fetched_line {
                self.last_fetched_line = line;
                let is_l1_miss = !self.l1_code.access_line(line, true);
                self.record_line_touch(
                    self.next_code_address / LINE_BYTES,
                    false,
                    is_l1_miss,
                    is_measured,
                );
            }
            let line_instr = (CODE_LINE_BYTES - self.next_code_address % CODE_LINE_BYTES)
                .div_ceil(INSTRUCTION_BYTES)
                .min(remaining_instr);
            self.next_code_address += line_instr * INSTRUCTION_BYTES;
            remaining_instr -= line_instr;
        }
        let line = access.address() / LINE_BYTES;
        // Lines have 16 bytes; stores write through and fill no line.
        match access.kind() {
            AccessKind::Load => {
                let is_l1_miss = !self.l1_data.access_line(access.address() / 16, true);
                self.record_line_touch(line, true, is_l1_miss, is_measured);
            }
            AccessKind::Store => self.record_line_touch(line, true, true, is_measured),
            AccessKind::Jump => {
                (self.next_code_address, self.last_fetched_line) = (access.address(), u64::MAX)
            }
            AccessKind::Compute => {}
        }
    }
}

pub fn measure_reuse(
    job: &WorkloadJob,
    span: InstructionSpan,
    locations: u32,
) -> Result<ReuseTimesByFilter> {
    let mut source = job
        .start_threads(0)?
        .into_iter()
        .next()
        .ok_or_else(|| failed(&job.name)("no thread"))?;

    // About three instructions per access; each location stands for this many accesses.
    let one_in = (span.instr / 3 / u64::from(locations)).max(1) as u32;
    let empty_reuse = || CountedReuse::default();
    let mut reader = StretchReader {
        reuse: ReuseTimesByFilter {
            all_accesses: empty_reuse(),
            data_accesses: empty_reuse(),
            behind_l1: empty_reuse(),
            watched_times: ReuseTimes::new(),
        },
        sampler: ReuseSampler::new(one_in, job.seed),
        last_touches: HashMap::new(),
        l1_data: QuarterL1::new(128),
        l1_code: QuarterL1::new(128),
        next_code_address: 0,
        last_fetched_line: u64::MAX,
    };

    let (mut executed_instr, mut batch) = (0, Vec::new());
    while executed_instr < span.history_instr + span.instr {
        batch.clear();
        source.next_batch(&mut batch);
        if batch.is_empty() {
            return Err(failed(&job.name)("the program ended within the stretch"));
        }
        for &access in &batch {
            reader.record_access(access, executed_instr >= span.history_instr);
            executed_instr += access.instructions();
        }
    }

    let mut reuse = reader.reuse;
    reuse.watched_times = reader.sampler.finish();
    Ok(reuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are exact reuse times those of the stream, for code and data together, and does a sampler agree on average?
    #[test]
    fn exact_reuse_times_are_those_of_the_stream() {
        let span = InstructionSpan {
            history_instr: 600_000,
            instr: 600_000,
        };
        let reuse = measure_reuse(&WorkloadJob::new("twolf", 3), span, 20_000).unwrap();
        assert!(
            reuse.all_accesses.accesses > reuse.data_accesses.accesses
                && reuse.data_accesses.accesses > reuse.behind_l1.accesses * 0.5
        );
        assert_eq!(
            reuse.all_accesses.times.samples(),
            reuse.all_accesses.accesses
        );
        let short_share = |times: &ReuseTimes| {
            times
                .buckets()
                .filter(|bucket| bucket.high < 1_000)
                .map(|bucket| bucket.weight)
                .sum::<f64>()
                / times.samples()
        };
        assert!(
            (short_share(&reuse.all_accesses.times) - short_share(&reuse.watched_times)).abs()
                < 0.03
        );
        assert!(short_share(&reuse.all_accesses.times) > short_share(&reuse.behind_l1.times));
    }
}
