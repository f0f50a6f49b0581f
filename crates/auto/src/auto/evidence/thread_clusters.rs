//! Clusters of threads that share data, completed from the similarity of their regions.

use cachemate_papers::clustering::ThreadMap;

/// Threads share data if their regions have at least this similarity (cosine of their counters).
const MIN_SIMILARITY: f64 = 0.3;

/// Adds each thread without a cluster to the thread whose regions are most similar. Threads that run beside their
/// partners have too few samples for a cluster of their own, and if all threads share the same data, there are no
/// clusters.
pub fn join_unclustered(
    mut cluster_by_thread: Vec<Option<usize>>,
    maps: &[ThreadMap<'_>],
) -> Vec<Option<usize>> {
    let dot_product = |a: usize, b: usize| -> f64 {
        maps[a]
            .counters
            .iter()
            .zip(maps[b].counters)
            .map(|(&x, &y)| f64::from(x) * f64::from(y))
            .sum()
    };
    let cosine_similarity = |a: usize, b: usize| {
        dot_product(a, b) / libm::sqrt(dot_product(a, a) * dot_product(b, b)).max(1e-9)
    };
    let mut next_cluster = cluster_by_thread
        .iter()
        .flatten()
        .max()
        .map_or(0, |last| last + 1);
    for index in 0..cluster_by_thread.len() {
        if cluster_by_thread[index].is_some() {
            continue;
        }
        let similarities = (0..cluster_by_thread.len())
            .filter(|&neighbor| neighbor != index)
            .map(|neighbor| (cosine_similarity(index, neighbor), neighbor));
        let Some((largest_similarity, neighbor)) =
            similarities.reduce(|a, b| if b.0 > a.0 { b } else { a })
        else {
            continue;
        };
        if largest_similarity < MIN_SIMILARITY {
            continue;
        }
        let cluster = cluster_by_thread[neighbor].unwrap_or(next_cluster);
        next_cluster = next_cluster.max(cluster + 1);
        (cluster_by_thread[index], cluster_by_thread[neighbor]) = (Some(cluster), Some(cluster));
    }
    merge_clusters(cluster_by_thread, maps)
}

/// Merges clusters whose threads use the same regions.
fn merge_clusters(
    mut cluster_by_thread: Vec<Option<usize>>,
    maps: &[ThreadMap<'_>],
) -> Vec<Option<usize>> {
    let cluster_count = cluster_by_thread
        .iter()
        .flatten()
        .max()
        .map_or(0, |last| last + 1);
    let sum_of_cluster = |clusters: &[Option<usize>], cluster: usize| {
        let mut sums: Vec<f64> = Vec::new();
        for (_, map) in clusters
            .iter()
            .zip(maps)
            .filter(|(task_cluster, _)| **task_cluster == Some(cluster))
        {
            sums.resize(sums.len().max(map.counters.len()), 0.0);
            sums.iter_mut()
                .zip(map.counters)
                .for_each(|(sum, &counter)| *sum += f64::from(counter));
        }
        sums
    };
    let dot_product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    for a in 0..cluster_count {
        for b in a + 1..cluster_count {
            let (map_sum, other_sum) = (
                sum_of_cluster(&cluster_by_thread, a),
                sum_of_cluster(&cluster_by_thread, b),
            );
            if dot_product(&map_sum, &other_sum)
                >= MIN_SIMILARITY
                    * libm::sqrt(
                        dot_product(&map_sum, &map_sum) * dot_product(&other_sum, &other_sum),
                    )
                    .max(1e-9)
            {
                cluster_by_thread
                    .iter_mut()
                    .filter(|cluster| **cluster == Some(b))
                    .for_each(|cluster| *cluster = Some(a));
            }
        }
    }
    cluster_by_thread
}
