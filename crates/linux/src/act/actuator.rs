//! The only path by which the host is changed: journal and guardian first, then the change.
//!
//! The core defines which changes exist (`cachemate_core::changes`), and [`crate::act::changes`] applies them through
//! the [`Actuator`]: [`Actuator::journal_changes`] journals the originals (one synced batch) and makes sure that the
//! guardian runs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cachemate_core::{PlanItem, RefusedItem};

use crate::act::desired_state::{DesiredState, refusal};
use crate::kernel::{Kernel, ThreadKey, is_gone, none_if_missing};
use crate::safety::actuation_lock::ActuationLock;
use crate::safety::guardian::{Guardian, GuardianStatus};
use crate::safety::inheritance::{Inheritance, read_family};
use crate::safety::journal::{
    IntendedChange, Journal, JournalEntry, JournalError, JournalObject, ObjectState,
};
use crate::safety::object_state::{ObjectAccess, check_thread, read_state, write_state};
use crate::safety::restore::{
    RestoredObject, restore, restore_if_inherited, spans_cpuset, write_original,
};
use crate::sense::tasks::ManagedThread;

/// Outcome of a list of changes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ApplyReport {
    /// Lines of the plan that could not be applied, with the reasons.
    pub refused_items: Vec<RefusedItem>,
    /// Objects with the state that was last read.
    pub read_back_states: BTreeMap<JournalObject, ObjectState>,
    /// Lines of the plan that another process has changed since they were set.
    pub overridden_items: Vec<PlanItem>,
    /// Number of write calls.
    pub write_calls: u64,
}

/// The command that starts a guardian: program and arguments.
#[derive(Clone, Default, Debug)]
pub struct GuardianCommand {
    /// Path of the executable, which must call [`crate::safety::guardian::watch`].
    pub program: PathBuf,
    /// Arguments, passed on unchanged.
    pub args: Vec<String>,
}

/// The component that journals and changes the host; what runs gangs and probes writes only what it has journaled.
#[derive(Default, Debug)]
pub struct Actuator {
    state_dir: PathBuf,
    guardian_command: GuardianCommand,
    /// The right to act, which the guardian keeps until it has restored the host.
    actuation_lock: Option<Arc<ActuationLock>>,
    /// The journal and the guardian, which exist from the first change on.
    journal_and_guardian: Option<(Journal, Guardian)>,
    /// Each object's state when it was last read back.
    last_states: BTreeMap<JournalObject, ObjectState>,
    /// See [`Actuator::has_unread_settings`].
    unread_threads: BTreeSet<ThreadKey>,
    /// Unmanaged processes of which it could not be read or restored what they inherited.
    unread_pids: BTreeSet<i32>,
    /// Journaled threads that have exited, with the number of windows since.
    ended_threads: BTreeMap<ThreadKey, u32>,
}

/// Number of windows for which the original of an exited thread is kept for its children, each of which is read in the
/// second window after its birth at the latest.
const KEPT_WINDOWS: u32 = 8;

impl Actuator {
    /// An actuator whose journal will be in `state_dir`. The journal is begun and the guardian started before the first
    /// change, not here.
    pub fn new(state_dir: &Path, guardian_command: GuardianCommand) -> Self {
        Actuator {
            state_dir: state_dir.to_path_buf(),
            guardian_command,
            ..Actuator::default()
        }
    }

    /// Takes over the right to act; the guardian keeps it until it has restored the host.
    pub fn set_actuation_lock(&mut self, actuation_lock: Arc<ActuationLock>) {
        self.actuation_lock = Some(actuation_lock);
    }

    /// Originals of all changed objects.
    pub fn originals(&self) -> BTreeMap<JournalObject, ObjectState> {
        let entries = self
            .journal_and_guardian
            .iter()
            .flat_map(|(journal, _)| journal.entries());
        entries
            .map(|(object, entry)| (object.clone(), entry.original.clone()))
            .collect()
    }

    /// The journal's entry of an object that was changed or is about to be changed.
    pub(crate) fn journal_entry(&self, object: &JournalObject) -> Option<&JournalEntry> {
        self.journal_and_guardian
            .as_ref()
            .and_then(|(journal, _)| journal.entries().get(object))
    }

    /// The object's state when it was last read back.
    pub fn last_state(&self, object: &JournalObject) -> Option<&ObjectState> {
        self.last_states.get(object)
    }

    /// Records the states that cachemate has set, so that changes by other processes are detected.
    pub(crate) fn set_last_states(&mut self, last_states: BTreeMap<JournalObject, ObjectState>) {
        self.last_states = last_states;
    }

    /// Journals the originals of `changes` and makes sure that the guardian runs. Must succeed before any of the
    /// changes is made.
    ///
    /// # Errors
    /// There is no journal or no guardian, so nothing may be changed.
    pub fn journal_changes(
        &mut self,
        kernel: &dyn Kernel,
        changes: &[IntendedChange],
    ) -> Result<(), JournalError> {
        if changes.is_empty() {
            Ok(())
        } else {
            let journal = self.arm_guardian(kernel)?;
            add_families(kernel, journal, changes);
            journal.journal_changes(changes)
        }
    }

    /// Process id of the guardian; `None` if it has not been started.
    pub fn guardian_pid(&self) -> Option<u32> {
        self.journal_and_guardian
            .as_ref()
            .map(|(_, guardian)| guardian.pid())
    }

    fn arm_guardian(&mut self, kernel: &dyn Kernel) -> Result<&mut Journal, JournalError> {
        let io_error = JournalError::io_error_at(&self.state_dir);
        let args: Vec<&str> = self
            .guardian_command
            .args
            .iter()
            .map(String::as_str)
            .collect();
        let start_guardian = || {
            let lock_descriptors: Vec<_> = self
                .actuation_lock
                .iter()
                .flat_map(|acting| acting.descriptors())
                .collect();
            let guardian =
                Guardian::start(&self.guardian_command.program, &args, &lock_descriptors)?;
            kernel.set_fence(Some(guardian.fence().clone()));
            Ok(guardian)
        };
        match &mut self.journal_and_guardian {
            Some((_, guardian)) => match guardian.status() {
                GuardianStatus::Alive => {}
                GuardianStatus::Killed => *guardian = start_guardian().map_err(io_error)?,
                GuardianStatus::TakenOver => return Err(JournalError::Fenced),
            },
            None => {
                // From before the journal's beginning, so that no birth under our settings is missing.
                kernel.record_births();
                // If the time cannot be read, every thread counts as created after the journal was begun.
                let since_ticks = kernel.ticks_since_boot().unwrap_or(0);
                let journal = Journal::create(
                    &self.state_dir,
                    &kernel.boot_id().map_err(io_error)?,
                    since_ticks,
                )?;
                match start_guardian() {
                    Ok(guardian) => self.journal_and_guardian = Some((journal, guardian)),
                    Err(source) => {
                        journal.remove()?;
                        return Err(io_error(source));
                    }
                }
            }
        }
        let (journal, _) = self.journal_and_guardian.as_mut().expect("armed just now");
        Ok(journal)
    }

    /// Writes one object, whose original is already in the journal, and reads it back. Returns its new state, and
    /// whether it had to be written.
    ///
    /// # Errors
    /// The kernel's error, unchanged.
    pub fn set(
        &self,
        kernel: &dyn Kernel,
        item: &PlanItem,
        object: &JournalObject,
        desired_state: &ObjectState,
    ) -> Result<(ObjectState, bool), RefusedItem> {
        match read_state(kernel, object) {
            Ok(current_state) if current_state == *desired_state => {
                return Ok((current_state, false));
            }
            _ => {}
        }
        let write_result = self.write(kernel, object, desired_state);
        write_result
            .map(|now| (now, true))
            .map_err(|error| refusal(kernel, item, object, ObjectAccess::Write, &error))
    }

    /// Writes an object that is already in the journal, and reads it back.
    fn write(
        &self,
        kernel: &dyn Kernel,
        object: &JournalObject,
        desired_state: &ObjectState,
    ) -> io::Result<ObjectState> {
        // The thread's id may have been reused since the original was read.
        check_thread(kernel, object)?;
        let entry = self.journal_entry(object);
        match entry.filter(|entry| entry.original == *desired_state) {
            Some(entry) => write_original(kernel, object, entry)?,
            None => write_state(kernel, object, desired_state)?,
        }
        let current_state = read_state(kernel, object)?;
        // A thread that follows its cpuset again has its original state, even if the cpuset has changed meanwhile.
        let restores_cpuset_mask =
            |entry: &JournalEntry| entry.follows_cpuset && entry.original == *desired_state;
        Ok(if entry.is_some_and(restores_cpuset_mask) {
            desired_state.clone()
        } else {
            current_state
        })
    }

    /// Journals the originals of objects that another component (the gangs' runner, a probe) is about to change
    /// between known states, and makes sure that the guardian runs. Objects that do not exist are skipped.
    ///
    /// # Errors
    /// The errors of every change, or the original of an existing object cannot be read. In both cases nothing may be
    /// changed.
    pub fn journal_originals(
        &mut self,
        kernel: &dyn Kernel,
        desired_states: &[DesiredState],
    ) -> Result<(), JournalError> {
        let mut changes = Vec::new();
        for desired_state in desired_states {
            match self.build_intended_change(kernel, &desired_state.object, &desired_state.state) {
                Ok(change) => changes.push(change),
                Err(error) if is_gone(&error) => {}
                Err(source) => {
                    return Err(JournalError::Original {
                        object: format!("{:?}", desired_state.object),
                        source,
                    });
                }
            }
        }
        self.journal_changes(kernel, &changes)
    }

    /// Sends the guardian a heartbeat, and restarts it if necessary. Does nothing unless something has been changed.
    /// The caller promises a heartbeat in each window.
    ///
    /// # Errors
    /// The guardian had exited and no other could be started.
    pub fn heartbeat(&mut self, kernel: &dyn Kernel, window: Duration) -> Result<(), JournalError> {
        if self.journal_and_guardian.is_some() {
            self.arm_guardian(kernel)?;
            kernel.record_births();
        }
        self.send_heartbeat(window);
        Ok(())
    }

    /// Sends the guardian a heartbeat, if there is one.
    pub fn send_heartbeat(&mut self, window: Duration) {
        if let Some((_, guardian)) = &mut self.journal_and_guardian {
            guardian.send_heartbeat(window);
        }
    }

    /// Has the guardian restored the host because this process sent no heartbeat? If so, nothing can be changed
    /// before [`Actuator::rejoin`].
    pub fn is_fenced(&mut self) -> bool {
        self.journal_and_guardian
            .as_mut()
            .is_some_and(|(_, guardian)| guardian.status() == GuardianStatus::TakenOver)
    }

    /// Rejoins after a missed heartbeat: waits until the guardian has exited, and restores the object that this process
    /// was about to change when it was stopped. Afterwards there is no journal and no guardian, unless it fails.
    ///
    /// # Errors
    /// The guardian is still restoring, or an object could not be restored and remains in the journal. The process
    /// stays fenced.
    pub fn rejoin(&mut self, kernel: &dyn Kernel) -> Result<(), JournalError> {
        const MAX_WAIT: Duration = Duration::from_secs(10);
        let Some((mut journal, mut guardian)) = self.journal_and_guardian.take() else {
            return Ok(());
        };
        if !guardian.wait_for_exit(MAX_WAIT) {
            self.journal_and_guardian = Some((journal, guardian));
            return Err(JournalError::Fenced);
        }
        kernel.set_fence(None);
        self.last_states.clear();
        let restored_objects = restore(kernel, journal.entries());
        let unrestored = failed_objects(&restored_objects);
        if unrestored.is_empty() {
            return journal.remove();
        }
        // The guardian may have removed the journal. It stays here, so that this process remains fenced and tries
        // again.
        let rewritten = journal.rewrite(|object| unrestored.contains(&object));
        self.journal_and_guardian = Some((journal, guardian));
        rewritten.and(Err(JournalError::Fenced))
    }

    /// Restores the properties of these threads and the files of these processes, which are no longer managed.
    ///
    /// # Errors
    /// The journal could not be rewritten; nothing is lost.
    pub fn release(
        &mut self,
        kernel: &dyn Kernel,
        threads: &BTreeSet<ThreadKey>,
        is_released_file: &dyn Fn(&Path) -> bool,
    ) -> Result<Vec<RestoredObject>, JournalError> {
        let Some((journal, _)) = &mut self.journal_and_guardian else {
            return Ok(Vec::new());
        };
        let is_released = |object: &JournalObject| match object {
            JournalObject::File { path } => is_released_file(path),
            other => other
                .thread()
                .is_some_and(|thread| threads.contains(&thread)),
        };
        let entries: BTreeMap<_, _> = journal
            .entries()
            .iter()
            .filter(|(object, _)| is_released(object))
            .map(|(o, h)| (o.clone(), h.clone()))
            .collect();
        let restored_objects = restore(kernel, &entries);
        let failed_objects = failed_objects(&restored_objects);
        self.last_states.retain(|object, _| !is_released(object));
        journal.retain(|object| !is_released(object) || failed_objects.contains(&object))?;
        Ok(restored_objects)
    }

    /// Corrects threads that were created under a mask, nice value or policy set by cachemate, and therefore
    /// inherited it. Managed threads keep the mask until the next plan, with their ancestor's original in the
    /// journal. The idle policy of a waiting gang member, and everything that an unmanaged program inherited, is
    /// corrected at once.
    ///
    /// # Errors
    /// The journal cannot be written; the threads keep what they inherited, and the next window tries again.
    pub fn restore_inherited(
        &mut self,
        kernel: &dyn Kernel,
        new_threads: &[&ManagedThread],
        unmanaged_pids: &[i32],
    ) -> Result<(), JournalError> {
        self.unread_threads
            .retain(|thread| new_threads.iter().all(|task| task.thread != *thread));
        let Some((journal, _)) = &mut self.journal_and_guardian else {
            return Ok(());
        };
        let mut unmanaged_pids: BTreeSet<i32> = unmanaged_pids.iter().copied().collect();
        unmanaged_pids.append(&mut self.unread_pids);
        if new_threads.is_empty() && unmanaged_pids.is_empty() {
            return Ok(());
        }
        let entries = journal.entries().clone();
        let inheritance = Inheritance::new(&entries);
        let stat_of = |pid| none_if_missing(kernel.stat(pid));
        for task in new_threads {
            let Ok(inherited_objects) = inheritance.objects_for(kernel, task.pid, &stat_of) else {
                self.unread_threads.insert(task.thread);
                continue;
            };
            for (ancestor_object, entry) in inherited_objects {
                let object = ancestor_object.for_thread(task.pid, task.thread);
                if journal.entries().contains_key(&object)
                    || !entry.may_be_inherited_by(task.thread)
                {
                    continue;
                }
                let is_inherited = |now: &ObjectState| {
                    entry.applied_states.contains(now) && entry.original != *now
                };
                let current_state = match read_state(kernel, &object) {
                    Ok(now) if is_inherited(&now) => now,
                    Err(error) if !is_gone(&error) => {
                        self.unread_threads.insert(task.thread);
                        continue;
                    }
                    _ => continue,
                };
                let (original, follows_cpuset) = (entry.original.clone(), entry.follows_cpuset);
                let change = IntendedChange {
                    object: object.clone(),
                    current: original,
                    target: current_state,
                    follows_cpuset,
                };
                add_families(kernel, journal, std::slice::from_ref(&change));
                if journal.journal_changes(&[change]).is_err() {
                    // The disk is full: an object whose original cannot be journaled is not changed, and is read again
                    // in the next window.
                    self.unread_threads.insert(task.thread);
                    continue;
                }
                if matches!(object, JournalObject::Policy { .. }) {
                    // A thread that has exited in the meantime needs no correction.
                    let _ = write_state(kernel, &object, &entry.original);
                }
            }
        }
        for pid in unmanaged_pids {
            if !restore_unmanaged(kernel, &inheritance, pid).unwrap_or(false) {
                self.unread_pids.insert(pid);
            }
        }
        Ok(())
    }

    /// Is this a new thread whose inherited settings could not be read? It is not changed until a later window has read
    /// them.
    pub fn has_unread_settings(&self, thread: ThreadKey) -> bool {
        self.unread_threads.contains(&thread)
    }

    /// Builds the intended change of an object to `desired_state`, with the object's current state.
    ///
    /// # Errors
    /// The object's state, or what its thread inherited, cannot be read.
    pub(crate) fn build_intended_change(
        &self,
        kernel: &dyn Kernel,
        object: &JournalObject,
        desired_state: &ObjectState,
    ) -> io::Result<IntendedChange> {
        if object
            .thread()
            .is_some_and(|thread| self.has_unread_settings(thread))
        {
            return Err(io::Error::other("it cannot be read yet what it inherited"));
        }
        check_thread(kernel, object)?;
        let current_state = read_state(kernel, object)?;
        // If the cpuset cannot be read, the mask is restored by its CPU numbers.
        let follows_cpuset = spans_cpuset(kernel, object, &current_state).unwrap_or(false);
        Ok(IntendedChange {
            object: object.clone(),
            current: current_state,
            target: desired_state.clone(),
            follows_cpuset,
        })
    }

    /// Drops the journal's entries of objects that are in their original state, such as removed groups.
    pub fn forget(&mut self, restored_objects: &[JournalObject]) {
        if let Some((journal, _)) = &mut self.journal_and_guardian {
            // If the file cannot be rewritten, the old one remains: a restore then finds these objects missing, which
            // is not a failure.
            let _ = journal.retain(|object| !restored_objects.contains(object));
        }
    }

    /// Drops the journal's entries of threads that exited some windows ago: until then, a child that is not yet known
    /// may need their originals. To be called once in each window. A thread for which `is_live` returns true was just
    /// observed, and is not checked.
    ///
    /// # Errors
    /// The journal could not be rewritten; nothing is lost.
    pub fn forget_dead_threads(
        &mut self,
        kernel: &dyn Kernel,
        is_live: &dyn Fn(ThreadKey) -> bool,
    ) -> Result<(), JournalError> {
        let Some((journal, _)) = &mut self.journal_and_guardian else {
            return Ok(());
        };
        let mut ended_threads = std::mem::take(&mut self.ended_threads);
        let mut is_needed = |thread| {
            // If it is unknown whether a thread lives, its original is kept.
            if is_live(thread) || kernel.is_alive(thread).unwrap_or(true) {
                return true;
            }
            let window_count = ended_threads.remove(&thread).unwrap_or(0) + 1;
            self.ended_threads.insert(thread, window_count);
            window_count <= KEPT_WINDOWS
        };
        let mut needed_threads = BTreeMap::new();
        for thread in journal.entries().keys().filter_map(JournalObject::thread) {
            needed_threads
                .entry(thread)
                .or_insert_with(|| is_needed(thread));
        }
        journal.retain(|object| {
            object
                .thread()
                .is_none_or(|thread| needed_threads.get(&thread).copied().unwrap_or(true))
        })
    }

    /// Restores everything and dismisses the guardian. If an object could not be restored, the journal and the
    /// guardian stay, and the guardian tries again once this process has exited.
    ///
    /// # Errors
    /// The journal could not be removed. It stays with the guardian, as above.
    pub fn restore_all(
        &mut self,
        kernel: &dyn Kernel,
    ) -> Result<Vec<RestoredObject>, JournalError> {
        if self.is_fenced() {
            return self.rejoin(kernel).map(|()| Vec::new());
        }
        let Some((journal, guardian)) = self.journal_and_guardian.take() else {
            return Ok(Vec::new());
        };
        let restored_objects = restore(kernel, journal.entries());
        self.last_states.clear();
        if restored_objects
            .iter()
            .any(|restored| restored.has_failed())
        {
            self.journal_and_guardian = Some((journal, guardian));
            return Ok(restored_objects);
        }
        if let Err(error) = journal.remove() {
            self.journal_and_guardian = Some((journal, guardian));
            return Err(error);
        }
        // A guardian that has already exited cannot be dismissed, and has nothing left to do.
        let _ = guardian.dismiss();
        kernel.set_fence(None);
        Ok(restored_objects)
    }
}

/// Restores everything that an unmanaged process has inherited. Returns false if something could not be restored.
///
/// # Errors
/// It cannot be read what the process inherited.
fn restore_unmanaged(
    kernel: &dyn Kernel,
    inheritance: &Inheritance<'_>,
    pid: i32,
) -> io::Result<bool> {
    let stat_of = |pid| none_if_missing(kernel.stat(pid));
    let inherited_objects = inheritance.objects_for(kernel, pid, &stat_of)?;
    if inherited_objects.is_empty() {
        return Ok(true);
    }
    let mut is_restored = true;
    for tid in none_if_missing(kernel.threads(pid))?.unwrap_or_default() {
        let Some(stat) = stat_of(tid)? else {
            continue;
        };
        for (ancestor_object, entry) in &inherited_objects {
            let object = ancestor_object.for_thread(pid, stat.key);
            let outcome = restore_if_inherited(kernel, object, entry);
            is_restored &= !outcome.is_some_and(|restored| restored.has_failed());
        }
    }
    Ok(is_restored)
}

fn add_families(kernel: &dyn Kernel, journal: &mut Journal, changes: &[IntendedChange]) {
    let owners = changes.iter().filter_map(|change| change.object.owner());
    journal.add_families(owners.map(|(pid, _)| pid), |pid| {
        // Without it, a child that outlives its parent is found by the record of births only.
        read_family(kernel, pid).ok().flatten()
    });
}

fn failed_objects(restored_objects: &[RestoredObject]) -> Vec<&JournalObject> {
    restored_objects
        .iter()
        .filter(|restored| restored.has_failed())
        .map(|restored| &restored.object)
        .collect()
}

#[cfg(test)]
mod tests;
