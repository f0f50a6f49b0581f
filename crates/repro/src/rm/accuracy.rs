//! RM-1: curves from short logs compared with curves from running the program at every size.
//!
//! The real curve and the log cover the same stretch of the program, as the thesis's cover the same position in its run
//! (5.6.1). The stretch is as long as the log takes, so that the distance is the method's own error and not the
//! program's next phase. The program has 8 of 16 colors while it is logged.

use std::collections::BTreeMap;

use cachemate_core::{CacheLevel, ProfilerConfig, TaskId, TracedCache};
use cachemate_locality::curve::MissRateCurve;
use cachemate_pipeline::build_profilers;
use cachemate_report::figure::{Axis, Chart, ChartPoint, Series};
use cachemate_sim::kernels;
use serde::{Deserialize, Serialize};

use super::solo::{COLORS, MACHINE, SoloMachine, TraceCapture};
use crate::encoding;
use crate::setup::{Workload, WorkloadJob};
use crate::{DataPoint, ExperimentContext, Finding, Result, ResultFigure, mean};

/// Maximum length of the log (thesis Table 5.4).
pub const MAX_LOG_ENTRIES: f64 = 163_840.0;
/// Colors while the log is taken, as in the thesis.
pub const LOGGING_COLORS: u32 = 8;
/// Length of the short log as a fraction, to test how few entries suffice.
const SHORT_LOG_SHARE: f64 = 0.25;
const WINDOW_CYCLES: u64 = 100_000;

/// Lengths of all runs, in instructions of the program.
#[derive(Clone, Copy, Serialize)]
pub struct LogLengths {
    pub warm_up_instr: f64,
    pub logged_instr: f64,
}

/// One program with one seed.
#[derive(Serialize, Deserialize)]
pub struct CurveStudy {
    pub program: String,
    #[serde(with = "encoding::curve")]
    pub real: MissRateCurve,
    pub traced: TraceCapture,
    pub short: TraceCapture,
}

/// All are single-threaded.
pub fn studied_programs(quick: bool) -> Vec<&'static str> {
    let quick_names = ["twolf", "libquantum", "omnetpp", "art"];
    let single_threaded_names = kernels::programs()
        .filter(|program| program.threads == (1, 1))
        .map(|program| program.name.as_str());
    single_threaded_names
        .filter(|name| !quick || quick_names.contains(name))
        .collect()
}

pub fn traced_cache() -> TracedCache {
    TracedCache {
        level: CacheLevel::L2,
        size_bytes: size_bytes(COLORS),
        colors: COLORS,
        ways: 10,
        points: COLORS,
    }
}

/// Size of the L2 with this many colors.
pub fn size_bytes(colors: u32) -> u64 {
    1_966_080 * u64::from(colors) / u64::from(COLORS)
}

pub fn build_workload(program: &str, seed: u64) -> Result<Workload> {
    let mut workload =
        Workload::from_machine_name(MACHINE, vec![WorkloadJob::new(program, seed)], seed)?;
    workload.measured_cycles = u64::MAX / 8;
    Ok(workload)
}

/// Logs this many entries after the warm-up.
pub fn capture_log(
    workload: &Workload,
    warm_up_instr: f64,
    entry_count: u32,
) -> Result<TraceCapture> {
    let mut program = SoloMachine::start(workload, LOGGING_COLORS, WINDOW_CYCLES)?;
    program.run_to_instruction(warm_up_instr)?;
    program.trace_misses(entry_count)
}

/// Logs this many instructions of the program, but at most [`MAX_LOG_ENTRIES`] entries. A short first log determines
/// the number of entries.
pub fn capture_program_log(
    workload: &Workload,
    lengths: LogLengths,
    log_share: f64,
) -> Result<TraceCapture> {
    let mut program = SoloMachine::start(workload, LOGGING_COLORS, WINDOW_CYCLES)?;
    program.run_to_instruction(lengths.warm_up_instr)?;
    let misses = program.timeline.last_totals().first_level_misses
        / program.timeline.last_totals().instructions;
    let short_log =
        program.trace_misses((misses * lengths.logged_instr * 0.05).clamp(200.0, 4_000.0) as u32)?;
    let entries = log_share * short_log.entries_per_instr() * lengths.logged_instr;
    program.trace_misses(entries.clamp(500.0, MAX_LOG_ENTRIES * log_share) as u32)
}

/// The real curve of a stretch, from running the program at each of these colors.
pub fn measure_real_curve(
    workload: &Workload,
    start_instr: f64,
    end_instr: f64,
    colors: &[u32],
) -> Result<MissRateCurve> {
    let mut points = Vec::new();
    for &colors in colors {
        let mut program = SoloMachine::start(workload, colors, WINDOW_CYCLES)?;
        program.run_to_instruction(end_instr)?;
        let misses_per_kilo_instr = program
            .timeline
            .misses_per_kilo_instr(start_instr, end_instr)
            .unwrap_or(f64::NAN);
        points.push((size_bytes(colors), misses_per_kilo_instr));
    }
    MissRateCurve::new(points).map_err(crate::setup::failed("real curve"))
}

/// The curve that a profiler computes from a log, for all numbers of colors.
pub fn curve_from_capture(
    uses_thesis_method: bool,
    traced: &TraceCapture,
) -> Option<MissRateCurve> {
    let mut profiler = build_profilers(&[ProfilerConfig::MissTrace {
        cache: traced_cache(),
        follows_thesis: uses_thesis_method,
    }]);
    MissRateCurve::from_profile(
        profiler
            .update(&traced.seen)
            .get(&TaskId(0))?
            .misses_per_kilo_instr()?,
    )
    .ok()
}

fn study_program(
    context: &ExperimentContext<'_>,
    &(program, seed, lengths, colors): &(&str, u64, LogLengths, &[u32]),
) -> Result<CurveStudy> {
    context.report_progress(&format!("RM-1: {program}, seed {seed}"));

    let workload = build_workload(program, seed)?;
    let full_capture = capture_program_log(&workload, lengths, 1.0)?;
    let short_log = capture_program_log(&workload, lengths, SHORT_LOG_SHARE)?;
    let measured_curve = measure_real_curve(&workload, full_capture.from, full_capture.to, colors)?;
    Ok(CurveStudy {
        program: program.to_string(),
        real: measured_curve,
        traced: full_capture,
        short: short_log,
    })
}

/// The compared forms, each a separate profiler over the same kind of evidence.
const FORMS: [&str; 3] = ["survival", "survival, a quarter of the log", "thesis"];

impl CurveStudy {
    fn curve_of_form(&self, form: &str) -> Option<MissRateCurve> {
        match form {
            "survival" => curve_from_capture(false, &self.traced),
            "thesis" => curve_from_capture(true, &self.traced),
            _ => curve_from_capture(false, &self.short),
        }
    }

    fn distance_of_form(&self, form: &str) -> f64 {
        self.curve_of_form(form)
            .and_then(|curve| self.real.mean_distance(&curve))
            .unwrap_or(f64::NAN)
    }

    fn max_miss_rate(&self) -> f64 {
        self.real
            .points()
            .iter()
            .map(|&(_, rate)| rate)
            .fold(0.0, f64::max)
    }
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let lengths = context.pick(
        LogLengths {
            warm_up_instr: 5e5,
            logged_instr: 5e5,
        },
        LogLengths {
            warm_up_instr: 2e6,
            logged_instr: 2e6,
        },
    );
    let colors: Vec<u32> = context.pick(
        (1..=4).map(|index| 4 * index).collect(),
        (1..=COLORS).collect(),
    );
    let inputs = |program, seed| (program, seed, lengths, colors.as_slice());
    let runs = context.run_cases(&studied_programs(context.quick), inputs, study_program)?;
    let studies: Vec<&CurveStudy> = runs.by_seed().collect();
    let mean_distance =
        |form: &'static str| runs.mean_per_seed(|study| study.distance_of_form(form));
    let worst_ratio = runs.greatest_per_seed(|study| {
        study.distance_of_form("survival") / (0.05 * study.max_miss_rate()).max(2.0)
    });
    let other_form_finding = |form: &'static str| {
        Finding::declared_for("rm-1-other-form", &[form], &mean_distance(form))
    };
    let distance_finding = Finding::declared("rm-1-distance", &mean_distance("survival"))
        .with_points(distance_points(&studies))
        .with_note(describe_studies(&studies, lengths));
    // One figure per program, as in the thesis's Figure 5.8.
    let first = runs
        .of_seed(context.seeds[0])
        .map(curve_figure)
        .fold(distance_finding, Finding::with_figure);
    let worst_ratio_finding = Finding::declared("rm-1-farthest-program", &worst_ratio);
    Ok(vec![
        first,
        worst_ratio_finding,
        other_form_finding("survival, a quarter of the log"),
        other_form_finding("thesis"),
    ])
}

fn distance_points(studies: &[&CurveStudy]) -> Vec<DataPoint> {
    let mut distances: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    for study in studies {
        for form in FORMS {
            distances
                .entry((form, study.program.as_str()))
                .or_default()
                .push(study.distance_of_form(form));
        }
    }
    distances
        .into_iter()
        .map(|((form, program), values)| DataPoint::from_values(form, program, &values))
        .collect()
}

fn describe_studies(studies: &[&CurveStudy], lengths: LogLengths) -> String {
    let mut studies_by_distance = studies.to_vec();
    studies_by_distance.sort_by(|a, b| {
        b.distance_of_form("survival")
            .total_cmp(&a.distance_of_form("survival"))
    });
    let name = |study: &&CurveStudy| {
        format!(
            "{} {:.2}",
            study.program,
            study.distance_of_form("survival")
        )
    };
    let entries: Vec<f64> = studies
        .iter()
        .map(|study| study.traced.entry_count() as f64)
        .collect();

    format!(
        "All programs with one thread. Warm-up {:.1} M instructions, log and real curve over the {:.1} M after it or \
         163 840 entries (mean {:.0} entries); 8 of 16 colors while logging, curve through the rate counted there. \
         Farthest: {}.",
        lengths.warm_up_instr / 1e6,
        lengths.logged_instr / 1e6,
        mean(&entries),
        studies_by_distance
            .iter()
            .take(4)
            .map(name)
            .collect::<Vec<_>>()
            .join(", "),
    )
}

fn curve_figure(study: &CurveStudy) -> ResultFigure {
    let curve_series = |name: &str, curve: &MissRateCurve, is_dashed| Series {
        name: name.to_string(),
        points: curve
            .points()
            .iter()
            .map(|&(size, rate)| ChartPoint::new(color_count(size), rate))
            .collect(),
        is_dashed,
        ..Series::default()
    };
    let mut series = vec![curve_series("real", &study.real, false)];
    series.extend(
        FORMS
            .iter()
            .filter_map(|form| Some(curve_series(form, &study.curve_of_form(form)?, true))),
    );
    let chart = Chart {
        title: format!(
            "{}: {:.2} misses per 1000 instructions apart",
            study.program,
            study.distance_of_form("survival")
        ),
        x: Axis::linear("colors of 16"),
        y: Axis::linear("misses per 1000 instructions"),
        series,
        size: Some((440.0, 260.0)),
        ..Chart::default()
    };
    let name = format!("rm-1-{}", study.program);
    ResultFigure::chart(name, &chart)
}

pub fn color_count(size: u64) -> f64 {
    size as f64 / size_bytes(1) as f64
}
