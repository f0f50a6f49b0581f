//! Goals that the best plan does not meet, reported before anything is measured: the goal, the cause, the programs that
//! would have to leave, and the programs that lose speed so that other goals are met.
//!
//! Method: every task's forecast under the plan is compared with its goal. The cause follows from the two factors of
//! its speed: its time on a CPU, and its speed while running. To find programs to remove, programs are left out of the
//! same plan, the one whose removal helps most first. Programs that are slower than by default pay for goals.
//! Properties: tasks without a goal or a forecast are not reported; work is bounded, whatever the number of tasks.

use cachemate_core::{ProcessId, Reason, ReasonKind, TaskId};
use cachemate_papers::reasons::named_number;
use cachemate_papers::work_metric::WorkMetric;

use super::layout::SiteLayout;
use super::problem::PlanningProblem;
use super::score::{ForecastSpeed, forecast_speeds};
use super::score_cache::ScoreCache;

/// Maximum number of goals for which programs to remove are searched.
const MAX_REMOVAL_SEARCHES: usize = 4;
const MAX_REMOVED: usize = 3;
const MAX_TRIED_REMOVALS: usize = 8;
/// Losses below this share of the solo speed are not reported.
const MIN_REPORTED_LOSS: f64 = 0.01;
/// Number of paying programs that are named.
const MAX_NAMED_PAYERS: usize = 3;
/// A goal with a smaller shortfall counts as met.
const GOAL_TOLERANCE: f64 = 1e-3;

/// Error of the forecast shortfall of goals that no plan meets.
const FORECAST_TOLERANCE: f64 = 0.02;

/// Whether a plan is better for the goals, whatever its other effects: it meets all goals and the present plan does
/// not, or the shortfall shrinks by more than the forecast's error. Without this margin, each search would prefer
/// another of the plans that miss a goal by about the same amount.
pub fn is_improvement(current_shortfall: f64, new_shortfall: f64) -> bool {
    let will_be_met = current_shortfall > GOAL_TOLERANCE && new_shortfall <= GOAL_TOLERANCE;
    will_be_met || current_shortfall - new_shortfall > FORECAST_TOLERANCE
}

/// The processes that miss a goal by less under the new layout than under the old one.
pub fn improved_processes(
    problem: &PlanningProblem,
    old: &SiteLayout,
    new: &SiteLayout,
    score_cache: &ScoreCache,
) -> Vec<ProcessId> {
    let [old_speeds, new_speeds] =
        [old, new].map(|layout| forecast_speeds(problem, layout, score_cache));
    let is_improved = |&index: &usize| {
        let program = problem.tasks[index].program.as_ref();
        let shortfall_at = |speed: Option<ForecastSpeed>| Some(speed?.goal_shortfall(program?));
        let shortfalls = shortfall_at(old_speeds[index]).zip(shortfall_at(new_speeds[index]));
        shortfalls.is_some_and(|(old, new)| old > new + GOAL_TOLERANCE)
    };
    problem
        .known_tasks()
        .filter(is_improved)
        .map(|index| problem.tasks[index].process)
        .collect()
}

/// One unmet goal.
struct UnmetGoal {
    /// The task's position.
    task_index: usize,
    target: GoalTarget,
    speed: ForecastSpeed,
    /// Whether the goal would be met if the task ran alone, so that removing other programs can help.
    can_be_met_alone: bool,
}

enum GoalTarget {
    Slowdown {
        max: f64,
    },
    Rate {
        min: f64,
        rate: f64,
        solo_rate: f64,
        work: WorkMetric,
    },
}

/// Explains the goals that the best plan does not meet, and names the programs that pay for those that it meets.
pub fn explain_unmet(
    problem: &PlanningProblem,
    default: &SiteLayout,
    best: &SiteLayout,
    score_cache: &ScoreCache,
    reasons: &mut Vec<Reason>,
) {
    let has_goal = |&index: &usize| {
        problem.tasks[index]
            .program
            .as_ref()
            .is_some_and(|program| program.goal.is_promised())
    };
    if !problem.known_tasks().any(|index| has_goal(&index)) {
        return;
    }

    let [default_speeds, best_speeds] =
        [default, best].map(|layout| forecast_speeds(problem, layout, score_cache));
    let payers = slowed_tasks(problem, &default_speeds, &best_speeds);
    for (goal_index, unmet_goal) in find_unmet_goals(problem, &best_speeds).iter().enumerate() {
        let removal = if goal_index < MAX_REMOVAL_SEARCHES && unmet_goal.can_be_met_alone {
            Some(programs_to_remove(problem, best, unmet_goal))
        } else {
            None
        };
        reasons.push(unmet_goal.unmet_goal_reason(problem, (best, &best_speeds), removal, &payers));
    }

    if !payers.is_empty() {
        let mut tasks = Vec::new();
        let text = format!(
            "goals are met at the cost of {}",
            name_payers(problem, &payers, &mut tasks)
        );
        let largest_loss = payers.iter().map(|(_, loss)| *loss).fold(0.0, f64::max);
        let numbers = vec![("largest_loss_percent".to_string(), 100.0 * largest_loss)];
        reasons.push(Reason::new(tasks, text, numbers));
    }
}

fn find_unmet_goals(
    problem: &PlanningProblem,
    task_speeds: &[Option<ForecastSpeed>],
) -> Vec<UnmetGoal> {
    let mut unmet_goals = Vec::new();
    for (index, problem_task) in problem.tasks.iter().enumerate() {
        let Some((program, speed)) = problem_task.program.as_ref().zip(task_speeds[index]) else {
            continue;
        };
        if let Some(max) = program.goal.max_slowdown
            && 1.0 / speed.relative_speed - 1.0 > max + GOAL_TOLERANCE
        {
            unmet_goals.push(UnmetGoal {
                task_index: index,
                target: GoalTarget::Slowdown { max },
                speed,
                can_be_met_alone: true,
            });
        }

        let rates = program
            .goal
            .min_rate
            .zip(speed.current_and_solo_rates(program))
            .zip(program.rate);

        if let Some(((min, (rate, solo_rate)), counted)) = rates
            && rate < min * (1.0 - GOAL_TOLERANCE)
        {
            let target = GoalTarget::Rate {
                min,
                rate,
                solo_rate,
                work: counted.work,
            };
            unmet_goals.push(UnmetGoal {
                task_index: index,
                target,
                speed,
                can_be_met_alone: solo_rate >= min,
            });
        }
    }

    unmet_goals
}

/// The tasks without an unmet goal that are slower than by default, the largest loss first, with their losses as shares
/// of the solo speed.
fn slowed_tasks(
    problem: &PlanningProblem,
    speeds_before: &[Option<ForecastSpeed>],
    speeds_after: &[Option<ForecastSpeed>],
) -> Vec<(usize, f64)> {
    let loss_of =
        |at: usize| Some(speeds_before[at]?.relative_speed - speeds_after[at]?.relative_speed);
    let mut losses: Vec<(usize, f64)> = problem
        .known_tasks()
        .filter_map(|index| Some((index, loss_of(index)?)))
        .collect();
    losses.retain(|(_, loss)| *loss > MIN_REPORTED_LOSS);
    losses.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    losses
}

/// The programs without which a goal would be met under the same plan; `None` if removing [`MAX_REMOVED`] programs is
/// not enough.
fn programs_to_remove(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    unmet_goal: &UnmetGoal,
) -> Option<Vec<usize>> {
    let mut reduced_problem = problem.clone();
    let mut removed_tasks = Vec::new();
    let process = problem.tasks[unmet_goal.task_index].process;
    let shortfall_without = |reduced_problem: &PlanningProblem| {
        let program = reduced_problem.tasks[unmet_goal.task_index]
            .program
            .as_ref()?;
        Some(
            forecast_speeds(reduced_problem, layout, &ScoreCache::default())
                [unmet_goal.task_index]?
                .goal_shortfall(program),
        )
    };

    while removed_tasks.len() < MAX_REMOVED {
        let shares_site = |index: &usize| {
            layout.site_by_task[*index] == layout.site_by_task[unmet_goal.task_index]
                && problem.tasks[*index].process != process
                && !removed_tasks.contains(index)
        };
        let pressure_of = |index: usize| {
            problem.tasks[index]
                .program
                .as_ref()
                .map_or(0.0, |model| model.cpu_demand * model.misses_at(0.0))
        };

        let mut co_runners: Vec<usize> =
            reduced_problem.known_tasks().filter(shares_site).collect();
        co_runners.sort_by(|&a, &b| pressure_of(b).total_cmp(&pressure_of(a)).then(a.cmp(&b)));
        let try_removal = |&index: &usize| {
            let mut smaller_problem = reduced_problem.clone();
            smaller_problem.tasks[index].program = None;
            Some((index, shortfall_without(&smaller_problem)?))
        };
        let removals = co_runners
            .iter()
            .take(MAX_TRIED_REMOVALS)
            .filter_map(try_removal);
        let (index, remaining_shortfall) = removals.reduce(|a, b| if b.1 < a.1 { b } else { a })?;
        reduced_problem.tasks[index].program = None;
        removed_tasks.push(index);
        if remaining_shortfall <= GOAL_TOLERANCE {
            return Some(removed_tasks);
        }
    }

    None
}

/// Names some of the payers, and adds their tasks to those of the reason.
fn name_payers(
    problem: &PlanningProblem,
    payers: &[(usize, f64)],
    tasks: &mut Vec<TaskId>,
) -> String {
    let mut parts = Vec::new();
    for (index, loss) in payers.iter().take(MAX_NAMED_PAYERS) {
        parts.push(format!(
            "{{{}}} (-{:.0} % of its solo speed)",
            tasks.len(),
            100.0 * loss
        ));
        tasks.push(problem.tasks[*index].task);
    }

    let unnamed_count = payers.len().saturating_sub(MAX_NAMED_PAYERS);
    parts.join(", ")
        + &if unnamed_count > 0 {
            format!(" and {unnamed_count} more")
        } else {
            String::new()
        }
}

impl UnmetGoal {
    fn unmet_goal_reason(
        &self,
        problem: &PlanningProblem,
        (best, best_speeds): (&SiteLayout, &[Option<ForecastSpeed>]),
        removal: Option<Option<Vec<usize>>>,
        payers: &[(usize, f64)],
    ) -> Reason {
        let mut tasks = vec![problem.tasks[self.task_index].task];
        let (mut text, mut numbers) = self.describe();
        text += &self.describe_cause();
        match removal {
            Some(Some(removed_programs)) => {
                numbers.push(("must_leave".to_string(), removed_programs.len() as f64));
                let mut names = Vec::new();
                for index in removed_programs {
                    names.push(format!("{{{}}}", tasks.len()));
                    tasks.push(problem.tasks[index].task);
                }
                text += &format!("; without {} it would be met", names.join(" and "));
            }
            Some(None) => {
                text += &format!("; removing {MAX_REMOVED} other programs would not suffice")
            }
            None if self.can_be_met_alone => text += "; it needs fewer programs on the machine",
            None => text += "; only a lower goal can be met",
        }

        text += &self.describe_outranking(problem, best, best_speeds, &mut tasks);
        if payers.is_empty() {
            text += ", and no program is slowed for it";
        } else {
            let verb = if payers.len() == 1 { "is" } else { "are" };
            let names = name_payers(problem, payers, &mut tasks);
            text += &format!(", and {names} {verb} slowed for the speed that it has");
        }
        Reason {
            kind: ReasonKind::InfeasibleGoal,
            tasks,
            text,
            numbers,
        }
    }

    /// Describes the task of the same cache whose promise is met instead, and adds it to `tasks`; empty if there is
    /// none.
    fn describe_outranking(
        &self,
        problem: &PlanningProblem,
        layout: &SiteLayout,
        speeds: &[Option<ForecastSpeed>],
        tasks: &mut Vec<TaskId>,
    ) -> String {
        let priority_of = |at: usize| {
            problem.tasks[at]
                .program
                .as_ref()
                .map_or(1.0, |program| program.goal.priority)
        };
        let is_met = |at: usize| {
            let model_and_speed = problem.tasks[at].program.as_ref().zip(speeds[at]);
            model_and_speed.is_some_and(|(program, speed)| {
                program.goal.is_promised() && speed.goal_shortfall(program) <= GOAL_TOLERANCE
            })
        };

        let site = layout.site_by_task[self.task_index];
        let outranking_tasks = problem.known_tasks().filter(|&index| {
            index != self.task_index && layout.site_by_task[index] == site && is_met(index)
        });
        let Some(rival) = outranking_tasks.reduce(|a, b| {
            if priority_of(b) > priority_of(a) {
                b
            } else {
                a
            }
        }) else {
            return String::new();
        };
        tasks.push(problem.tasks[rival].task);
        format!(
            "; the promise to {{{}}} on the same cache is kept instead (priority {} against {})",
            tasks.len() - 1,
            priority_of(rival),
            priority_of(self.task_index)
        )
    }

    fn describe(&self) -> (String, Vec<(String, f64)>) {
        match &self.target {
            GoalTarget::Slowdown { max } => {
                let slower = 1.0 / self.speed.relative_speed - 1.0;
                let text = format!(
                    "{{0}} cannot be kept within a slowdown of {:.0} % (max_slowdown): the best plan makes it \
                     {:.0} % slower",
                    100.0 * max,
                    100.0 * slower
                );
                (
                    text,
                    vec![
                        named_number("max_slowdown", *max),
                        named_number("forecast_slowdown", slower),
                    ],
                )
            }
            GoalTarget::Rate {
                min,
                rate,
                solo_rate,
                work,
            } => {
                let text = format!(
                    "{{0}} cannot be kept at {min:.4e} a second in {} (min_rate): the best plan leaves it {rate:.4e}",
                    work.describe()
                );
                let numbers = vec![
                    named_number("min_rate_per_s", *min),
                    named_number("forecast_rate_per_s", *rate),
                    named_number("best_solo_rate_per_s", *solo_rate),
                ];
                (text, numbers)
            }
        }
    }

    /// Describes the smaller of the two factors of the task's speed.
    fn describe_cause(&self) -> String {
        if let GoalTarget::Rate { solo_rate, .. } = &self.target
            && !self.can_be_met_alone
        {
            return format!(", as even alone it does {solo_rate:.4e} at most");
        }
        let speed_on_cpu = self.speed.relative_speed / self.speed.met_demand_share.max(1e-12);
        if self.speed.met_demand_share < speed_on_cpu {
            format!(
                ", as it has a CPU for {:.0} % of the time that it wants one",
                100.0 * self.speed.met_demand_share
            )
        } else {
            format!(
                ", as its neighbors leave it {:.0} % of its speed while it runs",
                100.0 * speed_on_cpu
            )
        }
    }
}

#[cfg(test)]
mod tests {

    use std::collections::BTreeMap;

    use super::super::problem::ProblemTask;
    use super::super::program_model::PromisedRate;
    use super::super::program_model::tests::{CACHE, program_fixture, uniform_program};
    use super::super::score::score;
    use super::super::score_cache::ScoreCache;
    use super::super::sites::CacheSite;
    use super::*;
    use crate::auto::candidates::{CandidatePlan, Mechanism, PlanSearch};
    use cachemate_core::{CacheId, Goal, ProcessId};
    use proptest::prelude::*;

    /// Two caches of two CPUs each. Each task has a footprint as a share of a cache (0 means a stream) and a goal.
    fn problem_fixture(tasks: &[(f64, Option<Goal>)]) -> PlanningProblem {
        let site = |id: u32| CacheSite {
            cache: CacheId(id),
            cpus: (2 * id..2 * id + 2).collect(),
            cores: 2,
            package: 0,
            memory_node: 0,
            bytes: CACHE,
            partition_units: None,
        };

        let problem_task = |(index, (share, goal)): (usize, &(f64, Option<Goal>))| {
            let mut program = if *share > 0.0 {
                uniform_program(share * CACHE, 0.02)
            } else {
                program_fixture(|_| 0.02)
            };
            program.goal = goal.unwrap_or_default();
            // A thousand units of work per second for each instruction per cycle.
            program.rate = program.goal.min_rate.map(|_| PromisedRate {
                work: WorkMetric::Reported,
                per_instr_per_cycle: 1e3,
            });

            let (task, process) = (TaskId(index as u32), ProcessId(index as u32));
            ProblemTask {
                task,
                process,
                is_movable: true,
                program: Some(program),
                cluster: None,
                last_site: Some(index / 2 % 2),
                stays_on_site: false,
            }
        };

        let (sites, tasks) = (
            (0..2).map(site).collect(),
            tasks.iter().enumerate().map(problem_task).collect(),
        );
        PlanningProblem::undisturbed_problem(sites, tasks)
    }

    /// All candidates, and the position of the best.
    fn search_candidates(problem: &PlanningProblem) -> (Vec<CandidatePlan>, usize) {
        let allowed = [Mechanism::Placement, Mechanism::Sharing, Mechanism::Gangs].into();
        let score_cache = ScoreCache::new(problem);
        let mut search = PlanSearch::with_effort(problem, &score_cache, allowed, 2_000);
        let plans = search.find_candidates(&BTreeMap::new(), None);
        let comparator = search.comparator;
        let better_plan = |a: usize, b: usize| {
            if comparator.score_key(plans[b].score) > comparator.score_key(plans[a].score) {
                b
            } else {
                a
            }
        };
        let best = (0..plans.len()).reduce(better_plan).unwrap();
        (plans, best)
    }

    fn min_rate_goal(min: f64) -> Option<Goal> {
        Some(Goal {
            min_rate: Some(min),
            ..Goal::default()
        })
    }

    /// If no plan meets a goal, does the plan in force stay against one that misses the goal by about the same amount,
    /// and give way to one that meets it or misses it by much less?
    #[test]
    fn the_plan_in_force_stays_if_no_plan_meets_a_goal_better() {
        assert!(
            !is_improvement(0.310, 0.305)
                && !is_improvement(0.30, 0.31)
                && !is_improvement(0.0005, 0.0)
        );
        assert!(is_improvement(0.005, 0.0) && is_improvement(0.30, 0.25));
    }

    /// A client runs beside a stream, and another client like it has a cache to itself: do the clients change places if
    /// the first has a goal, and does the reason name the task that pays?
    #[test]
    fn a_goal_is_met_and_the_paying_task_is_named() {
        let tasks = |goal| problem_fixture(&[(0.9, goal), (0.0, None), (0.9, None)]);
        let without_goals = tasks(None);
        let alone = 1e3
            / without_goals.tasks[0]
                .program
                .as_ref()
                .unwrap()
                .solo_cycles(CACHE);
        let over_alone = |problem: &PlanningProblem, layout: &SiteLayout| {
            forecast_speeds(problem, layout, &ScoreCache::default())[0]
                .unwrap()
                .relative_speed
        };
        let (plans, best) = search_candidates(&without_goals);
        assert!(
            over_alone(&without_goals, &plans[best].layout) < 0.9,
            "without a goal, it stays beside the stream"
        );
        let with_goals = tasks(min_rate_goal(0.97 * alone));
        let (plans, best) = search_candidates(&with_goals);
        assert!(over_alone(&with_goals, &plans[best].layout) >= 0.97);
        let mut reasons = Vec::new();
        explain_unmet(
            &with_goals,
            &plans[0].layout,
            &plans[best].layout,
            &ScoreCache::default(),
            &mut reasons,
        );
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        assert!(
            reasons[0]
                .text
                .starts_with("goals are met at the cost of {0}")
                && reasons[0].tasks == [TaskId(2)],
            "{reasons:?}"
        );
    }

    /// If a client could not even reach its promised rate alone, is no task slowed for it, and does the reason ask for
    /// a lower goal?
    #[test]
    fn a_goal_out_of_reach_slows_no_task() {
        let [with_goal, without_goal] = [min_rate_goal(1e9), None]
            .map(|goal| problem_fixture(&[(0.9, goal), (0.0, None), (0.5, None), (0.5, None)]));
        let (plans, best) = search_candidates(&with_goal);
        let (free_plans, free_best) = search_candidates(&without_goal);
        assert_eq!(plans[best].layout, free_plans[free_best].layout);
        let mut reasons = Vec::new();
        explain_unmet(
            &with_goal,
            &plans[0].layout,
            &plans[best].layout,
            &ScoreCache::default(),
            &mut reasons,
        );
        let text = &reasons[0].text;
        assert!(
            text.contains("min_rate") && text.contains("work reported"),
            "{text}"
        );
        assert!(
            text.contains("even alone") && text.contains("only a lower goal"),
            "{text}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        /// Is every goal that the best plan misses reported with its task and key, and no other goal? Does no other
        /// plan meet more goals, and would each be met without the named programs?
        #[test]
        fn unmet_goals_are_reported_and_removals_suffice(
            tasks in prop::collection::vec((0.0f64..1.2, 0u8..4, 0.4f64..1.1), 3..7),
        ) {
            let build_program = |&(share, kind, goal_share): &(f64, u8, f64)| {
                let share = if share < 0.3 { 0.0 } else { share };
                let alone = if share > 0.0 { uniform_program(share * CACHE, 0.02).solo_cycles(CACHE) } else { 3.0 };
                let goal = match kind {
                    0 => min_rate_goal(1e3 * goal_share / alone),
                    1 => Some(Goal { max_slowdown: Some(1.2 - goal_share), ..Goal::default() }),
                    _ => None,
                };
                (share, goal)
            };
            let problem = problem_fixture(&tasks.iter().map(build_program).collect::<Vec<_>>());
            let (plans, best) = search_candidates(&problem);
            let broken = plans[best].score.unmet_goals;
            prop_assert!(plans.iter().all(|plan| plan.score.unmet_goals >= broken - 0.02), "others meet more");
            prop_assert!((score(&problem, &plans[best].layout, &ScoreCache::default()).unmet_goals - broken).abs() < 1e-9);
            let mut reasons = Vec::new();
            explain_unmet(&problem, &plans[0].layout, &plans[best].layout, &ScoreCache::default(), &mut reasons);
            let plan_speeds = forecast_speeds(&problem, &plans[best].layout, &ScoreCache::default());

            for (at, problem_task) in problem.tasks.iter().enumerate() {
                let (program, speed) = (problem_task.program.as_ref().unwrap(), plan_speeds[at].unwrap());
                let rate = program.goal.min_rate.zip(speed.current_and_solo_rates(program));
                let below = rate.is_some_and(|(min_rate, (rate, _))| rate < min_rate * (1.0 - GOAL_TOLERANCE));
                let slower = program.goal.max_slowdown.is_some_and(|limit| {
                    1.0 / speed.relative_speed - 1.0 > limit + GOAL_TOLERANCE
                });
                let says = |field: &str| reasons.iter().any(|reason| {
                    reason.tasks[0] == problem_task.task && reason.text.contains("cannot be kept") && reason.text.contains(field)
                });
                prop_assert_eq!(says("min_rate"), below, "{:?}", reasons);
                prop_assert_eq!(says("max_slowdown"), slower, "{:?}", reasons);
            }

            for unmet_goal in find_unmet_goals(&problem, &plan_speeds).iter().filter(|short| short.can_be_met_alone) {
                let Some(left_out) = programs_to_remove(&problem, &plans[best].layout, unmet_goal) else { continue };
                prop_assert!(!left_out.is_empty() && !left_out.contains(&unmet_goal.task_index));
                let mut fewer = problem.clone();
                left_out.iter().for_each(|&index| fewer.tasks[index].program = None);
                let program = problem.tasks[unmet_goal.task_index].program.as_ref().unwrap();
                let now = forecast_speeds(&fewer, &plans[best].layout, &ScoreCache::default())[unmet_goal.task_index].unwrap();
                prop_assert!(now.goal_shortfall(program) <= GOAL_TOLERANCE);
            }
        }
    }
}
