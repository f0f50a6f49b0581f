//! From turns of the loop to snapshots.

use std::collections::BTreeMap;

use cachemate_core::{
    ActiveShare, Cache, CacheId, Capabilities, CounterEvent, CounterScope, Estimate, Plan, PlanItem, ProbeEvidence,
    Profile, Profiles, Reason, ReasonKind, RunHeader, ShareMember, TaskId, TaskSample, Topology, Units, WindowRecord,
};
use cachemate_policy::work_metric::metrics_of;
use cachemate_report::level_text;
use cachemate_report::text::printable;

use crate::matrix::{Matrices, short};
use crate::snapshot::{
    CacheHeader, CacheSnapshot, CurveSnapshot, DaemonSnapshot, DecisionSnapshot, EstimateRange, GangSnapshot,
    JournalLine, PageHeader, ProbeSnapshot, ProgramSnapshot, PromiseSnapshot, SHAPE, ServiceLossSnapshot,
    ServiceSnapshot, ShareSnapshot, Snapshot,
};
use cachemate_pipeline::pair_forecast;
use cachemate_policy::service_losses::{ServiceLoss, ServiceLosses, ServiceReport};
use cachemate_policy::solo_speeds::{SoloSpeeds, instr_per_cycle};

/// Points of a curve that are shown.
const POINTS_AT_MOST: usize = 32;
/// Services that are shown; those that lose most come first.
const MAX_SERVICES: usize = 32;
/// Causes of each service's loss that are shown.
const MAX_LOSSES: usize = 8;

/// State that only a daemon has.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DaemonState {
    /// The kernel's ids.
    pub pids: BTreeMap<TaskId, i32>,
    /// Objects of the restore journal.
    pub journal: Vec<JournalLine>,
    /// The daemon's own state.
    pub daemon: DaemonSnapshot,
}

/// Turns records into snapshots, one after the other.
pub struct SnapshotBuilder {
    header: RunHeader,
    alone: SoloSpeeds,
    losses: ServiceLosses,
    matrices: Matrices,
    start_ns: Option<u64>,
    last_plan: Option<Plan>,
    last_words: Vec<String>,
    curves: BTreeMap<u32, CurveSnapshot>,
}

/// One process of a window.
struct ProgramThreads<'a> {
    id: u32,
    threads: Vec<&'a TaskSample>,
}

impl ProgramThreads<'_> {
    /// The thread that ran most, of those about which `of` says something.
    fn busiest<T>(&self, of: impl Fn(&TaskSample) -> Option<T>) -> Option<T> {
        let ran = |task: &&&TaskSample| std::cmp::Reverse(ran_ns(task));
        let mut threads: Vec<&&TaskSample> = self.threads.iter().collect();
        threads.sort_by_key(ran);
        threads.into_iter().find_map(|task| of(task))
    }
}

fn ran_ns(task: &TaskSample) -> u64 {
    task.ran_ns()
}

/// The record without what probes brought in long lists, which no snapshot shows: a copy that costs little.
pub fn slim(record: &WindowRecord) -> WindowRecord {
    let WindowRecord {
        observation: seen,
        decision,
        forecast,
        applied,
        forecast_errors_instr_per_cycle,
        promises,
        online,
    } = record;
    let answers = seen.probe_results.iter().map(|answer| cachemate_core::ProbeResult {
        probe: answer.probe,
        evidence: slim_evidence(&answer.evidence),
        complete: answer.complete,
        cost_ns: answer.cost_ns.clone(),
    });
    let seen = cachemate_core::Observation {
        window: seen.window,
        span: seen.span,
        end_reason: seen.end_reason,
        tasks: seen.tasks.clone(),
        shared_counts: seen.shared_counts.clone(),
        probe_results: answers.collect(),
        applied: Default::default(),
    };
    WindowRecord {
        observation: seen,
        decision: decision.clone(),
        forecast: forecast.clone(),
        applied: applied.clone(),
        forecast_errors_instr_per_cycle: forecast_errors_instr_per_cycle.clone(),
        promises: promises.clone(),
        online: online.clone(),
    }
}

fn promises(record: &WindowRecord, first: &TaskSample) -> Vec<PromiseSnapshot> {
    let tasks = &record.observation.tasks;
    let name = |task: TaskId| {
        let sample = tasks.iter().find(|other| other.task == task);
        sample.map_or_else(|| "?".to_string(), |task| printable(&task.name))
    };
    let own = record.promises.iter().filter(|report| report.process == first.process);
    own.map(|report| PromiseSnapshot { state: report.state.describe(), text: report.describe(name) }).collect()
}

fn slim_evidence(evidence: &ProbeEvidence) -> ProbeEvidence {
    match evidence {
        ProbeEvidence::Rows(_) => ProbeEvidence::Rows(Vec::new()),
        ProbeEvidence::Trace { task, space, line_bytes, lost, counts, elapsed_ns, .. } => ProbeEvidence::Trace {
            task: *task,
            space: *space,
            line_bytes: *line_bytes,
            lines: Vec::new(),
            code_positions: Vec::new(),
            lost: *lost,
            counts: counts.clone(),
            elapsed_ns: *elapsed_ns,
        },
        ProbeEvidence::Samples { sample_period: one_in, events, line_bytes, .. } => ProbeEvidence::Samples {
            sample_period: *one_in,
            events: *events,
            line_bytes: *line_bytes,
            samples: Vec::new(),
        },
        ProbeEvidence::Reuses { task, .. } => ProbeEvidence::Reuses { task: *task, samples: Vec::new() },
        ProbeEvidence::Activity { task, cpu, level, .. } => {
            ProbeEvidence::Activity { task: *task, cpu: *cpu, level: *level, super_sets: Vec::new() }
        }
        ProbeEvidence::PrimeProbe { task, buffer_bytes, wait_ns, .. } => ProbeEvidence::PrimeProbe {
            task: *task,
            buffer_bytes: *buffer_bytes,
            wait_ns: *wait_ns,
            samples: Vec::new(),
        },
        ProbeEvidence::StoredProfile { task, .. } => {
            ProbeEvidence::StoredProfile { task: *task, profile: Box::default() }
        }
        ProbeEvidence::NeighborSlowdown { .. } | ProbeEvidence::PingPong { .. } => evidence.clone(),
    }
}

impl SnapshotBuilder {
    /// Nothing told yet.
    pub fn new(header: &RunHeader) -> Self {
        SnapshotBuilder {
            header: header.clone(),
            alone: SoloSpeeds::default(),
            losses: ServiceLosses::default(),
            matrices: Matrices::default(),
            start_ns: None,
            last_plan: None,
            last_words: Vec::new(),
            curves: BTreeMap::new(),
        }
    }

    /// The constant properties of the run.
    pub fn head(&self, source: &str) -> PageHeader {
        let RunHeader { topology, capabilities, pipeline, .. } = &self.header;
        PageHeader {
            shape: SHAPE,
            version: env!("CARGO_PKG_VERSION").to_string(),
            source: printable(source),
            run: String::new(),
            policy: pipeline.policy.name.clone(),
            parameters: pipeline.policy.parameters.trim().to_string(),
            guarded: pipeline.guard.is_some(),
            cpus: topology.online().count(),
            caches: topology.last_level_caches().map(|cache| cache_head(cache, capabilities)).collect(),
            truth: None,
            cut_off: None,
        }
    }

    /// One turn of the loop, with the profiles that the policy saw in it.
    pub fn snapshot(&mut self, record: &WindowRecord, profiles: &Profiles, live: Option<DaemonState>) -> Snapshot {
        let seen = &record.observation;
        let start_ns = *self.start_ns.get_or_insert(seen.span.start_ns);
        let end_ns = seen.span.start_ns.saturating_add(seen.span.elapsed_ns);
        let names = names(record, live.as_ref());
        self.alone.observe(seen);
        let mut programs: Vec<ProgramThreads> = Vec::new();
        for task in seen.tasks.iter().filter(|task| !task.exited) {
            match programs.iter_mut().find(|program| program.id == task.process.0) {
                Some(program) => program.threads.push(task),
                None => programs.push(ProgramThreads { id: task.process.0, threads: vec![task] }),
            }
        }
        let program_snapshots: Vec<ProgramSnapshot> =
            programs.iter().map(|program| self.program(program, record, profiles, live.as_ref())).collect();
        let speaks = |program: &ProgramThreads| {
            let with_curve =
                |task: &TaskSample| profiles.get(&task.task).filter(|p| p.misses_per_kilo_instr().is_some());
            Some((program.id, program.busiest(with_curve)?))
        };
        let busiest: BTreeMap<u32, &Profile> = programs.iter().filter_map(speaks).collect();
        let lasted_s = seen.span.elapsed_ns as f64 / 1e9;
        let predictor = &self.header.pipeline.predictor;
        let matrix = self.matrices.observe(
            seen.window,
            lasted_s,
            &program_snapshots,
            &busiest,
            &self.header.topology,
            predictor,
        );
        let topology = &self.header.topology;
        let pair = |own: &Profile, other: &Profile| pair_forecast(topology, predictor, own, other)[0];
        let reports = self.losses.observe(seen, topology, profiles, &pair);
        let of_tasks = |tasks: &[TaskId]| processes(record, tasks);
        let (journal, daemon) = live.map(|live| (live.journal, live.daemon)).unzip();
        Snapshot {
            window: seen.window,
            at_s: end_ns.saturating_sub(start_ns) as f64 / 1e9,
            duration_s: lasted_s,
            caches: caches(&self.header.topology, record),
            decisions: self.decisions(&record.decision.reasons, &names, of_tasks),
            plan_changed: self.plan_changed(&record.decision.plan),
            gangs: record.applied.gangs.iter().map(|schedule| gang(schedule, record)).collect(),
            shares: record.applied.shares.iter().map(|held| self.share(held, record)).collect(),
            probes: probes(record),
            changes_s: Some(record.applied.cost_ns as f64 / 1e9).filter(|cost| *cost > 0.0),
            refused: record.applied.refused.iter().map(|refused| refusal(refused, &names)).collect(),
            overridden: record.applied.overridden_by_others.iter().map(|item| item_words(item, &names)).collect(),
            pending: record.applied.pending.iter().map(|pending| pending_words(pending, &names)).collect(),
            journal,
            daemon,
            curves: self.new_curves(&busiest, &program_snapshots),
            matrix,
            services: reports.iter().take(MAX_SERVICES).map(service).collect(),
            programs: program_snapshots,
        }
    }

    fn program(
        &self,
        program: &ProgramThreads,
        record: &WindowRecord,
        profiles: &Profiles,
        live: Option<&DaemonState>,
    ) -> ProgramSnapshot {
        let elapsed_ns = record.observation.span.elapsed_ns;
        let topology = &self.header.topology;
        let first = program.threads[0];
        let unknown = Profile::default();
        let profile = |task: &TaskSample| profiles.get(&task.task).unwrap_or(&unknown);
        let ran: u64 = program.threads.iter().map(|task| ran_ns(task)).sum();
        let mut places: BTreeMap<u32, u32> = BTreeMap::new();
        for cache in program.threads.iter().filter_map(|task| busiest_cache(task, topology)) {
            *places.entry(cache.id.0).or_default() += 1;
        }
        let unit = program.busiest(|task| metrics_of(task, elapsed_ns).next().map(|(work, _)| work));
        let work = unit.map(|unit| {
            let of_unit = |task: &&TaskSample| metrics_of(task, elapsed_ns).find(|(work, _)| *work == unit);
            program.threads.iter().filter_map(of_unit).map(|(_, count)| count).sum::<f64>()
        });
        let sum = |event| sum_where_counted(&program.threads, event);
        let misses = topology.last_level().and_then(|level| sum(CounterEvent::Misses(level)));
        let weighted = |of: &dyn Fn(&TaskSample) -> Option<f64>| {
            let each = program.threads.iter().filter_map(|task| Some((of(task)?, ran_ns(task).max(1) as f64)));
            let (sum, weight) = each.fold((0.0, 0.0), |(sum, weight), (value, w)| (sum + value * w, weight + w));
            (weight > 0.0).then(|| short(sum / weight))
        };
        let forecast = |task: &TaskSample| record.forecast.tasks.get(&task.task)?.degradation;
        let forecast_slowdown = program.busiest(forecast).map(estimate);
        let allowed = |task: &TaskSample| record.applied.affinity.get(&task.task).map(ToString::to_string);
        ProgramSnapshot {
            program: program.id,
            name: printable(&first.name),
            service: printable(&first.service_or_command().to_string()),
            pid: live.and_then(|live| live.pids.get(&first.task)).copied(),
            threads: program.threads.len() as u32,
            observed_only: program.threads.iter().all(|task| task.unmovable),
            places: places.into_iter().collect(),
            cpu_share: (elapsed_ns > 0).then(|| short(ran as f64 / elapsed_ns as f64)),
            speed_per_s: work.filter(|_| elapsed_ns > 0).map(|count| short(count * 1e9 / elapsed_ns as f64)),
            speed_unit: unit.map(|unit| unit.describe()),
            instr_per_cycle: weighted(&instr_per_cycle),
            mpki: misses
                .zip(sum(CounterEvent::Instructions).filter(|count| *count > 0.0))
                .map(|(misses, instructions)| short(1000.0 * misses / instructions)),
            slowdown: weighted(&|task| self.alone.slowdown(task, elapsed_ns, profile(task))),
            forecast_slowdown,
            intensity: program.busiest(|task| profile(task).contention.intensity).map(|fact| short(fact.value)),
            sensitivity: program.busiest(|task| profile(task).contention.sensitivity).map(|fact| short(fact.value)),
            allowed: program.busiest(allowed),
            max_slowdown: first.goal.and_then(|goal| goal.max_slowdown),
            min_rate: first.goal.and_then(|goal| goal.min_rate).map(short),
            promises: promises(record, first),
        }
    }

    /// Reasons that the window before did not give.
    fn decisions(
        &mut self,
        why: &[Reason],
        names: &BTreeMap<TaskId, String>,
        of_tasks: impl Fn(&[TaskId]) -> Vec<u32>,
    ) -> Vec<DecisionSnapshot> {
        let words: Vec<String> = why
            .iter()
            .map(|reason| printable(&reason.render(|task| names.get(&task).map_or("?", String::as_str))))
            .collect();
        let new = why.iter().zip(&words).filter(|(_, words)| !self.last_words.contains(words));
        let decisions = new.map(|(reason, words)| DecisionSnapshot {
            kind: kind_text(reason.kind),
            programs: of_tasks(&reason.tasks),
            text: words.clone(),
            numbers: reason.numbers.iter().map(|(name, value)| (name.clone(), short(*value))).collect(),
        });
        let decisions = decisions.collect();
        if !words.is_empty() {
            self.last_words = words;
        }
        decisions
    }

    fn plan_changed(&mut self, plan: &Plan) -> bool {
        let same = |before: &Plan| {
            (&before.affinity, &before.gangs, &before.shares, &before.weights)
                == (&plan.affinity, &plan.gangs, &plan.shares, &plan.weights)
        };
        let changed = self.last_plan.as_ref().is_some_and(|before| !same(before));
        self.last_plan = Some(plan.clone());
        changed
    }

    fn share(&self, held: &ActiveShare, record: &WindowRecord) -> ShareSnapshot {
        let share = &held.share;
        let (unit, units, unit_count) = match &share.units {
            Units::Ways { mask } => ("ways", mask, self.header.topology.cache(share.cache).and_then(|c| c.ways)),
            Units::Colors { allowed, .. } => ("colors", allowed, self.header.capabilities.colors_of(share.cache)),
        };
        let is_member = |task: &&TaskSample| {
            share.members.contains(&ShareMember::Task(task.task))
                || share.members.contains(&ShareMember::Process(task.process))
        };
        let members: Vec<TaskId> = record.observation.tasks.iter().filter(is_member).map(|task| task.task).collect();
        ShareSnapshot {
            group: share.group.0,
            cache: share.cache.0,
            unit,
            indices: units.to_string(),
            unit_count,
            programs: processes(record, &members),
            occupancy_bytes: held.occupancy_bytes,
            allowed_page_share: held.pages_in_share.map(short),
        }
    }

    /// Curves that differ from the last ones sent.
    fn new_curves(&mut self, busiest: &BTreeMap<u32, &Profile>, told: &[ProgramSnapshot]) -> Vec<CurveSnapshot> {
        self.curves.retain(|program, _| told.iter().any(|there| there.program == *program));
        let mut new = Vec::new();
        for (&program, profile) in busiest {
            let Some((level, fact)) = profile.locality.misses_per_kilo_instr.iter().next_back() else { continue };
            let step = fact.value.len().div_ceil(POINTS_AT_MOST).max(1);
            let last = fact.value.len().saturating_sub(1);
            let points = fact.value.iter().enumerate().filter(|(index, _)| index % step == 0 || *index == last);
            let point = |&(bytes, misses): &(u64, cachemate_core::Estimate)| {
                (bytes, short(misses.value), short(misses.low), short(misses.high))
            };
            let curve = CurveSnapshot {
                program,
                level: level_text(*level).to_string(),
                source: source_text(fact.source),
                points: points.map(|(_, p)| point(p)).collect(),
            };
            if self.curves.get(&program) != Some(&curve) {
                self.curves.insert(program, curve.clone());
                new.push(curve);
            }
        }
        new
    }
}

fn service(report: &ServiceReport) -> ServiceSnapshot {
    let loss = |loss: &ServiceLoss| ServiceLossSnapshot {
        service: printable(&loss.by.name),
        loss: estimate(loss.loss),
        source: loss.source.text(),
        forecast: loss.forecast.map(short),
    };
    ServiceSnapshot {
        kind: report.service.kind.text(),
        name: printable(&report.service.name),
        tasks: report.tasks,
        cpu_share: short(report.cpu_share),
        slowdown: report.slowdown.map(|(slowdown, _)| estimate(slowdown)),
        source: report.slowdown.map(|(_, source)| source.text()),
        slowed_by: report.losses.iter().take(MAX_LOSSES).map(loss).collect(),
        reason: report.reason.clone(),
    }
}

fn estimate(estimate: Estimate) -> EstimateRange {
    EstimateRange { value: short(estimate.value), low: short(estimate.low), high: short(estimate.high) }
}

fn cache_head(cache: &Cache, capabilities: &Capabilities) -> CacheHeader {
    CacheHeader {
        cache: cache.id.0,
        level: level_text(cache.level).to_string(),
        cpus: cache.cpus.to_string(),
        size_bytes: cache.size_bytes,
        ways: cache.ways,
        colors: capabilities.colors_of(cache.id),
    }
}

/// `gzip` or, where the kernel's id is known, `gzip(1234)`.
fn names(record: &WindowRecord, live: Option<&DaemonState>) -> BTreeMap<TaskId, String> {
    let name = |task: &TaskSample| match live.and_then(|live| live.pids.get(&task.task)) {
        Some(pid) => format!("{}({pid})", task.name),
        None => format!("{} #{}", task.name, task.process.0),
    };
    record.observation.tasks.iter().map(|task| (task.task, name(task))).collect()
}

/// The processes of tasks, each once.
fn processes(record: &WindowRecord, tasks: &[TaskId]) -> Vec<u32> {
    let mut programs: Vec<u32> = Vec::new();
    for task in tasks {
        let process = record.observation.tasks.iter().find(|seen| seen.task == *task).map(|seen| seen.process.0);
        programs.extend(process.filter(|process| !programs.contains(process)));
    }
    programs
}

/// The contended cache below which a task ran longest.
fn busiest_cache<'t>(task: &TaskSample, topology: &'t Topology) -> Option<&'t Cache> {
    let longest = task.on_cpu_ns.iter().filter(|(_, ns)| *ns > 0).max_by_key(|(_, ns)| *ns).map(|(cpu, _)| *cpu);
    topology.last_level_of(longest.or(task.cpu)?)
}

/// Over the threads for which it was counted; `None` where it was for none.
fn sum_where_counted(threads: &[&TaskSample], event: CounterEvent) -> Option<f64> {
    let counted: Vec<f64> = threads.iter().filter_map(|task| task.counts.get(event)).collect();
    (!counted.is_empty()).then(|| counted.iter().sum())
}

fn caches(topology: &Topology, record: &WindowRecord) -> Vec<CacheSnapshot> {
    let counted = |cache: &Cache| {
        let (_, counts) =
            record.observation.shared_counts.iter().find(|(place, _)| *place == CounterScope::Cache(cache.id))?;
        let references = counts.get(CounterEvent::References(cache.level)).filter(|count| *count > 0.0)?;
        Some(short(counts.get(CounterEvent::Misses(cache.level))? / references))
    };
    let snapshot = |cache: &Cache| CacheSnapshot {
        cache: cache.id.0,
        miss_ratio: counted(cache),
        forecast_miss_ratio: record.forecast.cache_miss_ratio.get(&cache.id).map(|ratio| short(ratio.value)),
    };
    let all = topology.last_level_caches().map(snapshot);
    all.filter(|cache| cache.miss_ratio.is_some() || cache.forecast_miss_ratio.is_some()).collect()
}

fn gang(schedule: &cachemate_core::GangSchedule, record: &WindowRecord) -> GangSnapshot {
    let turn = |gang: &cachemate_core::Gang| {
        let tasks: Vec<TaskId> = gang.members.iter().map(|(task, _)| *task).collect();
        processes(record, &tasks)
    };
    GangSnapshot {
        cpus: schedule.cpus.to_string(),
        slice_s: schedule.slice_ns as f64 / 1e9,
        turns: schedule.gangs.iter().map(turn).collect(),
    }
}

fn probes(record: &WindowRecord) -> Vec<ProbeSnapshot> {
    let answer = |answer: &cachemate_core::ProbeResult| {
        let (kind, task) = match &answer.evidence {
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
        let cost_ns: u64 = answer.cost_ns.iter().map(|(_, ns)| ns).sum();
        let program = task.and_then(|task| processes(record, &[task]).first().copied());
        ProbeSnapshot { kind, cost_s: short(cost_ns as f64 / 1e9), program }
    };
    record.observation.probe_results.iter().map(answer).collect()
}

fn refusal(refused: &cachemate_core::RefusedItem, names: &BTreeMap<TaskId, String>) -> String {
    format!("{}: {}", item_words(&refused.item, names), printable(&refused.message))
}

fn pending_words(pending: &cachemate_core::PendingItem, names: &BTreeMap<TaskId, String>) -> String {
    let of = pending.total.map_or(String::new(), |total| format!(" of {total}"));
    format!("{}: {}{of}", item_words(&pending.item, names), pending.done)
}

/// A line of the plan as people name it.
fn item_words(item: &PlanItem, names: &BTreeMap<TaskId, String>) -> String {
    let name = |task: &TaskId| names.get(task).map_or_else(|| format!("task {}", task.0), |name| printable(name));
    match item {
        PlanItem::Plan => "the plan".to_string(),
        PlanItem::Affinity(task) => format!("CPUs of {}", name(task)),
        PlanItem::Weight(task) => format!("weight of {}", name(task)),
        PlanItem::Gangs(at) => format!("turns {at}"),
        PlanItem::Share(group, CacheId(cache)) => format!("part {} of cache {cache}", group.0),
        PlanItem::Penalties => "advice".to_string(),
        PlanItem::Probe(probe) => format!("probe {}", probe.0),
        PlanItem::Window => "window".to_string(),
    }
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

/// As it stands in files.
fn source_text(source: cachemate_core::FactSource) -> String {
    let value = serde_json::to_value(source).ok();
    value.and_then(|value| value.as_str().map(str::to_string)).unwrap_or_default()
}
