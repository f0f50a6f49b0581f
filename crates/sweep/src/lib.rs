//! Sweeps: many independent runs as tasks that any number of machines take, on engines that exist.
//!
//! Problem: full results at several seeds take days on one machine, and every engine that spreads tasks over machines
//! runs some twice, loses some, and reports exit codes that are not true. Method: a sweep file becomes a [`Manifest`],
//! one line a task, whose id is the hash of its inputs and of the program's version. A task is claimed, run, and its
//! result written beside its place and linked there ([`Store`]); [`drive`] gives an [`Engine`] what is missing until
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

pub use claims::DEATHS_AT_MOST;
pub use client::CallError;
pub use drive::{Drive, Progress, Summary, drive};
pub use engine::{Engine, EngineError, Look, WorkerCommand};
pub use error::SweepError;
pub use expand::{Expanded, expand};
pub use failures::{Attempted, Ending};
pub use file::{Kind, Sweep, SweepFile, load_sweep, parse_sweep};
pub use job::{Answer, CurveJob, Inputs, Job, RunError, ScenarioJob, Work};
pub use manifest::{FORMAT, Header, Manifest, Recording, Task, TaskId};
pub use merge::{Merged, merge};
pub use report::{Report, report};
pub use status::{Status, status};
pub use store::{Found, Published, RunNote, Store};
pub use worker::{Attempt, attempt};
