//! RM-2 and RM-3: the effect of parameters and hardware on a calculated curve.
//!
//! As in the thesis (5.6.3 to 5.6.8): one setting is changed at a time, and curves are not shifted, so that vertical
//! offsets stay visible. RM-2 works on one log: parts of it, warm-ups, entries dropped, a set-associative model. RM-3
//! runs the program again without prefetching, or in order, for its real and its calculated curve.

use cachemate_core::{CoreModel, CounterEvent, ProbeEvidence};
use cachemate_locality::curve::{MissRateCurve, SetMapping, fold_to_ways};
use cachemate_locality::rapidmrc::{
    LogCounts, MissLog, Warmup, correct_repeats, survival_curve, trace_curve,
};
use cachemate_locality::stack::{DistanceHistogram, StackDistances};
use cachemate_report::figure::{Axis, Chart, ChartPoint, Series};
use serde::{Deserialize, Serialize};

use super::accuracy::{
    LogLengths, build_workload, capture_program_log, color_count, measure_real_curve, size_bytes,
};
use super::solo::{COLORS, TraceCapture};
use crate::encoding;
use crate::seeded_runs::SeededRuns;
use crate::setup::{Workload, failed};
use crate::{DataPoint, ExperimentContext, Finding, ReproError, Result, ResultFigure};

const WAY_COUNT: u32 = 10;
const LINE_BYTES: u64 = 128;

/// The studies, each with the name of its result.
const STUDIES: [(&str, &str); 6] = [
    ("log size", "rm-2-log-size"),
    ("warm-up", "rm-2-warm-up"),
    ("lost events", "rm-2-lost-events"),
    ("associativity", "rm-2-associativity"),
    ("prefetching", "rm-3-prefetching"),
    ("issue order", "rm-3-issue-order"),
];

/// A curve and the variation that produced it.
#[derive(Clone, Serialize, Deserialize)]
struct NamedCurve {
    name: String,
    #[serde(with = "encoding::curve")]
    curve: MissRateCurve,
}

impl NamedCurve {
    fn new(name: impl Into<String>, curve: MissRateCurve) -> Self {
        NamedCurve {
            name: name.into(),
            curve,
        }
    }

    fn is_calculated(&self) -> bool {
        !self.name.starts_with("real")
    }
}

/// The curves of one program and seed for each of [`STUDIES`].
#[derive(Serialize, Deserialize)]
struct SensitivityCurves {
    program: String,
    seed: u64,
    studies: Vec<Vec<NamedCurve>>,
}

fn all_sizes() -> Vec<u64> {
    (1..=COLORS).map(size_bytes).collect()
}

/// The log as the forms take it: lines, and the number of instructions covered.
fn log_lines_and_instr(traced: &TraceCapture) -> Option<(&[u64], f64)> {
    let Some(ProbeEvidence::Trace { lines, counts, .. }) = traced.evidence() else {
        return None;
    };
    Some((lines, counts.get(CounterEvent::Instructions)?))
}

fn miss_log(lines: &[u64], instructions: f64) -> MissLog<'_> {
    MissLog {
        lines,
        code_positions: &[],
        line_bytes: LINE_BYTES,
        instructions,
        lost_accesses: None,
    }
}

fn thesis_curve(lines: &[u64], instructions: f64, warmup: Warmup) -> Option<MissRateCurve> {
    trace_curve(&miss_log(lines, instructions), &all_sizes(), warmup, true)
}

/// The curve of a 10-way cache filled at random (Hill and Smith 1989), from the whole log without
/// warm-up.
fn curve_of_set_mapping(
    lines: &[u64],
    instructions: f64,
    is_folded: bool,
) -> Option<MissRateCurve> {
    let mut stack = StackDistances::new();
    stack.push(&correct_repeats(lines).0).ok()?;
    let histogram: DistanceHistogram = stack.finish().ok()?;
    let miss_rate_at = |size: &u64| {
        let size_lines = size / LINE_BYTES;
        let miss_count = if is_folded {
            *fold_to_ways(
                &histogram,
                size_lines / u64::from(WAY_COUNT),
                WAY_COUNT,
                SetMapping::Hashed,
            )?
            .last()?
        } else {
            histogram.misses_at(size_lines) as f64
        };
        Some((*size, 1000.0 * miss_count / instructions))
    };

    MissRateCurve::new(
        all_sizes()
            .iter()
            .map(miss_rate_at)
            .collect::<Option<Vec<_>>>()?,
    )
    .ok()
}

/// The first four of [`STUDIES`], each with the real curve first.
fn curves_from_log(
    measured_curve: &MissRateCurve,
    traced: &TraceCapture,
) -> Option<Vec<Vec<NamedCurve>>> {
    let (lines, instructions) = log_lines_and_instr(traced)?;
    let mut studies = vec![vec![NamedCurve::new("real", measured_curve.clone())]; 4];
    for divisor in [16, 4, 1] {
        let part = &lines[..lines.len() / divisor];
        let part_instr = instructions / divisor as f64;
        let survival = survival_curve(
            &miss_log(part, part_instr),
            &LogCounts::default(),
            &all_sizes(),
        );
        let forms = [
            ("thesis", thesis_curve(part, part_instr, Warmup::Automatic)),
            ("survival", survival),
        ];
        for (form, curve) in forms {
            let name = format!("{form}, {} entries", part.len());
            studies[0].push(NamedCurve::new(name, curve?));
        }
    }

    for (name, warmup) in [
        ("until full", Warmup::Automatic),
        ("half", Warmup::Half),
        ("none", Warmup::Nothing),
    ] {
        let curve = thesis_curve(lines, instructions, warmup)?;
        studies[1].push(NamedCurve::new(name, curve));
    }
    for nth in [1, 2, 4, 10] {
        let sampled_lines: Vec<u64> = lines.iter().copied().step_by(nth).collect();
        let curve = thesis_curve(&sampled_lines, instructions, Warmup::Automatic)?;
        studies[2].push(NamedCurve::new(format!("every {nth}. entry"), curve));
    }
    for (name, is_folded) in [
        ("fully associative".to_string(), false),
        (format!("{WAY_COUNT} ways"), true),
    ] {
        let curve = curve_of_set_mapping(lines, instructions, is_folded)?;
        studies[3].push(NamedCurve::new(name, curve));
    }
    Some(studies)
}

fn measure_curves(
    context: &ExperimentContext<'_>,
    &(program, seed, lengths, colors): &(&str, u64, LogLengths, &[u32]),
) -> Result<SensitivityCurves> {
    context.report_progress(&format!("RM-2, RM-3: {program}, seed {seed}"));

    let empty_log_error = || failed(program)("an empty log");
    let log_and_real_curve = |workload: &Workload| -> Result<(TraceCapture, MissRateCurve)> {
        let log = capture_program_log(workload, lengths, 1.0)?;
        let real_curve = measure_real_curve(workload, log.from, log.to, colors)?;
        Ok((log, real_curve))
    };
    let real_and_calculated = |(log, real_curve): &(TraceCapture, MissRateCurve), name: &str| {
        let calculated_curve = log_lines_and_instr(log)
            .and_then(|(lines, instr)| thesis_curve(lines, instr, Warmup::Automatic))
            .ok_or_else(empty_log_error)?;
        Ok::<_, ReproError>([
            NamedCurve::new(format!("real, {name}"), real_curve.clone()),
            NamedCurve::new(format!("calculated, {name}"), calculated_curve),
        ])
    };

    let base_workload = build_workload(program, seed)?;
    let mut workload_without_prefetch = base_workload.clone();
    workload_without_prefetch.options.prefetch = false;
    let mut in_order_workload = base_workload.clone();
    in_order_workload.machine.pipeline = CoreModel::in_order(1);

    let base_run = log_and_real_curve(&base_workload)?;
    let mut studies = curves_from_log(&base_run.1, &base_run.0).ok_or_else(empty_log_error)?;
    for (base_name, workload, name) in [
        ("as it is", workload_without_prefetch, "without prefetching"),
        (
            "out of order",
            in_order_workload,
            "one instruction at a time",
        ),
    ] {
        let changed_run = log_and_real_curve(&workload)?;
        studies.push(
            [
                real_and_calculated(&base_run, base_name)?,
                real_and_calculated(&changed_run, name)?,
            ]
            .concat(),
        );
    }
    Ok(SensitivityCurves {
        program: program.to_string(),
        seed,
        studies,
    })
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let lengths = context.pick(
        LogLengths {
            warm_up_instr: 3e5,
            logged_instr: 3e5,
        },
        LogLengths {
            warm_up_instr: 2e6,
            logged_instr: 2e6,
        },
    );
    let colors: Vec<u32> = context.pick_by_length(vec![16], vec![1, 8, 16], (1..=COLORS).collect());
    let programs: &[&'static str] = context.pick(&["twolf"], &["mcf", "swim", "art", "twolf"]);
    let inputs = |program, seed| (program, seed, lengths, colors.as_slice());
    let runs = context.run_cases(programs, inputs, measure_curves)?;
    Ok((0..STUDIES.len())
        .map(|study| sensitivity_finding(&runs, study, context))
        .collect())
}

/// The largest distance that one setting moves the calculated curve from another.
fn max_shift(curves: &[NamedCurve]) -> f64 {
    let calculated_curves = || curves.iter().filter(|curve| curve.is_calculated());
    calculated_curves()
        .flat_map(|a| calculated_curves().filter_map(|b| a.curve.mean_distance(&b.curve)))
        .fold(0.0, f64::max)
}

/// The mean over programs of the largest distance in one of [`STUDIES`].
fn sensitivity_finding(
    runs: &SeededRuns<&'static str, SensitivityCurves>,
    study: usize,
    context: &ExperimentContext<'_>,
) -> Finding {
    let mut points = Vec::new();
    for run in runs.by_seed() {
        for named_curve in &run.studies[study] {
            let series = format!("{}, seed {}: {}", run.program, run.seed, named_curve.name);
            points.extend(named_curve.curve.points().iter().map(|&(size, rate)| {
                let at = format!("{:.0} colors", color_count(size));
                DataPoint::from_values(series.clone(), at, [rate])
            }));
        }
    }

    let per_seed = runs.mean_per_seed(|run| max_shift(&run.studies[study]));
    let finding = Finding::declared(STUDIES[study].1, &per_seed).with_points(points);
    runs.of_seed(context.seeds[0])
        .map(|run| study_figure(run, study))
        .fold(finding, Finding::with_figure)
}

fn study_figure(run: &SensitivityCurves, study: usize) -> ResultFigure {
    let series = run.studies[study].iter().map(|named_curve| Series {
        name: named_curve.name.clone(),
        points: named_curve
            .curve
            .points()
            .iter()
            .map(|&(size, rate)| ChartPoint::new(color_count(size), rate))
            .collect(),
        is_dashed: named_curve.is_calculated(),
        ..Series::default()
    });
    let (title, name) = STUDIES[study];
    let chart = Chart {
        title: format!("{}: {title}", run.program),
        x: Axis::linear("colors of 16"),
        y: Axis::linear("misses per 1000 instructions"),
        series: series.collect(),
        size: Some((520.0, 300.0)),
        ..Chart::default()
    };
    ResultFigure::chart(format!("{name}-{}", run.program), &chart)
}
