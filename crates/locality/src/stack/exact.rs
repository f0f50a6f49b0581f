//! The single-threaded engine for exact stack distances.

use super::StackError;
use super::batch::{BATCH_ACCESSES, SlotPairs};
use super::counter::DeadSlotCounter;
use super::histogram::DistanceHistogram;
use super::slot_allocator::{FinderLimits, SlotAllocator};
use super::tally::Tally;
use crate::simd::{Lanes, Simd, dispatch};

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
        let StackDistances { core, waiting } = &mut self;
        waiting.flush(|lines| core.run_batches(lines, None))?;
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

    /// Returns the first touches, the distances that are known, and the lines in order of last touch.
    pub(super) fn finish_segment(mut self) -> Result<(FirstTouches, Tally, Vec<u64>), StackError> {
        let StackDistances { core, waiting } = &mut self;
        waiting.flush(|lines| core.run_batches(lines, None))?;
        let first_touches = self.core.first_touches.unwrap_or_default();
        let dead_bits = self.core.counter.dead_bits();
        let last_touches = self.core.slot_allocator.into_last_touches(dead_bits);
        Ok((first_touches, self.core.tally, last_touches))
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
            slot_allocator.compact(counter.dead_bits())?;
            *counter = DeadSlotCounter::default();
            *counter = DeadSlotCounter::new(slot_allocator.slots());
        }
    }
}

impl FirstTouches {
    /// Appends the lines of a batch whose slots are not among those of known lines.
    #[inline(always)]
    fn collect(&mut self, batch: &[u64], first_slot: u32, known_slots: &[u32], cap_lines: usize) {
        let mut new_mask = u128::MAX >> (BATCH_ACCESSES - batch.len());
        for &slot in known_slots {
            new_mask &= !(1 << (slot - first_slot));
        }
        while new_mask != 0 {
            let line = batch[new_mask.trailing_zeros() as usize];
            if self.lines.len() < cap_lines {
                self.lines.push(line);
            } else {
                self.beyond_count += 1;
            }
            new_mask &= new_mask - 1;
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
