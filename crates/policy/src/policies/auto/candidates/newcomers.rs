//! Search after an arrival: newcomers are placed among the tasks that stay.
//!
//! Each newcomer is tried on every site that has room, and in exchange for tasks of the sites that suit it best.
//! Partitions and rotations are searched again only on sites that a task joined or left; all other tasks keep the plan
//! in force. Properties: a site whose gangs take turns is left alone, because a newcomer has no turn there; the search
//! is bounded like the full search.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::TaskId;

use super::site::SiteTasks;
use super::{CandidatePlan, MAX_EXCHANGES, MIN_KEY_GAIN, Mechanism, PlanSearch, add};
use crate::policies::auto::model::layout::{PartitionMembers, SiteLayout};
use crate::policies::auto::model::score::{LayoutScore, LayoutScorer, split_shares};
use crate::policies::auto::model::score_cache::ErrorDraw;

/// Number of sites whose tasks are tried for an exchange.
const MAX_EXCHANGE_SITES: usize = 3;

impl PlanSearch<'_> {
    /// Returns the default, the plan in force, and the plan in force with the newcomers placed.
    pub fn build_newcomer_candidates(
        &mut self,
        default_sites: &BTreeMap<TaskId, usize>,
        current_layout: &SiteLayout,
        newcomers: &[usize],
    ) -> Vec<CandidatePlan> {
        let mut candidates = vec![self.set_min_speed(default_sites, Some(current_layout))];
        let mut add_candidate = |label: &'static str, layout: SiteLayout| {
            add(
                &mut candidates,
                self.problem,
                self.score_cache,
                (label, None),
                layout,
            )
        };
        add_candidate("the plan in force", current_layout.clone());
        let mut changed_sites: BTreeSet<usize> = newcomers
            .iter()
            .filter_map(|&index| current_layout.site_by_task[index])
            .collect();
        let mut placed_layout = current_layout.clone();
        if self.allowed_mechanisms.allows(Mechanism::Placement) && self.problem.sites.len() > 1 {
            for &index in newcomers
                .iter()
                .filter(|&&task| self.problem.can_move(task))
            {
                changed_sites.extend(self.place_newcomer(index, &mut placed_layout));
            }
            add_candidate("newcomers placed", placed_layout.clone());
        }
        if self.allowed_mechanisms.allows(Mechanism::Space)
            || self.allowed_mechanisms.allows(Mechanism::Gangs)
        {
            add_candidate(
                "newcomers placed, with partitions and gangs",
                self.refine_sites(&placed_layout, &changed_sites),
            );
        }
        candidates
    }

    /// Moves a newcomer to the best site. Returns the sites that this changes.
    fn place_newcomer(&self, index: usize, layout: &mut SiteLayout) -> Vec<usize> {
        let Some(current_site) = layout.site_by_task[index] else {
            return Vec::new();
        };
        let seats_per_site = self.seats_per_site();
        let mut arrival_search = ArrivalSearch::new(self, layout);
        let other_sites: Vec<usize> = (0..seats_per_site.len())
            .filter(|&site| site != current_site && layout.rotations[site].is_none())
            .collect();
        // Keys of the moves of the newcomer to each site; exchanges begin with the best site.
        let mut scored_sites: Vec<(usize, f64)> = Vec::with_capacity(other_sites.len());
        for site in other_sites {
            if self.remaining_scores.get() > 0 {
                scored_sites.push((
                    site,
                    arrival_search.score_move(TaskMove {
                        task_index: index,
                        from_site: current_site,
                        to_site: site,
                        partner: None,
                    }),
                ));
            }
        }
        scored_sites.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut best_key_and_move = (
            self.judge.score_key(arrival_search.total_score()) + MIN_KEY_GAIN,
            None,
        );
        let mut consider_move = |key: f64, task_move: TaskMove| {
            if key > best_key_and_move.0 {
                best_key_and_move = (key, Some(task_move));
            }
        };
        for &(site, key) in scored_sites
            .iter()
            .filter(|(site, _)| arrival_search.members[*site].len() < seats_per_site[*site])
        {
            consider_move(
                key,
                TaskMove {
                    task_index: index,
                    from_site: current_site,
                    to_site: site,
                    partner: None,
                },
            );
        }
        for &(site, _) in scored_sites.iter().take(MAX_EXCHANGE_SITES) {
            let partners = arrival_search.members[site]
                .clone()
                .into_iter()
                .filter(|&resident| self.problem.can_move(resident));
            for partner in partners
                .take(MAX_EXCHANGES)
                .take_while(|_| self.remaining_scores.get() > 0)
            {
                let task_move = TaskMove {
                    task_index: index,
                    from_site: current_site,
                    to_site: site,
                    partner: Some(partner),
                };
                consider_move(arrival_search.score_move(task_move), task_move);
            }
        }
        let Some(task_move) = best_key_and_move.1 else {
            return Vec::new();
        };
        task_move.apply(layout);
        vec![current_site, task_move.to_site]
    }

    /// Searches the best partitions and rotations of these sites.
    fn refine_sites(&self, layout: &SiteLayout, sites: &BTreeSet<usize>) -> SiteLayout {
        self.refine_each_site(
            layout,
            sites.iter().copied(),
            |search, site_tasks, new_layout| {
                (
                    new_layout.partitions[site_tasks.site],
                    new_layout.rotations[site_tasks.site],
                ) = search.find_best_plan(site_tasks, true);
            },
        )
    }
}

/// The move of a task to another site, and of its exchange partner to the first task's site.
#[derive(Clone, Copy)]
struct TaskMove {
    task_index: usize,
    from_site: usize,
    to_site: usize,
    partner: Option<usize>,
}

impl TaskMove {
    fn target_sites(self) -> impl Iterator<Item = (usize, usize)> {
        [
            Some((self.task_index, self.to_site)),
            self.partner.map(|partner| (partner, self.from_site)),
        ]
        .into_iter()
        .flatten()
    }

    fn apply(self, layout: &mut SiteLayout) {
        for (task, target) in self.target_sites() {
            (layout.site_by_task[task], layout.is_pinned[task]) = (Some(target), true);
        }
        for site in [self.from_site, self.to_site] {
            layout.partitions[site] = members_without(&layout.partitions[site], self);
        }
    }

    /// Returns the tasks on a site after the move, in ascending order.
    fn members_after(self, members_before: &[usize], site: usize) -> Vec<usize> {
        let is_unmoved = |task: &usize| {
            self.target_sites()
                .all(|(moved_task, _)| moved_task != *task)
        };
        let mut members: Vec<usize> = members_before.iter().copied().filter(is_unmoved).collect();
        members.extend(
            self.target_sites()
                .filter(|(_, target)| *target == site)
                .map(|(task, _)| task),
        );
        members.sort_unstable();
        members
    }
}

/// Returns the partitions of the tasks that stay.
fn members_without(partitions: &[PartitionMembers], task_move: TaskMove) -> Vec<PartitionMembers> {
    let mut partitions = partitions.to_vec();
    partitions.iter_mut().for_each(|group| {
        group.members.retain(|&task| {
            task_move
                .target_sites()
                .all(|(moved_task, _)| moved_task != task)
        })
    });
    partitions.retain(|group| !group.members.is_empty());
    partitions
}

/// The scores of all sites during the placement of a newcomer. A move or an exchange changes two of them.
struct ArrivalSearch<'a, 'b> {
    search: &'a PlanSearch<'b>,
    layout: &'a SiteLayout,
    site_by_task: Vec<Option<usize>>,
    members: Vec<Vec<usize>>,
    scores: Vec<LayoutScore>,
}

impl<'a, 'b> ArrivalSearch<'a, 'b> {
    fn new(search: &'a PlanSearch<'b>, layout: &'a SiteLayout) -> Self {
        let scorer = LayoutScorer::new(search.problem, layout);
        let scores = scorer.scores_by_site(&ErrorDraw::default(), search.score_cache);
        ArrivalSearch {
            search,
            layout,
            site_by_task: layout.site_by_task.clone(),
            members: scorer.members,
            scores,
        }
    }

    fn score(
        &self,
        site: usize,
        members: &[usize],
        partitions: &[PartitionMembers],
    ) -> LayoutScore {
        if members.is_empty() {
            return LayoutScore::EMPTY;
        }
        let PlanSearch {
            problem,
            score_cache,
            remaining_scores,
            ..
        } = self.search;
        let split_shares = &split_shares(problem, &self.site_by_task, members, site);
        SiteTasks {
            problem,
            site,
            members,
            split_shares,
            remaining_scores,
            score_cache,
        }
        .score(partitions, None)
    }

    fn total_score(&self) -> LayoutScore {
        self.scores
            .iter()
            .copied()
            .fold(LayoutScore::EMPTY, LayoutScore::plus)
    }

    /// Returns the key of a move; larger is better. Partners of a sharing cluster on third sites are ignored.
    fn score_move(&mut self, task_move: TaskMove) -> f64 {
        task_move
            .target_sites()
            .for_each(|(task, target)| self.site_by_task[task] = Some(target));
        let score_after_move = |site: usize| {
            let members = task_move.members_after(&self.members[site], site);
            self.score(
                site,
                &members,
                &members_without(&self.layout.partitions[site], task_move),
            )
        };
        let (from_score, to_score) = (
            score_after_move(task_move.from_site),
            score_after_move(task_move.to_site),
        );
        task_move
            .target_sites()
            .for_each(|(task, _)| self.site_by_task[task] = self.layout.site_by_task[task]);
        let new_score = |(site, &score): (usize, &LayoutScore)| match site {
            site if site == task_move.from_site => from_score,
            site if site == task_move.to_site => to_score,
            _ => score,
        };
        self.search.judge.score_key(
            self.scores
                .iter()
                .enumerate()
                .map(new_score)
                .fold(LayoutScore::EMPTY, LayoutScore::plus),
        )
    }
}

#[cfg(test)]
mod tests {

    use super::super::{AllowedMechanisms, PlanComparator};
    use super::*;
    use crate::policies::auto::model::problem::PlanningProblem;

    use crate::policies::auto::model::score_cache::ScoreCache;
    use crate::policies::auto::model::score_cache::tests::{site_fixture, task_fixture};

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

    /// Returns all candidates for the last task and for all tasks, and the comparator of both.
    fn brief_and_full_candidates(
        problem: &PlanningProblem,
    ) -> ([Vec<CandidatePlan>; 2], PlanComparator) {
        let memo = ScoreCache::new(problem);
        let allowed = AllowedMechanisms::from_filter(|mechanism| {
            !matches!(mechanism, Mechanism::Space | Mechanism::Gangs)
        });
        let search = || PlanSearch::with_effort(problem, &memo, allowed, 400);
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
        (candidates, search_once.judge)
    }

    fn best_candidate<'a>(plans: &'a [CandidatePlan], judge: &PlanComparator) -> &'a CandidatePlan {
        plans
            .iter()
            .reduce(|a, b| {
                if judge.score_key(b.score) > judge.score_key(a.score) {
                    b
                } else {
                    a
                }
            })
            .unwrap()
    }

    /// Is a stream that arrives placed with the other streams rather than with tasks that keep their data?
    #[test]
    fn an_arriving_stream_is_placed_with_the_other_streams() {
        let problem = problem_fixture(&[(0, 0.4), (0, 0.3), (1, 1.2), (1, 1.3), (0, 1.4)], 2);
        let ([brief, _], judge) = brief_and_full_candidates(&problem);
        assert_eq!(
            best_candidate(&brief, &judge).layout.site_by_task[4],
            Some(1)
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        /// Do only newcomers and their exchange partners move, and is the best plan no worse than the plan in force?
        #[test]
        fn only_newcomers_and_their_exchange_partners_move(
            tasks in prop::collection::vec((0usize..4, 0.0f64..1.6), 4..11),
        ) {
            let problem = problem_fixture(&tasks, 4);
            let ([brief, _], judge) = brief_and_full_candidates(&problem);
            let current_layout = SiteLayout::from_default_sites(&problem, &BTreeMap::new());
            let best_plan = best_candidate(&brief, &judge);
            let moved_tasks: Vec<usize> =
                (0..tasks.len()).filter(|&index| best_plan.layout.site_by_task[index] != current_layout.site_by_task[index]).collect();
            prop_assert!(moved_tasks.is_empty() || moved_tasks.len() <= 2 && moved_tasks.contains(&(tasks.len() - 1)), "{moved_tasks:?}");
            let unchanged_plan = brief.iter().find(|candidate| candidate.layout.site_by_task == current_layout.site_by_task).unwrap();
            prop_assert!(judge.score_key(best_plan.score) >= judge.score_key(unchanged_plan.score));
        }
    }
}
