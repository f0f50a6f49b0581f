//! Assigns tasks to the last-level caches in order of arrival (papers TC: round robin). Problem: comparisons need a
//! baseline that uses nothing but the number of tasks. Method: each new task goes to the next cache and stays there.
//! Properties: no evidence is needed, and a task moves only if its cache loses its last CPU.

use std::collections::BTreeMap;

use cachemate_core::{Decision, Policy, Reason, ReasonKind, TaskId, View};

use super::ParameterError;
use super::default::Parameters;

struct RoundRobinPolicy {
    parameters: Parameters,
    domain_by_task: BTreeMap<TaskId, usize>,
    next_domain: usize,
}

impl Policy for RoundRobinPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = self.parameters.idle();
        let mut reasons = Vec::new();
        let domains = view.last_level_domains();
        if domains.is_empty() {
            return Decision::new(plan, reasons);
        }
        let mut domain_by_task = BTreeMap::new();
        for task in view.movable_tasks() {
            let previous_domain = self.domain_by_task.get(&task.task).copied().filter(|&domain| domain < domains.len());
            let domain = previous_domain.unwrap_or_else(|| {
                let domain = self.next_domain % domains.len();
                self.next_domain = domain + 1;
                let text = format!("{{0}} goes to CPUs {}, the next in turn", domains[domain]);
                reasons.push(Reason {
                    kind: ReasonKind::Explanation,
                    tasks: vec![task.task],
                    text,
                    numbers: Vec::new(),
                });
                domain
            });
            domain_by_task.insert(task.task, domain);
            plan.affinity.insert(task.task, domains[domain].clone());
        }
        self.domain_by_task = domain_by_task;
        Decision::new(plan, reasons)
    }
}

/// Builds the policy for the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(RoundRobinPolicy {
        parameters: Parameters::parse(parameters)?,
        domain_by_task: BTreeMap::new(),
        next_domain: 0,
    }))
}
