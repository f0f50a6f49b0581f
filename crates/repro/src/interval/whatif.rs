//! Simulates a set of programs on a machine under a policy, with their slowdowns over time.

use std::sync::atomic::Ordering;

use cachemate_core::{Machine, MachineSpec, Plan, PolicyConfig};
use cachemate_interval::{IntervalJob, IntervalMachine, JobResults, Options};
use cachemate_pipeline::{INTERVAL_COUNTED_INSTRUCTIONS, Pipeline, StandardPipeline};

use crate::setup::failed;
use crate::{ExperimentContext, Result, store};

/// A query: programs on a machine whose behavior under policies is to be compared.
#[derive(Clone, Debug)]
pub struct WhatIfQuery {
    /// The machine on which the programs run.
    pub machine: MachineSpec,
    /// Jobs, in the order of the results.
    pub jobs: Vec<IntervalJob>,
    /// Nominal length of the run.
    pub length_ns: u64,
    /// Seed of the machine and the policy.
    pub seed: u64,
    /// Whether a guard rolls back decisions that reduce performance.
    pub has_guard: bool,
}

/// Maximum number of stretches of time for which slowdowns are kept.
const MAX_STRETCH_COUNT: u64 = 240;

/// The machine at its start with the standard pipeline around a policy. `policy_text` may include
/// parameters: `dio` or `dio:TOML`.
///
/// # Errors
/// The machine, a program or the policy is invalid.
pub fn start_interval_machine(
    spec: &MachineSpec,
    options: Options,
    jobs: Vec<IntervalJob>,
    policy_text: &str,
    has_guard: bool,
) -> Result<(IntervalMachine, Pipeline)> {
    store::allow_simulation()?;
    let (name, parameters) = policy_text.split_once(':').unwrap_or((policy_text, ""));
    let policy = PolicyConfig {
        name: name.to_string(),
        parameters: parameters.to_string(),
        seed: options.seed,
    };
    let mut machine = IntervalMachine::new(spec, options, jobs).map_err(failed("machine"))?;
    let standard_pipeline =
        StandardPipeline::for_simulation(policy, has_guard, spec, INTERVAL_COUNTED_INSTRUCTIONS);
    let pipeline = crate::setup::build_pipeline(
        standard_pipeline.for_machine(machine.topology(), machine.capabilities()),
    )?;
    machine.set_first_window(pipeline.config().first_window);
    Ok((machine, pipeline))
}

/// The query's machine at its start, and the pipeline of the policy. `policy_text` may include
/// parameters.
///
/// # Errors
/// The machine, a program or the policy is invalid.
fn start_query(query: &WhatIfQuery, policy_text: &str) -> Result<(IntervalMachine, Pipeline)> {
    let options = Options {
        seed: query.seed,
        length_ns: Some(query.length_ns),
        ..Options::default()
    };
    start_interval_machine(
        &query.machine,
        options,
        query.jobs.clone(),
        policy_text,
        query.has_guard,
    )
}

/// What a policy did to the programs of a query.
#[derive(Clone, PartialEq, Debug)]
pub struct QueryOutcome {
    /// Slowdown by job and stretch of time, all of equal length; `None` if the job did not run in it.
    pub slowdowns_over_time: Vec<Vec<Option<f64>>>,
    /// Totals by job.
    pub jobs: Vec<JobResults>,
    /// Plans per hour that changed a placement, a partition or a time share.
    pub changes_per_hour: f64,
    /// Machine time that probes and page moves consumed.
    pub overhead_seconds: f64,
}

/// Runs the query under one policy of the registry. `policy_text` may include parameters: `dio` or `dio:TOML`.
///
/// # Errors
/// The machine, a program or the policy is invalid.
pub fn run_query(
    context: &ExperimentContext<'_>,
    query: &WhatIfQuery,
    policy_text: &str,
) -> Result<QueryOutcome> {
    let (machine, pipeline) = start_query(query, policy_text)?;
    let stretch_ns = (query.length_ns / MAX_STRETCH_COUNT).max(1);
    let mut stretch_end_ns = stretch_ns;
    let mut slowdowns_over_time = vec![Vec::new(); query.jobs.len()];
    // By job, in the stretch so far: the time of its tasks, and the solo time of the work done in it.
    let mut stretch_sums = vec![(0.0, 0.0); query.jobs.len()];
    let mut close_stretch = |sums: &mut [(f64, f64)]| {
        for (row, sums) in slowdowns_over_time.iter_mut().zip(sums) {
            let (work_ns, solo_ns) = std::mem::take(sums);
            row.push((solo_ns > 0.0).then(|| work_ns / solo_ns));
        }
    };
    let (mut migration_ns, mut probe_ns, mut change_count) = (0, 0, 0u64);
    let mut previous_plan: Option<Plan> = None;
    let mut is_stretch_open = false;

    let machine = pipeline
        .run(machine, |machine, record| {
            migration_ns = record.applied.cost_ns;
            let probe_costs = record.observation.probe_results.iter();
            probe_ns += probe_costs
                .flat_map(|probe_result| &probe_result.cost_ns)
                .map(|(_, ns)| ns)
                .sum::<u64>();
            let elapsed_ns = record.observation.span.elapsed_ns as f64;
            for task in &record.observation.tasks {
                if let Some(job) = machine.job_of(task.task)
                    && let Some((slowdown, _)) = machine.task_slowdown(task.task)
                {
                    stretch_sums[job].0 += elapsed_ns;
                    stretch_sums[job].1 += elapsed_ns / slowdown;
                }
            }

            change_count += u64::from(
                previous_plan
                    .as_ref()
                    .is_some_and(|previous| plans_differ(previous, &record.decision.plan)),
            );
            previous_plan = Some(record.decision.plan);
            is_stretch_open = machine.now_ns() < stretch_end_ns;
            if !is_stretch_open {
                close_stretch(&mut stretch_sums);
                stretch_end_ns = (machine.now_ns() / stretch_ns + 1) * stretch_ns;
            }
            !context.stop.load(Ordering::Relaxed)
        })
        .map_err(failed(policy_text))?;
    if is_stretch_open {
        close_stretch(&mut stretch_sums);
    }

    let results = machine.results();
    Ok(QueryOutcome {
        slowdowns_over_time,
        jobs: results.jobs,
        changes_per_hour: change_count as f64 * 3600.0 / results.seconds.max(1e-9),
        overhead_seconds: (migration_ns + probe_ns) as f64 / 1e9,
    })
}

/// Whether the plans differ in placement, partitions or times. Windows and probes are ignored,
/// because they affect a program only briefly.
pub fn plans_differ(first_plan: &Plan, second_plan: &Plan) -> bool {
    first_plan.affinity != second_plan.affinity
        || first_plan.weights != second_plan.weights
        || first_plan.gangs != second_plan.gangs
        || first_plan.shares != second_plan.shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::quick_context;
    use crate::mean;
    use cachemate_interval::closed_form::{reusing_job, streaming_job};

    fn outcome_under(policy: &str) -> Result<QueryOutcome> {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let job = |index: usize| match index % 2 {
            0 => streaming_job(&machine, 0.02),
            _ => reusing_job("reuser", &machine, 0.8, 0.02),
        };
        let jobs = (0..4).map(job).collect();
        let query = WhatIfQuery {
            machine,
            jobs,
            length_ns: 120_000_000_000,
            seed: 1,
            has_guard: true,
        };
        run_query(&quick_context(), &query, policy)
    }

    /// Do slowdowns over time cover the whole run without a gap, agree with the totals, and repeat to the bit?
    #[test]
    fn slowdowns_over_time_cover_the_run_and_agree_with_the_totals() {
        let run = outcome_under("dio").unwrap();
        for (row, job) in run.slowdowns_over_time.iter().zip(&run.jobs) {
            assert!(row.len() > 50, "{}", row.len());
            let mean = mean(row.iter().map(|value| value.unwrap()));
            assert!(
                (mean / job.slowdown.unwrap() - 1.0).abs() < 0.05,
                "{mean} {job:?}"
            );
        }
        assert_eq!(run, outcome_under("dio").unwrap());
    }

    /// Is an unknown policy an error with its name?
    #[test]
    fn an_unknown_policy_is_named() {
        let error = outcome_under("dioo").unwrap_err().to_string();
        assert!(error.contains("dioo"), "{error}");
    }
}
