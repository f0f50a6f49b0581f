//! The present state of what a journal names: read, written, and what went wrong in words.

use std::io;
use std::path::{Path, PathBuf};

use crate::act::resctrl::{Schemata, groups};
use crate::kernel::group_folders::{CPUSET_FILE, child_groups, member_file, members, remove_group};
use crate::kernel::{Kernel, ThreadKey};
use crate::safety::journal::{Object, State};

/// Reads the present state of an object.
///
/// # Errors
/// As the kernel says; `NotFound` or `ESRCH` where it is gone.
pub fn read_state(kernel: &dyn Kernel, object: &Object) -> io::Result<State> {
    Ok(match object {
        Object::Affinity { thread, .. } => State::Cpus(kernel.affinity(thread.tid)?),
        Object::Nice { thread, .. } => State::Nice(kernel.stat(thread.tid)?.nice),
        Object::Policy { thread, .. } => kernel.scheduling(thread.tid)?.into(),
        Object::Membership { hierarchy, thread, .. } => State::Group(group_of(kernel, hierarchy, *thread)?),
        Object::File { path } => State::Text(kernel.read(path)?.trim_end().to_string()),
        Object::Schemata { path } => {
            let masks = Schemata::parse(&kernel.read(path)?);
            let bad = |what| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()));
            State::Text(masks.map_err(bad)?.to_string())
        }
        Object::Directory { path } => match kernel.list(path) {
            Ok(_) => State::Present,
            Err(error) if error.kind() == io::ErrorKind::NotFound => State::Absent,
            Err(error) => return Err(error),
        },
    })
}

/// Puts an object into a state.
///
/// # Errors
/// As the kernel says; `InvalidInput` if the state is not of the object's kind.
pub fn write_state(kernel: &dyn Kernel, object: &Object, state: &State) -> io::Result<()> {
    match (object, state) {
        (Object::Affinity { thread, .. }, State::Cpus(cpus)) => kernel.set_affinity(thread.tid, cpus),
        (Object::Nice { thread, .. }, State::Nice(nice)) => kernel.set_nice(thread.tid, *nice),
        (Object::Policy { thread, .. }, State::Policy(policy)) => kernel.set_policy(thread.tid, *policy),
        (Object::Policy { thread, .. }, State::Scheduling(all)) => kernel.set_scheduling(thread.tid, all),
        (Object::Membership { hierarchy, thread, .. }, State::Group(group)) => {
            let group = hierarchy.join(group.strip_prefix("/").unwrap_or(group));
            kernel.write(&member_file(kernel, &group)?, &thread.tid.to_string())
        }
        (Object::File { path }, State::Text(text)) if is_cpuset(path) && text.is_empty() => as_parent(kernel, path),
        (Object::File { path } | Object::Schemata { path }, State::Text(text)) => {
            kernel.write(path, &format!("{text}\n"))
        }
        (Object::Directory { path }, State::Present) => kernel.make_dir(path),
        (Object::Directory { path }, State::Absent) => remove_group(kernel, path).map(drop),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{object:?} cannot be {state:?}"))),
    }
}

/// An empty cpuset (cgroup v2) has what its parent has. The kernel refuses to empty one in which somebody is (`ENOSPC`): then it
/// gets the parent's CPUs by name, which is the same to everybody in it.
fn as_parent(kernel: &dyn Kernel, path: &Path) -> io::Result<()> {
    let refused = match kernel.write(path, "\n") {
        Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => error,
        other => return other,
    };
    let parent = path.parent().and_then(Path::parent).ok_or(refused)?;
    let text = kernel.read(&parent.join("cpuset.cpus.effective"))?;
    kernel.write(path, &format!("{}\n", text.trim()))
}

/// Group of a thread in a hierarchy: resctrl tells it of each thread; otherwise found by looking through the groups, the
/// one way that serves cgroup v1, v2 and old kernels' resctrl alike, and under an injected root.
fn group_of(kernel: &dyn Kernel, hierarchy: &Path, thread: ThreadKey) -> io::Result<PathBuf> {
    if let Some(group) = groups::told_of_thread(kernel, hierarchy, thread.tid)? {
        return Ok(group);
    }
    let mut left = vec![hierarchy.to_path_buf()];
    while let Some(group) = left.pop() {
        if members(kernel, &group)?.contains(&thread.tid) {
            return Ok(Path::new("/").join(group.strip_prefix(hierarchy).unwrap_or(&group)));
        }
        left.extend(child_groups(kernel, &group)?);
    }
    // It has ended, or was moved while we looked: whoever asks finds out which.
    Err(io::Error::from_raw_os_error(libc::ESRCH))
}

/// Is the object's thread still the same one? Numbers of threads are reused.
///
/// # Errors
/// It is gone (`ESRCH`), or cannot be asked.
pub(crate) fn check_thread(kernel: &dyn Kernel, object: &Object) -> io::Result<()> {
    match object.thread() {
        Some(thread) if !kernel.alive(thread)? => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        _ => Ok(()),
    }
}

/// What went wrong, with resctrl's own words where it has any.
pub(crate) fn in_words(kernel: &dyn Kernel, object: &Object, error: &io::Error) -> String {
    let near = match object {
        Object::Schemata { path } => path.parent().and_then(Path::parent),
        Object::Directory { path } => path.parent(),
        Object::Membership { hierarchy, .. } => Some(hierarchy.as_path()),
        _ => None,
    };
    match near.and_then(|mount| groups::last_status(kernel, mount)) {
        Some(said) => format!("{error}; resctrl says: {said}"),
        None => error.to_string(),
    }
}

pub(crate) fn is_cpuset(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == CPUSET_FILE)
}
