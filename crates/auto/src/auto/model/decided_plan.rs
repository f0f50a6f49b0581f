//! The lasting part of a plan, without the requests that are made again in every window.

use std::collections::BTreeSet;

use cachemate_core::{
    CpuSet, GangSchedule, Plan, ProcessId, ShareMember, TaskId, TaskSample, View,
};

/// The lasting part of a plan: all but probes and the window length.
#[derive(Clone, PartialEq, Debug)]
pub struct DecidedPlan(pub Plan);

impl DecidedPlan {
    /// The part of a plan that still applies to the live tasks.
    pub fn from_previous(previous_plan: &Plan, view: &View<'_>) -> Self {
        let mut plan = Plan::idle(previous_plan.window);
        let movable_tasks: BTreeSet<TaskId> = view.movable_tasks().map(|task| task.task).collect();
        let online = view.online();
        let pins = previous_plan.affinity.iter();
        plan.affinity = pins
            .filter(|(task, cpus)| movable_tasks.contains(task) && cpus.intersects(&online))
            .map(|(task, cpus)| (*task, cpus.clone()))
            .collect();
        for schedule in &previous_plan.gangs {
            let mut schedule = schedule.clone();
            for gang in &mut schedule.gangs {
                gang.members
                    .retain(|(task, _)| movable_tasks.contains(task));
            }
            schedule.gangs.retain(|gang| !gang.members.is_empty());
            if !schedule.gangs.is_empty() && schedule.cpus.is_subset(&online) {
                plan.gangs.push(schedule);
            }
        }

        let allowed_cpus = |sample: &TaskSample| match sample.unmovable {
            true => sample.on_cpu_ns.iter().map(|(cpu, _)| cpu.0).collect(),
            false => plan
                .affinity
                .get(&sample.task)
                .unwrap_or(&online)
                .intersection(&online),
        };
        drop_starving_schedules(
            &mut plan.gangs,
            view.live_tasks()
                .map(|sample| (sample.task, allowed_cpus(sample))),
        );
        if previous_plan.shares.is_empty() {
            return DecidedPlan(plan);
        }
        let samples = &view.observation.tasks;
        let processes: BTreeSet<ProcessId> = samples.iter().map(|sample| sample.process).collect();
        for share in &previous_plan.shares {
            let mut share = share.clone();
            share.members.retain(|member| match member {
                ShareMember::Process(process) => processes.contains(process),
                ShareMember::Task(task) => samples.iter().any(|sample| sample.task == *task),
            });
            if !share.members.is_empty() {
                plan.shares.push(share);
            }
        }
        DecidedPlan(plan)
    }

    /// Whether both plans have the same placement, gangs and partitions.
    pub fn matches(&self, plan: &Plan) -> bool {
        (&self.0.affinity, &self.0.gangs, &self.0.shares)
            == (&plan.affinity, &plan.gangs, &plan.shares)
    }
}

/// Drops schedules until every task outside gangs may run on a CPU without gangs. Schedules are considered together,
/// because a newcomer that may run on any CPU has no turn if every cache has gangs. `allowed_cpus` yields the CPUs on
/// which each task may run; it is consumed only if there are gangs, because the sets are expensive.
pub fn drop_starving_schedules(
    gangs: &mut Vec<GangSchedule>,
    allowed_cpus: impl IntoIterator<Item = (TaskId, CpuSet)>,
) {
    if gangs.is_empty() {
        return;
    }
    let allowed_cpus_by_task: Vec<(TaskId, CpuSet)> = allowed_cpus.into_iter().collect();

    loop {
        let ganged_cpus: CpuSet = gangs
            .iter()
            .flat_map(|schedule| schedule.cpus.iter())
            .collect();
        let members: BTreeSet<TaskId> = gangs
            .iter()
            .flat_map(|schedule| &schedule.gangs)
            .flat_map(|gang| gang.members.iter().map(|(task, _)| *task))
            .collect();
        let is_starving = |(task, cpus): &&(TaskId, CpuSet)| {
            !members.contains(task) && !cpus.is_empty() && cpus.is_subset(&ganged_cpus)
        };
        let Some((_, cpus)) = allowed_cpus_by_task.iter().find(is_starving) else {
            return;
        };
        let Some(last_schedule) = gangs
            .iter()
            .rposition(|schedule| schedule.cpus.intersects(cpus))
        else {
            return;
        };
        gangs.remove(last_schedule);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::Gang;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    /// Does a task that is in no gang get CPUs, and do gangs stay if every task has CPUs?
    #[test]
    fn a_newcomer_runs_where_every_cache_has_gangs() {
        let schedule = |cpus: &str, tasks: [u32; 2]| GangSchedule {
            cpus: set(cpus),
            slice_ns: 1,
            gangs: tasks
                .map(|task| Gang {
                    members: vec![(TaskId(task), None)],
                    slices: 1,
                })
                .to_vec(),
        };
        let schedules = vec![schedule("0-1", [0, 1]), schedule("2-3", [2, 3])];
        let cpus_left = |may: &[(u32, &str)]| {
            let mut gangs = schedules.clone();
            drop_starving_schedules(
                &mut gangs,
                may.iter().map(|(task, cpus)| (TaskId(*task), set(cpus))),
            );
            gangs
                .iter()
                .map(|schedule| schedule.cpus.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(cpus_left(&[(0, "0-1"), (3, "2-3")]), ["0-1", "2-3"]);
        assert_eq!(cpus_left(&[(9, "0-3")]), ["0-1"], "it may run on any CPU");
        assert_eq!(
            cpus_left(&[(9, "1")]),
            ["2-3"],
            "it is confined to one cache"
        );
        assert_eq!(
            cpus_left(&[(9, "0-4")]),
            ["0-1", "2-3"],
            "one CPU has no gangs"
        );
        assert_eq!(cpus_left(&[(9, "0-1"), (8, "3")]), Vec::<String>::new());
    }
}
