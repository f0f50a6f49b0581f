//! The figures of the thesis's Figure 3.5: shMaps before and after clustering.

use cachemate_locality::shmap::SharingCriteria;
use cachemate_policy::clustering::{ClusteringMethod, ThreadMap, find};
use cachemate_report::figure::{HeatMap, Shade};

use super::setup::PlacementRound;
use crate::ResultFigure;

/// shMaps in order of arrival, and by cluster, without data that more than one cluster touches, as in the thesis.
pub(super) fn draw_sharing_maps(name: &str, round: &PlacementRound) -> [ResultFigure; 2] {
    let threads: Vec<ThreadMap<'_>> =
        round.maps.iter().map(|map| ThreadMap { counters: map, previous_cluster: None }).collect();
    let global = find(ClusteringMethod::CoClusters, &threads, &SharingCriteria::default(), 36).global;
    // The order is shuffled, as for an observer who does not know the clusters.
    let mut shuffled_order: Vec<usize> = (0..round.maps.len()).collect();
    cachemate_core::SplitMix64::new(1).shuffle(&mut shuffled_order);
    let mut clustered_order: Vec<usize> = (0..round.maps.len()).collect();
    clustered_order.sort_by_key(|&thread| (round.cluster_of[thread], thread));
    let retained: Vec<usize> = (0..global.len()).filter(|&entry| !global[entry]).collect();
    let draw_map = |order: &[usize], when: &str| {
        let counter_value = |thread: usize, entry: usize| round.maps[thread].get(entry).map(|&count| f64::from(count));
        let map = HeatMap {
            title: format!("{name}: shMaps {when}"),
            rows: order.iter().map(|thread| thread.to_string()).collect(),
            columns: retained.iter().map(|entry| entry.to_string()).collect(),
            row_label: "thread".to_string(),
            column_label: "shMap entry".to_string(),
            values: order
                .iter()
                .map(|&t| retained.iter().map(|&entry| counter_value(t, entry).or(Some(0.0))).collect())
                .collect(),
            full: None,
            shade: Shade::Grey,
            unit: String::new(),
            decimals: Some(0),
            by_root: true,
            bare: true,
        };
        let name_words: Vec<&str> =
            name.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
        let slug = name_words.join("-");
        let name = format!("tc-2-{slug}-{}", if when.starts_with("before") { "before" } else { "after" });
        ResultFigure::heat_map(name, &map)
    };
    [draw_map(&shuffled_order, "before clustering"), draw_map(&clustered_order, "by cluster")]
}
