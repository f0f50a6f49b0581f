//! Pipelines: the profilers, predictor, policy and verifier between a machine's observations and
//! its plans.
//!
//! The same decision code has to run on a live host, on simulated machines and on recordings, and
//! the replay of a recording has to repeat its decisions. It does not if a host has one profiler
//! more, a predictor with another miss penalty, or a policy without the guard. So a pipeline is
//! built from one [`PipelineConfig`], which lists the profilers in order, the reference predictor,
//! the policy and the verifier around it, and is stored in the header of every run log.
//!
//! For example, a daemon wrote `run.jsonl` under `auto` with seed 7. `cachemate replay run.jsonl`
//! builds the pipeline from the header, feeds it the recorded windows, and compares each plan,
//! reason and forecast. With `--policy dio` only the policy is exchanged, and the answer is where
//! the plans differ; it is never how fast the programs would have been, because the recorded counts
//! belong to the recorded plans.
//!
//! # Invariants
//! - Equal configurations and observations give equal decisions.
//! - No other crate builds profilers or wraps policies (tidy checks it).
//! - Evidence that a policy or profiler needs and the machine does not provide is reported before
//!   the first window.
//! - No recorded miss count is presented as the result of another policy.

#![warn(missing_docs)]

mod evidence;
mod forecast;
mod oracle;
mod profilers;
mod replay;
mod standard;

use cachemate_auto::verifier::Verifier;
use cachemate_core::{
    ControlLoop, ControlLoopError, Machine, PipelineConfig, Policy, PolicyConfig, ProfileRecall,
    ProfilerChain, ProfilerConfig, RunHeader, WindowRecord,
};
use cachemate_papers::policies::{PolicyError, PolicyRegistry};
use cachemate_papers::reference_predictor::ReferencePredictor;
use cachemate_trace::RUN_LOG_VERSION;

pub use evidence::{UnavailableEvidence, missing_evidence};
pub use forecast::{forecast_plan, pair_forecast};
pub use replay::{ReplayError, ReplayExtent, ReplayMachine, ReplayedWindow, replay};
pub use standard::{
    CYCLE_COUNTED_INSTRUCTIONS, INTERVAL_COUNTED_INSTRUCTIONS, StandardPipeline,
    miss_penalty_of_machine, with_size_sweeps,
};

/// All policies: the papers', and `auto` with its half, `cache-sizing`.
pub const POLICIES: PolicyRegistry =
    PolicyRegistry(&[cachemate_papers::policies::ENTRIES, cachemate_auto::ENTRIES]);

/// The policy of a pipeline inside its verifier, with or without the guard.
pub type VerifiedPolicy = Verifier<Box<dyn Policy>>;

/// The control loop that a [`Pipeline`] starts on a machine.
pub type PipelineLoop<M> = ControlLoop<M, VerifiedPolicy>;

/// Profilers that run over recorded observations without a policy, for studies of a single method.
pub fn build_profilers(configs: &[ProfilerConfig]) -> ProfilerChain {
    chain_profilers(configs, None)
}

fn chain_profilers(
    configs: &[ProfilerConfig],
    recall: Option<Box<dyn ProfileRecall>>,
) -> ProfilerChain {
    let profilers = configs.iter().map(profilers::build_profiler);
    ProfilerChain::new(profilers.collect(), recall)
}

/// The profilers of a pipeline, whose profiles over recorded observations are those that its policy received.
pub fn build_policy_profilers(config: &PipelineConfig) -> ProfilerChain {
    chain_profilers(&config.profilers, recall_by_name(&config.policy.name))
}

/// The last step of profiling for the policy called `name`.
fn recall_by_name(name: &str) -> Option<Box<dyn ProfileRecall>> {
    Some(POLICIES.find(name)?.recall?())
}

/// Replaces the policy of a running loop, and sets the phase recall that the new policy requests.
pub fn replace_policy<M>(control_loop: &mut PipelineLoop<M>, name: String, policy: VerifiedPolicy) {
    control_loop.profiler_chain.recall = recall_by_name(&name);
    (control_loop.policy, control_loop.policy_name) = (policy, name);
}

/// A pipeline that is built and ready to start on a machine.
pub struct Pipeline {
    config: PipelineConfig,
    verified_policy: VerifiedPolicy,
    profiler_chain: ProfilerChain,
}

impl Pipeline {
    /// Builds the profilers, predictor, policy and verifier that the configuration names.
    ///
    /// # Errors
    /// The policy is not in the registry, or does not accept its parameters.
    pub fn build(config: PipelineConfig) -> Result<Self, PolicyError> {
        let PolicyConfig {
            name,
            parameters,
            seed,
        } = &config.policy;
        let policy = POLICIES.build(name, parameters, *seed)?;
        Ok(Self::with_policy(config, policy))
    }

    /// Builds a pipeline around a policy that is not in the registry, such as an experiment's own.
    pub fn with_policy(config: PipelineConfig, policy: Box<dyn Policy>) -> Self {
        let verified_policy = Verifier::new(policy, config.guard);
        Pipeline {
            profiler_chain: build_policy_profilers(&config),
            config,
            verified_policy,
        }
    }

    /// The configuration from which the pipeline was built.
    pub fn config(&self) -> &PipelineConfig {
        &self.config
    }

    /// First line of a run log: all that a replay needs besides the windows.
    pub fn build_run_header(&self, machine: &impl Machine) -> RunHeader {
        RunHeader {
            format: RUN_LOG_VERSION,
            topology: machine.topology().clone(),
            capabilities: machine.capabilities().clone(),
            pipeline: self.config.clone(),
        }
    }

    /// What the policy and the profilers request and this machine cannot provide, with remedies.
    pub fn missing_evidence(&self, machine: &impl Machine) -> Vec<UnavailableEvidence> {
        missing_evidence(
            &self.config.policy.name,
            &self.profiler_chain.profilers,
            machine.capabilities(),
        )
    }

    /// Starts a control loop on this machine, before its first window.
    pub fn start<M: Machine>(self, machine: M) -> PipelineLoop<M> {
        let Pipeline {
            config,
            verified_policy: decider,
            profiler_chain,
        } = self;
        let predictor = Box::new(ReferencePredictor {
            miss_penalty_cycles: config.predictor.miss_penalty_cycles,
        });
        ControlLoop::new(
            machine,
            profiler_chain,
            predictor,
            config.policy.name,
            decider,
            config.first_window,
        )
    }

    /// Runs until the machine ends, or until `on_window`, which receives every record, returns `false`. Returns the
    /// machine.
    pub fn run<M: Machine>(
        self,
        machine: M,
        mut on_window: impl FnMut(&mut M, WindowRecord) -> bool,
    ) -> Result<M, ControlLoopError> {
        let mut control_loop = self.start(machine);
        while let Some(record) = control_loop.step()? {
            if !on_window(&mut control_loop.machine, record) {
                break;
            }
        }
        Ok(control_loop.machine)
    }
}
