//! The kernel's notifications about processes that are moved between control groups.
//!
//! Problem: process events do not report moves, and reading the groups of every process in every window would cost more
//! than all other reads. Method: a move is a write to a file of the destination group, and inotify reports writes to
//! the files of a directory. All groups are watched, and new ones as soon as they are created. Properties: a
//! notification arrives after the move, so groups read after it are up to date. Writes through another mount of the
//! hierarchy, as in a control-group namespace, are not reported.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

/// Files to which a process or a thread is written to move it.
const MEMBER_FILES: [&str; 3] = ["cgroup.procs", "tasks", "cgroup.threads"];
/// Maximum number of watched groups; watches of more groups would take too much memory of the kernel.
const MAX_GROUPS: usize = 20_000;

/// Watches on all control groups.
#[derive(Debug)]
pub struct GroupMoves {
    inotify_fd: OwnedFd,
    mounts: Vec<PathBuf>,
    groups: BTreeMap<i32, PathBuf>,
}

impl GroupMoves {
    /// Watches the groups below these mount points.
    ///
    /// # Errors
    /// There are no mount points, there are too many groups, or a group cannot be watched.
    pub fn watch(mounts: Vec<PathBuf>) -> io::Result<Self> {
        if mounts.is_empty() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let inotify_fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let mut moves = GroupMoves {
            inotify_fd,
            mounts,
            groups: BTreeMap::new(),
        };
        moves.watch_all_groups()?;
        Ok(moves)
    }

    fn watch_all_groups(&mut self) -> io::Result<()> {
        self.groups.clear();
        for mount in self.mounts.clone() {
            self.watch_group(mount)?;
        }
        Ok(())
    }

    /// Watches a group and its descendants. The watch is set before the listing, so that no group is missed.
    fn watch_group(&mut self, group: PathBuf) -> io::Result<()> {
        let flags =
            WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
        let mut pending_groups = vec![group];
        while let Some(group) = pending_groups.pop() {
            match inotify::add_watch(&self.inotify_fd, &group, flags) {
                Ok(watch) => _ = self.groups.insert(watch, group.clone()),
                Err(Errno::NOENT) => continue, // removed meanwhile
                Err(error) => return Err(error.into()),
            }
            if self.groups.len() > MAX_GROUPS {
                return Err(io::Error::other(format!(
                    "there are more than {MAX_GROUPS} control groups"
                )));
            }
            match cachemate_files::list_subdirs(&group) {
                Ok(children) => pending_groups.extend(children),
                Err(error) if super::is_gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether any process may have been moved since the last call.
    ///
    /// # Errors
    /// A group cannot be watched. Moves are then no longer reported.
    pub fn poll_moves(&mut self) -> io::Result<bool> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let (mut has_moved, mut new_groups, mut is_overrun) = (false, Vec::new(), false);
        let mut reader = inotify::Reader::new(&self.inotify_fd, &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::WOULDBLOCK) => break,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let name = event.file_name().and_then(|name| name.to_str().ok());
            let flags = event.events();
            is_overrun |= flags.contains(ReadFlags::QUEUE_OVERFLOW);
            if flags.contains(ReadFlags::IGNORED) {
                self.groups.remove(&event.wd());
            } else if flags.contains(ReadFlags::ISDIR) {
                has_moved = true;
                let group = self
                    .groups
                    .get(&event.wd())
                    .zip(name)
                    .map(|(parent, name)| parent.join(name));
                new_groups.extend(group);
            } else if flags.contains(ReadFlags::MODIFY) {
                has_moved |= name.is_some_and(|name| MEMBER_FILES.contains(&name));
            }
        }
        if is_overrun {
            self.watch_all_groups()?;
            return Ok(true);
        }
        for group in new_groups {
            self.watch_group(group)?;
        }
        Ok(has_moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::LinuxHost;
    use crate::kernel::text_files::group_hierarchies;

    /// Is a write to a member file reported once, in groups that are there, made later, made in a new group, or
    /// renamed, and a write to any other file not?
    #[test]
    fn a_write_to_a_member_file_is_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str| std::fs::write(dir.path().join(path), "1").unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        ["a/cgroup.procs", "a/cpuset.cpus"]
            .into_iter()
            .for_each(write);
        let mut moves = GroupMoves::watch(vec![dir.path().to_path_buf()]).unwrap();
        assert!(!moves.poll_moves().unwrap());
        write("a/cpuset.cpus");
        assert!(!moves.poll_moves().unwrap());
        write("a/cgroup.procs");
        assert_eq!(
            [moves.poll_moves().unwrap(), moves.poll_moves().unwrap()],
            [true, false]
        );
        std::fs::create_dir_all(dir.path().join("b/c")).unwrap();
        assert!(
            moves.poll_moves().unwrap(),
            "a new group may have members by now"
        );
        write("b/c/tasks");
        assert!(moves.poll_moves().unwrap());
        std::fs::rename(dir.path().join("b"), dir.path().join("d")).unwrap();
        assert!(moves.poll_moves().unwrap(), "its members have another path");
        std::fs::create_dir(dir.path().join("d/c/e")).unwrap();
        assert!(moves.poll_moves().unwrap());
        write("d/c/e/cgroup.threads");
        assert!(moves.poll_moves().unwrap());
        std::fs::remove_dir_all(dir.path().join("d")).unwrap();
        moves.poll_moves().unwrap();
        assert_eq!(moves.groups.len(), 2);
    }

    /// Does this kernel report a move between its control groups?
    #[test]
    fn the_kernel_reports_moves() {
        let hierarchies = group_hierarchies(&LinuxHost::new("/")).unwrap().into_iter();
        let mounts: Vec<PathBuf> = hierarchies.map(|hierarchy| hierarchy.mount).collect();
        let group = mounts
            .iter()
            .map(|mount| mount.join(format!("cachemate-test-{}", std::process::id())));
        let Some(group) = group
            .into_iter()
            .find(|group| std::fs::create_dir(group).is_ok())
        else {
            return crate::skip_test::report_unchecked(
                "moves between control groups",
                "no group can be made here",
            );
        };
        let mut moves = GroupMoves::watch(mounts).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        moves.poll_moves().unwrap();
        let outcome = std::fs::write(group.join("cgroup.procs"), child.id().to_string());
        let has_moved = moves.poll_moves().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        while std::fs::remove_dir(&group)
            .is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
        {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(has_moved, outcome.is_ok());
    }
}
