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

use super::alternating::{
    INSTRUCTION_SCALE, INTERVAL_INSTRUCTIONS, INTERVALS_PER_PHASE, alternating_program,
};
use super::solo::{MACHINE, MissTimeline, SoloMachine};
use crate::setup::{Workload, failed};
use crate::{DataPoint, ExperimentContext, Finding, Result, ResultFigure, list_or_none, mean};

/// Pairs of phases: streams, chases, and working sets that fit at some sizes only.
const PAIRS: [[&str; 2]; 6] = [
    ["mcf", "gzip"],
    ["twolf", "milc"],
    ["omnetpp", "crafty"],
    ["vpr", "swim"],
    ["soplex", "bzip2"],
    ["gap", "art"],
];
const WINDOW_CYCLES: u64 = 50_000;

/// One pair at one size, interval by interval.
#[derive(Serialize, Deserialize)]
struct PhaseRun {
    pair: [String; 2],
    seed: u64,
    colors: u32,
    misses: Vec<f64>,
    first_level: Vec<[f64; 3]>,
}

fn run_pair(
    context: &ExperimentContext<'_>,
    &(pair, seed, colors, phase_count): &([&'static str; 2], u64, u32, usize),
) -> Result<PhaseRun> {
    context.report_progress(&format!(
        "RM-5: {} then {}, {colors} colors, seed {seed}",
        pair[0], pair[1]
    ));

    let phase_instructions = INTERVAL_INSTRUCTIONS * INTERVALS_PER_PHASE as f64;
    let workload = Workload::from_machine_name(MACHINE, Vec::new(), seed)?;
    let options = SimOptions {
        seed,
        ends: Some(RunLimit::Cycles(u64::MAX / 8)),
        ..SimOptions::default()
    };
    let program = alternating_program(pair, seed, phase_instructions as u64)?;
    let machine =
        SimMachine::new(&workload.machine, &options, vec![program]).map_err(failed("machine"))?;
    let mut solo_machine = SoloMachine::from_machine(machine, colors, WINDOW_CYCLES)?;
    solo_machine
        .run_to_instruction(phase_instructions * phase_count as f64 + INTERVAL_INSTRUCTIONS)?;
    let (misses, first_level) =
        rates_by_interval(&solo_machine.timeline, phase_count * INTERVALS_PER_PHASE);
    Ok(PhaseRun {
        pair: pair.map(str::to_string),
        seed,
        colors,
        misses,
        first_level,
    })
}

fn rates_by_interval(timeline: &MissTimeline, interval_count: usize) -> (Vec<f64>, Vec<[f64; 3]>) {
    let start_instr_of = |at: usize| at as f64 * INTERVAL_INSTRUCTIONS;
    let mpki_by_interval = (0..interval_count).filter_map(|at| {
        timeline.misses_per_kilo_instr(start_instr_of(at), start_instr_of(at + 1))
    });
    let first_level_rates = (0..interval_count).filter_map(|at| {
        timeline.first_level_per_kilo_instr(start_instr_of(at), start_instr_of(at + 1))
    });
    (mpki_by_interval.collect(), first_level_rates.collect())
}

/// Intervals in which the detector reported a change.
fn detect_phases<S: AsRef<[f64]>>(signals: &[S]) -> Vec<usize> {
    let mut detector = PhaseDetector::new(PhaseParameters::default());
    let changed_interval = |(index, signal): (usize, &S)| match detector.push(signal.as_ref()) {
        PhaseEvent::Changed { .. } => Some(index),
        _ => None,
    };
    signals
        .iter()
        .enumerate()
        .filter_map(changed_interval)
        .collect()
}

impl PhaseRun {
    fn boundaries(&self) -> impl Iterator<Item = usize> + '_ {
        (INTERVALS_PER_PHASE..self.misses.len()).step_by(INTERVALS_PER_PHASE)
    }

    /// The difference at this size between the settled phases on both sides of a boundary.
    fn mpki_difference(&self, boundary: usize) -> f64 {
        let settled_mpki = |start: usize| {
            mean(&self.misses[start + INTERVALS_PER_PHASE / 2..start + INTERVALS_PER_PHASE])
        };
        (settled_mpki(boundary) - settled_mpki(boundary - INTERVALS_PER_PHASE)).abs()
    }

    /// The number of boundaries found, and number of boundaries that had to be found.
    fn boundary_counts(
        &self,
        reported_intervals: &[usize],
        must_be_found: impl Fn(usize) -> bool,
    ) -> (usize, usize) {
        let expected_boundaries: Vec<usize> = self
            .boundaries()
            .filter(|&boundary| must_be_found(boundary))
            .collect();
        let is_reported = |boundary: &&usize| {
            reported_intervals
                .iter()
                .any(|&interval| interval.abs_diff(**boundary) <= 1)
        };
        (
            expected_boundaries.iter().filter(is_reported).count(),
            expected_boundaries.len(),
        )
    }

    fn count_found_by_miss_rate(&self) -> (usize, usize) {
        let signals: Vec<[f64; 1]> = self.misses.iter().map(|&rate| [rate]).collect();
        self.boundary_counts(&detect_phases(&signals), |boundary| {
            self.mpki_difference(boundary) > PhaseParameters::default().threshold
        })
    }

    fn count_found_by_first_level(&self) -> (usize, usize) {
        self.boundary_counts(&detect_phases(&self.first_level), |_| true)
    }

    /// Changes reported more than one interval from any boundary, per boundary.
    fn false_alarms_per_boundary(&self, reported: &[usize]) -> f64 {
        let is_false = |index: &&usize| {
            self.boundaries()
                .all(|boundary| index.abs_diff(boundary) > 1)
        };
        reported.iter().filter(is_false).count() as f64 / self.boundaries().count() as f64
    }
}

fn found_percent(runs: &[&PhaseRun], count_found: impl Fn(&PhaseRun) -> (usize, usize)) -> f64 {
    let (found_count, total) = runs
        .iter()
        .map(|run| count_found(run))
        .fold((0, 0), |sum, counts| (sum.0 + counts.0, sum.1 + counts.1));
    100.0 * found_count as f64 / total as f64
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let colors: &[u32] = context.pick(&[2, 8, 16], &[1, 2, 4, 6, 8, 10, 12, 16]);
    // All pairs in a quick run too: two would give twelve boundaries, of which one is eight points.
    let pairs: &[[&'static str; 2]] = context.pick_by_length(&PAIRS[..2], &PAIRS, &PAIRS);
    let phase_count = context.pick(3, 5);
    let mut run_inputs = Vec::new();
    for &seed in &context.seeds {
        for &pair in pairs {
            run_inputs.extend(
                colors
                    .iter()
                    .map(|&colors| (pair, seed, colors, phase_count)),
            );
        }
    }
    let runs = context.run_all_stored(&run_inputs, run_pair)?;
    let runs_of = |seed: u64| {
        runs.iter()
            .filter(|run| run.seed == seed)
            .collect::<Vec<_>>()
    };
    let per_seed = |count_found: fn(&PhaseRun) -> (usize, usize)| -> Vec<(u64, f64)> {
        context.values_by_seed(|seed| found_percent(&runs_of(seed), count_found))
    };
    let miss_rate_finding = Finding::declared(
        "rm-5-by-miss-rate",
        &per_seed(PhaseRun::count_found_by_miss_rate),
    )
    .with_points(phase_points(&runs, colors))
    .with_time_scale(INSTRUCTION_SCALE)
    .with_note(describe_detection(&runs))
    .with_figure(phases_figure(&runs, colors));
    let first_level_finding = Finding::declared(
        "rm-5-by-first-level",
        &per_seed(PhaseRun::count_found_by_first_level),
    )
    .with_time_scale(INSTRUCTION_SCALE);
    let mut findings = vec![
        miss_rate_finding,
        first_level_finding,
        super::remeasure::measure_noticed_boundaries(context)?,
    ];
    findings.extend(super::overhead::overhead_findings(context)?);
    Ok(findings)
}

fn phase_points(runs: &[PhaseRun], colors: &[u32]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for &colors in colors {
        let runs_at_size: Vec<&PhaseRun> = runs.iter().filter(|run| run.colors == colors).collect();
        let label = format!("{colors} colors");
        points.push(DataPoint::from_values(
            "by miss rate, %",
            label.clone(),
            [found_percent(
                &runs_at_size,
                PhaseRun::count_found_by_miss_rate,
            )],
        ));
        points.push(DataPoint::from_values(
            "by first level, %",
            label,
            [found_percent(
                &runs_at_size,
                PhaseRun::count_found_by_first_level,
            )],
        ));
    }

    points
}

fn describe_detection(runs: &[PhaseRun]) -> String {
    let miss_rate_alarms: Vec<f64> = runs
        .iter()
        .map(|run| {
            run.false_alarms_per_boundary(&detect_phases(
                &run.misses.iter().map(|&rate| [rate]).collect::<Vec<_>>(),
            ))
        })
        .collect();
    let first_level_alarms: Vec<f64> = runs
        .iter()
        .map(|run| run.false_alarms_per_boundary(&detect_phases(&run.first_level)))
        .collect();

    let runs_with_misses = runs
        .iter()
        .filter(|run| run.count_found_by_miss_rate().0 < run.count_found_by_miss_rate().1);
    let missed_list = list_or_none(
        runs_with_misses
            .map(|run| format!("{}+{} at {} colors", run.pair[0], run.pair[1], run.colors)),
    );
    format!(
        "Phases of {INTERVALS_PER_PHASE} intervals, w = 3, threshold 3, edges at half of it. Told where no boundary was, \
         per boundary: {:.2} by the miss rate, {:.2} by first-level signals (the programs' own phases and the refilling \
         of the cache are among them). Runs in which a boundary was missed by the miss rate: {missed_list}.",
        mean(&miss_rate_alarms),
        mean(&first_level_alarms),
    )
}

fn phases_figure(runs: &[PhaseRun], colors: &[u32]) -> ResultFigure {
    let shown_runs = runs
        .iter()
        .filter(|run| run.pair == runs[0].pair && run.seed == runs[0].seed);
    let series = shown_runs
        .filter(|run| colors.contains(&run.colors))
        .map(|run| Series {
            name: format!("{} colors", run.colors),
            points: run
                .misses
                .iter()
                .enumerate()
                .map(|(interval, &rate)| ChartPoint::new(interval as f64, rate))
                .collect(),
            mark: Mark::Steps,
            ..Series::default()
        });

    let boundaries = runs[0].boundaries().map(|interval| ReferenceLine::X {
        label: String::new(),
        position: interval as f64,
    });
    let chart = Chart {
        title: format!(
            "Miss rate over time, {} and {} in turn",
            runs[0].pair[0], runs[0].pair[1]
        ),
        x: Axis::linear("intervals"),
        y: Axis::linear("misses per 1000 instructions"),
        series: series.collect(),
        references: boundaries.collect(),
        ..Chart::default()
    };
    ResultFigure::chart("rm-5-phases", &chart)
}
