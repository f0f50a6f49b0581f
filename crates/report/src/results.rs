//! Results of the commands as data: the JSON objects that scripts read, and the source of tables
//! and pages.
//!
//! A table and a JSON object that are made separately drift apart. So a command makes one of these
//! values, `--json` prints it, and the table is drawn from it. Field names are stable
//! (docs/json.md, verified by a test of the command): fields are added, but never renamed.
//!
//! For example, `mpki: null` in JSON is a dash in the table and no point in the figure: a missing
//! value is `null`, never zero, in every form.

use cachemate_core::{CacheLevel, Estimate, Topology};
use serde::Serialize;

use crate::text::format_fixed;

/// One point of a miss-rate curve.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CurvePoint {
    /// Size of a fully associative cache.
    pub bytes: u64,
    /// Misses divided by accesses.
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
    /// Data accesses of the program before filtering; `None` if the file does not contain this count.
    pub program_accesses: Option<u64>,
    /// Instructions in the recorded window; `None` if the file does not contain this count.
    pub instructions: Option<u64>,
    /// First accesses to a line; `None` for a sampled curve, which does not follow every line.
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
    /// Largest `miss_ratio_error` of the curve; `None` if a point has no error.
    pub error: Option<f64>,
}

/// The curve of a recording in bursts.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct BurstSummary {
    /// Bursts with records.
    pub count: usize,
    /// Largest size with an estimate: that of the lines that one burst touched.
    pub reach_bytes: u64,
    /// Largest `miss_ratio_error` of the curve; `None` if there are too few bursts.
    pub error: Option<f64>,
}

/// One part of a recording that `--by` splits.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MrcPart {
    /// The process, by its number in the recording; `None` for all processes.
    pub process: Option<u32>,
    /// The thread, by its number in the recording; `None` for all threads of the process.
    pub thread: Option<u32>,
    /// Counts of this part, simulated with a separate cache.
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
    /// Counts of all processes and threads together.
    #[serde(flatten)]
    pub all: CurveCounts,
    /// The sampling of the curve; `None` if every access was followed.
    pub sampled: Option<SamplingSummary>,
    /// The bursts of the recording; `None` if it has no gaps.
    pub bursts: Option<BurstSummary>,
    /// Parts with `--by process` or `--by thread`, ascending; empty otherwise.
    pub parts: Vec<MrcPart>,
}

/// `cachemate mrc --ways --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CachesimResult {
    /// The recording, as given.
    pub file: String,
    /// Lines per set.
    pub ways: u32,
    /// Line size in bytes.
    pub line_bytes: u32,
    /// `lru`, `plru` or `random`.
    pub replacement: String,
    /// Records in the file. With `--l1`, this includes the records that hit the L1 and never reach a simulated cache.
    pub accesses: u64,
    /// With `--l1`: misses of the L1 in front of the simulated caches.
    pub l1_misses: Option<u64>,
    /// The simulated caches, in the order of the sizes given.
    pub caches: Vec<SimulatedCache>,
}

/// Misses of one simulated cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SimulatedCache {
    /// Size of the cache.
    pub bytes: u64,
    /// Misses of the cache.
    pub misses: u64,
    /// Misses divided by accesses; `None` without accesses.
    pub miss_ratio: Option<f64>,
    /// Misses per thousand instructions; `None` if the file has no instruction counts.
    pub mpki: Option<f64>,
}

/// Summary of one program for predictions and plans.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ProgramSummary {
    /// Name of the program, from its profile or recording.
    pub name: String,
    /// The recorded command.
    pub command: Option<String>,
    /// Animal class: turtle, sheep, rabbit, devil.
    pub class: Option<String>,
    /// Instructions executed during the recording; `None` if unknown.
    pub instructions: Option<u64>,
    /// Accesses that reach the shared cache, per thousand instructions; `None` if unknown.
    pub accesses_per_kilo_instr: Option<f64>,
    /// Misses per thousand instructions when the program has the whole cache to itself.
    pub solo_mpki: Option<f64>,
    /// Misses per thousand instructions when the program runs alone with half of the ways.
    pub half_cache_mpki: Option<f64>,
    /// Share of the program's hits that it loses with half of the ways; measures its sensitivity.
    pub lost_hits_share: Option<f64>,
}

/// The contended cache of a machine.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct CacheSummary {
    /// Level, such as `L2` or `L3`.
    pub level: String,
    /// Total size of all slices of one cache.
    pub size_bytes: u64,
    /// Lines per set.
    pub ways: u32,
    /// Line size in bytes.
    pub line_bytes: u32,
    /// Number of such caches in the machine.
    pub instances: u32,
    /// Number of CPUs that share one such cache.
    pub cpus_each: u32,
}

/// Slowdown in percent from which bars and cells have the color of a high loss.
pub const HIGH_PERCENT: f64 = 20.0;

/// Pairwise costs: how much the column's program slows down the row's program.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct CostTable {
    /// The model that predicts the costs.
    pub model: String,
    /// Unit of the costs: `percent` of the solo run time, or `weight`, which has no unit.
    pub unit: String,
    /// Names of the programs, in the order of rows and of columns.
    pub names: Vec<String>,
    /// `values[row][column]`: slowdown of the row's program beside the column's; `None` if unknown.
    pub values: Vec<Vec<Option<f64>>>,
    /// Lower ends of the 90 % intervals, by row and column; `None` if the model has no intervals.
    pub low: Option<Vec<Vec<Option<f64>>>>,
    /// Upper ends of the 90 % intervals, by row and column; `None` if the model has no intervals.
    pub high: Option<Vec<Vec<Option<f64>>>>,
}

/// An interval in percent.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct PercentRange {
    /// Lower end.
    pub low_percent: f64,
    /// Upper end.
    pub high_percent: f64,
}

impl PercentRange {
    /// A range in whole percent, such as `11 to 50 %`.
    pub fn describe(self) -> String {
        format!(
            "{} to {} %",
            format_fixed(self.low_percent, 0),
            format_fixed(self.high_percent, 0)
        )
    }
}

impl From<Estimate> for PercentRange {
    fn from(estimate: Estimate) -> Self {
        PercentRange {
            low_percent: 100.0 * estimate.low,
            high_percent: 100.0 * estimate.high,
        }
    }
}

/// Forecast for one member of a group of programs on one cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroupMember {
    /// Name, as in [`ProgramSummary::name`].
    pub name: String,
    /// Misses per thousand instructions, alone on the cache; `None` if unknown.
    pub solo_mpki: Option<f64>,
    /// Cycles per instruction, alone on the machine; `None` if the scheme does not predict it.
    pub solo_cycles_per_instr: Option<f64>,
    /// Misses divided by accesses beside the other members; `None` if the scheme does not predict it.
    pub miss_ratio: Option<f64>,
    /// Misses per thousand instructions beside the other members; `None` if the scheme does not predict it.
    pub mpki: Option<f64>,
    /// Run time that the member gains beside the others, in percent of its solo run time.
    pub slowdown_percent: Option<f64>,
    /// The 90 % interval of the slowdown; `None` if the model has none.
    pub slowdown_interval: Option<PercentRange>,
}

/// Forecast for all programs together on one cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroupForecast {
    /// The scheme that computes the figures.
    pub method: String,
    /// Misses divided by accesses of all members together; `None` if the scheme does not predict it.
    pub miss_ratio: Option<f64>,
    /// Members in the order of the programs.
    pub members: Vec<GroupMember>,
}

/// `cachemate predict --json`.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct PredictResult {
    /// The machine of the prediction.
    pub machine: String,
    /// The machine's contended cache.
    pub cache: CacheSummary,
    /// Programs in the order given.
    pub programs: Vec<ProgramSummary>,
    /// Pairwise slowdowns.
    pub matrix: CostTable,
    /// Source of each program's cycles and overlap of misses; `None` if the model uses neither.
    pub timing: Option<Vec<String>>,
    /// Forecast for all programs together; `None` if there are fewer than two programs, or the evidence does not
    /// suffice.
    pub group: Option<GroupForecast>,
}

/// One program in a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PlacementRow {
    /// Name, as in [`ProgramSummary::name`].
    pub name: String,
    /// The program's CPU; programs on the same CPU take turns.
    pub cpu: Option<u32>,
    /// Expected slowdown, in the unit of the scheme; `None` if it is unknown.
    pub slowdown: Option<f64>,
    /// The 90 % interval of the slowdown; `None` if the model has none.
    pub interval: Option<PercentRange>,
    /// Reason for the placement, as text.
    pub reason: String,
}

/// One cache in a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheAssignment {
    /// Name of the cache, such as `L2 #0`.
    pub cache: String,
    /// CPUs of the cache, in the kernel's list form.
    pub cpus: String,
    /// Programs on the CPUs of the cache.
    pub programs: Vec<PlacementRow>,
}

impl PlanResult {
    /// What [`PlanResult::expected`] measures.
    pub fn measure(&self) -> &'static str {
        match (self.unit.as_str(), self.covers_machine) {
            ("percent", true) => "mean slowdown with all caches at work",
            ("percent", false) => "mean slowdown within caches",
            _ => "expected mean weight",
        }
    }
}

/// Mean expected cost per program, for the plan and its alternatives.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Alternatives {
    /// Mean for this plan; `None` if unknown.
    pub plan: Option<f64>,
    /// Mean for the best assignment that was found; `None` if unknown.
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
    /// The model on which the plan is based.
    pub model: String,
    /// Unit of the numbers below: `percent` or `weight`.
    pub unit: String,
    /// Whether the numbers are forecasts of all programs at once on the whole machine. Otherwise, they add up pairs on
    /// one cache.
    pub covers_machine: bool,
    /// Solver that found the plan: `matching`, `dynamic-programming`, ...
    pub solver: String,
    /// Whether the plan is proved optimal under this scheme.
    pub optimal: bool,
    /// Upper bound of the distance from the optimum, if the plan is not proved optimal.
    pub gap: Option<f64>,
    /// The caches, each with the programs on its CPUs.
    pub caches: Vec<CacheAssignment>,
    /// Expected costs of this plan and its alternatives.
    pub expected: Alternatives,
}

/// One CPU in `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CpuRow {
    /// Number of the CPU in the operating system.
    pub cpu: u32,
    /// Number of the CPU's core, counted from 0 over the whole machine.
    pub core: u32,
    /// Number of the CPU's chip or socket, counted from 0.
    pub package: u32,
    /// Nearest memory node of the CPU.
    pub memory_node: u32,
    /// Whether the CPU is online.
    pub online: bool,
}

/// One cache in `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheRow {
    /// Index of the cache within the machine; differs from the kernel's id.
    pub cache: u32,
    /// Level: `L1d`, `L1i`, `L2`, ...
    pub level: String,
    /// CPUs that share the cache, in the kernel's list form.
    pub cpus: String,
    /// Size of all slices together; `None` if the machine does not report it.
    pub size_bytes: Option<u64>,
    /// Lines per set; `None` if the machine does not report it.
    pub ways: Option<u32>,
    /// Line size in bytes; `None` if the machine does not report it.
    pub line_bytes: Option<u32>,
    /// Whether the cache is a contended one, at the last level.
    pub last_level: bool,
}

/// `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TopologyResult {
    /// Name of a machine, or the directory from which the host was read.
    pub source: String,
    /// Every CPU, online or not.
    pub cpus: Vec<CpuRow>,
    /// Every cache, by index.
    pub caches: Vec<CacheRow>,
}

impl TopologyResult {
    /// `source` says where the topology is from.
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
            level: level_name(cache.level).to_string(),
            cpus: cache.cpus.to_string(),
            size_bytes: cache.size_bytes,
            ways: cache.ways,
            line_bytes: cache.line_bytes,
            last_level: cache.last_level,
        });

        TopologyResult {
            source: source.to_string(),
            cpus: cpus.collect(),
            caches: caches.collect(),
        }
    }
}

/// `L1i`, `L1d`, `L2`: the spelling of output.
pub fn level_name(level: CacheLevel) -> &'static str {
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
    fn promised_fields_are_at_the_top_level() {
        let point = CurvePoint {
            bytes: 65536,
            miss_ratio: 0.25,
            mpki: None,
            miss_ratio_error: None,
        };
        let counts = CurveCounts {
            accesses: 4,
            program_accesses: None,
            instructions: None,
            cold: Some(1),
            curve: vec![point],
        };
        let result = MrcResult {
            file: "t.u64".into(),
            line_bytes: 64,
            all: counts,
            sampled: None,
            bursts: None,
            parts: vec![],
        };

        let want = expect_test::expect![[
            r#"{"file":"t.u64","line_bytes":64,"accesses":4,"program_accesses":null,"instructions":null,"cold":1,"curve":[{"bytes":65536,"miss_ratio":0.25,"mpki":null,"miss_ratio_error":null}],"sampled":null,"bursts":null,"parts":[]}"#
        ]];
        want.assert_eq(&serde_json::to_string(&result).unwrap());
    }
}
