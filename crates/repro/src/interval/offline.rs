//! Validates forecasts from recordings by comparing predicted slowdowns with the cycle-level machine.
//!
//! Method: recordings of real programs are timed by walks ([`cachemate_forecast::walked`]), as by `cachemate predict`. Pairs and
//! groups are drawn from the seed and run on the cycle-level machine over equal work, as by `cachemate attribute`;
//! these slowdowns are the truth. The work is whole rounds through each recording, as many as fit into a round of the
//! longest. A 90 % interval counts as right if it contains the
//! true slowdown. Properties: no co-run is an input of a
//! forecast; all drawn runs count.

use std::path::PathBuf;

use cachemate_core::{CpuId, SplitMix64, nearest_rank};
use serde::{Deserialize, Serialize};

use super::score::{MIN_RANKED_DIFFERENCE_POINTS, kendall_tau};
use crate::corun::{CoRunBench, ProgramRates, cpus_by_cache};
use crate::run_request;
use crate::setup::{WorkloadJob, failed};
use crate::work::InstructionRange;
use crate::{ExperimentContext, ReproError, mean};
use cachemate_forecast::{ForecastResult, TimedProgram, forecast_alone, forecast_together};

/// Two cores per cache behind a front-side bus, and four on a larger one.
pub const MACHINES: [&str; 2] = ["xeon-x5365-4", "opteron-2350"];

/// A forecast for one program in one run, with the truth.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct OfflineTask {
    /// Name of the machine.
    pub machine: String,
    /// The program.
    pub task: String,
    /// Its co-runners on the cache.
    pub beside: Vec<String>,
    /// Slowdown on the cycle-level machine, in percent of the solo time.
    pub measured_slowdown_percent: f64,
    /// Forecast slowdown, in percent of the solo time.
    pub predicted_slowdown_percent: f64,
    /// Lower end of the forecast's 90 % interval.
    pub low_percent: f64,
    /// Upper end of the forecast's 90 % interval.
    pub high_percent: f64,
    /// Parts of the error.
    pub causes: OfflineCauses,
}

/// An error, divided into parts that add up; in points of slowdown, predicted minus measured.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct OfflineCauses {
    /// Error of the number of additional misses, at the measured cost of a miss.
    pub composition: f64,
    /// The remainder: error of the cost of a miss, from overlap, bandwidth and prefetches.
    pub cost: f64,
}

/// Errors over all tasks.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct OfflineScore {
    /// Seed of the draw.
    pub seed: u64,
    /// Whether this is a quick validation, with fewer and shorter runs.
    pub quick: bool,
    /// Names of the recordings.
    pub programs: Vec<String>,
    /// Names of the machines.
    pub machines: Vec<String>,
    /// Number of runs, pairs and groups together.
    pub runs: usize,
    /// Mean absolute error of the predicted slowdowns.
    pub mean_absolute_error_points: f64,
    /// 90th percentile of the absolute error.
    pub p90_error_points: f64,
    /// Mean of predicted minus measured slowdown.
    pub mean_signed_error_points: f64,
    /// Mean absolute slowdown, which is the error of predicting no slowdown.
    pub error_of_predicting_nothing_points: f64,
    /// Rank correlation of predicted with measured slowdowns that differ by two points or more; `None` without such.
    pub kendall_tau: Option<f64>,
    /// Share of the 90 % intervals that contain the measured slowdown, in percent.
    pub coverage_percent: f64,
    /// Means over tasks of the absolute value of each part of the error.
    pub error_by_cause_points: OfflineCauses,
    /// Every forecast with its truth.
    pub tasks: Vec<OfflineTask>,
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

/// Predicts, measures and compares co-runs of `recordings`, given by name and file.
pub fn score_offline(
    context: &ExperimentContext<'_>,
    recordings: &[(String, PathBuf)],
) -> Result<OfflineScore, ReproError> {
    if recordings.len() < 2 {
        return Err(failed("recordings")(format!(
            "found {}, expected two or more",
            recordings.len()
        )));
    }
    let seed = context.seeds[0];
    let (pair_count, group_count) = context.pick((4, 1), (14, 5));
    let (mut tasks, mut run_count) = (Vec::new(), 0);
    for name in MACHINES {
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
        let timed_programs = context.run_all_in_process(&used_recordings, |&index| {
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
            run_count += 1;
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
                tasks.push(OfflineTask {
                    machine: name.to_string(),
                    task: recordings[set[index]].0.clone(),
                    beside: co_runners
                        .map(|(_, &position)| recordings[position].0.clone())
                        .collect(),
                    measured_slowdown_percent: 100.0 * measured_slowdown,
                    predicted_slowdown_percent: 100.0 * forecast.slowdown.value,
                    low_percent: 100.0 * forecast.slowdown.low,
                    high_percent: 100.0 * forecast.slowdown.high,
                    causes: OfflineCauses {
                        composition: composition_error,
                        cost: error_points - composition_error,
                    },
                });
            }
        }
    }
    let programs = recordings.iter().map(|(name, _)| name.clone()).collect();
    Ok(summarize_score(
        seed,
        context.quick,
        programs,
        run_count,
        tasks,
    ))
}

/// Returns the rates of each job alone and with the others, over whole rounds through its recording. Each begins to be
/// measured after a round of its own and a third of the longest one, in which the caches fill.
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

fn summarize_score(
    seed: u64,
    quick: bool,
    programs: Vec<String>,
    runs: usize,
    tasks: Vec<OfflineTask>,
) -> OfflineScore {
    let task_values =
        |value: &dyn Fn(&OfflineTask) -> f64| tasks.iter().map(value).collect::<Vec<f64>>();
    let signed_errors =
        task_values(&|task| task.predicted_slowdown_percent - task.measured_slowdown_percent);
    let absolute_errors: Vec<f64> = signed_errors.iter().map(|error| error.abs()).collect();
    let slowdown_pairs: Vec<(f64, f64)> = tasks
        .iter()
        .map(|task| {
            (
                task.measured_slowdown_percent,
                task.predicted_slowdown_percent,
            )
        })
        .collect();
    let is_within_bounds = |task: &&OfflineTask| {
        (task.low_percent..=task.high_percent).contains(&task.measured_slowdown_percent)
    };
    OfflineScore {
        seed,
        quick,
        programs,
        machines: MACHINES.iter().map(|name| name.to_string()).collect(),
        runs,
        mean_absolute_error_points: mean(&absolute_errors),
        p90_error_points: nearest_rank(&absolute_errors, 0.9).unwrap_or(0.0),
        mean_signed_error_points: mean(&signed_errors),
        error_of_predicting_nothing_points: mean(task_values(&|task| {
            task.measured_slowdown_percent.abs()
        })),
        kendall_tau: kendall_tau(&slowdown_pairs, MIN_RANKED_DIFFERENCE_POINTS),
        coverage_percent: 100.0 * tasks.iter().filter(is_within_bounds).count() as f64
            / tasks.len().max(1) as f64,
        error_by_cause_points: OfflineCauses {
            composition: mean(task_values(&|task| task.causes.composition.abs())),
            cost: mean(task_values(&|task| task.causes.cost.abs())),
        },
        tasks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_task(measured: f64, predicted: f64, margin: f64) -> OfflineTask {
        OfflineTask {
            machine: "m".to_string(),
            task: "a".to_string(),
            beside: vec!["b".to_string()],
            measured_slowdown_percent: measured,
            predicted_slowdown_percent: predicted,
            low_percent: predicted - margin,
            high_percent: predicted + margin,
            causes: OfflineCauses::default(),
        }
    }

    /// Do errors, ranks and coverage follow from the tasks?
    #[test]
    fn errors_ranks_and_coverage_follow_from_the_tasks() {
        let tasks = vec![
            sample_task(10.0, 12.0, 3.0),
            sample_task(20.0, 30.0, 5.0),
            sample_task(40.0, 38.0, 2.0),
            sample_task(0.0, -2.0, 1.0),
        ];
        let score = summarize_score(1, true, Vec::new(), 2, tasks);
        assert_eq!(
            (score.mean_absolute_error_points, score.p90_error_points),
            (4.0, 10.0)
        );
        assert_eq!(
            (score.mean_signed_error_points, score.coverage_percent),
            (2.0, 50.0)
        );
        assert_eq!(
            (score.kendall_tau, score.error_of_predicting_nothing_points),
            (Some(1.0), 17.5)
        );
    }

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
