//! Clusters of threads that share data, completed from the similarity of their regions.

use crate::clustering::ThreadMap;

/// Threads share data if their regions have at least this similarity (cosine of their counters).
const ALIKE: f64 = 0.3;

/// Adds each thread without a cluster to the thread whose regions are most similar. Threads that run beside their
/// partners have too few samples for a cluster of their own, and if all threads share the same data, there are no
/// clusters.
pub fn join_unclustered(mut cluster_of: Vec<Option<usize>>, maps: &[ThreadMap<'_>]) -> Vec<Option<usize>> {
    let dot = |a: usize, b: usize| -> f64 {
        maps[a].counters.iter().zip(maps[b].counters).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
    };
    let alike = |a: usize, b: usize| dot(a, b) / libm::sqrt(dot(a, a) * dot(b, b)).max(1e-9);
    let mut next = cluster_of.iter().flatten().max().map_or(0, |last| last + 1);
    for index in 0..cluster_of.len() {
        if cluster_of[index].is_some() {
            continue;
        }
        let others = (0..cluster_of.len())
            .filter(|&neighbor| neighbor != index)
            .map(|neighbor| (alike(index, neighbor), neighbor));
        let Some((largest_similarity, neighbor)) = others.reduce(|a, b| if b.0 > a.0 { b } else { a }) else {
            continue;
        };
        if largest_similarity < ALIKE {
            continue;
        }
        let cluster = cluster_of[neighbor].unwrap_or(next);
        next = next.max(cluster + 1);
        (cluster_of[index], cluster_of[neighbor]) = (Some(cluster), Some(cluster));
    }
    merge_groups(cluster_of, maps)
}

/// Merges clusters whose threads use the same regions.
fn merge_groups(mut cluster_of: Vec<Option<usize>>, maps: &[ThreadMap<'_>]) -> Vec<Option<usize>> {
    let count = cluster_of.iter().flatten().max().map_or(0, |last| last + 1);
    let sum_of_cluster = |clusters: &[Option<usize>], cluster: usize| {
        let mut sums: Vec<f64> = Vec::new();
        for (_, map) in clusters.iter().zip(maps).filter(|(task_cluster, _)| **task_cluster == Some(cluster)) {
            sums.resize(sums.len().max(map.counters.len()), 0.0);
            sums.iter_mut().zip(map.counters).for_each(|(sum, &counter)| *sum += f64::from(counter));
        }
        sums
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    for a in 0..count {
        for b in a + 1..count {
            let (map_sum, other_sum) = (sum_of_cluster(&cluster_of, a), sum_of_cluster(&cluster_of, b));
            if dot(&map_sum, &other_sum)
                >= ALIKE * libm::sqrt(dot(&map_sum, &map_sum) * dot(&other_sum, &other_sum)).max(1e-9)
            {
                cluster_of.iter_mut().filter(|cluster| **cluster == Some(b)).for_each(|cluster| *cluster = Some(a));
            }
        }
    }
    cluster_of
}
