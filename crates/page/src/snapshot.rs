//! The page's only JSON format: a header, and one snapshot per window.
//!
//! Missing values are omitted, never zero. Texts are printable; the page inserts them as text nodes. Only snapshots in
//! which they changed contain `curves` and `matrix`.

use serde::Serialize;

/// The constant properties of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PageHeader {
    /// Version of the format; the page rejects others.
    pub shape: u32,
    /// Version of the program that made it.
    pub version: String,
    /// Source of the run: `live`, or the recording's name.
    pub source: String,
    /// Distinguishes runs of the same source.
    pub run: String,
    /// The policy that decides.
    pub policy: String,
    /// The policy's parameters, as given.
    pub parameters: String,
    /// Is a decision that made programs slower rolled back?
    pub guarded: bool,
    /// Number of online CPUs.
    pub cpus: u32,
    /// The contended caches.
    pub caches: Vec<CacheHeader>,
    /// Ground truth of the simulated machine; missing for hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truth: Option<GroundTruth>,
    /// The reason for which the recording has no proper end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut_off: Option<String>,
}

/// The version of the format.
pub const SHAPE: u32 = 2;

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

/// A simulated machine's ground truth about the whole run.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroundTruth {
    /// Its file or machine.
    pub source: String,
    /// Figures of each program that ran.
    pub programs: Vec<ProgramTruth>,
    /// Lines of the second program that the first one evicted from the contended caches.
    pub evicted: Vec<(u32, u32, u64)>,
}

/// Simulated figures of a program.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProgramTruth {
    /// As in [`ProgramSnapshot::program`].
    pub program: u32,
    /// Instructions per cycle over the measured part of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instr_per_cycle: Option<f64>,
    /// Misses of the contended cache per thousand instructions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mpki: Option<f64>,
    /// Share of those misses on lines that other programs evicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evicted_by_others_share: Option<f64>,
}

/// One window.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Snapshot {
    /// Its number.
    pub window: u64,
    /// Its end, counted from the run's first window.
    pub at_s: f64,
    /// Its length.
    pub duration_s: f64,
    /// Services, those with the largest loss first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceSnapshot>,
    /// Live programs, in order of arrival.
    pub programs: Vec<ProgramSnapshot>,
    /// The contended caches for which something was counted or forecast.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub caches: Vec<CacheSnapshot>,
    /// Reasons that were not given in the previous window.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<DecisionSnapshot>,
    /// Does the plan change places, turns or shares?
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plan_changed: bool,
    /// Gangs in force.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gangs: Vec<GangSnapshot>,
    /// Shares of caches in force.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<ShareSnapshot>,
    /// Results of probes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<ProbeSnapshot>,
    /// Time that the changes of the window took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes_s: Option<f64>,
    /// Items that the host refused, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<String>,
    /// Items that another process changed, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overridden: Vec<String>,
    /// Items that are in progress, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<String>,
    /// Objects of the restore journal; missing in recordings, which do not contain it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal: Option<Vec<JournalLine>>,
    /// The daemon itself; missing in recordings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub daemon: Option<DaemonSnapshot>,
    /// Curves that are new or have changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<CurveSnapshot>,
    /// Pairwise slowdowns, if they changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matrix: Option<MatrixSnapshot>,
}

/// One service, with its loss and the causes of it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServiceSnapshot {
    /// Kind, such as `unit` or `pod`.
    pub kind: &'static str,
    /// Name; printable.
    pub name: String,
    /// Number of its threads.
    pub tasks: u32,
    /// CPU time over elapsed time.
    pub cpu_share: f64,
    /// Run time over solo run time, minus one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<EstimateRange>,
    /// Source of the slowdown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<&'static str>,
    /// Losses by cause, the largest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slowed_by: Vec<ServiceLossSnapshot>,
    /// The reason for which the slowdown is unknown, or no cause is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The loss that one service causes to another.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServiceLossSnapshot {
    /// Name of the cause; printable.
    pub service: String,
    /// Run time that it adds.
    pub loss: EstimateRange,
    /// `measured`, `attributed` or `forecast`.
    pub source: &'static str,
    /// The same by profiles alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<f64>,
}

/// One process with all its threads.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ProgramSnapshot {
    /// Number of the process within the run; not the kernel's id.
    pub program: u32,
    /// Name; printable.
    pub name: String,
    /// Its service, as `kind/name`; printable.
    pub service: String,
    /// The kernel's process id, if the daemon reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Number of its threads.
    pub threads: u32,
    /// Is it only observed, and never moved?
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub observed_only: bool,
    /// Pairs of a cache and the number of threads that ran mostly on its CPUs. Threads that did not run are not
    /// counted.
    pub places: Vec<(u32, u32)>,
    /// CPU time over elapsed time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_share: Option<f64>,
    /// Work per second, of `speed_unit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_per_s: Option<f64>,
    /// The counted work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_unit: Option<&'static str>,
    /// Instructions per cycle while on CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instr_per_cycle: Option<f64>,
    /// Misses of the contended cache per thousand instructions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mpki: Option<f64>,
    /// Measured run time over solo run time, minus one; mean over threads, weighted by time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<f64>,
    /// The same as the reference predictor forecasts it under the plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast_slowdown: Option<EstimateRange>,
    /// Share of a probe's lines that it evicts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intensity: Option<f64>,
    /// Slowdown beside a full stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sensitivity: Option<f64>,
    /// CPUs that the plan in force allows, if it names any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
    /// Maximum slowdown that the operator's rule sets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_slowdown: Option<f64>,
    /// Minimum work per second that the operator promises, in `speed_unit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_rate: Option<f64>,
    /// States of its promises, each with its sentence.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub promises: Vec<PromiseSnapshot>,
}

/// A promise to a program and its state.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PromiseSnapshot {
    /// State, such as `at risk`.
    pub state: &'static str,
    /// The state, the measurement and the promise, worded as on every front end.
    pub text: String,
}

/// A value and the ends of its interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct EstimateRange {
    /// The value, in the unit of the field.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Ratio of misses to references of one cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheSnapshot {
    /// As in [`CacheHeader::cache`].
    pub cache: u32,
    /// Counted ratio.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub miss_ratio: Option<f64>,
    /// Ratio that this window forecasts for the next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast_miss_ratio: Option<f64>,
}

/// One reason as a sentence, as `explain` prints it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DecisionSnapshot {
    /// Kind, such as `rolled-back`.
    pub kind: &'static str,
    /// Programs that the reason names.
    pub programs: Vec<u32>,
    /// The sentence; printable.
    pub text: String,
    /// Its figures, whose names end in units.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<(String, f64)>,
}

/// Programs that take turns on some CPUs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GangSnapshot {
    /// CPUs, such as `0-3`.
    pub cpus: String,
    /// Length of one slice.
    pub slice_s: f64,
    /// Programs of each gang, in the order of their turns.
    pub turns: Vec<Vec<u32>>,
}

/// A share of a cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ShareSnapshot {
    /// Number of the group.
    pub group: u32,
    /// Its cache; if the unit is colors, it stands for all caches of that level.
    pub cache: u32,
    /// `ways` or `colors`.
    pub unit: &'static str,
    /// Indices of the share's units, such as `0-3`.
    pub indices: String,
    /// Number of units of the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit_count: Option<u32>,
    /// Its members.
    pub programs: Vec<u32>,
    /// Measured occupancy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub occupancy_bytes: Option<u64>,
    /// Share of the members' pages that are in allowed colors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_page_share: Option<f64>,
}

/// One result of a probe.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProbeSnapshot {
    /// Kind of probe, for display.
    pub kind: &'static str,
    /// CPU time of the probe.
    pub cost_s: f64,
    /// The probed program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<u32>,
}

/// One original in the restore journal.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct JournalLine {
    /// The object, such as `affinity of gzip(1234)`.
    pub object: String,
    /// The value that will be restored.
    pub original: String,
}

/// The daemon's own state.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct DaemonSnapshot {
    /// Does it change the host? If not, it only observes.
    pub acting: bool,
    /// Its process id.
    pub pid: u32,
    /// Level of the host's capabilities, as `cachemate doctor` reports it.
    pub level: u32,
    /// Share of one CPU, since the start.
    pub cpu_share: f64,
    /// The reason for which the last reload failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_error: Option<String>,
}

/// Misses by cache size of one program.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CurveSnapshot {
    /// As in [`ProgramSnapshot::program`].
    pub program: u32,
    /// Level, such as `L3`.
    pub level: String,
    /// The source of its measurement.
    pub source: String,
    /// Bytes, misses per thousand instructions, lower and upper end.
    pub points: Vec<(u64, f64, f64, f64)>,
}

/// Slowdowns of the row's program beside the column's: forecast for the two alone on one cache, and measured in the
/// windows in which both ran on one cache, whichever other programs ran there.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MatrixSnapshot {
    /// Programs in the order of rows and columns.
    pub programs: Vec<u32>,
    /// Forecasts of the reference predictor.
    pub forecast: Vec<Vec<Option<f64>>>,
    /// Means over the windows so far.
    pub measured: Vec<Vec<Option<f64>>>,
    /// Numbers of windows in the means.
    pub windows: Vec<Vec<u32>>,
}
