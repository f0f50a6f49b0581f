//! Places each task on a random one of the caches with the fewest tasks (papers CA: random). Problem: how much does
//! placement without evidence lose on average? Method: a new task is placed on a random one of the emptiest caches, so
//! that loads stay even, and stays there. Properties: no evidence is needed, and the same seed and arrivals give the
//! same placement.

use std::collections::BTreeMap;

use cachemate_core::{CacheId, Decision, Policy, Reason, SplitMix64, TaskId, View};

use super::ParameterError;
use super::default::Parameters;

struct RandomPolicy {
    parameters: Parameters,
    generator: SplitMix64,
    home_caches: BTreeMap<TaskId, CacheId>,
}

impl Policy for RandomPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = self.parameters.idle();
        let mut reasons = Vec::new();
        let caches = view.topology.online_last_levels();
        if caches.is_empty() {
            return Decision::new(plan, reasons);
        }

        let previous_domain = |task: TaskId| {
            let home = self.home_caches.get(&task)?;
            caches.iter().position(|(cache, _)| cache == home)
        };
        let mut domain_by_task: BTreeMap<TaskId, usize> = view
            .movable_tasks()
            .filter_map(|task| Some((task.task, previous_domain(task.task)?)))
            .collect();

        for task in view.movable_tasks() {
            if domain_by_task.contains_key(&task.task) {
                continue;
            }
            // The load is per CPU, so that a cache with more CPUs takes more tasks.
            let load_of_domain = |domain: usize| {
                let tasks = domain_by_task
                    .values()
                    .filter(|&&other| other == domain)
                    .count();
                tasks as f64 / f64::from(caches[domain].1.count())
            };
            let min_load = (0..caches.len())
                .map(load_of_domain)
                .fold(f64::INFINITY, f64::min);
            let emptiest_domains: Vec<usize> = (0..caches.len())
                .filter(|&domain| load_of_domain(domain) == min_load)
                .collect();
            let domain =
                emptiest_domains[self.generator.draw_below(emptiest_domains.len() as u64) as usize];
            domain_by_task.insert(task.task, domain);
            let text = format!(
                "{{0}} drew the CPUs {} among {} equally loaded caches",
                caches[domain].1,
                emptiest_domains.len()
            );
            reasons.push(Reason::new(vec![task.task], text, Vec::new()));
        }
        plan.affinity.extend(
            domain_by_task
                .iter()
                .map(|(&task, &domain)| (task, caches[domain].1.clone())),
        );
        self.home_caches = domain_by_task
            .into_iter()
            .map(|(task, domain)| (task, caches[domain].0))
            .collect();
        Decision::new(plan, reasons)
    }
}

pub(super) fn build(parameters: &str, seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters = Parameters::parse(parameters)?;
    Ok(Box::new(RandomPolicy {
        parameters,
        generator: SplitMix64::new(seed),
        home_caches: BTreeMap::new(),
    }))
}
