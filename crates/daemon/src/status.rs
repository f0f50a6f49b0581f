//! The daemon's state, as `status`, `top`, `explain` and the metrics show it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cachemate_core::{
    ActiveShare, ContentionFacts, CpuId, CpuSet, Estimate, PendingItem, PlanError, PlanItem, PredictorConfig,
    ProbeResult, Profile, ReasonKind, TaskId, TaskSample, Topology, Units, WindowRecord,
};
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::machine::LiveMachine;
use cachemate_linux::safety::guardian::cgroup::do_end_together;
use cachemate_linux::sense::pressure::Pressure;
use cachemate_linux::sense::sched_cache::{self, PlacedThread, SchedCacheStatus};
use cachemate_page::window_view::{RenderedReason, TaskNames, TaskView, WindowTracker, members};
use cachemate_report::level_text;
use cachemate_report::text::printable;
use cachemate_spec::ManageMode;
use serde::{Deserialize, Serialize};

use crate::promise_status::{self, PromiseStatus};
use crate::service_status::{NriStatus, ServiceStatus, override_text};

/// Decisions that are remembered.
const REMEMBERED: usize = 30;
/// Intensity from which a program is an aggressor, and sensitivity from which it is a victim (docs/live.md).
const AGGRESSOR_FROM: f64 = 0.15;
const VICTIM_FROM: f64 = 0.10;

/// A thread as it is named in sentences.
pub fn thread_text(name: &str, tid: i32) -> String {
    format!("{}({tid})", printable(name))
}

/// Everything that a daemon tells of itself, as one JSON object.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// The daemon's version.
    pub version: String,
    /// The daemon's process id.
    pub pid: u32,
    /// `None` = nothing is changed yet.
    pub guardian_pid: Option<u32>,
    /// It outlives the end of the daemon's control group; `None` = no guardian, or not known.
    #[serde(default)]
    pub guardian_isolated: Option<bool>,
    /// Its name.
    pub policy: String,
    /// Whether it changes the host.
    pub mode: ManageMode,
    /// Its path; `None` = there is none.
    pub config: Option<String>,
    /// Why the last reload did not take; the configuration before is in force.
    pub config_error: Option<String>,
    /// Endpoints that the daemon does without, because another process has their addresses.
    #[serde(default)]
    pub unavailable: Vec<String>,
    /// Page colors: the caches that they divide, or the reason why this daemon has none.
    #[serde(default)]
    pub colors: Option<String>,
    /// Level of the capability survey: 1 counters, 2 probes from outside, 3 topology and pressure only.
    pub level: u32,
    /// False = the probe is just being calibrated; the level may fall to 3 by it.
    pub calibrated: bool,
    /// Observed so far.
    pub windows: u64,
    /// Length of the last.
    pub window_ns: u64,
    /// Since the start.
    pub running_ns: u64,
    /// Processor time of the daemon, its probes and its guardian: the cost of cachemate on every front end.
    pub cpu_ns: u64,
    /// Last-level caches.
    pub caches: Vec<CacheStatus>,
    /// Services, those that lose most first.
    #[serde(default)]
    pub services: Vec<ServiceStatus>,
    /// Managed and observed threads.
    pub tasks: Vec<TaskStatus>,
    /// Promises to programs, with their states.
    #[serde(default)]
    pub promises: Vec<PromiseStatus>,
    /// Gangs in force.
    pub gangs: Vec<GangStatus>,
    /// Parts of caches, as they hold.
    #[serde(default)]
    pub shares: Vec<ShareStatus>,
    /// Shares that are still in progress.
    #[serde(default)]
    pub pending: Vec<PendingStatus>,
    /// Groups that the configuration confines, as they were read back.
    pub cpusets: Vec<CpusetStatus>,
    /// Latest first.
    pub decisions: Vec<DecisionStatus>,
    /// Lines of the last plan that the host refused, at most 20.
    pub refused: Vec<String>,
    /// The error of the last plan; the plan before it is in force, and values of programs are of its last window.
    #[serde(default)]
    pub refused_plan: Option<String>,
    /// Lines of the plan that another process has changed.
    pub overridden: Vec<String>,
    /// The plugin of the container runtime; `None` = none was asked for.
    #[serde(default)]
    pub nri: Option<NriStatus>,
    /// Rules that matched no process at the last look, which is made once a minute.
    #[serde(default)]
    pub unmatched_rules: Vec<String>,
    /// Pressure-stall information of the host.
    pub pressure: Pressure,
    /// The kernel's own cache-aware scheduling, as its files say.
    #[serde(default)]
    pub kernel_cache_scheduling: SchedCacheStatus,
    /// Processes whose affinities by the plan counteract it.
    #[serde(default)]
    pub kernel_conflicts: Vec<ConflictStatus>,
    /// Totals since the start.
    pub counters: DaemonTotals,
}

/// A process whose affinities work against the kernel's own cache-aware scheduling.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ConflictStatus {
    /// The process.
    pub pid: i32,
    /// How, in a sentence.
    pub detail: String,
}

/// Totals since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DaemonTotals {
    /// Threads.
    pub tasks_seen: u64,
    /// That said something new.
    pub decisions: u64,
    /// Decisions that the guard rolled back.
    pub rollbacks: u64,
    /// Lines of plans that the host refused.
    pub refused_changes: u64,
    /// Invalid plans.
    #[serde(default)]
    pub refused_plans: u64,
    /// Probes of all kinds.
    pub probe_results: u64,
    /// Time for which probes kept programs from running. It is not part of the cost, because no CPU worked for cachemate.
    #[serde(alias = "probe_cpu_ns")]
    pub probe_withheld_ns: u64,
    /// No managed thread waited longer for a processor at a stretch, children that came and went between two looks left out;
    /// `None` = the kernel does not say.
    #[serde(default)]
    pub max_runqueue_wait_ns: Option<u64>,
}

/// A last-level cache.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CacheStatus {
    /// As in the topology.
    pub cache: u32,
    /// Such as `L3`.
    pub level: String,
    /// An index list.
    pub cpus: String,
    /// `None` = the kernel does not say.
    pub size_bytes: Option<u64>,
    /// Last seen on its CPUs.
    pub tasks: Vec<u32>,
    /// Forecast by the reference predictor, under the plan.
    pub forecast_miss_ratio: Option<f64>,
}

/// Effects of a program on its co-runners and of these on it, as far as they were measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ContentionClass {
    /// Both.
    #[serde(rename = "aggressor and victim")]
    AggressorAndVictim,
    /// Much intensity.
    #[serde(rename = "aggressor")]
    Aggressor,
    /// Much sensitivity.
    #[serde(rename = "victim")]
    Victim,
    /// Neither.
    #[serde(rename = "quiet")]
    Quiet,
    /// Little intensity; its sensitivity was not measured.
    #[serde(rename = "not an aggressor")]
    NotAggressor,
    /// Little sensitivity; its intensity was not measured.
    #[serde(rename = "not a victim")]
    NotVictim,
}

impl ContentionClass {
    /// The name, as in the status's JSON.
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
    /// Its id in plans and run logs.
    pub task: u32,
    /// Process id.
    pub pid: i32,
    /// Thread id.
    pub tid: i32,
    /// As the kernel has it.
    pub name: String,
    /// Its service, as `kind/name`.
    #[serde(default)]
    pub service: String,
    /// Observed, never moved.
    pub observed_only: bool,
    /// The CPU of its last observation.
    pub cpu: Option<u32>,
    /// Last-level cache of that CPU.
    pub cache: Option<u32>,
    /// As the plan in force has it.
    pub allowed: Option<String>,
    /// Processor time over the window.
    pub cpu_share: Option<f64>,
    /// Share of a full cache that it evicts, 0 to 1.
    pub intensity: Option<Estimate>,
    /// Slowdown beside a full stream.
    pub sensitivity: Option<Estimate>,
    /// By intensity and sensitivity; `None` = neither was measured.
    pub class: Option<ContentionClass>,
    /// Misses of its last-level cache, by counters.
    pub mpki: Option<f64>,
    /// Its curve of misses, as far as it is known: bytes of the last-level cache, misses for each thousand instructions.
    #[serde(default)]
    pub curve: Vec<(u64, Estimate)>,
    /// By counters.
    pub instr_per_cycle: Option<f64>,
    /// Slowdown by the reference predictor under the plan.
    pub forecast_slowdown: Option<f64>,
    /// Loss of its speed while it runs, against its speed alone.
    pub measured_slowdown: Option<f64>,
    /// In the unit of `progress_unit`.
    pub progress_per_second: Option<f64>,
    /// The counted work: work reported, instructions, or a proxy (system calls, page faults).
    pub progress_unit: Option<String>,
    /// Its rule promises it to be at most so much slower than alone.
    #[serde(default)]
    pub max_slowdown: Option<f64>,
    /// Its rule promises it so much work a second, of each thread.
    #[serde(default)]
    pub min_rate: Option<f64>,
    /// The last reasons that name it.
    pub reasons: Vec<String>,
}

/// Gangs that take turns on some CPUs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GangStatus {
    /// An index list.
    pub cpus: String,
    /// Length of a turn.
    pub slice_ns: u64,
    /// Task ids of each.
    pub gangs: Vec<Vec<u32>>,
}

/// A part of a cache and its members.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ShareStatus {
    /// As in the plan.
    pub group: u32,
    /// As in the topology.
    pub cache: u32,
    /// Ways, as an index list.
    #[serde(default)]
    pub ways: Option<String>,
    /// Colors, as an index list.
    #[serde(default)]
    pub colors: Option<String>,
    /// Task ids of the members.
    pub tasks: Vec<u32>,
    /// Occupancy of the members, by the hardware's counter.
    pub occupancy_bytes: Option<u64>,
    /// Share of the resident pages that an agent looks after and that have allowed colors.
    #[serde(default)]
    pub allowed_page_share: Option<f64>,
    /// Given frames of other colors, as no allowed one could be had.
    #[serde(default)]
    pub fallback_pages: Option<u64>,
    /// Why its lines are not exactly where its ways are.
    pub notes: Vec<String>,
}

/// Asked for, and still under way.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PendingStatus {
    /// Group of a share that is under way.
    pub group: Option<u32>,
    /// Cache of that share.
    pub cache: Option<u32>,
    /// Pages.
    pub done: u64,
    /// `None` = not known yet.
    pub total: Option<u64>,
}

/// A group of the host that is kept to some CPUs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CpusetStatus {
    /// Its path below the hierarchy's root.
    pub cgroup: String,
    /// An index list, as read back.
    pub cpus: String,
}

/// One reason of one decision.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DecisionStatus {
    /// The window of the decision.
    pub window: u64,
    /// Task ids that it names.
    pub tasks: Vec<u32>,
    /// As a sentence.
    pub reason: String,
    /// Figures behind it, by name.
    pub numbers: Vec<(String, f64)>,
}

/// The kernel's ids of a task, and the CPU that it ran on last.
#[derive(Clone, Copy)]
struct Ids {
    pid: i32,
    tid: i32,
    last_cpu: Option<CpuId>,
}

fn withheld_ns(answer: &ProbeResult) -> u64 {
    answer.cost_ns.iter().filter(|(task, _)| task.is_some()).map(|(_, ns)| ns).sum()
}

/// Keeps the status up to date, record by record.
#[derive(Default)]
pub struct Watcher {
    /// As of the last record.
    pub status: DaemonStatus,
    tracker: WindowTracker,
    reasons: BTreeMap<TaskId, Vec<String>>,
    /// Threads that wait for a processor, since so long.
    waiting_ns: BTreeMap<TaskId, u64>,
    /// Processor time of each guardian so far, by its process id.
    guardians_cpu_ns: BTreeMap<u32, u64>,
}

/// The level of evidence in the words of every front end.
pub fn evidence_text(level: u32, is_calibrated: bool) -> String {
    let means = match level {
        1 => "programs are measured by counters",
        2 => "no counters: programs are measured by probes on neighboring CPUs",
        _ => "neither counters nor probes: only topology and pressure are known",
    };
    match is_calibrated {
        true => format!("evidence level {level} of 3: {means}"),
        false => "evidence level not known yet: the probe is being calibrated".to_string(),
    }
}

impl Watcher {
    /// A watcher that forecasts pairs of programs as the run's predictor does.
    pub fn new(predictor: PredictorConfig) -> Self {
        Watcher { tracker: WindowTracker::new(predictor), ..Watcher::default() }
    }

    /// Takes in one turn of the loop.
    pub fn observe(
        &mut self,
        record: &WindowRecord,
        machine: &LiveMachine<LinuxHost>,
        topology: &Topology,
        profiles: &BTreeMap<TaskId, Profile>,
    ) {
        for answer in &record.observation.probe_results {
            self.status.counters.probe_results += 1;
            self.status.counters.probe_withheld_ns += withheld_ns(answer);
        }
        let names = names(record, machine);
        let view = self.tracker.observe(record, topology, profiles, &names);
        self.record_reasons(record.observation.window, &view.reasons);
        let ids: BTreeMap<TaskId, Ids> = machine
            .managed_threads()
            .iter()
            .map(|task| (task.task, Ids { pid: task.pid, tid: task.thread.tid, last_cpu: task.last_cpu }))
            .collect();
        let of_kernel = view.tasks.iter().filter_map(|task| Some((task, *ids.get(&task.sample.task)?)));
        self.status.tasks = of_kernel.map(|(task, ids)| self.task(task, ids, topology)).collect();
        let newest = record.observation.tasks.iter().map(|task| u64::from(task.task.0) + 1).max();
        self.status.counters.tasks_seen = self.status.counters.tasks_seen.max(newest.unwrap_or(0));
        self.status.counters.refused_changes += record.applied.refused.len() as u64;
        self.reasons.retain(|task, _| ids.contains_key(task));
        self.status.services = view.services.iter().map(ServiceStatus::new).collect();
        self.status.caches = caches(topology, &self.status.tasks, record);
        self.status.windows = record.observation.window + 1;
        self.status.refused_plan = None;
        self.status.window_ns = record.observation.span.elapsed_ns;
        self.observe_guardian(machine.guardian_pid());
        self.observe_waits(record);
        self.observe_kernel(&LinuxHost::new("/"), topology);
        self.observe_cost(&LinuxHost::new("/"));
        self.status.refused = view.refused.into_iter().take(20).collect();
        self.status.overridden = view.overridden;
        self.status.overridden.extend(machine.group_overrides().map(override_text));
        let confined = machine.confined_groups().iter();
        self.status.cpusets =
            confined.map(|group| CpusetStatus { cgroup: group.cgroup.clone(), cpus: group.cpus.to_string() }).collect();
        let pid = |task: TaskId| ids.get(&task).map(|ids| ids.pid);
        self.status.promises = promise_status::from_window(&record.promises, pid, &names);
        self.status.gangs = record.applied.gangs.iter().map(gang).collect();
        let shares = record.applied.shares.iter();
        self.status.shares = shares.map(|active| share(active, &record.observation.tasks, machine)).collect();
        self.status.pending = record.applied.pending.iter().map(pending).collect();
    }

    /// The kernel's cache-aware scheduling beside what the plan asks for.
    fn observe_kernel(&mut self, kernel: &dyn Kernel, topology: &Topology) {
        let state = sched_cache::read(kernel);
        let placed = |task: &TaskStatus| PlacedThread {
            pid: task.pid,
            allowed: task.allowed.as_ref().and_then(|cpus| cpus.parse().ok()),
        };
        let threads: Vec<PlacedThread> = self.status.tasks.iter().map(placed).collect();
        let pids: BTreeSet<i32> = threads.iter().map(|thread| thread.pid).collect();
        let conflict_of = |pid: i32| {
            let detail = sched_cache::conflicts(&state, topology, pid, &threads);
            detail.into_iter().map(move |conflict| ConflictStatus { pid, detail: conflict })
        };
        self.status.kernel_conflicts =
            if state.is_aggregating() { pids.into_iter().flat_map(conflict_of).collect() } else { Vec::new() };
        self.status.kernel_cache_scheduling = state;
    }

    fn observe_guardian(&mut self, pid: Option<u32>) {
        if self.status.guardian_pid != pid || self.status.guardian_isolated.is_none() {
            let own = std::process::id() as i32;
            let together = pid.and_then(|pid| do_end_together(&LinuxHost::new("/"), own, i32::try_from(pid).ok()?));
            self.status.guardian_isolated = together.map(|together| !together);
        }
        self.status.guardian_pid = pid;
    }

    /// The cost of cachemate: this process, which runs the probes, its helpers that have ended, and its guardians.
    fn observe_cost(&mut self, kernel: &dyn Kernel) {
        if let Some(pid) = self.status.guardian_pid
            && let Ok(text) = kernel.read(Path::new(&format!("/proc/{pid}/schedstat")))
            && let Some(ns) = text.split_ascii_whitespace().next().and_then(|ns| ns.parse().ok())
        {
            self.guardians_cpu_ns.insert(pid, ns);
        }
        self.status.cpu_ns = LiveMachine::<LinuxHost>::own_cpu_ns() + self.guardians_cpu_ns.values().sum::<u64>();
    }

    /// The kernel adds a wait to a thread's account when the wait ends, so the largest addition between two windows
    /// is a bound of the longest wait. A wait that goes on shows as a runnable thread that did not run.
    fn observe_waits(&mut self, record: &WindowRecord) {
        let mut waiting = BTreeMap::new();
        for task in record.observation.tasks.iter().filter(|task| !task.exited) {
            let has_run = task.has_run();
            let before = self.waiting_ns.get(&task.task).copied().unwrap_or(0);
            let going_on = if task.cpu.is_some() && !has_run { before + record.observation.span.elapsed_ns } else { 0 };
            if going_on > 0 {
                waiting.insert(task.task, going_on);
            }
            let longest = task.run_queue_wait_ns.into_iter().chain((going_on > 0).then_some(going_on)).max();
            self.status.counters.max_runqueue_wait_ns = self.status.counters.max_runqueue_wait_ns.max(longest);
        }
        self.waiting_ns = waiting;
    }

    /// Records an invalid plan: it is not applied, and the previous one stays in force. True = it has not been
    /// reported yet.
    pub fn refuse_plan(&mut self, window: u64, bad: &PlanError) -> bool {
        let message = format!("the policy's plan: {bad}");
        let new = self.status.refused_plan.as_ref() != Some(&message);
        self.status.refused_plan = Some(message);
        self.status.counters.refused_plans += 1;
        self.status.windows = window + 1;
        new
    }

    /// A decision that says the same as the one before is not told again.
    fn record_reasons(&mut self, window: u64, reasons: &[RenderedReason<'_>]) {
        if !reasons.is_empty() {
            self.reasons.clear();
        }
        for RenderedReason { reason, text, is_new } in reasons {
            for task in &reason.tasks {
                self.reasons.entry(*task).or_default().push(text.clone());
            }
            if *is_new {
                self.status.counters.decisions += 1;
                let rolled_back = matches!(reason.kind, ReasonKind::RolledBack | ReasonKind::CoolingDown);
                self.status.counters.rollbacks += u64::from(rolled_back);
                let decision = DecisionStatus {
                    window,
                    tasks: reason.tasks.iter().map(|task| task.0).collect(),
                    reason: text.clone(),
                    numbers: reason.numbers.clone(),
                };
                self.status.decisions.insert(0, decision);
            }
        }
        self.status.decisions.truncate(REMEMBERED);
    }

    fn task(&self, task: &TaskView<'_>, ids: Ids, topology: &Topology) -> TaskStatus {
        let TaskView { sample, profile, .. } = task;
        let contention = profile.map(|profile| profile.contention.clone()).unwrap_or_default();
        let cpu = sample.cpu.or(ids.last_cpu);
        let cache = cpu.and_then(|cpu| topology.last_level_of(cpu));
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
            class: class(&contention),
            intensity: contention.intensity.map(|fact| fact.estimate()),
            sensitivity: contention.sensitivity.map(|fact| fact.estimate()),
            mpki: task.misses_per_kilo_instr(),
            curve: profile.and_then(|profile| profile.misses_per_kilo_instr()).cloned().unwrap_or_default(),
            instr_per_cycle: task.instr_per_cycle,
            forecast_slowdown: task.forecast_slowdown.map(|forecast| forecast.value),
            measured_slowdown: task.slowdown,
            progress_per_second: task.work_per_second.map(|(_, rate)| rate),
            progress_unit: task.work_per_second.map(|(work, _)| work.describe().to_string()),
            max_slowdown: sample.goal.and_then(|goal| goal.max_slowdown),
            min_rate: sample.goal.and_then(|goal| goal.min_rate),
            reasons: self.reasons.get(&sample.task).cloned().unwrap_or_default(),
        }
    }
}

fn names(record: &WindowRecord, machine: &LiveMachine<LinuxHost>) -> TaskNames {
    let mut names: TaskNames = record.observation.tasks.iter().map(|task| (task.task, printable(&task.name))).collect();
    names.extend(machine.managed_threads().iter().map(|task| (task.task, thread_text(&task.name, task.thread.tid))));
    names
}

fn gang(schedule: &cachemate_core::GangSchedule) -> GangStatus {
    let members = |gang: &cachemate_core::Gang| gang.members.iter().map(|(task, _)| task.0).collect();
    GangStatus {
        cpus: schedule.cpus.to_string(),
        slice_ns: schedule.slice_ns,
        gangs: schedule.gangs.iter().map(members).collect(),
    }
}

fn share(active: &ActiveShare, tasks: &[TaskSample], machine: &LiveMachine<LinuxHost>) -> ShareStatus {
    let (ways, colors) = match &active.share.units {
        Units::Ways { mask } => (Some(mask.to_string()), None),
        Units::Colors { allowed, .. } => (None, Some(allowed.to_string())),
    };
    ShareStatus {
        group: active.share.group.0,
        cache: active.share.cache.0,
        notes: if ways.is_some() { machine.explain_share(active) } else { Vec::new() },
        ways,
        colors,
        tasks: members(&active.share, tasks).map(|task| task.0).collect(),
        occupancy_bytes: active.occupancy_bytes,
        allowed_page_share: active.pages_in_share,
        fallback_pages: active.fallback_pages,
    }
}

fn pending(pending: &PendingItem) -> PendingStatus {
    let (group, cache) = match pending.item {
        PlanItem::Share(group, cache) => (Some(group.0), Some(cache.0)),
        _ => (None, None),
    };
    PendingStatus { group, cache, done: pending.done, total: pending.total }
}

/// `None` where nothing was measured.
fn class(contention: &ContentionFacts) -> Option<ContentionClass> {
    let aggressor = contention.intensity.as_ref().map(|intensity| intensity.value >= AGGRESSOR_FROM);
    let victim = contention.sensitivity.as_ref().map(|sensitivity| sensitivity.value >= VICTIM_FROM);
    let class = match (aggressor, victim) {
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

fn caches(topology: &Topology, tasks: &[TaskStatus], record: &WindowRecord) -> Vec<CacheStatus> {
    let last = topology.last_level_caches();
    last.map(|cache| CacheStatus {
        cache: cache.id.0,
        level: level_text(cache.level).to_string(),
        cpus: cache.cpus.to_string(),
        size_bytes: cache.size_bytes,
        tasks: tasks.iter().filter(|task| task.cache == Some(cache.id.0)).map(|task| task.task).collect(),
        forecast_miss_ratio: record.forecast.cache_miss_ratio.get(&cache.id).map(|ratio| ratio.value),
    })
    .collect()
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
