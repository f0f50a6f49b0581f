//! Measures what the kernel does not report of the host: latencies, bandwidths, overlap of misses, what prefetchers
//! hide, the part of the caches that this system owns, how long lines stay there, and how low the shared one inserts
//! streams.
//!
//! Problem: forecasts need these figures; assumed ones are wrong by factors, because a guest owns a part of the cache
//! that it is shown, and caches do not treat streams as LRU does. Method: short loops on CPUs of one shared cache.
//! Dependent loads at random lines (as in lmbench and tinymembench) give the latency of each size, a fit of three
//! levels the size from which on misses begin, several walks at once the overlap, sums and fills the bandwidth (as in
//! STREAM), and a walk beside a stream the share of its lines that the stream evicts; what is left of some lines after
//! a pause says how long lines stay where other systems fill the shared cache, or the private one. For example, a guest that is
//! shown 300 MiB misses from 9 MiB on; beside a stream, a walk over 4 MiB loses a third of its lines, where under LRU
//! it would lose three quarters. Properties: what else runs only adds to a time, on a guest for a tenth of a second or
//! for some, of which the kernel reports nothing. So the loops take turns, a few ms each, in rounds that last for
//! seconds, and a figure is the lower quartile of its samples, with the range of their middle four fifths (bandwidths
//! of several CPUs: medians). The clock of a core changes with what its siblings do; what follows the clock is measured
//! beside a chain of multiplications, and counted in those. Samples during which the thread did not run are left out; a
//! host on which most samples are disturbed, or on which the first half of the rounds and the second differ by half, is
//! refused, and one on which they differ by a sixth is marked. Pages are those that programs get here, so that a
//! latency has the address translation that theirs has. At most 20 s.

use std::collections::BTreeMap;
use std::io;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use cachemate_core::{Cache, CacheLevel, CpuId, Estimate, LineLifetimes, Topology, quantile};
use serde::{Deserialize, Serialize};

use self::analysis::{LatencyFit, WalkBesideCoRunner, co_runner_lines_per_ns, fit_latencies};
use self::kernels::{
    LineBuffer, MIX_INSTR, MULTIPLICATION_CYCLES, SPACED_STEP_INSTR, branch, instruction_mix,
    multiply,
};
use super::probes::pinned::{PinnedThread, thread_time_ns};

mod analysis;
mod kernels;
mod neighbors;
mod sharing;

pub use self::neighbors::{NeighborHistory, NeighborRange, NeighborSample};
pub use self::sharing::SharingCheck;

/// Measured figures of a host; `None` means not measurable there.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostCalibration {
    /// Name of the host.
    pub host: String,
    /// Release of its kernel.
    pub kernel: String,
    /// Model of its processor.
    pub processor: String,
    /// Seconds since 1970 at the measurement.
    pub measured_at_s: u64,
    /// How calm the host was.
    pub calmness: Calmness,
    /// Clock of a busy core; `None` where no loop of known length exists.
    pub clock_hertz: Option<Estimate>,
    /// Instructions per cycle of a mix as in compiled code, all in the first cache and with few dependences; `None`
    /// where no such loop exists. Other threads of the core take their part.
    pub instr_per_cycle: Option<Estimate>,
    /// Instructions among which two misses overlap; `None` where no such loop exists. Some cores give half of it to
    /// each of two threads.
    pub window_instr: Option<Estimate>,
    /// Time from a mispredicted branch to the first instruction of the right path.
    pub mispredict_ns: Estimate,
    /// Latencies of the private caches.
    pub private_latencies: Vec<LevelLatency>,
    /// Part of the largest private cache that a random walk finds free for it.
    pub private_bytes: Option<Estimate>,
    /// Level of the shared cache.
    pub shared_level: CacheLevel,
    /// Part of the shared cache that this system owns.
    pub shared_bytes: Option<Estimate>,
    /// Latency of a hit in the shared cache.
    pub shared_ns: Option<Estimate>,
    /// Latency of memory.
    pub memory_ns: Estimate,
    /// Misses that one core overlaps.
    pub overlapped_misses: Estimate,
    /// Time of a miss by the number of parallel walks.
    pub parallel_walks: Vec<ParallelWalks>,
    /// What prefetchers hide of the latency of memory, by stride.
    pub strides: Vec<StrideLatency>,
    /// Bandwidths.
    pub bandwidth: Bandwidths,
    /// Share of a stream's lines that take space from a resident working set as under LRU; `None` with one CPU.
    pub stream_insertion: Option<Estimate>,
    /// Time after which half of a working set that nobody in this system replaces has left the largest private cache, because
    /// another guest's thread may run on the same core; `None` if it stays for longer than was waited.
    pub private_lifetime_ns: Option<Estimate>,
    /// Whether CPUs share caches as the kernel says: two of the shared cache, and one of it with one of another cache.
    pub sharing: Vec<SharingCheck>,
    /// What other systems did to the shared cache.
    pub neighbors: NeighborHistory,
}

/// How calm a host was during its calibration.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calmness {
    /// Share of the samples during which the measuring thread did not run all the time.
    pub disturbed_share: f64,
    /// Largest relative difference of a figure between the two halves of the rounds.
    pub drift: f64,
    /// Whether figures may be off because other work ran.
    pub is_busy: bool,
}

/// Latency of a private cache.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LevelLatency {
    /// The level.
    pub level: CacheLevel,
    /// Time of a hit.
    pub ns: Estimate,
}

/// Time of a miss if this number of walks run at once.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParallelWalks {
    /// Number of walks.
    pub walks: u32,
    /// Elapsed time divided by all misses.
    pub ns_per_miss: Estimate,
}

/// Time of a dependent load at a constant stride.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StrideLatency {
    /// Lines from one load to the next.
    pub lines: u32,
    /// Time of a load.
    pub ns: Estimate,
    /// Share of the latency of memory that prefetchers hide.
    pub hidden_share: f64,
}

/// Sustained bandwidths of reads and writes in bytes per second. A written line is also read.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bandwidths {
    /// Reads of one core.
    pub core_read: Estimate,
    /// Writes of one core.
    pub core_write: Estimate,
    /// Reads of all cores of a shared cache.
    pub cache_read: Option<Estimate>,
    /// Writes of all cores of a shared cache.
    pub cache_write: Option<Estimate>,
    /// Reads of all cores of a package, if it has several shared caches.
    pub package_read: Option<Estimate>,
}

/// Why a host cannot be calibrated.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    /// The topology has no cache that these loops can measure.
    #[error(
        "caches: found {0}, expected a last-level cache with a size and a private cache below it"
    )]
    NoSharedCache(String),
    /// Other work ran.
    #[error(
        "the host is too busy to be measured: {0}; when little else runs for 20 s, 'cachemate topology --as-machine --measure' measures and stores it"
    )]
    Busy(String),
    /// A thread could not be moved to its CPU.
    #[error("CPU {0}: {1}")]
    Pin(u32, io::Error),
}

/// Rounds in which each loop gets a sample.
const ROUNDS: usize = 30;
/// Sizes of walks, by factors of this.
const SIZE_RATIO: f64 = 1.25;
/// Rounds of spaced walks.
const SPACED_ROUNDS: usize = 9;
/// Rounds beside a stream.
const STREAM_ROUNDS: usize = 15;
/// Parts of the samples of which each is fitted by itself, for the range of what a fit gives.
const FITTED_PARTS: usize = 3;
/// Aimed length of a sample.
const SAMPLE_NS: f64 = 2.5e6;
/// Runs of a loop before its sample, at most, until it is as long as a sample.
const MAX_SIZING_RUNS: usize = 40;
/// Share of a sample's elapsed time in which its thread must run.
const MIN_RUNNING_SHARE: f64 = 0.97;
/// Drift from which on a calibration is marked, and refused.
const MARKED_DRIFT: f64 = 1.0 / 6.0;
const REFUSED_DRIFT: f64 = 0.5;
/// Share of disturbed samples from which on a calibration is marked, and refused.
const MARKED_DISTURBANCE: f64 = 0.25;
const REFUSED_DISTURBANCE: f64 = 0.7;
/// Memory that the loops use at least, and at most. A stream must not come back to a line that is still in the cache.
const MIN_BUFFER_BYTES: u64 = 96 << 20;
const MAX_BUFFER_BYTES: u64 = 2 << 30;
/// Largest size of a walk.
const MAX_WALK_BYTES: u64 = 512 << 20;
/// Time for which all CPUs stream at once, in each of three samples.
const STREAM_TIME: Duration = Duration::from_millis(250);
/// Share of that time for which each has to run: hypervisors take some hundredths of a busy CPU's.
const MIN_STREAMING_SHARE: f64 = 0.9;
/// Tries of streams on several CPUs, because other work on any of them disturbs all.
const STREAM_TRIES: usize = 4;
/// Lines that a stream processes between two looks at the clock.
const STREAM_CHUNK_LINES: usize = 1 << 15;
/// Cycles of a hit in a first-level data cache, which hide the loop's own instructions.
const FIRST_LEVEL_CYCLES: f64 = 5.0;

/// A loop whose time for a unit of its work is a figure, or part of one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum TimedLoop {
    /// Dependent multiplications.
    Multiply,
    /// Draws, and a branch on a bit of each, which is random or always the same.
    Branch { is_random: bool },
    /// Steps of independent random walks over the first bytes of the buffer; `walks` is an index of [`PARALLEL_WALKS`].
    Walk { bytes: u64, walks: usize },
    /// Steps of two walks over the first bytes of the buffer; `spacing` is an index of [`SPACED_WALKS`].
    SpacedWalk { bytes: u64, spacing: usize },
    /// Blocks of instructions that wait for nothing.
    InstructionMix,
    /// Dependent loads that many lines apart.
    Stride { lines: u32 },
    /// Lines read in order.
    Read,
    /// Lines of the first bytes of the buffer read in order, again and again.
    Reread { bytes: u64 },
    /// Lines written in order.
    Write,
}

/// Walks over bytes of a buffer: steps, and a seed.
type WalkLoop = fn(&LineBuffer, u64, u64, u64);
/// Numbers of walks at once, with their loops.
const PARALLEL_WALKS: [(u32, WalkLoop); 10] = [
    (1, LineBuffer::walk::<1>),
    (2, LineBuffer::walk::<2>),
    (4, LineBuffer::walk::<4>),
    (6, LineBuffer::walk::<6>),
    (8, LineBuffer::walk::<8>),
    (10, LineBuffer::walk::<10>),
    (12, LineBuffer::walk::<12>),
    (16, LineBuffer::walk::<16>),
    (20, LineBuffer::walk::<20>),
    (24, LineBuffer::walk::<24>),
];

/// Numbers of other instructions between the loads of two walks, with their loops.
const SPACED_WALKS: [(u32, WalkLoop); 14] = [
    (0, LineBuffer::spaced_walk::<2, 0>),
    (64, LineBuffer::spaced_walk::<2, 32>),
    (96, LineBuffer::spaced_walk::<2, 48>),
    (128, LineBuffer::spaced_walk::<2, 64>),
    (160, LineBuffer::spaced_walk::<2, 80>),
    (192, LineBuffer::spaced_walk::<2, 96>),
    (224, LineBuffer::spaced_walk::<2, 112>),
    (256, LineBuffer::spaced_walk::<2, 128>),
    (320, LineBuffer::spaced_walk::<2, 160>),
    (384, LineBuffer::spaced_walk::<2, 192>),
    (448, LineBuffer::spaced_walk::<2, 224>),
    (512, LineBuffer::spaced_walk::<2, 256>),
    (640, LineBuffer::spaced_walk::<2, 320>),
    (768, LineBuffer::spaced_walk::<2, 384>),
];

/// Runs loops in turns, and keeps the time that each took for a unit.
struct Sampler {
    buffer: LineBuffer,
    /// Walks over no more than this follow the clock of the core.
    core_bytes: u64,
    /// Next line of a stride, of reads and of writes.
    next_line: usize,
    seed: u64,
    units: BTreeMap<TimedLoop, u64>,
    /// Time of a unit in ns; of loops that follow the clock, in multiplications.
    samples: BTreeMap<TimedLoop, Vec<f64>>,
    taken: u32,
    disturbed: u32,
}

impl Sampler {
    fn new(buffer: LineBuffer, core_bytes: u64) -> Self {
        Sampler {
            buffer,
            core_bytes,
            next_line: 0,
            seed: 0,
            units: BTreeMap::new(),
            samples: BTreeMap::new(),
            taken: 0,
            disturbed: 0,
        }
    }

    fn run(&mut self, timed_loop: TimedLoop, units: u64) {
        self.seed += 1;
        let (seed, buffer) = (self.seed, &mut self.buffer);
        match timed_loop {
            TimedLoop::Multiply => multiply(units),
            TimedLoop::Branch { is_random } => branch(units, u64::from(is_random) << 63, seed),
            TimedLoop::Stride { lines } => {
                self.next_line = buffer.stride(lines as usize, self.next_line, units);
            }
            TimedLoop::Read => {
                self.next_line = buffer.read_all(buffer.bytes(), self.next_line, units as usize);
            }
            TimedLoop::Reread { bytes } => {
                buffer.read_all(bytes, 0, units as usize);
            }
            TimedLoop::Write => self.next_line = buffer.write_all(self.next_line, units as usize),
            TimedLoop::Walk { bytes, walks } => {
                let (_, walk) = PARALLEL_WALKS[walks];
                walk(buffer, bytes, units, seed);
            }
            TimedLoop::SpacedWalk { bytes, spacing } => {
                let (_, walk) = SPACED_WALKS[spacing];
                walk(buffer, bytes, units, seed);
            }
            TimedLoop::InstructionMix => instruction_mix(units),
        }
    }

    /// Runs a loop; returns the time of a unit in ns, and whether the thread ran all the time.
    fn time(&mut self, timed_loop: TimedLoop, units: u64) -> (f64, bool) {
        let (start, cpu_start) = (Instant::now(), thread_time_ns());
        self.run(timed_loop, units);
        let elapsed_ns = start.elapsed().as_nanos().max(1) as f64;
        let running_ns = (thread_time_ns() - cpu_start) as f64;
        (
            elapsed_ns / units as f64,
            running_ns >= MIN_RUNNING_SHARE * elapsed_ns,
        )
    }

    /// Units that fill a sample; found by timing at the first call, and stored.
    fn units_of(&mut self, timed_loop: TimedLoop) -> u64 {
        if let Some(&units) = self.units.get(&timed_loop) {
            return units;
        }
        let mut units = 256u64;
        for _ in 0..MAX_SIZING_RUNS {
            let (unit_ns, ran_through) = self.time(timed_loop, units);
            if unit_ns * units as f64 <= 0.3 * SAMPLE_NS {
                units *= 4;
            } else if ran_through {
                units = ((SAMPLE_NS / unit_ns) as u64).clamp(16, 1 << 26);
                break;
            }
            // A pause would make the units seem long, and each sample too short.
        }
        self.units.insert(timed_loop, units);
        units
    }

    fn follows_clock(&self, timed_loop: TimedLoop) -> bool {
        match timed_loop {
            TimedLoop::Branch { .. } | TimedLoop::InstructionMix => true,
            TimedLoop::Walk { bytes, .. } => bytes <= self.core_bytes,
            _ => false,
        }
    }

    /// Takes a sample of a loop.
    fn sample(&mut self, timed_loop: TimedLoop) {
        let units = self.units_of(timed_loop);
        let (clock_ns, clock_runs) = if self.follows_clock(timed_loop) {
            let clock_units = self.units_of(TimedLoop::Multiply);
            self.time(TimedLoop::Multiply, clock_units)
        } else {
            (1.0, true)
        };
        if let TimedLoop::Walk { bytes, .. } = timed_loop {
            // The walk must find at first what it will find later: each line once or twice, but for no longer than a
            // few samples. In a pause of some ms, what runs beside this guest on the same core may empty its caches.
            self.seed += 1;
            self.buffer
                .walk::<8>(bytes, (bytes / 256).min(60_000), self.seed);
        }
        if let TimedLoop::Reread { bytes } = timed_loop {
            self.buffer.read_all(bytes, 0, (bytes / 64) as usize);
        }
        let (unit_ns, runs) = self.time(timed_loop, units);
        self.taken += 1;
        if runs && clock_runs {
            let samples = self.samples.entry(timed_loop).or_default();
            samples.push(unit_ns / clock_ns);
        } else {
            self.disturbed += 1;
        }
    }

    /// Takes samples of loops in turns, so that each loop has a time.
    ///
    /// # Errors
    /// Nearly all samples of a loop were disturbed.
    fn sample_rounds(
        &mut self,
        loops: &[TimedLoop],
        rounds: usize,
    ) -> Result<(), CalibrationError> {
        for _ in 0..rounds {
            for &timed_loop in loops {
                self.sample(timed_loop);
            }
        }
        for timed_loop in loops {
            let count = self.samples.get(timed_loop).map_or(0, Vec::len);
            if count < FITTED_PARTS {
                return Err(CalibrationError::Busy(format!(
                    "in {count} of {rounds} samples did the measuring thread run without a pause"
                )));
            }
        }
        Ok(())
    }

    /// The time of a unit of a loop in ns; the loop must have been sampled.
    fn time_of(&self, timed_loop: TimedLoop) -> Estimate {
        self.time_in(timed_loop, |_, _| true)
    }

    /// The time from the samples that `is_used` selects by their number and the number of all; that must be a third or
    /// more of them.
    fn time_in(&self, timed_loop: TimedLoop, is_used: impl Fn(usize, usize) -> bool) -> Estimate {
        let all = &self.samples[&timed_loop];
        let used = (0..all.len()).filter(|&number| is_used(number, all.len()));
        let samples = used.map(|number| all[number]).collect();
        let time = at_quantile(samples, LOWER_QUARTILE).expect("each third has a sample");
        if !self.follows_clock(timed_loop) {
            return time;
        }
        let multiplication_ns = self.time_of(TimedLoop::Multiply).value;
        scaled(time, |count| count * multiplication_ns)
    }

    /// The relative difference of a loop's time between the two halves of its samples.
    fn drift_of(&self, timed_loop: TimedLoop) -> f64 {
        let first = self.time_in(timed_loop, |number, count| 2 * number < count);
        let second = self.time_in(timed_loop, |number, count| 2 * number >= count);
        (second.value / first.value - 1.0).abs()
    }

    fn disturbed_share(&self) -> f64 {
        f64::from(self.disturbed) / f64::from(self.taken.max(1))
    }
}

const LOWER_QUARTILE: f64 = 0.25;
const MEDIAN: f64 = 0.5;

/// A quantile with the range of the middle four fifths; `None` without samples.
fn at_quantile(mut samples: Vec<f64>, share: f64) -> Option<Estimate> {
    samples.sort_by(f64::total_cmp);
    let last = samples.len().checked_sub(1)?;
    Some(Estimate {
        value: quantile(&samples, share)?,
        low: samples[last / 10],
        high: samples[last - last / 10],
    })
}

fn scaled(estimate: Estimate, scale: impl Fn(f64) -> f64) -> Estimate {
    let ends = (scale(estimate.low), scale(estimate.high));
    Estimate {
        value: scale(estimate.value),
        low: ends.0.min(ends.1),
        high: ends.0.max(ends.1),
    }
}

/// The CPUs and caches that are measured.
struct MeasuredPart<'a> {
    shared: &'a Cache,
    shared_bytes: u64,
    /// Private caches, from the core outward: level and size.
    private: Vec<(CacheLevel, u64)>,
    /// One CPU of each core of the shared cache.
    cpus: Vec<CpuId>,
    /// One CPU of each core of the package.
    package_cpus: Vec<CpuId>,
}

impl<'a> MeasuredPart<'a> {
    fn find(topology: &'a Topology) -> Result<Self, CalibrationError> {
        MeasuredPart::with_caches(topology)
            .filter(|part| !part.private.is_empty() && !part.cpus.is_empty())
            .ok_or_else(|| {
                CalibrationError::NoSharedCache(format!("{} caches", topology.caches.len()))
            })
    }

    fn with_caches(topology: &'a Topology) -> Option<Self> {
        let online = topology.online();
        let shared = topology
            .last_level_caches()
            .max_by_key(|cache| cache.cpus.intersection(&online).count())?;
        let first_cpu = shared.cpus.intersection(&online).first()?;
        let mut private: Vec<(CacheLevel, u64)> = topology
            .caches
            .iter()
            .filter(|cache| {
                cache.level != CacheLevel::L1Instruction
                    && cache.level < shared.level
                    && cache.cpus.contains(first_cpu)
            })
            .filter_map(|cache| Some((cache.level, cache.size_bytes?)))
            .collect();
        private.sort();
        let package = topology
            .cpus
            .iter()
            .find(|cpu| cpu.id.0 == first_cpu)?
            .package;
        let one_of_each_core = |is_wanted: &dyn Fn(u32, u32) -> bool| {
            let mut cores = std::collections::BTreeSet::new();
            let wanted = topology.cpus.iter().filter(|cpu| {
                cpu.online && is_wanted(cpu.id.0, cpu.package) && cores.insert(cpu.core)
            });
            wanted.map(|cpu| cpu.id).collect::<Vec<CpuId>>()
        };
        Some(MeasuredPart {
            shared,
            shared_bytes: shared.size_bytes?,
            private,
            cpus: one_of_each_core(&|cpu, _| shared.cpus.contains(cpu)),
            package_cpus: one_of_each_core(&|_, of| of == package),
        })
    }

    fn private_bytes(&self) -> u64 {
        self.private.last().map_or(0, |(_, bytes)| *bytes)
    }

    fn buffer_bytes(&self, available_bytes: u64) -> u64 {
        (4 * self.shared_bytes)
            .clamp(MIN_BUFFER_BYTES, MAX_BUFFER_BYTES)
            .min(available_bytes / 4)
    }
}

/// Measures the host.
///
/// # Errors
/// The host has no shared cache of known size, or is too busy.
pub fn measure_host(
    topology: &Topology,
    available_bytes: u64,
) -> Result<HostCalibration, CalibrationError> {
    let part = MeasuredPart::find(topology)?;
    let bytes = part.buffer_bytes(available_bytes);
    let (_thread, mut sampler) = start_sampler(&part, bytes)?;
    let latencies = measure_latencies(&mut sampler, &part)?;
    let memory_bytes = latencies.memory_bytes(sampler.buffer.bytes());
    let walks_at = |walks| TimedLoop::Walk {
        bytes: memory_bytes,
        walks,
    };
    let spaced_at = |spacing| TimedLoop::SpacedWalk {
        bytes: memory_bytes,
        spacing,
    };
    let stride_of = |lines| TimedLoop::Stride { lines };
    let walks: Vec<TimedLoop> = (0..PARALLEL_WALKS.len()).map(walks_at).collect();
    let strides = STRIDES.map(stride_of);
    let steady = [
        TimedLoop::Read,
        TimedLoop::Write,
        TimedLoop::Multiply,
        TimedLoop::InstructionMix,
    ];
    sampler.sample_rounds(&[&walks[..], &strides, &steady].concat(), ROUNDS)?;
    let spaced_walks: Vec<TimedLoop> = (0..SPACED_WALKS.len()).map(spaced_at).collect();
    sampler.sample_rounds(&spaced_walks, SPACED_ROUNDS)?;
    let parallel_walks: Vec<ParallelWalks> = PARALLEL_WALKS
        .iter()
        .zip(&walks)
        .map(|(&(count, _), &timed_loop)| ParallelWalks {
            walks: count,
            ns_per_miss: scaled(sampler.time_of(timed_loop), |ns| ns / f64::from(count)),
        })
        .collect();
    let single_ns = parallel_walks[0].ns_per_miss;
    let overlap_of = |walks: &ParallelWalks| Estimate {
        value: single_ns.value / walks.ns_per_miss.value,
        low: single_ns.low / walks.ns_per_miss.high,
        high: single_ns.high / walks.ns_per_miss.low,
    };
    let overlaps = parallel_walks.iter().map(overlap_of);
    let overlapped_misses = overlaps
        .max_by(|a, b| a.value.total_cmp(&b.value))
        .unwrap_or(Estimate::exact(1.0));
    let cached_ns = latencies
        .private
        .first()
        .map_or(0.0, |first| first.ns.value);
    let hideable_ns = (latencies.memory_ns().value - cached_ns).max(1.0);
    let strides = STRIDES.iter().map(|&lines| {
        let ns = sampler.time_of(stride_of(lines));
        StrideLatency {
            lines,
            ns,
            hidden_share: (1.0 - (ns.value - cached_ns) / hideable_ns).clamp(0.0, 1.0),
        }
    });
    let strides = strides.collect();
    let bytes_per_s = |line_ns: Estimate| scaled(line_ns, |ns| 64.0 / ns * 1e9);
    let other_caches_cpus = match part.package_cpus.len() > part.cpus.len() {
        true => part.package_cpus.as_slice(),
        false => &[],
    };
    let bandwidth = Bandwidths {
        core_read: bytes_per_s(sampler.time_of(TimedLoop::Read)),
        core_write: bytes_per_s(sampler.time_of(TimedLoop::Write)),
        cache_read: stream_together(&part.cpus, bytes, false)?,
        cache_write: stream_together(&part.cpus, bytes, true)?,
        package_read: stream_together(other_caches_cpus, bytes, false)?,
    };
    let memory_ns = latencies.memory_ns();
    let lifetimes = measure_shared_lifetimes(&sampler, &part, memory_ns.value);
    let neighbors_now = sample_pool(&mut sampler, &part, lifetimes)?;
    let stream_insertion = match (part.cpus.get(1), latencies.fit) {
        (Some(&cpu), Some(fit)) => {
            // Where lines of other systems compete too, it follows from the time for which new lines stay.
            let is_pooled =
                lifetimes.is_some() && is_filled_by_others(fit.cache_bytes, part.shared_bytes);
            if is_pooled {
                None
            } else {
                measure_insertion(&mut sampler, &part, &latencies, fit.cache_bytes, cpu)?
            }
        }
        _ => None,
    };
    let private_lifetime_ns = measure_private_half_time(&mut sampler, &part, &latencies);
    let elsewhere = part
        .package_cpus
        .iter()
        .find(|cpu| !part.cpus.contains(cpu));
    let told_to_share = check_sharing(&sampler, &part)?;
    let told_apart = match elsewhere {
        Some(&other) => sharing::measure_sharing(&sampler.buffer, [part.cpus[0], other], false)?,
        None => None,
    };
    let drift = [
        first_level_walk(&part),
        walk_over(whole_pages(part.private_bytes() / 2)),
        walk_over(memory_bytes),
    ]
    .iter()
    .filter(|timed_loop| sampler.samples.contains_key(timed_loop))
    .map(|timed_loop| sampler.drift_of(*timed_loop))
    .fold(0.0, f64::max);
    let disturbed_share = sampler.disturbed_share();
    if drift > REFUSED_DRIFT || disturbed_share > REFUSED_DISTURBANCE {
        return Err(CalibrationError::Busy(format!(
            "{:.0} % of the samples were disturbed, and latencies of private caches and of memory changed by {:.0} % meanwhile",
            100.0 * disturbed_share,
            100.0 * drift
        )));
    }
    let mut neighbors = NeighborHistory::default();
    neighbors.add(NeighborSample {
        are_apart: told_to_share.and_then(|check| check.are_apart()),
        ..neighbors_now
    });
    Ok(HostCalibration {
        host: String::new(),
        kernel: String::new(),
        processor: String::new(),
        measured_at_s: 0,
        calmness: Calmness {
            disturbed_share,
            drift,
            is_busy: drift > MARKED_DRIFT || disturbed_share > MARKED_DISTURBANCE,
        },
        clock_hertz: measured_clock(&sampler),
        instr_per_cycle: measured_instr_per_cycle(&sampler),
        window_instr: measured_window(&sampler, &spaced_walks),
        mispredict_ns: measured_mispredict(&sampler),
        private_latencies: latencies.private.clone(),
        private_bytes: latencies.fitted(|fit| fit.private_bytes),
        shared_level: part.shared.level,
        shared_bytes: latencies.fitted(|fit| fit.cache_bytes),
        shared_ns: lifetimes
            .map(|found| found.resident_ns)
            .or_else(|| latencies.fitted(|fit| fit.cache_ns)),
        memory_ns,
        overlapped_misses,
        parallel_walks,
        strides,
        bandwidth,
        stream_insertion,
        private_lifetime_ns,
        sharing: told_to_share.into_iter().chain(told_apart).collect(),
        neighbors,
    })
}

/// Looks at what other systems do to the shared cache now, which takes about two seconds.
///
/// # Errors
/// The host has no shared cache of known size, or is too busy.
pub fn sample_neighbors(
    topology: &Topology,
    available_bytes: u64,
    calibration: &HostCalibration,
) -> Result<NeighborSample, CalibrationError> {
    let part = MeasuredPart::find(topology)?;
    let bytes = part.buffer_bytes(available_bytes);
    let (_thread, mut sampler) = start_sampler(&part, bytes)?;
    let loops = [
        TimedLoop::Multiply,
        first_level_walk(&part),
        TimedLoop::Read,
    ];
    sampler.sample_rounds(&loops, POOL_ROUNDS)?;
    let memory_ns = calibration.memory_ns.value;
    let lifetimes = measure_shared_lifetimes(&sampler, &part, memory_ns);
    let sample = sample_pool(&mut sampler, &part, lifetimes)?;
    if sampler.disturbed_share() > REFUSED_DISTURBANCE {
        return Err(CalibrationError::Busy(format!(
            "{:.0} % of the samples were disturbed",
            100.0 * sampler.disturbed_share()
        )));
    }
    let sharing = check_sharing(&sampler, &part)?;
    Ok(NeighborSample {
        are_apart: sharing.and_then(|check| check.are_apart()),
        ..sample
    })
}

/// The pool in which lines have these lifetimes.
fn sample_pool(
    sampler: &mut Sampler,
    part: &MeasuredPart<'_>,
    lifetimes: Option<SharedLifetimes>,
) -> Result<NeighborSample, CalibrationError> {
    let pool_bytes = match lifetimes {
        Some(lifetimes) => measure_pool(sampler, part, lifetimes)?,
        None => None,
    };
    Ok(NeighborSample {
        measured_at_s: 0,
        pool_bytes,
        mean_lifetime_ns: lifetimes.map(|found| found.mean_ns),
        probation_share: lifetimes.map(|found| found.lifetimes.probation_share()),
        are_apart: None,
    })
}

/// Whether the measured CPU and the next one of its cache share one now.
fn check_sharing(
    sampler: &Sampler,
    part: &MeasuredPart<'_>,
) -> Result<Option<SharingCheck>, CalibrationError> {
    match part.cpus.get(1) {
        Some(&other) => sharing::measure_sharing(&sampler.buffer, [part.cpus[0], other], true),
        None => Ok(None),
    }
}

/// Pins this thread to the first CPU, and lets the core reach its clock.
fn start_sampler(
    part: &MeasuredPart<'_>,
    bytes: u64,
) -> Result<(PinnedThread, Sampler), CalibrationError> {
    let cpu = part.cpus[0];
    let thread = PinnedThread::new(cpu).map_err(|error| CalibrationError::Pin(cpu.0, error))?;
    // A core takes a few ms to reach its clock.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(30) {
        multiply(10_000);
    }
    let sampler = Sampler::new(LineBuffer::new(bytes), part.private_bytes() / 2);
    Ok((thread, sampler))
}

/// Time of a step of a walk beyond that of its load; all of it if the clock is unknown.
fn measured_loop_ns(sampler: &Sampler, part: &MeasuredPart<'_>) -> f64 {
    let first_level_ns = match measured_clock(sampler) {
        Some(hertz) => FIRST_LEVEL_CYCLES / hertz.value * 1e9,
        None => 0.0,
    };
    sampler.time_of(first_level_walk(part)).value - first_level_ns
}

/// Strides in lines.
const STRIDES: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// Clock of a busy core in hertz, by a chain of multiplications; `None` on processors other than x86-64.
fn measured_clock(sampler: &Sampler) -> Option<Estimate> {
    if !cfg!(target_arch = "x86_64") {
        return None;
    }
    let ns = sampler.time_of(TimedLoop::Multiply);
    Some(scaled(ns, |ns| MULTIPLICATION_CYCLES / ns * 1e9))
}

/// Measured on [`instruction_mix`]; `None` on processors other than x86-64.
fn measured_instr_per_cycle(sampler: &Sampler) -> Option<Estimate> {
    let hertz = measured_clock(sampler)?.value;
    let ns = sampler.time_of(TimedLoop::InstructionMix);
    Some(scaled(ns, |ns| MIX_INSTR / ns * 1e9 / hertz))
}

/// Instructions among which two misses overlap; `None` on processors other than x86-64.
fn measured_window(sampler: &Sampler, spaced_walks: &[TimedLoop]) -> Option<Estimate> {
    if !cfg!(target_arch = "x86_64") {
        return None;
    }
    let spaced_walks = spaced_walks.iter().zip(&SPACED_WALKS);
    let times = spaced_walks.map(|(&timed_loop, (spacing, _))| {
        let instr = f64::from(*spacing) + SPACED_STEP_INSTR;
        (instr, sampler.time_of(timed_loop).value)
    });
    analysis::window_instr(&times.collect::<Vec<_>>())
}

/// Cost of a mispredicted branch in ns: twice what a random branch costs more than one that is never taken.
fn measured_mispredict(sampler: &Sampler) -> Estimate {
    let [random, steady] =
        [true, false].map(|is_random| sampler.time_of(TimedLoop::Branch { is_random }));
    let cost = |random: f64, steady: f64| (2.0 * (random - steady)).max(0.0);
    Estimate {
        value: cost(random.value, steady.value),
        low: cost(random.low, steady.high),
        high: cost(random.high, steady.low),
    }
}

fn whole_pages(bytes: u64) -> u64 {
    bytes / 4096 * 4096
}

fn walk_over(bytes: u64) -> TimedLoop {
    TimedLoop::Walk { bytes, walks: 0 }
}

/// A walk over half of the first level always hits it.
fn first_level_walk(part: &MeasuredPart<'_>) -> TimedLoop {
    walk_over(part.private.first().map_or(32 << 10, |(_, bytes)| *bytes) / 2)
}

/// Latencies by size, and what follows from them.
struct Latencies {
    /// Time of the loop itself, which is part of every sample.
    loop_ns: f64,
    private: Vec<LevelLatency>,
    points: Vec<(u64, Estimate)>,
    fit: Option<LatencyFit>,
    /// The fit of each part of the samples.
    fits: Vec<LatencyFit>,
    /// Time for a line that no cache has; `None` where caches cannot be emptied.
    emptied_ns: Option<Estimate>,
}

impl Latencies {
    /// Size in bytes over which a walk misses nearly always, but needs little more address translation than programs
    /// do.
    fn memory_bytes(&self, largest_bytes: u64) -> u64 {
        let Some(fit) = self.fit else {
            return largest_bytes;
        };
        let least_bytes = 4.0 * fit.cache_bytes;
        let sizes = self.points.iter().map(|(bytes, _)| *bytes);
        sizes
            .filter(|bytes| *bytes as f64 >= least_bytes)
            .min()
            .unwrap_or(largest_bytes)
    }

    /// A fitted value with its range over the sweeps; `None` without a fit.
    fn fitted(&self, value_of: fn(&LatencyFit) -> f64) -> Option<Estimate> {
        let value = value_of(self.fit.as_ref()?);
        let ends = self.fits.iter().map(value_of);
        let (low, high) = ends.fold((value, value), |(low, high), end| {
            (low.min(end), high.max(end))
        });
        Some(Estimate { value, low, high })
    }

    fn memory_ns(&self) -> Estimate {
        let largest = self
            .points
            .last()
            .map_or(Estimate::exact(self.loop_ns), |(_, latency)| *latency);
        self.emptied_ns
            .or_else(|| self.fitted(|fit| fit.memory_ns))
            .unwrap_or(largest)
    }
}

/// Latency in ns of a walk whose step took this time; at least 0.1, because noise can exceed a short one.
fn without_loop(step: Estimate, loop_ns: f64) -> Estimate {
    scaled(step, |ns| (ns - loop_ns).max(0.1))
}

fn measure_latencies(
    sampler: &mut Sampler,
    part: &MeasuredPart<'_>,
) -> Result<Latencies, CalibrationError> {
    let private_bytes = part.private_bytes();
    let mut sizes = Vec::new();
    let mut bytes = private_bytes as f64 * 0.5;
    while bytes <= sampler.buffer.bytes().min(MAX_WALK_BYTES) as f64 {
        sizes.push(whole_pages(bytes as u64));
        bytes *= SIZE_RATIO;
    }
    // Of a walk over half of a private cache, a part hits in the level before.
    let inner_bytes_of = |index: usize| match index {
        0 => 0,
        _ => part.private[index - 1].1,
    };
    let private_sizes: Vec<u64> = part
        .private
        .iter()
        .enumerate()
        .map(|(index, (_, bytes))| (bytes / 2).max(2 * inner_bytes_of(index)).min(*bytes))
        .collect();
    let mut loops = vec![
        TimedLoop::Multiply,
        TimedLoop::Branch { is_random: true },
        TimedLoop::Branch { is_random: false },
        first_level_walk(part),
    ];
    for &bytes in private_sizes.iter().chain(&sizes) {
        if !loops.contains(&walk_over(bytes)) {
            loops.push(walk_over(bytes));
        }
    }
    sampler.sample_rounds(&loops, ROUNDS)?;

    let loop_ns = measured_loop_ns(sampler, part);
    let mut private: Vec<LevelLatency> = Vec::new();
    for (index, (&(level, _), &bytes)) in part.private.iter().zip(&private_sizes).enumerate() {
        let latency = without_loop(sampler.time_of(walk_over(bytes)), loop_ns);
        let inner_ns = private.last().map_or(0.0, |inner| inner.ns.value);
        let inner_share = inner_bytes_of(index) as f64 / bytes as f64;
        let ns = scaled(latency, |ns| {
            ((ns - inner_share * inner_ns) / (1.0 - inner_share)).max(inner_ns)
        });
        private.push(LevelLatency { level, ns });
    }

    let private_ns = private.last().map_or(0.0, |last| last.ns.value);
    let largest_bytes = (part.shared_bytes as f64 * 1.1).min(sampler.buffer.bytes() as f64 / 2.0);
    let points_of = |is_used: &dyn Fn(usize, usize) -> bool| -> Vec<(u64, Estimate)> {
        let points = sizes.iter().map(|&bytes| {
            let step = sampler.time_in(walk_over(bytes), is_used);
            (bytes, without_loop(step, loop_ns))
        });
        points.collect()
    };
    let fit_points = |points: &[(u64, Estimate)]| {
        let values: Vec<(f64, f64)> = points
            .iter()
            .map(|(bytes, latency)| (*bytes as f64, latency.value))
            .collect();
        fit_latencies(&values, private_bytes as f64, private_ns, largest_bytes)
    };
    let points = points_of(&|_, _| true);
    let parts = (0..FITTED_PARTS).map(|part| points_of(&|number, _| number % FITTED_PARTS == part));
    Ok(Latencies {
        loop_ns,
        fit: fit_points(&points),
        private,
        fits: parts.filter_map(|points| fit_points(&points)).collect(),
        points,
        emptied_ns: measure_emptied(&sampler.buffer),
    })
}

/// Measures the time for lines that were removed from all caches: no share of hits needs to be assumed, which is never known
/// where others fill the shared cache too.
fn measure_emptied(buffer: &LineBuffer) -> Option<Estimate> {
    let bytes = EMPTIED_BYTES.min(buffer.bytes());
    let mut step_ns = Vec::new();
    for _ in 0..EMPTIED_ROUNDS {
        if !buffer.empty_caches(bytes) {
            return None;
        }
        step_ns.push(look_for_lines(buffer, bytes));
    }
    at_quantile(step_ns, LOWER_QUARTILE)
}

/// Bandwidth of streams on all of these CPUs at once; `None` with fewer than two, or if threads were kept from running in all
/// of [`STREAM_TRIES`] tries.
fn stream_together(
    cpus: &[CpuId],
    bytes: u64,
    is_write: bool,
) -> Result<Option<Estimate>, CalibrationError> {
    for _ in 0..STREAM_TRIES {
        if let Some(bandwidth) = stream_together_once(cpus, bytes, is_write)? {
            return Ok(Some(bandwidth));
        }
    }
    Ok(None)
}

/// One try of [`stream_together`].
fn stream_together_once(
    cpus: &[CpuId],
    bytes: u64,
    is_write: bool,
) -> Result<Option<Estimate>, CalibrationError> {
    if cpus.len() < 2 {
        return Ok(None);
    }
    let own_bytes = (bytes / cpus.len() as u64).max(16 << 20);
    let barrier = Barrier::new(cpus.len());
    let run_stream = |cpu: CpuId| -> io::Result<[f64; 3]> {
        let pinned = PinnedThread::new(cpu);
        let mut buffer = LineBuffer::new(own_bytes);
        let mut rates = [0.0; 3];
        for rate in &mut rates {
            barrier.wait();
            let (start, cpu_start) = (Instant::now(), thread_time_ns());
            let (mut next, mut lines) = (0, 0u64);
            while start.elapsed() < STREAM_TIME {
                next = if is_write {
                    buffer.write_all(next, STREAM_CHUNK_LINES)
                } else {
                    buffer.read_all(own_bytes, next, STREAM_CHUNK_LINES)
                };
                lines += STREAM_CHUNK_LINES as u64;
            }
            let elapsed_ns = start.elapsed().as_nanos() as f64;
            let running_ns = (thread_time_ns() - cpu_start) as f64;
            *rate = if running_ns < MIN_STREAMING_SHARE * elapsed_ns {
                f64::NAN
            } else {
                64e9 * lines as f64 / running_ns
            };
        }
        pinned.map(|_| rates)
    };
    let all_rates: Vec<io::Result<[f64; 3]>> = std::thread::scope(|scope| {
        let threads: Vec<_> = cpus
            .iter()
            .map(|&cpu| scope.spawn(move || run_stream(cpu)))
            .collect();
        let joined = threads.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("the stream's thread has ended")))
        });
        joined.collect()
    });
    let mut sums = [0.0; 3];
    for (cpu, rates) in cpus.iter().zip(all_rates) {
        let rates = rates.map_err(|error| CalibrationError::Pin(cpu.0, error))?;
        sums.iter_mut()
            .zip(rates)
            .for_each(|(sum, rate)| *sum += rate);
    }
    let complete_sums = sums.into_iter().filter(|sum| sum.is_finite()).collect();
    Ok(at_quantile(complete_sums, MEDIAN))
}

/// Share of the shown cache below which the owned part says that other systems decide what stays in it.
const OWNED_BY_OTHERS_SHARE: f64 = 0.5;

/// Whether other systems fill a shared cache of which this one owns a part.
pub fn is_filled_by_others(owned_bytes: f64, shown_bytes: u64) -> bool {
    owned_bytes < OWNED_BY_OTHERS_SHARE * shown_bytes as f64
}

/// Rounds of streams over parts of the shared cache.
const POOL_ROUNDS: usize = 11;

/// Measures the size from which on a stream over the same lines again and again misses the shared cache, with what
/// neighbors fill during a pass: [`analysis::pool_bytes`].
fn measure_pool(
    sampler: &mut Sampler,
    part: &MeasuredPart<'_>,
    lifetimes: SharedLifetimes,
) -> Result<Option<f64>, CalibrationError> {
    let SharedLifetimes {
        mean_ns: mean_lifetime_ns,
        lifetimes,
        ..
    } = lifetimes;
    let memory_line_ns = sampler.time_of(TimedLoop::Read).value;
    let largest_bytes = part.shared_bytes.min(sampler.buffer.bytes() / 2) as f64;
    let mut sizes = Vec::new();
    let mut bytes = 2.0 * part.private_bytes() as f64;
    // What takes far longer than a lifetime misses in any case.
    while bytes <= largest_bytes && bytes / 64.0 * memory_line_ns < 2.0 * mean_lifetime_ns {
        sizes.push(whole_pages(bytes as u64));
        bytes *= SIZE_RATIO;
    }
    let reread = |&bytes: &u64| TimedLoop::Reread { bytes };
    let loops: Vec<TimedLoop> = sizes.iter().map(reread).collect();
    sampler.sample_rounds(&loops, POOL_ROUNDS)?;
    let points: Vec<(f64, f64)> = sizes
        .iter()
        .map(|bytes| (*bytes as f64, sampler.time_of(reread(bytes)).value))
        .collect();
    let pool_bytes = analysis::pool_bytes(&points, memory_line_ns, lifetimes, mean_lifetime_ns);
    Ok(pool_bytes.map(|bytes| bytes.min(part.shared_bytes as f64)))
}

/// Pauses after which a walk looks for what is left of its lines, in µs.
const PAUSES_US: [u64; 7] = [100, 300, 1000, 3000, 10_000, 30_000, 100_000];
/// Number of times that each pause is made.
const PAUSE_ROUNDS: usize = 7;
/// Lines that are removed from all caches: more pages than a core keeps translations of, as in programs that miss.
const EMPTIED_BYTES: u64 = 64 << 20;
/// Number of times that they are.
const EMPTIED_ROUNDS: usize = 15;
/// Smallest ratio of half times that can be told from what a pass over the lines takes.
const MIN_PROBATION_SHARE: f64 = 0.02;
/// Share of the lines whose loss ends their lifetime.
const LOST_SHARE: f64 = 0.5;

/// Measures how long half of some lines stay in the largest private cache while this thread touches no memory; they move to
/// the shared one. `None` if they stay for longer than the longest pause.
fn measure_private_half_time(
    sampler: &mut Sampler,
    part: &MeasuredPart<'_>,
    latencies: &Latencies,
) -> Option<Estimate> {
    let lost_ns = latencies.fit?.cache_ns;
    let walk_bytes = part.private_bytes() / 2;
    let lines = walk_bytes / 64;
    // Of the first steps after a pause, most find a line for the first time.
    let steps = lines / 4;
    let mut step_ns_after = |pause: Duration| {
        sampler.seed += 1;
        let seed = sampler.seed;
        sampler.buffer.walk::<8>(walk_bytes, lines / 2, seed);
        compute_for(pause);
        let start = Instant::now();
        sampler.buffer.walk::<1>(walk_bytes, steps, seed + 1000);
        start.elapsed().as_nanos() as f64 / steps as f64 - latencies.loop_ns
    };
    let mut resident_ns = Vec::new();
    let mut paused_ns = vec![Vec::new(); PAUSES_US.len()];
    for _ in 0..PAUSE_ROUNDS {
        resident_ns.push(step_ns_after(Duration::ZERO));
        for (times, &pause_us) in paused_ns.iter_mut().zip(&PAUSES_US) {
            times.push(step_ns_after(Duration::from_micros(pause_us)));
        }
    }
    let resident_ns = at_quantile(resident_ns, LOWER_QUARTILE)?.value;
    half_time_ns(&PAUSES_US, paused_ns, [resident_ns, lost_ns])
}

/// Lets the core compute without touching memory.
fn compute_for(pause: Duration) {
    let start = Instant::now();
    while start.elapsed() < pause {
        multiply(1000);
    }
}

/// The time after which half of some lines had left, from the times of a load at each of their ages: that of a resident line at
/// first, and that of a lost one at last. `None` if they stay for longer.
fn half_time_ns(
    ages_us: &[u64],
    times_ns: Vec<Vec<f64>>,
    [resident_ns, lost_ns]: [f64; 2],
) -> Option<Estimate> {
    let span_ns = (lost_ns - resident_ns).max(1.0);
    let lost_shares = times_ns.into_iter().map(|times| {
        Some(scaled(at_quantile(times, MEDIAN)?, |ns| {
            (ns - resident_ns) / span_ns
        }))
    });
    let lost_shares = lost_shares.collect::<Option<Vec<Estimate>>>()?;
    analysis::half_time_ns(ages_us, &lost_shares, LOST_SHARE)
}

/// How lines of this system leave the shared cache while it touches none.
#[derive(Clone, Copy)]
struct SharedLifetimes {
    /// Time for a line that is resident.
    resident_ns: Estimate,
    /// Mean of lines that were touched again.
    mean_ns: f64,
    lifetimes: LineLifetimes,
}

/// Pauses after which a pass looks for lines that were touched once or again, in µs.
const LIFETIME_PAUSES_US: [u64; 7] = [0, 300, 1000, 3000, 10_000, 30_000, 100_000];
/// Number of times that each of these pauses is made.
const LIFETIME_ROUNDS: usize = 5;
/// Numbers of times that lines are touched: as lines that came back again and again, and as new lines.
const LINE_TOUCHES: [u32; 2] = [8, 1];

/// Measures how long lines stay in the shared cache that the private ones have pushed out: `None` if half of those that were
/// touched again stay for longer than the longest pause, as on a machine that the system has to itself. Where caches cannot be
/// emptied, no line is known to be new, and new ones count as others.
fn measure_shared_lifetimes(
    sampler: &Sampler,
    part: &MeasuredPart<'_>,
    memory_ns: f64,
) -> Option<SharedLifetimes> {
    let buffer = &sampler.buffer;
    // The lines that are looked for were pushed out of the private cache by those that came after them.
    let bytes = (4 * part.private_bytes()).next_power_of_two();
    if bytes > part.shared_bytes / 2 || bytes > buffer.bytes() {
        return None;
    }
    // The time for a line at each pause, and the ages of the lines then: those that are looked for came first in the last pass.
    let times_after = |touches: u32| {
        let (mut step_ns, mut pass_ns) = (vec![Vec::new(); LIFETIME_PAUSES_US.len()], Vec::new());
        for _ in 0..LIFETIME_ROUNDS {
            for (times, pause_us) in step_ns.iter_mut().zip(LIFETIME_PAUSES_US) {
                if !buffer.empty_caches(bytes) && touches == 1 {
                    return None;
                }
                let pause = Duration::from_micros(pause_us);
                times.push(step_ns_after(buffer, bytes, touches, pause, &mut pass_ns));
            }
        }
        let pass_us = (at_quantile(pass_ns, MEDIAN)?.value / 1e3) as u64;
        Some((
            step_ns,
            LIFETIME_PAUSES_US.map(|pause_us| pause_us + pass_us),
        ))
    };
    let [again, new] = LINE_TOUCHES.map(times_after);
    // Lines that were touched again and are looked for at once are resident.
    let resident_ns = at_quantile(again.as_ref()?.0[0].clone(), LOWER_QUARTILE)?;
    let half_time = |(step_ns, ages_us): (Vec<Vec<f64>>, [u64; LIFETIME_PAUSES_US.len()])| {
        Some(half_time_ns(&ages_us, step_ns, [resident_ns.value, memory_ns])?.value)
    };
    let again_ns = half_time(again?)?;
    let new_ns = new.and_then(half_time);
    let lifetimes = new_ns.map_or(LineLifetimes::new(1.0), |new_ns| {
        LineLifetimes::of_half_times((new_ns / again_ns).max(MIN_PROBATION_SHARE))
    });
    Some(SharedLifetimes {
        resident_ns,
        mean_ns: again_ns / lifetimes.half_time(),
        lifetimes,
    })
}

/// Touches lines in an order without neighbors, pauses, and returns the time for one of the first of them; adds the time of the
/// last pass.
fn step_ns_after(
    buffer: &LineBuffer,
    bytes: u64,
    touches: u32,
    pause: Duration,
    pass_ns: &mut Vec<f64>,
) -> f64 {
    let mut start = Instant::now();
    for _ in 0..touches {
        start = Instant::now();
        buffer.scatter::<false>(bytes, bytes / 64);
    }
    pass_ns.push(start.elapsed().as_nanos() as f64);

    compute_for(pause);
    look_for_lines(buffer, bytes)
}

/// Time for one of the first of some lines, each far from the one before it and dependent on it.
fn look_for_lines(buffer: &LineBuffer, bytes: u64) -> f64 {
    let steps = bytes / 64 / 16;
    let start = Instant::now();
    buffer.scatter::<true>(bytes, steps);
    start.elapsed().as_nanos() as f64 / steps as f64
}

/// Measures how much of a walk over half of what this system owns of the shared cache a stream on another CPU evicts, in a cache
/// of `cache_bytes` in which lines compete.
fn measure_insertion(
    sampler: &mut Sampler,
    part: &MeasuredPart<'_>,
    latencies: &Latencies,
    cache_bytes: f64,
    stream_cpu: CpuId,
) -> Result<Option<Estimate>, CalibrationError> {
    let Some(fit) = latencies.fit else {
        return Ok(None);
    };
    let private_bytes = part.private_bytes() as f64;
    let walk_bytes = (0.5 * fit.cache_bytes).max(1.25 * private_bytes);
    if walk_bytes > 0.9 * fit.cache_bytes {
        return Ok(None);
    }
    let walk_bytes = walk_bytes as u64;
    let buffer_bytes = sampler.buffer.bytes();
    let loops = [
        walk_over(latencies.memory_bytes(buffer_bytes)),
        walk_over(walk_bytes),
    ];
    let latencies_of = |sampler: &Sampler| {
        loops.map(|timed_loop| without_loop(sampler.time_of(timed_loop), latencies.loop_ns))
    };
    // What follows is compared within itself, because what other guests leave of the cache changes.
    let earlier_samples = std::mem::take(&mut sampler.samples);
    sampler.sample_rounds(&loops, STREAM_ROUNDS)?;
    let [memory_alone_ns, walk_alone_ns] = latencies_of(sampler);
    sampler.samples.clear();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let is_running = std::sync::atomic::AtomicBool::new(false);
    let run_stream_beside = || -> io::Result<f64> {
        let pinned = PinnedThread::new(stream_cpu);
        let own_buffer = LineBuffer::new(buffer_bytes);
        is_running.store(true, std::sync::atomic::Ordering::Relaxed);
        let (mut next, mut lines, start) = (0, 0u64, Instant::now());
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            next = own_buffer.read_all(buffer_bytes, next, STREAM_CHUNK_LINES);
            lines += STREAM_CHUNK_LINES as u64;
        }
        let rate = lines as f64 / start.elapsed().as_nanos() as f64;
        pinned.map(|_| rate)
    };
    let (sampled, stream_rate) = std::thread::scope(|scope| {
        let stream_thread = scope.spawn(run_stream_beside);
        while !is_running.load(std::sync::atomic::Ordering::Relaxed) && !stream_thread.is_finished()
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        let sampled = sampler.sample_rounds(&loops, STREAM_ROUNDS);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let stream_rate = stream_thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the stream has ended")));
        (sampled, stream_rate)
    });
    sampled?;
    let [memory_ns, walk_ns] = latencies_of(sampler);
    sampler.samples = earlier_samples;
    let stream_rate = stream_rate.map_err(|error| CalibrationError::Pin(stream_cpu.0, error))?;
    // The private cache holds its share of the walk in any case.
    let private_share = fit.private_bytes / walk_bytes as f64;
    let private_ns = latencies.private.last().map_or(0.0, |last| last.ns.value);
    let missed_share = |ns: f64, memory_ns: f64| {
        let shared_ns = (ns - private_share * private_ns) / (1.0 - private_share);
        (shared_ns - fit.cache_ns) / (memory_ns - fit.cache_ns).max(1.0)
    };
    let competing_at = |ns: f64, memory_ns: f64| {
        co_runner_lines_per_ns(&WalkBesideCoRunner {
            cache_lines: cache_bytes / 64.0,
            walk_lines: walk_bytes as f64 / 64.0,
            miss_share: missed_share(ns, memory_ns),
            walk_rate: (1.0 - private_share) / (ns + latencies.loop_ns),
        })
    };
    let neighbor_rate = competing_at(walk_alone_ns.value, memory_alone_ns.value);
    let insertion_at = |ns: f64| {
        ((competing_at(ns, memory_ns.value) - neighbor_rate) / stream_rate).clamp(0.0, 1.0)
    };
    Ok(Some(scaled(walk_ns, insertion_at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do quantiles and ranges follow the samples, is nothing measured without samples, and do bursts in a third of the
    /// samples leave a figure as it is?
    #[test]
    fn a_figure_is_a_quantile_with_its_middle_range() {
        let estimate = at_quantile((1..=11).map(f64::from).collect(), MEDIAN).unwrap();
        assert_eq!(
            (estimate.value, estimate.low, estimate.high),
            (6.0, 2.0, 10.0)
        );
        assert_eq!(at_quantile(Vec::new(), MEDIAN), None);
        let bursts = [vec![2.0; 10], vec![9.0; 5]].concat();
        assert_eq!(at_quantile(bursts, LOWER_QUARTILE).unwrap().value, 2.0);
        let inverse = scaled(estimate, |value| 1.0 / value);
        assert_eq!((inverse.low, inverse.high), (0.1, 0.5));
    }

    /// Is a host without a shared cache of known size refused before anything is measured?
    #[test]
    fn a_host_without_a_shared_cache_is_refused() {
        let error = measure_host(&Topology::default(), 1 << 30).unwrap_err();
        assert!(
            error.to_string().starts_with("caches: found 0 caches"),
            "{error}"
        );
    }

    /// Does a branch that nobody can predict cost more than one that is never taken?
    #[test]
    fn a_random_branch_costs_more_than_a_steady_one() {
        let mut sampler = Sampler::new(LineBuffer::new(1 << 20), 0);
        let branches = [true, false].map(|is_random| TimedLoop::Branch { is_random });
        let multiplications = [TimedLoop::Multiply];
        match sampler.sample_rounds(&[&branches[..], &multiplications].concat(), 5) {
            // Emulated processors predict nothing.
            Ok(()) => {
                let cost = measured_mispredict(&sampler);
                assert!(cost.low <= cost.value && cost.value < 1000.0, "{cost:?}");
            }
            Err(error) => assert!(matches!(error, CalibrationError::Busy(_)), "{error}"),
        }
    }

    /// Does a loop's time not depend on the number of steps, so that a sample is a rate?
    #[test]
    fn a_sample_is_a_rate() {
        let mut sampler = Sampler::new(LineBuffer::new(1 << 20), 0);
        let outcome = sampler.sample_rounds(&[walk_over(1 << 16)], 5);
        assert!(sampler.units[&walk_over(1 << 16)] > 1000);
        match outcome {
            Ok(()) => {
                let time = sampler.time_of(walk_over(1 << 16));
                assert!(time.value > 0.0 && time.low <= time.high);
            }
            Err(error) => assert!(matches!(error, CalibrationError::Busy(_)), "{error}"),
        }
    }
}
