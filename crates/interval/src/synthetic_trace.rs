//! Addresses with given LRU stack distances.
//!
//! Method: every access has a slot in time, and a bit marks the last use of its address. The `d`-th most recent address
//! is found by counting bits from the end: by regions, by blocks, by words. These counts stay in the host's L1 cache,
//! whereas a tree over all slots would miss at every step.

/// Distribution of accesses over the LRU stack.
pub struct DistanceDistribution {
    /// Upper bound of distances in lines, ascending, and the share of accesses at or below it.
    pub bounds: Vec<(f32, f32)>,
}

impl DistanceDistribution {
    /// Distance below which this share of all accesses falls, interpolated linearly between bounds;
    /// `None` if fewer accesses hit.
    pub fn value_at(&self, access_share: f64) -> Option<f64> {
        let next_index = self
            .bounds
            .partition_point(|&(_, share)| f64::from(share) <= access_share);
        let distance_bound = |&(lines, share): &(f32, f32)| (f64::from(lines), f64::from(share));
        let high = self.bounds.get(next_index).map(distance_bound)?;
        let low = if next_index == 0 {
            (0.0, 0.0)
        } else {
            distance_bound(&self.bounds[next_index - 1])
        };
        let fraction = (access_share - low.1) / (high.1 - low.1).max(1e-12);
        Some(low.0 + fraction * (high.0 - low.0))
    }
}

/// Words of 64 slots in a block and in a region.
const BLOCK_WORDS: usize = 8;
const REGION_WORDS: usize = 512;

/// Slots in order of time, with a bit for each slot that is the last use of its address.
struct LastUseBits {
    words: Vec<u64>,
    blocks: Vec<u32>,
    regions: Vec<u32>,
    slots: usize,
}

impl LastUseBits {
    /// Creates room for `slots` slots. The first `first_live` of them are last uses.
    fn new(slots: usize, first_live: usize) -> Self {
        let words = slots.div_ceil(64);
        let mut last_uses = LastUseBits {
            words: vec![0; words],
            blocks: vec![0; words.div_ceil(BLOCK_WORDS)],
            regions: vec![0; words.div_ceil(REGION_WORDS)],
            slots: 0,
        };
        (0..first_live).for_each(|_| last_uses.push());
        last_uses
    }

    fn change_counts(&mut self, slot: usize, change: i32) {
        for (counts, words) in [
            (&mut self.blocks, BLOCK_WORDS),
            (&mut self.regions, REGION_WORDS),
        ] {
            let count = &mut counts[slot / (64 * words)];
            *count = count.wrapping_add_signed(change);
        }
    }

    /// Appends a slot that is a last use.
    fn push(&mut self) {
        self.words[self.slots / 64] |= 1 << (self.slots % 64);
        self.change_counts(self.slots, 1);
        self.slots += 1;
    }

    /// Removes and returns the slot of the last use that has `nth` more recent ones. At least `nth` more recent ones
    /// must exist.
    fn remove_nth(&mut self, mut nth: u32) -> usize {
        // Returns the last position whose count, added to those behind it, exceeds `nth`; subtracts those behind it
        // from `nth`.
        let mut skip_back = |counts: &[u32]| {
            let stops_here = |count: &u32| {
                let is_skipped = nth >= *count;
                nth -= if is_skipped { *count } else { 0 };
                !is_skipped
            };
            counts.iter().rposition(stops_here).unwrap_or(0)
        };
        let region = skip_back(&self.regions);

        let children_of = |parent: usize, size: usize, total: usize| {
            parent * size..((parent + 1) * size).min(total)
        };
        let blocks = children_of(region, REGION_WORDS / BLOCK_WORDS, self.blocks.len());
        let block = blocks.start + skip_back(&self.blocks[blocks.clone()]);
        let words = children_of(block, BLOCK_WORDS, self.words.len());
        let mut counts = [0; BLOCK_WORDS];
        counts
            .iter_mut()
            .zip(&self.words[words.clone()])
            .for_each(|(count, word)| *count = word.count_ones());

        let word_index = words.start + skip_back(&counts[..words.len()]);
        let mut word = self.words[word_index];
        for _ in 0..nth {
            word &= !(1 << word.ilog2());
        }
        let slot = 64 * word_index + word.ilog2() as usize;
        self.words[word_index] &= !(1 << (slot % 64));
        self.change_counts(slot, -1);
        slot
    }
}

/// Line addresses whose LRU distances follow `distances`; beyond twice the capacity, every line is
/// new.
pub fn draw_addresses(
    distances: DistanceDistribution,
    entries: u32,
    capacity: f32,
    mut draw_uniform: impl FnMut() -> f64,
) -> Vec<u64> {
    let max_distance = (2.0 * capacity) as u32;
    // The stack starts full, so that distances beyond the accesses so far exist.
    let initial_lines = (capacity as u32).min(entries.max(1) * 4);
    let mut last_uses = LastUseBits::new(
        initial_lines as usize + entries as usize,
        initial_lines as usize,
    );
    // Half as wide as addresses, because lookups dominate the cost of a log.
    let mut line_of_slot: Vec<u32> = (0..initial_lines).collect();
    let (mut live_count, mut next_line) = (initial_lines, initial_lines);
    let mut addresses = Vec::with_capacity(entries as usize);
    for _ in 0..entries {
        let distance = distances.value_at(draw_uniform()).map(|lines| lines as u32);
        let line = match distance.filter(|distance| *distance < live_count.min(max_distance)) {
            Some(distance) => {
                live_count -= 1;
                line_of_slot[last_uses.remove_nth(distance)]
            }
            None => {
                next_line += 1;
                next_line - 1
            }
        };
        last_uses.push();
        live_count += 1;
        line_of_slot.push(line);
        addresses.push(u64::from(line));
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the removed slot that of a plain list, after any removals, over many regions?
    #[test]
    fn removed_slots_equal_those_of_a_plain_list() {
        let slots = 3 * 64 * REGION_WORDS;
        let mut live = LastUseBits::new(slots, slots / 2);
        let mut list: Vec<usize> = (0..slots / 2).collect();
        let mut state = 7u64;
        for step in 0..slots / 2 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // Mostly near the end, where regions fill and empty.
            let nth = (state >> 33) as usize % if step % 3 == 0 { list.len() } else { 100 };
            let expected = list.remove(list.len() - 1 - nth);
            assert_eq!(live.remove_nth(nth as u32), expected, "step {step}");
            live.push();
            list.push(slots / 2 + step);
        }
    }

    /// Does a plain LRU list measure the distances from which the addresses were generated?
    #[test]
    fn a_plain_lru_list_measures_the_generated_distances() {
        let distances = DistanceDistribution {
            bounds: vec![(100.0, 0.5), (400.0, 0.8)],
        };
        let mut state = 1u64;
        let uniform = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let trace = draw_addresses(distances, 20_000, 1000.0, uniform);
        let (mut stack, mut near, mut far, mut missed) = (Vec::<u64>::new(), 0, 0, 0);
        for line in trace {
            match stack.iter().rposition(|other| *other == line) {
                Some(at) => {
                    let distance = stack.len() - 1 - at;
                    if distance < 100 {
                        near += 1
                    } else {
                        far += 1
                    }
                    assert!(distance < 400, "{distance}");
                    stack.remove(at);
                }
                None => missed += 1,
            }
            stack.push(line);
        }

        // The list starts empty, so its first accesses miss lines that the stack already held.
        assert!(
            (f64::from(near) / 20_000.0 - 0.5).abs() < 0.02,
            "{near} {far} {missed}"
        );
        assert!(
            (f64::from(far) / 20_000.0 - 0.3).abs() < 0.03,
            "{near} {far} {missed}"
        );
    }
}
