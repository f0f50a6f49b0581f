//! TC-6 and TC-7: does the clustering depend on the shMaps' size or on the sampling rate, and how long must sharing
//! last?

use cachemate_core::{
    Observation, ProbeEvidence, ProbeResult, ShMapParameters, TaskId, WindowRecord,
};
use cachemate_papers::clustering::ClusteringMethod;
use cachemate_pipeline::build_profilers;
use cachemate_report::figure::{Axis, Chart, ChartPoint, Series};
use serde::{Deserialize, Serialize};

use super::setup::{
    ClusterCase, ClusterSetting, LOW_ACTIVATION, SAMPLES_PER_THREAD, SMALL_MACHINE, TIME_SCALE,
    ThreadPlacement, adjusted_rand_index, cluster_maps, label_clusters, paper_programs,
    sharing_profiler,
};
use crate::statistics::interpolate_at;
use crate::{DataPoint, ExperimentContext, Finding, Result, ResultFigure, least};

const ENTRY_COUNTS: [usize; 3] = [128, 256, 512];
const SAMPLING_INTERVALS: [usize; 5] = [1, 2, 10, 50, 100];
const FULL_SAMPLING_PARAMETERS: &str = "activation_share = 0.02\none_in = 1";

/// The observations of a run's first round of sampling.
fn first_round(records: &[WindowRecord]) -> Vec<Observation> {
    let has_samples = |record: &&WindowRecord| {
        record
            .observation
            .probe_results
            .iter()
            .any(|probe_result| matches!(probe_result.evidence, ProbeEvidence::Samples { .. }))
    };

    let probe = records
        .iter()
        .find(has_samples)
        .and_then(|record| record.observation.probe_results.first())
        .map(|probe_result| probe_result.probe);
    let observations = records
        .iter()
        .filter(has_samples)
        .filter(|record| record.observation.probe_results.first().map(|a| a.probe) == probe);
    observations
        .map(|record| record.observation.clone())
        .collect()
}

/// The same observations with only every `one_in`th sample of each window.
fn keep_every_nth_sample(round: &[Observation], one_in: usize) -> Vec<Observation> {
    let thin_result = |probe_result: &ProbeResult| {
        let mut answer = probe_result.clone();
        if let ProbeEvidence::Samples { samples, .. } = &mut answer.evidence {
            *samples = samples.iter().step_by(one_in).copied().collect();
        }
        answer
    };
    let thinned_observation = |observation: &Observation| Observation {
        probe_results: observation.probe_results.iter().map(thin_result).collect(),
        ..observation.clone()
    };
    round.iter().map(thinned_observation).collect()
}

/// Cluster labels of the threads from the samples of a round.
fn cluster_round(
    round: &[Observation],
    threads: usize,
    entries: usize,
    method: ClusteringMethod,
) -> Vec<usize> {
    let mut profiler = build_profilers(&[sharing_profiler(entries)]);
    for observation in round {
        profiler.update(observation);
    }

    let profiles = profiler.profiles();
    let map_of = |thread: usize| {
        profiles
            .get(&TaskId(thread as u32))
            .and_then(|profile| profile.sharing_map())
    };
    let map_counters = |thread: usize| map_of(thread).map(|map| map.counters.as_slice());
    let maps: Vec<&[u8]> = (0..threads)
        .map(|thread| map_counters(thread).unwrap_or(&[]))
        .collect();

    let count_samples = |probe_result: &ProbeResult| match &probe_result.evidence {
        ProbeEvidence::Samples { samples, .. } => samples.len(),
        _ => 0,
    };
    let sample_count: usize = round
        .iter()
        .flat_map(|observation| &observation.probe_results)
        .map(count_samples)
        .sum();
    label_clusters(&cluster_maps(
        &maps,
        method,
        sample_count as f64 / threads.max(1) as f64,
    ))
}

#[derive(Serialize, Deserialize)]
struct AgreementSensitivity {
    /// Agreement of 128 and 512 entries with 256.
    by_size: Vec<f64>,
    /// Agreement with the program's own partition.
    own_by_size: Vec<f64>,
    own_by_rate: Vec<f64>,
    own_one_pass: f64,
}

fn measure_sensitivity(
    context: &ExperimentContext<'_>,
    &(case, seed): &(&ClusterCase, u64),
) -> Result<AgreementSensitivity> {
    context.report_progress(&format!("TC-6 {} seed {seed}", case.name));

    // Twice the samples, so that half the entries have as many; a first round that is not over within six windows has
    // fewer.
    let short_setting = ClusterSetting::new(context, SMALL_MACHINE, case, seed);
    let setting = ClusterSetting {
        samples_per_thread: 2 * SAMPLES_PER_THREAD,
        warm_up_windows: 6,
        measured_windows: 1,
        ..short_setting
    };
    let first_round = first_round(
        &setting
            .run(&ThreadPlacement::Automatic(
                FULL_SAMPLING_PARAMETERS.to_string(),
            ))?
            .records,
    );
    let true_labels: Vec<usize> = case
        .true_groups(seed)?
        .into_iter()
        .map(|group| group.map_or(usize::MAX, |g| g as usize))
        .collect();
    let default_entries = ShMapParameters::default().entries;
    let labels = |round: &[Observation], entries, method| {
        cluster_round(round, true_labels.len(), entries, method)
    };
    let labels_at_size = |entries| labels(&first_round, entries, ClusteringMethod::CoClusters);
    let labels_at_rate = |one_in| {
        labels(
            &keep_every_nth_sample(&first_round, one_in),
            default_entries,
            ClusteringMethod::CoClusters,
        )
    };
    let one_pass_labels = labels(&first_round, default_entries, ClusteringMethod::OnePass);
    let reference_labels = labels_at_size(default_entries);
    let agreement_at_sizes = |reference: &[usize]| {
        ENTRY_COUNTS
            .map(|entries| adjusted_rand_index(&labels_at_size(entries), reference))
            .to_vec()
    };
    Ok(AgreementSensitivity {
        by_size: agreement_at_sizes(&reference_labels),
        own_by_size: agreement_at_sizes(&true_labels),
        own_by_rate: SAMPLING_INTERVALS
            .map(|rate| adjusted_rand_index(&labels_at_rate(rate), &true_labels))
            .to_vec(),
        own_one_pass: adjusted_rand_index(&one_pass_labels, &true_labels),
    })
}

pub(super) fn size_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let mut cases = paper_programs();
    if context.quick {
        cases.truncate(2);
    }
    let runs = context.run_cases(
        &Vec::from_iter(&cases),
        |case, seed| (case, seed),
        measure_sensitivity,
    )?;

    let mut points = Vec::new();
    for case in &cases {
        let mut add_point = |label: String, value: &dyn Fn(&AgreementSensitivity) -> f64| {
            points.push(runs.point(case, label, case.name, value));
        };
        for (size_index, entries) in ENTRY_COUNTS.iter().enumerate() {
            add_point(format!("{entries} entries, against 256"), &|result| {
                result.by_size[size_index]
            });
            add_point(
                format!("{entries} entries, against the program's partition"),
                &|result| result.own_by_size[size_index],
            );
        }
        for (rate_index, one_in) in SAMPLING_INTERVALS.iter().enumerate() {
            add_point(
                format!("1 in {one_in}, against the program's partition"),
                &|result| result.own_by_rate[rate_index],
            );
        }
        add_point("one pass, 256 entries".to_string(), &|result| {
            result.own_one_pass
        });
    }
    let per_seed = runs.least_per_seed(|result| least(result.by_size.iter()));
    Ok(vec![
        Finding::declared("tc-6-sizes", &per_seed)
        .with_points(points)
        .with_time_scale(TIME_SCALE as f64)
        .with_note(
            format!(
                "One recorded round of {} samples a thread, or as many as six windows bring, per program and seed, its raw samples fed to shMaps of each size: twice \
                 the other experiments' number, as half the entries hold half of what passes the filter; with {SAMPLES_PER_THREAD} the \
                 warehouses came out at 0.53 with 128 entries and 1 with 256 and 512. Sampling rates thin the same round, so \
                 a rate of 1 in 100 has a hundredth of the samples, not a hundred times the time.",
                2 * SAMPLES_PER_THREAD
            ),
        ),
    ])
}

/// Windows without decisions before the policy starts.
const QUIET_WINDOWS: u64 = 2;

/// The cumulative work of all threads by nominal second, from the end of the quiet windows on.
fn cumulative_work(records: &[WindowRecord]) -> Vec<(f64, f64)> {
    let (mut work, mut work_by_second) = (0.0, vec![(0.0, 0.0)]);
    let decision_start = records
        .iter()
        .find(|record| record.observation.window >= QUIET_WINDOWS)
        .map(|r| r.observation.span.start_ns);
    let Some(decision_start_ns) = decision_start else {
        return work_by_second;
    };

    for record in records
        .iter()
        .filter(|record| record.observation.span.start_ns >= decision_start_ns)
    {
        work += record
            .observation
            .tasks
            .iter()
            .filter_map(|task| task.progress)
            .sum::<f64>();
        let span = record.observation.span;
        work_by_second.push((
            (span.start_ns + span.elapsed_ns - decision_start_ns) as f64 / 1e9,
            work,
        ));
    }
    work_by_second
}

/// The work under the automatic placement minus that of the default, in seconds of the default's
/// work, by time since the policy started.
fn measure_advantage(
    context: &ExperimentContext<'_>,
    &(case, seed): &(&ClusterCase, u64),
) -> Result<Vec<(f64, f64)>> {
    context.report_progress(&format!("TC-7 {} seed {seed}", case.name));

    let setting = ClusterSetting {
        warm_up_windows: QUIET_WINDOWS,
        measured_windows: context.pick(4, 16),
        ..ClusterSetting::new(context, SMALL_MACHINE, case, seed)
    };
    let automatic_placement = ThreadPlacement::Automatic(LOW_ACTIVATION.to_string());
    let automatic_work = cumulative_work(
        &setting
            .run_after_windows(QUIET_WINDOWS, &automatic_placement)?
            .records,
    );
    let default_work = cumulative_work(
        &setting
            .run_after_windows(QUIET_WINDOWS, &ThreadPlacement::Default)?
            .records,
    );
    let Some(&(end_seconds, work)) = default_work.last().filter(|(_, work)| *work > 0.0) else {
        return Ok(Vec::new());
    };
    let lead_by_second = |&(time, work_done): &(f64, f64)| {
        Some((
            time,
            (work_done - interpolate_at(&default_work, time, |point| point.0, |point| point.1)?)
                / work
                * end_seconds,
        ))
    };
    Ok(automatic_work.iter().filter_map(lead_by_second).collect())
}

/// The time from which on the lead stays positive; `None` if it does not within the run.
fn break_even_seconds(lead: &[(f64, f64)]) -> Option<f64> {
    let last_non_positive = lead.iter().rposition(|&(_, lead)| lead <= 0.0)?;
    lead.get(last_non_positive + 1).map(|&(time, _)| time)
}

pub(super) fn phase_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let mut cases = paper_programs();
    if context.quick {
        cases.truncate(1);
    }
    let leads = context.run_cases(
        &Vec::from_iter(&cases),
        |case, seed| (case, seed),
        measure_advantage,
    )?;

    let mut points = Vec::new();
    let mut series = Vec::new();
    for case in &cases {
        let seconds: Vec<f64> = leads
            .of_case(case)
            .filter_map(|lead| break_even_seconds(lead))
            .collect();
        points.push(DataPoint::from_values(
            "break-even, nominal seconds",
            case.name,
            &seconds,
        ));
        points.push(DataPoint::from_values(
            "runs that broke even",
            case.name,
            [seconds.len() as f64],
        ));

        if let Some(lead) = leads.of_case(case).next() {
            let points = lead
                .iter()
                .map(|&(time, lead)| ChartPoint::new(time, lead))
                .collect();
            series.push(Series {
                name: case.name.to_string(),
                points,
                ..Series::default()
            });
        }
    }

    let chart = Chart {
        title: "Work ahead of the default scheduler since the policy began".to_string(),
        x: Axis::linear("nominal seconds"),
        y: Axis::linear("seconds of the default's work"),
        series,
        ..Chart::default()
    };
    let figure = ResultFigure::chart("tc-7-break-even", &chart);
    let per_seed = leads.least_per_seed(|lead| break_even_seconds(lead).unwrap_or(f64::INFINITY));
    Ok(vec![
        Finding::declared("tc-7-break-even", &per_seed)
            .with_points(points)
            .with_time_scale(TIME_SCALE as f64)
            .with_figure(figure),
    ])
}
