//! Finds clusters of threads that share data from their shMaps (thesis 3.4.3), by one of two methods, and assigns the
//! clusters to chips.
//!
//! Problem: from sampled counters of remote accesses per thread and region, the groups of threads that touch the same
//! regions are to be found. The number of groups is not given, there may be thousands of threads, and the programs keep
//! running. Method: counters below a floor count as 0. [`one_pass`] is the thesis's scan against one representative per
//! cluster; [`co_clusters`] groups threads and regions jointly. Threads that an earlier round put on one chip cause no
//! remote accesses, so their sharing can no longer be observed. Their earlier cluster therefore counts as one more
//! region, whose weight just reaches the threshold.
//!
//! Properties: the functions are pure and identify threads by index. A cluster has at least two threads. A cluster of
//! all threads is not reported, because it does not help to divide the threads among chips.

use cachemate_locality::shmap::SharingCriteria;
use serde::Deserialize;

pub mod assign;
mod co_clusters;
mod one_pass;

/// The observations of one thread. All threads of a call have counters of the same filter.
#[derive(Clone, Copy, Debug)]
pub struct ThreadMap<'a> {
    /// Sampled remote accesses by entry of the shMap, each at most 255.
    pub counters: &'a [u8],
    /// Earlier cluster with which the thread shares a chip, if any.
    pub previous_cluster: Option<usize>,
}

/// The method of clustering.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClusteringMethod {
    /// The method of the thesis: one scan in which each cluster is represented by its first thread. Data that more than
    /// half of the threads touch is ignored.
    OnePass,
    /// Joint grouping of threads and regions by bipartite modularity, in which data is global with respect to the
    /// clusters.
    #[default]
    CoClusters,
}

/// The clusters of threads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Clusters {
    /// Cluster of each thread; `None` if it is unclustered. Clusters are numbered from 0 in the order of their first
    /// threads.
    pub cluster_by_thread: Vec<Option<usize>>,
    /// Number of clusters.
    pub cluster_count: usize,
    /// Entries of the shMap that more than one cluster shares.
    pub global_entries: Vec<bool>,
}

impl Clusters {
    /// The threads of each cluster, in ascending order.
    pub fn members(&self) -> Vec<Vec<usize>> {
        let mut members = vec![Vec::new(); self.cluster_count];
        for (thread, cluster) in self.cluster_by_thread.iter().enumerate() {
            if let Some(cluster) = *cluster {
                members[cluster].push(thread);
            }
        }
        members
    }

    /// Renumbers labels in the order of first threads. A label of a single thread, or of all threads, is not a cluster.
    fn from_labels(labels: &[Option<usize>], global_entries: Vec<bool>) -> Self {
        let label_count = labels.iter().flatten().max().map_or(0, |last| last + 1);
        let mut sizes = vec![0; label_count];
        labels.iter().flatten().for_each(|&label| sizes[label] += 1);
        let mut cluster_numbers: Vec<Option<usize>> = vec![None; label_count];
        let mut cluster_count = 0;
        let thread_clusters = labels.iter().map(|label| {
            let label = label.filter(|&label| sizes[label] > 1 && sizes[label] < labels.len())?;
            Some(*cluster_numbers[label].get_or_insert_with(|| {
                cluster_count += 1;
                cluster_count - 1
            }))
        });
        let cluster_by_thread = thread_clusters.collect();
        Clusters {
            cluster_by_thread,
            cluster_count,
            global_entries,
        }
    }
}

/// The thesis's threshold: the minimum similarity of two threads of a cluster, for [`THRESHOLD_SAMPLES_PER_THREAD`]
/// samples of each thread (10^6 samples, 16 threads).
pub const THRESHOLD: f64 = 40_000.0;
/// Number of samples per thread for which [`THRESHOLD`] is stated.
pub const THRESHOLD_SAMPLES_PER_THREAD: f64 = 62_500.0;

/// Scales `threshold` to the fraction `sample_share` of the samples for which it is stated; dot products grow with the
/// square. The result is at least that of four regions at the floor, the smallest that exceeds chance.
pub fn scaled_threshold(threshold: f64, sample_share: f64, floor: u8) -> u64 {
    let minimum = 4.0 * f64::from(floor) * f64::from(floor);
    libm::round(
        (threshold * sample_share * sample_share)
            .max(minimum)
            .max(1.0),
    )
    .min(1e9) as u64
}

/// Finds the clusters among threads. `threshold` is the minimum similarity (a dot product of counters) of two threads
/// of a cluster.
pub fn find_clusters(
    method: ClusteringMethod,
    threads: &[ThreadMap<'_>],
    sharing: &SharingCriteria,
    threshold: u64,
) -> Clusters {
    match method {
        ClusteringMethod::OnePass => one_pass::find_in_one_pass(threads, sharing, threshold),
        ClusteringMethod::CoClusters => co_clusters::find_co_clusters(threads, sharing, threshold),
    }
}

/// The weight of an earlier cluster, on the scale of a counter; its square just reaches the threshold.
fn earlier_cluster_weight(threshold: u64) -> u16 {
    libm::ceil(libm::sqrt(threshold as f64)).min(f64::from(i16::MAX)) as u16
}

/// The number of entries of the shMaps, and the number of columns: one for each entry, followed by one for each earlier
/// cluster.
fn entries_and_columns(threads: &[ThreadMap<'_>]) -> (usize, usize) {
    let entry_count = threads
        .iter()
        .map(|thread| thread.counters.len())
        .max()
        .unwrap_or(0);
    let earlier_count = threads
        .iter()
        .filter_map(|thread| thread.previous_cluster)
        .max()
        .map_or(0, |last| last + 1);
    (entry_count, entry_count + earlier_count)
}

/// Counters as weights, in rows of `column_count`; counters below the floor are 0. The entries of the shMap are
/// followed by one column for each earlier cluster.
struct CounterWeights {
    column_count: usize,
    rows: Vec<i16>,
}

impl CounterWeights {
    fn from_threads(threads: &[ThreadMap<'_>], floor: u8, threshold: u64) -> Self {
        let (entry_count, column_count) = entries_and_columns(threads);
        let mut rows = vec![0; column_count * threads.len()];
        let cluster_weight = earlier_cluster_weight(threshold) as i16;
        for (thread, row) in threads
            .iter()
            .zip(rows.chunks_exact_mut(column_count.max(1)))
        {
            for (weight, &counter) in row.iter_mut().zip(thread.counters) {
                *weight = if counter >= floor {
                    i16::from(counter)
                } else {
                    0
                };
            }
            if let Some(cluster) = thread.previous_cluster {
                row[entry_count + cluster] = cluster_weight;
            }
        }

        CounterWeights { column_count, rows }
    }

    fn row_of_thread(&self, thread: usize) -> &[i16] {
        &self.rows[thread * self.column_count..(thread + 1) * self.column_count]
    }

    fn clear_column(&mut self, column: usize) {
        self.rows
            .iter_mut()
            .skip(column)
            .step_by(self.column_count.max(1))
            .for_each(|weight| *weight = 0);
    }
}

#[cfg(test)]
mod tests;
