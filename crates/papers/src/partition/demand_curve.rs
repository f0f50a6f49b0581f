//! The demand of a process for space: misses and cycles per instruction by the number of units.
//!
//! Problem: sizing needs the cost of every size for every process, but only a miss-rate curve (RapidMRC) and the
//! present speed are measured. Method: cycles per instruction are extrapolated from the measured speed along the curve.
//! The cost of a miss is the number of stall cycles beyond the cache divided by the number of misses, as measured for
//! this program. It therefore includes memory-level parallelism and any cache behind (thesis 4.6.3). If a measured
//! stall curve spans the sizes, it is used instead.
//!
//! A log does not contain all accesses; for example, write-through stores are missing. If the measured rate is
//! therefore higher or lower than the curve allows at any size, the whole curve is shifted. Measurements under a share
//! bound the curve ([`DemandCurve::apply_bound`]). Properties: more space never costs more (rises in the curve of an
//! LRU cache are noise). Without a curve and a speed, there is no demand curve.

use cachemate_core::{CacheLevel, Estimate, Fact, FactSource, Profile, RateFacts, SizeCurve};

/// Factor by which the entries of a log are increased if it was too short for the largest size.
pub const ENTRIES_FACTOR: u32 = 4;

/// A speed and a miss rate that were measured in the same windows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MeasuredSpeed {
    /// Cycles per instruction.
    pub cycles_per_instr: f64,
    /// Misses per thousand instructions; `None` if misses were not counted.
    pub misses_per_kilo_instr: Option<f64>,
    /// Cycles stalled beyond the cache per miss; `None` if these were not counted.
    pub stall_cycles_per_miss: Option<f64>,
}

impl MeasuredSpeed {
    /// The share of the cycles that are stalled beyond the cache; `None` if these were not counted.
    pub fn stall_share(&self) -> Option<f64> {
        let misses_per_instr = self.misses_per_kilo_instr? / 1000.0;
        Some(misses_per_instr * self.stall_cycles_per_miss? / self.cycles_per_instr)
    }
}

/// The cost of a process by the number of units that it has.
#[derive(Clone, PartialEq, Debug)]
pub struct DemandCurve {
    /// Misses per thousand instructions with 1, 2, ... units.
    pub misses_per_kilo_instr: Vec<f64>,
    /// Cycles per instruction with 1, 2, ... units.
    pub cycles_per_instr: Vec<f64>,
}

impl DemandCurve {
    /// Builds the demand curve of a profile. `speed` is used if the profile has no solo speed on the whole cache.
    pub fn from_profile(
        profile: &Profile,
        speed: Option<MeasuredSpeed>,
        miss_penalty_cycles: f64,
        cache_bytes: u64,
        units: u32,
    ) -> Option<Self> {
        let bytes_of_units =
            |unit_count: u32| cache_bytes as f64 * f64::from(unit_count) / f64::from(units);
        let curve = profile
            .misses_per_kilo_instr()
            .filter(|curve| !curve.is_empty())?;
        let mut misses = isotonic_decreasing(
            (1..=units)
                .map(|units_held| value_at(curve, bytes_of_units(units_held)))
                .collect(),
        );
        let measured_rate = speed.and_then(|speed| speed.misses_per_kilo_instr);
        let (max_rate, min_rate) = (misses[0], misses[units as usize - 1]);
        let rate_offset = measured_rate.map_or(0.0, |rate| {
            (rate - max_rate).max(0.0) - (min_rate - rate).max(0.0)
        });
        misses
            .iter_mut()
            .for_each(|rate| *rate = (*rate + rate_offset).max(0.0));
        let whole_cache_rate = misses[units as usize - 1];
        let cycles_per_kilo_misses = speed
            .and_then(|speed| speed.stall_cycles_per_miss)
            .unwrap_or(miss_penalty_cycles)
            / 1000.0;
        let extrapolate_cycles = |cycles: f64, rate: f64| -> Vec<f64> {
            // If the speed was measured at a higher miss rate than the curve's, extrapolation must not yield negative
            // cycles.
            misses
                .iter()
                .map(|misses| (cycles + (misses - rate) * cycles_per_kilo_misses).max(0.01))
                .collect()
        };
        let solo_instr_per_cycle = profile
            .rates
            .solo_instr_per_cycle
            .map(|rate| rate.value)
            .filter(|&rate| rate.is_finite() && rate > 0.0);
        let cycles = match (
            solo_instr_per_cycle,
            stalls_by_units(profile, &bytes_of_units, units),
        ) {
            (Some(solo), Some(stalls)) => {
                let minimum = stalls[units as usize - 1];
                stalls
                    .iter()
                    .map(|stalls| 1.0 / solo + (stalls - minimum) / 1000.0)
                    .collect()
            }
            (Some(solo), None) => extrapolate_cycles(1.0 / solo, whole_cache_rate),
            (None, _) => {
                let speed = speed?;
                extrapolate_cycles(
                    speed.cycles_per_instr,
                    speed.misses_per_kilo_instr.unwrap_or(whole_cache_rate),
                )
            }
        };
        let demand_curve = DemandCurve {
            misses_per_kilo_instr: misses,
            cycles_per_instr: cycles,
        };
        let numbers = demand_curve
            .misses_per_kilo_instr
            .iter()
            .chain(&demand_curve.cycles_per_instr);
        numbers
            .into_iter()
            .all(|number| number.is_finite())
            .then_some(demand_curve)
    }

    /// Bounds the curve by a measurement with this number of units that no other program used: more units cost at most
    /// as much, and fewer at least as much.
    #[must_use]
    pub fn apply_bound(mut self, units: u32, measured_speed: MeasuredSpeed) -> Self {
        let bound_values = |values: &mut [f64], measured_value: f64| {
            for (index, value) in values.iter_mut().enumerate() {
                let units_held = index as u32 + 1;
                if units_held <= units {
                    *value = value.max(measured_value);
                }
                if units_held >= units {
                    *value = value.min(measured_value);
                }
            }
        };
        bound_values(&mut self.cycles_per_instr, measured_speed.cycles_per_instr);
        if let Some(rate) = measured_speed.misses_per_kilo_instr {
            bound_values(&mut self.misses_per_kilo_instr, rate);
        }
        self
    }

    /// The mean curve of several threads of one process.
    pub fn mean_of_curves(curves: &[DemandCurve]) -> Option<Self> {
        let first = curves.first()?;
        let mean_values = |values_of: fn(&DemandCurve) -> &[f64]| -> Vec<f64> {
            let mean_at = |index: usize| {
                curves
                    .iter()
                    .map(|curve| values_of(curve)[index])
                    .sum::<f64>()
                    / curves.len() as f64
            };
            (0..values_of(first).len()).map(mean_at).collect()
        };
        let misses = mean_values(|curve| &curve.misses_per_kilo_instr);
        Some(DemandCurve {
            misses_per_kilo_instr: misses,
            cycles_per_instr: mean_values(|curve| &curve.cycles_per_instr),
        })
    }

    /// Units of the whole cache, the largest allocation that the curve knows.
    pub fn units(&self) -> u32 {
        self.cycles_per_instr.len() as u32
    }
    /// The cycles per instruction of the process on the whole cache.
    pub fn whole_cache_cycles(&self) -> f64 {
        self.cycles_per_instr[self.cycles_per_instr.len() - 1]
    }
    /// The slowdown with one unit compared with all units, as a fraction.
    pub fn sensitivity(&self) -> f64 {
        self.cycles_per_instr[0] / self.whole_cache_cycles() - 1.0
    }
    /// The smallest number of units that slow the process down by at most this fraction, compared with the whole cache;
    /// all units always suffice.
    pub fn min_units_within(&self, max_slowdown: f64) -> u32 {
        let limit = self.whole_cache_cycles() * (1.0 + max_slowdown.max(0.0)) * (1.0 + 1e-12);
        crate::solvers::sizing::min_units_for_cost(&self.cycles_per_instr, limit)
            .unwrap_or(self.units())
    }

    /// Converts the demand to a profile for a predictor: the curve, the stalls that yield these cycles, and the solo
    /// speed.
    pub fn to_profile(&self, level: CacheLevel, cache_bytes: u64) -> Profile {
        let units = u64::from(self.units());
        let curve_points = |values: &[f64], offset: f64, scale: f64| {
            let curve_point = |(index, value): (usize, &f64)| {
                (
                    cache_bytes * (index as u64 + 1) / units,
                    Estimate::exact((value - offset) * scale),
                )
            };
            values
                .iter()
                .enumerate()
                .map(curve_point)
                .collect::<SizeCurve>()
        };

        let solo = Some(Fact::oracle(1.0 / self.whole_cache_cycles()));
        Profile::default()
            .with_misses(
                level,
                curve_points(&self.misses_per_kilo_instr, 0.0, 1.0),
                FactSource::Oracle,
            )
            .with_stalls(
                level,
                curve_points(&self.cycles_per_instr, self.whole_cache_cycles(), 1000.0),
                FactSource::Oracle,
            )
            .with_rates(RateFacts {
                solo_instr_per_cycle: solo,
                ..RateFacts::default()
            })
    }
}

/// Whether a curve is far less certain at this size than where it is most certain.
pub fn is_uncertain_at(curve: &SizeCurve, bytes: f64) -> bool {
    let error_width = |(_, rate): &(u64, Estimate)| rate.high - rate.low;
    let min_width = curve.iter().map(error_width).fold(f64::INFINITY, f64::min);
    let curve_point = curve
        .iter()
        .find(|(size, _)| *size as f64 >= bytes)
        .or(curve.last());
    curve_point.is_some_and(|point| error_width(point) > 2.0 * min_width)
}

/// The stalls by number of units; `None` unless the stall curve spans the sizes, because it is unknown beyond its ends.
fn stalls_by_units(
    profile: &Profile,
    size_of_units: &impl Fn(u32) -> f64,
    units: u32,
) -> Option<Vec<f64>> {
    let curve = profile.stalls_per_kilo_instr()?;
    let (first_bytes, last_bytes) = (curve.first()?.0 as f64, curve.last()?.0 as f64);
    let is_spanning = curve.len() >= 3
        && first_bytes <= size_of_units(2.min(units))
        && last_bytes >= size_of_units(units) * 0.99;
    is_spanning.then(|| {
        isotonic_decreasing(
            (1..=units)
                .map(|units_held| value_at(curve, size_of_units(units_held)))
                .collect(),
        )
    })
}

/// Interpolates linearly between the points; the curve is constant beyond its ends.
fn value_at(curve: &[(u64, Estimate)], bytes: f64) -> f64 {
    let upper_index = curve.partition_point(|(size, _)| (*size as f64) < bytes);
    if upper_index == 0 || upper_index == curve.len() {
        return curve[upper_index.min(curve.len() - 1)].1.value;
    }
    let ((low, a), (high, b)) = (curve[upper_index - 1], curve[upper_index]);
    let fraction = (bytes - low as f64) / (high - low).max(1) as f64;
    a.value + fraction * (b.value - a.value)
}

/// The closest falling curve (least squares, pool adjacent violators). Rises are averaged rather than cut off, so that
/// one low reading does not pull down all later points.
fn isotonic_decreasing(values: Vec<f64>) -> Vec<f64> {
    let mut blocks: Vec<(f64, usize)> = Vec::with_capacity(values.len());
    for value in values {
        blocks.push((value, 1));
        while let [.., (previous_value, count), (last_value, last_count)] = blocks[..] {
            if previous_value >= last_value {
                break;
            }
            blocks.truncate(blocks.len() - 2);
            let total_count = count + last_count;
            blocks.push((
                (previous_value * count as f64 + last_value * last_count as f64)
                    / total_count as f64,
                total_count,
            ));
        }
    }

    blocks
        .into_iter()
        .flat_map(|(value, count)| std::iter::repeat_n(value, count))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHE: u64 = 4 << 20;

    fn curve_fixture(rates: &[f64]) -> SizeCurve {
        let point = |(index, &rate): (usize, &f64)| {
            (
                CACHE * (index as u64 + 1) / rates.len() as u64,
                Estimate::exact(rate),
            )
        };
        rates.iter().enumerate().map(point).collect()
    }
    fn profile_fixture(rates: &[f64]) -> Profile {
        Profile::default().with_misses(CacheLevel::L2, curve_fixture(rates), FactSource::Oracle)
    }

    /// Do cycles follow the curve from the measured speed, at the measured stall of a miss?
    #[test]
    fn cycles_follow_the_curve_from_the_measured_speed() {
        let speed = MeasuredSpeed {
            cycles_per_instr: 2.0,
            misses_per_kilo_instr: Some(20.0),
            stall_cycles_per_miss: Some(50.0),
        };
        let space = DemandCurve::from_profile(
            &profile_fixture(&[40.0, 20.0, 10.0, 10.0]),
            Some(speed),
            300.0,
            CACHE,
            4,
        )
        .unwrap();
        assert_eq!(space.cycles_per_instr, [3.0, 2.0, 1.5, 1.5]);

        assert_eq!(
            (
                space.sensitivity(),
                space.min_units_within(0.0),
                space.min_units_within(0.4)
            ),
            (1.0, 3, 2)
        );
    }

    /// Does a rate that fits no size shift the curve, whereas one that fits a size does not?
    #[test]
    fn a_rate_that_no_size_explains_shifts_the_curve() {
        let speed = |rate| MeasuredSpeed {
            cycles_per_instr: 2.0,
            misses_per_kilo_instr: Some(rate),
            stall_cycles_per_miss: Some(100.0),
        };
        let demand = |rate| {
            DemandCurve::from_profile(
                &profile_fixture(&[4.0, 1.0, 0.0, 0.0]),
                Some(speed(rate)),
                300.0,
                CACHE,
                4,
            )
            .unwrap()
        };
        assert_eq!(demand(3.0).misses_per_kilo_instr, [4.0, 1.0, 0.0, 0.0]);
        assert_eq!(demand(7.0).misses_per_kilo_instr, [7.0, 4.0, 3.0, 3.0]);

        let high = DemandCurve::from_profile(
            &profile_fixture(&[4.0, 3.0, 3.0, 2.0]),
            Some(speed(1.5)),
            300.0,
            CACHE,
            4,
        )
        .unwrap();
        assert_eq!(high.misses_per_kilo_instr, [3.5, 2.5, 2.5, 1.5]);
        assert_eq!(
            demand(7.0).cycles_per_instr[0],
            2.0,
            "it is as fast as with the least space, at best"
        );
    }

    /// Does a measurement under a share bound the curve from above for more units, and from below for fewer?
    #[test]
    fn measured_shares_bound_the_curve() {
        let flat = DemandCurve {
            misses_per_kilo_instr: vec![1.0; 4],
            cycles_per_instr: vec![2.0, 1.5, 1.2, 1.1],
        };
        let measured = |cycles| MeasuredSpeed {
            cycles_per_instr: cycles,
            misses_per_kilo_instr: None,
            stall_cycles_per_miss: None,
        };
        assert_eq!(
            flat.clone().apply_bound(2, measured(3.0)).cycles_per_instr,
            [3.0, 3.0, 1.2, 1.1]
        );
        assert_eq!(
            flat.clone().apply_bound(2, measured(1.15)).cycles_per_instr,
            [2.0, 1.15, 1.15, 1.1]
        );
    }

    /// Is a stall curve used if it spans the sizes, and ignored otherwise?
    #[test]
    fn stall_curves_count_if_they_span_the_sizes() {
        let solo = RateFacts {
            solo_instr_per_cycle: Some(Fact::oracle(1.0)),
            ..RateFacts::default()
        };
        let profile_with_solo = profile_fixture(&[40.0, 20.0, 10.0, 10.0]).with_rates(solo);
        let stalls = curve_fixture(&[500.0, 100.0, 100.0, 100.0]);
        let profile_with_stalls = profile_with_solo.with_stalls(
            CacheLevel::L2,
            stalls.clone(),
            FactSource::StallCounters,
        );
        let cycles = |profile: &Profile| {
            DemandCurve::from_profile(profile, None, 100.0, CACHE, 4)
                .unwrap()
                .cycles_per_instr
        };
        assert_eq!(cycles(&profile_with_stalls), [1.4, 1.0, 1.0, 1.0]);
        let short = profile_with_stalls.with_stalls(
            CacheLevel::L2,
            stalls[2..].to_vec(),
            FactSource::StallCounters,
        );
        assert_eq!(cycles(&short), [4.0, 2.0, 1.0, 1.0]);
    }

    /// Is there no demand curve without a miss-rate curve or a speed?
    #[test]
    fn there_is_no_demand_curve_without_evidence() {
        assert_eq!(
            DemandCurve::from_profile(&profile_fixture(&[1.0]), None, 100.0, CACHE, 4),
            None
        );
        let speed = MeasuredSpeed {
            cycles_per_instr: 2.0,
            misses_per_kilo_instr: None,
            stall_cycles_per_miss: None,
        };
        assert_eq!(
            DemandCurve::from_profile(&Profile::default(), Some(speed), 100.0, CACHE, 4),
            None
        );
    }

    /// Are rises of a noisy curve averaged out?
    #[test]
    fn rises_of_a_noisy_curve_are_averaged_out() {
        assert_eq!(
            isotonic_decreasing(vec![5.0, 1.0, 3.0, 2.0, 0.0]),
            [5.0, 2.0, 2.0, 2.0, 0.0]
        );
    }
}
