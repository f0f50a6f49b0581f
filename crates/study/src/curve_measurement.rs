//! Measures the distances of a trace: exact or sampled, of all accesses or also of each thread, on one thread or several.
//!
//! A trace that can be read from any record is divided into ranges, each of which one thread reads, decodes and measures
//! ([`CurveRequest::measure_ranges`]). Any other input is pushed in order ([`CurveRequest::begin`]). Both give the same
//! bits, because what is measured of two neighboring stretches can be merged exactly
//! ([`cachemate_locality::stack::Segment`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use cachemate_core::FieldError;
use cachemate_locality::sampled::{FixedRateSampler, SampledCurve};
use cachemate_locality::stack::{
    MeasuredRange, Segment, SegmentMeter, SegmentParts, SegmentStream, StackError, StackLimits,
    measure_ranges,
};
use cachemate_trace::{AccessRecord, TraceError, TraceHeader, TraceReader};
use serde::{Deserialize, Serialize};

use crate::bursts::{BurstDistances, MeasuredDistances};

/// Minimum number of records for several threads; shorter traces end before these pay off.
const MIN_RECORDS_FOR_THREADS: u64 = 4_000_000;
/// Maximum number of records in a range, for each line that a curve tells apart: merging, which costs an access or two for
/// each line, then takes a small part of the time, and a thread that is late delays the others little. A shorter trace is
/// divided into equal ranges all the same, because the number of its lines is known only at the end, and a thread without a
/// range would wait.
const RECORDS_PER_LINE: u64 = 16;
/// Maximum number of ranges of a thread, because a file that is mostly holes may have any number of records.
const MAX_ROUNDS: u64 = 1 << 16;
/// Number of accesses of which the parts are told apart together.
const PORTION_ACCESSES: usize = 1 << 16;
/// Number of lines up to which a curve without a list of all distances knows everything, 256 MiB in lines of 64 bytes.
const MIN_CAP_LINES: u64 = 1 << 22;

/// The accesses whose distances are measured.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum CurveSubject {
    /// All of them.
    All,
    /// All of them together, and those of each process by themselves.
    EachProcess,
    /// All of them together, and those of each thread by themselves.
    EachThread,
    /// A sample of the lines.
    Sample {
        /// Share of the lines.
        rate: f64,
        /// Seed for the choice of the lines.
        seed: u64,
    },
}

/// The measurement of one trace.
#[derive(Clone, Copy, Debug)]
pub struct CurveRequest {
    subject: CurveSubject,
    /// Base-2 logarithm of the line size.
    line_shift: u32,
    limits: StackLimits,
    threads: Option<usize>,
}

/// What was measured of a trace.
pub struct MeasuredCurves {
    /// All accesses.
    pub whole: WholeCurve,
    /// Processes or threads as (process, thread), in order. The thread is 0 for a process.
    pub parts: Vec<((u32, u32), MeasuredDistances)>,
}

/// What was measured of all accesses.
pub enum WholeCurve {
    /// Every access, or bursts of them.
    Exact(MeasuredDistances),
    /// A sample of the lines.
    Sampled(SampledCurve),
}

/// The reason why a trace cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// Too many distinct lines.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A stored segment has repeated lines, or distances that its lines do not allow.
    #[error("a stored segment: found one that no trace has, expected what a shard has stored")]
    Segment,
}

/// A stretch of a trace as it is stored: see [`SegmentParts`].
#[derive(Debug, Serialize, Deserialize)]
pub struct StoredSegment {
    first_touches: Vec<u64>,
    last_touches: Vec<u64>,
    counts: Vec<(u64, u64)>,
    beyond_count: u64,
}

/// Opens a trace at or before a record, and returns the number of the first record that will be read.
pub type TraceOpener<'a> =
    &'a (dyn Fn(u64) -> Result<(u64, Box<dyn TraceReader>), TraceError> + Sync);

impl CurveRequest {
    /// Describes a measurement; `line_bytes` is a power of two. If `threads` is `None`, large traces use all CPUs.
    ///
    /// # Errors
    /// The rate of a sample is invalid.
    pub fn new(
        subject: CurveSubject,
        line_bytes: u32,
        limits: StackLimits,
        threads: Option<usize>,
    ) -> Result<Self, FieldError> {
        if let CurveSubject::Sample { rate, seed } = subject {
            FixedRateSampler::new(rate, seed)?;
        }
        Ok(CurveRequest {
            subject,
            line_shift: line_bytes.trailing_zeros(),
            limits,
            threads,
        })
    }

    /// Starts the measurement of accesses that are pushed in order. `expected_records` is 0 if unknown; `bursts` are the
    /// first records of the bursts, if the recording has any.
    pub fn begin(&self, expected_records: u64, bursts: &[u64]) -> CurveMeasurement {
        let request = *self;
        let expected = (expected_records > 0).then_some(expected_records);
        let threads = self.thread_count(expected);
        let engine = match self.subject {
            CurveSubject::All if !bursts.is_empty() => {
                CurveEngine::Bursts(Box::new(BurstDistances::new(bursts)))
            }
            CurveSubject::All | CurveSubject::Sample { .. } => {
                let new_meter = move || request.new_line_meter();
                CurveEngine::Lines(SegmentStream::new(threads, expected, new_meter))
            }
            CurveSubject::EachProcess | CurveSubject::EachThread => {
                let new_meter = move || request.new_part_meter();
                CurveEngine::Parts(SegmentStream::new(threads, expected, new_meter))
            }
        };
        CurveMeasurement {
            request,
            engine,
            part_accesses: Vec::new(),
        }
    }

    /// Measures a trace of `records` records, each range of which is opened separately. `on_records` is called with the
    /// number of records that were read, and returns whether to go on; the result covers the records before the first
    /// that was not read, whose number is returned as well.
    ///
    /// # Errors
    /// The first range that cannot be measured.
    pub fn measure_ranges(
        &self,
        records: u64,
        open_at: TraceOpener<'_>,
        on_records: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<(MeasuredCurves, u64), MeasureError> {
        let ranges = self.record_ranges(0..records, open_at, on_records);
        match self.subject {
            CurveSubject::All | CurveSubject::Sample { .. } => {
                let (meter, covered) = ranges.measure(|| self.new_line_meter())?;
                Ok((meter.finish()?, covered))
            }
            CurveSubject::EachProcess | CurveSubject::EachThread => {
                let (meter, covered) = ranges.measure(|| self.new_part_meter())?;
                Ok((meter.finish()?, covered))
            }
        }
    }

    /// Measures these records of a trace, to be joined with those before and after them. `None` if `on_records` stopped it.
    ///
    /// # Errors
    /// As [`Self::measure_ranges`].
    pub fn measure_segment(
        &self,
        records: Range<u64>,
        open_at: TraceOpener<'_>,
        on_records: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<Option<StoredSegment>, MeasureError> {
        let record_count = records.end - records.start;
        let ranges = self.record_ranges(records, open_at, on_records);
        let (segment, covered) = ranges.measure(|| Segment::new(self.limits))?;
        if covered < record_count {
            return Ok(None);
        }
        let SegmentParts {
            first_touches,
            last_touches,
            counts,
            beyond_count,
        } = segment.into_parts()?;
        Ok(Some(StoredSegment {
            first_touches,
            last_touches,
            counts,
            beyond_count,
        }))
    }

    /// Joins consecutive segments of a trace, from the first one on.
    ///
    /// # Errors
    /// A segment has an error, or is none of a trace.
    pub fn join_segments<E: From<MeasureError>>(
        &self,
        segments: impl IntoIterator<Item = Result<StoredSegment, E>>,
    ) -> Result<MeasuredCurves, E> {
        let mut whole = Segment::new(self.limits);
        let threads = self.thread_count(None);
        for stored in segments {
            let stored = stored?;
            let parts = SegmentParts {
                first_touches: stored.first_touches,
                last_touches: stored.last_touches,
                counts: stored.counts,
                beyond_count: stored.beyond_count,
            };
            let segment = Segment::from_parts(parts, self.limits);
            let segment = segment.ok_or(MeasureError::Segment)?;
            whole.merge(segment, threads).map_err(MeasureError::from)?;
        }
        let meter = LineMeter::Exact(Box::new(whole));
        Ok(meter.finish().map_err(MeasureError::from)?)
    }

    fn record_ranges<'a>(
        &self,
        records: Range<u64>,
        open_at: TraceOpener<'a>,
        on_records: &'a (dyn Fn(u64) -> bool + Sync),
    ) -> RecordRanges<'a> {
        let cap_lines = self.limits.cap_lines.map_or(0, |cap| cap as u64);
        RecordRanges {
            max_records: RECORDS_PER_LINE.saturating_mul(cap_lines.max(MIN_CAP_LINES)),
            threads: self.thread_count(Some(records.end - records.start)),
            records,
            open_at,
            on_records,
            line_shift: self.line_shift,
        }
    }

    fn thread_count(&self, expected_records: Option<u64>) -> usize {
        let is_short = expected_records.is_some_and(|records| records < MIN_RECORDS_FOR_THREADS);
        match self.threads {
            Some(threads) => threads,
            None if is_short => 1,
            None => cpu_count(),
        }
    }

    fn new_line_meter(&self) -> LineMeter {
        match self.subject {
            CurveSubject::Sample { rate, seed } => {
                let sampler = FixedRateSampler::new(rate, seed);
                LineMeter::Sampled(Box::new(sampler.expect("checked by `new`")))
            }
            _ => LineMeter::Exact(Box::new(Segment::new(self.limits))),
        }
    }

    fn new_part_meter(&self) -> PartMeter {
        PartMeter {
            limits: self.limits,
            splits_processes: self.subject == CurveSubject::EachThread,
            whole: Segment::new(self.limits),
            parts: BTreeMap::new(),
            lines: Vec::new(),
        }
    }
}

/// Limits under which a curve at these sizes is exact, with memory in proportion to the largest of them for a trace of any
/// length.
pub fn limits_for_sizes(sizes_bytes: &[u64], line_bytes: u32) -> StackLimits {
    let largest = sizes_bytes.iter().copied().max().unwrap_or(0) / u64::from(line_bytes);
    let cap_lines = usize::try_from(largest.max(MIN_CAP_LINES));
    StackLimits {
        cap_lines: cap_lines.ok(),
        max_lines: None,
    }
}

/// A trace whose records are pushed in order.
pub struct CurveMeasurement {
    request: CurveRequest,
    engine: CurveEngine,
    part_accesses: Vec<PartAccess>,
}

enum CurveEngine {
    Lines(SegmentStream<LineMeter>),
    Parts(SegmentStream<PartMeter>),
    Bursts(Box<BurstDistances>),
}

impl CurveMeasurement {
    /// Whether records are needed, and not only their addresses.
    pub fn needs_records(&self) -> bool {
        matches!(self.engine, CurveEngine::Parts(_))
    }

    /// Processes the next addresses, which become lines. Parts are not told apart.
    ///
    /// # Errors
    /// The trace has too many distinct lines.
    pub fn push_addresses(&mut self, addresses: &mut [u64]) -> Result<(), StackError> {
        to_lines(addresses, self.request.line_shift);
        match &mut self.engine {
            CurveEngine::Lines(stream) => stream.push(addresses),
            CurveEngine::Bursts(bursts) => bursts.push(addresses),
            CurveEngine::Parts(stream) => {
                self.part_accesses.clear();
                let of_no_part = |&line: &u64| PartAccess {
                    line,
                    ..PartAccess::default()
                };
                self.part_accesses.extend(addresses.iter().map(of_no_part));
                stream.push(&self.part_accesses)
            }
        }
    }

    /// Processes the next records.
    ///
    /// # Errors
    /// The trace has too many distinct lines.
    pub fn push_records(
        &mut self,
        header: &TraceHeader,
        records: &[AccessRecord],
    ) -> Result<(), StackError> {
        if let CurveEngine::Parts(stream) = &mut self.engine {
            let line_shift = self.request.line_shift;
            list_part_accesses(header, records, line_shift, &mut self.part_accesses);
            return stream.push(&self.part_accesses);
        }
        let mut addresses: Vec<u64> = records.iter().map(|record| record.address).collect();
        self.push_addresses(&mut addresses)
    }

    /// Ends the measurement.
    ///
    /// # Errors
    /// The trace has too many distinct lines.
    pub fn finish(self) -> Result<MeasuredCurves, StackError> {
        match self.engine {
            CurveEngine::Lines(stream) => stream.finish()?.finish(),
            CurveEngine::Parts(stream) => stream.finish()?.finish(),
            CurveEngine::Bursts(bursts) => Ok(MeasuredCurves {
                whole: WholeCurve::Exact(bursts.finish()?),
                parts: Vec::new(),
            }),
        }
    }
}

/// Number of CPUs that this process may use; 1 if it is unknown.
pub fn cpu_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Replaces addresses by those of their lines of `1 << line_shift` bytes.
pub fn to_lines(addresses: &mut [u64], line_shift: u32) {
    for address in addresses {
        *address >>= line_shift;
    }
}

/// An access as a meter takes it.
trait TraceAccess: Sized {
    /// Replaces `batch` by the next accesses of a trace; `false` at the end.
    fn read_batch(
        reader: &mut dyn TraceReader,
        line_shift: u32,
        batch: &mut Vec<Self>,
    ) -> Result<bool, TraceError>;
}

/// A line address.
impl TraceAccess for u64 {
    fn read_batch(
        reader: &mut dyn TraceReader,
        line_shift: u32,
        batch: &mut Vec<u64>,
    ) -> Result<bool, TraceError> {
        let has_more = reader.read_addresses(batch)?;
        to_lines(batch, line_shift);
        Ok(has_more)
    }
}

/// The ranges into which records of a trace are divided.
struct RecordRanges<'a> {
    records: Range<u64>,
    max_records: u64,
    threads: usize,
    open_at: TraceOpener<'a>,
    on_records: &'a (dyn Fn(u64) -> bool + Sync),
    line_shift: u32,
}

impl RecordRanges<'_> {
    /// What was measured, and the number of records that it covers.
    fn measure<M: SegmentMeter<Access: TraceAccess>>(
        &self,
        new_meter: impl Fn() -> M + Sync,
    ) -> Result<(M, u64), MeasureError> {
        // Whole rounds of equal ranges, so that the threads end together.
        let record_count = self.records.end - self.records.start;
        let threads = self.threads.max(1) as u64;
        let rounds = record_count
            .div_ceil(threads.saturating_mul(self.max_records))
            .clamp(1, MAX_ROUNDS);
        let range_count = rounds * threads;
        let range_records = record_count.div_ceil(range_count).max(1);
        let covered: Vec<AtomicU64> = (0..range_count).map(|_| AtomicU64::new(0)).collect();

        let measure_range = |range: u64| {
            let start = (self.records.start + range * range_records).min(self.records.end);
            let end = (start + range_records).min(self.records.end);
            let mut meter = new_meter();
            let count = self.measure_range(start, end, &mut meter)?;
            covered[range as usize].store(count, Ordering::Relaxed);
            let is_whole = count == end - start;
            Ok::<_, MeasureError>(MeasuredRange { meter, is_whole })
        };
        let meter = measure_ranges(self.threads, range_count, measure_range)?;

        let mut covered_records = 0;
        for count in covered.iter().map(|count| count.load(Ordering::Relaxed)) {
            covered_records += count;
            if count < range_records {
                break;
            }
        }
        Ok((meter.unwrap_or_else(new_meter), covered_records))
    }

    /// Measures the records from `start` on and before `end`, and returns how many were read.
    fn measure_range<M: SegmentMeter<Access: TraceAccess>>(
        &self,
        start: u64,
        end: u64,
        meter: &mut M,
    ) -> Result<u64, MeasureError> {
        if start == end {
            return Ok(0);
        }
        let (mut next_record, mut reader) = (self.open_at)(start)?;
        let mut batch = Vec::new();
        let mut count = 0;
        while next_record < end && M::Access::read_batch(&mut *reader, self.line_shift, &mut batch)?
        {
            let batch_len = batch.len() as u64;
            let skipped = start.saturating_sub(next_record).min(batch_len);
            let kept_end = (end - next_record).min(batch_len);
            next_record += batch_len;
            let kept = &batch[skipped as usize..kept_end.max(skipped) as usize];
            meter.push(kept)?;
            count += kept.len() as u64;
            if !(self.on_records)(kept.len() as u64) {
                break;
            }
        }
        Ok(count)
    }
}

/// Measures all accesses.
enum LineMeter {
    Exact(Box<Segment>),
    Sampled(Box<FixedRateSampler>),
}

impl LineMeter {
    fn finish(self) -> Result<MeasuredCurves, StackError> {
        let whole = match self {
            LineMeter::Exact(segment) => WholeCurve::Exact(segment.finish()?.into()),
            LineMeter::Sampled(sampler) => WholeCurve::Sampled(sampler.finish()?),
        };
        Ok(MeasuredCurves {
            whole,
            parts: Vec::new(),
        })
    }
}

impl SegmentMeter for LineMeter {
    type Access = u64;
    fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        match self {
            LineMeter::Exact(segment) => segment.push(lines),
            LineMeter::Sampled(sampler) => sampler.push(lines),
        }
    }
    fn merge(&mut self, next: Self, threads: usize) -> Result<(), StackError> {
        match (self, next) {
            (LineMeter::Exact(segment), LineMeter::Exact(next)) => segment.merge(*next, threads),
            (LineMeter::Sampled(sampler), LineMeter::Sampled(next)) => {
                sampler.merge(*next, threads)
            }
            _ => unreachable!("all meters of a request are of one kind"),
        }
    }
    fn line_count(&self) -> usize {
        match self {
            LineMeter::Exact(segment) => segment.line_count(),
            LineMeter::Sampled(sampler) => SegmentMeter::line_count(&**sampler),
        }
    }
}

/// An access with the process and the thread that made it.
#[derive(Clone, Copy, Default)]
struct PartAccess {
    line: u64,
    process: u32,
    thread: u32,
}

impl PartAccess {
    /// The process, and the thread if the threads of a process are parts of their own; otherwise 0 in its place.
    fn part_key(&self, splits_processes: bool) -> (u32, u32) {
        let thread = if splits_processes { self.thread } else { 0 };
        (self.process, thread)
    }
}

/// Measures all accesses together, and those of each part.
struct PartMeter {
    limits: StackLimits,
    /// Whether the threads of a process are parts of their own.
    splits_processes: bool,
    whole: Segment,
    parts: BTreeMap<(u32, u32), Segment>,
    lines: Vec<u64>,
}

impl PartMeter {
    fn push_portion(&mut self, accesses: &[PartAccess]) -> Result<(), StackError> {
        self.lines.clear();
        self.lines.extend(accesses.iter().map(|access| access.line));
        self.whole.push(&self.lines)?;
        // Consecutive accesses of one part are pushed together, because a thread usually runs for some time.
        let splits_processes = self.splits_processes;
        let key = |access: &PartAccess| access.part_key(splits_processes);
        let mut start = 0;
        for part in accesses.chunk_by(|a, b| key(a) == key(b)) {
            let segment = self.parts.entry(key(&part[0]));
            let segment = segment.or_insert_with(|| Segment::new(self.limits));
            segment.push(&self.lines[start..start + part.len()])?;
            start += part.len();
        }
        Ok(())
    }

    fn finish(self) -> Result<MeasuredCurves, StackError> {
        let mut parts = Vec::new();
        for (key, segment) in self.parts {
            parts.push((key, segment.finish()?.into()));
        }
        Ok(MeasuredCurves {
            whole: WholeCurve::Exact(self.whole.finish()?.into()),
            parts,
        })
    }
}

impl SegmentMeter for PartMeter {
    type Access = PartAccess;
    fn push(&mut self, accesses: &[PartAccess]) -> Result<(), StackError> {
        for portion in accesses.chunks(PORTION_ACCESSES) {
            self.push_portion(portion)?;
        }
        Ok(())
    }
    fn merge(&mut self, next: Self, threads: usize) -> Result<(), StackError> {
        self.whole.merge(next.whole, threads)?;
        for (key, segment) in next.parts {
            let part = self.parts.entry(key);
            let part = part.or_insert_with(|| Segment::new(self.limits));
            part.merge(segment, threads)?;
        }
        Ok(())
    }
    fn line_count(&self) -> usize {
        self.whole.line_count()
    }
}

impl TraceAccess for PartAccess {
    fn read_batch(
        reader: &mut dyn TraceReader,
        line_shift: u32,
        batch: &mut Vec<PartAccess>,
    ) -> Result<bool, TraceError> {
        let mut records = Vec::new();
        let has_more = reader.read_batch(&mut records)?;
        list_part_accesses(reader.header(), &records, line_shift, batch);
        Ok(has_more)
    }
}

fn list_part_accesses(
    header: &TraceHeader,
    records: &[AccessRecord],
    line_shift: u32,
    accesses: &mut Vec<PartAccess>,
) {
    let part_access = |record: &AccessRecord| PartAccess {
        line: record.address >> line_shift,
        process: header.process_of(record),
        thread: record.thread,
    };
    accesses.clear();
    accesses.extend(records.iter().map(part_access));
}

#[cfg(test)]
mod tests {
    use cachemate_core::SplitMix64;

    use super::*;

    /// A trace in memory, of which each batch has `batch_len` records.
    struct MemoryTrace {
        header: TraceHeader,
        records: Vec<AccessRecord>,
        next_record: usize,
        batch_len: usize,
    }

    impl TraceReader for MemoryTrace {
        fn header(&self) -> &TraceHeader {
            &self.header
        }
        fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
            let end = (self.next_record + self.batch_len).min(self.records.len());
            *batch = self.records[self.next_record..end].to_vec();
            self.next_record = end;
            Ok(!batch.is_empty())
        }
        fn totals(&self) -> Option<&cachemate_trace::TraceTotals> {
            None
        }
    }

    fn random_records(count: usize) -> Vec<AccessRecord> {
        let mut random = SplitMix64::new(7);
        let draw_record = |_| AccessRecord {
            address: random.draw_below(5000) * 64,
            thread: random.draw_below(3) as u32,
            ..AccessRecord::default()
        };
        (0..count).map(draw_record).collect()
    }

    const SUBJECTS: [CurveSubject; 4] = [
        CurveSubject::All,
        CurveSubject::EachProcess,
        CurveSubject::EachThread,
        CurveSubject::Sample { rate: 0.3, seed: 5 },
    ];

    fn request(subject: CurveSubject, threads: usize) -> CurveRequest {
        CurveRequest::new(subject, 64, StackLimits::default(), Some(threads)).unwrap()
    }

    /// What is compared: distances of all accesses and of parts, or the points of a sample.
    fn digest(curves: &MeasuredCurves) -> String {
        let whole = match &curves.whole {
            WholeCurve::Exact(distances) => distances.histogram.to_string(),
            WholeCurve::Sampled(curve) => format!("{curve:?}"),
        };
        let parts = curves.parts.iter();
        let parts: Vec<String> = parts
            .map(|(key, part)| format!("{key:?} {}", part.histogram))
            .collect();
        format!("{whole} {parts:?}")
    }

    fn pushed(subject: CurveSubject, threads: usize, records: &[AccessRecord]) -> String {
        let mut measurement = request(subject, threads).begin(records.len() as u64, &[]);
        let header = TraceHeader::for_import("memory", true);
        for records in records.chunks(1000) {
            measurement.push_records(&header, records).unwrap();
        }
        digest(&measurement.finish().unwrap())
    }

    /// Do ranges on any number of threads, whose readers begin early, give what one thread gives, for every subject?
    #[test]
    fn ranges_give_what_one_thread_gives() {
        let records = random_records(40_000);
        for subject in SUBJECTS {
            let expected = pushed(subject, 1, &records);
            assert_eq!(pushed(subject, 3, &records), expected, "{subject:?}");
            for threads in [1, 2, 5] {
                let open_at = |record: u64| -> Result<(u64, Box<dyn TraceReader>), TraceError> {
                    let next_record = record as usize / 700 * 700;
                    let trace = MemoryTrace {
                        header: TraceHeader::for_import("memory", true),
                        records: records.clone(),
                        next_record,
                        batch_len: 700,
                    };
                    Ok((next_record as u64, Box::new(trace)))
                };
                let (curves, covered) = request(subject, threads)
                    .measure_ranges(records.len() as u64, &open_at, &|_| true)
                    .unwrap();
                assert_eq!(covered, records.len() as u64);
                assert_eq!(digest(&curves), expected, "{subject:?}, {threads} threads");
            }
        }
    }

    /// Does a stop leave the result of the records before it, and their number?
    #[test]
    fn a_stop_leaves_the_records_before_it() {
        let records = random_records(40_000);
        let read_records = AtomicU64::new(0);
        let open_at = |record: u64| -> Result<(u64, Box<dyn TraceReader>), TraceError> {
            let trace = MemoryTrace {
                header: TraceHeader::for_import("memory", true),
                records: records.clone(),
                next_record: record as usize,
                batch_len: 700,
            };
            Ok((record, Box::new(trace)))
        };
        let stop_late = |count: u64| {
            let read = read_records.fetch_add(count, Ordering::Relaxed) + count;
            read < 25_000
        };
        let (curves, covered) = request(CurveSubject::All, 2)
            .measure_ranges(40_000, &open_at, &stop_late)
            .unwrap();
        assert!(covered < 40_000 && covered > 0, "{covered}");
        let expected = pushed(CurveSubject::All, 1, &records[..covered as usize]);
        assert_eq!(digest(&curves), expected);
    }
}
