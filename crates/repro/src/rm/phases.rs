//! RM-5: phase boundaries detected at every size, and the cost of measuring each phase.
//!
//! The thesis has no ground truth (it compares the boundaries found at one size with those found at another); here the
//! program changes its phase at chosen positions. A boundary counts as found if a detector reports it within one
//! interval. The miss rate has to reveal a boundary only if the phases differ by more than the detector's threshold at
//! that size; the first-level signal, which no allocation changes, has to reveal all.

use cachemate_core::PhaseParameters;
use cachemate_locality::phases::{PhaseDetector, PhaseEvent};
use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, ReferenceLine, Series};
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions};
use serde::{Deserialize, Serialize};

use super::alternating::{INTERVAL_INSTRUCTIONS, INTERVALS_A_PHASE, SCALE, alternating_program};
use super::solo::{MACHINE, MissTimeline, SoloMachine};
use crate::setup::{Workload, failed};
use crate::split_runs::Name;
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure, mean};

/// Pairs of phases: streams, chases, and working sets that fit at some sizes only.
const PAIRS: [[&str; 2]; 6] =
    [["mcf", "gzip"], ["twolf", "milc"], ["omnetpp", "crafty"], ["vpr", "swim"], ["soplex", "bzip2"], ["gap", "art"]];
const WINDOW_CYCLES: u64 = 50_000;

/// One pair at one size, interval by interval.
#[derive(Serialize, Deserialize)]
struct PhaseRun {
    pair: [Name; 2],
    seed: u64,
    colors: u32,
    misses: Vec<f64>,
    first_level: Vec<[f64; 3]>,
}

fn run_pair(pair: [&'static str; 2], seed: u64, colors: u32, phases: usize) -> Result<PhaseRun, ReproError> {
    let phase_instructions = INTERVAL_INSTRUCTIONS * INTERVALS_A_PHASE as f64;
    let workload = Workload::from_machine_name(MACHINE, Vec::new(), seed)?;
    let options = SimOptions { seed, ends: Some(RunLimit::Cycles(u64::MAX / 8)), ..SimOptions::default() };
    let program = alternating_program(pair, seed, phase_instructions as u64)?;
    let machine = SimMachine::new(&workload.machine, &options, vec![program]).map_err(failed("machine"))?;
    let mut alone = SoloMachine::measure(machine, colors, WINDOW_CYCLES)?;
    alone.run_to(phase_instructions * phases as f64 + INTERVAL_INSTRUCTIONS)?;
    let (misses, first_level) = rates_by_interval(&alone.timeline, phases * INTERVALS_A_PHASE);
    Ok(PhaseRun { pair: pair.map(Name), seed, colors, misses, first_level })
}

fn rates_by_interval(timeline: &MissTimeline, intervals: usize) -> (Vec<f64>, Vec<[f64; 3]>) {
    let interval_start = |at: usize| at as f64 * INTERVAL_INSTRUCTIONS;
    let misses =
        (0..intervals).filter_map(|at| timeline.misses_per_kilo_instr(interval_start(at), interval_start(at + 1)));
    let first_level =
        (0..intervals).filter_map(|at| timeline.first_level_per_kilo_instr(interval_start(at), interval_start(at + 1)));
    (misses.collect(), first_level.collect())
}

/// Intervals in which the detector reported a change.
fn detect_phases<S: AsRef<[f64]>>(signals: &[S]) -> Vec<usize> {
    let mut detector = PhaseDetector::new(PhaseParameters::default());
    let changed_index = |(at, signal): (usize, &S)| match detector.push(signal.as_ref()) {
        PhaseEvent::Changed { .. } => Some(at),
        _ => None,
    };
    signals.iter().enumerate().filter_map(changed_index).collect()
}

impl PhaseRun {
    fn boundaries(&self) -> impl Iterator<Item = usize> + '_ {
        (INTERVALS_A_PHASE..self.misses.len()).step_by(INTERVALS_A_PHASE)
    }

    /// Difference at this size between the settled phases on both sides of a boundary.
    fn differ_by(&self, boundary: usize) -> f64 {
        let settled_mpki = |start: usize| mean(&self.misses[start + INTERVALS_A_PHASE / 2..start + INTERVALS_A_PHASE]);
        (settled_mpki(boundary) - settled_mpki(boundary - INTERVALS_A_PHASE)).abs()
    }

    /// Number of boundaries found, and number of boundaries that had to be found.
    fn boundary_counts(&self, reported: &[usize], to_find: impl Fn(usize) -> bool) -> (usize, usize) {
        let expected_boundaries: Vec<usize> = self.boundaries().filter(|&boundary| to_find(boundary)).collect();
        let is_reported = |boundary: &&usize| reported.iter().any(|&at| at.abs_diff(**boundary) <= 1);
        (expected_boundaries.iter().filter(is_reported).count(), expected_boundaries.len())
    }

    fn detect_by_miss_rate(&self) -> (usize, usize) {
        let signals: Vec<[f64; 1]> = self.misses.iter().map(|&rate| [rate]).collect();
        self.boundary_counts(&detect_phases(&signals), |boundary| {
            self.differ_by(boundary) > PhaseParameters::default().threshold
        })
    }

    fn detect_by_first_level(&self) -> (usize, usize) {
        self.boundary_counts(&detect_phases(&self.first_level), |_| true)
    }

    /// Changes reported more than one interval from any boundary, per boundary.
    fn false_alarms(&self, reported: &[usize]) -> f64 {
        let is_false = |at: &&usize| self.boundaries().all(|boundary| at.abs_diff(boundary) > 1);
        reported.iter().filter(is_false).count() as f64 / self.boundaries().count() as f64
    }
}

fn found_share(runs: &[&PhaseRun], count_found: impl Fn(&PhaseRun) -> (usize, usize)) -> f64 {
    let (found_count, total) =
        runs.iter().map(|run| count_found(run)).fold((0, 0), |sum, counts| (sum.0 + counts.0, sum.1 + counts.1));
    100.0 * found_count as f64 / total as f64
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let colors: &[u32] = context.pick(&[2, 8, 16], &[1, 2, 4, 6, 8, 10, 12, 16]);
    // All pairs in a quick run too: two would give twelve boundaries, of which one is eight points.
    let pairs: &[[&'static str; 2]] = context.pick_of_three(&PAIRS[..2], &PAIRS, &PAIRS);
    let phases = context.pick(3, 5);
    let mut items = Vec::new();
    for &seed in &context.seeds {
        items.extend(pairs.iter().flat_map(|&pair| colors.iter().map(move |&colors| (pair, seed, colors))));
    }
    let runs = context.run_all_stored(
        module_path!(),
        &items,
        |item| format!("{item:?} {phases}"),
        |&(pair, seed, colors)| {
            context.report_progress(&format!("RM-5: {} then {}, {colors} colors, seed {seed}", pair[0], pair[1]));
            run_pair(pair, seed, colors, phases)
        },
    )?;
    let runs_of = |seed: u64| runs.iter().filter(|run| run.seed == seed).collect::<Vec<_>>();
    let per_seed = |count_found: fn(&PhaseRun) -> (usize, usize)| -> Vec<(u64, f64)> {
        context.per_seed(|seed| found_share(&runs_of(seed), count_found))
    };
    let rates = Finding::declared("rm-5-by-miss-rate", &per_seed(PhaseRun::detect_by_miss_rate))
        .with_points(phase_points(&runs, colors))
        .time_scale(SCALE)
        .with_note(note(&runs))
        .with_figure(draw_phases(&runs, colors));
    let insensitive =
        Finding::declared("rm-5-by-first-level", &per_seed(PhaseRun::detect_by_first_level)).time_scale(SCALE);
    let mut findings = vec![rates, insensitive, super::remeasure::remeasure_finding(context)?];
    findings.extend(super::overhead::overhead_findings(context)?);
    Ok(findings)
}

fn phase_points(runs: &[PhaseRun], colors: &[u32]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for &colors in colors {
        let at: Vec<&PhaseRun> = runs.iter().filter(|run| run.colors == colors).collect();
        let label = format!("{colors} colors");
        points.push(DataPoint::over_values(
            "by miss rate, %",
            label.clone(),
            &[found_share(&at, PhaseRun::detect_by_miss_rate)],
        ));
        points.push(DataPoint::over_values(
            "by first level, %",
            label,
            &[found_share(&at, PhaseRun::detect_by_first_level)],
        ));
    }
    points
}

fn note(runs: &[PhaseRun]) -> String {
    let rates: Vec<f64> = runs
        .iter()
        .map(|run| run.false_alarms(&detect_phases(&run.misses.iter().map(|&rate| [rate]).collect::<Vec<_>>())))
        .collect();
    let signals: Vec<f64> = runs.iter().map(|run| run.false_alarms(&detect_phases(&run.first_level))).collect();
    let missed = runs.iter().filter(|run| run.detect_by_miss_rate().0 < run.detect_by_miss_rate().1);
    let missed: Vec<String> =
        missed.map(|run| format!("{}+{} at {} colors", run.pair[0], run.pair[1], run.colors)).collect();
    let missed = if missed.is_empty() { "none".to_string() } else { missed.join(", ") };
    format!(
        "Phases of {INTERVALS_A_PHASE} intervals, w = 3, threshold 3, edges at half of it. Told where no boundary was, \
         per boundary: {:.2} by the miss rate, {:.2} by first-level signals (the programs' own phases and the refilling \
         of the cache are among them). Runs in which a boundary was missed by the miss rate: {missed}.",
        mean(&rates),
        mean(&signals),
    )
}

fn draw_phases(runs: &[PhaseRun], colors: &[u32]) -> ResultFigure {
    let shown_runs = runs.iter().filter(|run| run.pair == runs[0].pair && run.seed == runs[0].seed);
    let series = shown_runs.filter(|run| colors.contains(&run.colors)).map(|run| Series {
        name: format!("{} colors", run.colors),
        points: run.misses.iter().enumerate().map(|(at, &rate)| ChartPoint::new(at as f64, rate)).collect(),
        mark: Mark::Steps,
        ..Series::default()
    });
    let boundaries = runs[0].boundaries().map(|at| ReferenceLine::X { label: String::new(), at: at as f64 });
    let chart = Chart {
        title: format!("Miss rate over time, {} and {} in turn", runs[0].pair[0], runs[0].pair[1]),
        x: Axis::linear("intervals"),
        y: Axis::linear("misses per 1000 instructions"),
        series: series.collect(),
        references: boundaries.collect(),
        ..Chart::default()
    };
    ResultFigure::chart("rm-5-phases", &chart)
}
