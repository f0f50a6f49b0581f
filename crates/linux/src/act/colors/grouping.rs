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
    /// `set` may not contain `target`.
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
    pub left_over: Vec<usize>,
    /// Number of classes that were merged into others.
    pub merged: usize,
}

/// Parameters of the search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupingParameters {
    /// Ways of the cache: a class needs more members than this.
    pub ways: usize,
    /// The search ends at this number: more classes are a sign of noise, which the caller's check detects.
    pub max_classes: usize,
    /// Number of frames that represent a class once it is found.
    pub per_class: usize,
}

/// After this many targets in a row without a class, the rest is noise.
const MAX_FRUITLESS: u32 = 24;

/// Groups `items`.
pub fn group(test: &mut impl EvictionOracle, items: &[usize], search: &GroupingParameters) -> EvictionClasses {
    let mut ungrouped: Vec<usize> = items.to_vec();
    let mut grouped = EvictionClasses::default();
    let mut fruitless = 0;
    while grouped.classes.len() < search.max_classes
        && fruitless < MAX_FRUITLESS
        && ungrouped.len() > search.ways
        && !test.is_exhausted()
    {
        let target = ungrouped.remove(0);
        // The core is taken from all frames, not from the remaining ones: a rest of only a few colors would keep a
        // set's worth of each.
        let Some(core) = reduce_to_minimal(test, target, items, search.ways) else {
            grouped.left_over.push(target);
            fruitless += 1;
            continue;
        };
        // The core may also hold frames of other colors; the frames that it evicts are nearly all of one color and
        // represent the class better. The target is among them: the core may have no more than a set's worth of
        // frames, so a member of the core is tested without itself.
        let mut class_seed = vec![target];
        let core_and_target: Vec<usize> = core.into_iter().chain([target]).collect();
        class_seed.extend(evicted_items(test, &ungrouped, &core_and_target).into_iter().take(search.per_class));
        let class = evicted_items(test, &ungrouped, &class_seed);
        if class.len() > search.ways {
            ungrouped.retain(|item| !class.contains(item));
            grouped.classes.push(class.into_iter().chain([target]).collect());
            fruitless = 0;
        } else {
            grouped.left_over.push(target);
            fruitless += 1;
        }
    }
    grouped.left_over.append(&mut ungrouped);
    group_remaining(test, &mut grouped, search);
    split_large(test, &mut grouped, search);
    merge(test, &mut grouped, search);
    grouped.classes.iter_mut().for_each(|class| class.sort_unstable());
    grouped.left_over.sort_unstable();
    grouped
}

/// Groups the remaining pages into a class. If replacement is far from LRU, no small set evicts a class's lines
/// reliably, so the last class is what remains after all others are grouped. If the remaining pages have one color,
/// they evict each other; if they have several, [`split_large`] separates them.
fn group_remaining(test: &mut impl EvictionOracle, grouped: &mut EvictionClasses, search: &GroupingParameters) {
    let class = evicted_items(test, &grouped.left_over, &grouped.left_over);
    if class.len() > search.ways + 1 && !test.is_exhausted() {
        grouped.left_over.retain(|item| !class.contains(item));
        grouped.classes.push(class);
    }
}

/// A subset of `start_set` with hardly more than `ways` items that evicts `target`; `None` if the whole set does not.
fn reduce_to_minimal(
    test: &mut impl EvictionOracle,
    target: usize,
    start_set: &[usize],
    ways: usize,
) -> Option<Vec<usize>> {
    let mut set: Vec<usize> = start_set.iter().copied().filter(|&item| item != target).collect();
    if !test.evicts(target, &set) {
        return None;
    }
    // With so few items, no second class can be complete among them.
    let target_len = 2 * ways - 1;
    while set.len() > target_len && !test.is_exhausted() {
        // Rounded down: there must be more groups than the set needs members, or each group might hold a needed one.
        let group = (set.len() / (ways + 1)).max(1);
        let drop_group = |index: usize| {
            let end = (index + group).min(set.len());
            set[..index].iter().chain(&set[end..]).copied().collect::<Vec<_>>()
        };
        // One wrong answer here would spoil the whole class.
        let mut still_evicts = |reduced_set: &Vec<usize>| test.evicts_reliably(target, reduced_set);
        let smaller = (0..set.len()).step_by(group).map(drop_group).find(|reduced_set| still_evicts(reduced_set));
        match smaller {
            Some(reduced_set) => set = reduced_set,
            None => break, // every group is needed: it is as small as it gets
        }
    }
    (set.len() <= 8 * ways).then_some(set)
}

/// Members of `items` that the rest of `set` evicts.
fn evicted_items(test: &mut impl EvictionOracle, items: &[usize], set: &[usize]) -> Vec<usize> {
    let mut other_items = Vec::with_capacity(set.len());
    let mut belongs = |item: usize| {
        other_items.clear();
        other_items.extend(set.iter().filter(|&&other| other != item));
        // A wrong yes would spoil the class, so each yes is tested again, which costs little; a wrong no is found
        // later.
        test.evicts(item, &other_items) && test.evicts(item, &other_items)
    };
    items.iter().copied().filter(|&item| belongs(item)).collect()
}

/// A class half as large again as most is probably a mixture of several colors. A part of it with enough frames of one
/// color, and too few of the other, evicts frames of the first color only.
fn split_large(test: &mut impl EvictionOracle, grouped: &mut EvictionClasses, search: &GroupingParameters) {
    let mut sizes: Vec<usize> = grouped.classes.iter().map(Vec::len).collect();
    sizes.sort_unstable();
    let Some(&usual) = sizes.get(sizes.len() / 2) else { return };
    let mut index = 0;
    while index < grouped.classes.len() {
        let is_large = 2 * grouped.classes[index].len() > 3 * usual && grouped.classes.len() < search.max_classes;
        match is_large.then(|| split(test, &grouped.classes[index], search)).flatten() {
            Some((one, other)) => {
                let whole_class = std::mem::replace(&mut grouped.classes[index], one);
                let is_classified = |item: &usize| grouped.classes[index].contains(item) || other.contains(item);
                grouped.left_over.extend(whole_class.into_iter().filter(|item| !is_classified(item)));
                grouped.classes.push(other); // looked at again: it may be of two kinds itself, as may be what is left here
            }
            None => index += 1,
        }
    }
}

/// Splits a class in two; `None` if no part of it distinguishes its members.
fn split(
    test: &mut impl EvictionOracle,
    class: &[usize],
    search: &GroupingParameters,
) -> Option<(Vec<usize>, Vec<usize>)> {
    // Parts range from hardly a set's worth of one color to several colors' worth.
    const SUBSETS: usize = 24;
    for index in 0..SUBSETS {
        if test.is_exhausted() {
            return None;
        }
        let size = search.ways + search.ways / 2 + index % 8 * search.ways / 2;
        let subset: Vec<usize> = class.iter().copied().cycle().skip(index * size).take(size.min(class.len())).collect();
        let yes = evicted_items(test, class, &subset);
        let no: Vec<usize> = class.iter().copied().filter(|item| !yes.contains(item)).collect();
        if yes.len() <= search.ways + 1 || no.len() <= search.ways + 1 {
            continue;
        }
        let core = |items: &[usize]| items.iter().copied().take(2 * search.per_class).collect::<Vec<_>>();
        let (yes_core, no_core) = (core(&yes), core(&no));
        let mut mostly =
            |items: &[usize], evictors: &[usize]| 4 * evicted_items(test, items, evictors).len() >= 3 * items.len();
        let take_few = |items: &[usize]| items.iter().copied().take(12).collect::<Vec<_>>();
        let (some_yes, some_no) = (take_few(&yes), take_few(&no));
        let is_separate = mostly(&some_yes, &yes_core) && mostly(&some_no, &no_core);
        let crossing = evicted_items(test, &some_no, &yes_core).len() + evicted_items(test, &some_yes, &no_core).len();
        if is_separate && crossing <= 3 {
            let own_items = evicted_items(test, class, &yes_core);
            let remaining_items: Vec<usize> = class.iter().copied().filter(|item| !own_items.contains(item)).collect();
            let other_items = evicted_items(test, &remaining_items, &no_core);
            if own_items.len() > search.ways && other_items.len() > search.ways {
                return Some((own_items, other_items));
            }
        }
    }
    None
}

/// Merges classes that evict each other's members.
fn merge(test: &mut impl EvictionOracle, grouped: &mut EvictionClasses, search: &GroupingParameters) {
    let mut index = 0;
    while index < grouped.classes.len() {
        let mut other_index = index + 1;
        while other_index < grouped.classes.len() {
            let sample_items = |class: &[usize]| class.iter().copied().take(search.per_class).collect::<Vec<_>>();
            let (first_items, second_items) =
                (sample_items(&grouped.classes[index]), sample_items(&grouped.classes[other_index]));
            let mut crossing = 0;
            for try_ in 0..3 {
                let first_evicts = test.evicts(second_items[try_ % second_items.len()], &first_items);
                let second_evicts = test.evicts(first_items[try_ % first_items.len()], &second_items);
                crossing += usize::from(first_evicts && second_evicts);
            }
            if crossing >= 2 {
                let merged_class = grouped.classes.remove(other_index);
                grouped.classes[index].extend(merged_class);
                grouped.merged += 1;
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
    use proptest::prelude::*;

    /// A cache of `colors` x `ways` lines with true LRU; one answer in `lies_one_in` is wrong.
    struct FakeCache {
        color_of: Vec<usize>,
        ways: usize,
        lies_one_in: u64,
        state: u64,
        asked: usize,
    }
    impl EvictionOracle for FakeCache {
        fn evicts(&mut self, target: usize, set: &[usize]) -> bool {
            self.asked += 1;
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let truth = set.iter().filter(|&&item| self.color_of[item] == self.color_of[target]).count() >= self.ways;
            truth != (self.lies_one_in > 0 && (self.state >> 33).is_multiple_of(self.lies_one_in))
        }
    }

    fn made_up(colors: usize, ways: usize, items: usize, lies_one_in: u64, seed: u64) -> FakeCache {
        let mut state = seed | 1;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % colors
        };
        FakeCache { color_of: (0..items).map(|_| draw()).collect(), ways, lies_one_in, state: seed, asked: 0 }
    }

    fn search(colors: usize, ways: usize) -> GroupingParameters {
        GroupingParameters { ways, max_classes: 2 * colors, per_class: ways + ways / 2 }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// If every test result is correct: are the classes exactly the colors, for any cache?
        #[test]
        fn true_answers_give_the_true_classes(power in 1u32..5, ways in 4usize..12, seed: u64) {
            let colors = 1usize << power;
            let mut cache = made_up(colors, ways, colors * ways * 5, 0, seed);
            let items: Vec<usize> = (0..cache.color_of.len()).collect();
            let grouping = group(&mut cache, &items, &search(colors, ways));
            for class in &grouping.classes {
                prop_assert!(class.iter().all(|&item| cache.color_of[item] == cache.color_of[class[0]]));
            }
            let big = |color| cache.color_of.iter().filter(|&&of| of == color).count() > ways + 1;
            prop_assert_eq!(grouping.classes.len(), (0..colors).filter(|&color| big(color)).count());
            let item_count: usize = grouping.classes.iter().map(Vec::len).sum::<usize>() + grouping.left_over.len();
            prop_assert_eq!(item_count, items.len());
        }
    }

    /// Is a class of several colors, as large as all of them, split, and a class of a single color left whole?
    #[test]
    fn a_class_of_several_colors_is_split() {
        for seed in 1..6 {
            let mut cache = made_up(8, 16, 8 * 120, 0, seed);
            let items_in = |colors: &[usize], cache: &FakeCache| -> Vec<usize> {
                (0..cache.color_of.len()).filter(|&item| colors.contains(&cache.color_of[item])).collect()
            };
            let mut classes = vec![items_in(&[0, 1, 2], &cache), items_in(&[3, 4], &cache)];
            classes.extend((5..8).map(|color| items_in(&[color], &cache)));
            let mut grouped = EvictionClasses { classes, ..EvictionClasses::default() };
            split_large(&mut cache, &mut grouped, &search(8, 16));
            assert_eq!(grouped.classes.len(), 8, "seed {seed}");
            for class in &grouped.classes {
                assert!(class.iter().all(|&item| cache.color_of[item] == cache.color_of[class[0]]));
            }
        }
    }

    /// With one lie in 200: are nearly all frames still where they belong, and none lost?
    #[test]
    fn a_few_wrong_answers_cost_a_few_frames() {
        for seed in 0..5 {
            let mut cache = made_up(32, 16, 4096, 200, seed);
            let items: Vec<usize> = (0..4096).collect();
            let grouping = group(&mut cache, &items, &search(32, 16));
            assert_eq!(grouping.classes.len(), 32, "seed {seed}");
            let stray = |class: &Vec<usize>| {
                let count_of_color = |color| class.iter().filter(|&&item| cache.color_of[item] == color).count();
                class.len() - (0..32).map(count_of_color).max().unwrap()
            };
            let strays: usize = grouping.classes.iter().map(stray).sum();
            assert!(strays < 80, "{strays} of 4096 in a wrong class");
        }
    }

    /// Does a cache with random answers yield no colors, in bounded time?
    #[test]
    fn noise_is_no_color() {
        let mut cache = made_up(32, 16, 2048, 2, 3);
        let grouping = group(&mut cache, &(0..2048).collect::<Vec<_>>(), &search(32, 16));
        assert!(grouping.classes.len() < 32 && cache.asked < 200_000, "{} classes", grouping.classes.len());
    }
}
