//! Groups of frames that fall on the same sets of a cache, found only by asking whether some frames evict another.
//!
//! Problem: which address bits choose the set is not known in a virtual machine, where frame numbers are the guest's
//! own. Method: group testing (Vila, Köpf and Morales, S&P 2019). A large set that evicts a target is cut into one
//! group more than the cache has ways; groups that are not needed are removed, until hardly more than a set's worth is
//! left. All pages that this set evicts belong to its class; the next target is a page without a class. The pages left
//! at the end may be the last class. Classes that evict each other are merged. Properties: pure; occasional wrong
//! answers are tolerated: a set is purified, a class needs more members than ways, and pages that fit no class are
//! counted rather than forced into one.

/// A test of whether one line in each page of `set` evicts the target's line. Its answers may be wrong at times.
pub trait EvictionOracle {
    /// Tests whether `set` evicts `target`; `set` may not contain `target`.
    fn evicts(&mut self, target: usize, set: &[usize]) -> bool;
    /// True only if the eviction is nearly certain; a doubtful `false` costs the callers little.
    fn evicts_reliably(&mut self, target: usize, set: &[usize]) -> bool {
        (0..3).all(|_| self.evicts(target, set))
    }
    /// Is the time for answers used up?
    fn is_exhausted(&self) -> bool {
        false
    }
}

/// Classes of items, and those that fit none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EvictionClasses {
    /// The members of each class, in order of their number.
    pub classes: Vec<Vec<usize>>,
    /// Items that fit no class, in order of their number.
    pub unclassified_items: Vec<usize>,
    /// Number of classes that were merged into others.
    pub merged_count: usize,
}

/// Parameters of the search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupingParameters {
    /// Ways of the cache: a class needs more members than this.
    pub ways: usize,
    /// The search ends at this number: more classes are a sign of noise, which the caller's check detects.
    pub max_classes: usize,
    /// Number of frames that represent a class once it is found.
    pub representatives_per_class: usize,
}

/// After this many targets in a row without a class, the rest is noise.
const MAX_FRUITLESS_TARGETS: u32 = 24;

/// Groups `items`.
pub fn group_items(
    oracle: &mut impl EvictionOracle,
    items: &[usize],
    parameters: &GroupingParameters,
) -> EvictionClasses {
    let mut ungrouped_items: Vec<usize> = items.to_vec();
    let mut grouping = EvictionClasses::default();
    let mut fruitless_targets = 0;
    while grouping.classes.len() < parameters.max_classes
        && fruitless_targets < MAX_FRUITLESS_TARGETS
        && ungrouped_items.len() > parameters.ways
        && !oracle.is_exhausted()
    {
        let target = ungrouped_items.remove(0);
        // The core is taken from all frames, not from the remaining ones, because a remainder with few colors would
        // retain a set's worth of each.
        let Some(core) = reduce_to_minimal(oracle, target, items, parameters.ways) else {
            grouping.unclassified_items.push(target);
            fruitless_targets += 1;
            continue;
        };
        // The core may also hold frames of other colors; the frames that it evicts are nearly all of one color and
        // represent the class better. The target is among them: the core may have no more than a set's worth of
        // frames, so a member of the core is tested without itself.
        let mut class_seed = vec![target];
        let core_and_target: Vec<usize> = core.into_iter().chain([target]).collect();
        class_seed.extend(
            evicted_items(oracle, &ungrouped_items, &core_and_target)
                .into_iter()
                .take(parameters.representatives_per_class),
        );
        let class = evicted_items(oracle, &ungrouped_items, &class_seed);
        if class.len() > parameters.ways {
            ungrouped_items.retain(|item| !class.contains(item));
            grouping
                .classes
                .push(class.into_iter().chain([target]).collect());
            fruitless_targets = 0;
        } else {
            grouping.unclassified_items.push(target);
            fruitless_targets += 1;
        }
    }
    grouping.unclassified_items.append(&mut ungrouped_items);
    group_remaining(oracle, &mut grouping, parameters);
    split_mixed_classes(oracle, &mut grouping, parameters);
    merge_classes(oracle, &mut grouping, parameters);
    grouping
        .classes
        .iter_mut()
        .for_each(|class| class.sort_unstable());
    grouping.unclassified_items.sort_unstable();
    grouping
}

/// Groups the remaining pages into a class. If replacement is far from LRU, no small set evicts a class's lines
/// reliably, so the last class is what remains after all others are grouped. If the remaining pages have one color,
/// they evict each other; if they have several, [`split_mixed_classes`] separates them.
fn group_remaining(
    oracle: &mut impl EvictionOracle,
    grouping: &mut EvictionClasses,
    parameters: &GroupingParameters,
) {
    let class = evicted_items(
        oracle,
        &grouping.unclassified_items,
        &grouping.unclassified_items,
    );
    if class.len() > parameters.ways + 1 && !oracle.is_exhausted() {
        grouping
            .unclassified_items
            .retain(|item| !class.contains(item));
        grouping.classes.push(class);
    }
}

/// A subset of `start_set` with hardly more than `ways` items that evicts `target`; `None` if the whole set does not.
fn reduce_to_minimal(
    oracle: &mut impl EvictionOracle,
    target: usize,
    start_set: &[usize],
    ways: usize,
) -> Option<Vec<usize>> {
    let mut set: Vec<usize> = start_set
        .iter()
        .copied()
        .filter(|&item| item != target)
        .collect();
    if !oracle.evicts(target, &set) {
        return None;
    }
    // With so few items, no second class can be complete among them.
    let target_len = 2 * ways - 1;
    while set.len() > target_len && !oracle.is_exhausted() {
        // Rounded down: there must be more groups than the set needs members, or each group might hold a needed one.
        let group_len = (set.len() / (ways + 1)).max(1);
        let set_without_group = |index: usize| {
            let end = (index + group_len).min(set.len());
            set[..index]
                .iter()
                .chain(&set[end..])
                .copied()
                .collect::<Vec<_>>()
        };
        // One wrong answer here would spoil the whole class.
        let mut still_evicts =
            |reduced_set: &Vec<usize>| oracle.evicts_reliably(target, reduced_set);
        let smaller_set = (0..set.len())
            .step_by(group_len)
            .map(set_without_group)
            .find(|reduced_set| still_evicts(reduced_set));
        match smaller_set {
            Some(reduced_set) => set = reduced_set,
            None => break, // every group is needed, so the set cannot be reduced further
        }
    }
    (set.len() <= 8 * ways).then_some(set)
}

/// Members of `items` that the rest of `set` evicts.
fn evicted_items(oracle: &mut impl EvictionOracle, items: &[usize], set: &[usize]) -> Vec<usize> {
    let mut other_items = Vec::with_capacity(set.len());
    let mut is_evicted = |item: usize| {
        other_items.clear();
        other_items.extend(set.iter().filter(|&&other| other != item));
        // A wrong yes would spoil the class, so each yes is tested again, which costs little; a wrong no is found
        // later.
        oracle.evicts(item, &other_items) && oracle.evicts(item, &other_items)
    };
    items
        .iter()
        .copied()
        .filter(|&item| is_evicted(item))
        .collect()
}

/// Splits classes that are 1.5 times as large as the median, and so probably mix several colors. A part with enough
/// frames of one color, and too few of the other, evicts frames of the first color only.
fn split_mixed_classes(
    oracle: &mut impl EvictionOracle,
    grouping: &mut EvictionClasses,
    parameters: &GroupingParameters,
) {
    let mut sizes: Vec<usize> = grouping.classes.iter().map(Vec::len).collect();
    sizes.sort_unstable();
    let Some(&median_size) = sizes.get(sizes.len() / 2) else {
        return;
    };
    let mut index = 0;
    while index < grouping.classes.len() {
        let is_large = 2 * grouping.classes[index].len() > 3 * median_size
            && grouping.classes.len() < parameters.max_classes;
        match is_large
            .then(|| split_class(oracle, &grouping.classes[index], parameters))
            .flatten()
        {
            Some((first_part, second_part)) => {
                let mixed_class = std::mem::replace(&mut grouping.classes[index], first_part);
                let is_classified = |item: &usize| {
                    grouping.classes[index].contains(item) || second_part.contains(item)
                };
                grouping
                    .unclassified_items
                    .extend(mixed_class.into_iter().filter(|item| !is_classified(item)));
                grouping.classes.push(second_part); // both parts are examined again, because each may still be a mixture
            }
            None => index += 1,
        }
    }
}

/// Splits a class in two; `None` if no part of it distinguishes its members.
fn split_class(
    oracle: &mut impl EvictionOracle,
    class: &[usize],
    parameters: &GroupingParameters,
) -> Option<(Vec<usize>, Vec<usize>)> {
    // Parts range from hardly a set's worth of one color to several colors' worth.
    const MAX_SUBSETS: usize = 24;
    for index in 0..MAX_SUBSETS {
        if oracle.is_exhausted() {
            return None;
        }
        let size = parameters.ways + parameters.ways / 2 + index % 8 * parameters.ways / 2;
        let subset: Vec<usize> = class
            .iter()
            .copied()
            .cycle()
            .skip(index * size)
            .take(size.min(class.len()))
            .collect();
        let evicted_members = evicted_items(oracle, class, &subset);
        let unevicted_members: Vec<usize> = class
            .iter()
            .copied()
            .filter(|item| !evicted_members.contains(item))
            .collect();
        if evicted_members.len() <= parameters.ways + 1
            || unevicted_members.len() <= parameters.ways + 1
        {
            continue;
        }
        let take_core = |items: &[usize]| {
            items
                .iter()
                .copied()
                .take(2 * parameters.representatives_per_class)
                .collect::<Vec<_>>()
        };
        let (evicted_core, unevicted_core) =
            (take_core(&evicted_members), take_core(&unevicted_members));
        let mut evicts_most = |items: &[usize], evictors: &[usize]| {
            4 * evicted_items(oracle, items, evictors).len() >= 3 * items.len()
        };
        let take_few = |items: &[usize]| items.iter().copied().take(12).collect::<Vec<_>>();
        let (evicted_sample, unevicted_sample) =
            (take_few(&evicted_members), take_few(&unevicted_members));
        let is_separate = evicts_most(&evicted_sample, &evicted_core)
            && evicts_most(&unevicted_sample, &unevicted_core);
        let cross_evictions = evicted_items(oracle, &unevicted_sample, &evicted_core).len()
            + evicted_items(oracle, &evicted_sample, &unevicted_core).len();
        if is_separate && cross_evictions <= 3 {
            let first_class = evicted_items(oracle, class, &evicted_core);
            let remaining_items: Vec<usize> = class
                .iter()
                .copied()
                .filter(|item| !first_class.contains(item))
                .collect();
            let second_class = evicted_items(oracle, &remaining_items, &unevicted_core);
            if first_class.len() > parameters.ways && second_class.len() > parameters.ways {
                return Some((first_class, second_class));
            }
        }
    }
    None
}

/// Merges classes that evict each other's members.
fn merge_classes(
    oracle: &mut impl EvictionOracle,
    grouping: &mut EvictionClasses,
    parameters: &GroupingParameters,
) {
    let mut index = 0;
    while index < grouping.classes.len() {
        let mut other_index = index + 1;
        while other_index < grouping.classes.len() {
            let sample_items = |class: &[usize]| {
                class
                    .iter()
                    .copied()
                    .take(parameters.representatives_per_class)
                    .collect::<Vec<_>>()
            };
            let (first_items, second_items) = (
                sample_items(&grouping.classes[index]),
                sample_items(&grouping.classes[other_index]),
            );
            let mut cross_evictions = 0;
            for attempt in 0..3 {
                let first_evicts =
                    oracle.evicts(second_items[attempt % second_items.len()], &first_items);
                let second_evicts =
                    oracle.evicts(first_items[attempt % first_items.len()], &second_items);
                cross_evictions += usize::from(first_evicts && second_evicts);
            }
            if cross_evictions >= 2 {
                let merged_class = grouping.classes.remove(other_index);
                grouping.classes[index].extend(merged_class);
                grouping.merged_count += 1;
            } else {
                other_index += 1;
            }
        }
        index += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    /// A cache of `colors` x `ways` lines with true LRU; one answer in `lies_one_in` is wrong.
    struct FakeCache {
        color_of: Vec<usize>,
        ways: usize,
        lies_one_in: u64,
        draw: SplitMix64,

        asked: usize,
    }
    impl EvictionOracle for FakeCache {
        fn evicts(&mut self, target: usize, set: &[usize]) -> bool {
            self.asked += 1;

            let truth = set
                .iter()
                .filter(|&&item| self.color_of[item] == self.color_of[target])
                .count()
                >= self.ways;
            truth != (self.lies_one_in > 0 && self.draw.draw_below(self.lies_one_in) == 0)
        }
    }

    fn fake_cache(
        colors: usize,
        ways: usize,
        items: usize,
        lies_one_in: u64,
        seed: u64,
    ) -> FakeCache {
        let mut draw = SplitMix64::new(seed);
        let color_of = (0..items)
            .map(|_| draw.draw_below(colors as u64) as usize)
            .collect();
        FakeCache {
            color_of,
            ways,
            lies_one_in,
            draw,
            asked: 0,
        }
    }

    fn search(colors: usize, ways: usize) -> GroupingParameters {
        GroupingParameters {
            ways,
            max_classes: 2 * colors,
            representatives_per_class: ways + ways / 2,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// If every test result is correct: are the classes exactly the colors, for any cache?
        #[test]
        fn correct_test_results_give_exactly_the_color_classes(power in 1u32..5, ways in 4usize..12, seed: u64) {
            let colors = 1usize << power;
            let mut cache = fake_cache(colors, ways, colors * ways * 5, 0, seed);
            let items: Vec<usize> = (0..cache.color_of.len()).collect();
            let grouping = group_items(&mut cache, &items, &search(colors, ways));
            for class in &grouping.classes {
                prop_assert!(class.iter().all(|&item| cache.color_of[item] == cache.color_of[class[0]]));
            }
            let big = |color| cache.color_of.iter().filter(|&&of| of == color).count() > ways + 1;
            prop_assert_eq!(grouping.classes.len(), (0..colors).filter(|&color| big(color)).count());
            let item_count: usize = grouping.classes.iter().map(Vec::len).sum::<usize>() + grouping.unclassified_items.len();
            prop_assert_eq!(item_count, items.len());
        }
    }

    /// Is a class of several colors, as large as all of them, split, and a class of a single color left whole?
    #[test]
    fn a_class_of_several_colors_is_split() {
        for seed in 1..6 {
            let mut cache = fake_cache(8, 16, 8 * 120, 0, seed);
            let items_in = |colors: &[usize], cache: &FakeCache| -> Vec<usize> {
                (0..cache.color_of.len())
                    .filter(|&item| colors.contains(&cache.color_of[item]))
                    .collect()
            };
            let mut classes = vec![items_in(&[0, 1, 2], &cache), items_in(&[3, 4], &cache)];
            classes.extend((5..8).map(|color| items_in(&[color], &cache)));
            let mut grouped = EvictionClasses {
                classes,
                ..EvictionClasses::default()
            };
            split_mixed_classes(&mut cache, &mut grouped, &search(8, 16));
            assert_eq!(grouped.classes.len(), 8, "seed {seed}");
            for class in &grouped.classes {
                assert!(
                    class
                        .iter()
                        .all(|&item| cache.color_of[item] == cache.color_of[class[0]])
                );
            }
        }
    }

    /// With one lie in 200: are nearly all frames still where they belong, and none lost?
    #[test]
    fn a_few_wrong_answers_cost_a_few_frames() {
        for seed in 0..5 {
            let mut cache = fake_cache(32, 16, 4096, 200, seed);
            let items: Vec<usize> = (0..4096).collect();
            let grouping = group_items(&mut cache, &items, &search(32, 16));
            assert_eq!(grouping.classes.len(), 32, "seed {seed}");
            let stray = |class: &Vec<usize>| {
                let count_of_color = |color| {
                    class
                        .iter()
                        .filter(|&&item| cache.color_of[item] == color)
                        .count()
                };
                class.len() - (0..32).map(count_of_color).max().unwrap()
            };
            let strays: usize = grouping.classes.iter().map(stray).sum();
            assert!(strays < 80, "{strays} of 4096 in a wrong class");
        }
    }

    /// Does a cache with random answers yield no colors, in bounded time?
    #[test]
    fn random_answers_yield_no_colors_in_bounded_time() {
        let mut cache = fake_cache(32, 16, 2048, 2, 3);
        let grouping = group_items(&mut cache, &(0..2048).collect::<Vec<_>>(), &search(32, 16));
        assert!(
            grouping.classes.len() < 32 && cache.asked < 200_000,
            "{} classes",
            grouping.classes.len()
        );
    }
}
