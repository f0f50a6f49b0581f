//! Promises that the best plan does not keep, said before anything is measured: which, why, what would make room, and who
//! pays for those that are kept.
//!
//! Method: every task's forecast under the plan is held against what it was promised. Why it falls short follows from the
//! two factors of its speed, its time on a CPU and its speed there. What makes room is found by leaving programs out of the
//! same plan, the one that helps most first. Who pays is who is slower than by default. Properties: nothing is said of
//! tasks without a promise or a forecast; work is bounded, whatever the number of tasks.

use cachemate_core::{Reason, ReasonKind, TaskId};

use super::layout::SiteLayout;
use super::problem::PlanningProblem;
use super::score::{ForecastSpeed, speeds};
use crate::work_metric::WorkMetric;

/// Promises for which room is sought, programs that are left out for one, and programs that are tried for that.
const ROOM_SOUGHT_FOR: usize = 4;
const LEFT_OUT_AT_MOST: usize = 3;
const TRIED: usize = 8;
/// Losses smaller than this share of the speed alone are not told.
const PAYS_FROM: f64 = 0.01;
/// Payers that are named.
const PAYERS_NAMED: usize = 3;
/// What is missing by less is kept.
const KEPT_WITHIN: f64 = 1e-3;

/// What is missing to promises that no plan keeps is forecast no closer than so.
const FORECAST_WITHIN: f64 = 0.02;

/// Is a plan better for what was promised, whatever else it does? It is where everything is kept that was not, or where more
/// is mended than a forecast can be wrong: of plans that break a promise alike, another one seems best after each look.
pub fn mends(missing_now: f64, missing_then: f64) -> bool {
    let becomes_met = missing_now > KEPT_WITHIN && missing_then <= KEPT_WITHIN;
    becomes_met || missing_now - missing_then > FORECAST_WITHIN
}

/// One promise that is not kept.
struct UnmetGoal {
    /// The task's place.
    at: usize,
    promise: GoalTarget,
    speed: ForecastSpeed,
    /// Can anything be done by leaving out others?
    met_alone: bool,
}

enum GoalTarget {
    Degradation { at_most: f64 },
    Rate { at_least: f64, rate: f64, alone: f64, work: WorkMetric },
}

/// Says what is not kept under the best plan, and who pays for what is.
pub fn explain_unmet(scene: &PlanningProblem, default: &SiteLayout, best: &SiteLayout, why: &mut Vec<Reason>) {
    let promised = |&at: &usize| scene.tasks[at].program.as_ref().is_some_and(|program| program.goal.is_promised());
    if !scene.known().any(|at| promised(&at)) {
        return;
    }
    let best_speeds = speeds(scene, best);
    let payers = payers(scene, &speeds(scene, default), &best_speeds);
    for (nth, short) in all_short(scene, &best_speeds).into_iter().enumerate() {
        let room =
            if nth < ROOM_SOUGHT_FOR && short.met_alone { Some(programs_to_remove(scene, best, &short)) } else { None };
        why.push(short.reason(scene, room, &payers));
    }
    if !payers.is_empty() {
        let mut tasks = Vec::new();
        let text = format!("promises are kept at the cost of {}", named(scene, &payers, &mut tasks));
        let most = payers.iter().map(|(_, loss)| *loss).fold(0.0, f64::max);
        let numbers = vec![("largest_loss_percent".to_string(), 100.0 * most)];
        why.push(Reason { kind: ReasonKind::Explanation, tasks, text, numbers });
    }
}

fn all_short(scene: &PlanningProblem, found: &[Option<ForecastSpeed>]) -> Vec<UnmetGoal> {
    let mut all = Vec::new();
    for (at, scene_task) in scene.tasks.iter().enumerate() {
        let Some((program, speed)) = scene_task.program.as_ref().zip(found[at]) else { continue };
        if let Some(at_most) = program.goal.max_slowdown
            && 1.0 / speed.over_alone - 1.0 > at_most + KEPT_WITHIN
        {
            all.push(UnmetGoal { at, promise: GoalTarget::Degradation { at_most }, speed, met_alone: true });
        }
        let rates = program.goal.min_rate.zip(speed.rates(program)).zip(program.rate);
        if let Some(((at_least, (rate, alone)), counted)) = rates
            && rate < at_least * (1.0 - KEPT_WITHIN)
        {
            let promise = GoalTarget::Rate { at_least, rate, alone, work: counted.work };
            all.push(UnmetGoal { at, promise, speed, met_alone: alone >= at_least });
        }
    }
    all
}

/// Who is slower than by default, without a promise that is broken of its own, most first, and by how much of its speed
/// alone.
fn payers(
    scene: &PlanningProblem,
    before: &[Option<ForecastSpeed>],
    after: &[Option<ForecastSpeed>],
) -> Vec<(usize, f64)> {
    let loss = |at: usize| Some(before[at]?.over_alone - after[at]?.over_alone);
    let mut all: Vec<(usize, f64)> = scene.known().filter_map(|at| Some((at, loss(at)?))).collect();
    all.retain(|(_, loss)| *loss > PAYS_FROM);
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

/// Programs without which a promise would be kept under the same plan; `None` = not without so few either.
fn programs_to_remove(scene: &PlanningProblem, layout: &SiteLayout, short: &UnmetGoal) -> Option<Vec<usize>> {
    let mut less = scene.clone();
    let mut left_out = Vec::new();
    let process = scene.tasks[short.at].process;
    let missing = |less: &PlanningProblem| {
        let program = less.tasks[short.at].program.as_ref()?;
        Some(speeds(less, layout)[short.at]?.missing(program))
    };
    while left_out.len() < LEFT_OUT_AT_MOST {
        let beside = |at: &usize| {
            layout.site_of[*at] == layout.site_of[short.at]
                && scene.tasks[*at].process != process
                && !left_out.contains(at)
        };
        let presses = |at: usize| scene.tasks[at].program.as_ref().map_or(0.0, |one| one.cpu_demand * one.misses[0]);
        let mut others: Vec<usize> = less.known().filter(beside).collect();
        others.sort_by(|&a, &b| presses(b).total_cmp(&presses(a)).then(a.cmp(&b)));
        let without = |&at: &usize| {
            let mut fewer = less.clone();
            fewer.tasks[at].program = None;
            Some((at, missing(&fewer)?))
        };
        let tried = others.iter().take(TRIED).filter_map(without);
        let (at, missing) = tried.reduce(|a, b| if b.1 < a.1 { b } else { a })?;
        less.tasks[at].program = None;
        left_out.push(at);
        if missing <= KEPT_WITHIN {
            return Some(left_out);
        }
    }
    None
}

/// Names some of them; their tasks are added to those of the reason.
fn named(scene: &PlanningProblem, payers: &[(usize, f64)], tasks: &mut Vec<TaskId>) -> String {
    let mut parts = Vec::new();
    for (at, loss) in payers.iter().take(PAYERS_NAMED) {
        parts.push(format!("{{{}}} (-{:.0} % of its speed alone)", tasks.len(), 100.0 * loss));
        tasks.push(scene.tasks[*at].task);
    }
    let more = payers.len().saturating_sub(PAYERS_NAMED);
    parts.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}

impl UnmetGoal {
    fn reason(&self, scene: &PlanningProblem, room: Option<Option<Vec<usize>>>, payers: &[(usize, f64)]) -> Reason {
        let mut tasks = vec![scene.tasks[self.at].task];
        let (mut text, numbers) = self.describe();
        text += &self.cause();
        match room {
            Some(Some(left_out)) => {
                let mut names = Vec::new();
                for at in left_out {
                    names.push(format!("{{{}}}", tasks.len()));
                    tasks.push(scene.tasks[at].task);
                }
                text += &format!("; without {} it would be kept", names.join(" and "));
            }
            Some(None) => text += &format!("; leaving out {LEFT_OUT_AT_MOST} others does not make enough room"),
            None if self.met_alone => text += "; fewer programs would make room",
            None => text += "; only a lower promise can be kept",
        }
        text += match &self.promise {
            _ if payers.is_empty() => ", and nobody pays for it".to_string(),
            _ => format!(", and {} pays for what it has", named(scene, payers, &mut tasks)),
        }
        .as_str();
        Reason { kind: ReasonKind::Explanation, tasks, text, numbers }
    }

    fn describe(&self) -> (String, Vec<(String, f64)>) {
        let number = |name: &str, value: f64| (name.to_string(), value);
        match &self.promise {
            GoalTarget::Degradation { at_most } => {
                let slower = 1.0 / self.speed.over_alone - 1.0;
                let text = format!(
                    "{{0}} cannot be kept within {:.0} % of its speed alone (degradation_at_most): the best plan leaves it \
                     {:.0} % slower",
                    100.0 * at_most,
                    100.0 * slower
                );
                (text, vec![number("degradation_at_most", *at_most), number("forecast_degradation", slower)])
            }
            GoalTarget::Rate { at_least, rate, alone, work } => {
                let text = format!(
                    "{{0}} cannot be kept at {at_least:.4e} a second in {} (rate_at_least): the best plan leaves it {rate:.4e}",
                    work.words()
                );
                let numbers = vec![
                    number("rate_at_least_per_s", *at_least),
                    number("forecast_rate_per_s", *rate),
                    number("rate_alone_at_best_per_s", *alone),
                ];
                (text, numbers)
            }
        }
    }

    /// The larger of the two factors of its speed.
    fn cause(&self) -> String {
        if let GoalTarget::Rate { alone, .. } = &self.promise
            && !self.met_alone
        {
            return format!(", as even alone it does {alone:.4e} at most");
        }
        let on_cpu = self.speed.over_alone / self.speed.share_of_demand.max(1e-12);
        if self.speed.share_of_demand < on_cpu {
            format!(", as it has a CPU for {:.0} % of the time that it wants one", 100.0 * self.speed.share_of_demand)
        } else {
            format!(", as its neighbors leave it {:.0} % of its speed while it runs", 100.0 * on_cpu)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::BTreeMap;

    use super::super::problem::{CacheSite, ProblemTask};
    use super::super::program_model::PromisedRate;
    use super::super::program_model::tests::{CACHE, program, uniform};
    use super::super::score::{PlanObjective, score};
    use super::super::score_cache::ScoreCache;
    use super::super::search::{AllowedMechanisms, CandidatePlan, PlanComparator, PlanSearch};
    use super::*;
    use cachemate_core::{CacheId, Goal, ProcessId, SplitMix64};
    use proptest::prelude::*;

    /// Two caches of two CPUs; task by task a footprint as a share of a cache, 0 = a stream, and a promise.
    fn scene(tasks: &[(f64, Option<Goal>)]) -> PlanningProblem {
        let site = |id: u32| CacheSite {
            cache: CacheId(id),
            cpus: (2 * id..2 * id + 2).collect(),
            cores: 2,
            package: 0,
            memory_node: 0,
            bytes: CACHE,
            divided: None,
        };
        let scene_task = |(at, (share, goal)): (usize, &(f64, Option<Goal>))| {
            let mut program = if *share > 0.0 { uniform(share * CACHE, 0.02) } else { program(|_| 0.02) };
            program.goal = goal.unwrap_or_default();
            // A thousand pieces of work a second for each instruction in a cycle.
            program.rate =
                program.goal.min_rate.map(|_| PromisedRate { work: WorkMetric::Reported, per_instr_per_cycle: 1e3 });
            let (task, process) = (TaskId(at as u32), ProcessId(at as u32));
            ProblemTask {
                task,
                process,
                movable: true,
                program: Some(program),
                cluster: None,
                last_site: Some(at / 2 % 2),
                keep_in_place: false,
            }
        };
        let (sites, tasks) = ((0..2).map(site).collect(), tasks.iter().enumerate().map(scene_task).collect());
        PlanningProblem {
            sites,
            tasks,
            cycles_per_ns: 2.0,
            bus: None,
            shortest_slice_ns: None,
            frozen_sites: Vec::new(),
        }
    }

    /// All candidates, and the place of the best.
    fn searched(scene: &PlanningProblem) -> (Vec<CandidatePlan>, usize) {
        let allowed =
            AllowedMechanisms { placement: true, sharing: true, space: false, gangs: true, memory_nodes: true };
        let judge = PlanComparator { objective: PlanObjective::WeightedSpeedup, worst_at_least: 0.0 };
        let (effort, generator) = (Cell::new(2_000), SplitMix64::new(1));
        let memo = ScoreCache::of(scene);
        let mut search = PlanSearch { scene, memo: &memo, allowed, judge, effort, generator };
        let all = search.candidates(&BTreeMap::new(), None);
        let judge = search.judge;
        let better = |a: usize, b: usize| if judge.key(all[b].score) > judge.key(all[a].score) { b } else { a };
        let best = (0..all.len()).reduce(better).unwrap();
        (all, best)
    }

    fn rate(at_least: f64) -> Option<Goal> {
        Some(Goal { min_rate: Some(at_least), ..Goal::default() })
    }

    /// Where no plan keeps a promise, is what holds left alone for a plan that breaks it about alike, and not for one that
    /// keeps it or breaks it much less?
    #[test]
    fn equal_breaches_mend_nothing() {
        assert!(!mends(0.310, 0.305) && !mends(0.30, 0.31) && !mends(0.0005, 0.0));
        assert!(mends(0.005, 0.0) && mends(0.30, 0.25));
    }

    /// A client beside a stream, while another like it has a cache to itself: does its floor make the two change places, and
    /// is it said who pays?
    #[test]
    fn a_floor_is_kept_and_who_pays_is_said() {
        let tasks = |goal| scene(&[(0.9, goal), (0.0, None), (0.9, None)]);
        let free = tasks(None);
        let alone = 1e3 / free.tasks[0].program.as_ref().unwrap().alone(CACHE);
        let over_alone = |scene: &PlanningProblem, layout: &SiteLayout| speeds(scene, layout)[0].unwrap().over_alone;
        let (all, best) = searched(&free);
        assert!(over_alone(&free, &all[best].layout) < 0.9, "unasked, it is left beside the stream");
        let asked = tasks(rate(0.97 * alone));
        let (all, best) = searched(&asked);
        assert!(over_alone(&asked, &all[best].layout) >= 0.97);
        let mut why = Vec::new();
        explain_unmet(&asked, &all[0].layout, &all[best].layout, &mut why);
        assert_eq!(why.len(), 1, "{why:?}");
        assert!(
            why[0].text.starts_with("promises are kept at the cost of {0}") && why[0].tasks == [TaskId(2)],
            "{why:?}"
        );
    }

    /// A rate that a client would not have alone: is nobody made to pay, and is it said that only a lower promise can be kept?
    #[test]
    fn what_cannot_be_had_alone_costs_nobody() {
        let [asked, free] = [rate(1e9), None].map(|goal| scene(&[(0.9, goal), (0.0, None), (0.5, None), (0.5, None)]));
        let (all, best) = searched(&asked);
        let (free_all, free_best) = searched(&free);
        assert_eq!(all[best].layout, free_all[free_best].layout);
        let mut why = Vec::new();
        explain_unmet(&asked, &all[0].layout, &all[best].layout, &mut why);
        let text = &why[0].text;
        assert!(text.contains("rate_at_least") && text.contains("work reported"), "{text}");
        assert!(text.contains("even alone") && text.contains("only a lower promise"), "{text}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        /// Is every promise that the best plan breaks said, with its task and the field, and no other; does nobody else's
        /// plan keep what the best breaks; and is it true that without those who are named it would be kept?
        #[test]
        fn what_is_not_kept_is_said_and_what_makes_room_does(
            tasks in prop::collection::vec((0.0f64..1.2, 0u8..4, 0.4f64..1.1), 3..7),
        ) {
            let of = |&(share, kind, part): &(f64, u8, f64)| {
                let share = if share < 0.3 { 0.0 } else { share };
                let alone = if share > 0.0 { uniform(share * CACHE, 0.02).alone(CACHE) } else { 3.0 };
                let goal = match kind {
                    0 => rate(1e3 * part / alone),
                    1 => Some(Goal { max_slowdown: Some(1.2 - part), ..Goal::default() }),
                    _ => None,
                };
                (share, goal)
            };
            let scene = scene(&tasks.iter().map(of).collect::<Vec<_>>());
            let (all, best) = searched(&scene);
            let broken = all[best].score.unmet_goals;
            prop_assert!(all.iter().all(|other| other.score.unmet_goals >= broken - 0.02), "others keep more");
            prop_assert!((score(&scene, &all[best].layout, &ScoreCache::default()).unmet_goals - broken).abs() < 1e-9);
            let mut why = Vec::new();
            explain_unmet(&scene, &all[0].layout, &all[best].layout, &mut why);
            let found = speeds(&scene, &all[best].layout);
            for (at, scene_task) in scene.tasks.iter().enumerate() {
                let (program, speed) = (scene_task.program.as_ref().unwrap(), found[at].unwrap());
                let rate = program.goal.min_rate.zip(speed.rates(program));
                let below = rate.is_some_and(|(least, (rate, _))| rate < least * (1.0 - KEPT_WITHIN));
                let slower = program.goal.max_slowdown.is_some_and(|limit| {
                    1.0 / speed.over_alone - 1.0 > limit + KEPT_WITHIN
                });
                let says = |field: &str| why.iter().any(|reason| {
                    reason.tasks[0] == scene_task.task && reason.text.contains("cannot be kept") && reason.text.contains(field)
                });
                prop_assert_eq!(says("rate_at_least"), below, "{:?}", why);
                prop_assert_eq!(says("degradation_at_most"), slower, "{:?}", why);
            }
            for short in all_short(&scene, &found).iter().filter(|short| short.met_alone) {
                let Some(left_out) = programs_to_remove(&scene, &all[best].layout, short) else { continue };
                prop_assert!(!left_out.is_empty() && !left_out.contains(&short.at));
                let mut fewer = scene.clone();
                left_out.iter().for_each(|&at| fewer.tasks[at].program = None);
                let program = scene.tasks[short.at].program.as_ref().unwrap();
                let now = speeds(&fewer, &all[best].layout)[short.at].unwrap();
                prop_assert!(now.missing(program) <= KEPT_WITHIN);
            }
        }
    }
}
