//! Reads traces for all commands; formats, standard input, progress, Ctrl-C and damage are handled only here.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cachemate_study::{CurveRequest, MeasuredCurves, refuse_late_bursts, to_lines};
use cachemate_trace::{
    AccessRecord, Format, TraceError, TraceHeader, TraceReader, TraceTotals, bundled_recording,
    open_near,
};
use clap::Args;
use indicatif::ProgressBar;

use super::input::InterruptibleInput;
use crate::exit::InterruptedError;
use crate::session::Session;

/// Number of lines in a portion for several threads.
const PORTION_LINES: usize = 1 << 20;

/// Options for reading a trace.
#[derive(Args, Clone, Default)]
pub struct TraceArgs {
    /// Format of the file [default: by content or name]: cmt, lackey, din, csv, drmemtrace, u64,
    /// champsim, oracle-general, oracle-general-unit; input compressed by gzip, xz or zstd is unpacked
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Use the records before the first damaged position instead of refusing the file
    #[arg(long)]
    pub salvage: bool,
}

/// An open trace. It ends early after an interruption and, with `--salvage`, at damage.
pub struct TraceInput {
    reader: Box<dyn TraceReader>,
    seekable: Option<SeekableTrace>,
    salvage: bool,
    stop: Arc<AtomicBool>,
    bar: ProgressBar,
    /// Number of records returned so far.
    record_count: u64,
    totals: Option<TraceTotals>,
    damage: Option<TraceError>,
    is_stopped: bool,
}

/// A complete recording, or another file that can be read from any record.
#[derive(Clone)]
pub struct SeekableTrace {
    pub path: PathBuf,
    format: Option<Format>,
}

impl SeekableTrace {
    /// Opens it at or before a record, and returns the number of the first record that will be read.
    pub fn open_at(&self, record: u64) -> Result<(u64, Box<dyn TraceReader>), TraceError> {
        open_near(&self.path.to_string_lossy(), self.format, record)
    }
}

impl TraceInput {
    /// Opens `path`: a file, the name of a bundled recording, or `-` for standard input.
    pub fn open(
        session: &Session,
        path: &str,
        args: &TraceArgs,
        subject: &'static str,
    ) -> anyhow::Result<Self> {
        let format = args
            .format
            .as_deref()
            .map(str::parse::<Format>)
            .transpose()?;
        let stop = session.interrupt_flag();
        let resolved_path = if path == "-" {
            PathBuf::from(path)
        } else {
            recording_path(path)?
        };
        let path = resolved_path.to_str().unwrap_or(path);
        let pipe = match path {
            "-" => Some(InterruptibleInput::stdin(Arc::clone(&stop))?),
            _ => cachemate_files::open_pipe(path.as_ref())
                .map_err(|source| TraceError::io_error(path, "open")(source))?
                .map(|pipe| InterruptibleInput::new(pipe, Arc::clone(&stop))),
        };
        let is_file = pipe.is_none();
        let shown_path = if path == "-" { "standard input" } else { path };
        let open_result = match pipe {
            Some(input) => cachemate_trace::open_input(Box::new(input), shown_path, format),
            None => cachemate_trace::open(path, format),
        };
        let reader = open_result.map_err(|error| match stop.load(Ordering::Relaxed) {
            true => InterruptedError("nothing was read".to_string()).into(),
            false => anyhow::Error::from(error),
        })?;
        let total_records = reader.totals().map(|totals| totals.records);
        let seekable = SeekableTrace {
            path: PathBuf::from(path),
            format,
        };
        Ok(TraceInput {
            reader,
            seekable: (is_file && total_records.is_some()).then_some(seekable),
            salvage: args.salvage,
            stop,
            bar: session.progress_bar(subject, total_records),
            record_count: 0,
            totals: None,
            damage: None,
            is_stopped: false,
        })
    }

    /// Updates the counts after one batch. Returns `false` at the end, at tolerated damage, and after Ctrl-C.
    fn finish_batch(
        &mut self,
        result: Result<bool, TraceError>,
        records: usize,
    ) -> Result<bool, TraceError> {
        let has_more = match result {
            // After an interruption, the input may end anywhere, so its error is ignored.
            Err(_) if self.stop.load(Ordering::Relaxed) => false,
            Err(error) if self.salvage => {
                self.damage = Some(error);
                false
            }
            Err(error) => return Err(error),
            Ok(has_more) => has_more,
        };
        if !has_more {
            self.is_stopped |= self.stop.load(Ordering::Relaxed);
            return Ok(false);
        }
        self.record_count += records as u64;
        self.bar.set_position(self.record_count);
        Ok(true)
    }

    /// Reads the next addresses; see [`TraceReader::read_addresses`].
    pub fn next_addresses(&mut self, batch: &mut Vec<u64>) -> Result<bool, TraceError> {
        if self.is_stopping() {
            return Ok(false);
        }
        let has_more = self.reader.read_addresses(batch);
        self.finish_batch(has_more, batch.len())
    }

    /// Reads the next records; see [`TraceReader::read_batch`].
    pub fn next_records(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
        if self.is_stopping() {
            return Ok(false);
        }
        let has_more = self.reader.read_batch(batch);
        self.finish_batch(has_more, batch.len())
    }

    fn is_stopping(&mut self) -> bool {
        self.is_stopped = self.is_stopped || self.stop.load(Ordering::Relaxed);
        self.is_stopped || self.damage.is_some()
    }

    /// Replaces `lines` by the next lines of `1 << line_shift` bytes, in portions that are worth starting threads for;
    /// returns `false` at the end.
    pub fn next_lines(
        &mut self,
        line_shift: u32,
        lines: &mut Vec<u64>,
    ) -> Result<bool, TraceError> {
        lines.clear();
        let mut batch = Vec::new();
        while lines.len() < PORTION_LINES && self.next_addresses(&mut batch)? {
            lines.extend_from_slice(&batch);
        }
        to_lines(lines, line_shift);
        Ok(!lines.is_empty())
    }

    /// Measures the rest of the trace; a seekable one is read in ranges, on all threads of the request.
    pub fn measure(&mut self, request: &CurveRequest) -> anyhow::Result<MeasuredCurves> {
        if let Some(seekable) = self.seekable.clone()
            && self.burst_starts().is_empty()
            && !self.salvage
        {
            let records = self.expected_records();
            let open = |record: u64| seekable.open_at(record);
            let (curves, covered) = request.measure_ranges(records, &open, &self.observer())?;
            self.record_count = covered;
            self.is_stopped = covered < records;
            return Ok(curves);
        }

        let bursts = self.burst_starts().to_vec();
        let mut measurement = request.begin(self.expected_records(), &bursts);
        if measurement.needs_records() {
            let header = self.header().clone();
            let mut records = Vec::new();
            while self.next_records(&mut records)? {
                measurement.push_records(&header, &records)?;
            }
        } else {
            let mut addresses = Vec::new();
            while self.next_addresses(&mut addresses)? {
                measurement.push_addresses(&mut addresses)?;
            }
        }
        refuse_late_bursts(&bursts, self.reader.totals())?;
        Ok(measurement.finish()?)
    }

    /// `None` for a trace that can only be read in order.
    pub fn seekable(&self) -> Option<&SeekableTrace> {
        self.seekable.as_ref()
    }

    /// Threads call it after each batch of records: it shows the progress, and its result is false once they must stop.
    pub fn observer(&self) -> impl Fn(u64) -> bool + Sync + use<> {
        let (bar, stop) = (self.bar.clone(), Arc::clone(&self.stop));
        move |count| {
            bar.inc(count);
            !stop.load(Ordering::Relaxed)
        }
    }

    /// Ends the progress bar, warns about skipped records, and returns the totals if the whole file was read.
    pub fn finish(&mut self, session: &Session) -> Option<TraceTotals> {
        self.bar.finish_and_clear();
        if let Some(damage) = &self.damage {
            session.warn(&format!(
                "{damage}; the {} records before it are used",
                self.record_count
            ));
        }
        // The totals describe the whole file, so they do not apply if only a part was read.
        let is_whole = self.damage.is_none() && !self.is_stopped;
        self.reader.totals().filter(|_| is_whole).cloned()
    }

    /// Number of records if it is known before reading, otherwise 0.
    pub fn expected_records(&self) -> u64 {
        self.bar.length().unwrap_or(0)
    }

    /// First records of the bursts of a seekable file, before it is read; empty for a recording without gaps.
    pub fn burst_starts(&self) -> &[u64] {
        self.reader.totals().map_or(&[], |totals| &totals.bursts)
    }

    /// Checks that the trace was read to its end; called after the result has been printed.
    pub fn check_whole(&self) -> anyhow::Result<()> {
        if !self.is_stopped {
            return Ok(());
        }
        Err(InterruptedError(format!(
            "the result covers the first {} records",
            self.record_count
        ))
        .into())
    }
}

/// `name` is a path, or the name of a bundled recording.
pub fn recording_path(name: &str) -> anyhow::Result<PathBuf> {
    let path = Path::new(name);
    let is_path = cachemate_files::path_exists(path) || name.contains(['/', '.']);
    Ok(if is_path {
        path.to_path_buf()
    } else {
        bundled_recording(name)?
    })
}

/// The implementation for code that takes any reader, such as conversion.
impl TraceReader for TraceInput {
    fn header(&self) -> &TraceHeader {
        self.reader.header()
    }
    fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
        let has_more = self.next_records(batch)?;
        if !has_more {
            batch.clear();
            let read_bursts = || {
                let bursts = self.burst_starts().iter().copied();
                bursts.filter(|&first| first < self.record_count).collect()
            };
            let partial_totals = || TraceTotals {
                ended: Some("interrupted".to_string()),
                records: self.record_count,
                bursts: read_bursts(),
                ..TraceTotals::default()
            };
            let is_partial = self.is_stopped || self.damage.is_some();
            self.totals = if is_partial {
                Some(partial_totals())
            } else {
                self.reader.totals().cloned()
            };
        }
        Ok(has_more)
    }
    fn totals(&self) -> Option<&TraceTotals> {
        self.totals.as_ref()
    }
}
