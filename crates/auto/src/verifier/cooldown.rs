//! Cooldown of plans that failed, longer each time: the only memory of failures.
//!
//! A failed plan is refused for several windows; if it fails again, for twice as many, up to a bound. A policy may also
//! propose another bad plan each time, so after a failure, every change is refused for half as many windows, and this
//! number doubles with each failure in a row. The share of the time spent on trials of bad plans therefore falls with
//! every failure. A change that only released partitions or turns does not count as such a failure: its roll-back keeps
//! them, and the policy proposed nothing. A change that only resized partitions does not count either, because it
//! changes little.
//!
//! A plan shares its cooldown with its mirror images, in which like caches are exchanged ([`symmetry`]).

use cachemate_core::{Plan, Topology};

use super::live_tasks::{LiveTasks, is_same_placement, places_any_of};
use super::symmetry;

/// Largest number of doublings of a wait.
const MAX_DOUBLINGS: u32 = 5;
/// Number of plans that are stored.
const MAX_STORED_PLANS: usize = 64;
/// A plan counts as new if it has not failed again for this many of its cooldowns.
const REMEMBERED_COOLDOWNS: u64 = 8;

#[derive(Clone, Debug)]
struct FailedPlan {
    plan: Plan,
    tasks: LiveTasks,
    /// Window from which the plan may be applied again.
    cooldown_end: u64,
    /// If the plan fails again before this window, its cooldown doubles.
    memory_end: u64,
    failure_count: u32,
}

impl FailedPlan {
    /// Tasks that have exited do not count.
    fn has_same_placement(&self, plan: &Plan, live_tasks: &LiveTasks) -> bool {
        is_same_placement(&self.plan, plan, &self.tasks.intersection(live_tasks))
    }

    /// Whether a later failure may be one of the same plan: some of its tasks live, and so do some of those that it
    /// placed. Plans are compared for the remaining tasks, and without any, all plans are the same.
    fn concerns(&self, live_tasks: &LiveTasks) -> bool {
        let common_tasks = self.tasks.intersection(live_tasks);
        !common_tasks.tasks.is_empty()
            && (places_any_of(&self.plan, &common_tasks) || !places_any_of(&self.plan, &self.tasks))
    }

    /// Whether both plans are the same up to an exchange of like caches.
    fn is_mirror(&self, plan: &Plan, live_tasks: &LiveTasks, topology: &Topology) -> bool {
        symmetry::is_mirror(
            &self.plan,
            plan,
            &self.tasks.intersection(live_tasks),
            topology,
        )
    }
}

/// Failed plans, and their cooldowns.
#[derive(Clone, Debug, Default)]
pub struct PlanCooldown {
    failed_plans: Vec<FailedPlan>,
    /// Number of failures in a row; each change that is kept lowers it by one.
    consecutive_failures: u32,
    /// Window until which every change is refused.
    pause_end: u64,
}

/// The reason why a plan is refused, and the window until which it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CooldownReason {
    Failed { until: u64 },
    FailuresInARow { until: u64 },
}

impl PlanCooldown {
    /// Records a failed plan. Returns the number of windows for which it and its mirror images are on cooldown.
    pub fn record_failure(
        &mut self,
        plan: &Plan,
        live_tasks: &LiveTasks,
        topology: &Topology,
        window: u64,
        cooldown_windows: u64,
    ) -> u64 {
        self.forget(window);
        let mirror_images = self.failed_plans.iter().filter(|failed| {
            failed.concerns(live_tasks) && failed.is_mirror(plan, live_tasks, topology)
        });
        let failure_count = mirror_images
            .map(|failed| failed.failure_count)
            .max()
            .unwrap_or(0)
            + 1;

        self.failed_plans
            .retain(|failed| !failed.has_same_placement(plan, live_tasks));
        let windows = cooldown_windows.saturating_mul(1 << (failure_count - 1).min(MAX_DOUBLINGS));
        let cooldown_end = window.saturating_add(windows);
        let memory_end = cooldown_end.saturating_add(windows.saturating_mul(REMEMBERED_COOLDOWNS));
        if self.failed_plans.len() == MAX_STORED_PLANS {
            self.failed_plans.remove(0);
        }

        self.failed_plans.push(FailedPlan {
            plan: plan.clone(),
            tasks: live_tasks.clone(),
            cooldown_end,
            memory_end,
            failure_count,
        });
        windows
    }

    /// Pauses all plans for some time, because a plan that a policy chose has failed in this window.
    pub fn pause(&mut self, window: u64, cooldown_windows: u64) {
        let pause_windows = (cooldown_windows / 2)
            .saturating_mul(1 << self.consecutive_failures.min(MAX_DOUBLINGS));
        self.pause_end = window.saturating_add(pause_windows);
        self.consecutive_failures = self.consecutive_failures.saturating_add(1);
    }

    /// Records that a change was kept.
    pub fn record_success(&mut self) {
        self.consecutive_failures = self.consecutive_failures.saturating_sub(1);
    }

    /// Forgets plans that would count as new.
    pub fn forget(&mut self, window: u64) {
        self.failed_plans
            .retain(|failed| window < failed.memory_end);
    }

    pub fn is_empty(&self) -> bool {
        self.failed_plans.is_empty()
    }

    /// Whether every change is refused in this window.
    pub fn is_paused(&self, window: u64) -> bool {
        window < self.pause_end
    }

    /// The window until which this plan is on cooldown; `None` if it is not. `replacement` is the plan that would be in
    /// force instead.
    pub fn exclusion_end(
        &self,
        plan: &Plan,
        replacement: &Plan,
        live_tasks: &LiveTasks,
        topology: &Topology,
        window: u64,
    ) -> Option<u64> {
        // If both plans are the same for the remaining tasks, refusing has no effect. The plan in its place may itself
        // be a mirror image; then only the failed plan itself is refused.
        let must_refuse = |failed: &&FailedPlan| {
            let is_same_plan = failed.has_same_placement(plan, live_tasks)
                && !failed.has_same_placement(replacement, live_tasks);
            let is_mirror_plan = || {
                failed.is_mirror(plan, live_tasks, topology)
                    && !failed.is_mirror(replacement, live_tasks, topology)
            };
            is_same_plan || is_mirror_plan()
        };

        let mut plans_on_cooldown = self
            .failed_plans
            .iter()
            .filter(|failed| window < failed.cooldown_end);
        plans_on_cooldown
            .find(must_refuse)
            .map(|failed| failed.cooldown_end)
    }

    /// The reason why this plan must be refused in this window, if any. `replacement` is the plan that would be in
    /// force instead.
    pub fn refusal_of(
        &self,
        plan: &Plan,
        replacement: &Plan,
        live_tasks: &LiveTasks,
        topology: &Topology,
        window: u64,
    ) -> Option<CooldownReason> {
        if let Some(end_window) =
            self.exclusion_end(plan, replacement, live_tasks, topology, window)
        {
            return Some(CooldownReason::Failed { until: end_window });
        }
        let is_change = self.is_paused(window) && !is_same_placement(plan, replacement, live_tasks);
        is_change.then_some(CooldownReason::FailuresInARow {
            until: self.pause_end,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verifier::tests::{pinned_plan, topology_fixture};
    use cachemate_core::{ProcessId, TaskId};

    fn live_tasks(ids: &[u32]) -> LiveTasks {
        LiveTasks {
            tasks: ids.iter().map(|id| TaskId(*id)).collect(),
            processes: ids.iter().map(|id| ProcessId(*id)).collect(),
        }
    }

    /// Is a plan of other tasks new, also if a task lives on that neither plan places, while the same plan for the
    /// remaining tasks is not?
    #[test]
    fn does_a_first_failure_have_a_first_cooldown_after_all_tasks_of_the_last_one_exited() {
        let topology = topology_fixture();
        let cooldown_of = |pins: &[(u32, u32)], tasks: &[u32]| {
            let mut cooldown = PlanCooldown::default();
            let first = pinned_plan(&[(1, 0), (2, 2)]);
            for window in 0..5 {
                cooldown.record_failure(&first, &live_tasks(&[1, 2, 9]), &topology, window, 60);
            }
            let plan = pinned_plan(pins);
            cooldown.record_failure(&plan, &live_tasks(tasks), &topology, 100, 60)
        };
        assert_eq!(cooldown_of(&[(3, 0), (4, 2)], &[3, 4]), 60);
        assert_eq!(cooldown_of(&[(3, 0), (4, 2)], &[3, 4, 9]), 60);
        assert_eq!(cooldown_of(&[(1, 0)], &[1, 9]), 32 * 60);
        assert_eq!(cooldown_of(&[(1, 2)], &[1, 9]), 32 * 60, "a mirror image");
    }

    /// Is a failed plan forgotten once it would count as new?
    #[test]
    fn are_old_failures_forgotten() {
        let mut cooldown = PlanCooldown::default();
        let (plan, topology) = (pinned_plan(&[(1, 0)]), topology_fixture());
        cooldown.record_failure(&plan, &live_tasks(&[1]), &topology, 0, 60);
        let end = 60 * (1 + REMEMBERED_COOLDOWNS);
        cooldown.forget(end - 1);
        assert!(!cooldown.is_empty());
        cooldown.forget(end);
        assert!(cooldown.is_empty());
    }

    /// Does every failure in a row double the pause, up to a bound, and a success shorten it?
    #[test]
    fn failures_in_a_row_lengthen_the_pause() {
        let mut cooldown = PlanCooldown::default();
        let pause_at = |cooldown: &mut PlanCooldown, pause_start: u64| {
            cooldown.pause(pause_start, 60);
            (pause_start..)
                .take_while(|&window| cooldown.is_paused(window))
                .count()
        };
        let pauses: Vec<usize> = (0..8)
            .map(|nth| pause_at(&mut cooldown, 1_000 * nth))
            .collect();
        assert_eq!(pauses, [30, 60, 120, 240, 480, 960, 960, 960]);
        let mut cooldown = PlanCooldown::default();
        cooldown.pause(0, 60);
        cooldown.record_success();
        assert_eq!(pause_at(&mut cooldown, 100), 30);
    }
}
