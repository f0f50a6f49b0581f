//! One search for a better plan: the candidates, the best of them by the forecast, and whether to propose it.

use std::cell::Cell;
use std::collections::BTreeMap;

use cachemate_core::{
    Forecast, PartitionSupport, Plan, ProcessId, Reason, ShareMember, SplitMix64, TaskSample,
    Units, VerificationMethod, View,
};
use cachemate_papers::partition::units::pages_to_move;

use super::Parameters;
use super::candidates::{CandidatePlan, Mechanism, PlanComparator, PlanSearch, unit_steps};
use super::evidence::TaskEvidence;
use super::explain::{ReportedForecasts, SearchReport};
use super::model::decided_plan::DecidedPlan;
use super::model::forecast::forecast;
use super::model::layout::SiteLayout;
use super::model::problem::PlanningProblem;
use super::model::score::{ForecastSpeed, LayoutScore, forecast_speeds, score};
use super::model::score_cache::ScoreCache;
use super::model::search_input::SearchInput;
use super::model::unmet_goals;

/// Divisor of the number of site scores that a decision may compute, if only newcomers are placed or curves explored.
const BRIEF_SEARCH_DIVISOR: u32 = 5;
/// Largest forecast loss of a step, because the forecast errs by more than one unit changes.
const MAX_STEP_LOSS: f64 = 0.02;

/// The search that found a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProposalOrigin {
    /// That of all candidates.
    Plan,
    /// That of a move of units between the partitions in force.
    Step,
    /// That of partitions that gain if curves err.
    Exploration,
}

/// A plan to be proposed.
pub struct Proposal {
    pub origin: ProposalOrigin,
    /// The method by which the change is to be measured.
    pub method: VerificationMethod,
    pub new_plan: DecidedPlan,
    /// Processes that count, with their weighted speeds under the plan in force, as forecast.
    pub speeds: Vec<(ProcessId, f64)>,
    /// Processes whose goals are the reason for the change.
    pub goal_processes: Vec<ProcessId>,
    /// Forecast gain, as a share.
    pub gain: f64,
    pub forecast: Forecast,
    pub layout_before: SiteLayout,
}

/// The inputs of a search besides the problem.
pub struct PlanFinder<'a, 'v> {
    pub parameters: &'a Parameters,
    pub seed: u64,
    pub view: &'a View<'v>,
    pub current_plan: &'a DecidedPlan,
    pub evidence: &'a TaskEvidence,
    pub has_time_to_confirm: bool,
}

impl PlanFinder<'_, '_> {
    /// The best plan, if it gains enough or repairs a goal.
    pub fn find_plan(
        &self,
        input: &SearchInput,
        reported_forecasts: &mut ReportedForecasts,
        reasons: &mut Vec<Reason>,
    ) -> Option<Proposal> {
        let (problem, score_cache) = (&input.problem, &input.score_cache);
        let current_layout = &input.current_layout;
        let is_current = |candidate: &CandidatePlan| candidate.layout == *current_layout;
        let (mut candidates, comparator) = self.find_candidates(input, current_layout);
        let current_score = candidates.iter().find(|plan| is_current(plan))?.score;
        let default_layout = candidates[0].layout.clone();
        candidates.retain(|plan| is_current(plan) || self.is_allowed(&plan.layout, problem));
        let best = self.best_candidate(&candidates, &comparator, problem)?;
        unmet_goals::explain_unmet(problem, &default_layout, &best.layout, score_cache, reasons);

        let gain = relative_gain(current_score, best.score);
        let new_plan = if is_current(best) {
            None
        } else {
            let plan = self.build_plan(problem, &best.layout);
            Some(plan).filter(|plan| !plan.matches(&self.current_plan.0))
        };
        let repairs_goal =
            unmet_goals::is_improvement(current_score.unmet_goals, best.score.unmet_goals);
        let report = SearchReport {
            problem,
            score_cache,
            candidates: &candidates,
            best_candidate: best,
            current_layout,
            gain,
            newcomers: input.newcomers.as_deref(),
            mechanism_gains: &mechanism_gains(&comparator, current_score, &candidates),
        };
        let probe_planner = &self.evidence.probe_planner;
        let pays_off = repairs_goal || gain >= self.parameters.min_gain;
        let Some(new_plan) = new_plan.filter(|_| pays_off) else {
            report.explain_unchanged(probe_planner, reported_forecasts, reasons);
            return None;
        };

        let method = if repairs_goal || !self.has_time_to_confirm {
            VerificationMethod::Monitoring
        } else {
            VerificationMethod::Confirmation
        };
        report.explain_change(method, probe_planner, reported_forecasts, reasons);
        let goal_processes = if repairs_goal {
            let (before, after) = (current_layout, &best.layout);
            unmet_goals::improved_processes(problem, before, after, score_cache)
        } else {
            Vec::new()
        };
        Some(Proposal {
            method,
            goal_processes,
            ..self.build_proposal(
                input,
                current_layout,
                (&best.layout, new_plan),
                gain,
                ProposalOrigin::Plan,
            )
        })
    }

    fn build_proposal(
        &self,
        input: &SearchInput,
        current_layout: &SiteLayout,
        (layout, new_plan): (&SiteLayout, DecidedPlan),
        gain: f64,
        origin: ProposalOrigin,
    ) -> Proposal {
        let problem = &input.problem;
        let score_cache = &input.score_cache;
        let current_speeds = forecast_speeds(problem, current_layout, score_cache);

        Proposal {
            origin,
            method: VerificationMethod::Confirmation,
            new_plan,
            speeds: weighted_speeds(problem, &current_speeds),
            goal_processes: Vec::new(),
            gain,
            forecast: forecast(problem, layout, score_cache, |task| {
                self.evidence.speeds.references_per_instr(task)
            }),
            layout_before: current_layout.clone(),
        }
    }

    /// The partitions that gain most if all curves lie as low as their errors allow; `None` if they gain too little in
    /// the mean. `keep_probability` is the probability of such curves.
    pub fn find_exploration(&self, input: &SearchInput, keep_probability: f64) -> Option<Proposal> {
        let (problem, score_cache) = (&input.problem, &input.score_cache);
        let optimistic = input.optimistic.as_deref()?;
        let current_layout = &input.current_layout;
        let optimistic_cache = ScoreCache::default();
        let max_scores = self.parameters.max_evaluations / BRIEF_SEARCH_DIVISOR;
        let mut search = self.plan_search(optimistic, &optimistic_cache, max_scores);
        search.set_min_speed(&self.evidence.default_sites, Some(current_layout));
        let layout = search.with_best_partitions(current_layout);

        let [current_score, new_score] =
            [current_layout, &layout].map(|layout| score(problem, layout, score_cache));
        let is_possible = layout.partitions != current_layout.partitions
            && self.is_allowed(&layout, problem)
            && new_score.unmet_goals <= current_score.unmet_goals;
        if !is_possible {
            return None;
        }
        let [optimistic_current, optimistic_new] =
            [current_layout, &layout].map(|layout| score(optimistic, layout, &optimistic_cache));
        let gain = keep_probability * relative_gain(optimistic_current, optimistic_new)
            + (1.0 - keep_probability) * relative_gain(current_score, new_score);
        if gain < self.parameters.min_gain {
            return None;
        }
        let new_plan = self.build_plan(problem, &layout);
        Some(self.build_proposal(
            input,
            current_layout,
            (&layout, new_plan),
            gain,
            ProposalOrigin::Exploration,
        ))
    }

    /// The best move of up to `max_units` units between two partitions by the forecast. `None` if every step is
    /// superseded or on cooldown, or the forecast loses too much.
    pub fn find_step(
        &self,
        input: &SearchInput,
        superseded_layouts: &[SiteLayout],
        max_units: u32,
    ) -> Option<Proposal> {
        let (problem, score_cache) = (&input.problem, &input.score_cache);
        let current_layout = SiteLayout::from_plan(&self.current_plan.0, problem);
        let mut search = self.plan_search(problem, score_cache, self.parameters.max_evaluations);
        search.set_min_speed(&self.evidence.default_sites, Some(&current_layout));
        let comparator = search.comparator;
        let current_score = score(problem, &current_layout, score_cache);

        let mut steps: Vec<(LayoutScore, SiteLayout)> = Vec::new();
        for layout in unit_steps(problem, &current_layout, max_units) {
            let is_superseded =
                |superseded: &SiteLayout| superseded.partitions == layout.partitions;
            if superseded_layouts.iter().any(is_superseded) {
                continue;
            }
            let step_score = score(problem, &layout, score_cache);
            if step_score.unmet_goals <= current_score.unmet_goals {
                steps.push((step_score, layout));
            }
        }
        steps.sort_by(|a, b| {
            comparator
                .score_key(b.0)
                .total_cmp(&comparator.score_key(a.0))
        });
        let (step_score, layout) = steps
            .into_iter()
            .find(|(_, layout)| self.is_allowed(layout, problem))?;

        let gain = relative_gain(current_score, step_score);
        if gain < -MAX_STEP_LOSS {
            return None;
        }
        let new_plan = self.build_plan(problem, &layout);
        Some(self.build_proposal(
            input,
            &current_layout,
            (&layout, new_plan),
            gain,
            ProposalOrigin::Step,
        ))
    }

    fn plan_search<'s>(
        &self,
        problem: &'s PlanningProblem,
        score_cache: &'s ScoreCache,
        max_scores: u32,
    ) -> PlanSearch<'s> {
        PlanSearch {
            problem,
            score_cache,
            allowed_mechanisms: self.parameters.allowed_mechanisms(self.view),
            comparator: PlanComparator { min_speed: 0.0 },
            score_budget: Cell::new(max_scores as usize),
            generator: SplitMix64::new(self.seed ^ 0xa070),
        }
    }

    fn find_candidates(
        &self,
        input: &SearchInput,
        current_layout: &SiteLayout,
    ) -> (Vec<CandidatePlan>, PlanComparator) {
        let max_scores = self.parameters.max_evaluations
            / if input.newcomers.is_some() {
                BRIEF_SEARCH_DIVISOR
            } else {
                1
            };

        let mut search = self.plan_search(&input.problem, &input.score_cache, max_scores);
        let candidates = match &input.newcomers {
            Some(newcomers) => search.build_newcomer_candidates(
                &self.evidence.default_sites,
                current_layout,
                newcomers,
            ),
            None => {
                search.find_candidates(&self.evidence.default_sites, Some(current_layout.clone()))
            }
        };
        (candidates, search.comparator)
    }

    /// The candidate with the best score after the cost of copying pages; the first of equal ones.
    fn best_candidate<'c>(
        &self,
        candidates: &'c [CandidatePlan],
        comparator: &PlanComparator,
        problem: &PlanningProblem,
    ) -> Option<&'c CandidatePlan> {
        let copying_cost = |candidate: &CandidatePlan| {
            self.page_copying_ns(problem, &candidate.layout) / self.parameters.payback_ns as f64
        };
        let keyed_candidates = candidates.iter().map(|candidate| {
            (
                comparator.score_key(candidate.score) - copying_cost(candidate),
                candidate,
            )
        });
        keyed_candidates
            .reduce(|a, b| if b.0 > a.0 { b } else { a })
            .map(|(_, best)| best)
    }

    fn build_plan(&self, problem: &PlanningProblem, layout: &SiteLayout) -> DecidedPlan {
        let mut plan = Plan::idle(self.view.previous_plan.window);
        layout.write_into_plan(
            problem,
            self.view.previous_plan,
            self.parameters.page_migration,
            &mut plan,
        );
        DecidedPlan(plan)
    }

    /// Excludes failed plans, and layouts that no plan can express, because their forecast would describe another plan.
    fn is_allowed(&self, layout: &SiteLayout, problem: &PlanningProblem) -> bool {
        if layout.is_undivided() && !self.view.verdicts.has_failed_plans() {
            return true;
        }
        let plan = self.build_plan(problem, layout);
        layout.is_expressed_by(&plan.0, problem)
            && !self
                .view
                .verdicts
                .excludes(&plan.0, &self.current_plan.0, self.view)
    }

    /// The processor time of copying pages to other colors.
    fn page_copying_ns(&self, problem: &PlanningProblem, layout: &SiteLayout) -> f64 {
        if layout.partitions.iter().all(Vec::is_empty) {
            return 0.0;
        }

        let plan = self.build_plan(problem, layout).0;
        let mut copying_ns = 0.0;
        for share in &plan.shares {
            let Units::Colors { allowed, .. } = &share.units else {
                continue;
            };
            let site = problem.sites.iter().find(|site| site.cache == share.cache);
            let Some(PartitionSupport::Colors {
                page_migration_ns, ..
            }) = site.and_then(|site| site.partition_units)
            else {
                continue;
            };

            let is_member = |sample: &&TaskSample| {
                let process = ShareMember::Process(sample.process);
                share.members.contains(&process)
            };
            let mut members = self.view.live_tasks().filter(is_member);
            let pages = members.find_map(|sample| sample.pages_per_color.as_deref());
            copying_ns += pages.map_or(0.0, |pages| {
                pages_to_move(pages, allowed) as f64 * page_migration_ns
            });
        }
        copying_ns
    }
}

/// The processes with their speeds relative to solo, weighted by priority.
fn weighted_speeds(
    problem: &PlanningProblem,
    speeds: &[Option<ForecastSpeed>],
) -> Vec<(ProcessId, f64)> {
    // The priority of each process, and the sum of its threads' speeds.
    let mut process_speeds: BTreeMap<ProcessId, (f64, f64)> = BTreeMap::new();
    for (problem_task, speed) in problem.tasks.iter().zip(speeds) {
        let (Some(program), Some(speed)) = (&problem_task.program, speed) else {
            continue;
        };
        let priority = program.goal.priority.max(0.0);
        process_speeds
            .entry(problem_task.process)
            .or_insert((priority, 0.0))
            .1 += speed.relative_speed;
    }

    process_speeds
        .into_iter()
        .map(|(process, (priority, speed_sum))| (process, priority * speed_sum))
        .collect()
}

/// The gain of one score over another, as a share.
fn relative_gain(current: LayoutScore, new: LayoutScore) -> f64 {
    let [current, new] = [current, new].map(LayoutScore::mean_speed);
    (new - current) / current.max(1e-9)
}

/// Gains of the best plan of every single mechanism over the plan in force, as shares.
fn mechanism_gains(
    comparator: &PlanComparator,
    current_score: LayoutScore,
    candidates: &[CandidatePlan],
) -> Vec<(Mechanism, f64)> {
    let mut gains = Vec::new();
    for mechanism in Mechanism::ALL {
        let is_single = |plan: &&CandidatePlan| plan.mechanism == Some(mechanism);
        if let Some(best) = comparator.best_of(candidates.iter().filter(is_single)) {
            let gain = relative_gain(current_score, best.score);
            gains.push((mechanism, gain));
        }
    }
    gains
}
