//! The counts at the start of the measured part, which are subtracted from the results.

use std::collections::BTreeMap;

use cachemate_core::TaskId;

use crate::hw::{CacheCounters, MemoryCounters, TaskCounters};
use crate::os::dispatch::Picks;

/// Counts of the machine at the start of the measured part.
#[derive(Clone, Default)]
pub(crate) struct Baseline {
    pub cycle: u64,
    pub tasks: Vec<TaskBaseline>,
    pub caches: Vec<CacheCounters>,
    pub memory: Vec<MemoryCounters>,
    pub evictions: Vec<BTreeMap<(TaskId, TaskId), u64>>,
    pub picks: Picks,
    pub page_copy_cycles: u64,
}

#[derive(Clone, Default)]
pub(crate) struct TaskBaseline {
    pub counters: TaskCounters,
    pub on_cpu_cycles: Vec<u64>,
    pub wait_cycles: u64,
    pub migrations: u64,
    pub progress: f64,
}

impl Baseline {
    pub fn instructions(&self) -> u64 {
        self.tasks
            .iter()
            .map(|task| task.counters.instructions)
            .sum()
    }
}
