//! Plans that a policy proposes: monitoring, confirmation, and the verdicts that the policy gets.

use super::*;
use cachemate_locality::profilers::AVERAGED;

/// Proposes a plan once, keeps what the verifier keeps, and records the verdicts by window.
struct ProposingPolicy<'a> {
    window: u64,
    plan: Plan,
    method: VerificationMethod,
    goal_processes: Vec<ProcessId>,
    is_open: bool,
    verdicts: &'a mut Vec<(u64, VerificationOutcome)>,
}

impl Policy for ProposingPolicy<'_> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let decision = Decision::new(view.plan_to_keep().clone(), Vec::new());
        if let Some(verdict) = view.verdicts.latest() {
            self.verdicts
                .push((view.observation.window, verdict.outcome));
            self.is_open = false;
        }
        if view.observation.window == self.window {
            self.is_open = true;
            return propose(self.plan.clone(), self.method, self.goal_processes.clone());
        }

        let verification = if self.is_open {
            Verification::Pending
        } else {
            Verification::BeforeAndAfter
        };
        Decision {
            verification,
            ..decision
        }
    }
}

fn propose(plan: Plan, method: VerificationMethod, goal_processes: Vec<ProcessId>) -> Decision {
    let terms = ProposedChange {
        method,
        forecast_gain: 0.1,
        min_gain: 0.01,
        goal_processes,
        speeds: vec![(ProcessId(0), 1.0), (ProcessId(1), 1.0)],
    };
    Decision {
        verification: Verification::Proposed(Box::new(terms)),
        ..Decision::new(plan, Vec::new())
    }
}

fn new_plan() -> Plan {
    pinned_plan(&[(0, 0), (1, 2)])
}

/// The decisions and verdicts if the new plan, proposed in window 10, changes speeds by this factor.
fn run_proposal(
    method: VerificationMethod,
    factor: f64,
    guard: Option<GuardConfig>,
    tasks: impl Fn(u64) -> u32,
) -> (Vec<Decision>, Vec<(u64, VerificationOutcome)>) {
    let mut verdicts = Vec::new();
    let goal_processes = Vec::new();
    let (plan, verdicts_seen) = (new_plan(), &mut verdicts);
    let policy = ProposingPolicy {
        window: 10,
        plan,
        method,
        goal_processes,
        is_open: false,
        verdicts: verdicts_seen,
    };

    let decisions = run(policy, guard, 200, |window, plan| {
        let is_new = plan.affinity.get(&TaskId(1)) == new_plan().affinity.get(&TaskId(1));
        let noise = (window * 7919 % 13) as f64;
        let work = 1000.0 * if is_new { factor } else { 1.0 } + noise;
        (0..tasks(window))
            .map(|id| program_sample(id, None, work))
            .collect()
    });
    (decisions, verdicts)
}

/// Is a monitored plan rolled back if it is slower by the policy's terms, even without the guard, and kept otherwise?
#[test]
fn a_monitored_plan_is_rolled_back_if_it_is_slower() {
    for guard in [None, Some(GuardConfig::default())] {
        for (factor, expected) in [
            (1.0, VerificationOutcome::NotSlower),
            (0.97, VerificationOutcome::Slower),
        ] {
            let (decisions, verdicts) =
                run_proposal(VerificationMethod::Monitoring, factor, guard, |_| 2);
            assert_eq!(
                verdicts.iter().map(|verdict| verdict.1).collect::<Vec<_>>(),
                [expected],
                "{factor}"
            );
            let is_kept = decisions[199].plan.affinity == new_plan().affinity;
            assert_eq!(is_kept, expected == VerificationOutcome::NotSlower);
        }
    }
}

/// Is a plan that is to be confirmed kept only if it is faster?
#[test]
fn a_plan_to_confirm_is_kept_only_if_it_is_faster() {
    for (factor, expected) in [
        (1.02, VerificationOutcome::NotSlower),
        (0.99, VerificationOutcome::Slower),
    ] {
        let (decisions, verdicts) =
            run_proposal(VerificationMethod::Confirmation, factor, None, |_| 2);
        assert_eq!(
            verdicts.iter().map(|verdict| verdict.1).collect::<Vec<_>>(),
            [expected],
            "{factor}"
        );
        assert_eq!(
            decisions[199].plan.affinity == new_plan().affinity,
            factor > 1.0
        );
    }
}

/// Is a plan that slows the others for a goal kept if it speeds up the process with the goal, and rolled back if it
/// does not, or if no goal is its reason?
#[test]
fn a_plan_that_slows_others_is_kept_if_it_helps_the_goal() {
    let goal = ProcessId(0);

    for (goal_processes, factor, expected) in [
        (vec![goal], 1.1, VerificationOutcome::NotSlower),
        (vec![goal], 1.0, VerificationOutcome::Slower),
        (vec![], 1.1, VerificationOutcome::Slower),
    ] {
        let mut verdicts = Vec::new();
        let method = VerificationMethod::Monitoring;
        let (plan, is_open) = (new_plan(), false);
        let policy = ProposingPolicy {
            window: 10,
            plan,
            method,
            goal_processes,
            is_open,
            verdicts: &mut verdicts,
        };
        run(policy, Some(GuardConfig::default()), 100, |window, plan| {
            let is_new = plan.affinity.get(&TaskId(1)) == new_plan().affinity.get(&TaskId(1));
            let noise = (window * 7919 % 13) as f64;
            let factors = if is_new { [factor, 0.7] } else { [1.0, 1.0] };
            (0..2)
                .map(|id| program_sample(id, None, 1000.0 * factors[id as usize] + noise))
                .collect()
        });
        assert_eq!(
            verdicts.iter().map(|verdict| verdict.1).collect::<Vec<_>>(),
            [expected],
            "{factor}"
        );
    }
}

/// Does a policy that proposes a plan in the window of a roll-back get a verdict on it, and so never waits for one?
#[test]
fn a_proposal_in_the_window_of_a_roll_back_is_refused() {
    struct HastyPolicy<'a>(&'a mut Vec<VerificationOutcome>);
    impl Policy for HastyPolicy<'_> {
        fn decide(&mut self, view: &View<'_>) -> Decision {
            let outcome = view.verdicts.latest().map(|verdict| verdict.outcome);
            self.0.extend(outcome);
            match outcome {
                Some(VerificationOutcome::Slower) => propose(
                    pinned_plan(&[(0, 1), (1, 3)]),
                    VerificationMethod::Monitoring,
                    Vec::new(),
                ),
                _ if view.observation.window == 10 => Decision::new(new_plan(), Vec::new()),
                _ => Decision::new(view.plan_to_keep().clone(), Vec::new()),
            }
        }
    }

    let mut outcomes = Vec::new();
    run(
        HastyPolicy(&mut outcomes),
        GuardConfig::default(),
        40,
        |window, plan| {
            let work = if plan.affinity == new_plan().affinity {
                500.0
            } else {
                1000.0
            } + (window * 7919 % 13) as f64;
            (0..2).map(|id| program_sample(id, None, work)).collect()
        },
    );
    assert_eq!(
        outcomes,
        [VerificationOutcome::Slower, VerificationOutcome::Refused]
    );
}

/// Does an arrival end a measurement, with the new plan in force?
#[test]
fn an_arrival_ends_a_measurement() {
    for method in [
        VerificationMethod::Confirmation,
        VerificationMethod::Monitoring,
    ] {
        let (decisions, verdicts) =
            run_proposal(method, 1.1, None, |window| if window < 13 { 2 } else { 3 });
        assert_eq!(verdicts, [(13, VerificationOutcome::Interrupted)]);
        assert_eq!(decisions[20].plan.affinity, new_plan().affinity);
    }
}

/// If a change of phase ends a long confirmation, and the policy tries a worse plan at once, is that plan rolled back
/// to the one before the confirmation, rather than to the unconfirmed one?
#[test]
fn an_interrupted_change_is_no_reference_for_the_next_one() {
    struct RestlessPolicy {
        is_open: bool,
    }

    impl Policy for RestlessPolicy {
        fn decide(&mut self, view: &View<'_>) -> Decision {
            let outcome = view.verdicts.latest().map(|verdict| verdict.outcome);
            self.is_open &= outcome.is_none();
            if view.observation.window == 10 || outcome == Some(VerificationOutcome::Interrupted) {
                let plan = if outcome.is_none() {
                    new_plan()
                } else {
                    pinned_plan(&[(0, 1), (1, 3)])
                };
                self.is_open = true;
                return propose(plan, VerificationMethod::Confirmation, Vec::new());
            }

            let verification = if self.is_open {
                Verification::Pending
            } else {
                Verification::BeforeAndAfter
            };
            Decision {
                verification,
                ..Decision::new(view.plan_to_keep().clone(), Vec::new())
            }
        }
    }

    let policy = RestlessPolicy { is_open: false };
    let decisions = run_with_profiles(policy, GuardConfig::default(), 60, |window, plan| {
        let is_worst = plan.affinity.get(&TaskId(0)) == Some(&[1].into_iter().collect());
        let work = if is_worst { 500.0 } else { 1000.0 } + (window * 7919 % 13) as f64;
        let phase = PhaseFacts {
            kind: Some(Fact::new(1, FactSource::Oracle, 0)),
        };
        let profile = Profile {
            phase_number: u32::from(window >= 19),
            phase,
            ..Profile::default()
        };
        let profiles = (0..2).map(|id| (TaskId(id), profile.clone())).collect();
        (
            (0..2).map(|id| program_sample(id, None, work)).collect(),
            profiles,
        )
    });
    assert_eq!(decisions[15].plan.affinity, new_plan().affinity);
    assert_eq!(rollback_windows(&decisions).len(), 1);
    assert_eq!(decisions[59].plan.affinity, idle_plan().affinity);
}

/// Does a plan that failed stay on cooldown, so that the guard refuses the same proposal and the policy can know it
/// beforehand, whereas the roll-back of released turns pauses no policy?
#[test]
fn a_failed_plan_stays_on_cooldown_and_the_policy_can_know() {
    let run_plans = |bad: Plan, good: Plan| {
        let mut excluded_and_paused = (false, false);
        let policy = ScriptedPolicy(|view: &View<'_>| {
            let window = view.observation.window;
            excluded_and_paused.0 |= view.verdicts.excludes(&bad, view.previous_plan, view);
            excluded_and_paused.1 |= view.verdicts.is_paused(window);
            if window < 10 {
                good.clone()
            } else {
                bad.clone()
            }
        });

        let is_bad = |plan: &Plan| (&plan.affinity, &plan.gangs) == (&bad.affinity, &bad.gangs);
        let decisions = run(policy, GuardConfig::default(), 40, |_, plan| {
            let work = if is_bad(plan) { 500.0 } else { 1000.0 };
            vec![program_sample(0, None, work), program_sample(1, None, work)]
        });
        assert_eq!(rollback_windows(&decisions).len(), 1);
        excluded_and_paused
    };

    assert_eq!(run_plans(new_plan(), idle_plan()), (true, true));
    let gang = |id: u32| Gang {
        members: vec![(TaskId(id), None)],
        slices: 1,
    };
    let rotation = GangSchedule {
        cpus: [0].into_iter().collect(),
        slice_ns: 1_000_000,
        gangs: vec![gang(0), gang(1)],
    };
    assert_eq!(
        run_plans(
            idle_plan(),
            Plan {
                gangs: vec![rotation],
                ..idle_plan()
            }
        ),
        (true, false)
    );
}

/// If a program becomes slower because its phase changes at the same time as the plan, is the plan kept, whereas a
/// slower program in the same phase, or in a recurring one, causes a roll-back?
#[test]
fn windows_of_different_phases_are_not_compared() {
    let rolled_back = |phase_after: u32, kind: Option<u32>| {
        let policy = ScriptedPolicy(|view: &View<'_>| {
            if view.observation.window < 10 {
                idle_plan()
            } else {
                new_plan()
            }
        });
        let decisions = run_with_profiles(policy, GuardConfig::default(), 40, |window, _| {
            let (work, phase_number) = if window < 11 {
                (1000.0, 0)
            } else {
                (500.0, phase_after)
            };
            let phase = PhaseFacts {
                kind: kind.map(|kind| Fact::new(kind, FactSource::Oracle, 0)),
            };
            let profile = Profile {
                phase_number,
                phase,
                ..Profile::default()
            };
            let profiles = (0..2).map(|id| (TaskId(id), profile.clone())).collect();
            (
                (0..2).map(|id| program_sample(id, None, work)).collect(),
                profiles,
            )
        });
        !rollback_windows(&decisions).is_empty()
    };

    assert!(rolled_back(0, None) && rolled_back(2, Some(1)));
    assert!(!rolled_back(1, None));
}

/// If phases are too short to be followed, is a plan that slows all of them rolled back although a faster phase
/// follows? Is a plan without effect kept although a slower one follows? If nothing identifies like windows, does that
/// hold for a large loss?
#[test]
fn short_phases_neither_hide_a_loss_nor_count_as_one() {
    let cases = [
        (0.9, 0, true, VerificationOutcome::Slower),
        (1.0, 8, true, VerificationOutcome::NotSlower),
        (0.4, 0, false, VerificationOutcome::Slower),
        (1.0, 8, false, VerificationOutcome::NotSlower),
    ];

    for (factor, offset, is_identified, expected) in cases {
        let mut verdicts = Vec::new();
        let method = VerificationMethod::Monitoring;
        let (plan, goal_processes) = (new_plan(), Vec::new());
        let policy = ProposingPolicy {
            window: 10,
            plan,
            method,
            goal_processes,
            is_open: false,
            verdicts: &mut verdicts,
        };
        run_with_profiles(policy, GuardConfig::default(), 60, |window, plan| {
            let is_new = plan.affinity.get(&TaskId(1)) == new_plan().affinity.get(&TaskId(1));
            // Eight windows fast and eight slow.
            let is_fast = (window + 5 + offset) % 16 < 8;
            let (work, incoming) = if is_fast { (1.5e9, 20.0) } else { (1e9, 60.0) };
            let instructions =
                work * if is_new { factor } else { 1.0 } + (window * 7919 % 13) as f64 * 1e6;
            let task = |id: u32| {
                let accesses = (instructions * incoming / 1000.0) as u64;
                let mut counts = vec![(CounterEvent::Instructions, instructions as u64)];
                if is_identified {
                    counts.push((CounterEvent::Misses(CacheLevel::L1Data), accesses));
                    counts.push((CounterEvent::Misses(CacheLevel::L1Instruction), 0));
                    counts.push((CounterEvent::References(CacheLevel::L3), accesses));
                }

                let on_cpu_ns = vec![(CpuId(id), SECOND_NS)];
                TaskSample {
                    counts: EventCounts::exact(counts),
                    on_cpu_ns,
                    ..program_sample(id, None, 0.0)
                }
            };

            let phase = PhaseFacts {
                kind: Some(Fact::new(AVERAGED, FactSource::PhaseDetector, 0)),
            };
            let profile = Profile {
                phase,
                ..Profile::default()
            };
            (
                (0..2).map(task).collect(),
                (0..2).map(|id| (TaskId(id), profile.clone())).collect(),
            )
        });
        let outcomes: Vec<VerificationOutcome> = verdicts.iter().map(|verdict| verdict.1).collect();
        assert_eq!(
            outcomes.first(),
            Some(&expected),
            "{factor} {is_identified}: {verdicts:?}"
        );
    }
}
