//! Any line address, as one that the finders can take.
//!
//! The finders' tables have room for 43 bits of line address. Lines below 2^42 of address space 0 keep their address
//! (with 64-byte lines, everything below 2^48); pages of 64 lines beyond, and pages of other address spaces, get
//! consecutive numbers from 2^42 / 64 on. A bijection of lines changes no distance, so results are exact for all
//! 64-bit addresses; only the wide ones pay for a second look-up.

use super::finder::LINE_BITS;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

const LINES_PER_PAGE: u64 = 64;
/// Lines of space 0 below this are not renamed.
pub(super) const NARROW_LIMIT: u64 = 1 << (LINE_BITS - 1);

/// Pages that were renamed; looked up by key only, never iterated.
#[derive(Debug, Default)]
pub(super) struct Renamer {
    pages: HashMap<(u32, u64), u64>,
}

impl Renamer {
    /// Whether lines of a space can be used as they are.
    #[inline(always)]
    pub(super) fn is_narrow(space: u32, lines: &[u64]) -> bool {
        space == 0 && lines.iter().fold(0, |all, line| all | line) < NARROW_LIMIT
    }

    pub(super) fn rename(&mut self, space: u32, line: u64) -> u64 {
        if space == 0 && line < NARROW_LIMIT {
            return line;
        }
        let next = self.pages.len() as u64;
        let page = match self.pages.entry((space, line / LINES_PER_PAGE)) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => *unknown.insert(next),
        };
        // As many pages as fit would take more memory than any machine has.
        NARROW_LIMIT + page * LINES_PER_PAGE + line % LINES_PER_PAGE
    }
}
