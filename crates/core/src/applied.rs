//! What was done: a state that was read back, not a receipt.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{CacheId, CacheShare, CoRunPenalty, CpuSet, GangSchedule, GroupId, ProbeId, TaskId};

/// A line of the plan, to say of it that it was refused or is under way.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Item {
    /// All of it (a replay that was told something else than the recorded run).
    Plan,
    Affinity(TaskId),
    Weight(TaskId),
    Gangs(usize),
    Share(GroupId, CacheId),
    Penalties,
    Probe(ProbeId),
    Window,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RefusedBecause {
    Gone,
    NoPermission,
    NoRoom,
    Busy,
    NotSupported,
    OwnedByAnother,
    /// A replay cannot do what the recorded run did not do.
    NotRecorded,
    Failed,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refused {
    pub item: Item,
    pub because: RefusedBecause,
    /// The kernel's or the simulator's own words, with the path or the call.
    pub said: String,
}

/// A slow action: so far and in all, in pages, tasks or probe samples.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pending {
    pub item: Item,
    pub done: u64,
    pub total: Option<u64>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ShareHeld {
    pub share: CacheShare,
    /// Share of the members' resident pages in allowed colors.
    pub pages_inside: Option<f64>,
    /// Pages taken from a color that was not allowed, because none was left; since the share began.
    pub fallback_pages: Option<u64>,
    pub occupancy_bytes: Option<u64>,
}

/// The state as read back; the same type answers `apply` and stands in every observation.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Applied {
    pub affinity: BTreeMap<TaskId, CpuSet>,
    pub weights: BTreeMap<TaskId, f64>,
    pub gangs: Vec<GangSchedule>,
    pub shares: Vec<ShareHeld>,
    pub penalties: Vec<CoRunPenalty>,
    pub probes: Vec<ProbeId>,
    pub pending: Vec<Pending>,
    pub refused: Vec<Refused>,
    /// Changed by somebody else since the last look.
    pub overridden: Vec<Item>,
    /// What the change cost so far: calls, page copies, stalls.
    pub cost_ns: u64,
}
