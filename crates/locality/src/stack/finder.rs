//! Finds the time slot of the last access to each line.
//!
//! A finder has one of two forms. The *dense* form maps pages of 64 lines to leaves of 64 slots through a small hash
//! table; it is better if programs use most lines of the pages that they touch. The *sparse* form hashes lines into
//! buckets; it is better if only one or two lines of a page are in use, because each such page would cost about 300
//! bytes in the dense form. [`SlotFinder`] starts dense and switches to the smaller form. The thresholds for switching
//! and for switching back differ by a factor of two.

use super::batch::{BATCH_ACCESSES, SlotPairs};
use super::dense::DenseFinder;
use super::rename::Renamer;
use super::sparse::SparseFinder;
use crate::simd::{Lanes, Portable};

/// Size in bytes up to which a finder stays dense, because a small table is cheap in either form.
const DENSE_FREE_BYTES: usize = 8 << 20;

/// Rule by which a finder chooses its form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FinderKind {
    /// The smaller form, but always the dense one up to this size.
    Adaptive { max_dense_bytes: usize },
    #[cfg(test)]
    Dense,
    #[cfg(test)]
    Sparse,
}

impl FinderKind {
    /// The size up to which the dense form is kept; `None` if the form is fixed.
    #[inline(always)]
    fn dense_free_bytes(self) -> Option<usize> {
        match self {
            FinderKind::Adaptive {
                max_dense_bytes: dense_free_bytes,
            } => Some(dense_free_bytes),
            #[cfg(test)]
            FinderKind::Dense | FinderKind::Sparse => None,
        }
    }
}

impl Default for FinderKind {
    fn default() -> Self {
        FinderKind::Adaptive {
            max_dense_bytes: DENSE_FREE_BYTES,
        }
    }
}

#[derive(Debug)]
enum SlotTable {
    Dense(DenseFinder),
    Sparse(SparseFinder),
}

#[derive(Debug)]
pub(super) struct SlotFinder {
    table: SlotTable,
    renamer: Renamer,
    kind: FinderKind,
    line_count: usize,
}

impl SlotFinder {
    pub(super) fn new(kind: FinderKind) -> Self {
        #[cfg(test)]
        if kind == FinderKind::Sparse {
            return SlotFinder {
                table: SlotTable::Sparse(SparseFinder::with_room_for(0)),
                renamer: Renamer::default(),
                kind,
                line_count: 0,
            };
        }
        SlotFinder {
            table: SlotTable::Dense(DenseFinder::new()),
            renamer: Renamer::default(),
            kind,
            line_count: 0,
        }
    }

    pub(super) fn line_count(&self) -> usize {
        self.line_count
    }

    /// Assigns the next of `new_slots` to each line, in order, and writes to `pairs` the old and the new slot of lines
    /// that have occurred before.
    ///
    /// Accepts at most [`BATCH_ACCESSES`] lines; slots are above 0.
    #[inline(always)]
    pub(super) unsafe fn replace_slots<L: Lanes>(
        &mut self,
        lines: &[u64],
        new_slots: impl Iterator<Item = u32>,
        pairs: &mut SlotPairs,
    ) {
        pairs.clear();
        if Renamer::is_narrow(lines) {
            // SAFETY: the caller guarantees that the processor has `L`.
            unsafe { self.replace_narrow::<L>(lines, new_slots, pairs) };
        } else {
            let mut renamed_lines = [0; BATCH_ACCESSES];
            let renamed_batch = &mut renamed_lines[..lines.len()];
            self.renamer.rename(lines, renamed_batch);
            // SAFETY: the caller guarantees that the processor has `L`.
            unsafe { self.replace_narrow::<L>(renamed_batch, new_slots, pairs) };
        }
        self.line_count += lines.len() - pairs.len;
        self.switch_to_sparse_if_smaller();
    }

    #[inline(always)]
    unsafe fn replace_narrow<L: Lanes>(
        &mut self,
        lines: &[u64],
        new_slots: impl Iterator<Item = u32>,
        pairs: &mut SlotPairs,
    ) {
        match &mut self.table {
            SlotTable::Dense(dense) => dense.replace_slots(lines, new_slots, pairs),
            // SAFETY: the caller guarantees that the processor has `L`.
            SlotTable::Sparse(sparse) => unsafe {
                sparse.replace_slots::<L>(lines, new_slots, pairs)
            },
        }
    }

    /// Writes the slot of each line of one batch, or 0 for lines that have not occurred.
    #[inline(always)]
    pub(super) unsafe fn find_slots<L: Lanes>(&self, lines: &[u64], slots: &mut [u32]) {
        let mut renamed_lines = [0; BATCH_ACCESSES];
        let mut narrow_lines = lines;
        if !Renamer::is_narrow(lines) {
            self.renamer.find(lines, &mut renamed_lines[..lines.len()]);
            narrow_lines = &renamed_lines[..lines.len()];
        }
        match &self.table {
            SlotTable::Dense(dense) => dense.find_slots(narrow_lines, slots),
            // SAFETY: the caller guarantees that the processor has `L`.
            SlotTable::Sparse(sparse) => unsafe { sparse.find_slots::<L>(narrow_lines, slots) },
        }
    }

    /// Sets the slots of all lines of another finder by `new_slot` of their slots there, page by page. Returns `false`
    /// without a change if one of them is sparse or has renamed pages.
    #[inline(always)]
    pub(super) fn absorb_pages(
        &mut self,
        next: &SlotFinder,
        new_slot: impl Fn(u32) -> u32,
    ) -> bool {
        let (SlotTable::Dense(dense), SlotTable::Dense(next_dense)) =
            (&mut self.table, &next.table)
        else {
            return false;
        };
        if !next.renamer.is_empty() {
            return false;
        }
        self.line_count += dense.absorb_pages(next_dense, new_slot);
        self.switch_to_sparse_if_smaller();
        true
    }

    /// Calls `visit` on all lines and their slots, in batches and in the order of the table, which is that in which
    /// another finder visits its own memory fastest.
    #[inline(always)]
    pub(super) fn for_each_batch(&self, mut visit: impl FnMut(&[u64], &[u32])) {
        let pages = self.renamer.list_pages();
        let (mut lines, mut slots) = ([0; BATCH_ACCESSES], [0; BATCH_ACCESSES]);
        let mut len = 0;
        let mut take = |(line, slot): (u64, u32)| {
            (lines[len], slots[len]) = (line, slot);
            len += 1;
            if len == BATCH_ACCESSES {
                pages.restore(&mut lines);
                visit(&lines, &slots);
                len = 0;
            }
        };
        match &self.table {
            SlotTable::Dense(dense) => dense.lines_and_slots().for_each(&mut take),
            SlotTable::Sparse(sparse) => sparse.lines_and_slots().for_each(&mut take),
        }
        pages.restore(&mut lines[..len]);
        visit(&lines[..len], &slots[..len]);
    }

    /// In order of their slots, which are 1 to the number of lines.
    pub(super) fn list_by_slot(&self) -> Vec<u64> {
        let mut listed_lines = vec![0; self.line_count];
        self.for_each_batch(|lines, slots| {
            for (&line, &slot) in lines.iter().zip(slots) {
                listed_lines[slot as usize - 1] = line;
            }
        });
        listed_lines
    }

    /// Forgets all lines but the newest. Slots are 1 to the number of lines, before and afterward.
    pub(super) fn keep_newest(&mut self, line_count: usize) {
        let forgotten_slots = (self.line_count - line_count) as u32;
        let all_lines = std::mem::replace(self, SlotFinder::new(self.kind));
        if matches!(all_lines.table, SlotTable::Sparse(_)) {
            // As many lines are new before the next time.
            self.table = SlotTable::Sparse(SparseFinder::with_room_for(2 * line_count));
        }
        let mut pairs = SlotPairs::new();
        // In the order of the old table, so that the new one fills from one end to the other.
        all_lines.for_each_batch(|lines, slots| {
            let (mut kept_lines, mut kept_slots) = ([0; BATCH_ACCESSES], [0; BATCH_ACCESSES]);
            let mut len = 0;
            for (&line, &slot) in lines.iter().zip(slots) {
                (kept_lines[len], kept_slots[len]) = (line, slot.wrapping_sub(forgotten_slots));
                len += usize::from(slot > forgotten_slots);
            }
            let new_slots = kept_slots[..len].iter().copied();
            // SAFETY: the portable lanes run everywhere.
            unsafe { self.replace_slots::<Portable>(&kept_lines[..len], new_slots, &mut pairs) };
        });
    }

    /// Calls `change` on the slot of every line, in any order. `change` is also called on free entries and must leave
    /// their 0 unchanged; testing each entry would cost an unpredictable branch.
    #[inline(always)]
    pub(super) fn for_each_slot(&mut self, change: impl FnMut(&mut u32)) {
        match &mut self.table {
            SlotTable::Dense(dense) => dense.for_each_slot(change),
            SlotTable::Sparse(sparse) => sparse.for_each_slot(change),
        }
    }

    /// Switches from the dense to the sparse form after a batch, if the dense one has become wasteful.
    #[inline(always)]
    fn switch_to_sparse_if_smaller(&mut self) {
        let SlotTable::Dense(dense_finder) = &self.table else {
            return;
        };
        let Some(dense_free_bytes) = self.kind.dense_free_bytes() else {
            return;
        };
        if dense_finder.bytes() > dense_free_bytes
            && dense_finder.bytes() > 2 * SparseFinder::bytes_for(self.line_count)
        {
            self.table = SlotTable::Sparse(convert_to_sparse(dense_finder, self.line_count));
        }
    }

    /// Switches back to the dense form at a compaction, if it would be smaller than the sparse one.
    pub(super) fn switch_to_dense_if_smaller(&mut self) {
        let SlotTable::Sparse(sparse) = &self.table else {
            return;
        };
        if self.kind.dense_free_bytes().is_some()
            && DenseFinder::bytes_for(sparse.estimate_pages())
                < SparseFinder::bytes_for(self.line_count)
        {
            self.table = SlotTable::Dense(convert_to_dense(sparse));
        }
    }

    #[cfg(test)]
    pub(super) fn is_sparse(&self) -> bool {
        matches!(self.table, SlotTable::Sparse(_))
    }
}

/// Converts a dense finder to the sparse form.
fn convert_to_sparse(dense_finder: &DenseFinder, lines: usize) -> SparseFinder {
    let mut sparse = SparseFinder::with_room_for(lines);
    for (line, slot) in dense_finder.lines_and_slots() {
        sparse.set(line, slot);
    }
    sparse
}

/// Converts a sparse finder to the dense form.
fn convert_to_dense(sparse: &SparseFinder) -> DenseFinder {
    let mut dense_finder = DenseFinder::new();
    for (line, slot) in sparse.lines_and_slots() {
        dense_finder.set(line, slot);
    }
    dense_finder
}
