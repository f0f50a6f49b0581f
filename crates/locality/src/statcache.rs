//! StatCache: the miss ratio of a cache with random replacement, from sampled reuse times (Berg and Hagersten 2004;
//! papers BS 1).
//!
//! Problem: how often does a program miss in a cache of L lines, if only the number of accesses between two touches of
//! a line is known? Method: each miss evicts a random line, so a line survives n misses with probability (1 − 1/L)^n,
//! and t accesses cause about m·t misses. The misses of N samples are then
//!
//! m·N = Σ h(t) · f(m·t) + never, with f(n) = 1 − (1 − 1/L)^n,
//!
//! which is solved for m. N counts *all* samples; those never touched again always miss.
//!
//! Properties: the right side is concave in m, so there is one root besides a possible root at 0, and Newton's steps
//! from m = 1 converge to the largest without passing it. The largest root is the stable one: a program that reuses all
//! its lines has a root at 0 (a full cache stays full), but one that cycles through more lines than fit keeps missing.

use crate::reuse::ReuseTimes;

/// One program on a shared cache: its reuse times, its share of all accesses, and the number of accesses by all
/// programs for each of its own.
pub(crate) struct CacheSharer<'a> {
    pub reuse: &'a ReuseTimes,
    pub access_share: f64,
    pub reuse_stretch: f64,
}

/// Miss ratio (0 to 1, of the sampled accesses) of a program that has a cache of `lines` lines with random replacement
/// to itself. `None` without samples or lines.
pub fn miss_ratio(reuse: &ReuseTimes, lines: u64) -> Option<f64> {
    total_miss_ratio(
        &[CacheSharer {
            reuse,
            access_share: 1.0,
            reuse_stretch: 1.0,
        }],
        lines,
    )
}

/// Miss ratio of a program that co-runs with others, if all programs together miss `cache_misses_per_access` times for
/// each of its own accesses. `None` without samples or lines.
pub fn co_run_miss_ratio(
    reuse: &ReuseTimes,
    cache_misses_per_access: f64,
    lines: u64,
) -> Option<f64> {
    let sharer = CacheSharer {
        reuse,
        access_share: 1.0,
        reuse_stretch: 1.0,
    };
    (lines > 0 && reuse.samples() > 0.0)
        .then(|| misses_at(&sharer, cache_misses_per_access, lines).0)
}

/// Overall miss ratio M of all programs together, as [`crate::statcc`] defines it.
pub(crate) fn total_miss_ratio(sharers: &[CacheSharer<'_>], lines: u64) -> Option<f64> {
    if lines == 0
        || sharers.is_empty()
        || sharers.iter().any(|sharer| sharer.reuse.samples() <= 0.0)
    {
        return None;
    }
    let mut miss_ratio = 1.0;
    for _ in 0..200 {
        let (mut misses, mut slope) = (0.0, 0.0);
        for sharer in sharers {
            let (sharer_misses, sharer_slope) = misses_at(sharer, miss_ratio, lines);
            misses += sharer.access_share * sharer_misses;
            slope += sharer.access_share * sharer_slope;
        }
        let (excess_ratio, slope_difference) = (miss_ratio - misses, 1.0 - slope);
        // Either difference is negative only because of rounding at the root.
        if excess_ratio <= 0.0 || slope_difference <= 0.0 {
            break;
        }
        let next_ratio = (miss_ratio - excess_ratio / slope_difference).max(0.0);
        let step = miss_ratio - next_ratio;
        miss_ratio = next_ratio;
        if step < 1e-13 {
            break;
        }
    }
    Some(miss_ratio)
}

/// Misses per access of one program if the fraction `ratio` of all accesses misses, and their derivative with respect
/// to `ratio`.
pub(crate) fn misses_at(sharer: &CacheSharer<'_>, ratio: f64, lines: u64) -> (f64, f64) {
    let samples = sharer.reuse.samples();
    let (mut misses, mut slope) = (sharer.reuse.unreused_samples(), 0.0);
    // −ln(1 − 1/L); infinite for one line, which the first miss certainly replaces.
    let eviction_rate = -libm::log1p(-1.0 / lines as f64);
    for bucket in sharer.reuse.buckets() {
        let accesses = bucket.midpoint() * sharer.reuse_stretch;
        if accesses <= 0.0 || ratio <= 0.0 {
            slope += bucket.weight
                * if lines == 1 {
                    0.0
                } else {
                    accesses * eviction_rate
                };
            continue;
        }
        let survival = libm::exp(-eviction_rate * ratio * accesses);
        misses += bucket.weight * (1.0 - survival);
        if survival > 0.0 {
            slope += bucket.weight * accesses * eviction_rate * survival;
        }
    }
    (misses / samples, slope / samples)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reuse::ReuseSampler;
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    pub(crate) fn all_reuses(lines: &[u64]) -> ReuseTimes {
        let mut sampler = ReuseSampler::new(1, 0);
        lines.iter().for_each(|&line| sampler.touch(line));
        sampler.finish()
    }

    /// Simulates a fully associative cache with random replacement as directly as possible; returns the miss ratio
    /// after `warm` accesses.
    fn simulated_miss_ratio(lines: &[u64], size: usize, warm: usize, seed: u64) -> f64 {
        let mut random = SplitMix64::new(seed);
        let (mut stored_lines, mut misses) = (Vec::new(), 0u64);
        for (index, &line) in lines.iter().enumerate() {
            if stored_lines.contains(&line) {
                continue;
            }
            misses += u64::from(index >= warm);
            if stored_lines.len() < size {
                stored_lines.push(line);
            } else {
                stored_lines[random.draw_below(size as u64) as usize] = line;
            }
        }
        misses as f64 / (lines.len() - warm) as f64
    }

    /// Does the model agree within 2 points with simulated random replacement, on patterns of different shape?
    #[test]
    fn agrees_with_simulated_random_replacement() {
        let mut random = SplitMix64::new(11);
        let cyclic: Vec<u64> = (0..60_000).map(|index| index % 150).collect();
        let skewed: Vec<u64> = (0..60_000)
            .map(|_| random.draw_below(400) * random.draw_below(400) / 400)
            .collect();
        let mixed: Vec<u64> = (0..60_000u64)
            .map(|index| {
                if index.is_multiple_of(3) {
                    1000 + index / 3 % 200
                } else {
                    random.draw_below(60)
                }
            })
            .collect();
        for (name, stream) in [("cyclic", cyclic), ("skewed", skewed), ("mixed", mixed)] {
            let reuse = all_reuses(&stream);
            for size in [32, 64, 100, 140] {
                let (model, real) = (
                    miss_ratio(&reuse, size).unwrap(),
                    simulated_miss_ratio(&stream, size as usize, 20_000, 5),
                );
                assert!(
                    (model - real).abs() < 0.02,
                    "{name}, {size} lines: model {model:.3}, simulated {real:.3}"
                );
            }
        }
    }

    /// Beside no other program, is a program's miss ratio that of its own misses, and unknown without samples or lines?
    #[test]
    fn a_program_beside_no_other_has_its_solo_ratio() {
        let reuse = all_reuses(&(0..6_000).map(|index| index % 150).collect::<Vec<_>>());
        let solo_ratio = miss_ratio(&reuse, 100).unwrap();
        let co_run_ratio = co_run_miss_ratio(&reuse, solo_ratio, 100).unwrap();
        assert!(
            (co_run_ratio - solo_ratio).abs() < 1e-9,
            "{co_run_ratio} {solo_ratio}"
        );
        assert_eq!(co_run_miss_ratio(&ReuseTimes::new(), 0.5, 100), None);
        assert_eq!(co_run_miss_ratio(&reuse, 0.5, 0), None);
    }

    /// Does the solver find the nonzero root if a program cycles through more lines than fit?
    #[test]
    fn the_solver_finds_the_nonzero_root_of_an_oversized_cycle() {
        let mut cycle = ReuseTimes::new();
        cycle.add_weighted(Some(14), 1000.0); // 15 lines, one after the other, forever
        assert!(miss_ratio(&cycle, 8).unwrap() > 0.5);
        assert!(miss_ratio(&cycle, 14).unwrap() > 0.0);
        assert!(miss_ratio(&cycle, 16).unwrap() < 1e-6);
    }

    /// Are the limits correct: one line, an endless stream, immediate repeats, no evidence?
    #[test]
    fn limits_hold_for_one_line_a_stream_repeats_and_no_evidence() {
        let mut times = ReuseTimes::new();
        assert_eq!(miss_ratio(&times, 8), None);
        times.add(None);
        assert_eq!(miss_ratio(&times, 8), Some(1.0));
        assert_eq!(miss_ratio(&times, 0), None);
        times.add(Some(0));
        assert!((miss_ratio(&times, 8).unwrap() - 0.5).abs() < 1e-9);
        times.add_weighted(Some(3), 2.0);
        assert!((miss_ratio(&times, 1).unwrap() - 0.75).abs() < 1e-9);
    }

    proptest! {
        /// Is the result a root of the equation, and the largest one?
        #[test]
        fn the_result_is_the_largest_root_of_the_equation(
            times in prop::collection::vec((0u64..100_000, 1u32..50), 1..30),
            never in 0u32..20,
            lines in 1u64..5000,
        ) {
            let mut reuse = ReuseTimes::new();
            times.iter().for_each(|&(time, weight)| reuse.add_weighted(Some(time), f64::from(weight)));
            reuse.add_weighted(None, f64::from(never));
            let root = miss_ratio(&reuse, lines).unwrap();
            let sharer = CacheSharer { reuse: &reuse, access_share: 1.0, reuse_stretch: 1.0 };
            let excess_at = |ratio: f64| misses_at(&sharer, ratio, lines).0 - ratio;
            if root > 1e-9 {
                prop_assert!(excess_at(root).abs() < 1e-6, "{} at {root}", excess_at(root));
            }
            for step in 1..=50 {
                let above = root + (1.0 - root) * f64::from(step) / 50.0;
                prop_assert!(above <= root + 1e-6 || excess_at(above) < 1e-9);
            }
        }

        /// Does a larger cache never miss more?
        #[test]
        fn a_larger_cache_misses_no_more(
            times in prop::collection::vec((0u64..10_000, 1u32..50), 1..30),
            lines in 1u64..2000,
        ) {
            let mut reuse = ReuseTimes::new();
            times.iter().for_each(|&(time, weight)| reuse.add_weighted(Some(time), f64::from(weight)));
            reuse.add(None);
            prop_assert!(miss_ratio(&reuse, lines + 1).unwrap() <= miss_ratio(&reuse, lines).unwrap() + 1e-9);
        }
    }
}
