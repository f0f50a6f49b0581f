//! Phase detection (thesis 5.6.2).
//!
//! Problem: a profile describes one phase of a program; when the program enters another phase, the old evidence is
//! misleading. Method (the thesis's heuristic): the signal of each interval is compared with its mean over the last w
//! intervals, and a difference above a threshold is a phase change. A transition can span several intervals: it begins
//! and ends where the difference passes 50 % of the threshold. This is our reading of "another threshold ... to signify
//! the beginning/end".
//!
//! Two additions keep one change from hiding the next. First, a phase that is never steady would be an endless
//! transition. Therefore, once all of the w compared intervals belong to the new phase, another difference above the
//! threshold is another change. Second, a program's own fluctuation just before a phase change would hide that change.
//! Therefore, from two intervals after a change on, a signal is another change if its distance from each of the w
//! intervals exceeds the threshold and their distances from each other.
//!
//! A counted signal has noise, and multiplexed counters of short windows may err by more than the threshold. The caller
//! may therefore raise the threshold of each entry, for example to a multiple of its measured noise ([`SignalNoise`]).
//!
//! The signal is a list of numbers, and the difference of two signals is the largest difference of an entry:
//! - The miss rate, a single entry, is the thesis's own signal ([`PhaseDetector::new`] with its defaults: w = 3, 3
//!   misses per thousand instructions, 50 %). It is cheap (one counter), but if the *allocation* changes, the miss rate
//!   changes too, and the detector reports a phase change.
//! - A locality signature ([`crate::signature::locality_signature`]) has one entry per cache size, computed from reuse
//!   times, which no allocation can change. The unit is the same, so the same thresholds apply: a phase changes when
//!   the miss rate at *any* size moves by more than 3 per thousand instructions.
//!
//! Properties: the detector works online (one result per interval, memory for w signals). The offline form runs the
//! same detector over a whole run and gives recurring phases the same kind.

use std::collections::VecDeque;

use cachemate_core::PhaseParameters;

/// The detector's result for one more interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PhaseEvent {
    /// The phase continues.
    Steady,
    /// The signal differs from the history, but not enough for a phase change yet.
    Drifting,
    /// A phase change, reported once, in the first interval that differs enough. The transition began at interval
    /// `since`, counted from 0.
    Changed {
        /// Index of the first interval of the transition.
        since: usize,
    },
    /// The transition into the new phase continues.
    Settling,
    /// The new phase has settled; this is its first steady interval.
    Settled,
}

/// An online detector of phase changes, which gets one signal per interval.
#[derive(Clone, Debug)]
pub struct PhaseDetector {
    parameters: PhaseParameters,
    recent_signals: VecDeque<Vec<f64>>,
    interval_count: usize,
    /// Index of the first interval of the current transition, and of the interval in which the change was reported.
    transition: Option<(usize, Option<usize>)>,
}

/// Largest difference between corresponding entries; an entry that only one signal has is compared with 0.
pub fn signal_difference(a: &[f64], b: &[f64]) -> f64 {
    let entry_or_zero = |values: &[f64], index: usize| values.get(index).copied().unwrap_or(0.0);
    (0..a.len().max(b.len()))
        .map(|index| (entry_or_zero(a, index) - entry_or_zero(b, index)).abs())
        .fold(0.0, f64::max)
}

impl PhaseDetector {
    /// Builds a detector without history; a history length of 0 counts as 1.
    pub fn new(parameters: PhaseParameters) -> Self {
        PhaseDetector {
            parameters,
            recent_signals: VecDeque::new(),
            interval_count: 0,
            transition: None,
        }
    }

    /// Adds one more interval's signal, whose numbers must be finite. The first interval counts as steady, because
    /// there is nothing to compare it with.
    pub fn push(&mut self, signal: &[f64]) -> PhaseEvent {
        self.push_with_thresholds(signal, &[])
    }

    /// Adds one more interval's signal, as [`push`](Self::push) does, with a threshold for each of its first entries.
    pub fn push_with_thresholds(&mut self, signal: &[f64], thresholds: &[f64]) -> PhaseEvent {
        let usual_threshold = self.parameters.threshold;
        let relative_difference = |a: &[f64], b: &[f64]| {
            let entry_or_zero =
                |values: &[f64], index: usize| values.get(index).copied().unwrap_or(0.0);
            let relative_entry = |index: usize| {
                let threshold = thresholds.get(index).copied().unwrap_or(usual_threshold);
                (entry_or_zero(a, index) - entry_or_zero(b, index)).abs() / threshold
            };
            (0..a.len().max(b.len()))
                .map(relative_entry)
                .fold(0.0, f64::max)
        };
        let difference = if self.recent_signals.is_empty() {
            0.0
        } else {
            relative_difference(signal, &self.mean_signal())
        };
        let exceeds_threshold = difference > 1.0;
        let (interval_index, history) = (self.interval_count, self.parameters.history.max(1));
        let is_outlier = exceeds_threshold && self.is_outlier(signal, relative_difference);
        let edge_share = self.parameters.edge_share;
        let event = match &mut self.transition {
            None if difference <= edge_share => PhaseEvent::Steady,
            None => {
                self.transition =
                    Some((interval_index, exceeds_threshold.then_some(interval_index)));
                if exceeds_threshold {
                    PhaseEvent::Changed {
                        since: interval_index,
                    }
                } else {
                    PhaseEvent::Drifting
                }
            }
            Some((_, reported)) if difference <= edge_share => {
                let event = if reported.is_some() {
                    PhaseEvent::Settled
                } else {
                    PhaseEvent::Steady
                };
                self.transition = None;
                event
            }
            Some((since, reported @ None)) if exceeds_threshold => {
                *reported = Some(interval_index);
                PhaseEvent::Changed { since: *since }
            }
            Some((since, Some(reported)))
                if (exceeds_threshold && interval_index > *reported + history)
                    || (is_outlier && interval_index >= *reported + 2) =>
            {
                (*since, *reported) = (interval_index, interval_index);
                PhaseEvent::Changed {
                    since: interval_index,
                }
            }
            Some((_, Some(_))) => PhaseEvent::Settling,
            Some((_, None)) => PhaseEvent::Drifting,
        };
        if self.recent_signals.len() == self.parameters.history.max(1) {
            self.recent_signals.pop_front();
        }
        self.recent_signals.push_back(signal.to_vec());
        self.interval_count += 1;
        event
    }

    /// Discards the history, so that the next interval is not compared with earlier ones. Call this after a change
    /// that the program did not cause, such as a new allocation under a miss-rate signal.
    pub fn clear_history(&mut self) {
        self.recent_signals.clear();
        self.transition = None;
    }

    /// The signal is an outlier if its distance from each interval of the history exceeds the threshold and all
    /// distances among these intervals.
    fn is_outlier(
        &self,
        signal: &[f64],
        relative_difference: impl Fn(&[f64], &[f64]) -> f64,
    ) -> bool {
        let differences_from = |a: &[f64]| -> Vec<f64> {
            self.recent_signals
                .iter()
                .map(|b| relative_difference(a, b))
                .collect()
        };
        let max_history_difference = self
            .recent_signals
            .iter()
            .flat_map(|a| differences_from(a))
            .fold(0.0, f64::max);
        let min_difference = differences_from(signal)
            .into_iter()
            .fold(f64::INFINITY, f64::min);
        min_difference > max_history_difference.max(1.0)
    }

    fn mean_signal(&self) -> Vec<f64> {
        mean_of_signals(self.recent_signals.iter().map(Vec::as_slice))
    }
}

fn mean_of_signals<'a>(signals: impl ExactSizeIterator<Item = &'a [f64]>) -> Vec<f64> {
    let count = signals.len().max(1) as f64;
    let mut sum: Vec<f64> = Vec::new();
    for signal in signals {
        if sum.len() < signal.len() {
            sum.resize(signal.len(), 0.0);
        }
        sum.iter_mut()
            .zip(signal)
            .for_each(|(sum, entry)| *sum += entry);
    }
    sum.iter_mut().for_each(|entry| *entry /= count);
    sum
}

/// Number of intervals from which noise is estimated.
const NOISE_INTERVALS: usize = 16;

/// The noise of a signal that is the mean of several windows: the standard error of that mean, from the differences
/// between windows of one interval.
///
/// Differences between intervals would not show the noise alone, because phases may last for few intervals. The median
/// over the last intervals leaves out those that span a change of phase. An interval of one window shows no noise.
#[derive(Clone, Debug, Default)]
pub struct SignalNoise {
    /// Number of windows of the current interval, their total weight, their mean, and their weighted squared
    /// deviations.
    window_count: u32,
    weight: f64,
    mean: Vec<f64>,
    square_sums: Vec<f64>,
    /// Squared standard errors of the last intervals, each over its median for normal noise of variance one.
    variances: VecDeque<Vec<f64>>,
}

impl SignalNoise {
    /// Begins an interval.
    pub fn begin_interval(&mut self) {
        (self.window_count, self.weight) = (0, 0.0);
        self.mean.clear();
        self.square_sums.clear();
    }

    /// Adds a window of the current interval with its weight in the interval's signal.
    pub fn add_window(&mut self, signal: &[f64], weight: f64) {
        if self.mean.len() != signal.len() {
            self.begin_interval();
            (self.mean, self.square_sums) = (vec![0.0; signal.len()], vec![0.0; signal.len()]);
        }
        self.window_count += 1;
        self.weight += weight;
        for ((mean, square_sum), value) in
            self.mean.iter_mut().zip(&mut self.square_sums).zip(signal)
        {
            let deviation = value - *mean;
            *mean += deviation * weight / self.weight;
            *square_sum += weight * deviation * (value - *mean);
        }
    }

    /// Ends the interval.
    pub fn end_interval(&mut self) {
        if self.window_count < 2 {
            return;
        }
        if self
            .variances
            .back()
            .is_some_and(|last| last.len() != self.mean.len())
        {
            self.variances.clear();
        }
        if self.variances.len() == NOISE_INTERVALS {
            self.variances.pop_front();
        }
        let degrees_of_freedom = f64::from(self.window_count - 1);
        // Median of a variance with these degrees of freedom (Wilson and Hilferty 1931).
        let cube_root = 1.0 - 2.0 / (9.0 * degrees_of_freedom);
        let divisor = self.weight * degrees_of_freedom * cube_root * cube_root * cube_root;
        self.variances.push_back(
            self.square_sums
                .iter()
                .map(|square_sum| square_sum / divisor)
                .collect(),
        );
    }

    /// Standard error of an entry in one interval, in the entry's own unit; 0 if it is unknown, so that nothing is
    /// excused as noise.
    pub fn standard_error(&self, entry: usize) -> f64 {
        let mut entry_variances: Vec<f64> = self
            .variances
            .iter()
            .filter_map(|variances| variances.get(entry).copied())
            .collect();
        if entry_variances.is_empty() {
            return 0.0;
        }
        let middle = entry_variances.len() / 2;
        libm::sqrt(
            *entry_variances
                .select_nth_unstable_by(middle, f64::total_cmp)
                .1,
        )
    }
}

/// A phase found in a finished run.
#[derive(Clone, PartialEq, Debug)]
pub struct DetectedPhase {
    /// Index of the phase's first interval.
    pub start: usize,
    /// Index of the first interval after the transition into the phase; equal to `end` if the phase never settled.
    pub settled_at: usize,
    /// Index of the interval after the phase's last one.
    pub end: usize,
    /// Kind of the phase, which recurring phases share; counted from 0 by first occurrence.
    pub kind: usize,
    /// Mean signal of the settled intervals (of all intervals if the phase never settled).
    pub signal: Vec<f64>,
}

/// All phases of a finished run, in order and without gaps. A phase gets the kind of the nearest earlier phase within
/// the threshold, or a new kind if there is none.
pub fn detect_phases(signals: &[Vec<f64>], parameters: PhaseParameters) -> Vec<DetectedPhase> {
    let mut detector = PhaseDetector::new(parameters);
    let mut phase_starts = vec![(0, 0)];
    for (index, signal) in signals.iter().enumerate() {
        match (detector.push(signal), phase_starts.last_mut()) {
            (PhaseEvent::Changed { since }, _) => phase_starts.push((since, signals.len())),
            (PhaseEvent::Settled, Some((_, settled))) => *settled = index,
            _ => {}
        }
    }
    let mut phases: Vec<DetectedPhase> = Vec::new();
    let mut kinds: Vec<Vec<f64>> = Vec::new();
    for (number, &(start, settled)) in phase_starts.iter().enumerate() {
        let end = phase_starts
            .get(number + 1)
            .map_or(signals.len(), |&(start, _)| start);
        if start == end {
            continue;
        }
        let settled = settled.min(end);
        let steady_intervals = if settled < end {
            settled..end
        } else {
            start..end
        };
        let signal = mean_of_signals(signals[steady_intervals].iter().map(Vec::as_slice));
        let nearest_kind = kinds
            .iter()
            .map(|kind| signal_difference(kind, &signal))
            .enumerate()
            .filter(|&(_, difference)| difference <= parameters.threshold)
            .min_by(|a, b| a.1.total_cmp(&b.1));
        let kind = nearest_kind.map_or(kinds.len(), |(kind, _)| kind);
        if kind == kinds.len() {
            kinds.push(signal.clone());
        }
        phases.push(DetectedPhase {
            start,
            settled_at: settled,
            end,
            kind,
            signal,
        });
    }
    phases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reuse::ReuseSampler;
    use crate::signature::locality_signature;
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    fn run(rates: &[f64]) -> Vec<DetectedPhase> {
        let signals: Vec<Vec<f64>> = rates.iter().map(|&rate| vec![rate]).collect();
        detect_phases(&signals, PhaseParameters::default())
    }

    /// Are two alternating phases found where they change, and recognized when they recur?
    #[test]
    fn alternating_phases_are_found_and_recognized() {
        let rates: Vec<f64> = (0..40)
            .map(|index| if index / 10 % 2 == 0 { 2.0 } else { 12.0 })
            .collect();
        let phases = run(&rates);
        assert_eq!(
            phases.iter().map(|phase| phase.start).collect::<Vec<_>>(),
            [0, 10, 20, 30]
        );
        assert_eq!(
            phases.iter().map(|phase| phase.kind).collect::<Vec<_>>(),
            [0, 1, 0, 1]
        );
        assert!((phases[1].signal[0] - 12.0).abs() < 1e-9);
    }

    /// Is a change just below the threshold ignored, and a change just above it reported?
    #[test]
    fn the_threshold_is_three_misses_per_thousand_instructions() {
        let phase_count_at = |new_rate: f64| run(&[vec![1.0; 6], vec![new_rate; 6]].concat()).len();
        assert_eq!((phase_count_at(3.99), phase_count_at(4.01)), (1, 2));
    }

    /// Does a slow transition begin where the difference passes half of the threshold, and end where it falls below?
    #[test]
    fn a_transition_begins_and_ends_at_half_of_the_threshold() {
        let mut detector = PhaseDetector::new(PhaseParameters::default());
        let events: Vec<PhaseEvent> = [1.0, 1.0, 1.0, 3.0, 6.0, 9.0, 9.0, 9.0, 9.0]
            .iter()
            .map(|&rate| detector.push(&[rate]))
            .collect();
        use PhaseEvent::*;
        let expected = [
            Steady,
            Steady,
            Steady,
            Drifting,
            Changed { since: 3 },
            Settling,
            Settling,
            Settled,
            Steady,
        ];
        assert_eq!(events, expected);
    }

    /// Is the next phase detected if the preceding one was never steady?
    #[test]
    fn the_phase_after_an_unsteady_one_is_detected() {
        let alternating_rate = |index: usize| if index.is_multiple_of(2) { 20.0 } else { 24.0 };
        let rates: Vec<f64> = (0..30)
            .map(|index| {
                if (10..20).contains(&index) {
                    alternating_rate(index)
                } else {
                    2.0
                }
            })
            .collect();
        let starts: Vec<usize> = run(&rates).iter().map(|phase| phase.start).collect();
        assert_eq!(starts, [0, 10, 20]);
    }

    /// Is a phase change detected if a fluctuation of the program was reported just before it, and is a change over two
    /// intervals reported once?
    #[test]
    fn a_fluctuation_just_before_does_not_hide_a_phase_change() {
        let change_positions = |rates: &[f64]| {
            let mut detector = PhaseDetector::new(PhaseParameters::default());
            let is_change =
                |rate: &f64| matches!(detector.push(&[*rate]), PhaseEvent::Changed { .. });
            rates
                .iter()
                .map(is_change)
                .enumerate()
                .filter_map(|(index, reported)| reported.then_some(index))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            change_positions(&[13.0, 13.0, 13.0, 13.0, 5.0, 13.0, 82.0, 82.0, 82.0, 82.0]),
            [4, 6]
        );
        assert_eq!(
            change_positions(&[13.0, 13.0, 13.0, 13.0, 40.0, 82.0, 82.0, 82.0, 82.0]),
            [4]
        );
        assert_eq!(
            change_positions(&[13.0, 13.0, 13.0, 5.0, 13.0, 6.0, 16.0, 13.0]),
            [3]
        );
    }

    proptest! {
        /// Do the phases cover the run exactly once, in order?
        #[test]
        fn phases_cover_the_run(rates in prop::collection::vec(0.0f64..20.0, 1..80)) {
            let phases = run(&rates);
            prop_assert_eq!(phases[0].start, 0);
            prop_assert_eq!(phases[phases.len() - 1].end, rates.len());
            for pair in phases.windows(2) {
                prop_assert_eq!(pair[0].end, pair[1].start);
            }
            for phase in &phases {
                prop_assert!(phase.start < phase.end && phase.start <= phase.settled_at && phase.settled_at <= phase.end);
            }
        }

        /// Is noise well within the threshold never reported as a phase?
        #[test]
        fn noise_within_the_threshold_is_not_a_phase(noise in prop::collection::vec(-0.7f64..0.7, 1..80)) {
            let rates: Vec<f64> = noise.iter().map(|noise| 8.0 + noise).collect();
            prop_assert_eq!(run(&rates).len(), 1);
        }
    }

    /// Simulates a program with one true phase change (at interval 12) on an LRU cache whose size changes at interval
    /// 6. Returns the misses per thousand instructions and the locality signature of each interval.
    fn program_with_a_new_allocation() -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let (mut random, mut sampler) = (SplitMix64::new(4), ReuseSampler::new(20, 9));
        let (mut rates, mut signatures, mut stored_lines): (Vec<_>, Vec<_>, Vec<u64>) =
            Default::default();
        for interval in 0..18 {
            let (size, working_set) = (
                if interval < 6 { 300 } else { 60 },
                if interval < 12 { 200 } else { 600 },
            );
            let mut misses = 0;
            for _ in 0..10_000 {
                let line = random.draw_below(working_set);
                sampler.touch(line);
                let position = stored_lines.iter().rposition(|&stored| stored == line);
                misses += u32::from(position.is_none());
                position.map(|index| stored_lines.remove(index));
                stored_lines.push(line);
                let too_many = stored_lines.len().saturating_sub(size);
                stored_lines.drain(..too_many);
            }
            // The program executes 25 instructions per access.
            rates.push(vec![f64::from(misses) / 250.0]);
            signatures.push(locality_signature(&sampler.take_completed(), 40.0).unwrap());
        }
        (rates, signatures)
    }

    /// Does the detector by miss rate report a new allocation as a phase, whereas the detector by signature reports
    /// only the program's own change?
    #[test]
    fn the_signature_ignores_a_new_allocation() {
        let (rates, signatures) = program_with_a_new_allocation();
        let phase_starts = |signals: &[Vec<f64>]| -> Vec<usize> {
            detect_phases(signals, PhaseParameters::default())
                .iter()
                .map(|phase| phase.start)
                .collect()
        };
        assert!(
            phase_starts(&rates).contains(&6),
            "{:?}",
            phase_starts(&rates)
        );
        assert_eq!(phase_starts(&signatures), [0, 12]);
    }
}
