//! Measures slowdowns beside a calibrated neighbor, for machines without a PMU.
//!
//! The slowdown of the neighbor measures how much the task slows others down; the task's own slowdown is its
//! sensitivity. CA 2.2.4 derives both from stack distances, whereas this profiler measures them. The task's rate is the
//! one that it reports, or an event that the machine declares as a proxy; without either, the profile has no
//! sensitivity.

use cachemate_core::{
    EvidenceKind, Fact, FactSource, Observation, ProbeEvidence, Profiler, Profiles,
};

use super::{PerTask, RunningStats, probe_evidence};

/// Fills `intensity` (the neighbor's run time over its solo run time, minus one) and `sensitivity` (the same for the
/// task), each averaged over the answers of the present phase.
#[derive(Clone, Debug, Default)]
pub struct CoRunSlowdownProfiler {
    tasks: PerTask<(RunningStats, RunningStats)>,
}

impl Profiler for CoRunSlowdownProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("co-run slowdown", Some(EvidenceKind::Neighbor))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        self.tasks.retain_current(observation, profiles);
        for evidence in probe_evidence(observation) {
            let ProbeEvidence::NeighborSlowdown {
                task,
                neighbor_alone_ns,
                neighbor_corun_ns: neighbor_beside_ns,
                task_alone_rate,
                task_corun_rate: task_beside_rate,
                ..
            } = evidence
            else {
                continue;
            };
            let to_fact = |estimate| {
                Fact::from_measurement(estimate, FactSource::Neighbor, observation.window)
            };
            let Some(((neighbor_slowdown, sensitivity), profile)) =
                self.tasks.find_profile(*task, profiles)
            else {
                continue;
            };
            let relative_slowdown = |slow_rate: f64, fast_rate: f64| {
                (fast_rate > 0.0 && slow_rate.is_finite()).then(|| slow_rate / fast_rate - 1.0)
            };
            if let Some(slowdown) = relative_slowdown(*neighbor_beside_ns, *neighbor_alone_ns) {
                neighbor_slowdown.add(slowdown);
                profile.contention.neighbor_slowdown = neighbor_slowdown.estimate().map(to_fact);
            }
            let rates = task_alone_rate.zip(*task_beside_rate);
            if let Some(slowdown) =
                rates.and_then(|(solo_rate, corun_rate)| relative_slowdown(solo_rate, corun_rate))
            {
                sensitivity.add(slowdown);
                profile.contention.sensitivity = sensitivity.estimate().map(to_fact);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{Neighbor, TaskId};

    /// Is each slowdown attributed to the right task, and is the task's own absent if it reports no rate?
    #[test]
    fn each_slowdown_is_attributed_to_the_right_task() {
        let (mut profiler, mut profiles) = (CoRunSlowdownProfiler::default(), Profiles::new());
        let neighbor_evidence = |task, rates: Option<(f64, f64)>| ProbeEvidence::NeighborSlowdown {
            task: TaskId(task),
            neighbor: Neighbor::Stream,
            neighbor_alone_ns: 100.0,
            neighbor_corun_ns: 150.0,
            task_alone_rate: rates.map(|(alone, _)| alone),
            task_corun_rate: rates.map(|(_, corun_rate)| corun_rate),
            rate_event: None,
        };
        let mut observation = idle_window(0, &[0, 1]);
        observation.probe_results = vec![
            complete_answer(0, neighbor_evidence(0, Some((10.0, 8.0)))),
            complete_answer(1, neighbor_evidence(1, None)),
        ];
        profiler.update(&observation, &mut profiles);
        assert!(
            (profiles[&TaskId(0)]
                .contention
                .neighbor_slowdown
                .unwrap()
                .value
                - 0.5)
                .abs()
                < 1e-12
        );
        assert!((profiles[&TaskId(0)].contention.sensitivity.unwrap().value - 0.25).abs() < 1e-12);
        assert_eq!(profiles[&TaskId(1)].contention.sensitivity, None);
        assert_eq!(
            profiles[&TaskId(0)].contention.intensity,
            None,
            "an evicted share is another measurement"
        );
    }
}
