//! The daemon's state, as `status`, `top`, `explain` and the metrics show it.
//!
//! Four front ends that each asked the daemon's parts would show four moments, and a reader who
//! compares them would look for a cause where there is none. So one value is made from each window,
//! and all of them format that value.
//!
//! For example, a program with an intensity of 0.2 and a sensitivity of 0.03 is an aggressor
//! wherever its class is shown, in the same window. What was not measured is null, or absent.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use cachemate_core::{
    HostReport, PlanError, PlanItem, ProbeResult, ReasonKind, RefusedItem, RunHeader, TaskId,
    Topology, WindowRecord,
};
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::machine::OBSERVE_ONLY_REASON;
use cachemate_linux::nri::NriState;
use cachemate_linux::safety::guardian::cgroup::ends_with_group_of;
use cachemate_linux::sense::pressure::{self, Pressure};
use cachemate_linux::sense::sched_cache::{self, PlacedThread, SchedCacheStatus};
use cachemate_page::{DaemonSnapshot, DecisionSnapshot, Snapshot, TaskSnapshot};
use cachemate_spec::ManageMode;
use serde::{Deserialize, Serialize};

use crate::host::ProbedLevel;

/// Time between two reads of the host's slowly changing state.
const HOST_PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of remembered decisions.
const MAX_DECISIONS: usize = 30;

/// The daemon's complete status, as one JSON object: the fields of `snapshot` stand beside the others.
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
    /// Why the probe could not be calibrated at the last attempt; `None` if it could, or is not needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level_problem: Option<String>,
    /// Number of windows observed so far.
    pub windows: u64,
    /// Time since the start.
    pub running_ns: u64,
    /// Clock rate of the cores, from the kernel or measured.
    pub hertz: Option<f64>,
    /// Cycles that a miss of the last level adds on this host.
    pub miss_penalty_cycles: Option<f64>,
    /// CPU time of the daemon, its probes and its guardian: the cost of cachemate on every front end.
    pub cpu_ns: u64,
    /// The last window.
    #[serde(flatten)]
    pub snapshot: Snapshot,
    /// Decisions, latest first.
    pub decisions: Vec<DecisionSnapshot>,
    /// The error of the last plan; the previous plan is in force, and the snapshot is of its last window.
    pub refused_plan: Option<String>,
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

impl DaemonStatus {
    /// The part of the state that the page shows.
    pub(crate) fn for_page(&self) -> DaemonSnapshot {
        DaemonSnapshot {
            acting: self.mode == ManageMode::Act,
            cpu_share: self.cpu_ns as f64 / self.running_ns.max(1) as f64,
            config_error: self.config_error.clone(),
        }
    }
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

fn withheld_ns(result: &ProbeResult) -> u64 {
    result
        .cost_ns
        .iter()
        .filter(|(task, _)| task.is_some())
        .map(|(_, ns)| ns)
        .sum()
}

/// What the daemon's other parts know at the end of a window.
pub(crate) struct DaemonParts {
    /// Level of the capability survey with the calibrated probe.
    pub probed: ProbedLevel,
    /// Endpoints that are not served.
    pub unavailable: Vec<String>,
    /// The plugin of the container runtime.
    pub nri: Option<NriState>,
    /// Rules that matched no process; `None` if they were not checked in this window.
    pub unmatched_rules: Option<Vec<String>>,
}

/// Updates the status, record by record.
pub(crate) struct StatusTracker {
    /// The status after the last record.
    pub status: DaemonStatus,
    topology: Topology,
    /// When the daemon began; its CPU time counts from there.
    start_time: Instant,
    /// Time of the last read of the host's slowly changing state.
    last_host_read: Option<Instant>,
    /// Threads that wait for a CPU, with the time since they began to wait.
    waiting_ns_by_task: BTreeMap<TaskId, u64>,
    /// CPU time of each guardian so far, by its process id.
    guardian_cpu_ns: BTreeMap<u32, u64>,
}

/// The text for a level of evidence, worded the same on every front end. `problem` is why the probe cannot be calibrated.
pub fn describe_evidence_level(level: u32, is_calibrated: bool, problem: Option<&str>) -> String {
    if !is_calibrated {
        return "evidence level not known yet: the probe is being calibrated".to_string();
    }
    let meaning = match level {
        1 => "programs are measured by counters",
        2 => "no counters: programs are measured by probes on neighboring CPUs",
        _ => {
            "neither counters nor a calibrated probe (repeated after 2 min to 1 h): only topology, waiting and pressure are known"
        }
    };
    let problem_clause = problem.map_or(String::new(), |problem| format!("; the probe: {problem}"));
    format!("evidence level {level} (1 is best, 3 is least): {meaning}{problem_clause}")
}

impl StatusTracker {
    /// A tracker of a daemon that began at `start_time` with this status and this run.
    pub fn new(status: DaemonStatus, header: &RunHeader, start_time: Instant) -> Self {
        StatusTracker {
            status: DaemonStatus {
                miss_penalty_cycles: Some(header.pipeline.predictor.miss_penalty_cycles),
                ..status
            },
            topology: header.topology.clone(),
            start_time,
            last_host_read: None,
            waiting_ns_by_task: BTreeMap::new(),
            guardian_cpu_ns: BTreeMap::new(),
        }
    }

    /// Observes one iteration of the loop: its record, its snapshot, and what the machine and the daemon's parts
    /// report.
    pub fn observe(
        &mut self,
        record: &WindowRecord,
        snapshot: Snapshot,
        host: &HostReport,
        parts: DaemonParts,
    ) {
        let status = &mut self.status;
        status.mode = if host.is_acting {
            ManageMode::Act
        } else {
            ManageMode::Observe
        };
        if let Some(level) = parts.probed.level {
            status.level = level;
            status.calibrated = true;
            status.level_problem = parts.probed.problem;
        }
        status.unavailable = parts.unavailable;
        status.nri = parts.nri;
        status.unmatched_rules = parts
            .unmatched_rules
            .unwrap_or(std::mem::take(&mut status.unmatched_rules));
        status.windows = snapshot.window + 1;
        status.refused_plan = None;
        status.snapshot = snapshot;

        self.count(record);
        self.observe_decisions();
        self.observe_host(&LinuxHost::new("/"));
        self.observe_guardian(host.guardian_pid);
        self.observe_waits(record);
        self.observe_cost(&LinuxHost::new("/"));
    }

    /// Records the outcome of a reload: mode and policy in force, or the reason why it failed.
    pub fn reload(&mut self, outcome: Result<(ManageMode, String), String>) {
        match outcome {
            Ok((mode, policy)) => {
                self.status.mode = mode;
                self.status.policy = policy;
                self.status.config_error = None;
                self.status.unmatched_rules.clear();
            }
            Err(error) => self.status.config_error = Some(error),
        }
    }

    fn count(&mut self, record: &WindowRecord) {
        let counters = &mut self.status.counters;
        for probe_result in &record.observation.probe_results {
            counters.probe_results += 1;
            counters.probe_withheld_ns += withheld_ns(probe_result);
        }
        let tasks = record.observation.tasks.iter();
        let task_count = tasks.map(|task| u64::from(task.task.0) + 1).max();
        counters.tasks_seen = counters.tasks_seen.max(task_count.unwrap_or(0));
        let is_refused_change = |refused: &&RefusedItem| {
            !matches!(refused.item, PlanItem::Probe(_)) && refused.message != OBSERVE_ONLY_REASON
        };
        let refused_changes = record.applied.refused.iter().filter(is_refused_change);
        counters.refused_changes += refused_changes.count() as u64;
    }

    /// Remembers the window's new decisions.
    fn observe_decisions(&mut self) {
        for decision in &self.status.snapshot.new_decisions {
            self.status.counters.decisions += 1;
            self.status.counters.rollbacks += u64::from(decision.kind == ReasonKind::RolledBack);
            self.status.decisions.insert(0, decision.clone());
        }
        self.status.decisions.truncate(MAX_DECISIONS);
    }

    /// Reads the host's pressure and the kernel's cache-aware scheduling, which change slowly, and compares the latter
    /// with the plan's affinities.
    fn observe_host(&mut self, kernel: &dyn Kernel) {
        if self
            .last_host_read
            .is_none_or(|read| read.elapsed() >= HOST_PERIOD)
        {
            self.last_host_read = Some(Instant::now());
            self.status.pressure = pressure::read(kernel);
            self.status.kernel_cache_scheduling = sched_cache::read_status(kernel);
        }
        let sched_cache_status = &self.status.kernel_cache_scheduling;
        if !sched_cache_status.is_aggregating() {
            self.status.kernel_conflicts.clear();
            return;
        }
        let placed_thread = |task: &TaskSnapshot| PlacedThread {
            pid: task.pid,
            allowed_cpus: task.allowed.as_ref().and_then(|cpus| cpus.parse().ok()),
        };
        let tasks = &self.status.snapshot.tasks;
        let threads: Vec<PlacedThread> = tasks.iter().map(placed_thread).collect();
        let pids: BTreeSet<i32> = threads.iter().map(|thread| thread.pid).collect();
        let process_conflicts = |pid: i32| {
            let conflicts =
                sched_cache::find_conflicts(sched_cache_status, &self.topology, pid, &threads);
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
        self.status.cpu_ns = own_cpu_ns() + self.guardian_cpu_ns.values().sum::<u64>();
        self.status.running_ns = self.start_time.elapsed().as_nanos() as u64;
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
}

/// The CPU time that this process has used so far.
fn own_cpu_ns() -> u64 {
    cachemate_linux::kernel::clock_ns(rustix::time::ClockId::ProcessCPUTime)
}

#[cfg(test)]
mod tests;
