//! Balance sets: groups of threads whose combined reuse fits the cache take turns (papers BS 3).
//!
//! Problem: threads whose combined reuse does not fit a shared cache should not run together, and no thread may starve.
//! Method, for every last-level cache: a probe observes when sampled locations are touched again, and StatCache or
//! StatStack computes the miss ratio of any group from that. The group's ratio is either the mean of its members, each
//! with a share of the cache, or StatCC's composition on the whole cache. The threshold is the lowest one that leaves
//! no thread out, and groups at or below it take turns as gangs ([`crate::solvers::balance`]).
//!
//! Properties: groups are not enumerated, so hundreds of threads are feasible. A thread without a profile is treated
//! like the worst known one. Without any evidence, or with no more threads than CPUs, no thread is grouped. Recorded
//! profiles are used like measured ones; if they have no reuse times, the mean is computed from their miss-rate curves.

use std::collections::BTreeMap;

use cachemate_core::ReplacementModel;
use cachemate_core::{
    Ability, CacheId, Decision, Gang, GangSchedule, Plan, Policy, ProbeId, ProbeKind, ProbeRequest,
    Profile, Reason, TaskId, View, WindowLength,
};
use cachemate_locality::curve::MissRateCurve;
use cachemate_locality::reuse::ReuseTimes;
use cachemate_locality::{statcache, statstack};
use serde::Deserialize;

use super::{ParameterError, ParameterRange};
use crate::gang_quantum::{self, GangCandidate, QuantumTooLong};
use crate::llc_placement::{LlcTasks, StickyPlacement};
use crate::solvers::balance::{
    ComposedModel, GroupModel, RotationRule, build_rotation, find_best_groups,
};

/// The model of a group's miss ratio.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupRatioModel {
    /// The mean of the members, each with its own share of the cache.
    Average,
    /// The members share the whole cache in proportion to their access rates.
    Composed,
}

/// The cache's replacement policy, which selects the model: StatCache or StatStack.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReplacementKind {
    Random,
    Lru,
}

/// The rule for how often each group gets a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TurnFrequency {
    /// Threads get turns as evenly as the threshold allows.
    Fair,
    /// Every group at or below the threshold gets the same number of turns.
    Uniform,
}

/// Parameters of `balance-set`. Times are nominal: they are scaled with the run.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Length of a group's turn.
    ///
    /// By default, it is four times the longest refill of a footprint, within 20 to 100 ms ([`crate::gang_quantum`]),
    /// or 10 ms if no footprint is known.
    pub slice_ns: Option<u64>,
    /// Maximum time that a task may wait; no gangs are formed if a task would wait longer even with turns of two
    /// refills.
    pub max_wait_ns: u64,
    pub group_model: GroupRatioModel,
    pub replacement: ReplacementKind,
    pub rotation: TurnFrequency,
    /// Number of locations to watch for each thread.
    pub locations: u32,
    /// Maximum processor time for watching one thread.
    pub budget_ns: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 10_000_000,
            slice_ns: None,
            max_wait_ns: gang_quantum::MAX_WAIT_NS,
            group_model: GroupRatioModel::Average,
            replacement: ReplacementKind::Random,
            rotation: TurnFrequency::Fair,
            locations: 2_000,
            budget_ns: 1_000_000_000,
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = super::parse_parameters(text)?;
        let slice_ns = parameters.slice_ns.unwrap_or(1) as f64;
        let locations = f64::from(parameters.locations);
        ParameterRange::OneOrMore.check([
            ("window_ns", parameters.window_ns as f64),
            ("slice_ns", slice_ns),
            ("locations", locations),
        ])?;
        Ok(parameters)
    }

    fn replacement_model(&self) -> ReplacementModel {
        match self.replacement {
            ReplacementKind::Random => ReplacementModel::Random,
            ReplacementKind::Lru => ReplacementModel::Lru,
        }
    }
}

/// Length of a group's turn if no footprint is known: the time slice of the operating system in the paper.
const USUAL_SLICE_NS: u64 = 10_000_000;
/// Maximum mean slowdown by refills: with turns of two refills, everything takes twice as long.
const MAX_SLOWDOWN: f64 = 1.0;

struct BalanceSet {
    parameters: Parameters,
    seed: u64,
    placement: StickyPlacement,
    caches: BTreeMap<CacheId, CacheRotation>,
    pending_probes: BTreeMap<TaskId, ProbeRequest>,
    next_probe: u32,
}

/// Gangs of one cache, and the evidence from which they were formed.
#[derive(Default)]
struct CacheRotation {
    task_models: BTreeMap<TaskId, TaskModel>,
    /// Tasks and their models at the time when the gangs were formed.
    gang_inputs: Vec<(TaskId, Option<TaskModel>)>,
    gangs: Vec<Vec<TaskId>>,
    /// Length of a group's turn, computed from the models at that time.
    turn_ns: Option<Result<u64, QuantumTooLong>>,
}

#[derive(Clone, PartialEq, Debug)]
struct TaskModel {
    phase: u32,
    /// Miss ratio of the thread alone on 1/n of the cache.
    miss_ratio: f64,
    /// Reuse of the thread, for the composed model only.
    shared_reuse: Option<SharedReuse>,
}

/// Reuse times in the profiles' form, and references per cycle.
#[derive(Clone, PartialEq, Debug)]
struct SharedReuse {
    reuse_times: Vec<(Option<u64>, f64)>,
    refs_per_cycle: f64,
}

impl Policy for BalanceSet {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        let has_gangs = view.capabilities.has_ability(Ability::Gangs);

        let mut placement = std::mem::take(&mut self.placement);
        for domain in placement.place_tasks_by_cache(view) {
            let is_crowded = domain.tasks.len() > domain.cpus.count() as usize;
            let state = self.caches.entry(domain.cache).or_default();
            state.record_evidence(view, &domain, &self.parameters, &self.pending_probes);
            if is_crowded && has_gangs {
                state.form_gangs(&domain, &self.parameters, self.seed, &mut reasons);
            } else {
                (state.gangs, state.gang_inputs, state.turn_ns) = (Vec::new(), Vec::new(), None);
            }

            for task in &domain.tasks {
                plan.affinity.insert(task.task, domain.cpus.clone());
            }

            if !state.gangs.is_empty() {
                match state.update_turn_length(view, &domain, &self.parameters) {
                    Ok(slice_ns) => plan.gangs.push(GangSchedule {
                        cpus: domain.cpus.clone(),
                        slice_ns: slice_ns.max(view.capabilities.min_slice_ns.unwrap_or(0)),
                        gangs: state.gangs.iter().map(|gang| build_gang(gang)).collect(),
                    }),
                    Err(quantum_error) => reasons.push(Reason::new(
                        Vec::new(),
                        quantum_error.to_string(),
                        Vec::new(),
                    )),
                }
            }
            self.request_reuse_probes(view, &domain, is_crowded, &mut plan);
        }

        self.placement = placement;
        self.pending_probes
            .retain(|_, probe| plan.probes.contains(probe));
        Decision::new(plan, reasons)
    }
}

fn build_gang(members: &[TaskId]) -> Gang {
    Gang {
        members: members.iter().map(|&task| (task, None)).collect(),
        slices: 1,
    }
}

/// The maximum number of turns from one turn of a task to its next.
fn max_turn_gap(groups: &[Vec<TaskId>], task: TaskId) -> usize {
    let turn_indices: Vec<usize> = (0..groups.len())
        .filter(|&index| groups[index].contains(&task))
        .collect();
    let Some((first, last)) = turn_indices.first().zip(turn_indices.last()) else {
        return groups.len();
    };
    let turns_across_end = first + groups.len() - last;
    turn_indices
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .fold(turns_across_end, usize::max)
}

impl BalanceSet {
    /// Requests the reuse times of threads whose profile has none, until these probes are answered.
    fn request_reuse_probes(
        &mut self,
        view: &View<'_>,
        domain: &LlcTasks<'_>,
        is_crowded: bool,
        plan: &mut Plan,
    ) {
        if !is_crowded || !view.capabilities.has_ability(Ability::SampleReuses) {
            return;
        }

        for task in domain.tasks.iter().map(|sample| sample.task) {
            let has_reuse_times = view
                .profiles
                .get(&task)
                .is_some_and(|profile| profile.reuse_times().is_some());
            let is_over = match self.pending_probes.get(&task) {
                Some(probe) => view.observation.has_completed(probe.id),
                None => has_reuse_times,
            };
            if is_over {
                continue;
            }

            let probe = self.pending_probes.entry(task).or_insert_with(|| {
                let probe_kind = ProbeKind::ReuseTimes {
                    task,
                    locations: self.parameters.locations,
                };
                self.next_probe += 1;
                ProbeRequest {
                    id: ProbeId(self.next_probe - 1),
                    kind: probe_kind,
                    budget_ns: self.parameters.budget_ns,
                }
            });
            plan.probes.push(probe.clone());
        }
    }
}

impl CacheRotation {
    /// The length of a group's turn: the configured one, otherwise the one that [`crate::gang_quantum`] computes,
    /// otherwise the default. If evidence is lost, the last length stays.
    fn update_turn_length(
        &mut self,
        view: &View<'_>,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
    ) -> Result<u64, QuantumTooLong> {
        if let Some(configured_ns) = parameters.slice_ns {
            return Ok(configured_ns);
        }

        let cache = view
            .topology
            .last_level_caches()
            .find(|cache| cache.id == domain.cache);
        let refill_ns =
            |task: TaskId| gang_quantum::refill_ns(view.profiles.get(&task)?, cache?, view);
        let task_ids = || domain.tasks.iter().map(|sample| sample.task);
        let members: Vec<GangCandidate> = task_ids()
            .map(|task| GangCandidate {
                refill_ns: refill_ns(task),
                slowdown: 0.0,
            })
            .collect();

        let longest_gap = task_ids()
            .map(|task| max_turn_gap(&self.gangs, task))
            .max()
            .unwrap_or(1);
        let computed_quantum =
            gang_quantum::quantum_ns(&members, MAX_SLOWDOWN, longest_gap, parameters.max_wait_ns);
        match computed_quantum.transpose() {
            Some(length) => *self.turn_ns.insert(length),
            None => *self.turn_ns.get_or_insert(Ok(USUAL_SLICE_NS)),
        }
    }

    /// Models the threads with new evidence: a first profile, a new phase, or the final answer to a probe.
    fn record_evidence(
        &mut self,
        view: &View<'_>,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
        requests: &BTreeMap<TaskId, ProbeRequest>,
    ) {
        self.task_models
            .retain(|task, _| domain.tasks.iter().any(|sample| sample.task == *task));

        for task in domain.tasks.iter().map(|sample| sample.task) {
            let Some(profile) = view.profiles.get(&task) else {
                continue;
            };

            let has_new_evidence = match (self.task_models.get(&task), requests.get(&task)) {
                (_, Some(probe)) => view.observation.has_completed(probe.id),
                (None, None) => true,
                (Some(model), None) => {
                    model.phase != profile.phase_number
                        || (parameters.group_model == GroupRatioModel::Composed
                            && model.shared_reuse.is_none())
                }
            };
            if let Some(model) = Some(profile)
                .filter(|_| has_new_evidence)
                .and_then(|profile| build_task_model(profile, domain, parameters))
            {
                self.task_models.insert(task, model);
            }
        }
    }

    /// Forms new gangs if the set of tasks has changed or new evidence has arrived.
    fn form_gangs(
        &mut self,
        domain: &LlcTasks<'_>,
        parameters: &Parameters,
        seed: u64,
        reasons: &mut Vec<Reason>,
    ) {
        let tasks: Vec<TaskId> = domain.tasks.iter().map(|sample| sample.task).collect();
        let inputs: Vec<(TaskId, Option<TaskModel>)> = tasks
            .iter()
            .map(|task| (*task, self.task_models.get(task).cloned()))
            .collect();
        if inputs == self.gang_inputs {
            return;
        }

        let group_size = domain.cpus.count() as usize;
        let task_models: Vec<Option<TaskModel>> = inputs
            .iter()
            .map(|(_, known_model)| known_model.clone())
            .collect();
        self.gang_inputs = inputs;
        let Some(model) = build_group_model(&task_models, domain, parameters) else {
            self.gangs = Vec::new();
            return;
        };

        let best_grouping = find_best_groups(&model, group_size);
        let rule = match parameters.rotation {
            TurnFrequency::Fair => RotationRule::Fair,
            TurnFrequency::Uniform => RotationRule::Uniform { seed },
        };
        let groups = build_rotation(&model, &best_grouping, rule);
        let mean_ratio = groups
            .iter()
            .map(|group| model.group_miss_ratio(group))
            .sum::<f64>()
            / groups.len() as f64;

        reasons.push(Reason::new(
            Vec::new(),
            "groups take turns, at or below the lowest miss ratio that leaves no thread out",
            vec![
                (
                    "threshold_misses_per_100_refs".to_string(),
                    100.0 * best_grouping.threshold,
                ),
                (
                    "mean_group_misses_per_100_refs".to_string(),
                    100.0 * mean_ratio,
                ),
                ("groups".to_string(), groups.len() as f64),
                (
                    "threads_unknown".to_string(),
                    task_models
                        .iter()
                        .filter(|task_model| task_model.is_none())
                        .count() as f64,
                ),
            ],
        ));

        for (position, &task) in tasks.iter().enumerate() {
            let turn_count = groups
                .iter()
                .filter(|group| group.contains(&position))
                .count();
            let Some(task_model) = &task_models[position] else {
                continue;
            };
            reasons.push(Reason::new(
                vec![task],
                format!("{{0}} is in {turn_count} of {} groups", groups.len()),
                vec![(
                    "partial_cache_misses_per_100_refs".to_string(),
                    100.0 * task_model.miss_ratio,
                )],
            ));
        }

        self.gangs = groups
            .iter()
            .map(|group| group.iter().map(|&index| tasks[index]).collect())
            .collect();
    }
}

/// The model of a thread on this cache, from its profile; `None` if the profile lacks the required facts.
fn build_task_model(
    profile: &Profile,
    domain: &LlcTasks<'_>,
    parameters: &Parameters,
) -> Option<TaskModel> {
    let (size_bytes, line_bytes) = (domain.size_bytes?, u64::from(domain.line_bytes?));
    let share_bytes = size_bytes / u64::from(domain.cpus.count().max(1));
    let reuse = profile
        .reuse_times()
        .and_then(|times| ReuseTimes::from_profile(times));
    let lines = (share_bytes / line_bytes.max(1)).max(1);
    let ratio_by_reuse = reuse
        .as_ref()
        .and_then(|reuse| match parameters.replacement {
            ReplacementKind::Random => statcache::miss_ratio(reuse, lines),
            ReplacementKind::Lru => statstack::miss_ratio(reuse, lines),
        });

    let ratio_by_curve = || {
        let curve = MissRateCurve::from_profile(profile.misses_per_kilo_instr()?).ok()?;
        let refs = profile
            .rates
            .llc_refs_per_mega_instr
            .map(|refs| refs.value / 1000.0)
            .filter(|refs| *refs > 0.0)?;
        Some((curve.rate_at(share_bytes)? / refs).clamp(0.0, 1.0))
    };
    let ratio = ratio_by_reuse
        .or_else(ratio_by_curve)
        .filter(|ratio| ratio.is_finite())?;

    let shared_reuse = (parameters.group_model == GroupRatioModel::Composed).then(|| {
        let speed = profile
            .rates
            .observed_instr_per_cycle
            .or(profile.rates.solo_instr_per_cycle)?
            .value;
        let rate = profile.rates.llc_refs_per_mega_instr?.value * 1e-6 * speed;
        let times = profile.reuse_times().cloned()?;
        (rate.is_finite() && rate > 0.0).then_some(SharedReuse {
            reuse_times: times,
            refs_per_cycle: rate,
        })
    });
    Some(TaskModel {
        phase: profile.phase_number,
        miss_ratio: ratio,
        shared_reuse: shared_reuse.flatten(),
    })
}

/// The group model of all threads of the cache, in which a thread without a model equals the worst known one. Returns
/// `None` if no thread has a model.
fn build_group_model(
    task_models: &[Option<TaskModel>],
    domain: &LlcTasks<'_>,
    parameters: &Parameters,
) -> Option<GroupModel> {
    let is_usable = |model: &&TaskModel| {
        parameters.group_model == GroupRatioModel::Average || model.shared_reuse.is_some()
    };
    let worst_model = task_models
        .iter()
        .flatten()
        .filter(is_usable)
        .max_by(|a, b| a.miss_ratio.total_cmp(&b.miss_ratio))?;
    let model_of_threads = || {
        task_models
            .iter()
            .map(|model| model.as_ref().filter(is_usable).unwrap_or(worst_model))
    };
    if parameters.group_model == GroupRatioModel::Average {
        return Some(GroupModel::Average(
            model_of_threads().map(|model| model.miss_ratio).collect(),
        ));
    }

    let reuse_by_thread: Vec<(ReuseTimes, f64)> = model_of_threads()
        .map(|model| {
            let shared_reuse = model.shared_reuse.as_ref()?;
            Some((
                ReuseTimes::from_profile(&shared_reuse.reuse_times)?,
                shared_reuse.refs_per_cycle,
            ))
        })
        .collect::<Option<_>>()?;
    let shared: Vec<(&ReuseTimes, f64)> = reuse_by_thread
        .iter()
        .map(|(times, rate)| (times, *rate))
        .collect();

    let lines = domain.size_bytes? / u64::from(domain.line_bytes?).max(1);
    ComposedModel::new(
        &shared,
        domain.cpus.count() as usize,
        lines,
        parameters.replacement_model(),
    )
    .map(GroupModel::Composed)
}

pub(super) fn build(parameters: &str, seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(BalanceSet {
        parameters: Parameters::parse(parameters)?,
        seed,
        placement: StickyPlacement::default(),
        caches: BTreeMap::new(),
        pending_probes: BTreeMap::new(),
        next_probe: 0,
    }))
}
