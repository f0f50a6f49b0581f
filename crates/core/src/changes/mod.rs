//! From what is wanted to the changes that bring it about: one pure function, [`derive_changes`], for every machine.
//!
//! A list of changes is ordered. Each change names what it depends on, prints as one plain line, and has an inverse, so that
//! every prefix of a list can be undone. A machine reads its [`MachineState`], asks for the list, and makes it with [`run`]:
//! a change that fails skips only what depends on it.

mod classes;
mod derive;
mod describe;
mod execute;
mod masks;
mod state;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{CacheId, CpuSet, GangSchedule, IndexSet, PageMigration, PlanItem, ProcessId, TaskId};

pub use classes::{ServiceClass, ShareKey, assign_class_ids};
pub use derive::{ChangeList, derive_changes};
pub use execute::{ChangeOutcome, StaleChange, refused_items, run, undo};
pub use masks::{MaskConstraints, UnsupportedMask, nearest_mask};
pub use state::{ActuationLimits, MachineState, TaskState, Tracked};

/// Place of a change in its list, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ChangeId(pub u32);

/// A class of service of our own: threads under the same way masks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ServiceClassId(pub u32);

/// Way masks by cache. A cache that is missing has the mask that the class was created with.
pub type WayMasks = BTreeMap<CacheId, IndexSet>;

/// A group of processes (a cgroup) that the operator keeps on some CPUs, whatever the policy decides.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CpusetGroup {
    /// As `/proc/PID/cgroup` shows it.
    pub cgroup: String,
    /// Its tasks run on no other CPU, whatever their affinity says.
    pub cpus: CpuSet,
}

/// The page colors that a process may use, and which of its pages move there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ColorAssignment {
    /// Colors that new pages may have.
    pub allowed: IndexSet,
    /// The treatment of pages that already have other colors.
    #[serde(alias = "moving")]
    pub migration: PageMigration,
}

/// The effect of one change, with the state before it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangeKind {
    /// The CPUs that a task may run on.
    Affinity {
        /// The task that moves.
        task: TaskId,
        /// Its command name, for people.
        name: String,
        /// CPUs before.
        from: CpuSet,
        /// CPUs after.
        to: CpuSet,
    },
    /// Share of CPU time relative to others; 1 = as the machine had it.
    Weight {
        /// The task whose weight changes.
        task: TaskId,
        /// Its command name, for people.
        name: String,
        /// Weight before; positive.
        from: f64,
        /// Weight after; positive.
        to: f64,
    },
    /// The CPUs of a group; the empty set means those of its parent.
    Cpuset {
        /// The confined group, by its cgroup's path.
        group: String,
        /// CPUs before.
        from: CpuSet,
        /// CPUs after.
        to: CpuSet,
    },
    /// Creates a class of service of our own, without members.
    CreateClass {
        /// The class that is made.
        class: ServiceClassId,
        /// Its initial masks; a missing cache has the machine's default for a new class.
        masks: WayMasks,
    },
    /// Changes the masks of a class of our own.
    Schemata {
        /// The class; its members stay in it.
        class: ServiceClassId,
        /// Masks before.
        from: WayMasks,
        /// Masks after.
        to: WayMasks,
    },
    /// `None` = in no class of ours.
    Member {
        /// The task that changes its class.
        task: TaskId,
        /// Its command name, for people.
        name: String,
        /// Class before.
        from: Option<ServiceClassId>,
        /// Class after.
        to: Option<ServiceClassId>,
    },
    /// Removes a class of service of our own that has no members left.
    RemoveClass {
        /// The class that goes.
        class: ServiceClassId,
        /// Its masks, so that it can be created again.
        masks: WayMasks,
    },
    /// `None` = every color.
    Colors {
        /// The process whose pages are colored.
        process: ProcessId,
        /// Colors before.
        from: Option<ColorAssignment>,
        /// Colors after.
        to: Option<ColorAssignment>,
    },
    /// Ends the turns of gangs on some CPUs; the members then run as their affinity says.
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

/// One step from what holds to what is wanted.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Change {
    /// Its place in the list.
    pub id: ChangeId,
    /// The lines of the plan that request it; [`PlanItem::Plan`] if none does, because the change restores the original
    /// state.
    pub items: Vec<PlanItem>,
    /// Changes of the same list without which this one makes no sense; all stand before it.
    #[serde(alias = "after")]
    pub depends_on: Vec<ChangeId>,
    /// The change.
    pub kind: ChangeKind,
}

impl ChangeKind {
    /// The inverse change: applied after this one, it restores the state before it.
    pub fn inverse(&self) -> ChangeKind {
        use ChangeKind::*;
        match self.clone() {
            Affinity { task, name, from, to } => Affinity { task, name, from: to, to: from },
            Weight { task, name, from, to } => Weight { task, name, from: to, to: from },
            Cpuset { group, from, to } => Cpuset { group, from: to, to: from },
            CreateClass { class, masks } => RemoveClass { class, masks },
            Schemata { class, from, to } => Schemata { class, from: to, to: from },
            Member { task, name, from, to } => Member { task, name, from: to, to: from },
            RemoveClass { class, masks } => CreateClass { class, masks },
            Colors { process, from, to } => Colors { process, from: to, to: from },
            StopGangs { schedule } => StartGangs { schedule },
            StartGangs { schedule } => StopGangs { schedule },
        }
    }
}
