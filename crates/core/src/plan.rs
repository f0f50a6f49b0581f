//! Plans: the complete desired state of one machine, never a difference.
//!
//! A list of commands would be shorter. But it says nothing about what is in force if a daemon died
//! half-way, if another tool has moved a thread, or if the same list is applied twice, and two
//! lists cannot be compared. A state can be compared with the state that is read back, and the
//! difference is derived once, for all policies.
//!
//! For example, a plan has one share, ways 0-3 of cache 0 for task 7. The next one has none: the
//! ways are not mentioned, so they return to the machine's default, and the change is to dissolve
//! the group. A policy that wants to keep the share has to say so in each plan, and usually starts
//! from `View::plan_to_keep`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    CacheId, CacheLevel, CpuId, CpuSet, GroupId, IndexSet, Neighbor, ProbeId, ProcessId, TaskId,
};

/// The time of the next observation, unless a probe or a change of tasks ends the window sooner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WindowLength {
    /// A length of time.
    Time {
        /// Length, greater than 0; a machine may have a shortest window ([`crate::Capabilities::min_window_ns`]).
        ns: u64,
    },
    /// 10^9 cycles (DIO, TC), 5 M cycles (AV); the machine converts cycles to time if necessary.
    Cycles {
        /// Number of cycles that elapse on the machine (not those of one task), greater than 0.
        cycles: u64,
    },
}

/// Tasks that run together.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Gang {
    /// Each task with its required CPU; `None` for any CPU of the schedule.
    pub members: Vec<(TaskId, Option<CpuId>)>,
    /// Consecutive slices per turn; gangs with different numbers get different CPU time.
    pub slices: u32,
}

/// Gangs that take turns on `cpus` until the next plan. Every task that may run only on `cpus` is in at least one gang,
/// so that no task starves (checked).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GangSchedule {
    /// CPUs of the schedule: not empty, online, and in no other schedule.
    pub cpus: CpuSet,
    /// Length of one slice; greater than 0.
    pub slice_ns: u64,
    /// Gangs in the order of their turns.
    pub gangs: Vec<Gang>,
}

/// The process or task that a share belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum ShareMember {
    /// All threads of a process, including future ones.
    Process(ProcessId),
    /// A single task. Only shares of ways can have such members, because pages, and therefore colors, belong to the
    /// process.
    Task(TaskId),
}

impl ShareMember {
    /// Whether one of these members is the task or its process.
    pub fn name_task(members: &[ShareMember], task: TaskId, process: ProcessId) -> bool {
        members.contains(&ShareMember::Task(task))
            || members.contains(&ShareMember::Process(process))
    }
}

/// Parts of a cache, counted in the units of its [`PartitionSupport`](crate::PartitionSupport).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Units {
    /// A share in page colors.
    Colors {
        /// Colors that the members' pages may have; not empty.
        allowed: IndexSet,
        /// The treatment of pages that already have other colors.
        migration: PageMigration,
    },
    /// A share in ways.
    Ways {
        /// Ways that the members may fill; hits are possible everywhere.
        mask: IndexSet,
    },
}

impl Units {
    /// Colors or ways, whichever the share is in.
    pub fn set(&self) -> &IndexSet {
        match self {
            Units::Colors { allowed, .. } => allowed,
            Units::Ways { mask } => mask,
        }
    }
}

/// The pages that move when a process gets other colors.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageMigration {
    /// New pages only.
    Never,
    /// A page moves when it is next touched.
    Lazy,
    /// Pages are moved at once, the most used ones first.
    HotFirst,
    /// Every page is moved at once.
    #[default]
    All,
}

/// One group's share of one cache. If the units are colors, it is a share of every cache of the level, because a frame
/// has the same color in all of them. Shares may overlap. A task in no group is unrestricted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CacheShare {
    /// The group, which has at most one share of a cache.
    pub group: GroupId,
    /// The members of the group. No member is in two shares of one cache by ways, or in two shares by colors.
    pub members: Vec<ShareMember>,
    /// The cache that is partitioned.
    pub cache: CacheId,
    /// The part of the cache that the group gets.
    pub units: Units,
}

/// The largest traffic that a group may have between memory and one last-level cache.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BandwidthLimit {
    /// The group, which has at most one limit behind a cache. Its number is not related to those of shares.
    pub group: GroupId,
    /// The members of the group. No member is in two limits of one cache.
    pub members: Vec<ShareMember>,
    /// The last-level cache in front of the memory.
    pub cache: CacheId,
    /// The limit, in the unit of [`BandwidthSupport`](crate::BandwidthSupport).
    pub level: u32,
}

/// Advice to avoid running two tasks on one cache at the same time. It is for a dispatcher that itself selects among
/// runnable tasks (AV's Linux form, sched_ext, programs with overlapping colors). Larger is worse; the penalty is never
/// a ban.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CoRunPenalty {
    /// The two tasks, in either order; they differ.
    pub tasks: (TaskId, TaskId),
    /// The penalty: a finite number on the policy's own scale.
    pub penalty: f64,
}

/// The measurement that a probe makes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ProbeKind {
    /// Runs the tasks of each row together until `total_ns` is collected. CASC does this by raising their priority.
    CoRunRows {
        /// The cache that the rows share.
        cache: CacheId,
        /// Sets of tasks to observe together.
        rows: Vec<Vec<TaskId>>,
        /// Time to collect for each row.
        total_ns: u64,
        /// Time that a row runs before it counts; 0 to count at once.
        settle_ns: u64,
        /// Does the machine create each row, or does it wait until the row occurs?
        boost: bool,
    },
    /// Intervals in which `task` runs beside one of `peers` and no other task (CASC secondary).
    PairedRows {
        /// The cache that they share.
        cache: CacheId,
        /// The task that is measured.
        task: TaskId,
        /// The tasks beside which it may run.
        peers: Vec<TaskId>,
        /// Total time to collect.
        total_ns: u64,
    },
    /// Data misses of the first level (of the L2 on hosts) and, if requested and supported, code fetches that missed.
    MissTrace {
        /// The task that is traced.
        task: TaskId,
        /// Length of the log, at which it ends.
        entries: u32,
        /// Are code fetches logged as well?
        #[serde(default)]
        includes_code: bool,
    },
    /// Sampled accesses, remote ones only or all: one in `sample_period` on average, with jitter from the machine.
    AccessSamples {
        /// All threads of these processes are sampled.
        processes: Vec<ProcessId>,
        /// Events from one sample to the next, on average.
        sample_period: u32,
        /// Whether other accesses than those that a remote cache served ([`crate::DataSource::RemoteCache`]) are left
        /// out.
        remote_only: bool,
        /// Maximum number of samples over all processes.
        max_samples: u32,
    },
    /// Reuse times of individual locations, each watched until it is touched again.
    ReuseTimes {
        /// The task that is watched.
        task: TaskId,
        /// Number of locations to watch.
        locations: u32,
    },
    /// Accesses and misses by group of cache sets (AV 2.1).
    SuperSets {
        /// The tasks that are counted, each separately.
        tasks: Vec<TaskId>,
        /// The cache whose sets are counted.
        level: CacheLevel,
        /// Number of groups of sets; greater than 0.
        super_sets: u32,
    },
    /// Runs a calibrated program of the machine beside the task, and compares the speed of both with running alone.
    Neighbor {
        /// The task that is measured.
        task: TaskId,
        /// The program that runs beside it.
        neighbor: Neighbor,
    },
    /// Passes a cache line back and forth between two CPUs.
    PingPong {
        /// Two different CPUs.
        cpus: (CpuId, CpuId),
    },
    /// Prime, wait and reload, beside the task and without it, until there are this many samples beside the task.
    PrimeProbe {
        /// The task that is measured.
        task: TaskId,
        /// Samples beside the task, in addition to those without it.
        samples: u32,
    },
}

/// A requested probe, which continues from window to window until it is complete, dropped from the plan, or over its
/// budget.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProbeRequest {
    /// The id that the policy assigns; it is unique within the plan.
    pub id: ProbeId,
    /// The measurement and its subjects.
    pub kind: ProbeKind,
    /// Maximum CPU time of the probe; the machine stops and reports it when the budget is used up.
    pub budget_ns: u64,
}

/// The complete desired state. Anything that it does not mention has the machine's default (all CPUs, no gangs, no
/// shares).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// CPUs that a task may run on; at least one is online.
    pub affinity: BTreeMap<TaskId, CpuSet>,
    /// Share of CPU time relative to other tasks; 1.0 is the host's default (priorities, fairness bound).
    pub weights: BTreeMap<TaskId, f64>,
    /// Gang schedules; no two use the same CPU.
    pub gangs: Vec<GangSchedule>,
    /// Shares of caches; they may overlap.
    pub shares: Vec<CacheShare>,
    /// Limits of traffic to memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bandwidth: Vec<BandwidthLimit>,
    /// Advice on tasks that should not run together.
    pub penalties: Vec<CoRunPenalty>,
    /// The requested probes; a probe that is missing here ends.
    pub probes: Vec<ProbeRequest>,
    /// The time of the next observation.
    pub window: WindowLength,
}

impl Plan {
    /// Wants and measures nothing: every object gets the machine's default back.
    pub fn idle(window: WindowLength) -> Self {
        Plan {
            affinity: BTreeMap::new(),
            weights: BTreeMap::new(),
            gangs: Vec::new(),
            shares: Vec::new(),
            bandwidth: Vec::new(),
            penalties: Vec::new(),
            probes: Vec::new(),
            window,
        }
    }

    /// CPUs, weights, gangs, shares and limits are compared; probes, advice and windows are not.
    pub fn has_same_placement(&self, other: &Plan) -> bool {
        (&self.affinity, &self.weights, &self.gangs, &self.shares)
            == (&other.affinity, &other.weights, &other.gangs, &other.shares)
            && self.bandwidth == other.bandwidth
    }
}
