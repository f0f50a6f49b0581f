//! Machines: topology, abilities, partitions, and the trait.
//!
//! A policy must not know whether it decides for a host, a simulator or a recording, and still has
//! to know what it can ask for. So what a machine can do is data: each [`Ability`] is supported,
//! perhaps with a limit in words, or it is not, for a reason and with a remedy if there is one. A
//! policy that needs more than one machine offers reads this and does something else; it never
//! tries and fails.
//!
//! For example, a guest has no counters of misses and one L3 that its two CPUs share. Its
//! capabilities have affinity and weights, the probes that need no counters, and no partition.
//! `cache-sizing` therefore changes nothing there, and its missing evidence is reported with the
//! reason before the first window.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    AppliedPlan, CacheId, CacheLevel, CpuId, CpuSet, IndexSet, MachineSpec, Observation,
    PageMigration, Plan, Units,
};

/// Whether a machine has an ability, and if not, the reason and the remedy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Support {
    /// The machine has it; `note` describes limits ("4 at once", "no reuses below 1 ms").
    Yes {
        /// `None` if there is no notable limit.
        note: Option<String>,
    },
    /// The machine lacks it.
    No {
        /// The reason: the part that is missing.
        reason: String,
        /// A step by which the user can enable the ability; `None` if there is no known remedy.
        remedy: Option<String>,
    },
}

impl Support {
    /// Support with a note; an empty one means that there is no notable limit.
    pub fn with_note(note: impl Into<String>) -> Self {
        Support::Yes {
            note: Some(note.into()).filter(|note| !note.is_empty()),
        }
    }

    /// Support if a condition holds, and otherwise none, for this reason and without a remedy.
    pub fn provided(is_supported: bool, reason: &str) -> Self {
        if is_supported {
            Support::with_note("")
        } else {
            Support::No {
                reason: reason.to_string(),
                remedy: None,
            }
        }
    }
}

/// Something that a machine may be able to measure or to enforce.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Ability {
    /// Event counts by task ([`crate::TaskSample::counts`]).
    CountPerTask,
    /// Event counts of a whole cache ([`crate::CounterScope::Cache`]).
    CountPerCache,
    /// Bytes of a cache that a group occupies ([`crate::ActiveShare::occupancy_bytes`]).
    CacheOccupancy,
    /// Logs of the addresses that missed ([`crate::ProbeKind::MissTrace`]).
    TraceAddresses,
    /// Samples of individual accesses ([`crate::ProbeKind::AccessSamples`]).
    SampleAccesses,
    /// Reuse times of individual locations ([`crate::ProbeKind::ReuseTimes`]).
    SampleReuses,
    /// Accesses and misses by super set ([`crate::ProbeKind::SuperSets`]).
    CountSuperSets,
    /// Measurement without counters: a neighbor, ping-pong, or evictions from a buffer of the machine.
    ProbeFromOutside,
    /// Restriction of a task to certain CPUs ([`crate::Plan::affinity`]).
    Affinity,
    /// Shares of CPU time ([`crate::Plan::weights`]).
    Weights,
    /// Tasks that run in the same turn ([`crate::Plan::gangs`]).
    Gangs,
    /// Advice on tasks that should not run together ([`crate::Plan::penalties`]).
    Penalties,
    /// Partitioning of a cache by page colors ([`PartitionSupport::Colors`]).
    Colors,
    /// Partitioning of a cache by ways ([`PartitionSupport::Ways`]).
    Ways,
    /// Limits of memory bandwidth ([`crate::Plan::bandwidth`]).
    Bandwidth,
}

impl Ability {
    /// Every ability, in the order of their declaration.
    pub const ALL: [Self; 15] = {
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
            Bandwidth,
        ]
    };
}

/// A way in which a cache can be partitioned, with its units.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum PartitionSupport {
    /// By page colors.
    Colors {
        /// Number of colors.
        colors: u32,
        /// Size of a page.
        page_bytes: u64,
        /// Measured cost of moving one page to another color, including the copy.
        page_migration_ns: f64,
    },
    /// By masks of ways.
    Ways {
        /// Ways that can be assigned; exclusive upper bound of the indices of a mask.
        ways: u32,
        /// Minimum number of ways in a mask.
        min_ways: u32,
        /// Must a mask be contiguous?
        contiguous: bool,
        /// Maximum number of groups with separate masks. On a live host, classes of service, including the default one.
        max_groups: u32,
        /// Ways that devices fill too, as the kernel's mask (bit 0 is way 0), so that a group's lines there are not
        /// its own: groups get them last. 0 if none is known.
        #[serde(default)]
        device_ways: u64,
    },
}

impl PartitionSupport {
    /// The ways in which a modeled machine can partition a cache: page colors at the last level, and ways.
    pub fn of_modeled_cache(spec: &MachineSpec, cache: &Cache) -> Vec<(CacheId, Self)> {
        let page_migration_ns = spec.pages.migration_cycles as f64 * 1e9 / spec.hertz as f64;
        let colors = spec.pages.colors.filter(|_| cache.last_level);
        let by_color = colors.map(|colors| PartitionSupport::Colors {
            colors,
            page_bytes: spec.pages.page_bytes,
            page_migration_ns,
        });

        let by_way = spec
            .caches
            .iter()
            .find(|described| described.level == cache.level)
            .and_then(|described| {
                let groups = described.way_partitions?;
                Some(PartitionSupport::Ways {
                    ways: described.ways,
                    min_ways: groups.min_ways,
                    contiguous: groups.contiguous,
                    max_groups: groups.groups,
                    device_ways: 0,
                })
            });
        by_color
            .into_iter()
            .chain(by_way)
            .map(|partition| (cache.id, partition))
            .collect()
    }

    /// The way to prefer: ways before colors, because ways need no copying. `None` without partitions.
    pub fn preferred<'a>(partitions: impl Iterator<Item = &'a Self>) -> Option<Self> {
        partitions.copied().reduce(|a, b| {
            if matches!(a, PartitionSupport::Ways { .. }) {
                a
            } else {
                b
            }
        })
    }

    /// The number of colors; `None` for a partition by ways.
    pub fn colors(&self) -> Option<u32> {
        match *self {
            PartitionSupport::Colors { colors, .. } => Some(colors),
            PartitionSupport::Ways { .. } => None,
        }
    }

    /// The maximum number of groups of ways; `None` for a partition by colors.
    pub fn way_groups(&self) -> Option<u32> {
        match *self {
            PartitionSupport::Colors { .. } => None,
            PartitionSupport::Ways { max_groups, .. } => Some(max_groups),
        }
    }

    /// Colors or ways of the whole cache.
    pub fn units(&self) -> u32 {
        match *self {
            PartitionSupport::Colors { colors: units, .. }
            | PartitionSupport::Ways { ways: units, .. } => units,
        }
    }

    /// The units that devices fill too; none of a partition by colors.
    pub fn device_units(&self) -> IndexSet {
        match *self {
            PartitionSupport::Colors { .. } => IndexSet::default(),
            PartitionSupport::Ways { device_ways, .. } => (0..u64::BITS)
                .filter(|way| device_ways >> way & 1 == 1)
                .collect(),
        }
    }

    /// The minimum number of units of a group.
    pub fn min_units(&self) -> u32 {
        match *self {
            PartitionSupport::Colors { .. } => 1,
            PartitionSupport::Ways { min_ways, .. } => min_ways.max(1),
        }
    }

    /// The maximum number of groups, besides the class of service of ungrouped processes.
    pub fn max_shares(&self) -> u32 {
        self.way_groups().map_or(self.units(), |max_groups| {
            max_groups.saturating_sub(1).min(self.units())
        })
    }

    /// Converts a set of units to ways or colors.
    pub fn to_units(&self, units: IndexSet, migration: PageMigration) -> Units {
        match self {
            PartitionSupport::Colors { .. } => Units::Colors {
                allowed: units,
                migration,
            },
            PartitionSupport::Ways { .. } => Units::Ways { mask: units },
        }
    }
}

/// The unit in which a machine limits memory bandwidth.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BandwidthUnit {
    /// Percent of the requests that a core can send (Intel MBA, Arm MPAM); the same percentage lets a group with more
    /// cores transfer more.
    Percent,
    /// MiB a second of the whole group (`mba_MBps`).
    MebibytesPerSecond,
    /// Eighths of a GB a second of the whole group (AMD).
    EighthsOfGigabytePerSecond,
}

impl BandwidthUnit {
    /// Bytes a second of one unit; `None` for percentages, whose whole is not known.
    pub fn bytes_per_second(self) -> Option<f64> {
        match self {
            BandwidthUnit::Percent => None,
            BandwidthUnit::MebibytesPerSecond => Some(f64::from(1 << 20)),
            BandwidthUnit::EighthsOfGigabytePerSecond => Some(1e9 / 8.0),
        }
    }

    /// A limit as users read it, such as `50 %`.
    pub fn describe(self, level: u32) -> String {
        match self {
            BandwidthUnit::Percent => format!("{level} %"),
            BandwidthUnit::MebibytesPerSecond => format!("{level} MiB/s"),
            BandwidthUnit::EighthsOfGigabytePerSecond => {
                format!("{} GB/s", f64::from(level) / 8.0)
            }
        }
    }
}

/// The limits that a machine can set on the traffic between memory and a cache, in one unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BandwidthSupport {
    /// The unit of all limits.
    pub unit: BandwidthUnit,
    /// The smallest limit.
    pub min_level: u32,
    /// The distance of two limits; greater than 0.
    pub step: u32,
    /// The limit of a group that is not limited.
    pub max_level: u32,
    /// Maximum number of groups with separate limits, including the default one.
    pub max_groups: u32,
}

impl BandwidthSupport {
    /// The limit that the machine sets if this one is requested: the next higher one that it has.
    pub fn nearest_level(&self, requested: u32) -> u32 {
        let level = requested.clamp(self.min_level, self.max_level);
        let steps = (level - self.min_level).div_ceil(self.step.max(1));
        (steps.saturating_mul(self.step.max(1)))
            .saturating_add(self.min_level)
            .min(self.max_level)
    }
}

/// The abilities of a machine and the partitions of its caches.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Capabilities {
    /// Every ability that the machine knows; a missing one is not supported.
    pub abilities: BTreeMap<Ability, Support>,
    /// The ways in which each cache can be partitioned; a cache may occur several times or not at all.
    pub partitions: Vec<(CacheId, PartitionSupport)>,
    /// The limits on the traffic between memory and each last-level cache; a cache without limits is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bandwidth: Vec<(CacheId, BandwidthSupport)>,
    /// The shortest window that the machine supports.
    pub min_window_ns: u64,
    /// The shortest quantum of a gang; `None` if there is no known limit, or if there are no gangs.
    pub min_slice_ns: Option<u64>,
}

/// The part of the machine that policies see.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Topology {
    /// Every CPU, online or not, in ascending order.
    pub cpus: Vec<Cpu>,
    /// Every cache, in the order of their ids.
    pub caches: Vec<Cache>,
    /// Latency of each node's memory (second index) from the CPUs of each node (first index), relative to the node's
    /// own memory; indexed by node number. Empty if there is one node, or if the latencies are unknown. A missing node
    /// has an empty row and zeros.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_latency: Vec<Vec<f64>>,
}

/// One hardware context.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cpu {
    /// The number that the operating system gives it.
    pub id: CpuId,
    /// The core to which it belongs; dense, counted over the whole machine.
    pub core: u32,
    /// The chip or socket to which it belongs; dense.
    pub package: u32,
    /// Memory node nearest to the CPU.
    pub memory_node: u32,
    /// Can tasks run on it?
    pub online: bool,
    /// Clock frequency; `None` if unknown.
    pub hertz: Option<u64>,
}

/// One instance of a cache.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cache {
    /// Index of the cache in [`Topology::caches`].
    pub id: CacheId,
    /// Level of the cache; first-level instruction and data caches have separate levels.
    pub level: CacheLevel,
    /// The CPUs that share it.
    pub cpus: CpuSet,
    /// Is it the contended cache, with only memory (or a victim cache) behind it?
    pub last_level: bool,
    /// Size of all slices together; `None` if the machine does not report it.
    pub size_bytes: Option<u64>,
    /// Lines per set; `None` if the machine does not report it.
    pub ways: Option<u32>,
    /// Line size in bytes; `None` if the machine does not report it.
    pub line_bytes: Option<u32>,
}

impl Topology {
    /// CPUs that may run tasks now; the topology lists the others as well.
    pub fn online(&self) -> CpuSet {
        self.cpus
            .iter()
            .filter(|cpu| cpu.online)
            .map(|cpu| cpu.id.0)
            .collect()
    }

    /// `None` if no cache of the topology has this id.
    pub fn cache(&self, id: CacheId) -> Option<&Cache> {
        self.caches.iter().find(|cache| cache.id == id)
    }

    /// The last-level caches, in order of their ids.
    pub fn last_level_caches(&self) -> impl Iterator<Item = &Cache> {
        self.caches.iter().filter(|cache| cache.last_level)
    }

    /// Level of the first last-level cache; `None` if no cache is known.
    pub fn last_level(&self) -> Option<CacheLevel> {
        self.last_level_caches().next().map(|cache| cache.level)
    }

    /// The factor by which an access from node `node_from` takes longer than one to its own memory, averaged over these
    /// pages by node. `None` if the latency between the nodes or the location of the pages is unknown.
    pub fn memory_factor(&self, source_node: u32, pages_per_node: &[u64]) -> Option<f64> {
        let row = self.memory_latency.get(source_node as usize)?;
        let pages: u64 = pages_per_node.iter().sum();
        let weighted_factor = |(node, &pages): (usize, &u64)| {
            Some(pages as f64 * row.get(node).copied().filter(|factor| *factor >= 1.0)?)
        };
        let nodes = pages_per_node
            .iter()
            .enumerate()
            .filter(|(_, pages)| **pages > 0)
            .map(weighted_factor);
        let total_factor = nodes.sum::<Option<f64>>()?;
        (pages > 0).then(|| total_factor / pages as f64)
    }

    /// `None` if no last-level cache serves this CPU.
    pub fn last_level_cache_of(&self, cpu: CpuId) -> Option<&Cache> {
        self.last_level_caches()
            .find(|cache| cache.cpus.contains(cpu.0))
    }

    /// Each last-level cache with its online CPUs, in the topology's order; caches without online CPUs are omitted.
    pub fn online_last_levels(&self) -> Vec<(CacheId, CpuSet)> {
        let online = self.online();
        let caches = self
            .last_level_caches()
            .map(|cache| (cache.id, cache.cpus.intersection(&online)));
        caches.filter(|(_, cpus)| !cpus.is_empty()).collect()
    }

    /// The online CPUs of each last-level cache, as [`Topology::online_last_levels`] lists them. A position in the list
    /// changes when an earlier cache goes offline, so state that outlives a window names the cache.
    pub fn last_level_domains(&self) -> Vec<CpuSet> {
        self.online_last_levels()
            .into_iter()
            .map(|(_, cpus)| cpus)
            .collect()
    }
}

impl Capabilities {
    /// False as well if the machine does not list the ability.
    pub fn has_ability(&self, ability: Ability) -> bool {
        matches!(self.abilities.get(&ability), Some(Support::Yes { .. }))
    }

    /// The ways in which a cache can be partitioned; empty if there is none.
    pub fn partitions_of(&self, cache: CacheId) -> impl Iterator<Item = &PartitionSupport> {
        self.partitions
            .iter()
            .filter(move |(id, _)| *id == cache)
            .map(|(_, partition)| partition)
    }

    /// The limits on the traffic between memory and a cache; `None` if it cannot be limited.
    pub fn bandwidth_of(&self, cache: CacheId) -> Option<&BandwidthSupport> {
        let mut limits = self.bandwidth.iter();
        limits.find(|(id, _)| *id == cache).map(|(_, limit)| limit)
    }

    /// The number of page colors of a cache; `None` if pages cannot be placed by color.
    pub fn colors_of(&self, cache: CacheId) -> Option<u32> {
        self.partitions_of(cache).find_map(PartitionSupport::colors)
    }
}

/// The machine could not observe or act at all; a refusal of a single item is in [`AppliedPlan::refused`] instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MachineError(pub String);

/// A machine on which tasks run: a host, a simulated machine or a recording.
pub trait Machine {
    /// The CPUs and caches. The set of online CPUs may change between windows.
    fn topology(&self) -> &Topology;
    /// What the machine can observe and change.
    fn capabilities(&self) -> &Capabilities;
    /// Runs or waits for one window; `None` if the run has ended.
    fn observe(&mut self) -> Result<Option<Observation>, MachineError>;
    /// Applies a plan; idempotent. Slow actions are started but not awaited. The next `Observation::applied` reports
    /// their progress, what of the plan was refused, and whether it is only a proposal.
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError>;
}
