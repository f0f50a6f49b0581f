//! One search for a better plan: the candidates, the best of them, its gain with the error, and the choice.

use std::cell::Cell;
use std::collections::BTreeMap;

use cachemate_core::{
    Forecast, PartitionSupport, Plan, ProcessId, Reason, ShareMember, SplitMix64, TaskId, Units,
    VerificationMethod, View,
};

use super::candidates::{CandidatePlan, Mechanism, PlanComparator, PlanSearch, unit_steps};
use super::decision::{
    CandidateComparison, CandidateVerdict, ForecastRecord, Gain, GainError, MIN_LIKELY_PROBABILITY,
    decide,
};
use super::evidence::measured_sizes::CoRunners;
use super::evidence::{TaskEvidence, all_tasks};
use super::explain::{MechanismGain, ReportedForecasts, SearchReport};
use super::model::decided_plan::DecidedPlan;
use super::model::forecast::forecast;
use super::model::layout::SiteLayout;
use super::model::problem::PlanningProblem;
use super::model::problem_cache::SearchInput;
use super::model::score::{
    LayoutScore, LayoutScorer, PlanObjective, forecast_speeds, score, total_score,
};
use super::model::score_cache::{ErrorDraw, ScoreCache};
use super::model::unmet_goals;
use super::{Parameters, PolicyPart};
use crate::partition::units::pages_to_move;

/// Divisor of the number of site scores that a decision may compute, if only newcomers are placed.
const BRIEF_SEARCH_DIVISOR: u32 = 5;
/// Longest confirmation of a step in windows: four times the guard's usual comparison.
const MAX_CONFIRMATION_WINDOWS: u64 = 20;
/// With more tasks than this, only the best plan's gain is drawn.
const MAX_DRAWN_TASKS: usize = 64;
/// Product of the number of draws of a gain and the number of sites. The number of draws is clamped to the bounds
/// below.
const DRAWS_TIMES_SITES: usize = 256;
const MIN_DRAWS: usize = 4;
const MAX_DRAWS: usize = 8;

/// A better plan, for a confirmation or for immediate use.
pub struct Proposal {
    /// The method by which the change is to be measured.
    pub method: VerificationMethod,
    pub new_plan: DecidedPlan,
    /// The plan in force with all known tasks pinned to their sites.
    pub pinned_plan: DecidedPlan,
    /// Processes in the objective, with their weighted speeds under the plan in force, as forecast.
    pub speeds: Vec<(ProcessId, f64)>,
    /// Processes whose goals are the reason for the change.
    pub goal_processes: Vec<ProcessId>,
    /// Forecast gain, as a share.
    pub gain: f64,
    /// Forecast of the new plan.
    pub forecast: Forecast,
    pub change: LayoutChange,
    /// Whether the change is more likely than not to gain.
    pub is_likely: bool,
}

/// A change of layouts, with the tasks and phases for which it was forecast.
#[derive(Clone, PartialEq, Debug)]
pub struct LayoutChange {
    pub tasks: CoRunners,
    pub layout_before: SiteLayout,
    pub layout_after: SiteLayout,
}

/// The result of a search.
pub struct SearchResult {
    /// Forecast of the plan in force.
    pub current_forecast: Forecast,
    /// The best plan, if it is worth at least a confirmation.
    pub proposal: Option<Proposal>,
}

/// The inputs of a search besides the problem.
pub struct PlanFinder<'a, 'v> {
    pub parameters: &'a Parameters,
    pub seed: u64,
    pub view: &'a View<'v>,
    pub current_plan: &'a DecidedPlan,
    pub evidence: &'a TaskEvidence,
    pub forecast_record: &'a ForecastRecord<LayoutChange>,
    pub has_time_to_confirm: bool,
}

impl PlanFinder<'_, '_> {
    /// Searches for the best plan, and forecasts it and the plan in force.
    pub fn find(
        &self,
        input: &SearchInput,
        reported_forecasts: &mut ReportedForecasts,
        reasons: &mut Vec<Reason>,
    ) -> SearchResult {
        let current_layout = SiteLayout::from_plan(&self.current_plan.0, &input.problem);
        let current_forecast = self.forecast(&input.problem, &input.score_cache, &current_layout);
        SearchResult {
            current_forecast,
            proposal: self.choose_proposal(input, current_layout, reported_forecasts, reasons),
        }
    }

    fn forecast(
        &self,
        problem: &PlanningProblem,
        score_cache: &ScoreCache,
        layout: &SiteLayout,
    ) -> Forecast {
        let references_of = |task: TaskId| {
            self.evidence
                .speeds
                .observed_speed(task)?
                .references_per_instr
        };
        forecast(problem, layout, score_cache, references_of, self.seed)
    }

    fn choose_proposal(
        &self,
        input: &SearchInput,
        current_layout: SiteLayout,
        reported_forecasts: &mut ReportedForecasts,
        reasons: &mut Vec<Reason>,
    ) -> Option<Proposal> {
        let (problem, score_cache) = (&input.problem, &input.score_cache);
        let (mut candidates, judge) = self.find_candidates(input, &current_layout);
        let default = candidates[0].layout.clone();
        let is_searched = |candidate: &CandidatePlan| {
            let is_joint = candidate.mechanism.is_none() && candidate.layout != default;
            self.is_allowed(&candidate.layout, problem)
                && (!is_joint || self.parameters.includes(PolicyPart::JointSearch))
        };
        candidates.retain(|candidate| candidate.layout == current_layout || is_searched(candidate));
        let best_candidate = self.best_candidate(&candidates, &judge, problem)?.clone();
        let current_score = score(problem, &current_layout, score_cache);
        let gain = self.estimate_gain(
            problem,
            score_cache,
            &judge,
            &current_layout,
            &best_candidate.layout,
            self.forecast_record.forecast_error(),
        );
        let probability = gain.probability_of_gain(self.parameters.min_gain);
        unmet_goals::explain_unmet(
            problem,
            &candidates[0].layout,
            &best_candidate.layout,
            score_cache,
            reasons,
        );
        let new_plan = self.build_plan(problem, &best_candidate.layout);
        let meets_missed_goal = unmet_goals::is_improvement(
            current_score.unmet_goals,
            best_candidate.score.unmet_goals,
        );
        let verdict = decide(
            &CandidateComparison {
                is_in_force: best_candidate.layout == current_layout
                    || new_plan.matches(&self.current_plan.0),
                meets_missed_goal,
                gain: gain.forecast,
                probability,
                is_worth_measuring: self.is_worth_measuring(&gain),
                has_time_to_confirm: self.has_time_to_confirm,
            },
            self.parameters.min_gain,
        );
        let report = SearchReport {
            problem,
            score_cache,
            candidates: &candidates,
            best_candidate: &best_candidate,
            current_layout: &current_layout,
            judge,
            gain: gain.forecast,
            probability,
            newcomers: input.newcomers.as_deref(),
            mechanism_gains: &self.mechanism_gains(input, &judge, &current_layout, &candidates),
        };
        if verdict == CandidateVerdict::Keep {
            report.explain_unchanged(&self.evidence.probe_planner, reported_forecasts, reasons);
            return None;
        }
        let goal_processes = if meets_missed_goal {
            unmet_goals::improved_processes(
                problem,
                &current_layout,
                &best_candidate.layout,
                score_cache,
            )
        } else {
            Vec::new()
        };
        let proposal = self.build_proposal(
            (problem, score_cache),
            &current_layout,
            &best_candidate.layout,
            gain.forecast,
        );
        let method = if verdict == CandidateVerdict::Confirm
            || self.is_repartition(&proposal, &goal_processes)
        {
            VerificationMethod::Confirmation
        } else {
            VerificationMethod::Monitoring
        };
        report.explain_change(
            method,
            &self.evidence.probe_planner,
            reported_forecasts,
            reasons,
        );
        let is_likely = meets_missed_goal || probability >= MIN_LIKELY_PROBABILITY;
        Some(Proposal {
            method,
            goal_processes,
            is_likely,
            ..proposal
        })
    }

    /// Returns whether the proposal only replaces partitions, without a goal, and can be confirmed by measurements.
    fn is_repartition(&self, proposal: &Proposal, goal_processes: &[ProcessId]) -> bool {
        let (old_plan, new_plan) = (&proposal.pinned_plan.0, &proposal.new_plan.0);
        let has_same_placement =
            (&old_plan.affinity, &old_plan.gangs) == (&new_plan.affinity, &new_plan.gangs);
        has_same_placement
            && !old_plan.shares.is_empty()
            && goal_processes.is_empty()
            && self.has_time_to_confirm
    }

    /// Builds the proposal of a confirmation of this layout.
    fn build_proposal(
        &self,
        (problem, score_cache): (&PlanningProblem, &ScoreCache),
        current_layout: &SiteLayout,
        layout: &SiteLayout,
        gain: f64,
    ) -> Proposal {
        let mut pinned_layout = current_layout.clone();
        pinned_layout.is_pinned = problem
            .tasks
            .iter()
            .map(|problem_task| problem_task.is_movable && problem_task.program.is_some())
            .collect();
        Proposal {
            method: VerificationMethod::Confirmation,
            new_plan: self.build_plan(problem, layout),
            pinned_plan: self.build_plan(problem, &pinned_layout),
            speeds: weighted_speeds(
                problem,
                score_cache,
                current_layout,
                self.parameters.objective,
            ),
            goal_processes: Vec::new(),
            gain,
            forecast: self.forecast(problem, score_cache, layout),
            change: LayoutChange {
                tasks: all_tasks(self.view, problem),
                layout_before: current_layout.clone(),
                layout_after: layout.clone(),
            },
            is_likely: false,
        }
    }

    /// Returns the partitions that gain most if all curves lie as low as their errors allow; `None` if they gain too little
    /// in the mean. `keep_probability` is the probability of such curves.
    pub fn find_exploration(&self, input: &SearchInput, keep_probability: f64) -> Option<Proposal> {
        let (problem, score_cache) = (&input.problem, &input.score_cache);
        let optimistic = input.optimistic.as_deref()?;
        let current_layout = SiteLayout::from_plan(&self.current_plan.0, problem);
        let optimistic_cache = ScoreCache::default();
        let mut search = self.plan_search(
            optimistic,
            &optimistic_cache,
            self.parameters.max_evaluations / BRIEF_SEARCH_DIVISOR,
        );
        search.set_min_speed(&self.evidence.default_sites, Some(&current_layout));
        let judge = search.judge;
        let layout = search.with_best_partitions(&current_layout);
        let unmet_goals = |layout: &SiteLayout| score(problem, layout, score_cache).unmet_goals;
        let is_possible = layout.partitions != current_layout.partitions
            && self.is_allowed(&layout, problem)
            && unmet_goals(&layout) <= unmet_goals(&current_layout);
        let gain_in = |problem: &PlanningProblem, score_cache: &ScoreCache| {
            LayoutComparison::new(
                problem,
                score_cache,
                judge.objective,
                &current_layout,
                &layout,
            )
            .forecast_gain()
        };
        let gain = is_possible.then(|| {
            keep_probability * gain_in(optimistic, &optimistic_cache)
                + (1.0 - keep_probability) * gain_in(problem, score_cache)
        })?;
        (gain >= self.parameters.min_gain)
            .then(|| self.build_proposal((problem, score_cache), &current_layout, &layout, gain))
    }

    /// Returns the step of one unit between two partitions that is worth measuring most, with the forecast of the plan
    /// in force. `None` if every step is beaten, on cooldown, or not worth it.
    pub fn find_step(
        &self,
        problem: &PlanningProblem,
        score_cache: &ScoreCache,
        beaten_layouts: &[SiteLayout],
    ) -> Option<(Proposal, Forecast)> {
        let current_layout = SiteLayout::from_plan(&self.current_plan.0, problem);
        let mut search = self.plan_search(problem, score_cache, self.parameters.max_evaluations);
        search.set_min_speed(&self.evidence.default_sites, Some(&current_layout));
        let judge = search.judge;
        let unmet_goals = score(problem, &current_layout, score_cache).unmet_goals;
        let keyed_step = |layout: SiteLayout| {
            let score = score(problem, &layout, score_cache);
            (score.unmet_goals <= unmet_goals).then(|| (judge.score_key(score), layout))
        };
        let mut steps: Vec<(f64, SiteLayout)> = unit_steps(problem, &current_layout)
            .into_iter()
            .filter(|layout| {
                !beaten_layouts
                    .iter()
                    .any(|beaten| beaten.partitions == layout.partitions)
            })
            .filter_map(keyed_step)
            .collect();
        steps.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (_, layout) = steps
            .into_iter()
            .find(|(_, layout)| self.is_allowed(layout, problem))?;
        // Earlier forecasts of plans erred by more than one unit can change.
        let gain = self.estimate_gain(
            problem,
            score_cache,
            &judge,
            &current_layout,
            &layout,
            GainError::default(),
        );
        self.is_worth_measuring(&gain).then(|| {
            (
                self.build_proposal(
                    (problem, score_cache),
                    &current_layout,
                    &layout,
                    gain.forecast,
                ),
                self.forecast(problem, score_cache, &current_layout),
            )
        })
    }

    fn is_worth_measuring(&self, gain: &Gain) -> bool {
        let measured_ns = (MAX_CONFIRMATION_WINDOWS * self.parameters.window_ns) as f64;
        gain.is_worth_measuring(
            self.parameters.min_gain,
            measured_ns,
            self.parameters.payback_ns as f64,
        )
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
            judge: PlanComparator {
                objective: self.parameters.objective,
                min_speed: 0.0,
            },
            remaining_scores: Cell::new(max_scores as usize),
            generator: SplitMix64::new(self.seed ^ 0xa070),
        }
    }

    /// Returns all candidates, and their comparator.
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
        (candidates, search.judge)
    }

    /// Returns the candidate with the best score after the cost of copying pages; the first of equal ones.
    fn best_candidate<'c>(
        &self,
        candidates: &'c [CandidatePlan],
        judge: &PlanComparator,
        problem: &PlanningProblem,
    ) -> Option<&'c CandidatePlan> {
        let copying_cost = |candidate: &CandidatePlan| {
            self.page_copying_ns(problem, &candidate.layout) / self.parameters.payback_ns as f64
        };
        let keyed_candidates = candidates.iter().map(|candidate| {
            (
                judge.score_key(candidate.score) - copying_cost(candidate),
                candidate,
            )
        });
        keyed_candidates
            .reduce(|a, b| if b.0 > a.0 { b } else { a })
            .map(|(_, best)| best)
    }

    /// Returns the gain over the plan in force, drawn within the errors of curves and costs.
    fn estimate_gain(
        &self,
        problem: &PlanningProblem,
        score_cache: &ScoreCache,
        judge: &PlanComparator,
        current_layout: &SiteLayout,
        best_layout: &SiteLayout,
        forecast_error: GainError,
    ) -> Gain {
        let comparison = LayoutComparison::new(
            problem,
            score_cache,
            judge.objective,
            current_layout,
            best_layout,
        );
        let draw_count =
            (DRAWS_TIMES_SITES / problem.sites.len().max(1)).clamp(MIN_DRAWS, MAX_DRAWS) as u64;
        let drawn_gains = (0..draw_count).map(|draw| comparison.drawn_gain(self.seed ^ draw));
        Gain::from_draws(
            comparison.forecast_gain(),
            &drawn_gains.collect::<Vec<f64>>(),
            forecast_error,
        )
    }

    /// Returns the best plan of every single mechanism. On large machines, their gains are not drawn.
    fn mechanism_gains(
        &self,
        input: &SearchInput,
        judge: &PlanComparator,
        current_layout: &SiteLayout,
        candidates: &[CandidatePlan],
    ) -> Vec<MechanismGain> {
        let current_objective = score(&input.problem, current_layout, &input.score_cache)
            .objective_value(judge.objective)
            .max(1e-9);
        let best_of_mechanism = |mechanism: Mechanism| {
            let mechanism_candidates = candidates
                .iter()
                .filter(|candidate| candidate.mechanism == Some(mechanism));
            let best = mechanism_candidates.reduce(|a, b| {
                if judge.score_key(b.score) > judge.score_key(a.score) {
                    b
                } else {
                    a
                }
            })?;
            let gain = best.score.objective_value(judge.objective) / current_objective - 1.0;
            let is_drawn = input.problem.tasks.len() <= MAX_DRAWN_TASKS;
            let error = is_drawn.then(|| {
                self.estimate_gain(
                    &input.problem,
                    &input.score_cache,
                    judge,
                    current_layout,
                    &best.layout,
                    self.forecast_record.forecast_error(),
                )
                .standard_error
            });
            Some(MechanismGain {
                mechanism,
                gain,
                standard_error: error,
            })
        };
        Mechanism::ALL
            .into_iter()
            .filter_map(best_of_mechanism)
            .collect()
    }

    fn build_plan(&self, problem: &PlanningProblem, layout: &SiteLayout) -> DecidedPlan {
        let mut plan = Plan::idle(self.view.previous_plan.window);
        layout.write_into_plan(
            problem,
            self.view.previous_plan,
            self.parameters.page_migration.into(),
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

    /// Returns the processor time of copying pages to other colors.
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
                page_migration_ns: move_page_ns,
                ..
            }) = site.and_then(|site| site.partition_units)
            else {
                continue;
            };
            let members = self.view.live_tasks().filter(|sample| {
                share
                    .members
                    .contains(&ShareMember::Process(sample.process))
            });
            let pages = members
                .filter_map(|seen| seen.pages_per_color.as_deref())
                .next();
            copying_ns += pages.map_or(0.0, |pages| {
                pages_to_move(pages, allowed) as f64 * move_page_ns
            });
        }
        copying_ns
    }
}

/// Returns the processes in the objective, with their speeds relative to solo under a layout, weighted as by the
/// objective.
fn weighted_speeds(
    problem: &PlanningProblem,
    score_cache: &ScoreCache,
    layout: &SiteLayout,
    objective: PlanObjective,
) -> Vec<(ProcessId, f64)> {
    // The priority of each process, and the sum of its threads' speeds.
    let mut process_speeds: BTreeMap<ProcessId, (f64, f64)> = BTreeMap::new();
    for (problem_task, speed) in
        problem
            .tasks
            .iter()
            .zip(forecast_speeds(problem, layout, score_cache))
    {
        let (Some(program), Some(speed)) = (&problem_task.program, speed) else {
            continue;
        };
        let priority = if objective == PlanObjective::WorstSlowdown {
            1.0
        } else {
            program.goal.priority.max(0.0)
        };
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

/// Returns the gain of a change by the models of this problem; `None` if they are those of other tasks or phases, or so
/// many that another forecast takes too long.
pub fn forecast_gain_again(
    input: &SearchInput,
    objective: PlanObjective,
    tasks: &CoRunners,
    change: &LayoutChange,
) -> Option<f64> {
    let problem = &input.problem;
    let is_described = change.tasks == *tasks
        && tasks.len() <= MAX_DRAWN_TASKS
        && change.layout_before.partitions.len() == problem.sites.len();
    let LayoutChange {
        layout_before,
        layout_after,
        ..
    } = change;
    is_described.then(|| {
        LayoutComparison::new(
            problem,
            &input.score_cache,
            objective,
            layout_before,
            layout_after,
        )
        .forecast_gain()
    })
}

/// Two layouts of one problem, compared by the objective.
struct LayoutComparison<'a> {
    problem: &'a PlanningProblem,
    score_cache: &'a ScoreCache,
    objective: PlanObjective,
    layouts: [&'a SiteLayout; 2],
    scorers: [LayoutScorer<'a>; 2],
}

impl<'a> LayoutComparison<'a> {
    fn new(
        problem: &'a PlanningProblem,
        score_cache: &'a ScoreCache,
        objective: PlanObjective,
        current_layout: &'a SiteLayout,
        best_layout: &'a SiteLayout,
    ) -> Self {
        let layouts = [current_layout, best_layout];
        let scorers = layouts.map(|layout| LayoutScorer::new(problem, layout));
        LayoutComparison {
            problem,
            score_cache,
            objective,
            layouts,
            scorers,
        }
    }

    /// Returns the gain of the second layout, as a fraction of the objective, with all curves as estimated.
    fn forecast_gain(&self) -> f64 {
        match self.problem.bus {
            Some(_) => self.rescored_gain(self.problem),
            None => self.gain_by_site(&ErrorDraw::default()),
        }
    }

    /// Returns the gain with curves and costs drawn from their error distributions.
    fn drawn_gain(&self, seed: u64) -> f64 {
        let draw = self.score_cache.draw(self.problem, seed);
        match self.problem.bus {
            Some(_) => self.rescored_gain(&self.problem.with_errors(&draw)),
            None => self.gain_by_site(&draw),
        }
    }

    fn gain_by_site(&self, draw: &ErrorDraw) -> f64 {
        let [current, best] = &self.scorers;
        let current_scores = current.scores_by_site(draw, self.score_cache);
        let best_scores = best.scores_reusing(current, &current_scores, draw, self.score_cache);
        self.relative_gain([total_score(&current_scores), total_score(&best_scores)])
    }

    /// Returns the gain without stored scores: if sites wait for one another, scores of single sites are not stored.
    fn rescored_gain(&self, problem: &PlanningProblem) -> f64 {
        let score_cache = ScoreCache::default();
        self.relative_gain(
            self.layouts
                .map(|layout| score(problem, layout, &score_cache)),
        )
    }

    fn relative_gain(&self, [current, best]: [LayoutScore; 2]) -> f64 {
        best.objective_value(self.objective) / current.objective_value(self.objective).max(1e-9)
            - 1.0
    }
}
