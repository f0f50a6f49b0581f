//! shMaps, which detect threads that touch the same data (thesis 3.4.2, 3.4.3).
//!
//! Problem: threads that share data across chips are to be found from a few sampled remote-cache accesses, with little
//! memory. Method: each thread has 256 saturating 8-bit counters, one per hashed region of 128 bytes. One filter per
//! process makes hash collisions harmless: an entry belongs permanently to the first region that reaches it, and
//! accesses to any other region of the same entry are discarded. A thread may claim at most 1 / (number of threads) of
//! the entries, so that none starves the others. The similarity of two threads is the dot product of their counters.
//! Counters below a floor count as 0, and entries that more than half of the threads touch (globally shared data) are
//! left out.
//!
//! The thesis leaves open whether the floor applies before or after the test for global sharing, so both are
//! implemented.

use std::collections::BTreeMap;

use cachemate_core::{ShMapParameters, TaskId};

/// The shMaps of one process.
#[derive(Clone, Debug)]
pub struct ShMaps {
    parameters: ShMapParameters,
    /// Region that owns each entry; `None` if the entry is unclaimed.
    filter: Vec<Option<u64>>,
    claim_counts: BTreeMap<TaskId, usize>,
    counters: BTreeMap<TaskId, Vec<u8>>,
}

impl ShMaps {
    /// Builds empty maps. A parameter of 0 entries or bytes counts as 1.
    pub fn new(parameters: ShMapParameters) -> Self {
        let parameters = ShMapParameters {
            entries: parameters.entries.max(1),
            region_bytes: parameters.region_bytes.max(1),
        };
        ShMaps {
            parameters,
            filter: vec![None; parameters.entries],
            claim_counts: BTreeMap::new(),
            counters: BTreeMap::new(),
        }
    }

    /// Adds a sampled remote access by one of `threads` threads of the process. Returns whether it passed the filter.
    pub fn touch(&mut self, thread: TaskId, address: u64, threads: usize) -> bool {
        let region = address / self.parameters.region_bytes;
        let entries = self.parameters.entries;
        // The high bits of a multiplicative hash spread neighboring regions over all entries.
        let region_hash = region.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let entry = ((region_hash * entries as u64) >> 32) as usize;
        match self.filter[entry] {
            Some(owner) if owner != region => return false,
            Some(_) => {}
            None => {
                let claimed_entries = self.claim_counts.entry(thread).or_insert(0);
                if *claimed_entries >= (entries / threads.max(1)).max(1) {
                    return false;
                }
                *claimed_entries += 1;
                self.filter[entry] = Some(region);
            }
        }
        let counters = self
            .counters
            .entry(thread)
            .or_insert_with(|| vec![0; entries]);
        counters[entry] = counters[entry].saturating_add(1);
        true
    }

    /// A thread's counters by entry; `None` if none of its accesses passed the filter.
    pub fn map_of(&self, thread: TaskId) -> Option<&[u8]> {
        self.counters.get(&thread).map(Vec::as_slice)
    }

    /// Removes an exited thread. Its filter entries remain, because they belong to regions rather than threads.
    pub fn remove(&mut self, thread: TaskId) {
        self.counters.remove(&thread);
        self.claim_counts.remove(&thread);
    }

    /// Clears filter and counters, as after each round of clustering.
    pub fn clear(&mut self) {
        *self = Self::new(self.parameters);
    }
}

/// Criteria by which counters count as sharing between threads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharingCriteria {
    /// Counters below this value count as 0.
    pub floor: u8,
    /// Entries that more than this share of the threads touch are global.
    pub global_share: f64,
    /// Whether the floor applies before the test for global sharing.
    pub applies_floor_first: bool,
}

impl Default for SharingCriteria {
    fn default() -> Self {
        SharingCriteria {
            floor: 3,
            global_share: 0.5,
            applies_floor_first: true,
        }
    }
}

/// Number of threads that touch each entry, which is the thesis's histogram vector.
pub fn count_sharers(maps: &[&[u8]], sharing: &SharingCriteria) -> Vec<usize> {
    let min_counter = if sharing.applies_floor_first {
        sharing.floor.max(1)
    } else {
        1
    };
    let entries = maps.iter().map(|map| map.len()).max().unwrap_or(0);
    let count_threads = |entry: usize| {
        maps.iter()
            .filter(|map| map.get(entry).is_some_and(|&c| c >= min_counter))
            .count()
    };
    (0..entries).map(count_threads).collect()
}

/// An entry is global if *more than* the global share of the threads touch it. With "at least half", two equal halves
/// that share nothing would look global.
pub fn global_entries(maps: &[&[u8]], sharing: &SharingCriteria) -> Vec<bool> {
    let limit = sharing.global_share * maps.len() as f64;
    count_sharers(maps, sharing)
        .into_iter()
        .map(|threads| threads as f64 > limit)
        .collect()
}

/// Dot product of two shMaps (equation 3.1) over entries that are not global, with counters below the floor as 0.
pub fn similarity(a: &[u8], b: &[u8], is_global: &[bool], floor: u8) -> u64 {
    let value_above_floor = |counter: u8| {
        if counter >= floor {
            u64::from(counter)
        } else {
            0
        }
    };
    let is_local = |entry: &usize| !is_global.get(*entry).copied().unwrap_or(false);
    (0..a.len().min(b.len()))
        .filter(is_local)
        .map(|entry| value_above_floor(a[entry]) * value_above_floor(b[entry]))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const THREADS: usize = 4;

    /// Do counters saturate, and does an entry stay with the first region that claims it?
    #[test]
    fn an_entry_belongs_to_its_first_region_and_counters_saturate() {
        let mut maps = ShMaps::new(ShMapParameters {
            entries: 1,
            region_bytes: 128,
        });
        assert!(maps.touch(TaskId(0), 1000, THREADS));
        assert!(!maps.touch(TaskId(1), 5000, THREADS));
        assert!(maps.touch(TaskId(1), 1023, THREADS));
        (0..300).for_each(|_| assert!(maps.touch(TaskId(0), 1000, THREADS)));
        assert_eq!(
            (maps.map_of(TaskId(0)), maps.map_of(TaskId(1))),
            (Some(&[255][..]), Some(&[1][..]))
        );
    }

    /// Is a greedy thread limited to its share of the filter?
    #[test]
    fn a_thread_claims_at_most_its_share_of_the_filter() {
        let mut maps = ShMaps::new(ShMapParameters::default());
        (0..100_000).for_each(|region| {
            maps.touch(TaskId(0), region * 128, THREADS);
        });
        let claimed = maps
            .map_of(TaskId(0))
            .unwrap()
            .iter()
            .filter(|&&counter| counter > 0)
            .count();
        assert_eq!(claimed, 256 / THREADS);
        assert!((0..100_000).any(|region| maps.touch(
            TaskId(1),
            (1 << 40) | (region * 128),
            THREADS
        )));
    }

    /// Are threads similar within a group and dissimilar across groups, if globally shared data is left out?
    #[test]
    fn groups_are_similar_within_and_not_across() {
        let mut maps = ShMaps::new(ShMapParameters::default());
        for round in 0..200u64 {
            for thread in 0..4u32 {
                let group = u64::from(thread / 2);
                maps.touch(
                    TaskId(thread),
                    (1 << 30) * (1 + group) + round % 4 * 128,
                    THREADS,
                );
                maps.touch(TaskId(thread), 1 << 40, THREADS);
            }
        }
        let thread_maps: Vec<&[u8]> = (0..4)
            .map(|thread| maps.map_of(TaskId(thread)).unwrap())
            .collect();
        let sharing = SharingCriteria::default();
        let global = global_entries(&thread_maps, &sharing);
        assert_eq!(global.iter().filter(|&&global| global).count(), 1);
        let similarity_of =
            |a: usize, b: usize| similarity(thread_maps[a], thread_maps[b], &global, sharing.floor);
        assert_eq!(
            (similarity_of(0, 1), similarity_of(2, 3)),
            (4 * 50 * 50, 4 * 50 * 50)
        );
        assert_eq!((similarity_of(0, 2), similarity_of(1, 3)), (0, 0));
    }

    /// Is data shared by exactly half of the threads local, and data shared by more than half global?
    #[test]
    fn data_shared_by_exactly_half_of_the_threads_is_local() {
        let maps: [&[u8]; 4] = [&[9, 9, 2], &[9, 9, 2], &[0, 9, 2], &[0, 0, 0]];
        let sharing = SharingCriteria::default();
        assert_eq!(global_entries(&maps, &sharing), [false, true, false]);
        let floor_after = SharingCriteria {
            applies_floor_first: false,
            ..sharing
        };
        assert_eq!(global_entries(&maps, &floor_after), [false, true, true]);
    }

    proptest! {
        /// Is similarity symmetric, and does it ignore counters below the floor?
        #[test]
        fn similarity_is_symmetric_and_has_a_floor(a in prop::collection::vec(any::<u8>(), 8), b in prop::collection::vec(any::<u8>(), 8)) {
            prop_assert_eq!(similarity(&a, &b, &[], 3), similarity(&b, &a, &[], 3));
            let floored: Vec<u8> = a.iter().map(|&c| if c < 3 { 0 } else { c }).collect();
            prop_assert_eq!(similarity(&a, &b, &[], 3), similarity(&floored, &b, &[], 3));
        }
    }
}
