//! The finding half of the engine, which assigns slots, renames wide lines, and compacts when slots run out.

use super::StackError;
use super::batch::{BATCH, SlotPairs};
use super::finder::{Finder, FinderKind};
use super::rename::Renamer;
use crate::simd::{Lanes, Simd, dispatch};

/// Maximum number of distinct lines: slots are below 2^32, and a compaction is worth its cost only if it frees half of
/// them.
const LINES_LIMIT: usize = 1 << 31;
const SLOTS_LIMIT: usize = 1 << 32;

/// Sizes that are constant except in tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct FinderLimits {
    pub kind: FinderKind,
    /// Initial and minimum number of slots; at least two batches.
    pub min_slots: usize,
    pub lines_limit: usize,
}

impl Default for FinderLimits {
    fn default() -> Self {
        FinderLimits { kind: FinderKind::default(), min_slots: 1 << 16, lines_limit: LINES_LIMIT }
    }
}

#[derive(Debug)]
pub(super) struct SlotAllocator {
    simd: Simd,
    finder: Finder,
    renamer: Renamer,
    /// Slot of the next access. Slot 0 is never assigned, because finders use 0 for lines that have not occurred.
    next_slot: usize,
    slots: usize,
    limits: FinderLimits,
}

impl SlotAllocator {
    pub(super) fn new(simd: Simd, limits: FinderLimits) -> Self {
        let finder = Finder::new(limits.kind);
        SlotAllocator { simd, finder, renamer: Renamer::default(), next_slot: 1, slots: limits.min_slots, limits }
    }

    /// Returns the number of slots for which the counter must have room.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the number of distinct lines so far.
    pub(super) fn lines(&self) -> usize {
        self.finder.lines()
    }

    /// Returns whether a compaction must precede the next batch of `len` accesses.
    #[inline(always)]
    pub(super) fn is_full(&self, len: usize) -> bool {
        self.next_slot + len > self.slots
    }

    /// Finds one batch. [`Self::is_full`] must be false for its length.
    #[inline(always)]
    pub(super) unsafe fn find<L: Lanes>(&mut self, space: u32, lines: &[u64], pairs: &mut SlotPairs) {
        let slot = self.next_slot as u32;
        self.next_slot += lines.len();
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe {
            if Renamer::is_narrow(space, lines) {
                self.finder.find::<L>(lines, slot, pairs);
            } else {
                let mut renamed = [0; BATCH];
                let renamed = &mut renamed[..lines.len()];
                self.renamer.rename(space, lines, renamed);
                self.finder.find::<L>(renamed, slot, pairs);
            }
        }
        self.finder.leave_dense_if_wasteful();
    }

    /// Moves all lines to the lowest slots, in order, and makes room for at least three times as many accesses as there
    /// are lines. `dead` contains the dead bits, if the caller has them. Afterward the caller must rebuild its counter
    /// with [`Self::slots`].
    ///
    /// # Errors
    /// Returns an error if there are too many distinct lines for 32-bit slots.
    pub(super) fn compact(&mut self, dead: Option<&[u64]>) -> Result<(), StackError> {
        if self.lines() > self.limits.lines_limit - BATCH {
            return Err(StackError { limit_lines: self.limits.lines_limit as u64 });
        }
        let rebuilt_slots;
        let dead = match dead {
            Some(dead) => dead,
            None => {
                rebuilt_slots = self.rebuild_dead_slots();
                &rebuilt_slots
            }
        };
        let (simd, finder) = (self.simd, &mut self.finder);
        dispatch!(simd, close_gaps(finder: &mut Finder, dead: &[u64]));
        self.finder.return_to_dense_if_fitting();
        self.next_slot = self.lines() + 1;
        let desired_slots = (4 * self.lines()).max(self.next_slot + 2 * BATCH).next_multiple_of(self.limits.min_slots);
        self.slots = desired_slots.min(SLOTS_LIMIT);
        Ok(())
    }

    fn rebuild_dead_slots(&mut self) -> Vec<u64> {
        let mut dead = vec![!0; self.slots.div_ceil(64)];
        // Free places contain slot 0, which is never dead, so they clear a bit that is already clear.
        self.finder.for_each_slot(|slot| dead[*slot as usize / 64] &= !(1 << (*slot % 64)));
        dead[0] &= !1;
        dead
    }

    /// Returns whether the sparse form is in use.
    #[cfg(test)]
    pub(super) fn is_sparse(&self) -> bool {
        self.finder.is_sparse()
    }
}

/// Subtracts from every slot the number of dead slots below it. Slot 0, which marks a free place, does not change.
#[inline(always)]
unsafe fn close_gaps<L: Lanes>(finder: &mut Finder, dead: &[u64]) {
    // `L` selects the instruction set for which this function is compiled (popcount).
    let _ = std::marker::PhantomData::<L>;
    let mut sum = 0;
    let mut below = Vec::with_capacity(dead.len());
    for word in dead {
        below.push(sum);
        sum = u32::wrapping_add(sum, word.count_ones());
    }
    finder.for_each_slot(|slot| {
        let word = *slot as usize / 64;
        *slot -= below[word] + (dead[word] & ((1 << (*slot % 64)) - 1)).count_ones();
    });
}
