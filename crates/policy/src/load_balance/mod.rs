//! Numbers on tasks, evened out over places that share something: the core of DI and DIO (CA 4, centralized sort).
//!
//! Problem: every task has a weight (its miss rate), every place (a last-level cache) has seats; the sums per place are
//! to be as even as possible, so that no cache, bus or controller is stressed more than the others, and few tasks move
//! for it. Method, one of two:
//! - [`central`]: sort all by weight, deal the heaviest to the lightest place with a seat left; name the groups after
//!   the places where most of their members already are; keep what is there unless the new sums are clearly more even.
//! - [`exchange`]: no sort and no view of all. In every round each place meets one other, and the two exchange tasks as
//!   long as that brings their sums closer. `tournament` says who meets whom, so that all pairs meet in turn.
//!
//! Properties: pure, ties by order; loads are even (a CPU never has two tasks more than another, and none waits while a
//! seat is free); tasks that are stuck stay. For weights that hold still, exchanges end, since every one lowers the sum of
//! squares; at the end two places with as many tasks each differ by at most `distance_at_most`, and so no place lies
//! further than that above the mean, which the central answer cannot be below.

mod central;
mod exchanges;
#[cfg(test)]
mod tests;

pub use central::central;
pub use exchanges::exchange;

/// A last-level cache: tasks that it has seats for (one per core as long as that is enough), and its package.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bin {
    pub seats: usize,
    pub package: u32,
}

/// One task.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TaskLoad {
    /// A weight that is finite and not negative.
    pub weight: f64,
    /// Where it is; `None` for a newcomer.
    pub at: Option<usize>,
    /// May not be moved; has a place.
    pub stuck: bool,
}

/// Sum of weights and number of tasks of every place.
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
    fn of(places: &[Bin], pieces: &[TaskLoad], at: &[usize]) -> Self {
        let mut loads = BinLoads::empty(places);
        pieces.iter().zip(at).for_each(|(piece, &place)| loads.add(place, piece.weight));
        loads
    }
}

/// Places that may still take a task, so that loads per seat come out even.
#[derive(Clone, Copy, Debug)]
struct SeatQuota {
    /// Tasks on every seat at least.
    least: usize,
    /// Seats with one more.
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

/// How uneven: standard deviation of the sums over their mean, of the places and of the packages where those are not
/// the same thing. 0 where all sums are 0.
pub fn unevenness(places: &[Bin], pieces: &[TaskLoad], at: &[usize]) -> f64 {
    let sums = BinLoads::of(places, pieces, at).sums;
    variation(&sums) + package_sums(places, &sums).map_or(0.0, |sums| variation(&sums))
}

/// `None` where packages have one place each, or all places are in one.
fn package_sums(places: &[Bin], sums: &[f64]) -> Option<Vec<f64>> {
    let mut packages: Vec<u32> = places.iter().map(|place| place.package).collect();
    packages.sort_unstable();
    packages.dedup();
    let inside = |package: u32| {
        places.iter().zip(sums).filter(move |(place, _)| place.package == package).map(|(_, sum)| sum).sum()
    };
    let tells = packages.len() > 1 && packages.len() < places.len();
    tells.then(|| packages.into_iter().map(inside).collect())
}

fn variation(sums: &[f64]) -> f64 {
    let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
    if mean <= 0.0 {
        return 0.0;
    }
    (sums.iter().map(|sum| (sum - mean) * (sum - mean)).sum::<f64>() / sums.len() as f64).sqrt() / mean
}
