//! Builds miss-rate curves from counters at the sizes of the shares that a task has had, like a sweep over a few way
//! masks, without a trace or watch points.
//!
//! Problem: a host with way masks and counters, but without samples, has no curve. Method: the misses of the last level
//! per thousand instructions are counted in windows in which the task had a share to itself, and each share size
//! becomes a point. The first two windows of a share are left out, because the task still has lines from a larger
//! share, or is still filling a larger one.
//!
//! Properties: a curve needs at least three sizes. A curve from a finer source is kept. There is no curve if shares
//! overlap or misses are not counted.

use std::collections::BTreeMap;

use cachemate_core::{
    ActiveShare, CounterEvent, EvidenceKind, Fact, FactSource, Observation, Profiler, Profiles,
    SizeCurve, TaskSample, TracedCache,
};

use super::{
    PerTask, RunningStats, active_tasks, has_exclusive_units, share_bytes, shares_with_task,
};

/// Minimum number of sizes for a curve.
const MIN_SIZES: usize = 3;
/// Number of windows until the resident lines reflect a new share.
///
/// In the simulator, one window of 4 ms is too short for a program to fill 1 MiB beside a stream: the lines of the
/// stream are younger, so they are evicted last.
const SETTLING_WINDOWS: u32 = 2;

/// Fills `misses_per_kilo_instr` at the cache's level, unless another source has filled it.
#[derive(Clone, Debug)]
pub struct SizeSweepProfiler {
    cache: TracedCache,
    min_instructions: f64,
    tasks: PerTask<SizePoints>,
}

#[derive(Clone, Debug, Default)]
struct SizePoints {
    /// Size in bytes of the share that the task had to itself in the preceding window, and the number of successive
    /// windows in which it had that size. `None` if it was in no such share.
    last_share: Option<(u64, u32)>,
    points: BTreeMap<u64, RunningStats>,
}

impl SizeSweepProfiler {
    /// Builds a profiler for this cache. Windows in which a task executed fewer than `min_instructions` are ignored.
    pub fn new(cache: TracedCache, min_instructions: f64) -> Self {
        SizeSweepProfiler {
            cache,
            min_instructions,
            tasks: PerTask::default(),
        }
    }

    /// Misses per thousand instructions; `None` if the window is too short, or the misses were not counted.
    fn miss_rate(&self, task: &TaskSample) -> Option<f64> {
        let min_instructions = self.min_instructions.max(1.0);
        let instructions = task
            .counts
            .get(CounterEvent::Instructions)
            .filter(|&count| count >= min_instructions)?;
        Some(1000.0 * task.counts.get(CounterEvent::Misses(self.cache.level))? / instructions)
    }
}

/// No two shares of one cache have a way or a color in common.
fn has_disjoint_shares(observation: &Observation) -> bool {
    let shares = &observation.applied.shares;
    let has_overlap = |(index, active_share): (usize, &ActiveShare)| {
        let mut earlier_shares = shares[..index].iter().map(|earlier| &earlier.share);
        earlier_shares.any(|earlier| {
            earlier.cache == active_share.share.cache
                && earlier
                    .units
                    .set()
                    .intersects(active_share.share.units.set())
        })
    };
    !shares.iter().enumerate().any(has_overlap)
}

/// The task has the same number of units in every share that contains it.
fn has_equal_share_sizes(observation: &Observation, task: &TaskSample) -> bool {
    let mut counts = shares_with_task(observation, task).map(|share| share.units.set().count());
    let first = counts.next();
    counts.all(|count| Some(count) == first)
}

impl Profiler for SizeSweepProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("size sweeps", Some(EvidenceKind::TaskCounters))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        self.tasks.retain_current(observation, profiles);
        let are_shares_disjoint = has_disjoint_shares(observation);
        let active_samples = active_tasks(observation);
        for task in &observation.tasks {
            let rate = self.miss_rate(task);
            let is_exclusive = are_shares_disjoint
                && has_equal_share_sizes(observation, task)
                && has_exclusive_units(observation, &active_samples, task);
            let size_bytes = is_exclusive.then(|| share_bytes(observation, task, &self.cache));
            let Some((size_points, profile)) = self.tasks.find_profile(task.task, profiles) else {
                continue;
            };
            let windows_of_share = |(last_bytes, windows): (u64, u32)| {
                if Some(last_bytes) == size_bytes {
                    windows
                } else {
                    0
                }
            };
            let windows_before = size_points.last_share.map_or(0, windows_of_share);
            size_points.last_share =
                size_bytes.map(|bytes| (bytes, windows_before.saturating_add(1)));
            let Some((size_bytes, rate)) = size_bytes
                .filter(|_| windows_before >= SETTLING_WINDOWS)
                .zip(rate)
            else {
                continue;
            };
            size_points.points.entry(size_bytes).or_default().add(rate);
            let curves = &mut profile.locality.misses_per_kilo_instr;
            let has_finer_curve = curves
                .get(&self.cache.level)
                .is_some_and(|fact| fact.source != FactSource::Counters);
            if size_points.points.len() >= MIN_SIZES && !has_finer_curve {
                let points = size_points.points.iter();
                let curve: SizeCurve = points
                    .filter_map(|(&size, mean)| Some((size, mean.estimate()?)))
                    .collect();
                curves.insert(
                    self.cache.level,
                    Fact::new(curve, FactSource::Counters, observation.window),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{CacheLevel, Estimate, GroupId, ShareMember, TaskId};

    const CACHE: TracedCache = TracedCache {
        level: CacheLevel::L3,
        size_bytes: 16 << 20,
        colors: 16,
        ways: 16,
        points: 16,
    };

    fn observation_with_misses(number: u64, misses: u64) -> Observation {
        let misses = (CounterEvent::Misses(CacheLevel::L3), misses);
        counted_window(number, &[(CounterEvent::Instructions, 10_000), misses])
    }
    fn sample_profiler() -> SizeSweepProfiler {
        SizeSweepProfiler::new(CACHE, 1000.0)
    }
    /// Runs windows with these (misses, share in MiB), and returns the curve.
    fn sweep_sizes(windows: &[(u64, u32)]) -> Option<Vec<(u64, f64)>> {
        let (mut profiler, mut profiles) = (sample_profiler(), Profiles::new());
        for (number, &(misses, mib)) in windows.iter().enumerate() {
            profiler.update(
                &with_colors(observation_with_misses(number as u64, misses), mib),
                &mut profiles,
            );
        }
        let curve = profiles[&TaskId(0)].misses_per_kilo_instr()?;
        Some(
            curve
                .iter()
                .map(|(size, rate)| (size >> 20, rate.value))
                .collect(),
        )
    }

    /// Does each size that was kept for three windows or more become a point, without the first two windows?
    #[test]
    fn each_size_kept_for_three_windows_is_a_point() {
        let settling_windows = |mib| [(777, mib), (999, mib)];
        let windows_by_size = [
            &settling_windows(12)[..],
            &[(10, 12)],
            &settling_windows(8),
            &[(40, 8), (60, 8)],
            &settling_windows(2),
            &[(300, 2)],
        ];
        let windows = windows_by_size.concat();
        assert_eq!(
            sweep_sizes(&windows).unwrap(),
            [(2, 30.0), (8, 5.0), (12, 1.0)]
        );
    }

    /// Is there no curve from two sizes, or from windows in which the size changed each time?
    #[test]
    fn two_sizes_or_ever_changing_ones_give_no_curve() {
        assert_eq!(
            sweep_sizes(&[(5, 12), (10, 12), (10, 12), (40, 8), (40, 8), (40, 8)]),
            None
        );
        assert_eq!(
            sweep_sizes(&[
                (5, 12),
                (5, 12),
                (10, 8),
                (10, 8),
                (40, 4),
                (40, 4),
                (40, 2),
                (40, 2)
            ]),
            None
        );
    }

    /// Are windows ignored in which another task fills the same ways, or which have too few instructions?
    #[test]
    fn windows_with_shared_ways_or_few_instructions_are_ignored() {
        let (mut profiler, mut profiles) = (sample_profiler(), Profiles::new());
        for (number, mib) in [12, 12, 12, 8, 8, 8, 2, 2, 2].into_iter().enumerate() {
            let mut observation = with_colors(observation_with_misses(number as u64, 10), mib);
            observation
                .tasks
                .push(synthetic_sample(1, &[(CounterEvent::Instructions, 10_000)]));
            profiler.update(&observation, &mut profiles);
        }
        assert_eq!(
            profiles[&TaskId(0)].misses_per_kilo_instr(),
            None,
            "task 1 is in no share"
        );
        let mut short = SizeSweepProfiler::new(CACHE, 1e6);
        for (number, mib) in [12, 12, 12, 8, 8, 8, 2, 2, 2].into_iter().enumerate() {
            short.update(
                &with_colors(observation_with_misses(number as u64, 10), mib),
                &mut profiles,
            );
        }
        assert_eq!(profiles[&TaskId(0)].misses_per_kilo_instr(), None);
    }

    /// Are windows ignored in which masks overlap?
    #[test]
    fn windows_with_overlapping_masks_are_ignored() {
        let (mut profiler, mut profiles) = (sample_profiler(), Profiles::new());
        for (number, mib) in [12, 12, 12, 8, 8, 8, 2, 2, 2].into_iter().enumerate() {
            let mut observation = with_colors(observation_with_misses(number as u64, 10), mib);
            observation
                .tasks
                .push(synthetic_sample(1, &[(CounterEvent::Instructions, 10_000)]));
            let mut other_share = observation.applied.shares[0].clone();
            other_share.share.members = vec![ShareMember::Task(TaskId(1))];
            other_share.share.group = GroupId(1);
            observation.applied.shares.push(other_share);
            profiler.update(&observation, &mut profiles);
        }
        assert_eq!(profiles[&TaskId(0)].misses_per_kilo_instr(), None);
    }

    /// Is a curve from another source kept?
    #[test]
    fn a_curve_from_another_source_is_kept() {
        let (mut profiler, mut profiles) = (sample_profiler(), Profiles::new());
        for (number, mib) in [12, 12, 12, 8, 8, 8, 2, 2, 2].into_iter().enumerate() {
            let observation = with_colors(observation_with_misses(number as u64, 10), mib);
            profiler.update(&observation, &mut profiles);
            let fact = Fact::new(vec![(1, Estimate::exact(7.0))], FactSource::ReuseSamples, 0);
            profiles
                .get_mut(&TaskId(0))
                .unwrap()
                .locality
                .misses_per_kilo_instr
                .insert(CacheLevel::L3, fact);
        }
        assert_eq!(
            profiles[&TaskId(0)].misses_per_kilo_instr().unwrap()[0]
                .1
                .value,
            7.0
        );
    }
}
