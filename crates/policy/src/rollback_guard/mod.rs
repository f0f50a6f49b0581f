//! A policy under guard: a decision after which programs run slower is rolled back.
//!
//! Problem: forecasts err, evidence becomes outdated, and programs misreport; an operator wants no decision to persist
//! that made programs slower. Method: the speed of every process is recorded in each window: reported work, else
//! instructions, else an event that is a proxy for work ([`crate::work_metric`]). If the plan changes, the windows
//! before are the reference, and the windows after, once the machine has settled, are compared with it process by
//! process ([`comparison`]). [`verdict`] decides whether the state is worse; [`history`] chooses what to compare if
//! changes follow each other closely or tasks arrive and exit. A worse plan is rolled back: the reference plan is in
//! force again for the live tasks, and tasks that it does not pin return to their earlier caches ([`home_restore`]).
//! The failed plan is on cooldown, longer each time, and so are its mirror images on like caches ([`cooldown`]).
//!
//! A policy may verify a plan by a trial of its own ([`Verification::Trial`]). The guard then leaves the verdict to the
//! trial, because windows of both plans alternate, and ends it only if goals are broken. A plan that a trial found
//! faster is rolled back only if it harms a process more than the others gain, by the trial's windows; otherwise it is
//! the next reference.
//!
//! Properties: pure; without speeds nothing is judged, and so nothing is rolled back; of changes without effect, about
//! one in a hundred is rolled back by chance; arrivals and exits neither end nor hide a comparison of the remaining
//! tasks; a newcomer is compared once it has a reference of its own; if configured to wait, the guard allows no change
//! before there is a reference, unless no speed can be measured; probes and the window are the inner policy's and pass
//! through.

mod comparison;
mod cooldown;
mod history;
mod home_restore;
pub(crate) mod live_tasks;
pub(crate) mod noise;
mod speeds;
pub(crate) mod symmetry;
#[cfg(test)]
mod tests;
mod verdict;

use std::collections::BTreeMap;

use cachemate_core::{Decision, GuardConfig, Policy, ProcessId, Reason, ReasonKind, TaskId, Verification, View};

use verdict::GuardVerdict;

use crate::work_metric::WorkMetric;
use comparison::{CumulativeSpeedup, changes, in_total};
use cooldown::{CooldownReason, PlanCooldown};
use history::{History, PlanRecord};
use home_restore::HomeRestorer;
use live_tasks::{LiveTasks, put_placement, same_placement};
use verdict::ProcessChange;

/// Begins the reason of every roll-back.
const ROLLED_BACK: &str = "rolled back:";

/// A policy and its guard.
pub struct RollbackGuard<P> {
    inner: P,
    config: Option<GuardConfig>,
    history: Option<History>,
    cooldown: PlanCooldown,
    home_restorer: Option<HomeRestorer>,
    /// How the plan in force is verified.
    verification: Verification,
}

/// A change that made programs slower.
struct Regression {
    judgement: GuardVerdict,
    /// Compared with the state before the first small loss, rather than with the last settled one.
    in_total: bool,
}

impl<P: Policy> RollbackGuard<P> {
    /// `None` = the policy's decisions pass through.
    pub fn new(inner: P, config: impl Into<Option<GuardConfig>>) -> Self {
        let config = config.into().map(|config| GuardConfig { trial_windows: config.trial_windows.max(2), ..config });
        RollbackGuard {
            inner,
            config,
            history: None,
            cooldown: PlanCooldown::default(),
            home_restorer: None,
            verification: Verification::default(),
        }
    }

    /// Replaces the policy from the next window on; earlier failures do not apply to it.
    pub fn replace(&mut self, inner: P, config: Option<GuardConfig>) {
        *self = RollbackGuard::new(inner, config);
    }
}

impl<P: Policy> Policy for RollbackGuard<P> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let decision = self.inner.decide(view);
        let Some(config) = self.config else { return decision };
        let Some(home_restorer) = self.home_restorer.take() else {
            let decision = self.guard_decision(decision, config, view);
            self.verification = decision.verification;
            return decision;
        };
        // Temporary pins are no plan to be judged.
        let in_force = home_restorer.without(view.previous_plan);
        let mut decision = self.guard_decision(decision, config, &View { previous_plan: &in_force, ..*view });
        self.verification = decision.verification;
        if self.home_restorer.is_none() && home_restorer.is_active(view.observation.window) {
            home_restorer.pin_tasks(&mut decision.plan, view);
            decision.forecast = None;
            self.home_restorer = Some(home_restorer);
        }
        decision
    }
}

impl<P> RollbackGuard<P> {
    /// The decision, unless it or an earlier one is to be rolled back.
    fn guard_decision(&mut self, mut decision: Decision, config: GuardConfig, view: &View<'_>) -> Decision {
        let history = self.history.get_or_insert_with(|| History::new(view));
        history.observe(view, config.trial_windows as usize, self.verification);
        let window = view.observation.window;
        if let Some(worse) = judge(history, &mut self.cooldown, config, view, self.verification) {
            let (known, windows) = (history.decided_for(), config.cooldown_windows.into());
            let out = self.cooldown.record_failure(view.previous_plan, known, view.topology, window, windows);
            decision.reasons.insert(0, rollback_reason(&worse, out, view));
            history.revert(worse.in_total);
            let PlanRecord { plan, tasks: knew, homes, .. } = &history.reference;
            put_placement(&mut decision.plan, plan, knew, view);
            (decision.forecast, decision.verification) = (None, Verification::default());
            self.home_restorer = HomeRestorer::after(view.previous_plan, &decision.plan, homes, view);
            if let Some(home_restorer) = &self.home_restorer {
                decision.reasons[0].text += "; tasks return to their earlier caches";
                home_restorer.pin_tasks(&mut decision.plan, view);
            }
            return decision;
        }
        let missing = if config.waits_for_reference { history.missing(config.trial_windows as usize) } else { None };
        let present = LiveTasks::of(&view.observation.tasks);
        if let Some(missing) = missing.filter(|_| !same_placement(&decision.plan, view.previous_plan, &present)) {
            decision.reasons = vec![Reason {
                kind: ReasonKind::CoolingDown,
                tasks: Vec::new(),
                text: format!("no change yet: {missing} more measured windows are needed for a comparison"),
                numbers: Vec::new(),
            }];
            put_placement(&mut decision.plan, view.previous_plan, &present, view);
            (decision.forecast, decision.verification) = (None, Verification::default());
            return decision;
        }
        let PlanRecord { plan: reference, tasks: knew, .. } = &history.reference;
        let refusal = self.cooldown.refuses(&decision.plan, reference, &history.known(), view.topology, window);
        if let Some(refusal) = refusal {
            decision.reasons = vec![Reason {
                kind: ReasonKind::CoolingDown,
                tasks: Vec::new(),
                text: refusal.describe(),
                numbers: Vec::new(),
            }];
            put_placement(&mut decision.plan, reference, knew, view);
            (decision.forecast, decision.verification) = (None, Verification::default());
        }
        decision
    }
}

/// Judges a changed state, and accepts it if it is no worse.
fn judge(
    history: &mut History,
    cooldown: &mut PlanCooldown,
    config: GuardConfig,
    view: &View<'_>,
    verification: Verification,
) -> Option<Regression> {
    if verification == Verification::Measured {
        return judge_trial(history, cooldown, config, view);
    }
    let after = history.windows_to_compare(config.trial_windows as usize)?;
    let of_reference = changes(view, history.reference.windows.iter(), &after, config.trial_windows as usize);
    let of_baseline = in_total(&of_reference, &history.totals);
    let judged = |changes: &[ProcessChange]| GuardVerdict::of(changes, config.objective, config.min_loss);
    let (local, total) = (judged(&of_reference), judged(&of_baseline));
    if verification == Verification::Trial {
        let breaks_goals = local.floors_broken > 0 && can_revert(&history.reference, view);
        return breaks_goals.then_some(Regression { judgement: local, in_total: false });
    }
    let in_total = !local.worse && total.worse && history.baseline.is_some();
    let back_to = if in_total { history.baseline.as_ref() } else { Some(&history.reference) };
    if (local.worse || in_total) && back_to.is_some_and(|state| can_revert(state, view)) {
        return Some(Regression { judgement: if in_total { total } else { local }, in_total });
    }
    let lost = total.mean_log_ratio < 0.0 || total.any_process_lost;
    history.accept(after, lost.then(|| totals_of(&of_baseline)));
    cooldown.record_success();
    None
}

/// Judges a plan that a policy's trial found faster: only for harm to single processes, by the trial's own windows, in
/// which both plans alternated.
fn judge_trial(
    history: &mut History,
    cooldown: &mut PlanCooldown,
    config: GuardConfig,
    view: &View<'_>,
) -> Option<Regression> {
    let (others, own) = history.trial_windows();
    let changes = changes(view, others.iter(), &own, others.len());
    let judgement = GuardVerdict::of(&changes, config.objective, config.min_loss);
    if judgement.is_harmful && can_revert(&history.reference, view) {
        return Some(Regression { judgement, in_total: false });
    }
    history.adopt(own);
    cooldown.record_success();
    None
}

/// Would a roll-back change anything for the remaining tasks?
fn can_revert(state: &PlanRecord, view: &View<'_>) -> bool {
    let mut plan = view.previous_plan.clone();
    put_placement(&mut plan, &state.plan, &state.tasks, view);
    !same_placement(&plan, view.previous_plan, &LiveTasks::of(&view.observation.tasks))
}

fn totals_of(changes: &[ProcessChange]) -> BTreeMap<ProcessId, CumulativeSpeedup> {
    let total = |change: &ProcessChange| CumulativeSpeedup {
        log_ratio: change.log_ratio,
        variance: change.standard_error * change.standard_error,
    };
    changes.iter().map(|change| (change.process, total(change))).collect()
}

fn percent(log_ratio: f64) -> f64 {
    100.0 * libm::expm1(log_ratio)
}

fn rollback_reason(worse: &Regression, cooldown_windows: u64, view: &View<'_>) -> Reason {
    let GuardVerdict { mean_log_ratio, standard_error, harmed, floors_broken, .. } = &worse.judgement;
    let since = if worse.in_total { "over the last decisions together" } else { "since the last decision" };
    let mut tasks: Vec<TaskId> = Vec::new();
    let mut numbers = vec![
        ("change_percent".to_string(), percent(*mean_log_ratio)),
        ("standard_error_percent".to_string(), 100.0 * standard_error),
    ];
    let mut text =
        format!("{ROLLED_BACK} the programs run {:+.1} % {since}{}", percent(*mean_log_ratio), proxy_note(worse));
    let first_task = |process| view.observation.tasks.iter().find(|task| task.process == process && !task.exited);
    if let Some((log_ratio, task)) = harmed.and_then(|(process, log_ratio)| Some((log_ratio, first_task(process)?))) {
        tasks.push(task.task);
        text += &format!(", {{0}} {:+.1} %", percent(log_ratio));
        numbers.push(("most_harmed_percent".to_string(), percent(log_ratio)));
    }
    if *floors_broken > 0 {
        text += &format!(", and {floors_broken} more miss their goal");
        numbers.push(("goals_missed".to_string(), *floors_broken as f64));
    }
    text += &format!("; the plan is on cooldown for {cooldown_windows} windows");
    let moved = view.observation.tasks.iter().map(|task| task.task);
    let others: Vec<TaskId> =
        moved.filter(|task| view.previous_plan.affinity.contains_key(task) && !tasks.contains(task)).collect();
    tasks.extend(others);
    Reason { kind: ReasonKind::RolledBack, tasks, text, numbers }
}

/// Names of the proxy events, as text.
fn proxy_note(worse: &Regression) -> String {
    let (count, events) = &worse.judgement.proxies;
    let mut names: Vec<&str> = events.iter().map(|event| WorkMetric::Proxy(*event).describe()).collect();
    names.sort_unstable();
    match count {
        0 => String::new(),
        count => format!(" ({count} of them judged by {}, because they report no work)", names.join(" and ")),
    }
}

impl CooldownReason {
    fn describe(self) -> String {
        match self {
            CooldownReason::Failed { until } => {
                format!("{ROLLED_BACK} the plan that made programs slower is on cooldown until window {until}")
            }
            CooldownReason::FailuresInARow { until } => {
                format!(
                    "{ROLLED_BACK} several plans in a row made programs slower; no plan is tried until window {until}"
                )
            }
        }
    }
}
