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

/// Number of random start seatings.
const RANDOM_STARTS: u64 = 6;
/// Maximum number of sweeps over all exchanges and moves from one start.
const MAX_SWEEPS: usize = 60;
/// Number of subgradient steps of the dual.
const DUAL_STEPS: i32 = 150;
/// Factor of the step length from one step to the next.
const STEP_DECAY: f64 = 0.96;
/// Minimum gain of an exchange, above the error of rounding.
const MIN_EXCHANGE_GAIN: f64 = 1e-12;

/// A good seating, whose distance from the optimum [`lower_bound`] bounds.
pub fn solve(costs: &CostMatrix, seats: &Seats) -> Seating {
    let mut starts = vec![seat_greedily(costs, seats)];
    starts.extend(
        (0..RANDOM_STARTS)
            .map(|seed| random_seating(costs.len(), seats, &mut SplitMix64::new(seed))),
    );
    let local_optima = starts.into_iter().map(|start| {
        let mut climb = HillClimb {
            costs,
            programs_by_cache: start.by_cache,
        };
        climb.improve_until_stuck(seats);
        Seating {
            by_cache: climb.programs_by_cache,
        }
    });
    let minimum = local_optima
        .map(|local_optimum| (local_optimum.total_cost(costs), local_optimum))
        .reduce(|a, b| if b.0 < a.0 { b } else { a });
    minimum.expect("there is at least the greedy start").1
}

/// Places the heaviest programs first, each on the CPU with the smallest cost, with even loads.
fn seat_greedily(costs: &CostMatrix, seats: &Seats) -> Seating {
    let mut climb = HillClimb {
        costs,
        programs_by_cache: seats.empty_seating().by_cache,
    };
    let weight_of = |i: usize| -> f64 { (0..costs.len()).map(|j| costs[i][j] + costs[j][i]).sum() };
    let mut ordered_programs: Vec<usize> = (0..costs.len()).collect();
    ordered_programs.sort_by(|&a, &b| weight_of(b).total_cmp(&weight_of(a)));

    for (placed_count, program) in ordered_programs.into_iter().enumerate() {
        let round = placed_count / seats.cpus();
        let free_cpus = climb.all_cpus().into_iter();
        let free_cpus =
            free_cpus.filter(|&(cache, cpu)| climb.programs_by_cache[cache][cpu].len() <= round);
        let (_, (cache, cpu)) = free_cpus
            .map(|(cache, cpu)| (climb.cost_beside(program, cache, cpu, None), (cache, cpu)))
            .reduce(|a, b| if b.0 < a.0 { b } else { a })
            .expect("a round has a free CPU for each of its programs");
        climb.programs_by_cache[cache][cpu].push(program);
    }

    Seating {
        by_cache: climb.programs_by_cache,
    }
}

struct HillClimb<'a> {
    costs: &'a CostMatrix,
    programs_by_cache: Vec<Vec<Vec<usize>>>,
}

/// Position of a program: cache, CPU of the cache, and index in the CPU's list.
type SeatPosition = (usize, usize, usize);

impl HillClimb<'_> {
    fn improve_until_stuck(&mut self, seats: &Seats) {
        let (min_load, surplus) = seats.min_load_and_surplus(self.costs.len());
        for _ in 0..MAX_SWEEPS {
            let has_exchanged = self.try_all_exchanges();
            let has_moved = (surplus > 0) && self.try_all_moves(min_load);
            if !has_exchanged && !has_moved {
                break;
            }
        }
    }

    /// The sum of the mutual costs of `program` and the other programs of the cache, except `excluded_program`, if
    /// `program` runs on that CPU.
    fn cost_beside(
        &self,
        program: usize,
        cache: usize,
        cpu: usize,
        excluded_program: Option<usize>,
    ) -> f64 {
        let cpu_groups = &self.programs_by_cache[cache];
        let own_load = cpu_groups[cpu].len().max(1) as f64;
        let other_cpus = cpu_groups
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != cpu);
        other_cpus
            .flat_map(|(_, members)| members.iter().map(move |&j| (j, members.len() as f64)))
            .filter(|&(j, _)| Some(j) != excluded_program && j != program)
            .map(|(j, load)| self.costs[program][j] / load + self.costs[j][program] / own_load)
            .sum()
    }

    /// The CPUs, each as its cache and its position there.
    fn all_cpus(&self) -> Vec<(usize, usize)> {
        let caches = self.programs_by_cache.iter().enumerate();
        caches
            .flat_map(|(cache, cpus)| (0..cpus.len()).map(move |cpu| (cache, cpu)))
            .collect()
    }

    fn all_positions(&self) -> Vec<SeatPosition> {
        let positions_of = |(cache, cpu): (usize, usize)| {
            (0..self.programs_by_cache[cache][cpu].len())
                .map(move |position| (cache, cpu, position))
        };
        self.all_cpus().into_iter().flat_map(positions_of).collect()
    }

    fn seat_mut(&mut self, (cache, cpu, index): SeatPosition) -> &mut usize {
        &mut self.programs_by_cache[cache][cpu][index]
    }

    /// Tries all exchanges, and returns whether one helped. Loads stay the same, so only the two programs' own terms
    /// change, unless both are on one cache.
    fn try_all_exchanges(&mut self) -> bool {
        let positions = self.all_positions();
        let mut has_improved = false;
        for (index, &a) in positions.iter().enumerate() {
            for &b in &positions[index + 1..] {
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
                    let cost_before =
                        self.cost_beside(i, a.0, a.1, None) + self.cost_beside(j, b.0, b.1, None);
                    cost_before
                        - self.cost_beside(i, b.0, b.1, Some(j))
                        - self.cost_beside(j, a.0, a.1, Some(i))
                };
                if gain > MIN_EXCHANGE_GAIN {
                    (*self.seat_mut(a), *self.seat_mut(b)) = (j, i);
                    has_improved = true;
                }
            }
        }

        has_improved
    }

    /// Tries all moves from CPUs with one program more to CPUs with the smallest load, and returns whether one helped.
    fn try_all_moves(&mut self, min_load: usize) -> bool {
        let mut has_improved = false;
        let cpus = self.all_cpus();
        for &source_cpu in &cpus {
            for &target_cpu in &cpus {
                let mut position = 0;
                while position < self.programs_by_cache[source_cpu.0][source_cpu.1].len() {
                    let loads = (
                        self.programs_by_cache[source_cpu.0][source_cpu.1].len(),
                        self.programs_by_cache[target_cpu.0][target_cpu.1].len(),
                    );
                    if source_cpu == target_cpu || loads != (min_load + 1, min_load) {
                        break;
                    }
                    let program = self.programs_by_cache[source_cpu.0][source_cpu.1][position];
                    let gain = self.gain_of_move(program, source_cpu, target_cpu);
                    if gain > MIN_EXCHANGE_GAIN {
                        self.programs_by_cache[source_cpu.0][source_cpu.1].remove(position);
                        self.programs_by_cache[target_cpu.0][target_cpu.1].push(program);
                        has_improved = true;
                    } else {
                        position += 1;
                    }
                }
            }
        }
        has_improved
    }

    /// The gain of a move, which changes the loads of both CPUs and therefore all costs of their neighbors.
    fn gain_of_move(
        &mut self,
        program: usize,
        source: (usize, usize),
        target: (usize, usize),
    ) -> f64 {
        if source.0 == target.0 {
            let total_before = self.cache_total(source.0);
            let index = self.programs_by_cache[source.0][source.1]
                .iter()
                .position(|&member| member == program)
                .unwrap_or(0);
            self.programs_by_cache[source.0][source.1].remove(index);
            self.programs_by_cache[target.0][target.1].push(program);
            let gain = total_before - self.cache_total(source.0);
            self.programs_by_cache[target.0][target.1].pop();
            self.programs_by_cache[source.0][source.1].insert(index, program);
            return gain;
        }

        // Cost that one program would cause to a CPU's neighbors if it were alone there.
        let caused_cost = |j: usize, (cache, cpu): (usize, usize)| -> f64 {
            let other_cpus = self.programs_by_cache[cache]
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != cpu);
            other_cpus
                .flat_map(|(_, members)| members)
                .map(|&k| self.costs[k][j])
                .sum()
        };

        let incurred_cost = |(cache, cpu): (usize, usize)| -> f64 {
            let other_cpus = self.programs_by_cache[cache]
                .iter()
                .enumerate()
                .filter(|(other, programs_on_cpu)| *other != cpu && !programs_on_cpu.is_empty());
            other_cpus
                .map(|(_, on)| {
                    on.iter().map(|&j| self.costs[program][j]).sum::<f64>() / on.len() as f64
                })
                .sum()
        };

        let caused_cost_and_load = |location: (usize, usize)| -> (f64, f64) {
            let members = &self.programs_by_cache[location.0][location.1];
            (
                members.iter().map(|&j| caused_cost(j, location)).sum(),
                members.len() as f64,
            )
        };

        let cost_per_load = |sum: f64, load: f64| if load > 0.0 { sum / load } else { 0.0 };
        let ((source_cost, load), (target_cost, other_load)) =
            (caused_cost_and_load(source), caused_cost_and_load(target));
        let saving_of_leaving = incurred_cost(source) + cost_per_load(source_cost, load)
            - cost_per_load(source_cost - caused_cost(program, source), load - 1.0);
        let cost_of_joining = incurred_cost(target)
            + cost_per_load(target_cost + caused_cost(program, target), other_load + 1.0)
            - cost_per_load(target_cost, other_load);
        saving_of_leaving - cost_of_joining
    }

    fn cache_total(&self, cache: usize) -> f64 {
        let cpu_groups = &self.programs_by_cache[cache];
        let mut total = 0.0;
        for (cpu, members) in cpu_groups.iter().enumerate() {
            for (other, neighbors) in cpu_groups
                .iter()
                .enumerate()
                .filter(|(_, neighbors)| !neighbors.is_empty())
            {
                if other != cpu {
                    let incurred_cost: f64 = members
                        .iter()
                        .flat_map(|&i| neighbors.iter().map(move |&j| self.costs[i][j]))
                        .sum();
                    total += incurred_cost / neighbors.len() as f64;
                }
            }
        }
        total
    }
}

/// A lower bound of the total of all assignments with even loads.
pub fn lower_bound(costs: &CostMatrix, seats: &Seats) -> f64 {
    let programs = costs.len();
    if programs == 0 || seats.cpus() == 0 {
        return 0.0;
    }

    let (min_load, surplus) = seats.min_load_and_surplus(programs);
    let max_load = min_load + usize::from(surplus > 0);
    let lower_share = |cost: f64| (cost / min_load.max(1) as f64).min(cost / max_load as f64);
    let lower_weight = |i: usize, j: usize| lower_share(costs[i][j]) + lower_share(costs[j][i]);
    let idle_seats = seats.cpus() * max_load - programs;
    let solo_bound = degree_bound(programs, seats, max_load, idle_seats, lower_weight);
    let cpus = seats.cpus_per_cache[0] as usize;
    let are_equal_caches = seats
        .cpus_per_cache
        .iter()
        .all(|&cpus_here| cpus_here as usize == cpus);
    let neighbor_count = (cpus - 1) * max_load;
    if !are_equal_caches || neighbor_count == 0 || programs + idle_seats <= neighbor_count {
        return solo_bound;
    }

    let padded_weight = |i: usize, j: usize| {
        if i.max(j) < programs {
            lower_weight(i, j)
        } else {
            0.0
        }
    };
    solo_bound.max(neighbor_bound(
        programs + idle_seats,
        neighbor_count,
        padded_weight,
    ))
}

/// The best dual value found for the cheapest choice of pairs in which each of `node_count` nodes is in `degree` pairs.
fn neighbor_bound(node_count: usize, degree: usize, weight: impl Fn(usize, usize) -> f64) -> f64 {
    // Lower triangle of the weights: row i contains the pairs of node i with the nodes before it.
    let rows: Vec<Vec<f64>> = (0..node_count)
        .map(|i| (0..i).map(|j| weight(i, j)).collect())
        .collect();
    let pairs = (node_count * (node_count - 1) / 2) as f64;
    let mean = rows.iter().flatten().sum::<f64>() / pairs;
    let spread = (rows
        .iter()
        .flatten()
        .map(|w| (w - mean) * (w - mean))
        .sum::<f64>()
        / pairs)
        .sqrt();

    let mut prices = vec![0.5 * mean; node_count];
    let (mut best_gain, mut step) = (f64::NEG_INFINITY, spread);
    for _ in 0..DUAL_STEPS {
        let mut dual_value = degree as f64 * prices.iter().sum::<f64>();
        let mut chosen_counts = vec![0u32; node_count];
        for (i, row) in rows.iter().enumerate() {
            for (j, w) in row.iter().enumerate() {
                let reduced_weight = w - prices[i] - prices[j];
                if reduced_weight < 0.0 {
                    dual_value += reduced_weight;
                    chosen_counts[i] += 1;
                    chosen_counts[j] += 1;
                }
            }
        }

        // Rounding of sums must not raise the bound above the true value.
        best_gain = best_gain.max(dual_value - 1e-12 * (dual_value.abs() + pairs * spread));
        for (price, &chosen_count) in prices.iter_mut().zip(&chosen_counts) {
            *price += step * (degree as f64 - f64::from(chosen_count)) / degree as f64;
        }
        step *= STEP_DECAY;
    }
    best_gain
}

fn degree_bound(
    programs: usize,
    seats: &Seats,
    max_load: usize,
    idle_seats: usize,
    weight: impl Fn(usize, usize) -> f64,
) -> f64 {
    let mut shapes = seats.cpus_per_cache.clone();
    shapes.sort_unstable();
    shapes.dedup();

    let min_program_cost = |i: usize| {
        let mut weights: Vec<f64> = (0..programs)
            .filter(|&j| j != i)
            .map(|j| weight(i, j))
            .collect();
        weights.sort_by(f64::total_cmp);
        let bound_on_shape = |&cpus: &u32| {
            let other_cpus = (cpus as usize).saturating_sub(1);
            let min_neighbors = (other_cpus * max_load)
                .saturating_sub(other_cpus.min(idle_seats))
                .min(weights.len());
            let max_neighbors = (other_cpus * max_load).min(weights.len());
            weights[..min_neighbors].iter().sum::<f64>()
                + weights[min_neighbors..max_neighbors]
                    .iter()
                    .filter(|cost| **cost < 0.0)
                    .sum::<f64>()
        };
        shapes
            .iter()
            .map(bound_on_shape)
            .fold(f64::INFINITY, f64::min)
            / 2.0
    };

    (0..programs).map(min_program_cost).sum()
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
            let mut climb = HillClimb { costs: &matrix, programs_by_cache: seating.by_cache.clone() };
            let position = |seating: &Seating| {
                let places = (0..2).flat_map(|cache| (0..3).map(move |cpu| (cache, cpu)));
                places.into_iter().find(|&(cache, cpu)| seating.by_cache[cache][cpu].contains(&program)).unwrap()
            };
            let origin = position(&seating);
            prop_assume!(origin != to);

            let gain = climb.gain_of_move(program, origin, to);
            prop_assert_eq!(&climb.programs_by_cache, &seating.by_cache, "trying changes nothing");
            let mut new_seating = seating.clone();
            new_seating.by_cache[origin.0][origin.1].retain(|&member| member != program);
            new_seating.by_cache[to.0][to.1].push(program);
            prop_assert!((gain - (seating.total_cost(&matrix) - new_seating.total_cost(&matrix))).abs() < 1e-9);
        }
    }
}
