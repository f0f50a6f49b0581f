//! Least-recently-used replacement: each set is a list in order of last touch.

use super::index::{BATCH_LINES, SetIndex, SetTagBatch};
use crate::simd::{Lanes, Simd, U32x16, dispatch, prefetch};

/// Number of tags that fit into one vector.
const LANES: usize = 16;
/// Number of sets above which the simulator prefetches them, because they no longer fit into the host core's own cache.
const MAX_SETS_WITHOUT_PREFETCH: usize = 1 << 14;

#[derive(Debug)]
pub(super) struct Lru {
    simd: Simd,
    ways: usize,
    tag_lists: TagLists,
    /// Number of hits at each stack position; one entry for each way or lane, whichever are more.
    hits: Vec<u64>,
}

#[derive(Debug)]
enum TagLists {
    /// Tag + 1 in 32 bits, or 0 for a free way. Lanes from `ways` on hold evicted tags and are never read.
    Narrow(Vec<U32x16>),
    /// 64-bit tags, `ways` to a set, and the number of valid tags in each set.
    Wide {
        tags: Vec<u64>,
        filled_counts: Vec<u32>,
    },
}

impl Lru {
    pub(super) fn new(sets: usize, ways: usize, simd: Simd) -> Self {
        let tag_lists = if ways <= LANES {
            TagLists::Narrow(vec![U32x16([0; LANES]); sets])
        } else {
            TagLists::Wide {
                tags: vec![0; sets * ways],
                filled_counts: vec![0; sets],
            }
        };
        Lru {
            simd,
            ways,
            tag_lists,
            hits: vec![0; ways.max(LANES)],
        }
    }

    /// By stack position, the most recently used first.
    pub(super) fn hits(&self) -> Vec<u64> {
        self.hits[..self.ways].to_vec()
    }

    /// Only sets that take memory.
    #[cfg(test)]
    pub(super) fn set_count(&self) -> usize {
        match &self.tag_lists {
            TagLists::Narrow(sets) => sets.len(),
            TagLists::Wide { filled_counts, .. } => filled_counts.len(),
        }
    }

    pub(super) fn simulate(
        &mut self,
        index: &SetIndex,
        lines: &[u64],
        on_miss: &mut impl FnMut(u64),
    ) -> u64 {
        let mut misses = 0;
        for batch in lines.chunks(BATCH_LINES) {
            let mut is_miss = [false; BATCH_LINES];
            let miss_flags = &mut is_miss[..batch.len()];
            misses += self
                .simulate_narrow_batch(index, batch, miss_flags)
                .unwrap_or_else(|| self.simulate_wide_batch(index, batch, miss_flags));
            batch
                .iter()
                .zip(miss_flags)
                .filter(|(_, missed)| **missed)
                .for_each(|(&line, _)| on_miss(line));
        }
        misses
    }

    /// Simulates a batch with 32-bit tags. Returns the number of misses, or `None` if a tag of this batch needs 64
    /// bits.
    fn simulate_narrow_batch(
        &mut self,
        index: &SetIndex,
        batch: &[u64],
        miss_flags: &mut [bool],
    ) -> Option<u64> {
        let TagLists::Narrow(sets) = &mut self.tag_lists else {
            return None;
        };
        let (simd, ways, hits) = (self.simd, ((1u32 << self.ways) - 1), &mut self.hits);
        dispatch!(simd, access_narrow_sets(
            sets: &mut [U32x16], ways: u32, hits: &mut [u64], index: &SetIndex, batch: &[u64], miss_flags: &mut [bool]
        ) -> Option<u64>)
    }

    fn simulate_wide_batch(
        &mut self,
        index: &SetIndex,
        batch: &[u64],
        miss_flags: &mut [bool],
    ) -> u64 {
        self.widen();
        let TagLists::Wide {
            tags,
            filled_counts: filled_ways_by_set,
        } = &mut self.tag_lists
        else {
            unreachable!("widened")
        };
        let mut sets_and_tags = SetTagBatch::new();
        index.compute_sets_and_tags(batch, &mut sets_and_tags);
        access_wide_sets(
            tags,
            filled_ways_by_set,
            self.ways,
            &mut self.hits,
            &sets_and_tags,
            miss_flags,
        )
    }

    /// Converts the cache from 32-bit to 64-bit tags.
    #[cold]
    fn widen(&mut self) {
        if let TagLists::Narrow(sets) = &self.tag_lists {
            let count_filled_ways =
                |set: &U32x16| set.0[..self.ways].iter().filter(|&&way| way != 0).count() as u32;
            let filled = sets.iter().map(count_filled_ways).collect();
            let ways = sets.iter().flat_map(|set| &set.0[..self.ways]);
            self.tag_lists = TagLists::Wide {
                tags: ways.map(|&way| u64::from(way.wrapping_sub(1))).collect(),
                filled_counts: filled,
            };
        }
    }
}

#[inline(always)]
unsafe fn access_narrow_sets<L: Lanes>(
    sets: &mut [U32x16],
    ways: u32,
    hits: &mut [u64],
    index: &SetIndex,
    lines: &[u64],
    miss_flags: &mut [bool],
) -> Option<u64> {
    let mut sets_and_tags = SetTagBatch::new();
    if index.compute_sets_and_tags(lines, &mut sets_and_tags) >= u64::from(u32::MAX) {
        return None;
    }
    let mut tags = [0; BATCH_LINES];
    for (narrow_tag, &tag) in tags.iter_mut().zip(&sets_and_tags.tags) {
        *narrow_tag = tag as u32 + 1;
    }
    if sets.len() > MAX_SETS_WITHOUT_PREFETCH {
        for &set in &sets_and_tags.sets[..lines.len()] {
            prefetch(sets.as_ptr().wrapping_add(set as usize));
        }
    }
    // SAFETY: the caller guarantees that the processor has `L`.
    let counts = unsafe {
        let mut counts = L::empty_hits();
        for ((&set, tag), is_miss) in sets_and_tags.sets.iter().zip(&tags).zip(miss_flags) {
            *is_miss = !L::move_to_front(&mut sets[set as usize], tag, ways, &mut counts);
        }
        L::count_by_lane(counts)
    };
    hits.iter_mut()
        .zip(counts)
        .for_each(|(hits, count)| *hits += u64::from(count));
    Some(lines.len() as u64 - u64::from(counts.iter().sum::<u32>()))
}

fn access_wide_sets(
    tags: &mut [u64],
    filled_ways_by_set: &mut [u32],
    ways: usize,
    hits: &mut [u64],
    sets_and_tags: &SetTagBatch,
    miss_flags: &mut [bool],
) -> u64 {
    let mut misses = 0;
    for ((&set, &tag), is_miss) in sets_and_tags
        .sets
        .iter()
        .zip(&sets_and_tags.tags)
        .zip(miss_flags)
    {
        let set = set as usize;
        let list = &mut tags[set * ways..][..ways];
        let filled_ways = filled_ways_by_set[set] as usize;
        let hit_position = list[..filled_ways].iter().position(|&way| way == tag);
        let shifted_count = hit_position.unwrap_or(filled_ways.min(ways - 1));
        list.copy_within(..shifted_count, 1);
        list[0] = tag;
        *is_miss = hit_position.is_none();
        match hit_position {
            Some(position) => hits[position] += 1,
            None => {
                misses += 1;
                filled_ways_by_set[set] = (filled_ways + 1).min(ways) as u32;
            }
        }
    }
    misses
}
