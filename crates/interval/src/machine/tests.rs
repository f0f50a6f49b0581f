use super::*;
use crate::closed_form;
use crate::program::ProgramPhase;
use cachemate_core::test_support::{NullPredictor, ViewFixture};
use cachemate_core::{
    BandwidthLimit, BandwidthSupport, BandwidthUnit, CacheId, CacheShare, CounterEvent, GroupId,
    IndexSet, PageMigration, PlanItem, ProbeEvidence, ProbeKind, ProbeRequest, RefusalReason,
    ShareMember, StallCause, Units, WayPartitions, check_plan,
};

const LINES: f64 = 65_536.0;

fn sample_spec() -> MachineSpec {
    let mut spec = crate::engine::tests::sample_machine(1, 4, 2, 1);
    let last = spec.caches.len() - 1;
    spec.caches[last].way_partitions = Some(WayPartitions {
        groups: 8,
        min_ways: 1,
        contiguous: false,
    });
    spec.pages.colors = Some(16);
    spec
}

fn uniform_phase(lines: f64, references: f64) -> ProgramPhase {
    closed_form::uniform_phase(64.0, LINES, lines, references)
}

fn sample_job(name: &str, phase: ProgramPhase) -> IntervalJob {
    IntervalJob::new(PhasedProgram::endless_program(name, phase))
}

fn exact_options() -> Options {
    let defects = CounterNoise {
        noise: 0.0,
        autocorrelation: 0.0,
        multiplexing_noise: 0.0,
        skew: 0.0,
    };
    Options {
        counter_noise: defects,
        ..Options::default()
    }
}

fn last_cache(machine: &IntervalMachine) -> CacheId {
    machine
        .topology()
        .caches
        .iter()
        .find(|cache| cache.last_level)
        .unwrap()
        .id
}

fn instr_per_cycle(observation: &Observation, index: usize) -> f64 {
    let counts = &observation.tasks[index].counts;
    counts.get(CounterEvent::Instructions).unwrap() / counts.get(CounterEvent::Cycles).unwrap()
}

/// Do windows of nominal length follow each other, with every task's time and counts?
#[test]
fn windows_follow_each_other_with_time_and_counts() {
    let jobs = vec![
        sample_job("a", uniform_phase(90_000.0, 0.02)),
        sample_job("b", uniform_phase(1000.0, 0.01)),
    ];
    let mut machine = IntervalMachine::new(&sample_spec(), exact_options(), jobs).unwrap();
    machine.set_first_window(WindowLength::Time { ns: 500_000_000 });
    machine.observe().unwrap();
    let observation = machine.observe().unwrap().unwrap();
    assert_eq!(
        (
            observation.span.start_ns,
            observation.span.elapsed_ns,
            observation.window
        ),
        (500_000_000, 500_000_000, 1)
    );
    assert_eq!(
        observation
            .tasks
            .iter()
            .map(|task| task.name.as_str())
            .collect::<Vec<_>>(),
        ["a", "b"]
    );
    for task in &observation.tasks {
        let ran_ns = task.ran_ns();
        assert!((ran_ns as f64 / 5e8 - 1.0).abs() < 1e-3, "{task:?}");
    }
    let misses = observation.tasks[0]
        .counts
        .get(CounterEvent::Misses(cachemate_core::CacheLevel::L2))
        .unwrap();
    let read = observation.tasks[0]
        .counts
        .get(CounterEvent::MemoryReadBytes)
        .unwrap();
    assert!((read / 64.0 / misses - 1.0).abs() < 0.01, "{read} {misses}");
}

/// Does a limited program stay within its limit, in bytes and in percent, does another one gain, and does everything
/// return with the limit?
#[test]
fn a_limit_of_bandwidth_holds_and_helps_the_others() {
    for (unit, level, max_level) in [
        (BandwidthUnit::EighthsOfGigabytePerSecond, 2, 2048),
        (BandwidthUnit::Percent, 5, 100),
    ] {
        let mut spec = sample_spec();
        spec.memory.bytes_per_cycle = 0.5;
        spec.memory.bandwidth_limits = Some(BandwidthSupport {
            unit,
            min_level: 1,
            step: 1,
            max_level,
            max_groups: 4,
        });

        let stream = || sample_job("stream", closed_form::stream_phase(64.0, LINES, 0.05));
        let jobs = vec![stream(), stream()];
        let mut machine = IntervalMachine::new(&spec, exact_options(), jobs).unwrap();
        let window = WindowLength::Time { ns: 1_000_000_000 };
        machine.set_first_window(window);

        let mut rates = |limit: Option<u32>| {
            let mut plan = Plan::idle(window);
            plan.bandwidth.extend(limit.map(|level| BandwidthLimit {
                group: GroupId(0),
                members: vec![ShareMember::Task(TaskId(0))],
                cache: last_cache(&machine),
                level,
            }));
            let applied = machine.apply(&plan).unwrap();
            assert_eq!(
                (applied.refused, applied.bandwidth),
                (vec![], plan.bandwidth)
            );
            machine.observe().unwrap();
            let observation = machine.observe().unwrap().unwrap();
            [0, 1].map(|index| {
                let counts = &observation.tasks[index].counts;
                counts.get(CounterEvent::MemoryReadBytes).unwrap()
            })
        };
        let free = rates(None);
        let limited = rates(Some(level));
        let cap = match unit {
            BandwidthUnit::Percent => {
                0.05 * f64::from(spec.pipeline.max_misses_in_flight())
                    / f64::from(spec.memory.local_latency_cycles)
                    * 64.0
                    * spec.hertz as f64
            }
            _ => 2.0 * 1e9 / 8.0,
        };
        assert!(free[0] > 1.2 * cap, "{unit:?}: {free:?}, cap {cap}");
        let share_of_cap = limited[0] / cap;
        assert!(
            (0.95..1.02).contains(&share_of_cap),
            "{unit:?}: {limited:?}, cap {cap}"
        );
        assert!(limited[1] > 1.2 * free[1], "{unit:?}: {free:?} {limited:?}");
        let again = rates(None);
        assert!(
            (again[0] / free[0] - 1.0).abs() < 0.02,
            "{free:?} {again:?}"
        );
    }
}

/// Does a partition that a plan requests protect from the neighbor, and can it be read back?
#[test]
fn a_planned_partition_protects_and_is_read_back() {
    let jobs = || {
        vec![
            sample_job("victim", uniform_phase(30_000.0, 0.02)),
            sample_job("stream", closed_form::stream_phase(64.0, LINES, 0.02)),
        ]
    };

    let run = |ways: bool| {
        let mut machine = IntervalMachine::new(&sample_spec(), exact_options(), jobs()).unwrap();
        let observation = machine.observe().unwrap().unwrap();
        let cache = last_cache(&machine);
        let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
        for task in &observation.tasks {
            plan.affinity
                .insert(task.task, [0, 1].into_iter().collect());
        }

        let share = |index: usize, mask: IndexSet| CacheShare {
            group: GroupId(index as u32),
            members: vec![ShareMember::Process(observation.tasks[index].process)],
            cache,
            units: Units::Ways { mask },
        };
        if ways {
            plan.shares = vec![share(0, (0..10).collect()), share(1, (10..16).collect())];
        }

        let (topology, capabilities) = (machine.topology().clone(), machine.capabilities().clone());
        let fixture = ViewFixture {
            observation: observation.clone(),
            ..ViewFixture::new(topology, capabilities, 0)
        };
        check_plan(&plan, &fixture.view(&NullPredictor)).unwrap();
        let applied = machine.apply(&plan).unwrap();
        assert_eq!(applied.refused, []);
        assert_eq!(applied.shares.len(), if ways { 2 } else { 0 });
        (0..3).for_each(|_| drop(machine.observe().unwrap()));
        let observation = machine.observe().unwrap().unwrap();
        (
            instr_per_cycle(&observation, 0),
            observation
                .applied
                .shares
                .first()
                .and_then(|active_share| active_share.occupancy_bytes),
        )
    };

    let (unpartitioned, partitioned) = (run(false), run(true));
    let solo_speed = {
        let mut machine = IntervalMachine::new(
            &sample_spec(),
            exact_options(),
            jobs().into_iter().take(1).collect(),
        )
        .unwrap();
        (0..4).for_each(|_| drop(machine.observe().unwrap()));
        instr_per_cycle(&machine.observe().unwrap().unwrap(), 0)
    };

    // The victim's lines fit into its ways, so it is as fast as alone; sharing the cache made it slower.
    assert!(
        unpartitioned.0 < 0.97 * solo_speed && partitioned.0 > 0.97 * solo_speed,
        "{partitioned:?} {unpartitioned:?} {solo_speed}"
    );
    assert!(
        (partitioned.1.unwrap() as f64 / (29_000.0 * 64.0) - 1.0).abs() < 0.1,
        "{partitioned:?}"
    );
}

/// Do moves to other colors cost their time, are they pending meanwhile, and do they complete?
#[test]
fn page_moves_cost_time_are_pending_and_complete() {
    let mut machine = IntervalMachine::new(
        &sample_spec(),
        exact_options(),
        vec![sample_job("mover", uniform_phase(60_000.0, 0.02))],
    )
    .unwrap();
    machine.observe().unwrap();
    let first_observation = machine.observe().unwrap().unwrap();
    let cache = last_cache(&machine);
    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000 });
    let units = Units::Colors {
        allowed: (0..4).collect(),
        migration: PageMigration::All,
    };

    let members = vec![ShareMember::Process(first_observation.tasks[0].process)];
    plan.shares = vec![CacheShare {
        group: GroupId(1),
        members,
        cache,
        units,
    }];
    let applied = machine.apply(&plan).unwrap();
    assert_eq!(applied.pending.len(), 1);
    let first = machine.observe().unwrap().unwrap();
    let slow = first.tasks[0].on_cpu_ns.first().map_or(0, |(_, ns)| *ns);
    assert!(
        (0.4..0.6).contains(&(slow as f64 / 1e6)),
        "half of the time is copying: {slow}"
    );
    // 60 000 lines are 937 pages, of which three quarters move at 11 051 cycles each.
    let expected = 937.5 * 0.75 * 11_051.0 / 2e9 * 1e9;
    assert!(
        (applied.cost_ns as f64 / expected - 1.0).abs() < 0.01,
        "{} {expected}",
        applied.cost_ns
    );
    (0..30).for_each(|_| drop(machine.observe().unwrap()));
    let observation = machine.observe().unwrap().unwrap();
    assert!(
        observation.applied.pending.is_empty()
            && observation.applied.shares[0].pages_in_share == Some(1.0)
    );
    assert!(instr_per_cycle(&observation, 0) < 0.95 * instr_per_cycle(&first_observation, 0));
}

/// Do arrivals, exits and restarts end their windows, with new ids each time?
#[test]
fn arrivals_exits_and_restarts_end_windows_with_new_ids() {
    let phase = ProgramPhase {
        instructions: Some(1e9),
        ..closed_form::build_phase(64.0, LINES, 4, |_| 0.0)
    };
    let program = PhasedProgram {
        phases: vec![phase],
        ..PhasedProgram::endless_program("short", uniform_phase(1.0, 0.0))
    };
    let restarting = IntervalJob {
        restarts: true,
        ..IntervalJob::new(program.clone())
    };

    let late_job = IntervalJob {
        start_ns: 1_200_000_000,
        threads: 2,
        ..IntervalJob::new(program)
    };
    let mut machine =
        IntervalMachine::new(&sample_spec(), exact_options(), vec![restarting, late_job]).unwrap();
    machine.set_first_window(WindowLength::Time { ns: 10_000_000_000 });
    let observation = machine.observe().unwrap().unwrap();
    assert_eq!(observation.end_reason, WindowEnd::TasksChanged);
    assert!(
        observation.tasks[0].exited
            && (observation.span.elapsed_ns as f64 / 5e8 - 1.0).abs() < 1e-3,
        "{observation:?}"
    );
    let mut ids = std::collections::BTreeSet::new();
    for _ in 0..12 {
        let observation = machine.observe().unwrap().unwrap();
        ids.extend(observation.tasks.iter().map(|task| task.task));
        assert!(observation.tasks.len() <= 4);
    }
    assert!(ids.len() >= 6, "{ids:?}");
}

/// Do events take a CPU offline, start outside traffic that evicts lines, and shrink a cache?
#[test]
fn events_take_cpus_offline_start_traffic_and_shrink_caches() {
    let traffic = |at_ns: u64, lines_per_second: f64| MachineEvent {
        at_ns,
        external_traffic: Some(ExternalTraffic {
            cache: 0,
            lines_per_second,
        }),
        ..MachineEvent::default()
    };

    let events = vec![
        traffic(2_000_000_000, 4e7),
        traffic(4_000_000_000, 0.0),
        MachineEvent {
            at_ns: 6_000_000_000,
            resize_cache: Some(CacheResize {
                cache: 0,
                size_share: 0.25,
            }),
            ..MachineEvent::default()
        },
        MachineEvent {
            at_ns: 8_000_000_000,
            offline: Some(0),
            ..MachineEvent::default()
        },
    ];

    let pinned = IntervalJob {
        pinned: Some([0, 1].into_iter().collect()),
        ..sample_job("a", uniform_phase(50_000.0, 0.01))
    };
    let options = Options {
        events,
        length_ns: Some(10_000_000_000),
        ..exact_options()
    };
    let mut machine = IntervalMachine::new(&sample_spec(), options, vec![pinned]).unwrap();
    let mut speeds = Vec::new();
    let mut cpus = Vec::new();
    while let Some(observation) = machine.observe().unwrap() {
        speeds.push(instr_per_cycle(&observation, 0));
        cpus.push(observation.tasks[0].cpu.unwrap().0);
        assert!(observation.tasks.len() == 1, "who is outside is not seen");
    }
    assert_eq!(speeds.len(), 10);
    assert!(speeds[3] < 0.9 * speeds[1], "{speeds:?}");
    assert!(
        speeds[5] > 0.98 * speeds[1] && speeds[7] < 0.8 * speeds[1],
        "{speeds:?}"
    );
    assert_eq!((cpus[1], cpus[9]), (0, 1));
    assert!(!machine.topology().cpus[0].online);
    let bad_options = Options {
        events: vec![MachineEvent {
            offline: Some(99),
            ..MachineEvent::default()
        }],
        ..exact_options()
    };
    assert!(IntervalMachine::new(&sample_spec(), bad_options, Vec::new()).is_err());
}

/// Do rows run together and alone and are they counted meanwhile, and do the other tasks get the CPUs afterwards?
#[test]
fn rows_are_run_together_and_counted() {
    let names = ["a", "b", "c"];
    let jobs = names
        .iter()
        .map(|name| sample_job(name, uniform_phase(50_000.0, 0.02)))
        .collect();
    let mut machine = IntervalMachine::new(&sample_spec(), exact_options(), jobs).unwrap();
    let observation = machine.observe().unwrap().unwrap();
    let ids: Vec<TaskId> = observation.tasks.iter().map(|task| task.task).collect();
    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
    let rows = vec![vec![ids[0], ids[1]], vec![ids[2]]];
    let probe_kind = ProbeKind::CoRunRows {
        cache: last_cache(&machine),
        rows: rows.clone(),
        total_ns: 50_000_000,
        settle_ns: 20_000_000,
        boost: true,
    };
    plan.probes = vec![ProbeRequest {
        id: ProbeId(5),
        kind: probe_kind,
        budget_ns: 1_000_000_000,
    }];
    machine.apply(&plan).unwrap();
    let observation = machine.observe().unwrap().unwrap();
    assert_eq!(observation.end_reason, WindowEnd::ProbeAnswered);

    assert!(
        (140_000_000..150_000_000).contains(&observation.span.elapsed_ns),
        "{:?}",
        observation.span
    );
    let ProbeEvidence::Rows(found) = &observation.probe_results[0].evidence else {
        panic!("{:?}", observation.probe_results)
    };
    assert_eq!(
        found
            .iter()
            .map(|row| row.tasks.clone())
            .collect::<Vec<_>>(),
        rows
    );
    assert!(
        found
            .iter()
            .all(|row| row.cache_counts.get(CounterEvent::Instructions).unwrap() > 1e6)
    );
    // The same probe is not answered twice, and all tasks run again.
    let observation = machine.observe().unwrap().unwrap();
    assert!(
        observation.probe_results.is_empty()
            && observation
                .tasks
                .iter()
                .all(|task| !task.on_cpu_ns.is_empty())
    );
}

/// Do two probes that hold CPUs run one after the other, and are both answered?
#[test]
fn probes_that_hold_cpus_wait_for_each_other() {
    let jobs = (0..4)
        .map(|index| sample_job(&format!("p{index}"), uniform_phase(50_000.0, 0.02)))
        .collect();
    let mut machine = IntervalMachine::new(&sample_spec(), exact_options(), jobs).unwrap();
    let observation = machine.observe().unwrap().unwrap();
    let ids: Vec<TaskId> = observation.tasks.iter().map(|task| task.task).collect();
    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
    let caches: Vec<CacheId> = machine
        .topology()
        .last_level_caches()
        .map(|cache| cache.id)
        .collect();

    for (index, cache) in caches.into_iter().enumerate() {
        let rows = vec![vec![ids[2 * index], ids[2 * index + 1]]];
        let probe_kind = ProbeKind::CoRunRows {
            cache,
            rows,
            total_ns: 50_000_000,
            settle_ns: 20_000_000,
            boost: true,
        };
        plan.probes.push(ProbeRequest {
            id: ProbeId(index as u32),
            kind: probe_kind,
            budget_ns: 1_000_000_000,
        });
    }

    assert_eq!(plan.probes.len(), 2);
    machine.apply(&plan).unwrap();
    let answered: Vec<(ProbeId, u64)> = (0..2)
        .map(|_| {
            let observation = machine.observe().unwrap().unwrap();
            (
                observation.probe_results[0].probe,
                observation.span.elapsed_ns,
            )
        })
        .collect();
    assert_eq!(
        answered.iter().map(|(probe, _)| *probe).collect::<Vec<_>>(),
        [ProbeId(0), ProbeId(1)]
    );
    assert!(
        answered
            .iter()
            .all(|(_, ns)| (69_000_000..80_000_000).contains(ns)),
        "{answered:?}"
    );
}

/// Does applying a plan again change nothing, and is everything released when the plan is gone?
#[test]
fn a_repeated_plan_changes_nothing_and_a_gone_one_frees_all() {
    let jobs = (0..3)
        .map(|index| sample_job(&format!("p{index}"), uniform_phase(50_000.0, 0.02)))
        .collect();
    let mut machine = IntervalMachine::new(&sample_spec(), exact_options(), jobs).unwrap();
    let observation = machine.observe().unwrap().unwrap();
    let cache = last_cache(&machine);
    let idle_plan = Plan::idle(WindowLength::Time { ns: 100_000_000 });
    let mut plan = idle_plan.clone();
    plan.affinity
        .insert(observation.tasks[0].task, [0].into_iter().collect());
    plan.weights.insert(observation.tasks[1].task, 2.0);

    let share = |index: usize, mask: IndexSet| CacheShare {
        group: GroupId(index as u32),
        members: vec![ShareMember::Process(observation.tasks[index].process)],
        cache,
        units: Units::Ways { mask },
    };
    plan.shares = vec![share(0, (0..4).collect()), share(1, (4..16).collect())];
    let applied = machine.apply(&plan).unwrap();
    assert_eq!(machine.apply(&plan).unwrap(), applied);

    assert_eq!(
        (
            applied.affinity.len(),
            applied.weights.len(),
            applied.shares.len()
        ),
        (1, 1, 2)
    );
    let freed = machine.apply(&idle_plan).unwrap();
    assert!(
        freed.affinity.is_empty() && freed.weights.is_empty() && freed.shares.is_empty(),
        "{freed:?}"
    );
    // Beside a request that no cache of the machine can fulfill.
    plan.shares[0].cache = CacheId(99);
    let refused = machine.apply(&plan).unwrap().refused;
    assert_eq!(
        refused.iter().map(|no| &no.item).collect::<Vec<_>>(),
        [&PlanItem::Share(GroupId(0), CacheId(99))]
    );
}

/// The window in which a log of 160 000 entries is recorded under a plan, and its lines.
fn record_miss_trace(
    machine: &mut IntervalMachine,
    mut plan: Plan,
    task: TaskId,
) -> (Observation, Vec<u64>) {
    let probe_kind = ProbeKind::MissTrace {
        task,
        entries: 160_000,
        includes_code: false,
    };
    plan.probes = vec![ProbeRequest {
        id: ProbeId(1),
        kind: probe_kind,
        budget_ns: 10_000_000_000,
    }];
    machine.apply(&plan).unwrap();
    let mut observation = machine.observe().unwrap().unwrap();
    let ProbeEvidence::Trace { lines, .. } = &mut observation.probe_results[0].evidence else {
        panic!("{:?}", observation.probe_results)
    };

    let lines = std::mem::take(lines);
    assert_eq!(lines.len(), 160_000);
    (observation, lines)
}

/// Does an LRU analysis of the trace recover the curve that it was drawn from, at the cost of its interrupts?
#[test]
fn lru_analysis_of_a_trace_recovers_the_programs_curve() {
    let mut machine = IntervalMachine::new(
        &sample_spec(),
        exact_options(),
        vec![sample_job("a", uniform_phase(40_000.0, 0.02))],
    )
    .unwrap();
    let observation = machine.observe().unwrap().unwrap();
    let plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
    let (logged_window, lines) = record_miss_trace(&mut machine, plan, observation.tasks[0].task);
    // 160 000 interrupts of 3 000 cycles at 2 GHz are 240 ms.
    assert!(
        (240_000_000..300_000_000).contains(&logged_window.span.elapsed_ns),
        "{:?}",
        logged_window.span
    );
    let mut last = std::collections::BTreeMap::new();
    let mut reuse_count = 0;
    for (index, line) in lines.iter().enumerate() {
        reuse_count += u32::from(last.insert(*line, index).is_some());
    }
    // Lines are equally likely: after this many accesses nearly all of the 40 000 have been touched.
    assert!(last.len() > 38_000 && last.len() < 50_000, "{}", last.len());
    assert!(reuse_count > 100_000);
}

/// Does a log last for its interrupts and the instructions between them, and no longer, although the task loses lines
/// to its neighbor meanwhile?
#[test]
fn a_log_takes_no_longer_than_its_entries() {
    let jobs = vec![
        sample_job("victim", uniform_phase(60_000.0, 0.02)),
        sample_job("stream", closed_form::stream_phase(64.0, LINES, 0.02)),
    ];
    let mut machine = IntervalMachine::new(&sample_spec(), exact_options(), jobs).unwrap();
    let observation = machine.observe().unwrap().unwrap();
    let mut plan = Plan::idle(WindowLength::Time { ns: 10_000_000_000 });
    let pinned =
        |task: &cachemate_core::TaskSample, cpu: u32| (task.task, [cpu].into_iter().collect());
    plan.affinity = [
        pinned(&observation.tasks[0], 0),
        pinned(&observation.tasks[1], 1),
    ]
    .into();
    machine.apply(&plan).unwrap();
    machine.observe().unwrap();
    let (logged_window, _) = record_miss_trace(&mut machine, plan, observation.tasks[0].task);

    // 240 ms of interrupts; 8 million instructions that all miss take 5 cycles each at 2 GHz, which is 20 ms.
    assert!(
        (235_000_000..265_000_000).contains(&logged_window.span.elapsed_ns),
        "{:?}",
        logged_window.span
    );
}

/// Does a task whose log is canceled run as fast as before?
#[test]
fn a_canceled_log_costs_nothing_more() {
    let mut machine = IntervalMachine::new(
        &sample_spec(),
        exact_options(),
        vec![sample_job("a", uniform_phase(40_000.0, 0.02))],
    )
    .unwrap();
    machine.observe().unwrap();
    let speed_of = |machine: &mut IntervalMachine| {
        let observation = machine.observe().unwrap().unwrap();
        observation.tasks[0]
            .counts
            .get(CounterEvent::Instructions)
            .unwrap()
            / observation.span.elapsed_ns as f64
    };
    let speed_before = speed_of(&mut machine);
    let task = machine.observe().unwrap().unwrap().tasks[0].task;
    let idle_plan = Plan::idle(WindowLength::Time { ns: 100_000_000 });
    let mut plan = idle_plan.clone();

    let probe_kind = ProbeKind::MissTrace {
        task,
        entries: 16_000_000,
        includes_code: false,
    };
    plan.probes = vec![ProbeRequest {
        id: ProbeId(1),
        kind: probe_kind,
        budget_ns: 10_000_000_000,
    }];
    machine.apply(&plan).unwrap();
    assert!(speed_of(&mut machine) < 0.5 * speed_before, "it is logged");
    machine.apply(&idle_plan).unwrap();
    assert!(
        (speed_of(&mut machine) / speed_before - 1.0).abs() < 0.01,
        "nobody logs it"
    );
}

/// Are probes that need sets, and plans for exited tasks, rejected by name?
#[test]
fn impossible_probes_and_plans_are_rejected_by_name() {
    let mut machine = IntervalMachine::new(
        &sample_spec(),
        exact_options(),
        vec![sample_job("a", uniform_phase(40_000.0, 0.02))],
    )
    .unwrap();
    let observation = machine.observe().unwrap().unwrap();
    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
    let level = cachemate_core::CacheLevel::L2;
    let probe_kind = ProbeKind::SuperSets {
        tasks: vec![observation.tasks[0].task],
        level,
        super_sets: 32,
    };

    plan.probes = vec![ProbeRequest {
        id: ProbeId(1),
        kind: probe_kind,
        budget_ns: 1,
    }];
    plan.weights.insert(TaskId(77), 2.0);
    let applied = machine.apply(&plan).unwrap();
    let items: Vec<&PlanItem> = applied
        .refused
        .iter()
        .map(|refused| &refused.item)
        .collect();
    assert_eq!(
        items,
        [&PlanItem::Weight(TaskId(77)), &PlanItem::Probe(ProbeId(1))]
    );
    assert_eq!(applied.refused[1].reason, RefusalReason::NotSupported);
}

/// Does the same seed give the same bits, including observations with noise?
#[test]
fn the_same_seed_gives_the_same_observations() {
    let run = |seed: u64| {
        let jobs = vec![
            sample_job("a", uniform_phase(90_000.0, 0.02)),
            sample_job("b", uniform_phase(70_000.0, 0.01)),
        ];
        let options = Options {
            seed,
            has_explicit_turns: true,
            ..Options::default()
        };
        let mut machine = IntervalMachine::new(&sample_spec(), options, jobs).unwrap();
        (0..5)
            .map(|_| format!("{:?}", machine.observe().unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

/// Does a task that moves to another node leave its pages behind, and wait longer for each miss by the node's extra
/// latency, all counted as the other node's?
#[test]
fn a_task_on_another_node_waits_longer_for_its_far_pages() {
    let spec = crate::engine::tests::sample_machine(2, 1, 1, 1);
    let stream = closed_form::stream_phase(64.0, LINES, 0.02);
    let mut machine =
        IntervalMachine::new(&spec, exact_options(), vec![sample_job("stream", stream)]).unwrap();
    machine.observe().unwrap();
    let local_window = machine.observe().unwrap().unwrap();
    let lies_on = local_window.tasks[0].cpu.unwrap().0 as usize;
    let pages = local_window.tasks[0].pages_per_node.clone().unwrap();
    assert!(pages[lies_on] > 0 && pages[1 - lies_on] == 0, "{pages:?}");
    let mut plan = Plan::idle(WindowLength::Time { ns: 100_000_000 });
    plan.affinity.insert(
        local_window.tasks[0].task,
        [1 - lies_on as u32].into_iter().collect(),
    );
    assert_eq!(machine.apply(&plan).unwrap().refused, []);
    machine.observe().unwrap();
    let remote_window = machine.observe().unwrap().unwrap();
    let stalls_per_miss = |observation: &Observation, cause: StallCause| {
        let counts = &observation.tasks[0].counts;
        counts.get(CounterEvent::StallCycles(cause)).unwrap()
            / counts
                .get(CounterEvent::Misses(cachemate_core::CacheLevel::L2))
                .unwrap()
    };
    let (local, remote) = (StallCause::LocalMemory, StallCause::RemoteMemory);
    assert_eq!(
        (
            stalls_per_miss(&local_window, remote),
            stalls_per_miss(&remote_window, local)
        ),
        (0.0, 0.0)
    );
    assert!(
        (stalls_per_miss(&remote_window, remote) / stalls_per_miss(&local_window, local) - 1.5)
            .abs()
            < 0.01,
        "{} {}",
        stalls_per_miss(&remote_window, remote),
        stalls_per_miss(&local_window, local)
    );
    assert!(instr_per_cycle(&remote_window, 0) < 0.8 * instr_per_cycle(&local_window, 0));
    assert_eq!(remote_window.tasks[0].pages_per_node, Some(pages));
}

/// Do threads of one process have their pages where its first thread ran, and does a machine with one node report none?
#[test]
fn threads_share_the_pages_of_their_process() {
    let two_threads = IntervalJob {
        threads: 2,
        ..sample_job("threads", uniform_phase(1000.0, 0.01))
    };
    let spec = crate::engine::tests::sample_machine(2, 1, 1, 1);
    let mut machine =
        IntervalMachine::new(&spec, exact_options(), vec![two_threads.clone()]).unwrap();
    machine.observe().unwrap();
    let observation = machine.observe().unwrap().unwrap();
    assert_ne!(observation.tasks[0].cpu, observation.tasks[1].cpu);
    assert!(
        observation.tasks[0].pages_per_node.is_some()
            && observation.tasks[0].pages_per_node == observation.tasks[1].pages_per_node
    );
    let mut one_process =
        IntervalMachine::new(&self::sample_spec(), exact_options(), vec![two_threads]).unwrap();
    assert_eq!(
        one_process.observe().unwrap().unwrap().tasks[0].pages_per_node,
        None
    );
}
