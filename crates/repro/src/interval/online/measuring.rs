//! INTERVAL-6: the cost of CASC's measurements (CASC-7 at nominal time).

use super::*;
use crate::niagara::{COPIES_PER_PROGRAM, KERNELS};
use crate::setup::load_machine;
use crate::{DataPoint, Finding};

const L2_BYTES: u64 = 192 << 10;
/// A threshold that is always met: all threads are measured repeatedly, and none is restricted (CASC 5.3.4).
const MEASURING_POLICY: &str =
    "casc:form = 'better'\nthreshold = 1000.0\nremeasure_every_ns = 250_000_000";

/// The findings of CASC-7 at nominal time: 18 threads on 8 contexts.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let seed = context.seeds[0];
    let mut machine = load_machine("niagara-2core")?;
    let last_cache = machine
        .caches
        .last_mut()
        .ok_or_else(|| failed("niagara-2core")("no cache"))?;
    last_cache.size_bytes = L2_BYTES;
    let programs = measure_programs(context, &KERNELS, &machine, seed)?;
    let jobs: Vec<IntervalJob> = (0..COPIES_PER_PROGRAM)
        .flat_map(|_| KERNELS.iter().map(|name| build_job(&programs, name, None)))
        .collect::<Result<_>>()?;

    let length_ns = context.pick(20_000_000_000, 300_000_000_000);
    let query = WhatIfQuery {
        length_ns,
        has_explicit_turns: true,
        ..build_query(context, &machine, jobs, seed)
    };

    let policies = ["default", MEASURING_POLICY];
    let runs_by_policy = context.run_all(&policies, |by| {
        context.report_progress(&format!(
            "INTERVAL-6: {}",
            by.split(':').next().unwrap_or(by)
        ));
        let run = run_query(context, &query, by)?;
        let never_ran_error = || failed(by)("a thread never ran");
        let slowdowns_on_cpu: Vec<f64> = run
            .jobs
            .iter()
            .map(|job| job.slowdown_on_cpu.ok_or_else(never_ran_error))
            .collect::<Result<_>>()?;
        let speeds = run.jobs.iter().filter_map(|job| Some(1.0 / job.slowdown?));
        Ok((
            mean(&slowdowns_on_cpu),
            speeds.sum::<f64>(),
            run.overhead_seconds,
        ))
    })?;
    let ((default_slowdown, _, _), (measuring_slowdown, _, measuring_cost)) =
        (runs_by_policy[0], runs_by_policy[1]);
    let single_point =
        |series: &str, at: &str, value: f64| DataPoint::from_values(series, at, [value]);
    let points = runs_by_policy
        .iter()
        .zip(["default", "measuring"])
        .flat_map(|((on_cpu, speedup, _), name)| {
            [
                single_point("time on a CPU over that alone, mean", name, *on_cpu),
                single_point("weighted speed-up", name, *speedup),
            ]
        });
    Ok(vec![
        Finding::declared("interval-6-measuring", &[(seed, 100.0 * (measuring_slowdown / default_slowdown - 1.0))])
        .with_points(points.collect())
        .with_note(format!(
            "192 KiB, the interval machine, turns one by one, windows as long as the policy asks for. Probes took {measuring_cost:.2} s of \
             the threads' time in {} s.",
            length_ns / 1_000_000_000
        )),
    ])
}
