//! The integrated runtime: says what matters is the operator's part, choosing the mechanism is this policy's.
//!
//! Problem: sharing clusters, placement, gangs, shares of caches each help some mixes and hurt others, and pull against
//! each other (thesis 7.3). Method: one model of every task ([`program`]), one forecast for whole plans ([`compose`],
//! [`score`]), and a search over all mechanisms together ([`search`]); every single mechanism's best plan and the default
//! are always among the candidates. What is most likely better by far is made and watched, what may be better is tried in
//! blocks against what holds ([`verify`]), everything else is left. What failed stays out, longer each time.
//!
//! Properties: without evidence the plan stays as it is, from the start on idle; probes cost no more than a share of
//! processor time after a first survey ([`asks`]); the same observations give the same decisions.

mod asks;
mod brief;
mod bus;
mod compose;
mod cut;
mod explain;
mod holding;
mod last;
mod layout;
mod look;
mod memo;
mod nodes;
mod phases;
mod program;
mod promises;
mod scene;
mod score;
mod search;
mod speeds;
mod verify;

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Ability, Decision, Plan, Policy, Reason, TaskId, View, Window};
use serde::Deserialize;

use self::asks::Asks;
use self::explain::Told;
use self::holding::Holding;
use self::last::{Last, Stamp};
use self::phases::Changes;
use self::scene::{Seats, note_apart, sites};
pub use self::score::Objective;
use self::search::Allowed;
use self::speeds::Speeds;
use self::verify::{Measured, Trial, Watch, Weight};
use super::BadParameters;
use super::static_partition::Moving;
use crate::recall::Recall;
use crate::sequential::Outcome;

/// A mechanism that may be switched off.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    Placement,
    Sharing,
    Space,
    Gangs,
    /// Where memory lies.
    MemoryNodes,
}

/// See the page.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    pub objective: Objective,
    /// Not used.
    pub without: Vec<Mechanism>,
    /// A change must promise to be better by this share.
    pub least_gain: f64,
    /// Share of processor time that probes may cost after the survey.
    pub probe_share: f64,
    /// Watched of each task, or logged where nothing can be watched.
    pub locations: u32,
    pub trace_entries: u32,
    pub probe_budget_ns: u64,
    pub samples_per_thread: u32,
    pub settle_windows: u32,
    pub leg_windows: u32,
    /// Site scores that one decision may make.
    pub effort: u32,
    /// Copied pages must be earned back within this.
    pub horizon_ns: u64,
    pub moving: Moving,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 1_000_000_000,
            objective: Objective::default(),
            without: Vec::new(),
            least_gain: 0.01,
            probe_share: 0.01,
            locations: 2_000,
            trace_entries: 81_920,
            probe_budget_ns: 1_000_000_000,
            samples_per_thread: 16_000,
            settle_windows: 1,
            leg_windows: 3,
            effort: 2_000,
            horizon_ns: 60_000_000_000,
            moving: Moving::All,
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, BadParameters> {
        let parsed: Parameters = super::parameters(text)?;
        let positive = [
            ("window_ns", parsed.window_ns),
            ("locations", parsed.locations.into()),
            ("trace_entries", parsed.trace_entries.into()),
            ("probe_budget_ns", parsed.probe_budget_ns),
            ("leg_windows", parsed.leg_windows.into()),
            ("effort", parsed.effort.into()),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(BadParameters::value(name, 0, "1 or more"));
        }
        for (name, value) in [("least_gain", parsed.least_gain), ("probe_share", parsed.probe_share)] {
            if !(value > 0.0 && value <= 1.0) {
                return Err(BadParameters::value(name, value, "more than 0, at most 1"));
            }
        }
        Ok(parsed)
    }

    fn may(&self, view: &View<'_>) -> Allowed {
        let on = |mechanism: Mechanism| !self.without.contains(&mechanism);
        let can = |ability: Ability| view.capabilities.can(ability);
        Allowed {
            placement: on(Mechanism::Placement) && can(Ability::Affinity),
            sharing: on(Mechanism::Sharing) && can(Ability::Affinity),
            space: on(Mechanism::Space) && (can(Ability::Ways) || can(Ability::Colors)),
            gangs: on(Mechanism::Gangs) && can(Ability::Gangs),
            memory_nodes: on(Mechanism::MemoryNodes) && can(Ability::Affinity),
        }
    }
}

/// A change that is tried, watched, or taken back. `old` tells where everybody was: tasks stay where a plan has put them,
/// so that a plan without homes would compare the new ones with themselves.
enum Doubt {
    TakenBack { windows: u32, kept: Holding },
    Tried { kept: Holding, old: Holding, new: Holding, trial: Box<Trial>, forecast: f64 },
    Watched { kept: Holding, old: Holding, before: Watch, weights: Vec<Weight>, forecast: f64 },
}

/// Plans that measured no better stay out until a window, for twice as long each time.
#[derive(Default)]
struct Failures {
    plans: Vec<(Plan, u64, u32)>,
    wait_until: u64,
    in_a_row: u32,
}

/// Windows that a failed plan stays out, the first time.
const OUT_WINDOWS: u64 = 60;
/// Failed plans that are remembered.
const FAILED_REMEMBERED: usize = 64;
/// Windows between two looks at the same tasks.
const LOOK_AGAIN_AFTER: u64 = 30;
/// Windows that speeds must be known for.
const KNOWN_WINDOWS: u64 = 3;
/// Windows that arrivals, and who turned to another phase, may take to become known before a decision is made without them.
const PATIENCE_WINDOWS: u64 = 40;
/// Made untried where the gain is this likely, left where it is less likely than chance.
const MOST_LIKELY: f64 = 0.95;
const LIKELY: f64 = 0.5;
/// The forecast's own error in a gain, one standard deviation, before any verdict.
const FORECAST_ERROR: f64 = 0.02;

struct Auto {
    parameters: Parameters,
    seed: u64,
    speeds: Speeds,
    asks: Asks,
    recall: Recall,
    /// Where the machine's own scheduler had each task.
    lived_on: BTreeMap<TaskId, usize>,
    /// Tasks that have run on another cache than a thread of their process, while what they wait for there was counted.
    seen_apart: BTreeSet<TaskId>,
    doubt: Option<Doubt>,
    watch: Watch,
    failures: Failures,
    /// Tasks, their phases and clusters at the last look, and when.
    looked_at: Option<(Stamp, u64)>,
    /// What the last look knew.
    last: Option<Last>,
    told: Told,
    /// Window since which the same tasks have been there.
    since: (Vec<TaskId>, u64),
    changes: Changes,
    /// A phase has turned since the last look.
    turned: bool,
    /// What holds was not decided: parts and turns were given up at the last turn of a phase.
    gave_up: bool,
    /// Whose phase has turned, or whose curve was dropped, and when: they are waited for.
    turned_at: BTreeMap<TaskId, u64>,
    /// What was decided last.
    decided: Option<Holding>,
    /// Forecast and measured gains so far.
    verdicts: Vec<(f64, f64)>,
    trials: u64,
}

impl Policy for Auto {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        match self.recall.follow(view) {
            Some(profiles) => self.decided_on(&View { profiles: &profiles, ..*view }),
            None => self.decided_on(view),
        }
    }
}

impl Auto {
    fn decided_on(&mut self, view: &View<'_>) -> Decision {
        let window = Window::Time { ns: self.parameters.window_ns.max(view.capabilities.shortest_window_ns) };
        let mut why = Vec::new();
        let holding = Holding::kept(view.previous_plan, view);
        let counted = view.present().any(|task| !task.counts.0.is_empty());
        let holding = if counted { self.go_on(view, holding, &mut why) } else { holding };
        let mut plan = holding.0.clone();
        plan.window = window;
        plan.penalties.clear();
        if counted {
            let terms = asks::Terms {
                share: self.parameters.probe_share,
                least_gain: self.parameters.least_gain,
                locations: self.parameters.locations,
                trace_entries: self.parameters.trace_entries,
                budget_ns: self.parameters.probe_budget_ns,
                samples_per_thread: self.parameters.samples_per_thread,
            };
            let shares = self.parameters.may(view).sharing;
            // Nobody is probed while a test goes on.
            if self.doubt.is_none() {
                plan.probes = self.asks.next(view, &sites(view), &self.speeds, &terms, shares);
            }
        }
        self.decided = Some(Holding(plan.clone()));
        Decision { plan, why }
    }

    /// A window in which something was counted.
    fn go_on(&mut self, view: &View<'_>, kept: Holding, why: &mut Vec<Reason>) -> Holding {
        let Some(level) = view.topology.last_level() else { return kept };
        self.speeds.follow(view.seen, view.previous_plan, level, |task| phases::now(view, task));
        self.note_homes(view);
        note_apart(view, &mut self.seen_apart);
        let here: Vec<TaskId> = view.present().map(|task| task.task).collect();
        if self.since.0 != here {
            match self.changes.first_window {
                None => self.changes.first_window = Some(view.seen.window),
                Some(_) => self.changes.note(),
            }
            self.since = (here, view.seen.window);
            self.watch = Watch::default();
            if let Some(doubt) = self.doubt.take() {
                return self.called_off(doubt, view, kept);
            }
        }
        // Somebody above took it back: it is not for a policy to insist.
        let overruled = self.decided.as_ref().is_some_and(|decided| {
            let expected = Holding::kept(&decided.0, view);
            !expected.is_same(&kept.0)
        });
        if overruled {
            self.doubt = None;
            // That a task gave up its part is no plan that failed: whoever took that back has kept one.
            if let Some(decided) = self.decided.take().filter(|_| !self.gave_up) {
                self.failed(&decided.0, view.seen.window);
            }
            self.gave_up = false;
            self.watch = Watch::default();
            return kept;
        }
        if view.seen.in_force.pending.is_empty() && asks::disturb_nobody(view) {
            self.watch.add(view.seen);
        }
        if self.phase_turned(view) {
            // A trial, too, was of a plan for other phases: it would go on for as long as they turn.
            self.changes.note();
            self.watch = Watch::default();
            let kept = match self.doubt.take() {
                Some(doubt) => self.called_off(doubt, view, kept),
                None => kept,
            };
            return self.without_turned(view, kept);
        }
        match self.doubt.take() {
            Some(doubt) => self.judge(doubt, view, kept, why),
            None if self.is_due(view) => self.look(view, kept, why),
            None => kept,
        }
    }

    /// Where tasks run that no plan holds anywhere.
    fn note_homes(&mut self, view: &View<'_>) {
        let seats = Seats::of(&sites(view));
        let present: BTreeSet<TaskId> = view.present().map(|seen| seen.task).collect();
        self.lived_on.retain(|task, _| present.contains(task));
        for seen in view.present().filter(|seen| !view.previous_plan.affinity.contains_key(&seen.task)) {
            if let Some(site) = seats.of_task(seen) {
                self.lived_on.insert(seen.task, site);
            }
        }
    }

    /// Tasks came or went, or phases turned, in the middle of a test: back to what held before, for those who are left.
    fn called_off(&mut self, doubt: Doubt, view: &View<'_>, kept: Holding) -> Holding {
        match doubt {
            Doubt::Tried { old, .. } => Holding::kept(&old.0, view),
            Doubt::TakenBack { kept: before, .. } => Holding::kept(&before.0, view),
            Doubt::Watched { .. } => kept,
        }
    }

    fn is_due(&mut self, view: &View<'_>) -> bool {
        let window = view.seen.window;
        let steady = window.saturating_sub(self.since.1);
        let stamp: Stamp = view
            .present()
            .map(|seen| {
                let profile = view.profiles.get(&seen.task);
                let known = profile.is_some_and(|profile| profile.misses_per_kilo_instr().is_some());
                (seen.task, profile.map_or(0, |profile| profile.phase_number), known)
            })
            .collect();
        let ready = steady >= KNOWN_WINDOWS
            && (self.watch.is_enough() || self.turned && phases::are_told(view))
            && (self.asks.surveyed(view) || steady >= PATIENCE_WINDOWS);
        let news = match &self.looked_at {
            None => true,
            Some((last, when)) => *last != stamp || window >= when + LOOK_AGAIN_AFTER,
        };
        let due = ready && news && window >= self.failures.wait_until;
        if due {
            self.looked_at = Some((stamp, window));
            self.turned = false;
        }
        due
    }

    fn failed(&mut self, plan: &Plan, window: u64) {
        let times = match self.failures.plans.iter_mut().find(|(failed, ..)| Holding(failed.clone()).is_same(plan)) {
            Some((_, until, times)) => {
                *times += 1;
                *until = window + (OUT_WINDOWS << (*times).min(6));
                *times
            }
            None => {
                if self.failures.plans.len() == FAILED_REMEMBERED {
                    self.failures.plans.remove(0);
                }
                self.failures.plans.push((plan.clone(), window + OUT_WINDOWS, 0));
                0
            }
        };
        self.failures.in_a_row += 1;
        self.failures.wait_until = window + (LOOK_AGAIN_AFTER << self.failures.in_a_row.max(times).min(6)) / 2;
    }

    /// A window of a test.
    fn judge(&mut self, doubt: Doubt, view: &View<'_>, kept: Holding, why: &mut Vec<Reason>) -> Holding {
        let least = self.parameters.least_gain;
        match doubt {
            Doubt::TakenBack { windows, kept: before } => {
                self.watch = Watch::default();
                if windows == 0 {
                    return before;
                }
                self.doubt = Some(Doubt::TakenBack { windows: windows - 1, kept: before });
                kept
            }
            Doubt::Tried { kept, old, new, mut trial, forecast } => {
                let phase = |task: &cachemate_core::TaskSample| {
                    view.profiles.get(&task.task).map_or(0, |profile| profile.phase_number)
                };
                let phases: Vec<u32> = view.present().map(phase).collect();
                let Some(said) = trial.add(view.seen, &phases, least) else {
                    let holding = if trial.is_new() { new.clone() } else { old.clone() };
                    self.doubt = Some(Doubt::Tried { kept, old, new, trial, forecast });
                    return holding;
                };
                let found = trial.found().unwrap_or((0.0, f64::INFINITY));
                self.note(forecast, Measured { log_ratio: found.0, error: found.1 });
                why.push(explain::verdict(view, said == Outcome::Faster, found, forecast, trial.windows));
                self.watch = Watch::default();
                if said == Outcome::Faster {
                    self.failures.in_a_row = 0;
                    return new;
                }
                self.failed(&new.0, view.seen.window);
                self.doubt = Some(Doubt::TakenBack { windows: self.parameters.settle_windows, kept });
                old
            }
            Doubt::Watched { kept: before_it, old, before, weights, forecast } => {
                let Some(found) = self.watch.over(&before, &weights, self.parameters.objective) else {
                    // Who does not run on both sides for so long is not waited for.
                    let waits = !self.watch.is_full();
                    self.doubt = waits.then_some(Doubt::Watched { kept: before_it, old, before, weights, forecast });
                    return kept;
                };
                let worse = found.log_ratio < -2.0 * found.error && found.log_ratio < -0.5 * least;
                self.note(forecast, found);
                why.push(explain::verdict(view, !worse, (found.log_ratio, found.error), forecast, 0));
                if worse {
                    self.failed(&kept.0, view.seen.window);
                    self.doubt = Some(Doubt::TakenBack { windows: self.parameters.settle_windows, kept: before_it });
                    return old;
                }
                self.failures.in_a_row = 0;
                kept
            }
        }
    }

    fn note(&mut self, forecast: f64, found: Measured) {
        if self.verdicts.len() == 16 {
            self.verdicts.remove(0);
        }
        self.verdicts.push((forecast, libm::expm1(found.log_ratio)));
    }
}

impl Auto {
    fn new(parameters: Parameters, seed: u64) -> Self {
        Auto {
            parameters,
            seed,
            speeds: Speeds::default(),
            asks: Asks::default(),
            recall: Recall::of_wholes_too(),
            lived_on: BTreeMap::new(),
            seen_apart: BTreeSet::new(),
            doubt: None,
            watch: Watch::default(),
            failures: Failures::default(),
            looked_at: None,
            last: None,
            told: Told::default(),
            since: (Vec::new(), 0),
            changes: Changes::default(),
            turned: false,
            gave_up: false,
            turned_at: BTreeMap::new(),
            decided: None,
            verdicts: Vec::new(),
            trials: 0,
        }
    }
}

/// See the registry.
pub(super) fn build(parameters: &str, seed: u64) -> Result<Box<dyn Policy>, BadParameters> {
    Ok(Box::new(Auto::new(Parameters::parse(parameters)?, seed)))
}
