//! A control group of the guardian's own.
//!
//! Problem: ending the daemon's control group (`cgroup.kill`, an out-of-memory kill of the whole group) also ends a
//! guardian in it, and then no process is left to restore the host. Method: if cgroup v2 is writable, the guardian
//! creates a group beside the daemon's and moves there before it reports ready; at its end it returns to the daemon's
//! group, or to the root if that no longer exists, and removes its own. Properties: a guardian that cannot be isolated
//! stays in the daemon's group and reports it; its group has no limits and no controllers of its own.

use std::io;
use std::path::{Path, PathBuf};

use crate::kernel::Kernel;
use crate::kernel::text_files::{GroupHierarchy, group_hierarchies};

/// Prefix of these groups' names.
pub const PREFIX: &str = "cachemate-guardian-";

/// The guardian's group, until the guardian leaves it.
#[derive(Debug)]
pub struct GuardianCgroup {
    root: PathBuf,
    original_group: PathBuf,
    group: PathBuf,
}

/// Location of a process in the hierarchy of version 2: its mount, and the group below it.
fn locate_cgroup(kernel: &dyn Kernel, pid: &str) -> io::Result<(PathBuf, PathBuf)> {
    let not_found = |subject: &str| io::Error::new(io::ErrorKind::NotFound, subject.to_string());
    let mut hierarchies = group_hierarchies(kernel)?.into_iter();
    let mount = hierarchies
        .find(GroupHierarchy::is_v2)
        .ok_or_else(|| not_found("no cgroup v2 is mounted"))?
        .mount;
    let groups = kernel.read(&Path::new("/proc").join(pid).join("cgroup"))?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let group = group.ok_or_else(|| not_found("no group of version 2"))?;
    if group.split('/').any(|component| component == "..") {
        return Err(not_found("its group lies beyond what is mounted"));
    }
    Ok((mount.clone(), mount.join(group)))
}

impl GuardianCgroup {
    /// Moves this process out of its group, into one beside it. The root group cannot be killed as a whole, so it
    /// counts as isolated, too.
    ///
    /// # Errors
    /// There is no cgroup v2, or no right to change it; this process stays where it was.
    pub fn enter(kernel: &dyn Kernel) -> io::Result<Option<Self>> {
        let (root, original_group) = locate_cgroup(kernel, "self")?;
        if original_group
            .strip_prefix(&root)
            .is_ok_and(|relative_path| relative_path.as_os_str().is_empty())
        {
            return Ok(None);
        }
        let sibling_parent = original_group.parent().unwrap_or(&root);
        // Groups left by killed guardians. A live guardian may not have moved in yet.
        let is_dead = |name: &String| {
            let pid = name
                .strip_prefix(PREFIX)
                .and_then(|pid| pid.parse::<u32>().ok());
            pid.is_some_and(|pid| {
                kernel
                    .read(Path::new(&format!("/proc/{pid}/stat")))
                    .is_err()
            })
        };
        let dead_groups = kernel
            .list(sibling_parent)
            .unwrap_or_default()
            .into_iter()
            .filter(is_dead);
        dead_groups.for_each(|name| drop(kernel.remove_dir(&sibling_parent.join(name))));
        let group = sibling_parent.join(format!("{PREFIX}{}", std::process::id()));
        kernel.make_dir(&group)?;
        let move_result = kernel.write(&group.join("cgroup.procs"), "0");
        if let Err(error) = move_result {
            let _ = kernel.remove_dir(&group);
            return Err(error);
        }
        Ok(Some(GuardianCgroup {
            root,
            original_group,
            group,
        }))
    }

    /// Moves the process to its former group and removes its own. Called at the very end: if the former group is
    /// killed then, the process has nothing left to do.
    pub fn leave(self, kernel: &dyn Kernel) {
        for group in [&self.original_group, &self.root] {
            if kernel.write(&group.join("cgroup.procs"), "0").is_ok() {
                break;
            }
        }
        // A remaining group is empty, and its name identifies its guardian.
        let _ = kernel.remove_dir(&self.group);
    }
}

/// Does `other_pid` end as well if the control group of `pid` is killed? `None` if unknown.
pub fn ends_with_group_of(kernel: &dyn Kernel, pid: i32, other_pid: i32) -> Option<bool> {
    let (root, group) = locate_cgroup(kernel, &pid.to_string()).ok()?;
    let (_, other_group) = locate_cgroup(kernel, &other_pid.to_string()).ok()?;
    Some(group != root && other_group.starts_with(&group))
}
