//! Return of tasks to the caches on which they ran before a plan moved them.
//!
//! Problem: rolling a plan back does not undo its placement. A kernel does not migrate a thread when its affinity is
//! widened (sched_setaffinity(2)), so programs that a bad plan put together stay together. Method: while a state is the
//! reference, the last-level cache on which each task ran most is recorded. After a roll-back, tasks that the failed
//! plan placed and the reference does not pin are pinned to that cache for a few windows. Properties: no task is pinned
//! for longer than that; with gangs, or with one cache, nothing is done.

use std::collections::BTreeMap;

use cachemate_core::{CpuSet, Plan, TaskId, View};

/// Number of windows for which tasks are pinned: one to move, and one to settle.
const PINNED_WINDOWS: u64 = 2;

/// CPUs of the cache on which each task ran most in the last window in which it ran.
pub type HomeCpus = BTreeMap<TaskId, CpuSet>;

/// Records the caches on which tasks ran in a window, and forgets exited tasks.
pub fn record_last_cpus(homes: &mut HomeCpus, view: &View<'_>) {
    let domains = view.topology.last_level_domains();
    let live_tasks = view.observation.live_tasks();
    homes.retain(|task, _| live_tasks.contains(task));
    for task in view.observation.tasks.iter().filter(|task| !task.exited) {
        // The first of the caches with the longest run time.
        let longest_domain = domains.iter().rev().max_by_key(|cpus| task.ran_on_ns(cpus));
        let longest_domain = longest_domain.filter(|cpus| task.ran_on_ns(cpus) > 0);
        homes.extend(longest_domain.map(|cpus| (task.task, cpus.clone())));
    }
}

/// The temporary pins of tasks that return to their earlier caches.
#[derive(Clone, Debug)]
pub struct HomeRestorer {
    pinned_cpus: BTreeMap<TaskId, CpuSet>,
    /// Window in which the tasks are unpinned.
    end_window: u64,
}

impl HomeRestorer {
    /// Builds the pins of the tasks that `failed_plan` placed and that `plan`, which replaces it, does not pin; `None`
    /// if there are no such tasks.
    pub fn for_failed_plan(
        failed_plan: &Plan,
        plan: &Plan,
        homes: &HomeCpus,
        view: &View<'_>,
    ) -> Option<Self> {
        if !plan.gangs.is_empty() || view.topology.last_level_domains().len() < 2 {
            return None;
        }

        let is_unpinned = |task: &TaskId| {
            failed_plan.affinity.contains_key(task) && !plan.affinity.contains_key(task)
        };
        let is_movable = |task: &TaskId| view.movable_tasks().any(|sample| sample.task == *task);
        let returning_tasks = homes
            .iter()
            .filter(|(task, _)| is_unpinned(task) && is_movable(task));
        let affinity: BTreeMap<TaskId, CpuSet> = returning_tasks
            .map(|(task, cpus)| (*task, cpus.clone()))
            .collect();
        (!affinity.is_empty()).then(|| HomeRestorer {
            pinned_cpus: affinity,
            end_window: view.observation.window + PINNED_WINDOWS,
        })
    }

    /// Whether tasks are still pinned after this window.
    pub fn is_active(&self, window: u64) -> bool {
        window < self.end_window
    }

    /// The plan with pins of the tasks that it leaves free and that may still be moved.
    pub fn plan_with_homes(&self, mut plan: Plan, view: &View<'_>) -> Plan {
        if !plan.gangs.is_empty() {
            return plan;
        }
        let online = view.topology.online();
        for task in view.movable_tasks() {
            let home_cpus = self
                .pinned_cpus
                .get(&task.task)
                .filter(|cpus| cpus.intersects(&online));
            if let Some(home_cpus) = home_cpus.filter(|_| !plan.affinity.contains_key(&task.task)) {
                plan.affinity.insert(task.task, home_cpus.clone());
            }
        }
        plan
    }

    /// The plan without the temporary pins.
    pub fn plan_without_homes(&self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        plan.affinity
            .retain(|task, cpus| self.pinned_cpus.get(task) != Some(cpus));
        plan
    }
}
