//! Linux's cache-aware scheduling (`SCHED_CACHE`, since 7.2), as the baseline that a host's kernel provides.
//!
//! Problem: threads of a process share data, but the kernel's balancer spreads them over caches. Method, after the
//! kernel's published rules: the run time of a process on each last-level cache is counted with a half-life of one
//! epoch. The cache with the most run time is preferred, and another one replaces it only with more than twice as much.
//! Threads are gathered on the preferred cache unless that would overload it. A process is not gathered if it has one
//! thread, runs more threads than the cache has cores, or touches more memory than fits the cache.
//!
//! Properties: no counter is needed. Here, gathering sets an affinity, whereas the kernel's balancer only prefers a
//! cache; a thread that the rule excludes is unrestricted. The footprint is the resident memory. It counts only if
//! there are two memory nodes, because the kernel derives it from the faults of NUMA balancing.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    Cache, CacheId, CpuSet, Decision, Plan, Policy, ProcessId, Reason, TaskSample, Topology, View,
    WindowLength,
};
use serde::Deserialize;

use super::{ParameterError, ParameterRange};

const PAGE_BYTES: u64 = 4096;

/// Parameters of `linux-sched-cache`, read from TOML, with the names and defaults of the kernel's
/// `sched/llc_balancing`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    /// Length of a window, after which threads are examined again, in nanoseconds.
    pub window_ns: u64,
    /// Length of an epoch, after which run time counts half, in nanoseconds.
    pub epoch_period_ns: u64,
    /// Number of epochs without running after which a process has no preference.
    pub epoch_affinity_timeout: u64,
    /// Tolerance for aggregation: 0 gathers no thread, 1 requires that threads and footprint fit, 100 ignores both.
    pub aggr_tolerance: u32,
    /// Percentage of busy CPU time from which on a cache is full.
    pub overaggr_pct: u32,
    /// Maximum percentage by which a full cache may be busier than the present one for a thread to move there.
    pub imb_pct: u32,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 100_000_000,
            epoch_period_ns: 10_000_000,
            epoch_affinity_timeout: 5,
            aggr_tolerance: 1,
            overaggr_pct: 50,
            imb_pct: 20,
        }
    }
}

impl Parameters {
    /// The factor of a limit; `None` if there is no limit (`get_sched_cache_scale` of kernel/sched/fair.c).
    fn limit_factor(&self, step: f64) -> Option<f64> {
        match self.aggr_tolerance {
            0 => Some(0.0),
            100.. => None,
            tolerance => Some(1.0 + f64::from(tolerance - 1) * step),
        }
    }
}

/// Decayed run times of one process.
#[derive(Default)]
struct ProcessUse {
    /// Fraction of one CPU's time on each cache, decayed.
    cpu_share_by_cache: BTreeMap<CacheId, f64>,
    /// Mean number of threads that ran or waited, decayed in the same way.
    mean_runnable: f64,
    preferred_cache: Option<CacheId>,
    ran_until_ns: u64,
}

struct SchedCachePolicy {
    parameters: Parameters,
    processes: BTreeMap<ProcessId, ProcessUse>,
    /// End of the last observed window; `None` before the first.
    observed_until_ns: Option<u64>,
}

/// The threads of one process in this window.
struct ProcessThreads<'a> {
    id: ProcessId,
    tasks: Vec<&'a TaskSample>,
}

impl Policy for SchedCachePolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        let caches: Vec<&Cache> = view.topology.last_level_caches().collect();
        let processes = movable_processes(view);
        self.observe(view, &processes, &caches);
        if caches.len() < 2 {
            return Decision::new(plan, reasons);
        }

        let mut cache_loads = CacheLoads::new(view, &caches);
        for process in &processes {
            let Some(cache) = self.target_cache(process, view.topology, &caches) else {
                continue;
            };
            let cache_cpus = online_cpus(view.topology, cache);
            for task in &process.tasks {
                if cache_loads.try_admit(&self.parameters, task, cache.id) {
                    plan.affinity.insert(task.task, cache_cpus.clone());
                }
            }
            reasons.extend(explain_gathering(process, cache, &plan, view.previous_plan));
        }
        Decision::new(plan, reasons)
    }
}

/// A reason if the threads of a process are now gathered on another cache.
fn explain_gathering(
    process: &ProcessThreads<'_>,
    cache: &Cache,
    plan: &Plan,
    previous_plan: &Plan,
) -> Option<Reason> {
    let is_moved = |task: &&&TaskSample| {
        plan.affinity.get(&task.task) != previous_plan.affinity.get(&task.task)
    };
    let tasks: Vec<_> = process
        .tasks
        .iter()
        .filter(is_moved)
        .map(|task| task.task)
        .collect();
    let text = format!(
        "{{}} gathered on cache {}, where the process ran most",
        cache.id.0
    );
    (!tasks.is_empty()).then_some(Reason::new(tasks, text, Vec::new()))
}

impl SchedCachePolicy {
    /// Adds the run times of the window, and updates the preference of each process. A window that is observed twice
    /// counts once.
    fn observe(&mut self, view: &View<'_>, processes: &[ProcessThreads<'_>], caches: &[&Cache]) {
        let span = &view.observation.span;
        let now_ns = span.end_ns();
        if span.elapsed_ns == 0
            || self
                .observed_until_ns
                .is_some_and(|observed_ns| now_ns <= observed_ns)
        {
            return;
        }

        self.observed_until_ns = Some(now_ns);
        let epochs = span.elapsed_ns as f64 / self.parameters.epoch_period_ns as f64;
        let decay = libm::exp2(-epochs);
        let live_processes: BTreeSet<ProcessId> =
            processes.iter().map(|process| process.id).collect();
        self.processes.retain(|id, _| live_processes.contains(id));

        for process in processes {
            let state = self.processes.entry(process.id).or_default();
            let share_of_window = |ns: u64| ns as f64 / span.elapsed_ns as f64;
            for cache in caches {
                let run_ns: u64 = process
                    .tasks
                    .iter()
                    .map(|task| task.ran_on_ns(&cache.cpus))
                    .sum();
                let occupancy = state.cpu_share_by_cache.entry(cache.id).or_default();
                *occupancy = *occupancy * decay + share_of_window(run_ns) * (1.0 - decay);
            }
            let run_ns: u64 = process.tasks.iter().map(|task| task.ran_ns()).sum();
            let waited_ns: u64 = process
                .tasks
                .iter()
                .filter_map(|task| task.run_queue_wait_ns)
                .sum();
            state.mean_runnable =
                state.mean_runnable * decay + share_of_window(run_ns + waited_ns) * (1.0 - decay);
            state.update_preference(
                run_ns > 0,
                now_ns,
                self.parameters.epoch_affinity_timeout * self.parameters.epoch_period_ns,
            );
        }
    }

    /// The cache on which a process is gathered; `None` if its threads are unrestricted.
    fn target_cache<'a>(
        &self,
        process: &ProcessThreads<'_>,
        topology: &Topology,
        caches: &[&'a Cache],
    ) -> Option<&'a Cache> {
        let state = self.processes.get(&process.id)?;
        let cache = caches
            .iter()
            .copied()
            .find(|cache| Some(cache.id) == state.preferred_cache)?;
        let is_fitting = |needed_bytes: f64, room: f64, step: f64| {
            self.parameters
                .limit_factor(step)
                .is_none_or(|scale| needed_bytes <= room * scale)
        };

        let threads = state.mean_runnable * threads_per_core(topology);
        let footprint = footprint_bytes(process, topology).zip(cache.size_bytes);
        let is_unrestricted = process.tasks.len() < 2
            || !is_fitting(threads, online_cpus(topology, cache).count() as f64, 1.0)
            || footprint.is_some_and(|(bytes, room)| !is_fitting(bytes as f64, room as f64, 256.0));
        (!is_unrestricted).then_some(cache)
    }
}

impl ProcessUse {
    fn update_preference(&mut self, has_run: bool, now_ns: u64, timeout_ns: u64) {
        if has_run {
            self.ran_until_ns = now_ns;
        } else if now_ns.saturating_sub(self.ran_until_ns) > timeout_ns {
            self.preferred_cache = None;
            return;
        }
        // Among equal caches, the first one wins.
        let largest_share = self.cpu_share_by_cache.iter().fold(
            None,
            |largest_share: Option<(CacheId, f64)>, (&cache, &share)| match largest_share {
                Some((_, best)) if share <= best => largest_share,
                _ => Some((cache, share)),
            },
        );
        let Some((cache, share)) = largest_share.filter(|(_, share)| *share > 0.0) else {
            return;
        };
        let preferred_share = self
            .preferred_cache
            .and_then(|preferred| self.cpu_share_by_cache.get(&preferred));
        if preferred_share.is_none_or(|current| share > 2.0 * current) {
            self.preferred_cache = Some(cache);
        }
    }
}

/// The used CPU time of each cache in CPUs, updated as threads are admitted one by one.
struct CacheLoads {
    used_cpus: BTreeMap<CacheId, f64>,
    cpu_counts: BTreeMap<CacheId, f64>,
    /// Length of the window, in nanoseconds.
    elapsed_ns: f64,
    caches: Vec<Cache>,
}

impl CacheLoads {
    fn new(view: &View<'_>, caches: &[&Cache]) -> Self {
        let elapsed_ns = view.observation.span.elapsed_ns.max(1) as f64;
        let run_ns = |cache: &Cache| {
            view.observation
                .tasks
                .iter()
                .map(|task| task.ran_on_ns(&cache.cpus))
                .sum::<u64>() as f64
        };
        let used_cpus = caches
            .iter()
            .map(|cache| (cache.id, run_ns(cache) / elapsed_ns))
            .collect();

        let cpu_counts = caches
            .iter()
            .map(|cache| (cache.id, online_cpus(view.topology, cache).count() as f64))
            .collect();
        CacheLoads {
            used_cpus,
            cpu_counts,
            elapsed_ns,
            caches: caches.iter().map(|&cache| cache.clone()).collect(),
        }
    }

    /// Whether the thread may move to this cache; if so, its load counts there from now on (`can_migrate_llc` of
    /// kernel/sched/fair.c).
    fn try_admit(&mut self, parameters: &Parameters, task: &TaskSample, target: CacheId) -> bool {
        let run_ns = |cache: &Cache| task.ran_on_ns(&cache.cpus);
        let Some(source) = self
            .caches
            .iter()
            .max_by_key(|cache| (run_ns(cache), cache.id == target))
            .map(|cache| cache.id)
        else {
            return false;
        };
        if source == target {
            return true;
        }

        let share = task.ran_ns() as f64 / self.elapsed_ns;
        let load_share = |cache: CacheId, used: f64| used / self.cpu_counts[&cache].max(1.0);
        let is_full = |cache: CacheId, load: f64| {
            load_share(cache, load) * 100.0 >= f64::from(parameters.overaggr_pct)
        };
        let (target_load, source_load) = (self.used_cpus[&target], self.used_cpus[&source]);
        // If both caches are full, the balancer's usual rules apply.
        if is_full(target, target_load) && is_full(source, source_load) {
            return false;
        }

        let (target_load, source_load) = (target_load + share, (source_load - share).max(0.0));
        let is_target_busier = load_share(target, target_load) * 100.0
            > load_share(source, source_load) * f64::from(100 + parameters.imb_pct);
        if is_full(target, target_load) && is_target_busier {
            return false;
        }
        self.used_cpus.insert(target, target_load);
        self.used_cpus.insert(source, source_load);
        true
    }
}

/// The threads that may be moved, by process and in order of arrival.
fn movable_processes<'a>(view: &'a View<'_>) -> Vec<ProcessThreads<'a>> {
    let mut processes: Vec<ProcessThreads<'a>> = Vec::new();
    for task in view.movable_tasks() {
        match processes
            .iter_mut()
            .find(|process| process.id == task.process)
        {
            Some(process) => process.tasks.push(task),
            None => processes.push(ProcessThreads {
                id: task.process,
                tasks: vec![task],
            }),
        }
    }
    processes
}

fn online_cpus(topology: &Topology, cache: &Cache) -> CpuSet {
    cache.cpus.intersection(&topology.online())
}

/// The maximum number of hardware threads of a core.
fn threads_per_core(topology: &Topology) -> f64 {
    let mut cores: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    topology
        .cpus
        .iter()
        .for_each(|cpu| *cores.entry((cpu.package, cpu.core)).or_default() += 1);
    f64::from(cores.values().copied().max().unwrap_or(1))
}

/// The resident memory in bytes; `None` if it is unknown, or if there is only one memory node and therefore no NUMA
/// balancing.
fn footprint_bytes(process: &ProcessThreads<'_>, topology: &Topology) -> Option<u64> {
    let nodes: BTreeSet<u32> = topology.cpus.iter().map(|cpu| cpu.memory_node).collect();
    let pages_by_task = process
        .tasks
        .iter()
        .filter_map(|task| task.pages_per_color.as_ref())
        .map(|pages| pages.iter().sum::<u64>());
    pages_by_task
        .max()
        .filter(|_| nodes.len() > 1)
        .map(|pages| pages * PAGE_BYTES)
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parsed_parameters: Parameters = super::parse_parameters(parameters)?;
    let periods_ns = [
        ("window_ns", parsed_parameters.window_ns),
        ("epoch_period_ns", parsed_parameters.epoch_period_ns),
    ];
    ParameterRange::OneOrMore.check(periods_ns.map(|(name, value)| (name, value as f64)))?;
    ParameterRange::UpTo(100.0).check([(
        "aggr_tolerance",
        f64::from(parsed_parameters.aggr_tolerance),
    )])?;
    Ok(Box::new(SchedCachePolicy {
        parameters: parsed_parameters,
        processes: BTreeMap::new(),
        observed_until_ns: None,
    }))
}

#[cfg(test)]
mod tests;
