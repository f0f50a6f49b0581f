//! Candidates: the plan of every single mechanism, the default, the plan in force, and a joint local search over all
//! mechanisms.
//!
//! Problem: mechanisms conflict (thesis 7.3): sharing clusters unite tasks that spreading separates, partition sizes
//! hold for one placement only, and gangs change which tasks run together. Method: one forecast scores whole plans.
//! Placement is searched first, by moves, exchanges and moves of whole sharing clusters, each of which rescores only
//! the sites that it changes. The partitions and the rotation of each site follow. With few tasks, placement is
//! then searched once more with the best partitions and rotations of each site. Properties: deterministic; bounded by a
//! number of site scores; disabled mechanisms are not used.

mod gangs;
mod memory_nodes;
mod newcomers;
mod placement;
mod sharing;
mod site;
mod space;

use std::cell::Cell;
use std::collections::BTreeMap;

use cachemate_core::{SplitMix64, TaskId};
use serde::Deserialize;

use self::site::SiteTasks;
pub use self::space::unit_steps;
use super::model::layout::{GangRotation, PartitionMembers, SiteLayout};
use super::model::problem::{CacheSite, PlanningProblem};
use super::model::score::{LayoutScore, PlanObjective, score, split_shares};
use super::model::score_cache::ScoreCache;

/// A mechanism that can be disabled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    Placement,
    /// Placement by the node of a task's memory.
    MemoryNodes,
    Sharing,
    Space,
    Gangs,
}

impl Mechanism {
    /// All mechanisms, in the order of reports.
    pub const ALL: [Mechanism; 5] = [
        Mechanism::Placement,
        Mechanism::MemoryNodes,
        Mechanism::Sharing,
        Mechanism::Space,
        Mechanism::Gangs,
    ];

    /// Returns the mechanism's name in reasons.
    pub fn describe(self) -> &'static str {
        match self {
            Mechanism::Placement => "placement",
            Mechanism::MemoryNodes => "memory nodes",
            Mechanism::Sharing => "sharing",
            Mechanism::Space => "space",
            Mechanism::Gangs => "gangs",
        }
    }
}

/// The mechanisms that the search may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AllowedMechanisms([bool; Mechanism::ALL.len()]);

impl AllowedMechanisms {
    /// Allows the mechanisms for which `is_allowed` returns true.
    pub fn from_filter(is_allowed: impl Fn(Mechanism) -> bool) -> Self {
        AllowedMechanisms(Mechanism::ALL.map(is_allowed))
    }

    /// Returns whether the search may use this mechanism.
    pub fn allows(self, mechanism: Mechanism) -> bool {
        Mechanism::ALL
            .iter()
            .zip(self.0)
            .any(|(candidate, is_allowed)| *candidate == mechanism && is_allowed)
    }
}

/// A comparator of plans.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlanComparator {
    pub objective: PlanObjective,
    /// Lowest speed allowed for any task, relative to its solo speed; not used for the objective of the slowest task.
    pub min_speed: f64,
}

impl PlanComparator {
    /// Returns the key of a score; larger is better. Goals come first, then the lowest speed, then the objective.
    pub fn score_key(&self, score: LayoutScore) -> f64 {
        let speed_shortfall = (self.min_speed - score.min_relative_speed()).clamp(0.0, 10.0);
        score.objective_value(self.objective) - 100.0 * score.unmet_goals - 10.0 * speed_shortfall
    }
}

/// A plan with its score.
#[derive(Clone, Debug)]
pub struct CandidatePlan {
    /// The plan's name in reasons.
    pub label: &'static str,
    /// The single mechanism of the plan; `None` for the default, the plan in force, or a combination.
    pub mechanism: Option<Mechanism>,
    pub layout: SiteLayout,
    pub score: LayoutScore,
}

/// Maximum loss of speed of the slowest task that a plan may cause if the objective is not the slowest task.
const MAX_WORST_LOSS: f64 = 0.02;
/// Number of tasks up to which placement is searched together with partitions and rotations.
const MAX_JOINT_TASKS: usize = 24;

/// A search with its remaining evaluations.
pub struct PlanSearch<'a> {
    pub problem: &'a PlanningProblem,
    pub score_cache: &'a ScoreCache,
    pub allowed_mechanisms: AllowedMechanisms,
    pub judge: PlanComparator,
    /// Number of site scores that may still be computed; a score with gangs counts for several.
    pub remaining_scores: Cell<usize>,
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
            judge: PlanComparator {
                objective: PlanObjective::WeightedSpeedup,
                min_speed: 0.0,
            },
            remaining_scores: Cell::new(effort),
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
        if self.judge.objective != PlanObjective::WorstSlowdown {
            self.judge.min_speed = default.score.min_relative_speed() - MAX_WORST_LOSS;
        }
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
        let score = score(self.problem, &layout, self.score_cache);
        CandidatePlan {
            label: "default",
            mechanism: None,
            layout,
            score,
        }
    }

    /// Returns all candidates, the default first.
    pub fn find_candidates(
        &mut self,
        default_sites: &BTreeMap<TaskId, usize>,
        current_layout: Option<SiteLayout>,
    ) -> Vec<CandidatePlan> {
        let (problem, score_cache) = (self.problem, self.score_cache);
        let default_plan = self.set_min_speed(default_sites, current_layout.as_ref());
        let default = default_plan.layout.clone();
        let mut candidates = vec![default_plan];
        let restore_closed_sites = |layout: SiteLayout| match &current_layout {
            Some(current_layout) => problem.with_closed_sites(layout, current_layout),
            None => layout,
        };
        let mut add_candidate =
            |label: &'static str, mechanism: Option<Mechanism>, layout: SiteLayout| {
                add(
                    &mut candidates,
                    problem,
                    score_cache,
                    (label, mechanism),
                    restore_closed_sites(layout),
                );
            };
        let mut start_layouts = vec![("joint from the default", default.clone())];
        if let Some(current) = &current_layout {
            add_candidate("the plan in force", None, current.clone());
            start_layouts.push((
                "joint from the plan in force",
                SiteLayout::without_partitions(problem, current.site_by_task.clone(), true),
            ));
        }
        let shares_data = self.allowed_mechanisms.allows(Mechanism::Sharing)
            && problem
                .tasks
                .iter()
                .any(|problem_task| problem_task.cluster.is_some());
        if self.allowed_mechanisms.allows(Mechanism::Space) {
            add_candidate(
                "space",
                Some(Mechanism::Space),
                self.with_budget_share(8, |search| search.with_best_partitions(&default)),
            );
        }
        if self.allowed_mechanisms.allows(Mechanism::Gangs) {
            add_candidate(
                "gangs",
                Some(Mechanism::Gangs),
                self.with_budget_share(2, |search| search.add_rotations(&default)),
            );
        }
        if shares_data {
            let layout = self.cluster_sharers(&default);
            add_candidate("sharing", Some(Mechanism::Sharing), layout.clone());
            start_layouts.push(("joint from sharing", layout));
        }
        if self.allowed_mechanisms.allows(Mechanism::MemoryNodes)
            && let Some(layout) = self.layout_near_memory(&default)
        {
            add_candidate("memory nodes", Some(Mechanism::MemoryNodes), layout);
        }
        if self.allowed_mechanisms.allows(Mechanism::Placement) && problem.sites.len() > 1 {
            let (balanced_layout, separated_layout) =
                (self.balance(&default), self.separate_streams(&default));
            let mut search_placement = |start_layout: SiteLayout| {
                self.with_budget_share(8, |search| search.place(start_layout, false))
            };
            let separated_plan = search_placement(separated_layout);
            add_candidate(
                "placement from separated misses",
                Some(Mechanism::Placement),
                separated_plan.clone(),
            );
            start_layouts.push(("joint from separated misses", separated_plan));
            add_candidate(
                "placement",
                Some(Mechanism::Placement),
                search_placement(default.clone()),
            );
            let balanced_plan = search_placement(balanced_layout);
            add_candidate(
                "placement from balanced misses",
                Some(Mechanism::Placement),
                balanced_plan.clone(),
            );
            start_layouts.push(("joint from balanced misses", balanced_plan));
        }
        let start_count = start_layouts.len();
        for (index, (label, start)) in start_layouts.into_iter().enumerate() {
            let can_place =
                self.allowed_mechanisms.allows(Mechanism::Placement) && problem.sites.len() > 1;
            let is_joint = problem.tasks.len() <= MAX_JOINT_TASKS;
            let layout = self.with_budget_share(start_count - index, |search| {
                // Even if the layout does not change, its partitions and rotation are searched.
                let layout = if can_place {
                    search.with_budget_share(2, |search| search.place(start, is_joint))
                } else {
                    start
                };
                search.refine(&layout)
            });
            add_candidate(label, None, layout);
        }
        if problem.bus.is_some()
            && self.allowed_mechanisms.allows(Mechanism::Placement)
            && problem.tasks.len() <= MAX_JOINT_TASKS
        {
            let key_of = |candidate: &CandidatePlan| self.judge.score_key(candidate.score);
            let undivided_candidates = candidates
                .iter()
                .filter(|candidate| candidate.layout.is_undivided());
            let best_undivided = undivided_candidates
                .reduce(|a, b| if key_of(b) > key_of(a) { b } else { a })
                .unwrap_or(&candidates[0]);
            let layout = restore_closed_sites(self.place_by_traffic(best_undivided.layout.clone()));
            let label = ("placement by memory traffic", Some(Mechanism::Placement));
            self::add(&mut candidates, problem, score_cache, label, layout);
        }
        candidates
    }

    /// Runs a search that may use one part in `budget_divisor` of the remaining site scores.
    fn with_budget_share<T>(
        &mut self,
        budget_divisor: usize,
        search: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let remaining_budget = self.remaining_scores.get();
        self.remaining_scores
            .set(remaining_budget / budget_divisor.max(1));
        let outcome = search(self);
        self.remaining_scores.set(
            remaining_budget - remaining_budget / budget_divisor.max(1)
                + self.remaining_scores.get(),
        );
        outcome
    }

    pub(super) fn movable_tasks(&self) -> Vec<usize> {
        self.problem
            .known_tasks()
            .filter(|&index| self.problem.can_move(index))
            .collect()
    }

    /// Returns the number of known tasks that fit on each open site: by cores while these suffice, otherwise in
    /// proportion to CPUs.
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

    /// Scores a site with these members: with its best partitions and rotation if the search is joint, otherwise
    /// without partitions.
    fn score_site(
        &self,
        site_by_task: &[Option<usize>],
        site: usize,
        members: &[usize],
        is_joint: bool,
    ) -> LayoutScore {
        if members.is_empty() {
            return LayoutScore::EMPTY;
        }
        let split_shares = split_shares(self.problem, site_by_task, members, site);
        let site_tasks = SiteTasks {
            problem: self.problem,
            site,
            members,
            split_shares: &split_shares,
            remaining_scores: &self.remaining_scores,
            score_cache: self.score_cache,
        };
        let (partitions, rotation) = if is_joint {
            self.find_best_plan(&site_tasks, true)
        } else {
            (Vec::new(), None)
        };
        site_tasks.score(&partitions, rotation.as_ref())
    }

    /// Returns the partitions and the rotation of one site that score best together.
    pub(super) fn find_best_plan(
        &self,
        site_tasks: &SiteTasks<'_>,
        is_hurried: bool,
    ) -> (Vec<PartitionMembers>, Option<GangRotation>) {
        if site_tasks.members.len() < 2 {
            return (Vec::new(), None);
        }
        let rotation = if self.allowed_mechanisms.allows(Mechanism::Gangs) {
            site_tasks.best_rotation(&self.judge, &[], is_hurried)
        } else {
            None
        };
        let partitions = if self.allowed_mechanisms.allows(Mechanism::Space) {
            site_tasks.best_partitions(&self.judge, rotation.as_ref())
        } else {
            Vec::new()
        };
        if rotation.is_none() || !self.allowed_mechanisms.allows(Mechanism::Space) {
            return (partitions, rotation);
        }
        // If partitions are enough, a rotation adds nothing.
        let lone_partitions = site_tasks.best_partitions(&self.judge, None);
        let (rotation_score, lone_score) = (
            site_tasks.score(&partitions, rotation.as_ref()),
            site_tasks.score(&lone_partitions, None),
        );
        if self.judge.score_key(lone_score) >= self.judge.score_key(rotation_score) - 1e-3 {
            (lone_partitions, None)
        } else {
            (partitions, rotation)
        }
    }

    fn change_each_site(
        &self,
        layout: &SiteLayout,
        change: impl Fn(&Self, &SiteTasks<'_>, &mut SiteLayout),
    ) -> SiteLayout {
        self.refine_each_site(layout, 0..self.problem.sites.len(), change)
    }

    /// Returns the layout with these sites improved one by one.
    pub(super) fn refine_each_site(
        &self,
        layout: &SiteLayout,
        sites: impl IntoIterator<Item = usize>,
        change: impl Fn(&Self, &SiteTasks<'_>, &mut SiteLayout),
    ) -> SiteLayout {
        let mut new_layout = layout.clone();
        for site in sites
            .into_iter()
            .filter(|&site| !self.problem.is_closed(site))
        {
            let members = layout.known_tasks_on(self.problem, site);
            let split_shares = split_shares(self.problem, &layout.site_by_task, &members, site);
            let site_tasks = SiteTasks {
                problem: self.problem,
                site,
                members: &members,
                split_shares: &split_shares,
                remaining_scores: &self.remaining_scores,
                score_cache: self.score_cache,
            };
            change(self, &site_tasks, &mut new_layout);
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

    fn refine(&self, layout: &SiteLayout) -> SiteLayout {
        self.change_each_site(layout, |search, site_tasks, new_layout| {
            (
                new_layout.partitions[site_tasks.site],
                new_layout.rotations[site_tasks.site],
            ) = search.find_best_plan(site_tasks, false);
        })
    }
}

/// Scores a layout, and adds it if it differs from all earlier ones.
pub(super) fn add(
    candidates: &mut Vec<CandidatePlan>,
    problem: &PlanningProblem,
    score_cache: &ScoreCache,
    (label, mechanism): (&'static str, Option<Mechanism>),
    layout: SiteLayout,
) {
    if candidates
        .iter()
        .all(|candidate| candidate.layout != layout)
    {
        let score = score(problem, &layout, score_cache);
        candidates.push(CandidatePlan {
            label,
            mechanism,
            layout,
            score,
        });
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
    use crate::policies::auto::model::problem::{CacheSite, PlanningProblem, ProblemTask};
    use crate::policies::auto::model::program_model::tests::{
        CACHE, program_fixture, uniform_program,
    };
    use crate::policies::auto::model::score_cache;
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
            must_stay: false,
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
        let memo = ScoreCache::new(problem);
        let mut search = PlanSearch::with_effort(problem, &memo, allowed, effort);
        let candidates = search.find_candidates(&BTreeMap::new(), None);
        let judge = search.judge;
        let best = candidates
            .iter()
            .map(|candidate| candidate.score)
            .reduce(|a, b| {
                if judge.score_key(b) > judge.score_key(a) {
                    b
                } else {
                    a
                }
            });
        (
            candidates[0].score,
            best.unwrap(),
            search.remaining_scores.get(),
        )
    }

    fn all_mechanisms() -> AllowedMechanisms {
        AllowedMechanisms::from_filter(|_| true)
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
        let value = |score: LayoutScore| score.objective_value(PlanObjective::WeightedSpeedup);
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
            let memo = ScoreCache::new(problem);
            let mut search = PlanSearch::with_effort(problem, &memo, all_mechanisms(), 2_000);
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
            .for_each(|&index| problem.tasks[index].must_stay = true);
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
            .for_each(|(index, scene_task)| scene_task.last_site = Some(index / 4));
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
            let memo = ScoreCache::new(problem);
            let mut search = PlanSearch::with_effort(problem, &memo, all_mechanisms(), 2_000);
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
        let value = |score: LayoutScore| score.objective_value(PlanObjective::WeightedSpeedup);
        assert!(
            value(best_score) >= value(default) && remaining <= 400,
            "{default:?} {best_score:?}"
        );
    }
}
