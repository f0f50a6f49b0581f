//! Runs under a policy over equal work, stored by their workload and configuration.

use cachemate_core::{Decision, PipelineConfig};
use cachemate_pipeline::Pipeline;
use cachemate_sim::machine::ProgressSample;
use serde::Serialize;

use crate::error::{Result, failed};
use crate::run_request::{recordings_of, sources_of, workload_label};
use crate::setup::{build_pipeline, run_under};
use crate::store::{self, RunName};
use crate::work::{self, InstructionRange, WorkRun};
use crate::workload::Workload;

/// Everything that a run under a policy depends on, besides the sources.
#[derive(Serialize)]
struct SteeredInputs<'a> {
    workload: &'a Workload,
    work: &'a [InstructionRange],
    config: &'a PipelineConfig,
    recordings: Vec<String>,
}

/// Runs all jobs together, the n-th over the n-th work, under a policy of the registry.
pub fn run_together_under(
    workload: &Workload,
    work: &[InstructionRange],
    config: PipelineConfig,
) -> Result<WorkRun> {
    let recordings = recordings_of(workload);
    let sources = sources_of("steered", &recordings);
    let inputs = SteeredInputs {
        workload,
        work,
        config: &config,
        recordings,
    };
    let label = format!("{}, under {}", workload_label(workload), config.policy.name);
    let name = RunName::new("steered", label, sources, &inputs)?;
    store::find_or_make(name, || {
        run_together(workload, work, build_pipeline(config)?)
    })
}

/// Like [`run_together_under`] for any pipeline, without storing the result.
pub fn run_together(
    workload: &Workload,
    work: &[InstructionRange],
    pipeline: Pipeline,
) -> Result<WorkRun> {
    let machine = work::build_joint_machine(workload, work)?;
    let name = pipeline.config().policy.name.clone();
    let (mut decisions, mut progress_samples): (Vec<Decision>, Vec<ProgressSample>) =
        (Vec::new(), Vec::new());
    let results = run_under(machine, pipeline, |machine, record| {
        progress_samples.extend_from_slice(&machine.progress_samples()[progress_samples.len()..]);
        decisions.push(record.decision);
        true
    });

    work::summarize_run(
        workload,
        work,
        &progress_samples,
        results.map_err(failed(&name))?,
        decisions,
    )
}
