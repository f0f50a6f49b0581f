//! TC-6 and TC-7: does the clustering depend on the shMaps' size or on the sampling rate, and how long must sharing
//! last?

use cachemate_core::{Observation, ProbeEvidence, ProbeResult, ShMapParameters, TaskId, WindowRecord};
use cachemate_locality::shmap::SharingCriteria;
use cachemate_pipeline::OfflineProfiler;
use cachemate_policy::clustering::{
    ClusteringMethod, Clusters, THRESHOLD, THRESHOLD_SAMPLES_PER_THREAD, ThreadMap, find_clusters, scaled_threshold,
};
use cachemate_report::figure::{Axis, Chart, ChartPoint, Series};
use serde::{Deserialize, Serialize};

use super::setup::{
    ClusterCase, ClusterSetting, SAMPLES_PER_THREAD, SMALL_MACHINE, TIME_SCALE, ThreadPlacement, adjusted_rand_index,
    paper_programs, sharing_profiler,
};
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure};

const ENTRY_COUNTS: [usize; 3] = [128, 256, 512];
const SAMPLING_INTERVALS: [usize; 5] = [1, 2, 10, 50, 100];
const FULL_SAMPLING_PARAMETERS: &str = "activation_share = 0.02\none_in = 1";

/// The observations of a run's first round of sampling.
fn first_round(records: &[WindowRecord]) -> Vec<Observation> {
    let has_samples = |record: &&WindowRecord| {
        record.observation.probe_results.iter().any(|answer| matches!(answer.evidence, ProbeEvidence::Samples { .. }))
    };
    let probe = records
        .iter()
        .find(has_samples)
        .and_then(|record| record.observation.probe_results.first())
        .map(|answer| answer.probe);
    let observations = records
        .iter()
        .filter(has_samples)
        .filter(|record| record.observation.probe_results.first().map(|a| a.probe) == probe);
    observations.map(|record| record.observation.clone()).collect()
}

/// The same observations with only every `one_in`th sample of each window.
fn keep_every_nth_sample(round: &[Observation], one_in: usize) -> Vec<Observation> {
    let thin_result = |answer: &ProbeResult| {
        let mut answer = answer.clone();
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

fn cluster_round(round: &[Observation], threads: usize, entries: usize, method: ClusteringMethod) -> Clusters {
    let mut profiler = OfflineProfiler::new(&[sharing_profiler(entries)]);
    for observation in round {
        profiler.update(observation);
    }
    let profiles = profiler.profiles();
    let map_of = |thread: usize| profiles.get(&TaskId(thread as u32)).and_then(|profile| profile.sharing_map());
    let map_counters = |thread: usize| map_of(thread).map(|map| map.counters.as_slice());
    let maps: Vec<ThreadMap<'_>> = (0..threads)
        .map(|thread| ThreadMap { counters: map_counters(thread).unwrap_or(&[]), previous_cluster: None })
        .collect();
    let count_samples = |answer: &ProbeResult| match &answer.evidence {
        ProbeEvidence::Samples { samples, .. } => samples.len(),
        _ => 0,
    };
    let sample_count: usize = round.iter().flat_map(|observation| &observation.probe_results).map(count_samples).sum();
    let sampled_share = sample_count as f64 / threads.max(1) as f64 / THRESHOLD_SAMPLES_PER_THREAD;
    let sharing = SharingCriteria::default();
    find_clusters(method, &maps, &sharing, scaled_threshold(THRESHOLD, sampled_share, sharing.floor))
}

/// Cluster labels; each unclustered thread has its own label.
fn label_clusters(clusters: &Clusters) -> Vec<usize> {
    clusters
        .cluster_by_thread
        .iter()
        .enumerate()
        .map(|(index, cluster)| cluster.unwrap_or(clusters.cluster_count + index))
        .collect()
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
    case: &ClusterCase,
    seed: u64,
) -> Result<AgreementSensitivity, ReproError> {
    // Twice the samples, so that half the entries have as many; a first round that is not over within six windows has
    // fewer.
    let short_setting = ClusterSetting::new(context, SMALL_MACHINE, case, seed);
    let setting = ClusterSetting {
        samples_per_thread: 2 * SAMPLES_PER_THREAD,
        warm_up_windows: 6,
        measured_windows: 1,
        ..short_setting
    };
    let first_round =
        first_round(&setting.run(&ThreadPlacement::Automatic(FULL_SAMPLING_PARAMETERS.to_string()))?.records);
    let true_labels: Vec<usize> =
        case.true_groups(seed)?.into_iter().map(|group| group.map_or(usize::MAX, |g| g as usize)).collect();
    let cluster_labels = |entries| {
        label_clusters(&cluster_round(&first_round, true_labels.len(), entries, ClusteringMethod::CoClusters))
    };
    let labels_at_rate = |one_in| {
        label_clusters(&cluster_round(
            &keep_every_nth_sample(&first_round, one_in),
            true_labels.len(),
            ShMapParameters::default().entries,
            ClusteringMethod::CoClusters,
        ))
    };
    let reference_labels = cluster_labels(ShMapParameters::default().entries);
    Ok(AgreementSensitivity {
        by_size: ENTRY_COUNTS
            .iter()
            .map(|&entries| adjusted_rand_index(&cluster_labels(entries), &reference_labels))
            .collect(),
        own_by_size: ENTRY_COUNTS
            .iter()
            .map(|&entries| adjusted_rand_index(&cluster_labels(entries), &true_labels))
            .collect(),
        own_by_rate: SAMPLING_INTERVALS
            .iter()
            .map(|&rate| adjusted_rand_index(&labels_at_rate(rate), &true_labels))
            .collect(),
        own_one_pass: adjusted_rand_index(
            &label_clusters(&cluster_round(
                &first_round,
                true_labels.len(),
                ShMapParameters::default().entries,
                ClusteringMethod::OnePass,
            )),
            &true_labels,
        ),
    })
}

pub(super) fn size_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let mut cases = paper_programs();
    if context.quick {
        cases.truncate(2);
    }
    let indices: Vec<usize> = (0..cases.len()).collect();
    let runs = context.run_cases(
        module_path!(),
        &indices,
        |case, seed| format!("TC-6 {:?} {seed}", cases[case]),
        |case, seed| {
            context.report_progress(&format!("TC-6 {} seed {seed}", cases[case].name));
            measure_sensitivity(context, &cases[case], seed)
        },
    )?;
    let mut points = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let mut add = |label: String, value: &dyn Fn(&AgreementSensitivity) -> f64| {
            points.push(runs.point(index, label, case.name, value));
        };
        for (size_index, entries) in ENTRY_COUNTS.iter().enumerate() {
            add(format!("{entries} entries, against 256"), &|result| result.by_size[size_index]);
            add(format!("{entries} entries, against the program's partition"), &|result| {
                result.own_by_size[size_index]
            });
        }
        for (rate_index, one_in) in SAMPLING_INTERVALS.iter().enumerate() {
            add(format!("1 in {one_in}, against the program's partition"), &|result| result.own_by_rate[rate_index]);
        }
        add("one pass, 256 entries".to_string(), &|result| result.own_one_pass);
    }
    let per_seed = runs.least_per_seed(|result| result.by_size.iter().copied().fold(f64::INFINITY, f64::min));
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

/// Cumulative work of all threads by nominal second, from the end of the quiet windows on.
fn cumulative_work(records: &[WindowRecord]) -> Vec<(f64, f64)> {
    let (mut work, mut work_by_second) = (0.0, vec![(0.0, 0.0)]);
    let quiet =
        records.iter().find(|record| record.observation.window >= QUIET_WINDOWS).map(|r| r.observation.span.start_ns);
    let Some(decision_start_ns) = quiet else { return work_by_second };
    for record in records.iter().filter(|record| record.observation.span.start_ns >= decision_start_ns) {
        work += record.observation.tasks.iter().filter_map(|task| task.progress).sum::<f64>();
        let span = record.observation.span;
        work_by_second.push(((span.start_ns + span.elapsed_ns - decision_start_ns) as f64 / 1e9, work));
    }
    work_by_second
}

fn work_at(curve: &[(f64, f64)], time: f64) -> Option<f64> {
    let pair = curve.windows(2).find(|pair| pair[0].0 <= time && time <= pair[1].0)?;
    let (earlier_point, later_point) = (pair[0], pair[1]);
    let share = if later_point.0 > earlier_point.0 {
        (time - earlier_point.0) / (later_point.0 - earlier_point.0)
    } else {
        0.0
    };
    Some(earlier_point.1 + share * (later_point.1 - earlier_point.1))
}

/// Work under the automatic placement minus that of the default, in seconds of the default's work, by time since the
/// policy started.
fn measure_advantage(
    context: &ExperimentContext<'_>,
    case: &ClusterCase,
    seed: u64,
) -> Result<Vec<(f64, f64)>, ReproError> {
    let setting = ClusterSetting {
        warm_up_windows: QUIET_WINDOWS,
        measured_windows: context.pick(4, 16),
        ..ClusterSetting::new(context, SMALL_MACHINE, case, seed)
    };
    let automatic_placement = ThreadPlacement::Automatic("activation_share = 0.02".to_string());
    let automatic_work = cumulative_work(&setting.run_after_windows(QUIET_WINDOWS, &automatic_placement)?.records);
    let default_work = cumulative_work(&setting.run_after_windows(QUIET_WINDOWS, &ThreadPlacement::Default)?.records);
    let Some(&(end_seconds, work)) = default_work.last().filter(|(_, work)| *work > 0.0) else { return Ok(Vec::new()) };
    let lead_by_second = |&(time, work_done): &(f64, f64)| {
        Some((time, (work_done - work_at(&default_work, time)?) / work * end_seconds))
    };
    Ok(automatic_work.iter().filter_map(lead_by_second).collect())
}

/// Time from which on the lead stays positive; `None` if it does not within the run.
fn break_even_seconds(lead: &[(f64, f64)]) -> Option<f64> {
    let last_non_positive = lead.iter().rposition(|&(_, lead)| lead <= 0.0)?;
    lead.get(last_non_positive + 1).map(|&(time, _)| time)
}

pub(super) fn phase_findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let mut cases = paper_programs();
    if context.quick {
        cases.truncate(1);
    }
    let indices: Vec<usize> = (0..cases.len()).collect();
    let leads = context.run_cases(
        module_path!(),
        &indices,
        |case, seed| format!("TC-7 {:?} {seed}", cases[case]),
        |case, seed| {
            context.report_progress(&format!("TC-7 {} seed {seed}", cases[case].name));
            measure_advantage(context, &cases[case], seed)
        },
    )?;
    let mut points = Vec::new();
    let mut series = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let seconds: Vec<f64> = leads.of_case(number).filter_map(|lead| break_even_seconds(lead)).collect();
        points.push(DataPoint::from_values("break-even, nominal seconds", case.name, &seconds));
        points.push(DataPoint::from_values("runs that broke even", case.name, &[seconds.len() as f64]));
        if let Some(lead) = leads.of_case(number).next() {
            let points = lead.iter().map(|&(time, lead)| ChartPoint::new(time, lead)).collect();
            series.push(Series { name: case.name.to_string(), points, ..Series::default() });
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
