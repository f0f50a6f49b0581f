//! Tests the machine through its trait, with programs whose behavior is known.

use cachemate_core::test_support::{machine_spec, memory_spec};
use cachemate_core::{
    Access, AccessSource, BatchEnd, CacheLevel, CacheShare, CoherenceSpec, CounterEvent, CpuId,
    CpuSet, Gang, GangSchedule, GroupId, IndexSet, Machine, MachineSpec, Observation, OsSpec,
    PageMigration, PageSpec, Plan, ProcessId, ShareMember, TaskId, Units, WindowEnd, WindowLength,
};

pub(crate) use crate::hw::tests::sample_cache;

use super::{RunLimit, SimMachine, SimOptions, SimProgram};

pub(crate) const NS_PER_MS: u64 = 1_000_000;

/// Two packages of two cores, with 256 KB of L2 in four colors per package. The clock of 100 MHz
/// makes a millisecond short.
pub(crate) fn sample_spec() -> MachineSpec {
    MachineSpec {
        hertz: 100_000_000,
        packages: 2,
        cores_per_package: 2,
        coherence: CoherenceSpec {
            same_package_cycles: Some(30),
            other_package_cycles: Some(60),
        },
        memory: memory_spec(64 << 20, 100, 8.0),
        pages: PageSpec {
            colors: Some(4),
            ..PageSpec::default()
        },
        os: OsSpec {
            context_switch_cycles: 300,
            migration_cycles: 300,
            time_slice_ns: NS_PER_MS,
        },
        ..machine_spec(vec![
            sample_cache(CacheLevel::L1Data, 8 << 10, 4, 1, 1),
            sample_cache(CacheLevel::L2, 256 << 10, 16, 10, 2),
        ])
    }
}

/// A program that loads a footprint line by line, and sleeps, exits or posts as configured.
pub(crate) struct FootprintSweep {
    pub base: u64,
    pub lines: u64,
    pub line_index: u64,
    pub max_accesses: Option<u64>,
    pub accesses_done: u64,
    pub sleep_cycle: Option<(u64, u64)>,
}

impl FootprintSweep {
    pub(crate) fn endless(bytes: u64) -> Self {
        FootprintSweep {
            base: 1 << 20,
            lines: bytes / 64,
            line_index: 0,
            max_accesses: None,
            accesses_done: 0,
            sleep_cycle: None,
        }
    }
}

impl AccessSource for FootprintSweep {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        let done_before = self.accesses_done;
        for _ in 0..500 {
            if self
                .max_accesses
                .is_some_and(|total| self.accesses_done >= total)
            {
                return BatchEnd::Exit;
            }

            batch.push(Access::load(
                self.base + self.line_index % self.lines * 64,
                3,
            ));
            self.line_index += 1;
            self.accesses_done += 1;
        }

        match self.sleep_cycle {
            Some((accesses_per_sleep, ns))
                if done_before / accesses_per_sleep != self.accesses_done / accesses_per_sleep =>
            {
                BatchEnd::Sleep { ns }
            }
            _ => BatchEnd::More,
        }
    }
    fn progress(&self) -> Option<f64> {
        Some(self.accesses_done as f64)
    }
}

pub(crate) fn sweep_program(name: &str, bytes: u64) -> SimProgram {
    SimProgram::new(
        name,
        Box::new(move |_| vec![Box::new(FootprintSweep::endless(bytes)) as Box<dyn AccessSource>]),
    )
}

pub(crate) fn sample_machine(programs: Vec<SimProgram>) -> SimMachine {
    SimMachine::new(&sample_spec(), &SimOptions::default(), programs).unwrap()
}

pub(crate) fn idle_plan(ms: u64) -> Plan {
    Plan::idle(WindowLength::Time { ns: ms * NS_PER_MS })
}

fn ran_ns_by_cpu(observation: &Observation, task: usize) -> Vec<(u32, u64)> {
    observation.tasks[task]
        .on_cpu_ns
        .iter()
        .map(|(cpu, ns)| (cpu.0, *ns))
        .collect()
}

fn observe_window(machine: &mut SimMachine, plan: &Plan) -> Observation {
    machine.apply(plan).unwrap();
    machine.observe().unwrap().unwrap()
}

/// Do tasks run exactly where the plan allows, in a window of the requested length?
#[test]
fn affinity_is_obeyed_exactly_and_windows_have_their_length() {
    let mut machine = sample_machine((0..3).map(|_| sweep_program("sweep", 4096)).collect());
    let mut plan = idle_plan(20);
    let one_cpu = |cpu: u32| -> CpuSet { [cpu].into_iter().collect() };
    plan.affinity = [
        (TaskId(0), one_cpu(2)),
        (TaskId(1), one_cpu(2)),
        (TaskId(2), one_cpu(3)),
    ]
    .into_iter()
    .collect();
    let observation = observe_window(&mut machine, &plan);
    assert_eq!(
        (observation.span.elapsed_ns, observation.end_reason),
        (20 * NS_PER_MS, WindowEnd::Elapsed)
    );
    assert_eq!(ran_ns_by_cpu(&observation, 2), [(3, 20 * NS_PER_MS)]);
    let shares: Vec<u64> = (0..2)
        .map(|task| ran_ns_by_cpu(&observation, task)[0].1)
        .collect();
    assert_eq!(shares.iter().sum::<u64>(), 20 * NS_PER_MS);
    assert!(
        shares
            .iter()
            .all(|&ns| ns.abs_diff(10 * NS_PER_MS) <= NS_PER_MS),
        "{shares:?}"
    );
    assert_eq!(
        observation.tasks[0].run_queue_wait_ns,
        Some(20 * NS_PER_MS - shares[0])
    );
    assert_eq!(observation.applied.affinity, plan.affinity);
}

/// Do gangs take turns of exactly the scheduled lengths on their CPUs, while other tasks run on the other CPUs?
#[test]
fn gangs_take_their_turns_to_the_cycle() {
    let mut machine = sample_machine((0..5).map(|_| sweep_program("sweep", 4096)).collect());
    let mut plan = idle_plan(60);
    let gang_of = |tasks: &[u32], slices| Gang {
        members: tasks.iter().map(|&t| (TaskId(t), None)).collect(),
        slices,
    };
    let gangs = vec![gang_of(&[0, 1], 2), gang_of(&[2], 1)];
    plan.gangs = vec![GangSchedule {
        cpus: [0, 1].into_iter().collect(),
        slice_ns: 2 * NS_PER_MS,
        gangs,
    }];

    let observation = observe_window(&mut machine, &plan);
    let total_ns = |task| {
        ran_ns_by_cpu(&observation, task)
            .iter()
            .map(|(_, ns)| ns)
            .sum::<u64>()
    };
    assert_eq!(
        (total_ns(0), total_ns(1), total_ns(2)),
        (40 * NS_PER_MS, 40 * NS_PER_MS, 20 * NS_PER_MS)
    );
    assert_eq!((total_ns(3), total_ns(4)), (60 * NS_PER_MS, 60 * NS_PER_MS));
    assert!((0..3).all(|task| {
        ran_ns_by_cpu(&observation, task)
            .iter()
            .all(|(cpu, _)| *cpu < 2)
    }));
    assert!((3..5).all(|task| {
        ran_ns_by_cpu(&observation, task)
            .iter()
            .all(|(cpu, _)| *cpu >= 2)
    }));
    assert_eq!(observation.applied.gangs, plan.gangs);
    // The same plan again does not restart the turn.
    let next = observe_window(&mut machine, &plan);
    let total_ns = |task| {
        ran_ns_by_cpu(&next, task)
            .iter()
            .map(|(_, ns)| ns)
            .sum::<u64>()
    };
    assert_eq!((total_ns(0), total_ns(2)), (40 * NS_PER_MS, 20 * NS_PER_MS));
}

/// Does a window end when a task exits or arrives, is the exit reported once, and does the run end with the last task?
#[test]
fn arrivals_and_exits_end_the_window_and_are_reported_once() {
    let mut late_program = sweep_program("late", 4096);
    late_program.start_ns = 5 * NS_PER_MS;
    let short = || {
        Box::new(FootprintSweep {
            max_accesses: Some(20_000),
            ..FootprintSweep::endless(4096)
        }) as Box<dyn AccessSource>
    };
    let short_program = SimProgram::new("short", Box::new(move |_| vec![short()]));

    let options = SimOptions {
        ends: Some(RunLimit::Ns(40 * NS_PER_MS)),
        ..SimOptions::default()
    };
    let mut machine =
        SimMachine::new(&sample_spec(), &options, vec![short_program, late_program]).unwrap();
    machine.apply(&idle_plan(30)).unwrap();
    let first = machine.observe().unwrap().unwrap();
    let observations =
        std::iter::successors(Some(first), |_| machine.observe().unwrap()).collect::<Vec<_>>();
    assert_eq!(
        observations
            .iter()
            .map(|observation| observation.tasks.iter().filter(|t| t.exited).count())
            .sum::<usize>(),
        1
    );
    assert_eq!(
        observations
            .iter()
            .filter(|seen| seen.end_reason == WindowEnd::TasksChanged)
            .count(),
        2
    );
    let last = observations.last().unwrap();
    assert_eq!((last.tasks.len(), last.tasks[0].name.as_str()), (1, "late"));
    assert_eq!(last.span.start_ns + last.span.elapsed_ns, 40 * NS_PER_MS);
    assert_eq!(last.tasks[0].arrival_ns, 5 * NS_PER_MS);
}

/// Does the time scale divide the cycles but leave nominal times unchanged, so that policies cannot observe it?
#[test]
fn the_time_scale_divides_cycles_and_not_nominal_time() {
    let run_at_scale = |scale| {
        let options = SimOptions {
            scale,
            ..SimOptions::default()
        };
        let programs = (0..6).map(|_| sweep_program("sweep", 4096)).collect();
        let mut machine = SimMachine::new(&sample_spec(), &options, programs).unwrap();
        let observation = observe_window(&mut machine, &idle_plan(60));
        let ran_ns = observation
            .tasks
            .iter()
            .flat_map(|task| &task.on_cpu_ns)
            .map(|(_, ns)| ns)
            .sum::<u64>();
        (
            observation.span.elapsed_ns,
            ran_ns,
            observation.span.elapsed_cycles.unwrap(),
        )
    };

    let (whole, tenth) = (run_at_scale(1), run_at_scale(10));
    assert_eq!((whole.0, tenth.0), (60 * NS_PER_MS, 60 * NS_PER_MS));
    assert_eq!((whole.1, tenth.1), (4 * 60 * NS_PER_MS, 4 * 60 * NS_PER_MS));
    assert_eq!(whole.2, 10 * tenth.2);
}

/// Are a process's pages in its colors, even after a change under the running program, and is the progress reported?
#[test]
fn colors_hold_and_move_under_a_running_program() {
    let mut machine = sample_machine(vec![
        sweep_program("a", 400 << 10),
        sweep_program("b", 400 << 10),
    ]);
    let pages_by_color = |observation: &Observation, task: usize| {
        observation.tasks[task].pages_per_color.clone().unwrap()
    };
    let observation = observe_window(&mut machine, &idle_plan(20));
    assert_eq!(pages_by_color(&observation, 0).iter().sum::<u64>(), 100);
    assert!(
        pages_by_color(&observation, 0)
            .iter()
            .all(|&pages| pages > 0)
    );
    let color_set = |colors: &[u32]| -> IndexSet { colors.iter().copied().collect() };
    let mut colored_plan = idle_plan(20);
    let cache = machine.topology().last_level_caches().next().unwrap().id;
    colored_plan.shares = vec![CacheShare {
        group: GroupId(0),
        members: vec![ShareMember::Process(ProcessId(0))],
        cache,
        units: Units::Colors {
            allowed: color_set(&[1]),
            migration: PageMigration::All,
        },
    }];
    let applied = machine.apply(&colored_plan).unwrap();
    assert_eq!(applied.pending.len(), 1);
    let mut observation = machine.observe().unwrap().unwrap();
    for _ in 0..3 {
        observation = machine.observe().unwrap().unwrap();
    }
    assert_eq!(pages_by_color(&observation, 0), [0, 100, 0, 0]);
    assert_eq!(pages_by_color(&observation, 1).iter().sum::<u64>(), 100);
    assert_eq!(observation.applied.pending, []);
    assert_eq!(observation.applied.shares[0].pages_in_share, Some(1.0));
    // About 75 pages were copied at 11 051 cycles each at 100 MHz, and no other process is charged for them.
    let moved_pages = observation.applied.cost_ns as f64 / 110_510.0;
    assert!((60.0..90.0).contains(&moved_pages), "{moved_pages}");
}

/// Do sleepers and waiters leave their CPU to others, and is their progress reported per window?
#[test]
fn sleepers_leave_the_cpu_and_report_progress_per_window() {
    let new_sleeper = || {
        Box::new(FootprintSweep {
            sleep_cycle: Some((1000, NS_PER_MS)),
            ..FootprintSweep::endless(4096)
        }) as Box<dyn AccessSource>
    };
    let mut pinned_program = SimProgram::new("sleeper", Box::new(move |_| vec![new_sleeper()]));
    pinned_program.pinned_cpus = Some([0].into_iter().collect());
    let mut machine = sample_machine(vec![pinned_program]);
    let observation = observe_window(&mut machine, &idle_plan(50));
    assert!(observation.tasks[0].unmovable);

    let run_ns: u64 = ran_ns_by_cpu(&observation, 0)
        .iter()
        .map(|(_, ns)| ns)
        .sum();
    assert!(run_ns > 0 && run_ns < 10 * NS_PER_MS, "{run_ns}");
    let first = observation.tasks[0].progress.unwrap();
    let second = observe_window(&mut machine, &idle_plan(50)).tasks[0]
        .progress
        .unwrap();
    assert!(
        first > 10_000.0 && (second / first - 1.0).abs() < 0.1,
        "{first} {second}"
    );
    assert!(
        observation.tasks[0]
            .counts
            .get(CounterEvent::SystemCalls)
            .unwrap()
            > 40.0
    );
}

/// Do the same seed and programs give the same bits, run after run?
#[test]
fn the_same_seed_gives_the_same_observations() {
    let run_machine = || {
        let mut machine = sample_machine(
            (0..6)
                .map(|index| sweep_program("sweep", 100_000 + 50_000 * index))
                .collect(),
        );
        (0..4)
            .map(|_| observe_window(&mut machine, &idle_plan(10)))
            .collect::<Vec<_>>()
    };
    assert_eq!(run_machine(), run_machine());
}

/// Does each gang member run on the CPU that the plan names for it, and the other member on the remaining CPU?
#[test]
fn each_gang_member_runs_on_the_cpu_that_the_plan_names() {
    let mut machine = sample_machine((0..2).map(|_| sweep_program("sweep", 4096)).collect());
    let mut plan = idle_plan(10);
    let members = vec![(TaskId(0), Some(CpuId(3))), (TaskId(1), None)];
    let gangs = vec![Gang { members, slices: 1 }];
    plan.gangs = vec![GangSchedule {
        cpus: [2, 3].into_iter().collect(),
        slice_ns: NS_PER_MS,
        gangs,
    }];
    let observation = observe_window(&mut machine, &plan);
    assert_eq!(
        (
            ran_ns_by_cpu(&observation, 0),
            ran_ns_by_cpu(&observation, 1)
        ),
        (vec![(3, 10 * NS_PER_MS)], vec![(2, 10 * NS_PER_MS)])
    );
}
