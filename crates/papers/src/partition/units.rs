//! Chooses the units of groups whose numbers of units are given.
//!
//! Problem: the sizes determine how many colors or ways each group gets. The choice of units determines how many pages
//! have to be copied (CP 4.6.5: 11 051 cycles a page), whether hardware accepts the mask (contiguous ways), and whether
//! contiguous page requests can be met (CP 4.4.1: adjacent colors). In ways that devices fill too, a group's lines are
//! evicted by input and output. Method: a group keeps its units as far as possible, and takes adjacent ones first.
//! Contiguous masks are laid out side by side in the present order of the groups, each where it has the fewest of the
//! devices' ways; without contiguity, only as many of these are given out as the sizes need. For example, if devices
//! fill ways 0 and 1 of eleven, groups of four and five ways get 2-5 and 6-10, and groups of five and five 1-5 and 6-10.
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
    let device_units = partition_units.device_units();
    if matches!(
        partition_units,
        PartitionSupport::Ways {
            contiguous: true,
            ..
        }
    ) {
        assign_side_by_side(current_units, sizes, partition_units.units(), &device_units)
    } else {
        assign_keeping_units(current_units, sizes, partition_units.units(), &device_units)
    }
}

fn assign_side_by_side(
    current_units: &[IndexSet],
    sizes: &[u32],
    units: u32,
    device_units: &IndexSet,
) -> Vec<IndexSet> {
    let mut ordered_groups: Vec<usize> = (0..current_units.len()).collect();
    // New groups come after the others.
    ordered_groups.sort_by_key(|&group| current_units[group].first().unwrap_or(u32::MAX));
    let mut assigned_units = vec![IndexSet::default(); current_units.len()];
    let mut next_unit = 0;
    let mut spare_units = units.saturating_sub(sizes.iter().sum());
    for group in ordered_groups {
        let units_after = |skipped: u32| next_unit + skipped..next_unit + skipped + sizes[group];
        // The first of equally good positions.
        let skipped = (0..=spare_units)
            .min_by_key(|&skipped| {
                let is_of_devices = |unit: &u32| device_units.contains(*unit);
                units_after(skipped).filter(is_of_devices).count()
            })
            .unwrap_or(0);
        assigned_units[group] = units_after(skipped).collect();
        next_unit += skipped + sizes[group];
        spare_units -= skipped;
    }
    assigned_units
}

fn assign_keeping_units(
    current_units: &[IndexSet],
    sizes: &[u32],
    units: u32,
    device_units: &IndexSet,
) -> Vec<IndexSet> {
    let own_units = (0..units).filter(|unit| !device_units.contains(*unit));
    let missing_units = sizes
        .iter()
        .sum::<u32>()
        .saturating_sub(own_units.clone().count() as u32);
    let mut free_units: IndexSet = own_units
        .chain(device_units.iter().take(missing_units as usize))
        .collect();
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
        device_ways: 0,
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

    /// Do groups get the ways of devices only if the others are too few for them, wherever the devices' ways are, and
    /// does one leave them when others shrink?
    #[test]
    fn groups_get_the_ways_of_devices_last() {
        let ways = |contiguous: bool, devices: &str| PartitionSupport::Ways {
            ways: 11,
            min_ways: 1,
            contiguous,
            max_groups: 8,
            device_ways: devices
                .parse::<IndexSet>()
                .unwrap()
                .iter()
                .fold(0, |mask, way| mask | 1 << way),
        };
        let empty = parse_masks(&["", ""]);
        for (devices, sizes, expected) in [
            ("9-10", [4, 5], ["0-3", "4-8"]),
            ("0-1", [4, 5], ["2-5", "6-10"]),
            ("0-1", [5, 5], ["1-5", "6-10"]),
            ("4-5", [4, 5], ["0-3", "6-10"]),
            ("5", [3, 4], ["0-2", "6-9"]),
            ("0-10", [4, 5], ["0-3", "4-8"]),
        ] {
            let support = ways(true, devices);
            let assigned = assign(&empty, &sizes, &support);
            assert_eq!(mask_strings(&assigned), expected, "devices fill {devices}");
            assert_eq!(assign(&assigned, &sizes, &support), assigned);
        }
        let with_gaps = ways(false, "3-4");
        let all = assign(&empty, &[5, 6], &with_gaps);
        assert_eq!(mask_strings(&all), ["0-4", "5-10"]);
        let fewer = assign(&all, &[3, 6], &with_gaps);
        assert_eq!(mask_strings(&fewer), ["0-2", "5-10"]);
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
