//! The last access of each line: line -> slot.
//!
//! There are two forms. *Dense*: pages of 64 lines, a small hash table page -> leaf of 64 slots; best if programs use
//! most lines of the pages that they touch. *Sparse*: a bucket hash of lines; best if only one or two lines of a page
//! are in use, which would cost the dense form about 300 bytes each. [`Finder`] starts dense and takes the better form,
//! with a factor of two between switching and switching again.

use super::batch::SlotPairs;
use super::dense::DenseFinder;
use super::sparse::SparseFinder;
use crate::simd::Lanes;

/// Below this size, the form does not change, because small tables are cheap in any form.
const DENSE_FREE_BYTES: usize = 8 << 20;

/// The forms that a finder may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FinderKind {
    /// The better one; always dense up to this size.
    Fitting { dense_free_bytes: usize },
    #[cfg(test)]
    Dense,
    #[cfg(test)]
    Sparse,
}

impl FinderKind {
    /// `None` if the form is fixed.
    #[inline(always)]
    fn dense_free_bytes(self) -> Option<usize> {
        match self {
            FinderKind::Fitting { dense_free_bytes } => Some(dense_free_bytes),
            #[cfg(test)]
            FinderKind::Dense | FinderKind::Sparse => None,
        }
    }
}

impl Default for FinderKind {
    fn default() -> Self {
        FinderKind::Fitting { dense_free_bytes: DENSE_FREE_BYTES }
    }
}

#[derive(Debug)]
enum FinderTable {
    Dense(DenseFinder),
    Sparse(SparseFinder),
}

#[derive(Debug)]
pub(super) struct Finder {
    table: FinderTable,
    kind: FinderKind,
    lines: usize,
}

impl Finder {
    pub(super) fn new(kind: FinderKind) -> Self {
        #[cfg(test)]
        if kind == FinderKind::Sparse {
            return Finder { table: FinderTable::Sparse(SparseFinder::with_room_for(0)), kind, lines: 0 };
        }
        Finder { table: FinderTable::Dense(DenseFinder::new()), kind, lines: 0 }
    }

    /// Returns the number of distinct lines so far.
    pub(super) fn lines(&self) -> usize {
        self.lines
    }

    /// Gives the lines the slots `first_slot..`, in order; `pairs` receives the old and the new slot of those that
    /// occurred before. At most [`super::batch::BATCH`] lines, below 2^[`super::batch::LINE_BITS`]; slots are above 0.
    #[inline(always)]
    pub(super) unsafe fn find<L: Lanes>(&mut self, lines: &[u64], first_slot: u32, pairs: &mut SlotPairs) {
        pairs.clear();
        match &mut self.table {
            FinderTable::Dense(dense) => dense.find(lines, first_slot, pairs),
            // SAFETY: the caller guarantees that the processor has `L`.
            FinderTable::Sparse(sparse) => unsafe { sparse.find::<L>(lines, first_slot, pairs) },
        }
        self.lines += lines.len() - pairs.len;
    }

    /// Calls `change` on the slot of every line, in any order, and on free places, which hold 0 and must keep it,
    /// because testing each would be an unpredictable branch.
    #[inline(always)]
    pub(super) fn for_each_slot(&mut self, change: impl FnMut(&mut u32)) {
        match &mut self.table {
            FinderTable::Dense(dense) => dense.for_each_slot(change),
            FinderTable::Sparse(sparse) => sparse.for_each_slot(change),
        }
    }

    /// Leaves the dense form after a batch if it has become wasteful.
    #[inline(always)]
    pub(super) fn leave_dense_if_wasteful(&mut self) {
        let FinderTable::Dense(dense) = &self.table else { return };
        let Some(dense_free_bytes) = self.kind.dense_free_bytes() else { return };
        if dense.bytes() > dense_free_bytes && dense.bytes() > 2 * SparseFinder::bytes_for(self.lines) {
            self.table = FinderTable::Sparse(to_sparse(dense, self.lines));
        }
    }

    /// Returns to the dense form at a compaction, if it would be smaller than the sparse one.
    pub(super) fn return_to_dense_if_fitting(&mut self) {
        let FinderTable::Sparse(sparse) = &self.table else { return };
        if self.kind.dense_free_bytes().is_some()
            && DenseFinder::bytes_for(sparse.estimate_pages()) < SparseFinder::bytes_for(self.lines)
        {
            self.table = FinderTable::Dense(to_dense(sparse));
        }
    }

    /// Is the sparse form in use?
    #[cfg(test)]
    pub(super) fn is_sparse(&self) -> bool {
        matches!(self.table, FinderTable::Sparse(_))
    }
}

/// Converts to the sparse form.
fn to_sparse(dense: &DenseFinder, lines: usize) -> SparseFinder {
    let mut sparse = SparseFinder::with_room_for(lines);
    for (line, slot) in dense.lines_and_slots() {
        sparse.set(line, slot);
    }
    sparse
}

/// Converts to the dense form.
fn to_dense(sparse: &SparseFinder) -> DenseFinder {
    let mut dense = DenseFinder::new();
    for (line, slot) in sparse.lines_and_slots() {
        dense.set(line, slot);
    }
    dense
}
