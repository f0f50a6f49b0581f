//! Solvers, which turn the costs of co-runs into an assignment of programs to CPUs.
//!
//! Problem: n programs are assigned to CPUs, and groups of CPUs share a cache. A program bears a cost for the programs
//! that run on other CPUs of its cache while it runs. With at most one program per CPU, this is CA's problem (2.1.1):
//! minimize the sum of mutual slowdowns over all pairs that share a cache. With more programs than CPUs, programs on
//! one CPU take turns. They do not meet, and each of l programs that take turns on a neighboring CPU is met for 1/l of
//! the time. Loads differ by at most one, so no program loses processor time.
//!
//! `total = sum over programs i, over CPUs q of i's cache but its own, over j on q, of cost[i][j] / load(q)`
//!
//! Slowdowns are assumed to add up over co-runners. With more than two programs per cache this is an approximation, as
//! it is in the paper's pairwise evidence.
//!
//! Method: the strongest applicable method is used. With two CPUs to every cache and at most one program to each, it is
//! minimum-weight perfect matching ([`matching`], exact for any number). Otherwise, for up to [`exact::MAX_PROGRAMS`]
//! programs, it is dynamic programming over sets ([`exact`]). Beyond that, it is a local search with a lower bound
//! ([`local_search`]), whose gap is reported.
//!
//! Properties: results are deterministic, every program is placed once, and loads are even. [`Solution::lower_bound`]
//! never lies above the optimum. Negative costs and idle CPUs are allowed.

use serde::{Deserialize, Serialize};

use cachemate_core::{SplitMix64, quantile};

pub mod balance;
pub mod exact;
pub mod local_search;
pub mod matching;
pub mod sizing;
#[cfg(test)]
mod tests;

/// A square matrix in which `cost[i][j]` is the cost of `i` beside `j`; the diagonal is not used.
pub type CostMatrix = [Vec<f64>];

/// The CPUs of each cache on which programs can be placed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Seats {
    /// Number of CPUs of each cache, in the order of the caches.
    pub cpus_per_cache: Vec<u32>,
}

impl Seats {
    /// The number of CPUs of all caches together.
    pub fn cpus(&self) -> usize {
        self.cpus_per_cache.iter().map(|&cpus| cpus as usize).sum()
    }
    /// No program on any CPU.
    fn empty_seating(&self) -> Seating {
        let caches = self.cpus_per_cache.iter();
        Seating {
            by_cache: caches
                .map(|&cpus| vec![Vec::new(); cpus as usize])
                .collect(),
        }
    }
    /// The minimum number of programs on every CPU, and the number of CPUs with one program more.
    fn min_load_and_surplus(&self, programs: usize) -> (usize, usize) {
        (programs / self.cpus(), programs % self.cpus())
    }
}

/// An assignment of programs to the CPUs of each cache.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Seating {
    /// Programs, by their index in the costs, in ascending order in `by_cache[cache][cpu]`.
    pub by_cache: Vec<Vec<Vec<usize>>>,
}

impl Seating {
    /// Each program's costs beside all programs on other CPUs of its cache, in the unit of the costs.
    pub fn costs_by_program(&self, costs: &CostMatrix) -> Vec<f64> {
        let mut cost_by_program = vec![0.0; costs.len()];
        for cache in &self.by_cache {
            for (index, cpu) in cache.iter().enumerate() {
                for &i in cpu {
                    let other_cpus = cache.iter().enumerate().filter(|(other_index, members)| {
                        *other_index != index && !members.is_empty()
                    });
                    cost_by_program[i] = other_cpus
                        .map(|(_, members)| {
                            members.iter().map(|&j| costs[i][j]).sum::<f64>() / members.len() as f64
                        })
                        .sum();
                }
            }
        }
        cost_by_program
    }
    /// The sum of the costs of all programs, in the unit of the costs.
    pub fn total_cost(&self, costs: &CostMatrix) -> f64 {
        self.costs_by_program(costs).iter().sum()
    }
    /// The canonical form: members ascend, and CPUs and caches of equal shape are ordered by their first member, with
    /// idle ones last.
    fn into_canonical(mut self) -> Self {
        let first_member = |members: &[usize]| members.first().copied().unwrap_or(usize::MAX);
        for cache in &mut self.by_cache {
            cache.iter_mut().for_each(|cpu| cpu.sort_unstable());
            cache.sort_by_key(|cpu| first_member(cpu));
        }

        let shapes: Vec<usize> = self.by_cache.iter().map(Vec::len).collect();
        let mut distinct_shapes = shapes.clone();
        distinct_shapes.sort_unstable();
        distinct_shapes.dedup();
        for shape in distinct_shapes {
            let same_shape_indices: Vec<usize> = (0..shapes.len())
                .filter(|&index| shapes[index] == shape)
                .collect();
            let mut caches: Vec<_> = same_shape_indices
                .iter()
                .map(|&index| std::mem::take(&mut self.by_cache[index]))
                .collect();
            caches.sort_by_key(|cache| cache.first().map_or(usize::MAX, |cpu| first_member(cpu)));
            same_shape_indices
                .into_iter()
                .zip(caches)
                .for_each(|(position, cache)| self.by_cache[position] = cache);
        }

        self
    }
}

/// The method by which a solution was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SolverMethod {
    /// Minimum-weight perfect matching, which is optimal.
    Matching,
    /// Dynamic programming over sets of programs, which is optimal.
    DynamicProgramming,
    /// Local search, whose distance from the optimum the lower bound limits.
    LocalSearch,
    /// All assignments, which is optimal.
    Exhaustive,
}

/// An assignment, with a bound on its quality.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Solution {
    /// CPU of every program.
    pub seating: Seating,
    /// Sum of the costs of all programs.
    pub total: f64,
    /// Lower bound of the totals of all assignments; equal to `total` if the method is exact.
    pub lower_bound: f64,
    /// Method by which the assignment was found.
    pub method: SolverMethod,
}

/// An assignment with the smallest total; it is empty without programs or CPUs.
pub fn best_assignment(costs: &CostMatrix, seats: &Seats) -> Solution {
    let seating_and_method = if costs.is_empty() || seats.cpus() == 0 {
        (seats.empty_seating(), SolverMethod::Matching)
    } else if matching::can_solve(costs.len(), seats) {
        (matching::solve(costs, seats), SolverMethod::Matching)
    } else if exact::can_solve(costs.len(), seats) {
        (exact::solve(costs, seats), SolverMethod::DynamicProgramming)
    } else {
        (local_search::solve(costs, seats), SolverMethod::LocalSearch)
    };

    let seating = seating_and_method.0.into_canonical();
    let total = seating.total_cost(costs);
    let lower_bound = match seating_and_method.1 {
        SolverMethod::LocalSearch => local_search::lower_bound(costs, seats).min(total),
        _ => total,
    };
    Solution {
        seating,
        total,
        lower_bound,
        method: seating_and_method.1,
    }
}

/// An assignment with the largest total; its [`Solution::lower_bound`] is an *upper* bound.
pub fn worst_assignment(costs: &CostMatrix, seats: &Seats) -> Solution {
    let negated_costs: Vec<Vec<f64>> = costs
        .iter()
        .map(|row| row.iter().map(|cost| -cost).collect())
        .collect();
    let solved = best_assignment(&negated_costs, seats);
    let total = solved.seating.total_cost(costs);
    let upper_bound = if solved.method == SolverMethod::LocalSearch {
        -solved.lower_bound
    } else {
        total
    };
    Solution {
        total,
        lower_bound: upper_bound,
        ..solved
    }
}

/// The totals of random assignments, as a scheduler without evidence would make them.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct RandomTotals {
    /// Exact mean over all assignments, each equally likely.
    pub mean: f64,
    /// 5th percentile of the totals of a seeded sample.
    pub low_5_percent: f64,
    /// 95th percentile of the totals of the same sample.
    pub high_5_percent: f64,
    /// Number of assignments in the sample.
    pub sampled: u32,
}

/// Number of assignments drawn to estimate the percentiles.
const SAMPLES: u32 = 1000;

/// The totals of random assignments with even loads.
///
/// The mean needs no enumeration, because every ordered pair of programs is equally likely to meet. It is the sum of
/// all costs times the expected share of time for which one program of a pair meets the other on its cache. For c CPUs
/// on a cache and C CPUs in total, the share is a sum over caches of c (c - 1). It is divided by C (n - 1) if every CPU
/// is busy, and by C (C - 1) if some are idle.
pub fn random_totals(costs: &CostMatrix, seats: &Seats, seed: u64) -> RandomTotals {
    let (programs, cpus) = (costs.len(), seats.cpus());
    if programs < 2 || cpus < 2 {
        return RandomTotals {
            mean: 0.0,
            low_5_percent: 0.0,
            high_5_percent: 0.0,
            sampled: 0,
        };
    }

    let costs_beside_others = |row: usize| {
        costs[row]
            .iter()
            .enumerate()
            .filter(move |&(j, _)| j != row)
            .map(|(_, cost)| cost)
    };
    let cost_sum: f64 = (0..programs)
        .map(|row| costs_beside_others(row).sum::<f64>())
        .sum();

    let neighbor_pairs: f64 = seats
        .cpus_per_cache
        .iter()
        .map(|&c| f64::from(c) * (f64::from(c) - 1.0))
        .sum();
    let mean = cost_sum * neighbor_pairs / (cpus as f64 * (programs.max(cpus) as f64 - 1.0));
    let mut generator = SplitMix64::new(seed);
    let totals: Vec<f64> = (0..SAMPLES)
        .map(|_| random_seating(programs, seats, &mut generator).total_cost(costs))
        .collect();
    RandomTotals {
        mean,
        low_5_percent: quantile(&totals, 0.05).unwrap_or(f64::NAN),
        high_5_percent: quantile(&totals, 0.95).unwrap_or(f64::NAN),
        sampled: SAMPLES,
    }
}

/// Draws one assignment from all those with even loads, each equally likely.
pub fn random_seating(programs: usize, seats: &Seats, generator: &mut SplitMix64) -> Seating {
    let Seating { mut by_cache } = seats.empty_seating();
    let mut cpus: Vec<(usize, usize)> = by_cache
        .iter()
        .enumerate()
        .flat_map(|(cache, cpus)| (0..cpus.len()).map(move |cpu| (cache, cpu)))
        .collect();
    if cpus.is_empty() {
        return Seating { by_cache };
    }

    generator.shuffle(&mut cpus);
    let mut order: Vec<usize> = (0..programs).collect();
    generator.shuffle(&mut order);
    for (index, program) in order.into_iter().enumerate() {
        let (cache, cpu) = cpus[index % cpus.len()];
        by_cache[cache][cpu].push(program);
    }

    by_cache
        .iter_mut()
        .flatten()
        .for_each(|cpu| cpu.sort_unstable());
    Seating { by_cache }
}
