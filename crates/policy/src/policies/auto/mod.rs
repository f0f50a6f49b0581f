//! The integrated runtime: the operator states the objective, and this policy chooses the mechanisms.
//!
//! Problem: sharing clusters, placement, gangs and partitions each help some mixes and hurt others, and they conflict
//! (thesis 7.3). Method: [`evidence`] about the tasks, a [`model`] of every task that forecasts whole plans, and one
//! search over [`candidates`] of all mechanisms together; the best plan of every single mechanism and the default are
//! always among them. A pure [`decision`] applies a plan whose gain is 95 % probable, puts one that is more probable
//! than not to a [`trial`] in blocks, and drops any other. The [`lifecycle`] is a table of states and events: when the
//! policy waits, searches, measures a change, and rolls it back. [`failed_plans`] are on cooldown, longer each time.
//!
//! Properties: without evidence the plan in force stays, from the start on idle; after the initial profiling, probes
//! cost no more than a share of processor time ([`evidence::probe_planner`]); the same observations give the same
//! decisions.

mod candidates;
mod decision;
mod evidence;
mod explain;
mod failed_plans;
mod lifecycle;
mod model;
mod proposal;
mod trial;

use cachemate_core::{Ability, Decision, Forecast, Policy, Reason, View, WindowLength};
use serde::Deserialize;

use self::candidates::{AllowedMechanisms, Mechanism};
use self::decision::{Choice, ForecastRecord};
use self::evidence::probe_planner::{ProbeLimits, probes_leave_speeds_unchanged};
use self::evidence::{KNOWN_WINDOWS, PATIENCE_WINDOWS, TaskEvidence, phases};
use self::explain::ReportedForecasts;
use self::failed_plans::FailedPlans;
use self::lifecycle::{ChangeStage, ChangeVerdict, Lifecycle, LifecycleEvent, MeasurementTerms, ProvisionalChange};
use self::model::decided_plan::DecidedPlan;
use self::model::problem::sites;
use self::model::problem_cache::{SearchHistory, stamp};
pub use self::model::score::PlanObjective;
use self::proposal::{PlanFinder, Proposal, SearchResult};
use self::trial::{LegLengths, SpeedMonitor, Trial};
use super::static_partition::MigrationMode;
use super::{ParameterError, ParameterRange};

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
        ParameterRange::OneOrMore.check([
            ("window_ns", parsed.window_ns as f64),
            ("locations", parsed.locations.into()),
            ("trace_entries", parsed.trace_entries.into()),
            ("probe_budget_ns", parsed.probe_budget_ns as f64),
            ("leg_windows", parsed.leg_windows.into()),
            ("max_evaluations", parsed.max_evaluations.into()),
        ])?;
        ParameterRange::PositiveShare.check([("min_gain", parsed.min_gain), ("probe_share", parsed.probe_share)])?;
        Ok(parsed)
    }

    fn allowed_mechanisms(&self, view: &View<'_>) -> AllowedMechanisms {
        let can = |ability: Ability| view.capabilities.can(ability);
        AllowedMechanisms::filtered(|mechanism| {
            let is_possible = match mechanism {
                Mechanism::Placement | Mechanism::MemoryNodes | Mechanism::Sharing => can(Ability::Affinity),
                Mechanism::Space => can(Ability::Ways) || can(Ability::Colors),
                Mechanism::Gangs => can(Ability::Gangs),
            };
            is_possible && !self.disable.contains(&mechanism)
        })
    }

    fn probe_limits(&self) -> ProbeLimits {
        ProbeLimits {
            share: self.probe_share,
            min_gain: self.min_gain,
            locations: self.locations,
            trace_entries: self.trace_entries,
            budget_ns: self.probe_budget_ns,
            samples_per_thread: self.samples_per_thread,
        }
    }

    fn leg_lengths(&self) -> LegLengths {
        LegLengths { warmup_windows: self.warmup_windows, leg_windows: self.leg_windows }
    }
}

struct Auto {
    parameters: Parameters,
    seed: u64,
    evidence: TaskEvidence,
    lifecycle: Lifecycle,
    searches: SearchHistory,
    failed: FailedPlans,
    record: ForecastRecord,
    reported: ReportedForecasts,
    /// The last decision.
    decided: Option<DecidedPlan>,
    /// The plan in force was not decided: partitions and turns were released at the last change of phase.
    released: bool,
    trials: u64,
}

impl Policy for Auto {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.evidence.curves.observe(view);
        let mut reasons = Vec::new();
        let mut next = DecidedPlan::from_previous(view.previous_plan, view);
        let is_counted = view.live_tasks().any(|task| !task.counts.0.is_empty());
        if is_counted {
            next = self.continue_window(view, next, &mut reasons);
        }
        let mut plan = next.0;
        plan.window = WindowLength::Time { ns: self.parameters.window_ns.max(view.capabilities.min_window_ns) };
        plan.penalties.clear();
        // No probe runs while a change is measured.
        if is_counted && self.lifecycle.is_idle() {
            let (limits, shares) = (self.parameters.probe_limits(), self.parameters.allowed_mechanisms(view));
            let TaskEvidence { probe_planner, speeds, curves, .. } = &mut self.evidence;
            plan.probes =
                probe_planner.next(view, &sites(view), (speeds, curves), &limits, shares.has(Mechanism::Sharing));
        }
        self.decided = Some(DecidedPlan(plan.clone()));
        let forecast = self.lifecycle.forecast.clone().filter(|_| is_counted);
        Decision { plan, reasons, forecast, verification: self.lifecycle.verification }
    }
}

impl Auto {
    fn new(parameters: Parameters, seed: u64) -> Self {
        Auto {
            parameters,
            seed,
            evidence: TaskEvidence::default(),
            lifecycle: Lifecycle::default(),
            searches: SearchHistory::default(),
            failed: FailedPlans::default(),
            record: ForecastRecord::default(),
            reported: ReportedForecasts::default(),
            decided: None,
            released: false,
            trials: 0,
        }
    }

    /// A window in which events were counted: its event, the transition, and a search if one is due.
    fn continue_window(&mut self, view: &View<'_>, in_force: DecidedPlan, why: &mut Vec<Reason>) -> DecidedPlan {
        let Some(level) = view.topology.last_level() else { return in_force };
        let tasks_changed = self.evidence.observe(view, level);
        if tasks_changed {
            self.lifecycle.monitor = SpeedMonitor::default();
            self.lifecycle.forecast = None;
        }
        let (event, verdict) = self.event(view, &in_force, tasks_changed);
        let next = self.advance(event, verdict, view, in_force, why);
        if event != LifecycleEvent::Known {
            return next;
        }
        let (stamp, window) = (stamp(view, &self.evidence.curves), view.observation.window);
        if !self.searches.is_outdated(&stamp, window) {
            return next;
        }
        self.searches.begin(stamp, window);
        let event = self.search(view, &next, why);
        self.advance(event, None, view, next, why)
    }

    /// The event of a window, before any search.
    fn event(
        &mut self,
        view: &View<'_>,
        in_force: &DecidedPlan,
        tasks_changed: bool,
    ) -> (LifecycleEvent, Option<ChangeVerdict>) {
        if tasks_changed && !self.lifecycle.is_idle() {
            return (LifecycleEvent::TasksChanged, None);
        }
        if self.is_overruled(view, in_force) {
            return (LifecycleEvent::Overruled, None);
        }
        if view.observation.applied.pending.is_empty() && probes_leave_speeds_unchanged(view) {
            self.lifecycle.monitor.add(view.observation);
        }
        if self.searches.has_phase_changed(view) {
            return (LifecycleEvent::PhaseChanged, None);
        }
        let Lifecycle { change, monitor, .. } = &mut self.lifecycle;
        if let Some(change) = change {
            let phases: Vec<u32> = view.live_tasks().map(|seen| phases::current_phase(view, seen.task).0).collect();
            let Parameters { objective, min_gain, .. } = self.parameters;
            return change.observe(view, monitor, MeasurementTerms { objective, min_gain, phases: &phases });
        }
        let event = if !self.is_known(view) {
            LifecycleEvent::NotKnown
        } else if self.failed.is_paused(view.observation.window) {
            LifecycleEvent::Paused
        } else {
            LifecycleEvent::Known
        };
        (event, None)
    }

    /// Is another plan in force than the decided one? The guard rolled it back; a policy does not insist.
    fn is_overruled(&self, view: &View<'_>, in_force: &DecidedPlan) -> bool {
        let decided = self.decided.as_ref();
        decided.is_some_and(|decided| !DecidedPlan::from_previous(&decided.0, view).is_same(&in_force.0))
    }

    /// Are tasks, speeds and profiles known well enough for a search?
    fn is_known(&self, view: &View<'_>) -> bool {
        let steady = self.evidence.arrivals.steady_windows(view.observation.window);
        steady >= KNOWN_WINDOWS
            && (self.lifecycle.monitor.is_enough() || self.searches.phase_changed && phases::are_kinds_known(view))
            && (self.evidence.probe_planner.surveyed(view, &self.evidence.curves) || steady >= PATIENCE_WINDOWS)
    }

    /// Follows the transition of an event, with its effects on what is remembered; returns the next plan.
    fn advance(
        &mut self,
        event: LifecycleEvent,
        verdict: Option<ChangeVerdict>,
        view: &View<'_>,
        in_force: DecidedPlan,
        why: &mut Vec<Reason>,
    ) -> DecidedPlan {
        let window = view.observation.window;
        let change = self.lifecycle.change.as_ref();
        let (gain, new) = (change.map(|change| change.gain), change.map(|change| change.new.clone()));
        let was_idle = self.lifecycle.is_idle();
        let (row, mut next) = self.lifecycle.advance(event, in_force, self.parameters.warmup_windows);
        let Some(row) = row else { return next };
        if let Some((verdict, gain)) = verdict.zip(gain) {
            self.record.record(gain, verdict.measured.log_ratio);
            why.push(explain::verdict(view, verdict, gain, row));
        }
        match event {
            LifecycleEvent::NotFaster | LifecycleEvent::Slower => {
                if let Some(new) = new {
                    self.failed.record_failure(&new.0, window);
                }
            }
            LifecycleEvent::Faster | LifecycleEvent::NotSlower => self.failed.record_success(),
            // Releasing a task's partition is no plan that can fail: a roll-back of it only keeps the partition.
            LifecycleEvent::Overruled => {
                if let Some(decided) = self.decided.take().filter(|_| !self.released) {
                    self.failed.record_failure(&decided.0, window);
                }
                self.released = false;
            }
            LifecycleEvent::TasksChanged | LifecycleEvent::PhaseChanged => {
                next = DecidedPlan::from_previous(&next.0, view);
            }
            LifecycleEvent::LikelyGain | LifecycleEvent::SureGain | LifecycleEvent::UnmeasurableGain => {
                self.released = false;
            }
            _ => {}
        }
        if event.interrupts() && !was_idle {
            why.push(explain::interruption(view, row));
        }
        if event == LifecycleEvent::PhaseChanged {
            self.evidence.arrivals.record_change();
            next = self.release_changed(view, next);
        }
        next
    }

    /// The plan without the partitions and turns of tasks whose phases have changed.
    fn release_changed(&mut self, view: &View<'_>, mut plan: DecidedPlan) -> DecidedPlan {
        let changed = self.searches.record_phases(view);
        let window = view.observation.window;
        self.evidence.phase_changed_at.extend(changed.iter().map(|(task, _)| (*task, window)));
        let before = plan.clone();
        let live: Vec<_> = changed.into_iter().filter_map(|(task, process)| Some((task, process?))).collect();
        phases::release(&mut plan.0, &live);
        self.released |= !before.is_same(&plan.0);
        plan
    }

    /// Searches for a better plan, and prepares its trial or its monitoring.
    fn search(&mut self, view: &View<'_>, in_force: &DecidedPlan, why: &mut Vec<Reason>) -> LifecycleEvent {
        let uses_nodes = !self.parameters.disable.contains(&Mechanism::MemoryNodes);
        let Some(input) = self.searches.prepare(view, &in_force.0, &mut self.evidence, uses_nodes) else {
            return LifecycleEvent::NoBetterPlan;
        };
        let lengths = self.parameters.leg_lengths();
        let finder = PlanFinder {
            parameters: &self.parameters,
            seed: self.seed,
            view,
            in_force,
            evidence: &self.evidence,
            failed: &self.failed,
            record: &self.record,
            has_time_for_trial: self
                .evidence
                .arrivals
                .leaves_time_for(lengths.shortest_trial(), view.observation.window),
        };
        let SearchResult { in_force: forecast, proposal } = finder.find(&input, &mut self.reported, why);
        self.searches.finish(input);
        self.lifecycle.forecast = Some(forecast.clone());
        let Some(proposal) = proposal else { return LifecycleEvent::NoBetterPlan };
        self.propose(proposal, lengths, in_force.clone(), forecast)
    }

    /// Prepares the trial or the monitoring of a plan.
    fn propose(
        &mut self,
        proposal: Proposal,
        lengths: LegLengths,
        before: DecidedPlan,
        of_old: Forecast,
    ) -> LifecycleEvent {
        let Proposal { choice, new, old, weights, gain, forecast } = proposal;
        let (event, stage) = if choice == Choice::Try {
            self.trials += 1;
            let trial = Trial::new(lengths, weights, self.parameters.objective, self.seed ^ self.trials);
            (LifecycleEvent::LikelyGain, ChangeStage::Trial(Box::new(trial)))
        } else {
            let before = self.lifecycle.monitor.changed(lengths.warmup_windows);
            let can_compare = before.is_enough();
            let event = if can_compare { LifecycleEvent::SureGain } else { LifecycleEvent::UnmeasurableGain };
            (event, ChangeStage::Monitored { before, weights })
        };
        let forecasts = [of_old, forecast];
        self.lifecycle.change = Some(ProvisionalChange { before, old, new, gain, forecasts, stage });
        event
    }
}

/// See the registry.
pub(super) fn build(parameters: &str, seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(Auto::new(Parameters::parse(parameters)?, seed)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{NullPredictor, capabilities, last_level_caches, observation};
    use cachemate_core::{
        CacheId, CacheLevel, CacheShare, CounterEvent, CpuId, EventCount, EventCounts, GroupId, IndexSet, Plan,
        ProcessId, Profile, Profiles, ShareMember, TaskId, Units,
    };

    /// Two partitioned tasks, the first in its second phase: the decision if this plan is in force.
    fn decided(policy: &mut Auto, window: u64, before: &Plan) -> Plan {
        let (topology, can) = (last_level_caches(1, 2, CacheLevel::L3, 1 << 20), capabilities(&[Ability::Ways]));
        let mut seen = observation(window, 2);
        let reading = |event| EventCount { event, count: 1_000_000, enabled_share: 1.0 };
        for task in &mut seen.tasks {
            task.counts = EventCounts([CounterEvent::Instructions, CounterEvent::Cycles].map(reading).to_vec());
            task.on_cpu_ns = vec![(CpuId(task.task.0), 1_000_000_000)];
        }
        let profile = |id: u32| Profile { phase_number: 1 - id, ..Profile::default() };
        let profiles: Profiles = (0..2).map(|id| (TaskId(id), profile(id))).collect();
        let (topology, capabilities, seen, profiles) = (&topology, &can, &seen, &profiles);
        let view = View {
            topology,
            capabilities,
            observation: seen,
            profiles,
            previous_plan: before,
            predictor: &NullPredictor,
        };
        policy.decide(&view).plan
    }

    /// If the guard restores a released partition, does that not count as a failed plan, whereas it does after a
    /// decision?
    #[test]
    fn releasing_a_partition_is_no_plan_that_can_fail() {
        let share = |id: u32| CacheShare {
            group: GroupId(id),
            cache: CacheId(0),
            members: vec![ShareMember::Process(ProcessId(id))],
            units: Units::Ways { mask: IndexSet::default() },
        };
        let mut parts = Plan::idle(WindowLength::Time { ns: 1 });
        parts.shares = vec![share(0), share(1)];
        let mut policy = Auto::new(Parameters::default(), 1);
        policy.searches.begin(vec![(TaskId(0), 0, true), (TaskId(1), 0, true)], 1);
        let given_up = decided(&mut policy, 2, &parts);
        assert_eq!(given_up.shares, [share(1)]);
        let kept = decided(&mut policy, 3, &parts);
        assert!(kept.shares.len() == 2 && policy.failed.is_empty());
        // The same after a decision.
        let undivided = Plan::idle(WindowLength::Time { ns: 1 });
        decided(&mut policy, 4, &undivided);
        assert!(!policy.failed.is_empty());
    }
}
