//! Tests invariants of whole runs: sums, independence, determinism, and the completeness of recordings.

use cachemate_core::{
    CacheLevel, CacheShare, CpuSet, GroupId, IndexSet, Machine, PageMigration, PartitionSupport,
    Plan, ProcessId, ShareMember, TaskId, Units, WindowLength,
};

use super::tests::{
    NS_PER_MS, idle_plan, sample_cache, sample_machine, sample_spec, sweep_program,
};
use super::{RunLimit, SimMachine, SimOptions};
use crate::os::schedulers::SchedulerKind;
use crate::results::RunResults;
use crate::run::run_alone;

fn run_for(ms: u64, scheduler: SchedulerKind, tasks: u64, seed: u64) -> RunResults {
    let options = SimOptions {
        seed,
        scheduler,
        ends: Some(RunLimit::Ns(ms * NS_PER_MS)),
        ..SimOptions::default()
    };
    let programs = (0..tasks)
        .map(|index| sweep_program("sweep", 20_000 + 60_000 * index))
        .collect();
    run_alone(&mut SimMachine::new(&sample_spec(), &options, programs).unwrap()).unwrap()
}

/// Do counters add up: every miss has one cause, tasks sum to caches, every cycle on a CPU has one owner, and no task
/// starves?
#[test]
fn counters_add_up_under_every_scheduler() {
    for scheduler in [
        SchedulerKind::Linux,
        SchedulerKind::Solaris,
        SchedulerKind::RoundRobin,
    ] {
        // Slices of Solaris last up to 200 ms, so the scale keeps the run short.
        let options = SimOptions {
            scheduler,
            scale: 20,
            ends: Some(RunLimit::Ns(60 * NS_PER_MS)),
            ..SimOptions::default()
        };
        let programs = (0..7)
            .map(|index| sweep_program("sweep", 20_000 + 60_000 * index))
            .collect();
        let results =
            run_alone(&mut SimMachine::new(&sample_spec(), &options, programs).unwrap()).unwrap();

        for task in &results.tasks {
            for level in &task.levels {
                assert_eq!(
                    level.misses,
                    level.cold + level.own + level.inter_task + level.coherence
                );
            }
            let stalls = &task.stall_cycles;
            let hits: f64 = stalls.hit.iter().map(|(_, cycles)| cycles).sum();
            let stalled = stalls.issue
                + hits
                + stalls.remote_cache
                + stalls.local_memory
                + stalls.remote_memory;
            let owned = task.instructions as f64 + stalled + stalls.queue + stalls.system;
            assert!(
                (owned - task.cycles as f64).abs() < 1.0,
                "{scheduler:?}: {owned} of {}",
                task.cycles
            );
            let on_cpu: u64 = task.on_cpu_cycles.iter().map(|(_, cycles)| cycles).sum();
            assert!(
                on_cpu.abs_diff(task.cycles) * 100 <= on_cpu,
                "{scheduler:?}: {on_cpu} {}",
                task.cycles
            );
            assert_eq!(
                on_cpu + task.wait_cycles,
                results.elapsed_cycles,
                "runs or waits, as it never sleeps"
            );
            assert!(
                task.run_time_share > 0.1,
                "{scheduler:?}: {}",
                task.run_time_share
            );
        }
        for level in [CacheLevel::L1Data, CacheLevel::L2] {
            let of_tasks = results
                .tasks
                .iter()
                .flat_map(|task| &task.levels)
                .filter(|counts| counts.level == level);
            let (references, misses) = of_tasks.fold((0, 0), |(r, m), counts| {
                (r + counts.references, m + counts.misses)
            });
            let of_caches = results.level_breakdown(level).unwrap();
            assert_eq!(
                (references, misses),
                (of_caches.references, of_caches.misses),
                "{scheduler:?} {level:?}"
            );
        }
        assert!(results.busy_share > 0.999, "{}", results.busy_share);
    }
}

/// Are results the same bits on one host thread and on many?
#[test]
fn runs_on_one_and_many_host_threads_give_the_same_bits() {
    let all_jobs = || {
        vec![
            (SchedulerKind::Linux, 1),
            (SchedulerKind::Solaris, 1),
            (SchedulerKind::Linux, 2),
        ]
    };
    let results: Vec<RunResults> = all_jobs()
        .into_iter()
        .map(|(kind, seed)| run_for(10, kind, 6, seed))
        .collect();

    let parallel_results: Vec<RunResults> = std::thread::scope(|scope| {
        let threads: Vec<_> = all_jobs()
            .into_iter()
            .map(|(kind, seed)| scope.spawn(move || run_for(10, kind, 6, seed)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(parallel_results, results);
    assert_ne!(results[0], results[2], "another seed is another run");
}

fn colored_plan(machine: &SimMachine, colors: [&[u32]; 2]) -> Plan {
    let cache = machine
        .capabilities()
        .partitions
        .iter()
        .find(|(_, support)| matches!(support, PartitionSupport::Colors { .. }))
        .unwrap()
        .0;

    let mut plan = idle_plan(30);
    plan.affinity = [
        (TaskId(0), [0].into_iter().collect()),
        (TaskId(1), [1].into_iter().collect()),
    ]
    .into();
    plan.shares = (0..2)
        .map(|index| CacheShare {
            group: GroupId(index),
            members: vec![ShareMember::Process(ProcessId(index))],
            cache,
            units: Units::Colors {
                allowed: colors[index as usize].iter().copied().collect::<IndexSet>(),
                migration: PageMigration::Never,
            },
        })
        .collect();
    plan
}

/// Do exclusive colors make a victim's cache statistics independent of its neighbor, whereas shared ones do not?
#[test]
fn exclusive_colors_make_the_victim_independent_of_its_neighbor() {
    let victim_misses = |victim_bytes: u64, neighbor_bytes: u64, colors: [&[u32]; 2]| {
        let programs = vec![
            sweep_program("victim", victim_bytes),
            sweep_program("neighbor", neighbor_bytes),
        ];
        let mut machine =
            SimMachine::new(&sample_spec(), &SimOptions::default(), programs).unwrap();
        machine.apply(&colored_plan(&machine, colors)).unwrap();
        machine.observe().unwrap();
        let results = machine.collect_results();
        let level = results.tasks[0]
            .levels
            .iter()
            .find(|level| level.level == CacheLevel::L2)
            .unwrap();
        (level.misses, level.inter_task)
    };

    let (own, others): (&[u32], &[u32]) = (&[0, 1], &[2, 3]);
    let alone_in_half = |neighbor_bytes| victim_misses(100 << 10, neighbor_bytes, [own, others]);
    let (quiet, greedy) = (alone_in_half(4 << 10), alone_in_half(2 << 20));
    // Bandwidth is still shared, so the victim makes less progress; every line misses at most once, and never because
    // of other tasks.
    assert_eq!((quiet.1, greedy.1), (0, 0));
    assert_eq!(quiet.0, greedy.0, "100 KB fit into half of 256 KB");
    // A sweep that hits keeps its lines under LRU; one that fills the cache completely cannot.
    let shared = victim_misses(248 << 10, 2 << 20, [&[0, 1, 2, 3], &[0, 1, 2, 3]]);
    assert!(shared.1 > 100, "{shared:?}");
}

/// Does a colored allocation touch only its sets?
#[test]
fn colored_programs_fill_the_sets_of_their_colors_and_no_others() {
    let programs = vec![
        sweep_program("low", 300 << 10),
        sweep_program("high", 2 << 20),
    ];
    let mut machine = SimMachine::new(&sample_spec(), &SimOptions::default(), programs).unwrap();
    machine
        .apply(&colored_plan(&machine, [&[0], &[2, 3]]))
        .unwrap();
    machine.observe().unwrap();
    let last = machine.topology().last_level_caches().next().unwrap().id;

    // The cache has 256 sets in four colors, and pages of 64 lines.
    let mut sets = [
        std::collections::BTreeSet::new(),
        std::collections::BTreeSet::new(),
    ];
    for (set, task) in machine.system.hw.lines_by_set(last) {
        sets[task.0 as usize].insert(set);
    }

    assert_eq!(
        sets[0],
        (0..64).collect(),
        "larger than its color's part, it fills all of that"
    );
    assert_eq!(sets[1], (128..256).collect());
}

/// Do exclusive way masks protect the victim equally, and are they read back?
#[test]
fn exclusive_ways_protect_the_victim_and_are_read_back() {
    let mut spec = sample_spec();
    spec.caches[1] = sample_cache(CacheLevel::L2, 256 << 10, 16, 10, 2);
    spec.caches[1].way_partitions = Some(cachemate_core::WayPartitions {
        groups: 4,
        min_ways: 1,
        contiguous: true,
    });

    let inter_task = |victim_bytes: u64, masks: Option<[CpuSet; 2]>| {
        let programs = vec![
            sweep_program("victim", victim_bytes),
            sweep_program("neighbor", 2 << 20),
        ];
        let mut machine = SimMachine::new(&spec, &SimOptions::default(), programs).unwrap();
        let mut plan = idle_plan(30);
        plan.affinity = [
            (TaskId(0), [0].into_iter().collect()),
            (TaskId(1), [1].into_iter().collect()),
        ]
        .into();
        let cache = machine.topology().last_level_caches().next().unwrap().id;
        for (index, mask) in masks.into_iter().flatten().enumerate() {
            let members = vec![ShareMember::Task(TaskId(index as u32))];
            plan.shares.push(CacheShare {
                group: GroupId(index as u32),
                members,
                cache,
                units: Units::Ways { mask },
            });
        }
        let applied = machine.apply(&plan).unwrap();
        assert_eq!(
            (applied.refused.len(), applied.shares.len()),
            (0, plan.shares.len())
        );
        let observation = machine.observe().unwrap().unwrap();
        if let Some(share) = observation.applied.shares.get(1) {
            assert!(share.occupancy_bytes.unwrap() <= 128 << 10);
        }
        machine.collect_results().tasks[0]
            .levels
            .last()
            .unwrap()
            .inter_task
    };
    assert_eq!(
        inter_task(100 << 10, Some([(0..8).collect(), (8..16).collect()])),
        0
    );
    assert!(
        inter_task(248 << 10, None) > 100,
        "without masks it is pushed out"
    );
}

/// Is a plan idempotent, that is, does applying it again change nothing, and is the state that is read back the same?
#[test]
fn applying_a_plan_again_changes_nothing() {
    let run_machine = |reapply: bool| {
        let mut machine = sample_machine(
            (0..3)
                .map(|index| sweep_program("sweep", 100_000 << index))
                .collect(),
        );
        let plan = colored_plan(&machine, [&[0], &[1, 2]]);
        let first = machine.apply(&plan).unwrap();
        if reapply {
            assert_eq!(machine.apply(&plan).unwrap(), first);
        }
        (machine.observe().unwrap(), machine.observe().unwrap())
    };
    assert_eq!(run_machine(false), run_machine(true));
}

/// Is a warm-up excluded from the results, and does a length in instructions end the run?
#[test]
fn a_warm_up_is_not_measured() {
    let options = SimOptions {
        warm_up: Some(RunLimit::Ns(10 * NS_PER_MS)),
        ends: Some(RunLimit::Instructions(500_000)),
        ..SimOptions::default()
    };
    let mut machine =
        SimMachine::new(&sample_spec(), &options, vec![sweep_program("sweep", 4096)]).unwrap();
    machine.set_first_window(WindowLength::Time { ns: 5 * NS_PER_MS });
    let results = run_alone(&mut machine).unwrap();
    let level = results.level_breakdown(CacheLevel::L2).unwrap();
    assert_eq!(level.misses, 0, "its 64 lines were in the cache before");
    assert!(
        (500_000..1_100_000).contains(&results.tasks[0].instructions),
        "{}",
        results.tasks[0].instructions
    );
}

/// Does a program whose memory is resident have no fault and no cold miss, and is it faster by exactly the cost of the
/// faults?
#[test]
fn resident_memory_takes_no_faults_and_no_cold_misses() {
    let run_sim = |is_resident: bool| {
        let options = SimOptions {
            is_resident,
            ends: Some(RunLimit::Instructions(400_000)),
            ..SimOptions::default()
        };
        let mut machine = SimMachine::new(
            &sample_spec(),
            &options,
            vec![sweep_program("sweep", 2 << 20)],
        )
        .unwrap();
        machine.set_first_window(WindowLength::Cycles { cycles: 5_000 });
        let results = run_alone(&mut machine).unwrap();
        (
            results.elapsed_cycles as f64,
            results.tasks[0].page_faults,
            results.level_breakdown(CacheLevel::L2).unwrap(),
        )
    };

    let ((charged, faults, cold), (resident, none, own)) = (run_sim(false), run_sim(true));
    assert_eq!((none, own.cold, own.own), (0, 0, own.misses));
    assert!(
        faults > 100 && cold.cold > 1_000,
        "{faults} faults, {cold:?}"
    );
    let cost = faults as f64 * sample_spec().pages.fault_cycles as f64;
    assert!(
        ((charged - resident) / cost - 1.0).abs() < 0.1,
        "{charged} and {resident} cycles, faults {cost}"
    );
}

/// Does each switch of the counters cost the busy CPU the configured amount, and nothing if that is 0?
#[test]
fn counter_switches_are_charged_to_the_busy_cpu() {
    let build_system = |counter_turn_cycles| {
        let ends = Some(RunLimit::Ns(98 * NS_PER_MS));
        let options = SimOptions {
            counter_turn_cycles,
            ends,
            ..SimOptions::default()
        };
        let mut machine =
            SimMachine::new(&sample_spec(), &options, vec![sweep_program("sweep", 4096)]).unwrap();
        machine.set_first_window(WindowLength::Time { ns: 10 * NS_PER_MS });
        run_alone(&mut machine).unwrap().tasks[0]
            .stall_cycles
            .system
    };
    // The counters are switched every 4 ms.
    assert_eq!(build_system(1_000) - build_system(0), 24.0 * 1_000.0);
}
