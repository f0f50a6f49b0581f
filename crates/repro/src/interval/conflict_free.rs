//! The sizes of a recording's profile, corrected for conflict misses.
//!
//! Problem: a profile is measured on caches with fewer ways, which miss by conflict although they have room. In a shared
//! cache with all ways, a program with as much space has no such misses, so a forecast takes them for a lack of space.
//! Method: each measured size is replaced by the size of the fully associative cache that misses as often. Stack distances
//! of the recording give that cache's misses. Those of the narrow one are the measured fills, between the misses of a cache
//! whose lines are spread evenly and those of Smith's binomial model; beyond it, fills are useless prefetches. Between two
//! measured sizes, rates follow the misses ([`super::set_means`]).
//! Properties: no measured rate changes; a size never grows; a stream, which misses at every size, keeps its sizes.

use cachemate_core::{AccessSource, BatchEnd, MachineSpec};
use cachemate_interval::{PhasedProgram, SizePoint};
use cachemate_locality::curve::{SetMapping, fold_to_ways};
use cachemate_locality::stack::{DistanceHistogram, StackDistances};

use super::set_means::{MAX_ROUNDING_SHARE, interpolate_rates, points_by_distances};
use crate::Result;
use crate::setup::{WorkloadJob, failed};

/// Number of sizes at which the interval machine tabulates rates.
const TABULATED_SIZE_COUNT: f64 = 64.0;

/// Replaces the sizes of `program`, which [`super::nominal::measure_instructions`] gave for `job` after
/// `start_up_instr`.
pub fn correct_sizes(
    program: &mut PhasedProgram,
    job: &WorkloadJob,
    machine: &MachineSpec,
    start_up_instr: u64,
) -> Result<()> {
    let Some(cache) = machine.last_level_cache() else {
        return Ok(());
    };
    let (line_bytes, ways) = (u64::from(cache.line_bytes), u64::from(cache.ways));
    let set_count = cache.size_bytes / line_bytes / ways;
    let measured_instr: f64 = program
        .phases
        .iter()
        .filter_map(|phase| phase.instructions)
        .sum();
    let mut threads = job.start_threads(0)?;
    let Some(source) = threads.first_mut() else {
        return Ok(());
    };
    let from_instr = start_up_instr as f64;
    let Some(histogram) = access_distances(
        source.as_mut(),
        line_bytes,
        from_instr,
        from_instr + measured_instr,
    )
    .map_err(failed(&job.name))?
    else {
        return Ok(());
    };
    let fills_at = |index: usize| -> f64 {
        let fills = program.phases.iter().filter_map(|phase| {
            let point = phase.points.get(index)?;
            Some(
                (point.demand_fills_per_instr + point.prefetch_fills_per_instr)
                    * phase.instructions?,
            )
        });
        fills.sum()
    };
    let size_count = program.phases.first().map_or(0, |phase| phase.points.len());
    let fills_by_size: Vec<f64> = (0..size_count).map(fills_at).collect();
    let step_bytes = cache.size_bytes as f64 / TABULATED_SIZE_COUNT;
    let [way_bytes, quarter_bytes] = [ways, 4].map(|divisor| (cache.size_bytes / divisor) as f64);
    for phase in &mut program.phases {
        let index_of = |size_bytes: f64| {
            phase
                .points
                .partition_point(|point| point.size_bytes < size_bytes)
        };
        let unprefetched_indices = [0, index_of(way_bytes), index_of(quarter_bytes), size_count];
        let mut previous_lines = 0;
        for (point, fills) in phase.points.iter_mut().zip(&fills_by_size) {
            let lines = (point.size_bytes / line_bytes as f64) as u64;
            let corrected_lines =
                conflict_free_lines(&histogram, set_count, lines, *fills).max(previous_lines + 1);
            point.size_bytes = (corrected_lines * line_bytes) as f64;
            previous_lines = corrected_lines;
        }
        interpolate_unprefetched(
            &mut phase.points,
            unprefetched_indices,
            &histogram,
            line_bytes,
        );
        phase.points = points_by_distances(&phase.points, &histogram, step_bytes, line_bytes);
    }
    Ok(())
}

/// Replaces the rates without prefetchers between the sizes at which they were measured, in ascending order.
fn interpolate_unprefetched(
    points: &mut [SizePoint],
    measured_indices: [usize; 4],
    histogram: &DistanceHistogram,
    line_bytes: u64,
) {
    let Some(last_index) = points.len().checked_sub(1) else {
        return;
    };
    for pair in measured_indices
        .map(|index| index.min(last_index))
        .windows(2)
    {
        let (first_index, end_index) = (pair[0], pair[1]);
        let (first_point, end_point) = (points[first_index], points[end_index]);
        let misses =
            |point: &SizePoint| histogram.misses_at(point.size_bytes as u64 / line_bytes) as f64;
        let (first_misses, end_misses) = (misses(&first_point), misses(&end_point));
        if first_misses - end_misses < MAX_ROUNDING_SHARE * histogram.accesses() as f64 {
            continue;
        }
        for point in points.iter_mut().take(end_index).skip(first_index + 1) {
            let mixing_share = (first_misses - misses(point)) / (first_misses - end_misses);
            point.without_prefetch =
                interpolate_rates(&first_point, &end_point, mixing_share, point.size_bytes)
                    .without_prefetch;
        }
    }
}

/// Returns the distances of the accesses from instruction `from_instr` to `to_instr`, in a cache that is warm by then;
/// `None` if the source ends before.
fn access_distances(
    source: &mut dyn AccessSource,
    line_bytes: u64,
    from_instr: f64,
    to_instr: f64,
) -> Result<Option<DistanceHistogram>, cachemate_locality::stack::StackError> {
    let (mut start_up_distances, mut all_distances) =
        (StackDistances::new(), StackDistances::new());
    let (mut batch, mut lines, mut instructions) = (Vec::new(), Vec::new(), 0.0);
    while instructions < to_instr {
        batch.clear();
        let batch_end = source.next_batch(&mut batch);
        let is_start_up = instructions < from_instr;
        lines.clear();
        for access in &batch {
            instructions += access.instructions() as f64;
            if access.is_data() {
                lines.push(access.address() / line_bytes);
            }
        }
        all_distances.push(&lines)?;
        if is_start_up {
            start_up_distances.push(&lines)?;
        }
        if !matches!(batch_end, BatchEnd::More) || batch.is_empty() {
            return Ok(None);
        }
    }
    let (start_up_histogram, full_histogram) =
        (start_up_distances.finish()?, all_distances.finish()?);
    let mut start_up_counts = start_up_histogram.counts().iter().copied().peekable();
    let counts = full_histogram.counts().iter().map(|&(distance, count)| {
        let start_up_count =
            start_up_counts.next_if(|&(earlier_distance, _)| earlier_distance == distance);
        (
            distance,
            count - start_up_count.map_or(0, |(_, earlier_count)| earlier_count),
        )
    });
    Ok(Some(DistanceHistogram::new(
        full_histogram.cold_count() - start_up_histogram.cold_count(),
        counts.collect::<Vec<_>>(),
    )))
}

/// Returns the lines of a fully associative cache that misses as often as one of `lines` in these sets, at most
/// `lines`. The narrow cache was measured to have so many fills.
fn conflict_free_lines(histogram: &DistanceHistogram, sets: u64, lines: u64, fills: f64) -> u64 {
    // A part smaller than a way has all ways of fewer sets.
    if lines < sets {
        return lines;
    }
    let misses = |mapping: SetMapping| {
        let folded = fold_to_ways(histogram, sets, (lines / sets) as u32, mapping)?;
        folded.last().copied()
    };
    let Some((even_misses, hashed_misses)) =
        misses(SetMapping::Even).zip(misses(SetMapping::Hashed))
    else {
        return lines;
    };
    let rounding_misses = MAX_ROUNDING_SHARE * histogram.accesses() as f64;
    let narrow_misses =
        fills.max(even_misses).min(hashed_misses.max(even_misses)) - rounding_misses;
    // The largest size with at least these misses: misses fall with the size.
    let (mut low_lines, mut high_lines) = (0, lines + 1);
    while high_lines - low_lines > 1 {
        let middle_lines = low_lines + (high_lines - low_lines) / 2;
        if histogram.misses_at(middle_lines) as f64 >= narrow_misses {
            low_lines = middle_lines
        } else {
            high_lines = middle_lines
        }
    }
    // At a cliff, the next line may be nearer to these misses.
    let miss_difference = |lines: u64| (histogram.misses_at(lines) as f64 - narrow_misses).abs();
    if low_lines < lines && miss_difference(low_lines + 1) < miss_difference(low_lines) {
        low_lines + 1
    } else {
        low_lines.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_interval::{UnprefetchedRates, closed_form};

    /// Does a stream keep its sizes, and is a working set that a narrow cache holds with conflicts corrected to its own size?
    #[test]
    fn only_conflicts_are_corrected() {
        let stream = DistanceHistogram::new(100_000, []);
        assert_eq!(conflict_free_lines(&stream, 1024, 4096, 100_000.0), 4096);
        // Random references to 3,000 lines: all distances are equally frequent.
        let uniform = DistanceHistogram::new(0, (0..3_000).map(|distance| (distance, 100)));
        let misses = |ways| {
            *fold_to_ways(&uniform, 1024, ways, SetMapping::Hashed)
                .unwrap()
                .last()
                .unwrap()
        };
        let corrected = conflict_free_lines(&uniform, 1024, 4 * 1024, misses(4));
        assert!(
            (2_000..3_000).contains(&corrected),
            "{corrected}: some lines conflict in four ways"
        );
        assert_eq!(
            conflict_free_lines(&uniform, 1024, 4 * 1024, 2.0 * misses(4)),
            corrected,
            "useless prefetches"
        );
        assert_eq!(
            conflict_free_lines(&uniform, 1024, 16 * 1024, 0.0),
            16 * 1024,
            "no line conflicts in sixteen ways"
        );
    }

    /// Does a cyclic working set keep its size, whether it hits with all ways or misses with fewer?
    #[test]
    fn a_cyclic_set_keeps_its_size() {
        let cyclic = DistanceHistogram::new(0, [(4095, 1000)]);
        assert_eq!(conflict_free_lines(&cyclic, 256, 4096, 20.0), 4096);
        assert_eq!(conflict_free_lines(&cyclic, 256, 3072, 1000.0), 3072);
    }

    /// Without prefetchers, does a cyclic working set miss always at every size below its own?
    #[test]
    fn rates_without_prefetchers_have_the_same_cliff() {
        let bare = |fills: f64| UnprefetchedRates {
            cycles_per_instr: 1.0 + fills,
            demand_fills_per_instr: fills,
            writebacks_per_instr: 0.0,
            memory_stall_cycles_per_instr: fills,
        };
        let first = closed_form::stream_phase(64.0, 4096.0, 0.1).points[0];
        let point = |lines: f64, fills: f64| SizePoint {
            size_bytes: 64.0 * lines,
            without_prefetch: Some(bare(fills)),
            ..first
        };
        // Interpolated by the size, half of the lines were hits at three quarters of the cache.
        let mut points = [
            point(512.0, 0.3),
            point(1024.0, 0.3),
            point(3072.0, 0.1),
            point(4096.0, 0.0),
        ];
        interpolate_unprefetched(
            &mut points,
            [0, 0, 1, 3],
            &DistanceHistogram::new(0, [(4095, 1000)]),
            64,
        );
        assert_eq!(points[2].without_prefetch, Some(bare(0.3)));
    }
}
