//! What is known of a task, and what one predictor expects of it under a plan.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{CacheId, Estimate, Level, Observation, Plan, ProcessId, SuperSetCount, TaskId, Topology};

/// What is known of one task. Every part may be absent; a profiler fills in its own and leaves the rest.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Profile {
    /// Whose address space it runs in, so that shares of processes can be told from the profiles; set by the loop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessId>,
    /// Misses per thousand instructions by size, ascending sizes.
    pub misses_per_kilo_instr: Option<Vec<(u64, Estimate)>>,
    /// Stalled cycles per thousand instructions by size (CP-4).
    pub stalls_per_kilo_instr: Option<Vec<(u64, Estimate)>>,
    /// Fraction of accesses by reuse time, log-spaced buckets (upper bound in accesses, weight); None = cold.
    pub reuse_times: Option<Vec<(Option<u64>, f64)>>,
    /// LRU stack positions 1..=ways, then misses, per million instructions (SDC, Animal, Pain).
    pub stack_positions: Option<Vec<f64>>,
    pub llc_refs_per_mega_instr: Option<Estimate>,
    pub solo_instr_per_cycle: Option<Estimate>,
    /// Running averages under whatever it ran beside (DIO); not the task's own rates alone.
    #[serde(default)]
    pub observed_misses_per_kilo_instr: Option<Estimate>,
    /// Bytes read from memory, prefetched ones included.
    #[serde(default)]
    pub observed_read_bytes_per_kilo_instr: Option<Estimate>,
    #[serde(default)]
    pub observed_instr_per_cycle: Option<Estimate>,
    /// CASC: misses per 100 references on a partial cache.
    pub pcmr: Option<Estimate>,
    pub activity: Vec<(Level, Vec<SuperSetCount>)>,
    /// TC: shMap counters.
    pub sharing: Option<Vec<u8>>,
    /// The counters are of one filter for the whole machine (regions by physical line): comparable across processes.
    #[serde(default)]
    pub sharing_is_machine_wide: bool,
    pub remote_stall_share: Option<f64>,
    /// From outside, without a PMU.
    pub intensity: Option<Estimate>,
    pub sensitivity: Option<Estimate>,
    /// Raised by one at each phase change; evidence of older phases has been dropped.
    pub phase: u32,
}

pub type Profiles = BTreeMap<TaskId, Profile>;

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TaskForecast {
    /// Run time over run time alone, minus one.
    pub degradation: Option<Estimate>,
    pub misses_per_kilo_instr: Option<Estimate>,
    pub instr_per_cycle: Option<Estimate>,
    pub cpu_share: Option<Estimate>,
}

/// What one predictor expects, over the next full turn of all gangs.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Forecast {
    pub tasks: BTreeMap<TaskId, TaskForecast>,
    pub cache_miss_ratio: BTreeMap<CacheId, Estimate>,
    /// Without evidence for these, nothing is said about them.
    pub unknown: Vec<TaskId>,
}

/// Turns raw observations into profiles. Pure: same observations, same profiles.
pub trait Profiler {
    /// Fills in its own fields, creates tasks that arrived, removes those that are gone.
    fn update(&mut self, seen: &Observation, profiles: &mut Profiles);
}
/// Expects something of a plan before it is tried. Pure.
pub trait Predictor {
    fn forecast(&self, topology: &Topology, profiles: &Profiles, under: &Plan) -> Forecast;
}
