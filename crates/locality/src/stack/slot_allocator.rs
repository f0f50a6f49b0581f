//! The finding half of the engine, which assigns slots, compacts when they run out, and forgets the oldest lines beyond
//! a cap.

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
    /// Number of lines beyond which distances are not told apart. With twice as many lines, the older ones are
    /// forgotten.
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

    /// The slot of the next access.
    pub(super) fn next_slot(&self) -> usize {
        self.next_slot
    }

    /// Slots for which the counter must have room.
    pub(super) fn slots(&self) -> usize {
        self.slot_count
    }

    pub(super) fn lines(&self) -> usize {
        self.finder.line_count()
    }

    /// Distances beyond this many lines are not told apart.
    pub(super) fn cap_lines(&self) -> usize {
        self.limits.cap_lines
    }

    /// If full, a compaction must precede the next `len` accesses.
    #[inline(always)]
    pub(super) fn is_full(&self, len: usize) -> bool {
        self.next_slot + len > self.slot_count || self.has_surplus_lines() || self.exceeds_limit()
    }

    /// Whether slots remain for this many lines of another segment, without a compaction before.
    pub(super) fn can_absorb(&self, lines: usize) -> bool {
        let is_numbered = self.next_slot + lines < MAX_SLOTS;
        is_numbered && !self.has_surplus_lines() && !self.exceeds_limit()
    }

    #[inline(always)]
    fn has_surplus_lines(&self) -> bool {
        self.lines() > self.limits.cap_lines.saturating_mul(2)
    }

    /// Whether more lines are held than the limit allows, which the next compaction reports.
    #[inline(always)]
    fn exceeds_limit(&self) -> bool {
        self.lines().min(self.limits.cap_lines) > self.limits.max_lines
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

    /// The slot of each line, or 0 if it has none; the result does not depend on `threads`.
    pub(super) fn find_all(&self, lines: &[u64], threads: usize) -> Vec<u32> {
        let mut slots = vec![0; lines.len()];
        if threads < 2 {
            self.find_part(lines, &mut slots);
            return slots;
        }
        let part_len = lines.len().div_ceil(threads).max(1);
        let parts = lines.chunks(part_len).zip(slots.chunks_mut(part_len));
        std::thread::scope(|scope| {
            for (lines, slots) in parts {
                scope.spawn(|| self.find_part(lines, slots));
            }
        });
        slots
    }

    fn find_part(&self, lines: &[u64], slots: &mut [u32]) {
        let (simd, finder) = (self.simd, &self.finder);
        dispatch!(simd, find_slots(finder: &SlotFinder, lines: &[u64], slots: &mut [u32]));
    }

    /// Moves all lines to the lowest slots, in order, and makes room for `room` accesses and for at least three times
    /// as many as there are lines. Afterward the caller must rebuild its counter with [`Self::slots`].
    ///
    /// # Errors
    /// There are too many distinct lines.
    pub(super) fn compact(&mut self, dead_bits: &[u64], room: usize) -> Result<(), StackError> {
        self.check_lines(self.lines() + BATCH_ACCESSES)?;
        self.renumber(&SlotRanks::new(dead_bits, self.next_slot));
        if self.has_surplus_lines() {
            self.finder.keep_newest(self.limits.cap_lines);
        }
        self.finder.switch_to_dense_if_smaller();

        self.next_slot = self.lines() + 1;
        if self.next_slot + room >= MAX_SLOTS {
            return Err(self.limit_error());
        }
        let desired_slots = (4 * self.lines())
            .max(self.next_slot + room)
            .next_multiple_of(self.limits.min_slots);
        self.slot_count = desired_slots.min(MAX_SLOTS);
        Ok(())
    }

    /// # Errors
    /// This number of lines is above the limit.
    pub(super) fn check_lines(&self, line_count: usize) -> Result<(), StackError> {
        if line_count.min(self.limits.cap_lines) > self.limits.max_lines {
            return Err(self.limit_error());
        }
        Ok(())
    }

    fn limit_error(&self) -> StackError {
        StackError {
            limit_lines: self.limits.max_lines as u64,
        }
    }

    fn renumber(&mut self, ranks: &SlotRanks) {
        let (simd, finder) = (self.simd, &mut self.finder);
        dispatch!(simd, renumber_slots(finder: &mut SlotFinder, ranks: &SlotRanks));
    }

    /// Gives the lines of `next` the next slots, in the order of their slots there. [`Self::can_absorb`] must be true
    /// for their number; if [`Self::is_full`] is true afterward, a compaction must follow.
    pub(super) fn absorb(&mut self, next: &SlotAllocator, dead_bits: &[u64]) {
        let last_slot = self.next_slot as u32 - 1;
        self.next_slot += next.lines();
        let ranks = &SlotRanks::new(dead_bits, next.next_slot);
        let (simd, finder, next_finder) = (self.simd, &mut self.finder, &next.finder);
        let is_absorbed = dispatch!(simd, absorb_pages(
            finder: &mut SlotFinder, next_finder: &SlotFinder, ranks: &SlotRanks, last_slot: u32
        ) -> bool);
        if is_absorbed {
            return;
        }
        let (finder, pairs) = (&mut self.finder, &mut SlotPairs::new());
        next.finder.for_each_batch(|lines, slots| {
            dispatch!(simd, absorb_batch(
                finder: &mut SlotFinder, lines: &[u64], slots: &[u32], ranks: &SlotRanks, last_slot: u32, pairs: &mut SlotPairs
            ));
        });
    }

    /// In order of their last touch, at most the newest `cap_lines`.
    pub(super) fn into_last_touches(mut self, dead_bits: &[u64]) -> Vec<u64> {
        self.renumber(&SlotRanks::new(dead_bits, self.next_slot));
        let mut lines = self.finder.list_by_slot();
        let surplus = lines.len().saturating_sub(self.limits.cap_lines);
        lines.drain(..surplus);
        lines
    }

    #[cfg(test)]
    pub(super) fn is_sparse(&self) -> bool {
        self.finder.is_sparse()
    }
}

/// The places of live slots among each other.
struct SlotRanks {
    words: Vec<RankWord>,
}

/// The dead slots among 64.
struct RankWord {
    dead_bits: u64,
    /// Number of dead slots before these.
    dead_below: u32,
}

impl SlotRanks {
    /// Ranks the slots before `next_slot`; those beyond the dead bits are alive.
    fn new(dead_bits: &[u64], next_slot: usize) -> Self {
        let mut dead_below: u32 = 0;
        let word_count = dead_bits.len().max(next_slot.div_ceil(64));
        let mut words = Vec::with_capacity(word_count);
        let no_dead_bits = std::iter::repeat(&0);
        for &dead_bits in dead_bits.iter().chain(no_dead_bits).take(word_count) {
            words.push(RankWord {
                dead_bits,
                dead_below,
            });
            dead_below = dead_below.wrapping_add(dead_bits.count_ones());
        }
        SlotRanks { words }
    }

    /// Number of live slots up to a live slot, itself included; 0 for slot 0, which marks a free place.
    #[inline(always)]
    fn rank(&self, slot: u32) -> u32 {
        let word = &self.words[slot as usize / 64];
        let dead_in_word = word.dead_bits & ((1 << (slot % 64)) - 1);
        slot - word.dead_below - dead_in_word.count_ones()
    }
}

/// Replaces every slot by its rank.
#[inline(always)]
unsafe fn renumber_slots<L: Lanes>(finder: &mut SlotFinder, ranks: &SlotRanks) {
    // `L` selects the instruction set for which this function is compiled (popcount).
    let _ = std::marker::PhantomData::<L>;
    finder.for_each_slot(|slot| *slot = ranks.rank(*slot));
}

/// Writes the slot of each line, or 0.
#[inline(always)]
unsafe fn find_slots<L: Lanes>(finder: &SlotFinder, lines: &[u64], slots: &mut [u32]) {
    let batches = lines.chunks(BATCH_ACCESSES);
    for (lines, slots) in batches.zip(slots.chunks_mut(BATCH_ACCESSES)) {
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe { finder.find_slots::<L>(lines, slots) };
    }
}

/// Gives all lines of another finder the slots after `last_slot`, by the ranks of their slots there, page by page;
/// returns whether the two finders allow it.
#[inline(always)]
unsafe fn absorb_pages<L: Lanes>(
    finder: &mut SlotFinder,
    next_finder: &SlotFinder,
    ranks: &SlotRanks,
    last_slot: u32,
) -> bool {
    // `L` selects the instruction set, as above.
    let _ = std::marker::PhantomData::<L>;
    finder.absorb_pages(next_finder, |slot| last_slot + ranks.rank(slot))
}

/// Gives lines of another finder the slots after `last_slot`, by the ranks of their slots there.
#[inline(always)]
unsafe fn absorb_batch<L: Lanes>(
    finder: &mut SlotFinder,
    lines: &[u64],
    slots: &[u32],
    ranks: &SlotRanks,
    last_slot: u32,
    pairs: &mut SlotPairs,
) {
    let new_slots = slots.iter().map(|&slot| last_slot + ranks.rank(slot));
    // SAFETY: the caller guarantees that the processor has `L`.
    unsafe { finder.replace_slots::<L>(lines, new_slots, pairs) };
}
