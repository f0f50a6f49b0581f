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

    /// The distance that the last batch stored at this index.
    pub(super) fn pending_distance(&self, index: usize) -> u32 {
        self.pending_indices[index % BATCH_ACCESSES] - 1
    }

    #[cold]
    #[inline(never)]
    fn fold_counts(&mut self) {
        let len = self.counts.len().max(self.folded_counts.len());
        self.folded_counts.resize(len, 0);
        for (sum, count) in self.folded_counts.iter_mut().zip(&mut self.counts) {
            *sum += u64::from(std::mem::take(count));
        }
        self.accesses_since_fold = BATCH_ACCESSES as u64;
    }

    /// Counts the distances that wait for their counters.
    fn settle(&mut self) {
        for counter_index in std::mem::replace(&mut self.pending_indices, [0; BATCH_ACCESSES]) {
            self.counts[counter_index as usize] += 1;
        }
        self.counts[0] = 0;
    }

    /// Adds the counts of another tally.
    pub(super) fn add(&mut self, mut other: Tally) {
        self.settle();
        other.settle();
        if self.counts.len() < other.counts.len() {
            std::mem::swap(self, &mut other);
        }
        let sum = self.accesses_since_fold + other.accesses_since_fold;
        if sum > u64::from(u32::MAX) - BATCH_ACCESSES as u64 {
            self.fold_counts();
            other.fold_counts();
        }
        self.accesses_since_fold += other.accesses_since_fold;
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum += count;
        }
        if self.folded_counts.len() < other.folded_counts.len() {
            self.folded_counts.resize(other.folded_counts.len(), 0);
        }
        for (sum, count) in self.folded_counts.iter_mut().zip(&other.folded_counts) {
            *sum += count;
        }
    }

    /// Removes the counts of distances of at least `cap_lines`, and returns their sum.
    pub(super) fn remove_beyond(&mut self, cap_lines: usize) -> u64 {
        self.settle();
        let first_removed = cap_lines.saturating_add(1);
        let mut removed_count = 0;
        if first_removed < self.counts.len() {
            let removed_counts = self.counts.drain(first_removed..);
            removed_count += removed_counts.map(u64::from).sum::<u64>();
        }
        if first_removed < self.folded_counts.len() {
            removed_count += self.folded_counts.drain(first_removed..).sum::<u64>();
        }
        removed_count
    }

    /// Builds a tally from its histogram.
    pub(super) fn from_histogram(histogram: &DistanceHistogram) -> Self {
        let mut tally = Tally::new();
        if let Some(&(max_distance, _)) = histogram.counts().last() {
            tally.grow(max_distance as usize + 2);
            tally.folded_counts = vec![0; tally.counts.len()];
        }
        for &(distance, count) in histogram.counts() {
            tally.folded_counts[distance as usize + 1] = count;
        }
        tally
    }

    /// Adds `cold_count` first touches.
    pub(super) fn finish(mut self, cold_count: u64) -> DistanceHistogram {
        self.settle();
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
