//! The observation of one window: raw readings without interpretation.
//!
//! What a reading means depends on who asks, and a reading that was filtered once cannot be
//! filtered otherwise later, for example in a replay with another policy. So counts are raw and
//! come with the share of time in which they were counted, and filtering and weighting are left to
//! profilers. Missing evidence is a missing entry or `None`, never zero.
//!
//! For example, a thread's misses were counted in a quarter of a window, because six counters
//! served twenty-four events: 500 were seen. The observation has the 500 and the quarter,
//! [`EventCounts::get`] says 2,000, and a thread whose counter was never scheduled says `None`.

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{
    AppliedPlan, CacheId, CpuId, CpuSet, Goal, GroupId, ProbeId, ProcessId, Profile,
    ServiceIdentity, TaskId,
};

/// A span of time on the machine's own clock. `elapsed_cycles` is present only if the cycles of all CPUs are equal (the
/// simulator).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TimeSpan {
    /// Start, counted from the start of the run.
    pub start_ns: u64,
    /// Length of the span.
    pub elapsed_ns: u64,
    /// Length in cycles; `None` if the CPUs differ in their clock.
    pub elapsed_cycles: Option<u64>,
}

impl TimeSpan {
    /// Counted from the start of the run.
    pub fn end_ns(&self) -> u64 {
        self.start_ns + self.elapsed_ns
    }
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

/// The reason why a task on a CPU stalled.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum StallCause {
    /// The task was ready, but another context of the core had the issue slot.
    Issue,
    /// A hit in the cache of this level.
    Hit(CacheLevel),
    /// A line from another cache that is not on the task's own path to memory.
    RemoteCache,
    /// Memory of the task's own node, without queueing if that is counted separately.
    LocalMemory,
    /// Memory of another node, without queueing if that is counted separately.
    RemoteMemory,
    /// Queueing for bandwidth, for any kind of request.
    BusQueue,
}

/// A countable event. Byte events count bytes, stall events cycles, energy microjoules, and all others occurrences.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum CounterEvent {
    /// Executed instructions.
    Instructions,
    /// Cycles on CPU.
    Cycles,
    /// Accesses to the cache of this level; without prefetches if the machine can distinguish them.
    References(CacheLevel),
    /// The [`CounterEvent::References`] that missed.
    Misses(CacheLevel),
    /// Misses on a line that another task evicted.
    InterTaskMisses(CacheLevel),
    /// Misses served by another cache that is not on the task's own path to memory.
    RemoteCacheHits,
    /// Traffic from memory.
    MemoryReadBytes,
    /// Traffic to memory.
    MemoryWriteBytes,
    /// Cycles on CPU without an instruction, by cause.
    StallCycles(StallCause),
    /// Times that the task was switched in on a CPU.
    ContextSwitches,
    /// Minor and major page faults.
    PageFaults,
    /// System calls; on a live host, those that read and write.
    SystemCalls,
    /// Memory traffic in both directions, if the two are not distinguished (MBM).
    MemoryBytes,
    /// The part of [`CounterEvent::MemoryBytes`] that stays on the cache's own memory node.
    LocalMemoryBytes,
    /// Energy of the cores while they ran a group, in microjoules.
    CoreEnergyMicrojoules,
}

/// One counter reading. If events were multiplexed, `enabled_share` is less than 1; `count` is raw, not scaled.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct EventCount {
    /// The event that was counted.
    pub event: CounterEvent,
    /// Occurrences, cycles or bytes, while the counter was on.
    pub count: u64,
    /// Share of the task's time on CPU in which the counter was enabled; 0 to 1, 0 if never.
    pub enabled_share: f64,
}

/// Readings sorted by event, at most one per event. An event without a reading was not measured.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct EventCounts(pub Vec<EventCount>);

impl EventCounts {
    /// Counts of counters that were enabled all the time, so that none is scaled.
    pub fn exact(counts: impl IntoIterator<Item = (CounterEvent, u64)>) -> Self {
        let exact_reading = |(event, count)| EventCount {
            event,
            count,
            enabled_share: 1.0,
        };
        let mut readings: Vec<EventCount> = counts.into_iter().map(exact_reading).collect();
        readings.sort_by_key(|reading| reading.event);
        EventCounts(readings)
    }

    /// The count, scaled for multiplexing; `None` if the event was not measured or never scheduled,
    /// which is not zero.
    pub fn get(&self, event: CounterEvent) -> Option<f64> {
        let reading = self.0.iter().find(|reading| reading.event == event)?;
        (reading.enabled_share > 0.0).then(|| reading.count as f64 / reading.enabled_share)
    }
}

/// One task in one window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TaskSample {
    /// The id that plans use.
    pub task: TaskId,
    /// The address space that it belongs to.
    pub process: ProcessId,
    /// Numeric id of the user who owns the process; `None` if the machine has no users (the simulator).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// Command name. Profiles and match rules use it; policies must not.
    pub name: String,
    /// The service that it belongs to; `None` if its command is the service, or if the machine has no services.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceIdentity>,
    /// Time at which it started or was first observed, on the clock of [`TimeSpan`].
    pub arrival_ns: u64,
    /// Did it exit in this window? The next one does not list it.
    pub exited: bool,
    /// Must the task stay where it is (a kernel thread, pinned by its owner, or excluded by configuration)?
    pub unmovable: bool,
    /// The goal that the operator's rules set; it is part of the observation so that a replay has it.
    pub goal: Option<Goal>,
    /// The CPU at the end of the window; `None` if the task was off CPU.
    pub cpu: Option<CpuId>,
    /// Time on each CPU within the window; co-runners, CPU shares and fairness are computed from it.
    pub on_cpu_ns: Vec<(CpuId, u64)>,
    /// Time in which the task was runnable but had no CPU; `None` if this is unknown.
    pub run_queue_wait_ns: Option<u64>,
    /// Events counted while the task was on CPU.
    pub counts: EventCounts,
    /// Work done, in the task's own unit (operations, rows), if it reports any.
    pub progress: Option<f64>,
    /// Resident pages by color; `None` if frames or colors are not known.
    pub pages_per_color: Option<Vec<u64>>,
    /// Resident pages of its process by memory node; `None` if there is one node, or if their location is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_per_node: Option<Vec<u64>>,
    /// What earlier runs recorded of its program, in the window in which the program is recognized. It is part of the
    /// observation so that a replay has it as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_profile: Option<Box<Profile>>,
}

impl TaskSample {
    /// A program without a service is one by its command name.
    pub fn service_or_command(&self) -> Cow<'_, ServiceIdentity> {
        let command = || Cow::Owned(ServiceIdentity::command(&self.name));
        self.service.as_ref().map_or_else(command, Cow::Borrowed)
    }

    /// Did the task run on any CPU within the window?
    pub fn has_run(&self) -> bool {
        self.on_cpu_ns.iter().any(|(_, ns)| *ns > 0)
    }

    /// Time on any CPU within the window.
    pub fn ran_ns(&self) -> u64 {
        self.on_cpu_ns.iter().map(|(_, ns)| ns).sum()
    }

    /// Time on these CPUs within the window; a task that moved has some on several sets.
    pub fn ran_on_ns(&self, cpus: &CpuSet) -> u64 {
        self.on_cpu_ns
            .iter()
            .filter(|(cpu, _)| cpus.contains(cpu.0))
            .map(|(_, ns)| ns)
            .sum()
    }

    /// Builds a thread that exists since the start of the run, without any measurement.
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
            stored_profile: None,
        }
    }
}

/// The shared resource that a counter belongs to (a cache, a hardware context, a memory controller).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum CounterScope {
    /// A hardware context.
    Cpu(CpuId),
    /// A whole cache, shared by all its users.
    Cache(CacheId),
    /// The memory controller of a node, by its number.
    MemoryNode(u32),
    /// A group's share of a cache.
    Group(GroupId, CacheId),
}

/// An interval in which tasks ran together; it ends when any of them leaves its CPU (CASC 4.2.2.1). The data are raw:
/// the profiler, not the machine, drops short intervals and assigns weights.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RowInterval {
    /// The row: all these tasks ran, each on its own CPU.
    pub tasks: Vec<TaskId>,
    /// The cache that they shared.
    pub cache: CacheId,
    /// Start and length of the interval.
    pub span: TimeSpan,
    /// The task that left its CPU and ended the interval; `None` if the window ended.
    pub ended_by_task: Option<TaskId>,
    /// Counts of the whole shared cache during the interval.
    pub cache_counts: EventCounts,
    /// Counts of each member in the order of `tasks`; empty if the machine cannot attribute them.
    pub task_counts: Vec<EventCounts>,
}

/// A row is complete if it has all tasks of the probe, although other rows do not.
pub fn complete_rows(rows: &[&[TaskId]]) -> Vec<bool> {
    let task_count = rows
        .iter()
        .copied()
        .flatten()
        .collect::<std::collections::BTreeSet<_>>()
        .len();
    let has_partial_row = rows.iter().any(|row| row.len() < task_count);
    rows.iter()
        .map(|row| has_partial_row && row.len() == task_count)
        .collect()
}

/// The kind of address in a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum AddressKind {
    /// An address in the task's address space.
    Virtual,
    /// An address in the machine's memory.
    Physical,
}

/// The level of the memory system that served an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum DataSource {
    /// A cache of this level on the CPU's own path to memory.
    Cache(CacheLevel),
    /// A cache that is not on that path.
    RemoteCache,
    /// Memory, on any node.
    Memory,
    /// The hardware does not report the source.
    Unknown,
}

/// One sampled data access (POWER5 register, PEBS, IBS). A line address is the byte address divided by the line size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AccessSample {
    /// The task that made the access.
    pub task: TaskId,
    /// Line address in the address space of the task.
    pub virtual_line: u64,
    /// Line address in the machine's memory; `None` if the hardware does not report it, or if it is hidden.
    pub physical_line: Option<u64>,
    /// The level that served it.
    pub source: DataSource,
    /// Cycles from the request to the data; `None` if the hardware does not report them.
    pub latency_cycles: Option<u32>,
    /// Time of the sample, on the clock of [`TimeSpan`].
    pub at_ns: u64,
}

/// One watched location. If `reused` is false, the sample is censored: the location was not touched again before the
/// watch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReuseSample {
    /// Accesses of the task between the two touches, 0 for the next access; `None` if they were not counted.
    pub accesses: Option<u64>,
    /// Time that the task ran from the start of the watch to the second touch, or to the end of the watch.
    pub elapsed_ns: u64,
    /// If false, the other fields are lower bounds.
    pub reused: bool,
}

/// Accesses and misses of one super set (AV 2.1). The counts are raw; the profiler applies the thresholds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SuperSetCount {
    /// Accesses to its sets.
    pub accesses: u64,
    /// Accesses that missed.
    pub misses: u64,
}

/// A calibrated program that the machine runs beside a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Neighbor {
    /// Dependent loads over a footprint, slowed down by the task's use of the cache.
    Chase {
        /// Bytes that it traverses repeatedly.
        footprint_bytes: u64,
    },
    /// A stream, slowed down by the task's use of bandwidth.
    Stream,
    /// A program that keeps its footprint resident and so takes that space from the task (cache pirating).
    Pirate {
        /// Bytes that it keeps in the cache.
        footprint_bytes: u64,
    },
}

/// One round of prime, wait and reload.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct PrimeProbeSample {
    /// Was the task running meanwhile? If false, it was kept off its CPU.
    pub target_running: bool,
    /// Lines of the probe's buffer that had been evicted, out of `reloads`.
    pub evicted: u32,
    /// Lines that were reloaded.
    pub reloads: u32,
    /// From the start of priming to the end of reloading.
    pub elapsed_ns: u64,
    /// Round-trip time of a cache line between the two CPUs before and after; `None` if it was not measured.
    pub round_trips_ns: Option<(f64, f64)>,
}

/// The evidence from a probe.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ProbeEvidence {
    /// Initial and secondary measurements of CASC, or any other measured co-run.
    Rows(Vec<RowInterval>),
    /// RapidMRC: the log as the hardware recorded it, including repeated lines.
    Trace {
        /// The task that was traced.
        task: TaskId,
        /// The kind of address in the log.
        space: AddressKind,
        /// Line size in bytes.
        line_bytes: u32,
        /// Line addresses in the order of the log.
        lines: Vec<u64>,
        /// Positions in the log, ascending, of code fetches; all others are data. Empty if none were logged.
        #[serde(default)]
        code_positions: Vec<u32>,
        /// Events known to be lost; `None` if the hardware cannot count them.
        lost: Option<u64>,
        /// Counts over the trace, for MPKI and for the vertical shift of the curve.
        counts: EventCounts,
        /// Duration of the log.
        elapsed_ns: u64,
    },
    /// Sampled accesses; `sample_period` is the rate in force, and `events` includes its jitter.
    Samples {
        /// Events from one sample to the next, on average.
        sample_period: u32,
        /// Events that occurred, sampled or not, since the previous result.
        events: u64,
        /// Line size in bytes.
        line_bytes: u32,
        /// Unsorted: a live host returns them CPU by CPU.
        samples: Vec<AccessSample>,
    },
    /// Reuse times of watched locations.
    Reuses {
        /// The task that was watched.
        task: TaskId,
        /// One sample per location, whether it was touched again or not.
        samples: Vec<ReuseSample>,
    },
    /// Activity of one hardware context while the task ran on it.
    Activity {
        /// The task that was counted.
        task: TaskId,
        /// The hardware context that it ran on.
        cpu: CpuId,
        /// The level of the cache whose sets were counted.
        level: CacheLevel,
        /// Counts of each super set, by its index.
        super_sets: Vec<SuperSetCount>,
    },
    /// An external measurement: how much the neighbor slows down the task, and the task the neighbor.
    NeighborSlowdown {
        /// The task that was measured.
        task: TaskId,
        /// The program that ran beside it.
        neighbor: Neighbor,
        /// Time per access of the neighbor while the task was kept off its CPU.
        neighbor_alone_ns: f64,
        /// Time per access of the neighbor beside the task.
        neighbor_corun_ns: f64,
        /// The task's rate of work without the neighbor; `None` if it is unknown. Only its ratio to `task_corun_rate`
        /// is meaningful.
        task_alone_rate: Option<f64>,
        /// The task's rate of work beside the neighbor.
        task_corun_rate: Option<f64>,
        /// The event that the task's rates count as a proxy for work; `None` if they count the work that the task
        /// reports.
        rate_event: Option<CounterEvent>,
    },
    /// Round-trip time of a cache line between two CPUs, measured because virtual machines may misreport which CPUs
    /// share a cache.
    PingPong {
        /// The two CPUs.
        cpus: (CpuId, CpuId),
        /// Time for the line to travel to the other CPU and back.
        round_trip_ns: f64,
    },
    /// Raw samples of how much of the shared cache the task evicts, in the order of measurement.
    PrimeProbe {
        /// The task that was measured.
        task: TaskId,
        /// Size of the probe's buffer.
        buffer_bytes: u64,
        /// Time from priming to reloading.
        wait_ns: u64,
        /// Samples with the task running, and samples without it.
        samples: Vec<PrimeProbeSample>,
    },
}

/// The result of a probe in one window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProbeResult {
    /// The probe, by the id that the plan gave it.
    pub probe: ProbeId,
    /// The evidence that was measured.
    pub evidence: ProbeEvidence,
    /// If false, more evidence follows in a later window.
    pub complete: bool,
    /// CPU time that the probe used, and the task that it was taken from.
    pub cost_ns: Vec<(Option<TaskId>, u64)>,
}

/// The reason why a window ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WindowEnd {
    /// It reached the length that the plan requested.
    Elapsed,
    /// A probe was complete.
    ProbeAnswered,
    /// A task arrived or exited.
    TasksChanged,
    /// A signal, or a request at the control socket, interrupted it.
    Interrupted,
    /// CPUs went offline or came back, or the host or the daemon was stopped for a while, so figures from before and
    /// after are not comparable.
    HostChanged,
}

/// The readings of one window.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Observation {
    /// Number of the window in the run, from 0.
    pub window: u64,
    /// Start and length of the window.
    pub span: TimeSpan,
    /// The reason why it ended.
    pub end_reason: WindowEnd,
    /// All tasks that existed in the window, in order of arrival, including those that exited in it.
    pub tasks: Vec<TaskSample>,
    /// Counters of shared resources; a resource that is missing was not counted.
    pub shared_counts: Vec<(CounterScope, EventCounts)>,
    /// The results of the probes in this window.
    pub probe_results: Vec<ProbeResult>,
    /// The plan in force; it also changes between plans, because slow actions continue and other tools make changes.
    pub applied: AppliedPlan,
}

impl Observation {
    /// Whether the final result of a probe is in this window.
    pub fn has_completed(&self, probe: ProbeId) -> bool {
        let mut results = self.probe_results.iter();
        results.any(|result| result.probe == probe && result.complete)
    }

    /// The tasks without those that ended in this window, although their last readings are in it.
    pub fn live_tasks(&self) -> BTreeSet<TaskId> {
        self.tasks
            .iter()
            .filter(|task| !task.exited)
            .map(|task| task.task)
            .collect()
    }
}
