//! Distributed Intensity (CA 4.1): even out the programs' own miss rates over the caches.
//!
//! Problem: bus, controller, prefetchers and space are all strained most where misses come together. Method: the miss
//! rate of each task alone, from its profile (its stack-distance profile or its miss-rate curve); sort, deal out so that
//! the sums per cache are even; or the same by exchanges between pairs of caches ([`crate::intensity_balancing`], [`crate::load_balance`]).
//!
//! The paper takes the rate alone on the whole cache. A program that just fits the cache then counts as quiet, although
//! it misses most and suffers most as soon as anybody shares it. By default the rate is the one on the part that each
//! has when all share the cache evenly; `recorded_on = "whole"` is the paper's. Where some profile does not tell of the part,
//! all are compared on the whole.
//!
//! Properties: tasks without a profile stay where they are; nothing moves while rates hold still; priorities count.

use std::collections::BTreeMap;

use cachemate_core::{CpuSet, Decision, Policy, TaskId, Topology, View};

use super::ParameterError;
use crate::intensity_balancing::{IntensityBalancer, Parameters, RecordedCache};
use crate::schemes::{SharedCache, misses_on_part_per_mega_instr};

struct Di(IntensityBalancer);

impl Policy for Di {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let rates = recorded_rates(view, self.0.parameters.recorded_on);
        self.0.decide(view, |task| rates.get(&task).copied())
    }
}

/// Misses per thousand instructions of the tasks alone, from their profiles, all on as large a part of the cache.
pub(super) fn recorded_rates(view: &View<'_>, on: RecordedCache) -> BTreeMap<TaskId, f64> {
    let Some(cache) = contended(view.topology) else { return BTreeMap::new() };
    let of = |parts: u32| -> BTreeMap<TaskId, f64> {
        let one = |task: TaskId| misses_on_part_per_mega_instr(view.profiles.get(&task)?, &cache, parts);
        let tasks = view.observation.tasks.iter().filter(|task| !task.exited).map(|task| task.task);
        tasks.filter_map(|task| Some((task, one(task)? / 1000.0))).collect()
    };
    let whole = of(1);
    let parts = if on == RecordedCache::Share { sharers(view) } else { 1 };
    let part = if parts > 1 { of(parts) } else { BTreeMap::new() };
    if part.len() == whole.len() { part } else { whole }
}

/// Tasks that run below one last-level cache at a time, when all are spread evenly.
fn sharers(view: &View<'_>) -> u32 {
    let online = |cpus: &CpuSet| view.topology.cpus.iter().filter(|cpu| cpu.online && cpus.contains(cpu.id.0)).count();
    let caches = || view.topology.last_level_caches();
    let cpus = caches().map(|cache| online(&cache.cpus)).max().unwrap_or(1);
    let tasks = view.observation.tasks.iter().filter(|task| !task.exited).count();
    tasks.div_ceil(caches().count().max(1)).min(cpus) as u32
}

/// The first last-level cache of known size: caches of one level are alike on every machine that we know of.
fn contended(topology: &Topology) -> Option<SharedCache> {
    let cache = topology.caches.iter().find(|cache| cache.last_level && cache.size_bytes.is_some())?;
    // Only its shape matters for a miss rate, not what a miss costs.
    Some(SharedCache::new(cache.size_bytes?, cache.ways.unwrap_or(16), cache.line_bytes.unwrap_or(64), 0.0))
}

/// See the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(Di(IntensityBalancer::new(Parameters::parse(parameters)?))))
}
