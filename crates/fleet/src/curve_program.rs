//! A program for the cycle-level machine whose references have the miss-rate curve of a profile.
//!
//! Problem: a fleet has only the profile of a service, whereas the cycle-level machine needs addresses. Method: each
//! thread keeps its lines in an LRU stack, and draws the depth of each reference from the curve, so that alone it
//! misses at every size as the curve states (Mattson et al., IBM Systems Journal 1970). Between references, it computes
//! for the profile's base cycles, one instruction in each. The value of some references is needed at once, and the
//! others overlap with the computation, so that a miss stalls for about as long as the profile states. Properties: the
//! same seed gives the same accesses; sizes are divided by the scale of the simulated caches.

use std::collections::VecDeque;

use cachemate_core::{Access, AccessSource, BatchEnd, CacheLevel, MachineSpec, SplitMix64};

use crate::profile::WorkloadProfile;

/// Number of lines in one block of the LRU stack: the square root of a stack of 64 Ki lines.
const BLOCK_LINES: usize = 256;
/// References in one batch.
const BATCH_REFERENCES: usize = 64;
/// Cycles between two sleeps of a thread that is not always busy, before a random factor of 0.5 to 1.5.
const BUSY_CYCLES: f64 = 50_000.0;
/// Start of the lines in the address space of a thread.
const LINES_BASE: u64 = 1 << 40;

/// The properties of a machine that determine a program's accesses.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CoreTiming {
    line_bytes: u64,
    /// Capacity of the contended cache, in lines.
    cache_lines: usize,
    /// Latency of a load that hits the contended cache, and additional latency of one that misses it.
    hit_cycles: f64,
    memory_cycles: f64,
    hertz: f64,
}

impl CoreTiming {
    /// The times of a machine; `None` if it has no data cache.
    pub fn new(machine: &MachineSpec) -> Option<Self> {
        let last_level = machine.last_level_cache()?;
        // A load visits the levels one after the other.
        let data_caches = machine
            .caches
            .iter()
            .filter(|cache| cache.level != CacheLevel::L1Instruction);
        let hit_cycles = data_caches
            .map(|cache| f64::from(cache.latency_cycles))
            .sum::<f64>();
        Some(CoreTiming {
            line_bytes: u64::from(last_level.line_bytes),
            cache_lines: (last_level.size_bytes / u64::from(last_level.line_bytes)) as usize,
            hit_cycles,
            memory_cycles: f64::from(machine.memory.local_latency_cycles),
            hertz: machine.hertz as f64,
        })
    }
}

/// The lines of a thread in the order of their last use, the latest first, down to the capacity of the cache.
struct LruStack {
    blocks: VecDeque<VecDeque<u32>>,
    next_line: u32,
    capacity_lines: usize,
}

impl LruStack {
    /// Builds a stack that contains the lines from 0 to `lines`, lowest number first.
    fn new(lines: usize, capacity_lines: usize) -> Self {
        let mut stack = LruStack {
            blocks: VecDeque::new(),
            next_line: lines as u32,
            capacity_lines,
        };
        for first_line in (0..lines).step_by(BLOCK_LINES) {
            stack.blocks.push_back(
                (first_line as u32..lines.min(first_line + BLOCK_LINES) as u32).collect(),
            );
        }
        stack
    }

    /// A new line if the stack is not as deep.
    fn use_line(&mut self, depth: usize) -> u32 {
        let (mut index, offset) = (depth / BLOCK_LINES, depth % BLOCK_LINES);
        let line = match self
            .blocks
            .get_mut(index)
            .filter(|block| offset < block.len())
        {
            Some(block) => block.remove(offset).unwrap_or(0),
            None => {
                index = self.blocks.len();
                self.next_line += 1;
                self.next_line - 1
            }
        };

        // Each block before the line's passes its last line on to the next, so that all but the last stay full.
        let mut carried_line = Some(line);
        for block in self.blocks.iter_mut().take(index + 1) {
            let Some(carried_first) = carried_line else {
                break;
            };
            block.push_front(carried_first);
            carried_line = if block.len() > BLOCK_LINES {
                block.pop_back()
            } else {
                None
            };
        }
        if let Some(carried_last) = carried_line
            && self.blocks.len() * BLOCK_LINES < self.capacity_lines
        {
            self.blocks.push_back(VecDeque::from([carried_last]));
        }

        line
    }
}

/// One thread of a service.
pub struct CurveProgram {
    timing: CoreTiming,
    profile: WorkloadProfile,
    generator: SplitMix64,
    stack: LruStack,
    /// Bytes of the profile for one line of the thread's stack.
    bytes_per_line: f64,
    /// Lines that the program loads once before its first reference, the latest used first.
    untouched_lines: Vec<u32>,
    /// Base cycles between two references, in the mean.
    cycles_per_reference: f64,
    /// Share of the references whose value is needed at once.
    dependent_share: f64,
    /// Base cycles that have passed but that the program has not yet emitted as instructions.
    pending_cycles: f64,
    /// Share of the time in which the thread is busy.
    busy_share: f64,
    /// Elapsed cycles per base cycle while the thread is busy.
    cycles_per_base_cycle: f64,
    busy_cycles_left: f64,
}

impl CurveProgram {
    /// Builds a thread of a service with `threads` threads, on caches that are `scale` times as small as the profile's.
    /// The thread is busy for `busy_share` of the time if it takes `cycles_per_instr`.
    pub fn new(
        profile: &WorkloadProfile,
        threads: u16,
        scale: u32,
        timing: CoreTiming,
        busy_share: f64,
        cycles_per_instr: f64,
        seed: u64,
    ) -> Self {
        let bytes_per_line =
            timing.line_bytes as f64 * f64::from(scale) * f64::from(threads.max(1));
        let footprint_lines = profile.footprint_bytes() / bytes_per_line;
        let lines = libm::ceil(footprint_lines.min(timing.cache_lines as f64)) as usize;
        let dependent_share = profile.stall_cycles_per_miss / timing.memory_cycles.max(1.0);
        let references = profile.references_per_kilo_instr;
        let base_cycles = profile.base_cycles_per_instr;

        CurveProgram {
            timing,
            profile: profile.clone(),
            generator: SplitMix64::new(SplitMix64::scatter(seed)),
            stack: LruStack::new(lines, timing.cache_lines),
            bytes_per_line,
            untouched_lines: (0..lines as u32).collect(),
            cycles_per_reference: if references > 0.0 {
                1000.0 / references * base_cycles
            } else {
                f64::INFINITY
            },
            dependent_share: dependent_share.min(1.0),
            pending_cycles: 0.0,
            busy_share,
            cycles_per_base_cycle: cycles_per_instr / base_cycles,
            busy_cycles_left: BUSY_CYCLES,
        }
    }

    /// Draws the depth in the stack at which the next reference finds its line. The curve states the probability of a
    /// greater depth.
    fn draw_depth(&mut self) -> usize {
        let misses = self.generator.draw_unit() * self.profile.references_per_kilo_instr;
        let miss_curve = &self.profile.curve;
        let upper = miss_curve.partition_point(|point| point.misses_per_kilo_instr > misses);
        let Some(high_point) = miss_curve.get(upper) else {
            return usize::MAX;
        };
        let (low_bytes, low_misses) =
            match upper.checked_sub(1).and_then(|index| miss_curve.get(index)) {
                Some(low) => (low.bytes, low.misses_per_kilo_instr),
                None => (0.0, self.profile.references_per_kilo_instr),
            };
        let share = ((low_misses - misses)
            / (low_misses - high_point.misses_per_kilo_instr).max(1e-12))
        .clamp(0.0, 1.0);
        ((low_bytes + share * (high_point.bytes - low_bytes)) / self.bytes_per_line) as usize
    }

    fn address_of(&self, line: u32) -> u64 {
        LINES_BASE + u64::from(line) * self.timing.line_bytes
    }

    /// Emits a reference after the base cycles that are due; one instruction takes one cycle.
    fn emit_reference(&mut self, batch: &mut Vec<Access>) {
        let depth = self.draw_depth();
        let line = self.stack.use_line(depth);
        let address = self.address_of(line);
        self.emit_compute(batch);

        // Whether a line is written is a property of the line, so that the share of written fills is the profile's.
        let write_draw = SplitMix64::scatter(u64::from(line)) as f64 / u64::MAX as f64;
        let is_written = write_draw < self.profile.write_share;
        let is_dependent = self.generator.draw_unit() < self.dependent_share;
        if is_written && !is_dependent {
            batch.push(Access::store(address, 0));
            return;
        }
        batch.push(Access::load(address, 0));
        self.pending_cycles -= 1.0;
        if is_dependent {
            // The next load needs the value, and hits the first level. The base cycles contain the wait for a hit.
            batch.push(Access::dependent_load(address, 0));
            self.pending_cycles -= self.timing.hit_cycles + 1.0;
        }

        if is_written {
            batch.push(Access::store(address, 0));
            self.pending_cycles -= 1.0;
        }
    }

    fn emit_compute(&mut self, batch: &mut Vec<Access>) {
        if self.pending_cycles >= 1.0 {
            batch.push(Access::compute(self.pending_cycles as u64));
            self.pending_cycles -= libm::floor(self.pending_cycles);
        }
    }
}

impl AccessSource for CurveProgram {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        if !self.untouched_lines.is_empty() {
            // From the deepest line to the latest, so that the cache's order is the stack's.
            let remaining_count = self.untouched_lines.len().saturating_sub(1024);
            for line in self
                .untouched_lines
                .split_off(remaining_count)
                .into_iter()
                .rev()
            {
                batch.push(Access::load(self.address_of(line), 0));
            }
            return BatchEnd::More;
        }

        let mut base_cycles = 0.0;
        for _ in 0..BATCH_REFERENCES {
            // Exponential intervals: the references of a service are independent.
            let interval = self.generator.draw_exponential(self.cycles_per_reference);
            let interval = interval.min(BUSY_CYCLES);
            self.pending_cycles += interval;
            base_cycles += interval;
            if self.cycles_per_reference.is_finite() {
                self.emit_reference(batch)
            } else {
                self.emit_compute(batch)
            }
        }
        self.busy_cycles_left -= base_cycles * self.cycles_per_base_cycle;
        if self.busy_share >= 1.0 || self.busy_cycles_left > 0.0 {
            return BatchEnd::More;
        }

        // A busy period ends with a batch; the next one is shorter by the excess.
        let excess = -self.busy_cycles_left;
        let busy_cycles = BUSY_CYCLES * (0.5 + self.generator.draw_unit());
        self.busy_cycles_left = busy_cycles - excess;
        let idle_cycles = busy_cycles * (1.0 - self.busy_share) / self.busy_share;
        BatchEnd::Sleep {
            ns: (idle_cycles / self.timing.hertz * 1e9).max(1.0) as u64,
        }
    }

    fn progress(&self) -> Option<f64> {
        None
    }
}
