//! Cooldown of plans that failed, longer each time: the only memory of failures.
//!
//! A failed plan is refused for several windows; if it fails again, for twice as many, up to a bound. A policy may also
//! propose another bad plan each time, so after a failure, every change is refused for half as many windows, and this
//! number doubles with each failure in a row. The share of the time spent on trials of bad plans therefore falls with
//! every failure. A change that only released partitions or turns does not count as such a failure: its roll-back keeps
//! them, and the policy proposed nothing. Nor does one that only resized partitions, which changes little.
//!
//! A plan shares its cooldown with its mirror images, in which like caches are exchanged ([`symmetry`]).

use cachemate_core::{Plan, Topology};

use super::live_tasks::{LiveTasks, same_placement};
use super::symmetry;

/// Largest number of doublings of a wait.
const MAX_DOUBLINGS: u32 = 5;
/// Number of plans that are stored.
const MAX_STORED: usize = 64;
/// A plan counts as new if it has not failed again for this many of its cooldowns.
const REMEMBERED_COOLDOWNS: u64 = 8;

#[derive(Clone, Debug)]
struct FailedPlan {
    plan: Plan,
    known_tasks: LiveTasks,
    /// Window from which the plan may be applied again.
    refused_until: u64,
    /// If the plan fails again before this window, its cooldown doubles.
    remembered_until: u64,
    times: u32,
}

impl FailedPlan {
    /// Are both plans the same for the live tasks?
    fn has_same_placement(&self, plan: &Plan, live_tasks: &LiveTasks) -> bool {
        same_placement(&self.plan, plan, &self.known_tasks.common_tasks(live_tasks))
    }

    /// Are both plans the same up to an exchange of like caches?
    fn is_mirror(&self, plan: &Plan, live_tasks: &LiveTasks, topology: &Topology) -> bool {
        symmetry::is_mirror(&self.plan, plan, &self.known_tasks.common_tasks(live_tasks), topology)
    }
}

/// Failed plans, and their cooldowns.
#[derive(Clone, Debug, Default)]
pub struct PlanCooldown {
    failed: Vec<FailedPlan>,
    /// Number of failures since the last change that was kept.
    in_a_row: u32,
    /// Window until which every change is refused.
    any_plan_until: u64,
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
        self.failed.retain(|failed| window < failed.remembered_until);
        let images = self.failed.iter().filter(|failed| failed.is_mirror(plan, live_tasks, topology));
        let times = images.map(|failed| failed.times).max().unwrap_or(0) + 1;
        self.failed.retain(|failed| !failed.has_same_placement(plan, live_tasks));
        let windows = cooldown_windows.saturating_mul(1 << (times - 1).min(MAX_DOUBLINGS));
        let cooldown_end = window.saturating_add(windows);
        let remembered_until = cooldown_end.saturating_add(windows.saturating_mul(REMEMBERED_COOLDOWNS));
        if self.failed.len() == MAX_STORED {
            self.failed.remove(0);
        }
        self.failed.push(FailedPlan {
            plan: plan.clone(),
            known_tasks: live_tasks.clone(),
            refused_until: cooldown_end,
            remembered_until,
            times,
        });
        windows
    }

    /// Pauses all plans for some time, because a plan that a policy chose has failed in this window.
    pub fn pause(&mut self, window: u64, cooldown_windows: u64) {
        let pause = (cooldown_windows / 2).saturating_mul(1 << self.in_a_row.min(MAX_DOUBLINGS));
        self.any_plan_until = window.saturating_add(pause);
        self.in_a_row = self.in_a_row.saturating_add(1);
    }

    /// Records that a change was kept.
    pub fn record_success(&mut self) {
        self.in_a_row = self.in_a_row.saturating_sub(1);
    }

    /// Are no plans stored?
    pub fn is_empty(&self) -> bool {
        self.failed.is_empty()
    }

    /// Is every change refused in this window?
    pub fn is_paused(&self, window: u64) -> bool {
        window < self.any_plan_until
    }

    /// Returns the window until which this plan is on cooldown. `instead` is the plan in its place.
    pub fn exclusion_end(
        &self,
        plan: &Plan,
        instead: &Plan,
        live_tasks: &LiveTasks,
        topology: &Topology,
        window: u64,
    ) -> Option<u64> {
        // If both plans are the same for the remaining tasks, refusing has no effect. The plan in its place may itself
        // be a mirror image; then only the failed plan itself is refused.
        let is_distinguishable = |failed: &&FailedPlan| {
            let exactly =
                failed.has_same_placement(plan, live_tasks) && !failed.has_same_placement(instead, live_tasks);
            let mirrored =
                || failed.is_mirror(plan, live_tasks, topology) && !failed.is_mirror(instead, live_tasks, topology);
            exactly || mirrored()
        };
        let mut failed = self.failed.iter().filter(|failed| window < failed.refused_until);
        failed.find(is_distinguishable).map(|failed| failed.refused_until)
    }

    /// Must this plan be refused in this window? `instead` is the plan in its place.
    pub fn refusal_of(
        &self,
        plan: &Plan,
        instead: &Plan,
        live_tasks: &LiveTasks,
        topology: &Topology,
        window: u64,
    ) -> Option<CooldownReason> {
        if let Some(until) = self.exclusion_end(plan, instead, live_tasks, topology, window) {
            return Some(CooldownReason::Failed { until });
        }
        let is_change = self.is_paused(window) && !same_placement(plan, instead, live_tasks);
        is_change.then_some(CooldownReason::FailuresInARow { until: self.any_plan_until })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does every failure in a row double the pause, up to a bound, and a success shorten it?
    #[test]
    fn failures_in_a_row_lengthen_the_pause() {
        let mut cooldown = PlanCooldown::default();
        let pause_at = |cooldown: &mut PlanCooldown, pause_start: u64| {
            cooldown.pause(pause_start, 60);
            (pause_start..).take_while(|&window| cooldown.is_paused(window)).count()
        };
        let pauses: Vec<usize> = (0..8).map(|nth| pause_at(&mut cooldown, 1_000 * nth)).collect();
        assert_eq!(pauses, [30, 60, 120, 240, 480, 960, 960, 960]);
        let mut cooldown = PlanCooldown::default();
        cooldown.pause(0, 60);
        cooldown.record_success();
        assert_eq!(pause_at(&mut cooldown, 100), 30);
    }
}
