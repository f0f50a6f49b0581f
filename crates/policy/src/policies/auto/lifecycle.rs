//! Lifecycle of a decision: when `auto` waits, searches, and leaves a change to the verifier.
//!
//! A window has up to three [`LifecycleEvent`]s: a verdict, the state of the evidence, and the result of a search.
//! [`TRANSITIONS`] has at most one row for an event in a state; the row gives the next state, and the reason as text.
//! The diagram on the policy's page is printed from the same table.

use cachemate_core::{Forecast, VerificationOutcome};

/// The state of the lifecycle in a window.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum LifecycleState {
    /// Collects profiles and speeds, without searching.
    #[default]
    Profiling,
    /// Keeps the plan in force, and searches for a better one from time to time.
    Holding,
    /// The verifier measures a proposed plan.
    Proposed,
    /// Tries no plan for some time after a failure.
    Cooldown,
}

use LifecycleState::{Cooldown, Holding, Profiling, Proposed};

/// An event of a window.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LifecycleEvent {
    /// The verifier has reached a verdict.
    Verdict(VerificationOutcome),
    /// The verifier has not reached a verdict.
    Undecided,
    /// A task is in another phase than it was at the last search.
    PhaseChanged,
    /// Tasks, their speeds or their profiles are not known well enough for a search.
    EvidenceIncomplete,
    /// A search has to wait, because a plan has failed.
    Paused,
    /// Everything needed for a search is known.
    EvidenceComplete,
    /// A search found no plan that is more likely than not to gain.
    NoBetterPlan,
    /// A search found a plan whose gain is more likely than not, or worth a measurement.
    LikelyGain,
    /// A search found a plan whose gain is at least 95 % likely, a plan that meets a missed goal, or a likely plan
    /// while there is no time for a confirmation.
    SureGain,
    /// One unit may be of more use in another partition.
    PossibleStep,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Transition {
    pub from_states: &'static [LifecycleState],
    pub event: LifecycleEvent,
    pub to_state: LifecycleState,
    /// The reason as text, as in the diagram of the page.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "a test compares the page with it")
    )]
    pub reason: &'static str,
}

const fn transition_row(
    from_states: &'static [LifecycleState],
    event: LifecycleEvent,
    to_state: LifecycleState,
    reason: &'static str,
) -> Transition {
    Transition {
        from_states,
        event,
        to_state,
        reason,
    }
}

const fn verdict_row(
    outcome: VerificationOutcome,
    to_state: LifecycleState,
    reason: &'static str,
) -> Transition {
    transition_row(
        &[Proposed],
        LifecycleEvent::Verdict(outcome),
        to_state,
        reason,
    )
}

/// The states in which no change is being measured.
const IDLE_STATES: &[LifecycleState] = &[Profiling, Holding, Cooldown];
const ALL_STATES: &[LifecycleState] = &[Profiling, Holding, Proposed, Cooldown];

/// All transitions: old state, event, new state, reason.
#[rustfmt::skip]
pub const TRANSITIONS: &[Transition] = &[
    transition_row(IDLE_STATES, LifecycleEvent::EvidenceIncomplete, Profiling, "tasks, speeds or profiles are unknown"),
    transition_row(IDLE_STATES, LifecycleEvent::EvidenceComplete, Holding, "all is known"),
    transition_row(IDLE_STATES, LifecycleEvent::Paused, Cooldown, "a pause after failures"),
    transition_row(IDLE_STATES, LifecycleEvent::PhaseChanged, Profiling, "a phase has changed"),
    transition_row(&[Holding], LifecycleEvent::NoBetterPlan, Holding, "no plan is likely to gain"),
    transition_row(&[Holding], LifecycleEvent::LikelyGain, Proposed, "gain likely or worth a measurement - confirmation"),
    transition_row(&[Holding], LifecycleEvent::SureGain, Proposed, "gain at least 95 % likely - monitoring"),
    transition_row(&[Holding], LifecycleEvent::PossibleStep, Proposed, "a step may gain - confirmation"),
    transition_row(&[Proposed], LifecycleEvent::Undecided, Proposed, "no verdict yet"),
    verdict_row(VerificationOutcome::NotSlower, Holding, "not slower - new plan"),
    verdict_row(VerificationOutcome::NotMeasured, Holding, "no speeds to compare - new plan"),
    verdict_row(VerificationOutcome::Interrupted, Profiling, "tasks or phases changed"),
    transition_row(ALL_STATES, LifecycleEvent::Verdict(VerificationOutcome::Slower), Cooldown, "slower - old plan"),
    transition_row(ALL_STATES, LifecycleEvent::Verdict(VerificationOutcome::Refused), Profiling, "refused - old plan"),
];

/// Returns the row of an event in a state; `None` if the event cannot occur there.
pub fn find_transition(
    state: LifecycleState,
    event: LifecycleEvent,
) -> Option<&'static Transition> {
    TRANSITIONS
        .iter()
        .find(|row| row.event == event && row.from_states.contains(&state))
}

/// The present state of the lifecycle, and the forecast of the plan for the next window.
#[derive(Default)]
pub struct Lifecycle {
    pub state: LifecycleState,
    /// `None` if the last search was for other tasks or phases.
    pub forecast: Option<Forecast>,
    pub measured_windows: MeasuredWindows,
}

impl Lifecycle {
    /// Returns whether no change is being measured.
    pub fn is_idle(&self) -> bool {
        IDLE_STATES.contains(&self.state)
    }

    /// Advances by the table. An event that cannot occur in the state changes nothing.
    pub fn advance(&mut self, event: LifecycleEvent) {
        if let Some(row) = find_transition(self.state, event) {
            self.state = row.to_state;
        }
    }
}

/// Number of undisturbed windows under the plan in force, with the same tasks and phases.
#[derive(Clone, Copy, Default)]
pub struct MeasuredWindows {
    windows: u32,
    settling_windows: u32,
}

/// Smallest number of windows that determines speeds under the plan in force.
const MIN_MEASURED_WINDOWS: u32 = 4;

impl MeasuredWindows {
    /// Starts again, because the plan, the tasks or a phase changes now. The first `settling_windows` windows do not
    /// count.
    pub fn restart(&mut self, settling_windows: u32) {
        *self = MeasuredWindows {
            windows: 0,
            settling_windows,
        };
    }

    /// Adds an undisturbed window.
    pub fn add(&mut self) {
        if self.settling_windows > 0 {
            self.settling_windows -= 1;
        } else {
            self.windows = self.windows.saturating_add(1);
        }
    }

    /// Returns whether there are enough windows.
    pub fn is_enough(self) -> bool {
        self.windows >= MIN_MEASURED_WINDOWS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LifecycleEvent as Event;

    const EVENTS_OF_IDLE: &[Event] = &[
        Event::EvidenceIncomplete,
        Event::EvidenceComplete,
        Event::Paused,
        Event::PhaseChanged,
    ];
    const EVENTS_OF_SEARCH: &[Event] = &[
        Event::NoBetterPlan,
        Event::LikelyGain,
        Event::SureGain,
        Event::PossibleStep,
    ];
    const EVENTS_OF_PROPOSED: &[Event] = &[
        Event::Undecided,
        Event::Verdict(VerificationOutcome::NotSlower),
        Event::Verdict(VerificationOutcome::NotMeasured),
        Event::Verdict(VerificationOutcome::Interrupted),
    ];
    /// Verdicts on decisions that `auto` did not propose.
    const EVENTS_OF_ANY: &[Event] = &[
        Event::Verdict(VerificationOutcome::Slower),
        Event::Verdict(VerificationOutcome::Refused),
    ];

    /// Does every event that can occur in a state have exactly one row, and is there no other row?
    #[test]
    fn every_event_has_one_row() {
        for &state in ALL_STATES {
            let state_events: &[&[Event]] = match state {
                Profiling | Cooldown => &[EVENTS_OF_IDLE],
                Holding => &[EVENTS_OF_IDLE, EVENTS_OF_SEARCH],
                Proposed => &[EVENTS_OF_PROPOSED],
            };
            let mut expected = [state_events.concat().as_slice(), EVENTS_OF_ANY].concat();
            expected.sort_unstable();
            let mut rows: Vec<Event> = TRANSITIONS
                .iter()
                .filter(|row| row.from_states.contains(&state))
                .map(|row| row.event)
                .collect();
            rows.sort_unstable();
            assert_eq!(rows, expected, "{state:?}");
        }
    }

    /// Can every state be reached from the first one, and the first one from every state?
    #[test]
    fn every_state_is_reached_and_left() {
        let reach = |start: LifecycleState| {
            let mut reached = vec![start];
            while let Some(row) = TRANSITIONS.iter().find(|row| {
                !reached.contains(&row.to_state)
                    && row.from_states.iter().any(|from| reached.contains(from))
            }) {
                reached.push(row.to_state);
            }
            reached.sort_unstable();
            reached
        };
        let mut all_states = ALL_STATES.to_vec();
        all_states.sort_unstable();
        ALL_STATES
            .iter()
            .for_each(|&state| assert_eq!(reach(state), all_states, "{state:?}"));
    }

    /// Is every row followed, and does an event that cannot occur leave the state unchanged?
    #[test]
    fn every_row_is_followed_and_other_events_are_ignored() {
        for row in TRANSITIONS {
            for &state in row.from_states {
                let mut lifecycle = Lifecycle {
                    state,
                    ..Lifecycle::default()
                };
                lifecycle.advance(row.event);
                assert_eq!(lifecycle.state, row.to_state, "{state:?} {:?}", row.event);
                assert_eq!(lifecycle.is_idle(), row.to_state != Proposed);
            }
        }
        let mut lifecycle = Lifecycle {
            state: Holding,
            ..Lifecycle::default()
        };
        lifecycle.advance(Event::Verdict(VerificationOutcome::NotSlower));
        assert_eq!(lifecycle.state, Holding);
    }

    /// Are speeds known after enough undisturbed windows, not counting those in which the machine settles?
    #[test]
    fn settling_windows_do_not_count() {
        let mut measured = MeasuredWindows::default();
        measured.restart(2);
        let reports: Vec<bool> = (0..7)
            .map(|_| {
                measured.add();
                measured.is_enough()
            })
            .collect();
        assert_eq!(reports, [false, false, false, false, false, true, true]);
    }

    /// Returns the table as a Mermaid diagram, without transitions from a state to itself.
    fn lifecycle_diagram() -> String {
        let mut edges: Vec<(LifecycleState, LifecycleState, Vec<&str>)> = Vec::new();
        for Transition {
            from_states: from,
            to_state: to,
            reason,
            ..
        } in TRANSITIONS
            .iter()
            .filter(|row| row.from_states != ALL_STATES)
        {
            for source in from.iter().filter(|source| *source != to) {
                match edges.iter_mut().find(|(a, b, _)| (a, b) == (source, to)) {
                    Some((.., labels)) => labels.push(reason),
                    None => edges.push((*source, *to, vec![reason])),
                }
            }
        }
        let line = |(source, target, labels): &(LifecycleState, LifecycleState, Vec<&str>)| {
            format!("    {source:?} --> {target:?}: {}\n", labels.join(", "))
        };
        let lines: String = edges.iter().map(line).collect();
        format!(
            "stateDiagram-v2\n    [*] --> {:?}\n{lines}",
            LifecycleState::default()
        )
    }

    /// Does the diagram on the page match the table?
    #[test]
    fn the_pages_diagram_matches_the_table() {
        let page = include_str!("../../../../../docs/policies/auto.md");
        let expected = format!("```mermaid\n{}```\n", lifecycle_diagram());
        assert!(
            page.contains(&expected),
            "docs/policies/auto.md has another diagram than:\n{expected}"
        );
    }
}
