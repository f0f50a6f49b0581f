//! Profiles a program for the interval machine: alone on the cycle-level machine, by phases, at several cache sizes.
//!
//! Method: the contended cache keeps its sets and loses ways. The smallest size is no larger than a private cache, so
//! that nothing is extrapolated for a program that has lost its lines; that cache keeps its ways and loses sets. At
//! every size the program runs the same instructions. Its counts are read at regular moments, with linear interpolation
//! between them. Phases are stretches with equal numbers of instructions, so each phase is the same at all sizes. Four
//! sizes are also run without prefetchers. Properties: no co-runner; the same job, machine and lengths give the same
//! profile.

use cachemate_core::{CacheLevel, CacheSpec, CpuSet, Machine, MachineSpec, WindowLength};
use cachemate_interval::{PhasedProgram, PrivateLevel, ProgramPhase, SizePoint, UnprefetchedRates};
use cachemate_sim::machine::{RunLimit, SimOptions};
use cachemate_sim::results::TaskResults;
use serde::{Deserialize, Serialize};

use crate::error::{ReproError, Result, failed};
use crate::run_request::{recordings_of, sources_of};
use crate::store::{self, RunName};
use crate::workload::{Workload, WorkloadJob};

/// The lengths of profiling runs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
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

impl RunningSums {
    /// The sums of both, combined one by one.
    fn combined_with(
        &self,
        other: &RunningSums,
        instructions: f64,
        combine: impl Fn(f64, f64) -> f64,
    ) -> RunningSums {
        RunningSums {
            instructions,
            sums: std::array::from_fn(|index| combine(self.sums[index], other.sums[index])),
        }
    }
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

/// The number of instructions that a job executes alone in this many cycles.
///
/// # Errors
/// The job cannot run, or executes nothing.
pub fn count_instructions_in(
    job: &WorkloadJob,
    machine: &MachineSpec,
    options: &SimOptions,
    cycles: u64,
) -> Result<u64> {
    let first_cpu: CpuSet = [0].into_iter().collect();
    let jobs = vec![job.clone().with_cpus(first_cpu)];
    let (machine, options) = (machine.clone(), options.clone());
    let workload = Workload {
        machine,
        options,
        jobs,
        warm_up_cycles: 0,
        measured_cycles: cycles,
    };
    let results = workload.unmanaged_run()?;
    let executed_instr = results.tasks.first().map_or(0, |task| task.instructions);

    if executed_instr == 0 {
        Err(failed(&job.name)("it ran no instruction alone"))
    } else {
        Ok(executed_instr)
    }
}

/// A part of the contended cache.
#[derive(Clone, Copy, PartialEq, Debug)]
struct ProfiledSize {
    ways: u32,
    /// Quotient of the cache's number of sets and the part's.
    set_divisor: u64,
}

impl ProfiledSize {
    fn bytes(self, cache: &CacheSpec) -> u64 {
        cache.size_bytes / u64::from(cache.ways) * u64::from(self.ways) / self.set_divisor
    }
}

/// The sizes in ascending order: five, each about half of the previous one, and one more between
/// each of the three largest, because a program's working set often ends there. If the smallest of
/// them is larger than a private cache, one of at most that size follows, with all ways.
fn profiled_sizes(cache: &CacheSpec, private_bytes: u64) -> Vec<ProfiledSize> {
    let halved_ways = (0..5).map(|halvings| (cache.ways >> halvings).max(1));
    let intermediate_ways = [cache.ways * 3 / 4, cache.ways * 3 / 8]
        .into_iter()
        .filter(|&ways| ways > 0);
    let mut way_counts: Vec<u32> = halved_ways.chain(intermediate_ways).collect();
    way_counts.sort_unstable();
    way_counts.dedup();
    let mut sizes: Vec<ProfiledSize> = way_counts
        .into_iter()
        .map(|ways| ProfiledSize {
            ways,
            set_divisor: 1,
        })
        .collect();

    let halved_sets = (1..=cache.sets_per_slice().ilog2()).map(|halvings| 1u64 << halvings);
    let few_sets = halved_sets
        .filter(|divisor| cache.sets_per_slice().is_multiple_of(*divisor))
        .map(|set_divisor| ProfiledSize {
            ways: cache.ways,
            set_divisor,
        })
        .find(|size| size.bytes(cache) <= private_bytes);
    if let Some(size) = few_sets.filter(|_| sizes[0].bytes(cache) > private_bytes) {
        sizes.insert(0, size);
    }
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
) -> Result<PhasedProgram> {
    let last_level = machine
        .last_level_cache()
        .ok_or_else(|| failed(&machine.name)("no data cache to share"))?;
    let sizes = profiled_sizes(last_level, machine.private_bytes());
    let run_with_size = |size: ProfiledSize, prefetch: bool| {
        let options = SimOptions {
            prefetch,
            ..options.clone()
        };
        Ok::<_, ReproError>(divide_into_stretches(
            &measure_cumulative_counts(job, &machine_with_size(machine, size), &options, lengths)?,
            lengths,
        ))
    };
    let prefetched_sums: Vec<Vec<RunningSums>> = sizes
        .iter()
        .map(|&size| run_with_size(size, true))
        .collect::<Result<_, _>>()?;

    // Prefetchers are also disabled at the smallest sizes, a quarter and the whole cache.
    let is_unprefetched = |index: usize| {
        let is_quarter =
            |size: &ProfiledSize| size.set_divisor == 1 && size.ways >= last_level.ways / 4;
        let has_few_sets = |size: &ProfiledSize| size.set_divisor > 1;
        index == 0
            || index + 1 == sizes.len()
            || has_few_sets(&sizes[index - 1])
            || is_quarter(&sizes[index]) && !is_quarter(&sizes[index - 1])
    };
    let unprefetched_sums: Vec<(usize, Vec<RunningSums>)> = (0..sizes.len())
        .filter(|&index| !machine.prefetchers.is_empty() && is_unprefetched(index))
        .map(|index| Ok::<_, ReproError>((index, run_with_size(sizes[index], false)?)))
        .collect::<Result<_, _>>()?;
    let phase_count = prefetched_sums.iter().map(Vec::len).min().unwrap_or(0);
    if phase_count == 0 {
        return Err(failed(&job.name)("it ended before its profile did"));
    }
    let bytes_at = |index: usize| sizes[index].bytes(last_level) as f64;

    let measured_point = |phase: usize, size_index: usize| {
        let upper = unprefetched_sums.partition_point(|&(index, _)| index < size_index);
        let unprefetched_point = unprefetched_sums
            .get(upper)
            .map(|(larger_index, larger_sums)| {
                let (smaller_index, smaller_sums) = &unprefetched_sums[upper.saturating_sub(1)];
                let doublings_to =
                    |index: usize| (bytes_at(index) / bytes_at(*smaller_index)).log2();
                interpolate_sums(
                    &smaller_sums[phase.min(smaller_sums.len() - 1)],
                    &larger_sums[phase.min(larger_sums.len() - 1)],
                    if upper == 0 {
                        1.0
                    } else {
                        doublings_to(size_index) / doublings_to(*larger_index)
                    },
                )
            });
        size_point(
            bytes_at(size_index),
            &prefetched_sums[size_index][phase],
            unprefetched_point,
        )
    };

    let build_phase = |phase_index: usize| {
        let full_size_sums = &prefetched_sums[prefetched_sums.len() - 1][phase_index];
        let per_instr =
            |sum_index: usize| full_size_sums.sums[sum_index] / full_size_sums.instructions;
        ProgramPhase {
            instructions: Some(full_size_sums.instructions),
            references_per_instr: per_instr(REFERENCES),
            points: (0..sizes.len())
                .map(|at| measured_point(phase_index, at))
                .collect(),
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
        phases: (0..phase_count).map(build_phase).collect(),
        // Beyond the measured part, the program repeats its last third, which contains no start-up.
        repeats_from: Some(phase_count as u32 * 2 / 3),
        demand: cachemate_interval::Demand::default(),
        progress_per_instr: None,
        from_empty_cache: true,
    })
}

fn interpolate_sums(
    smaller_sums: &RunningSums,
    larger_sums: &RunningSums,
    share: f64,
) -> RunningSums {
    smaller_sums.combined_with(larger_sums, 1.0, |low, high| {
        low / smaller_sums.instructions
            + share * (high / larger_sums.instructions - low / smaller_sums.instructions)
    })
}

fn size_point(
    size_bytes: f64,
    prefetched_sums: &RunningSums,
    unprefetched_sums: Option<RunningSums>,
) -> SizePoint {
    let per_instr = |sums: &RunningSums, sum_index: usize| sums.sums[sum_index] / sums.instructions;
    let demand_misses = per_instr(prefetched_sums, MISSES).min(per_instr(prefetched_sums, READ));

    SizePoint {
        size_bytes,
        cycles_per_instr: per_instr(prefetched_sums, CYCLES),
        demand_fills_per_instr: demand_misses,
        prefetch_fills_per_instr: per_instr(prefetched_sums, READ) - demand_misses,
        writebacks_per_instr: per_instr(prefetched_sums, WRITTEN),
        memory_stall_cycles_per_instr: per_instr(prefetched_sums, STALL),
        without_prefetch: unprefetched_sums.map(|unprefetched| UnprefetchedRates {
            cycles_per_instr: per_instr(&unprefetched, CYCLES),
            demand_fills_per_instr: per_instr(&unprefetched, READ),
            writebacks_per_instr: per_instr(&unprefetched, WRITTEN),
            memory_stall_cycles_per_instr: per_instr(&unprefetched, STALL),
        }),
    }
}

fn machine_with_size(machine: &MachineSpec, size: ProfiledSize) -> MachineSpec {
    let mut machine = machine.clone();
    let level = machine.last_level_cache().map(|cache| cache.level);
    for cache in machine
        .caches
        .iter_mut()
        .filter(|cache| Some(cache.level) == level)
    {
        cache.size_bytes = size.bytes(cache);
        cache.ways = size.ways;
        if cache.replacement == cachemate_core::ReplacementPolicy::TreePlru {
            cache.replacement = cachemate_core::ReplacementPolicy::Lru;
        }
        cache.way_partitions = None;
    }
    machine.pages.colors = None;
    machine
}

/// The cumulative counts at every reading, from the start on.
fn measure_cumulative_counts(
    job: &WorkloadJob,
    machine: &MachineSpec,
    options: &SimOptions,
    lengths: ProfilingLengths,
) -> Result<Vec<RunningSums>> {
    let first_cpu: CpuSet = [0].into_iter().collect();
    let workload = Workload {
        machine: machine.clone(),
        options: options.clone(),
        jobs: vec![job.clone().with_cpus(first_cpu)],
        warm_up_cycles: 0,
        measured_cycles: lengths.until_instr * MAX_CYCLES_PER_INSTR,
    };
    let recordings = recordings_of(&workload);
    let source_digest = sources_of(module_path!(), &recordings);

    let label = format!("books of {} on {}", job.name, machine.name);
    let inputs = (&workload, lengths, recordings);
    let name = RunName::new("books", label, source_digest, &inputs)?;
    store::find_or_make(name, || run_and_sample_counts(&workload, lengths))
}

fn run_and_sample_counts(
    workload: &Workload,
    lengths: ProfilingLengths,
) -> Result<Vec<RunningSums>> {
    let (machine, options, job) = (&workload.machine, &workload.options, &workload.jobs[0]);
    let run_limit = Some(RunLimit::Cycles(workload.measured_cycles));
    let mut sim_machine = workload.build_machine_with(SimOptions {
        ends: run_limit,
        warm_up: None,
        ..options.clone()
    })?;
    let nominal_window_cycles = lengths.reading_cycles * options.scale;
    sim_machine.set_first_window(WindowLength::Cycles {
        cycles: nominal_window_cycles,
    });

    let line_bytes = machine
        .last_level_cache()
        .map_or(64, |cache| cache.line_bytes);
    let level = machine.last_level_cache().map(|cache| cache.level);
    let mut readings = vec![RunningSums::default()];
    while sim_machine.observe().map_err(failed(&job.name))?.is_some() {
        let results = sim_machine.collect_results();
        let Some(task) = results.tasks.first() else {
            continue;
        };
        readings.push(running_sums(task, level, f64::from(line_bytes)));
        if task.instructions >= lengths.until_instr {
            break;
        }
    }
    Ok(readings)
}

fn running_sums(
    task: &TaskResults,
    last_level: Option<CacheLevel>,
    line_bytes: f64,
) -> RunningSums {
    let level_counts =
        |level: Option<CacheLevel>| task.levels.iter().find(|found| Some(found.level) == level);
    let mut totals = RunningSums {
        instructions: task.instructions as f64,
        ..RunningSums::default()
    };
    let sums = &mut totals.sums;
    sums[CYCLES] = task.cycles as f64;
    if let Some(level) = level_counts(last_level) {
        (sums[REFERENCES], sums[MISSES]) = (level.references as f64, level.misses as f64);
    }

    if let Some(level) = level_counts(Some(CacheLevel::L1Data)) {
        (sums[L1_REFERENCES], sums[L1_MISSES]) = (level.references as f64, level.misses as f64);
    }
    sums[READ] = task.memory_read_bytes as f64 / line_bytes;
    sums[WRITTEN] = task.memory_write_bytes as f64 / line_bytes;
    let stalls = &task.stall_cycles;
    sums[STALL] = stalls.local_memory + stalls.remote_memory + stalls.queue;
    totals
}

/// Counts in each stretch of equally many instructions, interpolated linearly between readings.
fn divide_into_stretches(readings: &[RunningSums], lengths: ProfilingLengths) -> Vec<RunningSums> {
    let mut sums_by_stretch = Vec::new();
    let (mut reading_index, mut stretch_start) = (1, RunningSums::default());
    let mut stretch_end_instr = lengths.phase_instr as f64;

    while reading_index < readings.len() {
        let (earlier_reading, later_reading) =
            (&readings[reading_index - 1], &readings[reading_index]);
        if later_reading.instructions < stretch_end_instr
            || later_reading.instructions <= earlier_reading.instructions
        {
            reading_index += 1;
            continue;
        }

        let share = (stretch_end_instr - earlier_reading.instructions)
            / (later_reading.instructions - earlier_reading.instructions);
        let sums_at_end =
            earlier_reading.combined_with(later_reading, stretch_end_instr, |low, high| {
                low + share * (high - low)
            });

        sums_by_stretch.push(sums_at_end.combined_with(
            &stretch_start,
            stretch_end_instr - stretch_start.instructions,
            |end, start| end - start,
        ));
        stretch_start = sums_at_end;
        stretch_end_instr += lengths.phase_instr as f64;
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
            let mut books = RunningSums {
                instructions,
                ..RunningSums::default()
            };
            books.sums[CYCLES] = cycles;
            books
        };
        let readings = [
            sample_sums(0.0, 0.0),
            sample_sums(150.0, 300.0),
            sample_sums(350.0, 400.0),
        ];

        let lengths = ProfilingLengths {
            until_instr: 350,
            phase_instr: 100,
            reading_cycles: 1,
        };
        let cycles: Vec<f64> = divide_into_stretches(&readings, lengths)
            .iter()
            .map(|sums| sums.sums[CYCLES])
            .collect();
        assert_eq!(cycles, [200.0, 125.0, 50.0]);
    }

    /// Do sizes halve from the whole cache down to a way, closer together near the top, and is the last one no larger
    /// than a private cache?
    #[test]
    fn sizes_halve_down_to_a_private_cache() {
        let mut cache = cachemate_spec::load_machine("power5-2x2x2")
            .unwrap()
            .caches
            .remove(2);
        let mut ways_and_divisors = |ways: u32, private_bytes: u64| -> Vec<(u32, u64)> {
            (cache.ways, cache.size_bytes) = (ways, u64::from(ways) * 3 * 512 * 128);
            profiled_sizes(&cache, private_bytes)
                .iter()
                .map(|size| (size.ways, size.set_divisor))
                .collect()
        };
        let whole_sets =
            |ways: &[u32]| -> Vec<(u32, u64)> { ways.iter().map(|&ways| (ways, 1)).collect() };
        assert_eq!(
            ways_and_divisors(32, 400_000),
            whole_sets(&[2, 4, 8, 12, 16, 24, 32])
        );
        assert_eq!(
            ways_and_divisors(10, 32_768),
            [vec![(10, 64)], whole_sets(&[1, 2, 3, 5, 7, 10])].concat()
        );
        assert_eq!(ways_and_divisors(1, 65_536), [(1, 4), (1, 1)]);
        assert_eq!(ways_and_divisors(1, 1), [(1, 1)], "no size is that small");
    }

    /// Is a program with hardly any lines as fast on the interval machine as with so small a cache on the cycle-level
    /// machine, with prefetchers and without?
    #[test]
    fn a_program_with_few_lines_is_as_fast_as_with_a_tiny_cache() {
        let chip = "power5-2x2x2?packages=1&memory.nodes=1&contexts_per_core=1&memory.size=2G";
        let mut machine = cachemate_spec::load_machine(chip).unwrap();
        machine.caches.retain(|cache| cache.level != CacheLevel::L3);
        let tiny_size = ProfiledSize {
            ways: 10,
            set_divisor: 128,
        };

        let lengths = ProfilingLengths {
            until_instr: 400_000,
            phase_instr: 200_000,
            reading_cycles: 50_000,
        };
        let options = SimOptions {
            is_resident: true,
            ..SimOptions::default()
        };

        for name in ["art", "swim"] {
            let job = WorkloadJob::new(name, 1);
            let profile = measure_profile(&job, &machine, &options, lengths).unwrap();
            let readings = measure_cumulative_counts(
                &job,
                &machine_with_size(&machine, tiny_size),
                &options,
                lengths,
            )
            .unwrap();
            let measured_sums = divide_into_stretches(&readings, lengths)[1];
            let phase = ProgramPhase {
                instructions: None,
                ..profile.phases[1].clone()
            };
            let mut engine =
                cachemate_interval::engine::IntervalEngine::new(&machine, false).unwrap();
            let program =
                engine.add_program(PhasedProgram::endless_program(name.to_string(), phase));
            let slot = engine.start_task(program, [0].into_iter().collect());
            let lines = engine.capacity_lines() / 128.0;
            engine.divide(0, &[(lines, 0)], &[lines], vec![(slot, 0)]);
            engine.run(2e6);
            let speed = engine.task_totals(slot).instructions / 2e6;
            let measured_speed = measured_sums.instructions / measured_sums.sums[CYCLES];
            assert!(
                (speed / measured_speed - 1.0).abs() < 0.1,
                "{name}: {speed}, measured {measured_speed}"
            );
        }
    }
}
