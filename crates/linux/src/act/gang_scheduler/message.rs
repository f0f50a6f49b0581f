//! The messages of the gang scheduler's socket, as docs/sched-ext.md describes them: one JSON object per line.

use cachemate_core::CpuSet;
use serde::{Deserialize, Serialize};

/// The message's version.
pub const VERSION: u32 = 1;

/// A request to the scheduler.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SchedulerRequest {
    /// Puts this plan in force.
    Plan(SchedulerPlan),
    /// Queries the state in force.
    State {},
}

/// A whole plan: threads that it does not name are not scheduled by gangs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerPlan {
    /// [`VERSION`].
    pub version: u32,
    /// Larger than that of the plan in force.
    pub generation: u64,
    /// The longest acceptable wait of a task.
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
pub struct ScheduledTurn {
    /// Number of the cache, by [`SchedulerState`].
    pub cache: u32,
    /// Number of the gang, 0 to 29.
    pub gang: u32,
    /// Length of the turn, 1 000 to 1 000 000.
    pub turn_us: u64,
    /// Gangs that may use CPUs which this turn leaves idle, ascending.
    #[serde(default)]
    pub may_fill: Vec<u32>,
}

/// A planned thread with its gang and its caches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduledTask {
    /// The id that gettid(2) returns.
    pub thread: u32,
    /// Gang of the task, which has a turn at each of the task's caches.
    pub gang: u32,
    /// Caches on whose CPUs it may run.
    pub caches: Vec<u32>,
    /// Share of CPU time relative to other tasks, 1 to 10 000; 100 is the default.
    pub weight: u32,
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

/// The state in force, as the scheduler reads it back from the kernel.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct SchedulerState {
    /// Generation of the plan in force; 0 if there is none yet.
    pub generation: u64,
    /// `enabled` while it schedules.
    pub kernel: String,
    /// The reason why it has detached from the CPUs, if it has.
    pub guarded: Option<String>,
    /// Number of places in the plan.
    pub places: u64,
    /// Threads that it schedules.
    pub held: u64,
    /// Caches in order of their numbers.
    pub caches: Vec<CacheTurns>,
}

/// One last-level cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CacheTurns {
    /// CPUs in the kernel's list format: `0-3`.
    pub cpus: String,
    /// Turns in the order of the rotation.
    pub turns: Vec<ScheduledTurn>,
    /// Counts since the scheduler was attached.
    pub counts: CacheTurnCounts,
}

/// Counts of the CPUs of a cache; a selection of those that the scheduler keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CacheTurnCounts {
    /// Turns that began.
    pub turns: u64,
    /// Longest wait of a planned task.
    pub longest_wait_ns: u64,
    /// Time in which all CPUs ran the gang whose turn it was.
    pub turn_ns: u64,
    /// Time in which the CPUs ran tasks of several gangs.
    pub mixed_ns: u64,
    /// Time in which CPUs ran another gang than the one whose turn it was.
    pub off_turn_ns: u64,
    /// Time in which some CPUs were idle and the others ran the gang.
    pub partly_idle_ns: u64,
    /// Time in which all CPUs were idle.
    pub idle_ns: u64,
}

/// A last-level cache as the scheduler numbers it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NumberedCache {
    /// Position of the cache in the scheduler's list.
    pub number: u32,
    /// CPUs that share it.
    pub cpus: CpuSet,
}

impl SchedulerState {
    /// The caches with their CPUs.
    ///
    /// # Errors
    /// The text of an invalid CPU list.
    pub fn caches(&self) -> Result<Vec<NumberedCache>, String> {
        let parse_cache = |(number, state): (usize, &CacheTurns)| {
            let cpus: Result<CpuSet, _> = state.cpus.parse();
            let cpus = cpus.map_err(|error| {
                format!("caches[{number}].cpus: found '{}': {error}", state.cpus)
            })?;
            Ok(NumberedCache {
                number: number as u32,
                cpus,
            })
        };
        self.caches.iter().enumerate().map(parse_cache).collect()
    }

    /// All turns in force, cache by cache.
    pub fn turns(&self) -> Vec<ScheduledTurn> {
        self.caches
            .iter()
            .flat_map(|cache| cache.turns.iter().cloned())
            .collect()
    }
}
