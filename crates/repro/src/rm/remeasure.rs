//! RM-5: does a change of phase make the policy measure again, in a run that it manages?
//!
//! A program with known phases shares the cache with another one, under the sizing policy behind the phase detector.
//! The experiment counts the boundaries after which a new trace was requested in time, and traces without a boundary.

use cachemate_core::{CacheLevel, CounterEvent, ProbeKind, TaskId, WindowRecord};
use cachemate_core::{PhaseParameters, ProfilerConfig};
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions};
use serde::{Deserialize, Serialize};

use super::alternating::{
    INSTRUCTION_SCALE, INTERVAL_INSTRUCTIONS, INTERVALS_PER_PHASE, alternating_program,
};
use crate::cp::{RunScale, chip_workload, sizing_policy, thesis_job};
use crate::setup::{build_pipeline, failed, run_under};
use crate::{ExperimentContext, Finding, Result, mean};

/// Two programs that are one program's phases in turn, and its co-runner.
type MeasuredMix = ([&'static str; 2], &'static str);

const MEASURED_MIXES: [MeasuredMix; 3] = [
    (["twolf", "milc"], "gzip"),
    (["mcf", "gzip"], "twolf"),
    (["gap", "art"], "vortex"),
];
/// Intervals after a boundary in which a new trace counts as its detection.
const MAX_INTERVALS_LATE: f64 = 2.0;
/// Entries of a trace: about the number of lines of the L2.
const TRACE_ENTRIES: u64 = 16_000;
/// Cycles between decisions: well below an interval, because windows are not split.
const DECISION_CYCLES: u64 = 50_000;

/// One managed run: detected and all boundaries, superfluous traces per boundary, and changes of the shares.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
struct BoundaryCounts {
    noticed: usize,
    boundaries: usize,
    without_boundary: usize,
    resized: usize,
}

/// The first program's instruction counts at which its traces were requested.
fn collect_trace_requests(records: &[WindowRecord]) -> Vec<f64> {
    let (mut instructions, mut last_probe, mut request_instructions) = (0.0, None, Vec::new());
    for record in records {
        let task = record
            .observation
            .tasks
            .iter()
            .find(|task| task.task == TaskId(0));
        instructions += task
            .and_then(|task| task.counts.get(CounterEvent::Instructions))
            .unwrap_or(0.0);
        for probe in &record.decision.plan.probes {
            let is_of_first_task = matches!(
                probe.kind,
                ProbeKind::MissTrace {
                    task: TaskId(0),
                    ..
                }
            );
            if is_of_first_task && last_probe != Some(probe.id) {
                request_instructions.push(instructions);
                last_probe = Some(probe.id);
            }
        }
    }
    request_instructions
}

fn count_boundaries(requests: &[f64], share_changes: usize, phase_count: usize) -> BoundaryCounts {
    let phase_instr = INTERVAL_INSTRUCTIONS * INTERVALS_PER_PHASE as f64;
    let intervals_after = |request_instr: f64, boundary: usize| {
        (request_instr - boundary as f64 * phase_instr) / INTERVAL_INSTRUCTIONS
    };
    // An interval that began before the boundary may end after it, so one interval before counts too.
    let is_in_time = |request_instr: f64, boundary: usize| {
        (-1.0..=MAX_INTERVALS_LATE).contains(&intervals_after(request_instr, boundary))
    };
    let noticed_boundaries = (1..phase_count)
        .filter(|&boundary| requests.iter().any(|&at| is_in_time(at, boundary)))
        .count();

    // The first trace is no detection.
    let superfluous_requests = requests
        .iter()
        .skip(1)
        .filter(|&&at| !(1..phase_count).any(|boundary| is_in_time(at, boundary)))
        .count();
    BoundaryCounts {
        noticed: noticed_boundaries,
        boundaries: phase_count - 1,
        without_boundary: superfluous_requests,
        resized: share_changes,
    }
}

fn run_managed(
    context: &ExperimentContext<'_>,
    &(programs, seed, phase_count): &(MeasuredMix, u64, usize),
) -> Result<BoundaryCounts> {
    let ([first, second], beside) = programs;
    context.report_progress(&format!(
        "RM-5: {first} then {second} beside {beside}, managed, seed {seed}"
    ));

    let phase_instr = INTERVAL_INSTRUCTIONS * INTERVALS_PER_PHASE as f64;
    let workload = chip_workload(
        vec![thesis_job(programs.1, seed)],
        2,
        RunScale {
            scale: INSTRUCTION_SCALE as u64,
            warm_up_cycles: 0,
            with_l3: true,
        },
        seed,
    )?;
    let changing_program = alternating_program(programs.0, seed, phase_instr as u64)?;
    let options = SimOptions {
        ends: Some(RunLimit::Cycles(u64::MAX / 8)),
        warm_up: None,
        ..workload.options.clone()
    };
    let co_runner = workload.jobs[0].program()?;
    let machine = SimMachine::new(
        &workload.machine,
        &options,
        vec![changing_program, co_runner],
    )
    .map_err(failed("machine"))?;
    let mut pipeline = sizing_policy(
        &workload,
        TRACE_ENTRIES,
        0,
        DECISION_CYCLES,
        "confirms = false",
    );
    let parameters = PhaseParameters::default();
    let phase_profiler = ProfilerConfig::Phases {
        level: CacheLevel::L2,
        parameters,
        interval_instructions: INTERVAL_INSTRUCTIONS,
    };
    pipeline.profilers.insert(0, phase_profiler);
    let (mut records, mut executed_instr): (Vec<WindowRecord>, f64) = (Vec::new(), 0.0);
    run_under(machine, build_pipeline(pipeline)?, |_, record| {
        let task = record
            .observation
            .tasks
            .iter()
            .find(|task| task.task == TaskId(0));
        executed_instr += task
            .and_then(|task| task.counts.get(CounterEvent::Instructions))
            .unwrap_or(0.0);
        records.push(record);
        executed_instr < phase_instr * phase_count as f64
    })
    .map_err(failed("cache-sizing"))?;
    let shares_in_plan = |record: &WindowRecord| record.decision.plan.shares.clone();
    let share_changes = records
        .windows(2)
        .filter(|pair| shares_in_plan(&pair[0]) != shares_in_plan(&pair[1]))
        .count();
    Ok(count_boundaries(
        &collect_trace_requests(&records),
        share_changes,
        phase_count,
    ))
}

pub(super) fn measure_noticed_boundaries(context: &ExperimentContext<'_>) -> Result<Finding> {
    let phase_count = context.pick(3, 6);
    let runs = context.pick(&MEASURED_MIXES[..1], &MEASURED_MIXES);
    let indices: Vec<usize> = (0..runs.len()).collect();
    let inputs = |index: usize, seed| (runs[index], seed, phase_count);
    let counted = context.run_cases(&indices, inputs, run_managed)?;
    let per_seed = counted.per_seed(|seed_counts| {
        let (noticed, boundaries) = seed_counts.iter().fold((0, 0), |sums, counts| {
            (sums.0 + counts.noticed, sums.1 + counts.boundaries)
        });
        100.0 * noticed as f64 / boundaries.max(1) as f64
    });
    let superfluous_share =
        |counts: &BoundaryCounts| counts.without_boundary as f64 / counts.boundaries as f64;
    let mut points = Vec::new();
    for (run_index, (changing_programs, co_runner)) in runs.iter().enumerate() {
        let label = format!(
            "{} then {}, beside {co_runner}",
            changing_programs[0], changing_programs[1]
        );
        points.push(
            counted.point(run_index, "boundaries noticed, %", &label, |counts| {
                100.0 * counts.noticed as f64 / counts.boundaries as f64
            }),
        );
        points.push(counted.point(
            run_index,
            "traces without a boundary, per boundary",
            &label,
            superfluous_share,
        ));
        points.push(
            counted.point(run_index, "changes of the shares", label, |counts| {
                counts.resized as f64
            }),
        );
    }
    let superfluous_per_boundary: Vec<f64> = counted.all().map(superfluous_share).collect();
    Ok(Finding::declared("rm-5-measured-anew", &per_seed)
    .with_points(points)
    .with_time_scale(INSTRUCTION_SCALE)
    .with_note(format!(
        "Sizing policy behind the phase detector (miss rate, and what comes from the first level), beside another program. \
         Traces asked for without a boundary: {:.2} per boundary; the programs' own phases are among them.",
        mean(&superfluous_per_boundary),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are boundaries detected only by traces near them, and is the first trace not counted?
    #[test]
    fn boundaries_are_detected_only_by_traces_near_them() {
        let phase = INTERVAL_INSTRUCTIONS * INTERVALS_PER_PHASE as f64;
        let requests = [0.0, phase + INTERVAL_INSTRUCTIONS, 2.5 * phase];
        let expected = BoundaryCounts {
            noticed: 1,
            boundaries: 2,
            without_boundary: 1,
            resized: 4,
        };
        assert_eq!(count_boundaries(&requests, 4, 3), expected);
    }
}
