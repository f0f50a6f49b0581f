//! Replay: a recorded run as a machine, and a policy that decides again on its observations.
//!
//! Problem: decisions have to be explained and checked after a run, and a policy that was not in charge must not be
//! credited with the effects of another policy's plans. Method: [`ReplayMachine`] returns the recorded observations. It
//! accepts a plan that equals the recorded one, and refuses any other plan with [`RefusalReason::NotRecorded`].
//! [`replay`] drives the control loop over it. Properties: the recorded policy must repeat its decisions, and the
//! first difference is reported. For another policy, only forecasts are scored: each forecast is made under the plan
//! that was in force, so that the next recorded window shows its error.

use std::cell::RefCell;
use std::rc::Rc;

use cachemate_core::{
    AppliedPlan, Capabilities, ControlLoop, Decision, ForecastError, Machine, MachineError, Observation, Plan,
    PlanItem, Policy, PolicyConfig, RefusalReason, RefusedItem, RunHeader, Topology, WindowRecord,
};
use cachemate_policy::policies::PolicyError;
use cachemate_trace::{RunLogReader, TraceError};

use crate::Pipeline;

/// A [`Machine`] that returns the observations of a recorded run.
pub struct ReplayMachine {
    log: RunLogReader,
    header: RunHeader,
    /// The record from which the last observation was taken.
    current_record: Rc<RefCell<Option<WindowRecord>>>,
}

impl ReplayMachine {
    /// Creates a machine that reads the log once, from its first window to its last.
    pub fn new(log: RunLogReader) -> Self {
        ReplayMachine { header: log.header().clone(), log, current_record: Rc::default() }
    }

    /// Returns the recording's header: policy, parameters, seed. The CPUs that are online are those of the last
    /// window.
    pub fn header(&self) -> &RunHeader {
        &self.header
    }
}

impl Machine for ReplayMachine {
    fn topology(&self) -> &Topology {
        &self.header.topology
    }
    fn capabilities(&self) -> &Capabilities {
        &self.header.capabilities
    }
    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        let record = self.log.next_record().map_err(|error| MachineError(error.to_string()))?;
        let observation = record.as_ref().map(|record| record.observation.clone());
        if let Some(online) = record.as_ref().and_then(|record| record.online.as_ref()) {
            self.header.topology.cpus.iter_mut().for_each(|cpu| cpu.online = online.contains(cpu.id.0));
        }
        self.current_record.replace(record);
        Ok(observation)
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        let current = self.current_record.borrow();
        let current_record = current.as_ref().ok_or_else(|| MachineError("nothing was observed yet".to_string()))?;
        if current_record.decision.plan == *plan {
            return Ok(current_record.applied.clone());
        }
        // The plan that was in force in the recorded run stays in force, whatever is requested.
        let message = first_difference(&current_record.decision.plan, plan);
        let refused_plan = RefusedItem { item: PlanItem::Plan, reason: RefusalReason::NotRecorded, message };
        Ok(AppliedPlan { refused: vec![refused_plan], ..current_record.applied.clone() })
    }
}

/// Describes the first part in which two plans differ.
fn first_difference(recorded_plan: &Plan, replayed_plan: &Plan) -> String {
    let plan_parts = [
        ("allowed", format!("{:?}", recorded_plan.affinity), format!("{:?}", replayed_plan.affinity)),
        ("weights", format!("{:?}", recorded_plan.weights), format!("{:?}", replayed_plan.weights)),
        ("gangs", format!("{:?}", recorded_plan.gangs), format!("{:?}", replayed_plan.gangs)),
        ("shares", format!("{:?}", recorded_plan.shares), format!("{:?}", replayed_plan.shares)),
        ("penalties", format!("{:?}", recorded_plan.penalties), format!("{:?}", replayed_plan.penalties)),
        ("probes", format!("{:?}", recorded_plan.probes), format!("{:?}", replayed_plan.probes)),
        ("window", format!("{:?}", recorded_plan.window), format!("{:?}", replayed_plan.window)),
    ];
    match plan_parts.into_iter().find(|(_, recorded, requested)| recorded != requested) {
        Some((part, recorded, asked)) => format!("{part}: recorded {recorded}, requested {asked}"),
        None => "the same plan".to_string(),
    }
}

/// One window of a replay.
#[derive(Clone, PartialEq, Debug)]
pub struct ReplayedWindow {
    /// Number of the window in the recorded run.
    pub window: u64,
    /// The decision that the policy made in the replay.
    pub decision: Decision,
    /// Difference between the decision and the recorded plan; with the recorded policy, reasons and forecasts are
    /// compared too.
    pub plan_difference: Option<String>,
    /// Errors of the forecast for this window, which was made one window earlier under the plan recorded there.
    pub forecast_errors_instr_per_cycle: Vec<ForecastError>,
}

/// The reason why a replay stopped.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The log cannot be read, or is incomplete.
    #[error(transparent)]
    Log(#[from] TraceError),
    /// The loop rejected a plan, or the log ended early.
    #[error(transparent)]
    Loop(#[from] cachemate_core::ControlLoopError),
    /// The recorded policy is not in the registry, or does not accept the recorded parameters.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The same pipeline decided differently: either it is not deterministic, or its code has changed since the
    /// recording.
    #[error("window {window}: the policy '{policy}' decides differently than recorded: {difference}")]
    Differs {
        /// The first window whose decisions differ.
        window: u64,
        /// The policy's name.
        policy: String,
        /// The difference as text.
        difference: String,
    },
}

/// Replays a recorded run, and passes each window to `visit_window`. The pipeline is that of the log's header, with the
/// policy replaced by `other_policy` if given. With the recorded policy, the first plan, reason or forecast that
/// differs ends the replay. Returns the number of windows.
///
/// # Errors
/// [`ReplayError`]; the windows before the error have been passed to `visit_window`.
pub fn replay(
    log: RunLogReader,
    other_policy: Option<PolicyConfig>,
    visit_window: impl FnMut(ReplayedWindow),
) -> Result<u64, ReplayError> {
    let mut config = log.header().pipeline.clone();
    let must_match = other_policy.as_ref().is_none_or(|policy| *policy == config.policy);
    config.policy = other_policy.unwrap_or(config.policy);
    let pipeline = Pipeline::build(config)?;
    let machine = ReplayMachine::new(log);
    let current = Rc::clone(&machine.current_record);
    replay_windows(pipeline.start(machine), &current, must_match, visit_window)
}

fn replay_windows<P: Policy>(
    mut control_loop: ControlLoop<ReplayMachine, P>,
    current: &RefCell<Option<WindowRecord>>,
    must_match: bool,
    mut visit_window: impl FnMut(ReplayedWindow),
) -> Result<u64, ReplayError> {
    let mut window_count = 0;
    let mut previous_plan = control_loop.plan.clone();
    while let Some(record) = control_loop.step()? {
        let Some(recorded_window) = current.borrow().clone() else { break };
        let is_same_plan = recorded_window.decision.plan == record.decision.plan;
        let differs = describe_difference(&recorded_window, &record, must_match);
        let window = record.observation.window;
        if let (true, Some(difference)) = (must_match, &differs) {
            let policy = control_loop.policy_name.clone();
            return Err(ReplayError::Differs { window, policy, difference: difference.clone() });
        }
        if !is_same_plan {
            // The next window was recorded under the recorded plan, so only a forecast under that plan can be compared.
            control_loop.forecast =
                control_loop.forecast_under(&record.observation, &previous_plan, &recorded_window.decision.plan);
        }
        previous_plan = recorded_window.decision.plan;
        window_count += 1;
        visit_window(ReplayedWindow {
            window,
            decision: record.decision,
            plan_difference: differs,
            forecast_errors_instr_per_cycle: record.forecast_errors_instr_per_cycle,
        });
    }
    Ok(window_count)
}

/// Describes the difference between two decisions: in the plan or, with `in_full`, also in reasons and forecast.
fn describe_difference(recorded_window: &WindowRecord, replayed: &WindowRecord, compares_all: bool) -> Option<String> {
    if recorded_window.decision.plan != replayed.decision.plan {
        return Some(first_difference(&recorded_window.decision.plan, &replayed.decision.plan));
    }
    let describe_both =
        |subject: &str, recorded: String, now: String| Some(format!("{subject}: recorded {recorded}, now {now}"));
    if compares_all && recorded_window.decision.reasons != replayed.decision.reasons {
        return describe_both(
            "reasons",
            format!("{:?}", recorded_window.decision.reasons),
            format!("{:?}", replayed.decision.reasons),
        );
    }
    if compares_all && recorded_window.forecast != replayed.forecast {
        return describe_both(
            "forecast",
            format!("{:?}", recorded_window.forecast),
            format!("{:?}", replayed.forecast),
        );
    }
    None
}

#[cfg(test)]
mod tests;
