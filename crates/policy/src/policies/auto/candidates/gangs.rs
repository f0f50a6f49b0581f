//! Gangs: tasks of one cache that fit together run in turns.

use super::PlanComparator;
use super::PlanSearch;
use super::site::SiteTasks;
use crate::gang_quantum::{MAX_WAIT_NS, max_quantum_ns};
use crate::policies::auto::model::layout::{GangRotation, PartitionMembers, SiteLayout};

/// Lengths of gangs' turns, in milliseconds.
const TURNS_MS: [u64; 3] = [20, 50, 100];
const HURRIED_NS: u64 = 50_000_000;
/// Smallest CPU demand of a gang's members: a task that sleeps more leaves its turn unused.
const MIN_GANG_DEMAND: f64 = 0.8;

impl PlanSearch<'_> {
    pub(super) fn with_turns(&self, layout: &SiteLayout) -> SiteLayout {
        self.change_each_site(layout, |search, site_tasks, changed| {
            changed.rotations[site_tasks.site] = site_tasks.best_turns(&search.judge, &[], false);
        })
    }
}

impl SiteTasks<'_> {
    /// Returns the best gangs; `None` if none are better than single tasks in turn. In a hurry, only the most promising
    /// gangs are tried.
    pub fn best_turns(&self, judge: &PlanComparator, cut: &[PartitionMembers], hurry: bool) -> Option<GangRotation> {
        let cpus = self.problem.sites[self.site].cpus.count() as usize;
        let program = |&at: &usize| self.problem.tasks[at].program.as_ref();
        let fit = self.members.iter().all(|&index| self.problem.tasks[index].movable)
            && self.members.iter().filter_map(program).all(|program| program.cpu_demand >= MIN_GANG_DEMAND);
        if self.members.len() <= cpus || !fit || cpus < 2 {
            return None;
        }
        let mut best = (judge.key(self.score(cut, None)), None);
        let kinds = if hurry { 2 } else { usize::MAX };
        for slice_ns in TURNS_MS.map(|ms| ms * 1_000_000).into_iter().filter(|ns| !hurry || *ns == HURRIED_NS) {
            if self.problem.shortest_slice_ns.is_none_or(|shortest| shortest > slice_ns) {
                continue;
            }
            for gangs in self.gangs(cpus).into_iter().take(kinds) {
                if self.effort.get() == 0 {
                    break;
                }
                if slice_ns > max_quantum_ns(gangs.len(), MAX_WAIT_NS) {
                    continue;
                }
                let turns = GangRotation { slice_ns, gangs };
                let key = judge.key(self.score(cut, Some(&turns)));
                if key > best.0 + 1e-9 {
                    best = (key, Some(turns));
                }
            }
        }
        let (key, turns) = best;
        turns.map(|turns| if hurry { turns } else { self.reassign_gang(judge, cut, key, turns) })
    }

    /// Groups similar tasks, by pressure and by space, and completes or evens out the groups.
    fn gangs(&self, cpus: usize) -> Vec<Vec<Vec<usize>>> {
        let bytes = self.problem.sites[self.site].bytes;
        let sorted_by = |value: &dyn Fn(usize) -> f64| {
            let mut order = self.members.to_vec();
            order.sort_by(|&a, &b| value(a).total_cmp(&value(b)).then(a.cmp(&b)));
            order
        };
        let program = |at: usize| self.problem.tasks[at].program.as_ref();
        let pressure = |at: usize| program(at).map_or(0.0, |model| model.misses(bytes) / model.solo_cycles(bytes));
        let keeps =
            |at: usize| program(at).map_or(0.0, |model| model.cycles(bytes / 8.0, 0.0, 0.0) / model.solo_cycles(bytes));
        let filled = |order: &[usize]| order.chunks(cpus).map(<[usize]>::to_vec).collect::<Vec<_>>();
        let even = |order: &[usize]| {
            let gangs = order.len().div_ceil(cpus);
            order.chunks(order.len().div_ceil(gangs)).map(<[usize]>::to_vec).collect::<Vec<_>>()
        };
        // Each gang has one task that needs much space, together with tasks of low pressure.
        let dealt = |order: &[usize]| {
            let count = order.len().div_ceil(cpus);
            let mut gangs = vec![Vec::new(); count];
            for (nth, &at) in order.iter().rev().enumerate() {
                let round = nth / count;
                gangs[if round.is_multiple_of(2) { nth % count } else { count - 1 - nth % count }].push(at);
            }
            gangs
        };
        let (pressing, keeping) = (sorted_by(&pressure), sorted_by(&keeps));
        vec![filled(&pressing), filled(&keeping), even(&pressing), even(&keeping), dealt(&keeping), dealt(&pressing)]
    }

    /// Exchanges members between gangs as long as that helps.
    fn reassign_gang(
        &self,
        judge: &PlanComparator,
        cut: &[PartitionMembers],
        mut key: f64,
        mut turns: GangRotation,
    ) -> GangRotation {
        for _ in 0..2 {
            let before = key;
            for a in 0..turns.gangs.len() {
                for b in a + 1..turns.gangs.len() {
                    for x in 0..turns.gangs[a].len() {
                        for y in 0..turns.gangs[b].len() {
                            if self.effort.get() == 0 {
                                return turns;
                            }
                            let mut other = turns.clone();
                            (other.gangs[a][x], other.gangs[b][y]) = (turns.gangs[b][y], turns.gangs[a][x]);
                            let new_key = judge.key(self.score(cut, Some(&other)));
                            if new_key > key + 1e-9 {
                                (key, turns) = (new_key, other);
                            }
                        }
                    }
                }
            }
            if key <= before {
                break;
            }
        }
        turns
    }
}
