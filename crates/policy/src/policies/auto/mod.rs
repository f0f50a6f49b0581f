//! The integrated runtime: the operator states the objective, and this policy chooses the mechanisms.
//!
//! Problem: sharing clusters, placement, gangs and partitions each help some mixes and hurt others, and they conflict
//! (thesis 7.3). Method: one model of every task ([`program_model`]), one forecast for whole plans ([`composition`],
//! [`score`]), and one search over all mechanisms together ([`search`]); the best plan of every single mechanism and
//! the default are always among the candidates. A plan whose gain is at least 95 % probability is applied and
//! monitored; a plan that is more probability than not to gain goes to a trial in blocks against the plan in force
//! ([`trial`]); any other plan is dropped. A failed plan is on cooldown, longer each time.
//!
//! Properties: without evidence the plan in force stays, from the start on idle; after the initial profiling, probes
//! cost no more than a share of processor time ([`probe_planner`]); the same observations give the same decisions.

mod arrival_search;
mod bus;
mod composition;
mod decided_plan;
mod explain;
mod layout;
mod memory_nodes;
mod phases;
mod probe_planner;
mod problem;
mod problem_cache;
mod program_model;
mod replan;
mod score;
mod score_cache;
mod search;
mod site_search;
mod speeds;
mod trial;
mod unmet_goals;

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Ability, Decision, Plan, Policy, Reason, TaskId, View, WindowLength};
use serde::Deserialize;

use self::decided_plan::DecidedPlan;
use self::explain::ReportedForecasts;
use self::phases::ArrivalRate;
use self::probe_planner::ProbePlanner;
use self::problem::{CpuSites, record_split_processes, sites};
use self::problem_cache::{ProblemCache, TaskStamp};
pub use self::score::PlanObjective;
use self::search::AllowedMechanisms;
use self::speeds::SpeedTracker;
use self::trial::{MeasuredLogRatio, SpeedMonitor, Trial, Weight};
use super::ParameterError;
use super::static_partition::MigrationMode;
use crate::phase_curves::PhaseCurveCache;
use crate::sequential_test::SequentialVerdict;

/// A mechanism that can be disabled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    Placement,
    Sharing,
    Space,
    Gangs,
    /// Placement by the node of a task's memory.
    MemoryNodes,
}

/// See the page.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    pub objective: PlanObjective,
    /// Mechanisms that the search may not use.
    pub disable: Vec<Mechanism>,
    /// Smallest forecast gain of a change, as a share.
    pub min_gain: f64,
    /// Share of processor time that probes may cost after the initial profiling.
    pub probe_share: f64,
    /// Watched locations of each task, on machines that cannot trace misses.
    pub locations: u32,
    /// Entries of the first log of a task's misses.
    pub trace_entries: u32,
    pub probe_budget_ns: u64,
    pub samples_per_thread: u32,
    pub warmup_windows: u32,
    pub leg_windows: u32,
    /// Largest number of site scores that one decision may compute.
    pub max_evaluations: u32,
    /// Time within which a change must earn back the copying of pages.
    pub payback_ns: u64,
    pub page_migration: MigrationMode,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 1_000_000_000,
            objective: PlanObjective::default(),
            disable: Vec::new(),
            min_gain: 0.01,
            probe_share: 0.01,
            locations: 2_000,
            trace_entries: 81_920,
            probe_budget_ns: 1_000_000_000,
            samples_per_thread: 16_000,
            warmup_windows: 1,
            leg_windows: 3,
            max_evaluations: 2_000,
            payback_ns: 60_000_000_000,
            page_migration: MigrationMode::All,
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parsed: Parameters = super::parameters(text)?;
        let positive = [
            ("window_ns", parsed.window_ns),
            ("locations", parsed.locations.into()),
            ("trace_entries", parsed.trace_entries.into()),
            ("probe_budget_ns", parsed.probe_budget_ns),
            ("leg_windows", parsed.leg_windows.into()),
            ("max_evaluations", parsed.max_evaluations.into()),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(ParameterError::value(name, 0, "1 or more"));
        }
        for (name, value) in [("min_gain", parsed.min_gain), ("probe_share", parsed.probe_share)] {
            if !(value > 0.0 && value <= 1.0) {
                return Err(ParameterError::value(name, value, "more than 0, at most 1"));
            }
        }
        Ok(parsed)
    }

    fn allowed_mechanisms(&self, view: &View<'_>) -> AllowedMechanisms {
        let on = |mechanism: Mechanism| !self.disable.contains(&mechanism);
        let can = |ability: Ability| view.capabilities.can(ability);
        AllowedMechanisms {
            placement: on(Mechanism::Placement) && can(Ability::Affinity),
            sharing: on(Mechanism::Sharing) && can(Ability::Affinity),
            space: on(Mechanism::Space) && (can(Ability::Ways) || can(Ability::Colors)),
            gangs: on(Mechanism::Gangs) && can(Ability::Gangs),
            memory_nodes: on(Mechanism::MemoryNodes) && can(Ability::Affinity),
        }
    }
}

/// A change that is on trial, monitored, or being rolled back. `old` pins all tasks to their sites: tasks stay where a
/// plan has put them, so a trial against a plan without sites would compare the new sites with themselves.
enum ProvisionalChange {
    RollingBack { windows: u32, kept: DecidedPlan },
    OnTrial { kept: DecidedPlan, old: DecidedPlan, new: DecidedPlan, trial: Box<Trial>, forecast: f64 },
    UnderWatch { kept: DecidedPlan, old: DecidedPlan, before: SpeedMonitor, weights: Vec<Weight>, forecast: f64 },
}

/// Plans that measured no better, with the window until which each is on cooldown; a cooldown doubles with each
/// failure.
#[derive(Default)]
struct FailedPlans {
    plans: Vec<(Plan, u64, u32)>,
    wait_until: u64,
    in_a_row: u32,
}

/// Windows of the first cooldown of a failed plan.
const COOLDOWN_WINDOWS: u64 = 60;
/// Number of failed plans that are stored.
const MAX_FAILED_PLANS: usize = 64;
/// Windows between two searches for the same tasks.
const LOOK_AGAIN_AFTER: u64 = 30;
/// Windows for which speeds must be known.
const KNOWN_WINDOWS: u64 = 3;
/// Windows that new tasks and new phases may take to become known before a decision is made without them.
const PATIENCE_WINDOWS: u64 = 40;
/// A gain this probability is applied without a trial; one that is less probability than chance is dropped.
const MOST_LIKELY: f64 = 0.95;
const LIKELY: f64 = 0.5;
/// Error of the forecast itself in a gain, one standard deviation, before any verdict.
const FORECAST_ERROR: f64 = 0.02;

struct Auto {
    parameters: Parameters,
    seed: u64,
    speeds: SpeedTracker,
    probe_planner: ProbePlanner,
    recall: PhaseCurveCache,
    /// Site on which the machine's own scheduler ran each task.
    default_site: BTreeMap<TaskId, usize>,
    /// Tasks that ran on another cache than a thread of their process while their waits for other caches were counted.
    split_processes: BTreeSet<TaskId>,
    provisional: Option<ProvisionalChange>,
    watch: SpeedMonitor,
    failures: FailedPlans,
    /// Tasks, their phases and clusters at the last search, and its window.
    searched_at: Option<(TaskStamp, u64)>,
    /// Knowledge of the last search.
    last: Option<ProblemCache>,
    reported: ReportedForecasts,
    /// Window since which the set of tasks has not changed.
    since: (Vec<TaskId>, u64),
    changes: ArrivalRate,
    /// A phase has changed since the last search.
    phase_changed: bool,
    /// The plan in force was not decided: partitions and turns were released at the last change of phase.
    released: bool,
    /// Tasks whose phase has changed or whose curve was dropped, and since when; searches wait for them.
    phase_changed_at: BTreeMap<TaskId, u64>,
    /// The last decision.
    decided: Option<DecidedPlan>,
    /// Forecast and measured gains so far.
    verdicts: Vec<(f64, f64)>,
    trials: u64,
}

impl Policy for Auto {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        match self.recall.observe(view) {
            Some(profiles) => self.decide_with_profiles(&View { profiles: &profiles, ..*view }),
            None => self.decide_with_profiles(view),
        }
    }
}

impl Auto {
    fn decide_with_profiles(&mut self, view: &View<'_>) -> Decision {
        let window = WindowLength::Time { ns: self.parameters.window_ns.max(view.capabilities.min_window_ns) };
        let mut why = Vec::new();
        let holding = DecidedPlan::from_previous(view.previous_plan, view);
        let counted = view.live_tasks().any(|task| !task.counts.0.is_empty());
        let holding = if counted { self.continue_window(view, holding, &mut why) } else { holding };
        let mut plan = holding.0.clone();
        plan.window = window;
        plan.penalties.clear();
        if counted {
            let terms = probe_planner::ProbeLimits {
                share: self.parameters.probe_share,
                min_gain: self.parameters.min_gain,
                locations: self.parameters.locations,
                trace_entries: self.parameters.trace_entries,
                budget_ns: self.parameters.probe_budget_ns,
                samples_per_thread: self.parameters.samples_per_thread,
            };
            let shares = self.parameters.allowed_mechanisms(view).sharing;
            // No probe runs during a trial.
            if self.provisional.is_none() {
                plan.probes = self.probe_planner.next(view, &sites(view), &self.speeds, &terms, shares);
            }
        }
        self.decided = Some(DecidedPlan(plan.clone()));
        Decision { plan, reasons: why }
    }

    /// A window in which events were counted.
    fn continue_window(&mut self, view: &View<'_>, kept: DecidedPlan, why: &mut Vec<Reason>) -> DecidedPlan {
        let Some(level) = view.topology.last_level() else { return kept };
        self.speeds.observe(view.observation, view.previous_plan, level, |task| phases::current_phase(view, task));
        self.record_homes(view);
        record_split_processes(view, &mut self.split_processes);
        let here: Vec<TaskId> = view.live_tasks().map(|task| task.task).collect();
        if self.since.0 != here {
            match self.changes.first_window {
                None => self.changes.first_window = Some(view.observation.window),
                Some(_) => self.changes.record_change(),
            }
            self.since = (here, view.observation.window);
            self.watch = SpeedMonitor::default();
            if let Some(doubt) = self.provisional.take() {
                return self.cancel_trial(doubt, view, kept);
            }
        }
        // The guard rolled the decision back; a policy does not insist.
        let overruled = self.decided.as_ref().is_some_and(|decided| {
            let expected = DecidedPlan::from_previous(&decided.0, view);
            !expected.is_same(&kept.0)
        });
        if overruled {
            self.provisional = None;
            // Releasing a task's partition is no plan that can fail: a rollback of it only keeps the partition.
            if let Some(decided) = self.decided.take().filter(|_| !self.released) {
                self.record_failure(&decided.0, view.observation.window);
            }
            self.released = false;
            self.watch = SpeedMonitor::default();
            return kept;
        }
        if view.observation.applied.pending.is_empty() && probe_planner::probes_leave_speeds_unchanged(view) {
            self.watch.add(view.observation);
        }
        if self.phase_turned(view) {
            // A trial compares plans for earlier phases as well: it would go on for as long as phases change.
            self.changes.record_change();
            self.watch = SpeedMonitor::default();
            let decided = match self.provisional.take() {
                Some(doubt) => self.cancel_trial(doubt, view, kept),
                None => kept,
            };
            return self.release_changed(view, decided);
        }
        match self.provisional.take() {
            Some(doubt) => self.advance_trial(doubt, view, kept, why),
            None if self.is_due(view) => self.search(view, kept, why),
            None => kept,
        }
    }

    /// Records the sites of tasks that no plan pins.
    fn record_homes(&mut self, view: &View<'_>) {
        let seats = CpuSites::of(&sites(view));
        let present: BTreeSet<TaskId> = view.live_tasks().map(|seen| seen.task).collect();
        self.default_site.retain(|task, _| present.contains(task));
        for seen in view.live_tasks().filter(|seen| !view.previous_plan.affinity.contains_key(&seen.task)) {
            if let Some(site) = seats.of_task(seen) {
                self.default_site.insert(seen.task, site);
            }
        }
    }

    /// Tasks or phases changed in the middle of a trial: returns to the plan before it, for the tasks that are left.
    fn cancel_trial(&mut self, doubt: ProvisionalChange, view: &View<'_>, kept: DecidedPlan) -> DecidedPlan {
        match doubt {
            ProvisionalChange::OnTrial { old, .. } => DecidedPlan::from_previous(&old.0, view),
            ProvisionalChange::RollingBack { kept: before, .. } => DecidedPlan::from_previous(&before.0, view),
            ProvisionalChange::UnderWatch { .. } => kept,
        }
    }

    fn is_due(&mut self, view: &View<'_>) -> bool {
        let window = view.observation.window;
        let steady = window.saturating_sub(self.since.1);
        let stamp: TaskStamp = view
            .live_tasks()
            .map(|seen| {
                let profile = view.profiles.get(&seen.task);
                let known = profile.is_some_and(|profile| profile.misses_per_kilo_instr().is_some());
                (seen.task, profile.map_or(0, |profile| profile.phase_number), known)
            })
            .collect();
        let ready = steady >= KNOWN_WINDOWS
            && (self.watch.is_enough() || self.phase_changed && phases::are_kinds_known(view))
            && (self.probe_planner.surveyed(view) || steady >= PATIENCE_WINDOWS);
        let news = match &self.searched_at {
            None => true,
            Some((last, when)) => *last != stamp || window >= when + LOOK_AGAIN_AFTER,
        };
        let due = ready && news && window >= self.failures.wait_until;
        if due {
            self.searched_at = Some((stamp, window));
            self.phase_changed = false;
        }
        due
    }

    fn record_failure(&mut self, plan: &Plan, window: u64) {
        let times = match self.failures.plans.iter_mut().find(|(failed, ..)| DecidedPlan(failed.clone()).is_same(plan))
        {
            Some((_, until, times)) => {
                *times += 1;
                *until = window + (COOLDOWN_WINDOWS << (*times).min(6));
                *times
            }
            None => {
                if self.failures.plans.len() == MAX_FAILED_PLANS {
                    self.failures.plans.remove(0);
                }
                self.failures.plans.push((plan.clone(), window + COOLDOWN_WINDOWS, 0));
                0
            }
        };
        self.failures.in_a_row += 1;
        self.failures.wait_until = window + (LOOK_AGAIN_AFTER << self.failures.in_a_row.max(times).min(6)) / 2;
    }

    /// Handles one window of a trial.
    fn advance_trial(
        &mut self,
        doubt: ProvisionalChange,
        view: &View<'_>,
        kept: DecidedPlan,
        why: &mut Vec<Reason>,
    ) -> DecidedPlan {
        let least = self.parameters.min_gain;
        match doubt {
            ProvisionalChange::RollingBack { windows, kept: before } => {
                self.watch = SpeedMonitor::default();
                if windows == 0 {
                    return before;
                }
                self.provisional = Some(ProvisionalChange::RollingBack { windows: windows - 1, kept: before });
                kept
            }
            ProvisionalChange::OnTrial { kept, old, new, mut trial, forecast } => {
                let phase = |task: &cachemate_core::TaskSample| {
                    view.profiles.get(&task.task).map_or(0, |profile| profile.phase_number)
                };
                let phases: Vec<u32> = view.live_tasks().map(phase).collect();
                let Some(verdict) = trial.add(view.observation, &phases, least) else {
                    let holding = if trial.is_new() { new.clone() } else { old.clone() };
                    self.provisional = Some(ProvisionalChange::OnTrial { kept, old, new, trial, forecast });
                    return holding;
                };
                let estimate = trial.estimate().unwrap_or((0.0, f64::INFINITY));
                self.record_verdict(forecast, MeasuredLogRatio { log_ratio: estimate.0, error: estimate.1 });
                why.push(explain::verdict(
                    view,
                    verdict == SequentialVerdict::Faster,
                    estimate,
                    forecast,
                    trial.windows,
                ));
                self.watch = SpeedMonitor::default();
                if verdict == SequentialVerdict::Faster {
                    self.failures.in_a_row = 0;
                    return new;
                }
                self.record_failure(&new.0, view.observation.window);
                self.provisional =
                    Some(ProvisionalChange::RollingBack { windows: self.parameters.warmup_windows, kept });
                old
            }
            ProvisionalChange::UnderWatch { kept: before_it, old, before, weights, forecast } => {
                let Some(measured) = self.watch.relative_to(&before, &weights, self.parameters.objective) else {
                    // A process that does not run on both sides for this long is not waited for.
                    let waits = !self.watch.is_full();
                    self.provisional = waits.then_some(ProvisionalChange::UnderWatch {
                        kept: before_it,
                        old,
                        before,
                        weights,
                        forecast,
                    });
                    return kept;
                };
                let worse = measured.log_ratio < -2.0 * measured.error && measured.log_ratio < -0.5 * least;
                self.record_verdict(forecast, measured);
                why.push(explain::verdict(view, !worse, (measured.log_ratio, measured.error), forecast, 0));
                if worse {
                    self.record_failure(&kept.0, view.observation.window);
                    self.provisional = Some(ProvisionalChange::RollingBack {
                        windows: self.parameters.warmup_windows,
                        kept: before_it,
                    });
                    return old;
                }
                self.failures.in_a_row = 0;
                kept
            }
        }
    }

    fn record_verdict(&mut self, forecast: f64, measured: MeasuredLogRatio) {
        if self.verdicts.len() == 16 {
            self.verdicts.remove(0);
        }
        self.verdicts.push((forecast, libm::expm1(measured.log_ratio)));
    }
}

impl Auto {
    fn new(parameters: Parameters, seed: u64) -> Self {
        Auto {
            parameters,
            seed,
            speeds: SpeedTracker::default(),
            probe_planner: ProbePlanner::default(),
            recall: PhaseCurveCache::averaging_fast_phases(),
            default_site: BTreeMap::new(),
            split_processes: BTreeSet::new(),
            provisional: None,
            watch: SpeedMonitor::default(),
            failures: FailedPlans::default(),
            searched_at: None,
            last: None,
            reported: ReportedForecasts::default(),
            since: (Vec::new(), 0),
            changes: ArrivalRate::default(),
            phase_changed: false,
            released: false,
            phase_changed_at: BTreeMap::new(),
            decided: None,
            verdicts: Vec::new(),
            trials: 0,
        }
    }
}

/// See the registry.
pub(super) fn build(parameters: &str, seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(Auto::new(Parameters::parse(parameters)?, seed)))
}
