//! Counters as a limited unit provides them: a few events at once, the others in turn.
//!
//! Instructions and cycles are always counted (the papers' machines have dedicated counters for them), and events that
//! the kernel counts itself use no counter. All other events share the remaining counters: groups of them take turns,
//! and each reading states the fraction of the task's time during which it counted. Every task has its own rotation,
//! which advances while it runs, as in the kernel. With a rotation of the whole machine, a task that runs in every
//! other turn would never count half of the groups. The simulated hardware counts everything; this module discards the
//! rest.

use cachemate_core::{CacheLevel, CounterEvent, EventCount, EventCounts, SamplerModel, StallCause};

use crate::hw::{TaskCounters, counted_events};
use crate::os::queues::Slot;

/// The rotation of the counted events for all tasks.
pub struct CounterMultiplexer {
    always: Vec<CounterEvent>,
    groups: Vec<Vec<CounterEvent>>,
    tasks: Vec<Meter>,
}

#[derive(Clone, Default)]
struct Meter {
    last_counters: TaskCounters,
    /// Index of the active group, and whether the task ran during its turn.
    active: usize,
    ran: bool,
    /// Counts in this window by group and event, and cycles for which each group was active.
    counts: Vec<Vec<u64>>,
    on_cycles: Vec<u64>,
    always: Vec<u64>,
    cycles: u64,
}

/// Only events of [`counted_events`] are requested.
const COUNTED: &str = "every event of the unit is one that tasks count";

fn is_software_event(event: &CounterEvent) -> bool {
    matches!(event, CounterEvent::ContextSwitches | CounterEvent::PageFaults | CounterEvent::SystemCalls)
}

impl CounterMultiplexer {
    /// Builds the rotation for `count` counters. Only an ideal unit attributes a miss to the task that caused it.
    pub fn new(levels: &[CacheLevel], count: u32, sampler: SamplerModel) -> Self {
        let is_countable =
            |event: &CounterEvent| sampler == SamplerModel::Ideal || !matches!(event, CounterEvent::InterTaskMisses(_));
        let countable_events: Vec<CounterEvent> = counted_events(levels).into_iter().filter(is_countable).collect();
        let is_fixed = |event: &CounterEvent| {
            is_software_event(event) || matches!(event, CounterEvent::Instructions | CounterEvent::Cycles)
        };
        let (always, mut turns): (Vec<CounterEvent>, Vec<CounterEvent>) =
            countable_events.into_iter().partition(is_fixed);
        // References and misses of one level belong together, because their ratio is needed.
        turns.sort_by_key(|event| match event {
            CounterEvent::References(level) => (0, *level as usize, 0),
            CounterEvent::Misses(level) => (0, *level as usize, 1),
            CounterEvent::InterTaskMisses(level) => (1, *level as usize, 0),
            CounterEvent::StallCycles(StallCause::Hit(level)) => (3, *level as usize, 0),
            CounterEvent::StallCycles(_) => (2, 0, 0),
            _ => (1, 0, 0),
        });
        let group_size = (count.saturating_sub(2)).max(1) as usize;
        let groups = turns.chunks(group_size).map(<[CounterEvent]>::to_vec).collect();
        CounterMultiplexer { always, groups, tasks: Vec::new() }
    }

    /// Returns whether groups take turns.
    pub fn is_multiplexed(&self) -> bool {
        self.groups.len() > 1
    }

    fn meter_of(&mut self, slot: Slot) -> &mut Meter {
        if self.tasks.len() <= slot {
            self.tasks.resize(slot + 1, Meter::default());
        }
        &mut self.tasks[slot]
    }

    /// Adds the task's counts since the last call to the active group.
    pub fn read(&mut self, slot: Slot, now: TaskCounters) {
        let (always, groups, active) = (self.always.clone(), self.groups.len(), self.meter_of(slot).active);
        let active_events: Vec<CounterEvent> = self.groups.get(active).cloned().unwrap_or_default();
        let meter = self.meter_of(slot);
        let since = now.subtract_earlier(&meter.last_counters);
        meter.ran |= since.ticks > 0;
        meter.counts.resize(groups, Vec::new());
        meter.on_cycles.resize(groups, 0);
        meter.always.resize(always.len(), 0);
        for (count, event) in meter.always.iter_mut().zip(&always) {
            *count += since.event_count(*event).expect(COUNTED);
        }
        if groups > 0 {
            meter.counts[active].resize(active_events.len(), 0);
            for (count, event) in meter.counts[active].iter_mut().zip(&active_events) {
                *count += since.event_count(*event).expect(COUNTED);
            }
            meter.on_cycles[active] += since.cycles();
        }
        meter.cycles += since.cycles();
        meter.last_counters = now;
    }

    /// Activates the next group of every task that has run since the last call.
    pub fn rotate_group(&mut self) {
        let groups = self.groups.len().max(1);
        for meter in self.tasks.iter_mut().filter(|meter| meter.ran) {
            (meter.active, meter.ran) = ((meter.active + 1) % groups, false);
        }
    }

    /// Returns the task's readings of the window that ends now. Events whose group was never active are left out.
    pub fn take_counts(&mut self, slot: Slot) -> EventCounts {
        let (always, groups) = (self.always.clone(), self.groups.clone());
        let meter = self.meter_of(slot);
        let mut readings: Vec<EventCount> = always
            .iter()
            .zip(&meter.always)
            .map(|(&event, &count)| EventCount { event, count, enabled_share: 1.0 })
            .collect();
        let total_cycles = meter.cycles.max(1) as f64;
        for ((events, counts), &on) in groups.iter().zip(&meter.counts).zip(&meter.on_cycles) {
            let counted_share = if meter.cycles == 0 { 1.0 } else { on as f64 / total_cycles };
            let counted = events.iter().zip(counts).filter(|_| counted_share > 0.0);
            readings.extend(counted.map(|(&event, &count)| EventCount { event, count, enabled_share: counted_share }));
        }
        readings.sort_by_key(|reading| reading.event);
        let (active, running) = (meter.active, meter.ran);
        *meter =
            Meter { last_counters: std::mem::take(&mut meter.last_counters), active, ran: running, ..Meter::default() };
        EventCounts(readings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task_counters(cycles: u64, misses: u64) -> TaskCounters {
        let mut counters =
            TaskCounters { ticks_per_cycle: 1, instructions: cycles, ticks: cycles, ..Default::default() };
        counters.levels[CacheLevel::L2 as usize].references = 10 * misses;
        counters.levels[CacheLevel::L2 as usize].misses[0] = misses;
        counters
    }

    /// Does a steady program give the same readings whether few counters take turns or enough counters need none?
    #[test]
    fn turns_are_scaled_back_by_their_share_and_enough_counters_need_none() {
        let levels = [CacheLevel::L1Data, CacheLevel::L2];
        for at_once in [3, 6, 64] {
            let mut counting = CounterMultiplexer::new(&levels, at_once, SamplerModel::Ideal);
            for step in 1..=1000 {
                counting.read(0, task_counters(step * 1000, step * 7));
                counting.rotate_group();
            }
            let counts = counting.take_counts(0);
            let misses = counts.get(CounterEvent::Misses(CacheLevel::L2)).unwrap();
            assert!((misses / 7000.0 - 1.0).abs() < 0.02, "{at_once}: {misses}");
            assert_eq!(counts.get(CounterEvent::Instructions), Some(1e6));
            let share = counts
                .0
                .iter()
                .find(|reading| reading.event == CounterEvent::Misses(CacheLevel::L2))
                .unwrap()
                .enabled_share;
            assert_eq!(share == 1.0, at_once == 64, "{at_once}: {share}");
            assert!(counts.0.is_sorted_by_key(|reading| reading.event));
        }
    }

    /// Is every event counted of a task that runs only in every other turn?
    #[test]
    fn a_task_in_step_with_the_turns_sees_every_event() {
        let levels = [CacheLevel::L1Data, CacheLevel::L2];
        let mut counting = CounterMultiplexer::new(&levels, 4, SamplerModel::Tagged);
        for step in 0..1000u64 {
            let run_time = step.div_ceil(2);
            counting.read(0, task_counters(run_time * 1000, run_time * 7));
            counting.rotate_group();
        }
        let events = counting.always.len() + counting.groups.iter().map(Vec::len).sum::<usize>();
        let counts = counting.take_counts(0);
        assert_eq!(counts.0.len(), events);
        assert!((counts.get(CounterEvent::Misses(CacheLevel::L2)).unwrap() / 3500.0 - 1.0).abs() < 0.02);
    }

    /// Is an event absent that was never counted in a window, and are evictions by task absent on a real unit?
    #[test]
    fn what_was_not_counted_is_absent() {
        let mut counting = CounterMultiplexer::new(&[CacheLevel::L2], 3, SamplerModel::Tagged);
        counting.read(0, task_counters(1000, 7));
        let counts = counting.take_counts(0);
        assert_eq!(counts.0.iter().filter(|reading| !is_software_event(&reading.event)).count(), 3);
        assert_eq!(counts.get(CounterEvent::InterTaskMisses(CacheLevel::L2)), None);
    }
}
