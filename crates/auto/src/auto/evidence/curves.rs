//! Curves that the counters contradict.
//!
//! An undetected change of phase shows in the curve: if a curve agreed with the counts and now contradicts them, it
//! describes other work. Such a curve is excluded until another one is measured, even if it is recalled later.
//! Properties: a curve that never agreed is not excluded, because its counts may be of another kind; averaged curves
//! are not, because every phase contradicts their mean; exited tasks are forgotten.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Profile, TaskId, View};
use cachemate_locality::profilers::AVERAGED;

/// Checks of curves against counts; see the module's documentation. Curves are identified by the windows of their
/// measurement.
#[derive(Clone, Debug, Default)]
pub struct CurveChecks {
    agreed_windows: BTreeMap<TaskId, u64>,
    contradicted_windows: BTreeMap<TaskId, BTreeSet<u64>>,
    /// Tasks whose present curve is excluded.
    excluded: BTreeSet<TaskId>,
}

/// The window in which the profile's curve was measured; `None` if it has no curve, or an average.
fn curve_window(profile: &Profile) -> Option<u64> {
    let is_average = profile
        .phase
        .kind
        .as_ref()
        .is_some_and(|kind| kind.value == AVERAGED);
    let newest_window = profile
        .locality
        .misses_per_kilo_instr
        .values()
        .map(|fact| fact.window)
        .max();
    newest_window.filter(|_| !is_average)
}

impl CurveChecks {
    /// Keeps only what was found about live tasks.
    pub fn retain(&mut self, live_tasks: &BTreeSet<TaskId>) {
        self.agreed_windows
            .retain(|task, _| live_tasks.contains(task));
        self.contradicted_windows
            .retain(|task, _| live_tasks.contains(task));
    }

    pub fn observe(&mut self, view: &View<'_>) {
        let is_contradicted = |task: &TaskId| {
            let window = view.profiles.get(task).and_then(curve_window);
            self.contradicted_windows
                .get(task)
                .zip(window)
                .is_some_and(|(windows, window)| windows.contains(&window))
        };
        self.excluded = self
            .contradicted_windows
            .keys()
            .copied()
            .filter(is_contradicted)
            .collect();
    }

    /// The profile of a task; `None` if the task has no profile or its curve is excluded.
    pub fn usable_profile<'v>(&self, view: &View<'v>, task: TaskId) -> Option<&'v Profile> {
        view.profiles
            .get(&task)
            .filter(|_| !self.excluded.contains(&task))
    }

    /// A curve that the counters have contradicted does not count.
    pub fn has_curve(&self, view: &View<'_>, task: TaskId) -> bool {
        self.usable_profile(view, task)
            .is_some_and(|profile| profile.misses_per_kilo_instr().is_some())
    }

    /// Records whether counts contradict a task's curve. Returns whether the curve is excluded from the next window
    /// on.
    pub fn record_check(&mut self, task: TaskId, profile: &Profile, is_contradicted: bool) -> bool {
        let Some(window) = curve_window(profile) else {
            return false;
        };
        if !is_contradicted {
            self.agreed_windows.insert(task, window);
            return false;
        }
        let has_agreed = self.agreed_windows.get(&task) == Some(&window);
        if has_agreed {
            self.contradicted_windows
                .entry(task)
                .or_default()
                .insert(window);
        }
        has_agreed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{
        NullPredictor, capabilities_fixture, observation_fixture, topology_fixture,
    };
    use cachemate_core::{CacheLevel, Estimate, Fact, FactSource, Plan, WindowLength};

    /// A profile whose curve was measured in this window, in a phase of this kind.
    fn profile_fixture(window: u64, kind: u32) -> Profile {
        let curve = vec![
            (1 << 20, Estimate::exact(8.0)),
            (2 << 20, Estimate::exact(4.0)),
        ];
        let mut profile = Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle);
        profile
            .locality
            .misses_per_kilo_instr
            .values_mut()
            .for_each(|fact| fact.window = window);
        profile.phase.kind = Some(Fact::new(kind, FactSource::PhaseDetector, 0));
        profile
    }

    /// Is the curve trusted in a window with this profile?
    fn is_trusted(checks: &mut CurveChecks, profile: &Profile) -> bool {
        let profiles = [(TaskId(0), profile.clone())].into();
        let view = View {
            topology: &topology_fixture(2),
            capabilities: &capabilities_fixture(&[]),
            observation: &observation_fixture(1, 1),
            profiles: &profiles,
            previous_plan: &Plan::idle(WindowLength::Time { ns: 1 }),
            predictor: &NullPredictor,
            verdicts: &(),
        };
        checks.observe(&view);
        checks.has_curve(&view, TaskId(0))
    }

    /// Is a curve that agreed with counts excluded once they contradict it, even if it is recalled, until another one
    /// is measured?
    #[test]
    fn a_contradicted_curve_is_excluded() {
        let mut checks = CurveChecks::default();
        let (first, second) = (profile_fixture(3, 0), profile_fixture(9, 0));
        assert!(
            !checks.record_check(TaskId(0), &first, true),
            "it never agreed"
        );
        assert!(!checks.record_check(TaskId(0), &first, false) && is_trusted(&mut checks, &first));
        assert!(checks.record_check(TaskId(0), &first, true) && !is_trusted(&mut checks, &first));
        assert!(is_trusted(&mut checks, &second), "another one");
        assert!(
            !checks.record_check(TaskId(0), &second, false)
                && checks.record_check(TaskId(0), &second, true)
        );
        assert!(
            !is_trusted(&mut checks, &second) && !is_trusted(&mut checks, &first),
            "recalled"
        );
        let average = profile_fixture(3, AVERAGED);
        assert!(
            is_trusted(&mut checks, &average) && !checks.record_check(TaskId(0), &average, true)
        );
    }
}
