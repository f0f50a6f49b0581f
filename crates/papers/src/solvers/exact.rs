//! Solves small problems of any shape exactly, by dynamic programming over sets of programs.
//!
//! Each cache gets a *set* of programs. The rest of the problem depends only on the remaining set, so each set is
//! solved once instead of once per path that leads to it. That takes at most 3^n steps per cache instead of the n!
//! leaves of a search tree, whatever the costs. If all caches are equal, the first unassigned program goes to the next
//! cache, so symmetric choices are never made; with mixed shapes they are.
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

/// Whether the problem is small enough to be solved exactly.
pub fn can_solve(programs: usize, seats: &Seats) -> bool {
    programs <= MAX_PROGRAMS && search_steps(programs, seats) <= MAX_STEPS
}

/// The number of steps of the search: the sets that a cache may get times the ways to fill its CPUs, plus the pairs of
/// sets of the outer table.
fn search_steps(programs: usize, seats: &Seats) -> f64 {
    let (min_load, surplus) = seats.min_load_and_surplus(programs);
    let mut shapes = seats.cpus_per_cache.clone();
    shapes.sort_unstable();
    shapes.dedup();
    let steps_by_load = shapes.iter().map(|&cpus| {
        let cpus = cpus as usize;
        (0..=cpus.min(surplus)).map(move |extra| {
            let size = (cpus * min_load + extra).min(programs);
            binomial(programs, size)
                * if min_load == 0 || min_load + surplus == 1 {
                    1.0
                } else {
                    count_fillings(size, min_load, cpus, extra)
                }
        })
    });

    let table_steps =
        libm::pow(3.0, programs as f64) * seats.cpus_per_cache.len().min(programs) as f64;
    steps_by_load.flatten().sum::<f64>()
        + if shapes.len() > 1 {
            table_steps
        } else {
            table_steps / 2.0
        }
}

fn binomial(n: usize, k: usize) -> f64 {
    (0..k.min(n))
        .map(|i| (n - i) as f64 / (i + 1) as f64)
        .product()
}

fn count_fillings(size: usize, min_load: usize, cpus: usize, extra: usize) -> f64 {
    let factorial = |n: usize| (1..=n).map(|i| i as f64).product::<f64>();
    let orders_within_cpus = libm::pow(factorial(min_load), (cpus - extra) as f64)
        * libm::pow(factorial(min_load + 1), extra as f64);
    factorial(size) / orders_within_cpus / factorial(cpus - extra) / factorial(extra)
}

/// An optimal seating; [`can_solve`] must hold.
pub fn solve(costs: &CostMatrix, seats: &Seats) -> Seating {
    let search = SubsetSearch::new(costs, seats);
    let shapes = &seats.cpus_per_cache;
    let all_programs: ProgramSet = (1 << costs.len()) - 1;
    let are_equal_caches = shapes.iter().all(|cpus| cpus == &shapes[0]);

    // `best[k][set]` is the smallest total if the first k caches have exactly the set; `choices[k][set]` is then the
    // set of the last of these caches.
    let mut best_costs = vec![vec![f64::INFINITY; all_programs as usize + 1]];
    best_costs[0][0] = 0.0;
    let mut choices: Vec<Vec<ProgramSet>> = vec![Vec::new()];
    let mut costs_of_shape: Vec<(u32, Vec<f64>)> = Vec::new();
    for (index, &cpus) in shapes.iter().enumerate() {
        if !costs_of_shape.iter().any(|(shape, _)| *shape == cpus) {
            let table = (0..=all_programs)
                .map(|set| search.cache_cost(set, cpus))
                .collect();
            costs_of_shape.push((cpus, table));
        }
        let table = &costs_of_shape
            .iter()
            .find(|(shape, _)| *shape == cpus)
            .expect("inserted above")
            .1;
        let (next_costs, next_choices) =
            solve_layer(&best_costs[index], table, all_programs, are_equal_caches);
        best_costs.push(next_costs);
        choices.push(next_choices);
    }

    let mut remaining_programs = all_programs;
    let mut seats_by_cache = Vec::new();
    for (index, &cpus) in shapes.iter().enumerate().rev() {
        let members = choices[index + 1][remaining_programs as usize];
        seats_by_cache.push(search.distribute_set(members, cpus).1);
        remaining_programs &= !members;
    }
    seats_by_cache.reverse();
    Seating {
        by_cache: seats_by_cache,
    }
}

/// Adds one cache: finds, for every set, the best split between this cache and the caches before it.
fn solve_layer(
    previous_costs: &[f64],
    cache_costs: &[f64],
    all_programs: ProgramSet,
    are_equal_caches: bool,
) -> (Vec<f64>, Vec<ProgramSet>) {
    let mut best_costs = previous_costs
        .iter()
        .map(|&cost| cost + cache_costs[0])
        .collect::<Vec<f64>>();
    let mut choices = vec![0; previous_costs.len()];
    for set in 1..=all_programs {
        // Among equal caches, the last one has the set's first program; other orders give the same seating.
        let fixed_members = if are_equal_caches {
            set & set.wrapping_neg()
        } else {
            0
        };
        let free_members = set & !fixed_members;
        let mut subset = free_members;
        loop {
            let members = subset | fixed_members;
            let total = cache_costs[members as usize] + previous_costs[(set & !members) as usize];
            if total < best_costs[set as usize] {
                (best_costs[set as usize], choices[set as usize]) = (total, members);
            }
            if subset == 0 {
                break;
            }
            subset = (subset - 1) & free_members;
        }
    }

    (best_costs, choices)
}

struct SubsetSearch<'a> {
    costs: &'a CostMatrix,
    /// Minimum number of programs on every CPU.
    min_load: usize,
    /// Whether some CPUs have one program more than the minimum.
    has_surplus: bool,
    /// Sum of costs over all ordered pairs within a set, including the diagonal.
    inner_costs: Vec<f64>,
}

impl<'a> SubsetSearch<'a> {
    fn new(costs: &'a CostMatrix, seats: &Seats) -> Self {
        let (min_load, surplus) = seats.min_load_and_surplus(costs.len());
        let mut inner_costs = vec![0.0; 1 << costs.len()];
        for set in 1..inner_costs.len() {
            let first_program = set.trailing_zeros() as usize;
            let other_members = set & (set - 1);
            inner_costs[set] = inner_costs[other_members] + costs[first_program][first_program];
            inner_costs[set] += members_of_set(other_members as ProgramSet)
                .map(|j| costs[first_program][j] + costs[j][first_program])
                .sum::<f64>();
        }
        SubsetSearch {
            costs,
            min_load,
            has_surplus: surplus > 0,
            inner_costs,
        }
    }

    /// The cost of the set on a cache; infinite if even loads on that cache do not allow the set's size.
    fn cache_cost(&self, set: ProgramSet, cpus: u32) -> f64 {
        let (size, cpus) = (set.count_ones() as usize, cpus as usize);
        let max_load = self.min_load + usize::from(self.has_surplus);
        if size < self.min_load * cpus || size > max_load * cpus {
            return f64::INFINITY;
        }
        match max_load {
            // With one program per CPU, all programs of the cache meet.
            1 => {
                self.inner_costs[set as usize]
                    - members_of_set(set).map(|i| self.costs[i][i]).sum::<f64>()
            }
            _ => self.distribute_set(set, cpus as u32).0,
        }
    }

    /// The best distribution of a set over the CPUs of one cache, and its cost.
    fn distribute_set(&self, set: ProgramSet, cpus: u32) -> (f64, Vec<Vec<usize>>) {
        let max_load = self.min_load + usize::from(self.has_surplus);
        let (cost, mut cpu_sets): (f64, Vec<ProgramSet>) = if max_load <= 1 {
            let singles = members_of_set(set).map(|program| 1 << program);
            (0.0, singles.collect())
        } else {
            let incurred_costs: Vec<f64> = (0..self.costs.len())
                .map(|j| members_of_set(set).map(|i| self.costs[i][j]).sum())
                .collect();
            let surplus_cpus = set.count_ones() as usize - self.min_load * cpus as usize;
            let mut best_cost_and_sets = (f64::INFINITY, Vec::new());
            self.fill_next_cpu(
                set,
                (cpus as usize - surplus_cpus, surplus_cpus),
                0.0,
                &incurred_costs,
                &mut Vec::new(),
                &mut best_cost_and_sets,
            );
            best_cost_and_sets
        };
        cpu_sets.resize(cpus as usize, 0);
        let programs_by_cpu = cpu_sets
            .into_iter()
            .map(|cpu| members_of_set(cpu).collect());
        (cost, programs_by_cpu.collect())
    }

    /// Fills the next CPU with the first remaining program and every choice of companions. `open_cpus` holds the
    /// numbers of CPUs still to be filled with the smallest load, and with one program more.
    fn fill_next_cpu(
        &self,
        remaining_programs: ProgramSet,
        open_cpus: (usize, usize),
        cost_so_far: f64,
        incurred_costs: &[f64],
        filled_sets: &mut Vec<ProgramSet>,
        best_cost_and_sets: &mut (f64, Vec<ProgramSet>),
    ) {
        if remaining_programs == 0 {
            if cost_so_far < best_cost_and_sets.0 {
                *best_cost_and_sets = (cost_so_far, filled_sets.clone());
            }
            return;
        }
        let first_program = remaining_programs & remaining_programs.wrapping_neg();
        let candidates = remaining_programs & !first_program;

        for (size, remaining_cpus) in [
            (
                self.min_load,
                open_cpus
                    .0
                    .checked_sub(1)
                    .map(|fewer_cpus| (fewer_cpus, open_cpus.1)),
            ),
            (
                self.min_load + 1,
                open_cpus.1.checked_sub(1).map(|less| (open_cpus.0, less)),
            ),
        ] {
            let Some(remaining) = remaining_cpus.filter(|_| size > 0) else {
                continue;
            };
            for_each_subset(candidates, size - 1, &mut |companions| {
                let cpu = first_program | companions;
                let incurred_cost = members_of_set(cpu).map(|j| incurred_costs[j]).sum::<f64>()
                    - self.inner_costs[cpu as usize];
                filled_sets.push(cpu);
                self.fill_next_cpu(
                    remaining_programs & !cpu,
                    remaining,
                    cost_so_far + incurred_cost / size as f64,
                    incurred_costs,
                    filled_sets,
                    best_cost_and_sets,
                );
                filled_sets.pop();
            });
        }
    }
}

fn members_of_set(set: ProgramSet) -> impl Iterator<Item = usize> {
    (0..ProgramSet::BITS as usize).filter(move |&program| set >> program & 1 == 1)
}

/// Visits every subset of `set` with `size` members, in a fixed order.
fn for_each_subset(set: ProgramSet, size: usize, visit: &mut impl FnMut(ProgramSet)) {
    fn visit_subsets(
        set: ProgramSet,
        size: usize,
        chosen_members: ProgramSet,
        visit: &mut impl FnMut(ProgramSet),
    ) {
        if size == 0 {
            return visit(chosen_members);
        }
        let mut remaining_programs = set;
        while remaining_programs.count_ones() as usize >= size {
            let first_program = remaining_programs & remaining_programs.wrapping_neg();
            remaining_programs &= !first_program;
            visit_subsets(
                remaining_programs,
                size - 1,
                chosen_members | first_program,
                visit,
            );
        }
    }
    visit_subsets(set, size, 0, visit);
}
