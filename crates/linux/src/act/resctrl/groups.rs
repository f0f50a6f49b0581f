//! Groups of resctrl: their owners and members, and the kernel's messages when it refuses one.
//!
//! Groups of ours are named `cachemate-PID-START-N` after the process that made them, and that process holds a lock
//! (flock) on the group's folder for as long as it lives. A group with our prefix and without a lock is an orphan:
//! its owner died and its journal is lost. All others belong to other tools and are only read.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::mount::mounted;
use crate::kernel::group_dirs::remove_group;
use crate::kernel::{Kernel, ThreadKey, is_gone};

/// How every group of ours begins.
pub const PREFIX: &str = "cachemate-";
/// Folders of resctrl that are no groups.
const NO_GROUPS: [&str; 3] = ["info", "mon_groups", "mon_data"];

/// How the groups of this process begin.
pub fn own_prefix(owner: ThreadKey) -> String {
    format!("{PREFIX}{}-{}-", owner.tid, owner.start_ticks)
}

/// Names of the groups that have masks of their own, the root group aside.
///
/// # Errors
/// The mount cannot be listed.
pub fn names(kernel: &dyn Kernel, mount: &Path) -> io::Result<Vec<String>> {
    let mut names = kernel.list(mount)?;
    names.retain(|name| !NO_GROUPS.contains(&name.as_str()) && kernel.read(&mount.join(name).join("schemata")).is_ok());
    Ok(names)
}

/// Threads of a group.
///
/// # Errors
/// The group is gone or cannot be read.
pub fn members(kernel: &dyn Kernel, group: &Path) -> io::Result<Vec<i32>> {
    let text = kernel.read(&group.join("tasks"))?;
    Ok(text.lines().filter_map(|line| line.trim().parse().ok()).collect())
}

/// The group of a thread by `/proc/TID/cpu_resctrl_groups` (Linux 5.6): `/` is the root group; groups that only
/// monitor are named below theirs. `None` = not a mount of resctrl, or the kernel does not report it.
///
/// # Errors
/// The thread is gone, or its file cannot be read.
pub fn group_from_proc(kernel: &dyn Kernel, mount: &Path, tid: i32) -> io::Result<Option<PathBuf>> {
    match kernel.read(&mount.join("schemata")) {
        Ok(_) => {}
        Err(error) if is_gone(&error) => return Ok(None),
        Err(error) => return Err(error),
    }
    let text = match kernel.read(&PathBuf::from(format!("/proc/{tid}/cpu_resctrl_groups"))) {
        Ok(text) => text,
        Err(error) if is_gone(&error) => {
            kernel.stat(tid)?; // gone, or an old kernel?
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let (Some(control), monitor) = (field("res:"), field("mon:").unwrap_or_default()) else { return Ok(None) };
    let control = Path::new("/").join(control.trim_start_matches('/'));
    Ok(Some(if monitor.is_empty() { control } else { control.join("mon_groups").join(monitor) }))
}

/// The message of resctrl about the last command, if that failed.
pub fn last_status(kernel: &dyn Kernel, mount: &Path) -> Option<String> {
    let status = kernel.read(&mount.join("info/last_cmd_status")).ok()?;
    let said = status.trim();
    (!said.is_empty() && said != "ok").then(|| said.to_string())
}

/// As [`sweep`], wherever resctrl is mounted, under its lock.
pub fn sweep_mounted(kernel: &dyn Kernel) -> Vec<String> {
    let Ok(mount) = mounted(kernel) else { return Vec::new() };
    match kernel.lock_dir(&mount, Duration::from_secs(2)) {
        Ok(_lock) => sweep(kernel, &mount, "no group of this process"),
        Err(error) => vec![format!("{}: another process holds its lock: {error}", mount.display())],
    }
}

/// Removes our groups without a lock; their threads go to the root group. Requires resctrl's lock. Returns a sentence
/// for each group that was removed or could not be.
pub fn sweep(kernel: &dyn Kernel, mount: &Path, own: &str) -> Vec<String> {
    let mut reasons = Vec::new();
    let ours = |name: &String| name.starts_with(PREFIX) && !name.starts_with(own);
    for name in names(kernel, mount).unwrap_or_default().iter().filter(|name| ours(name)) {
        let group = mount.join(name);
        // Held: its owner lives, or a guardian is just about to remove it.
        let Ok(_orphan) = kernel.lock_dir(&group, Duration::ZERO) else { continue };
        reasons.push(match remove_group(kernel, &group) {
            Ok(_) => format!("{}: an orphan of an earlier run, removed", group.display()),
            Err(error) => format!("{}: an orphan of an earlier run, not removed: {error}", group.display()),
        });
    }
    reasons
}
