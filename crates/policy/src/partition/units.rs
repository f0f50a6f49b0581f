//! Assignment of units to groups whose numbers of units are given.
//!
//! Problem: the sizes determine how many colors or ways each group gets. The choice of units determines how many pages
//! have to be copied (CP 4.6.5: 11 051 cycles a page), whether hardware accepts the mask (contiguous ways), and whether
//! contiguous page requests can be met (CP 4.4.1: adjacent colors). Method: a group keeps its units as far as possible,
//! and takes adjacent ones first; contiguous masks are laid out side by side in the present order of the groups.
//! Properties: every group gets its number of units, no unit is assigned twice, and if sizes stay the same, nothing
//! moves.

use cachemate_core::{CacheId, IndexSet, PartitionSupport, View};

/// The units into which a cache can be partitioned, and the cost of a change.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum PartitionUnits {
    /// Page colors: the groups of cache sets to which a page can map.
    Colors {
        /// Number of colors of the cache.
        units: u32,
        /// Size of a page.
        page_bytes: u64,
        /// Time to copy one page.
        move_page_ns: f64,
    },
    /// Ways, assigned by the hardware's masks.
    Ways {
        /// Number of ways of the cache.
        units: u32,
        /// Smallest number of ways of a group.
        min_units: u32,
        /// Whether a group's ways must be contiguous.
        contiguous: bool,
        /// Number of groups that the hardware distinguishes, including that of ungrouped processes.
        max_groups: u32,
    },
}

impl PartitionUnits {
    /// Returns the units to use: ways before colors, because ways need no copying.
    pub fn common_units<'a>(partitions: impl Iterator<Item = &'a PartitionSupport>) -> Option<Self> {
        let divided = partitions.map(|partition| match *partition {
            PartitionSupport::Colors { colors, page_bytes, page_migration_ns: move_page_ns } => {
                PartitionUnits::Colors { units: colors, page_bytes, move_page_ns }
            }
            PartitionSupport::Ways { ways, min_ways: min_units, contiguous, max_groups } => {
                PartitionUnits::Ways { units: ways, min_units, contiguous, max_groups }
            }
        });
        divided.reduce(|a, b| if matches!(a, PartitionUnits::Ways { .. }) { a } else { b })
    }
    /// Number of units of the whole cache.
    pub fn units(&self) -> u32 {
        match *self {
            PartitionUnits::Colors { units, .. } | PartitionUnits::Ways { units, .. } => units,
        }
    }
    /// Smallest number of units of a group.
    pub fn min_units(&self) -> u32 {
        match *self {
            PartitionUnits::Colors { .. } => 1,
            PartitionUnits::Ways { min_units, .. } => min_units.max(1),
        }
    }
    /// Largest number of groups, besides the class of service of ungrouped processes.
    pub fn max_groups(&self) -> u32 {
        match *self {
            PartitionUnits::Colors { units, .. } => units,
            PartitionUnits::Ways { units, max_groups, .. } => max_groups.saturating_sub(1).min(units),
        }
    }
    fn contiguous(&self) -> bool {
        matches!(self, PartitionUnits::Ways { contiguous: true, .. })
    }
}

/// Returns the units of each group. `held` are the present units (empty if there are none yet), and `sizes` are the new
/// numbers, which add up to at most the cache's units.
pub fn assign(held: &[IndexSet], sizes: &[u32], divided: &PartitionUnits) -> Vec<IndexSet> {
    debug_assert!(held.len() == sizes.len() && sizes.iter().sum::<u32>() <= divided.units());
    if divided.contiguous() {
        assign_side_by_side(held, sizes)
    } else {
        assign_keeping_held(held, sizes, divided.units())
    }
}

fn assign_side_by_side(held: &[IndexSet], sizes: &[u32]) -> Vec<IndexSet> {
    let mut order: Vec<usize> = (0..held.len()).collect();
    // Newcomers come after the others.
    order.sort_by_key(|&group| held[group].first().unwrap_or(u32::MAX));
    let mut assigned = vec![IndexSet::default(); held.len()];
    let mut next = 0;
    for group in order {
        assigned[group] = (next..next + sizes[group]).collect();
        next += sizes[group];
    }
    assigned
}

fn assign_keeping_held(held: &[IndexSet], wanted: &[u32], units: u32) -> Vec<IndexSet> {
    let mut free: IndexSet = (0..units).collect();
    let mut assigned: Vec<IndexSet> = Vec::with_capacity(held.len());
    for (held, &wanted) in held.iter().zip(wanted) {
        let retained: IndexSet = held.iter().filter(|&unit| free.contains(unit)).take(wanted as usize).collect();
        retained.iter().for_each(|unit| free.remove(unit));
        assigned.push(retained);
    }
    for (given, &wanted) in assigned.iter_mut().zip(wanted) {
        while given.count() < wanted {
            let is_adjacent = |unit: u32| given.contains(unit + 1) || (unit > 0 && given.contains(unit - 1));
            let Some(unit) = free.iter().find(|&unit| is_adjacent(unit)).or_else(|| free.first()) else { break };
            free.remove(unit);
            given.insert(unit);
        }
    }
    assigned
}

/// Returns the number of pages that a process must copy when its colors become `allowed`: all pages outside these
/// colors, and those that overfill a color when the process gets more colors (CP 4.4.2).
pub fn pages_to_move(pages_per_color: &[u64], allowed: &IndexSet) -> u64 {
    let resident: u64 = pages_per_color.iter().sum();
    let max_each = resident.div_ceil(u64::from(allowed.count().max(1)));
    let moved = |(color, &pages): (usize, &u64)| {
        if allowed.contains(color as u32) { pages.saturating_sub(max_each) } else { pages }
    };
    pages_per_color.iter().enumerate().map(moved).sum()
}

/// Returns the last-level caches that can be partitioned, with their units. Colors apply to all caches of the level, so
/// only the first of these is returned.
pub fn dividable_caches(view: &View<'_>) -> Vec<(CacheId, PartitionUnits)> {
    let mut caches: Vec<(CacheId, PartitionUnits)> = Vec::new();
    for cache in view.topology.last_level_caches() {
        let partitions = view.capabilities.partitions.iter().filter(|(id, _)| *id == cache.id);
        let Some(divided) = PartitionUnits::common_units(partitions.map(|(_, partition)| partition)) else { continue };
        if !caches.iter().any(|(_, other)| {
            matches!((other, divided), (PartitionUnits::Colors { .. }, PartitionUnits::Colors { .. }))
        }) {
            caches.push((cache.id, divided));
        }
    }
    caches
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COLORS: PartitionUnits = PartitionUnits::Colors { units: 16, page_bytes: 4096, move_page_ns: 7368.0 };
    const WAYS: PartitionUnits = PartitionUnits::Ways { units: 16, min_units: 1, contiguous: true, max_groups: 8 };

    fn sets(of: &[&str]) -> Vec<IndexSet> {
        of.iter().map(|set| set.parse().unwrap()).collect()
    }
    fn shown(sets: &[IndexSet]) -> Vec<String> {
        sets.iter().map(IndexSet::to_string).collect()
    }

    /// Does a group keep its colors while other groups grow and shrink?
    #[test]
    fn colors_stay_where_they_can() {
        let first = assign(&sets(&["", "", ""]), &[8, 4, 4], &COLORS);
        assert_eq!(shown(&first), ["0-7", "8-11", "12-15"]);
        let then = assign(&first, &[4, 8, 4], &COLORS);
        assert_eq!(shown(&then), ["0-3", "4-11", "12-15"]);
    }

    /// Are masks contiguous if the hardware requires it?
    #[test]
    fn ways_are_laid_side_by_side() {
        let now = sets(&["8-15", "", "0-7"]);
        assert_eq!(shown(&assign(&now, &[6, 2, 8], &WAYS)), ["8-13", "14-15", "0-7"]);
    }

    /// Do shrinking and growing move pages by the paper's rule: all pages out of revoked colors, and a share of them
    /// into new ones?
    #[test]
    fn shrinking_moves_all_and_growing_a_part() {
        let mut pages = vec![0; 16];
        pages[..4].fill(100);
        assert_eq!(pages_to_move(&pages, &"0-1".parse().unwrap()), 200);
        assert_eq!(pages_to_move(&pages, &"0-7".parse().unwrap()), 200);
        assert_eq!(pages_to_move(&pages, &"0-3".parse().unwrap()), 0);
    }

    proptest! {
        /// Does every group get its number of units, no unit twice, and does nothing move if sizes stay the same?
        #[test]
        fn every_group_gets_its_number(
            sizes in prop::collection::vec(1u32..5, 1..4), again in prop::collection::vec(1u32..5, 1..4), ways: bool,
        ) {
            let divided = if ways { WAYS } else { COLORS };
            let count = sizes.len().min(again.len());
            let (sizes, again) = (&sizes[..count], &again[..count]);
            let first = assign(&vec![IndexSet::default(); count], sizes, &divided);
            for (given, wanted) in [(first.clone(), sizes), (assign(&first, again, &divided), again)] {
                let counts: Vec<u32> = given.iter().map(IndexSet::count).collect();
                prop_assert_eq!(&counts[..], wanted);
                let all = given.iter().fold(IndexSet::default(), |all, set| all.union(set));
                prop_assert_eq!(all.count(), wanted.iter().sum::<u32>());
                let whole = |set: &IndexSet| set.iter().last().unwrap() - set.first().unwrap() + 1 == set.count();
                prop_assert!(!ways || given.iter().all(whole));
            }
            prop_assert_eq!(assign(&first, sizes, &divided), first);
        }
    }
}
