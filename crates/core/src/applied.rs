//! The state in force after a plan was applied, read back rather than assumed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    BandwidthLimit, CacheId, CacheShare, CoRunPenalty, CpuSet, GangSchedule, GroupId, Plan,
    ProbeId, TaskId,
};

/// An item of the plan that was refused or is in progress.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum PlanItem {
    /// The whole plan (in a replay, a plan that differs from the recorded one).
    Plan,
    /// The CPUs of a task.
    Affinity(TaskId),
    /// The weight of a task.
    Weight(TaskId),
    /// A gang schedule, by its index in [`crate::Plan::gangs`].
    Gangs(usize),
    /// A group's share of a cache.
    Share(GroupId, CacheId),
    /// The limit of a group's traffic behind a cache.
    Bandwidth(GroupId, CacheId),
    /// All penalties.
    Penalties,
    /// A probe, by the id in the plan.
    Probe(ProbeId),
    /// The length of the window.
    Window,
}

/// The kind of reason why a machine does not apply an item of the plan.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RefusalReason {
    /// The task, process or group has ended.
    NotFound,
    /// The machine's owner or the kernel does not permit it.
    NoPermission,
    /// A scarce resource has run out: classes of service, CPUs, memory.
    NoCapacity,
    /// The resource is in use.
    Busy,
    /// This machine does not support the item, or not in the requested form.
    NotSupported,
    /// Another tool uses the object exclusively, such as a class of service, so it is left unchanged.
    OwnedByOther,
    /// The recorded run did not do this, so a replay cannot.
    NotRecorded,
    /// The attempt failed for any other reason.
    Failed,
}

/// One item of the plan that is not in force, or not in the requested form.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedItem {
    /// The item of the plan.
    pub item: PlanItem,
    /// The kind of reason, for programs.
    pub reason: RefusalReason,
    /// The message of the kernel or the simulator, with the path or the system call.
    pub message: String,
}

/// The progress of a slow action, in pages, tasks or probe samples.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PendingItem {
    /// The item of the plan that is in progress.
    pub item: PlanItem,
    /// Number of finished pages, tasks or probe samples, at most `total`.
    pub done: u64,
    /// The total; `None` if it is not known yet.
    pub total: Option<u64>,
}

/// A share of a cache that is in force.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ActiveShare {
    /// The share in force, which may be smaller or larger than the planned one.
    pub share: CacheShare,
    /// Share of the members' resident pages in allowed colors.
    pub pages_in_share: Option<f64>,
    /// Pages allocated since the share began that have a color outside of it, because no frame of its colors was free.
    pub fallback_pages: Option<u64>,
    /// Bytes of the cache that the members occupy; `None` if this is not measured.
    pub occupancy_bytes: Option<u64>,
}

/// The state as read back: the result of `apply`, and part of every observation.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct AppliedPlan {
    /// CPUs by task, as read back; tasks with the machine's default may be omitted.
    pub affinity: BTreeMap<TaskId, CpuSet>,
    /// Weight by task, as read back; 1.0 is the machine's default, and tasks with it may be omitted.
    pub weights: BTreeMap<TaskId, f64>,
    /// Gang schedules that are running.
    pub gangs: Vec<GangSchedule>,
    /// Shares that are in force, in whole or in part.
    pub shares: Vec<ActiveShare>,
    /// Limits of traffic that are in force.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bandwidth: Vec<BandwidthLimit>,
    /// Penalties that the dispatcher uses.
    pub penalties: Vec<CoRunPenalty>,
    /// Probes in progress.
    pub probes: Vec<ProbeId>,
    /// Slow actions that are not finished.
    pub pending: Vec<PendingItem>,
    /// Items that the machine did not apply, with their reasons.
    pub refused: Vec<RefusedItem>,
    /// Items whose state another tool has changed since the last observation.
    pub overridden_by_others: Vec<PlanItem>,
    /// Time that the change has taken: system calls, page copies, stalls.
    pub cost_ns: u64,
    /// Whether the plan is only a proposal, of which nothing but its probes and its window is in force: a host that
    /// only observes, or a replay of another plan.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_only_proposed: bool,
}

impl AppliedPlan {
    /// Adds the refusals that are not listed yet.
    pub fn add_refusals(&mut self, refusals: impl IntoIterator<Item = RefusedItem>) {
        for refusal in refusals {
            if !self.refused.contains(&refusal) {
                self.refused.push(refusal);
            }
        }
    }

    /// Whether the probe is among the refused items.
    pub fn has_refused_probe(&self, probe: ProbeId) -> bool {
        self.refused
            .iter()
            .any(|refused| refused.item == PlanItem::Probe(probe))
    }

    /// Records a task's CPUs and weight, unless they are the machine's default and `plan` does not state them.
    pub fn record_task(
        &mut self,
        task: TaskId,
        cpus: &CpuSet,
        weight: f64,
        all_cpus: &CpuSet,
        plan: &Plan,
    ) {
        if cpus != all_cpus || plan.affinity.contains_key(&task) {
            self.affinity.insert(task, cpus.clone());
        }
        if weight != 1.0 || plan.weights.contains_key(&task) {
            self.weights.insert(task, weight);
        }
    }
}
