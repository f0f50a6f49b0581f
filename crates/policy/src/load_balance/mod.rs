//! Balancing of weighted tasks over bins that share something: the core of DI and DIO (CA 4, centralized sort).
//!
//! Problem: every task has a weight (its miss rate), every bin (a last-level cache) has CPUs; the sums per bin are to
//! be as even as possible, so that no cache, bus or controller is stressed more than the others, with few moves.
//! Method, one of two:
//! - [`balance_centrally`]: tasks are sorted by weight and placed from the heaviest down on the lightest bin with a free CPU;
//!   groups go to the bins that hold most of their members; the present assignment stays unless the new sums are
//!   clearly more even.
//! - [`exchange`]: no sort and no global view. In every round, each bin meets one other, and the two exchange tasks as
//!   long as that brings their sums closer. `tournament` chooses the pairs, so that all pairs meet in turn.
//!
//! Properties: pure, ties by order; loads are even (a CPU never has two tasks more than another, and none waits while a
//! CPU is free); tasks that cannot move stay. For constant weights, exchanges end, because every one lowers the sum of
//! squares; then two bins with as many tasks each differ by at most `max_distance`, so no bin lies further than that
//! above the mean, below which the central result cannot be.

mod central;
mod exchanges;
#[cfg(test)]
mod tests;

pub use central::balance_centrally;
pub use exchanges::exchange;

/// A last-level cache: its number of usable CPUs (one per core as long as that suffices), and its package.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bin {
    pub seats: usize,
    pub package: u32,
}

/// One task.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TaskLoad {
    /// A finite weight of at least 0.
    pub weight: f64,
    /// Its bin; `None` for a newcomer.
    pub at: Option<usize>,
    /// It may not be moved; it has a bin.
    pub stuck: bool,
}

/// Sum of weights and number of tasks of every bin.
#[derive(Clone, Debug)]
struct BinLoads {
    sums: Vec<f64>,
    counts: Vec<usize>,
}

impl BinLoads {
    fn empty(places: &[Bin]) -> Self {
        BinLoads { sums: vec![0.0; places.len()], counts: vec![0; places.len()] }
    }
    fn add(&mut self, place: usize, weight: f64) {
        self.sums[place] += weight;
        self.counts[place] += 1;
    }
    fn of(places: &[Bin], pieces: &[TaskLoad], bins: &[usize]) -> Self {
        let mut loads = BinLoads::empty(places);
        pieces.iter().zip(bins).for_each(|(piece, &place)| loads.add(place, piece.weight));
        loads
    }
}

/// Limits of the tasks of each bin, so that loads per CPU are even.
#[derive(Clone, Copy, Debug)]
struct SeatQuota {
    /// Fewest tasks on every CPU.
    least: usize,
    /// CPUs with one more.
    more: usize,
}

impl SeatQuota {
    fn of(places: &[Bin], tasks: usize) -> Self {
        let seats: usize = places.iter().map(|place| place.seats).sum();
        SeatQuota { least: tasks / seats.max(1), more: tasks % seats.max(1) }
    }
    fn has_room(&self, place: &Bin, count: usize, more_taken: usize) -> bool {
        count < self.least * place.seats || (more_taken < self.more && count < (self.least + 1) * place.seats)
    }
    fn more_taken(&self, places: &[Bin], counts: &[usize]) -> usize {
        places.iter().zip(counts).map(|(place, &count)| count.saturating_sub(self.least * place.seats)).sum()
    }
    fn is_within_quota(&self, places: &[Bin], counts: &[usize]) -> bool {
        let fits = |(place, &count): (&Bin, &usize)| {
            (self.least * place.seats..=(self.least + 1) * place.seats).contains(&count)
        };
        places.iter().zip(counts).all(fits)
    }
}

/// Standard deviation of the sums over their mean, of bins and of packages if those differ. 0 if all sums are 0.
pub fn unevenness(places: &[Bin], pieces: &[TaskLoad], bins: &[usize]) -> f64 {
    let sums = BinLoads::of(places, pieces, bins).sums;
    variation(&sums) + package_sums(places, &sums).map_or(0.0, |sums| variation(&sums))
}

/// `None` if packages have one bin each, or all bins are in one.
fn package_sums(places: &[Bin], sums: &[f64]) -> Option<Vec<f64>> {
    let mut packages: Vec<u32> = places.iter().map(|place| place.package).collect();
    packages.sort_unstable();
    packages.dedup();
    let in_package = |package: u32| {
        places.iter().zip(sums).filter(move |(place, _)| place.package == package).map(|(_, sum)| sum).sum()
    };
    let tells = packages.len() > 1 && packages.len() < places.len();
    tells.then(|| packages.into_iter().map(in_package).collect())
}

fn variation(sums: &[f64]) -> f64 {
    let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
    if mean <= 0.0 {
        return 0.0;
    }
    (sums.iter().map(|sum| (sum - mean) * (sum - mean)).sum::<f64>() / sums.len() as f64).sqrt() / mean
}
