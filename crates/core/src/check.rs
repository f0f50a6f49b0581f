//! Invariants of every plan, whichever policy made it. The loop checks them before it applies a plan.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    CacheId, CacheShare, Capabilities, CpuId, CpuSet, PartitionSupport, Plan, ShareMember, TaskId,
    TaskSample, Units, View, WindowLength,
};

/// The invariant that a plan violates.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PlanError {
    /// The plan names a task that was not observed in the window.
    #[error("task {} is not in this window", .0.0)]
    UnknownTask(TaskId),
    /// The plan changes the CPUs or the weight of a task that is marked [`TaskSample::unmovable`].
    #[error("task {} is unmovable, so no plan may change it", .0.0)]
    UnmovableTask(TaskId),
    /// None of the CPUs that the plan allows the task is online.
    #[error("task {} has no online CPU in its affinity", .0.0)]
    NoRunnableCpu(TaskId),
    /// A weight that is zero, negative or not finite.
    #[error("task {}: found weight {}, expected a positive number", .0.0, .1)]
    InvalidWeight(TaskId, f64),
    /// Two gang schedules use the same CPU; their indices in the plan.
    #[error("gang schedules {0} and {1} share a CPU")]
    OverlappingGangs(usize, usize),
    /// A gang schedule that cannot run: its index in the plan, and the reason.
    #[error("gang schedule {0}: {1}")]
    InvalidGang(usize, &'static str),
    /// The task would never run.
    #[error("task {} is confined to the CPUs of a gang schedule but is a member of none of its gangs", .0.0)]
    Starved(TaskId),
    /// A share that this cache cannot provide, and the reason.
    #[error("share of cache {}: {}", .0.0, .1)]
    InvalidShare(CacheId, String),
    /// A limit of bandwidth that the machine cannot set behind this cache, and the reason.
    #[error("limit of bandwidth behind cache {}: {}", .0.0, .1)]
    InvalidBandwidth(CacheId, String),
    /// An invalid penalty between two tasks, and the reason.
    #[error("penalty between tasks {} and {}: {}", .0.0, .1.0, .2)]
    InvalidPenalty(TaskId, TaskId, &'static str),
    /// Two probes with the same id.
    #[error("two probes have the id {0}")]
    DuplicateProbeId(u32),
    /// A window of length zero.
    #[error("found a window of length 0, expected a positive length")]
    EmptyWindow,
}

/// Checks a plan against the machine and the tasks of the preceding window.
///
/// # Errors
/// The first violated invariant, in the order of the plan's fields.
pub fn check_plan(plan: &Plan, view: &View<'_>) -> Result<(), PlanError> {
    let tasks: BTreeMap<TaskId, &TaskSample> = view
        .observation
        .tasks
        .iter()
        .map(|task| (task.task, task))
        .collect();

    let online_cpus = view.online();
    let require_movable = |task: TaskId| match tasks.get(&task) {
        None => Err(PlanError::UnknownTask(task)),
        Some(sample) if sample.unmovable => Err(PlanError::UnmovableTask(task)),
        Some(_) => Ok(()),
    };
    for (&task, cpus) in &plan.affinity {
        require_movable(task)?;
        if !cpus.intersects(&online_cpus) {
            return Err(PlanError::NoRunnableCpu(task));
        }
    }

    for (&task, &weight) in &plan.weights {
        require_movable(task)?;
        if !(weight.is_finite() && weight > 0.0) {
            return Err(PlanError::InvalidWeight(task, weight));
        }
    }
    check_gangs(plan, &online_cpus, &tasks)?;
    check_shares(plan, view.capabilities, &tasks)?;
    check_bandwidth(plan, view.capabilities, &tasks)?;

    for penalty in &plan.penalties {
        let (a, b) = penalty.tasks;
        let are_live = [a, b].iter().all(|task| tasks.contains_key(task));
        if !are_live || a == b || !penalty.penalty.is_finite() {
            let cause = match (are_live, a == b) {
                (false, _) => "a task is not in this window",
                (true, true) => "the tasks are the same",
                (true, false) => "the penalty is not finite",
            };
            return Err(PlanError::InvalidPenalty(a, b, cause));
        }
    }

    let mut probe_ids = BTreeSet::new();
    if let Some(duplicate) = plan.probes.iter().find(|probe| !probe_ids.insert(probe.id)) {
        return Err(PlanError::DuplicateProbeId(duplicate.id.0));
    }

    match plan.window {
        WindowLength::Time { ns: 0 } | WindowLength::Cycles { cycles: 0 } => {
            Err(PlanError::EmptyWindow)
        }
        _ => Ok(()),
    }
}

fn check_gangs(
    plan: &Plan,
    online: &CpuSet,
    tasks: &BTreeMap<TaskId, &TaskSample>,
) -> Result<(), PlanError> {
    for (index, schedule) in plan.gangs.iter().enumerate() {
        if let Some(earlier_index) = plan.gangs[..index]
            .iter()
            .position(|earlier| earlier.cpus.intersects(&schedule.cpus))
        {
            return Err(PlanError::OverlappingGangs(earlier_index, index));
        }

        let invalid_gang = |cause| Err(PlanError::InvalidGang(index, cause));
        if schedule.slice_ns == 0 {
            return invalid_gang("found a slice of 0 ns, expected a positive length");
        }
        if !schedule.cpus.is_subset(online) || schedule.cpus.is_empty() {
            return invalid_gang("its CPUs are empty or not all online");
        }

        for gang in &schedule.gangs {
            let mut members = BTreeSet::new();
            let mut taken_cpus = BTreeSet::new();
            for &(task, cpu) in &gang.members {
                match tasks.get(&task) {
                    None => return Err(PlanError::UnknownTask(task)),
                    Some(sample) if sample.unmovable => return Err(PlanError::UnmovableTask(task)),
                    Some(_) => {}
                }

                if !members.insert(task) {
                    return invalid_gang("one gang contains a task twice");
                }
                if cpu.is_some_and(|CpuId(cpu)| {
                    !schedule.cpus.contains(cpu) || !taken_cpus.insert(cpu)
                }) {
                    return invalid_gang("a member's CPU is outside the schedule or taken twice");
                }

                let affinity = plan.affinity.get(&task);
                if cpu
                    .zip(affinity)
                    .is_some_and(|(CpuId(cpu), affinity)| !affinity.contains(cpu))
                {
                    return invalid_gang("a member's CPU is outside its own affinity");
                }
            }

            if gang.slices == 0
                || gang.members.is_empty()
                || gang.members.len() > schedule.cpus.count() as usize
            {
                return invalid_gang("a gang has no slices, no members, or more members than CPUs");
            }
        }

        for task in tasks
            .values()
            .filter(|task| !task.exited && !task.unmovable)
        {
            let is_confined = plan
                .affinity
                .get(&task.task)
                .unwrap_or(online)
                .intersection(online)
                .is_subset(&schedule.cpus);
            let has_turn = || {
                schedule
                    .gangs
                    .iter()
                    .any(|gang| gang.members.iter().any(|&(id, _)| id == task.task))
            };
            if is_confined && !has_turn() {
                return Err(PlanError::Starved(task.task));
            }
        }
    }

    Ok(())
}

/// Checks each share separately, then all of them together: ids, memberships, and the number of groups that a cache
/// supports.
fn check_shares(
    plan: &Plan,
    capabilities: &Capabilities,
    tasks: &BTreeMap<TaskId, &TaskSample>,
) -> Result<(), PlanError> {
    let mut groups = BTreeSet::new();
    let mut members: BTreeSet<(ShareMember, Option<CacheId>)> = BTreeSet::new();
    let mut way_group_counts: BTreeMap<CacheId, u32> = BTreeMap::new();
    for share in &plan.shares {
        check_share(share, capabilities, tasks)?;
        let invalid_share = |cause: String| Err(PlanError::InvalidShare(share.cache, cause));
        if !groups.insert((share.group, share.cache)) {
            return invalid_share(format!(
                "found group {} in two shares, expected one share for each group of a cache",
                share.group.0
            ));
        }

        // A frame has the same color in every cache, so a process has one set of colors; ways are per cache.
        let is_ways_share = matches!(share.units, Units::Ways { .. });
        for &member in &share.members {
            if !members.insert((member, is_ways_share.then_some(share.cache))) {
                return invalid_share(format!(
                    "found {member:?} in two shares, expected each member in one"
                ));
            }
        }

        if is_ways_share {
            *way_group_counts.entry(share.cache).or_default() += 1;
        }
    }

    for (&cache, &groups) in &way_group_counts {
        let max_groups = capabilities
            .partitions_of(cache)
            .find_map(PartitionSupport::way_groups);
        if let Some(max_groups) = max_groups.filter(|&most| groups > most) {
            return Err(PlanError::InvalidShare(
                cache,
                format!("{groups} groups, expected at most {max_groups}"),
            ));
        }
    }

    Ok(())
}

/// Checks each limit of bandwidth, and that no member and no group has two behind one cache.
fn check_bandwidth(
    plan: &Plan,
    capabilities: &Capabilities,
    tasks: &BTreeMap<TaskId, &TaskSample>,
) -> Result<(), PlanError> {
    let mut groups = BTreeSet::new();
    let mut members = BTreeSet::new();
    for limit in &plan.bandwidth {
        let invalid_limit = |cause: String| Err(PlanError::InvalidBandwidth(limit.cache, cause));
        let Some(support) = capabilities.bandwidth_of(limit.cache) else {
            return invalid_limit("this machine limits no bandwidth there".to_string());
        };
        if !(support.min_level..=support.max_level).contains(&limit.level) {
            return invalid_limit(format!(
                "found {}, expected {} to {}",
                support.unit.describe(limit.level),
                support.unit.describe(support.min_level),
                support.unit.describe(support.max_level)
            ));
        }

        if !groups.insert((limit.group, limit.cache)) {
            return invalid_limit(format!("found two limits of group {}", limit.group.0));
        }

        for &member in &limit.members {
            if !members.insert((member, limit.cache)) {
                return invalid_limit(format!("found {member:?} in two limits"));
            }
            check_member(member, tasks, invalid_limit)?;
        }
    }

    Ok(())
}

/// Checks that a member is here in this window; `invalid` is the error of a process that is not.
fn check_member(
    member: ShareMember,
    tasks: &BTreeMap<TaskId, &TaskSample>,
    invalid: impl Fn(String) -> Result<(), PlanError>,
) -> Result<(), PlanError> {
    match member {
        ShareMember::Task(task) if !tasks.contains_key(&task) => Err(PlanError::UnknownTask(task)),
        ShareMember::Process(process) if tasks.values().all(|task| task.process != process) => {
            invalid(format!("process {} has no task in this window", process.0))
        }
        _ => Ok(()),
    }
}

fn check_share(
    share: &CacheShare,
    capabilities: &Capabilities,
    tasks: &BTreeMap<TaskId, &TaskSample>,
) -> Result<(), PlanError> {
    let invalid_share = |cause: String| Err(PlanError::InvalidShare(share.cache, cause));
    let has_colors = matches!(share.units, Units::Colors { .. });
    for &member in &share.members {
        check_member(member, tasks, invalid_share)?;
        if has_colors && matches!(member, ShareMember::Task(_)) {
            return invalid_share("colors belong to processes, not tasks".to_string());
        }
    }

    for partition in capabilities.partitions_of(share.cache) {
        match (partition, &share.units) {
            (PartitionSupport::Colors { colors, .. }, Units::Colors { allowed, .. }) => {
                return match allowed.iter().last() {
                    None => invalid_share("no color allowed".to_string()),
                    Some(last) if last >= *colors => {
                        invalid_share(format!("color {last} of {colors}"))
                    }
                    Some(_) => Ok(()),
                };
            }
            (
                PartitionSupport::Ways {
                    ways,
                    min_ways: at_least,
                    contiguous,
                    ..
                },
                Units::Ways { mask },
            ) => {
                let last_way = mask.iter().last().unwrap_or(0);
                let is_contiguous = mask
                    .first()
                    .is_some_and(|first| last_way - first + 1 == mask.count());
                return if mask.count() < *at_least || last_way >= *ways {
                    invalid_share(format!(
                        "way mask {mask} needs at least {at_least} of ways 0-{}",
                        ways.saturating_sub(1)
                    ))
                } else if *contiguous && !is_contiguous {
                    invalid_share(format!("way mask {mask} is not contiguous"))
                } else {
                    Ok(())
                };
            }
            _ => {}
        }
    }

    invalid_share("this cache does not support these units".to_string())
}
