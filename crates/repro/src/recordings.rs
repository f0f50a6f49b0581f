//! Recorded programs as jobs of a workload.

use std::path::Path;

use cachemate_core::AccessSource;
use cachemate_trace::{CmtReader, CmtSource, TraceReader};
use sha2::{Digest as _, Sha256};

use crate::error::{Result, failed};

/// Maximum size of a recording whose content is part of a run's name.
const MAX_RECORDING_BYTES: u64 = 4 << 30;

/// The thread of a recording, in a loop that begins at a position given by the seed.
pub(crate) fn open_source(name: &str, path: &Path, seed: u64) -> Result<Box<dyn AccessSource>> {
    let recorded_round = RecordedRound::read(name, path)?;
    let skipped_records = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % recorded_round.records.max(1);
    Ok(Box::new(
        CmtSource::open(path, recorded_round.thread, 0, skipped_records).map_err(failed(name))?,
    ))
}

/// One round through the thread of a recording; recordings of several threads are rejected.
struct RecordedRound {
    /// The thread's number.
    thread: u32,
    /// The thread's records.
    records: u64,
}

impl RecordedRound {
    fn read(name: &str, path: &Path) -> Result<Self> {
        let recording_error = failed(name);
        let mut first_record = Vec::new();
        let mut reader = CmtReader::open(path).map_err(&recording_error)?;
        let thread_count = reader.totals().map_or(1, |totals| {
            totals
                .threads
                .iter()
                .filter(|thread| thread.records > 0)
                .count()
        });
        if thread_count > 1 {
            let message = format!(
                "found {thread_count} threads, expected one: a run plays one thread of a recording"
            );
            return Err(failed(name)(message));
        }
        reader
            .read_batch(&mut first_record)
            .map_err(&recording_error)?;
        let thread = first_record.first().map_or(0, |record| record.thread);
        let source = CmtSource::open(path, thread, 0, 0).map_err(&recording_error)?;
        Ok(RecordedRound {
            thread,
            records: source.records_per_round(),
        })
    }
}

/// A digest of the content; empty for a file that cannot be read, whose run fails as well.
pub fn file_digest(path: &Path) -> String {
    hex_digest(&cachemate_files::read_limited(path, MAX_RECORDING_BYTES).unwrap_or_default())
}

pub(crate) fn hex_digest(content: &[u8]) -> String {
    Sha256::digest(content)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
