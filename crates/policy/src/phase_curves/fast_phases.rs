//! Programs that turn to another phase faster than any plan can follow them are seen as a whole.
//!
//! Problem: a phase is told some windows after it has begun, and a change takes some more to be made and measured. Who turns
//! again by then has given up its part for nothing, each time. Method: where the last few phases were that short in the
//! mean, the program's number of phases stands still, and its curve is the mean of those that were measured last. Logs
//! fall anywhere in its rounds, so that their mean is that of its time. Properties: who has so long a phase again is
//! followed again; until enough curves are measured nothing changes; curves that differ make the mean as uncertain as
//! they leave it.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{CacheLevel, Estimate, Fact, SizeCurve, TaskId, View};

use super::{LevelCurves, measured_at};

/// Kind of phase of a program that is seen as a whole.
pub const WHOLE: u32 = u32::MAX;
/// Phases of fewer windows cannot be followed: three or four to be told, as many for a change, as many to gain by it.
const FOLLOWED_FROM_WINDOWS: u64 = 12;
/// Phases that the mean is taken of.
const PHASES: usize = 4;
/// Fewer curves are no mean of anything.
const CURVES_AT_LEAST: usize = 3;
/// Older ones are forgotten.
const CURVES_AT_MOST: usize = 8;

/// What is known of one task's past.
#[derive(Clone, Debug, Default)]
struct PhaseHistory {
    /// The phase that goes on, and the window in which it was first seen.
    phase: (u32, u64),
    lengths_windows: VecDeque<u64>,
    /// Number of the phase at which it began to be seen as a whole.
    since: Option<u32>,
    curves: VecDeque<LevelCurves>,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct FastPhaseAverages {
    past: BTreeMap<TaskId, PhaseHistory>,
}

impl FastPhaseAverages {
    /// Takes a window in; tasks that are gone are forgotten.
    pub fn observe(&mut self, view: &View<'_>) {
        self.past.retain(|task, _| view.profiles.contains_key(task));
        for (&task, profile) in view.profiles {
            let window = view.observation.window;
            let fresh = || PhaseHistory { phase: (profile.phase_number, window), ..PhaseHistory::default() };
            let past = self.past.entry(task).or_insert_with(fresh);
            past.turn(profile.phase_number, window);
            past.note(&profile.locality.misses_per_kilo_instr);
        }
    }

    /// Number of its phase and its curves, where a task is seen as a whole.
    pub fn averaged(&self, task: TaskId) -> Option<(u32, LevelCurves)> {
        let past = self.past.get(&task).filter(|past| past.is_averaged())?;
        Some((past.since?, mean(&past.curves)?))
    }

    /// Is it seen as a whole?
    pub fn contains(&self, task: TaskId) -> bool {
        self.past.get(&task).is_some_and(PhaseHistory::is_averaged)
    }
}

impl PhaseHistory {
    fn is_averaged(&self) -> bool {
        self.since.is_some() && self.curves.len() >= CURVES_AT_LEAST
    }

    fn turn(&mut self, number: u32, window: u64) {
        let (phase, since) = self.phase;
        let length = window.saturating_sub(since);
        if phase != number {
            self.phase = (number, window);
            self.lengths_windows.push_back(length);
            if self.lengths_windows.len() > PHASES {
                self.lengths_windows.pop_front();
            }
        } else if length >= 2 * FOLLOWED_FROM_WINDOWS {
            self.lengths_windows.clear();
            self.since = None;
        }
        let sum: u64 = self.lengths_windows.iter().sum();
        if self.lengths_windows.len() == PHASES && sum < FOLLOWED_FROM_WINDOWS * PHASES as u64 {
            self.since.get_or_insert(number);
        }
    }

    fn note(&mut self, measured: &LevelCurves) {
        let Some(at) = measured_at(measured) else { return };
        if self.curves.back().and_then(measured_at) == Some(at) {
            return;
        }
        // Curves at other sizes are of another machine's parts: there is no mean of both.
        if self.curves.back().is_some_and(|last| !are_alike(last, measured)) {
            self.curves.clear();
        }
        self.curves.push_back(measured.clone());
        if self.curves.len() > CURVES_AT_MOST {
            self.curves.pop_front();
        }
    }
}

/// Are they for the same levels, at the same sizes?
fn are_alike(one: &LevelCurves, other: &LevelCurves) -> bool {
    let sizes = |curves: &LevelCurves| -> Vec<(CacheLevel, Vec<u64>)> {
        let of = |(level, fact): (&CacheLevel, &Fact<SizeCurve>)| {
            (*level, fact.value.iter().map(|(size, _)| *size).collect())
        };
        curves.iter().map(of).collect()
    };
    sizes(one) == sizes(other)
}

/// `None` = there are none.
fn mean(curves: &VecDeque<LevelCurves>) -> Option<LevelCurves> {
    let last = curves.back()?;
    let of = |(&level, fact): (&CacheLevel, &Fact<SizeCurve>)| {
        let all: Vec<&SizeCurve> = curves.iter().filter_map(|one| one.get(&level).map(|fact| &fact.value)).collect();
        let point = |at: usize| (fact.value[at].0, mean_of(&all.iter().map(|curve| curve[at].1).collect::<Vec<_>>()));
        (level, Fact { value: (0..fact.value.len()).map(point).collect(), ..fact.clone() })
    };
    Some(last.iter().map(of).collect())
}

/// Mean of measurements; its interval is theirs in the mean, or two standard errors of the mean where those reach further.
fn mean_of(all: &[Estimate]) -> Estimate {
    let count = all.len() as f64;
    let mean = |of: &dyn Fn(&Estimate) -> f64| all.iter().map(of).sum::<f64>() / count;
    let value = mean(&|one| one.value);
    let spread = all.iter().map(|one| (one.value - value) * (one.value - value)).sum::<f64>() / (count - 1.0).max(1.0);
    let error = 2.0 * libm::sqrt(spread / count);
    let (low, high) = (mean(&|one| one.low).min(value - error), mean(&|one| one.high).max(value + error));
    Estimate { value, low: low.max(0.0), high }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_view;
    use super::*;
    use cachemate_core::{FactSource, Profile, Profiles};

    const TASK: TaskId = TaskId(0);

    /// One window: the phase's number, and misses of the curve that was measured in it.
    fn observe(unsteady: &mut FastPhaseAverages, window: u64, number: u32, measured: Option<f64>) {
        let mut profile = Profile { phase_number: number, ..Profile::default() };
        if let Some(rate) = measured {
            let curve = vec![(1 << 20, Estimate::exact(rate)), (2 << 20, Estimate::exact(0.0))];
            profile = profile.with_misses(CacheLevel::L3, curve, FactSource::Oracle);
            profile.locality.misses_per_kilo_instr.values_mut().for_each(|fact| fact.window = window);
        }
        let profiles: Profiles = [(TASK, profile)].into();
        with_view(window, &profiles, |view| unsteady.observe(view));
    }

    /// Phases of so many windows, a curve measured at the beginning of each: when is the task seen as a whole?
    fn first_whole(length: u64, phases: u64) -> Option<(u64, FastPhaseAverages)> {
        let mut unsteady = FastPhaseAverages::default();
        (0..length * phases).find_map(|window| {
            let measured = window.is_multiple_of(length).then_some((window / length % 2 * 8) as f64);
            observe(&mut unsteady, window, (window / length) as u32, measured);
            unsteady.contains(TASK).then(|| (window, unsteady.clone()))
        })
    }

    /// Is who turns every four windows seen as a whole, by the mean of its curves, and who turns every twenty not?
    #[test]
    fn who_turns_too_fast_is_seen_as_a_whole() {
        assert!(first_whole(20, 9).is_none());
        let (window, mut unsteady) = first_whole(4, 9).unwrap();
        assert_eq!(window, 16, "four phases are over");
        let (number, curves) = unsteady.averaged(TASK).unwrap();
        let point = curves[&CacheLevel::L3].value[0].1;
        // 0, 8, 0, 8, 0.
        assert_eq!((number, point.value), (4, 3.2));
        assert!(point.low < 0.1 && point.high > 6.0, "{point:?}");
        observe(&mut unsteady, 20, 5, None);
        assert_eq!(unsteady.averaged(TASK).map(|(number, _)| number), Some(4), "the number stands still");
        // It stays in one phase now.
        for window in 21..=44 {
            assert!(unsteady.contains(TASK), "{window}");
            observe(&mut unsteady, window, 5, None);
        }
        assert!(!unsteady.contains(TASK));
    }

    /// Does nothing change until enough curves are known?
    #[test]
    fn without_curves_there_is_no_whole() {
        let mut unsteady = FastPhaseAverages::default();
        for window in 0..40 {
            observe(&mut unsteady, window, (window / 3) as u32, (window == 5 || window == 20).then_some(1.0));
        }
        assert!(!unsteady.contains(TASK));
        observe(&mut unsteady, 40, 14, Some(4.0));
        assert_eq!(unsteady.averaged(TASK).unwrap().1[&CacheLevel::L3].value[0].1.value, 2.0);
    }
}
