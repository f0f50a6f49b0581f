//! The messages of the gang scheduler's socket, as docs/sched-ext.md describes them: each request
//! is one JSON object on a line, and each reply is one line.
//!
//! The scheduler (`schedulers/gangs`) is a separate program in a workspace of its own, because it
//! has its own dependencies and a kernel object under another license, and a message that one side
//! writes and the other reads differently would let the wrong gang run. So both use these types.
//!
//! For example, `{"state": {}}` asks for the state in force; the answer has the generation of the
//! plan that the kernel executes, which the client compares with the one that it sent.
//!
//! # Invariants
//! - An unknown field of a request, or a missing one without a default, is an error and not
//!   ignored, because the scheduler would otherwise execute another plan than the client means.
//!   Unknown fields of a reply are ignored, so that a newer scheduler can report more.
//! - The scheduler refuses a plan whose generation is not larger than that of the plan in force;
//!   these types only carry both numbers.

#![warn(missing_docs)]

use serde::{Deserialize, Serialize};

/// Version of the messages; messages of other versions are refused.
pub const VERSION: u32 = 1;

/// Time for which a task may wait beyond two rotations of its cache.
pub const WAIT_BEYOND_ROTATIONS_MS: u64 = 100;

/// A request to the scheduler.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SchedulerRequest {
    /// Puts this plan in force.
    Plan(SchedulerPlan),
    /// Queries the state in force.
    State {},
    /// Restores all tasks and ends the scheduler.
    Stop {},
}

/// A whole plan: threads that it does not name are not scheduled by gangs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerPlan {
    /// [`VERSION`].
    pub version: u32,
    /// Larger than that of the plan in force.
    pub generation: u64,
    /// The longest acceptable wait of a task; a plan under which one could wait longer is refused.
    pub longest_wait_ms: u64,
    /// Turns in the order of each cache's rotation.
    pub turns: Vec<ScheduledTurn>,
    /// All members of gangs.
    pub tasks: Vec<ScheduledTask>,
}

impl SchedulerPlan {
    /// The turns in the order of a `state` reply: cache by cache.
    pub fn turns_by_cache(&self) -> Vec<ScheduledTurn> {
        let mut turns = self.turns.clone();
        turns.sort_by_key(|turn| turn.cache);
        turns
    }
}

/// One gang's turn at one cache.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduledTurn {
    /// Number of the cache, by [`SchedulerState`].
    pub cache: u32,
    /// Number of the gang, 0 to 29.
    pub gang: u32,
    /// Length of the turn, 1 000 to 1 000 000.
    pub turn_us: u64,
    /// Gangs that may use CPUs which this turn leaves idle, ascending; if empty, no other gang may use them.
    #[serde(default)]
    pub may_fill: Vec<u32>,
}

/// A planned task, which is a process or a thread, with its gang and its caches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduledTask {
    /// Id of a process, all of whose threads are planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// Id of a thread, as gettid(2) returns it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thread: Option<u32>,
    /// Gang of the task, which has a turn at each of the task's caches.
    pub gang: u32,
    /// Caches on whose CPUs it may run.
    pub caches: Vec<u32>,
    /// Share of CPU time relative to other tasks, 1 to 10 000.
    #[serde(default = "default_weight")]
    pub weight: u32,
    /// Whether its future children belong to the gang too.
    #[serde(default)]
    pub children: bool,
}

fn default_weight() -> u32 {
    100
}

/// The scheduler's reply.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SchedulerReply {
    /// The request was refused: the place, what was found and what was expected.
    Error {
        /// The scheduler's message.
        error: String,
    },
    /// The scheduler has accepted a plan.
    Taken {
        /// Generation of the plan.
        generation: u64,
        /// Whether the plan is in force; if false, it will be once the scheduler is attached again.
        attached: bool,
        /// Tasks that the scheduler could not take, with the reasons.
        complaints: Vec<String>,
    },
    /// The state in force.
    State(Box<SchedulerState>),
}

/// The state in force, as the scheduler reads it back from the kernel. What the scheduler adds to a cache, its client
/// ignores.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct SchedulerState<Cache = CacheTurns> {
    /// Generation of the plan in force; 0 if there is none yet.
    pub generation: u64,
    /// `enabled` while it schedules.
    pub kernel: String,
    /// The reason why it has detached from the CPUs, if it has.
    pub guarded: Option<String>,
    /// Number of places in the plan.
    pub places: usize,
    /// Threads that it schedules.
    pub held: usize,
    /// Caches in order of their numbers.
    pub caches: Vec<Cache>,
}

impl SchedulerState {
    /// All turns in force, cache by cache.
    pub fn turns(&self) -> Vec<ScheduledTurn> {
        self.caches
            .iter()
            .flat_map(|cache| cache.turns.iter().cloned())
            .collect()
    }
}

/// One last-level cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CacheTurns {
    /// CPUs in the kernel's list format: `0-3`.
    pub cpus: String,
    /// Turns in the order of the rotation.
    pub turns: Vec<ScheduledTurn>,
}
