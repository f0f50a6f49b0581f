//! Predicted against measured slowdowns: errors by set, ranks, and the error of predicting no slowdown.

use std::collections::BTreeMap;

use cachemate_core::{MachineSpec, nearest_rank};
use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, Series};

use super::draw::{CoRun, CoRunKind, MachineTruth, ProfiledProgram, ProgramRate, build_co_run};
use super::predict;
use crate::setup::load_machine;
use crate::{DataPoint, ReproError, mean};

/// Minimum share of the bandwidth in use for a run to count as bandwidth-bound.
const BANDWIDTH_BOUND_SHARE: f64 = 0.7;
/// Slowdowns that differ by less than this on the cycle-level machine are not ranked: other page frames change each by
/// about as much, so their order is not a property of the programs.
const MIN_RANKED_DIFFERENCE_POINTS: f64 = 2.0;

/// One task of one run; slowdowns are in percent of the solo time.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct TaskComparison {
    pub(super) machine: String,
    pub(super) program: String,
    /// Programs of its co-runners.
    pub(super) beside: Vec<String>,
    pub(super) measured_percent: f64,
    pub(super) predicted_percent: f64,
    /// Ends of the 90 % interval of the prediction, if it has one.
    pub(super) interval_percent: Option<(f64, f64)>,
    /// Predicted cycles per instruction relative to the measured ones, minus one; `None` if they are not compared.
    pub(super) cycles_per_instr_error_percent: Option<f64>,
    /// The error divided into parts that add up, each in points of the slowdown, predicted minus measured.
    pub(super) causes: Vec<(&'static str, f64)>,
}

impl TaskComparison {
    /// Predicted minus measured.
    fn error_points(&self) -> f64 {
        self.predicted_percent - self.measured_percent
    }
}

/// Errors over one set of co-runs; a value without evidence is `None`.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct ErrorSummary {
    /// Mean absolute error of predicted slowdowns, over all tasks.
    pub(super) mean_error_points: Option<f64>,
    /// 90th percentile of the absolute error of predicted slowdowns.
    pub(super) p90_error_points: Option<f64>,
    /// Rank correlation of predicted with measured slowdowns: over all tasks, or, for plans, over those of one mix.
    pub(super) kendall_tau: Option<f64>,
    /// Mean absolute slowdown: the error of a forecast that no program slows down.
    pub(super) error_of_predicting_nothing_points: Option<f64>,
    /// Mean absolute error of cycles per instruction.
    pub(super) mean_cycles_error_percent: Option<f64>,
    /// Share of the 90 % intervals that contain the measured slowdown.
    pub(super) coverage_percent: Option<f64>,
    /// The remaining figures by name.
    others: Vec<(String, Option<f64>)>,
}

impl ErrorSummary {
    pub(super) fn new(runs: &[Vec<TaskComparison>]) -> Self {
        let tasks: Vec<&TaskComparison> = runs.iter().flatten().collect();
        let Some(first_task) = tasks.first() else {
            return ErrorSummary::default();
        };
        let errors: Vec<f64> = tasks.iter().map(|task| task.error_points().abs()).collect();
        let cycle_errors: Vec<f64> = tasks
            .iter()
            .filter_map(|task| Some(task.cycles_per_instr_error_percent?.abs()))
            .collect();
        let slowdown_pairs: Vec<(f64, f64)> = tasks
            .iter()
            .map(|task| (task.measured_percent, task.predicted_percent))
            .collect();
        let coverage: Vec<f64> = tasks
            .iter()
            .filter_map(|task| {
                let (low, high) = task.interval_percent?;
                let is_covered = (low..=high).contains(&task.measured_percent);
                Some(if is_covered { 100.0 } else { 0.0 })
            })
            .collect();
        let is_losing = |task: &TaskComparison| task.measured_percent >= 10.0;
        let losing_count = runs.iter().filter(|run| run.iter().any(is_losing)).count();

        let mut others = vec![
            ("runs".to_string(), Some(runs.len() as f64)),
            (
                "runs that lose 10 %, %".to_string(),
                Some(100.0 * losing_count as f64 / runs.len() as f64),
            ),
            (
                "mean signed error, points".to_string(),
                Some(mean(tasks.iter().map(|task| task.error_points()))),
            ),
            (
                "90th percentile of the error of cycles, %".to_string(),
                nearest_rank(&cycle_errors, 0.9),
            ),
        ];
        for (index, (cause, _)) in first_task.causes.iter().enumerate() {
            let part = mean(tasks.iter().map(|task| task.causes[index].1.abs()));
            others.push((format!("error by {cause}, points"), Some(part)));
        }
        let mean_of_any = |values: &[f64]| (!values.is_empty()).then(|| mean(values));
        ErrorSummary {
            mean_error_points: Some(mean(&errors)),
            p90_error_points: nearest_rank(&errors, 0.9),
            kendall_tau: kendall_tau(&[slowdown_pairs]),
            error_of_predicting_nothing_points: Some(mean(
                tasks.iter().map(|task| task.measured_percent.abs()),
            )),
            mean_cycles_error_percent: mean_of_any(&cycle_errors),
            coverage_percent: mean_of_any(&coverage),
            others,
        }
    }

    /// All figures as points of this series.
    pub(super) fn points(&self, set: &str) -> Vec<DataPoint> {
        let named = [
            ("mean error, points", self.mean_error_points),
            ("90th percentile, points", self.p90_error_points),
            ("Kendall's tau", self.kendall_tau),
            (
                "error of predicting nothing, points",
                self.error_of_predicting_nothing_points,
            ),
            ("mean error of cycles, %", self.mean_cycles_error_percent),
            ("90 % intervals that hold, %", self.coverage_percent),
        ];
        let named = named.map(|(name, value)| (name.to_string(), value));
        named
            .iter()
            .chain(&self.others)
            .map(|(name, value)| DataPoint::from_values(set, name, *value))
            .collect()
    }
}

/// Comparison of the interval machine's predictions with measurements.
pub(super) struct ValidationScore {
    /// The runs by set: `pairs`, `groups`, `bandwidth-bound`, `plans`.
    pub(super) sets: BTreeMap<&'static str, Vec<Vec<TaskComparison>>>,
    /// Rank correlation over the plans of one mix.
    pub(super) plans_tau: Option<f64>,
}

/// Predicts all measured runs, and compares.
///
/// # Errors
/// The machine is unknown, or a prediction fails.
pub(super) fn score(truths: &[MachineTruth]) -> Result<ValidationScore, ReproError> {
    let mut sets: BTreeMap<&'static str, Vec<Vec<TaskComparison>>> = BTreeMap::new();
    let mut mix_slowdowns: Vec<Vec<(f64, f64)>> = Vec::new();
    for truth in truths {
        let machine = load_machine(&truth.machine)?;
        let predicted_solo_rates = measure_solo_rates(&machine, truth)?;
        let mut slowdowns_by_mix: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
        for run in truth.runs.iter().filter(|run| run.finished) {
            let rates = predict::predict_rates(&machine, &truth.programs, run)?;
            let comparison = compare_run(truth, run, &rates, &predicted_solo_rates);
            if let CoRunKind::Plan(mix) = run.kind {
                slowdowns_by_mix.entry(mix).or_default().push((
                    mean(comparison.iter().map(|task| task.measured_percent)),
                    mean(comparison.iter().map(|task| task.predicted_percent)),
                ));
            }
            sets.entry(set_name(run)).or_default().push(comparison);
        }
        mix_slowdowns.extend(slowdowns_by_mix.into_values());
    }

    Ok(ValidationScore {
        sets,
        plans_tau: kendall_tau(&mix_slowdowns),
    })
}

/// The interval machine's forecast of each program alone over its work.
fn measure_solo_rates(
    machine: &MachineSpec,
    truth: &MachineTruth,
) -> Result<Vec<ProgramRate>, ReproError> {
    let run_alone = |program: usize| build_co_run(CoRunKind::Pair, vec![(program, 0)], Vec::new());
    let solo_rate = |program: usize| {
        Ok(predict::predict_rates(machine, &truth.programs, &run_alone(program))?[0])
    };
    (0..truth.programs.len()).map(solo_rate).collect()
}

/// The name of a run's set. Plans form one set, so that they can be ranked; of the other runs,
/// those that are bandwidth-bound form a separate set.
fn set_name(run: &CoRun) -> &'static str {
    match run.kind {
        CoRunKind::Plan(_) => "plans",
        _ if run.busy_share >= BANDWIDTH_BOUND_SHARE => "bandwidth-bound",
        CoRunKind::Pair => "pairs",
        CoRunKind::Four => "groups",
    }
}

fn compare_run(
    truth: &MachineTruth,
    run: &CoRun,
    predicted_rates: &[ProgramRate],
    predicted_solo_rates: &[ProgramRate],
) -> Vec<TaskComparison> {
    let program_name = |&(program, _): &(usize, u32)| truth.programs[program].name.clone();
    let compare_task = |index: usize| {
        let program = run.jobs[index].0;
        let (measured_rate, predicted_rate) = (&run.rates[index], &predicted_rates[index]);
        let profiled_program = &truth.programs[program];
        let slowdown_percent = |rate: &ProgramRate| {
            100.0 * (profiled_program.alone.instr_per_cycle / rate.instr_per_cycle - 1.0)
        };
        let co_runners = run
            .jobs
            .iter()
            .enumerate()
            .filter(|(position, _)| *position != index);

        TaskComparison {
            machine: truth.machine.clone(),
            program: program_name(&run.jobs[index]),
            beside: co_runners.map(|(_, job)| program_name(job)).collect(),
            measured_percent: slowdown_percent(measured_rate),
            predicted_percent: slowdown_percent(predicted_rate),
            interval_percent: None,
            cycles_per_instr_error_percent: Some(
                100.0 * (measured_rate.instr_per_cycle / predicted_rate.instr_per_cycle - 1.0),
            ),
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

/// The parts of one error, computed in cycles per instruction and divided by the solo cycles per
/// instruction: the profile's solo speed; misses, at the cost that a miss has between the profile's
/// smallest and largest size; queueing beyond that alone; and the remainder, the overlap of misses,
/// prefetches and queues with work.
fn attribute_error(
    profiled: &ProfiledProgram,
    predicted_solo: &ProgramRate,
    measured_rate: &ProgramRate,
    predicted_rate: &ProgramRate,
) -> Vec<(&'static str, f64)> {
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
    let overlap_error = total_error - profile_error - composition_error - bandwidth_error;
    vec![
        ("profile", points_per_cycle * profile_error),
        ("composition", points_per_cycle * composition_error),
        ("bandwidth", points_per_cycle * bandwidth_error),
        ("overlap", points_per_cycle * overlap_error),
    ]
}

/// The cost of an additional miss in cycles, between the smallest and the largest size of the
/// profile's phases.
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

/// The chart of predicted against measured slowdowns, with a color per set and the line of zero
/// error.
pub(super) fn score_chart(score: &ValidationScore) -> Chart {
    let (mut lowest_percent, mut highest_percent) = (0.0f64, 1.0f64);
    for task in score.sets.values().flatten().flatten() {
        lowest_percent = lowest_percent.min(task.measured_percent.min(task.predicted_percent));
        highest_percent = highest_percent.max(task.measured_percent.max(task.predicted_percent));
    }

    let point = |task: &TaskComparison| ChartPoint {
        title: Some(format!(
            "{} beside {} on {}",
            task.program,
            task.beside.join(", "),
            task.machine
        )),
        ..ChartPoint::new(task.measured_percent, task.predicted_percent)
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
    for (name, runs) in &score.sets {
        let points = runs.iter().flatten().map(point).collect();
        series.push(Series {
            name: name.to_string(),
            points,
            mark: Mark::Points,
            ..Series::default()
        });
    }

    Chart {
        title: "Slowdown of each task".to_string(),
        x: Axis::linear("measured on the cycle-level machine, %")
            .with_range(lowest_percent, highest_percent),
        y: Axis::linear("predicted by the interval machine, %")
            .with_range(lowest_percent, highest_percent),
        series,
        size: Some((720.0, 560.0)),
        ..Chart::default()
    }
}

/// Kendall's rank correlation over pairs of one mix whose first values differ enough; `None`
/// without such pairs.
fn kendall_tau(mixes: &[Vec<(f64, f64)>]) -> Option<f64> {
    let (mut agreeing_count, mut pair_count) = (0, 0);
    for mix in mixes {
        for (index, first) in mix.iter().enumerate() {
            for second in &mix[index + 1..] {
                let measured_difference = first.0 - second.0;
                if measured_difference.abs() > MIN_RANKED_DIFFERENCE_POINTS {
                    pair_count += 1;
                    let agrees = measured_difference * (first.1 - second.1) > 0.0;
                    agreeing_count += i64::from(agrees);
                }
            }
        }
    }
    (pair_count > 0).then(|| (2 * agreeing_count - pair_count) as f64 / pair_count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is tau 1 for the same order, -1 for the reverse, and undefined for plans that hardly differ?
    #[test]
    fn tau_is_1_for_the_same_order_and_minus_1_for_the_reverse() {
        let (same, reverse) = (vec![(1.0, 3.0), (9.0, 4.0)], vec![(1.0, 3.0), (9.0, 2.0)]);
        let close = vec![(1.0, 3.0), (2.0, 2.0)];
        let mixes = [same, reverse, close];
        assert_eq!(kendall_tau(&mixes[..1]), Some(1.0));
        assert_eq!(kendall_tau(&mixes[1..2]), Some(-1.0));
        assert_eq!(kendall_tau(&mixes[2..]), None);
        assert_eq!(kendall_tau(&mixes), Some(0.0));
    }

    /// Do errors, ranks and coverage follow from the tasks, and is what was not compared absent?
    #[test]
    fn errors_ranks_and_coverage_follow_from_the_tasks() {
        let task = |measured: f64, predicted: f64, margin: f64| TaskComparison {
            measured_percent: measured,
            predicted_percent: predicted,
            interval_percent: Some((predicted - margin, predicted + margin)),
            causes: vec![("composition", predicted - measured)],
            ..TaskComparison::default()
        };
        let runs = [
            vec![task(10.0, 12.0, 3.0), task(0.0, 1.0, 0.5)],
            vec![task(30.0, 27.0, 4.0), task(4.0, 4.0, 1.0)],
        ];
        let summary = ErrorSummary::new(&runs);
        assert_eq!(
            (summary.mean_error_points, summary.p90_error_points),
            (Some(1.5), Some(3.0))
        );
        assert_eq!(
            (summary.kendall_tau, summary.coverage_percent),
            (Some(1.0), Some(75.0))
        );
        assert_eq!(
            (
                summary.error_of_predicting_nothing_points,
                summary.mean_cycles_error_percent
            ),
            (Some(11.0), None)
        );
        let points = summary.points("pairs");
        let value_of = |at: &str| points.iter().find(|point| point.at == at).unwrap().value;
        assert_eq!(value_of("runs that lose 10 %, %"), Some(100.0));
        assert_eq!(value_of("error by composition, points"), Some(1.5));
        assert_eq!(value_of("mean error of cycles, %"), None);
        assert_eq!(ErrorSummary::new(&[]), ErrorSummary::default());
    }
}
