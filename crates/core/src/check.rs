//! Invariants of every plan, whichever policy made it. The loop checks them before anything is applied.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    CacheId, CacheShare, Capabilities, CpuId, CpuSet, PartitionSupport, Plan, ShareMember, TaskId, TaskSample, Units,
    View, WindowLength,
};

/// The invariant that a plan breaks.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PlanError {
    /// The plan names a task that was not seen in the window.
    #[error("{0:?} is not among the tasks of this window")]
    UnknownTask(TaskId),
    /// The plan moves or weighs a task that is marked [`TaskSample::unmovable`].
    #[error("{0:?} is fixed: nothing of it may be changed")]
    FixedTask(TaskId),
    /// None of the CPUs that the plan allows the task is online.
    #[error("{0:?} may run on no online CPU")]
    NoRunnableCpu(TaskId),
    /// A weight that is zero, negative or not finite.
    #[error("weight {1} of {0:?} is not a positive number")]
    BadWeight(TaskId, f64),
    /// Two gang schedules on one CPU, by their indices in the plan.
    #[error("gang schedules {0} and {1} share a CPU")]
    GangsOverlap(usize, usize),
    /// A gang schedule that cannot run: its index in the plan, and why.
    #[error("gang schedule {0}: {1}")]
    BadGang(usize, &'static str),
    /// The task would never run.
    #[error("{0:?} may only run on the CPUs of a gang schedule but is in none of its gangs")]
    Starved(TaskId),
    /// A share that cannot be had of this cache, and why.
    #[error("share of {0:?}: {1}")]
    BadShare(CacheId, String),
    /// A penalty between two tasks that cannot be, and why.
    #[error("penalty between {0:?} and {1:?}: {2}")]
    BadPenalty(TaskId, TaskId, &'static str),
    /// Two probes with one id.
    #[error("probe id {0} is used for two probes")]
    ProbeTwice(u32),
    /// A window of no length.
    #[error("window is empty")]
    EmptyWindow,
}

/// Checks a plan against the machine and the tasks of the window it follows.
///
/// # Errors
/// The first broken invariant, in the order of the plan's fields.
pub fn check_plan(plan: &Plan, view: &View<'_>) -> Result<(), PlanError> {
    let tasks: BTreeMap<TaskId, &TaskSample> = view.observation.tasks.iter().map(|task| (task.task, task)).collect();
    let online = view.online();
    let movable = |task: TaskId| match tasks.get(&task) {
        None => Err(PlanError::UnknownTask(task)),
        Some(seen) if seen.unmovable => Err(PlanError::FixedTask(task)),
        Some(_) => Ok(()),
    };
    for (&task, cpus) in &plan.affinity {
        movable(task)?;
        if !cpus.intersects(&online) {
            return Err(PlanError::NoRunnableCpu(task));
        }
    }
    for (&task, &weight) in &plan.weights {
        movable(task)?;
        if !(weight.is_finite() && weight > 0.0) {
            return Err(PlanError::BadWeight(task, weight));
        }
    }
    check_gangs(plan, &online, &tasks)?;
    check_shares(plan, view.capabilities, &tasks)?;
    for penalty in &plan.penalties {
        let (a, b) = penalty.tasks;
        let known = [a, b].iter().all(|task| tasks.contains_key(task));
        if !known || a == b || !penalty.penalty.is_finite() {
            let what =
                if known { "a penalty of a task with itself, or one that is not finite" } else { "unknown task" };
            return Err(PlanError::BadPenalty(a, b, what));
        }
    }
    let mut probes = BTreeSet::new();
    if let Some(twice) = plan.probes.iter().find(|probe| !probes.insert(probe.id)) {
        return Err(PlanError::ProbeTwice(twice.id.0));
    }
    match plan.window {
        WindowLength::Time { ns: 0 } | WindowLength::Cycles { cycles: 0 } => Err(PlanError::EmptyWindow),
        _ => Ok(()),
    }
}

fn check_gangs(plan: &Plan, online: &CpuSet, tasks: &BTreeMap<TaskId, &TaskSample>) -> Result<(), PlanError> {
    for (at, schedule) in plan.gangs.iter().enumerate() {
        if let Some(other) = plan.gangs[..at].iter().position(|earlier| earlier.cpus.intersects(&schedule.cpus)) {
            return Err(PlanError::GangsOverlap(other, at));
        }
        let bad = |what| Err(PlanError::BadGang(at, what));
        if schedule.slice_ns == 0 {
            return bad("slice of no length");
        }
        if !schedule.cpus.is_subset(online) || schedule.cpus.is_empty() {
            return bad("CPUs that are not online, or none");
        }
        for gang in &schedule.gangs {
            let mut members = BTreeSet::new();
            let mut seats = BTreeSet::new();
            for &(task, cpu) in &gang.members {
                match tasks.get(&task) {
                    None => return Err(PlanError::UnknownTask(task)),
                    Some(seen) if seen.unmovable => return Err(PlanError::FixedTask(task)),
                    Some(_) => {}
                }
                if !members.insert(task) {
                    return bad("a task is twice in one gang");
                }
                if cpu.is_some_and(|CpuId(cpu)| !schedule.cpus.contains(cpu) || !seats.insert(cpu)) {
                    return bad("a member's CPU is outside the schedule or taken twice");
                }
                let affinity = plan.affinity.get(&task);
                if cpu.zip(affinity).is_some_and(|(CpuId(cpu), affinity)| !affinity.contains(cpu)) {
                    return bad("a member's CPU is outside its own affinity");
                }
            }
            if gang.slices == 0 || gang.members.is_empty() || gang.members.len() > schedule.cpus.count() as usize {
                return bad("a gang has no slices, no members, or more members than CPUs");
            }
        }
        for task in tasks.values().filter(|task| !task.exited && !task.unmovable) {
            let confined =
                plan.affinity.get(&task.task).unwrap_or(online).intersection(online).is_subset(&schedule.cpus);
            let has_turn = || schedule.gangs.iter().any(|gang| gang.members.iter().any(|&(id, _)| id == task.task));
            if confined && !has_turn() {
                return Err(PlanError::Starved(task.task));
            }
        }
    }
    Ok(())
}

/// Every share by itself, then what they are together: ids, memberships, and how many groups a cache can have.
fn check_shares(
    plan: &Plan,
    capabilities: &Capabilities,
    tasks: &BTreeMap<TaskId, &TaskSample>,
) -> Result<(), PlanError> {
    let mut groups = BTreeSet::new();
    let mut members: BTreeSet<(ShareMember, Option<CacheId>)> = BTreeSet::new();
    let mut ways_groups: BTreeMap<CacheId, u32> = BTreeMap::new();
    for share in &plan.shares {
        check_share(share, capabilities, tasks)?;
        let bad = |what: String| Err(PlanError::BadShare(share.cache, what));
        if !groups.insert((share.group, share.cache)) {
            return bad(format!("{:?} is used for two shares of this cache", share.group));
        }
        // A frame has the same color in every cache, so a process has one set of colors; ways are per cache.
        let ways = matches!(share.units, Units::Ways { .. });
        for &member in &share.members {
            if !members.insert((member, ways.then_some(share.cache))) {
                return bad(format!("{member:?} is a member of two shares"));
            }
        }
        if ways {
            *ways_groups.entry(share.cache).or_default() += 1;
        }
    }
    for (&cache, &groups) in &ways_groups {
        let most = capabilities.partitions_of(cache).find_map(|partition| match partition {
            PartitionSupport::Ways { max_groups: groups_at_most, .. } => Some(*groups_at_most),
            PartitionSupport::Colors { .. } => None,
        });
        if let Some(most) = most.filter(|&most| groups > most) {
            return Err(PlanError::BadShare(cache, format!("{groups} groups, expected at most {most}")));
        }
    }
    Ok(())
}

fn check_share(
    share: &CacheShare,
    capabilities: &Capabilities,
    tasks: &BTreeMap<TaskId, &TaskSample>,
) -> Result<(), PlanError> {
    let bad = |what: String| Err(PlanError::BadShare(share.cache, what));
    for member in &share.members {
        match *member {
            ShareMember::Task(task) if !tasks.contains_key(&task) => return Err(PlanError::UnknownTask(task)),
            ShareMember::Process(process) if tasks.values().all(|task| task.process != process) => {
                return bad(format!("{process:?} has no task in this window"));
            }
            ShareMember::Task(_) if matches!(share.units, Units::Colors { .. }) => {
                return bad("colors belong to processes, not tasks".to_string());
            }
            _ => {}
        }
    }
    for partition in capabilities.partitions_of(share.cache) {
        match (partition, &share.units) {
            (PartitionSupport::Colors { colors, .. }, Units::Colors { allowed, .. }) => {
                return match allowed.iter().last() {
                    None => bad("no color allowed".to_string()),
                    Some(last) if last >= *colors => bad(format!("color {last} of {colors}")),
                    Some(_) => Ok(()),
                };
            }
            (PartitionSupport::Ways { ways, min_ways: at_least, contiguous, .. }, Units::Ways { mask }) => {
                let last = mask.iter().last().unwrap_or(0);
                let in_one_piece = mask.first().is_some_and(|first| last - first + 1 == mask.count());
                return if mask.count() < *at_least || last >= *ways {
                    bad(format!("way mask {mask} needs at least {at_least} of ways 0-{}", ways.saturating_sub(1)))
                } else if *contiguous && !in_one_piece {
                    bad(format!("way mask {mask} is not contiguous"))
                } else {
                    Ok(())
                };
            }
            _ => {}
        }
    }
    bad("this cache cannot be divided in these units".to_string())
}
