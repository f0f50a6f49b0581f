//! Groups of resctrl: their owners and members, and the kernel's messages when it refuses one.
//!
//! Groups of ours are named `cachemate-PID-START-N` after the process that made them, and that process holds a lock
//! (flock) on the group's directory for as long as it lives. A group with our prefix whose owner, by process id and
//! start time, has exited is an orphan: its journal is lost. The lock protects the groups of an owner in another PID
//! namespace, whose id means nothing here; but any user can hold such a lock, so an orphan that is locked is reported
//! as not removed. All other groups belong to other tools and are only read.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::masks::Schemata;
use super::mount::mount_point;
use crate::kernel::group_dirs::remove_group;
use crate::kernel::{Kernel, ThreadKey, none_if_missing};

/// Prefix of all our groups' names.
pub const GROUP_PREFIX: &str = "cachemate-";
/// Directories of resctrl that are not groups.
const NON_GROUP_DIRS: [&str; 3] = ["info", "mon_groups", "mon_data"];

/// Prefix of the names of this process's groups.
pub fn own_prefix(owner: ThreadKey) -> String {
    format!("{GROUP_PREFIX}{}-{}-", owner.tid, owner.start_ticks)
}

/// Names of the groups that have masks of their own, except the root group.
///
/// # Errors
/// The mount cannot be listed.
pub fn list_groups(kernel: &dyn Kernel, mount: &Path) -> io::Result<Vec<String>> {
    let mut names = kernel.list(mount)?;
    names.retain(|name| {
        !NON_GROUP_DIRS.contains(&name.as_str())
            && kernel.read(&mount.join(name).join("schemata")).is_ok()
    });
    Ok(names)
}

/// Directories of all groups that have masks of their own, the root group first.
///
/// # Errors
/// The mount cannot be listed.
pub fn group_dirs(kernel: &dyn Kernel, mount: &Path) -> io::Result<Vec<PathBuf>> {
    let mut dirs = vec![mount.to_path_buf()];
    dirs.extend(
        list_groups(kernel, mount)?
            .iter()
            .map(|name| mount.join(name)),
    );
    Ok(dirs)
}

/// The masks and limits of a group; `None` if they cannot be read.
pub fn read_schemata(kernel: &dyn Kernel, group: &Path) -> Option<Schemata> {
    Schemata::parse(&kernel.read(&group.join("schemata")).ok()?).ok()
}

/// Threads of a group.
///
/// # Errors
/// The group does not exist or cannot be read.
pub fn read_members(kernel: &dyn Kernel, group: &Path) -> io::Result<Vec<i32>> {
    let text = kernel.read(&group.join("tasks"))?;
    Ok(text
        .lines()
        .filter_map(|line| line.trim().parse().ok())
        .collect())
}

/// The group of a thread by `/proc/TID/cpu_resctrl_groups` (Linux 5.6): `/` is the root group; groups that only monitor
/// are named below theirs. `None` if `mount` is not a mount of resctrl, or the kernel does not report it.
///
/// # Errors
/// The thread has exited, or its file cannot be read.
pub fn group_from_proc(kernel: &dyn Kernel, mount: &Path, tid: i32) -> io::Result<Option<PathBuf>> {
    if none_if_missing(kernel.read(&mount.join("schemata")))?.is_none() {
        return Ok(None);
    }
    let groups_file = PathBuf::from(format!("/proc/{tid}/cpu_resctrl_groups"));
    let Some(text) = none_if_missing(kernel.read(&groups_file))? else {
        kernel.stat(tid)?; // distinguishes an exited thread from an old kernel
        return Ok(None);
    };
    let field_value = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .map(str::trim)
    };
    let (Some(control), monitor) = (field_value("res:"), field_value("mon:").unwrap_or_default())
    else {
        return Ok(None);
    };
    let control = Path::new("/").join(control.trim_start_matches('/'));
    Ok(Some(if monitor.is_empty() {
        control
    } else {
        control.join("mon_groups").join(monitor)
    }))
}

/// The message of resctrl about the last command, if the command failed.
pub fn last_status(kernel: &dyn Kernel, mount: &Path) -> Option<String> {
    let status = kernel.read(&mount.join("info/last_cmd_status")).ok()?;
    let message = status.trim();
    (!message.is_empty() && message != "ok").then(|| message.to_string())
}

/// A group of ours whose owner has exited.
#[derive(Debug, PartialEq, Eq)]
pub struct OrphanGroup {
    /// The group's directory.
    pub path: PathBuf,
    /// The reason why it was not removed; `None` if it was removed.
    pub error: Option<String>,
}

impl std::fmt::Display for OrphanGroup {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.path.display();
        match &self.error {
            None => write!(out, "{path}: an orphan of an earlier run, removed"),
            Some(error) => write!(
                out,
                "{path}: an orphan of an earlier run, not removed: {error}"
            ),
        }
    }
}

/// Maximum wait for a lock on an orphan: the kernel releases the lock of an owner that has just exited.
const MAX_ORPHAN_LOCK_WAIT: Duration = Duration::from_millis(200);

/// The same as [`remove_orphans`], wherever resctrl is mounted, under its lock. If the lock is unavailable, no orphan
/// is removed.
pub fn remove_orphans_if_mounted(kernel: &dyn Kernel) -> Vec<OrphanGroup> {
    let Ok(mount) = mount_point(kernel) else {
        return Vec::new();
    };
    match kernel.lock_dir(&mount, Duration::from_secs(2)) {
        Ok(_lock) => remove_orphans(kernel, &mount, NO_OWN_PREFIX),
        Err(error) => {
            let error = Some(format!("resctrl itself is locked: {error}"));
            let orphans = find_orphans(kernel, &mount, NO_OWN_PREFIX)
                .into_iter()
                .filter(|(_, has_owner)| *has_owner);
            orphans
                .map(|(path, _)| OrphanGroup {
                    path,
                    error: error.clone(),
                })
                .collect()
        }
    }
}

/// A prefix that no group has, for a process without groups of its own.
const NO_OWN_PREFIX: &str = "no group of this process";

/// Removes our groups whose owner has exited; their threads go to the root group. Requires resctrl's lock. Returns each
/// orphan.
pub fn remove_orphans(kernel: &dyn Kernel, mount: &Path, own_prefix: &str) -> Vec<OrphanGroup> {
    let mut orphans = Vec::new();
    for (path, has_owner) in find_orphans(kernel, mount, own_prefix) {
        let error = match kernel.lock_dir(&path, MAX_ORPHAN_LOCK_WAIT) {
            Ok(_lock) => remove_group(kernel, &path)
                .err()
                .map(|error| error.to_string()),
            // The name has no owner, so the holder of the lock may be the owner.
            Err(_) if !has_owner => continue,
            Err(error) => Some(format!("its owner has ended, but {error}")),
        };
        orphans.push(OrphanGroup { path, error });
    }
    orphans
}

/// Our groups except those of live owners, and whether their names contain an owner.
fn find_orphans(kernel: &dyn Kernel, mount: &Path, own_prefix: &str) -> Vec<(PathBuf, bool)> {
    let names = list_groups(kernel, mount).unwrap_or_default().into_iter();
    let candidates =
        names.filter(|name| name.starts_with(GROUP_PREFIX) && !name.starts_with(own_prefix));
    let orphan_entry = |name: String| match parse_owner(&name) {
        Some(owner) if kernel.is_alive(owner).unwrap_or(true) => None,
        owner => Some((mount.join(name), owner.is_some())),
    };
    candidates.filter_map(orphan_entry).collect()
}

/// The process that created a group, according to the group's name.
fn parse_owner(name: &str) -> Option<ThreadKey> {
    let mut numbers = name.strip_prefix(GROUP_PREFIX)?.split('-');
    let (tid, start_ticks) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    // A start time that could not be read is no evidence that the owner has exited.
    (start_ticks > 0).then_some(ThreadKey { tid, start_ticks })
}
