//! Sizes shares of every last-level cache online from miss-rate curves (papers CP and RM; thesis 5.4, 7.3).
//!
//! Problem: programs on one cache evict each other's lines without reusing their own. A partition helps only if its
//! sizes are right and up to date, and if its gain exceeds its cost. Method, for each cache:
//! 1. Request a trace of every process without a curve for its present phase, a few at a time, and at once after a
//!    change of phase. If the phase turns out to be of a known kind, it has the curve of that kind, and the trace ends.
//!    A trace that was too short for the whole cache is repeated once, several times as long, if that is paid for.
//! 2. Once all processes have a curve, [`allocate`] sizes the shares. The predictor forecasts the performance of all
//!    processes under these shares, under the present ones, and without any. The best of the three is chosen if it
//!    gains enough and the gain repays the copying of pages in time. A goal that is missed now is sufficient reason by
//!    itself. For the present shares, measured speeds replace the forecast.
//! 3. Propose the change to the verifier ([`crate::verifier`]), which keeps it only if it is measured faster. What is
//!    measured meanwhile bounds the curves ([`share_evidence`]).
//!
//! Properties: without evidence, nothing changes. A single process is confined only for a goal. A new process is
//! unrestricted until its curve is known. Two programs of one time-share group get a co-run penalty. The policy does
//! not place tasks, so it can be combined with any placement. One change is measured at a time.

mod allocate;
mod share_evidence;
mod share_speeds;
mod trace_planner;

use std::collections::BTreeMap;

use cachemate_core::{
    Ability, CacheId, CacheShare, CoRunPenalty, Decision, GroupId, PageMigration, PartitionSupport,
    Plan, Policy, ProbeRequest, ProcessId, Profiles, ProposedChange, Reason, ShareMember, TaskId,
    TaskSample, Verification, VerificationMethod, VerificationOutcome, View, WindowLength,
};
use cachemate_papers::partition::demand_curve::DemandCurve;
use cachemate_papers::partition::partitioned_cache::{
    CacheProcess, HomeCaches, PartitionedCache, SharingGroup,
};
use cachemate_papers::partition::units::pages_to_move;
use cachemate_papers::policies::{ParameterError, ParameterRange, parse_parameters};
use serde::Deserialize;

use allocate::{
    Allocation, AllocationLimits, Claimant, PartitionKind, ProgramPace, SizingObjective, allocate,
};
use share_evidence::{MIN_MEASURED_WINDOWS, ShareEvidence};
use share_speeds::ShareSpeeds;
use trace_planner::{TracePlanner, TraceTerms};

/// Parameters of `cache-sizing`, which the policy's page explains.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    pub objective: SizingObjective,
    pub page_migration: PageMigration,
    /// Number of entries of a trace; 0 if curves come from another source.
    pub trace_entries: u32,
    /// Whether instruction fetches are traced too; without them, the curve of a program with much code is too low.
    pub trace_code: bool,
    /// Maximum processor time for one trace.
    pub trace_budget_ns: u64,
    /// A program is pooled if running on one unit slows it down by at most this fraction, compared with the whole
    /// cache.
    pub insensitive_below: f64,
    /// Minimum forecast gain of a change, as a fraction.
    pub min_gain: f64,
    /// Maximum time until copied pages must have paid off, which is limited by the time that programs stay in a phase.
    pub payback_ns: u64,
    /// Cost of a miss if stalls are not counted; by default, the cost that the reference predictor derives from the
    /// machine.
    pub miss_penalty_cycles: Option<f64>,
    /// Number of windows after a change before speeds count.
    pub warmup_windows: u32,
    /// Whether a change is kept only if it is measured faster; otherwise, it is applied at once.
    pub confirms: bool,
    /// Maximum fraction of processor time for traces beyond the first one of each process.
    pub trace_share: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 100_000_000,
            objective: SizingObjective::default(),
            page_migration: PageMigration::All,
            trace_entries: 163_840,
            trace_code: true,
            trace_budget_ns: 1_000_000_000,
            insensitive_below: 0.02,
            min_gain: 0.01,
            payback_ns: 10_000_000_000,
            miss_penalty_cycles: None,
            warmup_windows: 1,
            confirms: true,
            trace_share: 0.01,
        }
    }
}

impl Parameters {
    /// Whether a change of this cache is measured by the sum of speeds. Changes for a goal or for fairness may cost
    /// speed.
    fn confirms_changes_of(&self, domain: &PartitionedCache<'_>) -> bool {
        let compares_speeds = self.objective == SizingObjective::WeightedSpeedup;
        self.confirms && compares_speeds && !domain.has_goals()
    }

    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = parse_parameters(text)?;
        ParameterRange::OneOrMore.check([("window_ns", parameters.window_ns as f64)])?;
        ParameterRange::Above(0.0).check([("trace_share", parameters.trace_share)])?;
        ParameterRange::FromZero.check([
            ("insensitive_below", parameters.insensitive_below),
            ("min_gain", parameters.min_gain),
            (
                "miss_penalty_cycles",
                parameters.miss_penalty_cycles.unwrap_or(1.0),
            ),
        ])?;
        Ok(parameters)
    }
}

/// Number of times that pages are copied for a change that may be undone.
const COPIES_OF_A_CONFIRMED_CHANGE: f64 = 2.0;
/// Number of windows between two proposals with the same co-runners in the same phases.
const PROPOSAL_INTERVAL_WINDOWS: u64 = 30;
/// A goal counts as missed if the probability that noise explains it is at most this.
const MISSED_GOAL_PROBABILITY: f64 = 0.01;

struct CacheSizing {
    parameters: Parameters,
    caches: BTreeMap<CacheId, ShareEvidence>,
    home_caches: HomeCaches,
    traces: TracePlanner,
    /// The cache whose change the verifier measures, and its shares before.
    open_change: Option<(CacheId, Vec<CacheShare>)>,
}

/// New shares of one cache.
struct ShareChange {
    shares: Vec<CacheShare>,
    /// The terms of the verification; `None` if the change is applied at once.
    terms: Option<Box<ProposedChange>>,
}

impl Policy for CacheSizing {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        self.traces.record_answers(view);
        let interrupted_change = self.record_verdict(view);
        let domains = self.home_caches.collect(view);
        let mut shares_by_domain = Vec::new();
        for domain in &domains {
            let evidence = self.caches.entry(domain.cache.id).or_default();
            evidence.observe(view, domain, self.parameters.warmup_windows);
            shares_by_domain.push(self.kept_shares(view, domain, interrupted_change.as_ref()));
        }
        plan.shares = shares_by_domain.concat();

        let mut verification = Verification::BeforeAndAfter;
        if self.open_change.is_some() {
            verification = Verification::Pending;
        } else if !view.verdicts.is_paused(view.observation.window) {
            for (index, domain) in domains.iter().enumerate() {
                let Some(change) =
                    self.find_change(view, domain, &shares_by_domain, index, &mut reasons)
                else {
                    continue;
                };
                let before = std::mem::replace(&mut shares_by_domain[index], change.shares);
                plan.shares = shares_by_domain.concat();
                if let Some(terms) = change.terms {
                    self.open_change = Some((domain.cache.id, before));
                    verification = Verification::Proposed(terms);
                    break;
                }
            }
        }

        for domain in &domains {
            plan.penalties
                .extend(time_share_penalties(view, domain, &plan.shares));
            if self.open_change.is_none() {
                plan.probes.extend(self.request_traces(view, domain));
            }
        }
        Decision {
            verification,
            ..Decision::new(plan, reasons)
        }
    }
}

impl CacheSizing {
    /// Ends the open change if there is a verdict. Returns the change if its measurement was interrupted.
    fn record_verdict(&mut self, view: &View<'_>) -> Option<(CacheId, Vec<CacheShare>)> {
        let outcome = view.verdicts.latest()?.outcome;
        let open_change = self.open_change.take();
        if outcome == VerificationOutcome::Interrupted {
            return open_change;
        }
        None
    }

    /// The shares of one cache without a change: those in force, or those before an interrupted change.
    fn kept_shares(
        &self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        interrupted_change: Option<&(CacheId, Vec<CacheShare>)>,
    ) -> Vec<CacheShare> {
        let undivided_shares = || domain.undivided_shares(self.parameters.page_migration);
        let restored = interrupted_change.filter(|(cache, _)| *cache == domain.cache.id);
        let shares = match restored {
            Some((_, before)) => domain.surviving_shares(before),
            None => domain.surviving_shares(&view.plan_to_keep().shares),
        };
        let evidence = self.caches.get(&domain.cache.id);
        let was_divided = evidence.is_some_and(|evidence| evidence.was_divided);
        // Pages keep their colors, so the end of a partition needs a share too.
        let is_released = shares.is_empty() && was_divided;
        if is_released || !domain.needs_partition() && !shares.is_empty() {
            return undivided_shares();
        }

        shares
    }

    /// New shares of the cache at this index, if there are better ones that the verifier does not exclude.
    fn find_change(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        shares_by_domain: &[Vec<CacheShare>],
        index: usize,
        reasons: &mut Vec<Reason>,
    ) -> Option<ShareChange> {
        let parameters = &self.parameters;
        let evidence = self.caches.get_mut(&domain.cache.id)?;
        let is_confirmed = parameters.confirms_changes_of(domain);
        let window = view.observation.window;
        let is_early = is_confirmed
            && (evidence.speeds.windows < MIN_MEASURED_WINDOWS
                || evidence
                    .last_proposal
                    .is_some_and(|last| window < last + PROPOSAL_INTERVAL_WINDOWS));
        if is_early || !domain.needs_partition() {
            return None;
        }
        let current_shares = &shares_by_domain[index];
        let mut claimants: Vec<Claimant> = domain
            .processes
            .iter()
            .map(|process| build_claimant(view, domain, process, evidence, parameters))
            .collect::<Option<_>>()?;
        raise_floors_of_unmet_goals(
            view,
            evidence,
            domain,
            &mut claimants,
            current_shares,
            reasons,
        );
        let lifetime_ns = evidence.expected_lifetime_ns(parameters.window_ns);
        let forecast = SizingForecast {
            view,
            domain,
            claimants: &claimants,
            speeds: &evidence.speeds,
            payback_ns: lifetime_ns.min(parameters.payback_ns as f64),
            copies: if is_confirmed {
                COPIES_OF_A_CONFIRMED_CHANGE
            } else {
                1.0
            },
        };
        let mut change_reasons = Vec::new();
        let mut allocation_reasons = Vec::new();
        let proposed_shares = plan_shares(
            view,
            domain,
            &claimants,
            current_shares,
            parameters,
            &mut allocation_reasons,
        )?;
        let (shares, gain) = forecast.choose_shares(
            parameters,
            current_shares,
            proposed_shares,
            &mut change_reasons,
        )?;

        let plan_of = |shares_by_domain: &[Vec<CacheShare>]| Plan {
            shares: shares_by_domain.concat(),
            ..Plan::idle(view.previous_plan.window)
        };
        let mut new_shares = shares_by_domain.to_vec();
        new_shares[index].clone_from(&shares);
        let (current_plan, new_plan) = (plan_of(shares_by_domain), plan_of(&new_shares));
        if view.verdicts.excludes(&new_plan, &current_plan, view) {
            return None;
        }
        reasons.extend(change_reasons);
        reasons.extend(allocation_reasons);
        evidence.last_proposal = Some(window);
        let terms = is_confirmed.then(|| Box::new(forecast.terms(parameters, gain)));
        Some(ShareChange { shares, terms })
    }

    /// None on a machine that cannot trace, or for a cache that needs no partition.
    fn request_traces(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
    ) -> Vec<ProbeRequest> {
        let can_trace = view.capabilities.has_ability(Ability::TraceAddresses);
        let parameters = &self.parameters;
        if !can_trace || parameters.trace_entries == 0 || !domain.needs_partition() {
            return Vec::new();
        }

        let terms = TraceTerms {
            entries: parameters.trace_entries,
            includes_code: parameters.trace_code,
            budget_ns: parameters.trace_budget_ns,
            min_gain: parameters.min_gain,
            max_share: parameters.trace_share,
        };
        let evidence = self.caches.entry(domain.cache.id).or_default();
        self.traces
            .request_traces(view, domain, &evidence.speeds, &terms)
    }
}

fn build_claimant(
    view: &View<'_>,
    domain: &PartitionedCache<'_>,
    cache_process: &CacheProcess<'_>,
    evidence: &ShareEvidence,
    parameters: &Parameters,
) -> Option<Claimant> {
    let speed = evidence.speeds.measured_speed(cache_process.process);
    let bytes = domain.cache.size_bytes?;
    let task_demand = |task: &&TaskSample| {
        let profile = view.profiles.get(&task.task)?;
        let penalty = parameters
            .miss_penalty_cycles
            .or(view.predictor.miss_penalty_cycles())?;
        DemandCurve::from_profile(
            profile,
            speed,
            penalty,
            bytes,
            domain.partition_units.units(),
        )
    };
    let thread_demands: Vec<DemandCurve> =
        cache_process.tasks.iter().filter_map(task_demand).collect();
    let goal = cache_process.goal();
    let priority = if goal.priority.is_finite() && goal.priority > 0.0 {
        goal.priority
    } else {
        1.0
    };

    let min_units = evidence
        .insufficient_sizes
        .get(&cache_process.process)
        .map_or(1, |size| size.units + 1);
    let demand =
        evidence.apply_bounds(cache_process, DemandCurve::mean_of_curves(&thread_demands)?);
    Some(Claimant {
        demand,
        priority,
        max_slowdown: goal.max_slowdown,
        min_units,
    })
}

/// The group's id: the pool is group 0 of its cache, and every other group has the id of its first process.
fn group_id(kind: PartitionKind, first_process: ProcessId) -> GroupId {
    GroupId(if kind == PartitionKind::Pool {
        0
    } else {
        first_process.0 + 1
    })
}

fn plan_shares(
    view: &View<'_>,
    domain: &PartitionedCache<'_>,
    claimants: &[Claimant],
    current_shares: &[CacheShare],
    parameters: &Parameters,
    reasons: &mut Vec<Reason>,
) -> Option<Vec<CacheShare>> {
    let online_count = view
        .topology
        .cpus
        .iter()
        .filter(|cpu| cpu.online && domain.cache.cpus.contains(cpu.id.0))
        .count();

    let thread_count = domain
        .processes
        .iter()
        .map(|cache_process| cache_process.tasks.len())
        .sum::<usize>();
    let limits = AllocationLimits {
        objective: parameters.objective,
        units: domain.partition_units.units(),
        min_units: domain.partition_units.min_units(),
        max_groups: domain.partition_units.max_shares(),
        pool_max_slowdown: parameters.insensitive_below,
        // Only single-threaded programs can be distinguished by CPU. Lanes are used only if the machine keeps their
        // members from running together.
        concurrent_programs: if thread_count == claimants.len() && can_set_penalties(view) {
            online_count as u32
        } else {
            claimants.len() as u32
        },
    };
    let allocation = allocate(claimants, &limits).ok()?;
    explain_allocation(domain, claimants, &allocation, reasons);

    let groups: Vec<SharingGroup> = allocation
        .groups
        .iter()
        .map(|group| SharingGroup {
            id: group_id(group.kind, domain.processes[group.members[0]].process),
            members: group
                .members
                .iter()
                .map(|&index| domain.processes[index].process)
                .collect(),
            units: group.units,
        })
        .collect();
    Some(domain.divide(&groups, current_shares, parameters.page_migration))
}

fn explain_allocation(
    domain: &PartitionedCache<'_>,
    claimants: &[Claimant],
    allocation: &Allocation,
    reasons: &mut Vec<Reason>,
) {
    let first_task = |at: usize| domain.processes[at].tasks[0].task;
    for &index in &allocation.lowered_floors {
        let limit = claimants[index].max_slowdown.unwrap_or(0.0);
        let text =
            "{0} cannot meet its goal: the goals together do not fit in one cache".to_string();
        reasons.push(Reason::new(
            vec![first_task(index)],
            text,
            vec![("max_slowdown".to_string(), limit)],
        ));
    }

    if let Some(cost) = allocation.floor_cost_to_others {
        let tasks = (0..claimants.len())
            .filter(|&index| claimants[index].max_slowdown.is_some())
            .map(first_task)
            .collect();
        let text = "goals slow the other programs on this cache down, by the objective".to_string();
        reasons.push(Reason::new(
            tasks,
            text,
            vec![("objective_lost".to_string(), cost)],
        ));
    }
}

/// Forecasts of how all processes on one cache run.
struct SizingForecast<'a> {
    view: &'a View<'a>,
    domain: &'a PartitionedCache<'a>,
    claimants: &'a [Claimant],
    /// Measured speeds under the present shares.
    speeds: &'a ShareSpeeds,
    /// Maximum time until a change must have paid off, because its gain ends with the phase for which it was computed.
    payback_ns: f64,
    /// Number of times that pages may be copied.
    copies: f64,
}

impl SizingForecast<'_> {
    /// The paces under the present shares, with measured values as far as there are any.
    fn current_paces(&self, shares: &[CacheShare]) -> Option<Vec<ProgramPace>> {
        let mut paces = self.forecast_paces(shares)?;
        for (pace, cache_process) in paces.iter_mut().zip(&self.domain.processes) {
            if let Some(measured) = self.speeds.measured_speed(cache_process.process) {
                pace.cycles_per_instr = measured.cycles_per_instr;
                if let Some(misses) = measured.misses_per_kilo_instr {
                    pace.misses_per_kilo_instr = misses;
                }
            }
        }
        Some(paces)
    }

    /// The pace of each claimant under these shares, if all run on this cache's CPUs. Tasks are renamed by order of
    /// arrival, so that ids never decide ties.
    fn forecast_paces(&self, shares: &[CacheShare]) -> Option<Vec<ProgramPace>> {
        let bytes = self.domain.cache.size_bytes?;
        let mut profiles = Profiles::new();
        let mut plan = Plan::idle(self.view.previous_plan.window);
        plan.shares = shares.to_vec();
        for (index, (claimant, cache_process)) in self
            .claimants
            .iter()
            .zip(&self.domain.processes)
            .enumerate()
        {
            let mut profile = claimant.demand.to_profile(self.domain.cache.level, bytes);
            profile.process = Some(cache_process.process);
            profiles.insert(TaskId(index as u32), profile);
            plan.affinity
                .insert(TaskId(index as u32), self.domain.cache.cpus.clone());
        }

        let forecast = self.view.predictor.forecast(
            &View {
                profiles: &profiles,
                ..*self.view
            },
            &plan,
        );
        let pace_of_claimant = |index: usize| {
            let task_forecast = forecast.tasks.get(&TaskId(index as u32))?;
            Some(ProgramPace {
                misses_per_kilo_instr: task_forecast.misses_per_kilo_instr?.value,
                cycles_per_instr: 1.0 / task_forecast.instr_per_cycle?.value,
            })
        };
        let paces: Option<Vec<ProgramPace>> =
            (0..self.claimants.len()).map(pace_of_claimant).collect();
        let is_finite = |pace: &ProgramPace| {
            pace.misses_per_kilo_instr.is_finite() && pace.cycles_per_instr.is_finite()
        };
        paces.filter(|paces| paces.iter().all(is_finite))
    }

    fn count_missed_goals(&self, paces: &[ProgramPace]) -> usize {
        let is_missed = |(claimant, pace): &(&Claimant, &ProgramPace)| {
            claimant
                .max_slowdown
                .is_some_and(|limit| claimant.misses_goal(pace.cycles_per_instr, limit))
        };
        self.claimants.iter().zip(paces).filter(is_missed).count()
    }

    /// The shares to adopt, with the forecast gain; an empty list means the whole cache. `None` if the present shares
    /// stay.
    fn choose_shares(
        &self,
        parameters: &Parameters,
        current_shares: &[CacheShare],
        proposed_shares: Vec<CacheShare>,
        reasons: &mut Vec<Reason>,
    ) -> Option<(Vec<CacheShare>, f64)> {
        let objective = parameters.objective;
        let current_paces = self.current_paces(current_shares)?;
        let cost_of = |paces: &[ProgramPace]| objective.cost(self.claimants, paces);
        let mut candidates = vec![proposed_shares];
        if !self.domain.is_undivided(current_shares) {
            candidates.push(self.domain.undivided_shares(parameters.page_migration));
        }
        let candidate_paces: Option<Vec<_>> = candidates
            .iter()
            .map(|shares| self.forecast_paces(shares))
            .collect();
        let candidate_paces = candidate_paces?;
        // Fewer missed goals first, then the smaller cost; the first of equal ones.
        let rank = |index: usize| {
            let paces = &candidate_paces[index];
            (self.count_missed_goals(paces), cost_of(paces))
        };
        let best_index = (0..candidates.len()).reduce(|best, index| {
            if rank(index) < rank(best) {
                index
            } else {
                best
            }
        })?;
        let chosen_shares = candidates.swap_remove(best_index);
        let chosen_paces = &candidate_paces[best_index];
        if chosen_shares == current_shares {
            return None;
        }
        let current_misses = self.count_missed_goals(&current_paces);
        let chosen_misses = self.count_missed_goals(chosen_paces);
        let meets_more_goals = chosen_misses < current_misses;
        let misses_more_goals = chosen_misses > current_misses;
        let relative_gain = (cost_of(&current_paces) - cost_of(chosen_paces))
            / cost_of(&current_paces).abs().max(1e-9);
        let cost_ns = self.copies * self.copying_cost_ns(&chosen_shares);
        // Share of the time that the change saves, summed over all processes.
        let saved_share = current_paces
            .iter()
            .zip(chosen_paces)
            .map(|(current, chosen)| 1.0 - chosen.cycles_per_instr / current.cycles_per_instr)
            .sum::<f64>();
        let saved_ns = saved_share * self.payback_ns;
        let pays_off = match objective {
            SizingObjective::Fairness => {
                !misses_more_goals
                    && relative_gain >= parameters.min_gain
                    && cost_ns <= self.payback_ns
            }
            SizingObjective::WeightedSpeedup => {
                !misses_more_goals && relative_gain >= parameters.min_gain && saved_ns > cost_ns
            }
        };
        if !(meets_more_goals || pays_off) {
            return None;
        }
        let tasks: Vec<TaskId> = self
            .domain
            .processes
            .iter()
            .map(|cache_process| cache_process.tasks[0].task)
            .collect();
        let shares: Vec<String> = chosen_shares
            .iter()
            .map(|share| share.units.set().to_string())
            .collect();
        let text = if self.domain.is_undivided(&chosen_shares) {
            format!(
                "cache {} is better shared than partitioned",
                self.domain.cache.id.0
            )
        } else {
            format!(
                "cache {} is partitioned into {}",
                self.domain.cache.id.0,
                shares.join(" | ")
            )
        };
        let numbers = [
            ("gain_share", relative_gain),
            ("cost_ns", cost_ns),
            ("earned_within_horizon_ns", saved_ns),
        ];
        let numbers = numbers
            .map(|(name, value)| (name.to_string(), value))
            .to_vec();
        reasons.push(Reason::new(tasks, text, numbers));
        Some((chosen_shares, relative_gain))
    }

    /// The terms on which a change is confirmed: the sum of speeds relative to those on the whole cache.
    fn terms(&self, parameters: &Parameters, gain: f64) -> ProposedChange {
        let weighted_speed = |(process, claimant): (&CacheProcess<'_>, &Claimant)| {
            let speed = self.speeds.measured_speed(process.process)?;
            let whole_cache_cycles = claimant.demand.whole_cache_cycles();
            let relative_speed = whole_cache_cycles / speed.cycles_per_instr;
            Some((process.process, claimant.priority * relative_speed))
        };
        let processes = self.domain.processes.iter().zip(self.claimants);
        ProposedChange {
            method: VerificationMethod::Confirmation,
            forecast_gain: gain,
            min_gain: parameters.min_gain,
            speeds: processes.filter_map(weighted_speed).collect(),
            goal_processes: Vec::new(),
        }
    }

    /// The cost of copying pages into these shares, in nanoseconds; 0 if the units are ways or the frames are unknown.
    fn copying_cost_ns(&self, shares: &[CacheShare]) -> f64 {
        let PartitionSupport::Colors {
            page_migration_ns: move_page_ns,
            ..
        } = self.domain.partition_units
        else {
            return 0.0;
        };

        let mut pages = 0;
        for cache_process in &self.domain.processes {
            let share = shares.iter().find(|share| {
                share
                    .members
                    .contains(&ShareMember::Process(cache_process.process))
            });
            let pages_per_color = cache_process
                .tasks
                .iter()
                .find_map(|task| task.pages_per_color.as_ref());
            if let Some((share, pages_per_color)) = share.zip(pages_per_color) {
                pages += pages_to_move(pages_per_color, share.units.set());
            }
        }
        pages as f64 * move_page_ns
    }
}

/// Raises the minimum share of programs whose goals measurements show to be missed, by more than their noise. They need
/// more than their present share, whatever the curve predicts.
fn raise_floors_of_unmet_goals(
    view: &View<'_>,
    evidence: &mut ShareEvidence,
    domain: &PartitionedCache<'_>,
    claimants: &mut [Claimant],
    current_shares: &[CacheShare],
    reasons: &mut Vec<Reason>,
) {
    if evidence.speeds.windows < MIN_MEASURED_WINDOWS {
        return;
    }

    for (claimant, cache_process) in claimants.iter_mut().zip(&domain.processes) {
        let process = cache_process.process;
        let speeds = &evidence.speeds;
        let cycles = speeds
            .measured_speed(process)
            .map(|speed| speed.cycles_per_instr)
            .zip(speeds.min_cycles_per_instr(process, MISSED_GOAL_PROBABILITY));
        let share = current_shares.iter().find(|share| {
            share
                .members
                .contains(&ShareMember::Process(cache_process.process))
        });
        let (Some(limit), Some((cycles, min_cycles)), Some(share)) =
            (claimant.max_slowdown, cycles, share)
        else {
            continue;
        };
        if !claimant.misses_goal(min_cycles, limit) {
            continue;
        }

        let units = share.units.set().count();
        claimant.min_units = claimant.min_units.max(units + 1);
        let is_new_result = evidence.record_insufficient(process, units, view.observation.window);
        if is_new_result
            && units + (current_shares.len() as u32 - 1) * domain.partition_units.min_units()
                >= domain.partition_units.units()
        {
            let text = "{0} misses its goal with all the space that it can have: more space cannot meet it";
            let slowdown = cycles / claimant.demand.whole_cache_cycles() - 1.0;
            let numbers = vec![("slower_than_alone_share".to_string(), slowdown)];
            let tasks = vec![cache_process.tasks[0].task];
            reasons.push(Reason::new(tasks, text, numbers));
        }
    }
}

fn can_set_penalties(view: &View<'_>) -> bool {
    view.capabilities.has_ability(Ability::Penalties)
}

/// Penalties that keep the programs of one time-share group from running together, with all their threads.
fn time_share_penalties(
    view: &View<'_>,
    domain: &PartitionedCache<'_>,
    shares: &[CacheShare],
) -> Vec<CoRunPenalty> {
    if !can_set_penalties(view) {
        return Vec::new();
    }

    let mut penalties = Vec::new();
    for share in shares
        .iter()
        .filter(|share| share.group != GroupId(0) && share.members.len() > 1)
    {
        let members: Vec<&CacheProcess<'_>> = domain
            .processes
            .iter()
            .filter(|cache_process| {
                share
                    .members
                    .contains(&ShareMember::Process(cache_process.process))
            })
            .collect();

        for (index, a) in members.iter().enumerate() {
            for b in &members[index + 1..] {
                for (task, partner) in a
                    .tasks
                    .iter()
                    .flat_map(|task| b.tasks.iter().map(move |partner| (task, partner)))
                {
                    penalties.push(CoRunPenalty {
                        tasks: (task.task, partner.task),
                        penalty: 1.0,
                    });
                }
            }
        }
    }
    penalties
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(CacheSizing {
        parameters: Parameters::parse(parameters)?,
        caches: BTreeMap::new(),
        home_caches: HomeCaches::default(),
        traces: TracePlanner::default(),
        open_change: None,
    }))
}

#[cfg(test)]
mod tests;
