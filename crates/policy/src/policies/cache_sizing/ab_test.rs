//! An A/B test of new shares by measured speeds.
//!
//! Problem: forecasts err, so a change of shares has to be tested by measured speeds. But programs have phases, and a
//! comparison of speeds before and after a change compares phases as well. In addition, the first windows after a
//! change do not count, because the cache is still full of lines from the old shares. Method: the order is old, new,
//! new, old. The middles of both sides lie at the same time, so that a drift of the programs cancels, and matching
//! phases are compared ([`SpeedRecord::match_speeds`]).
//!
//! Arms continue until both sides cover enough of the same phases and the difference exceeds its noise
//! ([`Ratio::is_significant`]), or until no relevant difference is left. The test is evaluated at most four times per arm,
//! each time with a quarter of the allowed error. An arm counts once the cache can have been refilled
//! ([`SettlingPeriod`]). New shares that are clearly slower after half an arm are dropped at once.
//!
//! Properties: the result is the objective's sum of weighted speeds over that under the old shares. There is no result
//! if a program did not do similar work on both sides. A test ends within a bounded number of windows, and its cost is
//! measured.

use std::collections::BTreeMap;

use cachemate_core::{Cache, CacheLevel, CounterEvent, Observation, ProbeRequest, ProcessId};

use crate::partition::partitioned_cache::PartitionedCache;
use crate::partition::speed_history::{Ratio, SpeedRecord};

/// The lengths that limit a trial.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AbTestLengths {
    /// Minimum number of windows after a change before any window counts.
    pub warmup_windows: u32,
    /// Number of windows of one arm.
    pub measure_windows: u32,
    /// Number of lines of the cache, which is the number of misses that fill it; `None` if unknown.
    pub cache_lines: Option<u64>,
    /// Number of lines of the next cache toward memory; `None` if there is none.
    pub next_cache_lines: Option<u64>,
}

/// The side of the test whose shares are in force.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AbArm {
    Old,
    New,
    OldAgain,
}

/// The state of the test after a window.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum AbTestStatus {
    /// The test continues; apply the present arm's shares, which may have changed.
    Running,
    /// The test has ended with this ratio of the speeds under the new shares to those under the old.
    Ratio(Ratio),
    /// The test has ended without a result: it took too long, or a program did not run.
    Inconclusive,
}

/// A test of one change of shares.
#[derive(Clone, Debug)]
pub struct AbTest {
    lengths: AbTestLengths,
    /// Weight of the speed of each process.
    weights: Vec<(ProcessId, f64)>,
    arm: AbArm,
    /// Speeds under the old shares, before and after the new ones.
    speeds_before: SpeedRecord,
    speeds_after: SpeedRecord,
    pub speeds_under_new: SpeedRecord,
    arm_windows: u32,
    pub windows: u32,
    /// Speeds in all windows from the end of the old shares until the cache was full of their lines again.
    disturbed_speeds: SpeedRecord,
    settling: Option<SettlingPeriod>,
}

/// The period after a change of the shares until every program has fetched its share of the cache's lines; until then,
/// speeds are those of a cache that is being filled.
///
/// A cache behind this one receives its misses or its evictions, and keeps the lines of the old shares for far longer.
/// It has turned over once all programs together have missed as often as it has lines. For example, ammp beside applu
/// on the thesis's machine loses a fifth of its speed over eighty windows after a partition is removed, although its
/// misses of the L2 stay the same.
#[derive(Clone, Debug, Default)]
pub struct SettlingPeriod {
    /// Whether the cache had settled at the end of the last observed window, which itself does not count either.
    pub is_over: bool,
    windows: u32,
    misses: BTreeMap<ProcessId, f64>,
}

impl SettlingPeriod {
    /// Observes a window.
    ///
    /// If misses are not counted, the minimum number of windows suffices. The period always ends within ten times as
    /// many windows (a hundred with a cache behind), because a program that rarely misses hardly needs the lines.
    pub fn observe(
        &mut self,
        observation: &Observation,
        level: CacheLevel,
        lengths: AbTestLengths,
    ) {
        let minimum = lengths.warmup_windows;
        self.windows += 1;
        for task in observation.tasks.iter().filter(|task| !task.exited) {
            if let Some(misses) = task.counts.get(CounterEvent::Misses(level)) {
                *self.misses.entry(task.process).or_insert(0.0) += misses;
            }
        }
        let lines_per_process =
            lengths.cache_lines.unwrap_or(0) as f64 / self.misses.len().max(1) as f64;
        let is_full = self
            .misses
            .values()
            .all(|&misses| misses >= lines_per_process);
        let has_settled = self.windows >= minimum
            && (is_full || self.windows >= MAX_SETTLING_FACTOR * minimum.max(1));
        let has_turned_over = lengths.next_cache_lines.is_none_or(|lines| {
            self.misses.is_empty()
                || self.misses.values().sum::<f64>() >= lines as f64
                || self.windows >= lengths.settle_windows()
        });
        self.is_over = has_settled && has_turned_over && observation.applied.pending.is_empty();
    }
}

impl AbTestLengths {
    /// Returns the lengths for a cache and the largest cache behind it.
    pub fn for_cache(
        domain: &PartitionedCache<'_>,
        warmup_windows: u32,
        measure_windows: u32,
    ) -> Self {
        let line_count = |cache: &Cache| {
            let line_bytes = cache.line_bytes.filter(|&bytes| bytes > 0);
            cache
                .size_bytes
                .zip(line_bytes)
                .map(|(size, line)| size / u64::from(line))
        };
        AbTestLengths {
            warmup_windows,
            measure_windows,
            cache_lines: line_count(domain.cache),
            next_cache_lines: domain.outer_cache.and_then(line_count),
        }
    }

    /// Returns the number of windows after which the cache is assumed to have settled.
    fn settle_windows(&self) -> u32 {
        let factor = if self.next_cache_lines.is_some() {
            MAX_NEXT_CACHE_SETTLING_FACTOR
        } else {
            MAX_SETTLING_FACTOR
        };
        factor * self.warmup_windows.max(1)
    }
}

/// Loss of speed, as a fraction, at which new shares are dropped after half an arm if the loss is certain.
pub const CLEAR_LOSS: f64 = 0.05;
/// Maximum settling period, in multiples of the minimum number of windows.
const MAX_SETTLING_FACTOR: u32 = 10;
const MAX_NEXT_CACHE_SETTLING_FACTOR: u32 = 100;
/// Maximum length of a trial, in multiples of its length without interruptions.
const MAX_TRIAL_FACTOR: u32 = 8;
/// Maximum length of the measurement of one side, in multiples of an arm; the surplus is for phases that do not match
/// yet and for noise.
const MAX_SIDE_ARMS: u32 = 6;

impl AbTest {
    /// Starts the test, with the old shares in force.
    pub fn new(lengths: AbTestLengths, weights: Vec<(ProcessId, f64)>) -> Self {
        AbTest {
            lengths,
            weights,
            arm: AbArm::Old,
            speeds_before: SpeedRecord::default(),
            speeds_after: SpeedRecord::default(),
            speeds_under_new: SpeedRecord::default(),
            arm_windows: 0,
            windows: 0,
            disturbed_speeds: SpeedRecord::default(),
            settling: None,
        }
    }

    /// Returns the test with recent windows under the old shares included.
    pub fn with_baseline(self, baseline: &SpeedRecord) -> Self {
        AbTest {
            speeds_before: baseline
                .latest_windows(MAX_SIDE_ARMS * self.lengths.measure_windows.max(1)),
            ..self
        }
    }

    /// Returns the speeds under the old shares, over equally long times before and after the new ones, so that a drift
    /// cancels.
    pub fn old_speeds(&self) -> SpeedRecord {
        let later_speeds = if self.arm == AbArm::OldAgain {
            &self.speeds_after
        } else {
            &self.speeds_under_new
        };
        self.speeds_before
            .latest_windows(
                later_speeds
                    .windows
                    .max(self.lengths.measure_windows)
                    .max(1),
            )
            .concatenated_with(&self.speeds_after)
    }

    pub fn arm(&self) -> AbArm {
        self.arm
    }
    pub fn weights(&self) -> &[(ProcessId, f64)] {
        &self.weights
    }

    /// Adds a window under the present arm's shares.
    pub fn observe(
        &mut self,
        observation: &Observation,
        level: CacheLevel,
        probes: &[ProbeRequest],
    ) -> AbTestStatus {
        self.windows += 1;
        if self.arm == AbArm::New
            || (self.arm == AbArm::OldAgain
                && self
                    .settling
                    .as_ref()
                    .is_some_and(|settling| !settling.is_over))
        {
            self.disturbed_speeds.observe(observation, level);
        }
        if self.windows > MAX_TRIAL_FACTOR * self.uninterrupted_windows() {
            return AbTestStatus::Inconclusive;
        }
        if let Some(settling) = self.settling.as_mut().filter(|settling| !settling.is_over) {
            settling.observe(observation, level, self.lengths);
            return AbTestStatus::Running;
        }
        self.settling = None;
        let arm_speeds = match self.arm {
            AbArm::Old => &mut self.speeds_before,
            AbArm::New => &mut self.speeds_under_new,
            AbArm::OldAgain => &mut self.speeds_after,
        };
        if !arm_speeds.add(observation, level, probes) {
            return AbTestStatus::Running;
        }
        self.arm_windows += 1;
        self.judge()
    }

    fn judge(&mut self) -> AbTestStatus {
        let arm_length = self.lengths.measure_windows.max(1);
        // The last arm is no longer than the first; otherwise, a drift would not cancel.
        let max_windows = if self.arm == AbArm::OldAgain {
            self.speeds_before.windows
        } else {
            u32::MAX
        };
        let is_waiting = self.arm_windows < max_windows.min(MAX_SIDE_ARMS * arm_length);
        // A test after every window would find differences by chance, so there are at most `MAX_EVALUATIONS` tests.
        let is_test_due = !is_waiting
            || [1, 2, 4]
                .iter()
                .any(|times| self.arm_windows == times * arm_length);
        if self.arm != AbArm::Old && !is_test_due {
            return AbTestStatus::Running;
        }
        match self.arm {
            AbArm::Old if self.speeds_before.windows >= 2 * arm_length => {
                self.switch_to(AbArm::New)
            }
            AbArm::New if self.arm_windows >= arm_length => {
                let ratio = self.ratio();
                if let Some(slower) =
                    ratio.filter(|found| found.ratio < 1.0 - CLEAR_LOSS && found.is_significant())
                {
                    return AbTestStatus::Ratio(slower);
                }
                // If the windows do not cover enough of the other side's phases, or are too noisy, the arm continues,
                // because those phases may recur.
                if self.arm_windows >= 2 * arm_length
                    && (!is_waiting || ratio.is_some_and(|found| found.is_precise_enough()))
                {
                    self.switch_to(AbArm::OldAgain);
                }
            }
            AbArm::OldAgain if self.arm_windows >= arm_length => match self.ratio() {
                Some(found) if !is_waiting || found.is_precise_enough() => {
                    return AbTestStatus::Ratio(found);
                }
                None if !is_waiting => return AbTestStatus::Inconclusive,
                _ => {}
            },
            _ => {}
        }
        AbTestStatus::Running
    }

    /// Returns the cost of the trial minus the gain of the new shares, in windows at the old shares' speed; matching
    /// windows are compared as far as there are any.
    pub fn lost_windows(&self) -> f64 {
        let old_speeds = self.speeds_before.concatenated_with(&self.speeds_after);
        let weighted_speed_ratio = || {
            self.disturbed_speeds.weighted_speed(&self.weights)
                / old_speeds.weighted_speed(&self.weights)
        };
        let ratio = self
            .disturbed_speeds
            .speed_over(&old_speeds, &self.weights)
            .map_or_else(weighted_speed_ratio, |found| found.ratio);
        if ratio.is_finite() {
            (f64::from(self.disturbed_speeds.windows) * (1.0 - ratio)).max(0.0)
        } else {
            0.0
        }
    }

    fn switch_to(&mut self, arm: AbArm) {
        (self.arm, self.arm_windows, self.settling) = (arm, 0, Some(SettlingPeriod::default()));
    }

    fn uninterrupted_windows(&self) -> u32 {
        4 * self.lengths.measure_windows.max(1) + 2 * self.lengths.settle_windows()
    }

    fn ratio(&self) -> Option<Ratio> {
        self.speeds_under_new
            .speed_over(&self.old_speeds(), &self.weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::speed_history::tests::{observation_fixture, window_in_phase, window_of};

    const LENGTHS: AbTestLengths = AbTestLengths {
        warmup_windows: 1,
        measure_windows: 2,
        cache_lines: Some(25),
        next_cache_lines: None,
    };

    /// Runs a trial to its end, with 10 misses in each window and these cycles per 1000 instructions, by window and
    /// arm.
    fn run_trial(cycles: impl Fn(u32, AbArm) -> u64) -> (AbTestStatus, Vec<AbArm>) {
        let mut trial = AbTest::new(LENGTHS, vec![(ProcessId(0), 1.0)]);
        let mut arms = Vec::new();
        for window in 0.. {
            arms.push(trial.arm());
            let status = trial.observe(
                &window_of(1000, cycles(window, trial.arm()), 10),
                CacheLevel::L2,
                &[],
            );
            if status != AbTestStatus::Running {
                return (status, arms);
            }
        }
        unreachable!("every trial ends")
    }

    /// Does a drift of the program cancel, although a comparison of before and after would show a gain?
    #[test]
    fn a_drift_cancels() {
        let (status, arms) = run_trial(|window, _| 3_000 - 40 * u64::from(window));
        let AbTestStatus::Ratio(Ratio { ratio, .. }) = status else {
            panic!("{status:?}")
        };
        assert!((ratio - 1.0).abs() < 0.01, "{ratio}");
        let count = |arm| arms.iter().filter(|&&one| one == arm).count();
        // Three windows of ten misses fill twenty-five lines. Successive windows of a drift are similar, so nothing is
        // certain before the new arm has its maximum length.
        assert_eq!(
            [AbArm::Old, AbArm::New, AbArm::OldAgain].map(count),
            [4, 3 + 12, 3 + 4]
        );
    }

    /// Is a gain measured correctly in spite of a drift, and is a trial with a clear loss ended early?
    #[test]
    fn gains_are_measured_and_clear_losses_cut_short() {
        let faster = |window: u32, arm| if arm == AbArm::New { 1_800 } else { 2_000 } - 5 * u64::from(window);
        let (status, _) = run_trial(faster);
        let AbTestStatus::Ratio(Ratio { ratio, .. }) = status else {
            panic!("{status:?}")
        };
        assert!((ratio - 2_000.0 / 1_800.0).abs() < 0.01, "{ratio}");
        let (status, arms) = run_trial(|_, arm| if arm == AbArm::New { 2_200 } else { 2_000 });
        assert!(
            matches!(status, AbTestStatus::Ratio(Ratio { ratio, standard_error: 0.0, .. }) if ratio == 2_000.0 / 2_200.0),
            "{status:?}"
        );
        assert_eq!(arms.len(), 4 + 3 + 2);
    }

    /// If unannounced phases differ widely in speed, is the measured gain correct, or 0 without one, wherever the arms
    /// fall?
    #[test]
    fn the_measured_gain_is_correct_despite_phases() {
        for (faster, offset) in [(1.0, 0), (1.0, 3), (1.04, 0), (1.04, 2), (0.98, 5)] {
            let mut trial = AbTest::new(LENGTHS, vec![(ProcessId(0), 1.0)]);
            let verdict = (0..).find_map(|window| {
                let slow = (window + offset) % 7 < 3;
                let (cycles, l1_misses) = if slow { (5_000.0, 60) } else { (1_500.0, 120) };
                let cycles = if trial.arm() == AbArm::New {
                    cycles / faster
                } else {
                    cycles
                };
                match trial.observe(
                    &window_in_phase(1_000, cycles as u64, l1_misses),
                    CacheLevel::L2,
                    &[],
                ) {
                    AbTestStatus::Running => None,
                    status => Some(status),
                }
            });
            let Some(AbTestStatus::Ratio(Ratio { ratio, .. })) = verdict else {
                panic!("{verdict:?}")
            };
            assert!(
                (ratio - faster).abs() < 0.001,
                "{faster} measured as {ratio}"
            );
        }
    }

    /// Is the cost of a trial measured correctly, even if it began in the program's slowest phase?
    #[test]
    fn the_cost_of_a_trial_is_measured() {
        let mut trial = AbTest::new(LENGTHS, vec![(ProcessId(0), 1.0)]);
        for window in 0.. {
            let (cycles, l1_misses) = if window % 7 < 2 {
                (8_000, 60)
            } else {
                (2_000, 120)
            };
            let cycles = if trial.arm() == AbArm::New {
                cycles * 5 / 4
            } else {
                cycles
            };
            if trial.observe(
                &window_in_phase(1000, cycles, l1_misses),
                CacheLevel::L2,
                &[],
            ) != AbTestStatus::Running
            {
                break;
            }
        }
        // Each window under the new shares costs a fifth; windows in which the cache is refilled cost nothing.
        let changed_windows = f64::from(trial.disturbed_speeds.windows);
        assert!(
            changed_windows >= 6.0
                && (0.1 * changed_windows..=0.2 * changed_windows).contains(&trial.lost_windows()),
            "{}",
            trial.lost_windows()
        );
    }

    /// Is a change without effect rarely adopted as faster, with independent noise and with autocorrelated noise (0.6)?
    #[test]
    fn changes_without_effect_are_rarely_adopted() {
        let mut generator = cachemate_core::SplitMix64::new(5);
        let trials = 1_500;
        for autocorrelation in [0.0, 0.6] {
            let mut faster = 0;
            for _ in 0..trials {
                let mut trial = AbTest::new(LENGTHS, vec![(ProcessId(0), 1.0)]);
                let mut deviation = 0.0;
                let status = (0..).find_map(|_| {
                    let normal = (0..12).map(|_| generator.draw_unit()).sum::<f64>() - 6.0;
                    deviation = autocorrelation * deviation
                        + 0.05 * libm::sqrt(1.0 - autocorrelation * autocorrelation) * normal;
                    let cycles = (2e6 * (1.0 + deviation)) as u64;
                    match trial.observe(&window_of(1_000_000, cycles, 1_000), CacheLevel::L2, &[]) {
                        AbTestStatus::Running => None,
                        status => Some(status),
                    }
                });
                let is_adopted = |ratio: &Ratio| ratio.ratio >= 1.0 && ratio.is_significant();
                faster += u32::from(
                    matches!(status, Some(AbTestStatus::Ratio(ratio)) if is_adopted(&ratio)),
                );
            }
            let share = f64::from(faster) / f64::from(trials);
            // With this number of trials, the sampling error is four in a thousand.
            assert!(
                share <= 0.033,
                "{share} with autocorrelation {autocorrelation}"
            );
        }
    }

    /// Does no window count before the next cache has turned over or the maximum period has ended?
    #[test]
    fn no_window_counts_before_the_next_cache_has_turned_over() {
        let settled_after = |lines_behind: Option<u64>, misses: u64| {
            let lengths = AbTestLengths {
                next_cache_lines: lines_behind,
                ..LENGTHS
            };
            let mut settling = SettlingPeriod::default();
            (1..).find(|_| {
                settling.observe(&window_of(1000, 2000, misses), CacheLevel::L2, lengths);
                settling.is_over
            })
        };
        assert_eq!(settled_after(None, 10), Some(3), "25 lines");
        assert_eq!(settled_after(Some(200), 10), Some(20));
        assert_eq!(
            settled_after(Some(20), 10),
            Some(3),
            "less behind than before"
        );
        assert_eq!(settled_after(None, 1), Some(10));
        assert_eq!(settled_after(Some(200), 1), Some(100));
    }

    /// Does a trial end without a result if a program never runs?
    #[test]
    fn a_trial_ends_if_a_program_never_runs() {
        let mut trial = AbTest::new(LENGTHS, vec![(ProcessId(0), 1.0)]);
        let status = (0..10_000)
            .map(|_| trial.observe(&observation_fixture(&[]), CacheLevel::L2, &[]))
            .find(|status| *status != AbTestStatus::Running);
        assert_eq!(status, Some(AbTestStatus::Inconclusive));
    }
}
