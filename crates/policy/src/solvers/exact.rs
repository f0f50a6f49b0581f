//! Small problems of any shape, exactly: dynamic programming over sets of programs.
//!
//! It is decided cache by cache which *set* of programs it gets. The rest of the problem depends only on the set that
//! is left, so each set is solved once instead of once per path that leads to it. That takes at most 3^n steps a cache
//! instead of the n! leaves of a search tree, whatever the costs are (branch and bound is fast only where its bounds
//! are tight). Among caches of one shape the first undecided program goes to the next cache (symmetric choices are
//! never made).
//!
//! Why not branch and bound: it is as exact, and as slow as its bounds are loose; with co-runners that cost alike (the
//! usual case) it visits most leaves, 16!/(4!^4 4!) = 2.6 million seatings on four caches of four and far more with idle CPUs
//! or turns, where a set is met again along many paths. The tables' worst case is known before: 3^16 = 43 million steps a
//! cache (half where caches are alike), whatever the costs, and 2^16 sets x 12 bytes x (caches + 1) of memory, 7 MB
//! for eight caches. Idle CPUs, caches of different sizes, negative costs and programs that take turns are the same
//! tables. Proof: equal to the enumeration of every assignment for nine shapes and up to seven programs (`tests.rs`).
//!
//! Inside a cache with more programs than CPUs, the CPUs are filled the same way, smallest program first.

use super::{CostMatrix, Seating, Seats};

/// Sets of more programs than this do not fit the tables.
pub const PROGRAMS_AT_MOST: usize = 16;

/// Steps that take one or two seconds; sixteen programs on as many caches of different sizes are 7e8.
const STEPS_AT_MOST: f64 = 8e8;

type ProgramSet = u32;

/// Is this small enough to be solved exactly?
pub fn fits(programs: usize, seats: &Seats) -> bool {
    programs <= PROGRAMS_AT_MOST && steps(programs, seats) <= STEPS_AT_MOST
}

/// Steps of the search: sets a cache may get times ways to fill its CPUs, and set pairs of the outer table.
fn steps(programs: usize, seats: &Seats) -> f64 {
    let (least, more) = seats.loads(programs);
    let mut shapes = seats.cpus_per_cache.clone();
    shapes.sort_unstable();
    shapes.dedup();
    let filled = shapes.iter().map(|&cpus| {
        let cpus = cpus as usize;
        (0..=cpus.min(more)).map(move |extra| {
            let size = (cpus * least + extra).min(programs);
            choose(programs, size)
                * if least == 0 || least + more == 1 { 1.0 } else { fillings(size, least, cpus, extra) }
        })
    });
    let tables = libm::pow(3.0, programs as f64) * seats.cpus_per_cache.len().min(programs) as f64;
    filled.flatten().sum::<f64>() + if shapes.len() > 1 { tables } else { tables / 2.0 }
}

fn choose(n: usize, k: usize) -> f64 {
    (0..k.min(n)).map(|i| (n - i) as f64 / (i + 1) as f64).product()
}

fn fillings(size: usize, least: usize, cpus: usize, extra: usize) -> f64 {
    let factorial = |n: usize| (1..=n).map(|i| i as f64).product::<f64>();
    let inside = libm::pow(factorial(least), (cpus - extra) as f64) * libm::pow(factorial(least + 1), extra as f64);
    factorial(size) / inside / factorial(cpus - extra) / factorial(extra)
}

/// An optimal seating; needs [`fits`].
pub fn solve(costs: &CostMatrix, seats: &Seats) -> Seating {
    let search = SubsetSearch::new(costs, seats);
    let shapes = &seats.cpus_per_cache;
    let everybody: ProgramSet = (1 << costs.len()) - 1;
    let alike = shapes.iter().all(|cpus| cpus == &shapes[0]);
    // best[k][set]: least total when the first k caches hold exactly the set; took[k][set]: what cache k holds then.
    let mut best = vec![vec![f64::INFINITY; everybody as usize + 1]];
    best[0][0] = 0.0;
    let mut took: Vec<Vec<ProgramSet>> = vec![Vec::new()];
    let mut costs_of_shape: Vec<(u32, Vec<f64>)> = Vec::new();
    for (at, &cpus) in shapes.iter().enumerate() {
        if !costs_of_shape.iter().any(|(shape, _)| *shape == cpus) {
            let table = (0..=everybody).map(|set| search.cache_cost(set, cpus)).collect();
            costs_of_shape.push((cpus, table));
        }
        let table = &costs_of_shape.iter().find(|(shape, _)| *shape == cpus).expect("inserted above").1;
        let (next, choice) = layer(&best[at], table, everybody, alike);
        best.push(next);
        took.push(choice);
    }
    let mut left = everybody;
    let mut by_cache = Vec::new();
    for (at, &cpus) in shapes.iter().enumerate().rev() {
        let members = took[at + 1][left as usize];
        by_cache.push(search.fill(members, cpus).1);
        left &= !members;
    }
    by_cache.reverse();
    Seating { by_cache }
}

/// One cache more: for every set, the best split into what this cache takes and what the caches before it hold.
fn layer(before: &[f64], table: &[f64], everybody: ProgramSet, alike: bool) -> (Vec<f64>, Vec<ProgramSet>) {
    let mut best = before.iter().map(|&rest| rest + table[0]).collect::<Vec<f64>>();
    let mut took = vec![0; before.len()];
    for set in 1..=everybody {
        // Among caches alike, the last one holds the set's first program: other orders are the same seating.
        let fixed = if alike { set & set.wrapping_neg() } else { 0 };
        let free = set & !fixed;
        let mut part = free;
        loop {
            let members = part | fixed;
            let total = table[members as usize] + before[(set & !members) as usize];
            if total < best[set as usize] {
                (best[set as usize], took[set as usize]) = (total, members);
            }
            if part == 0 {
                break;
            }
            part = (part - 1) & free;
        }
    }
    (best, took)
}

struct SubsetSearch<'a> {
    costs: &'a CostMatrix,
    /// Programs on every CPU at least.
    least: usize,
    /// Whether CPUs may have one more.
    uneven: bool,
    /// Sum of costs over ordered pairs within a set, the diagonal too.
    within: Vec<f64>,
}

impl<'a> SubsetSearch<'a> {
    fn new(costs: &'a CostMatrix, seats: &Seats) -> Self {
        let (least, more) = seats.loads(costs.len());
        let mut within = vec![0.0; 1 << costs.len()];
        for set in 1..within.len() {
            let first = set.trailing_zeros() as usize;
            let rest = set & (set - 1);
            within[set] = within[rest] + costs[first][first];
            within[set] += members(rest as ProgramSet).map(|j| costs[first][j] + costs[j][first]).sum::<f64>();
        }
        SubsetSearch { costs, least, uneven: more > 0, within }
    }

    /// Infinite where the set does not fit the cache's even loads.
    fn cache_cost(&self, set: ProgramSet, cpus: u32) -> f64 {
        let (size, cpus) = (set.count_ones() as usize, cpus as usize);
        let most = self.least + usize::from(self.uneven);
        if size < self.least * cpus || size > most * cpus {
            return f64::INFINITY;
        }
        match most {
            // One program to a CPU: all of the cache meet.
            1 => self.within[set as usize] - members(set).map(|i| self.costs[i][i]).sum::<f64>(),
            _ => self.fill(set, cpus as u32).0,
        }
    }

    /// The best way to put a set on the CPUs of one cache, and its total.
    fn fill(&self, set: ProgramSet, cpus: u32) -> (f64, Vec<Vec<usize>>) {
        let most = self.least + usize::from(self.uneven);
        let mut filled: Vec<ProgramSet> = Vec::new();
        if most <= 1 {
            filled.extend(members(set).map(|program| 1 << program));
        } else {
            let felt: Vec<f64> = (0..self.costs.len()).map(|j| members(set).map(|i| self.costs[i][j]).sum()).collect();
            let extra = set.count_ones() as usize - self.least * cpus as usize;
            let mut best = (f64::INFINITY, Vec::new());
            self.branch(set, (cpus as usize - extra, extra), 0.0, &felt, &mut Vec::new(), &mut best);
            filled = best.1;
            filled.resize(cpus as usize, 0);
            return (best.0, filled.into_iter().map(|cpu| members(cpu).collect()).collect());
        }
        filled.resize(cpus as usize, 0);
        (0.0, filled.into_iter().map(|cpu| members(cpu).collect()).collect())
    }

    /// Fills the next CPU with the first program that is left and every choice of companions; `open` = CPUs still to
    /// fill with the least load and with one more.
    fn branch(
        &self,
        left: ProgramSet,
        open: (usize, usize),
        so_far: f64,
        felt: &[f64],
        filled: &mut Vec<ProgramSet>,
        best: &mut (f64, Vec<ProgramSet>),
    ) {
        if left == 0 {
            if so_far < best.0 {
                *best = (so_far, filled.clone());
            }
            return;
        }
        let first = left & left.wrapping_neg();
        let rest = left & !first;
        for (size, open) in [
            (self.least, open.0.checked_sub(1).map(|less| (less, open.1))),
            (self.least + 1, open.1.checked_sub(1).map(|less| (open.0, less))),
        ] {
            let Some(open) = open.filter(|_| size > 0) else { continue };
            for_each_subset(rest, size - 1, &mut |companions| {
                let cpu = first | companions;
                let seen = members(cpu).map(|j| felt[j]).sum::<f64>() - self.within[cpu as usize];
                filled.push(cpu);
                self.branch(left & !cpu, open, so_far + seen / size as f64, felt, filled, best);
                filled.pop();
            });
        }
    }
}

fn members(set: ProgramSet) -> impl Iterator<Item = usize> {
    (0..ProgramSet::BITS as usize).filter(move |&program| set >> program & 1 == 1)
}

/// Every subset of `of` with `size` members, in a fixed order.
fn for_each_subset(of: ProgramSet, size: usize, visit: &mut impl FnMut(ProgramSet)) {
    fn go(of: ProgramSet, size: usize, chosen: ProgramSet, visit: &mut impl FnMut(ProgramSet)) {
        if size == 0 {
            return visit(chosen);
        }
        let mut left = of;
        while left.count_ones() as usize >= size {
            let first = left & left.wrapping_neg();
            left &= !first;
            go(left, size - 1, chosen | first, visit);
        }
    }
    go(of, size, 0, visit);
}
