//! Placement by memory node.
//!
//! Problem: a task that was moved to another memory node still uses the pages that it left behind (first touch), and
//! each of its misses takes longer. Method: tasks are considered in the order of the time that they would save, largest
//! first. Each goes to the site nearest to its pages that has room, or changes places with a task that loses nothing by
//! it. Properties: pages stay in place; moving them is left to the kernel (`numa_balancing`), and the location of the
//! pages is read again for each search.

use super::PlanSearch;
use crate::policies::auto::model::layout::SiteLayout;
use crate::policies::auto::model::program_model::ProgramModel;

impl PlanSearch<'_> {
    /// Returns a layout in which tasks are nearer to their memory; `None` if no task can be moved nearer.
    pub(super) fn layout_near_memory(&self, default_layout: &SiteLayout) -> Option<SiteLayout> {
        let mut site_by_task = default_layout.site_by_task.clone();
        let mut free_seats = self.seats_per_site();
        for site in site_by_task.iter().flatten() {
            free_seats[*site] = free_seats[*site].saturating_sub(1);
        }
        let movable_tasks = self.movable_tasks();
        let rank_by_remote_share = |&index: &usize| {
            Some((self.remote_cycle_share(index, site_by_task[index]?), index))
                .filter(|(share, _)| *share > 0.0)
        };
        let mut tasks_by_share: Vec<(f64, usize)> = movable_tasks
            .iter()
            .filter_map(rank_by_remote_share)
            .collect();
        tasks_by_share.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for (_, index) in tasks_by_share {
            let Some(current_site) = site_by_task[index] else {
                continue;
            };
            let nearer_sites = (0..free_seats.len()).filter(|&site| {
                self.remote_cycle_share(index, site) < self.remote_cycle_share(index, current_site)
            });
            let better_site = |a: usize, b: usize| {
                let preference_key = |site: usize| {
                    (
                        self.remote_cycle_share(index, site),
                        usize::MAX - free_seats[site],
                    )
                };
                if preference_key(b) < preference_key(a) {
                    b
                } else {
                    a
                }
            };
            if let Some(site) = nearer_sites
                .clone()
                .filter(|&site| free_seats[site] > 0)
                .reduce(better_site)
            {
                (free_seats[site], free_seats[current_site]) =
                    (free_seats[site] - 1, free_seats[current_site] + 1);
                site_by_task[index] = Some(site);
                continue;
            }
            let exchange_partner = |site: usize| {
                let loses_nothing = |&other: &usize| {
                    self.remote_cycle_share(other, current_site)
                        <= self.remote_cycle_share(other, site)
                };
                let mut site_residents = movable_tasks
                    .iter()
                    .copied()
                    .filter(|&resident| site_by_task[resident] == Some(site));
                site_residents
                    .find(loses_nothing)
                    .map(|other| (site, other))
            };
            let exchange = nearer_sites.clone().find_map(exchange_partner);
            if let Some((site, partner)) = exchange {
                (site_by_task[index], site_by_task[partner]) = (Some(site), Some(current_site));
            }
        }
        (site_by_task != default_layout.site_by_task)
            .then(|| SiteLayout::without_partitions(self.problem, site_by_task, true))
    }

    /// Returns the share of its cycles that the task loses on this site, running alone, relative to the site nearest to
    /// its memory.
    fn remote_cycle_share(&self, index: usize, site: usize) -> f64 {
        let (site, program) = (
            &self.problem.sites[site],
            self.problem.tasks[index].program.as_ref(),
        );
        let share_of_program = |program: &ProgramModel| {
            program.cpu_demand
                * program.misses_at(site.bytes)
                * program.far_cycles(site.memory_node)
                / program.solo_cycles(site.bytes)
        };
        program.map_or(0.0, share_of_program)
    }
}

#[cfg(test)]
mod tests {

    use std::collections::BTreeMap;

    use super::super::{AllowedMechanisms, Mechanism};
    use super::*;
    use crate::policies::auto::model::problem::PlanningProblem;
    use crate::policies::auto::model::program_model::MemoryDistance;
    use crate::policies::auto::model::program_model::tests::far_from;
    use crate::policies::auto::model::score::PlanObjective;
    use crate::policies::auto::model::score_cache::ScoreCache;
    use crate::policies::auto::model::score_cache::tests::{site_fixture, task_fixture};

    /// Builds a problem of streams on sites: of each stream, `memory` has the node of its pages and its site.
    fn streams_on_nodes(memory: &[(usize, usize)]) -> PlanningProblem {
        let tasks = memory.iter().enumerate().map(|(id, &(node, on))| {
            let factors = if node == 0 {
                vec![1.0, 2.0]
            } else {
                vec![2.0, 1.0]
            };
            let mut far_task = task_fixture(id as u32, on, 1.5);
            far_task.program = Some(far_from(MemoryDistance {
                factors,
                current_node: on,
            }));
            far_task
        });
        let mut sites = vec![site_fixture(0, 2), site_fixture(1, 2)];
        sites[1].memory_node = 1;
        PlanningProblem::undisturbed_problem(sites, tasks.collect())
    }

    fn search_fixture<'a>(
        problem: &'a PlanningProblem,
        memo: &'a ScoreCache,
        memory_nodes: bool,
    ) -> PlanSearch<'a> {
        let allowed = AllowedMechanisms::from_filter(|mechanism| match mechanism {
            Mechanism::MemoryNodes => memory_nodes,
            Mechanism::Placement | Mechanism::Sharing => true,
            Mechanism::Space | Mechanism::Gangs => false,
        });
        PlanSearch::with_effort(problem, memo, allowed, 500)
    }

    /// Do two tasks that are far from their memory change places, by this mechanism alone and in the joint search, and
    /// do tasks stay if their memory is near?
    #[test]
    fn tasks_move_to_their_memory() {
        let problem_of = |memory: &[(usize, usize)]| streams_on_nodes(memory);
        let crossed = problem_of(&[(1, 0), (0, 1), (0, 0), (1, 1)]);
        let memo = ScoreCache::new(&crossed);
        let default = SiteLayout::from_default_sites(&crossed, &BTreeMap::new());
        let new_layout = search_fixture(&crossed, &memo, true)
            .layout_near_memory(&default)
            .unwrap();
        assert_eq!(new_layout.site_by_task, [1, 0, 0, 1].map(Some));
        let candidates =
            search_fixture(&crossed, &memo, true).find_candidates(&BTreeMap::new(), None);
        let value = |label: &str| {
            candidates
                .iter()
                .find(|candidate| candidate.label == label)
                .unwrap()
                .score
                .objective_value(PlanObjective::WeightedSpeedup)
        };
        // One miss per 67 instructions takes 50 cycles near and 100 far, everything else takes 1 cycle: 1.75 over 2.5
        // for two of four.
        assert!(
            (value("default") - 0.85).abs() < 1e-6 && (value("memory nodes") - 1.0).abs() < 1e-6
        );
        assert!(candidates.iter().all(|candidate| {
            candidate
                .score
                .objective_value(PlanObjective::WeightedSpeedup)
                <= value("memory nodes") + 1e-9
        }));
        let near_problem = problem_of(&[(0, 0), (1, 1), (0, 0)]);
        let (memo, default) = (
            ScoreCache::new(&near_problem),
            SiteLayout::from_default_sites(&near_problem, &BTreeMap::new()),
        );
        assert_eq!(
            search_fixture(&near_problem, &memo, true).layout_near_memory(&default),
            None
        );
        let memo = ScoreCache::new(&crossed);
        let other_candidates =
            search_fixture(&crossed, &memo, false).find_candidates(&BTreeMap::new(), None);
        assert!(
            other_candidates
                .iter()
                .all(|candidate| candidate.mechanism != Some(Mechanism::MemoryNodes))
        );
    }

    /// If another site has room, do no tasks change places, and is no site filled beyond its room?
    #[test]
    fn no_tasks_change_places_if_another_site_has_room() {
        let crossed = streams_on_nodes(&[(1, 0), (1, 0), (1, 1)]);
        let memo = ScoreCache::new(&crossed);
        let default = SiteLayout::from_default_sites(&crossed, &BTreeMap::new());
        let new_layout = search_fixture(&crossed, &memo, true)
            .layout_near_memory(&default)
            .unwrap();
        assert_eq!(
            new_layout
                .site_by_task
                .iter()
                .filter(|home| **home == Some(1))
                .count(),
            2
        );
    }
}
