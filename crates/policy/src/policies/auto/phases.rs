//! What happens where a task turns to another phase: what was decided for it before is nothing to it now.
//!
//! Its part of a cache and its turns are given up at once, its place is kept, and all others keep what they have. Where the
//! phase's kind was there before, its curve and its speed are recalled, so that the next look is due at once. Properties: where
//! no phase turns nothing changes here.

use cachemate_core::{Plan, ProcessId, ShareMember, TaskId, View};

use super::Auto;
use super::decided_plan::DecidedPlan;
use super::speeds::CurrentPhase;

/// How often tasks come, go or turn to other phases: a trial has to come to its end in between.
#[derive(Clone, Copy, Default)]
pub struct ArrivalRate {
    pub first_window: Option<u64>,
    count: u64,
}

/// Fewer say nothing of how often there are any.
const CHANGES_AT_LEAST: u64 = 2;

impl ArrivalRate {
    pub fn record_change(&mut self) {
        self.count += 1;
    }

    /// Is there time for so many windows between two changes, in the mean so far?
    pub fn leave(&self, windows: u32, now: u64) -> bool {
        let since = now.saturating_sub(self.first_window.unwrap_or(now));
        self.count < CHANGES_AT_LEAST || since >= self.count * u64::from(windows)
    }
}

/// The phase that a task is in.
pub fn current_phase(view: &View<'_>, task: TaskId) -> CurrentPhase {
    let profile = view.profiles.get(&task);
    (profile.map_or(0, |profile| profile.phase_number), profile.and_then(|one| Some(one.phase.kind.as_ref()?.value)))
}

/// Are the kinds of all phases told? Until then a window may be of two phases.
pub fn are_told(view: &View<'_>) -> bool {
    view.live_tasks().all(|seen| current_phase(view, seen.task).1.is_some())
}

impl Auto {
    /// Has a task gone on to another phase since the last look?
    pub(super) fn phase_turned(&self, view: &View<'_>) -> bool {
        let Some((last, _)) = &self.looked_at else { return false };
        let turned = |(task, then, _): &(TaskId, u32, bool)| {
            current_phase(view, *task).0 != *then && view.live_tasks().any(|seen| seen.task == *task)
        };
        last.iter().any(turned)
    }

    /// What holds without the parts and turns of those whose phases have turned.
    pub(super) fn without_turned(&mut self, view: &View<'_>, mut kept: DecidedPlan) -> DecidedPlan {
        self.phase_changed = true;
        let mut turned: Vec<(TaskId, ProcessId)> = Vec::new();
        if let Some((last, _)) = &mut self.looked_at {
            for (task, then, known) in last {
                let phase = current_phase(view, *task).0;
                if *then != phase {
                    self.phase_changed_at.insert(*task, view.observation.window);
                    // The next look is due as soon as the task is known again, or given up.
                    (*then, *known) = (phase, false);
                    let process = view.live_tasks().find(|seen| seen.task == *task).map(|seen| seen.process);
                    turned.extend(process.map(|process| (*task, process)));
                }
            }
        }
        let before = kept.clone();
        free(&mut kept.0, &turned);
        self.released |= !before.is_same(&kept.0);
        kept
    }
}

/// Takes tasks out of their parts of caches, and gives up turns that they have a part in. Their CPUs stay.
fn free(plan: &mut Plan, turned: &[(TaskId, ProcessId)]) {
    let is_of = |member: &ShareMember| match member {
        ShareMember::Task(task) => turned.iter().any(|(one, _)| one == task),
        ShareMember::Process(process) => turned.iter().any(|(_, one)| one == process),
    };
    plan.shares.iter_mut().for_each(|share| share.members.retain(|member| !is_of(member)));
    plan.shares.retain(|share| !share.members.is_empty());
    plan.gangs.retain(|schedule| {
        let mut members = schedule.gangs.iter().flat_map(|gang| &gang.members);
        !members.any(|(task, _)| is_of(&ShareMember::Task(*task)))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{NullPredictor, capabilities, last_level_caches, observation};
    use cachemate_core::{
        Ability, CacheId, CacheLevel, CacheShare, CounterEvent, CpuId, CpuSet, EventCount, EventCounts, Gang,
        GangSchedule, GroupId, IndexSet, Policy, Profile, Profiles, Units, WindowLength,
    };

    /// Two tasks in parts of a cache, the first in its second phase: what is decided if this is in force.
    fn decided(policy: &mut Auto, window: u64, before: &Plan) -> Plan {
        let (topology, can) = (last_level_caches(1, 2, CacheLevel::L3, 1 << 20), capabilities(&[Ability::Ways]));
        let mut seen = observation(window, 2);
        let reading = |event| EventCount { event, count: 1_000_000, enabled_share: 1.0 };
        for task in &mut seen.tasks {
            task.counts = EventCounts([CounterEvent::Instructions, CounterEvent::Cycles].map(reading).to_vec());
            task.on_cpu_ns = vec![(CpuId(task.task.0), 1_000_000_000)];
        }
        let profile = |id: u32| Profile { phase_number: 1 - id, ..Profile::default() };
        let profiles: Profiles = (0..2).map(|id| (TaskId(id), profile(id))).collect();
        let (topology, capabilities, seen, profiles) = (&topology, &can, &seen, &profiles);
        let view = View {
            topology,
            capabilities,
            observation: seen,
            profiles,
            previous_plan: before,
            predictor: &NullPredictor,
        };
        policy.decide(&view).plan
    }

    /// A part that was given up at a turn is put back from above: is that no failure, as it is where a decision is?
    #[test]
    fn giving_up_is_no_plan_that_can_fail() {
        let share = |id: u32| CacheShare {
            group: GroupId(id),
            cache: CacheId(0),
            members: vec![ShareMember::Process(ProcessId(id))],
            units: Units::Ways { mask: IndexSet::default() },
        };
        let mut parts = Plan::idle(WindowLength::Time { ns: 1 });
        parts.shares = vec![share(0), share(1)];
        let mut policy = Auto::new(super::super::Parameters::default(), 1);
        policy.looked_at = Some((vec![(TaskId(0), 0, true), (TaskId(1), 0, true)], 1));
        let given_up = decided(&mut policy, 2, &parts);
        assert_eq!(given_up.shares, [share(1)]);
        let kept = decided(&mut policy, 3, &parts);
        assert_eq!((kept.shares.len(), policy.failures.plans.len()), (2, 0));
        // The same after a decision.
        let undivided = Plan::idle(WindowLength::Time { ns: 1 });
        decided(&mut policy, 4, &undivided);
        assert_eq!(policy.failures.plans.len(), 1);
    }

    /// Does a task whose phase turns lose its part and its turns, and nobody else anything?
    #[test]
    fn only_who_turned_loses_what_was_decided() {
        let share = |id: u32, members: &[u32]| CacheShare {
            group: GroupId(id),
            cache: CacheId(0),
            members: members.iter().map(|&task| ShareMember::Task(TaskId(task))).collect(),
            units: Units::Ways { mask: IndexSet::default() },
        };
        let schedule = |cpu: &str, tasks: [u32; 2]| GangSchedule {
            cpus: cpu.parse::<CpuSet>().unwrap(),
            slice_ns: 1,
            gangs: tasks.map(|task| Gang { members: vec![(TaskId(task), None)], slices: 1 }).to_vec(),
        };
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
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
