//! What was done: a state that was read back, not a receipt.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{CacheId, CacheShare, CoRunPenalty, CpuSet, GangSchedule, GroupId, ProbeId, TaskId};

/// A line of the plan, to say of it that it was refused or is under way.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum PlanItem {
    /// All of it (a replay that was told something else than the recorded run).
    Plan,
    /// The CPUs of a task.
    Affinity(TaskId),
    /// The weight of a task.
    Weight(TaskId),
    /// A gang schedule, by its index in [`crate::Plan::gangs`].
    Gangs(usize),
    /// A group's share of a cache.
    Share(GroupId, CacheId),
    /// All penalties together.
    Penalties,
    /// A probe, by the id that the plan gave it.
    Probe(ProbeId),
    /// The length of the window.
    Window,
}

/// Why a machine does not do what the plan says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RefusalReason {
    /// The task, process or group has ended.
    #[serde(alias = "Gone")]
    NotFound,
    /// The machine's owner or the kernel does not allow it.
    NoPermission,
    /// Something that there are few of has run out: classes of service, CPUs, memory.
    #[serde(alias = "NoRoom")]
    NoCapacity,
    /// Something else holds what is needed.
    Busy,
    /// This machine cannot do it at all, or cannot do it as it was asked for.
    NotSupported,
    /// Somebody else has taken the thing for himself, such as a class of service; it is left alone.
    #[serde(alias = "OwnedByAnother")]
    OwnedByOther,
    /// A replay cannot do what the recorded run did not do.
    NotRecorded,
    /// It was tried and went wrong, for a reason that fits none of the others.
    Failed,
}

/// One line of the plan that is not in force, or not as it was asked for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedItem {
    /// The line of the plan.
    pub item: PlanItem,
    /// The kind of reason, for programs that read it.
    #[serde(alias = "because")]
    pub reason: RefusalReason,
    /// The kernel's or the simulator's own words, with the path or the call.
    #[serde(alias = "said")]
    pub message: String,
}

/// A slow action: so far and in all, in pages, tasks or probe samples.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PendingItem {
    /// The line of the plan that is under way.
    pub item: PlanItem,
    /// Finished so far; at most `total`.
    pub done: u64,
    /// In all; `None` = not known yet.
    pub total: Option<u64>,
}

/// A share of a cache that is in force.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ActiveShare {
    /// As it is in force, which may be less than the plan asked for.
    pub share: CacheShare,
    /// Share of the members' resident pages in allowed colors.
    #[serde(alias = "pages_inside")]
    pub pages_in_share: Option<f64>,
    /// Pages taken from a color that was not allowed, because none was left; since the share began.
    pub fallback_pages: Option<u64>,
    /// What the members hold of the cache now; `None` = not measured.
    pub occupancy_bytes: Option<u64>,
}

/// The state as read back; the same type answers `apply` and stands in every observation.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct AppliedPlan {
    /// CPUs by task, as read back; tasks with the machine's default may be missing.
    pub affinity: BTreeMap<TaskId, CpuSet>,
    /// Weight by task, as read back, 1.0 = as the machine had it; tasks with that weight may be missing.
    pub weights: BTreeMap<TaskId, f64>,
    /// Gang schedules that are running.
    pub gangs: Vec<GangSchedule>,
    /// Shares that are in force, in whole or in part.
    pub shares: Vec<ActiveShare>,
    /// Penalties that the dispatcher has been told.
    pub penalties: Vec<CoRunPenalty>,
    /// Probes that are under way.
    pub probes: Vec<ProbeId>,
    /// Slow actions that are not finished.
    pub pending: Vec<PendingItem>,
    /// What the machine did not do, and why.
    pub refused: Vec<RefusedItem>,
    /// Changed by somebody else since the last look.
    #[serde(alias = "overridden")]
    pub overridden_by_others: Vec<PlanItem>,
    /// What the change cost so far: calls, page copies, stalls.
    pub cost_ns: u64,
}
