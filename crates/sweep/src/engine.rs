//! The engine interface of a sweep: an engine accepts tasks and reports whether it still holds any. No other report is
//! used.

use std::path::PathBuf;
use std::time::Duration;

use crate::client::CallError;
use crate::manifest::SweepTask;

/// The reason for which an engine cannot accept tasks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{engine}: {what}")]
pub struct EngineError {
    /// The engine's name.
    pub engine: &'static str,
    /// The reason, for the user.
    pub what: String,
    /// Is the failure permanent, because the engine is not installed or rejects the request?
    pub is_permanent: bool,
}

impl EngineError {
    /// The error of calling one of the engine's programs; a missing program is a permanent failure.
    pub fn from_call(engine: &'static str, error: CallError) -> Self {
        EngineError { engine, is_permanent: matches!(error, CallError::Missing(_)), what: error.to_string() }
    }
}

/// An engine's report on the tasks that it accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EngineStatus {
    /// It holds some of them.
    Working {
        /// Tasks that have not started; `None` if it does not report them.
        waiting: Option<usize>,
        /// Tasks that are running; `None` if it does not report them.
        running: Option<usize>,
    },
    /// It holds none any more, whatever their outcome.
    Done,
    /// Its clients do not answer; tasks may continue nevertheless.
    Unresponsive(String),
    /// It holds tasks that it will not start under the present conditions.
    Stuck(String),
    /// It cannot continue.
    Broken(String),
}

/// Distributes tasks: to threads, or to a cluster's scheduler. It need not run each task exactly once.
pub trait TaskEngine {
    /// The name as `--engine` accepts it.
    fn name(&self) -> &'static str;

    /// Submits tasks, each to be run once.
    ///
    /// # Errors
    /// They could not be submitted; some may have been.
    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError>;

    /// Its current report on the accepted tasks.
    fn poll(&mut self) -> EngineStatus;

    /// Minimum interval between polls.
    fn poll_interval(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// Waits for at most this time; true as soon as there is news.
    fn wait(&mut self, at_most: Duration) -> bool {
        std::thread::sleep(at_most);
        false
    }

    /// Cancels the tasks that have not ended. May be called twice.
    fn stop(&mut self);
}

/// The command by which other processes run a task: `program sweep run -o directory --task ID`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerCommand {
    /// The `cachemate` that workers run, by a path that is valid on their hosts.
    pub program: PathBuf,
    /// The sweep's directory, on a file system that all workers share.
    pub dir: PathBuf,
    /// Number of failures of a task, beyond the first, after which it is retried.
    pub retries: u32,
    /// Seconds without a heartbeat after which a claim is taken over.
    pub heartbeat_timeout_s: u64,
}

impl WorkerCommand {
    /// The command's arguments, to which ids are appended.
    pub fn args(&self) -> Vec<std::ffi::OsString> {
        let (retries, stale) = (self.retries.to_string(), self.heartbeat_timeout_s.to_string());
        let words = ["--quiet", "sweep", "run", "--retries", &retries, "--heartbeat-timeout", &stale, "-o"];
        let mut args: Vec<std::ffi::OsString> = words.iter().map(std::ffi::OsString::from).collect();
        args.extend([self.dir.clone().into_os_string(), "--task".into()]);
        args
    }

    /// A line for `sh` that runs the tasks whose ids are the shell words `ids`.
    pub fn shell_line(&self, ids: &str) -> String {
        let words = std::iter::once(self.program.clone().into_os_string()).chain(self.args());
        let words: Vec<String> = words.map(|word| crate::client::quote_argument(&word)).collect();
        format!("exec {} {ids}", words.join(" "))
    }
}
