//! Miss-rate curves: their sizes, and conversion of measured distances to results.

use cachemate_core::Estimate;
use cachemate_locality::sampled::SampledCurve;
use cachemate_report::{CurveCounts, CurvePoint};
use cachemate_trace::{ProfileFile, ThreadTotals, TraceHeader, TraceTotals};

use crate::bursts::MeasuredDistances;

/// Half-doublings from 4 KiB to 64 MiB, in bytes.
pub fn default_sizes() -> Vec<u64> {
    sizes_in_equal_ratios(4 << 10, 64 << 20, 29)
}

/// Removes the sizes below the recorder's first-level filter, because the recording lacks the accesses that such caches
/// would also serve. Returns the filter's size in bytes if it removed any.
pub fn drop_filtered_sizes(sizes: &mut Vec<u64>, header: &TraceHeader) -> Option<u64> {
    let filter_bytes = header.filter?.size_bytes;
    let original_len = sizes.len();
    sizes.retain(|size| *size >= filter_bytes);
    (sizes.len() < original_len).then_some(filter_bytes)
}

/// `count` (at least 2) sizes from `low` to `high` in equal ratios; inner sizes are rounded down to
/// whole 64-byte lines.
pub fn sizes_in_equal_ratios(low: u64, high: u64, count: usize) -> Vec<u64> {
    let log2_ratio = (high as f64 / low as f64).log2() / (count - 1) as f64;
    let inner_sizes =
        (1..count - 1).map(|index| (low as f64 * (log2_ratio * index as f64).exp2() + 1e-6) as u64);
    let whole_lines = inner_sizes.map(|bytes| if bytes >= 64 { bytes / 64 * 64 } else { bytes });
    std::iter::once(low)
        .chain(whole_lines)
        .chain(std::iter::once(high))
        .collect()
}

/// LRU curve of all threads of a program together, with half the width of each interval as its
/// error: that of the recording, or else the one that was measured while the program ran. `None` if
/// the file has no such curve.
pub fn whole_curve(file: &ProfileFile) -> Option<Vec<CurvePoint>> {
    let recorded_curve = file
        .curves
        .iter()
        .find(|curve| curve.thread.is_none() && curve.policy == "lru");
    let Some(curve) = recorded_curve else {
        return measured_curve(file);
    };
    let convert_point = |point: &cachemate_trace::StoredCurvePoint| {
        let half_width = (point.miss_ratio.high - point.miss_ratio.low) / 2.0;
        CurvePoint {
            bytes: point.size_bytes,
            miss_ratio: point.miss_ratio.value,
            mpki: point.misses_per_kilo_instr.map(|mpki| mpki.value),
            miss_ratio_error: (half_width > 0.0).then_some(half_width),
        }
    };
    Some(curve.points.iter().map(convert_point).collect())
}

/// Curve of the deepest cache that a running program used, from the facts of the profile; `None` if
/// its misses by size or its references are unknown.
fn measured_curve(file: &ProfileFile) -> Option<Vec<CurvePoint>> {
    let curve = file
        .profile
        .locality
        .misses_per_kilo_instr
        .values()
        .next_back()?;
    let references = file.profile.rates.llc_refs_per_mega_instr?.value / 1000.0;
    let convert_point = |&(bytes, misses): &(u64, Estimate)| CurvePoint {
        bytes,
        miss_ratio: misses.value / references,
        mpki: Some(misses.value),
        miss_ratio_error: Some((misses.high - misses.low) / 2.0 / references)
            .filter(|error| *error > 0.0),
    };
    (references > 0.0).then(|| curve.value.iter().map(convert_point).collect())
}

/// Checks a line size.
///
/// # Errors
/// The line size is invalid; the text states the size found and the sizes expected.
pub fn check_line_bytes(line_bytes: u32) -> Result<(), String> {
    match line_bytes.is_power_of_two() && (8..=4096).contains(&line_bytes) {
        true => Ok(()),
        false => Err(format!(
            "found {line_bytes}, expected a power of two from 8 to 4096"
        )),
    }
}

/// Checks a sampling rate.
///
/// # Errors
/// The rate is invalid; the text states the rate found and the rates expected.
pub fn check_rate(rate: f64) -> Result<(), String> {
    match (1e-6..=1.0).contains(&rate) {
        true => Ok(()),
        false => Err(format!(
            "found '{rate}', expected a share of the lines such as 0.01, from 0.000001 to 1"
        )),
    }
}

/// Totals of a trace, or of a part of it, that its records do not contain.
#[derive(Clone, Copy, Default)]
pub struct PartTotals {
    /// Data accesses before any filter; `None` if unknown.
    pub program_accesses: Option<u64>,
    /// Instructions in the recorded window; `None` if unknown.
    pub instructions: Option<u64>,
}

impl PartTotals {
    /// Totals of a whole trace; unknown sums stay unknown.
    pub fn from_totals(totals: Option<&TraceTotals>, instructions_known: bool) -> Self {
        let instructions = totals
            .and_then(|totals| totals.instructions)
            .filter(|_| instructions_known);
        PartTotals {
            program_accesses: totals.and_then(|totals| totals.program_accesses),
            instructions,
        }
    }

    /// Totals of the threads that `is_in_part` selects. A sum is known only if the value of every
    /// selected thread is.
    pub fn for_part(
        totals: Option<&TraceTotals>,
        instructions_known: bool,
        is_in_part: impl Fn(&ThreadTotals) -> bool,
    ) -> Self {
        let Some(totals) = totals else {
            return PartTotals::default();
        };
        let threads: Vec<&ThreadTotals> = totals
            .threads
            .iter()
            .filter(|thread| is_in_part(thread))
            .collect();
        if threads.is_empty() {
            return PartTotals::default();
        }
        PartTotals {
            program_accesses: threads.iter().map(|thread| thread.accesses).sum(),
            instructions: threads
                .iter()
                .map(|t| t.instructions)
                .sum::<Option<u64>>()
                .filter(|_| instructions_known),
        }
    }

    /// Misses per thousand instructions for one miss per access; `None` without instruction counts.
    fn mpki_factor(&self, accesses: u64) -> Option<f64> {
        self.instructions
            .filter(|count| *count > 0)
            .map(|count| accesses as f64 * 1000.0 / count as f64)
    }
}

/// A curve without accesses has no points, and one from bursts has none beyond their reach. `sizes`
/// are bytes.
pub fn curve_counts(
    distances: &MeasuredDistances,
    totals: PartTotals,
    sizes: &[u64],
    line_bytes: u32,
) -> CurveCounts {
    let MeasuredDistances {
        histogram,
        beyond_count,
        bursts,
    } = distances;
    let knows_lines = bursts.is_none() && *beyond_count == 0;
    let to_lines = |bytes: u64| bytes / u64::from(line_bytes);
    let is_in_reach = |bytes: &&u64| {
        bursts
            .as_ref()
            .is_none_or(|bursts| to_lines(**bytes) <= bursts.reach_lines)
    };
    let sizes: Vec<u64> = sizes.iter().filter(is_in_reach).copied().collect();
    let lines: Vec<u64> = sizes.iter().map(|&bytes| to_lines(bytes)).collect();
    // Without accesses there is no miss ratio, and therefore no curve.
    let ratios = histogram.miss_ratio_curve(&lines).unwrap_or_default();
    let accesses = histogram.accesses();
    let mpki_factor = totals.mpki_factor(accesses);
    let build_point = |(bytes, miss_ratio): (&u64, f64)| CurvePoint {
        bytes: *bytes,
        miss_ratio,
        mpki: mpki_factor.map(|scale| miss_ratio * scale),
        miss_ratio_error: bursts
            .as_ref()
            .and_then(|bursts| bursts.miss_ratio_error(to_lines(*bytes))),
    };
    CurveCounts {
        accesses,
        program_accesses: totals.program_accesses,
        instructions: totals.instructions,
        cold: knows_lines.then(|| histogram.cold_count()),
        curve: sizes.iter().zip(ratios).map(build_point).collect(),
    }
}

/// Every point has its error. `sizes` are bytes.
pub fn curve_counts_from_sample(
    curve: &SampledCurve,
    totals: PartTotals,
    sizes: &[u64],
    line_bytes: u32,
) -> CurveCounts {
    let accesses = curve.accesses();
    let mpki_factor = totals.mpki_factor(accesses);
    let estimated_point = |bytes: &u64| {
        let estimate = curve.find_point(bytes / u64::from(line_bytes))?;
        Some(CurvePoint {
            bytes: *bytes,
            miss_ratio: estimate.miss_ratio,
            mpki: mpki_factor.map(|scale| estimate.miss_ratio * scale),
            miss_ratio_error: estimate.half_width,
        })
    };
    CurveCounts {
        accesses,
        program_accesses: totals.program_accesses,
        instructions: totals.instructions,
        cold: None,
        curve: sizes.iter().filter_map(estimated_point).collect(),
    }
}

#[cfg(test)]
mod tests {
    use cachemate_locality::stack::StackLimits;
    use cachemate_trace::L1Filter;

    use super::*;
    use crate::{CurveRequest, CurveSubject, WholeCurve};

    /// Are sizes below the recorder's filter removed, and all sizes of an unfiltered trace kept?
    #[test]
    fn sizes_below_a_recorders_filter_are_removed() {
        let mut header = TraceHeader::for_import("a.cmt", true);
        let mut sizes = vec![4 << 10, 32 << 10, 64 << 10];
        assert_eq!(
            (drop_filtered_sizes(&mut sizes, &header), sizes.len()),
            (None, 3)
        );
        header.filter = Some(L1Filter::default());
        assert_eq!(drop_filtered_sizes(&mut sizes, &header), Some(32 << 10));
        assert_eq!(sizes, [32 << 10, 64 << 10]);
    }

    /// Do the usual sizes have the stated ends, ascend, and hold whole lines?
    #[test]
    fn usual_sizes_are_half_doublings() {
        let sizes = default_sizes();
        assert_eq!(
            (sizes.len(), sizes[0], sizes[2], sizes[28]),
            (29, 4 << 10, 8 << 10, 64 << 20)
        );
        assert!(
            sizes.windows(2).all(|pair| pair[0] < pair[1])
                && sizes.iter().all(|bytes| bytes % 64 == 0)
        );
    }

    /// Is the curve of a sweep over n lines all misses below n, and first touches only from n on; and per instruction
    /// only where instructions are known?
    #[test]
    fn a_sweeps_curve_is_a_step() {
        let sweep: Vec<u64> = (0..100).cycle().take(1000).collect();
        let limits = StackLimits::default();
        let request = CurveRequest::new(CurveSubject::All, 1, limits, None).unwrap();
        let mut measurement = request.begin(1000, &[]);
        measurement.push_addresses(&mut sweep.clone()).unwrap();
        let WholeCurve::Exact(distances) = measurement.finish().unwrap().whole else {
            panic!("not a sample");
        };
        let counts = curve_counts(&distances, PartTotals::default(), &[99 * 64, 100 * 64], 64);
        let ratios: Vec<f64> = counts.curve.iter().map(|point| point.miss_ratio).collect();
        assert_eq!(
            (ratios, counts.cold, counts.curve[0].mpki),
            (vec![1.0, 0.1], Some(100), None)
        );
        let totals = PartTotals {
            instructions: Some(4000),
            ..PartTotals::default()
        };
        assert_eq!(
            curve_counts(&distances, totals, &[99 * 64], 64).curve[0].mpki,
            Some(250.0)
        );
    }

    /// Do errors about line sizes and rates name the value found and the values expected?
    #[test]
    fn errors_about_sizes_and_rates_name_found_and_expected() {
        assert_eq!((check_line_bytes(64), check_rate(0.01)), (Ok(()), Ok(())));
        assert!(
            check_line_bytes(48)
                .unwrap_err()
                .contains("found 48, expected a power of two")
        );
        for rate in [0.0, 1.5, f64::NAN] {
            assert!(
                check_rate(rate)
                    .unwrap_err()
                    .contains("expected a share of the lines"),
                "{rate}"
            );
        }
    }
}
