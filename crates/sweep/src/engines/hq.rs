//! Runs tasks with HyperQueue, if `hq` is installed.
//!
//! Observed with versions 0.26 and 0.27: workers do not reconnect to a restarted server. A journal that is flushed
//! every 30 s repeats finished tasks, so the server started here flushes five times a second. `submit --wait` and
//! `job wait` exit with 0 on failures, so only the JSON of `job list` is read. The tasks of a frozen worker are
//! submitted again, so the crash limit is set explicitly, and claims in the store decide which worker runs a task.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{job_ids_command, write_ids};
use crate::client::{CallError, call_checked, kill_group};
use crate::engine::{EngineError, EngineStatus, TaskEngine, WorkerCommand};
use crate::manifest::{SweepTask, SweepTaskId};

const NAME: &str = "hq";
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
const FLUSH_PERIOD: &str = "200ms";
/// Number of worker deaths after which the server abandons a task; the store has its own count.
const CRASH_LIMIT: &str = "5";

/// Options for the HyperQueue engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HqOptions {
    /// The `hq` program, by path or name.
    pub program: PathBuf,
    /// Directory of a running server; `None` to start a server and a worker on this host for the duration of the
    /// sweep.
    pub server_dir: Option<PathBuf>,
    /// Number of CPUs of the worker that this engine starts.
    pub workers: usize,
    /// Number of sweep tasks in one HyperQueue task.
    pub batch_size: usize,
}

/// The HyperQueue engine, with the server and worker that it started.
pub struct HqEngine {
    command: WorkerCommand,
    options: HqOptions,
    /// Name of all jobs of this sweep's directory.
    name: String,
    /// The server and the worker that this engine started.
    children: Vec<Child>,
    /// Makes the names of journals and files of ids unique.
    file_number: u32,
}

impl HqEngine {
    /// An engine that has not started anything yet.
    pub fn new(command: WorkerCommand, options: HqOptions) -> Self {
        let name = format!(
            "cachemate-{}",
            SweepTaskId::from_text(&command.dir.to_string_lossy())
        );
        HqEngine {
            command,
            options,
            name,
            children: Vec::new(),
            file_number: 0,
        }
    }

    fn dir(&self) -> PathBuf {
        self.command.dir.join("engine/hq")
    }

    fn server_dir(&self) -> PathBuf {
        self.options
            .server_dir
            .clone()
            .unwrap_or_else(|| self.dir().join("server"))
    }

    fn client(&self) -> Command {
        let mut command = Command::new(&self.options.program);
        command
            .arg("--server-dir")
            .arg(self.server_dir())
            .args(["--output-mode", "json"]);
        command
    }

    fn query(&self, args: &[&str]) -> Result<Value, CallError> {
        let output = call_checked(self.client().args(args), CLIENT_TIMEOUT)?;
        let json_error = |error: serde_json::Error| {
            CallError::Failed(NAME.to_string(), format!("{error} in its JSON"))
        };
        if output.trim().is_empty() {
            Ok(Value::Null)
        } else {
            serde_json::from_str(&output).map_err(json_error)
        }
    }

    /// Starts a server and a worker unless they are running.
    fn start_server(&mut self) -> Result<(), EngineError> {
        let has_exited = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        if self.children.len() == 2 && !self.children.iter_mut().any(has_exited) {
            return Ok(());
        }
        self.kill_children();
        let transient_error = |problem: String| EngineError {
            engine: NAME,
            what: problem,
            is_permanent: false,
        };
        let dir = self.dir();
        std::fs::create_dir_all(self.server_dir())
            .map_err(|error| transient_error(error.to_string()))?;
        self.file_number += 1;
        let journal = dir.join(format!(
            "journal-{}-{}",
            std::process::id(),
            self.file_number
        ));
        let mut server = self.client();
        server.args([
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--journal-flush-period",
            FLUSH_PERIOD,
        ]);
        server.arg("--journal").arg(journal);
        self.spawn(server, "server")?;
        let start = Instant::now();
        while self.query(&["server", "info"]).is_err() {
            if start.elapsed() > CLIENT_TIMEOUT {
                return Err(transient_error(format!(
                    "no server in {} s; its log is in {}",
                    CLIENT_TIMEOUT.as_secs(),
                    dir.display()
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut worker = self.client();
        worker.args([
            "worker",
            "start",
            "--heartbeat",
            "1s",
            "--cpus",
            &self.options.workers.max(1).to_string(),
        ]);
        self.spawn(worker, "worker")
    }

    fn spawn(&mut self, mut command: Command, subject: &str) -> Result<(), EngineError> {
        let spawn_error = |error: std::io::Error| EngineError {
            engine: NAME,
            is_permanent: error.kind() == std::io::ErrorKind::NotFound,
            what: format!(
                "{}: {error}; --hq names HyperQueue's command",
                self.options.program.display()
            ),
        };
        let log = cachemate_files::create(&self.dir().join(format!("{subject}.log")), true)
            .map_err(spawn_error)?;
        let stderr_log = log.try_clone().map_err(spawn_error)?;
        command
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(stderr_log)
            .process_group(0);
        let child = command.spawn().map_err(spawn_error)?;
        self.children.push(child);
        Ok(())
    }

    fn kill_children(&mut self) {
        self.children.iter_mut().rev().for_each(kill_group);
        self.children.clear();
    }

    /// Numbers of waiting and running tasks of this sweep's jobs.
    fn query_queue(&self) -> Result<(usize, usize), CallError> {
        let jobs = self.query(&["job", "list", "--all"])?;
        let own_jobs = jobs.as_array().into_iter().flatten();
        let own_jobs =
            own_jobs.filter(|job| job.get("name").and_then(Value::as_str) == Some(&self.name));
        let (mut waiting_count, mut running_count) = (0, 0);
        for job in own_jobs {
            let count_at =
                |pointer: &str| job.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
            let ended_count = count_at("/task_stats/finished")
                + count_at("/task_stats/failed")
                + count_at("/task_stats/canceled");
            let running_now = count_at("/task_stats/running");
            running_count += running_now as usize;
            waiting_count +=
                count_at("/task_count").saturating_sub(ended_count + running_now) as usize;
        }
        Ok((waiting_count, running_count))
    }
}

impl TaskEngine for HqEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError> {
        let transient_error = |problem: String| EngineError {
            engine: NAME,
            what: problem,
            is_permanent: false,
        };
        std::fs::create_dir_all(self.dir()).map_err(|error| transient_error(error.to_string()))?;
        if self.options.server_dir.is_none() {
            self.start_server()?;
        }
        self.file_number += 1;
        let name = format!("{}-{}", std::process::id(), self.file_number);
        let ids_path = write_ids(&self.dir(), &name, tasks)
            .map_err(|error| transient_error(error.to_string()))?;
        let script = format!(
            "set -- \"$HQ_TASK_ID\"; {}",
            self.command
                .shell_line(&job_ids_command(&ids_path, self.batch_size()))
        );
        let last_index = tasks.len().div_ceil(self.batch_size()) - 1;
        let array_range = format!("0-{last_index}");
        let mut command = self.client();
        command.args([
            "submit",
            "--name",
            &self.name,
            "--array",
            &array_range,
            "--crash-limit",
            CRASH_LIMIT,
        ]);
        command
            .args(["--stdout", "none", "--stderr", "none", "--cwd"])
            .arg(self.dir());
        command.args(["--", "sh", "-c", &script]);
        call_checked(&mut command, CLIENT_TIMEOUT)
            .map(|_| ())
            .map_err(|error| EngineError::from_call(NAME, error))
    }

    fn poll(&mut self) -> EngineStatus {
        match self.query_queue() {
            Ok((0, 0)) => EngineStatus::Done,
            Ok((waiting, running)) => EngineStatus::Working {
                waiting: Some(waiting),
                running: Some(running),
            },
            // If the server started here died, its workers died as well; its tasks are submitted again.
            Err(_) if self.options.server_dir.is_none() && !self.is_own_server_alive() => {
                EngineStatus::Done
            }
            Err(error) => EngineStatus::Unresponsive(format!(
                "hq does not answer ({error}); running tasks go on"
            )),
        }
    }

    fn stop(&mut self) {
        if self.options.server_dir.is_some() {
            let all_jobs = self.query(&["job", "list", "--all"]).unwrap_or_default();
            for job in all_jobs.as_array().into_iter().flatten() {
                let is_own = job.get("name").and_then(Value::as_str) == Some(&self.name);
                if let Some(id) = job.get("id").and_then(Value::as_u64).filter(|_| is_own) {
                    let _ = call_checked(
                        self.client().args(["job", "cancel", &id.to_string()]),
                        CLIENT_TIMEOUT,
                    );
                }
            }
        }
        self.kill_children();
    }
}

impl HqEngine {
    fn batch_size(&self) -> usize {
        self.options.batch_size.max(1)
    }

    fn is_own_server_alive(&mut self) -> bool {
        self.children
            .first_mut()
            .is_some_and(|server| matches!(server.try_wait(), Ok(None)))
    }
}

impl Drop for HqEngine {
    fn drop(&mut self) {
        self.kill_children();
    }
}
