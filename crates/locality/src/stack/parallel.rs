//! Segments of one stream on several threads, with the same result as one pass on one thread.
//!
//! The stream is cut into segments ([`super::segment`]). Each is measured by one thread while it arrives, and neighbors
//! merge as soon as both are known, unless the first has many more lines than the second: merging a large segment with
//! small ones one by one would search its lines again each time. So at most a few segments wait, whose lines add up to a
//! small multiple of the stream's. A segment that is cut in the middle of a burst of first touches costs no more than
//! these touches, so the cuts need no choice; segments much longer than their number of lines make merging cheap.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Segment, SegmentBuilder, StackError};

/// Number of accesses that are handed to a thread together.
const CHUNK_ACCESSES: usize = 1 << 16;
const MIN_SEGMENT_ACCESSES: u64 = 1 << 20;
const MAX_SEGMENT_ACCESSES: u64 = 1 << 24;
/// Bytes of accesses that may wait for each thread.
const WAITING_BYTES: usize = 128 << 20;

/// A measurement of one segment on one thread.
pub trait SegmentMeter: Send + 'static {
    /// One access.
    type Access: Copy + Send + 'static;
    /// The result, which merges with those of neighbors.
    type Summary: SegmentSummary;
    /// Adds the next accesses of the segment.
    ///
    /// # Errors
    /// The segment has too many distinct lines.
    fn push(&mut self, accesses: &[Self::Access]) -> Result<(), StackError>;
    /// Returns the measured segment.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    fn finish(self) -> Result<Self::Summary, StackError>;
}

/// The result of measuring one segment.
pub trait SegmentSummary: Sized + Send + 'static {
    /// Returns the number of lines on which the cost of a merge depends.
    fn line_count(&self) -> usize;
    /// Returns the summary of this segment and the next one together, with up to `threads` threads.
    ///
    /// # Errors
    /// Both together have too many distinct lines.
    fn merge(self, next: Self, threads: usize) -> Result<Self, StackError>;
}

impl SegmentMeter for SegmentBuilder {
    type Access = u64;
    type Summary = Segment;
    fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        SegmentBuilder::push(self, lines)
    }
    fn finish(self) -> Result<Segment, StackError> {
        SegmentBuilder::finish(self)
    }
}

impl SegmentSummary for Segment {
    fn line_count(&self) -> usize {
        Segment::line_count(self)
    }
    fn merge(self, next: Self, threads: usize) -> Result<Self, StackError> {
        Segment::merge(self, next, threads)
    }
}

/// Measures one stream on several threads: push its accesses in order, then [`finish`](Self::finish).
pub struct ParallelSegments<M: SegmentMeter> {
    shared: Arc<SharedSegments<M>>,
    workers: Vec<JoinHandle<()>>,
    chunk: Vec<M::Access>,
    lengths: SegmentLengths,
    /// Number of accesses that the open segment can still take.
    room: u64,
    access_count: u64,
}

/// The rule by which a stream is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentLengths {
    threads: u64,
    /// `None` if the length of the stream is unknown.
    planned: Option<u64>,
}

struct SharedSegments<M: SegmentMeter> {
    state: Mutex<SegmentQueue<M>>,
    /// Signaled when a worker may have something to do.
    work: Condvar,
    /// Signaled when a chunk is free.
    space: Condvar,
    new_meter: Box<dyn Fn() -> M + Send + Sync>,
    threads: usize,
}

struct SegmentQueue<M: SegmentMeter> {
    /// In the order of the stream, each with a number that stays the same.
    segments: Vec<(u64, SegmentState<M>)>,
    next_number: u64,
    free_chunks: Vec<Vec<M::Access>>,
    /// Number of chunks that may still be allocated.
    chunk_allowance: usize,
    is_complete: bool,
    is_stopped: bool,
    error: Option<StackError>,
}

enum SegmentState<M: SegmentMeter> {
    Arriving(ArrivingSegment<M::Access>),
    Merging,
    Measured(M::Summary),
}

struct ArrivingSegment<A> {
    chunks: VecDeque<Vec<A>>,
    is_whole: bool,
    is_taken: bool,
}

enum SegmentJob<M: SegmentMeter> {
    Measure {
        number: u64,
    },
    Merge {
        number: u64,
        first: M::Summary,
        second: M::Summary,
        threads: usize,
    },
}

impl SegmentLengths {
    fn new(threads: usize, expected_accesses: Option<u64>) -> Self {
        let threads = threads as u64;
        // Whole rounds of equal segments, so that no thread is left with one segment more than the others.
        let planned = expected_accesses.map(|accesses| {
            let rounds = accesses.div_ceil(threads * MAX_SEGMENT_ACCESSES).max(1);
            let equal_length = accesses.div_ceil(rounds * threads);
            equal_length.max(MIN_SEGMENT_ACCESSES)
        });
        SegmentLengths { threads, planned }
    }

    /// The shortest possible segments.
    #[cfg(test)]
    pub(super) fn of_one_chunk(threads: usize) -> Self {
        SegmentLengths {
            threads: threads as u64,
            planned: Some(1),
        }
    }

    /// Returns the length of a segment that begins after this many accesses.
    fn length_at(self, access_count: u64) -> u64 {
        let growing_length =
            (access_count / self.threads).clamp(MIN_SEGMENT_ACCESSES, MAX_SEGMENT_ACCESSES);
        self.planned.unwrap_or(growing_length)
    }
}

impl<M: SegmentMeter> ParallelSegments<M> {
    /// Starts this number of threads, at least one. Equal segments need the length of the stream.
    pub fn new(
        threads: usize,
        expected_accesses: Option<u64>,
        new_meter: impl Fn() -> M + Send + Sync + 'static,
    ) -> Self {
        let threads = threads.max(1);
        let lengths = SegmentLengths::new(threads, expected_accesses);
        ParallelSegments::with_lengths(threads, lengths, new_meter)
    }

    pub(super) fn with_lengths(
        threads: usize,
        lengths: SegmentLengths,
        new_meter: impl Fn() -> M + Send + Sync + 'static,
    ) -> Self {
        let chunk_bytes = CHUNK_ACCESSES * size_of::<M::Access>().max(1);
        let shared = Arc::new(SharedSegments {
            state: Mutex::new(SegmentQueue {
                segments: Vec::new(),
                next_number: 0,
                free_chunks: Vec::new(),
                chunk_allowance: threads * WAITING_BYTES.div_ceil(chunk_bytes),
                is_complete: false,
                is_stopped: false,
                error: None,
            }),
            work: Condvar::new(),
            space: Condvar::new(),
            new_meter: Box::new(new_meter),
            threads,
        });
        let start_worker = |_| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.run_worker())
        };
        let workers = (0..threads).map(start_worker).collect();
        ParallelSegments {
            shared,
            workers,
            chunk: Vec::new(),
            lengths,
            room: 0,
            access_count: 0,
        }
    }

    /// Adds the next accesses. A stream may be pushed in portions of any size.
    ///
    /// # Errors
    /// Too many distinct lines.
    pub fn push(&mut self, mut accesses: &[M::Access]) -> Result<(), StackError> {
        while !accesses.is_empty() {
            let room = (CHUNK_ACCESSES - self.chunk.len()).min(accesses.len());
            let (chunk_part, later) = accesses.split_at(room);
            self.chunk.extend_from_slice(chunk_part);
            accesses = later;
            if self.chunk.len() == CHUNK_ACCESSES {
                self.send_chunk()?;
            }
        }
        Ok(())
    }

    /// Hands the current chunk to the open segment, and takes an empty one.
    fn send_chunk(&mut self) -> Result<(), StackError> {
        let mut queue = self.shared.lock();
        let chunk = std::mem::take(&mut self.chunk);
        let chunk_len = chunk.len() as u64;
        if self.room == 0 {
            self.room = self.lengths.length_at(self.access_count);
            queue.open_segment();
        }
        self.room = self.room.saturating_sub(chunk_len);
        self.access_count += chunk_len;
        queue.append(chunk, self.room == 0);
        self.shared.work.notify_all();

        loop {
            if let Some(error) = queue.error {
                return Err(error);
            }
            if queue.is_stopped {
                return Ok(());
            }
            if let Some(chunk) = queue.free_chunks.pop() {
                self.chunk = chunk;
                return Ok(());
            }
            if queue.chunk_allowance > 0 {
                queue.chunk_allowance -= 1;
                self.chunk = Vec::with_capacity(CHUNK_ACCESSES);
                return Ok(());
            }
            let waited = self.shared.space.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the summary of the whole stream.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    ///
    /// # Panics
    /// Propagates the panic of a thread.
    pub fn finish(mut self) -> Result<M::Summary, StackError> {
        if !self.chunk.is_empty() {
            self.send_chunk()?;
        }
        let mut queue = self.shared.lock();
        queue.append(Vec::new(), true);
        queue.is_complete = true;
        drop(queue);
        self.shared.work.notify_all();

        for worker in std::mem::take(&mut self.workers) {
            if let Err(panic) = worker.join() {
                std::panic::resume_unwind(panic);
            }
        }
        let mut queue = self.shared.lock();
        if let Some(error) = queue.error {
            return Err(error);
        }
        match queue.segments.pop() {
            Some((_, SegmentState::Measured(summary))) => Ok(summary),
            _ => (self.shared.new_meter)().finish(),
        }
    }
}

/// Ends the threads of a stream that is not finished.
impl<M: SegmentMeter> Drop for ParallelSegments<M> {
    fn drop(&mut self) {
        self.shared.stop();
        for worker in std::mem::take(&mut self.workers) {
            // `finish` reports a panic; here nobody waits for the result.
            let _ = worker.join();
        }
    }
}

impl<M: SegmentMeter> SegmentQueue<M> {
    fn open_segment(&mut self) {
        let arriving = ArrivingSegment {
            chunks: VecDeque::new(),
            is_whole: false,
            is_taken: false,
        };
        self.segments
            .push((self.next_number, SegmentState::Arriving(arriving)));
        self.next_number += 1;
    }

    /// Appends a chunk to the last segment, if it is open.
    fn append(&mut self, chunk: Vec<M::Access>, is_last: bool) {
        if let Some((_, SegmentState::Arriving(arriving))) = self.segments.last_mut() {
            arriving.chunks.push_back(chunk);
            arriving.is_whole |= is_last;
        }
    }

    fn find(&mut self, number: u64) -> Option<&mut SegmentState<M>> {
        let segments = self.segments.iter_mut();
        let mut states = segments.filter(|(other_number, _)| *other_number == number);
        states.next().map(|(_, state)| state)
    }

    /// Returns whether nothing remains to be done.
    fn is_finished(&self) -> bool {
        let is_measured =
            |(_, state): &(u64, SegmentState<M>)| matches!(state, SegmentState::Measured(_));
        let is_one = self.segments.len() < 2 && self.segments.iter().all(is_measured);
        self.is_stopped || self.error.is_some() || self.is_complete && is_one
    }

    /// Takes the most urgent job: a merge, which frees memory, or else the oldest segment that waits.
    fn take_job(&mut self, threads: usize) -> Option<SegmentJob<M>> {
        let is_arriving = |state: &SegmentState<M>| matches!(state, SegmentState::Arriving(_));
        let all_measured =
            self.is_complete && !self.segments.iter().any(|(_, state)| is_arriving(state));
        if let Some(index) = self.find_merge(all_measured) {
            let simultaneous_merges = if all_measured {
                self.segments.len() / 2
            } else {
                threads
            };
            let (_, second) = self.segments.remove(index + 1);
            let (number, first) = &mut self.segments[index];
            let first = std::mem::replace(first, SegmentState::Merging);
            if let (SegmentState::Measured(first), SegmentState::Measured(second)) = (first, second)
            {
                return Some(SegmentJob::Merge {
                    number: *number,
                    first,
                    second,
                    threads: threads / simultaneous_merges.max(1),
                });
            }
        }
        for (number, state) in &mut self.segments {
            if let SegmentState::Arriving(arriving) = state
                && !arriving.is_taken
            {
                arriving.is_taken = true;
                return Some(SegmentJob::Measure { number: *number });
            }
        }
        None
    }

    /// Returns the index of the first of two measured neighbors that should merge: those with the fewest lines. Before the
    /// end of the stream, the first must not have many more lines than the second.
    fn find_merge(&self, all_measured: bool) -> Option<usize> {
        let mut cheapest: Option<(usize, usize)> = None;
        for (index, pair) in self.segments.windows(2).enumerate() {
            let [
                (_, SegmentState::Measured(first)),
                (_, SegmentState::Measured(second)),
            ] = pair
            else {
                continue;
            };
            let (first_lines, second_lines) = (first.line_count(), second.line_count());
            let is_due = all_measured || first_lines / 3 <= second_lines / 2;
            let sum = first_lines + second_lines;
            if is_due && cheapest.is_none_or(|(_, lines)| sum < lines) {
                cheapest = Some((index, sum));
            }
        }
        cheapest.map(|(index, _)| index)
    }
}

impl<M: SegmentMeter> SharedSegments<M> {
    fn lock(&self) -> MutexGuard<'_, SegmentQueue<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self) {
        self.lock().is_stopped = true;
        self.work.notify_all();
        self.space.notify_all();
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, SegmentQueue<M>>) -> MutexGuard<'a, SegmentQueue<M>> {
        self.work
            .wait(queue)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn run_worker(&self) {
        let guard = PanicGuard(self);
        let mut queue = self.lock();
        while !queue.is_finished() {
            let Some(job) = queue.take_job(self.threads) else {
                queue = self.wait(queue);
                continue;
            };
            drop(queue);
            let (number, outcome) = self.run_job(job);
            queue = self.lock();
            match outcome {
                Ok(summary) => {
                    if let Some(state) = queue.find(number) {
                        *state = SegmentState::Measured(summary);
                    }
                }
                Err(error) => {
                    queue.error = Some(error);
                    self.space.notify_all();
                }
            }
            self.work.notify_all();
        }
        drop((queue, guard));
    }

    fn run_job(&self, job: SegmentJob<M>) -> (u64, Result<M::Summary, StackError>) {
        match job {
            SegmentJob::Measure { number } => (number, self.measure(number)),
            SegmentJob::Merge {
                number,
                first,
                second,
                threads,
            } => (number, first.merge(second, threads)),
        }
    }

    /// Measures a segment while it arrives.
    fn measure(&self, number: u64) -> Result<M::Summary, StackError> {
        let mut meter = (self.new_meter)();
        while let Some(mut chunk) = self.next_chunk(number) {
            meter.push(&chunk)?;
            chunk.clear();
            self.lock().free_chunks.push(chunk);
            self.space.notify_one();
        }
        meter.finish()
    }

    /// Waits for the next chunk of a segment; `None` at its end, and when the stream is given up.
    fn next_chunk(&self, number: u64) -> Option<Vec<M::Access>> {
        let mut queue = self.lock();
        loop {
            if queue.is_stopped || queue.error.is_some() {
                return None;
            }
            let Some(SegmentState::Arriving(arriving)) = queue.find(number) else {
                return None;
            };
            if let Some(chunk) = arriving.chunks.pop_front() {
                return Some(chunk);
            }
            if arriving.is_whole {
                return None;
            }
            queue = self.wait(queue);
        }
    }
}

/// Stops all threads if one panics, because they would wait for its segment.
struct PanicGuard<'a, M: SegmentMeter>(&'a SharedSegments<M>);

impl<M: SegmentMeter> Drop for PanicGuard<'_, M> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}
