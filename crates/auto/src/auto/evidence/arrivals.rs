//! Arrivals and exits of tasks: how long the set of tasks has been the same, and how often it changes.

use std::collections::VecDeque;

use cachemate_core::{TaskId, View};

/// Smallest number of changes that determines a rate.
const MIN_CHANGES: usize = 2;
/// Largest number of changes that determine the rate, so that churn at startup ages out.
const MAX_CHANGES: usize = 4;

/// The live tasks, and the rate at which tasks arrive, exit or change phase: a confirmation has to fit between two such
/// changes.
#[derive(Clone, Debug, Default)]
pub struct TaskArrivals {
    tasks: Vec<TaskId>,
    /// The window since which the set of tasks has not changed.
    last_change_window: u64,
    has_observed: bool,
    /// Windows of the latest changes.
    change_windows: VecDeque<u64>,
}

impl TaskArrivals {
    /// Observes a window. Returns whether tasks arrived or exited.
    pub fn observe(&mut self, view: &View<'_>) -> bool {
        let live_tasks: Vec<TaskId> = view.live_tasks().map(|task| task.task).collect();
        let has_changed = self.tasks != live_tasks;
        if has_changed {
            let window = view.observation.window;
            if std::mem::replace(&mut self.has_observed, true) {
                self.record_change(window);
            }
            (self.tasks, self.last_change_window) = (live_tasks, window);
        }
        has_changed
    }

    /// Records a change of phase, which interrupts a confirmation like an arrival.
    pub fn record_change(&mut self, window: u64) {
        if self.change_windows.len() == MAX_CHANGES {
            self.change_windows.pop_front();
        }
        self.change_windows.push_back(window);
    }

    pub fn unchanged_windows(&self, window: u64) -> u64 {
        window.saturating_sub(self.last_change_window)
    }

    /// Whether there were at least this many windows between two of the latest changes, on average; true if there were
    /// few changes.
    pub fn has_time_for(&self, windows: u32, window: u64) -> bool {
        let count = self.change_windows.len();
        let Some(first_change) = self.change_windows.front().filter(|_| count >= MIN_CHANGES)
        else {
            return true;
        };
        window.saturating_sub(*first_change) >= count as u64 * u64::from(windows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{
        NullPredictor, capabilities_fixture, observation_fixture, topology_fixture,
    };
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

    /// Does the rate of changes decide whether there is time for a confirmation, and is the rate unknown until two
    /// changes after the first tasks?
    #[test]
    fn a_confirmation_needs_time_between_changes() {
        let mut arrivals = TaskArrivals::default();
        assert!(observe(&mut arrivals, 1, 1) && !observe(&mut arrivals, 2, 1));
        assert!(observe(&mut arrivals, 5, 2));
        assert_eq!(arrivals.unchanged_windows(9), 4);
        assert!(arrivals.has_time_for(100, 9), "one change is no rate");
        assert!(observe(&mut arrivals, 11, 1));
        assert!(
            arrivals.has_time_for(3, 11) && !arrivals.has_time_for(4, 11),
            "6 windows for two changes"
        );
        (0..8).for_each(|window| arrivals.record_change(12 + window));
        assert!(
            !arrivals.has_time_for(2, 20) && arrivals.has_time_for(100, 416),
            "the start is forgotten"
        );
    }
}
