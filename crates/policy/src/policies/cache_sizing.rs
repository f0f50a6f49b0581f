//! Shares of every last-level cache, sized online from miss-rate curves (papers CP and RM; thesis 5.4, 7.3).
//!
//! Problem: programs on one cache take from each other what some need and others do not use; a split helps only if it is
//! sized right, kept up to date, and worth its price. Method, per cache:
//! 1. Ask for a trace of every process that has no curve in its present phase, a few at once. A phase that comes back has the
//!    curve that its kind had; so where kinds of phases are told, a trace waits until it is known that this one is new.
//! 2. Once all have one: [`allocate`] says who gets how much; the predictor says how everybody would fare then, how they
//!    fare now, and how without any shares. The best of these is taken if it gains enough, and, where pages have to be
//!    copied, if it earns the copying back within the horizon; promises that are broken now are reason enough.
//!    Where speeds were measured under the present shares, they stand for the present, not a forecast.
//! 3. Try it: old shares, new ones, old ones again, speeds measured in each ([`crate::partition::ab_test`]). What does not
//!    measure better by the least gain is left; what is held has to prove itself again ([`crate::partition::share_controller`]).
//!
//! Properties: without evidence nothing changes; a process alone is not confined unless something was promised; newcomers
//! are unrestricted until their curve is known; two programs of one time-share group have a penalty. Nobody is placed: that is others' business.

use std::collections::BTreeMap;

use cachemate_core::{
    Ability, Cache, CacheId, CacheShare, CoRunPenalty, Decision, GroupId, IndexSet, PageMigration, Plan, Policy,
    ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, ProcessId, Profiles, Reason, ReasonKind, ShareMember, TaskId,
    TaskSample, View, WindowLength,
};
use serde::Deserialize;

use super::static_partition::{MigrationMode, in_units};
use super::{ParameterError, parameters};
use crate::partition::ab_test::AbTest;
use crate::partition::allocate::{Allocation, AllocationLimits, Claimant, PartitionKind, SizingObjective, allocate};
use crate::partition::demand_curve::DemandCurve;
use crate::partition::partitioned_cache::{CacheProcess, PartitionedCache, units_of};
use crate::partition::share_controller::{self, ShareController, ShareVerdict, TrialStatus};
use crate::partition::speed_history::SpeedRecord;
use crate::partition::units::{PartitionUnits, assign, pages_to_move};
use crate::phase_curves::PhaseCurveCache;

/// See the page.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    pub objective: SizingObjective,
    pub page_migration: MigrationMode,
    /// Entries of a trace; 0 = curves come from elsewhere.
    pub trace_entries: u32,
    /// Fetches of code too: a program with much code needs space that its data does not tell of.
    pub trace_code: bool,
    /// Processor time that one trace may take.
    pub trace_budget_ns: u64,
    /// Pooled, where one unit is slower than all by no more than this share.
    pub insensitive_below: f64,
    /// A change must promise to be better by this share.
    pub min_gain: f64,
    /// Copied pages must be earned back within this, or within the time that programs stay in a phase.
    pub payback_ns: u64,
    /// What a miss costs where stalls are not counted; `None` = as the reference predictor has it from the machine.
    pub miss_penalty_cycles: Option<f64>,
    /// After a change: fewest windows until speeds count, and windows of an arm of its trial; 0 = changes are not judged.
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
    fn judged_by(&self, domain: &PartitionedCache<'_>) -> share_controller::TrialTerms {
        let lengths = domain.lengths(self.warmup_windows, self.measure_windows);
        share_controller::TrialTerms { lengths, min_gain: self.min_gain, trial_share: self.trial_share }
    }

    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parsed: Parameters = parameters(text)?;
        if parsed.window_ns == 0 {
            return Err(ParameterError::value("window_ns", "0", "1 or more"));
        }
        if !(parsed.trial_share.is_finite() && parsed.trial_share > 0.0) {
            return Err(ParameterError::value("trial_share", parsed.trial_share, "a number above 0"));
        }
        let shares = [("insensitive_below", parsed.insensitive_below), ("min_gain", parsed.min_gain)];
        let numbers = shares.into_iter().chain([("miss_penalty_cycles", parsed.miss_penalty_cycles.unwrap_or(1.0))]);
        for (name, value) in numbers {
            if !(value.is_finite() && value >= 0.0) {
                return Err(ParameterError::value(name, value, "a number from 0 up"));
            }
        }
        Ok(parsed)
    }
}

/// Changes of the shares that a trial of them takes, if they stay.
const CHANGES_OF_A_TRIAL: f64 = 3.0;
/// Processes of one cache that are traced at once.
const TRACED_AT_ONCE: usize = 4;

struct CacheSizing {
    parameters: Parameters,
    caches: BTreeMap<CacheId, ShareController>,
    home: BTreeMap<ProcessId, CacheId>,
    probes: BTreeMap<TaskId, (u32, ProbeId)>,
    next_probe: u32,
    recall: PhaseCurveCache,
    /// The kind of some phase was told: those of others will be, too.
    kinds_are_told: bool,
}

impl Policy for CacheSizing {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.kinds_are_told |= view.profiles.values().any(|profile| profile.phase.kind.is_some());
        match self.recall.observe(view) {
            Some(profiles) => self.decide_with_profiles(&View { profiles: &profiles, ..*view }),
            None => self.decide_with_profiles(view),
        }
    }
}

impl CacheSizing {
    fn decide_with_profiles(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: self.parameters.window_ns });
        let mut why = Vec::new();
        for domain in self.domains(view) {
            let remembered = self.caches.entry(domain.cache.id).or_default();
            let held = remembered.observe(view, &domain, self.parameters.judged_by(&domain));
            let shares = self.sized(view, &domain, held, &mut why);
            plan.penalties.extend(penalties(view, &domain, &shares));
            plan.shares.extend(shares);
            plan.probes.extend(self.probes_of(view, &domain));
        }
        self.probes.retain(|task, _| view.observation.tasks.iter().any(|seen| seen.task == *task));
        Decision { plan, reasons: why }
    }

    /// Every last-level cache that can be divided, with the processes that live on it.
    fn domains<'a>(&mut self, view: &'a View<'a>) -> Vec<PartitionedCache<'a>> {
        let mut processes: Vec<CacheProcess<'a>> = Vec::new();
        for task in view.movable() {
            // A process with a thread that nothing may be changed of is left alone as a whole.
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
                Some((cache, PartitionUnits::of(partitions.map(|(_, partition)| partition))?))
            })
            .collect();
        self.home.retain(|process, _| processes.iter().any(|present| present.process == *process));
        let mut domains: Vec<PartitionedCache<'a>> =
            caches.iter().map(|&(cache, divided)| PartitionedCache::of(cache, divided, view.topology)).collect();
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

    /// The shares for the next window.
    fn sized(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        held: Vec<CacheShare>,
        why: &mut Vec<Reason>,
    ) -> Vec<CacheShare> {
        let parameters = &self.parameters;
        let Some(remembered) = self.caches.get_mut(&domain.cache.id) else { return held };
        let undivided = || domain.undivided(parameters.page_migration.into());
        if !domain.has_something_to_divide() {
            return if held.is_empty() { held } else { undivided() };
        }
        match remembered.judge(view, domain, &held, parameters.judged_by(domain)) {
            Some(TrialStatus::GoesOn(shares)) => return shares,
            Some(TrialStatus::Over(verdict)) => {
                why.push(reason(domain, &verdict));
                return verdict.shares;
            }
            None => {}
        }
        if remembered.is_settling() && !domain.promised() && parameters.measure_windows > 0 {
            return held;
        }
        let claimants: Option<Vec<Claimant>> =
            domain.present.iter().map(|present| claimant(view, domain, present, remembered, parameters)).collect();
        let Some(mut claimants) = claimants.filter(|_| domain.promised() || remembered.can_start_trial()) else {
            return held;
        };
        raise_floors_of_unmet_goals(remembered, domain, &mut claimants, &held, parameters, why);
        let payback_ns = remembered.expected_lifetime_ns(parameters.window_ns).min(parameters.payback_ns as f64);
        let outlook = SizingForecast { view, domain, claimants: &claimants, speeds: &remembered.speeds, payback_ns };
        let trial = outlook.trial(parameters);
        let unproven = trial.clone().filter(|_| !domain.is_undivided(&held));
        if let Some(trial) = unproven.clone().filter(|_| remembered.proof_next()) {
            remembered.try_out(held.clone(), undivided(), held.clone(), trial, true);
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
                remembered.try_out(held.clone(), chosen, back, trial, proof);
                held
            }
            (Some(chosen), None, _) => {
                why.extend(explained);
                remembered.changed();
                chosen
            }
            (None, _, Some(trial)) => {
                remembered.try_out(held.clone(), undivided(), held.clone(), trial, true);
                held
            }
            (None, _, None) => held,
        }
    }

    /// The processes to learn the curves of, a few at once on each cache: one that hardly misses takes long to fill its
    /// log, and holds nobody up.
    fn probes_of(&mut self, view: &View<'_>, domain: &PartitionedCache<'_>) -> Vec<ProbeRequest> {
        let able = view.capabilities.can(Ability::TraceAddresses);
        // Where nothing may be tried yet, no curve is needed.
        let rests =
            !domain.promised() && self.caches.get(&domain.cache.id).is_some_and(|cache| !cache.can_start_trial());
        if !able || self.parameters.trace_entries == 0 || rests || !domain.has_something_to_divide() {
            return Vec::new();
        }
        let kinds_are_told = self.kinds_are_told;
        let unknown = domain.present.iter().filter(|present| {
            let known = |task: &&TaskSample| {
                let untold = |profile: &cachemate_core::Profile| {
                    kinds_are_told && profile.phase_number > 0 && profile.phase.kind.is_none()
                };
                let is = |profile| untold(profile) || profile.misses_per_kilo_instr().is_some();
                view.profiles.get(&task.task).is_some_and(is)
            };
            !present.tasks.iter().any(known)
        });
        unknown.take(TRACED_AT_ONCE).map(|unknown| self.probe(view, unknown)).collect()
    }

    /// The trace of one process; the same probe as before until it is answered.
    fn probe(&mut self, view: &View<'_>, unknown: &CacheProcess<'_>) -> ProbeRequest {
        // The thread that ran most stands for its process.
        let ran = |task: &TaskSample| task.ran_ns();
        let most = unknown.tasks.iter().copied().reduce(|a, b| if ran(b) > ran(a) { b } else { a });
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
        let what = ProbeKind::MissTrace { task, entries, includes_code: code };
        ProbeRequest { id, kind: what, budget_ns: self.parameters.trace_budget_ns }
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
    let of = |task: &&TaskSample| {
        let profile = view.profiles.get(&task.task)?;
        let penalty = parameters.miss_penalty_cycles.or(view.predictor.miss_penalty_cycles())?;
        DemandCurve::of(profile, speed, penalty, bytes, domain.divided.units())
    };
    let threads: Vec<DemandCurve> = present.tasks.iter().filter_map(of).collect();
    let goal = present.goal();
    let priority = if goal.priority.is_finite() && goal.priority > 0.0 { goal.priority } else { 1.0 };
    let at_least = remembered.insufficient_units.get(&present.process).map_or(1, |units| units + 1);
    let space = remembered.bounded(present.process, DemandCurve::mean(&threads)?);
    Some(Claimant { space, priority, degradation_at_most: goal.max_slowdown, at_least })
}

/// The pool is group 0 of its cache, and every other group is named after its first process.
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
        at_least: domain.divided.at_least(),
        groups_at_most: domain.divided.groups_at_most(),
        insensitive_below: parameters.insensitive_below,
        // Only single-threaded programs can be told apart by CPU.
        // Lanes only where somebody keeps their members from running together.
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
        members: group.members.iter().map(|&at| ShareMember::Process(domain.present[at].process)).collect(),
        cache: domain.cache.id,
        units: in_units(units, &domain.divided, moving),
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
    for &at in &allocation.lowered_floors {
        let limit = claimants[at].degradation_at_most.unwrap_or(0.0);
        let text = "{0} cannot be kept as fast as promised: the promises do not fit in one cache".to_string();
        why.push(Reason {
            kind: ReasonKind::Explanation,
            tasks: vec![task(at)],
            text,
            numbers: vec![("degradation_at_most".to_string(), limit)],
        });
    }
    if let Some(cost) = allocation.floors_cost {
        let tasks = (0..claimants.len()).filter(|&at| claimants[at].degradation_at_most.is_some()).map(task).collect();
        let text = "the promises cost the others on this cache, by the objective".to_string();
        why.push(Reason {
            kind: ReasonKind::Explanation,
            tasks,
            text,
            numbers: vec![("objective_lost".to_string(), cost)],
        });
    }
}

/// The outlook of all processes on a cache.
struct SizingForecast<'a> {
    view: &'a View<'a>,
    domain: &'a PartitionedCache<'a>,
    claimants: &'a [Claimant],
    /// Speeds under the shares held.
    speeds: &'a SpeedRecord,
    /// Gains end with the phase that they were reckoned for.
    payback_ns: f64,
}

impl SizingForecast<'_> {
    /// Outlook under the shares held, as measured where it was.
    fn current(&self, held: &[CacheShare]) -> Option<Vec<(f64, f64)>> {
        let forecast = self.under(held)?;
        let measured = |(present, said): (&CacheProcess<'_>, (f64, f64))| match self.speeds.speed(present.process) {
            Some(speed) => (speed.misses_per_kilo_instr.unwrap_or(said.0), speed.cycles_per_instr),
            None => said,
        };
        Some(self.domain.present.iter().zip(forecast).map(measured).collect())
    }

    /// Misses per thousand instructions and cycles per instruction of each claimant under these shares, all on this
    /// cache's CPUs. Tasks are renamed by order of arrival, so that no tie breaks by an id.
    fn under(&self, shares: &[CacheShare]) -> Option<Vec<(f64, f64)>> {
        let bytes = self.domain.cache.size_bytes?;
        let mut profiles = Profiles::new();
        let mut plan = Plan::idle(self.view.previous_plan.window);
        plan.shares = shares.to_vec();
        for (at, (claimant, present)) in self.claimants.iter().zip(&self.domain.present).enumerate() {
            let mut profile = claimant.space.to_profile(self.domain.cache.level, bytes);
            profile.process = Some(present.process);
            profiles.insert(TaskId(at as u32), profile);
            plan.affinity.insert(TaskId(at as u32), self.domain.cache.cpus.clone());
        }
        let forecast = self.view.predictor.forecast(&View { profiles: &profiles, ..*self.view }, &plan);
        let forecast_of = |at: usize| {
            let task_forecast = forecast.tasks.get(&TaskId(at as u32))?;
            Some((task_forecast.misses_per_kilo_instr?.value, 1.0 / task_forecast.instr_per_cycle?.value))
        };
        let outlook: Option<Vec<(f64, f64)>> = (0..self.claimants.len()).map(forecast_of).collect();
        outlook.filter(|all| all.iter().all(|(misses, cycles)| misses.is_finite() && cycles.is_finite()))
    }

    fn broken_promises(&self, outlook: &[(f64, f64)]) -> usize {
        let broken = |(claimant, &(_, cycles)): (&Claimant, &(f64, f64))| {
            claimant.degradation_at_most.is_some_and(|limit| claimant.is_broken(cycles, limit))
        };
        self.claimants.iter().zip(outlook).filter(|both| broken(*both)).count()
    }

    /// The wanted shares, none at all, or `None`: what holds is good enough.
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
            candidates.push(self.domain.undivided(parameters.page_migration.into()));
        }
        let outlooks: Option<Vec<_>> = candidates.iter().map(|shares| self.under(shares)).collect();
        let outlooks = outlooks?;
        let best = (0..candidates.len()).reduce(|a, b| {
            let key = |at: usize| (self.broken_promises(&outlooks[at]), score(&outlooks[at]));
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
        // Time that everybody together saves within the horizon.
        let saved = now.iter().zip(outlook).map(|(now, then)| 1.0 - then.1 / now.1).sum::<f64>();
        let earned_ns = saved * self.payback_ns;
        let worth = match objective {
            // Less space for the same promise: only the copying speaks against it.
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
            format!("cache {} is better shared than divided", self.domain.cache.id.0)
        } else {
            format!("cache {} is divided into {}", self.domain.cache.id.0, shares.join(" | "))
        };
        let numbers = [("gain_share", gain), ("cost_ns", cost_ns), ("earned_within_horizon_ns", earned_ns)];
        let numbers = numbers.map(|(name, value)| (name.to_string(), value)).to_vec();
        why.push(Reason { kind: ReasonKind::Explanation, tasks, text, numbers });
        Some(chosen)
    }

    /// Only sums of speeds can be judged by measured speeds, and only where there are any.
    fn trial(&self, parameters: &Parameters) -> Option<AbTest> {
        let by_speed = matches!(
            parameters.objective,
            SizingObjective::WeightedSpeedup | SizingObjective::Stalls | SizingObjective::Misses
        );
        let known = self.domain.present.iter().all(|present| self.speeds.speed(present.process).is_some());
        let judged = by_speed && known && !self.domain.promised() && parameters.measure_windows > 0;
        let weight = |(present, claimant): (&CacheProcess<'_>, &Claimant)| {
            (present.process, claimant.priority * claimant.space.whole_cycles())
        };
        let weights = || self.domain.present.iter().zip(self.claimants).map(weight).collect();
        judged.then(|| AbTest::new(parameters.judged_by(self.domain).lengths, weights()))
    }

    /// Copying pages into these shares; nothing where units are ways, or where frames are not known.
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

/// Clean windows by which a promise is held to be broken.
const BROKEN_WINDOWS: u32 = 3;

/// A promise that is measured to be broken needs more than what it has now, whatever the curve says.
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
        let (Some(limit), Some(cycles), Some(share)) = (claimant.degradation_at_most, measured, share) else {
            continue;
        };
        if !claimant.is_broken(cycles, limit) {
            continue;
        }
        let units = units_of(share).count();
        claimant.at_least = claimant.at_least.max(units + 1);
        let news = remembered.insufficient_units.insert(present.process, units) != Some(units);
        if news && units + (held.len() as u32 - 1) * domain.divided.at_least() >= domain.divided.units() {
            let text =
                "{0} is slower than promised with all the space that it can have: space does not keep this promise";
            let slower = cycles / claimant.space.whole_cycles() - 1.0;
            let numbers = vec![("slower_than_alone_share".to_string(), slower)];
            let tasks = vec![present.tasks[0].task];
            why.push(Reason { kind: ReasonKind::Explanation, tasks, text: text.to_string(), numbers });
        }
    }
}

/// The verdict of a trial, for readers of the decisions.
fn reason(domain: &PartitionedCache<'_>, verdict: &ShareVerdict) -> Reason {
    let text = match (verdict.proof, verdict.adopted, verdict.ratio) {
        (false, true, _) => "the new shares of cache {} were tried and made its programs faster: they stay",
        (false, false, Some(_)) => {
            "the new shares of cache {} were tried and made its programs no faster: left as they were"
        }
        (true, true, _) => "the shares of cache {} were tried again and its programs are as fast without: it is shared",
        (true, false, Some(_)) => {
            "the shares of cache {} were tried again and its programs are faster with them: they stay"
        }
        (_, false, None) => "the shares of cache {} were tried and could not be judged: left as they were",
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

/// Programs of one time-share group are not to run together, none of their threads.
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
        for (at, a) in inside.iter().enumerate() {
            for b in &inside[at + 1..] {
                for (one, other) in a.tasks.iter().flat_map(|one| b.tasks.iter().map(move |other| (one, other))) {
                    penalties.push(CoRunPenalty { tasks: (one.task, other.task), penalty: 1.0 });
                }
            }
        }
    }
    penalties
}

/// See the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(CacheSizing {
        parameters: Parameters::parse(parameters)?,
        caches: BTreeMap::new(),
        home: BTreeMap::new(),
        probes: BTreeMap::new(),
        next_probe: 0,
        recall: PhaseCurveCache::default(),
        kinds_are_told: false,
    }))
}

#[cfg(test)]
#[path = "cache_sizing_tests.rs"]
mod tests;
