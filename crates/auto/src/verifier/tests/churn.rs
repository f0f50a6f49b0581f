use super::*;

/// Processes that live for `lives_ns`, one created every `every_ns`, as reported by a machine that checks once a
/// second.
fn short_processes(window: u64, every_ns: u64, lives_ns: u64) -> Vec<TaskSample> {
    let (start, end) = (window * SECOND_NS, (window + 1) * SECOND_NS);
    let mut samples = Vec::new();
    for index in 0..end.div_ceil(every_ns) {
        let (born, dies) = (index * every_ns, index * every_ns + lives_ns);
        // A process that exits between two checks is never reported.
        let is_reported = dies.div_ceil(SECOND_NS) > born.div_ceil(SECOND_NS);
        if is_reported && born < end && dies >= start {
            let arrived = TaskSample {
                arrival_ns: born,
                exited: dies < end,
                ..program_sample(1000 + index as u32, Some(1), 50.0)
            };
            samples.push(arrived);
        }
    }
    samples
}

/// From window 40 on, all processes are confined to one CPU, including newcomers.
fn squeezing_policy() -> impl Policy {
    ScriptedPolicy(|view: &View<'_>| {
        let live_tasks = view.observation.tasks.iter().filter(|task| !task.exited);
        let cpu = if view.observation.window >= 40 { 0 } else { 1 };
        pinned_plan(
            &live_tasks
                .map(|task| (task.task.0, cpu))
                .collect::<Vec<_>>(),
        )
    })
}

fn halved_under_churn(every_ns: u64, lives_ns: u64) -> Vec<usize> {
    let mut max_reported = 0;
    let machine = |window, plan: &Plan| {
        let mut tasks = short_processes(window, every_ns, lives_ns);
        max_reported = max_reported.max(
            tasks
                .iter()
                .map(|task| task.task.0 - 999)
                .max()
                .unwrap_or(0),
        );
        let squeezed = plan
            .affinity
            .get(&TaskId(0))
            .is_some_and(|cpus| cpus.contains(0));
        tasks.extend(
            [0, 1].map(|id| program_sample(id, Some(1), if squeezed { 50.0 } else { 100.0 })),
        );
        tasks
    };
    let decisions = run(squeezing_policy(), GuardConfig::default(), 230, machine);
    assert!(
        u64::from(max_reported) + 60 > 230 * SECOND_NS / every_ns,
        "the short processes are there: {max_reported}"
    );
    windows_with(&decisions, &pinned_plan(&[(0, 0), (1, 0)]))
}

/// Is a halving of speed rolled back, although a short process arrives every 1.4 s, or a thousand in a minute?
#[test]
fn arrivals_and_exits_do_not_switch_the_guard_off() {
    for (every_ns, lives_ns) in [
        (1_400_000_000, 500_000_000),
        (60_000_000, 1_200_000_000),
        (60_000_000, 300_000_000),
    ] {
        let harmed_windows = halved_under_churn(every_ns, lives_ns);
        assert!(
            harmed_windows.starts_with(&[40, 41, 42, 43, 44, 45]),
            "{harmed_windows:?}"
        );
        // Six windows of the first trial, and of the next ones after 60 and after 120 windows.
        assert!(
            harmed_windows.len() <= 3 * 6,
            "{every_ns}: {harmed_windows:?}"
        );
    }
}

/// Is a newcomer left out until it has a reference of its own, and compared from then on?
#[test]
fn newcomers_are_judged_by_their_own_reference() {
    let verdicts = |arrives: u64| {
        let policy = ScriptedPolicy(|view: &View<'_>| {
            if view.observation.window >= 40 {
                pinned_plan(&[(0, 0)])
            } else {
                idle_plan()
            }
        });

        let machine = |window: u64, plan: &Plan| {
            let has_moved = !plan.affinity.is_empty();
            let newcomer = (window >= arrives)
                .then(|| program_sample(7, None, if has_moved { 50.0 } else { 100.0 }));
            [program_sample(0, None, 100.0)]
                .into_iter()
                .chain(newcomer)
                .collect()
        };
        rollback_windows(&run(policy, GuardConfig::default(), 70, machine))
    };

    assert_eq!(verdicts(20), [46]);
    assert_eq!(
        verdicts(39),
        Vec::<usize>::new(),
        "its first window does not count"
    );
    assert_eq!(verdicts(41), Vec::<usize>::new(), "it was never faster");
}

/// Are the plan's gangs and pins restored for live tasks only, so that the plan stays valid?
#[test]
fn plans_are_restored_for_live_tasks_only() {
    let gangs = |members: &[u32]| GangSchedule {
        cpus: (0..4).collect(),
        slice_ns: 1,
        gangs: members
            .iter()
            .map(|&task| Gang {
                members: vec![(TaskId(task), None)],
                slices: 1,
            })
            .collect(),
    };

    let policy = ScriptedPolicy(|view: &View<'_>| {
        let live_tasks: Vec<u32> = view
            .observation
            .tasks
            .iter()
            .filter(|task| !task.exited)
            .map(|task| task.task.0)
            .collect();
        if view.observation.window >= 40 {
            idle_plan()
        } else {
            Plan {
                gangs: vec![gangs(&live_tasks)],
                ..idle_plan()
            }
        }
    });

    // Task 2 exits while the change is on trial.
    let machine = |window: u64, plan: &Plan| {
        let work = if plan.gangs.is_empty() && window > 2 {
            50.0
        } else {
            100.0
        };
        let last = (window <= 43).then(|| TaskSample {
            exited: window == 43,
            ..program_sample(2, None, work)
        });
        [program_sample(0, None, work), program_sample(1, None, work)]
            .into_iter()
            .chain(last)
            .collect()
    };

    let decisions = run(policy, GuardConfig::default(), 60, machine);
    assert_eq!(rollback_windows(&decisions), [46]);
    assert_eq!(decisions[46].plan.gangs, [gangs(&[0, 1])]);
    assert_eq!(
        decisions[59].plan.gangs,
        [gangs(&[0, 1])],
        "it is on cooldown"
    );
}
