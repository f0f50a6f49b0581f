//! Newcomers among those who stay: the search after an arrival.
//!
//! Every newcomer is tried on every site where there is room, and in exchange for tasks of the sites where that does
//! best; parts and turns are sought anew only where somebody came or left. Everybody else keeps what holds. Properties: a
//! site whose gangs take turns is left alone, as a newcomer has no turn there; bounded as the whole search is.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::TaskId;

use super::cut::Members;
use super::layout::{Group, Layout};
use super::memo::Draw;
use super::score::{Score, Sites, aparts};
use super::search::{Candidate, EXCHANGES, LEAST_STEP, Search, add};

/// Sites whose tasks are tried in exchange.
const EXCHANGED_WITH: usize = 3;

impl Search<'_> {
    /// The default, what holds, and what holds with the newcomers placed.
    pub fn for_newcomers(
        &mut self,
        lived_on: &BTreeMap<TaskId, usize>,
        held: &Layout,
        newcomers: &[usize],
    ) -> Vec<Candidate> {
        let mut all = vec![self.default(lived_on, Some(held))];
        let mut add = |what: &'static str, layout: Layout| add(&mut all, self.scene, self.memo, what, layout);
        add("held", held.clone());
        let mut changed: BTreeSet<usize> = newcomers.iter().filter_map(|&at| held.home[at]).collect();
        let mut placed = held.clone();
        if self.allowed.placement && self.scene.sites.len() > 1 {
            for &at in newcomers.iter().filter(|&&at| self.scene.can_move(at)) {
                changed.extend(self.settled(at, &mut placed));
            }
            add("newcomers placed", placed.clone());
        }
        if self.allowed.space || self.allowed.gangs {
            add("newcomers placed, with parts and turns", self.refined_on(&placed, &changed));
        }
        all
    }

    /// Puts a newcomer where it does best; the sites that this changes.
    fn settled(&self, at: usize, layout: &mut Layout) -> Vec<usize> {
        let Some(here) = layout.home[at] else { return Vec::new() };
        let room = self.room();
        let mut around = Around::of(self, layout);
        let others: Vec<usize> = (0..room.len()).filter(|&site| site != here && layout.turns[site].is_none()).collect();
        // How good it is beside all who are there: exchanges begin with the best.
        let mut tried: Vec<(usize, f64)> = Vec::with_capacity(others.len());
        for site in others {
            if self.effort.get() > 0 {
                tried.push((site, around.key(Exchange { at, here, site, partner: None })));
            }
        }
        tried.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut best = (self.judge.key(around.total()) + LEAST_STEP, None);
        let mut consider = |key: f64, exchange: Exchange| {
            if key > best.0 {
                best = (key, Some(exchange));
            }
        };
        for &(site, key) in tried.iter().filter(|(site, _)| around.members[*site].len() < room[*site]) {
            consider(key, Exchange { at, here, site, partner: None });
        }
        for &(site, _) in tried.iter().take(EXCHANGED_WITH) {
            let partners = around.members[site].clone().into_iter().filter(|&other| self.scene.can_move(other));
            for partner in partners.take(EXCHANGES).take_while(|_| self.effort.get() > 0) {
                let exchange = Exchange { at, here, site, partner: Some(partner) };
                consider(around.key(exchange), exchange);
            }
        }
        let Some(exchange) = best.1 else { return Vec::new() };
        exchange.make(layout);
        vec![here, exchange.site]
    }

    /// The best parts and turns of these sites.
    fn refined_on(&self, layout: &Layout, sites: &BTreeSet<usize>) -> Layout {
        self.on_each(layout, sites.iter().copied(), |search, here, changed| {
            (changed.cuts[here.site], changed.turns[here.site]) = search.best_of(here, true);
        })
    }
}

/// One task to another site, and its partner to where it was.
#[derive(Clone, Copy)]
struct Exchange {
    at: usize,
    here: usize,
    site: usize,
    partner: Option<usize>,
}

impl Exchange {
    fn moves(self) -> impl Iterator<Item = (usize, usize)> {
        [Some((self.at, self.site)), self.partner.map(|partner| (partner, self.here))].into_iter().flatten()
    }

    fn make(self, layout: &mut Layout) {
        for (task, to) in self.moves() {
            (layout.home[task], layout.held[task]) = (Some(to), true);
        }
        for site in [self.here, self.site] {
            layout.cuts[site] = without(&layout.cuts[site], self);
        }
    }

    /// Who is on a site afterwards, ascending.
    fn members(self, before: &[usize], site: usize) -> Vec<usize> {
        let stays = |task: &usize| self.moves().all(|(moved, _)| moved != *task);
        let mut members: Vec<usize> = before.iter().copied().filter(stays).collect();
        members.extend(self.moves().filter(|(_, to)| *to == site).map(|(task, _)| task));
        members.sort_unstable();
        members
    }
}

/// Parts of those who stay.
fn without(cut: &[Group], exchange: Exchange) -> Vec<Group> {
    let mut cut = cut.to_vec();
    cut.iter_mut().for_each(|group| group.members.retain(|&task| exchange.moves().all(|(moved, _)| moved != task)));
    cut.retain(|group| !group.members.is_empty());
    cut
}

/// Everybody's sites with their scores, of which an exchange changes two.
struct Around<'a, 'b> {
    search: &'a Search<'b>,
    layout: &'a Layout,
    home: Vec<Option<usize>>,
    members: Vec<Vec<usize>>,
    scores: Vec<Score>,
}

impl<'a, 'b> Around<'a, 'b> {
    fn of(search: &'a Search<'b>, layout: &'a Layout) -> Self {
        let sites = Sites::of(search.scene, layout);
        let scores = sites.scores(&Draw::default(), search.memo);
        Around { search, layout, home: layout.home.clone(), members: sites.members, scores }
    }

    fn score(&self, site: usize, members: &[usize], cut: &[Group]) -> Score {
        if members.is_empty() {
            return Score::NOBODY;
        }
        let Search { scene, memo, effort, .. } = self.search;
        let apart = &aparts(scene, &self.home, members, site);
        Members { scene, site, members, apart, effort, memo }.score(cut, None)
    }

    fn total(&self) -> Score {
        self.scores.iter().copied().fold(Score::NOBODY, Score::plus)
    }

    /// What is better is larger. Partners of a sharing cluster on third sites are left out.
    fn key(&mut self, exchange: Exchange) -> f64 {
        exchange.moves().for_each(|(task, to)| self.home[task] = Some(to));
        let score = |site: usize| {
            let members = exchange.members(&self.members[site], site);
            self.score(site, &members, &without(&self.layout.cuts[site], exchange))
        };
        let (from, to) = (score(exchange.here), score(exchange.site));
        exchange.moves().for_each(|(task, _)| self.home[task] = self.layout.home[task]);
        let changed = |(site, &score): (usize, &Score)| match site {
            site if site == exchange.here => from,
            site if site == exchange.site => to,
            _ => score,
        };
        self.search.judge.key(self.scores.iter().enumerate().map(changed).fold(Score::NOBODY, Score::plus))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::super::memo::Memo;
    use super::super::memo::tests::{site, task};
    use super::super::scene::Scene;
    use super::super::score::Objective;
    use super::super::search::{Allowed, Judge};
    use super::*;
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    fn scene(tasks: &[(usize, f64)], sites: u32) -> Scene {
        let tasks = tasks.iter().enumerate().map(|(id, &(on, part))| task(id as u32, on, part)).collect();
        let sites = (0..sites).map(|id| site(id, 3)).collect();
        Scene { sites, tasks, cycles_per_ns: 2.0, bus: None, shortest_slice_ns: None, closed: Vec::new() }
    }

    /// All candidates for the last task, and for everybody; the judge of both.
    fn both(scene: &Scene) -> ([Vec<Candidate>; 2], Judge) {
        let memo = Memo::of(scene);
        let allowed = Allowed { placement: true, sharing: true, space: false, gangs: false, memory_nodes: true };
        let judge = Judge { objective: Objective::WeightedSpeedup, worst_at_least: 0.0 };
        let search = || {
            let (effort, generator) = (Cell::new(400), SplitMix64::new(1));
            Search { scene, memo: &memo, allowed, judge, effort, generator }
        };
        let held = Layout::default_of(scene, &BTreeMap::new());
        let (mut one, mut all) = (search(), search());
        let found = [
            one.for_newcomers(&BTreeMap::new(), &held, &[scene.tasks.len() - 1]),
            all.candidates(&BTreeMap::new(), Some(held)),
        ];
        (found, one.judge)
    }

    fn best<'a>(of: &'a [Candidate], judge: &Judge) -> &'a Candidate {
        of.iter().reduce(|a, b| if judge.key(b.score) > judge.key(a.score) { b } else { a }).unwrap()
    }

    /// Does a stream that comes among those who keep their data go to the other streams?
    #[test]
    fn a_stream_goes_to_the_streams() {
        let scene = scene(&[(0, 0.4), (0, 0.3), (1, 1.2), (1, 1.3), (0, 1.4)], 2);
        let ([brief, _], judge) = both(&scene);
        assert_eq!(best(&brief, &judge).layout.home[4], Some(1));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        /// Is nobody moved but a newcomer and one in exchange, and is the best plan no worse than what holds?
        #[test]
        fn only_newcomers_and_whom_they_change_with_are_moved(
            tasks in prop::collection::vec((0usize..4, 0.0f64..1.6), 4..11),
        ) {
            let scene = scene(&tasks, 4);
            let ([brief, _], judge) = both(&scene);
            let held = Layout::default_of(&scene, &BTreeMap::new());
            let found = best(&brief, &judge);
            let moved: Vec<usize> =
                (0..tasks.len()).filter(|&at| found.layout.home[at] != held.home[at]).collect();
            prop_assert!(moved.is_empty() || moved.len() <= 2 && moved.contains(&(tasks.len() - 1)), "{moved:?}");
            let before = brief.iter().find(|one| one.layout.home == held.home).unwrap();
            prop_assert!(judge.key(found.score) >= judge.key(before.score));
        }
    }
}
