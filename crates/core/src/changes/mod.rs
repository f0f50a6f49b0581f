//! From the desired state to the changes that establish it: one pure function, [`derive_changes`], for every machine.
//!
//! A list of changes is ordered. Each change names the changes on which it depends, prints as one line of text, and has
//! an inverse, so that every prefix of a list can be undone. A machine reads its [`MachineState`], derives the list,
//! and applies it with [`run`]: a change that fails skips only its dependents.

mod classes;
mod cpuset_steps;
mod derive;
mod describe;
mod execute;
mod masks;
mod state;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    CacheId, CpuSet, GangSchedule, IndexSet, PageMigration, PlanItem, ProcessId, RefusalReason,
    RefusedItem, TaskId,
};

pub use classes::{ServiceClass, ShareKey, assign_class_ids};
pub use derive::{ChangeList, derive_changes};
pub use execute::{ChangeOutcome, StaleChange, refused_items, run, undo};
pub use masks::{MaskConstraints, UnsupportedMask, nearest_mask};
pub use state::{ActuationLimits, MachineState, TaskState, TrackedObject};

/// Index of a change in its list, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ChangeId(pub u32);

/// A class of service that cachemate created: threads under the same way masks and limits of bandwidth.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ServiceClassId(pub u32);

/// Way masks by cache. A cache that is missing has the mask that the class got at its creation.
pub type WayMasks = BTreeMap<CacheId, IndexSet>;

/// The settings of a class of service, by cache. A cache that is missing has the setting that the class got at its
/// creation.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ClassLimits {
    /// Ways that the members may fill.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub masks: WayMasks,
    /// Limits of traffic to memory, in the unit of the machine.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub bandwidth: BTreeMap<CacheId, u32>,
}

impl ClassLimits {
    /// Whether every cache keeps the settings of the class's creation.
    pub fn is_empty(&self) -> bool {
        self.masks.is_empty() && self.bandwidth.is_empty()
    }
}

impl From<WayMasks> for ClassLimits {
    fn from(masks: WayMasks) -> Self {
        ClassLimits {
            masks,
            bandwidth: BTreeMap::new(),
        }
    }
}

/// A group of processes (a cgroup) that the operator confines to some CPUs, whatever the policy decides.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpusetGroup {
    /// Path of the group, as `/proc/PID/cgroup` shows it.
    pub cgroup: String,
    /// CPUs of the group's tasks such as `0-3,8`; they run on no other CPU, whatever their affinity is.
    pub cpus: CpuSet,
}

/// The page colors that a process may use, and the treatment of its pages that have other colors.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ColorAssignment {
    /// Colors that new pages may have.
    pub allowed: IndexSet,
    /// The treatment of pages that already have other colors.
    pub migration: PageMigration,
}

/// The effect of one change, with the state before it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangeKind {
    /// The CPUs that a task may run on.
    Affinity {
        /// The task whose CPUs change.
        task: TaskId,
        /// Command name of the task, for messages.
        name: String,
        /// CPUs before.
        from: CpuSet,
        /// CPUs after.
        to: CpuSet,
    },
    /// Share of CPU time relative to other tasks; 1 is the machine's default.
    Weight {
        /// The task whose weight changes.
        task: TaskId,
        /// Command name of the task, for messages.
        name: String,
        /// Weight before; positive.
        from: f64,
        /// Weight after; positive.
        to: f64,
    },
    /// The CPUs of a group; the empty set means the parent's CPUs.
    Cpuset {
        /// The confined group, by the path of its cgroup.
        group: String,
        /// CPUs before.
        from: CpuSet,
        /// CPUs after.
        to: CpuSet,
    },
    /// Creates a class of service of cachemate, without members.
    CreateClass {
        /// The class to create.
        class: ServiceClassId,
        /// Initial limits of the class; a missing cache has the machine's default for a new class.
        limits: ClassLimits,
    },
    /// Changes the limits of a class of service of cachemate.
    Schemata {
        /// The class; its members stay in it.
        class: ServiceClassId,
        /// Limits before.
        from: ClassLimits,
        /// Limits after.
        to: ClassLimits,
    },
    /// Changes the class of a task; `None` if it is in no class of cachemate.
    Member {
        /// The task that changes its class.
        task: TaskId,
        /// Command name of the task, for messages.
        name: String,
        /// Class before.
        from: Option<ServiceClassId>,
        /// Class after.
        to: Option<ServiceClassId>,
    },
    /// Removes a class of service of cachemate that has no members left.
    RemoveClass {
        /// The class to remove.
        class: ServiceClassId,
        /// Limits of the class, so that it can be created again.
        limits: ClassLimits,
    },
    /// Changes the colors of a process; `None` means all colors.
    Colors {
        /// The process whose pages are colored.
        process: ProcessId,
        /// Colors before.
        from: Option<ColorAssignment>,
        /// Colors after.
        to: Option<ColorAssignment>,
    },
    /// Ends the turns of gangs on some CPUs; afterward the members run as their affinity permits.
    StopGangs {
        /// The schedule that ends.
        schedule: GangSchedule,
    },
    /// Begins the turns of gangs on some CPUs.
    StartGangs {
        /// The schedule that begins.
        schedule: GangSchedule,
    },
}

/// One step from the current state to the desired one.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Change {
    /// Index of the change in the list.
    pub id: ChangeId,
    /// The items of the plan that request it; [`PlanItem::Plan`] if none does, because the change restores the original
    /// state.
    pub items: Vec<PlanItem>,
    /// Changes of the same list that this one requires; all precede it.
    pub depends_on: Vec<ChangeId>,
    /// The change.
    pub kind: ChangeKind,
}

impl Change {
    /// [`PlanItem::Plan`] if no single item requests the change.
    pub fn first_item(&self) -> PlanItem {
        self.items.first().cloned().unwrap_or(PlanItem::Plan)
    }

    /// The refusal of the change after an attempt that failed.
    pub fn failed(&self, error: impl std::fmt::Display) -> RefusedItem {
        RefusedItem {
            item: self.first_item(),
            reason: RefusalReason::Failed,
            message: error.to_string(),
        }
    }
}

impl ChangeKind {
    /// The inverse change: applied after this one, it restores the state before it.
    pub fn inverse(&self) -> ChangeKind {
        use ChangeKind::*;

        match self.clone() {
            Affinity {
                task,
                name,
                from,
                to,
            } => Affinity {
                task,
                name,
                from: to,
                to: from,
            },
            Weight {
                task,
                name,
                from,
                to,
            } => Weight {
                task,
                name,
                from: to,
                to: from,
            },
            Cpuset { group, from, to } => Cpuset {
                group,
                from: to,
                to: from,
            },
            CreateClass { class, limits } => RemoveClass { class, limits },
            Schemata { class, from, to } => Schemata {
                class,
                from: to,
                to: from,
            },
            Member {
                task,
                name,
                from,
                to,
            } => Member {
                task,
                name,
                from: to,
                to: from,
            },
            RemoveClass { class, limits } => CreateClass { class, limits },
            Colors { process, from, to } => Colors {
                process,
                from: to,
                to: from,
            },
            StopGangs { schedule } => StartGangs { schedule },
            StartGangs { schedule } => StopGangs { schedule },
        }
    }
}
