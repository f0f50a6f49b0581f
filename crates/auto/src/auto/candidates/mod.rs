//! The search: placements by moves and exchanges from a few starts, then the partitions or the gangs of each site.
//!
//! Problem: mechanisms conflict (thesis 7.3): sharing clusters unite tasks that spreading separates, partition sizes
//! hold for one placement only, and gangs change which tasks run together. Method: one forecast scores whole plans.
//! Placement is climbed from the present one, from misses that are dealt out evenly, and from gathered sharing
//! clusters. Each placement is divided where that is forecast to gain. Gangs are tried on the default's and the present
//! placement only: a placement that was chosen by the forecast is where the forecast is most likely too good.
//! Properties: deterministic; bounded by a number of site scores; disabled mechanisms are not used.

mod gangs;
mod newcomers;
mod placement;
mod sharing;
mod site;
mod space;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{SplitMix64, TaskId};
use serde::Deserialize;

use self::site::SiteTasks;
pub use self::space::unit_steps;
use super::model::layout::SiteLayout;
use super::model::problem::PlanningProblem;
use super::model::score::{LayoutScore, score};
use super::model::score_cache::ScoreCache;
use super::model::sites::CacheSite;

/// A mechanism that can be disabled.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    Placement,
    Sharing,
    Space,
    Gangs,
}

impl Mechanism {
    /// All mechanisms, in the order of reports.
    pub const ALL: [Mechanism; 4] = [
        Mechanism::Placement,
        Mechanism::Sharing,
        Mechanism::Space,
        Mechanism::Gangs,
    ];

    pub fn describe(self) -> &'static str {
        match self {
            Mechanism::Placement => "placement",
            Mechanism::Sharing => "sharing",
            Mechanism::Space => "space",
            Mechanism::Gangs => "gangs",
        }
    }
}

/// The mechanisms that the search may use.
pub type AllowedMechanisms = BTreeSet<Mechanism>;

/// A comparator of plans.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlanComparator {
    /// Lowest speed allowed for any task, relative to its solo speed.
    pub min_speed: f64,
}

impl PlanComparator {
    /// The key of a score; larger is better. Goals come first, then the lowest speed, then the mean.
    pub fn score_key(&self, score: LayoutScore) -> f64 {
        let speed_shortfall = (self.min_speed - score.min_relative_speed).clamp(0.0, 10.0);
        score.mean_speed() - 100.0 * score.unmet_goals - 10.0 * speed_shortfall
    }

    /// The first of the plans with the largest key.
    pub fn best_of<'c>(
        &self,
        candidates: impl IntoIterator<Item = &'c CandidatePlan>,
    ) -> Option<&'c CandidatePlan> {
        let key = |candidate: &CandidatePlan| self.score_key(candidate.score);
        candidates
            .into_iter()
            .reduce(|a, b| if key(b) > key(a) { b } else { a })
    }
}

/// A plan with its score.
#[derive(Clone, Debug)]
pub struct CandidatePlan {
    /// The plan's name in reasons.
    pub label: String,
    /// The single mechanism of the plan; `None` for the default, the plan in force, or a combination.
    pub mechanism: Option<Mechanism>,
    pub layout: SiteLayout,
    pub score: LayoutScore,
}

/// Maximum loss of speed of the slowest task that a plan may cause.
const MAX_WORST_LOSS: f64 = 0.02;
/// Number of tasks up to which placement is searched by the forecast of all sites together.
const MAX_TRAFFIC_TASKS: usize = 24;

/// A search with its remaining evaluations.
pub struct PlanSearch<'a> {
    pub problem: &'a PlanningProblem,
    pub score_cache: &'a ScoreCache,
    pub allowed_mechanisms: AllowedMechanisms,
    pub comparator: PlanComparator,
    /// Number of site scores that may still be computed; a score with gangs counts for several.
    pub score_budget: Cell<usize>,
    pub generator: SplitMix64,
}

#[cfg(test)]
impl<'a> PlanSearch<'a> {
    /// A search for the largest weighted speedup with this number of scores, seeded with 1.
    pub fn with_effort(
        problem: &'a PlanningProblem,
        score_cache: &'a ScoreCache,
        allowed_mechanisms: AllowedMechanisms,
        effort: usize,
    ) -> Self {
        PlanSearch {
            problem,
            score_cache,
            allowed_mechanisms,
            comparator: PlanComparator { min_speed: 0.0 },
            score_budget: Cell::new(effort),
            generator: SplitMix64::new(1),
        }
    }
}

impl PlanSearch<'_> {
    /// Sets the comparator's lowest speed by the default plan, and returns that plan.
    pub fn set_min_speed(
        &mut self,
        default_sites: &BTreeMap<TaskId, usize>,
        current_layout: Option<&SiteLayout>,
    ) -> CandidatePlan {
        let default = self.build_default(default_sites, current_layout);
        self.comparator.min_speed = default.score.min_relative_speed - MAX_WORST_LOSS;
        default
    }

    /// Builds the default plan. Tasks stay where they were placed, so once another plan is in force, the default has to
    /// pin them to their sites.
    fn build_default(
        &self,
        default_sites: &BTreeMap<TaskId, usize>,
        current_layout: Option<&SiteLayout>,
    ) -> CandidatePlan {
        let mut layout = SiteLayout::from_default_sites(self.problem, default_sites);
        if let Some(current_layout) = current_layout {
            if current_layout.is_pinned.contains(&true) {
                layout = SiteLayout::without_partitions(self.problem, layout.site_by_task, true);
            }
            layout = self.problem.with_closed_sites(layout, current_layout);
        }
        CandidatePlan {
            label: "default".to_string(),
            mechanism: None,
            score: score(self.problem, &layout, self.score_cache),
            layout,
        }
    }

    /// All candidates, the default first and the plan in force second.
    pub fn find_candidates(
        &mut self,
        default_sites: &BTreeMap<TaskId, usize>,
        current_layout: Option<SiteLayout>,
    ) -> Vec<CandidatePlan> {
        let default = self.set_min_speed(default_sites, current_layout.as_ref());
        let current = current_layout.unwrap_or_else(|| default.layout.clone());
        let placements = self.find_placements(&default.layout, &current);

        let mut candidates = vec![default];
        self.add_candidate(&mut candidates, "the plan in force", None, current.clone());
        if self.allowed_mechanisms.contains(&Mechanism::Gangs) {
            for (label, _, layout) in &placements[..2] {
                let ganged = self.with_budget_share(3, |search| search.add_rotations(layout));
                let layout = self.problem.with_closed_sites(ganged, &current);
                let label = format!("{label} with gangs");
                self.add_candidate(&mut candidates, label, Some(Mechanism::Gangs), layout);
            }
        }

        let placement_count = placements.len();
        for (index, (label, mechanism, layout)) in placements.into_iter().enumerate() {
            if self.allowed_mechanisms.contains(&Mechanism::Space) {
                let divided = self.with_budget_share(placement_count - index, |search| {
                    search.with_best_partitions(&layout)
                });
                let layout = self.problem.with_closed_sites(divided, &current);
                let single = (index == 0).then_some(Mechanism::Space);
                let label = format!("{label} with partitions");
                self.add_candidate(&mut candidates, label, single, layout);
            }
            let layout = self.problem.with_closed_sites(layout, &current);
            self.add_candidate(&mut candidates, label, mechanism, layout);
        }
        candidates
    }

    /// Undivided placements: the default and the present one, then those of the searches.
    fn find_placements(
        &mut self,
        default: &SiteLayout,
        current: &SiteLayout,
    ) -> Vec<(&'static str, Option<Mechanism>, SiteLayout)> {
        let problem = self.problem;
        let current_sites = current.site_by_task.clone();
        let present = SiteLayout::without_partitions(problem, current_sites, true);
        let mut placements = vec![
            ("default", None, default.clone()),
            ("the present placement", None, present.clone()),
        ];
        let can_place =
            self.allowed_mechanisms.contains(&Mechanism::Placement) && problem.sites.len() > 1;
        let shares_data = self.allowed_mechanisms.contains(&Mechanism::Sharing)
            && problem.tasks.iter().any(|task| task.cluster.is_some());

        let placement = Some(Mechanism::Placement);
        if shares_data {
            let gathered = self.cluster_sharers(default);
            placements.push(("sharing", Some(Mechanism::Sharing), gathered.clone()));
            if can_place {
                let placed = self.with_budget_share(4, |search| search.place(gathered));
                placements.push(("placement from gathered sharers", None, placed));
            }
        }
        if can_place {
            let dealt = self.balance(default);
            let placed = self.with_budget_share(4, |search| search.place(present));
            placements.push(("placement", placement, placed));
            let placed = self.with_budget_share(3, |search| search.place(dealt));
            placements.push(("placement from balanced misses", placement, placed));
        }
        if can_place && problem.bus.is_some() && problem.tasks.len() <= MAX_TRAFFIC_TASKS {
            let key = |layout: &SiteLayout| {
                self.comparator
                    .score_key(score(problem, layout, self.score_cache))
            };
            let layouts = placements.iter().map(|(.., layout)| layout);
            let best = layouts.reduce(|a, b| if key(b) > key(a) { b } else { a });
            let placed = self.place_by_traffic(best.unwrap_or(default).clone());
            placements.push(("placement by memory traffic", placement, placed));
        }
        placements
    }

    /// Runs a search that may use one part in `budget_divisor` of the remaining site scores.
    fn with_budget_share<T>(
        &mut self,
        budget_divisor: usize,
        search: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let remaining_budget = self.score_budget.get();
        self.score_budget
            .set(remaining_budget / budget_divisor.max(1));
        let outcome = search(self);
        self.score_budget.set(
            remaining_budget - remaining_budget / budget_divisor.max(1) + self.score_budget.get(),
        );
        outcome
    }

    pub(super) fn movable_tasks(&self) -> Vec<usize> {
        self.problem
            .known_tasks()
            .filter(|&index| self.problem.can_move(index))
            .collect()
    }

    /// The number of known tasks that fit on each open site: by cores while these suffice, otherwise in proportion to
    /// CPUs.
    pub(super) fn seats_per_site(&self) -> Vec<usize> {
        let tasks = self.problem.known_tasks().count();
        let cores: usize = self.problem.sites.iter().map(|site| site.cores).sum();
        let cpus: u32 = self
            .problem
            .sites
            .iter()
            .map(|site| site.cpus.count())
            .sum();
        let fair_share =
            |site_cpus: u32| (tasks * site_cpus as usize).div_ceil(cpus.max(1) as usize);
        let seats_on_site = |(index, site): (usize, &CacheSite)| match self.problem.is_closed(index)
        {
            true => 0,
            false if tasks <= cores => site.cores,
            false => fair_share(site.cpus.count()).max(site.cores),
        };

        self.problem
            .sites
            .iter()
            .enumerate()
            .map(seats_on_site)
            .collect()
    }

    fn is_spent(&self) -> bool {
        self.score_budget.get() == 0
    }

    fn spend(&self, scores: usize) {
        let score_budget = self.score_budget.get().saturating_sub(scores);
        self.score_budget.set(score_budget);
    }

    /// Closed sites stay as they are.
    pub(super) fn refine_each_site(
        &self,
        layout: &SiteLayout,
        sites: impl IntoIterator<Item = usize>,
        change: impl Fn(&SiteTasks<'_>, &mut SiteLayout),
    ) -> SiteLayout {
        let mut new_layout = layout.clone();
        for site in sites
            .into_iter()
            .filter(|&site| !self.problem.is_closed(site))
        {
            let members = layout.known_tasks_on(self.problem, site);
            let site_tasks = SiteTasks::new(self, &layout.site_by_task, site, &members);
            change(&site_tasks, &mut new_layout);

            // Partitions and rotations apply to tasks that stay on the site.
            if !new_layout.partitions[site].is_empty() || new_layout.rotations[site].is_some() {
                for &index in members
                    .iter()
                    .filter(|&&task| self.problem.tasks[task].is_movable)
                {
                    new_layout.is_pinned[index] = true;
                }
            }
        }

        new_layout
    }

    /// Scores a layout, and adds it to the candidates if it differs from all earlier ones.
    fn add_candidate(
        &self,
        candidates: &mut Vec<CandidatePlan>,
        label: impl Into<String>,
        mechanism: Option<Mechanism>,
        layout: SiteLayout,
    ) {
        if candidates.iter().all(|plan| plan.layout != layout) {
            candidates.push(CandidatePlan {
                label: label.into(),
                mechanism,
                score: score(self.problem, &layout, self.score_cache),
                layout,
            });
        }
    }
}

/// Number of tasks whose score counts as one score; a score of more tasks counts as several.
pub const TASKS_PER_SCORE: usize = 8;
/// Number of tasks of another site with which an exchange is tried.
pub const MAX_EXCHANGES: usize = 8;
/// Smallest gain of a step; without this limit, tasks would move for nothing.
pub const MIN_KEY_GAIN: f64 = 1e-4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::model::layout::PartitionMembers;
    use crate::auto::model::problem::{PlanningProblem, ProblemTask};
    use crate::auto::model::program_model::tests::{CACHE, program_fixture, uniform_program};
    use crate::auto::model::score::forecast_speeds;
    use crate::auto::model::score_cache;
    use cachemate_core::ProcessId;

    fn problem_fixture(sites: u32, cpus: u32, tasks: u32) -> PlanningProblem {
        let site = |id| CacheSite {
            partition_units: None,
            ..score_cache::tests::site_fixture(id, cpus)
        };
        let (reuser, stream) = (
            uniform_program(0.22 * CACHE, 0.002),
            program_fixture(|_| 0.01),
        );
        let problem_task = |id: u32| ProblemTask {
            task: TaskId(id),
            process: ProcessId(id),
            is_movable: true,
            program: Some(if id.is_multiple_of(2) {
                reuser.clone()
            } else {
                stream.clone()
            }),
            cluster: None,
            last_site: Some((id % sites) as usize),
            stays_on_site: false,
        };
        let (sites, tasks) = (
            (0..sites).map(site).collect(),
            (0..tasks).map(problem_task).collect(),
        );
        PlanningProblem::undisturbed_problem(sites, tasks)
    }

    fn best_scores(
        problem: &PlanningProblem,
        allowed: AllowedMechanisms,
        effort: usize,
    ) -> (LayoutScore, LayoutScore, usize) {
        let score_cache = ScoreCache::new(problem);
        let mut search = PlanSearch::with_effort(problem, &score_cache, allowed, effort);
        let candidates = search.find_candidates(&BTreeMap::new(), None);
        let comparator = search.comparator;
        let best = comparator.best_of(&candidates).unwrap();
        (candidates[0].score, best.score, search.score_budget.get())
    }

    fn all_mechanisms() -> AllowedMechanisms {
        Mechanism::ALL.into()
    }

    /// Are streams and programs that keep data separated if the machine's own scheduler has mixed them?
    #[test]
    fn streams_are_separated_from_programs_that_keep_data() {
        let mut problem = problem_fixture(2, 4, 8);
        problem
            .tasks
            .iter_mut()
            .enumerate()
            .for_each(|(index, problem_task)| problem_task.last_site = Some(index / 4));
        let (default, best_score, _) = best_scores(&problem, all_mechanisms(), 2_000);
        let value = LayoutScore::mean_speed;
        assert!(
            value(best_score) > 1.01 * value(default) && value(best_score) > 0.98,
            "{default:?} {best_score:?}"
        );
        let nothing = AllowedMechanisms::default();
        let (default, best_score, _) = best_scores(&problem, nothing, 2_000);
        assert_eq!(
            value(default),
            value(best_score),
            "all mechanisms are disabled"
        );
    }

    /// Does the worked example of the policy's page hold?
    #[test]
    fn the_example_of_the_page_holds() {
        let misses_of_reuser = |bytes| if bytes < 0.75 * CACHE { 0.02 } else { 0.001 };
        let mut tasks = [0, 1].map(|id| score_cache::tests::task_fixture(id, 0, 0.5));
        tasks[0].program = Some(program_fixture(misses_of_reuser));
        tasks[1].program = Some(program_fixture(|_| 0.03));
        let sites = vec![score_cache::tests::site_fixture(0, 2)];
        let problem = PlanningProblem::undisturbed_problem(sites, tasks.to_vec());
        let score_cache = ScoreCache::new(&problem);
        let mut search = PlanSearch::with_effort(&problem, &score_cache, all_mechanisms(), 2_000);
        let candidates = search.find_candidates(&BTreeMap::new(), None);

        let speeds = forecast_speeds(&problem, &candidates[0].layout, &score_cache);
        let [reuser, stream] = [speeds[0].unwrap(), speeds[1].unwrap()];
        assert!((8.0 * reuser.occupancy_bytes / CACHE - 3.8).abs() < 0.1);
        assert!((reuser.relative_speed - 1.1 / 3.0).abs() < 1e-3);
        assert!((stream.relative_speed - 1.0).abs() < 1e-6);

        let value = LayoutScore::mean_speed;
        let best = search.comparator.best_of(&candidates).unwrap();
        assert!((value(best.score) / value(candidates[0].score) - 1.463).abs() < 1e-3);
        let partitions = &best.layout.partitions[0];
        let of_reuser = partitions.iter().find(|part| part.members == [0]).unwrap();
        assert!(of_reuser.units >= 6, "{partitions:?}");
    }

    /// Do threads that have never run on different caches stay together, and are they split if they have?
    #[test]
    fn threads_that_never_ran_on_different_caches_stay_together() {
        let mut problem = problem_fixture(2, 4, 8);
        // Two tasks that keep data belong to one process on the cache of the streams.
        for (at, problem_task) in problem.tasks.iter_mut().enumerate() {
            problem_task.last_site = Some(at / 4);
        }

        let pair = [0, 2];
        let parted = |problem: &PlanningProblem| {
            let score_cache = ScoreCache::new(problem);
            let mut search =
                PlanSearch::with_effort(problem, &score_cache, all_mechanisms(), 2_000);
            let candidates = search.find_candidates(&BTreeMap::new(), None);
            candidates
                .iter()
                .filter(|candidate| {
                    pair.iter()
                        .any(|&index| candidate.layout.site_by_task[index] != Some(0))
                })
                .count()
        };
        assert!(parted(&problem) > 0, "some plan moves them");
        pair.iter()
            .for_each(|&index| problem.tasks[index].stays_on_site = true);
        assert_eq!(parted(&problem), 0);
    }

    /// If a task on the first cache is temporarily unknown, is that cache the same in every plan, and does no task join
    /// it?
    #[test]
    fn a_cache_with_an_unknown_task_is_the_same_in_every_plan() {
        let mut problem = problem_fixture(2, 4, 8);
        problem
            .tasks
            .iter_mut()
            .enumerate()
            .for_each(|(index, problem_task)| problem_task.last_site = Some(index / 4));
        problem.tasks[1].program = None;
        let count_same = |problem: &PlanningProblem| {
            let mut current_layout = SiteLayout::without_partitions(
                problem,
                problem
                    .tasks
                    .iter()
                    .map(|problem_task| problem_task.last_site)
                    .collect(),
                false,
            );
            current_layout.partitions[0] = vec![PartitionMembers {
                members: vec![0],
                units: 5,
            }];
            let score_cache = ScoreCache::new(problem);
            let mut search =
                PlanSearch::with_effort(problem, &score_cache, all_mechanisms(), 2_000);
            let candidates = search.find_candidates(&BTreeMap::new(), Some(current_layout.clone()));
            let on_first = |layout: &SiteLayout| {
                layout
                    .site_by_task
                    .iter()
                    .map(|home| *home == Some(0))
                    .collect::<Vec<_>>()
            };
            let is_same = |candidate: &&CandidatePlan| {
                candidate.layout.partitions[0] == current_layout.partitions[0]
                    && on_first(&candidate.layout) == on_first(&current_layout)
            };
            (candidates.iter().filter(is_same).count(), candidates.len())
        };
        let (same_count, count) = count_same(&problem);
        assert!(same_count < count, "{same_count} of {count}");
        problem.close_sites(|task| task == TaskId(1));
        assert!(problem.is_closed(0) && !problem.is_closed(1));
        let (same_count, count) = count_same(&problem);
        assert_eq!(same_count, count);
        problem.closed_sites.clear();
        problem.close_sites(|_| false);
        assert!(!problem.is_closed(0), "searches no longer wait for it");
    }

    /// Does the search of a large machine stay within its evaluations, and find a plan at least as good as the default?
    #[test]
    fn large_machines_are_searched_within_the_effort() {
        let problem = problem_fixture(64, 16, 1_000);
        let (default, best_score, remaining) = best_scores(&problem, all_mechanisms(), 400);
        let value = LayoutScore::mean_speed;
        assert!(
            value(best_score) >= value(default) && remaining <= 400,
            "{default:?} {best_score:?}"
        );
    }
}
