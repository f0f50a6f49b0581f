//! AV-4, AV-5, AV-8, AV-9 (Table 5, Figures 7 to 11): eight jobs on a Pentium 4 Xeon with Hyper-Threading, whose own
//! scheduler takes advice on which jobs should not run together.
//!
//! As in the paper, the machine cannot count by super set, so vectors come from a solo profile of every program,
//! recorded on a machine that can. Two choices were made before running. Every job has the length of a solo run over a
//! fixed number of time slices; the paper's training inputs have different lengths, which it does not state. Each
//! program has one mean vector instead of one for every 50 million instructions, because our programs have no phases of
//! that length at this scale.

use cachemate_core::{
    CacheLevel, Estimate, Fact, FactSource, Profile, ProfilerConfig, TaskId, WindowLength, median,
};
use cachemate_locality::activity::common_active_count;
use cachemate_report::figure::{Axis, BarChart};
use serde::{Deserialize, Serialize};

use super::bits::{Thresholds, combine_samples};
use super::samples::{LEVELS, TaskActivity, sample_workload};
use crate::seeded_runs::SeededRuns;
use crate::setup::{ManagedRun, Workload, WorkloadJob, build_pipeline};
use crate::{
    DataPoint, ExperimentContext, Finding, ReproError, Result, ResultFigure, at_time_scale,
    bar_groups, mean,
};

const MACHINE: &str = "p4-xeon-ht";
const MACHINE_WITHOUT_SUPER_SETS: &str = "p4-xeon-ht?counters.sampler=tagged";

/// Table 5.
const PAPER_WORKLOADS: [[&str; 8]; 6] = [
    [
        "gzip", "vpr", "gcc", "mesa", "art", "mcf", "equake", "crafty",
    ],
    [
        "parser", "gap", "vortex", "bzip2", "vpr", "mesa", "crafty", "mcf",
    ],
    [
        "mesa", "twolf", "vortex", "gzip", "gcc", "art", "crafty", "vpr",
    ],
    [
        "gzip", "twolf", "vpr", "bzip2", "gcc", "gap", "mesa", "parser",
    ],
    [
        "equake", "crafty", "mcf", "parser", "art", "gap", "mesa", "vortex",
    ],
    [
        "twolf", "bzip2", "vortex", "gap", "parser", "crafty", "equake", "mcf",
    ],
];

/// Limits on the number of shared bits, of the 32 of the L2 miss vectors. They were chosen before running, as the paper
/// does not state them.
const BAD_PAIR_MIN_BITS: u32 = 16;
const GOOD_PAIR_MAX_BITS: u32 = 8;
const L2_MISS_CELL: usize = 5;

/// Other bounds on falling behind than the default, in samples; the full form shows their costs and gains.
const OTHER_LAG_BOUNDS: [&str; 2] = ["0.25", "inf"];

#[derive(Clone, Copy, Serialize)]
struct WorkloadLength {
    scale: u64,
    /// Time slices of each job's solo run.
    slices_per_job: u64,
    lag_bounds: &'static [&'static str],
}

/// The recording of a program.
#[derive(Serialize, Deserialize)]
struct ProgramRecord {
    activity: TaskActivity,
    instr_per_cycle: f64,
    misses_per_kilo_instr: f64,
}

/// One run of a workload to completion.
#[derive(Serialize, Deserialize)]
struct WorkloadRun {
    /// Cycle at which each job ended.
    ends: Vec<f64>,
    /// Cycle at which the last job ended.
    cycles: f64,
    l2_misses: f64,
    choice_share: f64,
}

#[derive(Serialize, Deserialize)]
struct XeonRun {
    by_default: WorkloadRun,
    vectors: WorkloadRun,
    counters: WorkloadRun,
    /// Runs with the vectors' advice under each of the length's other bounds.
    bounded: Vec<WorkloadRun>,
    choices: PairingCounts,
}

/// Pairs of co-runners under the default scheduler, sampled once a slice, from either side.
#[derive(Default, Serialize, Deserialize)]
struct PairingCounts {
    good: u32,
    moderate: u32,
    bad: u32,
    bad_with_better: u32,
    better_at_bad: u32,
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let length = context.pick(
        WorkloadLength {
            scale: 200,
            slices_per_job: 6,
            lag_bounds: &[],
        },
        WorkloadLength {
            scale: 50,
            slices_per_job: 12,
            lag_bounds: &OTHER_LAG_BOUNDS,
        },
    );
    let mut distinct_programs: Vec<&'static str> =
        PAPER_WORKLOADS.iter().flatten().copied().collect();
    distinct_programs.sort_unstable();
    distinct_programs.dedup();
    let program_records = context.run_cases(
        &distinct_programs,
        |program, seed| (program, seed, length),
        record_program,
    )?;
    let workloads: Vec<usize> = (0..PAPER_WORKLOADS.len()).collect();
    let inputs = |workload: usize, seed| WorkloadInputs {
        workload,
        seed,
        length,
        thresholds: Thresholds::mean_of(
            program_records
                .of_seed(seed)
                .map(|recorded| &recorded.activity),
        ),
        records: PAPER_WORKLOADS[workload]
            .iter()
            .filter_map(|name| program_records.get(name, seed))
            .collect(),
    };
    let runs = context.run_cases(&workloads, inputs, run_workload)?;
    let findings = [
        opportunity_findings(&runs),
        finish_times(&runs, length.lag_bounds),
        counter_findings(&runs),
    ];
    Ok(at_time_scale(length.scale as f64, findings.concat()))
}

fn slice_cycles(workload: &Workload) -> u64 {
    let ns = u128::from(workload.machine.os.time_slice_ns);
    (ns * u128::from(workload.machine.hertz) / 1_000_000_000) as u64 / workload.options.scale
}

fn record_program(
    context: &ExperimentContext<'_>,
    &(program, seed, length): &(&'static str, u64, WorkloadLength),
) -> Result<ProgramRecord> {
    context.report_progress(&format!("{program} alone, seed {seed}"));

    let mut workload =
        Workload::from_machine_name(MACHINE, vec![WorkloadJob::new(program, 10 * seed)], seed)?;
    workload.options.scale = length.scale;
    // After two slices of warm-up, the rest is the profile, in samples of 5 M cycles at the papers' scale.
    let slice_samples = slice_cycles(&workload) * length.scale / super::SAMPLE_CYCLES;
    let (samples, results) = sample_workload(
        workload,
        2 * slice_samples,
        length.slices_per_job * slice_samples,
    )?;
    let no_sample_error = || ReproError::Failed(program.to_string(), "no sample".to_string());
    let total_activity = combine_samples(samples.iter().map(|sample| &sample.tasks[0]))
        .ok_or_else(no_sample_error)?;
    let misses = results
        .level_breakdown(LEVELS[2])
        .map_or(0.0, |l2| l2.misses as f64);
    let instructions = results
        .tasks
        .first()
        .map_or(0, |task| task.instructions)
        .max(1) as f64;
    let (instr_per_cycle, misses_per_kilo_instr) = (
        results.instructions_per_cycle(),
        1000.0 * misses / instructions,
    );
    Ok(ProgramRecord {
        activity: total_activity,
        instr_per_cycle,
        misses_per_kilo_instr,
    })
}

/// A workload of [`PAPER_WORKLOADS`] by its position, with the recordings that give its jobs their lengths and
/// profiles.
#[derive(Serialize)]
struct WorkloadInputs<'a> {
    workload: usize,
    seed: u64,
    length: WorkloadLength,
    /// Thresholds from the recordings of all programs.
    thresholds: Thresholds,
    /// Recordings of the workload's programs, in their order.
    records: Vec<&'a ProgramRecord>,
}

fn run_workload(context: &ExperimentContext<'_>, inputs: &WorkloadInputs<'_>) -> Result<XeonRun> {
    let WorkloadInputs {
        workload: workload_index,
        seed,
        length,
        thresholds,
        ref records,
    } = *inputs;
    context.report_progress(&format!(
        "eight jobs on two contexts, workload {workload_index}, seed {seed}"
    ));

    let programs = &PAPER_WORKLOADS[workload_index];
    let mut workload = Workload::from_machine_name(MACHINE_WITHOUT_SUPER_SETS, Vec::new(), seed)?;
    workload.options.scale = length.scale;
    let solo_cycles = (length.slices_per_job * slice_cycles(&workload)) as f64;
    let recorded_job = |(job_index, (program, recorded)): (usize, (&&str, &&ProgramRecord))| {
        let mut job = WorkloadJob::new(program, 10 * seed + job_index as u64);
        job.instructions = Some((solo_cycles * recorded.instr_per_cycle) as u64);
        job
    };
    workload.jobs = programs
        .iter()
        .zip(records)
        .enumerate()
        .map(recorded_job)
        .collect();
    // The length exceeds the longest possible run, because the run ends with the last job.
    let workload = workload.with_length(0, 1_000 * solo_cycles as u64);
    let profiles: Vec<Profile> = records
        .iter()
        .map(|recorded| recorded_profile(recorded))
        .collect();
    let default_run = run_managed(&workload, "default", "", Vec::new())?;
    let vector_run = run_managed(
        &workload,
        "activity-vector",
        "form = \"advice\"\n",
        profiles.clone(),
    )?;
    let run_bounded = |&bound: &&'static str| {
        let parameters = format!("form = \"advice\"\nmax_lag_samples = {bound}\n");
        summarize_run(&run_managed(
            &workload,
            "activity-vector",
            &parameters,
            profiles.clone(),
        )?)
    };
    let runs_by_bound = length
        .lag_bounds
        .iter()
        .map(run_bounded)
        .collect::<Result<_>>()?;
    let counter_run = run_managed(
        &workload,
        "counter-driven",
        "form = \"advice\"\n",
        profiles.clone(),
    )?;
    let bits: Vec<_> = records
        .iter()
        .map(|recorded| thresholds.vectors_of(&recorded.activity)[L2_MISS_CELL].clone())
        .collect();
    let default_pairings =
        count_pairings(&default_run, |a, b| common_active_count(&bits[a], &bits[b]));
    Ok(XeonRun {
        by_default: summarize_run(&default_run)?,
        vectors: summarize_run(&vector_run)?,
        counters: summarize_run(&counter_run)?,
        bounded: runs_by_bound,
        choices: default_pairings,
    })
}

fn recorded_profile(record: &ProgramRecord) -> Profile {
    let misses = vec![(512 << 10, Estimate::exact(record.misses_per_kilo_instr))];
    let mut profile =
        Profile::default().with_misses(CacheLevel::L2, misses, FactSource::ExactTrace);
    let samples = LEVELS.iter().copied().zip(record.activity.iter().cloned());
    profile.locality.activity = samples
        .map(|(level, counts)| (level, Fact::new(counts, FactSource::ExactTrace, 0)))
        .collect();
    profile
}

fn run_managed(
    base_workload: &Workload,
    policy: &str,
    parameters: &str,
    profiles: Vec<Profile>,
) -> Result<ManagedRun> {
    let ns = base_workload.machine.os.time_slice_ns;
    let oracle = ProfilerConfig::Oracle { profiles };
    let config = base_workload.pipeline(
        policy,
        &format!("window_ns = {ns}\n{parameters}"),
        vec![oracle],
        WindowLength::Time { ns },
    );
    base_workload.run_managed(build_pipeline(config)?)
}

fn summarize_run(run: &ManagedRun) -> Result<WorkloadRun> {
    let mut job_end_cycles = vec![None; run.results.tasks.len()];
    let mut elapsed_cycles = 0;
    for record in &run.records {
        elapsed_cycles += record.observation.span.elapsed_cycles.unwrap_or(0);
        for task in record.observation.tasks.iter().filter(|task| task.exited) {
            job_end_cycles[task.task.0 as usize] = Some(elapsed_cycles as f64);
        }
    }
    let ends: Option<Vec<f64>> = job_end_cycles.into_iter().collect();
    let ends = ends
        .ok_or_else(|| ReproError::Failed(MACHINE.to_string(), "a job did not end".to_string()))?;

    let dispatcher = run.results.dispatcher;
    Ok(WorkloadRun {
        cycles: ends.iter().copied().fold(0.0, f64::max),
        ends,
        l2_misses: run
            .results
            .level_breakdown(LEVELS[2])
            .map_or(f64::NAN, |l2| l2.misses as f64),
        choice_share: dispatcher.contested_picks as f64 / dispatcher.picks.max(1) as f64,
    })
}

fn count_pairings(run: &ManagedRun, shared_bits: impl Fn(usize, usize) -> u32) -> PairingCounts {
    let mut counts = PairingCounts::default();
    for record in &run.records {
        let live_tasks = || record.observation.tasks.iter().filter(|task| !task.exited);
        let job_index = |task: TaskId| task.0 as usize;
        let running_jobs: Vec<usize> = live_tasks()
            .filter(|task| task.cpu.is_some())
            .map(|task| job_index(task.task))
            .collect();
        let waiting_jobs: Vec<usize> = live_tasks()
            .filter(|task| task.cpu.is_none())
            .map(|task| job_index(task.task))
            .collect();
        let [first_job, second_job] = running_jobs[..] else {
            continue;
        };
        let bits = shared_bits(first_job, second_job);

        // Counted from the side of either context.
        for kept_job in [first_job, second_job] {
            let better_count = waiting_jobs
                .iter()
                .filter(|&&task| shared_bits(kept_job, task) < bits)
                .count() as u32;
            counts.good += u32::from(bits < GOOD_PAIR_MAX_BITS);
            counts.moderate += u32::from((GOOD_PAIR_MAX_BITS..=BAD_PAIR_MIN_BITS).contains(&bits));
            if bits > BAD_PAIR_MIN_BITS {
                counts.bad += 1;
                counts.bad_with_better += u32::from(better_count > 0);
                counts.better_at_bad += better_count;
            }
        }
    }

    counts
}

/// Runs by workload of Table 5 and seed.
type XeonRuns = SeededRuns<usize, XeonRun>;

fn declared_mean(name: &str, runs: &XeonRuns, metric: impl Fn(&XeonRun) -> f64) -> Finding {
    let mean_of = |runs: &[&XeonRun]| {
        mean(
            runs.iter()
                .map(|run| metric(run))
                .filter(|value| value.is_finite()),
        )
    };
    Finding::declared(name, &runs.per_seed(mean_of))
}

fn points_by_workload(
    runs: &XeonRuns,
    series: &str,
    metric: impl Fn(&XeonRun) -> f64,
) -> Vec<DataPoint> {
    (0..PAPER_WORKLOADS.len())
        .map(|workload| runs.point(workload, series, format!("WL{workload}"), &metric))
        .collect()
}

fn opportunity_findings(runs: &XeonRuns) -> Vec<Finding> {
    let choice_count =
        |choices: &PairingCounts| f64::from(choices.good + choices.moderate + choices.bad);
    let bad_share =
        move |run: &XeonRun| 100.0 * f64::from(run.choices.bad) / choice_count(&run.choices);
    let good_share =
        move |run: &XeonRun| 100.0 * f64::from(run.choices.good) / choice_count(&run.choices);
    let share_with_better =
        |run: &XeonRun| 100.0 * f64::from(run.choices.bad_with_better) / f64::from(run.choices.bad);
    let mean_better_choices =
        |run: &XeonRun| f64::from(run.choices.better_at_bad) / f64::from(run.choices.bad);
    let choice_percent = |run: &XeonRun| 100.0 * run.by_default.choice_share;
    let bad_pair_finding = declared_mean("av-4-bad-picks", runs, bad_share);
    let better_finding = declared_mean("av-4-better-job-waited", runs, share_with_better);
    let choices_finding = declared_mean("av-9-choices", runs, choice_percent);
    let points = [
        points_by_workload(runs, "bad, %", bad_share),
        points_by_workload(runs, "good, %", good_share),
    ]
    .concat();

    let better_points = [
        points_by_workload(runs, "with a better one, %", share_with_better),
        points_by_workload(runs, "better ones", mean_better_choices),
    ];
    vec![
        bad_pair_finding.with_points(points).with_note(
            "Bad is above 16 of 32 shared bits, good below 8; the paper does not state its limits. Looked at once a slice, \
             from the side of either context.",
        ),
        better_finding.with_points(better_points.concat()),
        choices_finding.with_points(points_by_workload(runs, "calls with a choice, %", choice_percent)).with_note(
            "There are no system tasks here, which made up the rest of the paper's calls: what is left are calls after jobs have ended.",
        ),
    ]
}

/// The change of each job's finish time in percent, ascending.
fn finish_delays_percent(changed_run: &WorkloadRun, baseline: &WorkloadRun) -> Vec<f64> {
    let mut delays: Vec<f64> = changed_run
        .ends
        .iter()
        .zip(&baseline.ends)
        .map(|(end, baseline_end)| 100.0 * (end / baseline_end - 1.0))
        .collect();
    delays.sort_by(f64::total_cmp);
    delays
}

fn first_delay(delays: &[f64]) -> f64 {
    delays[0]
}
fn median_delay(delays: &[f64]) -> f64 {
    median(delays).unwrap_or(f64::NAN)
}
fn last_delay(delays: &[f64]) -> f64 {
    delays[delays.len() - 1]
}

fn finish_times(runs: &XeonRuns, lag_bounds: &[&str]) -> Vec<Finding> {
    let delay_metric = |run: &XeonRun, get: fn(&[f64]) -> f64| {
        get(&finish_delays_percent(&run.vectors, &run.by_default))
    };
    let last_delay_finding =
        declared_mean("av-5-latest-job", runs, |run| delay_metric(run, last_delay));
    let speed_gain_percent =
        |run: &XeonRun| 100.0 * (run.by_default.cycles / run.vectors.cycles - 1.0);
    let saved_misses_percent =
        |run: &XeonRun| 100.0 * (1.0 - run.vectors.l2_misses / run.by_default.l2_misses);
    let speed_finding = declared_mean("av-4-speed", runs, speed_gain_percent);

    let series: [(&str, fn(&[f64]) -> f64); 3] = [
        ("early", first_delay),
        ("median", median_delay),
        ("late", last_delay),
    ];
    let points: Vec<DataPoint> = series
        .iter()
        .flat_map(|(name, get)| {
            points_by_workload(runs, &format!("{name} finish time, % of change"), |run| {
                delay_metric(run, *get)
            })
        })
        .collect();
    let drawn_series =
        ["early", "median", "late"].map(|name| format!("{name} finish time, % of change"));
    let bars = BarChart {
        title: "Finish times by the vectors' advice, change against the default scheduler"
            .to_string(),
        y: Axis::linear("% later"),
        series: series.iter().map(|(name, _)| name.to_string()).collect(),
        groups: bar_groups(&points, &drawn_series.each_ref().map(String::as_str)),
        ..BarChart::default()
    };
    let figure = ResultFigure::bars("av-5-finish-times", &bars);
    let points = [points, other_bound_points(runs, lag_bounds)].concat();
    let gain_points = [
        points_by_workload(runs, "IPC gain, %", speed_gain_percent),
        points_by_workload(runs, "L2 misses saved, %", saved_misses_percent),
    ];

    let note = "Advice changes the order of turns and no job's share of time: a job may be taken before another as long as it is \
                at most a slice ahead of it, and no job that is a sample behind the others is passed over.";
    vec![
        last_delay_finding.with_points(points).with_figure(figure),
        speed_finding
            .with_points(gain_points.concat())
            .with_note(note),
    ]
}

/// The late finish times and IPC gains under other bounds, over all workloads and seeds.
fn other_bound_points(runs: &XeonRuns, lag_bounds: &[&str]) -> Vec<DataPoint> {
    let bound_points = |(bound_index, bound): (usize, &&str)| {
        let mean_over_runs = |metric: &dyn Fn(&XeonRun, &WorkloadRun) -> f64| {
            let value = |run: &XeonRun| metric(run, &run.bounded[bound_index]);
            mean(runs.by_seed().map(value))
        };
        let delay = mean_over_runs(&|run, finished| {
            last_delay(&finish_delays_percent(finished, &run.by_default))
        });

        let speed = mean_over_runs(&|run, finished| {
            100.0 * (run.by_default.cycles / finished.cycles - 1.0)
        });
        let bound_label = format!("{bound} samples");
        [
            ("late finish time, %, by bound", delay),
            ("IPC gain, %, by bound", speed),
        ]
        .map(|(series, value)| DataPoint::from_values(series, &bound_label, [value]))
    };

    lag_bounds
        .iter()
        .enumerate()
        .flat_map(bound_points)
        .collect()
}

fn counter_findings(runs: &XeonRuns) -> Vec<Finding> {
    let vectors_over_counters =
        |run: &XeonRun| 100.0 * (run.counters.cycles / run.vectors.cycles - 1.0);
    let counters_over_default =
        |run: &XeonRun| 100.0 * (run.by_default.cycles / run.counters.cycles - 1.0);
    let finding = declared_mean("av-8-miss-counters", runs, vectors_over_counters);
    let points = [
        points_by_workload(runs, "counters over vectors, %", vectors_over_counters),
        points_by_workload(runs, "IPC gain of counters, %", counters_over_default),
    ];
    vec![finding.with_points(points.concat())]
}
