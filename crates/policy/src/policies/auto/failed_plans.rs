//! Plans that measured no better, and how long they and all other plans are not tried.

use cachemate_core::{Plan, View};

use super::model::decided_plan::DecidedPlan;
use super::model::problem_cache::LOOK_AGAIN_AFTER;
use crate::rollback_guard::live_tasks::LiveTasks;
use crate::rollback_guard::symmetry::is_mirror;

/// Windows of the first cooldown of a failed plan.
const COOLDOWN_WINDOWS: u64 = 60;
/// Number of failed plans that are stored.
const MAX_FAILED_PLANS: usize = 64;
/// A wait doubles so many times.
const MAX_DOUBLINGS: u32 = 6;

struct PlanFailure {
    plan: DecidedPlan,
    /// The first window in which it may be tried again.
    until: u64,
    failures: u32,
}

/// Failed plans with their cooldowns, which double with each failure.
#[derive(Default)]
pub struct FailedPlans {
    plans: Vec<PlanFailure>,
    paused_until: u64,
    in_a_row: u32,
}

impl FailedPlans {
    /// A plan measured no better in this window: it is on cooldown, and no plan is tried for a while.
    pub fn record_failure(&mut self, plan: &Plan, window: u64) {
        let failures = match self.plans.iter_mut().find(|failed| failed.plan.is_same(plan)) {
            Some(failed) => {
                failed.failures += 1;
                failed.until = window + (COOLDOWN_WINDOWS << failed.failures.min(MAX_DOUBLINGS));
                failed.failures
            }
            None => {
                if self.plans.len() == MAX_FAILED_PLANS {
                    self.plans.remove(0);
                }
                let plan = DecidedPlan(plan.clone());
                self.plans.push(PlanFailure { plan, until: window + COOLDOWN_WINDOWS, failures: 0 });
                0
            }
        };
        self.in_a_row += 1;
        self.paused_until = window + (LOOK_AGAIN_AFTER << self.in_a_row.max(failures).min(MAX_DOUBLINGS)) / 2;
    }

    /// A plan was kept.
    pub fn record_success(&mut self) {
        self.in_a_row = 0;
    }

    /// Does no plan have to be compared with failed ones?
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Is no plan tried in this window?
    pub fn is_paused(&self, window: u64) -> bool {
        window < self.paused_until
    }

    /// Is the plan on cooldown, or its image on like caches? An image of a failed plan that is in force is not.
    pub fn excludes(&self, plan: &DecidedPlan, in_force: &DecidedPlan, view: &View<'_>) -> bool {
        let live = LiveTasks::of(&view.observation.tasks);
        let is_image = |failed: &DecidedPlan, plan: &Plan| is_mirror(&failed.0, plan, &live, view.topology);
        self.plans.iter().any(|failed| {
            view.observation.window < failed.until
                && (plan.is_same(&failed.plan.0)
                    || is_image(&failed.plan, &plan.0) && !is_image(&failed.plan, &in_force.0))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{NullPredictor, capabilities, last_level_caches, observation};
    use cachemate_core::{CacheLevel, Profiles, TaskId, WindowLength};

    fn pinned(cpus: [&str; 2]) -> DecidedPlan {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        plan.affinity = (0..).map(TaskId).zip(cpus.map(|cpus| cpus.parse().unwrap())).collect();
        DecidedPlan(plan)
    }

    fn is_excluded(failed: &FailedPlans, window: u64, plan: &DecidedPlan, in_force: &DecidedPlan) -> bool {
        let view = View {
            topology: &last_level_caches(2, 2, CacheLevel::L3, 1 << 20),
            capabilities: &capabilities(&[]),
            observation: &observation(window, 2),
            profiles: &Profiles::new(),
            previous_plan: &in_force.0,
            predictor: &NullPredictor,
        };
        failed.excludes(plan, in_force, &view)
    }

    /// Is a failed plan excluded with its image on like caches, for longer after each failure, and no other plan?
    #[test]
    fn a_failed_plan_and_its_image_are_excluded() {
        let (failing, image, other) = (pinned(["0-1", "2-3"]), pinned(["2-3", "0-1"]), pinned(["0-1", "0-1"]));
        let idle = pinned(["0-3", "0-3"]);
        let mut failed = FailedPlans::default();
        failed.record_failure(&failing.0, 100);
        assert!(is_excluded(&failed, 159, &failing, &idle) && is_excluded(&failed, 159, &image, &idle));
        assert!(!is_excluded(&failed, 159, &other, &idle) && !is_excluded(&failed, 160, &failing, &idle));
        assert!(!is_excluded(&failed, 159, &image, &image), "an image that is in force stays");
        failed.record_failure(&failing.0, 200);
        assert!(is_excluded(&failed, 319, &failing, &idle) && !is_excluded(&failed, 320, &failing, &idle));
    }

    /// Does every failure in a row double the pause, up to a bound, and a success end the row?
    #[test]
    fn failures_in_a_row_lengthen_the_pause() {
        let pause = |failed: &FailedPlans, from: u64| (from..).take_while(|&window| failed.is_paused(window)).count();
        let mut failed = FailedPlans::default();
        let mut pauses = Vec::new();
        for nth in 0..8 {
            let plan = pinned([["0", "1", "2", "3"][nth % 4], ["0-1", "2-3"][nth / 4]]);
            failed.record_failure(&plan.0, 1_000 * nth as u64);
            pauses.push(pause(&failed, 1_000 * nth as u64));
        }
        assert_eq!(pauses, [30, 60, 120, 240, 480, 960, 960, 960]);
        failed.record_success();
        failed.record_failure(&pinned(["3", "3"]).0, 9_000);
        assert_eq!(pause(&failed, 9_000), 30);
    }
}
