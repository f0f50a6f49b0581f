//! The engine for exact stack distances: one thread measures a stretch of accesses, several may merge two stretches.

use super::StackError;
use super::batch::{BATCH_ACCESSES, SlotPairs};
use super::counter::DeadSlotCounter;
use super::histogram::DistanceHistogram;
use super::slot_allocator::{FinderLimits, SlotAllocator};
use super::tally::Tally;
use crate::simd::{Lanes, Simd, dispatch};

/// Number of lines from which on a merge is worth starting threads.
const MIN_LINES_FOR_THREADS: usize = 1 << 14;

/// The distance of a first touch in a list of distances.
pub const COLD: u32 = u32::MAX;

/// Exact LRU stack distances of one stream of accesses. Push line addresses, then [`finish`](Self::finish).
#[derive(Debug)]
pub struct StackDistances {
    core: EngineCore,
    waiting: PendingAccesses,
}

/// The engine without the accesses that wait for a batch.
#[derive(Debug)]
struct EngineCore {
    simd: Simd,
    slot_allocator: SlotAllocator,
    counter: DeadSlotCounter,
    tally: Tally,
    pairs: SlotPairs,
    /// `None` unless they are wanted.
    first_touches: Option<FirstTouches>,
}

/// The lines of a stream in order of first touch, and the number of first touches beyond the cap.
#[derive(Debug, Default)]
pub(super) struct FirstTouches {
    pub lines: Vec<u64>,
    pub beyond_count: u64,
}

/// Accesses that have been pushed but do not fill a batch yet.
#[derive(Debug)]
struct PendingAccesses {
    lines: [u64; BATCH_ACCESSES],
    len: usize,
}

impl PendingAccesses {
    fn new() -> Self {
        PendingAccesses {
            lines: [0; BATCH_ACCESSES],
            len: 0,
        }
    }

    /// Splits a stream of pushes of any length into full batches, in order, and passes them to `run`.
    #[inline(always)]
    fn push<E>(
        &mut self,
        mut lines: &[u64],
        mut run: impl FnMut(&[u64]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.len > 0 {
            let (batch, later_lines) = lines.split_at(lines.len().min(BATCH_ACCESSES - self.len));
            self.lines[self.len..][..batch.len()].copy_from_slice(batch);
            self.len += batch.len();
            lines = later_lines;
            if self.len == BATCH_ACCESSES {
                self.flush(&mut run)?;
            }
        }
        let (full_batches, last_lines) = lines.split_at(lines.len() - lines.len() % BATCH_ACCESSES);
        if !full_batches.is_empty() {
            run(full_batches)?;
        }
        self.lines[self.len..][..last_lines.len()].copy_from_slice(last_lines);
        self.len += last_lines.len();
        Ok(())
    }

    fn flush<E>(&mut self, mut run: impl FnMut(&[u64]) -> Result<(), E>) -> Result<(), E> {
        let len = std::mem::take(&mut self.len);
        if len > 0 {
            run(&self.lines[..len])
        } else {
            Ok(())
        }
    }
}

impl Default for StackDistances {
    fn default() -> Self {
        StackDistances::new()
    }
}

impl StackDistances {
    /// Builds an engine with the widest vector instructions of this processor.
    pub fn new() -> Self {
        StackDistances::with_simd(Simd::detect_best())
    }

    /// Builds an engine with the given vector instructions, which do not affect the result.
    pub fn with_simd(simd: Simd) -> Self {
        StackDistances::with_limits(simd, FinderLimits::default())
    }

    pub(super) fn with_limits(simd: Simd, limits: FinderLimits) -> Self {
        let slot_allocator = SlotAllocator::new(simd, limits);
        let counter = DeadSlotCounter::new(slot_allocator.slots());
        StackDistances {
            core: EngineCore {
                simd,
                slot_allocator,
                counter,
                tally: Tally::new(),
                pairs: SlotPairs::new(),
                first_touches: None,
            },
            waiting: PendingAccesses::new(),
        }
    }

    /// Remembers the first touches, for [`Self::finish_segment`].
    pub(super) fn with_first_touches(mut self) -> Self {
        self.core.first_touches = Some(FirstTouches::default());
        self
    }

    /// Adds the next accesses, as line addresses. A stream may be pushed in portions of any size.
    ///
    /// # Errors
    /// Returns an error if there are more than 2^31 distinct lines; the engine cannot be used afterward.
    pub fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        let StackDistances { core, waiting } = self;
        waiting.push(lines, |lines| core.run_batches(lines, None))
    }

    /// Adds the next accesses as [`push`](Self::push) does, and appends the distance of each access that has been processed
    /// to `distances`, in order; [`COLD`] stands for a first touch. Fewer accesses than a batch may be pending afterward.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_and_list(
        &mut self,
        lines: &[u64],
        distances: &mut Vec<u32>,
    ) -> Result<(), StackError> {
        let StackDistances { core, waiting } = self;
        waiting.push(lines, |lines| core.run_batches(lines, Some(distances)))
    }

    /// Returns the histogram of all accesses, and appends the distances of the pending ones to `distances`.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish_and_list(
        mut self,
        distances: &mut Vec<u32>,
    ) -> Result<DistanceHistogram, StackError> {
        let StackDistances { core, waiting } = &mut self;
        waiting.flush(|lines| core.run_batches(lines, Some(distances)))?;
        self.finish()
    }

    /// Returns the number of distinct lines among the accesses processed so far, which excludes the last incomplete
    /// batch.
    pub fn lines(&self) -> usize {
        self.core.slot_allocator.lines()
    }

    /// Returns the histogram of all accesses.
    pub fn finish(mut self) -> Result<DistanceHistogram, StackError> {
        self.flush()?;
        let EngineCore {
            slot_allocator,
            counter,
            tally,
            ..
        } = self.core;
        let cold_count = slot_allocator.lines() as u64;
        // Frees their memory before the histogram is allocated.
        drop((slot_allocator, counter));
        Ok(tally.finish(cold_count))
    }

    /// Processes the accesses that wait for a batch.
    fn flush(&mut self) -> Result<(), StackError> {
        let StackDistances { core, waiting } = self;
        waiting.flush(|lines| core.run_batches(lines, None))
    }

    /// Continues with the accesses that `next` has measured on its own, on up to this number of threads. Both must
    /// remember first touches.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub(super) fn merge(
        &mut self,
        mut next: StackDistances,
        threads: usize,
    ) -> Result<(), StackError> {
        self.flush()?;
        next.flush()?;
        if self.core.slot_allocator.lines() == 0 {
            self.core = next.core;
            return Ok(());
        }
        self.core.merge(next.core, threads)
    }

    /// Returns the first touches, the known distances, and the lines in order of last touch if they are wanted.
    pub(super) fn finish_segment(
        mut self,
        wants_last_touches: bool,
    ) -> Result<(FirstTouches, Tally, Vec<u64>), StackError> {
        self.flush()?;
        let EngineCore {
            slot_allocator,
            counter,
            mut tally,
            first_touches,
            ..
        } = self.core;
        let mut first_touches = first_touches.unwrap_or_default();
        first_touches.beyond_count += tally.remove_beyond(slot_allocator.cap_lines());
        let mut last_touches = Vec::new();
        if wants_last_touches {
            last_touches = slot_allocator.into_last_touches(counter.dead_bits());
        }
        Ok((first_touches, tally, last_touches))
    }

    /// Builds the engine that has measured these accesses.
    pub(super) fn from_segment(
        limits: FinderLimits,
        first_touches: FirstTouches,
        tally: Tally,
        last_touches: &[u64],
    ) -> Result<Self, StackError> {
        let mut engine = StackDistances::with_limits(Simd::detect_best(), limits);
        // No line repeats, so that nothing is counted.
        engine.push(last_touches)?;
        engine.flush()?;
        engine.core.tally = tally;
        engine.core.first_touches = Some(first_touches);
        Ok(engine)
    }

    /// Returns whether the sparse finder is in use.
    #[cfg(test)]
    pub(super) fn is_sparse(&self) -> bool {
        self.core.slot_allocator.is_sparse()
    }
}

impl EngineCore {
    fn run_batches(
        &mut self,
        mut lines: &[u64],
        mut listed_distances: Option<&mut Vec<u32>>,
    ) -> Result<(), StackError> {
        loop {
            let EngineCore {
                simd,
                slot_allocator,
                counter,
                tally,
                pairs,
                first_touches,
            } = self;
            let list = listed_distances.as_deref_mut();
            let firsts = first_touches.as_mut();
            let processed_count = dispatch!(*simd, run_all_batches(
                slot_allocator: &mut SlotAllocator, counter: &mut DeadSlotCounter, tally: &mut Tally, pairs: &mut SlotPairs, lines: &[u64],
                list: Option<&mut Vec<u32>>, firsts: Option<&mut FirstTouches>
            ) -> usize);
            lines = &lines[processed_count..];
            if lines.is_empty() {
                return Ok(());
            }
            self.compact(2 * BATCH_ACCESSES)?;
        }
    }

    /// Renumbers the slots, and makes room for at least this number of accesses.
    fn compact(&mut self, room: usize) -> Result<(), StackError> {
        let dead_bits = self.counter.dead_bits();
        self.slot_allocator.compact(dead_bits, room)?;
        // Frees the old counter before the new one is allocated.
        self.counter = DeadSlotCounter::default();
        self.counter = DeadSlotCounter::new(self.slot_allocator.slots());
        Ok(())
    }

    /// Continues with the accesses that `next` has measured on its own (see `segment.rs`), on up to this number of threads.
    fn merge(&mut self, next: EngineCore, threads: usize) -> Result<(), StackError> {
        let next_firsts = next.first_touches.unwrap_or_default();
        let lines = &next_firsts.lines[..];
        let room = next.slot_allocator.lines().max(lines.len());
        if self.slot_allocator.is_full(room) {
            self.compact(room)?;
        }

        let EngineCore {
            simd,
            slot_allocator,
            counter,
            tally,
            pairs,
            first_touches,
        } = self;
        let threads = if lines.len() < MIN_LINES_FOR_THREADS {
            1
        } else {
            threads
        };
        let old_slots = slot_allocator.find_all(lines, threads);
        let (known_lines, cap_lines) = (slot_allocator.lines(), slot_allocator.cap_lines());
        let new_lines = old_slots.iter().filter(|slot| **slot == 0).count();
        slot_allocator.check_lines(known_lines + new_lines)?;
        let firsts = first_touches.get_or_insert_default();
        for (&line, _) in lines.iter().zip(&old_slots).filter(|(_, slot)| **slot == 0) {
            firsts.add(line, cap_lines);
        }
        firsts.beyond_count += next_firsts.beyond_count;

        let first_slot = slot_allocator.next_slot() as u32;
        let keeps_only_next = next.slot_allocator.lines() >= cap_lines;
        let count = || {
            let (counter, tally, old_slots) = (&mut *counter, &mut *tally, &old_slots[..]);
            dispatch!(*simd, count_known(
                counter: &mut DeadSlotCounter, tally: &mut Tally, pairs: &mut SlotPairs, old_slots: &[u32],
                first_slot: u32, known_lines: usize
            ));
            tally.add(next.tally);
        };
        let absorb = || {
            if keeps_only_next {
                // All lines of earlier accesses are now too far down to be told apart.
                *slot_allocator = next.slot_allocator;
            } else {
                slot_allocator.absorb(&next.slot_allocator, next.counter.dead_bits());
            }
        };
        if threads < 2 {
            count();
            absorb();
        } else {
            std::thread::scope(|scope| {
                scope.spawn(count);
                absorb();
            });
        }
        if keeps_only_next {
            *counter = next.counter;
        }
        Ok(())
    }
}

/// Counts the distances of accesses whose old slots are known, among `known_lines` lines; 0 stands for a new line. The
/// accesses have the slots from `first_slot` on.
#[inline(always)]
unsafe fn count_known<L: Lanes>(
    counter: &mut DeadSlotCounter,
    tally: &mut Tally,
    pairs: &mut SlotPairs,
    old_slots: &[u32],
    first_slot: u32,
    known_lines: usize,
) {
    let mut new_slot = first_slot;
    let mut line_count = known_lines;
    for batch in old_slots.chunks(BATCH_ACCESSES) {
        pairs.clear();
        for &old_slot in batch {
            pairs.push_known(old_slot, new_slot);
            new_slot += 1;
        }
        line_count += batch.len() - pairs.len;
        tally.reserve(line_count);
        let (old_slots, new_slots) = pairs.get();
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe { counter.kill_and_count::<L>(old_slots, new_slots, tally) };
    }
}

impl FirstTouches {
    #[inline(always)]
    fn add(&mut self, line: u64, cap_lines: usize) {
        if self.lines.len() < cap_lines {
            self.lines.push(line);
        } else {
            self.beyond_count += 1;
        }
    }

    /// Adds the lines of a batch whose slots are not among those of known lines, which ascend. Most batches have few such
    /// lines, so known ones are skipped in strides.
    fn collect(&mut self, batch: &[u64], first_slot: u32, known_slots: &[u32], cap_lines: usize) {
        const STRIDE: usize = 16;
        let (mut index, mut known_index) = (0, 0);
        while known_index < known_slots.len() {
            let slot_after_stride = known_slots.get(known_index + STRIDE - 1);
            if slot_after_stride == Some(&(first_slot + (index + STRIDE - 1) as u32)) {
                (index, known_index) = (index + STRIDE, known_index + STRIDE);
                continue;
            }
            let next_known = (known_slots[known_index] - first_slot) as usize;
            for &line in &batch[index..next_known] {
                self.add(line, cap_lines);
            }
            (index, known_index) = (next_known + 1, known_index + 1);
        }
        for &line in &batch[index..] {
            self.add(line, cap_lines);
        }
    }
}

/// Runs batches until all are done or the slots run out; returns the number of accesses processed.
#[inline(always)]
unsafe fn run_all_batches<L: Lanes>(
    slot_allocator: &mut SlotAllocator,
    counter: &mut DeadSlotCounter,
    tally: &mut Tally,
    pairs: &mut SlotPairs,
    lines: &[u64],
    mut list: Option<&mut Vec<u32>>,
    mut firsts: Option<&mut FirstTouches>,
) -> usize {
    let mut processed_count = 0;
    for batch in lines.chunks(BATCH_ACCESSES) {
        if slot_allocator.is_full(batch.len()) {
            break;
        }
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe {
            slot_allocator.assign_slots::<L>(batch, pairs);
            tally.reserve(slot_allocator.lines());
            let (old_slots, new_slots) = pairs.get();
            counter.kill_and_count::<L>(old_slots, new_slots, tally);
            if let Some(first_touches) = &mut firsts
                && new_slots.len() < batch.len()
            {
                let first_slot = slot_allocator.next_slot() - batch.len();
                let cap_lines = slot_allocator.cap_lines();
                first_touches.collect(batch, first_slot as u32, new_slots, cap_lines);
            }
            if let Some(distances) = &mut list {
                let first_slot = slot_allocator.next_slot() - batch.len();
                let batch_start = distances.len();
                distances.resize(batch_start + batch.len(), COLD);
                for (index, &slot) in new_slots.iter().enumerate() {
                    distances[batch_start + slot as usize - first_slot] =
                        tally.pending_distance(index);
                }
            }
        }
        processed_count += batch.len();
    }
    processed_count
}
