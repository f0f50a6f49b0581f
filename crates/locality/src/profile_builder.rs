//! Computes a program's profile from its accesses in one pass, as the input of schemes and predictors.
//!
//! Problem: the curve, stack positions, reuse times, intervals, phases and class of a program all derive from one
//! stream, which may be far larger than memory. Method: each batch is passed to the exact stack-distance engine, to an
//! exact simulation of the cache, and to a sampler of reuse times; batches are cut at the ends of intervals.
//! Properties: memory is proportional to the number of distinct lines and of intervals. The result does not depend on
//! how the stream is cut into batches. Rates per instruction use recorded instruction counts, and are missing without
//! them.

use cachemate_core::{
    CacheLevel, Estimate, Fact, FactSource, LocalityFacts, PhaseParameters, Profile, RateFacts, SuperSetCount,
};

use crate::activity::{Grouping, super_set_of};
use crate::animal::{Animal, AnimalThresholds, classify};
use crate::cachesim::{CacheGeometry, CacheSim, GeometryError, PositionProfile, Replacement};
use crate::curve::MissRateCurve;
use crate::intervals::{IntervalCounter, IntervalLength, RunInterval, locality_signature};
use crate::phases::{DetectedPhase, detect_phases};
use crate::reuse::{ReuseSampler, ReuseTimes};
use crate::stack::{DistanceHistogram, StackDistances, StackError};

/// An access that reaches the profiled cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramAccess {
    /// Line number (byte address / line size). Lines of different address spaces must have different numbers.
    pub line: u64,
    /// Instructions that the thread executed since its preceding access, including the one that makes this access.
    pub instructions: u64,
    /// Whether the access is a write.
    pub is_store: bool,
    /// Number of the thread: dense, from 0.
    pub thread: u32,
}

/// Settings of a [`ProfileBuilder`].
#[derive(Clone, PartialEq, Debug)]
pub struct ProfileSettings {
    /// The cache level for which stack positions, misses and activity are simulated (LRU).
    pub level: CacheLevel,
    /// Size in bytes of the whole cache, including all slices.
    pub size_bytes: u64,
    /// Number of lines in one set.
    pub ways: u32,
    /// Number of equal slices, selected by a hash of the line address; 1 if the cache is not sliced.
    pub slices: u32,
    /// Size of a line in bytes; a power of two.
    pub line_bytes: u64,
    /// Sizes in bytes at which the curve is computed; the cache's own size is always added.
    pub curve_sizes_bytes: Vec<u64>,
    /// Whether the recording has instruction counts.
    pub has_instruction_counts: bool,
    /// Length of an interval, with its unit.
    pub interval: IntervalLength,
    /// Sampling rate of reuse times: one access in this many is watched.
    pub reuse_sample_period: u32,
    /// Seed for the random choice of watched accesses.
    pub seed: u64,
    /// Number of super sets (groups of cache sets) whose activity is counted; 0 disables counting.
    pub super_sets: u32,
    /// Grouping of cache sets into super sets.
    pub grouping: Grouping,
    /// Parameters of phase detection.
    pub phase_parameters: PhaseParameters,
    /// Boundaries between the animal classes.
    pub animal_thresholds: AnimalThresholds,
}

impl ProfileSettings {
    /// Returns settings for an unsliced cache: 16 points of the curve, intervals of 10^9 instructions (thesis 5.6.2),
    /// one access in 64 watched, and 64 super sets by low bits.
    pub fn new(level: CacheLevel, size_bytes: u64, ways: u32, line_bytes: u64) -> Self {
        ProfileSettings {
            level,
            size_bytes,
            ways,
            slices: 1,
            line_bytes,
            curve_sizes_bytes: (1..=16).map(|step| size_bytes * step / 16).collect(),
            has_instruction_counts: true,
            interval: IntervalLength::Instructions(1_000_000_000),
            reuse_sample_period: 64,
            seed: 1,
            super_sets: 64,
            grouping: Grouping::LowBits,
            phase_parameters: PhaseParameters::default(),
            animal_thresholds: AnimalThresholds::default(),
        }
    }
}

/// The error if a profile cannot be built.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProfileError {
    /// The geometry of the profiled cache is invalid.
    #[error(transparent)]
    Shape(#[from] GeometryError),
    /// There are more distinct lines than the stack-distance engine supports.
    #[error(transparent)]
    Stack(#[from] StackError),
}

/// One interval of the run, with its signature and activity.
#[derive(Clone, PartialEq, Debug)]
pub struct ProfiledInterval {
    /// Instructions, accesses and misses of the interval.
    pub interval: RunInterval,
    /// Locality signature from the reuse times that were sampled in the interval; `None` without instructions or
    /// samples.
    pub signature: Option<Vec<f64>>,
    /// Number of samples from which the signature was computed.
    pub samples: f64,
    /// Accesses and misses by super set; empty if none were requested.
    pub super_sets: Vec<SuperSetCount>,
}

/// A program's profile, and further results that require a complete recording.
#[derive(Clone, PartialEq, Debug)]
pub struct ProgramProfile {
    /// The input of policies and predictors.
    pub profile: Profile,
    /// Accesses that reached the cache, including stores.
    pub accesses: u64,
    /// Number of accesses that are writes.
    pub stores: u64,
    /// Number of threads that made an access.
    pub threads: u32,
    /// Number of instructions; `None` if not recorded.
    pub instructions: Option<u64>,
    /// Number of distinct lines that the program accesses.
    pub footprint_lines: u64,
    /// Exact stack distances of the whole run, in lines.
    pub histogram: DistanceHistogram,
    /// Reuse times of the watched accesses, over the whole run.
    pub reuse: ReuseTimes,
    /// Number of accesses by LRU position in the sets of the cache.
    pub positions: PositionProfile,
    /// Exact miss ratios of fully associative LRU caches, as pairs of bytes and misses per access; empty without
    /// accesses.
    pub miss_ratios: Vec<(u64, f64)>,
    /// Intervals in order of time; the last one may be shorter than the others.
    pub intervals: Vec<ProfiledInterval>,
    /// Phases of the run; empty if there are no signatures by which to detect them.
    pub phases: Vec<DetectedPhase>,
    /// Animal class; this and the following fields are `None` without instructions.
    pub animal: Option<Animal>,
    /// Solo misses per thousand instructions on the cache.
    pub intensity_misses_per_kilo_instr: Option<f64>,
    /// Additional misses per thousand instructions with half of the ways.
    pub sensitivity_misses_per_kilo_instr: Option<f64>,
}

/// Builds a profile: push all accesses in order, then call [`finish`](Self::finish).
pub struct ProfileBuilder {
    settings: ProfileSettings,
    geometry: CacheGeometry,
    stack_distances: StackDistances,
    cache: CacheSim,
    sampler: ReuseSampler,
    reuse: ReuseTimes,
    interval_counter: IntervalCounter,
    interval_misses: u64,
    super_sets: Vec<SuperSetCount>,
    intervals: Vec<ProfiledInterval>,
    accesses: u64,
    stores: u64,
    threads: u32,
    instructions: u64,
    lines: Vec<u64>,
    missed_lines: Vec<u64>,
}

impl ProfileBuilder {
    /// Builds an empty builder.
    ///
    /// # Errors
    /// Returns an error if the geometry of the cache is invalid; it names the field.
    pub fn new(settings: ProfileSettings) -> Result<Self, ProfileError> {
        let geometry =
            CacheGeometry::from_bytes(settings.size_bytes, settings.line_bytes, settings.ways, settings.slices)?;
        let super_sets = settings.super_sets.min(geometry.sets) as usize;
        let length = match settings.interval {
            IntervalLength::Instructions(_) if !settings.has_instruction_counts => IntervalLength::Accesses(1_000_000),
            length => length,
        };
        Ok(ProfileBuilder {
            stack_distances: StackDistances::new(),
            cache: CacheSim::new(geometry, Replacement::Lru)?,
            sampler: ReuseSampler::new(settings.reuse_sample_period, settings.seed),
            reuse: ReuseTimes::new(),
            interval_counter: IntervalCounter::new(length),
            interval_misses: 0,
            super_sets: vec![SuperSetCount { accesses: 0, misses: 0 }; super_sets],
            intervals: Vec::new(),
            accesses: 0,
            stores: 0,
            threads: 0,
            instructions: 0,
            lines: Vec::new(),
            missed_lines: Vec::new(),
            geometry,
            settings,
        })
    }

    /// Adds the next accesses, in order.
    ///
    /// # Errors
    /// Returns an error if there are more distinct lines than the engine can number; the builder cannot be used
    /// afterward.
    pub fn push(&mut self, batch: &[ProgramAccess]) -> Result<(), ProfileError> {
        let mut lines = std::mem::take(&mut self.lines);
        lines.clear();
        lines.extend(batch.iter().map(|access| access.line));
        self.stack_distances.push(&lines)?;
        let mut begin = 0;
        for (index, access) in batch.iter().enumerate() {
            self.stores += u64::from(access.is_store);
            self.threads = self.threads.max(access.thread + 1);
            self.instructions += access.instructions;
            self.sampler.touch(access.line);
            if self.interval_counter.add_access(access.instructions) {
                self.simulate(&lines[begin..=index]);
                begin = index + 1;
                self.end_interval();
            }
        }
        self.simulate(&lines[begin..]);
        self.accesses += batch.len() as u64;
        self.lines = lines;
        Ok(())
    }

    fn simulate(&mut self, lines: &[u64]) {
        self.missed_lines.clear();
        self.interval_misses += self.cache.push_collecting(lines, &mut self.missed_lines);
        let super_set_count = self.super_sets.len() as u32;
        let sets = u64::from(self.geometry.sets);
        let grouping = self.settings.grouping;
        let super_set_of_line =
            |line: u64| super_set_of(line % sets, sets, super_set_count, grouping).map(|group| group as usize);
        for &line in lines {
            super_set_of_line(line).into_iter().for_each(|index| self.super_sets[index].accesses += 1);
        }
        for &line in &self.missed_lines {
            super_set_of_line(line).into_iter().for_each(|index| self.super_sets[index].misses += 1);
        }
    }

    fn end_interval(&mut self) {
        let interval = self.interval_counter.close(std::mem::take(&mut self.interval_misses));
        let interval_reuse = self.sampler.take_completed();
        let refs_per_kilo_instr = interval
            .instructions
            .filter(|&count| count > 0)
            .map(|count| 1000.0 * interval.accesses as f64 / count as f64);
        let signature = refs_per_kilo_instr.and_then(|refs| locality_signature(&interval_reuse, refs));
        let empty_sets = vec![SuperSetCount { accesses: 0, misses: 0 }; self.super_sets.len()];
        let super_sets = std::mem::replace(&mut self.super_sets, empty_sets);
        self.intervals.push(ProfiledInterval { interval, signature, samples: interval_reuse.samples(), super_sets });
        self.reuse.merge(&interval_reuse);
    }

    /// Returns the profile. `instructions` is the recording's count of the whole run, if it has one. It is more
    /// complete than the sum over the accesses, which lacks the instructions after a thread's last access.
    pub fn finish(mut self, instructions: Option<u64>) -> Result<ProgramProfile, ProfileError> {
        if self.interval_counter.accesses() > 0 {
            self.end_interval();
        }
        let instructions_known = self.settings.has_instruction_counts;
        let instructions = instructions.or(instructions_known.then_some(self.instructions)).filter(|&count| count > 0);
        let histogram = self.stack_distances.finish()?;
        self.reuse.merge(&self.sampler.finish());
        let lru_positions = self.cache.positions().unwrap_or_default();
        let positions = PositionProfile { misses: self.cache.misses(), ..lru_positions };
        let mut sizes = self.settings.curve_sizes_bytes.clone();
        sizes.push(self.settings.size_bytes);
        sizes.retain(|&size| size >= self.settings.line_bytes);
        sizes.sort_unstable();
        sizes.dedup();
        let lines: Vec<u64> = sizes.iter().map(|size| size / self.settings.line_bytes).collect();
        let ratios = histogram.miss_ratio_curve(&lines).unwrap_or_default();
        let mega_instr = instructions.map(|count| count as f64 / 1e6);
        let positions_per_mega_instr: Option<Vec<f64>> = mega_instr
            .map(|mega| positions.hits.iter().chain([&positions.misses]).map(|&count| count as f64 / mega).collect());
        let super_sets = sum_super_sets(&self.intervals);
        let level = self.settings.level;
        let curve = instructions
            .and_then(|count| MissRateCurve::from_histogram(&histogram, count, self.settings.line_bytes, &sizes))
            .map(|curve| (level, exact_fact(curve.to_profile_points(0.0))));
        let activity = (!super_sets.is_empty()).then(|| (level, exact_fact(super_sets)));
        let refs_per_mega_instr = mega_instr.map(|mega| Estimate::exact(self.accesses as f64 / mega));
        let profile = Profile {
            locality: LocalityFacts {
                misses_per_kilo_instr: curve.into_iter().collect(),
                reuse_times: self.reuse.to_profile().map(exact_fact),
                stack_positions: positions_per_mega_instr.clone().map(exact_fact),
                activity: activity.into_iter().collect(),
                ..LocalityFacts::default()
            },
            rates: RateFacts {
                llc_refs_per_mega_instr: refs_per_mega_instr
                    .map(|rate| Fact::from_measurement(rate, FactSource::ExactTrace, 0)),
                ..RateFacts::default()
            },
            ..Profile::default()
        };
        let half_ways = self.settings.ways.div_ceil(2) as usize;
        let per_kilo_instr = |count: u64| mega_instr.map(|mega| count as f64 / mega / 1000.0);
        Ok(ProgramProfile {
            profile,
            accesses: self.accesses,
            stores: self.stores,
            threads: self.threads,
            instructions,
            footprint_lines: histogram.cold_count(),
            miss_ratios: sizes.into_iter().zip(ratios).collect(),
            phases: find_phases(&self.intervals, self.settings.phase_parameters),
            animal: positions_per_mega_instr
                .and_then(|positions| classify(&positions, &self.settings.animal_thresholds)),
            intensity_misses_per_kilo_instr: per_kilo_instr(positions.misses),
            sensitivity_misses_per_kilo_instr: per_kilo_instr(positions.misses_with(half_ways) - positions.misses),
            intervals: self.intervals,
            histogram,
            reuse: self.reuse,
            positions,
        })
    }
}

fn sum_super_sets(intervals: &[ProfiledInterval]) -> Vec<SuperSetCount> {
    let super_set_count = intervals.first().map_or(0, |interval| interval.super_sets.len());
    let mut sum = vec![SuperSetCount { accesses: 0, misses: 0 }; super_set_count];
    for interval in intervals {
        for (sum, addend) in sum.iter_mut().zip(&interval.super_sets) {
            sum.accesses += addend.accesses;
            sum.misses += addend.misses;
        }
    }
    sum
}

/// Detects phases by locality signature. Because signatures come from samples, the threshold is never below four
/// standard errors of an entry (at most √(1/4n) of the references); otherwise, sampling noise would be reported as a
/// phase.
fn find_phases(intervals: &[ProfiledInterval], parameters: PhaseParameters) -> Vec<DetectedPhase> {
    let signatures: Option<Vec<Vec<f64>>> = intervals.iter().map(|interval| interval.signature.clone()).collect();
    let Some(signatures) = signatures.filter(|signatures| !signatures.is_empty()) else { return Vec::new() };
    let signature_error = |interval: &ProfiledInterval| {
        let references = interval.signature.as_ref().and_then(|entries| entries.first()).copied().unwrap_or(0.0);
        references * 0.5 / interval.samples.max(1.0).sqrt()
    };
    let mean_error = intervals.iter().map(signature_error).sum::<f64>() / intervals.len() as f64;
    detect_phases(&signatures, PhaseParameters { threshold: parameters.threshold.max(4.0 * mean_error), ..parameters })
}

/// Wraps a value that was computed from a complete recording, and is therefore exact.
fn exact_fact<T>(value: T) -> Fact<T> {
    Fact::new(value, FactSource::ExactTrace, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;

    const LINE: u64 = 64;

    fn sample_settings() -> ProfileSettings {
        ProfileSettings {
            interval: IntervalLength::Instructions(100_000),
            reuse_sample_period: 4,
            super_sets: 8,
            ..ProfileSettings::new(CacheLevel::L2, 256 * LINE, 8, LINE)
        }
    }
    fn sample_access(line: u64) -> ProgramAccess {
        ProgramAccess { line, instructions: 10, is_store: line % 2 == 1, thread: (line % 3) as u32 }
    }
    fn profile_of(lines: &[u64], settings: ProfileSettings, batch: usize) -> ProgramProfile {
        let accesses: Vec<ProgramAccess> = lines.iter().map(|&line| sample_access(line)).collect();
        let mut builder = ProfileBuilder::new(settings).unwrap();
        accesses.chunks(batch).for_each(|batch| builder.push(batch).unwrap());
        builder.finish(None).unwrap()
    }
    /// Returns a stream whose first half stays within 100 lines, and whose second half cycles through 400.
    fn two_phases() -> Vec<u64> {
        let mut random = SplitMix64::new(3);
        let first: Vec<u64> = (0..100_000).map(|_| random.draw_below(100)).collect();
        first.into_iter().chain((0..100_000).map(|index| 1000 + index % 400)).collect()
    }

    /// Do the numbers match those of the stream: counts, footprint, curve, positions, rates?
    #[test]
    fn the_profile_describes_the_stream() {
        let cycle: Vec<u64> = (0..60_000).map(|index| index % 300).collect();
        let built = profile_of(&cycle, sample_settings(), 1000);
        assert_eq!((built.accesses, built.stores, built.threads), (60_000, 30_000, 3));
        assert_eq!((built.instructions, built.footprint_lines), (Some(600_000), 300));
        let curve = built.profile.misses_per_kilo_instr().unwrap();
        assert_eq!(curve.last().unwrap().0, 256 * LINE);
        assert_eq!(curve.last().unwrap().1.value, 100.0);
        // With 300 lines in 32 sets of 8 ways, 12 sets have 10 lines and 20 have 9, so every access misses.
        assert_eq!(built.intensity_misses_per_kilo_instr, Some(100.0));
        assert_eq!(built.profile.rates.llc_refs_per_mega_instr.unwrap().value, 100_000.0);
        assert_eq!(built.animal, Some(Animal::Devil));
        let positions = built.profile.locality.stack_positions.clone().unwrap().value;
        assert!((positions.iter().sum::<f64>() - 100_000.0).abs() < 1e-6 && positions.len() == 9);
        let activity = &built.profile.locality.activity[&sample_settings().level].value;
        assert_eq!(activity.iter().map(|count| count.accesses).sum::<u64>(), 60_000);
        assert_eq!(activity.iter().map(|count| count.misses).sum::<u64>(), 60_000);
        assert_eq!(built.intervals.iter().map(|i| i.interval.misses).sum::<u64>(), 60_000);
        // All accesses but the last to each line are reuses at distance 299.
        assert!(built.reuse.buckets().all(|bucket| bucket.low <= 299 && bucket.high >= 299));
    }

    /// Does the result not depend on how the stream is cut into batches?
    #[test]
    fn batches_do_not_matter() {
        let lines = two_phases();
        assert!(profile_of(&lines, sample_settings(), 7) == profile_of(&lines, sample_settings(), 65_536));
    }

    /// Are the two phases found at their boundary?
    #[test]
    fn phases_are_found_where_they_change() {
        let built = profile_of(&two_phases(), sample_settings(), 4096);
        assert_eq!(built.intervals.len(), 20);
        assert_eq!(built.phases.iter().map(|phase| phase.start).collect::<Vec<_>>(), [0, 10]);
    }

    /// Without instruction counts, is every rate per instruction missing, and everything else present?
    #[test]
    fn without_instructions_there_are_no_rates() {
        let mut without_instructions = sample_settings();
        without_instructions.has_instruction_counts = false;
        let accesses: Vec<ProgramAccess> =
            two_phases().iter().map(|&line| ProgramAccess { instructions: 0, ..sample_access(line) }).collect();
        let mut builder = ProfileBuilder::new(without_instructions).unwrap();
        builder.push(&accesses).unwrap();
        let built = builder.finish(None).unwrap();
        let profile = &built.profile;
        assert_eq!((built.instructions, built.animal), (None, None));
        assert!(profile.misses_per_kilo_instr().is_none() && profile.locality.stack_positions.is_none());
        assert!(profile.rates.llc_refs_per_mega_instr.is_none() && built.intensity_misses_per_kilo_instr.is_none());
        assert!(profile.locality.reuse_times.is_some() && built.miss_ratios.len() == 16 && built.phases.is_empty());
    }

    /// Does the error for an invalid cache geometry name the field?
    #[test]
    fn an_impossible_cache_is_refused() {
        let error = ProfileBuilder::new(ProfileSettings { ways: 0, ..sample_settings() }).err().unwrap();
        assert!(error.to_string().contains("ways"), "{error}");
    }
}
