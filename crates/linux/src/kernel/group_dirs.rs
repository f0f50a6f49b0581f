//! Groups of threads as directories with similar files: cgroup v1, cgroup v2 and resctrl.

use std::io;
use std::path::{Path, PathBuf};

use super::{Kernel, is_gone, none_if_missing};

/// The control file in every cpuset.
pub const CPUSET_FILE: &str = "cpuset.cpus";

/// The file that takes thread ids: `tasks` (cgroup v1, resctrl), `cgroup.threads` or `cgroup.procs` (v2).
pub(crate) fn find_member_file(kernel: &dyn Kernel, group: &Path) -> io::Result<PathBuf> {
    let tasks = group.join("tasks");
    if none_if_missing(kernel.read(&tasks))?.is_some() {
        return Ok(tasks);
    }
    let threads = group.join("cgroup.threads");
    match none_if_missing(kernel.read(&threads)) {
        Ok(Some(_)) => Ok(threads),
        Ok(None) => Ok(group.join("cgroup.procs")),
        // cgroup.threads cannot be read in a domain group, where whole processes are moved instead.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            Ok(group.join("cgroup.procs"))
        }
        Err(error) => Err(error),
    }
}

/// Members of a group; none if it was removed meanwhile.
pub(crate) fn read_members(kernel: &dyn Kernel, group: &Path) -> io::Result<Vec<i32>> {
    let text = match kernel.read(&find_member_file(kernel, group)?) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    Ok(text
        .lines()
        .filter_map(|line| line.trim().parse().ok())
        .collect())
}

/// Threads in a group and in all below it.
///
/// # Errors
/// An existing group cannot be read.
pub(crate) fn list_all_members(kernel: &dyn Kernel, group: &Path) -> io::Result<Vec<i32>> {
    let (mut pending_groups, mut member_ids) = (vec![group.to_path_buf()], Vec::new());
    while let Some(group) = pending_groups.pop() {
        member_ids.extend(read_members(kernel, &group)?);
        pending_groups.extend(child_groups(kernel, &group)?);
    }
    Ok(member_ids)
}

/// Child groups of a group; none if it was removed meanwhile.
pub(crate) fn child_groups(kernel: &dyn Kernel, group: &Path) -> io::Result<Vec<PathBuf>> {
    let names = none_if_missing(kernel.list(group))?.unwrap_or_default();
    let mut groups = Vec::new();
    for path in names.into_iter().map(|name| group.join(name)) {
        match none_if_missing(kernel.list(&path)) {
            Ok(Some(_)) => groups.push(path),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
            Err(error) => return Err(error),
        }
    }
    Ok(groups)
}

/// Moves the members of a group of ours to its parent and removes the group, which may contain children of managed
/// programs. Returns whether it existed.
pub(crate) fn remove_group(kernel: &dyn Kernel, path: &Path) -> io::Result<bool> {
    if let Err(error) = kernel.list(path) {
        return if error.kind() == io::ErrorKind::NotFound {
            Ok(false)
        } else {
            Err(error)
        };
    }
    let parent = path.parent().unwrap_or(Path::new("/"));
    // Members may fork while they are moved, so several rounds are needed.
    for _ in 0..16 {
        let remaining_members = read_members(kernel, path)?;
        if remaining_members.is_empty() {
            break;
        }
        for tid in remaining_members {
            match kernel.write(&find_member_file(kernel, parent)?, &tid.to_string()) {
                Err(error) if !is_gone(&error) => return Err(error),
                _ => {}
            }
        }
    }
    match kernel.remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        other => other.map(|()| true),
    }
}
