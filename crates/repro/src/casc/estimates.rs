//! CASC-4 and CASC-5: how well measured rates predict threads and groups.
//!
//! One run measures all threads in rows, as the policy does, and then random groups of eight for longer. The truth for
//! a single thread is its miss ratio alone on an eighth of the cache, above or below the mean of all; for a group it is
//! the group's later rate. *Linearity* is the error that a formula keeps if every member's rate and references are
//! those of all its groups together; the rest is measurement error of rates or references, and falls as rows are
//! measured for longer.

use std::collections::BTreeMap;

use cachemate_core::{CacheLevel, CoRunRowParameters, ProfilerConfig, TaskId, WindowRecord};
use cachemate_pipeline::build_profilers;
use serde::{Deserialize, Serialize};

use crate::niagara::groups::{
    GROUPS_PROBE_ID, GroupRequest, MissSums, measure_groups, sums_by_group, sums_by_task,
};
use crate::niagara::{
    CONTEXT_COUNT, MAX_ROW_NS, NiagaraSetting, SIZES_KB, TIME_SCALE, casc_jobs, l2_miss_ratio,
};
use crate::setup::failed;
use crate::{ExperimentContext, Finding, Result, mean};

/// Forms of the estimates; the last ones are the better form from rows of [`OTHER_ROW_LENGTHS_NS`].
const FORMS: [&str; 8] = [
    "better",
    "better, rates measured in groups",
    "better, references measured in groups",
    "better, linearity alone",
    "literal",
    "literal, linearity alone",
    "better, rows of 2.5 ms",
    "better, rows of 20 ms",
];
/// Position of the paper's literal form.
const LITERAL: usize = 4;
/// Lengths of rows in addition to those of the policy's runs.
const OTHER_ROW_LENGTHS_NS: [u64; 2] = [2_500_000, 20_000_000];

/// Errors of the estimates in one run.
#[derive(Serialize, Deserialize)]
struct EstimateErrors {
    /// Largest and mean relative error of the expected group rates, in percent, for each of [`FORMS`].
    errors: Vec<[f64; 2]>,
    right: [u32; 2],
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let sizes: &[u64] = context.pick(&[192], &SIZES_KB);
    let estimates = context.run_cases(sizes, |size, seed| (size, seed), measure_errors)?;
    let mut points = Vec::new();
    for &size in sizes {
        for (form, name) in ["own counts", "linear solve"].iter().enumerate() {
            let series = format!("threads on the right side, {name}");
            points.push(estimates.point(size, series, format!("{size} KB"), |e| {
                f64::from(e.right[form])
            }));
        }
    }

    let casc_4_finding = |name: &str, form: usize| {
        Finding::declared(
            name,
            &estimates.least_per_seed(|estimate| f64::from(estimate.right[form])),
        )
        .require_every_seed()
        .with_points(points.clone())
        .with_time_scale(TIME_SCALE as f64)
    };
    let mut findings = vec![
        casc_4_finding("casc-4-linear-solve", 1),
        casc_4_finding("casc-4-own-counts", 0),
    ];

    let mut errors = Vec::new();
    for &size in sizes {
        for (form, name) in FORMS.iter().enumerate() {
            let label = format!("{size} KB");
            errors.push(
                estimates.point(size, format!("{name}: worst error %"), &label, |e| {
                    e.errors[form][0]
                }),
            );
            errors.push(
                estimates.point(size, format!("{name}: mean error %"), &label, |e| {
                    e.errors[form][1]
                }),
            );
        }
    }
    let note = format!(
        "Better form: members' own rates weighted by their references, from rows of {} ms. Literal form: the mean of solved rates. Both \
         forms' linearity error, and the better one's with rates or references from the groups and with other rows are in the points.",
        MAX_ROW_NS / 1_000_000
    );
    // The paper gives no mean, so that of its own form has no target.
    let casc_5_findings = [
        ("casc-5-literal-mean", LITERAL, 1),
        ("casc-5-literal-largest", LITERAL, 0),
        ("casc-5-better-mean", 0, 1),
        ("casc-5-better-largest", 0, 0),
    ];
    findings.extend(casc_5_findings.map(|(name, form, metric)| {
        let per_seed = estimates.greatest_per_seed(|estimate| estimate.errors[form][metric]);
        Finding::declared(name, &per_seed)
            .require_every_seed()
            .with_points(errors.clone())
            .with_time_scale(TIME_SCALE as f64)
            .with_note(note.as_str())
    }));
    Ok(findings)
}

fn measure_errors(
    context: &ExperimentContext<'_>,
    &(l2_kb, seed): &(u64, u64),
) -> Result<EstimateErrors> {
    context.report_progress(&format!("rows and groups at {l2_kb} KB, seed {seed}"));

    let setting = &NiagaraSetting::new(l2_kb, seed, context);
    let records = measure_rows(context, setting, MAX_ROW_NS)?;
    let (own_ratios, solved_ratios) = (
        measured_ratios(&records, true)?,
        measured_ratios(&records, false)?,
    );
    let true_ratios = measure_solo_ratios(setting)?;
    let task_ids: Vec<TaskId> = own_ratios.keys().copied().collect();
    let rates_in_order = |rates_of: &BTreeMap<TaskId, f64>| {
        task_ids
            .iter()
            .map(|task| rates_of[task])
            .collect::<Vec<f64>>()
    };
    let same_side_counts = [rates_in_order(&own_ratios), rates_in_order(&solved_ratios)]
        .map(|rates| same_side_count(&rates, &true_ratios));
    let mut error_estimates = errors_by_form(&records, &own_ratios, &solved_ratios)?;
    for rows_ns in OTHER_ROW_LENGTHS_NS {
        let records = measure_rows(context, setting, rows_ns)?;
        let (own_ratios, solved_ratios) = (
            measured_ratios(&records, true)?,
            measured_ratios(&records, false)?,
        );
        error_estimates.push(errors_by_form(&records, &own_ratios, &solved_ratios)?[0]);
    }
    Ok(EstimateErrors {
        errors: error_estimates,
        right: same_side_counts,
    })
}

fn measure_rows(
    context: &ExperimentContext<'_>,
    setting: &NiagaraSetting,
    rows_ns: u64,
) -> Result<Vec<WindowRecord>> {
    let request = GroupRequest {
        rows_ns: Some(rows_ns),
        locations: None,
        group_count: context.pick(6, 24),
        group_ns: context.pick(5_000_000, 15_000_000),
    };
    measure_groups(setting.build_workload(casc_jobs(setting.seed))?, request)
}

fn same_side_count(estimates: &[f64], true_values: &[f64]) -> u32 {
    let (estimate_mean, true_mean) = (mean(estimates), mean(true_values));
    estimates
        .iter()
        .zip(true_values)
        .filter(|&(estimate, truth)| (*estimate > estimate_mean) == (*truth > true_mean))
        .count() as u32
}

/// The pCMRs computed from the rows alone.
fn measured_ratios(
    records: &[WindowRecord],
    uses_own_counts: bool,
) -> Result<BTreeMap<TaskId, f64>> {
    let parameters = CoRunRowParameters {
        uses_task_counts: uses_own_counts,
        ..CoRunRowParameters::default()
    };
    let mut profiler = build_profilers(&[ProfilerConfig::CoRunRows {
        level: CacheLevel::L2,
        parameters,
    }]);
    for record in records {
        let mut observation = record.observation.clone();
        observation
            .probe_results
            .retain(|probe_result| probe_result.probe != GROUPS_PROBE_ID);
        profiler.update(&observation);
    }

    let unmeasured_error =
        |task: &TaskId| failed("rows")(format!("the rate of {task:?} was not measured"));
    let profiles = profiler.profiles().iter();
    profiles
        .map(|(task, profile)| {
            Ok((
                *task,
                profile
                    .rates
                    .pcmr
                    .ok_or_else(|| unmeasured_error(task))?
                    .value,
            ))
        })
        .collect()
}

/// Worst and mean error of each of the first six forms over the groups.
fn errors_by_form(
    records: &[WindowRecord],
    own_ratios: &BTreeMap<TaskId, f64>,
    solved_ratios: &BTreeMap<TaskId, f64>,
) -> Result<Vec<[f64; 2]>> {
    let (groups, row_sums, group_sums) = (
        sums_by_group(records),
        sums_by_task(records, false),
        sums_by_task(records, true),
    );
    if groups.is_empty() {
        return Err(failed("groups")("none was measured"));
    }
    let refs_of_task = |sums: &BTreeMap<TaskId, MissSums>, task: &TaskId| {
        sums.get(task).map_or(0.0, |sum| sum.references / sum.ns)
    };
    let weighted_rate =
        |sums: &BTreeMap<TaskId, MissSums>, rate: &dyn Fn(&TaskId) -> f64, members: &[TaskId]| {
            let total_refs: f64 = members.iter().map(|task| refs_of_task(sums, task)).sum();
            members
                .iter()
                .map(|task| refs_of_task(sums, task) * rate(task))
                .sum::<f64>()
                / total_refs
        };
    let unweighted_rate = |rate: &dyn Fn(&TaskId) -> f64, members: &[TaskId]| {
        members.iter().map(rate).sum::<f64>() / members.len() as f64
    };
    let rate_of =
        |rates: &BTreeMap<TaskId, f64>, task: &TaskId| rates.get(task).copied().unwrap_or(f64::NAN);
    let long_run_rate = |task: &TaskId| {
        group_sums
            .get(task)
            .map_or(f64::NAN, MissSums::misses_per_100_references)
    };
    let own_rate = |task: &TaskId| rate_of(own_ratios, task);
    let expected_rates = |members: &[TaskId]| {
        [
            weighted_rate(&row_sums, &own_rate, members),
            weighted_rate(&row_sums, &long_run_rate, members),
            weighted_rate(&group_sums, &own_rate, members),
            weighted_rate(&group_sums, &long_run_rate, members),
            unweighted_rate(&|task| rate_of(solved_ratios, task), members),
            unweighted_rate(&long_run_rate, members),
        ]
    };
    let errors_of_group = |(members, sum): (&Vec<TaskId>, &MissSums)| {
        expected_rates(members)
            .map(|rate| 100.0 * (rate / sum.misses_per_100_references() - 1.0).abs())
    };
    let errors_by_group: Vec<[f64; 6]> = groups.iter().map(errors_of_group).collect();
    let summarize_form = |form: usize| {
        let errors = || errors_by_group.iter().map(|errors| errors[form]);
        [errors().fold(0.0, f64::max), mean(errors())]
    };
    Ok((0..6).map(summarize_form).collect())
}

/// Misses divided by references of every thread alone on an eighth of the cache.
fn measure_solo_ratios(setting: &NiagaraSetting) -> Result<Vec<f64>> {
    let eighth_setting = NiagaraSetting {
        is_quick: true,
        ..*setting
    };
    let measure_solo_ratio = |(context_index, job): (usize, crate::setup::WorkloadJob)| {
        let mut workload = eighth_setting
            .build_workload(vec![job])?
            .with_length(4_000_000, 8_000_000);
        let cache = workload
            .machine
            .caches
            .last_mut()
            .ok_or_else(|| failed("eighth")("no cache"))?;
        cache.size_bytes /= CONTEXT_COUNT as u64;
        let results = workload.unmanaged_run()?;
        l2_miss_ratio(&results)
            .ok_or_else(|| failed("eighth")(format!("thread {context_index} made no references")))
    };

    casc_jobs(setting.seed)
        .into_iter()
        .enumerate()
        .map(measure_solo_ratio)
        .collect()
}
