//! Validates forecasts from recordings by comparing predicted slowdowns with the cycle-level machine.
//!
//! Method: recordings of real programs are timed by walks ([`cachemate_forecast::walked`]), as by `cachemate predict`.
//! Pairs and groups are drawn from the seed and run on the cycle-level machine over equal work, as by `cachemate repro
//! attribute`; these slowdowns are the truth. The work is whole rounds through each recording, as many as fit into a
//! round of the longest. A 90 % interval counts as right if it contains the true slowdown. Properties: no co-run is an
//! input of a forecast; all drawn runs count.

use std::path::PathBuf;

use cachemate_core::{CpuId, SplitMix64};
use cachemate_forecast::{ForecastResult, TimedProgram, forecast_alone, forecast_together};
use cachemate_trace::{CmtReader, TraceReader, bundled_recordings};

use super::score::TaskComparison;
use crate::corun::{CoRunBench, ProgramRates, cpus_by_cache};
use crate::run_request;
use crate::setup::{WorkloadJob, failed};
use crate::work::InstructionRange;
use crate::{ExperimentContext, ReproError};

/// Two cores per cache behind a front-side bus, and four on a larger one.
const MACHINES: [&str; 2] = ["xeon-x5365-4", "opteron-2350"];

/// The bundled recordings of one thread, by name; a program of several threads cannot be measured alone.
pub(crate) fn single_thread_recordings() -> Result<Vec<(String, PathBuf)>, ReproError> {
    let mut recordings = Vec::new();
    for (name, path) in bundled_recordings() {
        let reader = CmtReader::open(&path).map_err(failed(&name))?;
        let thread_count = reader.totals().map_or(0, |totals| totals.threads.len());
        if thread_count <= 1 {
            recordings.push((name, path));
        }
    }
    if recordings.len() < 2 {
        return Err(failed("recordings")(format!(
            "found {} of one thread, expected two or more",
            recordings.len()
        )));
    }
    Ok(recordings)
}

/// Runs on one machine, each as the positions of two or four recordings.
fn draw_run_members(
    generator: &mut SplitMix64,
    program_count: usize,
    pair_count: usize,
    group_count: usize,
    core_count: usize,
) -> Vec<Vec<usize>> {
    let mut all_groups: Vec<Vec<usize>> = (0..program_count)
        .flat_map(|a| (a + 1..program_count).map(move |b| vec![a, b]))
        .collect();
    generator.shuffle(&mut all_groups);

    all_groups.truncate(pair_count);
    for _ in 0..group_count {
        let mut order: Vec<usize> = (0..program_count).collect();
        generator.shuffle(&mut order);
        order.truncate(core_count);
        if order.len() > 2 {
            all_groups.push(order);
        }
    }
    all_groups
}

/// Predicts, measures and compares co-runs of the bundled recordings.
pub(super) fn compare_forecasts(
    context: &ExperimentContext<'_>,
) -> Result<Vec<Vec<TaskComparison>>, ReproError> {
    let recordings = single_thread_recordings()?;
    let seed = context.seeds[0];
    let (pair_count, group_count) = context.pick_by_length((1, 0), (4, 1), (14, 5));
    let machines = context.pick_by_length(&MACHINES[..1], &MACHINES[..], &MACHINES[..]);

    let mut runs = Vec::new();
    for &name in machines {
        let bench = CoRunBench::load(name, seed, 0, 0)?;
        let cpus = cpus_by_cache(&bench.machine.topology())?;
        let cpus = cpus
            .into_iter()
            .find(|cpus| cpus.len() > 1)
            .ok_or_else(|| failed(name)("no shared cache"))?;
        let mut generator = SplitMix64::new(seed ^ 0x0ff1);
        let program_sets = draw_run_members(
            &mut generator,
            recordings.len(),
            pair_count,
            if cpus.len() > 2 { group_count } else { 0 },
            cpus.len(),
        );
        let mut used_recordings: Vec<usize> = program_sets.iter().flatten().copied().collect();
        used_recordings.sort_unstable();
        used_recordings.dedup();
        let recorded_job = |index: usize| {
            WorkloadJob::from_recording(&recordings[index].0, recordings[index].1.clone(), seed)
        };
        let timed_programs = context.run_all(&used_recordings, |&index| {
            context.report_progress(&format!("{name}: {} alone", recordings[index].0));
            let (program, path) = &recordings[index];
            Ok(TimedProgram::from_recording(program, path, &bench.machine)?)
        })?;
        let solo_mpkis: Vec<f64> = timed_programs
            .iter()
            .map(|program| Ok(forecast_alone(&bench.machine, program)?.mpki))
            .collect::<ForecastResult<_>>()?;
        let timed_position = |index: usize| {
            used_recordings
                .iter()
                .position(|&used| used == index)
                .unwrap_or(0)
        };
        let timed_program_of = |index: usize| &timed_programs[timed_position(index)];
        let measured_rates = context.run_all(&program_sets, |set| {
            let names: Vec<&str> = set
                .iter()
                .map(|&index| recordings[index].0.as_str())
                .collect();
            context.report_progress(&format!("{name}: {} together", names.join(", ")));
            let jobs: Vec<(WorkloadJob, CpuId)> = set
                .iter()
                .map(|&index| recorded_job(index))
                .zip(cpus.iter().copied())
                .collect();
            let timed: Vec<&TimedProgram> =
                set.iter().map(|&index| timed_program_of(index)).collect();
            measure_truth(&bench, &jobs, &timed)
        })?;
        for (set, (solo_rates, co_run_rates)) in program_sets.iter().zip(measured_rates) {
            let mut tasks = Vec::new();
            let programs: Vec<&TimedProgram> =
                set.iter().map(|&index| timed_program_of(index)).collect();
            let forecasts = forecast_together(&bench.machine, &programs)?;
            for (index, forecast) in forecasts.iter().enumerate() {
                let co_runners = set
                    .iter()
                    .enumerate()
                    .filter(|(position, _)| *position != index);
                let measured_slowdown =
                    solo_rates[index].instr_per_cycle / co_run_rates[index].instr_per_cycle - 1.0;
                let error_points = 100.0 * (forecast.slowdown.value - measured_slowdown);
                let measured_added_mpki = co_run_rates[index].misses_per_kilo_instr
                    - solo_rates[index].misses_per_kilo_instr;
                let predicted_added_mpki = forecast.mpki - solo_mpkis[timed_position(set[index])];
                // Slowdown for each additional miss, as measured.
                let points_per_mpki = if measured_added_mpki > MIN_PRICED_MPKI {
                    100.0 * measured_slowdown / measured_added_mpki
                } else {
                    0.0
                };
                let composition_error =
                    (predicted_added_mpki - measured_added_mpki) * points_per_mpki;
                tasks.push(TaskComparison {
                    machine: name.to_string(),
                    program: recordings[set[index]].0.clone(),
                    beside: co_runners
                        .map(|(_, &position)| recordings[position].0.clone())
                        .collect(),
                    measured_percent: 100.0 * measured_slowdown,
                    predicted_percent: 100.0 * forecast.slowdown.value,
                    interval_percent: Some((
                        100.0 * forecast.slowdown.low,
                        100.0 * forecast.slowdown.high,
                    )),
                    cycles_per_instr_error_percent: None,
                    causes: vec![
                        ("composition", composition_error),
                        ("the cost of a miss", error_points - composition_error),
                    ],
                });
            }
            runs.push(tasks);
        }
    }
    Ok(runs)
}

/// The rates of each job alone and with the others, over whole rounds through its recording. Each
/// begins to be measured after a round of its own and a third of the longest one, in which the
/// caches fill.
fn measure_truth(
    bench: &CoRunBench,
    jobs: &[(WorkloadJob, CpuId)],
    programs: &[&TimedProgram],
) -> Result<(Vec<ProgramRates>, Vec<ProgramRates>), ReproError> {
    let no_round_error = || failed("recordings")("a program without rounds");
    let rounds: Vec<(f64, f64)> = programs
        .iter()
        .map(|program| program.solo_round().ok_or_else(no_round_error))
        .collect::<Result<_, _>>()?;
    let longest_round_cycles = rounds
        .iter()
        .fold(0.0f64, |longest, (_, cycles)| longest.max(*cycles));

    let work_in_rounds = |rounds_before: f64, rounds: f64, instructions: f64| InstructionRange {
        from_instr: rounds_before * instructions,
        to_instr: (rounds_before + rounds) * instructions,
    };
    let workload_of = |jobs: Vec<WorkloadJob>| {
        let mut workload = bench.build_workload(bench.options.clone(), jobs);
        workload.measured_cycles = (2.0 * longest_round_cycles) as u64;
        workload
    };

    let pin_job =
        |(job, cpu): &(WorkloadJob, CpuId)| job.clone().with_cpus([cpu.0].into_iter().collect());
    let solo_runs = jobs
        .iter()
        .zip(&rounds)
        .map(|(job, (instructions, cycles))| {
            let mut workload = workload_of(vec![pin_job(&(job.0.clone(), jobs[0].1))]);
            workload.measured_cycles = (2.0 * cycles) as u64;
            let run = run_request::joint_run(
                &workload,
                &[work_in_rounds(1.0, 1.0, *instructions)],
                None,
            )?;
            Ok(run.rates[0])
        });
    let solo_rates = solo_runs.collect::<Result<_, ReproError>>()?;

    let work_ranges = rounds.iter().map(|(instructions, cycles)| {
        let rounds_in_longest = longest_round_cycles / cycles;
        work_in_rounds(
            (rounds_in_longest / 3.0).max(1.0),
            libm::floor(rounds_in_longest),
            *instructions,
        )
    });
    let co_run = run_request::joint_run(
        &workload_of(jobs.iter().map(pin_job).collect()),
        &work_ranges.collect::<Vec<_>>(),
        None,
    )?;

    match jobs
        .iter()
        .zip(&co_run.rates)
        .find(|(_, rates)| !rates.finished)
    {
        None => Ok((solo_rates, co_run.rates)),
        Some(((job, _), _)) => Err(failed(&job.name)("it did not finish its work")),
    }
}

/// Minimum number of additional misses per thousand instructions from which the cost of one is computed.
const MIN_PRICED_MPKI: f64 = 0.05;

#[cfg(test)]
mod tests {
    use super::*;

    /// Are pairs different from one another, and groups made of different programs?
    #[test]
    fn runs_are_drawn_without_repetition() {
        let sets = draw_run_members(&mut SplitMix64::new(3), 5, 7, 2, 4);
        assert_eq!(sets.iter().filter(|set| set.len() == 2).count(), 7);
        assert_eq!(sets.iter().filter(|set| set.len() == 4).count(), 2);
        for (index, set) in sets.iter().enumerate() {
            let mut sorted = set.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), set.len());
            assert!(set.len() > 2 || !sets[..index].contains(set));
        }
    }
}
