//! Replay: a recorded run as a machine, and a policy run over it.
//!
//! Problem: a decision has to be explained and checked after the fact, and a policy that was not in charge then must
//! not be credited with what happened under another's plans. Method: [`Replay`] hands out the recorded observations
//! and answers a plan with the recorded state where it equals the recorded plan, and with
//! [`RefusalReason::NotRecorded`] otherwise; [`replay`] drives the one loop over it. Properties: the same policy
//! must decide the same, and the first difference is named; of another policy only forecasts are scored: each is made
//! under the plan that was really in force, so that it can be compared with the next recorded window.

use std::cell::RefCell;
use std::rc::Rc;

use cachemate_core::{
    AppliedPlan, Capabilities, ControlLoop, Decision, ForecastError, Machine, MachineError, Observation, Plan,
    PlanItem, Policy, PolicyConfig, RefusalReason, RefusedItem, RunHeader, Topology, WindowRecord,
};
use cachemate_policy::policies::PolicyError;
use cachemate_trace::{RunLogReader, TraceError};

use crate::Pipeline;

/// A recorded run as a [`Machine`].
pub struct Replay {
    log: RunLogReader,
    header: RunHeader,
    /// The record whose observation was given last.
    current: Rc<RefCell<Option<WindowRecord>>>,
}

impl Replay {
    /// A machine that lives through the log once.
    pub fn new(log: RunLogReader) -> Self {
        Replay { header: log.header().clone(), log, current: Rc::default() }
    }

    /// The recording's header: policy, parameters, seed. CPUs are online as in the last window given.
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
        let seen = record.as_ref().map(|record| record.observation.clone());
        if let Some(online) = record.as_ref().and_then(|record| record.online.as_ref()) {
            self.header.topology.cpus.iter_mut().for_each(|cpu| cpu.online = online.contains(cpu.id.0));
        }
        self.current.replace(record);
        Ok(seen)
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        let current = self.current.borrow();
        let record = current.as_ref().ok_or_else(|| MachineError("nothing was observed yet".to_string()))?;
        if record.decision.plan == *plan {
            return Ok(record.applied.clone());
        }
        // What was in force in the recorded run stays in force, whatever is asked for.
        let difference = first_difference(&record.decision.plan, plan);
        let refused = RefusedItem { item: PlanItem::Plan, reason: RefusalReason::NotRecorded, message: difference };
        Ok(AppliedPlan { refused: vec![refused], ..record.applied.clone() })
    }
}

/// The first part in which two plans differ, in words.
fn first_difference(recorded: &Plan, asked: &Plan) -> String {
    let parts = [
        ("allowed", format!("{:?}", recorded.affinity), format!("{:?}", asked.affinity)),
        ("weights", format!("{:?}", recorded.weights), format!("{:?}", asked.weights)),
        ("gangs", format!("{:?}", recorded.gangs), format!("{:?}", asked.gangs)),
        ("shares", format!("{:?}", recorded.shares), format!("{:?}", asked.shares)),
        ("penalties", format!("{:?}", recorded.penalties), format!("{:?}", asked.penalties)),
        ("probes", format!("{:?}", recorded.probes), format!("{:?}", asked.probes)),
        ("window", format!("{:?}", recorded.window), format!("{:?}", asked.window)),
    ];
    match parts.into_iter().find(|(_, recorded, asked)| recorded != asked) {
        Some((part, recorded, asked)) => format!("{part}: recorded {recorded}, asked for {asked}"),
        None => "the same plan".to_string(),
    }
}

/// One window of a replay.
#[derive(Clone, PartialEq, Debug)]
pub struct ReplayedWindow {
    /// Its number in the recorded run.
    pub window: u64,
    /// What the policy decides now.
    pub decision: Decision,
    /// Where it differs from the recorded plan; with the recorded policy, from its reasons and forecast too.
    pub plan_difference: Option<String>,
    /// How far off the forecast for this window was, made in the window before under the plan recorded there.
    pub forecast_missed_instr_per_cycle: Vec<ForecastError>,
}

/// Why a replay stopped.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The log cannot be read, or not any further.
    #[error(transparent)]
    Log(#[from] TraceError),
    /// The loop refused a plan, or the log broke off.
    #[error(transparent)]
    Loop(#[from] cachemate_core::ControlLoopError),
    /// There is no such policy, or it does not take the recorded parameters.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The same pipeline decided otherwise: it is not pure, or not the same any more.
    #[error("window {window}: the policy '{policy}' decides otherwise than recorded: {difference}")]
    Differs {
        /// The first that differs.
        window: u64,
        /// The policy's name.
        policy: String,
        /// The difference in words.
        difference: String,
    },
}

/// Decides a recorded run again, window by window, telling each to `each`: by the pipeline that stands in its header, or
/// by `other`'s policy in that pipeline. With the recorded policy, the first plan, reason or forecast that differs ends
/// the replay. Gives the number of windows.
///
/// # Errors
/// [`ReplayError`]; windows before it have been told.
pub fn replay(
    log: RunLogReader,
    other: Option<PolicyConfig>,
    each: impl FnMut(ReplayedWindow),
) -> Result<u64, ReplayError> {
    let mut config = log.header().pipeline.clone();
    let must_match = other.as_ref().is_none_or(|policy| *policy == config.policy);
    config.policy = other.unwrap_or(config.policy);
    let pipeline = Pipeline::build(config)?;
    let machine = Replay::new(log);
    let current = Rc::clone(&machine.current);
    decide_again(pipeline.start(machine), &current, must_match, each)
}

fn decide_again<P: Policy>(
    mut turns: ControlLoop<Replay, P>,
    current: &RefCell<Option<WindowRecord>>,
    must_match: bool,
    mut each: impl FnMut(ReplayedWindow),
) -> Result<u64, ReplayError> {
    let mut windows = 0;
    let mut before = turns.plan.clone();
    while let Some(record) = turns.step()? {
        let Some(recorded) = current.borrow().clone() else { break };
        let same_plan = recorded.decision.plan == record.decision.plan;
        let differs = difference(&recorded, &record, must_match);
        let window = record.observation.window;
        if let (true, Some(difference)) = (must_match, &differs) {
            let policy = turns.policy_name.clone();
            return Err(ReplayError::Differs { window, policy, difference: difference.clone() });
        }
        if !same_plan {
            // What comes next happened under the recorded plan: only a forecast under it can be compared.
            turns.forecast = turns.forecast_under(&record.observation, &before, &recorded.decision.plan);
        }
        before = recorded.decision.plan;
        windows += 1;
        each(ReplayedWindow {
            window,
            decision: record.decision,
            plan_difference: differs,
            forecast_missed_instr_per_cycle: record.forecast_errors_instr_per_cycle,
        });
    }
    Ok(windows)
}

/// Where a window was decided otherwise: in its plan or, `in_full`, in its reasons or its forecast.
fn difference(recorded: &WindowRecord, now: &WindowRecord, in_full: bool) -> Option<String> {
    if recorded.decision.plan != now.decision.plan {
        return Some(first_difference(&recorded.decision.plan, &now.decision.plan));
    }
    let both = |what: &str, recorded: String, now: String| Some(format!("{what}: recorded {recorded}, now {now}"));
    if in_full && recorded.decision.reasons != now.decision.reasons {
        return both("reasons", format!("{:?}", recorded.decision.reasons), format!("{:?}", now.decision.reasons));
    }
    if in_full && recorded.forecast != now.forecast {
        return both("forecast", format!("{:?}", recorded.forecast), format!("{:?}", now.forecast));
    }
    None
}

#[cfg(test)]
mod tests;
