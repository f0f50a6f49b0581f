//! Averages the curves of programs whose phases change faster than plans can follow.
//!
//! Problem: it takes several windows to identify a phase, and several more to change the plan. A program that changes
//! phase again within that time gives up its partition for nothing each time. Method: if the last few phases were that
//! short on average, the phase number of the program stays constant, and its curve is the mean of its most recent
//! curves. Because logs start at arbitrary points of its phases, this mean approximates the mean over time.
//!
//! Properties: after a long phase of a known kind, the program is followed again; phases that alternate without
//! settling report no change either. Averaging starts only once enough curves have been measured. The more the curves
//! differ, the wider is the error of their mean.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{CacheLevel, Estimate, Fact, Profiles, SizeCurve, TaskId};

use super::{LevelCurves, newest_window};

/// Kind of phase that marks a program with averaged phases.
pub const AVERAGED: u32 = u32::MAX;
/// Minimum mean length of phases that are followed, in windows: it takes three or four windows to identify a phase, as
/// many to change the plan, and as many to profit from it.
const MIN_FOLLOWED_WINDOWS: u64 = 12;
/// Number of phases over which the mean length is computed.
const AVERAGED_PHASES: usize = 4;
/// Minimum number of curves for an average.
const MIN_CURVES: usize = 3;
/// Maximum number of curves for an average; older curves are dropped.
const MAX_CURVES: usize = 8;

/// Recent phases and curves of one task.
#[derive(Clone, Debug, Default)]
struct PhaseHistory {
    /// The current phase, and the window in which it was first observed.
    phase_and_start: (u32, u64),
    phase_lengths_windows: VecDeque<u64>,
    /// Number of the phase at which averaging began; `None` while phases are followed.
    averaged_phase_number: Option<u32>,
    curves: VecDeque<LevelCurves>,
}

/// Averaged curves of tasks with short phases, as the module's documentation describes.
#[derive(Clone, Debug, Default)]
pub struct FastPhaseAverages {
    histories: BTreeMap<TaskId, PhaseHistory>,
}

impl FastPhaseAverages {
    /// Observes a window, and forgets exited tasks.
    pub fn observe(&mut self, window: u64, measured_profiles: &Profiles) {
        self.histories
            .retain(|task, _| measured_profiles.contains_key(task));
        for (&task, profile) in measured_profiles {
            let new_history = || PhaseHistory {
                phase_and_start: (profile.phase_number, window),
                ..PhaseHistory::default()
            };
            let history = self.histories.entry(task).or_insert_with(new_history);
            history.observe_phase(profile.phase_number, window, profile.phase.kind.is_some());
            history.record_curves(&profile.locality.misses_per_kilo_instr);
        }
    }

    /// The constant phase number and the mean curves of a task whose phases are averaged; `None` if they are followed.
    pub fn average_curves(&self, task: TaskId) -> Option<(u32, LevelCurves)> {
        let history = self
            .histories
            .get(&task)
            .filter(|history| history.is_averaged())?;
        Some((
            history.averaged_phase_number?,
            mean_of_curves(&history.curves)?,
        ))
    }
}

impl PhaseHistory {
    fn is_averaged(&self) -> bool {
        self.averaged_phase_number.is_some() && self.curves.len() >= MIN_CURVES
    }

    fn observe_phase(&mut self, number: u32, window: u64, is_settled: bool) {
        let (phase, start_window) = self.phase_and_start;
        let length = window.saturating_sub(start_window);
        if phase != number {
            self.phase_and_start = (number, window);
            self.phase_lengths_windows.push_back(length);
            if self.phase_lengths_windows.len() > AVERAGED_PHASES {
                self.phase_lengths_windows.pop_front();
            }
        } else if length >= 2 * MIN_FOLLOWED_WINDOWS && is_settled {
            self.phase_lengths_windows.clear();
            self.averaged_phase_number = None;
        }
        let sum: u64 = self.phase_lengths_windows.iter().sum();
        if self.phase_lengths_windows.len() == AVERAGED_PHASES
            && sum < MIN_FOLLOWED_WINDOWS * AVERAGED_PHASES as u64
        {
            self.averaged_phase_number.get_or_insert(number);
        }
    }

    fn record_curves(&mut self, measured_curves: &LevelCurves) {
        let Some(window) = newest_window(measured_curves) else {
            return;
        };
        if self.curves.back().and_then(newest_window) == Some(window) {
            return;
        }
        // Curves at other sizes were measured on another cache, so the two have no common mean.
        if self
            .curves
            .back()
            .is_some_and(|last| !have_equal_sizes(last, measured_curves))
        {
            self.curves.clear();
        }
        self.curves.push_back(measured_curves.clone());
        if self.curves.len() > MAX_CURVES {
            self.curves.pop_front();
        }
    }
}

/// Equal levels, and equal sizes at each: curves of other sizes have no pointwise mean.
fn have_equal_sizes(first_curves: &LevelCurves, second_curves: &LevelCurves) -> bool {
    let sizes_by_level = |curves: &LevelCurves| -> Vec<(CacheLevel, Vec<u64>)> {
        let level_sizes = |(level, fact): (&CacheLevel, &Fact<SizeCurve>)| {
            (*level, fact.value.iter().map(|(size, _)| *size).collect())
        };
        curves.iter().map(level_sizes).collect()
    };
    sizes_by_level(first_curves) == sizes_by_level(second_curves)
}

/// Pointwise; `None` without curves.
fn mean_of_curves(curves: &VecDeque<LevelCurves>) -> Option<LevelCurves> {
    let last_curves = curves.back()?;
    let mean_of_level = |(&level, fact): (&CacheLevel, &Fact<SizeCurve>)| {
        let level_curves: Vec<&SizeCurve> = curves
            .iter()
            .filter_map(|level_curves| level_curves.get(&level).map(|fact| &fact.value))
            .collect();
        let point = |index: usize| {
            (
                fact.value[index].0,
                mean_estimate(
                    &level_curves
                        .iter()
                        .map(|curve| curve[index].1)
                        .collect::<Vec<_>>(),
                ),
            )
        };
        (
            level,
            Fact {
                value: (0..fact.value.len()).map(point).collect(),
                ..fact.clone()
            },
        )
    };
    Some(last_curves.iter().map(mean_of_level).collect())
}

/// Each end of the interval is that of the mean interval or of two standard errors of the values, whichever is farther
/// out.
fn mean_estimate(estimates: &[Estimate]) -> Estimate {
    let count = estimates.len() as f64;
    let mean_of =
        |value_of: &dyn Fn(&Estimate) -> f64| estimates.iter().map(value_of).sum::<f64>() / count;
    let value = mean_of(&|estimate| estimate.value);
    let variance = estimates
        .iter()
        .map(|estimate| (estimate.value - value) * (estimate.value - value))
        .sum::<f64>()
        / (count - 1.0).max(1.0);
    let error = 2.0 * libm::sqrt(variance / count);
    let (low, high) = (
        mean_of(&|estimate| estimate.low).min(value - error),
        mean_of(&|fact| fact.high).max(value + error),
    );
    Estimate {
        value,
        low: low.max(0.0),
        high,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{FactSource, Profile, Profiles};

    const TASK: TaskId = TaskId(0);

    /// Observes one window with this phase number and, if `measured` is given, a curve of this many misses.
    fn observe(
        averages: &mut FastPhaseAverages,
        window: u64,
        (number, is_settled): (u32, bool),
        measured: Option<f64>,
    ) {
        let mut profile = Profile {
            phase_number: number,
            ..Profile::default()
        };
        profile.phase.kind = is_settled.then(|| Fact::new(0, FactSource::PhaseDetector, window));
        if let Some(rate) = measured {
            let curve = vec![
                (1 << 20, Estimate::exact(rate)),
                (2 << 20, Estimate::exact(0.0)),
            ];
            profile = profile.with_misses(CacheLevel::L3, curve, FactSource::Oracle);
            profile
                .locality
                .misses_per_kilo_instr
                .values_mut()
                .for_each(|fact| fact.window = window);
        }
        let profiles: Profiles = [(TASK, profile)].into();
        averages.observe(window, &profiles);
    }

    /// The window in which averaging begins, for phases of `length` windows with a curve measured at the beginning of
    /// each; `None` if it never begins.
    fn first_whole(length: u64, phases: u64) -> Option<(u64, FastPhaseAverages)> {
        let mut averages = FastPhaseAverages::default();
        (0..length * phases).find_map(|window| {
            let measured = window
                .is_multiple_of(length)
                .then_some((window / length % 2 * 8) as f64);
            observe(
                &mut averages,
                window,
                ((window / length) as u32, true),
                measured,
            );
            averages
                .average_curves(TASK)
                .is_some()
                .then(|| (window, averages.clone()))
        })
    }

    /// Are phases of four windows replaced by the mean of their curves, and phases of twenty windows followed?
    #[test]
    fn phases_that_are_too_short_are_averaged() {
        assert!(first_whole(20, 9).is_none());
        let (window, mut averages) = first_whole(4, 9).unwrap();
        assert_eq!(window, 16, "four phases are over");
        let (number, curves) = averages.average_curves(TASK).unwrap();
        let point = curves[&CacheLevel::L3].value[0].1;
        // The measured curves are 0, 8, 0, 8, 0.
        assert_eq!((number, point.value), (4, 3.2));
        assert!(point.low < 0.1 && point.high > 6.0, "{point:?}");
        observe(&mut averages, 20, (5, false), None);
        assert_eq!(
            averages.average_curves(TASK).map(|(number, _)| number),
            Some(4),
            "the phase number is constant"
        );
        // From here on, the detector reports no change.
        for window in 21..=60 {
            assert!(averages.average_curves(TASK).is_some(), "{window}");
            observe(&mut averages, window, (5, false), None);
        }
        observe(&mut averages, 61, (5, true), None);
        assert!(averages.average_curves(TASK).is_none());
    }

    /// Does nothing change until enough curves are known?
    #[test]
    fn nothing_changes_until_enough_curves_are_known() {
        let mut averages = FastPhaseAverages::default();
        for window in 0..40 {
            observe(
                &mut averages,
                window,
                ((window / 3) as u32, true),
                (window == 5 || window == 20).then_some(1.0),
            );
        }
        assert!(averages.average_curves(TASK).is_none());
        observe(&mut averages, 40, (14, true), Some(4.0));
        assert_eq!(
            averages.average_curves(TASK).unwrap().1[&CacheLevel::L3].value[0]
                .1
                .value,
            2.0
        );
    }
}
