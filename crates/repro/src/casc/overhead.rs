//! CASC-7 and CASC-8: the cost of measuring, and the results for identical threads.

use cachemate_core::CacheLevel;

use crate::niagara::{
    NiagaraPolicy, NiagaraSetting, SPEC_2000_PROGRAMS, TIME_SCALE, run_jobs, run_workload,
};
use crate::seeded_runs::SeededRuns;
use crate::setup::{Comparison, Workload, WorkloadJob};
use crate::{DataPoint, ExperimentContext, Finding, Result};

/// Inputs over which the cost of measuring is averaged for one seed. The paper's 63 minutes average over thousands of
/// measurements (CASC 5.3.4). A run here has one or two.
const INPUTS_PER_SEED: u64 = 6;

/// CASC 5.3.4 measures the cost on four processors with twelve SPEC CPU2000 programs. They share no cache, so no
/// schedule gains or loses by its groups.
const PROCESSOR_COUNT: u32 = 4;
const PROGRAM_COUNT: usize = 12;
/// CASC needs one cache whose groups it can measure. In this one the programs hardly meet. With this bandwidth they
/// hardly wait for one another.
const SPACIOUS_L2_KB: u64 = 48 << 10;
const AMPLE_BYTES_PER_CYCLE: f64 = 16.0;

/// The twelve programs on the four processors.
fn processors_workload(context: &ExperimentContext<'_>, seed: u64) -> Result<Workload> {
    let jobs = SPEC_2000_PROGRAMS[..PROGRAM_COUNT]
        .iter()
        .map(|kernel| WorkloadJob::new(kernel, seed))
        .collect();
    let setting = NiagaraSetting::new(SPACIOUS_L2_KB, seed, context);
    let mut workload = NiagaraSetting {
        bytes_per_cycle: Some(AMPLE_BYTES_PER_CYCLE),
        ..setting
    }
    .build_workload(jobs)?;
    let machine = &mut workload.machine;
    (machine.cores_per_package, machine.contexts_per_core) = (PROCESSOR_COUNT, 1);
    let l2_caches = machine
        .caches
        .iter_mut()
        .filter(|cache| cache.level == CacheLevel::L2);
    l2_caches.for_each(|cache| cache.shared_by_cores = PROCESSOR_COUNT);
    Ok(workload)
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let l2_kb = 192;
    // A threshold of 100 is always met, so no thread is restricted (CASC 5.3.4).
    let measuring_policy =
        NiagaraPolicy::literal_policy("threshold = 1000.0\nremeasure_every_ns = 250000000");
    let inputs: Vec<u64> =
        (0..context.pick_by_length(1, INPUTS_PER_SEED, INPUTS_PER_SEED)).collect();
    let measuring_gains = context.run_unstored_cases(&inputs, |input, seed| {
        let workload = processors_workload(context, seed + 1_000_000 * input)?;
        let run_under = |policy| run_workload(&workload, policy, SPACIOUS_L2_KB);
        let (measuring_run, default_run) = (
            run_under(&measuring_policy)?,
            run_under(&NiagaraPolicy::Default)?,
        );
        Ok(Comparison::compare(&measuring_run, &default_run))
    })?;
    let identical_gains = context.run_unstored_cases(&["twolf"], |kernel, seed| {
        let setting = NiagaraSetting::new(l2_kb, seed, context);
        let identical_jobs: Vec<WorkloadJob> = (0..18)
            .map(|index| WorkloadJob {
                name: format!("{kernel}-{index}"),
                ..WorkloadJob::new(kernel, 1_000 * seed)
            })
            .collect();
        let run_under = |policy| run_jobs(&setting, policy, &identical_jobs);
        let (managed_run, default_run) = (
            run_under(&NiagaraPolicy::better_policy(""))?,
            run_under(&NiagaraPolicy::Default)?,
        );
        Ok(Comparison::compare(&managed_run, &default_run))
    })?;
    let overhead_finding = Finding::declared(
        "casc-7-measuring",
        &measuring_gains
            .mean_per_seed(|gain| 100.0 * (1.0 - (1.0 + gain.contention_gain) * (1.0 + gain.busy_gain))),
    )
    .with_points(split_points("measuring", "four processors", &measuring_gains))
    .with_note(format!(
        "{PROGRAM_COUNT} SPEC CPU2000 programs on {PROCESSOR_COUNT} processors, in the mean of {} inputs for each seed: slower threads at equal \
         shares of time, and idle processors. Deciding is not simulated: the bench group 'policies' has its time.",
        inputs.len()
    ))
    .with_time_scale(TIME_SCALE as f64);
    let identical_threads_finding = Finding::declared(
        "casc-8-identical-threads",
        &identical_gains.mean_per_seed(|gain| 100.0 * gain.throughput_gain),
    )
    .with_points(split_points(
        "identical",
        &format!("{l2_kb} KB"),
        &identical_gains,
    ))
    .with_time_scale(TIME_SCALE as f64);
    Ok(vec![overhead_finding, identical_threads_finding])
}

/// Points of a gain and its parts, over all inputs and seeds.
fn split_points<C: PartialEq>(
    name: &str,
    at: &str,
    gains: &SeededRuns<C, Comparison>,
) -> Vec<DataPoint> {
    let parts: [(&str, fn(&Comparison) -> f64); 4] = [
        ("throughput gain %", |gain| gain.throughput_gain),
        ("of which mix %", |gain| gain.mix_gain),
        ("of which contention %", |gain| gain.contention_gain),
        ("busy gain %", |gain| gain.busy_gain),
    ];
    let point = |(title, value): (&str, fn(&Comparison) -> f64)| {
        DataPoint::from_values(
            format!("{name}: {title}"),
            at,
            gains.by_seed().map(|gain| 100.0 * value(gain)),
        )
    };
    parts.map(point).to_vec()
}
