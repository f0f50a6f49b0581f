//! The lasting part of a plan, compared and restored for live tasks.

use std::collections::BTreeSet;

use cachemate_core::{
    CacheShare, CpuId, CpuSet, GangSchedule, IndexSet, Plan, ProcessId, ShareMember, TaskId,
    TaskSample, Units, View,
};

/// Tasks and their processes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LiveTasks {
    pub tasks: BTreeSet<TaskId>,
    pub processes: BTreeSet<ProcessId>,
}

impl LiveTasks {
    /// Selects the tasks that have not exited.
    pub fn from_samples(samples: &[TaskSample]) -> Self {
        LiveTasks::select(samples, |task| !task.exited)
    }

    /// Selects the tasks that may be changed.
    fn from_movable(samples: &[TaskSample]) -> Self {
        let mut live_tasks = LiveTasks::select(samples, |task| !task.exited && !task.unmovable);
        live_tasks.processes = LiveTasks::from_samples(samples).processes;
        live_tasks
    }

    fn select(samples: &[TaskSample], is_selected: impl Fn(&TaskSample) -> bool) -> Self {
        let selected_samples = || samples.iter().filter(|task| is_selected(task));
        LiveTasks {
            tasks: selected_samples().map(|task| task.task).collect(),
            processes: selected_samples().map(|task| task.process).collect(),
        }
    }

    pub fn intersection(&self, other: &LiveTasks) -> LiveTasks {
        LiveTasks {
            tasks: self.tasks.intersection(&other.tasks).copied().collect(),
            processes: self
                .processes
                .intersection(&other.processes)
                .copied()
                .collect(),
        }
    }

    fn contains(&self, member: &ShareMember) -> bool {
        match member {
            ShareMember::Task(task) => self.tasks.contains(task),
            ShareMember::Process(process) => self.processes.contains(process),
        }
    }
}

/// Whether two plans are the same for these tasks. Windows, probes, penalties, group numbers and limits of bandwidth
/// are not compared.
pub fn is_same_placement(a: &Plan, b: &Plan, live_tasks: &LiveTasks) -> bool {
    let weight_of = |plan: &Plan, task: &TaskId| plan.weights.get(task).copied().unwrap_or(1.0);
    live_tasks.tasks.iter().all(|task| {
        a.affinity.get(task) == b.affinity.get(task) && weight_of(a, task) == weight_of(b, task)
    }) && restrict_gangs(&a.gangs, live_tasks) == restrict_gangs(&b.gangs, live_tasks)
        && are_same_shares(&a.shares, &b.shares, live_tasks)
}

/// Whether a plan sets anything for one of these tasks.
pub fn places_any_of(plan: &Plan, live_tasks: &LiveTasks) -> bool {
    let is_live = |task: &TaskId| live_tasks.tasks.contains(task);
    plan.affinity.keys().chain(plan.weights.keys()).any(is_live)
        || !restrict_gangs(&plan.gangs, live_tasks).is_empty()
        || !restrict_shares(&plan.shares, live_tasks).is_empty()
}

/// The gangs reduced to these tasks; empty ones are left out.
pub fn restrict_gangs(schedules: &[GangSchedule], live_tasks: &LiveTasks) -> Vec<GangSchedule> {
    let mut schedules = schedules.to_vec();
    for schedule in &mut schedules {
        schedule.gangs.iter_mut().for_each(|gang| {
            gang.members
                .retain(|(task, _)| live_tasks.tasks.contains(task))
        });
        schedule.gangs.retain(|gang| !gang.members.is_empty());
    }
    schedules.retain(|schedule| !schedule.gangs.is_empty());
    schedules
}

/// The shares reduced to these tasks; empty ones are left out.
pub fn restrict_shares(shares: &[CacheShare], live_tasks: &LiveTasks) -> Vec<CacheShare> {
    let mut shares = shares.to_vec();
    shares
        .iter_mut()
        .for_each(|share| share.members.retain(|member| live_tasks.contains(member)));
    shares.retain(|share| !share.members.is_empty());
    shares
}

fn are_same_shares(a: &[CacheShare], b: &[CacheShare], live_tasks: &LiveTasks) -> bool {
    let (a, mut b) = (
        restrict_shares(a, live_tasks),
        restrict_shares(b, live_tasks),
    );
    let is_same = |first_share: &CacheShare, second_share: &CacheShare| {
        let members_of = |share: &CacheShare| {
            share
                .members
                .iter()
                .copied()
                .collect::<BTreeSet<ShareMember>>()
        };
        first_share.cache == second_share.cache
            && first_share.units == second_share.units
            && members_of(first_share) == members_of(second_share)
    };
    let has_equal_shares = a.iter().all(|share| {
        let position = b.iter().position(|other| is_same(share, other));
        position.map(|index| b.swap_remove(index)).is_some()
    });
    has_equal_shares && b.is_empty()
}

/// A plan with another placement, for live tasks that may be changed and have an online CPU. Tasks that the placement
/// did not cover keep the plan's own settings, as far as the result is valid; so do its probes and its window.
pub fn with_placement(
    plan: &Plan,
    placement: &Plan,
    known_tasks: &LiveTasks,
    view: &View<'_>,
) -> Plan {
    let movable_tasks = LiveTasks::from_movable(&view.observation.tasks);
    let online = view.topology.online();
    let mut plan = plan.clone();
    plan.affinity
        .retain(|task, _| !known_tasks.tasks.contains(task));
    plan.weights
        .retain(|task, _| !known_tasks.tasks.contains(task));
    let affinity = placement
        .affinity
        .iter()
        .filter(|(task, cpus)| movable_tasks.tasks.contains(task) && cpus.intersects(&online));
    plan.affinity
        .extend(affinity.map(|(task, cpus)| (*task, cpus.clone())));

    let weights = placement
        .weights
        .iter()
        .filter(|(task, _)| movable_tasks.tasks.contains(task));
    plan.weights
        .extend(weights.map(|(task, weight)| (*task, *weight)));
    plan.gangs = restrict_gangs(&placement.gangs, &movable_tasks);
    let is_complete = |schedule: &GangSchedule| {
        schedule.cpus.is_subset(&online) && has_seats_on_own_cpus(schedule)
    };
    plan.gangs.retain(|schedule| {
        is_complete(schedule)
            && has_turn_for_each_task(schedule, &plan.affinity, &movable_tasks, &online)
    });
    plan.shares = restrict_shares(
        &placement.shares,
        &LiveTasks {
            tasks: LiveTasks::from_samples(&view.observation.tasks).tasks,
            ..movable_tasks
        },
    );
    plan
}

fn has_seats_on_own_cpus(schedule: &GangSchedule) -> bool {
    let is_inside = |cpu: &Option<CpuId>| cpu.is_none_or(|cpu| schedule.cpus.contains(cpu.0));
    schedule
        .gangs
        .iter()
        .flat_map(|gang| &gang.members)
        .all(|(_, cpu)| is_inside(cpu))
}

/// Whether every task that may run only on the gangs' CPUs has a turn in one of the gangs.
fn has_turn_for_each_task(
    schedule: &GangSchedule,
    affinity: &std::collections::BTreeMap<TaskId, CpuSet>,
    live_tasks: &LiveTasks,
    online: &CpuSet,
) -> bool {
    let has_turn = |task: &TaskId| {
        schedule
            .gangs
            .iter()
            .any(|gang| gang.members.iter().any(|(id, _)| id == task))
    };
    live_tasks.tasks.iter().all(|task| {
        let allowed_cpus = affinity.get(task).unwrap_or(online).intersection(online);
        has_turn(task) || !allowed_cpus.is_subset(&schedule.cpus)
    })
}

/// Whether the plans differ at most in the sizes of their partitions.
pub fn is_only_resized(old_plan: &Plan, new_plan: &Plan, live_tasks: &LiveTasks) -> bool {
    let without_sizes = |plan: &Plan| {
        let mut plan = plan.clone();
        plan.shares.iter_mut().for_each(|share| {
            share.units = Units::Ways {
                mask: IndexSet::default(),
            }
        });
        plan
    };
    is_same_placement(
        &without_sizes(old_plan),
        &without_sizes(new_plan),
        live_tasks,
    )
}

/// Whether the new plan differs from the old one only by fewer partitions, members of partitions and turns.
pub fn is_only_released(old_plan: &Plan, new_plan: &Plan, live_tasks: &LiveTasks) -> bool {
    let without_partitions = |plan: &Plan| Plan {
        gangs: Vec::new(),
        shares: Vec::new(),
        ..plan.clone()
    };
    let (gangs, shares) = (
        restrict_gangs(&old_plan.gangs, live_tasks),
        restrict_shares(&old_plan.shares, live_tasks),
    );
    let is_subset_of_old = |share: &CacheShare| {
        shares.iter().any(|old_share| {
            (old_share.cache, &old_share.units) == (share.cache, &share.units)
                && share
                    .members
                    .iter()
                    .all(|member| old_share.members.contains(member))
        })
    };
    is_same_placement(
        &without_partitions(old_plan),
        &without_partitions(new_plan),
        live_tasks,
    ) && restrict_gangs(&new_plan.gangs, live_tasks)
        .iter()
        .all(|schedule| gangs.contains(schedule))
        && restrict_shares(&new_plan.shares, live_tasks)
            .iter()
            .all(is_subset_of_old)
}
