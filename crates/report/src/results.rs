//! Results of the commands as data: the JSON objects that scripts rely on, from which tables and pages are made.
//!
//! Field names are a promise (docs/json.md, kept by a test of the command): they are added to, never renamed. Absent is
//! `null`, never zero.

use cachemate_core::{CacheLevel, Topology};
use serde::Serialize;

/// One point of a miss-rate curve.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CurvePoint {
    /// Size of a fully associative cache.
    pub bytes: u64,
    /// Misses over accesses in the file.
    pub miss_ratio: f64,
    /// Misses per thousand instructions; `None` where the recording holds no instruction counts.
    pub mpki: Option<f64>,
    /// Half the width of the interval that `miss_ratio` is believed to lie in; `None` = exact.
    pub miss_ratio_error: Option<f64>,
}

/// Counts over one stream of accesses (all of them, one process, one thread).
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CurveCounts {
    /// Records in the file.
    pub accesses: u64,
    /// Data accesses the program did, before any filter; `None` where the file does not say.
    pub program_accesses: Option<u64>,
    /// Executed in the recorded window; `None` where the file does not say.
    pub instructions: Option<u64>,
    /// First touches of a line; `None` from a sample, which does not see them all.
    pub cold: Option<u64>,
    /// Ascending by size.
    pub curve: Vec<CurvePoint>,
}

/// How a sampled curve was made.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct SamplingSummary {
    /// Share of the lines that were followed.
    pub rate: f64,
    /// Accesses that were followed.
    pub accesses: u64,
    /// Distinct lines that were followed.
    pub lines: u64,
    /// Largest `miss_ratio_error` of the curve; `None` where a point has none.
    pub error: Option<f64>,
}

/// One part of a recording with `--by`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MrcPart {
    /// The process, by its number in the recording; `None` = all of them.
    pub process: Option<u32>,
    /// The thread, by its number in the recording; `None` = all of the process's.
    pub thread: Option<u32>,
    /// On a cache of its own.
    #[serde(flatten)]
    pub counted: CurveCounts,
}

/// `cachemate mrc --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MrcResult {
    /// The recording, as given.
    pub file: String,
    /// Bytes of a line, for which the curve was made.
    pub line_bytes: u32,
    /// All processes and threads together.
    #[serde(flatten)]
    pub all: CurveCounts,
    /// How the curve was sampled; `None` = every access was followed.
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
    /// Lines of one set.
    pub ways: u32,
    /// Bytes of a line.
    pub line_bytes: u32,
    /// `lru`, `plru` or `random`.
    pub replacement: String,
    /// Records in the file; with `--l1`, all of them and not only those that reach the cache.
    pub accesses: u64,
    /// Misses of the simulated cache.
    pub misses: u64,
    /// Misses over accesses; `None` without accesses.
    pub miss_ratio: Option<f64>,
    /// Misses per thousand instructions; `None` where the file has no instruction counts.
    pub mpki: Option<f64>,
    /// Misses of the L1 in front, with `--l1`.
    pub l1_misses: Option<u64>,
}

/// One program as predictions and plans see it.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ProgramSummary {
    /// From the profile or the recording.
    pub name: String,
    /// The recorded command.
    pub command: Option<String>,
    /// Animal class: turtle, sheep, rabbit, devil.
    pub class: Option<String>,
    /// Executed while it was recorded; `None` = not known.
    pub instructions: Option<u64>,
    /// Accesses that reach the shared cache, per thousand instructions; `None` = not known.
    pub accesses_per_kilo_instr: Option<f64>,
    /// Alone on the whole cache.
    pub solo_mpki: Option<f64>,
    /// Alone on half of its ways.
    pub half_cache_mpki: Option<f64>,
    /// Share of its hits that it loses with half of the ways: how much it minds.
    pub lost_hits_share: Option<f64>,
}

/// The cache that is shared.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct CacheSummary {
    /// As `L2` or `L3`.
    pub level: String,
    /// All slices together.
    pub size_bytes: u64,
    /// Lines of one set.
    pub ways: u32,
    /// Bytes of a line.
    pub line_bytes: u32,
    /// Number of such caches in the machine, and CPUs on each.
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
    /// Programs, in the order of rows and of columns.
    pub names: Vec<String>,
    /// `values[row][column]`: slowdown of the row's program beside the column's; `None` = unknown.
    pub values: Vec<Vec<Option<f64>>>,
    /// Lower ends of the 90 % intervals; `None` = the model has no intervals.
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
    /// As in [`ProgramSummary::name`].
    pub name: String,
    /// Misses per thousand instructions alone on the cache; `None` = not known.
    pub solo_mpki: Option<f64>,
    /// Beside the others: misses over accesses; `None` where the scheme does not say.
    pub miss_ratio: Option<f64>,
    /// Beside the others: misses per thousand instructions; `None` where the scheme does not say.
    pub mpki: Option<f64>,
    /// Share of its solo run time that it loses.
    pub slowdown_percent: Option<f64>,
    /// Its 90 % interval; `None` = the model has none.
    pub slowdown_interval: Option<PercentRange>,
}

/// All programs together on one cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroupForecast {
    /// The scheme that the figures are by.
    pub method: String,
    /// Misses over accesses of all members together; `None` where the scheme does not say.
    pub miss_ratio: Option<f64>,
    /// In the order of the programs.
    pub members: Vec<GroupMember>,
}

/// `cachemate predict --json`.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct PredictResult {
    /// The machine that was asked about.
    pub machine: String,
    /// Its contended cache.
    pub cache: CacheSummary,
    /// In the order given.
    pub programs: Vec<ProgramSummary>,
    /// Pairwise costs.
    pub matrix: CostTable,
    /// Source of each program's cycles and overlap; `None` = the model uses none.
    pub timing: Option<Vec<String>>,
    /// All together; `None` = fewer than two programs, or nothing is known.
    pub group: Option<GroupForecast>,
}

/// One program in a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PlacementRow {
    /// As in [`ProgramSummary::name`].
    pub name: String,
    /// Its CPU; programs on the same CPU share it in turn.
    pub cpu: Option<u32>,
    /// Expected, as the scheme measures it; `None` = nothing is known.
    pub slowdown: Option<f64>,
    /// The reason in plain words.
    pub reason: String,
}

/// One cache in a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheAssignment {
    /// As `L2 #0`.
    pub cache: String,
    /// Kernel's list form.
    pub cpus: String,
    /// Those on its CPUs.
    pub programs: Vec<PlacementRow>,
}

/// Mean of what the programs are expected to suffer, in the plan and in what else could have been done.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Alternatives {
    /// In this plan.
    pub plan: Option<f64>,
    /// In the best one; `None` = not known.
    pub best: Option<f64>,
    /// In the worst one; `None` = not known.
    pub worst: Option<f64>,
    /// In random ones, on average; `None` = not known.
    pub random: Option<f64>,
}

/// A plan as pictures and pages show it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PlanResult {
    /// The machine that the plan is for.
    pub machine: String,
    /// The model that the plan is by.
    pub model: String,
    /// `percent` or `weight`: what the numbers below are.
    pub unit: String,
    /// `matching`, `dynamic-programming`, ...: how the plan was found.
    pub solver: String,
    /// `true` = no assignment is better by this scheme.
    pub optimal: bool,
    /// How far from the best it can be at most, where not known to be the best.
    pub gap: Option<f64>,
    /// Each with the programs on its CPUs.
    pub caches: Vec<CacheAssignment>,
    /// This plan beside the others that there are.
    pub expected: Alternatives,
}

/// One CPU in `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CpuRow {
    /// As the operating system numbers it.
    pub cpu: u32,
    /// Core that it is a context of; dense, counted over the whole machine.
    pub core: u32,
    /// Chip or socket that it is on; dense.
    pub package: u32,
    /// Its nearest memory node.
    pub memory_node: u32,
    /// Tasks can run on it.
    pub online: bool,
}

/// One cache in `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheRow {
    /// Index within the machine; not the kernel's id.
    pub cache: u32,
    /// `L1d`, `L1i`, `L2`, ...
    pub level: String,
    /// Kernel's list form.
    pub cpus: String,
    /// All slices together; `None` = the machine does not say.
    pub size_bytes: Option<u64>,
    /// Lines of one set; `None` = the machine does not say.
    pub ways: Option<u32>,
    /// Bytes of a line; `None` = the machine does not say.
    pub line_bytes: Option<u32>,
    /// The contended one.
    pub last_level: bool,
}

/// `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TopologyResult {
    /// A machine's name, or the folder that stands for the host.
    pub source: String,
    /// Every CPU, online or not.
    pub cpus: Vec<CpuRow>,
    /// Every cache, by index.
    pub caches: Vec<CacheRow>,
}

impl TopologyResult {
    /// The answer about a topology that came from `source`.
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

/// A level as people write it.
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

    /// Do the fields that scripts were promised stand at the top of the object, absent ones as null?
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
