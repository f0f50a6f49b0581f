//! Changes of phase: a decision for a task's earlier phase does not apply to its new one.
//!
//! The task's partition and turns are released at once, its placement stays, and all other tasks keep the plan in
//! force. If the phase is of a known kind, its curve and its speed are recalled, so that the next search is due at
//! once. Properties: as long as no phase changes, nothing changes here.

use cachemate_core::{Plan, ProcessId, ShareMember, TaskId, View};

use super::Auto;
use super::decided_plan::DecidedPlan;
use super::speeds::CurrentPhase;

/// Rate at which tasks arrive, exit or change phase: a trial has to end in between.
#[derive(Clone, Copy, Default)]
pub struct ArrivalRate {
    pub first_window: Option<u64>,
    count: u64,
}

/// Fewer changes do not determine a rate.
const MIN_CHANGES: u64 = 2;

impl ArrivalRate {
    pub fn record_change(&mut self) {
        self.count += 1;
    }

    /// On average so far, are there at least this many windows between two changes?
    pub fn leaves_time_for(&self, windows: u32, now: u64) -> bool {
        let since = now.saturating_sub(self.first_window.unwrap_or(now));
        self.count < MIN_CHANGES || since >= self.count * u64::from(windows)
    }
}

/// The current phase of a task.
pub fn current_phase(view: &View<'_>, task: TaskId) -> CurrentPhase {
    let profile = view.profiles.get(&task);
    (profile.map_or(0, |profile| profile.phase_number), profile.and_then(|one| Some(one.phase.kind.as_ref()?.value)))
}

/// Are the kinds of all phases known? Until then a window may span two phases.
pub fn are_kinds_known(view: &View<'_>) -> bool {
    view.live_tasks().all(|seen| current_phase(view, seen.task).1.is_some())
}

impl Auto {
    /// Has a task changed phase since the last search?
    pub(super) fn phase_turned(&self, view: &View<'_>) -> bool {
        let Some((last, _)) = &self.searched_at else { return false };
        let turned = |(task, then, _): &(TaskId, u32, bool)| {
            current_phase(view, *task).0 != *then && view.live_tasks().any(|seen| seen.task == *task)
        };
        last.iter().any(turned)
    }

    /// The plan in force without the partitions and turns of tasks whose phases have changed.
    pub(super) fn release_changed(&mut self, view: &View<'_>, mut kept: DecidedPlan) -> DecidedPlan {
        self.phase_changed = true;
        let mut turned: Vec<(TaskId, ProcessId)> = Vec::new();
        if let Some((last, _)) = &mut self.searched_at {
            for (task, then, known) in last {
                let phase = current_phase(view, *task).0;
                if *then != phase {
                    self.phase_changed_at.insert(*task, view.observation.window);
                    // The next search is due as soon as the task is known again, or given up.
                    (*then, *known) = (phase, false);
                    let process = view.live_tasks().find(|seen| seen.task == *task).map(|seen| seen.process);
                    turned.extend(process.map(|process| (*task, process)));
                }
            }
        }
        let before = kept.clone();
        release(&mut kept.0, &turned);
        self.released |= !before.is_same(&kept.0);
        kept
    }
}

/// Takes tasks out of their partitions, and drops the gangs they are in. Their CPUs stay.
fn release(plan: &mut Plan, changed: &[(TaskId, ProcessId)]) {
    let is_of = |member: &ShareMember| match member {
        ShareMember::Task(task) => changed.iter().any(|(one, _)| one == task),
        ShareMember::Process(process) => changed.iter().any(|(_, one)| one == process),
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

    /// Two partitioned tasks, the first in its second phase: the decision if this plan is in force.
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

    /// If the guard restores a released partition, does that not count as a failed plan, whereas it does after a
    /// decision?
    #[test]
    fn releasing_a_partition_is_no_plan_that_can_fail() {
        let share = |id: u32| CacheShare {
            group: GroupId(id),
            cache: CacheId(0),
            members: vec![ShareMember::Process(ProcessId(id))],
            units: Units::Ways { mask: IndexSet::default() },
        };
        let mut parts = Plan::idle(WindowLength::Time { ns: 1 });
        parts.shares = vec![share(0), share(1)];
        let mut policy = Auto::new(super::super::Parameters::default(), 1);
        policy.searched_at = Some((vec![(TaskId(0), 0, true), (TaskId(1), 0, true)], 1));
        let given_up = decided(&mut policy, 2, &parts);
        assert_eq!(given_up.shares, [share(1)]);
        let kept = decided(&mut policy, 3, &parts);
        assert_eq!((kept.shares.len(), policy.failures.plans.len()), (2, 0));
        // The same after a decision.
        let undivided = Plan::idle(WindowLength::Time { ns: 1 });
        decided(&mut policy, 4, &undivided);
        assert_eq!(policy.failures.plans.len(), 1);
    }

    /// Does a task whose phase changes lose its partition and its turns, and no other task anything?
    #[test]
    fn only_tasks_that_change_phase_lose_partitions() {
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
        release(&mut plan, &[(TaskId(0), ProcessId(7))]);
        assert_eq!(plan.shares, [share(2, &[1, 2])]);
        assert_eq!(plan.gangs, [schedule("1", [1, 2])]);
        assert!(plan.affinity.contains_key(&TaskId(0)));
        release(&mut plan, &[(TaskId(1), ProcessId(7))]);
        assert_eq!(plan.shares, [share(2, &[2])]);
    }
}
