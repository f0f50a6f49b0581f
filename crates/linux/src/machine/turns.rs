//! A plan's gangs on the live machine: who may be a member, what is written down before, and the runner.

use std::time::Duration;

use cachemate_core::{Gang, GangSchedule, Item, Plan, Refused, RefusedBecause};

use super::{LiveMachine, lock};
use crate::actuator::{Made, Wanted};
use crate::gangs::{Rotation, Runner};
use crate::journal::Object;
use crate::kernel::Kernel;
use crate::scheduling::Scheduling;
use crate::tasks::Managed;

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// Real-time and deadline threads leave their gangs: they stay as they are, whoever has a turn.
    pub(super) fn without_who_cannot_wait(&self, at: usize, schedule: &mut GangSchedule) -> Vec<Refused> {
        let (kernel, mut refused) = (lock(&self.kernel), Vec::new());
        for gang in &mut schedule.gangs {
            gang.members.retain(|(task, _)| {
                let Some(managed) = self.tasks.get(*task) else { return true };
                // Who is gone meanwhile is found to be so by whoever changes him.
                let Ok(now) = kernel.scheduling(managed.thread.tid) else { return true };
                if !now.can_wait() {
                    let who = format!("task {} ({}, thread {})", task.0, managed.name, managed.thread.tid);
                    let said = format!("{who}: {now}: it cannot wait for turns as an idle task");
                    let because = RefusedBecause::NotSupported;
                    refused.push(Refused { item: Item::Gangs(at), because, said });
                }
                now.can_wait()
            });
        }
        schedule.gangs.retain(|gang| !gang.members.is_empty());
        refused
    }

    /// Gang members wait their turn as idle tasks on a CPU of their own: both go through the journal first.
    pub(super) fn apply_gangs(&mut self, plan: &Plan, made: &mut Made) {
        if self.gangs.as_ref().is_some_and(|(running, _)| *running == plan.gangs) {
            return;
        }
        self.gangs = None; // stopped and undone before anything else changes
        if plan.gangs.is_empty() {
            return;
        }
        let kernel = self.kernel();
        // Written down before: the runner then only moves between journalled states.
        let policies = self.gang_policies(&*lock(&kernel), plan);
        let promised = self.actuator.promise(&*lock(&kernel), &policies);
        if let Err(error) = promised {
            let because = RefusedBecause::NoRoom;
            made.refused.push(Refused { item: Item::Gangs(0), because, said: error.to_string() });
            return;
        }
        self.start_gangs(plan.gangs.clone(), &mut made.refused);
    }

    pub(super) fn start_gangs(&mut self, schedules: Vec<GangSchedule>, refused: &mut Vec<Refused>) {
        let rotations: Vec<Rotation> = schedules.iter().map(|schedule| self.rotation(schedule)).collect();
        match Runner::start(self.kernel(), rotations) {
            Ok(runner) => self.gangs = Some((schedules, runner)),
            Err(error) => {
                let because = RefusedBecause::Failed;
                refused.push(Refused { item: Item::Gangs(0), because, said: error.to_string() });
            }
        }
    }

    fn gang_policies(&self, kernel: &K, plan: &Plan) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        for (at, schedule) in plan.gangs.iter().enumerate() {
            for (task, _) in schedule.gangs.iter().flat_map(|gang: &Gang| &gang.members) {
                let Some(task) = self.tasks.get(*task) else { continue };
                if let Ok(now) = kernel.scheduling(task.thread.tid) {
                    let object = Object::Policy { pid: task.pid, thread: task.thread };
                    wanted.push(Wanted { item: Item::Gangs(at), object, state: now.waiting().state() });
                }
            }
        }
        wanted.dedup_by(|a, b| a.object == b.object);
        wanted
    }

    fn rotation(&self, schedule: &GangSchedule) -> Rotation {
        let originals = self.actuator.originals();
        // Whose original is not written down may not be changed.
        let member = |task: &Managed| {
            let original = originals.get(&Object::Policy { pid: task.pid, thread: task.thread })?;
            Some((task.thread, Scheduling::of(original)?))
        };
        let members = |gang: &Gang| {
            let tasks = gang.members.iter().filter_map(|(task, _)| self.tasks.get(*task));
            (tasks.filter_map(member).collect(), gang.slices)
        };
        Rotation { slice: Duration::from_nanos(schedule.slice_ns), gangs: schedule.gangs.iter().map(members).collect() }
    }
}
