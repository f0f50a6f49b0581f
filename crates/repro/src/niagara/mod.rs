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
    CacheId, CacheLevel, CoRunRowParameters, CpuSet, Decision, Gang, GangSchedule, PhaseParameters, Plan, Policy,
    ProfilerConfig, ReplacementModel, SplitMix64, TaskId, View, WindowLength,
};
use cachemate_pipeline::Pipeline;
use cachemate_policy::solvers::balance::{GroupModel, RotationRule, best_groups, rotation};
use cachemate_sim::metrics;
use cachemate_sim::os::schedulers::SchedulerKind;
use cachemate_sim::results::RunResults;
use serde::{Deserialize, Serialize};

use self::stalls::{ContentionBreakdown, contention_at};
use crate::run_request::workload_label;
use crate::setup::{Comparison, SpeedupScores, Workload, WorkloadJob, build_pipeline, failed, score_results};
use crate::sources::digest_of;
use crate::store::{self, RunName};
use crate::{ExperimentContext, ReproError, mean};

/// The papers' L2 sizes, in KB.
pub const SIZES_KB: [u64; 5] = [48, 96, 192, 384, 768];
/// Factor by which slices, windows and measurements are shorter than published.
pub const SCALE: u64 = 5;
/// The same factor under Solaris's time sharing.
pub const SOLARIS_SCALE: u64 = 50;
/// Nominal window: the papers' clock tick, and the default scheduler's slice on this machine.
const WINDOW_NS: u64 = 10_000_000;
const GREEDY: &str = "art";
pub const KERNELS: [&str; 3] = ["twolf", "art", "berkeleydb"];
pub const COPIES: u64 = 6;
pub const CONTEXTS: usize = 8;

/// Maximum progress of a program when a run begins. It exceeds art's longest period (the relaxation and the scans of a
/// window), so that the six copies are in different phases. If all copies started together, they would scan while rates
/// are measured and relax afterwards.
const MAX_UNDER_WAY_INSTR: u64 = 8_000_000;

fn start_job_under_way(job: WorkloadJob) -> WorkloadJob {
    let under_way_instructions = SplitMix64::new(job.seed).draw_below(MAX_UNDER_WAY_INSTR);
    WorkloadJob { under_way_instructions, ..job }
}

/// CASC's 18 threads, in the order in which copies were started: one of each program after another.
pub fn casc_jobs(seed: u64) -> Vec<WorkloadJob> {
    let copies = KERNELS.map(|kernel| {
        WorkloadJob::copies(kernel, COPIES, seed).into_iter().map(start_job_under_way).collect::<Vec<WorkloadJob>>()
    });
    (0..COPIES as usize).flat_map(|copy| copies.iter().map(move |jobs| jobs[copy].clone())).collect()
}

/// Every SPEC CPU2000 program of the table, once; the balance-sets paper does not specify its workload further.
pub const SPEC_2000: [&str; 19] = [
    "ammp", "applu", "apsi", "art", "bzip2", "crafty", "equake", "gap", "gcc", "gzip", "mcf", "mesa", "mgrid",
    "parser", "perl", "swim", "twolf", "vortex", "vpr",
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
            ThreadMix::Spec2000 => {
                SPEC_2000.iter().map(|kernel| start_job_under_way(WorkloadJob::new(kernel, seed))).collect()
            }
        }
    }
}

/// Parameters of a run, except its policy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NiagaraSetting {
    pub mix: ThreadMix,
    pub l2_kb: u64,
    pub seed: u64,
    pub memory_cycles: Option<u32>,
    pub bytes_per_cycle: Option<f64>,
    pub scheduler: SchedulerKind,
    pub scale: u64,
    pub quick: bool,
    pub sample: bool,
}

impl NiagaraSetting {
    pub fn new(l2_kb: u64, seed: u64, context: &ExperimentContext<'_>) -> Self {
        NiagaraSetting {
            mix: ThreadMix::Casc,
            l2_kb,
            seed,
            memory_cycles: None,
            bytes_per_cycle: None,
            scheduler: SchedulerKind::Linux,
            scale: SCALE,
            quick: context.quick,
            sample: context.sample,
        }
    }

    /// Selects the paper's baseline. A round of 18 threads with quanta of 200 ms and the lift once a second would not
    /// fit into a run at the scale of the others; the effect of a time slice on the caches is over long before either
    /// ends.
    pub fn with_solaris(self) -> Self {
        NiagaraSetting { scheduler: SchedulerKind::Solaris, scale: SOLARIS_SCALE, ..self }
    }

    pub fn build_workload(&self, jobs: Vec<WorkloadJob>) -> Result<Workload, ReproError> {
        let (warm_up, measured) = match (self.quick, self.mix) {
            (true, _) if self.sample => (8_000_000, 8_000_000),
            (true, _) => (36_000_000, 36_000_000),
            (false, ThreadMix::Casc) => (60_000_000, 72_000_000),
            // Every qualifying group gets a turn: 76 turns of 10 ms each are 151 M cycles at this scale.
            (false, ThreadMix::Spec2000) => (60_000_000, 160_000_000),
        };
        let mut workload =
            Workload::from_machine_name("niagara-2core", jobs, self.seed)?.with_length(warm_up, measured);
        workload.options.scale = self.scale;
        workload.options.scheduler = self.scheduler;
        let last = workload.machine.caches.last_mut().ok_or_else(|| failed("niagara-2core")("no cache"))?;
        last.size_bytes = self.l2_kb << 10;
        let memory = &mut workload.machine.memory;
        if let Some(cycles) = self.memory_cycles {
            (memory.local_latency_cycles, memory.remote_latency_cycles) = (cycles, cycles);
        }
        memory.bytes_per_cycle = self.bytes_per_cycle.unwrap_or(memory.bytes_per_cycle);
        Ok(workload)
    }
}

/// Maximum length of a row. Rows are doubled at most once, so that all rates are known when the warm-up ends.
pub const LONGEST_ROW_NS: u64 = 5_000_000;

/// The thesis's detector with ten times its threshold, because these programs miss ten times as often as the thesis's.
const PHASES: PhaseParameters = PhaseParameters { history: 3, threshold: 30.0, edge_share: 0.5 };
const PHASE_INTERVAL_INSTR: f64 = 200_000.0;

/// The policy of a run.
#[derive(Clone, PartialEq, Debug)]
pub enum NiagaraPolicy {
    /// The machine's own time sharing, without a policy.
    Default,
    /// Runs only one thread of the greedy program at a time, and the others fairly: the gain that needs no
    /// measurements.
    OneGreedy,
    Casc {
        parameters: String,
        /// Whether PCMRs come from the members' own counts instead of the linear solver.
        own_counts: bool,
        /// Are threads measured again when their miss rate indicates a change of phase?
        phases: bool,
    },
    BalanceSet(String),
}

impl NiagaraPolicy {
    pub fn literal(extra_parameters: &str) -> Self {
        NiagaraPolicy::Casc {
            parameters: format!("form = \"literal\"\n{extra_parameters}"),
            own_counts: false,
            phases: false,
        }
    }
    pub fn better_policy(extra_parameters: &str) -> Self {
        let parameters = format!("form = \"better\"\nmax_row_ns = {LONGEST_ROW_NS}\n{extra_parameters}");
        NiagaraPolicy::Casc { parameters, own_counts: true, phases: false }
    }
    pub fn following_phases() -> Self {
        match NiagaraPolicy::better_policy("") {
            NiagaraPolicy::Casc { parameters, own_counts, .. } => {
                NiagaraPolicy::Casc { parameters, own_counts, phases: true }
            }
            other => other,
        }
    }

    fn profiler_configs(&self, l2_kb: u64) -> Vec<ProfilerConfig> {
        let level = CacheLevel::L2;
        let counters = ProfilerConfig::Counters { level, min_instructions: 100_000.0 };
        match self {
            NiagaraPolicy::Default | NiagaraPolicy::OneGreedy => Vec::new(),
            NiagaraPolicy::Casc { own_counts, phases, .. } => {
                let parameters = CoRunRowParameters { uses_task_counts: *own_counts, ..CoRunRowParameters::default() };
                let rows = ProfilerConfig::CoRunRows { level, parameters };
                let detector =
                    ProfilerConfig::Phases { level, parameters: PHASES, interval_instructions: PHASE_INTERVAL_INSTR };
                phases.then_some(detector).into_iter().chain([counters, rows]).collect()
            }
            NiagaraPolicy::BalanceSet(_) => {
                let reuse = ProfilerConfig::Reuse {
                    level,
                    replacement: ReplacementModel::Lru,
                    line_bytes: 64,
                    sizes_bytes: vec![(l2_kb << 10) / CONTEXTS as u64, l2_kb << 10],
                    includes_code: true,
                };
                vec![counters, reuse]
            }
        }
    }

    fn pipeline_for(&self, workload: &Workload, l2_kb: u64) -> Result<Pipeline, ReproError> {
        let policy_config = |name: &str, parameters: &str| {
            workload.pipeline(name, parameters, self.profiler_configs(l2_kb), WindowLength::Time { ns: WINDOW_NS })
        };
        match self {
            NiagaraPolicy::Default => build_pipeline(policy_config("default", "")),
            NiagaraPolicy::OneGreedy => {
                let policy = Box::new(OneArtPerGang { gangs: Vec::new() });
                Ok(Pipeline::with_policy(policy_config("one-greedy", ""), policy))
            }
            NiagaraPolicy::Casc { parameters, .. } => build_pipeline(policy_config("casc", parameters)),
            NiagaraPolicy::BalanceSet(parameters) => build_pipeline(policy_config("balance-set", parameters)),
        }
    }
}

/// Runs the mix under one policy.
pub fn run(setting: &NiagaraSetting, policy: &NiagaraPolicy) -> Result<RunResults, ReproError> {
    run_jobs(setting, policy, &setting.mix.jobs(setting.seed))
}

/// Runs other jobs under one policy.
pub fn run_jobs(
    setting: &NiagaraSetting,
    policy: &NiagaraPolicy,
    jobs: &[WorkloadJob],
) -> Result<RunResults, ReproError> {
    let mut workload = setting.build_workload(jobs.to_vec())?;
    if jobs.len() == 1 {
        // A single thread is fast enough to simulate whole periods of art.
        workload = workload.with_length(4_000_000, 40_000_000);
    }
    run_workload(&workload, policy, setting.l2_kb)
}

/// Runs a workload on another machine under one policy.
pub fn run_workload(workload: &Workload, policy: &NiagaraPolicy, l2_kb: u64) -> Result<RunResults, ReproError> {
    if *policy == NiagaraPolicy::Default {
        return workload.unmanaged_run();
    }
    let label = format!("{} under {policy:?}", workload_label(workload));
    let sources = digest_of(module_path!()).to_string();
    let name = RunName { kind: "steered", label, sources, inputs: format!("{workload:?} {policy:?} {l2_kb}") };
    store::find_or_make(name, || Ok(workload.run_managed(policy.pipeline_for(workload, l2_kb)?)?.results))
}

/// Instructions per cycle of each thread alone on the machine, from one copy of each program, because copies differ
/// only in input.
pub fn solo_speeds(setting: &NiagaraSetting) -> Result<Vec<f64>, ReproError> {
    let jobs = setting.mix.jobs(setting.seed);
    let mut of_kernel: BTreeMap<&str, f64> = BTreeMap::new();
    for job in &jobs {
        if !of_kernel.contains_key(job.kernel.as_str()) {
            let alone = run_jobs(
                &NiagaraSetting { quick: true, ..*setting },
                &NiagaraPolicy::Default,
                std::slice::from_ref(job),
            )?;
            of_kernel.insert(&job.kernel, alone.instructions_per_cycle());
        }
    }
    Ok(jobs.iter().map(|job| of_kernel[job.kernel.as_str()]).collect())
}

/// Comparison of one policy with the default scheduler.
#[derive(Serialize, Deserialize)]
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

pub fn measure(setting: &NiagaraSetting, policy: &NiagaraPolicy) -> Result<NiagaraResult, ReproError> {
    measure_against(setting, policy, setting)
}

/// Compares a policy as [`measure`] does, but with the default scheduler of another setting.
pub fn measure_against(
    setting: &NiagaraSetting,
    policy: &NiagaraPolicy,
    baseline: &NiagaraSetting,
) -> Result<NiagaraResult, ReproError> {
    let (run, default) = (run(setting, policy)?, run(baseline, &NiagaraPolicy::Default)?);
    let solo = solo_speeds(setting)?;
    let (new, old): (&RunResults, &RunResults) = (&run, &default);
    let no_references_error = || failed("comparison")("the cache had no references");
    let idle_tasks = [new, old].into_iter().flat_map(|results| &results.tasks).filter(|task| task.instructions == 0);
    let mut never_ran: Vec<String> = idle_tasks.map(|task| task.name.clone()).collect();
    never_ran.sort();
    never_ran.dedup();
    // A thread that never ran has no speed, so the mix is reported as not measured.
    let not_measured = f64::NAN;
    let no_gain = Comparison {
        throughput_gain: new.instructions_per_cycle() / old.instructions_per_cycle() - 1.0,
        mix_gain: not_measured,
        contention_gain: not_measured,
        busy_gain: new.busy_share / old.busy_share - 1.0,
    };
    let no_scores = SpeedupScores {
        weighted_speedup: not_measured,
        harmonic_mean: not_measured,
        worst_slowdown: not_measured,
        mean_degradation: not_measured,
    };
    let nowhere =
        ContentionBreakdown { issue: not_measured, misses: not_measured, queues: not_measured, system: not_measured };
    let run_time_shares =
        |results: &RunResults| results.tasks.iter().map(|task| task.run_time_share).collect::<Vec<f64>>();
    let times = run_time_shares(new);
    let total_time: f64 = times.iter().sum();
    let min_share = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min) / mean(times);
    let art = new.tasks.iter().filter(|task| task.name.starts_with(GREEDY));
    let (miss_ratio, default_miss_ratio) =
        (l2_miss_ratio(new).ok_or_else(no_references_error)?, l2_miss_ratio(old).ok_or_else(no_references_error)?);
    Ok(NiagaraResult {
        gain: Comparison::compare(new, old).unwrap_or(no_gain),
        scores: score_results(new, &solo).unwrap_or(no_scores),
        default_scores: score_results(old, &solo).unwrap_or(no_scores),
        never_ran,
        misses_change: miss_ratio / default_miss_ratio - 1.0,
        miss_ratio,
        default_miss_ratio,
        variation: metrics::coefficient_of_variation(&times).ok_or_else(no_references_error)?,
        default_variation: metrics::coefficient_of_variation(&run_time_shares(old)).ok_or_else(no_references_error)?,
        least_share: min_share(&times),
        default_least_share: min_share(&run_time_shares(old)),
        busy_share: new.busy_share,
        art_share: art.map(|task| task.run_time_share).sum::<f64>() / total_time,
        contention_at: contention_at(new, old).unwrap_or(nowhere),
    })
}

/// Gain over the default of a schedule that never runs the greedy program.
pub fn gain_without_greedy(setting: &NiagaraSetting) -> Result<f64, ReproError> {
    let other_jobs: Vec<WorkloadJob> =
        setting.mix.jobs(setting.seed).into_iter().filter(|job| job.kernel != GREEDY).collect();
    let without_greedy = run_jobs(setting, &NiagaraPolicy::Default, &other_jobs)?;
    Ok(without_greedy.instructions_per_cycle() / run(setting, &NiagaraPolicy::Default)?.instructions_per_cycle() - 1.0)
}

/// Miss ratio of the L2.
pub fn l2_miss_ratio(results: &RunResults) -> Option<f64> {
    results.level_breakdown(CacheLevel::L2)?.miss_ratio()
}

/// A policy whose gangs have one copy of art each, with turns as even as that allows.
struct OneArtPerGang {
    gangs: Vec<Gang>,
}

impl Policy for OneArtPerGang {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: WINDOW_NS });
        if self.gangs.is_empty() {
            let tasks: Vec<TaskId> = view.observation.tasks.iter().map(|task| task.task).collect();
            let greedy = view.observation.tasks.iter().map(|task| f64::from(u8::from(task.name.starts_with(GREEDY))));
            let model = GroupModel::Average(greedy.collect());
            let groups = rotation(&model, &best_groups(&model, CONTEXTS), RotationRule::Fair);
            let gang =
                |group: &Vec<usize>| Gang { members: group.iter().map(|&at| (tasks[at], None)).collect(), slices: 1 };
            self.gangs = groups.iter().map(gang).collect();
        }
        let cpus: CpuSet = (0..CONTEXTS as u32).collect();
        plan.gangs.push(GangSchedule { cpus, slice_ns: WINDOW_NS, gangs: self.gangs.clone() });
        Decision::new(plan, Vec::new())
    }
}

/// The cache that all contexts share.
pub fn shared_l2(workload: &Workload) -> Option<CacheId> {
    let topology = workload.machine.topology();
    topology.last_level_caches().next().map(|cache| cache.id)
}
