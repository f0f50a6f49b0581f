//! SHARDS with a sample of fixed size: if the sample has too many lines, the lines with the largest hash are removed
//! permanently, and the threshold falls to that hash.
//!
//! The original scales all counts down whenever the rate falls from R to R'. This module instead counts each access as
//! 1 / R at the rate of its time, which gives the same proportions without rescaling. Distances are counted in buckets,
//! exact below 512 lines and within one part in 256 above, so memory is constant.

use cachemate_core::FieldError;

use super::{CurveEstimate, GROUPS, HASH_BITS, SampledCurve, group_of_line, salt_from_seed};
use crate::hash::scatter;
use std::collections::{BTreeMap, BinaryHeap};

/// Base-2 logarithm of the number of buckets per doubling.
const BUCKET_BITS: u32 = 8;

/// A sampler of at most a fixed number of lines, in constant memory.
#[derive(Debug)]
pub struct FixedSizeSampler {
    max_lines: usize,
    salt: u64,
    threshold: u64,
    accesses: u64,
    sampled_accesses: u64,
    /// Hash and line of every sampled line, with the largest hash on top.
    lines_by_hash: BinaryHeap<(u64, u64)>,
    all_lines: SampleGroup,
    groups: Vec<SampleGroup>,
}

impl FixedSizeSampler {
    /// Builds a sampler of at most `lines_limit` lines.
    ///
    /// # Errors
    /// The limit is below 8 or above 2^24.
    pub fn new(lines_limit: usize, seed: u64) -> Result<Self, FieldError> {
        if !(GROUPS..=1 << HASH_BITS).contains(&lines_limit) {
            let expected = "a number of lines from 8 to 2^24";
            return Err(FieldError::new("sample lines_limit", lines_limit, expected));
        }
        Ok(FixedSizeSampler {
            max_lines: lines_limit,
            salt: salt_from_seed(seed),
            threshold: 1 << HASH_BITS,
            accesses: 0,
            sampled_accesses: 0,
            lines_by_hash: BinaryHeap::new(),
            all_lines: SampleGroup::new(),
            groups: (0..GROUPS).map(|_| SampleGroup::new()).collect(),
        })
    }

    /// Adds the next accesses, as line addresses.
    pub fn push(&mut self, lines: &[u64]) {
        self.accesses += lines.len() as u64;
        for &line in lines {
            let hash = scatter(line ^ self.salt) >> (64 - HASH_BITS);
            if hash < self.threshold {
                self.touch(line, hash);
            }
        }
    }

    fn touch(&mut self, line: u64, hash: u64) {
        self.sampled_accesses += 1;
        let rate = self.rate();
        let is_new = self.all_lines.touch(line, rate);
        self.groups[group_of_line(line, self.salt)].touch(line, rate / GROUPS as f64);
        if is_new {
            self.lines_by_hash.push((hash, line));
            if self.lines_by_hash.len() > self.max_lines {
                self.lower_threshold();
            }
        }
    }

    /// Removes all sampled lines that have the largest hash, and lowers the threshold to that hash.
    fn lower_threshold(&mut self) {
        let Some(&(max_hash, _)) = self.lines_by_hash.peek() else {
            return;
        };
        self.threshold = max_hash;
        while let Some(&(hash, line)) = self.lines_by_hash.peek() {
            if hash < max_hash {
                break;
            }
            self.lines_by_hash.pop();
            self.all_lines.stack.remove(line);
            self.groups[group_of_line(line, self.salt)]
                .stack
                .remove(line);
        }
    }

    fn rate(&self) -> f64 {
        self.threshold as f64 / f64::from(1 << HASH_BITS)
    }

    /// The curve estimated from all accesses, without error intervals if one of the groups has no sampled line.
    pub fn finish(mut self) -> SampledCurve {
        if self.groups.iter().any(|group| group.cold_count == 0.0) {
            self.groups.clear();
        }
        SampledCurve {
            accesses: self.accesses,
            sampled_accesses: self.sampled_accesses,
            sampled_lines: self.lines_by_hash.len() as u64,
            rate: self.rate(),
            groups: self.groups.iter().map(SampleGroup::estimate).collect(),
            whole_curve: self.all_lines.estimate(),
        }
    }
}

/// Stack and counts of the whole sample, or of one group of its lines.
#[derive(Debug)]
struct SampleGroup {
    stack: SmallStack,
    cold_count: f64,
    /// Number of accesses by bucket of distance, scaled up.
    counts: Vec<f64>,
}

impl SampleGroup {
    fn new() -> Self {
        SampleGroup {
            stack: SmallStack::new(),
            cold_count: 0.0,
            counts: Vec::new(),
        }
    }

    /// Counts one access, and returns whether its line is new.
    fn touch(&mut self, line: u64, rate: f64) -> bool {
        match self.stack.touch(line) {
            None => {
                self.cold_count += 1.0 / rate;
                true
            }
            Some(distance) => {
                let bucket = bucket_of((f64::from(distance) / rate) as u64);
                if bucket >= self.counts.len() {
                    self.counts.resize(bucket + 1, 0.0);
                }
                self.counts[bucket] += 1.0 / rate;
                false
            }
        }
    }

    fn estimate(&self) -> CurveEstimate {
        let counts = self
            .counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0.0);
        CurveEstimate::new(
            self.cold_count,
            counts.map(|(bucket, &count)| (bucket_midpoint(bucket), count)),
        )
    }
}

/// A bucket is the leading one of a distance and the 8 bits after it.
pub(super) fn bucket_of(distance: u64) -> usize {
    let shift = (64 - distance.leading_zeros()).saturating_sub(BUCKET_BITS + 1);
    ((shift as usize) << BUCKET_BITS) + (distance >> shift) as usize
}

/// Middle of the bucket's distances, in lines.
pub(super) fn bucket_midpoint(bucket: usize) -> f64 {
    let shift = (bucket >> BUCKET_BITS).saturating_sub(1) as u32;
    let first = (bucket - ((shift as usize) << BUCKET_BITS)) as u64;
    ((first << shift) as f64) + ((1u64 << shift) - 1) as f64 / 2.0
}

/// An LRU stack of few lines that supports removal: a map from line to slot, and a Fenwick tree of the slots in use.
#[derive(Debug)]
struct SmallStack {
    slots: BTreeMap<u64, u32>,
    /// Line of each slot, for renumbering in order; meaningless if the slot is not in use.
    lines: Vec<u64>,
    /// One-based Fenwick tree.
    tree: Vec<u32>,
    next_slot: usize,
}

impl SmallStack {
    fn new() -> Self {
        SmallStack {
            slots: BTreeMap::new(),
            lines: vec![0; 64],
            tree: vec![0; 64],
            next_slot: 1,
        }
    }

    /// Number of other lines touched since the last touch of this one; `None` if the line is new.
    fn touch(&mut self, line: u64) -> Option<u32> {
        if self.next_slot == self.tree.len() {
            self.renumber();
        }
        let new_slot = self.next_slot;
        self.next_slot += 1;
        self.lines[new_slot] = line;
        let distance = self.slots.insert(line, new_slot as u32).map(|old_slot| {
            let later_lines = self.slots.len() as u32 - self.sum_below(old_slot as usize);
            self.add_to_slot(old_slot as usize, u32::MAX);
            later_lines
        });
        self.add_to_slot(new_slot, 1);
        distance
    }

    fn remove(&mut self, line: u64) {
        if let Some(slot) = self.slots.remove(&line) {
            self.add_to_slot(slot as usize, u32::MAX);
        }
    }

    fn add_to_slot(&mut self, mut slot: usize, change: u32) {
        while slot < self.tree.len() {
            self.tree[slot] = self.tree[slot].wrapping_add(change);
            slot += slot & slot.wrapping_neg();
        }
    }

    fn sum_below(&self, mut slot: usize) -> u32 {
        let mut sum = 0u32;
        while slot > 0 {
            sum = sum.wrapping_add(self.tree[slot]);
            slot &= slot - 1;
        }
        sum
    }

    fn renumber(&mut self) {
        let is_used = |slot: usize, line: u64| self.slots.get(&line) == Some(&(slot as u32));
        let lines: Vec<u64> = (1..self.next_slot)
            .map(|slot| (slot, self.lines[slot]))
            .filter(|&(slot, line)| is_used(slot, line))
            .map(|(_, line)| line)
            .collect();
        let slot_count = (lines.len() * 4).max(64);
        (self.next_slot, self.tree, self.lines) = (1, vec![0; slot_count], vec![0; slot_count]);
        for line in lines {
            let slot = self.next_slot;
            self.next_slot += 1;
            self.lines[slot] = line;
            self.slots.insert(line, slot as u32);
            self.add_to_slot(slot, 1);
        }
    }
}
