//! Separates aggressors from their victims, in space or in time, on machines without a PMU.
//!
//! Problem: in a virtual machine, misses cannot be counted, and the CPUs that share a cache may differ from the
//! kernel's topology and change from one minute to the next. Method: there are three kinds of probes, one at a time.
//! Cache-line ping-pong shows which CPUs share a cache *now*. Evicted lines show the intensity of each active task. A
//! stream beside the task shows its sensitivity. The slowdown of `i` beside `j` is the product of `i`'s sensitivity and
//! `j`'s intensity (Pain's form, CA 2.2.4, with measured factors). Then, for each measured cache:
//! - with several caches, the solver spreads tasks over them so that the sum of slowdowns is smallest;
//! - with one cache and more tasks than CPUs, the same solver forms gangs that take turns on it, if that removes enough
//!   of the slowdown (the idea of balance sets with another criterion);
//! - if the measured CPUs share no cache, nothing is changed, because there is nothing to gain.
//!
//! Properties: without evidence about every active task, or about shared caches, the plan in force stays. The majority
//! of the last three ping-pongs decides, never a single one. All gangs have equal turns, and every movable task is in
//! one. After the initial profiling, probes cost at most a quarter of a percent of the processors' time, and nothing if
//! there is no choice.

mod gangs;

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{
    CpuId, CpuSet, Decision, Fact, Neighbor, Plan, Policy, ProbeEvidence, ProbeId, ProbeKind,
    ProbeRequest, Reason, TaskId, TaskSample, View, WindowLength,
};
use cachemate_locality::profilers::MIN_EVICTED_SAMPLES;
use serde::Deserialize;

use self::gangs::OvercommittedCache;
use super::{ParameterError, ParameterRange};
use crate::gang_quantum::MAX_WAIT_NS;
use crate::probe_ledger::ProbeLedger;
use crate::solvers::{Seats, best_assignment};

/// Parameters of `intensity-gangs`, with the reasons for their values.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Length of a gang's turn. By default, [`crate::gang_quantum`] computes it, or it is 50 ms if no footprint is
    /// known.
    pub slice_ns: Option<u64>,
    /// Maximum time that a task may wait; no gangs are formed if a task would wait longer with turns that pay off.
    pub max_wait_ns: u64,
    /// Number of samples to take of each task.
    pub samples: u32,
    /// Maximum processor time of one probe.
    pub probe_ns: u64,
    /// Ping-pong round trips below the first bound are within one cache; those from the second bound on are between two
    /// caches.
    pub shared_max_ns: f64,
    pub split_min_ns: f64,
    /// Minimum mean slowdown that gangs must remove.
    pub min_gain: f64,
    /// Maximum number of tasks in a rotation; with more, no gangs are formed, because a rotation would take too long.
    pub max_ganged: usize,
    /// Minimum share of a CPU for a task to be probed; tasks that use less are assumed to be quiet.
    pub min_cpu_share: f64,
    /// Number of windows after which a task is probed again; 0 disables repetition.
    pub probe_again_windows: u64,
    /// Processor time of the initial profiling, for each task.
    ///
    /// On a live host, the phases of a bracket are long (150 ms). The two probes of a task take 1.8 s with an 8 MiB
    /// cache, including the time that they keep it off its CPU.
    pub survey_ns: u64,
    /// Maximum fraction of all processor time for probes after the initial profiling.
    ///
    /// Programs that a probe keeps off their CPUs lose about twice as much again (measured in the simulator), so a
    /// quarter of a percent costs them less than one percent.
    pub max_probe_share: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 1_000_000_000,
            slice_ns: None,
            max_wait_ns: MAX_WAIT_NS,
            samples: 8,
            probe_ns: 4_000_000_000,
            shared_max_ns: 160.0,
            split_min_ns: 200.0,
            min_gain: 0.05,
            max_ganged: 16,
            min_cpu_share: 0.1,
            probe_again_windows: 0,
            survey_ns: 3_000_000_000,
            max_probe_share: 0.0025,
        }
    }
}

/// Number of ping-pongs that are kept for each pair of CPUs.
const REMEMBERED: usize = 3;
/// Number of windows after which a probe without result is repeated.
const RETRY_WINDOWS: u64 = 120;
/// Maximum number of pairs probed in one window.
const MAX_PAIRS: usize = 16;

struct IntensityGangs {
    parameters: Parameters,
    next_probe: u32,
    /// Results for each pair of CPUs, the latest last: true if the two shared a cache.
    sharing_history: BTreeMap<(u32, u32), VecDeque<bool>>,
    /// Tasks whose sensitivity was probed, with the window in which the probe was answered or refused.
    sensitivity_windows: BTreeMap<TaskId, u64>,
    intensity_windows: BTreeMap<TaskId, u64>,
    /// Outstanding probe of a task, if any.
    pending_probe: Option<ProbeRequest>,
    /// Outstanding ping-pongs, and the time at which they were requested.
    pending_ping_pongs: Vec<ProbeRequest>,
    last_ping_pong_ns: Option<u64>,
    probe_ledger: ProbeLedger,
}

/// Whether a probe fits the budget, which is a fraction of the time since the start. First requests may also spend each
/// task's time for the initial profiling; repeated requests wait until that time has been recovered.
fn has_probe_budget(
    ledger: &ProbeLedger,
    is_initial: bool,
    view: &View<'_>,
    parameters: &Parameters,
) -> bool {
    let task_count = if is_initial {
        view.movable_tasks().count() as u64
    } else {
        0
    };
    ledger.excess_ns(parameters.max_probe_share)
        <= parameters.survey_ns.saturating_mul(task_count) as f64
}

fn now_ns(view: &View<'_>) -> u64 {
    view.observation.span.end_ns()
}

impl Policy for IntensityGangs {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = view.previous_plan.clone();
        plan.window = WindowLength::Time {
            ns: self.parameters.window_ns,
        };
        self.drop_stale_parts(view, &mut plan);
        self.probe_ledger.record_window(view);
        self.record_probe_results(view);
        self.request_ping_pongs(view);
        plan.probes.clone_from(&self.pending_ping_pongs);

        let mut reasons = Vec::new();
        match self.measured_domains(view) {
            Some(domains) => self.write_placement(view, &domains, &mut plan, &mut reasons),
            None => reasons.push(build_explanation(
                &[],
                "probes are measuring which CPUs share a cache".to_string(),
                Vec::new(),
            )),
        }
        plan.probes.extend(self.pending_probe.clone());
        Decision::new(plan, reasons)
    }
}

/// Whether evidence cannot change the decision: there is only one active program, or one cache with a CPU for each
/// program.
fn has_no_choice(domains: &[CpuSet], shared_domains: &[&CpuSet], active_tasks: &[TaskId]) -> bool {
    match (domains, shared_domains) {
        ([_], [cpus]) => active_tasks.len() <= cpus.count() as usize,
        _ => active_tasks.len() <= 1,
    }
}

fn build_explanation(tasks: &[TaskId], text: String, numbers: Vec<(String, f64)>) -> Reason {
    Reason::new(tasks.to_vec(), text, numbers)
}

impl IntensityGangs {
    /// Drops exited tasks from the plan, and all gangs unless they contain exactly the movable tasks.
    fn drop_stale_parts(&self, view: &View<'_>, plan: &mut Plan) {
        let movable: Vec<TaskId> = view.movable_tasks().map(|task| task.task).collect();
        plan.affinity.retain(|task, _| movable.contains(task));
        plan.weights.clear();
        plan.penalties.clear();
        let members = plan
            .gangs
            .iter()
            .flat_map(|s| &s.gangs)
            .flat_map(|gang| &gang.members);
        let mut ganged_tasks: Vec<TaskId> = members.map(|(task, _)| *task).collect();
        ganged_tasks.sort_unstable();
        let mut sorted_tasks = movable.clone();
        sorted_tasks.sort_unstable();
        if ganged_tasks != sorted_tasks {
            plan.gangs.clear();
        }
    }

    /// Records the answers to probes that arrived in the window.
    fn record_probe_results(&mut self, view: &View<'_>) {
        for probe_result in &view.observation.probe_results {
            match &probe_result.evidence {
                ProbeEvidence::PingPong {
                    cpus,
                    round_trip_ns,
                } => {
                    let is_shared = *round_trip_ns < self.parameters.shared_max_ns;
                    if is_shared || *round_trip_ns >= self.parameters.split_min_ns {
                        let history = self
                            .sharing_history
                            .entry((cpus.0.0, cpus.1.0))
                            .or_default();
                        history.push_back(is_shared);
                        if history.len() > REMEMBERED {
                            history.pop_front();
                        }
                    }
                }
                ProbeEvidence::PrimeProbe { task, .. } => {
                    self.intensity_windows
                        .insert(*task, view.observation.window);
                }
                ProbeEvidence::NeighborSlowdown { task, .. } => {
                    self.sensitivity_windows
                        .insert(*task, view.observation.window);
                }
                _ => {}
            }

            let is_answered =
                |probe: &mut ProbeRequest| probe_result.complete && probe.id == probe_result.probe;
            self.pending_probe.take_if(is_answered);
            self.pending_ping_pongs
                .retain(|probe| !probe_result.complete || probe.id != probe_result.probe);
        }

        let is_live = |task: &TaskId| view.movable_tasks().any(|sample| sample.task == *task);
        self.sensitivity_windows.retain(|task, _| is_live(task));
        self.intensity_windows.retain(|task, _| is_live(task));
        let is_refused =
            |probe: &mut ProbeRequest| view.observation.applied.has_refused_probe(probe.id);
        self.pending_ping_pongs
            .retain_mut(|probe| !is_refused(probe));

        if let Some(refused_probe) = self.pending_probe.take_if(is_refused) {
            // A refused request will not be answered, so it is not repeated before its time.
            match refused_probe.kind {
                ProbeKind::PrimeProbe { task, .. } => {
                    self.intensity_windows.insert(task, view.observation.window)
                }
                ProbeKind::Neighbor { task, .. } => self
                    .sensitivity_windows
                    .insert(task, view.observation.window),
                _ => None,
            };
        }

        self.pending_probe.take_if(|probe| match probe.kind {
            ProbeKind::PrimeProbe { task, .. } | ProbeKind::Neighbor { task, .. } => {
                !is_live(&task)
            }
            _ => true,
        });
    }

    fn next_probe_id(&mut self) -> ProbeId {
        self.next_probe = self.next_probe.wrapping_add(1) & 0x7fff_ffff;
        ProbeId(self.next_probe)
    }

    /// Requests ping-pongs between the first CPU of every cache and its other CPUs.
    ///
    /// They are repeated, because caches of virtual machines change, but at most once in the time of a window. The
    /// number of windows cannot measure that time, because a window also ends when a probe is answered.
    fn request_ping_pongs(&mut self, view: &View<'_>) {
        let is_within_window = self
            .last_ping_pong_ns
            .is_some_and(|pinged_ns| now_ns(view) < pinged_ns + self.parameters.window_ns);
        let is_first = self.measured_domains(view).is_none();
        if is_within_window
            || !self.pending_ping_pongs.is_empty()
            || !has_probe_budget(&self.probe_ledger, is_first, view, &self.parameters)
        {
            return;
        }
        self.last_ping_pong_ns = Some(now_ns(view));
        self.pending_ping_pongs = self.build_ping_pong_probes(view);
    }

    fn build_ping_pong_probes(&mut self, view: &View<'_>) -> Vec<ProbeRequest> {
        let mut cpu_pairs = Vec::new();
        for domain in view.last_level_domains() {
            let first_cpu = domain.first().unwrap_or(0);
            cpu_pairs.extend(
                domain
                    .iter()
                    .filter(|cpu| *cpu != first_cpu)
                    .map(|cpu| (CpuId(first_cpu), CpuId(cpu))),
            );
        }
        // Pairs with the fewest results come first, so that every pair is probed in turn.
        cpu_pairs.sort_by_key(|(a, b)| {
            self.sharing_history
                .get(&(a.0, b.0))
                .map_or(0, VecDeque::len)
        });
        cpu_pairs.truncate(MAX_PAIRS);
        let budget_ns = 100_000_000;
        cpu_pairs
            .into_iter()
            .map(|cpus| ProbeRequest {
                id: self.next_probe_id(),
                kind: ProbeKind::PingPong { cpus },
                budget_ns,
            })
            .collect()
    }

    /// The groups of CPUs that share a cache by measurement; `None` while some pair is undecided.
    fn measured_domains(&self, view: &View<'_>) -> Option<Vec<CpuSet>> {
        let mut domains = Vec::new();
        for domain in view.last_level_domains() {
            let first_cpu = domain.first()?;
            let mut shared_cpus: CpuSet = [first_cpu].into_iter().collect();
            let mut separate_cpus = Vec::new();
            for cpu in domain.iter().filter(|cpu| *cpu != first_cpu) {
                let history = self
                    .sharing_history
                    .get(&(first_cpu, cpu))
                    .filter(|results| results.len() >= 2)?;
                let near_count = history.iter().filter(|shares_cache| **shares_cache).count();
                if 2 * near_count > history.len() {
                    shared_cpus.insert(cpu);
                } else {
                    separate_cpus.push([cpu].into_iter().collect());
                }
            }
            domains.push(shared_cpus);
            domains.extend(separate_cpus);
        }

        Some(domains)
    }

    fn write_placement(
        &mut self,
        view: &View<'_>,
        domains: &[CpuSet],
        plan: &mut Plan,
        reasons: &mut Vec<Reason>,
    ) {
        let shared_caches: Vec<&CpuSet> = domains.iter().filter(|cpus| cpus.count() > 1).collect();
        if shared_caches.is_empty() {
            let text = "by measurement, no two CPUs share a cache now: nothing is done".to_string();
            reasons.push(build_explanation(
                &[],
                text,
                vec![("caches".to_string(), domains.len() as f64)],
            ));
            plan.gangs.clear();
            plan.affinity.clear();
            return;
        }

        let tasks: Vec<&TaskSample> = view.movable_tasks().collect();
        let active_tasks: Vec<TaskId> = tasks
            .iter()
            .filter(|task| self.is_active(view, task))
            .map(|task| task.task)
            .collect();
        if has_no_choice(domains, &shared_caches, &active_tasks) {
            let text =
                "every active program has a CPU of the one shared cache, or there is one program: nothing to choose"
                    .to_string();
            reasons.push(build_explanation(&[], text, Vec::new()));
            plan.gangs.clear();
            plan.affinity.clear();
            self.pending_probe = None;
            return;
        }
        if self.request_next_probe(view, &active_tasks, reasons) {
            return; // evidence first; what is in force stays
        }
        let Some(costs) = estimate_costs(view, &active_tasks) else {
            let text =
                "no sensitivity or no intensity has been measured: nothing is decided".to_string();
            reasons.push(build_explanation(&[], text, Vec::new()));
            return;
        };

        if domains.len() > 1 {
            self.spread_over_caches(view, domains, &active_tasks, &costs, plan, reasons);
        } else if let [cpus] = shared_caches[..] {
            let overcommitted_cache = OvercommittedCache {
                view,
                cpus,
                tasks: &tasks,
                active_tasks: &active_tasks,
                costs: &costs,
            };
            overcommitted_cache.write_gangs(&self.parameters, plan, reasons);
        }
    }

    fn is_active(&self, view: &View<'_>, task: &TaskSample) -> bool {
        let run_ns = task.ran_ns();
        let waited_ns = task.run_queue_wait_ns.unwrap_or(0);
        let was_probed = self.intensity_windows.contains_key(&task.task);
        was_probed
            || (run_ns + waited_ns) as f64
                >= self.parameters.min_cpu_share * view.observation.span.elapsed_ns as f64
    }

    /// Requests the next missing value of the active tasks. Returns whether a probe of a task is pending.
    fn request_next_probe(
        &mut self,
        view: &View<'_>,
        active_tasks: &[TaskId],
        reasons: &mut Vec<Reason>,
    ) -> bool {
        let repeat_windows = self.parameters.probe_again_windows;
        // Probes without result, because the CPUs shared no cache or the task gave no reading, are repeated, but
        // rarely.
        let period = if repeat_windows > 0 {
            repeat_windows
        } else {
            RETRY_WINDOWS
        };
        let is_due = |last_probe_window: Option<&u64>| {
            last_probe_window
                .is_none_or(|last_window| view.observation.window >= last_window + period)
        };
        let is_initial = active_tasks.iter().any(|task| {
            !self.intensity_windows.contains_key(task)
                || !self.sensitivity_windows.contains_key(task)
        });

        if self.pending_probe.is_none()
            && has_probe_budget(&self.probe_ledger, is_initial, view, &self.parameters)
        {
            let prime_probe_of = |task| ProbeKind::PrimeProbe {
                task,
                samples: self.parameters.samples,
            };

            // Sensitivity is measured beside the strongest aggressor, and scaled by the measured intensity of the other
            // tasks.
            let stream_probe_of = |task| ProbeKind::Neighbor {
                task,
                neighbor: Neighbor::Stream,
            };
            let has_fact = |task: &TaskId, has_value: fn(&cachemate_core::Profile) -> bool| {
                view.profiles.get(task).is_some_and(has_value)
            };
            let task_without_intensity = active_tasks.iter().find(|task| {
                is_due(self.intensity_windows.get(task))
                    && (repeat_windows > 0
                        || !has_fact(task, |profile| profile.contention.intensity.is_some()))
            });

            // Without any known intensity, sensitivity would not affect the decision.
            let has_intensity = active_tasks
                .iter()
                .any(|task| has_fact(task, |profile| profile.contention.intensity.is_some()));
            let task_without_sensitivity =
                active_tasks.iter().filter(|_| has_intensity).find(|task| {
                    is_due(self.sensitivity_windows.get(task))
                        && (repeat_windows > 0
                            || !has_fact(task, |profile| profile.contention.sensitivity.is_some()))
                });
            let probe_kind = task_without_intensity
                .map(|task| prime_probe_of(*task))
                .or_else(|| task_without_sensitivity.map(|task| stream_probe_of(*task)));

            let budget_ns = self.parameters.probe_ns;
            if let Some(probe_kind) = probe_kind {
                self.pending_probe = Some(ProbeRequest {
                    id: self.next_probe_id(),
                    kind: probe_kind,
                    budget_ns,
                });
            }
        }

        let Some(open_probe) = &self.pending_probe else {
            return false;
        };
        let (task, quantity) = match open_probe.kind {
            ProbeKind::PrimeProbe { task, .. } => (task, "intensity"),
            ProbeKind::Neighbor { task, .. } => (task, "sensitivity"),
            _ => return true,
        };
        reasons.push(build_explanation(
            &[task],
            format!("the {quantity} of {{0}} is being probed"),
            Vec::new(),
        ));
        true
    }

    fn spread_over_caches(
        &self,
        view: &View<'_>,
        domains: &[CpuSet],
        active_tasks: &[TaskId],
        costs: &[Vec<f64>],
        plan: &mut Plan,
        reasons: &mut Vec<Reason>,
    ) {
        let seats = Seats {
            cpus_per_cache: domains.iter().map(CpuSet::count).collect(),
        };
        let solution = best_assignment(costs, &seats);
        plan.gangs.clear();
        plan.affinity.clear();
        for (cpus, members) in domains.iter().zip(&solution.seating.by_cache) {
            for &member in members.iter().flatten() {
                plan.affinity.insert(active_tasks[member], cpus.clone());
            }
        }

        let slowdowns = solution.seating.costs_by_program(costs);
        for (index, task) in active_tasks.iter().enumerate() {
            let cpus = &plan.affinity[task];
            let numbers = vec![("expected_degradation".to_string(), slowdowns[index])];
            let percent = 100.0 * slowdowns[index];
            let text = format!(
                "{{0}} goes to CPUs {cpus}: {percent:.0} % slower there, by the probes{}",
                describe_probed_values(view, *task)
            );
            reasons.push(build_explanation(&[*task], text, numbers));
        }
    }
}

/// The probed values of a task in brackets, for a reason.
fn describe_probed_values(view: &View<'_>, task: TaskId) -> String {
    let profile = view.profiles.get(&task);
    let intensity = profile.and_then(|profile| profile.contention.intensity);
    let sensitivity = profile.and_then(|profile| profile.contention.sensitivity);
    match (intensity, sensitivity) {
        (Some(intensity), Some(sensitivity)) => {
            format!(
                " (intensity {:.2}, sensitivity {:.2})",
                intensity.value, sensitivity.value
            )
        }
        (Some(intensity), None) => format!(" (intensity {:.2})", intensity.value),
        (None, Some(sensitivity)) => format!(" (sensitivity {:.2})", sensitivity.value),
        (None, None) => String::new(),
    }
}

/// The slowdown of each task beside each other one; `None` while no sensitivity or no intensity is known. A task of
/// unknown sensitivity is assumed to be unaffected, one of unknown intensity to be harmless.
fn estimate_costs(view: &View<'_>, active_tasks: &[TaskId]) -> Option<Vec<Vec<f64>>> {
    let value_of = |task: &TaskId, fact_of: fn(&cachemate_core::Profile) -> Option<Fact<f64>>| {
        view.profiles
            .get(task)
            .and_then(fact_of)
            .map(|fact| fact.value.max(0.0))
    };
    let sensitivities: Vec<Option<f64>> = active_tasks
        .iter()
        .map(|task| value_of(task, |profile| profile.contention.sensitivity))
        .collect();
    let intensities: Vec<Option<f64>> = active_tasks
        .iter()
        .map(|task| value_of(task, |profile| profile.contention.intensity))
        .collect();
    let has_values = |values: &[Option<f64>]| values.iter().any(Option::is_some);

    (has_values(&sensitivities) && has_values(&intensities)).then(|| {
        let pair_cost = |own_sensitivity: Option<f64>, other_intensity: Option<f64>| {
            own_sensitivity
                .zip(other_intensity)
                .map_or(0.0, |(own_sensitivity, other_intensity)| {
                    own_sensitivity * other_intensity
                })
        };
        sensitivities
            .iter()
            .map(|own_sensitivity| {
                intensities
                    .iter()
                    .map(|other_intensity| pair_cost(*own_sensitivity, *other_intensity))
                    .collect()
            })
            .collect()
    })
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters: Parameters = super::parse_parameters(parameters)?;
    let slice_ns = parameters.slice_ns.unwrap_or(1) as f64;
    ParameterRange::OneOrMore.check([
        ("window_ns", parameters.window_ns as f64),
        ("slice_ns", slice_ns),
    ])?;

    // With fewer samples, no intensity would ever be known.
    if (parameters.samples as usize) < MIN_EVICTED_SAMPLES {
        let expected = format!("{MIN_EVICTED_SAMPLES} or more");
        return Err(ParameterError::invalid_value(
            "samples",
            parameters.samples,
            expected,
        ));
    }

    ParameterRange::UpTo(1.0).check([("max_probe_share", parameters.max_probe_share)])?;
    Ok(Box::new(IntensityGangs {
        parameters,
        next_probe: 0,
        sharing_history: BTreeMap::new(),
        sensitivity_windows: BTreeMap::new(),
        intensity_windows: BTreeMap::new(),
        pending_probe: None,
        pending_ping_pongs: Vec::new(),
        last_ping_pong_ns: None,
        probe_ledger: ProbeLedger::default(),
    }))
}

#[cfg(test)]
mod tests;
