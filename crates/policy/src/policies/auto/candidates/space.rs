//! Space: partitions of a cache, from a small pool for tasks that need little to one partition for each process.

use super::PlanComparator;
use super::PlanSearch;
use super::site::SiteTasks;
use crate::partition::units::PartitionUnits;
use crate::policies::auto::model::layout::{GangRotation, PartitionMembers, SiteLayout, processes};
use crate::solvers::sizing::{CostAggregate, UnitClaim, allocate_exactly};

/// Largest number of sets of sizes that are improved by moving single units.
const CLIMBS: usize = 24;
/// With more processes than this, partitions for each process are not tried.
const MAX_EXCLUSIVE: usize = 12;
/// The steps of the exact solver grow with the square of the units.
const MAX_EXACT_UNITS: u32 = 64;

impl PlanSearch<'_> {
    pub(super) fn with_cuts(&self, layout: &SiteLayout) -> SiteLayout {
        self.change_each_site(layout, |search, site_tasks, changed| {
            changed.partitions[site_tasks.site] = site_tasks.best_cut(&search.judge, None);
        })
    }
}

impl SiteTasks<'_> {
    /// Returns the best partitions of this cache; empty if none is better than sharing the whole cache.
    pub fn best_cut(&self, judge: &PlanComparator, turns: Option<&GangRotation>) -> Vec<PartitionMembers> {
        let Some(divided) = self.problem.sites[self.site].divided else { return Vec::new() };
        let site_processes = processes(self.problem, self.members);
        if site_processes.len() < 2 || self.effort.get() == 0 {
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
        self.pools(&divided, &site_processes).into_iter().for_each(&mut consider);
        if site_processes.len() <= MAX_EXCLUSIVE {
            self.exclusive(&divided, &site_processes).into_iter().for_each(&mut consider);
        }
        if best.1.is_empty() { best.1 } else { self.climb(judge, turns, &divided, best) }
    }

    /// Orders processes by their slowdown with the smallest share relative to the whole cache, smallest first.
    fn order_by_need(
        &self,
        divided: &PartitionUnits,
        processes: &[(cachemate_core::ProcessId, Vec<usize>)],
    ) -> Vec<usize> {
        let bytes = self.problem.sites[self.site].bytes;
        let minimum = bytes * f64::from(divided.min_units()) / f64::from(divided.units());
        let need = |tasks: &[usize]| {
            let task_need = |&at: &usize| {
                let program = self.problem.tasks[at].program.as_ref()?;
                Some(program.cycles(minimum, 0.0, 0.0) / program.cycles(bytes, 0.0, 0.0))
            };
            tasks.iter().filter_map(task_need).fold(0.0, f64::max)
        };
        let needs: Vec<f64> = processes.iter().map(|(_, tasks)| need(tasks)).collect();
        let mut order: Vec<usize> = (0..processes.len()).collect();
        order.sort_by(|&a, &b| needs[a].total_cmp(&needs[b]).then(a.cmp(&b)));
        order
    }

    /// Puts the processes that need space least into a small partition, and all others into the rest.
    fn pools(
        &self,
        divided: &PartitionUnits,
        processes: &[(cachemate_core::ProcessId, Vec<usize>)],
    ) -> Vec<Vec<PartitionMembers>> {
        let order = self.order_by_need(divided, processes);
        let (units, least) = (divided.units(), divided.min_units());
        if divided.max_groups() < 2 || units < 2 * least {
            return Vec::new();
        }
        let mut sizes: Vec<u32> = [least, 2 * least, units / 8, units / 4, units / 2].to_vec();
        sizes.retain(|&size| size >= least && size + least <= units);
        sizes.sort_unstable();
        sizes.dedup();
        let group = |group_tasks: &[usize], units: u32| {
            let mut members: Vec<usize> =
                group_tasks.iter().flat_map(|&index| processes[index].1.iter().copied()).collect();
            members.sort_unstable();
            PartitionMembers { members, units }
        };
        let with = |count: usize| {
            let (pool, rest) = order.split_at(count);
            sizes.iter().map(move |&size| vec![group(rest, units - size), group(pool, size)]).collect::<Vec<_>>()
        };
        (1..processes.len()).flat_map(with).collect()
    }

    /// Returns a partition for each process, by the exact solver, and the same with insensitive processes pooled in one
    /// partition.
    fn exclusive(
        &self,
        divided: &PartitionUnits,
        processes: &[(cachemate_core::ProcessId, Vec<usize>)],
    ) -> Vec<Vec<PartitionMembers>> {
        let (units, least) = (divided.units(), divided.min_units());
        if units > MAX_EXACT_UNITS {
            return Vec::new();
        }
        let bytes = self.problem.sites[self.site].bytes;
        let cost = |tasks: &[usize], held: u32| -> f64 {
            let space = bytes * f64::from(held) / f64::from(units) / tasks.len().max(1) as f64;
            let task_cost = |&at: &usize| {
                let program = self.problem.tasks[at].program.as_ref()?;
                Some(
                    -program.goal.priority * program.cpu_demand * program.solo_cycles(bytes)
                        / program.cycles(space, 0.0, 0.0),
                )
            };
            tasks.iter().filter_map(task_cost).sum()
        };
        let order = self.order_by_need(divided, processes);
        let mut candidates = Vec::new();
        for pooled in 0..processes.len().saturating_sub(1) {
            let (pool, rest) = order.split_at(pooled);
            let mut groups: Vec<Vec<usize>> = rest.iter().map(|&index| processes[index].1.clone()).collect();
            groups.sort_by_key(|members| members[0]);
            if !pool.is_empty() {
                groups.push(pool.iter().flat_map(|&index| processes[index].1.iter().copied()).collect());
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
            let Ok(sizes) = allocate_exactly(&claims, units, CostAggregate::Sum) else { continue };
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
}
