//! Current state of the journal's objects: reading, writing, and error messages.

use std::io;
use std::path::{Path, PathBuf};

use crate::act::resctrl::{Schemata, groups};
use crate::kernel::group_dirs::{
    CPUSET_FILE, child_groups, find_member_file, read_members, remove_group,
};
use crate::kernel::refused_calls::KernelCall;
use crate::kernel::systemd_units::has_latent_cpuset;
use crate::kernel::{Kernel, ThreadKey, is_gone, none_if_missing};
use crate::safety::journal::{JournalObject, ObjectState};

/// Reads the current state of an object.
///
/// # Errors
/// The kernel's error; `NotFound` or `ESRCH` if the object no longer exists.
pub fn read_state(kernel: &dyn Kernel, object: &JournalObject) -> io::Result<ObjectState> {
    Ok(match object {
        JournalObject::Affinity { thread, .. } => ObjectState::Cpus(kernel.affinity(thread.tid)?),
        JournalObject::Nice { thread, .. } => ObjectState::Nice(kernel.stat(thread.tid)?.nice),
        JournalObject::Policy { thread, .. } => kernel.scheduling(thread.tid)?.into(),
        JournalObject::Membership {
            hierarchy, thread, ..
        } => ObjectState::Group(find_group(kernel, hierarchy, *thread)?),
        JournalObject::File { path } => match kernel.read(path) {
            Err(error) if is_gone(&error) && is_cpuset(path) && has_latent_cpuset(kernel, path) => {
                ObjectState::Text(String::new())
            }
            text => ObjectState::Text(text?.trim_end().to_string()),
        },
        JournalObject::Schemata { path } => {
            let parse_result = Schemata::parse(&kernel.read(path)?);
            let invalid_data = |problem| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{}: {problem}", path.display()),
                )
            };
            ObjectState::Text(parse_result.map_err(invalid_data)?.to_string())
        }
        JournalObject::Directory { path } => match kernel.list(path) {
            Ok(_) => ObjectState::Present,
            Err(error) if error.kind() == io::ErrorKind::NotFound => ObjectState::Absent,
            Err(error) => return Err(error),
        },
    })
}

/// Sets the state of an object.
///
/// # Errors
/// The kernel's error; `InvalidInput` if the state is not of the object's kind.
pub fn write_state(
    kernel: &dyn Kernel,
    object: &JournalObject,
    state: &ObjectState,
) -> io::Result<()> {
    match (object, state) {
        (JournalObject::Affinity { thread, .. }, ObjectState::Cpus(cpus)) => {
            kernel.set_affinity(thread.tid, cpus)
        }
        (JournalObject::Nice { thread, .. }, ObjectState::Nice(nice)) => {
            kernel.set_nice(thread.tid, *nice)
        }
        (JournalObject::Policy { thread, .. }, ObjectState::Policy(policy)) => {
            kernel.set_policy(thread.tid, *policy)
        }
        (JournalObject::Policy { thread, .. }, ObjectState::Scheduling(params)) => {
            kernel.set_scheduling(thread.tid, params)
        }
        (
            JournalObject::Membership {
                hierarchy, thread, ..
            },
            ObjectState::Group(group),
        ) => {
            let group = hierarchy.join(group.strip_prefix("/").unwrap_or(group));
            kernel.write(&find_member_file(kernel, &group)?, &thread.tid.to_string())
        }
        (JournalObject::File { path }, ObjectState::Text(text)) if is_cpuset(path) => {
            if kernel.set_cpus_by_owner(path, text)? {
                Ok(())
            } else {
                write_cpuset(kernel, path, text)
            }
        }
        (
            JournalObject::File { path } | JournalObject::Schemata { path },
            ObjectState::Text(text),
        ) => kernel.write(path, &format!("{text}\n")),
        (JournalObject::Directory { path }, ObjectState::Present) => kernel.make_dir(path),
        (JournalObject::Directory { path }, ObjectState::Absent) => {
            remove_group(kernel, path).map(drop)
        }
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{object:?} cannot be {state:?}"),
        )),
    }
}

/// Sets the CPUs of a group through its file, whether or not the group has an owner.
pub(crate) fn write_cpuset(kernel: &dyn Kernel, path: &Path, text: &str) -> io::Result<()> {
    if text.is_empty() {
        restore_empty_cpuset(kernel, path)
    } else {
        kernel.write(path, &format!("{text}\n"))
    }
}

/// Restores an empty cpuset (cgroup v2), which has its parent's CPUs. The kernel refuses to empty a cpuset with
/// processes (`ENOSPC`); it then gets the parent's CPUs explicitly, which has the same effect on its processes.
fn restore_empty_cpuset(kernel: &dyn Kernel, path: &Path) -> io::Result<()> {
    let write_error = match kernel.write(path, "\n") {
        Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => error,
        other => return other,
    };
    let parent = path.parent().and_then(Path::parent).ok_or(write_error)?;
    let text = kernel.read(&parent.join("cpuset.cpus.effective"))?;
    kernel.write(path, &format!("{}\n", text.trim()))
}

/// Group of a thread in a hierarchy. Resctrl reports it for each thread; otherwise all groups are searched, which also
/// works for cgroup v1, v2, resctrl of old kernels, and under an injected root.
fn find_group(kernel: &dyn Kernel, hierarchy: &Path, thread: ThreadKey) -> io::Result<PathBuf> {
    if let Some(group) = groups::group_from_proc(kernel, hierarchy, thread.tid)? {
        return Ok(group);
    }
    let mut pending_groups = vec![hierarchy.to_path_buf()];
    while let Some(group) = pending_groups.pop() {
        if read_members(kernel, &group)?.contains(&thread.tid) {
            return Ok(Path::new("/").join(group.strip_prefix(hierarchy).unwrap_or(&group)));
        }
        pending_groups.extend(child_groups(kernel, &group)?);
    }
    // The thread has exited or was moved during the search; the caller determines which.
    Err(io::Error::from_raw_os_error(libc::ESRCH))
}

/// Checks that the id of the object's thread has not been reused.
///
/// # Errors
/// The thread has exited (`ESRCH`), or cannot be queried.
pub(crate) fn check_thread(kernel: &dyn Kernel, object: &JournalObject) -> io::Result<()> {
    match object.thread() {
        Some(thread) if !kernel.is_alive(thread)? => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        _ => Ok(()),
    }
}

/// Whether a call read an object or changed it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ObjectAccess {
    Read,
    Write,
}

/// The call that reads or changes an object, and its subject.
fn call_of(object: &JournalObject, access: ObjectAccess) -> (KernelCall, String) {
    let is_read = access == ObjectAccess::Read;
    let choose = |read, write| if is_read { read } else { write };
    match object {
        JournalObject::Affinity { thread, .. } => (
            choose(KernelCall::GetAffinity, KernelCall::SetAffinity),
            format!("of thread {}", thread.tid),
        ),
        JournalObject::Nice { thread, .. } if is_read => {
            (KernelCall::ReadFile, format!("/proc/{}/stat", thread.tid))
        }
        JournalObject::Nice { thread, .. } => {
            (KernelCall::SetNice, format!("of thread {}", thread.tid))
        }
        JournalObject::Policy { thread, .. } => (
            choose(KernelCall::GetScheduler, KernelCall::SetScheduler),
            format!("of thread {}", thread.tid),
        ),
        JournalObject::Membership {
            hierarchy, thread, ..
        } => (
            choose(KernelCall::ReadFile, KernelCall::JoinGroup),
            format!(
                "of thread {}'s group in {}",
                thread.tid,
                hierarchy.display()
            ),
        ),
        JournalObject::File { path } => {
            let write = match is_cpuset(path) {
                true => KernelCall::WriteCpuset,
                false => KernelCall::WriteFile,
            };
            (
                choose(KernelCall::ReadFile, write),
                path.display().to_string(),
            )
        }
        JournalObject::Schemata { path } => (
            choose(KernelCall::ReadFile, KernelCall::WriteSchemata),
            path.display().to_string(),
        ),
        JournalObject::Directory { path } => (
            choose(KernelCall::ReadFile, KernelCall::MakeClass),
            path.display().to_string(),
        ),
    }
}

/// The error as a sentence: the call and its remedy, and what limits the object, which is the CPUs of a cpuset's parent
/// or resctrl's own message.
pub(crate) fn describe_failure(
    kernel: &dyn Kernel,
    object: &JournalObject,
    access: ObjectAccess,
    error: &io::Error,
) -> String {
    let (call, subject) = call_of(object, access);
    let sentence = call.describe(&subject, error);
    if let JournalObject::File { path } = object
        && is_cpuset(path)
        && let Some(parent) = path.parent().and_then(Path::parent)
        && let Ok(cpus) = kernel.read(&parent.join(CPUSET_FILE))
    {
        return format!(
            "{sentence} (the group's parent has CPUs '{}', and no group can have others)",
            cpus.trim()
        );
    }

    let resctrl_mount = match object {
        JournalObject::Schemata { path } => path.parent().and_then(Path::parent),
        JournalObject::Directory { path } => path.parent(),
        JournalObject::Membership { hierarchy, .. } => Some(hierarchy.as_path()),
        _ => None,
    };
    match resctrl_mount.and_then(|mount| groups::last_status(kernel, mount)) {
        Some(message) => format!("{sentence}; resctrl says: {message}"),
        None => sentence,
    }
}

/// The kind of partition that a group of cgroup v2 is (`root`, `isolated`, or an invalid one); `None` for an ordinary
/// group.
pub(crate) fn partition_kind(kernel: &dyn Kernel, cpus_file: &Path) -> io::Result<Option<String>> {
    let file = cpus_file.with_file_name("cpuset.cpus.partition");
    let text = none_if_missing(kernel.read(&file))
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", file.display())))?;
    let kind = text.unwrap_or_default().trim().to_string();
    Ok(Some(kind).filter(|kind| !kind.is_empty() && kind != "member"))
}

pub(crate) fn is_cpuset(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == CPUSET_FILE)
}
