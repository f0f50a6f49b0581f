//! The finder for dense address spaces, which maps each page to a leaf of 64 slots.
//!
//! The page table has one word per page, with 37 bits of page and 27 bits of leaf. Leaves are numbered from 1, so that
//! 0 marks a free entry; the table is at most half full. A batch first resolves all leaves and prefetches their memory,
//! and only then reads and replaces slots, so that cache misses overlap.

use super::batch::{BATCH_ACCESSES, LINE_BITS, SlotPairs};
use crate::hash::mix;
use crate::simd::prefetch;

const LEAF_BITS: u32 = 27;
const LINES_PER_PAGE: usize = 64;
/// Number of pages that are looked up and prefetched together.
const PAGES_AHEAD: usize = 8;
const _: () = assert!(LINE_BITS - LINES_PER_PAGE.trailing_zeros() + LEAF_BITS <= 64);

#[derive(Debug)]
pub(super) struct DenseFinder {
    /// Entries of the form page << LEAF_BITS | leaf, or 0 if free. The length is a power of two.
    page_table: Vec<u64>,
    page_count: usize,
    /// Slots, 64 to a leaf; leaf 0 is unused. Slot 0 means that the line has not occurred.
    leaves: Vec<u32>,
}

impl DenseFinder {
    pub(super) fn new() -> Self {
        DenseFinder {
            page_table: vec![0; 1024],
            page_count: 0,
            leaves: vec![0; LINES_PER_PAGE],
        }
    }

    /// Only the leaves and the table count.
    #[inline(always)]
    pub(super) fn bytes(&self) -> usize {
        self.leaves.len() * 4 + self.page_table.len() * 8
    }

    /// Bytes that this many pages would use, at the table's next power of two.
    pub(super) fn bytes_for(pages: usize) -> usize {
        (pages + 1) * LINES_PER_PAGE * 4 + (pages * 2 + 1).next_power_of_two() * 8
    }

    #[inline(always)]
    pub(super) fn replace_slots(
        &mut self,
        lines: &[u64],
        new_slots: impl Iterator<Item = u32>,
        pairs: &mut SlotPairs,
    ) {
        let mut cells = [0usize; BATCH_ACCESSES];
        let cells = &mut cells[..lines.len()];
        for (cell, &line) in cells.iter_mut().zip(lines) {
            let leaf = self.find_or_add_leaf(line / LINES_PER_PAGE as u64);
            *cell = leaf * LINES_PER_PAGE + line as usize % LINES_PER_PAGE;
            prefetch(self.leaves.as_ptr().wrapping_add(*cell));
        }
        for (new_slot, &cell) in new_slots.zip(cells.iter()) {
            let old_slot = std::mem::replace(&mut self.leaves[cell], new_slot);
            pairs.push_known(old_slot, new_slot);
        }
    }

    /// Writes the slot of each line, or 0.
    #[inline(always)]
    pub(super) fn find_slots(&self, lines: &[u64], slots: &mut [u32]) {
        let mut cells = [0usize; BATCH_ACCESSES];
        let cells = &mut cells[..lines.len()];
        for (cell, &line) in cells.iter_mut().zip(lines) {
            // Leaf 0 has no slots.
            let leaf = self.find_leaf(line / LINES_PER_PAGE as u64).unwrap_or(0);
            *cell = leaf * LINES_PER_PAGE + line as usize % LINES_PER_PAGE;
            prefetch(self.leaves.as_ptr().wrapping_add(*cell));
        }
        for (slot, &cell) in slots.iter_mut().zip(cells.iter()) {
            *slot = self.leaves[cell];
        }
    }

    /// `None` for a page that was never touched.
    #[inline(always)]
    fn find_leaf(&self, page: u64) -> Option<usize> {
        let mask = self.page_table.len() - 1;
        let mut index = (mix(page) >> (64 - self.page_table.len().trailing_zeros())) as usize;
        loop {
            let entry = self.page_table[index & mask];
            if entry == 0 {
                return None;
            }
            if entry >> LEAF_BITS == page {
                return Some((entry & ((1 << LEAF_BITS) - 1)) as usize);
            }
            index += 1;
        }
    }

    #[inline(always)]
    fn find_or_add_leaf(&mut self, page: u64) -> usize {
        let mask = self.page_table.len() - 1;
        let mut index = (mix(page) >> (64 - self.page_table.len().trailing_zeros())) as usize;
        loop {
            let entry = self.page_table[index & mask];
            if entry >> LEAF_BITS == page && entry != 0 {
                return (entry & ((1 << LEAF_BITS) - 1)) as usize;
            }
            if entry == 0 {
                return self.add_leaf(page, index & mask);
            }
            index += 1;
        }
    }

    #[cold]
    #[inline(never)]
    fn add_leaf(&mut self, page: u64, index: usize) -> usize {
        let leaf = self.leaves.len() / LINES_PER_PAGE;
        // 2^27 leaves take 32 GB; before that, `Finder` changes form, or `StackDistances` fails for lack of slots.
        debug_assert!(leaf < 1 << LEAF_BITS);
        self.leaves.resize(self.leaves.len() + LINES_PER_PAGE, 0);
        self.page_table[index] = page << LEAF_BITS | leaf as u64;
        self.page_count += 1;
        if self.page_count * 2 > self.page_table.len() {
            let old_pages = std::mem::take(&mut self.page_table);
            self.page_table = vec![0; old_pages.len() * 2];
            let (mask, shift) = (
                self.page_table.len() - 1,
                64 - self.page_table.len().trailing_zeros(),
            );
            for entry in old_pages.into_iter().filter(|&entry| entry != 0) {
                let mut index = (mix(entry >> LEAF_BITS) >> shift) as usize;
                while self.page_table[index & mask] != 0 {
                    index += 1;
                }
                self.page_table[index & mask] = entry;
            }
        }
        leaf
    }

    /// Sets the slots of all lines of another finder by `new_slot` of their slots there; returns the number of new
    /// lines.
    #[inline(always)]
    pub(super) fn absorb_pages(
        &mut self,
        next: &DenseFinder,
        new_slot: impl Fn(u32) -> u32,
    ) -> usize {
        let mut new_lines = 0;
        let mut leaf_pairs = [(0, 0); PAGES_AHEAD];
        let mut entries = next.page_table.iter().filter(|&&entry| entry != 0);
        loop {
            let mut pair_count = 0;
            for &entry in entries.by_ref().take(PAGES_AHEAD) {
                let leaf = self.find_or_add_leaf(entry >> LEAF_BITS);
                let next_leaf = (entry & ((1 << LEAF_BITS) - 1)) as usize;
                for line in (0..LINES_PER_PAGE).step_by(16) {
                    let (cell, next_cell) = (leaf * LINES_PER_PAGE, next_leaf * LINES_PER_PAGE);
                    prefetch(self.leaves.as_ptr().wrapping_add(cell + line));
                    prefetch(next.leaves.as_ptr().wrapping_add(next_cell + line));
                }
                leaf_pairs[pair_count] = (leaf, next_leaf);
                pair_count += 1;
            }
            if pair_count == 0 {
                return new_lines;
            }
            for &(leaf, next_leaf) in &leaf_pairs[..pair_count] {
                let slots = &mut self.leaves[leaf * LINES_PER_PAGE..][..LINES_PER_PAGE];
                let next_slots = &next.leaves[next_leaf * LINES_PER_PAGE..][..LINES_PER_PAGE];
                for (slot, &next_slot) in slots.iter_mut().zip(next_slots) {
                    // Without branches, because which lines of a page are in use cannot be predicted.
                    let is_touched = next_slot != 0;
                    new_lines += usize::from(is_touched & (*slot == 0));
                    *slot = if is_touched {
                        new_slot(next_slot)
                    } else {
                        *slot
                    };
                }
            }
        }
    }

    #[inline(always)]
    pub(super) fn for_each_slot(&mut self, change: impl FnMut(&mut u32)) {
        self.leaves.iter_mut().for_each(change);
    }

    /// Sets the slot of one line.
    pub(super) fn set(&mut self, line: u64, slot: u32) {
        let leaf = self.find_or_add_leaf(line / LINES_PER_PAGE as u64);
        self.leaves[leaf * LINES_PER_PAGE + line as usize % LINES_PER_PAGE] = slot;
    }

    /// In no particular order.
    pub(super) fn lines_and_slots(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.page_table
            .iter()
            .filter(|&&entry| entry != 0)
            .flat_map(|&entry| {
                let (page, leaf) = (
                    entry >> LEAF_BITS,
                    (entry & ((1 << LEAF_BITS) - 1)) as usize,
                );
                let slots = &self.leaves[leaf * LINES_PER_PAGE..][..LINES_PER_PAGE];
                let used_slots = slots.iter().enumerate().filter(|&(_, &slot)| slot != 0);
                used_slots.map(move |(offset, &slot)| {
                    (page * LINES_PER_PAGE as u64 + offset as u64, slot)
                })
            })
    }
}
