//! Predicts the counts per super set in the next sample as those of the last one (AV 2.4: correct for 82 to 95 % of the
//! bits). [`crate::activity`] applies thresholds and overlap; the profile stores the raw counts.

use cachemate_core::{
    CacheLevel, EvidenceKind, Fact, FactSource, Observation, ProbeEvidence, Profiler, Profiles,
    SuperSetCount, TaskId,
};

use super::{probe_evidence, retain_live};

/// Fills `activity`, one level at a time.
#[derive(Clone, Debug, Default)]
pub struct ActivityProfiler;

impl Profiler for ActivityProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("activity vectors", Some(EvidenceKind::SuperSets))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        retain_live(observation, profiles);
        // A task that ran on several CPUs has one answer per context; together they form its sample.
        let mut samples: Vec<(TaskId, CacheLevel, Vec<SuperSetCount>)> = Vec::new();
        for evidence in probe_evidence(observation) {
            let ProbeEvidence::Activity {
                task,
                level,
                super_sets,
                ..
            } = evidence
            else {
                continue;
            };
            match samples.iter_mut().find(|(sampled_task, sampled_level, _)| {
                (sampled_task, sampled_level) == (task, level)
            }) {
                Some((_, _, sum)) if sum.len() == super_sets.len() => {
                    for (sum, addend) in sum.iter_mut().zip(super_sets) {
                        sum.accesses += addend.accesses;
                        sum.misses += addend.misses;
                    }
                }
                Some((_, _, sum)) => sum.clone_from(super_sets),
                None => samples.push((*task, *level, super_sets.clone())),
            }
        }
        for (task, level, super_sets) in samples {
            let Some(profile) = profiles.get_mut(&task) else {
                continue;
            };
            let fact = Fact::new(super_sets, FactSource::SuperSets, observation.window);
            profile.locality.activity.insert(level, fact);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::CpuId;

    fn activity(task: u32, cpu: u32, level: CacheLevel, accesses: [u64; 2]) -> ProbeEvidence {
        let super_sets = accesses
            .map(|accesses| SuperSetCount {
                accesses,
                misses: 1,
            })
            .to_vec();
        ProbeEvidence::Activity {
            task: TaskId(task),
            cpu: CpuId(cpu),
            level,
            super_sets,
        }
    }

    /// Does the last sample, summed over the contexts on which the task ran, replace the preceding one at each level?
    #[test]
    fn the_last_sample_replaces_the_preceding_one() {
        let (mut profiler, mut profiles) = (ActivityProfiler, Profiles::new());
        let mut observation = idle_window(0, &[0]);
        observation.probe_results = vec![
            complete_answer(0, activity(0, 0, CacheLevel::L2, [9, 9])),
            complete_answer(0, activity(0, 0, CacheLevel::L1Data, [5, 0])),
        ];
        profiler.update(&observation, &mut profiles);
        let mut next = idle_window(1, &[0]);
        next.probe_results = vec![
            complete_answer(0, activity(0, 0, CacheLevel::L2, [1, 2])),
            complete_answer(0, activity(0, 1, CacheLevel::L2, [10, 20])),
        ];
        profiler.update(&next, &mut profiles);
        let super_set_counts = |accesses: [u64; 2], misses| {
            accesses
                .map(|accesses| SuperSetCount { accesses, misses })
                .to_vec()
        };
        let activity = &profiles[&TaskId(0)].locality.activity;
        let facts: Vec<_> = activity
            .iter()
            .map(|(level, fact)| (*level, fact.value.clone(), fact.window))
            .collect();
        assert_eq!(
            facts,
            [
                (CacheLevel::L1Data, super_set_counts([5, 0], 1), 0),
                (CacheLevel::L2, super_set_counts([11, 22], 2), 1)
            ]
        );
    }
}
