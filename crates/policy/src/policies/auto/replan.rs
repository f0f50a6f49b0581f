//! One search for a better plan: the candidates, the best of them, its gain with its uncertainty, and the decision.

use std::cell::Cell;

use cachemate_core::{Plan, Reason, ShareMember, SplitMix64, View};

use super::decided_plan::DecidedPlan;
use super::explain::{MechanismGain, SearchReport};
use super::layout::SiteLayout;
use super::problem::PlanningProblem;
use super::problem_cache::{ProblemCache, SearchInput};
use super::score::{LayoutScore, LayoutScorer, score, speeds, sum};
use super::score_cache::{ErrorDraw, ScoreCache};
use super::search::{CandidatePlan, PlanComparator, PlanSearch};
use super::trial::{LegLengths, Trial, Weight};
use super::unmet_goals;
use super::{Auto, FORECAST_ERROR, LIKELY, MOST_LIKELY, ProvisionalChange};
use crate::partition::units::{PartitionUnits, pages_to_move};
use crate::rollback_guard::live_tasks::LiveTasks;
use crate::rollback_guard::symmetry::is_mirror;

/// Placing newcomers may compute one in so many of the site scores of a decision.
const BRIEF_SHARE: u32 = 5;

/// With more tasks only the best plan's gain is drawn.
const MAX_DRAWN_TASKS: usize = 64;

/// A gain over the plan in force: as forecast, as the mean of the draws, and one standard deviation.
struct Gain {
    middle: f64,
    mean: f64,
    error: f64,
}

impl Auto {
    /// Searches for a better plan, and keeps its results for the next search.
    pub(super) fn search(&mut self, view: &View<'_>, kept: DecidedPlan, why: &mut Vec<Reason>) -> DecidedPlan {
        let window = view.observation.window;
        let whole_at = self.last.as_ref().map_or(window, |last| last.whole_at);
        let Some(input) = self.prepare(view, &kept.0) else { return kept };
        let whole_at = if input.newcomers.is_some() { whole_at } else { window };
        let holding = self.search_in(view, &input, kept, why);
        let stamp = self.searched_at.as_ref().map_or_else(Vec::new, |(stamp, _)| stamp.clone());
        if let Some((_, when)) = &mut self.searched_at {
            // After a brief search, the full search comes at its usual time.
            *when = whole_at;
        }
        self.last = Some(ProblemCache { scene: input.scene, memo: input.memo, stamp, whole_at });
        holding
    }

    /// All candidates, and their comparator.
    fn candidates(
        &self,
        view: &View<'_>,
        found: &SearchInput,
        held: &SiteLayout,
    ) -> (Vec<CandidatePlan>, PlanComparator) {
        let effort = self.parameters.max_evaluations / if found.newcomers.is_some() { BRIEF_SHARE } else { 1 };
        let mut search = PlanSearch {
            scene: &found.scene,
            memo: &found.memo,
            allowed: self.parameters.allowed_mechanisms(view),
            judge: PlanComparator { objective: self.parameters.objective, min_speed: 0.0 },
            effort: Cell::new(effort as usize),
            generator: SplitMix64::new(self.seed ^ 0xa070),
        };
        let candidates = match &found.newcomers {
            Some(newcomers) => search.for_newcomers(&self.default_site, held, newcomers),
            None => search.candidates(&self.default_site, Some(held.clone())),
        };
        (candidates, search.judge)
    }

    fn search_in(
        &mut self,
        view: &View<'_>,
        found: &SearchInput,
        kept: DecidedPlan,
        why: &mut Vec<Reason>,
    ) -> DecidedPlan {
        let (scene, memo) = (&found.scene, &found.memo);
        let held = SiteLayout::of(&kept.0, scene);
        let (mut candidates, judge) = self.candidates(view, found, &held);
        candidates
            .retain(|candidate| candidate.layout == held || self.is_allowed(&candidate.layout, scene, &kept, view));
        let now = score(scene, &held, memo);
        let cost = |candidate: &CandidatePlan| {
            self.copying_ns(scene, &candidate.layout, view) / self.parameters.payback_ns as f64
        };
        let keys: Vec<f64> = candidates.iter().map(|candidate| judge.key(candidate.score) - cost(candidate)).collect();
        let best = (0..candidates.len()).reduce(|a, b| if keys[b] > keys[a] { b } else { a });
        let Some(best) = best.map(|at| candidates[at].clone()) else { return kept };
        let of_best = self.gain(found, &judge, &held, &best.layout);
        let (gain, probability) = (of_best.middle, self.probability(&of_best));
        let mends = unmet_goals::mends(now.unmet_goals, best.score.unmet_goals);
        unmet_goals::explain_unmet(scene, &candidates[0].layout, &best.layout, why);
        let new = self.holding(scene, &best.layout, view);
        let newcomers = found.newcomers.as_deref();
        let singles = self.singles(found, &judge, &held, &candidates);
        let (candidates, best, held) = (&candidates, &best, &held);
        let chosen =
            SearchReport { scene, candidates, best, held, judge, gain, probability, newcomers, singles: &singles };
        let unchanged = best.layout == *held || new.is_same(&kept.0);
        if unchanged || !(mends || probability >= LIKELY && gain >= self.parameters.min_gain) {
            chosen.explain_unchanged(&self.probe_planner, &mut self.reported, why);
            return kept;
        }
        let mut homes = held.clone();
        homes.pinned =
            scene.tasks.iter().map(|scene_task| scene_task.movable && scene_task.program.is_some()).collect();
        let old = self.holding(scene, &homes, view);
        let lengths =
            LegLengths { warmup_windows: self.parameters.warmup_windows, leg_windows: self.parameters.leg_windows };
        // A trial that is cancelled each time would cost half of the gain and decide nothing.
        let ends = self.changes.leaves_time_for(lengths.shortest_trial(), view.observation.window);
        let adopt_untried = mends || probability >= MOST_LIKELY || !ends;
        self.released = false;
        chosen.explain_change(
            if adopt_untried { "applied" } else { "put to a trial" },
            &self.probe_planner,
            &mut self.reported,
            why,
        );
        let weights = weights(scene, held);
        if adopt_untried {
            let before = self.watch.changed(self.parameters.warmup_windows);
            // Without windows to compare with, no effect is measured.
            self.provisional = before.is_enough().then_some(ProvisionalChange::UnderWatch {
                kept,
                old,
                before,
                weights,
                forecast: gain,
            });
            return new;
        }
        self.trials += 1;
        let trial = Trial::new(lengths, weights, self.parameters.objective, self.seed ^ self.trials);
        let holding = if trial.is_new() { new.clone() } else { old.clone() };
        self.provisional = Some(ProvisionalChange::OnTrial { kept, old, new, trial: Box::new(trial), forecast: gain });
        holding
    }

    /// Gain over the plan in force, drawn within the errors of curves and costs.
    fn gain(&self, found: &SearchInput, judge: &PlanComparator, held: &SiteLayout, best: &SiteLayout) -> Gain {
        let (scene, memo) = (&found.scene, &found.memo);
        let over = |best: LayoutScore, held: LayoutScore| {
            best.value(judge.objective) / held.value(judge.objective).max(1e-9) - 1.0
        };
        let (of_best, of_held) = (LayoutScorer::of(scene, best), LayoutScorer::of(scene, held));
        let by_site = |draw: &ErrorDraw| {
            let held = of_held.scores(draw, memo);
            over(sum(&of_best.scores_beside(&of_held, &held, draw, memo)), sum(&held))
        };
        // If sites wait for one another, scores of single sites are not cached.
        let waiting = |scene: &PlanningProblem| {
            let memo = ScoreCache::default();
            over(score(scene, best, &memo), score(scene, held, &memo))
        };
        let waits = scene.bus.is_some();
        let middle = if waits { waiting(scene) } else { by_site(&ErrorDraw::default()) };
        let drawn = |draw: u64| {
            let draw = scene.draw(self.seed ^ draw);
            if waits { waiting(&scene.drawn(&draw)) } else { by_site(&draw) }
        };
        let draws = (256 / scene.sites.len().max(1)).clamp(4, 8) as u64;
        let gains: Vec<f64> = (0..draws).map(drawn).collect();
        let mean = gains.iter().sum::<f64>() / draws as f64;
        let spread = gains.iter().map(|one| (one - mean) * (one - mean)).sum::<f64>() / (draws as f64 - 1.0);
        // Earlier forecast errors widen the error of this one.
        let missed = self.verdicts.iter().map(|(forecast, measured)| (forecast - measured) * (forecast - measured));
        let prior = 2.0 * FORECAST_ERROR * FORECAST_ERROR;
        let bias = (prior + missed.sum::<f64>()) / (2.0 + self.verdicts.len() as f64);
        // A large gain has a large error: a quarter of it.
        let error = libm::sqrt(spread + bias + 0.0625 * middle * middle).max(1e-6);
        Gain { middle, mean, error }
    }

    /// Probability that a gain pays off.
    fn probability(&self, gain: &Gain) -> f64 {
        let margin = (gain.middle.min(gain.mean) - self.parameters.min_gain) / gain.error;
        0.5 * (1.0 + libm::erf(margin / std::f64::consts::SQRT_2))
    }

    /// The best plan of every mechanism by itself. On large machines its gain is not drawn.
    fn singles(
        &self,
        found: &SearchInput,
        judge: &PlanComparator,
        held: &SiteLayout,
        candidates: &[CandidatePlan],
    ) -> Vec<MechanismGain> {
        let now = score(&found.scene, held, &found.memo).value(judge.objective).max(1e-9);
        let of = |mechanism: &'static str| {
            let own = candidates.iter().filter(|candidate| candidate.what.starts_with(mechanism));
            let best = own.reduce(|a, b| if judge.key(b.score) > judge.key(a.score) { b } else { a })?;
            let gain = best.score.value(judge.objective) / now - 1.0;
            let drawn = found.scene.tasks.len() <= MAX_DRAWN_TASKS;
            let error = drawn.then(|| self.gain(found, judge, held, &best.layout).error);
            Some(MechanismGain { mechanism, gain, error })
        };
        ["placement", "memory nodes", "sharing", "space", "gangs"].into_iter().filter_map(of).collect()
    }

    pub(super) fn holding(&self, scene: &PlanningProblem, layout: &SiteLayout, view: &View<'_>) -> DecidedPlan {
        let mut plan = Plan::idle(view.previous_plan.window);
        layout.write_to(scene, view.previous_plan, self.parameters.page_migration.into(), &mut plan);
        DecidedPlan(plan)
    }

    /// Excludes layouts that no plan can express, because their forecast would be of another plan, and failed plans
    /// with their images on like caches, unless one of them is in force.
    fn is_allowed(&self, layout: &SiteLayout, scene: &PlanningProblem, kept: &DecidedPlan, view: &View<'_>) -> bool {
        if layout.is_undivided() && self.failures.plans.is_empty() {
            return true;
        }
        let plan = self.holding(scene, layout, view);
        let present = LiveTasks::of(&view.observation.tasks);
        let is_image = |of: &Plan, plan: &Plan| is_mirror(of, plan, &present, view.topology);
        let out = |(failed, until, _): &(Plan, u64, u32)| {
            view.observation.window < *until
                && (plan.is_same(failed) || is_image(failed, &plan.0) && !is_image(failed, &kept.0))
        };
        layout.is_expressed_by(&plan.0, scene) && !self.failures.plans.iter().any(out)
    }

    /// Processor time of copying pages to other colors.
    fn copying_ns(&self, scene: &PlanningProblem, layout: &SiteLayout, view: &View<'_>) -> f64 {
        if layout.partitions.iter().all(Vec::is_empty) {
            return 0.0;
        }
        let plan = self.holding(scene, layout, view).0;
        let mut pages_ns = 0.0;
        for share in &plan.shares {
            let cachemate_core::Units::Colors { allowed, .. } = &share.units else { continue };
            let site = scene.sites.iter().find(|site| site.cache == share.cache);
            let Some(PartitionUnits::Colors { move_page_ns, .. }) = site.and_then(|site| site.divided) else {
                continue;
            };
            let members = view.live_tasks().filter(|seen| share.members.contains(&ShareMember::Process(seen.process)));
            let pages = members.filter_map(|seen| seen.pages_per_color.as_deref()).next();
            pages_ns += pages.map_or(0.0, |pages| pages_to_move(pages, allowed) as f64 * move_page_ns);
        }
        pages_ns
    }
}

/// Processes in the objective, with their speeds under a layout.
fn weights(scene: &PlanningProblem, layout: &SiteLayout) -> Vec<Weight> {
    let mut weights: Vec<Weight> = Vec::new();
    for (scene_task, speed) in scene.tasks.iter().zip(speeds(scene, layout)) {
        let (Some(program), Some(speed)) = (&scene_task.program, speed) else { continue };
        match weights.iter_mut().find(|weight| weight.process == scene_task.process) {
            // Threads of a process count as often as there are.
            Some(weight) => weight.over_alone += speed.over_alone,
            None => weights.push(Weight {
                process: scene_task.process,
                priority: program.goal.priority.max(0.0),
                over_alone: speed.over_alone,
            }),
        }
    }
    weights
}
