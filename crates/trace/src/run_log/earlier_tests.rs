//! A log of format 4 that contains each kind of record, and the records from which it was written.

use std::collections::BTreeMap;

use cachemate_core::test_support::{capabilities_fixture, last_level_caches, pipeline_config};
use cachemate_core::*;

use super::*;

const SPAN: TimeSpan = TimeSpan { start_ns: 0, elapsed_ns: 1_000, elapsed_cycles: Some(3_000) };

fn sample_counts() -> EventCounts {
    let event = CounterEvent::Misses(CacheLevel::L3);
    EventCounts(vec![EventCount { event, count: 7, enabled_share: 0.1 + 0.2 }])
}

fn sample_header() -> RunHeader {
    let supported_with = |note: Option<&str>| Support::Yes { note: note.map(String::from) };
    let cannot = Support::No { reason: "no resctrl".into(), remedy: Some("mount it".into()) };
    let mut machine = capabilities_fixture(&[Ability::Affinity])
        .with_partition(CacheId(0), PartitionSupport::Colors { colors: 8, page_bytes: 4096, page_migration_ns: 0.3 })
        .with_partition(CacheId(0), PartitionSupport::Ways { ways: 16, min_ways: 2, contiguous: true, max_groups: 4 });
    machine.abilities.extend([(Ability::CountPerTask, supported_with(Some("4 at once"))), (Ability::Ways, cannot)]);
    machine.min_slice_ns = Some(250);
    let profilers = vec![
        ProfilerConfig::Phases {
            level: CacheLevel::L3,
            parameters: PhaseParameters::default(),
            interval_instructions: 1e6,
        },
        ProfilerConfig::Counters { level: CacheLevel::L3, min_instructions: 1e5 },
        ProfilerConfig::CoRunRows { level: CacheLevel::L3, parameters: CoRunRowParameters::default() },
        ProfilerConfig::Sharing { parameters: ShMapParameters::default(), machine_wide: true },
        ProfilerConfig::MissTrace { cache: sample_cache(), follows_thesis: true },
        ProfilerConfig::Reuse {
            level: CacheLevel::L3,
            replacement: ReplacementModel::Lru,
            line_bytes: 64,
            sizes_bytes: vec![1 << 20],
            includes_code: true,
        },
        ProfilerConfig::SizeSweep { cache: sample_cache(), min_instructions: 1e4 },
        ProfilerConfig::Oracle { profiles: vec![sample_profile()] },
    ];
    let guard = GuardConfig {
        trial_windows: 7,
        min_loss: 0.07,
        cooldown_windows: 11,
        objective: GuardObjective::WorstProcessSpeed,
        waits_for_reference: true,
    };
    let mut topology = last_level_caches(1, 2, CacheLevel::L3, 1 << 20);
    topology.memory_latency = vec![vec![1.0]];
    let pipeline = PipelineConfig { guard: Some(guard), profilers, ..pipeline_config("default") };
    RunHeader { format: RUN_LOG_VERSION, topology, capabilities: machine, pipeline }
}

fn sample_cache() -> TracedCache {
    TracedCache { level: CacheLevel::L3, size_bytes: 1 << 20, colors: 8, ways: 16, points: 4 }
}

fn sample_profile() -> Profile {
    let mut profile = Profile { process: Some(ProcessId(1)), phase_number: 2, ..Profile::default() };
    let curve = vec![(1 << 20, Estimate { value: 0.3, low: 0.1, high: 1.0 / 3.0 })];
    profile.locality.misses_per_kilo_instr.insert(CacheLevel::L3, Fact::new(curve, FactSource::MissTrace, 1));
    let measured = |value: f64| Some(Fact::from_measurement(Estimate::exact(value), FactSource::Counters, 1));
    profile.rates.observed_misses_per_kilo_instr = measured(1.5);
    profile.rates.observed_read_bytes_per_kilo_instr = measured(2.5);
    profile.contention.sensitivity = measured(0.25);
    profile
}

fn sample_probes() -> Vec<ProbeRequest> {
    let (task, cache) = (TaskId(0), CacheId(0));
    let kinds = [
        ProbeKind::CoRunRows { cache, rows: vec![vec![task, TaskId(1)]], total_ns: 5, settle_ns: 1, boost: true },
        ProbeKind::PairedRows { cache, task, peers: vec![TaskId(1)], total_ns: 5 },
        ProbeKind::MissTrace { task, entries: 9, includes_code: true },
        ProbeKind::AccessSamples {
            processes: vec![ProcessId(0)],
            sample_period: 10,
            remote_only: true,
            max_samples: 5,
        },
        ProbeKind::ReuseTimes { task, locations: 3 },
        ProbeKind::SuperSets { tasks: vec![task], level: CacheLevel::L2, super_sets: 8 },
        ProbeKind::Neighbor { task, neighbor: Neighbor::Pirate { footprint_bytes: 4096 } },
        ProbeKind::PingPong { cpus: (CpuId(0), CpuId(1)) },
        ProbeKind::PrimeProbe { task, samples: 2 },
    ];
    let request = |(id, kind)| ProbeRequest { id: ProbeId(id), kind, budget_ns: 100 };
    (0..).zip(kinds).map(request).collect()
}

fn probe_results() -> Vec<ProbeResult> {
    let task = TaskId(0);
    let row = RowInterval {
        tasks: vec![task, TaskId(1)],
        cache: CacheId(0),
        span: SPAN,
        ended_by_task: Some(task),
        cache_counts: sample_counts(),
        task_counts: vec![sample_counts()],
    };
    let access = AccessSample {
        task,
        virtual_line: 5,
        physical_line: Some(6),
        source: DataSource::RemoteCache,
        latency_cycles: Some(90),
        at_ns: 11,
    };
    let reload = PrimeProbeSample {
        target_running: true,
        evicted: 3,
        reloads: 4,
        elapsed_ns: 5,
        round_trips_ns: Some((60.0, 60.5)),
    };
    let evidence = [
        ProbeEvidence::Rows(vec![row]),
        ProbeEvidence::Trace {
            task,
            space: AddressKind::Physical,
            line_bytes: 64,
            lines: vec![1, 2],
            code_positions: vec![1],
            lost: Some(3),
            counts: sample_counts(),
            elapsed_ns: 9,
        },
        ProbeEvidence::Samples { sample_period: 10, events: 20, line_bytes: 64, samples: vec![access] },
        ProbeEvidence::Reuses { task, samples: vec![ReuseSample { accesses: Some(4), elapsed_ns: 8, reused: true }] },
        ProbeEvidence::Activity {
            task,
            cpu: CpuId(1),
            level: CacheLevel::L2,
            super_sets: vec![SuperSetCount { accesses: 5, misses: 2 }],
        },
        ProbeEvidence::NeighborSlowdown {
            task,
            neighbor: Neighbor::Chase { footprint_bytes: 4096 },
            neighbor_alone_ns: 1.5,
            neighbor_corun_ns: 2.5,
            task_alone_rate: Some(0.7),
            task_corun_rate: Some(0.3),
            rate_event: Some(CounterEvent::Instructions),
        },
        ProbeEvidence::PingPong { cpus: (CpuId(0), CpuId(1)), round_trip_ns: 60.0 },
        ProbeEvidence::PrimeProbe { task, buffer_bytes: 4096, wait_ns: 10, samples: vec![reload] },
        ProbeEvidence::StoredProfile { task, profile: Box::new(sample_profile()) },
    ];
    let result = |(id, evidence)| ProbeResult {
        probe: ProbeId(id),
        evidence,
        complete: true,
        cost_ns: vec![(Some(task), 5), (None, 1)],
    };
    (0..).zip(evidence).map(result).collect()
}

fn sample_shares() -> Vec<CacheShare> {
    let (cache, all) = (CacheId(0), IndexSet::from_iter(0..4));
    let units =
        [Units::Colors { allowed: all.clone(), migration: PageMigration::HotFirst }, Units::Ways { mask: all.clone() }];
    let members = vec![ShareMember::Process(ProcessId(0)), ShareMember::Task(TaskId(1))];
    let share = |(group, units)| CacheShare { group: GroupId(group), members: members.clone(), cache, units };
    (0..).zip(units).map(share).collect()
}

fn sample_gangs() -> Vec<GangSchedule> {
    let gang = Gang { members: vec![(TaskId(0), Some(CpuId(0))), (TaskId(1), None)], slices: 2 };
    vec![GangSchedule { cpus: CpuSet::from_iter(0..2), slice_ns: 500, gangs: vec![gang] }]
}

fn sample_applied_plan() -> AppliedPlan {
    use RefusalReason::*;
    let reasons =
        [NotFound, NoPermission, NoCapacity, Busy, NotSupported, OwnedByOther, RefusalReason::NotRecorded, Failed];
    let refused = |reason| RefusedItem { item: PlanItem::Window, reason, message: "the kernel's words".into() };
    let active =
        |share| ActiveShare { share, pages_in_share: Some(0.75), fallback_pages: Some(2), occupancy_bytes: Some(4096) };
    AppliedPlan {
        affinity: BTreeMap::from([(TaskId(0), CpuSet::from_iter(0..1))]),
        weights: BTreeMap::from([(TaskId(0), 0.5)]),
        gangs: sample_gangs(),
        shares: sample_shares().into_iter().map(active).collect(),
        penalties: vec![CoRunPenalty { tasks: (TaskId(0), TaskId(1)), penalty: 0.5 }],
        probes: vec![ProbeId(1)],
        pending: vec![PendingItem { item: PlanItem::Share(GroupId(0), CacheId(0)), done: 1, total: Some(2) }],
        refused: reasons.into_iter().map(refused).collect(),
        overridden_by_others: vec![PlanItem::Affinity(TaskId(1))],
        cost_ns: 12,
    }
}

fn record() -> WindowRecord {
    let task = TaskSample {
        user: Some(1000),
        name: "gzip".into(),
        arrival_ns: 3,
        exited: true,
        unmovable: true,
        goal: Some(Goal { priority: 2.0, max_slowdown: Some(0.05), min_rate: Some(1e6) }),
        cpu: Some(CpuId(1)),
        on_cpu_ns: vec![(CpuId(1), 900)],
        run_queue_wait_ns: Some(100),
        counts: sample_counts(),
        progress: Some(2.5),
        pages_per_color: Some(vec![1, 2]),
        pages_per_node: Some(vec![3]),
        ..TaskSample::new(TaskId(0), ProcessId(0))
    };
    let observation = Observation {
        window: 0,
        span: SPAN,
        end_reason: WindowEnd::ProbeAnswered,
        tasks: vec![task, TaskSample::new(TaskId(1), ProcessId(1))],
        shared_counts: vec![
            (CounterScope::Cache(CacheId(0)), sample_counts()),
            (CounterScope::Group(GroupId(0), CacheId(0)), sample_counts()),
        ],
        probe_results: probe_results(),
        applied: sample_applied_plan(),
    };
    let reason = |kind| Reason {
        kind,
        tasks: vec![TaskId(0)],
        text: "{0} loses speed".into(),
        numbers: vec![("loss_percent".into(), 7.5)],
    };
    let kinds = [
        ReasonKind::Explanation,
        ReasonKind::RolledBack,
        ReasonKind::CoolingDown,
        ReasonKind::TrialVerdict,
        ReasonKind::ClusterFound,
    ];
    let plan = Plan {
        affinity: BTreeMap::from([(TaskId(0), CpuSet::from_iter(0..1))]),
        gangs: sample_gangs(),
        shares: sample_shares(),
        probes: sample_probes(),
        ..Plan::idle(WindowLength::Cycles { cycles: 9 })
    };
    WindowRecord {
        observation,
        decision: Decision::new(plan, kinds.map(reason).into()),
        forecast: Forecast::default(),
        applied: sample_applied_plan(),
        forecast_errors_instr_per_cycle: vec![(TaskId(0), Estimate::exact(0.5), 0.75)],
        promises: Vec::new(),
        online: Some(CpuSet::from_iter(0..2)),
    }
}

/// Does a log of format 4 read as the values from which it was written, and is it written again with the keys of format
/// 5?
#[test]
fn a_log_of_format_4_is_read_and_written_as_format_5() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/earlier/run-log-4.jsonl");
    let mut log = RunLogReader::open(path).unwrap();
    assert_eq!(*log.header(), RunHeader { format: 4, ..sample_header() });
    assert_eq!(log.next_record().unwrap(), Some(record()));
    assert_eq!(log.next_record().unwrap(), None);

    let dir = tempfile::tempdir().unwrap();
    let again = dir.path().join("run.jsonl");
    let mut writer = RunLogWriter::create(&again, false, log.header()).unwrap();
    writer.push(&record()).unwrap();
    writer.finish().unwrap();
    let text = std::fs::read_to_string(&again).unwrap();
    assert!(text.starts_with("{\"format\":5,") && text.contains("{\"observation\":"), "{text}");
    assert_eq!(RunLogReader::open(&again).unwrap().next_record().unwrap(), Some(record()));
}
