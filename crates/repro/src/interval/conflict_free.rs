//! The sizes of a recording's profile, corrected for conflict misses.
//!
//! Problem: a profile is measured on caches with fewer ways, which miss by conflict although they have room. In a shared
//! cache with all ways, a program with as much space has no such misses, so a forecast takes them for a lack of space.
//! Method: each measured size is replaced by the size of the fully associative cache that misses as often. Stack distances
//! of the recording give that cache's misses, and Smith's binomial model those of the narrow one. Properties: only sizes
//! change, no measured rate; a size never grows; a stream, which misses at every size, keeps its sizes.

use cachemate_core::{AccessSource, BatchEnd, MachineSpec};
use cachemate_interval::PhasedProgram;
use cachemate_locality::curve::{SetMapping, fold_to_ways};
use cachemate_locality::stack::{DistanceHistogram, StackDistances};

use crate::ReproError;
use crate::setup::{WorkloadJob, failed};

/// Share of the accesses that two miss counts may differ by because of rounding.
const ROUNDING_SHARE: f64 = 1e-4;

/// Replaces the sizes of `program`, which [`super::nominal::measure`] gave for `job`.
///
/// # Errors
/// A recording that cannot be read.
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
    for phase in &mut program.phases {
        let mut previous_lines = 0;
        for point in &mut phase.points {
            let lines = (point.size_bytes / line_bytes as f64) as u64;
            let corrected = conflict_free_lines(&histogram, sets, lines).max(previous_lines + 1);
            point.size_bytes = (corrected * line_bytes) as f64;
            previous_lines = corrected;
        }
    }
    Ok(())
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

/// The lines of a fully associative cache that misses as often as one of `lines` in these sets, at most `lines`.
fn conflict_free_lines(histogram: &DistanceHistogram, sets: u64, lines: u64) -> u64 {
    let Some(folded) = fold_to_ways(histogram, sets, (lines / sets) as u32, SetMapping::Hashed) else { return lines };
    let narrow_misses = folded.last().copied().unwrap_or(0.0) - ROUNDING_SHARE * histogram.accesses() as f64;
    // The largest size with at least these misses: misses fall with the size.
    let (mut low, mut high) = (0, lines + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if histogram.misses_at(middle) as f64 >= narrow_misses { low = middle } else { high = middle }
    }
    low.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a stream keep its sizes, and is a working set that a narrow cache holds with conflicts corrected to its own size?
    #[test]
    fn only_conflicts_are_corrected() {
        let stream = DistanceHistogram::new(100_000, []);
        assert_eq!(conflict_free_lines(&stream, 1024, 4096), 4096);
        // Random references to 3,000 lines: all distances are equally frequent.
        let uniform = DistanceHistogram::new(0, (0..3_000).map(|distance| (distance, 100)));
        let corrected = conflict_free_lines(&uniform, 1024, 4 * 1024);
        assert!((2_000..3_000).contains(&corrected), "{corrected}: some lines conflict in four ways");
        assert_eq!(conflict_free_lines(&uniform, 1024, 16 * 1024), 16 * 1024, "no line conflicts in sixteen ways");
    }
}
