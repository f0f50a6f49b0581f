//! TC-4 beyond the thesis's own runs: eight chips, on which the thesis ran no policy, and clusters of unequal sizes.

use cachemate_sim::kernels::Options;

use super::placements::{
    AUTOMATIC, GAIN_LABEL, HAND, PlacementRuns, compared_placements, gain_percent, per_seed, stall_reduction_percent,
};
use super::setup::{ClusterCase, LARGE, SCALE, SMALL, ThreadPlacement, paper_programs};
use crate::{ExperimentContext, Finding, ReproError};

/// Eight clusters of the same size as the small machine's.
fn eight_cluster_cases() -> Vec<ClusterCase> {
    let even_case = |name, kernel, threads| {
        let options = Options { groups: Some(8), threads: Some(threads), ..Options::default() };
        ClusterCase::new(name, kernel, options)
    };
    vec![even_case("8 scoreboards x 8", "scoreboards", 8), even_case("8 warehouses x 8", "warehouses", 8)]
}

/// Clusters that cannot, or only just, be kept whole while the chips are balanced.
fn uneven_cases() -> Vec<ClusterCase> {
    let uneven_case = |name, kernel, sizes: &[u32]| {
        ClusterCase::new(name, kernel, Options { group_sizes: sizes.to_vec(), ..Options::default() })
    };
    vec![
        uneven_case("scoreboards 6 + 4 + 4 + 2", "scoreboards", &[6, 4, 4, 2]),
        uneven_case("warehouses 10 + 6", "warehouses", &[10, 6]),
        uneven_case("databases 20 + 12", "rubis", &[20, 12]),
    ]
}

/// Placements without round robin and the threshold of 20 %, which the runs on two chips show.
fn three_placements(context: &ExperimentContext<'_>) -> Vec<ThreadPlacement> {
    let mut three = compared_placements(context);
    three.truncate(AUTOMATIC + 1);
    three
}

pub(super) fn eight_chips(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let programs = context.pick(1, 2);
    let first_cases = |mut cases: Vec<ClusterCase>| {
        cases.truncate(programs);
        cases
    };
    let scale = SCALE * context.pick_of_three(8, 2, 1);
    let small = PlacementRuns::make(context, SMALL, first_cases(paper_programs()), three_placements(context), scale)?;
    let large =
        PlacementRuns::make(context, LARGE, first_cases(eight_cluster_cases()), three_placements(context), scale)?;
    // The same program on both machines: scoreboards, warehouses.
    let extra_gain = |seed: usize| {
        let pair =
            |case: usize| gain_percent(&large, case, AUTOMATIC, seed) - gain_percent(&small, case, AUTOMATIC, seed);
        (0..programs).map(pair).fold(f64::INFINITY, f64::min)
    };
    let mut points = large.placement_points("gain, %", gain_percent);
    points.extend(small.placement_points("gain, %", gain_percent));
    points.extend(large.placement_points("remote stalls taken away, %", stall_reduction_percent));
    Ok(vec![
        Finding::declared("tc-4-eight-chips", &per_seed(context, |seed| large.worst_hand_gain(seed)))
            .with_points(points)
            .time_scale(scale as f64)
            .with_figure(large.draw_bars(
                "tc-4-eight-chips",
                "Eight chips: performance over the default scheduler",
                GAIN_LABEL,
                gain_percent,
            )),
        Finding::declared("tc-4-eight-over-two", &per_seed(context, extra_gain)).time_scale(scale as f64),
    ])
}

pub(super) fn uneven_clusters(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let mut cases = uneven_cases();
    if context.quick {
        cases.truncate(1);
    }
    Ok(vec![uneven_finding(context, &PlacementRuns::make(context, SMALL, cases, three_placements(context), SCALE)?)])
}

/// Uneven clusters, compared with the program's own ones under the same balance limit.
fn uneven_finding(context: &ExperimentContext<'_>, runs: &PlacementRuns) -> Finding {
    let gain_shortfall =
        |case: usize, seed: usize| gain_percent(runs, case, HAND, seed) - gain_percent(runs, case, AUTOMATIC, seed);
    let worst =
        |seed: usize| (0..runs.cases.len()).map(|case| gain_shortfall(case, seed)).fold(f64::NEG_INFINITY, f64::max);
    let mut points = runs.placement_points("gain, %", gain_percent);
    points.extend(runs.placement_points("remote stalls taken away, %", stall_reduction_percent));
    Finding::declared("tc-4-uneven", &per_seed(context, worst))
        .with_points(points)
        .time_scale(SCALE as f64)
        .with_figure(runs.draw_bars(
            "tc-4-uneven",
            "Uneven clusters: performance over the default scheduler",
            GAIN_LABEL,
            gain_percent,
        ))
}
