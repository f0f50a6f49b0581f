//! Results of `AUTO` compared with their targets.

use cachemate_report::figure::{Axis, BarChart, BarGroup, ChartBar};

use super::bounds::{confidence_bounds, lower_bound};
use super::draw::{FAMILIES, MixFamily};
use super::families::{AUTO_INDEX, AutoMix, RIVALS, ScoreKind, contender_list, score_all_mixes};
use super::run::AutoContender;
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, ResultTarget, greatest, mean,
};

const PAPER: &str = "none built it; the thesis asks for it (7.3)";

fn mix_gains(mixes: &[&AutoMix], gain: impl Fn(&AutoMix) -> f64) -> Vec<f64> {
    mixes.iter().map(|mix| gain(mix)).collect()
}

fn family_finding(
    context: &ExperimentContext<'_>,
    (id, unit): (&str, &str),
    title: &str,
    target: ResultTarget,
    value: f64,
) -> Finding {
    Finding::new(id, title, PAPER, unit, target, &[(context.seeds[0], value)])
}

/// The mean gain of `auto` over a contender, over the machine seeds that score.
fn mean_gain_over(mix: &AutoMix, baseline: usize) -> f64 {
    mean(mix.gain_percents(AUTO_INDEX, baseline))
}

fn minimum_target(target: f64) -> ResultTarget {
    ResultTarget::AtLeast {
        target,
        paper_best: None,
    }
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let mixes = score_all_mixes(
        context,
        context.mixes.unwrap_or(context.pick(1, 2)),
        &contender_list(),
    )?;
    let all_mixes: Vec<&AutoMix> = mixes.iter().collect();
    let family_mixes = |family: MixFamily| {
        mixes
            .iter()
            .filter(|mix| mix.family == family.name())
            .collect::<Vec<&AutoMix>>()
    };

    let declared = |name: &str, value: f64| Finding::declared(name, &[(context.seeds[0], value)]);
    let over_best_single = |mixes: &[&AutoMix]| {
        lower_bound(&mix_gains(mixes, |mix| {
            mean_gain_over(mix, mix.best_single_mechanism())
        }))
    };

    let over_default = |mix: &AutoMix| mean_gain_over(mix, 0);
    let crossed_mixes = family_mixes(MixFamily::Crossed);
    let mut findings = vec![
        declared(
            "auto-1-over-default",
            mean(mix_gains(&all_mixes, over_default)),
        )
        .with_points(gain_points(&mixes))
        .with_figure(gains_figure(&mixes)),
        declared("auto-2-over-best-single", over_best_single(&all_mixes)),
        crossed_finding(context, over_best_single(&crossed_mixes), &crossed_mixes),
        below_default_finding(context, &mixes),
        declared(
            "auto-5-null",
            lower_bound(&mix_gains(&family_mixes(MixFamily::Null), over_default)),
        ),
    ];
    findings.push(floor_finding(context, &family_mixes(MixFamily::Floors)));
    findings.push(slowdown_against_default_finding(
        context,
        "worst slowdown over the default's, largest over mixes",
        &all_mixes,
    ));
    findings.extend(
        FAMILIES
            .iter()
            .flat_map(|&family| family_findings(context, family, &family_mixes(family))),
    );
    findings.extend(baseline_findings(context, &all_mixes));
    Ok(findings)
}

/// The finding about crossed mixes. Its note has the bound of any combination: the gain over the
/// best single mechanism if every program ran as fast as alone.
fn crossed_finding(context: &ExperimentContext<'_>, gain: f64, mixes: &[&AutoMix]) -> Finding {
    let ideal_gain = |mix: &AutoMix| {
        let best = mix.best_single_mechanism();
        mean(
            mix.scores_by_seed
                .iter()
                .skip(1)
                .map(|scores| 100.0 * (1.0 / scores[best].weighted_speedup - 1.0)),
        )
    };
    let note = format!(
        "{:+.1} % if every program ran as fast as alone",
        lower_bound(&mix_gains(mixes, ideal_gain))
    );
    Finding::declared("auto-3-crossed", &[(context.seeds[0], gain)]).with_note(note)
}

/// The finding about the job that is worst off: by how many points it is slower than under the
/// default.
fn slowdown_against_default_finding(
    context: &ExperimentContext<'_>,
    subject: &str,
    mixes: &[&AutoMix],
) -> Finding {
    let lost_points =
        |mix: &AutoMix| mean(mix.gain_percents_in(ScoreKind::WorstSlowdown, AUTO_INDEX, 0));
    let max_points = greatest(mix_gains(mixes, lost_points));
    let target = ResultTarget::AtMost {
        target: 2.0,
        paper_best: None,
    };
    family_finding(context, ("AUTO-7", "points"), subject, target, max_points)
}

/// The findings of one family: against the best single mechanism in hindsight, and against the
/// default.
fn family_findings(
    context: &ExperimentContext<'_>,
    family: MixFamily,
    mixes: &[&AutoMix],
) -> Vec<Finding> {
    if mixes.is_empty() {
        return Vec::new();
    }

    let name = family.name();
    let gain_over_best = |score_kind: ScoreKind| {
        lower_bound(&mix_gains(mixes, |mix| {
            mean(mix.gain_percents_in(score_kind, AUTO_INDEX, mix.best_single_mechanism()))
        }))
    };
    let gain_over_default = |score_kind: ScoreKind| {
        lower_bound(&mix_gains(mixes, |mix| {
            mean(mix.gain_percents_in(score_kind, AUTO_INDEX, 0))
        }))
    };

    let target = if family == MixFamily::Crossed {
        2.0
    } else {
        -1.0
    };
    let min_gain_percent = if family == MixFamily::Null {
        -0.5
    } else {
        -1.0
    };

    let bound_finding = |id: &str, metric_title: &str, target: ResultTarget, value: f64| {
        family_finding(
            context,
            (id, "%"),
            &format!("{name}: {metric_title}: lower 95 % bound"),
            target,
            value,
        )
    };

    let mut findings = vec![
        bound_finding(
            "AUTO-8",
            "weighted speed-up against the best single mechanism in hindsight",
            minimum_target(target),
            gain_over_best(ScoreKind::WeightedSpeedup),
        ),
        slowdown_against_default_finding(
            context,
            &format!("{name}: worst slowdown over the default's, largest over mixes"),
            mixes,
        ),
        bound_finding(
            "AUTO-8",
            "weighted speed-up over the default",
            minimum_target(min_gain_percent),
            gain_over_default(ScoreKind::WeightedSpeedup),
        ),
    ];

    for (kind, metric) in [
        (ScoreKind::HarmonicMean, "harmonic mean of speeds"),
        (ScoreKind::Throughput, "throughput"),
    ] {
        for (title, gain) in [
            ("over the default", gain_over_default(kind)),
            (
                "against the best single mechanism in hindsight",
                gain_over_best(kind),
            ),
        ] {
            findings.push(bound_finding(
                "AUTO-9",
                &format!("{metric} {title}"),
                ResultTarget::Shown,
                gain,
            ));
        }
    }

    findings
}

/// Findings against each single baseline over all mixes, which show whether a fixed policy is better. The rivals of
/// today have to be beaten in the mean.
fn baseline_findings(context: &ExperimentContext<'_>, mixes: &[&AutoMix]) -> Vec<Finding> {
    let finding_against = |(contender_index, baseline): (usize, &AutoContender)| {
        let gains = mix_gains(mixes, |mix| mean_gain_over(mix, contender_index));
        let (statistic, target, gain) = if RIVALS.contains(&baseline.title) {
            ("mean", 3.0, mean(&gains))
        } else {
            ("lower 95 % bound", -1.0, lower_bound(&gains))
        };
        let title = format!(
            "weighted speed-up over '{}', all mixes: {statistic}",
            baseline.title
        );
        family_finding(
            context,
            ("AUTO-10", "%"),
            &title,
            minimum_target(target),
            gain,
        )
    };
    let contenders = contender_list();
    contenders[..AUTO_INDEX]
        .iter()
        .enumerate()
        .map(finding_against)
        .collect()
}

/// The finding about mixes that lose against the default: those whose one-sided upper bound is
/// below -1 %.
fn below_default_finding(context: &ExperimentContext<'_>, mixes: &[AutoMix]) -> Finding {
    let is_harmed = |mix: &&AutoMix| confidence_bounds(&mix.gain_percents(AUTO_INDEX, 0)).1 < -1.0;
    let harmed_mixes: Vec<&AutoMix> = mixes.iter().filter(is_harmed).collect();
    let harmed_names: Vec<String> = harmed_mixes
        .iter()
        .map(|mix| {
            format!(
                "{} {} on {} ({:+.1} %)",
                mix.family,
                mix.seed,
                mix.machine,
                mean_gain_over(mix, 0)
            )
        })
        .collect();

    let note = if harmed_names.is_empty() {
        String::new()
    } else {
        format!("below: {}", harmed_names.join("; "))
    };
    Finding::declared(
        "auto-4-below-default",
        &[(context.seeds[0], harmed_mixes.len() as f64)],
    )
    .with_note(note)
}

/// The finding about promised speeds. A promise counts as feasible if some contender keeps it in 9
/// 9 % of windows.
fn floor_finding(context: &ExperimentContext<'_>, mixes: &[&AutoMix]) -> Finding {
    let kept_floor_share = |mix: &AutoMix, contender_index: usize| {
        let kept_shares: Vec<f64> = mix
            .scores_by_seed
            .iter()
            .skip(1)
            .filter_map(|scores| scores[contender_index].floors_kept)
            .collect();
        mean(&kept_shares)
    };
    let feasible_mixes: Vec<&&AutoMix> = mixes
        .iter()
        .filter(|mix| {
            (0..=AUTO_INDEX).any(|contender_index| kept_floor_share(mix, contender_index) >= 0.99)
        })
        .collect();
    let values: Vec<f64> = feasible_mixes
        .iter()
        .map(|mix| 100.0 * kept_floor_share(mix, AUTO_INDEX))
        .collect();

    let note = format!(
        "{} of {} mixes have a contender that keeps the promise",
        feasible_mixes.len(),
        mixes.len()
    );
    Finding::declared("auto-6-promises", &[(context.seeds[0], mean(&values))]).with_note(note)
}

/// Gains of a contender over the default on each mix of a family, as means over machine seeds.
fn family_gains(mixes: &[AutoMix], family: MixFamily, contender: usize) -> Vec<f64> {
    let own_mixes = mixes.iter().filter(|mix| mix.family == family.name());
    own_mixes
        .map(|mix| mean(mix.gain_percents(contender, 0)))
        .collect()
}

/// The points of every contender relative to the default, by family.
fn gain_points(mixes: &[AutoMix]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (contender_index, contender) in contender_list().iter().enumerate().skip(1) {
        for family in FAMILIES {
            let gains = family_gains(mixes, family, contender_index);
            points.push(DataPoint::from_values(
                contender.title,
                family.name(),
                &gains,
            ));
        }
    }

    for mix in mixes {
        let point_label = format!("{} {} on {}", mix.family, mix.seed, mix.machine);
        points.push(DataPoint::from_values(
            "auto, each mix",
            point_label.clone(),
            mix.gain_percents(AUTO_INDEX, 0),
        ));
        let best_mechanism = mix.best_single_mechanism();
        points.push(DataPoint::from_values(
            "best single in hindsight, each mix",
            point_label,
            mix.gain_percents(best_mechanism, 0),
        ));
    }
    points
}

fn gains_figure(mixes: &[AutoMix]) -> ResultFigure {
    let mean_gain = |contender_index: usize, family: MixFamily| {
        let gains = family_gains(mixes, family, contender_index);
        let bounds = (!gains.is_empty()).then(|| confidence_bounds(&gains));
        ChartBar {
            value: bounds.map(|_| mean(&gains)),
            interval: bounds,
        }
    };

    let (contenders, shown) = (contender_list(), 1..=AUTO_INDEX);
    let group = |&family: &MixFamily| BarGroup {
        name: family.name().to_string(),
        bars: shown.clone().map(|at| mean_gain(at, family)).collect(),
    };
    let drawing = BarChart {
        title: "Weighted speed-up over the default, by family".to_string(),
        y: Axis::linear("gain (%)"),
        series: contenders[shown.clone()]
            .iter()
            .map(|contender| contender.title.to_string())
            .collect(),
        groups: FAMILIES.iter().map(group).collect(),
        size: Some((1100.0, 400.0)),
        ..BarChart::default()
    };
    ResultFigure::bars("auto-families", &drawing)
}
