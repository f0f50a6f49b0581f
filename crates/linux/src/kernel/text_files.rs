//! What the kernel's text files have in common: lines of a name and a value, and mounted hierarchies of control groups.

use std::io;
use std::path::{Path, PathBuf};

use super::{Kernel, none_if_missing};

/// The value of the first line `NAME: VALUE` in a text like `/proc/PID/status` or `/proc/cpuinfo`.
pub(crate) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(key, _)| key.trim_end() == name)?;
    Some(value.trim())
}

/// A field of `/proc/PID/status`; `None` if the process has exited, or the kernel has no such field.
///
/// # Errors
/// The file exists and cannot be read.
pub(crate) fn status_field(
    kernel: &dyn Kernel,
    pid: i32,
    name: &str,
) -> io::Result<Option<String>> {
    let status = none_if_missing(kernel.read(Path::new(&format!("/proc/{pid}/status"))))?;
    Ok(status.and_then(|text| field(&text, name).map(str::to_string)))
}

/// The users of a process: real, effective, saved, and for files. Empty if it has exited.
///
/// # Errors
/// They cannot be read.
pub(crate) fn read_users(kernel: &dyn Kernel, pid: i32) -> io::Result<Vec<u32>> {
    let users = status_field(kernel, pid, "Uid")?.unwrap_or_default();
    Ok(users
        .split_ascii_whitespace()
        .filter_map(|user| user.parse().ok())
        .collect())
}

/// A mounted hierarchy of control groups.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct GroupHierarchy {
    pub mount: PathBuf,
    /// Its options, among them its controllers; empty for version 2, where each group has its own.
    pub controllers: Vec<String>,
}

impl GroupHierarchy {
    pub fn is_v2(&self) -> bool {
        self.controllers.is_empty()
    }
}

/// The hierarchies in `/proc/mounts`, in its order; none if there is no such file.
///
/// # Errors
/// The file exists and cannot be read.
pub(crate) fn group_hierarchies(kernel: &dyn Kernel) -> io::Result<Vec<GroupHierarchy>> {
    let mounts = none_if_missing(kernel.read(Path::new("/proc/mounts")))?.unwrap_or_default();
    let parse_line = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().take(4).collect();
        let (mount, controllers) = match fields[..] {
            [_, mount, "cgroup2", ..] => (mount, Vec::new()),
            [_, mount, "cgroup", options] => {
                (mount, options.split(',').map(str::to_string).collect())
            }
            _ => return None,
        };
        Some(GroupHierarchy {
            mount: PathBuf::from(unescape(mount)),
            controllers,
        })
    };
    Ok(mounts.lines().filter_map(parse_line).collect())
}

/// Decodes a path, in which the kernel writes blanks, tabs, newlines and backslashes as `\ooo`.
pub(crate) fn unescape(path: &str) -> String {
    let escapes = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    escapes
        .iter()
        .fold(path.to_string(), |path, (escape, character)| {
            path.replace(escape, character)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;

    /// Are the mounts of both versions listed with their controllers, and no others?
    #[test]
    fn mounts_of_both_cgroup_versions_are_listed() {
        let host = FakeHost::default();
        host.set_file(
            "/proc/mounts",
            "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/my\\040cpu cgroup rw,cpu 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n",
        );
        let hierarchy = |mount: &str, controllers: &[&str]| GroupHierarchy {
            mount: mount.into(),
            controllers: controllers.iter().map(|name| name.to_string()).collect(),
        };
        assert_eq!(
            group_hierarchies(&host).unwrap(),
            [
                hierarchy("/sys/fs/cgroup/my cpu", &["rw", "cpu"]),
                hierarchy("/sys/fs/cgroup/unified", &[])
            ]
        );
    }
}
