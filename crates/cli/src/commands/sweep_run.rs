//! `cachemate sweep run`: writes the manifest and runs the tasks that have no result.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use cachemate_report::text::{format_count, format_count_of};
use cachemate_sweep::{
    AttemptOutcome, Inputs, JobRunner, Manifest, Store, SweepSummary, SweepTaskId, attempt, expand,
    load_sweep,
};
use cachemate_trace::bundled_recordings;
use clap::Args;

use crate::args::JsonArg;
use crate::engine_args::EngineArgs;
use crate::exit::InterruptedError;
use crate::job_runner::LocalJobRunner;
use crate::session::Session;

/// Run the tasks of a sweep that have no result
#[derive(Args)]
pub struct SweepRunArgs {
    /// Sweep file [default: the manifest in DIR]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Directory of the sweep: manifest, results, failures
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Run only every N-th task, starting with the I-th: for machines without a common disk
    #[arg(long, value_name = "I/N", conflicts_with = "task")]
    shard: Option<Shard>,
    /// Run only these tasks, in this process (used by engines)
    #[arg(long, value_name = "ID", num_args = 1.., conflicts_with_all = ["file", "engine"])]
    task: Vec<SweepTaskId>,
    /// Retry tasks that were abandoned after failures
    #[arg(long, conflicts_with = "task")]
    retry_failed: bool,
    #[command(flatten)]
    engines: EngineArgs,
    #[command(flatten)]
    json: JsonArg,
}

/// Part number `part` (from 1) of `count` parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shard {
    part: usize,
    count: usize,
}

impl FromStr for Shard {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let shard_problem = || format!("found '{text}', expected I/N such as 1/4, I from 1 to N");
        let (part, count) = text.split_once('/').ok_or_else(shard_problem)?;
        let shard = Shard {
            part: part.parse().map_err(|_| shard_problem())?,
            count: count.parse().map_err(|_| shard_problem())?,
        };
        if (1..=shard.count).contains(&shard.part) {
            Ok(shard)
        } else {
            Err(shard_problem())
        }
    }
}

impl SweepRunArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let job_runner: Arc<dyn JobRunner> = Arc::new(LocalJobRunner::new(session, &self.output));
        if !self.task.is_empty() {
            return self.run_tasks(session, &*job_runner);
        }
        let (store, manifest) = self.prepare(session, &*job_runner)?;
        let mut tasks = manifest.distinct_tasks();
        if let Some(shard) = self.shard {
            let is_in_shard = |at: usize| at % shard.count == shard.part - 1;
            tasks = tasks
                .into_iter()
                .enumerate()
                .filter(|(index, _)| is_in_shard(*index))
                .map(|(_, task)| task)
                .collect();
        }
        if self.retry_failed {
            tasks
                .iter()
                .try_for_each(|task| store.forget_attempts(task.id))?;
        }
        let summary = self.engines.drive_tasks(
            session,
            &Arc::new(store),
            &manifest,
            &tasks,
            &job_runner,
            self.json.json,
        )?;
        self.finish(session, &summary)
    }

    /// Writes the manifest, and returns it with its store.
    fn prepare(
        &self,
        session: &Session,
        job_runner: &dyn JobRunner,
    ) -> anyhow::Result<(Store, Manifest)> {
        let heartbeat_timeout = Duration::from_secs(self.engines.heartbeat_timeout);
        let Some(file) = &self.file else {
            let store = Store::open(&self.output)?.stale_after(heartbeat_timeout);
            let manifest = store.manifest()?;
            check_version(&manifest, job_runner, &self.output)?;
            return Ok((store, manifest));
        };
        let bundled_names: Vec<String> = bundled_recordings()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let sweep = load_sweep(file, &bundled_names)?;
        let expansion = expand(&sweep, job_runner)?;
        let store = Store::create(&self.output)?.stale_after(heartbeat_timeout);
        let previous_manifest = store.manifest().ok();
        let is_changed = previous_manifest
            .as_ref()
            .is_none_or(|previous| *previous != expansion.manifest);
        if is_changed {
            expansion.write(&store)?;
        }
        if let Some(previous) = previous_manifest
            .filter(|previous| previous.header.version != expansion.manifest.header.version)
        {
            session.warn(&format!(
                "{}: its results are of version {}, this is {}; they are kept but not used",
                self.output.display(),
                previous.header.version,
                expansion.manifest.header.version
            ));
        }
        Ok((store, expansion.manifest))
    }

    /// Runs these tasks one after the other in this process, on behalf of an engine.
    fn run_tasks(&self, session: &Session, job_runner: &dyn JobRunner) -> anyhow::Result<()> {
        let store = Store::open(&self.output)?
            .stale_after(Duration::from_secs(self.engines.heartbeat_timeout));
        let manifest = store.find_tasks(&self.task)?;
        check_version(&manifest, job_runner, &self.output)?;
        let inputs = Inputs::open(&store, &manifest.header).map_err(anyhow::Error::msg)?;
        let stop = session.interrupt_flag();
        let mut failures = Vec::new();
        for task in &manifest.tasks {
            match attempt(
                &store,
                job_runner,
                &inputs,
                task,
                self.engines.retries,
                &stop,
            )? {
                AttemptOutcome::Finished(_)
                | AttemptOutcome::AlreadyFinished
                | AttemptOutcome::Abandoned => {}
                AttemptOutcome::RunningElsewhere(runner) => {
                    session.note(&format!("task {}: {runner} runs it", task.id))
                }
                AttemptOutcome::Failed(reason) => {
                    failures.push(format!("task {}: {reason}", task.id))
                }
                AttemptOutcome::Stopped => {
                    return Err(InterruptedError(format!("task {} starts over", task.id)).into());
                }
            }
        }
        ensure!(failures.is_empty(), "{}", failures.join("; "));
        Ok(())
    }

    fn finish(&self, session: &Session, summary: &SweepSummary) -> anyhow::Result<()> {
        for damage in &summary.damaged {
            session.warn(&format!("{damage}; quarantined and computed again"));
        }
        let dir = self.output.display().to_string();
        session.print_result(self.json.json, summary, || render(summary, &dir))?;
        if summary.interrupted {
            let note = format!(
                "{} of {} tasks are finished and kept",
                summary.finished, summary.total
            );
            return Err(InterruptedError(format!("{note}; the same command continues")).into());
        }
        ensure!(
            summary.conflicting.is_empty(),
            "{} results conflict between workers",
            summary.conflicting.len()
        );
        let (failed_count, missing_count) =
            (summary.failed.len() as u64, summary.missing.len() as u64);
        ensure!(
            failed_count == 0,
            "{} failed; --retry-failed runs them again",
            format_count_of(failed_count, "task")
        );
        let engine = self.engines.name();
        ensure!(
            missing_count == 0,
            "{} without a result, and {engine} is working on none of them",
            format_count_of(missing_count, "task")
        );
        Ok(())
    }
}

fn check_version(
    manifest: &Manifest,
    job_runner: &dyn JobRunner,
    dir: &Path,
) -> anyhow::Result<()> {
    let (found, expected) = (&manifest.header.version, job_runner.version());
    ensure!(
        *found == expected,
        "{}: the manifest is of version {found}, this is {expected}: write it again with 'sweep run FILE -o DIR'",
        dir.display()
    );
    Ok(())
}

fn render(summary: &SweepSummary, dir: &str) -> String {
    let format_count = |count: usize| format_count(count as u64);
    let mut text = format!(
        "{dir}: {} of {} tasks finished",
        format_count(summary.finished),
        format_count(summary.total)
    );
    if summary.skipped > 0 {
        text.push_str(&format!(
            ", {} of them before",
            format_count(summary.skipped)
        ));
    }
    text.push('\n');
    for (id, failure) in summary.failed.iter().take(20) {
        text.push_str(&format!("failed: {id}: {failure}\n"));
    }
    if summary.failed.len() > 20 {
        text.push_str(&format!("failed: {} more\n", summary.failed.len() - 20));
    }
    let tasks: &[SweepTaskId] = &summary.missing;
    tasks
        .iter()
        .take(20)
        .for_each(|id| text.push_str(&format!("no result: {id}\n")));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are shards parsed, and impossible ones rejected?
    #[test]
    fn shards_are_parsed_and_impossible_ones_rejected() {
        assert_eq!("2/4".parse(), Ok(Shard { part: 2, count: 4 }));
        for bad in ["0/4", "5/4", "1/0", "1", "a/b", "-1/2", "1/2/3"] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }
}
