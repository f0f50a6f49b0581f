//! The one loop in which the stages meet: observe, profile, decide, check, forecast, apply, record.

use serde::{Deserialize, Serialize};

use crate::check::{PlanError, check_plan};
use crate::{
    Capabilities, CounterEvent, CpuSet, Decision, Estimate, Forecast, Machine, MachineError, Observation,
    PipelineConfig, Plan, Policy, Predictor, Profiler, Profiles, PromiseReport, PromiseTracker, RefusedItem, TaskId,
    TaskSample, Topology, View, WindowEnd, WindowLength,
};

/// How far off the last forecast was; task, forecast, measured.
pub type ForecastError = (TaskId, Estimate, f64);

/// One window of the loop: its observation, from which a replay decides again, and the other fields, which check the
/// replay.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WindowRecord {
    /// The observation of the window.
    #[serde(alias = "seen")]
    pub observation: Observation,
    /// The decision that followed it, with its reasons.
    pub decision: Decision,
    /// Forecast by the reference predictor, under the plan; compared with the next window only as far as the plan
    /// holds there.
    pub forecast: Forecast,
    /// The state in force that the machine reported after it applied the plan.
    pub applied: crate::AppliedPlan,
    /// How far off the forecast for this window was; tasks without a forecast or a measurement are missing.
    #[serde(alias = "last_forecast_missed_instr_per_cycle")]
    pub forecast_errors_instr_per_cycle: Vec<ForecastError>,
    /// The state of every promise after this window; empty if no program has one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub promises: Vec<PromiseReport>,
    /// The CPUs that are online, where they are others than in the window before, or of the header's topology in the
    /// first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub online: Option<CpuSet>,
}

/// First line of a recording: all that a replay needs besides the records.
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

/// Why a run stopped before its end.
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
        /// The window after which the plan was made, by its number in the run.
        window: u64,
        /// The invariant that the plan breaks.
        bad: PlanError,
    },
}

/// A machine, a policy, and the pipeline between them.
pub struct ControlLoop<M, P> {
    /// The machine on which the tasks run.
    pub machine: M,
    /// Run in this order after every window; each adds to the profiles.
    pub profilers: Vec<Box<dyn Profiler>>,
    /// Attaches the forecast to every decision, so that all policies are scored alike.
    pub predictor: Box<dyn Predictor>,
    /// The policy.
    pub policy: P,
    /// Name for error messages and records.
    pub policy_name: String,
    /// The profiles of the tasks after the last step.
    pub profiles: Profiles,
    /// Plan in force since the last step.
    pub plan: Plan,
    /// The forecast for the plan in force; empty before the first step.
    pub forecast: Forecast,
    /// The refusals of that plan; policies see them in the next window.
    refused: Vec<RefusedItem>,
    /// Judge of the promises.
    promises: PromiseTracker,
    /// CPUs that were online when this was last looked at.
    online: CpuSet,
}

impl<M: Machine, P: Policy> ControlLoop<M, P> {
    /// A loop at its start: nothing known, an idle plan with the given first window.
    pub fn new(
        machine: M,
        profilers: Vec<Box<dyn Profiler>>,
        predictor: Box<dyn Predictor>,
        policy_name: impl Into<String>,
        policy: P,
        first_window: WindowLength,
    ) -> Self {
        ControlLoop {
            online: machine.topology().online(),
            machine,
            profilers,
            predictor,
            policy,
            policy_name: policy_name.into(),
            profiles: Profiles::new(),
            plan: Plan::idle(first_window),
            forecast: Forecast::default(),
            refused: Vec::new(),
            promises: PromiseTracker::default(),
        }
    }

    /// The only place where the stages meet. `None` = the run is over.
    ///
    /// # Errors
    /// The machine's own, or a plan that breaks an invariant of [`check_plan`]; nothing is applied then.
    pub fn step(&mut self) -> Result<Option<WindowRecord>, ControlLoopError> {
        let Some(mut seen) = self.machine.observe()? else { return Ok(None) };
        let now = self.machine.topology().online();
        let online = (now != self.online).then(|| now.clone());
        self.online = now;
        for refused in self.refused.drain(..) {
            // A recording has them already.
            if !seen.applied.refused.contains(&refused) {
                seen.applied.refused.push(refused);
            }
        }
        for profiler in &mut self.profilers {
            profiler.update(&seen, &mut self.profiles);
        }
        for task in &seen.tasks {
            if let Some(profile) = self.profiles.get_mut(&task.task) {
                profile.process = Some(task.process);
            }
        }
        let comparable = online.is_none() && seen.end_reason != WindowEnd::HostChanged;
        let missed = if comparable { compare(&self.forecast, &seen) } else { Vec::new() };
        let view = View {
            topology: self.machine.topology(),
            capabilities: self.machine.capabilities(),
            observation: &seen,
            profiles: &self.profiles,
            previous_plan: &self.plan,
            predictor: self.predictor.as_ref(),
        };
        let decision = self.policy.decide(&view);
        check_plan(&decision.plan, &view).map_err(|bad| ControlLoopError::Plan {
            policy: self.policy_name.clone(),
            window: seen.window,
            bad,
        })?;
        let forecast = self.predictor.forecast(&view, &decision.plan);
        let promises = self.promises.observe(&seen, &self.profiles, self.machine.topology(), &self.plan, &decision);
        let applied = self.machine.apply(&decision.plan)?;
        self.refused.clone_from(&applied.refused);
        self.plan = decision.plan.clone();
        self.forecast = forecast.clone();
        let last_forecast_missed_instr_per_cycle = missed;
        Ok(Some(WindowRecord {
            observation: seen,
            decision,
            forecast,
            applied,
            forecast_errors_instr_per_cycle: last_forecast_missed_instr_per_cycle,
            promises,
            online,
        }))
    }
}

impl<M: Machine, P> ControlLoop<M, P> {
    /// Forecasts another plan than the last one from the current profiles: for replays, in which the recorded plan is
    /// in force instead of the decided one. `before` is the plan that was in force in the window.
    pub fn forecast_under(&self, seen: &Observation, before: &Plan, plan: &Plan) -> Forecast {
        let view = View {
            topology: self.machine.topology(),
            capabilities: self.machine.capabilities(),
            observation: seen,
            profiles: &self.profiles,
            previous_plan: before,
            predictor: self.predictor.as_ref(),
        };
        self.predictor.forecast(&view, plan)
    }
}

fn compare(expected: &Forecast, seen: &Observation) -> Vec<ForecastError> {
    let measured = |task: &TaskSample| {
        let cycles = task.counts.get(CounterEvent::Cycles).filter(|&cycles| cycles > 0.0)?;
        Some(task.counts.get(CounterEvent::Instructions)? / cycles)
    };
    seen.tasks
        .iter()
        .filter_map(|task| Some((task.task, expected.tasks.get(&task.task)?.instr_per_cycle?, measured(task)?)))
        .collect()
}
