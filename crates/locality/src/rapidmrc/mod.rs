//! RapidMRC: a miss-rate curve from one short log of a cache's accesses (thesis ch. 5).
//!
//! Problem: the curve of a running program is wanted without trying every size. Method: the data addresses of all
//! first-level misses are logged for a short time (the thesis: 163 840 entries, about ten times the lines of the
//! cache). To correct effects of the prefetcher, a run of equal values is converted to ascending lines. An LRU stack no
//! deeper than the cache is warmed up and simulated, and the accesses are counted by depth (Mattson). The result has
//! the right shape but is off by a constant, which one measured point removes
//! ([`crate::curve::MissRateCurve::shift_through`]). [`trace_curve`] follows the thesis exactly; [`survival_curve`] is
//! recommended, because its shape is more accurate.
//!
//! Properties: an access deeper than the largest size misses at every size, so a bounded stack would give the same
//! curve as the exact distances that are used here.

mod log_stack;
mod survival;

pub use log_stack::{NO_REUSE, log_distances};
pub use survival::{LogCounts, SetGeometry, survival_curve, survival_curve_with_reach};

use crate::curve::MissRateCurve;

/// The part of the log that fills the stack and is not counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Warmup {
    /// The entries until the stack holds as many lines as the cache; half of the log if it never does (thesis 5.6.1).
    Automatic,
    /// The first half of the log.
    Half,
    /// No entries (RM-2).
    Nothing,
}

/// A log of accesses, with the counts for the time in which it was recorded.
#[derive(Clone, Copy, Debug)]
pub struct MissLog<'a> {
    /// Line addresses, as recorded by the hardware.
    pub lines: &'a [u64],
    /// Positions of code fetches among the lines, ascending; empty if only data was logged.
    pub code_positions: &'a [u32],
    /// Size of these lines in bytes.
    pub line_bytes: u64,
    /// Instructions executed while the log was recorded.
    pub instructions: f64,
    /// Number of accesses known to be missing from the log, for which the rates are scaled up; `None` if unknown.
    pub lost_accesses: Option<u64>,
}

/// Converts runs of equal values, which a prefetcher leaves in a sampled-address register, to ascending lines (thesis
/// 5.3.1). Returns the lines and the number of entries that were changed.
pub fn correct_repeats(lines: &[u64]) -> (Vec<u64>, usize) {
    let (corrected_lines, is_demanded) = correct_and_classify(lines, &[]);
    let changed_count = is_demanded.iter().filter(|&&demanded| !demanded).count();
    (corrected_lines, changed_count)
}

/// Like [`correct_repeats`], but also returns for every entry whether the program requested it; the other entries are
/// prefetches. Prefetches leave only the data register unchanged, so a code fetch between two equal data values does
/// not end their run.
fn correct_and_classify(lines: &[u64], code_positions: &[u32]) -> (Vec<u64>, Vec<bool>) {
    let (mut repeats, mut last_value) = (0, None);
    let mut remaining_code = code_positions.iter().peekable();
    let corrected_lines = lines.iter().enumerate().map(|(index, &line)| {
        if remaining_code
            .next_if(|&&position| position as usize == index)
            .is_some()
        {
            return (line, true);
        }
        repeats = if last_value.replace(line) == Some(line) {
            repeats + 1
        } else {
            0
        };
        (line.wrapping_add(repeats), repeats == 0)
    });
    corrected_lines.unzip()
}

/// Number of log entries that only warm up the stack of a cache with this many lines, and are not counted.
pub fn warmup_entries(lines: &[u64], cache_lines: u64, warmup: Warmup) -> usize {
    warmup_by_distance(&log_distances(lines), cache_lines, warmup)
}

fn warmup_by_distance(distances: &[u32], cache_lines: u64, warmup: Warmup) -> usize {
    let half_length = distances.len() / 2;
    match warmup {
        Warmup::Nothing => 0,
        Warmup::Half => half_length,
        Warmup::Automatic => {
            let mut distinct_lines = 0;
            let filling_entry = distances.iter().position(|&distance| {
                distinct_lines += u64::from(distance == NO_REUSE);
                distinct_lines >= cache_lines
            });
            // If only the very last entry fills the stack, nothing is left to count, so half of the log is used
            // instead.
            filling_entry
                .map(|last| last + 1)
                .filter(|&entries| entries < distances.len())
                .unwrap_or(half_length)
        }
    }
}

/// The unshifted misses per thousand instructions at each of the ascending sizes; `None` for an empty log, no sizes or
/// no instructions.
pub fn trace_curve(
    trace: &MissLog<'_>,
    sizes_bytes: &[u64],
    warmup: Warmup,
    corrects_repeats: bool,
) -> Option<MissRateCurve> {
    let entries = trace.lines.len();
    debug_assert!(
        trace.code_positions.is_empty(),
        "the thesis's log holds data only"
    );
    let largest_lines = sizes_bytes.last()? / trace.line_bytes.max(1);
    if entries == 0 || !(trace.instructions.is_finite() && trace.instructions > 0.0) {
        return None;
    }
    let distances = if corrects_repeats {
        log_distances(&correct_repeats(trace.lines).0)
    } else {
        log_distances(trace.lines)
    };
    let warmup_count = warmup_by_distance(&distances, largest_lines, warmup);
    // Counts by depth; the last position counts all accesses deeper than the cache.
    let mut counts_by_depth = vec![0u64; largest_lines as usize + 1];
    for &distance in &distances[warmup_count..] {
        counts_by_depth[u64::from(distance).min(largest_lines) as usize] += 1;
    }
    let lost_entries = trace.lost_accesses.map_or(0.0, |lost| lost as f64);
    let rate_per_entry = 1000.0 * (entries as f64 + lost_entries)
        / trace.instructions
        / (entries - warmup_count) as f64;
    let (mut hits, mut counted_lines) = (0, 0);
    let point = |&size_bytes: &u64| {
        let lines = (size_bytes / trace.line_bytes.max(1)) as usize;
        hits += counts_by_depth[counted_lines..lines].iter().sum::<u64>();
        counted_lines = lines;
        (
            size_bytes,
            ((entries - warmup_count) as u64 - hits) as f64 * rate_per_entry,
        )
    };
    MissRateCurve::new(sizes_bytes.iter().map(point).collect()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    /// Do runs of equal values become ascending lines, without any other change?
    #[test]
    fn repeats_become_ascending_lines() {
        assert_eq!(
            correct_repeats(&[5, 5, 5, 9, 5, 5]),
            (vec![5, 6, 7, 9, 5, 6], 3)
        );
        assert_eq!(correct_repeats(&[1, 2, 1, 2]), (vec![1, 2, 1, 2], 0));
    }

    /// Do code fetches neither end nor begin a run of equal data values?
    #[test]
    fn code_fetches_do_not_end_or_begin_a_run_of_equal_values() {
        let (lines, demanded) = correct_and_classify(&[5, 90, 5, 90, 90, 7], &[1, 3, 4]);
        assert_eq!(lines, [5, 90, 6, 90, 90, 7]);
        assert_eq!(demanded, [true, true, false, true, true, true]);
    }

    /// Simulates Mattson's stack, no deeper than the cache, as directly as possible. Returns the misses at each size
    /// after the warm-up.
    fn bounded_stack(lines: &[u64], warm: usize, largest: usize) -> Vec<u64> {
        let (mut stack, mut misses): (Vec<u64>, Vec<u64>) = (Vec::new(), vec![0; largest]);
        for (index, &line) in lines.iter().enumerate() {
            let depth = stack.iter().position(|&stored_line| stored_line == line);
            if index >= warm {
                let hits_from = depth.unwrap_or(largest);
                misses[..hits_from]
                    .iter_mut()
                    .for_each(|misses| *misses += 1);
            }
            depth.map(|depth| stack.remove(depth));
            stack.insert(0, line);
            stack.truncate(largest);
        }
        misses
    }

    proptest! {
        /// Does the curve match that of a bounded LRU stack, at every size and with every warm-up?
        #[test]
        fn the_curve_matches_that_of_a_bounded_lru_stack(
            seed in any::<u64>(), spread in 1u64..60, largest in 1u64..40, entries in 2usize..400,
        ) {
            let mut random = SplitMix64::new(seed);
            let lines: Vec<u64> = (0..entries).map(|_| random.draw_below(spread)).collect();
            let sizes: Vec<u64> = (1..=largest).collect();
            for warmup in [Warmup::Automatic, Warmup::Half, Warmup::Nothing] {
                let warm = warmup_entries(&lines, largest, warmup);
                let trace = MissLog { lines: &lines, code_positions: &[], line_bytes: 1, instructions: 1000.0, lost_accesses: None };
                let curve = trace_curve(&trace, &sizes, warmup, false).unwrap();
                let scale = entries as f64 / (entries - warm) as f64;
                for ((_, rate), misses) in curve.points().iter().zip(bounded_stack(&lines, warm, largest as usize)) {
                    prop_assert!((rate - misses as f64 * scale).abs() < 1e-9);
                }
            }
        }
    }

    /// Does automatic warm-up end when the stack is full, or use half of the log if the stack never fills?
    #[test]
    fn warmup_ends_when_the_stack_is_full() {
        let lines: Vec<u64> = (0..100).map(|index| index % 30).collect();
        assert_eq!(warmup_entries(&lines, 20, Warmup::Automatic), 20);
        assert_eq!(warmup_entries(&lines, 31, Warmup::Automatic), 50);
        assert_eq!(warmup_entries(&lines, 20, Warmup::Nothing), 0);
    }

    /// Are the rates scaled up by the accesses known to be missing?
    #[test]
    fn known_losses_scale_the_rates_up() {
        let lines: Vec<u64> = (0..100).collect();
        let rate_with_losses = |lost| {
            let trace = MissLog {
                lines: &lines,
                code_positions: &[],
                line_bytes: 64,
                instructions: 10_000.0,
                lost_accesses: lost,
            };
            trace_curve(&trace, &[640], Warmup::Nothing, false)
                .unwrap()
                .rate_at(640)
                .unwrap()
        };
        assert!((rate_with_losses(None) - 10.0).abs() < 1e-9);
        assert!((rate_with_losses(Some(50)) - 15.0).abs() < 1e-9);
    }
}
