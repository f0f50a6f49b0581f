//! Random and tree-PLRU replacement, under which a line stays in its way until it is evicted.

use super::index::{BATCH_LINES, SetIndex, SetTagBatch};
use cachemate_core::SplitMix64;

/// The lines in each way of each set; ways from `filled_counts` on are free.
#[derive(Debug)]
struct WayStore {
    ways: usize,
    tags: Vec<u64>,
    filled_counts: Vec<u32>,
}

impl WayStore {
    fn new(sets: usize, ways: usize) -> Self {
        WayStore {
            ways,
            tags: vec![0; sets * ways],
            filled_counts: vec![0; sets],
        }
    }

    /// Touches a line, and returns its way and whether it hit. On a miss, the line goes to the lowest free way, or to
    /// the way that `victim` returns if the set is full.
    #[inline(always)]
    fn touch(&mut self, set: usize, tag: u64, victim: impl FnOnce() -> usize) -> (usize, bool) {
        let filled_ways = self.filled_counts[set] as usize;
        let tags = &mut self.tags[set * self.ways..][..self.ways];
        if let Some(way) = tags[..filled_ways].iter().position(|&way| way == tag) {
            return (way, true);
        }
        let way = if filled_ways < self.ways {
            self.filled_counts[set] += 1;
            filled_ways
        } else {
            victim()
        };
        tags[way] = tag;
        (way, false)
    }
}

/// Calls `touch` with the set and the tag of every line, and returns the number of misses. `touch` returns whether the
/// line hit.
#[inline(always)]
fn access_each(
    index: &SetIndex,
    lines: &[u64],
    on_miss: &mut impl FnMut(u64),
    mut touch: impl FnMut(usize, u64) -> bool,
) -> u64 {
    let mut sets_and_tags = SetTagBatch::new();
    let mut misses = 0;
    for batch in lines.chunks(BATCH_LINES) {
        index.compute_sets_and_tags(batch, &mut sets_and_tags);
        for (position, &line) in batch.iter().enumerate() {
            if !touch(
                sets_and_tags.sets[position] as usize,
                sets_and_tags.tags[position],
            ) {
                misses += 1;
                on_miss(line);
            }
        }
    }
    misses
}

#[derive(Debug)]
pub(super) struct RandomReplacement {
    way_store: WayStore,
    generator: SplitMix64,
}

impl RandomReplacement {
    pub(super) fn new(sets: usize, ways: usize, seed: u64) -> Self {
        RandomReplacement {
            way_store: WayStore::new(sets, ways),
            generator: SplitMix64::new(seed),
        }
    }

    pub(super) fn run(
        &mut self,
        index: &SetIndex,
        lines: &[u64],
        on_miss: &mut impl FnMut(u64),
    ) -> u64 {
        let RandomReplacement {
            way_store: ways,
            generator: random,
        } = self;
        let way_count = ways.ways as u64;
        access_each(index, lines, on_miss, |set, tag| {
            ways.touch(set, tag, || random.draw_below(way_count) as usize)
                .1
        })
    }
}

#[derive(Debug)]
pub(super) struct TreePlru {
    way_store: WayStore,
    /// One tree per set. Bit n is node n; the root is node 1, and node n has the children 2n and 2n + 1. A set bit
    /// means that the upper half was used less recently.
    trees: Vec<u64>,
}

impl TreePlru {
    pub(super) fn new(sets: usize, ways: usize) -> Self {
        TreePlru {
            way_store: WayStore::new(sets, ways),
            trees: vec![0; sets],
        }
    }

    pub(super) fn run(
        &mut self,
        index: &SetIndex,
        lines: &[u64],
        on_miss: &mut impl FnMut(u64),
    ) -> u64 {
        let TreePlru {
            way_store: ways,
            trees,
        } = self;
        let way_count = ways.ways;
        access_each(index, lines, on_miss, |set, tag| {
            let tree = &mut trees[set];
            let (way, hit) = ways.touch(set, tag, || victim_way(*tree, way_count));
            *tree = point_path_away(*tree, way, way_count);
            hit
        })
    }
}

/// The next victim is the way to which the bits of the tree lead.
fn victim_way(tree: u64, ways: usize) -> usize {
    let mut node = 1;
    while node < ways {
        node = node * 2 + (tree >> node & 1) as usize;
    }
    node - ways
}

/// After an access to `way`, every node on the path to `way` points to the other half.
fn point_path_away(mut tree: u64, way: usize, ways: usize) -> u64 {
    let mut node = way + ways;
    while node > 1 {
        let is_upper_half = (node & 1) as u64;
        node /= 2;
        tree = tree & !(1 << node) | (1 - is_upper_half) << node;
    }
    tree
}
