//! The dashboard: a run as an HTML page.
//!
//! A table of losses says who loses now. It does not show that the loss began when a container
//! moved, an hour ago, so some users want the programs of each cache as a picture, and to play
//! time. One function, [`SnapshotBuilder::build_snapshot`], turns each iteration of the loop into a
//! [`Snapshot`], which all front ends read; [`PageCharts`] adds curves and the matrix, which only
//! the page shows. The daemon sends snapshots as they arise, and [`read_recording`] makes them from
//! a run log. One page ([`page_html`]) shows both, so what can be seen of a live host can be seen
//! of a recording.
//!
//! For example, an hour of eight programs, 10,801 windows, is one file of 1.5 MB that loads
//! nothing; it can be attached to a ticket and opened without a server.
//!
//! # Invariants
//! - A program's name is always plain text, and one word of its sentence.
//! - Without the token, nothing about the host is shown.
//! - The page's scripts run under a content policy that lists their hashes.
//! - The daemon never waits for the page.

#![warn(missing_docs)]

mod charts;
mod file;
mod matrix;
pub mod serve;
mod services;
mod snapshot;
mod snapshot_builder;
mod window_view;

pub use charts::PageCharts;
pub use file::{POLICY_HEADER, content_policy, page_html};
pub use snapshot::*;
pub use snapshot_builder::{SnapshotBuilder, page_header};
pub use window_view::{TaskNames, describe_refusals, describe_thread};

use cachemate_pipeline::build_policy_profilers;
use cachemate_trace::{RunLogReader, TraceError};

/// A recorded run, in the page's format.
#[derive(Clone, PartialEq, Debug)]
pub struct RecordedRun {
    /// The constant properties of the run.
    pub head: PageHeader,
    /// One snapshot for each window.
    pub snapshots: Vec<Snapshot>,
}

/// Reads a run log to its end. A truncated log gives every window before the damage, and [`PageHeader::cut_off`] gives
/// the position.
///
/// # Errors
/// The log cannot be read, or has no window at all.
pub fn read_recording(mut log: RunLogReader, source: &str) -> Result<RecordedRun, TraceError> {
    let header = log.header().clone();
    let mut profiler = build_policy_profilers(&header.pipeline);
    let mut builder = SnapshotBuilder::new(&header);
    let mut charts = PageCharts::new(&header);
    let mut snapshots = Vec::new();

    let mut head = page_header(&header, source);
    loop {
        match log.next_record() {
            Ok(Some(record)) => {
                let profiles = profiler.update(&record.observation);
                let mut snapshot = builder.build_snapshot(&record, profiles, None);
                charts.complete(&mut snapshot, profiles);
                snapshots.push(snapshot);
            }
            Ok(None) => break,
            Err(error) if snapshots.is_empty() => return Err(error),
            Err(error) => {
                head.cut_off = Some(error.to_string());
                break;
            }
        }
    }
    Ok(RecordedRun { head, snapshots })
}

#[cfg(test)]
mod tests;
