//! CP-2 and CP-3: the gain of a partitioned over a shared cache, and the share of the slowdown that it recovers
//! (thesis Figures 4.6 and 4.7).

use cachemate_report::figure::{Axis, BarChart, Chart, ReferenceLine, Series};

use super::pairs::{ChipPairRuns, MeasuredPair, PairForecast, ProgramPair};
use super::{COLORS, RunScale};
use crate::{
    DataPoint, ExperimentContext, Finding, ResultFigure, bar_groups, greatest, least, line_through,
    list_or_none, mean,
};

pub(super) fn to_percent(share: f64) -> f64 {
    100.0 * share
}

pub(super) fn split_name(first_colors: u32) -> String {
    format!("{first_colors}:{}", COLORS - first_colors)
}

pub(super) fn pair_name(pair: ProgramPair) -> String {
    format!("{}+{}", pair.0, pair.1)
}

/// The series of one program of a pair.
fn program_series((first, second): ProgramPair, side: usize) -> String {
    format!("{}: {}", pair_name((first, second)), [first, second][side])
}

/// The splits at which a pair was measured, which are the same under every seed.
fn measured_splits(runs: &ChipPairRuns, pair: usize) -> Vec<u32> {
    let first_run = runs.of_case(pair).next();
    let splits = first_run.map_or(&[][..], |run| &run.rates_by_split);
    splits
        .iter()
        .map(|(first_colors, _)| *first_colors)
        .collect()
}

fn gain_points(pairs: &[ProgramPair], runs: &ChipPairRuns) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (index, &pair) in pairs.iter().enumerate() {
        for (split, first_colors) in measured_splits(runs, index).into_iter().enumerate() {
            points.extend([0, 1].map(|side| {
                let series = program_series(pair, side);
                runs.point(index, series, split_name(first_colors), |run| {
                    to_percent(run.relative_gains(&run.rates_by_split[split].1)[side])
                })
            }));
        }
    }
    points
}

pub(super) fn best_sum_finding(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    runs: &ChipPairRuns,
    scale: RunScale,
) -> Finding {
    // One split per pair for all seeds: the mean over seeds, not the best of each.
    let gain_sums = |pair: usize, split: usize| {
        runs.values(pair, |run| {
            to_percent(run.gain_sum(&run.rates_by_split[split].1))
        })
    };
    let mut best_pair_and_split = (0, 0, f64::NEG_INFINITY);
    for pair in 0..pairs.len() {
        for split in 0..measured_splits(runs, pair).len() {
            let mean_sum = mean(gain_sums(pair, split));
            if mean_sum > best_pair_and_split.2 {
                best_pair_and_split = (pair, split, mean_sum);
            }
        }
    }
    let (best_pair, best_split, _) = best_pair_and_split;
    let note = format!(
        "Best: {} at {}. The paper's 17 % came from a partition that leaked (frames of other colors after MaxTry); \
         here none leaks. Programs are timed over the same work in every run: what each does alone in {} million cycles \
         after {} million of warm-up.",
        pair_name(pairs[best_pair]),
        split_name(measured_splits(runs, best_pair)[best_split]),
        scale.measured_cycles() / 1_000_000,
        scale.warm_up_cycles / 1_000_000,
    );
    let per_seed = context.with_seeds(gain_sums(best_pair, best_split));
    let points = gain_points(pairs, runs);
    let figures = pairs
        .iter()
        .map(|&pair| pair_figure(pair, &points))
        .collect();
    let mut finding = Finding::declared("cp-2-best-split", &per_seed).with_note(note);
    (finding.points, finding.figures) = (points, figures);
    finding
}

fn pair_figure(pair: ProgramPair, points: &[DataPoint]) -> ResultFigure {
    let (first, second) = pair;
    let program_line = |side: usize, name: &str| Series {
        name: name.to_string(),
        ..line_through(points, &program_series(pair, side))
    };
    let chart = Chart {
        title: format!("{}: gain over sharing the cache", pair_name(pair)),
        x: Axis::linear(&format!("colors of {first}; the rest of 16 is {second}'s")),
        y: Axis::linear("instructions per cycle against sharing, %"),
        series: vec![program_line(0, first), program_line(1, second)],
        references: vec![ReferenceLine::Y {
            label: "shared".to_string(),
            level: 0.0,
        }],
        ..Chart::default()
    };
    ResultFigure::chart(format!("cp-2-{first}-{second}"), &chart)
}

pub(super) fn chosen_sum_finding(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    runs: &ChipPairRuns,
    chosen_split: &dyn Fn(usize, u64) -> Option<u32>,
    method: &str,
) -> Finding {
    let gain_sum_percent = |pair: usize, seed: u64| {
        let run = runs.result(pair, seed);
        let rates = run.rates_at(chosen_split(pair, seed));
        rates.map_or(f64::NAN, |rates| to_percent(run.gain_sum(&rates)))
    };
    let worst_gain = |seed| least((0..pairs.len()).map(|pair| gain_sum_percent(pair, seed)));
    let points = pairs.iter().enumerate().map(|(index, &pair)| {
        let first_choice = chosen_split(index, context.seeds[0]);
        DataPoint::from_values(
            pair_name(pair),
            first_choice.map_or("shared".to_string(), split_name),
            context
                .seeds
                .iter()
                .map(|&seed| gain_sum_percent(index, seed)),
        )
    });
    let per_seed = context.values_by_seed(worst_gain);
    Finding::declared_for("cp-2-chosen-splits", &[method], &per_seed).with_points(points.collect())
}

pub(super) fn recovery_finding(pairs: &[ProgramPair], runs: &ChipPairRuns) -> Finding {
    let per_seed = runs.greatest_per_seed(|pair| {
        greatest(
            pair.recovered_shares()
                .iter()
                .map(|share| to_percent(share.2)),
        )
    });
    let all_shares: Vec<f64> = runs
        .by_seed()
        .flat_map(MeasuredPair::recovered_shares)
        .map(|(_, _, share)| share)
        .collect();
    let series = ["shared, over alone", "best split, over alone"];
    let mut points = Vec::new();
    for (index, &pair) in pairs.iter().enumerate() {
        for side in [0, 1] {
            let at = program_series(pair, side);
            points.extend([
                runs.point(index, series[0], &at, |run| {
                    run.shared_rates[side] / run.solo_rates[side]
                }),
                runs.point(index, series[1], &at, |run| {
                    run.best_split().1[side] / run.solo_rates[side]
                }),
            ]);
        }
    }
    let bars = BarChart {
        title: "Instructions per cycle over those alone: sharing, and the best split".to_string(),
        y: Axis::linear("over alone"),
        series: vec!["shared".to_string(), "best split".to_string()],
        groups: bar_groups(&points, &series),
        references: vec![("alone".to_string(), 1.0)],
        ..BarChart::default()
    };
    let figure = ResultFigure::bars("cp-3-isolation", &bars);
    let note = if all_shares.is_empty() {
        "Sharing slows no program by 5 % or more, so there is nothing to recover.".to_string()
    } else {
        format!(
            "Of {} programs (over seeds) that sharing slows by 5 % or more, the best split by sum of gains recovers {:.0} % \
             in the mean; a program that pays for its partner counts with less than nothing.",
            all_shares.len(),
            to_percent(mean(&all_shares)),
        )
    };
    Finding::declared("cp-3-recovered", &per_seed)
        .with_points(points)
        .with_note(note)
        .with_figure(figure)
}

/// The finding whether the forecasts "leave it shared" and "divide it" are right when they are
/// made.
pub(super) fn forecast_finding(
    context: &ExperimentContext<'_>,
    runs: &ChipPairRuns,
    forecasts: &[Option<PairForecast>],
) -> Finding {
    // Weighted speed-up: shared, and at the best split according to the curves.
    let forecast_error = |run: &MeasuredPair, speeds: [f64; 2], first: Option<u32>| {
        let measured = run.weighted_speedup(&run.rates_at(first)?);
        Some(to_percent(speeds.iter().sum::<f64>() / measured - 1.0))
    };
    let (mut points, mut wrong_count) = (Vec::new(), 0);
    for (index, forecast) in forecasts.iter().enumerate() {
        let Some(forecast) = forecast else { continue };
        let best = Some(forecast.best_first_colors);
        for (series, speeds, first) in [
            ("sharing", forecast.shared_speeds, None),
            ("best split by curves", forecast.best_split_speeds, best),
        ] {
            let errors = runs.of_case(index);
            let values: Vec<f64> = errors
                .filter_map(|run| forecast_error(run, speeds, first))
                .collect();
            if !values.is_empty() {
                let series = format!("forecast over measured, {series}, %");
                let name = pair_name(runs.result(index, context.seeds[0]).pair);
                points.push(DataPoint::from_values(series, name, &values));
            }
        }
        // A forecast is wrong if the alternative would have been better by more than 1 %.
        let mean_best_gain = mean(runs.values(index, |run| {
            let splits = run.rates_by_split.iter();
            let best_speedup = greatest(splits.map(|(_, rates)| run.weighted_speedup(rates)));
            best_speedup / run.shared_speedup() - 1.0
        }));
        let first_run = runs.result(index, context.seeds[0]);
        let chosen_split = forecast.choose_split(first_run.shared_speedup());
        wrong_count += usize::from(if chosen_split.is_none() {
            mean_best_gain > 0.01
        } else {
            mean_best_gain < -0.01
        });
    }
    let mean_error = |pairs: &[&MeasuredPair]| {
        let errors = pairs.iter().zip(forecasts);
        mean(errors.filter_map(|(run, forecast)| {
            Some(forecast_error(run, forecast.as_ref()?.shared_speeds, None)?.abs())
        }))
    };
    Finding::declared("cp-2-forecast", &runs.per_seed(mean_error))
    .with_points(points)
    .with_note(format!(
        "From curves of each program alone under the first seed. Of {} pairs {wrong_count} were divided where every split is worse \
         than sharing by more than 1 %, or left shared where one is better by more.",
        forecasts.iter().flatten().count(),
    ))
}

pub(super) fn controls_finding(
    pairs: &[ProgramPair],
    runs: &ChipPairRuns,
    reruns: &ChipPairRuns,
) -> Finding {
    let slowdown_percent = |pair: &MeasuredPair, side: usize| {
        to_percent(1.0 - pair.shared_rates[side] / pair.solo_rates[side])
    };
    let per_seed = runs
        .greatest_per_seed(|pair| greatest([0, 1].map(|side| slowdown_percent(pair, side).abs())));

    let (mut points, mut max_noise, mut affected_programs) = (Vec::new(), 0.0, Vec::new());
    for (index, &pair) in pairs.iter().enumerate() {
        for (side, (program, partner)) in [pair, (pair.1, pair.0)].into_iter().enumerate() {
            let values_of =
                |runs: &ChipPairRuns| runs.values(index, |run| slowdown_percent(run, side));
            let (values, rerun_values) = (values_of(runs), values_of(reruns));
            let noise = values.iter().zip(&rerun_values).map(|(a, b)| (a - b).abs());
            max_noise = noise.fold(max_noise, f64::max);
            if mean(&values).abs() > 1.0 {
                affected_programs
                    .push(format!("{program} beside {partner} {:.1} %", mean(&values)));
            }

            let label = program_series(pair, side);
            points.push(DataPoint::from_values(
                "slowed by sharing, %",
                &label,
                &values,
            ));
            let series = "the same in other frames, %";
            points.push(DataPoint::from_values(series, label, &rerun_values));
        }
    }

    let affected_text = list_or_none(affected_programs);
    Finding::declared("cp-3-controls", &per_seed)
    .with_points(points)
    .with_note(format!(
        "Slowed by more than 1 %: {affected_text}. The same programs in other frames differ by {max_noise:.1} points at most, so \
         that more is no noise of placement. docs/results/partitions.md states the cause."
    ))
}
