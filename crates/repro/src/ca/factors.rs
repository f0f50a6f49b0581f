//! CA-2: the slowdown of the programs that suffer most, taken apart in eight runs.

use cachemate_report::figure::{Axis, BarGroup, Bars};

use super::SCALE;
use crate::corun::Bench;
use crate::decompose::{Decomposition, decompose};
use crate::setup::Job;
use crate::{Bar, Context, DataPoint, Figure, Finding, ReproError};

/// CA 3: programs that lose at least this are shown.
const LOSES_PERCENT: f64 = 45.0;

/// milc interferes; with itself, sphinx does.
fn interfering(program: &str) -> &'static str {
    if program == "milc" { "sphinx" } else { "milc" }
}

pub fn run(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let names: &[&str] = context.pick(&["mcf-2006", "gcc"], &super::TEN);
    let mut found: Vec<Vec<Decomposition>> = Vec::new();
    for &seed in &context.seeds {
        let (warm_up, measured) = context.pick((12_000_000, 6_000_000), (25_000_000, 10_000_000));
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
         than with it.",
        if losing.is_empty() { "none".to_string() } else { losing.join(", ") },
    );
    let figure = Figure::bars("ca-2-factors", &drawn(names, &found));
    let bar = Bar::AtLeast { bar: 6.0, paper_best: None };
    let what = "programs that lose 45 % or more beside milc (milc beside sphinx) and are taken apart";
    let first =
        Finding::new("CA-2", what, "6 of 10", "programs", bar, &counts).points(points).note(note).figure(figure);
    let what = "of those, programs where factors other than cache space make up more than half";
    let second = Finding::new("CA-2", what, "5 of 6", "programs", Bar::Shown, &not_cache);
    Ok([first, second].map(|finding| finding.time_scale(SCALE as f64)).into())
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
