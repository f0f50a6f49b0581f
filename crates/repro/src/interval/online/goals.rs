//! INTERVAL-5: a floor for one program and fairness for all, sized online (GOALS at nominal time).

use cachemate_core::{Goal, WayPartitions};

use super::*;
use crate::cp::goals::{FLOOR, PAIRS};
use crate::{DataPoint, Finding, ResultTarget};

/// How the cache is managed: name, policy, whether the first program has its floor, and whether it is divided by ways.
const WAYS: [(&str, &str, bool, bool); 5] = [
    ("shared", "default", false, false),
    ("weighted speed-up", "cache-sizing:objective = 'weighted-speedup'", false, false),
    ("fairness", "cache-sizing:objective = 'fairness'", false, false),
    ("floor", "cache-sizing:objective = 'weighted-speedup'", true, false),
    ("floor, in ways", "cache-sizing:objective = 'weighted-speedup'", true, true),
];

/// The chip with cache allocation in its L2 instead of a kernel that colors.
fn machine_in_ways() -> Result<MachineSpec, ReproError> {
    let mut machine = chip_with_cores(2)?;
    machine.pages.colors = None;
    machine.caches.iter_mut().filter(|cache| cache.level == CacheLevel::L2).for_each(|cache| {
        cache.way_partitions = Some(WayPartitions { groups: 4, min_ways: 1, contiguous: true });
    });
    Ok(machine)
}

/// Slowdown of both programs relative to running alone, once settled, in percent.
fn slowdown_percents(outcome: &PolicyOutcome) -> [f64; 2] {
    let settled_start = outcome.series.seconds.len() * 3 / 4;
    [0, 1].map(|at| {
        let row = outcome.series.slowdown.get(at).map_or(&[][..], |row| &row[settled_start.min(row.len())..]);
        100.0 * (1.0 / mean_speed(&row.iter().filter_map(|value| *value).collect::<Vec<f64>>()) - 1.0)
    })
}

/// GOALS at nominal time.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let seed = context.seeds.first().copied().unwrap_or(1);
    let pairs = context.pick(&PAIRS[..1], &PAIRS);
    let (in_colors, in_ways) = (chip_with_cores(2)?, machine_in_ways()?);
    let names: Vec<&'static str> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    let programs = measure_programs(context, &names, &in_colors, seed)?;
    let runs: Vec<(usize, usize)> =
        (0..pairs.len()).flat_map(|pair| (0..WAYS.len()).map(move |way| (pair, way))).collect();
    let slowed = context.run_all(&runs, |&(pair, way)| {
        let ((a, b), (name, by, floor, ways)) = (pairs[pair], WAYS[way]);
        context.report_progress(&format!("INTERVAL-5: {a} + {b}, {name}"));
        let mut jobs = vec![build_job(&programs, a, None)?, build_job(&programs, b, None)?];
        jobs[0].goal = floor.then_some(Goal { max_slowdown: Some(FLOOR), ..Goal::default() });
        let machine = if ways { &in_ways } else { &in_colors };
        Ok(slowdown_percents(&run_query(context, &guard_query(&build_query(context, machine, jobs, seed)), by)?))
    })?;
    let worst = runs.iter().zip(&slowed).filter(|((_, way), _)| WAYS[*way].2).map(|(_, slowed)| slowed[0]);
    let worst = worst.fold(f64::NEG_INFINITY, f64::max);
    let points = runs.iter().zip(&slowed).flat_map(|(&(pair, way), slowed)| {
        let (a, b) = pairs[pair];
        [
            DataPoint::over_values(format!("{a} (has the floor), % slower than alone"), WAYS[way].0, &[slowed[0]]),
            DataPoint::over_values(format!("{b} beside it"), WAYS[way].0, &[slowed[1]]),
        ]
    });
    let finding = Finding::new(
        "INTERVAL-5",
        "slowdown of a program that is never to be more than 5 % slower than alone, once settled, worst",
        "GOALS at nominal time",
        "%",
        ResultTarget::AtMost { target: 100.0 * FLOOR, paper_best: None },
        &[(seed, worst)],
    );
    Ok(vec![
        finding
            .with_points(points.collect())
            .with_note("L3 off, the interval machine; sized online from what the machine counts."),
    ])
}
