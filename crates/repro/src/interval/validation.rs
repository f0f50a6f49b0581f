//! VALIDATION-1 and -2: how well do the interval machine, and the forecasts that `predict` makes of recordings, agree
//! with the cycle-level machine?
//!
//! Method: programs are profiled alone. Co-runs and plans are drawn at random from the seed and run on the cycle-level
//! machine; they are predicted from the profiles alone. No parameter is fitted to a co-run, and all drawn runs count.

use super::offline::compare_forecasts;
use super::score::{ErrorSummary, score, score_chart};
use super::{draw, speed};
use crate::experiment::ResultFigure;
use crate::{DataPoint, ExperimentContext, Finding, Result};

/// Compares the interval machine with the cycle-level machine, and measures its speed.
pub(super) fn run_machine(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let seed = context.seeds[0];
    let mut truths = Vec::new();
    for setup in draw::setups(context) {
        truths.push(draw::measure(context, &setup, seed)?);
    }
    let score = score(&truths)?;
    let summary_of = |set: &str| {
        let runs = score.sets.get(set).map_or(&[][..], |runs| runs);
        ErrorSummary::new(runs)
    };
    let [pairs, groups, bound, plans] =
        ["pairs", "groups", "bandwidth-bound", "plans"].map(summary_of);
    let finding = |name: &str, value: Option<f64>| {
        let values: Vec<(u64, f64)> = value.map(|value| (seed, value)).into_iter().collect();
        Finding::declared(name, &values)
    };

    let ratio_to_nothing = pairs
        .mean_error_points
        .zip(pairs.error_of_predicting_nothing_points)
        .map(|(error, nothing)| error / nothing);
    let nominal_seconds = context.pick_by_length(2.0, 60.0, 60.0);
    let times_averaged = speed::times_real_time(false, 10.0, nominal_seconds)?;
    let times_explicit = speed::times_real_time(true, 10.0, nominal_seconds / 6.0)?;
    let times_phase_a_second = speed::times_real_time(false, 1.0, nominal_seconds)?;
    let speed_points = [
        ("averaged time slices, a phase each 10 s", times_averaged),
        (
            "averaged time slices, a phase each second",
            times_phase_a_second,
        ),
        ("each time slice of 10 ms", times_explicit),
    ]
    .map(|(case, times)| DataPoint::from_values("times real time", case, [times]));
    Ok(vec![
        finding("validation-1-pairs", pairs.mean_error_points)
            .with_points(pairs.points("pairs"))
            .with_figure(ResultFigure::chart("validation-1", &score_chart(&score))),
        finding("validation-1-pairs-ratio", ratio_to_nothing),
        finding("validation-1-groups", groups.mean_error_points)
            .with_points(groups.points("groups")),
        finding("validation-1-bandwidth", bound.mean_cycles_error_percent)
            .with_points(bound.points("bandwidth-bound")),
        finding("validation-1-plans", score.plans_tau).with_points(plans.points("plans")),
        finding("validation-1-speed", Some(times_averaged)).with_points(speed_points.to_vec()),
    ])
}

/// Compares forecasts from recordings with the cycle-level machine.
pub(super) fn run_forecasts(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let seed = context.seeds[0];
    let runs = compare_forecasts(context)?;
    let summary = ErrorSummary::new(&runs);
    let task_points = runs.iter().flatten().flat_map(|task| {
        let run = format!(
            "{} beside {}, {}",
            task.program,
            task.beside.join(", "),
            task.machine
        );
        let (low, high) = task.interval_percent.unzip();
        [
            DataPoint::from_values("measured, %", run.clone(), [task.measured_percent]),
            DataPoint {
                low,
                high,
                ..DataPoint::from_values("forecast, %", run, [task.predicted_percent])
            },
        ]
    });
    let points = summary
        .points("forecasts")
        .into_iter()
        .chain(task_points)
        .collect();
    let finding = |name: &str, value: Option<f64>| {
        let values: Vec<(u64, f64)> = value.map(|value| (seed, value)).into_iter().collect();
        Finding::declared(name, &values)
    };
    Ok(vec![
        finding("validation-2-error", summary.mean_error_points).with_points(points),
        finding("validation-2-p90", summary.p90_error_points),
        finding("validation-2-order", summary.kendall_tau),
        finding("validation-2-intervals", summary.coverage_percent),
    ])
}
