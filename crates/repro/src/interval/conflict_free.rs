//! The sizes of a recording's profile, corrected for conflict misses, and the rates between them.
//!
//! Problem: a profile is measured on caches with fewer ways, which miss by conflict although they have room. In a shared
//! cache with all ways, a program with as much space has no such misses, so a forecast takes them for a lack of space.
//! A working set that is read in a cycle has a cliff: it hits with all of its lines resident, and misses always with a few
//! less. Between two measured sizes, a smooth curve would let it keep a part.
//! Method: each measured size is replaced by the size of the fully associative cache that misses as often. Stack distances
//! of the recording give that cache's misses. Those of the narrow one are the measured fills, between the misses of a cache
//! whose lines are spread evenly and those of Smith's binomial model; beyond it, fills are useless prefetches. Between two
//! measured sizes, the rates are those measured at both, mixed so that misses fall as they do by stack distance.
//! In a shared cache, rates are means over the sets ([`average_over_sets`]).
//! Properties: no measured rate changes; a size never grows; a stream, which misses at every size, keeps its sizes.

use cachemate_core::{AccessSource, BatchEnd, CacheSpec, MachineSpec};
use cachemate_interval::{PhasedProgram, SizePoint, UnprefetchedRates};
use cachemate_locality::curve::{SetMapping, fold_to_ways};
use cachemate_locality::stack::{DistanceHistogram, StackDistances};

use crate::Result;
use crate::setup::{WorkloadJob, failed};

/// Share of the accesses that two miss counts may differ by because of rounding.
const MAX_ROUNDING_SHARE: f64 = 1e-4;
/// Half of the quantiles of a normal distribution at the middles of eight equally likely parts.
const NORMAL_QUANTILES: [f64; 4] = [0.157_311, 0.488_776, 0.887_147, 1.534_121];
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

/// Adds a point at every multiple of `step_bytes` between two measured sizes where misses change. Its rates are those of
/// both sizes, mixed as the misses by stack distance.
fn points_by_distances(
    points: &[SizePoint],
    histogram: &DistanceHistogram,
    step_bytes: f64,
    line_bytes: u64,
) -> Vec<SizePoint> {
    let lines_of_bytes = |size_bytes: f64| size_bytes as u64 / line_bytes;
    let mut all_points = Vec::new();
    for pair in points.windows(2) {
        let (small_point, large_point) = (&pair[0], &pair[1]);
        all_points.push(*small_point);
        let first_step = libm::floor(small_point.size_bytes / step_bytes) as u64 + 1;
        let intermediate_sizes = (first_step..)
            .map(|step| step as f64 * step_bytes)
            .take_while(|size| *size < large_point.size_bytes);
        let sizes: Vec<u64> = [small_point.size_bytes]
            .into_iter()
            .chain(intermediate_sizes)
            .chain([large_point.size_bytes])
            .map(lines_of_bytes)
            .collect();
        let Some(ratios) = histogram.miss_ratio_curve(&sizes) else {
            continue;
        };
        let (largest_ratio, smallest_ratio) = (ratios[0], ratios[ratios.len() - 1]);
        if largest_ratio - smallest_ratio < MAX_ROUNDING_SHARE {
            continue;
        }
        let inner_sizes_and_ratios = sizes.iter().zip(&ratios).take(sizes.len() - 1).skip(1);
        all_points.extend(inner_sizes_and_ratios.map(|(&lines, ratio)| {
            interpolate_rates(
                small_point,
                large_point,
                (largest_ratio - ratio) / (largest_ratio - smallest_ratio),
                (lines * line_bytes) as f64,
            )
        }));
    }
    all_points.extend(points.last());
    all_points
}

/// Returns a phase's points in a cache that others share. Lines between two uses of a line are spread over the sets at
/// random, in part. A set with more of them than on average evicts the line although the cache has room, and one with fewer
/// keeps it although the cache has none (Smith 1978). Rates are means over the sets. With the whole cache they are those
/// measured alone.
pub fn average_over_sets(points: &[SizePoint], cache: &CacheSpec) -> Vec<SizePoint> {
    let (Some(first_point), Some(last_point)) = (points.first(), points.last()) else {
        return Vec::new();
    };
    let way_bytes = cache.size_bytes as f64 / f64::from(cache.ways);
    let relative_deviation = space_deviation(cache);
    // The share x of a set with room for its mean number of lines, at which x + z sqrt(x / 3 ways) fills the set.
    let room_shares = NORMAL_QUANTILES
        .iter()
        .flat_map(|quantile| [*quantile, -quantile])
        .map(|quantile| {
            let half_deviation = 0.5 * quantile * relative_deviation;
            let root = libm::sqrt(1.0 + half_deviation * half_deviation) - half_deviation;
            root * root
        });
    let room_shares: Vec<f64> = room_shares.collect();
    let average_at = |size_bytes: f64| {
        room_shares
            .iter()
            .enumerate()
            .fold(*first_point, |average, (index, room_share)| {
                let point = rates_at_size(points, first_point, size_bytes * room_share);
                interpolate_rates(&average, &point, 1.0 / (index + 1) as f64, size_bytes)
            })
    };
    let inner_sizes = (1..cache.ways).map(|ways| f64::from(ways) * way_bytes);
    let full_point = rates_at_size(
        points,
        first_point,
        last_point.size_bytes.min(cache.size_bytes as f64),
    );
    let inner_sizes =
        inner_sizes.filter(|size| *size > first_point.size_bytes && *size < full_point.size_bytes);
    let full_points = (full_point.size_bytes > first_point.size_bytes).then_some(full_point);
    std::iter::once(*first_point)
        .chain(inner_sizes.map(average_at))
        .chain(full_points)
        .collect()
}

/// Returns one standard deviation of the number of lines in a set, as a share of its ways. Lines that fall into the sets at
/// random have a variance equal to their mean; consecutive pages have none. In between, all deviations are equally likely.
pub fn space_deviation(cache: &CacheSpec) -> f64 {
    1.0 / libm::sqrt(3.0 * f64::from(cache.ways))
}

/// Returns the rates at a size, interpolated over its logarithm.
fn rates_at_size(points: &[SizePoint], first_point: &SizePoint, size_bytes: f64) -> SizePoint {
    let upper = points.partition_point(|point| point.size_bytes <= size_bytes);
    let low_point = upper
        .checked_sub(1)
        .map_or(first_point, |index| &points[index]);
    let Some(high_point) = points.get(upper).filter(|_| upper > 0) else {
        return *low_point;
    };
    let log_ratio = |size_bytes: f64| libm::log(size_bytes / low_point.size_bytes);
    interpolate_rates(
        low_point,
        high_point,
        log_ratio(size_bytes) / log_ratio(high_point.size_bytes),
        size_bytes,
    )
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

/// Returns the rates at `size_bytes`, between two points.
fn interpolate_rates(low: &SizePoint, high: &SizePoint, share: f64, size_bytes: f64) -> SizePoint {
    let interpolate = |low: f64, high: f64| low + share * (high - low);
    let unprefetched = low
        .without_prefetch
        .zip(high.without_prefetch)
        .map(|(low, high)| UnprefetchedRates {
            cycles_per_instr: interpolate(low.cycles_per_instr, high.cycles_per_instr),
            demand_fills_per_instr: interpolate(
                low.demand_fills_per_instr,
                high.demand_fills_per_instr,
            ),
            writebacks_per_instr: interpolate(low.writebacks_per_instr, high.writebacks_per_instr),
            memory_stall_cycles_per_instr: interpolate(
                low.memory_stall_cycles_per_instr,
                high.memory_stall_cycles_per_instr,
            ),
        });
    SizePoint {
        size_bytes,
        cycles_per_instr: interpolate(low.cycles_per_instr, high.cycles_per_instr),
        demand_fills_per_instr: interpolate(
            low.demand_fills_per_instr,
            high.demand_fills_per_instr,
        ),
        prefetch_fills_per_instr: interpolate(
            low.prefetch_fills_per_instr,
            high.prefetch_fills_per_instr,
        ),
        writebacks_per_instr: interpolate(low.writebacks_per_instr, high.writebacks_per_instr),
        memory_stall_cycles_per_instr: interpolate(
            low.memory_stall_cycles_per_instr,
            high.memory_stall_cycles_per_instr,
        ),
        without_prefetch: unprefetched,
    }
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
    use cachemate_interval::closed_form;

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

    /// Does a cyclic working set as large as the cache keep its cliff, and a random one its slope?
    #[test]
    fn a_cyclic_set_keeps_its_cliff_and_a_random_one_its_slope() {
        let cyclic = DistanceHistogram::new(0, [(4095, 1000)]);
        assert_eq!(
            conflict_free_lines(&cyclic, 256, 4096, 20.0),
            4096,
            "it hits with all ways"
        );
        assert_eq!(
            conflict_free_lines(&cyclic, 256, 3072, 1000.0),
            3072,
            "it misses with fewer"
        );
        let mut points = closed_form::stream_phase(64.0, 4096.0, 0.1).points;
        points.push(SizePoint {
            size_bytes: 4096.0 * 64.0,
            demand_fills_per_instr: 0.0,
            ..points[0]
        });
        points[0].size_bytes = 3072.0 * 64.0;
        let fills = |histogram: &DistanceHistogram| {
            let all_points = points_by_distances(&points, histogram, 512.0 * 64.0, 64);
            all_points
                .iter()
                .map(|point| (point.size_bytes / 64.0, point.demand_fills_per_instr))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            fills(&cyclic),
            [(3072.0, 0.1), (3584.0, 0.1), (4096.0, 0.0)]
        );
        let uniform = DistanceHistogram::new(0, (0..4096).map(|distance| (distance, 1)));
        assert_eq!(
            fills(&uniform),
            [(3072.0, 0.1), (3584.0, 0.05), (4096.0, 0.0)]
        );
    }

    /// Does a cyclic working set that fills the cache lose its hits set by set as others take space, does one of half the
    /// cache keep its own, and do rates without a cliff stay as they are?
    #[test]
    fn a_cliff_is_spread_over_sets() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let cache = machine.last_level_cache().unwrap();
        let way_bytes = (cache.size_bytes / 16) as f64;
        let first = closed_form::stream_phase(64.0, 4096.0, 0.1).points[0];
        let fills_by_ways = |curve: &[(f64, f64)]| -> Vec<f64> {
            let point = |&(ways, fills): &(f64, f64)| SizePoint {
                size_bytes: way_bytes * ways,
                demand_fills_per_instr: fills,
                ..first
            };
            let points: Vec<SizePoint> = curve.iter().map(point).collect();
            average_over_sets(&points, cache)
                .iter()
                .map(|point| point.demand_fills_per_instr)
                .collect()
        };
        let full = fills_by_ways(&[(1.0, 0.3), (15.99, 0.3), (16.0, 0.0)]);
        assert_eq!((full.len(), full[15], full[7]), (16, 0.0, 0.3));
        // One line of others in each set, at random: a set has none with probability 1/e.
        assert!(
            (full[14] / 0.3 - 0.63).abs() < 0.1 && full[12] > full[14],
            "{full:?}"
        );
        let half = fills_by_ways(&[(1.0, 0.3), (7.99, 0.3), (8.0, 0.0), (16.0, 0.0)]);
        assert!(
            half[6] > 0.15 && half[7] > 0.1 && half[7] < 0.2 && half[11] < 1e-12,
            "{half:?}"
        );
        assert!(
            fills_by_ways(&[(1.0, 0.3), (16.0, 0.3)])
                .iter()
                .all(|fills| (fills - 0.3).abs() < 1e-12)
        );
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
