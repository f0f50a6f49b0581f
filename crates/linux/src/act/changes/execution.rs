//! Making a list of changes on this host.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cachemate_core::{
    Change, ChangeId, ChangeKind, GangSchedule, Item, Outcome as Done, Refused, RefusedBecause, TaskId, refused_lines,
    run,
};

use super::reading::Reading;
use super::steps::{Step, steps};
use crate::act::actuator::{Actuator, ApplyReport};
use crate::act::desired::refused;
use crate::act::resctrl::Ways;
use crate::act::turns::Rotation;
use crate::kernel::{Kernel, ThreadKey, is_gone};
use crate::safety::journal::{self, Object, State};

/// Lends the kernel for a few calls at a time: runners of gangs need it in between.
pub(crate) trait Lend {
    fn lend<T>(&self, with: impl FnOnce(&dyn Kernel) -> T) -> T;
}

impl<K: Kernel> Lend for Arc<Mutex<K>> {
    fn lend<T>(&self, with: impl FnOnce(&dyn Kernel) -> T) -> T {
        // A poisoned lock only means that another thread panicked; the kernel behind it has no state of ours to be broken.
        with(&*self.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Who lets gangs take turns.
pub(crate) trait Gangs {
    fn start(&mut self, schedule: &GangSchedule, rotation: Rotation) -> io::Result<()>;
    /// Returns when everybody has the policy that he had.
    fn stop(&mut self, schedule: &GangSchedule);
    /// What was started and stopped since the last time is in force at once when this returns, where it was not before.
    fn settle(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a list is made with.
pub(crate) struct Host<'a, L> {
    pub kernel: &'a L,
    pub actuator: &'a mut Actuator,
    pub ways: Option<&'a mut Ways>,
    pub gangs: &'a mut dyn Gangs,
}

/// A list under way.
pub(crate) struct Execution<'a, L> {
    host: Host<'a, L>,
    reading: &'a Reading,
    list: &'a [Change],
    /// Steps of changes that stand in the journal, by change.
    journalled: BTreeMap<ChangeId, Vec<Step>>,
    made: ApplyReport,
}

impl<'a, L: Lend> Execution<'a, L> {
    /// Makes the list. Refusals are told line by line of the plan; what does not depend on them goes on.
    pub fn run(host: Host<'a, L>, reading: &'a Reading, list: &'a [Change]) -> ApplyReport {
        let held = reading.found.iter().map(|(object, (_, state))| (object.clone(), state.clone())).collect();
        let overridden = reading.overridden(host.actuator);
        let made = ApplyReport { held, overridden, refused: reading.refused.clone(), ..ApplyReport::default() };
        let mut execution = Execution { host, reading, list, journalled: BTreeMap::new(), made };
        let mut partly = Vec::new();
        let done = run(list, |change| {
            partly.extend(execution.make(change)?);
            Ok(())
        });
        execution.settle();
        execution.tell(&done, partly);
        let Execution { host, made, .. } = execution;
        host.actuator.set_last(made.held.clone());
        made
    }

    /// Refusals of every line that a change was for, each line once.
    fn tell(&mut self, done: &[Done<Refused>], partly: Vec<(ChangeId, Refused)>) {
        let mut lines = refused_lines(self.list, done);
        for (id, why) in partly {
            for item in &self.list[id.0 as usize].items {
                if lines.iter().all(|line| line.item != *item) {
                    lines.push(Refused { item: item.clone(), ..why.clone() });
                }
            }
        }
        self.made.refused.extend(lines);
    }

    /// Gangs of this list go into force; where they do not, the lines that ask for them are told so.
    fn settle(&mut self) {
        let Err(error) = self.host.gangs.settle() else { return };
        let started = self.list.iter().filter(|change| matches!(change.kind, ChangeKind::StartGangs { .. }));
        let items: Vec<Item> = started.flat_map(|change| change.items.iter().cloned()).collect();
        let items = if items.is_empty() { vec![Item::Plan] } else { items };
        let refuse = |item| Refused { item, because: RefusedBecause::Failed, said: error.to_string() };
        self.made.refused.extend(items.into_iter().map(refuse));
    }

    /// Makes one change; answers with a refusal where the kernel made something else of it.
    fn make(&mut self, change: &Change) -> Result<Option<(ChangeId, Refused)>, Refused> {
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
            let item = change.items.first().cloned().unwrap_or(Item::Plan);
            if let Some(now) = self.write(&item, &step)? {
                let said = format!("{:?}: asked for {:?}, the kernel made it {now:?}", step.object, step.state);
                otherwise = Some((change.id, Refused { item, because: RefusedBecause::OwnedByAnother, said }));
            }
        }
        match &change.kind {
            ChangeKind::CreateClass { class, .. } => {
                if let Some(ways) = &mut self.host.ways {
                    self.host.kernel.lend(|kernel| ways.created(kernel, *class));
                }
            }
            ChangeKind::RemoveClass { class, .. } => {
                if let Some(ways) = &mut self.host.ways {
                    let forgotten = ways.removed(*class);
                    self.made.held.retain(|object, _| !forgotten.contains(object));
                    self.host.actuator.forget(&forgotten);
                }
            }
            ChangeKind::StartGangs { schedule } => self.start(change, schedule)?,
            _ => {}
        }
        Ok(otherwise)
    }

    /// Writes down the originals of this change, and with them those of all later ones that can be read by now: one wait for
    /// the disk, not one for each.
    fn write_down(&mut self, change: &Change) -> Result<(), Refused> {
        let item = change.items.first().cloned().unwrap_or(Item::Plan);
        let (reading, host) = (self.reading, &mut self.host);
        let mut batch = Vec::new();
        for later in self.list.iter().skip(change.id.0 as usize) {
            if self.journalled.contains_key(&later.id) {
                continue;
            }
            let found = host.kernel.lend(|kernel| entries(kernel, host.actuator, later, reading, host.ways.as_deref()));
            match found {
                Ok((steps, entries)) => {
                    batch.extend(entries);
                    self.journalled.insert(later.id, steps);
                }
                Err(error) if later.id == change.id => {
                    let object = object_of(change, reading);
                    return Err(host.kernel.lend(|kernel| refused(kernel, &item, &object, &error)));
                }
                Err(_) => {} // its turn comes
            }
        }
        let written = host.kernel.lend(|kernel| host.actuator.before(kernel, &batch));
        written.map_err(|error| {
            self.journalled.clear();
            Refused { item, because: RefusedBecause::NoRoom, said: error.to_string() }
        })
    }

    /// Writes one object; answers with what it is where that is not what was asked for.
    fn write(&mut self, item: &Item, step: &Step) -> Result<Option<State>, Refused> {
        let actuator = &self.host.actuator;
        let set = self.host.kernel.lend(|kernel| actuator.set(kernel, item, &step.object, &step.state));
        match set {
            Ok((now, written)) => {
                self.made.calls += u64::from(written);
                self.made.held.insert(step.object.clone(), now.clone());
                Ok((now != step.state).then_some(now))
            }
            Err(refused) => {
                self.made.calls += 1;
                self.made.held.remove(&step.object);
                Err(refused)
            }
        }
    }

    fn start(&mut self, change: &Change, schedule: &GangSchedule) -> Result<(), Refused> {
        let originals = self.host.actuator.originals();
        let threads = self.reading.threads.iter().map(|(task, thread)| (*task, (thread.pid, thread.key))).collect();
        let rotation = rotation(schedule, &threads, &originals);
        self.host.gangs.start(schedule, rotation).map_err(|error| {
            let item = change.items.first().cloned().unwrap_or(Item::Plan);
            Refused { item, because: RefusedBecause::Failed, said: error.to_string() }
        })
    }
}

/// The steps of a change, and what the journal has to know of them.
fn entries(
    kernel: &dyn Kernel,
    actuator: &Actuator,
    change: &Change,
    reading: &Reading,
    ways: Option<&Ways>,
) -> io::Result<(Vec<Step>, Vec<journal::Change>)> {
    let steps = steps(kernel, change, reading, ways)?;
    let mut entries = Vec::new();
    for step in &steps {
        match actuator.look_at(kernel, &step.object, &step.state) {
            // Who is gone meanwhile cannot be changed by others: by a gang's turn, or with his group.
            Err(error) if !step.write && is_gone(&error) => {}
            entry => entries.push(entry?),
        }
    }
    Ok((steps, entries))
}

/// An object to name where a change has not come as far as its steps.
fn object_of(change: &Change, reading: &Reading) -> Object {
    let found = match &change.kind {
        ChangeKind::Affinity { task, .. } | ChangeKind::Member { task, .. } | ChangeKind::Weight { task, .. } => {
            reading.threads.get(task).map(|thread| Object::Affinity { pid: thread.pid, thread: thread.key })
        }
        ChangeKind::Cpuset { group, .. } => {
            reading.group_files.get(group).map(|path| Object::File { path: path.clone() })
        }
        ChangeKind::Colors { process, .. } => {
            reading.color_files.get(process).map(|path| Object::File { path: path.clone() })
        }
        _ => None,
    };
    found.unwrap_or_else(|| Object::File { path: change.to_string().into() })
}

/// Members as threads with the classes that they had before; `threads` are processes and threads by task.
pub(crate) fn rotation(
    schedule: &GangSchedule,
    threads: &BTreeMap<TaskId, (i32, ThreadKey)>,
    originals: &BTreeMap<Object, State>,
) -> Rotation {
    // Whose original is not written down may not be changed.
    let member = |task: &TaskId| {
        let (pid, thread) = *threads.get(task)?;
        let original = originals.get(&Object::Policy { pid, thread })?;
        Some((thread, original.scheduling()?))
    };
    let gangs = schedule.gangs.iter();
    let gangs = gangs.map(|gang| (gang.members.iter().filter_map(|(task, _)| member(task)).collect(), gang.slices));
    Rotation { slice: Duration::from_nanos(schedule.slice_ns), gangs: gangs.collect() }
}
