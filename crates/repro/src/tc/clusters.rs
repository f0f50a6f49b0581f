//! TC-2: do the clusters match the program's own groups? With the picture of Figure 3.5, before and after.

use cachemate_papers::clustering::ClusteringMethod;
use cachemate_sim::kernels::Options;
use serde::{Deserialize, Serialize};

use super::figures::sharing_map_figures as shmap_figures;
use super::insight::{RoundAccuracy, round_accuracies};
use super::setup::{
    ClusterCase, ClusterSetting, LOW_ACTIVATION, PlacementRound, SAMPLES_PER_THREAD, SMALL_MACHINE,
    TIME_SCALE, ThreadPlacement, agreement_of_workers, cluster_maps, label_clusters,
    paper_programs, placement_rounds,
};
use crate::{DataPoint, ExperimentContext, Finding, Result};

/// The clusters found in one run.
#[derive(Serialize, Deserialize)]
struct ClusterRun {
    agreement: f64,
    unclustered: usize,
    clusters: usize,
    rounds: usize,
    first: Option<PlacementRound>,
    last: Option<PlacementRound>,
    /// Insight into the first round of sampling.
    insight: Option<RoundAccuracy>,
}

fn run_case(
    context: &ExperimentContext<'_>,
    &(case, seed): &(&ClusterCase, u64),
) -> Result<ClusterRun> {
    context.report_progress(&format!("TC-2 {} seed {seed}", case.name));

    // A change of phase needs the same time again: the clusters before it, then those after it.
    let has_phase_change = case.options.regroup_after.is_some();
    let short_setting = ClusterSetting::new(context, SMALL_MACHINE, case, seed);
    let warm_up_windows = short_setting.warm_up_windows * if has_phase_change { 2 } else { 1 };
    let setting = ClusterSetting {
        warm_up_windows,
        measured_windows: 1,
        ..short_setting
    };
    let true_groups = case.true_groups_at_end(seed)?;
    let run = setting.run(&ThreadPlacement::Automatic(LOW_ACTIVATION.to_string()))?;
    let mut placement_rounds = placement_rounds(&run.records, true_groups.len());
    let first_round_accuracy = round_accuracies(&run.records, &case.true_groups(seed)?)
        .into_iter()
        .next();
    let worker_count = true_groups.iter().flatten().count();
    let round_count = placement_rounds.len();
    let last_round = placement_rounds.pop();
    Ok(ClusterRun {
        agreement: last_round
            .as_ref()
            .map_or(0.0, |round| round.agreement(&true_groups)),
        unclustered: last_round.as_ref().map_or(worker_count, |round| {
            round.count_unclustered_workers(&true_groups)
        }),
        clusters: last_round.as_ref().map_or(0, |round| round.clusters),
        rounds: round_count,
        first: (!placement_rounds.is_empty()).then(|| placement_rounds.swap_remove(0)),
        last: last_round,
        insight: first_round_accuracy,
    })
}

/// The points of the first round of sampling, with the distance between the program's own groups in
/// its shMaps.
fn accuracy_points<'a>(
    case: &ClusterCase,
    runs: impl Iterator<Item = &'a ClusterRun>,
) -> Vec<DataPoint> {
    let accuracies: Vec<&RoundAccuracy> = runs.filter_map(|run| run.insight.as_ref()).collect();
    let accuracy_point = |label: &str, value_of: &dyn Fn(&RoundAccuracy) -> f64| {
        DataPoint::from_values(
            label,
            case.name,
            accuracies.iter().map(|accuracy| value_of(accuracy)),
        )
    };

    vec![
        accuracy_point("first round: samples", &|accuracy| accuracy.samples as f64),
        accuracy_point("first round: samples past the filter", &|accuracy| {
            accuracy.passed as f64
        }),
        accuracy_point("first round: entries that a region claimed", &|accuracy| {
            accuracy.claimed as f64
        }),
        accuracy_point(
            "first round: entries that two threads touch three times or more",
            &|accuracy| accuracy.shared as f64,
        ),
        accuracy_point(
            "first round: of these global by the thesis's rule",
            &|accuracy| accuracy.global as f64,
        ),
        accuracy_point(
            "first round: mean similarity inside the program's groups",
            &|accuracy| accuracy.inside,
        ),
        accuracy_point("first round: mean similarity across them", &|accuracy| {
            accuracy.across
        }),
    ]
}

/// The chapter's programs under harder conditions: background threads, uneven clusters, a change
/// midway.
fn harder_cases(context: &ExperimentContext<'_>) -> Vec<ClusterCase> {
    let case_with = |name, kernel, set_option: fn(&mut Options)| {
        let mut options = Options::default();
        set_option(&mut options);
        ClusterCase::new(name, kernel, options)
    };

    // The change comes after about half of each thread's operations.
    let mut cases = vec![
        case_with(
            "scoreboards, other groups midway",
            "scoreboards",
            match context.quick {
                true => |o| o.regroup_after = Some(4_000),
                false => |o| o.regroup_after = Some(9_000),
            },
        ),
        case_with("scoreboards 6 + 4 + 4 + 2", "scoreboards", |o| {
            o.group_sizes = vec![6, 4, 4, 2]
        }),
    ];

    if !context.quick {
        cases.extend([
            case_with("scoreboards, 2 collectors", "scoreboards", |o| {
                o.background_threads = Some(2)
            }),
            case_with("warehouses 4 x 16", "warehouses", |o| {
                (o.groups, o.threads) = (Some(4), Some(16))
            }),
            case_with("warehouses, 2 collectors", "warehouses", |o| {
                o.background_threads = Some(2)
            }),
            case_with("warehouses, other groups midway", "warehouses", |o| {
                o.regroup_after = Some(900)
            }),
            case_with("warehouses 10 + 6", "warehouses", |o| {
                o.group_sizes = vec![10, 6]
            }),
            case_with("databases, 2 background threads", "rubis", |o| {
                o.background_threads = Some(2)
            }),
            case_with("databases, other groups midway", "rubis", |o| {
                o.regroup_after = Some(500)
            }),
            case_with("databases 20 + 12", "rubis", |o| {
                o.group_sizes = vec![20, 12]
            }),
            case_with("chat rooms, 2 collectors", "chatrooms", |o| {
                o.background_threads = Some(2)
            }),
            case_with("chat rooms, other groups midway", "chatrooms", |o| {
                o.regroup_after = Some(8_000)
            }),
            case_with("chat rooms 10 + 6", "chatrooms", |o| {
                o.group_sizes = vec![10, 6]
            }),
        ]);
    }

    cases
}

pub(super) fn paper_program_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let finding = agreement_finding(context, &paper_programs(), "tc-2-four-programs")?;
    Ok(vec![finding.with_note(format!(
        "Activation at 2 % so that all four are sampled; {SAMPLES_PER_THREAD} samples a thread and round. \"One pass\" is the thesis's scan on the \
         same shMaps of the first round. Why so many samples: of the warehouses' about one in twenty passes the filter, as \
         nine sampled lines in ten are tree pages that a single thread fetched once from the other chip; with 20 000 samples \
         of 16 threads the counters stay below the floor of 3 and neither method finds the two groups."
    ))])
}

pub(super) fn harder_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    Ok(vec![agreement_finding(
        context,
        &harder_cases(context),
        "tc-2-harder",
    )?])
}

/// The worst case's agreement, with all cases and their shMaps.
fn agreement_finding(
    context: &ExperimentContext<'_>,
    cases: &[ClusterCase],
    name: &str,
) -> Result<Finding> {
    let runs = context.run_cases(&Vec::from_iter(cases), |case, seed| (case, seed), run_case)?;

    let (mut points, mut figures) = (Vec::new(), Vec::new());
    for case in cases {
        let true_groups = case.true_groups(1)?;
        points.extend([
            runs.point(case, "adjusted Rand index", case.name, |run| run.agreement),
            runs.point(case, "clusters", case.name, |run| run.clusters as f64),
            runs.point(case, "unclustered workers", case.name, |run| {
                run.unclustered as f64
            }),
            runs.point(case, "rounds that found clusters", case.name, |run| {
                run.rounds as f64
            }),
        ]);
        points.extend(accuracy_points(case, runs.of_case(case)));
        points.push(
            runs.point(case, "adjusted Rand index, one pass", case.name, |run| {
                one_pass_agreement(run, &true_groups)
            }),
        );
        if let Some(round) = runs
            .of_case(case)
            .find_map(|run| run.first.as_ref().or(run.last.as_ref()))
        {
            figures.extend(shmap_figures(case.name, round));
        }
        if case.options.regroup_after.is_some()
            && let Some(later_round) = runs
                .of_case(case)
                .find_map(|run| run.first.as_ref().and(run.last.as_ref()))
        {
            figures.extend(shmap_figures(
                &format!("{}, at the end", case.name),
                later_round,
            ));
        }
    }
    let per_seed = runs.least_per_seed(|run| run.agreement);
    let mut finding = Finding::declared(name, &per_seed)
        .with_points(points)
        .with_time_scale(TIME_SCALE as f64);
    finding.figures = figures;
    Ok(finding)
}

/// Agreement of the thesis's scan on the same maps.
fn one_pass_agreement(run: &ClusterRun, true_groups: &[Option<u32>]) -> f64 {
    let Some(round) = run.first.as_ref().or(run.last.as_ref()) else {
        return 0.0;
    };
    let maps: Vec<&[u8]> = round.maps.iter().map(Vec::as_slice).collect();
    let clusters = cluster_maps(&maps, ClusteringMethod::OnePass, SAMPLES_PER_THREAD as f64);
    agreement_of_workers(&label_clusters(&clusters), true_groups)
}
