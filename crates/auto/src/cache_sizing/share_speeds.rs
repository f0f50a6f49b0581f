//! Speeds of processes under the shares in force.
//!
//! Only undisturbed windows count. A trace slows its program to a quarter of its speed (thesis 5.6.2), and neighbors,
//! streams and samples take resources from all programs. While pages move, the intended shares are not in effect yet.
//! Properties: rates are sums over windows, so short windows weigh less. Memory is bounded.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{
    CacheLevel, CounterEvent, Observation, ProbeRequest, ProcessId, StallCause, TaskSample,
};
use cachemate_papers::partition::demand_curve::MeasuredSpeed;

use crate::verifier::speeds::is_disturbing;

/// Maximum number of windows kept for each process.
const MAX_WINDOWS: usize = 64;

/// The most recent windows since the shares were last changed.
#[derive(Clone, Debug, Default)]
pub struct ShareSpeeds {
    counts: BTreeMap<ProcessId, VecDeque<WindowCounts>>,
    pub windows: u32,
}

/// The counts of one process in one window; `None` means not counted.
#[derive(Clone, Copy, PartialEq, Debug)]
struct WindowCounts {
    instructions: f64,
    cycles: f64,
    /// Misses of the cache.
    misses: Option<f64>,
    stall_cycles: Option<f64>,
}

/// The causes of stalls on the memory behind a cache of this level.
fn stalls_beyond(level: CacheLevel) -> impl Iterator<Item = StallCause> {
    let hits = [CacheLevel::L2, CacheLevel::L3, CacheLevel::L4]
        .into_iter()
        .filter(move |&outer_level| outer_level > level)
        .map(StallCause::Hit);
    hits.chain([
        StallCause::LocalMemory,
        StallCause::RemoteMemory,
        StallCause::BusQueue,
    ])
}

impl WindowCounts {
    fn from_sample(task: &TaskSample, level: CacheLevel) -> Option<Self> {
        let instructions = task.counts.get(CounterEvent::Instructions)?;
        let cycles = task.counts.get(CounterEvent::Cycles)?;
        if cycles <= 0.0 {
            return None;
        }
        let stalls = stalls_beyond(level)
            .filter_map(|cause| task.counts.get(CounterEvent::StallCycles(cause)));
        Some(WindowCounts {
            instructions,
            cycles,
            misses: task.counts.get(CounterEvent::Misses(level)),
            stall_cycles: stalls.reduce(|sum, cycles| sum + cycles),
        })
    }

    fn plus(self, addend: WindowCounts) -> Self {
        let sum_if_both = |a: Option<f64>, b: Option<f64>| Some(a? + b?);
        WindowCounts {
            instructions: self.instructions + addend.instructions,
            cycles: self.cycles + addend.cycles,
            misses: sum_if_both(self.misses, addend.misses),
            stall_cycles: sum_if_both(self.stall_cycles, addend.stall_cycles),
        }
    }
}

impl ShareSpeeds {
    /// Adds a window if it is undisturbed and a process ran. Returns whether it was added.
    pub fn add(
        &mut self,
        observation: &Observation,
        level: CacheLevel,
        probes: &[ProbeRequest],
    ) -> bool {
        let is_disturbed = probes.iter().any(|probe| is_disturbing(&probe.kind));
        if is_disturbed || !observation.applied.pending.is_empty() {
            return false;
        }
        let mut window: BTreeMap<ProcessId, WindowCounts> = BTreeMap::new();
        for task in &observation.tasks {
            if let Some(counts) = WindowCounts::from_sample(task, level) {
                let sum = window.get(&task.process).copied();
                window.insert(task.process, sum.map_or(counts, |sum| sum.plus(counts)));
            }
        }

        let has_counts = !window.is_empty();
        for (process, counts) in window {
            let windows = self.counts.entry(process).or_default();
            if windows.len() == MAX_WINDOWS {
                windows.pop_front();
            }
            windows.push_back(counts);
        }
        self.windows += u32::from(has_counts);
        has_counts
    }

    /// Forgets all windows, after a change of the shares.
    pub fn clear(&mut self) {
        *self = ShareSpeeds::default();
    }

    /// The speed of a process; `None` until it has run in an undisturbed window.
    pub fn measured_speed(&self, process: ProcessId) -> Option<MeasuredSpeed> {
        let windows = self.counts.get(&process)?.iter().copied();
        let sums = windows.reduce(WindowCounts::plus)?;
        if sums.instructions <= 0.0 {
            return None;
        }
        let misses = sums.misses.filter(|&misses| misses > 0.0);
        Some(MeasuredSpeed {
            cycles_per_instr: sums.cycles / sums.instructions,
            misses_per_kilo_instr: sums
                .misses
                .map(|misses| 1000.0 * misses / sums.instructions),
            stall_cycles_per_miss: sums
                .stall_cycles
                .zip(misses)
                .map(|(stalls, misses)| stalls / misses),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::observation_of;
    use cachemate_core::{
        CacheId, EventCounts, Neighbor, PendingItem, PlanItem, ProbeId, ProbeKind, TaskId,
    };

    /// Are windows with disturbing probes or moving pages left out?
    #[test]
    fn only_undisturbed_windows_count() {
        let task = TaskSample {
            name: "p".to_string(),
            counts: EventCounts::exact([
                (CounterEvent::Instructions, 1000),
                (CounterEvent::Cycles, 3000),
                (CounterEvent::Misses(CacheLevel::L2), 10),
                (CounterEvent::StallCycles(StallCause::LocalMemory), 1500),
            ]),
            ..TaskSample::new(TaskId(0), ProcessId(0))
        };
        let mut window = observation_of(0, 1, [task]);
        let mut speeds = ShareSpeeds::default();

        let disturbing_kinds = [
            ProbeKind::MissTrace {
                task: TaskId(0),
                entries: 9,
                includes_code: false,
            },
            ProbeKind::Neighbor {
                task: TaskId(0),
                neighbor: Neighbor::Stream,
            },
            ProbeKind::PairedRows {
                cache: CacheId(0),
                task: TaskId(0),
                peers: Vec::new(),
                total_ns: 1,
            },
        ];

        for kind in disturbing_kinds {
            let probe = ProbeRequest {
                id: ProbeId(1),
                kind,
                budget_ns: 1,
            };
            assert!(!speeds.add(&window, CacheLevel::L2, &[probe]));
        }

        assert_eq!(speeds.measured_speed(ProcessId(0)), None);
        assert!(speeds.add(&window, CacheLevel::L2, &[]));
        let speed = speeds.measured_speed(ProcessId(0)).unwrap();
        assert_eq!(
            (speed.cycles_per_instr, speed.misses_per_kilo_instr),
            (3.0, Some(10.0))
        );
        assert_eq!(speed.stall_cycles_per_miss, Some(150.0));
        window.applied.pending.push(PendingItem {
            item: PlanItem::Plan,
            done: 1,
            total: Some(2),
        });
        assert!(!speeds.add(&window, CacheLevel::L2, &[]) && speeds.windows == 1);
    }
}
