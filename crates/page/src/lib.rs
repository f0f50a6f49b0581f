//! A run as a page to look at.
//!
//! Problem: who would rather look than read wants to see who shares a cache with whom, and why, while it happens and
//! afterwards. Method: one function, [`Teller::tell`], turns each turn of the loop into a [`Snapshot`]; the daemon sends
//! snapshots as they come, and [`recording`] makes them from a run log. One page ([`html`]) shows both. Properties: the
//! page is one file that loads nothing; its scripts stand under a content policy of their hashes; whatever a program is
//! called, its name is text.

#![warn(missing_docs)]

mod belief;
mod file;
mod matrix;
pub mod serve;
mod snapshot;
mod tell;

pub use belief::{Alone, reason_words};
pub use file::{POLICY_HEADER, content_policy, html};
pub use snapshot::*;
pub use tell::{Live, Teller, slim};

use cachemate_pipeline::OfflineProfiler;
use cachemate_trace::{RunLogReader, TraceError};

/// A recording as the page takes it.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// What does not change.
    pub head: Head,
    /// One for each window.
    pub snapshots: Vec<Snapshot>,
}

/// Reads a run log to its end. A log that breaks off gives every window before, and [`Head::cut_off`] says where.
///
/// # Errors
/// The log cannot be read, or has no window at all.
pub fn recording(mut log: RunLogReader, source: &str) -> Result<Run, TraceError> {
    let header = log.header().clone();
    let mut profiler = OfflineProfiler::new(&header.pipeline.profilers);
    let mut teller = Teller::new(&header);
    let mut snapshots = Vec::new();
    let mut head = teller.head(source);
    loop {
        match log.next_record() {
            Ok(Some(record)) => snapshots.push(teller.tell(&record, profiler.update(&record.seen), None)),
            Ok(None) => break,
            Err(error) if snapshots.is_empty() => return Err(error),
            Err(error) => {
                head.cut_off = Some(error.to_string());
                break;
            }
        }
    }
    Ok(Run { head, snapshots })
}

#[cfg(test)]
mod tests;
