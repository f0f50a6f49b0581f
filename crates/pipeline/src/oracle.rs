//! A profiler that assigns profiles known in advance to tasks, in order of arrival.

use cachemate_core::{EvidenceKind, Facts, Observation, Profile, Profiler, Profiles, TaskId};

/// Fills in facts that were not measured, from the profiles in the run's header.
pub(crate) struct OracleProfiler {
    profiles: Vec<Profile>,
    /// Tasks in order of arrival.
    tasks_by_arrival: Vec<TaskId>,
}

impl OracleProfiler {
    /// Creates a profiler that assigns the first profile to the first task, the second to the second, and so on.
    pub(crate) fn new(profiles: Vec<Profile>) -> Self {
        OracleProfiler {
            profiles,
            tasks_by_arrival: Vec::new(),
        }
    }
}

impl Profiler for OracleProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("oracle", None)
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        for task in &observation.tasks {
            if !self.tasks_by_arrival.contains(&task.task) {
                self.tasks_by_arrival.push(task.task);
            }
        }
        let live_tasks = observation.live_tasks();
        profiles.retain(|task, _| live_tasks.contains(task));
        for (task, known_profile) in self
            .tasks_by_arrival
            .iter()
            .zip(&self.profiles)
            .filter(|(task, _)| live_tasks.contains(task))
        {
            profiles
                .entry(*task)
                .or_default()
                .fill_missing(known_profile);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::observation_fixture;
    use cachemate_core::{Fact, RateFacts};

    /// Does the second task to arrive get the second profile, and keep its own measurements?
    #[test]
    fn profiles_are_assigned_by_arrival_and_keep_measurements() {
        let profile_with = |pcmr, refs| {
            let (pcmr, llc_refs_per_mega_instr) =
                (Some(Fact::oracle(pcmr)), Some(Fact::oracle(refs)));
            Profile::default().with_rates(RateFacts {
                pcmr,
                llc_refs_per_mega_instr,
                ..RateFacts::default()
            })
        };
        let mut profiler =
            OracleProfiler::new(vec![profile_with(1.0, 10.0), profile_with(2.0, 20.0)]);
        let mut profiles = Profiles::new();
        let measured = RateFacts {
            pcmr: Some(Fact::oracle(9.0)),
            ..RateFacts::default()
        };
        profiles.insert(TaskId(1), Profile::default().with_rates(measured));
        profiler.update(&observation_fixture(0, 2), &mut profiles);

        let rates = |task| {
            let rates = &profiles[&TaskId(task)].rates;
            (
                rates.pcmr.map(|fact| fact.value),
                rates.llc_refs_per_mega_instr.map(|fact| fact.value),
            )
        };
        assert_eq!(
            (rates(0), rates(1)),
            ((Some(1.0), Some(10.0)), (Some(9.0), Some(20.0)))
        );
    }
}
