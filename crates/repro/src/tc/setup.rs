//! The chapter's workloads, its four placements, and single runs of them.

use std::collections::BTreeMap;

use cachemate_core::{
    CpuSet, Decision, Machine, MachineSpec, PipelineConfig, Plan, Policy, PolicyConfig,
    ProfilerConfig, Reason, ReasonKind, ShMapParameters, TaskId, View, WindowLength, WindowRecord,
};
use cachemate_locality::shmap::SharingCriteria;
use cachemate_papers::clustering::assign::{Chip, ThreadToPlace, assign};
use cachemate_papers::clustering::{
    ClusteringMethod, Clusters, THRESHOLD, THRESHOLD_SAMPLES_PER_THREAD, ThreadMap, find_clusters,
    scaled_threshold,
};
use cachemate_pipeline::POLICIES;
use cachemate_pipeline::{Pipeline, build_profilers, miss_penalty_of_machine};
use cachemate_sim::kernels::{self, Options};
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};
use cachemate_sim::results::RunResults;
use serde::{Deserialize, Serialize};

use crate::setup::{ManagedRun, Workload, WorkloadJob, build_pipeline, failed, run_to_end};
use crate::{ExperimentContext, Result};

pub(super) const SMALL_MACHINE: &str = "power5-2x2x2";
pub(super) const LARGE_MACHINE: &str = "power5-8x2x2";

/// The paper's lengths of a window and a round of detection, before scaling.
pub(super) const WINDOW_CYCLES: u64 = 1_000_000_000;
/// Factor by which all windows, slices and costs are shorter than the paper's.
pub(super) const TIME_SCALE: u64 = 500;
/// Samples of one round for each thread, a twentieth of the paper's (10^6 for 16 threads). Their number does not scale
/// with time, because they have to fill 256 counters per thread up to a floor of 3. Only one in twenty of the servers'
/// samples passes the filter. Each sample has the scaled cost, so that a round takes the same share of the time as at
/// full scale.
pub(super) const SAMPLES_PER_THREAD: u64 = 3_125;
/// Cycles of a turn of the counters: one interrupt on each busy CPU. Runs of the policy always pay this cost, others
/// never do.
pub(super) const COUNTER_TURN_CYCLES: u64 = 3_000;
/// An activation threshold below every program's share of remote stalls, so that all four are examined.
pub(super) const LOW_ACTIVATION: &str = "activation_share = 0.02";
/// Imbalance between chips that the paper tolerates.
const MAX_CHIP_IMBALANCE: f64 = 0.25;

/// A program of the chapter with the partition of its threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ClusterCase {
    pub name: &'static str,
    pub kernel: &'static str,
    pub options: Options,
}

impl ClusterCase {
    pub fn new(name: &'static str, kernel: &'static str, options: Options) -> Self {
        ClusterCase {
            name,
            kernel,
            options,
        }
    }

    /// The group of each thread; `None` for a background thread.
    pub fn true_groups(&self, seed: u64) -> Result<Vec<Option<u32>>> {
        Ok(kernels::build_program(self.kernel, seed, &self.options)
            .map_err(failed(self.name))?
            .groups)
    }

    /// The partition at the end of the run, if a change of phase alters it midway.
    pub fn true_groups_at_end(&self, seed: u64) -> Result<Vec<Option<u32>>> {
        Ok(kernels::build_program(self.kernel, seed, &self.options)
            .map_err(failed(self.name))?
            .later_groups)
    }
}

/// The four programs as the chapter ran them.
pub(super) fn paper_programs() -> Vec<ClusterCase> {
    let default_case = |name, kernel| ClusterCase::new(name, kernel, Options::default());
    vec![
        default_case("scoreboards", "scoreboards"),
        default_case("warehouses", "warehouses"),
        default_case("databases", "rubis"),
        default_case("chat rooms", "chatrooms"),
    ]
}

/// The policy that places the threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) enum ThreadPlacement {
    /// The machine's own scheduler.
    Default,
    RoundRobin,
    /// The program's own partition, within the policy's balance limit.
    Hand,
    /// `thread-clustering` with these parameters in addition to those of the run.
    Automatic(String),
}

impl ThreadPlacement {
    pub fn name(&self) -> &'static str {
        match self {
            ThreadPlacement::Default => "default",
            ThreadPlacement::RoundRobin => "round robin",
            ThreadPlacement::Hand => "hand",
            ThreadPlacement::Automatic(_) => "automatic",
        }
    }
}

/// Setting of one run.
#[derive(Clone, Debug)]
pub(super) struct ClusterSetting {
    pub machine: String,
    pub case: ClusterCase,
    pub seed: u64,
    pub scale: u64,
    /// Samples of one round and thread.
    pub samples_per_thread: u64,
    /// Length of the warm-up in windows of the policy.
    pub warm_up_windows: u64,
    pub measured_windows: u64,
    /// Cost of a turn of the stall breakdown's counters, at published scale; 0 if the counters are not read.
    pub counter_turn_cycles: u64,
}

impl ClusterSetting {
    pub fn new(
        context: &ExperimentContext<'_>,
        machine: &str,
        case: &ClusterCase,
        seed: u64,
    ) -> Self {
        ClusterSetting {
            machine: machine.to_string(),
            case: case.clone(),
            seed,
            scale: TIME_SCALE,
            samples_per_thread: SAMPLES_PER_THREAD,
            warm_up_windows: context.pick_by_length(2, 5, 12),
            measured_windows: context.pick(1, 3),
            counter_turn_cycles: 0,
        }
    }

    fn window_cycles(&self) -> u64 {
        WINDOW_CYCLES / self.scale
    }

    fn workload(&self) -> Result<Workload> {
        let job = WorkloadJob {
            options: self.case.options.clone(),
            ..WorkloadJob::new(self.case.kernel, self.seed)
        };
        let mut workload = Workload::from_machine_name(&self.machine, vec![job], self.seed)?;
        let counter_turn_cycles = self.counter_turn_cycles;
        workload.options = SimOptions {
            scale: self.scale,
            counter_turn_cycles,
            ..workload.options
        };
        let to_cycles = |windows| windows * self.window_cycles();
        Ok(workload.with_length(
            to_cycles(self.warm_up_windows),
            to_cycles(self.measured_windows),
        ))
    }

    /// Parameters of every automatic run, before those of the placement.
    pub fn policy_parameters(&self, extra_parameters: &str) -> Result<String> {
        let samples = self.samples_per_thread * self.case.true_groups(self.seed)?.len() as u64;
        Ok(format!(
            "window_cycles = {WINDOW_CYCLES}\nsamples = {samples}\n{extra_parameters}"
        ))
    }

    pub fn run(&self, placement: &ThreadPlacement) -> Result<ManagedRun> {
        self.with_counter_cost(placement)
            .run_under_policy(self.build_policy_for(placement)?)
    }

    /// The setting with the cost of counters, if the placement decides by them.
    fn with_counter_cost(&self, placement: &ThreadPlacement) -> Self {
        let is_automatic = matches!(placement, ThreadPlacement::Automatic(_));
        ClusterSetting {
            counter_turn_cycles: if is_automatic { COUNTER_TURN_CYCLES } else { 0 },
            ..self.clone()
        }
    }

    pub fn build_policy_for(&self, placement: &ThreadPlacement) -> Result<Box<dyn Policy>> {
        let build_policy = |name: &str, parameters: &str| {
            POLICIES
                .build(name, parameters, self.seed)
                .map_err(failed(name))
        };
        match placement {
            ThreadPlacement::Default => build_policy("default", ""),
            ThreadPlacement::RoundRobin => build_policy("round-robin", ""),
            ThreadPlacement::Hand => Ok(Box::new(self.place_by_hand(&self.workload()?)?)),
            ThreadPlacement::Automatic(extra_parameters) => build_policy(
                "thread-clustering",
                &self.policy_parameters(extra_parameters)?,
            ),
        }
    }

    /// Runs without a policy in the first windows.
    pub fn run_after_windows(
        &self,
        idle_windows: u64,
        placement: &ThreadPlacement,
    ) -> Result<ManagedRun> {
        self.with_counter_cost(placement)
            .run_under_policy(Box::new(DelayedPolicy {
                idle_windows,
                policy: self.build_policy_for(placement)?,
            }))
    }

    pub fn run_under_policy(&self, policy: Box<dyn Policy>) -> Result<ManagedRun> {
        let workload = self.workload()?;
        let profilers = vec![sharing_profiler(ShMapParameters::default().entries)];
        let first_window = WindowLength::Cycles {
            cycles: WINDOW_CYCLES,
        };
        let config = workload.pipeline("thread placement", "", profilers, first_window);
        workload.run_managed(Pipeline::with_policy(config, policy))
    }

    /// Places the program's own groups onto chips, as the policy would if it had found exactly these.
    fn place_by_hand(&self, workload: &Workload) -> Result<HandPlacement> {
        let true_groups = self.case.true_groups(self.seed)?;
        let machine = workload.build_machine()?;
        let domains = machine.topology().last_level_domains();
        let group_count = true_groups
            .iter()
            .flatten()
            .max()
            .map_or(0, |last| last + 1);

        let members_of = |group| {
            (0..true_groups.len())
                .filter(|&thread| true_groups[thread] == Some(group))
                .collect()
        };
        let clusters: Vec<Vec<usize>> = (0..group_count).map(members_of).collect();
        let chips: Vec<Chip> = domains
            .iter()
            .map(|cpus| Chip {
                cpu_count: cpus.count(),
                fixed_threads: 0,
            })
            .collect();
        let placed_clusters = assign(
            &vec![ThreadToPlace::default(); true_groups.len()],
            &clusters,
            &[],
            &chips,
            MAX_CHIP_IMBALANCE,
        );
        let chips_by_thread = placed_clusters.chip_by_thread.iter().enumerate();
        let allowed_cpus = chips_by_thread
            .filter_map(|(thread, chip)| Some((TaskId(thread as u32), domains[(*chip)?].clone())));
        Ok(HandPlacement(allowed_cpus.collect()))
    }
}

/// Runs programs of other forms under `thread-clustering` for so many nominal cycles. `machine_wide` is whether all
/// processes share one filter.
pub(super) fn run_clustering(
    spec: &MachineSpec,
    programs: Vec<SimProgram>,
    nominal_cycles: u64,
    parameters: String,
    machine_wide: bool,
    seed: u64,
) -> Result<Vec<WindowRecord>> {
    let options = SimOptions {
        seed,
        scale: TIME_SCALE,
        ends: Some(RunLimit::Cycles(nominal_cycles / TIME_SCALE)),
        counter_turn_cycles: COUNTER_TURN_CYCLES,
        ..SimOptions::default()
    };
    let machine = SimMachine::new(spec, &options, programs).map_err(failed(&spec.name))?;

    let config = PipelineConfig {
        policy: PolicyConfig {
            name: "thread-clustering".to_string(),
            parameters,
            seed,
        },
        guard: None,
        profilers: vec![ProfilerConfig::Sharing {
            parameters: ShMapParameters::default(),
            machine_wide,
        }],
        predictor: miss_penalty_of_machine(spec),
        first_window: WindowLength::Cycles {
            cycles: WINDOW_CYCLES,
        },
    };

    Ok(run_to_end(machine, build_pipeline(config)?)?.records)
}

/// A profiler with this many counters for each thread and one filter for each process.
pub(super) fn sharing_profiler(entries: usize) -> ProfilerConfig {
    let parameters = ShMapParameters {
        entries,
        ..ShMapParameters::default()
    };
    ProfilerConfig::Sharing {
        parameters,
        machine_wide: false,
    }
}

/// A placement known beforehand.
struct HandPlacement(BTreeMap<TaskId, CpuSet>);

impl Policy for HandPlacement {
    fn decide(&mut self, _: &View<'_>) -> Decision {
        let plan = Plan {
            affinity: self.0.clone(),
            ..Plan::idle(WindowLength::Cycles {
                cycles: WINDOW_CYCLES,
            })
        };
        Decision::new(plan, Vec::new())
    }
}

/// A policy that makes no decision at first and then follows the given one.
struct DelayedPolicy {
    idle_windows: u64,
    policy: Box<dyn Policy>,
}

impl Policy for DelayedPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        if view.observation.window + 1 < self.idle_windows {
            return Decision::new(
                Plan::idle(WindowLength::Cycles {
                    cycles: WINDOW_CYCLES,
                }),
                Vec::new(),
            );
        }
        self.policy.decide(view)
    }
}

/// The share of all threads' cycles that stall on remote caches.
pub(super) fn remote_stall_share(results: &RunResults) -> f64 {
    let cycles: u64 = results.tasks.iter().map(|task| task.cycles).sum();
    remote_stall_cycles(results) / cycles.max(1) as f64
}

/// The remote-cache stalls per instruction: the measure by which placements are compared, because
/// they run at different speeds.
pub(super) fn remote_stalls_per_instr(results: &RunResults) -> f64 {
    let instructions: u64 = results.tasks.iter().map(|task| task.instructions).sum();
    remote_stall_cycles(results) / instructions.max(1) as f64
}

fn remote_stall_cycles(results: &RunResults) -> f64 {
    let tasks = results.tasks.iter();
    tasks.map(|task| task.stall_cycles.remote_cache).sum()
}

/// The workers' own work per cycle (the paper's operations and messages per second).
pub(super) fn work_rate(results: &RunResults, true_groups: &[Option<u32>]) -> f64 {
    let workers = results
        .tasks
        .iter()
        .zip(true_groups)
        .filter(|(_, group)| group.is_some());
    let work: f64 = workers.filter_map(|(task, _)| task.progress).sum();
    work / results.elapsed_cycles.max(1) as f64
}

/// The adjusted Rand index of two partitions of the same things (Hubert and Arabie, 1985): 1 if
/// they are equal, about 0 if they are independent.
pub(super) fn adjusted_rand_index(first_labels: &[usize], second_labels: &[usize]) -> f64 {
    let pair_count = |n: u64| (n * n.saturating_sub(1) / 2) as f64;
    let pairs_within_keys = |keys: &mut dyn Iterator<Item = (usize, usize)>| {
        let mut counts: BTreeMap<(usize, usize), u64> = BTreeMap::new();
        keys.for_each(|key| *counts.entry(key).or_insert(0) += 1);
        counts.into_values().map(pair_count).sum::<f64>()
    };
    let joint_pairs = pairs_within_keys(
        &mut first_labels
            .iter()
            .copied()
            .zip(second_labels.iter().copied()),
    );
    let (first_pairs, second_pairs) = (
        pairs_within_keys(&mut first_labels.iter().map(|&k| (k, 0))),
        pairs_within_keys(&mut second_labels.iter().map(|&k| (k, 0))),
    );
    let expected_pairs =
        first_pairs * second_pairs / pair_count(first_labels.len() as u64).max(1.0);
    let max_pairs = (first_pairs + second_pairs) / 2.0;
    if max_pairs == expected_pairs {
        1.0
    } else {
        (joint_pairs - expected_pairs) / (max_pairs - expected_pairs)
    }
}

/// Cluster labels of threads; each unclustered thread has its own label.
pub(super) fn label_clusters(clusters: &Clusters) -> Vec<usize> {
    let label = |(thread, cluster): (usize, &Option<usize>)| {
        cluster.unwrap_or(clusters.cluster_count + thread)
    };
    clusters
        .cluster_by_thread
        .iter()
        .enumerate()
        .map(label)
        .collect()
}

/// Clusters of shMaps, at the threshold that the policy's default gives for this many samples of each thread.
pub(super) fn cluster_maps(
    maps: &[&[u8]],
    method: ClusteringMethod,
    samples_per_thread: f64,
) -> Clusters {
    let threads: Vec<ThreadMap<'_>> = maps
        .iter()
        .map(|counters| ThreadMap {
            counters,
            previous_cluster: None,
        })
        .collect();

    let sharing = SharingCriteria::default();
    let sampled_share = samples_per_thread / THRESHOLD_SAMPLES_PER_THREAD;
    find_clusters(
        method,
        &threads,
        &sharing,
        scaled_threshold(THRESHOLD, sampled_share, sharing.floor),
    )
}

/// Agreement of a partition with the program's own, over the program's workers.
pub(super) fn agreement_of_workers(cluster_of: &[usize], true_groups: &[Option<u32>]) -> f64 {
    let workers = true_groups
        .iter()
        .zip(cluster_of)
        .filter_map(|(group, &cluster)| Some(((*group)? as usize, cluster)));
    let (own_groups, found_groups): (Vec<usize>, Vec<usize>) = workers.unzip();
    adjusted_rand_index(&own_groups, &found_groups)
}

/// One round that placed threads: the clusters in its reasons, and the shMaps from which they came.
#[derive(Serialize, Deserialize)]
pub(super) struct PlacementRound {
    /// Cluster of each thread; each unclustered thread has a number of its own.
    pub cluster_of: Vec<usize>,
    pub clusters: usize,
    pub maps: Vec<Vec<u8>>,
}

impl PlacementRound {
    /// The adjusted Rand index against the program's own partition, over the program's workers.
    pub fn agreement(&self, true_groups: &[Option<u32>]) -> f64 {
        agreement_of_workers(&self.cluster_of, true_groups)
    }

    pub fn count_unclustered_workers(&self, true_groups: &[Option<u32>]) -> usize {
        true_groups
            .iter()
            .zip(&self.cluster_of)
            .filter(|(group, cluster)| group.is_some() && **cluster >= self.clusters)
            .count()
    }
}

/// All rounds of a run that placed threads. The profiler is pure, so the recorded observations
/// yield the same maps again.
pub(super) fn placement_rounds(records: &[WindowRecord], threads: usize) -> Vec<PlacementRound> {
    let mut profiler = build_profilers(&[sharing_profiler(ShMapParameters::default().entries)]);
    let mut rounds = Vec::new();

    for record in records {
        let profiles = profiler.update(&record.observation);
        let is_cluster = |reason: &&Reason| reason.kind == ReasonKind::ClusterFound;
        let clusters: Vec<&Reason> = record.decision.reasons.iter().filter(is_cluster).collect();
        if clusters.is_empty() {
            continue;
        }

        let mut cluster_by_thread: Vec<usize> =
            (0..threads).map(|thread| clusters.len() + thread).collect();
        for (cluster_number, cluster) in clusters.iter().enumerate() {
            cluster
                .tasks
                .iter()
                .for_each(|task| cluster_by_thread[task.0 as usize] = cluster_number);
        }

        let sharing_map_of = |thread: usize| {
            profiles
                .get(&TaskId(thread as u32))
                .and_then(|profile| profile.sharing_map())
        };
        rounds.push(PlacementRound {
            clusters: clusters.len(),
            cluster_of: cluster_by_thread,
            maps: (0..threads)
                .map(|thread| {
                    sharing_map_of(thread).map_or_else(Vec::new, |map| map.counters.clone())
                })
                .collect(),
        });
    }

    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the index 1 for the same partition under other names, and near 0 for a random one?
    #[test]
    fn the_index_is_1_for_equal_and_near_0_for_random_partitions() {
        assert_eq!(adjusted_rand_index(&[0, 0, 1, 1], &[7, 7, 3, 3]), 1.0);
        assert!(
            (adjusted_rand_index(&[0, 0, 0, 1, 1, 1], &[0, 0, 1, 1, 2, 2]) - 0.242_424).abs()
                < 1e-5
        );
        assert!(adjusted_rand_index(&[0, 0, 1, 1], &[0, 1, 0, 1]) < 0.0);
    }
}
