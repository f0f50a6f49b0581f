//! Places threads that share data on a common cache (thesis ch. 3), by clusters from sampled remote-cache accesses.
//!
//! Problem: threads that write the same data on different chips fetch it from each other's caches, at ten times the
//! cost of a hit, and programs do not declare which threads those are. Method: four phases repeat.
//! 1. Monitor the fraction of each process's cycles that stall on remote caches; continue if it reaches 20 % (3.4.1).
//! 2. Sample the remote accesses of those processes into shMaps, one in N, where N follows from their rate and the cost
//!    of a sample (3.4.2).
//! 3. Cluster the threads ([`crate::clustering`]).
//! 4. Give each cluster a chip within the balance limit ([`crate::clustering::assign`]); unclustered threads even out
//!    the loads.
//!
//! There are two additions to the thesis. Threads that are already together count as sharing, because their remote
//! accesses have stopped. A placement is dropped if its forecast loss of cache space (3.7.1) exceeds the cost of all
//! remote stalls.
//!
//! Properties: without samples, or if no cluster gets a chip, no thread moves. After each round without a change, the
//! wait before the next round doubles, up to a limit. Within a chip, the machine's scheduler balances the threads, or
//! each thread gets a CPU, one per core first (`within_chip = "spread"`).

mod assignment_input;

use std::collections::BTreeMap;

use cachemate_core::{
    Ability, CounterEvent, CpuSet, Decision, Plan, Policy, ProbeEvidence, ProbeId, ProbeKind,
    ProbeRequest, ProcessId, Reason, StallCause, Support, TaskId, TaskSample, View, WindowLength,
};
use cachemate_locality::shmap::SharingCriteria;
use serde::Deserialize;

use self::assignment_input::ClusterAssignmentInput;
use super::{ParameterError, ParameterRange};
use crate::clustering::assign::{Assignment, Chip, ThreadToPlace, assign};
use crate::clustering::{
    ClusteringMethod, THRESHOLD, THRESHOLD_SAMPLES_PER_THREAD, ThreadMap, find_clusters,
    scaled_threshold,
};

/// Parameters of `thread-clustering`, with the thesis's values where it states any.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    /// Minimum fraction of a process's cycles that stall on remote caches for the process to be sampled (thesis: 0.2).
    pub activation_share: f64,
    /// Cost of a line from a remote cache, for processors that count such lines but not their stalls.
    ///
    /// This applies to all processors except the thesis's Power5. The default is of the order of chip-to-chip
    /// ping-pongs on servers since 2017.
    pub remote_hit_cycles: f64,
    /// Cycles between two checks (thesis: 10^9).
    pub window_cycles: u64,
    /// Number of samples in one round (thesis: about 10^6).
    pub samples: u32,
    /// Maximum fraction of processor time for sampling and the stall breakdown together during a round (thesis: 4 %).
    pub overhead_share: f64,
    /// Part of `overhead_share` for the stall breakdown, whether or not samples are taken: an interrupt of 3000 cycles
    /// every 4 ms, at 1.5 GHz.
    pub breakdown_share: f64,
    /// Number of remote accesses per sample; 0 means that it is computed from their rate and `overhead_share`.
    pub one_in: u32,
    /// Assumed cost of a sample until one has been measured (3000 cycles at 1.5 GHz).
    pub sample_cost_ns: f64,
    /// Maximum duration of a round, which then ends with the samples taken so far.
    pub max_detection_ns: u64,
    /// Minimum similarity at `samples_per_thread` samples; it is scaled with the square of a thread's actual number.
    pub similarity_threshold: f64,
    pub samples_per_thread: f64,
    /// Counters below this value count as 0.
    pub floor: u8,
    /// Whether the floor applies before the test for global data.
    pub floor_first: bool,
    pub method: ClusteringMethod,
    /// Maximum difference between the loads of two chips, as a fraction of the fuller one.
    pub max_imbalance: f64,
    /// Minimum fraction of the window that a thread must run to be counted and moved.
    pub idle_below_share: f64,
    pub within_chip: ChipPlacement,
}

/// The placement of threads within a chip.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChipPlacement {
    /// The machine's scheduler balances among the chip's CPUs.
    Free,
    /// Every thread gets a CPU, one per core before their second contexts.
    Spread,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            activation_share: 0.2,
            remote_hit_cycles: 300.0,
            window_cycles: 1_000_000_000,
            samples: 1_000_000,
            overhead_share: 0.04,
            breakdown_share: 0.000_5,
            one_in: 0,
            sample_cost_ns: 2_000.0,
            max_detection_ns: 20_000_000_000,
            similarity_threshold: THRESHOLD,
            samples_per_thread: THRESHOLD_SAMPLES_PER_THREAD,
            floor: 3,
            floor_first: true,
            method: ClusteringMethod::CoClusters,
            max_imbalance: 0.25,
            idle_below_share: 0.02,
            within_chip: ChipPlacement::Free,
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = super::parse_parameters(text)?;
        ParameterRange::UpTo(1.0).check([
            ("activation_share", parameters.activation_share),
            ("overhead_share", parameters.overhead_share),
            ("max_imbalance", parameters.max_imbalance),
            ("idle_below_share", parameters.idle_below_share),
        ])?;

        ParameterRange::Above(0.0).check([
            ("remote_hit_cycles", parameters.remote_hit_cycles),
            ("window_cycles", parameters.window_cycles as f64),
            ("samples", f64::from(parameters.samples)),
            ("overhead_share", parameters.overhead_share),
            ("sample_cost_ns", parameters.sample_cost_ns),
            ("max_detection_ns", parameters.max_detection_ns as f64),
            ("similarity_threshold", parameters.similarity_threshold),
            ("samples_per_thread", parameters.samples_per_thread),
        ])?;

        if !(0.0..parameters.overhead_share).contains(&parameters.breakdown_share) {
            let (breakdown_share, overhead_share) =
                (parameters.breakdown_share, parameters.overhead_share);
            let expected = format!("0 to less than overhead_share, {overhead_share}");
            return Err(ParameterError::invalid_value(
                "breakdown_share",
                breakdown_share,
                expected,
            ));
        }

        Ok(parameters)
    }

    /// The target fraction for sampling, which is below the maximum: an excess shows only at the end of a window, and
    /// rates rise by a tenth from one window to the next (warehouses: 12 %).
    fn sampling_share(&self) -> f64 {
        0.9 * (self.overhead_share - self.breakdown_share)
    }
}

/// State of a round of sampling.
#[derive(Clone, Debug)]
struct SamplingRound {
    probe: ProbeRequest,
    processes: Vec<ProcessId>,
    start_ns: u64,
    sample_count: u64,
    /// Number of events that have passed, and events per sample, as the machine last reported them.
    events: u64,
    sample_period: Option<u32>,
    cost_ns: u64,
    /// Processor time that the processes have used during the round.
    busy_ns: f64,
    /// Fraction of the processes' cycles that stalled on remote caches at the start of the round.
    remote_share: f64,
}

struct ThreadClustering {
    parameters: Parameters,
    round: Option<SamplingRound>,
    next_round: u32,
    /// CPUs of every thread that has been placed.
    cpus_by_task: BTreeMap<TaskId, CpuSet>,
    /// Cluster of every thread whose cluster has a chip.
    cluster_by_task: BTreeMap<TaskId, usize>,
    sample_cost_ns: f64,
    /// Number of windows until the next round may begin, and length of the last wait.
    wait_windows: u32,
    last_wait_windows: u32,
    /// Number of threads and remote fraction when the last round changed nothing.
    last_unchanged: Option<(usize, f64)>,
}

/// Fraction of the intended samples that the first window of a round targets. The rate is that of the preceding window,
/// and rates rise while caches warm up (warehouses: by a third).
const FIRST_WINDOW_SAMPLE_SHARE: f64 = 0.75;
/// Number of windows without a new round after a move. In the first one, threads fetch their private data from the
/// previous chip, which would fill the filter.
const SETTLING_WINDOWS: u32 = 2;
/// A round is abandoned if remote stalls fall below this fraction of the activation threshold; otherwise, its filter
/// would contain another phase by the time it is full.
const ABANDON_SHARE: f64 = 0.5;
/// Maximum wait after rounds that changed nothing, in windows.
const MAX_WAIT_WINDOWS: u32 = 64;

impl Policy for ThreadClustering {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut reasons = Vec::new();
        let movable_tasks: Vec<TaskId> = view.movable_tasks().map(|task| task.task).collect();
        self.cpus_by_task
            .retain(|task, _| movable_tasks.contains(task));
        self.cluster_by_task.retain(|task, _| {
            view.observation
                .tasks
                .iter()
                .any(|sample| sample.task == *task && !sample.exited)
        });

        if let Some(round) = self.round.take() {
            self.continue_round(round, view, &mut reasons);
        } else if self.wait_windows > 0 {
            self.wait_windows -= 1;
        }

        if self.round.is_none() {
            self.start_round(view, &mut reasons);
        }
        let mut plan = Plan::idle(WindowLength::Cycles {
            cycles: self.parameters.window_cycles,
        });
        plan.affinity = self.cpus_by_task.clone();
        plan.probes = self.round.iter().map(|round| round.probe.clone()).collect();
        Decision::new(plan, reasons)
    }
}

/// The ratio of two events of a process, summed over its live threads. Multiplexed counters leave some threads without
/// a reading; these count on neither side, because the ratio would otherwise be too small.
fn event_ratio(
    view: &View<'_>,
    process: ProcessId,
    event: CounterEvent,
    base_count: impl Fn(&TaskSample) -> Option<f64>,
) -> Option<f64> {
    let threads = view
        .observation
        .tasks
        .iter()
        .filter(|task| task.process == process && !task.exited);
    let counts = threads.filter_map(|task| Some((task.counts.get(event)?, base_count(task)?)));
    let (events, base_sum) = counts.reduce(|a, b| (a.0 + b.0, a.1 + b.1))?;
    (base_sum > 0.0).then(|| events / base_sum)
}

fn on_cpu_ns(task: &TaskSample) -> f64 {
    task.on_cpu_ns.iter().map(|(_, ns)| *ns as f64).sum()
}

/// The fraction of the process's cycles that stall on remote caches. If stalls are not counted, it is computed from
/// remote hits and `hit_cycles`.
fn remote_share(view: &View<'_>, process: ProcessId, hit_cycles: f64) -> Option<f64> {
    let share_of_cycles = |event| {
        event_ratio(view, process, event, |task| {
            task.counts.get(CounterEvent::Cycles)
        })
    };
    share_of_cycles(CounterEvent::StallCycles(StallCause::RemoteCache))
        .or_else(|| Some((share_of_cycles(CounterEvent::RemoteCacheHits)? * hit_cycles).min(1.0)))
}

impl SamplingRound {
    /// A reason with the rate at which the machine sampled, which may differ from the requested rate and include other
    /// accesses.
    fn rate_reason(&self) -> Option<Reason> {
        let period = self.sample_period?;
        Some(Reason::new(
            Vec::new(),
            format!(
                "{} samples of remote accesses were taken: 1 in {period} of {} counted accesses was sampled",
                self.sample_count, self.events
            ),
            vec![
                ("samples".to_string(), self.sample_count as f64),
                ("sample_period".to_string(), f64::from(period)),
                ("counted_accesses".to_string(), self.events as f64),
            ],
        ))
    }
}

/// The reason why the machine cannot sample accesses; `None` if it can.
fn missing_sampling_reason<'a>(view: &View<'a>) -> Option<&'a str> {
    match view.capabilities.abilities.get(&Ability::SampleAccesses) {
        Some(Support::Yes { .. }) => None,
        Some(Support::No { reason: why, .. }) => Some(why),
        None => Some("because the machine does not report that it can"),
    }
}

impl ThreadClustering {
    /// Phase 1: starts a round if the remote stalls of a process reach the activation threshold.
    fn start_round(&mut self, view: &View<'_>, reasons: &mut Vec<Reason>) {
        if view.last_level_domains().len() < 2 {
            return;
        }

        if let Some(reason) = missing_sampling_reason(view) {
            let text = format!("no threads are clustered: accesses cannot be sampled, {reason}");
            let tasks = view.movable_tasks().map(|task| task.task).collect();
            reasons.push(Reason::new(tasks, text, Vec::new()));
            return;
        }

        let mut shares: Vec<(ProcessId, f64, TaskId)> = Vec::new();
        for task in view.movable_tasks() {
            if shares
                .iter()
                .all(|(process, _, _)| *process != task.process)
                && let Some(share) =
                    remote_share(view, task.process, self.parameters.remote_hit_cycles)
            {
                shares.push((task.process, share, task.task));
            }
        }
        shares.retain(|(_, share, _)| *share >= self.parameters.activation_share);
        let Some(largest_share) = shares.iter().map(|(_, share, _)| *share).reduce(f64::max) else {
            return;
        };

        let thread_count = view.movable_tasks().count();
        // The obstacle of the last round has changed if the number of threads differs, or stalls have grown by half.
        let has_changed = self
            .last_unchanged
            .is_some_and(|(threads, share)| thread_count != threads || largest_share > 1.5 * share);
        if has_changed {
            (
                self.wait_windows,
                self.last_wait_windows,
                self.last_unchanged,
            ) = (0, 0, None);
        }

        if self.wait_windows > 0 {
            return;
        }
        let processes: Vec<ProcessId> = shares.iter().map(|(process, _, _)| *process).collect();
        let sample_period = self.choose_sample_period(view, &processes);
        let text = format!(
            "the process of {{0}} waits for remote caches: a sample per {sample_period} of these accesses is requested"
        );
        let numbers = |share: f64| vec![("remote_stall_percent".to_string(), 100.0 * share)];
        reasons.extend(
            shares
                .iter()
                .map(|&(_, share, task)| Reason::new(vec![task], &text, numbers(share))),
        );
        let probe_kind = ProbeKind::AccessSamples {
            processes: processes.clone(),
            sample_period,
            remote_only: true,
            max_samples: self.parameters.samples,
        };
        let probe = ProbeRequest {
            id: ProbeId(self.next_round),
            kind: probe_kind,
            budget_ns: self.parameters.max_detection_ns,
        };
        self.next_round += 1;
        let start_ns = view.observation.span.end_ns();
        self.round = Some(SamplingRound {
            probe,
            processes,
            start_ns,
            sample_count: 0,
            events: 0,
            sample_period: None,
            cost_ns: 0,
            busy_ns: 0.0,
            remote_share: largest_share,
        });
    }

    /// Temporal sampling (3.4.2): returns the smallest sample period that the overhead allows at the rate of remote
    /// accesses.
    fn choose_sample_period(&self, view: &View<'_>, processes: &[ProcessId]) -> u32 {
        if self.parameters.one_in > 0 {
            return self.parameters.one_in;
        }
        // The process with the highest rate has the smallest time budget per access.
        let accesses_per_ns = processes.iter().filter_map(|&p| {
            event_ratio(view, p, CounterEvent::RemoteCacheHits, |task| {
                Some(on_cpu_ns(task))
            })
        });
        let share = FIRST_WINDOW_SAMPLE_SHARE * self.parameters.sampling_share();
        let events_per_sample = accesses_per_ns.fold(0.0, f64::max) * self.sample_cost_ns / share;
        libm::ceil(events_per_sample).clamp(1.0, 1e6) as u32
    }

    /// Phase 2: takes more samples, and continues with phase 3 once there are enough.
    fn continue_round(
        &mut self,
        mut round: SamplingRound,
        view: &View<'_>,
        reasons: &mut Vec<Reason>,
    ) {
        let (mut is_complete, mut window_cost_ns) = (false, 0);
        for probe_result in view
            .observation
            .probe_results
            .iter()
            .filter(|result| result.probe == round.probe.id)
        {
            if let ProbeEvidence::Samples {
                samples,
                events,
                sample_period,
                ..
            } = &probe_result.evidence
            {
                round.sample_count += samples.len() as u64;
                round.events += events;
                round.sample_period = Some(*sample_period);
            }
            window_cost_ns += probe_result.cost_ns.iter().map(|(_, ns)| ns).sum::<u64>();
            is_complete |= probe_result.complete;
        }
        round.cost_ns += window_cost_ns;
        if view.observation.applied.has_refused_probe(round.probe.id) {
            self.record_failed_round(view, round.remote_share);
            return;
        }

        let now_ns = view.observation.span.end_ns();
        if !is_complete && now_ns.saturating_sub(round.start_ns) < self.parameters.max_detection_ns
        {
            let hit_cycles = self.parameters.remote_hit_cycles;
            let shares = round
                .processes
                .iter()
                .filter_map(|&process| remote_share(view, process, hit_cycles));
            if shares
                .reduce(f64::max)
                .is_some_and(|share| share < ABANDON_SHARE * self.parameters.activation_share)
            {
                return;
            }

            self.adjust_period(&mut round, window_cost_ns, view);
            self.round = Some(round);
            return;
        }
        if round.sample_count > 0 && round.cost_ns > 0 {
            self.sample_cost_ns = round.cost_ns as f64 / round.sample_count as f64;
        }

        if !self.place_threads(&round, view, reasons) {
            self.record_failed_round(view, round.remote_share);
        }
        reasons.extend(round.rate_reason());
    }

    /// Adjusts the sample period to the overhead during a round (3.4.2), so that an excess is compensated over an
    /// equally long time. The probe keeps its number, so the shMaps continue.
    fn adjust_period(&self, round: &mut SamplingRound, window_cost_ns: u64, view: &View<'_>) {
        let tasks = view
            .observation
            .tasks
            .iter()
            .filter(|task| round.processes.contains(&task.process));
        let window_busy_ns: f64 = tasks.map(on_cpu_ns).sum();
        round.busy_ns += window_busy_ns;
        let ProbeKind::AccessSamples {
            sample_period: one_in,
            max_samples: at_most,
            ..
        } = &mut round.probe.kind
        else {
            return;
        };
        if self.parameters.one_in > 0 || window_cost_ns == 0 || window_busy_ns <= 0.0 {
            return;
        }

        let allowed_share = self.parameters.sampling_share();
        let target_share = (2.0 * allowed_share - round.cost_ns as f64 / round.busy_ns)
            .clamp(allowed_share / 4.0, allowed_share);
        let new_period = f64::from(*one_in) * window_cost_ns as f64 / window_busy_ns / target_share;
        let period = libm::ceil(new_period).clamp(1.0, 1e6) as u32;
        if period.abs_diff(*one_in) > *one_in / 8 {
            let sample_count = u32::try_from(round.sample_count).unwrap_or(u32::MAX);
            (*one_in, *at_most) = (
                period,
                self.parameters.samples.saturating_sub(sample_count).max(1),
            );
        }
    }

    fn record_failed_round(&mut self, view: &View<'_>, remote_share: f64) {
        self.last_wait_windows = (2 * self.last_wait_windows).clamp(1, MAX_WAIT_WINDOWS);
        self.wait_windows = self.last_wait_windows;
        self.last_unchanged = Some((view.movable_tasks().count(), remote_share));
    }

    /// The minimum similarity for a thread's number of samples; dot products grow with the square of that number.
    fn threshold_for_samples(&self, sample_count: u64, threads: usize) -> u64 {
        let sample_ratio =
            sample_count as f64 / threads.max(1) as f64 / self.parameters.samples_per_thread;
        scaled_threshold(
            self.parameters.similarity_threshold,
            sample_ratio,
            self.parameters.floor,
        )
    }

    /// Phases 3 and 4: clusters and places the threads. Returns whether anything changed.
    fn place_threads(
        &mut self,
        round: &SamplingRound,
        view: &View<'_>,
        reasons: &mut Vec<Reason>,
    ) -> bool {
        let threads = self.sampled_tasks(round, view);
        let clusters = self.cluster_by_filter(&threads, round.sample_count, view);
        let domains = view.last_level_domains();
        let input =
            ClusterAssignmentInput::new(&threads, &clusters, &domains, &self.cpus_by_task, view);
        let assignment = input.assign(self.parameters.max_imbalance);
        if assignment.chip_of_cluster.iter().all(Option::is_none) {
            // No cluster has a chip, so no thread is moved, and unclustered threads do not even out the loads.
            reasons.extend(
                input
                    .placement_reasons(&assignment, &domains, round)
                    .into_iter()
                    .take(input.clusters.len()),
            );
            return false;
        }
        let mut new_placement: BTreeMap<TaskId, CpuSet> = self.cpus_by_task.clone();
        let cpus = input.cpus_by_thread(&assignment, &domains, self.parameters.within_chip, view);
        let placed_threads = threads.iter().zip(cpus).filter(|(task, _)| !task.unmovable);
        new_placement.extend(placed_threads.filter_map(|(task, cpus)| Some((task.task, cpus?))));
        if new_placement == self.cpus_by_task {
            return false;
        }
        let removed_share =
            input.removed_stall_share(&assignment, view, self.parameters.remote_hit_cycles);
        if let Some(added_slowdown) = self
            .added_slowdown(&new_placement, view)
            .filter(|&harm| harm > removed_share)
        {
            let text = "clusters stay on separate chips: together they would lose more to cache contention than to \
                        remote accesses";
            let numbers = vec![
                ("forecast_loss_percent".to_string(), 100.0 * added_slowdown),
                ("removed_stall_percent".to_string(), 100.0 * removed_share),
            ];
            reasons.push(Reason::new(Vec::new(), text, numbers));
            return false;
        }
        self.cpus_by_task = new_placement;
        self.cluster_by_task
            .retain(|task, _| !input.tasks.contains(task));
        let first_number = self
            .cluster_by_task
            .values()
            .max()
            .map_or(0, |last| last + 1);
        self.cluster_by_task
            .extend(input.placed_clusters(&assignment, first_number));
        (
            self.wait_windows,
            self.last_wait_windows,
            self.last_unchanged,
        ) = (SETTLING_WINDOWS, 0, None);
        reasons.extend(input.placement_reasons(&assignment, &domains, round));
        true
    }

    /// The threads of the sampled processes that ran, in order of arrival, including fixed ones.
    fn sampled_tasks<'a>(&self, round: &SamplingRound, view: &View<'a>) -> Vec<&'a TaskSample> {
        let is_busy = |task: &&TaskSample| {
            let run_ns = task.ran_ns();
            let demand_ns = run_ns + task.run_queue_wait_ns.unwrap_or(0);
            demand_ns as f64
                >= self.parameters.idle_below_share * view.observation.span.elapsed_ns as f64
        };
        let tasks = view
            .observation
            .tasks
            .iter()
            .filter(|task| !task.exited && round.processes.contains(&task.process));
        tasks.filter(is_busy).collect()
    }

    /// The cluster of each thread; the threads of each filter are clustered separately.
    fn cluster_by_filter(
        &self,
        threads: &[&TaskSample],
        sample_count: u64,
        view: &View<'_>,
    ) -> Vec<Option<usize>> {
        let sharing = SharingCriteria {
            floor: self.parameters.floor,
            applies_floor_first: self.parameters.floor_first,
            ..SharingCriteria::default()
        };
        let threshold = self.threshold_for_samples(sample_count, threads.len());
        let filter_of = |task: &TaskSample| {
            let is_machine_wide = view
                .profiles
                .get(&task.task)
                .and_then(|profile| profile.sharing_map())
                .is_some_and(|map| map.machine_wide);
            (!is_machine_wide).then_some(task.process)
        };

        let mut filters: Vec<Option<ProcessId>> = Vec::new();
        threads
            .iter()
            .map(|task| filter_of(task))
            .for_each(|process_filter| {
                if !filters.contains(&process_filter) {
                    filters.push(process_filter);
                }
            });

        let (mut cluster_by_thread, mut cluster_count) = (vec![None; threads.len()], 0);
        for process_filter in filters {
            let members: Vec<usize> = (0..threads.len())
                .filter(|&index| filter_of(threads[index]) == process_filter)
                .collect();
            let map_of_thread = |&thread_index: &usize| {
                let task = threads[thread_index].task;
                let map = view
                    .profiles
                    .get(&task)
                    .and_then(|profile| profile.sharing_map());
                let counters = map.map(|map| map.counters.as_slice());
                ThreadMap {
                    counters: counters.unwrap_or(&[]),
                    previous_cluster: self.cluster_by_task.get(&task).copied(),
                }
            };
            let maps: Vec<ThreadMap<'_>> = members.iter().map(map_of_thread).collect();
            let clusters = find_clusters(self.parameters.method, &maps, &sharing, threshold);
            for (&at, cluster) in members.iter().zip(&clusters.cluster_by_thread) {
                cluster_by_thread[at] = cluster.map(|cluster| cluster_count + cluster);
            }
            cluster_count += clusters.cluster_count;
        }
        cluster_by_thread
    }

    /// The mean slowdown that the placement is forecast to add (thesis 3.7.1); `None` without a forecast.
    fn added_slowdown(
        &self,
        new_placement: &BTreeMap<TaskId, CpuSet>,
        view: &View<'_>,
    ) -> Option<f64> {
        let mean_slowdown_under = |affinity: &BTreeMap<TaskId, CpuSet>| {
            let mut plan = Plan::idle(WindowLength::Cycles {
                cycles: self.parameters.window_cycles,
            });
            plan.affinity = affinity.clone();
            let forecast = view.predictor.forecast(view, &plan);
            let forecast_of = |task: &TaskId| Some(forecast.tasks.get(task)?.degradation?.value);
            let slowdowns: Option<Vec<f64>> = new_placement.keys().map(forecast_of).collect();
            slowdowns
                .filter(|slowdowns| !slowdowns.is_empty())
                .map(|slowdowns| slowdowns.iter().sum::<f64>() / slowdowns.len() as f64)
        };
        Some(mean_slowdown_under(new_placement)? - mean_slowdown_under(&self.cpus_by_task)?)
    }
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters = Parameters::parse(parameters)?;
    Ok(Box::new(ThreadClustering {
        parameters,
        round: None,
        next_round: 0,
        cpus_by_task: BTreeMap::new(),
        cluster_by_task: BTreeMap::new(),
        sample_cost_ns: parameters.sample_cost_ns,
        wait_windows: 0,
        last_wait_windows: 0,
        last_unchanged: None,
    }))
}

#[cfg(test)]
mod tests;
