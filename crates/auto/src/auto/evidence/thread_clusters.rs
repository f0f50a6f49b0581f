//! Clusters of threads that share data, completed from the similarity of their regions.

use cachemate_papers::clustering::ThreadMap;

/// Threads share data if their regions have at least this similarity (cosine of their counters).
const MIN_SIMILARITY: f64 = 0.3;

/// Smallest share of a thread's remote accesses at which the other thread is its partner.
const MIN_PARTNER_SHARE: f64 = 0.1;

/// Completes clusters by the similarity of regions, and by the threads whose lines a thread fetches: `fetch_share`
/// returns the share of the first thread's remote accesses that find the second one's lines. Threads that run beside
/// their partners have too few samples for a cluster of their own, and if all threads share the same data, there are no
/// clusters.
pub fn complete_clusters(
    clusters: &mut [Option<usize>],
    maps: &[ThreadMap<'_>],
    fetch_share: impl Fn(usize, usize) -> f64,
) {
    let regions: Vec<Vec<f64>> = maps
        .iter()
        .map(|map| map.counters.iter().map(|&count| f64::from(count)).collect())
        .collect();
    join_nearest(clusters, MIN_SIMILARITY, |a, b| {
        cosine_similarity(&regions[a], &regions[b])
    });
    merge_clusters(clusters, &regions);
    join_nearest(clusters, MIN_PARTNER_SHARE, fetch_share);
}

fn cosine_similarity(a: &[f64], b: &[f64]) -> f64 {
    let dot_product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    dot_product(a, b) / libm::sqrt(dot_product(a, a) * dot_product(b, b)).max(1e-9)
}

pub fn cluster_count(clusters: &[Option<usize>]) -> usize {
    let last = clusters.iter().flatten().max();
    last.map_or(0, |last| last + 1)
}

/// Adds each thread without a cluster to the cluster of the thread to which it is most similar.
fn join_nearest(
    clusters: &mut [Option<usize>],
    min_similarity: f64,
    similarity: impl Fn(usize, usize) -> f64,
) {
    for index in 0..clusters.len() {
        let neighbors = (0..clusters.len()).filter(|&neighbor| neighbor != index);
        let nearest = neighbors
            .map(|neighbor| (similarity(index, neighbor), neighbor))
            .reduce(|a, b| if b.0 > a.0 { b } else { a });
        if let Some((largest, neighbor)) = nearest
            && clusters[index].is_none()
            && largest >= min_similarity
        {
            let cluster = clusters[neighbor].unwrap_or_else(|| cluster_count(clusters));
            (clusters[index], clusters[neighbor]) = (Some(cluster), Some(cluster));
        }
    }
}

/// Merges clusters whose threads use the same regions.
fn merge_clusters(clusters: &mut [Option<usize>], regions: &[Vec<f64>]) {
    let count = cluster_count(clusters);
    for a in 0..count {
        for b in a + 1..count {
            let [first, second] = [a, b].map(|cluster| sum_of_cluster(clusters, regions, cluster));
            if cosine_similarity(&first, &second) >= MIN_SIMILARITY {
                let members = clusters.iter_mut().filter(|other| **other == Some(b));
                members.for_each(|cluster| *cluster = Some(a));
            }
        }
    }
}

fn sum_of_cluster(clusters: &[Option<usize>], regions: &[Vec<f64>], cluster: usize) -> Vec<f64> {
    let mut sums: Vec<f64> = Vec::new();
    for (_, counts) in clusters
        .iter()
        .zip(regions)
        .filter(|(other, _)| **other == Some(cluster))
    {
        sums.resize(sums.len().max(counts.len()), 0.0);
        for (sum, count) in sums.iter_mut().zip(counts) {
            *sum += count;
        }
    }
    sums
}
