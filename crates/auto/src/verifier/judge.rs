//! The comparison of speeds before and after a change, and its consequence.

use std::collections::BTreeMap;

use cachemate_core::{
    GuardConfig, MeasuredLogRatio, ProcessId, ProposedChange, VerificationMethod, View,
};

use super::comparison::{
    CumulativeSpeedup, changes_from_baseline, needs_like_windows, process_changes,
};
use super::history::{History, PlanRecord};
use super::live_tasks::{LiveTasks, is_same_placement, with_placement};
use super::speeds::live_processes;
use super::verdict::{GuardVerdict, ProcessChange};

/// Longest wait for windows of a program's fast phases, and for a confirmation to become sure, in multiples of the
/// windows compared.
const MAX_WAIT_LENGTHS: usize = 4;

/// A change that made programs slower.
pub struct Regression {
    pub guard_verdict: GuardVerdict,
    /// Measured change by the terms on which the change was proposed.
    pub measured: Option<MeasuredLogRatio>,
    /// Whether the state was compared with the one before the first small loss, rather than with the last settled one.
    pub is_from_baseline: bool,
    /// Whether a goal that was met before is missed.
    pub is_goal_broken: bool,
}

/// The result of a window for the state in force.
pub enum Judgement {
    /// Nothing can be compared yet, no loss and no gain is certain yet, or nobody asked for a verdict.
    Undecided,
    /// Nothing can ever be compared, or the state is worse and the live tasks cannot return to the one before.
    NotMeasured,
    Kept(Option<MeasuredLogRatio>),
    Worse(Regression),
}

/// The rules for judging a change.
pub struct Judge<'a> {
    pub config: GuardConfig,
    /// Whether the guard protects programs, whatever the policy wants.
    pub is_guarded: bool,
    /// Terms of the change that is being monitored.
    pub monitored_change: Option<&'a ProposedChange>,
}

impl Judge<'_> {
    fn guard_verdict(&self, changes: &[ProcessChange]) -> GuardVerdict {
        GuardVerdict::from_changes(changes, self.config.objective, self.config.min_loss)
    }

    /// Whether noise would decide the confirmation that is going on.
    fn is_unsure_confirmation(&self, measured: Option<MeasuredLogRatio>) -> bool {
        let is_confirmation = self
            .monitored_change
            .is_some_and(|change| matches!(change.method, VerificationMethod::Confirmation));
        let is_sure =
            measured.is_none_or(|measured| measured.log_ratio.abs() >= 2.0 * measured.error);
        is_confirmation && !is_sure
    }

    /// Judges a changed state, and accepts it if it is no worse. A process whose missed goal improves excuses every
    /// loss; otherwise the change's own terms and the guard's comparison with the reference decide, and then the
    /// guard's comparison with the baseline.
    pub fn judge(&self, history: &mut History, view: &View<'_>) -> Judgement {
        let trial_windows = self.config.trial_windows as usize;
        let Some(windows_after) = history.windows_to_compare(trial_windows) else {
            return if history.is_on_trial() {
                Judgement::Undecided
            } else {
                Judgement::NotMeasured
            };
        };
        if !self.is_guarded && self.monitored_change.is_none() {
            history.accept(windows_after, None);
            return Judgement::Undecided;
        }

        let windows_before = history.reference.windows.iter();
        let may_wait = windows_after.len() < MAX_WAIT_LENGTHS * trial_windows;
        if may_wait
            && needs_like_windows(
                &live_processes(&view.observation.tasks),
                windows_before.clone(),
                &windows_after,
            )
        {
            return Judgement::Undecided;
        }

        let changes_from_reference =
            process_changes(view, windows_before, &windows_after, trial_windows);
        let changes_from_baseline = changes_from_baseline(&changes_from_reference, &history.totals);
        let (reference_verdict, baseline_verdict) = (
            self.guard_verdict(&changes_from_reference),
            self.guard_verdict(&changes_from_baseline),
        );
        let measured = self
            .monitored_change
            .and_then(|change| measured_log_ratio(change, &changes_from_reference));
        let loses_to_reference = self.is_guarded && reference_verdict.is_worse;
        if may_wait && self.is_unsure_confirmation(measured) && !loses_to_reference {
            return Judgement::Undecided;
        }
        let fails_terms = measured
            .zip(self.monitored_change)
            .is_some_and(|(measured, change)| fails_terms(change, measured));
        let improves_missed_goal = self
            .monitored_change
            .is_some_and(|change| is_missed_goal_improved(change, &changes_from_reference));
        let is_worse = !improves_missed_goal && (fails_terms || loses_to_reference);
        let is_from_baseline = !is_worse
            && !improves_missed_goal
            && self.is_guarded
            && baseline_verdict.is_worse
            && history.baseline.is_some();
        let target_state = if is_from_baseline {
            history.baseline.as_ref()
        } else {
            Some(&history.reference)
        };
        if (is_worse || is_from_baseline)
            && target_state.is_some_and(|state| can_revert(state, view))
        {
            let guard_verdict = if is_from_baseline {
                baseline_verdict
            } else {
                reference_verdict
            };
            let breaks_goal = |change: &ProcessChange| change.goal_change.broken_goal_change() > 0;
            return Judgement::Worse(Regression {
                guard_verdict,
                measured,
                is_from_baseline,
                is_goal_broken: changes_from_reference.iter().any(breaks_goal),
            });
        }
        // The loss of other processes for a goal is not added to later losses.
        let is_loss = !improves_missed_goal
            && (baseline_verdict.mean_log_ratio < 0.0 || baseline_verdict.has_losing_process);
        history.accept(
            windows_after,
            is_loss.then(|| cumulative_speedups(&changes_from_baseline)),
        );
        if is_worse {
            return Judgement::NotMeasured;
        }
        Judgement::Kept(measured)
    }
}

/// Whether a change is not faster although it was to be confirmed, or certainly slower.
fn fails_terms(change: &ProposedChange, measured: MeasuredLogRatio) -> bool {
    match change.method {
        VerificationMethod::Confirmation => measured.log_ratio <= 0.0,
        _ => {
            measured.log_ratio < -2.0 * measured.error
                && measured.log_ratio < -0.5 * change.min_gain
        }
    }
}

/// The speed of one process before and after a change. With `after_plus_error`, which is one standard error faster, the
/// error of the sum of all processes follows.
struct ChangedSpeed {
    before: f64,
    after: f64,
    after_plus_error: f64,
}

fn positive_log(ratio: f64) -> Option<f64> {
    (ratio.is_finite() && ratio > 0.0).then(|| libm::log(ratio))
}

/// The logarithm of the sum of speeds after a proposed change over that before it, from the changes of its processes. A
/// process without a change does not count.
fn measured_log_ratio(
    change: &ProposedChange,
    changes: &[ProcessChange],
) -> Option<MeasuredLogRatio> {
    let changes: BTreeMap<ProcessId, &ProcessChange> = changes
        .iter()
        .map(|change| (change.process, change))
        .collect();
    let changed_speed = |&(process, before): &(ProcessId, f64)| {
        let change = changes.get(&process)?;
        Some(ChangedSpeed {
            before,
            after: before * libm::exp(change.log_ratio),
            after_plus_error: before * libm::exp(change.log_ratio + change.standard_error),
        })
    };
    let speeds: Vec<ChangedSpeed> = change.speeds.iter().filter_map(changed_speed).collect();
    if speeds.is_empty() {
        return None;
    }

    let before: f64 = speeds.iter().map(|speed| speed.before).sum();
    let after: f64 = speeds.iter().map(|speed| speed.after).sum();
    let log_ratio = positive_log(after / before)?;
    // Shift of the sum by each process's error.
    let shift = |speed: &ChangedSpeed| {
        positive_log((after + (speed.after_plus_error - speed.after)) / after)
    };
    let shifts = speeds.iter().filter_map(shift);
    let error = libm::sqrt(shifts.map(|shift| shift * shift).sum());
    Some(MeasuredLogRatio { log_ratio, error })
}

/// Whether the change certainly sped up a process whose goal is the reason for it, without breaking another goal.
fn is_missed_goal_improved(change: &ProposedChange, changes: &[ProcessChange]) -> bool {
    let is_improved = |process_change: &ProcessChange| {
        change.goal_processes.contains(&process_change.process)
            && process_change.log_ratio > 0.0
            && process_change.exceeds_noise(changes.len())
    };
    let breaks_no_goal =
        |process_change: &ProcessChange| process_change.goal_change.broken_goal_change() <= 0;
    changes.iter().any(is_improved) && changes.iter().all(breaks_no_goal)
}

/// Whether a roll-back would change the placement of the live tasks.
fn can_revert(state: &PlanRecord, view: &View<'_>) -> bool {
    let plan = with_placement(view.previous_plan, &state.plan, &state.tasks, view);
    !is_same_placement(
        &plan,
        view.previous_plan,
        &LiveTasks::from_samples(&view.observation.tasks),
    )
}

fn cumulative_speedups(changes: &[ProcessChange]) -> BTreeMap<ProcessId, CumulativeSpeedup> {
    let cumulative_speedup = |change: &ProcessChange| CumulativeSpeedup {
        log_ratio: change.log_ratio,
        variance: change.standard_error * change.standard_error,
    };
    changes
        .iter()
        .map(|change| (change.process, cumulative_speedup(change)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verifier::verdict::GoalChange;
    use cachemate_papers::work_metric::WorkMetric;

    fn proposed_change(speeds: Vec<(ProcessId, f64)>) -> ProposedChange {
        ProposedChange {
            method: VerificationMethod::Confirmation,
            forecast_gain: 0.0,
            min_gain: 0.01,
            speeds,
            goal_processes: Vec::new(),
        }
    }

    /// Processes with different speeds, changes and errors.
    fn processes(count: u32) -> (Vec<(ProcessId, f64)>, Vec<ProcessChange>) {
        let unit = |id: u32, factor: u32| f64::from((id + 1) * factor % 101) / 101.0;
        let change = |id: u32| ProcessChange {
            process: ProcessId(id),
            user: None,
            metric: WorkMetric::Instructions,
            priority: 1.0,
            log_ratio: 0.2 * unit(id, 37) - 0.1,
            standard_error: 0.3 * unit(id, 53),
            degrees_of_freedom: 9.0,
            goal_change: GoalChange::default(),
        };
        // The last process of the sum was not measured.
        let speeds = (0..=count).map(|id| (ProcessId(id), 0.5 + unit(id, 17)));
        (speeds.collect(), (0..count).map(change).collect())
    }

    /// Is the error of a sum of speeds that of the shifts by the error of each process?
    #[test]
    fn is_a_verdict_on_many_processes_the_same_as_on_the_sum_of_their_parts() {
        let (speeds, changes) = processes(40);
        let sum_with = |shifted: Option<usize>| {
            let speed = |index: usize| {
                let change = &changes[index];
                let is_shifted = shifted == Some(index);
                let error = if is_shifted {
                    change.standard_error
                } else {
                    0.0
                };
                speeds[index].1 * libm::exp(change.log_ratio + error)
            };
            (0..changes.len()).map(speed).sum::<f64>()
        };
        let before = speeds[..changes.len()].iter().map(|(_, speed)| *speed);
        let before = before.sum::<f64>();
        let after = sum_with(None);
        let variance: f64 = (0..changes.len())
            .map(|index| libm::log(sum_with(Some(index)) / after).powi(2))
            .sum();

        let change = proposed_change(speeds);
        let measured = measured_log_ratio(&change, &changes).unwrap();
        assert!((measured.log_ratio - libm::log(after / before)).abs() < 1e-12);
        assert!((measured.error - libm::sqrt(variance)).abs() < 1e-12);
        assert!(measured.error > 0.0);
    }

    /// Does a verdict on a hundred thousand processes end? Its work is linear; a cubic one would take days.
    #[test]
    fn does_a_verdict_on_a_hundred_thousand_processes_end() {
        let (speeds, changes) = processes(100_000);
        let change = proposed_change(speeds);
        assert!(measured_log_ratio(&change, &changes).is_some());
    }
}
