//! TC-CONTROLS, negative controls: threads that share no data, or all of it, are not moved.

use cachemate_sim::kernels::Options;
use serde::{Deserialize, Serialize};

use super::setup::{
    ClusterCase, ClusterSetting, LOW_ACTIVATION, SMALL_MACHINE, TIME_SCALE, ThreadPlacement,
    remote_stall_share, work_rate,
};
use crate::{ExperimentContext, Finding, Result};

#[derive(Serialize, Deserialize)]
struct ControlOutcome {
    moved: f64,
    loss: f64,
    remote: f64,
}

fn run_control(
    context: &ExperimentContext<'_>,
    &(case, seed): &(&ClusterCase, u64),
) -> Result<ControlOutcome> {
    context.report_progress(&format!("TC controls {} seed {seed}", case.name));

    let short_setting = ClusterSetting::new(context, SMALL_MACHINE, case, seed);
    let setting = ClusterSetting {
        warm_up_windows: context.pick(3, 12),
        ..short_setting
    };
    let true_groups = case.true_groups(seed)?;
    let default_results = setting.run(&ThreadPlacement::Default)?.results;
    let placed_run = setting.run(&ThreadPlacement::Automatic(LOW_ACTIVATION.to_string()))?;
    let placed_threads = placed_run
        .records
        .iter()
        .map(|record| record.decision.plan.affinity.len())
        .max()
        .unwrap_or(0);
    let work_loss = 1.0
        - work_rate(&placed_run.results, &true_groups) / work_rate(&default_results, &true_groups);
    Ok(ControlOutcome {
        moved: placed_threads as f64,
        loss: 100.0 * work_loss,
        remote: 100.0 * remote_stall_share(&default_results),
    })
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let default_case = |name| ClusterCase::new(name, name, Options::default());
    let cases = [
        default_case("share-nothing"),
        default_case("share-everything"),
    ];
    let runs = context.run_cases(&cases.each_ref(), |case, seed| (case, seed), run_control)?;
    let mut points = Vec::new();
    for case in &cases {
        points.push(runs.point(case, "threads placed", case.name, |outcome| outcome.moved));
        points.push(
            runs.point(case, "loss against the default, %", case.name, |outcome| {
                outcome.loss
            }),
        );
        points.push(runs.point(
            case,
            "cycles stalled on remote caches, %",
            case.name,
            |outcome| outcome.remote,
        ));
    }
    let time_scale = TIME_SCALE as f64;
    Ok(vec![
        Finding::declared(
            "tc-controls-placed",
            &runs.greatest_per_seed(|outcome| outcome.moved),
        )
        .with_points(points)
        .with_time_scale(time_scale),
        Finding::declared(
            "tc-controls-loss",
            &runs.greatest_per_seed(|outcome| outcome.loss),
        )
        .with_time_scale(time_scale),
    ])
}
