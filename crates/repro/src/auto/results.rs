//! Results of `AUTO` compared with their targets.

use cachemate_report::figure::{Axis, BarChart, BarGroup};

use super::bounds::confidence_bounds;
use super::draw::{FAMILIES, MixFamily};
use super::families::{AutoMix, ScoreKind, contender_list, run_all, single_mechanisms};
use super::run::AutoContender;
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure, ResultTarget, mean};

const PAPER: &str = "none built it; the thesis asks for it (7.3)";

fn gains_over(mixes: &[&AutoMix], gain: impl Fn(&AutoMix) -> f64) -> Vec<f64> {
    mixes.iter().map(|mix| gain(mix)).collect()
}

fn family_finding(
    id: &str,
    title: &str,
    unit: &str,
    target: ResultTarget,
    value: f64,
    context: &ExperimentContext<'_>,
) -> Finding {
    Finding::new(id, title, PAPER, unit, target, &[(context.seeds[0], value)])
}

/// Mean gain of `auto` over a contender, over the machine seeds that score.
fn mean_gain_over(mix: &AutoMix, baseline: usize) -> f64 {
    mean(&mix.gains(contender_list().len() - 1, baseline))
}

/// Lower bound of the geometric mean of gains, in percent.
fn lower_bound(percents: &[f64]) -> f64 {
    let logs: Vec<f64> = percents.iter().map(|percent| (percent / 100.0).max(-0.999).ln_1p()).collect();
    100.0 * confidence_bounds(&logs).0.exp_m1()
}

fn minimum_target(target: f64) -> ResultTarget {
    ResultTarget::AtLeast { target, paper_best: None }
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let mixes = run_all(context, context.mixes.unwrap_or(context.pick(1, 2)), &contender_list())?;
    all_findings(context, &mixes)
}

/// All findings.
fn all_findings(context: &ExperimentContext<'_>, mixes: &[AutoMix]) -> Result<Vec<Finding>, ReproError> {
    let all_mixes: Vec<&AutoMix> = mixes.iter().collect();
    let family_mixes = |family: MixFamily| mixes.iter().filter(|mix| mix.family == family).collect::<Vec<&AutoMix>>();
    let gain_over_best_single = |mix: &AutoMix| mean_gain_over(mix, mix.best_single());
    let mut findings = vec![
        Finding::declared(
            "auto-1-over-default",
            &[(context.seeds[0], mean(&gains_over(&all_mixes, |mix| mean_gain_over(mix, 0))))],
        )
        .with_points(gain_points(mixes))
        .with_figure(draw_gains_figure(mixes)),
        Finding::declared(
            "auto-2-over-best-single",
            &[(context.seeds[0], lower_bound(&gains_over(&all_mixes, gain_over_best_single)))],
        ),
        Finding::declared(
            "auto-3-crossed",
            &[(context.seeds[0], lower_bound(&gains_over(&family_mixes(MixFamily::Crossed), gain_over_best_single)))],
        ),
        below_default_finding(context, mixes),
        Finding::declared(
            "auto-5-null",
            &[(
                context.seeds[0],
                lower_bound(&gains_over(&family_mixes(MixFamily::Null), |mix| mean_gain_over(mix, 0))),
            )],
        ),
    ];
    findings.push(floor_finding(context, &family_mixes(MixFamily::Floors)));
    findings.push(slower_than_default(context, "worst slowdown over the default's, largest over mixes", &all_mixes));
    findings.extend(FAMILIES.iter().flat_map(|&family| family_findings(context, family, &family_mixes(family))));
    findings.extend(baseline_findings(context, &all_mixes));
    Ok(findings)
}

/// Finding about the job that is worst off: by how many points it is slower than under the default.
fn slower_than_default(context: &ExperimentContext<'_>, subject: &str, mixes: &[&AutoMix]) -> Finding {
    let auto = contender_list().len() - 1;
    let points = |mix: &AutoMix| mean(&mix.gains_by(ScoreKind::WorstSlowdown, auto, 0));
    let max_points = gains_over(mixes, points).into_iter().fold(f64::NEG_INFINITY, f64::max);
    family_finding(
        "AUTO-7",
        subject,
        "points",
        ResultTarget::AtMost { target: 2.0, paper_best: None },
        max_points,
        context,
    )
}

/// Findings of one family: against the best single mechanism in hindsight, and against the default.
fn family_findings(context: &ExperimentContext<'_>, family: MixFamily, mixes: &[&AutoMix]) -> Vec<Finding> {
    if mixes.is_empty() {
        return Vec::new();
    }
    let (auto, name) = (contender_list().len() - 1, family.name());
    let against_best = |score_kind: ScoreKind| {
        lower_bound(&gains_over(mixes, |mix| mean(&mix.gains_by(score_kind, auto, mix.best_single()))))
    };
    let against_default =
        |score_kind: ScoreKind| lower_bound(&gains_over(mixes, |mix| mean(&mix.gains_by(score_kind, auto, 0))));
    let target = if family == MixFamily::Crossed { 2.0 } else { -1.0 };
    let bound_title = |metric_title: &str| format!("{name}: {metric_title}: lower 95 % bound");
    let weighted = bound_title("weighted speed-up against the best single mechanism in hindsight");
    let mut findings = vec![
        family_finding(
            "AUTO-8",
            &weighted,
            "%",
            minimum_target(target),
            against_best(ScoreKind::WeightedSpeedup),
            context,
        ),
        slower_than_default(context, &format!("{name}: worst slowdown over the default's, largest over mixes"), mixes),
    ];
    let minimum = if family == MixFamily::Null { -0.5 } else { -1.0 };
    let title = bound_title("weighted speed-up over the default");
    findings.push(family_finding(
        "AUTO-8",
        &title,
        "%",
        minimum_target(minimum),
        against_default(ScoreKind::WeightedSpeedup),
        context,
    ));
    for (score_kind, metric) in
        [(ScoreKind::HarmonicMean, "harmonic mean of speeds"), (ScoreKind::Throughput, "throughput")]
    {
        let title = bound_title(&format!("{metric} over the default"));
        findings.push(family_finding("AUTO-9", &title, "%", ResultTarget::Shown, against_default(score_kind), context));
        let title = bound_title(&format!("{metric} against the best single mechanism in hindsight"));
        findings.push(family_finding("AUTO-9", &title, "%", ResultTarget::Shown, against_best(score_kind), context));
    }
    findings
}

/// Findings against each single baseline over all mixes, which show whether a fixed policy is better.
fn baseline_findings(context: &ExperimentContext<'_>, mixes: &[&AutoMix]) -> Vec<Finding> {
    let against = |(at, baseline): (usize, &AutoContender)| {
        let title = format!("weighted speed-up over '{}', all mixes: lower 95 % bound", baseline.title);
        family_finding(
            "AUTO-10",
            &title,
            "%",
            minimum_target(-1.0),
            lower_bound(&gains_over(mixes, |mix| mean_gain_over(mix, at))),
            context,
        )
    };
    let contenders = contender_list();
    contenders[..contenders.len() - 1].iter().enumerate().map(against).collect()
}

/// Finding about mixes that lose against the default: those whose one-sided upper bound is below -1 %.
fn below_default_finding(context: &ExperimentContext<'_>, mixes: &[AutoMix]) -> Finding {
    let auto = contender_list().len() - 1;
    let is_harmed = |mix: &&AutoMix| confidence_bounds(&mix.gains(auto, 0)).1 < -1.0;
    let failing: Vec<&AutoMix> = mixes.iter().filter(is_harmed).collect();
    let names: Vec<String> = failing
        .iter()
        .map(|mix| format!("{} {} on {} ({:+.1} %)", mix.family.name(), mix.seed, mix.machine, mean_gain_over(mix, 0)))
        .collect();
    let note = if names.is_empty() { String::new() } else { format!("below: {}", names.join("; ")) };
    Finding::declared("auto-4-below-default", &[(context.seeds[0], failing.len() as f64)]).with_note(note)
}

/// Finding about promised speeds. A promise counts as feasible if some contender keeps it in 99 % of windows.
fn floor_finding(context: &ExperimentContext<'_>, mixes: &[&AutoMix]) -> Finding {
    let auto = contender_list().len() - 1;
    let kept_floors = |mix: &AutoMix, at: usize| {
        let kept_shares: Vec<f64> = mix.scores_by_seed.iter().skip(1).filter_map(|did| did[at].floors_kept).collect();
        mean(&kept_shares)
    };
    let feasible: Vec<&&AutoMix> =
        mixes.iter().filter(|mix| (0..=auto).any(|at| kept_floors(mix, at) >= 0.99)).collect();
    let values: Vec<f64> = feasible.iter().map(|mix| 100.0 * kept_floors(mix, auto)).collect();
    let note = format!("{} of {} mixes have a contender that keeps the promise", feasible.len(), mixes.len());
    Finding::declared("auto-6-promises", &[(context.seeds[0], mean(&values))]).with_note(note)
}

/// Points of every contender relative to the default, by family.
fn gain_points(mixes: &[AutoMix]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (at, contender) in contender_list().iter().enumerate().skip(1) {
        for family in FAMILIES {
            let values: Vec<f64> =
                mixes.iter().filter(|mix| mix.family == family).map(|mix| mean(&mix.gains(at, 0))).collect();
            points.push(DataPoint::over_values(contender.title, family.name(), &values));
        }
    }
    let auto = contender_list().len() - 1;
    for mix in mixes {
        let at = format!("{} {} on {}", mix.family.name(), mix.seed, mix.machine);
        points.push(DataPoint::over_values("auto, each mix", at.clone(), &mix.gains(auto, 0)));
        let best = mix.best_single();
        points.push(DataPoint::over_values("best single in hindsight, each mix", at, &mix.gains(best, 0)));
    }
    points
}

fn draw_gains_figure(mixes: &[AutoMix]) -> ResultFigure {
    let mean_gain = |at: usize, family: &MixFamily| {
        let values: Vec<f64> =
            mixes.iter().filter(|mix| mix.family == *family).map(|mix| mean(&mix.gains(at, 0))).collect();
        cachemate_report::figure::ChartBar {
            value: (!values.is_empty()).then(|| mean(&values)),
            interval: (!values.is_empty()).then(|| confidence_bounds(&values)),
        }
    };
    let shown_contenders: Vec<usize> = single_mechanisms().chain([contender_list().len() - 1]).collect();
    let group = |family: &MixFamily| BarGroup {
        name: family.name().to_string(),
        bars: shown_contenders.iter().map(|&at| mean_gain(at, family)).collect(),
    };
    let drawing = BarChart {
        title: "Weighted speed-up over the default, by family".to_string(),
        y: Axis::linear("gain (%)"),
        series: shown_contenders.iter().map(|&index| contender_list()[index].title.to_string()).collect(),
        groups: FAMILIES.iter().map(group).collect(),
        size: Some((1100.0, 400.0)),
        ..BarChart::default()
    };
    ResultFigure::bars("auto-families", &drawing)
}
