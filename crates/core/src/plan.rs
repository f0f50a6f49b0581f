//! What is wanted: the whole desired state of one machine, never a delta.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{CacheId, CpuId, CpuSet, GroupId, IndexSet, Level, Neighbor, ProbeId, ProcessId, TaskId};

/// When the next observation is due, unless a probe or a change of tasks ends it sooner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Window {
    Time {
        ns: u64,
    },
    /// 10^9 cycles (DIO, TC), 5 M cycles (AV): the machine turns it into time where it must.
    Cycles {
        cycles: u64,
    },
}

/// Tasks that run together. `cpu` only where it matters which.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Gang {
    pub members: Vec<(TaskId, Option<CpuId>)>,
    /// Slices in a row per turn; unequal turns give unequal CPU time.
    pub slices: u32,
}

/// The gangs take turns on `cpus`, for ever, until another plan comes. Every task that may only run on
/// `cpus` is in at least one gang (nobody starves; checked).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GangSchedule {
    pub cpus: CpuSet,
    pub slice_ns: u64,
    pub gangs: Vec<Gang>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Member {
    Process(ProcessId),
    /// Only for ways: pages, and so colors, belong to the process.
    Task(TaskId),
}

/// Units are counted as `Partition` of the capabilities says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Units {
    Colors { allowed: IndexSet, moving: PageMoving },
    Ways { mask: IndexSet },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum PageMoving {
    /// New pages only.
    Never,
    /// A page moves when it is next touched.
    Lazy,
    HotFirst,
    All,
}

/// One group's share of one cache (of every cache of the level where colors are the unit: a frame has the
/// same color in all of them). Shares may overlap. Who is in no group is unrestricted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CacheShare {
    pub group: GroupId,
    pub members: Vec<Member>,
    pub cache: CacheId,
    pub units: Units,
}

/// "Rather not these two at once on one cache": for a dispatcher that picks among runnable tasks by itself
/// (AV's Linux form, sched_ext, programs with overlapping colors). Larger is worse; advice, never a ban.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CoRunPenalty {
    pub tasks: (TaskId, TaskId),
    pub penalty: f64,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ProbeWhat {
    /// Each row: bring these on processor together until `total_ns` is collected. CASC raises priority.
    Rows {
        cache: CacheId,
        rows: Vec<Vec<TaskId>>,
        total_ns: u64,
        settle_ns: u64,
        boost: bool,
    },
    /// Whenever `task` runs beside any of `peers` and nobody else (CASC secondary).
    Beside {
        cache: CacheId,
        task: TaskId,
        peers: Vec<TaskId>,
        total_ns: u64,
    },
    /// Misses of the first-level data cache, and fetches of code that missed theirs, where that is asked and can be.
    Trace {
        task: TaskId,
        entries: u32,
        #[serde(default)]
        code: bool,
    },
    /// Remote accesses only, or all: one in `one_in` on average, jittered by the machine.
    Samples {
        processes: Vec<ProcessId>,
        one_in: u32,
        remote_only: bool,
        at_most: u32,
    },
    Reuses {
        task: TaskId,
        locations: u32,
    },
    Activity {
        tasks: Vec<TaskId>,
        level: Level,
        super_sets: u32,
    },
    Neighbor {
        task: TaskId,
        neighbor: Neighbor,
    },
    PingPong {
        cpus: (CpuId, CpuId),
    },
    /// Prime, wait and reload beside the task and without it, until this many samples beside it are there.
    Evicted {
        task: TaskId,
        samples: u32,
    },
}

/// Goes on from window to window until answered, dropped from the plan, or past its budget.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Probe {
    pub id: ProbeId,
    pub what: ProbeWhat,
    /// The most processor time it may take; the machine stops it there and says so.
    pub budget_ns: u64,
}

/// The whole desired state. What it does not mention is the machine's default (all CPUs, no gangs, no shares).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub affinity: BTreeMap<TaskId, CpuSet>,
    /// Share of CPU time relative to others, 1.0 = as the host had it (priorities, fairness bound).
    pub weights: BTreeMap<TaskId, f64>,
    pub gangs: Vec<GangSchedule>,
    pub shares: Vec<CacheShare>,
    pub penalties: Vec<CoRunPenalty>,
    pub probes: Vec<Probe>,
    pub window: Window,
}

impl Plan {
    /// Changes nothing, measures nothing.
    pub fn idle(window: Window) -> Self {
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
