//! `cachemate sweep run`: makes the manifest, and runs what is missing.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use cachemate_report::text::{count_text, counted_text};
use cachemate_sweep::engines::dask::{Dask, DaskOptions};
use cachemate_sweep::engines::hq::{Hq, HqOptions};
use cachemate_sweep::engines::local::Local;
use cachemate_sweep::engines::slurm::Slurm;
use cachemate_sweep::{
    Attempt, Drive, Engine, Inputs, Manifest, Progress, Store, Summary, TaskId, Work, WorkerCommand, attempt, drive,
    expand, load_sweep,
};
use cachemate_trace::pack_programs;
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;

use super::sweep::time_words;
use crate::args::JsonArg;
use crate::exit::{Interrupted, Usage};
use crate::session::Session;
use crate::sweeping::Running;

/// Run what a sweep is missing; what is finished is skipped
#[derive(Args)]
pub struct SweepRun {
    /// The sweep file; without it, what the folder's manifest says
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The sweep's folder: manifest, results, failures
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// What runs the tasks
    #[arg(long, value_enum, default_value_t)]
    engine: EngineName,
    /// Tasks at once on this machine: local threads, a local Dask cluster, a local HyperQueue worker [default: all CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    workers: Option<u16>,
    /// Only every N-th task, from the I-th: for machines that share no disk
    #[arg(long, value_name = "I/N", conflicts_with = "task")]
    shard: Option<Shard>,
    /// Only these tasks, in this process: what engines start
    #[arg(long, value_name = "ID", num_args = 1.., conflicts_with_all = ["file", "engine"])]
    task: Vec<TaskId>,
    /// How often a task that failed is tried again
    #[arg(long, value_name = "N", default_value_t = 0)]
    retries: u32,
    /// Try tasks again that were given up before
    #[arg(long, conflicts_with = "task")]
    again: bool,
    #[command(flatten)]
    engines: EngineArgs,
    /// A worker that has not stirred for so long is taken for dead
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..))]
    stale_seconds: u64,
    #[command(flatten)]
    json: JsonArg,
}

#[derive(Args)]
struct EngineArgs {
    /// Tasks handed to a worker at once, for engines whose own tasks cost much
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    group: u16,
    /// A running Dask scheduler's address, or a running HyperQueue server's folder [default: one of our own, here]
    #[arg(long, value_name = "WHERE")]
    scheduler: Option<String>,
    /// One more argument of sbatch, such as --submit-arg=--partition=long
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    submit_arg: Vec<String>,
    /// The Python that has Dask
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,
    /// HyperQueue's command
    #[arg(long, value_name = "PATH", default_value = "hq")]
    hq: PathBuf,
    /// The cachemate command on the workers' machines [default: this one]
    #[arg(long, value_name = "PATH")]
    worker_command: Option<PathBuf>,
    /// Give an engine up that brings no result for so long and has no task in hand
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    patience: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum EngineName {
    /// Threads of this process
    #[default]
    Local,
    /// Job arrays
    Slurm,
    /// A Dask scheduler and its workers
    Dask,
    /// HyperQueue, where its hq is installed
    Hq,
}

/// The `part`-th of `count` parts, from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shard {
    part: usize,
    count: usize,
}

impl FromStr for Shard {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("found '{text}', expected I/N such as 1/4, I from 1 to N");
        let (part, count) = text.split_once('/').ok_or_else(bad)?;
        let shard = Shard { part: part.parse().map_err(|_| bad())?, count: count.parse().map_err(|_| bad())? };
        if (1..=shard.count).contains(&shard.part) { Ok(shard) } else { Err(bad()) }
    }
}

/// A log that nobody watches gets a line this often.
const SAY_EVERY: Duration = Duration::from_secs(30);

impl SweepRun {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let work: Arc<dyn Work> = Arc::new(Running::new(session));
        if !self.task.is_empty() {
            return self.tasks(session, &*work);
        }
        let (store, manifest) = self.prepare(session, &*work)?;
        let mut tasks = manifest.distinct();
        if let Some(shard) = self.shard {
            let mine = |at: usize| at % shard.count == shard.part - 1;
            tasks = tasks.into_iter().enumerate().filter(|(at, _)| mine(*at)).map(|(_, task)| task).collect();
        }
        if self.again {
            tasks.iter().try_for_each(|task| store.forget_attempts(task.id))?;
        }
        let store = Arc::new(store);
        let mut engine = self.engine(&store, &manifest, &work)?;
        let bar = session.progress("sweep", Some(tasks.len() as u64));
        let mut watching = Watching::new(session, &bar, self.json.json);
        let options = Drive { retries: self.retries, patience: Duration::from_secs(self.engines.patience) };
        let stop = session.interrupt_flag();
        let ended = drive(&store, &tasks, &mut *engine, &options, &mut |progress| watching.see(progress), &stop);
        bar.finish_and_clear();
        self.finish(session, &ended?)
    }

    /// The store with its manifest in it.
    fn prepare(&self, session: &Session, work: &dyn Work) -> anyhow::Result<(Store, Manifest)> {
        let stale = Duration::from_secs(self.stale_seconds);
        let Some(file) = &self.file else {
            let store = Store::open(&self.output)?.stale_after(stale);
            let manifest = store.manifest()?;
            check_version(&manifest, work, &self.output)?;
            return Ok((store, manifest));
        };
        let pack: Vec<String> = pack_programs().into_iter().map(|(name, _)| name).collect();
        let sweep = load_sweep(file, &pack)?;
        let expanded = expand(&sweep, work)?;
        let store = Store::create(&self.output)?.stale_after(stale);
        let before = store.manifest().ok();
        let changed = before.as_ref().is_none_or(|before| *before != expanded.manifest);
        if changed {
            expanded.write(&store)?;
        }
        if let Some(before) = before.filter(|before| before.header.version != expanded.manifest.header.version) {
            session.warn(&format!(
                "{}: its results are of version {}, this is {}: they are kept and not used",
                self.output.display(),
                before.header.version,
                expanded.manifest.header.version
            ));
        }
        Ok((store, expanded.manifest))
    }

    fn engine(&self, store: &Arc<Store>, manifest: &Manifest, work: &Arc<dyn Work>) -> anyhow::Result<Box<dyn Engine>> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = self.workers.map_or(cpus, usize::from);
        let given = &self.engines;
        let group = usize::from(given.group);
        if self.engine == EngineName::Local {
            let inputs = Arc::new(Inputs::open(store.folder(), &manifest.header).map_err(anyhow::Error::msg)?);
            return Ok(Box::new(Local::new(Arc::clone(store), Arc::clone(work), inputs, workers, self.retries)));
        }
        let program = match &given.worker_command {
            Some(program) => program.clone(),
            None => std::env::current_exe().context("where this command lies")?,
        };
        let folder = store.folder().to_path_buf();
        let command = WorkerCommand { program, folder, retries: self.retries, stale_seconds: self.stale_seconds };
        let scheduler = given.scheduler.clone();
        Ok(match self.engine {
            EngineName::Slurm if scheduler.is_some() => {
                bail!(Usage("--scheduler: slurm's own configuration says where its controller is".to_string()))
            }
            EngineName::Slurm => Box::new(Slurm::new(command, group, given.submit_arg.clone())),
            EngineName::Dask => {
                let python = given.python.clone();
                Box::new(Dask::new(command, DaskOptions { python, scheduler, workers, group }))
            }
            EngineName::Hq | EngineName::Local => {
                let server_dir = scheduler.map(PathBuf::from);
                Box::new(Hq::new(command, HqOptions { program: given.hq.clone(), server_dir, workers, group }))
            }
        })
    }

    /// What engines start: these tasks, one after the other, here.
    fn tasks(&self, session: &Session, work: &dyn Work) -> anyhow::Result<()> {
        let store = Store::open(&self.output)?.stale_after(Duration::from_secs(self.stale_seconds));
        let manifest = Manifest::find(store.folder(), &self.task)?;
        check_version(&manifest, work, &self.output)?;
        let inputs = Inputs::open(store.folder(), &manifest.header).map_err(anyhow::Error::msg)?;
        let stop = session.interrupt_flag();
        let mut failed = Vec::new();
        for task in &manifest.tasks {
            match attempt(&store, work, &inputs, task, self.retries, &stop)? {
                Attempt::Finished(_) | Attempt::Already | Attempt::GivenUp => {}
                Attempt::Others(who) => session.note(&format!("task {}: {who} runs it", task.id)),
                Attempt::Failed(what) => failed.push(format!("task {}: {what}", task.id)),
                Attempt::Stopped => return Err(Interrupted(format!("task {} goes on from its start", task.id)).into()),
            }
        }
        ensure!(failed.is_empty(), "{}", failed.join("; "));
        Ok(())
    }

    fn finish(&self, session: &Session, summary: &Summary) -> anyhow::Result<()> {
        for what in &summary.damaged {
            session.warn(&format!("{what}; set aside and made again"));
        }
        let folder = self.output.display().to_string();
        session.answer(self.json.json, summary, || words(summary, &folder))?;
        if summary.interrupted {
            let kept = format!("{} of {} tasks are finished and kept", summary.finished, summary.total);
            return Err(Interrupted(format!("{kept}; the same command goes on")).into());
        }
        ensure!(summary.differing.is_empty(), "{} results do not agree between workers", summary.differing.len());
        let (failed, missing) = (summary.failed.len() as u64, summary.missing.len() as u64);
        ensure!(failed == 0, "{} failed; --again tries once more", counted_text(failed, "task"));
        let engine = self.engine.to_possible_value().map_or(String::new(), |value| value.get_name().to_string());
        ensure!(missing == 0, "{} without a result; {engine} had none in hand any more", counted_text(missing, "task"));
        Ok(())
    }
}

fn check_version(manifest: &Manifest, work: &dyn Work, folder: &Path) -> anyhow::Result<()> {
    let (found, expected) = (&manifest.header.version, work.version());
    ensure!(
        *found == expected,
        "{}: the manifest is of version {found}, this is {expected}: make it anew with 'sweep run FILE -o DIR'",
        folder.display()
    );
    Ok(())
}

fn words(summary: &Summary, folder: &str) -> String {
    let count = |count: usize| count_text(count as u64);
    let mut text = format!("{folder}: {} of {} tasks finished", count(summary.finished), count(summary.total));
    if summary.skipped > 0 {
        text.push_str(&format!(", {} of them before", count(summary.skipped)));
    }
    text.push('\n');
    for (id, what) in summary.failed.iter().take(20) {
        text.push_str(&format!("failed: {id}: {what}\n"));
    }
    if summary.failed.len() > 20 {
        text.push_str(&format!("failed: {} more\n", summary.failed.len() - 20));
    }
    let tasks: &[TaskId] = &summary.missing;
    tasks.iter().take(20).for_each(|id| text.push_str(&format!("no result: {id}\n")));
    text
}

/// Tells people how far it is: a bar on a terminal, now and then a line in a log.
struct Watching<'a> {
    session: &'a Session,
    bar: &'a ProgressBar,
    silent: bool,
    started: Option<(Instant, usize)>,
    said: Instant,
    message: Option<String>,
}

impl<'a> Watching<'a> {
    fn new(session: &'a Session, bar: &'a ProgressBar, silent: bool) -> Self {
        Watching { session, bar, silent, started: None, said: Instant::now(), message: None }
    }

    fn see(&mut self, progress: &Progress) {
        let over = progress.finished + progress.failed;
        if self.started.is_none() {
            self.started = Some((Instant::now(), over));
            self.bar.set_position(over as u64);
            self.bar.reset_eta();
        }
        self.bar.set_length(progress.total as u64);
        self.bar.set_position(over as u64);
        let failed = if progress.failed > 0 { format!("{} failed", progress.failed) } else { String::new() };
        self.bar.set_message(failed);
        if progress.message != self.message {
            self.message.clone_from(&progress.message);
            if let Some(message) = &self.message {
                self.bar.suspend(|| self.session.warn(message));
            }
        }
        if self.bar.is_hidden() && !self.silent && self.said.elapsed() > SAY_EVERY {
            self.said = Instant::now();
            self.session.log(&self.line(progress, over));
        }
    }

    fn line(&self, progress: &Progress, over: usize) -> String {
        let mut line = format!("sweep: {} of {} tasks finished", progress.finished, progress.total);
        if progress.failed > 0 {
            line.push_str(&format!(", {} failed", progress.failed));
        }
        if let Some((start, before)) = self.started.filter(|(_, before)| over > *before) {
            let each = start.elapsed().as_secs_f64() / (over - before) as f64;
            line.push_str(&format!(", about {} left", time_words(each * (progress.total - over) as f64)));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are shards read as they are written, and impossible ones refused?
    #[test]
    fn shards_are_parts_of_a_whole() {
        assert_eq!("2/4".parse(), Ok(Shard { part: 2, count: 4 }));
        for bad in ["0/4", "5/4", "1/0", "1", "a/b", "-1/2", "1/2/3"] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }
}
