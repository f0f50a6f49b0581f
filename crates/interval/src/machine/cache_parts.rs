//! Division of a cache into parts for the engine: each part consists of units (ways or colors), and parts may
//! overlap.

use cachemate_core::IndexSet;

/// The division of a cache into parts that may overlap.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheDivision {
    /// Capacity (as a share of the cache) and group of each part. The first part is the whole cache, for tasks without
    /// a group.
    pub parts: Vec<(f64, u8)>,
    /// Capacity of each group, as a share of the cache.
    pub groups: Vec<f64>,
    /// The part of each requested set of units.
    pub part_of_mask: Vec<u8>,
}

/// Divides a cache of `units` units; with `is_shared`, some tasks may use the whole cache.
pub fn divide_cache(units: u32, masks: &[IndexSet], is_shared: bool) -> CacheDivision {
    let all_units: IndexSet = (0..units).collect();
    let mut distinct_masks: Vec<IndexSet> = vec![all_units.clone()];
    let mut part_of_mask = Vec::new();
    for mask in masks {
        let mask = mask.intersection(&all_units);
        let index = distinct_masks
            .iter()
            .position(|earlier_mask| *earlier_mask == mask)
            .unwrap_or_else(|| {
                distinct_masks.push(mask.clone());
                distinct_masks.len() - 1
            });
        part_of_mask.push(index.min(crate::occupancy::MAX_DOMAINS - 1) as u8);
    }
    distinct_masks.truncate(crate::occupancy::MAX_DOMAINS);

    // Parts that overlap, directly or through others, are in one group. The first group is empty unless some tasks
    // may use the whole cache.
    let mut group_by_mask: Vec<usize> = (0..distinct_masks.len()).collect();
    let is_counted = |mask_index: usize| is_shared || mask_index > 0 || distinct_masks.len() == 1;
    for a in 0..distinct_masks.len() {
        for b in a + 1..distinct_masks.len() {
            if is_counted(a) && is_counted(b) && distinct_masks[a].intersects(&distinct_masks[b]) {
                let (old_group, new_group) = (group_by_mask[b], group_by_mask[a]);
                group_by_mask
                    .iter_mut()
                    .filter(|group| **group == old_group)
                    .for_each(|group| *group = new_group);
            }
        }
    }

    let mut group_numbers: Vec<usize> = group_by_mask.clone();
    group_numbers.sort_unstable();
    group_numbers.dedup();
    let group_index = |mask_index: usize| {
        group_numbers
            .iter()
            .position(|group_number| *group_number == group_by_mask[mask_index])
            .unwrap_or(0) as u8
    };

    let share_of_units = |set: &IndexSet| f64::from(set.count()) / f64::from(units.max(1));
    let group_share = |number: u8| {
        let members = (0..distinct_masks.len())
            .filter(|&index| self::is_same_group(&group_numbers, group_by_mask[index], number));
        share_of_units(
            &members
                .map(|index| distinct_masks[index].clone())
                .reduce(|a, b| a.union(&b))
                .unwrap_or_default(),
        )
    };
    CacheDivision {
        parts: distinct_masks
            .iter()
            .enumerate()
            .map(|(index, mask)| (share_of_units(mask), group_index(index)))
            .collect(),
        groups: (0..group_numbers.len() as u8).map(group_share).collect(),
        part_of_mask,
    }
}

fn is_same_group(numbers: &[usize], group: usize, number: u8) -> bool {
    numbers[usize::from(number)] == group
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> IndexSet {
        text.parse().unwrap()
    }

    /// Does each disjoint part have its own group, and do overlapping parts share one with all their units?
    #[test]
    fn overlapping_parts_share_a_group_and_disjoint_ones_do_not() {
        let division = divide_cache(16, &[set("0-3"), set("4-15"), set("0-3")], false);
        assert_eq!(division.part_of_mask, [1, 2, 1]);
        assert_eq!(division.parts[1].0, 0.25);
        assert!(division.parts[1].1 != division.parts[2].1);
        let division = divide_cache(16, &[set("0-3"), set("2-7"), set("12-15")], false);
        assert_eq!(division.parts[1].1, division.parts[2].1);
        assert_eq!(division.groups[usize::from(division.parts[1].1)], 0.5);
        let division = divide_cache(16, &[set("0-3")], true);
        assert_eq!((division.groups.len(), division.groups[0]), (1, 1.0));
    }
}
