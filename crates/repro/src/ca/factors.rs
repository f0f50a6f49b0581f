//! CA-2: the slowdown of the most affected programs, divided into causes by eight runs.

use cachemate_core::MemorySpec;
use cachemate_report::figure::{Axis, BarChart};
use cachemate_sim::machine::SimOptions;

use crate::corun::{CoRunBench, cpus_by_cache};
use crate::decompose::{Decomposition, decompose};
use crate::setup::WorkloadJob;
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, bar_groups, list_or_none, mean,
};

/// CA 3: programs that lose at least this are shown.
const MIN_SHOWN_LOSS_PERCENT: f64 = 45.0;

/// The interfering program: milc, or sphinx beside milc itself.
fn interfering_program(program: &str) -> &'static str {
    if program == "milc" { "sphinx" } else { "milc" }
}

const MACHINE: &str = "xeon-x5365";

/// Fractions of the bandwidth in the machine's description, for buses and memory.
const BANDWIDTH_SHARES: [(&str, f64); 3] = [
    ("the machine as described", 1.0),
    ("two thirds of the bandwidth", 2.0 / 3.0),
    ("half of the bandwidth", 0.5),
];

fn machine_with_bandwidth_share(memory: &MemorySpec, share: f64) -> String {
    let bus = memory
        .package_bus_bytes_per_cycle
        .map_or(String::new(), |bytes| {
            format!("&memory.package_bus_bytes_per_cycle={}", bytes * share)
        });
    format!(
        "{MACHINE}?memory.bytes_per_cycle={}{bus}",
        memory.bytes_per_cycle * share
    )
}

fn run_lengths(context: &ExperimentContext<'_>) -> (u64, u64) {
    context.pick_by_length(
        (2_000_000, 1_000_000),
        (12_000_000, 6_000_000),
        (30_000_000, 20_000_000),
    )
}

/// The slowdown on one cache with less bandwidth behind it, with the first seed, which shows the
/// limiting resource.
fn sweep_bandwidth(
    context: &ExperimentContext<'_>,
    memory: &MemorySpec,
    names: &[&str],
) -> Result<Vec<DataPoint>> {
    let (seed, (warm_up, measured_cycles)) = (context.seeds[0], run_lengths(context));

    let mut points = Vec::new();
    for (series, share) in BANDWIDTH_SHARES {
        context.report_progress(&format!("{series}, seed {seed}"));
        let bench = CoRunBench::load(
            &machine_with_bandwidth_share(memory, share),
            seed,
            warm_up,
            measured_cycles,
        )?;
        let cpus = cpus_by_cache(&bench.machine.topology())?[0].clone();
        let slowdown_percents = context.run_all(names, |name| {
            let (program, co_runner) = (
                WorkloadJob::new(name, seed),
                WorkloadJob::new(interfering_program(name), seed + 50),
            );
            let speed_beside =
                bench.run(&[(program.clone(), cpus[0]), (co_runner, cpus[1])])?[0].instr_per_cycle;
            Ok(100.0 * (bench.solo_rates(&program)?.instr_per_cycle / speed_beside - 1.0))
        })?;
        let point_title = |name: &&str| format!("{name}, {series}");
        points.extend(
            names
                .iter()
                .zip(&slowdown_percents)
                .map(|(name, &slowdown)| {
                    DataPoint::from_values("total", point_title(name), [slowdown])
                }),
        );
        let loser_count = slowdown_percents
            .iter()
            .filter(|slowdown| **slowdown >= MIN_SHOWN_LOSS_PERCENT)
            .count() as f64;
        points.push(DataPoint::from_values(
            "programs that lose 45 % or more",
            series,
            [loser_count],
        ));
    }
    Ok(points)
}

/// The demand traffic in bytes per cycle of each program and the interfering one, on one cache
/// without prefetching, first seed.
fn demand_traffic(context: &ExperimentContext<'_>, names: &[&str]) -> Result<Vec<f64>> {
    let (seed, (warm_up, measured_cycles)) = (context.seeds[0], run_lengths(context));
    let bench = CoRunBench::load(MACHINE, seed, warm_up, measured_cycles)?;
    let cpus = cpus_by_cache(&bench.machine.topology())?[0].clone();
    let line_bytes = bench
        .machine
        .last_level_cache()
        .map_or(0.0, |cache| f64::from(cache.line_bytes));
    let options = SimOptions {
        prefetch: false,
        ..bench.options.clone()
    };

    context.run_all(names, |name| {
        let placed_jobs = [
            (WorkloadJob::new(name, seed), cpus[0]),
            (
                WorkloadJob::new(interfering_program(name), seed + 50),
                cpus[1],
            ),
        ];
        let rates = bench.run_with_options(options.clone(), &placed_jobs)?;
        let lines = rates
            .iter()
            .map(|rates| rates.misses_per_kilo_instr / 1000.0 * rates.instr_per_cycle);
        Ok(line_bytes * lines.sum::<f64>())
    })
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    // The target counts six of the ten programs, so that fewer would decide nothing.
    let names: &[&str] = context.pick_by_length(
        &["mcf-2006", "gcc"],
        &super::TEN_PROGRAMS,
        &super::TEN_PROGRAMS,
    );
    let mut decompositions_by_seed: Vec<Vec<Decomposition>> = Vec::new();
    for &seed in &context.seeds {
        let (warm_up, measured_cycles) = run_lengths(context);
        let bench = CoRunBench::load(MACHINE, seed, warm_up, measured_cycles)?;
        let mut seed_decompositions = Vec::new();
        for name in names {
            context.report_progress(&format!("{name}, seed {seed}"));
            seed_decompositions.push(decompose(
                context,
                &bench,
                &WorkloadJob::new(name, seed),
                &WorkloadJob::new(interfering_program(name), seed + 50),
            )?);
        }
        decompositions_by_seed.push(seed_decompositions);
    }
    let mut points = part_points(names, &decompositions_by_seed);
    let chart = parts_chart(&points, &decompositions_by_seed[0][0]);
    let mut note = describe_losers(names, &decompositions_by_seed);
    if !context.quick {
        let memory = CoRunBench::load(MACHINE, 1, 0, 1)?.machine.memory;
        points.extend(sweep_bandwidth(context, &memory, names)?);
        let traffic_by_pair = demand_traffic(context, names)?;
        let point = |(name, &bytes): (&&str, &f64)| {
            DataPoint::from_values("demand bytes a cycle of the pair", *name, [bytes])
        };
        points.extend(names.iter().zip(&traffic_by_pair).map(point));
        let max_bytes = traffic_by_pair.iter().copied().fold(0.0, f64::max);
        let bus_bytes_per_cycle = memory
            .package_bus_bytes_per_cycle
            .unwrap_or(memory.bytes_per_cycle);
        let bandwidth_note = format!(
            "{bus_bytes_per_cycle} of the bus and {} of memory",
            memory.bytes_per_cycle
        );
        note += &format!(
            " Demand misses of a pair on one cache, without prefetching, take {max_bytes:.2} bytes a cycle at most, of {bandwidth_note}. \
             The points show less bandwidth."
        );
    }
    // Number of programs that lose at least this, seed by seed.
    let count_losers = |condition: &dyn Fn(&Decomposition) -> bool| {
        let loses_enough =
            |d: &&Decomposition| d.total_slowdown_percent >= MIN_SHOWN_LOSS_PERCENT && condition(d);
        context.with_seeds(
            decompositions_by_seed
                .iter()
                .map(|seed| seed.iter().filter(loses_enough).count() as f64),
        )
    };
    let figure = ResultFigure::bars("ca-2-factors", &chart);
    let loser_finding = Finding::declared("ca-2-losers", &count_losers(&|_| true));
    let is_mostly_not_cache =
        |d: &Decomposition| d.not_cache_percent().is_some_and(|share| share > 50.0);
    let not_cache_finding =
        Finding::declared("ca-2-other-factors", &count_losers(&is_mostly_not_cache));
    Ok(vec![
        loser_finding
            .with_points(points)
            .with_note(note)
            .with_figure(figure),
        not_cache_finding,
    ])
}

/// The slowdown of every program and its parts, over seeds.
fn part_points(names: &[&str], decompositions: &[Vec<Decomposition>]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (program, name) in names.iter().enumerate() {
        let totals = decompositions
            .iter()
            .map(|seed| seed[program].total_slowdown_percent);
        points.push(DataPoint::from_values("total", *name, totals));
        for (index, part) in decompositions[0][program].parts.iter().enumerate() {
            let parts = decompositions
                .iter()
                .filter_map(|seed| seed[program].parts.get(index));
            points.push(DataPoint::from_values(
                &part.cause,
                *name,
                parts.map(|part| part.slowdown_percent),
            ));
        }
    }
    points
}

fn describe_losers(names: &[&str], decompositions: &[Vec<Decomposition>]) -> String {
    let total_slowdown = |program: usize| {
        mean(
            decompositions
                .iter()
                .map(|seed| seed[program].total_slowdown_percent),
        )
    };
    let is_loser = |program: &usize| total_slowdown(*program) >= MIN_SHOWN_LOSS_PERCENT;
    let losers = (0..names.len())
        .filter(is_loser)
        .map(|program| names[program].to_string());
    let losers_text = list_or_none(losers);
    format!(
        "Lose {MIN_SHOWN_LOSS_PERCENT} % or more in the mean over seeds: {losers_text}. The memory controller's part is a lower bound, \
         prefetching's an upper one and may be negative: without prefetching the other program disturbs less or more \
         than with it."
    )
}

fn parts_chart(points: &[DataPoint], decomposition: &Decomposition) -> BarChart {
    let causes: Vec<&str> = decomposition
        .parts
        .iter()
        .map(|part| part.cause.as_str())
        .collect();
    BarChart {
        title: "Where the slowdown beside milc comes from".into(),
        y: Axis::linear("percent of the run time alone"),
        groups: bar_groups(points, &causes),
        series: causes.iter().map(|cause| cause.to_string()).collect(),
        is_stacked: true,
        ..BarChart::default()
    }
}
