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
//! Properties: no measured rate changes; a size never grows; a stream, which misses at every size, keeps its sizes.

use cachemate_core::{AccessSource, BatchEnd, MachineSpec};
use cachemate_interval::{PhasedProgram, SizePoint, UnprefetchedRates};
use cachemate_locality::curve::{SetMapping, fold_to_ways};
use cachemate_locality::stack::{DistanceHistogram, StackDistances};

use crate::ReproError;
use crate::setup::{WorkloadJob, failed};

/// Share of the accesses that two miss counts may differ by because of rounding.
const ROUNDING_SHARE: f64 = 1e-4;
/// Number of sizes at which the interval machine tabulates rates.
const TABULATED_SIZES: f64 = 64.0;

/// Replaces the sizes of `program`, which [`super::nominal::measure`] gave for `job`.
pub fn correct_sizes(program: &mut PhasedProgram, job: &WorkloadJob, machine: &MachineSpec) -> Result<(), ReproError> {
    let Some(cache) = machine.last_level() else { return Ok(()) };
    let (line_bytes, ways) = (u64::from(cache.line_bytes), u64::from(cache.ways));
    let sets = cache.size_bytes / line_bytes / ways;
    let measured: f64 = program.phases.iter().filter_map(|phase| phase.instructions).sum();
    let mut threads = job.start_threads(0)?;
    let Some(source) = threads.first_mut() else { return Ok(()) };
    let Some(histogram) = access_distances(source.as_mut(), line_bytes, measured / 3.0, measured * 4.0 / 3.0)
        .map_err(failed(&job.name))?
    else {
        return Ok(());
    };
    let fills_at = |index: usize| -> f64 {
        let fills = program.phases.iter().filter_map(|phase| {
            let point = phase.points.get(index)?;
            Some((point.demand_fills_per_instr + point.prefetch_fills_per_instr) * phase.instructions?)
        });
        fills.sum()
    };
    let sizes = program.phases.first().map_or(0, |phase| phase.points.len());
    let fills: Vec<f64> = (0..sizes).map(fills_at).collect();
    let step_bytes = cache.size_bytes as f64 / TABULATED_SIZES;
    let quarter_bytes = (cache.size_bytes / 4) as f64;
    for phase in &mut program.phases {
        let quarter = phase.points.partition_point(|point| point.size_bytes < quarter_bytes);
        let mut previous_lines = 0;
        for (point, fills) in phase.points.iter_mut().zip(&fills) {
            let lines = (point.size_bytes / line_bytes as f64) as u64;
            let corrected = conflict_free_lines(&histogram, sets, lines, *fills).max(previous_lines + 1);
            point.size_bytes = (corrected * line_bytes) as f64;
            previous_lines = corrected;
        }
        mix_unprefetched(&mut phase.points, quarter, &histogram, line_bytes);
        phase.points = follow_distances(&phase.points, &histogram, step_bytes, line_bytes);
    }
    Ok(())
}

/// Replaces the rates without prefetchers between the three sizes at which they were measured: the smallest, the point
/// `quarter` and the largest.
fn mix_unprefetched(points: &mut [SizePoint], quarter: usize, histogram: &DistanceHistogram, line_bytes: u64) {
    let Some(last) = points.len().checked_sub(1) else { return };
    for (first, end) in [(0, quarter.min(last)), (quarter.min(last), last)] {
        let (low, high) = (points[first], points[end]);
        let misses = |point: &SizePoint| histogram.misses_at(point.size_bytes as u64 / line_bytes) as f64;
        let (most, least) = (misses(&low), misses(&high));
        if most - least < ROUNDING_SHARE * histogram.accesses() as f64 {
            continue;
        }
        for point in points.iter_mut().take(end).skip(first + 1) {
            let share = (most - misses(point)) / (most - least);
            point.without_prefetch = mix(&low, &high, share, point.size_bytes).without_prefetch;
        }
    }
}

/// Adds a point at every multiple of `step_bytes` between two measured sizes where misses change. Its rates are those of
/// both sizes, mixed as the misses by stack distance.
fn follow_distances(
    points: &[SizePoint],
    histogram: &DistanceHistogram,
    step_bytes: f64,
    line_bytes: u64,
) -> Vec<SizePoint> {
    let lines = |size_bytes: f64| size_bytes as u64 / line_bytes;
    let mut all_points = Vec::new();
    for pair in points.windows(2) {
        let (low, high) = (&pair[0], &pair[1]);
        all_points.push(*low);
        let first = libm::floor(low.size_bytes / step_bytes) as u64 + 1;
        let between = (first..).map(|step| step as f64 * step_bytes).take_while(|size| *size < high.size_bytes);
        let sizes: Vec<u64> = [low.size_bytes].into_iter().chain(between).chain([high.size_bytes]).map(lines).collect();
        let Some(ratios) = histogram.miss_ratio_curve(&sizes) else { continue };
        let (most, least) = (ratios[0], ratios[ratios.len() - 1]);
        if most - least < ROUNDING_SHARE {
            continue;
        }
        let inner = sizes.iter().zip(&ratios).take(sizes.len() - 1).skip(1);
        all_points.extend(
            inner.map(|(&lines, ratio)| mix(low, high, (most - ratio) / (most - least), (lines * line_bytes) as f64)),
        );
    }
    all_points.extend(points.last());
    all_points
}

/// Distances of the accesses from instruction `from_instr` to `to_instr`, in a cache that is warm by then; `None` if the
/// source ends before.
fn access_distances(
    source: &mut dyn AccessSource,
    line_bytes: u64,
    from_instr: f64,
    to_instr: f64,
) -> Result<Option<DistanceHistogram>, cachemate_locality::stack::StackError> {
    let (mut start_up, mut whole) = (StackDistances::new(), StackDistances::new());
    let (mut batch, mut lines, mut instructions) = (Vec::new(), Vec::new(), 0.0);
    while instructions < to_instr {
        batch.clear();
        let end = source.next_batch(&mut batch);
        let is_start_up = instructions < from_instr;
        lines.clear();
        for access in &batch {
            instructions += access.instructions() as f64;
            if access.is_data() {
                lines.push(access.address() / line_bytes);
            }
        }
        whole.push(&lines)?;
        if is_start_up {
            start_up.push(&lines)?;
        }
        if !matches!(end, BatchEnd::More) || batch.is_empty() {
            return Ok(None);
        }
    }
    let (start_up, whole) = (start_up.finish()?, whole.finish()?);
    let mut start_up_counts = start_up.counts().iter().copied().peekable();
    let counts = whole.counts().iter().map(|&(distance, count)| {
        let earlier = start_up_counts.next_if(|&(earlier_distance, _)| earlier_distance == distance);
        (distance, count - earlier.map_or(0, |(_, earlier_count)| earlier_count))
    });
    Ok(Some(DistanceHistogram::new(whole.cold_count() - start_up.cold_count(), counts.collect::<Vec<_>>())))
}

/// The rates at `size_bytes`, between two points.
fn mix(low: &SizePoint, high: &SizePoint, share: f64, size_bytes: f64) -> SizePoint {
    let between = |low: f64, high: f64| low + share * (high - low);
    let unprefetched = low.without_prefetch.zip(high.without_prefetch).map(|(low, high)| UnprefetchedRates {
        cycles_per_instr: between(low.cycles_per_instr, high.cycles_per_instr),
        demand_fills_per_instr: between(low.demand_fills_per_instr, high.demand_fills_per_instr),
        writebacks_per_instr: between(low.writebacks_per_instr, high.writebacks_per_instr),
        memory_stall_cycles_per_instr: between(low.memory_stall_cycles_per_instr, high.memory_stall_cycles_per_instr),
    });
    SizePoint {
        size_bytes,
        cycles_per_instr: between(low.cycles_per_instr, high.cycles_per_instr),
        demand_fills_per_instr: between(low.demand_fills_per_instr, high.demand_fills_per_instr),
        prefetch_fills_per_instr: between(low.prefetch_fills_per_instr, high.prefetch_fills_per_instr),
        writebacks_per_instr: between(low.writebacks_per_instr, high.writebacks_per_instr),
        memory_stall_cycles_per_instr: between(low.memory_stall_cycles_per_instr, high.memory_stall_cycles_per_instr),
        without_prefetch: unprefetched,
    }
}

/// The lines of a fully associative cache that misses as often as one of `lines` in these sets, at most `lines`. The
/// narrow cache was measured to have so many fills.
fn conflict_free_lines(histogram: &DistanceHistogram, sets: u64, lines: u64, fills: f64) -> u64 {
    let misses = |mapping: SetMapping| {
        let folded = fold_to_ways(histogram, sets, (lines / sets) as u32, mapping)?;
        folded.last().copied()
    };
    let Some((even, hashed)) = misses(SetMapping::Even).zip(misses(SetMapping::Hashed)) else { return lines };
    let rounding = ROUNDING_SHARE * histogram.accesses() as f64;
    let narrow_misses = fills.max(even).min(hashed.max(even)) - rounding;
    // The largest size with at least these misses: misses fall with the size.
    let (mut low, mut high) = (0, lines + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if histogram.misses_at(middle) as f64 >= narrow_misses { low = middle } else { high = middle }
    }
    // At a cliff, the next line may be nearer to these misses.
    let excess = |lines: u64| (histogram.misses_at(lines) as f64 - narrow_misses).abs();
    if low < lines && excess(low + 1) < excess(low) { low + 1 } else { low.max(1) }
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
        let misses = |ways| *fold_to_ways(&uniform, 1024, ways, SetMapping::Hashed).unwrap().last().unwrap();
        let corrected = conflict_free_lines(&uniform, 1024, 4 * 1024, misses(4));
        assert!((2_000..3_000).contains(&corrected), "{corrected}: some lines conflict in four ways");
        assert_eq!(conflict_free_lines(&uniform, 1024, 4 * 1024, 2.0 * misses(4)), corrected, "useless prefetches");
        assert_eq!(conflict_free_lines(&uniform, 1024, 16 * 1024, 0.0), 16 * 1024, "no line conflicts in sixteen ways");
    }

    /// Does a cyclic working set as large as the cache keep its cliff, and a random one its slope?
    #[test]
    fn a_cyclic_set_has_a_cliff() {
        let cyclic = DistanceHistogram::new(0, [(4095, 1000)]);
        assert_eq!(conflict_free_lines(&cyclic, 256, 4096, 20.0), 4096, "it hits with all ways");
        assert_eq!(conflict_free_lines(&cyclic, 256, 3072, 1000.0), 3072, "it misses with fewer");
        let mut points = closed_form::stream_phase(64.0, 4096.0, 0.1).points;
        points.push(SizePoint { size_bytes: 4096.0 * 64.0, demand_fills_per_instr: 0.0, ..points[0] });
        points[0].size_bytes = 3072.0 * 64.0;
        let fills = |histogram: &DistanceHistogram| {
            let all_points = follow_distances(&points, histogram, 512.0 * 64.0, 64);
            all_points.iter().map(|point| (point.size_bytes / 64.0, point.demand_fills_per_instr)).collect::<Vec<_>>()
        };
        assert_eq!(fills(&cyclic), [(3072.0, 0.1), (3584.0, 0.1), (4096.0, 0.0)]);
        let uniform = DistanceHistogram::new(0, (0..4096).map(|distance| (distance, 1)));
        assert_eq!(fills(&uniform), [(3072.0, 0.1), (3584.0, 0.05), (4096.0, 0.0)]);
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
        let mut points = [point(512.0, 0.3), point(1024.0, 0.3), point(3072.0, 0.1), point(4096.0, 0.0)];
        mix_unprefetched(&mut points, 1, &DistanceHistogram::new(0, [(4095, 1000)]), 64);
        assert_eq!(points[2].without_prefetch, Some(bare(0.3)));
    }
}
