//! Sweeps: many independent runs as tasks that any number of machines take, on engines that exist.
//!
//! Problem: full results at several seeds take days on one machine, and every engine that spreads tasks over machines
//! runs some twice, loses some, and reports exit codes that are not true. Method: a sweep file becomes a [`Manifest`],
//! one line a task, whose id is the hash of its inputs and of the program's version. A task is claimed, run, and its
//! result written beside its place and linked there ([`Store`]); [`drive()`] gives an [`TaskEngine`] what is missing until
//! nothing is. Properties: at least once; the truth is in the store's files and nowhere else; what is finished is
//! skipped; results that two workers made are compared bit by bit; merged results are the same bytes whatever engine
//! made them. Docs: docs/sweeps.md.

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
pub use manifest::{FORMAT, Manifest, ManifestHeader, RecordingRef, SweepTask, SweepTaskId};
pub use merge::{MergeSummary, merge};
pub use report::{SweepReport, report};
pub use status::{SweepStatus, status};
pub use store::{PublishOutcome, RunNote, Store, StoredResult};
pub use worker::{AttemptOutcome, attempt};
