//! The model's forecast of a plan, in the terms in which the loop compares it with the next window.
//!
//! An interval spans one standard error of the task's own curve and of the cost of its misses: its waits for memory are
//! that much shorter or longer. What its co-runners do if their curves err is left out.

use std::collections::BTreeMap;

use cachemate_core::{Estimate, Forecast, ForecastModel, TaskForecast, TaskId};

use super::layout::SiteLayout;
use super::problem::PlanningProblem;
use super::program_model::ProgramModel;
use super::score::{ForecastSpeed, read_sites};
use super::score_cache::ScoreCache;

/// Relative error of a miss's cost, which is the accuracy of stall counters (docs/simulators/interval.md has the
/// model's own errors).
const COST_ERROR: f64 = 0.1;

/// Forecasts every task under a layout. `references_per_instr` returns accesses to the last level per instruction.
pub fn forecast(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    score_cache: &ScoreCache,
    references_per_instr: impl Fn(TaskId) -> Option<f64>,
) -> Forecast {
    let mut forecast = Forecast {
        model: ForecastModel::Policy,
        ..Forecast::default()
    };
    // Misses and references of each site; `None` if those of a task are unknown.
    let mut counts_by_site: BTreeMap<usize, Option<(f64, f64)>> = BTreeMap::new();
    for (problem_task, site) in problem.tasks.iter().zip(&layout.site_by_task) {
        if problem_task.program.is_none() || site.is_none() {
            forecast.unknown.push(problem_task.task);
            counts_by_site.extend(problem_task.last_site.map(|site| (site, None)));
        }
    }

    let mut task_forecasts: Vec<(TaskId, TaskForecast)> = Vec::with_capacity(problem.tasks.len());
    read_sites(problem, layout, score_cache, |members, site_forecast| {
        let Some(site) = layout.site_by_task[members[0]] else {
            return;
        };
        let known_members = || {
            let tasks = members.iter().map(|&index| &problem.tasks[index]);
            let tasks = tasks.zip(&site_forecast.speeds);
            tasks.filter_map(|(task, speed)| Some((task.task, task.program.as_ref()?, speed)))
        };
        let members_forecasts = site_forecast.task_forecasts.get_or_init(|| {
            known_members()
                .map(|(_, program, speed)| forecast_task(program, speed, problem.sites[site].bytes))
                .collect()
        });
        let site_counts = counts_by_site.entry(site).or_insert(Some((0.0, 0.0)));
        for ((task, program, speed), task_forecast) in known_members().zip(members_forecasts) {
            task_forecasts.push((task, task_forecast.clone()));
            let rates = references_per_instr(task).map(|references| {
                (
                    speed.misses_per_instr(program) * speed.instr_per_cycle,
                    references * speed.instr_per_cycle,
                )
            });
            *site_counts = site_counts
                .zip(rates)
                .map(|(sum, rates)| (sum.0 + rates.0, sum.1 + rates.1));
        }
    });
    forecast.tasks = task_forecasts.into_iter().collect();

    for (site, counts) in counts_by_site {
        let ratio =
            counts.and_then(|(misses, references)| spanning_estimate([misses / references; 3]));
        forecast
            .cache_miss_ratio
            .extend(ratio.map(|ratio| (problem.sites[site].cache, ratio)));
    }
    forecast
}

fn forecast_task(program: &ProgramModel, speed: &ForecastSpeed, cache_bytes: f64) -> TaskForecast {
    let misses_per_instr = speed.misses_per_instr(program);
    let cycles_per_instr = speed.cycles_per_instr(program);
    let error = libm::sqrt(program.curve_error * program.curve_error + COST_ERROR * COST_ERROR);
    let wait_factors = [0.0, -error, error].map(libm::exp);

    let cycles_by_factor = wait_factors.map(|factor| {
        cycles_per_instr + misses_per_instr * program.cycles_per_miss * (factor - 1.0)
    });
    let solo_waits = match program.solo {
        Some(_) => 0.0,
        None => program.misses_at(cache_bytes) * program.cycles_per_miss,
    };
    let solo_by_factor =
        wait_factors.map(|factor| program.solo_cycles(cache_bytes) + solo_waits * (factor - 1.0));
    let slowdowns = std::array::from_fn(|at| {
        cycles_by_factor[at] / (speed.met_demand_share * solo_by_factor[at]) - 1.0
    });
    let misses_by_error = [0.0, -program.curve_error, program.curve_error]
        .map(|error| 1000.0 * misses_per_instr * libm::exp(error));
    TaskForecast {
        degradation: spanning_estimate(slowdowns),
        misses_per_kilo_instr: spanning_estimate(misses_by_error),
        instr_per_cycle: spanning_estimate(cycles_by_factor.map(|cycles| 1.0 / cycles)),
        cpu_share: spanning_estimate([speed.met_demand_share * program.cpu_demand; 3]),
    }
}

/// The first value with the smallest and the largest of the three; `None` if it is not a number.
fn spanning_estimate(values: [f64; 3]) -> Option<Estimate> {
    let finite = values.into_iter().filter(|value| value.is_finite());
    let (low, high) = finite.fold((values[0], values[0]), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    values[0].is_finite().then_some(Estimate {
        value: values[0],
        low,
        high,
    })
}

#[cfg(test)]
mod tests {
    use super::super::score_cache::tests::{site_fixture, task_fixture};
    use super::*;
    use cachemate_core::CacheId;

    fn problem_fixture(parts: &[f64]) -> PlanningProblem {
        PlanningProblem::undisturbed_problem(
            vec![site_fixture(0, 4)],
            parts
                .iter()
                .enumerate()
                .map(|(id, &share)| task_fixture(id as u32, 0, share))
                .collect(),
        )
    }

    fn forecast_with_references(problem: &PlanningProblem, references: Option<f64>) -> Forecast {
        let layout =
            SiteLayout::without_partitions(problem, vec![Some(0); problem.tasks.len()], true);
        forecast(problem, &layout, &ScoreCache::default(), |_| references)
    }

    /// Is a single task forecast at its solo speed, and a task with co-runners slower, within its interval?
    #[test]
    fn a_single_task_is_forecast_at_its_solo_speed() {
        let alone = forecast_with_references(&problem_fixture(&[0.4]), None);
        let slowdown = alone.tasks[&TaskId(0)].degradation.unwrap();
        assert!(
            slowdown.value.abs() < 1e-9 && alone.model == ForecastModel::Policy,
            "{slowdown:?}"
        );
        let crowded = forecast_with_references(&problem_fixture(&[0.4, 0.9, 1.5]), None);
        let slower = crowded.tasks[&TaskId(0)].degradation.unwrap();
        assert!(
            slower.value > 0.01 && slower.low <= slower.value && slower.value <= slower.high,
            "{slower:?}"
        );
        let [crowded_speed, solo_speed] = [&crowded, &alone]
            .map(|forecast| forecast.tasks[&TaskId(0)].instr_per_cycle.unwrap().value);
        assert!(
            (crowded_speed / solo_speed * (1.0 + slower.value) - 1.0).abs() < 1e-9,
            "each has a CPU of its own"
        );
        assert!(
            crowded.cache_miss_ratio.is_empty(),
            "references are unknown"
        );
    }

    /// Is the cache's miss ratio that of all its tasks together, and unknown if one of them is unknown?
    #[test]
    fn the_miss_ratio_is_that_of_all_tasks() {
        let mut problem = problem_fixture(&[0.4, 0.9]);
        let forecast = forecast_with_references(&problem, Some(0.02));
        let rates = |id: u32| {
            let task = &forecast.tasks[&TaskId(id)];
            let speed = task.instr_per_cycle.unwrap().value * task.cpu_share.unwrap().value;
            (
                speed * task.misses_per_kilo_instr.unwrap().value / 1000.0,
                speed * 0.02,
            )
        };
        let expected = (rates(0).0 + rates(1).0) / (rates(0).1 + rates(1).1);
        assert!((forecast.cache_miss_ratio[&CacheId(0)].value / expected - 1.0).abs() < 1e-9);
        problem.tasks[1].program = None;
        let forecast = forecast_with_references(&problem, Some(0.02));
        assert!(forecast.cache_miss_ratio.is_empty() && forecast.unknown == [TaskId(1)]);
    }
}
