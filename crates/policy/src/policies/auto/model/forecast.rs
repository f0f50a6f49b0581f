//! The model's forecast of a plan, in the terms in which the loop compares it with the next window.

use std::collections::BTreeMap;

use cachemate_core::{Estimate, Forecast, ForecastModel, TaskForecast, TaskId};

use super::layout::SiteLayout;
use super::problem::PlanningProblem;
use super::score::{ForecastSpeed, forecast_drawn_speeds, forecast_speeds};
use super::score_cache::ScoreCache;

/// Number of draws within the errors of curves and costs that an interval spans.
const DRAW_COUNT: u64 = 4;

/// Forecasts every task under a layout. `references_per_instr` returns accesses to the last level per instruction.
pub fn forecast(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    score_cache: &ScoreCache,
    references_per_instr: impl Fn(TaskId) -> Option<f64>,
    seed: u64,
) -> Forecast {
    let central_speeds = forecast_speeds(problem, layout, score_cache);
    let forecast_draw = |draw: u64| {
        forecast_drawn_speeds(
            problem,
            layout,
            &score_cache.draw(problem, seed ^ draw),
            score_cache,
        )
    };
    let drawn_speeds: Vec<_> = (0..DRAW_COUNT).map(forecast_draw).collect();
    let mut forecast = Forecast {
        model: ForecastModel::Policy,
        ..Forecast::default()
    };
    // Misses and references of each site; `None` if those of a task are unknown.
    let mut counts_by_site: BTreeMap<usize, Option<(f64, f64)>> = BTreeMap::new();
    for (index, problem_task) in problem.tasks.iter().enumerate() {
        let (Some(program), Some(speed)) = (&problem_task.program, central_speeds[index]) else {
            forecast.unknown.push(problem_task.task);
            if let Some(site) = problem_task.last_site {
                counts_by_site.insert(site, None);
            }
            continue;
        };
        let task_draws: Vec<ForecastSpeed> = drawn_speeds
            .iter()
            .filter_map(|speeds| speeds[index])
            .collect();
        let span_draws = |value: &dyn Fn(&ForecastSpeed) -> f64| {
            spanning_estimate(value(&speed), task_draws.iter().map(value))
        };
        let cpu_share = |speed: &ForecastSpeed| speed.met_demand_share * program.cpu_demand;
        let misses_per_instr_of = |speed: &ForecastSpeed| {
            speed.lines_per_cycle / speed.instr_per_cycle / program.lines_per_miss
        };
        forecast.tasks.insert(
            problem_task.task,
            TaskForecast {
                degradation: span_draws(&|speed| 1.0 / speed.relative_speed - 1.0),
                misses_per_kilo_instr: span_draws(&|speed| 1000.0 * misses_per_instr_of(speed)),
                instr_per_cycle: span_draws(&|speed| speed.instr_per_cycle / cpu_share(speed)),
                cpu_share: span_draws(&cpu_share),
            },
        );
        let Some(site) = layout.site_by_task[index] else {
            continue;
        };
        let rates = references_per_instr(problem_task.task).map(|references| {
            (
                misses_per_instr_of(&speed) * speed.instr_per_cycle,
                references * speed.instr_per_cycle,
            )
        });
        let site_counts = counts_by_site.entry(site).or_insert(Some((0.0, 0.0)));
        *site_counts = site_counts
            .zip(rates)
            .map(|(sum, rates)| (sum.0 + rates.0, sum.1 + rates.1));
    }
    for (site, counts) in counts_by_site {
        let ratio = counts.and_then(|(misses, references)| {
            spanning_estimate(misses / references, std::iter::empty())
        });
        forecast
            .cache_miss_ratio
            .extend(ratio.map(|ratio| (problem.sites[site].cache, ratio)));
    }
    forecast
}

/// Returns an estimate that spans the draws; `None` if a value is not a number.
fn spanning_estimate(value: f64, draws: impl Iterator<Item = f64>) -> Option<Estimate> {
    let (low, high) = draws
        .filter(|draw| draw.is_finite())
        .fold((value, value), |(low, high), draw| {
            (f64::min(low, draw), f64::max(high, draw))
        });
    value.is_finite().then_some(Estimate { value, low, high })
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
        forecast(problem, &layout, &ScoreCache::default(), |_| references, 1)
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
        let message = &crowded.tasks[&TaskId(0)];
        let slower = message.degradation.unwrap();
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
        let message = forecast_with_references(&problem, Some(0.02));
        let rates = |id: u32| {
            let task = &message.tasks[&TaskId(id)];
            let speed = task.instr_per_cycle.unwrap().value * task.cpu_share.unwrap().value;
            (
                speed * task.misses_per_kilo_instr.unwrap().value / 1000.0,
                speed * 0.02,
            )
        };
        let expected = (rates(0).0 + rates(1).0) / (rates(0).1 + rates(1).1);
        assert!((message.cache_miss_ratio[&CacheId(0)].value / expected - 1.0).abs() < 1e-9);
        problem.tasks[1].program = None;
        let message = forecast_with_references(&problem, Some(0.02));
        assert!(message.cache_miss_ratio.is_empty() && message.unknown == [TaskId(1)]);
    }
}
