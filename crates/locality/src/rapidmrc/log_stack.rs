//! LRU stack distances of one short log, one for every entry.
//!
//! Problem: the engine of [`crate::stack`] answers with one histogram of a stream of any length; a log is short, all there
//! at once, and each entry's own distance is wanted. Method: the entry that a line was last seen in is dead from its
//! next touch on; the distance is the entries in between less the dead ones among them. Dead entries are bits in
//! words, words are in groups of 32, groups in blocks of 32: each word, group and block knows how many died before it
//! within the next larger one, so that a question is three sums and an answer two vector additions without a branch.
//! Properties: exact, no bound on the depth, time in proportion to the log.

use crate::hash::mix;
use crate::simd::prefetch;

/// Distance of an entry whose line is not in the log before it.
pub const FIRST: u32 = u32::MAX;

const WORD: usize = 64;
const FAN: usize = 32;
/// Lines are looked for so many entries ahead, so that the misses of the host's cache overlap.
const AHEAD: usize = 16;

/// Distinct other lines since each entry's line was last in the log; [`FIRST`] where it was not. Logs of 2^32 entries and
/// more are cut.
pub fn log_distances(lines: &[u64]) -> Vec<u32> {
    let lines = &lines[..lines.len().min(u32::MAX as usize - 1)];
    let mut latest = Latest::new(lines.len());
    let mut dead = Dead::new(lines.len());
    let distance = |(at, &line): (usize, &u64)| {
        if let Some(&soon) = lines.get(at + AHEAD) {
            latest.prefetch(soon);
        }
        let Some(before) = latest.replace(line, at) else { return FIRST };
        let behind = dead.all - dead.until(before);
        dead.add(before);
        (at - before - 1) as u32 - behind
    };
    lines.iter().enumerate().map(distance).collect()
}

/// Where each line was last seen: open addressing, at most four fifths full; entries plus one, 0 = free.
struct Latest {
    lines: Vec<u64>,
    entries: Vec<u32>,
    shift: u32,
}

impl Latest {
    fn new(entries: usize) -> Self {
        let cells = (entries + entries / 4 + 2).next_power_of_two();
        Latest { lines: vec![0; cells], entries: vec![0; cells], shift: 64 - cells.trailing_zeros() }
    }

    fn prefetch(&self, line: u64) {
        let cell = (mix(line) >> self.shift) as usize;
        prefetch(self.lines.as_ptr().wrapping_add(cell));
        prefetch(self.entries.as_ptr().wrapping_add(cell));
    }

    fn replace(&mut self, line: u64, at: usize) -> Option<usize> {
        let mask = self.entries.len() - 1;
        let mut cell = (mix(line) >> self.shift) as usize & mask;
        loop {
            let found = self.entries[cell];
            if found == 0 || self.lines[cell] == line {
                self.lines[cell] = line;
                self.entries[cell] = at as u32 + 1;
                return (found > 0).then(|| found as usize - 1);
            }
            cell = (cell + 1) & mask;
        }
    }
}

/// Which entries are dead, and how many of its group, block or log died before each word, group or block.
struct Dead {
    bits: Vec<u64>,
    before_word: Vec<[u16; FAN]>,
    before_group: Vec<[u32; FAN]>,
    before_block: Vec<u32>,
    all: u32,
}

impl Dead {
    fn new(entries: usize) -> Self {
        let blocks = entries / (WORD * FAN * FAN) + 1;
        Dead {
            bits: vec![0; blocks * FAN * FAN],
            before_word: vec![[0; FAN]; blocks * FAN],
            before_group: vec![[0; FAN]; blocks],
            before_block: vec![0; blocks],
            all: 0,
        }
    }

    /// Dead ones up to `entry`, which is alive itself.
    fn until(&self, entry: usize) -> u32 {
        let word = entry / WORD;
        let (group, block) = (word / FAN, word / FAN / FAN);
        let within = self.bits[word] & ((1 << (entry % WORD)) - 1);
        let words = u32::from(self.before_word[group][word % FAN]);
        self.before_block[block] + self.before_group[block][group % FAN] + words + within.count_ones()
    }

    fn add(&mut self, entry: usize) {
        let word = entry / WORD;
        let (group, block) = (word / FAN, word / FAN / FAN);
        self.bits[word] |= 1 << (entry % WORD);
        self.all += 1;
        for (nth, before) in self.before_word[group].iter_mut().enumerate() {
            *before += u16::from(nth > word % FAN);
        }
        for (nth, before) in self.before_group[block].iter_mut().enumerate() {
            *before += u32::from(nth > group % FAN);
        }
        self.before_block[block + 1..].iter_mut().for_each(|before| *before += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reuse::SplitMix64;
    use proptest::prelude::*;

    fn plainest(lines: &[u64]) -> Vec<u32> {
        let mut stack: Vec<u64> = Vec::new();
        let distance = |&line: &u64| {
            let depth = stack.iter().rev().position(|&held| held == line);
            depth.map(|depth| stack.remove(stack.len() - 1 - depth));
            stack.push(line);
            depth.map_or(FIRST, |depth| depth as u32)
        };
        lines.iter().map(distance).collect()
    }

    proptest! {
        /// Is every entry's distance the depth in a plain LRU stack, within and across the counters' groups?
        #[test]
        fn distances_are_depths_in_a_stack(seed in any::<u64>(), spread in 1u64..400, entries in 0usize..6000) {
            let mut random = SplitMix64(seed);
            let lines: Vec<u64> = (0..entries).map(|_| random.below(spread)).collect();
            prop_assert_eq!(log_distances(&lines), plainest(&lines));
        }
    }

    /// Are the counters right where reuses span groups and blocks, and where groups pass without any touch of an old line?
    #[test]
    fn long_reuses_cross_groups() {
        let sweep: Vec<u64> = (0..9000).chain(0..9000).chain(20_000..27_000).chain((0..9000).rev()).collect();
        let found = log_distances(&sweep);
        assert!(found[..9000].iter().all(|&distance| distance == FIRST));
        assert!(found[9000..18_000].iter().all(|&distance| distance == 8999));
        let back: Vec<u32> = (0..9000).map(|at| 7000 + at).collect();
        assert_eq!(found[25_000..], back);
        let far: Vec<u64> = (0..70_000).chain(0..70_000).collect();
        assert!(log_distances(&far)[70_000..].iter().all(|&distance| distance == 69_999));
    }
}
