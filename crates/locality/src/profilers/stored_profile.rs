//! Uses profiles recorded in earlier runs as evidence about recognized tasks, until these are measured.
//!
//! Measurements of this run are better evidence, so a stored profile fills only missing facts. It is retained, and
//! fills them again after a phase change has cleared them. This profiler must come last.

use std::collections::BTreeMap;

use cachemate_core::{
    EvidenceKind, FactSource, Facts, Observation, Profile, Profiler, Profiles, TaskId,
};

use super::retain_live;

/// Fills the facts of a profile that were not measured, from stored profiles.
#[derive(Clone, Debug, Default)]
pub struct StoredProfileProfiler {
    stored_profiles: BTreeMap<TaskId, Profile>,
}

impl Profiler for StoredProfileProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("stored profiles", Some(EvidenceKind::StoredProfiles))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        retain_live(observation, profiles);
        for task in &observation.tasks {
            if let Some(profile) = &task.stored_profile {
                let mut stored_profile = profile.as_ref().clone();
                stored_profile.restamp(FactSource::StoredProfile, observation.window);
                self.stored_profiles.insert(task.task, stored_profile);
            }
        }
        self.stored_profiles
            .retain(|task, _| profiles.contains_key(task));
        for (task, stored) in &self.stored_profiles {
            if let Some(profile) = profiles.get_mut(task) {
                profile.fill_missing(stored);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{Fact, RateFacts};

    /// Does a stored profile fill only facts that were not measured, and again after a phase change?
    #[test]
    fn a_stored_profile_fills_absent_facts_only() {
        let (mut profiler, mut profiles) = (StoredProfileProfiler::default(), Profiles::new());
        let measured_fact = |value, source| Some(Fact::new(value, source, 0));
        let rates_with_pcmr = |pcmr| RateFacts {
            pcmr: measured_fact(pcmr, FactSource::CoRunRows),
            ..RateFacts::default()
        };
        let mut stored = Profile {
            phase_number: 9,
            ..Profile::default().with_rates(rates_with_pcmr(7.0))
        };
        stored.contention.intensity = measured_fact(0.3, FactSource::PrimeProbe);
        profiles.insert(
            TaskId(0),
            Profile::default().with_rates(rates_with_pcmr(1.0)),
        );
        let mut observation = idle_window(0, &[0, 1]);
        observation.tasks[0].stored_profile = Some(Box::new(stored));
        profiler.update(&observation, &mut profiles);
        let profile = &profiles[&TaskId(0)];
        assert_eq!(
            (profile.rates.pcmr.unwrap().value, profile.phase_number),
            (1.0, 0)
        );
        assert_eq!(
            profile.contention.intensity,
            measured_fact(0.3, FactSource::StoredProfile)
        );
        assert_eq!(profiles[&TaskId(1)], Profile::default());
        profiles.insert(
            TaskId(0),
            Profile {
                phase_number: 1,
                ..Profile::default()
            },
        );
        profiler.update(&idle_window(1, &[0, 1]), &mut profiles);
        let profile = &profiles[&TaskId(0)];
        assert_eq!(
            (profile.rates.pcmr.unwrap().value, profile.phase_number),
            (7.0, 1)
        );
        profiler.update(&idle_window(2, &[1]), &mut profiles);
        assert!(!profiles.contains_key(&TaskId(0)));
    }
}
