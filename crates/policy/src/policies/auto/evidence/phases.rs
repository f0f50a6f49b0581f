//! Changes of phase: a decision for an earlier phase of a task does not apply to the new phase.
//!
//! The share of the task's process and the gang schedule that contains the task are released at once, so other members of
//! that schedule lose their turns too. Placements stay. If the kind of the phase is known, its curve and its speed are
//! recalled, so that the next search can start at once. Properties: while no phase changes, nothing changes here.

use cachemate_core::{Plan, ProcessId, Profiles, ShareMember, TaskId, View};

use super::speeds::CurrentPhase;

/// Returns the current phase of a task.
pub fn current_phase(view: &View<'_>, task: TaskId) -> CurrentPhase {
    let profile = view.profiles.get(&task);
    (
        profile.map_or(0, |profile| profile.phase_number),
        profile.and_then(|known_profile| Some(known_profile.phase.kind.as_ref()?.value)),
    )
}

/// Returns whether the phases of all live tasks have known kinds. Until then, a window may span two phases.
pub fn are_kinds_known(view: &View<'_>) -> bool {
    view.live_tasks().all(|sample| current_phase(view, sample.task).1.is_some())
}

/// Returns the profiles as if every task had one phase.
pub fn merge_phases(profiles: &Profiles) -> Profiles {
    let mut merged_profiles = profiles.clone();
    for profile in merged_profiles.values_mut() {
        (profile.phase_number, profile.phase.kind) = (0, None);
    }
    merged_profiles
}

/// Removes tasks from their partitions, and drops the gangs that contain them. Their CPUs stay. Returns whether there
/// were any.
pub fn release_partitions(plan: &mut Plan, changed_tasks: &[(TaskId, ProcessId)]) -> bool {
    let belongs_to_changed = |member: &ShareMember| match member {
        ShareMember::Task(task) => changed_tasks.iter().any(|(changed_task, _)| changed_task == task),
        ShareMember::Process(process) => changed_tasks.iter().any(|(_, changed_process)| changed_process == process),
    };
    let size = |plan: &Plan| plan.gangs.len() + plan.shares.iter().map(|share| share.members.len()).sum::<usize>();
    let size_before = size(plan);
    plan.shares.iter_mut().for_each(|share| share.members.retain(|member| !belongs_to_changed(member)));
    plan.shares.retain(|share| !share.members.is_empty());
    plan.gangs.retain(|schedule| {
        let mut members = schedule.gangs.iter().flat_map(|gang| &gang.members);
        !members.any(|(task, _)| belongs_to_changed(&ShareMember::Task(*task)))
    });
    size(plan) < size_before
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{CacheId, CacheShare, CpuSet, Gang, GangSchedule, GroupId, IndexSet, Units, WindowLength};

    /// Does a task whose phase changes lose its partition, and its gang schedule end, while other shares stay?
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
        release_partitions(&mut plan, &[(TaskId(0), ProcessId(7))]);
        assert_eq!(plan.shares, [share(2, &[1, 2])]);
        assert_eq!(plan.gangs, [schedule("1", [1, 2])]);
        assert!(plan.affinity.contains_key(&TaskId(0)));
        release_partitions(&mut plan, &[(TaskId(1), ProcessId(7))]);
        assert_eq!(plan.shares, [share(2, &[2])]);
    }
}
