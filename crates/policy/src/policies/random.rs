//! Places each task on a random one of the caches with the fewest tasks (papers CA: random). Problem: how much does
//! placement without evidence lose on average? Method: a new task is placed on a random one of the emptiest caches, so
//! that loads stay even, and stays there. Properties: no evidence is needed, and the same seed and arrivals give the
//! same placement.

use std::collections::BTreeMap;

use cachemate_core::{Decision, Policy, Reason, ReasonKind, SplitMix64, TaskId, View};

use super::ParameterError;
use super::default::Parameters;

struct RandomPolicy {
    parameters: Parameters,
    generator: SplitMix64,
    domain_by_task: BTreeMap<TaskId, usize>,
}

impl Policy for RandomPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = self.parameters.idle();
        let mut reasons = Vec::new();
        let domains = view.last_level_domains();
        if domains.is_empty() {
            return Decision::new(plan, reasons);
        }
        let previous_domain =
            |task: TaskId| self.domain_by_task.get(&task).copied().filter(|&domain| domain < domains.len());
        let mut domain_by_task: BTreeMap<TaskId, usize> =
            view.movable_tasks().filter_map(|task| Some((task.task, previous_domain(task.task)?))).collect();
        for task in view.movable_tasks() {
            if domain_by_task.contains_key(&task.task) {
                continue;
            }
            // The load is per CPU, so that a cache with more CPUs takes more tasks.
            let load_of_domain = |domain: usize| {
                let tasks = domain_by_task.values().filter(|&&other| other == domain).count();
                tasks as f64 / f64::from(domains[domain].count())
            };
            let min_load = (0..domains.len()).map(load_of_domain).fold(f64::INFINITY, f64::min);
            let emptiest_domains: Vec<usize> =
                (0..domains.len()).filter(|&domain| load_of_domain(domain) == min_load).collect();
            let domain = emptiest_domains[self.generator.draw_below(emptiest_domains.len() as u64) as usize];
            domain_by_task.insert(task.task, domain);
            let text = format!(
                "{{0}} drew the CPUs {} among {} equally loaded caches",
                domains[domain],
                emptiest_domains.len()
            );
            reasons.push(Reason { kind: ReasonKind::Explanation, tasks: vec![task.task], text, numbers: Vec::new() });
        }
        plan.affinity.extend(domain_by_task.iter().map(|(&task, &domain)| (task, domains[domain].clone())));
        self.domain_by_task = domain_by_task;
        Decision::new(plan, reasons)
    }
}

/// Builds the policy for the registry.
pub(super) fn build(parameters: &str, seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters = Parameters::parse(parameters)?;
    Ok(Box::new(RandomPolicy { parameters, generator: SplitMix64::new(seed), domain_by_task: BTreeMap::new() }))
}
