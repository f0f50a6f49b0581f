//! Forms gangs on one shared cache, chooses the length of their turns, and decides whether they pay off.

use cachemate_core::{CpuSet, Gang, GangSchedule, Plan, Reason, TaskId, TaskSample, View};

use super::{Parameters, build_explanation, describe_probed_values};
use crate::gang_quantum::{self, GangCandidate};
use crate::solvers::{CostMatrix, Seats, Solution, best_assignment};

/// Length of a gang's turn if no footprint is known; refilling a footprint of a few MiB takes a tenth of it.
const DEFAULT_SLICE_NS: u64 = 50_000_000;

/// A cache with more active tasks than CPUs, with the slowdown of each task beside each other one.
pub(super) struct OvercommittedCache<'a> {
    pub view: &'a View<'a>,
    pub cpus: &'a CpuSet,
    pub tasks: &'a [&'a TaskSample],
    pub active_tasks: &'a [TaskId],
    pub costs: &'a CostMatrix,
}

/// Mean slowdowns of the active tasks, without and with gangs.
#[derive(Clone, Copy)]
struct MeanSlowdowns {
    without_gangs: f64,
    with_gangs: f64,
}

impl MeanSlowdowns {
    fn numbers(self) -> Vec<(String, f64)> {
        vec![
            ("ungrouped_mean_slowdown".to_string(), self.without_gangs),
            ("ganged_mean_slowdown".to_string(), self.with_gangs),
        ]
    }

    fn describe(self) -> String {
        format!(
            "{:.0} % slower without gangs, {:.0} % in gangs",
            100.0 * self.without_gangs,
            100.0 * self.with_gangs
        )
    }
}

impl OvercommittedCache<'_> {
    /// Adds the gangs to the plan if they pay off, and a reason in either case.
    pub fn write_gangs(&self, parameters: &Parameters, plan: &mut Plan, reasons: &mut Vec<Reason>) {
        plan.affinity.clear();
        plan.gangs.clear();
        if self.tasks.len() > parameters.max_ganged {
            reasons.push(build_explanation(
                &[],
                format!(
                    "{} programs are too many for gangs on one cache",
                    self.tasks.len()
                ),
                Vec::new(),
            ));
            return;
        }

        let seat_count = self.cpus.count() as usize;
        let turn_count = self.active_tasks.len().div_ceil(seat_count);
        let solution = best_assignment(
            self.costs,
            &Seats {
                cpus_per_cache: vec![self.cpus.count(); turn_count],
            },
        );
        let slowdown_without_gangs = self.mean_slowdown_without_gangs();
        let mean_slowdowns = |with_gangs| MeanSlowdowns {
            without_gangs: slowdown_without_gangs,
            with_gangs,
        };
        let slowdowns_before_refills =
            mean_slowdowns(solution.total / self.active_tasks.len() as f64);
        if slowdown_without_gangs - slowdowns_before_refills.with_gangs < parameters.min_gain {
            let text = format!(
                "gangs would not pay off: on average {}, by the probes",
                slowdowns_before_refills.describe()
            );
            reasons.push(build_explanation(
                &[],
                text,
                slowdowns_before_refills.numbers(),
            ));
            return;
        }
        let gangs = self.build_gangs(&solution);
        let members = self.gang_candidates(&solution);
        let max_slowdown = slowdown_without_gangs - parameters.min_gain;
        let slice_ns = match parameters.slice_ns {
            Some(configured_ns) => configured_ns,
            None => match gang_quantum::quantum_ns(
                &members,
                max_slowdown,
                gangs.len(),
                parameters.max_wait_ns,
            ) {
                Ok(computed_ns) => computed_ns.unwrap_or(DEFAULT_SLICE_NS),
                Err(quantum_error) => {
                    reasons.push(build_explanation(
                        &[],
                        quantum_error.to_string(),
                        slowdowns_before_refills.numbers(),
                    ));
                    return;
                }
            },
        };
        let slice_ns = slice_ns.max(self.view.capabilities.min_slice_ns.unwrap_or(0));
        let slowdowns = mean_slowdowns(gang_quantum::mean_slowdown(&members, slice_ns as f64));
        for gang in &gangs {
            let member_texts: Vec<String> = (0..gang.len())
                .map(|index| {
                    format!(
                        "{{{index}}}{}",
                        describe_probed_values(self.view, gang[index])
                    )
                })
                .collect();
            let slice_ms = slice_ns as f64 / 1e6;
            let text = format!(
                "{} run as a gang, in time slices of {slice_ms:.0} ms: on average {}",
                member_texts.join(" and "),
                slowdowns.describe()
            );
            reasons.push(build_explanation(gang, text, slowdowns.numbers()));
        }
        let build_gang = |members: Vec<TaskId>| Gang {
            members: members.into_iter().map(|task| (task, None)).collect(),
            slices: 1,
        };
        plan.gangs = vec![GangSchedule {
            cpus: self.cpus.clone(),
            slice_ns,
            gangs: gangs.into_iter().map(build_gang).collect(),
        }];
    }

    /// The mean slowdown of the active tasks without gangs, assuming that each task meets all others equally often on
    /// each of the other CPUs.
    fn mean_slowdown_without_gangs(&self) -> f64 {
        let task_count = self.active_tasks.len();
        let total_cost: f64 = (0..task_count)
            .map(|i| {
                (0..task_count)
                    .filter(|j| *j != i)
                    .map(|j| self.costs[i][j])
                    .sum::<f64>()
            })
            .sum();
        total_cost * (self.cpus.count() - 1) as f64 / (task_count as f64 - 1.0) / task_count as f64
    }

    /// The gangs of the solution. Quiet tasks first fill free CPUs, and then get turns of their own.
    fn build_gangs(&self, solution: &Solution) -> Vec<Vec<TaskId>> {
        let seat_count = self.cpus.count() as usize;
        let mut gangs: Vec<Vec<TaskId>> = solution
            .seating
            .by_cache
            .iter()
            .map(|gang| tasks_of_gang(gang, self.active_tasks))
            .collect();
        gangs.retain(|gang| !gang.is_empty());

        let quiet_tasks = self
            .tasks
            .iter()
            .map(|task| task.task)
            .filter(|task| !self.active_tasks.contains(task));
        for task in quiet_tasks {
            match gangs.iter_mut().find(|gang| gang.len() < seat_count) {
                Some(gang) => gang.push(task),
                None => gangs.push(vec![task]),
            }
        }

        gangs
    }

    /// For each active task, its slowdown in its gang and the time of its refill.
    fn gang_candidates(&self, solution: &Solution) -> Vec<GangCandidate> {
        let cache = self
            .view
            .topology
            .last_level_caches()
            .find(|cache| self.cpus.is_subset(&cache.cpus));
        let refill_ns = |task: &TaskId| {
            let profile = self.view.profiles.get(task)?;
            gang_quantum::refill_ns(profile, cache?, self.view)
        };

        let slowdowns = solution.seating.costs_by_program(self.costs);
        let candidate_of = |(task, slowdown): (&TaskId, f64)| GangCandidate {
            refill_ns: refill_ns(task),
            slowdown,
        };
        self.active_tasks
            .iter()
            .zip(slowdowns)
            .map(candidate_of)
            .collect()
    }
}

fn tasks_of_gang(cpus: &[Vec<usize>], active_tasks: &[TaskId]) -> Vec<TaskId> {
    let mut indices: Vec<usize> = cpus.iter().flatten().copied().collect();
    indices.sort_unstable();
    indices
        .into_iter()
        .map(|member| active_tasks[member])
        .collect()
}
