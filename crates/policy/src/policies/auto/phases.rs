//! What happens where a task turns to another phase: what was decided for it before is nothing to it now.
//!
//! Its part of a cache and its turns are given up at once, its place is kept, and all others keep what they have. Where the
//! phase's kind was there before, its curve and its speed are recalled, so that the next look is due at once. Properties: where
//! no phase turns nothing changes here.

use cachemate_core::{Member, Plan, ProcessId, TaskId, View};

use super::Auto;
use super::holding::Holding;
use super::speeds::PhaseNow;

/// How often tasks come, go or turn to other phases: a trial has to come to its end in between.
#[derive(Clone, Copy, Default)]
pub struct Changes {
    pub first_window: Option<u64>,
    count: u64,
}

/// Fewer say nothing of how often there are any.
const CHANGES_AT_LEAST: u64 = 2;

impl Changes {
    pub fn note(&mut self) {
        self.count += 1;
    }

    /// Is there time for so many windows between two changes, in the mean so far?
    pub fn leave(&self, windows: u32, now: u64) -> bool {
        let since = now.saturating_sub(self.first_window.unwrap_or(now));
        self.count < CHANGES_AT_LEAST || since >= self.count * u64::from(windows)
    }
}

/// The phase that a task is in.
pub fn now(view: &View<'_>, task: TaskId) -> PhaseNow {
    let profile = view.profiles.get(&task);
    (profile.map_or(0, |profile| profile.phase_number), profile.and_then(|one| Some(one.phase.kind.as_ref()?.value)))
}

/// Are the kinds of all phases told? Until then a window may be of two phases.
pub fn are_told(view: &View<'_>) -> bool {
    view.present().all(|seen| now(view, seen.task).1.is_some())
}

impl Auto {
    /// Has a task gone on to another phase since the last look?
    pub(super) fn phase_turned(&self, view: &View<'_>) -> bool {
        let Some((last, _)) = &self.looked_at else { return false };
        let turned = |(task, then, _): &(TaskId, u32, bool)| {
            now(view, *task).0 != *then && view.present().any(|seen| seen.task == *task)
        };
        last.iter().any(turned)
    }

    /// What holds without the parts and turns of those whose phases have turned.
    pub(super) fn without_turned(&mut self, view: &View<'_>, mut kept: Holding) -> Holding {
        self.turned = true;
        let mut turned: Vec<(TaskId, ProcessId)> = Vec::new();
        if let Some((last, _)) = &mut self.looked_at {
            for (task, then, known) in last {
                let phase = now(view, *task).0;
                if *then != phase {
                    // The next look is due as soon as the task is known again, or given up.
                    (*then, *known) = (phase, false);
                    let process = view.present().find(|seen| seen.task == *task).map(|seen| seen.process);
                    turned.extend(process.map(|process| (*task, process)));
                }
            }
        }
        free(&mut kept.0, &turned);
        kept
    }
}

/// Takes tasks out of their parts of caches, and gives up turns that they have a part in. Their CPUs stay.
fn free(plan: &mut Plan, turned: &[(TaskId, ProcessId)]) {
    let is_of = |member: &Member| match member {
        Member::Task(task) => turned.iter().any(|(one, _)| one == task),
        Member::Process(process) => turned.iter().any(|(_, one)| one == process),
    };
    plan.shares.iter_mut().for_each(|share| share.members.retain(|member| !is_of(member)));
    plan.shares.retain(|share| !share.members.is_empty());
    plan.gangs.retain(|schedule| {
        let mut members = schedule.gangs.iter().flat_map(|gang| &gang.members);
        !members.any(|(task, _)| is_of(&Member::Task(*task)))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{CacheId, CacheShare, CpuSet, Gang, GangSchedule, GroupId, IndexSet, Units, Window};

    /// Does a task whose phase turns lose its part and its turns, and nobody else anything?
    #[test]
    fn only_who_turned_loses_what_was_decided() {
        let share = |id: u32, members: &[u32]| CacheShare {
            group: GroupId(id),
            cache: CacheId(0),
            members: members.iter().map(|&task| Member::Task(TaskId(task))).collect(),
            units: Units::Ways { mask: IndexSet::default() },
        };
        let schedule = |cpu: &str, tasks: [u32; 2]| GangSchedule {
            cpus: cpu.parse::<CpuSet>().unwrap(),
            slice_ns: 1,
            gangs: tasks.map(|task| Gang { members: vec![(TaskId(task), None)], slices: 1 }).to_vec(),
        };
        let mut plan = Plan::idle(Window::Time { ns: 1 });
        plan.shares = vec![share(1, &[0]), share(2, &[1, 2])];
        plan.gangs = vec![schedule("0", [0, 3]), schedule("1", [1, 2])];
        plan.affinity.insert(TaskId(0), "0".parse().unwrap());
        free(&mut plan, &[(TaskId(0), ProcessId(7))]);
        assert_eq!(plan.shares, [share(2, &[1, 2])]);
        assert_eq!(plan.gangs, [schedule("1", [1, 2])]);
        assert!(plan.affinity.contains_key(&TaskId(0)));
        free(&mut plan, &[(TaskId(1), ProcessId(7))]);
        assert_eq!(plan.shares, [share(2, &[2])]);
    }
}
