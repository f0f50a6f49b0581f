//! The finder for sparse address spaces, with buckets of eight tags and eight slots in one cache line each.
//!
//! Four neighboring lines share a home bucket, which is selected by the upper bits of a bijective mix of their common
//! address. A tag consists of the rest of the mixed address, the two low bits of the line, and the number of buckets
//! between home and the entry. Tags are therefore exact, and one vector comparison searches a bucket. Entries are never
//! removed, so a search ends at a bucket that is not full. The table doubles at a load of 0.7, or when an entry would
//! lie too far from its home bucket.

use super::batch::{BATCH_ACCESSES, LINE_BITS, SlotPairs};
use crate::hash::mix_bits;
use crate::simd::{Lanes, Portable, U32x16, prefetch};
use std::collections::BTreeSet;

/// Number of low bits of a line that are stored in its tag.
const QUAD_BITS: u32 = 2;
const KEY_BITS: u32 = LINE_BITS - QUAD_BITS;
/// Number of tag bits for the distance from home, plus one, so that a tag is never 0.
const DISTANCE_BITS: u32 = 3;
const MAX_DISTANCE: u32 = (1 << DISTANCE_BITS) - 1;
/// Base-2 logarithm of the minimum number of buckets: with fewer than 2^14, tags would not fit into 32 bits.
const MIN_BUCKET_BITS: u32 = 14;
const _: () = assert!(LINE_BITS - MIN_BUCKET_BITS + DISTANCE_BITS <= 32);
/// Number of accesses ahead for which buckets are prefetched.
const PREFETCH_AHEAD: usize = 24;

#[derive(Debug)]
pub(super) struct SparseFinder {
    bucket_bits: u32,
    line_count: usize,
    /// Buckets, with tags in lanes 0..8 and slots in lanes 8..16. They fill from the lowest lane on; tag 0 marks a free
    /// lane.
    buckets: Vec<U32x16>,
}

impl SparseFinder {
    /// Builds a table that holds this number of lines without growing, unless entries lie too far from home.
    pub(super) fn with_room_for(lines: usize) -> Self {
        Self::with_bucket_bits(Self::bucket_bits_for(lines))
    }

    fn with_bucket_bits(bucket_bits: u32) -> Self {
        SparseFinder {
            bucket_bits,
            line_count: 0,
            buckets: vec![U32x16([0; 16]); 1 << bucket_bits],
        }
    }

    fn bucket_bits_for(lines: usize) -> u32 {
        // 7/10 of the eight lanes of a bucket, which is 5.6 lines.
        let buckets = lines * 10 / 56 + 1;
        buckets
            .next_power_of_two()
            .trailing_zeros()
            .max(MIN_BUCKET_BITS)
    }

    pub(super) fn bytes_for(lines: usize) -> usize {
        size_of::<U32x16>() << Self::bucket_bits_for(lines)
    }

    /// The home bucket of a line, and its tag at distance 0.
    #[inline(always)]
    fn home_bucket(&self, line: u64) -> (usize, u32) {
        let key = mix_bits(line >> QUAD_BITS, KEY_BITS);
        let rest_bits = KEY_BITS - self.bucket_bits;
        let key_rest = key & ((1 << rest_bits) - 1);
        (
            (key >> rest_bits) as usize,
            ((key_rest << QUAD_BITS | line & 3) as u32) << DISTANCE_BITS,
        )
    }

    #[inline(always)]
    pub(super) unsafe fn replace_slots<L: Lanes>(
        &mut self,
        lines: &[u64],
        new_slots: impl Iterator<Item = u32>,
        pairs: &mut SlotPairs,
    ) {
        if Self::bucket_bits_for(self.line_count + lines.len()) > self.bucket_bits {
            self.grow();
        }
        let mut homes_and_tags = [(0usize, 0u32); BATCH_ACCESSES];
        let home_entries = &mut homes_and_tags[..lines.len()];
        for (home_entry, &line) in home_entries.iter_mut().zip(lines) {
            *home_entry = self.home_bucket(line);
        }
        for &(home, _) in &home_entries[..lines.len().min(PREFETCH_AHEAD)] {
            prefetch(self.buckets.as_ptr().wrapping_add(home));
        }
        let bucket_bits = self.bucket_bits;
        for (index, new_slot) in (0..lines.len()).zip(new_slots) {
            if let Some(&(home, _)) = home_entries.get(index + PREFETCH_AHEAD) {
                prefetch(self.buckets.as_ptr().wrapping_add(home));
            }
            // Precomputed places are valid unless the table has grown within the batch, which is rare.
            let (home, tag) = if self.bucket_bits == bucket_bits {
                home_entries[index]
            } else {
                self.home_bucket(lines[index])
            };
            // SAFETY: the caller guarantees that the processor has `L`.
            let old_slot = match unsafe { self.replace_slot::<L>(home, tag, new_slot) } {
                Some(old_slot) => old_slot,
                None => self.grow_and_insert(lines[index], new_slot),
            };
            pairs.push_known(old_slot, new_slot);
        }
    }

    /// Writes the slot of each line, or 0.
    #[inline(always)]
    pub(super) unsafe fn find_slots<L: Lanes>(&self, lines: &[u64], slots: &mut [u32]) {
        let mut homes_and_tags = [(0usize, 0u32); BATCH_ACCESSES];
        let home_entries = &mut homes_and_tags[..lines.len()];
        for (home_entry, &line) in home_entries.iter_mut().zip(lines) {
            *home_entry = self.home_bucket(line);
            prefetch(self.buckets.as_ptr().wrapping_add(home_entry.0));
        }
        for (slot, &(home, tag)) in slots.iter_mut().zip(home_entries.iter()) {
            // SAFETY: the caller guarantees that the processor has `L`.
            *slot = unsafe { self.find_slot::<L>(home, tag) };
        }
    }

    /// 0 if the line has none.
    #[inline(always)]
    unsafe fn find_slot<L: Lanes>(&self, home: usize, tag: u32) -> u32 {
        let mask = self.buckets.len() - 1;
        for distance in 1..=MAX_DISTANCE {
            let bucket = &self.buckets[(home + distance as usize - 1) & mask];
            // SAFETY: the caller guarantees that the processor has `L`.
            let matches = unsafe { L::equal_8(bucket, tag | distance) };
            if matches != 0 {
                return bucket.0[(8 + matches.trailing_zeros() as usize) & 15];
            }
            if bucket.0[7] == 0 {
                return 0;
            }
        }
        0
    }

    /// Sets the slot of the line and returns the old one, or 0 if the line is new. Returns `None` if the entry would
    /// lie too far from home, so that the table must grow.
    #[inline(always)]
    unsafe fn replace_slot<L: Lanes>(
        &mut self,
        home: usize,
        tag: u32,
        new_slot: u32,
    ) -> Option<u32> {
        let mask = self.buckets.len() - 1;
        for distance in 1..=MAX_DISTANCE {
            let bucket = &mut self.buckets[(home + distance as usize - 1) & mask];
            // SAFETY: the caller guarantees that the processor has `L`.
            let matches = unsafe { L::equal_8(bucket, tag | distance) };
            if matches != 0 {
                let lane = (8 + matches.trailing_zeros() as usize) & 15;
                return Some(std::mem::replace(&mut bucket.0[lane], new_slot));
            }
            if bucket.0[7] == 0 {
                // SAFETY: as above.
                let free_entry = unsafe { L::equal_8(bucket, 0) }.trailing_zeros() as usize & 7;
                (bucket.0[free_entry], bucket.0[8 + free_entry]) = (tag | distance, new_slot);
                self.line_count += 1;
                return Some(0);
            }
        }
        None
    }

    #[cold]
    #[inline(never)]
    fn grow_and_insert(&mut self, line: u64, new_slot: u32) -> u32 {
        loop {
            self.grow();
            let (home, tag) = self.home_bucket(line);
            // SAFETY: the portable lanes run everywhere.
            if let Some(old_slot) = unsafe { self.replace_slot::<Portable>(home, tag, new_slot) } {
                return old_slot;
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let mut bits = self.bucket_bits + 1;
        'larger: loop {
            let mut larger_table = SparseFinder::with_bucket_bits(bits);
            let rest_bits = KEY_BITS - bits;
            for (key, low, slot) in self.entries() {
                let key_rest = key & ((1 << rest_bits) - 1);
                let tag = ((key_rest << QUAD_BITS | low) as u32) << DISTANCE_BITS;
                // SAFETY: the portable lanes run everywhere.
                if unsafe {
                    larger_table.replace_slot::<Portable>((key >> rest_bits) as usize, tag, slot)
                }
                .is_none()
                {
                    bits += 1;
                    continue 'larger;
                }
            }
            *self = larger_table;
            return;
        }
    }

    /// For every line, the mixed address of its quad, its own low bits, and its slot.
    fn entries(&self) -> impl Iterator<Item = (u64, u64, u32)> + '_ {
        let (rest_bits, mask) = (KEY_BITS - self.bucket_bits, self.buckets.len() - 1);
        self.buckets
            .iter()
            .enumerate()
            .flat_map(move |(index, bucket)| {
                let (tags, slots) = bucket.0.split_at(8);
                tags.iter()
                    .zip(slots)
                    .filter(|&(&tag, _)| tag != 0)
                    .map(move |(&tag, &slot)| {
                        let distance = (tag & MAX_DISTANCE) as usize - 1;
                        let home = index.wrapping_sub(distance) & mask;
                        let key_rest = u64::from(tag >> DISTANCE_BITS);
                        (
                            (home as u64) << rest_bits | key_rest >> QUAD_BITS,
                            key_rest & 3,
                            slot,
                        )
                    })
            })
    }

    #[inline(always)]
    pub(super) fn for_each_slot(&mut self, change: impl FnMut(&mut u32)) {
        self.buckets
            .iter_mut()
            .flat_map(|bucket| &mut bucket.0[8..])
            .for_each(change);
    }

    /// Sets the slot of one line that is not in the table yet.
    pub(super) fn set(&mut self, line: u64, slot: u32) {
        let (home, tag) = self.home_bucket(line);
        // SAFETY: the portable lanes run everywhere.
        if unsafe { self.replace_slot::<Portable>(home, tag, slot) }.is_none() {
            self.grow_and_insert(line, slot);
        }
    }

    /// In no particular order.
    pub(super) fn lines_and_slots(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.entries().map(|(key, low, slot)| {
            (
                crate::hash::unmix_bits(key, KEY_BITS) << QUAD_BITS | low,
                slot,
            )
        })
    }

    /// Estimates the number of pages of 64 lines that occur in the table, from a sample of one page in 64.
    pub(super) fn estimate_pages(&self) -> usize {
        let sampled_pages: BTreeSet<u64> = self
            .lines_and_slots()
            .map(|(line, _)| line / 64)
            .filter(|&page| crate::hash::mix(page) >> 58 == 0)
            .collect();
        (sampled_pages.len() + 1) * 64
    }
}
