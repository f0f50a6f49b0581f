//! Arrivals and exits of tasks: since when the tasks are the same, and how often that ends.

use cachemate_core::{TaskId, View};

/// Fewer changes do not determine a rate.
const MIN_CHANGES: u64 = 2;

/// The live tasks, and the rate at which tasks arrive, exit or change phase: a trial has to end in between.
#[derive(Clone, Debug, Default)]
pub struct TaskArrivals {
    tasks: Vec<TaskId>,
    /// Window since which the set of tasks has not changed.
    since: u64,
    first_window: Option<u64>,
    changes: u64,
}

impl TaskArrivals {
    /// Takes in a window; returns whether tasks arrived or exited.
    pub fn observe(&mut self, view: &View<'_>) -> bool {
        let live: Vec<TaskId> = view.live_tasks().map(|task| task.task).collect();
        let changed = self.tasks != live;
        if changed {
            match self.first_window {
                None => self.first_window = Some(view.observation.window),
                Some(_) => self.record_change(),
            }
            (self.tasks, self.since) = (live, view.observation.window);
        }
        changed
    }

    /// A task changed phase, which ends a trial like an arrival.
    pub fn record_change(&mut self) {
        self.changes += 1;
    }

    /// Windows for which the tasks have been the same.
    pub fn steady_windows(&self, now: u64) -> u64 {
        now.saturating_sub(self.since)
    }

    /// On average so far, are there at least this many windows between two changes?
    pub fn has_time_for(&self, windows: u32, now: u64) -> bool {
        let elapsed = now.saturating_sub(self.first_window.unwrap_or(now));
        self.changes < MIN_CHANGES || elapsed >= self.changes * u64::from(windows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{NullPredictor, capabilities, observation, topology};
    use cachemate_core::{Plan, Profiles, WindowLength};

    fn observe(arrivals: &mut TaskArrivals, window: u64, tasks: u32) -> bool {
        arrivals.observe(&View {
            topology: &topology(2),
            capabilities: &capabilities(&[]),
            observation: &observation(window, tasks),
            profiles: &Profiles::new(),
            previous_plan: &Plan::idle(WindowLength::Time { ns: 1 }),
            predictor: &NullPredictor,
            verdicts: &(),
        })
    }

    /// Does the rate of changes decide whether a trial has time, and is it unknown until two changes after the first
    /// tasks?
    #[test]
    fn a_trial_needs_time_between_changes() {
        let mut arrivals = TaskArrivals::default();
        assert!(observe(&mut arrivals, 1, 1) && !observe(&mut arrivals, 2, 1));
        assert!(observe(&mut arrivals, 5, 2));
        assert_eq!(arrivals.steady_windows(9), 4);
        assert!(arrivals.has_time_for(100, 9), "one change is no rate");
        assert!(observe(&mut arrivals, 11, 1));
        assert!(arrivals.has_time_for(5, 11) && !arrivals.has_time_for(6, 11));
    }
}
