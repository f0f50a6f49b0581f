//! Curves of recurring phases: a curve measured in one phase applies to the next one of its kind (thesis 5.2).
//!
//! A change of phase clears the profile, and another measurement costs as much as the first. Kinds of phases are
//! identified by the accesses that reach the contended cache, which no plan changes. An undetected change of phase
//! shows in the curve: a curve that agreed with the counts and then contradicts them describes other work, and is
//! dropped until another one is measured. Properties: a measured curve replaces a recalled one; tasks that exited are
//! forgotten; without kinds, no curve is recalled; a curve that never agreed is not dropped, because its counts may be
//! of another sort. Phases that are too short to be followed are averaged ([`fast_phases`]).

pub mod fast_phases;

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{CacheLevel, Fact, FactSource, Profile, Profiles, SizeCurve, TaskId, View};

use fast_phases::{AVERAGED, FastPhaseAverages};

type LevelCurves = BTreeMap<CacheLevel, Fact<SizeCurve>>;

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct PhaseCurveCache {
    /// By task and kind of phase.
    curves: BTreeMap<(TaskId, u32), LevelCurves>,
    /// Times of measurement of the curves that agreed with counts, and of those that are dropped.
    agreed: BTreeMap<TaskId, u64>,
    dropped: BTreeMap<TaskId, u64>,
    /// Averages of tasks with short phases; `None` = no averaging.
    averages: Option<FastPhaseAverages>,
}

/// Time of the newest of these measurements.
fn measured_at(curves: &LevelCurves) -> Option<u64> {
    curves.values().map(|fact| fact.window).max()
}

/// A task's profile to be changed, in a copy of all profiles that is made at the first change.
fn profile_mut<'a>(recalled: &'a mut Option<Profiles>, view: &View<'_>, task: TaskId) -> Option<&'a mut Profile> {
    recalled.get_or_insert_with(|| view.profiles.clone()).get_mut(&task)
}

impl PhaseCurveCache {
    /// Averages programs whose phases are too short.
    pub fn averaging_fast_phases() -> Self {
        PhaseCurveCache { averages: Some(FastPhaseAverages::default()), ..PhaseCurveCache::default() }
    }

    /// Stores measured curves; returns the profiles with recalled ones, or `None` if there are none to recall.
    pub fn observe(&mut self, view: &View<'_>) -> Option<Profiles> {
        let present: BTreeSet<TaskId> = view.live_tasks().map(|seen| seen.task).collect();
        self.curves.retain(|(task, _), _| present.contains(task));
        self.agreed.retain(|task, _| present.contains(task));
        self.dropped.retain(|task, _| present.contains(task));
        if let Some(averages) = &mut self.averages {
            averages.observe(view);
        }
        let mut recalled: Option<Profiles> = None;
        for (&task, profile) in view.profiles.iter().filter(|(task, _)| present.contains(task)) {
            if let Some((number, curves)) = self.averages.as_ref().and_then(|averages| averages.averaged(task)) {
                if let Some(profile) = profile_mut(&mut recalled, view, task) {
                    profile.phase_number = number;
                    profile.phase.kind = Some(Fact::new(AVERAGED, FactSource::PhaseDetector, view.observation.window));
                    profile.locality.misses_per_kilo_instr = curves;
                }
                continue;
            }
            let measured = &profile.locality.misses_per_kilo_instr;
            if measured_at(measured).is_some_and(|at| self.dropped.get(&task) == Some(&at)) {
                if let Some(profile) = profile_mut(&mut recalled, view, task) {
                    profile.locality.misses_per_kilo_instr.clear();
                }
                continue;
            }
            let Some(kind) = profile.phase.kind.as_ref().map(|fact| fact.value) else { continue };
            let known = self.curves.get(&(task, kind));
            if !measured.is_empty() {
                if known != Some(measured) {
                    self.curves.insert((task, kind), measured.clone());
                }
            } else if let Some(known) = known
                && let Some(profile) = profile_mut(&mut recalled, view, task)
            {
                profile.locality.misses_per_kilo_instr = known.clone();
            }
        }
        recalled
    }

    /// Takes in whether counts contradict a task's curve; returns whether it is dropped.
    pub fn is_dropped(&mut self, task: TaskId, profile: &Profile, contradicted: bool) -> bool {
        let curves = &profile.locality.misses_per_kilo_instr;
        let is_whole = self.averages.as_ref().is_some_and(|averages| averages.contains(task));
        let Some(at) = measured_at(curves).filter(|_| !is_whole) else { return false };
        if !contradicted {
            self.agreed.insert(task, at);
            return false;
        }
        let drops = self.agreed.get(&task) == Some(&at);
        if drops {
            self.curves.retain(|(one, _), known| *one != task || known != curves);
            self.dropped.insert(task, at);
        }
        drops
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{NullPredictor, capabilities, observation, topology};
    use cachemate_core::{Estimate, FactSource, Plan, Profile, WindowLength};

    fn profile(kind: Option<u32>, misses: Option<f64>) -> Profile {
        let curve = |rate: f64| vec![(1 << 20, Estimate::exact(rate)), (2 << 20, Estimate::exact(0.5 * rate))];
        let mut profile = Profile::default();
        if let Some(rate) = misses {
            profile = profile.with_misses(CacheLevel::L3, curve(rate), FactSource::Oracle);
        }
        profile.phase.kind = kind.map(|kind| Fact::new(kind, FactSource::PhaseDetector, 0));
        profile
    }

    /// A window of one task with these profiles.
    pub fn with_view<T>(window: u64, profiles: &Profiles, look: impl FnOnce(&View<'_>) -> T) -> T {
        let (topology, capabilities) = (topology(2), capabilities(&[]));
        let (seen, plan) = (observation(window, 1), Plan::idle(WindowLength::Time { ns: 1 }));
        look(&View {
            topology: &topology,
            capabilities: &capabilities,
            observation: &seen,
            profiles,
            previous_plan: &plan,
            predictor: &NullPredictor,
        })
    }

    fn followed(recall: &mut PhaseCurveCache, profile: Profile) -> Option<Profiles> {
        let profiles: Profiles = [(TaskId(0), profile)].into();
        with_view(1, &profiles, |view| recall.observe(view))
    }

    /// Does a recurring phase have its curve at once, one of another kind none, and a measured one its own?
    #[test]
    fn a_recurring_phase_has_its_curve_at_once() {
        let mut recall = PhaseCurveCache::default();
        let mut follow = |profile: Profile| {
            let profiles = followed(&mut recall, profile)?;
            let curve = profiles[&TaskId(0)].misses_per_kilo_instr()?;
            Some(curve[0].1.value)
        };
        assert_eq!(follow(profile(Some(0), Some(8.0))), None, "it is measured");
        assert_eq!(follow(profile(Some(1), None)), None, "another kind");
        assert_eq!(follow(profile(None, None)), None, "its kind is unknown");
        assert_eq!(follow(profile(Some(0), None)), Some(8.0));
        assert_eq!(follow(profile(Some(0), Some(3.0))), None);
        assert_eq!(follow(profile(Some(0), None)), Some(3.0), "the last measured one");
    }

    /// Is a curve that agreed with counts dropped once they contradict it, until another one is measured?
    #[test]
    fn a_curve_that_counts_contradict_is_dropped() {
        let mut recall = PhaseCurveCache::default();
        let at = |window: u64| {
            let mut profile = profile(Some(0), Some(8.0));
            profile.locality.misses_per_kilo_instr.values_mut().for_each(|fact| fact.window = window);
            profile
        };
        let hides = |recall: &mut PhaseCurveCache, profile: Profile| {
            followed(recall, profile).is_some_and(|found| found[&TaskId(0)].misses_per_kilo_instr().is_none())
        };
        assert!(!recall.is_dropped(TaskId(0), &at(3), true), "it never agreed");
        assert!(!recall.is_dropped(TaskId(0), &at(3), false) && !hides(&mut recall, at(3)));
        assert!(recall.is_dropped(TaskId(0), &at(3), true) && hides(&mut recall, at(3)));
        assert!(!hides(&mut recall, profile(Some(0), None)), "nothing is recalled either");
        assert!(!hides(&mut recall, at(9)), "a new one");
    }
}
