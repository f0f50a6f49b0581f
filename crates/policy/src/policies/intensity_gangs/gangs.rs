//! Forms gangs on one shared cache, chooses the length of their turns, and decides whether they pay off.

use cachemate_core::{CpuSet, Gang, GangSchedule, Plan, Reason, TaskId, TaskSample, View};

use super::{Parameters, describe_known_rate, explanation};
use crate::gang_quantum::{self, GangCandidate};
use crate::solvers::{CostMatrix, Seats, Solution, best_assignment};

/// Length of a gang's turn if no footprint is known; refilling a footprint of a few MiB takes a tenth of it.
const USUAL_SLICE_NS: u64 = 50_000_000;

/// A cache with more active tasks than CPUs, with the slowdown of each task beside each other one.
pub(super) struct OvercommittedCache<'a> {
    pub view: &'a View<'a>,
    pub cpus: &'a CpuSet,
    pub tasks: &'a [&'a TaskSample],
    pub active: &'a [TaskId],
    pub costs: &'a CostMatrix,
}

/// Mean slowdowns of the active tasks, without and with gangs.
#[derive(Clone, Copy)]
struct MeanSlowdowns {
    left_alone: f64,
    ganged: f64,
}

impl MeanSlowdowns {
    fn numbers(self) -> Vec<(String, f64)> {
        vec![
            ("ungrouped_mean_slowdown".to_string(), self.left_alone),
            ("ganged_mean_slowdown".to_string(), self.ganged),
        ]
    }

    fn text(self) -> String {
        format!("{:.0} % slower without gangs, {:.0} % in gangs", 100.0 * self.left_alone, 100.0 * self.ganged)
    }
}

impl OvercommittedCache<'_> {
    /// Adds the gangs to the plan if they pay off, and a reason in either case.
    pub fn write_gangs(&self, parameters: &Parameters, plan: &mut Plan, reasons: &mut Vec<Reason>) {
        plan.affinity.clear();
        plan.gangs.clear();
        if self.tasks.len() > parameters.max_ganged {
            reasons.push(explanation(
                &[],
                format!("{} programs are too many for gangs on one cache", self.tasks.len()),
                Vec::new(),
            ));
            return;
        }
        let seats = self.cpus.count() as usize;
        let turn_count = self.active.len().div_ceil(seats);
        let solution = best_assignment(self.costs, &Seats { cpus_per_cache: vec![self.cpus.count(); turn_count] });
        let left_alone = self.unplaced_intensity();
        let mean_slowdowns = |ganged| MeanSlowdowns { left_alone, ganged };
        let without_refills = mean_slowdowns(solution.total / self.active.len() as f64);
        if left_alone - without_refills.ganged < parameters.min_gain {
            let text = format!("gangs would not pay off: on average {}, by the probes", without_refills.text());
            reasons.push(explanation(&[], text, without_refills.numbers()));
            return;
        }
        let gangs = self.order_gangs(&solution);
        let members = self.gang_candidates(&solution);
        let at_most = left_alone - parameters.min_gain;
        let slice_ns = match parameters.slice_ns {
            Some(stated) => stated,
            None => match gang_quantum::quantum_ns(&members, at_most, gangs.len(), parameters.max_wait_ns) {
                Ok(law) => law.unwrap_or(USUAL_SLICE_NS),
                Err(long) => {
                    reasons.push(explanation(&[], long.to_string(), without_refills.numbers()));
                    return;
                }
            },
        };
        let slice_ns = slice_ns.max(self.view.capabilities.min_slice_ns.unwrap_or(0));
        let means = mean_slowdowns(gang_quantum::mean_slowdown(&members, slice_ns as f64));
        for gang in &gangs {
            let member_texts: Vec<String> = (0..gang.len())
                .map(|index| format!("{{{index}}}{}", describe_known_rate(self.view, gang[index])))
                .collect();
            let turns_ms = slice_ns as f64 / 1e6;
            let text = format!(
                "{} run as a gang, in time slices of {turns_ms:.0} ms: on average {}",
                member_texts.join(" and "),
                means.text()
            );
            reasons.push(explanation(gang, text, means.numbers()));
        }
        let gang =
            |members: Vec<TaskId>| Gang { members: members.into_iter().map(|task| (task, None)).collect(), slices: 1 };
        plan.gangs =
            vec![GangSchedule { cpus: self.cpus.clone(), slice_ns, gangs: gangs.into_iter().map(gang).collect() }];
    }

    /// Returns the mean slowdown of the active tasks without gangs, for which each task meets each of the others
    /// equally often on each of the other CPUs.
    fn unplaced_intensity(&self) -> f64 {
        let n = self.active.len();
        let total_cost: f64 = (0..n).map(|i| (0..n).filter(|j| *j != i).map(|j| self.costs[i][j]).sum::<f64>()).sum();
        total_cost * (self.cpus.count() - 1) as f64 / (n as f64 - 1.0) / n as f64
    }

    /// Returns the gangs of the solution. Quiet tasks first fill free CPUs, and then get turns of their own.
    fn order_gangs(&self, solution: &Solution) -> Vec<Vec<TaskId>> {
        let seats = self.cpus.count() as usize;
        let mut gangs: Vec<Vec<TaskId>> =
            solution.seating.by_cache.iter().map(|gang| tasks_of_gang(gang, self.active)).collect();
        gangs.retain(|gang| !gang.is_empty());
        let quiet = self.tasks.iter().map(|task| task.task).filter(|task| !self.active.contains(task));
        for task in quiet {
            match gangs.iter_mut().find(|gang| gang.len() < seats) {
                Some(gang) => gang.push(task),
                None => gangs.push(vec![task]),
            }
        }
        gangs
    }

    /// Returns the slowdown of each active task in its gang, and the time that its refill takes.
    fn gang_candidates(&self, solution: &Solution) -> Vec<GangCandidate> {
        let cache = self.view.topology.last_level_caches().find(|cache| self.cpus.is_subset(&cache.cpus));
        let refill_ns = |task: &TaskId| {
            let profile = self.view.profiles.get(task)?;
            gang_quantum::refill_ns(profile, cache?, self.view)
        };
        let suffered = solution.seating.costs_by_program(self.costs);
        let candidate_of = |(task, slowdown): (&TaskId, f64)| GangCandidate { refill_ns: refill_ns(task), slowdown };
        self.active.iter().zip(suffered).map(candidate_of).collect()
    }
}

fn tasks_of_gang(cpus: &[Vec<usize>], active: &[TaskId]) -> Vec<TaskId> {
    let mut indices: Vec<usize> = cpus.iter().flatten().copied().collect();
    indices.sort_unstable();
    indices.into_iter().map(|member| active[member]).collect()
}
