//! Estimates intensity from evicted lines, for machines without a PMU: the probe fills lines, waits, and reloads them,
//! with and without the task beside it.
//!
//! Raw samples alternate between the task running beside the probe and the task kept off its CPU. The papers have no
//! such probe, because their machines have counters. A sample counts only if the ping-pongs before and after it show
//! that both CPUs share a cache: virtual CPUs may migrate, and a task on another cache evicts nothing. The result is
//! the difference of the two 20 % trimmed means, so evictions by all other tasks cancel; it may be negative by chance,
//! and its interval holds 95 % by the spread of both sides.

use cachemate_core::{
    Estimate, EvidenceKind, Fact, FactSource, Observation, PrimeProbeSample, ProbeEvidence,
    Profiler, Profiles, student_bound,
};

use super::{PerTask, RunningStats, probe_evidence};

/// Fills `intensity`: the share of the probe's lines that the task evicts during one wait, up to 1.
#[derive(Clone, Debug)]
pub struct PrimeProbeProfiler {
    /// Ping-pong round trips shorter than this are within one cache.
    pub max_shared_ns: f64,
    tasks: PerTask<EvictedShares>,
}

/// Shares of the probe's lines that were evicted with the task beside it, and without.
#[derive(Clone, Debug, Default)]
struct EvictedShares {
    running_shares: Vec<f64>,
    idle_shares: Vec<f64>,
    intensity: Option<Fact<f64>>,
}

/// Minimum number of samples on either side for an intensity.
pub const MIN_EVICTED_SAMPLES: usize = 4;
/// Number of samples kept; older ones are dropped.
const MAX_SAMPLES: usize = 200;

impl Default for PrimeProbeProfiler {
    fn default() -> Self {
        PrimeProbeProfiler {
            max_shared_ns: 160.0,
            tasks: PerTask::default(),
        }
    }
}

impl PrimeProbeProfiler {
    fn is_counted(&self, sample: &PrimeProbeSample) -> bool {
        let is_shared = |(ns_before, ns_after): (f64, f64)| {
            ns_before < self.max_shared_ns && ns_after < self.max_shared_ns
        };
        sample.reloads > 0 && sample.round_trips_ns.is_some_and(is_shared)
    }
}

impl Profiler for PrimeProbeProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("Prime+Probe", Some(EvidenceKind::PrimeProbe))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        self.tasks.retain_current(observation, profiles);
        for evidence in probe_evidence(observation) {
            let ProbeEvidence::PrimeProbe { task, samples, .. } = evidence else {
                continue;
            };
            let counted_samples: Vec<&PrimeProbeSample> = samples
                .iter()
                .filter(|sample| self.is_counted(sample))
                .collect();
            let Some((shares, _)) = self.tasks.find_profile(*task, profiles) else {
                continue;
            };
            for sample in counted_samples {
                let share = f64::from(sample.evicted) / f64::from(sample.reloads);
                let side = if sample.target_running {
                    &mut shares.running_shares
                } else {
                    &mut shares.idle_shares
                };
                side.push(share);
                if side.len() > MAX_SAMPLES {
                    side.remove(0);
                }
            }
            if shares.running_shares.len().min(shares.idle_shares.len()) >= MIN_EVICTED_SAMPLES {
                let difference = estimate_difference(&shares.running_shares, &shares.idle_shares);
                shares.intensity = difference.map(|share| {
                    Fact::from_measurement(share, FactSource::PrimeProbe, observation.window)
                });
            }
        }
        for (task, (_, shares)) in &self.tasks.states {
            if let (Some(intensity), Some(profile)) = (shares.intensity, profiles.get_mut(task)) {
                profile.contention.intensity = Some(intensity);
            }
        }
    }
}

fn estimate_difference(running_shares: &[f64], idle_shares: &[f64]) -> Option<Estimate> {
    let running_mean = trimmed_estimate(running_shares)?;
    let idle_mean = trimmed_estimate(idle_shares)?;
    let value = running_mean.value - idle_mean.value;
    let running_error = running_mean.high - running_mean.value;
    let idle_error = idle_mean.high - idle_mean.value;
    let error = libm::sqrt(running_error * running_error + idle_error * idle_error);
    Some(Estimate {
        value,
        low: value - error,
        high: value + error,
    })
}

/// The 20 % trimmed mean, which omits the lowest and the highest fifth of the values, with an interval that holds it in
/// 95 of 100 cases. The spread of the kept values alone would be too small, so it is that of all values with each
/// omitted one replaced by the nearest kept one (Yuen, Biometrika 61, 1974). `None` if fewer than two values are kept.
fn trimmed_estimate(values: &[f64]) -> Option<Estimate> {
    let mut sorted_values = values.to_vec();
    sorted_values.sort_by(f64::total_cmp);
    let trimmed_per_side = sorted_values.len() / 5;
    let kept_values = &sorted_values[trimmed_per_side..sorted_values.len() - trimmed_per_side];
    let [lowest, .., highest] = *kept_values else {
        return None;
    };

    let mut winsorized = RunningStats::default();
    for value in &sorted_values {
        winsorized.add(value.clamp(lowest, highest));
    }
    let kept_count = kept_values.len() as f64;
    let value = kept_values.iter().sum::<f64>() / kept_count;
    let variance = winsorized.squared_deviations / (kept_count * (kept_count - 1.0));
    let error = student_bound(0.025, kept_count - 1.0) * libm::sqrt(variance);
    Some(Estimate {
        value,
        low: value - error,
        high: value + error,
    })
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{SplitMix64, TaskId};

    fn evicted_evidence(samples: &[(bool, u32, f64)]) -> ProbeEvidence {
        let sample = |&(beside, evicted, round_trip): &(bool, u32, f64)| PrimeProbeSample {
            target_running: beside,
            evicted,
            reloads: 1000,
            elapsed_ns: 1,
            round_trips_ns: Some((round_trip, 60.0)),
        };
        let samples = samples.iter().map(sample).collect();
        ProbeEvidence::PrimeProbe {
            task: TaskId(0),
            buffer_bytes: 1,
            wait_ns: 1,
            samples,
        }
    }

    /// Is the intensity the difference of the two sides over several answers, without split samples and trimmed for
    /// outliers?
    #[test]
    fn additional_evictions_are_the_intensity() {
        let (mut profiler, mut profiles) = (PrimeProbeProfiler::default(), Profiles::new());
        let mut observation = idle_window(0, &[0]);
        observation.probe_results = vec![complete_answer(
            0,
            evicted_evidence(&[
                (true, 400, 60.0),
                (true, 402, 60.0),
                (false, 100, 60.0),
                (false, 102, 60.0),
            ]),
        )];
        profiler.update(&observation, &mut profiles);
        assert_eq!(profiles[&TaskId(0)].contention.intensity, None, "too few");
        let further_samples = [
            (true, 398, 60.0),
            (true, 400, 60.0),
            (true, 1000, 60.0),
            (true, 5, 350.0),
        ];
        let away = [(false, 98, 60.0), (false, 100, 60.0), (false, 0, 60.0)];
        observation.probe_results = vec![complete_answer(
            1,
            evicted_evidence(&[&further_samples[..], &away[..]].concat()),
        )];
        profiler.update(&observation, &mut profiles);
        let intensity = profiles[&TaskId(0)]
            .contention
            .intensity
            .unwrap()
            .estimate();
        assert!(
            (intensity.value - 0.3).abs() < 0.003 && intensity.low < intensity.value,
            "{intensity:?}"
        );
        observation.probe_results.clear();
        observation.window += 1;
        profiler.update(&observation, &mut profiles);
        let contention = profiles[&TaskId(0)].contention.intensity.unwrap();
        assert_eq!(
            (contention.estimate(), contention.window),
            (intensity, 0),
            "it stays until more is known"
        );
    }

    /// Is the intensity of a task unknown rather than 0 if all of its samples were taken across two caches?
    #[test]
    fn intensity_is_unknown_if_all_samples_were_split() {
        let (mut profiler, mut profiles) = (PrimeProbeProfiler::default(), Profiles::new());
        let split: Vec<(bool, u32, f64)> =
            (0..20).map(|index| (index % 2 == 0, 10, 330.0)).collect();
        profiler.update(
            &answered_window(0, &[0], evicted_evidence(&split)),
            &mut profiles,
        );
        assert_eq!(profiles[&TaskId(0)].contention.intensity, None);
    }

    /// Does the interval hold the difference in 95 of 100 experiments, whether they have ten samples or a hundred?
    #[test]
    fn the_interval_holds_the_difference_in_95_of_100_experiments() {
        const EXPERIMENTS: u32 = 2_000;
        let mut generator = SplitMix64::new(7);
        // The sum of twelve uniform numbers is nearly normal, with a deviation of 1.
        let mut draw = |mean: f64| mean + (0..12).map(|_| generator.draw_unit()).sum::<f64>() - 6.0;
        for count in [10, 20, 100] {
            let mut held = 0;
            for _ in 0..EXPERIMENTS {
                let running: Vec<f64> = (0..count).map(|_| draw(4.0)).collect();
                let idle: Vec<f64> = (0..count).map(|_| draw(1.0)).collect();
                let difference = estimate_difference(&running, &idle).unwrap();
                held += u32::from((difference.low..=difference.high).contains(&3.0));
            }
            let share = f64::from(held) / f64::from(EXPERIMENTS);
            assert!((0.935..0.975).contains(&share), "{count} samples: {share}");
        }
    }
}
