//! Recalls the curves of recurring phases: a curve measured in one phase applies to the next phase of the same kind
//! (thesis 5.2).
//!
//! A phase change clears the profile, and another measurement would cost as much as the first. Kinds of phases are
//! identified by the accesses that reach the contended cache, which no plan changes. Properties: a measured curve
//! replaces a recalled one; exited tasks are forgotten; without kinds, no curve is recalled. Phases that are too short
//! to be followed are averaged ([`fast_phases`]).

mod fast_phases;

use std::collections::BTreeMap;

use cachemate_core::{
    CacheLevel, Fact, FactSource, Observation, Profile, ProfileRecall, Profiles, SizeCurve, TaskId,
};

use fast_phases::FastPhaseAverages;

pub use fast_phases::AVERAGED;

type LevelCurves = BTreeMap<CacheLevel, Fact<SizeCurve>>;

/// Restores the curves of recurring phases, as the last step of profiling for policies that follow phases.
#[derive(Clone, Debug, Default)]
pub struct PhaseCurveRecall {
    /// Last measured curves by task and kind of phase.
    curves: BTreeMap<(TaskId, u32), LevelCurves>,
    /// Averages of tasks with short phases; `None` disables averaging.
    averages: Option<FastPhaseAverages>,
}

/// `None` without measurements.
fn newest_window(curves: &LevelCurves) -> Option<u64> {
    curves.values().map(|fact| fact.window).max()
}

/// A mutable profile in a copy of all profiles, which is made at the first change; `None` if the task has no profile.
fn profile_mut<'a>(
    recalled_profiles: &'a mut Option<Profiles>,
    measured_profiles: &Profiles,
    task: TaskId,
) -> Option<&'a mut Profile> {
    recalled_profiles
        .get_or_insert_with(|| measured_profiles.clone())
        .get_mut(&task)
}

impl PhaseCurveRecall {
    /// Builds the step with averaging of programs whose phases are too short to be followed.
    pub fn with_fast_phase_average() -> Self {
        PhaseCurveRecall {
            averages: Some(FastPhaseAverages::default()),
            ..PhaseCurveRecall::default()
        }
    }
}

impl ProfileRecall for PhaseCurveRecall {
    fn recall(
        &mut self,
        observation: &Observation,
        measured_profiles: &Profiles,
    ) -> Option<Profiles> {
        let live_tasks = observation.live_tasks();
        self.curves.retain(|(task, _), _| live_tasks.contains(task));
        if let Some(averages) = &mut self.averages {
            averages.observe(observation.window, measured_profiles);
        }
        let mut recalled_profiles: Option<Profiles> = None;
        for (&task, profile) in measured_profiles
            .iter()
            .filter(|(task, _)| live_tasks.contains(task))
        {
            if let Some((number, curves)) = self
                .averages
                .as_ref()
                .and_then(|averages| averages.average_curves(task))
            {
                if let Some(profile) = profile_mut(&mut recalled_profiles, measured_profiles, task)
                {
                    profile.phase_number = number;
                    profile.phase.kind = Some(Fact::new(
                        AVERAGED,
                        FactSource::PhaseDetector,
                        observation.window,
                    ));
                    profile.locality.misses_per_kilo_instr = curves;
                }
                continue;
            }
            let Some(kind) = profile.phase.kind.as_ref().map(|fact| fact.value) else {
                continue;
            };
            let curves = &profile.locality.misses_per_kilo_instr;
            let stored_curves = self.curves.get(&(task, kind));
            if !curves.is_empty() {
                if stored_curves != Some(curves) {
                    self.curves.insert((task, kind), curves.clone());
                }
            } else if let Some(stored_curves) = stored_curves
                && let Some(profile) = profile_mut(&mut recalled_profiles, measured_profiles, task)
            {
                profile.locality.misses_per_kilo_instr = stored_curves.clone();
            }
        }
        recalled_profiles
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::Estimate;
    use cachemate_core::test_support::observation_fixture;

    fn profile_fixture(kind: Option<u32>, misses: Option<f64>) -> Profile {
        let curve = |rate: f64| {
            vec![
                (1 << 20, Estimate::exact(rate)),
                (2 << 20, Estimate::exact(0.5 * rate)),
            ]
        };
        let mut profile = Profile::default();
        if let Some(rate) = misses {
            profile = profile.with_misses(CacheLevel::L3, curve(rate), FactSource::Oracle);
        }
        profile.phase.kind = kind.map(|kind| Fact::new(kind, FactSource::PhaseDetector, 0));
        profile
    }

    fn recall_for(recall: &mut PhaseCurveRecall, profile: Profile) -> Option<Profiles> {
        recall.recall(&observation_fixture(1, 1), &[(TaskId(0), profile)].into())
    }

    /// Does a recurring phase get its curve at once, a phase of another kind none, and a phase with a measured curve
    /// its own?
    #[test]
    fn a_recurring_phase_has_its_curve_at_once() {
        let mut recall = PhaseCurveRecall::default();
        let mut recall_after = |profile: Profile| {
            let profiles = recall_for(&mut recall, profile)?;
            let curve = profiles[&TaskId(0)].misses_per_kilo_instr()?;
            Some(curve[0].1.value)
        };
        assert_eq!(
            recall_after(profile_fixture(Some(0), Some(8.0))),
            None,
            "it is measured"
        );
        assert_eq!(
            recall_after(profile_fixture(Some(1), None)),
            None,
            "another kind"
        );
        assert_eq!(
            recall_after(profile_fixture(None, None)),
            None,
            "its kind is unknown"
        );
        assert_eq!(recall_after(profile_fixture(Some(0), None)), Some(8.0));
        assert_eq!(recall_after(profile_fixture(Some(0), Some(3.0))), None);
        assert_eq!(
            recall_after(profile_fixture(Some(0), None)),
            Some(3.0),
            "the last measured one"
        );
    }
}
