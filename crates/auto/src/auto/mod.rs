//! The integrated runtime: the operator states goals, and this policy chooses the mechanisms.
//!
//! Problem: sharing clusters, placement, gangs and partitions each help some mixes and hurt others, and they conflict
//! (thesis 7.3). Method: each window, [`Auto::judge`] learns from the verifier's verdict, [`Auto::observe`] collects
//! [`evidence`] about the tasks, [`Auto::search`] looks for the plan with the best forecast by a [`model`] of every
//! task, [`Auto::propose`] leaves it to the verifier ([`crate::verifier`]), which measures it, and
//! [`Auto::plan_probes`] asks for what is still unknown. One search covers the [`candidates`] of all mechanisms.
//! Between searches, units move between the partitions in force, and each move has to be measured faster.
//!
//! Properties: without evidence, the plan in force stays, initially the idle plan; after the initial profiling, probes
//! cost no more than a share of processor time ([`evidence::probe_planner`]); the same observations give the same
//! decisions.

mod bandwidth;
mod candidates;
mod evidence;
mod explain;
mod model;
mod proposal;
mod service_confinement;

use cachemate_core::{
    Ability, ChangeVerdict, Decision, Forecast, PageMigration, Plan, Policy, ProbeRequest,
    ProcessId, ProposedChange, Reason, Verification, VerificationMethod, VerificationOutcome, View,
    WindowLength,
};
use cachemate_papers::policies::{ParameterError, ParameterRange, parse_parameters};
use serde::Deserialize;

use self::bandwidth::{BandwidthGuard, Levers};
use self::candidates::{AllowedMechanisms, Mechanism};
use self::evidence::probe_planner::{ProbeLimits, are_probes_harmless};
use self::evidence::{MIN_KNOWN_WINDOWS, PATIENCE_WINDOWS, TaskEvidence, phases};
use self::explain::ReportedForecasts;
use self::model::decided_plan::DecidedPlan;
use self::model::forecast::forecast;
use self::model::layout::SiteLayout;
use self::model::search_input::{
    SEARCH_INTERVAL_WINDOWS, SearchHistory, SearchInput, searched_tasks,
};
use self::proposal::{PlanFinder, Proposal, ProposalOrigin};
use self::service_confinement::ServiceConfinements;

/// A part of the policy, which an ablation leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyPart {
    /// Models agree with the misses that are counted under the plan in force.
    Evidence,
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
    /// What programs that break a promise lose on the path to memory.
    pub bandwidth: Levers,
    /// Largest number of site scores that one decision may compute.
    pub max_evaluations: u32,
    /// Time within which a change must earn back the copying of pages.
    pub payback_ns: u64,
    pub page_migration: PageMigration,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 1_000_000_000,
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
            bandwidth: Levers::default(),
            max_evaluations: 2_000,
            payback_ns: 60_000_000_000,
            page_migration: PageMigration::All,
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = parse_parameters(text)?;
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
        let is_allowed = |mechanism: &Mechanism| {
            let is_possible = match mechanism {
                Mechanism::Placement | Mechanism::Sharing => has_ability(Ability::Affinity),
                Mechanism::Space => has_ability(Ability::Ways) || has_ability(Ability::Colors),
                Mechanism::Gangs => has_ability(Ability::Gangs),
            };
            is_possible && !self.disable.contains(mechanism)
        };
        Mechanism::ALL.into_iter().filter(is_allowed).collect()
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
    /// The change that the verifier measures; without one, the plan in force is kept until a search has a better one.
    open_change: Option<OpenChange>,
    /// Forecast of the plan in force; `None` if the last search was for other tasks or phases.
    forecast: Option<Forecast>,
    measured_windows: MeasuredWindows,
    searches: SearchHistory,
    reported_forecasts: ReportedForecasts,
    partition_climb: PartitionClimb,
    confinements: ServiceConfinements,
    bandwidth_guard: BandwidthGuard,
}

/// A proposed change that has no verdict yet, and what it replaced. The verifier has its terms and its plan.
enum OpenChange {
    /// A plan of a search.
    Proposed {
        origin: ProposalOrigin,
        layout_before: SiteLayout,
        plan_before: Box<DecidedPlan>,
    },
    /// Fewer CPUs for a program that breaks a promise.
    Throttle,
}

/// Steps and explorations of the partitions in force, with the same tasks and phases.
#[derive(Default)]
struct PartitionClimb {
    /// Layouts that a step has improved.
    superseded_layouts: Vec<SiteLayout>,
    /// Number of failures since the last step that was kept, and since the last plan.
    failed_steps: u32,
    halvings: u32,
    kept_explorations: u32,
    failed_explorations: u32,
}

/// Number of units that the first step may move. Each failure halves it.
const FIRST_STEP_UNITS: u32 = 4;
/// Number of failures in a row that end the climb.
const MAX_FAILED_STEPS: u32 = 4;

impl PartitionClimb {
    /// The largest number of units of the next step; `None` if the climb has ended.
    fn max_step_units(&self) -> Option<u32> {
        let units = (FIRST_STEP_UNITS >> self.halvings.min(FIRST_STEP_UNITS)).max(1);
        (self.failed_steps < MAX_FAILED_STEPS).then_some(units)
    }

    /// Begins at other partitions or in another phase.
    fn restart(&mut self) {
        self.superseded_layouts.clear();
        (self.failed_steps, self.halvings) = (0, 0);
    }

    /// The probability that the next exploration is kept, by the rule of succession.
    fn keep_probability(&self) -> f64 {
        f64::from(self.kept_explorations + 1)
            / f64::from(self.kept_explorations + self.failed_explorations + 2)
    }

    fn record(
        &mut self,
        origin: ProposalOrigin,
        layout_before: SiteLayout,
        outcome: VerificationOutcome,
    ) {
        let is_kept = outcome == VerificationOutcome::NotSlower;
        let is_slower = outcome == VerificationOutcome::Slower;
        match origin {
            ProposalOrigin::Plan => return,
            ProposalOrigin::Exploration => {
                self.kept_explorations += u32::from(is_kept);
                self.failed_explorations += u32::from(is_slower);
            }
            ProposalOrigin::Step => {
                self.failed_steps = if is_kept {
                    0
                } else {
                    self.failed_steps + u32::from(is_slower)
                };
                self.halvings += u32::from(is_slower);
            }
        }

        if is_kept {
            self.superseded_layouts.push(layout_before);
        }
    }
}

impl Policy for Auto {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        if self.bandwidth_guard.drop_ended(view) {
            self.measured_windows.restart(0);
        }
        let merged_profiles = (!self.parameters.includes(PolicyPart::Phases))
            .then(|| phases::merge_phases(view.profiles));
        // Evidence belongs to the plan in force. On a host that only observes, that is not the previous plan. The limits
        // of the path to memory follow from the promises of each window, so no plan keeps them.
        let is_only_proposed = view.observation.applied.is_only_proposed;
        let plan_in_force = if is_only_proposed {
            view.plan_in_force().into_owned()
        } else {
            self.bandwidth_guard.remove_from(view.previous_plan)
        };
        let mut reasons = Vec::new();
        let kept_plan = self.judge(view, &mut reasons);

        let in_force = View {
            profiles: merged_profiles.as_ref().unwrap_or(view.profiles),
            previous_plan: &plan_in_force,
            ..*view
        };
        let unproposed_plan =
            is_only_proposed.then(|| DecidedPlan::from_previous(&plan_in_force, &in_force));
        let is_counted = self.observe(&in_force, &mut reasons);
        let proposal = if is_counted {
            let current_plan = unproposed_plan.as_ref().unwrap_or(&kept_plan);
            self.search(&in_force, current_plan, &mut reasons)
        } else {
            None
        };
        // A proposal stands until a search finds that the plan in force is best; one without models finds nothing.
        let has_results = self.searches.results_window == Some(in_force.observation.window);
        let kept_plan = unproposed_plan.filter(|_| has_results).unwrap_or(kept_plan);
        let (mut plan, verification) = self.propose(&in_force, kept_plan, proposal);
        if is_counted {
            plan.probes = self.plan_probes(&in_force);
        }
        Decision {
            plan,
            reasons,
            forecast: self.forecast.clone().filter(|_| is_counted),
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
            open_change: None,
            forecast: None,
            measured_windows: MeasuredWindows::default(),
            searches: SearchHistory::default(),
            reported_forecasts: ReportedForecasts::default(),
            partition_climb: PartitionClimb::default(),
            confinements: ServiceConfinements::default(),
            bandwidth_guard: BandwidthGuard::default(),
        }
    }

    fn is_measuring(&self) -> bool {
        self.open_change.is_some()
    }

    fn can_confine(&self, view: &View<'_>) -> bool {
        let mechanisms = self.parameters.allowed_mechanisms(view);
        mechanisms.contains(&Mechanism::Space)
    }

    /// Learns from the verifier's verdict, if there is one. Returns the plan to keep: that in force, or the one before
    /// a change whose measurement was interrupted.
    fn judge(&mut self, view: &View<'_>, reasons: &mut Vec<Reason>) -> DecidedPlan {
        let verdict = view.verdicts.latest();
        let restored_plan =
            verdict.and_then(|verdict| self.observe_verdict(verdict, view.observation.window));
        self.confinements.observe_verdict(view);

        let Some(restored_plan) = restored_plan else {
            let plan = self.bandwidth_guard.remove_from(view.plan_to_keep());
            return DecidedPlan::from_previous(&plan, view);
        };
        let text = "the plan before it is in force again";
        let tasks = view.live_tasks().map(|sample| sample.task).collect();
        reasons.push(Reason::new(tasks, text.to_string(), Vec::new()));
        DecidedPlan::from_previous(&restored_plan.0, view)
    }

    /// Records a verdict, and its consequence for the change that was measured. Returns the plan before a change of
    /// partitions whose measurement was interrupted.
    fn observe_verdict(&mut self, verdict: &ChangeVerdict, window: u64) -> Option<DecidedPlan> {
        let outcome = verdict.outcome;
        let is_kept = matches!(
            outcome,
            VerificationOutcome::NotSlower | VerificationOutcome::NotMeasured
        );
        if !is_kept {
            self.measured_windows.restart(0);
            self.forecast = None;
        }

        let (origin, layout_before, plan_before) = match self.open_change.take()? {
            OpenChange::Throttle => {
                self.bandwidth_guard.observe_verdict(outcome, window);
                return None;
            }
            OpenChange::Proposed {
                origin,
                layout_before,
                plan_before,
            } => (origin, layout_before, plan_before),
        };
        if outcome == VerificationOutcome::Slower && plan_before.matches(&verdict.plan) {
            let input = self.searches.last_results.as_ref();
            self.forecast = input.map(|input| self.forecast_of(input, &layout_before));
        }
        self.partition_climb.record(origin, layout_before, outcome);
        // The plan of a search stays in force.
        let is_restored =
            outcome == VerificationOutcome::Interrupted && origin != ProposalOrigin::Plan;
        is_restored.then_some(*plan_before)
    }

    /// Observes the window. Returns whether events were counted.
    fn observe(&mut self, view: &View<'_>, reasons: &mut Vec<Reason>) -> bool {
        self.evidence.curves.observe(view);
        if self.can_confine(view) && !self.is_measuring() {
            let pause = self.evidence.probe_planner.reported_pause(view);
            self.confinements.observe(view, pause, reasons);
        }

        if !self.is_measuring() {
            let levers = self.parameters.bandwidth;
            if self.bandwidth_guard.observe(view, levers, reasons) {
                self.measured_windows.restart(0);
            }
        }

        let is_counted = view.live_tasks().any(|task| !task.counts.0.is_empty());
        if !is_counted {
            return false;
        }
        let Some(level) = view.topology.last_level() else {
            return true;
        };
        if self.evidence.observe(view, level) {
            self.measured_windows.restart(0);
            self.forecast = None;
            self.partition_climb = PartitionClimb::default();
        }

        self.record_divided_counts(view);
        let is_undisturbed =
            view.observation.applied.pending.is_empty() && are_probes_harmless(view);
        self.measured_windows.observe(is_undisturbed);
        true
    }

    /// Records the counts of tasks in partitions, while a change is measured too, and before a verdict ends it.
    fn record_divided_counts(&mut self, view: &View<'_>) {
        if view.previous_plan.shares.is_empty() {
            return;
        }
        let Some(SearchInput { problem, .. }) = &self.searches.last_results else {
            return;
        };
        let live_tasks = view.live_tasks().map(|sample| sample.task);
        if live_tasks.eq(problem.task_ids()) && problem.sites == self.evidence.sites {
            let layout = SiteLayout::from_plan(view.previous_plan, problem);
            self.evidence.record_counts(view, problem, &layout);
        }
    }

    /// Whether enough is known about tasks, speeds and profiles for a search.
    fn is_known(&self, view: &View<'_>) -> bool {
        let window = view.observation.window;
        let unchanged_windows = self.evidence.arrivals.unchanged_windows(window);
        unchanged_windows >= MIN_KNOWN_WINDOWS
            && (self.measured_windows.is_enough()
                || self.searches.awaits_new_phase && phases::are_kinds_known(view))
            && self.evidence.speeds.are_averages_current(window)
            && (!self.parameters.includes(PolicyPart::Probes)
                || self
                    .evidence
                    .probe_planner
                    .is_survey_complete(view, &self.evidence.curves)
                || unchanged_windows >= PATIENCE_WINDOWS)
    }

    /// Searches for a better plan if one is due, and otherwise for a step of the partitions in force.
    fn search(
        &mut self,
        view: &View<'_>,
        plan: &DecidedPlan,
        reasons: &mut Vec<Reason>,
    ) -> Option<Proposal> {
        if self.is_measuring() {
            return None;
        }
        if self.searches.has_phase_changed(view) {
            self.record_phases(view);
            return None;
        }
        let window = view.observation.window;
        if !self.is_known(view) || view.verdicts.is_paused(window) {
            return None;
        }

        let tasks = searched_tasks(view, &self.evidence.curves);
        // Without the sites of the last search, its results describe another machine.
        let last_results = self.searches.last_results.as_ref();
        let is_same_machine =
            last_results.is_none_or(|results| results.problem.sites == self.evidence.sites);
        if is_same_machine && !self.searches.is_outdated(&tasks, window) {
            return self.search_step(view, plan, reasons);
        }
        self.searches.record_start(tasks, window);
        self.search_plan(view, plan, reasons)
    }

    fn record_phases(&mut self, view: &View<'_>) {
        let window = view.observation.window;
        self.measured_windows.restart(0);
        self.forecast = None;
        self.evidence.arrivals.record_change(window);
        self.partition_climb.restart();
        let changed_tasks = self.searches.record_phases(view);
        self.evidence
            .phase_changed_at
            .extend(changed_tasks.into_iter().map(|task| (task, window)));
    }

    /// Searches for a plan that is better than the one in force, or partitions that may be.
    fn search_plan(
        &mut self,
        view: &View<'_>,
        plan: &DecidedPlan,
        reasons: &mut Vec<Reason>,
    ) -> Option<Proposal> {
        let uses_counts = self.parameters.includes(PolicyPart::Evidence);
        let input = self
            .searches
            .prepare(view, &plan.0, &mut self.evidence, uses_counts)?;
        let mut reported_forecasts = std::mem::take(&mut self.reported_forecasts);
        let finder = self.build_finder(view, plan);
        let proposal = finder.find_plan(&input, &mut reported_forecasts, reasons);

        let mechanisms = self.parameters.allowed_mechanisms(view);
        let can_explore = finder.has_time_to_confirm && mechanisms.contains(&Mechanism::Space);
        let proposal = proposal.or_else(|| {
            if !can_explore {
                return None;
            }
            let keep_probability = self.partition_climb.keep_probability();
            let exploration = finder.find_exploration(&input, keep_probability)?;
            let text = format!(
                "partitions that differ from the forecast at most by the errors of curves are measured: {:+.1} % expected",
                100.0 * exploration.gain
            );
            reasons.push(Reason::new(Vec::new(), text, Vec::new()));
            Some(exploration)
        });
        self.reported_forecasts = reported_forecasts;
        if proposal.is_some() {
            self.partition_climb.restart();
        } else {
            self.forecast = Some(self.forecast_of(&input, &input.current_layout));
        }
        self.searches.store_results(input, view.observation.window);
        proposal
    }

    fn forecast_of(&self, input: &SearchInput, layout: &SiteLayout) -> Forecast {
        forecast(&input.problem, layout, &input.score_cache, |task| {
            self.evidence.speeds.references_per_instr(task)
        })
    }

    /// Searches for a move of units between the partitions in force. Curves have errors, so the last step of a
    /// partition is found by measurement.
    fn search_step(
        &self,
        view: &View<'_>,
        plan: &DecidedPlan,
        reasons: &mut Vec<Reason>,
    ) -> Option<Proposal> {
        if plan.0.shares.is_empty() || !self.has_time_to_confirm(view) {
            return None;
        }
        let input = self.searches.last_results.as_ref()?;
        let max_units = self.partition_climb.max_step_units()?;
        let superseded_layouts = &self.partition_climb.superseded_layouts;
        let finder = self.build_finder(view, plan);
        let step = finder.find_step(input, superseded_layouts, max_units)?;
        let text = format!(
            "units are moved between partitions: {:+.1} % forecast",
            100.0 * step.gain
        );
        reasons.push(Reason::new(Vec::new(), text, Vec::new()));
        Some(step)
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
            has_time_to_confirm: self.has_time_to_confirm(view),
        }
    }

    /// Whether tasks will probably not change before measurements can confirm a change.
    fn has_time_to_confirm(&self, view: &View<'_>) -> bool {
        self.evidence
            .arrivals
            .has_time_for(SEARCH_INTERVAL_WINDOWS as u32, view.observation.window)
    }

    /// The plan for the next window: the proposed one if there is one, otherwise the kept one, with the terms of its
    /// verification.
    fn propose(
        &mut self,
        view: &View<'_>,
        kept_plan: DecidedPlan,
        proposal: Option<Proposal>,
    ) -> (Plan, Verification) {
        let (decided_plan, verification) = match proposal {
            Some(proposal) => self.open_change(proposal, kept_plan),
            None if self.is_measuring() => (kept_plan, Verification::Pending),
            None => (kept_plan, Verification::BeforeAndAfter),
        };
        let mut plan = decided_plan.0;
        // A plan that is only now proposed knows nothing of the confinements on the caches that it does not divide.
        let is_pending = matches!(verification, Verification::Pending);
        self.confinements
            .write_into_plan(view, &mut plan, is_pending);
        self.bandwidth_guard.write_into_plan(view, &mut plan);
        let goal_processes = self.bandwidth_guard.take_goal_processes();
        let verification = if goal_processes.is_empty() || self.is_measuring() {
            verification
        } else {
            self.open_throttle(goal_processes)
        };

        let window_ns = self.parameters.window_ns;
        plan.window = WindowLength::Time {
            ns: window_ns.max(view.capabilities.min_window_ns),
        };
        plan.penalties.clear();
        (plan, verification)
    }

    /// Leaves fewer CPUs for a program that breaks a promise to the verifier: others may pay if the promise gains.
    fn open_throttle(&mut self, goal_processes: Vec<ProcessId>) -> Verification {
        self.open_change = Some(OpenChange::Throttle);
        self.measured_windows
            .restart(self.parameters.warmup_windows);

        Verification::Proposed(Box::new(ProposedChange {
            method: VerificationMethod::Monitoring,
            forecast_gain: 0.0,
            min_gain: self.parameters.min_gain,
            speeds: Vec::new(),
            goal_processes,
        }))
    }

    /// Leaves a proposed plan to the verifier.
    fn open_change(
        &mut self,
        proposal: Proposal,
        plan_before: DecidedPlan,
    ) -> (DecidedPlan, Verification) {
        self.open_change = Some(OpenChange::Proposed {
            origin: proposal.origin,
            layout_before: proposal.layout_before,
            plan_before: Box::new(plan_before),
        });
        self.measured_windows
            .restart(self.parameters.warmup_windows);
        self.forecast = Some(proposal.forecast);

        let terms = ProposedChange {
            method: proposal.method,
            forecast_gain: proposal.gain,
            min_gain: self.parameters.min_gain,
            speeds: proposal.speeds,
            goal_processes: proposal.goal_processes,
        };
        (proposal.new_plan, Verification::Proposed(Box::new(terms)))
    }

    /// The probes of the next window: none while a change is measured.
    fn plan_probes(&mut self, view: &View<'_>) -> Vec<ProbeRequest> {
        if !self.parameters.includes(PolicyPart::Probes) {
            return Vec::new();
        }
        let mut limits = self.parameters.probe_limits();
        if self.is_measuring() {
            let TaskEvidence {
                probe_planner,
                curves,
                ..
            } = &mut self.evidence;
            probe_planner.withdraw_probes(view, curves, &limits);
            return Vec::new();
        }
        limits.may_pause_services &= !self.can_confine(view) || self.confinements.has_speeds();
        // No program waits for a result that the verifier would not let this policy use.
        limits.may_pause_services &= !view.verdicts.is_paused(view.observation.window);
        let mechanisms = self.parameters.allowed_mechanisms(view);
        let TaskEvidence {
            probe_planner,
            sites,
            speeds,
            curves,
            ..
        } = &mut self.evidence;
        let samples_sharing = mechanisms.contains(&Mechanism::Sharing);
        probe_planner.plan_probes(view, sites, (speeds, curves), &limits, samples_sharing)
    }
}

/// Number of undisturbed windows under the plan in force, with the same tasks and phases. A disturbance that does not
/// end, such as pages that may not move, is the normal state after [`PATIENCE_WINDOWS`].
#[derive(Clone, Copy, Default)]
struct MeasuredWindows {
    windows: u32,
    settling_windows: u32,
    /// Number of disturbed windows in a row.
    disturbed_windows: u64,
}

/// Smallest number of windows that determines speeds under the plan in force.
const MIN_MEASURED_WINDOWS: u32 = 4;

impl MeasuredWindows {
    /// Starts again, because the plan, the tasks or a phase changes now. The first `settling_windows` windows do not
    /// count.
    fn restart(&mut self, settling_windows: u32) {
        (self.windows, self.settling_windows) = (0, settling_windows);
    }

    fn observe(&mut self, is_undisturbed: bool) {
        self.disturbed_windows = if is_undisturbed {
            0
        } else {
            self.disturbed_windows + 1
        };
        if is_undisturbed || self.disturbed_windows > PATIENCE_WINDOWS {
            self.add();
        }
    }

    /// An undisturbed window settles first, and then counts.
    fn add(&mut self) {
        if self.settling_windows > 0 {
            self.settling_windows -= 1;
        } else {
            self.windows = self.windows.saturating_add(1);
        }
    }

    fn is_enough(self) -> bool {
        self.windows >= MIN_MEASURED_WINDOWS
    }
}

pub(super) fn build(parameters: &str, seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(Auto::new(Parameters::parse(parameters)?, seed)))
}

#[cfg(test)]
mod tests {
    use super::model::search_input::SearchedTask;
    use super::*;
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches, observation_fixture,
    };
    use cachemate_core::{
        CacheId, CacheLevel, CacheShare, CounterEvent, CpuId, EventCount, EventCounts, Fact,
        FactSource, GroupId, IndexSet, Observation, PendingItem, PlanItem, ProbeId, ProbeKind,
        ProcessId, Profile, Profiles, ShareMember, TaskId, Units, Verdicts,
    };
    use cachemate_locality::profilers::AVERAGED;

    fn searched_task(id: u32, phase_number: u32, has_curve: bool) -> SearchedTask {
        SearchedTask {
            task: TaskId(id),
            phase_number,
            has_curve,
        }
    }

    /// Two counted tasks that run all the time.
    fn window_fixture(window: u64) -> Observation {
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
        observation
    }

    /// Two tasks of an unknown curve, the first of them in its second phase: returns the decision if this plan was the
    /// previous one.
    fn decide_window(
        policy: &mut Auto,
        observation: Observation,
        previous_plan: &Plan,
        verdicts: &dyn Verdicts,
    ) -> Decision {
        let (topology, can) = (
            last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
            capabilities_fixture(&[Ability::Ways]),
        );
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

    /// A plan that gives these processes a share each.
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
        policy.searches.record_start(
            vec![searched_task(0, 0, true), searched_task(1, 0, true)],
            1,
        );
        assert_eq!(
            decide_window(&mut policy, window_fixture(2), &plan, &())
                .plan
                .shares,
            plan.shares
        );
        assert_eq!(
            policy.evidence.phase_changed_at,
            [(TaskId(0), 2)].into(),
            "the search waits for its new curve"
        );
    }

    /// Does a proposal on a host that only observes stay shown after a search that had no model to compare plans by?
    #[test]
    fn a_search_without_models_leaves_a_proposal_shown() {
        let mut policy = Auto::new(Parameters::default(), 1);
        let mut plan = divided_plan(&[0, 1]);
        for window in 1..=2 * PATIENCE_WINDOWS {
            let mut observation = window_fixture(window);
            observation.applied.is_only_proposed = true;
            let decided_plan = decide_window(&mut policy, observation, &plan, &()).plan;
            assert_eq!(decided_plan.shares, plan.shares, "in window {window}");
            plan = decided_plan;
        }
        let tasks = [searched_task(0, 1, false), searched_task(1, 0, false)];
        assert!(
            !policy.searches.is_outdated(&tasks, 2 * PATIENCE_WINDOWS),
            "a search began"
        );
    }

    /// Whether a search has begun within this number of windows, if these are changed so.
    fn has_searched_within(
        windows: u64,
        abilities: &[Ability],
        mut change: impl FnMut(u64, &mut ViewFixture),
    ) -> bool {
        let mut fixture = ViewFixture::new(
            last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
            capabilities_fixture(abilities),
            0,
        );
        let mut policy = Auto::new(Parameters::default(), 1);
        (1..=windows).any(|window| {
            fixture.observation = window_fixture(window);
            change(window, &mut fixture);
            fixture.decide(&mut policy, &NullPredictor);
            let view = fixture.view(&NullPredictor);
            let tasks = searched_tasks(&view, &policy.evidence.curves);
            !policy.searches.is_outdated(&tasks, window)
        })
    }

    /// A program whose phases are averaged runs for some windows, and then sleeps: does a search begin all the same?
    #[test]
    fn does_a_sleeping_program_with_fast_phases_stop_all_searches() {
        let is_searched = |windows| {
            has_searched_within(windows, &[], |window, fixture| {
                let mut profile = Profile::default();
                profile.phase.kind = Some(Fact::new(AVERAGED, FactSource::PhaseDetector, 0));
                fixture.profiles = [(TaskId(0), Profile::default()), (TaskId(1), profile)].into();
                if window > 5 {
                    fixture.observation.tasks[1].on_cpu_ns.clear();
                    fixture.observation.tasks[1].counts = EventCounts::default();
                }
            })
        };
        assert!(!is_searched(PATIENCE_WINDOWS - 1), "its average is awaited");
        assert!(is_searched(PATIENCE_WINDOWS + 2));
    }

    /// Pages that may never move are pending for ever: does a search begin all the same?
    #[test]
    fn do_pages_that_never_move_stop_all_searches() {
        assert!(has_searched_within(
            2 * PATIENCE_WINDOWS,
            &[],
            |_, fixture| {
                fixture.observation.applied.pending.push(PendingItem {
                    item: PlanItem::Plan,
                    done: 1,
                    total: Some(2),
                });
            }
        ));
    }

    /// A trace runs in every window, as on a host with hundreds of programs: does a search begin after its patience?
    #[test]
    fn does_tracing_of_many_programs_delay_the_search_beyond_its_patience() {
        let can_trace = [Ability::TraceAddresses];
        let windows = PATIENCE_WINDOWS + u64::from(MIN_MEASURED_WINDOWS) + 2;
        assert!(has_searched_within(windows, &can_trace, |_, fixture| {
            let kind = ProbeKind::MissTrace {
                task: TaskId(0),
                entries: 1,
                includes_code: false,
            };
            let (id, budget_ns) = (ProbeId(9), 1);
            let probe = ProbeRequest {
                id,
                kind,
                budget_ns,
            };
            fixture.previous_plan.probes = vec![probe];
        }));
    }

    /// The verdict on a change that was not measured to its end.
    struct InterruptedVerdict(ChangeVerdict);

    impl Verdicts for InterruptedVerdict {
        fn latest(&self) -> Option<&ChangeVerdict> {
            Some(&self.0)
        }
    }

    /// If a measurement is interrupted, does the plan of a search stay in force, while the plan before replaces a step?
    #[test]
    fn a_step_that_is_not_measured_ends() {
        let (before, after) = (divided_plan(&[0]), divided_plan(&[0, 1]));
        let verdict = InterruptedVerdict(ChangeVerdict {
            outcome: VerificationOutcome::Interrupted,
            plan: after.clone(),
            forecast_gain: Some(0.02),
            measured: None,
        });

        for (origin, expected) in [
            (ProposalOrigin::Plan, &after),
            (ProposalOrigin::Step, &before),
        ] {
            let mut policy = Auto::new(Parameters::default(), 1);
            policy.open_change = Some(OpenChange::Proposed {
                origin,
                layout_before: SiteLayout::default(),
                plan_before: Box::new(DecidedPlan(before.clone())),
            });
            assert_eq!(
                decide_window(&mut policy, window_fixture(2), &after, &verdict)
                    .plan
                    .shares,
                expected.shares
            );
            assert!(!policy.is_measuring());
        }
    }

    /// Are speeds known after enough undisturbed windows, not counting those in which the machine settles?
    #[test]
    fn settling_windows_do_not_count() {
        let mut measured = MeasuredWindows::default();
        measured.restart(2);
        let mut reports = Vec::new();
        for _ in 0..7 {
            measured.add();
            reports.push(measured.is_enough());
        }
        assert_eq!(reports, [false, false, false, false, false, true, true]);
    }
}
