//! INTERVAL-3: DIO on four cores against all schedules (CA-6 at nominal time).

use cachemate_core::SplitMix64;

use super::*;
use crate::setup::load_machine;
use crate::{DataPoint, Finding};

/// The paper's ten programs (CA).
const PAPER_PROGRAMS: [&str; 10] = [
    "mcf-2006",
    "milc",
    "gamess",
    "namd",
    "soplex",
    "sphinx",
    "gcc",
    "gobmk",
    "libquantum",
    "povray",
];

/// The findings of CA-6 at nominal time: DIO on four cores against all schedules.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let machine = load_machine("xeon-x5365-4")?;
    let seed = context.seeds[0];
    let mut generator = SplitMix64::new(seed);
    let drawn_mixes: Vec<[&'static str; 4]> = (0..context.pick(2, 8))
        .map(|_| {
            let mut names = PAPER_PROGRAMS;
            generator.shuffle(&mut names);
            [names[0], names[1], names[2], names[3]]
        })
        .collect();
    let names: Vec<&'static str> = drawn_mixes.iter().flatten().copied().collect();
    let programs = measure_programs(context, &names, &machine, seed)?;

    let results_by_mix = context.run_all(&drawn_mixes, |mix| {
        context.report_progress(&format!("INTERVAL-3: {}", mix.join(" + ")));
        let run_on_cpus = |cpus: [Option<u32>; 4], policy: &str| {
            let jobs = mix
                .iter()
                .zip(cpus)
                .map(|(name, cpu)| build_job(&programs, name, cpu))
                .collect::<Result<_, _>>()?;
            let query = build_query(context, &machine, jobs, seed);
            run_query(
                context,
                &if policy == "default" {
                    query
                } else {
                    guarded_query(&query)
                },
                policy,
            )
        };
        let mut pairing_speedups = Vec::new();
        for cpus in [[0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 3, 1]] {
            pairing_speedups
                .push(speedup_of_outcome(&run_on_cpus(cpus.map(Some), "default")?).settled);
        }

        let dio_speedup = run_on_cpus([None; 4], "dio")?;
        let best_pairing = pairing_speedups.iter().copied().fold(0.0, f64::max);
        Ok((
            mix.join("+"),
            best_pairing,
            speedup_of_outcome(&dio_speedup),
            dio_speedup.changes_per_hour,
        ))
    })?;

    let shortfall_percent = |value: f64, best: f64| 100.0 * (1.0 - value / best);
    let max_shortfall = results_by_mix
        .iter()
        .map(|(_, best, dio, _)| shortfall_percent(dio.settled, *best))
        .fold(0.0, f64::max);
    let settling_costs: Vec<f64> = results_by_mix
        .iter()
        .map(|(_, best, dio, _)| {
            shortfall_percent(dio.whole, *best) - shortfall_percent(dio.settled, *best)
        })
        .collect();

    let points = results_by_mix
        .iter()
        .flat_map(|(name, best, dio, changes)| {
            [
                DataPoint::from_values(
                    "short of the best schedule once settled, %",
                    name.clone(),
                    [shortfall_percent(dio.settled, *best)],
                ),
                DataPoint::from_values(
                    "over the whole run, %",
                    name.clone(),
                    [shortfall_percent(dio.whole, *best)],
                ),
                DataPoint::from_values("changes an hour", name.clone(), [*changes]),
            ]
        });

    Ok(vec![
        Finding::declared("interval-3-short-of-best", &[(seed, max_shortfall)])
            .with_points(points.collect()),
        Finding::declared("interval-3-price", &[(seed, mean(&settling_costs))]),
    ])
}
