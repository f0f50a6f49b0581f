//! Plans that made things worse stay out, longer each time.
//!
//! A plan that failed is refused for some windows; if it fails again, for twice as many, within a bound. A policy may also
//! find another bad plan each time: from the second failure in a row on, every change is refused for a while, which
//! doubles as well. So what trials of bad plans cost is a share of the time that falls with every failure.
//!
//! A plan and its mirror images, which differ only in which of several like caches holds whom, count as one ([`symmetry`]).

use cachemate_core::{Plan, Topology};

use super::live_tasks::{LiveTasks, same_placement};
use super::symmetry;

/// Times that a wait is doubled, at most.
const DOUBLED_AT_MOST: u32 = 4;
/// Plans that are remembered.
const REMEMBERED: usize = 64;
/// The first wait after failures in a row, as a part of that for one plan.
const FIRST_HOLD: u64 = 4;

#[derive(Clone, Debug)]
struct FailedPlan {
    plan: Plan,
    knew: LiveTasks,
    /// It may come again in this window.
    refused_until: u64,
    /// If it fails again before this window, it is out for longer.
    remembered_until: u64,
    times: u32,
}

impl FailedPlan {
    /// Does a plan say of the tasks that are still there what this one said?
    fn is(&self, plan: &Plan, present: &LiveTasks) -> bool {
        same_placement(&self.plan, plan, &self.knew.common(present))
    }

    /// The same up to an exchange of like caches.
    fn is_mirror(&self, plan: &Plan, present: &LiveTasks, topology: &Topology) -> bool {
        symmetry::is_mirror(&self.plan, plan, &self.knew.common(present), topology)
    }
}

/// What failed, and how long it is refused.
#[derive(Clone, Debug, Default)]
pub struct PlanCooldown {
    failed: Vec<FailedPlan>,
    /// Failures without a change that was kept.
    in_a_row: u32,
    /// Every change is refused until then.
    any_plan_until: u64,
}

/// Why a plan is refused, and until which window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CooldownReason {
    Failed { until: u64 },
    FailuresInARow { until: u64 },
}

impl PlanCooldown {
    /// A plan made things worse; for how many windows it and its mirror images stay out.
    pub fn record_failure(
        &mut self,
        plan: &Plan,
        present: &LiveTasks,
        topology: &Topology,
        window: u64,
        keep_out_windows: u64,
    ) -> u64 {
        self.failed.retain(|failed| window < failed.remembered_until);
        let images = self.failed.iter().filter(|failed| failed.is_mirror(plan, present, topology));
        let times = images.map(|failed| failed.times).max().unwrap_or(0) + 1;
        self.failed.retain(|failed| !failed.is(plan, present));
        let windows = keep_out_windows.saturating_mul(1 << (times - 1).min(DOUBLED_AT_MOST));
        let until = window.saturating_add(windows);
        let remembered_until = until.saturating_add(windows.saturating_mul(2));
        if self.failed.len() == REMEMBERED {
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
            let hold = (keep_out_windows / FIRST_HOLD).saturating_mul(1 << doubled.min(2 + DOUBLED_AT_MOST));
            self.any_plan_until = window.saturating_add(hold);
        }
        windows
    }

    /// A change was kept.
    pub fn record_success(&mut self) {
        self.in_a_row = self.in_a_row.saturating_sub(1);
    }

    /// Is this plan to be refused in this window? `instead` is what would be put in its place.
    pub fn refuses(
        &self,
        plan: &Plan,
        instead: &Plan,
        present: &LiveTasks,
        topology: &Topology,
        window: u64,
    ) -> Option<CooldownReason> {
        // Where both are alike for those who are left, refusing means nothing. What is put in its place may itself be a
        // mirror image, and then only the plan that failed is told apart.
        let told_apart = |failed: &&FailedPlan| {
            let exactly = failed.is(plan, present) && !failed.is(instead, present);
            let mirrored =
                || failed.is_mirror(plan, present, topology) && !failed.is_mirror(instead, present, topology);
            exactly || mirrored()
        };
        let failed = self.failed.iter().filter(|failed| window < failed.refused_until).find(told_apart);
        if let Some(failed) = failed {
            return Some(CooldownReason::Failed { until: failed.refused_until });
        }
        let changed = window < self.any_plan_until && !same_placement(plan, instead, present);
        changed.then_some(CooldownReason::FailuresInARow { until: self.any_plan_until })
    }
}
