//! Input and output of a finder for one batch of accesses.

/// Number of accesses handled together: enough to overlap their cache misses.
pub(super) const BATCH: usize = 128;

/// Line addresses that the finders accept are below 2^43; [`super::rename`] ensures this.
pub(super) const LINE_BITS: u32 = 43;

/// (old slot, new slot) of the accesses of a batch that were not cold, in order.
#[derive(Debug)]
pub(super) struct SlotPairs {
    old: [u32; BATCH],
    new: [u32; BATCH],
    pub(super) len: usize,
}

impl SlotPairs {
    pub(super) fn new() -> Self {
        SlotPairs { old: [0; BATCH], new: [0; BATCH], len: 0 }
    }
    pub(super) fn clear(&mut self) {
        self.len = 0;
    }
    /// Keeps the pair unless `old` is 0, without a branch.
    #[inline(always)]
    pub(super) fn push_known(&mut self, old: u32, new: u32) {
        let at = self.len % BATCH;
        (self.old[at], self.new[at]) = (old, new);
        self.len += usize::from(old != 0);
    }
    pub(super) fn get(&self) -> (&[u32], &[u32]) {
        (&self.old[..self.len], &self.new[..self.len])
    }
}
