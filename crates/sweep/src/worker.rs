//! One attempt at one task: claim, run, publish.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::Value;
use serde_json::value::to_raw_value;

use crate::SweepError;
use crate::claims::{ClaimOutcome, has_too_many_deaths};
use crate::failures::{FailedAttempt, FailureKind};
use crate::job::{Inputs, JobRunner, RunError};
use crate::manifest::SweepTask;
use crate::store::{PublishOutcome, RunNote, Store, unix_ms};

/// Outcome of an attempt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AttemptOutcome {
    /// This attempt produced and published the result.
    Finished(PublishOutcome),
    /// The task already had a result.
    AlreadyFinished,
    /// Another worker runs the task; the text names the worker.
    RunningElsewhere(String),
    /// The task failed, and the failure was recorded; the text is the reason.
    Failed(String),
    /// The task has failed more often than its retries allow, counting earlier processes.
    Abandoned,
    /// The user stopped the run; the attempt does not count.
    Stopped,
}

/// Is a task with these failures abandoned, given this number of retries?
pub(crate) fn is_abandoned(attempts: &[FailedAttempt], retries: u32) -> bool {
    let error_count = attempts
        .iter()
        .filter(|attempt| attempt.ending == FailureKind::Error)
        .count();
    error_count > retries as usize || has_too_many_deaths(attempts)
}

/// Runs a task unless it is finished, claimed, or abandoned after `retries` failures beyond the first.
///
/// # Errors
/// The store cannot be read or written, so no task can be run.
pub fn attempt(
    store: &Store,
    job_runner: &dyn JobRunner,
    inputs: &Inputs,
    task: &SweepTask,
    retries: u32,
    stop: &AtomicBool,
) -> Result<AttemptOutcome, SweepError> {
    if let Some(outcome) = find_finished(store, task)? {
        return Ok(outcome);
    }
    let claim = match store.claim(task.id)? {
        ClaimOutcome::Acquired(claim) => claim,
        ClaimOutcome::HeldByOther(owner_name) => {
            return Ok(AttemptOutcome::RunningElsewhere(owner_name));
        }
    };
    // Between the check and the claim, another worker may have finished it, or a dead owner's claim was taken over.
    if let Some(outcome) = find_finished(store, task)? {
        return Ok(outcome);
    }
    let attempts = store.failed_attempts(task.id)?;
    if is_abandoned(&attempts, retries) {
        return Ok(AttemptOutcome::Abandoned);
    }
    let (start_time, started_unix_ms) = (Instant::now(), unix_ms());
    let run_result = catch_unwind(AssertUnwindSafe(|| run_job(job_runner, inputs, task, stop)));
    let run_result = run_result.unwrap_or_else(|panic| {
        Err(RunError::Failed(format!(
            "it panicked: {}",
            panic_message(&*panic)
        )))
    });
    let outcome = match run_result {
        Ok(result) => {
            let note = RunNote {
                host: store.owner.host.clone(),
                pid: store.owner.pid,
                attempt: attempts.len() as u32 + 1,
                started_unix_ms,
                elapsed_ms: u64::try_from(start_time.elapsed().as_millis()).unwrap_or(u64::MAX),
            };
            AttemptOutcome::Finished(store.publish(task.id, &result, &note)?)
        }
        Err(RunError::Stopped) => AttemptOutcome::Stopped,
        Err(RunError::Failed(reason)) => {
            store.record_attempt(
                task.id,
                &FailedAttempt::from_owner(FailureKind::Error, reason.clone(), &store.owner),
            )?;
            AttemptOutcome::Failed(reason)
        }
    };
    drop(claim);
    Ok(outcome)
}

/// Returns the outcome for a finished task; `None` if it must run. A damaged result is quarantined first.
fn find_finished(store: &Store, task: &SweepTask) -> Result<Option<AttemptOutcome>, SweepError> {
    match store.read(task.id) {
        Ok(result) => Ok(result.map(|_| AttemptOutcome::AlreadyFinished)),
        Err(_) => store.quarantine(task.id).map(|()| None),
    }
}

fn run_job(
    job_runner: &dyn JobRunner,
    inputs: &Inputs,
    task: &SweepTask,
    stop: &AtomicBool,
) -> Result<Box<serde_json::value::RawValue>, RunError> {
    let values = task.values().map_err(RunError::Failed)?;
    let point: Vec<(&str, &Value)> = values
        .iter()
        .map(|(axis, value)| (axis.as_str(), value))
        .collect();
    let job = inputs.job_at(&point).map_err(RunError::Failed)?;
    let result = job_runner.run(&job, stop)?;
    to_raw_value(&result)
        .map_err(|error| RunError::Failed(format!("the result cannot be written: {error}")))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a word".to_string())
}
