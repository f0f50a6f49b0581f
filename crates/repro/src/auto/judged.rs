//! AUTO: the bars of the integrated policy, and how the mixes stand against them.

use cachemate_core::MachineSpec;
use cachemate_report::figure::{Axis, BarGroup, Bars};

use super::MACHINES;
use super::bounds::bounds;
use super::draw::{FAMILIES, Family};
use super::families::{Mix, contenders, run_all, singles};
use crate::setup::failed;
use crate::{Bar, Context, DataPoint, Figure, Finding, ReproError, mean};

const PAPER: &str = "none built it; the thesis asks for it (7.3)";

fn over(mixes: &[&Mix], gain: impl Fn(&Mix) -> f64) -> Vec<f64> {
    mixes.iter().map(|mix| gain(mix)).collect()
}

fn finding(id: &str, what: &str, unit: &str, bar: Bar, value: f64, context: &Context<'_>) -> Finding {
    Finding::new(id, what, PAPER, unit, bar, &[(context.seeds[0], value)])
}

/// Means of per-mix means over the machine seeds that score.
fn gain(mix: &Mix, over: usize) -> f64 {
    mean(&mix.gains(contenders().len() - 1, over))
}

fn at_least(bar: f64) -> Bar {
    Bar::AtLeast { bar, paper_best: None }
}

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let load = |name: &str| cachemate_spec::load_machine(name).map_err(failed(name));
    let machines: Vec<MachineSpec> = match context.machine {
        Some(name) => vec![load(name)?],
        None => MACHINES.iter().map(|name| load(name)).collect::<Result<_, _>>()?,
    };
    let mixes = context.mixes.unwrap_or(context.pick(1, 2));
    let length_ns = context.pick(300, 900) * 1_000_000_000;
    let mixes = run_all(context, &machines, mixes, length_ns)?;
    findings(context, &mixes)
}

/// Every verdict.
fn findings(context: &Context<'_>, mixes: &[Mix]) -> Result<Vec<Finding>, ReproError> {
    let all: Vec<&Mix> = mixes.iter().collect();
    let of = |family: Family| mixes.iter().filter(|mix| mix.family == family).collect::<Vec<&Mix>>();
    let low = |values: &[f64]| bounds(values).0;
    let best = |mix: &Mix| gain(mix, mix.best_single());
    let mut found = vec![
        finding(
            "AUTO-1",
            "weighted speed-up over the default, mean over all mixes",
            "%",
            Bar::Shown,
            mean(&over(&all, |mix| gain(mix, 0))),
            context,
        )
        .points(points(mixes))
        .figure(figure(mixes)),
        finding(
            "AUTO-2",
            "against the best single mechanism of each mix in hindsight: lower 95 % bound",
            "%",
            at_least(-1.0),
            low(&over(&all, best)),
            context,
        ),
        finding(
            "AUTO-3",
            "the same on crossed mixes",
            "%",
            at_least(2.0),
            low(&over(&of(Family::Crossed), best)),
            context,
        ),
        below_default(context, mixes),
        finding(
            "AUTO-5",
            "where nothing is to be gained, over the default: lower 95 % bound",
            "%",
            at_least(-0.5),
            low(&over(&of(Family::Null), |mix| gain(mix, 0))),
            context,
        ),
    ];
    found.push(floors(context, &of(Family::Floors)));
    let auto = contenders().len() - 1;
    let behind = |mix: &Mix| {
        let points = mix
            .did
            .iter()
            .skip(1)
            .map(|did| 100.0 * (did[auto].worst_slowdown - did[0].worst_slowdown))
            .collect::<Vec<_>>();
        mean(&points)
    };
    let most = over(&all, behind).into_iter().fold(f64::NEG_INFINITY, f64::max);
    let bar = Bar::AtMost { bar: 2.0, paper_best: None };
    found.push(finding(
        "AUTO-7",
        "worst slowdown over the default's, largest over mixes",
        "points",
        bar,
        most,
        context,
    ));
    Ok(found)
}

/// A mix fails if its one-sided upper bound is below -1 %.
fn below_default(context: &Context<'_>, mixes: &[Mix]) -> Finding {
    let auto = contenders().len() - 1;
    let fails = |mix: &&Mix| bounds(&mix.gains(auto, 0)).1 < -1.0;
    let failing: Vec<&Mix> = mixes.iter().filter(fails).collect();
    let names: Vec<String> = failing
        .iter()
        .map(|mix| format!("{} {} on {} ({:+.1} %)", mix.family.name(), mix.seed, mix.machine, gain(mix, 0)))
        .collect();
    let bar = Bar::AtMost { bar: 0.0, paper_best: None };
    let note = if names.is_empty() { String::new() } else { format!("below: {}", names.join("; ")) };
    finding("AUTO-4", "mixes below the default by more than 1 %", "mixes", bar, failing.len() as f64, context)
        .note(note)
}

/// Feasible: kept by some contender in 99 % of windows.
fn floors(context: &Context<'_>, mixes: &[&Mix]) -> Finding {
    let auto = contenders().len() - 1;
    let kept = |mix: &Mix, at: usize| {
        let all: Vec<f64> = mix.did.iter().skip(1).filter_map(|did| did[at].floors_kept).collect();
        mean(&all)
    };
    let feasible: Vec<&&Mix> = mixes.iter().filter(|mix| (0..=auto).any(|at| kept(mix, at) >= 0.99)).collect();
    let values: Vec<f64> = feasible.iter().map(|mix| 100.0 * kept(mix, auto)).collect();
    let note = format!("{} of {} mixes have a contender that keeps the promise", feasible.len(), mixes.len());
    finding("AUTO-6", "feasible promises kept, of settled windows", "%", at_least(99.0), mean(&values), context)
        .note(note)
}

/// Every contender by family, over the default.
fn points(mixes: &[Mix]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (at, contender) in contenders().iter().enumerate().skip(1) {
        for family in FAMILIES {
            let values: Vec<f64> =
                mixes.iter().filter(|mix| mix.family == family).map(|mix| mean(&mix.gains(at, 0))).collect();
            points.push(DataPoint::over(contender.what, family.name(), &values));
        }
    }
    let auto = contenders().len() - 1;
    for mix in mixes {
        let at = format!("{} {} on {}", mix.family.name(), mix.seed, mix.machine);
        points.push(DataPoint::over("auto, each mix", at.clone(), &mix.gains(auto, 0)));
        let best = mix.best_single();
        points.push(DataPoint::over("best single in hindsight, each mix", at, &mix.gains(best, 0)));
    }
    points
}

fn figure(mixes: &[Mix]) -> Figure {
    let of = |at: usize, family: &Family| {
        let values: Vec<f64> =
            mixes.iter().filter(|mix| mix.family == *family).map(|mix| mean(&mix.gains(at, 0))).collect();
        cachemate_report::figure::Bar {
            value: (!values.is_empty()).then(|| mean(&values)),
            interval: (!values.is_empty()).then(|| bounds(&values)),
        }
    };
    let shown: Vec<usize> = singles().chain([contenders().len() - 1]).collect();
    let group = |family: &Family| BarGroup {
        name: family.name().to_string(),
        bars: shown.iter().map(|&at| of(at, family)).collect(),
    };
    let drawing = Bars {
        title: "Weighted speed-up over the default, by family".to_string(),
        y: Axis::linear("gain (%)"),
        series: shown.iter().map(|&at| contenders()[at].what.to_string()).collect(),
        groups: FAMILIES.iter().map(group).collect(),
        size: Some((1100.0, 400.0)),
        ..Bars::default()
    };
    Figure::bars("auto-families", &drawing)
}
