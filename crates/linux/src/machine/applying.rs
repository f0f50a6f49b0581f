//! A plan on the live machine: what holds is read, the list of changes is derived from it, and made or only told.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    Applied, ChangeKind, Derived, GangSchedule, Item, Plan, Refused, RefusedBecause, TaskId, changes,
};

use super::{LiveMachine, OBSERVING, lock};
use crate::act::actuator::ApplyReport;
use crate::act::changes::{Before, Execution, Gangs, Host, Reading, rotation};
use crate::act::cpusets;
use crate::kernel::{DirLock, Kernel, ThreadKey};
use crate::safety::journal::{Object, State};

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// After a probe that decided who runs: the gangs that it stopped take turns again.
    pub(super) fn start_again(&mut self, schedules: Vec<GangSchedule>) {
        let tasks = self.tasks.all();
        let threads: BTreeMap<TaskId, (i32, ThreadKey)> =
            tasks.iter().map(|task| (task.task, (task.pid, task.thread))).collect();
        let originals = self.actuator.originals();
        for schedule in schedules {
            // One that cannot be started is missing from what is in force, and the next plan starts it.
            let _ = self.gangs.start(&schedule, rotation(&schedule, &threads, &originals));
        }
    }

    /// What holds now, and the changes that lead from there to the plan. The lock of resctrl is to be kept until they are made.
    pub(super) fn derive(&mut self, plan: &Plan) -> (Reading, Derived, Option<DirLock>) {
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        let groups = cpusets::look(&*kernel, &self.options.groups, &self.actuator.originals());
        let tasks = self.tasks.all();
        let gangs = self.gangs.schedules();
        let before = Before { actuator: &self.actuator, weights: &self.weights, gangs };
        let mut plan = plan.clone();
        let mut reading = Reading::read(&*kernel, &plan, &tasks, groups, &before);
        let mut held = None;
        if let Some(ways) = &mut self.ways {
            held = ways.read(&*kernel, &mut plan, &tasks, &mut reading, self.options.act);
        }
        let derived = changes(&plan, &reading.confined, &reading.state, &self.topology, &self.capabilities);
        (reading, derived, held)
    }

    /// Why nothing of the list is made: one refusal for each line that asks for a change.
    pub(super) fn observed(&mut self, reading: Reading, derived: Derived) -> Applied {
        let items: BTreeSet<Item> = derived.changes.iter().flat_map(|change| change.items.clone()).collect();
        let because = RefusedBecause::NoPermission;
        let refuse = |item| Refused { item, because: because.clone(), said: OBSERVING.to_string() };
        let mut refused = derived.refused;
        refused.extend(reading.refused);
        refused.extend(items.into_iter().map(refuse));
        refused.append(&mut self.probing.refused);
        Applied { refused, probes: self.probing.ids(), ..Applied::default() }
    }

    /// Makes the list; what it is told of goes into `applied`.
    pub(super) fn make(&mut self, reading: &Reading, derived: Derived, applied: &mut Applied) -> ApplyReport {
        let host = Host {
            kernel: &self.kernel,
            actuator: &mut self.actuator,
            ways: self.ways.as_mut(),
            gangs: &mut self.gangs,
        };
        let mut made = Execution::run(host, reading, &derived.changes);
        for change in &derived.changes {
            if let ChangeKind::Weight { task, to, .. } = change.kind
                && let Some(thread) = reading.threads.get(&task)
                && let Some(State::Nice(nice)) = made.held.get(&Object::Nice { pid: thread.pid, thread: thread.key })
            {
                self.weights.insert(thread.key, (to, *nice));
            }
        }
        applied.refused.extend(derived.refused);
        applied.refused.append(&mut made.refused);
        applied.overridden = std::mem::take(&mut made.overridden);
        if let Some(ways) = &mut self.ways {
            ways.assign(&derived.classes);
        }
        made
    }
}
