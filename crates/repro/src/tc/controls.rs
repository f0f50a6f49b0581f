//! TC-CONTROLS, negative controls: threads that share no data, or all of it, are not moved.

use cachemate_sim::kernels::Options;
use serde::{Deserialize, Serialize};

use super::setup::{ClusterCase, ClusterSetting, SCALE, SMALL, ThreadPlacement, remote_share, work_rate};
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultTarget};

#[derive(Serialize, Deserialize)]
struct ControlOutcome {
    moved: f64,
    loss: f64,
    remote: f64,
}

fn run_control(context: &ExperimentContext<'_>, case: &ClusterCase, seed: u64) -> Result<ControlOutcome, ReproError> {
    let short_setting = ClusterSetting::new(context, SMALL, case, seed);
    let setting = ClusterSetting { warm_up_windows: context.pick(3, 12), ..short_setting };
    let truth = case.true_groups(seed)?;
    let alone = setting.run(&ThreadPlacement::Default)?.results;
    let placed_run = setting.run(&ThreadPlacement::Automatic("activation_share = 0.02".to_string()))?;
    let placed_threads = placed_run.records.iter().map(|record| record.decision.plan.affinity.len()).max().unwrap_or(0);
    let loss = 1.0 - work_rate(&placed_run.results, &truth) / work_rate(&alone, &truth);
    Ok(ControlOutcome { moved: placed_threads as f64, loss: 100.0 * loss, remote: 100.0 * remote_share(&alone) })
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let default_case = |name| ClusterCase::new(name, name, Options::default());
    let cases = [default_case("share-nothing"), default_case("share-everything")];
    let items: Vec<(usize, u64)> =
        (0..cases.len()).flat_map(|case| context.seeds.iter().map(move |&seed| (case, seed))).collect();
    let outcomes = context.run_all_stored(
        module_path!(),
        &items,
        |&(case, seed)| format!("{:?} {seed}", cases[case]),
        |&(case, seed)| {
            context.report_progress(&format!("TC controls {} seed {seed}", cases[case].name));
            run_control(context, &cases[case], seed)
        },
    )?;
    let mut points = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let case_values = |value: fn(&ControlOutcome) -> f64| -> Vec<f64> {
            items
                .iter()
                .zip(&outcomes)
                .filter(|((number, _), _)| *number == index)
                .map(|(_, outcome)| value(outcome))
                .collect()
        };
        points.push(DataPoint::over_values("threads placed", case.name, &case_values(|outcome| outcome.moved)));
        points.push(DataPoint::over_values(
            "loss against the default, %",
            case.name,
            &case_values(|outcome| outcome.loss),
        ));
        points.push(DataPoint::over_values(
            "cycles stalled on remote caches, %",
            case.name,
            &case_values(|outcome| outcome.remote),
        ));
    }
    let worst_of_seed = |seed: u64, value: fn(&ControlOutcome) -> f64| {
        let of_seed = items.iter().zip(&outcomes).filter(|((_, index), _)| *index == seed);
        of_seed.map(|(_, outcome)| value(outcome)).fold(f64::NEG_INFINITY, f64::max)
    };
    let per_seed =
        |value: fn(&ControlOutcome) -> f64| -> Vec<(u64, f64)> { context.per_seed(|seed| worst_of_seed(seed, value)) };
    let control_finding = |title, unit, target, per_seed: Vec<(u64, f64)>| {
        Finding::new("TC-CONTROLS", title, "not in the thesis", unit, target, &per_seed).time_scale(SCALE as f64)
    };
    let moved_title = "threads placed among programs that share nothing or everything, activation at 2 %";
    let loss = "largest loss against the default scheduler";
    Ok(vec![
        control_finding(
            moved_title,
            "threads",
            ResultTarget::AtMost { target: 0.0, paper_best: None },
            per_seed(|outcome| outcome.moved),
        )
        .with_points(points),
        control_finding(
            loss,
            "%",
            ResultTarget::AtMost { target: 0.5, paper_best: None },
            per_seed(|outcome| outcome.loss),
        ),
    ])
}
