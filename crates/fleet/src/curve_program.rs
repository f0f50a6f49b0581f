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
pub struct CoreTimes {
    line_bytes: u64,
    /// Capacity of the contended cache, in lines.
    cache_lines: usize,
    /// Latency of a load that hits the contended cache, and additional latency of one that misses it.
    hit_cycles: f64,
    memory_cycles: f64,
    hertz: f64,
}

impl CoreTimes {
    /// The times of a machine; `None` if it has no data cache.
    pub fn new(machine: &MachineSpec) -> Option<Self> {
        let last = machine.last_level()?;
        // A load visits the levels one after the other.
        let data = machine.caches.iter().filter(|cache| cache.level != CacheLevel::L1Instruction);
        let hit_cycles = data.map(|cache| f64::from(cache.latency_cycles)).sum::<f64>();
        Some(CoreTimes {
            line_bytes: u64::from(last.line_bytes),
            cache_lines: (last.size_bytes / u64::from(last.line_bytes)) as usize,
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
    capacity: usize,
}

impl LruStack {
    /// A stack of this many lines.
    fn new(lines: usize, capacity: usize) -> Self {
        let mut stack = LruStack { blocks: VecDeque::new(), next_line: lines as u32, capacity };
        for first in (0..lines).step_by(BLOCK_LINES) {
            stack.blocks.push_back((first as u32..lines.min(first + BLOCK_LINES) as u32).collect());
        }
        stack
    }

    /// Uses the line at this depth, or a new line if the stack is not as deep.
    fn use_line(&mut self, depth: usize) -> u32 {
        let (mut index, place) = (depth / BLOCK_LINES, depth % BLOCK_LINES);
        let line = match self.blocks.get_mut(index).filter(|block| place < block.len()) {
            Some(block) => block.remove(place).unwrap_or(0),
            None => {
                index = self.blocks.len();
                self.next_line += 1;
                self.next_line - 1
            }
        };
        // Each block before the line's passes its last line on to the next, so that all but the last stay full.
        let mut carried = Some(line);
        for block in self.blocks.iter_mut().take(index + 1) {
            let Some(first) = carried else { break };
            block.push_front(first);
            carried = if block.len() > BLOCK_LINES { block.pop_back() } else { None };
        }
        if let Some(first) = carried
            && self.blocks.len() * BLOCK_LINES < self.capacity
        {
            self.blocks.push_back(VecDeque::from([first]));
        }
        line
    }
}

/// One thread of a service.
pub struct CurveProgram {
    times: CoreTimes,
    profile: WorkloadProfile,
    random: SplitMix64,
    stack: LruStack,
    /// Bytes of the profile for one line of the thread's stack.
    bytes_per_line: f64,
    /// Lines that are still to be touched before the program begins.
    untouched: Vec<u32>,
    /// Base cycles between two references, in the mean.
    cycles_per_reference: f64,
    /// Share of the references whose value is needed at once.
    needed_share: f64,
    /// Base cycles that are due, but were not emitted.
    due_cycles: f64,
    /// Share of the time in which the thread is busy.
    busy_share: f64,
    /// Elapsed cycles per base cycle while the thread is busy.
    cycles_per_base_cycle: f64,
    busy_cycles_left: f64,
}

impl CurveProgram {
    /// A thread of a service with `threads` threads, on caches that are `scale` times as small as the profile's. The
    /// thread is busy for `busy_share` of the time if it takes `cycles_per_instr`.
    pub fn new(
        profile: &WorkloadProfile,
        threads: u16,
        scale: u32,
        times: CoreTimes,
        busy_share: f64,
        cycles_per_instr: f64,
        seed: u64,
    ) -> Self {
        let bytes_per_line = times.line_bytes as f64 * f64::from(scale) * f64::from(threads.max(1));
        let footprint_lines = profile.footprint_bytes() / bytes_per_line;
        let lines = libm::ceil(footprint_lines.min(times.cache_lines as f64)) as usize;
        let needed_share = profile.stall_cycles_per_miss / times.memory_cycles.max(1.0);
        let references = profile.references_per_kilo_instr;
        let base_cycles = profile.base_cycles_per_instr;
        CurveProgram {
            times,
            profile: profile.clone(),
            random: SplitMix64::new(SplitMix64::scatter(seed)),
            stack: LruStack::new(lines, times.cache_lines),
            bytes_per_line,
            untouched: (0..lines as u32).collect(),
            cycles_per_reference: if references > 0.0 { 1000.0 / references * base_cycles } else { f64::INFINITY },
            needed_share: needed_share.min(1.0),
            due_cycles: 0.0,
            busy_share,
            cycles_per_base_cycle: cycles_per_instr / base_cycles,
            busy_cycles_left: BUSY_CYCLES,
        }
    }

    /// Depth in the stack at which the next reference finds its line: the curve is the probability of a greater one.
    fn draw_depth(&mut self) -> usize {
        let misses = self.random.draw_unit() * self.profile.references_per_kilo_instr;
        let curve = &self.profile.curve;
        let upper = curve.partition_point(|point| point.misses_per_kilo_instr > misses);
        let Some(high) = curve.get(upper) else { return usize::MAX };
        let (low_bytes, low_misses) = match upper.checked_sub(1).and_then(|index| curve.get(index)) {
            Some(low) => (low.bytes, low.misses_per_kilo_instr),
            None => (0.0, self.profile.references_per_kilo_instr),
        };
        let share = ((low_misses - misses) / (low_misses - high.misses_per_kilo_instr).max(1e-12)).clamp(0.0, 1.0);
        ((low_bytes + share * (high.bytes - low_bytes)) / self.bytes_per_line) as usize
    }

    fn address(&self, line: u32) -> u64 {
        LINES_BASE + u64::from(line) * self.times.line_bytes
    }

    /// Emits a reference after the base cycles that are due; one instruction takes one cycle.
    fn emit_reference(&mut self, batch: &mut Vec<Access>) {
        let depth = self.draw_depth();
        let line = self.stack.use_line(depth);
        let address = self.address(line);
        self.emit_compute(batch);
        // Whether a line is written is a property of the line, so that the share of written fills is the profile's.
        let written = SplitMix64::scatter(u64::from(line)) as f64 / u64::MAX as f64;
        let is_written = written < self.profile.write_share;
        let is_needed = self.random.draw_unit() < self.needed_share;
        if is_written && !is_needed {
            batch.push(Access::store(address, 0));
            return;
        }
        batch.push(Access::load(address, 0));
        self.due_cycles -= 1.0;
        if is_needed {
            // The next load needs the value, and hits the first level. The base cycles contain the wait for a hit.
            batch.push(Access::dependent_load(address, 0));
            self.due_cycles -= self.times.hit_cycles + 1.0;
        }
        if is_written {
            batch.push(Access::store(address, 0));
            self.due_cycles -= 1.0;
        }
    }

    fn emit_compute(&mut self, batch: &mut Vec<Access>) {
        if self.due_cycles >= 1.0 {
            batch.push(Access::compute(self.due_cycles as u64));
            self.due_cycles -= libm::floor(self.due_cycles);
        }
    }
}

impl AccessSource for CurveProgram {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        if !self.untouched.is_empty() {
            // From the deepest line to the latest, so that the cache's order is the stack's.
            let kept = self.untouched.len().saturating_sub(1024);
            for line in self.untouched.split_off(kept).into_iter().rev() {
                batch.push(Access::load(self.address(line), 0));
            }
            return BatchEnd::More;
        }
        let mut base_cycles = 0.0;
        for _ in 0..BATCH_REFERENCES {
            // Exponential intervals: the references of a service are independent.
            let interval = -libm::log(1.0 - self.random.draw_unit()) * self.cycles_per_reference;
            let interval = interval.min(BUSY_CYCLES);
            self.due_cycles += interval;
            base_cycles += interval;
            if self.cycles_per_reference.is_finite() { self.emit_reference(batch) } else { self.emit_compute(batch) }
        }
        self.busy_cycles_left -= base_cycles * self.cycles_per_base_cycle;
        if self.busy_share >= 1.0 || self.busy_cycles_left > 0.0 {
            return BatchEnd::More;
        }
        // A busy period ends with a batch; the next one is shorter by the excess.
        let excess = -self.busy_cycles_left;
        let busy_cycles = BUSY_CYCLES * (0.5 + self.random.draw_unit());
        self.busy_cycles_left = busy_cycles - excess;
        let idle_cycles = busy_cycles * (1.0 - self.busy_share) / self.busy_share;
        BatchEnd::Sleep { ns: (idle_cycles / self.times.hertz * 1e9).max(1.0) as u64 }
    }

    fn progress(&self) -> Option<f64> {
        None
    }
}
