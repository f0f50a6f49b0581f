//! Cooldown of plans that made programs slower, longer each time.
//!
//! A failed plan is refused for some windows; if it fails again, for twice as many, up to a bound. A policy may also
//! propose another bad plan each time, so from the second failure in a row on, every change is refused for a while,
//! which doubles as well. The time spent on trials of bad plans is therefore a share that falls with every failure.
//!
//! A plan shares its cooldown with its mirror images, in which like caches are exchanged ([`symmetry`]).

use cachemate_core::{Plan, Topology};

use super::live_tasks::{LiveTasks, same_placement};
use super::symmetry;

/// Maximal doublings of a wait.
const MAX_DOUBLINGS: u32 = 4;
/// Number of plans that are stored.
const MAX_STORED: usize = 64;
/// The first wait after failures in a row, as a fraction of the wait for one plan.
const FIRST_HOLD: u64 = 4;

#[derive(Clone, Debug)]
struct FailedPlan {
    plan: Plan,
    knew: LiveTasks,
    /// The plan may be applied again in this window.
    refused_until: u64,
    /// If it fails again before this window, its cooldown doubles.
    remembered_until: u64,
    times: u32,
}

impl FailedPlan {
    /// Are both plans the same for the live tasks?
    fn is(&self, plan: &Plan, present: &LiveTasks) -> bool {
        same_placement(&self.plan, plan, &self.knew.common(present))
    }

    /// The same up to an exchange of like caches.
    fn is_mirror(&self, plan: &Plan, present: &LiveTasks, topology: &Topology) -> bool {
        symmetry::is_mirror(&self.plan, plan, &self.knew.common(present), topology)
    }
}

/// Failed plans, and their cooldowns.
#[derive(Clone, Debug, Default)]
pub struct PlanCooldown {
    failed: Vec<FailedPlan>,
    /// Failures without a change that was kept.
    in_a_row: u32,
    /// Every change is refused until then.
    any_plan_until: u64,
}

/// The reason why a plan is refused, and until which window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CooldownReason {
    Failed { until: u64 },
    FailuresInARow { until: u64 },
}

impl PlanCooldown {
    /// Records a failed plan, and returns for how many windows it and its mirror images are on cooldown.
    pub fn record_failure(
        &mut self,
        plan: &Plan,
        present: &LiveTasks,
        topology: &Topology,
        window: u64,
        cooldown_windows: u64,
    ) -> u64 {
        self.failed.retain(|failed| window < failed.remembered_until);
        let images = self.failed.iter().filter(|failed| failed.is_mirror(plan, present, topology));
        let times = images.map(|failed| failed.times).max().unwrap_or(0) + 1;
        self.failed.retain(|failed| !failed.is(plan, present));
        let windows = cooldown_windows.saturating_mul(1 << (times - 1).min(MAX_DOUBLINGS));
        let until = window.saturating_add(windows);
        let remembered_until = until.saturating_add(windows.saturating_mul(2));
        if self.failed.len() == MAX_STORED {
            self.failed.remove(0);
        }
        self.failed.push(FailedPlan {
            plan: plan.clone(),
            knew: present.clone(),
            refused_until: until,
            remembered_until,
            times,
        });
        self.in_a_row = self.in_a_row.saturating_add(1);
        if let Some(doubled) = self.in_a_row.checked_sub(2) {
            let hold = (cooldown_windows / FIRST_HOLD).saturating_mul(1 << doubled.min(2 + MAX_DOUBLINGS));
            self.any_plan_until = window.saturating_add(hold);
        }
        windows
    }

    /// A change was kept.
    pub fn record_success(&mut self) {
        self.in_a_row = self.in_a_row.saturating_sub(1);
    }

    /// Is this plan to be refused in this window? `instead` is the plan in its place.
    pub fn refuses(
        &self,
        plan: &Plan,
        instead: &Plan,
        present: &LiveTasks,
        topology: &Topology,
        window: u64,
    ) -> Option<CooldownReason> {
        // If both are the same for the remaining tasks, refusing has no effect. The plan in its place may itself be a
        // mirror image; then only the failed plan itself is refused.
        let differs = |failed: &&FailedPlan| {
            let exactly = failed.is(plan, present) && !failed.is(instead, present);
            let mirrored =
                || failed.is_mirror(plan, present, topology) && !failed.is_mirror(instead, present, topology);
            exactly || mirrored()
        };
        let failed = self.failed.iter().filter(|failed| window < failed.refused_until).find(differs);
        if let Some(failed) = failed {
            return Some(CooldownReason::Failed { until: failed.refused_until });
        }
        let changed = window < self.any_plan_until && !same_placement(plan, instead, present);
        changed.then_some(CooldownReason::FailuresInARow { until: self.any_plan_until })
    }
}
