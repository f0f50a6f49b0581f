//! `cachemate plan --goal`: determines whether promises can be kept, and by which plan.

use anyhow::bail;
use cachemate_core::{Goal, MachineSpec, PromiseState, PromiseTerm};
use cachemate_forecast::plan_search::{EvaluatedPlan, PlanEvaluator, max_slowdown};
use cachemate_forecast::{TimedProgram, slowdown_with_error};
use cachemate_interval::IntervalJob;
use cachemate_report::text::escape_controls;
use serde::Serialize;

use super::programs::name_without_number;
use crate::exit::UsageError;

/// One promise, from `--goal`.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestedGoal {
    program: String,
    max_slowdown: f64,
}

/// Parses `NAME=MAX`, with MAX as `5%` or `0.05`.
pub fn parse_goal(text: &str) -> Result<RequestedGoal, String> {
    let expected = "expected PROGRAM=MAX, such as redis=5% or redis=0.05";
    let Some((program, limit_text)) = text.rsplit_once('=') else {
        return Err(format!("found '{text}', {expected}"));
    };
    let (digits, unit) = limit_text
        .strip_suffix('%')
        .map_or((limit_text, 1.0), |digits| (digits.trim(), 100.0));
    let value: f64 = digits
        .parse()
        .map_err(|_| format!("found '{limit_text}', {expected}"))?;
    let max_slowdown = value / unit;
    // A number above 1 needs a percent sign, because a bare 5 would mean 500 %, which is probably not intended.
    if !(max_slowdown.is_finite() && max_slowdown >= 0.0 && (unit > 1.0 || max_slowdown <= 1.0)) {
        return Err(format!(
            "found '{limit_text}', expected a share from 0 to 1, or percent with a unit, such as 5%"
        ));
    }
    Ok(RequestedGoal {
        program: program.to_string(),
        max_slowdown,
    })
}

/// The forecast for one promise under the best plan.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GoalForecast {
    program: String,
    max_slowdown: f64,
    /// State by the forecast's 90 % interval: `kept`, `likely`, `at-risk` or `broken`. It is `infeasible` if no
    /// searched plan keeps all promises and this promise is not kept.
    state: PromiseState,
    forecast_slowdown: f64,
    low: f64,
    high: f64,
}

/// Place of one program in a plan.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PlannedPlacement {
    pub program: String,
    pub cpu: u32,
    /// Units of the cache that are reserved for the program; 0 if it shares the remaining ones.
    pub exclusive_units: u32,
    pub forecast_slowdown: f64,
}

/// Result for all promises together: whether a plan can keep them.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GoalPlan {
    goals: Vec<GoalForecast>,
    /// Whether the forecast keeps all promises under the plan.
    keeps_all: bool,
    /// Number of ways or colors of each cache; 1 if the cache cannot be partitioned.
    units_per_cache: u32,
    placement: Vec<PlannedPlacement>,
    /// Programs without which all promises could be kept. Empty if they are kept, or if removing one program does not
    /// suffice.
    must_leave: Vec<String>,
}

/// A search over placements and partitions of timed programs, with their promises.
pub struct StaticPlanSearch {
    pub machine: MachineSpec,
    pub names: Vec<String>,
    pub jobs: Vec<IntervalJob>,
    pub seed: u64,
}

impl StaticPlanSearch {
    /// Builds the search for these programs and promises.
    ///
    /// # Errors
    /// A promise names a program that is not in the list. A name without a number means all copies.
    pub fn new(
        machine: &MachineSpec,
        names: Vec<String>,
        timed_programs: &[&TimedProgram],
        goals: &[RequestedGoal],
        seed: u64,
    ) -> anyhow::Result<Self> {
        let median_job = |program: &&TimedProgram| {
            IntervalJob::new(program.sharing_program(program.median_draw(), machine))
        };
        let mut jobs: Vec<IntervalJob> = timed_programs.iter().map(median_job).collect();
        for goal in goals {
            let is_meant =
                |name: &str| name == goal.program || name_without_number(name) == goal.program;
            let mut goal_jobs = names
                .iter()
                .zip(&mut jobs)
                .filter(|(name, _)| is_meant(name))
                .peekable();
            if goal_jobs.peek().is_none() {
                let known_names = names.join(", ");
                let message = format!(
                    "--goal: found '{}', expected one of {known_names}",
                    goal.program
                );
                return Err(UsageError(message).into());
            }
            let promise = Goal {
                max_slowdown: Some(goal.max_slowdown),
                ..Goal::default()
            };
            goal_jobs.for_each(|(_, job)| job.goal = Some(promise));
        }
        Ok(StaticPlanSearch {
            machine: machine.clone(),
            names,
            jobs,
            seed,
        })
    }

    /// Finds the best plan for the promises and, if it does not keep them, the programs that would have to leave.
    ///
    /// # Errors
    /// There are more programs than cores.
    pub fn best_for_goals(&self) -> anyhow::Result<GoalPlan> {
        let truth = PlanEvaluator::new(&self.machine, &self.jobs)?;
        let (units_per_cache, best_plan) =
            (truth.units_per_cache, truth.search_best_plan(self.seed)?);
        let must_leave = if best_plan.keeps_all_promises {
            Vec::new()
        } else {
            self.find_program_to_remove()?
        };
        Ok(build_goal_plan(
            &self.names,
            &self.jobs,
            &best_plan,
            units_per_cache,
            must_leave,
        ))
    }

    /// The first program whose removal lets all promises be kept. Programs without a promise are tried first.
    fn find_program_to_remove(&self) -> anyhow::Result<Vec<String>> {
        let mut order: Vec<usize> = (0..self.jobs.len()).collect();
        order.sort_by_key(|&index| max_slowdown(&self.jobs[index]).is_some());
        for index in order {
            let mut remaining_jobs = self.jobs.clone();
            remaining_jobs.remove(index);
            if remaining_jobs.is_empty() {
                bail!(
                    "'{}': its promise cannot be kept even alone",
                    escape_controls(&self.names[index])
                );
            }
            if PlanEvaluator::new(&self.machine, &remaining_jobs)?
                .search_best_plan(self.seed)?
                .keeps_all_promises
            {
                return Ok(vec![self.names[index].clone()]);
            }
        }
        Ok(Vec::new())
    }
}

fn build_goal_plan(
    names: &[String],
    jobs: &[IntervalJob],
    best_plan: &EvaluatedPlan,
    units_per_cache: u32,
    must_leave: Vec<String>,
) -> GoalPlan {
    let goal_forecast = |index: usize| {
        let max = max_slowdown(&jobs[index])?;
        let forecast = slowdown_with_error(best_plan.slowdowns[index]);
        let is_missed = forecast.value > max;
        let state = match is_missed && !best_plan.keeps_all_promises {
            true => PromiseState::Infeasible,
            false => PromiseTerm::MaxSlowdown(max).state_of(forecast),
        };
        Some(GoalForecast {
            program: names[index].clone(),
            max_slowdown: max,
            state,
            forecast_slowdown: forecast.value,
            low: forecast.low,
            high: forecast.high,
        })
    };
    GoalPlan {
        goals: (0..jobs.len()).filter_map(goal_forecast).collect(),
        keeps_all: best_plan.keeps_all_promises,
        units_per_cache,
        placement: placements(names, best_plan),
        must_leave,
    }
}

/// Lists the places of all programs in a plan.
pub fn placements(names: &[String], searched_plan: &EvaluatedPlan) -> Vec<PlannedPlacement> {
    let placement_of = |(index, name): (usize, &String)| PlannedPlacement {
        program: name.clone(),
        cpu: searched_plan.plan.cpu_by_job[index],
        exclusive_units: searched_plan.plan.units_by_job[index],
        forecast_slowdown: searched_plan.slowdowns[index],
    };
    names.iter().enumerate().map(placement_of).collect()
}

impl GoalPlan {
    /// Replaces each CPU by the number at its index; CPUs beyond the list keep theirs.
    pub fn renumber_cpus(&mut self, numbers: &[u32]) {
        for placement in &mut self.placement {
            if let Some(&number) = numbers.get(placement.cpu as usize) {
                placement.cpu = number;
            }
        }
    }

    /// Formats the result as text.
    pub fn describe(&self) -> String {
        let mut text =
            "\npromises, under the best plan for them (above over whole rounds of the programs, here over a \
                        fixed time)\n"
                .to_string();
        for goal in &self.goals {
            text += &format!(
                "  {} is {}: forecast {:.1} % slower than alone ({:.0} to {:.0} %), promised at most {:.1} %\n",
                goal.program,
                goal.state.describe(),
                100.0 * goal.forecast_slowdown,
                100.0 * goal.low,
                100.0 * goal.high,
                100.0 * goal.max_slowdown
            );
        }
        for placement in &self.placement {
            let share_text = match placement.exclusive_units {
                0 => String::new(),
                units => format!(
                    ", {units} of {} parts of its cache for itself",
                    self.units_per_cache
                ),
            };
            text += &format!(
                "  {} on CPU {}{share_text}: {:.1} % slower\n",
                placement.program,
                placement.cpu,
                100.0 * placement.forecast_slowdown
            );
        }
        if !self.must_leave.is_empty() {
            text += &format!(
                "  without {} all promises would be kept\n",
                self.must_leave.join(" and ")
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are a fraction and a percentage with its unit accepted, and is a bare 5 rejected, as in a configuration?
    #[test]
    fn goals_accept_fractions_and_percentages_but_no_bare_number() {
        let parse_max_slowdown = |given: &str| parse_goal(given).map(|goal| goal.max_slowdown);
        assert_eq!(
            (
                parse_max_slowdown("redis=5%"),
                parse_max_slowdown("redis=0.05"),
                parse_max_slowdown("a=b=20 %")
            ),
            (Ok(0.05), Ok(0.05), Ok(0.2))
        );
        for bad in [
            "redis",
            "redis=",
            "redis=5",
            "redis=-1%",
            "redis=x%",
            "redis=nan",
        ] {
            assert!(parse_max_slowdown(bad).is_err(), "{bad}");
        }
    }
}
