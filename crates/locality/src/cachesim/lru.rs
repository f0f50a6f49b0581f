//! Least-recently-used replacement: each set is a list in order of last touch.

use super::index::{BATCH, SetIndex, SetTagBatch};
use crate::simd::{Lanes, Simd, U32x16, dispatch, prefetch};

/// Number of tags that fit into one vector.
const LANES: usize = 16;
/// Number of sets above which the simulator prefetches them, because they no longer fit into the host core's own cache.
const PREFETCH_SETS: usize = 1 << 14;

#[derive(Debug)]
pub(super) struct Lru {
    simd: Simd,
    ways: usize,
    lists: Lists,
    /// Number of hits at each stack position; one entry for each way or lane, whichever are more.
    hits: Vec<u64>,
}

#[derive(Debug)]
enum Lists {
    /// Tag + 1 in 32 bits, or 0 for a free way. Lanes from `ways` on hold evicted tags and are never read.
    Narrow(Vec<U32x16>),
    /// 64-bit tags, `ways` to a set, and the number of valid tags in each set.
    Wide { tags: Vec<u64>, filled: Vec<u32> },
}

impl Lru {
    pub(super) fn new(sets: usize, ways: usize, simd: Simd) -> Self {
        let lists = if ways <= LANES {
            Lists::Narrow(vec![U32x16([0; LANES]); sets])
        } else {
            Lists::Wide { tags: vec![0; sets * ways], filled: vec![0; sets] }
        };
        Lru { simd, ways, lists, hits: vec![0; ways.max(LANES)] }
    }

    /// Returns the hits by stack position, starting with the most recently used.
    pub(super) fn hits(&self) -> Vec<u64> {
        self.hits[..self.ways].to_vec()
    }

    pub(super) fn run(&mut self, index: &SetIndex, lines: &[u64], on_miss: &mut impl FnMut(u64)) -> u64 {
        let mut misses = 0;
        for batch in lines.chunks(BATCH) {
            let mut missed = [false; BATCH];
            let missed = &mut missed[..batch.len()];
            misses += self.narrow_batch(index, batch, missed).unwrap_or_else(|| self.wide_batch(index, batch, missed));
            batch.iter().zip(missed).filter(|(_, missed)| **missed).for_each(|(&line, _)| on_miss(line));
        }
        misses
    }

    /// Simulates a batch with 32-bit tags. Returns the number of misses, or `None` if a tag of this batch needs 64
    /// bits.
    fn narrow_batch(&mut self, index: &SetIndex, batch: &[u64], missed: &mut [bool]) -> Option<u64> {
        let Lists::Narrow(sets) = &mut self.lists else { return None };
        let (simd, ways, hits) = (self.simd, ((1u32 << self.ways) - 1), &mut self.hits);
        dispatch!(simd, run_narrow_sets(
            sets: &mut [U32x16], ways: u32, hits: &mut [u64], index: &SetIndex, batch: &[u64], missed: &mut [bool]
        ) -> Option<u64>)
    }

    fn wide_batch(&mut self, index: &SetIndex, batch: &[u64], missed: &mut [bool]) -> u64 {
        self.widen();
        let Lists::Wide { tags, filled } = &mut self.lists else { unreachable!("widened") };
        let mut places = SetTagBatch::new();
        index.compute_places(batch, &mut places);
        run_wide_sets(tags, filled, self.ways, &mut self.hits, &places, missed)
    }

    /// Converts the cache from 32-bit to 64-bit tags.
    #[cold]
    fn widen(&mut self) {
        if let Lists::Narrow(sets) = &self.lists {
            let filled_ways = |set: &U32x16| set.0[..self.ways].iter().filter(|&&way| way != 0).count() as u32;
            let filled = sets.iter().map(filled_ways).collect();
            let ways = sets.iter().flat_map(|set| &set.0[..self.ways]);
            self.lists = Lists::Wide { tags: ways.map(|&way| u64::from(way.wrapping_sub(1))).collect(), filled };
        }
    }
}

#[inline(always)]
unsafe fn run_narrow_sets<L: Lanes>(
    sets: &mut [U32x16],
    ways: u32,
    hits: &mut [u64],
    index: &SetIndex,
    lines: &[u64],
    missed: &mut [bool],
) -> Option<u64> {
    let mut places = SetTagBatch::new();
    if index.compute_places(lines, &mut places) >= u64::from(u32::MAX) {
        return None;
    }
    let mut tags = [0; BATCH];
    for (narrow, &tag) in tags.iter_mut().zip(&places.tags) {
        *narrow = tag as u32 + 1;
    }
    if sets.len() > PREFETCH_SETS {
        for &set in &places.sets[..lines.len()] {
            prefetch(sets.as_ptr().wrapping_add(set as usize));
        }
    }
    // SAFETY: the caller guarantees that the processor has `L`.
    let counts = unsafe {
        let mut counts = L::empty_hits();
        for ((&set, tag), missed) in places.sets.iter().zip(&tags).zip(missed) {
            *missed = !L::move_to_front(&mut sets[set as usize], tag, ways, &mut counts);
        }
        L::count_by_lane(counts)
    };
    hits.iter_mut().zip(counts).for_each(|(hits, count)| *hits += u64::from(count));
    Some(lines.len() as u64 - u64::from(counts.iter().sum::<u32>()))
}

fn run_wide_sets(
    tags: &mut [u64],
    filled: &mut [u32],
    ways: usize,
    hits: &mut [u64],
    places: &SetTagBatch,
    missed: &mut [bool],
) -> u64 {
    let mut misses = 0;
    for ((&set, &tag), missed) in places.sets.iter().zip(&places.tags).zip(missed) {
        let set = set as usize;
        let list = &mut tags[set * ways..][..ways];
        let filled_ways = filled[set] as usize;
        let hit_position = list[..filled_ways].iter().position(|&way| way == tag);
        let last = hit_position.unwrap_or(filled_ways.min(ways - 1));
        list.copy_within(..last, 1);
        list[0] = tag;
        *missed = hit_position.is_none();
        match hit_position {
            Some(position) => hits[position] += 1,
            None => {
                misses += 1;
                filled[set] = (filled_ways + 1).min(ways) as u32;
            }
        }
    }
    misses
}
