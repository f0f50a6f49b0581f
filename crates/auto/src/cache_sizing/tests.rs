//! Tests the policy window by window, on two CPUs that share a cache of sixteen colors or ways.

use super::*;
use crate::verifier::Verifier;
use cachemate_core::*;
use cachemate_papers::conformance::check_policy;
use cachemate_papers::reference_predictor::ReferencePredictor;

const BYTES: u64 = 16 << 16;
const COLORS: PartitionSupport = PartitionSupport::Colors {
    colors: 16,
    page_bytes: 4096,
    page_migration_ns: 7_000.0,
};
const WAYS: PartitionSupport = PartitionSupport::Ways {
    ways: 16,
    min_ways: 1,
    contiguous: true,
    max_groups: 4,
    device_ways: 0,
};

/// Parameters with which changes are made without a confirmation.
const AT_ONCE: &str = "confirms = false";

struct World {
    view: test_support::ViewFixture,
    tasks: Vec<TaskSample>,
    policy: Box<dyn Policy>,
    window: u64,
    /// Results of probes for the next window.
    probe_results: Vec<ProbeResult>,
}

/// A profile whose miss rate falls from `miss_rate` to `fit_rate` at `units`.
fn cliff_profile(units: u64, miss_rate: f64, fit_rate: f64) -> Profile {
    let rate = |units_held: u64| {
        Estimate::exact(if units_held >= units {
            fit_rate
        } else {
            miss_rate
        })
    };
    let curve = (1..=16)
        .map(|units_held| (BYTES * units_held / 16, rate(units_held)))
        .collect();
    Profile::default().with_misses(CacheLevel::L2, curve, FactSource::MissTrace)
}

impl World {
    fn new(partition: PartitionSupport, parameters: &str) -> Self {
        let topology = test_support::last_level_caches(1, 2, CacheLevel::L2, BYTES);
        let capabilities =
            test_support::capabilities_fixture(&[Ability::TraceAddresses, Ability::Penalties])
                .with_partition(CacheId(0), partition);
        World {
            view: test_support::ViewFixture::new(topology, capabilities, 0),
            tasks: Vec::new(),
            policy: build(parameters, 1).unwrap(),
            window: 0,
            probe_results: Vec::new(),
        }
    }

    /// Builds the same world as [`Self::needy_beside_stream`], with the verifier around the policy.
    fn verified_needy_beside_stream() -> Self {
        let mut world = World::needy_beside_stream(COLORS, "");
        world.policy = Box::new(Verifier::new(build("", 1).unwrap(), None));
        world
    }

    fn arrive(&mut self) -> TaskId {
        let id = self.tasks.len() as u32;
        self.tasks.push(TaskSample {
            name: format!("p{id}"),
            cpu: Some(CpuId(id % 2)),
            on_cpu_ns: vec![(CpuId(id % 2), 1000)],
            pages_per_color: Some(vec![10; 16]),
            ..TaskSample::new(TaskId(id), ProcessId(id))
        });
        TaskId(id)
    }

    /// Sets instructions, cycles and misses of each program for every window from now on.
    fn runs_at(&mut self, task_counts: &[(u64, u64, u64)]) {
        for (task, &(instructions, cycles, misses)) in self.tasks.iter_mut().zip(task_counts) {
            task.counts = EventCounts::exact([
                (CounterEvent::Instructions, instructions),
                (CounterEvent::Cycles, cycles),
                (CounterEvent::Misses(CacheLevel::L2), misses),
            ]);
        }
    }

    fn window(&mut self) -> Decision {
        let observation = test_support::observation_of(self.window, 1000, self.tasks.clone());
        self.view.observation = Observation {
            probe_results: std::mem::take(&mut self.probe_results),
            ..observation
        };
        self.window += 1;
        self.view.decide(
            self.policy.as_mut(),
            &ReferencePredictor {
                miss_penalty_cycles: 150.0,
            },
        )
    }

    /// Builds a world with one program that needs twelve units beside one that streams.
    fn needy_beside_stream(partition: PartitionSupport, parameters: &str) -> Self {
        let mut world = World::new(partition, parameters);
        let (needy, stream) = (world.arrive(), world.arrive());
        world
            .view
            .profiles
            .insert(needy, cliff_profile(12, 20.0, 1.0));
        world
            .view
            .profiles
            .insert(stream, cliff_profile(1, 30.0, 30.0));
        world.runs_at(&[
            (1_000_000, 3_000_000, 15_000),
            (1_000_000, 5_000_000, 30_000),
        ]);
        world
    }

    fn divided(&self) -> bool {
        self.view
            .previous_plan
            .shares
            .iter()
            .any(|share| share.units.set().count() < 16)
    }

    fn units(&self) -> Vec<String> {
        self.view
            .previous_plan
            .shares
            .iter()
            .map(|share| share.units.set().to_string())
            .collect()
    }
}

/// Are several curves requested at once, so that no program delays the others, is no cache partitioned before all are
/// known, and is the curve of a new phase requested before the phase proves to be of a known kind?
#[test]
fn curves_are_requested_before_a_cache_is_divided() {
    let mut world = World::new(COLORS, AT_ONCE);
    let (a, b) = (world.arrive(), world.arrive());
    world.runs_at(&[
        (1_000_000, 3_000_000, 15_000),
        (1_000_000, 5_000_000, 30_000),
    ]);

    let traced_tasks = |decision: &Decision| -> Vec<TaskId> {
        let traced = |probe: &ProbeRequest| match probe.kind {
            ProbeKind::MissTrace { task, .. } => Some(task),
            _ => None,
        };
        decision.plan.probes.iter().filter_map(traced).collect()
    };
    let first = world.window();
    assert_eq!(traced_tasks(&first), [a, b]);
    assert_eq!(
        world.window().plan.probes,
        first.plan.probes,
        "the same probe until it is answered"
    );
    world.view.profiles.insert(a, cliff_profile(12, 20.0, 1.0));
    let second = world.window();
    assert_eq!(traced_tasks(&second), [b]);
    assert!(second.plan.shares.is_empty());
    world.view.profiles.insert(b, cliff_profile(1, 30.0, 30.0));
    world.window();
    assert!(world.window().plan.probes.is_empty());
    assert_eq!(world.units(), ["0-11", "12-15"].map(str::to_string));
    world.view.profiles.get_mut(&a).unwrap().phase.kind =
        Some(Fact::new(0, FactSource::PhaseDetector, 0));
    world.window();
    world.view.profiles.insert(
        b,
        Profile {
            phase_number: 1,
            ..Profile::default()
        },
    );
    assert_eq!(traced_tasks(&world.window()), [b]);
}

/// The result of a trace that cost one nanosecond for each entry.
/// A log of a hundred entries for each nanosecond that it cost.
fn trace_result(probe: ProbeId, task: TaskId, cost_ns: u64) -> ProbeResult {
    ProbeResult {
        probe,
        evidence: ProbeEvidence::Trace {
            task,
            space: AddressKind::Virtual,
            line_bytes: 64,
            lines: vec![0; 100 * cost_ns as usize],
            code_positions: Vec::new(),
            lost: None,
            counts: EventCounts::default(),
            elapsed_ns: 1,
        },
        complete: true,
        cost_ns: vec![(Some(task), cost_ns)],
    }
}

/// Is each program traced at once, and a later phase only when all traces are paid for?
#[test]
fn a_later_phase_is_traced_once_all_traces_are_paid_for() {
    let mut world = World::new(COLORS, AT_ONCE);
    let tasks = [world.arrive(), world.arrive()];
    world.runs_at(&[
        (1_000_000, 3_000_000, 15_000),
        (1_000_000, 5_000_000, 30_000),
    ]);
    let requests = world.window().plan.probes;
    assert_eq!(requests.len(), 2);

    // Together, the traces cost one percent of 9,000, and both CPUs have 2,000 in each window.
    let results = requests
        .iter()
        .zip(tasks)
        .map(|(request, task)| trace_result(request.id, task, 45));
    world.probe_results = results.collect();
    world
        .view
        .profiles
        .insert(tasks[0], cliff_profile(12, 20.0, 1.0));

    world
        .view
        .profiles
        .insert(tasks[1], cliff_profile(1, 30.0, 30.0));
    assert!(world.window().plan.probes.is_empty());
    world.view.profiles.insert(
        tasks[1],
        Profile {
            phase_number: 1,
            ..Profile::default()
        },
    );
    let request_counts: Vec<usize> = (0..3).map(|_| world.window().plan.probes.len()).collect();
    assert_eq!(request_counts, [0, 0, 1]);
}

/// Is a log that was too short for the whole cache recorded once more, as soon as that is paid for, and only once?
#[test]
fn a_log_that_was_too_short_is_recorded_once_more() {
    let mut world = World::needy_beside_stream(COLORS, "confirms = false\ntrace_entries = 1000");
    let profile = world.view.profiles.get_mut(&TaskId(0)).unwrap();
    profile.phase.kind = Some(Fact::new(0, FactSource::PhaseDetector, 0));
    let curve = profile
        .locality
        .misses_per_kilo_instr
        .get_mut(&CacheLevel::L2)
        .unwrap();
    curve.value[15].1 = Estimate {
        value: 1.0,
        low: 0.0,
        high: 20.0,
    };
    // 10 and 40 are one percent of 5,000, and the programs run for 2,000 in each window.
    world.probe_results = vec![trace_result(ProbeId(99), TaskId(0), 10)];
    assert!(
        (0..2).all(|_| world.window().plan.probes.is_empty()),
        "it is not paid for"
    );
    let request = world.window().plan.probes;
    assert!(
        matches!(
            request[..],
            [ProbeRequest {
                kind: ProbeKind::MissTrace { entries: 4000, .. },
                ..
            }]
        ),
        "{request:?}"
    );
    assert_eq!(
        world.window().plan.probes,
        request,
        "the same probe until it is answered"
    );
    world.probe_results = vec![trace_result(request[0].id, TaskId(0), 40)];
    assert!((0..20).all(|_| world.window().plan.probes.is_empty()));
}

/// Does the program that needs space get it, both in colors and in contiguous ways?
#[test]
fn the_program_that_needs_space_gets_it() {
    for partition in [COLORS, WAYS] {
        let mut world = World::needy_beside_stream(partition, AT_ONCE);
        let decision = world.window();
        assert!(world.view.previous_plan.shares[0].members == [ShareMember::Process(ProcessId(0))]);
        assert!(
            world.view.previous_plan.shares[0].units.set().count() >= 12,
            "{:?}",
            world.units()
        );
        assert!(
            decision
                .reasons
                .iter()
                .any(|reason| reason.text.contains("partitioned")),
            "{:?}",
            decision.reasons
        );
    }
}

/// Runs windows in which both programs need this many cycles per million instructions, shared and partitioned. Returns
/// the number of windows in which the cache was partitioned, and the reasons.
fn run_windows(
    world: &mut World,
    windows: u32,
    shared: [u64; 2],
    divided: [u64; 2],
) -> (usize, Vec<Reason>) {
    let (mut reasons, mut windows_divided) = (Vec::new(), 0);
    for _ in 0..windows {
        // Both run for as many cycles in every window.
        let [a, b] = if world.divided() { divided } else { shared };
        let [a, b] = [a, b].map(|cycles| 5_000_000_000_000 / cycles);
        world.runs_at(&[(a, 5_000_000, a / 67), (b, 5_000_000, b / 33)]);
        windows_divided += usize::from(world.divided());
        reasons.extend(world.window().reasons);
    }
    (windows_divided, reasons)
}

/// Is a partition that makes no program faster dropped, and tried again with other co-runners?
#[test]
fn a_partition_that_measures_no_faster_is_dropped() {
    for divided in [[4_000_000, 6_000_000], [3_010_000, 5_000_000]] {
        let mut world = World::verified_needy_beside_stream();
        let (windows_divided, reasons) =
            run_windows(&mut world, 30, [3_000_000, 5_000_000], divided);
        assert!((1..20).contains(&windows_divided), "{windows_divided}");
        // All programs are in one group with all colors; without it, pages would stay in the colors of the partition.
        assert_eq!(world.units(), ["0-15"], "{reasons:?}");
        let is_rolled_back = |reason: &Reason| reason.kind == ReasonKind::RolledBack;
        assert!(reasons.iter().any(is_rolled_back), "{reasons:?}");

        let newcomer = world.arrive();
        let profile = cliff_profile(1, 30.0, 30.0);
        world.view.profiles.insert(newcomer, profile);
        let counts = world.tasks[1].counts.clone();
        world.tasks[2].counts = counts;
        let tries = |_| {
            world.window();
            world.divided()
        };
        assert!((0..40).any(tries), "new co-runners, new try");
    }
}

/// Is a partition that makes the programs faster kept?
#[test]
fn a_partition_that_measures_faster_stays() {
    let mut world = World::verified_needy_beside_stream();
    let (windows_divided, reasons) = run_windows(
        &mut world,
        50,
        [3_000_000, 5_000_000],
        [2_000_000, 5_000_000],
    );
    assert!(
        windows_divided > 20 && world.units().len() == 2,
        "{reasons:?}"
    );
}

/// If the set of co-runners changes while a partition is measured, is the cache shared again?
#[test]
fn a_partition_that_is_not_measured_to_its_end_is_undone() {
    let mut world = World::verified_needy_beside_stream();
    let mut windows = 0;
    while !world.divided() {
        world.window();
        windows += 1;
        assert!(windows < 40, "a partition is tried");
    }
    world.arrive();
    world.window();
    world.window();
    assert!(!world.divided(), "{:?}", world.units());
}

/// Are measured speeds used for the present state instead of the forecast?
#[test]
fn measured_speeds_replace_forecasts_of_the_present_state() {
    // Sharing costs the first program nothing here, although its curve predicts a loss.
    let mut world = World::needy_beside_stream(COLORS, AT_ONCE);
    world.runs_at(&[
        (1_000_000, 2_000_000, 1_000),
        (1_000_000, 5_000_000, 30_000),
    ]);
    world.window();
    world.window();
    assert!(
        world.view.previous_plan.shares.is_empty(),
        "{:?}",
        world.units()
    );
}

/// Do shares stay unchanged if the gain would not repay the copying in time?
#[test]
fn shares_stay_if_the_gain_would_not_repay_the_copying() {
    let mut world = World::needy_beside_stream(COLORS, "confirms = false\npayback_ns = 1000000");
    world.window();
    assert!(world.view.previous_plan.shares.is_empty());
    let mut ways = World::needy_beside_stream(WAYS, "confirms = false\npayback_ns = 1000000");
    ways.window();
    assert!(
        !ways.view.previous_plan.shares.is_empty(),
        "masks cost nothing to change"
    );
}

/// Is a goal sufficient reason to partition, whatever the cost?
#[test]
fn a_goal_causes_partitioning_whatever_the_cost() {
    let mut world = World::needy_beside_stream(COLORS, "payback_ns = 1000000");
    world.tasks[0].goal = Some(Goal {
        max_slowdown: Some(0.05),
        ..Goal::default()
    });
    world.window();
    assert!(
        world
            .view
            .previous_plan
            .shares
            .iter()
            .any(|share| share.units.set().count() >= 12),
        "{:?}",
        world.units()
    );
}

/// Is there a penalty between programs of one time-share group, and between no others?
#[test]
fn programs_of_one_lane_have_a_penalty() {
    let (mut world, tasks) = four_on_two_cpus();
    let penalties = world.window().plan.penalties;
    let pairs: Vec<(TaskId, TaskId)> = penalties.iter().map(|penalty| penalty.tasks).collect();
    assert_eq!(pairs, [(tasks[0], tasks[2]), (tasks[1], tasks[3])]);
}

/// Are lanes used only if the machine keeps members of one lane from running together?
#[test]
fn lanes_are_used_only_if_the_machine_keeps_them() {
    let (mut world, _) = four_on_two_cpus();
    world
        .view
        .capabilities
        .abilities
        .remove(&Ability::Penalties);
    let plan = world.window().plan;
    assert!(
        plan.penalties.is_empty() && plan.shares.iter().all(|share| share.members.len() == 1),
        "{plan:?}"
    );
}

fn four_on_two_cpus() -> (World, Vec<TaskId>) {
    let mut world = World::new(COLORS, AT_ONCE);
    let tasks: Vec<TaskId> = (0..4).map(|_| world.arrive()).collect();
    for (&task, units) in tasks.iter().zip([12, 4, 12, 4]) {
        world
            .view
            .profiles
            .insert(task, cliff_profile(units, 30.0, 1.0));
    }
    world.runs_at(&[(1_000_000, 4_000_000, 20_000); 4]);
    (world, tasks)
}

/// Is a process unrestricted again once its group ends?
#[test]
fn a_process_that_is_alone_again_is_unrestricted() {
    let mut world = World::needy_beside_stream(COLORS, AT_ONCE);
    world.window();
    assert_eq!(world.view.previous_plan.shares.len(), 2);
    world.tasks[1].exited = true;
    world.window();
    assert_eq!(world.units(), ["0-15"]);
    let mut ways = World::needy_beside_stream(WAYS, AT_ONCE);
    ways.window();
    ways.tasks[1].exited = true;
    ways.window();
    assert!(
        ways.view.previous_plan.shares.is_empty(),
        "masks leave nothing behind"
    );
}

/// Does the policy conform under every objective?
#[test]
fn every_objective_conforms() {
    for objective in ["weighted-speedup", "fairness"] {
        let parameters =
            format!("objective = '{objective}'\ninsensitive_below = 0.0\nmin_gain = 0.0");
        check_policy(&|seed| build(&parameters, seed).unwrap(), 16).unwrap();
    }
}

/// If measurements show that a goal is missed, does the program get more space than its curve requires until the goal
/// is met, and is a goal reported that no space can meet?
#[test]
fn a_goal_is_met_by_measurement() {
    let run = |cycles: fn(u32) -> u64| {
        let mut world = World::needy_beside_stream(COLORS, "");
        world.tasks[0].goal = Some(Goal {
            max_slowdown: Some(0.05),
            ..Goal::default()
        });
        let mut reasons = Vec::new();
        for _ in 0..200 {
            let units_held = world
                .view
                .previous_plan
                .shares
                .first()
                .map_or(8, |share| share.units.set().count());
            // The curve predicts one miss per thousand instructions from 12 units on.
            let misses = if units_held >= 12 { 1_000 } else { 15_000 }
                + (cycles(units_held) - cycles(16)) / 150;
            world.runs_at(&[
                (1_000_000, cycles(units_held), misses),
                (1_000_000, 5_000_000, 30_000),
            ]);
            reasons.extend(world.window().reasons);
        }
        (
            world.view.previous_plan.shares[0].units.set().count(),
            reasons,
        )
    };

    let (units, reasons) = run(|units_held| {
        if units_held >= 14 {
            2_000_000
        } else {
            2_000_000 + 200_000 * u64::from(16 - units_held)
        }
    });
    assert_eq!(units, 14, "{reasons:?}");
    assert!(
        reasons
            .iter()
            .all(|reason| !reason.text.contains("more space cannot meet")),
        "{reasons:?}"
    );
    let (units, reasons) = run(|units_held| 2_000_000 + 200_000 * u64::from(17 - units_held));
    assert_eq!(units, 15, "{reasons:?}");
    assert_eq!(
        reasons
            .iter()
            .filter(|reason| reason.text.contains("more space cannot meet"))
            .count(),
        1,
        "{reasons:?}"
    );
}
