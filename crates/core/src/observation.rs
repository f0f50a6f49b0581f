//! The observation of one window: raw readings, never judgements.
//!
//! Absent evidence is a missing entry or `None`, never zero. Counts are raw, with the share of time they
//! counted. Filtering and weighting belong to profilers.

use serde::{Deserialize, Serialize};

use crate::{AppliedPlan, CacheId, CpuId, CpuSet, Goal, GroupId, ProbeId, ProcessId, Profile, ServiceIdentity, TaskId};

/// Time on the machine's own clock. `cycles` only where all CPUs tick alike (the simulator).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TimeSpan {
    /// When it began; the clock begins with the run.
    pub start_ns: u64,
    /// How long it was.
    pub elapsed_ns: u64,
    /// `None` where cycles are not the same on every CPU.
    pub elapsed_cycles: Option<u64>,
}

/// A level of the cache hierarchy; ordered from the core outward.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum CacheLevel {
    /// First level, for code.
    L1Instruction,
    /// First level, for data.
    L1Data,
    /// Second level.
    L2,
    /// Third level.
    L3,
    /// Fourth level.
    L4,
}

/// The cause of a stall of a task on a CPU.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum StallCause {
    /// It was ready, but another context of the core had the issue slot.
    Issue,
    /// A hit in the cache of this level.
    Hit(CacheLevel),
    /// A line from another cache that is not on its own path to memory.
    RemoteCache,
    /// Memory of its own node, queueing left out where that is counted apart.
    LocalMemory,
    /// Memory of another node, queueing left out where that is counted apart.
    RemoteMemory,
    /// Queueing for bandwidth, whatever it was that was asked for.
    BusQueue,
}

/// Something that is counted. Byte events count bytes, stall events cycles, all others occurrences.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum CounterEvent {
    /// Instructions that were executed.
    Instructions,
    /// Cycles on processor.
    Cycles,
    /// Accesses to the cache of this level; without prefetches, where the machine can tell them apart.
    References(CacheLevel),
    /// Those of [`CounterEvent::References`] that did not find their line.
    Misses(CacheLevel),
    /// Misses on a line that another task evicted.
    InterTaskMisses(CacheLevel),
    /// Misses that another cache, not on the own path to memory, answered.
    RemoteCacheHits,
    /// Traffic from memory.
    MemoryReadBytes,
    /// Traffic to memory.
    MemoryWriteBytes,
    /// Cycles on processor without an instruction, by cause.
    StallCycles(StallCause),
    /// Times that the task was put on a CPU.
    ContextSwitches,
    /// Minor and major ones.
    PageFaults,
    /// Calls into the kernel; on a live host those that read and write.
    SystemCalls,
    /// Traffic with memory both ways, where the two are not told apart (MBM).
    MemoryBytes,
    /// The part of [`CounterEvent::MemoryBytes`] that stays on the cache's own memory node.
    LocalMemoryBytes,
}

/// One counter. `enabled_share` < 1 where events were multiplexed; `count` is raw, not scaled.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct EventCount {
    /// The event.
    pub event: CounterEvent,
    /// Occurrences, cycles or bytes, while the counter was on.
    pub count: u64,
    /// Share of the task's time on processor that the counter was on; 0 to 1, 0 = never.
    #[serde(alias = "counted_share")]
    pub enabled_share: f64,
}

/// Readings sorted by event, at most one each. An event that is not in it was not measured.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct EventCounts(pub Vec<EventCount>);

impl EventCounts {
    /// Count scaled for multiplexing; `None` if the event was not measured or never scheduled.
    pub fn get(&self, event: CounterEvent) -> Option<f64> {
        let reading = self.0.iter().find(|reading| reading.event == event)?;
        (reading.enabled_share > 0.0).then(|| reading.count as f64 / reading.enabled_share)
    }
}

/// One task in one window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TaskSample {
    /// The id by which plans name it.
    pub task: TaskId,
    /// The address space that it belongs to.
    pub process: ProcessId,
    /// Numeric id of the user who owns the process; `None` where the machine knows no users (the simulator).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// Command name: profiles and match rules go by it; policies must not.
    pub name: String,
    /// The service that it belongs to; `None` = its command is the service, or the machine knows no services.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceIdentity>,
    /// When it started or was first observed, on the clock of [`TimeSpan`].
    #[serde(alias = "arrived_ns")]
    pub arrival_ns: u64,
    /// Whether it ended in this window; the next one does not list it.
    pub exited: bool,
    /// Whether the task must not be moved (kernel thread, pinned by its owner, excluded by configuration).
    #[serde(alias = "fixed")]
    pub unmovable: bool,
    /// The goal that the operator's rules set; it is part of the observation so that a replay has it.
    pub goal: Option<Goal>,
    /// CPU at the end of the window; `None` if it was off CPU.
    pub cpu: Option<CpuId>,
    /// Time on each CPU within the window, from which co-runners, CPU shares and fairness follow.
    pub on_cpu_ns: Vec<(CpuId, u64)>,
    /// Time in which it was runnable without a CPU; `None` if this is unknown.
    #[serde(alias = "runnable_wait_ns")]
    pub run_queue_wait_ns: Option<u64>,
    /// Events counted while it was on processor.
    pub counts: EventCounts,
    /// Work done, in the task's own unit (operations, rows), where it reports any.
    pub progress: Option<f64>,
    /// Resident pages per color; `None` where frames or colors are not known.
    pub pages_per_color: Option<Vec<u64>>,
    /// Resident pages of its process by memory node; `None` if there is one node, or if their location is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages_per_node: Option<Vec<u64>>,
}

impl TaskSample {
    /// The service that it belongs to: the command of its name if there is no other.
    pub fn service_or_command(&self) -> ServiceIdentity {
        self.service.clone().unwrap_or_else(|| ServiceIdentity::command(&self.name))
    }

    /// Was it on any CPU within the window?
    pub fn has_run(&self) -> bool {
        self.on_cpu_ns.iter().any(|(_, ns)| *ns > 0)
    }

    /// Time on any CPU within the window.
    pub fn ran_ns(&self) -> u64 {
        self.on_cpu_ns.iter().map(|(_, ns)| ns).sum()
    }

    /// Time on these CPUs within the window.
    pub fn ran_on_ns(&self, cpus: &CpuSet) -> u64 {
        self.on_cpu_ns.iter().filter(|(cpu, _)| cpus.contains(cpu.0)).map(|(_, ns)| ns).sum()
    }

    /// A thread that exists from the start of the run, without any measurement.
    pub fn new(task: TaskId, process: ProcessId) -> Self {
        Self {
            task,
            process,
            user: None,
            name: String::new(),
            service: None,
            arrival_ns: 0,
            exited: false,
            unmovable: false,
            goal: None,
            cpu: None,
            on_cpu_ns: Vec::new(),
            run_queue_wait_ns: None,
            counts: EventCounts::default(),
            progress: None,
            pages_per_color: None,
            pages_per_node: None,
        }
    }
}

/// The shared resource that a counter belongs to (a cache, a hardware context, a memory controller).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum CounterScope {
    /// A hardware context.
    Cpu(CpuId),
    /// A whole cache, with all its users.
    Cache(CacheId),
    /// The memory controller of a node, by its number.
    MemoryNode(u32),
    /// A group's part of a cache.
    Group(GroupId, CacheId),
}

/// Tasks were on processor together; ends when any of them leaves it (CASC 4.2.2.1).
/// Raw: short intervals are dropped and weights given by the profiler, not by the machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RowInterval {
    /// The row: all of them ran, each on a CPU of its own.
    pub tasks: Vec<TaskId>,
    /// The cache that they shared.
    pub cache: CacheId,
    /// When the interval began, and how long it was.
    pub span: TimeSpan,
    /// The task that left its CPU and ended the interval; `None` if the window ended.
    #[serde(alias = "ended_by")]
    pub ended_by_task: Option<TaskId>,
    /// Counts of the whole shared cache during the interval.
    pub cache_counts: EventCounts,
    /// Counts of each member in the order of `tasks`; empty if the machine cannot separate them.
    pub task_counts: Vec<EventCounts>,
}

/// The kind of address in a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum AddressKind {
    /// An address of the task's own space.
    Virtual,
    /// An address of the machine's memory.
    Physical,
}

/// The level of the memory system that served an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum DataSource {
    /// A cache of this level on the CPU's own path to memory.
    Cache(CacheLevel),
    /// A cache that is not on that path.
    RemoteCache,
    /// Memory, of whatever node.
    Memory,
    /// The hardware does not say.
    Unknown,
}

/// One sampled data access (POWER5 register, PEBS, IBS). Line addresses are byte addresses / line size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AccessSample {
    /// The task that made the access.
    pub task: TaskId,
    /// In the address space of the task.
    pub virtual_line: u64,
    /// In the machine's memory; `None` = the hardware does not say, or it is hidden.
    pub physical_line: Option<u64>,
    /// The level that served it.
    pub source: DataSource,
    /// From the request to the data; `None` = the hardware does not say.
    pub latency_cycles: Option<u32>,
    /// When it was sampled, on the clock of [`TimeSpan`].
    pub at_ns: u64,
}

/// One watched location. `touched_again` false = censored: not seen again before the watch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReuseSample {
    /// Accesses of the task between the two touches, 0 = the next one; `None` = not counted.
    pub accesses: Option<u64>,
    /// Time that the task ran from the begin of the watch to the second touch, or to the end of the watch.
    pub elapsed_ns: u64,
    /// False = the other fields are lower bounds.
    #[serde(alias = "touched_again")]
    pub reused: bool,
}

/// Accesses and misses of one super set (AV 2.1); raw counts, thresholds are the profiler's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SuperSetCount {
    /// Accesses to its sets.
    pub accesses: u64,
    /// Accesses that missed.
    pub misses: u64,
}

/// The machine's own program that runs beside a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Neighbor {
    /// Dependent loads over a footprint: slowed by the task's use of the cache.
    Chase {
        /// Bytes that it goes through again and again.
        footprint_bytes: u64,
    },
    /// A stream: slowed by the task's use of bandwidth.
    Stream,
    /// Keeps a footprint resident: takes it from the task (cache pirating).
    Pirate {
        /// Bytes that it keeps in the cache.
        footprint_bytes: u64,
    },
}

/// One prime, wait and reload: lines of the probe's buffer that were gone from the cache afterwards.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct PrimeProbeSample {
    /// The task ran meanwhile; false = it was kept off.
    #[serde(alias = "beside")]
    pub target_running: bool,
    /// Lines that were gone, out of `reloads`.
    pub evicted: u32,
    /// Lines that were loaded again.
    pub reloads: u32,
    /// From the start of priming to the end of reloading.
    pub elapsed_ns: u64,
    /// Cache-line ping-pong between the two CPUs before and after; `None` where it was not measured.
    pub round_trips_ns: Option<(f64, f64)>,
}

/// The evidence from a probe.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ProbeEvidence {
    /// CASC initial and secondary measurement; also any measured co-run.
    Rows(Vec<RowInterval>),
    /// RapidMRC: the log as the hardware gave it, repeats and all.
    Trace {
        /// The task that was traced.
        task: TaskId,
        /// Which kind of address the log holds.
        space: AddressKind,
        /// Bytes of a line.
        line_bytes: u32,
        /// Line addresses in the order of the log.
        lines: Vec<u64>,
        /// Places in the log, ascending, of fetches of code; the others are of data. Empty where none were logged.
        #[serde(default)]
        #[serde(alias = "code")]
        code_positions: Vec<u32>,
        /// Events known to be missed; `None` = the hardware cannot tell.
        lost: Option<u64>,
        /// Counts over the trace, for MPKI and for the vertical shift.
        counts: EventCounts,
        /// Time that the log took.
        elapsed_ns: u64,
    },
    /// Sampled accesses; `one_in` is the rate in force, jitter included in `events`.
    Samples {
        /// Events from one sample to the next, on average.
        #[serde(alias = "one_in")]
        sample_period: u32,
        /// Events that passed, sampled or not, since the answer before.
        events: u64,
        /// Bytes of a line.
        line_bytes: u32,
        /// Not sorted: a live host gives them CPU by CPU.
        samples: Vec<AccessSample>,
    },
    /// Reuse times of locations that were watched.
    Reuses {
        /// The task that was watched.
        task: TaskId,
        /// One for each location, whether it was touched again or not.
        samples: Vec<ReuseSample>,
    },
    /// One hardware context's activity while the task ran on it.
    Activity {
        /// The task that was counted.
        task: TaskId,
        /// The hardware context that it ran on.
        cpu: CpuId,
        /// The cache whose sets were counted.
        level: CacheLevel,
        /// Counts of each super set, by its index.
        super_sets: Vec<SuperSetCount>,
    },
    /// Seen from outside: how much the neighbor slows the task, and the task the neighbor.
    #[serde(alias = "Beside")]
    NeighborSlowdown {
        /// The task that was measured.
        task: TaskId,
        /// The program that ran beside it.
        neighbor: Neighbor,
        /// Time of one of the neighbor's accesses, with the task kept off.
        neighbor_alone_ns: f64,
        /// The same beside the task.
        #[serde(alias = "neighbor_beside_ns")]
        neighbor_corun_ns: f64,
        /// The task's work by time without the neighbor; `None` = not known. Only its ratio to the rate beside has a
        /// meaning.
        task_alone_rate: Option<f64>,
        /// The same beside the neighbor.
        #[serde(alias = "task_beside_rate")]
        task_corun_rate: Option<f64>,
        /// The event that the task's rates count as a proxy for work; `None` if they count the work that the task
        /// reports.
        #[serde(default)]
        #[serde(alias = "rate_of")]
        rate_event: Option<CounterEvent>,
    },
    /// Cache-line ping-pong: virtual machines lie about who shares a cache.
    PingPong {
        /// The two CPUs.
        cpus: (CpuId, CpuId),
        /// For the line to go over and come back.
        round_trip_ns: f64,
    },
    /// Raw samples of how much of the shared cache the task evicts, in the order they were taken.
    #[serde(alias = "Evicted")]
    PrimeProbe {
        /// The task that was measured.
        task: TaskId,
        /// Size of the probe's own buffer.
        buffer_bytes: u64,
        /// From priming to reloading.
        wait_ns: u64,
        /// Samples with the task running, and samples without it.
        samples: Vec<PrimeProbeSample>,
    },
    /// A profile recorded earlier and recognised; here, so that a replay has it too.
    #[serde(alias = "Known")]
    StoredProfile {
        /// The task that was recognized.
        task: TaskId,
        /// The recorded profile of the program.
        profile: Box<Profile>,
    },
}

/// The result of a probe in one window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProbeResult {
    /// The probe, by the id that the plan gave it.
    pub probe: ProbeId,
    /// The evidence that was measured.
    pub evidence: ProbeEvidence,
    /// False = more follows in a later window.
    pub complete: bool,
    /// Processor time the probe took, and from whom.
    pub cost_ns: Vec<(Option<TaskId>, u64)>,
}

/// Why a window ended when it did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WindowEnd {
    /// It had the length that the plan asked for.
    Elapsed,
    /// A probe was complete.
    ProbeAnswered,
    /// A task came or ended.
    TasksChanged,
    /// A signal or a request at the control socket.
    Interrupted,
    /// CPUs went offline or came back, or the host was suspended: figures from before and after do not compare.
    HostChanged,
}

/// One window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Observation {
    /// Number of the window in the run, from 0.
    pub window: u64,
    /// When it began, and how long it was.
    pub span: TimeSpan,
    /// Why it ended.
    #[serde(alias = "ended")]
    pub end_reason: WindowEnd,
    /// All tasks that lived in it, in order of arrival; those that ended in it are among them.
    pub tasks: Vec<TaskSample>,
    /// Counters of shared things; a place that is missing was not counted.
    #[serde(alias = "places")]
    pub shared_counts: Vec<(CounterScope, EventCounts)>,
    /// The results of the probes in this window.
    #[serde(alias = "answers")]
    pub probe_results: Vec<ProbeResult>,
    /// The plan in force: slow actions continue, and other tools make changes as well.
    #[serde(alias = "in_force")]
    pub applied: AppliedPlan,
}
