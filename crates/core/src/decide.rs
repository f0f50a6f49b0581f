//! Deciding: what the operator wants, what a policy sees, and what it answers with its reasons.

use serde::{Deserialize, Serialize};

use crate::{Capabilities, Observation, Plan, Predictor, Profiles, TaskId, Topology};

/// One reason, in a form that survives renaming: `{0}` in `text` is `tasks[0]`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Reason {
    pub tasks: Vec<TaskId>,
    pub text: String,
    /// The numbers it rests on: name with its unit last, and value.
    pub numbers: Vec<(String, f64)>,
}

/// What to do, and why.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Decision {
    pub plan: Plan,
    pub why: Vec<Reason>,
}

/// What the operator asked for, per task (configuration, not measurement).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Goal {
    /// Relative weight of its slowdown; 1.0 where nothing was asked.
    pub priority: f64,
    /// Never slower than this over solo ("5 %" = 0.05).
    pub degradation_at_most: Option<f64>,
}

/// All that a policy may see.
pub struct View<'a> {
    pub topology: &'a Topology,
    pub capabilities: &'a Capabilities,
    pub seen: &'a Observation,
    pub profiles: &'a Profiles,
    /// The plan of the window before; without evidence its allowed, gangs and shares stay.
    pub before: &'a Plan,
    /// To ask "what if".
    pub predictor: &'a dyn Predictor,
}

/// Who shares a cache with whom. Pure: no clock, no I/O, no randomness but a seeded one.
pub trait Policy {
    fn decide(&mut self, view: &View<'_>) -> Decision;
}

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        (**self).decide(view)
    }
}
