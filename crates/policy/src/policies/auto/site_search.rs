//! Search on one site: partitions of its cache, and gangs of its tasks.

use std::cell::Cell;

use super::layout::{GangRotation, PartitionMembers, processes};
use super::problem::PlanningProblem;
use super::score::{LayoutScore, SiteScorer};
use super::score_cache::{ErrorDraw, ScoreCache};
use super::search::{PlanComparator, TASKS_OF_ONE};
use crate::gang_quantum::{MAX_WAIT_NS, max_quantum_ns};
use crate::partition::units::PartitionUnits;
use crate::solvers::sizing::{CostAggregate, UnitClaim, exact};

/// Tasks of one site, for which partitions and a rotation are searched.
pub struct SiteTasks<'a> {
    pub scene: &'a PlanningProblem,
    pub site: usize,
    pub members: &'a [usize],
    pub apart: &'a [f64],
    /// Evaluations left; a score without turns costs one.
    pub effort: &'a Cell<usize>,
    pub memo: &'a ScoreCache,
}

/// Cost of a score with turns, which composes many moments.
const TURNS_COST: usize = 8;
/// Largest number of sizes that are improved by moving single units.
const CLIMBS: usize = 24;
/// Time slices of gangs, in milliseconds.
const TURNS_MS: [u64; 3] = [20, 50, 100];
const HURRIED_NS: u64 = 50_000_000;
/// With more processes, no partition for each is tried.
const MAX_EXCLUSIVE: usize = 12;
/// Smallest CPU demand of a gang's members: a task that sleeps more leaves its turn unused.
const MIN_GANG_DEMAND: f64 = 0.8;
/// The exact solver's steps grow with the square of the units.
const MAX_EXACT_UNITS: u32 = 64;

impl SiteTasks<'_> {
    pub fn score(&self, cut: &[PartitionMembers], turns: Option<&GangRotation>) -> LayoutScore {
        let cost = if turns.is_some() { TURNS_COST } else { 1 };
        let cost = cost * (1 + self.members.len() / TASKS_OF_ONE);
        self.effort.set(self.effort.get().saturating_sub(cost));
        let (scene, site, members, apart) = (self.scene, self.site, self.members, self.apart);
        SiteScorer { scene, site, members, apart, cut, turns }.score(&ErrorDraw::default(), self.memo)
    }

    /// The best partitions of this cache; empty = none is better than sharing all of it.
    pub fn best_cut(&self, judge: &PlanComparator, turns: Option<&GangRotation>) -> Vec<PartitionMembers> {
        let Some(divided) = self.scene.sites[self.site].divided else { return Vec::new() };
        let own = processes(self.scene, self.members);
        if own.len() < 2 || self.effort.get() == 0 {
            return Vec::new();
        }
        let mut best = (judge.key(self.score(&[], turns)), Vec::new());
        let mut consider = |cut: Vec<PartitionMembers>| {
            if self.effort.get() == 0 {
                return;
            }
            let key = judge.key(self.score(&cut, turns));
            if key > best.0 + 1e-9 {
                best = (key, cut);
            }
        };
        self.pools(&divided, &own).into_iter().for_each(&mut consider);
        if own.len() <= MAX_EXCLUSIVE {
            self.exclusive(&divided, &own).into_iter().for_each(&mut consider);
        }
        if best.1.is_empty() { best.1 } else { self.climb(judge, turns, &divided, best) }
    }

    /// Processes by their slowdown with the least share over all of the cache; smallest first.
    fn by_need(&self, divided: &PartitionUnits, own: &[(cachemate_core::ProcessId, Vec<usize>)]) -> Vec<usize> {
        let bytes = self.scene.sites[self.site].bytes;
        let least = bytes * f64::from(divided.min_units()) / f64::from(divided.units());
        let need = |tasks: &[usize]| {
            let one = |&at: &usize| {
                let program = self.scene.tasks[at].program.as_ref()?;
                Some(program.cycles(least, 0.0, 0.0) / program.cycles(bytes, 0.0, 0.0))
            };
            tasks.iter().filter_map(one).fold(0.0, f64::max)
        };
        let needs: Vec<f64> = own.iter().map(|(_, tasks)| need(tasks)).collect();
        let mut order: Vec<usize> = (0..own.len()).collect();
        order.sort_by(|&a, &b| needs[a].total_cmp(&needs[b]).then(a.cmp(&b)));
        order
    }

    /// Processes that need space least share a small partition, all others the rest.
    fn pools(
        &self,
        divided: &PartitionUnits,
        own: &[(cachemate_core::ProcessId, Vec<usize>)],
    ) -> Vec<Vec<PartitionMembers>> {
        let order = self.by_need(divided, own);
        let (units, least) = (divided.units(), divided.min_units());
        if divided.max_groups() < 2 || units < 2 * least {
            return Vec::new();
        }
        let mut sizes: Vec<u32> = [least, 2 * least, units / 8, units / 4, units / 2].to_vec();
        sizes.retain(|&size| size >= least && size + least <= units);
        sizes.sort_unstable();
        sizes.dedup();
        let group = |of: &[usize], units: u32| {
            let mut members: Vec<usize> = of.iter().flat_map(|&at| own[at].1.iter().copied()).collect();
            members.sort_unstable();
            PartitionMembers { members, units }
        };
        let with = |count: usize| {
            let (pool, rest) = order.split_at(count);
            sizes.iter().map(move |&size| vec![group(rest, units - size), group(pool, size)]).collect::<Vec<_>>()
        };
        (1..own.len()).flat_map(with).collect()
    }

    /// A partition for each process, by the exact solver; and the same with insensitive processes pooled in one.
    fn exclusive(
        &self,
        divided: &PartitionUnits,
        own: &[(cachemate_core::ProcessId, Vec<usize>)],
    ) -> Vec<Vec<PartitionMembers>> {
        let (units, least) = (divided.units(), divided.min_units());
        if units > MAX_EXACT_UNITS {
            return Vec::new();
        }
        let bytes = self.scene.sites[self.site].bytes;
        let cost = |tasks: &[usize], held: u32| -> f64 {
            let space = bytes * f64::from(held) / f64::from(units) / tasks.len().max(1) as f64;
            let one = |&at: &usize| {
                let program = self.scene.tasks[at].program.as_ref()?;
                Some(
                    -program.goal.priority * program.cpu_demand * program.alone(bytes)
                        / program.cycles(space, 0.0, 0.0),
                )
            };
            tasks.iter().filter_map(one).sum()
        };
        let order = self.by_need(divided, own);
        let mut candidates = Vec::new();
        for pooled in 0..own.len().saturating_sub(1) {
            let (pool, rest) = order.split_at(pooled);
            let mut groups: Vec<Vec<usize>> = rest.iter().map(|&at| own[at].1.clone()).collect();
            groups.sort_by_key(|members| members[0]);
            if !pool.is_empty() {
                groups.push(pool.iter().flat_map(|&at| own[at].1.iter().copied()).collect());
            }
            let count = groups.len() as u32;
            if count > divided.max_groups() || count * least > units {
                continue;
            }
            let claim = |tasks: &Vec<usize>| UnitClaim {
                costs: (1..=units).map(|held| cost(tasks, held)).collect(),
                min_units: least,
            };
            let claims: Vec<UnitClaim> = groups.iter().map(claim).collect();
            let Ok(sizes) = exact(&claims, units, CostAggregate::Sum) else { continue };
            candidates.push(
                groups.into_iter().zip(sizes).map(|(members, units)| PartitionMembers { members, units }).collect(),
            );
        }
        candidates
    }

    /// Moves units between partitions as long as that helps.
    fn climb(
        &self,
        judge: &PlanComparator,
        turns: Option<&GangRotation>,
        divided: &PartitionUnits,
        mut best: (f64, Vec<PartitionMembers>),
    ) -> Vec<PartitionMembers> {
        let mut step = (divided.units() / 8).max(1);
        for _ in 0..CLIMBS {
            if self.effort.get() == 0 {
                break;
            }
            let mut better = None;
            for from in 0..best.1.len() {
                for to in (0..best.1.len()).filter(|&to| to != from) {
                    if best.1[from].units < divided.min_units() + step {
                        continue;
                    }
                    let mut cut = best.1.clone();
                    cut[from].units -= step;
                    cut[to].units += step;
                    let key = judge.key(self.score(&cut, turns));
                    if key > better.as_ref().map_or(best.0, |(key, _): &(f64, Vec<PartitionMembers>)| *key) + 1e-9 {
                        better = Some((key, cut));
                    }
                }
            }
            match better {
                Some(found) => best = found,
                None if step > 1 => step /= 2,
                None => break,
            }
        }
        best.1
    }

    /// The best gangs; `None` = none are better than single tasks in turn. In a hurry, only the most promising are
    /// tried.
    pub fn best_turns(&self, judge: &PlanComparator, cut: &[PartitionMembers], hurry: bool) -> Option<GangRotation> {
        let cpus = self.scene.sites[self.site].cpus.count() as usize;
        let program = |&at: &usize| self.scene.tasks[at].program.as_ref();
        let fit = self.members.iter().all(|&at| self.scene.tasks[at].movable)
            && self.members.iter().filter_map(program).all(|program| program.cpu_demand >= MIN_GANG_DEMAND);
        if self.members.len() <= cpus || !fit || cpus < 2 {
            return None;
        }
        let mut best = (judge.key(self.score(cut, None)), None);
        let kinds = if hurry { 2 } else { usize::MAX };
        for slice_ns in TURNS_MS.map(|ms| ms * 1_000_000).into_iter().filter(|ns| !hurry || *ns == HURRIED_NS) {
            if self.scene.shortest_slice_ns.is_none_or(|shortest| shortest > slice_ns) {
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
        turns.map(|turns| if hurry { turns } else { self.regang(judge, cut, key, turns) })
    }

    /// Groups similar tasks, by pressure and by space, each filled up or evened out.
    fn gangs(&self, cpus: usize) -> Vec<Vec<Vec<usize>>> {
        let bytes = self.scene.sites[self.site].bytes;
        let by = |of: &dyn Fn(usize) -> f64| {
            let mut order = self.members.to_vec();
            order.sort_by(|&a, &b| of(a).total_cmp(&of(b)).then(a.cmp(&b)));
            order
        };
        let program = |index: usize| self.scene.tasks[index].program.as_ref();
        let pressure = |index: usize| program(index).map_or(0.0, |one| one.misses(bytes) / one.alone(bytes));
        let keeps =
            |index: usize| program(index).map_or(0.0, |one| one.cycles(bytes / 8.0, 0.0, 0.0) / one.alone(bytes));
        let filled = |order: &[usize]| order.chunks(cpus).map(<[usize]>::to_vec).collect::<Vec<_>>();
        let even = |order: &[usize]| {
            let gangs = order.len().div_ceil(cpus);
            order.chunks(order.len().div_ceil(gangs)).map(<[usize]>::to_vec).collect::<Vec<_>>()
        };
        // One task that needs much space in each gang, with tasks that press little.
        let dealt = |order: &[usize]| {
            let count = order.len().div_ceil(cpus);
            let mut gangs = vec![Vec::new(); count];
            for (nth, &index) in order.iter().rev().enumerate() {
                let round = nth / count;
                gangs[if round.is_multiple_of(2) { nth % count } else { count - 1 - nth % count }].push(index);
            }
            gangs
        };
        let (pressing, keeping) = (by(&pressure), by(&keeps));
        vec![filled(&pressing), filled(&keeping), even(&pressing), even(&keeping), dealt(&keeping), dealt(&pressing)]
    }

    /// Exchanges members of gangs as long as that helps.
    fn regang(
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
