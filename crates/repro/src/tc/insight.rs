//! Reasons why clusters were found or not: each round of sampling, split by the program's own partition.

use std::collections::BTreeMap;

use cachemate_core::{ProbeEvidence, ProbeId, ShMapParameters, TaskId, WindowRecord};
use cachemate_locality::shmap::{ShMaps, SharingCriteria, global_entries, similarity};
use serde::{Deserialize, Serialize};

/// One round of sampling, with its shMaps compared with the program's own groups.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct RoundAccuracy {
    /// Window of the last sampling result.
    pub window: u64,
    pub samples: usize,
    /// Remote accesses in the same time, sampled or not.
    pub events: u64,
    /// Samples that passed the filter.
    pub passed: usize,
    /// Filter entries that belong to a region, and those that at least two threads touch at or above the floor.
    pub claimed: usize,
    pub shared: usize,
    /// Shared regions that more than half of the threads touch.
    pub global: usize,
    /// Mean similarity of two workers of the same group, and of different groups.
    pub inside: f64,
    pub across: f64,
}

/// All rounds of a run, in order.
pub(super) fn round_accuracies(
    records: &[WindowRecord],
    true_groups: &[Option<u32>],
) -> Vec<RoundAccuracy> {
    let mut samples_by_round: BTreeMap<ProbeId, (u64, u64, Vec<(TaskId, u64)>)> = BTreeMap::new();

    for record in records {
        for probe_result in &record.observation.probe_results {
            let ProbeEvidence::Samples {
                samples,
                events,
                line_bytes,
                ..
            } = &probe_result.evidence
            else {
                continue;
            };
            let round = samples_by_round
                .entry(probe_result.probe)
                .or_insert((0, 0, Vec::new()));
            round.0 = record.observation.window;
            round.1 += events;
            round.2.extend(
                samples
                    .iter()
                    .map(|s| (s.task, s.virtual_line * u64::from(*line_bytes))),
            );
        }
    }
    samples_by_round
        .into_values()
        .map(|(window, events, samples)| measure_accuracy(window, events, &samples, true_groups))
        .collect()
}

fn measure_accuracy(
    window: u64,
    remote_accesses: u64,
    samples: &[(TaskId, u64)],
    true_groups: &[Option<u32>],
) -> RoundAccuracy {
    let parameters = ShMapParameters::default();
    let entries = parameters.entries;
    let mut maps = ShMaps::new(parameters);
    let passed_samples = samples
        .iter()
        .filter(|&&(task, address)| maps.touch(task, address, true_groups.len()))
        .count();
    let empty_map = vec![0u8; entries];
    let map_rows: Vec<&[u8]> = (0..true_groups.len())
        .map(|index| maps.map_of(TaskId(index as u32)).unwrap_or(&empty_map))
        .collect();

    let sharing = SharingCriteria::default();
    let is_global_entry = global_entries(&map_rows, &sharing);
    let count_entries_touched = |min_count: u8, threads: usize| {
        let is_touched_by_enough = |entry: &usize| {
            map_rows
                .iter()
                .filter(|row| row[*entry] >= min_count)
                .count()
                >= threads
        };
        (0..entries).filter(is_touched_by_enough).count()
    };

    let mean_similarity = |is_same_group: bool| {
        let (mut sum, mut pair_count) = (0u64, 0u64);
        for a in 0..true_groups.len() {
            for b in a + 1..true_groups.len() {
                if true_groups[a].is_some()
                    && true_groups[b].is_some()
                    && (true_groups[a] == true_groups[b]) == is_same_group
                {
                    sum += similarity(map_rows[a], map_rows[b], &is_global_entry, sharing.floor);
                    pair_count += 1;
                }
            }
        }
        sum as f64 / pair_count.max(1) as f64
    };

    RoundAccuracy {
        window,
        samples: samples.len(),
        events: remote_accesses,
        passed: passed_samples,
        claimed: count_entries_touched(1, 1),
        shared: count_entries_touched(sharing.floor, 2),
        global: is_global_entry.iter().filter(|&&global| global).count(),
        inside: mean_similarity(true),
        across: mean_similarity(false),
    }
}
