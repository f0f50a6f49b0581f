//! Tests that the conformance harness detects policies that break its rules.

use std::cell::Cell;
use std::rc::Rc;

use super::*;

/// A policy that is implemented by a function.
struct FnPolicy<F>(F);

impl<F: FnMut(&View<'_>, &mut Plan)> Policy for FnPolicy<F> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1_000 });
        (self.0)(view, &mut plan);
        Decision::new(plan, Vec::new())
    }
}

fn rule_broken<F: FnMut(&View<'_>, &mut Plan) + 'static>(make: impl Fn() -> F) -> &'static str {
    check_policy(&|_| Box::new(FnPolicy(make())), 40)
        .expect_err("this policy breaks a rule")
        .rule
}

fn movable_tasks<'a>(view: &'a View<'_>) -> impl Iterator<Item = TaskId> + 'a {
    view.observation
        .tasks
        .iter()
        .filter(|task| !task.unmovable && !task.exited)
        .map(|task| task.task)
}
fn single_cpu(id: u32) -> CpuSet {
    [id].into_iter().collect()
}

/// Is each kind of bad policy detected by the rule that it breaks?
#[test]
fn bad_policies_are_detected() {
    let valid = "the plan is always valid";
    let moves_fixed = || {
        |view: &View<'_>, plan: &mut Plan| {
            plan.affinity.extend(
                view.observation
                    .tasks
                    .iter()
                    .map(|task| (task.task, single_cpu(0))),
            );
        }
    };
    assert_eq!(rule_broken(moves_fixed), valid);
    let starves = || {
        |view: &View<'_>, plan: &mut Plan| {
            let cpus = view.topology.online();
            let gangs = movable_tasks(view)
                .take(1)
                .map(|task| Gang {
                    members: vec![(task, None)],
                    slices: 1,
                })
                .collect();
            plan.gangs.push(GangSchedule {
                cpus,
                slice_ns: 1_000,
                gangs,
            });
        }
    };
    assert_eq!(rule_broken(starves), valid);
    let by_id = || {
        |view: &View<'_>, plan: &mut Plan| {
            plan.weights
                .extend(movable_tasks(view).max().map(|task| (task, 2.0)));
        }
    };
    assert_eq!(rule_broken(by_id), "renaming tasks renames the plan");
    let forgets = || {
        |view: &View<'_>, plan: &mut Plan| {
            plan.affinity.extend(
                movable_tasks(view)
                    .filter(|task| view.profiles.contains_key(task))
                    .map(|task| (task, single_cpu(0))),
            );
        }
    };
    assert_eq!(
        rule_broken(forgets),
        "without evidence allowed, gangs and shares stay"
    );
    let calls = Rc::new(Cell::new(0u32));
    let outside = || {
        let calls = calls.clone();
        move |view: &View<'_>, plan: &mut Plan| {
            calls.set(calls.get() + 1);
            plan.weights
                .extend(movable_tasks(view).map(|task| (task, f64::from(calls.get()))));
        }
    };
    assert_eq!(rule_broken(outside), "same input, same output");
}

/// Does the generator cover the cases of the rules: offline CPUs, machines without caches or tasks, pinned tasks,
/// exits, gaps in the evidence?
#[test]
fn the_generator_covers_the_cases_of_the_rules() {
    let scripts: Vec<ObservationScript> = (0..40).map(ObservationScript::generate).collect();
    let tasks = || {
        scripts
            .iter()
            .flat_map(|script| &script.windows)
            .flat_map(|(observation, _)| &observation.tasks)
    };
    assert!(
        scripts
            .iter()
            .any(|script| script.topology.caches.is_empty())
    );
    assert!(
        scripts
            .iter()
            .any(|script| script.topology.cpus.iter().any(|cpu| !cpu.online))
    );
    assert!(scripts.iter().any(|script| {
        script
            .windows
            .iter()
            .all(|(observation, _)| observation.tasks.is_empty())
    }));
    assert!(
        tasks().any(|task| task.unmovable)
            && tasks().any(|task| task.exited)
            && tasks().any(|task| task.goal.is_some())
    );
    assert!(tasks().any(|task| task.counts.get(CounterEvent::Cycles).is_none()));
    let more_than_cpus = |script: &ObservationScript| {
        script
            .windows
            .iter()
            .any(|(s, _)| s.tasks.len() > script.topology.cpus.len())
    };
    assert!(scripts.iter().any(more_than_cpus));
}
