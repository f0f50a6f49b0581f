//! TC-4 beyond the thesis's own runs: eight chips, on which the thesis ran no policy, and clusters of unequal sizes.

use cachemate_sim::kernels::Options;

use super::placements::{
    AUTOMATIC_INDEX, GAIN_LABEL, HAND_INDEX, PlacementRuns, compared_placements,
};
use super::setup::{
    ClusterCase, LARGE_MACHINE, SMALL_MACHINE, TIME_SCALE, ThreadPlacement, paper_programs,
};
use crate::{ExperimentContext, Finding, Result, greatest, least};

/// Eight clusters of the same size as the small machine's.
fn eight_cluster_cases() -> Vec<ClusterCase> {
    let case_of_equal_clusters = |name, kernel, threads| {
        let options = Options {
            groups: Some(8),
            threads: Some(threads),
            ..Options::default()
        };
        ClusterCase::new(name, kernel, options)
    };
    vec![
        case_of_equal_clusters("8 scoreboards x 8", "scoreboards", 8),
        case_of_equal_clusters("8 warehouses x 8", "warehouses", 8),
    ]
}

/// Clusters that cannot, or only just, be kept whole while the chips are balanced.
fn uneven_cases() -> Vec<ClusterCase> {
    let case_of_sizes = |name, kernel, sizes: &[u32]| {
        ClusterCase::new(
            name,
            kernel,
            Options {
                group_sizes: sizes.to_vec(),
                ..Options::default()
            },
        )
    };
    vec![
        case_of_sizes("scoreboards 6 + 4 + 4 + 2", "scoreboards", &[6, 4, 4, 2]),
        case_of_sizes("warehouses 10 + 6", "warehouses", &[10, 6]),
        case_of_sizes("databases 20 + 12", "rubis", &[20, 12]),
    ]
}

/// Placements without round robin and the threshold of 20 %, which the runs on two chips show.
fn three_placements(context: &ExperimentContext<'_>) -> Vec<ThreadPlacement> {
    let mut three_placements = compared_placements(context);
    three_placements.truncate(AUTOMATIC_INDEX + 1);
    three_placements
}

pub(super) fn eight_chip_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let programs = context.pick(1, 2);
    let take_first_cases = |mut cases: Vec<ClusterCase>| {
        cases.truncate(programs);
        cases
    };
    let scale = TIME_SCALE * context.pick_by_length(8, 2, 1);
    let small_machine_runs = PlacementRuns::run_placements(
        context,
        SMALL_MACHINE,
        take_first_cases(paper_programs()),
        three_placements(context),
        scale,
    )?;

    let large_machine_runs = PlacementRuns::run_placements(
        context,
        LARGE_MACHINE,
        take_first_cases(eight_cluster_cases()),
        three_placements(context),
        scale,
    )?;

    // The same program on both machines: scoreboards, warehouses.
    let extra_gain_percent = |seed: u64| {
        let gain_pair = |case: usize| {
            large_machine_runs.gain_percent(case, AUTOMATIC_INDEX, seed)
                - small_machine_runs.gain_percent(case, AUTOMATIC_INDEX, seed)
        };
        least((0..programs).map(gain_pair))
    };
    let mut points = large_machine_runs.placement_points("gain, %", PlacementRuns::gain_percent);
    points.extend(small_machine_runs.placement_points("gain, %", PlacementRuns::gain_percent));
    points.extend(large_machine_runs.placement_points(
        "remote stalls taken away, %",
        PlacementRuns::stall_reduction_percent,
    ));

    Ok(vec![
        Finding::declared(
            "tc-4-eight-chips",
            &context.values_by_seed(|seed| large_machine_runs.worst_hand_gain(seed)),
        )
        .with_points(points)
        .with_time_scale(scale as f64)
        .with_figure(large_machine_runs.placement_figure(
            "tc-4-eight-chips",
            "Eight chips: performance over the default scheduler",
            GAIN_LABEL,
            PlacementRuns::gain_percent,
        )),
        Finding::declared(
            "tc-4-eight-over-two",
            &context.values_by_seed(extra_gain_percent),
        )
        .with_time_scale(scale as f64),
    ])
}

pub(super) fn uneven_cluster_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let mut cases = uneven_cases();
    if context.quick {
        cases.truncate(1);
    }
    Ok(vec![uneven_finding(
        context,
        &PlacementRuns::run_placements(
            context,
            SMALL_MACHINE,
            cases,
            three_placements(context),
            TIME_SCALE,
        )?,
    )])
}

/// The uneven clusters, compared with the program's own ones under the same balance limit.
fn uneven_finding(context: &ExperimentContext<'_>, runs: &PlacementRuns) -> Finding {
    let shortfall_from_hand = |case: usize, seed: u64| {
        runs.gain_percent(case, HAND_INDEX, seed) - runs.gain_percent(case, AUTOMATIC_INDEX, seed)
    };
    let worst_shortfall =
        |seed: u64| greatest((0..runs.cases.len()).map(|case| shortfall_from_hand(case, seed)));
    let mut points = runs.placement_points("gain, %", PlacementRuns::gain_percent);
    points.extend(runs.placement_points(
        "remote stalls taken away, %",
        PlacementRuns::stall_reduction_percent,
    ));

    Finding::declared("tc-4-uneven", &context.values_by_seed(worst_shortfall))
        .with_points(points)
        .with_time_scale(TIME_SCALE as f64)
        .with_figure(runs.placement_figure(
            "tc-4-uneven",
            "Uneven clusters: performance over the default scheduler",
            GAIN_LABEL,
            PlacementRuns::gain_percent,
        ))
}
