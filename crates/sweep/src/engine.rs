//! Engines as a sweep sees them: an engine accepts tasks and reports whether it still holds some. No other report of
//! it is used.

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
    /// The reason, for the user.
    pub what: String,
    /// It will not be better later: the engine is not installed, or refuses what is asked.
    pub is_permanent: bool,
}

impl EngineError {
    /// The error of calling one of the engine's programs: a program that is missing is missing for ever.
    pub fn from_call(engine: &'static str, error: CallError) -> Self {
        EngineError { engine, is_permanent: matches!(error, CallError::Missing(_)), what: error.to_string() }
    }
}

/// An engine's report on the tasks that it accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EngineStatus {
    /// It has some in hand.
    Working {
        /// Tasks that did not start; `None` where it does not say.
        waiting: Option<usize>,
        /// Tasks that run; `None` where it does not say.
        running: Option<usize>,
    },
    /// It has none in hand any more, whatever became of them.
    Done,
    /// Its clients do not answer; tasks may go on all the same.
    Unresponsive(String),
    /// It has some that it will not start as things are.
    Stuck(String),
    /// It cannot go on.
    Broken(String),
}

/// Distributes tasks: to threads, or to a cluster's scheduler. It need not run each task exactly once.
pub trait TaskEngine {
    /// The name as `--engine` takes it.
    fn name(&self) -> &'static str;

    /// Hands over tasks, each to be run once.
    ///
    /// # Errors
    /// They could not be handed over. Some may have been.
    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError>;

    /// Its present report on the accepted tasks.
    fn poll(&mut self) -> EngineStatus;

    /// How often it may be asked.
    fn poll_interval(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// Waits at most so long; true as soon as there is news.
    fn wait(&mut self, at_most: Duration) -> bool {
        std::thread::sleep(at_most);
        false
    }

    /// Cancels the tasks that have not ended. May be called twice.
    fn stop(&mut self);
}

/// How other processes run a task: `program sweep run -o folder --task ID`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerCommand {
    /// The `cachemate` that workers run, by a path that holds on their hosts.
    pub program: PathBuf,
    /// The sweep's folder, on a file system that all workers share.
    pub folder: PathBuf,
    /// Failures of a task beyond the first that are tried again.
    pub retries: u32,
    /// Seconds without a heartbeat after which a claim is taken over.
    pub heartbeat_timeout_s: u64,
}

impl WorkerCommand {
    /// The command's arguments, to be followed by ids.
    pub fn args(&self) -> Vec<std::ffi::OsString> {
        let (retries, stale) = (self.retries.to_string(), self.heartbeat_timeout_s.to_string());
        let words = ["--quiet", "sweep", "run", "--retries", &retries, "--heartbeat-timeout", &stale, "-o"];
        let mut args: Vec<std::ffi::OsString> = words.iter().map(std::ffi::OsString::from).collect();
        args.extend([self.folder.clone().into_os_string(), "--task".into()]);
        args
    }

    /// A line for `sh` that runs the tasks whose ids are the shell words `ids`.
    pub fn shell_line(&self, ids: &str) -> String {
        let words = std::iter::once(self.program.clone().into_os_string()).chain(self.args());
        let words: Vec<String> = words.map(|word| crate::client::quote_argument(&word)).collect();
        format!("exec {} {ids}", words.join(" "))
    }
}
