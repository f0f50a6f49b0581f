//! Replay: a recorded run as a machine, and a policy that decides again on its observations.
//!
//! Problem: decisions have to be explained and checked after a run, and a policy that was not in charge must not be
//! credited with the effects of another policy's plans. Method: [`Replay`] returns the recorded observations. It
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
pub struct Replay {
    log: RunLogReader,
    header: RunHeader,
    /// The record from which the last observation was taken.
    current: Rc<RefCell<Option<WindowRecord>>>,
}

impl Replay {
    /// Creates a machine that reads the log once, from its first window to its last.
    pub fn new(log: RunLogReader) -> Self {
        Replay { header: log.header().clone(), log, current: Rc::default() }
    }

    /// Returns the recording's header: policy, parameters, seed. The CPUs that are online are those of the last
    /// window.
    pub fn header(&self) -> &RunHeader {
        &self.header
    }
}

impl Machine for Replay {
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
        self.current.replace(record);
        Ok(observation)
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        let current = self.current.borrow();
        let record = current.as_ref().ok_or_else(|| MachineError("nothing was observed yet".to_string()))?;
        if record.decision.plan == *plan {
            return Ok(record.applied.clone());
        }
        // The plan that was in force in the recorded run stays in force, whatever is requested.
        let difference = first_difference(&record.decision.plan, plan);
        let refused = RefusedItem { item: PlanItem::Plan, reason: RefusalReason::NotRecorded, message: difference };
        Ok(AppliedPlan { refused: vec![refused], ..record.applied.clone() })
    }
}

/// Describes the first part in which two plans differ.
fn first_difference(recorded: &Plan, replayed: &Plan) -> String {
    let parts = [
        ("allowed", format!("{:?}", recorded.affinity), format!("{:?}", replayed.affinity)),
        ("weights", format!("{:?}", recorded.weights), format!("{:?}", replayed.weights)),
        ("gangs", format!("{:?}", recorded.gangs), format!("{:?}", replayed.gangs)),
        ("shares", format!("{:?}", recorded.shares), format!("{:?}", replayed.shares)),
        ("penalties", format!("{:?}", recorded.penalties), format!("{:?}", replayed.penalties)),
        ("probes", format!("{:?}", recorded.probes), format!("{:?}", replayed.probes)),
        ("window", format!("{:?}", recorded.window), format!("{:?}", replayed.window)),
    ];
    match parts.into_iter().find(|(_, recorded, requested)| recorded != requested) {
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
    pub forecast_missed_instr_per_cycle: Vec<ForecastError>,
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
    /// The same pipeline decided differently, because it is not pure or its code has changed since the recording.
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
    let machine = Replay::new(log);
    let current = Rc::clone(&machine.current);
    decide_again(pipeline.start(machine), &current, must_match, visit_window)
}

fn decide_again<P: Policy>(
    mut control_loop: ControlLoop<Replay, P>,
    current: &RefCell<Option<WindowRecord>>,
    must_match: bool,
    mut visit_window: impl FnMut(ReplayedWindow),
) -> Result<u64, ReplayError> {
    let mut windows = 0;
    let mut previous_plan = control_loop.plan.clone();
    while let Some(record) = control_loop.step()? {
        let Some(recorded) = current.borrow().clone() else { break };
        let same_plan = recorded.decision.plan == record.decision.plan;
        let differs = describe_difference(&recorded, &record, must_match);
        let window = record.observation.window;
        if let (true, Some(difference)) = (must_match, &differs) {
            let policy = control_loop.policy_name.clone();
            return Err(ReplayError::Differs { window, policy, difference: difference.clone() });
        }
        if !same_plan {
            // The next window was recorded under the recorded plan, so only a forecast under that plan can be compared.
            control_loop.forecast =
                control_loop.forecast_under(&record.observation, &previous_plan, &recorded.decision.plan);
        }
        previous_plan = recorded.decision.plan;
        windows += 1;
        visit_window(ReplayedWindow {
            window,
            decision: record.decision,
            plan_difference: differs,
            forecast_missed_instr_per_cycle: record.forecast_errors_instr_per_cycle,
        });
    }
    Ok(windows)
}

/// Describes the difference between two decisions: in the plan or, with `in_full`, also in reasons and forecast.
fn describe_difference(recorded: &WindowRecord, now: &WindowRecord, in_full: bool) -> Option<String> {
    if recorded.decision.plan != now.decision.plan {
        return Some(first_difference(&recorded.decision.plan, &now.decision.plan));
    }
    let describe_both =
        |subject: &str, recorded: String, now: String| Some(format!("{subject}: recorded {recorded}, now {now}"));
    if in_full && recorded.decision.reasons != now.decision.reasons {
        return describe_both(
            "reasons",
            format!("{:?}", recorded.decision.reasons),
            format!("{:?}", now.decision.reasons),
        );
    }
    if in_full && recorded.forecast != now.forecast {
        return describe_both("forecast", format!("{:?}", recorded.forecast), format!("{:?}", now.forecast));
    }
    None
}

#[cfg(test)]
mod tests;
