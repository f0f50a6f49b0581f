//! Plans: the whole desired state of one machine, never a delta.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{CacheId, CacheLevel, CpuId, CpuSet, GroupId, IndexSet, Neighbor, ProbeId, ProcessId, TaskId};

/// When the next observation is due, unless a probe or a change of tasks ends it sooner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WindowLength {
    /// A length of time.
    Time {
        /// Above 0; a machine may have a shortest window ([`crate::Capabilities::min_window_ns`]).
        ns: u64,
    },
    /// 10^9 cycles (DIO, TC), 5 M cycles (AV): the machine turns it into time where it must.
    Cycles {
        /// Above 0; cycles that pass on the machine, not those of one task.
        cycles: u64,
    },
}

/// Tasks that run together. `cpu` is set only if the CPU matters.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Gang {
    /// Each task with the CPU that it must have; `None` = any of the schedule's.
    pub members: Vec<(TaskId, Option<CpuId>)>,
    /// Slices in a row per turn; unequal turns give unequal CPU time.
    pub slices: u32,
}

/// Gangs that take turns on `cpus` until the next plan. Every task that may only run on `cpus` is in at least one gang,
/// so that no task starves (checked).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GangSchedule {
    /// Not empty and online; no other schedule has any of them.
    pub cpus: CpuSet,
    /// Length of one slice; above 0.
    pub slice_ns: u64,
    /// In the order of their turns.
    pub gangs: Vec<Gang>,
}

/// The process or task that a share is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum ShareMember {
    /// All threads of a process, those to come among them.
    Process(ProcessId),
    /// Only for ways: pages, and so colors, belong to the process.
    Task(TaskId),
}

/// Units are counted as `PartitionSupport` of the capabilities says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Units {
    /// By the colors of pages.
    Colors {
        /// Colors that the members' pages may have; not empty.
        allowed: IndexSet,
        /// The treatment of pages that already have other colors.
        #[serde(alias = "moving")]
        migration: PageMigration,
    },
    /// By ways.
    Ways {
        /// Ways that the members may fill; hits are possible everywhere.
        mask: IndexSet,
    },
}

/// Which pages move when a process gets other colors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum PageMigration {
    /// New pages only.
    Never,
    /// A page moves when it is next touched.
    Lazy,
    /// Pages are moved at once, those that are used most before the others.
    HotFirst,
    /// Every page is moved at once.
    All,
}

/// One group's share of one cache (of every cache of the level where colors are the unit: a frame has the
/// same color in all of them). Shares may overlap. Who is in no group is unrestricted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CacheShare {
    /// The group; it has one share of a cache at most.
    pub group: GroupId,
    /// The members of the group. No member is in two shares by ways of one cache, or in two shares by colors.
    pub members: Vec<ShareMember>,
    /// The cache that is divided.
    pub cache: CacheId,
    /// The part of the cache that the group gets.
    pub units: Units,
}

/// "Rather not these two at once on one cache": for a dispatcher that picks among runnable tasks by itself
/// (AV's Linux form, sched_ext, programs with overlapping colors). Larger is worse; advice, never a ban.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CoRunPenalty {
    /// The two, in either order; never the same task twice.
    pub tasks: (TaskId, TaskId),
    /// Finite; the scale is the policy's own.
    pub penalty: f64,
}

/// The measurement that a probe makes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ProbeKind {
    /// Each row: bring these on processor together until `total_ns` is collected. CASC raises priority.
    #[serde(alias = "Rows")]
    CoRunRows {
        /// The cache that the rows share.
        cache: CacheId,
        /// Sets of tasks to see together.
        rows: Vec<Vec<TaskId>>,
        /// Time to collect for each row.
        total_ns: u64,
        /// Time that a row runs before it counts; 0 = it counts at once.
        settle_ns: u64,
        /// True = the machine brings each row about; false = it waits until the row comes about.
        boost: bool,
    },
    /// Intervals in which `task` runs beside one of `peers` and no other task (CASC secondary).
    #[serde(alias = "Beside")]
    PairedRows {
        /// The cache that they share.
        cache: CacheId,
        /// The task that is measured.
        task: TaskId,
        /// The tasks that it may be beside.
        peers: Vec<TaskId>,
        /// Time to collect in all.
        total_ns: u64,
    },
    /// Misses of the first-level data cache, and fetches of code that missed theirs, where that is asked and can be.
    #[serde(alias = "Trace")]
    MissTrace {
        /// The task that is traced.
        task: TaskId,
        /// Length of the log; it ends when so many are in.
        entries: u32,
        /// Fetches of code are logged, too.
        #[serde(default)]
        #[serde(alias = "code")]
        includes_code: bool,
    },
    /// Remote accesses only, or all: one in `one_in` on average, jittered by the machine.
    #[serde(alias = "Samples")]
    AccessSamples {
        /// All threads of these processes are sampled.
        processes: Vec<ProcessId>,
        /// Events from one sample to the next, on average.
        #[serde(alias = "one_in")]
        sample_period: u32,
        /// Only accesses that a remote cache answered are given ([`crate::DataSource::RemoteCache`]).
        remote_only: bool,
        /// Samples in all, of all processes together.
        #[serde(alias = "at_most")]
        max_samples: u32,
    },
    /// Reuse times of single locations, each watched until it is touched again.
    #[serde(alias = "Reuses")]
    ReuseTimes {
        /// The task that is watched.
        task: TaskId,
        /// Locations to watch.
        locations: u32,
    },
    /// Accesses and misses by groups of cache sets (AV 2.1).
    #[serde(alias = "Activity")]
    SuperSets {
        /// The tasks that are counted, each by itself.
        tasks: Vec<TaskId>,
        /// The cache whose sets are counted.
        level: CacheLevel,
        /// Groups of sets; above 0.
        super_sets: u32,
    },
    /// Run a program of the machine's own beside the task, and compare both with running alone.
    Neighbor {
        /// The task that is measured.
        task: TaskId,
        /// The program that runs beside it.
        neighbor: Neighbor,
    },
    /// Pass a cache line back and forth between two CPUs.
    PingPong {
        /// Two different CPUs.
        cpus: (CpuId, CpuId),
    },
    /// Prime, wait and reload beside the task and without it, until this many samples beside it are there.
    #[serde(alias = "Evicted")]
    PrimeProbe {
        /// The task that is measured.
        task: TaskId,
        /// Samples beside the task; those without it come on top.
        samples: u32,
    },
}

/// Goes on from window to window until answered, dropped from the plan, or past its budget.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProbeRequest {
    /// Given by the policy; no two probes of a plan have the same.
    pub id: ProbeId,
    /// The measurement and its subjects.
    #[serde(alias = "what")]
    pub kind: ProbeKind,
    /// The most processor time it may take; the machine stops it there and says so.
    pub budget_ns: u64,
}

/// The whole desired state. What it does not mention is the machine's default (all CPUs, no gangs, no shares).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// CPUs that a task may run on; at least one is online.
    pub affinity: BTreeMap<TaskId, CpuSet>,
    /// Share of CPU time relative to others, 1.0 = as the host had it (priorities, fairness bound).
    pub weights: BTreeMap<TaskId, f64>,
    /// Gang schedules, no two on one CPU.
    pub gangs: Vec<GangSchedule>,
    /// Shares of caches; they may overlap.
    pub shares: Vec<CacheShare>,
    /// Advice on who should not run together.
    pub penalties: Vec<CoRunPenalty>,
    /// The requested probes; a probe that is missing here ends.
    pub probes: Vec<ProbeRequest>,
    /// When the next observation is due.
    pub window: WindowLength,
}

impl Plan {
    /// Changes nothing, measures nothing.
    pub fn idle(window: WindowLength) -> Self {
        Plan {
            affinity: BTreeMap::new(),
            weights: BTreeMap::new(),
            gangs: Vec::new(),
            shares: Vec::new(),
            penalties: Vec::new(),
            probes: Vec::new(),
            window,
        }
    }
}
