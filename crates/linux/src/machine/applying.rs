//! A plan on the live machine: what holds is read, the list of changes is derived from it, and made or only told.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    Applied, ChangeKind, CoRunPenalty, Derived, GangSchedule, Item, Plan, Refused, RefusedBecause, TaskId, changes,
};

use super::{LiveMachine, OBSERVING, lock};
use crate::act::actuator::ApplyReport;
use crate::act::changes::{Before, Execution, Gangs, Host, Reading, rotation};
use crate::act::cpusets;
use crate::act::desired::DesiredState;
use crate::act::gang_scheduler::clashes::advised;
use crate::act::gang_scheduler::compose::Member;
use crate::kernel::scheduling::EXT;
use crate::kernel::{DirLock, Kernel, ThreadKey};
use crate::safety::journal::{JournalError, Object, State};
use crate::sense::sched_cache::tolerance_file;
use crate::sense::tasks::Managed;

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
        let _ = self.gangs.settle();
    }

    /// Looks at the gang scheduler and hands it what is not in schedules: weights, and who should not run together.
    pub(super) fn tell_scheduler(&mut self, plan: &Plan, applied: &mut Applied) {
        let refuse = |because, said| Refused { item: Item::Plan, because, said };
        if let Some(lost) = self.gangs.look() {
            let said = format!("{lost}: its threads run under the fair class, gangs are idle turns");
            applied.refused.push(refuse(RefusedBecause::Gone, said));
        }
        if !self.gangs.scheduler_runs() {
            return;
        }
        let kernel = self.kernel();
        let originals = self.actuator.originals();
        let tasks = self.tasks.all();
        let thread = |task: &TaskId| tasks.iter().find(|known| known.task == *task).map(|known| known.thread);
        let weights = plan.weights.iter().filter_map(|(task, weight)| Some((thread(task)?, *weight))).collect();
        let pair = |pair: &CoRunPenalty| Some(((thread(&pair.tasks.0)?, thread(&pair.tasks.1)?), pair.penalty));
        let penalties: BTreeMap<_, _> =
            plan.penalties.iter().filter(|pair| pair.penalty > 0.0).filter_map(pair).collect();
        let clashes = penalties.keys().copied().collect();
        let mut members = Vec::new();
        if plan.gangs.is_empty() && !penalties.is_empty() {
            members = movable(&*lock(&kernel), &tasks, &originals);
            let wanted: Vec<DesiredState> = members.iter().map(|(object, _)| given_away(object)).collect();
            // Before anything is told: the originals are in the journal, and the guardian stands.
            let journalled = self.actuator.journal_originals(&*lock(&kernel), &wanted);
            if let Err(error) = journalled {
                applied.refused.push(refuse(RefusedBecause::NoRoom, error.to_string()));
                members.clear();
            }
        }
        let members: Vec<Member> = members.into_iter().map(|(_, member)| member).collect();
        self.gangs.tell(weights, clashes, |caches| advised(&members, &penalties, caches));
    }

    /// The kernel's tolerance as the configuration wants it: journalled, and put back like every change.
    pub(super) fn set_kernel_tolerance(&mut self, applied: &mut Applied) {
        let Some(tolerance) = self.options.kernel_tolerance else { return };
        let (object, state) = (Object::File { path: tolerance_file() }, State::Text(tolerance.to_string()));
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        let want = DesiredState { item: Item::Plan, object: object.clone(), state: state.clone() };
        // Set once: somebody else's choice since then counts more.
        if self.actuator.originals().contains_key(&object) {
            return;
        }
        let promised = self.actuator.journal_originals(&*kernel, &[want]);
        let no_room = |error: JournalError| Refused {
            item: Item::Plan,
            because: RefusedBecause::NoRoom,
            said: error.to_string(),
        };
        let set = promised.map_err(no_room).and_then(|()| self.actuator.set(&*kernel, &Item::Plan, &object, &state));
        applied.refused.extend(set.err());
    }

    /// What holds now, and the changes that lead from there to the plan. The lock of resctrl is to be kept until they are made.
    pub(super) fn derive(&mut self, plan: &Plan) -> (Reading, Derived, Option<DirLock>) {
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        let groups = cpusets::look(&*kernel, &self.options.groups, &self.actuator.originals());
        let tasks = self.tasks.all();
        let gangs = self.gangs.schedules();
        let by_scheduler = self.gangs.scheduler_runs();
        let before = Before { actuator: &self.actuator, weights: &self.weights, gangs, by_scheduler };
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
        let told = self.gangs.complaints().into_iter();
        applied.refused.extend(told.map(|said| Refused { item: Item::Plan, because: RefusedBecause::Failed, said }));
        applied.overridden = std::mem::take(&mut made.overridden);
        if let Some(ways) = &mut self.ways {
            ways.assign(&derived.classes);
        }
        made
    }
}

/// Threads that may be given to the gang scheduler, with how they were scheduled before.
fn movable(kernel: &dyn Kernel, tasks: &[&Managed], originals: &BTreeMap<Object, State>) -> Vec<(Object, Member)> {
    let member = |task: &&Managed| {
        let object = Object::Policy { pid: task.pid, thread: task.thread };
        let known = originals.get(&object).and_then(State::scheduling);
        let original = known.or_else(|| kernel.scheduling(task.thread.tid).ok())?;
        (original.can_wait() && original.flags == 0).then_some((object, (task.thread, original)))
    };
    tasks.iter().filter(|task| !task.fixed && !task.exited).filter_map(member).collect()
}

fn given_away(object: &Object) -> DesiredState {
    DesiredState { item: Item::Plan, object: object.clone(), state: State::Policy(EXT) }
}
