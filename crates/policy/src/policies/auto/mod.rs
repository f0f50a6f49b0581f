//! The integrated runtime: the operator states the objective, and this policy chooses the mechanisms.
//!
//! Problem: sharing clusters, placement, gangs and partitions each help some mixes and hurt others, and they conflict
//! (thesis 7.3). Method: the policy collects [`evidence`] about the tasks, and forecasts whole plans with a [`model`]
//! of every task. One search covers [`candidates`] of all mechanisms together, which always include the default and the
//! best plan of every single mechanism. A pure [`decision`] proposes a plan whose gain is 95 % probable for monitoring,
//! and one that is likely, or worth its measurement, for confirmation; it drops any other plan. The verifier
//! ([`crate::verifier`]) measures the proposed plan. The [`lifecycle`] is a table of states and events that determines
//! when the policy waits, searches, and leaves a change to the verifier.
//!
//! Properties: without evidence, the plan in force stays, initially the idle plan; after the initial profiling, probes
//! cost no more than a share of processor time ([`evidence::probe_planner`]); the same observations give the same
//! decisions.

mod candidates;
mod decision;
mod evidence;
mod explain;
mod lifecycle;
mod model;
mod proposal;
mod service_confinement;

use cachemate_core::{
    Ability, ChangeVerdict, Decision, Forecast, Policy, ProposedChange, Reason, SpeedObjective,
    Verification, VerificationMethod, VerificationOutcome, View, WindowLength,
};
use serde::Deserialize;

use self::candidates::{AllowedMechanisms, Mechanism};
use self::decision::{ForecastRecord, MeasuredChange};
use self::evidence::probe_planner::{ProbeLimits, are_probes_harmless};
use self::evidence::{MIN_KNOWN_WINDOWS, PATIENCE_WINDOWS, TaskEvidence, all_tasks, phases};
use self::explain::ReportedForecasts;
use self::lifecycle::{Lifecycle, LifecycleEvent};
use self::model::decided_plan::DecidedPlan;
use self::model::layout::SiteLayout;
use self::model::problem::cache_sites;
use self::model::problem_cache::{
    ProblemCache, ProblemOptions, SEARCH_INTERVAL_WINDOWS, SearchHistory, task_stamp,
};
pub use self::model::score::PlanObjective;
use self::proposal::{LayoutChange, PlanFinder, Proposal, SearchResult, forecast_gain_again};
use self::service_confinement::ServiceConfinements;
use super::static_partition::MigrationMode;
use super::{ParameterError, ParameterRange};

/// A part of the policy, which an ablation leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyPart {
    /// Models agree with the misses that are counted under the plan in force.
    Evidence,
    /// Plans combine mechanisms.
    JointSearch,
    /// Every phase of a task has a model of its own.
    Phases,
    /// Probes measure curves and sharing.
    Probes,
}

/// Parameters; see the policy's page.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    pub objective: PlanObjective,
    /// Mechanisms that the search may not use.
    pub disable: Vec<Mechanism>,
    /// Parts to leave out.
    pub ablate: Vec<PolicyPart>,
    /// Smallest forecast gain of a change, as a share.
    pub min_gain: f64,
    /// Share of processor time that probes may cost after the initial profiling.
    pub probe_share: f64,
    /// Number of watched locations of each task, on machines that cannot trace misses.
    pub locations: u32,
    /// Number of entries of the first log of a task's misses.
    pub trace_entries: u32,
    pub probe_budget_ns: u64,
    pub samples_per_thread: u32,
    /// May a co-runner of a service with a promise wait for a while, so that the loss that it causes is measured?
    pub pause_services: bool,
    pub warmup_windows: u32,
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
            ablate: Vec::new(),
            min_gain: 0.01,
            probe_share: 0.01,
            locations: 2_000,
            trace_entries: 81_920,
            probe_budget_ns: 1_000_000_000,
            samples_per_thread: 16_000,
            pause_services: true,
            warmup_windows: 1,
            max_evaluations: 2_000,
            payback_ns: 60_000_000_000,
            page_migration: MigrationMode::All,
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = super::parse_parameters(text)?;
        ParameterRange::OneOrMore.check([
            ("window_ns", parameters.window_ns as f64),
            ("locations", parameters.locations.into()),
            ("trace_entries", parameters.trace_entries.into()),
            ("probe_budget_ns", parameters.probe_budget_ns as f64),
            ("max_evaluations", parameters.max_evaluations.into()),
        ])?;
        ParameterRange::PositiveShare.check([
            ("min_gain", parameters.min_gain),
            ("probe_share", parameters.probe_share),
        ])?;
        Ok(parameters)
    }

    fn includes(&self, part: PolicyPart) -> bool {
        !self.ablate.contains(&part)
    }

    fn allowed_mechanisms(&self, view: &View<'_>) -> AllowedMechanisms {
        let has_ability = |ability: Ability| view.capabilities.has_ability(ability);
        AllowedMechanisms::from_filter(|mechanism| {
            let is_possible = match mechanism {
                Mechanism::Placement | Mechanism::MemoryNodes | Mechanism::Sharing => {
                    has_ability(Ability::Affinity)
                }
                Mechanism::Space => has_ability(Ability::Ways) || has_ability(Ability::Colors),
                Mechanism::Gangs => has_ability(Ability::Gangs),
            };
            is_possible && !self.disable.contains(&mechanism)
        })
    }

    fn probe_limits(&self) -> ProbeLimits {
        ProbeLimits {
            max_share: self.probe_share,
            min_gain: self.min_gain,
            locations: self.locations,
            trace_entries: self.trace_entries,
            budget_ns: self.probe_budget_ns,
            samples_per_thread: self.samples_per_thread,
            may_pause_services: self.pause_services,
        }
    }
}

struct Auto {
    parameters: Parameters,
    seed: u64,
    evidence: TaskEvidence,
    lifecycle: Lifecycle,
    searches: SearchHistory,
    forecast_record: ForecastRecord<LayoutChange>,
    open_change: Option<UnverifiedChange>,
    reported_forecasts: ReportedForecasts,
    partition_climb: PartitionClimb,
    confinements: ServiceConfinements,
}

/// The proposed change that has no verdict yet.
struct UnverifiedChange {
    change: LayoutChange,
    plan_before: DecidedPlan,
    /// Whether the new plan is more likely than not to gain.
    is_likely: bool,
}

/// Single steps of the partitions in force, measured with the same tasks and phases.
#[derive(Default)]
struct PartitionClimb {
    /// Layouts that a step has improved.
    beaten_layouts: Vec<SiteLayout>,
    /// Whether a step or an exploration is being measured.
    is_open: bool,
    explorations: Explorations,
}

/// Outcomes of explorations with the same tasks.
#[derive(Clone, Copy, Default)]
struct Explorations {
    is_open: bool,
    kept_count: u32,
    failed_count: u32,
}

impl Explorations {
    /// Returns the probability that the next one is kept, by the rule of succession.
    fn keep_probability(self) -> f64 {
        f64::from(self.kept_count + 1) / f64::from(self.kept_count + self.failed_count + 2)
    }
}

impl Policy for Auto {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let merged_profiles = (!self.parameters.includes(PolicyPart::Phases))
            .then(|| phases::merge_phases(view.profiles));
        let view = &View {
            profiles: merged_profiles.as_ref().unwrap_or(view.profiles),
            ..*view
        };
        self.evidence.curves.observe(view);
        let mut reasons = Vec::new();
        let restored_plan = self.record_verdict(view, &mut reasons);
        self.confinements.observe_verdict(view);
        let can_confine = self
            .parameters
            .allowed_mechanisms(view)
            .allows(Mechanism::Space);
        if can_confine && self.lifecycle.is_idle() {
            let pause = self.evidence.probe_planner.reported_pause(view);
            self.confinements.observe(view, pause, &mut reasons);
        }
        let plan_to_keep = restored_plan
            .as_ref()
            .map_or(view.plan_to_keep(), |plan| &plan.0);
        let mut next_plan = DecidedPlan::from_previous(plan_to_keep, view);
        let mut proposed_change = None;
        let is_counted = view.live_tasks().any(|task| !task.counts.0.is_empty());
        if is_counted {
            proposed_change = self.continue_window(view, &mut next_plan, &mut reasons);
        }
        let mut plan = next_plan.0;
        self.confinements
            .write_into_plan(view, &mut plan, !self.lifecycle.is_idle());
        plan.window = WindowLength::Time {
            ns: self
                .parameters
                .window_ns
                .max(view.capabilities.min_window_ns),
        };
        plan.penalties.clear();
        // No probe runs while a change is being measured.
        if is_counted && self.lifecycle.is_idle() && self.parameters.includes(PolicyPart::Probes) {
            let (mut limits, allowed_mechanisms) = (
                self.parameters.probe_limits(),
                self.parameters.allowed_mechanisms(view),
            );
            limits.may_pause_services &= !can_confine || self.confinements.has_speeds();
            let TaskEvidence {
                probe_planner,
                speeds,
                curves,
                ..
            } = &mut self.evidence;
            plan.probes = probe_planner.plan_probes(
                view,
                &cache_sites(view),
                (speeds, curves),
                &limits,
                allowed_mechanisms.allows(Mechanism::Sharing),
            );
        }
        let forecast = self.lifecycle.forecast.clone().filter(|_| is_counted);
        let verification = match proposed_change {
            Some(change) => Verification::Proposed(change),
            None if self.lifecycle.is_idle() => Verification::BeforeAndAfter,
            None => Verification::Pending,
        };
        Decision {
            plan,
            reasons,
            forecast,
            verification,
        }
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
            forecast_record: ForecastRecord::default(),
            open_change: None,
            reported_forecasts: ReportedForecasts::default(),
            partition_climb: PartitionClimb::default(),
            confinements: ServiceConfinements::default(),
        }
    }

    /// Learns from the verifier's verdict, if there is one. Returns the plan to restore, if an unlikely gain can no longer be
    /// confirmed.
    fn record_verdict(
        &mut self,
        view: &View<'_>,
        reasons: &mut Vec<Reason>,
    ) -> Option<DecidedPlan> {
        let ChangeVerdict {
            outcome,
            forecast,
            forecast_gain,
            measured,
            ..
        } = view.verdicts.latest()?;
        let open_change = self.open_change.take();
        let is_unconfirmed = *outcome == VerificationOutcome::Interrupted;
        let restored_plan = open_change
            .as_ref()
            .filter(|open| is_unconfirmed && !open.is_likely);
        let restored_plan = restored_plan.map(|open| open.plan_before.clone());
        let change = open_change.map(|open| open.change);
        if std::mem::take(&mut self.partition_climb.is_open) {
            // A step is too small to say anything about forecasts of plans, and an exploration too uncertain.
            let explorations = &mut self.partition_climb.explorations;
            let is_exploration = std::mem::take(&mut explorations.is_open);
            explorations.failed_count +=
                u32::from(is_exploration && *outcome == VerificationOutcome::Slower);
            if *outcome == VerificationOutcome::NotSlower {
                explorations.kept_count += u32::from(is_exploration);
                self.partition_climb
                    .beaten_layouts
                    .extend(change.map(|change| change.layout_before));
            }
        } else if let (Some(change), Some(forecast), Some(measured)) =
            (change, *forecast_gain, *measured)
        {
            self.forecast_record.record(MeasuredChange {
                change,
                forecast,
                measured_log_ratio: measured.log_ratio,
            });
        }
        self.lifecycle.forecast.clone_from(forecast);
        if !matches!(
            outcome,
            VerificationOutcome::NotSlower | VerificationOutcome::NotMeasured
        ) {
            self.lifecycle.measured_windows.restart(0);
        }
        self.lifecycle.advance(LifecycleEvent::Verdict(*outcome));
        if restored_plan.is_some() {
            let text =
                "the plan before is in force again, because it is likely to be faster".to_string();
            reasons.push(Reason::new(
                view.live_tasks().map(|sample| sample.task).collect(),
                text,
                Vec::new(),
            ));
        }
        restored_plan
    }

    /// Handles a window in which events were counted: the state of the evidence, and a search if one is due. Writes the
    /// next plan, and returns the verification terms if the plan is a proposal.
    fn continue_window(
        &mut self,
        view: &View<'_>,
        next_plan: &mut DecidedPlan,
        reasons: &mut Vec<Reason>,
    ) -> Option<Box<ProposedChange>> {
        let level = view.topology.last_level()?;
        if self.evidence.observe(view, level) {
            self.lifecycle.measured_windows.restart(0);
            self.lifecycle.forecast = None;
            self.partition_climb.beaten_layouts.clear();
            self.partition_climb.explorations = Explorations::default();
        }
        // Counts with partitions are recorded in all states, and before a verdict ends their plan.
        let covers_live_tasks = |search: &&ProblemCache| {
            view.live_tasks()
                .map(|task| task.task)
                .eq(search.problem.task_ids())
        };
        let last_search = self
            .searches
            .last_results
            .as_ref()
            .filter(|_| !view.previous_plan.shares.is_empty());
        if let Some(last_search) = last_search.filter(covers_live_tasks) {
            let layout = SiteLayout::from_plan(view.previous_plan, &last_search.problem);
            self.evidence
                .record_counts(view, &last_search.problem, &layout);
        }
        if view.observation.applied.pending.is_empty() && are_probes_harmless(view) {
            self.lifecycle.measured_windows.add();
        }
        let event = self.lifecycle_event(view);
        self.lifecycle.advance(event);
        if event == LifecycleEvent::PhaseChanged {
            self.lifecycle.measured_windows.restart(0);
            self.lifecycle.forecast = None;
            self.evidence
                .arrivals
                .record_change(view.observation.window);
            self.partition_climb.beaten_layouts.clear();
            let window = view.observation.window;
            let changed_tasks = self
                .searches
                .record_phases(view)
                .into_iter()
                .map(|task| (task, window));
            self.evidence.phase_changed_at.extend(changed_tasks);
        }
        if event != LifecycleEvent::EvidenceComplete {
            return None;
        }
        let (stamp, window) = (
            task_stamp(view, &self.evidence.curves),
            view.observation.window,
        );
        if !self.searches.is_outdated(&stamp, window) {
            let step_proposal = self.propose_step(view, next_plan, reasons)?;
            self.lifecycle.advance(LifecycleEvent::PossibleStep);
            return Some(step_proposal);
        }
        self.searches.record_start(stamp, window);
        let (event, proposed_change) = self.search(view, next_plan, reasons);
        self.lifecycle.advance(event);
        proposed_change
    }

    /// Returns the event of a window, before any search.
    fn lifecycle_event(&self, view: &View<'_>) -> LifecycleEvent {
        if !self.lifecycle.is_idle() {
            LifecycleEvent::Undecided
        } else if self.searches.has_phase_changed(view) {
            LifecycleEvent::PhaseChanged
        } else if !self.is_known(view) {
            LifecycleEvent::EvidenceIncomplete
        } else if view.verdicts.is_paused(view.observation.window) {
            LifecycleEvent::Paused
        } else {
            LifecycleEvent::EvidenceComplete
        }
    }

    /// Returns whether enough is known about tasks, speeds and profiles for a search.
    fn is_known(&self, view: &View<'_>) -> bool {
        let unchanged_windows = self
            .evidence
            .arrivals
            .unchanged_windows(view.observation.window);
        unchanged_windows >= MIN_KNOWN_WINDOWS
            && (self.lifecycle.measured_windows.is_enough()
                || self.searches.awaits_new_phase && phases::are_kinds_known(view))
            && (self.evidence.speeds.are_averages_current())
            && (!self.parameters.includes(PolicyPart::Probes)
                || self
                    .evidence
                    .probe_planner
                    .is_survey_complete(view, &self.evidence.curves)
                || unchanged_windows >= PATIENCE_WINDOWS)
    }

    /// Searches for a plan that is better than the one in force. If there is one to propose, it replaces `plan`, and
    /// the verification terms are returned.
    fn search(
        &mut self,
        view: &View<'_>,
        plan: &mut DecidedPlan,
        reasons: &mut Vec<Reason>,
    ) -> (LifecycleEvent, Option<Box<ProposedChange>>) {
        let no_better_plan = (LifecycleEvent::NoBetterPlan, None);
        let options = ProblemOptions {
            uses_nodes: !self.parameters.disable.contains(&Mechanism::MemoryNodes),
            uses_counts: self.parameters.includes(PolicyPart::Evidence),
        };
        let Some(input) = self
            .searches
            .prepare(view, &plan.0, &mut self.evidence, options)
        else {
            return no_better_plan;
        };
        let (tasks, objective) = (all_tasks(view, &input.problem), self.parameters.objective);
        self.forecast_record
            .forecast_again(|change| forecast_gain_again(&input, objective, &tasks, change));
        let mut reported_forecasts = std::mem::take(&mut self.reported_forecasts);
        let finder = self.build_finder(view, plan);
        let SearchResult {
            current_forecast,
            proposal,
        } = finder.find(&input, &mut reported_forecasts, reasons);
        let can_explore = proposal.is_none()
            && self.has_time_to_confirm(view)
            && self
                .parameters
                .allowed_mechanisms(view)
                .allows(Mechanism::Space);
        let keep_probability = self.partition_climb.explorations.keep_probability();
        let exploration = can_explore
            .then(|| finder.find_exploration(&input, keep_probability))
            .flatten();
        self.reported_forecasts = reported_forecasts;
        self.searches.store_results(input);
        self.lifecycle.forecast = Some(current_forecast.clone());
        if let Some(exploration) = exploration {
            let text = format!(
                "partitions that differ from the forecast at most by the errors of curves are measured: {:+.1} % expected",
                100.0 * exploration.gain
            );
            reasons.push(Reason::new(Vec::new(), text, Vec::new()));
            self.partition_climb.beaten_layouts.clear();
            self.partition_climb.is_open = true;
            self.partition_climb.explorations.is_open = true;
            let proposed_change = self.propose(exploration, current_forecast, plan);
            return (LifecycleEvent::PossibleStep, Some(proposed_change));
        }
        let Some(proposal) = proposal else {
            return no_better_plan;
        };
        let event = match proposal.method {
            VerificationMethod::Monitoring => LifecycleEvent::SureGain,
            VerificationMethod::Confirmation => LifecycleEvent::LikelyGain,
        };
        self.partition_climb.beaten_layouts.clear();
        (event, Some(self.propose(proposal, current_forecast, plan)))
    }

    fn build_finder<'a, 'v>(
        &'a self,
        view: &'a View<'v>,
        current_plan: &'a DecidedPlan,
    ) -> PlanFinder<'a, 'v> {
        PlanFinder {
            parameters: &self.parameters,
            seed: self.seed,
            view,
            current_plan,
            evidence: &self.evidence,
            forecast_record: &self.forecast_record,
            has_time_to_confirm: self.has_time_to_confirm(view),
        }
    }

    /// Returns whether tasks will probably not change before measurements can confirm a change.
    fn has_time_to_confirm(&self, view: &View<'_>) -> bool {
        self.evidence
            .arrivals
            .has_time_for(SEARCH_INTERVAL_WINDOWS as u32, view.observation.window)
    }

    /// Proposes to move one unit between the partitions in force, if measuring that is worth its expected loss. Curves
    /// have errors, so the last step of a partition is found by measurement.
    fn propose_step(
        &mut self,
        view: &View<'_>,
        plan: &mut DecidedPlan,
        reasons: &mut Vec<Reason>,
    ) -> Option<Box<ProposedChange>> {
        if plan.0.shares.is_empty() || !self.has_time_to_confirm(view) {
            return None;
        }
        let last_search = self.searches.last_results.as_ref()?;
        let (proposal, current_forecast) = self.build_finder(view, plan).find_step(
            &last_search.problem,
            &last_search.score_cache,
            &self.partition_climb.beaten_layouts,
        )?;
        let text = format!(
            "one unit is moved between partitions: {:+.1} % forecast",
            100.0 * proposal.gain
        );
        reasons.push(Reason::new(Vec::new(), text, Vec::new()));
        self.partition_climb.is_open = true;
        Some(self.propose(proposal, current_forecast, plan))
    }

    /// Replaces the plan by the proposed one, and returns the terms of its verification.
    fn propose(
        &mut self,
        proposal: Proposal,
        current_forecast: Forecast,
        plan: &mut DecidedPlan,
    ) -> Box<ProposedChange> {
        let Proposal {
            method,
            new_plan,
            speeds,
            goal_processes,
            gain,
            forecast,
            change,
            is_likely,
            ..
        } = proposal;
        self.open_change = Some(UnverifiedChange {
            change,
            plan_before: plan.clone(),
            is_likely,
        });
        self.lifecycle
            .measured_windows
            .restart(self.parameters.warmup_windows);
        self.lifecycle.forecast = Some(forecast.clone());
        *plan = new_plan;
        let objective = match self.parameters.objective {
            PlanObjective::WorstSlowdown => SpeedObjective::Slowest,
            _ => SpeedObjective::Sum,
        };
        Box::new(ProposedChange {
            method,
            forecasts: [current_forecast, forecast],
            forecast_gain: gain,
            min_gain: self.parameters.min_gain,
            objective,
            speeds,
            goal_processes,
        })
    }
}

/// Builds the policy for the registry.
pub(super) fn build(parameters: &str, seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(Auto::new(Parameters::parse(parameters)?, seed)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{
        NullPredictor, capabilities_fixture, last_level_caches, observation_fixture,
    };
    use cachemate_core::{
        CacheId, CacheLevel, CacheShare, CounterEvent, CpuId, EventCount, EventCounts, GroupId,
        IndexSet, Plan, ProcessId, Profile, Profiles, ShareMember, TaskId, Units, Verdicts,
    };

    /// Two partitioned tasks, the first of them in its second phase: returns the decision if this plan is in force.
    fn decide_window(
        policy: &mut Auto,
        window: u64,
        previous_plan: &Plan,
        verdicts: &dyn Verdicts,
    ) -> Decision {
        let (topology, can) = (
            last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
            capabilities_fixture(&[Ability::Ways]),
        );
        let mut observation = observation_fixture(window, 2);
        let reading = |event| EventCount {
            event,
            count: 1_000_000,
            enabled_share: 1.0,
        };
        for task in &mut observation.tasks {
            task.counts = EventCounts(
                [CounterEvent::Instructions, CounterEvent::Cycles]
                    .map(reading)
                    .to_vec(),
            );
            task.on_cpu_ns = vec![(CpuId(task.task.0), 1_000_000_000)];
        }
        let profile = |id: u32| Profile {
            phase_number: 1 - id,
            ..Profile::default()
        };
        let profiles: Profiles = (0..2).map(|id| (TaskId(id), profile(id))).collect();
        let (topology, capabilities, observation, profiles) =
            (&topology, &can, &observation, &profiles);
        let view = View {
            topology,
            capabilities,
            observation,
            profiles,
            previous_plan,
            predictor: &NullPredictor,
            verdicts,
        };
        policy.decide(&view)
    }

    /// Returns a plan that gives these processes a share each.
    fn divided_plan(processes: &[u32]) -> Plan {
        let share = |&id: &u32| CacheShare {
            group: GroupId(id),
            cache: CacheId(0),
            members: vec![ShareMember::Process(ProcessId(id))],
            units: Units::Ways {
                mask: IndexSet::default(),
            },
        };
        Plan {
            shares: processes.iter().map(share).collect(),
            ..Plan::idle(WindowLength::Time { ns: 1 })
        }
    }

    /// Does a plan with partitions stay in force after a change of phase, until a search has another one?
    #[test]
    fn partitions_outlast_a_change_of_phase() {
        let plan = divided_plan(&[0, 1]);
        let mut policy = Auto::new(Parameters::default(), 1);
        policy
            .searches
            .record_start(vec![(TaskId(0), 0, true), (TaskId(1), 0, true)], 1);
        assert_eq!(
            decide_window(&mut policy, 2, &plan, &()).plan.shares,
            plan.shares
        );
        assert_eq!(
            policy.evidence.phase_changed_at,
            [(TaskId(0), 2)].into(),
            "the search waits for its new curve"
        );
    }

    /// The verdict on a change that was not measured to its end.
    struct InterruptedVerdict(ChangeVerdict);

    impl Verdicts for InterruptedVerdict {
        fn latest(&self) -> Option<&ChangeVerdict> {
            Some(&self.0)
        }
    }

    /// If a confirmation is interrupted, does a likely gain stay in force, while the plan before replaces an unlikely one?
    #[test]
    fn an_unlikely_gain_that_is_not_confirmed_ends() {
        let (before, after) = (divided_plan(&[0]), divided_plan(&[0, 1]));
        let verdict = InterruptedVerdict(ChangeVerdict {
            outcome: VerificationOutcome::Interrupted,
            plan: after.clone(),
            forecast: None,
            forecast_gain: Some(0.02),
            measured: None,
        });
        for (is_likely, expected) in [(true, &after), (false, &before)] {
            let mut policy = Auto::new(Parameters::default(), 1);
            let layout = SiteLayout::default();
            let change = LayoutChange {
                tasks: Vec::new(),
                layout_before: layout.clone(),
                layout_after: layout,
            };
            policy.open_change = Some(UnverifiedChange {
                change,
                plan_before: DecidedPlan(before.clone()),
                is_likely,
            });
            assert_eq!(
                decide_window(&mut policy, 2, &after, &verdict).plan.shares,
                expected.shares
            );
            assert!(policy.open_change.is_none());
        }
    }
}
