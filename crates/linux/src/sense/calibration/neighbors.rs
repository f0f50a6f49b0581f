//! What other guests do to the shared cache, over hours.
//!
//! A calibration sees its own half minute, and the other guests of a machine change what they do by the minute. On one
//! guest of an AMD EPYC with 32 MiB of L3, within one morning, lines stayed for 24.6, 5.1 and 2.2 ms, and streams of this
//! guest found 32, 20 and 15 MiB to compete in; a search of 4 MiB that lost nothing beside another by the first of
//! these figures lost 43 % half an hour later. So samples of a few seconds are kept, and a forecast is a mean over their range.
//!
//! A hypervisor may also run the guest's CPUs on cores of different caches at times. On that guest, a line that its two CPUs
//! passed back and forth took 75 to 120 ns for a round trip, or 380 to 500, and changed from one to the other after 5 to 300 s.
//! Counters in 4.9 MB took 5.5 times as long beside a stream in 12 MB while the CPUs shared a cache, and 1.0 times while they did
//! not, so each sample also says where they were.

use cachemate_core::{Estimate, quantile};
use serde::{Deserialize, Serialize};

/// Samples that are kept; then the oldest one goes.
pub const MAX_NEIGHBOR_SAMPLES: usize = 64;
/// Time for which lines stay at least, if they stayed for longer than was waited.
const LONG_LIFETIME_NS: f64 = 200e6;
/// Samples from which on their own range counts alone.
const KNOWN_SAMPLES: usize = 8;
/// Factor by which neighbors' traffic rises and falls at least as long as there are fewer samples: the three lifetimes of the
/// head of this file are factors of 2.3 and 4.8 apart.
const UNKNOWN_SPREAD: f64 = 2.0;

/// What other systems did to the shared cache at one time.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NeighborSample {
    /// Seconds since 1970.
    pub measured_at_s: u64,
    /// Part of the cache in which lines of this system compete with those of others, because streams over more miss however
    /// fast they are; `None` if no stream over less than the whole cache missed.
    pub pool_bytes: Option<f64>,
    /// Mean time for which lines stayed that were touched more than once, while nobody in this system replaced them; `None` if
    /// half of them stayed for longer than was waited.
    pub mean_lifetime_ns: Option<f64>,
    /// The same of lines that were touched once, as a share of it.
    pub probation_share: Option<f64>,
    /// Whether two CPUs that share the cache by the kernel's list were on different ones; `None` if that could not be told.
    #[serde(default)]
    pub are_apart: Option<bool>,
}

/// The middle of the samples, with the range of their middle four fifths.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NeighborRange {
    /// Part of the cache in which lines compete.
    pub pool_bytes: Estimate,
    /// Traffic with which the others fill it.
    pub bytes_per_ns: Estimate,
    /// Mean lifetime of a line that was touched once, as a share of that of others.
    pub probation_share: Option<f64>,
}

/// Samples of the neighbors, the oldest first; at most [`MAX_NEIGHBOR_SAMPLES`].
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NeighborHistory(Vec<NeighborSample>);

impl NeighborHistory {
    /// Keeps a sample.
    pub fn add(&mut self, sample: NeighborSample) {
        self.0.push(sample);
        let excess_count = self.0.len().saturating_sub(MAX_NEIGHBOR_SAMPLES);
        self.0.drain(..excess_count);
    }

    /// The newest sample.
    pub fn newest(&self) -> Option<&NeighborSample> {
        self.0.last()
    }

    /// Whether a sample saw neighbors.
    pub fn has_neighbors(&self) -> bool {
        self.0
            .iter()
            .any(|sample| sample.mean_lifetime_ns.is_some())
    }

    /// Share of the time in which the hypervisor runs CPUs on different caches that share one by the kernel's list: by the rule
    /// of succession, `(times + 1) / (samples + 2)`, because a few samples do not tell never from seldom, nor always from
    /// often; `None` if no sample saw them apart.
    pub fn apart_share(&self) -> Option<f64> {
        let (apart_count, sample_count) = self.apart_samples();
        (apart_count > 0).then(|| (apart_count + 1) as f64 / (sample_count + 2) as f64)
    }

    /// Number of samples that saw CPUs apart that share the cache by the kernel's list, and of all that could tell.
    pub fn apart_samples(&self) -> (usize, usize) {
        let told = || self.0.iter().filter_map(|sample| sample.are_apart);
        (
            told().filter(|are_apart| *are_apart).count(),
            told().count(),
        )
    }

    /// Whether a sample found the pool smaller than the cache that the kernel shows.
    pub fn has_measured_pool(&self) -> bool {
        self.0.iter().any(|sample| sample.pool_bytes.is_some())
    }

    /// What is known of the neighbors of a cache that the kernel shows with this size; `None` if no sample saw any.
    pub fn range(&self, shown_bytes: u64) -> Option<NeighborRange> {
        if !self.has_neighbors() {
            return None;
        }
        let pool_of = |sample: &NeighborSample| {
            let shown_bytes = shown_bytes as f64;
            sample
                .pool_bytes
                .map_or(shown_bytes, |bytes| bytes.min(shown_bytes))
        };
        let rate_of = |sample: &NeighborSample| {
            pool_of(sample) / sample.mean_lifetime_ns.unwrap_or(LONG_LIFETIME_NS)
        };
        let middle_of = |values: Vec<f64>| middle_fifths(values).unwrap_or(Estimate::exact(0.0));
        let pool_bytes = middle_of(self.0.iter().map(pool_of).collect());
        let shares = self
            .0
            .iter()
            .filter_map(|sample| sample.probation_share)
            .collect();
        let mut bytes_per_ns = middle_of(self.0.iter().map(rate_of).collect());
        if self.0.len() < KNOWN_SAMPLES {
            bytes_per_ns.low = bytes_per_ns.low.min(bytes_per_ns.value / UNKNOWN_SPREAD);
            bytes_per_ns.high = bytes_per_ns.high.max(bytes_per_ns.value * UNKNOWN_SPREAD);
        }
        Some(NeighborRange {
            pool_bytes,
            bytes_per_ns,
            probation_share: middle_fifths(shares).map(|share| share.value),
        })
    }
}

/// The median with the range of the middle four fifths; `None` without values.
fn middle_fifths(mut values: Vec<f64>) -> Option<Estimate> {
    values.sort_by(f64::total_cmp);
    Some(Estimate {
        value: quantile(&values, 0.5)?,
        low: quantile(&values, 0.1)?,
        high: quantile(&values, 0.9)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: u64 = 32 << 20;

    fn history_of(samples: &[(Option<f64>, Option<f64>)]) -> NeighborHistory {
        let mut history = NeighborHistory::default();
        for (index, &(pool_bytes, mean_lifetime_ns)) in samples.iter().enumerate() {
            history.add(NeighborSample {
                measured_at_s: index as u64,
                pool_bytes,
                mean_lifetime_ns,
                probation_share: None,
                are_apart: None,
            });
        }
        history
    }

    /// Is a factor of two added where few samples were taken, and do many samples say how their neighbors change?
    #[test]
    fn few_samples_do_not_tell_how_neighbors_change() {
        let (pool, lifetime_ns) = (16e6, 4e6);
        let one = history_of(&[(Some(pool), Some(lifetime_ns))]);
        let range = one.range(SHOWN).unwrap();
        assert_eq!(range.pool_bytes, Estimate::exact(pool));
        assert_eq!(
            (range.bytes_per_ns.value, range.bytes_per_ns.low),
            (4.0, 2.0)
        );

        let steady = history_of(&[(Some(pool), Some(lifetime_ns)); KNOWN_SAMPLES]);
        let range = steady.range(SHOWN).unwrap();
        assert_eq!(range.bytes_per_ns, Estimate::exact(4.0));
        let changing: Vec<_> = (1..=11)
            .map(|step| (Some(pool), Some(lifetime_ns / f64::from(step))))
            .collect();
        let range = history_of(&changing).range(SHOWN).unwrap();
        let rates = [
            range.bytes_per_ns.low,
            range.bytes_per_ns.value,
            range.bytes_per_ns.high,
        ];
        assert_eq!(rates.map(|rate| (rate / 4.0).round()), [2.0, 6.0, 10.0]);
    }

    /// Are CPUs that were never seen apart never apart, and does one look of few say neither never nor always?
    #[test]
    fn few_looks_do_not_tell_always_from_often() {
        let share_of = |looks: &[Option<bool>]| {
            let mut history = NeighborHistory::default();
            for &are_apart in looks {
                history.add(NeighborSample {
                    measured_at_s: 0,
                    pool_bytes: None,
                    mean_lifetime_ns: None,
                    probation_share: None,
                    are_apart,
                });
            }
            history.apart_share()
        };
        assert_eq!(share_of(&[]), None);
        assert_eq!(share_of(&[Some(false), None, Some(false)]), None);
        assert_eq!(share_of(&[Some(true)]), Some(2.0 / 3.0));
        assert_eq!(share_of(&[Some(true), None, Some(false)]), Some(0.5));
        assert_eq!(share_of(&[Some(true); 8]), Some(0.9));
    }

    /// Is a cache without neighbors told as such, does a pool that no stream exceeds have the shown size, and does the oldest of
    /// too many samples go?
    #[test]
    fn a_pool_that_no_stream_exceeds_has_the_shown_size() {
        assert_eq!(history_of(&[]).range(SHOWN), None);
        assert_eq!(history_of(&[(None, None); 9]).range(SHOWN), None);
        let mut samples = vec![(None, None); 9];
        samples.push((None, Some(1e6)));
        let unlimited = history_of(&samples).range(SHOWN).unwrap();
        assert_eq!(unlimited.pool_bytes, Estimate::exact(SHOWN as f64));
        // In nine of ten, lines stayed for longer than was waited.
        assert_eq!(unlimited.bytes_per_ns.low, SHOWN as f64 / LONG_LIFETIME_NS);

        let many = history_of(&[(Some(1e6), Some(1e6)); MAX_NEIGHBOR_SAMPLES + 3]);
        assert_eq!(many.0.len(), MAX_NEIGHBOR_SAMPLES);
        assert_eq!(many.0[0].measured_at_s, 3);
    }
}
