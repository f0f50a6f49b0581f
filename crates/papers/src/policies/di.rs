//! Distributed Intensity (CA 4.1), which balances the solo miss rates of programs over the caches.
//!
//! Problem: contention for the bus, the memory controller, the prefetchers and cache space is worst if misses are
//! concentrated on one cache. Method: the solo miss rate of each task comes from its stack-distance profile or its
//! miss-rate curve. Tasks are sorted and distributed so that the sums per cache are even, or exchanged between pairs of
//! caches to the same end ([`crate::intensity_balancing`], [`crate::load_balance`]).
//!
//! The paper uses the rate alone on the whole cache. A program that just fits the cache then counts as quiet, although
//! its misses increase most as soon as it shares the cache. By default, the rate on an even share of the cache is
//! therefore used; `recorded_on = "whole"` selects the paper's. If the profile of any task has no rate for the share,
//! all tasks are compared on the whole cache.
//!
//! Properties: tasks without a profile stay in place. No task moves while the rates are unchanged, once the rounds
//! of the distributed form have ended. Priorities count.

use std::collections::BTreeMap;

use cachemate_core::{CpuSet, Decision, Policy, TaskId, Topology, View};

use super::ParameterError;
use crate::intensity_balancing::{IntensityBalancer, Parameters, RecordedCache};
use crate::schemes::{SharedCache, misses_on_share_per_mega_instr};

struct Di(IntensityBalancer);

impl Policy for Di {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let rates = recorded_rates(view, self.0.parameters.recorded_on);
        self.0.decide(view, |task| rates.get(&task).copied())
    }
}

/// The solo misses per thousand instructions of each task, from its profile, all for the same size of cache.
pub(super) fn recorded_rates(
    view: &View<'_>,
    recorded_cache: RecordedCache,
) -> BTreeMap<TaskId, f64> {
    let Some(cache) = first_sized_cache(view.topology) else {
        return BTreeMap::new();
    };
    let rates_on_share_of = |share_count: u32| -> BTreeMap<TaskId, f64> {
        let intensity_of = |task: TaskId| {
            misses_on_share_per_mega_instr(view.profiles.get(&task)?, &cache, share_count)
        };
        let tasks = view
            .observation
            .tasks
            .iter()
            .filter(|task| !task.exited)
            .map(|task| task.task);
        tasks
            .filter_map(|task| Some((task, intensity_of(task)? / 1000.0)))
            .collect()
    };
    let rates_on_whole = rates_on_share_of(1);

    let sharer_count = if recorded_cache == RecordedCache::Share {
        tasks_per_cache(view)
    } else {
        1
    };
    let rates_on_share = if sharer_count > 1 {
        rates_on_share_of(sharer_count)
    } else {
        BTreeMap::new()
    };
    if rates_on_share.len() == rates_on_whole.len() {
        rates_on_share
    } else {
        rates_on_whole
    }
}

/// The number of tasks that run below one last-level cache at a time, if all tasks are spread evenly.
fn tasks_per_cache(view: &View<'_>) -> u32 {
    let count_online = |cpus: &CpuSet| {
        view.topology
            .cpus
            .iter()
            .filter(|cpu| cpu.online && cpus.contains(cpu.id.0))
            .count()
    };
    let caches = || view.topology.last_level_caches();
    let max_cpu_count = caches()
        .map(|cache| count_online(&cache.cpus))
        .max()
        .unwrap_or(1);

    let task_count = view
        .observation
        .tasks
        .iter()
        .filter(|task| !task.exited)
        .count();
    task_count
        .div_ceil(caches().count().max(1))
        .min(max_cpu_count) as u32
}

/// The first last-level cache of known size. Where last-level caches differ (hybrid processors, stacked cache on one of
/// two dies), rates are of this one.
fn first_sized_cache(topology: &Topology) -> Option<SharedCache> {
    let cache = topology
        .caches
        .iter()
        .find(|cache| cache.last_level && cache.size_bytes.is_some())?;
    // The cost of a miss is 0, because a miss rate depends on the geometry only.
    Some(SharedCache::new(
        cache.size_bytes?,
        cache.ways.unwrap_or(16),
        cache.line_bytes.unwrap_or(64),
        0.0,
    ))
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(Di(IntensityBalancer::new(Parameters::parse(
        parameters,
    )?))))
}
