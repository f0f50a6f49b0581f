//! Builds snapshots from iterations of the loop.

use std::collections::BTreeMap;

use cachemate_core::{
    ActiveShare, Cache, Capabilities, CounterEvent, CounterScope, Estimate, Plan, ProbeEvidence,
    Profile, Profiles, PromiseReport, ReasonKind, RunHeader, TaskId, TaskSample, Topology, Units,
    WindowRecord,
};
use cachemate_papers::work_metric::metrics_of;
use cachemate_report::level_name;
use cachemate_report::text::escape_controls;

use crate::matrix::{Matrices, round_short};
use crate::snapshot::{
    CacheHeader, CacheSnapshot, CurveSnapshot, DaemonSnapshot, DecisionSnapshot, GangSnapshot,
    JournalLine, PageHeader, ProbeSnapshot, ProgramSnapshot, PromiseSnapshot, SHAPE,
    ServiceLossSnapshot, ServiceSnapshot, ShareSnapshot, Snapshot, WaitingCauseSnapshot,
};
use crate::window_view::{RenderedReason, TaskNames, TaskView, WindowTracker, member_tasks};
use cachemate_auto::service_losses::{ServiceLoss, ServiceReport, WaitingCause};

/// Maximum number of points of a curve that are shown.
const MAX_POINTS: usize = 32;
/// Maximum number of services that are shown; those with the largest loss come first.
const MAX_SERVICES: usize = 32;
/// Maximum number of causes that are shown for each service's loss.
const MAX_LOSSES: usize = 8;

/// State that a live daemon adds to a snapshot; recordings do not contain it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DaemonState {
    /// The kernel's process ids, by task.
    pub pids: BTreeMap<TaskId, i32>,
    /// Entries of the restore journal.
    pub journal: Vec<JournalLine>,
    /// The daemon's own state.
    pub daemon: DaemonSnapshot,
}

/// Turns the records of a run into snapshots, in order.
pub struct SnapshotBuilder {
    header: RunHeader,
    tracker: WindowTracker,
    matrices: Matrices,
    start_ns: Option<u64>,
    last_plan: Option<Plan>,
    curves: BTreeMap<u32, CurveSnapshot>,
}

/// The threads of one process in a window.
struct ProgramThreads<'v, 'r> {
    id: u32,
    threads: Vec<&'v TaskView<'r>>,
}

impl<'r> ProgramThreads<'_, 'r> {
    /// Returns the metric of the thread that ran most, among threads that have the metric.
    fn busiest_metric<T>(&self, metric: impl Fn(&TaskView<'r>) -> Option<T>) -> Option<T> {
        let mut threads = self.threads.clone();
        threads.sort_by_key(|task| std::cmp::Reverse(task.sample.ran_ns()));
        threads.into_iter().find_map(metric)
    }

    /// Returns the sum of the metric over the threads that have it; `None` if no thread does.
    fn sum(&self, metric: impl Fn(&TaskView<'r>) -> Option<f64>) -> Option<f64> {
        self.threads
            .iter()
            .filter_map(|task| metric(task))
            .reduce(|sum, value| sum + value)
    }

    /// Returns the profile of the thread that ran most, among threads whose profile has a miss curve.
    fn profile_with_curve(&self) -> Option<&'r Profile> {
        self.busiest_metric(|task| {
            task.profile
                .filter(|profile| profile.misses_per_kilo_instr().is_some())
        })
    }

    /// Returns the mean of the metric over threads, weighted by CPU time.
    fn mean(&self, metric: impl Fn(&TaskView<'r>) -> Option<f64>) -> Option<f64> {
        let weight = |task: &TaskView<'_>| task.sample.ran_ns().max(1) as f64;
        let total = self.sum(|task| metric(task).map(|_| weight(task)))?;
        Some(self.sum(|task| metric(task).map(|value| value * weight(task)))? / total)
    }
}

fn promise_snapshots(
    record: &WindowRecord,
    promises: &[PromiseReport],
    first: &TaskSample,
) -> Vec<PromiseSnapshot> {
    let tasks = &record.observation.tasks;
    let name_of = |task: TaskId| {
        let sample = tasks.iter().find(|other| other.task == task);
        sample.map_or_else(|| "?".to_string(), |task| escape_controls(&task.name))
    };
    let process_reports = promises
        .iter()
        .filter(|report| report.process == first.process);
    process_reports
        .map(|report| PromiseSnapshot {
            state: report.state.describe(),
            text: report.describe(name_of),
        })
        .collect()
}

impl SnapshotBuilder {
    /// Creates a builder at the start of a run.
    pub fn new(header: &RunHeader) -> Self {
        SnapshotBuilder {
            header: header.clone(),
            tracker: WindowTracker::new(header.pipeline.predictor.clone()),
            matrices: Matrices::default(),
            start_ns: None,
            last_plan: None,
            curves: BTreeMap::new(),
        }
    }

    /// Returns the constant properties of the run.
    pub fn page_header(&self, source: &str) -> PageHeader {
        let RunHeader {
            topology,
            capabilities,
            pipeline,
            ..
        } = &self.header;
        PageHeader {
            shape: SHAPE,
            version: env!("CARGO_PKG_VERSION").to_string(),
            source: escape_controls(source),
            run: String::new(),
            policy: pipeline.policy.name.clone(),
            parameters: pipeline.policy.parameters.trim().to_string(),
            guarded: pipeline.guard.is_some(),
            cpus: topology.online().count(),
            caches: topology
                .last_level_caches()
                .map(|cache| cache_header(cache, capabilities))
                .collect(),
            truth: None,
            cut_off: None,
        }
    }

    /// Builds the snapshot of one iteration of the loop, with the profiles that the policy received in it.
    pub fn build_snapshot(
        &mut self,
        record: &WindowRecord,
        profiles: &Profiles,
        daemon_state: Option<DaemonState>,
    ) -> Snapshot {
        let observation = &record.observation;
        let start_ns = *self.start_ns.get_or_insert(observation.span.start_ns);
        let end_ns = observation
            .span
            .start_ns
            .saturating_add(observation.span.elapsed_ns);
        let view = self.tracker.observe(
            record,
            &self.header.topology,
            profiles,
            &task_names(record, daemon_state.as_ref()),
        );
        let mut programs: Vec<ProgramThreads<'_, '_>> = Vec::new();
        for task in &view.tasks {
            match programs
                .iter_mut()
                .find(|program| program.id == task.sample.process.0)
            {
                Some(program) => program.threads.push(task),
                None => programs.push(ProgramThreads {
                    id: task.sample.process.0,
                    threads: vec![task],
                }),
            }
        }
        let program_snapshots: Vec<ProgramSnapshot> = programs
            .iter()
            .map(|program| {
                self.program_snapshot(program, record, &view.promises, daemon_state.as_ref())
            })
            .collect();
        let busiest_profiles: BTreeMap<u32, &Profile> = programs
            .iter()
            .filter_map(|program| Some((program.id, program.profile_with_curve()?)))
            .collect();
        let window_s = observation.span.elapsed_ns as f64 / 1e9;
        let matrix = self.matrices.observe(
            observation.window,
            window_s,
            &program_snapshots,
            &busiest_profiles,
            &self.header.topology,
            &self.header.pipeline.predictor,
        );
        let decision_snapshot = |rendered: &RenderedReason<'_>| DecisionSnapshot {
            kind: kind_text(rendered.reason.kind),
            programs: processes_of(record, &rendered.reason.tasks),
            text: rendered.text.clone(),
            numbers: rendered
                .reason
                .numbers
                .iter()
                .map(|(name, value)| (name.clone(), round_short(*value)))
                .collect(),
        };
        let (journal, daemon) = daemon_state
            .map(|daemon_state| (daemon_state.journal, daemon_state.daemon))
            .unzip();
        Snapshot {
            window: observation.window,
            at_s: end_ns.saturating_sub(start_ns) as f64 / 1e9,
            duration_s: window_s,
            caches: cache_snapshots(&self.header.topology, record),
            decisions: view
                .reasons
                .iter()
                .filter(|rendered| rendered.is_new)
                .map(decision_snapshot)
                .collect(),
            plan_changed: self.check_plan_change(&record.decision.plan),
            gangs: record
                .applied
                .gangs
                .iter()
                .map(|schedule| gang_snapshot(schedule, record))
                .collect(),
            shares: record
                .applied
                .shares
                .iter()
                .map(|active_share| self.share_snapshot(active_share, record))
                .collect(),
            probes: probe_snapshots(record),
            changes_s: Some(record.applied.cost_ns as f64 / 1e9).filter(|cost| *cost > 0.0),
            curves: self.take_new_curves(&busiest_profiles, &program_snapshots),
            services: view
                .services
                .iter()
                .take(MAX_SERVICES)
                .map(service_snapshot)
                .collect(),
            refused: view.refused,
            overridden: view.overridden,
            pending: view.pending,
            journal,
            daemon,
            matrix,
            programs: program_snapshots,
        }
    }

    fn program_snapshot(
        &self,
        program: &ProgramThreads<'_, '_>,
        record: &WindowRecord,
        promises: &[PromiseReport],
        daemon_state: Option<&DaemonState>,
    ) -> ProgramSnapshot {
        let first_sample = program.threads[0].sample;
        let mut threads_by_cache: BTreeMap<u32, u32> = BTreeMap::new();
        let topology = &self.header.topology;
        for cache in program
            .threads
            .iter()
            .filter_map(|task| busiest_cache(task.sample, topology))
        {
            *threads_by_cache.entry(cache.id.0).or_default() += 1;
        }
        let work_metric = program.busiest_metric(|task| task.work_per_second.map(|(work, _)| work));
        let elapsed_ns = record.observation.span.elapsed_ns;
        let work_of = |task: &TaskView<'_>| {
            metrics_of(task.sample, elapsed_ns).find(|(work, _)| Some(*work) == work_metric)
        };
        let work_count = program
            .sum(|task| work_of(task).map(|(_, count)| count))
            .filter(|_| elapsed_ns > 0);
        let instructions = program.sum(|task| {
            task.misses_and_instructions
                .map(|(_, instructions)| instructions)
        });
        let misses = program.sum(|task| task.misses_and_instructions.map(|(misses, _)| misses));
        let contention_of =
            |task: &TaskView<'_>| task.profile.map(|profile| profile.contention.clone());
        ProgramSnapshot {
            program: program.id,
            name: escape_controls(&first_sample.name),
            service: escape_controls(&first_sample.service_or_command().to_string()),
            pid: daemon_state
                .and_then(|daemon_state| daemon_state.pids.get(&first_sample.task))
                .copied(),
            threads: program.threads.len() as u32,
            observed_only: program.threads.iter().all(|task| task.sample.unmovable),
            places: threads_by_cache.into_iter().collect(),
            cpu_share: program.sum(|task| task.cpu_share).map(round_short),
            speed_per_s: work_count.map(|count| round_short(count * 1e9 / elapsed_ns as f64)),
            speed_unit: work_metric.map(|unit| unit.describe()),
            instr_per_cycle: program.mean(|task| task.instr_per_cycle).map(round_short),
            mpki: misses
                .zip(instructions)
                .map(|(misses, instructions)| round_short(1000.0 * misses / instructions)),
            slowdown: program.mean(|task| task.slowdown).map(round_short),
            forecast_slowdown: program
                .busiest_metric(|task| task.forecast_slowdown)
                .map(rounded_estimate),
            intensity: program
                .busiest_metric(|task| contention_of(task)?.intensity)
                .map(|fact| round_short(fact.value)),
            sensitivity: program
                .busiest_metric(|task| contention_of(task)?.sensitivity)
                .map(|fact| round_short(fact.value)),
            allowed: program.busiest_metric(|task| task.allowed.map(ToString::to_string)),
            max_slowdown: first_sample.goal.and_then(|goal| goal.max_slowdown),
            min_rate: first_sample
                .goal
                .and_then(|goal| goal.min_rate)
                .map(round_short),
            promises: promise_snapshots(record, promises, first_sample),
        }
    }

    fn check_plan_change(&mut self, plan: &Plan) -> bool {
        let is_same = |previous_plan: &Plan| {
            (
                &previous_plan.affinity,
                &previous_plan.gangs,
                &previous_plan.shares,
                &previous_plan.weights,
            ) == (&plan.affinity, &plan.gangs, &plan.shares, &plan.weights)
        };
        let has_changed = self
            .last_plan
            .as_ref()
            .is_some_and(|previous_plan| !is_same(previous_plan));
        self.last_plan = Some(plan.clone());
        has_changed
    }

    fn share_snapshot(&self, active_share: &ActiveShare, record: &WindowRecord) -> ShareSnapshot {
        let share = &active_share.share;
        let (unit, indices, unit_count) = match &share.units {
            Units::Ways { mask } => (
                "ways",
                mask,
                self.header.topology.cache(share.cache).and_then(|c| c.ways),
            ),
            Units::Colors { allowed, .. } => (
                "colors",
                allowed,
                self.header.capabilities.colors_of(share.cache),
            ),
        };
        let members: Vec<TaskId> = member_tasks(share, &record.observation.tasks).collect();
        ShareSnapshot {
            group: share.group.0,
            cache: share.cache.0,
            unit,
            indices: indices.to_string(),
            unit_count,
            programs: processes_of(record, &members),
            occupancy_bytes: active_share.occupancy_bytes,
            allowed_page_share: active_share.pages_in_share.map(round_short),
        }
    }

    /// Returns the curves that changed since they were last sent.
    fn take_new_curves(
        &mut self,
        busiest_profiles: &BTreeMap<u32, &Profile>,
        programs: &[ProgramSnapshot],
    ) -> Vec<CurveSnapshot> {
        self.curves.retain(|program, _| {
            programs
                .iter()
                .any(|live_program| live_program.program == *program)
        });
        let mut new_curves = Vec::new();
        for (&program, profile) in busiest_profiles {
            let Some((level, fact)) = profile.locality.misses_per_kilo_instr.iter().next_back()
            else {
                continue;
            };
            let step = fact.value.len().div_ceil(MAX_POINTS).max(1);
            let last_index = fact.value.len().saturating_sub(1);
            let points = fact
                .value
                .iter()
                .enumerate()
                .filter(|(index, _)| index % step == 0 || *index == last_index);
            let point = |&(bytes, misses): &(u64, cachemate_core::Estimate)| {
                (
                    bytes,
                    round_short(misses.value),
                    round_short(misses.low),
                    round_short(misses.high),
                )
            };
            let curve = CurveSnapshot {
                program,
                level: level_name(*level).to_string(),
                source: source_text(fact.source),
                points: points.map(|(_, p)| point(p)).collect(),
            };
            if self.curves.get(&program) != Some(&curve) {
                self.curves.insert(program, curve.clone());
                new_curves.push(curve);
            }
        }
        new_curves
    }
}

fn waiting_snapshot(cause: &WaitingCause) -> WaitingCauseSnapshot {
    let service = cause.cause.as_ref();
    WaitingCauseSnapshot {
        service: service.map(|service| escape_controls(&service.name)),
        loss: round_short(cause.loss),
        share: round_short(cause.share),
    }
}

fn service_snapshot(report: &ServiceReport) -> ServiceSnapshot {
    let loss_snapshot = |loss: &ServiceLoss| ServiceLossSnapshot {
        service: escape_controls(&loss.cause.name),
        loss: rounded_estimate(loss.loss),
        source: loss.source.describe(),
        forecast: loss.forecast.map(round_short),
    };
    ServiceSnapshot {
        kind: report.service.kind.text(),
        name: escape_controls(&report.service.name),
        tasks: report.tasks.len() as u32,
        cpu_share: round_short(report.cpu_share),
        run_time: report.slowdown.run_time().map(rounded_estimate),
        cache: report
            .slowdown
            .cache
            .map(|(loss, _)| rounded_estimate(loss)),
        cache_source: report.slowdown.cache.map(|(_, source)| source.describe()),
        cache_by: report
            .losses
            .iter()
            .take(MAX_LOSSES)
            .map(loss_snapshot)
            .collect(),
        waiting: report.slowdown.waiting.map(rounded_estimate),
        waiting_by: report
            .waiting_causes
            .iter()
            .take(MAX_LOSSES)
            .map(waiting_snapshot)
            .collect(),
        prevented: report
            .prevented_losses
            .iter()
            .take(MAX_LOSSES)
            .map(loss_snapshot)
            .collect(),
        reason: report.reason.clone(),
    }
}

fn rounded_estimate(estimate: Estimate) -> Estimate {
    Estimate {
        value: round_short(estimate.value),
        low: round_short(estimate.low),
        high: round_short(estimate.high),
    }
}

fn cache_header(cache: &Cache, capabilities: &Capabilities) -> CacheHeader {
    CacheHeader {
        cache: cache.id.0,
        level: level_name(cache.level).to_string(),
        cpus: cache.cpus.to_string(),
        size_bytes: cache.size_bytes,
        ways: cache.ways,
        colors: capabilities.colors_of(cache.id),
    }
}

/// Returns the names of tasks: `gzip`, or `gzip(1234)` if the kernel's process id is known.
fn task_names(record: &WindowRecord, daemon_state: Option<&DaemonState>) -> TaskNames {
    let name_of = |task: &TaskSample| match daemon_state
        .and_then(|daemon_state| daemon_state.pids.get(&task.task))
    {
        Some(pid) => format!("{}({pid})", escape_controls(&task.name)),
        None => format!("{} #{}", escape_controls(&task.name), task.process.0),
    };
    record
        .observation
        .tasks
        .iter()
        .map(|task| (task.task, name_of(task)))
        .collect()
}

/// Returns the processes of the tasks, each listed once.
fn processes_of(record: &WindowRecord, tasks: &[TaskId]) -> Vec<u32> {
    let mut programs: Vec<u32> = Vec::new();
    for task in tasks {
        let process = record
            .observation
            .tasks
            .iter()
            .find(|sample| sample.task == *task)
            .map(|sample| sample.process.0);
        programs.extend(process.filter(|process| !programs.contains(process)));
    }
    programs
}

/// Returns the contended cache on whose CPUs a task ran longest.
fn busiest_cache<'t>(task: &TaskSample, topology: &'t Topology) -> Option<&'t Cache> {
    let longest_cpu = task
        .on_cpu_ns
        .iter()
        .filter(|(_, ns)| *ns > 0)
        .max_by_key(|(_, ns)| *ns)
        .map(|(cpu, _)| *cpu);
    topology.last_level_cache_of(longest_cpu.or(task.cpu)?)
}

fn cache_snapshots(topology: &Topology, record: &WindowRecord) -> Vec<CacheSnapshot> {
    let miss_ratio_of = |cache: &Cache| {
        let (_, counts) = record
            .observation
            .shared_counts
            .iter()
            .find(|(scope, _)| *scope == CounterScope::Cache(cache.id))?;
        let references = counts
            .get(CounterEvent::References(cache.level))
            .filter(|count| *count > 0.0)?;
        Some(round_short(
            counts.get(CounterEvent::Misses(cache.level))? / references,
        ))
    };
    let cache_snapshot = |cache: &Cache| CacheSnapshot {
        cache: cache.id.0,
        miss_ratio: miss_ratio_of(cache),
        forecast_miss_ratio: record
            .forecast
            .cache_miss_ratio
            .get(&cache.id)
            .map(|ratio| round_short(ratio.value)),
    };
    let snapshots = topology.last_level_caches().map(cache_snapshot);
    snapshots
        .filter(|cache| cache.miss_ratio.is_some() || cache.forecast_miss_ratio.is_some())
        .collect()
}

fn gang_snapshot(schedule: &cachemate_core::GangSchedule, record: &WindowRecord) -> GangSnapshot {
    let gang_programs = |gang: &cachemate_core::Gang| {
        let tasks: Vec<TaskId> = gang.members.iter().map(|(task, _)| *task).collect();
        processes_of(record, &tasks)
    };
    GangSnapshot {
        cpus: schedule.cpus.to_string(),
        slice_s: schedule.slice_ns as f64 / 1e9,
        turns: schedule.gangs.iter().map(gang_programs).collect(),
    }
}

fn probe_snapshots(record: &WindowRecord) -> Vec<ProbeSnapshot> {
    let probe_snapshot = |probe_result: &cachemate_core::ProbeResult| {
        let (kind, task) = match &probe_result.evidence {
            ProbeEvidence::Rows(_) => ("programs run together", None),
            ProbeEvidence::Trace { task, .. } => ("trace of misses", Some(*task)),
            ProbeEvidence::Samples { .. } => ("sampled accesses", None),
            ProbeEvidence::Reuses { task, .. } => ("watched words", Some(*task)),
            ProbeEvidence::Activity { task, .. } => ("super-set counters", Some(*task)),
            ProbeEvidence::NeighborSlowdown { task, .. } => ("beside a neighbor", Some(*task)),
            ProbeEvidence::PingPong { .. } => ("ping-pong", None),
            ProbeEvidence::PrimeProbe { task, .. } => ("evicted lines", Some(*task)),
            ProbeEvidence::StoredProfile { task, .. } => ("recorded profile", Some(*task)),
        };
        let cost_ns: u64 = probe_result.cost_ns.iter().map(|(_, ns)| ns).sum();
        let program = task.and_then(|task| processes_of(record, &[task]).first().copied());
        ProbeSnapshot {
            kind,
            cost_s: round_short(cost_ns as f64 / 1e9),
            program,
        }
    };
    record
        .observation
        .probe_results
        .iter()
        .map(probe_snapshot)
        .collect()
}

fn kind_text(kind: ReasonKind) -> &'static str {
    match kind {
        ReasonKind::Explanation => "plain",
        ReasonKind::RolledBack => "rolled-back",
        ReasonKind::CoolingDown => "cooling-down",
        ReasonKind::TrialVerdict => "trial-verdict",
        ReasonKind::ClusterFound => "cluster-found",
        ReasonKind::InfeasibleGoal => "infeasible-goal",
    }
}

/// Returns the name of a fact's source, as files spell it.
fn source_text(source: cachemate_core::FactSource) -> String {
    let value = serde_json::to_value(source).ok();
    value
        .and_then(|value| value.as_str().map(str::to_string))
        .unwrap_or_default()
}
