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
    ControlLoop, ControlLoopError, Machine, Observation, PipelineConfig, Policy, PolicyConfig,
    ProfileRecall, Profiler, ProfilerConfig, Profiles, RunHeader, WindowRecord,
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
#[derive(Default)]
pub struct OfflineProfiler {
    profilers: Vec<Box<dyn Profiler>>,
    recall: Option<Box<dyn ProfileRecall>>,
    measured_profiles: Profiles,
    recalled_profiles: Option<Profiles>,
}

impl OfflineProfiler {
    /// Builds the profilers of these configurations, before any observation.
    pub fn new(configs: &[ProfilerConfig]) -> Self {
        OfflineProfiler {
            profilers: configs.iter().map(profilers::build_profiler).collect(),
            ..OfflineProfiler::default()
        }
    }

    /// Builds the same profilers as a pipeline, so that they return the profiles that its policy received.
    pub fn from_pipeline(config: &PipelineConfig) -> Self {
        OfflineProfiler {
            recall: recall_by_name(&config.policy.name),
            ..OfflineProfiler::new(&config.profilers)
        }
    }

    /// Passes one more window to the profilers, and returns the updated profiles.
    pub fn update(&mut self, observation: &Observation) -> &Profiles {
        self.profilers
            .iter_mut()
            .for_each(|profiler| profiler.update(observation, &mut self.measured_profiles));
        self.recalled_profiles = self
            .recall
            .as_mut()
            .and_then(|recall| recall.recall(observation, &self.measured_profiles));
        self.profiles()
    }

    /// After the last window, as the policy received them.
    pub fn profiles(&self) -> &Profiles {
        self.recalled_profiles
            .as_ref()
            .unwrap_or(&self.measured_profiles)
    }
}

/// The last step of profiling for the policy called `name`.
fn recall_by_name(name: &str) -> Option<Box<dyn ProfileRecall>> {
    Some(POLICIES.find(name)?.recall?())
}

/// Replaces the policy of a running loop, and sets the phase recall that the new policy requests.
pub fn replace_policy<M>(control_loop: &mut PipelineLoop<M>, name: String, policy: VerifiedPolicy) {
    control_loop.recall = recall_by_name(&name);
    (control_loop.policy, control_loop.policy_name) = (policy, name);
}

/// A pipeline that is built and ready to start on a machine.
pub struct Pipeline {
    config: PipelineConfig,
    verified_policy: VerifiedPolicy,
    profilers: Vec<Box<dyn Profiler>>,
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
        let profilers = config
            .profilers
            .iter()
            .map(profilers::build_profiler)
            .collect();
        Pipeline {
            config,
            verified_policy,
            profilers,
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
            &self.profilers,
            machine.capabilities(),
        )
    }

    /// Starts a control loop on this machine, before its first window.
    pub fn start<M: Machine>(self, machine: M) -> PipelineLoop<M> {
        let Pipeline {
            config,
            verified_policy: decider,
            profilers,
        } = self;
        let predictor = Box::new(ReferencePredictor {
            miss_penalty_cycles: config.predictor.miss_penalty_cycles,
        });
        let recall = recall_by_name(&config.policy.name);
        let mut control_loop = ControlLoop::new(
            machine,
            profilers,
            predictor,
            config.policy.name,
            decider,
            config.first_window,
        );
        control_loop.recall = recall;
        control_loop
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
