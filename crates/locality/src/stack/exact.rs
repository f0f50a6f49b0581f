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

/// Number of parts of a merge that are counted at the same time: each repeats the kills of the parts before it.
const MAX_COUNTING_PARTS: usize = 4;

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
    unabsorbed: Option<Box<UnabsorbedSegment>>,
}

/// A merged segment whose distances are counted, but whose lines are not in the table of the engine: a result needs
/// only the counts, so the last merge of a stream saves the work.
#[derive(Debug)]
struct UnabsorbedSegment {
    slot_allocator: SlotAllocator,
    counter: DeadSlotCounter,
    /// Its lines in order of first touch, and their slots in the engine's table; 0 stands for a line that is new there.
    first_lines: Vec<u64>,
    old_slots: Vec<u32>,
    new_lines: usize,
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
                unabsorbed: None,
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
    /// There are more than 2^31 distinct lines; the engine cannot be used afterward.
    pub fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        let StackDistances { core, waiting } = self;
        waiting.push(lines, |lines| core.run_batches(lines, None))
    }

    /// Adds the next accesses as [`push`](Self::push) does, and appends the distance of each access that has been
    /// processed to `distances`, in order; [`COLD`] stands for a first touch. Fewer accesses than a batch may be
    /// pending afterward.
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

    /// The histogram of all accesses; the distances of the pending ones are appended to `distances`.
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

    /// Distinct lines among the accesses processed so far, which excludes the last incomplete batch.
    pub fn lines(&self) -> usize {
        self.core.line_count()
    }

    /// The histogram of all accesses, those of the last incomplete batch included.
    pub fn finish(mut self) -> Result<DistanceHistogram, StackError> {
        self.flush()?;
        let cold_count = self.core.line_count() as u64;
        let EngineCore {
            slot_allocator,
            counter,
            tally,
            ..
        } = self.core;
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
        if self.core.line_count() == 0 {
            self.core = next.core;
            return Ok(());
        }
        self.core.merge(next.core, threads)
    }

    /// The known distances and the number of first touches: those that the cap tells apart, and the others.
    pub(super) fn finish_counts(mut self) -> Result<(Tally, u64, u64), StackError> {
        self.flush()?;
        let EngineCore {
            slot_allocator,
            mut tally,
            first_touches,
            unabsorbed,
            ..
        } = self.core;
        let firsts = first_touches.unwrap_or_default();
        let new_lines = unabsorbed.map_or(0, |next| next.new_lines);
        let cap_lines = slot_allocator.cap_lines();
        let lines = firsts.lines.len() + new_lines;
        let lines_below_cap = lines.min(cap_lines);
        let mut beyond_count = firsts.beyond_count + (lines - lines_below_cap) as u64;
        beyond_count += tally.remove_beyond(cap_lines);
        Ok((tally, lines_below_cap as u64, beyond_count))
    }

    /// The first touches, the known distances, and the lines in order of last touch.
    pub(super) fn finish_segment(mut self) -> Result<(FirstTouches, Tally, Vec<u64>), StackError> {
        self.flush()?;
        self.core.absorb()?;
        let EngineCore {
            slot_allocator,
            counter,
            mut tally,
            first_touches,
            ..
        } = self.core;
        let mut first_touches = first_touches.unwrap_or_default();
        first_touches.beyond_count += tally.remove_beyond(slot_allocator.cap_lines());
        let last_touches = slot_allocator.into_last_touches(counter.dead_bits());
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
        self.absorb()?;
        loop {
            let EngineCore {
                simd,
                slot_allocator,
                counter,
                tally,
                pairs,
                first_touches,
                ..
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

    fn line_count(&self) -> usize {
        let lines = self.slot_allocator.lines();
        let new_lines = self.unabsorbed.as_ref().map_or(0, |next| next.new_lines);
        lines + new_lines
    }

    /// Counts the accesses that `next` has measured on its own (see `segment.rs`), on up to this number of threads.
    fn merge(&mut self, mut next: EngineCore, threads: usize) -> Result<(), StackError> {
        self.absorb()?;
        next.absorb()?;
        let next_firsts = next.first_touches.unwrap_or_default();
        let lines = &next_firsts.lines[..];
        let room = next.slot_allocator.lines().max(lines.len());
        if !self.slot_allocator.can_absorb(room) {
            self.compact(room)?;
        }

        let threads = if lines.len() < MIN_LINES_FOR_THREADS {
            1
        } else {
            threads
        };
        let old_slots = self.slot_allocator.find_all(lines, threads);
        let new_lines = old_slots.iter().filter(|slot| **slot == 0).count();
        let line_count = self.slot_allocator.lines() + new_lines;
        self.slot_allocator.check_lines(line_count)?;
        let firsts = self.first_touches.get_or_insert_default();
        firsts.beyond_count += next_firsts.beyond_count;

        self.count_known(&old_slots, line_count, next.tally, threads);
        self.unabsorbed = Some(Box::new(UnabsorbedSegment {
            slot_allocator: next.slot_allocator,
            counter: next.counter,
            first_lines: next_firsts.lines,
            old_slots,
            new_lines,
        }));
        Ok(())
    }

    /// Counts the distances of the next accesses, whose old slots are known, among at most `line_count` lines; 0 stands
    /// for a new line. Adds them to the tally together with those of `next_tally`.
    ///
    /// A thread can count a part of the accesses by itself, from a counter in which the slots of the parts before are
    /// dead.
    fn count_known(
        &mut self,
        old_slots: &[u32],
        line_count: usize,
        next_tally: Tally,
        threads: usize,
    ) {
        let parts = threads.clamp(1, MAX_COUNTING_PARTS);
        let part_len = old_slots.len().div_ceil(parts).max(1);
        let simd = self.simd;
        let first_slot = self.slot_allocator.next_slot() as u32;
        let count_part = |part: usize, mut counter: DeadSlotCounter, mut tally: Tally| {
            let part_start = part * part_len;
            if part > 0 {
                counter = counter.with_dead(&old_slots[..part_start]);
            }
            let (counter_ref, tally_ref, pairs) = (&mut counter, &mut tally, &mut SlotPairs::new());
            let part_end = (part_start + part_len).min(old_slots.len());
            let part_slots = &old_slots[part_start..part_end];
            let part_slot = first_slot + part_start as u32;
            dispatch!(simd, count_accesses(
                counter_ref: &mut DeadSlotCounter, tally_ref: &mut Tally, pairs: &mut SlotPairs, part_slots: &[u32],
                part_slot: u32, line_count: usize
            ));
            (counter, tally)
        };

        let last_part = old_slots.len().div_ceil(part_len).max(1) - 1;
        let first_counters: Vec<DeadSlotCounter> =
            (0..last_part).map(|_| self.counter.clone()).collect();
        let own_counter = std::mem::take(&mut self.counter);
        let own_tally = std::mem::replace(&mut self.tally, Tally::new());
        std::thread::scope(|scope| {
            let mut tally = Some(next_tally);
            let helpers: Vec<_> = (0..)
                .zip(first_counters)
                .map(|(part, counter)| {
                    let tally = tally.take().unwrap_or_else(Tally::new);
                    let count_part = &count_part;
                    scope.spawn(move || count_part(part, counter, tally).1)
                })
                .collect();
            // The counter of the last part has seen all of them.
            (self.counter, self.tally) = count_part(last_part, own_counter, own_tally);
            if let Some(next_tally) = tally {
                self.tally.add(next_tally);
            }
            for helper in helpers {
                match helper.join() {
                    Ok(tally) => self.tally.add(tally),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
    }

    /// Gives the lines of a merged segment their places in the table.
    fn absorb(&mut self) -> Result<(), StackError> {
        let Some(next) = self.unabsorbed.take() else {
            return Ok(());
        };
        let cap_lines = self.slot_allocator.cap_lines();
        let firsts = self.first_touches.get_or_insert_default();
        let first_slots = next.first_lines.iter().zip(&next.old_slots);
        for (&line, _) in first_slots.filter(|(_, slot)| **slot == 0) {
            firsts.add(line, cap_lines);
        }
        if next.slot_allocator.lines() >= cap_lines {
            // All lines of earlier accesses are now too far down to be told apart.
            self.slot_allocator = next.slot_allocator;
            self.counter = next.counter;
            return Ok(());
        }
        let dead_bits = next.counter.dead_bits();
        self.slot_allocator.absorb(&next.slot_allocator, dead_bits);
        if self.slot_allocator.is_full(0) {
            self.compact(2 * BATCH_ACCESSES)?;
        }
        Ok(())
    }
}

/// Counts the distances of accesses whose old slots are known; 0 stands for a new line. The accesses have the slots
/// from `new_slot` on.
#[inline(always)]
unsafe fn count_accesses<L: Lanes>(
    counter: &mut DeadSlotCounter,
    tally: &mut Tally,
    pairs: &mut SlotPairs,
    old_slots: &[u32],
    mut new_slot: u32,
    line_count: usize,
) {
    for batch in old_slots.chunks(BATCH_ACCESSES) {
        pairs.clear();
        for &old_slot in batch {
            pairs.push_known(old_slot, new_slot);
            new_slot += 1;
        }
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

    /// Adds the lines of a batch whose slots are not among those of known lines, which ascend. Which lines are new
    /// cannot be predicted, so no branch depends on it.
    #[inline(always)]
    fn collect(&mut self, batch: &[u64], first_slot: u32, known_slots: &[u32], cap_lines: usize) {
        let mut known_slots = known_slots;
        for (lines, first_slot) in batch.chunks(64).zip((first_slot..).step_by(64)) {
            let known_len = known_slots.partition_point(|&slot| slot - first_slot < 64);
            let (part_slots, later_slots) = known_slots.split_at(known_len);
            known_slots = later_slots;
            let known_bits = part_slots
                .iter()
                .fold(0, |bits, &slot| bits | 1 << (slot - first_slot));
            let mut new_bits = !known_bits & (u64::MAX >> (64 - lines.len()));
            while new_bits != 0 {
                self.add(lines[new_bits.trailing_zeros() as usize], cap_lines);
                new_bits &= new_bits - 1;
            }
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
