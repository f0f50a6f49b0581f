//! Shares of every last-level cache, sized online from miss-rate curves (papers CP and RM; thesis 5.4, 7.3).
//!
//! Problem: programs on one cache displace lines of other programs without reusing their own; a partition helps only if
//! its sizes are right and kept up to date, and if it is worth its cost. Method, for each cache:
//! 1. Request a trace of every process without a curve in its present phase, a few at once. A phase of a known kind has
//!    the curve of that kind, so if kinds of phases are known, a trace waits until the phase proves to be new.
//! 2. Once all processes have a curve, [`allocate`] sizes the shares. The predictor forecasts the performance of all
//!    processes under these shares, under the present ones, and without any. The best of the three is taken if it gains
//!    enough and, if pages have to be copied, pays for the copying in time; a goal that is missed now is reason enough.
//!    Measured speeds under the present shares replace their forecast.
//! 3. Put the shares on trial: old, new, old again, with speeds measured in each ([`crate::partition::ab_test`]). New
//!    shares are dropped unless they measure better by the smallest gain; shares in force are tested again from time to
//!    time ([`crate::partition::share_controller`]).
//!
//! Properties: without evidence nothing changes; a single process is confined only for the sake of a goal; newcomers
//! are unrestricted until their curve is known; two programs of one time-share group have a penalty. Tasks are not
//! placed, so this policy can be combined with any placement.

use std::collections::BTreeMap;

use cachemate_core::{
    Ability, Cache, CacheId, CacheShare, CoRunPenalty, Decision, GroupId, IndexSet, PageMigration, Plan, Policy,
    ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, ProcessId, Profiles, Reason, ReasonKind, ShareMember, TaskId,
    TaskSample, Verification, View, WindowLength,
};
use serde::Deserialize;

use super::static_partition::{MigrationMode, to_units};
use super::{ParameterError, ParameterRange, parameters};
use crate::partition::ab_test::AbTest;
use crate::partition::allocate::{Allocation, AllocationLimits, Claimant, PartitionKind, SizingObjective, allocate};
use crate::partition::demand_curve::DemandCurve;
use crate::partition::partitioned_cache::{CacheProcess, PartitionedCache, units_of};
use crate::partition::share_controller::{self, ShareController, ShareVerdict, TrialStatus};
use crate::partition::speed_history::SpeedRecord;
use crate::partition::units::{PartitionUnits, assign, pages_to_move};

/// Parameters; see the policy's page.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    pub objective: SizingObjective,
    pub page_migration: MigrationMode,
    /// Entries of a trace; 0 if curves come from another source.
    pub trace_entries: u32,
    /// Whether instruction fetches are traced too: data alone understates the space of a program with much code.
    pub trace_code: bool,
    /// Processor time that one trace may take.
    pub trace_budget_ns: u64,
    /// A program is pooled if one unit slows it down, relative to the whole cache, by no more than this share.
    pub insensitive_below: f64,
    /// Smallest forecast gain of a change, as a share.
    pub min_gain: f64,
    /// Time within which copied pages must pay off; at most the time that programs stay in a phase.
    pub payback_ns: u64,
    /// Cost of a miss if stalls are not counted; `None` means the reference predictor's, from the machine.
    pub miss_penalty_cycles: Option<f64>,
    /// Smallest number of windows after a change until speeds count, and number of windows of an arm of the trial; 0
    /// means no trials.
    pub warmup_windows: u32,
    pub measure_windows: u32,
    /// Share of the time that trials may cost.
    pub trial_share: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 100_000_000,
            objective: SizingObjective::default(),
            page_migration: MigrationMode::All,
            trace_entries: 163_840,
            trace_code: true,
            trace_budget_ns: 1_000_000_000,
            insensitive_below: 0.02,
            min_gain: 0.01,
            payback_ns: 10_000_000_000,
            miss_penalty_cycles: None,
            warmup_windows: 1,
            measure_windows: 3,
            trial_share: 0.01,
        }
    }
}

impl Parameters {
    fn trial_terms(&self, domain: &PartitionedCache<'_>) -> share_controller::TrialTerms {
        let lengths = domain.lengths(self.warmup_windows, self.measure_windows);
        share_controller::TrialTerms { lengths, min_gain: self.min_gain, trial_share: self.trial_share }
    }

    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parsed: Parameters = parameters(text)?;
        ParameterRange::OneOrMore.check([("window_ns", parsed.window_ns as f64)])?;
        ParameterRange::Above(0.0).check([("trial_share", parsed.trial_share)])?;
        ParameterRange::FromZero.check([
            ("insensitive_below", parsed.insensitive_below),
            ("min_gain", parsed.min_gain),
            ("miss_penalty_cycles", parsed.miss_penalty_cycles.unwrap_or(1.0)),
        ])?;
        Ok(parsed)
    }
}

/// Number of changes of the shares during a trial that is adopted.
const CHANGES_OF_A_TRIAL: f64 = 3.0;
/// Number of processes of one cache that are traced at once.
const TRACED_AT_ONCE: usize = 4;

struct CacheSizing {
    parameters: Parameters,
    caches: BTreeMap<CacheId, ShareController>,
    home: BTreeMap<ProcessId, CacheId>,
    probes: BTreeMap<TaskId, (u32, ProbeId)>,
    next_probe: u32,
    /// Whether the kind of some phase is known; the kinds of other phases will then become known too.
    phase_kinds_known: bool,
}

impl Policy for CacheSizing {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.phase_kinds_known |= view.profiles.values().any(|profile| profile.phase.kind.is_some());
        let mut plan = Plan::idle(WindowLength::Time { ns: self.parameters.window_ns });
        let mut why = Vec::new();
        for domain in self.domains(view) {
            let remembered = self.caches.entry(domain.cache.id).or_default();
            let held = remembered.observe(view, &domain, self.parameters.trial_terms(&domain));
            let shares = self.size_caches(view, &domain, held, &mut why);
            plan.penalties.extend(penalties(view, &domain, &shares));
            plan.shares.extend(shares);
            plan.probes.extend(self.probes_of(view, &domain));
        }
        self.probes.retain(|task, _| view.observation.tasks.iter().any(|sample| sample.task == *task));
        Decision { verification: self.verification(&why), ..Decision::new(plan, why) }
    }
}

impl CacheSizing {
    /// Returns the verification terms. A trial on any cache verifies the whole plan; the shares of all other caches do
    /// not change.
    fn verification(&self, reasons: &[Reason]) -> Verification {
        if self.caches.values().any(ShareController::is_on_trial) {
            Verification::Trial
        } else if reasons.iter().any(|reason| reason.kind == ReasonKind::TrialVerdict) {
            Verification::Measured
        } else {
            Verification::BeforeAndAfter
        }
    }

    /// Returns every last-level cache that can be partitioned, with its processes.
    fn domains<'a>(&mut self, view: &'a View<'a>) -> Vec<PartitionedCache<'a>> {
        let mut processes: Vec<CacheProcess<'a>> = Vec::new();
        for task in view.movable_tasks() {
            // A process is left alone if any of its threads must not be changed.
            let fixed = view.observation.tasks.iter().any(|other| other.process == task.process && other.unmovable);
            let phase = view.profiles.get(&task.task).map_or(0, |profile| profile.phase_number);
            match processes.iter_mut().find(|present| present.process == task.process) {
                Some(present) => {
                    present.tasks.push(task);
                    present.phase = present.phase.max(phase);
                }
                None if !fixed => processes.push(CacheProcess { process: task.process, tasks: vec![task], phase }),
                None => {}
            }
        }
        let caches: Vec<(&Cache, PartitionUnits)> = view
            .topology
            .caches
            .iter()
            .filter(|cache| cache.last_level && cache.size_bytes.is_some())
            .filter_map(|cache| {
                let partitions = view.capabilities.partitions.iter().filter(|(id, _)| *id == cache.id);
                Some((cache, PartitionUnits::common_units(partitions.map(|(_, partition)| partition))?))
            })
            .collect();
        self.home.retain(|process, _| processes.iter().any(|present| present.process == *process));
        let mut domains: Vec<PartitionedCache<'a>> =
            caches.iter().map(|&(cache, divided)| PartitionedCache::new(cache, divided, view.topology)).collect();
        for present in processes {
            if let Some(cache) = present.home_cache(&caches) {
                self.home.insert(present.process, cache);
            }
            let home = self.home.get(&present.process);
            if let Some(domain) = domains.iter_mut().find(|domain| Some(&domain.cache.id) == home) {
                domain.present.push(present);
            }
        }
        domains
    }

    /// Computes the shares for the next window.
    fn size_caches(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        held: Vec<CacheShare>,
        why: &mut Vec<Reason>,
    ) -> Vec<CacheShare> {
        let parameters = &self.parameters;
        let Some(remembered) = self.caches.get_mut(&domain.cache.id) else { return held };
        let undivided = || domain.undivided_shares(parameters.page_migration.into());
        if !domain.needs_partition() {
            return if held.is_empty() { held } else { undivided() };
        }
        match remembered.judge(view, domain, &held, parameters.trial_terms(domain)) {
            Some(TrialStatus::GoesOn(shares)) => return shares,
            Some(TrialStatus::Over(verdict)) => {
                why.push(reason(domain, &verdict));
                return verdict.shares;
            }
            None => {}
        }
        if remembered.is_settling() && !domain.has_goals() && parameters.measure_windows > 0 {
            return held;
        }
        let claimants: Option<Vec<Claimant>> =
            domain.present.iter().map(|present| claimant(view, domain, present, remembered, parameters)).collect();
        let Some(mut claimants) = claimants.filter(|_| domain.has_goals() || remembered.can_start_trial()) else {
            return held;
        };
        raise_floors_of_unmet_goals(remembered, domain, &mut claimants, &held, parameters, why);
        let payback_ns = remembered.expected_lifetime_ns(parameters.window_ns).min(parameters.payback_ns as f64);
        let outlook = SizingForecast { view, domain, claimants: &claimants, speeds: &remembered.speeds, payback_ns };
        let trial = outlook.trial(parameters);
        let unproven = trial.clone().filter(|_| !domain.is_undivided(&held));
        if let Some(trial) = unproven.clone().filter(|_| remembered.is_proof_next()) {
            remembered.start_trial(held.clone(), undivided(), held.clone(), trial, true);
            return held;
        }
        let mut explained = Vec::new();
        let wanted = wanted_shares(view, domain, &claimants, &held, parameters, &mut explained);
        let chosen = wanted.and_then(|wanted| outlook.choose(parameters, &held, wanted, why));
        match (chosen, trial, unproven) {
            (Some(chosen), Some(trial), _) => {
                why.extend(explained);
                let back = if held.is_empty() { undivided() } else { held.clone() };
                let proof = domain.is_undivided(&chosen);
                remembered.start_trial(held.clone(), chosen, back, trial, proof);
                held
            }
            (Some(chosen), None, _) => {
                why.extend(explained);
                remembered.record_change();
                chosen
            }
            (None, _, Some(trial)) => {
                remembered.start_trial(held.clone(), undivided(), held.clone(), trial, true);
                held
            }
            (None, _, None) => held,
        }
    }

    /// Returns the processes to trace, a few at once on each cache, because one that rarely misses takes long to fill
    /// its log and must not delay the others.
    fn probes_of(&mut self, view: &View<'_>, domain: &PartitionedCache<'_>) -> Vec<ProbeRequest> {
        let able = view.capabilities.can(Ability::TraceAddresses);
        // If no trial may begin yet, no curve is needed.
        let rests =
            !domain.has_goals() && self.caches.get(&domain.cache.id).is_some_and(|cache| !cache.can_start_trial());
        if !able || self.parameters.trace_entries == 0 || rests || !domain.needs_partition() {
            return Vec::new();
        }
        let phase_kinds_known = self.phase_kinds_known;
        let unknown = domain.present.iter().filter(|present| {
            let known = |task: &&TaskSample| {
                let untold = |profile: &cachemate_core::Profile| {
                    phase_kinds_known && profile.phase_number > 0 && profile.phase.kind.is_none()
                };
                let is_known = |profile| untold(profile) || profile.misses_per_kilo_instr().is_some();
                view.profiles.get(&task.task).is_some_and(is_known)
            };
            !present.tasks.iter().any(known)
        });
        unknown.take(TRACED_AT_ONCE).map(|unknown| self.probe(view, unknown)).collect()
    }

    /// Returns the trace request of one process; the same as before until it is answered.
    fn probe(&mut self, view: &View<'_>, unknown: &CacheProcess<'_>) -> ProbeRequest {
        // The thread that ran most represents its process.
        let running_ns = |task: &TaskSample| task.ran_ns();
        let most = unknown.tasks.iter().copied().reduce(|a, b| if running_ns(b) > running_ns(a) { b } else { a });
        let busiest = most.unwrap_or(unknown.tasks[0]);
        let probe = unknown.tasks.iter().find_map(|task| {
            let (phase, probe) = *self.probes.get(&task.task)?;
            let answered = view.observation.probe_results.iter().any(|answer| {
                let traced = matches!(&answer.evidence, ProbeEvidence::Trace { .. });
                answer.probe == probe && answer.complete && traced
            });
            (phase == unknown.phase && !answered).then_some((task.task, probe))
        });
        let (task, id) = probe.unwrap_or_else(|| {
            let id = ProbeId(self.next_probe);
            self.next_probe += 1;
            self.probes.insert(busiest.task, (unknown.phase, id));
            (busiest.task, id)
        });
        let Parameters { trace_entries: entries, trace_code: code, .. } = self.parameters;
        let probe_kind = ProbeKind::MissTrace { task, entries, includes_code: code };
        ProbeRequest { id, kind: probe_kind, budget_ns: self.parameters.trace_budget_ns }
    }
}

fn claimant(
    view: &View<'_>,
    domain: &PartitionedCache<'_>,
    present: &CacheProcess<'_>,
    remembered: &ShareController,
    parameters: &Parameters,
) -> Option<Claimant> {
    let speed = remembered.speeds.speed(present.process);
    let bytes = domain.cache.size_bytes?;
    let task_demand = |task: &&TaskSample| {
        let profile = view.profiles.get(&task.task)?;
        let penalty = parameters.miss_penalty_cycles.or(view.predictor.miss_penalty_cycles())?;
        DemandCurve::from_profile(profile, speed, penalty, bytes, domain.divided.units())
    };
    let threads: Vec<DemandCurve> = present.tasks.iter().filter_map(task_demand).collect();
    let goal = present.goal();
    let priority = if goal.priority.is_finite() && goal.priority > 0.0 { goal.priority } else { 1.0 };
    let min_units = remembered.insufficient_units.get(&present.process).map_or(1, |units| units + 1);
    let space = remembered.apply_bounds(present.process, DemandCurve::mean(&threads)?);
    Some(Claimant { space, priority, max_slowdown: goal.max_slowdown, min_units })
}

/// Returns the group's id: the pool is group 0 of its cache; every other group is named after its first process.
fn group_id(kind: PartitionKind, first: ProcessId) -> GroupId {
    GroupId(if kind == PartitionKind::Pool { 0 } else { first.0 + 1 })
}

fn wanted_shares(
    view: &View<'_>,
    domain: &PartitionedCache<'_>,
    claimants: &[Claimant],
    held: &[CacheShare],
    parameters: &Parameters,
    why: &mut Vec<Reason>,
) -> Option<Vec<CacheShare>> {
    let online = view.topology.cpus.iter().filter(|cpu| cpu.online && domain.cache.cpus.contains(cpu.id.0)).count();
    let threads = domain.present.iter().map(|present| present.tasks.len()).sum::<usize>();
    let terms = AllocationLimits {
        objective: parameters.objective,
        units: domain.divided.units(),
        min_units: domain.divided.min_units(),
        max_groups: domain.divided.max_groups(),
        insensitive_below: parameters.insensitive_below,
        // By CPU, only single-threaded programs can be distinguished. Lanes are used only if the machine keeps their
        // members from running together.
        at_once: if threads == claimants.len() && keeps_penalties(view) {
            online as u32
        } else {
            claimants.len() as u32
        },
    };
    let allocation = allocate(claimants, &terms).ok()?;
    explain_allocation(domain, claimants, &allocation, why);
    let id = |group: &crate::partition::allocate::PartitionGroup| {
        group_id(group.kind, domain.present[group.members[0]].process)
    };
    let now = |group: GroupId| held.iter().find(|share| share.group == group).map(|share| units_of(share).clone());
    let held_units: Vec<IndexSet> = allocation.groups.iter().map(|group| now(id(group)).unwrap_or_default()).collect();
    let sizes: Vec<u32> = allocation.groups.iter().map(|group| group.units).collect();
    let units = assign(&held_units, &sizes, &domain.divided);
    let moving: PageMigration = parameters.page_migration.into();
    let share = |(group, units): (&crate::partition::allocate::PartitionGroup, IndexSet)| CacheShare {
        group: id(group),
        members: group.members.iter().map(|&index| ShareMember::Process(domain.present[index].process)).collect(),
        cache: domain.cache.id,
        units: to_units(units, &domain.divided, moving),
    };
    Some(allocation.groups.iter().zip(units).map(share).collect())
}

fn explain_allocation(
    domain: &PartitionedCache<'_>,
    claimants: &[Claimant],
    allocation: &Allocation,
    why: &mut Vec<Reason>,
) {
    let task = |at: usize| domain.present[at].tasks[0].task;
    for &index in &allocation.lowered_floors {
        let limit = claimants[index].max_slowdown.unwrap_or(0.0);
        let text = "{0} cannot meet its goal: the goals together do not fit in one cache".to_string();
        why.push(Reason {
            kind: ReasonKind::Explanation,
            tasks: vec![task(index)],
            text,
            numbers: vec![("max_slowdown".to_string(), limit)],
        });
    }
    if let Some(cost) = allocation.floors_cost {
        let tasks = (0..claimants.len()).filter(|&index| claimants[index].max_slowdown.is_some()).map(task).collect();
        let text = "goals slow the other programs on this cache down, by the objective".to_string();
        why.push(Reason {
            kind: ReasonKind::Explanation,
            tasks,
            text,
            numbers: vec![("objective_lost".to_string(), cost)],
        });
    }
}

/// Forecasts for all processes on a cache.
struct SizingForecast<'a> {
    view: &'a View<'a>,
    domain: &'a PartitionedCache<'a>,
    claimants: &'a [Claimant],
    /// Speeds under the present shares.
    speeds: &'a SpeedRecord,
    /// Time within which a change must pay off; a gain ends with the phase for which it was computed.
    payback_ns: f64,
}

impl SizingForecast<'_> {
    /// Returns the performance under the present shares, measured as far as possible.
    fn current(&self, held: &[CacheShare]) -> Option<Vec<(f64, f64)>> {
        let forecast = self.speeds_under(held)?;
        let measured = |(present, estimate): (&CacheProcess<'_>, (f64, f64))| match self.speeds.speed(present.process) {
            Some(speed) => (speed.misses_per_kilo_instr.unwrap_or(estimate.0), speed.cycles_per_instr),
            None => estimate,
        };
        Some(self.domain.present.iter().zip(forecast).map(measured).collect())
    }

    /// Returns misses per thousand instructions and cycles per instruction of each claimant under these shares, if all
    /// run on this cache's CPUs. Tasks are renamed by order of arrival, so that no tie breaks by an id.
    fn speeds_under(&self, shares: &[CacheShare]) -> Option<Vec<(f64, f64)>> {
        let bytes = self.domain.cache.size_bytes?;
        let mut profiles = Profiles::new();
        let mut plan = Plan::idle(self.view.previous_plan.window);
        plan.shares = shares.to_vec();
        for (index, (claimant, present)) in self.claimants.iter().zip(&self.domain.present).enumerate() {
            let mut profile = claimant.space.to_profile(self.domain.cache.level, bytes);
            profile.process = Some(present.process);
            profiles.insert(TaskId(index as u32), profile);
            plan.affinity.insert(TaskId(index as u32), self.domain.cache.cpus.clone());
        }
        let forecast = self.view.predictor.forecast(&View { profiles: &profiles, ..*self.view }, &plan);
        let forecast_of = |index: usize| {
            let task_forecast = forecast.tasks.get(&TaskId(index as u32))?;
            Some((task_forecast.misses_per_kilo_instr?.value, 1.0 / task_forecast.instr_per_cycle?.value))
        };
        let outlook: Option<Vec<(f64, f64)>> = (0..self.claimants.len()).map(forecast_of).collect();
        outlook.filter(|all| all.iter().all(|(misses, cycles)| misses.is_finite() && cycles.is_finite()))
    }

    fn broken_promises(&self, outlook: &[(f64, f64)]) -> usize {
        let broken = |(claimant, &(_, cycles)): (&Claimant, &(f64, f64))| {
            claimant.max_slowdown.is_some_and(|limit| claimant.misses_goal(cycles, limit))
        };
        self.claimants.iter().zip(outlook).filter(|both| broken(*both)).count()
    }

    /// Returns the wanted shares, or no shares; `None` if the present ones are good enough.
    fn choose(
        &self,
        parameters: &Parameters,
        held: &[CacheShare],
        wanted: Vec<CacheShare>,
        why: &mut Vec<Reason>,
    ) -> Option<Vec<CacheShare>> {
        let objective = parameters.objective;
        let now = self.current(held)?;
        let score = |outlook: &[(f64, f64)]| objective.score(self.claimants, outlook);
        let mut candidates = vec![wanted];
        if objective != SizingObjective::LeastSpace && !self.domain.is_undivided(held) {
            candidates.push(self.domain.undivided_shares(parameters.page_migration.into()));
        }
        let outlooks: Option<Vec<_>> = candidates.iter().map(|shares| self.speeds_under(shares)).collect();
        let outlooks = outlooks?;
        let best = (0..candidates.len()).reduce(|a, b| {
            let key = |index: usize| (self.broken_promises(&outlooks[index]), score(&outlooks[index]));
            if key(b) < key(a) { b } else { a }
        })?;
        let (chosen, outlook) = (candidates.swap_remove(best), &outlooks[best]);
        if chosen == held {
            return None;
        }
        let mends = self.broken_promises(outlook) < self.broken_promises(&now);
        let breaks = self.broken_promises(outlook) > self.broken_promises(&now);
        let gain = (score(&now) - score(outlook)) / score(&now).abs().max(1e-9);
        let changes = if self.trial(parameters).is_some() { CHANGES_OF_A_TRIAL } else { 1.0 };
        let cost_ns = changes * self.cost_ns(&chosen);
        // Time that all processes together save until the payback time.
        let saved = now.iter().zip(outlook).map(|(now, then)| 1.0 - then.1 / now.1).sum::<f64>();
        let earned_ns = saved * self.payback_ns;
        let worth = match objective {
            // The same goals in less space: only the copying counts against it.
            SizingObjective::LeastSpace => !breaks && cost_ns <= parameters.min_gain * self.payback_ns,
            SizingObjective::Fairness => !breaks && gain >= parameters.min_gain && cost_ns <= self.payback_ns,
            _ => !breaks && gain >= parameters.min_gain && earned_ns > cost_ns,
        };
        if !(mends || worth) {
            return None;
        }
        let tasks: Vec<TaskId> = self.domain.present.iter().map(|present| present.tasks[0].task).collect();
        let shares: Vec<String> = chosen.iter().map(|share| units_of(share).to_string()).collect();
        let text = if self.domain.is_undivided(&chosen) {
            format!("cache {} is better shared than partitioned", self.domain.cache.id.0)
        } else {
            format!("cache {} is partitioned into {}", self.domain.cache.id.0, shares.join(" | "))
        };
        let numbers = [("gain_share", gain), ("cost_ns", cost_ns), ("earned_within_horizon_ns", earned_ns)];
        let numbers = numbers.map(|(name, value)| (name.to_string(), value)).to_vec();
        why.push(Reason { kind: ReasonKind::Explanation, tasks, text, numbers });
        Some(chosen)
    }

    /// Starts a trial. Only sums of speeds can be compared by measurement, and only if speeds are measured.
    fn trial(&self, parameters: &Parameters) -> Option<AbTest> {
        let by_speed = matches!(
            parameters.objective,
            SizingObjective::WeightedSpeedup | SizingObjective::Stalls | SizingObjective::Misses
        );
        let known = self.domain.present.iter().all(|present| self.speeds.speed(present.process).is_some());
        let judged = by_speed && known && !self.domain.has_goals() && parameters.measure_windows > 0;
        let weight = |(present, claimant): (&CacheProcess<'_>, &Claimant)| {
            (present.process, claimant.priority * claimant.space.whole_cycles())
        };
        let weights = || self.domain.present.iter().zip(self.claimants).map(weight).collect();
        judged.then(|| AbTest::new(parameters.trial_terms(self.domain).lengths, weights()))
    }

    /// Returns the cost of copying pages into these shares; 0 if units are ways or frames are unknown.
    fn cost_ns(&self, shares: &[CacheShare]) -> f64 {
        let PartitionUnits::Colors { move_page_ns, .. } = self.domain.divided else { return 0.0 };
        let mut pages = 0;
        for present in &self.domain.present {
            let share = shares.iter().find(|share| share.members.contains(&ShareMember::Process(present.process)));
            let known = present.tasks.iter().find_map(|task| task.pages_per_color.as_ref());
            if let Some((share, known)) = share.zip(known) {
                pages += pages_to_move(known, units_of(share));
            }
        }
        pages as f64 * move_page_ns
    }
}

/// Number of undisturbed windows after which a goal counts as missed.
const BROKEN_WINDOWS: u32 = 3;

/// Raises the floors of goals that measurements show to be missed: they need more than the present share, whatever the
/// curve predicts.
fn raise_floors_of_unmet_goals(
    remembered: &mut ShareController,
    domain: &PartitionedCache<'_>,
    claimants: &mut [Claimant],
    held: &[CacheShare],
    parameters: &Parameters,
    why: &mut Vec<Reason>,
) {
    if remembered.speeds.windows < BROKEN_WINDOWS.max(parameters.measure_windows) {
        return;
    }
    for (claimant, present) in claimants.iter_mut().zip(&domain.present) {
        let measured = remembered.speeds.speed(present.process).map(|speed| speed.cycles_per_instr);
        let share = held.iter().find(|share| share.members.contains(&ShareMember::Process(present.process)));
        let (Some(limit), Some(cycles), Some(share)) = (claimant.max_slowdown, measured, share) else {
            continue;
        };
        if !claimant.misses_goal(cycles, limit) {
            continue;
        }
        let units = units_of(share).count();
        claimant.min_units = claimant.min_units.max(units + 1);
        let news = remembered.insufficient_units.insert(present.process, units) != Some(units);
        if news && units + (held.len() as u32 - 1) * domain.divided.min_units() >= domain.divided.units() {
            let text = "{0} misses its goal with all the space that it can have: more space cannot meet it";
            let slower = cycles / claimant.space.whole_cycles() - 1.0;
            let numbers = vec![("slower_than_alone_share".to_string(), slower)];
            let tasks = vec![present.tasks[0].task];
            why.push(Reason { kind: ReasonKind::Explanation, tasks, text: text.to_string(), numbers });
        }
    }
}

/// The verdict of a trial as a reason.
fn reason(domain: &PartitionedCache<'_>, verdict: &ShareVerdict) -> Reason {
    let text = match (verdict.proof, verdict.adopted, verdict.ratio) {
        (false, true, _) => "the trial of new shares of cache {} made its programs faster: they are kept",
        (false, false, Some(_)) => {
            "the trial of new shares of cache {} made its programs no faster: the old shares are kept"
        }
        (true, true, _) => {
            "the repeated trial of the shares of cache {} shows its programs as fast without: it is shared"
        }
        (true, false, Some(_)) => {
            "the repeated trial of the shares of cache {} shows its programs faster with them: they are kept"
        }
        (_, false, None) => "the trial of the shares of cache {} was inconclusive: the old shares are kept",
    };
    let text = text.replace("{}", &domain.cache.id.0.to_string());
    let tasks = domain.present.iter().map(|present| present.tasks[0].task).collect();
    let ratio_numbers =
        verdict.ratio.map(|found| [("speed_over_before", found.ratio), ("standard_error", found.error)]);
    let numbers = ratio_numbers.into_iter().flatten().chain([("lost_windows", verdict.lost_windows)]);
    let numbers = numbers.map(|(name, value)| (name.to_string(), value)).collect();
    Reason { kind: ReasonKind::TrialVerdict, tasks, text, numbers }
}

fn keeps_penalties(view: &View<'_>) -> bool {
    view.capabilities.can(Ability::Penalties)
}

/// Returns penalties that keep the programs of one time-share group, with all their threads, from running together.
fn penalties(view: &View<'_>, domain: &PartitionedCache<'_>, shares: &[CacheShare]) -> Vec<CoRunPenalty> {
    if !keeps_penalties(view) {
        return Vec::new();
    }
    let mut penalties = Vec::new();
    for share in shares.iter().filter(|share| share.group != GroupId(0) && share.members.len() > 1) {
        let inside: Vec<&CacheProcess<'_>> = domain
            .present
            .iter()
            .filter(|present| share.members.contains(&ShareMember::Process(present.process)))
            .collect();
        for (index, a) in inside.iter().enumerate() {
            for b in &inside[index + 1..] {
                for (first, other) in a.tasks.iter().flat_map(|first| b.tasks.iter().map(move |other| (first, other))) {
                    penalties.push(CoRunPenalty { tasks: (first.task, other.task), penalty: 1.0 });
                }
            }
        }
    }
    penalties
}

/// Builds the policy for the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(CacheSizing {
        parameters: Parameters::parse(parameters)?,
        caches: BTreeMap::new(),
        home: BTreeMap::new(),
        probes: BTreeMap::new(),
        next_probe: 0,
        phase_kinds_known: false,
    }))
}

#[cfg(test)]
#[path = "cache_sizing_tests.rs"]
mod tests;
