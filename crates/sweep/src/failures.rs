//! The record of failed attempts: one line each, in the store, so that a failure is not known to the engine alone.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::SweepError;
use crate::manifest::SweepTaskId;
use crate::owner::ClaimOwner;
use crate::store::{Store, unix_ms};

/// The way in which an attempt ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailureKind {
    /// The task reported an error.
    Error,
    /// The task's worker died.
    Death,
}

/// One line of `failed/ID.jsonl`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FailedAttempt {
    /// The way in which the attempt ended.
    pub ending: FailureKind,
    /// The reason, for the user.
    pub what: String,
    /// Host of the worker that wrote the record.
    pub host: String,
    /// Process id of that worker, on its host.
    pub pid: u32,
    /// Time of the record: milliseconds since 1970 by that host's clock.
    pub unix_ms: u64,
}

impl FailedAttempt {
    pub(crate) fn from_owner(ending: FailureKind, message: String, owner: &ClaimOwner) -> Self {
        FailedAttempt {
            ending,
            what: message,
            host: owner.host.clone(),
            pid: owner.pid,
            unix_ms: unix_ms(),
        }
    }
}

impl Store {
    pub(crate) fn record_attempt(
        &self,
        id: SweepTaskId,
        attempt: &FailedAttempt,
    ) -> Result<(), SweepError> {
        let path = failure_path(id);
        let line = serde_json::to_string(attempt).expect("texts and numbers can be written");
        self.root()
            .append_line(Path::new(&path), &line)
            .map_err(self.io_error(&path))
    }

    /// Returns the failed attempts in order. An incomplete line counts as a death, so that a task cannot keep killing
    /// its workers.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn failed_attempts(&self, id: SweepTaskId) -> Result<Vec<FailedAttempt>, SweepError> {
        let path = failure_path(id);
        let record_text = self
            .root()
            .read_text(Path::new(&path), FAILURES_BYTES_LIMIT)
            .map_err(self.io_error(&path))?;
        let Some(text) = record_text else {
            return Ok(Vec::new());
        };
        let damaged_attempt = || FailedAttempt {
            ending: FailureKind::Death,
            what: "a line that is not whole".to_string(),
            host: String::new(),
            pid: 0,
            unix_ms: 0,
        };
        Ok(text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|_| damaged_attempt()))
            .collect())
    }

    /// Removes the record of failed attempts, so that the task is retried.
    ///
    /// # Errors
    /// The file exists and cannot be removed.
    pub fn forget_attempts(&self, id: SweepTaskId) -> Result<(), SweepError> {
        self.dir(FAILED)?
            .remove(&format!("{id}.jsonl"))
            .map_err(self.io_error(FAILED))
    }
}

const FAILED: &str = "failed";
/// Maximum size of a record. Attempts add one line each, and few attempts suffice to abandon a task.
const FAILURES_BYTES_LIMIT: u64 = 16 << 20;

fn failure_path(id: SweepTaskId) -> String {
    format!("{FAILED}/{id}.jsonl")
}
