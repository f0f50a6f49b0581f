//! The specification of a machine: all parameters from which the simulators build it, and on which
//! predictors rely.
//!
//! A forecast is meant for one machine, and it is compared with a run on the same machine, so there
//! is one description for both and not one for each use. `cachemate-spec` reads it from
//! `machines/*.toml`; the checks are here, because they have to cover a machine that code builds,
//! too.
//!
//! For example, `xeon-x5365-4` is one package of four cores with two L2s of 4 MiB and 16 ways, each
//! shared by two consecutive cores. It therefore has four CPUs and two instances of the contended
//! cache, which is the L2 because nothing but memory lies behind it. An L2 has 4,096 sets of 64
//! bytes, so pages of 4 KiB have 4,096 · 64 / 4,096 = 64 colors.
//!
//! CPUs are numbered context by context within a core, core by core within a package, package by
//! package.

use serde::{Deserialize, Serialize};

use crate::{
    BandwidthSupport, BandwidthUnit, Cache, CacheId, CacheLevel, Cpu, CpuId, CpuSet, Topology,
};

/// A whole machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSpec {
    /// Short name, as given on the command line.
    pub name: String,
    /// A one-line description.
    pub description: String,
    /// Sources of the figures: paper and section, data sheet, or measurement.
    pub sources: Vec<String>,
    /// Clock frequency of every core.
    pub hertz: u64,
    /// Chips or sockets.
    pub packages: u32,
    /// Cores of one package.
    pub cores_per_package: u32,
    /// Hardware threads per core.
    pub contexts_per_core: u32,
    /// Cycles from the outcome of a mispredicted branch to the first instruction of the right path. With it, what
    /// instructions cost between misses follows from the dependences and branches of a recording; without it, and on
    /// in-order cores, each takes its share of the issue width, as on the cycle-level machine. 1 to 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mispredict_cycles: Option<u32>,
    /// The kind of core; all cores are alike.
    pub pipeline: CoreModel,
    /// Caches from the core outward: L1I and L1D first, then any number of shared levels.
    pub caches: Vec<CacheSpec>,
    /// Latencies of transfers between caches that are not on the same path to memory.
    #[serde(default)]
    pub coherence: CoherenceSpec,
    /// Prefetchers beside the caches; empty for none.
    #[serde(default)]
    pub prefetchers: Vec<PrefetcherSpec>,
    /// Controllers, buses and latencies.
    pub memory: MemorySpec,
    /// Page size, colors, and the costs of page operations.
    #[serde(default)]
    pub pages: PageSpec,
    /// Costs of context switches and migrations, and the time slice.
    #[serde(default)]
    pub os: OsSpec,
    /// Maximum number of events counted at once, and the sampling of addresses.
    #[serde(default)]
    pub counters: PmuSpec,
}

/// The execution model of a core.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum CoreModel {
    /// Fine-grained multithreading (Niagara): the contexts share one instruction per cycle; a context that misses
    /// blocks, while the others continue.
    InOrder {
        /// Instructions per cycle of all contexts together; 1 to 4096.
        issue_width: u32,
        /// Stores in flight per context; with 0, a store that misses blocks its context as a load does.
        #[serde(default = "default_store_buffer")]
        store_buffer: u32,
    },
    /// Out-of-order execution; contexts share issue width, window and miss registers. A single context gives a core
    /// without multithreading.
    OutOfOrder {
        /// Instructions per cycle of all contexts together; 1 to 4096.
        issue_width: u32,
        /// Instructions in flight, shared by the running contexts.
        window: u32,
        /// L1 data cache misses in flight, shared by the running contexts.
        mshrs: u32,
        /// May instructions that do not need the value of an outstanding load pass those that wait for it?
        #[serde(default)]
        loads_pass: bool,
    },
}

fn default_store_buffer() -> u32 {
    8
}

impl CoreModel {
    /// An in-order core with the store buffer of a description that states none.
    pub fn in_order(issue_width: u32) -> Self {
        CoreModel::InOrder {
            issue_width,
            store_buffer: default_store_buffer(),
        }
    }

    /// The miss registers of an out-of-order core, or the stores of an in-order context.
    pub fn max_misses_in_flight(self) -> u32 {
        match self {
            CoreModel::InOrder { store_buffer, .. } => store_buffer.max(1),
            CoreModel::OutOfOrder { mshrs, .. } => mshrs,
        }
    }
}

/// One cache of the hierarchy; its sharers determine the number of instances.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheSpec {
    /// Level of the cache; first-level instruction and data caches have separate levels.
    pub level: CacheLevel,
    /// Size of one instance, all slices together.
    pub size_bytes: u64,
    /// Lines per set; 1 to 2^20.
    pub ways: u32,
    /// Line size in bytes; a power of two from 8 to 4096.
    pub line_bytes: u32,
    /// Cycles from the core's request to the data on a hit.
    pub latency_cycles: u32,
    /// The policy that selects the line to evict from a full set.
    #[serde(default)]
    pub replacement: ReplacementPolicy,
    /// Share of a stream's lines that take space as under LRU, from 0 to 1; `None` for that of the policy. A stream's
    /// lines are those that the program does not touch again while any cache of this size would hold them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_insertion: Option<f64>,
    /// Size of the cache that other systems fill too, of which `size_bytes` is what a slow random walk finds: on a
    /// guest of a machine whose other guests use the same cache. A line then stays for the time in which all of them
    /// together fill this size, whatever runs beside it in the same guest. A private cache's others run on the same
    /// core. `None` if the machine has the cache to itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool_bytes: Option<u64>,
    /// Traffic with which other systems fill the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbor_bytes_per_cycle: Option<f64>,
    /// Factor by which that traffic rises and falls, at least 1; `None` if it is steady. Forecasts are means over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbor_spread: Option<f64>,
    /// Factor by which the pool shrinks while that traffic rises, and grows while it falls, at least 1; `None` if it is
    /// steady.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool_spread: Option<f64>,
    /// Share of the time in which CPUs that share the cache by the kernel's list run on different ones, 0 to 1, because a
    /// hypervisor moves them; `None` for never. Forecasts are means over both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart_share: Option<f64>,
    /// Mean time for which a line stays in the pool that was touched once, as a share of that of a line that was touched
    /// again there, above 0 and at most 1: lines leave at random ([`crate::LineLifetimes`]); `None` for LRU. Many caches keep
    /// new lines on probation, so that a working set has to come back sooner to get into the cache than to remain there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probation_share: Option<f64>,
    /// The treatment of stores.
    #[serde(default)]
    pub write: WritePolicy,
    /// Relation of its content to that of the caches nearer to the core.
    #[serde(default)]
    pub inclusion: Inclusion,
    /// The address that selects the set; L1 caches only.
    #[serde(default)]
    pub index: SetIndexing,
    /// Consecutive cores that share one instance; at most all cores of a package.
    pub shared_by_cores: u32,
    /// Equal slices, selected by a hash of the line address; any number.
    #[serde(default = "one")]
    pub slices: u32,
    /// Fill bandwidth from this cache toward the core; `None` for no limit.
    pub bandwidth_bytes_per_cycle: Option<f64>,
    /// Cache Allocation Technology on this cache.
    pub way_partitions: Option<WayPartitions>,
}

fn one() -> u32 {
    1
}

/// The policy that selects the line to evict from a full set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplacementPolicy {
    /// The least recently used line.
    #[default]
    Lru,
    /// Tree-based pseudo-LRU; requires a power of two of ways.
    TreePlru,
    /// A seeded random line.
    Random,
    /// Static re-reference interval prediction with two bits: new lines are expected later than lines that were hit, so
    /// that a scan evicts itself (SRRIP-HP; Jaleel et al., ISCA 2010).
    Srrip,
    /// As `srrip`, but sets duel between its insertion and one that expects most new lines never, so that a part of a
    /// working set larger than the cache stays (DRRIP; Jaleel et al., ISCA 2010).
    Drrip,
}

impl ReplacementPolicy {
    /// Share of the lines of a stream that take space as under LRU beside a program that reuses its
    /// lines, as measured on the cycle-level machine (docs/simulators/interval.md).
    pub fn stream_insertion(self) -> f64 {
        match self {
            ReplacementPolicy::Lru | ReplacementPolicy::TreePlru | ReplacementPolicy::Random => 1.0,
            ReplacementPolicy::Srrip => SRRIP_STREAM_INSERTION,
            ReplacementPolicy::Drrip => DRRIP_STREAM_INSERTION,
        }
    }
}

const SRRIP_STREAM_INSERTION: f64 = 0.8;
const DRRIP_STREAM_INSERTION: f64 = 0.6;

/// The address from which the set index is taken. Tags are physical.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SetIndexing {
    /// The physical address, so that page colors partition the cache.
    #[default]
    Physical,
    /// The virtual address; page colors do not partition such a cache.
    Virtual,
}

/// The treatment of stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WritePolicy {
    /// Stores stay in this cache until the line is evicted; a store miss allocates the line.
    #[default]
    Back,
    /// Stores continue to the next level; a store miss does not allocate.
    Through,
}

/// Relation of a cache's content to that of the caches nearer to the core.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inclusion {
    /// Neither inclusive nor exclusive: each cache fills and evicts independently.
    #[default]
    NonInclusive,
    /// Contains everything that the caches nearer to the core contain; an eviction here invalidates the line there.
    Inclusive,
    /// Filled only by evictions from the preceding level; a hit moves the line back there (POWER5's L3).
    Victim,
}

/// Classes of service with way masks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WayPartitions {
    /// Classes of service, including the default one.
    pub groups: u32,
    /// Minimum number of ways in a mask.
    pub min_ways: u32,
    /// Must a mask be contiguous?
    pub contiguous: bool,
}

/// MESI by line between caches that are not on the same path to memory.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoherenceSpec {
    /// Latency of a hit in another cache of the same package; `None` for the latency of memory.
    pub same_package_cycles: Option<u32>,
    /// Latency of a hit in a cache of another package; `None` for the latency of memory.
    pub other_package_cycles: Option<u32>,
}

/// A hardware prefetcher beside a cache, shared by all sharers of the cache.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum PrefetcherSpec {
    /// Detects constant strides among the misses of a cache and fetches ahead of them.
    Stride {
        /// The cache that it serves.
        level: CacheLevel,
        /// Maximum number of streams that it tracks.
        streams: u32,
        /// Lines per prefetch.
        degree: u32,
    },
    /// As `stride`, for steps of one line upward only.
    NextLine {
        /// The cache that it serves.
        level: CacheLevel,
        /// Maximum number of streams that it tracks.
        streams: u32,
        /// Lines per prefetch.
        degree: u32,
    },
    /// Tracks pages upward and downward from the second access on, even if lines are skipped, and stays a number of
    /// lines ahead; fewer while the bus is busy.
    Streamer {
        /// The cache that it serves.
        level: CacheLevel,
        /// Maximum number of pages tracked upward; 1 to 4096.
        up_streams: u32,
        /// Maximum number of pages tracked downward; 1 to 4096.
        down_streams: u32,
        /// Maximum distance ahead of the last access, in lines; 1 to 4096.
        ahead_lines: u32,
    },
    /// Fetches the other line of an aligned pair.
    AdjacentLine {
        /// The cache that it serves.
        level: CacheLevel,
    },
}

/// Memory controllers, and the buses before them.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemorySpec {
    /// Memory of all nodes together; a multiple of the page size.
    pub size_bytes: u64,
    /// Number of controllers; packages are assigned to them in equal consecutive groups.
    pub nodes: u32,
    /// Cycles from the core's request to the data without queueing.
    pub local_latency_cycles: u32,
    /// The same latency to another node's memory.
    pub remote_latency_cycles: u32,
    /// Bandwidth of one controller.
    pub bytes_per_cycle: f64,
    /// Bandwidth of each package's bus (front-side bus); `None` if there is no such bus.
    pub package_bus_bytes_per_cycle: Option<f64>,
    /// Order of requests at buses and controllers.
    #[serde(default)]
    pub scheduling: MemorySchedulingSpec,
    /// Limits that a class of service may have on its traffic behind each last-level cache; `None` if it can have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_limits: Option<BandwidthSupport>,
}

/// The order of requests at buses and controllers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemorySchedulingSpec {
    /// Demand reads precede prefetches and write-backs, which fill the gaps; if false, requests are served in order of
    /// arrival. If `requests_in_flight` bounds the reads, they have priority only while they wait for a place: reads
    /// that hold one are served in the order in which they got it, before write-backs.
    pub demand_priority: bool,
    /// Maximum number of reads in flight on a package's bus (on a node's controller if there is no bus); `None` for no
    /// limit.
    pub requests_in_flight: Option<u32>,
    /// Maximum number of reads that one core has in flight beyond its private caches, prefetches included; `None` for no
    /// limit but the misses that it overlaps. By Little's law it bounds what a core reads alone. The cycle-level machine
    /// bounds reads of memory only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core_requests_in_flight: Option<u32>,
    /// Turnaround of a controller from reads to a batch of writes and back.
    pub turnaround_cycles: u32,
}

/// Pages, and the cache that the colors of their frames index.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PageSpec {
    /// Page size; a power of two from 512 bytes to 1 GiB.
    pub page_bytes: u64,
    /// Colors that the operating system uses; `None` if it does not color pages.
    pub colors: Option<u32>,
    /// Cost of copying a page of the running program to a frame of another color.
    pub migration_cycles: u64,
    /// Cost of allocating a page on its first touch.
    pub fault_cycles: u64,
}

impl Default for PageSpec {
    fn default() -> Self {
        // CP: 11 051 cycles to move a 4 KB page on POWER5.
        PageSpec {
            page_bytes: 4096,
            colors: None,
            migration_cycles: 11_051,
            fault_cycles: 1_000,
        }
    }
}

/// Costs of the operating system's actions.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OsSpec {
    /// Cost of switching a CPU to another task.
    pub context_switch_cycles: u64,
    /// Additional cost of a context switch if the task comes from another CPU.
    pub migration_cycles: u64,
    /// Time slice of the default scheduler, before scaling.
    pub time_slice_ns: u64,
}

impl Default for OsSpec {
    fn default() -> Self {
        OsSpec {
            context_switch_cycles: 3_000,
            migration_cycles: 3_000,
            time_slice_ns: 10_000_000,
        }
    }
}

/// The performance monitoring unit.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PmuSpec {
    /// Events counted at once; additional ones are multiplexed.
    pub count: u32,
    /// Cost of an overflow interrupt.
    pub interrupt_cycles: u64,
    /// The kind of address samples.
    pub sampler: SamplerModel,
}

impl Default for PmuSpec {
    fn default() -> Self {
        PmuSpec {
            count: 6,
            interrupt_cycles: 3_000,
            sampler: SamplerModel::Ideal,
        }
    }
}

/// The mechanism by which the hardware samples the addresses of misses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SamplerModel {
    /// Every event, exactly.
    #[default]
    Ideal,
    /// POWER5's sampled data address register: later events overwrite it, and after prefetches it is stale (RM).
    LastAddress,
    /// PEBS and IBS: tagged accesses, with source and latency.
    Tagged,
}

/// An impossible value in the specification of a machine.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("machine '{machine}', field '{field}': found {found}, expected {expected}")]
pub struct MachineSpecError {
    /// The machine's name.
    pub machine: String,
    /// Path of the field, such as `caches[2].ways`.
    pub field: String,
    /// The value, as text.
    pub found: String,
    /// The allowed values, as text.
    pub expected: String,
}

impl CacheSpec {
    /// The share that the description states, or else, in a pool, that of the time for which new lines stay, of which a stream's
    /// are all, or that of the replacement policy.
    pub fn effective_stream_insertion(&self) -> f64 {
        self.stream_insertion
            .or(self.pool_bytes.and(self.probation_share))
            .unwrap_or_else(|| self.replacement.stream_insertion())
    }

    /// The most that one program can hold, if it touches its lines fast enough.
    pub fn attainable_bytes(&self) -> u64 {
        self.pool_bytes.unwrap_or(self.size_bytes)
    }

    /// Sets of one slice. Requires a checked machine.
    pub fn sets_per_slice(&self) -> u64 {
        self.size_bytes / u64::from(self.slices) / u64::from(self.ways) / u64::from(self.line_bytes)
    }
}

impl MachineSpec {
    /// Cores of all packages together.
    pub fn cores(&self) -> u32 {
        self.packages * self.cores_per_package
    }
    /// Hardware contexts of all cores; they are numbered from 0.
    pub fn cpus(&self) -> u32 {
        self.cores() * self.contexts_per_core
    }
    /// A cache that four of eight cores share has two.
    pub fn instance_count(&self, cache: &CacheSpec) -> u32 {
        self.cores() / cache.shared_by_cores
    }
    /// The contended level: the last one that is filled by misses (a victim cache behind it does
    /// not count). `None` only for a machine without data caches.
    pub fn last_level_cache(&self) -> Option<&CacheSpec> {
        let is_filled_by_misses = |cache: &&CacheSpec| {
            cache.level != CacheLevel::L1Instruction && cache.inclusion != Inclusion::Victim
        };
        self.caches.iter().rfind(is_filled_by_misses)
    }

    /// The number of classes of service that every partitioned cache has, including the default
    /// one; at least 1.
    pub fn class_count(&self) -> u32 {
        self.caches
            .iter()
            .filter_map(|cache| Some(cache.way_partitions?.groups))
            .chain(self.memory.bandwidth_limits.map(|limits| limits.max_groups))
            .min()
            .unwrap_or(1)
            .max(1)
    }

    /// The size of the largest data cache above the contended one, per core that shares it; 0 if
    /// there is none.
    pub fn private_bytes(&self) -> u64 {
        let contended_level = self.last_level_cache().map(|cache| cache.level);
        let private_caches = self.caches.iter().filter(|cache| {
            cache.level != CacheLevel::L1Instruction
                && contended_level.is_some_and(|level| cache.level < level)
        });
        private_caches
            .map(|cache| cache.size_bytes / u64::from(cache.shared_by_cores.max(1)))
            .max()
            .unwrap_or(0)
    }

    /// Checks that the machine could be built.
    ///
    /// # Errors
    /// The first impossible field, with the value found and the values expected.
    pub fn check(&self) -> Result<(), MachineSpecError> {
        let spec_error = |field: &str, found: String, expected: &str| {
            Err(MachineSpecError {
                machine: self.name.clone(),
                field: field.to_string(),
                found,
                expected: expected.to_string(),
            })
        };

        let bounded_counts = [
            ("packages", u64::from(self.packages), 1, 1024),
            (
                "cores_per_package",
                u64::from(self.cores_per_package),
                1,
                1024,
            ),
            (
                "contexts_per_core",
                u64::from(self.contexts_per_core),
                1,
                16,
            ),
            ("hertz", self.hertz, 1_000_000, 100_000_000_000),
            ("memory.nodes", u64::from(self.memory.nodes), 1, 64),
            (
                "memory.local_latency_cycles",
                u64::from(self.memory.local_latency_cycles),
                1,
                1 << 20,
            ),
            ("counters.count", u64::from(self.counters.count), 1, 1024),
        ];

        for (field, found, low, high) in bounded_counts {
            if !(low..=high).contains(&found) {
                return spec_error(field, found.to_string(), &format!("{low} to {high}"));
            }
        }

        let (issue_width, window, mshrs) = match self.pipeline {
            CoreModel::InOrder { issue_width, .. } => (issue_width, 1, 1),
            CoreModel::OutOfOrder {
                issue_width,
                window,
                mshrs,
                ..
            } => (issue_width, window, mshrs),
        };
        for (field, found) in [
            ("issue_width", issue_width),
            ("window", window),
            ("mshrs", mshrs),
        ] {
            if !(1..=4096).contains(&found) {
                return spec_error(&format!("pipeline.{field}"), found.to_string(), "1 to 4096");
            }
        }

        if let Some(found) = self
            .mispredict_cycles
            .filter(|found| !(1..=1000).contains(found))
        {
            return spec_error("mispredict_cycles", found.to_string(), "1 to 1000, or none");
        }

        if self.memory.remote_latency_cycles < self.memory.local_latency_cycles {
            let found = self.memory.remote_latency_cycles.to_string();
            return spec_error(
                "memory.remote_latency_cycles",
                found,
                "at least memory.local_latency_cycles",
            );
        }
        if !self.packages.is_multiple_of(self.memory.nodes) {
            return spec_error(
                "memory.nodes",
                self.memory.nodes.to_string(),
                "a divisor of packages",
            );
        }
        let bandwidths = [
            ("memory.bytes_per_cycle", Some(self.memory.bytes_per_cycle)),
            (
                "memory.package_bus_bytes_per_cycle",
                self.memory.package_bus_bytes_per_cycle,
            ),
        ];
        for (field, found) in bandwidths {
            if let Some(found) = found.filter(|found| !(found.is_finite() && *found > 0.0)) {
                return spec_error(field, found.to_string(), "a positive number");
            }
        }
        let scheduling = &self.memory.scheduling;
        let numbers_of_requests = [
            (
                "memory.scheduling.requests_in_flight",
                scheduling.requests_in_flight,
            ),
            (
                "memory.scheduling.core_requests_in_flight",
                scheduling.core_requests_in_flight,
            ),
        ];
        for (field, found) in numbers_of_requests {
            if let Some(found) = found.filter(|found| !(1..=4096).contains(found)) {
                return spec_error(field, found.to_string(), "1 to 4096");
            }
        }
        if let Some(limits) = self.memory.bandwidth_limits {
            let is_percent = limits.unit == BandwidthUnit::Percent;
            let levels = limits.min_level..=limits.max_level;
            if levels.is_empty() || limits.min_level == 0 || is_percent && limits.max_level != 100 {
                return spec_error(
                    "memory.bandwidth_limits",
                    format!("{} to {}", limits.min_level, limits.max_level),
                    "min_level from 1 to max_level, which is 100 for percentages",
                );
            }
            for (field, found) in [("step", limits.step), ("max_groups", limits.max_groups)] {
                if found == 0 {
                    let field = format!("memory.bandwidth_limits.{field}");
                    return spec_error(&field, found.to_string(), "1 or more");
                }
            }
        }
        self.check_prefetchers()?;
        let page_bytes = self.pages.page_bytes;
        if !(512..=1 << 30).contains(&page_bytes) || !page_bytes.is_power_of_two() {
            return spec_error(
                "pages.page_bytes",
                page_bytes.to_string(),
                "a power of two from 512 to 2^30",
            );
        }
        if self.memory.size_bytes < page_bytes || !self.memory.size_bytes.is_multiple_of(page_bytes)
        {
            return spec_error(
                "memory.size_bytes",
                self.memory.size_bytes.to_string(),
                "a multiple of pages.page_bytes",
            );
        }
        self.caches
            .iter()
            .enumerate()
            .try_for_each(|(index, cache)| self.check_cache(index, cache))?;
        self.check_colors()
    }

    fn check_prefetchers(&self) -> Result<(), MachineSpecError> {
        for (index, prefetcher) in self.prefetchers.iter().enumerate() {
            let PrefetcherSpec::Streamer {
                up_streams,
                down_streams,
                ahead_lines,
                ..
            } = *prefetcher
            else {
                continue;
            };
            let counts = [
                ("up_streams", up_streams),
                ("down_streams", down_streams),
                ("ahead_lines", ahead_lines),
            ];

            if let Some((field, found)) = counts
                .into_iter()
                .find(|(_, found)| !(1..=4096).contains(found))
            {
                return Err(MachineSpecError {
                    machine: self.name.clone(),
                    field: format!("prefetchers[{index}].{field}"),
                    found: found.to_string(),
                    expected: "1 to 4096".to_string(),
                });
            }
        }

        Ok(())
    }

    fn check_cache(&self, index: usize, cache: &CacheSpec) -> Result<(), MachineSpecError> {
        let cache_spec_error = |field: &str, found: String, expected: &str| {
            Err(MachineSpecError {
                machine: self.name.clone(),
                field: format!("caches[{index}].{field}"),
                found,
                expected: expected.to_string(),
            })
        };
        if !cache.line_bytes.is_power_of_two() || !(8..=4096).contains(&cache.line_bytes) {
            return cache_spec_error(
                "line_bytes",
                cache.line_bytes.to_string(),
                "a power of two from 8 to 4096",
            );
        }
        if !(1..=1 << 20).contains(&cache.ways) {
            return cache_spec_error("ways", cache.ways.to_string(), "1 to 2^20");
        }
        if !(1..=1024).contains(&cache.slices) {
            return cache_spec_error("slices", cache.slices.to_string(), "1 to 1024");
        }
        let row_bytes =
            u64::from(cache.slices) * u64::from(cache.ways) * u64::from(cache.line_bytes);
        if cache.size_bytes == 0 || !cache.size_bytes.is_multiple_of(row_bytes) {
            let expected = format!("a multiple of slices x ways x line_bytes = {row_bytes}");
            return cache_spec_error("size_bytes", cache.size_bytes.to_string(), &expected);
        }
        let may_be_virtual = cache.level <= CacheLevel::L1Data
            && cache.slices == 1
            && cache.sets_per_slice().is_power_of_two();
        if cache.index == SetIndexing::Virtual && !may_be_virtual {
            let expected = "physical, but for an L1 of one slice with a power of two of sets";
            return cache_spec_error("index", "virtual".to_string(), expected);
        }
        if cache.replacement == ReplacementPolicy::TreePlru && !cache.ways.is_power_of_two() {
            return cache_spec_error(
                "ways",
                cache.ways.to_string(),
                "a power of two, as replacement is tree-plru",
            );
        }
        let insertion = cache.stream_insertion;
        if let Some(found) = insertion.filter(|share| !(0.0..=1.0).contains(share)) {
            return cache_spec_error("stream_insertion", found.to_string(), "0 to 1");
        }
        if cache.pool_bytes.is_some() != cache.neighbor_bytes_per_cycle.is_some() {
            let found = "one of pool_bytes and neighbor_bytes_per_cycle".to_string();
            return cache_spec_error("pool_bytes", found, "both or none");
        }
        if let Some(found) = cache.pool_bytes.filter(|bytes| *bytes < cache.size_bytes) {
            return cache_spec_error("pool_bytes", found.to_string(), "at least size_bytes");
        }
        let spreads = [
            ("neighbor_spread", cache.neighbor_spread),
            ("pool_spread", cache.pool_spread),
        ];
        for (field, spread) in spreads {
            if let Some(found) = spread.filter(|spread| !(1.0..=1000.0).contains(spread)) {
                return cache_spec_error(field, found.to_string(), "1 to 1000");
            }
        }
        if let Some(found) = cache
            .apart_share
            .filter(|share| !(0.0..=1.0).contains(share))
        {
            return cache_spec_error("apart_share", found.to_string(), "0 to 1");
        }
        let probation = cache.probation_share;
        if let Some(found) = probation.filter(|share| !(*share > 0.0 && *share <= 1.0)) {
            return cache_spec_error("probation_share", found.to_string(), "above 0, at most 1");
        }
        let is_divisor = cache.shared_by_cores != 0
            && self.cores_per_package.is_multiple_of(cache.shared_by_cores);
        if !is_divisor {
            return cache_spec_error(
                "shared_by_cores",
                cache.shared_by_cores.to_string(),
                "a divisor of cores_per_package",
            );
        }
        let rates = [
            ("bandwidth_bytes_per_cycle", cache.bandwidth_bytes_per_cycle),
            ("neighbor_bytes_per_cycle", cache.neighbor_bytes_per_cycle),
        ];
        for (field, rate) in rates {
            if let Some(found) = rate.filter(|rate| !(rate.is_finite() && *rate > 0.0)) {
                return cache_spec_error(field, found.to_string(), "a positive number");
            }
        }
        if let Some(way_partitions) = cache.way_partitions
            && !(way_partitions.groups >= 1 && (1..=cache.ways).contains(&way_partitions.min_ways))
        {
            let found = format!(
                "{} groups, at least {} ways",
                way_partitions.groups, way_partitions.min_ways
            );
            return cache_spec_error("way_partitions", found, "1 group or more, 1 to `ways` ways");
        }
        let inner_cache = self.caches[..index]
            .iter()
            .rfind(|inner_cache| inner_cache.level != CacheLevel::L1Instruction);
        if let Some(inner_cache) = inner_cache.filter(|_| cache.level > CacheLevel::L1Data) {
            if cache.level <= inner_cache.level {
                return cache_spec_error(
                    "level",
                    format!("{:?}", cache.level),
                    "levels from the core outwards, each once",
                );
            }
            if cache.line_bytes < inner_cache.line_bytes {
                return cache_spec_error(
                    "line_bytes",
                    cache.line_bytes.to_string(),
                    "at least that of the level before",
                );
            }
            if !cache
                .shared_by_cores
                .is_multiple_of(inner_cache.shared_by_cores)
            {
                let expected = "a multiple of that of the level before";
                return cache_spec_error(
                    "shared_by_cores",
                    cache.shared_by_cores.to_string(),
                    expected,
                );
            }
        } else if self.caches[..index]
            .iter()
            .any(|inner_cache| inner_cache.level >= cache.level)
        {
            return cache_spec_error(
                "level",
                format!("{:?}", cache.level),
                "levels from the core outwards, each once",
            );
        }
        Ok(())
    }

    fn check_colors(&self) -> Result<(), MachineSpecError> {
        let Some(colors) = self.pages.colors else {
            return Ok(());
        };
        let max_colors = self
            .last_level_cache()
            .map_or(1, |cache| self.colors_of(cache));
        if colors.is_power_of_two() && u64::from(colors) <= max_colors {
            return Ok(());
        }
        Err(MachineSpecError {
            machine: self.name.clone(),
            field: "pages.colors".to_string(),
            found: colors.to_string(),
            expected: format!(
                "a power of two, at most the last level's sets x line / page = {max_colors}"
            ),
        })
    }

    /// Sets of one slice, times the line size, over the page size; 1 if a page covers all sets, so
    /// that colors partition nothing.
    pub fn colors_of(&self, cache: &CacheSpec) -> u64 {
        (cache.sets_per_slice() * u64::from(cache.line_bytes) / self.pages.page_bytes).max(1)
    }

    fn memory_latency(&self) -> Vec<Vec<f64>> {
        let (memory, nodes) = (&self.memory, self.memory.nodes as usize);
        let remote_factor =
            f64::from(memory.remote_latency_cycles) / f64::from(memory.local_latency_cycles.max(1));
        let latency_row = |source_node: usize| {
            (0..nodes)
                .map(|node| {
                    if node == source_node {
                        1.0
                    } else {
                        remote_factor
                    }
                })
                .collect()
        };

        if nodes > 1 {
            (0..nodes).map(latency_row).collect()
        } else {
            Vec::new()
        }
    }

    /// What policies see of the machine. Cache ids follow the order of `caches`, instance by
    /// instance.
    pub fn topology(&self) -> Topology {
        let cpus = (0..self.cpus()).map(|cpu| {
            let core = cpu / self.contexts_per_core;
            let package = core / self.cores_per_package;
            Cpu {
                id: CpuId(cpu),
                core,
                package,
                memory_node: package / (self.packages / self.memory.nodes),
                online: true,
                hertz: Some(self.hertz),
            }
        });

        let last_level = self.last_level_cache().map(|cache| cache.level);
        let instances = self.caches.iter().flat_map(|cache| {
            (0..self.instance_count(cache)).map(move |instance| (cache, instance))
        });
        let caches = instances.enumerate().map(|(id, (cache, instance))| {
            let cpus_per_instance = cache.shared_by_cores * self.contexts_per_core;
            Cache {
                id: CacheId(id as u32),
                level: cache.level,
                cpus: (instance * cpus_per_instance..(instance + 1) * cpus_per_instance)
                    .collect::<CpuSet>(),
                last_level: Some(cache.level) == last_level,
                size_bytes: Some(cache.size_bytes),
                ways: Some(cache.ways),
                line_bytes: Some(cache.line_bytes),
            }
        });
        Topology {
            cpus: cpus.collect(),
            caches: caches.collect(),
            memory_latency: self.memory_latency(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{cache_spec as cache, machine_spec};

    fn sample_machine() -> MachineSpec {
        MachineSpec {
            packages: 2,
            cores_per_package: 2,
            contexts_per_core: 2,
            pages: PageSpec {
                colors: Some(16),
                ..PageSpec::default()
            },
            ..machine_spec(vec![
                cache(CacheLevel::L1Instruction, 16 << 10, 4, 1),
                cache(CacheLevel::L1Data, 8 << 10, 4, 1),
                cache(CacheLevel::L2, 1 << 20, 16, 2),
            ])
        }
    }

    /// Are CPUs, cores and caches numbered as documented?
    #[test]
    fn topology_numbers_contexts_within_cores_within_packages() {
        let topology = sample_machine().topology();
        assert_eq!(topology.cpus.len(), 8);
        assert_eq!((topology.cpus[5].core, topology.cpus[5].package), (2, 1));
        let shared: Vec<_> = topology.last_level_caches().collect();
        assert_eq!(shared.len(), 2);
        assert_eq!(shared[1].cpus.to_string(), "4-7");
    }

    /// Is an impossible machine rejected with the name of the invalid field?
    #[test]
    fn impossible_machines_are_rejected_with_the_field() {
        assert_eq!(sample_machine().check(), Ok(()));
        let refused = |change: fn(&mut MachineSpec)| {
            let mut spec = sample_machine();
            change(&mut spec);
            spec.check().unwrap_err().field
        };
        assert_eq!(refused(|m| m.caches[2].ways = 17), "caches[2].size_bytes");
        assert_eq!(
            refused(|m| m.caches[2].line_bytes = 48),
            "caches[2].line_bytes"
        );
        assert_eq!(
            refused(|m| m.caches[2].shared_by_cores = 3),
            "caches[2].shared_by_cores"
        );
        assert_eq!(refused(|m| m.caches.swap(1, 2)), "caches[2].level");
        assert_eq!(refused(|m| m.pages.colors = Some(17)), "pages.colors");
        assert_eq!(refused(|m| m.pages.colors = Some(32)), "pages.colors");
        assert_eq!(refused(|m| m.packages = 0), "packages");
        assert_eq!(
            refused(|m| m.caches[2].index = SetIndexing::Virtual),
            "caches[2].index"
        );
        assert_eq!(
            refused(|m| m.memory.bytes_per_cycle = f64::NAN),
            "memory.bytes_per_cycle"
        );
        assert_eq!(
            refused(|m| {
                m.caches[1].replacement = ReplacementPolicy::TreePlru;
                m.caches[1].ways = 8;
                m.caches[2].replacement = ReplacementPolicy::TreePlru;
                m.caches[2].ways = 12;
                m.caches[2].size_bytes = 12 * 64 * 1024;
            }),
            "caches[2].ways"
        );
    }
}
