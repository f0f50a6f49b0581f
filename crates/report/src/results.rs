//! What the commands answer, as data: the JSON objects that scripts rely on, and what tables and pages are made from.
//!
//! Field names are a promise (docs/json.md, kept by a test of the command): they are added to, never renamed. Absent is
//! `null`, never zero.

use cachemate_core::{Level, Topology};
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

/// What was counted over one stream of accesses (all of them, one process, one thread).
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Counted {
    /// Records in the file.
    pub accesses: u64,
    /// Data accesses the program did, before any filter; `None` where the file does not say.
    pub program_accesses: Option<u64>,
    pub instructions: Option<u64>,
    /// First touches of a line; `None` from a sample, which does not see them all.
    pub cold: Option<u64>,
    pub curve: Vec<CurvePoint>,
}

/// How a sampled curve was made.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Sampled {
    /// Share of the lines that were followed.
    pub rate: f64,
    /// Accesses that were followed.
    pub accesses: u64,
    /// Distinct lines that were followed.
    pub lines: u64,
    /// Largest `miss_ratio_error` of the curve; `None` where a point has none.
    pub error: Option<f64>,
}

/// One part of a recording with `--per`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MrcPart {
    pub process: Option<u32>,
    pub thread: Option<u32>,
    #[serde(flatten)]
    pub counted: Counted,
}

/// `cachemate mrc --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MrcResult {
    pub file: String,
    pub line_bytes: u32,
    #[serde(flatten)]
    pub all: Counted,
    pub sampled: Option<Sampled>,
    /// Parts with `--per process` or `--per thread`, ascending; empty otherwise.
    pub parts: Vec<MrcPart>,
}

/// `cachemate cachesim --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CachesimResult {
    pub file: String,
    pub size_bytes: u64,
    pub ways: u32,
    pub line_bytes: u32,
    pub policy: String,
    pub accesses: u64,
    pub misses: u64,
    pub miss_ratio: Option<f64>,
    pub mpki: Option<f64>,
    /// Misses of the L1 in front, with `--l1`.
    pub l1_misses: Option<u64>,
}

/// One program as predictions and plans see it.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ProgramSummary {
    pub name: String,
    /// What was run.
    pub command: Option<String>,
    /// Animal class: turtle, sheep, rabbit, devil.
    pub class: Option<String>,
    pub instructions: Option<u64>,
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
    pub level: String,
    pub size_bytes: u64,
    pub ways: u32,
    pub line_bytes: u32,
    /// Number of such caches in the machine, and CPUs on each.
    pub instances: u32,
    pub cpus_each: u32,
}

/// Who hurts whom: row suffers from column.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Matrix {
    pub scheme: String,
    /// `percent` of the solo run time lost, or a `weight` without a unit.
    pub unit: String,
    pub names: Vec<String>,
    pub values: Vec<Vec<Option<f64>>>,
}

/// What a group does to one of its members.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct GroupMember {
    pub name: String,
    pub solo_mpki: Option<f64>,
    pub miss_ratio: Option<f64>,
    pub mpki: Option<f64>,
    /// Share of its solo run time that it loses.
    pub suffers_percent: Option<f64>,
}

/// All programs together on one cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Group {
    pub method: String,
    pub miss_ratio: Option<f64>,
    pub members: Vec<GroupMember>,
}

/// `cachemate predict --json`.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct PredictResult {
    pub machine: String,
    pub cache: CacheSummary,
    pub programs: Vec<ProgramSummary>,
    pub matrix: Matrix,
    pub group: Option<Group>,
}

/// One program in a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Placed {
    pub name: String,
    /// Where it runs; programs on the same CPU take turns.
    pub cpu: Option<u32>,
    /// Expected, as the scheme measures it; `None` = nothing is known.
    pub suffers: Option<f64>,
    /// The reason in plain words.
    pub why: String,
}

/// One cache in a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheAssigned {
    /// As `L2 #0`.
    pub cache: String,
    /// Kernel's list form.
    pub cpus: String,
    pub programs: Vec<Placed>,
}

/// Mean of what the programs are expected to suffer, in the plan and in what else could have been done.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Alternatives {
    pub plan: Option<f64>,
    pub best: Option<f64>,
    pub worst: Option<f64>,
    pub random: Option<f64>,
}

/// A plan as pictures and pages show it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PlanResult {
    pub machine: String,
    pub scheme: String,
    /// `percent` or `weight`: what the numbers below are.
    pub unit: String,
    /// `matching`, `dynamic-programming`, ...: how the plan was found.
    pub solver: String,
    /// `true` = no assignment is better by this scheme.
    pub optimal: bool,
    /// How far from the best it can be at most, where not known to be the best.
    pub gap: Option<f64>,
    pub caches: Vec<CacheAssigned>,
    pub expected: Alternatives,
}

/// One CPU in `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CpuLine {
    pub cpu: u32,
    pub core: u32,
    pub package: u32,
    pub memory_node: u32,
    pub online: bool,
}

/// One cache in `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CacheLine {
    /// Index within the machine; not the kernel's id.
    pub cache: u32,
    /// `L1d`, `L1i`, `L2`, ...
    pub level: String,
    /// Kernel's list form.
    pub cpus: String,
    pub size_bytes: Option<u64>,
    pub ways: Option<u32>,
    pub line_bytes: Option<u32>,
    /// The contended one.
    pub last_level: bool,
}

/// `cachemate topology --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TopologyResult {
    /// A machine's name, or the folder that stands for the host.
    pub source: String,
    pub cpus: Vec<CpuLine>,
    pub caches: Vec<CacheLine>,
}

impl TopologyResult {
    pub fn new(source: &str, topology: &Topology) -> Self {
        let cpus = topology.cpus.iter().map(|cpu| CpuLine {
            cpu: cpu.id.0,
            core: cpu.core,
            package: cpu.package,
            memory_node: cpu.memory_node,
            online: cpu.online,
        });
        let caches = topology.caches.iter().map(|cache| CacheLine {
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
pub fn level_text(level: Level) -> &'static str {
    match level {
        Level::L1Instruction => "L1i",
        Level::L1Data => "L1d",
        Level::L2 => "L2",
        Level::L3 => "L3",
        Level::L4 => "L4",
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
            Counted { accesses: 4, program_accesses: None, instructions: None, cold: Some(1), curve: vec![point] };
        let result = MrcResult { file: "t.u64".into(), line_bytes: 64, all, sampled: None, parts: vec![] };
        let want = expect_test::expect![[
            r#"{"file":"t.u64","line_bytes":64,"accesses":4,"program_accesses":null,"instructions":null,"cold":1,"curve":[{"bytes":65536,"miss_ratio":0.25,"mpki":null,"miss_ratio_error":null}],"sampled":null,"parts":[]}"#
        ]];
        want.assert_eq(&serde_json::to_string(&result).unwrap());
    }
}
