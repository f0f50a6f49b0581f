//! Miss-rate curves: misses per thousand instructions by cache size.
//!
//! A curve is linear between two measured sizes, and undefined beyond them. Sizing, prediction and reports all use this
//! module, so they agree. It also contains two operations of RapidMRC: the vertical shift through a measured point, and
//! the distance between two curves (thesis 5.3.2, 5.6.1).

use cachemate_core::Estimate;

use crate::stack::DistanceHistogram;

/// Fraction of a curve's fall that counts as reuse; the remainder is noise and first touches.
const REUSE_FALL_SHARE: f64 = 0.95;
/// Relative fall below which a curve shows no reuse.
const MAX_FLAT_FALL: f64 = 0.05;

/// Miss rate of the plateau of a curve that falls from `first_rate` to `last_rate`. The smallest size at which the
/// curve reaches this rate holds all reused lines. `None` for a flat curve.
pub fn plateau_rate(first_rate: f64, last_rate: f64) -> Option<f64> {
    let fall = first_rate - last_rate;
    (fall > MAX_FLAT_FALL * first_rate).then_some(first_rate - REUSE_FALL_SHARE * fall)
}

/// A curve of misses per thousand instructions by cache size in bytes; it has at least one point, and sizes ascend.
#[derive(Clone, PartialEq, Debug)]
pub struct MissRateCurve {
    points: Vec<(u64, f64)>,
}

/// The error for points that do not form a curve.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum CurveError {
    /// There are no points.
    #[error("a miss-rate curve needs at least one point")]
    Empty,
    /// A size is not larger than the preceding size.
    #[error(
        "curve point {at}: found {found} bytes, expected more than the {before} bytes before it"
    )]
    Order {
        /// Index of the point, from 0.
        at: usize,
        /// Size of the point, in bytes.
        found: u64,
        /// Size of the preceding point, in bytes.
        before: u64,
    },
    /// A rate is negative or not finite.
    #[error(
        "curve point {at}: found {found} misses per thousand instructions, expected a number from 0 up"
    )]
    Rate {
        /// Index of the point, from 0.
        at: usize,
        /// Rate at the point, in misses per thousand instructions.
        found: f64,
    },
}

impl MissRateCurve {
    /// Builds a curve from pairs of bytes and misses per thousand instructions.
    ///
    /// # Errors
    /// There are no points, the sizes do not ascend, or a rate is negative or not finite.
    pub fn new(points: Vec<(u64, f64)>) -> Result<Self, CurveError> {
        if points.is_empty() {
            return Err(CurveError::Empty);
        }
        for (index, &(size_bytes, rate)) in points.iter().enumerate() {
            if !(rate.is_finite() && rate >= 0.0) {
                return Err(CurveError::Rate {
                    at: index,
                    found: rate,
                });
            }
            if index > 0 && points[index - 1].0 >= size_bytes {
                return Err(CurveError::Order {
                    at: index,
                    found: size_bytes,
                    before: points[index - 1].0,
                });
            }
        }
        Ok(MissRateCurve { points })
    }

    /// Builds a curve from a profile's curve, and discards the error intervals.
    pub fn from_profile(points: &[(u64, Estimate)]) -> Result<Self, CurveError> {
        Self::new(
            points
                .iter()
                .map(|&(size_bytes, rate)| (size_bytes, rate.value))
                .collect(),
        )
    }

    /// Builds the curve of fully associative LRU caches from stack distances in lines. Returns `None` without sizes or
    /// without instructions, because a rate per instruction would then be undefined.
    pub fn from_histogram(
        histogram: &DistanceHistogram,
        instructions: u64,
        line_bytes: u64,
        sizes_bytes: &[u64],
    ) -> Option<Self> {
        if instructions == 0 || line_bytes == 0 {
            return None;
        }
        let mut sizes = sizes_bytes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let lines: Vec<u64> = sizes.iter().map(|size| size / line_bytes).collect();
        let kilo_instr = instructions as f64 / 1000.0;
        let accesses = histogram.accesses() as f64;
        let ratios = histogram
            .miss_ratio_curve(&lines)
            .unwrap_or(vec![0.0; lines.len()]);
        Self::new(
            sizes
                .into_iter()
                .zip(ratios.iter().map(|ratio| ratio * accesses / kilo_instr))
                .collect(),
        )
        .ok()
    }

    /// Pairs of bytes and misses per thousand instructions, ascending in bytes.
    pub fn points(&self) -> &[(u64, f64)] {
        &self.points
    }

    /// The points as a profile stores them, each with an interval of `half_width` to either side, but never below 0.
    pub fn to_profile_points(&self, half_width: f64) -> Vec<(u64, Estimate)> {
        let rate_interval = |rate: f64| Estimate {
            value: rate,
            low: (rate - half_width).max(0.0),
            high: rate + half_width,
        };
        self.points
            .iter()
            .map(|&(size_bytes, rate)| (size_bytes, rate_interval(rate)))
            .collect()
    }

    /// Like [`Self::to_profile_points`], but sizes beyond `known_bytes` count as unobserved: the interval there reaches
    /// from 0 to the rate at that size, which may be smaller than all sizes of the curve.
    pub fn to_profile_points_up_to(
        &self,
        half_width: f64,
        (known_bytes, known_rate): (u64, f64),
    ) -> Vec<(u64, Estimate)> {
        let mut points = self.to_profile_points(half_width);
        for (_, rate) in points.iter_mut().filter(|(size, _)| *size > known_bytes) {
            *rate = Estimate {
                low: 0.0,
                high: (known_rate + half_width).max(rate.high),
                ..*rate
            };
        }
        points
    }

    /// Misses per thousand instructions at a size, interpolated linearly between points; `None` outside the measured
    /// sizes, because the curve is never extrapolated.
    pub fn rate_at(&self, size_bytes: u64) -> Option<f64> {
        let upper_index = self.points.partition_point(|&(size, _)| size < size_bytes);
        let (high, rate_high) = *self.points.get(upper_index)?;
        if high == size_bytes {
            return Some(rate_high);
        }
        let (low, rate_low) = *self.points.get(upper_index.checked_sub(1)?)?;
        let fraction = (size_bytes - low) as f64 / (high - low) as f64;
        Some(rate_low + fraction * (rate_high - rate_low))
    }

    /// Shifts the curve vertically so that it passes through a measured point (thesis 5.3.2), but never below 0. The
    /// second value is the shift in misses per thousand instructions; `None` if the point lies outside the curve's
    /// sizes.
    pub fn shift_through(&self, size_bytes: u64, measured_rate: f64) -> Option<(Self, f64)> {
        let offset = measured_rate - self.rate_at(size_bytes)?;
        let points = self
            .points
            .iter()
            .map(|&(size, rate)| (size, (rate + offset).max(0.0)))
            .collect();
        Some((Self::new(points).ok()?, offset))
    }

    /// Mean absolute difference to another curve over this curve's sizes, in misses per thousand instructions:
    /// RapidMRC's measure of accuracy (thesis 5.6.1). `None` if the other curve does not cover these sizes.
    pub fn mean_distance(&self, other: &Self) -> Option<f64> {
        let difference = |&(size, rate): &(u64, f64)| Some((other.rate_at(size)? - rate).abs());
        let differences: Option<Vec<f64>> = self.points.iter().map(difference).collect();
        Some(differences?.iter().sum::<f64>() / self.points.len() as f64)
    }
}

/// The assumption by which stack distances of a fully associative cache are converted to LRU positions in a
/// set-associative one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetMapping {
    /// Lines are spread evenly over the sets, so each of the n ways holds one n-th of the cache.
    Even,
    /// Lines fall into sets at random, so each of d lines is in the same set with probability 1 / sets (Smith 1978;
    /// Hill and Smith 1989). As in a real cache, there are conflict misses.
    Hashed,
}

/// Accesses by LRU position 1..=ways of a cache of `sets` x `ways` lines, followed by the misses, as SDC, Animal and
/// Pain need them.
///
/// The result has ways + 1 entries, whose sum is the number of accesses in the histogram. `None` without sets or ways.
pub fn fold_to_ways(
    histogram: &DistanceHistogram,
    sets: u64,
    ways: u32,
    mapping: SetMapping,
) -> Option<Vec<f64>> {
    if sets == 0 || ways == 0 {
        return None;
    }
    let ways = ways as usize;
    let mut positions = vec![0.0; ways + 1];
    positions[ways] = histogram.cold_count() as f64;
    for &(distance, count) in histogram.counts() {
        if mapping == SetMapping::Even || sets == 1 {
            positions[((distance / sets) as usize).min(ways)] += count as f64;
        } else {
            add_binomial(distance, count as f64, 1.0 / sets as f64, &mut positions);
        }
    }
    Some(positions)
}

/// Distributes `count` accesses over the positions by Binomial(`distance`, `set_probability`); the part beyond the last
/// way is added to the misses.
fn add_binomial(distance: u64, count: f64, set_probability: f64, positions: &mut [f64]) {
    let ways = positions.len() - 1;
    let trials = distance as f64;
    let mut log_probability = trials * libm::log1p(-set_probability);
    let log_odds = libm::log(set_probability) - libm::log1p(-set_probability);
    let mut remaining_share = 1.0;
    for (position, slot) in positions[..ways].iter_mut().enumerate() {
        if position as u64 > distance {
            break;
        }
        let share = libm::exp(log_probability).min(remaining_share);
        *slot += count * share;
        remaining_share -= share;
        let k = position as f64;
        if distance > position as u64 {
            log_probability += log_odds + libm::log((trials - k) / (k + 1.0));
        }
        // Past the mean, the remaining terms are negligible.
        if k > trials * set_probability && share < 1e-18 {
            break;
        }
    }
    let misses = if distance < ways as u64 {
        0.0
    } else {
        remaining_share
    };
    // If every line fits, rounding leaves about 1e-16, which belongs to the first position rather than the misses.
    positions[if misses > 0.0 { ways } else { 0 }] += count * remaining_share;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve_of(points: &[(u64, f64)]) -> MissRateCurve {
        MissRateCurve::new(points.to_vec()).unwrap()
    }

    /// Is a curve interpolated linearly between its points, and undefined beyond them?
    #[test]
    fn a_curve_is_linear_between_points_and_undefined_beyond() {
        let curve = curve_of(&[(100, 8.0), (300, 4.0), (400, 4.0)]);
        assert_eq!(curve.rate_at(100), Some(8.0));
        assert_eq!(curve.rate_at(150), Some(7.0));
        assert_eq!(curve.rate_at(400), Some(4.0));
        assert_eq!((curve.rate_at(99), curve.rate_at(401)), (None, None));
    }

    /// Are impossible curves rejected, and does the error name the invalid point?
    #[test]
    fn impossible_curves_are_rejected_with_the_point() {
        assert_eq!(MissRateCurve::new(vec![]), Err(CurveError::Empty));
        assert_eq!(
            MissRateCurve::new(vec![(2, 1.0), (2, 1.0)]),
            Err(CurveError::Order {
                at: 1,
                found: 2,
                before: 2
            })
        );
        let error = MissRateCurve::new(vec![(2, -1.0)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "curve point 0: found -1 misses per thousand instructions, expected a number from 0 up"
        );
    }

    /// Is the histogram's curve per thousand instructions, and is there none without instructions?
    #[test]
    fn a_histogram_needs_instructions_to_be_a_curve() {
        let histogram = DistanceHistogram::new(2, [(0, 3), (5, 5)]);
        assert_eq!(
            MissRateCurve::from_histogram(&histogram, 0, 64, &[64]),
            None
        );
        let curve = MissRateCurve::from_histogram(&histogram, 2000, 64, &[640, 64]).unwrap();
        assert_eq!(curve.points(), &[(64, 3.5), (640, 1.0)]);
    }

    /// Is the rate beyond the known sizes bounded by 0 and the curve's own rate?
    #[test]
    fn unobserved_sizes_are_bounded_from_above_only() {
        let points = curve_of(&[(64, 9.0), (128, 5.0), (192, 4.0), (256, 3.0)])
            .to_profile_points_up_to(0.5, (130, 5.0));
        let ends = |points: &[(u64, Estimate)]| -> Vec<(f64, f64)> {
            points
                .iter()
                .map(|(_, rate)| (rate.low, rate.high))
                .collect()
        };
        assert_eq!(
            ends(&points),
            [(8.5, 9.5), (4.5, 5.5), (0.0, 5.5), (0.0, 5.5)]
        );
        assert!(
            points
                .iter()
                .map(|(_, rate)| rate.value)
                .eq([9.0, 5.0, 4.0, 3.0])
        );
        let unknown = curve_of(&[(64, 0.0), (128, 0.0)]).to_profile_points_up_to(0.5, (32, 12.0));
        assert_eq!(ends(&unknown), [(0.0, 12.5); 2], "no size was observed");
    }

    proptest! {
        /// Does a shifted curve pass through the point and keep its shape above 0, and does shifting back restore it?
        #[test]
        fn a_shift_passes_through_the_point(rates in prop::collection::vec(0.0f64..50.0, 2..16), to in 0.0f64..80.0) {
            let points: Vec<_> = rates.iter().enumerate().map(|(index, &rate)| (index as u64 * 64 + 64, rate)).collect();
            let original_curve = curve_of(&points);
            let (shifted_curve, offset) = original_curve.shift_through(128, to).unwrap();
            prop_assert!((shifted_curve.rate_at(128).unwrap() - to).abs() < 1e-9);
            for (old_point, new_point) in original_curve.points().iter().zip(shifted_curve.points()) {
                prop_assert!((new_point.1 - (old_point.1 + offset).max(0.0)).abs() < 1e-12);
            }
            if offset >= 0.0 {
                prop_assert!((original_curve.mean_distance(&shifted_curve).unwrap() - offset).abs() < 1e-9);
            }
        }

        /// Do folded positions keep all accesses, and does a line that certainly fits never miss?
        #[test]
        fn folding_keeps_all_accesses(
            counts in prop::collection::vec((0u64..3000, 1u64..9), 1..30),
            sets in 1u64..64,
            ways in 1u32..20,
        ) {
            let histogram = DistanceHistogram::new(5, counts.clone());
            for folding in [SetMapping::Even, SetMapping::Hashed] {
                let positions = fold_to_ways(&histogram, sets, ways, folding).unwrap();
                prop_assert_eq!(positions.len(), ways as usize + 1);
                prop_assert!((positions.iter().sum::<f64>() - histogram.accesses() as f64).abs() < 1e-6);
                let sure: u64 = counts.iter().filter(|(d, _)| *d < u64::from(ways)).map(|(_, count)| count).sum();
                prop_assert!(positions[..ways as usize].iter().sum::<f64>() >= sure as f64 - 1e-6);
            }
        }
    }

    /// Does hashed folding agree with an exact set-associative LRU cache of random lines?
    #[test]
    fn hashed_folding_agrees_with_an_exact_set_associative_cache() {
        let mut random = cachemate_core::SplitMix64::new(5);
        let (sets, ways) = (32usize, 8u32);
        let lines: Vec<u64> = (0..120_000)
            .map(|_| random.draw_below(600) * random.draw_below(600) / 600)
            .collect();
        let mut stack: Vec<u64> = Vec::new();
        let mut set_lines: Vec<Vec<u64>> = vec![Vec::new(); sets];
        let mut counts = std::collections::BTreeMap::new();
        let (mut cold, mut exact) = (0, vec![0.0; ways as usize + 1]);
        for &line in &lines {
            match stack.iter().rposition(|&stored_line| stored_line == line) {
                Some(at) => {
                    *counts.entry((stack.len() - 1 - at) as u64).or_insert(0) += 1;
                    stack.remove(at);
                }
                None => cold += 1,
            }
            stack.push(line);
            let set = &mut set_lines[(line.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 59) as usize];
            let position = set
                .iter()
                .rposition(|&other| other == line)
                .map(|index| set.len() - 1 - index);
            exact[position.map_or(ways as usize, |position| position.min(ways as usize))] += 1.0;
            set.retain(|&stored_line| stored_line != line);
            set.push(line);
        }
        let folded = fold_to_ways(
            &DistanceHistogram::new(cold, counts),
            sets as u64,
            ways,
            SetMapping::Hashed,
        )
        .unwrap();
        for (at, (folded, exact)) in folded.iter().zip(&exact).enumerate() {
            assert!(
                (folded - exact).abs() < 0.03 * lines.len() as f64,
                "position {at}: {folded}, exact {exact}"
            );
        }
    }
}
