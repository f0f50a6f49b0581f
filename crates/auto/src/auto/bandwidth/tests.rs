use cachemate_core::test_support::{
    NullPredictor, ViewFixture, capabilities_fixture, last_level_caches, observation_fixture,
};
use cachemate_core::{
    Ability, BandwidthUnit, CacheLevel, CpuId, EventCounts, Fact, FactSource, Goal, Observation,
    Policy, Profile, Profiles, RefusalReason, RefusedItem, WindowLength,
};

use super::super::{
    Auto, DecidedPlan, Mechanism, OpenChange, Parameters, PolicyPart, ProposalOrigin, SiteLayout,
};
use super::*;

const PERCENT: BandwidthSupport = BandwidthSupport {
    unit: BandwidthUnit::Percent,
    min_level: 10,
    step: 10,
    max_level: 100,
    max_groups: 8,
};

const EIGHTHS: BandwidthSupport = BandwidthSupport {
    unit: BandwidthUnit::EighthsOfGigabytePerSecond,
    min_level: 1,
    step: 1,
    max_level: 2048,
    max_groups: 16,
};

fn aggressor(process: u32, bytes: f64, lever: Lever) -> Aggressor {
    let full_level = match lever {
        Lever::Cpus => 4,
        Lever::Bandwidth(support) => support.max_level,
    };
    Aggressor {
        process: ProcessId(process),
        cache: CacheId(0),
        lever,
        bytes,
        full_level,
    }
}

/// Runs the rule for some windows with the slack and the aggressors that follow from the levels of processes 1 and 2.
/// The levels are those after each window.
fn run(
    windows: u64,
    lever: Lever,
    slack: impl Fn(u64, [u32; 2]) -> f64,
) -> (Vec<[u32; 2]>, NodeThrottles) {
    let mut node = NodeThrottles::default();
    let mut history = Vec::new();
    let full = aggressor(1, 1.0, lever).full_level;
    let mut levels = [full; 2];
    for window in 0..windows {
        // The second program moves half as many bytes as the first one without a limit.
        let bytes = [2.0, 1.0].map(|bytes| bytes / f64::from(full));
        let aggressors = [0, 1].map(|index| {
            let moved = bytes[index] * f64::from(levels[index]);
            aggressor(index as u32 + 1, moved, lever)
        });
        node.observe(slack(window, levels), &aggressors, window);
        levels = [1, 2].map(|process| {
            let throttle = node
                .throttles
                .iter()
                .find(|throttle| throttle.aggressor.process == ProcessId(process));
            throttle.map_or(full, |throttle| throttle.level)
        });
        history.push(levels);
    }

    (history, node)
}

fn changes(history: &[[u32; 2]]) -> Vec<[u32; 2]> {
    let mut changes = history.to_vec();
    changes.dedup();
    changes
}

/// Is the largest aggressor halved until the promise holds, does it get steps back, and does it stay below the level
/// that failed, which is tried again ever more rarely?
#[test]
fn the_largest_aggressor_is_halved_and_gets_steps_back() {
    // The promise is kept up to 40 %.
    let slack = |_, [first, _]: [u32; 2]| (45.0 - f64::from(first)) / 100.0;
    let (history, _) = run(400, Lever::Bandwidth(PERCENT), slack);
    let levels: Vec<u32> = changes(&history).iter().map(|levels| levels[0]).collect();
    assert_eq!(levels[..4], [100, 50, 30, 40], "{levels:?}");
    assert!(
        levels[4..].iter().all(|level| [40, 50].contains(level)),
        "{levels:?}"
    );
    let missed = history[20..].iter().filter(|levels| levels[0] > 40).count();
    assert!(
        (1..30).contains(&missed),
        "{missed} windows of {}",
        history.len() - 20
    );
    assert!(
        history.iter().all(|levels| levels[1] == 100),
        "the smaller one"
    );
}

/// If the largest aggressor alone does not suffice: is always the one halved that moves most bytes now?
#[test]
fn the_program_that_moves_most_bytes_now_is_halved() {
    let slack = |_, levels: [u32; 2]| 0.5 - f64::from(2 * levels[0] + levels[1]) / 200.0;
    let (history, _) = run(40, Lever::Bandwidth(PERCENT), slack);
    // With 50 % of the first program, both move the same, and the first one is halved; with 30 %, the second one moves
    // most.
    assert_eq!(
        changes(&history)[..5],
        [[100, 100], [50, 100], [30, 100], [30, 50], [20, 50]]
    );
}

/// If no limit brings the service nearer to its promise: are all released, and is the rule silent for a while?
#[test]
fn limits_that_do_not_help_are_released_for_a_while() {
    let (history, node) = run(60, Lever::Bandwidth(PERCENT), |_, _| -0.5);
    let released = history
        .iter()
        .position(|levels| *levels == [10, 10])
        .unwrap();
    let after = &history[released + 1..];
    let first_free = after
        .iter()
        .position(|levels| *levels == [100, 100])
        .unwrap();
    assert!(
        after[first_free..]
            .iter()
            .take(25)
            .all(|levels| *levels == [100, 100])
    );
    assert!(node.pause.until > 30);
}

/// Do limits outlast windows in which the only limited program sleeps, so that the smallest was not tried, and are they
/// released if it sleeps for long and the promise is missed all the same?
#[test]
fn do_limits_outlast_a_window_in_which_the_aggressor_sleeps() {
    let mut node = NodeThrottles::default();
    let busy = [aggressor(1, 1.0, Lever::Bandwidth(PERCENT))];
    let mut steps = (0..5).filter_map(|window| node.observe(-0.21, &busy, window));
    assert_eq!(steps.next(), Some(RuleStep::Halved(ProcessId(1), 50)));
    drop(steps);
    let mut node_of = |from: u64, windows: u64, aggressors: &[Aggressor]| {
        let windows = from..from + windows;
        let steps: Vec<RuleStep> = windows
            .filter_map(|window| node.observe(-0.2, aggressors, window))
            .collect();
        (steps, node.throttles.len())
    };
    assert_eq!(node_of(5, 10, &[]), (Vec::new(), 1));
    // It is awake again, and is halved once more.
    let (steps, _) = node_of(15, 2, &busy);
    assert_eq!(steps, [RuleStep::Halved(ProcessId(1), 30)]);
    let (steps, limited) = node_of(17, 2 * RETRY_WINDOWS.0, &[]);
    assert_eq!((steps, limited), (vec![RuleStep::ReleasedAll], 0));
}

/// If fewer CPUs still, or more, are rolled back to a plan with fewer CPUs: does the program get its CPUs back once
/// nothing is limited, and does a pin of another mechanism to the same CPUs stay?
#[test]
fn does_a_program_get_its_cpus_back_if_fewer_still_are_rolled_back() {
    let fixture = ViewFixture::new(
        last_level_caches(2, 4, CacheLevel::L3, 1 << 20),
        capabilities_fixture(&[]),
        2,
    );
    let view = fixture.view(&NullPredictor);
    let unlimited = Plan::idle(WindowLength::Time { ns: 1 });
    for (first_level, tried_level) in [(2, 1), (1, 2)] {
        let mut guard = BandwidthGuard::default();
        let plan_with = |guard: &mut BandwidthGuard, level: u32| {
            let throttle = Throttle {
                aggressor: aggressor(1, 1.0, Lever::Cpus),
                level,
                raised_from: None,
                failure: None,
                has_held: false,
            };
            let node = NodeThrottles {
                promised: [ProcessId(0)].into(),
                throttles: vec![throttle],
                ..NodeThrottles::default()
            };
            guard.by_node = [(0, node)].into();
            let mut plan = unlimited.clone();
            guard.write_into_plan(&view, &mut plan);
            assert_eq!(plan.affinity[&TaskId(1)].count(), level);
            plan
        };
        let kept_plan = plan_with(&mut guard, first_level);
        assert_eq!(guard.remove_from(&kept_plan), unlimited);
        plan_with(&mut guard, tried_level);
        guard.observe_verdict(VerificationOutcome::Slower, 9);
        // The verifier has returned to the plan before.
        let mut plan = guard.remove_from(&kept_plan);
        assert_eq!(plan.affinity, BTreeMap::new());
        guard.write_into_plan(&view, &mut plan);
        assert_eq!(guard.remove_from(&kept_plan).affinity, BTreeMap::new());

        let mut pinned = kept_plan.clone();
        guard.write_into_plan(&view, &mut pinned);
        assert_eq!(guard.remove_from(&pinned), kept_plan, "a search's pin");
    }
}

/// Two threads of a service: does the one that hardly ran, at a third of its speed alone, decide about the promise?
#[test]
fn does_a_thread_that_hardly_ran_decide_about_a_promise() {
    let mut fixture = ViewFixture::new(
        last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
        capabilities_fixture(&[]),
        2,
    );
    let runs = [(900_000_000, 1_000), (100_000, 3_000)];
    for (task, (ran_ns, cycles)) in fixture.observation.tasks.iter_mut().zip(runs) {
        task.process = ProcessId(0);
        task.on_cpu_ns = vec![(CpuId(task.task.0), ran_ns)];
        task.counts = EventCounts::exact([
            (CounterEvent::Instructions, 1_000),
            (CounterEvent::Cycles, cycles),
        ]);
        task.goal = Some(Goal {
            max_slowdown: Some(0.05),
            ..Goal::default()
        });
        let mut profile = Profile::default();
        let solo = Fact::new(1.0, FactSource::Oracle, 0);
        profile.rates.solo_instr_per_cycle = Some(solo);
        fixture.profiles.insert(task.task, profile);
    }
    let view = fixture.view(&NullPredictor);
    let promised = promised_processes(&view);
    let slack = promise_slack(&view, &promised[0], &SoloSpeeds::default()).unwrap();
    assert!((0.99..1.0).contains(&slack), "{slack}");
}

/// Do the same steps count CPUs, and is everything released once the service has time to spare?
#[test]
fn fewer_cpus_follow_the_same_rule() {
    let slack = |window, [first, _]: [u32; 2]| match window < 30 {
        true => 0.25 - f64::from(first) / 10.0,
        false => 0.5,
    };
    let (history, node) = run(120, Lever::Cpus, slack);
    let levels: Vec<u32> = changes(&history).iter().map(|levels| levels[0]).collect();
    assert_eq!(levels[..2], [4, 2], "{levels:?}");
    assert_eq!(history.last(), Some(&[4, 4]), "{levels:?}");
    assert_eq!(node.throttles, []);
}

/// Does noise around the promise move a level by one step rather than by a half?
#[test]
fn noise_around_the_promise_moves_one_step() {
    let noise = |window: u64| [0.02, -0.03, 0.01, -0.02, 0.03][window as usize % 5];
    let slack = |window, [first, _]: [u32; 2]| (45.0 - f64::from(first)) / 400.0 + noise(window);
    let (history, _) = run(300, Lever::Bandwidth(PERCENT), slack);
    assert!(
        history[20..]
            .iter()
            .all(|levels| (20..=60).contains(&levels[0])),
        "{:?}",
        changes(&history)
    );
}

/// If one CPU more costs the service far more than it saves in a window: does it keep its promise in the mean all the
/// same, with trials of that CPU?
#[test]
fn trials_cost_no_more_than_what_was_saved() {
    for cost in [0.1, 0.4, 0.9] {
        let slack = |_, [first, second]: [u32; 2]| match first + second {
            0..=5 => 0.03,
            _ => -cost,
        };
        let (history, _) = run(2_000, Lever::Cpus, slack);
        let (settled, levels) = (&history[50..], [0, 1].map(|index| history[49][index]));
        let slack_sum: f64 = settled.iter().map(|levels| slack(0, *levels)).sum();
        assert!(slack_sum >= 0.0, "{cost}: {slack_sum}");
        let trials = settled.iter().any(|now| now[0] + now[1] > 5);
        assert!(trials, "{cost}: {levels:?}");
    }
}

/// Are levels halved, raised and lowered in steps that the machine has, and always changed?
#[test]
fn levels_move_in_the_steps_of_the_machine() {
    let percent = Lever::Bandwidth(PERCENT);
    assert_eq!(
        [100, 50, 30, 20].map(|level| percent.halve(level)),
        [50, 30, 20, 10]
    );
    assert_eq!(
        [10, 90, 100].map(|level| percent.step_up(level)),
        [20, 100, 100]
    );
    let amd = Lever::Bandwidth(EIGHTHS);
    assert_eq!([80, 3, 2].map(|level| amd.halve(level)), [40, 1, 1]);
    assert_eq!([80, 5].map(|level| amd.step_up(level)), [90, 6]);
    assert_eq!([5, 2, 1].map(|level| Lever::Cpus.halve(level)), [2, 1, 1]);
}

/// `auto` without its other mechanisms: process 0 has a promised rate, and 1 and 2 move bytes, 1 twice as many. Every
/// task runs on the CPU of its number; a cache has four.
struct Scene {
    policy: Auto,
    plan: Plan,
    window: u64,
    support: BandwidthSupport,
    is_only_proposed: bool,
}

impl Scene {
    fn new(support: BandwidthSupport) -> Self {
        let parameters = Parameters {
            disable: Mechanism::ALL.to_vec(),
            ablate: vec![PolicyPart::Probes],
            ..Parameters::default()
        };
        Scene {
            policy: Auto::new(parameters, 1),
            plan: Plan::idle(WindowLength::Time { ns: 1 }),
            window: 0,
            support,
            is_only_proposed: false,
        }
    }

    /// Decides a window in which the service has half of its rate and the last plan is in force, after this change of
    /// the observation. Returns the limits: processes, caches and levels.
    fn decide(&mut self, change: impl FnOnce(&mut Observation)) -> Vec<(u32, u32, u32)> {
        self.window += 1;
        let mut observation = observation_fixture(self.window, 3);
        for (index, task) in observation.tasks.iter_mut().enumerate() {
            task.on_cpu_ns = vec![(CpuId(index as u32), 1_000_000_000)];
            let bytes = [0, 8_000_000_000, 4_000_000_000][index];
            task.counts = EventCounts::exact([
                (CounterEvent::Instructions, 1_000_000_000),
                (CounterEvent::Cycles, 1_000_000_000),
                (CounterEvent::MemoryBytes, bytes),
            ]);
        }

        observation.tasks[0].goal = Some(Goal {
            min_rate: Some(2e9),
            ..Goal::default()
        });
        observation.applied.is_only_proposed = self.is_only_proposed;
        if !self.is_only_proposed {
            observation.applied.bandwidth = self.plan.bandwidth.clone();
        }

        change(&mut observation);
        let mut capabilities = capabilities_fixture(&[Ability::Bandwidth]);
        capabilities.bandwidth = [0, 1].map(|id| (CacheId(id), self.support)).to_vec();
        let view = View {
            topology: &last_level_caches(2, 4, CacheLevel::L3, 1 << 20),
            capabilities: &capabilities,
            observation: &observation,
            profiles: &Profiles::default(),
            previous_plan: &self.plan,
            predictor: &NullPredictor,
            verdicts: &(),
        };
        self.plan = self.policy.decide(&view).plan;
        let limits = self.plan.bandwidth.iter();
        limits
            .map(|limit| match limit.members[..] {
                [ShareMember::Process(process)] => (process.0, limit.cache.0, limit.level),
                _ => panic!("{limit:?}"),
            })
            .collect()
    }

    /// Decides until the larger program is limited.
    fn decide_until_limited(&mut self) {
        let first = (0..10)
            .map(|_| self.decide(|_| {}))
            .find(|limits| !limits.is_empty());
        assert_eq!(first, Some(vec![(1, 0, self.support.max_level / 2)]));
    }
}

fn end_process(process: u32) -> impl FnOnce(&mut Observation) {
    move |observation| observation.tasks[process as usize].exited = true
}

/// Does the limit of a program that exits end in the same window, also while another change is measured and while
/// limits are only shown?
#[test]
fn a_limit_ends_with_its_program() {
    for (is_measuring, is_only_proposed) in [(false, false), (true, false), (false, true)] {
        let mut scene = Scene::new(PERCENT);
        scene.is_only_proposed = is_only_proposed;
        scene.decide_until_limited();
        scene.policy.open_change = is_measuring.then(|| OpenChange::Proposed {
            origin: ProposalOrigin::Plan,
            layout_before: SiteLayout::default(),
            plan_before: Box::new(DecidedPlan(Plan::idle(WindowLength::Time { ns: 1 }))),
        });
        assert_eq!(scene.decide(|_| {}), [(1, 0, 50)]);
        assert_eq!(scene.decide(end_process(1)), []);
        assert_eq!(scene.policy.is_measuring(), is_measuring);
    }
}

/// Does a limit end with the promise that it is for: with the service, and with the service's goal?
#[test]
fn a_limit_ends_with_its_promise() {
    for is_only_proposed in [false, true] {
        let remove_goal = |observation: &mut Observation| observation.tasks[0].goal = None;
        let ends: [Box<dyn FnOnce(&mut Observation)>; 2] =
            [Box::new(end_process(0)), Box::new(remove_goal)];
        for end in ends {
            let mut scene = Scene::new(PERCENT);
            scene.is_only_proposed = is_only_proposed;
            scene.decide_until_limited();
            assert_eq!(scene.decide(end), []);
        }
    }
}

/// On a host that only observes: is a limit no longer shown once the service keeps its promise without it?
#[test]
fn is_a_shown_limit_dropped_once_the_promise_is_kept() {
    let mut scene = Scene::new(PERCENT);
    scene.is_only_proposed = true;
    scene.decide_until_limited();
    let keep_promise = |observation: &mut Observation| {
        observation.tasks[0].goal = Some(Goal {
            min_rate: Some(5e8),
            ..Goal::default()
        });
    };
    let limits = [(); 4].map(|()| scene.decide(keep_promise).len());
    assert_eq!(limits, [1, 1, 0, 0]);
}

/// Do limits and what is known about them outlast windows in which the service has nothing to do?
#[test]
fn an_idle_service_keeps_its_limits() {
    let mut scene = Scene::new(PERCENT);
    scene.decide_until_limited();
    let nodes = scene.policy.bandwidth_guard.by_node.clone();
    for _ in 0..20 {
        let limits = scene.decide(|observation| {
            observation.tasks[0].on_cpu_ns.clear();
            observation.tasks[0].counts = EventCounts::default();
        });
        assert_eq!(limits, [(1, 0, 50)]);
    }
    assert_eq!(scene.policy.bandwidth_guard.by_node, nodes);
}

/// Is a program left alone whose limit the machine refuses, so that the next one is limited, while a limit that the
/// machine only rounds stays?
#[test]
fn a_refused_limit_is_not_taken_for_one_in_force() {
    let refuse = |is_in_force: bool| {
        move |observation: &mut Observation| {
            let item = PlanItem::Bandwidth(GroupId(0), CacheId(0));
            observation.applied.refused.push(RefusedItem {
                item,
                reason: RefusalReason::NotSupported,
                message: "a test".to_string(),
            });
            if !is_in_force {
                observation.applied.bandwidth.clear();
            }
        }
    };

    let mut scene = Scene::new(PERCENT);
    scene.decide_until_limited();
    assert_eq!(scene.decide(refuse(true)), [(1, 0, 50)]);
    assert_eq!(scene.decide(refuse(false)), []);
    let mut limited = BTreeMap::new();
    for _ in 0..3 * RETRY_WINDOWS.0 {
        for (process, ..) in scene.decide(|_| {}) {
            limited.entry(process).or_insert(scene.window);
        }
    }
    assert!(limited[&2] < limited[&1], "{limited:?}");
    assert!(limited[&1] > RETRY_WINDOWS.0, "{limited:?}");
}

/// Does a limit hold where the program runs now, and end where there is no such limit?
#[test]
fn limits_follow_a_program_to_another_cache() {
    let moved = |observation: &mut Observation| observation.tasks[1].on_cpu_ns[0].0 = CpuId(5);
    let mut scene = Scene::new(PERCENT);
    scene.decide_until_limited();
    assert_eq!(scene.decide(moved), [(1, 1, 50)]);

    let bytes = Lever::Bandwidth(EIGHTHS);
    let throttled = |lever, level| {
        let mut node = NodeThrottles::default();
        node.throttles.push(Throttle {
            aggressor: Aggressor {
                full_level: 64,
                ..aggressor(1, 1.0, lever)
            },
            level,
            raised_from: None,
            failure: None,
            has_held: false,
        });
        node
    };
    let there = |lever, full_level| Aggressor {
        cache: CacheId(1),
        full_level,
        ..aggressor(1, 1.0, lever)
    };
    let follow = |lever, level, there: Aggressor| {
        let mut node = throttled(lever, level);
        assert!(node.follow(&[there]));
        node.throttles
            .pop()
            .map(|t| (t.level, t.aggressor.full_level))
    };
    // Its traffic under the limit is not its full level.
    assert_eq!(follow(bytes, 32, there(bytes, 33)), Some((32, 64)));
    assert_eq!(follow(Lever::Cpus, 3, there(Lever::Cpus, 2)), Some((2, 2)));
    assert_eq!(follow(bytes, 32, there(Lever::Cpus, 4)), None);
    assert_eq!(
        follow(bytes, 32, there(Lever::Bandwidth(PERCENT), 100)),
        None
    );
    let mut node = throttled(bytes, 32);
    assert!(
        !node.follow(&[aggressor(1, 1.0, bytes)]),
        "it has not moved"
    );
}

/// With limits in bytes: is a program limited to half of the traffic that is counted, and not limited at all if only
/// its misses are?
#[test]
fn a_limit_in_bytes_needs_counted_traffic() {
    let limited = |support, first_count: CounterEvent| {
        let mut scene = Scene::new(support);
        let limits = (0..6).map(|_| {
            scene.decide(|observation| {
                for (task, count) in observation.tasks.iter_mut().zip([0, 8_000_000_000, 0]) {
                    task.counts = EventCounts::exact([
                        (CounterEvent::Instructions, 1_000_000_000),
                        (first_count, count),
                    ]);
                }
            })
        });
        limits
            .collect::<Vec<_>>()
            .into_iter()
            .find(|limits| !limits.is_empty())
    };
    let misses = CounterEvent::Misses(CacheLevel::L3);

    // 8 GB/s are 64 eighths.
    assert_eq!(
        limited(EIGHTHS, CounterEvent::MemoryBytes),
        Some(vec![(1, 0, 32)])
    );
    assert_eq!(limited(EIGHTHS, misses), None);
    assert_eq!(limited(PERCENT, misses), Some(vec![(1, 0, 50)]));
}
