//! Segments of one stream on several threads, with the same result as one pass on one thread.
//!
//! The stream is cut into segments ([`super::segment`]), each of which one thread measures; a thread that has measured
//! one merges it with its neighbors, as far as these are known. Merging costs as much as the lines of the later
//! segment, and measuring as much as its accesses, so segments should be much longer than their number of lines;
//! otherwise cuts need no choice.
//!
//! There are two ways to divide the work, with the same merges. [`measure_ranges`] is for streams that can be read from
//! any place: each thread reads and decodes its own range, and nothing waits. [`SegmentStream`] is for all others: the
//! caller pushes accesses, and a thread takes over a segment when all of it has arrived.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Segment, StackError};

/// Minimum number of accesses in a segment of a stream.
const MIN_SEGMENT_ACCESSES: usize = 1 << 18;
/// Number of accesses in a segment of a stream for each of its lines, so that merging takes a small part of the time.
const ACCESSES_PER_LINE: usize = 16;
/// Bytes of accesses that may wait for all threads together.
const WAITING_BYTES: usize = 384 << 20;

/// A measurement of a stretch of accesses, which can be merged with that of the next stretch.
pub trait SegmentMeter: Sized + Send + 'static {
    /// One access.
    type Access: Copy + Send + 'static;

    /// Adds the next accesses.
    ///
    /// # Errors
    /// There are too many distinct lines.
    fn push(&mut self, accesses: &[Self::Access]) -> Result<(), StackError>;

    /// Adds what `next` has measured, whose accesses follow, on up to this number of threads.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    fn merge(&mut self, next: Self, threads: usize) -> Result<(), StackError>;

    /// The lines on which the cost of merging depends.
    fn line_count(&self) -> usize;
}

impl SegmentMeter for Segment {
    type Access = u64;
    fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        Segment::push(self, lines)
    }
    fn merge(&mut self, next: Self, threads: usize) -> Result<(), StackError> {
        Segment::merge(self, next, threads)
    }
    fn line_count(&self) -> usize {
        Segment::line_count(self)
    }
}

/// Joins segments that arrive in any order.
struct SegmentJoiner<M> {
    /// Neither of two entries is the neighbor of the other: first segment, segment after the last one, meter.
    waiting: Mutex<BTreeMap<u64, (u64, M)>>,
    /// Number of threads that have nothing left to measure, and can help with a merge.
    idle_threads: AtomicUsize,
}

impl<M: SegmentMeter> SegmentJoiner<M> {
    fn new(idle_threads: usize) -> Self {
        SegmentJoiner {
            waiting: Mutex::new(BTreeMap::new()),
            idle_threads: AtomicUsize::new(idle_threads),
        }
    }

    /// Counts a thread that has nothing left to measure.
    fn leave(&self) {
        self.idle_threads.fetch_add(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, M)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the measurement of the segments from `first` on and before `end`, and merges it with its neighbors.
    fn deliver(&self, mut first: u64, mut end: u64, mut meter: M) -> Result<(), StackError> {
        loop {
            let threads = 1 + self.idle_threads.load(Ordering::Relaxed);
            let mut waiting = self.lock();
            let before = waiting.range(..first).next_back();
            let left = before.filter(|(_, (left_end, _))| *left_end == first);
            let left_first = left.map(|(&left_first, _)| left_first);
            if let Some(left_first) = left_first
                && let Some((_, mut left)) = waiting.remove(&left_first)
            {
                drop(waiting);
                left.merge(meter, threads)?;
                (first, meter) = (left_first, left);
            } else if let Some((right_end, right)) = waiting.remove(&end) {
                drop(waiting);
                meter.merge(right, threads)?;
                end = right_end;
            } else {
                waiting.insert(first, (end, meter));
                return Ok(());
            }
        }
    }

    /// Takes the measurement of the first segments, as far as all of them have arrived.
    fn take_first(&self) -> Option<M> {
        self.lock().remove(&0).map(|(_, meter)| meter)
    }
}

/// The measurement of one range of a stream.
pub struct MeasuredRange<M> {
    /// Has measured the range, or its begin.
    pub meter: M,
    /// Whether the range was read to its end. If not, the result ends here.
    pub is_whole: bool,
}

/// Measures consecutive ranges of a stream on this number of threads, and returns the measurement of all of them, or of
/// those up to the first that is not whole. `None` if there are no ranges.
///
/// # Errors
/// The error of the first range that has one.
pub fn measure_ranges<M: SegmentMeter, E: From<StackError> + Send>(
    threads: usize,
    range_count: u64,
    measure: impl Fn(u64) -> Result<MeasuredRange<M>, E> + Sync,
) -> Result<Option<M>, E> {
    let workers = range_count.min(threads as u64).max(1);
    let joiner = SegmentJoiner::new(threads.saturating_sub(workers as usize));
    let next_range = AtomicU64::new(0);
    let first_error: Mutex<Option<(u64, E)>> = Mutex::new(None);
    let measure_and_join = |range: u64| -> Result<(), E> {
        let MeasuredRange { meter, is_whole } = measure(range)?;
        let mut end = range + 1;
        if !is_whole {
            next_range.fetch_max(range_count, Ordering::Relaxed);
            // Nothing begins there, so nothing follows.
            end = u64::MAX;
        }
        Ok(joiner.deliver(range, end, meter)?)
    };
    let run_worker = || {
        loop {
            let range = next_range.fetch_add(1, Ordering::Relaxed);
            if range >= range_count {
                return joiner.leave();
            }
            let Err(error) = measure_and_join(range) else {
                continue;
            };
            next_range.fetch_max(range_count, Ordering::Relaxed);
            let mut first_error = first_error.lock().unwrap_or_else(PoisonError::into_inner);
            if first_error.as_ref().is_none_or(|(first, _)| range < *first) {
                *first_error = Some((range, error));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..workers {
            scope.spawn(run_worker);
        }
        run_worker();
    });

    let first_error = first_error.into_inner();
    match first_error.unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(joiner.take_first()),
    }
}

/// Measures one stream on several threads: push its accesses in order, then [`finish`](Self::finish).
pub struct SegmentStream<M: SegmentMeter> {
    engine: StreamEngine<M>,
}

enum StreamEngine<M: SegmentMeter> {
    /// On the caller's thread.
    Single(Box<M>),
    Threads(StreamThreads<M>),
}

struct StreamThreads<M: SegmentMeter> {
    shared: Arc<SharedStreamState<M>>,
    /// `None` after the end of the stream.
    jobs: Option<Sender<SegmentJob<M::Access>>>,
    free_buffers: Receiver<Vec<M::Access>>,
    workers: Vec<JoinHandle<()>>,
    /// Number of buffers that may still be allocated.
    buffer_allowance: usize,
    /// The segment that is arriving, and the number of accesses with which it is complete.
    buffer: Vec<M::Access>,
    segment_len: usize,
    segment_count: u64,
    /// Number of accesses of the stream that have not been handed to a thread; `None` if its length is unknown.
    remaining_accesses: Option<u64>,
}

struct SharedStreamState<M: SegmentMeter> {
    jobs: Mutex<Receiver<SegmentJob<M::Access>>>,
    joiner: SegmentJoiner<M>,
    new_meter: Box<dyn Fn() -> M + Send + Sync>,
    /// Lines of the segment that had most.
    max_lines: AtomicUsize,
    error: Mutex<Option<StackError>>,
    is_stopped: AtomicBool,
}

/// A segment that has arrived, and its number.
struct SegmentJob<A> {
    number: u64,
    accesses: Vec<A>,
}

impl<M: SegmentMeter> SegmentStream<M> {
    /// Starts this number of threads; with one, the caller's thread does the work. The threads end together if the
    /// length of the stream is known.
    pub fn new(
        threads: usize,
        expected_accesses: Option<u64>,
        new_meter: impl Fn() -> M + Send + Sync + 'static,
    ) -> Self {
        let engine = match threads {
            0 | 1 => StreamEngine::Single(Box::new(new_meter())),
            _ => StreamEngine::Threads(StreamThreads::start(
                threads,
                expected_accesses,
                Box::new(new_meter),
            )),
        };
        SegmentStream { engine }
    }

    /// Adds the next accesses. A stream may be pushed in portions of any size.
    ///
    /// # Errors
    /// Too many distinct lines.
    pub fn push(&mut self, accesses: &[M::Access]) -> Result<(), StackError> {
        match &mut self.engine {
            StreamEngine::Single(meter) => meter.push(accesses),
            StreamEngine::Threads(threads) => threads.push(accesses),
        }
    }

    /// The measurement of the whole stream, after its threads have ended.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    ///
    /// # Panics
    /// Propagates the panic of a thread.
    pub fn finish(self) -> Result<M, StackError> {
        match self.engine {
            StreamEngine::Single(meter) => Ok(*meter),
            StreamEngine::Threads(threads) => threads.finish(),
        }
    }
}

impl<M: SegmentMeter> StreamThreads<M> {
    fn start(
        threads: usize,
        expected_accesses: Option<u64>,
        new_meter: Box<dyn Fn() -> M + Send + Sync>,
    ) -> Self {
        let (jobs, job_receiver) = channel();
        let (free_sender, free_buffers) = channel();
        let shared = Arc::new(SharedStreamState {
            jobs: Mutex::new(job_receiver),
            joiner: SegmentJoiner::new(0),
            new_meter,
            max_lines: AtomicUsize::new(0),
            error: Mutex::new(None),
            is_stopped: AtomicBool::new(false),
        });
        let start_worker = |_| {
            let (shared, free_sender) = (Arc::clone(&shared), free_sender.clone());
            std::thread::spawn(move || shared.run_worker(&free_sender))
        };
        let workers = (0..threads).map(start_worker).collect();
        StreamThreads {
            shared,
            jobs: Some(jobs),
            free_buffers,
            workers,
            buffer_allowance: threads,
            buffer: Vec::new(),
            segment_len: MIN_SEGMENT_ACCESSES,
            segment_count: 0,
            remaining_accesses: expected_accesses,
        }
    }

    fn push(&mut self, mut accesses: &[M::Access]) -> Result<(), StackError> {
        while !accesses.is_empty() {
            let room = (self.segment_len - self.buffer.len()).min(accesses.len());
            let (segment_part, later) = accesses.split_at(room);
            self.buffer.extend_from_slice(segment_part);
            accesses = later;
            if self.buffer.len() == self.segment_len {
                self.send_segment();
                self.shared.check()?;
                self.begin_segment();
            }
        }
        Ok(())
    }

    fn send_segment(&mut self) {
        let accesses = std::mem::take(&mut self.buffer);
        if let Some(remaining) = &mut self.remaining_accesses {
            *remaining = remaining.saturating_sub(accesses.len() as u64);
        }
        let number = self.segment_count;
        self.segment_count += 1;
        if let Some(jobs) = &self.jobs {
            // The receiver lives as long as `shared`.
            let _ = jobs.send(SegmentJob { number, accesses });
        }
    }

    /// Takes an empty buffer, for which it may wait, and chooses the length of the next segment.
    fn begin_segment(&mut self) {
        if self.buffer_allowance > 0 {
            self.buffer_allowance -= 1;
        } else {
            // An error means that all threads have panicked, which `finish` reports.
            self.buffer = self.free_buffers.recv().unwrap_or_default();
        }

        let threads = self.workers.len();
        let buffer_bytes = WAITING_BYTES / (threads + 1);
        let longest = buffer_bytes / size_of::<M::Access>().max(1);
        let max_lines = self.shared.max_lines.load(Ordering::Relaxed);
        let desired = (max_lines * ACCESSES_PER_LINE).min(longest);
        let share = self.remaining_accesses.unwrap_or(u64::MAX) / threads as u64;
        self.segment_len = (desired as u64).min(share) as usize;
        self.segment_len = self.segment_len.max(MIN_SEGMENT_ACCESSES);
        self.buffer.reserve_exact(self.segment_len);
    }

    fn finish(mut self) -> Result<M, StackError> {
        if !self.buffer.is_empty() {
            self.send_segment();
        }
        self.jobs = None;
        for worker in std::mem::take(&mut self.workers) {
            if let Err(panic) = worker.join() {
                std::panic::resume_unwind(panic);
            }
        }
        self.shared.check()?;
        let first = self.shared.joiner.take_first();
        Ok(first.unwrap_or_else(&self.shared.new_meter))
    }
}

/// Ends the threads of a stream that is not finished.
impl<M: SegmentMeter> Drop for StreamThreads<M> {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::Relaxed);
        self.jobs = None;
        for worker in std::mem::take(&mut self.workers) {
            // `finish` reports a panic; here nobody waits for the result.
            let _ = worker.join();
        }
    }
}

impl<M: SegmentMeter> SharedStreamState<M> {
    /// # Errors
    /// A segment could not be measured.
    fn check(&self) -> Result<(), StackError> {
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        error.map_or(Ok(()), Err)
    }

    fn next_job(&self) -> Option<SegmentJob<M::Access>> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.recv().ok()
    }

    fn run_worker(&self, free_buffers: &Sender<Vec<M::Access>>) {
        while let Some(SegmentJob { number, accesses }) = self.next_job() {
            if self.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            let mut meter = (self.new_meter)();
            let pushed = meter.push(&accesses);
            self.max_lines
                .fetch_max(meter.line_count(), Ordering::Relaxed);
            let mut buffer = accesses;
            buffer.clear();
            // Without a receiver, the stream is at its end.
            let _ = free_buffers.send(buffer);

            let joined = pushed.and_then(|()| self.joiner.deliver(number, number + 1, meter));
            if let Err(error) = joined {
                *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                self.is_stopped.store(true, Ordering::Relaxed);
                return;
            }
        }
        self.joiner.leave();
    }
}
