//! From a trace to a profile file: one pass, exact stack distances, sampled reuse times, phases.
//!
//! The engines are the library's; here they are fed together, and what they found is put under the file's names.

use cachemate_core::{Estimate, MachineSpec, Profile};
use cachemate_core::{Fact, FactSource, Level, PhaseParameters};
use cachemate_locality::cachesim::{CacheShape, CacheSim, PositionProfile, Replacement};
use cachemate_locality::curve::{Folding, fold_to_ways};
use cachemate_locality::phases::phases;
use cachemate_locality::reuse::ReuseSampler;
use cachemate_locality::stack::{Histogram, StackDistances};
use cachemate_trace::{
    Curve, CurvePoint, Histogram as FileHistogram, Interval, Intervals, ProfileFile, ProfileSource, StackPositions,
    TraceReader,
};

use crate::args::Sizes;
use crate::session::Session;
use crate::traces::Trace;

/// Watches one access in this many: enough samples from a million accesses, cheap on a billion.
const REUSE_ONE_IN: u32 = 64;
/// Phases are looked for in at most this many intervals.
const INTERVALS_AT_MOST: u64 = 200;
/// The cache whose misses tell phases apart where no machine is given.
const PHASE_CACHE: (u64, u32) = (1 << 20, 16);

/// The shared cache a profile is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// The cache's level; profiles keep curves by it.
    pub level: Level,
    pub size_bytes: u64,
    pub ways: u32,
    pub line_bytes: u32,
    pub slices: u32,
}

impl Target {
    /// A machine's contended cache.
    ///
    /// # Errors
    /// A machine without data caches.
    pub fn of(machine: &MachineSpec) -> anyhow::Result<Self> {
        let cache = machine
            .last_level()
            .ok_or_else(|| anyhow::anyhow!("machine '{}' has no data cache to share", machine.name))?;
        Ok(Target {
            level: cache.level,
            size_bytes: cache.size_bytes,
            ways: cache.ways,
            line_bytes: cache.line_bytes,
            slices: cache.slices,
        })
    }
}

/// Engines fed side by side.
struct Engines {
    distances: StackDistances,
    reuse: ReuseSampler,
    cache: CacheSim,
    interval_records: u64,
    intervals: Vec<Interval>,
    current: Interval,
}

impl Engines {
    fn feed(&mut self, trace: &mut Trace, shift: u32) -> anyhow::Result<()> {
        let with_instructions = trace.header().instructions_known;
        let (mut records, mut lines) = (Vec::new(), Vec::new());
        while trace.records(&mut records)? {
            lines.clear();
            lines.extend(records.iter().map(|record| record.address >> shift));
            self.distances.push(&lines)?;
            lines.iter().for_each(|line| self.reuse.touch(*line));
            let mut at = 0;
            while at < lines.len() {
                let room = (self.interval_records - self.current.accesses) as usize;
                let end = lines.len().min(at + room);
                self.current.misses += self.cache.push(&lines[at..end]);
                self.current.accesses += (end - at) as u64;
                if with_instructions {
                    let gaps: u64 = records[at..end].iter().map(|record| record.gap).sum();
                    *self.current.instructions.get_or_insert(0) += gaps;
                }
                if self.current.accesses == self.interval_records {
                    self.intervals.push(std::mem::replace(&mut self.current, EMPTY));
                }
                at = end;
            }
        }
        Ok(())
    }
}

const EMPTY: Interval = Interval { accesses: 0, instructions: None, misses: 0, phase: 0 };

/// Profiles a trace for `target`'s cache (a usual one without a target), naming it `name`.
///
/// # Errors
/// A damaged trace, a cache that cannot be simulated, more lines than can be numbered.
pub fn profile(
    session: &Session,
    trace: &mut Trace,
    name: &str,
    from: &str,
    target: Option<Target>,
) -> anyhow::Result<ProfileFile> {
    let usual = Target { level: Level::L3, size_bytes: PHASE_CACHE.0, ways: PHASE_CACHE.1, line_bytes: 64, slices: 1 };
    let target = target.unwrap_or(usual);
    let line_bytes = u64::from(target.line_bytes);
    let shape = CacheShape::from_bytes(target.size_bytes, line_bytes, target.ways, target.slices)?;
    let expected = trace.reader_totals().map_or(0, |totals| totals.records);
    let mut engines = Engines {
        distances: StackDistances::new(),
        reuse: ReuseSampler::new(REUSE_ONE_IN, 1),
        cache: CacheSim::new(shape, Replacement::Lru)?,
        interval_records: (expected / INTERVALS_AT_MOST).max(10_000),
        intervals: Vec::new(),
        current: EMPTY,
    };
    engines.feed(trace, target.line_bytes.trailing_zeros())?;
    let totals = trace.finish(session);
    let header = trace.header().clone();
    let histogram = engines.distances.finish()?;
    let instructions = totals.as_ref().and_then(|totals| totals.instructions).filter(|_| header.instructions_known);
    let tool = concat!("cachemate ", env!("CARGO_PKG_VERSION")).to_string();
    let source = ProfileSource { tool, kind: "trace".to_string(), from: Some(from.to_string()), filter: header.filter };
    let mut file = ProfileFile::new(name, source);
    file.command = header.command.clone();
    file.accesses = totals.as_ref().and_then(|totals| totals.program_accesses);
    file.records = Some(histogram.accesses());
    file.instructions = instructions;
    file.curves = vec![curve(&histogram, instructions, target.line_bytes)];
    file.histograms = vec![bucketed(&histogram, target.line_bytes)];
    let positions = engines.cache.positions().unwrap_or_default();
    file.stack_positions = vec![StackPositions {
        size_bytes: target.size_bytes,
        line_bytes: target.line_bytes,
        hits: positions.hits.clone(),
        misses: positions.misses,
    }];
    let times = engines.reuse.finish().to_profile();
    file.profile.locality.reuse_times = times.map(of_trace);
    if !engines.intervals.is_empty() {
        let every = with_phases(engines.intervals);
        let phase = every.last().map_or(0, |interval| interval.phase);
        file.profile.phase_number = phase;
        file.intervals = Some(Intervals { size_bytes: target.size_bytes, line_bytes: target.line_bytes, every });
    }
    fill_rates(&mut file, target.level, &positions);
    Ok(file)
}

fn curve(histogram: &Histogram, instructions: Option<u64>, line_bytes: u32) -> Curve {
    let sizes = Sizes::usual().0;
    let lines: Vec<u64> = sizes.iter().map(|bytes| bytes / u64::from(line_bytes)).collect();
    let ratios = histogram.miss_ratio_curve(&lines).unwrap_or_default();
    let per_kilo = instructions.filter(|count| *count > 0).map(|n| histogram.accesses() as f64 * 1000.0 / n as f64);
    let points = sizes.iter().zip(ratios).map(|(size_bytes, ratio)| CurvePoint {
        size_bytes: *size_bytes,
        miss_ratio: Estimate::exact(ratio),
        misses_per_kilo_instr: per_kilo.map(|scale| Estimate::exact(ratio * scale)),
    });
    Curve { policy: "lru".to_string(), method: "exact".to_string(), line_bytes, thread: None, points: points.collect() }
}

/// Distances in buckets of at most 1/32 of their size: exact below 64 lines, small enough for a file.
fn bucketed(histogram: &Histogram, line_bytes: u32) -> FileHistogram {
    let mut buckets: Vec<(u64, u64)> = Vec::new();
    for &(distance, count) in histogram.counts() {
        let step = 1u64 << (63 - (distance | 63).leading_zeros()).saturating_sub(5);
        let upper = distance / step * step + step - 1;
        match buckets.last_mut() {
            Some((bound, sum)) if *bound == upper => *sum += count,
            _ => buckets.push((upper, count)),
        }
    }
    FileHistogram { kind: "stack-distance".to_string(), line_bytes, cold: histogram.cold(), buckets }
}

/// Numbers the phases: raised by one at each change of the miss rate (thesis 5.6.2).
fn with_phases(mut every: Vec<Interval>) -> Vec<Interval> {
    let signal = |interval: &Interval| {
        let count = interval.instructions.filter(|count| *count > 0)?;
        Some(vec![interval.misses as f64 * 1000.0 / count as f64])
    };
    let Some(signals) = every.iter().map(signal).collect::<Option<Vec<_>>>() else { return every };
    for (number, phase) in phases(&signals, PhaseParameters::default()).iter().enumerate() {
        every[phase.start..phase.end].iter_mut().for_each(|interval| interval.phase = number as u32);
    }
    every
}

/// Rates per instruction, where instructions are known: what schemes and policies read.
fn fill_rates(file: &mut ProfileFile, level: Level, positions: &PositionProfile) {
    let Some(instructions) = file.instructions.filter(|count| *count > 0) else { return };
    let per_mega = |count: u64| count as f64 * 1e6 / instructions as f64;
    let curve = file.curves.first().map(|curve| {
        let points = curve.points.iter();
        points.filter_map(|point| Some((point.size_bytes, point.misses_per_kilo_instr?))).collect()
    });
    let references = file.records.map(|records| Estimate::exact(per_mega(records)));
    file.profile.rates.llc_refs_per_mega_instr = references.map(|rate| Fact::measured(rate, FactSource::ExactTrace, 0));
    let locality = &mut file.profile.locality;
    locality.misses_per_kilo_instr = curve.map(|points| (level, of_trace(points))).into_iter().collect();
    let counts = positions.hits.iter().chain([&positions.misses]);
    locality.stack_positions = Some(of_trace(counts.map(|count| per_mega(*count)).collect()));
}

/// A fact of a whole recording.
fn of_trace<T>(value: T) -> Fact<T> {
    Fact::new(value, FactSource::ExactTrace, 0)
}

/// The profile as it is on `target`'s cache: LRU positions of that cache, measured where the file has them, folded from
/// its stack distances otherwise.
///
/// # Errors
/// The file was made for another line size, or knows no distances.
pub fn on_target(file: &ProfileFile, target: Target) -> anyhow::Result<Profile> {
    let mut profile = file.profile.clone();
    let Some(instructions) = file.instructions.filter(|count| *count > 0) else { return Ok(profile) };
    let per_mega = |count: f64| count * 1e6 / instructions as f64;
    let fits = |found: &&StackPositions| {
        (found.size_bytes, found.line_bytes, found.hits.len())
            == (target.size_bytes, target.line_bytes, target.ways as usize)
    };
    if let Some(found) = file.stack_positions.iter().find(fits) {
        let counts = found.hits.iter().chain([&found.misses]);
        profile.locality.stack_positions = Some(of_trace(counts.map(|count| per_mega(*count as f64)).collect()));
        return Ok(profile);
    }
    let with_line = |h: &&FileHistogram| h.kind == "stack-distance" && h.line_bytes == target.line_bytes;
    let Some(histogram) = file.histograms.iter().find(with_line) else {
        let made: Vec<String> = file.histograms.iter().map(|h| h.line_bytes.to_string()).collect();
        let made = if made.is_empty() { "none".to_string() } else { made.join(", ") };
        anyhow::bail!(
            "profile of '{}': found stack distances for lines of {made} bytes, expected {}: profile its recording with --machine",
            file.program,
            target.line_bytes
        );
    };
    let histogram = Histogram::new(histogram.cold, histogram.buckets.iter().copied());
    let sets = target.size_bytes / u64::from(target.line_bytes) / u64::from(target.ways);
    let folded = fold_to_ways(&histogram, sets, target.ways, Folding::Hashed);
    profile.locality.stack_positions = folded.map(|counts| of_trace(counts.into_iter().map(per_mega).collect()));
    Ok(profile)
}
