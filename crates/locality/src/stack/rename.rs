//! Conversion of any line address to one that the finders accept.
//!
//! The finders' tables have room for 43 bits of line address. Lines below 2^42 of address space 0 keep their address
//! (with 64-byte lines, everything below 2^48). Pages of 64 lines beyond, and pages of other address spaces, get
//! consecutive numbers from 2^42 / 64 on, stored in an open-addressing table with whole keys. A bijection of lines
//! changes no distance, so results are exact for all 64-bit addresses; only the wide ones require a second look-up.

use super::batch::{BATCH, LINE_BITS};
use crate::hash::{mix, scatter};
use crate::simd::prefetch;

const LINES_PER_PAGE: u64 = 64;
/// Lines of space 0 below this are not renamed.
pub(super) const NARROW_LIMIT: u64 = 1 << (LINE_BITS - 1);

/// Pages that were renamed.
#[derive(Debug, Default)]
pub(super) struct Renamer {
    /// The length is a power of two, or 0; at most half full.
    table: Vec<RenamedPage>,
    pages: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct RenamedPage {
    page: u64,
    space: u32,
    /// New number of the page, from 1 on; 0 if free. Lines run out (`StackError`) long before 32 bits do, because every
    /// page was added for a line.
    number: u32,
}

impl Renamer {
    /// Can lines of a space be used unchanged?
    #[inline(always)]
    pub(super) fn is_narrow(space: u32, lines: &[u64]) -> bool {
        space == 0 && lines.iter().fold(0, |bits, line| bits | line) < NARROW_LIMIT
    }

    /// Renames at most a batch of lines.
    pub(super) fn rename(&mut self, space: u32, lines: &[u64], renamed: &mut [u64]) {
        if (self.pages as usize + BATCH) * 2 > self.table.len() {
            self.grow();
        }
        for &line in lines {
            prefetch(self.table.as_ptr().wrapping_add(self.home_slot(space, line / LINES_PER_PAGE)));
        }
        for (renamed_line, &line) in renamed.iter_mut().zip(lines) {
            *renamed_line = if space == 0 && line < NARROW_LIMIT {
                line
            } else {
                let number = self.page_number(space, line / LINES_PER_PAGE);
                NARROW_LIMIT + u64::from(number) * LINES_PER_PAGE + line % LINES_PER_PAGE
            };
        }
    }

    fn home_slot(&self, space: u32, page: u64) -> usize {
        let key = if space == 0 { page } else { page ^ scatter(space.into()) };
        (mix(key) >> (64 - self.table.len().trailing_zeros())) as usize
    }

    /// Returns the number of a page, which is the next one if the page is new.
    fn page_number(&mut self, space: u32, page: u64) -> u32 {
        let (mask, mut slot) = (self.table.len() - 1, self.home_slot(space, page));
        loop {
            let entry = &mut self.table[slot & mask];
            if entry.number == 0 {
                self.pages += 1;
                *entry = RenamedPage { page, space, number: self.pages };
            }
            if (entry.page, entry.space) == (page, space) {
                return entry.number;
            }
            slot += 1;
        }
    }

    #[cold]
    fn grow(&mut self) {
        let len = (self.table.len() * 2).max(4 * BATCH);
        let old_table = std::mem::replace(&mut self.table, vec![RenamedPage::default(); len]);
        for entry in old_table.into_iter().filter(|entry| entry.number != 0) {
            let mut slot = self.home_slot(entry.space, entry.page);
            while self.table[slot & (len - 1)].number != 0 {
                slot += 1;
            }
            self.table[slot & (len - 1)] = entry;
        }
    }
}
