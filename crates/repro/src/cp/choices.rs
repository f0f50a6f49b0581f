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
use cachemate_papers::solvers::sizing::{CostAggregate, UnitClaim, allocate_exactly};
use cachemate_report::figure::{Axis, BarChart, BarGroup};
use serde::Serialize;

use super::isolation::{
    best_sum_finding, chosen_sum_finding, controls_finding, forecast_finding, pair_name,
    recovery_finding, split_name, to_percent,
};
use super::pairs::{
    CONTROL_PAIRS, ColorCurves, MeasuredPair, PAIRS, PairForecast, PairRequest, ProgramPair,
    SoloWork, forecast_split, measure_color_curves, measure_pairs, measure_solos, pair_inputs,
    pair_on_chip,
};
use super::{COLORS, RunScale, nominal_ns};
use crate::setup::{Workload, build_pipeline, failed, run_under};
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure, ResultTarget, mean};

/// Measurements of all pairs on one machine, with or without its L3.
struct SplitStudy {
    pairs_by_seed: Vec<Vec<MeasuredPair>>,
    /// Both programs of each pair alone, with the first seed.
    solo_curves: Vec<[ColorCurves; 2]>,
    /// Forecasts from the solo curves; `None` if the predictor gives none.
    forecasts: Vec<Option<PairForecast>>,
    /// Splits chosen offline for weighted speed-up; `None` if left shared.
    offline_splits: Vec<Option<u32>>,
    /// Splits chosen by the policy from curves that it measured while the pair ran, by seed.
    online_splits_by_seed: Vec<Vec<Option<u32>>>,
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    // A full run warms up until the L3 is full and every program has passed over its data once (ammp's speed changes
    // for the last time after 45 million cycles). It then measures for as long as the programs' own phases, which no
    // time scale shortens.
    let scale = context.pick(
        RunScale {
            scale: 30_000,
            warm_up_cycles: 6_000_000,
        },
        RunScale {
            scale: 2_500,
            warm_up_cycles: 50_000_000,
        },
    );
    let controls: &[ProgramPair] = context.pick(&CONTROL_PAIRS[..1], &CONTROL_PAIRS);
    let study_with_l3 = study_splits(context, true, scale)?;
    let study_without_l3 = study_splits(context, false, scale)?;
    let [first_controls, rerun_controls] = measure_controls_twice(context, controls, scale)?;
    let pairs_by_seed = &study_with_l3.pairs_by_seed;
    // The thesis's 70 % is the best of all pairs of Figure 4.7, so a quick run shares and splits them all as well.
    let needs_other_pairs = context.pick_by_length(false, true, false);
    let isolated_pairs = if needs_other_pairs {
        Some(measure_isolation(context, scale)?)
    } else {
        None
    };
    let offline_splits_by_seed = vec![study_with_l3.offline_splits.clone(); context.seeds.len()];
    let mut findings = vec![
        best_sum_finding(context, pairs_by_seed, scale),
        chosen_sum_finding(
            context,
            pairs_by_seed,
            &study_with_l3.online_splits_by_seed,
            "online",
            scale,
        ),
        chosen_sum_finding(
            context,
            pairs_by_seed,
            &offline_splits_by_seed,
            "offline",
            scale,
        ),
        forecast_finding(context, pairs_by_seed, &study_with_l3.forecasts, scale),
        recovery_finding(
            context,
            isolated_pairs.as_ref().unwrap_or(pairs_by_seed),
            scale,
        ),
        controls_finding(context, &first_controls, &rerun_controls, scale),
        curve_kind_finding(context, &study_with_l3, scale),
    ];
    findings.extend(online_findings(context, &study_with_l3, "L3 on", scale));
    findings.extend(online_findings(context, &study_without_l3, "L3 off", scale));
    Ok(findings)
}

fn run_pair_solos(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    with_l3: bool,
    scale: RunScale,
    seed: u64,
) -> Result<Vec<[SoloWork; 2]>, ReproError> {
    let programs: Vec<_> = pairs
        .iter()
        .flat_map(|&pair| pair_inputs(pair, seed))
        .collect();
    let solos = measure_solos(context, &programs, with_l3, scale, seed)?;
    Ok(solos.chunks(2).map(|both| [both[0], both[1]]).collect())
}

/// All pairs under sharing and at all splits, seed by seed.
fn measure_isolation(
    context: &ExperimentContext<'_>,
    scale: RunScale,
) -> Result<Vec<Vec<MeasuredPair>>, ReproError> {
    let measure_with_seed = |&seed: &u64| {
        let solo_work = run_pair_solos(context, &PAIRS, true, scale, seed)?;
        let to_request = |(&pair, &pair_solos): (&ProgramPair, &[SoloWork; 2])| PairRequest {
            requested_splits: (1..COLORS).collect(),
            ..PairRequest::sharing(pair, seed, pair_solos)
        };
        let requests: Vec<PairRequest> = PAIRS.iter().zip(&solo_work).map(to_request).collect();
        measure_pairs(context, &requests, true, scale)
    };
    context.seeds.iter().map(measure_with_seed).collect()
}

/// The pairs that share the cache, seed by seed, and the same again with different frames only.
fn measure_controls_twice(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    scale: RunScale,
) -> Result<[Vec<Vec<MeasuredPair>>; 2], ReproError> {
    let mut controls_by_run = [Vec::new(), Vec::new()];
    for &seed in &context.seeds {
        let solo_work = run_pair_solos(context, pairs, true, scale, seed)?;
        for (frame_seed_offset, run_controls) in [0, 500].into_iter().zip(&mut controls_by_run) {
            let to_request = |(&pair, &pair_solos): (&ProgramPair, &[SoloWork; 2])| PairRequest {
                frame_seed_offset,
                ..PairRequest::sharing(pair, seed, pair_solos)
            };
            let requests: Vec<PairRequest> = pairs.iter().zip(&solo_work).map(to_request).collect();
            run_controls.push(measure_pairs(context, &requests, true, scale)?);
        }
    }
    Ok(controls_by_run)
}

fn study_splits(
    context: &ExperimentContext<'_>,
    with_l3: bool,
    scale: RunScale,
) -> Result<SplitStudy, ReproError> {
    // The thesis found the best split by trying all (4.6.2). A quick run does so for one pair, the one to which its 70 %
    // belongs, twolf beside gzip.
    let splits: Vec<u32> = if context.sample {
        vec![4]
    } else {
        (1..COLORS).collect()
    };
    let pairs: &[ProgramPair] = context.pick(&PAIRS[4..5], &PAIRS);
    let colors: Vec<u32> = context.pick_by_length(
        vec![1, 8, COLORS],
        vec![1, 4, 8, 12, 14, COLORS],
        (1..=COLORS).collect(),
    );
    let solos_by_seed: Vec<Vec<[SoloWork; 2]>> = context
        .seeds
        .iter()
        .map(|&seed| run_pair_solos(context, pairs, with_l3, scale, seed))
        .collect::<Result<_, ReproError>>()?;
    let seed = context.seeds[0];
    let programs: Vec<_> = pairs
        .iter()
        .zip(&solos_by_seed[0])
        .flat_map(|(&pair, &solo_work)| pair_inputs(pair, seed).into_iter().zip(solo_work))
        .collect();
    let mut curves =
        measure_color_curves(context, &programs, &colors, with_l3, scale, seed)?.into_iter();
    let curve_pairs: Vec<[ColorCurves; 2]> =
        std::iter::from_fn(|| Some([curves.next()?, curves.next()?])).collect();
    let forecast_pair =
        |(&pair, alone): (&ProgramPair, &[ColorCurves; 2])| -> Result<Option<PairForecast>, ReproError> {
            Ok(forecast_split(
                &pair_on_chip(pair, with_l3, scale, seed, 0)?,
                [&alone[0].demand_curve, &alone[1].demand_curve],
            ))
        };
    let forecasts: Vec<Option<PairForecast>> = pairs
        .iter()
        .zip(&curve_pairs)
        .map(forecast_pair)
        .collect::<Result<_, _>>()?;
    let sharing_requests: Vec<PairRequest> = pairs
        .iter()
        .zip(&solos_by_seed[0])
        .map(|(&pair, &solos)| PairRequest::sharing(pair, seed, solos))
        .collect();
    let sharing_pairs = measure_pairs(context, &sharing_requests, with_l3, scale)?;
    let choose_split = |(forecast, sharing_pair): (&Option<PairForecast>, &MeasuredPair)| {
        forecast.and_then(|forecast| forecast.choose_split(sharing_pair.shared_speedup()))
    };
    let offline_splits: Vec<Option<u32>> = forecasts
        .iter()
        .zip(&sharing_pairs)
        .map(choose_split)
        .collect();
    let choice_inputs = |pair, seed| OnlineChoiceInputs {
        pair,
        seed,
        with_l3,
        scale,
        trace_entries: context.pick(40_000, 163_840),
        // A trial on a machine with an L3 takes up to 250 windows, so a shorter run ends without a verdict.
        windows: if context.sample { 40 } else { 500 },
    };
    let seeded_pairs: Vec<OnlineChoiceInputs> = context
        .seeds
        .iter()
        .flat_map(|&seed| pairs.iter().map(move |&pair| choice_inputs(pair, seed)))
        .collect();
    let chosen_splits = context.run_all_stored(&seeded_pairs, measure_online_choice)?;
    let online_splits_by_seed: Vec<Vec<Option<u32>>> = chosen_splits
        .chunks(pairs.len())
        .map(<[Option<u32>]>::to_vec)
        .collect();
    let mut requests = Vec::new();
    for (seed_solos, &seed) in solos_by_seed.iter().zip(&context.seeds) {
        for (index, (&pair, &pair_solos)) in pairs.iter().zip(seed_solos).enumerate() {
            // Every chosen split is measured, in addition to the given ones.
            let mut all_splits: BTreeSet<u32> = splits.iter().copied().collect();
            all_splits.extend(CURVE_KINDS.iter().map(|(_, curve)| {
                min_sum_split([curve(&curve_pairs[index][0]), curve(&curve_pairs[index][1])])
            }));
            all_splits.extend(
                offline_splits[index].iter().chain(
                    online_splits_by_seed
                        .iter()
                        .filter_map(|splits_of_seed| splits_of_seed[index].as_ref()),
                ),
            );
            requests.push(PairRequest {
                requested_splits: all_splits,
                ..PairRequest::sharing(pair, seed, pair_solos)
            });
        }
    }
    let measured_pairs = measure_pairs(context, &requests, with_l3, scale)?;
    let pairs_by_seed = measured_pairs
        .chunks(pairs.len())
        .map(<[MeasuredPair]>::to_vec)
        .collect();
    Ok(SplitStudy {
        pairs_by_seed,
        solo_curves: curve_pairs,
        forecasts,
        offline_splits,
        online_splits_by_seed,
    })
}

/// A pair under the policy for a number of windows after the warm-up.
#[derive(Clone, Copy, Serialize)]
struct OnlineChoiceInputs {
    pair: ProgramPair,
    seed: u64,
    with_l3: bool,
    scale: RunScale,
    trace_entries: u64,
    windows: u64,
}

/// Colors of the first program after these windows; `None` if left shared. A split that is on trial at the end does
/// not count, because the policy has not chosen it: the result is the split before the trial.
fn measure_online_choice(
    context: &ExperimentContext<'_>,
    inputs: &OnlineChoiceInputs,
) -> Result<Option<u32>, ReproError> {
    let OnlineChoiceInputs {
        pair,
        seed,
        with_l3,
        scale,
        trace_entries,
        windows,
    } = *inputs;
    context.report_progress(&format!("{} online, seed {seed}", pair_name(pair)));

    let workload = pair_on_chip(pair, with_l3, scale, seed, 0)?;
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

/// The split with the least sum of two curves (thesis equation 5.3).
fn min_sum_split(curves: [Vec<f64>; 2]) -> u32 {
    let claims = curves.map(|costs| UnitClaim {
        costs,
        min_units: 1,
    });
    allocate_exactly(&claims, COLORS, CostAggregate::Sum)
        .expect("sixteen colors for two, and measured costs")[0]
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

fn curve_kind_finding(
    context: &ExperimentContext<'_>,
    study: &SplitStudy,
    scale: RunScale,
) -> Finding {
    let mut points = Vec::new();
    let mut gains_by_kind: Vec<Vec<f64>> = Vec::new();

    for (kind, curve_of) in CURVE_KINDS {
        let mut gains_by_seed = vec![Vec::new(); study.pairs_by_seed.len()];
        for (index, alone) in study.solo_curves.iter().enumerate() {
            let first_colors = min_sum_split([curve_of(&alone[0]), curve_of(&alone[1])]);
            let values: Vec<f64> = study
                .pairs_by_seed
                .iter()
                .map(|pairs| gain_percent(&pairs[index], Some(first_colors)))
                .collect();
            gains_by_seed
                .iter_mut()
                .zip(&values)
                .for_each(|(seed_gains, &value)| seed_gains.push(value));
            let label = format!(
                "{} {}",
                pair_name(study.pairs_by_seed[0][index].pair),
                split_name(first_colors)
            );
            points.push(DataPoint::from_values(kind, label, &values));
        }
        gains_by_kind.push(gains_by_seed.iter().map(mean).collect());
    }
    let per_seed = context.with_seeds(
        gains_by_kind[0]
            .iter()
            .zip(&gains_by_kind[1])
            .map(|(stalls, misses)| stalls - misses),
    );
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
        .with_time_scale(scale.scale as f64)
        .with_note(note)
}

/// The findings of RM-4: the distance of the online choice from the best one, and the share of the
/// offline gain that it reaches.
fn online_findings(
    context: &ExperimentContext<'_>,
    study: &SplitStudy,
    machine_label: &str,
    scale: RunScale,
) -> Vec<Finding> {
    let best_gain = |pair: &MeasuredPair| {
        let splits = pair
            .rates_by_split
            .iter()
            .map(|(first, _)| gain_percent(pair, Some(*first)));
        // Leaving the cache shared is a choice too, which gains and loses nothing.
        splits.fold(0.0, f64::max)
    };
    let near_best_count = |index: usize| {
        let pairs = &study.pairs_by_seed[index];
        let is_near_best = |(pair, &first): (&MeasuredPair, &Option<u32>)| {
            (1.0 + best_gain(pair) / 100.0) / (1.0 + gain_percent(pair, first) / 100.0) - 1.0
                <= 0.01
        };
        pairs
            .iter()
            .zip(&study.online_splits_by_seed[index])
            .filter(|pair_choice| is_near_best(*pair_choice))
            .count() as f64
    };

    let share_of_offline_gain = |index: usize| {
        let pairs = &study.pairs_by_seed[index];
        let mean_gain = |choice: &[Option<u32>]| {
            mean(
                pairs
                    .iter()
                    .zip(choice)
                    .map(|(pair, &first_colors)| gain_percent(pair, first_colors)),
            )
        };
        let (online_gain, offline_gain) = (
            mean_gain(&study.online_splits_by_seed[index]),
            mean_gain(&study.offline_splits),
        );
        // If the offline curves lose, a share of their gain is meaningless; then a choice that loses no more counts as
        // 100 %.
        if offline_gain > 0.0 {
            to_percent(online_gain / offline_gain)
        } else {
            to_percent(f64::from(u8::from(online_gain >= offline_gain)))
        }
    };
    let per_seed =
        |value: &dyn Fn(usize) -> f64| context.with_seeds((0..context.seeds.len()).map(value));
    let count = study.pairs_by_seed[0].len() as f64;
    let requested_count = (count * 5.0 / 7.0).ceil();
    let (points, figure) = choice_points(study, machine_label, &best_gain);
    vec![
        Finding::new(
            "RM-4",
            &format!("pairs whose online split is within 1 % of the best, {machine_label}"),
            "splits 9:7, 9:7, 14:2 online against 14:2, 15:1, 13:3 offline",
            "pairs",
            ResultTarget::AtLeast { target: requested_count, paper_best: None },
            &per_seed(&near_best_count),
        )
        .with_points(points)
        .with_time_scale(scale.scale as f64)
        .with_note(
            "Objective everywhere: the sum of speeds over those alone. Online: traced while the pair shares the cache, sized \
             by the policy, cycles by the stall per miss measured meanwhile; judged by the measured runs at that split. \
             Leaving the cache shared is among the choices of all three.",
        )
        .with_figure(figure),
        Finding::declared_for(
            "rm-4-online-over-offline",
            &[machine_label],
            &per_seed(&share_of_offline_gain),
        )
        .with_time_scale(scale.scale as f64),
    ]
}

fn choice_points(
    study: &SplitStudy,
    machine_label: &str,
    best_gain: &dyn Fn(&MeasuredPair) -> f64,
) -> (Vec<DataPoint>, ResultFigure) {
    let split_label = |first: Option<u32>| first.map_or("shared".to_string(), split_name);

    let mut points = Vec::new();
    let mut groups = Vec::new();
    for (index, pair) in study.pairs_by_seed[0].iter().enumerate() {
        let values_over_seeds = |value: &dyn Fn(usize) -> f64| {
            (0..study.pairs_by_seed.len())
                .map(value)
                .collect::<Vec<f64>>()
        };
        let online_gains = values_over_seeds(&|seed| {
            gain_percent(
                &study.pairs_by_seed[seed][index],
                study.online_splits_by_seed[seed][index],
            )
        });
        let offline_gains = values_over_seeds(&|seed| {
            gain_percent(
                &study.pairs_by_seed[seed][index],
                study.offline_splits[index],
            )
        });
        let best_gains = values_over_seeds(&|seed| best_gain(&study.pairs_by_seed[seed][index]));
        let name = pair_name(pair.pair);
        let online_label = format!(
            "{name} {}",
            split_label(study.online_splits_by_seed[0][index])
        );
        let offline_label = format!("{name} {}", split_label(study.offline_splits[index]));
        points.push(DataPoint::from_values(
            "online",
            online_label,
            &online_gains,
        ));
        points.push(DataPoint::from_values(
            "offline",
            offline_label,
            &offline_gains,
        ));
        points.push(DataPoint::from_values(
            "best of all",
            name.clone(),
            &best_gains,
        ));
        let bars = [online_gains, offline_gains, best_gains]
            .map(|gains| mean(&gains).into())
            .to_vec();
        groups.push(BarGroup { name, bars });
    }
    let bars = BarChart {
        title: format!("Weighted speed-up over sharing, {machine_label}"),
        y: Axis::linear("gain, %"),
        series: vec![
            "online".to_string(),
            "offline".to_string(),
            "best of all splits".to_string(),
        ],
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
        assert_eq!(min_sum_split([steep.clone(), vec![5.0; 16]]), 15);
        assert_eq!(min_sum_split([steep.clone(), steep]), 8);
    }
}
