//! Replay: a recorded run as a machine, and a policy run over it.
//!
//! Problem: a decision has to be explained and checked after the fact, and a policy that was not in charge then must
//! not be credited with what happened under another's plans. Method: [`Replay`] hands out the recorded observations
//! and answers a plan with the recorded state where it equals the recorded plan, and with
//! [`RefusedBecause::NotRecorded`] otherwise; [`replay`] drives the one loop over it. Properties: the same policy
//! must decide the same, and the first difference is named; of another policy only forecasts are scored: each is made
//! under the plan that was really in force, so that it can be compared with the next recorded window.

use std::cell::RefCell;
use std::rc::Rc;

use cachemate_core::{
    Applied, Capabilities, Decision, Item, Loop, Machine, MachineError, Miss, Observation, Plan, Policy, Predictor,
    Profiler, Record, Refused, RefusedBecause, RunHeader, Topology,
};

use crate::{RunLogReader, TraceError};

/// A recorded run as a [`Machine`].
pub struct Replay {
    log: RunLogReader,
    header: RunHeader,
    /// The record whose observation was given last.
    current: Rc<RefCell<Option<Record>>>,
}

impl Replay {
    /// A machine that lives through the log once.
    pub fn new(log: RunLogReader) -> Self {
        Replay { header: log.header().clone(), log, current: Rc::default() }
    }

    /// The recording's header: policy, parameters, seed.
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
        let seen = record.as_ref().map(|record| record.seen.clone());
        self.current.replace(record);
        Ok(seen)
    }
    fn apply(&mut self, plan: &Plan) -> Result<Applied, MachineError> {
        let current = self.current.borrow();
        let record = current.as_ref().ok_or_else(|| MachineError("nothing was observed yet".to_string()))?;
        if record.decision.plan == *plan {
            return Ok(record.applied.clone());
        }
        // What was in force in the recorded run stays in force, whatever is asked for.
        let said = first_difference(&record.decision.plan, plan);
        let refused = Refused { item: Item::Plan, because: RefusedBecause::NotRecorded, said };
        Ok(Applied { refused: vec![refused], ..record.applied.clone() })
    }
}

/// The first part in which two plans differ, in words.
fn first_difference(recorded: &Plan, asked: &Plan) -> String {
    let parts = [
        ("allowed", format!("{:?}", recorded.allowed), format!("{:?}", asked.allowed)),
        ("weights", format!("{:?}", recorded.weights), format!("{:?}", asked.weights)),
        ("gangs", format!("{:?}", recorded.gangs), format!("{:?}", asked.gangs)),
        ("shares", format!("{:?}", recorded.shares), format!("{:?}", asked.shares)),
        ("clashes", format!("{:?}", recorded.clashes), format!("{:?}", asked.clashes)),
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
pub struct Replayed {
    pub window: u64,
    /// What the policy decides now.
    pub decision: Decision,
    /// Where it differs from the recorded plan.
    pub differs: Option<String>,
    /// How far off the forecast for this window was, made in the window before under the plan recorded there.
    pub forecast_missed_instr_per_cycle: Vec<Miss>,
}

/// Why a replay stopped.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    #[error(transparent)]
    Log(#[from] TraceError),
    #[error(transparent)]
    Loop(#[from] cachemate_core::LoopError),
    /// The same policy decided otherwise: it is not pure, or not the same any more.
    #[error("window {window}: the policy '{policy}' decides otherwise than recorded: {difference}")]
    Differs { window: u64, policy: String, difference: String },
}

/// Runs `policy` over a log, window by window, telling each to `each`. `must_match` = it is the recorded policy, and
/// the first plan that differs ends the replay.
///
/// # Errors
/// [`ReplayError`]; windows before it have been told.
pub fn replay<P: Policy>(
    log: RunLogReader,
    profilers: Vec<Box<dyn Profiler>>,
    yardstick: Box<dyn Predictor>,
    policy_name: &str,
    policy: P,
    must_match: bool,
    mut each: impl FnMut(Replayed),
) -> Result<u64, ReplayError> {
    let machine = Replay::new(log);
    let current = Rc::clone(&machine.current);
    // The plan before the first window is not recorded; the loop compares nothing with it.
    let first_window = cachemate_core::Window::Time { ns: machine.capabilities().shortest_window_ns };
    let mut turns = Loop::new(machine, profilers, yardstick, policy_name, policy, first_window);
    let mut windows = 0;
    while let Some(record) = turns.step()? {
        let recorded = current.borrow().as_ref().map(|record| record.decision.plan.clone());
        let Some(recorded) = recorded else { break };
        let same = recorded == record.decision.plan;
        let differs = (!same).then(|| first_difference(&recorded, &record.decision.plan));
        let window = record.seen.window;
        if let (true, Some(difference)) = (must_match, &differs) {
            return Err(ReplayError::Differs { window, policy: policy_name.into(), difference: difference.clone() });
        }
        if !same {
            // What comes next happened under the recorded plan: only a forecast under it can be compared.
            let topology = turns.machine.topology();
            turns.forecast = turns.yardstick.forecast(topology, &turns.profiles, &recorded);
        }
        windows += 1;
        each(Replayed {
            window,
            decision: record.decision,
            differs,
            forecast_missed_instr_per_cycle: record.last_forecast_missed_instr_per_cycle,
        });
    }
    Ok(windows)
}

#[cfg(test)]
mod tests;
