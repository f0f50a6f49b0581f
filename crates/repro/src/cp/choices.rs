//! The split chosen from each kind of evidence, and its quality: CP-4 (stalls against misses) and
//! RM-4 (curves measured online, curves measured offline, and trying all splits; thesis Figures 4.8
//! to 4.10 and 5.16).
//!
//! Whoever divides a cache between two programs can look at the stalls that they count, at the
//! misses, at curves from a log, or simply try all splits, in rising order of cost. What the dear
//! evidence is worth is the difference in speed between the splits that they choose, so each split
//! is run on the same pair, and a choice is scored by what its split gained.
//!
//! For example, with sixteen colors there are fifteen splits. If the best is 6 : 10 with +12 % and
//! curves from logs choose 5 : 11 with +11 %, they reach 92 % of the gain. A pair that no split
//! helps is rightly left shared, and counts as 100 %.

use std::collections::BTreeSet;

use cachemate_core::{
    CacheLevel, PipelineConfig, ProcessId, ProfilerConfig, ShareMember, TracedCache, Units,
    WindowLength,
};
use cachemate_report::figure::{Axis, BarChart, BarGroup};
use serde::Serialize;

use super::isolation::{
    best_sum_finding, chosen_sum_finding, controls_finding, forecast_finding, pair_name,
    recovery_finding, split_name, to_percent,
};
use super::pairs::{
    CONTROL_PAIRS, ChipPairRuns, ColorCurves, MeasuredPair, PAIRS, PairForecast, ProgramPair,
    forecast_split, measure_color_curves, measure_pair_solos, measure_pairs, pair_inputs,
    pair_on_chip,
};
use super::{COLORS, RunScale, colors_of_least_cost, nominal_ns};
use crate::seeded_runs::SeededRuns;
use crate::setup::{Workload, build_pipeline, failed, run_under};
use crate::statistics::percent_of_gain;
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, ResultTarget, at_time_scale, mean,
};

/// Measurements of all pairs on one machine, with or without its L3.
struct SplitStudy {
    pairs: &'static [ProgramPair],
    runs: ChipPairRuns,
    /// Both programs of each pair alone, with the first seed.
    solo_curves: Vec<[ColorCurves; 2]>,
    /// Forecasts from the solo curves; `None` if the predictor gives none.
    forecasts: Vec<Option<PairForecast>>,
    /// Splits chosen offline for weighted speed-up; `None` if left shared.
    offline_splits: Vec<Option<u32>>,
    /// Splits chosen by the policy from curves that it measured while the pair ran.
    online_splits: SeededRuns<usize, Option<u32>>,
}

impl SplitStudy {
    fn pair_indices(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.pairs.len()
    }
    /// The gain over sharing of the split that the policy chose, in percent.
    fn online_gain(&self, pair: usize, seed: u64) -> f64 {
        gain_percent(
            self.runs.result(pair, seed),
            *self.online_splits.result(pair, seed),
        )
    }
    /// The gain over sharing of the split that was chosen offline, in percent.
    fn offline_gain(&self, pair: usize, seed: u64) -> f64 {
        gain_percent(self.runs.result(pair, seed), self.offline_splits[pair])
    }
    /// The gain over sharing of the best split, in percent; leaving the cache shared is a choice too,
    /// which gains and loses nothing.
    fn best_gain(&self, pair: usize, seed: u64) -> f64 {
        let measured = self.runs.result(pair, seed);
        let splits = measured.rates_by_split.iter();
        splits
            .map(|(first, _)| gain_percent(measured, Some(*first)))
            .fold(0.0, f64::max)
    }
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let scale = RunScale::of_pairs(context);
    let with_l3 = study_splits(context, scale)?;
    let without_l3 = study_splits(
        context,
        RunScale {
            with_l3: false,
            ..scale
        },
    )?;
    // The controls share the cache, twice: the second time, only their frames differ.
    let controls: &[ProgramPair] = context.pick(&CONTROL_PAIRS[..1], &CONTROL_PAIRS);
    let control_solos = measure_pair_solos(context, controls, scale)?;
    let share_controls = |frame_seed_offset| {
        let no_splits = |_| BTreeSet::new();
        measure_pairs(
            context,
            controls,
            &control_solos,
            scale,
            frame_seed_offset,
            no_splits,
        )
    };
    let (first_controls, rerun_controls) = (share_controls(0)?, share_controls(500)?);
    // The thesis's 70 % is the best of all pairs of Figure 4.7, so a quick run shares and splits them all as well.
    let needs_other_pairs = context.pick_by_length(false, true, false);
    let isolated_pairs = if needs_other_pairs {
        let solos = measure_pair_solos(context, &PAIRS, scale)?;
        let all_splits = |_| (1..COLORS).collect();
        Some(measure_pairs(
            context, &PAIRS, &solos, scale, 0, all_splits,
        )?)
    } else {
        None
    };

    let pairs = with_l3.pairs;
    let runs = &with_l3.runs;
    let (recovered_pairs, recovered_runs) = isolated_pairs
        .as_ref()
        .map_or((pairs, runs), |isolated| (&PAIRS[..], isolated));
    let online_split = |pair, seed| *with_l3.online_splits.result(pair, seed);
    let mut findings = vec![
        best_sum_finding(context, pairs, runs, scale),
        chosen_sum_finding(context, pairs, runs, &online_split, "online"),
        chosen_sum_finding(
            context,
            pairs,
            runs,
            &|pair, _| with_l3.offline_splits[pair],
            "offline",
        ),
        forecast_finding(context, runs, &with_l3.forecasts),
        recovery_finding(recovered_pairs, recovered_runs),
        controls_finding(controls, &first_controls, &rerun_controls),
        curve_kind_finding(context, &with_l3),
    ];
    findings.extend(online_findings(context, &with_l3, "L3 on"));
    findings.extend(online_findings(context, &without_l3, "L3 off"));
    Ok(at_time_scale(scale.scale as f64, findings))
}

fn study_splits(context: &ExperimentContext<'_>, scale: RunScale) -> Result<SplitStudy> {
    // The thesis found the best split by trying all (4.6.2). A quick run does so for one pair, the one to which its 70
    // % belongs, twolf beside gzip.
    let splits: Vec<u32> = if context.sample {
        vec![4]
    } else {
        (1..COLORS).collect()
    };
    let pairs: &'static [ProgramPair] = context.pick(&PAIRS[4..5], &PAIRS);
    let colors: Vec<u32> = context.pick_by_length(
        vec![1, 8, COLORS],
        vec![1, 4, 8, 12, 14, COLORS],
        (1..=COLORS).collect(),
    );
    let solos = measure_pair_solos(context, pairs, scale)?;
    let seed = context.seeds[0];
    let mut programs = Vec::new();
    for (index, &pair) in pairs.iter().enumerate() {
        programs.extend(
            pair_inputs(pair, seed)
                .into_iter()
                .zip(*solos.result(index, seed)),
        );
    }
    let mut curves = measure_color_curves(context, &programs, &colors, scale, seed)?.into_iter();
    let solo_curves: Vec<[ColorCurves; 2]> =
        std::iter::from_fn(|| Some([curves.next()?, curves.next()?])).collect();

    // A program's own operator has the forecast, and a measured run of the pair sharing the cache.
    let first_seed = ExperimentContext {
        seeds: vec![seed],
        ..*context
    };
    let sharing_pairs = measure_pairs(&first_seed, pairs, &solos, scale, 0, |_| BTreeSet::new())?;
    let mut forecasts = Vec::new();
    let mut offline_splits = Vec::new();
    for (index, (&pair, alone)) in pairs.iter().zip(&solo_curves).enumerate() {
        let forecast = forecast_split(
            &pair_on_chip(pair, scale, seed, 0)?,
            [&alone[0].demand_curve, &alone[1].demand_curve],
        );
        let shared_speedup = sharing_pairs.result(index, seed).shared_speedup();
        offline_splits.push(forecast.and_then(|forecast| forecast.choose_split(shared_speedup)));
        forecasts.push(forecast);
    }

    let choice_inputs = |index: usize, seed| OnlineChoiceInputs {
        pair: pairs[index],
        seed,
        scale,
        trace_entries: context.pick(40_000, 163_840),
        // A trial on a machine with an L3 takes up to 250 windows, so a shorter run ends without a verdict.
        windows: if context.sample { 40 } else { 500 },
    };
    let indices: Vec<usize> = (0..pairs.len()).collect();
    let online_splits = context.run_cases(&indices, choice_inputs, measure_online_choice)?;
    // Every chosen split is measured, in addition to the given ones.
    let requested_splits = |pair: usize| {
        let mut all_splits: BTreeSet<u32> = splits.iter().copied().collect();
        let by_curves = CURVE_KINDS.map(|(_, curve)| split_by(curve, &solo_curves[pair]));
        all_splits.extend(by_curves);
        all_splits.extend(offline_splits[pair]);
        all_splits.extend(online_splits.of_case(pair).flatten());
        all_splits
    };
    let runs = measure_pairs(context, pairs, &solos, scale, 0, requested_splits)?;
    Ok(SplitStudy {
        pairs,
        runs,
        solo_curves,
        forecasts,
        offline_splits,
        online_splits,
    })
}

/// A pair under the policy for a number of windows after the warm-up.
#[derive(Clone, Copy, Serialize)]
struct OnlineChoiceInputs {
    pair: ProgramPair,
    seed: u64,
    scale: RunScale,
    trace_entries: u64,
    windows: u64,
}

/// Colors of the first program after these windows; `None` if left shared. A split that is on trial at the end does
/// not count, because the policy has not chosen it: the result is the split before the trial.
fn measure_online_choice(
    context: &ExperimentContext<'_>,
    inputs: &OnlineChoiceInputs,
) -> Result<Option<u32>> {
    let OnlineChoiceInputs {
        pair,
        seed,
        scale,
        trace_entries,
        windows,
    } = *inputs;
    context.report_progress(&format!("{} online, seed {seed}", pair_name(pair)));

    let workload = pair_on_chip(pair, scale, seed, 0)?;
    let config = sizing_policy(
        &workload,
        trace_entries,
        scale.warm_up_cycles,
        WINDOW_CYCLES,
        "",
    );
    let long_workload = workload.with_length(0, scale.warm_up_cycles + windows * WINDOW_CYCLES);
    let mut chosen_shares = Vec::new();
    run_under(
        long_workload.build_machine()?,
        build_pipeline(config)?,
        |_, record| {
            chosen_shares = record.decision.plan.shares;
            true
        },
    )
    .map_err(failed("cache-sizing"))?;
    let share_of = |process: u32| {
        chosen_shares.iter().find(|share| {
            share
                .members
                .contains(&ShareMember::Process(ProcessId(process)))
        })
    };
    let (Some(first_share), Some(second_share)) = (share_of(0), share_of(1)) else {
        return Ok(None);
    };
    Ok(match &first_share.units {
        // One partition for both is the shared cache.
        Units::Colors { allowed, .. } if first_share.group != second_share.group => {
            Some(allowed.count())
        }
        _ => None,
    })
}

pub(crate) const WINDOW_CYCLES: u64 = 500_000;

/// The sizing policy with RapidMRC curves, which decides from a cycle on. Traces keep their length,
/// because it belongs to the number of lines of the cache, which the time scale does not change.
pub(crate) fn sizing_policy(
    workload: &Workload,
    trace_entries: u64,
    from_cycle: u64,
    window_cycles: u64,
    parameters: &str,
) -> PipelineConfig {
    let window_ns = nominal_ns(workload, window_cycles);
    // Every phase is traced at once, as in the thesis: its phases are far longer than a trace, and windows are divided
    // here, but traces are not.
    let budget_ns = i64::MAX;
    let parameters = format!(
        "window_ns = {window_ns}\ntrace_entries = {trace_entries}\ntrace_budget_ns = {budget_ns}\ntrace_share = 1.0\n{parameters}"
    );
    let window = WindowLength::Cycles {
        cycles: from_cycle.max(window_cycles) * workload.options.scale,
    };
    let mut config = workload.pipeline("cache-sizing", &parameters, Vec::new(), window);
    let l2 = workload
        .machine
        .caches
        .iter()
        .find(|cache| cache.level == CacheLevel::L2);
    let (size_bytes, ways) = l2.map_or((0, 0), |cache| (cache.size_bytes, cache.ways));
    let cache = TracedCache {
        level: CacheLevel::L2,
        size_bytes,
        colors: COLORS,
        ways,
        points: COLORS,
    };
    config.profilers.push(ProfilerConfig::MissTrace {
        cache,
        follows_thesis: false,
    });
    config
}

/// The split with the least sum of one kind of curve of two programs (thesis equation 5.3).
fn split_by(curve: CurveGetter, solo_curves: &[ColorCurves; 2]) -> u32 {
    colors_of_least_cost(solo_curves.iter().map(curve))[0]
}

fn cost_per_cycle(per_kilo_instr: &[f64], solo_curves: &ColorCurves) -> Vec<f64> {
    per_kilo_instr
        .iter()
        .zip(&solo_curves.demand_curve.cycles_per_instr)
        .map(|(rate, cycles)| rate / cycles)
        .collect()
}

/// The gain in weighted speed-up over sharing the cache, in percent.
fn gain_percent(pair: &MeasuredPair, first_colors: Option<u32>) -> f64 {
    let rates = pair.rates_at(first_colors).unwrap_or([f64::NAN; 2]);
    to_percent(pair.weighted_speedup(&rates) / pair.weighted_speedup(&pair.shared_rates) - 1.0)
}

/// Accessor of the curve that a chooser uses.
type CurveGetter = fn(&ColorCurves) -> Vec<f64>;

const CURVE_KINDS: [(&str, CurveGetter); 4] = [
    ("stalls per instruction", |alone| {
        alone.stalls_per_kilo_instr.clone()
    }),
    ("misses per instruction", |alone| {
        alone.demand_curve.misses_per_kilo_instr.clone()
    }),
    ("stalls per cycle", |alone| {
        cost_per_cycle(&alone.stalls_per_kilo_instr, alone)
    }),
    ("misses per cycle", |alone| {
        cost_per_cycle(&alone.demand_curve.misses_per_kilo_instr, alone)
    }),
];

fn curve_kind_finding(context: &ExperimentContext<'_>, study: &SplitStudy) -> Finding {
    let mut points = Vec::new();
    // By kind and seed, the mean over pairs.
    let mut gains_by_kind: Vec<Vec<f64>> = Vec::new();
    for (kind, curve) in CURVE_KINDS {
        let splits: Vec<u32> = study
            .solo_curves
            .iter()
            .map(|alone| split_by(curve, alone))
            .collect();
        let gain = |pair: usize, seed: u64| {
            gain_percent(study.runs.result(pair, seed), Some(splits[pair]))
        };
        points.extend(study.pair_indices().map(|pair| {
            let label = format!(
                "{} {}",
                pair_name(study.pairs[pair]),
                split_name(splits[pair])
            );
            DataPoint::from_values(
                kind,
                label,
                context.seeds.iter().map(|&seed| gain(pair, seed)),
            )
        }));
        let mean_gain = |&seed: &u64| mean(study.pair_indices().map(|pair| gain(pair, seed)));
        gains_by_kind.push(context.seeds.iter().map(mean_gain).collect());
    }
    let stalls_and_misses = gains_by_kind[0].iter().zip(&gains_by_kind[1]);
    let per_seed = context.with_seeds(stalls_and_misses.map(|(stalls, misses)| stalls - misses));
    let note = format!(
        "Mean gain in weighted speed-up over sharing: stalls per instruction {:+.1} %, misses per instruction {:+.1} %, stalls \
         per cycle {:+.1} %, misses per cycle {:+.1} %. Splits from curves of each program alone under the first seed; leaving \
         the cache shared is not among these choices, and both kinds can lose to it.",
        mean(&gains_by_kind[0]),
        mean(&gains_by_kind[1]),
        mean(&gains_by_kind[2]),
        mean(&gains_by_kind[3]),
    );
    Finding::declared("cp-4-stalls-over-misses", &per_seed)
        .with_points(points)
        .with_note(note)
}

/// The findings of RM-4: the distance of the online choice from the best one, and the share of the
/// offline gain that it reaches.
fn online_findings(
    context: &ExperimentContext<'_>,
    study: &SplitStudy,
    machine_label: &str,
) -> [Finding; 2] {
    let near_best_count = |seed: u64| {
        let is_near_best = |pair: &usize| {
            (1.0 + study.best_gain(*pair, seed) / 100.0)
                / (1.0 + study.online_gain(*pair, seed) / 100.0)
                - 1.0
                <= 0.01
        };
        study.pair_indices().filter(is_near_best).count() as f64
    };
    let share_of_offline_gain = |seed: u64| {
        percent_of_gain(
            mean(
                study
                    .pair_indices()
                    .map(|pair| study.online_gain(pair, seed)),
            ),
            mean(
                study
                    .pair_indices()
                    .map(|pair| study.offline_gain(pair, seed)),
            ),
        )
    };
    let requested_count = (study.pairs.len() as f64 * 5.0 / 7.0).ceil();
    let (points, figure) = choice_points(context, study, machine_label);
    [
        Finding::new(
            "RM-4",
            &format!("pairs whose online split is within 1 % of the best, {machine_label}"),
            "splits 9:7, 9:7, 14:2 online against 14:2, 15:1, 13:3 offline",
            "pairs",
            ResultTarget::AtLeast { target: requested_count, paper_best: None },
            &context.values_by_seed(near_best_count),
        )
        .with_points(points)
        .with_note(
            "Objective everywhere: the sum of speeds over those alone. Online: traced while the pair shares the cache, sized \
             by the policy, cycles by the stall per miss measured meanwhile; judged by the measured runs at that split. \
             Leaving the cache shared is among the choices of all three.",
        )
        .with_figure(figure),
        Finding::declared_for(
            "rm-4-online-over-offline",
            &[machine_label],
            &context.values_by_seed(share_of_offline_gain),
        ),
    ]
}

fn choice_points(
    context: &ExperimentContext<'_>,
    study: &SplitStudy,
    machine_label: &str,
) -> (Vec<DataPoint>, ResultFigure) {
    let split_label = |first: Option<u32>| first.map_or("shared".to_string(), split_name);
    let mut points = Vec::new();
    let mut groups = Vec::new();
    for (pair, &programs) in study.pairs.iter().enumerate() {
        let name = pair_name(programs);
        let online_split = *study.online_splits.result(pair, context.seeds[0]);
        let gains_of = |gain: fn(&SplitStudy, usize, u64) -> f64| -> Vec<f64> {
            let seeds = context.seeds.iter();
            seeds.map(|&seed| gain(study, pair, seed)).collect()
        };
        let own_points = [
            DataPoint::from_values(
                "online",
                format!("{name} {}", split_label(online_split)),
                gains_of(SplitStudy::online_gain),
            ),
            DataPoint::from_values(
                "offline",
                format!("{name} {}", split_label(study.offline_splits[pair])),
                gains_of(SplitStudy::offline_gain),
            ),
            DataPoint::from_values("best of all", &name, gains_of(SplitStudy::best_gain)),
        ];
        let bars = own_points.each_ref().map(DataPoint::bar).to_vec();
        groups.push(BarGroup { name, bars });
        points.extend(own_points);
    }
    let bars = BarChart {
        title: format!("Weighted speed-up over sharing, {machine_label}"),
        y: Axis::linear("gain, %"),
        series: ["online", "offline", "best of all splits"]
            .map(str::to_string)
            .to_vec(),
        groups,
        ..BarChart::default()
    };
    let file_name = format!("rm-4-{}", machine_label.to_lowercase().replace(' ', "-"));
    (points, ResultFigure::bars(file_name, &bars))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a gain that of weighted speed-up, and zero if the cache stays shared?
    #[test]
    fn gains_are_of_weighted_speedup() {
        let pair = MeasuredPair {
            pair: ("a", "b"),
            solo_rates: [1.0, 2.0],
            shared_rates: [0.5, 1.0],
            rates_by_split: vec![(12, [0.9, 1.0])],
        };
        assert!((gain_percent(&pair, Some(12)) - 40.0).abs() < 1e-9);
        assert_eq!(gain_percent(&pair, None), 0.0);
        assert!(gain_percent(&pair, Some(3)).is_nan(), "not measured");
    }

    /// Does the least sum of two curves follow thesis equation 5.3?
    #[test]
    fn the_least_sum_follows_the_thesis() {
        let steep: Vec<f64> = (1..=16).map(|colors| 160.0 / f64::from(colors)).collect();
        assert_eq!(
            colors_of_least_cost([steep.clone(), vec![5.0; 16]]),
            [15, 1]
        );
        assert_eq!(colors_of_least_cost([steep.clone(), steep]), [8, 8]);
    }
}
