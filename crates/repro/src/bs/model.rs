//! BS-5: expected and measured miss ratios of groups, with random replacement (StatCache) and LRU (StatStack).
//!
//! Eight threads drawn from the mix run together until the cache is warm, and are then measured. That stretch of each
//! run is then replayed access by access ([`super::stretch`]), which splits the error into parts: *model* is the error
//! that remains with exact reuse times and exact access rates; *sampling* is the error that a thousand watched
//! locations add; further series leave the code out, stand behind the first-level caches, assume that all threads are
//! equally fast, or judge a group that has only just come together. The policy's own method is shown as well: threads
//! are watched beforehand under time sharing, and groups run together later, when the programs have advanced.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheLevel, ProfilerConfig, ReplacementModel, ReplacementPolicy, SplitMix64, TaskId,
    WindowRecord,
};
use cachemate_locality::reuse::ReuseTimes;
use cachemate_locality::statcc::{ReuseAtRate, lru_at_rates, random_at_rates};
use cachemate_locality::{statcache, statstack};
use cachemate_pipeline::build_profilers;
use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, Series};
use cachemate_sim::results::RunResults;
use serde::{Deserialize, Serialize};

use super::stretch::{InstructionSpan, ReuseTimesByFilter, measure_reuse};
use crate::niagara::groups::{
    GROUPS_PROBE_ID, GroupRequest, MissSums, measure_groups, sums_by_group, sums_by_task,
};
use crate::niagara::{CONTEXT_COUNT, NiagaraSetting, TIME_SCALE, casc_jobs, l2_miss_ratio};
use crate::seeded_runs::SeededRuns;
use crate::setup::{Workload, WorkloadJob, failed};
use crate::{DataPoint, ExperimentContext, Finding, Result, ResultFigure, mean};

const WATCHED_LOCATIONS: u32 = 1_000;
const LINE_BYTES: u64 = 64;
/// Cycles until the largest cache is warm, and measured cycles after them.
const WARM_UP_CYCLES: u64 = 6_000_000;
const MEASURED_CYCLES: u64 = 8_000_000;

/// Labels of the predictions, by model and kind of input.
const WATCHED_LABEL: &str = "composed, as sampled";
const EXACT_LABEL: &str = "composed, exact reuse times (model error alone)";
const AVERAGE_LABEL: &str = "average of C/n, as sampled";
const DATA_ONLY_LABEL: &str = "composed, exact, code not watched";
const BEHIND_L1_LABEL: &str = "composed, exact, behind a quarter of each L1";
const EQUAL_SPEED_LABEL: &str = "composed, exact, all threads equally fast";
const COLD_GROUP_LABEL: &str = "composed, exact, group brought together 0.1 M cycles ago";
const TIME_SHARED_LABEL: &str = "composed, watched beforehand under time sharing";
const PREDICTION_LABELS: [&str; 8] = [
    WATCHED_LABEL,
    EXACT_LABEL,
    AVERAGE_LABEL,
    DATA_ONLY_LABEL,
    BEHIND_L1_LABEL,
    EQUAL_SPEED_LABEL,
    COLD_GROUP_LABEL,
    TIME_SHARED_LABEL,
];

/// Measured and expected miss ratios of a group, in misses per 100 references.
#[derive(Serialize, Deserialize)]
struct RatioPair {
    form: String,
    measured: f64,
    expected: f64,
}

/// One machine.
#[derive(Clone, Copy, PartialEq, Serialize)]
struct ModelCase {
    replacement: ReplacementPolicy,
    model: ReplacementModel,
    l2_kb: u64,
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let sizes: &[u64] = context.pick(&[192], &[48, 192, 768]);
    let replacements = [
        (ReplacementPolicy::Random, ReplacementModel::Random),
        (ReplacementPolicy::Lru, ReplacementModel::Lru),
    ];

    let cases_of = |(replacement, model)| {
        sizes.iter().map(move |&l2_kb| ModelCase {
            replacement,
            model,
            l2_kb,
        })
    };
    let cases: Vec<ModelCase> = replacements.into_iter().flat_map(cases_of).collect();
    let pairs = context.run_cases(&cases, |case, seed| (case, seed), measure_machine)?;
    let names = ["StatCache on random replacement", "StatStack on LRU"];
    Ok(replacements
        .into_iter()
        .zip(names)
        .map(|((_, model), name)| model_finding(context, &pairs, sizes, model, name))
        .collect())
}

fn measure_machine(
    context: &ExperimentContext<'_>,
    &(case, seed): &(ModelCase, u64),
) -> Result<Vec<RatioPair>> {
    context.report_progress(&format!(
        "groups at {} KB, {:?}, seed {seed}",
        case.l2_kb, case.replacement
    ));

    let mut pairs = measure_isolated_groups(context, case, seed)?;
    if !context.quick {
        pairs.extend(measure_time_shared_groups(context, case, seed)?);
    }
    Ok(pairs)
}

fn model_finding(
    context: &ExperimentContext<'_>,
    estimates: &SeededRuns<ModelCase, Vec<RatioPair>>,
    sizes: &[u64],
    replacement_model: ReplacementModel,
    name: &str,
) -> Finding {
    let pairs_of = |form: &str, seed: Option<u64>, kb: Option<u64>| -> Vec<&RatioPair> {
        let is_selected = |case: &ModelCase, own_seed: u64| {
            case.model == replacement_model
                && seed.is_none_or(|seed| seed == own_seed)
                && kb.is_none_or(|kb| kb == case.l2_kb)
        };
        let selected_runs = estimates
            .iter()
            .filter(|((case, own_seed), _)| is_selected(case, *own_seed));
        selected_runs
            .flat_map(|(_, pairs)| pairs)
            .filter(|pair| pair.form == form)
            .collect()
    };

    let mut points = Vec::new();
    for form in PREDICTION_LABELS {
        for &kb in sizes
            .iter()
            .filter(|&&kb| !pairs_of(form, None, Some(kb)).is_empty())
        {
            let mut add_point = |metric: &str, of_pairs: fn(&[&RatioPair]) -> f64| {
                let values = context
                    .seeds
                    .iter()
                    .map(|&seed| of_pairs(&pairs_of(form, Some(seed), Some(kb))));
                points.push(DataPoint::from_values(
                    format!("{form}: {metric} %"),
                    format!("{kb} KB"),
                    values,
                ));
            };
            add_point("mean error", mean_error_percent);
            add_point("bias", mean_bias_percent);
        }
    }

    let per_seed: Vec<(u64, f64)> = context
        .values_by_seed(|seed| mean_error_percent(&pairs_of(WATCHED_LABEL, Some(seed), None)));
    let case_points = |form: &str| {
        pairs_of(form, None, None)
            .iter()
            .map(|p| (p.measured, p.expected))
            .collect()
    };
    let figure_name = if replacement_model == ReplacementModel::Lru {
        "bs-5-statstack"
    } else {
        "bs-5-statcache"
    };

    let [watched, exact, data, behind, cold] = [
        WATCHED_LABEL,
        EXACT_LABEL,
        DATA_ONLY_LABEL,
        BEHIND_L1_LABEL,
        COLD_GROUP_LABEL,
    ]
    .map(|form| mean_error_percent(&pairs_of(form, None, None)));
    let note = format!(
        "Access rates are those of the groups. Of the error of {watched:.1} %, {exact:.1} % is the model's (with exact reuse times; {behind:.1} % \
         when these are taken behind the L1s), the rest sampling. Without the code, which shares the cache, it would be {data:.1} %; of groups \
         that came together only 0.1 M cycles before, {cold:.1} %. The points have more."
    );
    Finding::declared_for("bs-5-model-error", &[name], &per_seed)
        .with_points(points)
        .with_figure(ratio_figure(
            figure_name,
            name,
            [WATCHED_LABEL, EXACT_LABEL, AVERAGE_LABEL]
                .map(|form| (form.to_string(), case_points(form)))
                .into_iter()
                .collect(),
        ))
        .with_time_scale(TIME_SCALE as f64)
        .with_note(note)
}

fn mean_error_percent(pairs: &[&RatioPair]) -> f64 {
    mean(
        pairs
            .iter()
            .map(|pair| 100.0 * (pair.expected / pair.measured - 1.0).abs()),
    )
}

fn mean_bias_percent(pairs: &[&RatioPair]) -> f64 {
    mean(
        pairs
            .iter()
            .map(|pair| 100.0 * (pair.expected / pair.measured - 1.0)),
    )
}

fn shared_ratios(
    at_rates: &[ReuseAtRate<'_>],
    lines: u64,
    model: ReplacementModel,
) -> Result<Vec<f64>> {
    let shared_model = match model {
        ReplacementModel::Random => random_at_rates(at_rates, lines),
        ReplacementModel::Lru => lru_at_rates(at_rates, lines),
    };
    Ok(shared_model
        .ok_or_else(|| failed("BS-5")("a member made no accesses"))?
        .miss_ratios)
}

fn solo_ratio(times: &ReuseTimes, lines: u64, model: ReplacementModel) -> Result<f64> {
    let ratio = match model {
        ReplacementModel::Random => statcache::miss_ratio(times, lines),
        ReplacementModel::Lru => statstack::miss_ratio(times, lines),
    };
    ratio.ok_or_else(|| failed("BS-5")("a member made no accesses"))
}

/// Miss ratios of random groups that run without other threads.
fn measure_isolated_groups(
    context: &ExperimentContext<'_>,
    case: ModelCase,
    seed: u64,
) -> Result<Vec<RatioPair>> {
    let mut generator = SplitMix64::new(seed);
    let mut pairs = Vec::new();
    for _ in 0..context.pick(4, 12) {
        context.check_not_stopped()?;
        let mut group_jobs = casc_jobs(seed);
        generator.shuffle(&mut group_jobs);
        group_jobs.truncate(CONTEXT_COUNT);
        pairs.extend(measure_group(context, case, seed, group_jobs)?);
    }
    Ok(pairs)
}

fn measure_group(
    context: &ExperimentContext<'_>,
    case: ModelCase,
    seed: u64,
    members: Vec<WorkloadJob>,
) -> Result<Vec<RatioPair>> {
    let mut workload = NiagaraSetting::new(case.l2_kb, seed, context).build_workload(members)?;
    workload
        .machine
        .caches
        .last_mut()
        .ok_or_else(|| failed("BS-5")("no cache"))?
        .replacement = case.replacement;

    let warm_run = workload
        .clone()
        .with_length(WARM_UP_CYCLES, MEASURED_CYCLES)
        .unmanaged_run()?;
    let mut pairs = predict_group(
        case,
        &workload,
        &warm_run,
        (WARM_UP_CYCLES, MEASURED_CYCLES),
    )?;

    // As long as a probe's rows settle and are measured.
    let short_cycles = (100_000, 2_000_000);
    let cold_run = workload
        .clone()
        .with_length(short_cycles.0, short_cycles.1)
        .unmanaged_run()?;
    let cold_pairs = predict_group(case, &workload, &cold_run, short_cycles)?;
    pairs.extend(
        cold_pairs
            .into_iter()
            .filter(|pair| pair.form == EXACT_LABEL)
            .map(|pair| RatioPair {
                form: COLD_GROUP_LABEL.to_string(),
                ..pair
            }),
    );
    Ok(pairs)
}

/// Predictions of every form for one group that ran.
fn predict_group(
    case: ModelCase,
    workload: &Workload,
    run_results: &RunResults,
    cycles: (u64, u64),
) -> Result<Vec<RatioPair>> {
    let lines = (case.l2_kb << 10) / LINE_BYTES;
    let reuse_of_job = |(job, task): (&WorkloadJob, &cachemate_sim::results::TaskResults)| {
        // The thread is assumed to have had the same speed before the stretch.
        let history_instr =
            (u128::from(task.instructions) * u128::from(cycles.0) / u128::from(cycles.1)) as u64;
        measure_reuse(
            job,
            InstructionSpan {
                history_instr,
                instr: task.instructions,
            },
            WATCHED_LOCATIONS,
        )
    };
    let reuse_by_job: Vec<ReuseTimesByFilter> = workload
        .jobs
        .iter()
        .zip(&run_results.tasks)
        .map(reuse_of_job)
        .collect::<Result<_, _>>()?;

    let l2_refs: Vec<f64> = run_results
        .tasks
        .iter()
        .map(l2_references)
        .collect::<Option<_>>()
        .ok_or_else(|| failed("BS-5")("no L2"))?;
    let total_refs: f64 = l2_refs.iter().sum();
    let measured_percent = 100.0
        * l2_miss_ratio(run_results)
            .ok_or_else(|| failed("BS-5")("the cache had no references"))?;

    // Times are counted in accesses of their own kind, and so are rates; misses are relative to references of the L2.
    let composed_ratio_pair = |value: &dyn Fn(&ReuseTimesByFilter) -> (&ReuseTimes, f64),
                               uses_equal_rates: bool|
     -> Result<f64> {
        let accesses: Vec<f64> = reuse_by_job.iter().map(|reuse| value(reuse).1).collect();
        let rate_of = |index: usize| {
            if uses_equal_rates {
                mean(&accesses)
            } else {
                accesses[index]
            }
        };
        let at_rates: Vec<ReuseAtRate<'_>> = reuse_by_job
            .iter()
            .enumerate()
            .map(|(index, reuse)| (value(reuse).0, rate_of(index)))
            .collect();
        let ratios = shared_ratios(&at_rates, lines, case.model)?;
        Ok(100.0
            * ratios
                .iter()
                .zip(&accesses)
                .map(|(ratio, accesses)| ratio * accesses)
                .sum::<f64>()
            / total_refs)
    };

    let share_lines = (lines / CONTEXT_COUNT as u64).max(1);
    let ratio_on_share = |(reuse, refs): (&ReuseTimesByFilter, &f64)| {
        Ok(100.0
            * solo_ratio(&reuse.watched_times, share_lines, case.model)?
            * reuse.all_accesses.accesses
            / refs)
    };
    let misses_on_shares = reuse_by_job
        .iter()
        .zip(&l2_refs)
        .map(ratio_on_share)
        .collect::<Result<Vec<f64>>>()?;
    let ratio_pair = |form: &str, expected| RatioPair {
        form: form.to_string(),
        measured: measured_percent,
        expected,
    };

    Ok(vec![
        ratio_pair(
            WATCHED_LABEL,
            composed_ratio_pair(&|s| (&s.watched_times, s.all_accesses.accesses), false)?,
        ),
        ratio_pair(
            EXACT_LABEL,
            composed_ratio_pair(&|s| (&s.all_accesses.times, s.all_accesses.accesses), false)?,
        ),
        ratio_pair(AVERAGE_LABEL, mean(&misses_on_shares)),
        ratio_pair(
            DATA_ONLY_LABEL,
            composed_ratio_pair(
                &|s| (&s.data_accesses.times, s.data_accesses.accesses),
                false,
            )?,
        ),
        ratio_pair(
            BEHIND_L1_LABEL,
            composed_ratio_pair(&|s| (&s.behind_l1.times, s.behind_l1.accesses), false)?,
        ),
        ratio_pair(
            EQUAL_SPEED_LABEL,
            composed_ratio_pair(&|s| (&s.all_accesses.times, s.all_accesses.accesses), true)?,
        ),
    ])
}

fn l2_references(task: &cachemate_sim::results::TaskResults) -> Option<f64> {
    let level = task
        .levels
        .iter()
        .find(|level| level.level == CacheLevel::L2)?;
    Some(level.references as f64).filter(|&references| references > 0.0)
}

/// Miss ratios by the policy's method: all threads are watched under time sharing, and groups run together afterward.
fn measure_time_shared_groups(
    context: &ExperimentContext<'_>,
    case: ModelCase,
    seed: u64,
) -> Result<Vec<RatioPair>> {
    let mut workload =
        NiagaraSetting::new(case.l2_kb, seed, context).build_workload(casc_jobs(seed))?;
    workload
        .machine
        .caches
        .last_mut()
        .ok_or_else(|| failed("BS-5")("no cache"))?
        .replacement = case.replacement;

    let request = GroupRequest {
        rows_ns: None,
        locations: Some(WATCHED_LOCATIONS),
        group_count: 12,
        group_ns: 10_000_000,
    };
    let records = measure_groups(workload, request)?;
    let reuse_by_task = reuse_times_by_task(&records, case)?;
    let measured_sums = sums_by_task(&records, true);
    let missing_error = || failed("BS-5")("a member was not measured");

    let ratio_pair = |(members, sum): (&Vec<TaskId>, &MissSums)| {
        let reuse_at_rate = |task: &TaskId| {
            Some((
                reuse_by_task.get(task)?,
                measured_sums.get(task).map(|sum| sum.references / sum.ns)?,
            ))
        };
        let at_rates: Vec<ReuseAtRate<'_>> = members
            .iter()
            .map(reuse_at_rate)
            .collect::<Option<_>>()
            .ok_or_else(missing_error)?;
        let ratios = shared_ratios(&at_rates, (case.l2_kb << 10) / LINE_BYTES, case.model)?;
        let misses: f64 = ratios
            .iter()
            .zip(&at_rates)
            .map(|(ratio, (_, rate))| ratio * rate)
            .sum();
        let expected = 100.0 * misses / at_rates.iter().map(|(_, rate)| rate).sum::<f64>();
        Ok(RatioPair {
            form: TIME_SHARED_LABEL.to_string(),
            measured: sum.misses_per_100_references(),
            expected,
        })
    };

    sums_by_group(&records).iter().map(ratio_pair).collect()
}

fn reuse_times_by_task(
    records: &[WindowRecord],
    case: ModelCase,
) -> Result<BTreeMap<TaskId, ReuseTimes>> {
    let mut profiler = build_profilers(&[ProfilerConfig::Reuse {
        level: CacheLevel::L2,
        replacement: case.model,
        line_bytes: LINE_BYTES,
        sizes_bytes: vec![case.l2_kb << 10],
        includes_code: true,
    }]);
    for record in records {
        // Observations from the time in which groups come together add nothing about single threads.
        if record
            .observation
            .probe_results
            .iter()
            .any(|probe_result| probe_result.probe == GROUPS_PROBE_ID)
        {
            break;
        }
        profiler.update(&record.observation);
    }

    let reuse_times_of = |(task, profile): (&TaskId, &cachemate_core::Profile)| {
        let times = profile
            .reuse_times()
            .and_then(|times| ReuseTimes::from_profile(times));
        Ok((
            *task,
            times.ok_or_else(|| failed("BS-5")(format!("no reuse times of {task:?}")))?,
        ))
    };
    profiler.profiles().iter().map(reuse_times_of).collect()
}

/// A scatter plot of expected against measured values.
fn ratio_figure(name: &str, title: &str, series: Vec<(String, Vec<(f64, f64)>)>) -> ResultFigure {
    let to_series = |(name, points): (String, Vec<(f64, f64)>)| Series {
        name,
        points: points
            .into_iter()
            .map(|(x, y)| ChartPoint::new(x, y))
            .collect(),
        mark: Mark::Points,
        ..Series::default()
    };
    let chart = Chart {
        title: title.to_string(),
        x: Axis::linear("measured, misses per 100 references"),
        y: Axis::linear("expected, misses per 100 references"),
        series: series.into_iter().map(to_series).collect(),
        ..Chart::default()
    };
    ResultFigure::chart(name, &chart)
}
