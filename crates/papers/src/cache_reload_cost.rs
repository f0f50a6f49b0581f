//! Measures what it costs to load a task's data into the cache again, in misses.
//!
//! Problem: while a task waits, other tasks fill its share of the cache, and the task has to refill it when it returns.
//! The benefit of compatible co-runners shows only in later samples; the shorter a sample, the more the refill
//! outweighs it. Method: the cost is the number of misses in the first sample of a stay minus that in later samples,
//! both as running means of measurements.
//!
//! Properties: the rates of the task itself and of its co-runners cancel in the mean. Evidence of an earlier phase is
//! dropped. The cost is unknown until both kinds of samples have been measured; [`ReloadCosts::needs_second_sample`]
//! reports whether one more sample would suffice.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{TaskId, TaskSample};

/// Weight of the history in a running mean, in samples.
const MAX_HISTORY_SAMPLES: f64 = 8.0;

#[derive(Clone, Copy, Default)]
struct RunningMean {
    value: f64,
    sample_count: f64,
}

impl RunningMean {
    fn add(&mut self, value: f64) {
        self.sample_count = (self.sample_count + 1.0).min(MAX_HISTORY_SAMPLES);
        self.value += (value - self.value) / self.sample_count;
    }
    fn known_mean(&self) -> Option<f64> {
        (self.sample_count > 0.0).then_some(self.value)
    }
}

#[derive(Clone, Copy, Default)]
struct ResidencyCosts {
    consecutive_samples: u32,
    first_misses: RunningMean,
    later_misses: RunningMean,
}

/// Reload costs by task, including waiting tasks; exited tasks are dropped.
#[derive(Default)]
pub struct ReloadCosts(BTreeMap<TaskId, ResidencyCosts>);

impl ReloadCosts {
    /// Observes a window: its tasks, and the misses that were counted for each task. Only a task that ran for at least
    /// nine tenths of the window has a comparable sample.
    pub fn observe(
        &mut self,
        tasks: &[TaskSample],
        elapsed_ns: u64,
        counted_misses: &BTreeMap<TaskId, f64>,
    ) {
        let live_samples = || tasks.iter().filter(|task| !task.exited);
        let ids: BTreeSet<TaskId> = live_samples().map(|task| task.task).collect();
        self.0.retain(|id, _| ids.contains(id));

        for task in live_samples() {
            let residency = self.0.entry(task.task).or_default();
            let ran_ns = task.ran_ns();
            if ran_ns < elapsed_ns - elapsed_ns / 10 {
                residency.consecutive_samples = 0;
                continue;
            }

            residency.consecutive_samples += 1;
            let miss_mean = if residency.consecutive_samples == 1 {
                &mut residency.first_misses
            } else {
                &mut residency.later_misses
            };
            counted_misses
                .get(&task.task)
                .into_iter()
                .for_each(|misses| miss_mean.add(*misses));
        }
    }

    /// The number of additional misses if the task returns to the cache; `None` until measured.
    pub fn reload_misses(&self, task: TaskId) -> Option<f64> {
        let residency = self.0.get(&task)?;
        Some((residency.first_misses.known_mean()? - residency.later_misses.known_mean()?).max(0.0))
    }

    /// The number of misses per sample while the task stays; `None` until it has stayed for a second sample.
    pub fn misses_per_sample(&self, task: TaskId) -> Option<f64> {
        self.0.get(&task)?.later_misses.known_mean()
    }

    /// Whether the task has been measured only in the first sample of a stay, and that sample just ended.
    pub fn needs_second_sample(&self, task: TaskId) -> bool {
        self.0.get(&task).is_some_and(|residency| {
            residency.consecutive_samples == 1
                && residency.first_misses.known_mean().is_some()
                && residency.later_misses.known_mean().is_none()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{CpuId, ProcessId};

    const WINDOW_NS: u64 = 1_000;

    fn sample_of_run(ns: u64) -> TaskSample {
        TaskSample {
            on_cpu_ns: vec![(CpuId(0), ns)],
            ..TaskSample::new(TaskId(0), ProcessId(0))
        }
    }

    /// Is the cost the difference of the first and later samples, unknown before that, and independent of shortened
    /// samples?
    #[test]
    fn the_cost_is_the_first_sample_minus_later_ones() {
        let mut refills = ReloadCosts::default();
        let mut window = |ran_ns: u64, misses: Option<f64>| {
            refills.observe(
                &[sample_of_run(ran_ns)],
                WINDOW_NS,
                &misses
                    .map(|misses| (TaskId(0), misses))
                    .into_iter()
                    .collect(),
            );
            (
                refills.reload_misses(TaskId(0)),
                refills.needs_second_sample(TaskId(0)),
            )
        };
        assert_eq!(window(WINDOW_NS, Some(90.0)), (None, true));
        assert_eq!(
            window(WINDOW_NS, None),
            (None, false),
            "without counts, it is eventually dropped"
        );
        assert_eq!(window(WINDOW_NS, Some(20.0)), (Some(70.0), false));
        assert_eq!(window(0, None), (Some(70.0), false));
        assert_eq!(window(WINDOW_NS / 2, Some(1.0)), (Some(70.0), false));
        assert_eq!(window(WINDOW_NS, Some(110.0)), (Some(80.0), false));
        assert_eq!(
            window(WINDOW_NS, Some(400.0)),
            (Some(0.0), false),
            "never a reward"
        );
    }

    /// Is evidence dropped if the task has exited or entered a new phase?
    #[test]
    fn evidence_of_exited_tasks_and_old_phases_is_dropped() {
        let mut refills = ReloadCosts::default();
        for round in 0..100 {
            let extra = if round < 50 { 1_000.0 } else { 10.0 };
            for (ran_ns, misses) in [(WINDOW_NS, 5.0 + extra), (WINDOW_NS, 5.0), (0, 0.0)] {
                refills.observe(
                    &[sample_of_run(ran_ns)],
                    WINDOW_NS,
                    &BTreeMap::from([(TaskId(0), misses)]),
                );
            }
        }
        let now = refills.reload_misses(TaskId(0)).unwrap();
        assert!((10.0..13.0).contains(&now), "{now}");
        refills.observe(&[], WINDOW_NS, &BTreeMap::new());
        assert_eq!(refills.reload_misses(TaskId(0)), None);
    }
}
