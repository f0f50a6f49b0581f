//! The page's only JSON format: a header, then one snapshot per window.
//!
//! Missing values are omitted, never zero. All texts are printable, and the page inserts them as text nodes. A
//! snapshot contains `curves` and `matrix` only if they changed.

use cachemate_core::Estimate;
use serde::Serialize;

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
pub const SHAPE: u32 = 3;

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
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Snapshot {
    /// Number of the window.
    pub window: u64,
    /// End of the window, counted from the start of the run's first window.
    pub at_s: f64,
    /// Length of the window.
    pub duration_s: f64,
    /// Services, ordered by loss, largest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceSnapshot>,
    /// Live programs, in order of arrival.
    pub programs: Vec<ProgramSnapshot>,
    /// Contended caches for which a miss ratio was measured or forecast.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub caches: Vec<CacheSnapshot>,
    /// Reasons that the previous window did not give.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<DecisionSnapshot>,
    /// Whether the window's plan changes places, turns or shares.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plan_changed: bool,
    /// Gangs that are in force.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gangs: Vec<GangSnapshot>,
    /// Shares of caches that are in force.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<ShareSnapshot>,
    /// Results of probes that ended in this window.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<ProbeSnapshot>,
    /// Time that the window's changes to the host took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes_s: Option<f64>,
    /// Changes that the host refused, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<String>,
    /// Settings that another process changed, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overridden: Vec<String>,
    /// Changes that are still in progress, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<String>,
    /// Entries of the restore journal; missing in recordings, which do not contain the journal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal: Option<Vec<JournalLine>>,
    /// State of the daemon; missing in recordings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub daemon: Option<DaemonSnapshot>,
    /// Curves that are new or have changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<CurveSnapshot>,
    /// Pairwise slowdowns, if they changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matrix: Option<MatrixSnapshot>,
}

/// One service, with its loss and the causes of that loss.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServiceSnapshot {
    /// Kind of the service, such as `unit` or `pod`.
    pub kind: &'static str,
    /// Name of the service; printable.
    pub name: String,
    /// Number of the service's threads.
    pub tasks: u32,
    /// CPU time divided by elapsed time.
    pub cpu_share: f64,
    /// Run time that users feel to be added: the product of both losses, or the measured one of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_time: Option<Estimate>,
    /// Run time added by CPU second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Estimate>,
    /// Method by which the cache loss was determined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_source: Option<&'static str>,
    /// Cache losses by cause, the largest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cache_by: Vec<ServiceLossSnapshot>,
    /// Run time added by waiting for CPUs on which other services run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Estimate>,
    /// Services that ran on its CPUs meanwhile, the largest part first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waiting_by: Vec<WaitingCauseSnapshot>,
    /// Cache losses that confined services would cause without their confinement, the largest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prevented: Vec<ServiceLossSnapshot>,
    /// The reason why the cache loss is unknown, or why no cause of it is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A service that ran while another one waited for its CPUs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct WaitingCauseSnapshot {
    /// Name of the service, printable; missing for programs that are not observed, a CPU quota or a hypervisor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// Run time added by waiting for it, as a share.
    pub loss: f64,
    /// Part of the CPU time of all that ran meanwhile.
    pub share: f64,
}

/// The loss that one service causes to another.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServiceLossSnapshot {
    /// Name of the service that causes the loss; printable.
    pub service: String,
    /// Run time that the cause adds, as a share of the solo run time.
    pub loss: Estimate,
    /// `measured`, `attributed` or `forecast`.
    pub source: &'static str,
    /// The same loss as profiles alone forecast it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<f64>,
}

/// One process with all its threads.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
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
    #[serde(skip_serializing_if = "std::ops::Not::not")]
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
    pub speed_unit: Option<&'static str>,
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
    /// Promises to the program, with their states.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub promises: Vec<PromiseSnapshot>,
}

/// The state of a promise to a program.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PromiseSnapshot {
    /// State of the promise, such as `at risk`.
    pub state: &'static str,
    /// Sentence about the state, the measurement and the promise, with the same wording in every front end.
    pub text: String,
}

/// Miss ratio of one contended cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheSnapshot {
    /// The cache's index, as in [`CacheHeader::cache`].
    pub cache: u32,
    /// Measured misses divided by references.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub miss_ratio: Option<f64>,
    /// Miss ratio that the daemon forecasts in this window for the next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast_miss_ratio: Option<f64>,
}

/// One reason as a sentence, as `explain` prints it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DecisionSnapshot {
    /// Kind of the reason, such as `rolled-back`.
    pub kind: &'static str,
    /// Programs that the reason names.
    pub programs: Vec<u32>,
    /// The sentence; printable.
    pub text: String,
    /// Figures of the reason; their names end in units.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<(String, f64)>,
}

/// Programs that take turns on some CPUs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GangSnapshot {
    /// CPUs on which the gangs take turns, such as `0-3`.
    pub cpus: String,
    /// Length of one turn's slice.
    pub slice_s: f64,
    /// Programs of each gang, in the order of their turns.
    pub turns: Vec<Vec<u32>>,
}

/// A share of a cache that a group of programs uses.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ShareSnapshot {
    /// Number of the group.
    pub group: u32,
    /// Index of the cache; if the unit is `colors`, the share is of every cache at that level.
    pub cache: u32,
    /// Unit of the share: `ways` or `colors`.
    pub unit: &'static str,
    /// Indices of the ways or colors in the share, such as `0-3`.
    pub indices: String,
    /// Number of ways or colors of the whole cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit_count: Option<u32>,
    /// Programs that are confined to the share.
    pub programs: Vec<u32>,
    /// Measured occupancy of the group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub occupancy_bytes: Option<u64>,
    /// Share of the members' pages that are in allowed colors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_page_share: Option<f64>,
}

/// Result of one probe.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProbeSnapshot {
    /// Kind of probe, for display.
    pub kind: &'static str,
    /// CPU time that the probe used.
    pub cost_s: f64,
    /// The probed program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<u32>,
}

/// One entry of the restore journal.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct JournalLine {
    /// The changed object, such as `affinity of gzip(1234)`.
    pub object: String,
    /// Original value that cachemate will restore.
    pub original: String,
}

/// The daemon's own state.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct DaemonSnapshot {
    /// Whether the daemon changes the host; otherwise, it only observes.
    pub acting: bool,
    /// Process id of the daemon.
    pub pid: u32,
    /// Level of the host's capabilities, as `cachemate doctor` reports it.
    pub level: u32,
    /// CPU time of the daemon divided by elapsed time, since its start.
    pub cpu_share: f64,
    /// The reason why the last reload of the configuration failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_error: Option<String>,
}

/// One program's misses by cache size.
#[derive(Clone, PartialEq, Debug, Serialize)]
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
#[derive(Clone, PartialEq, Debug, Serialize)]
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
