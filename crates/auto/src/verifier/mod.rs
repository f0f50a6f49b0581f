//! The verifier: the judge of changes of plans by measured speeds, except of limits of bandwidth (`auto::bandwidth`).
//!
//! Problem: forecasts err, evidence becomes outdated, and programs misreport; but a decision that made programs slower
//! must not persist. Method: the speed of every process is recorded in each window: reported work, otherwise
//! instructions, otherwise an event that is a proxy for work ([`cachemate_papers::work_metric`]). A policy chooses how
//! a plan is verified:
//!
//! - A plan that it *proposes for monitoring* is applied. The windows before the change are the reference. The windows
//!   after it, once the machine has settled, are compared with the reference process by process ([`comparison`]), by
//!   the policy's terms.
//! - A plan that it *proposes for confirmation* is monitored too, but rolled back unless it is measured faster, or
//!   nothing can be compared because speeds are not measured or tasks or phases changed meanwhile.
//! - A plan that it *only decides* is applied. If the guard is on, the plan is compared in the same way by the guard's
//!   terms ([`verdict`]), which protect programs from every policy and apply to proposed changes too.
//!
//! Each window has three steps, which pass on values: [`Verifier::judge_window`] observes and reaches verdicts before
//! the policy decides, the policy decides and its decision stays as it is, and [`Verifier::rule`] answers it with a
//! [`Hold`] if another placement is to stay in force. What goes out is the decided plan or the held one.
//!
//! [`judge`] decides whether the state is worse; [`history`] chooses the windows to compare if changes follow each
//! other closely or tasks arrive and exit. A worse plan is rolled back: the reference plan is in force again for the
//! live tasks, and tasks that it does not pin return to their earlier caches ([`home_restore`]). The failed plan is on
//! cooldown, longer each time, and so are its mirror images on like caches ([`cooldown`]). Policies get every verdict,
//! and the plans on cooldown, from [`View::verdicts`].
//!
//! Properties: pure. Windows in which probes stop or slow programs do not
//! count, unless such probes go on. Without speeds nothing is judged, and
//! so nothing is rolled back, and a plan that is only proposed is not measured. Each of the guard's two tests rolls one
//! in a hundred changes without effect back by chance; a confirmation without effect ends by its sign. Windows of
//! different phases are compared only if phases are too short to be told apart. Arrivals and exits neither end nor hide the guard's comparison of the remaining
//! tasks, but they interrupt a proposed change; a newcomer is compared once it has a reference of its own. If configured to wait, the guard allows no change before
//! there is a reference, unless no speed can be measured. Probes and the window length are the policy's and are passed
//! on unchanged.

mod comparison;
mod cooldown;
mod explain;
mod history;
mod home_restore;
mod judge;
mod like_windows;
pub(crate) mod live_tasks;
pub(crate) mod noise;
pub(crate) mod speeds;
pub(crate) mod symmetry;
#[cfg(test)]
mod tests;
mod verdict;

use cachemate_core::{
    ChangeVerdict, Decision, GuardConfig, MeasuredLogRatio, Plan, Policy, ProposedChange, Reason,
    TaskId, Verdicts, Verification, VerificationOutcome, View,
};

use cooldown::PlanCooldown;
use history::{History, PlanRecord};
use home_restore::HomeRestorer;
use judge::{Judge, Judgement, Regression};
use live_tasks::{LiveTasks, is_only_released, is_only_resized, is_same_placement, with_placement};

/// A policy, and the verifier of its decisions.
pub struct Verifier<P> {
    policy: P,
    /// Configuration of the guard; `None` if programs are not protected from the policy.
    guard: Option<GuardConfig>,
    history: Option<History>,
    /// The proposed change that has no verdict yet.
    open_change: Option<MeasuredChange>,
    verdicts: PlanVerdicts,
    /// The temporary pins in the previous plan.
    homes: Option<HomeRestorer>,
}

/// What the window that has ended says about the plan in force.
#[derive(Default)]
struct WindowJudgement {
    reasons: Vec<Reason>,
    /// Whether the speeds were worse, so that the reference is in force again.
    is_rolled_back: bool,
    /// The way home of the tasks that the failed plan moved.
    homes: Option<HomeRestorer>,
}

/// The answer to a decision whose placement is not applied.
struct Hold {
    /// The plan for the next window.
    plan: Plan,
    /// Why, instead of the policy's reasons; `None` after a roll-back, which has its own.
    reason: Option<Reason>,
    /// Whether the policy learns of it as of a refusal.
    is_refusal: bool,
}

/// A proposed change that is being measured.
struct MeasuredChange {
    change: Box<ProposedChange>,
    new_plan: Plan,
    phases: TaskPhases,
}

/// Cooldown of a plan that broke a goal, in multiples of that of other plans. With the default configuration, a retry
/// takes 6 windows after 1,200, so goals are met in more than 99 % of the time.
const GOAL_COOLDOWN_FACTOR: u64 = 20;

/// The live tasks and their phases.
type TaskPhases = Vec<(TaskId, u32)>;

impl MeasuredChange {
    fn kept_verdict(
        &self,
        outcome: VerificationOutcome,
        measured: Option<MeasuredLogRatio>,
    ) -> ChangeVerdict {
        ChangeVerdict {
            outcome,
            plan: self.new_plan.clone(),
            forecast_gain: Some(self.change.forecast_gain),
            measured,
        }
    }

    /// Describes the change of tasks or phases since the proposal.
    fn interruption_cause(&self, view: &View<'_>) -> Option<&'static str> {
        let current_phases = task_phases(view);
        if current_phases == self.phases {
            return None;
        }
        let tasks_of =
            |phases: &TaskPhases| phases.iter().map(|(task, _)| *task).collect::<Vec<_>>();
        Some(if tasks_of(&current_phases) == tasks_of(&self.phases) {
            "a phase has changed"
        } else {
            "tasks arrived or exited"
        })
    }
}

fn task_phases(view: &View<'_>) -> TaskPhases {
    let phase_of = |task: TaskId| {
        view.profiles
            .get(&task)
            .map_or(0, |profile| profile.phase_number)
    };
    view.live_tasks()
        .map(|task| (task.task, phase_of(task.task)))
        .collect()
}

/// The verdicts and cooldowns that policies can query.
#[derive(Default)]
struct PlanVerdicts {
    latest: Option<ChangeVerdict>,
    cooldown: PlanCooldown,
}

impl Verdicts for PlanVerdicts {
    fn latest(&self) -> Option<&ChangeVerdict> {
        self.latest.as_ref()
    }

    fn has_failed_plans(&self) -> bool {
        !self.cooldown.is_empty()
    }

    fn excludes(&self, plan: &Plan, replacement: &Plan, view: &View<'_>) -> bool {
        let live_tasks = LiveTasks::from_samples(&view.observation.tasks);
        self.cooldown
            .exclusion_end(
                plan,
                replacement,
                &live_tasks,
                view.topology,
                view.observation.window,
            )
            .is_some()
    }

    fn is_paused(&self, window: u64) -> bool {
        self.cooldown.is_paused(window)
    }
}

impl<P: Policy> Verifier<P> {
    /// Builds a verifier without memory. Without the guard (`None`), only proposed changes are judged.
    pub fn new(policy: P, guard: impl Into<Option<GuardConfig>>) -> Self {
        let guard = guard.into().map(|config| GuardConfig {
            trial_windows: config.trial_windows.max(2),
            ..config
        });
        Verifier {
            policy,
            guard,
            history: None,
            open_change: None,
            verdicts: PlanVerdicts::default(),
            homes: None,
        }
    }
}

impl<P: Policy> Policy for Verifier<P> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        // Temporary pins are not part of a policy's plan.
        let homes = self.homes.take();
        let plan_without_pins = homes
            .as_ref()
            .map(|homes| homes.plan_without_homes(view.previous_plan));
        let mut view = View {
            previous_plan: plan_without_pins.as_ref().unwrap_or(view.previous_plan),
            ..*view
        };
        let window = view.observation.window;

        let judged = self.judge_window(&view);
        let verdicts = std::mem::take(&mut self.verdicts);
        view.verdicts = &verdicts;
        let decision = self.policy.decide(&view);

        let hold = self.rule(&decision, &judged, &verdicts.cooldown, &view);
        self.open_change = match (&hold, &decision.verification) {
            (None, Verification::Proposed(change)) => Some(MeasuredChange {
                change: change.clone(),
                new_plan: decision.plan.clone(),
                phases: task_phases(&view),
            }),
            (None, Verification::Pending) => self.open_change.take(),
            _ => None,
        };
        let refusal = hold.as_ref().filter(|hold| hold.is_refusal);
        let latest = refusal.map(|hold| refusal_verdict(&hold.plan));

        let (plan, own_reasons, forecast) = match hold {
            None => (decision.plan, decision.reasons, decision.forecast),
            Some(Hold { plan, reason, .. }) => {
                let reasons = reason.map_or(decision.reasons, |reason| vec![reason]);
                (plan, reasons, None)
            }
        };
        let mut reasons = judged.reasons;
        reasons.extend(own_reasons);

        let homes = judged.homes.or(homes);
        self.homes = homes.filter(|homes| homes.is_active(window));
        let (plan, forecast) = match &self.homes {
            Some(homes) => (homes.plan_with_homes(plan, &view), None),
            None => (plan, forecast),
        };
        if self.homes.is_none() && plan_without_pins.is_some() {
            reasons.push(explain::explain_unpinning(&view));
        }

        self.verdicts = PlanVerdicts { latest, ..verdicts };
        Decision {
            forecast,
            ..Decision::new(plan, reasons)
        }
    }
}

impl<P> Verifier<P> {
    fn config(&self) -> GuardConfig {
        self.guard.unwrap_or_default()
    }

    /// Observes a window, and reaches verdicts.
    fn judge_window(&mut self, view: &View<'_>) -> WindowJudgement {
        self.verdicts.cooldown.forget(view.observation.window);
        if view.observation.applied.is_only_proposed {
            self.history = None;
            return self.accept_monitored_change(None, view);
        }

        let config = self.config();
        let history = self.history.get_or_insert_with(|| History::new(view));
        let is_measured = history.observe(view, config.trial_windows as usize);
        // The policy may restore the plan before, so an interrupted change is no reference for later ones yet.
        if is_measured && let Some(interruption) = self.end_interrupted_change(view) {
            return interruption;
        }

        let monitored_change = self.open_change.as_ref().map(|open| open.change.as_ref());
        let judge = Judge {
            config,
            is_guarded: self.guard.is_some(),
            monitored_change,
        };
        let Some(history) = &mut self.history else {
            return WindowJudgement::default();
        };

        match judge.judge(history, view) {
            Judgement::Undecided => WindowJudgement::default(),
            Judgement::NotMeasured => self.accept_monitored_change(None, view),
            Judgement::Kept(measured) => {
                self.verdicts.cooldown.record_success();
                self.accept_monitored_change(measured, view)
            }
            Judgement::Worse(regression) => self.roll_back(&regression, view),
        }
    }

    /// Ends the open change if tasks or phases have changed; `None` if they have not.
    fn end_interrupted_change(&mut self, view: &View<'_>) -> Option<WindowJudgement> {
        let change = self.open_change.as_ref()?;
        let cause = change.interruption_cause(view)?;
        self.verdicts.latest = Some(change.kept_verdict(VerificationOutcome::Interrupted, None));
        self.open_change = None;
        Some(WindowJudgement {
            reasons: vec![explain::explain_interruption(cause, view)],
            ..WindowJudgement::default()
        })
    }

    /// Keeps the state in force, and with it the monitored change.
    fn accept_monitored_change(
        &mut self,
        measured: Option<MeasuredLogRatio>,
        view: &View<'_>,
    ) -> WindowJudgement {
        let Some(open_change) = self.open_change.take() else {
            return WindowJudgement::default();
        };

        let outcome = if measured.is_some() {
            VerificationOutcome::NotSlower
        } else {
            VerificationOutcome::NotMeasured
        };
        let verdict = open_change.kept_verdict(outcome, measured);
        let reason = explain::explain_verdict(&verdict, open_change.change.method, view);
        self.verdicts.latest = Some(verdict);
        WindowJudgement {
            reasons: reason.into_iter().collect(),
            ..WindowJudgement::default()
        }
    }

    /// Puts a plan on cooldown for this many times the configured windows, and pauses the policy. Returns the number of
    /// windows of the cooldown.
    fn record_failure(
        &mut self,
        plan: &Plan,
        live_tasks: &LiveTasks,
        cooldown_factor: u64,
        view: &View<'_>,
    ) -> u64 {
        let (window, windows) = (
            view.observation.window,
            self.config().cooldown_windows.into(),
        );
        let cooldown = &mut self.verdicts.cooldown;
        let cooldown_windows = cooldown.record_failure(
            plan,
            live_tasks,
            view.topology,
            window,
            cooldown_factor * windows,
        );
        let reference = self.history.as_ref().map(|history| &history.reference.plan);
        let is_minor_change = |reference: &Plan| {
            is_only_released(reference, plan, live_tasks)
                || is_only_resized(reference, plan, live_tasks)
        };
        if !reference.is_some_and(is_minor_change) {
            self.verdicts.cooldown.pause(window, windows);
        }
        cooldown_windows
    }

    /// Rolls back to the reference: puts the failed plan on cooldown, and records the verdict.
    fn roll_back(&mut self, regression: &Regression, view: &View<'_>) -> WindowJudgement {
        let deciding_tasks = self
            .history
            .as_ref()
            .map(|history| history.deciding_tasks().clone())
            .unwrap_or_default();
        let cooldown_factor = if regression.is_goal_broken {
            GOAL_COOLDOWN_FACTOR
        } else {
            1
        };
        let cooldown_windows =
            self.record_failure(view.previous_plan, &deciding_tasks, cooldown_factor, view);
        let change = self.open_change.take().map(|open| open.change);
        let Some(history) = &mut self.history else {
            return WindowJudgement::default();
        };

        history.revert(regression.is_from_baseline);
        let PlanRecord {
            plan: reference,
            tasks: reference_tasks,
            last_cpus,
            ..
        } = &history.reference;
        let plan = with_placement(view.previous_plan, reference, reference_tasks, view);
        let homes = HomeRestorer::for_failed_plan(view.previous_plan, &plan, last_cpus, view);
        let mut reason = explain::describe_rollback(regression, cooldown_windows, view);
        if homes.is_some() {
            reason.text += "; tasks return to their earlier caches";
        }

        let verdict = ChangeVerdict {
            outcome: VerificationOutcome::Slower,
            plan,
            forecast_gain: change.as_ref().map(|change| change.forecast_gain),
            measured: regression.measured,
        };
        let measured_change =
            change.and_then(|change| explain::explain_verdict(&verdict, change.method, view));
        self.verdicts.latest = Some(verdict);
        WindowJudgement {
            reasons: [reason].into_iter().chain(measured_change).collect(),
            is_rolled_back: true,
            homes,
        }
    }

    /// Answers a decision: the reference stays after a roll-back, and the plan in force or the reference where the
    /// guard does not allow the decided plan now; `None` if that is applied.
    fn rule(
        &self,
        decision: &Decision,
        judged: &WindowJudgement,
        cooldown: &PlanCooldown,
        view: &View<'_>,
    ) -> Option<Hold> {
        let history = self.history.as_ref()?;
        let PlanRecord {
            plan: reference,
            tasks: reference_tasks,
            ..
        } = &history.reference;
        let hold = |placement: &Plan, tasks: &LiveTasks, reason: Option<Reason>| Hold {
            plan: with_placement(&decision.plan, placement, tasks, view),
            is_refusal: true,
            reason,
        };

        if judged.is_rolled_back {
            return Some(Hold {
                is_refusal: matches!(decision.verification, Verification::Proposed(_)),
                ..hold(reference, reference_tasks, None)
            });
        }
        let config = self.guard?;
        // A change that is being measured was already allowed when it was proposed.
        if decision.verification == Verification::Pending {
            return None;
        }

        let live_tasks = LiveTasks::from_samples(&view.observation.tasks);
        if config.waits_for_reference
            && let Some(windows) = history.missing_windows(config.trial_windows as usize)
            && !is_same_placement(&decision.plan, view.previous_plan, &live_tasks)
        {
            let reason = explain::explain_missing_reference(windows);
            return Some(hold(view.previous_plan, &live_tasks, Some(reason)));
        }
        let refusal = cooldown.refusal_of(
            &decision.plan,
            reference,
            &history.known_tasks(),
            view.topology,
            view.observation.window,
        )?;
        let reason = explain::explain_cooldown(&refusal);
        Some(hold(reference, reference_tasks, Some(reason)))
    }
}

/// Reports in the next window that this plan is in force instead of the decided one.
fn refusal_verdict(plan: &Plan) -> ChangeVerdict {
    ChangeVerdict {
        outcome: VerificationOutcome::Refused,
        plan: plan.clone(),
        forecast_gain: None,
        measured: None,
    }
}
