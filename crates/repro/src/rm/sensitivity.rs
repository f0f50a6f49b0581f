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
use crate::{
    DataPoint, ExperimentContext, Finding, ReproError, Result, ResultFigure, ResultTarget, mean,
};

const WAY_COUNT: u32 = 10;
const LINE_BYTES: u64 = 128;

/// A curve and the variation that produced it.
#[derive(Serialize, Deserialize)]
struct NamedCurve {
    name: String,
    #[serde(with = "encoding::curve")]
    curve: MissRateCurve,
}

/// All curves of one program and seed by study, each with the real one first.
#[derive(Serialize, Deserialize)]
struct SensitivityCurves {
    program: String,
    seed: u64,
    studies: Vec<(String, Vec<NamedCurve>)>,
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

fn thesis_curve(
    lines: &[u64],
    instructions: f64,
    warmup: Warmup,
    corrects_prefetches: bool,
) -> Option<MissRateCurve> {
    trace_curve(
        &MissLog {
            lines,
            code_positions: &[],
            line_bytes: LINE_BYTES,
            instructions,
            lost_accesses: None,
        },
        &all_sizes(),
        warmup,
        corrects_prefetches,
    )
}

fn log_survival_curve(lines: &[u64], instructions: f64) -> Option<MissRateCurve> {
    let trace = MissLog {
        lines,
        code_positions: &[],
        line_bytes: LINE_BYTES,
        instructions,
        lost_accesses: None,
    };
    survival_curve(&trace, &LogCounts::default(), &all_sizes())
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

fn curves_from_log(
    measured_curve: &MissRateCurve,
    traced: &TraceCapture,
) -> Option<Vec<(&'static str, Vec<NamedCurve>)>> {
    let (lines, instructions) = log_lines_and_instr(traced)?;
    let name_curve = |name: String, curve: Option<MissRateCurve>| {
        Some(NamedCurve {
            name,
            curve: curve?,
        })
    };

    let with_real = |other_curves: Vec<Option<NamedCurve>>| {
        let real_named_curve = NamedCurve {
            name: "real".to_string(),
            curve: measured_curve.clone(),
        };
        std::iter::once(Some(real_named_curve))
            .chain(other_curves)
            .collect::<Option<Vec<_>>>()
    };
    let log_part = |divisor: usize| {
        (
            &lines[..lines.len() / divisor],
            instructions / divisor as f64,
        )
    };

    let mut log_size_curves = Vec::new();
    for divisor in [16, 4, 1] {
        let (lines, instructions) = log_part(divisor);
        let form_name = |form: &str| format!("{form}, {} entries", lines.len());
        log_size_curves.push(name_curve(
            form_name("thesis"),
            thesis_curve(lines, instructions, Warmup::Automatic, true),
        ));
        log_size_curves.push(name_curve(
            form_name("survival"),
            log_survival_curve(lines, instructions),
        ));
    }

    let warmup_curve = |name: &str, warmup| {
        name_curve(
            name.to_string(),
            thesis_curve(lines, instructions, warmup, true),
        )
    };
    let warm_up_curves = vec![
        warmup_curve("until full", Warmup::Automatic),
        warmup_curve("half", Warmup::Half),
        warmup_curve("none", Warmup::Nothing),
    ];

    let sampled_curves = [1, 2, 4, 10].map(|nth| {
        let sampled_lines: Vec<u64> = lines.iter().copied().step_by(nth).collect();
        name_curve(
            format!("every {nth}. entry"),
            thesis_curve(&sampled_lines, instructions, Warmup::Automatic, true),
        )
    });

    let way_curves = [false, true].map(|folded| {
        let name = if folded {
            format!("{WAY_COUNT} ways")
        } else {
            "fully associative".to_string()
        };
        name_curve(name, curve_of_set_mapping(lines, instructions, folded))
    });
    Some(vec![
        ("log size", with_real(log_size_curves)?),
        ("warm-up", with_real(warm_up_curves)?),
        ("lost events", with_real(sampled_curves.into())?),
        ("associativity", with_real(way_curves.into())?),
    ])
}

/// Runs the program again on another machine or with other options.
fn run_and_measure_curves(
    workload: &Workload,
    name: &str,
    lengths: LogLengths,
    colors: &[u32],
) -> Result<[NamedCurve; 2]> {
    let log_capture = capture_program_log(workload, lengths, 1.0)?;
    let measured_curve = measure_real_curve(workload, log_capture.from, log_capture.to, colors)?;
    let computed_curve = log_lines_and_instr(&log_capture)
        .and_then(|(lines, instr)| thesis_curve(lines, instr, Warmup::Automatic, true));
    let calculated = computed_curve
        .ok_or_else(|| ReproError::Failed(name.to_string(), "an empty log".to_string()))?;

    Ok([
        NamedCurve {
            name: format!("real, {name}"),
            curve: measured_curve,
        },
        NamedCurve {
            name: format!("calculated, {name}"),
            curve: calculated,
        },
    ])
}

fn measure_curves(
    context: &ExperimentContext<'_>,
    &(program, seed, lengths, colors): &(&str, u64, LogLengths, &[u32]),
) -> Result<SensitivityCurves> {
    context.report_progress(&format!("RM-2, RM-3: {program}, seed {seed}"));

    let base_workload = build_workload(program, seed)?;
    let log_capture = capture_program_log(&base_workload, lengths, 1.0)?;
    let measured_curve =
        measure_real_curve(&base_workload, log_capture.from, log_capture.to, colors)?;
    let empty_log_error = || failed(program)("an empty log");
    let mut studies = curves_from_log(&measured_curve, &log_capture).ok_or_else(empty_log_error)?;
    let mut workload_without_prefetch = base_workload.clone();
    workload_without_prefetch.options.prefetch = false;
    let mut in_order_workload = base_workload.clone();
    in_order_workload.machine.pipeline = CoreModel::in_order(1);
    let prefetch_curves = run_and_measure_curves(&base_workload, "as it is", lengths, colors)?;
    let no_prefetch_curves = run_and_measure_curves(
        &workload_without_prefetch,
        "without prefetching",
        lengths,
        colors,
    )?;
    let out_of_order_curves =
        run_and_measure_curves(&base_workload, "out of order", lengths, colors)?;
    let in_order_curves = run_and_measure_curves(
        &in_order_workload,
        "one instruction at a time",
        lengths,
        colors,
    )?;
    studies.push((
        "prefetching",
        prefetch_curves
            .into_iter()
            .chain(no_prefetch_curves)
            .collect(),
    ));
    studies.push((
        "issue order",
        out_of_order_curves
            .into_iter()
            .chain(in_order_curves)
            .collect(),
    ));
    let studies = studies
        .into_iter()
        .map(|(study, curves)| (study.to_string(), curves))
        .collect();
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
    let studies = [
        "log size",
        "warm-up",
        "lost events",
        "associativity",
        "prefetching",
        "issue order",
    ];
    Ok(studies
        .iter()
        .map(|study| sensitivity_finding(&runs, study, context))
        .collect())
}

/// The mean over programs of the largest distance that one setting moves the calculated curve from
/// another.
fn sensitivity_finding(
    runs: &SeededRuns<&'static str, SensitivityCurves>,
    study: &str,
    context: &ExperimentContext<'_>,
) -> Finding {
    let (id, paper) = match study {
        "log size" => ("RM-2", "160 k entries are adequate (Fig. 5.10 a)"),
        "warm-up" => ("RM-2", "until the stack is full is adequate (Fig. 5.10 b)"),
        "lost events" => (
            "RM-2",
            "curves move down, shapes change at small sizes (Fig. 5.10 c)",
        ),
        "associativity" => (
            "RM-2",
            "10 ways against full: no material difference (Fig. 5.10 d)",
        ),
        "prefetching" => ("RM-3", "lowers real and calculated curves (Fig. 5.14)"),
        _ => (
            "RM-3",
            "one instruction at a time brings art's curve nearer (Fig. 5.15)",
        ),
    };

    let shift_of = |curves: &&SensitivityCurves| -> Option<f64> {
        let named_curves = &curves.studies.iter().find(|(name, _)| name == study)?.1;
        let calculated_curves: Vec<&NamedCurve> = named_curves
            .iter()
            .filter(|named_curve| !named_curve.name.starts_with("real"))
            .collect();
        let max_distance = |a: &&NamedCurve| {
            calculated_curves
                .iter()
                .filter_map(|b| a.curve.mean_distance(&b.curve))
                .fold(0.0, f64::max)
        };
        Some(
            calculated_curves
                .iter()
                .map(max_distance)
                .fold(0.0, f64::max),
        )
    };

    let per_seed = runs.per_seed(|curves| mean(curves.iter().filter_map(shift_of)));
    let title = format!("{study}: mean distance of the calculated curves that lie farthest apart");
    let finding = Finding::new(id, &title, paper, "misses/1000 instructions", ResultTarget::Shown, &per_seed)
        .with_points(sensitivity_points(runs, study))
        .with_note(
            "Curves are not shifted; of the real curve only the sizes that were run. Programs: as in the points.",
        );
    let first_seed_curves = runs.of_seed(context.seeds[0]);
    first_seed_curves
        .filter_map(|curves| study_figure(curves, study, id))
        .fold(finding, Finding::with_figure)
}

fn sensitivity_points(
    runs: &SeededRuns<&'static str, SensitivityCurves>,
    study: &str,
) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for curves in runs.by_seed() {
        for (_, named_curves) in curves.studies.iter().filter(|(name, _)| name == study) {
            for named_curve in named_curves {
                let series = format!(
                    "{}, seed {}: {}",
                    curves.program, curves.seed, named_curve.name
                );
                points.extend(named_curve.curve.points().iter().map(|&(size, rate)| {
                    DataPoint::from_values(
                        series.clone(),
                        format!("{:.0} colors", color_count(size)),
                        [rate],
                    )
                }));
            }
        }
    }
    points
}

fn study_figure(curves: &SensitivityCurves, study: &str, id: &str) -> Option<ResultFigure> {
    let (_, named_curves) = curves.studies.iter().find(|(name, _)| name == study)?;
    let series = named_curves.iter().map(|named_curve| Series {
        name: named_curve.name.clone(),
        points: named_curve
            .curve
            .points()
            .iter()
            .map(|&(size, rate)| ChartPoint::new(color_count(size), rate))
            .collect(),
        is_dashed: !named_curve.name.starts_with("real"),
        ..Series::default()
    });
    let chart = Chart {
        title: format!("{}: {study}", curves.program),
        x: Axis::linear("colors of 16"),
        y: Axis::linear("misses per 1000 instructions"),
        series: series.collect(),
        size: Some((520.0, 300.0)),
        ..Chart::default()
    };

    let name = format!(
        "{}-{}-{}",
        id.to_lowercase(),
        study.replace(' ', "-"),
        curves.program
    );
    Some(ResultFigure::chart(name, &chart))
}
