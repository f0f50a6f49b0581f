//! Arrivals and exits of tasks: how long the set of tasks has been the same, and how often it changes.

use cachemate_core::{TaskId, View};

/// Smallest number of changes that determines a rate.
const MIN_CHANGES: u64 = 2;

/// The live tasks, and the rate at which tasks arrive, exit or change phase: a trial has to fit between two such
/// changes.
#[derive(Clone, Debug, Default)]
pub struct TaskArrivals {
    tasks: Vec<TaskId>,
    /// The window since which the set of tasks has not changed.
    unchanged_since: u64,
    first_window: Option<u64>,
    changes: u64,
}

impl TaskArrivals {
    /// Observes a window. Returns whether tasks arrived or exited.
    pub fn observe(&mut self, view: &View<'_>) -> bool {
        let live: Vec<TaskId> = view.live_tasks().map(|task| task.task).collect();
        let has_changed = self.tasks != live;
        if has_changed {
            match self.first_window {
                None => self.first_window = Some(view.observation.window),
                Some(_) => self.record_change(),
            }
            (self.tasks, self.unchanged_since) = (live, view.observation.window);
        }
        has_changed
    }

    /// Records a change of phase, which ends a trial like an arrival.
    pub fn record_change(&mut self) {
        self.changes += 1;
    }

    /// Returns the number of windows for which the set of tasks has been the same.
    pub fn steady_windows(&self, now: u64) -> u64 {
        now.saturating_sub(self.unchanged_since)
    }

    /// Are there at least this many windows between two changes, on average so far?
    pub fn has_time_for(&self, windows: u32, now: u64) -> bool {
        let elapsed = now.saturating_sub(self.first_window.unwrap_or(now));
        self.changes < MIN_CHANGES || elapsed >= self.changes * u64::from(windows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{NullPredictor, capabilities_fixture, observation_fixture, topology_fixture};
    use cachemate_core::{Plan, Profiles, WindowLength};

    fn observe(arrivals: &mut TaskArrivals, window: u64, tasks: u32) -> bool {
        arrivals.observe(&View {
            topology: &topology_fixture(2),
            capabilities: &capabilities_fixture(&[]),
            observation: &observation_fixture(window, tasks),
            profiles: &Profiles::new(),
            previous_plan: &Plan::idle(WindowLength::Time { ns: 1 }),
            predictor: &NullPredictor,
            verdicts: &(),
        })
    }

    /// Does the rate of changes decide whether there is time for a trial, and is the rate unknown until two changes
    /// after the first tasks?
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
