//! The finding half of the engine, which assigns slots, and compacts when they run out.

use super::StackError;
use super::batch::{BATCH_ACCESSES, SlotPairs};
use super::finder::{FinderKind, SlotFinder};
use crate::simd::{Lanes, Simd, dispatch};

/// Maximum number of distinct lines: slots are below 2^32, and a compaction is worth its cost only if it frees half of
/// them.
const MAX_LINES: usize = 1 << 31;
const MAX_SLOTS: usize = 1 << 32;

/// Sizes that are constant except in tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct FinderLimits {
    pub kind: FinderKind,
    /// Initial and minimum number of slots; at least two batches.
    pub min_slots: usize,
    pub max_lines: usize,
    /// Number of lines beyond which distances are not told apart; older lines are forgotten at compactions.
    pub cap_lines: usize,
}

impl Default for FinderLimits {
    fn default() -> Self {
        FinderLimits {
            kind: FinderKind::default(),
            min_slots: 1 << 16,
            max_lines: MAX_LINES,
            cap_lines: usize::MAX,
        }
    }
}

#[derive(Debug)]
pub(super) struct SlotAllocator {
    simd: Simd,
    finder: SlotFinder,
    /// Slot of the next access. Slot 0 is never assigned, because finders use 0 for lines that have not occurred.
    next_slot: usize,
    slot_count: usize,
    limits: FinderLimits,
}

impl SlotAllocator {
    pub(super) fn new(simd: Simd, limits: FinderLimits) -> Self {
        let finder = SlotFinder::new(limits.kind);
        SlotAllocator {
            simd,
            finder,
            next_slot: 1,
            slot_count: limits.min_slots,
            limits,
        }
    }

    /// Returns the slot of the next access.
    pub(super) fn next_slot(&self) -> usize {
        self.next_slot
    }

    /// Returns the number of slots for which the counter must have room.
    pub(super) fn slots(&self) -> usize {
        self.slot_count
    }

    /// Returns the number of distinct lines so far.
    pub(super) fn lines(&self) -> usize {
        self.finder.line_count()
    }

    /// Returns the number of lines beyond which distances are not told apart.
    pub(super) fn cap_lines(&self) -> usize {
        self.limits.cap_lines
    }

    /// Returns whether a compaction must precede the next batch of `len` accesses.
    #[inline(always)]
    pub(super) fn is_full(&self, len: usize) -> bool {
        self.next_slot + len > self.slot_count
    }

    /// Assigns slots to the lines of one batch, and writes to `pairs` the old and the new slots of lines that have
    /// occurred before. [`Self::is_full`] must be false for the length of the batch.
    #[inline(always)]
    pub(super) unsafe fn assign_slots<L: Lanes>(&mut self, lines: &[u64], pairs: &mut SlotPairs) {
        let slot = self.next_slot as u32;
        self.next_slot += lines.len();
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe { self.finder.replace_slots::<L>(lines, slot.., pairs) };
    }

    /// Moves all lines to the lowest slots, in order, and makes room for at least three times as many accesses as there
    /// are lines. Afterward the caller must rebuild its counter with [`Self::slots`].
    ///
    /// # Errors
    /// Returns an error if there are too many distinct lines.
    pub(super) fn compact(&mut self, dead_bits: &[u64]) -> Result<(), StackError> {
        let limit_lines = self.limits.max_lines;
        if self.lines().min(self.limits.cap_lines) > limit_lines - BATCH_ACCESSES {
            return Err(StackError {
                limit_lines: limit_lines as u64,
            });
        }

        self.renumber(dead_bits);
        if self.lines() > self.limits.cap_lines {
            self.finder.keep_newest(self.limits.cap_lines);
        }
        self.finder.switch_to_dense_if_smaller();

        self.next_slot = self.lines() + 1;
        let desired_slots = (4 * self.lines())
            .max(self.next_slot + 2 * BATCH_ACCESSES)
            .next_multiple_of(self.limits.min_slots);
        self.slot_count = desired_slots.min(MAX_SLOTS);
        Ok(())
    }

    fn renumber(&mut self, dead_bits: &[u64]) {
        let (simd, finder) = (self.simd, &mut self.finder);
        dispatch!(simd, renumber_slots(finder: &mut SlotFinder, dead_bits: &[u64]));
    }

    /// Returns the distinct lines in order of their last touch, at most the newest `cap_lines`.
    pub(super) fn into_last_touches(mut self, dead_bits: &[u64]) -> Vec<u64> {
        self.renumber(dead_bits);
        let mut lines = self.finder.list_by_slot();
        keep_newest(&mut lines, self.limits.cap_lines);
        lines
    }

    /// Returns whether the sparse form is in use.
    #[cfg(test)]
    pub(super) fn is_sparse(&self) -> bool {
        self.finder.is_sparse()
    }
}

/// Removes the first lines of a list if it has more than `line_count`.
pub(super) fn keep_newest(lines: &mut Vec<u64>, line_count: usize) {
    let surplus = lines.len().saturating_sub(line_count);
    lines.drain(..surplus);
}

/// Subtracts from every slot the number of dead slots below it. Slot 0, which marks a free place, does not change.
#[inline(always)]
unsafe fn renumber_slots<L: Lanes>(finder: &mut SlotFinder, dead_bits: &[u64]) {
    // `L` selects the instruction set for which this function is compiled (popcount).
    let _ = std::marker::PhantomData::<L>;
    let mut dead_count = 0;
    let mut dead_below = Vec::with_capacity(dead_bits.len());
    for word in dead_bits {
        dead_below.push(dead_count);
        dead_count = u32::wrapping_add(dead_count, word.count_ones());
    }
    finder.for_each_slot(|slot| {
        let word = *slot as usize / 64;
        *slot -= dead_below[word] + (dead_bits[word] & ((1 << (*slot % 64)) - 1)).count_ones();
    });
}
