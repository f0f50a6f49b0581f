//! Assigns tasks to the last-level caches in order of arrival (papers TC: round robin). Problem: comparisons need a
//! baseline that uses nothing but the number of tasks. Method: each new task goes to the next cache and stays there.
//! Properties: no evidence is needed, and a task moves only if its cache loses its last CPU.

use std::collections::BTreeMap;

use cachemate_core::{CacheId, Decision, Policy, Reason, TaskId, View};

use super::ParameterError;
use super::default::Parameters;

struct RoundRobinPolicy {
    parameters: Parameters,
    home_caches: BTreeMap<TaskId, CacheId>,
    next_domain: usize,
}

impl Policy for RoundRobinPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = self.parameters.idle();
        let mut reasons = Vec::new();
        let caches = view.topology.online_last_levels();
        if caches.is_empty() {
            return Decision::new(plan, reasons);
        }

        let mut home_caches = BTreeMap::new();
        for task in view.movable_tasks() {
            let previous_home = self.home_caches.get(&task.task);
            let previous_domain = caches
                .iter()
                .find(|(cache, _)| Some(cache) == previous_home);
            let (home, cpus) = previous_domain.unwrap_or_else(|| {
                let domain = &caches[self.next_domain % caches.len()];
                self.next_domain = self.next_domain % caches.len() + 1;
                let text = format!("{{0}} goes to CPUs {}, the next in turn", domain.1);
                reasons.push(Reason::new(vec![task.task], text, Vec::new()));
                domain
            });
            home_caches.insert(task.task, *home);
            plan.affinity.insert(task.task, cpus.clone());
        }
        self.home_caches = home_caches;
        Decision::new(plan, reasons)
    }
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(RoundRobinPolicy {
        parameters: Parameters::parse(parameters)?,
        home_caches: BTreeMap::new(),
        next_domain: 0,
    }))
}
