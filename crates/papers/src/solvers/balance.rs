//! Balance sets: which groups of threads run together, and how often (papers BS 3).
//!
//! Problem: only groups are to be scheduled whose expected miss ratio is at most a threshold, the lowest one at which
//! every thread is in some group. With hundreds of threads, the groups cannot be enumerated. Method:
//! - *Average* (BS 2a): a group's ratio is the mean of its members' ratios on a share of the cache. A thread's best
//!   group is then itself and the n − 1 lowest others, and the threshold is (largest + n − 1 lowest) / n.
//! - *Composed* (BS 2b): members share the whole cache in proportion to their access rates. A thread's best group is
//!   found by exchanging one member at a time, from several starts, as long as that helps. A member's effect on a
//!   shared cache is tabulated over the one number that the members have in common. That number is misses per time
//!   under random replacement, and the time that fills the cache under LRU. Evaluating a group therefore takes a few
//!   additions.
//! - *Turns*: the paper leaves open how often each group runs. With `fair`, every turn starts from the best group of
//!   the thread with the fewest turns so far. Its members are exchanged for others with fewer turns as long as the
//!   threshold is met. With `uniform`, groups are drawn evenly among those that qualify, by a walk of random exchanges.
//!
//! Properties: every group of the rotation is at or below the threshold, and every thread is in a group. The average's
//! threshold always equals the one found by enumeration; the composed one does so in all small cases that the tests
//! try. If exchanges end in a local optimum, the threshold is too high, but never so low that it leaves a thread out.
//! Cost: O(T n) for each evaluation of a group, O(T² n) for a rotation of T turns.

use cachemate_core::{ReplacementModel, SplitMix64};
use cachemate_locality::reuse::ReuseTimes;
use cachemate_locality::statcache;
use cachemate_locality::statstack::StackModel;

/// The model of the expected miss ratio of any group.
#[derive(Clone, Debug)]
pub enum GroupModel {
    /// Miss ratio of each thread on its share of the cache.
    Average(Vec<f64>),
    /// Members share the whole cache in proportion to their access rates.
    Composed(ComposedModel),
}

impl GroupModel {
    /// Groups consist of numbers below this one.
    pub fn thread_count(&self) -> usize {
        match self {
            GroupModel::Average(ratios) => ratios.len(),
            GroupModel::Composed(composed) => composed.members.len(),
        }
    }

    /// The misses per access of the whole group.
    pub fn group_miss_ratio(&self, group: &[usize]) -> f64 {
        match self {
            GroupModel::Average(ratios) => {
                group.iter().map(|&index| ratios[index]).sum::<f64>() / group.len() as f64
            }
            GroupModel::Composed(composed) => composed.composed_miss_ratio(group),
        }
    }
}

/// Number of grid points of a table; neighboring points are 15 % apart, over seven decades.
const GRID_POINTS: usize = 116;

/// The effect of each thread on a shared cache, tabulated by the number that all members of a group have in common.
#[derive(Clone, Debug)]
pub struct ComposedModel {
    members: Vec<ComposedMember>,
    grid: Vec<f64>,
    /// Number of lines of the cache under LRU; `None` under random replacement, where the common number is the sum of
    /// the misses.
    lines: Option<f64>,
}

#[derive(Clone, Debug)]
struct ComposedMember {
    rate: f64,
    /// Lines touched (LRU) or misses per time (random) at the points of the grid.
    demand: Vec<f64>,
    misses: Vec<f64>,
}

impl ComposedModel {
    /// Builds the model for groups of `size` threads from each thread's reuse times (in references to the cache) and
    /// its references per unit of time. `None` without lines, samples or rates.
    pub fn new(
        threads: &[(&ReuseTimes, f64)],
        size: usize,
        lines: u64,
        replacement: ReplacementModel,
    ) -> Option<Self> {
        let max_group_rate =
            threads.iter().map(|thread| thread.1).fold(0.0, f64::max) * size as f64;
        let is_sound = threads
            .iter()
            .all(|&(_, rate)| rate.is_finite() && rate > 0.0);
        if lines == 0 || size == 0 || !is_sound || threads.is_empty() {
            return None;
        }

        let models: Vec<StackModel> = threads
            .iter()
            .map(|thread| StackModel::new(thread.0))
            .collect::<Option<_>>()?;
        let (low, high) = match replacement {
            ReplacementModel::Random => (max_group_rate * 1e-7, max_group_rate * 1.001),
            ReplacementModel::Lru => {
                let max_reuse_times = models
                    .iter()
                    .zip(threads)
                    .map(|(model, &(_, rate))| (model.max_reuse_time() + 2.0) / rate);
                let low = 0.9 * lines as f64 / max_group_rate;
                (low, max_reuse_times.fold(2.0 * low, f64::max))
            }
        };
        let step = libm::log(high / low) / (GRID_POINTS - 1) as f64;
        let grid: Vec<f64> = (0..GRID_POINTS)
            .map(|index| low * libm::exp(step * index as f64))
            .collect();

        let build_member = |(model, &(reuse, rate)): (&StackModel, &(&ReuseTimes, f64))| {
            let misses: Option<Vec<f64>> = grid
                .iter()
                .map(|&grid_value| match replacement {
                    ReplacementModel::Random => {
                        Some(rate * statcache::co_run_miss_ratio(reuse, grid_value / rate, lines)?)
                    }
                    ReplacementModel::Lru => {
                        Some(rate * model.late_reuse_fraction(grid_value * rate))
                    }
                })
                .collect();
            let misses = misses?;
            let demand = match replacement {
                ReplacementModel::Random => misses.clone(),
                ReplacementModel::Lru => grid
                    .iter()
                    .map(|&common| model.lines_in(common * rate))
                    .collect(),
            };
            Some(ComposedMember {
                rate,
                demand,
                misses,
            })
        };

        let members = models
            .iter()
            .zip(threads)
            .map(build_member)
            .collect::<Option<_>>()?;
        Some(ComposedModel {
            members,
            grid,
            lines: (replacement == ReplacementModel::Lru).then_some(lines as f64),
        })
    }

    fn composed_miss_ratio(&self, group: &[usize]) -> f64 {
        let sum_of_members = |table_of: fn(&ComposedMember) -> &Vec<f64>, point: usize| {
            group
                .iter()
                .map(|&index| table_of(&self.members[index])[point])
                .sum::<f64>()
        };
        // The excess is positive below the solution and negative above.
        let excess_at = |point: usize| match self.lines {
            Some(lines) => lines - sum_of_members(|member| &member.demand, point),
            None => sum_of_members(|member| &member.demand, point) - self.grid[point],
        };

        let (mut low, mut high) = (0, GRID_POINTS - 1);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if excess_at(middle) > 0.0 {
                low = middle
            } else {
                high = middle
            }
        }
        let (low_excess, high_excess) = (excess_at(low), excess_at(high));
        let fraction = if low_excess > high_excess {
            (low_excess / (low_excess - high_excess)).clamp(0.0, 1.0)
        } else {
            0.0
        };
        let misses_at = |point: usize| sum_of_members(|member| &member.misses, point);
        let rate_sum: f64 = group.iter().map(|&index| self.members[index].rate).sum();
        (misses_at(low) + fraction * (misses_at(high) - misses_at(low))) / rate_sum
    }
}

/// The rule for how often each qualifying group runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RotationRule {
    /// Every turn starts from the thread with the fewest turns so far.
    Fair,
    /// Every qualifying group runs equally often, in random order.
    Uniform {
        /// Seed of the random walk.
        seed: u64,
    },
}

/// The best group of each thread, with the resulting threshold.
#[derive(Clone, PartialEq, Debug)]
pub struct BestGroups {
    /// Members of the best group of each thread, including the thread.
    pub groups: Vec<Vec<usize>>,
    /// The largest ratio among these groups, in misses per access.
    pub threshold: f64,
}

/// The best group of each thread. `size` is at least 1; a group has at most as many members as there are threads.
pub fn find_best_groups(model: &GroupModel, size: usize) -> BestGroups {
    let groups: Vec<Vec<usize>> = (0..model.thread_count())
        .map(|thread| best_group(model, thread, size))
        .collect();
    let threshold = groups
        .iter()
        .map(|group| model.group_miss_ratio(group))
        .fold(0.0, f64::max);
    BestGroups { groups, threshold }
}

fn best_group(model: &GroupModel, thread: usize, size: usize) -> Vec<usize> {
    let build_group = |ordered_threads: &[usize]| {
        let mut group = vec![thread];
        group.extend(
            ordered_threads
                .iter()
                .copied()
                .filter(|&member| member != thread)
                .take(size - 1),
        );
        group
    };
    let threads_ascending_by = |key: &dyn Fn(usize) -> f64| {
        let mut ordered_threads: Vec<usize> = (0..model.thread_count()).collect();
        ordered_threads.sort_by(|&a, &b| key(a).total_cmp(&key(b)));
        ordered_threads
    };
    let composed_misses = match model {
        GroupModel::Average(ratios) => {
            return build_group(&threads_ascending_by(&|index| ratios[index]));
        }
        GroupModel::Composed(composed) => composed,
    };
    // Groups to start from: the threads with the fewest misses per time or the lowest miss ratio at several points of
    // the grid, and those with the highest rate.
    let mut start_groups = Vec::new();
    for point in [GRID_POINTS / 4, GRID_POINTS / 2, 3 * GRID_POINTS / 4] {
        let misses_of = |at: usize| composed_misses.members[at].misses[point];
        start_groups.push(build_group(&threads_ascending_by(&misses_of)));
        start_groups.push(build_group(&threads_ascending_by(&|index| {
            misses_of(index) / composed_misses.members[index].rate
        })));
    }
    start_groups.push(build_group(&threads_ascending_by(&|index| {
        -composed_misses.members[index].rate
    })));
    let mut best_ratio_and_group: Option<(f64, Vec<usize>)> = None;
    for start in start_groups {
        let (ratio, group) = improve_by_exchanges(model, start);
        if best_ratio_and_group
            .as_ref()
            .is_none_or(|best| ratio < best.0)
        {
            best_ratio_and_group = Some((ratio, group));
        }
    }
    best_ratio_and_group.map_or_else(|| vec![thread], |best| best.1)
}

/// Exchanges one member, but never the first, for another thread, as long as that lowers the ratio; the best exchange
/// comes first.
fn improve_by_exchanges(model: &GroupModel, mut group: Vec<usize>) -> (f64, Vec<usize>) {
    let mut ratio = model.group_miss_ratio(&group);

    loop {
        let mut best_exchange: Option<(f64, usize, usize)> = None;
        for seat in 1..group.len() {
            let previous_member = group[seat];
            for candidate in (0..model.thread_count())
                .filter(|candidate| !group.contains(candidate))
                .collect::<Vec<_>>()
            {
                group[seat] = candidate;
                let new_ratio = model.group_miss_ratio(&group);
                if new_ratio < best_exchange.map_or(ratio * (1.0 - 1e-12), |best| best.0) {
                    best_exchange = Some((new_ratio, seat, candidate));
                }
            }
            group[seat] = previous_member;
        }
        let Some((new_ratio, seat, candidate)) = best_exchange else {
            return (ratio, group);
        };
        group[seat] = candidate;
        ratio = new_ratio;
    }
}

/// The groups that take turns, all at or below the threshold; every thread is in at least one.
pub fn build_rotation(
    model: &GroupModel,
    best_groups: &BestGroups,
    rule: RotationRule,
) -> Vec<Vec<usize>> {
    let threads = model.thread_count();
    let mut turn_counts = vec![0u32; threads];
    let mut groups = match rule {
        RotationRule::Fair => {
            let next_turn = |_| choose_fair_group(model, best_groups, &mut turn_counts);
            (0..threads).map(next_turn).collect::<Vec<_>>()
        }
        RotationRule::Uniform { seed } => walk_randomly(model, best_groups, seed),
    };

    for thread in 0..threads {
        if !groups.iter().any(|group| group.contains(&thread)) {
            groups.push(best_groups.groups[thread].clone());
        }
    }
    groups
}

fn is_qualified(model: &GroupModel, best_groups: &BestGroups, group: &[usize]) -> bool {
    model.group_miss_ratio(group) <= best_groups.threshold * (1.0 + 1e-9)
}

fn choose_fair_group(
    model: &GroupModel,
    best_groups: &BestGroups,
    turn_counts: &mut [u32],
) -> Vec<usize> {
    let mut threads_by_turns: Vec<usize> = (0..turn_counts.len()).collect();
    threads_by_turns.sort_by_key(|&thread| turn_counts[thread]);
    let mut group = best_groups.groups[threads_by_turns[0]].clone();
    for &candidate in &threads_by_turns[1..] {
        if group.contains(&candidate) {
            continue;
        }

        let mut seats: Vec<usize> = (1..group.len())
            .filter(|&seat| turn_counts[group[seat]] > turn_counts[candidate])
            .collect();
        seats.sort_by_key(|&seat| std::cmp::Reverse(turn_counts[group[seat]]));
        for seat in seats {
            let previous_member = std::mem::replace(&mut group[seat], candidate);
            if is_qualified(model, best_groups, &group) {
                break;
            }
            group[seat] = previous_member;
        }
    }

    group.iter().for_each(|&thread| turn_counts[thread] += 1);
    group
}

/// Walks over the qualifying groups at random; because the steps are symmetric, all groups are visited equally often.
fn walk_randomly(model: &GroupModel, best_groups: &BestGroups, seed: u64) -> Vec<Vec<usize>> {
    let mut generator = SplitMix64::new(seed);
    let threads = model.thread_count();
    let mut group = best_groups.groups[0].clone();
    let mut groups = Vec::new();
    for _ in 0..4 * threads {
        for _ in 0..8 * threads {
            let seat = generator.draw_below(group.len() as u64) as usize;
            let candidate = generator.draw_below(threads as u64) as usize;
            if group.contains(&candidate) {
                continue;
            }
            let previous_member = std::mem::replace(&mut group[seat], candidate);
            if !is_qualified(model, best_groups, &group) {
                group[seat] = previous_member;
            }
        }
        groups.push(group.clone());
    }

    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_locality::statcc::{lru_at_rates, random_at_rates};
    use proptest::prelude::*;

    fn groups_of(threads: usize, size: usize) -> Vec<Vec<usize>> {
        let has_size = |set: &u32| set.count_ones() as usize == size;
        let members = |set: u32| (0..threads).filter(|index| set >> index & 1 == 1).collect();
        (0..1u32 << threads).filter(has_size).map(members).collect()
    }

    fn threshold_by_enumeration(model: &GroupModel, size: usize) -> f64 {
        let groups = groups_of(model.thread_count(), size);
        let lowest = |thread: usize| {
            groups
                .iter()
                .filter(|group| group.contains(&thread))
                .map(|group| model.group_miss_ratio(group))
                .fold(f64::INFINITY, f64::min)
        };
        (0..model.thread_count()).map(lowest).fold(0.0, f64::max)
    }

    fn any_reuse() -> impl Strategy<Value = ReuseTimes> {
        (prop::collection::vec((0u32..14, 1u32..50), 1..6), 0u32..20).prop_map(
            |(times, cold_weight)| {
                let mut reuse = ReuseTimes::new();
                times.iter().for_each(|&(log, weight)| {
                    reuse.add_weighted(Some((1 << log) - 1), f64::from(weight))
                });
                reuse.add_weighted(None, f64::from(cold_weight));
                reuse
            },
        )
    }

    fn composed_model(
        threads: &[(ReuseTimes, f64)],
        size: usize,
        lines: u64,
        replacement: ReplacementModel,
    ) -> GroupModel {
        let threads: Vec<(&ReuseTimes, f64)> =
            threads.iter().map(|(reuse, rate)| (reuse, *rate)).collect();
        GroupModel::Composed(ComposedModel::new(&threads, size, lines, replacement).unwrap())
    }

    fn check_rotation(model: &GroupModel, size: usize) -> Result<(), TestCaseError> {
        let best = find_best_groups(model, size);
        for rule in [RotationRule::Fair, RotationRule::Uniform { seed: 3 }] {
            let groups = build_rotation(model, &best, rule);
            for group in &groups {
                let mut members = group.clone();
                members.sort_unstable();
                members.dedup();
                prop_assert_eq!(members.len(), size);
                prop_assert!(model.group_miss_ratio(group) <= best.threshold * (1.0 + 1e-9));
            }
            prop_assert!(
                (0..model.thread_count())
                    .all(|thread| groups.iter().any(|group| group.contains(&thread)))
            );
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        /// Is the average's threshold (largest + n − 1 smallest) / n, as by enumeration?
        #[test]
        fn the_averages_threshold_agrees_with_enumeration(ratios in prop::collection::vec(0.0f64..1.0, 4..9), size in 1usize..5) {
            let model = GroupModel::Average(ratios.clone());
            let threshold = find_best_groups(&model, size).threshold;
            prop_assert!((threshold - threshold_by_enumeration(&model, size)).abs() < 1e-12);
            let mut sorted = ratios;
            sorted.sort_by(f64::total_cmp);
            let closed = (sorted[sorted.len() - 1] + sorted[..size - 1].iter().sum::<f64>()) / size as f64;
            prop_assert!((threshold - closed).abs() < 1e-12);
            check_rotation(&model, size)?;
        }

        /// Does the composed threshold equal the one found by enumeration, although only exchanges are tried?
        #[test]
        fn exchanges_agree_with_enumeration(
            threads in prop::collection::vec((any_reuse(), 0.05f64..2.0), 4..9), size in 2usize..5, lines in 20u64..4000, lru: bool,
        ) {
            let replacement = if lru { ReplacementModel::Lru } else { ReplacementModel::Random };
            let model = composed_model(&threads, size, lines, replacement);
            let (threshold, expected) = (find_best_groups(&model, size).threshold, threshold_by_enumeration(&model, size));
            prop_assert!((threshold - expected).abs() <= 1e-9 * (1.0 + expected), "{threshold} {expected}");
            check_rotation(&model, size)?;
        }

        /// Do the tables agree with the models for a cache that is larger or smaller by at most one step of the grid?
        ///
        /// The ratio falls with the lines, and in jumps if reuse times are a few spikes, so no bound on the difference
        /// at exactly so many lines would hold. Between two neighboring points, the time to fill (or the misses)
        /// changes by one step, which is at most one step in lines.
        #[test]
        fn tables_agree_with_the_models_within_a_step(
            threads in prop::collection::vec((any_reuse(), 0.05f64..2.0), 3), lines in 20u64..4000, lru: bool,
        ) {
            let replacement = if lru { ReplacementModel::Lru } else { ReplacementModel::Random };
            let rates: Vec<(&ReuseTimes, f64)> = threads.iter().map(|(reuse, rate)| (reuse, *rate)).collect();
            let model = composed_model(&threads, 3, lines, replacement);
            let GroupModel::Composed(table) = &model else { unreachable!("composed() composes") };
            let step = table.grid[1] / table.grid[0];
            let exact = |lines: f64| {
                let composition = if lru { lru_at_rates(&rates, lines as u64) } else { random_at_rates(&rates, lines as u64) };
                composition.unwrap().group_miss_ratio
            };
            let ratio = model.group_miss_ratio(&[0, 1, 2]);
            let (larger, smaller) = (exact((lines as f64 * step).ceil() + 1.0), exact((lines as f64 / step).floor() - 1.0));
            prop_assert!(ratio >= larger - 1e-6 && ratio <= smaller + 1e-6, "{ratio} not in {larger}..{smaller}");
        }
    }

    /// Do threads with equal ratios get equal turns, and does a greedy thread get no more than the threshold allows?
    #[test]
    fn threads_with_equal_ratios_get_equal_turns() {
        let turn_counts = |ratios: &[f64], size: usize| {
            let model = GroupModel::Average(ratios.to_vec());
            let groups =
                build_rotation(&model, &find_best_groups(&model, size), RotationRule::Fair);
            let entry = |thread: usize| {
                groups
                    .iter()
                    .filter(|group| group.contains(&thread))
                    .count()
            };
            (0..ratios.len()).map(entry).collect::<Vec<usize>>()
        };
        assert_eq!(turn_counts(&[0.2; 6], 3), [3; 6]);
        let greedy = turn_counts(&[0.9, 0.9, 0.1, 0.1, 0.1, 0.1], 3);
        assert_eq!(
            greedy,
            [3, 3, 3, 3, 3, 3],
            "one greedy thread a group leaves room for all"
        );
        let greedy = turn_counts(&[0.9, 0.9, 0.9, 0.9, 0.1, 0.1], 3);
        assert!(
            greedy[..4].iter().all(|&count| count < greedy[4]),
            "{greedy:?}"
        );
    }

    /// Does the walk visit all qualifying groups about equally often?
    #[test]
    fn the_walk_is_uniform_over_qualifying_groups() {
        let model = GroupModel::Average(vec![0.9, 0.1, 0.1, 0.1, 0.1, 0.1]);
        let best = find_best_groups(&model, 2);
        let mut visits = std::collections::BTreeMap::new();
        for seed in 0..200 {
            for mut group in walk_randomly(&model, &best, seed) {
                group.sort_unstable();
                *visits.entry(group).or_insert(0u32) += 1;
            }
        }
        assert_eq!(visits.len(), 15, "all pairs qualify");
        let (min_visits, max_visits) = (
            visits.values().min().unwrap(),
            visits.values().max().unwrap(),
        );
        assert!(
            f64::from(*min_visits) > 0.75 * f64::from(*max_visits),
            "{visits:?}"
        );
    }
}
