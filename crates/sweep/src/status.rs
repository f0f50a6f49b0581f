//! Status of a sweep, determined from file names alone, which takes a second for a hundred thousand results.

use std::time::Duration;

use serde::Serialize;

use crate::SweepError;
use crate::manifest::{Manifest, SweepTaskId};
use crate::store::Store;

/// Progress of a sweep; `cachemate sweep status --json` prints it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SweepStatus {
    /// Name of the sweep.
    pub name: String,
    /// Version of the program that may run its tasks.
    pub version: String,
    /// Number of tasks, counting each id once.
    pub total: usize,
    /// Tasks with a result.
    pub finished: usize,
    /// Tasks that are running now.
    pub running: usize,
    /// Tasks without a result that have a failed attempt.
    pub failed: usize,
    /// Tasks that are neither finished, running nor failed.
    pub waiting: usize,
    /// Results without a task in the manifest, from other versions or older sweep files.
    pub orphaned: usize,
    /// Results on which two workers disagree.
    pub conflicting: Vec<String>,
    /// Results per second over the newest results; `None` if no worker runs, or too few tasks are finished.
    pub finished_per_s: Option<f64>,
    /// Seconds until everything is finished at that rate; `None` if no rate is known.
    pub remaining_s: Option<f64>,
    /// Tasks with failures and without a result; at most ten are listed.
    pub failures: Vec<Failure>,
}

/// A task without a result, and the error of its last attempt.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Failure {
    /// The task's id.
    pub id: String,
    /// The value of every axis.
    pub point: serde_json::Value,
    /// Attempts so far.
    pub attempts: usize,
    /// The reason of the last failure.
    pub error: String,
}

/// Number of newest results from which the rate is computed.
const NEWEST: usize = 200;
const MAX_FAILURES: usize = 10;

/// Counts the files of a store against its manifest.
///
/// # Errors
/// The manifest or the store cannot be read.
pub fn read_status(store: &Store) -> Result<SweepStatus, SweepError> {
    let Manifest { header, tasks } = store.manifest()?;
    let mut ids: Vec<SweepTaskId> = tasks.iter().map(|task| task.id).collect();
    ids.sort_unstable();
    ids.dedup();
    let finished_ids = store.finished_tasks()?;
    let running_claims = store.running_tasks()?;
    let is_open = |id: &SweepTaskId| ids.binary_search(id).is_ok() && !finished_ids.contains(id);
    let failed_ids: Vec<SweepTaskId> = store.failed_tasks()?.into_iter().filter(is_open).collect();
    let running_ids: Vec<SweepTaskId> = running_claims
        .into_iter()
        .map(|(id, _)| id)
        .filter(is_open)
        .collect();
    let finished_count = ids.iter().filter(|id| finished_ids.contains(id)).count();
    let busy_count = running_ids
        .iter()
        .filter(|id| failed_ids.binary_search(id).is_err())
        .count();
    let waiting_count = ids.len() - finished_count - failed_ids.len() - busy_count;
    let finished_per_s = if running_ids.is_empty() {
        None
    } else {
        results_per_s(store, finished_ids.iter().copied())
    };
    let remaining_count = waiting_count + running_ids.len();
    let mut failures = Vec::new();
    for &id in failed_ids.iter().take(MAX_FAILURES) {
        let attempts = store.failed_attempts(id)?;
        let point = tasks
            .iter()
            .find(|task| task.id == id)
            .and_then(|task| serde_json::from_str(&task.point).ok());
        failures.push(Failure {
            id: id.to_string(),
            point: point.unwrap_or_default(),
            attempts: attempts.len(),
            error: attempts
                .last()
                .map_or(String::new(), |attempt| attempt.what.clone()),
        });
    }
    Ok(SweepStatus {
        name: header.name,
        version: header.version,
        total: ids.len(),
        finished: finished_count,
        running: running_ids.len(),
        failed: failed_ids.len(),
        waiting: waiting_count,
        orphaned: finished_ids.len() - finished_count,
        conflicting: store.differing_files()?,
        finished_per_s,
        remaining_s: finished_per_s.map(|rate| remaining_count as f64 / rate),
        failures,
    })
}

/// Results per second over the newest results; `None` if they are too few or too close in time.
fn results_per_s(store: &Store, finished: impl Iterator<Item = SweepTaskId>) -> Option<f64> {
    let times = store.newest_times(finished, NEWEST);
    let (newest_time, oldest_time) = (times.first()?, times.last()?);
    let elapsed_s = newest_time
        .duration_since(*oldest_time)
        .unwrap_or(Duration::ZERO)
        .as_secs_f64();
    (elapsed_s > 0.0).then(|| (times.len() - 1) as f64 / elapsed_s)
}
