//! Results of the commands as data: the JSON objects on which scripts rely, and from which tables and pages are made.
//!
//! Field names are a promise (docs/json.md, verified by a test of the command): fields are added, but never renamed. A
//! missing value is `null`, never zero.

use cachemate_core::{CacheLevel, Topology};
use serde::Serialize;

/// One point of a miss-rate curve.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CurvePoint {
    /// Size of a fully associative cache.
    pub bytes: u64,
    /// Misses over accesses in the file.
    pub miss_ratio: f64,
    /// Misses per thousand instructions; `None` if the recording has no instruction counts.
    pub mpki: Option<f64>,
    /// Half the width of the confidence interval of `miss_ratio`; `None` if it is exact.
    pub miss_ratio_error: Option<f64>,
}

/// Counts of one stream of accesses (all of them, one process, or one thread).
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CurveCounts {
    /// Records in the file.
    pub accesses: u64,
    /// Data accesses of the program before filtering; `None` if the file does not contain it.
    pub program_accesses: Option<u64>,
    /// Instructions in the recorded window; `None` if the file does not contain it.
    pub instructions: Option<u64>,
    /// First touches of a line; `None` for a sample, which does not include all of them.
    pub cold: Option<u64>,
    /// Points in ascending order of size.
    pub curve: Vec<CurvePoint>,
}

/// Method of a sampled curve.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct SamplingSummary {
    /// Share of the lines that were followed.
    pub rate: f64,
    /// Accesses that were followed.
    pub accesses: u64,
    /// Distinct lines that were followed.
    pub lines: u64,
    /// Largest `miss_ratio_error` of the curve; `None` if a point has none.
    pub error: Option<f64>,
}

/// One part of a recording with `--by`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MrcPart {
    /// The process, by its number in the recording; `None` for all of them.
    pub process: Option<u32>,
    /// The thread, by its number in the recording; `None` for all threads of the process.
    pub thread: Option<u32>,
    /// Counts with a separate cache for this part.
    #[serde(flatten)]
    pub counted: CurveCounts,
}

/// `cachemate mrc --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MrcResult {
    /// The recording, as given.
    pub file: String,
    /// Line size in bytes.
    pub line_bytes: u32,
    /// All processes and threads together.
    #[serde(flatten)]
    pub all: CurveCounts,
    /// The sampling of the curve; `None` if every access was followed.
    pub sampled: Option<SamplingSummary>,
    /// Parts with `--by process` or `--by thread`, ascending; empty otherwise.
    pub parts: Vec<MrcPart>,
}

/// `cachemate cachesim --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CachesimResult {
    /// The recording, as given.
    pub file: String,
    /// Size of the simulated cache.
    pub size_bytes: u64,
    /// Lines per set.
    pub ways: u32,
    /// Line size in bytes.
    pub line_bytes: u32,
    /// `lru`, `plru` or `random`.
    pub replacement: String,
    /// Records in the file; with `--l1`, all of them rather than only those that reach the cache.
    pub accesses: u64,
    /// Misses of the simulated cache.
    pub misses: u64,
    /// Misses over accesses; `None` without accesses.
    pub miss_ratio: Option<f64>,
    /// Misses per thousand instructions; `None` if the file has no instruction counts.
    pub mpki: Option<f64>,
    /// Misses of the L1 in front, with `--l1`.
    pub l1_misses: Option<u64>,
}

/// Summary of one program for predictions and plans.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ProgramSummary {
    /// Name, from the profile or the recording.
    pub name: String,
    /// The recorded command.
    pub command: Option<String>,
    /// Animal class: turtle, sheep, rabbit, devil.
    pub class: Option<String>,
    /// Instructions executed during the recording; `None` if unknown.
    pub instructions: Option<u64>,
    /// Accesses that reach the shared cache, per thousand instructions; `None` if unknown.
    pub accesses_per_kilo_instr: Option<f64>,
    /// Misses per thousand instructions, alone on the whole cache.
    pub solo_mpki: Option<f64>,
    /// Misses per thousand instructions, alone on half of its ways.
    pub half_cache_mpki: Option<f64>,
    /// Share of its hits that it loses with half of the ways, a measure of its sensitivity.
    pub lost_hits_share: Option<f64>,
}

/// The cache that is shared.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct CacheSummary {
    /// Level, such as `L2` or `L3`.
    pub level: String,
    /// Size of all slices together.
    pub size_bytes: u64,
    /// Lines per set.
    pub ways: u32,
    /// Line size in bytes.
    pub line_bytes: u32,
    /// Number of such caches in the machine.
    pub instances: u32,
    /// CPUs that share one of them.
    pub cpus_each: u32,
}

/// Pairwise costs: the row's program is slowed down by the column's.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct CostTable {
    /// The model that predicts it.
    pub model: String,
    /// `percent` of the solo run time lost, or a `weight` without a unit.
    pub unit: String,
    /// Names of the programs, in the order of rows and of columns.
    pub names: Vec<String>,
    /// `values[row][column]`: slowdown of the row's program beside the column's; `None` if unknown.
    pub values: Vec<Vec<Option<f64>>>,
    /// Lower ends of the 90 % intervals; `None` if the model has no intervals.
    pub low: Option<Vec<Vec<Option<f64>>>>,
    /// Upper ends.
    pub high: Option<Vec<Vec<Option<f64>>>>,
}

/// Ends of an interval in percent.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct PercentRange {
    /// Lower end.
    pub low_percent: f64,
    /// Upper end.
    pub high_percent: f64,
}

/// Effect of a group on one of its members.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroupMember {
    /// Name, as in [`ProgramSummary::name`].
    pub name: String,
    /// Misses per thousand instructions, alone on the cache; `None` if unknown.
    pub solo_mpki: Option<f64>,
    /// Beside the others: misses over accesses; `None` if the scheme does not predict it.
    pub miss_ratio: Option<f64>,
    /// Beside the others: misses per thousand instructions; `None` if the scheme does not predict it.
    pub mpki: Option<f64>,
    /// Share of its solo run time that it loses.
    pub slowdown_percent: Option<f64>,
    /// Its 90 % interval; `None` if the model has none.
    pub slowdown_interval: Option<PercentRange>,
}

/// All programs together on one cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroupForecast {
    /// The scheme that computes the figures.
    pub method: String,
    /// Misses over accesses of all members together; `None` if the scheme does not predict it.
    pub miss_ratio: Option<f64>,
    /// Members in the order of the programs.
    pub members: Vec<GroupMember>,
}

/// `cachemate predict --json`.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct PredictResult {
    /// The machine of the prediction.
    pub machine: String,
    /// Its contended cache.
    pub cache: CacheSummary,
    /// Programs in the order given.
    pub programs: Vec<ProgramSummary>,
    /// Pairwise costs.
    pub matrix: CostTable,
    /// Source of each program's cycles and overlap; `None` if the model uses none.
    pub timing: Option<Vec<String>>,
    /// Forecast for all programs together; `None` for fewer than two programs, or without evidence.
    pub group: Option<GroupForecast>,
}

/// One program in a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PlacementRow {
    /// Name, as in [`ProgramSummary::name`].
    pub name: String,
    /// Its CPU; programs on the same CPU take turns.
    pub cpu: Option<u32>,
    /// Expected slowdown, in the unit of the scheme; `None` if it is unknown.
    pub slowdown: Option<f64>,
    /// The reason, as text.
    pub reason: String,
}

/// One cache in a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheAssignment {
    /// Name, such as `L2 #0`.
    pub cache: String,
    /// CPUs in the kernel's list form.
    pub cpus: String,
    /// The programs on its CPUs.
    pub programs: Vec<PlacementRow>,
}

/// Mean expected cost of the programs, for the plan and for the alternatives to it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Alternatives {
    /// Mean for this plan.
    pub plan: Option<f64>,
    /// Mean for the best assignment; `None` if unknown.
    pub best: Option<f64>,
    /// Mean for the worst assignment; `None` if unknown.
    pub worst: Option<f64>,
    /// Mean over random assignments; `None` if unknown.
    pub random: Option<f64>,
}

/// A plan as text and pages show it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PlanResult {
    /// The machine that the plan is for.
    pub machine: String,
    /// The model from which the plan is made.
    pub model: String,
    /// Unit of the numbers below: `percent` or `weight`.
    pub unit: String,
    /// Method by which the plan was found: `matching`, `dynamic-programming`, ...
    pub solver: String,
    /// Is the plan proved optimal under this scheme?
    pub optimal: bool,
    /// Upper bound of the distance from the optimum, if the plan is not known to be optimal.
    pub gap: Option<f64>,
    /// The caches, each with the programs on its CPUs.
    pub caches: Vec<CacheAssignment>,
    /// This plan and the alternatives to it.
    pub expected: Alternatives,
}

/// One CPU in `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CpuRow {
    /// The number that the operating system gives it.
    pub cpu: u32,
    /// The core to which it belongs; dense, counted over the whole machine.
    pub core: u32,
    /// The chip or socket to which it belongs; dense.
    pub package: u32,
    /// Its nearest memory node.
    pub memory_node: u32,
    /// Can tasks run on it?
    pub online: bool,
}

/// One cache in `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheRow {
    /// Index within the machine; not the kernel's id.
    pub cache: u32,
    /// Level: `L1d`, `L1i`, `L2`, ...
    pub level: String,
    /// CPUs in the kernel's list form.
    pub cpus: String,
    /// Size of all slices together; `None` if the machine does not report it.
    pub size_bytes: Option<u64>,
    /// Lines per set; `None` if the machine does not report it.
    pub ways: Option<u32>,
    /// Line size in bytes; `None` if the machine does not report it.
    pub line_bytes: Option<u32>,
    /// Is it the contended cache?
    pub last_level: bool,
}

/// `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TopologyResult {
    /// A machine's name, or the directory that represents the host.
    pub source: String,
    /// Every CPU, online or not.
    pub cpus: Vec<CpuRow>,
    /// Every cache, by index.
    pub caches: Vec<CacheRow>,
}

impl TopologyResult {
    /// The result for a topology from `source`.
    pub fn new(source: &str, topology: &Topology) -> Self {
        let cpus = topology.cpus.iter().map(|cpu| CpuRow {
            cpu: cpu.id.0,
            core: cpu.core,
            package: cpu.package,
            memory_node: cpu.memory_node,
            online: cpu.online,
        });
        let caches = topology.caches.iter().map(|cache| CacheRow {
            cache: cache.id.0,
            level: level_text(cache.level).to_string(),
            cpus: cache.cpus.to_string(),
            size_bytes: cache.size_bytes,
            ways: cache.ways,
            line_bytes: cache.line_bytes,
            last_level: cache.last_level,
        });
        TopologyResult { source: source.to_string(), cpus: cpus.collect(), caches: caches.collect() }
    }
}

/// The name of a level for display.
pub fn level_text(level: CacheLevel) -> &'static str {
    match level {
        CacheLevel::L1Instruction => "L1i",
        CacheLevel::L1Data => "L1d",
        CacheLevel::L2 => "L2",
        CacheLevel::L3 => "L3",
        CacheLevel::L4 => "L4",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are the promised fields at the top level of the object, with null for missing values?
    #[test]
    fn promised_fields_stand_at_the_top() {
        let point = CurvePoint { bytes: 65536, miss_ratio: 0.25, mpki: None, miss_ratio_error: None };
        let all =
            CurveCounts { accesses: 4, program_accesses: None, instructions: None, cold: Some(1), curve: vec![point] };
        let result = MrcResult { file: "t.u64".into(), line_bytes: 64, all, sampled: None, parts: vec![] };
        let want = expect_test::expect![[
            r#"{"file":"t.u64","line_bytes":64,"accesses":4,"program_accesses":null,"instructions":null,"cold":1,"curve":[{"bytes":65536,"miss_ratio":0.25,"mpki":null,"miss_ratio_error":null}],"sampled":null,"parts":[]}"#
        ]];
        want.assert_eq(&serde_json::to_string(&result).unwrap());
    }
}
