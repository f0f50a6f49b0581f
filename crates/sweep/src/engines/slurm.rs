//! Runs tasks with Slurm, as job arrays whose names the sweep chooses.
//!
//! Observed with Slurm 22.05: the highest index of an array is MaxArraySize - 1. When a node is declared dead, its
//! job is requeued while it still runs, and waits two minutes; the engine therefore disables requeueing, and the
//! sweep retries. A killed controller forgets recent jobs and repeats finished ones, and exit codes require a
//! database. The engine therefore finds arrays by name, never by number, and queries only whether any of them are
//! left.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::{job_ids_text, write_ids};
use crate::client::{call, call_ok};
use crate::engine::{EngineError, EngineStatus, TaskEngine, WorkerCommand};
use crate::manifest::{SweepTask, SweepTaskId};

const NAME: &str = "slurm";
/// Deadline of a client program; without it, `squeue` hangs if the controller is dead.
const DEADLINE: Duration = Duration::from_secs(10);
/// Slurm's default limit on the size of an array, used if the controller does not report its own.
const MAX_ARRAY: usize = 1000;

/// The Slurm engine.
pub struct Slurm {
    command: WorkerCommand,
    /// Number of tasks per job.
    batch_size: usize,
    /// Additional arguments of `sbatch`: partition, account, time limit.
    submit_args: Vec<String>,
    /// Name of all jobs of this sweep's directory, whichever process submitted them.
    name: String,
    rounds: u32,
}

impl Slurm {
    /// An engine that has not submitted anything yet. Each job gets `batch_size` tasks; `submit_args` are passed to
    /// `sbatch` unchanged.
    pub fn new(command: WorkerCommand, batch_size: usize, submit_args: Vec<String>) -> Self {
        let name = format!("cachemate-{}", SweepTaskId::from_text(&command.dir.to_string_lossy()));
        Slurm { command, batch_size: batch_size.max(1), submit_args, name, rounds: 0 }
    }

    fn client_command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // The user's own formats and layouts would make the output unparsable.
        for variable in ["SQUEUE_FORMAT", "SQUEUE_FORMAT2", "SQUEUE_STATES", "SINFO_FORMAT", "SBATCH_ARRAY_INX"] {
            command.env_remove(variable);
        }
        command
    }

    fn dir(&self) -> PathBuf {
        self.command.dir.join("engine/slurm")
    }

    fn max_array(&self) -> Result<usize, EngineError> {
        let output = call_ok(self.client_command("scontrol").args(["show", "config"]), DEADLINE);
        let message = output.map_err(|error| EngineError::from_call(NAME, error))?;
        let line = message.lines().find_map(|line| line.trim().strip_prefix("MaxArraySize"));
        Ok(line.and_then(|value| value.split('=').nth(1)?.trim().parse().ok()).unwrap_or(MAX_ARRAY).max(2))
    }

    /// The script of one array, in which job number `$SLURM_ARRAY_TASK_ID` runs its part of the ids.
    fn array_script(&self, ids: &std::path::Path) -> String {
        format!(
            "#!/bin/sh\nset -- \"$SLURM_ARRAY_TASK_ID\"\nids={}\n[ -n \"$ids\" ] || exit 0\n{}\n",
            job_ids_text(ids, self.batch_size),
            self.command.shell_line("$ids")
        )
    }

    fn submit_chunk(&self, index: usize, tasks: &[SweepTask]) -> Result<(), EngineError> {
        let transient_error = |problem: String| EngineError { engine: NAME, what: problem, is_permanent: false };
        let dir = self.dir();
        let chunk = format!("{}-{}-{index}", std::process::id(), self.rounds);
        let ids = write_ids(&dir, &chunk, tasks).map_err(|error| transient_error(error.to_string()))?;
        let script = dir.join(format!("{chunk}.sh"));
        cachemate_files::replace(&script, self.array_script(&ids).as_bytes())
            .map_err(|error| transient_error(error.to_string()))?;
        let jobs = tasks.len().div_ceil(self.batch_size);
        let mut command = self.client_command("sbatch");
        command.args(["--parsable", "--no-requeue", "--job-name", &self.name, &format!("--array=0-{}", jobs - 1)]);
        let log = dir.join("logs/%A-%a.log");
        command.arg(format!("--output={}", log.display())).arg(format!("--chdir={}", dir.display()));
        command.args(&self.submit_args).arg(&script);
        call_ok(&mut command, DEADLINE).map(|_| ()).map_err(|error| EngineError::from_call(NAME, error))
    }

    /// State and reason of each unfinished job of this sweep.
    fn queue(&self) -> Result<Vec<(String, String)>, String> {
        let mut command = self.client_command("squeue");
        command.args(["-h", "-r", "-a", "-o", "%T %r", "--name", &self.name]);
        let called = call(&mut command, DEADLINE).map_err(|error| error.to_string())?;
        if called.code != Some(0) {
            return Err(called.err.lines().next().unwrap_or("squeue printed no message").to_string());
        }
        let split =
            |line: &str| line.split_once(' ').map(|(state, reason)| (state.to_string(), reason.trim().to_string()));
        Ok(called.stdout.lines().filter_map(split).collect())
    }

    /// The reason why no node can take a job, if there is one.
    fn unavailable_reason(&self) -> Option<String> {
        let output = call_ok(self.client_command("sinfo").args(["-h", "-N", "-o", "%T"]), DEADLINE).ok()?;
        let states: Vec<&str> = output.split_whitespace().collect();
        let is_unavailable =
            |state: &&str| ["drain", "down", "fail", "maint"].iter().any(|prefix| state.starts_with(prefix));
        let none_available = !states.is_empty() && states.iter().all(is_unavailable);
        none_available.then(|| {
            let mut distinct: Vec<&str> = states.clone();
            distinct.sort_unstable();
            distinct.dedup();
            format!("all {} nodes are {}: jobs wait for ever", states.len(), distinct.join(" or "))
        })
    }
}

impl TaskEngine for Slurm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError> {
        // Jobs that an earlier run of this sweep left in the queue are awaited, not duplicated.
        match self.queue() {
            Ok(remaining_jobs) if !remaining_jobs.is_empty() => return Ok(()),
            Ok(_) => {}
            Err(what) => {
                let missing = call(self.client_command("squeue").arg("--version"), DEADLINE);
                let for_ever = matches!(missing, Err(crate::CallError::Missing(_)));
                return Err(EngineError { engine: NAME, what, is_permanent: for_ever });
            }
        }
        self.rounds += 1;
        let logs = self.dir().join("logs");
        std::fs::create_dir_all(&logs).map_err(|error| EngineError {
            engine: NAME,
            what: format!("{}: {error}", logs.display()),
            is_permanent: false,
        })?;
        let at_most = self.max_array()? * self.batch_size;
        tasks.chunks(at_most).enumerate().try_for_each(|(index, chunk)| self.submit_chunk(index, chunk))
    }

    fn poll(&mut self) -> EngineStatus {
        let queue = match self.queue() {
            Ok(queue) => queue,
            Err(what) => {
                return EngineStatus::Unresponsive(format!("slurm does not answer ({what}); running tasks go on"));
            }
        };
        if queue.is_empty() {
            return EngineStatus::Done;
        }
        let waiting = queue.iter().filter(|(state, _)| state == "PENDING").count();
        if waiting == queue.len()
            && let Some(reason) = self.unavailable_reason()
        {
            return EngineStatus::Stuck(reason);
        }
        EngineStatus::Working { waiting: Some(waiting), running: Some(queue.len() - waiting) }
    }

    fn stop(&mut self) {
        let _ = call(self.client_command("scancel").args(["--name", &self.name]), DEADLINE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does job number k of a script run the k-th batch of ids, whatever characters the directory's name contains?
    #[test]
    fn a_job_runs_its_own_ids() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("it's a directory");
        let tasks: Vec<SweepTask> = (1..=5).map(|id| SweepTask { id: SweepTaskId(id), point: "{}".into() }).collect();
        let ids = write_ids(&dir, "x", &tasks).unwrap();
        let command = WorkerCommand { program: "echo".into(), dir, retries: 0, heartbeat_timeout_s: 60 };
        let script = Slurm::new(command, 2, Vec::new()).array_script(&ids);
        let job_output = |job: &str| {
            let mut shell = Command::new("sh");
            call_ok(shell.args(["-c", &script]).env("SLURM_ARRAY_TASK_ID", job), DEADLINE).unwrap()
        };
        assert!(job_output("0").trim().ends_with("--task 0000000000000001 0000000000000002"), "{}", job_output("0"));
        assert!(job_output("2").trim().ends_with("--task 0000000000000005"), "{}", job_output("2"));
        assert_eq!(job_output("3"), "", "a number beyond the last runs nothing");
    }
}
