//! Places tasks on last-level caches, for policies that decide for each cache separately.
//!
//! A new task goes to the cache with the fewest tasks per CPU (the first one in a tie) and stays there. On a machine
//! with one cache, all tasks belong to it. Renaming tasks does not change the result.

use std::collections::BTreeMap;

use cachemate_core::{CacheId, CpuSet, TaskId, TaskSample, View};

/// A last-level cache with its online CPUs, and its tasks in order of arrival.
#[derive(Clone, Debug)]
pub struct LlcTasks<'a> {
    pub cache: CacheId,
    pub cpus: CpuSet,
    pub size_bytes: Option<u64>,
    pub line_bytes: Option<u32>,
    pub tasks: Vec<&'a TaskSample>,
}

/// A placement that keeps each task on its cache.
#[derive(Clone, Debug, Default)]
pub struct StickyPlacement {
    home_caches: BTreeMap<TaskId, CacheId>,
}

impl StickyPlacement {
    /// Assigns the movable tasks of this window to the caches that have online CPUs, and returns these caches with
    /// their tasks.
    pub fn place_tasks_by_cache<'a>(&mut self, view: &'a View<'_>) -> Vec<LlcTasks<'a>> {
        let online = view.topology.online();
        let last_level_caches = view.topology.last_level_caches();
        let mut domains: Vec<LlcTasks<'a>> = last_level_caches
            .map(|cache| LlcTasks {
                cache: cache.id,
                cpus: cache.cpus.intersection(&online),
                size_bytes: cache.size_bytes,
                line_bytes: cache.line_bytes,
                tasks: Vec::new(),
            })
            .filter(|domain| !domain.cpus.is_empty())
            .collect();
        if domains.is_empty() {
            return domains;
        }

        let mut task_counts = vec![0u32; domains.len()];
        let previous_cache = |task: TaskId| self.home_caches.get(&task).copied();
        let position_of_cache =
            |cache: CacheId| domains.iter().position(|domain| domain.cache == cache);
        let mut cache_positions: Vec<Option<usize>> = view
            .movable_tasks()
            .map(|task| previous_cache(task.task).and_then(position_of_cache))
            .collect();
        cache_positions
            .iter()
            .flatten()
            .for_each(|&cache_position| task_counts[cache_position] += 1);

        // CPUs are counted only once, because a thousand new tasks each consider every cache.
        let cpu_counts: Vec<f64> = domains
            .iter()
            .map(|domain| f64::from(domain.cpus.count()))
            .collect();
        for cache_position in cache_positions
            .iter_mut()
            .filter(|position| position.is_none())
        {
            let tasks_per_cpu = |domain: usize| f64::from(task_counts[domain]) / cpu_counts[domain];
            let emptiest_domain = (0..domains.len())
                .min_by(|&a, &b| tasks_per_cpu(a).total_cmp(&tasks_per_cpu(b)))
                .unwrap_or(0);
            task_counts[emptiest_domain] += 1;
            *cache_position = Some(emptiest_domain);
        }

        self.home_caches.clear();
        for (task, position) in view.movable_tasks().zip(cache_positions) {
            let Some(cache_position) = position else {
                continue;
            };
            self.home_caches
                .insert(task.task, domains[cache_position].cache);
            domains[cache_position].tasks.push(task);
        }
        domains
    }
}
