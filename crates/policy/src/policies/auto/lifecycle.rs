//! Lifecycle of a decision: when `auto` waits, searches, tries a plan, watches it, and rolls it back.
//!
//! A window has one [`LifecycleEvent`], or two if a search follows. [`TRANSITIONS`] has exactly one row for an event in
//! a state: the next state, the plan for the next window, and the reason in words. The diagram of the policy's page is
//! printed from the same table.

use cachemate_core::{Forecast, Verification, View};

use super::model::decided_plan::DecidedPlan;
use super::model::score::PlanObjective;
use super::trial::{MeasuredLogRatio, SpeedMonitor, Trial, Weight};
use crate::sequential_test::SequentialVerdict;

/// The stage of a decision in a window.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum LifecycleState {
    /// Collects profiles and speeds; no search.
    #[default]
    Profiling,
    /// Keeps the plan in force, and searches for a better one from time to time.
    Holding,
    /// Alternates between the plan in force and a new one.
    Trial,
    /// A new plan is in force, and its speeds are compared with those before.
    Monitoring,
    /// The plan before a failed one is being restored.
    RollingBack,
    /// Tries no plan for a while after a failure.
    Cooldown,
}

use LifecycleState::{Cooldown, Holding, Monitoring, Profiling, RollingBack, Trial as OnTrial};

/// The event of a window.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LifecycleEvent {
    /// Tasks arrived or exited while a change was on trial, monitored or rolled back.
    TasksChanged,
    /// A task is in another phase than at the last search.
    PhaseChanged,
    /// Another plan is in force than the one decided: the guard rolled it back.
    Overruled,
    /// Tasks, their speeds or their profiles are not known well enough for a search.
    NotKnown,
    /// A search has to wait, because a plan has failed.
    Paused,
    /// All is known for a search.
    Known,
    /// A search found no plan that is more likely than not to gain.
    NoBetterPlan,
    /// A search found a plan whose gain is more likely than not.
    LikelyGain,
    /// A search found a plan whose gain is at least 95 % likely, one that repairs a goal, or a likely one without time
    /// for a trial.
    SureGain,
    /// The same, without windows to compare it with.
    UnmeasurableGain,
    /// The measurement goes on.
    Undecided,
    /// The plan measured faster in a trial.
    Faster,
    /// It did not.
    NotFaster,
    /// The plan measured no slower after it was applied.
    NotSlower,
    /// It measured slower.
    Slower,
    /// No process ran long enough on both sides of the change.
    NotMeasured,
    /// The caches have settled under the plan before.
    Settled,
}

impl LifecycleEvent {
    /// Does it end a measurement without a verdict?
    pub fn interrupts(self) -> bool {
        matches!(self, LifecycleEvent::TasksChanged | LifecycleEvent::PhaseChanged | LifecycleEvent::Overruled)
    }

    /// Do speeds measured until now no longer describe the plan in force?
    fn ends_comparison(self) -> bool {
        use LifecycleEvent::{Faster, NotFaster, Overruled, PhaseChanged, Settled, Slower, TasksChanged};
        matches!(self, TasksChanged | PhaseChanged | Overruled | Faster | NotFaster | Slower | Settled)
    }
}

/// The plan for the next window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextPlan {
    InForce,
    New,
    /// The plan before, with all tasks pinned to their sites.
    Old,
    /// The plan before, as it was.
    Before,
    /// The old or the new plan, by the leg of the trial.
    Leg,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Transition {
    pub from: &'static [LifecycleState],
    pub event: LifecycleEvent,
    pub to: LifecycleState,
    pub plan: NextPlan,
    /// For people, as it stands in the diagram and in reasons.
    pub reason: &'static str,
}

impl Transition {
    /// Does it restore the plan before a failed one?
    pub fn rolls_back(&self) -> bool {
        self.to == RollingBack && !self.from.contains(&RollingBack)
    }
}

const fn row(
    from: &'static [LifecycleState],
    event: LifecycleEvent,
    to: LifecycleState,
    plan: NextPlan,
    reason: &'static str,
) -> Transition {
    Transition { from, event, to, plan, reason }
}

/// States without a change on trial, monitored or rolled back.
const IDLE: &[LifecycleState] = &[Profiling, Holding, Cooldown];
const ANY: &[LifecycleState] = &[Profiling, Holding, OnTrial, Monitoring, RollingBack, Cooldown];

/// All transitions: from, event, to, plan, reason.
#[rustfmt::skip]
pub const TRANSITIONS: &[Transition] = &[
    row(IDLE, LifecycleEvent::NotKnown, Profiling, NextPlan::InForce, "tasks, speeds or profiles are unknown"),
    row(IDLE, LifecycleEvent::Known, Holding, NextPlan::InForce, "all is known"),
    row(IDLE, LifecycleEvent::Paused, Cooldown, NextPlan::InForce, "a pause after failures"),
    row(IDLE, LifecycleEvent::PhaseChanged, Profiling, NextPlan::InForce, "a phase has changed"),
    row(&[Holding], LifecycleEvent::NoBetterPlan, Holding, NextPlan::InForce, "no plan is likely to gain"),
    row(&[Holding], LifecycleEvent::LikelyGain, OnTrial, NextPlan::Leg, "gain more likely than not"),
    row(&[Holding], LifecycleEvent::SureGain, Monitoring, NextPlan::New, "gain at least 95 % likely"),
    row(&[Holding], LifecycleEvent::UnmeasurableGain, Holding, NextPlan::New, "likely gain, no speeds to compare"),
    row(&[OnTrial], LifecycleEvent::Undecided, OnTrial, NextPlan::Leg, "the trial goes on"),
    row(&[OnTrial], LifecycleEvent::Faster, Profiling, NextPlan::New, "faster"),
    row(&[OnTrial], LifecycleEvent::NotFaster, RollingBack, NextPlan::Old, "not faster"),
    row(&[OnTrial], LifecycleEvent::TasksChanged, Profiling, NextPlan::Old, "tasks arrived or exited"),
    row(&[OnTrial], LifecycleEvent::PhaseChanged, Profiling, NextPlan::Old, "a phase has changed"),
    row(&[Monitoring], LifecycleEvent::Undecided, Monitoring, NextPlan::InForce, "monitoring goes on"),
    row(&[Monitoring], LifecycleEvent::NotSlower, Holding, NextPlan::InForce, "not slower"),
    row(&[Monitoring], LifecycleEvent::NotMeasured, Holding, NextPlan::InForce, "no speeds to compare"),
    row(&[Monitoring], LifecycleEvent::Slower, RollingBack, NextPlan::Old, "slower"),
    row(&[Monitoring], LifecycleEvent::TasksChanged, Profiling, NextPlan::InForce, "tasks arrived or exited"),
    row(&[Monitoring], LifecycleEvent::PhaseChanged, Profiling, NextPlan::InForce, "a phase has changed"),
    row(&[RollingBack], LifecycleEvent::Undecided, RollingBack, NextPlan::InForce, "the caches are settling"),
    row(&[RollingBack], LifecycleEvent::Settled, Cooldown, NextPlan::Before, "the caches have settled"),
    row(&[RollingBack], LifecycleEvent::TasksChanged, Profiling, NextPlan::Before, "tasks arrived or exited"),
    row(&[RollingBack], LifecycleEvent::PhaseChanged, Profiling, NextPlan::Before, "a phase has changed"),
    row(ANY, LifecycleEvent::Overruled, Profiling, NextPlan::InForce, "the guard rolled the plan back"),
];

/// The row of an event in a state; `None` = the event cannot occur there.
pub fn transition(from: LifecycleState, event: LifecycleEvent) -> Option<&'static Transition> {
    TRANSITIONS.iter().find(|row| row.event == event && row.from.contains(&from))
}

/// How a change is being measured, or undone.
pub enum ChangeStage {
    Trial(Box<Trial>),
    /// Speeds before the change, and the processes in the objective.
    Monitored {
        before: SpeedMonitor,
        weights: Vec<Weight>,
    },
    /// Windows until the caches have settled.
    RollBack {
        windows: u32,
    },
}

/// A change on trial, monitored, or rolled back.
pub struct ProvisionalChange {
    /// The plan before, as it was.
    pub before: DecidedPlan,
    /// The plan before with all tasks pinned to their sites: tasks stay where a plan has put them, so a trial against a
    /// plan without sites would compare the new sites with themselves.
    pub old: DecidedPlan,
    pub new: DecidedPlan,
    /// Forecast gain of the new plan, as a share.
    pub gain: f64,
    /// Forecasts of the old and the new plan.
    pub forecasts: [Forecast; 2],
    pub stage: ChangeStage,
}

/// Conditions of a measurement.
#[derive(Clone, Copy)]
pub struct MeasurementTerms<'a> {
    pub objective: PlanObjective,
    pub min_gain: f64,
    /// Phase numbers of the live tasks.
    pub phases: &'a [u32],
}

/// A verdict on a change, with the windows of its trial.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ChangeVerdict {
    pub measured: MeasuredLogRatio,
    /// 0 = monitored.
    pub windows: u32,
}

impl ProvisionalChange {
    /// Takes in a window under the present leg, the new plan or the old one.
    pub fn observe(
        &mut self,
        view: &View<'_>,
        monitor: &SpeedMonitor,
        terms: MeasurementTerms<'_>,
    ) -> (LifecycleEvent, Option<ChangeVerdict>) {
        match &mut self.stage {
            ChangeStage::RollBack { windows: 0 } => (LifecycleEvent::Settled, None),
            ChangeStage::RollBack { windows } => {
                *windows -= 1;
                (LifecycleEvent::Undecided, None)
            }
            ChangeStage::Trial(trial) => {
                let Some(verdict) = trial.add(view.observation, terms.phases, terms.min_gain) else {
                    return (LifecycleEvent::Undecided, None);
                };
                let (log_ratio, error) = trial.estimate().unwrap_or((0.0, f64::INFINITY));
                let measured = MeasuredLogRatio { log_ratio, error };
                let is_faster = verdict == SequentialVerdict::Faster;
                let event = if is_faster { LifecycleEvent::Faster } else { LifecycleEvent::NotFaster };
                (event, Some(ChangeVerdict { measured, windows: trial.windows }))
            }
            ChangeStage::Monitored { before, weights } => {
                let Some(measured) = monitor.relative_to(before, weights, terms.objective) else {
                    // A process that does not run on both sides for this long is not waited for.
                    let event = if monitor.is_full() { LifecycleEvent::NotMeasured } else { LifecycleEvent::Undecided };
                    return (event, None);
                };
                let is_slower =
                    measured.log_ratio < -2.0 * measured.error && measured.log_ratio < -0.5 * terms.min_gain;
                let event = if is_slower { LifecycleEvent::Slower } else { LifecycleEvent::NotSlower };
                (event, Some(ChangeVerdict { measured, windows: 0 }))
            }
        }
    }

    /// Is the new plan that of the present leg?
    fn is_new_leg(&self) -> bool {
        matches!(&self.stage, ChangeStage::Trial(trial) if trial.is_new())
    }

    /// One of its plans with its forecast; `None` = the plan in force.
    fn plan(&self, plan: NextPlan) -> Option<(&DecidedPlan, &Forecast)> {
        let [of_old, of_new] = &self.forecasts;
        match plan {
            NextPlan::InForce => None,
            NextPlan::Before => Some((&self.before, of_old)),
            NextPlan::Leg if self.is_new_leg() => Some((&self.new, of_new)),
            NextPlan::Old | NextPlan::Leg => Some((&self.old, of_old)),
            NextPlan::New => Some((&self.new, of_new)),
        }
    }
}

/// The present state, the change that it is about, and the speeds under the plan in force.
#[derive(Default)]
pub struct Lifecycle {
    pub state: LifecycleState,
    pub change: Option<ProvisionalChange>,
    pub monitor: SpeedMonitor,
    /// Forecast of the plan for the next window; `None` = the last search was for other tasks or phases.
    pub forecast: Option<Forecast>,
    /// How that plan is verified.
    pub verification: Verification,
}

impl Lifecycle {
    /// Is no change on trial, monitored or rolled back?
    pub fn is_idle(&self) -> bool {
        IDLE.contains(&self.state)
    }

    /// Follows the table; returns the row and the plan for the next window. `warmup_windows` is how long caches settle
    /// after a roll-back.
    pub fn advance(
        &mut self,
        event: LifecycleEvent,
        in_force: DecidedPlan,
        warmup_windows: u32,
    ) -> (Option<&'static Transition>, DecidedPlan) {
        let row = transition(self.state, event);
        let Some(Transition { to, plan, .. }) = row else { return (None, in_force) };
        let mut next = in_force;
        if let Some((plan, forecast)) = self.change.as_ref().and_then(|change| change.plan(*plan)) {
            next.clone_from(plan);
            self.forecast = Some(forecast.clone());
        }
        if event.interrupts() {
            self.forecast = None;
        }
        if event.ends_comparison() || self.state == RollingBack {
            self.monitor = SpeedMonitor::default();
        }
        if row.is_some_and(Transition::rolls_back) {
            let stage = ChangeStage::RollBack { windows: warmup_windows };
            self.change = self.change.take().map(|change| ProvisionalChange { stage, ..change });
        }
        if IDLE.contains(to) {
            self.change = None;
        }
        self.state = *to;
        self.verification = match (event, to) {
            (LifecycleEvent::Faster, _) => Verification::Measured,
            // The caches settle under one of the trial's plans.
            (_, OnTrial) | (LifecycleEvent::NotFaster, _) => Verification::Trial,
            (LifecycleEvent::Undecided, RollingBack) => self.verification,
            _ => Verification::BeforeAndAfter,
        };
        (row, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LifecycleEvent as Event;
    use cachemate_core::{Plan, TaskId, WindowLength};

    const EVENTS_OF_IDLE: &[Event] = &[Event::NotKnown, Event::Known, Event::Paused, Event::PhaseChanged];
    const EVENTS_OF_SEARCH: &[Event] =
        &[Event::NoBetterPlan, Event::LikelyGain, Event::SureGain, Event::UnmeasurableGain];

    /// Events that can occur in a state, besides being overruled.
    fn possible(state: LifecycleState) -> Vec<Event> {
        let interrupted = [Event::TasksChanged, Event::PhaseChanged, Event::Undecided];
        let ends: &[Event] = match state {
            Profiling | Cooldown => return EVENTS_OF_IDLE.to_vec(),
            Holding => return [EVENTS_OF_IDLE, EVENTS_OF_SEARCH].concat(),
            OnTrial => &[Event::Faster, Event::NotFaster],
            Monitoring => &[Event::NotSlower, Event::NotMeasured, Event::Slower],
            RollingBack => &[Event::Settled],
        };
        [&interrupted, ends].concat()
    }

    /// Does every event that can occur in a state have exactly one row, and does no row stand for any other?
    #[test]
    fn every_event_has_one_row() {
        for &state in ANY {
            let mut expected = possible(state);
            expected.push(Event::Overruled);
            expected.sort_unstable();
            let mut rows: Vec<Event> =
                TRANSITIONS.iter().filter(|row| row.from.contains(&state)).map(|row| row.event).collect();
            rows.sort_unstable();
            assert_eq!(rows, expected, "{state:?}");
        }
    }

    /// Is every state reached from the first one, and is the first one reached from every state?
    #[test]
    fn every_state_is_reached_and_left() {
        let reach = |start: LifecycleState| {
            let mut reached = vec![start];
            while let Some(row) = TRANSITIONS
                .iter()
                .find(|row| !reached.contains(&row.to) && row.from.iter().any(|from| reached.contains(from)))
            {
                reached.push(row.to);
            }
            reached.sort_unstable();
            reached
        };
        let mut all = ANY.to_vec();
        all.sort_unstable();
        ANY.iter().for_each(|&state| assert_eq!(reach(state), all, "{state:?}"));
    }

    fn plan(window_ns: u64) -> DecidedPlan {
        DecidedPlan(Plan::idle(WindowLength::Time { ns: window_ns }))
    }

    fn lifecycle(state: LifecycleState) -> Lifecycle {
        let stage = ChangeStage::RollBack { windows: 0 };
        let [before, old, new] = [plan(1), plan(2), plan(3)];
        let unknown = |id: u32| Forecast { unknown: vec![TaskId(id)], ..Forecast::default() };
        let forecasts = [unknown(2), unknown(3)];
        let change = ProvisionalChange { before, old, new, gain: 0.1, forecasts, stage };
        let change = (!IDLE.contains(&state)).then_some(change);
        Lifecycle { state, change, ..Lifecycle::default() }
    }

    /// Does every row lead to its plan, a failed change to a roll-back of its own length, and only idle states to none?
    #[test]
    fn rows_are_followed() {
        for row in TRANSITIONS {
            for &from in row.from {
                let mut lifecycle = lifecycle(from);
                if EVENTS_OF_SEARCH.contains(&row.event) {
                    lifecycle.change = self::lifecycle(OnTrial).change;
                }
                let (followed, next) = lifecycle.advance(row.event, plan(9), 4);
                assert_eq!(followed.map(|row| row.reason), Some(row.reason));
                let expected = match row.plan {
                    NextPlan::InForce => 9,
                    NextPlan::Before => 1,
                    NextPlan::Old | NextPlan::Leg => 2,
                    NextPlan::New => 3,
                };
                assert_eq!((next, lifecycle.state), (plan(expected), row.to), "{from:?} {:?}", row.event);
                let forecast = lifecycle.forecast.map(|forecast| u64::from(forecast.unknown[0].0));
                let expected = [2, 3].contains(&expected.max(2)).then_some(expected.max(2));
                assert_eq!(forecast, expected.filter(|_| !row.event.interrupts()), "{from:?} {:?}", row.event);
                assert_eq!(lifecycle.change.is_none(), IDLE.contains(&row.to), "{from:?} {:?}", row.event);
                if row.rolls_back() {
                    let windows = match lifecycle.change.map(|change| change.stage) {
                        Some(ChangeStage::RollBack { windows }) => windows,
                        _ => panic!("{:?} begins no roll-back", row.event),
                    };
                    assert_eq!(windows, 4);
                }
            }
        }
        assert!(lifecycle(Holding).advance(Event::Faster, plan(9), 1).0.is_none(), "it cannot occur");
    }

    /// The table as a Mermaid diagram, without transitions of a state to itself and those that every state has.
    fn diagram() -> String {
        let mut edges: Vec<(LifecycleState, LifecycleState, Vec<String>)> = Vec::new();
        let rows = TRANSITIONS.iter().filter(|row| row.from != ANY);
        for Transition { from, to, plan, reason, .. } in rows {
            for from in from.iter().filter(|from| *from != to) {
                let label = match plan {
                    NextPlan::InForce | NextPlan::Leg => (*reason).to_string(),
                    NextPlan::New => format!("{reason} - new plan"),
                    NextPlan::Old | NextPlan::Before => format!("{reason} - old plan"),
                };
                match edges.iter_mut().find(|(a, b, _)| (a, b) == (from, to)) {
                    Some((.., labels)) => labels.push(label),
                    None => edges.push((*from, *to, vec![label])),
                }
            }
        }
        let line = |(from, to, labels): &(LifecycleState, LifecycleState, Vec<String>)| {
            format!("    {from:?} --> {to:?}: {}\n", labels.join(", "))
        };
        let lines: String = edges.iter().map(line).collect();
        format!("stateDiagram-v2\n    [*] --> {:?}\n{lines}", LifecycleState::default())
    }

    /// Does the guard leave a trial and its roll-back alone, take a faster plan as measured, and compare all others?
    #[test]
    fn only_trials_are_verified_by_themselves() {
        let verified = |from: LifecycleState, events: &[Event]| {
            let mut lifecycle = lifecycle(from);
            lifecycle.change = self::lifecycle(OnTrial).change;
            events.iter().for_each(|&event| drop(lifecycle.advance(event, plan(9), 1)));
            lifecycle.verification
        };
        assert_eq!(verified(Holding, &[Event::LikelyGain, Event::Undecided]), Verification::Trial);
        assert_eq!(verified(OnTrial, &[Event::Undecided, Event::Faster]), Verification::Measured);
        assert_eq!(verified(OnTrial, &[Event::Faster, Event::NotKnown]), Verification::BeforeAndAfter);
        assert_eq!(verified(OnTrial, &[Event::NotFaster, Event::Undecided]), Verification::Trial);
        assert_eq!(verified(OnTrial, &[Event::NotFaster, Event::Settled]), Verification::BeforeAndAfter);
        for (from, event) in [(Holding, Event::SureGain), (Monitoring, Event::Slower)] {
            assert_eq!(verified(from, &[event]), Verification::BeforeAndAfter);
        }
    }

    /// Is the diagram of the page that of the table?
    #[test]
    fn the_page_shows_the_table() {
        let page = include_str!("../../../../../docs/policies/auto.md");
        let expected = format!("```mermaid\n{}```\n", diagram());
        assert!(page.contains(&expected), "docs/policies/auto.md has another diagram than:\n{expected}");
    }
}
