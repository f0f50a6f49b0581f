//! The probes' responses to events: the trace register, sampled accesses, watched locations, super sets.
//!
//! There are three samplers. *Ideal* observes every event exactly. *Last address* is POWER5's register. Of misses close
//! together, it records only the first, because the exception of that miss flushes the others (RM 5.3.1). A prefetch
//! into the L1 raises an exception without writing the register, so that the last value is logged again. *Tagged*
//! (PEBS, IBS) follows one access through the machine, and records source, latency and physical line.

use cachemate_core::{
    AccessSample, CacheLevel, CoreModel, DataSource, PmuSpec, SamplerModel, TaskId,
};

use super::cache_unit::{DataOrigin, ROOT};
use super::caches::Caches;
use super::counters::{LevelCounts, TaskCounters};
use super::probe::{ActivityProbe, Overflow, Probes, draw_jitter};

#[derive(Clone, Copy)]
pub(crate) struct SamplingUnit {
    pub sampler: SamplerModel,
    pub interrupt_ticks: u64,
    /// Number of instructions after an exception within which misses are flushed with it; 0 in order.
    pub shadow_instr: u64,
    pub hertz: u64,
    pub ticks_per_cycle: u64,
}

impl SamplingUnit {
    pub fn new(counters: &PmuSpec, pipeline: CoreModel, hertz: u64, ticks_per_cycle: u64) -> Self {
        let shadow_instr = match pipeline {
            CoreModel::InOrder { .. } => 0,
            CoreModel::OutOfOrder { issue_width, .. } => u64::from(issue_width),
        };
        let interrupt_ticks = counters.interrupt_cycles * ticks_per_cycle;
        SamplingUnit {
            sampler: counters.sampler,
            interrupt_ticks,
            shadow_instr,
            hertz,
            ticks_per_cycle,
        }
    }

    fn to_nanoseconds(self, ticks: u64) -> u64 {
        let per_second = u128::from(self.hertz) * u128::from(self.ticks_per_cycle);
        (u128::from(ticks) * 1_000_000_000 / per_second) as u64
    }
}

/// A miss of the L1 data cache.
pub(crate) struct ObservedMiss {
    pub virtual_address: u64,
    pub physical_address: u64,
    pub line_shift: u32,
    pub tick: u64,
    pub latency_ticks: u64,
    pub origin: DataOrigin,
    /// Number of the instruction on its context.
    pub instruction: u64,
    /// Whether the miss is logged; false for stores that write through.
    pub is_traced: bool,
    pub is_dependent: bool,
    /// Number of lines that were prefetched into the L1 because of this miss.
    pub l1_prefetches: u32,
}

/// The effect of a miss on the samplers.
pub(crate) struct SampleEffect {
    pub ticks: u64,
    pub is_full: bool,
}

impl Probes {
    /// Whether the probes must observe every single access and fetched line.
    pub(crate) fn must_observe_all(&self) -> bool {
        let is_first_level =
            |level: CacheLevel| level == CacheLevel::L1Data || level == CacheLevel::L1Instruction;
        self.watch.is_some()
            || self
                .activity
                .iter()
                .any(|activity| is_first_level(activity.level))
    }

    /// Observes a data access, by virtual line.
    pub(crate) fn observe_access(
        &mut self,
        line: u64,
        tick: u64,
        set: u64,
        set_count: u64,
        sampling: SamplingUnit,
    ) {
        if let Some(activity) = self.activity_at_mut(CacheLevel::L1Data) {
            activity.count_access(set, set_count, false);
        }
        if let Some(watch) = &mut self.watch {
            watch.touch(line >> watch.data_line_doublings, tick, |ticks| {
                sampling.to_nanoseconds(ticks)
            });
        }
    }

    /// Observes a fetched line of code, by virtual line.
    pub(crate) fn observe_code(&mut self, line: u64, tick: u64, sampling: SamplingUnit) {
        if let Some(watch) = &mut self.watch {
            watch.touch(line >> watch.code_line_doublings, tick, |ticks| {
                sampling.to_nanoseconds(ticks)
            });
        }
    }

    fn activity_at_mut(&mut self, level: CacheLevel) -> Option<&mut ActivityProbe> {
        self.activity
            .iter_mut()
            .find(|activity| activity.level == level)
    }

    /// Observes a line of code that the L1 had.
    pub(crate) fn observe_fetch(&mut self, set: u64, set_count: u64) {
        if let Some(activity) = self.activity_at_mut(CacheLevel::L1Instruction) {
            activity.count_access(set, set_count, false);
        }
    }

    /// Counts a request that left the fast path, at every level whose counters it changed. `counts_before` are the
    /// task's counters before it; references to the L1 data cache are counted by [`Probes::observe_access`].
    pub(crate) fn observe_path(
        &mut self,
        l1: usize,
        address: u64,
        counts_before: &[LevelCounts],
        counts_after: &[LevelCounts],
        caches: &Caches,
    ) {
        let mut cache_index = l1;
        while cache_index != ROOT && !self.activity.is_empty() {
            let unit = &caches.units[cache_index];
            let (counts_before, counts_after) = (
                &counts_before[unit.level as usize],
                &counts_after[unit.level as usize],
            );
            let has_missed = counts_after.all_misses() > counts_before.all_misses();
            let (set, set_count) = (
                unit.store.set_of(address >> unit.line_shift),
                unit.store.total_sets(),
            );
            if let Some(activity) = self.activity_at_mut(unit.level) {
                if unit.level == CacheLevel::L1Data {
                    if has_missed {
                        activity.record_miss(set, set_count);
                    }
                } else if counts_after.references > counts_before.references {
                    activity.count_access(set, set_count, has_missed);
                }
            }
            cache_index = unit.parent;
        }
    }

    pub(crate) fn observe_miss(
        &mut self,
        miss: &ObservedMiss,
        task: TaskId,
        sampling: SamplingUnit,
    ) -> SampleEffect {
        let mut effect = SampleEffect {
            ticks: 0,
            is_full: false,
        };
        if miss.is_traced {
            self.trace_miss(miss, sampling, &mut effect);
        }
        self.sample_miss(miss, task, sampling, &mut effect);
        effect
    }

    fn trace_miss(
        &mut self,
        miss: &ObservedMiss,
        sampling: SamplingUnit,
        effect: &mut SampleEffect,
    ) {
        let Some(trace) = &mut self.trace else { return };
        let has_room =
            |trace: &super::probe::TraceProbe| trace.lines.len() < trace.max_entries as usize;
        if !has_room(trace) {
            return;
        }
        let line = miss.physical_address >> miss.line_shift;
        let is_last_address = sampling.sampler == SamplerModel::LastAddress;
        let is_shadowed = trace.last_address.is_some()
            && is_in_shadow(
                miss.instruction,
                trace.last_instruction,
                sampling.shadow_instr,
            );
        if is_last_address && is_shadowed && !miss.is_dependent {
            trace.count_lost_entry();
        } else {
            trace.log_entry(line);
            (trace.last_address, trace.last_instruction) = (Some(line), miss.instruction);
            effect.ticks += sampling.interrupt_ticks;
        }
        effect.is_full |= !has_room(trace);
        self.trace_prefetches(miss.l1_prefetches, sampling, effect);
    }

    /// Observes a code fetch that missed the L1, by physical line of the data cache's size.
    pub(crate) fn observe_code_miss(&mut self, line: u64, sampling: SamplingUnit) -> SampleEffect {
        let mut effect = SampleEffect {
            ticks: 0,
            is_full: false,
        };
        let Some(trace) = self.trace.as_mut().filter(|trace| trace.logs_code) else {
            return effect;
        };
        if trace.lines.len() < trace.max_entries as usize {
            trace.code_positions.push(trace.lines.len() as u32);
            trace.log_entry(line);
            effect.ticks = sampling.interrupt_ticks;
            effect.is_full = trace.lines.len() == trace.max_entries as usize;
        }
        effect
    }

    /// Observes prefetches into the L1 that a first hit on a prefetched line caused: a stream continues without a miss.
    pub(crate) fn observe_prefetches(
        &mut self,
        prefetch_count: u32,
        sampling: SamplingUnit,
    ) -> SampleEffect {
        let mut effect = SampleEffect {
            ticks: 0,
            is_full: false,
        };
        self.trace_prefetches(prefetch_count, sampling, &mut effect);
        effect
    }

    /// Records prefetches. Each counts as a miss and raises an exception, with the register unchanged (RM 5.3.1: up to
    /// 96 % of a log).
    fn trace_prefetches(
        &mut self,
        prefetch_count: u32,
        sampling: SamplingUnit,
        effect: &mut SampleEffect,
    ) {
        let Some(trace) = self
            .trace
            .as_mut()
            .filter(|_| sampling.sampler == SamplerModel::LastAddress)
        else {
            return;
        };
        let Some(register) = trace.last_address else {
            return;
        };

        for _ in 0..prefetch_count {
            if trace.lines.len() < trace.max_entries as usize {
                trace.log_entry(register);
                trace.stale_entries += 1;
                effect.ticks += sampling.interrupt_ticks;
                effect.is_full |= trace.lines.len() == trace.max_entries as usize;
            }
        }
    }

    fn sample_miss(
        &mut self,
        miss: &ObservedMiss,
        task: TaskId,
        sampling: SamplingUnit,
        effect: &mut SampleEffect,
    ) {
        let Some(probe) = &mut self.samples else {
            return;
        };

        let virtual_line = miss.virtual_address >> miss.line_shift;
        let is_last_address = sampling.sampler == SamplerModel::LastAddress;
        // The register continues to be written until the exception is taken.
        if let Some(armed_instruction) = probe.armed_instruction.take().filter(|_| is_last_address)
            && is_in_shadow(miss.instruction, armed_instruction, sampling.shadow_instr)
            && let Some(last_sample) = probe.samples.last_mut()
        {
            last_sample.virtual_line = virtual_line;
        }

        if (probe.counts_remote_only && miss.origin != DataOrigin::RemoteCache) || probe.is_full() {
            return;
        }
        probe.event_count += 1;
        if probe.countdown == 0 {
            probe.countdown = draw_jitter(
                probe.sample_period,
                u64::from(task.0) << 32 ^ probe.event_count,
            );
        }
        probe.countdown -= 1;
        if probe.countdown > 0 {
            return;
        }
        let source = match miss.origin {
            DataOrigin::Hit(level) => DataSource::Cache(level),
            DataOrigin::RemoteCache => DataSource::RemoteCache,
            DataOrigin::LocalMemory | DataOrigin::RemoteMemory => DataSource::Memory,
        };
        // The register holds only an address; the overflowing counter determines the kind of access.
        let is_reported = !is_last_address || probe.counts_remote_only;
        let latency =
            (miss.latency_ticks / sampling.ticks_per_cycle).min(u64::from(u32::MAX)) as u32;
        probe.samples.push(AccessSample {
            task,
            virtual_line,
            physical_line: (!is_last_address).then(|| miss.physical_address >> miss.line_shift),
            source: if is_reported {
                source
            } else {
                DataSource::Unknown
            },
            latency_cycles: (!is_last_address).then_some(latency),
            at_ns: sampling.to_nanoseconds(miss.tick),
        });
        probe.armed_instruction = Some(miss.instruction);
        effect.ticks += sampling.interrupt_ticks;
        effect.is_full |= probe.is_full();
    }

    /// Advances every threshold that its count has passed. Returns whether there was one.
    pub(crate) fn advance_overflows(&mut self, counters: &TaskCounters) -> bool {
        let mut has_overflowed = false;
        for overflow in &mut self.overflows {
            has_overflowed |= counters
                .event_count(overflow.event)
                .is_some_and(|count| overflow.advance_past(count));
        }
        has_overflowed
    }
}

impl super::probe::TraceProbe {
    fn log_entry(&mut self, line: u64) {
        self.lines.push(line);
        self.lost_since_last_entry = 0;
        self.entries_by_lost_count[0] += 1;
    }

    fn count_lost_entry(&mut self) {
        self.lost_misses += 1;
        let last_bucket = self.entries_by_lost_count.len() - 1;
        if self.lost_since_last_entry < last_bucket {
            self.entries_by_lost_count[self.lost_since_last_entry] -= 1;
            self.lost_since_last_entry += 1;
            self.entries_by_lost_count[self.lost_since_last_entry] += 1;
        }
    }
}

impl Overflow {
    fn advance_past(&mut self, count: u64) -> bool {
        let period = self.threshold_step.max(1);
        if self.next_threshold == 0 {
            self.next_threshold = count + period;
        }
        if count < self.next_threshold {
            return false;
        }
        self.next_threshold += period * ((count - self.next_threshold) / period + 1);
        self.interrupt_count += 1;
        true
    }
}

/// Whether the instruction is at most `max_distance` behind the earlier one. Numbers belong to a
/// context: a smaller number is from another context, on which the thread ran after the earlier
/// instruction.
fn is_in_shadow(instruction: u64, earlier_instruction: u64, max_distance: u64) -> bool {
    instruction
        .checked_sub(earlier_instruction)
        .is_some_and(|distance| distance <= max_distance)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a miss in the shadow of the preceding one only by numbers of the same context?
    #[test]
    fn a_miss_is_shadowed_only_by_the_same_contexts_numbers() {
        assert!(is_in_shadow(105, 100, 5) && is_in_shadow(100, 100, 0));
        assert!(!is_in_shadow(106, 100, 5) && !is_in_shadow(7, 100, 5));
    }
}
