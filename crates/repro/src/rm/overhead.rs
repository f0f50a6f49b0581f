//! RM-5: the cost of measuring a curve in every phase, and the accuracy of logs that are short enough for short phases.
//!
//! A log is as long as the thesis's, or shorter if it would exceed 2 % of its phase. The cost is then bounded, so the
//! experiment tests the accuracy of curves from the shorter logs.

use serde::{Deserialize, Serialize};

use super::accuracy::{
    LOGGING_COLORS, LogLengths, MAX_LOG_ENTRIES, build_workload, capture_log, capture_program_log,
    curve_from_capture, measure_real_curve,
};
use super::solo::COLORS;
use crate::{DataPoint, ExperimentContext, Finding, Result, list_or_none};

/// Average phase lengths that the thesis measured (Table 5.5 d), in 10^9 cycles, of the programs in our table.
const THESIS_PHASE_LENGTHS: [(&str, f64); 19] = [
    ("ammp", 65.0),
    ("applu", 483.0),
    ("apsi", 6.0),
    ("art", 246.0),
    ("bzip2", 17.0),
    ("crafty", 249.0),
    ("equake", 150.0),
    ("gap", 224.0),
    ("gzip", 446.0),
    ("mcf", 11.0),
    ("mesa", 356.0),
    ("mgrid", 509.0),
    ("parser", 144.0),
    ("swim", 28.0),
    ("twolf", 518.0),
    ("vortex", 400.0),
    ("vpr", 25.0),
    ("libquantum", 1753.0),
    ("omnetpp", 1704.0),
];
/// Maximum share of a phase for tracing and computing.
const MAX_OVERHEAD_SHARE: f64 = 0.02;
/// Cycles per entry to compute a curve on one core at the machine's 1.5 GHz: bench group `curve` promises 5 ms for a
/// full log.
const COMPUTING_CYCLES_PER_ENTRY: f64 = 5e-3 * 1.5e9 / MAX_LOG_ENTRIES;

/// Cost of tracing one program.
#[derive(Serialize, Deserialize)]
struct TracingCost {
    program: String,
    phase_cycles: f64,
    /// Measured cycles for tracing, plus those for computing.
    cycles_per_entry: f64,
}

impl TracingCost {
    fn overhead_percent(&self, entry_count: f64) -> f64 {
        100.0 * entry_count * self.cycles_per_entry / self.phase_cycles
    }
    /// The number of entries that fit into the maximum share.
    fn affordable_entries(&self) -> f64 {
        MAX_LOG_ENTRIES
            .min((MAX_OVERHEAD_SHARE * self.phase_cycles / self.cycles_per_entry).floor())
    }
    fn is_log_cut(&self) -> bool {
        self.affordable_entries() < MAX_LOG_ENTRIES
    }
}

fn measure_tracing_cost(
    _: &ExperimentContext<'_>,
    &(program, giga_cycles, seed): &(&str, f64, u64),
) -> Result<TracingCost> {
    let workload = build_workload(program, seed)?;
    let log_capture = capture_program_log(
        &workload,
        LogLengths {
            warm_up_instr: 3e5,
            logged_instr: 1e5,
        },
        1.0,
    )?;

    let tracing_cycles_per_entry = log_capture.cost_ns * 1e-9 * workload.machine.hertz as f64
        / log_capture.entry_count() as f64;
    let cycles_per_entry = tracing_cycles_per_entry + COMPUTING_CYCLES_PER_ENTRY;
    Ok(TracingCost {
        program: program.to_string(),
        phase_cycles: giga_cycles * 1e9,
        cycles_per_entry,
    })
}

/// The distance of the curve from a cut log to the real one, relative to its allowance (2, or 5 %
/// of its maximum).
fn measure_cut_log_distance(
    context: &ExperimentContext<'_>,
    &(cost, seed, warm_up, colors): &(&TracingCost, u64, f64, &[u32]),
) -> Result<[f64; 2]> {
    context.report_progress(&format!(
        "RM-5: {} from {:.0} entries, seed {seed}",
        cost.program,
        cost.affordable_entries()
    ));

    let workload = build_workload(&cost.program, seed)?;
    let log_capture = capture_log(&workload, warm_up, cost.affordable_entries() as u32)?;
    let measured_curve = measure_real_curve(&workload, log_capture.from, log_capture.to, colors)?;
    let curve = curve_from_capture(false, &log_capture);
    let mean_distance = curve
        .and_then(|curve| measured_curve.mean_distance(&curve))
        .unwrap_or(f64::NAN);
    let max_miss_rate = measured_curve
        .points()
        .iter()
        .map(|&(_, rate)| rate)
        .fold(0.0, f64::max);
    Ok([
        mean_distance,
        mean_distance / (0.05 * max_miss_rate).max(2.0),
    ])
}

pub(super) fn overhead_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let programs_and_phases: &[(&'static str, f64)] =
        context.pick(&THESIS_PHASE_LENGTHS[2..3], &THESIS_PHASE_LENGTHS);
    let seed = context.seeds[0];
    let cost_inputs: Vec<(&str, f64, u64)> = programs_and_phases
        .iter()
        .map(|&(program, phase)| (program, phase, seed))
        .collect();
    let costs = context.run_all_stored(&cost_inputs, measure_tracing_cost)?;
    let cut_costs: Vec<&TracingCost> = costs.iter().filter(|cost| cost.is_log_cut()).collect();
    let (warm_up, colors) =
        context.pick((5e5, vec![4, 8, 12, COLORS]), (2e6, (1..=COLORS).collect()));

    let indices: Vec<usize> = (0..cut_costs.len()).collect();
    let inputs = |index: usize, seed| (cut_costs[index], seed, warm_up, colors.as_slice());
    let distances = context.run_cases(&indices, inputs, measure_cut_log_distance)?;
    let point = |(index, cost): (usize, &&TracingCost)| {
        distances.point(
            index,
            "distance, misses/1000 instructions",
            &cost.program,
            |distance| distance[0],
        )
    };
    let per_seed = distances.greatest_per_seed(|distance| distance[1]);
    let cut = Finding::declared("rm-5-cut-logs", &per_seed)
        .with_points(cut_costs.iter().enumerate().map(point).collect());
    Ok(vec![costs_finding(&costs, seed), cut])
}

fn costs_finding(costs: &[TracingCost], seed: u64) -> Finding {
    let worst_overhead = costs
        .iter()
        .map(|cost| cost.overhead_percent(cost.affordable_entries()))
        .fold(0.0, f64::max);
    let mut points = Vec::new();
    for cost in costs {
        points.push(DataPoint::from_values(
            "full log, %",
            &cost.program,
            [cost.overhead_percent(MAX_LOG_ENTRIES)],
        ));
        points.push(DataPoint::from_values(
            "log that the phase allows, %",
            &cost.program,
            [cost.overhead_percent(cost.affordable_entries())],
        ));
    }

    let cut_costs = costs.iter().filter(|cost| cost.is_log_cut());
    let cut_list = list_or_none(cut_costs.map(|cost| {
        format!(
            "{} {:.1} % (cut to {:.0} entries)",
            cost.program,
            cost.overhead_percent(MAX_LOG_ENTRIES),
            cost.affordable_entries()
        )
    }));

    Finding::declared("rm-5-tracing", &[(seed, worst_overhead)])
    .with_points(points)
    .with_note(format!(
        "Interrupt cost of the machine's description, {LOGGING_COLORS} colors; phase lengths are the thesis's (Table 5.5 d), \
         since the simulated programs' phases are scaled. A full log has 163 840 entries; of the phase it would take more \
         than 2 % for: {cut_list}. What the shorter logs are worth is the next result."
    ))
}
