//! Planning of `auto`'s probes within their cost limits.
//!
//! One ledger counts the processor time of all probes. A task must first run long enough that a probe which stops it
//! stays within the overhead budget, a share of its run time, so short-lived tasks are never profiled. After the first
//! probe of each task, probes wait until all of them together have cost no more than that share of processor time. At
//! most one probe that stops its task runs on a cache at a time. A task whose probe has no result in time is not probed
//! again in the same phase. A trace that was too short for the largest cache is recorded once more with more entries,
//! as soon as its task has run long enough to pay for it and is in a phase of the same kind. A task whose waits for
//! memory are smaller than the smallest gain is not recorded a second time. [`ServicePauses`] chooses services that
//! wait for a while.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    Ability, ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, ProcessId, Profile, RowInterval,
    ServiceIdentity, TaskId, TaskSample, View,
};
use cachemate_locality::shmap::SharingCriteria;
use cachemate_papers::clustering::{
    ClusteringMethod, THRESHOLD, THRESHOLD_SAMPLES_PER_THREAD, ThreadMap, find_clusters,
    scaled_threshold,
};
use cachemate_papers::partition::demand_curve::{ENTRIES_FACTOR, is_uncertain_at};
use cachemate_papers::probe_ledger::ProbeLedger;

use super::curves::CurveChecks;
use super::measured_sizes::phase_key;
use super::phases::{PhaseId, current_phase};
use super::service_pauses::{ServicePauses, is_promised};
use super::speeds::SpeedTracker;
use super::thread_clusters::{cluster_count, complete_clusters};
use crate::auto::model::sites::{CacheSite, CpuSites};

/// Limits of the probes.
#[derive(Clone, Copy, Debug)]
pub struct ProbeLimits {
    /// Share of processor time that probes may take in the long run.
    pub max_share: f64,
    /// Smallest forecast gain of a change.
    pub min_gain: f64,
    pub locations: u32,
    pub trace_entries: u32,
    /// Budget of one probe.
    pub budget_ns: u64,
    /// Number of samples of accesses to other caches, for each thread.
    pub samples_per_thread: u32,
    /// May a co-runner of a service with a promise wait for a while?
    pub may_pause_services: bool,
}

/// A request, and the time at which it was made.
type OpenRequest = (ProbeRequest, u64);

/// A probe of a task in one of its phases.
#[derive(Clone, Debug)]
struct TaskProbe {
    phase: u32,
    request: OpenRequest,
    is_over: bool,
    is_answered: bool,
}

/// The planner of probes; see the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct ProbePlanner {
    next_id: u32,
    probes_by_task: BTreeMap<TaskId, TaskProbe>,
    /// Phases that have a first trace but no longer one yet, by their kinds if these are known, because a phase may end
    /// before its run time pays for the longer trace.
    first_traces: BTreeSet<(TaskId, PhaseId)>,
    /// The pending request for samples of accesses to other caches, and its window.
    sharing_probe: Option<OpenRequest>,
    /// Threads of the last samples, and the number of windows until they are sampled again.
    last_sampling: Option<(Vec<TaskId>, u32)>,
    pub clusters: BTreeMap<TaskId, usize>,
    pub ledger: ProbeLedger,
    /// Run time of each task.
    ran_ns_by_task: BTreeMap<TaskId, u64>,
    /// Outstanding probe that keeps tasks off their CPUs, and when it was requested.
    exclusive_probe: Option<OpenRequest>,
    service_pauses: ServicePauses,
    /// Tasks whose solo interval was requested, with the phase and the time of the request.
    solo_requested: BTreeMap<TaskId, (u32, u64)>,
}

/// The phase of a probe that was withdrawn, so that it may be requested again in any phase.
const NO_PHASE: u32 = u32::MAX;

/// The kind of probe that measures curves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CurveMethod {
    Watch,
    Trace,
}

impl CurveMethod {
    /// A trace of first-level misses describes the cache behind it better than watch points, most of which see hits.
    fn of_machine(view: &View<'_>) -> Option<Self> {
        let has_ability = |ability| view.capabilities.has_ability(ability);
        if has_ability(Ability::TraceAddresses) {
            return Some(CurveMethod::Trace);
        }
        has_ability(Ability::SampleReuses).then_some(CurveMethod::Watch)
    }
}

/// The probe that a task's curve needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CurveNeed {
    /// The one that is under way.
    Continued,
    /// One for a phase without a curve.
    First,
    /// A longer trace than that of a curve that is uncertain at the largest cache.
    Longer,
}

impl CurveNeed {
    fn entries(self, limits: &ProbeLimits) -> u32 {
        match self {
            CurveNeed::Longer => limits.trace_entries.saturating_mul(ENTRIES_FACTOR),
            CurveNeed::First | CurveNeed::Continued => limits.trace_entries,
        }
    }
}

/// Length of the two rows of a solo interval; the cache fills during the first.
const SOLO_SETTLE_NS: u64 = 50_000_000;
const SOLO_ROW_NS: u64 = 50_000_000;
/// Time after which a solo speed is measured again in the same phase, if the measurement is paid for.
const SOLO_REPEAT_NS: u64 = 300_000_000_000;
/// Time after which a solo speed is measured in another phase, if that phase's solo speed is unknown.
const SOLO_PAUSE_NS: u64 = 5_000_000_000;

/// A process is not sampled if it waits for other caches for less than this share of its cycles.
const MIN_REMOTE_SHARE: f64 = 0.03;
/// Maximum number of probes with watch points at once: processors have four watch points.
const MAX_WATCH_PROBES: usize = 4;
/// A task that is running or runnable for a smaller share of a window counts as idle, because its effect on other tasks
/// is negligible.
pub const MIN_BUSY_SHARE: f64 = 0.1;
/// Time after which a probe counts as unanswered.
const ANSWER_TIMEOUT_NS: u64 = 20_000_000_000;
/// Number of windows between two rounds of samples of the same threads.
const RESAMPLE_WINDOWS: u32 = 300;
/// Assumed cost of a trace's entry until it has been measured: the cost of an interrupt.
const DEFAULT_ENTRY_NS: f64 = 1_500.0;
/// Cost of a sample, until it is measured.
const SAMPLE_COST_NS: f64 = 2_000.0;

impl ProbePlanner {
    /// Forgets the answers about a task, because they no longer describe its work.
    pub fn forget(&mut self, task: TaskId) {
        self.probes_by_task.remove(&task);
        self.first_traces
            .retain(|(traced_task, _)| *traced_task != task);
    }

    /// Records the costs and the answers of a window, and the time for which tasks ran.
    fn observe(&mut self, view: &View<'_>, curves: &CurveChecks, limits: &ProbeLimits) {
        self.ledger.record_window(view);
        for sample in view.live_tasks() {
            *self.ran_ns_by_task.entry(sample.task).or_insert(0) += sample.ran_ns();
        }

        let live_tasks: BTreeSet<TaskId> = view.live_tasks().map(|sample| sample.task).collect();
        self.probes_by_task
            .retain(|task, _| live_tasks.contains(task));
        self.first_traces
            .retain(|(task, _)| live_tasks.contains(task));
        self.clusters.retain(|task, _| live_tasks.contains(task));

        // Every live task has an entry, so that none is left of others if the numbers are equal.
        if self.ran_ns_by_task.len() > live_tasks.len() {
            self.ran_ns_by_task
                .retain(|task, _| live_tasks.contains(task));
        }

        for (task, task_probe) in &mut self.probes_by_task {
            let has_curve = curves.has_curve(view, *task);
            let entry_count = trace_entries_of(&task_probe.request.0);
            let is_first = entry_count.is_none_or(|entries| entries <= limits.trace_entries);
            task_probe.is_answered |= view.observation.has_completed(task_probe.request.0.id);
            task_probe.is_over |= !is_awaited(view, &task_probe.request) || has_curve && is_first;
            let phase = current_phase(view, *task);
            if (task_probe.is_answered, task_probe.phase, entry_count)
                == (true, phase.number, Some(limits.trace_entries))
            {
                self.first_traces.insert((*task, phase_key(phase)));
            }
        }
    }

    /// Observes a window after which no probe may run, because a change is measured: those that are not answered end,
    /// and are requested again as soon as they are paid for.
    pub fn withdraw_probes(&mut self, view: &View<'_>, curves: &CurveChecks, limits: &ProbeLimits) {
        self.observe(view, curves, limits);
        let open_probes = self.probes_by_task.iter_mut();
        for (task, task_probe) in open_probes.filter(|(_, task_probe)| !task_probe.is_over) {
            task_probe.is_over = true;
            let phase = current_phase(view, *task);
            let entries = trace_entries_of(&task_probe.request.0);
            let is_longer = entries.is_some_and(|entries| entries > limits.trace_entries);
            if is_longer && phase.number == task_probe.phase {
                self.first_traces.insert((*task, phase_key(phase)));
            } else {
                task_probe.phase = NO_PHASE;
            }
        }

        if let Some(open) = self
            .exclusive_probe
            .take()
            .filter(|open| is_awaited(view, open))
        {
            self.service_pauses.withdraw();
            if let ProbeKind::CoRunRows { rows, .. } = &open.0.kind
                && let [[task], ..] = rows.iter().map(Vec::as_slice).collect::<Vec<_>>()[..]
            {
                self.solo_requested.remove(task);
            }
        }
        if self.sharing_probe.take().is_some()
            && let Some((_, remaining_windows)) = &mut self.last_sampling
        {
            *remaining_windows = 0;
        }
    }

    /// Records the answers, and returns the probes of the next window.
    pub fn plan_probes(
        &mut self,
        view: &View<'_>,
        sites: &[CacheSite],
        (speeds, curves): (&SpeedTracker, &CurveChecks),
        limits: &ProbeLimits,
        is_sharing_enabled: bool,
    ) -> Vec<ProbeRequest> {
        self.observe(view, curves, limits);
        let now_ns = view.observation.span.end_ns();
        if let Some(probe) = self.request_rows(view, sites, limits, now_ns) {
            // The rows of this probe keep other tasks off their CPUs, so no other probe would be answered.
            return vec![probe];
        }
        let mut probes = self.request_curves(view, sites, (speeds, curves), limits, now_ns);
        if is_sharing_enabled && sites.len() > 1 {
            probes.extend(self.request_samples(view, speeds, limits, now_ns));
        }
        probes
    }

    /// The paused service and the intervals of its pause, if this window reports them.
    pub fn reported_pause<'v>(
        &self,
        view: &View<'v>,
    ) -> Option<(&ServiceIdentity, &'v [RowInterval])> {
        let (service, (probe, _)) = self
            .service_pauses
            .last_service
            .as_ref()
            .zip(self.exclusive_probe.as_ref())?;
        let mut results = view.observation.probe_results.iter();
        results.find_map(|result| match &result.evidence {
            ProbeEvidence::Rows(rows) if result.probe == probe.id => {
                Some((service, rows.as_slice()))
            }
            _ => None,
        })
    }

    /// Requests an interval in which some tasks wait: all but one with a promise, or those of a suspected service.
    fn request_rows(
        &mut self,
        view: &View<'_>,
        sites: &[CacheSite],
        limits: &ProbeLimits,
        now_ns: u64,
    ) -> Option<ProbeRequest> {
        self.exclusive_probe = self
            .exclusive_probe
            .take()
            .filter(|open| is_awaited(view, open));
        if let Some((probe, _)) = &self.exclusive_probe {
            return Some(probe.clone());
        }

        let is_within_budget = self.ledger.excess_ns(limits.max_share) <= 0.0;
        self.service_pauses.last_service = None;
        let kind = self
            .solo_interval(view, sites, is_within_budget, now_ns)
            .or_else(|| {
                limits
                    .may_pause_services
                    .then(|| {
                        self.service_pauses
                            .next_pause(view, is_within_budget, now_ns)
                    })
                    .flatten()
            })?;
        let probe = self.build_request(kind, ANSWER_TIMEOUT_NS);
        self.exclusive_probe = Some((probe.clone(), now_ns));
        Some(probe)
    }

    /// An interval in which a task with a promised slowdown has its cache to itself. The first interval of a program
    /// comes at once; those of its other threads, and later ones after a change of phase or several minutes, wait until
    /// they are paid for.
    fn solo_interval(
        &mut self,
        view: &View<'_>,
        sites: &[CacheSite],
        is_within_budget: bool,
        now_ns: u64,
    ) -> Option<ProbeKind> {
        if !view.capabilities.has_ability(Ability::CountPerCache) {
            return None;
        }
        self.solo_requested
            .retain(|task, _| view.live_tasks().any(|sample| sample.task == *task));
        let cpu_sites = CpuSites::from_sites(sites);
        // The first interval of a program is part of the initial profiling, and not that of each of its threads.
        let known_processes: BTreeSet<ProcessId> = view
            .live_tasks()
            .filter(|sample| self.solo_requested.contains_key(&sample.task))
            .map(|sample| sample.process)
            .collect();

        let is_due = |sample: &&TaskSample| {
            let phase = current_phase(view, sample.task).number;
            let is_known = view
                .profiles
                .get(&sample.task)
                .is_some_and(|known_profile| known_profile.rates.solo_instr_per_cycle.is_some());
            let is_interval_due = match self.solo_requested.get(&sample.task) {
                None => is_within_budget || !known_processes.contains(&sample.process),
                Some(&(requested_phase, requested_ns)) => {
                    let pause_ns = if is_known || requested_phase == phase {
                        SOLO_REPEAT_NS
                    } else {
                        SOLO_PAUSE_NS
                    };
                    is_within_budget && now_ns.saturating_sub(requested_ns) >= pause_ns
                }
            };
            is_promised(sample)
                && is_interval_due
                && sample.has_run()
                && self.ran_ns_by_task.get(&sample.task).copied().unwrap_or(0) >= SOLO_ROW_NS
        };
        let sample = view.movable_tasks().filter(is_due).min_by_key(|sample| {
            self.solo_requested
                .get(&sample.task)
                .map_or(0, |&(_, when_ns)| when_ns)
        })?;
        let (task, cache) = (sample.task, sites[cpu_sites.site_of_task(sample)?].cache);
        let phase = current_phase(view, task).number;
        self.solo_requested.insert(task, (phase, now_ns));
        let (rows, total_ns, settle_ns) =
            (vec![vec![task], vec![task]], SOLO_ROW_NS, SOLO_SETTLE_NS);
        Some(ProbeKind::CoRunRows {
            cache,
            rows,
            total_ns,
            settle_ns,
            boost: true,
        })
    }

    fn request_curves(
        &mut self,
        view: &View<'_>,
        sites: &[CacheSite],
        (speeds, curves): (&SpeedTracker, &CurveChecks),
        limits: &ProbeLimits,
        now_ns: u64,
    ) -> Vec<ProbeRequest> {
        let Some(method) = CurveMethod::of_machine(view) else {
            return Vec::new();
        };
        let largest_bytes = sites.iter().map(|site| site.bytes).fold(0.0, f64::max);
        let cpu_sites = CpuSites::from_sites(sites);
        let mut probes: Vec<ProbeRequest> = Vec::new();
        let mut stopped_sites: Vec<Option<usize>> = Vec::new();
        for sample in view.movable_tasks() {
            let waits_for_memory = || {
                memory_stall_share(speeds, sample.task).is_none_or(|share| share >= limits.min_gain)
            };
            let Some(need) = self.curve_need(view, sample, curves, largest_bytes, waits_for_memory)
            else {
                continue;
            };
            let site = cpu_sites.site_of_task(sample);
            let has_room = match method {
                CurveMethod::Watch => probes.len() < MAX_WATCH_PROBES,
                CurveMethod::Trace => !stopped_sites.contains(&site),
            };
            let may_begin = need == CurveNeed::Continued
                || sample.has_run()
                    && self.is_need_due(view, sample, need, limits)
                    && (method == CurveMethod::Watch || self.is_trace_paid(sample, need, limits));
            if !has_room || !may_begin {
                continue;
            }

            if need != CurveNeed::Continued {
                self.begin_curve(view, sample.task, (method, need), limits, now_ns);
            }
            stopped_sites.push(site);
            let task_probe = self.probes_by_task.get(&sample.task);
            probes.extend(task_probe.map(|task_probe| task_probe.request.0.clone()));
        }
        probes
    }

    /// What a task's curve needs; `None` if it needs nothing.
    fn curve_need(
        &self,
        view: &View<'_>,
        sample: &TaskSample,
        curves: &CurveChecks,
        largest_bytes: f64,
        waits_for_memory: impl Fn() -> bool,
    ) -> Option<CurveNeed> {
        let phase = current_phase(view, sample.task);
        let curve = curves
            .usable_profile(view, sample.task)
            .and_then(Profile::misses_per_kilo_instr);
        let is_pending = self.probes_by_task.get(&sample.task).is_some_and(|probe| {
            !probe.is_over && (probe.phase == phase.number || curve.is_none())
        });
        if is_pending {
            return Some(CurveNeed::Continued);
        }
        let Some(curve) = curve else {
            return Some(CurveNeed::First);
        };
        // Only traces are recorded here, so a machine without traces never needs a longer one.
        let is_short = self.first_traces.contains(&(sample.task, phase_key(phase)));
        (is_short && is_uncertain_at(curve, largest_bytes) && waits_for_memory())
            .then_some(CurveNeed::Longer)
    }

    /// The first probe is part of the initial profiling; those of later phases, and longer ones, wait until all probes
    /// are paid for.
    fn is_need_due(
        &self,
        view: &View<'_>,
        sample: &TaskSample,
        need: CurveNeed,
        limits: &ProbeLimits,
    ) -> bool {
        let is_within_budget = self.ledger.excess_ns(limits.max_share) <= 0.0;
        let phase = current_phase(view, sample.task).number;
        let earlier_probe = self.probes_by_task.get(&sample.task);
        match need {
            CurveNeed::Continued => true,
            CurveNeed::First => earlier_probe
                .is_none_or(|earlier_probe| earlier_probe.phase != phase && is_within_budget),
            CurveNeed::Longer => is_within_budget,
        }
    }

    /// Whether the task has run long enough for this trace and for the earlier one of its phase.
    fn is_trace_paid(&self, sample: &TaskSample, need: CurveNeed, limits: &ProbeLimits) -> bool {
        let cost_ns = self.trace_cost_ns(need, limits);
        let earlier_cost_ns = match need {
            CurveNeed::Longer => cost_ns / f64::from(ENTRIES_FACTOR),
            CurveNeed::First | CurveNeed::Continued => 0.0,
        };
        let ran_ns = self.ran_ns_by_task.get(&sample.task).copied().unwrap_or(0) as f64;
        ran_ns * limits.max_share >= cost_ns + earlier_cost_ns
    }

    fn trace_cost_ns(&self, need: CurveNeed, limits: &ProbeLimits) -> f64 {
        f64::from(need.entries(limits)) * self.ledger.entry_ns.unwrap_or(DEFAULT_ENTRY_NS)
    }

    fn begin_curve(
        &mut self,
        view: &View<'_>,
        task: TaskId,
        (method, need): (CurveMethod, CurveNeed),
        limits: &ProbeLimits,
        now_ns: u64,
    ) {
        let kind = match method {
            CurveMethod::Watch => ProbeKind::ReuseTimes {
                task,
                locations: limits.locations,
            },
            CurveMethod::Trace => ProbeKind::MissTrace {
                task,
                entries: need.entries(limits),
                includes_code: true,
            },
        };
        // The task must also run between its interrupts.
        let run_ns = (4.0 * self.trace_cost_ns(need, limits)) as u64;
        let probe = self.build_request(kind, limits.budget_ns.max(run_ns));
        let phase = current_phase(view, task);
        let task_probe = TaskProbe {
            phase: phase.number,
            request: (probe, now_ns),
            is_over: false,
            is_answered: false,
        };
        self.first_traces.remove(&(task, phase_key(phase)));
        self.probes_by_task.insert(task, task_probe);
    }

    fn build_request(&mut self, kind: ProbeKind, budget_ns: u64) -> ProbeRequest {
        self.next_id += 1;
        ProbeRequest {
            id: ProbeId(self.next_id),
            kind,
            budget_ns,
        }
    }

    /// Whether a probe of the task is outstanding or still to be requested.
    pub fn has_open_probe(&self, view: &View<'_>, task: TaskId, is_movable: bool) -> bool {
        is_movable && CurveMethod::of_machine(view).is_some() && self.is_open(task)
    }

    /// Whether the task's probe is neither answered nor abandoned.
    fn is_open(&self, task: TaskId) -> bool {
        self.probes_by_task
            .get(&task)
            .is_none_or(|task_probe| !task_probe.is_over)
    }

    /// Whether every task that can be probed has been probed, successfully or not.
    pub fn is_survey_complete(&self, view: &View<'_>, curves: &CurveChecks) -> bool {
        let can_measure = CurveMethod::of_machine(view).is_some();
        let is_surveyed =
            |task: TaskId| curves.has_curve(view, task) || !can_measure || !self.is_open(task);
        let has_run = |sample: &TaskSample| sample.has_run();
        self.sharing_probe.is_none()
            && view
                .movable_tasks()
                .filter(|sample| has_run(sample))
                .all(|sample| is_surveyed(sample.task))
    }

    fn request_samples(
        &mut self,
        view: &View<'_>,
        speeds: &SpeedTracker,
        limits: &ProbeLimits,
        now_ns: u64,
    ) -> Option<ProbeRequest> {
        if !view.capabilities.has_ability(Ability::SampleAccesses) {
            return None;
        }

        if let Some(open) = self.sharing_probe.take() {
            if !is_awaited(view, &open) {
                self.update_clusters(view, &open.0);
                return None;
            }
            return Some(self.sharing_probe.insert(open).0.clone());
        }

        let remote_stall_share_of = |sample: &TaskSample| {
            let speed = speeds.observed_speed(sample.task)?;
            Some(speed.remote_cycles_per_instr? / speed.cycles_per_instr)
        };
        let mut processes: Vec<ProcessId> = Vec::new();
        for sample in view.movable_tasks() {
            if remote_stall_share_of(sample).is_some_and(|share| share >= MIN_REMOTE_SHARE)
                && !processes.contains(&sample.process)
            {
                processes.push(sample.process);
            }
        }

        let threads: Vec<TaskId> = view
            .live_tasks()
            .filter(|sample| processes.contains(&sample.process))
            .map(|sample| sample.task)
            .collect();
        if let Some((last_threads, remaining_windows)) = &mut self.last_sampling {
            *remaining_windows = remaining_windows.saturating_sub(1);
            if *last_threads == threads && *remaining_windows > 0 {
                return None;
            }
        }

        let is_paid_for =
            self.ledger.excess_ns(limits.max_share) <= 0.0 || self.last_sampling.is_none();
        if threads.len() < 2 || !is_paid_for {
            return None;
        }

        let max_samples = limits
            .samples_per_thread
            .saturating_mul(threads.len() as u32);
        let sample_period = choose_sample_period(view, &processes, limits.max_share);
        let probe_kind = ProbeKind::AccessSamples {
            processes,
            sample_period,
            remote_only: true,
            max_samples,
        };
        let probe = self.build_request(probe_kind, ANSWER_TIMEOUT_NS / 2);
        self.last_sampling = Some((threads, RESAMPLE_WINDOWS));
        self.sharing_probe = Some((probe.clone(), now_ns));
        Some(probe)
    }

    /// Clusters threads that share data by their shMaps. The filters of different processes cannot be compared.
    fn update_clusters(&mut self, view: &View<'_>, probe: &ProbeRequest) {
        let ProbeKind::AccessSamples { processes, .. } = &probe.kind else {
            return;
        };

        let sharing_map_of = |sample: &TaskSample| {
            view.profiles
                .get(&sample.task)
                .and_then(Profile::sharing_map)
        };
        let mut comparable_threads: Vec<(Option<ProcessId>, Vec<&TaskSample>)> = Vec::new();
        for sample in view.live_tasks() {
            if !processes.contains(&sample.process) {
                continue;
            }

            let is_machine_wide = sharing_map_of(sample).is_some_and(|map| map.machine_wide);
            let filter = (!is_machine_wide).then_some(sample.process);
            match comparable_threads
                .iter_mut()
                .find(|(other, _)| *other == filter)
            {
                Some((_, members)) => members.push(sample),
                None => comparable_threads.push((filter, vec![sample])),
            }
        }

        let mut clusters = BTreeMap::new();
        let mut first_cluster = 0;
        for (_, members) in comparable_threads {
            let maps: Vec<ThreadMap<'_>> = members
                .iter()
                .map(|sample| ThreadMap {
                    counters: sharing_map_of(sample).map_or(&[], |map| map.counters.as_slice()),
                    previous_cluster: self.clusters.get(&sample.task).copied(),
                })
                .collect();
            let sample_count: u64 = maps
                .iter()
                .flat_map(|map| map.counters)
                .map(|&counter| u64::from(counter))
                .sum();
            let sample_ratio =
                sample_count as f64 / maps.len().max(1) as f64 / THRESHOLD_SAMPLES_PER_THREAD;
            let criteria = SharingCriteria::default();
            let threshold = scaled_threshold(THRESHOLD, sample_ratio, criteria.floor);
            let method = ClusteringMethod::CoClusters;
            let mut cluster_by_thread =
                find_clusters(method, &maps, &criteria, threshold).cluster_by_thread;

            let fetch_share = |thread: usize, partner: usize| {
                let profile = view.profiles.get(&members[thread].task);
                profile
                    .and_then(|profile| profile.sharing.with.get(&members[partner].task))
                    .map_or(0.0, |fact| fact.value)
            };
            complete_clusters(&mut cluster_by_thread, &maps, fetch_share);
            for (sample, cluster) in members.iter().zip(&cluster_by_thread) {
                clusters.extend(cluster.map(|cluster| (sample.task, first_cluster + cluster)));
            }
            first_cluster += cluster_count(&cluster_by_thread);
        }

        if !clusters.is_empty() {
            self.clusters = clusters;
        }
    }
}

/// Whether a request is neither answered nor refused, and not yet too old.
fn is_awaited(view: &View<'_>, (probe, since_ns): &OpenRequest) -> bool {
    let now_ns = view.observation.span.end_ns();
    !view.observation.has_completed(probe.id)
        && !view.observation.applied.has_refused_probe(probe.id)
        && now_ns.saturating_sub(*since_ns) <= ANSWER_TIMEOUT_NS
}

/// `None` for a probe that is no trace.
fn trace_entries_of(probe: &ProbeRequest) -> Option<u32> {
    match probe.kind {
        ProbeKind::MissTrace { entries, .. } => Some(entries),
        _ => None,
    }
}

/// Whether the probes in force leave all speeds unchanged. Watch points of an idle thread do, because they wait for it
/// to run.
pub fn are_probes_harmless(view: &View<'_>) -> bool {
    let is_running = |task: TaskId| {
        let min_run_ns = MIN_BUSY_SHARE * view.observation.span.elapsed_ns as f64;
        view.live_tasks()
            .any(|sample| sample.task == task && sample.ran_ns() as f64 >= min_run_ns)
    };
    let disturbs_tasks = |probe: &ProbeRequest| match probe.kind {
        ProbeKind::ReuseTimes { task, .. } => is_running(task),
        _ => true,
    };
    !view.previous_plan.probes.iter().any(disturbs_tasks)
}

/// The share of a task's cycles that wait for memory, as counted.
fn memory_stall_share(speeds: &SpeedTracker, task: TaskId) -> Option<f64> {
    let speed = speeds.observed_speed(task)?;
    Some(speed.misses_per_instr? * speed.stall_cycles_per_miss? / speed.cycles_per_instr)
}

/// The sample period (in accesses per sample) at which samples cost no more than this share of the busiest process's
/// time.
fn choose_sample_period(view: &View<'_>, processes: &[ProcessId], max_share: f64) -> u32 {
    let remote_hit_rate = |process: &ProcessId| {
        let (mut hits, mut run_time) = (0.0, 0.0);
        for sample in view
            .live_tasks()
            .filter(|sample| sample.process == *process)
        {
            if let Some(count) = sample
                .counts
                .get(cachemate_core::CounterEvent::RemoteCacheHits)
            {
                hits += count;
                run_time += sample
                    .on_cpu_ns
                    .iter()
                    .map(|(_, ns)| *ns as f64)
                    .sum::<f64>();
            }
        }
        if run_time > 0.0 { hits / run_time } else { 0.0 }
    };

    let highest_rate = processes.iter().map(remote_hit_rate).fold(0.0, f64::max);
    libm::ceil(highest_rate * SAMPLE_COST_NS / max_share.max(1e-6)).clamp(1.0, 1e6) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches, observation_fixture,
    };
    use cachemate_core::{CacheLevel, CpuId, Estimate, FactSource, Goal, ProbeResult};

    /// Do watch points of an idle thread leave windows undisturbed, while those of a running thread and all traces
    /// disturb them?
    #[test]
    fn watching_an_idle_thread_disturbs_no_task() {
        use cachemate_core::test_support::{
            NullPredictor, capabilities_fixture, observation_fixture, topology_fixture,
        };
        let (topology, capabilities) = (topology_fixture(2), capabilities_fixture(&[]));
        let mut observation = observation_fixture(1, 2);
        observation.span.elapsed_ns = 100;
        observation.tasks[0].on_cpu_ns = vec![(cachemate_core::CpuId(0), 100)];
        observation.tasks[1].on_cpu_ns = vec![(cachemate_core::CpuId(1), 5)];
        let (busy, idle) = (observation.tasks[0].task, observation.tasks[1].task);

        let quiet = |probes: &[ProbeKind]| {
            let mut plan = cachemate_core::Plan::idle(cachemate_core::WindowLength::Time { ns: 1 });
            let probe = |probe_kind: &ProbeKind| ProbeRequest {
                id: ProbeId(1),
                kind: probe_kind.clone(),
                budget_ns: 1,
            };
            plan.probes = probes.iter().map(probe).collect();
            are_probes_harmless(&View {
                topology: &topology,
                capabilities: &capabilities,
                observation: &observation,
                profiles: &cachemate_core::Profiles::new(),
                previous_plan: &plan,
                predictor: &NullPredictor,
                verdicts: &(),
            })
        };

        let watched = |task: TaskId| ProbeKind::ReuseTimes { task, locations: 1 };
        let traced = ProbeKind::MissTrace {
            task: idle,
            entries: 1,
            includes_code: false,
        };
        assert!(quiet(&[]) && quiet(&[watched(idle)]));
        assert!(
            !quiet(&[watched(busy)])
                && !quiet(&[watched(idle), watched(busy)])
                && !quiet(&[traced])
        );
    }

    /// Do searches wait for a task until it has answered or its probe is abandoned, and never for a task that cannot be
    /// probed?
    #[test]
    fn only_tasks_that_can_still_answer_are_waited_for() {
        use cachemate_core::test_support::{
            NullPredictor, capabilities_fixture, observation_fixture, topology_fixture,
        };
        let topology = topology_fixture(2);
        let mut observation = observation_fixture(1, 3);
        observation.tasks[1].unmovable = true;
        let (profiles, plan) = (
            cachemate_core::Profiles::new(),
            cachemate_core::Plan::idle(cachemate_core::WindowLength::Time { ns: 1 }),
        );
        let mut planner = ProbePlanner::default();
        let probe_kind = ProbeKind::ReuseTimes {
            task: TaskId(2),
            locations: 1,
        };
        let probe = ProbeRequest {
            id: ProbeId(1),
            kind: probe_kind,
            budget_ns: 1,
        };
        planner.probes_by_task.insert(
            TaskId(2),
            TaskProbe {
                phase: 0,
                request: (probe, 0),
                is_over: true,
                is_answered: false,
            },
        );
        let waited = |abilities: &[Ability]| {
            let capabilities = capabilities_fixture(abilities);
            let (topology, capabilities, observation, profiles) =
                (&topology, &capabilities, &observation, &profiles);
            let view = View {
                topology,
                capabilities,
                observation,
                profiles,
                previous_plan: &plan,
                predictor: &NullPredictor,
                verdicts: &(),
            };
            [0, 1, 2].map(|id| planner.has_open_probe(&view, TaskId(id), id != 1))
        };
        assert_eq!(waited(&[Ability::TraceAddresses]), [true, false, false]);
        assert_eq!(waited(&[Ability::Affinity]), [false; 3]);
    }

    /// Does a task whose phases end before they have paid for a longer trace get one in a later phase of the kind, once
    /// for each kind?
    #[test]
    fn a_longer_trace_may_come_in_a_later_phase_of_its_kind() {
        use cachemate_core::test_support::{
            NullPredictor, capabilities_fixture, last_level_caches, observation_fixture,
        };
        use cachemate_core::{
            CacheLevel, CpuId, Fact, FactSource, Plan, ProbeResult, Profiles, WindowLength,
        };
        const SIZE: u64 = 1 << 20;
        let (topology, capabilities) = (
            last_level_caches(1, 1, CacheLevel::L3, SIZE),
            capabilities_fixture(&[Ability::TraceAddresses]),
        );
        let limits = ProbeLimits {
            max_share: 0.01,
            min_gain: 0.01,
            locations: 1,
            trace_entries: 5_000,
            budget_ns: 1,
            samples_per_thread: 1,
            may_pause_services: false,
        };
        let (mut planner, mut plan) = (
            ProbePlanner::default(),
            Plan::idle(WindowLength::Time { ns: 1 }),
        );
        let mut traces: Vec<(u32, u32)> = Vec::new();
        for window in 0..40 {
            let phase = window as u32 / 3;
            let kind = phase % 2;
            let mut observation = observation_fixture(window, 1);
            observation.tasks[0].on_cpu_ns = vec![(CpuId(0), 1_000_000_000)];
            observation.probe_results = plan
                .probes
                .iter()
                .map(|probe| {
                    traces.push((kind, trace_entries_of(probe).unwrap()));
                    let evidence = ProbeEvidence::Rows(Vec::new());
                    ProbeResult {
                        probe: probe.id,
                        evidence,
                        complete: true,
                        cost_ns: Vec::new(),
                    }
                })
                .collect();
            let mut profile = Profile {
                phase_number: phase,
                ..Profile::default()
            };
            profile.phase.kind = Some(Fact::new(kind, FactSource::PhaseDetector, 0));
            if traces.iter().any(|(traced, _)| *traced == kind) {
                let unsure = Estimate {
                    value: 5.0,
                    low: 0.0,
                    high: 10.0,
                };
                let curve = vec![(SIZE / 2, Estimate::exact(9.0)), (SIZE, unsure)];
                profile = profile.with_misses(CacheLevel::L3, curve, FactSource::Oracle);
            }
            let profiles: Profiles = [(TaskId(0), profile)].into();
            let view = View {
                topology: &topology,
                capabilities: &capabilities,
                observation: &observation,
                profiles: &profiles,
                previous_plan: &plan,
                predictor: &NullPredictor,
                verdicts: &(),
            };
            let sites = crate::auto::model::sites::cache_sites(&view);
            let evidence = (&SpeedTracker::default(), &CurveChecks::default());
            plan.probes = planner.plan_probes(&view, &sites, evidence, &limits, false);
        }
        traces.sort_unstable();
        assert_eq!(traces, [(0, 5_000), (0, 20_000), (1, 5_000), (1, 20_000)]);
    }

    const LIMITS: ProbeLimits = ProbeLimits {
        max_share: 0.01,
        min_gain: 0.01,
        locations: 1,
        trace_entries: 5_000,
        budget_ns: 1,
        samples_per_thread: 1,
        may_pause_services: false,
    };

    fn plan_probes(planner: &mut ProbePlanner, fixture: &mut ViewFixture) -> Vec<ProbeRequest> {
        let view = fixture.view(&NullPredictor);
        let sites = crate::auto::model::sites::cache_sites(&view);
        let evidence = (&SpeedTracker::default(), &CurveChecks::default());
        let probes = planner.plan_probes(&view, &sites, evidence, &LIMITS, false);
        fixture.previous_plan.probes.clone_from(&probes);
        probes
    }

    /// A change is measured for half a minute while a longer trace is under way, which ends it: is the trace requested
    /// again, and is a trace that was answered in time not?
    #[test]
    fn does_a_longer_trace_outlive_a_measured_change() {
        for is_answered in [false, true] {
            let mut fixture = ViewFixture::new(
                last_level_caches(1, 1, CacheLevel::L3, 1 << 20),
                capabilities_fixture(&[Ability::TraceAddresses]),
                1,
            );
            let mut planner = ProbePlanner::default();
            let mut traces: Vec<(u64, u32)> = Vec::new();
            let mut withdrawal = None;
            for window in 0..100 {
                fixture.observation = observation_fixture(window, 1);
                fixture.observation.tasks[0].on_cpu_ns = vec![(CpuId(0), 1_000_000_000)];
                let is_longer = |probe: &&ProbeRequest| trace_entries_of(probe) == Some(20_000);
                let longer = fixture.previous_plan.probes.iter().find(is_longer);
                let is_first = longer.is_some() && withdrawal.is_none();
                let answered = fixture
                    .previous_plan
                    .probes
                    .iter()
                    .filter(|probe| is_answered || !is_longer(probe));
                fixture.observation.probe_results = answered
                    .map(|probe| ProbeResult {
                        probe: probe.id,
                        evidence: ProbeEvidence::Rows(Vec::new()),
                        complete: true,
                        cost_ns: Vec::new(),
                    })
                    .collect();
                if !fixture.observation.probe_results.is_empty() {
                    let unsure = Estimate {
                        value: 5.0,
                        low: 0.0,
                        high: 10.0,
                    };
                    let curve = vec![(1 << 19, Estimate::exact(9.0)), (1 << 20, unsure)];
                    let profile =
                        Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle);
                    fixture.profiles.insert(TaskId(0), profile);
                }
                if is_first {
                    withdrawal = Some(window);
                }
                if withdrawal.is_some_and(|first| window < first + 30) {
                    let view = fixture.view(&NullPredictor);
                    planner.withdraw_probes(&view, &CurveChecks::default(), &LIMITS);
                    fixture.previous_plan.probes.clear();
                    continue;
                }
                let probes = plan_probes(&mut planner, &mut fixture);
                traces.extend(
                    probes
                        .iter()
                        .map(|probe| (window, trace_entries_of(probe).unwrap())),
                );
            }
            let after = traces.iter().filter(|(window, entries)| {
                *entries == 20_000 && withdrawal.is_some_and(|first| *window >= first)
            });
            assert_eq!(after.count() > 0, !is_answered, "{traces:?}");
            assert!(withdrawal.is_some(), "{traces:?}");
        }
    }

    /// A program with a promise has many threads: does it get one solo interval at once, and those of its other threads
    /// only as far as they are paid for?
    #[test]
    fn do_the_threads_of_a_promised_program_wait_until_their_solo_intervals_are_paid_for() {
        let mut fixture = ViewFixture::new(
            last_level_caches(1, 4, CacheLevel::L3, 1 << 20),
            capabilities_fixture(&[Ability::CountPerCache]),
            0,
        );
        let mut planner = ProbePlanner::default();
        let mut intervals = 0;
        for window in 0..40 {
            fixture.observation = observation_fixture(window, 20);
            for task in &mut fixture.observation.tasks {
                task.process = ProcessId(task.task.0 / 10);
                task.on_cpu_ns = vec![(CpuId(0), 60_000_000)];
                task.goal = Some(Goal {
                    max_slowdown: Some(0.05),
                    ..Goal::default()
                });
            }
            let probes = fixture.previous_plan.probes.iter();
            fixture.observation.probe_results = probes
                .map(|probe| ProbeResult {
                    probe: probe.id,
                    evidence: ProbeEvidence::Rows(Vec::new()),
                    complete: true,
                    // Three CPUs wait for a tenth of a second, and more.
                    cost_ns: vec![(None, 1_000_000_000)],
                })
                .collect();
            intervals += plan_probes(&mut planner, &mut fixture).len();
        }
        // One for each program, and one more for 25 seconds of four CPUs.
        assert_eq!(intervals, 2);
    }

    /// Does a thread with few samples join threads that use the same regions, and does a thread with other regions join
    /// only the one whose lines it fetches?
    #[test]
    fn threads_with_few_samples_join_their_partners() {
        let maps = [[9u8, 8, 0, 0], [8, 9, 0, 0], [1, 1, 0, 0], [0, 0, 7, 7]];
        let maps: Vec<ThreadMap<'_>> = maps
            .iter()
            .map(|map| ThreadMap {
                counters: map.as_slice(),
                previous_cluster: None,
            })
            .collect();
        let completed = |mut clusters: [Option<usize>; 4], fetched_by_last: f64| {
            let fetch_share = |thread, partner| {
                if (thread, partner) == (3, 1) {
                    fetched_by_last
                } else {
                    0.0
                }
            };
            complete_clusters(&mut clusters, &maps, fetch_share);
            clusters
        };

        let expected = [Some(0), Some(0), Some(0), None];
        assert_eq!(completed([Some(0), Some(0), None, None], 0.0), expected);
        assert_eq!(completed([None; 4], 0.0), expected);
        let two_of_one = [Some(0), Some(1), Some(1), None];
        assert_eq!(completed(two_of_one, 0.09), expected, "one cluster");
        assert_eq!(completed([None; 4], 0.2), [Some(0); 4]);
    }
}
