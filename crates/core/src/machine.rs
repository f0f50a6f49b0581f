//! Machines: topology, abilities, partitions, and the trait itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{AppliedPlan, CacheId, CacheLevel, CpuId, CpuSet, Observation, Plan};

/// Whether a machine has an ability, or else the reason and the remedy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Support {
    /// The machine has it; `note` describes limits ("4 at once", "no reuses below 1 ms").
    Yes {
        /// `None` if there is no notable limit.
        note: Option<String>,
    },
    /// Not here.
    No {
        /// The reason: the part that is missing.
        #[serde(alias = "why")]
        reason: String,
        /// A step by which the user can enable the ability; `None` if none is known.
        remedy: Option<String>,
    },
}

/// Something that a machine may be able to measure or to enforce.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Ability {
    /// Counts of events for each task ([`crate::TaskSample::counts`]).
    CountPerTask,
    /// Counts of events for a whole cache ([`crate::CounterScope::Cache`]).
    CountPerCache,
    /// How much of a cache a group holds ([`crate::ActiveShare::occupancy_bytes`]).
    CacheOccupancy,
    /// Logs of the addresses that missed ([`crate::ProbeKind::MissTrace`]).
    TraceAddresses,
    /// Samples of single accesses ([`crate::ProbeKind::AccessSamples`]).
    SampleAccesses,
    /// Reuse times of single locations ([`crate::ProbeKind::ReuseTimes`]).
    SampleReuses,
    /// Accesses and misses by super set ([`crate::ProbeKind::SuperSets`]).
    CountSuperSets,
    /// Measurement without counters: a neighbor, ping-pong, or evictions of a buffer of the machine's own.
    ProbeFromOutside,
    /// Keeping a task to some CPUs ([`crate::Plan::affinity`]).
    Affinity,
    /// Shares of CPU time ([`crate::Plan::weights`]).
    Weights,
    /// Tasks that run in the same turns ([`crate::Plan::gangs`]).
    Gangs,
    /// Advice on who should not run together ([`crate::Plan::penalties`]).
    Penalties,
    /// Division of a cache by the colors of pages ([`PartitionSupport::Colors`]).
    Colors,
    /// Division of a cache by its ways ([`PartitionSupport::Ways`]).
    Ways,
}

impl Ability {
    /// Every ability, in the order of their declaration.
    pub const ALL: [Self; 14] = {
        use Ability::*;
        [
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
        ]
    };
}

/// How a cache can be divided.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum PartitionSupport {
    /// `move_page_ns`: measured cost of giving one page another color.
    Colors {
        /// Number of colors.
        colors: u32,
        /// Size of a page.
        page_bytes: u64,
        /// For one page, copying included.
        #[serde(alias = "move_page_ns")]
        page_migration_ns: f64,
    },
    /// By masks of ways.
    Ways {
        /// Ways that can be given; indices of a mask are below it.
        ways: u32,
        /// Ways that a mask must have at least.
        #[serde(alias = "at_least")]
        min_ways: u32,
        /// A mask must be in one piece.
        contiguous: bool,
        /// Groups with masks of their own at once. On a live host, classes of service, the default one among them.
        #[serde(alias = "groups_at_most")]
        max_groups: u32,
    },
}

/// The abilities of a machine and the partitions of its caches.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Capabilities {
    /// Every ability that the machine knows of; a missing one is not supported.
    pub abilities: BTreeMap<Ability, Support>,
    /// How each cache can be divided; a cache may be here several times or not at all.
    pub partitions: Vec<(CacheId, PartitionSupport)>,
    /// The shortest window that the machine can keep.
    #[serde(alias = "shortest_window_ns")]
    pub min_window_ns: u64,
    /// Shortest turn of a gang; `None` = no limit is known, or there are no gangs.
    #[serde(alias = "shortest_slice_ns")]
    pub min_slice_ns: Option<u64>,
}

/// The part of the machine that policies see.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Topology {
    /// Every CPU, online or not, in ascending order.
    pub cpus: Vec<Cpu>,
    /// Every cache, in the order of their ids.
    pub caches: Vec<Cache>,
    /// Latency of each node's memory (second index) from each node's CPUs (first index), over that of the node's own; by the
    /// nodes' numbers. Empty = one node, or not known. A node that is not there has an empty row and zeros.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_latency: Vec<Vec<f64>>,
}

/// One hardware context.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cpu {
    /// As the operating system numbers it.
    pub id: CpuId,
    /// Core that it is a context of; dense, counted over the whole machine.
    pub core: u32,
    /// Chip or socket that it is on; dense.
    pub package: u32,
    /// Its nearest memory node.
    pub memory_node: u32,
    /// Tasks can run on it.
    pub online: bool,
    /// Clock; `None` = not known.
    pub hertz: Option<u64>,
}

/// One instance of a cache.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cache {
    /// Its index in [`Topology::caches`].
    pub id: CacheId,
    /// Its level, with first-level instruction and data caches apart.
    pub level: CacheLevel,
    /// The CPUs that share it.
    pub cpus: CpuSet,
    /// The contended one: nothing but memory (or a victim cache) behind it.
    pub last_level: bool,
    /// All slices together; `None` = the machine does not say.
    pub size_bytes: Option<u64>,
    /// Lines of one set; `None` = the machine does not say.
    pub ways: Option<u32>,
    /// Bytes of a line; `None` = the machine does not say.
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
    pub fn last_level(&self) -> Option<CacheLevel> {
        self.last_level_caches().next().map(|cache| cache.level)
    }

    /// How much longer a line takes to CPUs of node `from` than from memory of their own, in the mean over these pages by
    /// node, as a factor. `None` if the latency between the nodes or the location of the pages is unknown.
    pub fn memory_factor(&self, from: u32, pages_per_node: &[u64]) -> Option<f64> {
        let row = self.memory_latency.get(from as usize)?;
        let pages: u64 = pages_per_node.iter().sum();
        let at = |(node, &pages): (usize, &u64)| Some(pages as f64 * row.get(node).copied().filter(|far| *far >= 1.0)?);
        let nodes = pages_per_node.iter().enumerate().filter(|(_, pages)| **pages > 0).map(at);
        let sum = nodes.sum::<Option<f64>>()?;
        (pages > 0).then(|| sum / pages as f64)
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
    pub fn partitions_of(&self, cache: CacheId) -> impl Iterator<Item = &PartitionSupport> {
        self.partitions.iter().filter(move |(id, _)| *id == cache).map(|(_, partition)| partition)
    }

    /// Number of page colors of a cache; `None` where pages cannot be placed.
    pub fn colors_of(&self, cache: CacheId) -> Option<u32> {
        self.partitions_of(cache).find_map(|partition| match partition {
            PartitionSupport::Colors { colors, .. } => Some(*colors),
            PartitionSupport::Ways { .. } => None,
        })
    }
}

/// The machine could not observe or act at all; a single refusal stands in [`AppliedPlan::refused`] instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MachineError(pub String);

/// A machine on which tasks run: a host, a simulated machine or a recording.
pub trait Machine {
    /// CPUs and caches. Which CPUs are online may change from window to window.
    fn topology(&self) -> &Topology;
    /// The abilities of this machine.
    fn capabilities(&self) -> &Capabilities;
    /// Runs or waits for one window; `None` = the run is over.
    fn observe(&mut self) -> Result<Option<Observation>, MachineError>;
    /// Idempotent. Starts what is slow and returns; `Observation::in_force` tells how far it got.
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError>;
}
