//! Chooses the assignment with the smallest sum of measured pairwise slowdowns (CA 2.1): the best assignment by the
//! matrix.
//!
//! Problem: a policy that is better than another may still be far from the optimum. Method: the slowdown of every
//! program beside every other is measured beforehand and passed as a parameter. Whenever the set of tasks changes, the
//! solvers find the assignment with the smallest sum. Row k holds the slowdowns of the k-th task of the run, so the
//! result does not depend on names. The sum does not depend on which of two equal caches a group gets, but memory does.
//! Groups are therefore exchanged between equal caches until no exchange leaves more tasks in place.
//!
//! Properties: the assignment is as exact as the solver (see [`crate::solvers`]), but optimal only by the matrix. Pairs
//! were measured without the resources that all programs share, so another assignment may run faster. Tasks beyond the
//! matrix are not moved; without a matrix, no task is.

use std::collections::BTreeMap;

use cachemate_core::{CpuId, CpuSet, Decision, Plan, Policy, Reason, TaskId, View, WindowLength};
use serde::Deserialize;

use super::{ParameterError, ParameterRange};
use crate::placement;
use crate::solvers::{self, Seating, Seats, Solution};

/// Parameters of `best-by-matrix` and `worst-by-matrix`.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Slowdown of the i-th task beside the j-th in `slowdowns[i][j]`: run time over solo time, minus one.
    pub slowdowns: Vec<Vec<f64>>,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 100_000_000,
            slowdowns: Vec::new(),
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = super::parse_parameters(text)?;
        ParameterRange::OneOrMore.check([("window_ns", parameters.window_ns as f64)])?;
        let rows = parameters.slowdowns.len();
        for (row, values) in parameters.slowdowns.iter().enumerate() {
            if values.len() != rows {
                let row_length = format!("{} values in row {row}", values.len());
                return Err(ParameterError::invalid_value("slowdowns", row_length, rows));
            }
            if let Some(column) = values.iter().position(|value| !value.is_finite()) {
                let bad_value = format!("{} in row {row}, column {column}", values[column]);
                return Err(ParameterError::invalid_value(
                    "slowdowns",
                    bad_value,
                    "a number",
                ));
            }
        }
        Ok(parameters)
    }
}

/// A policy that minimizes or maximizes the sum of slowdowns.
pub(super) struct MatrixPolicy {
    parameters: Parameters,
    solve: fn(&solvers::CostMatrix, &Seats) -> Solution,
    /// Row of every task of the run, in order of arrival.
    row_by_task: BTreeMap<TaskId, usize>,
    placed_cpus: BTreeMap<TaskId, CpuSet>,
}

impl Policy for MatrixPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });

        for task in &view.observation.tasks {
            let next_row = self.row_by_task.len();
            self.row_by_task.entry(task.task).or_insert(next_row);
        }
        let tasks: Vec<TaskId> = view
            .movable_tasks()
            .map(|task| task.task)
            .filter(|task| {
                self.row_by_task
                    .get(task)
                    .is_some_and(|&row| row < self.parameters.slowdowns.len())
            })
            .collect();

        let mut reasons = Vec::new();
        if tasks.len() != self.placed_cpus.len()
            || !tasks.iter().all(|task| self.placed_cpus.contains_key(task))
        {
            self.place(view, &tasks, &mut reasons);
        }
        plan.affinity = self.placed_cpus.clone();
        Decision::new(plan, reasons)
    }
}

impl MatrixPolicy {
    fn place(&mut self, view: &View<'_>, tasks: &[TaskId], reasons: &mut Vec<Reason>) {
        self.placed_cpus.clear();
        let Ok(seats) = placement::cache_seats(view.topology, tasks.len()) else {
            return;
        };
        if seats.iter().all(|cache| cache.cache.is_none()) {
            return;
        }

        let row_of_task = |task: &TaskId| {
            let row = self.row_by_task.get(task);
            *row.expect("checked by `decide`: every task to be placed has a row")
        };
        let cost_of_pair =
            |i: &TaskId, j: &TaskId| self.parameters.slowdowns[row_of_task(i)][row_of_task(j)];
        let costs: Vec<Vec<f64>> = tasks
            .iter()
            .map(|i| tasks.iter().map(|j| cost_of_pair(i, j)).collect())
            .collect();
        let seat_counts = Seats {
            cpus_per_cache: seats.iter().map(|cache| cache.cpus.len() as u32).collect(),
        };
        let mut solution = (self.solve)(&costs, &seat_counts);
        exchange_equal_caches(view, tasks, &seats, &mut solution.seating);
        let slowdowns = solution.seating.costs_by_program(&costs);

        let has_shared_cpus = solution
            .seating
            .by_cache
            .iter()
            .flatten()
            .any(|members| members.len() > 1);
        for (index, cpus) in cpus_of(&solution.seating, &seats, has_shared_cpus) {
            let text = format!("{{0}} is assigned to CPUs {cpus}");
            let numbers = vec![("slowdown_percent".to_string(), 100.0 * slowdowns[index])];
            reasons.push(Reason::new(vec![tasks[index]], text, numbers));
            self.placed_cpus.insert(tasks[index], cpus);
        }
    }
}

/// Exchanges whole groups between caches with equally many CPUs, as long as that leaves more tasks on their memory node
/// or cache.
fn exchange_equal_caches(
    view: &View<'_>,
    tasks: &[TaskId],
    seats: &[placement::CacheSeats],
    seating: &mut Seating,
) {
    let node_of_cpu = |cpu: CpuId| {
        view.topology
            .cpus
            .iter()
            .find(|cpu_info| cpu_info.id == cpu)
            .map(|cpu| cpu.memory_node)
    };

    let current_cpus: Vec<Option<CpuId>> = tasks
        .iter()
        .map(|task| {
            view.observation
                .tasks
                .iter()
                .find(|sample| sample.task == *task)?
                .cpu
        })
        .collect();

    // Keeping a task on its node counts more than keeping it on any of the node's caches.
    let stay_value = |group: &[Vec<usize>], cache: &placement::CacheSeats| -> u32 {
        let member_stay_value = |&member: &usize| {
            let Some(cpu) = current_cpus[member] else {
                return 0;
            };
            let is_home_node = cache
                .cpus
                .first()
                .is_some_and(|first| node_of_cpu(*first) == node_of_cpu(cpu));
            2 * u32::from(is_home_node) + u32::from(cache.cpus.contains(&cpu))
        };
        group.iter().flatten().map(member_stay_value).sum()
    };

    loop {
        let groups = &seating.by_cache;
        let is_equal_size = |a: usize, b: usize| seats[a].cpus.len() == seats[b].cpus.len();
        let is_exchange_better = |&(a, b): &(usize, usize)| {
            let [current_value, exchanged_value] = [(a, b), (b, a)].map(|(x, y)| {
                stay_value(&groups[a], &seats[x]) + stay_value(&groups[b], &seats[y])
            });
            is_equal_size(a, b) && exchanged_value > current_value
        };
        let pairs = (0..seats.len()).flat_map(|a| (a + 1..seats.len()).map(move |b| (a, b)));
        let Some((a, b)) = pairs.into_iter().find(is_exchange_better) else {
            return;
        };
        seating.by_cache.swap(a, b);
    }
}

/// The CPUs of every task by its index: all CPUs of its cache, or one if it matters which tasks take turns.
fn cpus_of(
    seating: &Seating,
    seats: &[placement::CacheSeats],
    assigns_one_cpu: bool,
) -> Vec<(usize, CpuSet)> {
    let mut cpus_by_task = Vec::new();
    for (cache, members_by_cpu) in seats.iter().zip(&seating.by_cache) {
        let cache_cpus: CpuSet = cache.cpus.iter().map(|cpu| cpu.0).collect();
        for (members, cpu) in members_by_cpu.iter().zip(&cache.cpus) {
            let allowed_cpus = if assigns_one_cpu {
                std::iter::once(cpu.0).collect()
            } else {
                cache_cpus.clone()
            };
            cpus_by_task.extend(members.iter().map(|&member| (member, allowed_cpus.clone())));
        }
    }
    cpus_by_task.sort_by_key(|(member, _)| *member);
    cpus_by_task
}

pub(super) fn build_matrix_policy(
    parameters: &str,
    solve: fn(&solvers::CostMatrix, &Seats) -> Solution,
) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters = Parameters::parse(parameters)?;
    Ok(Box::new(MatrixPolicy {
        parameters,
        solve,
        row_by_task: BTreeMap::new(),
        placed_cpus: BTreeMap::new(),
    }))
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    build_matrix_policy(parameters, solvers::best_assignment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::*;
    use cachemate_core::*;

    /// Does each group get the cache on which its tasks already run, if caches are equally good?
    #[test]
    fn groups_get_the_cache_on_which_they_already_run() {
        let topology = last_level_caches(2, 2, CacheLevel::L2, 4 << 20);
        // The first two programs go together, and so do the last two.
        let harm = |i: usize, j: usize| if i / 2 == j / 2 { 0.0 } else { 0.5 };
        let slowdowns: Vec<String> = (0..4)
            .map(|i| format!("{:?}", (0..4).map(|j| harm(i, j)).collect::<Vec<f64>>()))
            .collect();
        let placed_from = |cpus: [u32; 4]| {
            let task = |(id, cpu): (u32, u32)| TaskSample {
                cpu: Some(CpuId(cpu)),
                ..TaskSample::new(TaskId(id), ProcessId(id))
            };
            let mut fixture = ViewFixture::new(topology.clone(), capabilities_fixture(&[]), 0);
            fixture.observation = observation_of(0, 1, (0..).zip(cpus).map(task));
            let mut policy = build(&format!("slowdowns = [{}]", slowdowns.join(", ")), 1).unwrap();
            let plan = fixture.decide(policy.as_mut(), &NullPredictor).plan;
            (0..4)
                .map(|task| plan.affinity[&TaskId(task)].iter().next().unwrap() / 2)
                .collect::<Vec<u32>>()
        };
        assert_eq!(placed_from([0, 1, 2, 3]), [0, 0, 1, 1]);
        assert_eq!(placed_from([2, 3, 0, 1]), [1, 1, 0, 0]);

        assert_eq!(
            placed_from([2, 3, 3, 0]),
            [1, 1, 0, 0],
            "three of four stay"
        );
    }
}
