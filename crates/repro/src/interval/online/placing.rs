//! INTERVAL-3: DIO on four cores against all schedules (CA-6 at nominal time).

use cachemate_core::SplitMix64;

use super::*;
use crate::{DataPoint, Finding, ResultTarget};

/// The paper's ten programs (CA).
const TEN: [&str; 10] =
    ["mcf-2006", "milc", "gamess", "namd", "soplex", "sphinx", "gcc", "gobmk", "libquantum", "povray"];

/// CA-6 at nominal time: DIO on four cores against all schedules.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let machine = cachemate_spec::load_machine("xeon-x5365-4").map_err(failed("xeon-x5365-4"))?;
    let seed = context.seeds.first().copied().unwrap_or(1);
    let mut draws = SplitMix64::new(seed);
    let fours: Vec<[&'static str; 4]> = (0..context.pick(2, 8))
        .map(|_| {
            let mut names = TEN;
            draws.shuffle(&mut names);
            [names[0], names[1], names[2], names[3]]
        })
        .collect();
    let names: Vec<&'static str> = fours.iter().flatten().copied().collect();
    let programs = measure_programs(context, &names, &machine, seed)?;
    let by_four = context.run_all(&fours, |four| {
        context.report_progress(&format!("INTERVAL-3: {}", four.join(" + ")));
        let run_on = |cpus: [Option<u32>; 4], policy: &str| {
            let jobs =
                four.iter().zip(cpus).map(|(name, cpu)| build_job(&programs, name, cpu)).collect::<Result<_, _>>()?;
            let query = build_query(context, &machine, jobs, seed);
            run_query(context, &if policy == "default" { query } else { guard_query(&query) }, policy)
        };
        let mut pairings = Vec::new();
        for cpus in [[0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 3, 1]] {
            pairings.push(speedup_of(&run_on(cpus.map(Some), "default")?).settled);
        }
        let dio = run_on([None; 4], "dio")?;
        let best = pairings.iter().copied().fold(0.0, f64::max);
        Ok((four.join("+"), best, speedup_of(&dio), dio.changes_per_hour))
    })?;
    let shortfall = |value: f64, best: f64| 100.0 * (1.0 - value / best);
    let max_shortfall = by_four.iter().map(|(_, best, dio, _)| shortfall(dio.settled, *best)).fold(0.0, f64::max);
    let price: Vec<f64> =
        by_four.iter().map(|(_, best, dio, _)| shortfall(dio.whole, *best) - shortfall(dio.settled, *best)).collect();
    let points = by_four.iter().flat_map(|(name, best, dio, changes)| {
        [
            DataPoint::over_values(
                "short of the best schedule once settled, %",
                name.clone(),
                &[shortfall(dio.settled, *best)],
            ),
            DataPoint::over_values("over the whole run, %", name.clone(), &[shortfall(dio.whole, *best)]),
            DataPoint::over_values("changes an hour", name.clone(), &[*changes]),
        ]
    });
    let target = ResultTarget::AtMost { target: 2.0, paper_best: None };
    let nominal_finding = |title: &str, unit: &str, target: ResultTarget, value: f64| {
        Finding::new("INTERVAL-3", title, "CA-6 at nominal time: within 2 %", unit, target, &[(seed, value)])
    };
    Ok(vec![
        nominal_finding("DIO short of the best schedule of four programs, worst mix", "%", target, max_shortfall)
            .with_points(points.collect())
            .with_note("Weighted speed-up on the interval machine, windows of 10^9 cycles."),
        nominal_finding("price of the search, mean", "points", ResultTarget::Shown, mean(&price)),
    ])
}
