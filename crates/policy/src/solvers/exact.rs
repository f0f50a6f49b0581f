//! Solves small problems of any shape exactly, by dynamic programming over sets of programs.
//!
//! Each cache gets a *set* of programs. The rest of the problem depends only on the remaining set, so each set is
//! solved once instead of once per path that leads to it. That takes at most 3^n steps per cache instead of the n!
//! leaves of a search tree, whatever the costs. Among caches of one shape, the first unassigned program goes to the
//! next cache, so symmetric choices are never made.
//!
//! Branch and bound would be as exact, but it is fast only with tight bounds. With co-runners of similar cost, which is
//! the usual case, it visits most leaves: 16!/(4!^4 4!) = 2.6 million seatings on four caches of four. With idle CPUs
//! or turns, which reach the same set along many paths, there are far more. The worst case of the tables is known in
//! advance and does not depend on the costs. It is 3^16 = 43 million steps per cache (half for equal caches), and 2^16
//! sets x 12 bytes x (caches + 1) of memory, 7 MB for eight caches.
//!
//! Idle CPUs, caches of different sizes, negative costs and programs that take turns use the same tables. The tests
//! compare the result with the enumeration of every assignment, for nine shapes and up to seven programs (`tests.rs`).
//! In a cache with more programs than CPUs, the CPUs are filled the same way, smallest program first.

use super::{CostMatrix, Seating, Seats};

/// Maximum number of programs whose sets fit the tables.
pub const MAX_PROGRAMS: usize = 16;

/// Maximum number of steps, which take one or two seconds; sixteen programs on as many caches of different sizes need
/// 7e8.
const MAX_STEPS: f64 = 8e8;

type ProgramSet = u32;

/// Returns whether the problem is small enough to be solved exactly.
pub fn can_solve(programs: usize, seats: &Seats) -> bool {
    programs <= MAX_PROGRAMS && search_steps(programs, seats) <= MAX_STEPS
}

/// Returns the number of steps of the search: the sets that a cache may get times the ways to fill its CPUs, plus the
/// pairs of sets of the outer table.
fn search_steps(programs: usize, seats: &Seats) -> f64 {
    let (min_load, surplus) = seats.min_load_and_surplus(programs);
    let mut shapes = seats.cpus_per_cache.clone();
    shapes.sort_unstable();
    shapes.dedup();
    let filled = shapes.iter().map(|&cpus| {
        let cpus = cpus as usize;
        (0..=cpus.min(surplus)).map(move |extra| {
            let size = (cpus * min_load + extra).min(programs);
            choose(programs, size)
                * if min_load == 0 || min_load + surplus == 1 {
                    1.0
                } else {
                    count_fillings(size, min_load, cpus, extra)
                }
        })
    });
    let tables = libm::pow(3.0, programs as f64) * seats.cpus_per_cache.len().min(programs) as f64;
    filled.flatten().sum::<f64>() + if shapes.len() > 1 { tables } else { tables / 2.0 }
}

fn choose(n: usize, k: usize) -> f64 {
    (0..k.min(n)).map(|i| (n - i) as f64 / (i + 1) as f64).product()
}

fn count_fillings(size: usize, min_load: usize, cpus: usize, extra: usize) -> f64 {
    let factorial = |n: usize| (1..=n).map(|i| i as f64).product::<f64>();
    let orders_within_cpus =
        libm::pow(factorial(min_load), (cpus - extra) as f64) * libm::pow(factorial(min_load + 1), extra as f64);
    factorial(size) / orders_within_cpus / factorial(cpus - extra) / factorial(extra)
}

/// Returns an optimal seating; [`can_solve`] must hold.
pub fn solve(costs: &CostMatrix, seats: &Seats) -> Seating {
    let search = SubsetSearch::new(costs, seats);
    let shapes = &seats.cpus_per_cache;
    let all_programs: ProgramSet = (1 << costs.len()) - 1;
    let are_alike = shapes.iter().all(|cpus| cpus == &shapes[0]);
    // `best[k][set]` is the smallest total if the first k caches have exactly the set; `took[k][set]` is then the set
    // of cache k.
    let mut best = vec![vec![f64::INFINITY; all_programs as usize + 1]];
    best[0][0] = 0.0;
    let mut choices: Vec<Vec<ProgramSet>> = vec![Vec::new()];
    let mut costs_of_shape: Vec<(u32, Vec<f64>)> = Vec::new();
    for (index, &cpus) in shapes.iter().enumerate() {
        if !costs_of_shape.iter().any(|(shape, _)| *shape == cpus) {
            let table = (0..=all_programs).map(|set| search.cache_cost(set, cpus)).collect();
            costs_of_shape.push((cpus, table));
        }
        let table = &costs_of_shape.iter().find(|(shape, _)| *shape == cpus).expect("inserted above").1;
        let (next, choice) = solve_layer(&best[index], table, all_programs, are_alike);
        best.push(next);
        choices.push(choice);
    }
    let mut remaining = all_programs;
    let mut by_cache = Vec::new();
    for (index, &cpus) in shapes.iter().enumerate().rev() {
        let members = choices[index + 1][remaining as usize];
        by_cache.push(search.fill(members, cpus).1);
        remaining &= !members;
    }
    by_cache.reverse();
    Seating { by_cache }
}

/// Adds one cache: finds, for every set, the best split between this cache and the caches before it.
fn solve_layer(
    previous_costs: &[f64],
    table: &[f64],
    all_programs: ProgramSet,
    alike: bool,
) -> (Vec<f64>, Vec<ProgramSet>) {
    let mut best = previous_costs.iter().map(|&cost| cost + table[0]).collect::<Vec<f64>>();
    let mut choices = vec![0; previous_costs.len()];
    for set in 1..=all_programs {
        // Among equal caches, the last one has the set's first program; other orders give the same seating.
        let fixed_members = if alike { set & set.wrapping_neg() } else { 0 };
        let free_members = set & !fixed_members;
        let mut part = free_members;
        loop {
            let members = part | fixed_members;
            let total = table[members as usize] + previous_costs[(set & !members) as usize];
            if total < best[set as usize] {
                (best[set as usize], choices[set as usize]) = (total, members);
            }
            if part == 0 {
                break;
            }
            part = (part - 1) & free_members;
        }
    }
    (best, choices)
}

struct SubsetSearch<'a> {
    costs: &'a CostMatrix,
    /// Minimum number of programs on every CPU.
    min_load: usize,
    /// Whether some CPUs have one program more.
    uneven: bool,
    /// Sum of costs over all ordered pairs within a set, including the diagonal.
    inner_costs: Vec<f64>,
}

impl<'a> SubsetSearch<'a> {
    fn new(costs: &'a CostMatrix, seats: &Seats) -> Self {
        let (min_load, surplus) = seats.min_load_and_surplus(costs.len());
        let mut inner_costs = vec![0.0; 1 << costs.len()];
        for set in 1..inner_costs.len() {
            let first = set.trailing_zeros() as usize;
            let other_members = set & (set - 1);
            inner_costs[set] = inner_costs[other_members] + costs[first][first];
            inner_costs[set] +=
                members_of_set(other_members as ProgramSet).map(|j| costs[first][j] + costs[j][first]).sum::<f64>();
        }
        SubsetSearch { costs, min_load, uneven: surplus > 0, inner_costs }
    }

    /// Returns the cost of the set on a cache; infinite if even loads on that cache do not allow the set's size.
    fn cache_cost(&self, set: ProgramSet, cpus: u32) -> f64 {
        let (size, cpus) = (set.count_ones() as usize, cpus as usize);
        let max_load = self.min_load + usize::from(self.uneven);
        if size < self.min_load * cpus || size > max_load * cpus {
            return f64::INFINITY;
        }
        match max_load {
            // With one program per CPU, all programs of the cache meet.
            1 => self.inner_costs[set as usize] - members_of_set(set).map(|i| self.costs[i][i]).sum::<f64>(),
            _ => self.fill(set, cpus as u32).0,
        }
    }

    /// Returns the best distribution of a set over the CPUs of one cache, and its cost.
    fn fill(&self, set: ProgramSet, cpus: u32) -> (f64, Vec<Vec<usize>>) {
        let max_load = self.min_load + usize::from(self.uneven);
        let mut filled: Vec<ProgramSet> = Vec::new();
        if max_load <= 1 {
            filled.extend(members_of_set(set).map(|program| 1 << program));
        } else {
            let felt: Vec<f64> =
                (0..self.costs.len()).map(|j| members_of_set(set).map(|i| self.costs[i][j]).sum()).collect();
            let extra = set.count_ones() as usize - self.min_load * cpus as usize;
            let mut best = (f64::INFINITY, Vec::new());
            self.branch(set, (cpus as usize - extra, extra), 0.0, &felt, &mut Vec::new(), &mut best);
            filled = best.1;
            filled.resize(cpus as usize, 0);
            return (best.0, filled.into_iter().map(|cpu| members_of_set(cpu).collect()).collect());
        }
        filled.resize(cpus as usize, 0);
        (0.0, filled.into_iter().map(|cpu| members_of_set(cpu).collect()).collect())
    }

    /// Fills the next CPU with the first remaining program and every choice of companions. `open` is the number of CPUs
    /// still to be filled with the smallest load, and with one program more.
    fn branch(
        &self,
        remaining: ProgramSet,
        open: (usize, usize),
        so_far: f64,
        felt: &[f64],
        filled: &mut Vec<ProgramSet>,
        best: &mut (f64, Vec<ProgramSet>),
    ) {
        if remaining == 0 {
            if so_far < best.0 {
                *best = (so_far, filled.clone());
            }
            return;
        }
        let first = remaining & remaining.wrapping_neg();
        let candidates = remaining & !first;
        for (size, open) in [
            (self.min_load, open.0.checked_sub(1).map(|less| (less, open.1))),
            (self.min_load + 1, open.1.checked_sub(1).map(|less| (open.0, less))),
        ] {
            let Some(open) = open.filter(|_| size > 0) else { continue };
            for_each_subset(candidates, size - 1, &mut |companions| {
                let cpu = first | companions;
                let felt_cost = members_of_set(cpu).map(|j| felt[j]).sum::<f64>() - self.inner_costs[cpu as usize];
                filled.push(cpu);
                self.branch(remaining & !cpu, open, so_far + felt_cost / size as f64, felt, filled, best);
                filled.pop();
            });
        }
    }
}

fn members_of_set(set: ProgramSet) -> impl Iterator<Item = usize> {
    (0..ProgramSet::BITS as usize).filter(move |&program| set >> program & 1 == 1)
}

/// Visits every subset of `set` with `size` members, in a fixed order.
fn for_each_subset(set: ProgramSet, size: usize, visit: &mut impl FnMut(ProgramSet)) {
    fn visit_subsets(set: ProgramSet, size: usize, chosen_members: ProgramSet, visit: &mut impl FnMut(ProgramSet)) {
        if size == 0 {
            return visit(chosen_members);
        }
        let mut remaining = set;
        while remaining.count_ones() as usize >= size {
            let first = remaining & remaining.wrapping_neg();
            remaining &= !first;
            visit_subsets(remaining, size - 1, chosen_members | first, visit);
        }
    }
    visit_subsets(set, size, 0, visit);
}
