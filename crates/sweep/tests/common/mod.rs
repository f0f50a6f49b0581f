//! A sweep of runs that need no input.

use std::collections::BTreeMap;

use cachemate_sweep::{Manifest, ManifestHeader, SweepKind, SweepTask, SweepTaskId};
use serde_json::Value;

/// A manifest of runs `run-0`, `run-1` and so on.
pub fn sample_manifest(count: usize) -> Manifest {
    let point = |index: usize| format!("{{\"run\":\"run-{index}\"}}").into_boxed_str();
    let tasks = (0..count)
        .map(|index| SweepTask {
            id: SweepTaskId::from_text(&point(index)),
            point: point(index),
        })
        .collect();
    let header = ManifestHeader {
        format: 1,
        name: "numbers".to_string(),
        description: String::new(),
        kind: SweepKind::Repro,
        version: "1".to_string(),
        detail: false,
        axes: vec!["run".to_string()],
        tasks: count,
        scenarios: BTreeMap::new(),
        machines: BTreeMap::new(),
        recordings: BTreeMap::new(),
        repro: Value::Null,
    };
    Manifest { header, tasks }
}
