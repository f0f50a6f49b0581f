//! The baseline: Olken's algorithm as textbooks describe it. A hash map gives the last access to a line, and a
//! Fenwick tree over time slots counts the lines accessed since. When slots run out, they are renumbered; there are
//! four times as many slots as lines, so memory is proportional to the number of lines. The map uses the same hash
//! function as the engine under test.

use cachemate_locality::hash::mix;
use cachemate_locality::stack::DistanceHistogram;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

#[derive(Default)]
pub struct MixHasher(u64);

impl Hasher for MixHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only u64 keys are hashed")
    }
    fn write_u64(&mut self, key: u64) {
        // hashbrown takes the bucket from the low bits and the tag from the high ones; `mix` is best in its high bits.
        self.0 = mix(key).rotate_left(32);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

pub struct Olken {
    last: HashMap<u64, u32, BuildHasherDefault<MixHasher>>,
    tree: Vec<u32>,
    next: usize,
    counts: Vec<u64>,
    cold: u64,
}

impl Olken {
    pub fn new() -> Self {
        Olken {
            last: HashMap::default(),
            tree: vec![0; 1 << 16],
            next: 1,
            counts: Vec::new(),
            cold: 0,
        }
    }

    pub fn push(&mut self, lines: &[u64]) {
        for &line in lines {
            if self.next == self.tree.len() {
                self.renumber();
            }
            let now = self.next;
            self.next += 1;
            match self.last.insert(line, now as u32) {
                None => {
                    self.cold += 1;
                    self.counts.push(0);
                }
                Some(last_slot) => {
                    let distance = self.sum_below(now - 1) - self.sum_below(last_slot as usize);
                    self.counts[distance as usize] += 1;
                    self.add(last_slot as usize, u32::MAX);
                }
            }
            self.add(now, 1);
        }
    }

    fn add(&mut self, mut slot: usize, change: u32) {
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
        let mut live: Vec<(u32, u64)> = self
            .last
            .iter()
            .map(|(&line, &slot)| (slot, line))
            .collect();
        live.sort_unstable();
        self.next = live.len() + 1;
        self.tree = vec![0; (live.len() * 4).max(1 << 16)];
        for (slot, (_, line)) in (1..).zip(live) {
            self.last.insert(line, slot);
        }
        // All slots up to the last line's contain one: each node adds itself to its parent.
        let (filled, len) = (self.next, self.tree.len());
        self.tree[1..filled].fill(1);
        for slot in 1..len {
            let parent = slot + (slot & slot.wrapping_neg());
            if parent < len {
                self.tree[parent] += self.tree[slot];
            }
        }
    }

    pub fn finish(self) -> DistanceHistogram {
        DistanceHistogram::new(self.cold, (0..).zip(self.counts))
    }
}
