//! Everything between a machine and a plan, built in one place for every machine.
//!
//! Problem: the same decision code has to run on a live host, on simulated machines and on recordings, and the replay
//! of a recording has to repeat its decisions. Method: everything is built from one [`PipelineConfig`], which the
//! header of every run log contains: profilers in order, the reference predictor, the policy, and the verifier around it.
//! Properties: equal configurations and observations give equal decisions; no other crate builds profilers or wraps
//! policies (tidy checks it); evidence that a policy or profiler needs and the machine does not provide is reported
//! before the first window.

#![warn(missing_docs)]

mod evidence;
mod forecast;
mod oracle;
mod profilers;
mod replay;
mod standard;

use cachemate_core::{
    ControlLoop, ControlLoopError, GuardConfig, Machine, Observation, PipelineConfig, Policy, PolicyConfig,
    ProfileRecall, Profiler, ProfilerConfig, Profiles, RunHeader, WindowRecord,
};
use cachemate_policy::policies::{self, PolicyError};
use cachemate_policy::reference_predictor::ReferencePredictor;
use cachemate_policy::verifier::Verifier;
use cachemate_trace::RUN_LOG_VERSION;

pub use evidence::{UnavailableEvidence, missing_evidence};
pub use forecast::{forecast_of, pair_forecast};
pub use replay::{Replay, ReplayError, ReplayedWindow, replay};
pub use standard::{
    CYCLE_COUNTED_INSTRUCTIONS, INTERVAL_COUNTED_INSTRUCTIONS, StandardPipeline, miss_penalty_of_machine,
    with_size_sweeps,
};

/// The policy of a pipeline under its verifier, with or without the guard.
pub type VerifiedPolicy = Verifier<Box<dyn Policy>>;

/// A loop over some machine, as pipelines start it.
pub type PipelineLoop<M> = ControlLoop<M, VerifiedPolicy>;

/// Profilers over recorded observations, for studies of a single method.
#[derive(Default)]
pub struct OfflineProfiler {
    profilers: Vec<Box<dyn Profiler>>,
    recall: Option<Box<dyn ProfileRecall>>,
    measured: Profiles,
    recalled: Option<Profiles>,
}

impl OfflineProfiler {
    /// Without observations so far.
    pub fn new(configs: &[ProfilerConfig]) -> Self {
        OfflineProfiler { profilers: configs.iter().map(profilers::build).collect(), ..OfflineProfiler::default() }
    }

    /// The profiles that a pipeline's policy saw.
    pub fn from_pipeline(config: &PipelineConfig) -> Self {
        OfflineProfiler {
            recall: policies::profile_recall_by_name(&config.policy.name),
            ..OfflineProfiler::new(&config.profilers)
        }
    }

    /// Takes in one more window, and returns the profiles after it.
    pub fn update(&mut self, observation: &Observation) -> &Profiles {
        self.profilers.iter_mut().for_each(|profiler| profiler.update(observation, &mut self.measured));
        self.recalled = self.recall.as_mut().and_then(|recall| recall.recall(observation, &self.measured));
        self.profiles()
    }

    /// The present profiles.
    pub fn profiles(&self) -> &Profiles {
        self.recalled.as_ref().unwrap_or(&self.measured)
    }
}

/// Replaces the policy of a running loop, with the recall that it takes.
pub fn replace_policy<M>(live: &mut PipelineLoop<M>, name: String, policy: VerifiedPolicy) {
    live.recall = policies::profile_recall_by_name(&name);
    (live.policy, live.policy_name) = (policy, name);
}

/// Everything between a machine and a plan, ready to start.
pub struct Pipeline {
    config: PipelineConfig,
    decider: VerifiedPolicy,
    profilers: Vec<Box<dyn Profiler>>,
}

/// A policy under its verifier, for a pipeline that continues while its policy is replaced.
pub fn verify(policy: Box<dyn Policy>, guard: Option<GuardConfig>) -> VerifiedPolicy {
    Verifier::new(policy, guard)
}

impl Pipeline {
    /// Builds everything that the configuration names.
    ///
    /// # Errors
    /// A policy that is not in the registry, or parameters that it does not take.
    pub fn build(config: PipelineConfig) -> Result<Self, PolicyError> {
        let PolicyConfig { name, parameters, seed } = &config.policy;
        let policy = policies::build(name, parameters, *seed)?;
        Ok(Self::with_policy(config, policy))
    }

    /// The same around a policy that is not in the registry, such as an experiment's own.
    pub fn with_policy(config: PipelineConfig, policy: Box<dyn Policy>) -> Self {
        let decider = verify(policy, config.guard);
        let profilers = config.profilers.iter().map(profilers::build).collect();
        Pipeline { config, decider, profilers }
    }

    /// The configuration that it was built from.
    pub fn config(&self) -> &PipelineConfig {
        &self.config
    }

    /// First line of a run log on this machine.
    pub fn header(&self, machine: &impl Machine) -> RunHeader {
        RunHeader {
            format: RUN_LOG_VERSION,
            topology: machine.topology().clone(),
            capabilities: machine.capabilities().clone(),
            pipeline: self.config.clone(),
        }
    }

    /// Evidence that the policy and the profilers request and this machine cannot provide, with remedies.
    pub fn missing_evidence(&self, machine: &impl Machine) -> Vec<UnavailableEvidence> {
        missing_evidence(&self.config.policy.name, &self.profilers, machine.capabilities())
    }

    /// A loop at its start.
    pub fn start<M: Machine>(self, machine: M) -> PipelineLoop<M> {
        let Pipeline { config, decider, profilers } = self;
        let predictor = Box::new(ReferencePredictor { miss_penalty_cycles: config.predictor.miss_penalty_cycles });
        let recall = policies::profile_recall_by_name(&config.policy.name);
        let mut fresh =
            ControlLoop::new(machine, profilers, predictor, config.policy.name, decider, config.first_window);
        fresh.recall = recall;
        fresh
    }

    /// Runs to the machine's end; `each` gets every record and ends the run with `false`. Returns the machine.
    ///
    /// # Errors
    /// As [`ControlLoop::step`].
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
