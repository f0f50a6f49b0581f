//! Chooses the units of groups whose numbers of units are given.
//!
//! Problem: the sizes determine how many colors or ways each group gets. The choice of units determines how many pages
//! have to be copied (CP 4.6.5: 11 051 cycles a page), whether hardware accepts the mask (contiguous ways), and whether
//! contiguous page requests can be met (CP 4.4.1: adjacent colors). Method: a group keeps its units as far as possible,
//! and takes adjacent ones first. Contiguous masks are laid out side by side in the present order of the groups.
//! Properties: every group gets its number of units, no unit is assigned twice, and if sizes stay the same, nothing
//! moves.

use cachemate_core::{CacheId, IndexSet, PartitionSupport, View};

/// The units of each group. `current_units` may be empty sets, and `sizes` are the new numbers of units, which add up
/// to at most the cache's units.
pub fn assign(
    current_units: &[IndexSet],
    sizes: &[u32],
    partition_units: &PartitionSupport,
) -> Vec<IndexSet> {
    debug_assert!(
        current_units.len() == sizes.len() && sizes.iter().sum::<u32>() <= partition_units.units()
    );
    if matches!(
        partition_units,
        PartitionSupport::Ways {
            contiguous: true,
            ..
        }
    ) {
        assign_side_by_side(current_units, sizes)
    } else {
        assign_keeping_units(current_units, sizes, partition_units.units())
    }
}

fn assign_side_by_side(current_units: &[IndexSet], sizes: &[u32]) -> Vec<IndexSet> {
    let mut ordered_groups: Vec<usize> = (0..current_units.len()).collect();
    // New groups come after the others.
    ordered_groups.sort_by_key(|&group| current_units[group].first().unwrap_or(u32::MAX));
    let mut assigned_units = vec![IndexSet::default(); current_units.len()];
    let mut next_unit = 0;
    for group in ordered_groups {
        assigned_units[group] = (next_unit..next_unit + sizes[group]).collect();
        next_unit += sizes[group];
    }
    assigned_units
}

fn assign_keeping_units(current_units: &[IndexSet], sizes: &[u32], units: u32) -> Vec<IndexSet> {
    let mut free_units: IndexSet = (0..units).collect();
    let mut assigned_units: Vec<IndexSet> = Vec::with_capacity(current_units.len());
    for (group_units, &size) in current_units.iter().zip(sizes) {
        let retained_units: IndexSet = group_units
            .iter()
            .filter(|&unit| free_units.contains(unit))
            .take(size as usize)
            .collect();
        retained_units
            .iter()
            .for_each(|unit| free_units.remove(unit));
        assigned_units.push(retained_units);
    }

    for (group, &size) in assigned_units.iter_mut().zip(sizes) {
        while group.count() < size {
            let is_adjacent =
                |unit: u32| group.contains(unit + 1) || (unit > 0 && group.contains(unit - 1));
            let Some(unit) = free_units
                .iter()
                .find(|&unit| is_adjacent(unit))
                .or_else(|| free_units.first())
            else {
                break;
            };
            free_units.remove(unit);
            group.insert(unit);
        }
    }

    assigned_units
}

/// The number of pages that a process must copy when its colors become `allowed_colors`: all pages outside these
/// colors, and those that overfill a color when the process gets more colors (CP 4.4.2).
pub fn pages_to_move(pages_per_color: &[u64], allowed_colors: &IndexSet) -> u64 {
    let resident_pages: u64 = pages_per_color.iter().sum();
    let max_pages_per_color = resident_pages.div_ceil(u64::from(allowed_colors.count().max(1)));
    let count_moved_pages = |(color, &pages): (usize, &u64)| {
        if allowed_colors.contains(color as u32) {
            pages.saturating_sub(max_pages_per_color)
        } else {
            pages
        }
    };
    pages_per_color
        .iter()
        .enumerate()
        .map(count_moved_pages)
        .sum()
}

/// The last-level caches that can be partitioned, with their units. Colors apply to all caches of the level, so only
/// the first of these is returned.
pub fn partitionable_caches(view: &View<'_>) -> Vec<(CacheId, PartitionSupport)> {
    let mut caches: Vec<(CacheId, PartitionSupport)> = Vec::new();
    for cache in view.topology.last_level_caches() {
        let Some(partition_units) = PartitionSupport::preferred(view.partitions_of(cache.id))
        else {
            continue;
        };
        let has_colors = caches
            .iter()
            .any(|(_, other_units)| other_units.colors().is_some());
        if !has_colors || partition_units.colors().is_none() {
            caches.push((cache.id, partition_units));
        }
    }
    caches
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COLORS: PartitionSupport = PartitionSupport::Colors {
        colors: 16,
        page_bytes: 4096,
        page_migration_ns: 7368.0,
    };
    const WAYS: PartitionSupport = PartitionSupport::Ways {
        ways: 16,
        min_ways: 1,
        contiguous: true,
        max_groups: 8,
    };

    fn parse_masks(masks: &[&str]) -> Vec<IndexSet> {
        masks.iter().map(|set| set.parse().unwrap()).collect()
    }
    fn mask_strings(sets: &[IndexSet]) -> Vec<String> {
        sets.iter().map(IndexSet::to_string).collect()
    }

    /// Does a group keep its colors when other groups grow or shrink?
    #[test]
    fn a_group_keeps_its_colors_when_others_grow_or_shrink() {
        let first = assign(&parse_masks(&["", "", ""]), &[8, 4, 4], &COLORS);
        assert_eq!(mask_strings(&first), ["0-7", "8-11", "12-15"]);
        let second = assign(&first, &[4, 8, 4], &COLORS);
        assert_eq!(mask_strings(&second), ["0-3", "4-11", "12-15"]);
    }

    /// Are masks contiguous if the hardware requires it?
    #[test]
    fn masks_are_contiguous_if_the_hardware_requires_it() {
        let now = parse_masks(&["8-15", "", "0-7"]);
        assert_eq!(
            mask_strings(&assign(&now, &[6, 2, 8], &WAYS)),
            ["8-13", "14-15", "0-7"]
        );
    }

    /// Do shrinking and growing move pages by the paper's rule: all pages out of revoked colors, and a part of them
    /// into new ones?
    #[test]
    fn shrinking_moves_all_pages_and_growing_a_part() {
        let mut pages = vec![0; 16];
        pages[..4].fill(100);
        assert_eq!(pages_to_move(&pages, &"0-1".parse().unwrap()), 200);
        assert_eq!(pages_to_move(&pages, &"0-7".parse().unwrap()), 200);
        assert_eq!(pages_to_move(&pages, &"0-3".parse().unwrap()), 0);
    }

    proptest! {
        /// Does every group get its number of units, is no unit assigned twice, and does nothing move if sizes stay the
        /// same?
        #[test]
        fn every_group_gets_its_number(
            sizes in prop::collection::vec(1u32..5, 1..4), again in prop::collection::vec(1u32..5, 1..4), ways: bool,
        ) {
            let partition_units = if ways { WAYS } else { COLORS };
            let count = sizes.len().min(again.len());
            let (sizes, again) = (&sizes[..count], &again[..count]);
            let first = assign(&vec![IndexSet::default(); count], sizes, &partition_units);
            for (groups, group_sizes) in [(first.clone(), sizes), (assign(&first, again, &partition_units), again)] {
                let counts: Vec<u32> = groups.iter().map(IndexSet::count).collect();
                prop_assert_eq!(&counts[..], group_sizes);
                let union = groups.iter().fold(IndexSet::default(), |union, set| union.union(set));
                prop_assert_eq!(union.count(), group_sizes.iter().sum::<u32>());
                let is_contiguous = |set: &IndexSet| set.iter().last().unwrap() - set.first().unwrap() + 1 == set.count();
                prop_assert!(!ways || groups.iter().all(is_contiguous));
            }
            prop_assert_eq!(assign(&first, sizes, &partition_units), first);
        }
    }
}
