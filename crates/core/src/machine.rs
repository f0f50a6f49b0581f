//! What a machine is and what can be had from it: topology, abilities, partitions, and the trait itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Applied, CacheId, CpuId, CpuSet, Level, Observation, Plan};

/// What a machine can do, or why not and what would help.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Support {
    /// `note`: limits in words ("4 at once", "reuses under 1 ms not seen").
    Yes {
        note: Option<String>,
    },
    No {
        why: String,
        remedy: Option<String>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Ability {
    CountPerTask,
    CountPerCache,
    CacheOccupancy,
    TraceAddresses,
    SampleAccesses,
    SampleReuses,
    CountSuperSets,
    ProbeFromOutside,
    Affinity,
    Weights,
    Gangs,
    Penalties,
    Colors,
    Ways,
}

/// How a cache can be divided.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Partition {
    /// `move_page_ns`: measured cost of giving one page another color.
    Colors {
        colors: u32,
        page_bytes: u64,
        move_page_ns: f64,
    },
    Ways {
        ways: u32,
        at_least: u32,
        contiguous: bool,
        groups_at_most: u32,
    },
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Capabilities {
    pub abilities: BTreeMap<Ability, Support>,
    pub partitions: Vec<(CacheId, Partition)>,
    pub shortest_window_ns: u64,
    pub shortest_slice_ns: Option<u64>,
}

/// The part of the machine that policies see.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Topology {
    pub cpus: Vec<Cpu>,
    pub caches: Vec<Cache>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cpu {
    pub id: CpuId,
    pub core: u32,
    pub package: u32,
    pub memory_node: u32,
    pub online: bool,
    pub hertz: Option<u64>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cache {
    pub id: CacheId,
    pub level: Level,
    pub cpus: CpuSet,
    /// The contended one: nothing but memory (or a victim cache) behind it.
    pub last_level: bool,
    pub size_bytes: Option<u64>,
    pub ways: Option<u32>,
    pub line_bytes: Option<u32>,
}

impl Topology {
    /// CPUs that are online.
    pub fn online(&self) -> CpuSet {
        self.cpus.iter().filter(|cpu| cpu.online).map(|cpu| cpu.id.0).collect()
    }

    /// A cache by its id.
    pub fn cache(&self, id: CacheId) -> Option<&Cache> {
        self.caches.iter().find(|cache| cache.id == id)
    }

    /// The caches with nothing but memory behind them, in order of their ids.
    pub fn last_level_caches(&self) -> impl Iterator<Item = &Cache> {
        self.caches.iter().filter(|cache| cache.last_level)
    }

    /// The level of the first of them.
    pub fn last_level(&self) -> Option<Level> {
        self.last_level_caches().next().map(|cache| cache.level)
    }

    /// The last-level cache behind a CPU.
    pub fn last_level_of(&self, cpu: CpuId) -> Option<&Cache> {
        self.last_level_caches().find(|cache| cache.cpus.contains(cpu.0))
    }

    /// Online CPUs of each last-level cache, in the topology's order; caches without any are left out.
    pub fn last_level_domains(&self) -> Vec<CpuSet> {
        let online = self.online();
        let domains = self.last_level_caches().map(|cache| cache.cpus.intersection(&online));
        domains.filter(|cpus| !cpus.is_empty()).collect()
    }
}

impl Capabilities {
    /// Can the machine do this?
    pub fn can(&self, ability: Ability) -> bool {
        matches!(self.abilities.get(&ability), Some(Support::Yes { .. }))
    }

    /// How a cache can be divided; nothing where it cannot.
    pub fn partitions_of(&self, cache: CacheId) -> impl Iterator<Item = &Partition> {
        self.partitions.iter().filter(move |(id, _)| *id == cache).map(|(_, partition)| partition)
    }

    /// Number of page colors of a cache; `None` where pages cannot be placed.
    pub fn colors_of(&self, cache: CacheId) -> Option<u32> {
        self.partitions_of(cache).find_map(|partition| match partition {
            Partition::Colors { colors, .. } => Some(*colors),
            Partition::Ways { .. } => None,
        })
    }
}

/// The machine could not observe or act at all; a single refusal stands in [`Applied::refused`] instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MachineError(pub String);

pub trait Machine {
    fn topology(&self) -> &Topology;
    fn capabilities(&self) -> &Capabilities;
    /// Runs or waits for one window; `None` = the run is over.
    fn observe(&mut self) -> Result<Option<Observation>, MachineError>;
    /// Idempotent. Starts what is slow and returns; `Observation::in_force` tells how far it got.
    fn apply(&mut self, plan: &Plan) -> Result<Applied, MachineError>;
}
