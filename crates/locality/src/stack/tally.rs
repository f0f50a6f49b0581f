//! Counts distances: 32-bit counters while the trace runs, folded into 64-bit ones before they could overflow.

use super::finder::BATCH;
use super::histogram::Histogram;
use crate::simd::prefetch;

#[derive(Debug)]
pub(super) struct Tally {
    counts: Vec<u32>,
    folded: Vec<u64>,
    /// Added since the last fold: no counter can be above it.
    since_fold: u64,
    /// The last batch's distances, whose counters were asked for but not yet touched.
    waiting: [u32; BATCH],
    waiting_len: usize,
}

/// Asks for the counter of a distance that will be counted soon.
#[derive(Clone, Copy)]
pub(super) struct Soon(*const u32);

impl Soon {
    #[inline(always)]
    pub(super) fn count(self, distance: u32) {
        prefetch(self.0.wrapping_add(distance as usize));
    }
}

impl Tally {
    pub(super) fn new() -> Self {
        Tally { counts: Vec::new(), folded: Vec::new(), since_fold: 0, waiting: [0; BATCH], waiting_len: 0 }
    }

    /// Makes room for distances below `lines`.
    #[inline(always)]
    pub(super) fn make_room(&mut self, lines: usize) {
        if self.counts.len() < lines {
            self.grow(lines);
        }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, lines: usize) {
        self.counts.resize(lines.max(self.counts.len() * 3 / 2).max(1024), 0);
    }

    /// Counts what waits, then lets `fill` write the distances of at most [`BATCH`] accesses, all within the room; it
    /// says how many. It tells [`Soon`] each distance as soon as it is known.
    #[inline(always)]
    pub(super) fn take(&mut self, fill: impl FnOnce(&mut [u32; BATCH], Soon) -> usize) {
        self.settle();
        let counts = self.counts.as_ptr();
        self.waiting_len = fill(&mut self.waiting, Soon(counts));
    }

    #[inline(always)]
    fn settle(&mut self) {
        for &distance in &self.waiting[..self.waiting_len] {
            self.counts[distance as usize] += 1;
        }
        self.since_fold += self.waiting_len as u64;
        self.waiting_len = 0;
        if self.since_fold > u64::from(u32::MAX) - BATCH as u64 {
            self.fold();
        }
    }

    #[cold]
    #[inline(never)]
    fn fold(&mut self) {
        self.folded.resize(self.counts.len(), 0);
        for (sum, count) in self.folded.iter_mut().zip(&mut self.counts) {
            *sum += u64::from(std::mem::take(count));
        }
        self.since_fold = 0;
    }

    pub(super) fn finish(mut self, cold: u64) -> Histogram {
        self.settle();
        if !self.folded.is_empty() {
            self.fold();
            return Histogram::new(cold, (0..).zip(self.folded));
        }
        Histogram::new(cold, (0..).zip(self.counts.into_iter().map(u64::from)))
    }
}
