//! The comparison of speeds before and after a change, and its consequence.

use std::collections::BTreeMap;

use cachemate_core::{GuardConfig, MeasuredLogRatio, ProcessId, ProposedChange, VerificationMethod, View};

use super::comparison::{CumulativeSpeedup, lacks_like_windows, process_changes, total_changes};
use super::history::{History, PlanComparison, PlanRecord};
use super::live_tasks::{LiveTasks, same_placement, set_placement};
use super::speeds::{ProcessSpeed, live_processes};
use super::trial::log_ratio;
use super::verdict::{GuardVerdict, ProcessChange};

/// Longest wait for windows of a program's fast phases, in multiples of the windows compared.
const MAX_COMPARED: usize = 4;

/// A change that made programs slower.
pub struct Regression {
    pub judgement: GuardVerdict,
    /// Measured change by the terms on which the change was proposed.
    pub measured: Option<MeasuredLogRatio>,
    /// Whether the state was compared with the one before the first small loss, rather than with the last settled one.
    pub in_total: bool,
    /// Whether a goal that was met before is missed.
    pub breaks_goal: bool,
}

impl Regression {
    fn from_changes(judgement: GuardVerdict, changes: &[ProcessChange]) -> Self {
        let breaks_goal = changes.iter().any(|change| change.floor.newly_broken() > 0);
        Regression { judgement, measured: None, in_total: false, breaks_goal }
    }
}

/// The result of a window for the state in force.
pub enum Judgement {
    /// Nothing can be compared yet.
    Open,
    /// Nothing can ever be compared.
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
    pub monitored: Option<&'a ProposedChange>,
}

impl Judge<'_> {
    /// Judges a changed state, and accepts it if it is no worse.
    pub fn judge(&self, history: &mut History, view: &View<'_>, comparison: PlanComparison) -> Judgement {
        match comparison {
            PlanComparison::BeforeAndAfter => self.compare(history, view),
            PlanComparison::Trial => self.check_goals(history, view),
            PlanComparison::Measured => self.check_harm(history, view),
        }
    }

    fn verdict_on(&self, changes: &[ProcessChange]) -> GuardVerdict {
        GuardVerdict::from_changes(changes, self.config.objective, self.config.min_loss)
    }

    fn compare(&self, history: &mut History, view: &View<'_>) -> Judgement {
        let compared = self.config.trial_windows as usize;
        let Some(windows_after) = history.windows_to_compare(compared) else {
            return if history.is_on_trial() { Judgement::Open } else { Judgement::NotMeasured };
        };
        if !self.is_guarded && self.monitored.is_none() {
            history.accept(windows_after, None);
            return Judgement::Open;
        }
        let windows_before = history.reference.windows.iter();
        let is_short = windows_after.len() < MAX_COMPARED * compared;
        if is_short
            && lacks_like_windows(&live_processes(&view.observation.tasks), windows_before.clone(), &windows_after)
        {
            return Judgement::Open;
        }
        let of_reference = process_changes(view, windows_before, &windows_after, compared);
        let of_baseline = total_changes(&of_reference, &history.totals);
        let (local, total) = (self.verdict_on(&of_reference), self.verdict_on(&of_baseline));
        let measured = self.monitored.and_then(|change| measured_log_ratio(change, &of_reference));
        // A confirmation that noise would decide goes on.
        let is_confirmation =
            self.monitored.is_some_and(|change| matches!(change.method, VerificationMethod::Confirmation));
        let is_sure = measured.is_none_or(|measured| measured.log_ratio.abs() >= 2.0 * measured.error);
        if is_confirmation && is_short && !is_sure && !(self.is_guarded && local.worse) {
            return Judgement::Open;
        }
        let is_slower = measured.zip(self.monitored).is_some_and(|(measured, change)| match change.method {
            VerificationMethod::Confirmation => measured.log_ratio <= 0.0,
            _ => measured.log_ratio < -2.0 * measured.error && measured.log_ratio < -0.5 * change.min_gain,
        });
        let mends_goal = self.monitored.is_some_and(|change| is_goal_mended(change, &of_reference));
        let is_worse = !mends_goal && (is_slower || self.is_guarded && local.worse);
        let in_total = !is_worse && !mends_goal && self.is_guarded && total.worse && history.baseline.is_some();
        let back_to = if in_total { history.baseline.as_ref() } else { Some(&history.reference) };
        if (is_worse || in_total) && back_to.is_some_and(|state| can_revert(state, view)) {
            let judgement = if in_total { total } else { local };
            return Judgement::Worse(Regression {
                measured,
                in_total,
                ..Regression::from_changes(judgement, &of_reference)
            });
        }
        // What others pay for a goal is no loss that adds up with later ones.
        let has_lost = !mends_goal && (total.mean_log_ratio < 0.0 || total.any_process_lost);
        history.accept(windows_after, has_lost.then(|| totals_of(&of_baseline)));
        Judgement::Kept(measured)
    }

    /// Checks whether the plan of a trial breaks goals; otherwise the trial has its own verdict.
    fn check_goals(&self, history: &History, view: &View<'_>) -> Judgement {
        let compared = self.config.trial_windows as usize;
        let Some(windows_after) = history.windows_to_compare(compared).filter(|_| self.is_guarded) else {
            return Judgement::Open;
        };
        let changes = process_changes(view, history.reference.windows.iter(), &windows_after, compared);
        let judgement = self.verdict_on(&changes);
        if judgement.floors_broken > 0 && can_revert(&history.reference, view) {
            return Judgement::Worse(Regression::from_changes(judgement, &changes));
        }
        Judgement::Open
    }

    /// Checks a plan that a trial found faster only for harm to single processes, by the trial's own windows, in which
    /// both plans alternated.
    fn check_harm(&self, history: &mut History, view: &View<'_>) -> Judgement {
        let (other_windows, own_windows) = history.trial_windows();
        let changes = process_changes(view, other_windows.iter(), &own_windows, other_windows.len());
        let judgement = self.verdict_on(&changes);
        if self.is_guarded && judgement.is_harmful && can_revert(&history.reference, view) {
            return Judgement::Worse(Regression::from_changes(judgement, &changes));
        }
        history.adopt(own_windows);
        Judgement::Kept(None)
    }
}

/// Is a trial of the change unnecessary or impossible? It is unnecessary if the windows of the plan in force vary so
/// little that a comparison before and after finds a loss of half of the smallest gain. It is impossible if the phases
/// of a program are averaged, because the legs of a block then cover different phases.
pub fn needs_no_trial(history: &History, change: &ProposedChange, view: &View<'_>, compared: usize) -> bool {
    let windows = &history.reference.windows;
    if history.is_on_trial() || windows.len() < 2 * compared {
        return false;
    }
    let latest: Vec<_> = windows.iter().skip(windows.len() - compared).cloned().collect();
    let has_averaged_phases = latest.iter().flat_map(|window| window.values()).any(ProcessSpeed::has_averaged_phases);
    let changes = process_changes(view, windows.iter(), &latest, compared);
    has_averaged_phases
        || change.speeds.iter().all(|(process, _)| changes.iter().any(|change| change.process == *process))
            && measured_log_ratio(change, &changes).is_some_and(|noise| 2.0 * noise.error <= 0.5 * change.min_gain)
}

/// Returns the objective of a proposed change, computed from the changes of its processes.
fn measured_log_ratio(change: &ProposedChange, changes: &[ProcessChange]) -> Option<MeasuredLogRatio> {
    let change_of = |process: ProcessId| changes.iter().find(|change| change.process == process);
    let shifted_log_ratio = |shifted_process: Option<ProcessId>| {
        let ratio_of = |process: ProcessId| {
            let process_change = change_of(process)?;
            let moved_error = if shifted_process == Some(process) { process_change.standard_error } else { 0.0 };
            Some(libm::exp(process_change.log_ratio + moved_error))
        };
        log_ratio(change, ratio_of)
    };
    let middle = shifted_log_ratio(None)?;
    // Shift of the objective by each process's error.
    let shifts = change.speeds.iter().filter_map(|&(process, _)| Some(shifted_log_ratio(Some(process))? - middle));
    let error = libm::sqrt(shifts.map(|shift| shift * shift).sum());
    Some(MeasuredLogRatio { log_ratio: middle, error })
}

/// Did the change surely speed up a process whose goal is its reason, without breaking another goal?
fn is_goal_mended(change: &ProposedChange, changes: &[ProcessChange]) -> bool {
    let is_mended = |process_change: &ProcessChange| {
        change.goal_processes.contains(&process_change.process)
            && process_change.log_ratio > 0.0
            && process_change.is_sure(changes.len())
    };
    let is_intact = |process_change: &ProcessChange| process_change.floor.newly_broken() <= 0;
    changes.iter().any(is_mended) && changes.iter().all(is_intact)
}

/// Would a roll-back change anything for the remaining tasks?
fn can_revert(state: &PlanRecord, view: &View<'_>) -> bool {
    let mut plan = view.previous_plan.clone();
    set_placement(&mut plan, &state.plan, &state.tasks, view);
    !same_placement(&plan, view.previous_plan, &LiveTasks::from_samples(&view.observation.tasks))
}

fn totals_of(changes: &[ProcessChange]) -> BTreeMap<ProcessId, CumulativeSpeedup> {
    let cumulative_speedup = |change: &ProcessChange| CumulativeSpeedup {
        log_ratio: change.log_ratio,
        variance: change.standard_error * change.standard_error,
    };
    changes.iter().map(|change| (change.process, cumulative_speedup(change))).collect()
}
