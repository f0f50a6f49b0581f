//! CA-2: the slowdown of the most affected programs, divided into causes by eight runs.

use cachemate_core::MemorySpec;
use cachemate_report::figure::{Axis, BarChart, BarGroup};
use cachemate_sim::machine::SimOptions;

use crate::corun::{CoRunBench, cpus_by_cache};
use crate::decompose::{Decomposition, decompose};
use crate::setup::WorkloadJob;
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure};

/// CA 3: programs that lose at least this are shown.
const LOSES_PERCENT: f64 = 45.0;

/// The interfering program: milc, or sphinx beside milc itself.
fn co_runner_of(program: &str) -> &'static str {
    if program == "milc" { "sphinx" } else { "milc" }
}

const MACHINE: &str = "xeon-x5365";

/// Fractions of the bandwidth in the machine's description, for buses and memory.
const SWEEP: [(&str, f64); 3] =
    [("the machine as described", 1.0), ("two thirds of the bandwidth", 2.0 / 3.0), ("half of the bandwidth", 0.5)];

/// The machine with this fraction of its bandwidth.
fn narrow_memory(memory: &MemorySpec, share: f64) -> String {
    let bus = memory
        .package_bus_bytes_per_cycle
        .map_or(String::new(), |bytes| format!("&memory.package_bus_bytes_per_cycle={}", bytes * share));
    format!("{MACHINE}?memory.bytes_per_cycle={}{bus}", memory.bytes_per_cycle * share)
}

fn run_lengths(context: &ExperimentContext<'_>) -> (u64, u64) {
    context.pick_of_three((2_000_000, 1_000_000), (12_000_000, 6_000_000), (30_000_000, 20_000_000))
}

/// Slowdown on one cache with less bandwidth behind it, with the first seed, which shows the limiting resource.
fn sweep_bandwidth(
    context: &ExperimentContext<'_>,
    memory: &MemorySpec,
    names: &[&str],
) -> Result<Vec<DataPoint>, ReproError> {
    let (seed, (warm_up, measured)) = (context.seeds[0], run_lengths(context));
    let mut points = Vec::new();
    for (series, share) in SWEEP {
        context.report_progress(&format!("{series}, seed {seed}"));
        let bench = CoRunBench::load(&narrow_memory(memory, share), seed, warm_up, measured)?;
        let cpus = cpus_by_cache(&bench.machine.topology())?[0].clone();
        let suffers = context.run_all(names, |name| {
            let (program, co_runner) = (WorkloadJob::new(name, seed), WorkloadJob::new(co_runner_of(name), seed + 50));
            let speed_beside = bench.run(&[(program.clone(), cpus[0]), (co_runner, cpus[1])])?[0].instr_per_cycle;
            Ok(100.0 * (bench.solo_rates(&program)?.instr_per_cycle / speed_beside - 1.0))
        })?;
        let point_title = |name: &&str| format!("{name}, {series}");
        points.extend(
            names
                .iter()
                .zip(&suffers)
                .map(|(name, &slowdown)| DataPoint::over_values("total", point_title(name), &[slowdown])),
        );
        let losing = suffers.iter().filter(|slowdown| **slowdown >= LOSES_PERCENT).count() as f64;
        points.push(DataPoint::over_values("programs that lose 45 % or more", series, &[losing]));
    }
    Ok(points)
}

/// Demand traffic in bytes per cycle of each program and the interfering one, on one cache without prefetching, first
/// seed.
fn demand_traffic(context: &ExperimentContext<'_>, names: &[&str]) -> Result<Vec<f64>, ReproError> {
    let (seed, (warm_up, measured)) = (context.seeds[0], run_lengths(context));
    let bench = CoRunBench::load(MACHINE, seed, warm_up, measured)?;
    let cpus = cpus_by_cache(&bench.machine.topology())?[0].clone();
    let line_bytes = bench.machine.last_level().map_or(0.0, |cache| f64::from(cache.line_bytes));
    let options = SimOptions { prefetch: false, ..bench.options.clone() };
    context.run_all(names, |name| {
        let jobs =
            [(WorkloadJob::new(name, seed), cpus[0]), (WorkloadJob::new(co_runner_of(name), seed + 50), cpus[1])];
        let rates = bench.run_with(options.clone(), &jobs)?;
        let lines = rates.iter().map(|rates| rates.misses_per_kilo_instr / 1000.0 * rates.instr_per_cycle);
        Ok(line_bytes * lines.sum::<f64>())
    })
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    // The target counts six of the ten programs, so that fewer would decide nothing.
    let names: &[&str] = context.pick_of_three(&["mcf-2006", "gcc"], &super::TEN, &super::TEN);
    let mut by_seed: Vec<Vec<Decomposition>> = Vec::new();
    for &seed in &context.seeds {
        let (warm_up, measured) = run_lengths(context);
        let bench = CoRunBench::load(MACHINE, seed, warm_up, measured)?;
        let mut of_seed = Vec::new();
        for name in names {
            context.report_progress(&format!("{name}, seed {seed}"));
            of_seed.push(decompose(
                context,
                &bench,
                &WorkloadJob::new(name, seed),
                &WorkloadJob::new(co_runner_of(name), seed + 50),
            )?);
        }
        by_seed.push(of_seed);
    }
    let mut points = part_points(names, &by_seed);
    let mut note = describe_losers(names, &by_seed);
    if !context.quick {
        let memory = CoRunBench::load(MACHINE, 1, 0, 1)?.machine.memory;
        points.extend(sweep_bandwidth(context, &memory, names)?);
        let pairs = demand_traffic(context, names)?;
        let point =
            |(name, &bytes): (&&str, &f64)| DataPoint::over_values("demand bytes a cycle of the pair", *name, &[bytes]);
        points.extend(names.iter().zip(&pairs).map(point));
        let max_bytes = pairs.iter().copied().fold(0.0, f64::max);
        let bus = memory.package_bus_bytes_per_cycle.unwrap_or(memory.bytes_per_cycle);
        let room = format!("{bus} of the bus and {} of memory", memory.bytes_per_cycle);
        note += &format!(
            " Demand misses of a pair on one cache, without prefetching, take {max_bytes:.2} bytes a cycle at most, of {room}. \
             The points show less bandwidth."
        );
    }
    // Number of programs that lose at least this, seed by seed.
    let count_losers = |also: &dyn Fn(&Decomposition) -> bool| -> Vec<(u64, f64)> {
        let loses_enough = |d: &&Decomposition| d.total_slowdown_percent >= LOSES_PERCENT && also(d);
        let of_seed = by_seed.iter().map(|seed| seed.iter().filter(loses_enough).count() as f64);
        context.seeds.iter().copied().zip(of_seed).collect()
    };
    let figure = ResultFigure::bars("ca-2-factors", &draw_parts(names, &by_seed));
    let first = Finding::declared("ca-2-losers", &count_losers(&|_| true));
    let not_cache = |d: &Decomposition| d.not_cache_percent().is_some_and(|share| share > 50.0);
    let second = Finding::declared("ca-2-other-factors", &count_losers(&not_cache));
    Ok(vec![first.with_points(points).with_note(note).with_figure(figure), second])
}

/// The slowdown of every program and its parts, over seeds.
fn part_points(names: &[&str], decompositions: &[Vec<Decomposition>]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (program, name) in names.iter().enumerate() {
        let per_seed = |value: &dyn Fn(&Decomposition) -> Option<f64>| -> Vec<f64> {
            decompositions.iter().filter_map(|seed| value(&seed[program])).collect()
        };
        points.push(DataPoint::over_values("total", *name, &per_seed(&|d| Some(d.total_slowdown_percent))));
        for index in 0..decompositions[0][program].parts.len() {
            let series = &decompositions[0][program].parts[index].cause;
            let values = per_seed(&|d| d.parts.get(index).map(|part| part.slowdown_percent));
            points.push(DataPoint::over_values(series, *name, &values));
        }
    }
    points
}

fn describe_losers(names: &[&str], decompositions: &[Vec<Decomposition>]) -> String {
    let total_slowdown = |program: usize| -> f64 {
        decompositions.iter().map(|seed| seed[program].total_slowdown_percent).sum::<f64>()
            / decompositions.len() as f64
    };
    let losing: Vec<&str> = (0..names.len())
        .filter(|&program| total_slowdown(program) >= LOSES_PERCENT)
        .map(|program| names[program])
        .collect();
    let losing = if losing.is_empty() { "none".to_string() } else { losing.join(", ") };
    format!(
        "Lose {LOSES_PERCENT} % or more in the mean over seeds: {losing}. The memory controller's part is a lower bound, \
         prefetching's an upper one and may be negative: without prefetching the other program disturbs less or more \
         than with it."
    )
}

fn draw_parts(names: &[&str], decompositions: &[Vec<Decomposition>]) -> BarChart {
    let mean_part = |program: usize, at: usize| {
        let values =
            decompositions.iter().filter_map(|seed| seed[program].parts.get(at).map(|part| part.slowdown_percent));
        values.sum::<f64>() / decompositions.len() as f64
    };
    let series: Vec<String> = decompositions[0][0].parts.iter().map(|part| part.cause.clone()).collect();
    let group = |program: usize| BarGroup {
        name: names[program].to_string(),
        bars: (0..series.len()).map(|at| mean_part(program, at).into()).collect(),
    };
    BarChart {
        title: "Where the slowdown beside milc comes from".into(),
        y: Axis::linear("percent of the run time alone"),
        groups: (0..names.len()).map(group).collect(),
        series,
        stacked: true,
        ..BarChart::default()
    }
}
