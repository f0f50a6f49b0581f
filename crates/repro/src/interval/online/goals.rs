//! INTERVAL-5: a floor for one program and fairness for all, sized online (GOALS at nominal time).

use cachemate_core::Goal;

use super::*;
use crate::cp::goals::{FLOOR_SLOWDOWN, PAIRS, divide_in_ways};
use crate::{DataPoint, Finding, greatest};

/// How the cache is managed: name, policy, whether the first program has its floor, and whether it is divided by ways.
const CACHE_MODES: [(&str, &str, bool, bool); 5] = [
    ("shared", "default", false, false),
    (
        "weighted speed-up",
        "cache-sizing:objective = 'weighted-speedup'",
        false,
        false,
    ),
    (
        "fairness",
        "cache-sizing:objective = 'fairness'",
        false,
        false,
    ),
    (
        "floor",
        "cache-sizing:objective = 'weighted-speedup'",
        true,
        false,
    ),
    (
        "floor, in ways",
        "cache-sizing:objective = 'weighted-speedup'",
        true,
        true,
    ),
];

/// The slowdown of both programs relative to running alone, once settled, in percent.
fn slowdown_percents(outcome: &QueryOutcome) -> [f64; 2] {
    [0, 1].map(|program| {
        let speed = mean_speed(settled_part(&outcome.slowdowns_over_time[program]));
        100.0 * (1.0 / speed - 1.0)
    })
}

/// The findings of GOALS at nominal time.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let seed = context.seeds[0];
    let pairs = context.pick(&PAIRS[..1], &PAIRS);
    let color_machine = chip_with_cores(2)?;
    let mut way_machine = color_machine.clone();
    divide_in_ways(&mut way_machine);
    let names: Vec<&'static str> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    let programs = measure_programs(context, &names, &color_machine, seed)?;
    let runs: Vec<(usize, usize)> = (0..pairs.len())
        .flat_map(|pair| (0..CACHE_MODES.len()).map(move |way| (pair, way)))
        .collect();

    let slowdowns_by_run = context.run_all(&runs, |&(pair, mode_index)| {
        let ((a, b), (name, policy, has_floor, uses_ways)) = (pairs[pair], CACHE_MODES[mode_index]);
        context.report_progress(&format!("INTERVAL-5: {a} + {b}, {name}"));
        let mut jobs = vec![
            build_job(&programs, a, None)?,
            build_job(&programs, b, None)?,
        ];
        jobs[0].goal = has_floor.then_some(Goal {
            max_slowdown: Some(FLOOR_SLOWDOWN),
            ..Goal::default()
        });

        let machine = if uses_ways {
            &way_machine
        } else {
            &color_machine
        };
        Ok(slowdown_percents(&run_query(
            context,
            &guarded_query(&build_query(context, machine, jobs, seed)),
            policy,
        )?))
    })?;

    let floor_slowdowns = runs
        .iter()
        .zip(&slowdowns_by_run)
        .filter(|((_, way), _)| CACHE_MODES[*way].2)
        .map(|(_, slowdowns)| slowdowns[0]);
    let max_floor_slowdown = greatest(floor_slowdowns);

    let points = runs
        .iter()
        .zip(&slowdowns_by_run)
        .flat_map(|(&(pair, way), slowdowns)| {
            let (a, b) = pairs[pair];
            [
                DataPoint::from_values(
                    format!("{a} (has the floor), % slower than alone"),
                    CACHE_MODES[way].0,
                    [slowdowns[0]],
                ),
                DataPoint::from_values(
                    format!("{b} beside it"),
                    CACHE_MODES[way].0,
                    [slowdowns[1]],
                ),
            ]
        });

    Ok(vec![
        Finding::declared("interval-5-floor", &[(seed, max_floor_slowdown)])
            .with_points(points.collect()),
    ])
}
