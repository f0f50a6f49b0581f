//! Planning of `auto`'s probes within their cost limits.
//!
//! One ledger counts the processor time of all probes. A probe that stops its task waits until its cost is no more than
//! the configured share of the time that the task has run, so short-lived tasks are never profiled. After the first
//! probe of each task, probes wait until all of them together have cost no more than that share of processor time. At
//! most one probe that stops its task runs on a cache at a time. A task that does not answer in time is not probed
//! again in the same phase. A log that was too short for the largest cache is recorded once more with more entries, as
//! soon as its task has run long enough to pay for it and is in a phase of the same kind. A task whose waits for memory
//! are smaller than the smallest gain is not probed again.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    Ability, Estimate, PlanItem, ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, ProcessId, Profile, SizeCurve,
    TaskId, View,
};
use cachemate_locality::shmap::SharingCriteria as Filter;

use super::curves::CurveChecks;
use super::phases::current_phase;
use super::speeds::SpeedTracker;
use super::thread_clusters::join_unclustered;
use crate::clustering::{ClusteringMethod, THRESHOLD, THRESHOLD_SAMPLES_PER_THREAD, ThreadMap, find, scaled_threshold};
use crate::policies::auto::model::problem::{CacheSite, CpuSites};

/// Limits of the probes.
#[derive(Clone, Copy, Debug)]
pub struct ProbeLimits {
    /// Share of processor time that probes may take in the long run.
    pub share: f64,
    /// Smallest forecast gain of a change.
    pub min_gain: f64,
    pub locations: u32,
    pub trace_entries: u32,
    /// Budget of one probe.
    pub budget_ns: u64,
    /// Number of samples of accesses to other caches, for each thread.
    pub samples_per_thread: u32,
}

/// A probe of a task in one of its phases.
#[derive(Clone, Debug)]
struct TaskProbe {
    phase: u32,
    probe: ProbeRequest,
    since_ns: u64,
    is_over: bool,
    is_answered: bool,
}

/// The planner of probes; see the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct ProbePlanner {
    next: u32,
    by_task: BTreeMap<TaskId, TaskProbe>,
    /// Kinds of phases with a first log and no longer one: a phase may end before it has paid for that.
    first_logs: BTreeSet<(TaskId, u32)>,
    /// The pending request for samples of accesses to other caches, and its window.
    sharing: Option<(ProbeRequest, u64)>,
    /// Threads of the last samples, and the number of windows until they are sampled again.
    sampled_tasks: Option<(Vec<TaskId>, u32)>,
    pub clusters: BTreeMap<TaskId, usize>,
    pub spent_ns: u64,
    pub processor_ns: f64,
    /// Run time of each task.
    ran_ns: BTreeMap<TaskId, u64>,
    /// Time that one entry of a log takes, once measured.
    entry_ns: Option<f64>,
    /// Outstanding solo interval of a task with a promise, and when it was requested.
    solo: Option<(ProbeRequest, u64)>,
    /// Tasks whose solo interval was requested, with the phase and the time of the request.
    solo_requested: BTreeMap<TaskId, (u32, u64)>,
}

/// Length of the two rows of a solo interval; the cache fills during the first.
const SOLO_SETTLE_NS: u64 = 50_000_000;
const SOLO_ROW_NS: u64 = 50_000_000;
/// Time after which a solo speed is measured again in the same phase, if the measurement is paid for.
const SOLO_AGAIN_AFTER_NS: u64 = 300_000_000_000;
/// Time after which a solo speed is measured in another phase, if that phase's solo speed is unknown.
const SOLO_PAUSE_NS: u64 = 5_000_000_000;

/// Factor by which the entries of a log are increased if it was too short.
const ENTRIES_FACTOR: u32 = 4;
/// A process is not sampled if it waits for other caches for less than this share of its cycles.
const REMOTE_FROM: f64 = 0.03;
/// Number of locations watched at once: processors have four watch points.
const WATCHED_AT_ONCE: usize = 4;
/// A task that runs, or wants to run, for a smaller share of a window is idle: what it takes from other tasks is
/// negligible.
pub const IDLE_BELOW: f64 = 0.1;
/// Time after which a probe counts as unanswered.
const ANSWERED_WITHIN_NS: u64 = 20_000_000_000;
/// Number of windows between two rounds of samples of the same threads.
const SAMPLED_AGAIN_AFTER: u32 = 300;
/// Cost of an entry of a log until it is measured: that of an interrupt.
const ENTRY_NS: f64 = 1_500.0;
/// Cost of a sample, until it is measured.
const SAMPLE_COST_NS: f64 = 2_000.0;

impl ProbePlanner {
    /// Returns the share of processor time that probes have cost so far.
    pub fn spent_share(&self) -> f64 {
        self.spent_ns as f64 / self.processor_ns.max(1.0)
    }

    /// Forgets the answers about a task, because they no longer describe its work.
    pub fn forget(&mut self, task: TaskId) {
        self.by_task.remove(&task);
        self.first_logs.retain(|(logged_task, _)| *logged_task != task);
    }

    fn account_costs(&mut self, view: &View<'_>) {
        let answers = view.observation.probe_results.iter();
        self.spent_ns += answers.flat_map(|answer| &answer.cost_ns).map(|(_, ns)| ns).sum::<u64>();
        self.processor_ns += view.observation.span.elapsed_ns as f64 * f64::from(view.online().count());
        for answer in &view.observation.probe_results {
            let cost_ns: u64 = answer.cost_ns.iter().map(|(_, ns)| ns).sum();
            if let ProbeEvidence::Trace { lines, .. } = &answer.evidence
                && cost_ns > 0
            {
                self.entry_ns = Some(cost_ns as f64 / lines.len().max(1) as f64);
            }
        }
        for sample in view.live_tasks() {
            *self.ran_ns.entry(sample.task).or_insert(0) += sample.ran_ns();
        }
    }

    /// Records the answers, and returns the probes of the next window.
    pub fn next(
        &mut self,
        view: &View<'_>,
        sites: &[CacheSite],
        (speeds, curves): (&SpeedTracker, &CurveChecks),
        limits: &ProbeLimits,
        share: bool,
    ) -> Vec<ProbeRequest> {
        self.account_costs(view);
        let live_tasks: BTreeSet<TaskId> = view.live_tasks().map(|sample| sample.task).collect();
        self.by_task.retain(|task, _| live_tasks.contains(task));
        self.first_logs.retain(|(task, _)| live_tasks.contains(task));
        self.clusters.retain(|task, _| live_tasks.contains(task));
        self.ran_ns.retain(|task, _| live_tasks.contains(task));
        let now_ns = view.observation.span.start_ns + view.observation.span.elapsed_ns;
        for (task, task_probe) in &mut self.by_task {
            let answered = view
                .observation
                .probe_results
                .iter()
                .any(|answer| answer.probe == task_probe.probe.id && answer.complete);
            let refused =
                view.observation.applied.refused.iter().any(|no| no.item == PlanItem::Probe(task_probe.probe.id));
            let late = now_ns.saturating_sub(task_probe.since_ns) > ANSWERED_WITHIN_NS;
            let has_curve = curves.has_curve(view, *task);
            let entries = log_entries(&task_probe.probe);
            let is_first = entries.is_none_or(|entries| entries <= limits.trace_entries);
            task_probe.is_answered |= answered;
            task_probe.is_over |= answered || refused || late || has_curve && is_first;
            if let (phase, Some(kind)) = current_phase(view, *task)
                && (task_probe.is_answered, task_probe.phase, entries) == (true, phase, Some(limits.trace_entries))
            {
                self.first_logs.insert((*task, kind));
            }
        }
        if let Some(probe) = self.promise_requests(view, sites, limits, now_ns) {
            // The rows of this probe keep other tasks off their CPUs, so no other probe would be answered.
            return vec![probe];
        }
        let mut probes = self.curve_requests(view, sites, (speeds, curves), limits, now_ns);
        if share && sites.len() > 1 {
            probes.extend(self.sharing_requests(view, speeds, limits, now_ns));
        }
        probes
    }

    /// Requests an interval in which a task with a promised slowdown has its cache to itself. The first interval of a
    /// task comes at once; later ones follow a change of phase or several minutes, and wait until they are paid for.
    fn promise_requests(
        &mut self,
        view: &View<'_>,
        sites: &[CacheSite],
        limits: &ProbeLimits,
        now_ns: u64,
    ) -> Option<ProbeRequest> {
        if !view.capabilities.can(Ability::CountPerCache) {
            return None;
        }
        self.solo_requested.retain(|task, _| view.live_tasks().any(|sample| sample.task == *task));
        if let Some((probe, since_ns)) = self.solo.take() {
            let answered = view.observation.probe_results.iter().any(|answer| answer.probe == probe.id);
            let refused = view.observation.applied.refused.iter().any(|no| no.item == PlanItem::Probe(probe.id));
            if !answered && !refused && now_ns.saturating_sub(since_ns) <= ANSWERED_WITHIN_NS {
                self.solo = Some((probe.clone(), since_ns));
                return Some(probe);
            }
        }
        let seats = CpuSites::from_sites(sites);
        let paid = self.spent_share() <= limits.share;
        let is_due = |seen: &&cachemate_core::TaskSample| {
            let is_promised = seen.goal.is_some_and(|goal| goal.max_slowdown.is_some());
            let phase = view.profiles.get(&seen.task).map_or(0, |profile| profile.phase_number);
            let is_known = view
                .profiles
                .get(&seen.task)
                .is_some_and(|known_profile| known_profile.rates.solo_instr_per_cycle.is_some());
            let due = self.solo_requested.get(&seen.task).is_none_or(|&(measured, when_ns)| {
                let pause_ns = if is_known || measured == phase { SOLO_AGAIN_AFTER_NS } else { SOLO_PAUSE_NS };
                paid && now_ns.saturating_sub(when_ns) >= pause_ns
            });
            is_promised && due && seen.has_run() && self.ran_ns.get(&seen.task).copied().unwrap_or(0) >= SOLO_ROW_NS
        };
        let sample = view
            .movable_tasks()
            .filter(is_due)
            .min_by_key(|seen| self.solo_requested.get(&seen.task).map_or(0, |&(_, when_ns)| when_ns))?;
        let (task, cache) = (sample.task, sites[seats.site_of_task(sample)?].cache);
        let phase = view.profiles.get(&task).map_or(0, |profile| profile.phase_number);
        self.solo_requested.insert(task, (phase, now_ns));
        let kind = ProbeKind::CoRunRows {
            cache,
            rows: vec![vec![task], vec![task]],
            total_ns: SOLO_ROW_NS,
            settle_ns: SOLO_SETTLE_NS,
            boost: true,
        };
        let probe = self.probe(kind, ANSWERED_WITHIN_NS);
        self.solo = Some((probe.clone(), now_ns));
        Some(probe)
    }

    fn curve_requests(
        &mut self,
        view: &View<'_>,
        sites: &[CacheSite],
        (speeds, curves): (&SpeedTracker, &CurveChecks),
        limits: &ProbeLimits,
        now_ns: u64,
    ) -> Vec<ProbeRequest> {
        // A log of first-level misses describes the cache behind it better than watch points, most of which see hits.
        let trace = view.capabilities.can(Ability::TraceAddresses);
        let watch = !trace && view.capabilities.can(Ability::SampleReuses);
        if !watch && !trace {
            return Vec::new();
        }
        let paid = self.spent_share() <= limits.share;
        let largest_bytes = sites.iter().map(|site| site.bytes).fold(0.0, f64::max);
        let seats = CpuSites::from_sites(sites);
        let mut probes: Vec<ProbeRequest> = Vec::new();
        let mut stopped: Vec<Option<usize>> = Vec::new();
        for sample in view.movable_tasks() {
            let (phase, kind) = current_phase(view, sample.task);
            let has_run = sample.has_run();
            let current_site = seats.site_of_task(sample);
            let previous_probe = self.by_task.get(&sample.task);
            let has_curve = curves.has_curve(view, sample.task);
            // The first probe is part of the initial profiling; later phases wait until their probe is paid for.
            let can_request = previous_probe.is_none_or(|earlier_probe| earlier_probe.phase != phase && paid);
            let goes_on = previous_probe
                .is_some_and(|earlier_probe| !earlier_probe.is_over && (earlier_probe.phase == phase || !has_curve));
            let has_room = if watch { probes.len() < WATCHED_AT_ONCE } else { !stopped.contains(&current_site) };
            let is_answer_short = |request: &TaskProbe| {
                let is_full_length = log_entries(&request.probe) == Some(limits.trace_entries);
                request.is_answered && request.phase == phase && is_full_length
            };
            let is_kind_short = kind.is_some_and(|kind| self.first_logs.contains(&(sample.task, kind)));
            let is_short = trace && (is_kind_short || previous_probe.is_some_and(is_answer_short));
            let waits_for_memory =
                || memory_stall_share(speeds, sample.task).is_none_or(|share| share >= limits.min_gain);
            let curve = curves.usable_profile(view, sample.task).and_then(Profile::misses_per_kilo_instr);
            let is_uncertain = curve.is_some_and(|curve| is_uncertain_at(curve, largest_bytes));
            let longer = (is_short && is_uncertain && waits_for_memory())
                .then(|| limits.trace_entries.saturating_mul(ENTRIES_FACTOR));
            let entries = longer.unwrap_or(limits.trace_entries);
            let cost_ns = f64::from(entries) * self.entry_ns.unwrap_or(ENTRY_NS);
            // Earlier probes of the task must be paid for as well.
            let spent_ns = longer.map_or(0.0, |_| cost_ns / f64::from(ENTRIES_FACTOR));
            let has_run_ns = self.ran_ns.get(&sample.task).copied().unwrap_or(0) as f64;
            let earned = watch || has_run_ns * limits.share >= cost_ns + spent_ns;
            let may = if has_curve { longer.is_some() && paid } else { can_request };
            if !has_room || !(goes_on || may && has_run && earned) {
                continue;
            }
            if !goes_on {
                let probe_kind = if watch {
                    ProbeKind::ReuseTimes { task: sample.task, locations: limits.locations }
                } else {
                    ProbeKind::MissTrace { task: sample.task, entries, includes_code: true }
                };
                // The task must also run between its interrupts.
                let probe = self.probe(probe_kind, limits.budget_ns.max((4.0 * cost_ns) as u64));
                let task_probe = TaskProbe { phase, probe, since_ns: now_ns, is_over: false, is_answered: false };
                self.first_logs.retain(|log| Some(*log) != kind.map(|kind| (sample.task, kind)));
                self.by_task.insert(sample.task, task_probe);
            }
            stopped.push(current_site);
            probes.extend(self.by_task.get(&sample.task).map(|request| request.probe.clone()));
        }
        probes
    }

    fn probe(&mut self, kind: ProbeKind, budget_ns: u64) -> ProbeRequest {
        self.next += 1;
        ProbeRequest { id: ProbeId(self.next), kind, budget_ns }
    }

    /// Is a probe of the task outstanding or still to be requested?
    pub fn has_open_probe(&self, view: &View<'_>, task: TaskId) -> bool {
        can_measure_curves(view) && self.is_open(task) && view.movable_tasks().any(|sample| sample.task == task)
    }

    /// Is the task's probe neither answered nor abandoned?
    fn is_open(&self, task: TaskId) -> bool {
        self.by_task.get(&task).is_none_or(|request| !request.is_over)
    }

    /// Has every task that can be probed been probed, whether or not it answered?
    pub fn has_survey(&self, view: &View<'_>, curves: &CurveChecks) -> bool {
        let can = can_measure_curves(view);
        let is_surveyed = |task: TaskId| curves.has_curve(view, task) || !can || !self.is_open(task);
        let has_run = |seen: &cachemate_core::TaskSample| seen.has_run();
        self.sharing.is_none()
            && view.movable_tasks().filter(|sample| has_run(sample)).all(|sample| is_surveyed(sample.task))
    }

    fn sharing_requests(
        &mut self,
        view: &View<'_>,
        speeds: &SpeedTracker,
        limits: &ProbeLimits,
        now_ns: u64,
    ) -> Option<ProbeRequest> {
        if !view.capabilities.can(Ability::SampleAccesses) {
            return None;
        }
        if let Some((probe, since_ns)) = self.sharing.take() {
            let is_answer_to_probe =
                |answer: &&cachemate_core::ProbeResult| answer.probe == probe.id && answer.complete;
            let refused = view.observation.applied.refused.iter().any(|no| no.item == PlanItem::Probe(probe.id));
            let complete = view.observation.probe_results.iter().any(|answer| is_answer_to_probe(&answer));
            if complete || refused || now_ns.saturating_sub(since_ns) > ANSWERED_WITHIN_NS {
                self.cluster(view, &probe);
                return None;
            }
            self.sharing = Some((probe.clone(), since_ns));
            return Some(probe);
        }
        let memory_stall_of = |seen: &cachemate_core::TaskSample| {
            let speed = speeds.observed_speed(seen.task, 64.0)?;
            Some(speed.remote_cycles_per_instr? / speed.cycles_per_instr)
        };
        let mut processes: Vec<ProcessId> = Vec::new();
        for seen in view.movable_tasks() {
            if memory_stall_of(seen).is_some_and(|share| share >= REMOTE_FROM) && !processes.contains(&seen.process) {
                processes.push(seen.process);
            }
        }
        let threads: Vec<TaskId> =
            view.live_tasks().filter(|sample| processes.contains(&sample.process)).map(|sample| sample.task).collect();
        if let Some((last, wait)) = &mut self.sampled_tasks {
            *wait = wait.saturating_sub(1);
            if *last == threads && *wait > 0 {
                return None;
            }
        }
        let paid = self.spent_share() <= limits.share || self.sampled_tasks.is_none();
        if threads.len() < 2 || !paid {
            return None;
        }
        let at_most = limits.samples_per_thread.saturating_mul(threads.len() as u32);
        let one_in = sampling_interval(view, &processes, limits.share);
        let probe_kind =
            ProbeKind::AccessSamples { processes, sample_period: one_in, remote_only: true, max_samples: at_most };
        let probe = self.probe(probe_kind, ANSWERED_WITHIN_NS / 2);
        self.sampled_tasks = Some((threads, SAMPLED_AGAIN_AFTER));
        self.sharing = Some((probe.clone(), now_ns));
        Some(probe)
    }

    /// Clusters threads that share data by their shMaps. The filters of different processes cannot be compared.
    fn cluster(&mut self, view: &View<'_>, probe: &ProbeRequest) {
        let ProbeKind::AccessSamples { processes, .. } = &probe.kind else { return };
        let threads: Vec<&cachemate_core::TaskSample> =
            view.live_tasks().filter(|sample| processes.contains(&sample.process)).collect();
        let sharing_map_of = |seen: &cachemate_core::TaskSample| {
            view.profiles.get(&seen.task).and_then(|known_profile| known_profile.sharing_map())
        };
        let mut filters: Vec<Option<ProcessId>> = Vec::new();
        let filter_of = |seen: &cachemate_core::TaskSample| {
            (!sharing_map_of(seen).is_some_and(|map| map.machine_wide)).then_some(seen.process)
        };
        for seen in &threads {
            if !filters.contains(&filter_of(seen)) {
                filters.push(filter_of(seen));
            }
        }
        let mut clusters = BTreeMap::new();
        let mut count = 0;
        for own_filter in filters {
            let members: Vec<_> = threads.iter().filter(|seen| filter_of(seen) == own_filter).collect();
            let maps: Vec<ThreadMap<'_>> = members
                .iter()
                .map(|seen| ThreadMap {
                    counters: sharing_map_of(seen).map_or(&[], |map| map.counters.as_slice()),
                    previous_cluster: self.clusters.get(&seen.task).copied(),
                })
                .collect();
            let sampled: u64 = maps.iter().flat_map(|map| map.counters).map(|&counter| u64::from(counter)).sum();
            let sample_ratio = sampled as f64 / maps.len().max(1) as f64 / THRESHOLD_SAMPLES_PER_THREAD;
            let filter = Filter::default();
            let co_clusters = find(
                ClusteringMethod::CoClusters,
                &maps,
                &filter,
                scaled_threshold(THRESHOLD, sample_ratio, filter.floor),
            );
            let mut cluster_of = join_unclustered(co_clusters.cluster_of, &maps);
            assign_partners(view, &members, &mut cluster_of);
            let numbers = cluster_of.iter().flatten().max().map_or(0, |last| last + 1);
            for (seen, cluster) in members.iter().zip(&cluster_of) {
                clusters.extend(cluster.map(|cluster| (seen.task, count + cluster)));
            }
            count += numbers;
        }
        if !clusters.is_empty() {
            self.clusters = clusters;
        }
    }
}

/// Can curves be measured on this machine?
fn can_measure_curves(view: &View<'_>) -> bool {
    view.capabilities.can(Ability::SampleReuses) || view.capabilities.can(Ability::TraceAddresses)
}

/// Returns the number of entries of a probe's log.
fn log_entries(probe: &ProbeRequest) -> Option<u32> {
    match probe.kind {
        ProbeKind::MissTrace { entries, .. } => Some(entries),
        _ => None,
    }
}

/// Is a curve far less certain at this size than where it is most certain?
fn is_uncertain_at(curve: &SizeCurve, bytes: f64) -> bool {
    let error_width = |(_, rate): &(u64, Estimate)| rate.high - rate.low;
    let narrowest = curve.iter().map(error_width).fold(f64::INFINITY, f64::min);
    let curve_point = curve.iter().find(|(size, _)| *size as f64 >= bytes).or(curve.last());
    curve_point.is_some_and(|point| error_width(point) > 2.0 * narrowest)
}

/// Do the probes in force leave all speeds unchanged? Watch points of an idle thread do, because they wait for it to
/// run.
pub fn probes_leave_speeds_unchanged(view: &View<'_>) -> bool {
    let is_running = |task: TaskId| {
        let least_ns = IDLE_BELOW * view.observation.span.elapsed_ns as f64;
        view.live_tasks().any(|sample| sample.task == task && sample.ran_ns() as f64 >= least_ns)
    };
    let disturbs_tasks = |probe: &ProbeRequest| match probe.kind {
        ProbeKind::ReuseTimes { task, .. } => is_running(task),
        _ => true,
    };
    !view.previous_plan.probes.iter().any(disturbs_tasks)
}

/// Returns the share of a task's cycles that wait for memory, as counted.
fn memory_stall_share(speeds: &SpeedTracker, task: TaskId) -> Option<f64> {
    let speed = speeds.observed_speed(task, 64.0)?;
    Some(speed.misses_per_instr? * speed.stall_cycles_per_miss? / speed.cycles_per_instr)
}

/// Smallest share of a thread's remote accesses at which the other thread is its partner.
const PARTNER: f64 = 0.1;

/// Adds threads without a cluster to the threads whose lines they fetch most.
fn assign_partners(view: &View<'_>, members: &[&&cachemate_core::TaskSample], partner_of: &mut [Option<usize>]) {
    let mut next = partner_of.iter().flatten().max().map_or(0, |last| last + 1);
    for index in 0..members.len() {
        let Some(profile) = view.profiles.get(&members[index].task).filter(|_| partner_of[index].is_none()) else {
            continue;
        };
        let shared_with =
            |partner: usize| profile.sharing.with.get(&members[partner].task).map_or(0.0, |fact| fact.value);
        let others =
            (0..members.len()).filter(|&partner| partner != index).map(|partner| (shared_with(partner), partner));
        let Some((largest_share, partner)) = others.reduce(|a, b| if b.0 > a.0 { b } else { a }) else { continue };
        if largest_share >= PARTNER {
            let cluster = partner_of[partner].unwrap_or(next);
            next = next.max(cluster + 1);
            (partner_of[index], partner_of[partner]) = (Some(cluster), Some(cluster));
        }
    }
}

/// Returns the sampling interval (in accesses per sample) at which samples cost no more than this share of the busiest
/// process's time.
fn sampling_interval(view: &View<'_>, processes: &[ProcessId], share: f64) -> u32 {
    let remote_hit_rate = |process: &ProcessId| {
        let (mut hits, mut run_time) = (0.0, 0.0);
        for sample in view.live_tasks().filter(|sample| sample.process == *process) {
            if let Some(count) = sample.counts.get(cachemate_core::CounterEvent::RemoteCacheHits) {
                hits += count;
                run_time += sample.on_cpu_ns.iter().map(|(_, ns)| *ns as f64).sum::<f64>();
            }
        }
        if run_time > 0.0 { hits / run_time } else { 0.0 }
    };
    let highest_rate = processes.iter().map(remote_hit_rate).fold(0.0, f64::max);
    libm::ceil(highest_rate * SAMPLE_COST_NS / share.max(1e-6)).clamp(1.0, 1e6) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let probe =
                |probe_kind: &ProbeKind| ProbeRequest { id: ProbeId(1), kind: probe_kind.clone(), budget_ns: 1 };
            plan.probes = probes.iter().map(probe).collect();
            probes_leave_speeds_unchanged(&View {
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
        let traced = ProbeKind::MissTrace { task: idle, entries: 1, includes_code: false };
        assert!(quiet(&[]) && quiet(&[watched(idle)]));
        assert!(!quiet(&[watched(busy)]) && !quiet(&[watched(idle), watched(busy)]) && !quiet(&[traced]));
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
        let (profiles, plan) =
            (cachemate_core::Profiles::new(), cachemate_core::Plan::idle(cachemate_core::WindowLength::Time { ns: 1 }));
        let mut planner = ProbePlanner::default();
        let probe_kind = ProbeKind::ReuseTimes { task: TaskId(2), locations: 1 };
        let probe = ProbeRequest { id: ProbeId(1), kind: probe_kind, budget_ns: 1 };
        planner
            .by_task
            .insert(TaskId(2), TaskProbe { phase: 0, probe, since_ns: 0, is_over: true, is_answered: false });
        let waited = |abilities: &[Ability]| {
            let capabilities = capabilities_fixture(abilities);
            let (topology, capabilities, observation, profiles) = (&topology, &capabilities, &observation, &profiles);
            let view = View {
                topology,
                capabilities,
                observation,
                profiles,
                previous_plan: &plan,
                predictor: &NullPredictor,
                verdicts: &(),
            };
            [0, 1, 2].map(|id| planner.has_open_probe(&view, TaskId(id)))
        };
        assert_eq!(waited(&[Ability::TraceAddresses]), [true, false, false]);
        assert_eq!(waited(&[Ability::Affinity]), [false; 3]);
    }

    /// Does a task whose phases end before they have paid for a longer log get one in a later phase of the kind, once
    /// for each kind?
    #[test]
    fn a_longer_log_may_come_in_a_later_phase_of_its_kind() {
        use cachemate_core::test_support::{
            NullPredictor, capabilities_fixture, last_level_caches, observation_fixture,
        };
        use cachemate_core::{CacheLevel, CpuId, Fact, FactSource, Plan, ProbeResult, Profiles, WindowLength};
        const SIZE: u64 = 1 << 20;
        let (topology, capabilities) =
            (last_level_caches(1, 1, CacheLevel::L3, SIZE), capabilities_fixture(&[Ability::TraceAddresses]));
        let limits = ProbeLimits {
            share: 0.01,
            min_gain: 0.01,
            locations: 1,
            trace_entries: 5_000,
            budget_ns: 1,
            samples_per_thread: 1,
        };
        let (mut planner, mut plan) = (ProbePlanner::default(), Plan::idle(WindowLength::Time { ns: 1 }));
        let mut logs: Vec<(u32, u32)> = Vec::new();
        for window in 0..40 {
            let phase = window as u32 / 3;
            let kind = phase % 2;
            let mut observation = observation_fixture(window, 1);
            observation.tasks[0].on_cpu_ns = vec![(CpuId(0), 1_000_000_000)];
            observation.probe_results = plan
                .probes
                .iter()
                .map(|probe| {
                    logs.push((kind, log_entries(probe).unwrap()));
                    let evidence = ProbeEvidence::Rows(Vec::new());
                    ProbeResult { probe: probe.id, evidence, complete: true, cost_ns: Vec::new() }
                })
                .collect();
            let mut profile = Profile { phase_number: phase, ..Profile::default() };
            profile.phase.kind = Some(Fact::new(kind, FactSource::PhaseDetector, 0));
            if logs.iter().any(|(logged, _)| *logged == kind) {
                let unsure = Estimate { value: 5.0, low: 0.0, high: 10.0 };
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
            let sites = crate::policies::auto::model::problem::cache_sites(&view);
            let evidence = (&SpeedTracker::default(), &CurveChecks::default());
            plan.probes = planner.next(&view, &sites, evidence, &limits, false);
        }
        logs.sort_unstable();
        assert_eq!(logs, [(0, 5_000), (0, 20_000), (1, 5_000), (1, 20_000)]);
    }

    /// Does a thread with few samples join threads that use the same regions, and does a thread with other regions not
    /// join?
    #[test]
    fn threads_with_few_samples_join_their_partners() {
        let maps = [[9u8, 8, 0, 0], [8, 9, 0, 0], [1, 1, 0, 0], [0, 0, 7, 7]];
        let maps: Vec<ThreadMap<'_>> =
            maps.iter().map(|map| ThreadMap { counters: map.as_slice(), previous_cluster: None }).collect();
        assert_eq!(join_unclustered(vec![Some(0), Some(0), None, None], &maps), [Some(0), Some(0), Some(0), None]);
        assert_eq!(join_unclustered(vec![None; 4], &maps), [Some(0), Some(0), Some(0), None]);
        assert_eq!(
            join_unclustered(vec![Some(0), Some(1), Some(1), None], &maps),
            [Some(0), Some(0), Some(0), None],
            "one"
        );
    }
}
