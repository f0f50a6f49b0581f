//! Options that select an engine, and the reporting of a sweep's progress.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_sweep::engines::dask::{DaskEngine, DaskOptions};
use cachemate_sweep::engines::hq::{HqEngine, HqOptions};
use cachemate_sweep::engines::local::LocalEngine;
use cachemate_sweep::engines::slurm::SlurmEngine;
use cachemate_sweep::{
    DriveOptions, Inputs, JobRunner, Manifest, Store, SweepProgress, SweepSummary, SweepTask,
    TaskEngine, WorkerCommand, drive,
};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;

use crate::exit::UsageError;
use crate::session::Session;

/// Options of commands that submit tasks to an engine.
#[derive(Args)]
pub struct EngineArgs {
    /// Engine that runs the tasks
    #[arg(long, value_enum)]
    pub engine: Option<EngineName>,
    /// Concurrent tasks on this machine: local threads, a local Dask cluster, a local HyperQueue worker [default: all CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub workers: Option<u16>,
    /// How often a failed task is retried
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub retries: u32,
    /// Tasks per job of the engine, for engines with costly jobs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    batch_size: u16,
    /// Address of a running Dask scheduler, or directory of a running HyperQueue server [default: start one on this machine]
    #[arg(long, value_name = "WHERE")]
    scheduler: Option<String>,
    /// Additional argument for sbatch, such as --submit-arg=--partition=long
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    submit_arg: Vec<String>,
    /// Python interpreter with Dask installed
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,
    /// HyperQueue command
    #[arg(long, value_name = "PATH", default_value = "hq")]
    hq: PathBuf,
    /// cachemate command on the workers' machines [default: this one]
    #[arg(long, value_name = "PATH")]
    worker_command: Option<PathBuf>,
    /// Abandon an engine that holds no task and has returned no result for this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    idle_timeout: u64,
    /// Treat a worker as dead after this many seconds without a heartbeat
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..))]
    pub heartbeat_timeout: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum EngineName {
    /// Threads of this process
    #[default]
    Local,
    /// Slurm job arrays
    Slurm,
    /// A Dask scheduler and its workers
    Dask,
    /// HyperQueue
    Hq,
}

/// Time between two progress lines in a log.
const LOG_PERIOD: Duration = Duration::from_secs(30);

impl EngineArgs {
    pub fn name(&self) -> String {
        let value = self.engine.unwrap_or_default().to_possible_value();
        value.map_or(String::new(), |value| value.get_name().to_string())
    }

    /// Runs tasks until no result is missing, and reports progress.
    pub fn drive_tasks(
        &self,
        session: &Session,
        store: &Arc<Store>,
        manifest: &Manifest,
        tasks: &[SweepTask],
        job_runner: &Arc<dyn JobRunner>,
        is_silent: bool,
    ) -> anyhow::Result<SweepSummary> {
        let mut engine = self.build_engine(store, manifest, job_runner)?;
        let bar = session.progress_bar("sweep", Some(tasks.len() as u64));
        let mut reporter = ProgressReporter::new(session, &bar, is_silent);
        let options = DriveOptions {
            retries: self.retries,
            idle_timeout: Duration::from_secs(self.idle_timeout),
        };
        let stop = session.interrupt_flag();
        let outcome = drive(
            store,
            tasks,
            &mut *engine,
            &options,
            &mut |progress| reporter.report(progress),
            &stop,
        );
        bar.finish_and_clear();
        Ok(outcome?)
    }

    fn build_engine(
        &self,
        store: &Arc<Store>,
        manifest: &Manifest,
        job_runner: &Arc<dyn JobRunner>,
    ) -> anyhow::Result<Box<dyn TaskEngine>> {
        let cpu_count = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = self.workers.map_or(cpu_count, usize::from);
        let batch_size = usize::from(self.batch_size);
        let name = self.engine.unwrap_or_default();
        if name == EngineName::Local {
            let inputs =
                Arc::new(Inputs::open(store, &manifest.header).map_err(anyhow::Error::msg)?);
            return Ok(Box::new(LocalEngine::new(
                Arc::clone(store),
                Arc::clone(job_runner),
                inputs,
                workers,
                self.retries,
            )));
        }
        let program = match &self.worker_command {
            Some(program) => program.clone(),
            None => std::env::current_exe().context("cannot find the path of this command")?,
        };
        let dir = store.path().to_path_buf();
        let worker_command = WorkerCommand {
            program,
            dir,
            retries: self.retries,
            heartbeat_timeout_s: self.heartbeat_timeout,
        };
        let scheduler = self.scheduler.clone();
        Ok(match name {
            EngineName::Slurm if scheduler.is_some() => {
                bail!(UsageError(
                    "--scheduler: not used with slurm, whose own configuration names its controller".to_string()
                ))
            }
            EngineName::Slurm => Box::new(SlurmEngine::new(
                worker_command,
                batch_size,
                self.submit_arg.clone(),
            )),
            EngineName::Dask => {
                let python = self.python.clone();
                Box::new(DaskEngine::new(
                    worker_command,
                    DaskOptions {
                        python,
                        scheduler,
                        workers,
                        batch_size,
                    },
                ))
            }
            EngineName::Hq | EngineName::Local => {
                let server_dir = scheduler.map(PathBuf::from);
                Box::new(HqEngine::new(
                    worker_command,
                    HqOptions {
                        program: self.hq.clone(),
                        server_dir,
                        workers,
                        batch_size,
                    },
                ))
            }
        })
    }
}

/// Reports progress: as a bar on a terminal, or as periodic lines in a log.
struct ProgressReporter<'a> {
    session: &'a Session,
    bar: &'a ProgressBar,
    is_silent: bool,
    start_state: Option<(Instant, usize)>,
    last_log_time: Instant,
    message: Option<String>,
}

impl<'a> ProgressReporter<'a> {
    fn new(session: &'a Session, bar: &'a ProgressBar, is_silent: bool) -> Self {
        ProgressReporter {
            session,
            bar,
            is_silent,
            start_state: None,
            last_log_time: Instant::now(),
            message: None,
        }
    }

    fn report(&mut self, progress: &SweepProgress) {
        let done_count = progress.finished + progress.failed;
        if self.start_state.is_none() {
            self.start_state = Some((Instant::now(), done_count));
            self.bar.set_position(done_count as u64);
            self.bar.reset_eta();
        }
        self.bar.set_length(progress.total as u64);
        self.bar.set_position(done_count as u64);
        let failure_text = if progress.failed > 0 {
            format!("{} failed", progress.failed)
        } else {
            String::new()
        };
        self.bar.set_message(failure_text);
        if progress.message != self.message {
            self.message.clone_from(&progress.message);
            if let Some(message) = &self.message {
                self.bar.suspend(|| self.session.warn(message));
            }
        }
        if self.bar.is_hidden() && !self.is_silent && self.last_log_time.elapsed() > LOG_PERIOD {
            self.last_log_time = Instant::now();
            self.session.log(&self.progress_line(progress, done_count));
        }
    }

    fn progress_line(&self, progress: &SweepProgress, done_count: usize) -> String {
        let mut line = format!(
            "sweep: {} of {} tasks finished",
            progress.finished, progress.total
        );
        if progress.failed > 0 {
            line.push_str(&format!(", {} failed", progress.failed));
        }
        for (task_count, label) in [(progress.running, "running"), (progress.waiting, "waiting")] {
            line.push_str(
                &task_count
                    .filter(|task_count| *task_count > 0)
                    .map_or(String::new(), |task_count| {
                        format!(", {task_count} {label}")
                    }),
            );
        }
        if let Some((start, count_before)) = self
            .start_state
            .filter(|(_, count_before)| done_count > *count_before)
        {
            let task_seconds = start.elapsed().as_secs_f64() / (done_count - count_before) as f64;
            line.push_str(&format!(
                ", about {} left",
                duration_text(task_seconds * (progress.total - done_count) as f64)
            ));
        }
        line
    }
}

/// Formats a duration in a unit that suits its length.
pub fn duration_text(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
