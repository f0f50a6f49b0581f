//! Tests of a policy's own trials, which the guard does not judge.

use super::*;

/// A policy that decides a plan and its verification by window.
struct TestingPolicy<F>(F);

impl<F: FnMut(u64) -> (Plan, Verification)> Policy for TestingPolicy<F> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let (plan, verification) = (self.0)(view.observation.window);
        Decision {
            verification,
            ..Decision::new(plan, Vec::new())
        }
    }
}

fn new_plan() -> Plan {
    pinned_plan(&[(0, 0), (1, 1)])
}

/// Two programs, the first of which the new plan makes slower (or faster) by this share.
fn two_programs(plan: &Plan, loss: f64, goal: Option<Goal>) -> Vec<TaskSample> {
    let is_new = plan.affinity.get(&TaskId(0)) == new_plan().affinity.get(&TaskId(0));
    let work = if is_new {
        1000.0 * (1.0 - loss)
    } else {
        1000.0
    };
    vec![
        TaskSample {
            goal,
            ..program_sample(0, None, work)
        },
        program_sample(1, None, 1000.0),
    ]
}

/// Ten windows of the new plan after twenty of the old, twice.
fn leg_in_window(window: u64, verification: Verification) -> (Plan, Verification) {
    let is_new = window % 30 >= 20 && window < 60;
    (if is_new { new_plan() } else { idle_plan() }, verification)
}

/// Is a trial of a slower plan left to its own verdict, whereas the same plan without a trial is rolled back?
#[test]
fn a_trial_is_left_to_its_own_verdict() {
    let verdicts_with = |verification: Verification| {
        let policy = TestingPolicy(|window| leg_in_window(window, verification.clone()));
        rollback_windows(&run(policy, GuardConfig::default(), 60, |_, plan| {
            two_programs(plan, 0.2, None)
        }))
    };
    assert_eq!(verdicts_with(Verification::Trial), Vec::<usize>::new());
    assert!(!verdicts_with(Verification::BeforeAndAfter).is_empty());
}

/// If a trial breaks a goal, does it end, and the plan with it?
#[test]
fn a_trial_that_breaks_a_goal_ends() {
    let goal = Some(Goal {
        max_slowdown: Some(0.1),
        ..Goal::default()
    });
    let policy = TestingPolicy(|window| leg_in_window(window, Verification::Trial));
    let decisions = run(policy, GuardConfig::default(), 60, |_, plan| {
        two_programs(plan, 0.2, goal)
    });
    assert_eq!(
        rollback_windows(&decisions).len(),
        1,
        "the plan is on cooldown afterwards"
    );
    assert!(windows_with(&decisions, &new_plan()).len() < 10);
}

/// Does a plan that a trial found faster become the reference of the next change, so that returning to the old plan is
/// a loss?
#[test]
fn a_measured_plan_is_the_next_reference() {
    let verdicts_with = |verification: Verification| {
        let policy = TestingPolicy(|window| match window {
            0..10 => (idle_plan(), Verification::BeforeAndAfter),
            // Too short to be compared with the previous state.
            10 => (new_plan(), Verification::Trial),
            11 => (new_plan(), verification.clone()),
            12..14 => (new_plan(), Verification::BeforeAndAfter),
            _ => (idle_plan(), Verification::BeforeAndAfter),
        });
        rollback_windows(&run(policy, GuardConfig::default(), 40, |_, plan| {
            two_programs(plan, -0.5, None)
        }))
    };
    assert!(!verdicts_with(Verification::Measured).is_empty());
    assert_eq!(
        verdicts_with(Verification::BeforeAndAfter),
        Vec::<usize>::new(),
        "the plan before is still the reference"
    );
}

/// Is a plan that a trial found faster rolled back if it halves the speed of one program and gains the other little, by
/// the windows of both plans in the trial?
#[test]
fn a_measured_plan_that_harms_one_program_is_rolled_back() {
    let verdicts_with = |loss: f64| {
        let policy = TestingPolicy(|window| match window {
            0..10 => (idle_plan(), Verification::BeforeAndAfter),
            10..50 => (
                if window / 4 % 2 == 0 {
                    new_plan()
                } else {
                    idle_plan()
                },
                Verification::Trial,
            ),
            50 => (new_plan(), Verification::Measured),
            _ => (new_plan(), Verification::BeforeAndAfter),
        });
        rollback_windows(&run(policy, GuardConfig::default(), 60, |window, plan| {
            // All programs become slower in the middle, which is not an effect of either plan.
            let phase = if window < 30 { 1.0 } else { 0.95 };
            let slower = |task: TaskSample| TaskSample {
                progress: task.progress.map(|work| phase * work),
                ..task
            };
            two_programs(plan, loss, None)
                .into_iter()
                .map(slower)
                .collect()
        }))
    };
    assert_eq!(verdicts_with(0.5), [51]);
    assert_eq!(verdicts_with(-0.5), Vec::<usize>::new());
}
