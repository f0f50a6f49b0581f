//! The daemon's state, as `status`, `top`, `explain` and the metrics show it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use cachemate_core::{
    ActiveShare, Cache, ContentionFacts, CpuId, CpuSet, CpusetGroup, Estimate, FactOrigin,
    Observation, PendingItem, PlanError, PlanItem, PredictorConfig, ProbeResult, Profile,
    ReasonKind, RefusedItem, TaskId, TaskSample, Topology, Units, WindowRecord,
};
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::machine::{LiveMachine, OBSERVE_ONLY_REASON};
use cachemate_linux::nri::NriState;
use cachemate_linux::safety::guardian::cgroup::ends_with_group_of;
use cachemate_linux::sense::pressure::{self, Pressure};
use cachemate_linux::sense::sched_cache::{self, PlacedThread, SchedCacheStatus};
use cachemate_page::window_view::{
    RenderedReason, TaskNames, TaskView, WindowTracker, member_tasks,
};
use cachemate_report::level_name;
use cachemate_report::text::escape_controls;
use cachemate_spec::ManageMode;
use serde::{Deserialize, Serialize};

use crate::host_use::{CacheReadings, HostUse};
use crate::promise_status::{self, PromiseStatus};
use crate::service_status::{ServiceStatus, describe_override};

/// Time between two reads of the host's slowly changing state.
const HOST_PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of remembered decisions.
const MAX_DECISIONS: usize = 30;
/// Minimum intensity of an aggressor, and minimum sensitivity of a victim (docs/monitoring.md).
const MIN_AGGRESSOR_INTENSITY: f64 = 0.15;
const MIN_VICTIM_SENSITIVITY: f64 = 0.10;

/// The text for a thread in sentences.
pub fn describe_thread(name: &str, tid: i32) -> String {
    format!("{}({tid})", escape_controls(name))
}

/// The daemon's complete status, as one JSON object.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// The daemon's version.
    pub version: String,
    /// The daemon's process id.
    pub pid: u32,
    /// The guardian's process id; `None` if nothing has been changed yet.
    pub guardian_pid: Option<u32>,
    /// Does the guardian survive the end of the daemon's control group? `None` if there is no guardian, or if this is
    /// unknown.
    pub guardian_isolated: Option<bool>,
    /// The name of the policy.
    pub policy: String,
    /// Whether the daemon changes the host or only observes it.
    pub mode: ManageMode,
    /// The path of the configuration; `None` if there is none.
    pub config: Option<String>,
    /// The reason why the last reload failed; the previous configuration is in force.
    pub config_error: Option<String>,
    /// Endpoints that are not served, because other processes use their addresses.
    #[serde(default)]
    pub unavailable: Vec<String>,
    /// Page colors: the caches that they partition, or the reason why this daemon has none.
    pub colors: Option<String>,
    /// What this host allows cachemate to change, and what follows from the rest.
    #[serde(default)]
    pub means: Option<String>,
    /// Directory with the journal, the learned profiles and the history of losses.
    #[serde(default)]
    pub state_dir: Option<String>,
    /// Level of the capability survey: 1 counters, 2 probes from outside, 3 topology and pressure only.
    pub level: u32,
    /// Is the probe calibrated? If not, the calibration is in progress, and the level may drop to 3.
    pub calibrated: bool,
    /// Number of windows observed so far.
    pub windows: u64,
    /// Length of the last window.
    pub window_ns: u64,
    /// Time since the start.
    pub running_ns: u64,
    /// Clock rate of the cores, from the kernel or measured.
    pub hertz: Option<f64>,
    /// Cycles that a miss of the last level adds on this host.
    pub miss_penalty_cycles: Option<f64>,
    /// CPU time of the daemon, its probes and its guardian: the cost of cachemate on every front end.
    pub cpu_ns: u64,
    /// Last-level caches.
    pub caches: Vec<CacheStatus>,
    /// Services, those with the largest loss first.
    #[serde(default)]
    pub services: Vec<ServiceStatus>,
    /// Managed and observed threads.
    pub tasks: Vec<TaskStatus>,
    /// Promises to programs, with their states.
    #[serde(default)]
    pub promises: Vec<PromiseStatus>,
    /// Gangs in force.
    pub gangs: Vec<GangStatus>,
    /// Shares of caches, as read back.
    #[serde(default)]
    pub shares: Vec<ShareStatus>,
    /// Shares that are still in progress.
    #[serde(default)]
    pub pending: Vec<PendingStatus>,
    /// Groups that the configuration confines, as read back.
    pub cpusets: Vec<CpusetGroup>,
    /// Decisions, latest first.
    pub decisions: Vec<DecisionStatus>,
    /// Items of the last plan that the host refused, at most 20.
    pub refused: Vec<String>,
    /// The error of the last plan; the previous plan is in force, and the values of programs are from its last window.
    pub refused_plan: Option<String>,
    /// Items of the plan that another process has changed.
    pub overridden: Vec<String>,
    /// The plugin of the container runtime; `None` if none is configured.
    pub nri: Option<NriState>,
    /// Rules, cpusets and profiles that matched no process at the last check, which is made once a minute.
    #[serde(default)]
    pub unmatched_rules: Vec<String>,
    /// Pressure-stall information of the host.
    pub pressure: Pressure,
    /// The kernel's own cache-aware scheduling, as its files report it.
    #[serde(default)]
    pub kernel_cache_scheduling: SchedCacheStatus,
    /// Processes whose planned affinities counteract it.
    #[serde(default)]
    pub kernel_conflicts: Vec<ConflictStatus>,
    /// Totals since the start.
    pub counters: DaemonTotals,
}

/// A process whose affinities counteract the kernel's own cache-aware scheduling.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ConflictStatus {
    /// The process.
    pub pid: i32,
    /// A sentence that explains how.
    pub detail: String,
}

/// Totals since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DaemonTotals {
    /// Threads observed.
    pub tasks_seen: u64,
    /// Decisions with new reasons.
    pub decisions: u64,
    /// Decisions that the guard rolled back.
    pub rollbacks: u64,
    /// Items of plans that the host refused; without those that are not made because the mode is `observe`.
    pub refused_changes: u64,
    /// Invalid plans.
    #[serde(default)]
    pub refused_plans: u64,
    /// Probes of all kinds.
    pub probe_results: u64,
    /// Time for which probes kept programs from running. It is not part of the cost, because cachemate used no CPU
    /// during that time.
    pub probe_withheld_ns: u64,
    /// The longest uninterrupted time that a managed thread waited for a CPU; `None` if the kernel does not report
    /// it. Children that started and ended between two windows are not included.
    pub max_runqueue_wait_ns: Option<u64>,
}

/// A last-level cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Id of the cache in the topology.
    pub cache: u32,
    /// Level of the cache, such as `L3`.
    pub level: String,
    /// Its CPUs, as an index list.
    pub cpus: String,
    /// Size of the cache; `None` if the kernel does not report it.
    pub size_bytes: Option<u64>,
    /// Tasks last observed on its CPUs.
    pub tasks: Vec<u32>,
    /// Miss ratio that the reference predictor forecasts under the plan.
    pub forecast_miss_ratio: Option<f64>,
    /// Use of the cache by all programs.
    #[serde(default, flatten)]
    pub readings: CacheReadings,
}

/// Class of a program by its effect on co-runners and by their effect on it, from whichever of the two was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ContentionClass {
    /// High intensity and high sensitivity.
    #[serde(rename = "aggressor and victim")]
    AggressorAndVictim,
    /// High intensity.
    #[serde(rename = "aggressor")]
    Aggressor,
    /// High sensitivity.
    #[serde(rename = "victim")]
    Victim,
    /// Low intensity and low sensitivity.
    #[serde(rename = "quiet")]
    Quiet,
    /// Low intensity; its sensitivity was not measured.
    #[serde(rename = "not an aggressor")]
    NotAggressor,
    /// Low sensitivity; its intensity was not measured.
    #[serde(rename = "not a victim")]
    NotVictim,
}

impl ContentionClass {
    /// The name in the status JSON.
    pub fn text(self) -> &'static str {
        match self {
            ContentionClass::AggressorAndVictim => "aggressor and victim",
            ContentionClass::Aggressor => "aggressor",
            ContentionClass::Victim => "victim",
            ContentionClass::Quiet => "quiet",
            ContentionClass::NotAggressor => "not an aggressor",
            ContentionClass::NotVictim => "not a victim",
        }
    }
}

/// A thread.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TaskStatus {
    /// Id of the task in plans and run logs.
    pub task: u32,
    /// Process id.
    pub pid: i32,
    /// Thread id.
    pub tid: i32,
    /// Name of the thread, as the kernel has it.
    pub name: String,
    /// Service of the thread, as `kind/name`.
    #[serde(default)]
    pub service: String,
    /// Is it only observed, and never moved?
    pub observed_only: bool,
    /// The CPU of its last observation.
    pub cpu: Option<u32>,
    /// Last-level cache of that CPU.
    pub cache: Option<u32>,
    /// Its CPUs under the plan in force.
    pub allowed: Option<String>,
    /// CPU time over the length of the window.
    pub cpu_share: Option<f64>,
    /// Share of a full cache that it evicts, from 0 to 1.
    pub intensity: Option<Estimate>,
    /// Slowdown beside a full stream.
    pub sensitivity: Option<Estimate>,
    /// Class of the program by intensity and sensitivity; `None` if neither was measured.
    pub class: Option<ContentionClass>,
    /// Last-level misses per thousand instructions, by counters.
    pub mpki: Option<f64>,
    /// Miss curve of the program, as far as it is known: bytes of the last-level cache, misses per thousand instructions.
    #[serde(default)]
    pub curve: Vec<(u64, Estimate)>,
    /// Bytes per second that it fills into the last level, by counters or by a probe.
    pub fill_bytes_per_second: Option<f64>,
    /// Instructions per cycle, by counters.
    pub instr_per_cycle: Option<f64>,
    /// Slowdown that the reference predictor forecasts under the plan.
    pub forecast_slowdown: Option<f64>,
    /// Loss of speed while it runs, relative to its solo speed.
    pub measured_slowdown: Option<f64>,
    /// Progress per second, in the unit of `progress_unit`.
    pub progress_per_second: Option<f64>,
    /// The counted work: work reported, instructions, or a proxy (system calls, page faults).
    pub progress_unit: Option<String>,
    /// Maximum slowdown that its rule promises.
    pub max_slowdown: Option<f64>,
    /// Minimum work per second of each thread that its rule promises.
    pub min_rate: Option<f64>,
    /// Measured quantities, each with its kind of evidence and its age.
    #[serde(default)]
    pub known: Vec<FactOrigin>,
    /// The last reasons that name it.
    pub reasons: Vec<String>,
}

/// Gangs that take turns on some CPUs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GangStatus {
    /// The CPUs, as an index list.
    pub cpus: String,
    /// Length of a turn.
    pub slice_ns: u64,
    /// Task ids of each gang.
    pub gangs: Vec<Vec<u32>>,
}

/// A share of a cache and its members.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ShareStatus {
    /// Group of the share in the plan.
    pub group: u32,
    /// Id of the cache in the topology.
    pub cache: u32,
    /// Ways, as an index list.
    pub ways: Option<String>,
    /// Colors, as an index list.
    pub colors: Option<String>,
    /// Task ids of the members.
    pub tasks: Vec<u32>,
    /// Bytes that the members occupy, by the hardware's counter.
    pub occupancy_bytes: Option<u64>,
    /// Share of the resident pages managed by an agent that have allowed colors.
    pub allowed_page_share: Option<f64>,
    /// Frames of other colors that were assigned because no allowed one was free.
    pub fallback_pages: Option<u64>,
    /// The reasons why the members' lines are not exactly in these ways.
    pub notes: Vec<String>,
}

/// A request that is still in progress.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PendingStatus {
    /// Group of the share that is in progress.
    pub group: Option<u32>,
    /// Cache of that share.
    pub cache: Option<u32>,
    /// Pages finished so far.
    pub done: u64,
    /// Total number of pages; `None` if it is not known yet.
    pub total: Option<u64>,
}

/// One reason of one decision.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DecisionStatus {
    /// The window of the decision.
    pub window: u64,
    /// Task ids that it names.
    pub tasks: Vec<u32>,
    /// The reason as a sentence.
    pub reason: String,
    /// Figures of the reason, by name.
    pub numbers: Vec<(String, f64)>,
}

/// The ids of a task in the kernel, and the CPU on which the task last ran.
#[derive(Clone, Copy)]
struct KernelThreadIds {
    pid: i32,
    tid: i32,
    last_cpu: Option<CpuId>,
}

fn withheld_ns(result: &ProbeResult) -> u64 {
    result
        .cost_ns
        .iter()
        .filter(|(task, _)| task.is_some())
        .map(|(_, ns)| ns)
        .sum()
}

/// Updates the status, record by record.
#[derive(Default)]
pub struct StatusTracker {
    /// The status after the last record.
    pub status: DaemonStatus,
    window_tracker: WindowTracker,
    host_use: HostUse,
    /// When the daemon began; its CPU time counts from there.
    start_time: Option<Instant>,
    /// Time of the last read of the host's slowly changing state.
    last_host_read: Option<Instant>,
    reasons_by_task: BTreeMap<TaskId, Vec<String>>,
    /// Threads that wait for a CPU, with the time since they began to wait.
    waiting_ns_by_task: BTreeMap<TaskId, u64>,
    /// CPU time of each guardian so far, by its process id.
    guardian_cpu_ns: BTreeMap<u32, u64>,
}

/// The text for a level of evidence, worded the same on every front end.
pub fn describe_evidence_level(level: u32, is_calibrated: bool) -> String {
    let meaning = match level {
        1 => "programs are measured by counters",
        2 => "no counters: programs are measured by probes on neighboring CPUs",
        _ => {
            "neither counters nor a calibrated probe (repeated after 2 min to 1 h): only topology, waiting and pressure are known"
        }
    };
    match is_calibrated {
        true => format!("evidence level {level} (1 is best, 3 is least): {meaning}"),
        false => "evidence level not known yet: the probe is being calibrated".to_string(),
    }
}

impl StatusTracker {
    /// A tracker of a daemon that began at `start_time` and forecasts pairs of programs with the run's predictor.
    pub fn new(predictor: PredictorConfig, start_time: Instant) -> Self {
        let miss_penalty_cycles = Some(predictor.miss_penalty_cycles);
        StatusTracker {
            status: DaemonStatus {
                miss_penalty_cycles,
                ..DaemonStatus::default()
            },
            window_tracker: WindowTracker::new(predictor),
            start_time: Some(start_time),
            ..StatusTracker::default()
        }
    }

    /// Observes one iteration of the loop.
    pub fn observe(
        &mut self,
        record: &WindowRecord,
        machine: &LiveMachine<LinuxHost>,
        topology: &Topology,
        profiles: &BTreeMap<TaskId, Profile>,
    ) {
        for probe_result in &record.observation.probe_results {
            self.status.counters.probe_results += 1;
            self.status.counters.probe_withheld_ns += withheld_ns(probe_result);
        }
        self.host_use.observe(record);
        let names = task_names(record, machine);
        let view = self
            .window_tracker
            .observe(record, topology, profiles, &names);
        self.record_reasons(record.observation.window, &view.reasons);
        let ids: BTreeMap<TaskId, KernelThreadIds> = machine
            .managed_threads()
            .iter()
            .map(|task| {
                (
                    task.task,
                    KernelThreadIds {
                        pid: task.pid,
                        tid: task.thread.tid,
                        last_cpu: task.last_cpu,
                    },
                )
            })
            .collect();
        let identified_tasks = view
            .tasks
            .iter()
            .filter_map(|task| Some((task, *ids.get(&task.sample.task)?)));
        let observation = &record.observation;
        self.status.tasks = identified_tasks
            .map(|(task, ids)| self.task_status(task, ids, topology, observation))
            .collect();
        let task_count = record
            .observation
            .tasks
            .iter()
            .map(|task| u64::from(task.task.0) + 1)
            .max();
        self.status.counters.tasks_seen =
            self.status.counters.tasks_seen.max(task_count.unwrap_or(0));
        let is_refused_change = |refused: &&RefusedItem| {
            !matches!(refused.item, PlanItem::Probe(_)) && refused.message != OBSERVE_ONLY_REASON
        };
        let refused_changes = record.applied.refused.iter().filter(is_refused_change);
        self.status.counters.refused_changes += refused_changes.count() as u64;
        self.reasons_by_task
            .retain(|task, _| ids.contains_key(task));
        self.status.services = view.services.iter().map(ServiceStatus::new).collect();
        self.observe_host(&LinuxHost::new("/"), topology, machine);
        self.status.caches = self.cache_statuses(topology, record);
        self.status.windows = record.observation.window + 1;
        self.status.refused_plan = None;
        self.status.window_ns = record.observation.span.elapsed_ns;
        self.observe_guardian(machine.guardian_pid());
        self.observe_waits(record);
        self.observe_cost(&LinuxHost::new("/"));
        self.status.refused = view.refused.into_iter().take(20).collect();
        self.status.overridden = view.overridden;
        self.status
            .overridden
            .extend(machine.group_overrides().map(describe_override));
        self.status.cpusets = machine.confined_groups().to_vec();
        let pid_of = |task: TaskId| ids.get(&task).map(|ids| ids.pid);
        self.status.promises =
            promise_status::build_promise_statuses(&view.promises, pid_of, &names);
        self.status.gangs = record.applied.gangs.iter().map(gang_status).collect();
        let shares = record.applied.shares.iter();
        self.status.shares = shares
            .map(|active| share_status(active, &record.observation.tasks, machine))
            .collect();
        self.status.pending = record.applied.pending.iter().map(pending_status).collect();
    }

    /// Reads the use of the caches, the host's pressure and the kernel's cache-aware scheduling, which change slowly, and
    /// compares the latter with the plan's affinities.
    fn observe_host(
        &mut self,
        kernel: &dyn Kernel,
        topology: &Topology,
        machine: &LiveMachine<LinuxHost>,
    ) {
        if self
            .last_host_read
            .is_none_or(|read| read.elapsed() >= HOST_PERIOD)
        {
            self.last_host_read = Some(Instant::now());
            self.host_use.refresh(kernel, machine.cache_use());
            self.status.pressure = pressure::read(kernel);
            self.status.kernel_cache_scheduling = sched_cache::read(kernel);
        }
        let sched_cache_status = &self.status.kernel_cache_scheduling;
        if !sched_cache_status.is_aggregating() {
            self.status.kernel_conflicts.clear();
            return;
        }
        let placed_thread = |task: &TaskStatus| PlacedThread {
            pid: task.pid,
            allowed_cpus: task.allowed.as_ref().and_then(|cpus| cpus.parse().ok()),
        };
        let threads: Vec<PlacedThread> = self.status.tasks.iter().map(placed_thread).collect();
        let pids: BTreeSet<i32> = threads.iter().map(|thread| thread.pid).collect();
        let process_conflicts = |pid: i32| {
            let conflicts =
                sched_cache::find_conflicts(sched_cache_status, topology, pid, &threads);
            conflicts.into_iter().map(move |conflict| ConflictStatus {
                pid,
                detail: conflict,
            })
        };
        self.status.kernel_conflicts = pids.into_iter().flat_map(process_conflicts).collect();
    }

    fn observe_guardian(&mut self, pid: Option<u32>) {
        if self.status.guardian_pid != pid || self.status.guardian_isolated.is_none() {
            let own_pid = std::process::id() as i32;
            let ends_together = pid.and_then(|pid| {
                ends_with_group_of(&LinuxHost::new("/"), own_pid, i32::try_from(pid).ok()?)
            });
            self.status.guardian_isolated = ends_together.map(|ends_together| !ends_together);
        }
        self.status.guardian_pid = pid;
    }

    /// The cost of cachemate: this process, which runs the probes, its helpers that have ended, and its guardians.
    fn observe_cost(&mut self, kernel: &dyn Kernel) {
        if let Some(pid) = self.status.guardian_pid
            && let Ok(text) = kernel.read(Path::new(&format!("/proc/{pid}/schedstat")))
            && let Some(ns) = text
                .split_ascii_whitespace()
                .next()
                .and_then(|ns| ns.parse().ok())
        {
            self.guardian_cpu_ns.insert(pid, ns);
        }
        self.status.cpu_ns =
            LiveMachine::<LinuxHost>::own_cpu_ns() + self.guardian_cpu_ns.values().sum::<u64>();
        self.status.running_ns = self
            .start_time
            .map_or(0, |start_time| start_time.elapsed().as_nanos() as u64);
    }

    /// Observes waits. The kernel adds a wait to a thread's account when the wait ends, so the largest addition between
    /// two windows is a bound of the longest wait. A wait in progress shows as a runnable thread that did not run.
    fn observe_waits(&mut self, record: &WindowRecord) {
        let mut waits_ns = BTreeMap::new();
        for task in record.observation.tasks.iter().filter(|task| !task.exited) {
            let has_run = task.has_run();
            let previous_ns = self
                .waiting_ns_by_task
                .get(&task.task)
                .copied()
                .unwrap_or(0);
            let ongoing_wait_ns = if task.cpu.is_some() && !has_run {
                previous_ns + record.observation.span.elapsed_ns
            } else {
                0
            };
            if ongoing_wait_ns > 0 {
                waits_ns.insert(task.task, ongoing_wait_ns);
            }
            let longest_wait_ns = task
                .run_queue_wait_ns
                .into_iter()
                .chain((ongoing_wait_ns > 0).then_some(ongoing_wait_ns))
                .max();
            self.status.counters.max_runqueue_wait_ns = self
                .status
                .counters
                .max_runqueue_wait_ns
                .max(longest_wait_ns);
        }
        self.waiting_ns_by_task = waits_ns;
    }

    /// Records an invalid plan: it is not applied, and the previous one stays in force. Returns true if the error has
    /// not been reported yet.
    pub fn refuse_plan(&mut self, window: u64, error: &PlanError) -> bool {
        let message = format!("the policy's plan: {error}");
        let is_new = self.status.refused_plan.as_ref() != Some(&message);
        self.status.refused_plan = Some(message);
        self.status.counters.refused_plans += 1;
        self.status.windows = window + 1;
        is_new
    }

    /// Records a decision, unless it repeats the previous one.
    fn record_reasons(&mut self, window: u64, reasons: &[RenderedReason<'_>]) {
        if !reasons.is_empty() {
            self.reasons_by_task.clear();
        }
        for RenderedReason {
            reason,
            text,
            is_new,
        } in reasons
        {
            for task in &reason.tasks {
                self.reasons_by_task
                    .entry(*task)
                    .or_default()
                    .push(text.clone());
            }
            if *is_new {
                self.status.counters.decisions += 1;
                self.status.counters.rollbacks += u64::from(reason.kind == ReasonKind::RolledBack);
                let decision = DecisionStatus {
                    window,
                    tasks: reason.tasks.iter().map(|task| task.0).collect(),
                    reason: text.clone(),
                    numbers: reason.numbers.clone(),
                };
                self.status.decisions.insert(0, decision);
            }
        }
        self.status.decisions.truncate(MAX_DECISIONS);
    }

    fn task_status(
        &self,
        task: &TaskView<'_>,
        ids: KernelThreadIds,
        topology: &Topology,
        observation: &Observation,
    ) -> TaskStatus {
        let TaskView {
            sample, profile, ..
        } = task;
        let contention = profile
            .map(|profile| profile.contention.clone())
            .unwrap_or_default();
        let cpu = sample.cpu.or(ids.last_cpu);
        let cache = cpu.and_then(|cpu| topology.last_level_cache_of(cpu));
        let elapsed_ns = observation.span.elapsed_ns;
        let fill_bytes_per_second = cache.and_then(|cache| {
            self.host_use
                .fill_bytes_per_second(sample, cache, elapsed_ns, &contention)
        });
        TaskStatus {
            task: sample.task.0,
            pid: ids.pid,
            tid: ids.tid,
            name: sample.name.clone(),
            service: sample.service_or_command().to_string(),
            observed_only: sample.unmovable,
            cpu: cpu.map(|cpu| cpu.0),
            cache: cache.map(|cache| cache.id.0),
            allowed: task.allowed.map(CpuSet::to_string),
            cpu_share: task.cpu_share,
            class: contention_class(&contention),
            intensity: contention.intensity.map(|fact| fact.estimate()),
            sensitivity: contention.sensitivity.map(|fact| fact.estimate()),
            mpki: task.misses_per_kilo_instr(),
            curve: profile
                .and_then(|profile| profile.misses_per_kilo_instr())
                .cloned()
                .unwrap_or_default(),
            fill_bytes_per_second,
            instr_per_cycle: task.instr_per_cycle,
            forecast_slowdown: task.forecast_slowdown.map(|forecast| forecast.value),
            measured_slowdown: task.slowdown,
            progress_per_second: task.work_per_second.map(|(_, rate)| rate),
            progress_unit: task
                .work_per_second
                .map(|(work, _)| work.describe().to_string()),
            max_slowdown: sample.goal.and_then(|goal| goal.max_slowdown),
            min_rate: sample.goal.and_then(|goal| goal.min_rate),
            known: profile.map_or_else(Vec::new, |profile| profile.origins(observation.window)),
            reasons: self
                .reasons_by_task
                .get(&sample.task)
                .cloned()
                .unwrap_or_default(),
        }
    }

    fn cache_statuses(&self, topology: &Topology, record: &WindowRecord) -> Vec<CacheStatus> {
        let tasks_on = |cache: &Cache| {
            self.status
                .tasks
                .iter()
                .filter(|task| task.cache == Some(cache.id.0))
                .map(|task| task.task)
                .collect()
        };
        let cache_status = |cache: &Cache| CacheStatus {
            cache: cache.id.0,
            level: level_name(cache.level).to_string(),
            cpus: cache.cpus.to_string(),
            size_bytes: cache.size_bytes,
            tasks: tasks_on(cache),
            forecast_miss_ratio: record
                .forecast
                .cache_miss_ratio
                .get(&cache.id)
                .map(|ratio| ratio.value),
            readings: self.host_use.cache_readings(cache, record),
        };
        topology.last_level_caches().map(cache_status).collect()
    }
}

fn task_names(record: &WindowRecord, machine: &LiveMachine<LinuxHost>) -> TaskNames {
    let threads = machine.managed_threads();
    let mut names: TaskNames = threads
        .iter()
        .map(|task| (task.task, describe_thread(&task.name, task.thread.tid)))
        .collect();
    for task in &record.observation.tasks {
        names
            .entry(task.task)
            .or_insert_with(|| escape_controls(&task.name));
    }
    names
}

fn gang_status(schedule: &cachemate_core::GangSchedule) -> GangStatus {
    let member_ids =
        |gang: &cachemate_core::Gang| gang.members.iter().map(|(task, _)| task.0).collect();
    GangStatus {
        cpus: schedule.cpus.to_string(),
        slice_ns: schedule.slice_ns,
        gangs: schedule.gangs.iter().map(member_ids).collect(),
    }
}

fn share_status(
    active_share: &ActiveShare,
    tasks: &[TaskSample],
    machine: &LiveMachine<LinuxHost>,
) -> ShareStatus {
    let (ways, colors) = match &active_share.share.units {
        Units::Ways { mask } => (Some(mask.to_string()), None),
        Units::Colors { allowed, .. } => (None, Some(allowed.to_string())),
    };
    ShareStatus {
        group: active_share.share.group.0,
        cache: active_share.share.cache.0,
        notes: if ways.is_some() {
            machine.explain_share(active_share)
        } else {
            Vec::new()
        },
        ways,
        colors,
        tasks: member_tasks(&active_share.share, tasks)
            .map(|task| task.0)
            .collect(),
        occupancy_bytes: active_share.occupancy_bytes,
        allowed_page_share: active_share.pages_in_share,
        fallback_pages: active_share.fallback_pages,
    }
}

fn pending_status(pending: &PendingItem) -> PendingStatus {
    let (group, cache) = match pending.item {
        PlanItem::Share(group, cache) => (Some(group.0), Some(cache.0)),
        _ => (None, None),
    };
    PendingStatus {
        group,
        cache,
        done: pending.done,
        total: pending.total,
    }
}

/// The class; `None` if nothing was measured.
fn contention_class(contention: &ContentionFacts) -> Option<ContentionClass> {
    let is_aggressor = contention
        .intensity
        .as_ref()
        .map(|intensity| intensity.value >= MIN_AGGRESSOR_INTENSITY);
    let is_victim = contention
        .sensitivity
        .as_ref()
        .map(|sensitivity| sensitivity.value >= MIN_VICTIM_SENSITIVITY);
    let class = match (is_aggressor, is_victim) {
        (None, None) => return None,
        (Some(true), Some(true)) => ContentionClass::AggressorAndVictim,
        (Some(true), _) => ContentionClass::Aggressor,
        (_, Some(true)) => ContentionClass::Victim,
        (Some(false), Some(false)) => ContentionClass::Quiet,
        (Some(false), None) => ContentionClass::NotAggressor,
        (None, Some(false)) => ContentionClass::NotVictim,
    };
    Some(class)
}

#[cfg(test)]
mod tests;
