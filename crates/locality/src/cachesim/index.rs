//! Conversion of line addresses to sets and tags.

use crate::hash::scatter;

/// Computes line % sets and line / sets, without a division instruction unless the line address is very large.
#[derive(Clone, Copy, Debug)]
pub(super) struct SetIndex {
    sets: u64,
    slices: u64,
    /// Base-2 logarithm of the number of sets, if that is a power of two.
    shift: Option<u32>,
    /// 2^64 / sets, rounded up.
    reciprocal: u64,
    /// Smallest line address for which the reciprocal may be inexact. The reciprocal errs by less than 1 in 2^64 /
    /// sets, so below this address the error of the quotient stays under 1 / sets.
    exact_limit: u64,
    /// The part of the lines and the number of parts: lines are given as quotients by the latter.
    part: (u64, u64),
}

/// Number of lines that are looked up together.
pub(super) const BATCH_LINES: usize = 128;

impl SetIndex {
    /// Indexes the sets of one of several parts, of which there are `sets` in a slice (see `group.rs`).
    pub(super) fn new(sets: u32, slices: u32, part: (u64, u64)) -> Self {
        let sets = u64::from(sets);
        SetIndex {
            sets,
            slices: slices.into(),
            shift: sets.is_power_of_two().then(|| sets.trailing_zeros()),
            reciprocal: (u64::MAX / sets).wrapping_add(1),
            exact_limit: u64::MAX / sets,
            part,
        }
    }

    /// Writes the set and the tag of each line, and returns the bitwise or of all tags.
    ///
    /// Sets are numbered consecutively through all slices, and a tag identifies a line within its set. The slice is the
    /// upper half of `scatter(line) * slices`.
    #[inline(always)]
    pub(super) fn compute_sets_and_tags(
        &self,
        lines: &[u64],
        sets_and_tags: &mut SetTagBatch,
    ) -> u64 {
        let (sets, tags) = (
            &mut sets_and_tags.sets[..lines.len()],
            &mut sets_and_tags.tags[..lines.len()],
        );
        let entries = sets.iter_mut().zip(tags.iter_mut()).zip(lines);
        if let Some(shift) = self.shift {
            for ((set, tag), &line) in entries {
                (*set, *tag) = ((line & (self.sets - 1)) as u32, line >> shift);
            }
        } else if lines.iter().fold(0, |bits, line| bits | line) < self.exact_limit {
            for ((set, tag), &line) in entries {
                *tag = ((u128::from(line) * u128::from(self.reciprocal)) >> 64) as u64;
                *set = (line - *tag * self.sets) as u32;
            }
        } else {
            for ((set, tag), &line) in entries {
                (*set, *tag) = ((line % self.sets) as u32, line / self.sets);
            }
        }
        if self.slices > 1 {
            let (part, part_count) = self.part;
            for (set, &line) in sets.iter_mut().zip(lines) {
                let line = line * part_count + part;
                let slice = (u128::from(scatter(line)) * u128::from(self.slices)) >> 64;
                *set += (slice as u64 * self.sets) as u32;
            }
        }
        tags.iter().fold(0, |bits, tag| bits | tag)
    }
}

/// Sets and tags of the lines of one batch.
#[derive(Debug)]
pub(super) struct SetTagBatch {
    /// Set of each line; 32 bits suffice, because a cache has fewer than 2^32 lines.
    pub sets: [u32; BATCH_LINES],
    pub tags: [u64; BATCH_LINES],
}

impl SetTagBatch {
    pub(super) fn new() -> Self {
        SetTagBatch {
            sets: [0; BATCH_LINES],
            tags: [0; BATCH_LINES],
        }
    }
}
