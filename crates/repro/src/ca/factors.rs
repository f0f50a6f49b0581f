//! CA-2: the slowdown of the programs that suffer most, taken apart in eight runs.

use cachemate_report::figure::{Axis, BarGroup, Bars};
use cachemate_sim::machine::SimOptions;

use crate::corun::{Bench, caches};
use crate::decompose::{Decomposition, decompose};
use crate::setup::Job;
use crate::{Bar, Context, DataPoint, Figure, Finding, ReproError};

/// CA 3: programs that lose at least this are shown.
const LOSES_PERCENT: f64 = 45.0;

/// milc interferes; with itself, sphinx does.
fn interfering(program: &str) -> &'static str {
    if program == "milc" { "sphinx" } else { "milc" }
}

/// The machine's description has the peaks of data sheets (bus 3.55, memory 7.1 bytes a cycle); what is sustained is less.
const SWEEP: [(&str, &str); 3] = [
    ("the machine as described", "xeon-x5365"),
    ("two thirds of the bandwidth", "xeon-x5365?memory.bytes_per_cycle=4.73&memory.package_bus_bytes_per_cycle=2.37"),
    ("half of the bandwidth", "xeon-x5365?memory.bytes_per_cycle=3.55&memory.package_bus_bytes_per_cycle=1.775"),
];

fn lengths(context: &Context<'_>) -> (u64, u64) {
    context.pick((12_000_000, 6_000_000), (30_000_000, 20_000_000))
}

/// Which resource is it? The slowdown on one cache with less bandwidth behind it, first seed.
fn sweep(context: &Context<'_>, names: &[&str]) -> Result<Vec<DataPoint>, ReproError> {
    let (seed, (warm_up, measured)) = (context.seeds[0], lengths(context));
    let mut points = Vec::new();
    for (what, machine) in SWEEP {
        (context.progress)(&format!("{what}, seed {seed}"));
        let bench = Bench::on(machine, seed, warm_up, measured)?;
        let cpus = caches(&bench.machine.topology())?[0].clone();
        let suffers = context.run_all(names, |name| {
            let (program, other) = (Job::new(name, seed), Job::new(interfering(name), seed + 50));
            let beside = bench.run(&[(program.clone(), cpus[0]), (other, cpus[1])])?[0].instr_per_cycle;
            Ok(100.0 * (bench.alone(&program)?.instr_per_cycle / beside - 1.0))
        })?;
        let at = |name: &&str| format!("{name}, {what}");
        points.extend(names.iter().zip(&suffers).map(|(name, &lost)| DataPoint::over("total", at(name), &[lost])));
        let losing = suffers.iter().filter(|lost| **lost >= LOSES_PERCENT).count() as f64;
        points.push(DataPoint::over("programs that lose 45 % or more", what, &[losing]));
    }
    Ok(points)
}

/// Bytes a cycle that each program and the interfering one miss for on one cache without prefetching, first seed.
fn demand_traffic(context: &Context<'_>, names: &[&str]) -> Result<Vec<f64>, ReproError> {
    let (seed, (warm_up, measured)) = (context.seeds[0], lengths(context));
    let bench = Bench::on("xeon-x5365", seed, warm_up, measured)?;
    let cpus = caches(&bench.machine.topology())?[0].clone();
    let line_bytes = bench.machine.last_level().map_or(0.0, |cache| f64::from(cache.line_bytes));
    let options = SimOptions { prefetch: false, ..bench.options.clone() };
    context.run_all(names, |name| {
        let jobs = [(Job::new(name, seed), cpus[0]), (Job::new(interfering(name), seed + 50), cpus[1])];
        let rates = bench.run_with(options.clone(), &jobs)?;
        let lines = rates.iter().map(|rates| rates.misses_per_kilo_instr / 1000.0 * rates.instr_per_cycle);
        Ok(line_bytes * lines.sum::<f64>())
    })
}

pub fn run(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let names: &[&str] = context.pick(&["mcf-2006", "gcc"], &super::TEN);
    let mut found: Vec<Vec<Decomposition>> = Vec::new();
    for &seed in &context.seeds {
        let (warm_up, measured) = lengths(context);
        let bench = Bench::on("xeon-x5365", seed, warm_up, measured)?;
        let mut of_seed = Vec::new();
        for name in names {
            (context.progress)(&format!("{name}, seed {seed}"));
            of_seed.push(decompose(context, &bench, &Job::new(name, seed), &Job::new(interfering(name), seed + 50))?);
        }
        found.push(of_seed);
    }
    let total = |program: usize| -> f64 {
        found.iter().map(|seed| seed[program].total_degradation_percent).sum::<f64>() / found.len() as f64
    };
    let loses: Vec<usize> = (0..names.len()).filter(|&program| total(program) >= LOSES_PERCENT).collect();
    let mut points = Vec::new();
    for program in 0..names.len() {
        let per_seed = |value: &dyn Fn(&Decomposition) -> Option<f64>| -> Vec<f64> {
            found.iter().filter_map(|seed| value(&seed[program])).collect()
        };
        points.push(DataPoint::over("total", names[program], &per_seed(&|d| Some(d.total_degradation_percent))));
        for part in 0..found[0][program].parts.len() {
            let series = &found[0][program].parts[part].what;
            let values = per_seed(&|d| d.parts.get(part).map(|part| part.degradation_percent));
            points.push(DataPoint::over(series, names[program], &values));
        }
    }
    let mut traffic = None;
    if !context.quick {
        points.extend(sweep(context, names)?);
        let pairs = demand_traffic(context, names)?;
        traffic = Some(pairs.iter().copied().fold(0.0, f64::max));
        let point =
            |(name, &bytes): (&&str, &f64)| DataPoint::over("demand bytes a cycle of the pair", *name, &[bytes]);
        points.extend(names.iter().zip(&pairs).map(point));
    }
    let counts: Vec<(u64, f64)> = context
        .seeds
        .iter()
        .copied()
        .zip(
            found
                .iter()
                .map(|seed| seed.iter().filter(|d| d.total_degradation_percent >= LOSES_PERCENT).count() as f64),
        )
        .collect();
    let not_cache: Vec<(u64, f64)> = context
        .seeds
        .iter()
        .copied()
        .zip(found.iter().map(|seed| {
            let of = seed.iter().filter(|d| d.total_degradation_percent >= LOSES_PERCENT);
            of.filter(|d| d.not_cache_percent().is_some_and(|share| share > 50.0)).count() as f64
        }))
        .collect();
    let losing: Vec<&str> = loses.iter().map(|&program| names[program]).collect();
    let note = format!(
        "Lose {LOSES_PERCENT} % or more in the mean over seeds: {}. The memory controller's part is a lower bound, \
         prefetching's an upper one and may be negative: without prefetching the other program disturbs less or more \
         than with it.{}",
        if losing.is_empty() { "none".to_string() } else { losing.join(", ") },
        traffic.map_or(String::new(), |most| format!(
            " Demand misses of a pair on one cache, without prefetching, take {most:.2} bytes a cycle at most, of 3.55 of the \
             bus and 7.1 of memory: what streams waits for latency and not for bandwidth, and so loses little beside \
             milc. The points show less bandwidth."
        )),
    );
    let figure = Figure::bars("ca-2-factors", &drawn(names, &found));
    let bar = Bar::AtLeast { bar: 6.0, paper_best: None };
    let what = "programs that lose 45 % or more beside milc (milc beside sphinx) and are taken apart";
    let first =
        Finding::new("CA-2", what, "6 of 10", "programs", bar, &counts).points(points).note(note).figure(figure);
    let what = "of those, programs where factors other than cache space make up more than half";
    let second = Finding::new("CA-2", what, "5 of 6", "programs", Bar::Shown, &not_cache);
    Ok(vec![first, second])
}

fn drawn(names: &[&str], found: &[Vec<Decomposition>]) -> Bars {
    let part = |program: usize, at: usize| {
        let values = found.iter().filter_map(|seed| seed[program].parts.get(at).map(|part| part.degradation_percent));
        values.sum::<f64>() / found.len() as f64
    };
    let series: Vec<String> = found[0][0].parts.iter().map(|part| part.what.clone()).collect();
    let group = |program: usize| BarGroup {
        name: names[program].to_string(),
        bars: (0..series.len()).map(|at| part(program, at).into()).collect(),
    };
    Bars {
        title: "Where the slowdown beside milc comes from".into(),
        y: Axis::linear("per cent of the run time alone"),
        groups: (0..names.len()).map(group).collect(),
        series,
        stacked: true,
        ..Bars::default()
    }
}
