//! Execution of a list of changes on this host.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cachemate_core::{
    Change, ChangeId, ChangeKind, ChangeOutcome, GangSchedule, PlanItem, RefusalReason,
    RefusedItem, TaskId, refused_items, run,
};

use super::object_changes::object_changes;
use super::snapshot::HostSnapshot;
use crate::act::actuator::{Actuator, ApplyReport};
use crate::act::desired_state::{DesiredState, refusal};
use crate::act::resctrl::WayController;
use crate::act::thread_rotation::ThreadRotation;
use crate::kernel::{Kernel, ThreadKey, is_gone, lock};
use crate::safety::journal::{self, JournalObject, ObjectState};
use crate::safety::object_state::ObjectAccess;

/// Lends the kernel for a few calls at a time, because the runners of gangs need it in between.
pub(crate) trait KernelLender {
    fn with_kernel<T>(&self, action: impl FnOnce(&dyn Kernel) -> T) -> T;
}

impl<K: Kernel> KernelLender for Arc<Mutex<K>> {
    fn with_kernel<T>(&self, action: impl FnOnce(&dyn Kernel) -> T) -> T {
        action(&*lock(self))
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
    context: ApplyContext<'a, L>,
    snapshot: &'a HostSnapshot,
    changes: &'a [Change],
    /// Steps of each change whose originals are in the journal.
    journaled_steps: BTreeMap<ChangeId, Vec<DesiredState>>,
    report: ApplyReport,
}

impl<'a, L: KernelLender> Execution<'a, L> {
    /// Executes the list. Each refused line of the plan is reported; changes that do not depend on it are still made.
    pub fn run(
        context: ApplyContext<'a, L>,
        snapshot: &'a HostSnapshot,
        changes: &'a [Change],
    ) -> ApplyReport {
        let read_back_states = snapshot
            .objects
            .iter()
            .map(|(object, (_, state))| (object.clone(), state.clone()))
            .collect();
        let overridden_items = snapshot.overridden_items(context.actuator);
        let report = ApplyReport {
            read_back_states,
            overridden_items,
            refused_items: snapshot.refused_items.clone(),
            ..ApplyReport::default()
        };
        let mut execution = Execution {
            context,
            snapshot,
            changes,
            journaled_steps: BTreeMap::new(),
            report,
        };
        let mut partial_refusals = Vec::new();
        let outcomes = run(changes, |change| {
            partial_refusals.extend(execution.apply(change)?);
            Ok(())
        });
        execution.commit_gangs();
        execution.record_refusals(&outcomes, partial_refusals);
        let Execution {
            context: host,
            report: final_report,
            ..
        } = execution;
        host.actuator
            .set_last_states(final_report.read_back_states.clone());
        final_report
    }

    /// Refusals of every line that a change was for, each line once.
    fn record_refusals(
        &mut self,
        outcomes: &[ChangeOutcome<RefusedItem>],
        partial_refusals: Vec<(ChangeId, RefusedItem)>,
    ) {
        let mut line_refusals = refused_items(self.changes, outcomes);
        for (id, refused_item) in partial_refusals {
            for item in &self.changes[id.0 as usize].items {
                if line_refusals.iter().all(|refusal| refusal.item != *item) {
                    line_refusals.push(RefusedItem {
                        item: item.clone(),
                        ..refused_item.clone()
                    });
                }
            }
        }
        self.report.refused_items.extend(line_refusals);
    }

    /// Applies the gangs of this list. If that fails, the lines of the plan that request gangs are refused.
    fn commit_gangs(&mut self) {
        let Err(error) = self.context.gangs.commit_gangs() else {
            return;
        };
        let gang_starts = self
            .changes
            .iter()
            .filter(|change| matches!(change.kind, ChangeKind::StartGangs { .. }));
        let items: Vec<PlanItem> = gang_starts
            .flat_map(|change| change.items.iter().cloned())
            .collect();
        let items = if items.is_empty() {
            vec![PlanItem::Plan]
        } else {
            items
        };
        let refuse = |item| RefusedItem {
            item,
            reason: RefusalReason::Failed,
            message: error.to_string(),
        };
        self.report
            .refused_items
            .extend(items.into_iter().map(refuse));
    }

    /// Applies one change; returns a refusal if the kernel set another state than requested.
    fn apply(&mut self, change: &Change) -> Result<Option<(ChangeId, RefusedItem)>, RefusedItem> {
        if let ChangeKind::StopGangs { schedule } = &change.kind {
            self.context.gangs.stop(schedule);
            return Ok(None);
        }
        if !self.journaled_steps.contains_key(&change.id) {
            self.journal_ahead(change)?;
        }
        let steps = self
            .journaled_steps
            .get(&change.id)
            .cloned()
            .unwrap_or_default();
        let mut mismatch = None;
        for step in steps.into_iter().filter(|step| step.must_write) {
            let item = change.first_item();
            if let Some(actual_state) = self.write(&item, &step)? {
                let message = format!(
                    "{:?}: asked for {:?}, the kernel made it {actual_state:?}",
                    step.object, step.state
                );
                mismatch = Some((
                    change.id,
                    RefusedItem {
                        item,
                        reason: RefusalReason::OwnedByOther,
                        message,
                    },
                ));
            }
        }
        match &change.kind {
            ChangeKind::CreateClass { class, .. } => {
                if let Some(ways) = &mut self.context.ways {
                    self.context
                        .kernel
                        .with_kernel(|kernel| ways.register_created(kernel, *class));
                }
            }
            ChangeKind::RemoveClass { class, .. } => {
                if let Some(ways) = &mut self.context.ways {
                    let forgotten_objects = ways.forget_removed(*class);
                    self.report
                        .read_back_states
                        .retain(|object, _| !forgotten_objects.contains(object));
                    self.context.actuator.forget(&forgotten_objects);
                }
            }
            ChangeKind::StartGangs { schedule } => self.start_gangs(change, schedule)?,
            _ => {}
        }
        Ok(mismatch)
    }

    /// Journals the originals of this change together with those of all later ones that can already be read, so that
    /// the disk is synced once and not once for each change.
    fn journal_ahead(&mut self, change: &Change) -> Result<(), RefusedItem> {
        let item = change.first_item();
        let (snapshot, host) = (self.snapshot, &mut self.context);
        let mut batch = Vec::new();
        for later_change in self.changes.iter().skip(change.id.0 as usize) {
            if self.journaled_steps.contains_key(&later_change.id) {
                continue;
            }
            let prepared_change = host.kernel.with_kernel(|kernel| {
                prepare_steps(
                    kernel,
                    host.actuator,
                    later_change,
                    snapshot,
                    host.ways.as_deref(),
                )
            });
            match prepared_change {
                Ok((steps, intended_changes)) => {
                    batch.extend(intended_changes);
                    self.journaled_steps.insert(later_change.id, steps);
                }
                Err(error) if later_change.id == change.id => {
                    let object = journal_object(change, snapshot);
                    return Err(host.kernel.with_kernel(|kernel| {
                        refusal(kernel, &item, &object, ObjectAccess::Read, &error)
                    }));
                }
                Err(_) => {} // `apply` reports the error when it reaches this change
            }
        }
        let journal_result = host
            .kernel
            .with_kernel(|kernel| host.actuator.journal_changes(kernel, &batch));
        journal_result.map_err(|error| {
            self.journaled_steps.clear();
            RefusedItem {
                item,
                reason: RefusalReason::NoCapacity,
                message: error.to_string(),
            }
        })
    }

    /// Writes one object; returns its state if that differs from the requested one.
    fn write(
        &mut self,
        item: &PlanItem,
        step: &DesiredState,
    ) -> Result<Option<ObjectState>, RefusedItem> {
        let actuator = &self.context.actuator;
        let set_result = self
            .context
            .kernel
            .with_kernel(|kernel| actuator.set(kernel, item, &step.object, &step.state));
        match set_result {
            Ok((current_state, was_written)) => {
                self.report.write_calls += u64::from(was_written);
                self.report
                    .read_back_states
                    .insert(step.object.clone(), current_state.clone());
                Ok((current_state != step.state).then_some(current_state))
            }
            Err(refusal) => {
                self.report.write_calls += 1;
                self.report.read_back_states.remove(&step.object);
                Err(refusal)
            }
        }
    }

    fn start_gangs(&mut self, change: &Change, schedule: &GangSchedule) -> Result<(), RefusedItem> {
        let originals = self.context.actuator.originals();
        let threads = self
            .snapshot
            .threads
            .iter()
            .map(|(task, thread)| (*task, (thread.pid, thread.key)))
            .collect();
        let rotation = build_rotation(schedule, &threads, &originals);
        self.context
            .gangs
            .start(schedule, rotation)
            .map_err(|error| change.failed(error))
    }
}

/// The steps of a change, and their journal entries.
fn prepare_steps(
    kernel: &dyn Kernel,
    actuator: &Actuator,
    change: &Change,
    snapshot: &HostSnapshot,
    ways: Option<&WayController>,
) -> io::Result<(Vec<DesiredState>, Vec<journal::IntendedChange>)> {
    let steps = object_changes(kernel, change, snapshot, ways)?;
    let mut intended_changes = Vec::new();
    for step in &steps {
        match actuator.build_intended_change(kernel, &step.object, &step.state) {
            // A thread or group that no longer exists cannot have been changed by another process.
            Err(error) if !step.must_write && is_gone(&error) => {}
            change_result => intended_changes.push(change_result?),
        }
    }
    Ok((steps, intended_changes))
}

/// The object to name in a refusal if a change failed before its steps were known.
fn journal_object(change: &Change, snapshot: &HostSnapshot) -> JournalObject {
    let object = match &change.kind {
        ChangeKind::Affinity { task, .. }
        | ChangeKind::Member { task, .. }
        | ChangeKind::Weight { task, .. } => {
            snapshot
                .threads
                .get(task)
                .map(|thread| JournalObject::Affinity {
                    pid: thread.pid,
                    thread: thread.key,
                })
        }
        ChangeKind::Cpuset { group, .. } => snapshot
            .group_files
            .get(group)
            .map(|path| JournalObject::File { path: path.clone() }),
        ChangeKind::Colors { process, .. } => snapshot
            .color_files
            .get(process)
            .map(|path| JournalObject::File { path: path.clone() }),
        _ => None,
    };
    object.unwrap_or_else(|| JournalObject::File {
        path: change.to_string().into(),
    })
}

/// The gangs' members as threads with their original scheduling; `threads` maps each task to its process and thread.
pub(crate) fn build_rotation(
    schedule: &GangSchedule,
    threads: &BTreeMap<TaskId, (i32, ThreadKey)>,
    originals: &BTreeMap<JournalObject, ObjectState>,
) -> ThreadRotation {
    // A thread whose original is not in the journal may not be changed.
    let resolve_member = |task: &TaskId| {
        let (pid, thread) = *threads.get(task)?;
        let original = originals.get(&JournalObject::Policy { pid, thread })?;
        Some((thread, original.scheduling()?))
    };
    let gangs = schedule.gangs.iter();
    let gangs = gangs.map(|gang| {
        (
            gang.members
                .iter()
                .filter_map(|(task, _)| resolve_member(task))
                .collect(),
            gang.slices,
        )
    });
    ThreadRotation {
        slice: Duration::from_nanos(schedule.slice_ns),
        gangs: gangs.collect(),
    }
}
