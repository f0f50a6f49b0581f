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
use super::batch::{BATCH, SlotPairs};
use super::counter::DeadSlotCounter;
use super::exact::PendingAccesses;
use super::histogram::DistanceHistogram;
use super::slot_allocator::{FinderLimits, SlotAllocator};
use super::tally::Tally;
use crate::simd::{Lanes, Simd, dispatch};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

/// Maximum number of accesses in one message.
const MESSAGE: usize = 64 * BATCH;
/// Number of 64 KB messages in flight to one counting thread, enough to keep it busy while the finder compacts.
const RING: usize = 32;

/// Exact LRU stack distances of one stream of accesses, computed on several threads. It is used like
/// [`StackDistances`](super::StackDistances) and has the same result.
#[derive(Debug)]
pub struct ParallelStackDistances {
    simd: Simd,
    side: SlotAllocator,
    pairs: SlotPairs,
    waiting: PendingAccesses,
    owners: Vec<CountingWorker>,
    /// Base-2 logarithm of the number of slots that one owner has; the last owner has all remaining slots.
    range_bits: u32,
}

/// State that the finding thread keeps for one counting thread.
#[derive(Debug)]
struct CountingWorker {
    /// Channel to the counting thread; `None` once the engine is finished.
    batch_sender: Option<SyncSender<SlotBatch>>,
    used_batches: Receiver<SlotBatch>,
    filling: SlotBatch,
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
    lines: usize,
    /// If set, the owner restarts its counter with this number of slots before it processes the accesses.
    restart: Option<usize>,
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
        let side = SlotAllocator::new(simd, limits);
        let owners = (1..threads.max(2)).map(|_| CountingWorker::start(simd)).collect();
        let mut engine = ParallelStackDistances {
            simd,
            side,
            pairs: SlotPairs::new(),
            waiting: PendingAccesses::new(),
            owners,
            range_bits: 0,
        };
        engine.restart();
        engine
    }

    /// Adds the next accesses, as line addresses of one address space. A stream may be pushed in portions of any size.
    ///
    /// # Errors
    /// Same as [`StackDistances::push`](super::StackDistances::push).
    pub fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        self.push_in_space(0, lines)
    }

    /// Like [`Self::push`], for several address spaces that share the cache.
    pub fn push_in_space(&mut self, space: u32, lines: &[u64]) -> Result<(), StackError> {
        let mut waiting = std::mem::replace(&mut self.waiting, PendingAccesses::new());
        let pushed = waiting.push(space, lines, |space, lines| self.run(space, lines));
        self.waiting = waiting;
        pushed
    }

    /// Returns the histogram of all accesses.
    ///
    /// # Errors
    /// Same as [`Self::push`].
    ///
    /// # Panics
    /// Propagates the panic of a counting thread.
    pub fn finish(mut self) -> Result<DistanceHistogram, StackError> {
        let mut waiting = std::mem::replace(&mut self.waiting, PendingAccesses::new());
        waiting.flush(|space, lines| self.run(space, lines))?;
        let lines = self.side.lines();
        let mut histogram = DistanceHistogram::new(lines as u64, []);
        for owner in &mut self.owners {
            owner.send(lines);
            owner.batch_sender = None;
        }
        for owner in &mut self.owners {
            let owner_histogram = owner.join();
            // With one owner, which is the usual case, its histogram is the result.
            if histogram.counts().is_empty() {
                histogram = owner_histogram.with_cold(histogram.cold_count());
            } else {
                histogram.merge(&owner_histogram);
            }
        }
        Ok(histogram)
    }

    fn run(&mut self, space: u32, mut lines: &[u64]) -> Result<(), StackError> {
        loop {
            let (simd, this) = (self.simd, &mut *self);
            let done_count = dispatch!(simd, find_all(
                this: &mut ParallelStackDistances, space: u32, lines: &[u64]
            ) -> usize);
            lines = &lines[done_count..];
            if lines.is_empty() {
                return Ok(());
            }
            self.side.compact(None)?;
            self.restart();
        }
    }

    /// Restarts the counting threads after a compaction, with new ranges and all slots alive.
    fn restart(&mut self) {
        let (slots, lines) = (self.side.slots(), self.side.lines());
        // Old slots are spread over all slots, so equal ranges mean roughly equal work.
        self.range_bits = slots.div_ceil(self.owners.len()).next_power_of_two().trailing_zeros();
        for owner in &mut self.owners {
            owner.send(lines);
            owner.dead_above = 0;
            owner.filling.restart = Some(slots);
        }
    }

    /// Appends each pair of the batch to the message for the owner of its old slot.
    #[inline(always)]
    fn distribute_pairs(&mut self) {
        let (old_slots, new_slots) = self.pairs.get();
        let lines = self.side.lines();
        if let [owner] = &mut self.owners[..] {
            owner.filling.old_slots.extend_from_slice(old_slots);
            owner.filling.new_slots.extend_from_slice(new_slots);
        } else {
            for (&old_slot, &new_slot) in old_slots.iter().zip(new_slots) {
                let range = ((old_slot >> self.range_bits) as usize).min(self.owners.len() - 1);
                self.owners[..range].iter_mut().for_each(|lower| lower.dead_above += 1);
                let owner = &mut self.owners[range];
                owner.filling.old_slots.push(old_slot);
                owner.filling.new_slots.push(new_slot - owner.dead_above);
            }
        }
        for owner in &mut self.owners {
            if owner.filling.old_slots.len() + BATCH > MESSAGE {
                owner.send(lines);
            }
        }
    }
}

/// Finds batches until all are done or the slots run out; returns the number of accesses processed.
#[inline(always)]
unsafe fn find_all<L: Lanes>(distances: &mut ParallelStackDistances, space: u32, lines: &[u64]) -> usize {
    let mut done_count = 0;
    for batch in lines.chunks(BATCH) {
        if distances.side.is_full(batch.len()) {
            break;
        }
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe { distances.side.find::<L>(space, batch, &mut distances.pairs) };
        distances.distribute_pairs();
        done_count += batch.len();
    }
    done_count
}

impl CountingWorker {
    fn start(simd: Simd) -> Self {
        let (batch_sender, from_finder) = sync_channel(RING);
        let (give_back, used_batches) = channel();
        let thread = Some(std::thread::spawn(move || count_all(simd, &from_finder, &give_back)));
        let filling = SlotBatch::with_room();
        CountingWorker { batch_sender: Some(batch_sender), used_batches, filling, dead_above: 0, thread }
    }

    /// Sends the current message and takes an empty one to fill.
    fn send(&mut self, lines: usize) {
        let empty = self.used_batches.try_recv().unwrap_or_else(|_| SlotBatch::with_room());
        let mut full_batch = std::mem::replace(&mut self.filling, empty);
        full_batch.lines = lines;
        // A closed channel means that the counting thread has panicked, which `finish` reports.
        let _ = self.batch_sender.as_ref().map(|sender| sender.send(full_batch));
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
            old_slots: Vec::with_capacity(MESSAGE),
            new_slots: Vec::with_capacity(MESSAGE),
            lines: 0,
            restart: None,
        }
    }
}

/// Runs a counting thread until the finding thread disconnects.
fn count_all(simd: Simd, from_finder: &Receiver<SlotBatch>, give_back: &Sender<SlotBatch>) -> DistanceHistogram {
    let (mut counter, mut tally) = (DeadSlotCounter::default(), Tally::new());
    while let Ok(mut message) = from_finder.recv() {
        if let Some(slots) = message.restart.take() {
            counter = DeadSlotCounter::default();
            counter = if slots > 0 { DeadSlotCounter::new(slots) } else { counter };
        }
        let (counter, tally, full) = (&mut counter, &mut tally, &message);
        dispatch!(simd, count(counter: &mut DeadSlotCounter, tally: &mut Tally, full: &SlotBatch));
        message.old_slots.clear();
        message.new_slots.clear();
        // The finding thread may have ended already.
        let _ = give_back.send(message);
    }
    drop(counter);
    tally.finish(0)
}

#[inline(always)]
unsafe fn count<L: Lanes>(counter: &mut DeadSlotCounter, tally: &mut Tally, batch: &SlotBatch) {
    for (old_slots, new_slots) in batch.old_slots.chunks(BATCH).zip(batch.new_slots.chunks(BATCH)) {
        tally.reserve(batch.lines);
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe { counter.mark_dead::<L>(old_slots, new_slots, tally) };
    }
}
