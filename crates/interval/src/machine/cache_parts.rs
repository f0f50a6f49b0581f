//! Shares of a cache as the engine takes them: parts that consist of units (ways or colors) and may overlap.

use cachemate_core::IndexSet;

/// The division of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Parts {
    /// Capacity (as a share of the cache) and group of each part. The first part is the whole cache, for tasks without
    /// a group.
    pub parts: Vec<(f64, u8)>,
    /// Capacity of each group, as a share of the cache.
    pub groups: Vec<f64>,
    /// The part of each requested set of units.
    pub of: Vec<u8>,
}

/// Divides a cache of `units` units; with `shared`, some tasks may use all of it.
pub fn divide_cache(units: u32, masks: &[IndexSet], shared: bool) -> Parts {
    let all: IndexSet = (0..units).collect();
    let mut known: Vec<IndexSet> = vec![all.clone()];
    let mut masks_of = Vec::new();
    for mask in masks {
        let mask = mask.intersection(&all);
        let index = known.iter().position(|other| *other == mask).unwrap_or_else(|| {
            known.push(mask.clone());
            known.len() - 1
        });
        masks_of.push(index.min(crate::occupancy::MAX_PARTS - 1) as u8);
    }
    known.truncate(crate::occupancy::MAX_PARTS);
    // Parts that overlap, directly or through others, are in one group. The first one is empty unless some tasks may
    // use it.
    let mut group: Vec<usize> = (0..known.len()).collect();
    let counts = |at: usize| shared || at > 0 || known.len() == 1;
    for a in 0..known.len() {
        for b in a + 1..known.len() {
            if counts(a) && counts(b) && known[a].intersects(&known[b]) {
                let (from, to) = (group[b], group[a]);
                group.iter_mut().filter(|group| **group == from).for_each(|group| *group = to);
            }
        }
    }
    let mut numbers: Vec<usize> = group.clone();
    numbers.sort_unstable();
    numbers.dedup();
    let number = |at: usize| numbers.iter().position(|known| *known == group[at]).unwrap_or(0) as u8;
    let share = |set: &IndexSet| f64::from(set.count()) / f64::from(units.max(1));
    let whole = |number: u8| {
        let members = (0..known.len()).filter(|&index| self::is_same_group(&numbers, group[index], number));
        share(&members.map(|index| known[index].clone()).reduce(|a, b| a.union(&b)).unwrap_or_default())
    };
    Parts {
        parts: known.iter().enumerate().map(|(index, mask)| (share(mask), number(index))).collect(),
        groups: (0..numbers.len() as u8).map(whole).collect(),
        of: masks_of,
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
    fn overlapping_parts_are_of_one_group() {
        let cut = divide_cache(16, &[set("0-3"), set("4-15"), set("0-3")], false);
        assert_eq!(cut.of, [1, 2, 1]);
        assert_eq!(cut.parts[1].0, 0.25);
        assert!(cut.parts[1].1 != cut.parts[2].1);
        let cut = divide_cache(16, &[set("0-3"), set("2-7"), set("12-15")], false);
        assert_eq!(cut.parts[1].1, cut.parts[2].1);
        assert_eq!(cut.groups[usize::from(cut.parts[1].1)], 0.5);
        let cut = divide_cache(16, &[set("0-3")], true);
        assert_eq!((cut.groups.len(), cut.groups[0]), (1, 1.0));
    }
}
