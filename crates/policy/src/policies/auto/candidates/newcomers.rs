//! Search after an arrival: newcomers are placed among the tasks that stay.
//!
//! Each newcomer is tried on every site that has room, and in exchange for tasks of the sites that suit it best.
//! Partitions and rotations are searched again only on sites that a task joined or left; all other tasks keep the plan
//! in force. Properties: a site whose gangs take turns is left alone, because a newcomer has no turn there; the search
//! is bounded like the full search.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::TaskId;

use super::site::SiteTasks;
use super::{CandidatePlan, EXCHANGES, MIN_STEP, Mechanism, PlanSearch, add};
use crate::policies::auto::model::layout::{PartitionMembers, SiteLayout};
use crate::policies::auto::model::score::{LayoutScore, LayoutScorer, split_shares};
use crate::policies::auto::model::score_cache::ErrorDraw;

/// Number of sites whose tasks are tried for an exchange.
const EXCHANGED_WITH: usize = 3;

impl PlanSearch<'_> {
    /// Returns the default, the plan in force, and the plan in force with the newcomers placed.
    pub fn newcomer_candidates(
        &mut self,
        lived_on: &BTreeMap<TaskId, usize>,
        held: &SiteLayout,
        newcomers: &[usize],
    ) -> Vec<CandidatePlan> {
        let mut all = vec![self.default(lived_on, Some(held))];
        let mut add =
            |label: &'static str, layout: SiteLayout| add(&mut all, self.problem, self.memo, (label, None), layout);
        add("held", held.clone());
        let mut changed: BTreeSet<usize> = newcomers.iter().filter_map(|&index| held.site_of[index]).collect();
        let mut placed = held.clone();
        if self.allowed.has(Mechanism::Placement) && self.problem.sites.len() > 1 {
            for &index in newcomers.iter().filter(|&&at| self.problem.can_move(at)) {
                changed.extend(self.settle(index, &mut placed));
            }
            add("newcomers placed", placed.clone());
        }
        if self.allowed.has(Mechanism::Space) || self.allowed.has(Mechanism::Gangs) {
            add("newcomers placed, with partitions and gangs", self.refine_sites(&placed, &changed));
        }
        all
    }

    /// Moves a newcomer to the best site. Returns the sites that this changes.
    fn settle(&self, index: usize, layout: &mut SiteLayout) -> Vec<usize> {
        let Some(current_site) = layout.site_of[index] else { return Vec::new() };
        let room = self.free_seats();
        let mut around = ArrivalSearch::new(self, layout);
        let others: Vec<usize> =
            (0..room.len()).filter(|&site| site != current_site && layout.rotations[site].is_none()).collect();
        // Scores of the newcomer with all tasks of each site; exchanges begin with the best site.
        let mut tried: Vec<(usize, f64)> = Vec::with_capacity(others.len());
        for site in others {
            if self.effort.get() > 0 {
                tried.push((site, around.key(TaskMove { at: index, here: current_site, site, partner: None })));
            }
        }
        tried.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut best = (self.judge.key(around.total()) + MIN_STEP, None);
        let mut consider = |key: f64, exchange: TaskMove| {
            if key > best.0 {
                best = (key, Some(exchange));
            }
        };
        for &(site, key) in tried.iter().filter(|(site, _)| around.members[*site].len() < room[*site]) {
            consider(key, TaskMove { at: index, here: current_site, site, partner: None });
        }
        for &(site, _) in tried.iter().take(EXCHANGED_WITH) {
            let partners = around.members[site].clone().into_iter().filter(|&other| self.problem.can_move(other));
            for partner in partners.take(EXCHANGES).take_while(|_| self.effort.get() > 0) {
                let exchange = TaskMove { at: index, here: current_site, site, partner: Some(partner) };
                consider(around.key(exchange), exchange);
            }
        }
        let Some(exchange) = best.1 else { return Vec::new() };
        exchange.apply(layout);
        vec![current_site, exchange.site]
    }

    /// Searches the best partitions and rotations of these sites.
    fn refine_sites(&self, layout: &SiteLayout, sites: &BTreeSet<usize>) -> SiteLayout {
        self.refine_each_site(layout, sites.iter().copied(), |search, site_tasks, changed| {
            (changed.partitions[site_tasks.site], changed.rotations[site_tasks.site]) =
                search.best_of(site_tasks, true);
        })
    }
}

/// The move of a task to another site, and of its exchange partner to the first task's site.
#[derive(Clone, Copy)]
struct TaskMove {
    at: usize,
    here: usize,
    site: usize,
    partner: Option<usize>,
}

impl TaskMove {
    fn moves(self) -> impl Iterator<Item = (usize, usize)> {
        [Some((self.at, self.site)), self.partner.map(|partner| (partner, self.here))].into_iter().flatten()
    }

    fn apply(self, layout: &mut SiteLayout) {
        for (task, to) in self.moves() {
            (layout.site_of[task], layout.pinned[task]) = (Some(to), true);
        }
        for site in [self.here, self.site] {
            layout.partitions[site] = members_without(&layout.partitions[site], self);
        }
    }

    /// Returns the tasks on a site after the move, in ascending order.
    fn members(self, before: &[usize], site: usize) -> Vec<usize> {
        let stays = |task: &usize| self.moves().all(|(moved, _)| moved != *task);
        let mut members: Vec<usize> = before.iter().copied().filter(stays).collect();
        members.extend(self.moves().filter(|(_, to)| *to == site).map(|(task, _)| task));
        members.sort_unstable();
        members
    }
}

/// Returns the partitions of the tasks that stay.
fn members_without(cut: &[PartitionMembers], exchange: TaskMove) -> Vec<PartitionMembers> {
    let mut cut = cut.to_vec();
    cut.iter_mut().for_each(|group| group.members.retain(|&task| exchange.moves().all(|(moved, _)| moved != task)));
    cut.retain(|group| !group.members.is_empty());
    cut
}

/// The scores of all sites, two of which an exchange changes.
struct ArrivalSearch<'a, 'b> {
    search: &'a PlanSearch<'b>,
    layout: &'a SiteLayout,
    home: Vec<Option<usize>>,
    members: Vec<Vec<usize>>,
    scores: Vec<LayoutScore>,
}

impl<'a, 'b> ArrivalSearch<'a, 'b> {
    fn new(search: &'a PlanSearch<'b>, layout: &'a SiteLayout) -> Self {
        let sites = LayoutScorer::new(search.problem, layout);
        let scores = sites.scores(&ErrorDraw::default(), search.memo);
        ArrivalSearch { search, layout, home: layout.site_of.clone(), members: sites.members, scores }
    }

    fn score(&self, site: usize, members: &[usize], cut: &[PartitionMembers]) -> LayoutScore {
        if members.is_empty() {
            return LayoutScore::EMPTY;
        }
        let PlanSearch { problem, memo, effort, .. } = self.search;
        let apart = &split_shares(problem, &self.home, members, site);
        SiteTasks { problem, site, members, apart, effort, memo }.score(cut, None)
    }

    fn total(&self) -> LayoutScore {
        self.scores.iter().copied().fold(LayoutScore::EMPTY, LayoutScore::plus)
    }

    /// Returns the key of a move; larger is better. Partners of a sharing cluster on third sites are ignored.
    fn key(&mut self, exchange: TaskMove) -> f64 {
        exchange.moves().for_each(|(task, to)| self.home[task] = Some(to));
        let score = |site: usize| {
            let members = exchange.members(&self.members[site], site);
            self.score(site, &members, &members_without(&self.layout.partitions[site], exchange))
        };
        let (from, to) = (score(exchange.here), score(exchange.site));
        exchange.moves().for_each(|(task, _)| self.home[task] = self.layout.site_of[task]);
        let changed = |(site, &score): (usize, &LayoutScore)| match site {
            site if site == exchange.here => from,
            site if site == exchange.site => to,
            _ => score,
        };
        self.search.judge.key(self.scores.iter().enumerate().map(changed).fold(LayoutScore::EMPTY, LayoutScore::plus))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::super::{AllowedMechanisms, PlanComparator};
    use super::*;
    use crate::policies::auto::model::problem::PlanningProblem;
    use crate::policies::auto::model::score::PlanObjective;
    use crate::policies::auto::model::score_cache::ScoreCache;
    use crate::policies::auto::model::score_cache::tests::{site, task};
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    fn problem(tasks: &[(usize, f64)], sites: u32) -> PlanningProblem {
        let tasks = tasks.iter().enumerate().map(|(id, &(on, part))| task(id as u32, on, part)).collect();
        let sites = (0..sites).map(|id| site(id, 3)).collect();
        PlanningProblem::undisturbed(sites, tasks)
    }

    /// Returns all candidates for the last task and for all tasks, and the comparator of both.
    fn both(problem: &PlanningProblem) -> ([Vec<CandidatePlan>; 2], PlanComparator) {
        let memo = ScoreCache::new(problem);
        let allowed =
            AllowedMechanisms::from_filter(|mechanism| !matches!(mechanism, Mechanism::Space | Mechanism::Gangs));
        let judge = PlanComparator { objective: PlanObjective::WeightedSpeedup, min_speed: 0.0 };
        let search = || {
            let (effort, generator) = (Cell::new(400), SplitMix64::new(1));
            PlanSearch { problem, memo: &memo, allowed, judge, effort, generator }
        };
        let held = SiteLayout::from_default_sites(problem, &BTreeMap::new());
        let (mut search_once, mut all) = (search(), search());
        let candidates = [
            search_once.newcomer_candidates(&BTreeMap::new(), &held, &[problem.tasks.len() - 1]),
            all.candidates(&BTreeMap::new(), Some(held)),
        ];
        (candidates, search_once.judge)
    }

    fn best<'a>(plans: &'a [CandidatePlan], judge: &PlanComparator) -> &'a CandidatePlan {
        plans.iter().reduce(|a, b| if judge.key(b.score) > judge.key(a.score) { b } else { a }).unwrap()
    }

    /// Is a stream that arrives placed with the other streams rather than with tasks that keep their data?
    #[test]
    fn a_stream_goes_to_the_streams() {
        let problem = problem(&[(0, 0.4), (0, 0.3), (1, 1.2), (1, 1.3), (0, 1.4)], 2);
        let ([brief, _], judge) = both(&problem);
        assert_eq!(best(&brief, &judge).layout.site_of[4], Some(1));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        /// Do only newcomers and their exchange partners move, and is the best plan no worse than the plan in force?
        #[test]
        fn only_newcomers_and_their_exchange_partners_move(
            tasks in prop::collection::vec((0usize..4, 0.0f64..1.6), 4..11),
        ) {
            let problem = problem(&tasks, 4);
            let ([brief, _], judge) = both(&problem);
            let held = SiteLayout::from_default_sites(&problem, &BTreeMap::new());
            let chosen = best(&brief, &judge);
            let moved: Vec<usize> =
                (0..tasks.len()).filter(|&index| chosen.layout.site_of[index] != held.site_of[index]).collect();
            prop_assert!(moved.is_empty() || moved.len() <= 2 && moved.contains(&(tasks.len() - 1)), "{moved:?}");
            let before = brief.iter().find(|candidate| candidate.layout.site_of == held.site_of).unwrap();
            prop_assert!(judge.key(chosen.score) >= judge.key(before.score));
        }
    }
}
