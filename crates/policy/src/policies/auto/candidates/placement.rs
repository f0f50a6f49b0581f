//! Placement: chooses the site of each task, by evening out or separating misses, then by moves and exchanges.

use super::{EXCHANGES, MIN_STEP, PlanSearch};
use crate::policies::auto::model::layout::SiteLayout;
use crate::policies::auto::model::score::LayoutScore;

impl PlanSearch<'_> {
    /// Puts the tasks that miss most even with the largest cache onto as few sites as possible, so that they displace
    /// only each other.
    pub(super) fn separate_streams(&self, default: &SiteLayout) -> SiteLayout {
        let mut movable = self.movable_tasks();
        let bytes = self.problem.sites.iter().map(|site| site.bytes).fold(0.0, f64::max);
        let weight = |at: usize| {
            let program = self.problem.tasks[at].program.as_ref();
            program.map_or(0.0, |model| model.cpu_demand * model.misses(bytes) / model.solo_cycles(bytes))
        };
        movable.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)).then(a.cmp(&b)));
        // Each site keeps its present number of tasks.
        let mut room = vec![0; self.problem.sites.len()];
        for &index in &movable {
            if let Some(site) = default.site_of[index] {
                room[site] += 1;
            }
        }
        let mut home = default.site_of.clone();
        let mut site = 0;
        for index in movable.into_iter().filter(|&index| default.site_of[index].is_some()) {
            while site < room.len() && room[site] == 0 {
                site += 1;
            }
            if site == room.len() {
                break;
            }
            room[site] -= 1;
            home[index] = Some(site);
        }
        SiteLayout::unpartitioned(self.problem, home, true)
    }

    /// Evens out misses over the sites (DI): the heaviest task goes first, to the lightest site.
    pub(super) fn balance(&self, default: &SiteLayout) -> SiteLayout {
        let mut movable = self.movable_tasks();
        let weight = |at: usize| {
            let scene_task = &self.problem.tasks[at];
            let bytes = self.problem.sites[0].bytes;
            scene_task
                .program
                .as_ref()
                .map_or(0.0, |model| model.cpu_demand * model.misses(0.5 * bytes) / model.solo_cycles(bytes))
        };
        movable.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)).then(a.cmp(&b)));
        let mut free = self.free_seats();
        let mut load = vec![0.0; free.len()];
        for index in self.problem.known_tasks().filter(|&index| !self.problem.can_move(index)) {
            if let Some(site) = default.site_of[index] {
                free[site] = free[site].saturating_sub(1);
                load[site] += weight(index);
            }
        }
        let mut home = default.site_of.clone();
        for index in movable {
            let open = (0..free.len()).filter(|&site| free[site] > 0);
            let per_cpu = |site: usize| load[site] / f64::from(self.problem.sites[site].cpus.count().max(1));
            if let Some(site) = open.reduce(|a, b| if per_cpu(b) < per_cpu(a) { b } else { a }) {
                free[site] -= 1;
                load[site] += weight(index);
                home[index] = Some(site);
            }
        }
        SiteLayout::unpartitioned(self.problem, home, true)
    }

    /// Searches the placement locally, by moves and exchanges of tasks.
    pub(super) fn place(&mut self, from: SiteLayout, joint: bool) -> SiteLayout {
        let movable = self.movable_tasks();
        let room = self.free_seats();
        let sites = self.problem.sites.len();
        let mut homes = HomeAssignment { home: from.site_of, on: vec![Vec::new(); sites], scores: Vec::new() };
        for index in self.problem.known_tasks() {
            if let Some(site) = homes.home[index] {
                homes.on[site].push(index);
            }
        }
        homes.scores = (0..sites).map(|site| self.site_key(&homes.home, site, &homes.on[site], joint)).collect();
        let mut improved = true;
        while improved && self.effort.get() > 0 {
            improved = false;
            let mut order = movable.clone();
            self.generator.shuffle(&mut order);
            for &index in &order {
                if self.effort.get() == 0 {
                    break;
                }
                improved |= self.improve(index, &room, &mut homes, joint);
            }
        }
        SiteLayout::unpartitioned(self.problem, homes.home, true)
    }

    /// Applies the first move or exchange of this task that is better. Returns whether there was one.
    fn improve(&self, index: usize, room: &[usize], homes: &mut HomeAssignment, joint: bool) -> bool {
        let Some(current_site) = homes.home[index] else { return false };
        let total = |scores: &[LayoutScore]| scores.iter().copied().fold(LayoutScore::EMPTY, LayoutScore::plus);
        let before = self.judge.key(total(&homes.scores));
        for site in (0..homes.scores.len()).filter(|&site| site != current_site) {
            let mut partners: Vec<Option<usize>> = Vec::new();
            if homes.on[site].len() < room[site] {
                partners.push(None);
            }
            let site_residents = homes.on[site].iter().copied().filter(|&other| self.problem.can_move(other));
            partners.extend(site_residents.take(EXCHANGES).map(Some));
            for partner in partners {
                let touched = self.clusters_of([Some(index), partner]);
                homes.exchange(index, current_site, site, partner);
                // A move also affects partners of a sharing cluster on other sites.
                let is_affected = |residents: &Vec<usize>| {
                    residents.iter().any(|&other| {
                        self.problem.tasks[other].cluster.is_some_and(|cluster| touched.contains(&cluster))
                    })
                };
                let again = |other: &usize| {
                    *other == current_site || *other == site || !touched.is_empty() && is_affected(&homes.on[*other])
                };
                let again: Vec<usize> = (0..homes.scores.len()).filter(again).collect();
                let mut changed = Vec::with_capacity(again.len());
                for other in again {
                    let score = self.site_key(&homes.home, other, &homes.on[other], joint);
                    changed.push((other, std::mem::replace(&mut homes.scores[other], score)));
                }
                if self.judge.key(total(&homes.scores)) > before + MIN_STEP {
                    return true;
                }
                changed.into_iter().for_each(|(other, score)| homes.scores[other] = score);
                homes.exchange(index, site, current_site, partner);
            }
        }
        false
    }

    fn clusters_of(&self, tasks: [Option<usize>; 2]) -> Vec<usize> {
        tasks.into_iter().flatten().filter_map(|index| self.problem.tasks[index].cluster).collect()
    }
}

/// The placement during the search.
struct HomeAssignment {
    home: Vec<Option<usize>>,
    /// Known tasks by site, in ascending order.
    on: Vec<Vec<usize>>,
    scores: Vec<LayoutScore>,
}

impl HomeAssignment {
    fn set(&mut self, index: usize, from: usize, to: usize) {
        if let Ok(place) = self.on[from].binary_search(&index) {
            self.on[from].remove(place);
        }
        if let Err(place) = self.on[to].binary_search(&index) {
            self.on[to].insert(place, index);
        }
        self.home[index] = Some(to);
    }

    /// Moves one task to another site, and its exchange partner to the first task's site.
    fn exchange(&mut self, index: usize, from: usize, to: usize, partner: Option<usize>) {
        self.set(index, from, to);
        if let Some(partner) = partner {
            self.set(partner, to, from);
        }
    }
}
