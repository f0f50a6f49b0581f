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
    fixed_events: Vec<CounterEvent>,
    event_groups: Vec<Vec<CounterEvent>>,
    meters: Vec<TaskMeter>,
}

#[derive(Clone, Default)]
struct TaskMeter {
    last_counters: TaskCounters,
    /// Index of the active group, and whether the task ran during its turn.
    active_group: usize,
    has_run: bool,
    /// Counts in this window by group and event, and cycles for which each group was active.
    counts: Vec<Vec<u64>>,
    active_cycles: Vec<u64>,
    fixed_counts: Vec<u64>,
    window_cycles: u64,
}

/// Only events of [`counted_events`] are requested.
const EVENT_IS_COUNTED: &str = "every event of the unit is one that tasks count";

fn is_software_event(event: &CounterEvent) -> bool {
    matches!(
        event,
        CounterEvent::ContextSwitches | CounterEvent::PageFaults | CounterEvent::SystemCalls
    )
}

impl CounterMultiplexer {
    /// Builds the rotation for `count` counters. Only an ideal unit attributes a miss to the task that caused it.
    pub fn new(levels: &[CacheLevel], count: u32, sampler: SamplerModel) -> Self {
        let is_countable = |event: &CounterEvent| {
            sampler == SamplerModel::Ideal || !matches!(event, CounterEvent::InterTaskMisses(_))
        };
        let countable_events: Vec<CounterEvent> = counted_events(levels)
            .into_iter()
            .filter(is_countable)
            .collect();
        let is_fixed = |event: &CounterEvent| {
            is_software_event(event)
                || matches!(event, CounterEvent::Instructions | CounterEvent::Cycles)
        };
        let (fixed_events, mut rotated_events): (Vec<CounterEvent>, Vec<CounterEvent>) =
            countable_events.into_iter().partition(is_fixed);

        // References and misses of one level belong together, because their ratio is needed.
        rotated_events.sort_by_key(|event| match event {
            CounterEvent::References(level) => (0, *level as usize, 0),
            CounterEvent::Misses(level) => (0, *level as usize, 1),
            CounterEvent::InterTaskMisses(level) => (1, *level as usize, 0),
            CounterEvent::StallCycles(StallCause::Hit(level)) => (3, *level as usize, 0),
            CounterEvent::StallCycles(_) => (2, 0, 0),
            _ => (1, 0, 0),
        });

        let group_size = (count.saturating_sub(2)).max(1) as usize;
        let event_groups = rotated_events
            .chunks(group_size)
            .map(<[CounterEvent]>::to_vec)
            .collect();
        CounterMultiplexer {
            fixed_events,
            event_groups,
            meters: Vec::new(),
        }
    }

    /// Whether groups take turns, because there are more events than counters.
    pub fn is_multiplexed(&self) -> bool {
        self.event_groups.len() > 1
    }

    fn meter_mut(&mut self, slot: Slot) -> &mut TaskMeter {
        if self.meters.len() <= slot {
            self.meters.resize(slot + 1, TaskMeter::default());
        }
        &mut self.meters[slot]
    }

    /// Adds the task's counts since the last call to the active group.
    pub fn add_counts(&mut self, slot: Slot, counters: TaskCounters) {
        let (fixed_events, groups, active_group) = (
            self.fixed_events.clone(),
            self.event_groups.len(),
            self.meter_mut(slot).active_group,
        );
        let active_events: Vec<CounterEvent> = self
            .event_groups
            .get(active_group)
            .cloned()
            .unwrap_or_default();
        let meter = self.meter_mut(slot);
        let new_counts = counters.since(&meter.last_counters);
        meter.has_run |= new_counts.ticks > 0;
        meter.counts.resize(groups, Vec::new());
        meter.active_cycles.resize(groups, 0);
        meter.fixed_counts.resize(fixed_events.len(), 0);
        for (count, event) in meter.fixed_counts.iter_mut().zip(&fixed_events) {
            *count += new_counts.event_count(*event).expect(EVENT_IS_COUNTED);
        }
        if groups > 0 {
            meter.counts[active_group].resize(active_events.len(), 0);
            for (count, event) in meter.counts[active_group].iter_mut().zip(&active_events) {
                *count += new_counts.event_count(*event).expect(EVENT_IS_COUNTED);
            }
            meter.active_cycles[active_group] += new_counts.cycles();
        }
        meter.window_cycles += new_counts.cycles();
        meter.last_counters = counters;
    }

    /// Activates the next group of every task that has run since the last call.
    pub fn rotate_group(&mut self) {
        let groups = self.event_groups.len().max(1);
        for meter in self.meters.iter_mut().filter(|meter| meter.has_run) {
            (meter.active_group, meter.has_run) = ((meter.active_group + 1) % groups, false);
        }
    }

    /// Readings of the window that ends now. Events whose group was never active are left out.
    pub fn take_counts(&mut self, slot: Slot) -> EventCounts {
        let (fixed_events, groups) = (self.fixed_events.clone(), self.event_groups.clone());
        let meter = self.meter_mut(slot);
        let mut readings: Vec<EventCount> = fixed_events
            .iter()
            .zip(&meter.fixed_counts)
            .map(|(&event, &count)| EventCount {
                event,
                count,
                enabled_share: 1.0,
            })
            .collect();

        let total_cycles = meter.window_cycles.max(1) as f64;
        for ((events, counts), &active_cycles) in
            groups.iter().zip(&meter.counts).zip(&meter.active_cycles)
        {
            let counted_share = if meter.window_cycles == 0 {
                1.0
            } else {
                active_cycles as f64 / total_cycles
            };
            let counted_events = events.iter().zip(counts).filter(|_| counted_share > 0.0);
            readings.extend(counted_events.map(|(&event, &count)| EventCount {
                event,
                count,
                enabled_share: counted_share,
            }));
        }
        readings.sort_by_key(|reading| reading.event);

        let (active_group, has_run) = (meter.active_group, meter.has_run);
        *meter = TaskMeter {
            last_counters: std::mem::take(&mut meter.last_counters),
            active_group,
            has_run,
            ..TaskMeter::default()
        };
        EventCounts(readings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task_counters(cycles: u64, misses: u64) -> TaskCounters {
        let mut counters = TaskCounters {
            ticks_per_cycle: 1,
            instructions: cycles,
            ticks: cycles,
            ..Default::default()
        };
        counters.levels[CacheLevel::L2 as usize].references = 10 * misses;
        counters.levels[CacheLevel::L2 as usize].misses[0] = misses;
        counters
    }

    /// Does a steady program give the same readings whether few counters take turns or enough counters need none?
    #[test]
    fn few_counters_in_turns_give_the_readings_of_enough_counters() {
        let levels = [CacheLevel::L1Data, CacheLevel::L2];

        for at_once in [3, 6, 64] {
            let mut counting = CounterMultiplexer::new(&levels, at_once, SamplerModel::Ideal);
            for step in 1..=1000 {
                counting.add_counts(0, task_counters(step * 1000, step * 7));
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
    fn every_event_of_a_task_in_step_with_the_turns_is_counted() {
        let levels = [CacheLevel::L1Data, CacheLevel::L2];
        let mut counting = CounterMultiplexer::new(&levels, 4, SamplerModel::Tagged);
        for step in 0..1000u64 {
            let run_time = step.div_ceil(2);
            counting.add_counts(0, task_counters(run_time * 1000, run_time * 7));
            counting.rotate_group();
        }
        let events =
            counting.fixed_events.len() + counting.event_groups.iter().map(Vec::len).sum::<usize>();
        let counts = counting.take_counts(0);
        assert_eq!(counts.0.len(), events);
        assert!(
            (counts.get(CounterEvent::Misses(CacheLevel::L2)).unwrap() / 3500.0 - 1.0).abs() < 0.02
        );
    }

    /// Is an event absent that was never counted in a window, and are evictions by task absent on a real unit?
    #[test]
    fn an_event_never_counted_in_a_window_is_absent() {
        let mut counting = CounterMultiplexer::new(&[CacheLevel::L2], 3, SamplerModel::Tagged);
        counting.add_counts(0, task_counters(1000, 7));
        let counts = counting.take_counts(0);
        assert_eq!(
            counts
                .0
                .iter()
                .filter(|reading| !is_software_event(&reading.event))
                .count(),
            3
        );
        assert_eq!(
            counts.get(CounterEvent::InterTaskMisses(CacheLevel::L2)),
            None
        );
    }
}
