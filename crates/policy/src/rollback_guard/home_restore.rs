//! Where tasks ran before a plan moved them, and the way back there.
//!
//! Problem: taking a plan back is not enough to undo it. A kernel leaves a thread where it runs when its affinity is widened
//! (sched_setaffinity(2)), so programs that a bad plan put together stay together. Method: the last-level cache on which
//! each task ran most is noted as long as a state is the reference; after a roll-back the tasks that the failed plan had
//! placed, and the reference leaves free, are kept to that cache for a few windows, and are free again. Properties: nobody is
//! kept anywhere for longer than that; where gangs take turns, or there is one cache, nothing is done.

use std::collections::BTreeMap;

use cachemate_core::{CpuSet, Plan, TaskId, View};

/// The windows for which tasks are kept where they were: one in which they move, and one to settle.
const WINDOWS: u64 = 2;

/// CPUs of the cache on which each task ran most in the last window in which it ran.
pub type HomeCpus = BTreeMap<TaskId, CpuSet>;

/// Takes in where tasks ran in a window. Those that have gone are forgotten.
pub fn record_homes(homes: &mut HomeCpus, view: &View<'_>) {
    let domains = view.topology.last_level_domains();
    homes.retain(|task, _| view.observation.tasks.iter().any(|seen| seen.task == *task && !seen.exited));
    for task in view.observation.tasks.iter().filter(|task| !task.exited) {
        // The first of those with the most.
        let most = domains.iter().rev().max_by_key(|cpus| task.ran_on_ns(cpus));
        let most = most.filter(|cpus| task.ran_on_ns(cpus) > 0);
        homes.extend(most.map(|cpus| (task.task, cpus.clone())));
    }
}

/// Tasks on their way back.
#[derive(Clone, Debug)]
pub struct HomeRestorer {
    affinity: BTreeMap<TaskId, CpuSet>,
    /// In this window they are free again.
    until: u64,
}

impl HomeRestorer {
    /// For the tasks that `failed` placed and `plan`, which takes its place, leaves free; `None` = there are none.
    pub fn after(failed: &Plan, plan: &Plan, homes: &HomeCpus, view: &View<'_>) -> Option<Self> {
        if !plan.gangs.is_empty() || view.topology.last_level_domains().len() < 2 {
            return None;
        }
        let free = |task: &TaskId| failed.affinity.contains_key(task) && !plan.affinity.contains_key(task);
        let movable = |task: &TaskId| view.movable().any(|seen| seen.task == *task);
        let leads = homes.iter().filter(|(task, _)| free(task) && movable(task));
        let affinity: BTreeMap<TaskId, CpuSet> = leads.map(|(task, cpus)| (*task, cpus.clone())).collect();
        (!affinity.is_empty()).then(|| HomeRestorer { affinity, until: view.observation.window + WINDOWS })
    }

    /// Is anybody still to be kept after this window?
    pub fn is_active(&self, window: u64) -> bool {
        window < self.until
    }

    /// Keeps those whom the plan leaves free, and who may still be moved.
    pub fn pin_tasks(&self, plan: &mut Plan, view: &View<'_>) {
        if !plan.gangs.is_empty() {
            return;
        }
        let online = view.topology.online();
        for task in view.movable() {
            let home = self.affinity.get(&task.task).filter(|cpus| cpus.intersects(&online));
            if let Some(home) = home.filter(|_| !plan.affinity.contains_key(&task.task)) {
                plan.affinity.insert(task.task, home.clone());
            }
        }
    }

    /// A plan that was in force, without what was only the way home.
    pub fn without(&self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        plan.affinity.retain(|task, cpus| self.affinity.get(task) != Some(cpus));
        plan
    }
}
