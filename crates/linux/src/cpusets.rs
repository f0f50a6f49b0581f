//! Cpusets: where groups of processes may run, as cgroup v1 or v2 has it.
//!
//! Problem: affinity is per thread and threads are born all the time; a group's cpuset holds for all that it will ever
//! have. Method: the hierarchy is found in `/proc/mounts` (v1 `cpuset`, else v2 with the controller enabled below the
//! root); a group is asked for by its path as `/proc/PID/cgroup` shows it; its `cpuset.cpus` is a file like any other
//! that is journalled, written and read back by the actuator. Properties: an empty v2 `cpuset.cpus` means "as the
//! parent" and is put back as empty; the root group is never touched.

use std::fmt;
use std::path::{Path, PathBuf};

use cachemate_core::CpuSet;

use crate::actuator::Wanted;
use crate::journal::{Object, State};
use crate::kernel::Kernel;

/// A mounted hierarchy with the cpuset controller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cpusets {
    V1(PathBuf),
    V2(PathBuf),
}

impl fmt::Display for Cpusets {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cpusets::V1(mount) => write!(out, "cgroup v1 at {}", mount.display()),
            Cpusets::V2(mount) => write!(out, "cgroup v2 at {}", mount.display()),
        }
    }
}

/// The hierarchy that has the controller, v2 first.
pub fn find(kernel: &dyn Kernel) -> Option<Cpusets> {
    let mounts = kernel.read(Path::new("/proc/mounts")).ok()?;
    let mut old = None;
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (Some(&mount), Some(&kind), Some(&options)) = (fields.get(1), fields.get(2), fields.get(3)) else {
            continue;
        };
        let mount = PathBuf::from(mount);
        if kind == "cgroup2" {
            let enabled = kernel.read(&mount.join("cgroup.subtree_control")).unwrap_or_default();
            if enabled.split_ascii_whitespace().any(|controller| controller == "cpuset") {
                return Some(Cpusets::V2(mount));
            }
        } else if kind == "cgroup" && options.split(',').any(|option| option == "cpuset") {
            old = Some(Cpusets::V1(mount));
        }
    }
    old
}

impl Cpusets {
    /// The control file of the group with this path.
    ///
    /// # Errors
    /// The root group, or a path that leaves the hierarchy.
    pub fn file(&self, group: &str) -> Result<PathBuf, String> {
        let inner = group.trim_matches('/');
        if inner.is_empty() || inner.split('/').any(|part| part == ".." || part == ".") {
            return Err(format!("found group '{group}', expected a path below the root of the hierarchy"));
        }
        let (Cpusets::V1(mount) | Cpusets::V2(mount)) = self;
        Ok(mount.join(inner).join("cpuset.cpus"))
    }

    /// The change that confines a group to `cpus`.
    ///
    /// # Errors
    /// As [`Cpusets::file`].
    pub fn confine(&self, group: &str, cpus: &CpuSet, item: cachemate_core::Item) -> Result<Wanted, String> {
        let object = Object::File { path: self.file(group)? };
        Ok(Wanted { item, object, state: State::Text(cpus.to_string()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actuator::{Actuator, GuardianCommand};
    use crate::kernel::Host;
    use cachemate_core::Item;

    fn tree(mounts: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        let mut all = vec![("proc/mounts", mounts), ("proc/sys/kernel/random/boot_id", "boot\n")];
        all.extend(files);
        for (path, text) in all {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let host = Host::new(dir.path());
        (dir, host)
    }

    const V1: &str = "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset,noprefix 0 0\n";
    const V2: &str = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";

    /// Is the controller found on v1, on v2 only where it is enabled, and v2 preferred on mixed hosts?
    #[test]
    fn the_hierarchy_with_the_controller_is_found() {
        let enabled = [("sys/fs/cgroup/cgroup.subtree_control", "cpu cpuset io\n")];
        assert_eq!(find(&tree(V1, &[]).1), Some(Cpusets::V1("/sys/fs/cgroup/cpuset".into())));
        assert_eq!(find(&tree(V2, &[]).1), None);
        assert_eq!(find(&tree(V2, &enabled).1), Some(Cpusets::V2("/sys/fs/cgroup".into())));
        assert_eq!(find(&tree(&format!("{V1}{V2}"), &enabled).1), Some(Cpusets::V2("/sys/fs/cgroup".into())));
        assert_eq!(find(&tree("proc /proc proc rw 0 0\n", &[]).1), None);
    }

    /// Is a group confined and put back as it was, and the root never touched?
    #[test]
    fn a_group_is_confined_and_put_back() {
        let original = "0-7";
        let (dir, host) = tree(V1, &[("sys/fs/cgroup/cpuset/db/cpuset.cpus", original)]);
        let cpusets = find(&host).unwrap();
        let path = dir.path().join("sys/fs/cgroup/cpuset/db/cpuset.cpus");
        let wanted = cpusets.confine("/db", &"2-3".parse().unwrap(), Item::Plan).unwrap();
        let state = tempfile::tempdir().unwrap();
        let args = ["-c", "echo ready; cat >/dev/null"].map(str::to_string).to_vec();
        let mut actuator = Actuator::new(state.path(), GuardianCommand { program: "/bin/sh".into(), args });
        let made = actuator.make(&host, &[wanted]);
        assert!(made.refused.is_empty(), "{made:?}");
        // A tree of plain files keeps what is longer than the write; the kernel's files do not.
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("2-3"));
        actuator.put_back(&host).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().trim_end(), original);
        let cpusets = Cpusets::V1("/x".into());
        assert!(cpusets.file("/").is_err() && cpusets.file("/a/../..").is_err());
        assert_eq!(cpusets.file("/a/b").unwrap(), Path::new("/x/a/b/cpuset.cpus"));
    }
}
