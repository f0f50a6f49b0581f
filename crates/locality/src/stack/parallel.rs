//! The engine on two or more threads, with the same result as on one.
//!
//! The caller's thread finds the previous slot of each line, and other threads count the slots that have died since. A
//! ring of message buffers connects them. Finding needs no result of counting: at a compaction, the finder derives the
//! dead bits from its own table.
//!
//! If there are several counting threads, each owns a range of slots. An old slot is sent to the owner of its range,
//! along with the number of slots that are dead in higher ranges at that time, which the finding thread maintains per
//! range. From these two, the owner computes the distance. At the end, the owners' histograms are added.

use super::StackError;
use super::batch::{BATCH_ACCESSES, SlotPairs};
use super::counter::DeadSlotCounter;
use super::exact::PendingAccesses;
use super::histogram::DistanceHistogram;
use super::slot_allocator::{FinderLimits, SlotAllocator};
use super::tally::Tally;
use crate::simd::{Lanes, Simd, dispatch};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

/// Maximum number of accesses in one message.
const MESSAGE_ACCESSES: usize = 64 * BATCH_ACCESSES;
/// Number of 64 KB messages in flight to one counting thread, enough to keep it busy while the finder compacts.
const MESSAGES_IN_FLIGHT: usize = 32;

/// Exact LRU stack distances of one stream of accesses, computed on several threads. It is used like
/// [`StackDistances`](super::StackDistances) and has the same result.
#[derive(Debug)]
pub struct ParallelStackDistances {
    simd: Simd,
    slot_allocator: SlotAllocator,
    pairs: SlotPairs,
    pending_accesses: PendingAccesses,
    workers: Vec<CountingWorker>,
    /// Base-2 logarithm of the number of slots that one owner has; the last owner has all remaining slots.
    range_bits: u32,
}

/// State that the finding thread keeps for one counting thread.
#[derive(Debug)]
struct CountingWorker {
    /// Channel to the counting thread; `None` once the engine is finished.
    batch_sender: Option<SyncSender<SlotBatch>>,
    returned_batches: Receiver<SlotBatch>,
    current_batch: SlotBatch,
    /// Number of dead slots in the ranges of all owners above this one.
    dead_above: u32,
    thread: Option<JoinHandle<DistanceHistogram>>,
}

/// Accesses whose old slots all lie in one range; cold accesses are not sent.
#[derive(Debug, Default)]
struct SlotBatch {
    old_slots: Vec<u32>,
    /// New slot of each access, minus the number of dead slots in higher ranges.
    new_slots: Vec<u32>,
    /// Number of distinct lines so far, an upper bound of the distances.
    line_count: usize,
    /// If set, the owner restarts its counter with this number of slots before it processes the accesses.
    restart_slots: Option<usize>,
}

impl ParallelStackDistances {
    /// Builds an engine with the widest vector instructions of this processor. Fewer than two threads count as two.
    pub fn new(threads: usize) -> Self {
        ParallelStackDistances::with_simd(threads, Simd::detect_best())
    }

    /// Builds an engine with the given vector instructions, which do not affect the result.
    pub fn with_simd(threads: usize, simd: Simd) -> Self {
        ParallelStackDistances::with_sizes(threads, simd, FinderLimits::default())
    }

    pub(super) fn with_sizes(threads: usize, simd: Simd, limits: FinderLimits) -> Self {
        let slot_allocator = SlotAllocator::new(simd, limits);
        let workers = (1..threads.max(2))
            .map(|_| CountingWorker::start(simd))
            .collect();
        let mut engine = ParallelStackDistances {
            simd,
            slot_allocator,
            pairs: SlotPairs::new(),
            pending_accesses: PendingAccesses::new(),
            workers,
            range_bits: 0,
        };
        engine.restart();
        engine
    }

    /// Adds the next accesses, as line addresses. A stream may be pushed in portions of any size.
    ///
    /// # Errors
    /// Same as [`StackDistances::push`](super::StackDistances::push).
    pub fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        let mut pending_accesses =
            std::mem::replace(&mut self.pending_accesses, PendingAccesses::new());
        let result = pending_accesses.push(lines, |lines| self.process(lines));
        self.pending_accesses = pending_accesses;
        result
    }

    /// Returns the histogram of all accesses.
    ///
    /// # Errors
    /// Same as [`Self::push`].
    ///
    /// # Panics
    /// Propagates the panic of a counting thread.
    pub fn finish(mut self) -> Result<DistanceHistogram, StackError> {
        let mut pending_accesses =
            std::mem::replace(&mut self.pending_accesses, PendingAccesses::new());
        pending_accesses.flush(|lines| self.process(lines))?;
        let lines = self.slot_allocator.lines();
        let mut histogram = DistanceHistogram::new(lines as u64, []);
        for worker in &mut self.workers {
            worker.send(lines);
            worker.batch_sender = None;
        }
        for worker in &mut self.workers {
            let worker_histogram = worker.join();
            // With one owner, which is the usual case, its histogram is the result.
            if histogram.counts().is_empty() {
                histogram = worker_histogram.with_cold(histogram.cold_count());
            } else {
                histogram.merge(&worker_histogram);
            }
        }
        Ok(histogram)
    }

    fn process(&mut self, mut lines: &[u64]) -> Result<(), StackError> {
        loop {
            let (simd, engine) = (self.simd, &mut *self);
            let processed_count = dispatch!(simd, find_all_slots(
                engine: &mut ParallelStackDistances, lines: &[u64]
            ) -> usize);
            lines = &lines[processed_count..];
            if lines.is_empty() {
                return Ok(());
            }
            self.slot_allocator.compact(None)?;
            self.restart();
        }
    }

    /// Restarts the counting threads after a compaction, with new ranges and all slots alive.
    fn restart(&mut self) {
        let (slots, lines) = (self.slot_allocator.slots(), self.slot_allocator.lines());
        // Old slots are spread over all slots, so equal ranges mean roughly equal work.
        self.range_bits = slots
            .div_ceil(self.workers.len())
            .next_power_of_two()
            .trailing_zeros();
        for worker in &mut self.workers {
            worker.send(lines);
            worker.dead_above = 0;
            worker.current_batch.restart_slots = Some(slots);
        }
    }

    /// Appends each pair of the batch to the message for the owner of its old slot.
    #[inline(always)]
    fn distribute_pairs(&mut self) {
        let (old_slots, new_slots) = self.pairs.get();
        let lines = self.slot_allocator.lines();
        if let [worker] = &mut self.workers[..] {
            worker.current_batch.old_slots.extend_from_slice(old_slots);
            worker.current_batch.new_slots.extend_from_slice(new_slots);
        } else {
            for (&old_slot, &new_slot) in old_slots.iter().zip(new_slots) {
                let worker_index =
                    ((old_slot >> self.range_bits) as usize).min(self.workers.len() - 1);
                self.workers[..worker_index]
                    .iter_mut()
                    .for_each(|lower_worker| lower_worker.dead_above += 1);
                let worker = &mut self.workers[worker_index];
                worker.current_batch.old_slots.push(old_slot);
                worker
                    .current_batch
                    .new_slots
                    .push(new_slot - worker.dead_above);
            }
        }
        for worker in &mut self.workers {
            if worker.current_batch.old_slots.len() + BATCH_ACCESSES > MESSAGE_ACCESSES {
                worker.send(lines);
            }
        }
    }
}

/// Processes batches until none is left or the slots run out; returns the number of processed accesses.
#[inline(always)]
unsafe fn find_all_slots<L: Lanes>(engine: &mut ParallelStackDistances, lines: &[u64]) -> usize {
    let mut processed_count = 0;
    for batch in lines.chunks(BATCH_ACCESSES) {
        if engine.slot_allocator.is_full(batch.len()) {
            break;
        }
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe {
            engine
                .slot_allocator
                .assign_slots::<L>(batch, &mut engine.pairs)
        };
        engine.distribute_pairs();
        processed_count += batch.len();
    }
    processed_count
}

impl CountingWorker {
    fn start(simd: Simd) -> Self {
        let (batch_sender, batch_receiver) = sync_channel(MESSAGES_IN_FLIGHT);
        let (batch_returner, returned_batches) = channel();
        let thread = Some(std::thread::spawn(move || {
            run_counting_thread(simd, &batch_receiver, &batch_returner)
        }));
        let current_batch = SlotBatch::with_room();
        CountingWorker {
            batch_sender: Some(batch_sender),
            returned_batches,
            current_batch,
            dead_above: 0,
            thread,
        }
    }

    /// Sends the current message and takes an empty one to fill.
    fn send(&mut self, lines: usize) {
        let empty_batch = self
            .returned_batches
            .try_recv()
            .unwrap_or_else(|_| SlotBatch::with_room());
        let mut full_batch = std::mem::replace(&mut self.current_batch, empty_batch);
        full_batch.line_count = lines;
        // A closed channel means that the counting thread has panicked, which `finish` reports.
        let _ = self
            .batch_sender
            .as_ref()
            .map(|sender| sender.send(full_batch));
    }

    fn join(&mut self) -> DistanceHistogram {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(histogram)) => histogram,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => DistanceHistogram::default(),
        }
    }
}

impl SlotBatch {
    fn with_room() -> Self {
        SlotBatch {
            old_slots: Vec::with_capacity(MESSAGE_ACCESSES),
            new_slots: Vec::with_capacity(MESSAGE_ACCESSES),
            line_count: 0,
            restart_slots: None,
        }
    }
}

/// Runs a counting thread until the finding thread disconnects.
fn run_counting_thread(
    simd: Simd,
    batch_receiver: &Receiver<SlotBatch>,
    batch_returner: &Sender<SlotBatch>,
) -> DistanceHistogram {
    let (mut counter, mut tally) = (DeadSlotCounter::default(), Tally::new());
    while let Ok(mut slot_batch) = batch_receiver.recv() {
        if let Some(slots) = slot_batch.restart_slots.take() {
            counter = DeadSlotCounter::default();
            counter = if slots > 0 {
                DeadSlotCounter::new(slots)
            } else {
                counter
            };
        }
        let (counter, tally, batch) = (&mut counter, &mut tally, &slot_batch);
        dispatch!(simd, count_batch(counter: &mut DeadSlotCounter, tally: &mut Tally, batch: &SlotBatch));
        slot_batch.old_slots.clear();
        slot_batch.new_slots.clear();
        // The finding thread may have ended already.
        let _ = batch_returner.send(slot_batch);
    }
    drop(counter);
    tally.finish(0)
}

#[inline(always)]
unsafe fn count_batch<L: Lanes>(
    counter: &mut DeadSlotCounter,
    tally: &mut Tally,
    batch: &SlotBatch,
) {
    for (old_slots, new_slots) in batch
        .old_slots
        .chunks(BATCH_ACCESSES)
        .zip(batch.new_slots.chunks(BATCH_ACCESSES))
    {
        tally.reserve(batch.line_count);
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe { counter.kill_and_count::<L>(old_slots, new_slots, tally) };
    }
}
