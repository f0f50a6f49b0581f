//! The split chosen from each kind of evidence, and its quality: CP-4 (stalls against misses) and RM-4 (curves measured
//! online, curves measured offline, and trying all splits; thesis Figures 4.8 to 4.10 and 5.16).

use std::collections::BTreeSet;

use cachemate_core::{
    CacheLevel, PipelineConfig, ProcessId, ProfilerConfig, ReasonKind, ShareMember, TracedCache, Units, WindowLength,
};
use cachemate_policy::solvers::sizing::{CostAggregate, UnitClaim, allocate_exactly};
use cachemate_report::figure::{Axis, BarChart, BarGroup};

use super::isolation::{
    best_sum, chosen_sum, controls_unaffected, forecast_finding, pair_name, recovery_finding, to_percent,
};
use super::pairs::{
    CONTROLS, ColorCurves, MeasuredPair, PAIRS, PairForecast, PairRequest, ProgramPair, SoloWork, alone_by_colors,
    forecast_split, measure_pairs, measure_solos, pair_inputs, pair_on_chip,
};
use super::{COLORS, RunScale, decision_by, nominal_ns};
use crate::setup::{Workload, build_pipeline, failed, run_under};
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure, ResultTarget, mean};

/// Measurements of all pairs on one machine, with or without its L3.
struct SplitStudy {
    by_seed: Vec<Vec<MeasuredPair>>,
    /// Both programs of each pair alone, with the first seed.
    alone: Vec<[ColorCurves; 2]>,
    /// Forecasts from the solo curves; `None` if the predictor gives none.
    expected: Vec<Option<PairForecast>>,
    /// Splits chosen offline for weighted speed-up; `None` if left shared.
    offline: Vec<Option<u32>>,
    /// Splits chosen by the policy from curves that it measured while the pair ran, by seed.
    online: Vec<Vec<Option<u32>>>,
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    // A full run warms up until the L3 is full and every program has passed over its data once (ammp's speed changes
    // for the last time after 45 million cycles). It then measures for as long as the programs' own phases, which no
    // time scale shortens.
    let scale = context.pick(
        RunScale { scale: 30_000, warm_up_cycles: 6_000_000 },
        RunScale { scale: 2_500, warm_up_cycles: 50_000_000 },
    );
    let controls: &[ProgramPair] = context.pick(&CONTROLS[..1], &CONTROLS);
    let with_l3 = study_splits(context, true, scale)?;
    let without_l3 = study_splits(context, false, scale)?;
    let [once, again] = controls_twice(context, controls, scale)?;
    let mut findings = vec![
        best_sum(context, &with_l3.by_seed, scale),
        chosen_sum(context, &with_l3.by_seed, &with_l3.online, "online", scale),
        chosen_sum(context, &with_l3.by_seed, &vec![with_l3.offline.clone(); context.seeds.len()], "offline", scale),
        forecast_finding(context, &with_l3.by_seed, &with_l3.expected, scale),
        recovery_finding(context, &with_l3.by_seed, scale),
        controls_unaffected(context, &once, &again, scale),
        stalls_against_misses(context, &with_l3, scale),
    ];
    findings.extend(online_finding(context, &with_l3, "L3 on", scale));
    findings.extend(online_finding(context, &without_l3, "L3 off", scale));
    Ok(findings)
}

/// Solo runs of both programs of each pair.
fn run_pair_solos(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    l3: bool,
    scale: RunScale,
    seed: u64,
) -> Result<Vec<[SoloWork; 2]>, ReproError> {
    let programs: Vec<_> = pairs.iter().flat_map(|&pair| pair_inputs(pair, seed)).collect();
    let solos = measure_solos(context, &programs, l3, scale, seed)?;
    Ok(solos.chunks(2).map(|both| [both[0], both[1]]).collect())
}

/// Pairs that share the cache, seed by seed, and the same again with different frames only.
fn controls_twice(
    context: &ExperimentContext<'_>,
    pairs: &[ProgramPair],
    scale: RunScale,
) -> Result<[Vec<Vec<MeasuredPair>>; 2], ReproError> {
    let mut twice = [Vec::new(), Vec::new()];
    for &seed in &context.seeds {
        let alone = run_pair_solos(context, pairs, true, scale, seed)?;
        for (other_frames, into) in [0, 500].into_iter().zip(&mut twice) {
            let to_request = |(&pair, &alone): (&ProgramPair, &[SoloWork; 2])| PairRequest {
                pair,
                seed,
                other_frames,
                alone,
                splits: BTreeSet::new(),
            };
            let requests: Vec<PairRequest> = pairs.iter().zip(&alone).map(to_request).collect();
            into.push(measure_pairs(context, &requests, true, scale)?);
        }
    }
    Ok(twice)
}

fn study_splits(context: &ExperimentContext<'_>, l3: bool, scale: RunScale) -> Result<SplitStudy, ReproError> {
    let splits: Vec<u32> = context.pick_of_three(vec![4], vec![4, 12], (1..COLORS).collect());
    let quick_pairs: &[ProgramPair] = if l3 { &PAIRS[2..3] } else { &PAIRS[4..5] };
    let pairs: &[ProgramPair] = context.pick(quick_pairs, &PAIRS);
    let colors: Vec<u32> =
        context.pick_of_three(vec![1, 8, COLORS], vec![1, 4, 8, 12, 14, COLORS], (1..=COLORS).collect());
    let solos: Vec<Vec<[SoloWork; 2]>> = context
        .seeds
        .iter()
        .map(|&seed| run_pair_solos(context, pairs, l3, scale, seed))
        .collect::<Result<_, ReproError>>()?;
    let seed = context.seeds[0];
    let programs: Vec<_> = pairs
        .iter()
        .zip(&solos[0])
        .flat_map(|(&pair, &alone)| pair_inputs(pair, seed).into_iter().zip(alone))
        .collect();
    let mut alone = alone_by_colors(context, &programs, &colors, l3, scale, seed)?.into_iter();
    let alone: Vec<[ColorCurves; 2]> = std::iter::from_fn(|| Some([alone.next()?, alone.next()?])).collect();
    let expect = |(&pair, alone): (&ProgramPair, &[ColorCurves; 2])| -> Result<Option<PairForecast>, ReproError> {
        Ok(forecast_split(&pair_on_chip(pair, l3, scale, seed, 0)?, [&alone[0].space, &alone[1].space]))
    };
    let expected: Vec<Option<PairForecast>> = pairs.iter().zip(&alone).map(expect).collect::<Result<_, _>>()?;
    let now: Vec<PairRequest> = pairs
        .iter()
        .zip(&solos[0])
        .map(|(&pair, &alone)| PairRequest { pair, seed, other_frames: 0, alone, splits: BTreeSet::new() })
        .collect();
    let now = measure_pairs(context, &now, l3, scale)?;
    let choose_split = |(forecast, now): (&Option<PairForecast>, &MeasuredPair)| {
        forecast.and_then(|forecast| forecast.choose(now.shared_speedup()))
    };
    let offline: Vec<Option<u32>> = expected.iter().zip(&now).map(choose_split).collect();
    let runs: Vec<(u64, ProgramPair)> =
        context.seeds.iter().flat_map(|&seed| pairs.iter().map(move |&pair| (seed, pair))).collect();
    let entries = context.pick(40_000, 163_840);
    // A trial on a machine with an L3 takes up to 250 windows.
    let windows = context.pick_of_three(40, 160, 500);
    let chosen_splits = context.run_all_stored(
        module_path!(),
        &runs,
        |item| format!("{item:?} {l3} {scale:?} {entries} {windows}"),
        |&(seed, pair)| {
            context.report_progress(&format!("{} online, seed {seed}", pair_name(pair)));
            choose_online(&pair_on_chip(pair, l3, scale, seed, 0)?, entries, scale, windows)
        },
    )?;
    let online: Vec<Vec<Option<u32>>> = chosen_splits.chunks(pairs.len()).map(<[Option<u32>]>::to_vec).collect();
    let mut requests = Vec::new();
    for (by_seed, &seed) in solos.iter().zip(&context.seeds) {
        for (index, (&pair, &solo_pair)) in pairs.iter().zip(by_seed).enumerate() {
            // Every chosen split is measured, in addition to the given ones.
            let mut all_splits: BTreeSet<u32> = splits.iter().copied().collect();
            all_splits.extend(
                KINDS.iter().map(|(_, curve)| split_of_min_sum([curve(&alone[index][0]), curve(&alone[index][1])])),
            );
            all_splits.extend(
                offline[index].iter().chain(online.iter().filter_map(|splits_of_seed| splits_of_seed[index].as_ref())),
            );
            requests.push(PairRequest { pair, seed, other_frames: 0, alone: solo_pair, splits: all_splits });
        }
    }
    let measured_pairs = measure_pairs(context, &requests, l3, scale)?;
    let by_seed = measured_pairs.chunks(pairs.len()).map(<[MeasuredPair]>::to_vec).collect();
    Ok(SplitStudy { by_seed, alone, expected, offline, online })
}

/// Colors of the first program after this many windows; `None` if left shared. A split still on trial at the end does
/// not count: the result is that of the last verdict, or the split at the end if there was no verdict.
fn choose_online(workload: &Workload, entries: u64, scale: RunScale, windows: u64) -> Result<Option<u32>, ReproError> {
    let config = sizing_policy(workload, entries, scale.warm_up_cycles, WINDOW_CYCLES, "");
    let lasting = workload.clone().with_length(0, scale.warm_up_cycles + windows * WINDOW_CYCLES);
    let (mut judged, mut shares) = (false, Vec::new());
    run_under(lasting.build_machine()?, build_pipeline(config)?, |_, record| {
        let verdict = record.decision.reasons.iter().any(|reason| reason.kind == ReasonKind::TrialVerdict);
        if verdict || !judged {
            shares = record.decision.plan.shares;
        }
        judged |= verdict;
        true
    })
    .map_err(failed("cache-sizing"))?;
    let share_of =
        |process: u32| shares.iter().find(|share| share.members.contains(&ShareMember::Process(ProcessId(process))));
    let (Some(first), Some(second)) = (share_of(0), share_of(1)) else { return Ok(None) };
    Ok(match &first.units {
        // One partition for both is the shared cache.
        Units::Colors { allowed, .. } if first.group != second.group => Some(allowed.count()),
        _ => None,
    })
}

pub(crate) const WINDOW_CYCLES: u64 = 500_000;

/// The sizing policy with RapidMRC curves, which decides from a cycle on. Traces keep their length, because it belongs
/// to the number of lines of the cache, which the time scale does not change.
pub(crate) fn sizing_policy(
    workload: &Workload,
    entries: u64,
    from_cycle: u64,
    window_cycles: u64,
    parameters: &str,
) -> PipelineConfig {
    let window_ns = nominal_ns(workload, window_cycles);
    let budget_ns = i64::MAX;
    let parameters =
        format!("window_ns = {window_ns}\ntrace_entries = {entries}\ntrace_budget_ns = {budget_ns}\n{parameters}");
    let window = WindowLength::Cycles { cycles: from_cycle.max(window_cycles) * workload.options.scale };
    let mut config = decision_by(workload, "cache-sizing", &parameters, window);
    let l2 = workload.machine.caches.iter().find(|cache| cache.level == CacheLevel::L2);
    let (size_bytes, ways) = l2.map_or((0, 0), |cache| (cache.size_bytes, cache.ways));
    let cache = TracedCache { level: CacheLevel::L2, size_bytes, colors: COLORS, ways, points: COLORS };
    config.profilers.push(ProfilerConfig::MissTrace { cache, follows_thesis: false });
    config
}

/// The split with the least sum of two curves (thesis equation 5.3).
fn split_of_min_sum(curves: [Vec<f64>; 2]) -> u32 {
    let claims = curves.map(|costs| UnitClaim { costs, min_units: 1 });
    allocate_exactly(&claims, COLORS, CostAggregate::Sum).expect("sixteen colors for two, and measured costs")[0]
}

fn per_cycle(per_kilo_instr: &[f64], alone: &ColorCurves) -> Vec<f64> {
    per_kilo_instr.iter().zip(&alone.space.cycles_per_instr).map(|(rate, cycles)| rate / cycles).collect()
}

/// Gain in weighted speed-up over sharing the cache, in percent.
fn gain_percent(pair: &MeasuredPair, first: Option<u32>) -> f64 {
    let rates = pair.rates_at(first).unwrap_or([f64::NAN; 2]);
    to_percent(pair.weighted_speedup(&rates) / pair.weighted_speedup(&pair.shared) - 1.0)
}

/// Accessor of the curve that a chooser uses.
type CurveGetter = fn(&ColorCurves) -> Vec<f64>;

const KINDS: [(&str, CurveGetter); 4] = [
    ("stalls per instruction", |alone| alone.stalls_per_kilo_instr.clone()),
    ("misses per instruction", |alone| alone.space.misses_per_kilo_instr.clone()),
    ("stalls per cycle", |alone| per_cycle(&alone.stalls_per_kilo_instr, alone)),
    ("misses per cycle", |alone| per_cycle(&alone.space.misses_per_kilo_instr, alone)),
];

fn stalls_against_misses(context: &ExperimentContext<'_>, study: &SplitStudy, scale: RunScale) -> Finding {
    let mut points = Vec::new();
    let mut by_kind: Vec<Vec<f64>> = Vec::new();
    for (kind, curve) in KINDS {
        let mut by_seed = vec![Vec::new(); study.by_seed.len()];
        for (index, alone) in study.alone.iter().enumerate() {
            let first = split_of_min_sum([curve(&alone[0]), curve(&alone[1])]);
            let values: Vec<f64> = study.by_seed.iter().map(|pairs| gain_percent(&pairs[index], Some(first))).collect();
            by_seed.iter_mut().zip(&values).for_each(|(seed_gains, &value)| seed_gains.push(value));
            let split = format!("{first}:{}", COLORS - first);
            points.push(DataPoint::over_values(
                kind,
                format!("{} {split}", pair_name(study.by_seed[0][index].pair)),
                &values,
            ));
        }
        by_kind.push(by_seed.iter().map(|values| mean(values)).collect());
    }
    let per_seed: Vec<(u64, f64)> =
        context.seeds.iter().enumerate().map(|(index, &seed)| (seed, by_kind[0][index] - by_kind[1][index])).collect();
    let note = format!(
        "Mean gain in weighted speed-up over sharing: stalls per instruction {:+.1} %, misses per instruction {:+.1} %, stalls \
         per cycle {:+.1} %, misses per cycle {:+.1} %. Splits from curves of each program alone under the first seed; leaving \
         the cache shared is not among these choices, and both kinds can lose to it.",
        mean(&by_kind[0]),
        mean(&by_kind[1]),
        mean(&by_kind[2]),
        mean(&by_kind[3]),
    );
    Finding::declared("cp-4-stalls-over-misses", &per_seed)
        .with_points(points)
        .time_scale(scale.scale as f64)
        .with_note(note)
}

/// RM-4: the distance of the online choice from the best one, and the share of the offline gain that it reaches.
fn online_finding(context: &ExperimentContext<'_>, study: &SplitStudy, where_: &str, scale: RunScale) -> Vec<Finding> {
    let best_gain = |pair: &MeasuredPair| {
        let splits = pair.splits.iter().map(|(first, _)| gain_percent(pair, Some(*first)));
        // Leaving the cache shared is a choice too, which gains and loses nothing.
        splits.fold(0.0, f64::max)
    };
    let near_count = |index: usize| {
        let pairs = &study.by_seed[index];
        let is_near_best = |(pair, &first): (&MeasuredPair, &Option<u32>)| {
            (1.0 + best_gain(pair) / 100.0) / (1.0 + gain_percent(pair, first) / 100.0) - 1.0 <= 0.01
        };
        pairs.iter().zip(&study.online[index]).filter(|pair_choice| is_near_best(*pair_choice)).count() as f64
    };
    let share = |index: usize| {
        let pairs = &study.by_seed[index];
        let mean_gain = |choice: &[Option<u32>]| {
            mean(&pairs.iter().zip(choice).map(|(pair, &index)| gain_percent(pair, index)).collect::<Vec<_>>())
        };
        let (online, offline) = (mean_gain(&study.online[index]), mean_gain(&study.offline));
        // If the offline curves lose, a share of their gain is meaningless; then a choice that loses no more counts as
        // 100 %.
        if offline > 0.0 { to_percent(online / offline) } else { to_percent(f64::from(u8::from(online >= offline))) }
    };
    let per_seed = |value: &dyn Fn(usize) -> f64| -> Vec<(u64, f64)> {
        context.seeds.iter().enumerate().map(|(index, &seed)| (seed, value(index))).collect()
    };
    let count = study.by_seed[0].len() as f64;
    let requested_count = (count * 5.0 / 7.0).ceil();
    let (points, figure) = choice_points(study, where_, &best_gain);
    vec![
        Finding::new(
            "RM-4",
            &format!("pairs whose online split is within 1 % of the best, {where_}"),
            "splits 9:7, 9:7, 14:2 online against 14:2, 15:1, 13:3 offline",
            "pairs",
            ResultTarget::AtLeast { target: requested_count, paper_best: None },
            &per_seed(&near_count),
        )
        .with_points(points)
        .time_scale(scale.scale as f64)
        .with_note(
            "Objective everywhere: the sum of speeds over those alone. Online: traced while the pair shares the cache, sized \
             by the policy, cycles by the stall per miss measured meanwhile; judged by the measured runs at that split. \
             Leaving the cache shared is among the choices of all three.",
        )
        .with_figure(figure),
        Finding::new(
            "RM-4",
            &format!("online gain over offline gain, in the mean, {where_}"),
            "9 of 17 %, 4 of 10 %, 6 of 6 %",
            "%",
            ResultTarget::AtLeast { target: 90.0, paper_best: Some(100.0) },
            &per_seed(&share),
        )
        .time_scale(scale.scale as f64)
        .with_note("Where the offline choices lose in the mean: 100 if the online ones lose no more, else 0."),
    ]
}

fn choice_points(
    study: &SplitStudy,
    where_: &str,
    best: &dyn Fn(&MeasuredPair) -> f64,
) -> (Vec<DataPoint>, ResultFigure) {
    let split_label =
        |first: Option<u32>| first.map_or("shared".to_string(), |first| format!("{first}:{}", COLORS - first));
    let mut points = Vec::new();
    let mut groups = Vec::new();
    for (index, pair) in study.by_seed[0].iter().enumerate() {
        let over_seeds = |value: &dyn Fn(usize) -> f64| (0..study.by_seed.len()).map(value).collect::<Vec<f64>>();
        let online = over_seeds(&|seed| gain_percent(&study.by_seed[seed][index], study.online[seed][index]));
        let offline = over_seeds(&|seed| gain_percent(&study.by_seed[seed][index], study.offline[index]));
        let best_gains = over_seeds(&|seed| best(&study.by_seed[seed][index]));
        let name = pair_name(pair.pair);
        points.push(DataPoint::over_values(
            "online",
            format!("{name} {}", split_label(study.online[0][index])),
            &online,
        ));
        points.push(DataPoint::over_values(
            "offline",
            format!("{name} {}", split_label(study.offline[index])),
            &offline,
        ));
        points.push(DataPoint::over_values("best of all", name.clone(), &best_gains));
        groups
            .push(BarGroup { name, bars: vec![mean(&online).into(), mean(&offline).into(), mean(&best_gains).into()] });
    }
    let bars = BarChart {
        title: format!("Weighted speed-up over sharing, {where_}"),
        y: Axis::linear("gain, %"),
        series: vec!["online".to_string(), "offline".to_string(), "best of all splits".to_string()],
        groups,
        ..BarChart::default()
    };
    let file = format!("rm-4-{}", where_.to_lowercase().replace(' ', "-"));
    (points, ResultFigure::bars(file, &bars))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a gain that of weighted speed-up, and zero if the cache stays shared?
    #[test]
    fn gains_are_of_weighted_speedup() {
        let pair =
            MeasuredPair { pair: ("a", "b"), alone: [1.0, 2.0], shared: [0.5, 1.0], splits: vec![(12, [0.9, 1.0])] };
        assert!((gain_percent(&pair, Some(12)) - 40.0).abs() < 1e-9);
        assert_eq!(gain_percent(&pair, None), 0.0);
        assert!(gain_percent(&pair, Some(3)).is_nan(), "not measured");
    }

    /// Does the least sum of two curves follow thesis equation 5.3?
    #[test]
    fn the_least_sum_follows_the_thesis() {
        let steep: Vec<f64> = (1..=16).map(|colors| 160.0 / f64::from(colors)).collect();
        assert_eq!(split_of_min_sum([steep.clone(), vec![5.0; 16]]), 15);
        assert_eq!(split_of_min_sum([steep.clone(), steep]), 8);
    }
}
