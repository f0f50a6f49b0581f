//! The distributed form (which CA 7 left as future work): pairs of bins exchange tasks, without a global sort.
//!
//! The result is close to the central one for the following reason. Two bins a, b with n tasks each differ by d = Σ
//! over any pairing of (i - j). If no exchange brings the sums closer, every i heavier than a j has i - j ≥ d, so d is
//! at most the smallest such gap. With a margin m below which an exchange is not made: either a gap is below m / 2 for
//! all pairs, so d ≤ n m / 2, or d ≤ gap + m / 2. A free CPU adds moves of single tasks; then d is at most the lightest
//! task of the heavier bin, plus m.

use super::{BinLoads, CacheCapacity, SeatQuota, TaskLoad};

/// Returns the pairs of a round, by the circle method: all pairs meet once in `places - 1` rounds (`places` rounds if
/// odd, with one bin pausing in each).
pub(super) fn tournament_pairs(places: usize, round: u64) -> Vec<(usize, usize)> {
    if places < 2 {
        return Vec::new();
    }
    let even = places + places % 2;
    let ring = even - 1;
    let turn = (round % ring as u64) as usize;
    let pairs = (0..even / 2).map(|step| match step {
        0 => (turn, ring),
        _ => ((turn + ring - step) % ring, (turn + step) % ring),
    });
    let mut pairs: Vec<(usize, usize)> = pairs.map(|(a, b)| (a.min(b), a.max(b))).collect();
    pairs.retain(|&(_, b)| b < places);
    pairs
}

/// Runs one round, and returns a bin for every task. An exchange is made if it lowers the difference of the two sums by
/// more than `worth_moving` times their mean. Newcomers go to the lightest bin with a free CPU.
pub fn exchange(places: &[CacheCapacity], pieces: &[TaskLoad], round: u64, worth_moving: f64) -> Vec<usize> {
    let mut bins = settle(places, pieces);
    let rule = SeatQuota::of(places, pieces.len());
    let mut counts = BinLoads::of(places, pieces, &bins).counts;
    for (a, b) in tournament_pairs(places.len(), round) {
        let members = |place: usize| (0..pieces.len()).filter(|&nth| bins[nth] == place).collect::<Vec<usize>>();
        let mut meeting = PairwiseExchange { places, pieces, rule, sides: [(a, members(a)), (b, members(b))] };
        // Every exchange brings at least one of the two tasks closer to its final bin; any further exchanges are due to
        // rounding.
        for _ in 0..2 * pieces.len() {
            if !meeting.improve(&mut counts, worth_moving) {
                break;
            }
        }
        for (place, members) in &meeting.sides {
            members.iter().for_each(|&nth| bins[nth] = *place);
        }
    }
    bins
}

/// Returns a bound of the difference of any two bins with `tasks` tasks each, after all exchanges. `mean_sum` is the
/// greatest mean sum of a pair.
#[cfg(test)]
pub(super) fn max_distance(pieces: &[TaskLoad], tasks: usize, mean_sum: f64, worth_moving: f64) -> f64 {
    let ends = pieces.iter().map(|piece| (piece.weight, piece.weight)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    let range = ends.map_or(0.0, |(lightest, heaviest)| heaviest - lightest);
    let margin = worth_moving * mean_sum;
    (range + margin / 2.0).max(tasks as f64 * margin / 2.0)
}

fn settle(places: &[CacheCapacity], pieces: &[TaskLoad]) -> Vec<usize> {
    let rule = SeatQuota::of(places, pieces.len());
    let mut loads = BinLoads::empty(places);
    for piece in pieces {
        piece.at.iter().for_each(|&place| loads.add(place, piece.weight));
    }
    let mut bins = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let newcomer = || {
            let more_taken = rule.more_taken(places, &loads.counts);
            let lighter = |&a: &usize, &b: &usize| loads.sums[a].total_cmp(&loads.sums[b]);
            let open = (0..places.len()).filter(|&p| rule.has_room(&places[p], loads.counts[p], more_taken));
            open.min_by(lighter).or_else(|| (0..places.len()).min_by_key(|&p| loads.counts[p])).unwrap_or(0)
        };
        let place = piece.at.unwrap_or_else(newcomer);
        if piece.at.is_none() {
            loads.add(place, piece.weight);
        }
        bins.push(place);
    }
    bins
}

/// A meeting of two bins: their tasks and the number of tasks for each CPU, but nothing about the other bins.
struct PairwiseExchange<'a> {
    places: &'a [CacheCapacity],
    pieces: &'a [TaskLoad],
    rule: SeatQuota,
    sides: [(usize, Vec<usize>); 2],
}

impl PairwiseExchange<'_> {
    /// Makes the move or exchange that helps most. Returns false if none is worth it.
    fn improve(&mut self, counts: &mut [usize], worth_moving: f64) -> bool {
        let sum = |side: usize| self.sides[side].1.iter().map(|&nth| self.pieces[nth].weight).sum::<f64>();
        let sums = [sum(0), sum(1)];
        let heavy = usize::from(sums[1] > sums[0]);
        let difference = sums[heavy] - sums[1 - heavy];
        let (from, to) = (self.sides[heavy].0, self.sides[1 - heavy].0);
        if self.levels_load(from, to, counts) {
            return true;
        }
        let free = |side: usize| self.sides[side].1.iter().copied().filter(|&nth| !self.pieces[nth].stuck);
        let seat_free = counts[from] > self.rule.least * self.places[from].seats
            && counts[to] < self.max_threads(to)
            && self.rule.least == 0;
        let weight = |nth: usize| self.pieces[nth].weight;
        let moves = free(heavy).filter(|_| seat_free).map(|i| (weight(i), i, None));
        let (weight, light) = (&weight, 1 - heavy);
        let swaps = free(heavy).flat_map(|i| free(light).map(move |j| (weight(i) - weight(j), i, Some(j))));
        let remaining_gap = |gap: f64| (difference - 2.0 * gap).abs();
        let best = moves
            .chain(swaps)
            .reduce(|best, other| if remaining_gap(other.0) < remaining_gap(best.0) { other } else { best });
        let margin = worth_moving * 0.5 * (sums[0] + sums[1]) + 1e-12 * difference;
        match best.filter(|&(gap, ..)| difference - remaining_gap(gap) > margin) {
            None => false,
            Some((_, out, back)) => {
                self.pass(heavy, out, counts);
                back.iter().for_each(|&back| self.pass(1 - heavy, back, counts));
                true
            }
        }
    }

    fn max_threads(&self, place: usize) -> usize {
        (self.rule.least + usize::from(self.rule.more > 0)) * self.places[place].seats
    }

    /// Counts come before weights: a bin beyond its quota gives a task to a bin below it.
    fn levels_load(&mut self, a: usize, b: usize, counts: &mut [usize]) -> bool {
        let minimum = |place: usize| self.rule.least * self.places[place].seats;
        let gives = |from: usize, to: usize| {
            (counts[from] > self.max_threads(from) && counts[to] < self.max_threads(to))
                || (counts[to] < minimum(to) && counts[from] > minimum(from))
        };
        let Some(from) = [(a, b), (b, a)].into_iter().find(|&(from, to)| gives(from, to)).map(|(from, _)| from) else {
            return false;
        };
        let side = usize::from(self.sides[1].0 == from);
        let movable = self.sides[side].1.iter().copied().filter(|&nth| !self.pieces[nth].stuck);
        let lightest = movable.reduce(|a, b| if self.pieces[b].weight < self.pieces[a].weight { b } else { a });
        lightest.iter().for_each(|&nth| self.pass(side, nth, counts));
        lightest.is_some()
    }

    fn pass(&mut self, side: usize, nth: usize, counts: &mut [usize]) {
        self.sides[side].1.retain(|&other| other != nth);
        self.sides[1 - side].1.push(nth);
        counts[self.sides[side].0] -= 1;
        counts[self.sides[1 - side].0] += 1;
    }
}
