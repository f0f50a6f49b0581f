use super::*;
use cachemate_core::SplitMix64;
use cachemate_papers::conformance::check_policy;
use cachemate_papers::policies::{self, PolicyRegistry};
use cachemate_papers::work_metric::WorkMetric;

const CONFIG: GuardConfig = GuardConfig {
    trial_windows: 5,
    min_loss: 0.03,
    cooldown_windows: 20,
    objective: cachemate_core::GuardObjective::MeanLogSpeed,
    waits_for_reference: false,
};

/// Pins task 0 to CPU 1 from window 7 on, forever.
fn insistent_policy() -> impl Policy {
    ScriptedPolicy(|view: &View<'_>| {
        if view.observation.window >= 7 {
            pinned_plan(&[(0, 1)])
        } else {
            idle_plan()
        }
    })
}

/// The windows in which the decision was in force, if its speed is `factor` times that before, with some noise.
fn windows_in_force(
    factor: f64,
    noise: f64,
    config: impl Into<Option<GuardConfig>>,
    windows: u64,
) -> Vec<usize> {
    let mut generator = SplitMix64::new(1);
    let machine = |_, plan: &Plan| {
        let speed = if plan.affinity.is_empty() {
            100.0
        } else {
            100.0 * factor
        };
        let mut noisy = || {
            if factor == 0.0 {
                0.0
            } else {
                speed * (1.0 + noise * (generator.draw_unit() - 0.5))
            }
        };
        vec![
            program_sample(0, None, noisy()),
            program_sample(1, None, noisy()),
        ]
    };

    windows_with(
        &run(insistent_policy(), config, windows, machine),
        &pinned_plan(&[(0, 1)]),
    )
}

/// Is a decision that costs a fifth rolled back after its trial, and is its cooldown twice as long after each further
/// failure?
#[test]
fn a_harmful_decision_is_rolled_back_with_growing_cooldowns() {
    let windows_held = windows_in_force(0.8, 0.05, CONFIG, 400);
    let first: Vec<usize> = windows_held
        .chunk_by(|a, b| a + 1 == *b)
        .map(|stretch| stretch[0])
        .collect();
    assert_eq!(
        &windows_held[..6],
        [7, 8, 9, 10, 11, 12],
        "{windows_held:?}"
    );
    // On cooldown for 20, 40, 80 and 160 windows, with trials of six windows in between.
    assert_eq!(first, [7, 33, 79, 165, 331], "{windows_held:?}");
}

/// Is a decision kept if it helps, if its effect is within the noise, or if it cannot be measured?
#[test]
fn helpful_and_unmeasurable_decisions_are_kept() {
    for (factor, noise) in [(1.2, 0.05), (0.99, 0.02), (0.9, 1.0), (0.0, 0.0)] {
        assert_eq!(
            windows_in_force(factor, noise, CONFIG, 60).len(),
            53,
            "{factor} {noise}"
        );
    }
    assert_eq!(windows_in_force(0.5, 0.0, None, 60).len(), 53);
}

/// Are system calls a proxy for programs that report no work, with a note in the reason, and only if they are steady?
#[test]
fn steady_proxies_are_compared() {
    let reason = |steady: bool| {
        let machine = |window: u64, plan: &Plan| {
            let calls = match (plan.affinity.is_empty(), steady) {
                (true, false) if window.is_multiple_of(2) => 100_000,
                (true, _) => 10_000,
                (false, _) => 5_000,
            };
            let reading = EventCount {
                event: CounterEvent::SystemCalls,
                count: calls,
                enabled_share: 1.0,
            };
            let counts = EventCounts(vec![reading]);
            vec![TaskSample {
                counts,
                on_cpu_ns: vec![(CpuId(0), SECOND_NS)],
                ..program_sample(0, None, 0.0)
            }]
        };
        let decisions = run(insistent_policy(), CONFIG, 30, machine);
        rollback_windows(&decisions)
            .first()
            .map(|&window| decisions[window].reasons[0].text.clone())
    };

    let text = reason(true).expect("a halving is noticed");
    assert!(
        text.contains("-50.0 %") && text.contains("1 of them judged by system calls"),
        "{text}"
    );
    assert_eq!(reason(false), None);
    assert_eq!(
        WorkMetric::Proxy(CounterEvent::SystemCalls).describe(),
        "system calls"
    );
}

/// Does a process with many threads count once, with the sum of their speeds?
#[test]
fn threads_count_as_one_process() {
    let machine = |_, plan: &Plan| {
        let has_moved = !plan.affinity.is_empty();
        let thread = |id: u32| TaskSample {
            process: ProcessId(9),
            ..program_sample(id, None, if has_moved { 50.0 } else { 100.0 })
        };
        let other_tasks =
            (20..23).map(|id| program_sample(id, None, if has_moved { 140.0 } else { 100.0 }));
        (0..16).map(thread).chain(other_tasks).collect()
    };
    let decisions = run(insistent_policy(), CONFIG, 60, machine);
    assert_eq!(
        rollback_windows(&decisions),
        Vec::<usize>::new(),
        "three programs gain 40 %, one with sixteen threads loses half"
    );
}

/// Is a change rolled back if it breaks a goal, whatever others gain, and kept if it restores one?
#[test]
fn a_change_that_breaks_a_goal_is_rolled_back() {
    let verdicts = |own_factor: f64, other_factor: f64, solo: Option<f64>| {
        let machine = move |_, plan: &Plan| {
            let has_moved = !plan.affinity.is_empty();
            let factor = |factor: f64| if has_moved { factor } else { 1.0 };
            let counts = |rate: f64| {
                let instructions = (1e9 * rate) as u64;
                EventCounts::exact([
                    (CounterEvent::Instructions, instructions),
                    (CounterEvent::Cycles, 1_000_000_000),
                ])
            };

            let goal = Some(Goal {
                max_slowdown: Some(0.05),
                ..Goal::default()
            });
            let promised = TaskSample {
                goal,
                counts: counts(factor(own_factor)),
                ..program_sample(0, None, 0.0)
            };

            let rates = RateFacts {
                solo_instr_per_cycle: solo.map(Fact::oracle),
                ..RateFacts::default()
            };
            let profile = Profile::default().with_rates(rates);
            let other_program = |id| TaskSample {
                counts: counts(factor(other_factor)),
                ..program_sample(id, None, 0.0)
            };
            (
                vec![promised, other_program(1), other_program(2)],
                Profiles::from([(TaskId(0), profile)]),
            )
        };

        rollback_windows(&run_with_profiles(insistent_policy(), CONFIG, 35, machine)).len()
    };

    assert_eq!(
        verdicts(0.92, 2.0, None),
        1,
        "8 % slower, 5 % were promised"
    );
    assert_eq!(verdicts(0.96, 2.0, None), 0);
    assert_eq!(
        verdicts(1.3, 0.7, None),
        1,
        "the goal is not known to be missed"
    );
    assert_eq!(
        verdicts(1.3, 0.7, Some(1.3)),
        0,
        "it was missed before, and is met now"
    );
    assert_eq!(verdicts(0.97, 2.0, Some(1.03)), 1, "6 % slower than alone");
}

/// Is a change that breaks a promised rate rolled back, whatever others gain; does the rate apply to each thread that
/// ran; and does reported work count before instructions?
#[test]
fn a_change_that_breaks_a_promised_rate_is_rolled_back() {
    let verdicts = |own_factor: f64, threads: u32, reports: bool, min_rate: f64| {
        let machine = move |_, plan: &Plan| {
            let has_moved = !plan.affinity.is_empty();
            let factor = |factor: f64| if has_moved { factor } else { 1.0 };
            let count =
                |rate: f64| EventCounts::exact([(CounterEvent::Instructions, (1e9 * rate) as u64)]);
            let goal = Some(Goal {
                min_rate: Some(min_rate),
                ..Goal::default()
            });
            let promised = |id: u32| TaskSample {
                goal,
                process: ProcessId(0),
                counts: count(factor(own_factor)),
                on_cpu_ns: vec![(CpuId(id), SECOND_NS)],
                progress: reports.then(|| 500.0 * factor(own_factor)),
                ..program_sample(id, None, 0.0)
            };

            let other_program = |id| TaskSample {
                counts: count(factor(2.0)),
                ..program_sample(id, None, 0.0)
            };
            let tasks = (0..threads)
                .map(promised)
                .chain((10..14).map(other_program))
                .collect();
            (tasks, Profiles::new())
        };

        rollback_windows(&run_with_profiles(insistent_policy(), CONFIG, 35, machine)).len()
    };

    assert_eq!(
        verdicts(0.95, 1, false, 9.8e8),
        1,
        "below the rate, though others gain"
    );
    assert_eq!(verdicts(0.95, 1, false, 9.0e8), 0);
    assert_eq!(verdicts(0.95, 1, false, 2.0e9), 0, "it was missed before");
    assert_eq!(
        verdicts(0.95, 2, false, 9.8e8),
        1,
        "for each of two threads"
    );
    assert_eq!(verdicts(0.95, 2, false, 9.0e8), 0);
    assert_eq!(
        verdicts(0.95, 1, true, 480.0),
        1,
        "in the work that it reports"
    );
    assert_eq!(verdicts(0.95, 1, true, 470.0), 0);
}

/// Does a guarded policy obey the rules for all policies?
#[test]
fn guarded_policies_conform() {
    let registry = PolicyRegistry(&[policies::ENTRIES, crate::ENTRIES]);
    for entry in registry.entries() {
        let make = |seed| {
            let inner = registry.build(entry.name, "", seed).unwrap();
            let config = GuardConfig {
                trial_windows: 2,
                ..GuardConfig::default()
            };
            Box::new(Verifier::new(inner, config)) as Box<dyn Policy>
        };
        check_policy(&make, 20)
            .unwrap_or_else(|broken| panic!("guarded '{}': {broken}", entry.name));
    }
}

/// Is a policy that acts at once on a live host held back, with the reason, until there is a reference? Is its decision
/// then judged, and does it act in the end if no speed can be measured?
#[test]
fn nothing_is_changed_before_it_can_be_compared() {
    let config = GuardConfig {
        waits_for_reference: true,
        ..CONFIG
    };
    let decisions = |measured: bool, factor: f64| {
        let policy = ScriptedPolicy(|_: &View<'_>| pinned_plan(&[(0, 1)]));
        let machine = |_, plan: &Plan| {
            let speed = if plan.affinity.is_empty() {
                100.0
            } else {
                100.0 * factor
            };
            let work = if measured { speed } else { 0.0 };
            vec![program_sample(0, None, work), program_sample(1, None, work)]
        };
        run(policy, config, 60, machine)
    };
    let judged = decisions(true, 0.5);
    let windows_held = windows_with(&judged, &pinned_plan(&[(0, 1)]));
    // Window 0 does not count, because all processes arrived in it; windows 1 and 2 are the reference.
    assert_eq!(windows_held[0], 2, "{windows_held:?}");

    assert!(
        judged[..2]
            .iter()
            .all(|decision| decision.reasons[0].text.starts_with("no change yet")),
        "{:?}",
        judged[1].reasons
    );
    assert!(
        rollback_windows(&judged)
            .first()
            .is_some_and(|&window| window <= 10),
        "a halving is noticed: {:?}",
        rollback_windows(&judged)
    );
    assert_eq!(
        windows_with(&decisions(true, 1.2), &pinned_plan(&[(0, 1)])).len(),
        58
    );
    let blind = windows_with(&decisions(false, 0.5), &pinned_plan(&[(0, 1)]));
    assert_eq!(
        blind[0], 15,
        "after three times the windows that are compared: {blind:?}"
    );
}

/// A program that stops under a change looks like one that sleeps: is it excluded, so that the change stays, while one
/// that still makes some progress is compared?
#[test]
fn a_stopped_program_is_excluded_from_the_comparison() {
    let verdicts = |speed: f64| {
        let machine = |_, plan: &Plan| {
            let of_first = if plan.affinity.is_empty() {
                100.0
            } else {
                speed
            };
            vec![
                program_sample(0, None, of_first),
                program_sample(1, None, 100.0),
            ]
        };
        rollback_windows(&run(insistent_policy(), CONFIG, 60, machine)).len()
    };
    assert_eq!(verdicts(0.0), 0);
    assert!(verdicts(1.0) > 0);
}
