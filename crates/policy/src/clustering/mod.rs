//! Threads that share data, out of their shMaps (thesis 3.4.3): one interface, two methods, and who goes to which chip.
//!
//! Problem: sampled counters of remote accesses per thread and region; wanted are groups of threads that touch the same
//! regions, without saying how many there are, for thousands of threads while the programs run. Method: counters below a
//! floor count as 0; [`one_pass`] is the thesis's scan against one representative per cluster; [`co_clusters`] finds
//! groups of threads and of regions together. Threads that an earlier round put on one chip leave no trace of what they
//! share, so their being together stands in for it, as one more region that they touch just as much as the threshold asks.
//!
//! Properties: pure; threads are told apart by their place in the list; a cluster has two threads or more; a cluster that
//! holds every thread separates nobody from anybody and is not reported.

use cachemate_locality::shmap::SharingCriteria;
use serde::Deserialize;

pub mod assign;
mod co_clusters;
mod one_pass;

/// What was seen of one thread. All threads handed over together have counters of one filter.
#[derive(Clone, Copy, Debug)]
pub struct ThreadMap<'a> {
    /// Sampled remote accesses by entry of the shMap, each at most 255.
    pub counters: &'a [u8],
    /// The cluster that it shares a chip with since an earlier round.
    pub together: Option<usize>,
}

/// How clusters are found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClusteringMethod {
    /// The thesis's: one scan, each cluster represented by its first thread, data of more than half the threads ignored.
    OnePass,
    /// Threads and regions grouped together by bipartite modularity; what is global is judged against the clusters.
    #[default]
    CoClusters,
}

/// The clusters of threads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Clusters {
    /// Cluster of each thread; `None` = unclustered. Clusters are numbered from 0 in the order of their first threads.
    pub of: Vec<Option<usize>>,
    /// How many clusters there are.
    pub count: usize,
    /// Shared by more than one cluster, by entry of the shMap.
    pub global: Vec<bool>,
}

impl Clusters {
    /// The threads of each cluster, in their order.
    pub fn members(&self) -> Vec<Vec<usize>> {
        let mut members = vec![Vec::new(); self.count];
        for (thread, cluster) in self.of.iter().enumerate() {
            if let Some(cluster) = *cluster {
                members[cluster].push(thread);
            }
        }
        members
    }

    /// Renumbers labels in the order of first threads; labels of one thread, and one of all threads, are no clusters.
    fn of_labels(labels: &[Option<usize>], global: Vec<bool>) -> Self {
        let labels_end = labels.iter().flatten().max().map_or(0, |last| last + 1);
        let mut sizes = vec![0; labels_end];
        labels.iter().flatten().for_each(|&label| sizes[label] += 1);
        let mut numbers: Vec<Option<usize>> = vec![None; labels_end];
        let mut count = 0;
        let of = labels.iter().map(|label| {
            let label = label.filter(|&label| sizes[label] > 1 && sizes[label] < labels.len())?;
            Some(*numbers[label].get_or_insert_with(|| {
                count += 1;
                count - 1
            }))
        });
        let of = of.collect();
        Clusters { of, count, global }
    }
}

/// The thesis's threshold: least similarity of two threads of a cluster, and the samples of a thread that it is of (10^6
/// samples, 16 threads).
pub const THRESHOLD: f64 = 40_000.0;
/// Samples of a thread that [`THRESHOLD`] is of.
pub const THRESHOLD_SAMPLES_PER_THREAD: f64 = 62_500.0;

/// `threshold` at `share` of the samples that it is of: dot products grow with the square. Four regions at the floor are
/// the least that is no accident.
pub fn scaled_threshold(threshold: f64, share: f64, floor: u8) -> u64 {
    let least = 4.0 * f64::from(floor) * f64::from(floor);
    libm::round((threshold * share * share).max(least).max(1.0)).min(1e9) as u64
}

/// Finds the clusters among threads. `threshold` is the least similarity (a dot product of counters) of two threads
/// that belong together.
pub fn find(
    method: ClusteringMethod,
    threads: &[ThreadMap<'_>],
    sharing: &SharingCriteria,
    threshold: u64,
) -> Clusters {
    match method {
        ClusteringMethod::OnePass => one_pass::find(threads, sharing, threshold),
        ClusteringMethod::CoClusters => co_clusters::find(threads, sharing, threshold),
    }
}

/// What being together before counts as, like a counter: its square is just enough for the threshold.
fn together_weight(threshold: u64) -> u16 {
    libm::ceil(libm::sqrt(threshold as f64)).min(f64::from(i16::MAX)) as u16
}

/// Entries of the shMaps, and columns in all: behind the entries one for each earlier cluster.
fn entries_and_columns(threads: &[ThreadMap<'_>]) -> (usize, usize) {
    let entries = threads.iter().map(|thread| thread.counters.len()).max().unwrap_or(0);
    let earlier = threads.iter().filter_map(|thread| thread.together).max().map_or(0, |last| last + 1);
    (entries, entries + earlier)
}

/// Counters as weights: below the floor 0, in rows of `columns`; after the `entries` of the shMap one column for each
/// earlier cluster.
struct CounterWeights {
    columns: usize,
    rows: Vec<i16>,
}

impl CounterWeights {
    fn of(threads: &[ThreadMap<'_>], floor: u8, threshold: u64) -> Self {
        let (entries, columns) = entries_and_columns(threads);
        let mut rows = vec![0; columns * threads.len()];
        let together = together_weight(threshold) as i16;
        for (thread, row) in threads.iter().zip(rows.chunks_exact_mut(columns.max(1))) {
            for (weight, &counter) in row.iter_mut().zip(thread.counters) {
                *weight = if counter >= floor { i16::from(counter) } else { 0 };
            }
            if let Some(cluster) = thread.together {
                row[entries + cluster] = together;
            }
        }
        CounterWeights { columns, rows }
    }

    fn row(&self, thread: usize) -> &[i16] {
        &self.rows[thread * self.columns..(thread + 1) * self.columns]
    }

    fn clear_column(&mut self, column: usize) {
        self.rows.iter_mut().skip(column).step_by(self.columns.max(1)).for_each(|weight| *weight = 0);
    }
}

#[cfg(test)]
mod tests;
