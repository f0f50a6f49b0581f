//! Placement: chooses the site of each task, by evening out or separating misses, then by moves and exchanges.

use std::collections::BTreeSet;

use super::site::SiteTasks;
use super::{MAX_EXCHANGES, MIN_KEY_GAIN, PlanSearch};
use crate::auto::model::layout::SiteLayout;
use crate::auto::model::program_model::ProgramModel;
use crate::auto::model::score::{LayoutScore, score, total_score};

/// Maximum number of layouts that the search by memory traffic scores.
const MAX_TRAFFIC_SCORES: usize = 200;

impl PlanSearch<'_> {
    /// The misses per cycle of each task with this space, at its solo speed on a cache of `cache_bytes`; 0 for unknown
    /// tasks.
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
    pub(super) fn place(&mut self, start_layout: SiteLayout) -> SiteLayout {
        let movable_tasks = self.movable_tasks();
        let seats_per_site = self.seats_per_site();
        let mut assignment = self.assign(start_layout.site_by_task);
        let mut has_improved = true;
        while has_improved && !self.is_spent() {
            has_improved = false;
            let mut ordered_tasks = movable_tasks.clone();
            self.generator.shuffle(&mut ordered_tasks);
            for &index in &ordered_tasks {
                if self.is_spent() {
                    break;
                }
                has_improved |= self.apply_improving_move(index, &seats_per_site, &mut assignment);
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
            self.comparator
                .score_key(score(self.problem, &best_layout, self.score_cache));

        let mut score_budget = MAX_TRAFFIC_SCORES;
        let mut has_improved = true;
        while has_improved {
            has_improved = false;
            for &index in &movable_tasks {
                for neighbor in self.neighbors_of(&best_layout, index, &seats_per_site) {
                    if score_budget == 0 {
                        return best_layout;
                    }
                    score_budget -= 1;
                    let key =
                        self.comparator
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

    /// The layouts in which a task has moved to another site with a free CPU, or has exchanged its site with another
    /// task.
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

    /// The tasks with which a task can exchange its site for one with these residents; `None` stands for a move to a
    /// free CPU.
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
    ) -> bool {
        let Some(from_site) = assignment.site_by_task[index] else {
            return false;
        };

        let key_before = self.comparator.score_key(total_score(&assignment.scores));
        for to_site in (0..assignment.scores.len()).filter(|&site| site != from_site) {
            let residents = &assignment.residents[to_site];
            for partner in self.partners_among(residents, seats_per_site[to_site]) {
                let task_move = TaskMove {
                    index,
                    from_site,
                    to_site,
                    partner,
                };
                let previous_scores = self.apply_move(task_move, assignment);
                let key = self.comparator.score_key(total_score(&assignment.scores));
                if key > key_before + MIN_KEY_GAIN {
                    return true;
                }
                assignment.undo(task_move, previous_scores);
            }
        }

        false
    }

    /// Moves a task to the best of these sites that has a free CPU, if that is better than where it is. Returns the
    /// site that it joins.
    pub(super) fn insert(
        &self,
        index: usize,
        sites: &[usize],
        assignment: &mut TaskAssignment,
    ) -> Option<usize> {
        let from_site = assignment.site_by_task[index]?;
        let mut best_key =
            self.comparator.score_key(total_score(&assignment.scores)) + MIN_KEY_GAIN;
        let mut best_move = None;
        for &to_site in sites.iter().filter(|&&site| site != from_site) {
            let task_move = TaskMove {
                index,
                from_site,
                to_site,
                partner: None,
            };
            let previous_scores = self.apply_move(task_move, assignment);
            let key = self.comparator.score_key(total_score(&assignment.scores));
            if key > best_key {
                (best_key, best_move) = (key, Some(task_move));
            }
            assignment.undo(task_move, previous_scores);
        }

        self.apply_move(best_move?, assignment);
        best_move.map(|task_move| task_move.to_site)
    }

    /// Applies a move, and scores the sites that it changes. Returns their earlier scores.
    fn apply_move(
        &self,
        task_move: TaskMove,
        assignment: &mut TaskAssignment,
    ) -> Vec<(usize, LayoutScore)> {
        let touched_clusters = self.clusters_of([Some(task_move.index), task_move.partner]);
        assignment.exchange(task_move);

        // A move also affects partners of a sharing cluster on other sites.
        let is_affected = |&resident: &usize| {
            let cluster = self.problem.tasks[resident].cluster;
            cluster.is_some_and(|cluster| touched_clusters.contains(&cluster))
        };
        let is_rescored = |site: &usize| {
            *site == task_move.from_site
                || *site == task_move.to_site
                || !touched_clusters.is_empty()
                    && assignment.residents[*site].iter().any(is_affected)
        };
        let rescored_sites: Vec<usize> = (0..assignment.scores.len()).filter(is_rescored).collect();

        let mut previous_scores = Vec::with_capacity(rescored_sites.len());
        for site in rescored_sites {
            let residents = &assignment.residents[site];
            let score = self.score_site(&assignment.site_by_task, site, residents);
            let previous_score = std::mem::replace(&mut assignment.scores[site], score);
            previous_scores.push((site, previous_score));
        }
        previous_scores
    }

    /// Scores a site with these members, without partitions.
    fn score_site(
        &self,
        site_by_task: &[Option<usize>],
        site: usize,
        members: &[usize],
    ) -> LayoutScore {
        if members.is_empty() {
            return LayoutScore::EMPTY;
        }
        SiteTasks::new(self, site_by_task, site, members).score(&[], None)
    }

    /// The placement of these tasks with the scores of all sites.
    pub(super) fn assign(&self, site_by_task: Vec<Option<usize>>) -> TaskAssignment {
        let sites = self.problem.sites.len();
        let mut residents = vec![Vec::new(); sites];
        for index in self.problem.known_tasks() {
            if let Some(site) = site_by_task[index] {
                residents[site].push(index);
            }
        }
        let scores = (0..sites)
            .map(|site| self.score_site(&site_by_task, site, &residents[site]))
            .collect();
        TaskAssignment {
            site_by_task,
            residents,
            scores,
        }
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

/// The move of a task to another site, and of its exchange partner to the first task's site.
#[derive(Clone, Copy)]
struct TaskMove {
    index: usize,
    from_site: usize,
    to_site: usize,
    partner: Option<usize>,
}

/// The placement during the search.
pub(super) struct TaskAssignment {
    pub site_by_task: Vec<Option<usize>>,
    /// Known tasks by site, in ascending order.
    pub residents: Vec<Vec<usize>>,
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

    fn exchange(&mut self, task_move: TaskMove) {
        self.move_task(task_move.index, task_move.from_site, task_move.to_site);
        if let Some(partner) = task_move.partner {
            self.move_task(partner, task_move.to_site, task_move.from_site);
        }
    }

    fn undo(&mut self, task_move: TaskMove, previous_scores: Vec<(usize, LayoutScore)>) {
        for (site, score) in previous_scores {
            self.scores[site] = score;
        }
        self.exchange(TaskMove {
            from_site: task_move.to_site,
            to_site: task_move.from_site,
            ..task_move
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::Mechanism;
    use super::*;
    use crate::auto::model::problem::PlanningProblem;
    use crate::auto::model::program_model::MemoryDistance;
    use crate::auto::model::program_model::tests::far_from;
    use crate::auto::model::score_cache::ScoreCache;
    use crate::auto::model::score_cache::tests::{site_fixture, task_fixture};

    use proptest::prelude::*;

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

    /// Do two tasks that are far from their memory change places, and is no site filled beyond its room?
    #[test]
    fn tasks_move_to_their_memory() {
        let best_candidate = |memory: &[(usize, usize)]| {
            let problem = streams_on_nodes(memory);
            let score_cache = ScoreCache::new(&problem);
            let allowed = [Mechanism::Placement].into();
            let mut search = PlanSearch::with_effort(&problem, &score_cache, allowed, 500);
            let candidates = search.find_candidates(&BTreeMap::new(), None);
            let value = LayoutScore::mean_speed;
            let default = value(candidates[0].score);
            let best = candidates
                .into_iter()
                .reduce(|a, b| {
                    if value(b.score) > value(a.score) {
                        b
                    } else {
                        a
                    }
                })
                .unwrap();
            (best.layout.site_by_task, default, value(best.score))
        };

        let (sites, default, best) = best_candidate(&[(1, 0), (0, 1), (0, 0), (1, 1)]);
        assert_eq!(sites, [1, 0, 0, 1].map(Some));
        // One miss per 67 instructions takes 50 cycles near and 100 far, everything else takes 1 cycle: 1.75 over 2.5
        // for two of four.
        assert!((default - 0.85).abs() < 1e-6 && (best - 1.0).abs() < 1e-6);
        let (sites, default, best) = best_candidate(&[(0, 0), (1, 1), (0, 0)]);
        assert!(sites == [0, 1, 0].map(Some) && default == best);
        let (sites, ..) = best_candidate(&[(1, 0), (1, 0), (1, 1)]);
        assert_eq!(sites.iter().filter(|site| **site == Some(1)).count(), 2);
    }

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
            let search = PlanSearch::with_effort(&problem, &score_cache, Mechanism::ALL.into(), 1);
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
