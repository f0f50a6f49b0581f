//! Sweeps: many independent runs, distributed as tasks over machines by existing engines.
//!
//! Problem: full results at several seeds take days on one machine. Every engine that distributes tasks over machines
//! runs some of them twice, loses some, and reports misleading exit codes. Method: a sweep file becomes a [`Manifest`]
//! with one line per task, whose id is the hash of its inputs and of the program's version. A task is claimed and run,
//! and its result is written to a temporary file and linked into place ([`Store`]); [`drive()`] submits missing tasks
//! to a [`TaskEngine`] until none are missing. Properties: each task runs at least once; only the store's files
//! determine the state; finished tasks are skipped; results of two workers are compared bit by bit; merged results are
//! the same bytes whatever engine made them. Documentation: docs/sweeps.md.

#![warn(missing_docs)]

mod claims;
mod client;
mod drive;
mod engine;
pub mod engines;
mod error;
mod expand;
mod failures;
mod file;
mod job;
mod manifest;
mod merge;
mod owner;
mod points;
mod report;
mod status;
mod store;
mod worker;

pub use claims::MAX_DEATHS;
pub use client::CallError;
pub use drive::{DriveOptions, SweepProgress, SweepSummary, drive};
pub use engine::{EngineError, EngineStatus, TaskEngine, WorkerCommand};
pub use error::SweepError;
pub use expand::{ExpandedSweep, expand};
pub use failures::{FailedAttempt, FailureKind};
pub use file::{SweepDefinition, SweepFile, SweepKind, load_sweep, parse_sweep};
pub use job::{CurveJob, Inputs, JobResult, JobRunner, RunError, ScenarioJob, SweepJob};
pub use manifest::{
    MANIFEST_FORMAT, Manifest, ManifestHeader, RecordingRef, SweepTask, SweepTaskId,
};
pub use merge::{MergeSummary, merge};
pub use report::{SweepReport, collect_report};
pub use status::{SweepStatus, read_status};
pub use store::{PublishOutcome, RunNote, Store, StoredResult};
pub use worker::{AttemptOutcome, attempt};
