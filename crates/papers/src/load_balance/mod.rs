//! Balances weighted tasks over bins that share something: the core of DI and DIO (CA 4, centralized sort).
//!
//! Problem: every task has a weight (its miss rate), and every bin (a last-level cache) has CPUs. The sums per bin
//! should be as even as possible, so that no cache, bus or controller is stressed more than the others, and few tasks
//! should move. Method, one of two:
//! - [`balance_centrally`] sorts the tasks by weight and places them from the heaviest down, each on the lightest bin
//!   with a free CPU. Groups go to the bins that have most of their members. The present assignment stays unless the
//!   new sums are clearly more even.
//! - [`exchange`] works without a sort or a global view. In every round, each bin meets one other, and the two exchange
//!   tasks as long as that brings their sums closer. `exchanges::tournament_pairs` chooses the pairs, so that all pairs
//!   meet in turn.
//!
//! Properties: the functions are pure, and ties break by order. Loads are even: a CPU never has two tasks more than
//! another, and no task waits while a CPU is free. Tasks that cannot move stay. For constant weights, exchanges end,
//! because every exchange lowers the sum of squares. After that, two bins with as many tasks each differ by at most
//! `exchanges::max_distance`. No bin therefore exceeds the mean by more than that, and the central result cannot be
//! below the mean.

mod central;
mod exchanges;
#[cfg(test)]
mod tests;

pub use central::balance_centrally;
pub use exchanges::exchange;

/// The capacity of a last-level cache: the number of its usable CPUs (one per core while that is enough), and its
/// package.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheCapacity {
    pub cpus: usize,
    pub package: u32,
}

/// A task with its weight and its bin.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TaskLoad {
    /// Weight of the task; finite and at least 0.
    pub weight: f64,
    /// Present bin of the task; `None` if the task is new.
    pub current_bin: Option<usize>,
    /// Whether the task cannot be moved, in which case it has a bin.
    pub is_unmovable: bool,
}

/// The sum of weights and the number of tasks in every bin.
#[derive(Clone, Debug)]
struct BinLoads {
    sums: Vec<f64>,
    counts: Vec<usize>,
}

impl BinLoads {
    fn without_tasks(capacities: &[CacheCapacity]) -> Self {
        BinLoads {
            sums: vec![0.0; capacities.len()],
            counts: vec![0; capacities.len()],
        }
    }
    fn add(&mut self, bin: usize, weight: f64) {
        self.sums[bin] += weight;
        self.counts[bin] += 1;
    }
    fn from_bins(capacities: &[CacheCapacity], task_loads: &[TaskLoad], bins: &[usize]) -> Self {
        let mut loads = BinLoads::without_tasks(capacities);
        task_loads
            .iter()
            .zip(bins)
            .for_each(|(task_load, &bin)| loads.add(bin, task_load.weight));
        loads
    }
}

/// The limits of the number of tasks in each bin that keep loads per CPU even.
#[derive(Clone, Copy, Debug)]
struct TaskQuota {
    /// Minimum number of tasks on every CPU.
    min_tasks_per_cpu: usize,
    /// Number of CPUs with one task more.
    surplus_cpus: usize,
}

impl TaskQuota {
    fn for_tasks(capacities: &[CacheCapacity], tasks: usize) -> Self {
        let cpu_count: usize = capacities.iter().map(|capacity| capacity.cpus).sum();
        TaskQuota {
            min_tasks_per_cpu: tasks / cpu_count.max(1),
            surplus_cpus: tasks % cpu_count.max(1),
        }
    }
    fn has_room(&self, capacity: &CacheCapacity, count: usize, extra_tasks: usize) -> bool {
        count < self.min_tasks_per_cpu * capacity.cpus
            || (extra_tasks < self.surplus_cpus
                && count < (self.min_tasks_per_cpu + 1) * capacity.cpus)
    }
    fn count_extra_tasks(&self, capacities: &[CacheCapacity], counts: &[usize]) -> usize {
        capacities
            .iter()
            .zip(counts)
            .map(|(capacity, &count)| count.saturating_sub(self.min_tasks_per_cpu * capacity.cpus))
            .sum()
    }
    fn is_within_quota(&self, capacities: &[CacheCapacity], counts: &[usize]) -> bool {
        let is_within = |(capacity, &count): (&CacheCapacity, &usize)| {
            (self.min_tasks_per_cpu * capacity.cpus..=(self.min_tasks_per_cpu + 1) * capacity.cpus)
                .contains(&count)
        };
        capacities.iter().zip(counts).all(is_within)
    }
}

/// The standard deviation of the bins' sums over their mean, plus the same for the packages' sums if packages differ
/// from bins; 0 if all sums are 0.
pub fn unevenness(capacities: &[CacheCapacity], task_loads: &[TaskLoad], bins: &[usize]) -> f64 {
    let sums = BinLoads::from_bins(capacities, task_loads, bins).sums;
    variation_coefficient(&sums)
        + package_sums(capacities, &sums).map_or(0.0, |sums| variation_coefficient(&sums))
}

/// The sums of the packages; `None` if each package has one bin, or all bins are in one package.
fn package_sums(capacities: &[CacheCapacity], sums: &[f64]) -> Option<Vec<f64>> {
    let mut packages: Vec<u32> = capacities.iter().map(|capacity| capacity.package).collect();
    packages.sort_unstable();
    packages.dedup();
    let sum_package = |package: u32| {
        capacities
            .iter()
            .zip(sums)
            .filter(move |(capacity, _)| capacity.package == package)
            .map(|(_, sum)| sum)
            .sum()
    };
    let is_informative = packages.len() > 1 && packages.len() < capacities.len();
    is_informative.then(|| packages.into_iter().map(sum_package).collect())
}

fn variation_coefficient(sums: &[f64]) -> f64 {
    let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
    if mean <= 0.0 {
        return 0.0;
    }
    (sums
        .iter()
        .map(|sum| (sum - mean) * (sum - mean))
        .sum::<f64>()
        / sums.len() as f64)
        .sqrt()
        / mean
}
