//! Recording programs, trace and run-log formats.
//!
//! Everything that reads a file here works in constant memory, never panics on any input, and names file, line or
//! offset, what was found and what was expected.

#![warn(missing_docs)]

mod bundled_recordings;
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

pub use bundled_recordings::{bundled_recording, bundled_recordings, recording_dirs, recordings_in};
pub use cmt::{BLOCK_RECORDS, CMT_VERSION, CmtReader, CmtWriter};
pub use convert::{ConversionSummary, convert};
pub use error::{FilePosition, TraceError};
pub use formats::{
    ChampSimReader, DinReader, Format, LackeyReader, OracleGeneralReader, RawU64Reader, open, open_input,
};
pub use names::unknown_name_error;
pub use output::create_output;
pub use profile_file::{
    ActivityVector, PROFILE_VERSION, ProfileFile, ProfileSource, StackPositions, StoredCurve, StoredCurvePoint,
    StoredHistogram, StoredInterval, StoredIntervals,
};
pub use record::{
    ChildProcesses, Recorder, RecorderTool, RecordingEnd, RecordingProgress, RecordingSummary, find_recording,
};
pub use record_type::{AccessRecord, L1Filter, ProcessTotals, ThreadTotals, TraceHeader, TraceTotals};
pub use run_log::{RUN_LOG_VERSION, RunLogReader, RunLogWriter};
pub use source::CmtSource;

/// A trace, read batch by batch in constant memory.
pub trait TraceReader: Send {
    /// The metadata of the trace.
    fn header(&self) -> &TraceHeader;

    /// Replaces `batch` by the next records (65 536 at most, and never none before the end); `false` = the end.
    ///
    /// # Errors
    /// [`TraceError`], after everything before the bad place has been given; nothing follows it.
    fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError>;

    /// As [`TraceReader::read_batch`], the addresses alone: faster where the rest is of no interest.
    ///
    /// # Errors
    /// As [`TraceReader::read_batch`].
    fn read_addresses(&mut self, batch: &mut Vec<u64>) -> Result<bool, TraceError> {
        let mut records = Vec::new();
        let more = self.read_batch(&mut records)?;
        batch.clear();
        batch.extend(records.iter().map(|record| record.address));
        Ok(more)
    }

    /// The sums, once they are known: after the end, or at once for a whole `.cmt` file that can be sought in.
    fn totals(&self) -> Option<&TraceTotals>;
}
