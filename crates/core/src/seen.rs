//! What was seen in one window: raw readings, never judgements.
//!
//! Absent evidence is a missing entry or `None`, never zero. Counts are raw, with the share of time they
//! counted. Filtering and weighting belong to profilers.

use serde::{Deserialize, Serialize};

use crate::{Applied, CacheId, CpuId, Goal, GroupId, ProbeId, ProcessId, Profile, TaskId};

/// Time on the machine's own clock. `cycles` only where all CPUs tick alike (the simulator).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Span {
    pub start_ns: u64,
    pub elapsed_ns: u64,
    pub elapsed_cycles: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Level {
    L1Instruction,
    L1Data,
    L2,
    L3,
    L4,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum StallCause {
    Issue,
    Hit(Level),
    RemoteCache,
    LocalMemory,
    RemoteMemory,
    BusQueue,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Event {
    Instructions,
    Cycles,
    References(Level),
    Misses(Level),
    /// Misses on a line that another task evicted.
    InterTaskMisses(Level),
    RemoteCacheHits,
    MemoryReadBytes,
    MemoryWriteBytes,
    StallCycles(StallCause),
    ContextSwitches,
    PageFaults,
    SystemCalls,
    /// Traffic with memory both ways, where the two are not told apart (MBM).
    MemoryBytes,
    /// The part of [`Event::MemoryBytes`] that stays on the cache's own memory node.
    LocalMemoryBytes,
}

/// One counter. `counted_share` < 1 where events were multiplexed; `count` is raw, not scaled.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Reading {
    pub event: Event,
    pub count: u64,
    pub counted_share: f64,
}

/// Readings sorted by event, at most one each. An event that is not in it was not measured.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Counts(pub Vec<Reading>);

impl Counts {
    /// Count scaled for multiplexing; `None` if the event was not measured or never scheduled.
    pub fn get(&self, event: Event) -> Option<f64> {
        let found = self.0.iter().find(|reading| reading.event == event)?;
        (found.counted_share > 0.0).then(|| found.count as f64 / found.counted_share)
    }
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TaskSample {
    pub task: TaskId,
    pub process: ProcessId,
    /// Numeric id of the user who owns the process; `None` where the machine knows no users (the simulator).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// Command name: profiles and match rules go by it; policies must not.
    pub name: String,
    pub arrived_ns: u64,
    pub exited: bool,
    /// Nothing here may be moved (kernel thread, pinned by its owner, excluded by configuration).
    pub fixed: bool,
    /// What the operator's rules ask for it; here, so that a replay has it too.
    pub goal: Option<Goal>,
    /// CPU at the end of the window; `None` = off processor.
    pub cpu: Option<CpuId>,
    /// Time on each CPU within the window: who really ran beside whom, CPU-time shares, fairness.
    pub on_cpu_ns: Vec<(CpuId, u64)>,
    pub runnable_wait_ns: Option<u64>,
    pub counts: Counts,
    /// Work done, in the task's own unit (operations, rows), where it reports any.
    pub progress: Option<f64>,
    /// Resident pages per color; `None` where frames or colors are not known.
    pub pages_per_color: Option<Vec<u64>>,
}

impl TaskSample {
    /// A thread of which nothing is known but that it is there, since the beginning.
    pub fn new(task: TaskId, process: ProcessId) -> Self {
        Self {
            task,
            process,
            user: None,
            name: String::new(),
            arrived_ns: 0,
            exited: false,
            fixed: false,
            goal: None,
            cpu: None,
            on_cpu_ns: Vec::new(),
            runnable_wait_ns: None,
            counts: Counts::default(),
            progress: None,
            pages_per_color: None,
        }
    }
}

/// What counters of shared things say (a cache, a CPU's context, a memory controller).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Place {
    Cpu(CpuId),
    Cache(CacheId),
    MemoryNode(u32),
    Group(GroupId, CacheId),
}

/// Tasks were on processor together; ends when any of them leaves it (CASC 4.2.2.1).
/// Raw: short intervals are dropped and weights given by the profiler, not by the machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RowInterval {
    pub tasks: Vec<TaskId>,
    pub cache: CacheId,
    pub span: Span,
    /// Who went off processor and ended it; `None` = the window ended.
    pub ended_by: Option<TaskId>,
    /// Counts of the whole shared cache during the interval.
    pub cache_counts: Counts,
    /// Counts of each member, where the machine can tell; same order as `tasks`, or empty.
    pub task_counts: Vec<Counts>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Space {
    Virtual,
    Physical,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Source {
    Cache(Level),
    RemoteCache,
    Memory,
    Unknown,
}

/// One sampled data access (POWER5 register, PEBS, IBS). Line addresses are byte addresses / line size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AccessSample {
    pub task: TaskId,
    pub virtual_line: u64,
    pub physical_line: Option<u64>,
    pub source: Source,
    pub latency_cycles: Option<u32>,
    pub at_ns: u64,
}

/// One watched location. `touched_again` false = censored: not seen again before the watch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReuseSample {
    pub accesses: Option<u64>,
    pub elapsed_ns: u64,
    pub touched_again: bool,
}

/// Accesses and misses of one super set (AV 2.1); raw counts, thresholds are the profiler's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SuperSetCount {
    pub accesses: u64,
    pub misses: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Neighbor {
    /// Dependent loads over a footprint: feels the task's use of the cache.
    Chase { footprint_bytes: u64 },
    /// A stream: feels the task's use of bandwidth.
    Stream,
    /// Keeps a footprint resident: takes it from the task (cache pirating).
    Pirate { footprint_bytes: u64 },
}

/// One prime, wait and reload: lines of the probe's buffer that were gone from the cache afterwards.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct EvictedSample {
    /// The task ran meanwhile; false = it was kept off.
    pub beside: bool,
    pub evicted: u32,
    pub reloads: u32,
    pub elapsed_ns: u64,
    /// Cache-line ping-pong between the two CPUs before and after; `None` where it was not measured.
    pub round_trips_ns: Option<(f64, f64)>,
}

/// What a probe found.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Evidence {
    /// CASC initial and secondary measurement; also any measured co-run.
    Rows(Vec<RowInterval>),
    /// RapidMRC: the log as the hardware gave it, repeats and all.
    Trace {
        task: TaskId,
        space: Space,
        line_bytes: u32,
        lines: Vec<u64>,
        /// Places in the log, ascending, of fetches of code; the others are of data. Empty where none were logged.
        #[serde(default)]
        code: Vec<u32>,
        /// Events known to be missed; `None` = the hardware cannot tell.
        lost: Option<u64>,
        /// Counts over the trace, for MPKI and for the vertical shift.
        counts: Counts,
        elapsed_ns: u64,
    },
    /// Sampled accesses; `one_in` is the rate in force, jitter included in `events`.
    Samples {
        one_in: u32,
        events: u64,
        line_bytes: u32,
        samples: Vec<AccessSample>,
    },
    Reuses {
        task: TaskId,
        samples: Vec<ReuseSample>,
    },
    /// One hardware context's activity while the task ran on it.
    Activity {
        task: TaskId,
        cpu: CpuId,
        level: Level,
        super_sets: Vec<SuperSetCount>,
    },
    /// Seen from outside: how much the neighbor slows the task, and the task the neighbor.
    Beside {
        task: TaskId,
        neighbor: Neighbor,
        neighbor_alone_ns: f64,
        neighbor_beside_ns: f64,
        task_alone_rate: Option<f64>,
        task_beside_rate: Option<f64>,
        /// What the task's rates count: an event that stands in for work; `None` = the work that it reports itself.
        #[serde(default)]
        rate_of: Option<Event>,
    },
    /// Cache-line ping-pong: virtual machines lie about who shares a cache.
    PingPong {
        cpus: (CpuId, CpuId),
        round_trip_ns: f64,
    },
    /// Raw samples of how much of the shared cache the task evicts, in the order they were taken.
    Evicted {
        task: TaskId,
        buffer_bytes: u64,
        wait_ns: u64,
        samples: Vec<EvictedSample>,
    },
    /// A profile recorded earlier and recognised; here, so that a replay has it too.
    Known {
        task: TaskId,
        profile: Box<Profile>,
    },
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProbeResult {
    pub probe: ProbeId,
    pub evidence: Evidence,
    /// False = more follows in a later window.
    pub complete: bool,
    /// Processor time the probe took, and from whom.
    pub cost_ns: Vec<(Option<TaskId>, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WindowEnd {
    Elapsed,
    ProbeAnswered,
    TasksChanged,
    /// A signal or a request at the control socket.
    Interrupted,
}

/// One window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Observation {
    pub window: u64,
    pub span: Span,
    pub ended: WindowEnd,
    pub tasks: Vec<TaskSample>,
    pub places: Vec<(Place, Counts)>,
    pub answers: Vec<ProbeResult>,
    /// What holds now: slow actions go on, and others change things too.
    pub in_force: Applied,
}
