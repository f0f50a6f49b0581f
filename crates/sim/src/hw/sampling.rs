//! The probes' responses to events: the trace register, sampled accesses, watched locations, super sets.
//!
//! There are three samplers. *Ideal* observes every event exactly. *Last address* is POWER5's register. Of misses close
//! together, it records only the first, because the exception of that miss flushes the others (RM 5.3.1). A prefetch
//! into the L1 raises an exception without writing the register, so that the last value is logged again. *Tagged*
//! (PEBS, IBS) follows one access through the machine, and records source, latency and physical line.

use cachemate_core::{AccessSample, CacheLevel, CoreModel, DataSource, PmuSpec, SamplerModel, TaskId};

use super::cache_unit::{DataOrigin, ROOT};
use super::caches::Caches;
use super::counters::{LevelCounts, TaskCounters};
use super::probe::{ActivityProbe, Overflow, Probes, draw_jitter};

#[derive(Clone, Copy)]
pub(crate) struct SamplingUnit {
    pub sampler: SamplerModel,
    pub interrupt_ticks: u64,
    /// Number of instructions after an exception within which misses are flushed with it; 0 in order.
    pub shadow: u64,
    pub hertz: u64,
    pub ticks_per_cycle: u64,
}

impl SamplingUnit {
    pub fn new(counters: &PmuSpec, pipeline: CoreModel, hertz: u64, ticks_per_cycle: u64) -> Self {
        let shadow = match pipeline {
            CoreModel::InOrder { .. } => 0,
            CoreModel::OutOfOrder { issue_width, .. } => u64::from(issue_width),
        };
        let interrupt_ticks = counters.interrupt_cycles * ticks_per_cycle;
        SamplingUnit { sampler: counters.sampler, interrupt_ticks, shadow, hertz, ticks_per_cycle }
    }

    fn nanoseconds(&self, ticks: u64) -> u64 {
        let per_second = u128::from(self.hertz) * u128::from(self.ticks_per_cycle);
        (u128::from(ticks) * 1_000_000_000 / per_second) as u64
    }
}

/// A miss of the L1 data cache.
pub(crate) struct Miss {
    pub virtual_address: u64,
    pub physical_address: u64,
    pub line_shift: u32,
    pub tick: u64,
    pub latency: u64,
    pub served: DataOrigin,
    /// Number of the instruction on its context.
    pub instruction: u64,
    /// False for stores that write through.
    pub traced: bool,
    pub dependent: bool,
    /// Number of lines that were prefetched into the L1 because of this miss.
    pub prefetches: u32,
}

/// The effect of a miss on the samplers.
pub(crate) struct SampleEffect {
    pub ticks: u64,
    pub full: bool,
}

impl Probes {
    /// Must every single access or fetched line be observed?
    pub(crate) fn is_watching_all(&self) -> bool {
        let first_level = |level: CacheLevel| level == CacheLevel::L1Data || level == CacheLevel::L1Instruction;
        self.watch.is_some() || self.activity.iter().any(|activity| first_level(activity.level))
    }

    /// Observes a data access, by virtual line.
    pub(crate) fn observe_access(&mut self, line: u64, tick: u64, set: u64, sets: u64, sampling: SamplingUnit) {
        if let Some(activity) = self.activity_at(CacheLevel::L1Data) {
            activity.count_access(set, sets, false);
        }
        if let Some(watch) = &mut self.watch {
            watch.touch(line >> watch.coarser, tick, |ticks| sampling.nanoseconds(ticks));
        }
    }

    /// Observes a fetched line of code, by virtual line.
    pub(crate) fn observe_code(&mut self, line: u64, tick: u64, sampling: SamplingUnit) {
        if let Some(watch) = &mut self.watch {
            watch.touch(line >> watch.coarser_code, tick, |ticks| sampling.nanoseconds(ticks));
        }
    }

    fn activity_at(&mut self, level: CacheLevel) -> Option<&mut ActivityProbe> {
        self.activity.iter_mut().find(|activity| activity.level == level)
    }

    /// Observes a line of code that the L1 had.
    pub(crate) fn observe_fetch(&mut self, set: u64, sets: u64) {
        if let Some(activity) = self.activity_at(CacheLevel::L1Instruction) {
            activity.count_access(set, sets, false);
        }
    }

    /// Counts a request that left the fast path, at every level whose counters it changed. `before` are the task's
    /// counters before it; references to the L1 data cache are counted by [`Probes::observe_access`].
    pub(crate) fn observe_path(
        &mut self,
        l1: usize,
        address: u64,
        before: &[LevelCounts],
        after: &[LevelCounts],
        caches: &Caches,
    ) {
        let mut cache_index = l1;
        while cache_index != ROOT && !self.activity.is_empty() {
            let unit = &caches.units[cache_index];
            let (before, after) = (&before[unit.level as usize], &after[unit.level as usize]);
            let missed = after.all_misses() > before.all_misses();
            let (set, sets) = (unit.store.set_of(address >> unit.line_shift), unit.store.all_sets());
            if let Some(activity) = self.activity_at(unit.level) {
                if unit.level == CacheLevel::L1Data {
                    if missed {
                        activity.record_miss(set, sets);
                    }
                } else if after.references > before.references {
                    activity.count_access(set, sets, missed);
                }
            }
            cache_index = unit.parent;
        }
    }

    pub(crate) fn observe_miss(&mut self, miss: &Miss, task: TaskId, sampling: SamplingUnit) -> SampleEffect {
        let mut effect = SampleEffect { ticks: 0, full: false };
        if miss.traced {
            self.trace_miss(miss, sampling, &mut effect);
        }
        self.sample_miss(miss, task, sampling, &mut effect);
        effect
    }

    fn trace_miss(&mut self, miss: &Miss, sampling: SamplingUnit, effect: &mut SampleEffect) {
        let Some(trace) = &mut self.trace else { return };
        let has_room = |trace: &super::probe::TraceProbe| trace.lines.len() < trace.max_entries as usize;
        if !has_room(trace) {
            return;
        }
        let line = miss.physical_address >> miss.line_shift;
        let last_address = sampling.sampler == SamplerModel::LastAddress;
        let in_shadow =
            trace.register.is_some() && is_in_shadow(miss.instruction, trace.last_instruction, sampling.shadow);
        if last_address && in_shadow && !miss.dependent {
            trace.count_lost_entry();
        } else {
            trace.log_line(line);
            (trace.register, trace.last_instruction) = (Some(line), miss.instruction);
            effect.ticks += sampling.interrupt_ticks;
        }
        effect.full |= !has_room(trace);
        self.trace_prefetches(miss.prefetches, sampling, effect);
    }

    /// Observes a code fetch that missed the L1, by physical line of the data cache's size.
    pub(crate) fn observe_code_miss(&mut self, line: u64, sampling: SamplingUnit) -> SampleEffect {
        let mut effect = SampleEffect { ticks: 0, full: false };
        let Some(trace) = self.trace.as_mut().filter(|trace| trace.code_too) else { return effect };
        if trace.lines.len() < trace.max_entries as usize {
            trace.code.push(trace.lines.len() as u32);
            trace.log_line(line);
            effect.ticks = sampling.interrupt_ticks;
            effect.full = trace.lines.len() == trace.max_entries as usize;
        }
        effect
    }

    /// Observes prefetches into the L1 that a first hit on a prefetched line caused: a stream continues without a miss.
    pub(crate) fn observe_prefetches(&mut self, prefetches: u32, sampling: SamplingUnit) -> SampleEffect {
        let mut effect = SampleEffect { ticks: 0, full: false };
        self.trace_prefetches(prefetches, sampling, &mut effect);
        effect
    }

    /// Records prefetches. Each counts as a miss and raises an exception, with the register unchanged (RM 5.3.1: up to
    /// 96 % of a log).
    fn trace_prefetches(&mut self, prefetches: u32, sampling: SamplingUnit, effect: &mut SampleEffect) {
        let Some(trace) = self.trace.as_mut().filter(|_| sampling.sampler == SamplerModel::LastAddress) else { return };
        let Some(register) = trace.register else { return };
        for _ in 0..prefetches {
            if trace.lines.len() < trace.max_entries as usize {
                trace.log_line(register);
                trace.stale += 1;
                effect.ticks += sampling.interrupt_ticks;
                effect.full |= trace.lines.len() == trace.max_entries as usize;
            }
        }
    }

    fn sample_miss(&mut self, miss: &Miss, task: TaskId, sampling: SamplingUnit, effect: &mut SampleEffect) {
        let Some(sample) = &mut self.samples else { return };
        let virtual_line = miss.virtual_address >> miss.line_shift;
        let last_address = sampling.sampler == SamplerModel::LastAddress;
        // The register continues to be written until the exception is taken.
        if let Some(armed) = sample.armed_at.take().filter(|_| last_address)
            && is_in_shadow(miss.instruction, armed, sampling.shadow)
            && let Some(last) = sample.samples.last_mut()
        {
            last.virtual_line = virtual_line;
        }
        if (sample.remote_only && miss.served != DataOrigin::RemoteCache) || sample.is_full() {
            return;
        }
        sample.events += 1;
        if sample.countdown == 0 {
            sample.countdown = draw_jitter(sample.one_in, u64::from(task.0) << 32 ^ sample.events);
        }
        sample.countdown -= 1;
        if sample.countdown > 0 {
            return;
        }
        let source = match miss.served {
            DataOrigin::Hit(level) => DataSource::Cache(level),
            DataOrigin::RemoteCache => DataSource::RemoteCache,
            DataOrigin::LocalMemory | DataOrigin::RemoteMemory => DataSource::Memory,
        };
        // The register holds only an address; the overflowing counter determines the kind of access.
        let is_reported = !last_address || sample.remote_only;
        let latency = (miss.latency / sampling.ticks_per_cycle).min(u64::from(u32::MAX)) as u32;
        sample.samples.push(AccessSample {
            task,
            virtual_line,
            physical_line: (!last_address).then(|| miss.physical_address >> miss.line_shift),
            source: if is_reported { source } else { DataSource::Unknown },
            latency_cycles: (!last_address).then_some(latency),
            at_ns: sampling.nanoseconds(miss.tick),
        });
        sample.armed_at = Some(miss.instruction);
        effect.ticks += sampling.interrupt_ticks;
        effect.full |= sample.is_full();
    }

    /// Has a count passed its next threshold? Sets the next thresholds.
    pub(crate) fn has_overflowed(&mut self, counters: &TaskCounters) -> bool {
        let mut overflowed = false;
        for overflow in &mut self.overflows {
            overflowed |= counters.event_count(overflow.event).is_some_and(|count| overflow.has_passed(count));
        }
        overflowed
    }
}

impl super::probe::TraceProbe {
    fn log_line(&mut self, line: u64) {
        self.lines.push(line);
        self.lost_since = 0;
        self.lost_after[0] += 1;
    }

    fn count_lost_entry(&mut self) {
        self.lost_misses += 1;
        let last_bucket = self.lost_after.len() - 1;
        if self.lost_since < last_bucket {
            self.lost_after[self.lost_since] -= 1;
            self.lost_since += 1;
            self.lost_after[self.lost_since] += 1;
        }
    }
}

impl Overflow {
    fn has_passed(&mut self, count: u64) -> bool {
        let period = self.period.max(1);
        if self.next_at == 0 {
            self.next_at = count + period;
        }
        if count < self.next_at {
            return false;
        }
        self.next_at += period * ((count - self.next_at) / period + 1);
        self.raised += 1;
        true
    }
}

/// Is the instruction at most `shadow` behind the earlier one? Numbers belong to a context, and the thread may have
/// changed its context since: a smaller number is from another context.
fn is_in_shadow(instruction: u64, earlier: u64, shadow: u64) -> bool {
    instruction.checked_sub(earlier).is_some_and(|distance| distance <= shadow)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a miss in the shadow of the preceding one only by numbers of the same context?
    #[test]
    fn a_smaller_number_is_another_contexts() {
        assert!(is_in_shadow(105, 100, 5) && is_in_shadow(100, 100, 0));
        assert!(!is_in_shadow(106, 100, 5) && !is_in_shadow(7, 100, 5));
    }
}
