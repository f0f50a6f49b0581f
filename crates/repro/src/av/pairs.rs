//! AV-1 (Table 1, Figure 3): does the overlap of activity vectors predict the speed of a pair? AV-7
//! (Figure 1): how many of their L2 misses do the two programs cause each other?
//!
//! If two programs that are busy in the same sets slow each other down, the number of shared bits
//! says which pairs to avoid, before they are tried. So all 45 pairs of nine programs, including
//! each with itself, run on the two contexts of the simulated SMT core. For every sample, the
//! number of bits that both vectors share is compared with the IPC of both together, and a line is
//! fitted for each pair.
//!
//! For example, a pair whose IPC falls from 1.2 to 1.0 between samples with 4 and with 14 shared
//! bits has a slope of -0.02 per bit. A pair whose overlap never changes counts as slope 0, because
//! the paper's average is over all 45 tests and names such pairs.

use std::collections::BTreeMap;

use cachemate_core::{CacheLevel, IndexSet};
use cachemate_locality::activity::common_active_count;
use cachemate_report::figure::{
    Axis, BarChart, BarGroup, Chart, ChartBar, ChartPoint, Mark, Series,
};
use cachemate_sim::results::MissBreakdown;
use serde::{Deserialize, Serialize};

use super::bits::{CELLS, FittedLine, Thresholds, vectors_above_own_mean};
use super::samples::{ActivitySample, SuperSets, TaskActivity, sample_by_set};
use super::{MACHINE, PROGRAMS};
use crate::seeded_runs::SeededRuns;
use crate::setup::{Workload, WorkloadJob, failed};
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, at_time_scale, bar_groups, least,
    mean,
};

/// Table 1, average slope and r².
const PAPER_SLOPES: [(f64, f64); 6] = [
    (0.109, 0.326),
    (-0.023, 0.142),
    (0.085, 0.395),
    (0.007, 0.177),
    (-0.022, 0.143),
    (-0.151, 0.331),
];
const L2_MISS_CELL: usize = 5;

/// Warm-up samples, measured samples, and the time scale.
#[derive(Clone, Copy, Serialize)]
struct PairLength {
    scale: u64,
    warm_up_samples: u64,
    measured_samples: u64,
    /// Warm-up and measured cycles of the run that attributes misses to causes. Caches do not scale, and most misses
    /// are cold until the programs have gone through their data once.
    cause_run_cycles: (u64, u64),
}

#[derive(Serialize, Deserialize)]
struct PairRun {
    instr_per_cycle: f64,
    /// Mean number of shared bits, and the line of IPC over shared bits; no line if the overlap never changed.
    cells: CellFits,
    /// Standard deviation of the number of shared bits over the samples.
    moved: [f64; 6],
    /// The same as `cells` under each of [`other_reading_names`].
    otherwise: Vec<CellFits>,
    l2: MissBreakdown,
}

type CellFits = [(f64, Option<FittedLine>); 6];

/// Other possible thresholds; their results are shown without a target.
const OTHER_THRESHOLDS: [(&str, Option<f64>); 3] = [
    ("half the threshold", Some(0.5)),
    ("twice the threshold", Some(2.0)),
    ("above the program's own mean", None),
];

/// Definitions of super sets, all computed from the same runs. The first is that of the section with this result:
/// "contiguous groups of sets called Super Sets" (AV 2.2, and the introduction), 32 of them by choice. The others, with
/// other numbers or by the low bits of the set as in the hardware (4.2), are shown without a target.
const FORMS: [(&str, SuperSets); 6] = [
    (
        "contiguous, 32 super sets",
        SuperSets {
            is_contiguous: true,
            super_sets: 32,
        },
    ),
    (
        "contiguous, 64 super sets",
        SuperSets {
            is_contiguous: true,
            super_sets: 64,
        },
    ),
    (
        "contiguous, 128 super sets",
        SuperSets {
            is_contiguous: true,
            super_sets: 128,
        },
    ),
    (
        "low bits, 32 super sets",
        SuperSets {
            is_contiguous: false,
            super_sets: 32,
        },
    ),
    (
        "low bits, 64 super sets",
        SuperSets {
            is_contiguous: false,
            super_sets: 64,
        },
    ),
    (
        "low bits, 128 super sets",
        SuperSets {
            is_contiguous: false,
            super_sets: 128,
        },
    ),
];

/// The names of the entries of [`PairRun::otherwise`].
fn other_reading_names() -> impl Iterator<Item = &'static str> {
    let thresholds = OTHER_THRESHOLDS.iter().map(|(name, _)| *name);
    thresholds.chain(FORMS[1..].iter().map(|(name, _)| *name))
}

fn fold_samples(samples: &[ActivitySample], form: SuperSets) -> Vec<ActivitySample> {
    let fold_sample = |sample: &ActivitySample| ActivitySample {
        instr_per_cycle: sample.instr_per_cycle,
        tasks: sample
            .tasks
            .iter()
            .map(|task| form.fold_sets(task))
            .collect(),
    };
    samples.iter().map(fold_sample).collect()
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let length = context.pick(
        PairLength {
            scale: 200,
            warm_up_samples: 40,
            measured_samples: 30,
            cause_run_cycles: (2_000_000, 6_000_000),
        },
        PairLength {
            scale: 20,
            warm_up_samples: 8,
            measured_samples: 60,
            cause_run_cycles: (40_000_000, 240_000_000),
        },
    );
    let thresholds = measure_thresholds(context, length)?;
    let program_pairs: Vec<PairIndices> = (0..PROGRAMS.len())
        .flat_map(|a| (a..PROGRAMS.len()).map(move |b| (a, b)))
        .collect();
    let inputs = |pair, seed| PairInputs {
        pair,
        seed,
        length,
        thresholds_by_form: &thresholds[&seed],
    };
    let pairs = context.run_cases(&program_pairs, inputs, run_pair)?;
    let mut findings = correlation_findings(context, &pairs);
    findings.extend(inter_thread_findings(context, &pairs));
    Ok(at_time_scale(length.scale as f64, findings))
}

/// Positions of two programs in [`PROGRAMS`].
type PairIndices = (usize, usize);

fn pair_name((first, second): PairIndices) -> String {
    format!("{}+{}", PROGRAMS[first], PROGRAMS[second])
}

type PairRuns = SeededRuns<PairIndices, PairRun>;

fn program_job(program: usize, seed: u64, copy_index: u64) -> WorkloadJob {
    WorkloadJob::new(PROGRAMS[program], 10 * seed + copy_index)
}

fn build_workload(jobs: Vec<WorkloadJob>, seed: u64, scale: u64) -> Result<Workload> {
    let mut workload = Workload::from_machine_name(MACHINE, jobs, seed)?;
    workload.options.scale = scale;
    Ok(workload)
}

/// By seed: thresholds from the nine programs alone, for each of [`FORMS`].
fn measure_thresholds(
    context: &ExperimentContext<'_>,
    length: PairLength,
) -> Result<BTreeMap<u64, Vec<Thresholds>>> {
    let program_indices: Vec<usize> = (0..PROGRAMS.len()).collect();
    let solo_samples = context.run_cases(
        &program_indices,
        |program, seed| (program, seed, length),
        sample_program,
    )?;
    let thresholds_of_form = |seed: u64, form: SuperSets| {
        let samples = solo_samples.of_seed(seed).flatten();
        let activities: Vec<TaskActivity> = samples
            .map(|sample: &ActivitySample| form.fold_sets(&sample.tasks[0]))
            .collect();
        Thresholds::mean_of(activities.iter())
    };

    let thresholds_of_seed = |&seed| {
        (
            seed,
            FORMS
                .map(|(_, form)| thresholds_of_form(seed, form))
                .to_vec(),
        )
    };
    Ok(context.seeds.iter().map(thresholds_of_seed).collect())
}

fn sample_program(
    context: &ExperimentContext<'_>,
    &(program, seed, length): &(usize, u64, PairLength),
) -> Result<Vec<ActivitySample>> {
    context.report_progress(&format!("{} alone, seed {seed}", PROGRAMS[program]));

    let workload = build_workload(vec![program_job(program, seed, 0)], seed, length.scale)?;
    Ok(sample_by_set(workload, length.warm_up_samples, length.measured_samples)?.0)
}

#[derive(Clone, Copy, Serialize)]
struct PairInputs<'a> {
    pair: PairIndices,
    seed: u64,
    length: PairLength,
    thresholds_by_form: &'a [Thresholds],
}

fn run_pair(context: &ExperimentContext<'_>, inputs: &PairInputs<'_>) -> Result<PairRun> {
    let PairInputs {
        pair,
        seed,
        length,
        thresholds_by_form,
    } = *inputs;
    context.report_progress(&format!("{}, seed {seed}", pair_name(pair)));

    let workload = build_workload(
        vec![program_job(pair.0, seed, 0), program_job(pair.1, seed, 1)],
        seed,
        length.scale,
    )?;
    let set_samples = sample_by_set(
        workload.clone(),
        length.warm_up_samples,
        length.measured_samples,
    )?
    .0;
    let (samples, thresholds) = (
        fold_samples(&set_samples, FORMS[0].1),
        &thresholds_by_form[0],
    );
    let results = workload
        .with_length(length.cause_run_cycles.0, length.cause_run_cycles.1)
        .unmanaged_run()?;
    let l2 = results
        .level_breakdown(CacheLevel::L2)
        .ok_or_else(|| failed(&pair_name(pair))("no L2"))?;
    let instr_per_cycle = mean(samples.iter().map(|sample| sample.instr_per_cycle));
    let fits_by_threshold = |(_, multiplier): &(&str, Option<f64>)| match multiplier {
        Some(multiplier) => fit_ipc_over_bits(&samples, |activity| {
            thresholds.scaled_by(*multiplier).vectors_of(activity)
        }),
        None => fit_ipc_over_bits(&samples, vectors_above_own_mean),
    };
    let mut other_fits: Vec<CellFits> = OTHER_THRESHOLDS.iter().map(fits_by_threshold).collect();
    for ((_, form), thresholds) in FORMS.iter().zip(thresholds_by_form).skip(1) {
        other_fits.push(fit_ipc_over_bits(
            &fold_samples(&set_samples, *form),
            |activity| thresholds.vectors_of(activity),
        ));
    }
    let vectors = |activity: &TaskActivity| thresholds.vectors_of(activity);
    let overlap_deviations = std::array::from_fn(|cell| {
        root_mean_square_deviation(
            &samples
                .iter()
                .map(|sample| count_shared_bits(sample, &vectors)[cell])
                .collect::<Vec<f64>>(),
        )
    });
    let cell_fits = fit_ipc_over_bits(&samples, vectors);
    Ok(PairRun {
        instr_per_cycle,
        cells: cell_fits,
        moved: overlap_deviations,
        otherwise: other_fits,
        l2,
    })
}

fn count_shared_bits(
    sample: &ActivitySample,
    vectors: &dyn Fn(&TaskActivity) -> [IndexSet; 6],
) -> [f64; 6] {
    let (first, second) = (vectors(&sample.tasks[0]), vectors(&sample.tasks[1]));
    std::array::from_fn(|cell| f64::from(common_active_count(&first[cell], &second[cell])))
}

fn fit_ipc_over_bits(
    samples: &[ActivitySample],
    vectors: impl Fn(&TaskActivity) -> [IndexSet; 6],
) -> CellFits {
    let bits_and_ipc: Vec<([f64; 6], f64)> = samples
        .iter()
        .map(|sample| (count_shared_bits(sample, &vectors), sample.instr_per_cycle))
        .collect();
    std::array::from_fn(|cell| {
        let cell_points: Vec<(f64, f64)> = bits_and_ipc
            .iter()
            .map(|(bits, ipc)| (bits[cell], *ipc))
            .collect();
        (
            mean(cell_points.iter().map(|point| point.0)),
            FittedLine::fit(&cell_points),
        )
    })
}

fn root_mean_square_deviation(values: &[f64]) -> f64 {
    let mean_value = mean(values);
    mean(
        values
            .iter()
            .map(|value| (value - mean_value) * (value - mean_value)),
    )
    .sqrt()
}

fn values_by_seed(pairs: &PairRuns, value: impl Fn(&[&PairRun]) -> f64) -> Vec<f64> {
    pairs
        .per_seed(value)
        .into_iter()
        .map(|(_, value)| value)
        .collect()
}

/// Averages over the pairs with a line, seed by seed.
fn mean_lines_by_seed(
    pairs: &PairRuns,
    line: impl Fn(&PairRun) -> Option<FittedLine>,
    metric: fn(&FittedLine) -> f64,
) -> Vec<f64> {
    values_by_seed(pairs, |pairs| {
        mean(pairs.iter().filter_map(|pair| Some(metric(&line(pair)?))))
    })
}

/// The mean slope of all pairs, seed by seed. An overlap that never changed counts as slope 0: the
/// paper's pairs "with weak negative or zero correlation" are in the average "over all 45 tests"
/// (AV 2.3).
fn mean_slopes_by_seed(pairs: &PairRuns, cell: usize) -> Vec<f64> {
    let slope = |pair: &PairRun| pair.cells[cell].1.map_or(0.0, |line| line.slope);
    values_by_seed(pairs, |pairs| mean(pairs.iter().map(|pair| slope(pair))))
}

/// The line of IPC over shared bits through the means of the pairs, seed by seed.
fn fit_pair_means_by_seed(
    pairs: &PairRuns,
    metric: impl Fn(&PairRun) -> f64,
    get: fn(&FittedLine) -> f64,
) -> Vec<f64> {
    values_by_seed(pairs, |pairs| {
        let means: Vec<(f64, f64)> = pairs
            .iter()
            .map(|pair| (metric(pair), pair.instr_per_cycle))
            .collect();
        FittedLine::fit(&means).as_ref().map_or(f64::NAN, get)
    })
}

/// The ratio of the L2 miss slope to the steepest of the others, seed by seed.
fn steepness_ratios_by_seed(slopes: &[Vec<f64>]) -> Vec<f64> {
    let ratio_of_seed = |seed: usize| {
        let other_slopes = slopes
            .iter()
            .enumerate()
            .filter(|(cell, _)| *cell != L2_MISS_CELL)
            .map(|(_, slopes)| slopes[seed].abs());
        slopes[L2_MISS_CELL][seed].abs()
            / other_slopes
                .filter(|slope| slope.is_finite())
                .fold(0.0, f64::max)
    };
    (0..slopes[L2_MISS_CELL].len()).map(ratio_of_seed).collect()
}

/// How much further IPC falls per shared L2 miss bit than per bit of any other vector, seed by
/// seed: "a large negative slope is desirable" (AV 2.3), so that a rise, however steep, is no
/// rival.
fn excess_slopes_by_seed(slopes: &[Vec<f64>]) -> Vec<f64> {
    let ratio_of_seed = |seed: usize| {
        let other_slopes = slopes
            .iter()
            .enumerate()
            .filter(|(cell, _)| *cell != L2_MISS_CELL)
            .map(|(_, slopes)| slopes[seed]);
        least(other_slopes) - slopes[L2_MISS_CELL][seed]
    };
    (0..slopes[L2_MISS_CELL].len()).map(ratio_of_seed).collect()
}

/// Slopes within pairs, averaged as the paper averages them; other readings are points.
fn correlation_findings(context: &ExperimentContext<'_>, pairs: &PairRuns) -> Vec<Finding> {
    let slope_of = |line: &FittedLine| line.slope;
    let slopes_within: Vec<Vec<f64>> = (0..6)
        .map(|cell| mean_lines_by_seed(pairs, |pair| pair.cells[cell].1, slope_of))
        .collect();
    let slopes_over_all_pairs: Vec<Vec<f64>> = (0..6)
        .map(|cell| mean_slopes_by_seed(pairs, cell))
        .collect();
    let slopes_between: Vec<Vec<f64>> = (0..6)
        .map(|cell| fit_pair_means_by_seed(pairs, |pair| pair.cells[cell].0, slope_of))
        .collect();
    let pair_with_seeds = |values: &[f64]| context.with_seeds(values.to_vec());
    let mut slope_finding = Finding::declared(
        "av-1-slope",
        &pair_with_seeds(&slopes_over_all_pairs[L2_MISS_CELL]),
    );
    let mut excess_finding = Finding::declared(
        "av-1-steepness",
        &pair_with_seeds(&excess_slopes_by_seed(&slopes_over_all_pairs)),
    );
    slope_finding.points = table_points(context, pairs, &slopes_within, &slopes_between);
    slope_finding.note = describe_fit(context, pairs);
    slope_finding.figures = vec![
        slopes_figure(&slope_finding.points),
        overlap_figure(context, pairs),
    ];
    let readings = [
        ("of all 45", &slopes_over_all_pairs),
        ("of the pairs that have one", &slopes_within),
        ("one line between the 45 pairs", &slopes_between),
    ];
    excess_finding.points = readings
        .map(|(reading, slopes)| {
            DataPoint::from_values(
                "absolute slope over the others'",
                reading,
                steepness_ratios_by_seed(slopes),
            )
        })
        .into();
    excess_finding.note = describe_steepness(
        context,
        pairs,
        &steepness_ratios_by_seed(&slopes_over_all_pairs),
    );
    vec![slope_finding, excess_finding]
}

fn describe_fit(context: &ExperimentContext<'_>, pairs: &PairRuns) -> String {
    let count_fitted_pairs = |cell: usize| {
        pairs
            .all()
            .filter(|pair| pair.cells[cell].1.is_some())
            .count()
    };
    let lines: Vec<String> = (0..6)
        .map(|cell| {
            format!(
                "{} {}",
                CELLS[cell],
                count_fitted_pairs(cell) / context.seeds.len().max(1)
            )
        })
        .collect();

    format!(
        "32 contiguous super sets at every level (AV 2.2; their number is open). Chosen before running, since the paper \
         leaves it open: a bit is set above the mean count of the nine programs alone. One line for each of the 45, of IPC over the bits \
         shared sample by sample, then their mean (AV 2.3: \"for each test, a line was fit\"). A pair whose overlap \
         never changed counts as slope 0, because the average is \"over all 45 tests\", those of \"zero correlation\" among \
         them; pairs of 45 with a slope: {}. Other readings (only pairs with a slope; one line through the 45 means) and \
         thresholds stand in the points.",
        lines.join(", ")
    )
}

/// The variation of the overlap within a pair and between pairs, per level: the possible source of
/// a slope.
fn describe_steepness(
    context: &ExperimentContext<'_>,
    pairs: &PairRuns,
    overlap_counts: &[f64],
) -> String {
    let describe_spread = |cell: usize| {
        let deviation_within = mean(pairs.by_seed().map(|pair| pair.moved[cell]));
        let means: Vec<f64> = pairs
            .of_seed(context.seeds[0])
            .map(|pair| pair.cells[cell].0)
            .collect();
        let deviation_between = root_mean_square_deviation(&means);
        format!(
            "{} {deviation_within:.2} and {deviation_between:.1}",
            CELLS[cell]
        )
    };

    let spreads: Vec<String> = (0..6).map(describe_spread).collect();
    format!(
        "In absolute terms, rising slopes included, the slope is {:.2} times the steepest of the others (Table 1: 1.39). \
         Standard deviation of the shared bits, within a pair over its samples and between the 45 pairs: {}. Where the \
         overlap hardly moves within a pair, its slope is that of a few samples, and a bit stands for a change of phase \
         of the whole program rather than for one super set more in conflict.",
        mean(overlap_counts),
        spreads.join(", ")
    )
}

fn table_points(
    context: &ExperimentContext<'_>,
    pairs: &PairRuns,
    slopes_within: &[Vec<f64>],
    slopes_between: &[Vec<f64>],
) -> Vec<DataPoint> {
    let (slope, r_squared): (fn(&FittedLine) -> f64, fn(&FittedLine) -> f64) =
        (|line| line.slope, |line| line.r_squared);
    let mut points = Vec::new();
    for (cell, name) in CELLS.iter().enumerate() {
        let mut add_point = |series: &str, values: &[f64]| {
            points.push(DataPoint::from_values(series, *name, values))
        };
        add_point("slope, paper", &[PAPER_SLOPES[cell].0]);
        add_point(
            "slope within pairs, all 45",
            &mean_slopes_by_seed(pairs, cell),
        );
        add_point("slope within pairs", &slopes_within[cell]);
        add_point("slope between pairs", &slopes_between[cell]);
        add_point("r², paper", &[PAPER_SLOPES[cell].1]);
        add_point(
            "r² within pairs",
            &mean_lines_by_seed(pairs, |pair| pair.cells[cell].1, r_squared),
        );
        add_point(
            "r² between pairs",
            &fit_pair_means_by_seed(pairs, |pair| pair.cells[cell].0, r_squared),
        );
        let strong_pair_count = |pairs: &[&PairRun]| {
            pairs
                .iter()
                .filter_map(|pair| pair.cells[cell].1)
                .filter(|line| line.r_squared > 0.5)
                .count() as f64
        };
        add_point(
            "pairs with r² above 0.5",
            &values_by_seed(pairs, strong_pair_count),
        );
        for (reading, threshold) in other_reading_names().enumerate() {
            let lines = mean_lines_by_seed(pairs, |pair| pair.otherwise[reading][cell].1, slope);
            add_point(&format!("slope within pairs, {threshold}"), &lines);
            let line = fit_pair_means_by_seed(pairs, |pair| pair.otherwise[reading][cell].0, slope);
            add_point(&format!("slope between pairs, {threshold}"), &line);
        }
    }
    for &((pair, _), ref run) in pairs
        .iter()
        .filter(|((_, seed), _)| *seed == context.seeds[0])
    {
        let slope_point = |(name, (_, line)): (&&str, &(f64, Option<FittedLine>))| {
            DataPoint::from_values(
                format!("slope of {}", pair_name(pair)),
                *name,
                line.iter().map(|line| line.slope),
            )
        };
        points.extend(CELLS.iter().zip(&run.cells).map(slope_point));
    }
    points
}

fn slopes_figure(points: &[DataPoint]) -> ResultFigure {
    let series = [
        "slope within pairs, all 45",
        "slope between pairs",
        "slope, paper",
    ];
    let bars = BarChart {
        title: "Slope of IPC over shared bits".to_string(),
        y: Axis::linear("IPC per shared bit"),
        series: ["within pairs", "between pairs", "paper"]
            .map(str::to_string)
            .to_vec(),
        groups: bar_groups(points, &series),
        ..BarChart::default()
    };
    ResultFigure::bars("av-1-slopes", &bars)
}

fn overlap_figure(context: &ExperimentContext<'_>, pairs: &PairRuns) -> ResultFigure {
    let point = |((pair, _), run): &((PairIndices, u64), PairRun)| {
        let bits = run.cells[L2_MISS_CELL].0;
        let title = format!(
            "{}: {bits:.1} bits, IPC {:.2}",
            pair_name(*pair),
            run.instr_per_cycle
        );
        ChartPoint {
            title: Some(title),
            ..ChartPoint::new(bits, run.instr_per_cycle)
        }
    };
    let points = pairs
        .iter()
        .filter(|((_, seed), _)| *seed == context.seeds[0])
        .map(point)
        .collect();
    let chart = Chart {
        title: "Shared bits of the L2 miss vectors and IPC, one point a pair".to_string(),
        x: Axis::linear("bits shared, mean over samples (of 32)"),
        y: Axis::linear("IPC of both contexts"),
        series: vec![Series {
            points,
            mark: Mark::Points,
            ..Series::default()
        }],
        ..Chart::default()
    };
    ResultFigure::chart("av-1-pairs", &chart)
}

fn inter_thread_findings(context: &ExperimentContext<'_>, pairs: &PairRuns) -> [Finding; 2] {
    let inter_task_percent =
        |pair: &PairRun| 100.0 * pair.l2.inter_task as f64 / pair.l2.misses.max(1) as f64;
    let inter_task_share_of_warm = |pair: &PairRun| {
        let warm_misses = pair.l2.misses - pair.l2.cold;
        if warm_misses > 0 {
            100.0 * pair.l2.inter_task as f64 / warm_misses as f64
        } else {
            f64::NAN
        }
    };
    let mean_cold_percent = mean(
        pairs
            .by_seed()
            .map(|pair| 100.0 * pair.l2.cold as f64 / pair.l2.misses.max(1) as f64),
    );
    let mean_warm_share = |pairs: &[&PairRun]| {
        mean(
            pairs
                .iter()
                .map(|pair| inter_task_share_of_warm(pair))
                .filter(|share| share.is_finite()),
        )
    };
    let percent_of_references =
        |count: u64, pair: &PairRun| 100.0 * count as f64 / pair.l2.references.max(1) as f64;
    let (mut points, mut groups) = (Vec::new(), Vec::new());
    for &((pair, _), ref run) in pairs
        .iter()
        .filter(|((_, seed), _)| *seed == context.seeds[0])
    {
        let name = pair_name(pair);
        points.extend([
            pairs.point(pair, "L2 miss ratio, %", &name, |run| {
                percent_of_references(run.l2.misses, run)
            }),
            pairs.point(
                pair,
                "inter-thread share of misses, %",
                &name,
                inter_task_percent,
            ),
            pairs.point(
                pair,
                "inter-thread share without cold misses, %",
                &name,
                inter_task_share_of_warm,
            ),
        ]);
        let miss_counts = [
            run.l2.inter_task,
            run.l2.own + run.l2.coherence,
            run.l2.cold,
        ];
        let bars = miss_counts
            .map(|count| ChartBar::from(percent_of_references(count, run)))
            .to_vec();
        groups.push(BarGroup { name, bars });
    }
    let bars = BarChart {
        title: "L2 misses by cause, 45 pairs".to_string(),
        y: Axis::linear("misses, % of L2 references"),
        series: ["inter-thread", "the thread's own", "cold"]
            .map(str::to_string)
            .to_vec(),
        groups,
        is_stacked: true,
        size: Some((1180.0, 430.0)),
        ..BarChart::default()
    };
    let figure = ResultFigure::bars("av-7-causes", &bars);
    let miss_share_finding = Finding::declared("av-7-warm-misses", &pairs.per_seed(mean_warm_share))
    .with_points(points)
    .with_note(format!(
        "Which pairs the paper's Figure 1 shows is not stated: all 45 are taken. {mean_cold_percent:.1} % of the misses are cold ones (no \
         line had been there before), whose cause is not known: in the paper's 10^9 instructions of a pair few are, but \
         programs whose data are many times the cache touch little of it twice in the 240 million cycles of the full form, \
         and still less in the six of the quick one."
    ))
    .with_figure(figure);
    [
        miss_share_finding,
        Finding::declared("av-7-all-misses", &pairs.mean_per_seed(inter_task_percent)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do the slopes of Table 1 yield the figures that stand beside ours?
    #[test]
    fn the_papers_slopes_yield_the_papers_figures() {
        let slopes = PAPER_SLOPES.map(|(slope, _)| vec![slope]);
        assert!((excess_slopes_by_seed(&slopes)[0] - 0.128).abs() < 1e-9);
        assert!((steepness_ratios_by_seed(&slopes)[0] - 1.385).abs() < 1e-3);
        let without_fall = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6].map(|slope| vec![slope]);
        assert!(excess_slopes_by_seed(&without_fall)[0] < 0.0);
    }
}
