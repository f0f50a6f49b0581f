//! Tests that every kind of probe is answered correctly, on programs whose behavior is known.

use cachemate_core::{
    Access, AccessSample, AccessSource, BatchEnd, CacheId, CacheLevel, CacheSpec, CounterEvent,
    CpuId, DataSource, Machine, Observation, Plan, ProbeEvidence, ProbeId, ProbeKind, ProbeRequest,
    ProbeResult, ProcessId, ReuseSample, RowInterval, SamplerModel, TaskId, WindowEnd,
};

use super::tests::{
    FootprintSweep, NS_PER_MS, idle_plan, sample_machine, sample_spec, sweep_program,
};
use super::{SimMachine, SimOptions, SimProgram};

const L2: CacheId = CacheId(4);

fn probe_plan(probe_kind: ProbeKind) -> Plan {
    let mut plan = idle_plan(20);
    plan.probes = vec![ProbeRequest {
        id: ProbeId(7),
        kind: probe_kind,
        budget_ns: 10_000 * NS_PER_MS,
    }];
    plan
}

/// Runs windows until the probe is answered completely, but no more than `max_windows` of them.
fn run_until_answered(
    machine: &mut SimMachine,
    plan: &Plan,
    max_windows: usize,
) -> (Vec<ProbeResult>, Vec<Observation>) {
    let applied = machine.apply(plan).unwrap();
    assert_eq!(applied.refused, []);
    let (mut results, mut windows) = (Vec::new(), Vec::new());
    for _ in 0..max_windows {
        let observation = machine.observe().unwrap().unwrap();
        results.extend(observation.probe_results.clone());
        windows.push(observation);
        if results.iter().any(|answer: &ProbeResult| answer.complete) {
            break;
        }
    }
    (results, windows)
}

fn row_intervals(answers: &[ProbeResult]) -> Vec<RowInterval> {
    let evidence = |answer: &ProbeResult| match &answer.evidence {
        ProbeEvidence::Rows(rows) => rows.clone(),
        _ => Vec::new(),
    };
    answers.iter().flat_map(evidence).collect()
}

/// Does a row run alone below its cache for the requested time, and count only its own events?
#[test]
fn rows_run_alone_below_their_cache_for_the_requested_time() {
    let mut machine = sample_machine(
        (0..5)
            .map(|index| sweep_program("sweep", 4096 << (3 * index)))
            .collect(),
    );
    machine.apply(&idle_plan(20)).unwrap();
    machine.observe().unwrap();
    let (total_ns, settle_ns) = (3 * NS_PER_MS, NS_PER_MS / 2);
    let requested_rows = vec![
        vec![TaskId(0), TaskId(1)],
        vec![TaskId(0), TaskId(2)],
        vec![TaskId(1)],
    ];
    let probe_kind = ProbeKind::CoRunRows {
        cache: L2,
        rows: requested_rows.clone(),
        total_ns,
        settle_ns,
        boost: true,
    };
    let (answers, windows) = run_until_answered(&mut machine, &probe_plan(probe_kind), 10);
    assert_eq!(windows.last().unwrap().end_reason, WindowEnd::ProbeAnswered);
    for row in requested_rows {
        let of_row: Vec<RowInterval> = row_intervals(&answers)
            .into_iter()
            .filter(|interval| interval.tasks == row)
            .collect();
        let ns: u64 = of_row.iter().map(|interval| interval.span.elapsed_ns).sum();
        assert!(
            (total_ns..total_ns + NS_PER_MS / 10).contains(&ns),
            "{row:?}: {ns}"
        );
        for interval in of_row {
            let misses = |counts: &cachemate_core::EventCounts| {
                counts
                    .get(CounterEvent::References(CacheLevel::L2))
                    .unwrap()
            };
            let task_references: f64 = interval.task_counts.iter().map(misses).sum();
            assert_eq!(
                misses(&interval.cache_counts),
                task_references,
                "nobody else used the cache"
            );
        }
    }
    // Once answered, the probe stays answered while the plan contains it, and the CPUs are open to all tasks again.
    let next = machine.observe().unwrap().unwrap();
    assert!(
        next.probe_results.is_empty()
            && next.tasks.iter().filter(|task| task.cpu.is_some()).count() == 4
    );
}

/// Is a row brought together although a plan confines all its members to one CPU, and do they return there afterward?
#[test]
fn a_row_is_brought_together_although_a_plan_confines_it() {
    let mut machine = sample_machine((0..4).map(|_| sweep_program("sweep", 4096)).collect());
    machine.apply(&idle_plan(20)).unwrap();
    machine.observe().unwrap();
    let row = vec![TaskId(0), TaskId(1)];
    let probe_kind = ProbeKind::CoRunRows {
        cache: L2,
        rows: vec![row.clone()],
        total_ns: 3 * NS_PER_MS,
        settle_ns: NS_PER_MS / 2,
        boost: true,
    };

    let mut plan_kept = probe_plan(probe_kind);
    plan_kept.affinity = row
        .iter()
        .map(|&task| (task, [1].into_iter().collect()))
        .collect();
    let (answers, _) = run_until_answered(&mut machine, &plan_kept, 10);
    assert!(
        answers.iter().any(|answer| answer.complete),
        "a row that never runs would hold its CPUs forever"
    );
    assert!(
        row_intervals(&answers)
            .iter()
            .all(|interval| interval.tasks == row)
    );
    let next = machine.observe().unwrap().unwrap();
    assert_eq!(next.applied.affinity[&TaskId(0)], [1].into_iter().collect());
    let ran_elsewhere = |task: usize| {
        next.tasks[task]
            .on_cpu_ns
            .iter()
            .any(|&(cpu, _)| cpu != CpuId(1))
    };
    assert!(!ran_elsewhere(0) && !ran_elsewhere(1));
}

/// Without a boost, are rows found as they occur, and reported with the task that ended them?
#[test]
fn rows_found_without_a_boost_name_the_task_that_ended_them() {
    let new_sleeper = || {
        Box::new(FootprintSweep {
            sleep_cycle: Some((5000, NS_PER_MS)),
            ..FootprintSweep::endless(4096)
        }) as Box<dyn AccessSource>
    };
    let mut programs = vec![
        SimProgram::new("sleeper", Box::new(move |_| vec![new_sleeper()])),
        sweep_program("sweep", 4096),
    ];
    programs[0].pinned_cpus = Some([0].into_iter().collect());
    programs[1].pinned_cpus = Some([1].into_iter().collect());
    let mut machine = sample_machine(programs);
    let (a, b) = (TaskId(0), TaskId(1));
    let paired_probe = ProbeKind::PairedRows {
        cache: L2,
        task: b,
        peers: vec![a],
        total_ns: 5 * NS_PER_MS,
    };

    let solo_probe = ProbeKind::CoRunRows {
        cache: L2,
        rows: vec![vec![b]],
        total_ns: 5 * NS_PER_MS,
        settle_ns: 0,
        boost: false,
    };

    for (kind, ended_by) in [(paired_probe, Some(a)), (solo_probe, None)] {
        let (answers, _) = run_until_answered(&mut machine, &probe_plan(kind), 20);
        let rows = row_intervals(&answers);
        let ns: u64 = rows.iter().map(|interval| interval.span.elapsed_ns).sum();
        assert!((5 * NS_PER_MS..6 * NS_PER_MS).contains(&ns), "{ns}");
        assert!(rows.len() >= 5, "{}", rows.len());
        let ended = rows
            .iter()
            .filter(|interval| interval.ended_by_task == ended_by)
            .count();
        assert!(
            ended + 3 > rows.len(),
            "{ended} of {} ended by {ended_by:?}",
            rows.len()
        );
        assert!(answers.iter().all(|answer| answer.cost_ns.is_empty()));
    }
}

/// Does a trace contain the physical lines of the L1 misses in order, as many as requested, with its cost reported?
#[test]
fn a_trace_is_the_misses_in_order() {
    let mut machine = sample_machine(vec![sweep_program("sweep", 64 << 10)]);
    let (answers, _) = run_until_answered(
        &mut machine,
        &probe_plan(ProbeKind::MissTrace {
            task: TaskId(0),
            entries: 3000,
            includes_code: false,
        }),
        50,
    );
    let ProbeEvidence::Trace {
        lines,
        lost,
        counts,
        line_bytes,
        ..
    } = &answers[0].evidence
    else {
        panic!()
    };
    assert_eq!(
        (lines.len(), *lost, *line_bytes, answers.len()),
        (3000, Some(0), 64, 1)
    );
    // A sweep of 64 KB in order through 8 KB misses every line, page by page in the order of the sweep.
    assert_eq!(
        counts.get(CounterEvent::Misses(CacheLevel::L1Data)),
        Some(3000.0)
    );
    assert!((0..3000 - 1024).all(|index| lines[index] == lines[index + 1024]));
    let runs = lines
        .windows(2)
        .filter(|pair| pair[1] == pair[0] + 1)
        .count();
    assert!(runs > 2900, "{runs}");
    assert_eq!(answers[0].cost_ns.len(), 1);
    let each_ns = answers[0].cost_ns[0].1 as f64 / 3000.0;
    assert!(
        (each_ns / 30_000.0 - 1.0).abs() < 0.01,
        "3000 cycles at 100 MHz each: {each_ns}"
    );
}

/// If requested, does the log contain every code fetch that missed, at its place among the data and at the same cost?
#[test]
fn a_requested_log_holds_every_code_fetch_that_missed() {
    let make_threads = |_| {
        crate::kernels::build_threads("crafty", 1, &crate::kernels::Options::default()).unwrap()
    };
    let mut spec = sample_spec();
    let code = CacheSpec {
        level: CacheLevel::L1Instruction,
        ..spec.caches[0].clone()
    };
    spec.caches.insert(0, code);
    let programs = vec![SimProgram::new("crafty", Box::new(make_threads))];
    let mut machine = SimMachine::new(&spec, &SimOptions::default(), programs).unwrap();

    let probe_kind = ProbeKind::MissTrace {
        task: TaskId(0),
        entries: 3000,
        includes_code: true,
    };
    let (answers, _) = run_until_answered(&mut machine, &probe_plan(probe_kind), 50);
    let ProbeEvidence::Trace {
        lines,
        code_positions: code,
        counts,
        ..
    } = &answers[0].evidence
    else {
        panic!()
    };
    let misses_at = |level| counts.get(CounterEvent::Misses(level)).unwrap();
    assert_eq!(
        (lines.len(), code.len() as f64),
        (3000, misses_at(CacheLevel::L1Instruction))
    );
    assert_eq!(
        (lines.len() - code.len()) as f64,
        misses_at(CacheLevel::L1Data)
    );
    assert!(
        code.len() > 300 && code.windows(2).all(|pair| pair[0] < pair[1]),
        "{}",
        code.len()
    );
    let (mut of_code, mut of_data): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
    for (index, &line) in lines.iter().enumerate() {
        if code.binary_search(&(index as u32)).is_ok() {
            of_code.push(line)
        } else {
            of_data.push(line)
        }
    }
    of_code.sort_unstable();
    assert!(
        of_data
            .iter()
            .all(|line| of_code.binary_search(line).is_err()),
        "code and data share no line"
    );
    let each_ns = answers[0].cost_ns[0].1 as f64 / 3000.0;
    assert!(
        (each_ns / 30_000.0 - 1.0).abs() < 0.01,
        "3000 cycles at 100 MHz each: {each_ns}"
    );
}

/// Is the log stopped at its budget, and is the stop reported?
#[test]
fn a_probe_is_stopped_at_its_budget() {
    let mut machine = sample_machine(vec![sweep_program("sweep", 64 << 10)]);
    let mut plan = probe_plan(ProbeKind::MissTrace {
        task: TaskId(0),
        entries: 1_000_000,
        includes_code: false,
    });
    plan.probes[0].budget_ns = 3 * NS_PER_MS;
    let (answers, windows) = run_until_answered(&mut machine, &plan, 50);
    let ProbeEvidence::Trace { lines, .. } = &answers[0].evidence else {
        panic!()
    };
    assert!((90..2000).contains(&lines.len()), "{}", lines.len());
    assert!(
        windows.last().unwrap().applied.refused[0]
            .message
            .contains("budget")
    );
}

/// Do samples come from the requested processes at about the requested rate, and do those from memory have that source?
#[test]
fn samples_keep_the_requested_rate_and_their_source() {
    let mut machine = sample_machine(vec![
        sweep_program("big", 4 << 20),
        sweep_program("other", 4 << 20),
    ]);
    let processes = vec![ProcessId(0)];
    let probe_kind = ProbeKind::AccessSamples {
        processes,
        sample_period: 20,
        remote_only: false,
        max_samples: 400,
    };
    let (answers, _) = run_until_answered(&mut machine, &probe_plan(probe_kind), 50);

    let (mut events, mut samples): (u64, Vec<AccessSample>) = (0, Vec::new());
    for answer in &answers {
        let ProbeEvidence::Samples {
            events: passed,
            samples: some,
            line_bytes: 64,
            ..
        } = &answer.evidence
        else {
            panic!()
        };
        events += passed;
        samples.extend(some);
    }
    assert_eq!(samples.len(), 400);
    assert!(
        (events as f64 / 400.0 / 20.0 - 1.0).abs() < 0.15,
        "{events}"
    );
    assert!(
        samples
            .iter()
            .all(|sample| sample.task == TaskId(0) && sample.source == DataSource::Memory)
    );
    assert!(
        samples
            .iter()
            .all(|sample| (1 << 20 >> 6..5 << 20 >> 6).contains(&sample.virtual_line))
    );
    assert!(samples.is_sorted_by_key(|sample| sample.at_ns));
}

/// Two threads that store to the same lines.
fn sharing_program() -> SimProgram {
    let new_source = || Box::new(Stores(0)) as Box<dyn AccessSource>;
    SimProgram::new(
        "sharers",
        Box::new(move |_| vec![new_source(), new_source()]),
    )
}
struct Stores(u64);
impl AccessSource for Stores {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        for _ in 0..200 {
            self.0 += 1;
            batch.push(Access::load((1 << 20) + self.0 % 64 * 64, 10));
            batch.push(Access::store((1 << 20) + self.0 % 64 * 64, 10));
        }
        BatchEnd::More
    }
}

/// Do samples of remote accesses contain only shared lines, and are there none without sharing?
#[test]
fn remote_samples_name_shared_lines_only() {
    let mut machine = sample_machine(vec![sharing_program(), sweep_program("alone", 1 << 20)]);
    let mut apart = probe_plan(ProbeKind::AccessSamples {
        processes: vec![ProcessId(0), ProcessId(1)],
        sample_period: 5,
        remote_only: true,
        max_samples: 100,
    });
    apart.affinity = [
        (TaskId(0), [0].into_iter().collect()),
        (TaskId(1), [2].into_iter().collect()),
    ]
    .into();
    let (answers, _) = run_until_answered(&mut machine, &apart, 50);
    let ProbeEvidence::Samples { samples, .. } = &answers.last().unwrap().evidence else {
        panic!()
    };

    assert!(!samples.is_empty());
    assert!(
        samples
            .iter()
            .all(|sample| sample.source == DataSource::RemoteCache && sample.task != TaskId(2))
    );
}

/// Is the reuse time of a cyclic sweep the number of its lines minus one?
#[test]
fn a_sweeps_reuse_time_is_its_number_of_lines_minus_one() {
    let mut machine = sample_machine(vec![sweep_program("sweep", 500 * 64)]);
    let (answers, _) = run_until_answered(
        &mut machine,
        &probe_plan(ProbeKind::ReuseTimes {
            task: TaskId(0),
            locations: 20,
        }),
        200,
    );
    let reuses = |answer: &ProbeResult| match &answer.evidence {
        ProbeEvidence::Reuses { samples, .. } => samples.clone(),
        _ => Vec::new(),
    };
    let samples: Vec<ReuseSample> = answers.iter().flat_map(reuses).collect();
    assert_eq!(samples.len(), 20);
    assert!(
        samples
            .iter()
            .all(|sample| sample.reused && sample.accesses == Some(499)),
        "{samples:?}"
    );
}

/// Does a program that uses a quarter of the sets appear in a quarter of the super sets?
#[test]
fn activity_shows_the_sets_in_use() {
    let mut machine = sample_machine(vec![sweep_program("quarter", 2048)]);
    let probe_kind = ProbeKind::SuperSets {
        tasks: vec![TaskId(0)],
        level: CacheLevel::L1Data,
        super_sets: 8,
    };
    let (answers, _) = run_until_answered(&mut machine, &probe_plan(probe_kind), 2);
    let ProbeEvidence::Activity {
        super_sets,
        level: CacheLevel::L1Data,
        ..
    } = &answers[1].evidence
    else {
        panic!()
    };

    // With 32 lines over 32 sets, every set is used equally, and nothing misses after the first window.
    assert!(
        super_sets
            .iter()
            .all(|set| set.accesses > 0 && set.misses == 0),
        "{super_sets:?}"
    );
    assert!(!answers[1].complete);
    let mut spec = sample_spec();
    spec.counters.sampler = SamplerModel::LastAddress;
    let mut real_machine = SimMachine::new(
        &spec,
        &SimOptions::default(),
        vec![sweep_program("quarter", 2048)],
    )
    .unwrap();
    let probe_kind = ProbeKind::SuperSets {
        tasks: vec![TaskId(0)],
        level: CacheLevel::L1Data,
        super_sets: 8,
    };
    assert_eq!(
        real_machine
            .apply(&probe_plan(probe_kind))
            .unwrap()
            .refused
            .len(),
        1
    );
}
