//! The one model of a window: every front end reads it. `status`, `top`, `explain` and the metrics read the snapshot of
//! a running daemon, and the page reads one snapshot after the other, of a daemon or of a recording.
//!
//! A value that was not measured is `None`, never zero. Names are those of the kernel, which other users choose, so a
//! front end makes them printable; sentences are printable already.

use cachemate_core::{
    CpusetGroup, Estimate, FactOrigin, OriginalState, PromiseState, ReasonKind, ServiceIdentity,
    ServiceKind, TaskId,
};
use serde::{Deserialize, Serialize};

/// The constant properties of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PageHeader {
    /// Version of the format; the page rejects other versions.
    pub shape: u32,
    /// Version of the cachemate that wrote the header.
    pub version: String,
    /// Source of the run: `live`, or the recording's name.
    pub source: String,
    /// Identifier that distinguishes runs from the same source.
    pub run: String,
    /// Name of the policy that decides.
    pub policy: String,
    /// The policy's parameters, as given.
    pub parameters: String,
    /// Whether a decision that made programs slower is rolled back.
    pub guarded: bool,
    /// Number of online CPUs.
    pub cpus: u32,
    /// The contended caches.
    pub caches: Vec<CacheHeader>,
    /// Ground truth of a simulated machine; missing for hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truth: Option<GroundTruth>,
    /// The reason why the recording ends prematurely.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut_off: Option<String>,
}

/// The version of the format.
pub const SHAPE: u32 = 4;

/// One contended cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheHeader {
    /// Index within the machine.
    pub cache: u32,
    /// Level, such as `L3`.
    pub level: String,
    /// CPUs, such as `0-3`.
    pub cpus: String,
    /// Size of one instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Associativity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ways: Option<u32>,
    /// Number of page colors that partition it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub colors: Option<u32>,
}

/// Ground truth of a simulated machine over the whole run.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroundTruth {
    /// File or machine from which the ground truth was read.
    pub source: String,
    /// Figures of each program that ran.
    pub programs: Vec<ProgramTruth>,
    /// Evictions in the contended caches: evicting program, evicted program, and number of lines.
    pub evicted: Vec<(u32, u32, u64)>,
}

/// Ground truth of one program.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProgramTruth {
    /// The program's number, as in [`ProgramSnapshot::program`].
    pub program: u32,
    /// Instructions per cycle over the measured part of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instr_per_cycle: Option<f64>,
    /// Misses of the contended cache per thousand instructions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mpki: Option<f64>,
    /// Share of these misses on lines that other programs had evicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evicted_by_others_share: Option<f64>,
}

/// The state of the run after one window.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// Number of the window.
    pub window: u64,
    /// End of the window, counted from the start of the run's first window.
    pub at_s: f64,
    /// Length of the window.
    pub duration_s: f64,
    /// The contended caches.
    pub caches: Vec<CacheSnapshot>,
    /// Services, those with the largest loss first.
    pub services: Vec<ServiceSnapshot>,
    /// Live threads, in order of arrival; empty on the page, and in recordings, which lack the kernel's ids.
    pub tasks: Vec<TaskSnapshot>,
    /// Live programs, in order of arrival.
    pub programs: Vec<ProgramSnapshot>,
    /// Promises to programs, with their states.
    pub promises: Vec<PromiseSnapshot>,
    /// Reasons that the previous window did not give.
    pub new_decisions: Vec<DecisionSnapshot>,
    /// Whether the window's plan changes places, turns or shares.
    pub plan_changed: bool,
    /// Gangs that are in force.
    pub gangs: Vec<GangSnapshot>,
    /// Shares of caches that are in force, as read back.
    pub shares: Vec<ShareSnapshot>,
    /// Limits of memory bandwidth that are in force, as read back.
    pub bandwidth_limits: Vec<BandwidthSnapshot>,
    /// Groups that the configuration confines, as read back.
    pub cpusets: Vec<CpusetGroup>,
    /// Changes that are still in progress.
    pub pending: Vec<PendingSnapshot>,
    /// Changes that the host refused, one sentence each; at most [`Snapshot::MAX_REFUSED`].
    pub refused: Vec<String>,
    /// Settings that another process changed, one sentence each.
    pub overridden: Vec<String>,
    /// Results of probes that ended in this window.
    pub probes: Vec<ProbeSnapshot>,
    /// Time that the window's changes to the host took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes_s: Option<f64>,
    /// Entries of the restore journal; missing in recordings, which do not contain the journal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal: Option<Vec<OriginalState>>,
    /// State of the daemon; only on the page of a running one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub daemon: Option<DaemonSnapshot>,
    /// Curves that are new or have changed; only on the page.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<CurveSnapshot>,
    /// Pairwise slowdowns, if they changed; only on the page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matrix: Option<MatrixSnapshot>,
}

impl Snapshot {
    /// Maximum number of refused changes that a snapshot names.
    pub const MAX_REFUSED: usize = 200;
}

/// A last-level cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CacheSnapshot {
    /// Id of the cache in the topology.
    pub cache: u32,
    /// Level of the cache, such as `L3`.
    pub level: String,
    /// Its CPUs, as an index list.
    pub cpus: String,
    /// Size of the cache; `None` if the kernel does not report it.
    pub size_bytes: Option<u64>,
    /// Tasks last observed on its CPUs.
    pub tasks: Vec<u32>,
    /// Measured misses divided by references.
    pub miss_ratio: Option<f64>,
    /// Miss ratio that the reference predictor forecasts under the plan.
    pub forecast_miss_ratio: Option<f64>,
    /// Mean number of busy CPUs in the last second, whichever programs used them.
    pub busy_cpus: Option<f64>,
    /// Memory traffic in both directions.
    pub memory_bytes_per_second: Option<f64>,
    /// Bytes that lines occupy.
    pub occupancy_bytes: Option<u64>,
    /// Classes of service that no group uses.
    pub free_classes: Option<u32>,
}

/// A service with its loss and the causes of it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServiceSnapshot {
    /// Kind of the service.
    pub kind: ServiceKind,
    /// Name of the service: kind and name together identify it on this host.
    pub name: String,
    /// The pod: its UID, or `namespace/name` if the container runtime reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The container's id, or its name if the container runtime reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// References of its image, by name and by digest, if the container runtime reports them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<String>,
    /// The profile that its pod's annotation or label `cachemate.io/profile` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Managed and observed threads.
    pub tasks: u32,
    /// Ids of these threads.
    pub task_ids: Vec<u32>,
    /// Programs that ended before a window could read them, since the daemon's start; `None` if the kernel sends no
    /// process events.
    pub unread_programs: Option<u64>,
    /// CPU time over elapsed time.
    pub cpu_share: f64,
    /// Time in which its threads waited for a CPU, over elapsed time; `None` if the kernel does not report it.
    pub waiting_share: Option<f64>,
    /// Run time that users feel to be added: by the rate of work, else the product of both losses, or the measured one
    /// of them; `None` if none was measured.
    pub run_time_percent: Option<f64>,
    /// Ends of its interval.
    pub run_time_range_percent: Option<(f64, f64)>,
    /// Cache loss: run time added by CPU second; `None` if unknown, for the reason in `reason`.
    pub cache_percent: Option<f64>,
    /// Ends of its interval.
    pub cache_range_percent: Option<(f64, f64)>,
    /// Source of the cache loss: `measured` or `forecast`.
    pub cache_source: Option<String>,
    /// The services that cause the cache loss, the largest loss first.
    pub cache_by: Vec<CacheLossSnapshot>,
    /// Waiting loss: run time added by waiting for CPUs on which other services run; `None` if unknown.
    pub waiting_percent: Option<f64>,
    /// Ends of its interval.
    pub waiting_range_percent: Option<(f64, f64)>,
    /// The services behind which it waited, the largest part first.
    pub waiting_by: Vec<WaitingCauseSnapshot>,
    /// Cache losses that confined services would cause without their confinement, the largest first.
    #[serde(default)]
    pub prevented: Vec<CacheLossSnapshot>,
    /// The reason why the cache loss is unknown, or why no cause of it is named.
    pub reason: Option<String>,
    /// The smallest limit that a rule sets for one of its threads, in percent.
    pub max_slowdown_percent: Option<f64>,
}

/// A service that ran while another one waited for its CPUs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WaitingCauseSnapshot {
    /// Name of the service; `None` for programs that are not observed, a CPU quota or a hypervisor.
    pub service: Option<String>,
    /// Kind of the service.
    pub kind: Option<ServiceKind>,
    /// Run time added by waiting for it.
    pub percent: f64,
    /// Part of its waits behind all others.
    pub share: f64,
}

/// The part of a cache loss that one service causes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CacheLossSnapshot {
    /// Name of the cause.
    pub service: String,
    /// Kind of the cause.
    pub kind: ServiceKind,
    /// Run time added by this service.
    pub percent: f64,
    /// Ends of the interval.
    pub range_percent: (f64, f64),
    /// `measured`: from windows with and without it; `attributed`: its part of a measured slowdown; `forecast`: from
    /// profiles.
    pub source: String,
    /// Run time that profiles alone attribute to this service; `None` if they are insufficient.
    pub forecast_percent: Option<f64>,
    /// Windows in which both services ran on one cache.
    pub windows: u32,
}

impl ServiceSnapshot {
    /// Kind and name, which are unique on a host.
    pub fn identity(&self) -> ServiceIdentity {
        ServiceIdentity {
            kind: self.kind,
            name: self.name.clone(),
            pod: self.pod.clone(),
            container: self.container.clone(),
        }
    }
}

/// Class of a program by its effect on co-runners and by their effect on it, from whichever of the two was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ContentionClass {
    /// High intensity and high sensitivity.
    #[serde(rename = "aggressor and victim")]
    AggressorAndVictim,
    /// High intensity.
    #[serde(rename = "aggressor")]
    Aggressor,
    /// High sensitivity.
    #[serde(rename = "victim")]
    Victim,
    /// Low intensity and low sensitivity.
    #[serde(rename = "quiet")]
    Quiet,
    /// Low intensity; its sensitivity was not measured.
    #[serde(rename = "not an aggressor")]
    NotAggressor,
    /// Low sensitivity; its intensity was not measured.
    #[serde(rename = "not a victim")]
    NotVictim,
}

impl ContentionClass {
    /// The name in the status JSON.
    pub fn text(self) -> &'static str {
        match self {
            ContentionClass::AggressorAndVictim => "aggressor and victim",
            ContentionClass::Aggressor => "aggressor",
            ContentionClass::Victim => "victim",
            ContentionClass::Quiet => "quiet",
            ContentionClass::NotAggressor => "not an aggressor",
            ContentionClass::NotVictim => "not a victim",
        }
    }
}

/// A thread.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TaskSnapshot {
    /// Id of the task in plans and run logs.
    pub task: u32,
    /// Process id.
    pub pid: i32,
    /// Thread id.
    pub tid: i32,
    /// Name of the thread, as the kernel has it.
    pub name: String,
    /// Service of the thread, as `kind/name`.
    #[serde(default)]
    pub service: String,
    /// Is it only observed, and never moved?
    pub observed_only: bool,
    /// The CPU of its last observation.
    pub cpu: Option<u32>,
    /// Last-level cache of that CPU.
    pub cache: Option<u32>,
    /// Its CPUs under the plan in force.
    pub allowed: Option<String>,
    /// CPU time over the length of the window.
    pub cpu_share: Option<f64>,
    /// Share of a full cache that it evicts, from 0 to 1.
    pub intensity: Option<Estimate>,
    /// Slowdown beside a full stream.
    pub sensitivity: Option<Estimate>,
    /// Class of the program by intensity and sensitivity; `None` if neither was measured.
    pub class: Option<ContentionClass>,
    /// Last-level misses per thousand instructions, by counters.
    pub mpki: Option<f64>,
    /// Miss curve of the program, as far as it is known: bytes of the last-level cache, misses per thousand
    /// instructions.
    #[serde(default)]
    pub curve: Vec<(u64, Estimate)>,
    /// Bytes per second that it fills into the last level, by counters or by a probe.
    pub fill_bytes_per_second: Option<f64>,
    /// Instructions per cycle, by counters.
    pub instr_per_cycle: Option<f64>,
    /// Slowdown that the reference predictor forecasts under the plan.
    pub forecast_slowdown: Option<f64>,
    /// Loss of speed while it runs, relative to its solo speed.
    pub measured_slowdown: Option<f64>,
    /// Progress per second, in the unit of `progress_unit`.
    pub progress_per_second: Option<f64>,
    /// The counted work: work reported, instructions, or a proxy (system calls, page faults).
    pub progress_unit: Option<String>,
    /// Maximum slowdown that its rule promises.
    pub max_slowdown: Option<f64>,
    /// Minimum work per second of each thread that its rule promises.
    pub min_rate: Option<f64>,
    /// Measured quantities, each with its kind of evidence and its age.
    #[serde(default)]
    pub known: Vec<FactOrigin>,
    /// The last reasons that name it.
    pub reasons: Vec<String>,
}

/// One process with all its threads.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ProgramSnapshot {
    /// Number of the process within the run; not the kernel's id.
    pub program: u32,
    /// Name of the program; printable.
    pub name: String,
    /// The program's service, as `kind/name`; printable.
    pub service: String,
    /// The kernel's process id, if the daemon reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Number of the program's threads.
    pub threads: u32,
    /// Whether the program is only observed and never moved.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub observed_only: bool,
    /// Pairs of a cache and the number of threads that ran mostly on its CPUs; idle threads are not counted.
    pub places: Vec<(u32, u32)>,
    /// CPU time divided by elapsed time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_share: Option<f64>,
    /// Work per second, in units of `speed_unit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_per_s: Option<f64>,
    /// Unit of work that `speed_per_s` and `min_rate` count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_unit: Option<String>,
    /// Instructions per cycle while on CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instr_per_cycle: Option<f64>,
    /// Misses of the contended cache per thousand instructions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mpki: Option<f64>,
    /// Measured run time divided by solo run time, minus one; mean over threads, weighted by CPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<f64>,
    /// Slowdown under the plan, as the reference predictor forecasts it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast_slowdown: Option<Estimate>,
    /// Share of a probe's lines that the program evicts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intensity: Option<f64>,
    /// Slowdown of the program beside a full-rate stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sensitivity: Option<f64>,
    /// CPUs that the plan in force allows; missing if the plan sets none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
    /// Maximum slowdown that the operator's rule sets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_slowdown: Option<f64>,
    /// Minimum work per second that the operator promises, in `speed_unit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_rate: Option<f64>,
    /// The thread whose profile stands for the program, if one has a miss curve.
    #[serde(skip)]
    pub profiled_task: Option<TaskId>,
}

/// A promise to a program and its state.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PromiseSnapshot {
    /// Number of the process within the run.
    pub program: u32,
    /// The kernel's id of the process; `None` in recordings.
    pub pid: Option<i32>,
    /// Name of the process, for sentences.
    pub name: String,
    /// The state by measurements under the plan in force.
    pub state: PromiseState,
    /// Promised maximum of the slowdown.
    pub max_slowdown: Option<f64>,
    /// Promised minimum of work per second of each thread.
    pub min_rate: Option<f64>,
    /// Slowdown or rate with its 95 % interval; `None` if it was not measured.
    pub measured: Option<Estimate>,
    /// The promise as a sentence, with the missing evidence, or the programs that would have to leave.
    pub text: String,
}

/// One reason of one decision.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DecisionSnapshot {
    /// The window of the decision.
    pub window: u64,
    /// Kind of the reason.
    #[serde(default)]
    pub kind: ReasonKind,
    /// Task ids that it names.
    pub tasks: Vec<u32>,
    /// Programs that it names.
    #[serde(default)]
    pub programs: Vec<u32>,
    /// The reason as a sentence.
    pub reason: String,
    /// Figures of the reason; their names end in units.
    pub numbers: Vec<(String, f64)>,
}

/// Programs that take turns on some CPUs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GangSnapshot {
    /// CPUs on which the gangs take turns, such as `0-3`.
    pub cpus: String,
    /// Length of a turn.
    pub slice_ns: u64,
    /// Task ids of each gang, in the order of their turns.
    pub gangs: Vec<Vec<u32>>,
    /// The same by program.
    pub programs: Vec<Vec<u32>>,
}

/// A share of a cache and its members.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ShareSnapshot {
    /// Group of the share in the plan.
    pub group: u32,
    /// Id of the cache; a share of colors is of every cache at that level.
    pub cache: u32,
    /// Ways, as an index list.
    pub ways: Option<String>,
    /// Colors, as an index list.
    pub colors: Option<String>,
    /// Number of ways or colors of the whole cache.
    pub unit_count: Option<u32>,
    /// Task ids of the members.
    pub tasks: Vec<u32>,
    /// Programs of the members.
    pub programs: Vec<u32>,
    /// Bytes that the members occupy, by the hardware's counter.
    pub occupancy_bytes: Option<u64>,
    /// Traffic of the members between this cache and memory, in both directions.
    pub memory_bytes_per_second: Option<f64>,
    /// Power of the cores while they ran the members.
    pub core_watts: Option<f64>,
    /// Cycles without an instruction while a miss of the members was outstanding.
    pub memory_stall_cycles_per_second: Option<f64>,
    /// Share of the resident pages managed by an agent that have allowed colors.
    pub allowed_page_share: Option<f64>,
    /// Frames of other colors that were assigned because no allowed one was free.
    pub fallback_pages: Option<u64>,
    /// The reasons why the members' lines are not exactly in these ways.
    pub notes: Vec<String>,
}

/// A limit of traffic between a cache and memory, and the programs that it limits.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct BandwidthSnapshot {
    /// Group of the limit in the plan.
    pub group: u32,
    /// Id of the cache in front of the memory.
    pub cache: u32,
    /// The limit with its unit, such as `50 %`.
    pub limit: String,
    /// Task ids of the members.
    pub tasks: Vec<u32>,
    /// Programs of the members.
    pub programs: Vec<u32>,
}

/// A change that is still in progress.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PendingSnapshot {
    /// Group of the share that is in progress; `None` for any other change.
    pub group: Option<u32>,
    /// Cache of that share.
    pub cache: Option<u32>,
    /// Pages finished so far.
    pub done: u64,
    /// Total number of pages; `None` if it is not known yet.
    pub total: Option<u64>,
    /// The same as a sentence.
    pub text: String,
}

/// Result of one probe.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProbeSnapshot {
    /// Kind of probe, for display.
    pub kind: String,
    /// CPU time that the probe used.
    pub cost_s: f64,
    /// The probed program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<u32>,
}

/// The daemon's own state.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct DaemonSnapshot {
    /// Whether the daemon changes the host; otherwise, it only observes.
    pub acting: bool,
    /// CPU time of the daemon divided by elapsed time, since its start.
    pub cpu_share: f64,
    /// The reason why the last reload of the configuration failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_error: Option<String>,
}

/// One program's misses by cache size.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CurveSnapshot {
    /// The program's number, as in [`ProgramSnapshot::program`].
    pub program: u32,
    /// Level, such as `L3`.
    pub level: String,
    /// Method by which the curve was measured.
    pub source: String,
    /// Points of the curve: bytes, misses per thousand instructions, and the lower and upper end of their interval.
    pub points: Vec<(u64, f64, f64, f64)>,
}

/// Slowdowns of the row's program beside the column's. Forecasts are for the two alone on one cache; measurements
/// come from windows in which both ran on one cache, whichever other programs ran there.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MatrixSnapshot {
    /// Programs in the order of rows and columns.
    pub programs: Vec<u32>,
    /// Forecasts of the reference predictor, by row and column.
    pub forecast: Vec<Vec<Option<f64>>>,
    /// Mean measured slowdowns so far, by row and column.
    pub measured: Vec<Vec<Option<f64>>>,
    /// Number of windows in each mean, by row and column.
    pub windows: Vec<Vec<u32>>,
}
