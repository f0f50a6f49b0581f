//! Reuse times of sampled accesses, and a sampler that measures them in a stream.
//!
//! The models of a shared cache (StatCache, StatStack, StatCC) need one property of a program: the number of accesses
//! between two touches of a line. This number depends neither on the cache nor on co-runners, and a few thousand
//! watched accesses suffice to estimate its distribution (Berg and Hagersten 2004; papers BS 1).
//!
//! Times are counted in log-spaced buckets: exact below 16, then 16 buckets per doubling. The midpoint of a bucket is
//! therefore within 3.2 % of every time in the bucket, and a thousand counts suffice for a stream of any length.

use std::collections::BTreeMap;

use cachemate_core::{ReuseSample, SplitMix64};

/// Time below which each time has its own bucket, and number of buckets per doubling above it.
const BUCKETS_PER_DOUBLING: u64 = 16;
const PER_DOUBLING_LOG2: u32 = BUCKETS_PER_DOUBLING.trailing_zeros();

fn bucket_of_time(time: u64) -> usize {
    if time < BUCKETS_PER_DOUBLING {
        return time as usize;
    }
    let doublings = time.ilog2() - PER_DOUBLING_LOG2;
    let step = (time >> doublings) - BUCKETS_PER_DOUBLING;
    (u64::from(doublings + 1) * BUCKETS_PER_DOUBLING + step) as usize
}

/// The first and the last time of the bucket, both included.
fn bucket_bounds(bucket: usize) -> (u64, u64) {
    let bucket = bucket as u64;
    if bucket < BUCKETS_PER_DOUBLING {
        return (bucket, bucket);
    }
    let doublings = bucket / BUCKETS_PER_DOUBLING - 1;
    let low = (BUCKETS_PER_DOUBLING + bucket % BUCKETS_PER_DOUBLING) << doublings;
    (low, low + ((1 << doublings) - 1))
}

/// The reuse times in one bucket.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReuseBucket {
    /// Shortest time of the bucket, in accesses between the two touches.
    pub low: u64,
    /// Longest time of the bucket, inclusive.
    pub high: u64,
    /// Number of samples, or any other weight on the scale of [`ReuseTimes::samples`].
    pub weight: f64,
}

impl ReuseBucket {
    /// Mean of the shortest and the longest time, in accesses.
    pub fn midpoint(&self) -> f64 {
        0.5 * (self.low as f64 + self.high as f64)
    }
}

/// A distribution of reuse times, with the number of samples that were never touched again.
///
/// A reuse time is the number of accesses between two touches of a line (0 for an immediate repeat). Samples never
/// touched again count as misses in every model (BS 1).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ReuseTimes {
    weights: Vec<f64>,
    cold_weight: f64,
}

impl ReuseTimes {
    /// Builds a distribution without samples.
    pub fn new() -> Self {
        Self::default()
    }

    /// Builds a distribution from a profile's pairs of upper bound and fraction, in which `None` is the bound of
    /// samples never touched again. Returns `None` if the list is empty, or if a weight is negative or not a number.
    pub fn from_profile(profile: &[(Option<u64>, f64)]) -> Option<Self> {
        let mut times = Self::new();
        let mut previous_bound = 0;
        for &(upper, weight) in profile {
            if !(weight.is_finite() && weight >= 0.0) {
                return None;
            }
            // Buckets of this module are recognized by their upper bound; for other buckets, the middle is used.
            let time = upper.map(|upper| match bucket_bounds(bucket_of_time(upper)) {
                (_, high) if high == upper => upper,
                _ => upper - upper.saturating_sub(previous_bound) / 2,
            });
            times.add_weighted(time, weight);
            previous_bound = upper.map_or(previous_bound, |upper| upper.saturating_add(1));
        }
        (times.samples() > 0.0).then_some(times)
    }

    /// Ascending pairs of upper bound in accesses and fraction, as a profile stores them. The last bound is `None`, for
    /// samples never touched again. Empty buckets are left out. `None` without samples.
    pub fn to_profile(&self) -> Option<Vec<(Option<u64>, f64)>> {
        let samples = self.samples();
        if samples <= 0.0 {
            return None;
        }
        let mut profile: Vec<_> = self
            .buckets()
            .map(|b| (Some(b.high), b.weight / samples))
            .collect();
        profile.push((None, self.cold_weight / samples));
        Some(profile)
    }

    /// Builds the distribution from the watched locations that a machine reported. A time that was not counted in
    /// accesses is converted by the task's access rate; if that rate is unknown, the sample is dropped.
    pub fn from_samples(samples: &[ReuseSample], accesses_per_ns: Option<f64>) -> Self {
        let mut times = Self::new();
        for sample in samples {
            if !sample.reused {
                times.add(None);
            } else if let Some(accesses) = sample.accesses {
                times.add(Some(accesses));
            } else if let Some(rate) = accesses_per_ns {
                times.add(Some((sample.elapsed_ns as f64 * rate) as u64));
            }
        }
        times
    }

    /// The distribution behind a cache that misses the fraction `miss_share` of the accesses. The shortest times are
    /// the hits of that cache, and all other times shrink by this factor.
    #[must_use]
    pub fn filtered_by_cache(&self, miss_share: f64) -> Self {
        if !(0.0..1.0).contains(&miss_share) {
            return self.clone();
        }
        let mut remaining_hits = (1.0 - miss_share) * self.samples();
        let mut passed_times = Self::new();
        for bucket in self.buckets() {
            let hit_weight = bucket.weight.min(remaining_hits);
            remaining_hits -= hit_weight;
            if bucket.weight > hit_weight {
                passed_times.add_weighted(
                    Some((bucket.midpoint() * miss_share) as u64),
                    bucket.weight - hit_weight,
                );
            }
        }
        passed_times.add_weighted(None, self.cold_weight);
        passed_times
    }

    /// Adds one sample; `None` means that the line was not touched again before the watch ended.
    pub fn add(&mut self, time: Option<u64>) {
        self.add_weighted(time, 1.0);
    }

    /// Adds one sample with a weight, which must be finite and not negative.
    pub fn add_weighted(&mut self, time: Option<u64>, weight: f64) {
        let Some(time) = time else {
            self.cold_weight += weight;
            return;
        };
        let bucket = bucket_of_time(time);
        if self.weights.len() <= bucket {
            self.weights.resize(bucket + 1, 0.0);
        }
        self.weights[bucket] += weight;
    }

    /// Adds all samples of another distribution.
    pub fn merge(&mut self, other: &Self) {
        if self.weights.len() < other.weights.len() {
            self.weights.resize(other.weights.len(), 0.0);
        }
        self.weights
            .iter_mut()
            .zip(&other.weights)
            .for_each(|(weight, addend)| *weight += addend);
        self.cold_weight += other.cold_weight;
    }

    /// Number of samples, including those never touched again; this is StatCache's N.
    pub fn samples(&self) -> f64 {
        self.weights.iter().sum::<f64>() + self.cold_weight
    }

    /// Number of samples never touched again, which miss in a cache of any size.
    pub fn unreused_samples(&self) -> f64 {
        self.cold_weight
    }

    /// Only buckets that are not empty, in ascending order.
    pub fn buckets(&self) -> impl Iterator<Item = ReuseBucket> + '_ {
        self.all_buckets().filter(|bucket| bucket.weight > 0.0)
    }

    /// Every bucket up to the last one in use, without gaps, in ascending order.
    pub fn all_buckets(&self) -> impl Iterator<Item = ReuseBucket> + '_ {
        self.weights.iter().enumerate().map(|(index, &weight)| {
            let (low, high) = bucket_bounds(index);
            ReuseBucket { low, high, weight }
        })
    }
}

/// Base-2 logarithm of the number of counters in the filter in front of the open watches. Most lines are not watched,
/// which a single read of the filter shows.
const FILTER_BITS: u32 = 16;

fn filter_slot(line: u64) -> usize {
    (line.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - FILTER_BITS)) as usize
}

/// Samples accesses of one stream and watches each until its line is touched again, like a hardware watch point.
///
/// The distances between watched accesses are geometrically distributed with the given mean, so sampling cannot lock to
/// a period of the program. The same seed selects the same accesses. Memory is proportional to the number of open
/// watches.
pub struct ReuseSampler {
    sample_period: u32,
    generator: SplitMix64,
    accesses_until_next: u64,
    access_index: u64,
    /// Watched lines, with the time at which the watch began.
    open_watches: BTreeMap<u64, u64>,
    /// Number of open watches by hash of the line.
    watch_filter: Vec<u32>,
    reuse_times: ReuseTimes,
}

impl ReuseSampler {
    /// Builds a sampler that watches one access in `sample_period` on average; 0 counts as 1, which is every access.
    pub fn new(sample_period: u32, seed: u64) -> Self {
        let mut sampler = ReuseSampler {
            sample_period: sample_period.max(1),
            generator: SplitMix64::new(seed),
            accesses_until_next: 0,
            access_index: 0,
            open_watches: BTreeMap::new(),
            watch_filter: vec![0; 1 << FILTER_BITS],
            reuse_times: ReuseTimes::new(),
        };
        sampler.accesses_until_next = sampler.draw_distance() - 1;
        sampler
    }

    /// Records that the program touches a line, and may open a watch on it.
    #[inline]
    pub fn touch(&mut self, line: u64) {
        let slot = filter_slot(line);
        if self.watch_filter[slot] > 0
            && let Some(start) = self.open_watches.remove(&line)
        {
            self.watch_filter[slot] -= 1;
            self.reuse_times.add(Some(self.access_index - start - 1));
        }
        if self.accesses_until_next == 0 {
            self.watch_filter[slot] += 1;
            self.open_watches.insert(line, self.access_index);
            self.accesses_until_next = self.draw_distance();
        }
        self.accesses_until_next -= 1;
        self.access_index += 1;
    }

    /// The samples that were completed since the last call; open watches continue.
    pub fn take_completed(&mut self) -> ReuseTimes {
        std::mem::take(&mut self.reuse_times)
    }

    /// All samples since the last call of [`Self::take_completed`]; open watches count as samples never touched again.
    pub fn finish(mut self) -> ReuseTimes {
        self.reuse_times
            .add_weighted(None, self.open_watches.len() as f64);
        self.reuse_times
    }

    fn draw_distance(&mut self) -> u64 {
        if self.sample_period == 1 {
            return 1;
        }
        let log_stay_probability = libm::log1p(-1.0 / f64::from(self.sample_period));
        1 + (libm::log(1.0 - self.generator.draw_unit()) / log_stay_probability) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Does every time lie within its bucket, and do buckets follow each other without gaps?
        #[test]
        fn buckets_cover_all_times_once(time in any::<u64>()) {
            let bucket = bucket_of_time(time);
            let (low, high) = bucket_bounds(bucket);
            prop_assert!(low <= time && time <= high);
            if bucket > 0 {
                prop_assert_eq!(bucket_bounds(bucket - 1).1 + 1, low);
            }
        }

        /// Does a sampler that watches every access find exactly the reuse times of the stream?
        #[test]
        fn watching_every_access_gives_the_exact_reuse_times(lines in prop::collection::vec(0u64..12, 0..200)) {
            let mut sampler = ReuseSampler::new(1, 0);
            lines.iter().for_each(|&line| sampler.touch(line));
            let mut exact = ReuseTimes::new();
            for (index, line) in lines.iter().enumerate() {
                let next = lines[index + 1..].iter().position(|next_line| next_line == line);
                exact.add(next.map(|between| between as u64));
            }
            prop_assert_eq!(sampler.finish(), exact);
        }

        /// Does a distribution stay the same when it is converted to a profile and back?
        #[test]
        fn a_distribution_survives_conversion_to_a_profile_and_back(times in prop::collection::vec(prop::option::of(0u64..1 << 40), 1..60)) {
            let mut original_times = ReuseTimes::new();
            times.iter().for_each(|&time| original_times.add(time));
            let restored_times = ReuseTimes::from_profile(&original_times.to_profile().unwrap()).unwrap();
            let scale = original_times.samples();
            prop_assert!((restored_times.unreused_samples() * scale - original_times.unreused_samples()).abs() < 1e-6);
            for (a, b) in restored_times.buckets().zip(original_times.buckets()) {
                prop_assert_eq!((a.low, a.high), (b.low, b.high));
                prop_assert!((a.weight * scale - b.weight).abs() < 1e-6);
            }
        }
    }

    /// Is the fraction of watched accesses the requested one, and is their distribution that of the whole stream?
    #[test]
    fn a_watched_fraction_has_the_whole_streams_distribution() {
        let mut random = SplitMix64::new(7);
        let lines: Vec<u64> = (0..400_000)
            .map(|_| random.draw_below(1000).min(random.draw_below(1000)))
            .collect();
        let sample_reuses = |one_in| {
            let mut sampler = ReuseSampler::new(one_in, 3);
            lines.iter().for_each(|&line| sampler.touch(line));
            sampler.finish()
        };
        let (exact_times, sampled_times) = (sample_reuses(1), sample_reuses(100));
        assert!(
            (sampled_times.samples() - 4000.0).abs() < 4.0 * 4000f64.sqrt(),
            "{}",
            sampled_times.samples()
        );
        let share_below = |times: &ReuseTimes, limit: u64| {
            times
                .buckets()
                .filter(|b| b.high < limit)
                .map(|b| b.weight)
                .sum::<f64>()
                / times.samples()
        };
        for limit in [128, 512, 1024, 4096] {
            // The tolerance is four standard deviations of a fraction estimated from 4000 samples.
            assert!(
                (share_below(&exact_times, limit) - share_below(&sampled_times, limit)).abs()
                    < 0.032,
                "{limit}"
            );
        }
    }

    /// Are times in nanoseconds converted by the task's access rate, and dropped if the rate is unknown?
    #[test]
    fn nanoseconds_are_converted_by_the_access_rate_or_dropped() {
        let reuse_sample = |accesses, elapsed_ns, touched_again| ReuseSample {
            accesses,
            elapsed_ns,
            reused: touched_again,
        };
        let samples = [
            reuse_sample(None, 100, true),
            reuse_sample(Some(5), 9, true),
            reuse_sample(None, 1000, false),
        ];
        assert_eq!(ReuseTimes::from_samples(&samples, None).samples(), 2.0);
        let dated = ReuseTimes::from_samples(&samples, Some(0.1));
        assert_eq!((dated.samples(), dated.unreused_samples()), (3.0, 1.0));
        assert!(dated.buckets().any(|bucket| bucket.low == 10));
    }

    /// Is a profile with an invalid weight rejected rather than averaged?
    #[test]
    fn a_profile_with_an_invalid_weight_is_rejected() {
        assert_eq!(
            ReuseTimes::from_profile(&[(Some(3), -0.1), (None, 1.0)]),
            None
        );
        assert_eq!(ReuseTimes::from_profile(&[(Some(3), f64::NAN)]), None);
        assert_eq!(ReuseTimes::from_profile(&[]), None);
    }
}
