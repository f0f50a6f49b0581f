//! Space: partitions of a cache, from a small pool for tasks that need little to one partition for each process.

use cachemate_core::PartitionSupport;
use cachemate_papers::solvers::sizing::{CostAggregate, UnitClaim, allocate_exactly};

use super::PlanSearch;
use super::site::SiteTasks;
use crate::auto::model::layout::{PartitionMembers, SiteLayout, group_by_process};
use crate::auto::model::problem::PlanningProblem;

/// Largest number of sets of sizes that are improved by moving single units.
const MAX_CLIMB_STEPS: usize = 24;
/// With more processes than this, partitions for each process are not tried.
const MAX_EXCLUSIVE_PARTITIONS: usize = 12;
/// Maximum number of units for the exact solver, whose steps grow with the square of the units.
const MAX_EXACT_UNITS: u32 = 64;

/// The layouts in which one partition of a site has 1, 2 or 4 units less, but at most `max_units`, and another one of
/// the site has them more.
pub fn unit_steps(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    max_units: u32,
) -> Vec<SiteLayout> {
    let mut steps = Vec::new();
    for (site, partitions) in layout.partitions.iter().enumerate() {
        let Some(partition_units) = problem.sites[site].partition_units else {
            continue;
        };

        for giver in 0..partitions.len() {
            let spare_units = partitions[giver]
                .units
                .saturating_sub(partition_units.min_units());
            for taker in (0..partitions.len()).filter(|&taker| taker != giver) {
                for units in [4, 2, 1] {
                    if units > max_units.min(spare_units) {
                        continue;
                    }
                    let mut step = layout.clone();
                    step.partitions[site][giver].units -= units;
                    step.partitions[site][taker].units += units;
                    steps.push(step);
                }
            }
        }
    }

    steps
}

impl PlanSearch<'_> {
    pub fn with_best_partitions(&self, layout: &SiteLayout) -> SiteLayout {
        self.divide_sites(layout, 0..self.problem.sites.len())
    }

    /// The layout with the best partitions of these sites.
    pub(super) fn divide_sites(
        &self,
        layout: &SiteLayout,
        sites: impl IntoIterator<Item = usize>,
    ) -> SiteLayout {
        self.refine_each_site(layout, sites, |site_tasks, new_layout| {
            new_layout.partitions[site_tasks.site] = site_tasks.best_partitions();
        })
    }
}

impl SiteTasks<'_> {
    /// The best partitions of this cache; empty if none is better than sharing the whole cache.
    fn best_partitions(&self) -> Vec<PartitionMembers> {
        let Some(partition_units) = self.cache_site().partition_units else {
            return Vec::new();
        };
        let site_processes = group_by_process(self.search.problem, self.members);
        if site_processes.len() < 2 || self.search.is_spent() {
            return Vec::new();
        }

        let mut best_key_and_partitions = (self.key(&[], None), Vec::new());
        let mut consider_partition = |partitions: Vec<PartitionMembers>| {
            if self.search.is_spent() {
                return;
            }
            let key = self.key(&partitions, None);
            if key > best_key_and_partitions.0 + 1e-9 {
                best_key_and_partitions = (key, partitions);
            }
        };
        self.pooled_partitions(&partition_units, &site_processes)
            .into_iter()
            .for_each(&mut consider_partition);

        if site_processes.len() <= MAX_EXCLUSIVE_PARTITIONS {
            self.exclusive_partitions(&partition_units, &site_processes)
                .into_iter()
                .for_each(&mut consider_partition);
        }

        if best_key_and_partitions.1.is_empty() {
            best_key_and_partitions.1
        } else {
            self.move_units(&partition_units, best_key_and_partitions)
        }
    }

    /// Orders processes by their slowdown with the smallest share relative to the whole cache, smallest first.
    fn order_by_need(
        &self,
        partition_units: &PartitionSupport,
        processes: &[(cachemate_core::ProcessId, Vec<usize>)],
    ) -> Vec<usize> {
        let bytes = self.cache_site().bytes;
        let min_bytes =
            bytes * f64::from(partition_units.min_units()) / f64::from(partition_units.units());
        let space_need = |tasks: &[usize]| {
            let task_need = |&index: &usize| {
                let program = self.program(index)?;
                Some(
                    program.cycles_with_bytes(min_bytes, 0.0, 0.0)
                        / program.cycles_with_bytes(bytes, 0.0, 0.0),
                )
            };
            tasks.iter().filter_map(task_need).fold(0.0, f64::max)
        };
        let needs_by_process: Vec<f64> = processes
            .iter()
            .map(|(_, tasks)| space_need(tasks))
            .collect();

        let mut ordered_processes: Vec<usize> = (0..processes.len()).collect();
        ordered_processes.sort_by(|&a, &b| {
            needs_by_process[a]
                .total_cmp(&needs_by_process[b])
                .then(a.cmp(&b))
        });
        ordered_processes
    }

    /// Puts the processes that need space least into a small partition, and all others into the rest.
    fn pooled_partitions(
        &self,
        partition_units: &PartitionSupport,
        processes: &[(cachemate_core::ProcessId, Vec<usize>)],
    ) -> Vec<Vec<PartitionMembers>> {
        let ordered_processes = self.order_by_need(partition_units, processes);
        let (units, min_units) = (partition_units.units(), partition_units.min_units());
        if partition_units.max_shares() < 2 || units < 2 * min_units {
            return Vec::new();
        }

        let mut sizes: Vec<u32> =
            [min_units, 2 * min_units, units / 8, units / 4, units / 2].to_vec();
        sizes.retain(|&size| size >= min_units && size + min_units <= units);
        sizes.sort_unstable();
        sizes.dedup();
        let partition_of = |group_tasks: &[usize], units: u32| {
            let mut members: Vec<usize> = group_tasks
                .iter()
                .flat_map(|&index| processes[index].1.iter().copied())
                .collect();
            members.sort_unstable();
            PartitionMembers { members, units }
        };
        let partitions_with_pool = |count: usize| {
            let (pool, others) = ordered_processes.split_at(count);
            sizes
                .iter()
                .map(move |&size| {
                    vec![partition_of(others, units - size), partition_of(pool, size)]
                })
                .collect::<Vec<_>>()
        };
        (1..processes.len())
            .flat_map(partitions_with_pool)
            .collect()
    }

    /// A partition for each process, by the exact solver, and the same with insensitive processes pooled in one
    /// partition.
    fn exclusive_partitions(
        &self,
        partition_units: &PartitionSupport,
        processes: &[(cachemate_core::ProcessId, Vec<usize>)],
    ) -> Vec<Vec<PartitionMembers>> {
        let (units, min_units) = (partition_units.units(), partition_units.min_units());
        if units > MAX_EXACT_UNITS {
            return Vec::new();
        }

        let bytes = self.cache_site().bytes;
        let cost_of_units = |tasks: &[usize], unit_count: u32| -> f64 {
            let bytes_per_task =
                bytes * f64::from(unit_count) / f64::from(units) / tasks.len().max(1) as f64;
            let task_cost = |&at: &usize| {
                let program = self.program(at)?;
                Some(
                    -program.goal.priority * program.cpu_demand * program.solo_cycles(bytes)
                        / program.cycles_with_bytes(bytes_per_task, 0.0, 0.0),
                )
            };
            tasks.iter().filter_map(task_cost).sum()
        };

        let ordered_processes = self.order_by_need(partition_units, processes);
        let mut candidates = Vec::new();
        for pool_size in 0..processes.len().saturating_sub(1) {
            let (pool, others) = ordered_processes.split_at(pool_size);
            let mut groups: Vec<Vec<usize>> = others
                .iter()
                .map(|&index| processes[index].1.clone())
                .collect();
            groups.sort_by_key(|members| members[0]);
            if !pool.is_empty() {
                groups.push(
                    pool.iter()
                        .flat_map(|&index| processes[index].1.iter().copied())
                        .collect(),
                );
            }
            let group_count = groups.len() as u32;
            if group_count > partition_units.max_shares() || group_count * min_units > units {
                continue;
            }
            let claim_of = |tasks: &Vec<usize>| UnitClaim {
                costs: (1..=units)
                    .map(|units_held| cost_of_units(tasks, units_held))
                    .collect(),
                min_units,
            };
            let claims: Vec<UnitClaim> = groups.iter().map(claim_of).collect();
            let Ok(sizes) = allocate_exactly(&claims, units, CostAggregate::Sum) else {
                continue;
            };
            candidates.push(
                groups
                    .into_iter()
                    .zip(sizes)
                    .map(|(members, units)| PartitionMembers { members, units })
                    .collect(),
            );
        }
        candidates
    }

    /// Moves units between partitions as long as that helps.
    fn move_units(
        &self,
        partition_units: &PartitionSupport,
        mut best: (f64, Vec<PartitionMembers>),
    ) -> Vec<PartitionMembers> {
        let mut step = (partition_units.units() / 8).max(1);
        for _ in 0..MAX_CLIMB_STEPS {
            if self.search.is_spent() {
                break;
            }

            let mut best_step = None;
            for giver in 0..best.1.len() {
                for receiver in (0..best.1.len()).filter(|&receiver| receiver != giver) {
                    if best.1[giver].units < partition_units.min_units() + step {
                        continue;
                    }

                    let mut partitions = best.1.clone();
                    partitions[giver].units -= step;
                    partitions[receiver].units += step;
                    let key = self.key(&partitions, None);
                    if key
                        > best_step
                            .as_ref()
                            .map_or(best.0, |(key, _): &(f64, Vec<PartitionMembers>)| *key)
                            + 1e-9
                    {
                        best_step = Some((key, partitions));
                    }
                }
            }

            match best_step {
                Some(new_best) => best = new_best,
                None if step > 1 => step /= 2,
                None => break,
            }
        }

        best.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::model::score_cache::tests::{site_fixture, task_fixture};

    /// Does a step move units within a site, and does it leave the smallest partition and undivided sites alone?
    #[test]
    fn a_step_moves_units_within_a_site() {
        let tasks = (0..4)
            .map(|id| task_fixture(id, (id / 2) as usize, 0.5))
            .collect();
        let problem = PlanningProblem::undisturbed_problem(
            vec![site_fixture(0, 2), site_fixture(1, 2)],
            tasks,
        );
        let mut layout = SiteLayout::without_partitions(
            &problem,
            (0..4).map(|index| Some(index / 2)).collect(),
            true,
        );
        assert_eq!(unit_steps(&problem, &layout, 4), []);
        let part = |index: usize, units: u32| PartitionMembers {
            members: vec![index],
            units,
        };
        layout.partitions[0] = vec![part(0, 7), part(1, 1)];
        let [step] = &unit_steps(&problem, &layout, 1)[..] else {
            panic!("one partition can give")
        };
        assert_eq!(step.partitions, [vec![part(0, 6), part(1, 2)], Vec::new()]);
        layout.partitions[0] = vec![part(0, 4), part(1, 4)];
        assert_eq!(unit_steps(&problem, &layout, 1).len(), 2);
        assert_eq!(
            unit_steps(&problem, &layout, 4).len(),
            4,
            "one or two units"
        );
    }
}
