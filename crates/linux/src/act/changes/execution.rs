//! Execution of a list of changes on this host.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cachemate_core::{
    Change, ChangeId, ChangeKind, ChangeOutcome as Done, GangSchedule, PlanItem, RefusalReason, RefusedItem, TaskId,
    refused_items, run,
};

use super::object_changes::{ObjectChange, object_changes};
use super::snapshot::HostSnapshot;
use crate::act::actuator::{Actuator, ApplyReport};
use crate::act::desired_state::refusal;
use crate::act::resctrl::WayController;
use crate::act::thread_rotation::ThreadRotation;
use crate::kernel::{Kernel, ThreadKey, is_gone};
use crate::safety::journal::{self, JournalObject, ObjectState};

/// Lends the kernel for a few calls at a time, because the runners of gangs need it in between.
pub(crate) trait KernelLender {
    fn with_kernel<T>(&self, action: impl FnOnce(&dyn Kernel) -> T) -> T;
}

impl<K: Kernel> KernelLender for Arc<Mutex<K>> {
    fn with_kernel<T>(&self, action: impl FnOnce(&dyn Kernel) -> T) -> T {
        // A poisoned lock only means that another thread panicked; the kernel behind it has no state of ours that could
        // be inconsistent.
        action(&*self.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Starts and stops gang schedules.
pub(crate) trait GangController {
    fn start(&mut self, schedule: &GangSchedule, rotation: ThreadRotation) -> io::Result<()>;
    /// Stops a schedule; returns once every member has its original policy.
    fn stop(&mut self, schedule: &GangSchedule);
    /// Puts all starts and stops since the last call in force.
    fn commit_gangs(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The host, the controllers and the tables with which a list of changes is executed.
pub(crate) struct ApplyContext<'a, L> {
    pub kernel: &'a L,
    pub actuator: &'a mut Actuator,
    pub ways: Option<&'a mut WayController>,
    pub gangs: &'a mut dyn GangController,
}

/// A list of changes in execution.
pub(crate) struct Execution<'a, L> {
    host: ApplyContext<'a, L>,
    reading: &'a HostSnapshot,
    list: &'a [Change],
    /// Steps whose originals are in the journal, by change.
    journalled: BTreeMap<ChangeId, Vec<ObjectChange>>,
    report: ApplyReport,
}

impl<'a, L: KernelLender> Execution<'a, L> {
    /// Executes the list. Each refused line of the plan is reported; changes that do not depend on it are still made.
    pub fn run(host: ApplyContext<'a, L>, reading: &'a HostSnapshot, list: &'a [Change]) -> ApplyReport {
        let current_states =
            reading.objects.iter().map(|(object, (_, state))| (object.clone(), state.clone())).collect();
        let overridden = reading.overridden_items(host.actuator);
        let report = ApplyReport {
            in_force: current_states,
            overridden,
            refused: reading.refused.clone(),
            ..ApplyReport::default()
        };
        let mut execution = Execution { host, reading, list, journalled: BTreeMap::new(), report };
        let mut partial_refusals = Vec::new();
        let outcomes = run(list, |change| {
            partial_refusals.extend(execution.apply(change)?);
            Ok(())
        });
        execution.commit_gangs();
        execution.record_refusals(&outcomes, partial_refusals);
        let Execution { host, report: made, .. } = execution;
        host.actuator.set_last_states(made.in_force.clone());
        made
    }

    /// Refusals of every line that a change was for, each line once.
    fn record_refusals(&mut self, outcomes: &[Done<RefusedItem>], partial_refusals: Vec<(ChangeId, RefusedItem)>) {
        let mut lines = refused_items(self.list, outcomes);
        for (id, refused_item) in partial_refusals {
            for item in &self.list[id.0 as usize].items {
                if lines.iter().all(|line| line.item != *item) {
                    lines.push(RefusedItem { item: item.clone(), ..refused_item.clone() });
                }
            }
        }
        self.report.refused.extend(lines);
    }

    /// Applies the gangs of this list. If that fails, the lines of the plan that request gangs are refused.
    fn commit_gangs(&mut self) {
        let Err(error) = self.host.gangs.commit_gangs() else { return };
        let gang_starts = self.list.iter().filter(|change| matches!(change.kind, ChangeKind::StartGangs { .. }));
        let items: Vec<PlanItem> = gang_starts.flat_map(|change| change.items.iter().cloned()).collect();
        let items = if items.is_empty() { vec![PlanItem::Plan] } else { items };
        let refuse = |item| RefusedItem { item, reason: RefusalReason::Failed, message: error.to_string() };
        self.report.refused.extend(items.into_iter().map(refuse));
    }

    /// Makes one change; returns a refusal if the kernel set a different state.
    fn apply(&mut self, change: &Change) -> Result<Option<(ChangeId, RefusedItem)>, RefusedItem> {
        if let ChangeKind::StopGangs { schedule } = &change.kind {
            self.host.gangs.stop(schedule);
            return Ok(None);
        }
        if !self.journalled.contains_key(&change.id) {
            self.write_down(change)?;
        }
        let steps = self.journalled.get(&change.id).cloned().unwrap_or_default();
        let mut otherwise = None;
        for step in steps.into_iter().filter(|step| step.write) {
            let item = change.items.first().cloned().unwrap_or(PlanItem::Plan);
            if let Some(now) = self.write(&item, &step)? {
                let message = format!("{:?}: asked for {:?}, the kernel made it {now:?}", step.object, step.state);
                otherwise = Some((change.id, RefusedItem { item, reason: RefusalReason::OwnedByOther, message }));
            }
        }
        match &change.kind {
            ChangeKind::CreateClass { class, .. } => {
                if let Some(ways) = &mut self.host.ways {
                    self.host.kernel.with_kernel(|kernel| ways.register_created(kernel, *class));
                }
            }
            ChangeKind::RemoveClass { class, .. } => {
                if let Some(ways) = &mut self.host.ways {
                    let forgotten = ways.forget_removed(*class);
                    self.report.in_force.retain(|object, _| !forgotten.contains(object));
                    self.host.actuator.forget(&forgotten);
                }
            }
            ChangeKind::StartGangs { schedule } => self.start(change, schedule)?,
            _ => {}
        }
        Ok(otherwise)
    }

    /// Journals the originals of this change together with those of all later ones that can already be read, so that
    /// the disk is synced once and not once for each change.
    fn write_down(&mut self, change: &Change) -> Result<(), RefusedItem> {
        let item = change.items.first().cloned().unwrap_or(PlanItem::Plan);
        let (reading, host) = (self.reading, &mut self.host);
        let mut batch = Vec::new();
        for later in self.list.iter().skip(change.id.0 as usize) {
            if self.journalled.contains_key(&later.id) {
                continue;
            }
            let prepared_change =
                host.kernel.with_kernel(|kernel| entries(kernel, host.actuator, later, reading, host.ways.as_deref()));
            match prepared_change {
                Ok((steps, entries)) => {
                    batch.extend(entries);
                    self.journalled.insert(later.id, steps);
                }
                Err(error) if later.id == change.id => {
                    let object = journal_object(change, reading);
                    return Err(host.kernel.with_kernel(|kernel| refusal(kernel, &item, &object, &error)));
                }
                Err(_) => {} // its turn comes
            }
        }
        let journal_result = host.kernel.with_kernel(|kernel| host.actuator.journal_changes(kernel, &batch));
        journal_result.map_err(|error| {
            self.journalled.clear();
            RefusedItem { item, reason: RefusalReason::NoCapacity, message: error.to_string() }
        })
    }

    /// Writes one object; returns its state if that differs from the requested one.
    fn write(&mut self, item: &PlanItem, step: &ObjectChange) -> Result<Option<ObjectState>, RefusedItem> {
        let actuator = &self.host.actuator;
        let set = self.host.kernel.with_kernel(|kernel| actuator.set(kernel, item, &step.object, &step.state));
        match set {
            Ok((now, written)) => {
                self.report.calls += u64::from(written);
                self.report.in_force.insert(step.object.clone(), now.clone());
                Ok((now != step.state).then_some(now))
            }
            Err(refusal) => {
                self.report.calls += 1;
                self.report.in_force.remove(&step.object);
                Err(refusal)
            }
        }
    }

    fn start(&mut self, change: &Change, schedule: &GangSchedule) -> Result<(), RefusedItem> {
        let originals = self.host.actuator.originals();
        let threads = self.reading.threads.iter().map(|(task, thread)| (*task, (thread.pid, thread.key))).collect();
        let rotation = build_rotation(schedule, &threads, &originals);
        self.host.gangs.start(schedule, rotation).map_err(|error| {
            let item = change.items.first().cloned().unwrap_or(PlanItem::Plan);
            RefusedItem { item, reason: RefusalReason::Failed, message: error.to_string() }
        })
    }
}

/// The steps of a change, and their journal entries.
fn entries(
    kernel: &dyn Kernel,
    actuator: &Actuator,
    change: &Change,
    reading: &HostSnapshot,
    ways: Option<&WayController>,
) -> io::Result<(Vec<ObjectChange>, Vec<journal::IntendedChange>)> {
    let steps = object_changes(kernel, change, reading, ways)?;
    let mut entries = Vec::new();
    for step in &steps {
        match actuator.read_current(kernel, &step.object, &step.state) {
            // A thread or group that no longer exists cannot have been changed by another process.
            Err(error) if !step.write && is_gone(&error) => {}
            entry => entries.push(entry?),
        }
    }
    Ok((steps, entries))
}

/// The object to name in a refusal if a change failed before its steps were known.
fn journal_object(change: &Change, reading: &HostSnapshot) -> JournalObject {
    let thread = match &change.kind {
        ChangeKind::Affinity { task, .. } | ChangeKind::Member { task, .. } | ChangeKind::Weight { task, .. } => {
            reading.threads.get(task).map(|thread| JournalObject::Affinity { pid: thread.pid, thread: thread.key })
        }
        ChangeKind::Cpuset { group, .. } => {
            reading.group_files.get(group).map(|path| JournalObject::File { path: path.clone() })
        }
        ChangeKind::Colors { process, .. } => {
            reading.color_files.get(process).map(|path| JournalObject::File { path: path.clone() })
        }
        _ => None,
    };
    thread.unwrap_or_else(|| JournalObject::File { path: change.to_string().into() })
}

/// Members as threads with the classes that they had before; `threads` are processes and threads by task.
pub(crate) fn build_rotation(
    schedule: &GangSchedule,
    threads: &BTreeMap<TaskId, (i32, ThreadKey)>,
    originals: &BTreeMap<JournalObject, ObjectState>,
) -> ThreadRotation {
    // A thread whose original is not in the journal may not be changed.
    let member = |task: &TaskId| {
        let (pid, thread) = *threads.get(task)?;
        let original = originals.get(&JournalObject::Policy { pid, thread })?;
        Some((thread, original.scheduling()?))
    };
    let gangs = schedule.gangs.iter();
    let gangs = gangs.map(|gang| (gang.members.iter().filter_map(|(task, _)| member(task)).collect(), gang.slices));
    ThreadRotation { slice: Duration::from_nanos(schedule.slice_ns), gangs: gangs.collect() }
}
