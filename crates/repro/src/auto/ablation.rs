//! `AUTO-ABLATION`: the gain that `auto` loses if one of its parts is disabled.
//!
//! Problem: a part of the policy without a benefit should be removed. Method: the drawn mixes of `AUTO` run under the
//! default, under `auto`, and under `auto` without each part, which a parameter disables. Properties: each mix counts
//! once, with the mean over its machine seeds; intervals are by bootstrap over mixes ([`super::confidence_bounds`]).

use cachemate_report::figure::{Axis, BarChart, BarGroup, ChartBar};

use super::bounds::confidence_bounds;
use super::draw::{FAMILIES, MixFamily};
use super::families::{AutoMix, ScoreKind, score_all_mixes};
use super::run::AutoContender;
use crate::{DataPoint, ExperimentContext, Finding, Result, ResultFigure, mean};

/// Parts of the policy: name in tables, and value of the parameter that disables the part.
const PARTS: [(&str, &str); 3] = [
    ("evidence", "evidence"),
    ("phases", "phases"),
    ("probes", "probes"),
];
/// Positions of the default and of the full policy among the contenders; the ablations follow.
const DEFAULT_INDEX: usize = 0;
const FULL_POLICY_INDEX: usize = 1;

fn contender_list() -> Vec<AutoContender> {
    let baselines = [
        AutoContender::new("default", "default", "window_ns = 1000000000"),
        AutoContender::new("auto", "auto", ""),
    ];
    let ablation_contenders = PARTS.map(|(title, parameter)| {
        AutoContender::new(title, "auto", &format!("ablate = [\"{parameter}\"]"))
    });
    baselines.into_iter().chain(ablation_contenders).collect()
}

/// The gain of the full policy over a contender in percent, as the mean over machine seeds.
fn gain_over_percent(mix: &AutoMix, contender: usize) -> f64 {
    let gains = mix.scores_by_seed.iter().map(|scores| {
        scores[FULL_POLICY_INDEX].gain_over(&scores[contender], ScoreKind::WeightedSpeedup)
    });
    mean(gains)
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let mixes = score_all_mixes(
        context,
        context.mixes.unwrap_or(context.pick(1, 7)),
        &contender_list(),
    )?;
    let gain = gain_finding(
        context,
        &mixes,
        DEFAULT_INDEX,
        "gain of auto over the default",
    );
    let mut findings = vec![gain.with_figure(lost_gains_figure(&mixes))];
    for (part, (title, _)) in PARTS.iter().enumerate() {
        findings.push(gain_finding(
            context,
            &mixes,
            FULL_POLICY_INDEX + 1 + part,
            &format!("gain lost without {title}"),
        ));
    }
    Ok(findings)
}

/// The finding over all mixes, with one point per family.
fn gain_finding(
    context: &ExperimentContext<'_>,
    mixes: &[AutoMix],
    contender: usize,
    title: &str,
) -> Finding {
    let gains: Vec<f64> = mixes
        .iter()
        .map(|mix| gain_over_percent(mix, contender))
        .collect();
    let (low, high) = confidence_bounds(&gains);
    let family_gains = |family: MixFamily| -> Vec<f64> {
        mixes
            .iter()
            .filter(|mix| mix.family == family.name())
            .map(|mix| gain_over_percent(mix, contender))
            .collect()
    };
    let families = FAMILIES
        .iter()
        .map(|&family| (family, family_gains(family)));
    let points = families.filter(|(_, gains)| !gains.is_empty());
    let points = points.map(|(family, gains)| DataPoint::from_values(title, family.name(), &gains));
    let value = [(context.seeds[0], mean(&gains))];
    Finding::declared_for("auto-ablation", &[title], &value)
        .with_points(points.collect())
        .with_note(format!(
            "from {low:.2} to {high:.2} % over {} mixes (one-sided 95 % bounds)",
            mixes.len()
        ))
}

fn lost_gains_figure(mixes: &[AutoMix]) -> ResultFigure {
    let contender_bar = |contender: usize| {
        let gains: Vec<f64> = mixes
            .iter()
            .map(|mix| gain_over_percent(mix, contender))
            .collect();
        ChartBar {
            value: Some(mean(&gains)),
            interval: Some(confidence_bounds(&gains)),
        }
    };

    let group = |(index, (title, _)): (usize, &(&str, &str))| BarGroup {
        name: (*title).to_string(),
        bars: vec![contender_bar(FULL_POLICY_INDEX + 1 + index)],
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
