//! Placement: chooses the site of each task, by evening out or separating misses, then by moves and exchanges.

use super::{EXCHANGES, MIN_STEP, PlanSearch};
use crate::policies::auto::model::layout::SiteLayout;
use crate::policies::auto::model::score::{LayoutScore, score};

/// Number of layouts that a search by scores of whole layouts tries.
const TRAFFIC_SCORES: usize = 200;

impl PlanSearch<'_> {
    /// Puts the tasks that miss most even with the largest cache onto as few sites as possible, so that they displace
    /// only each other.
    pub(super) fn separate_streams(&self, default: &SiteLayout) -> SiteLayout {
        let mut movable = self.movable_tasks();
        let bytes = self.problem.sites.iter().map(|site| site.bytes).fold(0.0, f64::max);
        let pressure_of = |at: usize| {
            let program = self.problem.tasks[at].program.as_ref();
            program.map_or(0.0, |model| model.cpu_demand * model.misses_at(bytes) / model.solo_cycles(bytes))
        };
        movable.sort_by(|&a, &b| pressure_of(b).total_cmp(&pressure_of(a)).then(a.cmp(&b)));
        // Each site keeps its present number of tasks.
        let mut room = vec![0; self.problem.sites.len()];
        for &index in &movable {
            if let Some(site) = default.site_of[index] {
                room[site] += 1;
            }
        }
        let mut site_of = default.site_of.clone();
        let mut site = 0;
        for index in movable.into_iter().filter(|&index| default.site_of[index].is_some()) {
            while site < room.len() && room[site] == 0 {
                site += 1;
            }
            if site == room.len() {
                break;
            }
            room[site] -= 1;
            site_of[index] = Some(site);
        }
        SiteLayout::without_partitions(self.problem, site_of, true)
    }

    /// Evens out misses over the sites (DI): the heaviest task goes first, to the lightest site.
    pub(super) fn balance(&self, default: &SiteLayout) -> SiteLayout {
        let mut movable = self.movable_tasks();
        let weight_of = |at: usize| {
            let problem_task = &self.problem.tasks[at];
            let bytes = self.problem.sites[0].bytes;
            problem_task
                .program
                .as_ref()
                .map_or(0.0, |model| model.cpu_demand * model.misses_at(0.5 * bytes) / model.solo_cycles(bytes))
        };
        movable.sort_by(|&a, &b| weight_of(b).total_cmp(&weight_of(a)).then(a.cmp(&b)));
        let mut free_seats = self.free_seats();
        let mut load = vec![0.0; free_seats.len()];
        for index in self.problem.known_tasks().filter(|&index| !self.problem.can_move(index)) {
            if let Some(site) = default.site_of[index] {
                free_seats[site] = free_seats[site].saturating_sub(1);
                load[site] += weight_of(index);
            }
        }
        let mut site_of = default.site_of.clone();
        for index in movable {
            let open = (0..free_seats.len()).filter(|&site| free_seats[site] > 0);
            let per_cpu = |site: usize| load[site] / f64::from(self.problem.sites[site].cpus.count().max(1));
            if let Some(site) = open.reduce(|a, b| if per_cpu(b) < per_cpu(a) { b } else { a }) {
                free_seats[site] -= 1;
                load[site] += weight_of(index);
                site_of[index] = Some(site);
            }
        }
        SiteLayout::without_partitions(self.problem, site_of, true)
    }

    /// Searches the placement locally, by moves and exchanges of tasks.
    pub(super) fn place(&mut self, start_layout: SiteLayout, joint: bool) -> SiteLayout {
        let movable = self.movable_tasks();
        let room = self.free_seats();
        let sites = self.problem.sites.len();
        let mut homes =
            HomeAssignment { site_of: start_layout.site_of, residents: vec![Vec::new(); sites], scores: Vec::new() };
        for index in self.problem.known_tasks() {
            if let Some(site) = homes.site_of[index] {
                homes.residents[site].push(index);
            }
        }
        homes.scores =
            (0..sites).map(|site| self.site_key(&homes.site_of, site, &homes.residents[site], joint)).collect();
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
        SiteLayout::without_partitions(self.problem, homes.site_of, true)
    }

    /// Searches the placement locally by scores of the whole layout. The other searches score sites one by one, which
    /// leaves out that tasks of different sites wait for the same memory.
    pub(super) fn place_by_traffic(&self, from: SiteLayout) -> SiteLayout {
        let (room, movable) = (self.free_seats(), self.movable_tasks());
        let mut best = SiteLayout::without_partitions(self.problem, from.site_of, true);
        let mut best_key = self.judge.score_key(score(self.problem, &best, self.memo));
        let mut remaining = TRAFFIC_SCORES;
        let mut improved = true;
        while improved {
            improved = false;
            for &index in &movable {
                for neighbor in self.neighbors_of(&best, index, &room) {
                    if remaining == 0 {
                        return best;
                    }
                    remaining -= 1;
                    let key = self.judge.score_key(score(self.problem, &neighbor, self.memo));
                    if key > best_key + MIN_STEP {
                        (best, best_key, improved) = (neighbor, key, true);
                        break;
                    }
                }
            }
        }
        best
    }

    /// Returns the layouts in which a task has moved to another site with a free CPU, or has exchanged its site with
    /// another task.
    fn neighbors_of(&self, layout: &SiteLayout, index: usize, room: &[usize]) -> Vec<SiteLayout> {
        let Some(site) = layout.site_of[index] else { return Vec::new() };
        let mut neighbors = Vec::new();
        for other_site in (0..room.len()).filter(|&other| other != site && !self.problem.is_closed(other)) {
            let residents = layout.known_tasks_on(self.problem, other_site);
            for partner in self.partners_among(&residents, room[other_site]) {
                let mut neighbor = layout.clone();
                neighbor.site_of[index] = Some(other_site);
                partner.into_iter().for_each(|partner| neighbor.site_of[partner] = Some(site));
                neighbors.push(neighbor);
            }
        }
        neighbors
    }

    /// Returns the tasks with which a task can exchange its site for one with these residents; `None` stands for a move
    /// to a free CPU.
    fn partners_among(&self, residents: &[usize], room: usize) -> Vec<Option<usize>> {
        let free_cpu = (residents.len() < room).then_some(None);
        let movable = residents.iter().copied().filter(|&resident| self.problem.can_move(resident)).take(EXCHANGES);
        free_cpu.into_iter().chain(movable.map(Some)).collect()
    }

    /// Applies the first move or exchange of this task that is better. Returns whether there was one.
    fn improve(&self, index: usize, room: &[usize], homes: &mut HomeAssignment, joint: bool) -> bool {
        let Some(current_site) = homes.site_of[index] else { return false };
        let total_score =
            |scores: &[LayoutScore]| scores.iter().copied().fold(LayoutScore::EMPTY, LayoutScore::added_to);
        let key_before = self.judge.score_key(total_score(&homes.scores));
        for site in (0..homes.scores.len()).filter(|&site| site != current_site) {
            for partner in self.partners_among(&homes.residents[site], room[site]) {
                let touched = self.clusters_of([Some(index), partner]);
                homes.exchange(index, current_site, site, partner);
                // A move also affects partners of a sharing cluster on other sites.
                let is_affected = |residents: &Vec<usize>| {
                    residents.iter().any(|&resident| {
                        self.problem.tasks[resident].cluster.is_some_and(|cluster| touched.contains(&cluster))
                    })
                };
                let is_rescored = |other_site: &usize| {
                    *other_site == current_site
                        || *other_site == site
                        || !touched.is_empty() && is_affected(&homes.residents[*other_site])
                };
                let rescored_sites: Vec<usize> = (0..homes.scores.len()).filter(is_rescored).collect();
                let mut previous_scores = Vec::with_capacity(rescored_sites.len());
                for rescored_site in rescored_sites {
                    let score = self.site_key(&homes.site_of, rescored_site, &homes.residents[rescored_site], joint);
                    previous_scores.push((rescored_site, std::mem::replace(&mut homes.scores[rescored_site], score)));
                }
                if self.judge.score_key(total_score(&homes.scores)) > key_before + MIN_STEP {
                    return true;
                }
                previous_scores.into_iter().for_each(|(rescored_site, score)| homes.scores[rescored_site] = score);
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
    site_of: Vec<Option<usize>>,
    /// Known tasks by site, in ascending order.
    residents: Vec<Vec<usize>>,
    scores: Vec<LayoutScore>,
}

impl HomeAssignment {
    fn set(&mut self, index: usize, source: usize, target: usize) {
        if let Ok(place) = self.residents[source].binary_search(&index) {
            self.residents[source].remove(place);
        }
        if let Err(place) = self.residents[target].binary_search(&index) {
            self.residents[target].insert(place, index);
        }
        self.site_of[index] = Some(target);
    }

    /// Moves one task to another site, and its exchange partner to the first task's site.
    fn exchange(&mut self, index: usize, source: usize, target: usize, partner: Option<usize>) {
        self.set(index, source, target);
        if let Some(partner) = partner {
            self.set(partner, target, source);
        }
    }
}
