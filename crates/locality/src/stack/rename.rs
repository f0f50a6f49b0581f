//! Maps arbitrary line addresses to addresses that the finders accept.
//!
//! The finders' tables have room for 43 bits of line address. Lines below 2^42 keep their address; with 64-byte lines,
//! this is everything below 2^48. Higher pages of 64 lines get consecutive numbers from 2^42 / 64 on. An
//! open-addressing table stores these numbers with their full keys. Because a bijection of lines changes no distance,
//! the results are exact for all 64-bit addresses; only renamed lines need a second look-up.

use super::batch::{BATCH_ACCESSES, LINE_BITS};
use crate::hash::mix;
use crate::simd::prefetch;

const LINES_PER_PAGE: u64 = 64;
/// Lines below this address are not renamed.
pub(super) const NARROW_LIMIT: u64 = 1 << (LINE_BITS - 1);

/// Table of the pages that were renamed.
#[derive(Debug, Default)]
pub(super) struct Renamer {
    /// Open-addressing table, at most half full. The length is 0 or a power of two.
    table: Vec<RenamedPage>,
    page_count: u32,
}

/// Address of a line in the page with this number, above all narrow addresses.
fn renamed(number: u32, line: u64) -> u64 {
    NARROW_LIMIT + u64::from(number) * LINES_PER_PAGE + line % LINES_PER_PAGE
}

/// The original pages by their number.
pub(super) struct RenamedPages {
    pages: Vec<u64>,
}

impl RenamedPages {
    /// Writes the original address of each line.
    #[inline(always)]
    pub(super) fn restore(&self, lines: &mut [u64]) {
        if self.pages.len() == 1 {
            return;
        }
        for line in lines.iter_mut().filter(|line| **line >= NARROW_LIMIT) {
            let number = (*line - NARROW_LIMIT) / LINES_PER_PAGE;
            *line = self.pages[number as usize] * LINES_PER_PAGE + *line % LINES_PER_PAGE;
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct RenamedPage {
    page: u64,
    /// Number of the page, from 1 on; 0 marks a free entry. 32 bits suffice, because each page was added for a line,
    /// and the number of lines is limited to 2^31 (`StackError`).
    number: u32,
}

impl Renamer {
    /// Narrow lines need no renaming.
    #[inline(always)]
    pub(super) fn is_narrow(lines: &[u64]) -> bool {
        lines.iter().fold(0, |bits, line| bits | line) < NARROW_LIMIT
    }

    /// Writes the renamed address of each line; accepts at most one batch.
    pub(super) fn rename(&mut self, lines: &[u64], renamed_lines: &mut [u64]) {
        if (self.page_count as usize + BATCH_ACCESSES) * 2 > self.table.len() {
            self.grow();
        }
        for &line in lines {
            prefetch(
                self.table
                    .as_ptr()
                    .wrapping_add(self.home_slot(line / LINES_PER_PAGE)),
            );
        }
        for (renamed_line, &line) in renamed_lines.iter_mut().zip(lines) {
            *renamed_line = if line < NARROW_LIMIT {
                line
            } else {
                let number = self.find_or_add_page(line / LINES_PER_PAGE);
                renamed(number, line)
            };
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.page_count == 0
    }

    /// Writes the renamed address of each line. A line of an unknown page gets an address that no other line has.
    pub(super) fn find(&self, lines: &[u64], renamed_lines: &mut [u64]) {
        for (renamed_line, &line) in renamed_lines.iter_mut().zip(lines) {
            *renamed_line = if line < NARROW_LIMIT {
                line
            } else {
                let number = self.find_page(line / LINES_PER_PAGE);
                renamed(number, line)
            };
        }
    }

    /// 0 for a page without a number.
    fn find_page(&self, page: u64) -> u32 {
        if self.is_empty() {
            return 0;
        }
        let (mask, mut slot) = (self.table.len() - 1, self.home_slot(page));
        loop {
            let entry = &self.table[slot & mask];
            if entry.number == 0 || entry.page == page {
                return entry.number;
            }
            slot += 1;
        }
    }

    /// Lists the original pages, to restore lines.
    pub(super) fn list_pages(&self) -> RenamedPages {
        let mut pages = vec![0; self.page_count as usize + 1];
        for entry in &self.table {
            pages[entry.number as usize] = entry.page;
        }
        RenamedPages { pages }
    }

    fn home_slot(&self, page: u64) -> usize {
        (mix(page) >> (64 - self.table.len().trailing_zeros())) as usize
    }

    /// A new page gets the next number.
    fn find_or_add_page(&mut self, page: u64) -> u32 {
        let (mask, mut slot) = (self.table.len() - 1, self.home_slot(page));
        loop {
            let entry = &mut self.table[slot & mask];
            if entry.number == 0 {
                self.page_count += 1;
                *entry = RenamedPage {
                    page,
                    number: self.page_count,
                };
            }
            if entry.page == page {
                return entry.number;
            }
            slot += 1;
        }
    }

    #[cold]
    fn grow(&mut self) {
        let len = (self.table.len() * 2).max(4 * BATCH_ACCESSES);
        let old_table = std::mem::replace(&mut self.table, vec![RenamedPage::default(); len]);
        for entry in old_table.into_iter().filter(|entry| entry.number != 0) {
            let mut slot = self.home_slot(entry.page);
            while self.table[slot & (len - 1)].number != 0 {
                slot += 1;
            }
            self.table[slot & (len - 1)] = entry;
        }
    }
}
