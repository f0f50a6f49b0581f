//! Curves of phases that come back: what was measured in one phase holds in the next one of its kind (thesis 5.2).
//!
//! A change of phase wipes the profile, and another survey costs as much as the first. A task's kinds of phases are told
//! apart by what reaches the contended cache, which no plan changes. Properties: a curve that is measured replaces the
//! one that was recalled; tasks that are gone are forgotten; where kinds are not told nothing is recalled.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Curve, Fact, Level, Profiles, TaskId, View};

type Curves = BTreeMap<Level, Fact<Curve>>;

/// Curves by task and kind of phase.
#[derive(Clone, Debug, Default)]
pub struct Recall(BTreeMap<(TaskId, u32), Curves>);

impl Recall {
    /// Remembers what is known; the profiles with what is recalled, or `None` where that adds nothing.
    pub fn follow(&mut self, view: &View<'_>) -> Option<Profiles> {
        let present: BTreeSet<TaskId> = view.present().map(|seen| seen.task).collect();
        self.0.retain(|(task, _), _| present.contains(task));
        let mut recalled: Option<Profiles> = None;
        for (&task, profile) in view.profiles.iter().filter(|(task, _)| present.contains(task)) {
            let Some(kind) = profile.phase.kind.as_ref().map(|fact| fact.value) else { continue };
            let measured = &profile.locality.misses_per_kilo_instr;
            let known = self.0.get(&(task, kind));
            if !measured.is_empty() {
                if known != Some(measured) {
                    self.0.insert((task, kind), measured.clone());
                }
            } else if let Some(known) = known {
                let all = recalled.get_or_insert_with(|| view.profiles.clone());
                if let Some(profile) = all.get_mut(&task) {
                    profile.locality.misses_per_kilo_instr = known.clone();
                }
            }
        }
        recalled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_kit::{NoForecast, capabilities, observation, topology};
    use cachemate_core::{Estimate, FactSource, Plan, Profile, Window};

    fn profile(kind: Option<u32>, misses: Option<f64>) -> Profile {
        let curve = |rate: f64| vec![(1 << 20, Estimate::exact(rate)), (2 << 20, Estimate::exact(0.5 * rate))];
        let mut profile = Profile::default();
        if let Some(rate) = misses {
            profile = profile.with_misses(Level::L3, curve(rate), FactSource::Oracle);
        }
        profile.phase.kind = kind.map(|kind| Fact::new(kind, FactSource::PhaseDetector, 0));
        profile
    }

    /// Does a phase that comes back have its curve at once, one of another kind none, and a measured one its own?
    #[test]
    fn a_phase_that_comes_back_has_its_curve_at_once() {
        let (topology, capabilities) = (topology(2), capabilities(&[]));
        let (seen, plan) = (observation(1, 1), Plan::idle(Window::Time { ns: 1 }));
        let mut recall = Recall::default();
        let mut follow = |profile: Profile| {
            let profiles: Profiles = [(TaskId(0), profile)].into();
            let view = View {
                topology: &topology,
                capabilities: &capabilities,
                seen: &seen,
                profiles: &profiles,
                previous_plan: &plan,
                predictor: &NoForecast,
            };
            let found = recall.follow(&view)?;
            let curve = found[&TaskId(0)].misses_per_kilo_instr()?;
            Some(curve[0].1.value)
        };
        assert_eq!(follow(profile(Some(0), Some(8.0))), None, "it is measured");
        assert_eq!(follow(profile(Some(1), None)), None, "another kind");
        assert_eq!(follow(profile(None, None)), None, "no kind is told");
        assert_eq!(follow(profile(Some(0), None)), Some(8.0));
        assert_eq!(follow(profile(Some(0), Some(3.0))), None);
        assert_eq!(follow(profile(Some(0), None)), Some(3.0), "the last measured one");
    }
}
