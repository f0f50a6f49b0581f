//! Recording of programs, and the formats of traces and run logs.
//!
//! A recording is larger than memory, may have been cut off by Ctrl-C, and is read years later by a
//! program that does not trust it. So traces are blocks that decode independently of each other,
//! each with a checksum that is verified before anything is decoded, and every length is compared
//! with a limit before memory is allocated. Numbers read back bit for bit, because a replay that
//! differs in the last digit proves nothing.
//!
//! For example, one bit of the third block of a trace has changed on disk. A reader returns the
//! records of the first two blocks and then an error with the block, its byte offset, and the
//! checksums found and expected. `--salvage` keeps the two blocks, and nobody gets a third one that
//! was guessed.
//!
//! # Invariants
//! - A changed byte never yields different records, and a truncated file yields its intact blocks.
//! - A reader uses constant memory, however long the file is, and never panics on any input.
//! - An error has the file, the line or offset, the value found and the value expected.
//! - A file has its name once it is complete.

#![warn(missing_docs)]

mod bundled_recordings;
mod children;
mod cmt;
mod convert;
mod error;
mod formats;
mod names;
mod output;
mod profile_file;
mod record;
mod record_type;
mod run_log;
mod source;
mod stored_sample;

pub use bundled_recordings::{
    bundled_recording, bundled_recordings, find_recording, find_recordings_in, recording_dirs,
};
pub use children::end_with_parent;
pub use cmt::{BLOCK_RECORDS, CMT_VERSION, CmtReader, CmtWriter};
pub use convert::{ConversionSummary, convert};
pub use error::{FilePosition, TraceError};
pub use formats::{Format, open, open_input, open_near};
pub use names::unknown_name_error;
pub use output::create_output;
pub use profile_file::{
    ActivityVector, PROFILE_VERSION, ProfileFile, ProfileSource, StackPositions, StoredCurve,
    StoredCurvePoint, StoredHistogram, StoredInterval, StoredIntervals,
};
pub use record::{
    BurstSampling, ChildProcesses, Recorder, RecorderTool, RecordingEnd, RecordingProgress,
    RecordingSummary, find_recorder_tool,
};
pub use record_type::{
    AccessRecord, L1Filter, ProcessTotals, ThreadTotals, TraceHeader, TraceTotals,
};
pub use run_log::{RUN_LOG_VERSION, RunLogReader, RunLogWriter};
pub use source::CmtSource;

/// A trace, read batch by batch in constant memory.
pub trait TraceReader: Send {
    /// Known before the first record is read.
    fn header(&self) -> &TraceHeader;

    /// Replaces `batch` by the next records (at most 65 536, and at least one before the end); `false` at the end.
    ///
    /// # Errors
    /// [`TraceError`], after all records before the damaged position were returned; nothing follows it.
    fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError>;

    /// Like [`TraceReader::read_batch`], but returns only addresses, which is faster.
    fn read_addresses(&mut self, batch: &mut Vec<u64>) -> Result<bool, TraceError> {
        let mut records = Vec::new();
        let has_more = self.read_batch(&mut records)?;
        batch.clear();
        batch.extend(records.iter().map(|record| record.address));
        Ok(has_more)
    }

    /// The totals, once they are known: after the end, or immediately for a file that [`open_near`] opens anywhere.
    fn totals(&self) -> Option<&TraceTotals>;
}
