//! Speeds of processes under the shares in force.
//!
//! Only undisturbed windows count. A trace slows its program to a quarter of its speed (thesis 5.6.2), and neighbors,
//! streams and samples take resources from all programs. While pages move, the intended shares are not in effect yet.
//! A disturbance that does not end, such as pages that cannot move, is the normal state after a while.
//! Properties: rates are sums over windows, so short windows weigh less. Memory is bounded.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{
    CacheLevel, CounterEvent, Observation, ProbeRequest, ProcessId, StallCause, TaskSample,
    student_bound,
};
use cachemate_papers::partition::demand_curve::MeasuredSpeed;

use crate::verifier::speeds::is_disturbing;

/// Maximum number of windows kept for each process.
const MAX_WINDOWS: usize = 64;
/// Number of disturbed windows in a row that do not count.
const MAX_DISTURBED_WINDOWS: u32 = 40;

/// The most recent windows since the shares were last changed.
#[derive(Clone, Debug, Default)]
pub struct ShareSpeeds {
    counts: BTreeMap<ProcessId, VecDeque<WindowCounts>>,
    pub windows: u32,
    /// Number of disturbed windows in a row, whatever the shares.
    disturbed_windows: u32,
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
    /// Adds a window if it is undisturbed, or has been disturbed for long, and a process ran. Returns whether it was
    /// added.
    pub fn add(
        &mut self,
        observation: &Observation,
        level: CacheLevel,
        probes: &[ProbeRequest],
    ) -> bool {
        let is_disturbed = probes.iter().any(|probe| is_disturbing(&probe.kind))
            || !observation.applied.pending.is_empty();
        self.disturbed_windows = if is_disturbed {
            self.disturbed_windows.saturating_add(1)
        } else {
            0
        };
        if (1..=MAX_DISTURBED_WINDOWS).contains(&self.disturbed_windows) {
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
        *self = ShareSpeeds {
            disturbed_windows: self.disturbed_windows,
            ..ShareSpeeds::default()
        };
    }

    /// The lower confidence bound of a process's cycles per instruction, which is above the true value with this
    /// probability (Student's t over its windows); `None` if fewer than two were counted.
    pub fn min_cycles_per_instr(&self, process: ProcessId, probability: f64) -> Option<f64> {
        let windows = self.counts.get(&process)?.iter();
        let rates: Vec<f64> = windows
            .filter(|window| window.instructions > 0.0)
            .map(|window| window.cycles / window.instructions)
            .collect();
        if rates.len() < 2 {
            return None;
        }

        let count = rates.len() as f64;
        let mean = rates.iter().sum::<f64>() / count;
        let squares: f64 = rates.iter().map(|rate| (rate - mean).powi(2)).sum();
        let error = libm::sqrt(squares / (count - 1.0) / count);
        let cycles_per_instr = self.measured_speed(process)?.cycles_per_instr;
        Some(cycles_per_instr - student_bound(probability, count - 1.0) * error)
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
        CacheId, EventCounts, Neighbor, PendingItem, PlanItem, ProbeId, ProbeKind, SplitMix64,
        TaskId,
    };

    /// Do windows count again if pages move in all of them, also after the shares have changed?
    #[test]
    fn do_pages_that_never_settle_hide_all_speeds() {
        let task = TaskSample {
            counts: EventCounts::exact([
                (CounterEvent::Instructions, 1000),
                (CounterEvent::Cycles, 3000),
            ]),
            ..TaskSample::new(TaskId(0), ProcessId(0))
        };
        let mut window = observation_of(0, 1, [task]);
        window.applied.pending.push(PendingItem {
            item: PlanItem::Plan,
            done: 1,
            total: Some(2),
        });
        let mut speeds = ShareSpeeds::default();
        for _ in 0..MAX_DISTURBED_WINDOWS {
            assert!(!speeds.add(&window, CacheLevel::L2, &[]));
        }
        assert!(speeds.add(&window, CacheLevel::L2, &[]));
        speeds.clear();
        assert!(speeds.add(&window, CacheLevel::L2, &[]) && speeds.windows == 1);
        window.applied.pending.clear();
        assert!(speeds.add(&window, CacheLevel::L2, &[]));
        window.applied.pending.push(PendingItem {
            item: PlanItem::Plan,
            done: 1,
            total: Some(2),
        });
        assert!(!speeds.add(&window, CacheLevel::L2, &[]), "it may end soon");
    }

    /// Is a limit that the mean exceeds now and then by noise seldom certainly exceeded, while one that is exceeded
    /// always is?
    #[test]
    fn does_noise_around_a_goal_count_as_a_miss() {
        let mut generator = SplitMix64::new(1);
        let mut series_above = |cycles_per_instr: f64, limit: f64| {
            let mut speeds = ShareSpeeds::default();
            let (mut is_mean_above, mut is_surely_above) = (false, false);
            for window in 0..MAX_WINDOWS as u64 {
                let noise = 0.32 * (generator.draw_unit() - 0.5);
                let cycles = (1e6 * (cycles_per_instr + noise)) as u64;
                let task = TaskSample {
                    counts: EventCounts::exact([
                        (CounterEvent::Instructions, 1_000_000),
                        (CounterEvent::Cycles, cycles),
                    ]),
                    ..TaskSample::new(TaskId(0), ProcessId(0))
                };
                speeds.add(&observation_of(window, 1, [task]), CacheLevel::L2, &[]);
                if window >= 2 {
                    let mean = speeds.measured_speed(ProcessId(0)).unwrap();
                    is_mean_above |= mean.cycles_per_instr > limit;
                    let lowest = speeds.min_cycles_per_instr(ProcessId(0), 0.01);
                    is_surely_above |= lowest.unwrap() > limit;
                }
            }
            (is_mean_above, is_surely_above)
        };
        let series: Vec<(bool, bool)> = (0..200).map(|_| series_above(2.06, 2.1)).collect();
        let means = series.iter().filter(|(mean, _)| *mean).count();
        let certain = series.iter().filter(|(_, surely)| *surely).count();
        assert!(means > 50 && certain < 10, "{means} {certain}");
        assert!((0..50).all(|_| series_above(2.2, 2.1).1));
    }

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
