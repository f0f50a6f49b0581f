//! The thesis's clustering (3.4.3): one scan over the threads, in which each is compared with one representative per
//! cluster.
//!
//! The scan takes O(threads x clusters) dot products. Entries that more than half of the threads touch are global and
//! left out, so a cluster of more than half of the threads cannot be detected. A thread that is similar to several
//! representatives (a case that the thesis leaves open) joins the most similar one, or the earlier one in a tie.

use cachemate_locality::shmap::{SharingCriteria, global_entries};

use super::{Clusters, CounterWeights, ThreadMap};

/// A bit mask of the nonzero columns of a row; rows without a common column need no dot product.
fn nonzero_mask(row: &[i16]) -> Vec<u64> {
    row.chunks(64)
        .map(|word| {
            word.iter()
                .rev()
                .fold(0, |bits, &weight| bits << 1 | u64::from(weight != 0))
        })
        .collect()
}

fn dot_product(a: &[i16], b: &[i16]) -> u64 {
    // The sum has at most 255² per entry, plus 32767² for the one column of an earlier cluster, so it cannot overflow.
    let sum: i32 = a
        .iter()
        .zip(b)
        .map(|(&a, &b)| i32::from(a) * i32::from(b))
        .sum();
    sum as u64
}

pub(super) fn find_in_one_pass(
    threads: &[ThreadMap<'_>],
    sharing: &SharingCriteria,
    threshold: u64,
) -> Clusters {
    let maps: Vec<&[u8]> = threads.iter().map(|thread| thread.counters).collect();
    let is_global = global_entries(&maps, sharing);
    let mut weights = CounterWeights::from_threads(threads, sharing.floor, threshold);
    (0..is_global.len())
        .filter(|&entry| is_global[entry])
        .for_each(|entry| weights.clear_column(entry));
    let masks: Vec<Vec<u64>> = (0..threads.len())
        .map(|thread| nonzero_mask(weights.row_of_thread(thread)))
        .collect();

    let mut representatives: Vec<usize> = Vec::new();
    let mut labels = Vec::with_capacity(threads.len());
    for thread in 0..threads.len() {
        let mut best_match: Option<(u64, usize)> = None;
        for (cluster, &representative) in representatives.iter().enumerate() {
            if masks[thread]
                .iter()
                .zip(&masks[representative])
                .all(|(a, b)| a & b == 0)
            {
                continue;
            }
            let similarity = dot_product(
                weights.row_of_thread(thread),
                weights.row_of_thread(representative),
            );
            if similarity >= threshold.max(1)
                && best_match.is_none_or(|(best_similarity, _)| similarity > best_similarity)
            {
                best_match = Some((similarity, cluster));
            }
        }
        let is_silent = masks[thread].iter().all(|&word| word == 0);
        labels.push(match best_match {
            Some((_, cluster)) => Some(cluster),
            None if is_silent => None,
            None => {
                representatives.push(thread);
                Some(representatives.len() - 1)
            }
        });
    }
    Clusters::from_labels(&labels, is_global)
}
