//! LRU stack distances of all entries of one short log.
//!
//! Problem: the engine of [`crate::stack`] computes one histogram of a stream of any length, whereas a log needs the
//! distance of each entry. Method: an entry is dead once its line occurs again. The distance of an entry is the number
//! of entries since the last one of its line, minus the dead ones among them, which the engine's counter provides. A
//! table of entry numbers finds the last entry of a line; its keys are compared through the log itself. Such a table is
//! half as large as one that stores lines, so it stays in the host's second-level cache. Properties: distances are
//! exact and unbounded, and time is proportional to the length of the log.

use crate::hash::mix;
use crate::simd::{Lanes, Simd, dispatch, prefetch};
use crate::stack::DeadSlotCounter;

/// Distance of an entry whose line does not occur earlier in the log.
pub const NO_REUSE: u32 = u32::MAX;

/// Number of entries ahead by which table cells are prefetched. The log entry that a cell names is prefetched half as
/// far ahead, so that the host's cache misses overlap.
const PREFETCH_DISTANCE: usize = 16;

/// Returns, for each entry, the number of distinct other lines since the last entry of its line, or [`NO_REUSE`] if
/// there is none. Only the first 2^32 - 2 entries of a longer log are used.
pub fn log_distances(lines: &[u64]) -> Vec<u32> {
    let lines = &lines[..lines.len().min(u32::MAX as usize - 1)];
    let mut stack_distances = Vec::with_capacity(lines.len());
    let (simd, distances) = (Simd::detect_best(), &mut stack_distances);
    dispatch!(simd, append_distances(lines: &[u64], distances: &mut Vec<u32>));
    stack_distances
}

/// Appends the distance of every entry to `distances`.
///
/// # Safety
/// The processor must support `L`.
#[inline(always)]
unsafe fn append_distances<L: Lanes>(lines: &[u64], distances: &mut Vec<u32>) {
    let mut last_uses = LastUseTable::new(lines);
    let mut dead_entries = DeadSlotCounter::new(lines.len());
    // A loop, because closures are not compiled for the instruction set.
    for index in 0..lines.len() {
        last_uses.prefetch_cell(index + PREFETCH_DISTANCE);
        last_uses.prefetch_entry(index + PREFETCH_DISTANCE / 2);
        let distance = match last_uses.replace_last_use(index) {
            Some(previous_index) => {
                // SAFETY: the caller guarantees that the processor has `L`; an entry dies once, at the next entry of
                // its line.
                index as u32
                    - previous_index
                    - 1
                    - unsafe { dead_entries.kill_one::<L>(previous_index) }
            }
            None => NO_REUSE,
        };
        distances.push(distance);
    }
}

/// Open-addressing hash table of the last entry of each line, at most four fifths full. A slot contains the entry's
/// number plus one, or 0 if it is free.
struct LastUseTable<'a> {
    lines: &'a [u64],
    entries: Vec<u32>,
    shift: u32,
}

impl<'a> LastUseTable<'a> {
    fn new(lines: &'a [u64]) -> Self {
        let cell_count = (lines.len() + lines.len() / 4 + 2).next_power_of_two();
        LastUseTable {
            lines,
            entries: vec![0; cell_count],
            shift: 64 - cell_count.trailing_zeros(),
        }
    }

    #[inline(always)]
    fn cell_of(&self, line: u64) -> usize {
        (mix(line) >> self.shift) as usize & (self.entries.len() - 1)
    }

    #[inline(always)]
    fn prefetch_cell(&self, index: usize) {
        if let Some(&line) = self.lines.get(index) {
            prefetch(self.entries.as_ptr().wrapping_add(self.cell_of(line)));
        }
    }

    #[inline(always)]
    fn prefetch_entry(&self, index: usize) {
        if let Some(&line) = self.lines.get(index) {
            let entry = self.entries[self.cell_of(line)] as usize;
            prefetch(self.lines.as_ptr().wrapping_add(entry.wrapping_sub(1)));
        }
    }

    /// Stores this entry as the last one of its line, and returns the preceding entry of that line, if any.
    #[inline(always)]
    fn replace_last_use(&mut self, index: usize) -> Option<u32> {
        let line = self.lines[index];
        let mask = self.entries.len() - 1;
        let mut cell = self.cell_of(line);
        loop {
            let entry = self.entries[cell];
            if entry == 0 || self.lines[entry as usize - 1] == line {
                self.entries[cell] = index as u32 + 1;
                return entry.checked_sub(1);
            }
            cell = (cell + 1) & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    fn naive_distances(lines: &[u64]) -> Vec<u32> {
        let mut stack: Vec<u64> = Vec::new();
        let distance = |&line: &u64| {
            let depth = stack
                .iter()
                .rev()
                .position(|&stored_line| stored_line == line);
            depth.map(|depth| stack.remove(stack.len() - 1 - depth));
            stack.push(line);
            depth.map_or(NO_REUSE, |depth| depth as u32)
        };
        lines.iter().map(distance).collect()
    }

    proptest! {
        /// Is the distance of every entry its depth in a plain LRU stack, within and across the counters' groups?
        #[test]
        fn distances_are_depths_in_a_stack(seed in any::<u64>(), spread in 1u64..400, entries in 0usize..6000) {
            let mut random = SplitMix64::new(seed);
            let lines: Vec<u64> = (0..entries).map(|_| random.draw_below(spread)).collect();
            prop_assert_eq!(log_distances(&lines), naive_distances(&lines));
        }
    }

    /// Are the counters correct if reuses span groups and blocks, or if groups pass without a touch of an old line?
    #[test]
    fn counters_are_correct_if_reuses_span_groups_and_blocks() {
        let sweep: Vec<u64> = (0..9000)
            .chain(0..9000)
            .chain(20_000..27_000)
            .chain((0..9000).rev())
            .collect();
        let distances = log_distances(&sweep);
        assert!(
            distances[..9000]
                .iter()
                .all(|&distance| distance == NO_REUSE)
        );
        assert!(
            distances[9000..18_000]
                .iter()
                .all(|&distance| distance == 8999)
        );
        let expected: Vec<u32> = (0..9000).map(|index| 7000 + index).collect();
        assert_eq!(distances[25_000..], expected);
        let long_log: Vec<u64> = (0..70_000).chain(0..70_000).collect();
        assert!(
            log_distances(&long_log)[70_000..]
                .iter()
                .all(|&distance| distance == 69_999)
        );
    }
}
