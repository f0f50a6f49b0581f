//! `AUTO-ABLATION`: the gain that `auto` loses if one of its parts is disabled.
//!
//! Problem: a part of the policy without a benefit should be removed. Method: the drawn mixes of `AUTO` run under the
//! default, under `auto`, and under `auto` without each part, which a parameter disables. Properties: each mix counts
//! once, with the mean over its machine seeds; intervals are by bootstrap over mixes ([`super::bounds`]).

use cachemate_report::figure::{Axis, BarChart, BarGroup, ChartBar};

use super::bounds::bounds;
use super::draw::{FAMILIES, MixFamily};
use super::families::{AutoMix, ScoreKind, run_all};
use super::run::AutoContender;
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure, ResultTarget, mean};

/// Parts of the policy: name in tables, and value of the parameter that disables the part.
const PARTS: [(&str, &str); 5] = [
    ("evidence", "evidence"),
    ("joint search", "joint-search"),
    ("trials", "trials"),
    ("phases", "phases"),
    ("probes", "probes"),
];
/// Positions of the default and of the full policy among the contenders; the ablations follow.
const DEFAULT: usize = 0;
const WHOLE: usize = 1;

fn contender_list() -> Vec<AutoContender> {
    let baselines =
        [AutoContender::new("default", "default", "window_ns = 1000000000"), AutoContender::new("auto", "auto", "")];
    let ablated =
        PARTS.map(|(title, parameter)| AutoContender::new(title, "auto", &format!("ablate = [\"{parameter}\"]")));
    baselines.into_iter().chain(ablated).collect()
}

/// Gain of the full policy over a contender in percent, as the mean over machine seeds.
fn gain_over(mix: &AutoMix, contender: usize) -> f64 {
    let gains = mix.did.iter().map(|scores| scores[WHOLE].gain_over(&scores[contender], ScoreKind::WeightedSpeedup));
    mean(&gains.collect::<Vec<f64>>())
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let mixes = run_all(context, context.mixes.unwrap_or(context.pick(1, 7)), &contender_list())?;
    let gain = finding(context, &mixes, DEFAULT, "gain of auto over the default");
    let mut findings = vec![gain.figure(figure(&mixes))];
    for (part, (title, _)) in PARTS.iter().enumerate() {
        findings.push(finding(context, &mixes, WHOLE + 1 + part, &format!("gain lost without {title}")));
    }
    Ok(findings)
}

/// Finding over all mixes, with one point per family.
fn finding(context: &ExperimentContext<'_>, mixes: &[AutoMix], contender: usize, what: &str) -> Finding {
    let gains: Vec<f64> = mixes.iter().map(|mix| gain_over(mix, contender)).collect();
    let (low, high) = bounds(&gains);
    let family_gains = |family: MixFamily| -> Vec<f64> {
        mixes.iter().filter(|mix| mix.family == family).map(|mix| gain_over(mix, contender)).collect()
    };
    let families = FAMILIES.iter().map(|&family| (family, family_gains(family)));
    let points = families.filter(|(_, gains)| !gains.is_empty());
    let points = points.map(|(family, gains)| DataPoint::over_values(what, family.name(), &gains));
    let value = [(context.seeds[0], mean(&gains))];
    Finding::new("AUTO-ABLATION", what, "none", "%", ResultTarget::Shown, &value)
        .points(points.collect())
        .with_note(format!("from {low:.2} to {high:.2} % over {} mixes (one-sided 95 % bounds)", mixes.len()))
}

fn figure(mixes: &[AutoMix]) -> ResultFigure {
    let bar = |contender: usize| {
        let gains: Vec<f64> = mixes.iter().map(|mix| gain_over(mix, contender)).collect();
        ChartBar { value: Some(mean(&gains)), interval: Some(bounds(&gains)) }
    };
    let group = |(index, (title, _)): (usize, &(&str, &str))| BarGroup {
        name: (*title).to_string(),
        bars: vec![bar(WHOLE + 1 + index)],
    };
    let drawing = BarChart {
        title: "Gain lost without a part of auto".to_string(),
        y: Axis::linear("gain lost (%)"),
        series: vec!["weighted speed-up".to_string()],
        groups: PARTS.iter().enumerate().map(group).collect(),
        ..BarChart::default()
    };
    ResultFigure::bars("auto-ablation", &drawing)
}
