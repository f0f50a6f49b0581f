//! The machine, workload and policies of both papers on multithreaded chip multiprocessors (BS, CASC).
//!
//! Two cores with four contexts each share an L2 of 48 to 768 KB. There are 18 threads: six copies each of twolf, art
//! and BerkeleyDB, every copy with its own input (CASC 5). Everything here was chosen before any policy was run: the
//! machine from published data (its file names the sources), the programs from the table of programs, and all times at
//! one scale. The default scheduler is the fair one. Solaris's time sharing is compared at a scale of its own. With
//! quanta of 200 ms for programs that never sleep, a round of 18 threads takes nearly half a second, and the priority
//! lift that prevents starvation comes once a second; at the common scale neither would fit into a run.

pub mod cells;
pub mod groups;
pub mod sensitivity;
pub mod stalls;

use std::collections::BTreeMap;

use cachemate_core::{
    CacheId, CacheLevel, CoRunRowParameters, CpuSet, Decision, Gang, GangSchedule, PhaseParameters,
    Plan, Policy, ProfilerConfig, ReplacementModel, SplitMix64, TaskId, View, WindowLength,
};
use cachemate_papers::solvers::balance::{
    GroupModel, RotationRule, build_rotation, find_best_groups,
};
use cachemate_pipeline::Pipeline;
use cachemate_sim::metrics;
use cachemate_sim::os::schedulers::SchedulerKind;
use cachemate_sim::results::RunResults;
use serde::Serialize;

use self::stalls::{ContentionBreakdown, break_down_contention};
use crate::run_request::workload_label;
use crate::setup::{
    Comparison, SpeedupScores, Workload, WorkloadJob, build_pipeline, failed, score_results,
};
use crate::sources::digest_of;
use crate::store::{self, RunName};
use crate::{ExperimentContext, Result, least, mean};

/// The papers' L2 sizes, in KB.
pub const SIZES_KB: [u64; 5] = [48, 96, 192, 384, 768];
/// Factor by which slices, windows and measurements are shorter than published.
pub const TIME_SCALE: u64 = 5;
/// The same factor under Solaris's time sharing.
pub const SOLARIS_TIME_SCALE: u64 = 50;
/// Nominal window: the papers' clock tick, and the default scheduler's slice on this machine.
const NOMINAL_WINDOW_NS: u64 = 10_000_000;
const GREEDY_PROGRAM: &str = "art";
pub const KERNELS: [&str; 3] = ["twolf", "art", "berkeleydb"];
pub const COPIES_PER_PROGRAM: u64 = 6;
pub const CONTEXT_COUNT: usize = 8;

/// Maximum progress of a program when a run begins. It exceeds art's longest period (the relaxation and the scans of a
/// window), so that the six copies are in different phases. If all copies started together, they would scan while rates
/// are measured and relax afterwards.
const MAX_START_PROGRESS_INSTR: u64 = 8_000_000;

fn with_start_progress(job: WorkloadJob) -> WorkloadJob {
    let start_progress_instr = SplitMix64::new(job.seed).draw_below(MAX_START_PROGRESS_INSTR);
    WorkloadJob {
        under_way_instructions: start_progress_instr,
        ..job
    }
}

/// CASC's 18 threads, in the order in which copies were started: one of each program after another.
pub fn casc_jobs(seed: u64) -> Vec<WorkloadJob> {
    let copies_by_kernel = KERNELS.map(|kernel| {
        WorkloadJob::copies(kernel, COPIES_PER_PROGRAM, seed)
            .into_iter()
            .map(with_start_progress)
            .collect::<Vec<WorkloadJob>>()
    });
    (0..COPIES_PER_PROGRAM as usize)
        .flat_map(|copy| copies_by_kernel.iter().map(move |jobs| jobs[copy].clone()))
        .collect()
}

/// Every SPEC CPU2000 program of the table, once; the balance-sets paper does not specify its workload further.
pub const SPEC_2000_PROGRAMS: [&str; 19] = [
    "ammp", "applu", "apsi", "art", "bzip2", "crafty", "equake", "gap", "gcc", "gzip", "mcf",
    "mesa", "mgrid", "parser", "perl", "swim", "twolf", "vortex", "vpr",
];

/// The set of threads that run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ThreadMix {
    Casc,
    Spec2000,
}

impl ThreadMix {
    pub fn jobs(self, seed: u64) -> Vec<WorkloadJob> {
        match self {
            ThreadMix::Casc => casc_jobs(seed),
            ThreadMix::Spec2000 => SPEC_2000_PROGRAMS
                .iter()
                .map(|kernel| with_start_progress(WorkloadJob::new(kernel, seed)))
                .collect(),
        }
    }
}

/// Parameters of a run, except its policy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NiagaraSetting {
    pub mix: ThreadMix,
    pub l2_kb: u64,
    pub seed: u64,
    pub memory_latency_cycles: Option<u32>,
    pub bytes_per_cycle: Option<f64>,
    pub scheduler: SchedulerKind,
    pub scale: u64,
    pub is_quick: bool,
    pub is_sample: bool,
}

impl NiagaraSetting {
    pub fn new(l2_kb: u64, seed: u64, context: &ExperimentContext<'_>) -> Self {
        NiagaraSetting {
            mix: ThreadMix::Casc,
            l2_kb,
            seed,
            memory_latency_cycles: None,
            bytes_per_cycle: None,
            scheduler: SchedulerKind::Linux,
            scale: TIME_SCALE,
            is_quick: context.quick,
            is_sample: context.sample,
        }
    }

    /// Selects the paper's baseline. A round of 18 threads with quanta of 200 ms and the lift once a second would not
    /// fit into a run at the scale of the others; the effect of a time slice on the caches is over long before either
    /// ends.
    pub fn with_solaris(self) -> Self {
        NiagaraSetting {
            scheduler: SchedulerKind::Solaris,
            scale: SOLARIS_TIME_SCALE,
            ..self
        }
    }

    pub fn build_workload(&self, jobs: Vec<WorkloadJob>) -> Result<Workload> {
        let (warm_up_cycles, measured_cycles) = match (self.is_quick, self.mix) {
            (true, _) if self.is_sample => (8_000_000, 8_000_000),
            (true, _) => (36_000_000, 36_000_000),
            (false, ThreadMix::Casc) => (60_000_000, 72_000_000),
            // Every qualifying group gets a turn: 76 turns of 10 ms each are 151 M cycles at this scale.
            (false, ThreadMix::Spec2000) => (60_000_000, 160_000_000),
        };
        let mut workload = Workload::from_machine_name("niagara-2core", jobs, self.seed)?
            .with_length(warm_up_cycles, measured_cycles);
        workload.options.scale = self.scale;
        workload.options.scheduler = self.scheduler;
        let last_cache = workload
            .machine
            .caches
            .last_mut()
            .ok_or_else(|| failed("niagara-2core")("no cache"))?;
        last_cache.size_bytes = self.l2_kb << 10;
        let memory = &mut workload.machine.memory;
        if let Some(cycles) = self.memory_latency_cycles {
            (memory.local_latency_cycles, memory.remote_latency_cycles) = (cycles, cycles);
        }

        memory.bytes_per_cycle = self.bytes_per_cycle.unwrap_or(memory.bytes_per_cycle);
        Ok(workload)
    }
}

/// Maximum length of a row. Rows are doubled at most once, so that all rates are known when the warm-up ends.
pub const MAX_ROW_NS: u64 = 5_000_000;

/// The thesis's detector with ten times its threshold, because these programs miss ten times as often as the thesis's.
const PHASE_PARAMETERS: PhaseParameters = PhaseParameters {
    history: 3,
    threshold: 30.0,
    edge_share: 0.5,
};
const PHASE_INTERVAL_INSTR: f64 = 200_000.0;

/// The policy of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub enum NiagaraPolicy {
    /// The machine's own time sharing, without a policy.
    Default,
    /// Runs only one thread of the greedy program at a time, and the others fairly: the gain that needs no
    /// measurements.
    OneGreedy,
    Casc {
        parameters: String,
        /// Whether PCMRs come from the members' own counts instead of the linear solver.
        uses_own_counts: bool,
        /// Whether threads are measured again when their miss rate indicates a change of phase.
        follows_phases: bool,
    },
    BalanceSet(String),
}

impl NiagaraPolicy {
    pub fn literal_policy(extra_parameters: &str) -> Self {
        NiagaraPolicy::Casc {
            parameters: format!("form = \"literal\"\n{extra_parameters}"),
            uses_own_counts: false,
            follows_phases: false,
        }
    }
    pub fn better_policy(extra_parameters: &str) -> Self {
        let parameters =
            format!("form = \"better\"\nmax_row_ns = {MAX_ROW_NS}\n{extra_parameters}");
        NiagaraPolicy::Casc {
            parameters,
            uses_own_counts: true,
            follows_phases: false,
        }
    }
    pub fn phase_following_policy() -> Self {
        match NiagaraPolicy::better_policy("") {
            NiagaraPolicy::Casc {
                parameters,
                uses_own_counts: own_counts,
                ..
            } => NiagaraPolicy::Casc {
                parameters,
                uses_own_counts: own_counts,
                follows_phases: true,
            },
            other => other,
        }
    }

    fn profiler_configs(&self, l2_kb: u64) -> Vec<ProfilerConfig> {
        let level = CacheLevel::L2;
        let counters = ProfilerConfig::Counters {
            level,
            min_instructions: 100_000.0,
        };

        match self {
            NiagaraPolicy::Default | NiagaraPolicy::OneGreedy => Vec::new(),
            NiagaraPolicy::Casc {
                uses_own_counts: own_counts,
                follows_phases: phases,
                ..
            } => {
                let parameters = CoRunRowParameters {
                    uses_task_counts: *own_counts,
                    ..CoRunRowParameters::default()
                };
                let row_profiler = ProfilerConfig::CoRunRows { level, parameters };
                let phase_profiler = ProfilerConfig::Phases {
                    level,
                    parameters: PHASE_PARAMETERS,
                    interval_instructions: PHASE_INTERVAL_INSTR,
                };
                phases
                    .then_some(phase_profiler)
                    .into_iter()
                    .chain([counters, row_profiler])
                    .collect()
            }
            NiagaraPolicy::BalanceSet(_) => {
                let reuse_profiler = ProfilerConfig::Reuse {
                    level,
                    replacement: ReplacementModel::Lru,
                    line_bytes: 64,
                    sizes_bytes: vec![(l2_kb << 10) / CONTEXT_COUNT as u64, l2_kb << 10],
                    includes_code: true,
                };
                vec![counters, reuse_profiler]
            }
        }
    }

    fn pipeline_for(&self, workload: &Workload, l2_kb: u64) -> Result<Pipeline> {
        let policy_config = |name: &str, parameters: &str| {
            workload.pipeline(
                name,
                parameters,
                self.profiler_configs(l2_kb),
                WindowLength::Time {
                    ns: NOMINAL_WINDOW_NS,
                },
            )
        };

        match self {
            NiagaraPolicy::Default => build_pipeline(policy_config("default", "")),
            NiagaraPolicy::OneGreedy => {
                let policy = Box::new(OneArtPerGang {
                    gangs_in_order: Vec::new(),
                });
                Ok(Pipeline::with_policy(
                    policy_config("one-greedy", ""),
                    policy,
                ))
            }
            NiagaraPolicy::Casc { parameters, .. } => {
                build_pipeline(policy_config("casc", parameters))
            }
            NiagaraPolicy::BalanceSet(parameters) => {
                build_pipeline(policy_config("balance-set", parameters))
            }
        }
    }
}

/// Runs the mix under one policy.
pub fn run(setting: &NiagaraSetting, policy: &NiagaraPolicy) -> Result<RunResults> {
    run_jobs(setting, policy, &setting.mix.jobs(setting.seed))
}

pub fn run_jobs(
    setting: &NiagaraSetting,
    policy: &NiagaraPolicy,
    jobs: &[WorkloadJob],
) -> Result<RunResults> {
    let mut workload = setting.build_workload(jobs.to_vec())?;
    if jobs.len() == 1 {
        // A single thread is fast enough to simulate whole periods of art.
        workload = workload.with_length(4_000_000, 40_000_000);
    }
    run_workload(&workload, policy, setting.l2_kb)
}

/// Runs a workload on another machine under one policy.
pub fn run_workload(workload: &Workload, policy: &NiagaraPolicy, l2_kb: u64) -> Result<RunResults> {
    if *policy == NiagaraPolicy::Default {
        return workload.unmanaged_run();
    }
    let label = format!("{} under {policy:?}", workload_label(workload));
    let source_digest = digest_of(module_path!()).to_string();
    let name = RunName::new("steered", label, source_digest, &(workload, policy, l2_kb))?;
    store::find_or_make(name, || {
        Ok(workload
            .run_managed(policy.pipeline_for(workload, l2_kb)?)?
            .results)
    })
}

/// The instructions per cycle of each thread alone on the machine, from one copy of each program,
/// because copies differ only in input.
pub fn measure_solo_speeds(setting: &NiagaraSetting) -> Result<Vec<f64>> {
    let jobs = setting.mix.jobs(setting.seed);
    let mut speed_by_kernel: BTreeMap<&str, f64> = BTreeMap::new();
    for job in &jobs {
        if !speed_by_kernel.contains_key(job.kernel.as_str()) {
            let solo_run = run_jobs(
                &NiagaraSetting {
                    is_quick: true,
                    ..*setting
                },
                &NiagaraPolicy::Default,
                std::slice::from_ref(job),
            )?;
            speed_by_kernel.insert(&job.kernel, solo_run.instructions_per_cycle());
        }
    }

    Ok(jobs
        .iter()
        .map(|job| speed_by_kernel[job.kernel.as_str()])
        .collect())
}

/// Comparison of one policy with the default scheduler.
pub struct NiagaraResult {
    pub gain: Comparison,
    pub scores: SpeedupScores,
    pub default_scores: SpeedupScores,
    /// L2 misses per reference relative to the default's, minus one.
    pub misses_change: f64,
    pub miss_ratio: f64,
    pub default_miss_ratio: f64,
    /// Standard deviation of run times divided by their mean.
    pub variation: f64,
    pub default_variation: f64,
    /// The smallest share of CPU time divided by the mean share.
    pub least_share: f64,
    pub default_least_share: f64,
    pub busy_share: f64,
    /// Names of threads that did not run in the measured part of one of the two runs.
    pub never_ran: Vec<String>,
    /// Share of all run time that the copies of art get.
    pub art_share: f64,
    /// Breakdown of the contention in `gain`; NaN if that is NaN.
    pub contention_at: ContentionBreakdown,
}

pub fn measure(setting: &NiagaraSetting, policy: &NiagaraPolicy) -> Result<NiagaraResult> {
    measure_against(setting, policy, setting)
}

/// Compares a policy as [`measure`] does, but with the default scheduler of another setting.
pub fn measure_against(
    setting: &NiagaraSetting,
    policy: &NiagaraPolicy,
    baseline: &NiagaraSetting,
) -> Result<NiagaraResult> {
    let (policy_run, default_run) = (
        run(setting, policy)?,
        run(baseline, &NiagaraPolicy::Default)?,
    );
    let solo_speeds = measure_solo_speeds(setting)?;
    let (new_results, old_results): (&RunResults, &RunResults) = (&policy_run, &default_run);
    let no_references_error = || failed("comparison")("the cache had no references");
    let idle_tasks = [new_results, old_results]
        .into_iter()
        .flat_map(|results| &results.tasks)
        .filter(|task| task.instructions == 0);
    let mut idle_threads: Vec<String> = idle_tasks.map(|task| task.name.clone()).collect();
    idle_threads.sort();
    idle_threads.dedup();
    // A thread that never ran has no speed, so the mix is reported as not measured.
    let missing_value = f64::NAN;
    let missing_scores = SpeedupScores {
        weighted_speedup: missing_value,
        harmonic_mean: missing_value,
        worst_slowdown: missing_value,
        mean_degradation: missing_value,
    };
    let missing_breakdown = ContentionBreakdown {
        issue: missing_value,
        misses: missing_value,
        queues: missing_value,
        system: missing_value,
    };
    let run_time_shares = |results: &RunResults| {
        results
            .tasks
            .iter()
            .map(|task| task.run_time_share)
            .collect::<Vec<f64>>()
    };
    let time_shares = run_time_shares(new_results);
    let total_time: f64 = time_shares.iter().sum();
    let min_share = |times: &[f64]| least(times.iter()) / mean(times);
    let art_tasks = new_results
        .tasks
        .iter()
        .filter(|task| task.name.starts_with(GREEDY_PROGRAM));
    let (miss_ratio, default_miss_ratio) = (
        l2_miss_ratio(new_results).ok_or_else(no_references_error)?,
        l2_miss_ratio(old_results).ok_or_else(no_references_error)?,
    );
    Ok(NiagaraResult {
        gain: Comparison::compare(new_results, old_results),
        scores: score_results(new_results, &solo_speeds).unwrap_or(missing_scores),
        default_scores: score_results(old_results, &solo_speeds).unwrap_or(missing_scores),
        never_ran: idle_threads,
        misses_change: miss_ratio / default_miss_ratio - 1.0,
        miss_ratio,
        default_miss_ratio,
        variation: metrics::coefficient_of_variation(&time_shares)
            .ok_or_else(no_references_error)?,
        default_variation: metrics::coefficient_of_variation(&run_time_shares(old_results))
            .ok_or_else(no_references_error)?,
        least_share: min_share(&time_shares),
        default_least_share: min_share(&run_time_shares(old_results)),
        busy_share: new_results.busy_share,
        art_share: art_tasks.map(|task| task.run_time_share).sum::<f64>() / total_time,
        contention_at: break_down_contention(new_results, old_results).unwrap_or(missing_breakdown),
    })
}

/// The gain over the default of a schedule that never runs the greedy program.
pub fn measure_gain_without_greedy(setting: &NiagaraSetting) -> Result<f64> {
    let other_jobs: Vec<WorkloadJob> = setting
        .mix
        .jobs(setting.seed)
        .into_iter()
        .filter(|job| job.kernel != GREEDY_PROGRAM)
        .collect();
    let without_greedy = run_jobs(setting, &NiagaraPolicy::Default, &other_jobs)?;
    Ok(without_greedy.instructions_per_cycle()
        / run(setting, &NiagaraPolicy::Default)?.instructions_per_cycle()
        - 1.0)
}

/// `None` if nothing referenced the L2.
pub fn l2_miss_ratio(results: &RunResults) -> Option<f64> {
    results.level_breakdown(CacheLevel::L2)?.miss_ratio()
}

/// A policy whose gangs have one copy of art each, with turns as even as that allows.
struct OneArtPerGang {
    gangs_in_order: Vec<Gang>,
}

impl Policy for OneArtPerGang {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: NOMINAL_WINDOW_NS,
        });

        if self.gangs_in_order.is_empty() {
            let tasks: Vec<TaskId> = view
                .observation
                .tasks
                .iter()
                .map(|task| task.task)
                .collect();
            let is_greedy_by_task = view
                .observation
                .tasks
                .iter()
                .map(|task| f64::from(u8::from(task.name.starts_with(GREEDY_PROGRAM))));
            let group_model = GroupModel::Average(is_greedy_by_task.collect());
            let groups = build_rotation(
                &group_model,
                &find_best_groups(&group_model, CONTEXT_COUNT),
                RotationRule::Fair,
            );
            let gang_of_group = |group: &Vec<usize>| Gang {
                members: group.iter().map(|&index| (tasks[index], None)).collect(),
                slices: 1,
            };
            self.gangs_in_order = groups.iter().map(gang_of_group).collect();
        }
        let cpus: CpuSet = (0..CONTEXT_COUNT as u32).collect();
        plan.gangs.push(GangSchedule {
            cpus,
            slice_ns: NOMINAL_WINDOW_NS,
            gangs: self.gangs_in_order.clone(),
        });
        Decision::new(plan, Vec::new())
    }
}

/// `None` on a machine without one.
pub fn shared_l2(workload: &Workload) -> Option<CacheId> {
    let topology = workload.machine.topology();
    topology.last_level_caches().next().map(|cache| cache.id)
}
