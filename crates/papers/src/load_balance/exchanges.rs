//! The distributed form, in which pairs of bins exchange tasks without a global sort. CA 7 left it as future work.
//!
//! The result is close to the central one for the following reason. Two bins a, b with n tasks each differ by d = Σ
//! over any pairing of (i - j). If no exchange brings the sums closer, every i heavier than a j has i - j ≥ d, so d is
//! at most the smallest such gap. With a margin m below which an exchange is not made, either a gap is below m / 2 for
//! all pairs, so d ≤ n m / 2, or d ≤ gap + m / 2. A free CPU adds moves of single tasks; then d is at most the lightest
//! task of the heavier bin, plus m.

use super::{BinLoads, CacheCapacity, TaskLoad, TaskQuota};

/// The pairs of a round, by the circle method. All pairs meet once in `bin_count - 1` rounds; with an odd number of
/// bins, one of them pauses in each of `bin_count` rounds.
pub(super) fn tournament_pairs(bin_count: usize, round: u64) -> Vec<(usize, usize)> {
    if bin_count < 2 {
        return Vec::new();
    }
    let slot_count = bin_count + bin_count % 2;
    let ring_size = slot_count - 1;
    let fixed_partner = (round % ring_size as u64) as usize;
    let pairs = (0..slot_count / 2).map(|step| match step {
        0 => (fixed_partner, ring_size),
        _ => (
            (fixed_partner + ring_size - step) % ring_size,
            (fixed_partner + step) % ring_size,
        ),
    });
    let mut pairs: Vec<(usize, usize)> = pairs.map(|(a, b)| (a.min(b), a.max(b))).collect();
    pairs.retain(|&(_, b)| b < bin_count);
    pairs
}

/// Runs one round, and returns a bin for every task. An exchange is made if it lowers the difference of the two sums by
/// more than `min_gain` times their mean. New tasks go to the lightest bin with a free CPU.
pub fn exchange(
    capacities: &[CacheCapacity],
    task_loads: &[TaskLoad],
    round: u64,
    min_gain: f64,
) -> Vec<usize> {
    let mut bins = assign_initial_bins(capacities, task_loads);
    let quota = TaskQuota::for_tasks(capacities, task_loads.len());
    let mut counts = BinLoads::from_bins(capacities, task_loads, &bins).counts;
    for (a, b) in tournament_pairs(capacities.len(), round) {
        let tasks_in_bin = |bin: usize| {
            (0..task_loads.len())
                .filter(|&task_index| bins[task_index] == bin)
                .collect::<Vec<usize>>()
        };
        let mut pair_exchange = PairwiseExchange {
            capacities,
            task_loads,
            quota,
            sides: [(a, tasks_in_bin(a)), (b, tasks_in_bin(b))],
        };

        // Every exchange brings at least one of the two tasks closer to its final bin; any further exchanges are due to
        // rounding.
        for _ in 0..2 * task_loads.len() {
            if !pair_exchange.apply_best_exchange(&mut counts, min_gain) {
                break;
            }
        }

        for (bin, members) in &pair_exchange.sides {
            members
                .iter()
                .for_each(|&task_index| bins[task_index] = *bin);
        }
    }

    bins
}

/// A bound of the difference of any two bins with `tasks` tasks each, after all exchanges. `mean_sum` is the largest
/// mean sum of a pair.
#[cfg(test)]
pub(super) fn max_distance(
    task_loads: &[TaskLoad],
    tasks: usize,
    mean_sum: f64,
    min_gain: f64,
) -> f64 {
    let weight_range = task_loads
        .iter()
        .map(|task_load| (task_load.weight, task_load.weight))
        .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    let range = weight_range.map_or(0.0, |(lightest, heaviest)| heaviest - lightest);
    let margin = min_gain * mean_sum;
    (range + margin / 2.0).max(tasks as f64 * margin / 2.0)
}

fn assign_initial_bins(capacities: &[CacheCapacity], task_loads: &[TaskLoad]) -> Vec<usize> {
    let quota = TaskQuota::for_tasks(capacities, task_loads.len());
    let mut loads = BinLoads::without_tasks(capacities);
    for task_load in task_loads {
        task_load
            .current_bin
            .iter()
            .for_each(|&bin| loads.add(bin, task_load.weight));
    }

    let mut bins = Vec::with_capacity(task_loads.len());
    for task_load in task_loads {
        let bin_for_newcomer = || {
            let extra_tasks = quota.count_extra_tasks(capacities, &loads.counts);
            let compare_sums = |&a: &usize, &b: &usize| loads.sums[a].total_cmp(&loads.sums[b]);
            let open_bins = (0..capacities.len())
                .filter(|&p| quota.has_room(&capacities[p], loads.counts[p], extra_tasks));
            open_bins
                .min_by(compare_sums)
                .or_else(|| (0..capacities.len()).min_by_key(|&p| loads.counts[p]))
                .unwrap_or(0)
        };
        let bin = task_load.current_bin.unwrap_or_else(bin_for_newcomer);
        if task_load.current_bin.is_none() {
            loads.add(bin, task_load.weight);
        }
        bins.push(bin);
    }
    bins
}

/// Two bins that exchange tasks: their tasks and their tasks per CPU, but nothing about the other bins.
struct PairwiseExchange<'a> {
    capacities: &'a [CacheCapacity],
    task_loads: &'a [TaskLoad],
    quota: TaskQuota,
    sides: [(usize, Vec<usize>); 2],
}

impl PairwiseExchange<'_> {
    /// Makes the best move or exchange. Returns `false` if none is worth it.
    fn apply_best_exchange(&mut self, counts: &mut [usize], min_gain: f64) -> bool {
        let sum_of_side = |side: usize| {
            self.sides[side]
                .1
                .iter()
                .map(|&task_index| self.task_loads[task_index].weight)
                .sum::<f64>()
        };
        let sums = [sum_of_side(0), sum_of_side(1)];
        let heavy_side = usize::from(sums[1] > sums[0]);
        let difference = sums[heavy_side] - sums[1 - heavy_side];
        let (source, target) = (self.sides[heavy_side].0, self.sides[1 - heavy_side].0);
        if self.move_to_meet_quota(source, target, counts) {
            return true;
        }

        let movable_tasks = |side: usize| {
            self.sides[side]
                .1
                .iter()
                .copied()
                .filter(|&task_index| !self.task_loads[task_index].is_unmovable)
        };
        let has_free_seat = counts[source]
            > self.quota.min_tasks_per_cpu * self.capacities[source].cpus
            && counts[target] < self.max_tasks(target)
            && self.quota.min_tasks_per_cpu == 0;

        let weight_of = |task_index: usize| self.task_loads[task_index].weight;
        let moves = movable_tasks(heavy_side)
            .filter(|_| has_free_seat)
            .map(|i| (weight_of(i), i, None));
        let (weight, light_side) = (&weight_of, 1 - heavy_side);
        let swaps = movable_tasks(heavy_side).flat_map(|i| {
            movable_tasks(light_side).map(move |j| (weight(i) - weight(j), i, Some(j)))
        });

        let remaining_gap = |gap: f64| (difference - 2.0 * gap).abs();
        let best_change = moves.chain(swaps).reduce(|best, candidate| {
            if remaining_gap(candidate.0) < remaining_gap(best.0) {
                candidate
            } else {
                best
            }
        });

        let margin = min_gain * 0.5 * (sums[0] + sums[1]) + 1e-12 * difference;
        match best_change.filter(|&(gap, ..)| difference - remaining_gap(gap) > margin) {
            None => false,
            Some((_, moved_task, swapped_task)) => {
                self.move_to_other_side(heavy_side, moved_task, counts);
                swapped_task.iter().for_each(|&returned_task| {
                    self.move_to_other_side(1 - heavy_side, returned_task, counts)
                });
                true
            }
        }
    }

    fn max_tasks(&self, bin: usize) -> usize {
        (self.quota.min_tasks_per_cpu + usize::from(self.quota.surplus_cpus > 0))
            * self.capacities[bin].cpus
    }

    /// Moves a task from a bin beyond its quota to a bin below it, because counts come before weights; returns whether
    /// it did.
    fn move_to_meet_quota(&mut self, a: usize, b: usize, counts: &mut [usize]) -> bool {
        let min_tasks_of = |bin: usize| self.quota.min_tasks_per_cpu * self.capacities[bin].cpus;
        let can_give = |source: usize, target: usize| {
            (counts[source] > self.max_tasks(source) && counts[target] < self.max_tasks(target))
                || (counts[target] < min_tasks_of(target) && counts[source] > min_tasks_of(source))
        };
        let Some(source) = [(a, b), (b, a)]
            .into_iter()
            .find(|&(source, target)| can_give(source, target))
            .map(|(source, _)| source)
        else {
            return false;
        };

        let side = usize::from(self.sides[1].0 == source);
        let movable_tasks = self.sides[side]
            .1
            .iter()
            .copied()
            .filter(|&task_index| !self.task_loads[task_index].is_unmovable);
        let lightest_task = movable_tasks.reduce(|a, b| {
            if self.task_loads[b].weight < self.task_loads[a].weight {
                b
            } else {
                a
            }
        });
        lightest_task
            .iter()
            .for_each(|&task_index| self.move_to_other_side(side, task_index, counts));
        lightest_task.is_some()
    }

    fn move_to_other_side(&mut self, side: usize, task_index: usize, counts: &mut [usize]) {
        self.sides[side].1.retain(|&member| member != task_index);
        self.sides[1 - side].1.push(task_index);
        counts[self.sides[side].0] -= 1;
        counts[self.sides[1 - side].0] += 1;
    }
}
