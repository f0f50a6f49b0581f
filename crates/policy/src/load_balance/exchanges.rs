//! The distributed form (which CA 7 left as future work), in which pairs of bins exchange tasks, without a global sort.
//!
//! The result is close to the central one for the following reason. Two bins a, b with n tasks each differ by d = Σ
//! over any pairing of (i - j). If no exchange brings the sums closer, every i heavier than a j has i - j ≥ d, so d is
//! at most the smallest such gap. With a margin m below which an exchange is not made, either a gap is below m / 2 for
//! all pairs, so d ≤ n m / 2, or d ≤ gap + m / 2. A free CPU adds moves of single tasks; then d is at most the lightest
//! task of the heavier bin, plus m.

use super::{BinLoads, CacheCapacity, TaskLoad, TaskQuota};

/// Returns the pairs of a round, by the circle method. All pairs meet once in `bin_count - 1` rounds; with an odd number
/// of bins, one of them pauses in each of `bin_count` rounds.
pub(super) fn tournament_pairs(bin_count: usize, round: u64) -> Vec<(usize, usize)> {
    if bin_count < 2 {
        return Vec::new();
    }
    let even = bin_count + bin_count % 2;
    let ring = even - 1;
    let turn = (round % ring as u64) as usize;
    let pairs = (0..even / 2).map(|step| match step {
        0 => (turn, ring),
        _ => ((turn + ring - step) % ring, (turn + step) % ring),
    });
    let mut pairs: Vec<(usize, usize)> = pairs.map(|(a, b)| (a.min(b), a.max(b))).collect();
    pairs.retain(|&(_, b)| b < bin_count);
    pairs
}

/// Runs one round, and returns a bin for every task. An exchange is made if it lowers the difference of the two sums by
/// more than `worth_moving` times their mean. New tasks go to the lightest bin with a free CPU.
pub fn exchange(capacities: &[CacheCapacity], task_loads: &[TaskLoad], round: u64, worth_moving: f64) -> Vec<usize> {
    let mut bins = settle(capacities, task_loads);
    let quota = TaskQuota::for_tasks(capacities, task_loads.len());
    let mut counts = BinLoads::from_bins(capacities, task_loads, &bins).counts;
    for (a, b) in tournament_pairs(capacities.len(), round) {
        let tasks_in_bin = |bin: usize| (0..task_loads.len()).filter(|&nth| bins[nth] == bin).collect::<Vec<usize>>();
        let mut meeting =
            PairwiseExchange { capacities, task_loads, quota, sides: [(a, tasks_in_bin(a)), (b, tasks_in_bin(b))] };
        // Every exchange brings at least one of the two tasks closer to its final bin; any further exchanges are due to
        // rounding.
        for _ in 0..2 * task_loads.len() {
            if !meeting.improve(&mut counts, worth_moving) {
                break;
            }
        }
        for (bin, members) in &meeting.sides {
            members.iter().for_each(|&nth| bins[nth] = *bin);
        }
    }
    bins
}

/// Returns a bound of the difference of any two bins with `tasks` tasks each, after all exchanges. `mean_sum` is the
/// largest mean sum of a pair.
#[cfg(test)]
pub(super) fn max_distance(task_loads: &[TaskLoad], tasks: usize, mean_sum: f64, worth_moving: f64) -> f64 {
    let ends = task_loads
        .iter()
        .map(|task_load| (task_load.weight, task_load.weight))
        .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    let range = ends.map_or(0.0, |(lightest, heaviest)| heaviest - lightest);
    let margin = worth_moving * mean_sum;
    (range + margin / 2.0).max(tasks as f64 * margin / 2.0)
}

fn settle(capacities: &[CacheCapacity], task_loads: &[TaskLoad]) -> Vec<usize> {
    let quota = TaskQuota::for_tasks(capacities, task_loads.len());
    let mut loads = BinLoads::without_tasks(capacities);
    for task_load in task_loads {
        task_load.current_bin.iter().for_each(|&bin| loads.add(bin, task_load.weight));
    }
    let mut bins = Vec::with_capacity(task_loads.len());
    for task_load in task_loads {
        let bin_for_newcomer = || {
            let more_taken = quota.more_taken(capacities, &loads.counts);
            let compare_sums = |&a: &usize, &b: &usize| loads.sums[a].total_cmp(&loads.sums[b]);
            let open = (0..capacities.len()).filter(|&p| quota.has_room(&capacities[p], loads.counts[p], more_taken));
            open.min_by(compare_sums).or_else(|| (0..capacities.len()).min_by_key(|&p| loads.counts[p])).unwrap_or(0)
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
    fn improve(&mut self, counts: &mut [usize], worth_moving: f64) -> bool {
        let sum_of_side = |side: usize| self.sides[side].1.iter().map(|&nth| self.task_loads[nth].weight).sum::<f64>();
        let sums = [sum_of_side(0), sum_of_side(1)];
        let heavy = usize::from(sums[1] > sums[0]);
        let difference = sums[heavy] - sums[1 - heavy];
        let (source, target) = (self.sides[heavy].0, self.sides[1 - heavy].0);
        if self.level_counts(source, target, counts) {
            return true;
        }
        let movable_tasks = |side: usize| self.sides[side].1.iter().copied().filter(|&nth| !self.task_loads[nth].stuck);
        let seat_free = counts[source] > self.quota.min_tasks * self.capacities[source].cpus
            && counts[target] < self.max_tasks(target)
            && self.quota.min_tasks == 0;
        let weight_of = |nth: usize| self.task_loads[nth].weight;
        let moves = movable_tasks(heavy).filter(|_| seat_free).map(|i| (weight_of(i), i, None));
        let (weight, light) = (&weight_of, 1 - heavy);
        let swaps =
            movable_tasks(heavy).flat_map(|i| movable_tasks(light).map(move |j| (weight(i) - weight(j), i, Some(j))));
        let remaining_gap = |gap: f64| (difference - 2.0 * gap).abs();
        let best = moves.chain(swaps).reduce(|best, candidate| {
            if remaining_gap(candidate.0) < remaining_gap(best.0) { candidate } else { best }
        });
        let margin = worth_moving * 0.5 * (sums[0] + sums[1]) + 1e-12 * difference;
        match best.filter(|&(gap, ..)| difference - remaining_gap(gap) > margin) {
            None => false,
            Some((_, out, back)) => {
                self.move_to_other_side(heavy, out, counts);
                back.iter().for_each(|&returned_task| self.move_to_other_side(1 - heavy, returned_task, counts));
                true
            }
        }
    }

    fn max_tasks(&self, bin: usize) -> usize {
        (self.quota.min_tasks + usize::from(self.quota.surplus > 0)) * self.capacities[bin].cpus
    }

    /// Moves a task from a bin beyond its quota to a bin below it, because counts come before weights; returns whether
    /// it did.
    fn level_counts(&mut self, a: usize, b: usize, counts: &mut [usize]) -> bool {
        let min_tasks_of = |bin: usize| self.quota.min_tasks * self.capacities[bin].cpus;
        let can_give = |source: usize, target: usize| {
            (counts[source] > self.max_tasks(source) && counts[target] < self.max_tasks(target))
                || (counts[target] < min_tasks_of(target) && counts[source] > min_tasks_of(source))
        };
        let Some(source) =
            [(a, b), (b, a)].into_iter().find(|&(source, target)| can_give(source, target)).map(|(source, _)| source)
        else {
            return false;
        };
        let side = usize::from(self.sides[1].0 == source);
        let movable = self.sides[side].1.iter().copied().filter(|&nth| !self.task_loads[nth].stuck);
        let lightest = movable.reduce(|a, b| if self.task_loads[b].weight < self.task_loads[a].weight { b } else { a });
        lightest.iter().for_each(|&nth| self.move_to_other_side(side, nth, counts));
        lightest.is_some()
    }

    fn move_to_other_side(&mut self, side: usize, nth: usize, counts: &mut [usize]) {
        self.sides[side].1.retain(|&member| member != nth);
        self.sides[1 - side].1.push(nth);
        counts[self.sides[side].0] -= 1;
        counts[self.sides[1 - side].0] += 1;
    }
}
