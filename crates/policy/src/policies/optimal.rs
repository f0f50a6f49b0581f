//! The assignment with the least sum of measured degradations (CA 2.1): what knowing everything would bring.
//!
//! Problem: a policy that is better than another may still be far from what is possible. Method: the degradation of
//! every program beside every other, measured beforehand, comes as a parameter; whenever tasks come or go, the solvers
//! find the best assignment of those that are there. Rows belong to tasks in order of arrival: row k is the k-th task of
//! the run, so that nothing hangs on names. Properties: exact where the solver is (see [`crate::solvers`]); tasks beyond
//! the matrix are left alone; without a matrix nothing is done.

use std::collections::BTreeMap;

use cachemate_core::{CpuSet, Decision, Plan, Policy, Reason, TaskId, View, Window};
use serde::Deserialize;

use crate::placement;
use crate::solvers::{self, Seating, Seats, Solved};

/// Parameters of `optimal` and `worst`.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// `degradation[i][j]`: run time of the i-th task beside the j-th over its time alone, minus one.
    pub degradation: Vec<Vec<f64>>,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters { window_ns: 100_000_000, degradation: Vec::new() }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, String> {
        let parsed: Parameters = super::parameters(text)?;
        if parsed.window_ns == 0 {
            return Err("window_ns: found 0, expected 1 or more".to_string());
        }
        let rows = parsed.degradation.len();
        for (row, values) in parsed.degradation.iter().enumerate() {
            if values.len() != rows {
                return Err(format!("degradation: found {} values in row {row}, expected {rows}", values.len()));
            }
            if let Some(column) = values.iter().position(|value| !value.is_finite()) {
                let found = values[column];
                return Err(format!("degradation: found {found} in row {row}, column {column}, expected a number"));
            }
        }
        Ok(parsed)
    }
}

/// By a matrix, one way or the other.
pub(super) struct ByMatrix {
    parameters: Parameters,
    solve: fn(&solvers::Costs, &Seats) -> Solved,
    /// Row of every task that was ever there, in order of arrival.
    rows: BTreeMap<TaskId, usize>,
    placed: BTreeMap<TaskId, CpuSet>,
}

impl Policy for ByMatrix {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(Window::Time { ns: self.parameters.window_ns });
        for task in &view.seen.tasks {
            let next = self.rows.len();
            self.rows.entry(task.task).or_insert(next);
        }
        let tasks: Vec<TaskId> = super::movable(view)
            .map(|task| task.task)
            .filter(|task| self.rows.get(task).is_some_and(|&row| row < self.parameters.degradation.len()))
            .collect();
        let mut why = Vec::new();
        if tasks.len() != self.placed.len() || !tasks.iter().all(|task| self.placed.contains_key(task)) {
            self.place(view, &tasks, &mut why);
        }
        plan.allowed = self.placed.clone();
        Decision { plan, why }
    }
}

impl ByMatrix {
    fn place(&mut self, view: &View<'_>, tasks: &[TaskId], why: &mut Vec<Reason>) {
        self.placed.clear();
        let Ok(seats) = placement::seats(view.topology, tasks.len()) else { return };
        if seats.iter().all(|cache| cache.cache.is_none()) {
            return;
        }
        let row = |task: &TaskId| self.rows.get(task).copied().unwrap_or(0);
        let cost = |i: &TaskId, j: &TaskId| self.parameters.degradation[row(i)][row(j)];
        let costs: Vec<Vec<f64>> = tasks.iter().map(|i| tasks.iter().map(|j| cost(i, j)).collect()).collect();
        let shape = Seats { cpus_per_cache: seats.iter().map(|cache| cache.cpus.len() as u32).collect() };
        let solved = (self.solve)(&costs, &shape);
        let suffered = solved.seating.suffered(&costs);
        let takes_turns = solved.seating.by_cache.iter().flatten().any(|cpu| cpu.len() > 1);
        for (nth, cpus) in cpus_of(&solved.seating, &seats, takes_turns) {
            let text = format!("{{0}} is seated on the CPUs {cpus}");
            let numbers = vec![("degradation_percent".to_string(), 100.0 * suffered[nth])];
            why.push(Reason { tasks: vec![tasks[nth]], text, numbers });
            self.placed.insert(tasks[nth], cpus);
        }
    }
}

/// All CPUs of the cache, or the one CPU where it matters who takes turns with whom.
fn cpus_of(seating: &Seating, seats: &[placement::CacheSeats], one_cpu: bool) -> Vec<(usize, CpuSet)> {
    let mut all = Vec::new();
    for (cache, cpus) in seats.iter().zip(&seating.by_cache) {
        for (members, cpu) in cpus.iter().zip(&cache.cpus) {
            let whole = || cache.cpus.iter().map(|cpu| cpu.0).collect();
            let set: CpuSet = if one_cpu { [cpu.0].into_iter().collect() } else { whole() };
            all.extend(members.iter().map(|&member| (member, set.clone())));
        }
    }
    all.sort_by_key(|(member, _)| *member);
    all
}

pub(super) fn by_matrix(
    parameters: &str,
    solve: fn(&solvers::Costs, &Seats) -> Solved,
) -> Result<Box<dyn Policy>, String> {
    let parameters = Parameters::parse(parameters)?;
    Ok(Box::new(ByMatrix { parameters, solve, rows: BTreeMap::new(), placed: BTreeMap::new() }))
}

/// See the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, String> {
    by_matrix(parameters, solvers::best)
}
