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
pub(super) fn round_accuracies(records: &[WindowRecord], truth: &[Option<u32>], entries: usize) -> Vec<RoundAccuracy> {
    let mut rounds: BTreeMap<ProbeId, (u64, u64, Vec<(TaskId, u64)>)> = BTreeMap::new();
    for record in records {
        for answer in &record.observation.probe_results {
            let ProbeEvidence::Samples { samples, events, line_bytes, .. } = &answer.evidence else { continue };
            let round = rounds.entry(answer.probe).or_insert((0, 0, Vec::new()));
            round.0 = record.observation.window;
            round.1 += events;
            round.2.extend(samples.iter().map(|s| (s.task, s.virtual_line * u64::from(*line_bytes))));
        }
    }
    rounds
        .into_values()
        .map(|(window, events, samples)| round_accuracy(window, events, &samples, truth, entries))
        .collect()
}

fn round_accuracy(
    window: u64,
    events: u64,
    samples: &[(TaskId, u64)],
    truth: &[Option<u32>],
    entries: usize,
) -> RoundAccuracy {
    let mut maps = ShMaps::new(ShMapParameters { entries, ..ShMapParameters::default() });
    let passed = samples.iter().filter(|&&(task, address)| maps.touch(task, address, truth.len())).count();
    let none = vec![0u8; entries];
    let rows: Vec<&[u8]> = (0..truth.len()).map(|index| maps.map_of(TaskId(index as u32)).unwrap_or(&none)).collect();
    let sharing = SharingCriteria::default();
    let global = global_entries(&rows, &sharing);
    let by_entry = |min_count: u8, threads: usize| {
        let is_touched_by_enough =
            |entry: &usize| rows.iter().filter(|row| row[*entry] >= min_count).count() >= threads;
        (0..entries).filter(is_touched_by_enough).count()
    };
    let mean_similarity = |same_group: bool| {
        let (mut sum, mut pairs) = (0u64, 0u64);
        for a in 0..truth.len() {
            for b in a + 1..truth.len() {
                if truth[a].is_some() && truth[b].is_some() && (truth[a] == truth[b]) == same_group {
                    sum += similarity(rows[a], rows[b], &global, sharing.floor);
                    pairs += 1;
                }
            }
        }
        sum as f64 / pairs.max(1) as f64
    };
    RoundAccuracy {
        window,
        samples: samples.len(),
        events,
        passed,
        claimed: by_entry(1, 1),
        shared: by_entry(sharing.floor, 2),
        global: global.iter().filter(|&&global| global).count(),
        inside: mean_similarity(true),
        across: mean_similarity(false),
    }
}
