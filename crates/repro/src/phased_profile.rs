//! Profiles a program for the interval machine: alone on the cycle-level machine, by phases, at several cache sizes.
//!
//! Method: the contended cache keeps its sets and loses ways. At every size the program runs the same instructions. Its
//! counts are read at regular moments, with linear interpolation between them. Phases are stretches with equal numbers
//! of instructions, so each phase is the same at all sizes. Three sizes are also run without prefetchers. Properties:
//! no co-runner; the same job, machine and lengths give the same profile.

use cachemate_core::{CacheLevel, CpuSet, Machine, MachineSpec, WindowLength};
use cachemate_interval::{PhasedProgram, PrivateLevel, ProgramPhase, SizePoint, UnprefetchedRates};
use cachemate_sim::machine::{RunLimit, SimOptions};
use cachemate_sim::results::TaskResults;
use serde::{Deserialize, Serialize};

use crate::error::{ReproError, failed};
use crate::run_request::{recordings_of, sources_of};
use crate::store::{self, RunName};
use crate::workload::{Workload, WorkloadJob};

/// The lengths of profiling runs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ProfilingLengths {
    /// Instructions from the start to the profile's end.
    pub until_instr: u64,
    /// Instructions of one phase.
    pub phase_instr: u64,
    /// Simulated cycles between two readings of the counts.
    pub reading_cycles: u64,
}

/// Maximum cycles per instruction; a run with a smaller cache that exceeds it is abandoned.
const MAX_CYCLES_PER_INSTR: u64 = 60;

/// Cumulative counts of a program at one moment, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct RunningSums {
    instructions: f64,
    /// Cycles, references, demand misses, read lines, written lines, stall cycles; then misses of the inner levels.
    sums: [f64; SUMS],
}
const SUMS: usize = 10;
const CYCLES: usize = 0;
const REFERENCES: usize = 1;
const MISSES: usize = 2;
const READ: usize = 3;
const WRITTEN: usize = 4;
const STALL: usize = 5;
const L1_REFERENCES: usize = 6;
const L1_MISSES: usize = 7;

/// Number of instructions that a job executes alone in this many cycles.
///
/// # Errors
/// The job cannot run, or executes nothing.
pub fn instructions_in(
    job: &WorkloadJob,
    machine: &MachineSpec,
    options: &SimOptions,
    cycles: u64,
) -> Result<u64, ReproError> {
    let pinned: CpuSet = [0].into_iter().collect();
    let jobs = vec![job.clone().with_cpus(pinned)];
    let (machine, options) = (machine.clone(), options.clone());
    let workload = Workload { machine, options, jobs, warm_up_cycles: 0, measured_cycles: cycles };
    let results = workload.unmanaged_run()?;
    let instr_done = results.tasks.first().map_or(0, |task| task.instructions);
    if instr_done == 0 { Err(failed(&job.name)("it ran no instruction alone")) } else { Ok(instr_done) }
}

/// The sizes, in ways of the contended cache: five, each about half of the previous one, and one more between each of
/// the three largest, because a program's working set often ends there.
pub fn profiled_ways(total_ways: u32) -> Vec<u32> {
    let halves = (0..5).map(|halvings| (total_ways >> halvings).max(1));
    let intermediate = [total_ways * 3 / 4, total_ways * 3 / 8].into_iter().filter(|&ways| ways > 0);
    let mut sizes: Vec<u32> = halves.chain(intermediate).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Measures the profile of a single-threaded job.
///
/// # Errors
/// The machine has no data cache, or the job cannot run or ends before the profile does.
pub fn measure_profile(
    job: &WorkloadJob,
    machine: &MachineSpec,
    options: &SimOptions,
    lengths: ProfilingLengths,
) -> Result<PhasedProgram, ReproError> {
    let last = machine.last_level().ok_or_else(|| failed(&machine.name)("no data cache to share"))?;
    let sizes = profiled_ways(last.ways);
    let way_bytes = last.size_bytes / u64::from(last.ways);
    let run_with_ways = |ways: u32, prefetch: bool| {
        let options = SimOptions { prefetch, ..options.clone() };
        Ok::<_, ReproError>(stretch_sums(
            &cumulative_counts(job, &narrow_machine(machine, ways), &options, lengths)?,
            lengths,
        ))
    };
    let aided: Vec<Vec<RunningSums>> = sizes.iter().map(|&ways| run_with_ways(ways, true)).collect::<Result<_, _>>()?;
    // Prefetchers are also disabled at the smallest size, a quarter and the whole cache.
    let quarter = sizes.partition_point(|&ways| ways < last.ways / 4);
    let bare_at = [0, quarter, sizes.len() - 1];
    let unprefetched: Vec<Vec<RunningSums>> = match machine.prefetchers.is_empty() {
        true => Vec::new(),
        false => bare_at.iter().map(|&at| run_with_ways(sizes[at], false)).collect::<Result<_, _>>()?,
    };
    let phases = aided.iter().map(Vec::len).min().unwrap_or(0);
    if phases == 0 {
        return Err(failed(&job.name)("it ended before its profile did"));
    }
    let measured_point = |phase: usize, at: usize| {
        let unaided = (!unprefetched.is_empty()).then(|| {
            let low = usize::from(at >= bare_at[1] && bare_at[1] < bare_at[2]);
            let (small, large) = (&unprefetched[low], &unprefetched[low + 1]);
            let doublings = |ways: u32| (f64::from(ways) / f64::from(sizes[bare_at[low]])).log2();
            let share = doublings(sizes[at]) / doublings(sizes[bare_at[low + 1]]).max(1e-9);
            interpolate(&small[phase.min(small.len() - 1)], &large[phase.min(large.len() - 1)], share)
        });
        size_point((u64::from(sizes[at]) * way_bytes) as f64, &aided[at][phase], unaided)
    };
    let phase = |number: usize| {
        let whole_cache = &aided[aided.len() - 1][number];
        let per_instr = |sum: usize| whole_cache.sums[sum] / whole_cache.instructions;
        ProgramPhase {
            instructions: Some(whole_cache.instructions),
            references_per_instr: per_instr(REFERENCES),
            points: (0..sizes.len()).map(|at| measured_point(number, at)).collect(),
            footprint_bytes: None,
            private_levels: vec![PrivateLevel {
                level: CacheLevel::L1Data,
                references_per_instr: per_instr(L1_REFERENCES),
                misses_per_instr: per_instr(L1_MISSES),
            }],
            sharing: Vec::new(),
            half_private_extra_cycles_per_instr: 0.0,
        }
    };
    Ok(PhasedProgram {
        name: job.name.clone(),
        phases: (0..phases).map(phase).collect(),
        // Beyond the measured part, the program repeats its last third, which contains no start-up.
        repeats_from: Some(phases as u32 * 2 / 3),
        demand: cachemate_interval::Demand::default(),
        progress_per_instr: None,
        from_empty_cache: true,
    })
}

fn interpolate(small: &RunningSums, large: &RunningSums, share: f64) -> RunningSums {
    let mut sums = RunningSums { instructions: 1.0, ..RunningSums::default() };
    for (sum, (low, high)) in sums.sums.iter_mut().zip(small.sums.iter().zip(&large.sums)) {
        *sum = low / small.instructions + share * (high / large.instructions - low / small.instructions);
    }
    sums
}

fn size_point(size_bytes: f64, aided: &RunningSums, unaided: Option<RunningSums>) -> SizePoint {
    let per_instr = |sums: &RunningSums, sum: usize| sums.sums[sum] / sums.instructions;
    let demand = per_instr(aided, MISSES).min(per_instr(aided, READ));
    SizePoint {
        size_bytes,
        cycles_per_instr: per_instr(aided, CYCLES),
        demand_fills_per_instr: demand,
        prefetch_fills_per_instr: per_instr(aided, READ) - demand,
        writebacks_per_instr: per_instr(aided, WRITTEN),
        memory_stall_cycles_per_instr: per_instr(aided, STALL),
        without_prefetch: unaided.map(|bare| UnprefetchedRates {
            cycles_per_instr: per_instr(&bare, CYCLES),
            demand_fills_per_instr: per_instr(&bare, READ),
            writebacks_per_instr: per_instr(&bare, WRITTEN),
            memory_stall_cycles_per_instr: per_instr(&bare, STALL),
        }),
    }
}

/// The machine with fewer ways but the same number of sets in its contended cache.
fn narrow_machine(machine: &MachineSpec, ways: u32) -> MachineSpec {
    let mut machine = machine.clone();
    let level = machine.last_level().map(|cache| cache.level);
    for cache in machine.caches.iter_mut().filter(|cache| Some(cache.level) == level) {
        cache.size_bytes = cache.size_bytes / u64::from(cache.ways) * u64::from(ways);
        cache.ways = ways;
        if cache.replacement == cachemate_core::ReplacementPolicy::TreePlru {
            cache.replacement = cachemate_core::ReplacementPolicy::Lru;
        }
        cache.way_partitions = None;
    }
    machine.pages.colors = None;
    machine
}

/// The cumulative counts at every reading, from the start on.
fn cumulative_counts(
    job: &WorkloadJob,
    machine: &MachineSpec,
    options: &SimOptions,
    lengths: ProfilingLengths,
) -> Result<Vec<RunningSums>, ReproError> {
    let pinned: CpuSet = [0].into_iter().collect();
    let workload = Workload {
        machine: machine.clone(),
        options: options.clone(),
        jobs: vec![job.clone().with_cpus(pinned)],
        warm_up_cycles: 0,
        measured_cycles: lengths.until_instr * MAX_CYCLES_PER_INSTR,
    };
    let recordings = recordings_of(&workload);
    let sources = sources_of(module_path!(), &recordings);
    let label = format!("books of {} on {}", job.name, machine.name);
    let inputs = format!("{workload:?} {lengths:?} {recordings:?}");
    let name = RunName { kind: "books", label, sources, inputs };
    store::find_or_make(name, || read_books(&workload, lengths))
}

fn read_books(workload: &Workload, lengths: ProfilingLengths) -> Result<Vec<RunningSums>, ReproError> {
    let (machine, options, job) = (&workload.machine, &workload.options, &workload.jobs[0]);
    let ends = Some(RunLimit::Cycles(workload.measured_cycles));
    let mut simulated = workload.build_machine_with(SimOptions { ends, warm_up: None, ..options.clone() })?;
    let window = lengths.reading_cycles * options.scale;
    simulated.set_first_window(WindowLength::Cycles { cycles: window });
    let line_bytes = machine.last_level().map_or(64, |cache| cache.line_bytes);
    let level = machine.last_level().map(|cache| cache.level);
    let mut readings = vec![RunningSums::default()];
    while simulated.observe().map_err(failed(&job.name))?.is_some() {
        let results = simulated.results();
        let Some(task) = results.tasks.first() else { continue };
        readings.push(running_sums(task, level, f64::from(line_bytes)));
        if task.instructions >= lengths.until_instr {
            break;
        }
    }
    Ok(readings)
}

fn running_sums(task: &TaskResults, last: Option<CacheLevel>, line_bytes: f64) -> RunningSums {
    let counts_of = |level: Option<CacheLevel>| task.levels.iter().find(|found| Some(found.level) == level);
    let mut totals = RunningSums { instructions: task.instructions as f64, ..RunningSums::default() };
    let sums = &mut totals.sums;
    sums[CYCLES] = task.cycles as f64;
    if let Some(level) = counts_of(last) {
        (sums[REFERENCES], sums[MISSES]) = (level.references as f64, level.misses as f64);
    }
    if let Some(level) = counts_of(Some(CacheLevel::L1Data)) {
        (sums[L1_REFERENCES], sums[L1_MISSES]) = (level.references as f64, level.misses as f64);
    }
    sums[READ] = task.memory_read_bytes as f64 / line_bytes;
    sums[WRITTEN] = task.memory_write_bytes as f64 / line_bytes;
    let stalls = &task.stall_cycles;
    sums[STALL] = stalls.local_memory + stalls.remote_memory + stalls.queue;
    totals
}

/// Counts in each stretch of equally many instructions, interpolated linearly between readings.
fn stretch_sums(readings: &[RunningSums], lengths: ProfilingLengths) -> Vec<RunningSums> {
    let mut sums_by_stretch = Vec::new();
    let (mut at, mut previous) = (1, RunningSums::default());
    let mut border = lengths.phase_instr as f64;
    while at < readings.len() {
        let (low, high) = (&readings[at - 1], &readings[at]);
        if high.instructions < border || high.instructions <= low.instructions {
            at += 1;
            continue;
        }
        let share = (border - low.instructions) / (high.instructions - low.instructions);
        let mut at_border = RunningSums { instructions: border, ..RunningSums::default() };
        for (sum, (low, high)) in at_border.sums.iter_mut().zip(low.sums.iter().zip(&high.sums)) {
            *sum = low + share * (high - low);
        }
        let mut difference = RunningSums { instructions: border - previous.instructions, ..RunningSums::default() };
        for (sum, (now, earlier)) in difference.sums.iter_mut().zip(at_border.sums.iter().zip(&previous.sums)) {
            *sum = now - earlier;
        }
        sums_by_stretch.push(difference);
        previous = at_border;
        border += lengths.phase_instr as f64;
    }
    sums_by_stretch
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are stretches cut at their instructions, also between readings?
    #[test]
    fn stretches_are_cut_at_their_instructions() {
        let sample_sums = |instructions: f64, cycles: f64| {
            let mut books = RunningSums { instructions, ..RunningSums::default() };
            books.sums[CYCLES] = cycles;
            books
        };
        let readings = [sample_sums(0.0, 0.0), sample_sums(150.0, 300.0), sample_sums(350.0, 400.0)];
        let lengths = ProfilingLengths { until_instr: 350, phase_instr: 100, reading_cycles: 1 };
        let cycles: Vec<f64> = stretch_sums(&readings, lengths).iter().map(|sums| sums.sums[CYCLES]).collect();
        assert_eq!(cycles, [200.0, 125.0, 50.0]);
    }

    /// Do sizes halve from the whole cache down, closer together near the top, and are there fewer if the cache has
    /// fewer ways?
    #[test]
    fn sizes_halve_from_the_whole_cache_down() {
        assert_eq!(profiled_ways(32), [2, 4, 8, 12, 16, 24, 32]);
        assert_eq!(profiled_ways(4), [1, 2, 3, 4]);
        assert_eq!(profiled_ways(12), [1, 3, 4, 6, 9, 12]);
        assert_eq!(profiled_ways(1), [1]);
    }
}
