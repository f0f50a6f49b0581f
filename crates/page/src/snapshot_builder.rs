//! Builds the snapshot of each iteration of the loop.

use std::collections::BTreeMap;
use std::sync::Arc;

use cachemate_core::{
    ActiveShare, BandwidthLimit, Cache, Capabilities, ContentionFacts, CounterEvent, CounterScope,
    Estimate, Gang, GangSchedule, HostReport, HostThread, Observation, PendingItem, Plan, PlanItem,
    ProbeEvidence, ProbeResult, Profiles, PromiseReport, PromiseTerm, RunHeader, StallCause,
    TaskId, TaskSample, Topology, Units, WindowRecord,
};
use cachemate_papers::work_metric::metrics_of;
use cachemate_report::level_name;
use cachemate_report::text::escape_controls;

use crate::matrix::round_short;
use crate::snapshot::{
    BandwidthSnapshot, CacheHeader, CacheSnapshot, ContentionClass, DecisionSnapshot, GangSnapshot,
    PageHeader, PendingSnapshot, ProbeSnapshot, ProgramSnapshot, PromiseSnapshot, SHAPE,
    ServiceSnapshot, ShareSnapshot, Snapshot, TaskSnapshot,
};
use crate::window_view::{
    RenderedReason, TaskNames, TaskView, WindowTracker, describe_thread, member_tasks, pending_text,
};

/// Minimum intensity of an aggressor, and minimum sensitivity of a victim (docs/monitoring.md).
const MIN_AGGRESSOR_INTENSITY: f64 = 0.15;
const MIN_VICTIM_SENSITIVITY: f64 = 0.10;

/// Turns the records of a run into snapshots, in order.
pub struct SnapshotBuilder {
    header: Arc<RunHeader>,
    tracker: WindowTracker,
    start_ns: Option<u64>,
    last_plan: Option<Plan>,
    reasons_by_task: BTreeMap<TaskId, Vec<String>>,
    /// Bytes per second that a program fills if a probe finds all of its lines evicted.
    full_probe_rate: Option<f64>,
}

/// The threads of one process in a window.
struct ProgramThreads<'v, 'r> {
    id: u32,
    threads: Vec<&'v TaskView<'r>>,
}

impl<'v, 'r> ProgramThreads<'v, 'r> {
    /// Groups the threads of a window by process, in order of arrival.
    fn group(tasks: &'v [TaskView<'r>]) -> Vec<Self> {
        let mut programs: Vec<Self> = Vec::new();
        for task in tasks {
            let id = task.sample.process.0;
            match programs.iter_mut().find(|program| program.id == id) {
                Some(program) => program.threads.push(task),
                None => programs.push(ProgramThreads {
                    id,
                    threads: vec![task],
                }),
            }
        }
        programs
    }

    /// The metric of the thread that ran most, among threads that have the metric.
    fn busiest_metric<T>(&self, metric: impl Fn(&TaskView<'r>) -> Option<T>) -> Option<T> {
        let mut threads = self.threads.clone();
        threads.sort_by_key(|task| std::cmp::Reverse(task.sample.ran_ns()));
        threads.into_iter().find_map(metric)
    }

    /// The sum of the metric over the threads that have it; `None` if no thread does.
    fn sum(&self, metric: impl Fn(&TaskView<'r>) -> Option<f64>) -> Option<f64> {
        self.threads
            .iter()
            .filter_map(|task| metric(task))
            .reduce(|sum, value| sum + value)
    }

    /// The thread that ran most, among threads whose profile has a miss curve.
    fn profiled_task(&self) -> Option<TaskId> {
        self.busiest_metric(|task| {
            task.profile?.misses_per_kilo_instr()?;
            Some(task.sample.task)
        })
    }

    /// The mean of the metric over threads, weighted by CPU time.
    fn mean(&self, metric: impl Fn(&TaskView<'r>) -> Option<f64>) -> Option<f64> {
        let weight = |task: &TaskView<'_>| task.sample.ran_ns().max(1) as f64;
        let total = self.sum(|task| metric(task).map(|_| weight(task)))?;
        Some(self.sum(|task| metric(task).map(|value| value * weight(task)))? / total)
    }
}

/// What the snapshot of one window is built from.
struct WindowSources<'r> {
    record: &'r WindowRecord,
    host: Option<&'r HostReport>,
    threads: BTreeMap<TaskId, &'r HostThread>,
}

impl<'r> WindowSources<'r> {
    fn new(record: &'r WindowRecord, host: Option<&'r HostReport>) -> Self {
        let threads = host.map_or(&[][..], |host| &host.threads);
        WindowSources {
            record,
            host,
            threads: threads.iter().map(|thread| (thread.task, thread)).collect(),
        }
    }

    fn pid_of(&self, task: TaskId) -> Option<i32> {
        self.threads.get(&task).map(|thread| thread.pid)
    }

    /// The names of tasks in sentences: `gzip(1234)` with the kernel's id, or `gzip #3` in a recording.
    fn task_names(&self) -> TaskNames {
        let tasks = self.record.observation.tasks.iter();
        let mut names: TaskNames = tasks
            .map(|task| {
                let name = match self.host {
                    Some(_) => escape_controls(&task.name),
                    None => format!("{} #{}", escape_controls(&task.name), task.process.0),
                };
                (task.task, name)
            })
            .collect();
        for thread in self.threads.values() {
            names.insert(thread.task, describe_thread(&thread.name, thread.tid));
        }
        names
    }

    /// The processes of the tasks, each listed once.
    fn processes_of(&self, tasks: &[TaskId]) -> Vec<u32> {
        let mut programs: Vec<u32> = Vec::new();
        for task in tasks {
            let mut samples = self.record.observation.tasks.iter();
            let process = samples
                .find(|sample| sample.task == *task)
                .map(|sample| sample.process.0);
            programs.extend(process.filter(|process| !programs.contains(process)));
        }
        programs
    }
}

impl SnapshotBuilder {
    /// Knows no task and no decision yet.
    pub fn new(header: &RunHeader) -> Self {
        SnapshotBuilder {
            header: Arc::new(header.clone()),
            tracker: WindowTracker::new(header.pipeline.predictor.clone()),
            start_ns: None,
            last_plan: None,
            reasons_by_task: BTreeMap::new(),
            full_probe_rate: None,
        }
    }

    /// Builds the snapshot of one iteration of the loop, with the profiles that the policy received in it and, on a
    /// live host, the machine's report.
    pub fn build_snapshot(
        &mut self,
        record: &WindowRecord,
        profiles: &Profiles,
        host: Option<&HostReport>,
    ) -> Snapshot {
        let sources = WindowSources::new(record, host);
        let names = sources.task_names();
        let observation = &record.observation;
        let span = observation.span;
        let start_ns = *self.start_ns.get_or_insert(span.start_ns);
        let end_ns = span.start_ns.saturating_add(span.elapsed_ns);
        self.observe_probes(&observation.probe_results);
        let header = Arc::clone(&self.header);
        let topology = &header.topology;
        let view = self.tracker.observe(record, topology, profiles, &names);
        self.record_reasons(&view.reasons);

        let tasks = self.task_snapshots(&view.tasks, &sources);
        let programs = ProgramThreads::group(&view.tasks);
        let mut refused = view.refused;
        refused.truncate(Snapshot::MAX_REFUSED);
        let mut overridden = view.overridden;
        overridden.extend(
            host.into_iter()
                .flat_map(|host| &host.overridden_groups)
                .map(|sentence| escape_controls(sentence)),
        );
        Snapshot {
            window: observation.window,
            at_s: end_ns.saturating_sub(start_ns) as f64 / 1e9,
            duration_s: span.elapsed_ns as f64 / 1e9,
            caches: cache_snapshots(topology, &sources, &tasks),
            services: view
                .services
                .iter()
                .map(|report| service_snapshot(ServiceSnapshot::new(report), host))
                .collect(),
            programs: programs
                .iter()
                .map(|program| self.program_snapshot(program, &sources))
                .collect(),
            promises: view
                .promises
                .iter()
                .filter_map(|report| promise_snapshot(report, &sources, &names))
                .collect(),
            new_decisions: view
                .reasons
                .iter()
                .filter(|rendered| rendered.is_new)
                .map(|rendered| decision_snapshot(rendered, &sources))
                .collect(),
            plan_changed: self.check_plan_change(&record.decision.plan),
            gangs: record
                .applied
                .gangs
                .iter()
                .map(|schedule| gang_snapshot(schedule, &sources))
                .collect(),
            shares: record
                .applied
                .shares
                .iter()
                .map(|active_share| self.share_snapshot(active_share, &sources))
                .collect(),
            bandwidth_limits: record
                .applied
                .bandwidth
                .iter()
                .map(|limit| self.bandwidth_snapshot(limit, &sources))
                .collect(),
            cpusets: host.map_or_else(Vec::new, |host| host.confined_groups.clone()),
            pending: record
                .applied
                .pending
                .iter()
                .map(|pending| pending_snapshot(pending, &names))
                .collect(),
            refused,
            overridden,
            probes: probe_snapshots(&sources),
            changes_s: Some(record.applied.cost_ns as f64 / 1e9).filter(|cost| *cost > 0.0),
            journal: host.map(|host| host.originals.clone()),
            tasks,
            daemon: None,
            curves: Vec::new(),
            matrix: None,
        }
    }

    fn observe_probes(&mut self, results: &[ProbeResult]) {
        for result in results {
            if let ProbeEvidence::PrimeProbe {
                buffer_bytes,
                wait_ns,
                ..
            } = result.evidence
                && wait_ns > 0
            {
                self.full_probe_rate = Some(buffer_bytes as f64 * 1e9 / wait_ns as f64);
            }
        }
    }

    /// Remembers the reasons by the tasks that they name, until others are given.
    fn record_reasons(&mut self, reasons: &[RenderedReason<'_>]) {
        if !reasons.is_empty() {
            self.reasons_by_task.clear();
        }
        for rendered in reasons {
            for task in &rendered.reason.tasks {
                let texts = self.reasons_by_task.entry(*task).or_default();
                texts.push(rendered.text.clone());
            }
        }
    }

    /// The threads that have the kernel's ids.
    fn task_snapshots(
        &mut self,
        tasks: &[TaskView<'_>],
        sources: &WindowSources<'_>,
    ) -> Vec<TaskSnapshot> {
        let threads = &sources.threads;
        self.reasons_by_task
            .retain(|task, _| threads.contains_key(task));
        tasks
            .iter()
            .filter_map(|task| {
                let thread = threads.get(&task.sample.task)?;
                Some(self.task_snapshot(task, thread, sources.record))
            })
            .collect()
    }

    fn task_snapshot(
        &self,
        task: &TaskView<'_>,
        thread: &HostThread,
        record: &WindowRecord,
    ) -> TaskSnapshot {
        let TaskView {
            sample, profile, ..
        } = task;
        let contention = profile
            .map(|profile| profile.contention.clone())
            .unwrap_or_default();
        let cpu = sample.cpu.or(thread.last_cpu);
        let cache = cpu.and_then(|cpu| self.header.topology.last_level_cache_of(cpu));
        let elapsed_ns = record.observation.span.elapsed_ns;
        let fill_bytes_per_second = cache
            .and_then(|cache| self.fill_bytes_per_second(sample, cache, elapsed_ns, &contention));
        let work = task.work_per_second;
        let goal = sample.goal;

        TaskSnapshot {
            task: sample.task.0,
            pid: thread.pid,
            tid: thread.tid,
            name: sample.name.clone(),
            service: sample.service_or_command().to_string(),
            observed_only: sample.unmovable,
            cpu: cpu.map(|cpu| cpu.0),
            cache: cache.map(|cache| cache.id.0),
            allowed: task.allowed.map(ToString::to_string),
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
            progress_per_second: work.map(|(_, rate)| rate),
            progress_unit: work.map(|(work, _)| work.describe().to_string()),
            max_slowdown: goal.and_then(|goal| goal.max_slowdown),
            min_rate: goal.and_then(|goal| goal.min_rate),
            known: profile.map_or_else(Vec::new, |profile| {
                profile.origins(record.observation.window)
            }),
            reasons: self
                .reasons_by_task
                .get(&sample.task)
                .cloned()
                .unwrap_or_default(),
        }
    }

    /// Bytes per second that a thread fills into the last level: its counted misses or, without counters, the lines
    /// that it evicts while a probe waits.
    fn fill_bytes_per_second(
        &self,
        sample: &TaskSample,
        cache: &Cache,
        elapsed_ns: u64,
        contention: &ContentionFacts,
    ) -> Option<f64> {
        if elapsed_ns == 0 {
            return None;
        }
        if let Some(misses) = sample.counts.get(CounterEvent::Misses(cache.level)) {
            return Some(misses * f64::from(cache.line_bytes?) * 1e9 / elapsed_ns as f64);
        }
        let evicted_share = contention.intensity.as_ref()?.value.clamp(0.0, 1.0);
        Some(evicted_share * self.full_probe_rate? * sample.ran_ns() as f64 / elapsed_ns as f64)
    }

    fn program_snapshot(
        &self,
        program: &ProgramThreads<'_, '_>,
        sources: &WindowSources<'_>,
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
        let elapsed_ns = sources.record.observation.span.elapsed_ns;
        let work_of = |task: &TaskView<'_>| {
            metrics_of(task.sample, elapsed_ns).find(|(work, _)| Some(*work) == work_metric)
        };
        let work_count = match elapsed_ns {
            0 => None,
            _ => program.sum(|task| work_of(task).map(|(_, count)| count)),
        };

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
            pid: sources.pid_of(first_sample.task),
            threads: program.threads.len() as u32,
            observed_only: program.threads.iter().all(|task| task.sample.unmovable),
            places: threads_by_cache.into_iter().collect(),
            cpu_share: program.sum(|task| task.cpu_share).map(round_short),
            speed_per_s: work_count.map(|count| round_short(count * 1e9 / elapsed_ns as f64)),
            speed_unit: work_metric.map(|unit| unit.describe().to_string()),
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
            profiled_task: program.profiled_task(),
        }
    }

    fn check_plan_change(&mut self, plan: &Plan) -> bool {
        let has_changed = self
            .last_plan
            .as_ref()
            .is_some_and(|previous_plan| !previous_plan.has_same_placement(plan));
        self.last_plan = Some(plan.clone());
        has_changed
    }

    fn bandwidth_snapshot(
        &self,
        limit: &BandwidthLimit,
        sources: &WindowSources<'_>,
    ) -> BandwidthSnapshot {
        let tasks = &sources.record.observation.tasks;
        let members: Vec<TaskId> = member_tasks(&limit.members, tasks).collect();
        let support = self.header.capabilities.bandwidth_of(limit.cache);
        BandwidthSnapshot {
            group: limit.group.0,
            cache: limit.cache.0,
            limit: support.map_or_else(
                || limit.level.to_string(),
                |support| support.unit.describe(limit.level),
            ),
            tasks: members.iter().map(|task| task.0).collect(),
            programs: sources.processes_of(&members),
        }
    }

    fn share_snapshot(
        &self,
        active_share: &ActiveShare,
        sources: &WindowSources<'_>,
    ) -> ShareSnapshot {
        let share = &active_share.share;
        let RunHeader {
            topology,
            capabilities,
            ..
        } = &*self.header;
        let (ways, colors, unit_count) = match &share.units {
            Units::Ways { mask } => {
                let cache = topology.cache(share.cache);
                (Some(mask.to_string()), None, cache.and_then(|c| c.ways))
            }
            Units::Colors { allowed, .. } => {
                let count = capabilities.colors_of(share.cache);
                (None, Some(allowed.to_string()), count)
            }
        };

        let observation = &sources.record.observation;
        let members: Vec<TaskId> = member_tasks(&share.members, &observation.tasks).collect();
        let scope = CounterScope::Group(share.group, share.cache);
        let per_second = |event| count_per_second(observation, scope, event);
        let microwatts = per_second(CounterEvent::CoreEnergyMicrojoules);
        let notes = sources
            .host
            .and_then(|host| host.share_notes.get(&(share.group, share.cache)));
        ShareSnapshot {
            group: share.group.0,
            cache: share.cache.0,
            ways,
            colors,
            unit_count,
            tasks: members.iter().map(|task| task.0).collect(),
            programs: sources.processes_of(&members),
            occupancy_bytes: active_share.occupancy_bytes,
            memory_bytes_per_second: per_second(CounterEvent::MemoryBytes),
            core_watts: microwatts.map(|microwatts| round_short(microwatts / 1e6)),
            memory_stall_cycles_per_second: per_second(CounterEvent::StallCycles(
                StallCause::LocalMemory,
            )),
            allowed_page_share: active_share.pages_in_share.map(round_short),
            fallback_pages: active_share.fallback_pages,
            notes: notes.cloned().unwrap_or_default(),
        }
    }
}

/// Events of a scope per second of the window; `None` if they were not counted.
fn count_per_second(
    observation: &Observation,
    scope: CounterScope,
    event: CounterEvent,
) -> Option<f64> {
    let mut counts = observation.shared_counts.iter();
    let (_, counts) = counts.find(|(counted, _)| *counted == scope)?;
    let elapsed_ns = observation.span.elapsed_ns;
    (elapsed_ns > 0).then_some(counts.get(event)? * 1e9 / elapsed_ns as f64)
}

/// The constant properties of a run.
pub fn page_header(header: &RunHeader, source: &str) -> PageHeader {
    let RunHeader {
        topology,
        capabilities,
        pipeline,
        ..
    } = header;

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

/// Adds what the host knows of a service beside its tasks: idle threads, and programs that no window read.
fn service_snapshot(mut service: ServiceSnapshot, host: Option<&HostReport>) -> ServiceSnapshot {
    let Some(host) = host else {
        return service;
    };
    let identity = service.identity();
    service.tasks += host.idle_threads.get(&identity).copied().unwrap_or(0);
    service.unread_programs = host
        .unread_programs
        .as_ref()
        .map(|counts| counts.get(&identity).copied().unwrap_or(0));
    service
}

/// The promise's state; `None` on a host if its process has exited.
fn promise_snapshot(
    report: &PromiseReport,
    sources: &WindowSources<'_>,
    names: &TaskNames,
) -> Option<PromiseSnapshot> {
    let pid = sources.pid_of(report.task);
    if sources.host.is_some() && pid.is_none() {
        return None;
    }

    let name_of = |task: TaskId| names.get(&task).cloned().unwrap_or_else(|| "?".to_string());
    let (max_slowdown, min_rate) = match report.term {
        PromiseTerm::MaxSlowdown(max) => (Some(max), None),
        PromiseTerm::MinRate(min) => (None, Some(min)),
    };
    Some(PromiseSnapshot {
        program: report.process.0,
        pid,
        name: name_of(report.task),
        state: report.state,
        max_slowdown,
        min_rate,
        measured: report.measured,
        text: format!("{} is {}", name_of(report.task), report.describe(name_of)),
    })
}

fn decision_snapshot(
    rendered: &RenderedReason<'_>,
    sources: &WindowSources<'_>,
) -> DecisionSnapshot {
    let reason = rendered.reason;
    let rounded_number = |(name, value): &(String, f64)| (name.clone(), round_short(*value));
    DecisionSnapshot {
        window: sources.record.observation.window,
        kind: reason.kind,
        tasks: reason.tasks.iter().map(|task| task.0).collect(),
        programs: sources.processes_of(&reason.tasks),
        reason: rendered.text.clone(),
        numbers: reason.numbers.iter().map(rounded_number).collect(),
    }
}

fn pending_snapshot(pending: &PendingItem, names: &TaskNames) -> PendingSnapshot {
    let (group, cache) = match pending.item {
        PlanItem::Share(group, cache) | PlanItem::Bandwidth(group, cache) => {
            (Some(group.0), Some(cache.0))
        }
        _ => (None, None),
    };
    PendingSnapshot {
        group,
        cache,
        done: pending.done,
        total: pending.total,
        text: pending_text(pending, names),
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

/// The contended cache on whose CPUs a task ran longest.
fn busiest_cache<'t>(task: &TaskSample, topology: &'t Topology) -> Option<&'t Cache> {
    let longest_cpu = task
        .on_cpu_ns
        .iter()
        .filter(|(_, ns)| *ns > 0)
        .max_by_key(|(_, ns)| *ns)
        .map(|(cpu, _)| *cpu);
    topology.last_level_cache_of(longest_cpu.or(task.cpu)?)
}

fn cache_snapshots(
    topology: &Topology,
    sources: &WindowSources<'_>,
    tasks: &[TaskSnapshot],
) -> Vec<CacheSnapshot> {
    topology
        .last_level_caches()
        .map(|cache| cache_snapshot(cache, sources, tasks))
        .collect()
}

/// A cache with its use. Its busy CPUs are known only if the load of each of them is.
fn cache_snapshot(
    cache: &Cache,
    sources: &WindowSources<'_>,
    tasks: &[TaskSnapshot],
) -> CacheSnapshot {
    let observation = &sources.record.observation;
    let counts = observation
        .shared_counts
        .iter()
        .find(|(scope, _)| *scope == CounterScope::Cache(cache.id));
    let count_of = |event| counts.and_then(|(_, counts)| counts.get(event));
    let references =
        count_of(CounterEvent::References(cache.level)).filter(|references| *references > 0.0);
    let misses = count_of(CounterEvent::Misses(cache.level));

    let busy_shares: Option<Vec<f64>> = sources.host.and_then(|host| {
        let share_of = |cpu| host.busy_share_by_cpu.get(&cpu).copied();
        cache
            .cpus
            .iter()
            .map(|cpu| share_of(cachemate_core::CpuId(cpu)))
            .collect()
    });
    let cache_use = sources
        .host
        .and_then(|host| host.cache_use.iter().find(|used| used.cache == cache.id));
    let forecast = sources.record.forecast.cache_miss_ratio.get(&cache.id);

    CacheSnapshot {
        cache: cache.id.0,
        level: level_name(cache.level).to_string(),
        cpus: cache.cpus.to_string(),
        size_bytes: cache.size_bytes,
        tasks: tasks
            .iter()
            .filter(|task| task.cache == Some(cache.id.0))
            .map(|task| task.task)
            .collect(),
        miss_ratio: misses
            .zip(references)
            .map(|(misses, references)| round_short(misses / references)),
        forecast_miss_ratio: forecast.map(|ratio| round_short(ratio.value)),
        busy_cpus: busy_shares.map(|shares| shares.iter().sum()),
        memory_bytes_per_second: count_per_second(
            observation,
            CounterScope::Cache(cache.id),
            CounterEvent::MemoryBytes,
        ),
        occupancy_bytes: cache_use.and_then(|used| used.occupancy_bytes),
        free_classes: cache_use.and_then(|used| used.free_classes),
    }
}

fn gang_snapshot(schedule: &GangSchedule, sources: &WindowSources<'_>) -> GangSnapshot {
    let members =
        |gang: &Gang| -> Vec<TaskId> { gang.members.iter().map(|(task, _)| *task).collect() };
    let gangs: Vec<Vec<TaskId>> = schedule.gangs.iter().map(members).collect();
    GangSnapshot {
        cpus: schedule.cpus.to_string(),
        slice_ns: schedule.slice_ns,
        programs: gangs
            .iter()
            .map(|gang| sources.processes_of(gang))
            .collect(),
        gangs: gangs
            .iter()
            .map(|gang| gang.iter().map(|task| task.0).collect())
            .collect(),
    }
}

fn probe_snapshots(sources: &WindowSources<'_>) -> Vec<ProbeSnapshot> {
    let probe_snapshot = |probe_result: &ProbeResult| {
        let (kind, task) = match &probe_result.evidence {
            ProbeEvidence::Rows(_) => ("programs run together", None),
            ProbeEvidence::Trace { task, .. } => ("trace of misses", Some(*task)),
            ProbeEvidence::Samples { .. } => ("sampled accesses", None),
            ProbeEvidence::Reuses { task, .. } => ("watched words", Some(*task)),
            ProbeEvidence::Activity { task, .. } => ("super-set counters", Some(*task)),
            ProbeEvidence::NeighborSlowdown { task, .. } => ("beside a neighbor", Some(*task)),
            ProbeEvidence::PingPong { .. } => ("ping-pong", None),
            ProbeEvidence::PrimeProbe { task, .. } => ("evicted lines", Some(*task)),
        };

        let cost_ns: u64 = probe_result.cost_ns.iter().map(|(_, ns)| ns).sum();
        let program = task.and_then(|task| sources.processes_of(&[task]).first().copied());
        ProbeSnapshot {
            kind: kind.to_string(),
            cost_s: round_short(cost_ns as f64 / 1e9),
            program,
        }
    };

    sources
        .record
        .observation
        .probe_results
        .iter()
        .map(probe_snapshot)
        .collect()
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
