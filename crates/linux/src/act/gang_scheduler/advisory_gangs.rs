//! Gangs from pairwise penalties, if a plan has no schedule of its own.
//!
//! Problem: the scheduler chooses among gangs and not among tasks. Method: tasks are divided into as many gangs as the
//! CPUs need turns, with clashing tasks in different gangs; a turn may be filled by any task that clashes with no
//! member of its gang. Properties: with no more tasks than CPUs there is one gang and no task waits, because advice is
//! never a ban; equal input yields equal gangs; ties by arrival. Greedy: the task that loses most in its second-best
//! gang chooses first, which separates two camps of equal size. The optimal division is a graph coloring, which is
//! hard.

use std::collections::BTreeMap;

use super::compose::{AdvisoryGangs, GangMember, MAX_GANGS};
use super::message::NumberedCache;
use crate::kernel::ThreadKey;

/// The shortest typical turn (docs/sched-ext.md), because advice has no footprints that would require a longer one.
const TURN_US: u64 = 20_000;

/// Gangs of `members` (in order of arrival) by their penalties. `None` if all fit at once, or no two of them clash.
pub(crate) fn advised_gangs(
    members: &[GangMember],
    penalties: &BTreeMap<(ThreadKey, ThreadKey), f64>,
    caches: &[NumberedCache],
) -> Option<AdvisoryGangs> {
    let cpus: usize = caches.iter().map(|cache| cache.cpus.count() as usize).sum();
    let count = members.len().div_ceil(cpus.max(1)).min(MAX_GANGS);
    if count < 2 || penalties.values().all(|penalty| *penalty <= 0.0) {
        return None;
    }
    let penalty_between =
        |a: ThreadKey, b: ThreadKey| penalties.get(&(a, b)).or_else(|| penalties.get(&(b, a))).copied().unwrap_or(0.0);
    let burden =
        |gang_member: &GangMember| members.iter().map(|other| penalty_between(gang_member.0, other.0)).sum::<f64>();
    let mut unassigned: Vec<UnassignedTask> = members
        .iter()
        .map(|gang_member| UnassignedTask {
            member: *gang_member,
            burden: burden(gang_member),
            costs: vec![0.0; count],
        })
        .collect();
    let room = members.len().div_ceil(count);
    let mut gangs: Vec<Vec<GangMember>> = vec![Vec::new(); count];
    while !unassigned.is_empty() {
        let open: Vec<usize> = (0..count).filter(|gang| gangs[*gang].len() < room).collect();
        let urgent = |a: &UnassignedTask, b: &UnassignedTask| {
            let regret = a.regret(&open).total_cmp(&b.regret(&open));
            regret.then(a.burden.total_cmp(&b.burden))
        };
        // Reversed to choose the first of equals, because `max_by` returns the last.
        let next_index =
            (0..unassigned.len()).rev().max_by(|a, b| urgent(&unassigned[*a], &unassigned[*b])).expect("not empty");
        let chosen = unassigned.remove(next_index);
        let cheapest_gang = open.iter().copied().min_by(|a, b| chosen.costs[*a].total_cmp(&chosen.costs[*b]));
        let gang = cheapest_gang.expect("all gangs together have a place for every member");
        unassigned.iter_mut().for_each(|other| other.costs[gang] += penalty_between(chosen.member.0, other.member.0));
        gangs[gang].push(chosen.member);
    }
    Some(AdvisoryGangs { turn_us: TURN_US, caches: caches.iter().map(|cache| cache.number).collect(), gangs })
}

/// A task without a gang yet.
struct UnassignedTask {
    member: GangMember,
    /// Sum of its penalties.
    burden: f64,
    /// Penalties of the task with the members of each gang.
    costs: Vec<f64>,
}

impl UnassignedTask {
    /// Cost of the second-best gang over the best.
    fn regret(&self, open: &[usize]) -> f64 {
        let mut costs: Vec<f64> = open.iter().map(|gang| self.costs[*gang]).collect();
        costs.sort_by(f64::total_cmp);
        if let [best, second, ..] = costs[..] { second - best } else { 0.0 }
    }
}
