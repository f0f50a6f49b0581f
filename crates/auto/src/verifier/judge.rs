//! The comparison of speeds before and after a change, and its consequence.

use std::collections::BTreeMap;

use cachemate_core::{
    GuardConfig, MeasuredLogRatio, ProcessId, ProposedChange, SpeedObjective, VerificationMethod,
    View,
};

use super::comparison::{
    CumulativeSpeedup, changes_from_baseline, needs_like_windows, process_changes,
};
use super::history::{History, PlanRecord};
use super::live_tasks::{LiveTasks, is_same_placement, set_placement};
use super::speeds::live_processes;
use super::verdict::{GuardVerdict, ProcessChange};

/// Longest wait for windows of a program's fast phases, in multiples of the windows compared.
const MAX_WAIT_LENGTHS: usize = 4;

/// A change that made programs slower.
pub struct Regression {
    pub judgement: GuardVerdict,
    /// Measured change by the terms on which the change was proposed.
    pub measured: Option<MeasuredLogRatio>,
    /// Whether the state was compared with the one before the first small loss, rather than with the last settled one.
    pub is_from_baseline: bool,
    /// Whether a goal that was met before is missed.
    pub is_goal_broken: bool,
}

/// The result of a window for the state in force.
pub enum Judgement {
    /// Nothing can be compared yet.
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

    /// Judges a changed state, and accepts it if it is no worse.
    pub fn judge(&self, history: &mut History, view: &View<'_>) -> Judgement {
        let trial_window_count = self.config.trial_windows as usize;
        let Some(windows_after) = history.windows_to_compare(trial_window_count) else {
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
        let is_short = windows_after.len() < MAX_WAIT_LENGTHS * trial_window_count;
        if is_short
            && needs_like_windows(
                &live_processes(&view.observation.tasks),
                windows_before.clone(),
                &windows_after,
            )
        {
            return Judgement::Undecided;
        }

        let changes_from_reference =
            process_changes(view, windows_before, &windows_after, trial_window_count);
        let changes_from_baseline = changes_from_baseline(&changes_from_reference, &history.totals);
        let (reference_verdict, baseline_verdict) = (
            self.guard_verdict(&changes_from_reference),
            self.guard_verdict(&changes_from_baseline),
        );
        let measured = self
            .monitored_change
            .and_then(|change| measured_log_ratio(change, &changes_from_reference));
        // A confirmation that noise would decide goes on.
        let is_confirmation = self
            .monitored_change
            .is_some_and(|change| matches!(change.method, VerificationMethod::Confirmation));
        let is_sure =
            measured.is_none_or(|measured| measured.log_ratio.abs() >= 2.0 * measured.error);
        if is_confirmation
            && is_short
            && !is_sure
            && !(self.is_guarded && reference_verdict.is_worse)
        {
            return Judgement::Undecided;
        }
        let is_slower = measured
            .zip(self.monitored_change)
            .is_some_and(|(measured, change)| match change.method {
                VerificationMethod::Confirmation => measured.log_ratio <= 0.0,
                _ => {
                    measured.log_ratio < -2.0 * measured.error
                        && measured.log_ratio < -0.5 * change.min_gain
                }
            });
        let meets_missed_goal = self
            .monitored_change
            .is_some_and(|change| is_missed_goal_improved(change, &changes_from_reference));
        let is_worse =
            !meets_missed_goal && (is_slower || self.is_guarded && reference_verdict.is_worse);
        let is_from_baseline = !is_worse
            && !meets_missed_goal
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
            let judgement = if is_from_baseline {
                baseline_verdict
            } else {
                reference_verdict
            };
            let breaks_goal = |change: &ProcessChange| change.goal_change.broken_goal_change() > 0;
            return Judgement::Worse(Regression {
                judgement,
                measured,
                is_from_baseline,
                is_goal_broken: changes_from_reference.iter().any(breaks_goal),
            });
        }
        // The loss of other processes for a goal is not added to later losses.
        let is_loss = !meets_missed_goal
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

/// The logarithm of the objective after a change over that before it, from the ratio of each process's speeds. A
/// process without a ratio does not count.
fn log_ratio(change: &ProposedChange, ratio: impl Fn(ProcessId) -> Option<f64>) -> Option<f64> {
    let changed_speeds: Vec<(f64, f64)> = change
        .speeds
        .iter()
        .filter_map(|&(process, speed)| Some((speed, ratio(process)?)))
        .collect();
    if changed_speeds.is_empty() {
        return None;
    }
    let objective_value = |speeds: &mut dyn Iterator<Item = f64>| match change.objective {
        SpeedObjective::Slowest => speeds.fold(f64::INFINITY, f64::min),
        SpeedObjective::Sum => speeds.sum(),
    };
    let changed_objective =
        objective_value(&mut changed_speeds.iter().map(|(speed, ratio)| speed * ratio));
    let ratio =
        changed_objective / objective_value(&mut changed_speeds.iter().map(|(speed, _)| *speed));
    (ratio.is_finite() && ratio > 0.0).then(|| libm::log(ratio))
}

/// The objective of a proposed change, computed from the changes of its processes.
fn measured_log_ratio(
    change: &ProposedChange,
    changes: &[ProcessChange],
) -> Option<MeasuredLogRatio> {
    let change_of = |process: ProcessId| changes.iter().find(|change| change.process == process);
    let shifted_log_ratio = |shifted_process: Option<ProcessId>| {
        let ratio_of = |process: ProcessId| {
            let process_change = change_of(process)?;
            let error_shift = if shifted_process == Some(process) {
                process_change.standard_error
            } else {
                0.0
            };
            Some(libm::exp(process_change.log_ratio + error_shift))
        };
        log_ratio(change, ratio_of)
    };
    let central_log_ratio = shifted_log_ratio(None)?;

    // Shift of the objective by each process's error.
    let shifts = change
        .speeds
        .iter()
        .filter_map(|&(process, _)| Some(shifted_log_ratio(Some(process))? - central_log_ratio));
    let error = libm::sqrt(shifts.map(|shift| shift * shift).sum());
    Some(MeasuredLogRatio {
        log_ratio: central_log_ratio,
        error,
    })
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
    let mut plan = view.previous_plan.clone();
    set_placement(&mut plan, &state.plan, &state.tasks, view);
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
