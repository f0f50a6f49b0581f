//! The figures of the thesis's Figure 3.5: shMaps before and after clustering.

use cachemate_locality::shmap::SharingCriteria;
use cachemate_papers::clustering::{ClusteringMethod, ThreadMap, find_clusters};
use cachemate_report::figure::{HeatMap, Shade};

use super::setup::PlacementRound;
use crate::ResultFigure;

/// The shMaps in order of arrival, and by cluster, without data that more than one cluster touches,
/// as in the thesis.
pub(super) fn sharing_map_figures(name: &str, round: &PlacementRound) -> [ResultFigure; 2] {
    let threads: Vec<ThreadMap<'_>> = round
        .maps
        .iter()
        .map(|map| ThreadMap {
            counters: map,
            previous_cluster: None,
        })
        .collect();
    let is_global_entry = find_clusters(
        ClusteringMethod::CoClusters,
        &threads,
        &SharingCriteria::default(),
        36,
    )
    .global_entries;

    // The order is shuffled, as for an observer who does not know the clusters.
    let mut shuffled_order: Vec<usize> = (0..round.maps.len()).collect();
    cachemate_core::SplitMix64::new(1).shuffle(&mut shuffled_order);
    let mut clustered_order: Vec<usize> = (0..round.maps.len()).collect();
    clustered_order.sort_by_key(|&thread| (round.cluster_of[thread], thread));
    let retained_entries: Vec<usize> = (0..is_global_entry.len())
        .filter(|&entry| !is_global_entry[entry])
        .collect();

    let draw_map = |order: &[usize], order_label: &str| {
        let counter_value = |thread: usize, entry: usize| {
            round.maps[thread].get(entry).map(|&count| f64::from(count))
        };
        let map = HeatMap {
            title: format!("{name}: shMaps {order_label}"),
            rows: order.iter().map(|thread| thread.to_string()).collect(),
            columns: retained_entries
                .iter()
                .map(|entry| entry.to_string())
                .collect(),
            row_label: "thread".to_string(),
            column_label: "shMap entry".to_string(),
            values: order
                .iter()
                .map(|&t| {
                    retained_entries
                        .iter()
                        .map(|&entry| counter_value(t, entry).or(Some(0.0)))
                        .collect()
                })
                .collect(),
            strongest_value: None,
            shade: Shade::Gray,
            unit: String::new(),
            decimals: Some(0),
            uses_root_scale: true,
            hides_numbers: true,
        };
        let name_words: Vec<&str> = name
            .split(|c: char| !c.is_alphanumeric())
            .filter(|word| !word.is_empty())
            .collect();
        let slug = name_words.join("-");
        let name = format!(
            "tc-2-{slug}-{}",
            if order_label.starts_with("before") {
                "before"
            } else {
                "after"
            }
        );
        ResultFigure::heat_map(name, &map)
    };
    [
        draw_map(&shuffled_order, "before clustering"),
        draw_map(&clustered_order, "by cluster"),
    ]
}
