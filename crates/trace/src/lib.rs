//! Recording of programs, and the formats of traces and run logs.
//!
//! All code here that reads a file uses constant memory and never panics on any input. Its errors give the file, the
//! line or offset, the value found and the value expected.

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
pub use formats::{Format, open, open_input};
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
    /// Returns the metadata of the trace.
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

    /// Returns the totals, once they are known: after the end, or immediately for a complete, seekable `.cmt` file.
    fn totals(&self) -> Option<&TraceTotals>;
}
