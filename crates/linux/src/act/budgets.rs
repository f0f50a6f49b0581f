//! Budgets of slowdown that several services share by weight.
//!
//! Problem: an operator knows how much all services of a shop may lose together, but not which of them will run. Method: a
//! budget is divided by weight among those of its services that have managed threads in a window, and each share is a
//! promise of maximum slowdown to the threads of its service. Properties: the shares add up to the budget; a service that
//! ends leaves its share to the others; a stricter promise of a rule stays in force.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Goal, ServiceIdentity, TaskSample};

use super::rules::matches_service_name;

/// A budget of slowdown.
#[derive(Clone, PartialEq, Debug)]
pub struct SlowdownBudget {
    /// Sum of the maximum slowdowns of all its services.
    pub max_slowdown: f64,
    /// Patterns of services with their weights; the first that matches a service counts.
    pub weights: Vec<(String, f64)>,
}

impl SlowdownBudget {
    /// The maximum slowdown of each service, if these services run; services without a share are missing.
    pub fn divide(&self, services: BTreeSet<ServiceIdentity>) -> BTreeMap<ServiceIdentity, f64> {
        let weight = |service: &ServiceIdentity| {
            self.weights
                .iter()
                .find(|(pattern, _)| matches_service_name(pattern, service))
                .map(|(_, weight)| *weight)
        };
        let with_weight =
            |service: ServiceIdentity| weight(&service).map(|weight| (service, weight));
        let weights: BTreeMap<ServiceIdentity, f64> =
            services.into_iter().filter_map(with_weight).collect();
        let total: f64 = weights.values().sum();
        weights
            .into_iter()
            .map(|(service, weight)| (service, self.max_slowdown * weight / total))
            .collect()
    }
}

/// Adds the shares of the budgets to the goals of the threads that may be moved.
pub(crate) fn add_budget_goals(budgets: &[SlowdownBudget], samples: &mut [TaskSample]) {
    let is_managed = |task: &&mut TaskSample| !task.exited && !task.unmovable;
    for budget in budgets {
        let services = samples
            .iter_mut()
            .filter(is_managed)
            .map(|task| task.service_or_command().into_owned())
            .collect();
        let limits = budget.divide(services);
        for task in samples.iter_mut().filter(is_managed) {
            if let Some(limit) = limits.get(&*task.service_or_command()) {
                let goal = task.goal.unwrap_or_default();
                let share = Goal {
                    max_slowdown: Some(*limit),
                    min_rate: None,
                    priority: goal.priority,
                };
                task.goal = Some(goal.merged_with(share));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{ProcessId, ServiceKind, TaskId};

    fn unit_sample(id: u32, name: &str, goal: Option<Goal>) -> TaskSample {
        let service = Some(ServiceIdentity::new(ServiceKind::Unit, name));
        TaskSample {
            service,
            goal,
            ..TaskSample::new(TaskId(id), ProcessId(id))
        }
    }

    /// Do the services that run share a budget by weight, does an ended one leave its share to the others, does the stricter
    /// promise of a rule stay, and have other services and observed threads no share?
    #[test]
    fn services_that_run_share_a_budget_by_weight() {
        let weights = [("redis", 2.0), ("unit/*", 1.0)]
            .map(|(pattern, weight)| (pattern.to_string(), weight))
            .to_vec();
        let budgets = [SlowdownBudget {
            max_slowdown: 0.3,
            weights,
        }];
        let strict = Goal {
            priority: 0.5,
            max_slowdown: Some(0.01),
            min_rate: Some(7.0),
        };
        let mut samples = vec![
            unit_sample(0, "redis.service", None),
            unit_sample(1, "redis.service", Some(strict)),
            unit_sample(2, "web.service", None),
            TaskSample {
                unmovable: true,
                ..unit_sample(3, "seen.service", None)
            },
            TaskSample {
                service: Some(ServiceIdentity::container("x")),
                ..unit_sample(4, "x", None)
            },
        ];
        let limits = |samples: &[TaskSample]| -> Vec<Option<f64>> {
            let percent = |limit: f64| (1e4 * limit).round() / 100.0;
            samples
                .iter()
                .map(|task| task.goal.and_then(|goal| goal.max_slowdown).map(percent))
                .collect()
        };
        let mut without_web = samples.clone();
        add_budget_goals(&budgets, &mut samples);
        assert_eq!(
            limits(&samples),
            [Some(20.0), Some(1.0), Some(10.0), None, None]
        );
        assert_eq!(samples[1].goal, Some(strict));
        without_web[2].exited = true;
        add_budget_goals(&budgets, &mut without_web);
        assert_eq!(
            limits(&without_web),
            [Some(30.0), Some(1.0), None, None, None]
        );
    }
}
