//! Placement: chooses the site of each task, by evening out or separating misses, then by moves and exchanges.

use std::collections::BTreeSet;

use super::{MAX_EXCHANGES, MIN_KEY_GAIN, PlanSearch};
use crate::policies::auto::model::layout::SiteLayout;
use crate::policies::auto::model::program_model::ProgramModel;
use crate::policies::auto::model::score::{LayoutScore, score};

/// Maximum number of layouts that the search by memory traffic scores.
const MAX_TRAFFIC_SCORES: usize = 200;

impl PlanSearch<'_> {
    /// Puts the tasks that miss most even with the largest cache onto as few sites as possible, so that they displace
    /// only each other.
    pub(super) fn separate_streams(&self, default: &SiteLayout) -> SiteLayout {
        let mut movable_tasks = self.movable_tasks();
        let bytes = self
            .problem
            .sites
            .iter()
            .map(|site| site.bytes)
            .fold(0.0, f64::max);
        sort_by_weight(&mut movable_tasks, &self.miss_rates(bytes, bytes));
        // Each site keeps its present number of tasks.
        let mut remaining_seats = vec![0; self.problem.sites.len()];
        for &index in &movable_tasks {
            if let Some(site) = default.site_by_task[index] {
                remaining_seats[site] += 1;
            }
        }
        let mut site_by_task = default.site_by_task.clone();
        let mut site = 0;
        for index in movable_tasks
            .into_iter()
            .filter(|&index| default.site_by_task[index].is_some())
        {
            while site < remaining_seats.len() && remaining_seats[site] == 0 {
                site += 1;
            }
            if site == remaining_seats.len() {
                break;
            }
            remaining_seats[site] -= 1;
            site_by_task[index] = Some(site);
        }
        SiteLayout::without_partitions(self.problem, site_by_task, true)
    }

    /// Returns the misses per cycle of each task with this space, at its solo speed on a cache of `cache_bytes`; 0 for
    /// unknown tasks.
    fn miss_rates(&self, bytes: f64, cache_bytes: f64) -> Vec<f64> {
        let miss_rate = |model: &ProgramModel| {
            model.cpu_demand * model.misses_at(bytes) / model.solo_cycles(cache_bytes)
        };
        self.problem
            .tasks
            .iter()
            .map(|task| task.program.as_ref().map_or(0.0, miss_rate))
            .collect()
    }

    /// Evens out misses over the sites (DI): the heaviest task goes first, to the lightest site.
    pub(super) fn balance(&self, default: &SiteLayout) -> SiteLayout {
        let mut movable_tasks = self.movable_tasks();
        let bytes = self.problem.sites[0].bytes;
        let weights = self.miss_rates(0.5 * bytes, bytes);
        sort_by_weight(&mut movable_tasks, &weights);
        let mut free_seats = self.seats_per_site();
        let mut load_by_site = vec![0.0; free_seats.len()];
        for index in self
            .problem
            .known_tasks()
            .filter(|&index| !self.problem.can_move(index))
        {
            if let Some(site) = default.site_by_task[index] {
                free_seats[site] = free_seats[site].saturating_sub(1);
                load_by_site[site] += weights[index];
            }
        }
        let load_key = |site: usize, load: f64| {
            // The bits of numbers that are not negative are ordered as the numbers.
            (
                (load / f64::from(self.problem.sites[site].cpus.count().max(1))).to_bits(),
                site,
            )
        };
        let mut open_sites: BTreeSet<(u64, usize)> = (0..free_seats.len())
            .filter(|&site| free_seats[site] > 0)
            .map(|site| load_key(site, load_by_site[site]))
            .collect();
        let mut site_by_task = default.site_by_task.clone();
        for index in movable_tasks {
            let Some((_, site)) = open_sites.pop_first() else {
                break;
            };
            free_seats[site] -= 1;
            load_by_site[site] += weights[index];
            site_by_task[index] = Some(site);
            if free_seats[site] > 0 {
                open_sites.insert(load_key(site, load_by_site[site]));
            }
        }
        SiteLayout::without_partitions(self.problem, site_by_task, true)
    }

    /// Searches the placement locally, by moves and exchanges of tasks.
    pub(super) fn place(&mut self, start_layout: SiteLayout, is_joint: bool) -> SiteLayout {
        let movable_tasks = self.movable_tasks();
        let seats_per_site = self.seats_per_site();
        let sites = self.problem.sites.len();
        let mut assignment = TaskAssignment {
            site_by_task: start_layout.site_by_task,
            residents: vec![Vec::new(); sites],
            scores: Vec::new(),
        };
        for index in self.problem.known_tasks() {
            if let Some(site) = assignment.site_by_task[index] {
                assignment.residents[site].push(index);
            }
        }
        assignment.scores = (0..sites)
            .map(|site| {
                self.score_site(
                    &assignment.site_by_task,
                    site,
                    &assignment.residents[site],
                    is_joint,
                )
            })
            .collect();
        let mut has_improved = true;
        while has_improved && self.remaining_scores.get() > 0 {
            has_improved = false;
            let mut ordered_tasks = movable_tasks.clone();
            self.generator.shuffle(&mut ordered_tasks);
            for &index in &ordered_tasks {
                if self.remaining_scores.get() == 0 {
                    break;
                }
                has_improved |=
                    self.apply_improving_move(index, &seats_per_site, &mut assignment, is_joint);
            }
        }
        SiteLayout::without_partitions(self.problem, assignment.site_by_task, true)
    }

    /// Searches the placement locally by scores of the whole layout. The other searches score sites one by one, which
    /// leaves out that tasks of different sites wait for the same memory.
    pub(super) fn place_by_traffic(&self, start_layout: SiteLayout) -> SiteLayout {
        let (seats_per_site, movable_tasks) = (self.seats_per_site(), self.movable_tasks());
        let mut best_layout =
            SiteLayout::without_partitions(self.problem, start_layout.site_by_task, true);
        let mut best_key =
            self.judge
                .score_key(score(self.problem, &best_layout, self.score_cache));
        let mut remaining_scores = MAX_TRAFFIC_SCORES;
        let mut has_improved = true;
        while has_improved {
            has_improved = false;
            for &index in &movable_tasks {
                for neighbor in self.neighbors_of(&best_layout, index, &seats_per_site) {
                    if remaining_scores == 0 {
                        return best_layout;
                    }
                    remaining_scores -= 1;
                    let key =
                        self.judge
                            .score_key(score(self.problem, &neighbor, self.score_cache));
                    if key > best_key + MIN_KEY_GAIN {
                        (best_layout, best_key, has_improved) = (neighbor, key, true);
                        break;
                    }
                }
            }
        }
        best_layout
    }

    /// Returns the layouts in which a task has moved to another site with a free CPU, or has exchanged its site with
    /// another task.
    fn neighbors_of(
        &self,
        layout: &SiteLayout,
        index: usize,
        seats_per_site: &[usize],
    ) -> Vec<SiteLayout> {
        let Some(site) = layout.site_by_task[index] else {
            return Vec::new();
        };
        let mut neighbors = Vec::new();
        for other_site in (0..seats_per_site.len())
            .filter(|&other| other != site && !self.problem.is_closed(other))
        {
            let residents = layout.known_tasks_on(self.problem, other_site);
            for partner in self.partners_among(&residents, seats_per_site[other_site]) {
                let mut neighbor = layout.clone();
                neighbor.site_by_task[index] = Some(other_site);
                partner
                    .into_iter()
                    .for_each(|partner| neighbor.site_by_task[partner] = Some(site));
                neighbors.push(neighbor);
            }
        }
        neighbors
    }

    /// Returns the tasks with which a task can exchange its site for one with these residents; `None` stands for a move
    /// to a free CPU.
    fn partners_among(&self, residents: &[usize], seat_count: usize) -> Vec<Option<usize>> {
        let free_cpu = (residents.len() < seat_count).then_some(None);
        let movable_residents = residents
            .iter()
            .copied()
            .filter(|&resident| self.problem.can_move(resident))
            .take(MAX_EXCHANGES);
        free_cpu
            .into_iter()
            .chain(movable_residents.map(Some))
            .collect()
    }

    /// Applies the first move or exchange of this task that is better. Returns whether there was one.
    fn apply_improving_move(
        &self,
        index: usize,
        seats_per_site: &[usize],
        assignment: &mut TaskAssignment,
        is_joint: bool,
    ) -> bool {
        let Some(current_site) = assignment.site_by_task[index] else {
            return false;
        };
        let total_score = |scores: &[LayoutScore]| {
            scores
                .iter()
                .copied()
                .fold(LayoutScore::EMPTY, LayoutScore::plus)
        };
        let key_before = self.judge.score_key(total_score(&assignment.scores));
        for site in (0..assignment.scores.len()).filter(|&site| site != current_site) {
            for partner in self.partners_among(&assignment.residents[site], seats_per_site[site]) {
                let touched_clusters = self.clusters_of([Some(index), partner]);
                assignment.exchange(index, current_site, site, partner);
                // A move also affects partners of a sharing cluster on other sites.
                let is_affected = |residents: &Vec<usize>| {
                    residents.iter().any(|&resident| {
                        self.problem.tasks[resident]
                            .cluster
                            .is_some_and(|cluster| touched_clusters.contains(&cluster))
                    })
                };
                let is_rescored = |other_site: &usize| {
                    *other_site == current_site
                        || *other_site == site
                        || !touched_clusters.is_empty()
                            && is_affected(&assignment.residents[*other_site])
                };
                let rescored_sites: Vec<usize> =
                    (0..assignment.scores.len()).filter(is_rescored).collect();
                let mut previous_scores = Vec::with_capacity(rescored_sites.len());
                for rescored_site in rescored_sites {
                    let score = self.score_site(
                        &assignment.site_by_task,
                        rescored_site,
                        &assignment.residents[rescored_site],
                        is_joint,
                    );
                    previous_scores.push((
                        rescored_site,
                        std::mem::replace(&mut assignment.scores[rescored_site], score),
                    ));
                }
                if self.judge.score_key(total_score(&assignment.scores)) > key_before + MIN_KEY_GAIN
                {
                    return true;
                }
                previous_scores
                    .into_iter()
                    .for_each(|(rescored_site, score)| assignment.scores[rescored_site] = score);
                assignment.exchange(index, site, current_site, partner);
            }
        }
        false
    }

    fn clusters_of(&self, tasks: [Option<usize>; 2]) -> Vec<usize> {
        tasks
            .into_iter()
            .flatten()
            .filter_map(|index| self.problem.tasks[index].cluster)
            .collect()
    }
}

/// Sorts tasks by weight, the heaviest first, and equal ones by index.
fn sort_by_weight(tasks: &mut [usize], weights: &[f64]) {
    tasks.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
}

/// The placement during the search.
struct TaskAssignment {
    site_by_task: Vec<Option<usize>>,
    /// Known tasks by site, in ascending order.
    residents: Vec<Vec<usize>>,
    scores: Vec<LayoutScore>,
}

impl TaskAssignment {
    fn move_task(&mut self, index: usize, source: usize, target: usize) {
        if let Ok(position) = self.residents[source].binary_search(&index) {
            self.residents[source].remove(position);
        }
        if let Err(position) = self.residents[target].binary_search(&index) {
            self.residents[target].insert(position, index);
        }
        self.site_by_task[index] = Some(target);
    }

    /// Moves one task to another site, and its exchange partner to the first task's site.
    fn exchange(&mut self, index: usize, source: usize, target: usize, partner: Option<usize>) {
        self.move_task(index, source, target);
        if let Some(partner) = partner {
            self.move_task(partner, target, source);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::AllowedMechanisms;
    use super::*;
    use crate::policies::auto::model::problem::PlanningProblem;
    use crate::policies::auto::model::score_cache::ScoreCache;
    use crate::policies::auto::model::score_cache::tests::{site_fixture, task_fixture};

    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        /// Does each task, the heaviest first, go to the first of the sites with the lowest load that have room?
        #[test]
        fn the_heaviest_task_goes_first_to_the_lightest_site(
            tasks in prop::collection::vec((0usize..4, 0.0f64..1.6), 4..11),
        ) {
            let tasks = tasks.iter().enumerate();
            let tasks: Vec<_> = tasks.map(|(id, &(site, share))| task_fixture(id as u32, site, share)).collect();
            let sites = (0..4).map(|id| site_fixture(id, 3)).collect();
            let problem = PlanningProblem::undisturbed_problem(sites, tasks);
            let score_cache = ScoreCache::new(&problem);
            let search = PlanSearch::with_effort(&problem, &score_cache, AllowedMechanisms::from_filter(|_| true), 1);
            let default = SiteLayout::from_default_sites(&problem, &BTreeMap::new());
            let weight_of = |index: usize| {
                let (model, bytes) = (problem.tasks[index].program.as_ref().unwrap(), problem.sites[0].bytes);
                model.cpu_demand * model.misses_at(0.5 * bytes) / model.solo_cycles(bytes)
            };
            let mut ordered_tasks = search.movable_tasks();
            ordered_tasks.sort_by(|&a, &b| weight_of(b).total_cmp(&weight_of(a)).then(a.cmp(&b)));
            let (mut seats, mut loads) = (search.seats_per_site(), [0.0; 4]);
            let mut expected_sites = default.site_by_task.clone();
            for index in ordered_tasks {
                let load_per_cpu = |site: usize| loads[site] / f64::from(problem.sites[site].cpus.count().max(1));
                let open_sites = (0..4).filter(|&site| seats[site] > 0);
                let Some(site) = open_sites.reduce(|a, b| if load_per_cpu(b) < load_per_cpu(a) { b } else { a }) else {
                    continue;
                };
                seats[site] -= 1;
                loads[site] += weight_of(index);
                expected_sites[index] = Some(site);
            }
            prop_assert_eq!(search.balance(&default).site_by_task, expected_sites);
        }
    }
}
