//! Search after an arrival: newcomers are inserted among the tasks that stay.
//!
//! Each newcomer is tried on every site that has room. Partitions are searched again only on sites that a task joined
//! or left; all other tasks keep the plan in force. Properties: a site whose gangs take turns is left alone, because a
//! newcomer has no turn there.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::TaskId;

use super::{CandidatePlan, Mechanism, PlanSearch};
use crate::auto::model::layout::SiteLayout;

impl PlanSearch<'_> {
    /// The default, the plan in force, and the plan in force with the newcomers placed.
    pub fn build_newcomer_candidates(
        &mut self,
        default_sites: &BTreeMap<TaskId, usize>,
        current_layout: &SiteLayout,
        newcomers: &[usize],
    ) -> Vec<CandidatePlan> {
        let mut candidates = vec![self.set_min_speed(default_sites, Some(current_layout))];
        let mut add = |search: &Self, label: &str, layout: &SiteLayout| {
            search.add_candidate(&mut candidates, label, None, layout.clone());
        };
        add(self, "the plan in force", current_layout);

        let mut placed_layout = current_layout.clone();
        let mut changed_sites: BTreeSet<usize> = newcomers
            .iter()
            .filter_map(|&index| current_layout.site_by_task[index])
            .collect();
        if self.allowed_mechanisms.contains(&Mechanism::Placement) && self.problem.sites.len() > 1 {
            changed_sites.extend(self.place_newcomers(newcomers, &mut placed_layout));
            add(self, "newcomers placed", &placed_layout);
        }
        if self.allowed_mechanisms.contains(&Mechanism::Space) {
            changed_sites.retain(|&site| placed_layout.rotations[site].is_none());
            let divided = self.divide_sites(&placed_layout, changed_sites);
            add(self, "newcomers placed, with partitions", &divided);
        }
        candidates
    }

    /// Moves each newcomer to its best site. Returns the sites that tasks joined.
    fn place_newcomers(&self, newcomers: &[usize], layout: &mut SiteLayout) -> Vec<usize> {
        let seats_per_site = self.seats_per_site();
        let mut assignment = self.assign(layout.site_by_task.clone());
        let mut joined_sites = Vec::new();
        for &index in newcomers
            .iter()
            .filter(|&&index| self.problem.can_move(index))
        {
            let has_room = |&site: &usize| {
                layout.rotations[site].is_none()
                    && assignment.residents[site].len() < seats_per_site[site]
            };
            let open_sites: Vec<usize> = (0..seats_per_site.len()).filter(has_room).collect();
            let Some(site) = self.insert(index, &open_sites, &mut assignment) else {
                continue;
            };

            for partitions in &mut layout.partitions {
                for partition in partitions.iter_mut() {
                    partition.members.retain(|&member| member != index);
                }
                partitions.retain(|partition| !partition.members.is_empty());
            }
            (layout.site_by_task[index], layout.is_pinned[index]) = (Some(site), true);
            joined_sites.push(site);
        }

        joined_sites
    }
}

#[cfg(test)]
mod tests {

    use super::super::PlanComparator;
    use super::*;
    use crate::auto::model::problem::PlanningProblem;

    use crate::auto::model::score_cache::ScoreCache;
    use crate::auto::model::score_cache::tests::{site_fixture, task_fixture};

    use proptest::prelude::*;

    fn problem_fixture(tasks: &[(usize, f64)], sites: u32) -> PlanningProblem {
        let tasks = tasks
            .iter()
            .enumerate()
            .map(|(id, &(last_site, reuse_share))| task_fixture(id as u32, last_site, reuse_share))
            .collect();
        let sites = (0..sites).map(|id| site_fixture(id, 3)).collect();
        PlanningProblem::undisturbed_problem(sites, tasks)
    }

    /// All candidates for the last task and for all tasks, and the comparator of both.
    fn brief_and_full_candidates(
        problem: &PlanningProblem,
    ) -> ([Vec<CandidatePlan>; 2], PlanComparator) {
        let score_cache = ScoreCache::new(problem);
        let search = || {
            let allowed = [Mechanism::Placement, Mechanism::Sharing].into();
            PlanSearch::with_effort(problem, &score_cache, allowed, 400)
        };
        let current_layout = SiteLayout::from_default_sites(problem, &BTreeMap::new());
        let (mut search_once, mut full_search) = (search(), search());
        let candidates = [
            search_once.build_newcomer_candidates(
                &BTreeMap::new(),
                &current_layout,
                &[problem.tasks.len() - 1],
            ),
            full_search.find_candidates(&BTreeMap::new(), Some(current_layout)),
        ];
        (candidates, search_once.comparator)
    }

    /// Is a stream that arrives placed with the other streams rather than with tasks that keep their data?
    #[test]
    fn an_arriving_stream_is_placed_with_the_other_streams() {
        let problem = problem_fixture(&[(0, 0.4), (0, 0.3), (1, 1.2), (1, 1.3), (0, 1.4)], 2);
        let ([brief, _], comparator) = brief_and_full_candidates(&problem);
        assert_eq!(
            comparator.best_of(&brief).unwrap().layout.site_by_task[4],
            Some(1)
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        /// Do only newcomers move, and is the best plan no worse than the plan in force?
        #[test]
        fn only_newcomers_move(
            tasks in prop::collection::vec((0usize..4, 0.0f64..1.6), 4..11),
        ) {
            let problem = problem_fixture(&tasks, 4);
            let ([brief, _], comparator) = brief_and_full_candidates(&problem);
            let current_layout = SiteLayout::from_default_sites(&problem, &BTreeMap::new());
            let best_plan = comparator.best_of(&brief).unwrap();
            let moved_tasks: Vec<usize> =
                (0..tasks.len()).filter(|&index| best_plan.layout.site_by_task[index] != current_layout.site_by_task[index]).collect();
            prop_assert!(moved_tasks.is_empty() || moved_tasks == [tasks.len() - 1], "{moved_tasks:?}");
            let unchanged_plan = brief.iter().find(|candidate| candidate.layout.site_by_task == current_layout.site_by_task).unwrap();
            prop_assert!(comparator.score_key(best_plan.score) >= comparator.score_key(unchanged_plan.score));
        }
    }
}
