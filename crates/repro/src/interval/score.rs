//! Predicted against measured slowdowns: errors by set, ranks, and the error of predicting no slowdown.

use std::collections::BTreeMap;

use cachemate_core::{MachineSpec, nearest_rank};
use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, Series};
use serde::Serialize;

use super::ValidationTruth;
use super::draw::{CoRun, CoRunKind, MachineTruth, ProfiledProgram, ProgramRate};
use super::predict;
use crate::setup::failed;
use crate::{ReproError, mean};

/// Minimum share of the bandwidth in use for a run to count as bandwidth-bound.
pub const BANDWIDTH_BOUND_SHARE: f64 = 0.7;
/// Slowdowns that differ by less than this on the cycle-level machine are not ranked: other page frames change each by about
/// as much, so their order is not a property of the programs.
pub(super) const MIN_RANKED_DIFFERENCE_POINTS: f64 = 2.0;

/// One task of one run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TaskComparison {
    /// Name as in [`super::draw::MachineSetup::machine`].
    pub machine: String,
    /// Name of its program.
    pub task: String,
    /// Programs of its co-runners.
    pub beside: Vec<String>,
    /// Slowdown in percent of the solo time.
    pub measured_slowdown_percent: f64,
    /// Predicted cycles per instruction relative to the measured solo ones, minus one.
    pub predicted_slowdown_percent: f64,
    /// Predicted cycles per instruction relative to the measured ones, minus one.
    pub cycles_per_instr_error_percent: f64,
    /// See [`CoRun::busy_share`].
    pub busy_share: f64,
    /// Causes of the error.
    pub causes: ErrorCauses,
}

/// A task's error divided into parts that add up, each in points of its slowdown, predicted minus measured.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct ErrorCauses {
    /// Error of the profile: the program's solo speed over this work differs from it.
    pub profile: f64,
    /// Error of the misses, at the cost that a miss has between the profile's smallest and largest size.
    pub composition: f64,
    /// Error of the queueing cycles beyond the solo ones.
    pub bandwidth: f64,
    /// The remainder: overlap of misses, prefetches and queues with work.
    pub overlap: f64,
}

/// Errors over one set of co-runs; `None` if the set is empty.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ErrorSummary {
    /// Number of runs (not tasks).
    pub count: usize,
    /// Mean absolute error of predicted slowdowns, over all tasks.
    pub mean_absolute_error_points: Option<f64>,
    /// 90th percentile of the absolute error of predicted slowdowns.
    pub p90_error_points: Option<f64>,
    /// Rank correlation of predicted with measured slowdowns: over all tasks, or, for plans, over those of one mix.
    pub kendall_tau: Option<f64>,
    /// Mean absolute slowdown: the error of a forecast that no program slows down.
    pub error_of_predicting_nothing_points: Option<f64>,
    /// Mean error of cycles per instruction.
    pub mean_error_percent: Option<f64>,
    /// 90th percentile of the absolute error of cycles per instruction.
    pub p90_error_percent: Option<f64>,
    /// Mean of predicted minus measured slowdown.
    pub mean_signed_error_points: Option<f64>,
    /// Share of the runs in which a program loses 10 % or more.
    pub runs_losing_10_percent: Option<f64>,
    /// Means of the absolute parts of the error.
    pub error_by_cause_points: Option<ErrorCauses>,
}

/// Comparison of predictions with measurements.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ValidationScore {
    /// Seed of the draw.
    pub seed: u64,
    /// Summaries by the names of [`SETS`].
    pub sets: BTreeMap<String, ErrorSummary>,
    /// The tasks of each set.
    pub tasks: BTreeMap<String, Vec<TaskComparison>>,
}

/// The names of all sets.
pub const SETS: [&str; 4] = ["pairs", "groups", "bandwidth-bound", "plans"];

/// Predicts all measured runs, and compares.
///
/// # Errors
/// The machine is unknown, or a prediction fails.
pub fn score(truth: &ValidationTruth) -> Result<ValidationScore, ReproError> {
    let mut comparisons_by_set: BTreeMap<String, Vec<Vec<TaskComparison>>> = SETS
        .iter()
        .map(|name| (name.to_string(), Vec::new()))
        .collect();
    let mut mix_slowdowns: Vec<Vec<(f64, f64)>> = Vec::new();
    for bench in &truth.benches {
        let machine =
            cachemate_spec::load_machine(&bench.machine).map_err(failed(&bench.machine))?;
        let predicted_solo_rates = measure_solo_rates(&machine, bench)?;
        let mut slowdowns_by_mix: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
        for run in bench.runs.iter().filter(|run| run.finished) {
            let rates = predict::predict_rates(&machine, &bench.programs, run)?;
            let comparison = compare_run(bench, run, &rates, &predicted_solo_rates);
            if let CoRunKind::Plan(mix) = run.kind {
                let mean_over_tasks =
                    |value: fn(&TaskComparison) -> f64| mean(comparison.iter().map(value));
                let mean_slowdown_pair = (
                    mean_over_tasks(|task| task.measured_slowdown_percent),
                    mean_over_tasks(|task| task.predicted_slowdown_percent),
                );
                slowdowns_by_mix
                    .entry(mix)
                    .or_default()
                    .push(mean_slowdown_pair);
            }
            comparisons_by_set
                .entry(set_name(run).to_string())
                .or_default()
                .push(comparison);
        }
        mix_slowdowns.extend(slowdowns_by_mix.into_values());
    }
    let mut summaries: BTreeMap<String, ErrorSummary> = comparisons_by_set
        .iter()
        .map(|(name, runs)| (name.clone(), summarize_runs(runs)))
        .collect();
    if let Some(plans) = summaries.get_mut("plans") {
        plans.kendall_tau = tau_within_mixes(&mix_slowdowns);
    }
    let tasks_by_set = comparisons_by_set
        .into_iter()
        .map(|(name, runs)| (name, runs.into_iter().flatten().collect()))
        .collect();
    Ok(ValidationScore {
        seed: truth.seed,
        sets: summaries,
        tasks: tasks_by_set,
    })
}

/// Returns the interval machine's forecast of each program alone over its work.
fn measure_solo_rates(
    machine: &MachineSpec,
    bench: &MachineTruth,
) -> Result<Vec<ProgramRate>, ReproError> {
    let run_alone = |program: usize| CoRun {
        kind: CoRunKind::Pair,
        jobs: vec![(program, 0)],
        ways: Vec::new(),
        busy_share: 0.0,
        rates: Vec::new(),
        finished: true,
    };
    let solo_rate = |program: usize| {
        Ok(predict::predict_rates(machine, &bench.programs, &run_alone(program))?[0])
    };
    (0..bench.programs.len()).map(solo_rate).collect()
}

/// Returns the name of a run's set. Plans form one set, so that they can be ranked; of the other runs, those that are
/// bandwidth-bound form a separate set.
fn set_name(run: &CoRun) -> &'static str {
    match run.kind {
        CoRunKind::Plan(_) => "plans",
        _ if run.busy_share >= BANDWIDTH_BOUND_SHARE => "bandwidth-bound",
        CoRunKind::Pair => "pairs",
        CoRunKind::Four => "groups",
    }
}

fn compare_run(
    bench: &MachineTruth,
    run: &CoRun,
    predicted_rates: &[ProgramRate],
    predicted_solo_rates: &[ProgramRate],
) -> Vec<TaskComparison> {
    let program_name = |&(program, _): &(usize, u32)| bench.programs[program].name.clone();
    let compare_task = |index: usize| {
        let program = run.jobs[index].0;
        let (measured_rate, predicted_rate) = (&run.rates[index], &predicted_rates[index]);
        let profiled_program = &bench.programs[program];
        let slowdown_percent = |rate: &ProgramRate| {
            100.0 * (profiled_program.alone.instr_per_cycle / rate.instr_per_cycle - 1.0)
        };
        let co_runners = run
            .jobs
            .iter()
            .enumerate()
            .filter(|(position, _)| *position != index);
        TaskComparison {
            machine: bench.machine.clone(),
            task: program_name(&run.jobs[index]),
            beside: co_runners.map(|(_, job)| program_name(job)).collect(),
            measured_slowdown_percent: slowdown_percent(measured_rate),
            predicted_slowdown_percent: slowdown_percent(predicted_rate),
            cycles_per_instr_error_percent: 100.0
                * (measured_rate.instr_per_cycle / predicted_rate.instr_per_cycle - 1.0),
            busy_share: run.busy_share,
            causes: attribute_error(
                profiled_program,
                &predicted_solo_rates[program],
                measured_rate,
                predicted_rate,
            ),
        }
    };
    (0..run.jobs.len()).map(compare_task).collect()
}

/// Returns the parts of one error, computed in cycles per instruction and divided by the solo cycles per instruction.
fn attribute_error(
    profiled: &ProfiledProgram,
    predicted_solo: &ProgramRate,
    measured_rate: &ProgramRate,
    predicted_rate: &ProgramRate,
) -> ErrorCauses {
    let cycles_per_instr = |rate: &ProgramRate| 1.0 / rate.instr_per_cycle;
    let profile_error = cycles_per_instr(predicted_solo) - cycles_per_instr(&profiled.alone);
    let composition_error = (predicted_rate.misses_per_instr - measured_rate.misses_per_instr)
        * cycles_per_added_miss(profiled);
    let measured_added_queueing =
        measured_rate.queue_cycles_per_instr - profiled.alone.queue_cycles_per_instr;
    let bandwidth_error = predicted_rate.queue_cycles_per_instr
        - predicted_solo.queue_cycles_per_instr
        - measured_added_queueing;
    let total_error = cycles_per_instr(predicted_rate) - cycles_per_instr(measured_rate);
    let points_per_cycle = 100.0 * profiled.alone.instr_per_cycle;
    ErrorCauses {
        profile: points_per_cycle * profile_error,
        composition: points_per_cycle * composition_error,
        bandwidth: points_per_cycle * bandwidth_error,
        overlap: points_per_cycle
            * (total_error - profile_error - composition_error - bandwidth_error),
    }
}

/// Returns the cost of an additional miss in cycles, between the smallest and the largest size of the profile's phases.
fn cycles_per_added_miss(profiled: &ProfiledProgram) -> f64 {
    let (mut added_cycles, mut added_misses) = (0.0, 0.0);
    for phase in &profiled.profile.phases {
        if let (Some(smallest_point), Some(largest_point)) =
            (phase.points.first(), phase.points.last())
        {
            added_cycles += smallest_point.cycles_per_instr - largest_point.cycles_per_instr;
            added_misses +=
                smallest_point.demand_fills_per_instr - largest_point.demand_fills_per_instr;
        }
    }
    if added_misses > 1e-9 {
        (added_cycles / added_misses).max(0.0)
    } else {
        0.0
    }
}

fn summarize_runs(runs: &[Vec<TaskComparison>]) -> ErrorSummary {
    let tasks: Vec<&TaskComparison> = runs.iter().flatten().collect();
    if tasks.is_empty() {
        return ErrorSummary::default();
    }
    let signed_error =
        |task: &&TaskComparison| task.predicted_slowdown_percent - task.measured_slowdown_percent;
    let absolute_errors: Vec<f64> = tasks.iter().map(|task| signed_error(task).abs()).collect();
    let relative_errors: Vec<f64> = tasks
        .iter()
        .map(|task| task.cycles_per_instr_error_percent.abs())
        .collect();
    let mean_over_tasks =
        |value: &dyn Fn(&TaskComparison) -> f64| mean(tasks.iter().map(|task| value(task)));
    let slowdown_pairs: Vec<(f64, f64)> = tasks
        .iter()
        .map(|task| {
            (
                task.measured_slowdown_percent,
                task.predicted_slowdown_percent,
            )
        })
        .collect();
    let losing_runs = runs.iter().filter(|run| {
        run.iter()
            .any(|task| task.measured_slowdown_percent >= 10.0)
    });
    ErrorSummary {
        count: runs.len(),
        mean_absolute_error_points: Some(mean(&absolute_errors)),
        p90_error_points: nearest_rank(&absolute_errors, 0.9),
        kendall_tau: kendall_tau(&slowdown_pairs, 0.0),
        error_of_predicting_nothing_points: Some(mean_over_tasks(&|task| {
            task.measured_slowdown_percent.abs()
        })),
        mean_error_percent: Some(mean(&relative_errors)),
        p90_error_percent: nearest_rank(&relative_errors, 0.9),
        mean_signed_error_points: Some(mean(tasks.iter().map(signed_error))),
        runs_losing_10_percent: Some(losing_runs.count() as f64 / runs.len() as f64),
        error_by_cause_points: Some(ErrorCauses {
            profile: mean_over_tasks(&|task| task.causes.profile.abs()),
            composition: mean_over_tasks(&|task| task.causes.composition.abs()),
            bandwidth: mean_over_tasks(&|task| task.causes.bandwidth.abs()),
            overlap: mean_over_tasks(&|task| task.causes.overlap.abs()),
        }),
    }
}

/// Returns the chart of predicted against measured slowdowns, with a color per set and the line of zero error.
pub fn score_chart(score: &ValidationScore) -> Chart {
    let compared_tasks = || score.tasks.values().flatten();
    let slowdown_values = compared_tasks().flat_map(|task| {
        [
            task.measured_slowdown_percent,
            task.predicted_slowdown_percent,
        ]
    });
    let (lowest_percent, highest_percent) = slowdown_values
        .fold((0.0f64, 1.0f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    let point = |task: &TaskComparison| ChartPoint {
        title: Some(format!(
            "{} beside {} on {}",
            task.task,
            task.beside.join(", "),
            task.machine
        )),
        ..ChartPoint::new(
            task.measured_slowdown_percent,
            task.predicted_slowdown_percent,
        )
    };
    let mut series = vec![Series {
        name: "no error".to_string(),
        points: vec![
            ChartPoint::new(lowest_percent, lowest_percent),
            ChartPoint::new(highest_percent, highest_percent),
        ],
        is_dashed: true,
        ..Series::default()
    }];
    for (name, tasks) in &score.tasks {
        let points = tasks.iter().map(point).collect();
        series.push(Series {
            name: name.clone(),
            points,
            mark: Mark::Points,
            ..Series::default()
        });
    }
    Chart {
        title: format!("Slowdown of each task, seed {}", score.seed),
        x: Axis::linear("measured on the cycle-level machine, %")
            .with_range(lowest_percent, highest_percent),
        y: Axis::linear("predicted by the interval machine, %")
            .with_range(lowest_percent, highest_percent),
        series,
        size: Some((720.0, 560.0)),
        ..Chart::default()
    }
}

/// Returns Kendall's rank correlation over pairs whose first values differ by at least `min_difference`; `None` without
/// such pairs.
pub(super) fn kendall_tau(value_pairs: &[(f64, f64)], min_difference: f64) -> Option<f64> {
    let (agreeing_count, pair_count) = count_agreeing_pairs(value_pairs, min_difference);
    (pair_count > 0).then(|| (2 * agreeing_count - pair_count) as f64 / pair_count as f64)
}

fn count_agreeing_pairs(value_pairs: &[(f64, f64)], min_difference: f64) -> (i64, i64) {
    let (mut agreeing_count, mut pair_count) = (0, 0);
    for (index, first_pair) in value_pairs.iter().enumerate() {
        for second_pair in &value_pairs[index + 1..] {
            if (first_pair.0 - second_pair.0).abs() > min_difference {
                pair_count += 1;
                agreeing_count += i64::from(
                    (first_pair.0 - second_pair.0) * (first_pair.1 - second_pair.1) > 0.0,
                );
            }
        }
    }
    (agreeing_count, pair_count)
}

/// Returns Kendall's rank correlation over pairs of plans of one mix only.
fn tau_within_mixes(mixes: &[Vec<(f64, f64)>]) -> Option<f64> {
    let (mut agreeing_count, mut pair_count) = (0, 0);
    for mix in mixes {
        let mix_counts = count_agreeing_pairs(mix, MIN_RANKED_DIFFERENCE_POINTS);
        (agreeing_count, pair_count) = (agreeing_count + mix_counts.0, pair_count + mix_counts.1);
    }
    (pair_count > 0).then(|| (2 * agreeing_count - pair_count) as f64 / pair_count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is tau 1 for the same order, -1 for the reverse, and undefined for plans that hardly differ?
    #[test]
    fn tau_is_1_for_the_same_order_and_minus_1_for_the_reverse() {
        assert_eq!(
            kendall_tau(&[(1.0, 10.0), (2.0, 20.0), (3.0, 21.0)], 0.0),
            Some(1.0)
        );
        assert_eq!(kendall_tau(&[(1.0, 3.0), (2.0, 2.0)], 0.0), Some(-1.0));
        assert_eq!(tau_within_mixes(&[vec![(1.0, 3.0), (2.0, 2.0)]]), None);
        assert_eq!(
            tau_within_mixes(&[vec![(1.0, 3.0), (9.0, 4.0)], vec![(1.0, 3.0), (9.0, 2.0)]]),
            Some(0.0)
        );
    }
}
