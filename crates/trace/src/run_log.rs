//! Run logs: the observations, decisions and changes of a loop, window by window (`docs/formats.md`).
//!
//! Problem: a run must be reproducible later, on another machine, bit for bit, and a log whose writer crashed must be
//! usable up to that point. Method: JSON Lines, optionally in a zstd frame that is flushed after every record: the
//! header, one line per record, and a last line with their number. Properties: every number reads back bit for bit
//! (numbers that JSON cannot represent are rejected when written); there is one record in memory; a truncated or
//! damaged log gives every record before the damaged line, and then its line number.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

use cachemate_core::{
    PipelineConfig, PolicyConfig, PredictorConfig, RunHeader, WindowLength, WindowRecord,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::formats::ZSTD_MAGIC;
use crate::{FilePosition, TraceError, create_output};

/// The version that this library writes ([`RunHeader::format`]).
pub const RUN_LOG_VERSION: u32 = 6;
/// Longer lines are rejected; a window with a trace of a million addresses is far below this limit.
const LINE_BYTES_LIMIT: u64 = 64 << 20;

#[derive(PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogEnd {
    /// Number of records in the log.
    end: u64,
}

enum LogSink {
    Plain(BufWriter<File>),
    Compressed(zstd::stream::write::Encoder<'static, BufWriter<File>>),
}

/// Writes a run log, record by record; every record is passed to the system before [`RunLogWriter::push`] returns.
pub struct RunLogWriter {
    sink: LogSink,
    file: String,
    record_count: u64,
}

impl RunLogWriter {
    /// Starts a log, compressed with zstd if the name ends in `.zst`. This sets the header's version.
    ///
    /// # Errors
    /// [`TraceError::Exists`] without `force`, [`TraceError::Io`].
    pub fn create(
        path: impl AsRef<Path>,
        force: bool,
        header: &RunHeader,
    ) -> Result<Self, TraceError> {
        let file = path.as_ref().display().to_string();
        let out = BufWriter::new(create_output(path.as_ref(), force)?);
        let sink = if file.ends_with(".zst") {
            LogSink::Compressed(
                zstd::stream::write::Encoder::new(out, 3)
                    .map_err(TraceError::io_error(&file, "start zstd for"))?,
            )
        } else {
            LogSink::Plain(out)
        };

        let mut writer = RunLogWriter {
            sink,
            file,
            record_count: 0,
        };
        writer.write_line(&RunHeader {
            format: RUN_LOG_VERSION,
            ..header.clone()
        })?;
        Ok(writer)
    }

    /// Appends one record.
    ///
    /// # Errors
    /// [`TraceError::Io`], or [`TraceError::Bad`] if a number is infinite or not a number, which JSON cannot represent.
    pub fn push(&mut self, record: &WindowRecord) -> Result<(), TraceError> {
        self.write_line(record)?;
        self.record_count += 1;
        Ok(())
    }

    /// Closes the log with the number of its records; without this it reads as truncated.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn finish(mut self) -> Result<(), TraceError> {
        self.write_line(&LogEnd {
            end: self.record_count,
        })?;
        if let LogSink::Compressed(encoder) = self.sink {
            let finish_result = encoder.finish().and_then(|mut out| out.flush());
            finish_result.map_err(TraceError::io_error(&self.file, "write"))?;
        }
        Ok(())
    }

    fn write_line<T: Serialize + DeserializeOwned + PartialEq>(
        &mut self,
        value: &T,
    ) -> Result<(), TraceError> {
        let position = FilePosition::Line(self.record_count + 2);
        let value_error = || {
            TraceError::format_error(
                &self.file,
                position,
                "a value that JSON cannot hold",
                "finite numbers",
            )
        };
        let mut text = serde_json::to_vec(value).map_err(|_| value_error())?;
        // Infinite numbers become null without an error, and an optional one would be lost, so the line is read back.
        if !serde_json::from_slice::<T>(&text).is_ok_and(|parsed| parsed == *value) {
            return Err(value_error());
        }

        text.push(b'\n');
        let outcome = match &mut self.sink {
            LogSink::Plain(out) => out.write_all(&text).and_then(|()| out.flush()),
            LogSink::Compressed(out) => out.write_all(&text).and_then(|()| out.flush()),
        };
        outcome.map_err(TraceError::io_error(&self.file, "write"))
    }
}

/// Reads a run log, record by record.
pub struct RunLogReader {
    input: BufReader<Box<dyn Read + Send>>,
    file: String,
    header: RunHeader,
    line: Vec<u8>,
    line_number: u64,
    is_ended: bool,
}

impl RunLogReader {
    /// Opens a log, compressed or not.
    ///
    /// # Errors
    /// [`TraceError`] if it cannot be opened, or if it has no header of a supported version.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let file = path.as_ref().display().to_string();
        let input = cachemate_files::open_plain(path.as_ref())
            .map_err(TraceError::io_error(&file, "open"))?;
        Self::new(Box::new(input), file)
    }

    /// Does the same as [`RunLogReader::open`], from a stream; `file` is its name in errors.
    pub fn new(
        mut input: Box<dyn Read + Send>,
        file: impl Into<String>,
    ) -> Result<Self, TraceError> {
        let file = file.into();
        let mut start = Vec::new();
        input
            .by_ref()
            .take(4)
            .read_to_end(&mut start)
            .map_err(TraceError::io_error(&file, "read"))?;

        let is_compressed = start == ZSTD_MAGIC;
        let whole_input = std::io::Cursor::new(start).chain(input);
        let input: Box<dyn Read + Send> = if is_compressed {
            Box::new(
                zstd::stream::read::Decoder::new(whole_input)
                    .map_err(TraceError::io_error(&file, "unpack"))?,
            )
        } else {
            Box::new(whole_input)
        };
        let mut reader = RunLogReader {
            input: BufReader::new(input),
            file,
            header: empty_header(),
            line: Vec::new(),
            line_number: 0,
            is_ended: false,
        };
        reader.read_line()?;
        let version: FormatVersion = reader.parse("a run log's header")?;
        if version.format != RUN_LOG_VERSION {
            let found = format!("run log format {}", version.format);
            let expected = format!("format {RUN_LOG_VERSION}");
            return Err(reader.log_error(found, &expected));
        }
        reader.header = reader.parse("a run log's header")?;
        Ok(reader)
    }

    /// Everything that a replay needs besides the records.
    pub fn header(&self) -> &RunHeader {
        &self.header
    }

    /// The next record; `None` at the proper end.
    ///
    /// # Errors
    /// [`TraceError::Bad`] with the line, after every record before it; nothing follows.
    pub fn next_record(&mut self) -> Result<Option<WindowRecord>, TraceError> {
        if self.is_ended {
            return Ok(None);
        }
        let result = self.read_record();
        self.is_ended = !matches!(result, Ok(Some(_)));
        result
    }

    fn read_record(&mut self) -> Result<Option<WindowRecord>, TraceError> {
        self.read_line()?;
        if self.line.starts_with(b"{\"end\"") {
            let end: LogEnd = self.parse("the closing line")?;
            let records = self.line_number - 2;
            if end.end != records {
                return Err(self.log_error(
                    format!("an end after {} records", end.end),
                    &format!("after {records}"),
                ));
            }
            return Ok(None);
        }
        self.parse("a record of a run").map(Some)
    }

    fn log_error(&self, found: String, expected: &str) -> TraceError {
        TraceError::format_error(
            &self.file,
            FilePosition::Line(self.line_number),
            found,
            expected,
        )
    }

    fn parse<T: DeserializeOwned>(&self, expected: &str) -> Result<T, TraceError> {
        serde_json::from_slice(&self.line).map_err(|error| {
            // The line's number precedes the message, because serde's own is always 1.
            let (text, column) = (error.to_string(), error.column());
            let message = text
                .rsplit_once(" at line ")
                .map_or(text.as_str(), |(message_part, _)| message_part);
            self.log_error(format!("{message} at column {column}"), expected)
        })
    }

    /// An incomplete line, as at the end of a truncated log, is an error.
    fn read_line(&mut self) -> Result<(), TraceError> {
        self.line.clear();
        self.line_number += 1;
        let read_result = self
            .input
            .by_ref()
            .take(LINE_BYTES_LIMIT)
            .read_until(b'\n', &mut self.line);

        if let Err(error) = read_result {
            if self.line_number > 1 && error.kind() == std::io::ErrorKind::UnexpectedEof {
                let expected = "a whole line (is the run still in progress, or the log truncated?)";
                return Err(self.log_error(
                    "the end of the file in a compressed block".to_string(),
                    expected,
                ));
            }

            if self.line_number > 1 || error.kind() == std::io::ErrorKind::UnexpectedEof {
                return Err(self.log_error(
                    format!("bytes that do not unpack ({error})"),
                    "a whole line",
                ));
            }
            return Err(TraceError::io_error(&self.file, "read")(error));
        }

        if self.line.pop_if(|byte| *byte == b'\n').is_some() {
            return Ok(());
        }

        let found = match self.line.len() as u64 {
            LINE_BYTES_LIMIT => format!("more than {LINE_BYTES_LIMIT} bytes"),
            0 => "the end of the file".to_string(),
            bytes => format!("the end of the file after {bytes} bytes of the line"),
        };
        Err(self.log_error(
            found,
            "a whole line (is the run still in progress, or the log truncated?)",
        ))
    }
}

/// The version of a file, which is read first, because the fields of another version would give a misleading error.
#[derive(Deserialize)]
pub(crate) struct FormatVersion {
    pub(crate) format: u32,
}

fn empty_header() -> RunHeader {
    RunHeader {
        format: RUN_LOG_VERSION,
        topology: cachemate_core::Topology::default(),
        capabilities: cachemate_core::Capabilities {
            abilities: Default::default(),
            partitions: Vec::new(),
            bandwidth: Vec::new(),
            min_window_ns: 0,
            min_slice_ns: None,
        },
        pipeline: PipelineConfig {
            policy: PolicyConfig {
                name: String::new(),
                parameters: String::new(),
                seed: 0,
            },
            guard: None,
            profilers: Vec::new(),
            predictor: PredictorConfig {
                miss_penalty_cycles: 0.0,
                miss_penalty_source: String::new(),
            },
            first_window: WindowLength::Time { ns: 1 },
        },
    }
}

#[cfg(test)]
mod tests;
