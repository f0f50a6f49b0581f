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
    AppliedPlan, Capabilities, ControlLoop, Decision, ForecastError, Machine, MachineError,
    Observation, Plan, PlanItem, Policy, PolicyConfig, RefusalReason, RefusedItem, RunHeader,
    Topology, WindowRecord,
};
use cachemate_papers::policies::PolicyError;
use cachemate_trace::{RunLogReader, TraceError};
use serde::Serialize;
use serde_json::{Value, json};

use crate::Pipeline;

/// A [`Machine`] that returns the observations of a recorded run.
pub struct ReplayMachine {
    log: RunLogReader,
    header: RunHeader,
    /// The record from which the last observation was taken.
    current_record: Rc<RefCell<Option<WindowRecord>>>,
    /// Why the last plan is only a proposal, until the next observation reports it.
    refusal: Option<RefusedItem>,
    /// The damage behind the last whole window, if the log was cut.
    damage: Rc<RefCell<Option<TraceError>>>,
}

impl ReplayMachine {
    /// Creates a machine that reads the log once, from its first window to its last.
    pub fn new(log: RunLogReader) -> Self {
        ReplayMachine {
            header: log.header().clone(),
            log,
            current_record: Rc::default(),
            refusal: None,
            damage: Rc::default(),
        }
    }

    /// Policy, parameters and seed as recorded. Its online CPUs are updated as the replay advances.
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
        let record = match self.log.next_record() {
            Ok(record) => record,
            // A run whose writer crashed is valid up to the cut.
            Err(error) if self.current_record.borrow().is_some() => {
                self.damage.replace(Some(error));
                None
            }
            Err(error) => return Err(MachineError(error.to_string())),
        };
        let mut observation = record.as_ref().map(|record| record.observation.clone());
        if let Some((observation, refusal)) = observation.as_mut().zip(self.refusal.take()) {
            observation.applied.is_only_proposed = true;
            observation.applied.add_refusals([refusal]);
        }

        if let Some(online) = record.as_ref().and_then(|record| record.online.as_ref()) {
            self.header
                .topology
                .cpus
                .iter_mut()
                .for_each(|cpu| cpu.online = online.contains(cpu.id.0));
        }
        self.current_record.replace(record);
        Ok(observation)
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        let current = self.current_record.borrow();
        let current_record = current
            .as_ref()
            .ok_or_else(|| MachineError("nothing was observed yet".to_string()))?;
        if current_record.decision.plan == *plan {
            return Ok(current_record.applied.clone());
        }

        // The plan that was in force in the recorded run stays in force, whatever is requested.
        let message = first_difference(&current_record.decision.plan, plan);
        let refused_plan = RefusedItem {
            item: PlanItem::Plan,
            reason: RefusalReason::NotRecorded,
            message,
        };
        self.refusal = Some(refused_plan.clone());
        Ok(AppliedPlan {
            refused: vec![refused_plan],
            is_only_proposed: true,
            ..current_record.applied.clone()
        })
    }
}

/// Describes the first part in which two values differ by its path, such as `gangs.0.slice_ns`, and its two states.
fn first_difference(recorded: &impl Serialize, replayed: &impl Serialize) -> String {
    let to_json = |value: Result<Value, serde_json::Error>| value.unwrap_or(Value::Null);
    let (mut recorded, mut replayed) = (
        to_json(serde_json::to_value(recorded)),
        to_json(serde_json::to_value(replayed)),
    );
    let mut path = Vec::new();
    while let Some(key) = first_differing_key(&recorded, &replayed) {
        recorded = part_of(&recorded, &key);
        replayed = part_of(&replayed, &key);
        path.push(key);
    }
    let part = match &path[..] {
        [part, task, ..] if part == "affinity" => format!("CPUs of task {task}"),
        [part, task, ..] if part == "weights" => format!("weight of task {task}"),
        _ => path.join("."),
    };
    format!(
        "{part}: recorded {}, replayed {}",
        describe_state(&recorded),
        describe_state(&replayed)
    )
}

/// A key of objects, an index of lists.
fn first_differing_key(recorded: &Value, replayed: &Value) -> Option<String> {
    let keys: Vec<String> = match (recorded, replayed) {
        (Value::Object(recorded_fields), Value::Object(replayed_fields)) => recorded_fields
            .keys()
            .chain(replayed_fields.keys())
            .cloned()
            .collect(),
        (Value::Array(recorded_items), Value::Array(replayed_items)) => {
            (0..recorded_items.len().max(replayed_items.len()))
                .map(|index| index.to_string())
                .collect()
        }
        _ => return None,
    };
    keys.into_iter()
        .find(|key| part_of(recorded, key) != part_of(replayed, key))
}

/// Null if there is none.
fn part_of(value: &Value, key: &str) -> Value {
    let part = match value {
        Value::Array(parts) => key.parse::<usize>().ok().and_then(|index| parts.get(index)),
        object => object.get(key),
    };
    part.cloned().unwrap_or(Value::Null)
}

fn describe_state(state: &Value) -> String {
    match state {
        Value::Null => "none".to_string(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
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
    #[error(
        "window {window}: the policy '{policy}' decides differently than recorded: {difference}"
    )]
    Differs {
        /// The first window whose decisions differ.
        window: u64,
        /// The policy's name.
        policy: String,
        /// The difference as text.
        difference: String,
    },
}

/// The extent of a replay.
#[derive(Debug)]
pub struct ReplayExtent {
    /// Number of windows that were replayed.
    pub windows: u64,
    /// The damage behind the last of them; `None` if the log is whole.
    pub damage: Option<TraceError>,
}

/// Replays a recorded run, and passes each window to `visit_window`. The pipeline is that of the log's header, with the
/// policy replaced by `other_policy` if given. With the recorded policy, the first plan, reason or forecast that
/// differs ends the replay. A log that was cut is replayed up to the cut.
///
/// # Errors
/// The windows before a [`ReplayError`] have been passed to `visit_window`.
pub fn replay(
    log: RunLogReader,
    other_policy: Option<PolicyConfig>,
    visit_window: impl FnMut(ReplayedWindow),
) -> Result<ReplayExtent, ReplayError> {
    let mut config = log.header().pipeline.clone();
    let must_match = other_policy
        .as_ref()
        .is_none_or(|policy| *policy == config.policy);
    config.policy = other_policy.unwrap_or(config.policy);
    let pipeline = Pipeline::build(config)?;
    let machine = ReplayMachine::new(log);
    let current_record = Rc::clone(&machine.current_record);
    let damage = Rc::clone(&machine.damage);

    let windows = replay_windows(
        pipeline.start(machine),
        &current_record,
        must_match,
        visit_window,
    )?;
    Ok(ReplayExtent {
        windows,
        damage: damage.take(),
    })
}

fn replay_windows<P: Policy>(
    mut control_loop: ControlLoop<ReplayMachine, P>,
    current_record: &RefCell<Option<WindowRecord>>,
    must_match: bool,
    mut visit_window: impl FnMut(ReplayedWindow),
) -> Result<u64, ReplayError> {
    let mut window_count = 0;
    let mut previous_plan = control_loop.plan.clone();

    while let Some(record) = control_loop.step()? {
        let Some(recorded_window) = current_record.borrow().clone() else {
            break;
        };
        let is_same_plan = recorded_window.decision.plan == record.decision.plan;
        let plan_difference = describe_difference(&recorded_window, &record, must_match);
        let window = record.observation.window;
        if let (true, Some(difference)) = (must_match, &plan_difference) {
            let policy = control_loop.policy_name.clone();
            return Err(ReplayError::Differs {
                window,
                policy,
                difference: difference.clone(),
            });
        }
        if !is_same_plan && !recorded_window.applied.is_only_proposed {
            // The next window was recorded under the recorded plan, so only a forecast under that plan can be compared.
            control_loop.forecast = control_loop.forecast_under(
                &record.observation,
                &previous_plan,
                &recorded_window.decision.plan,
            );
        }
        previous_plan = recorded_window.decision.plan;
        window_count += 1;
        visit_window(ReplayedWindow {
            window,
            decision: record.decision,
            plan_difference,
            forecast_errors_instr_per_cycle: record.forecast_errors_instr_per_cycle,
        });
    }
    Ok(window_count)
}

/// Describes the difference between two decisions: in the plan and, if `compares_all` is set, also in reasons and
/// forecast.
fn describe_difference(
    recorded_window: &WindowRecord,
    replayed: &WindowRecord,
    compares_all: bool,
) -> Option<String> {
    if recorded_window.decision.plan != replayed.decision.plan {
        return Some(first_difference(
            &recorded_window.decision.plan,
            &replayed.decision.plan,
        ));
    }
    let differs = compares_all
        && (&recorded_window.decision.reasons, &recorded_window.forecast)
            != (&replayed.decision.reasons, &replayed.forecast);
    let compared_parts = |window: &WindowRecord| json!({ "reasons": window.decision.reasons, "forecast": window.forecast });
    differs.then(|| first_difference(&compared_parts(recorded_window), &compared_parts(replayed)))
}

#[cfg(test)]
mod tests;
