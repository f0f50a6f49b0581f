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

use super::{job_ids_command, write_ids};
use crate::client::{call, call_checked};
use crate::engine::{EngineError, EngineStatus, TaskEngine, WorkerCommand};
use crate::manifest::{SweepTask, SweepTaskId};

const NAME: &str = "slurm";
/// Maximum run time of a client program; without it, `squeue` hangs if the controller is dead.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Slurm's default limit on the size of an array, used if the controller does not report its own.
const DEFAULT_ARRAY_SIZE: usize = 1000;

/// The Slurm engine.
pub struct SlurmEngine {
    command: WorkerCommand,
    /// Number of tasks per job.
    batch_size: usize,
    /// Additional arguments of `sbatch`: partition, account, time limit.
    submit_args: Vec<String>,
    /// Name of all jobs of this sweep's directory, whichever process submitted them.
    name: String,
    submission_count: u32,
}

impl SlurmEngine {
    /// An engine that has not submitted anything yet. Each job gets `batch_size` tasks; `submit_args` are passed to
    /// `sbatch` unchanged.
    pub fn new(command: WorkerCommand, batch_size: usize, submit_args: Vec<String>) -> Self {
        let name = format!(
            "cachemate-{}",
            SweepTaskId::from_text(&command.dir.to_string_lossy())
        );
        SlurmEngine {
            command,
            batch_size: batch_size.max(1),
            submit_args,
            name,
            submission_count: 0,
        }
    }

    fn client_command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // The user's own formats and layouts would make the output unparsable.
        for variable in [
            "SQUEUE_FORMAT",
            "SQUEUE_FORMAT2",
            "SQUEUE_STATES",
            "SINFO_FORMAT",
            "SBATCH_ARRAY_INX",
        ] {
            command.env_remove(variable);
        }
        command
    }

    fn dir(&self) -> PathBuf {
        self.command.dir.join("engine/slurm")
    }

    fn query_max_array_size(&self) -> Result<usize, EngineError> {
        let output = call_checked(
            self.client_command("scontrol").args(["show", "config"]),
            CLIENT_TIMEOUT,
        );
        let config_text = output.map_err(|error| EngineError::from_call(NAME, error))?;
        let line = config_text
            .lines()
            .find_map(|line| line.trim().strip_prefix("MaxArraySize"));
        Ok(line
            .and_then(|value| value.split('=').nth(1)?.trim().parse().ok())
            .unwrap_or(DEFAULT_ARRAY_SIZE)
            .max(2))
    }

    /// The script of one array, in which job number `$SLURM_ARRAY_TASK_ID` runs its part of the ids.
    fn array_script(&self, ids: &std::path::Path) -> String {
        format!(
            "#!/bin/sh\nset -- \"$SLURM_ARRAY_TASK_ID\"\nids={}\n[ -n \"$ids\" ] || exit 0\n{}\n",
            job_ids_command(ids, self.batch_size),
            self.command.shell_line("$ids")
        )
    }

    fn submit_chunk(&self, index: usize, tasks: &[SweepTask]) -> Result<(), EngineError> {
        let transient_error = |problem: String| EngineError {
            engine: NAME,
            what: problem,
            is_permanent: false,
        };
        let dir = self.dir();
        let chunk_name = format!("{}-{}-{index}", std::process::id(), self.submission_count);
        let ids_path = write_ids(&dir, &chunk_name, tasks)
            .map_err(|error| transient_error(error.to_string()))?;
        let script = dir.join(format!("{chunk_name}.sh"));
        cachemate_files::replace(&script, self.array_script(&ids_path).as_bytes())
            .map_err(|error| transient_error(error.to_string()))?;
        let job_count = tasks.len().div_ceil(self.batch_size);
        let mut command = self.client_command("sbatch");
        command.args([
            "--parsable",
            "--no-requeue",
            "--job-name",
            &self.name,
            &format!("--array=0-{}", job_count - 1),
        ]);
        let log_pattern = dir.join("logs/%A-%a.log");
        command
            .arg(format!("--output={}", log_pattern.display()))
            .arg(format!("--chdir={}", dir.display()));
        command.args(&self.submit_args).arg(&script);
        call_checked(&mut command, CLIENT_TIMEOUT)
            .map(|_| ())
            .map_err(|error| EngineError::from_call(NAME, error))
    }

    /// State and reason of each unfinished job of this sweep.
    fn query_queue(&self) -> Result<Vec<(String, String)>, String> {
        let mut command = self.client_command("squeue");
        command.args(["-h", "-r", "-a", "-o", "%T %r", "--name", &self.name]);
        let output = call(&mut command, CLIENT_TIMEOUT).map_err(|error| error.to_string())?;
        if output.code != Some(0) {
            return Err(output
                .stderr
                .lines()
                .next()
                .unwrap_or("squeue printed no message")
                .to_string());
        }
        let parse_line = |line: &str| {
            line.split_once(' ')
                .map(|(state, reason)| (state.to_string(), reason.trim().to_string()))
        };
        Ok(output.stdout.lines().filter_map(parse_line).collect())
    }

    /// The reason why no node can take a job, if there is one.
    fn unavailable_reason(&self) -> Option<String> {
        let output = call_checked(
            self.client_command("sinfo").args(["-h", "-N", "-o", "%T"]),
            CLIENT_TIMEOUT,
        )
        .ok()?;
        let states: Vec<&str> = output.split_whitespace().collect();
        let is_unavailable = |state: &&str| {
            ["drain", "down", "fail", "maint"]
                .iter()
                .any(|prefix| state.starts_with(prefix))
        };
        let has_no_usable_node = !states.is_empty() && states.iter().all(is_unavailable);
        has_no_usable_node.then(|| {
            let mut distinct_states: Vec<&str> = states.clone();
            distinct_states.sort_unstable();
            distinct_states.dedup();
            format!(
                "all {} nodes are {}, so jobs cannot start",
                states.len(),
                distinct_states.join(" or ")
            )
        })
    }
}

impl TaskEngine for SlurmEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError> {
        // Jobs that an earlier run of this sweep left in the queue are awaited, not duplicated.
        match self.query_queue() {
            Ok(remaining_jobs) if !remaining_jobs.is_empty() => return Ok(()),
            Ok(_) => {}
            Err(problem) => {
                let version_result = call(
                    self.client_command("squeue").arg("--version"),
                    CLIENT_TIMEOUT,
                );
                let is_permanent = matches!(version_result, Err(crate::CallError::Missing(_)));
                return Err(EngineError {
                    engine: NAME,
                    what: problem,
                    is_permanent,
                });
            }
        }
        self.submission_count += 1;
        let log_dir = self.dir().join("logs");
        std::fs::create_dir_all(&log_dir).map_err(|error| EngineError {
            engine: NAME,
            what: format!("{}: {error}", log_dir.display()),
            is_permanent: false,
        })?;
        let max_tasks = self.query_max_array_size()? * self.batch_size;
        tasks
            .chunks(max_tasks)
            .enumerate()
            .try_for_each(|(index, chunk)| self.submit_chunk(index, chunk))
    }

    fn poll(&mut self) -> EngineStatus {
        let queue = match self.query_queue() {
            Ok(queue) => queue,
            Err(problem) => {
                return EngineStatus::Unresponsive(format!(
                    "slurm does not answer ({problem}); running tasks go on"
                ));
            }
        };
        if queue.is_empty() {
            return EngineStatus::Done;
        }
        let waiting_count = queue.iter().filter(|(state, _)| state == "PENDING").count();
        if waiting_count == queue.len()
            && let Some(reason) = self.unavailable_reason()
        {
            return EngineStatus::Stuck(reason);
        }
        EngineStatus::Working {
            waiting: Some(waiting_count),
            running: Some(queue.len() - waiting_count),
        }
    }

    fn stop(&mut self) {
        let _ = call(
            self.client_command("scancel").args(["--name", &self.name]),
            CLIENT_TIMEOUT,
        );
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
        let tasks: Vec<SweepTask> = (1..=5)
            .map(|id| SweepTask {
                id: SweepTaskId(id),
                point: "{}".into(),
            })
            .collect();
        let ids = write_ids(&dir, "x", &tasks).unwrap();
        let command = WorkerCommand {
            program: "echo".into(),
            dir,
            retries: 0,
            heartbeat_timeout_s: 60,
        };
        let script = SlurmEngine::new(command, 2, Vec::new()).array_script(&ids);
        let job_output = |job: &str| {
            let mut shell = Command::new("sh");
            call_checked(
                shell.args(["-c", &script]).env("SLURM_ARRAY_TASK_ID", job),
                CLIENT_TIMEOUT,
            )
            .unwrap()
        };
        assert!(
            job_output("0")
                .trim()
                .ends_with("--task 0000000000000001 0000000000000002"),
            "{}",
            job_output("0")
        );
        assert!(
            job_output("2").trim().ends_with("--task 0000000000000005"),
            "{}",
            job_output("2")
        );
        assert_eq!(job_output("3"), "", "a number beyond the last runs nothing");
    }
}
