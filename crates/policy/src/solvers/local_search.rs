//! Solves large problems by local search, with a bound on the distance from the optimum.
//!
//! Search: the search starts from one greedy assignment and a few seeded random ones. From each, it exchanges two
//! programs or moves one as long as that helps; the best result counts. The number of sweeps is limited, so the search
//! always ends.
//!
//! The lower bound is the larger of two bounds that hold for every assignment with even loads:
//! - *Each program separately*: a program has at least a certain number of co-runners, and its cost is at least that
//!   beside the cheapest ones (half of each mutual cost is its own).
//! - *Enough neighbors for all*: if all caches are equal, programs and idle turns of CPUs are the nodes of a complete
//!   multipartite graph, in which every node meets the same number D of others. The optimum is therefore no less than
//!   the cheapest choice of pairs in which every node is in D of them (a D-factor; quiet programs cannot be neighbors
//!   of all programs). That is no less than its Lagrangian dual: for any prices u, D Σ u_i plus the sum over pairs of
//!   `min(0, w_ij - u_i - u_j)`. Subgradient steps raise it (Held and Karp); every step's value is a bound. It ignores
//!   that neighbors form whole groups, which accounts for most of its gap.
//!
//! A program that takes turns is met for 1/l of the time; if l may be one of two loads, the bound uses the more
//! favorable one.

use super::{CostMatrix, Seating, Seats, random_seating};
use cachemate_core::SplitMix64;

const RANDOM_STARTS: u64 = 6;
const MAX_SWEEPS: usize = 60;
/// Number of steps of the dual, and ratio of the length of each step to that of the preceding one.
const DUAL_STEPS: i32 = 150;
const SHORTER: f64 = 0.96;
/// Minimum gain of an exchange, above the error of rounding.
const HELPS: f64 = 1e-12;

/// Returns a good seating, whose distance from the optimum [`lower_bound`] bounds.
pub fn solve(costs: &CostMatrix, seats: &Seats) -> Seating {
    let mut starts = vec![seat_greedily(costs, seats)];
    starts.extend((0..RANDOM_STARTS).map(|seed| random_seating(costs.len(), seats, &mut SplitMix64::new(seed))));
    let ends = starts.into_iter().map(|start| {
        let mut climb = HillClimb { costs, by_cache: start.by_cache };
        climb.run(seats);
        Seating { by_cache: climb.by_cache }
    });
    let minimum = ends.map(|end| (end.total_cost(costs), end)).reduce(|a, b| if b.0 < a.0 { b } else { a });
    minimum.expect("there is at least the greedy start").1
}

/// Places the heaviest programs first, each on the CPU with the smallest cost, with even loads.
fn seat_greedily(costs: &CostMatrix, seats: &Seats) -> Seating {
    let by_cache = seats.cpus_per_cache.iter().map(|&cpus| vec![Vec::new(); cpus as usize]).collect();
    let mut climb = HillClimb { costs, by_cache };
    let weight_of = |i: usize| -> f64 { (0..costs.len()).map(|j| costs[i][j] + costs[j][i]).sum() };
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by(|&a, &b| weight_of(b).total_cmp(&weight_of(a)));
    for (placed, program) in order.into_iter().enumerate() {
        let round = placed / seats.cpus();
        let mut cheapest: Option<(f64, usize, usize)> = None;
        for cache in 0..climb.by_cache.len() {
            for cpu in 0..climb.by_cache[cache].len() {
                if climb.by_cache[cache][cpu].len() > round {
                    continue;
                }
                let adds = climb.cost_beside(program, cache, cpu, None);
                if cheapest.is_none_or(|(best, ..)| adds < best) {
                    cheapest = Some((adds, cache, cpu));
                }
            }
        }
        let (_, cache, cpu) = cheapest.expect("a round has a free CPU for each of its programs");
        climb.by_cache[cache][cpu].push(program);
    }
    Seating { by_cache: climb.by_cache }
}

struct HillClimb<'a> {
    costs: &'a CostMatrix,
    by_cache: Vec<Vec<Vec<usize>>>,
}

/// Position of a program: cache, CPU of the cache, and index in the CPU's list.
type SeatPosition = (usize, usize, usize);

impl HillClimb<'_> {
    fn run(&mut self, seats: &Seats) {
        let (min_load, surplus) = seats.min_load_and_surplus(self.costs.len());
        for _ in 0..MAX_SWEEPS {
            let exchanged = self.exchange_all();
            let has_moved = (surplus > 0) && self.move_all(min_load);
            if !exchanged && !has_moved {
                break;
            }
        }
    }

    /// Returns the sum of mutual costs of `program` and the other programs of the cache, except `but`, if it runs on
    /// that CPU.
    fn cost_beside(&self, program: usize, cache: usize, cpu: usize, but: Option<usize>) -> f64 {
        let cpu_groups = &self.by_cache[cache];
        let own_load = cpu_groups[cpu].len().max(1) as f64;
        let other_cpus = cpu_groups.iter().enumerate().filter(|(other, _)| *other != cpu);
        other_cpus
            .flat_map(|(_, members)| members.iter().map(move |&j| (j, members.len() as f64)))
            .filter(|&(j, _)| Some(j) != but && j != program)
            .map(|(j, load)| self.costs[program][j] / load + self.costs[j][program] / own_load)
            .sum()
    }

    fn places(&self) -> Vec<SeatPosition> {
        let cpus =
            self.by_cache.iter().enumerate().flat_map(|(cache, cpus)| (0..cpus.len()).map(move |cpu| (cache, cpu)));
        cpus.flat_map(|(cache, cpu)| (0..self.by_cache[cache][cpu].len()).map(move |position| (cache, cpu, position)))
            .collect()
    }

    fn seat_mut(&mut self, (cache, cpu, at): SeatPosition) -> &mut usize {
        &mut self.by_cache[cache][cpu][at]
    }

    /// Tries all exchanges, and returns whether one helped. Loads stay the same, so only the two programs' own terms
    /// change, unless both are on one cache.
    fn exchange_all(&mut self) -> bool {
        let places = self.places();
        let mut helped = false;
        for (nth, &a) in places.iter().enumerate() {
            for &b in &places[nth + 1..] {
                if (a.0, a.1) == (b.0, b.1) {
                    continue;
                }
                let (i, j) = (*self.seat_mut(a), *self.seat_mut(b));
                let gain = if a.0 == b.0 {
                    let total_before = self.cache_total(a.0);
                    (*self.seat_mut(a), *self.seat_mut(b)) = (j, i);
                    let gain = total_before - self.cache_total(a.0);
                    (*self.seat_mut(a), *self.seat_mut(b)) = (i, j);
                    gain
                } else {
                    let cost_before = self.cost_beside(i, a.0, a.1, None) + self.cost_beside(j, b.0, b.1, None);
                    cost_before - self.cost_beside(i, b.0, b.1, Some(j)) - self.cost_beside(j, a.0, a.1, Some(i))
                };
                if gain > HELPS {
                    (*self.seat_mut(a), *self.seat_mut(b)) = (j, i);
                    helped = true;
                }
            }
        }
        helped
    }

    /// Tries all moves from CPUs with one program more to CPUs with the smallest load, and returns whether one helped.
    fn move_all(&mut self, min_load: usize) -> bool {
        let mut helped = false;
        let cpus: Vec<(usize, usize)> = self
            .by_cache
            .iter()
            .enumerate()
            .flat_map(|(cache, cpus)| (0..cpus.len()).map(move |cpu| (cache, cpu)))
            .collect();
        for &from in &cpus {
            for &to in &cpus {
                let mut position = 0;
                while position < self.by_cache[from.0][from.1].len() {
                    let loads = (self.by_cache[from.0][from.1].len(), self.by_cache[to.0][to.1].len());
                    if from == to || loads != (min_load + 1, min_load) {
                        break;
                    }
                    let program = self.by_cache[from.0][from.1][position];
                    let gain = self.gain_of_move(program, from, to);
                    if gain > HELPS {
                        self.by_cache[from.0][from.1].remove(position);
                        self.by_cache[to.0][to.1].push(program);
                        helped = true;
                    } else {
                        position += 1;
                    }
                }
            }
        }
        helped
    }

    /// Returns the gain of a move, which changes the loads of both CPUs and therefore all costs of their neighbors.
    fn gain_of_move(&mut self, program: usize, from: (usize, usize), to: (usize, usize)) -> f64 {
        if from.0 == to.0 {
            let total_before = self.cache_total(from.0);
            let index = self.by_cache[from.0][from.1].iter().position(|&member| member == program).unwrap_or(0);
            self.by_cache[from.0][from.1].remove(index);
            self.by_cache[to.0][to.1].push(program);
            let gain = total_before - self.cache_total(from.0);
            self.by_cache[to.0][to.1].pop();
            self.by_cache[from.0][from.1].insert(index, program);
            return gain;
        }
        // Cost that one program would cause to a CPU's neighbors if it were alone there.
        let caused_cost = |j: usize, (cache, cpu): (usize, usize)| -> f64 {
            let other_cpus = self.by_cache[cache].iter().enumerate().filter(|(other, _)| *other != cpu);
            other_cpus.flat_map(|(_, members)| members).map(|&k| self.costs[k][j]).sum()
        };
        let felt_cost = |(cache, cpu): (usize, usize)| -> f64 {
            let other_cpus =
                self.by_cache[cache].iter().enumerate().filter(|(other, on)| *other != cpu && !on.is_empty());
            other_cpus.map(|(_, on)| on.iter().map(|&j| self.costs[program][j]).sum::<f64>() / on.len() as f64).sum()
        };
        let total_caused = |place: (usize, usize)| -> (f64, f64) {
            let seated = &self.by_cache[place.0][place.1];
            (seated.iter().map(|&j| caused_cost(j, place)).sum(), seated.len() as f64)
        };
        let cost_per_load = |sum: f64, load: f64| if load > 0.0 { sum / load } else { 0.0 };
        let ((here, load), (there, other_load)) = (total_caused(from), total_caused(to));
        let loss_of_leaving =
            felt_cost(from) + cost_per_load(here, load) - cost_per_load(here - caused_cost(program, from), load - 1.0);
        let joins = felt_cost(to) + cost_per_load(there + caused_cost(program, to), other_load + 1.0)
            - cost_per_load(there, other_load);
        loss_of_leaving - joins
    }

    fn cache_total(&self, cache: usize) -> f64 {
        let cpu_groups = &self.by_cache[cache];
        let mut total = 0.0;
        for (cpu, members) in cpu_groups.iter().enumerate() {
            for (other, neighbors) in cpu_groups.iter().enumerate().filter(|(_, neighbors)| !neighbors.is_empty()) {
                if other != cpu {
                    let felt_cost: f64 =
                        members.iter().flat_map(|&i| neighbors.iter().map(move |&j| self.costs[i][j])).sum();
                    total += felt_cost / neighbors.len() as f64;
                }
            }
        }
        total
    }
}

/// Returns a lower bound of the total of all assignments with even loads.
pub fn lower_bound(costs: &CostMatrix, seats: &Seats) -> f64 {
    let programs = costs.len();
    if programs == 0 || seats.cpus() == 0 {
        return 0.0;
    }
    let (min_load, surplus) = seats.min_load_and_surplus(programs);
    let max_load = min_load + usize::from(surplus > 0);
    let lower_share = |cost: f64| (cost / min_load.max(1) as f64).min(cost / max_load as f64);
    let lower_weight = |i: usize, j: usize| lower_share(costs[i][j]) + lower_share(costs[j][i]);
    let idle = seats.cpus() * max_load - programs;
    let solo_bound = degree_bound(programs, seats, max_load, idle, lower_weight);
    let cpus = seats.cpus_per_cache[0] as usize;
    let are_alike = seats.cpus_per_cache.iter().all(|&cpus_here| cpus_here as usize == cpus);
    let neighbors = (cpus - 1) * max_load;
    if !are_alike || neighbors == 0 || programs + idle <= neighbors {
        return solo_bound;
    }
    let padded_weight = |i: usize, j: usize| if i.max(j) < programs { lower_weight(i, j) } else { 0.0 };
    solo_bound.max(enough_neighbors(programs + idle, neighbors, padded_weight))
}

/// Returns the best dual value found for a choice of pairs in which each of `nodes` nodes is in `degree` of them.
fn enough_neighbors(nodes: usize, degree: usize, weight: impl Fn(usize, usize) -> f64) -> f64 {
    // Lower triangle of the weights: row i contains the pairs of node i with the nodes before it.
    let rows: Vec<Vec<f64>> = (0..nodes).map(|i| (0..i).map(|j| weight(i, j)).collect()).collect();
    let pairs = (nodes * (nodes - 1) / 2) as f64;
    let mean = rows.iter().flatten().sum::<f64>() / pairs;
    let spread = (rows.iter().flatten().map(|w| (w - mean) * (w - mean)).sum::<f64>() / pairs).sqrt();
    let mut prices = vec![0.5 * mean; nodes];
    let (mut best, mut step) = (f64::NEG_INFINITY, spread);
    for _ in 0..DUAL_STEPS {
        let mut value = degree as f64 * prices.iter().sum::<f64>();
        let mut chosen_counts = vec![0u32; nodes];
        for (i, row) in rows.iter().enumerate() {
            for (j, w) in row.iter().enumerate() {
                let reduced = w - prices[i] - prices[j];
                if reduced < 0.0 {
                    value += reduced;
                    chosen_counts[i] += 1;
                    chosen_counts[j] += 1;
                }
            }
        }
        // Rounding of sums must not raise the bound above the true value.
        best = best.max(value - 1e-12 * (value.abs() + pairs * spread));
        for (price, &chosen_count) in prices.iter_mut().zip(&chosen_counts) {
            *price += step * (degree as f64 - f64::from(chosen_count)) / degree as f64;
        }
        step *= SHORTER;
    }
    best
}

fn degree_bound(
    programs: usize,
    seats: &Seats,
    max_load: usize,
    idle: usize,
    weight: impl Fn(usize, usize) -> f64,
) -> f64 {
    let mut shapes = seats.cpus_per_cache.clone();
    shapes.sort_unstable();
    shapes.dedup();
    let shape_cost = |i: usize| {
        let mut weights: Vec<f64> = (0..programs).filter(|&j| j != i).map(|j| weight(i, j)).collect();
        weights.sort_by(f64::total_cmp);
        let on_shape = |&cpus: &u32| {
            let other_cpus = (cpus as usize).saturating_sub(1);
            let min_neighbors = (other_cpus * max_load).saturating_sub(other_cpus.min(idle)).min(weights.len());
            let max_neighbors = (other_cpus * max_load).min(weights.len());
            weights[..min_neighbors].iter().sum::<f64>()
                + weights[min_neighbors..max_neighbors].iter().filter(|cost| **cost < 0.0).sum::<f64>()
        };
        shapes.iter().map(on_shape).fold(f64::INFINITY, f64::min) / 2.0
    };
    (0..programs).map(shape_cost).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// Is the gain of a move the difference of totals before and after it, within a cache and between two caches?
        #[test]
        fn the_gain_of_a_move_is_the_difference_of_totals(
            matrix in prop::collection::vec(prop::collection::vec(-0.5f64..1.0, 9), 9),
            program in 0usize..9,
            to in (0usize..2, 0usize..3),
            seed in any::<u64>(),
        ) {
            let seats = Seats { cpus_per_cache: vec![3, 3] };
            let seating = random_seating(9, &seats, &mut SplitMix64::new(seed));
            let mut climb = HillClimb { costs: &matrix, by_cache: seating.by_cache.clone() };
            let position = |seating: &Seating| {
                let places = (0..2).flat_map(|cache| (0..3).map(move |cpu| (cache, cpu)));
                places.into_iter().find(|&(cache, cpu)| seating.by_cache[cache][cpu].contains(&program)).unwrap()
            };
            let origin = position(&seating);
            prop_assume!(origin != to);
            let gain = climb.gain_of_move(program, origin, to);
            prop_assert_eq!(&climb.by_cache, &seating.by_cache, "trying changes nothing");
            let mut new_seating = seating.clone();
            new_seating.by_cache[origin.0][origin.1].retain(|&member| member != program);
            new_seating.by_cache[to.0][to.1].push(program);
            prop_assert!((gain - (seating.total_cost(&matrix) - new_seating.total_cost(&matrix))).abs() < 1e-9);
        }
    }
}
