//! Conversion of line addresses to sets and tags.

use crate::hash::scatter;

/// Divides by the number of sets, without a division where possible.
#[derive(Clone, Copy, Debug)]
pub(super) struct SetIndex {
    sets: u64,
    slices: u64,
    /// Logarithm of the number of sets, if that is a power of two.
    shift: Option<u32>,
    /// 2^64 / sets, rounded up.
    reciprocal: u64,
    /// The reciprocal is exact for lines below this, because its error, less than 1 in 2^64 / sets, times the line
    /// stays under one part in `sets`.
    exact_below: u64,
}

/// Number of lines that are looked up together.
pub(super) const BATCH: usize = 128;

impl SetIndex {
    pub(super) fn new(sets: u32, slices: u32) -> Self {
        let sets = u64::from(sets);
        SetIndex {
            sets,
            slices: slices.into(),
            shift: sets.is_power_of_two().then(|| sets.trailing_zeros()),
            reciprocal: (u64::MAX / sets).wrapping_add(1),
            exact_below: u64::MAX / sets,
        }
    }

    /// Writes set and tag of each line; returns the bits that are set in any tag. Sets are numbered through all slices;
    /// a tag distinguishes the lines of a set. The slice is the upper half of `scatter(line) * slices`.
    #[inline(always)]
    pub(super) fn compute_places(&self, lines: &[u64], places: &mut SetTagBatch) -> u64 {
        let (sets, tags) = (&mut places.sets[..lines.len()], &mut places.tags[..lines.len()]);
        let places = sets.iter_mut().zip(tags.iter_mut()).zip(lines);
        if let Some(shift) = self.shift {
            for ((set, tag), &line) in places {
                (*set, *tag) = ((line & (self.sets - 1)) as u32, line >> shift);
            }
        } else if lines.iter().fold(0, |bits, line| bits | line) < self.exact_below {
            for ((set, tag), &line) in places {
                *tag = ((u128::from(line) * u128::from(self.reciprocal)) >> 64) as u64;
                *set = (line - *tag * self.sets) as u32;
            }
        } else {
            for ((set, tag), &line) in places {
                (*set, *tag) = ((line % self.sets) as u32, line / self.sets);
            }
        }
        if self.slices > 1 {
            for (set, &line) in sets.iter_mut().zip(lines) {
                let slice = (u128::from(scatter(line)) * u128::from(self.slices)) >> 64;
                *set += (slice as u64 * self.sets) as u32;
            }
        }
        tags.iter().fold(0, |bits, tag| bits | tag)
    }
}

/// Sets and tags of the lines of a batch.
#[derive(Debug)]
pub(super) struct SetTagBatch {
    /// Sets, below 2^32: a cache has at most that many lines.
    pub sets: [u32; BATCH],
    pub tags: [u64; BATCH],
}

impl SetTagBatch {
    pub(super) fn new() -> Self {
        SetTagBatch { sets: [0; BATCH], tags: [0; BATCH] }
    }
}
