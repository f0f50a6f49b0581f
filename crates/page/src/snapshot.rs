//! The page's one JSON shape: a head, and one snapshot per window.
//!
//! Absent values are left out, never zero. Texts are printable; the page puts them into text nodes. `curves` and `matrix`
//! stand only in snapshots in which they changed: between these they are as before.

use serde::Serialize;

/// The constant properties of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PageHeader {
    /// Version of the shape; the page refuses others.
    pub shape: u32,
    /// Version of the program that made it.
    pub version: String,
    /// Source of the run: `live`, or the recording's name.
    pub source: String,
    /// Tells one run from another of the same source.
    pub run: String,
    /// The deciding policy.
    pub policy: String,
    /// The policy's parameters, as given.
    pub parameters: String,
    /// Is a decision rolled back that made programs slower?
    pub guarded: bool,
    /// Number of CPUs that are online.
    pub cpus: u32,
    /// The contended caches.
    pub caches: Vec<CacheHeader>,
    /// The simulated machine's own account of the run; absent for hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truth: Option<GroundTruth>,
    /// The reason why the recording has no proper end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut_off: Option<String>,
}

/// The version of the shape.
pub const SHAPE: u32 = 2;

/// One contended cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheHeader {
    /// Index within the machine.
    pub cache: u32,
    /// Such as `L3`.
    pub level: String,
    /// Such as `0-3,8`.
    pub cpus: String,
    /// Size of one instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Associativity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ways: Option<u32>,
    /// Page colors that divide it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub colors: Option<u32>,
}

/// A simulated machine's own account of the whole run.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroundTruth {
    /// Its file or machine.
    pub source: String,
    /// For each program that ran.
    pub programs: Vec<ProgramTruth>,
    /// Lines that the first program evicted of the second, in the contended caches.
    pub evicted: Vec<(u32, u32, u64)>,
}

/// Modeled figures of a program.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProgramTruth {
    /// As in [`ProgramSnapshot::program`].
    pub program: u32,
    /// Over the measured part of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instr_per_cycle: Option<f64>,
    /// Misses of the contended cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mpki: Option<f64>,
    /// Share of those misses on lines that others evicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evicted_by_others_share: Option<f64>,
}

/// One window.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Snapshot {
    /// Its number.
    pub window: u64,
    /// Its end, from the run's first window on.
    pub at_s: f64,
    /// Its length.
    pub duration_s: f64,
    /// Services, those that lose most first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceSnapshot>,
    /// Those present, in order of arrival.
    pub programs: Vec<ProgramSnapshot>,
    /// The contended caches, where something was counted or forecast.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub caches: Vec<CacheSnapshot>,
    /// Reasons that were not given in the window before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<DecisionSnapshot>,
    /// The plan gives other places, turns or parts than the one before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plan_changed: bool,
    /// Turns in force.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gangs: Vec<GangSnapshot>,
    /// Parts of caches in force.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<ShareSnapshot>,
    /// Answers of probes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<ProbeSnapshot>,
    /// Time that changes of the window cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes_s: Option<f64>,
    /// Lines that the host refused, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<String>,
    /// Lines that another process changed, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overridden: Vec<String>,
    /// Lines that are in progress, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<String>,
    /// Objects of the restore journal; absent in recordings, which do not have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal: Option<Vec<JournalLine>>,
    /// The daemon itself; absent in recordings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub daemon: Option<DaemonSnapshot>,
    /// Curves that are new or other than before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<CurveSnapshot>,
    /// Pairwise slowdowns, if they changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matrix: Option<MatrixSnapshot>,
}

/// One service, with its loss and the causes of it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServiceSnapshot {
    /// Such as `unit` or `pod`.
    pub kind: &'static str,
    /// Printable.
    pub name: String,
    /// Number of its threads.
    pub tasks: u32,
    /// CPUs of processor time per time.
    pub cpu_share: f64,
    /// Run time over run time alone, minus one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<EstimateRange>,
    /// Source of the slowdown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<&'static str>,
    /// Losses by cause, the largest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slowed_by: Vec<ServiceLossSnapshot>,
    /// Why the slowdown is unknown, or no cause is named.
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

/// One process, all its threads together.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ProgramSnapshot {
    /// The process within the run; not the kernel's id.
    pub program: u32,
    /// Printable.
    pub name: String,
    /// Its service, as `kind/name`; printable.
    pub service: String,
    /// The kernel's id, where the daemon tells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Number of its threads.
    pub threads: u32,
    /// Observed, never moved.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub observed_only: bool,
    /// Pairs: a cache, and how many threads ran mostly on its CPUs. Threads that did not run are in none.
    pub places: Vec<(u32, u32)>,
    /// CPUs of processor time per time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_share: Option<f64>,
    /// Work per second, of `speed_unit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_per_s: Option<f64>,
    /// The counted work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_unit: Option<&'static str>,
    /// While on processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instr_per_cycle: Option<f64>,
    /// Misses of the contended cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mpki: Option<f64>,
    /// Run time over run time alone, minus one, by what was measured; mean over threads, weighted by time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<f64>,
    /// The same as the reference predictor expects it under the plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast_slowdown: Option<EstimateRange>,
    /// Share of a probe's lines that it evicts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intensity: Option<f64>,
    /// Slowdown beside a full stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sensitivity: Option<f64>,
    /// CPUs that the plan in force allows it, where it names any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
    /// Maximum slowdown by the operator's rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_slowdown: Option<f64>,
    /// Work a second that the operator promises it, in the unit of `speed_unit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_rate: Option<f64>,
    /// States of its promises, each with its sentence.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub promises: Vec<PromiseSnapshot>,
}

/// A promise to a program and its state.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PromiseSnapshot {
    /// Such as `at risk`.
    pub state: &'static str,
    /// The state, the measurement and the promise, as every front end words them.
    pub text: String,
}

/// A value and the ends of its interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct EstimateRange {
    /// In the unit of the field.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Misses over references of one cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheSnapshot {
    /// As in [`CacheHeader::cache`].
    pub cache: u32,
    /// As counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub miss_ratio: Option<f64>,
    /// As forecast in this window for the next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast_miss_ratio: Option<f64>,
}

/// One reason as a sentence, as `explain` prints it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DecisionSnapshot {
    /// Such as `rolled-back`.
    pub kind: &'static str,
    /// Programs that it names.
    pub programs: Vec<u32>,
    /// Printable.
    pub text: String,
    /// Its figures; names end in their units.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<(String, f64)>,
}

/// Programs that take turns on some CPUs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GangSnapshot {
    /// Such as `0-3`.
    pub cpus: String,
    /// Length of one slice.
    pub slice_s: f64,
    /// Programs of each gang, in the order of their turns.
    pub turns: Vec<Vec<u32>>,
}

/// A part of a cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ShareSnapshot {
    /// Number of the group.
    pub group: u32,
    /// Its cache; if the unit is colors, all caches of that level.
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
    /// Measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub occupancy_bytes: Option<u64>,
    /// Share of the members' pages that are in allowed colors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_page_share: Option<f64>,
}

/// One answer of a probe.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProbeSnapshot {
    /// Kind of probe, for display.
    pub kind: &'static str,
    /// Processor time.
    pub cost_s: f64,
    /// The probed program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<u32>,
}

/// One original in the restore journal.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct JournalLine {
    /// Such as `affinity of gzip(1234)`.
    pub object: String,
    /// The value that will be restored.
    pub original: String,
}

/// The daemon's own state.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct DaemonSnapshot {
    /// Whether it changes the host; false = it only observes.
    pub acting: bool,
    /// Its process.
    pub pid: u32,
    /// How much of the host can be measured, as `cachemate doctor` says it.
    pub level: u32,
    /// Share of one CPU, since the start.
    pub cpu_share: f64,
    /// Why the last reload did not take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_error: Option<String>,
}

/// Misses by cache size of one program.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CurveSnapshot {
    /// As in [`ProgramSnapshot::program`].
    pub program: u32,
    /// Such as `L3`.
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
    /// In the order of rows and columns.
    pub programs: Vec<u32>,
    /// As the reference predictor expects it.
    pub forecast: Vec<Vec<Option<f64>>>,
    /// Mean over the windows so far.
    pub measured: Vec<Vec<Option<f64>>>,
    /// Windows that the mean is over.
    pub windows: Vec<Vec<u32>>,
}
