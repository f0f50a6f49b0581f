//! What it costs to bring a task in, in misses.
//!
//! Problem: a task that comes back finds its part of the cache full of other tasks' lines and fills it again. How well it gets along with
//! its co-runners shows in the samples after that; the shorter a sample, the more the filling outweighs them. Method: misses in the
//! first sample of a stay, less those in later ones, both as running means of what was measured. Properties: a task's own
//! rate and its co-runners drop out in the mean, a change of phase is forgotten; unknown until both kinds have been measured, and
//! [`ReloadCosts::needs_second_sample`] says that one sample more would do.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{TaskId, TaskSample};

/// Samples that a mean remembers.
const REMEMBERED: f64 = 8.0;

#[derive(Clone, Copy, Default)]
struct RunningMean {
    value: f64,
    samples: f64,
}

impl RunningMean {
    fn add(&mut self, value: f64) {
        self.samples = (self.samples + 1.0).min(REMEMBERED);
        self.value += (value - self.value) / self.samples;
    }
    fn known(&self) -> Option<f64> {
        (self.samples > 0.0).then_some(self.value)
    }
}

#[derive(Clone, Copy, Default)]
struct ResidencyCosts {
    samples_in_a_row: u32,
    first: RunningMean,
    later: RunningMean,
}

/// Per task; remembers tasks that wait, forgets those that are gone.
#[derive(Default)]
pub struct ReloadCosts(BTreeMap<TaskId, ResidencyCosts>);

impl ReloadCosts {
    /// Once a window, with the tasks seen and the misses counted in this window's sample, of those that have any.
    /// Only a task that ran all but a tenth of the window has a sample that compares.
    pub fn observe(&mut self, tasks: &[TaskSample], elapsed_ns: u64, counted: &BTreeMap<TaskId, f64>) {
        let present = || tasks.iter().filter(|task| !task.exited);
        let ids: BTreeSet<TaskId> = present().map(|task| task.task).collect();
        self.0.retain(|id, _| ids.contains(id));
        for task in present() {
            let stays = self.0.entry(task.task).or_default();
            let ran_ns = task.ran_ns();
            if ran_ns < elapsed_ns - elapsed_ns / 10 {
                stays.samples_in_a_row = 0;
                continue;
            }
            stays.samples_in_a_row += 1;
            let mean = if stays.samples_in_a_row == 1 { &mut stays.first } else { &mut stays.later };
            counted.get(&task.task).into_iter().for_each(|misses| mean.add(*misses));
        }
    }

    /// Misses that bringing the task in adds; `None` until they have been measured.
    pub fn misses(&self, task: TaskId) -> Option<f64> {
        let stays = self.0.get(&task)?;
        Some((stays.first.known()? - stays.later.known()?).max(0.0))
    }

    /// Misses in a sample while the task stays; `None` until it stayed.
    pub fn misses_per_sample(&self, task: TaskId) -> Option<f64> {
        self.0.get(&task)?.later.known()
    }

    /// Has the task been seen in the first sample of a stay only, which it just had?
    pub fn needs_second_sample(&self, task: TaskId) -> bool {
        self.0.get(&task).is_some_and(|stays| {
            stays.samples_in_a_row == 1 && stays.first.known().is_some() && stays.later.known().is_none()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{CpuId, ProcessId};

    const WINDOW_NS: u64 = 1_000;

    fn ran(ns: u64) -> TaskSample {
        TaskSample { on_cpu_ns: vec![(CpuId(0), ns)], ..TaskSample::new(TaskId(0), ProcessId(0)) }
    }

    /// Is the price the first sample of a stay less the later ones, unknown before, and blind to samples cut short?
    #[test]
    fn the_price_is_the_first_sample_less_later_ones() {
        let mut refills = ReloadCosts::default();
        let mut window = |ran_ns: u64, misses: Option<f64>| {
            refills.observe(&[ran(ran_ns)], WINDOW_NS, &misses.map(|misses| (TaskId(0), misses)).into_iter().collect());
            (refills.misses(TaskId(0)), refills.needs_second_sample(TaskId(0)))
        };
        assert_eq!(window(WINDOW_NS, Some(90.0)), (None, true));
        assert_eq!(window(WINDOW_NS, None), (None, false), "nothing counted: not held for ever");
        assert_eq!(window(WINDOW_NS, Some(20.0)), (Some(70.0), false));
        assert_eq!(window(0, None), (Some(70.0), false));
        assert_eq!(window(WINDOW_NS / 2, Some(1.0)), (Some(70.0), false));
        assert_eq!(window(WINDOW_NS, Some(110.0)), (Some(80.0), false));
        assert_eq!(window(WINDOW_NS, Some(400.0)), (Some(0.0), false), "never a reward");
    }

    /// Is a phase long gone forgotten, and a task that left?
    #[test]
    fn old_phases_and_tasks_are_forgotten() {
        let mut refills = ReloadCosts::default();
        for round in 0..100 {
            let extra = if round < 50 { 1_000.0 } else { 10.0 };
            for (ran_ns, misses) in [(WINDOW_NS, 5.0 + extra), (WINDOW_NS, 5.0), (0, 0.0)] {
                refills.observe(&[ran(ran_ns)], WINDOW_NS, &BTreeMap::from([(TaskId(0), misses)]));
            }
        }
        let now = refills.misses(TaskId(0)).unwrap();
        assert!((10.0..13.0).contains(&now), "{now}");
        refills.observe(&[], WINDOW_NS, &BTreeMap::new());
        assert_eq!(refills.misses(TaskId(0)), None);
    }
}
