//! The one loop that connects the stages: observe, profile, decide, check, forecast, apply.
//!
//! Every stage is a trait or a plain function and knows none of the others, so that a host can be exchanged
//! for a simulator or a recording, and a policy for another one. The order is written down here, and that of
//! judging, deciding and ruling in the verifier around the policy. It has one subtlety: what a machine
//! refuses of a plan is known only after the plan was applied, so the machine reports it in the *next*
//! observation, where the policy reads it as part of what happened. A host that only observes takes the whole
//! plan for a proposal; its forecast is then compared with nothing, and policies read the plan that is in
//! force instead from [`View::plan_in_force`].
//!
//! For example, in window 41 the policy asks for two shares, and the second one is refused because
//! no class of service is free. Window 42 shows the first share in force and the second among the
//! refused items, and the forecast that was made for both is compared with the speeds of window 42,
//! unless CPUs went offline meanwhile.

use serde::{Deserialize, Serialize};

use crate::check::{PlanError, check_plan};
use crate::{
    Capabilities, CounterEvent, CpuSet, Decision, Estimate, Forecast, Machine, MachineError,
    Observation, PipelineConfig, Plan, Policy, Predictor, ProfilerChain, Profiles, PromiseReport,
    PromiseTracker, TaskId, TaskSample, Topology, View, WindowEnd, WindowLength,
};

/// The error of the last forecast for a task: the task, the forecast, and the measured value.
pub type ForecastError = (TaskId, Estimate, f64);

/// One window of the loop. A replay decides again from the observation and the CPUs online; the other fields verify it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WindowRecord {
    /// The observation of the window.
    pub observation: Observation,
    /// The decision that followed it, with its reasons.
    pub decision: Decision,
    /// The forecast under the plan, from the policy's model or the reference predictor; it is compared with the next
    /// window, unless the plan is only proposed, or CPUs, pauses or probes changed that window.
    pub forecast: Forecast,
    /// The state in force that the machine reported after it applied the plan.
    pub applied: crate::AppliedPlan,
    /// Errors of the forecast for this window; tasks without a forecast or a measurement are missing.
    pub forecast_errors_instr_per_cycle: Vec<ForecastError>,
    /// The state of every promise after this window; empty if no program has one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub promises: Vec<PromiseReport>,
    /// The online CPUs, if they differ from the window before (in the first window, from the header's topology).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub online: Option<CpuSet>,
}

/// First line of a recording: what a replay needs besides the records.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunHeader {
    /// Format of the log.
    pub format: u32,
    /// Topology of the machine, as policies see it.
    pub topology: Topology,
    /// The abilities of the machine.
    pub capabilities: Capabilities,
    /// The pipeline between the machine and the plan.
    pub pipeline: PipelineConfig,
}

/// The reason why a run stopped before its end.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ControlLoopError {
    /// The machine could not observe or act.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// A policy made an invalid plan: a bug in the policy.
    #[error("policy '{policy}' made an invalid plan in window {window}: {bad}")]
    Plan {
        /// The policy's name.
        policy: String,
        /// The number of the window after which the plan was made.
        window: u64,
        /// The invariant that the plan violates.
        bad: PlanError,
    },
}

/// A machine, a policy, and the pipeline between them.
pub struct ControlLoop<M, P> {
    /// The machine on which the tasks run.
    pub machine: M,
    /// Turns observations into profiles.
    pub profiler_chain: ProfilerChain,
    /// Predictor that the policy may query; it also forecasts the decisions of policies without a model.
    pub predictor: Box<dyn Predictor>,
    /// The policy.
    pub policy: P,
    /// Name for error messages and records.
    pub policy_name: String,
    /// The plan that was decided last; the machine may have refused parts of it, or take all of it for a proposal.
    pub plan: Plan,
    /// The forecast that the next window is compared with; empty before the first step and while a plan is only
    /// proposed.
    pub forecast: Forecast,
    /// Tracks the promises.
    promise_tracker: PromiseTracker,
    /// The CPUs that were online at the last refresh.
    online_cpus: CpuSet,
}

impl<M: Machine, P: Policy> ControlLoop<M, P> {
    /// Builds a loop at its start: empty profiles, and an idle plan with the given first window.
    pub fn new(
        machine: M,
        profiler_chain: ProfilerChain,
        predictor: Box<dyn Predictor>,
        policy_name: impl Into<String>,
        policy: P,
        first_window: WindowLength,
    ) -> Self {
        ControlLoop {
            online_cpus: machine.topology().online(),
            machine,
            profiler_chain,
            predictor,
            policy,
            policy_name: policy_name.into(),
            plan: Plan::idle(first_window),
            forecast: Forecast::default(),
            promise_tracker: PromiseTracker::default(),
        }
    }

    /// Runs one window through all stages; the only place that connects them. `None` if the run has ended.
    ///
    /// # Errors
    /// The machine's error, or a plan that violates an invariant of [`check_plan`]; that plan is not applied.
    pub fn step(&mut self) -> Result<Option<WindowRecord>, ControlLoopError> {
        let Some(observation) = self.machine.observe()? else {
            return Ok(None);
        };

        let changed_online_cpus = self.take_online_change();
        self.profiler_chain.update(&observation);
        let is_comparable =
            changed_online_cpus.is_none() && observation.end_reason != WindowEnd::HostChanged;
        let forecast_errors_instr_per_cycle = if is_comparable {
            compare_forecast(&self.forecast, &observation)
        } else {
            Vec::new()
        };

        let view = View {
            topology: self.machine.topology(),
            capabilities: self.machine.capabilities(),
            observation: &observation,
            profiles: self.profiler_chain.profiles(),
            previous_plan: &self.plan,
            predictor: self.predictor.as_ref(),
            verdicts: &(),
        };
        let mut decision = self.policy.decide(&view);
        check_plan(&decision.plan, &view).map_err(|bad| ControlLoopError::Plan {
            policy: self.policy_name.clone(),
            window: observation.window,
            bad,
        })?;

        let forecast = decision
            .forecast
            .take()
            .unwrap_or_else(|| self.predictor.forecast(&view, &decision.plan));
        let promises = self.promise_tracker.observe(
            &observation,
            view.profiles,
            self.machine.topology(),
            &self.plan,
            &decision,
        );
        let applied = self.machine.apply(&decision.plan)?;
        self.plan = decision.plan.clone();
        // The next window shows nothing about a placement that is not in force.
        let is_placed_so = !applied.is_only_proposed
            || self.plan.has_same_placement(&Plan::idle(self.plan.window));
        self.forecast = if is_placed_so {
            forecast.clone()
        } else {
            Forecast::default()
        };
        Ok(Some(WindowRecord {
            observation,
            decision,
            forecast,
            applied,
            forecast_errors_instr_per_cycle,
            promises,
            online: changed_online_cpus,
        }))
    }

    /// `None` if they are those of the window before.
    fn take_online_change(&mut self) -> Option<CpuSet> {
        let online = self.machine.topology().online();
        let changed_cpus = (online != self.online_cpus).then(|| online.clone());
        self.online_cpus = online;
        changed_cpus
    }
}

impl<M: Machine, P> ControlLoop<M, P> {
    /// After the last step, as the policy received them.
    pub fn profiles(&self) -> &Profiles {
        self.profiler_chain.profiles()
    }

    /// Forecasts another plan than the last one from the current profiles. This is for replays, in which the recorded
    /// plan is in force instead of the decided one. `previous_plan` is the plan that was in force in the window.
    pub fn forecast_under(
        &self,
        observation: &Observation,
        previous_plan: &Plan,
        plan: &Plan,
    ) -> Forecast {
        let view = View {
            topology: self.machine.topology(),
            capabilities: self.machine.capabilities(),
            observation,
            profiles: self.profiles(),
            previous_plan,
            predictor: self.predictor.as_ref(),
            verdicts: &(),
        };
        self.predictor.forecast(&view, plan)
    }
}

fn compare_forecast(expected: &Forecast, observation: &Observation) -> Vec<ForecastError> {
    let measured_speed = |task: &TaskSample| {
        let cycles = task
            .counts
            .get(CounterEvent::Cycles)
            .filter(|&cycles| cycles > 0.0)?;
        Some(task.counts.get(CounterEvent::Instructions)? / cycles)
    };
    observation
        .tasks
        .iter()
        .filter_map(|task| {
            Some((
                task.task,
                expected.tasks.get(&task.task)?.instr_per_cycle?,
                measured_speed(task)?,
            ))
        })
        .collect()
}
