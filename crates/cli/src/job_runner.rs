//! Runs the tasks of a sweep: scenarios on the simulated machine, and curves of recordings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use cachemate_pipeline::Pipeline;
use cachemate_sim::machine::SimMachine;
use cachemate_sim::results::RunResults;
use cachemate_sweep::{CurveJob, JobResult, JobRunner, RunError, ScenarioJob, SweepJob};

use crate::args::SizeList;
use crate::commands::mrc;
use crate::fleet_sweep::FleetWorker;
use crate::repro_sweep;
use crate::run_store::source_version;
use crate::session::Session;

/// Runs tasks in this process.
pub struct LocalJobRunner {
    /// Session without output, because many tasks run concurrently.
    session: Session,
    /// Directory of the sweep, which contains results that other tasks need.
    dir: PathBuf,
    /// The fleet of the sweep, whose tasks share its solved caches.
    fleet: FleetWorker,
}

impl LocalJobRunner {
    pub fn new(session: &Session, dir: &Path) -> Self {
        LocalJobRunner {
            session: session.silent(),
            dir: dir.to_path_buf(),
            fleet: FleetWorker::default(),
        }
    }

    fn run_curve(&self, job: &CurveJob) -> Result<JobResult, RunError> {
        let run_error = |error: anyhow::Error| match error.is::<crate::exit::InterruptedError>() {
            true => RunError::Stopped,
            false => RunError::Failed(format!("{error:#}")),
        };
        let measurement = curve_command(job)
            .map_err(RunError::Failed)?
            .measure(&self.session)
            .map_err(run_error)?;
        let full_counts = &measurement.all;
        let to_f64 = |count: Option<u64>| count.map(|count| count as f64);
        let named_figures = [
            ("accesses", Some(full_counts.accesses as f64)),
            ("instructions", to_f64(full_counts.instructions)),
            ("cold_misses", to_f64(full_counts.cold)),
            (
                "miss_ratio_error",
                measurement.sampled.and_then(|sampled| sampled.error),
            ),
        ];
        let figures = named_figures
            .into_iter()
            .map(|(name, value)| (name.to_string(), value))
            .collect();
        let curve = full_counts
            .curve
            .iter()
            .map(|point| (point.bytes, point.miss_ratio))
            .collect();
        Ok(JobResult {
            figures,
            curve,
            detail: None,
        })
    }
}

impl JobRunner for LocalJobRunner {
    fn version(&self) -> String {
        source_version()
    }

    fn find_recording(&self, program: &str) -> Result<Option<PathBuf>, String> {
        cachemate_scenario::recording_of_program(program)
    }

    fn check(&self, job: &SweepJob) -> Result<(), String> {
        match job {
            SweepJob::Scenario(job) => {
                let machine = build_machine(job)?;
                build_pipeline(job, &machine).map(|_| ())
            }
            SweepJob::Curve(job) => curve_command(job).map(|_| ()),
            SweepJob::Repro { .. } | SweepJob::Fleet { .. } => Ok(()),
        }
    }

    fn run(&self, job: &SweepJob, stop: &AtomicBool) -> Result<JobResult, RunError> {
        match job {
            SweepJob::Scenario(job) => run_scenario(job, stop),
            SweepJob::Curve(job) => self.run_curve(job),
            SweepJob::Repro { request, run } => {
                repro_sweep::run_task(&self.dir, request, run, stop)
            }
            SweepJob::Fleet {
                fleet,
                variant,
                cell,
            } => self.fleet.run_task(&self.dir, fleet, *variant, *cell, stop),
        }
    }
}

/// Returns the pipeline for the job's scenario.
fn build_pipeline(job: &ScenarioJob, machine: &SimMachine) -> Result<Pipeline, String> {
    let config = cachemate_scenario::pipeline_config(&job.scenario, &job.machine, machine);
    Pipeline::build(config).map_err(|error| error.to_string())
}

/// Builds the job's machine with the recordings that the sweep has resolved.
fn build_machine(job: &ScenarioJob) -> Result<SimMachine, String> {
    let mut scenario = job.scenario.clone();
    for program in &mut scenario.programs {
        if let Some(path) = job.recordings.get(&program.program) {
            program.program = path.display().to_string();
        }
    }
    cachemate_scenario::build(&scenario, &job.machine).map_err(|error| error.to_string())
}

fn run_scenario(job: &ScenarioJob, stop: &AtomicBool) -> Result<JobResult, RunError> {
    let mut machine = build_machine(job).map_err(RunError::Failed)?;
    let pipeline = build_pipeline(job, &machine).map_err(RunError::Failed)?;
    machine.set_first_window(pipeline.config().first_window);
    let machine_stop = machine.stop_flag();
    let outcome = run_until_stopped(&machine_stop, stop, || pipeline.run(machine, |_, _| true));
    if stop.load(Ordering::Relaxed) {
        return Err(RunError::Stopped);
    }
    let mut machine = outcome.map_err(|error| RunError::Failed(error.to_string()))?;
    let mut results = machine.collect_results();
    // Paths of recordings are removed, because the result must not depend on them.
    for task in &mut results.tasks {
        let recording = job
            .recordings
            .iter()
            .find(|(_, path)| path.display().to_string() == task.name);
        if let Some((program, _)) = recording {
            task.name.clone_from(program);
        }
    }
    let detail = job
        .detail
        .then(|| serde_json::to_value(&results))
        .transpose();
    let detail = detail.map_err(|error| RunError::Failed(error.to_string()))?;
    Ok(JobResult {
        figures: run_figures(&results),
        curve: Vec::new(),
        detail,
    })
}

/// Calls `run`, and meanwhile copies the stop flag to the machine's own flag, so that the run ends within a window. The two
/// are separate, because a machine may also stop by itself.
pub fn run_until_stopped<T>(
    machine_stop: &Arc<AtomicBool>,
    stop: &AtomicBool,
    run: impl FnOnce() -> T,
) -> T {
    let (done_sender, done_receiver) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while done_receiver.recv_timeout(Duration::from_millis(50))
                == Err(RecvTimeoutError::Timeout)
            {
                if stop.load(Ordering::Relaxed) {
                    machine_stop.store(true, Ordering::Relaxed);
                }
            }
        });
        let outcome = run();
        drop(done_sender);
        outcome
    })
}

/// Returns the figures of a run that reports show.
fn run_figures(results: &RunResults) -> BTreeMap<String, Option<f64>> {
    let cycles = results.elapsed_cycles as f64;
    let instructions: u64 = results.tasks.iter().map(|task| task.instructions).sum();
    let sum_last_level = |metric: fn(&cachemate_sim::results::MissBreakdown) -> u64| -> u64 {
        results
            .tasks
            .iter()
            .filter_map(|task| task.levels.last())
            .map(metric)
            .sum()
    };
    let (references, misses) = (
        sum_last_level(|level| level.references),
        sum_last_level(|level| level.misses),
    );
    let ratio = |a: f64, b: f64| (b > 0.0).then(|| a / b);
    let min_instructions = results
        .tasks
        .iter()
        .map(|task| task.instructions as f64)
        .fold(f64::INFINITY, f64::min);
    let bytes_per_cycle: f64 = results
        .memory
        .iter()
        .map(|memory| memory.bytes_per_cycle)
        .sum();
    let named_figures = [
        ("instr_per_cycle", ratio(instructions as f64, cycles)),
        (
            "slowest_task_instr_per_cycle",
            ratio(min_instructions, cycles).filter(|value| value.is_finite()),
        ),
        (
            "llc_mpki",
            ratio(1000.0 * misses as f64, instructions as f64),
        ),
        ("llc_miss_ratio", ratio(misses as f64, references as f64)),
        ("memory_bytes_per_cycle", Some(bytes_per_cycle)),
        ("busy_share", Some(results.busy_share)),
    ];
    named_figures
        .into_iter()
        .map(|(name, value)| (name.to_string(), value))
        .collect()
}

/// Builds the command that measures a curve.
fn curve_command(job: &CurveJob) -> Result<mrc::Mrc, String> {
    let sizes = job
        .sizes
        .as_deref()
        .map(str::parse::<SizeList>)
        .transpose()
        .map_err(|problem| format!("sizes: {problem}"))?;
    mrc::Mrc::for_sweep(&job.recording, job.line_bytes, sizes, job.sample, job.seed)
}
