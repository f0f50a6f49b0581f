//! The profile of a service: its solo behavior as a function of the contended cache's size.
//!
//! The profile is the content of the custom resource `WorkloadProfile`; a fleet's description uses the same field
//! names.

use cachemate_core::FieldError;
use cachemate_interval::{ProgramPhase, SizePoint};
use serde::{Deserialize, Serialize};

/// Miss ratio below which the misses of a measured curve are attributed to rounding.
const NEGLIGIBLE_MISS_RATIO: f64 = 1e-3;
/// Maximum number of points of a curve; with more, the resource would exceed 4 KB.
pub const MAX_CURVE_POINTS: usize = 48;

/// Misses with a given size of the contended cache.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MissPoint {
    /// Size of the cache, which the service has to itself.
    pub bytes: f64,
    /// Misses per thousand instructions at this size.
    pub misses_per_kilo_instr: f64,
}

/// Solo behavior of one service, with all its threads together.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkloadProfile {
    /// Cycles per instruction if every reference hits the contended cache.
    pub base_cycles_per_instr: f64,
    /// Cycles that a miss adds; overlap with other misses is included.
    pub stall_cycles_per_miss: f64,
    /// References to the contended cache, which are its misses at size zero.
    pub references_per_kilo_instr: f64,
    /// Lines written back, as a fraction of the lines filled.
    #[serde(default = "default_write_share")]
    pub write_share: f64,
    /// Misses by size, ascending, from one to [`MAX_CURVE_POINTS`] points.
    pub curve: Vec<MissPoint>,
    /// Confidence in the profile, 0 to 1; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certainty: Option<f64>,
}

/// The write share that the interval machine assumes for profiles without one.
fn default_write_share() -> f64 {
    0.3
}

/// Both bounds are allowed; a value that is not a number is refused.
pub(crate) fn check_range(field: &str, value: f64, low: f64, high: f64) -> Result<(), FieldError> {
    match value >= low && value <= high {
        true => Ok(()),
        false => Err(FieldError::new(field, value, format!("{low} to {high}"))),
    }
}

impl WorkloadProfile {
    /// Checks that a program could have this profile.
    ///
    /// # Errors
    /// The first field with an impossible value.
    pub fn check(&self) -> Result<(), FieldError> {
        check_range(
            "base_cycles_per_instr",
            self.base_cycles_per_instr,
            0.05,
            100.0,
        )?;
        check_range(
            "stall_cycles_per_miss",
            self.stall_cycles_per_miss,
            0.0,
            100_000.0,
        )?;

        check_range(
            "references_per_kilo_instr",
            self.references_per_kilo_instr,
            0.0,
            1000.0,
        )?;
        check_range("write_share", self.write_share, 0.0, 1.0)?;
        if let Some(certainty) = self.certainty {
            check_range("certainty", certainty, 0.0, 1.0)?;
        }

        if self.curve.is_empty() || self.curve.len() > MAX_CURVE_POINTS {
            let expected = format!("1 to {MAX_CURVE_POINTS} points");
            return Err(FieldError::new(
                "curve",
                format!("{} points", self.curve.len()),
                expected,
            ));
        }

        for (index, point) in self.curve.iter().enumerate() {
            check_range(&format!("curve[{index}].bytes"), point.bytes, 1.0, 1e15)?;
            let references = self.references_per_kilo_instr;
            check_range(
                &format!("curve[{index}].misses_per_kilo_instr"),
                point.misses_per_kilo_instr,
                0.0,
                references,
            )?;
        }

        if !self.curve.is_sorted_by(|a, b| a.bytes < b.bytes) {
            return Err(FieldError::new(
                "curve",
                "sizes out of order",
                "ascending sizes, each once",
            ));
        }
        Ok(())
    }

    /// Misses per instruction with `bytes` of the cache, interpolated linearly between the points.
    pub fn misses_per_instr(&self, bytes: f64) -> f64 {
        let upper_index = self.curve.partition_point(|point| point.bytes <= bytes);
        let (low, misses_low) = match upper_index.checked_sub(1) {
            Some(index) => (
                self.curve[index].bytes,
                self.curve[index].misses_per_kilo_instr,
            ),
            None => (0.0, self.references_per_kilo_instr),
        };
        let misses_per_kilo_instr = match self.curve.get(upper_index) {
            None => misses_low,
            Some(high) => {
                let fraction = ((bytes - low) / (high.bytes - low)).clamp(0.0, 1.0);
                misses_low + fraction * (high.misses_per_kilo_instr - misses_low)
            }
        };
        misses_per_kilo_instr / 1000.0
    }

    /// Cycles per instruction with `bytes` of the cache, without queueing for memory.
    pub fn cycles_per_instr(&self, bytes: f64) -> f64 {
        self.base_cycles_per_instr + self.stall_cycles_per_miss * self.misses_per_instr(bytes)
    }

    /// Slowdown with `bytes` of a cache relative to having all of its `cache_bytes`, in percent.
    pub fn slowdown_percent(&self, bytes: f64, cache_bytes: f64) -> f64 {
        (self.cycles_per_instr(bytes) / self.cycles_per_instr(cache_bytes) - 1.0) * 100.0
    }

    /// Lines that one CPU fills per cycle with `bytes` of the cache.
    pub fn fills_per_cycle(&self, bytes: f64) -> f64 {
        self.misses_per_instr(bytes) / self.cycles_per_instr(bytes)
    }

    /// Bytes that the service touches: the smallest size without misses. A service that misses at any size has an
    /// infinite footprint, because it fills lines as long as it runs.
    pub fn footprint_bytes(&self) -> f64 {
        let max_misses_per_kilo_instr = NEGLIGIBLE_MISS_RATIO * self.references_per_kilo_instr;
        let fitting_point = self
            .curve
            .iter()
            .find(|point| point.misses_per_kilo_instr <= max_misses_per_kilo_instr);
        fitting_point.map_or(f64::INFINITY, |point| point.bytes)
    }

    /// The behavior of one of `threads` threads of the service, each with an equal part of its memory.
    pub fn thread_phase(&self, threads: u32) -> ProgramPhase {
        let threads = f64::from(threads.max(1));
        let size_point = |point: &MissPoint| {
            let misses_per_instr = point.misses_per_kilo_instr / 1000.0;
            let stall_cycles_per_instr = self.stall_cycles_per_miss * misses_per_instr;
            SizePoint {
                size_bytes: point.bytes / threads,
                cycles_per_instr: self.base_cycles_per_instr + stall_cycles_per_instr,
                demand_fills_per_instr: misses_per_instr,
                prefetch_fills_per_instr: 0.0,
                writebacks_per_instr: self.write_share * misses_per_instr,
                memory_stall_cycles_per_instr: stall_cycles_per_instr,
                without_prefetch: None,
            }
        };

        ProgramPhase {
            instructions: None,
            references_per_instr: self.references_per_kilo_instr / 1000.0,
            points: self.curve.iter().map(size_point).collect(),
            footprint_bytes: None,
            private_levels: Vec::new(),
            sharing: Vec::new(),
            half_private_extra_cycles_per_instr: 0.0,
        }
    }
}

/// Part of a service's memory whose lines are referenced with equal probability.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkingSet {
    /// Size of the working set.
    pub bytes: f64,
    /// Share of all references that access the working set.
    pub share: f64,
}

/// A service's use of memory in closed form: independent references to working sets, and a stream.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceMix {
    /// Cycles per instruction if every reference hits the contended cache.
    pub base_cycles_per_instr: f64,
    /// Cycles that a miss adds; overlap with other misses is included.
    pub stall_cycles_per_miss: f64,
    /// References to the contended cache.
    pub references_per_kilo_instr: f64,
    /// Working sets; the remaining references stream through memory.
    pub working_sets: Vec<WorkingSet>,
    /// Lines written back, as a fraction of the lines filled.
    #[serde(default = "default_write_share")]
    pub write_share: f64,
}

/// Number of sizes of a computed curve, from 32 KiB to 1 GiB.
const CURVE_SIZES: u32 = 31;
/// Size of a cache line of the hosts that report their states, and of the working sets of a mix: that of x86 and of
/// Arm's servers. Reports do not carry it.
pub(crate) const LINE_BYTES: f64 = 64.0;

impl ReferenceMix {
    /// Checks that a program could have this mix.
    ///
    /// # Errors
    /// The first field with an impossible value.
    pub fn check(&self) -> Result<(), FieldError> {
        for (index, set) in self.working_sets.iter().enumerate() {
            check_range(
                &format!("working_sets[{index}].bytes"),
                set.bytes,
                LINE_BYTES,
                1e15,
            )?;
            check_range(&format!("working_sets[{index}].share"), set.share, 0.0, 1.0)?;
        }

        let sum: f64 = self.working_sets.iter().map(|set| set.share).sum();
        if self.working_sets.len() > 16 || sum > 1.0 + 1e-9 {
            let sets = format!("{} sets with shares of {sum}", self.working_sets.len());
            return Err(FieldError::new(
                "working_sets",
                sets,
                "at most 16, with shares of at most 1 together",
            ));
        }
        self.profile().check()
    }

    /// Miss ratio of an LRU cache of this size (Che, Tung and Wang, JSAC 2002): a line stays in the cache for the
    /// time in which the mix touches as many lines as the cache holds.
    pub fn miss_ratio(&self, bytes: f64) -> f64 {
        let lines = bytes / LINE_BYTES;
        let stream_share =
            (1.0 - self.working_sets.iter().map(|set| set.share).sum::<f64>()).max(0.0);
        let touched_lines = |time: f64| {
            let touched_lines_of_set = |set: &WorkingSet| {
                let size = set.bytes / LINE_BYTES;
                size * -libm::expm1(-set.share * time / size)
            };
            self.working_sets
                .iter()
                .map(touched_lines_of_set)
                .sum::<f64>()
                + stream_share * time
        };
        let fits_completely = stream_share <= 0.0
            && self.working_sets.iter().map(|set| set.bytes).sum::<f64>() <= bytes;
        if fits_completely {
            return 0.0;
        }

        let (mut low_time, mut high_time) = (0.0, lines.max(1.0));
        while touched_lines(high_time) < lines && high_time < 1e18 {
            high_time *= 2.0;
        }
        for _ in 0..60 {
            let middle_time = 0.5 * (low_time + high_time);
            if touched_lines(middle_time) < lines {
                low_time = middle_time
            } else {
                high_time = middle_time
            }
        }
        let misses_of_set = |set: &WorkingSet| {
            set.share * libm::exp(-set.share * low_time / (set.bytes / LINE_BYTES))
        };
        (self.working_sets.iter().map(misses_of_set).sum::<f64>() + stream_share).min(1.0)
    }

    /// Points of the curve lie at half-doublings from 32 KiB on.
    pub fn profile(&self) -> WorkloadProfile {
        let miss_point = |index: u32| {
            let bytes = 32_768.0 * libm::exp2(f64::from(index) / 2.0);
            MissPoint {
                bytes,
                misses_per_kilo_instr: self.references_per_kilo_instr * self.miss_ratio(bytes),
            }
        };
        WorkloadProfile {
            base_cycles_per_instr: self.base_cycles_per_instr,
            stall_cycles_per_miss: self.stall_cycles_per_miss,
            references_per_kilo_instr: self.references_per_kilo_instr,
            write_share: self.write_share,
            curve: (0..CURVE_SIZES).map(miss_point).collect(),
            certainty: None,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn mix_of(references: f64, sets: &[(f64, f64)]) -> ReferenceMix {
        ReferenceMix {
            base_cycles_per_instr: 0.6,
            stall_cycles_per_miss: 100.0,
            references_per_kilo_instr: references,
            working_sets: sets
                .iter()
                .map(|&(bytes, share)| WorkingSet { bytes, share })
                .collect(),
            write_share: 0.3,
        }
    }

    const MIB: f64 = 1024.0 * 1024.0;

    /// Does a uniform working set miss as the closed form predicts: by the fraction of it that does not fit?
    #[test]
    fn a_uniform_working_set_misses_by_the_share_that_is_absent() {
        let uniform = mix_of(10.0, &[(8.0 * MIB, 1.0)]);
        for mib in [1.0, 2.0, 4.0, 6.0] {
            assert!(
                (uniform.miss_ratio(mib * MIB) - (1.0 - mib / 8.0)).abs() < 1e-6,
                "{mib}"
            );
        }
        assert_eq!(uniform.miss_ratio(8.0 * MIB), 0.0);
        assert!(
            (mix_of(10.0, &[]).miss_ratio(MIB) - 1.0).abs() < 1e-12,
            "a stream always misses"
        );
    }

    /// Is every curve monotonic, and does a profile reproduce its points?
    #[test]
    fn curves_are_monotonic_and_reproduce_their_points() {
        let profile = mix_of(20.0, &[(MIB, 0.6), (30.0 * MIB, 0.3)]).profile();
        profile.check().unwrap();
        assert!(
            profile
                .curve
                .is_sorted_by(|a, b| a.misses_per_kilo_instr >= b.misses_per_kilo_instr)
        );
        for point in &profile.curve {
            assert!(
                (profile.misses_per_instr(point.bytes) * 1000.0 - point.misses_per_kilo_instr)
                    .abs()
                    < 1e-12
            );
        }
        assert_eq!(profile.misses_per_instr(0.0), 0.02);
    }

    /// Are impossible profiles rejected with the field?
    #[test]
    fn impossible_profiles_are_rejected_with_the_field() {
        let good = mix_of(20.0, &[(MIB, 0.6)]).profile();
        let refused_field = |change: fn(&mut WorkloadProfile)| {
            let mut damaged = good.clone();
            change(&mut damaged);
            damaged.check().unwrap_err().field
        };
        assert_eq!(refused_field(|bad| bad.curve.clear()), "curve");
        assert_eq!(
            refused_field(|bad| bad.curve[1].bytes = f64::NAN),
            "curve[1].bytes"
        );
        assert_eq!(
            refused_field(|bad| bad.curve[2].misses_per_kilo_instr = 1e9),
            "curve[2].misses_per_kilo_instr"
        );
        assert_eq!(refused_field(|bad| bad.curve.swap(0, 1)), "curve");
        assert_eq!(refused_field(|bad| bad.certainty = Some(2.0)), "certainty");
        assert_eq!(
            mix_of(20.0, &[(MIB, 0.6), (MIB, 0.6)])
                .check()
                .unwrap_err()
                .field,
            "working_sets"
        );
    }
}
