//! Runs tasks with Dask. A small Python client submits the tasks, and Dask's workers run the command.
//!
//! The client writes one line of JSON for each event, and a heartbeat every two seconds; a client that is silent for
//! long is terminated. If the scheduler is killed, the client exits as well, and the next submission restarts both.

use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::write_ids;
use crate::client::kill_group;
use crate::engine::{EngineError, EngineStatus, TaskEngine, WorkerCommand};
use crate::manifest::SweepTask;

const NAME: &str = "dask";
const CLIENT_SCRIPT: &str = include_str!("../../client/dask_client.py");
/// Maximum time to reach the scheduler, or to start a local cluster.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// Time without output after which a client is treated as hung.
const MAX_SILENCE: Duration = Duration::from_secs(60);

/// Options for the Dask engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DaskOptions {
    /// Python interpreter that has Dask, by path or name.
    pub python: PathBuf,
    /// Address of a scheduler; `None` to start a cluster on this host for the duration of the sweep.
    pub scheduler: Option<String>,
    /// Number of workers of the local cluster.
    pub workers: usize,
    /// Number of tasks in one submission to a worker.
    pub batch_size: usize,
}

/// The Dask engine, with its current client.
pub struct DaskEngine {
    command: WorkerCommand,
    options: DaskOptions,
    client: Option<DaskClient>,
    submission_count: u32,
}

struct DaskClient {
    child: Child,
    report: Arc<Mutex<DaskReport>>,
}

/// Messages of the client so far.
struct DaskReport {
    last_message_at: Instant,
    /// Number of tasks that were submitted and have not ended.
    open_tasks: usize,
    workers: Option<u64>,
    failure: Option<(String, bool)>,
}

impl DaskEngine {
    /// An engine that has not started anything yet.
    pub fn new(command: WorkerCommand, options: DaskOptions) -> Self {
        DaskEngine {
            command,
            options,
            client: None,
            submission_count: 0,
        }
    }

    fn start_client(&mut self, tasks: &[SweepTask]) -> Result<DaskClient, EngineError> {
        let transient_error = |what: String| EngineError {
            engine: NAME,
            what,
            is_permanent: false,
        };
        let dir = self.command.dir.join("engine/dask");
        self.submission_count += 1;
        let name = format!("{}-{}", std::process::id(), self.submission_count);
        let ids_path =
            write_ids(&dir, &name, tasks).map_err(|error| transient_error(error.to_string()))?;
        let script = dir.join("client.py");
        cachemate_files::replace(&script, CLIENT_SCRIPT.as_bytes())
            .map_err(|error| transient_error(format!("{}: {error}", script.display())))?;
        let log = dir.join(format!("{name}.log"));
        let log = cachemate_files::create(&log, true)
            .map_err(|error| transient_error(format!("{}: {error}", log.display())))?;
        let options = &self.options;
        let mut command = Command::new(&options.python);
        command
            .arg(&script)
            .args(["--batch-size", &options.batch_size.max(1).to_string()]);
        command.args([
            "--workers",
            &options.workers.max(1).to_string(),
            "--deadline",
            &START_DEADLINE.as_secs().to_string(),
        ]);
        if let Some(scheduler) = &options.scheduler {
            command.args(["--scheduler", scheduler]);
        }
        command
            .arg("--ids")
            .arg(ids_path)
            .arg("--")
            .arg(&self.command.program)
            .args(self.command.args());
        // The working directory is the sweep's, because a local cluster writes spill files there.
        command
            .current_dir(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .process_group(0);
        let mut child = command.spawn().map_err(|error| EngineError {
            is_permanent: matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
            ),
            ..transient_error(format!(
                "{}: {error}; --python names a Python that has Dask",
                options.python.display()
            ))
        })?;
        let report = DaskReport {
            last_message_at: Instant::now(),
            open_tasks: tasks.len(),
            workers: None,
            failure: None,
        };
        let report = Arc::new(Mutex::new(report));
        if let Some(stdout) = child.stdout.take() {
            let report = Arc::clone(&report);
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                    report.last_message_at = Instant::now();
                    report.handle_message(&line);
                }
            });
        }
        Ok(DaskClient { child, report })
    }
}

impl DaskReport {
    fn handle_message(&mut self, line: &str) {
        let Ok(message) = serde_json::from_str::<Value>(line) else {
            return;
        };
        let text_field = |name: &str| {
            message
                .get(name)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_string()
        };
        match message.get("event").and_then(Value::as_str) {
            Some("alive") => self.workers = message.get("workers").and_then(Value::as_u64),
            Some("ended" | "lost") => {
                let ids = message
                    .get("ids")
                    .and_then(Value::as_array)
                    .map_or(0, Vec::len);
                self.open_tasks = self.open_tasks.saturating_sub(ids);
            }
            Some("broken") => {
                let is_permanent = message.get("for_ever").and_then(Value::as_bool) == Some(true);
                self.failure = Some((text_field("why"), is_permanent));
            }
            _ => {}
        }
    }
}

impl TaskEngine for DaskEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError> {
        self.stop();
        self.client = Some(self.start_client(tasks)?);
        Ok(())
    }

    fn poll(&mut self) -> EngineStatus {
        let Some(client) = &mut self.client else {
            return EngineStatus::Done;
        };
        let exit_status = client.child.try_wait();
        let report = client.report.lock().unwrap_or_else(PoisonError::into_inner);
        match exit_status {
            Ok(None) if report.last_message_at.elapsed() > MAX_SILENCE => {}
            Ok(None) if report.workers == Some(0) => {
                return EngineStatus::Stuck("dask has no worker, so tasks wait".to_string());
            }
            Ok(None) => {
                return EngineStatus::Working {
                    waiting: None,
                    running: Some(report.open_tasks),
                };
            }
            Ok(Some(_)) | Err(_) => {
                if let Some((reason, true)) = &report.failure {
                    return EngineStatus::Broken(reason.clone());
                }
            }
        }
        drop(report);
        self.stop();
        EngineStatus::Done
    }

    fn stop(&mut self) {
        if let Some(mut client) = self.client.take() {
            // The process group contains the local cluster's workers and their tasks; interrupted tasks run again.
            kill_group(&mut client.child);
        }
    }
}

impl Drop for DaskEngine {
    fn drop(&mut self) {
        self.stop();
    }
}
