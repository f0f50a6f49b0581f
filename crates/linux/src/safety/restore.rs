//! Restoration of a host: the one procedure, used at exit, by the guardian, by the next start and by `cachemate
//! restore`.
//!
//! Problem: threads may have exited or their ids been reused; threads and children created in the meantime have
//! inherited our settings; other processes may have changed objects since, and their changes take precedence over the
//! recorded originals. Method: thaw first, so that no task stays frozen whatever fails later, and restore the CPUs of
//! groups, because a thread's affinity cannot reach beyond them; then affinity and nice values, memberships, files, and
//! last our own directories, deepest first, with their members moved to the parent. An object is restored only if it
//! still has the state that we set. Threads that are in no journal but belong to a journaled process, or are its heirs
//! ([`crate::safety::inheritance`]), and carry a mask of ours get the original of their ancestor. Properties:
//! idempotent; never stops at a failure; reports the outcome for every object.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::act::cpusets::effective_cpus;
use crate::act::resctrl::mount_point;
use crate::kernel::group_dirs::remove_group;
use crate::kernel::{Kernel, ThreadKey, ThreadStat, is_gone, none_if_missing};
use crate::safety::inheritance::Inheritance;
use crate::safety::journal::{JournalEntry, JournalObject, ObjectState};
use crate::safety::object_state::{
    ObjectAccess, describe_failure, is_cpuset, partition_kind, read_state, write_cpuset,
    write_state,
};

/// Maximum time that a restore waits for resctrl's lock.
const MAX_RESCTRL_WAIT: Duration = Duration::from_secs(2);

/// Outcome for one object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RestoreOutcome {
    /// It had the state that we set, and has its original state again.
    Restored,
    /// It already had its original state.
    Unchanged,
    /// The thread or file no longer exists.
    Gone,
    /// Another process has changed it since, so it is left unchanged; contains its current state.
    ChangedByOther(String),
    /// It could not be read or set, for the contained reason. Another attempt may succeed.
    Failed(String),
}

/// An object with the outcome of its restoration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RestoredObject {
    /// The object that the journal names, or one that inherited from it.
    pub object: JournalObject,
    /// Outcome for this object.
    pub outcome: RestoreOutcome,
}

impl RestoredObject {
    /// Could the object not be restored, although another attempt may succeed?
    pub fn has_failed(&self) -> bool {
        matches!(self.outcome, RestoreOutcome::Failed(_))
    }
}

/// Restores everything. Objects that failed may be retried; all others are finished.
pub fn restore(
    kernel: &dyn Kernel,
    entries: &BTreeMap<JournalObject, JournalEntry>,
) -> Vec<RestoredObject> {
    let mut restored_objects = Vec::new();
    // If another process holds resctrl's lock for longer than this, the host is restored without the lock.
    let mount = mount_point(kernel)
        .ok()
        .filter(|mount| entries.keys().any(|object| is_in_resctrl(object, mount)));
    let _lock = mount.map(|mount| kernel.lock_dir(&mount, MAX_RESCTRL_WAIT));
    for stage in 0..6 {
        let mut objects: Vec<_> = entries
            .iter()
            .filter(|(object, _)| restore_stage(object) == stage)
            .collect();
        if stage == 5 {
            objects.reverse(); // deepest directories first: a parent's path sorts before its children's
        }
        for (object, entry) in objects {
            restored_objects.push(RestoredObject {
                object: object.clone(),
                outcome: restore_object(kernel, object, entry),
            });
        }
        if stage == 2 {
            restored_objects.extend(restore_inherited_until_stable(kernel, entries));
        }
    }
    restored_objects
}

/// A thread that inherited a mask may create another one before it is restored, and a thread that is being created
/// already has its mask but is not yet visible. Passes are therefore repeated until two of them, a while apart, find
/// none.
fn restore_inherited_until_stable(
    kernel: &dyn Kernel,
    entries: &BTreeMap<JournalObject, JournalEntry>,
) -> Vec<RestoredObject> {
    const MAX_PASSES: u32 = 32;
    const PASS_PAUSE: Duration = Duration::from_millis(20);
    let mut restored_objects = Vec::new();
    let mut clean_passes = 0;
    for _ in 0..MAX_PASSES {
        let pass_outcomes = restore_inherited(kernel, entries);
        // Every pass retries the failed objects, so only the failures of the last pass are reported.
        restored_objects.retain(|inheritor: &RestoredObject| !inheritor.has_failed());
        let is_clean = pass_outcomes
            .iter()
            .all(|inheritor| inheritor.outcome != RestoreOutcome::Restored);
        restored_objects.extend(pass_outcomes);
        clean_passes = if is_clean { clean_passes + 1 } else { 0 };
        if clean_passes == 2 || entries.is_empty() {
            break;
        }
        if is_clean {
            std::thread::sleep(PASS_PAUSE);
        }
    }
    restored_objects
}

/// The stage in which an object is restored. Masks of our groups are removed with the group and have no stage of their
/// own.
fn restore_stage(object: &JournalObject) -> u32 {
    match object {
        JournalObject::Schemata { .. } => u32::MAX,
        JournalObject::File { path } if is_freezer(path) => 0,
        JournalObject::File { path } if is_cpuset(path) => 1,
        JournalObject::Affinity { .. }
        | JournalObject::Nice { .. }
        | JournalObject::Policy { .. } => 2,
        JournalObject::Membership { .. } => 3,
        JournalObject::File { .. } => 4,
        JournalObject::Directory { .. } => 5,
    }
}

fn is_freezer(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name == "freezer.state" || name == "cgroup.freeze")
}

/// Restores one object. If a thread is exiting or being moved, calls report "no such process" although `/proc` still
/// lists it. Its existence is checked again, and a thread that still exists counts as not restored.
fn restore_object(
    kernel: &dyn Kernel,
    object: &JournalObject,
    entry: &JournalEntry,
) -> RestoreOutcome {
    const MAX_TRIES: u32 = 5;
    const RETRY_PAUSE: Duration = Duration::from_millis(4);
    let mut try_count = 0;
    loop {
        try_count += 1;
        match restore_one(kernel, object, entry) {
            Ok(outcome) => return outcome,
            Err(error) if is_gone(&error) && !may_still_exist(kernel, object, &error) => {
                return RestoreOutcome::Gone;
            }
            Err(error) if is_gone(&error) && try_count < MAX_TRIES => {
                std::thread::sleep(RETRY_PAUSE)
            }
            Err(error) => {
                let access = ObjectAccess::Write;
                return RestoreOutcome::Failed(describe_failure(kernel, object, access, &error));
            }
        }
    }
}

/// Did the kernel report a thread as gone that exists, or whose existence is unknown? (A group or file that is
/// missing is gone whether or not threads live.)
fn may_still_exist(kernel: &dyn Kernel, object: &JournalObject, error: &io::Error) -> bool {
    let may_be_alive = |thread| kernel.is_alive(thread).unwrap_or(true);
    error.raw_os_error() == Some(libc::ESRCH) && object.thread().is_none_or(may_be_alive)
}

fn restore_one(
    kernel: &dyn Kernel,
    object: &JournalObject,
    entry: &JournalEntry,
) -> io::Result<RestoreOutcome> {
    if let Some(thread) = object.thread()
        && !kernel.is_alive(thread)?
    {
        return Ok(RestoreOutcome::Gone);
    }
    if let JournalObject::Directory { path } = object {
        let has_existed = remove_group(kernel, path)?;
        return Ok(if has_existed {
            RestoreOutcome::Restored
        } else {
            RestoreOutcome::Unchanged
        });
    }
    if let JournalObject::File { path } = object
        && is_cpuset(path)
        && let Some(kind) = partition_kind(kernel, path)?
    {
        return Ok(RestoreOutcome::ChangedByOther(format!(
            "a cpuset partition ({kind})"
        )));
    }
    let current_state = read_state(kernel, object)?;
    let has_original_state = current_state == entry.original
        || entry.follows_cpuset && spans_cpuset(kernel, object, &current_state)?;
    if has_original_state && !entry.follows_cpuset {
        return Ok(RestoreOutcome::Unchanged);
    }
    if !has_original_state && !is_our_state(kernel, object, &current_state, &entry.applied_states)?
    {
        return Ok(RestoreOutcome::ChangedByOther(format!("{current_state:?}")));
    }
    write_original(kernel, object, entry)?;
    Ok(if has_original_state {
        RestoreOutcome::Unchanged
    } else {
        RestoreOutcome::Restored
    })
}

/// Is the object's state a mask as wide as the thread's cpuset?
///
/// # Errors
/// The cpuset exists and cannot be read.
pub(crate) fn spans_cpuset(
    kernel: &dyn Kernel,
    object: &JournalObject,
    state: &ObjectState,
) -> io::Result<bool> {
    let (JournalObject::Affinity { thread, .. }, ObjectState::Cpus(now)) = (object, state) else {
        return Ok(false);
    };
    Ok(effective_cpus(kernel, thread.tid)?.as_ref() == Some(now))
}

/// Does the object have a state that we set? The kernel clips a mask to the thread's cpuset: our mask within the cpuset
/// is ours, and any other subset was set by another process.
fn is_our_state(
    kernel: &dyn Kernel,
    object: &JournalObject,
    current_state: &ObjectState,
    applied_states: &[ObjectState],
) -> io::Result<bool> {
    let equals_current = |state: &ObjectState| match (current_state, state) {
        (ObjectState::Text(now), ObjectState::Text(ours)) => now.trim() == ours.trim(),
        _ => current_state == state,
    };
    if applied_states.iter().any(equals_current) {
        return Ok(true);
    }
    let (JournalObject::Affinity { thread, .. }, ObjectState::Cpus(now)) = (object, current_state)
    else {
        return Ok(false);
    };
    let Some(cpuset) = effective_cpus(kernel, thread.tid)? else {
        return Ok(false);
    };
    let is_clipped = |state: &ObjectState| matches!(state, ObjectState::Cpus(our_cpus) if our_cpus.intersection(&cpuset) == *now);
    Ok(applied_states.iter().any(is_clipped))
}

/// Restores the original. A mask that was as wide as the thread's cpuset is set to all CPUs, and the kernel clips it to
/// the cpuset, because a mask restored by its CPU numbers would not grow with the cpuset.
///
/// # Errors
/// The errors of [`write_state`].
pub(crate) fn write_original(
    kernel: &dyn Kernel,
    object: &JournalObject,
    entry: &JournalEntry,
) -> io::Result<()> {
    match object {
        JournalObject::Affinity { thread, .. } if entry.follows_cpuset => {
            kernel.set_affinity(thread.tid, &(0..MAX_CPUS).collect())
        }
        // If the owner does not answer, the host is restored all the same.
        JournalObject::File { path } if is_cpuset(path) => match &entry.original {
            ObjectState::Text(text)
                if !matches!(kernel.set_cpus_by_owner(path, text), Ok(true)) =>
            {
                write_cpuset(kernel, path, text)
            }
            _ => Ok(()),
        },
        _ => write_state(kernel, object, &entry.original),
    }
}

/// The largest number of CPUs that Linux can be built for.
const MAX_CPUS: u32 = 8192;

fn is_in_resctrl(object: &JournalObject, mount: &Path) -> bool {
    match object {
        JournalObject::Schemata { path } | JournalObject::Directory { path } => {
            path.starts_with(mount)
        }
        JournalObject::Membership { hierarchy, .. } => hierarchy == mount,
        _ => false,
    }
}

/// The outcome for an object whose inheriting threads could not be listed.
fn inheritance_failure(ancestor: &JournalObject, error: &io::Error) -> RestoredObject {
    let outcome = RestoreOutcome::Failed(format!(
        "threads and children that may have inherited it cannot be seen: {error}"
    ));
    RestoredObject {
        object: ancestor.clone(),
        outcome,
    }
}

/// Restores later threads of a journaled process or its descendants that inherited a mask, nice value or policy of
/// ours.
pub(crate) fn restore_inherited(
    kernel: &dyn Kernel,
    entries: &BTreeMap<JournalObject, JournalEntry>,
) -> Vec<RestoredObject> {
    let mut restored_objects = Vec::new();
    let inheritance = Inheritance::new(entries);
    let Some(first_object) = inheritance.first_object() else {
        return restored_objects;
    };
    let processes = match read_processes(kernel) {
        Ok(processes) => processes,
        Err(error) => {
            restored_objects.push(inheritance_failure(first_object, &error));
            return restored_objects;
        }
    };
    let stat_of = |pid: i32| Ok(processes.get(&pid).cloned());
    for &pid in processes.keys() {
        // From the nearest ancestor on, because an ancestor may have passed on properties that are not journaled for
        // the processes in between.
        let ancestor_objects = match inheritance.objects_for(kernel, pid, &stat_of) {
            Ok(objects) => objects,
            Err(error) => {
                restored_objects.push(inheritance_failure(first_object, &error));
                continue;
            }
        };
        let Some((nearest_object, _)) = ancestor_objects.first() else {
            continue;
        };
        match list_threads(kernel, pid) {
            Ok(threads) => {
                for thread in threads {
                    for (ancestor, ancestor_entry) in &ancestor_objects {
                        let object = ancestor.for_thread(pid, thread);
                        if !entries.contains_key(&object) {
                            restored_objects.extend(restore_if_inherited(
                                kernel,
                                object,
                                ancestor_entry,
                            ));
                        }
                    }
                }
            }
            Err(error) => restored_objects.push(inheritance_failure(nearest_object, &error)),
        }
    }
    restored_objects
}

/// All processes. Those that are hidden from a user (`hidepid=1` of proc(5)) belong to others, and the user cannot have
/// changed them.
fn read_processes(kernel: &dyn Kernel) -> io::Result<BTreeMap<i32, ThreadStat>> {
    let is_hidden = |error: &io::Error| {
        error.raw_os_error() == Some(libc::EPERM) && !rustix::process::geteuid().is_root()
    };
    let mut processes = BTreeMap::new();
    for pid in kernel.processes()? {
        match none_if_missing(kernel.stat(pid)) {
            Ok(stat) => processes.extend(stat.map(|stat| (pid, stat))),
            Err(error) if is_hidden(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(processes)
}

/// The existing threads of a process.
fn list_threads(kernel: &dyn Kernel, pid: i32) -> io::Result<Vec<ThreadKey>> {
    let mut threads = Vec::new();
    for tid in none_if_missing(kernel.threads(pid))?.unwrap_or_default() {
        threads.extend(none_if_missing(kernel.stat(tid))?.map(|stat| stat.key));
    }
    Ok(threads)
}

/// Restores a thread that inherited a property, but only if it was created since and has exactly a state that we set; a
/// state of its own choice is kept.
pub(crate) fn restore_if_inherited(
    kernel: &dyn Kernel,
    object: JournalObject,
    entry: &JournalEntry,
) -> Option<RestoredObject> {
    object
        .thread()
        .filter(|thread| entry.may_be_inherited_by(*thread))?;
    let outcome = match read_state(kernel, &object) {
        Ok(now) if now == entry.original || !entry.applied_states.contains(&now) => return None,
        Ok(_) => match write_original(kernel, &object, entry) {
            Ok(()) => RestoreOutcome::Restored,
            Err(error) if is_gone(&error) && !may_still_exist(kernel, &object, &error) => {
                RestoreOutcome::Gone
            }
            Err(error) => RestoreOutcome::Failed(error.to_string()),
        },
        Err(error) if is_gone(&error) => return None,
        Err(error) => RestoreOutcome::Failed(error.to_string()),
    };
    Some(RestoredObject { object, outcome })
}

#[cfg(test)]
mod tests;
