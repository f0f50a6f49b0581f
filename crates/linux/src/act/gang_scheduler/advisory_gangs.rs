//! Gangs from pairwise penalties, if a plan has no schedule of its own.
//!
//! Problem: the scheduler chooses among gangs and not among tasks. Method: tasks are divided into as many gangs as the
//! CPUs need turns, with clashing tasks in different gangs; a turn may be filled by any task that clashes with no
//! member of its gang. Properties: if there are no more tasks than CPUs, there is one gang and no task waits, because
//! penalties are advisory; equal input yields equal gangs; ties by arrival. Greedy: the task that loses most in its
//! second-best gang chooses first, which separates two camps of equal size. The optimal division is a graph coloring,
//! which is hard.

use std::collections::BTreeMap;

use super::NumberedCache;
use super::compose::{AdvisoryGangs, GangMember, MAX_GANGS};
use crate::kernel::ThreadKey;

/// The shortest typical turn (docs/sched-ext.md), because advice has no footprints that would require a longer one.
const ADVISORY_TURN_US: u64 = 20_000;

/// Gangs of `members` (in order of arrival) by their penalties. `None` if all fit at once, or no two of them clash.
pub(crate) fn build_advisory_gangs(
    members: &[GangMember],
    penalties: &BTreeMap<(ThreadKey, ThreadKey), f64>,
    caches: &[NumberedCache],
) -> Option<AdvisoryGangs> {
    let cpus: usize = caches.iter().map(|cache| cache.cpus.count() as usize).sum();
    let gang_count = members.len().div_ceil(cpus.max(1)).min(MAX_GANGS);
    if gang_count < 2 || penalties.values().all(|penalty| *penalty <= 0.0) {
        return None;
    }
    let penalty_between = |a: ThreadKey, b: ThreadKey| {
        penalties
            .get(&(a, b))
            .or_else(|| penalties.get(&(b, a)))
            .copied()
            .unwrap_or(0.0)
    };
    let total_penalty = |gang_member: &GangMember| {
        members
            .iter()
            .map(|other| penalty_between(gang_member.0, other.0))
            .sum::<f64>()
    };
    let mut unassigned_tasks: Vec<UnassignedTask> = members
        .iter()
        .map(|gang_member| UnassignedTask {
            member: *gang_member,
            total_penalty: total_penalty(gang_member),
            gang_penalties: vec![0.0; gang_count],
        })
        .collect();
    let max_gang_len = members.len().div_ceil(gang_count);
    let mut gangs: Vec<Vec<GangMember>> = vec![Vec::new(); gang_count];
    while !unassigned_tasks.is_empty() {
        let open_gangs: Vec<usize> = (0..gang_count)
            .filter(|gang| gangs[*gang].len() < max_gang_len)
            .collect();
        let compare_urgency = |a: &UnassignedTask, b: &UnassignedTask| {
            let regret = a.regret(&open_gangs).total_cmp(&b.regret(&open_gangs));
            regret.then(a.total_penalty.total_cmp(&b.total_penalty))
        };
        // Reversed to choose the first of equals, because `max_by` returns the last.
        let next_index = (0..unassigned_tasks.len())
            .rev()
            .max_by(|a, b| compare_urgency(&unassigned_tasks[*a], &unassigned_tasks[*b]))
            .expect("not empty");
        let next_task = unassigned_tasks.remove(next_index);
        let cheapest_gang = open_gangs
            .iter()
            .copied()
            .min_by(|a, b| next_task.gang_penalties[*a].total_cmp(&next_task.gang_penalties[*b]));
        let gang = cheapest_gang.expect("all gangs together have a place for every member");
        unassigned_tasks.iter_mut().for_each(|other| {
            other.gang_penalties[gang] += penalty_between(next_task.member.0, other.member.0)
        });
        gangs[gang].push(next_task.member);
    }
    Some(AdvisoryGangs {
        turn_us: ADVISORY_TURN_US,
        caches: caches.iter().map(|cache| cache.number).collect(),
        gangs,
    })
}

/// A task without a gang yet.
struct UnassignedTask {
    member: GangMember,
    /// Sum of its penalties.
    total_penalty: f64,
    /// Penalties of the task with the members of each gang.
    gang_penalties: Vec<f64>,
}

impl UnassignedTask {
    /// Cost of the second-best gang over the best.
    fn regret(&self, open_gangs: &[usize]) -> f64 {
        let mut costs: Vec<f64> = open_gangs
            .iter()
            .map(|gang| self.gang_penalties[*gang])
            .collect();
        costs.sort_by(f64::total_cmp);
        if let [best, second, ..] = costs[..] {
            second - best
        } else {
            0.0
        }
    }
}
