//! Builds stall-rate curves (thesis 4.6.3; CP-4): cycles stalled on data per thousand instructions, by the share of the
//! cache.
//!
//! If another cache lies behind the contended one, its misses differ in cost, and a curve of stalled cycles predicts
//! run time better than a curve of misses. A point is measured while the task has that share, so the curve grows as
//! more shares are tried. There is no curve if the machine does not count stalls.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheLevel, CounterEvent, EvidenceKind, Fact, FactSource, Observation, Profiler, Profiles,
    StallCause, TaskSample, TracedCache,
};

use super::{PerTask, RunningStats, share_bytes};

/// Fills `stalls_per_kilo_instr`.
#[derive(Clone, Debug)]
pub struct StallProfiler {
    cache: TracedCache,
    tasks: PerTask<BTreeMap<u64, RunningStats>>,
}

/// Causes of stalls on data beyond the first level, which the size of a share can change.
const DATA_STALLS: [StallCause; 7] = [
    StallCause::Hit(CacheLevel::L2),
    StallCause::Hit(CacheLevel::L3),
    StallCause::Hit(CacheLevel::L4),
    StallCause::RemoteCache,
    StallCause::LocalMemory,
    StallCause::RemoteMemory,
    StallCause::BusQueue,
];

impl StallProfiler {
    /// Builds a profiler for this cache.
    pub fn new(cache: TracedCache) -> Self {
        StallProfiler {
            cache,
            tasks: PerTask::default(),
        }
    }
}

/// Stalled cycles per thousand instructions; `None` if instructions were not counted, or none of the causes was.
fn stall_rate(task: &TaskSample) -> Option<f64> {
    let instructions = task
        .counts
        .get(CounterEvent::Instructions)
        .filter(|&count| count > 0.0)?;
    let causes = DATA_STALLS
        .iter()
        .filter_map(|&cause| task.counts.get(CounterEvent::StallCycles(cause)));
    let stall_cycles = causes.fold(None, |sum: Option<f64>, cycles| {
        Some(sum.unwrap_or(0.0) + cycles)
    })?;
    Some(1000.0 * stall_cycles / instructions)
}

impl Profiler for StallProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("stall curves", Some(EvidenceKind::StallCounters))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        self.tasks.retain_current(observation, profiles);
        for task in &observation.tasks {
            let Some(rate) = stall_rate(task) else {
                continue;
            };
            let size_bytes = share_bytes(observation, task, &self.cache);
            let Some((stats_by_size, profile)) = self.tasks.find_profile(task.task, profiles)
            else {
                continue;
            };
            stats_by_size.entry(size_bytes).or_default().add(rate);
            let curve = stats_by_size
                .iter()
                .filter_map(|(&size, mean)| Some((size, mean.estimate()?)))
                .collect();
            let fact = Fact::new(curve, FactSource::StallCounters, observation.window);
            profile
                .locality
                .stalls_per_kilo_instr
                .insert(self.cache.level, fact);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::TaskId;

    const CACHE: TracedCache = TracedCache {
        level: CacheLevel::L3,
        size_bytes: 16 << 20,
        colors: 16,
        ways: 10,
        points: 16,
    };

    fn stalled_window(number: u64, cycles: u64) -> Observation {
        let readings = [
            (CounterEvent::Instructions, 10_000),
            (CounterEvent::StallCycles(StallCause::Issue), 999_999),
            (
                CounterEvent::StallCycles(StallCause::Hit(CacheLevel::L3)),
                cycles,
            ),
            (CounterEvent::StallCycles(StallCause::LocalMemory), cycles),
        ];
        counted_window(number, &readings)
    }

    /// Does each share that was tried become a point of the curve, averaged and in ascending order?
    #[test]
    fn each_share_that_was_tried_is_a_point() {
        let (mut profiler, mut profiles) = (StallProfiler::new(CACHE), Profiles::new());
        for (number, (cycles, colors)) in [(1000, 12), (5000, 4), (7000, 4)].into_iter().enumerate()
        {
            profiler.update(
                &with_colors(stalled_window(number as u64, cycles), colors),
                &mut profiles,
            );
        }
        profiler.update(&stalled_window(3, 500), &mut profiles);
        let curve = profiles[&TaskId(0)].stalls_per_kilo_instr().unwrap();
        let points: Vec<(u64, f64)> = curve
            .iter()
            .map(|(size, rate)| (*size, rate.value))
            .collect();
        assert_eq!(
            points,
            [(4 << 20, 1200.0), (12 << 20, 200.0), (16 << 20, 100.0)]
        );
    }

    /// Is there no curve if no stall was counted?
    #[test]
    fn there_is_no_curve_without_stall_counters() {
        let (mut profiler, mut profiles) = (StallProfiler::new(CACHE), Profiles::new());
        profiler.update(
            &counted_window(0, &[(CounterEvent::Instructions, 1000)]),
            &mut profiles,
        );
        assert_eq!(profiles[&TaskId(0)].stalls_per_kilo_instr(), None);
    }
}
