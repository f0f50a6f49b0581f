//! The interface between a sweep and its engines: an engine accepts tasks and reports whether it still holds any. The
//! sweep relies on no other report.

use std::path::PathBuf;
use std::time::Duration;

use crate::client::CallError;
use crate::manifest::SweepTask;

/// The reason why an engine cannot accept tasks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{engine}: {what}")]
pub struct EngineError {
    /// The engine's name.
    pub engine: &'static str,
    /// Description of the problem, for the user.
    pub what: String,
    /// Is the failure permanent, because the engine is not installed or rejects the request?
    pub is_permanent: bool,
}

impl EngineError {
    /// The error of calling one of the engine's programs; a missing program is a permanent failure.
    pub fn from_call(engine: &'static str, error: CallError) -> Self {
        EngineError {
            engine,
            is_permanent: matches!(error, CallError::Missing(_)),
            what: error.to_string(),
        }
    }
}

/// An engine's report on the tasks that it has accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EngineStatus {
    /// The engine holds at least one task.
    Working {
        /// Tasks that have not started; `None` if the engine does not report them.
        waiting: Option<usize>,
        /// Tasks that are running; `None` if the engine does not report them.
        running: Option<usize>,
    },
    /// The engine holds no task any more, whatever the tasks' outcomes.
    Done,
    /// The engine's clients do not answer; tasks may still continue.
    Unresponsive(String),
    /// The engine holds tasks that it will not start under present conditions; with the reason.
    Stuck(String),
    /// The engine cannot continue; with the reason.
    Broken(String),
}

/// Distributes tasks, to threads or to a cluster's scheduler. An engine need not run each task exactly once.
pub trait TaskEngine {
    /// The engine's name, as `--engine` accepts it.
    fn name(&self) -> &'static str;

    /// Submits tasks, each to be run once.
    ///
    /// # Errors
    /// Some or all tasks could not be submitted.
    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError>;

    /// Reports on the tasks that the engine has accepted.
    fn poll(&mut self) -> EngineStatus;

    /// Minimum interval between polls.
    fn poll_interval(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// Waits for at most `timeout`; returns true as soon as the status has changed.
    fn wait(&mut self, timeout: Duration) -> bool {
        std::thread::sleep(timeout);
        false
    }

    /// Cancels the tasks that have not ended. May be called twice.
    fn stop(&mut self);
}

/// The command with which other processes run a task: `program sweep run -o directory --task ID`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerCommand {
    /// Path of `cachemate`, valid on the hosts of all workers.
    pub program: PathBuf,
    /// The sweep's directory, on a file system that all workers share.
    pub dir: PathBuf,
    /// Maximum number of retries of a failing task.
    pub retries: u32,
    /// Seconds without a heartbeat after which a claim is taken over.
    pub heartbeat_timeout_s: u64,
}

impl WorkerCommand {
    /// The command's arguments, to which the ids of tasks are appended.
    pub fn args(&self) -> Vec<std::ffi::OsString> {
        let (retries, heartbeat_timeout) = (
            self.retries.to_string(),
            self.heartbeat_timeout_s.to_string(),
        );
        let fixed_args = [
            "--quiet",
            "sweep",
            "run",
            "--retries",
            &retries,
            "--heartbeat-timeout",
            &heartbeat_timeout,
            "-o",
        ];
        let mut args: Vec<std::ffi::OsString> =
            fixed_args.iter().map(std::ffi::OsString::from).collect();
        args.extend([self.dir.clone().into_os_string(), "--task".into()]);
        args
    }

    /// A line for `sh` that runs the tasks whose ids are the shell words `ids`.
    pub fn shell_line(&self, ids: &str) -> String {
        let command_words =
            std::iter::once(self.program.clone().into_os_string()).chain(self.args());
        let quoted_words: Vec<String> = command_words
            .map(|word| crate::client::quote_argument(&word))
            .collect();
        format!("exec {} {ids}", quoted_words.join(" "))
    }
}
