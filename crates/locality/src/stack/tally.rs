//! Counts distances in 32-bit counters, which are added to 64-bit ones before they can overflow.

use super::batch::BATCH_ACCESSES;
use super::histogram::DistanceHistogram;
use crate::simd::prefetch;

#[derive(Debug)]
pub(super) struct Tally {
    /// Count of distance d at index d + 1; index 0 absorbs the initial contents of `pending_indices`.
    counts: Vec<u32>,
    folded_counts: Vec<u64>,
    /// Number of accesses counted since the last fold, an upper bound of every counter.
    accesses_since_fold: u64,
    /// Indices into `counts` that have been prefetched but not incremented yet.
    pending_indices: [u32; BATCH_ACCESSES],
}

impl Tally {
    pub(super) fn new() -> Self {
        Tally {
            counts: vec![0],
            folded_counts: Vec::new(),
            accesses_since_fold: 0,
            pending_indices: [0; BATCH_ACCESSES],
        }
    }

    /// Makes room for distances below `lines`, and for [`BATCH_ACCESSES`] more accesses.
    #[inline(always)]
    pub(super) fn reserve(&mut self, lines: usize) {
        if self.counts.len() <= lines {
            self.grow(lines + 1);
        }
        self.accesses_since_fold += BATCH_ACCESSES as u64;
        if self.accesses_since_fold > u64::from(u32::MAX) - BATCH_ACCESSES as u64 {
            self.fold_counts();
        }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, len: usize) {
        self.counts
            .resize(len.max(self.counts.len() * 3 / 2).max(1024), 0);
    }

    /// Counts the distance that the preceding batch stored at this index, and prefetches the counter of the new
    /// distance.
    ///
    /// The prefetched memory arrives one batch later, so no increment waits for memory.
    #[inline(always)]
    pub(super) fn count(&mut self, index: usize, distance: u32) {
        let counter_index = distance + 1;
        prefetch(self.counts.as_ptr().wrapping_add(counter_index as usize));
        let previous_index = std::mem::replace(
            &mut self.pending_indices[index % BATCH_ACCESSES],
            counter_index,
        );
        self.counts[previous_index as usize] += 1;
    }

    /// Returns the distance that the last batch stored at this index.
    pub(super) fn pending_distance(&self, index: usize) -> u32 {
        self.pending_indices[index % BATCH_ACCESSES] - 1
    }

    #[cold]
    #[inline(never)]
    fn fold_counts(&mut self) {
        self.folded_counts.resize(self.counts.len(), 0);
        for (sum, count) in self.folded_counts.iter_mut().zip(&mut self.counts) {
            *sum += u64::from(std::mem::take(count));
        }
        self.accesses_since_fold = BATCH_ACCESSES as u64;
    }

    pub(super) fn finish(mut self, cold_count: u64) -> DistanceHistogram {
        for counter_index in self.pending_indices {
            self.counts[counter_index as usize] += 1;
        }
        if !self.folded_counts.is_empty() {
            self.fold_counts();
            return DistanceHistogram::new(
                cold_count,
                (0..).zip(self.folded_counts.into_iter().skip(1)),
            );
        }
        let Tally { counts, .. } = self;
        DistanceHistogram::new(
            cold_count,
            (0..).zip(counts.into_iter().skip(1).map(u64::from)),
        )
    }
}
