//! What a plan holds, apart from what is asked anew in every window.

use std::collections::BTreeSet;

use cachemate_core::{Member, Plan, ProcessId, TaskId, View};

/// The part of a plan that is decided; probes and the window are asked for anew each time.
#[derive(Clone, PartialEq, Debug)]
pub struct Holding(pub Plan);

impl Holding {
    /// What holds of a plan for the tasks that are there.
    pub fn kept(before: &Plan, view: &View<'_>) -> Self {
        let mut plan = Plan::idle(before.window);
        let here: BTreeSet<TaskId> = view.movable().map(|task| task.task).collect();
        let online = view.online();
        plan.affinity = before.affinity.clone();
        plan.affinity.retain(|task, cpus| here.contains(task) && cpus.intersects(&online));
        let tasks: BTreeSet<TaskId> = view.seen.tasks.iter().map(|seen| seen.task).collect();
        let processes: BTreeSet<ProcessId> = view.seen.tasks.iter().map(|seen| seen.process).collect();
        for schedule in &before.gangs {
            let mut schedule = schedule.clone();
            for gang in &mut schedule.gangs {
                gang.members.retain(|(task, _)| here.contains(task));
            }
            schedule.gangs.retain(|gang| !gang.members.is_empty());
            let starves = |task: &TaskId| {
                let may = plan.affinity.get(task).unwrap_or(&online).intersection(&online);
                let turns = schedule.gangs.iter().flat_map(|gang| &gang.members);
                may.is_subset(&schedule.cpus) && !turns.into_iter().any(|(member, _)| member == task)
            };
            if !schedule.gangs.is_empty() && schedule.cpus.is_subset(&online) && !here.iter().any(starves) {
                plan.gangs.push(schedule);
            }
        }
        for share in &before.shares {
            let mut share = share.clone();
            share.members.retain(|member| match member {
                Member::Process(process) => processes.contains(process),
                Member::Task(task) => tasks.contains(task),
            });
            if !share.members.is_empty() {
                plan.shares.push(share);
            }
        }
        Holding(plan)
    }

    /// Does a plan place, time and divide alike?
    pub fn is_same(&self, other: &Plan) -> bool {
        (&self.0.affinity, &self.0.gangs, &self.0.shares) == (&other.affinity, &other.gangs, &other.shares)
    }
}
