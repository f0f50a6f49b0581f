//! Compares two methods of clustering many threads by their shMaps: the thesis's scan, and co-clustering.

use std::collections::BTreeSet;

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_core::{ShMapParameters, TaskId};
use cachemate_locality::hash::mix;
use cachemate_locality::shmap::{ShMaps, SharingCriteria};
use cachemate_papers::clustering::{ClusteringMethod, ThreadMap, find_clusters};

pub const GROUP: BenchGroup = BenchGroup {
    name: "clusters",
    about: "10 000 threads in 200 clusters by their shMaps: one pass and co-clusters, milliseconds beside (bar: 50)",
    run,
};

const THREADS: u32 = 10_000;
const CLUSTERS: u32 = 200;
/// Regions of a cluster, and of all threads.
const OWN: u64 = 16;
const GLOBAL: u64 = 16;
const THRESHOLD: u64 = 36;

/// Counters of threads that touch their cluster's regions and those of all threads, through the filter of a process.
fn thread_maps(entries: usize) -> Vec<Vec<u8>> {
    let mut maps = ShMaps::new(ShMapParameters {
        entries,
        ..ShMapParameters::default()
    });
    for turn in 0..200u64 {
        for thread in 0..THREADS {
            let draw = mix(turn << 32 | u64::from(thread));
            let region = match draw >> 60 {
                0..4 => draw % GLOBAL,
                _ => ((1 + u64::from(thread % CLUSTERS)) << 20) | (draw % OWN),
            };
            maps.touch(TaskId(thread), region * 128, THREADS as usize);
        }
    }
    (0..THREADS)
        .map(|thread| {
            maps.map_of(TaskId(thread))
                .map_or(vec![0; entries], <[u8]>::to_vec)
        })
        .collect()
}

/// Number of clusters of which the filter kept a region; the others cannot be detected.
fn count_visible_clusters(maps: &[Vec<u8>], entries: usize) -> usize {
    let cluster = |thread: usize| thread as u32 % CLUSTERS;
    let owner = |entry: usize| {
        let mut touching = (0..maps.len())
            .filter(|&thread| maps[thread][entry] > 0)
            .map(cluster);
        let first = touching.next()?;
        touching
            .all(|next_cluster| next_cluster == first)
            .then_some(first)
    };
    (0..entries)
        .filter_map(owner)
        .collect::<BTreeSet<u32>>()
        .len()
}

fn run(options: &Options) -> Vec<ResultRow> {
    let mut rows = Vec::new();
    for entries in [256, 512] {
        let maps = thread_maps(entries);
        let threads: Vec<ThreadMap<'_>> = maps
            .iter()
            .map(|map| ThreadMap {
                counters: map,
                previous_cluster: None,
            })
            .collect();
        let clusters = |method| {
            find_clusters(method, &threads, &SharingCriteria::default(), THRESHOLD).cluster_count
                as u64
        };
        let contenders = vec![
            Contender::new("one pass", || clusters(ClusteringMethod::OnePass)),
            Contender::new("co-clusters", || clusters(ClusteringMethod::CoClusters))
                .compare_with(0, None),
        ];
        let input = format!("{entries} entries");
        let cluster_rows = compare(
            "clusters",
            &input,
            THREADS as usize,
            options.rounds,
            BenchClock::Thread,
            false,
            contenders,
        );
        for row in &cluster_rows {
            let ms = f64::from(THREADS) / row.millions_per_s / 1e3;
            eprintln!(
                "clusters {input} {}: {ms:.1} ms for {THREADS} threads, bar 50 ms",
                row.contender
            );
        }
        let visible = count_visible_clusters(&maps, entries);
        for method in [ClusteringMethod::OnePass, ClusteringMethod::CoClusters] {
            let cluster_count = clusters(method);
            eprintln!(
                "clusters {input} {method:?}: {cluster_count} found of {visible} with an entry, of {CLUSTERS}"
            );
        }
        rows.extend(cluster_rows);
    }
    rows
}
