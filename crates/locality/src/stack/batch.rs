//! The input and output of a finder for one batch of accesses.

/// Number of accesses that are processed together, so that their cache misses on the host overlap.
pub(super) const BATCH_ACCESSES: usize = 128;

/// Number of bits of the line addresses that finders accept; [`super::rename`] maps all others into this range.
pub(super) const LINE_BITS: u32 = 43;

/// Old and new slots of those accesses of a batch that were not cold, in order.
#[derive(Debug)]
pub(super) struct SlotPairs {
    old_slots: [u32; BATCH_ACCESSES],
    new_slots: [u32; BATCH_ACCESSES],
    pub(super) len: usize,
}

impl SlotPairs {
    pub(super) fn new() -> Self {
        SlotPairs {
            old_slots: [0; BATCH_ACCESSES],
            new_slots: [0; BATCH_ACCESSES],
            len: 0,
        }
    }
    pub(super) fn clear(&mut self) {
        self.len = 0;
    }
    /// Appends the pair unless `old_slot` is 0, without a branch.
    #[inline(always)]
    pub(super) fn push_known(&mut self, old_slot: u32, new_slot: u32) {
        let index = self.len % BATCH_ACCESSES;
        (self.old_slots[index], self.new_slots[index]) = (old_slot, new_slot);
        self.len += usize::from(old_slot != 0);
    }
    pub(super) fn get(&self) -> (&[u32], &[u32]) {
        (&self.old_slots[..self.len], &self.new_slots[..self.len])
    }
}
