//! Tests whether both methods recover known clusters.

use cachemate_core::TaskId;
use cachemate_core::{ShMapParameters, SplitMix64};
use cachemate_locality::shmap::{ShMaps, SharingCriteria};
use proptest::prelude::*;

use super::*;

const BOTH: [ClusteringMethod; 2] = [ClusteringMethod::OnePass, ClusteringMethod::CoClusters];
const THRESHOLD: u64 = 36;

/// A pattern of accesses by threads: to regions of their group, to regions shared by all threads, and to private
/// regions.
struct SharingPattern<'a> {
    groups: &'a [usize],
    regions: u64,
    global: u64,
    accesses: u64,
}

/// The shMaps of the pattern's threads, and the group of each. Groups alternate, so the order gives no hint.
fn sample_maps(pattern: &SharingPattern<'_>, seed: u64) -> (Vec<Vec<u8>>, Vec<usize>) {
    let mut generator = SplitMix64::new(seed);
    let mut truth: Vec<usize> = pattern
        .groups
        .iter()
        .enumerate()
        .flat_map(|(g, &size)| vec![g; size])
        .collect();
    generator.shuffle(&mut truth);
    let mut maps = ShMaps::new(ShMapParameters::default());
    for _ in 0..pattern.accesses {
        for (thread, &group) in truth.iter().enumerate() {
            let region = match generator.draw_below(4) {
                0 if pattern.global > 0 => (1 << 30) + generator.draw_below(pattern.global),
                1 => (1 << 40) + ((thread as u64) << 20) + generator.draw_below(64),
                _ => ((group as u64 + 1) << 20) + generator.draw_below(pattern.regions),
            };
            maps.touch(TaskId(thread as u32), region * 128, truth.len());
        }
    }

    let entry = |thread: usize| {
        maps.map_of(TaskId(thread as u32))
            .map_or(vec![0; 256], <[u8]>::to_vec)
    };
    ((0..truth.len()).map(entry).collect(), truth)
}

fn cluster(method: ClusteringMethod, maps: &[Vec<u8>]) -> Clusters {
    let threads: Vec<ThreadMap<'_>> = maps
        .iter()
        .map(|map| ThreadMap {
            counters: map,
            previous_cluster: None,
        })
        .collect();
    find_clusters(method, &threads, &SharingCriteria::default(), THRESHOLD)
}

/// Whether the groups are the same, whatever their numbers.
fn is_partition(clusters: &Clusters, truth: &[usize]) -> bool {
    let pairs = (0..truth.len()).flat_map(|a| (0..a).map(move |b| (a, b)));
    clusters.cluster_by_thread.iter().all(Option::is_some)
        && pairs.into_iter().all(|(a, b)| {
            (clusters.cluster_by_thread[a] == clusters.cluster_by_thread[b])
                == (truth[a] == truth[b])
        })
}

/// Do both methods find groups of equal size if there are also regions shared by all threads?
#[test]
fn both_methods_find_groups_of_equal_size() {
    for method in BOTH {
        for groups in [&[8, 8][..], &[4, 4, 4, 4], &[16, 16]] {
            let (maps, truth) = sample_maps(
                &SharingPattern {
                    groups,
                    regions: 20,
                    global: 8,
                    accesses: 400,
                },
                7,
            );
            let clusters = cluster(method, &maps);
            assert!(
                is_partition(&clusters, &truth),
                "{method:?} {groups:?}: {clusters:?} for {truth:?}"
            );
        }
    }
}

/// Is a cluster of more than half of the threads found by co-clustering, and missed by the thesis's method?
#[test]
fn a_cluster_of_more_than_half_is_found_by_co_clustering_only() {
    let (maps, truth) = sample_maps(
        &SharingPattern {
            groups: &[11, 5],
            regions: 20,
            global: 8,
            accesses: 400,
        },
        3,
    );
    assert!(is_partition(
        &cluster(ClusteringMethod::CoClusters, &maps),
        &truth
    ));
    let by_scan = cluster(ClusteringMethod::OnePass, &maps);
    let big = (0..truth.len()).filter(|&thread| truth[thread] == 0);
    assert!(
        big.into_iter()
            .all(|thread| by_scan.cluster_by_thread[thread].is_none()),
        "{by_scan:?}"
    );
}

/// Is a group found as a whole if only a few of its threads share each region, so that modularity splits it?
#[test]
fn a_group_that_shares_by_parts_is_found_whole() {
    const SIZES: [usize; 2] = [10, 6];
    let truth: Vec<usize> = SIZES
        .iter()
        .enumerate()
        .flat_map(|(group, &size)| vec![group; size])
        .collect();

    for seed in 0..20 {
        let mut generator = SplitMix64::new(seed);
        let mut maps = vec![vec![0u8; 256]; truth.len()];
        (0..90).for_each(|entry| {
            let group = usize::from(entry >= 55);
            let mut members: Vec<usize> = (0..truth.len())
                .filter(|&thread| truth[thread] == group)
                .collect();
            generator.shuffle(&mut members);
            let touching = 2 + generator.draw_below(4) as usize;
            members
                .iter()
                .take(touching)
                .for_each(|&thread| maps[thread][entry] = 3 + generator.draw_below(4) as u8);
        });
        let clusters = cluster(ClusteringMethod::CoClusters, &maps);
        assert!(is_partition(&clusters, &truth), "seed {seed}: {clusters:?}");
    }
}

/// Do threads that share with all others, or with none, stay unclustered?
#[test]
fn threads_that_share_with_all_or_none_stay_unclustered() {
    for method in BOTH {
        for (groups, regions) in [(&[16][..], 32), (&[1; 16][..], 32)] {
            let (maps, _) = sample_maps(
                &SharingPattern {
                    groups,
                    regions,
                    global: 0,
                    accesses: 600,
                },
                11,
            );
            let clusters = cluster(method, &maps);
            assert_eq!(
                clusters.cluster_count, 0,
                "{method:?} {groups:?}: {clusters:?}"
            );
        }
    }
}

/// Do clusters stay together if only other threads leave traces, and does a thread that changed groups move?
#[test]
fn clusters_are_kept_unless_a_thread_changed_groups() {
    let entry = |regions: &[usize]| {
        (0..256)
            .map(|e| if regions.contains(&(e / 16)) { 20 } else { 0 })
            .collect::<Vec<u8>>()
    };
    // Thread 7 was in the cluster of 4 to 6; now it touches the regions of 0 to 2, which observe its writes.
    let mut maps: Vec<Vec<u8>> = vec![entry(&[]); 8];
    [0, 1, 2, 7]
        .into_iter()
        .for_each(|thread| maps[thread] = entry(&[5]));

    for method in BOTH {
        let threads: Vec<ThreadMap<'_>> = (0..8)
            .map(|t| ThreadMap {
                counters: &maps[t],
                previous_cluster: Some(t / 4),
            })
            .collect();
        let clusters = find_clusters(method, &threads, &SharingCriteria::default(), THRESHOLD);
        assert_eq!(
            clusters.cluster_by_thread,
            [0, 0, 0, 0, 1, 1, 1, 0].map(Some),
            "{method:?}"
        );
    }
}

/// Does empty input give no clusters?
#[test]
fn empty_input_gives_no_clusters() {
    for method in BOTH {
        assert_eq!(
            find_clusters(method, &[], &SharingCriteria::default(), 0).cluster_count,
            0
        );
        assert_eq!(
            cluster(method, &[vec![], vec![]]).cluster_by_thread,
            [None, None]
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Does the order of threads not affect separate groups, and are results valid for any counters?
    #[test]
    fn any_counters_give_valid_clusters(maps in prop::collection::vec(prop::collection::vec(any::<u8>(), 16), 0..12)) {
        for method in BOTH {
            let clusters = cluster(method, &maps);
            let members = clusters.members();
            prop_assert_eq!(clusters.cluster_by_thread.len(), maps.len());
            prop_assert_eq!(members.len(), clusters.cluster_count);
            prop_assert!(members.iter().all(|of| of.len() > 1 && of.len() < maps.len()));
            prop_assert!(members.windows(2).all(|pair| pair[0][0] < pair[1][0]));
            prop_assert_eq!(&clusters, &cluster(method, &maps));
        }
    }
}
