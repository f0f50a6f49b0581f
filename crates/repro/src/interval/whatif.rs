//! Simulates a set of programs on a machine under a policy, with their slowdowns over time.

use std::sync::atomic::Ordering;

use cachemate_core::{Machine, MachineSpec, Plan, PolicyConfig, WindowRecord};
use cachemate_interval::{IntervalJob, IntervalMachine, IntervalResults, Options};
use cachemate_pipeline::{INTERVAL_COUNTED_INSTRUCTIONS, Pipeline, StandardPipeline};

use crate::setup::failed;
use crate::{ExperimentContext, Result};

/// A query: programs on a machine whose behavior under policies is to be compared.
#[derive(Clone, Debug)]
pub struct WhatIfQuery {
    /// The machine on which the programs run.
    pub machine: MachineSpec,
    /// Jobs, in the order of the slowdowns.
    pub jobs: Vec<IntervalJob>,
    /// Nominal length of the run.
    pub length_ns: u64,
    /// Seed of the machine and the policy.
    pub seed: u64,
    /// Whether each turn is simulated, instead of the average over turns.
    pub has_explicit_turns: bool,
    /// Whether a guard rolls back decisions that reduce performance.
    pub has_guard: bool,
}

/// Maximum number of stretches of a run.
const MAX_STRETCH_COUNT: u64 = 240;

/// The standard pipeline around a policy on the interval machine.
///
/// # Errors
/// The policy is unknown, or does not accept the parameters.
pub fn build_interval_pipeline(
    machine: &IntervalMachine,
    spec: &MachineSpec,
    policy: PolicyConfig,
    has_guard: bool,
) -> Result<Pipeline> {
    let standard_pipeline =
        StandardPipeline::for_simulation(policy, has_guard, spec, INTERVAL_COUNTED_INSTRUCTIONS);
    crate::setup::build_pipeline(
        standard_pipeline.for_machine(machine.topology(), machine.capabilities()),
    )
}

/// Splits `dio` or `dio:TOML` into the name and the TOML.
fn name_and_parameters(policy: &str) -> (&str, &str) {
    policy.split_once(':').unwrap_or((policy, ""))
}

/// The query's machine at its start, and the pipeline of the policy. `policy_text` may include
/// parameters.
///
/// # Errors
/// The machine, a program or the policy is invalid.
pub fn start_query(query: &WhatIfQuery, policy_text: &str) -> Result<(IntervalMachine, Pipeline)> {
    let (policy, parameters) = name_and_parameters(policy_text);
    let config = PolicyConfig {
        name: policy.to_string(),
        parameters: parameters.to_string(),
        seed: query.seed,
    };
    let options = Options {
        seed: query.seed,
        has_explicit_turns: query.has_explicit_turns,
        length_ns: Some(query.length_ns),
        ..Options::default()
    };
    let mut machine = IntervalMachine::new(&query.machine, options, query.jobs.clone())
        .map_err(failed("machine"))?;
    let policy_pipeline =
        build_interval_pipeline(&machine, &query.machine, config, query.has_guard)?;
    machine.set_first_window(policy_pipeline.config().first_window);
    Ok((machine, policy_pipeline))
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
    let mut slowdowns = SlowdownRecorder::new(query);
    let machine = pipeline
        .run(machine, |machine, record| {
            slowdowns.add_window(machine, &record);
            !context.stop.load(Ordering::Relaxed)
        })
        .map_err(failed(policy_text))?;
    Ok(slowdowns.into_outcome(&machine))
}

/// What a run under one policy showed.
#[derive(Clone, PartialEq, Debug)]
pub struct QueryOutcome {
    /// By job, the slowdown relative to running alone in each stretch of equal length; `None` if the job did not run in it.
    pub slowdowns: Vec<Vec<Option<f64>>>,
    /// The machine's own results over the whole run.
    pub results: IntervalResults,
    /// Plans per hour that changed a placement, a partition or a time share.
    pub changes_per_hour: f64,
    /// Machine time that probes and page moves consumed.
    pub overhead_seconds: f64,
}

impl QueryOutcome {
    /// The slowdowns of a job in the last quarter of the stretches, when the policy has settled.
    pub fn settled_slowdowns(&self, job: usize) -> Vec<f64> {
        let row = &self.slowdowns[job];
        row[row.len() * 3 / 4..].iter().copied().flatten().collect()
    }
}

/// Sums within one stretch of time, by job.
#[derive(Clone, Copy, Default)]
struct StretchSums {
    /// Solo time of the work done in `work_ns`.
    solo_ns: f64,
    work_ns: f64,
}

struct SlowdownRecorder {
    stretch_ns: u64,
    stretch_end_ns: u64,
    stretch_start_ns: u64,
    stretch_sums: Vec<StretchSums>,
    slowdowns: Vec<Vec<Option<f64>>>,
    previous_plan: Option<Plan>,
    change_count: u32,
    /// Program time spent on page moves so far, and on probes.
    migration_ns: u64,
    probe_ns: u64,
}

impl SlowdownRecorder {
    fn new(query: &WhatIfQuery) -> Self {
        let stretch_ns = (query.length_ns / MAX_STRETCH_COUNT).max(1);
        SlowdownRecorder {
            stretch_ns,
            stretch_end_ns: stretch_ns,
            stretch_start_ns: 0,
            stretch_sums: vec![StretchSums::default(); query.jobs.len()],
            slowdowns: vec![Vec::new(); query.jobs.len()],
            previous_plan: None,
            change_count: 0,
            migration_ns: 0,
            probe_ns: 0,
        }
    }

    fn add_window(&mut self, machine: &IntervalMachine, record: &WindowRecord) {
        self.migration_ns = record.applied.cost_ns;
        let probe_results = record.observation.probe_results.iter();
        self.probe_ns += probe_results
            .flat_map(|probe_result| &probe_result.cost_ns)
            .map(|(_, ns)| ns)
            .sum::<u64>();

        let elapsed_ns = record.observation.span.elapsed_ns as f64;
        for task in &record.observation.tasks {
            let slowdown = machine.task_slowdown(task.task);
            if let (Some(job), Some((slowdown, _))) = (machine.job_of(task.task), slowdown) {
                self.stretch_sums[job].solo_ns += elapsed_ns / slowdown;
                self.stretch_sums[job].work_ns += elapsed_ns;
            }
        }

        let plan = &record.decision.plan;
        let previous_plan = self.previous_plan.replace(plan.clone());
        if previous_plan.is_some_and(|previous| plans_differ(&previous, plan)) {
            self.change_count += 1;
        }
        if machine.now_ns() >= self.stretch_end_ns {
            self.close_stretch(machine.now_ns());
        }
    }

    fn close_stretch(&mut self, now_ns: u64) {
        for (row, sums) in self.slowdowns.iter_mut().zip(&mut self.stretch_sums) {
            let sums = std::mem::take(sums);
            row.push((sums.solo_ns > 0.0).then(|| sums.work_ns / sums.solo_ns));
        }
        self.stretch_start_ns = now_ns;
        self.stretch_end_ns = (now_ns / self.stretch_ns + 1) * self.stretch_ns;
    }

    fn into_outcome(mut self, machine: &IntervalMachine) -> QueryOutcome {
        if machine.now_ns() > self.stretch_start_ns {
            self.close_stretch(machine.now_ns());
        }
        let results = machine.results();
        QueryOutcome {
            slowdowns: self.slowdowns,
            changes_per_hour: f64::from(self.change_count) * 3600.0 / results.seconds.max(1e-9),
            results,
            overhead_seconds: (self.migration_ns + self.probe_ns) as f64 / 1e9,
        }
    }
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
    use cachemate_interval::closed_form::{reusing_job, streaming_job};

    fn test_query() -> WhatIfQuery {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let job = |index: usize| match index % 2 {
            0 => streaming_job(&machine, 0.02),
            _ => reusing_job("reuser", &machine, 0.8, 0.02),
        };
        let jobs = (0..4).map(job).collect();
        WhatIfQuery {
            machine,
            jobs,
            length_ns: 120_000_000_000,
            seed: 1,
            has_explicit_turns: false,
            has_guard: true,
        }
    }

    /// Do the slowdowns cover the whole run, agree with the machine's own mean, and repeat to the bit?
    #[test]
    fn slowdowns_cover_the_run_and_agree_with_the_machine() {
        let query = test_query();
        let run = || run_query(&quick_context(), &query, "dio").unwrap();
        let outcome = run();
        let jobs = &outcome.results.jobs;
        assert_eq!(outcome.slowdowns.len(), jobs.len());
        for (row, job) in outcome.slowdowns.iter().zip(jobs) {
            assert!(row.len() > 50, "{}", row.len());
            let mean = row.iter().map(|value| value.unwrap()).sum::<f64>() / row.len() as f64;
            let ratio = mean / job.slowdown.unwrap();
            assert!((ratio - 1.0).abs() < 0.05, "{mean} {job:?}");
        }
        assert_eq!(outcome, run());
    }

    /// Is an unknown policy an error with its name?
    #[test]
    fn an_unknown_policy_is_named() {
        let error = run_query(&quick_context(), &test_query(), "dioo")
            .unwrap_err()
            .to_string();
        assert!(error.contains("dioo"), "{error}");
    }
}
