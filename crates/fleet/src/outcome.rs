//! Results of cells and of policies.

use serde::{Deserialize, Serialize};

/// Width of one histogram class, in percent.
const CLASS_PERCENT: f64 = 0.1;
/// Number of classes; slowdowns of 1000 % and more are one class.
const CLASS_COUNT: usize = 10_001;

/// Slowdowns in classes of 0.1 %.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(from = "Vec<(usize, u64)>", into = "Vec<(usize, u64)>")]
pub struct SlowdownHistogram {
    counts: Vec<u64>,
}

impl Default for SlowdownHistogram {
    fn default() -> Self {
        SlowdownHistogram {
            counts: vec![0; CLASS_COUNT],
        }
    }
}

/// The form of a histogram in files: a list of the classes that have samples, each with the number of samples.
impl From<SlowdownHistogram> for Vec<(usize, u64)> {
    fn from(histogram: SlowdownHistogram) -> Self {
        histogram
            .counts
            .into_iter()
            .enumerate()
            .filter(|(_, count)| *count > 0)
            .collect()
    }
}

impl From<Vec<(usize, u64)>> for SlowdownHistogram {
    fn from(classes: Vec<(usize, u64)>) -> Self {
        let mut histogram = SlowdownHistogram::default();
        for (class, count) in classes {
            histogram.counts[class.min(CLASS_COUNT - 1)] += count;
        }
        histogram
    }
}

impl SlowdownHistogram {
    /// Adds one sample; a speed-up counts as a slowdown of 0.
    pub fn add(&mut self, percent: f64) {
        let class =
            libm::round(percent.max(0.0) / CLASS_PERCENT).min((CLASS_COUNT - 1) as f64) as usize;
        self.counts[class] += 1;
    }

    /// Adds all samples of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.counts
            .iter_mut()
            .zip(&other.counts)
            .for_each(|(sum, count)| *sum += count);
    }

    /// One for each service and step.
    pub fn sample_count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The smallest slowdown that this share of the samples does not exceed; `None` without samples.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let samples = self.sample_count();
        let target_count = libm::ceil(share * samples as f64).max(1.0) as u64;
        let mut cumulative_count = 0;
        let class = self.counts.iter().position(|count| {
            cumulative_count += count;
            cumulative_count >= target_count
        });
        class
            .filter(|_| samples > 0)
            .map(|class| libm::round(class as f64) / 10.0)
    }

    /// The share of the samples that do not exceed a slowdown; `None` without samples.
    pub fn share_up_to(&self, percent: f64) -> Option<f64> {
        let class =
            libm::round(percent.max(0.0) / CLASS_PERCENT).min((CLASS_COUNT - 1) as f64) as usize;
        let samples = self.sample_count();
        (samples > 0).then(|| self.counts[..=class].iter().sum::<u64>() as f64 / samples as f64)
    }
}

/// Result of one cell.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CellOutcome {
    /// Number of services that arrived.
    pub services: u64,
    /// Slowdowns of services, one sample per service and step.
    pub slowdowns: SlowdownHistogram,
    /// Number of samples of services with a limit, including waiting services.
    pub limited_samples: u64,
    /// Number of samples of services that are within their limit.
    pub kept_samples: u64,
    /// Number of samples of services that wait for room.
    pub waiting_samples: u64,
    /// Number of moves between hosts.
    pub moves: u64,
    /// Number of moves between the caches of a host.
    pub node_moves: u64,
    /// Energy of all hosts.
    pub energy_kwh: f64,
    /// Host hours with at least one service.
    pub host_hours: f64,
}

impl CellOutcome {
    /// Adds another cell. Floating-point sums depend on the order, so callers must add cells in a fixed order.
    pub fn merge(&mut self, other: &Self) {
        self.services += other.services;
        self.slowdowns.merge(&other.slowdowns);
        self.limited_samples += other.limited_samples;
        self.kept_samples += other.kept_samples;
        self.waiting_samples += other.waiting_samples;
        self.moves += other.moves;
        self.node_moves += other.node_moves;
        self.energy_kwh += other.energy_kwh;
        self.host_hours += other.host_hours;
    }

    /// The share of limits that are kept; `None` if no service has a limit.
    pub fn limit_kept_share(&self) -> Option<f64> {
        (self.limited_samples > 0).then(|| self.kept_samples as f64 / self.limited_samples as f64)
    }
}

/// Result of one policy over the whole fleet: a row of `cachemate fleet --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FleetPolicyRow {
    /// Policy of the scheduler, with `+auto` if nodes place and partition, and with the variant's change of the
    /// fleet.
    pub name: String,
    /// Share of the samples of services with a limit that are within it; `None` if no service has a limit.
    pub limits_kept_share: Option<f64>,
    /// Median slowdown.
    pub slowdown_p50_percent: Option<f64>,
    /// 95th percentile.
    pub slowdown_p95_percent: Option<f64>,
    /// 99th percentile.
    pub slowdown_p99_percent: Option<f64>,
    /// Number of hosts that keep the promised share of limits; `None` if even four times the present number does not.
    pub hosts_needed: Option<u32>,
    /// Number of moves between hosts.
    pub moves: u64,
}

/// `cachemate fleet --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FleetOutcome {
    /// Number of hosts.
    pub hosts: u32,
    /// Number of services that arrived.
    pub services: u64,
    /// Seed of all random draws.
    pub seed: u64,
    /// CPU time of the run; the only field that differs between two runs.
    pub cpu_seconds: f64,
    /// One row for each policy.
    pub policies: Vec<FleetPolicyRow>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are percentiles those of the sorted samples, within the width of a class?
    #[test]
    fn percentiles_are_those_of_sorted_samples() {
        let mut histogram = SlowdownHistogram::default();
        assert_eq!(histogram.percentile(0.5), None);
        (1..=1000).for_each(|sample| histogram.add(f64::from(sample) / 10.0));
        assert_eq!(histogram.percentile(0.5), Some(50.0));
        assert_eq!(histogram.percentile(0.99), Some(99.0));
        assert_eq!(histogram.percentile(1.0), Some(100.0));
        assert_eq!(histogram.share_up_to(25.0), Some(0.25));
        histogram.add(-3.0);
        histogram.add(f64::INFINITY);
        assert_eq!(
            (histogram.percentile(0.0), histogram.percentile(1.0)),
            (Some(0.0), Some(1000.0))
        );
    }
}
