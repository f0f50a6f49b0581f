//! Makes a profile file from a trace in one pass: exact stack distances, sampled reuse times, and
//! phases.
//!
//! A trace may be larger than the disk has room for twice, and it may come through a pipe, so it is
//! read once and everything that a profile has is computed from the same pass.
//!
//! For example, `cachemate profile xz.cmt --machine xeon-x5365-4` gives the misses of a cache of
//! every size from the stack distances, and those of the L2 of 16 ways from the LRU positions in
//! its sets. The latter have the conflicts that the former lack, and are only right for that cache;
//! the file has both.

use cachemate_core::{
    CacheLevel, CoreSamples, Estimate, Fact, FactSource, MachineSpec, PhaseParameters, Profile,
};
use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
use cachemate_locality::curve::{SetMapping, fold_to_ways};
use cachemate_locality::phases::detect_phases;
use cachemate_locality::reuse::ReuseSampler;
use cachemate_locality::stack::DistanceHistogram;
use cachemate_locality::stream_sampler::StreamSampler;
use cachemate_trace::{
    AccessRecord, ProfileFile, ProfileSource, StackPositions, StoredCurve, StoredCurvePoint,
    StoredHistogram as FileHistogram, StoredInterval, StoredIntervals, TraceHeader, TraceTotals,
};

use crate::{
    BurstDistances, MeasuredDistances, PartTotals, StudyError, curve_counts, default_sizes,
    drop_filtered_sizes, refuse_late_bursts,
};

/// One access in this many is watched, which gives enough samples of a million accesses and is cheap for a billion.
const REUSE_SAMPLE_PERIOD: u32 = 64;
/// Maximum number of intervals in which phases are detected.
const MAX_INTERVALS: u64 = 200;
/// Size and ways of the cache whose misses delimit phases if no machine is given.
const PHASE_CACHE: (u64, u32) = (1 << 20, 16);

/// The shared cache for which a profile is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProfileTarget {
    /// Level of the cache, by which profiles store curves.
    pub level: CacheLevel,
    /// Total size of all slices.
    pub size_bytes: u64,
    /// Lines per set.
    pub ways: u32,
    /// Line size in bytes; a power of two.
    pub line_bytes: u32,
    /// Number of equal slices, chosen by a hash of the line address; 1 if the cache is not sliced.
    pub slices: u32,
}

impl ProfileTarget {
    /// The contended cache is the last one that is filled by misses.
    ///
    /// # Errors
    /// The machine has no data caches.
    pub fn from_machine(machine: &MachineSpec) -> Result<Self, StudyError> {
        let cache = machine
            .last_level_cache()
            .ok_or_else(|| StudyError::NoSharedCache(machine.name.clone()))?;
        Ok(ProfileTarget {
            level: cache.level,
            size_bytes: cache.size_bytes,
            ways: cache.ways,
            line_bytes: cache.line_bytes,
            slices: cache.slices,
        })
    }
}

/// Engines that observe the same records: push all records in order, then [`finish`](Self::finish).
pub struct ProfilePass {
    target: ProfileTarget,
    sampler: StreamSampler,
    /// Distances of the bursts, if the recording has any; those of the sampler ignore pauses.
    burst_distances: Option<BurstDistances>,
    reuse: ReuseSampler,
    cache: CacheSim,
    interval_records: u64,
    intervals: Vec<StoredInterval>,
    current_interval: StoredInterval,
    lines: Vec<u64>,
}

const EMPTY_INTERVAL: StoredInterval = StoredInterval {
    accesses: 0,
    instructions: None,
    misses: 0,
    phase: 0,
};

impl ProfilePass {
    /// Starts a profile for `target`'s cache (a usual one without a target). `expected_records` is 0 if the number is
    /// unknown; `bursts` are the first records of the bursts, if the recording has any.
    ///
    /// # Errors
    /// The cache cannot be simulated.
    pub fn new(
        target: Option<ProfileTarget>,
        expected_records: u64,
        bursts: &[u64],
    ) -> Result<Self, StudyError> {
        let default_target = ProfileTarget {
            level: CacheLevel::L3,
            size_bytes: PHASE_CACHE.0,
            ways: PHASE_CACHE.1,
            line_bytes: 64,
            slices: 1,
        };
        let target = target.unwrap_or(default_target);
        let line_bytes = u64::from(target.line_bytes);
        let geometry =
            CacheGeometry::from_bytes(target.size_bytes, line_bytes, target.ways, target.slices)?;
        Ok(ProfilePass {
            target,
            sampler: StreamSampler::new(),
            burst_distances: (!bursts.is_empty()).then(|| BurstDistances::new(bursts)),
            reuse: ReuseSampler::new(REUSE_SAMPLE_PERIOD, 1),
            cache: CacheSim::new(geometry, Replacement::Lru)?,
            interval_records: (expected_records / MAX_INTERVALS).max(10_000),
            intervals: Vec::new(),
            current_interval: EMPTY_INTERVAL,
            lines: Vec::new(),
        })
    }

    /// Processes the next records, in order.
    ///
    /// # Errors
    /// The trace has more distinct lines than stack distances support.
    pub fn push(&mut self, records: &[AccessRecord]) -> Result<(), StudyError> {
        let shift = self.target.line_bytes.trailing_zeros();
        self.lines.clear();
        self.lines
            .extend(records.iter().map(|record| record.address >> shift));
        self.sampler
            .push(records.iter().map(|record| record.to_sampled(shift)))?;
        if let Some(burst_distances) = &mut self.burst_distances {
            burst_distances.push(&self.lines)?;
        }
        self.lines.iter().for_each(|line| self.reuse.touch(*line));
        let mut index = 0;
        while index < records.len() {
            let remaining_records =
                (self.interval_records - self.current_interval.accesses) as usize;
            let end = records.len().min(index + remaining_records);
            self.current_interval.misses += self.cache.push(&self.lines[index..end]);
            self.current_interval.accesses += (end - index) as u64;
            // All gaps are 0 if instructions are unknown.
            let gaps = records[index..end].iter().map(|record| record.gap);
            let instructions = gaps.fold(0, u64::saturating_add);
            if instructions > 0 {
                let sum = self.current_interval.instructions.get_or_insert(0);
                *sum = sum.saturating_add(instructions);
            }
            if self.current_interval.accesses == self.interval_records {
                let interval = std::mem::replace(&mut self.current_interval, EMPTY_INTERVAL);
                self.intervals.push(interval);
                self.merge_intervals();
            }
            index = end;
        }
        Ok(())
    }

    /// Merges pairs of intervals if a trace of unknown length has twice too many.
    fn merge_intervals(&mut self) {
        if (self.intervals.len() as u64) < 2 * MAX_INTERVALS {
            return;
        }
        let merged_pair = |pair: &[StoredInterval]| StoredInterval {
            accesses: pair[0].accesses + pair[1].accesses,
            instructions: pair[0]
                .instructions
                .zip(pair[1].instructions)
                .map(|(first, second)| first.saturating_add(second)),
            misses: pair[0].misses + pair[1].misses,
            phase: 0,
        };
        self.intervals = self.intervals.chunks_exact(2).map(merged_pair).collect();
        self.interval_records *= 2;
    }

    /// `source_name` is the source of the records; `header` and `totals` are those of the trace.
    pub fn finish(
        self,
        name: &str,
        source_name: &str,
        header: &TraceHeader,
        totals: Option<&TraceTotals>,
    ) -> Result<ProfileFile, StudyError> {
        if self.burst_distances.is_none() {
            refuse_late_bursts(&[], totals)?;
        }
        let target = self.target;
        let line_problem = |problem| StudyError::SmallLines(name.to_string(), problem);
        header
            .check_lines(target.line_bytes)
            .map_err(line_problem)?;
        let (sample, histogram) = self.sampler.finish(
            target.line_bytes,
            header.page_bytes.max(target.line_bytes),
            header.has_dependences,
            totals.map_or(&CoreSamples::default(), |totals| &totals.core),
        )?;
        let distances: MeasuredDistances = match self.burst_distances {
            Some(burst_distances) => burst_distances.finish()?,
            None => histogram.into(),
        };
        let histogram = &distances.histogram;
        let part_totals = PartTotals::from_totals(totals, header.instructions_known);
        let tool = concat!("cachemate ", env!("CARGO_PKG_VERSION")).to_string();
        let source = ProfileSource {
            tool,
            kind: "trace".to_string(),
            from: Some(source_name.to_string()),
            filter: header.filter,
        };
        let mut file = ProfileFile::new(name, source);
        file.command = header.command.clone();
        file.accesses = part_totals.program_accesses;
        file.records = Some(histogram.accesses());
        file.instructions = part_totals.instructions;
        let mut sizes = default_sizes();
        drop_filtered_sizes(&mut sizes, header);
        file.curves = vec![build_curve(
            &distances,
            part_totals,
            &sizes,
            target.line_bytes,
        )];
        file.histograms = vec![group_distances(histogram, target.line_bytes)];
        if distances.bursts.is_some() {
            // A sample, reuse times, LRU positions and phases across a pause are unknown; positions follow from the distances.
            fill_rates(&mut file, target.level);
            file.profile = profile_for_target(&file, target)?;
            return Ok(file);
        }
        let counts_instructions = part_totals.instructions.is_some_and(|count| count > 0);
        file.sample = (counts_instructions && !sample.phases.is_empty()).then_some(sample);
        let positions = self.cache.positions().unwrap_or_default();
        file.stack_positions = vec![StackPositions {
            size_bytes: target.size_bytes,
            line_bytes: target.line_bytes,
            hits: positions.hits.clone(),
            misses: positions.misses,
        }];
        let times = self.reuse.finish().to_profile();
        file.profile.locality.reuse_times = times.map(trace_fact);
        if !self.intervals.is_empty() {
            let every = number_phases(self.intervals);
            let phase = every.last().map_or(0, |interval| interval.phase);
            file.profile.phase_number = phase;
            let (size_bytes, line_bytes) = (target.size_bytes, target.line_bytes);
            file.intervals = Some(StoredIntervals {
                size_bytes,
                line_bytes,
                every,
            });
        }
        fill_rates(&mut file, target.level);
        if file.instructions.is_some_and(|count| count > 0) {
            file.profile = profile_for_target(&file, target)?;
        }
        Ok(file)
    }
}

fn build_curve(
    distances: &MeasuredDistances,
    totals: PartTotals,
    sizes: &[u64],
    line_bytes: u32,
) -> StoredCurve {
    let counts = curve_counts(distances, totals, sizes, line_bytes);
    let points = counts.curve.iter().map(|point| {
        // The interval of a profile's estimates holds 95 %, as that of the bursts does.
        let relative_error = point
            .miss_ratio_error
            .map_or(0.0, |error| error / point.miss_ratio.max(f64::MIN_POSITIVE));
        let with_error = |value: f64| {
            let error = value * relative_error;
            Estimate {
                value,
                low: (value - error).max(0.0),
                high: value + error,
            }
        };
        StoredCurvePoint {
            size_bytes: point.bytes,
            miss_ratio: with_error(point.miss_ratio),
            misses_per_kilo_instr: point.mpki.map(with_error),
        }
    });
    StoredCurve {
        policy: "lru".to_string(),
        method: if distances.bursts.is_some() {
            "bursts"
        } else {
            "exact"
        }
        .to_string(),
        line_bytes,
        thread: None,
        points: points.collect(),
    }
}

/// Groups distances in buckets of at most 1/32 of their size: exact below 64 lines, and small enough for a file.
fn group_distances(histogram: &DistanceHistogram, line_bytes: u32) -> FileHistogram {
    let mut buckets: Vec<(u64, u64)> = Vec::new();
    for &(distance, count) in histogram.counts() {
        let bucket_width = 1u64 << (63 - (distance | 63).leading_zeros()).saturating_sub(5);
        let bucket_end = distance / bucket_width * bucket_width + bucket_width - 1;
        match buckets.last_mut() {
            Some((bound, sum)) if *bound == bucket_end => *sum += count,
            _ => buckets.push((bucket_end, count)),
        }
    }
    FileHistogram {
        kind: "stack-distance".to_string(),
        line_bytes,
        cold: histogram.cold_count(),
        buckets,
    }
}

/// Numbers the phases of the intervals; each change of the miss rate starts a new phase (thesis 5.6.2).
fn number_phases(mut intervals: Vec<StoredInterval>) -> Vec<StoredInterval> {
    let interval_signal = |interval: &StoredInterval| {
        let count = interval.instructions.filter(|count| *count > 0)?;
        Some(vec![interval.misses as f64 * 1000.0 / count as f64])
    };
    let Some(signals) = intervals
        .iter()
        .map(interval_signal)
        .collect::<Option<Vec<_>>>()
    else {
        return intervals;
    };
    for (number, phase) in detect_phases(&signals, PhaseParameters::default())
        .iter()
        .enumerate()
    {
        intervals[phase.start..phase.end]
            .iter_mut()
            .for_each(|interval| interval.phase = number as u32);
    }
    intervals
}

/// Adds rates per instruction for models and policies, if instructions are known.
fn fill_rates(file: &mut ProfileFile, level: CacheLevel) {
    let Some(instructions) = file.instructions.filter(|count| *count > 0) else {
        return;
    };
    let per_mega = |count: u64| count as f64 * 1e6 / instructions as f64;
    let curve = file.curves.first().map(|curve| {
        let points = curve.points.iter();
        points
            .filter_map(|point| Some((point.size_bytes, point.misses_per_kilo_instr?)))
            .collect()
    });
    let references = file
        .records
        .map(|records| Estimate::exact(per_mega(records)));
    file.profile.rates.llc_refs_per_mega_instr =
        references.map(|rate| Fact::from_measurement(rate, FactSource::ExactTrace, 0));
    let locality = &mut file.profile.locality;
    locality.misses_per_kilo_instr = curve
        .map(|points| (level, trace_fact(points)))
        .into_iter()
        .collect();
}

/// Stated for window 0, because it holds for a whole recording.
fn trace_fact<T>(value: T) -> Fact<T> {
    Fact::new(value, FactSource::ExactTrace, 0)
}

/// Largest size that a curve from bursts covers; `None` if the recording has no gaps.
pub fn burst_reach_bytes(file: &ProfileFile) -> Option<u64> {
    let curve = file.curves.iter().find(|curve| curve.method == "bursts")?;
    Some(curve.points.last().map_or(0, |point| point.size_bytes))
}

/// The stack distances of all threads, whose first touches are the distinct lines; `None` for a recording in bursts, in which
/// they are the accesses that a burst is too short to tell.
pub fn whole_distances(file: &ProfileFile) -> Option<&FileHistogram> {
    let is_whole = |histogram: &&FileHistogram| histogram.kind == "stack-distance";
    let histogram = file.histograms.iter().find(is_whole)?;
    burst_reach_bytes(file).is_none().then_some(histogram)
}

/// Uses the LRU positions that the file has for this cache, or otherwise its stack distances. Has
/// no positions if bursts are too short to tell them for a cache of this size.
///
/// # Errors
/// The file was made for another line size, or lacks stack distances.
pub fn profile_for_target(
    file: &ProfileFile,
    target: ProfileTarget,
) -> Result<Profile, StudyError> {
    let mut profile = file.profile.clone();
    let Some(instructions) = file.instructions.filter(|count| *count > 0) else {
        return Ok(profile);
    };
    if burst_reach_bytes(file).is_some_and(|reach| reach < target.size_bytes) {
        profile.locality.stack_positions = None;
        return Ok(profile);
    }
    let per_mega = |count: f64| count * 1e6 / instructions as f64;
    let matches_target = |stored: &&StackPositions| {
        (stored.size_bytes, stored.line_bytes, stored.hits.len())
            == (target.size_bytes, target.line_bytes, target.ways as usize)
    };
    if let Some(positions) = file.stack_positions.iter().find(matches_target) {
        let counts = positions.hits.iter().chain([&positions.misses]);
        profile.locality.stack_positions = Some(trace_fact(
            counts.map(|count| per_mega(*count as f64)).collect(),
        ));
        return Ok(profile);
    }
    let matches_line_size =
        |h: &&FileHistogram| h.kind == "stack-distance" && h.line_bytes == target.line_bytes;
    let Some(histogram) = file.histograms.iter().find(matches_line_size) else {
        let line_sizes: Vec<String> = file
            .histograms
            .iter()
            .map(|h| h.line_bytes.to_string())
            .collect();
        let line_size_list = if line_sizes.is_empty() {
            "none".to_string()
        } else {
            line_sizes.join(", ")
        };
        return Err(StudyError::OtherLines {
            program: file.program.clone(),
            found: line_size_list,
            expected: target.line_bytes,
        });
    };
    let histogram = DistanceHistogram::new(histogram.cold, histogram.buckets.iter().copied());
    let sets = target.size_bytes / u64::from(target.line_bytes) / u64::from(target.ways);
    let folded_counts = fold_to_ways(&histogram, sets, target.ways, SetMapping::Hashed);
    profile.locality.stack_positions =
        folded_counts.map(|counts| trace_fact(counts.into_iter().map(per_mega).collect()));
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use cachemate_trace::L1Filter;

    use super::*;
    use crate::KernelFootprint;

    /// Does a recording in bursts give LRU positions for a cache within its reach only?
    #[test]
    fn bursts_tell_nothing_beyond_their_reach() {
        let has_positions = |size_bytes: u64| {
            let (file, target) = file_of_bursts(size_bytes);
            let profile = profile_for_target(&file, target).unwrap();
            profile.locality.stack_positions.is_some()
        };
        assert_eq!(
            (has_positions(16 << 10), has_positions(1 << 20)),
            (true, false)
        );
    }

    /// Does a profile of bursts have no sample, whose distances would cross the pauses, and no number of distinct lines?
    #[test]
    fn bursts_have_no_sample_and_no_distinct_lines() {
        let (file, target) = file_of_bursts(1 << 20);
        assert_eq!((&file.sample, whole_distances(&file)), (&None, None));
        assert_eq!(
            KernelFootprint::from_profile(&file, target.size_bytes),
            None
        );
    }

    /// The profile of a loop of 32 KiB in two bursts, for a cache of this size.
    fn file_of_bursts(size_bytes: u64) -> (ProfileFile, ProfileTarget) {
        let record_of = |index: u64| AccessRecord {
            address: index % 512 * 64,
            gap: 1,
            thread: 0,
            size: 8,
            ..AccessRecord::default()
        };
        let records: Vec<AccessRecord> = (0..4096).map(record_of).collect();
        let totals = TraceTotals {
            records: 4096,
            instructions: Some(4096),
            ..TraceTotals::default()
        };
        let target = ProfileTarget {
            level: CacheLevel::L3,
            size_bytes,
            ways: 8,
            line_bytes: 64,
            slices: 1,
        };
        let mut pass = ProfilePass::new(Some(target), 4096, &[0, 2048]).unwrap();
        pass.push(&records).unwrap();
        let header = TraceHeader::for_import("a.cmt", true);
        let file = pass.finish("a", "a.cmt", &header, Some(&totals)).unwrap();
        (file, target)
    }

    /// Has the curve of a filtered recording no size below the filter, and is a profile for smaller lines than the filter's
    /// refused?
    #[test]
    fn a_profile_tells_nothing_that_the_filter_hides() {
        let header = TraceHeader {
            filter: Some(L1Filter::default()),
            ..TraceHeader::for_import("a.cmt", true)
        };
        let file_for = |line_bytes: u32| {
            let target = ProfileTarget {
                level: CacheLevel::L3,
                size_bytes: 1 << 20,
                ways: 8,
                line_bytes,
                slices: 1,
            };
            let mut pass = ProfilePass::new(Some(target), 0, &[]).unwrap();
            pass.push(&[AccessRecord::default(); 9]).unwrap();
            pass.finish("a", "a.cmt", &header, None)
        };
        let sizes = &file_for(64).unwrap().curves[0].points;
        assert_eq!(sizes[0].size_bytes, 32 << 10);
        let problem = file_for(32).unwrap_err().to_string();
        assert!(problem.contains("found lines of 32 bytes"), "{problem}");
    }

    /// Does a trace of unknown length have no more than twice as many intervals as one of known length, without a gap?
    #[test]
    fn a_trace_of_unknown_length_has_a_bounded_number_of_intervals() {
        let mut pass = ProfilePass::new(None, 0, &[]).unwrap();
        let first_records = pass.interval_records;
        let interval = StoredInterval {
            accesses: first_records,
            instructions: Some(7),
            misses: 3,
            phase: 0,
        };
        for _ in 0..2 * MAX_INTERVALS {
            pass.intervals.push(interval);
            pass.merge_intervals();
        }
        let merged = StoredInterval {
            accesses: 2 * first_records,
            instructions: Some(14),
            misses: 6,
            phase: 0,
        };
        assert_eq!(pass.intervals, vec![merged; MAX_INTERVALS as usize]);
        assert_eq!(pass.interval_records, 2 * first_records);
    }

    /// Are an interval's instructions unknown if no record counts any, and do they saturate instead of wrapping?
    #[test]
    fn instructions_of_an_interval_are_absent_or_saturate() {
        let instructions_with = |gap: u64| {
            let mut pass = ProfilePass::new(None, 0, &[]).unwrap();
            let record = AccessRecord {
                gap,
                ..AccessRecord::default()
            };
            pass.push(&[record; 10_000]).unwrap();
            pass.intervals[0].instructions
        };
        assert_eq!(
            [0, 1, u64::MAX].map(instructions_with),
            [None, Some(10_000), Some(u64::MAX)]
        );
    }

    /// Is a recording in bursts refused that was taken for one stretch, because its bursts were known only at its end?
    #[test]
    fn bursts_that_are_known_too_late_are_refused() {
        let totals = TraceTotals {
            bursts: vec![0, 2048],
            ..TraceTotals::default()
        };
        let header = TraceHeader::for_import("a.cmt", true);
        let finish_with = |known: &[u64]| {
            let pass = ProfilePass::new(None, 0, known).unwrap();
            pass.finish("a", "a.cmt", &header, Some(&totals))
        };
        assert!(matches!(finish_with(&[]), Err(StudyError::LateBursts)));
        assert!(finish_with(&[0, 2048]).is_ok());
    }
}
