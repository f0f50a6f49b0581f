//! Limits of a journal: the objects that it may name.
//!
//! Problem: a restore trusts a file, and runs as root if the daemon is root's. Method: besides threads, a restore
//! changes only the files and directories that cachemate itself may change. These are a group's `cpuset.cpus` below the
//! mount of the cpuset controller, our groups in resctrl with their masks, and the color files of
//! programs. Any other object is reported and left unchanged. Property: a forged journal can do no more than a daemon
//! could have done.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use cachemate_core::CpuSet;

use crate::act::colors::reference_set;
use crate::act::cpusets;
use crate::act::resctrl::{Schemata, groups, mount_point};
use crate::kernel::Kernel;
use crate::kernel::group_dirs::CPUSET_FILE;
use crate::safety::journal::{JournalEntry, JournalObject, ObjectState};
use crate::safety::restore::{RestoreOutcome, RestoredObject};

/// Objects of a journal that may be restored, and messages about the others.
pub(crate) fn split_entries(
    kernel: &dyn Kernel,
    entries: BTreeMap<JournalObject, JournalEntry>,
) -> (BTreeMap<JournalObject, JournalEntry>, Vec<RestoredObject>) {
    let mut refused_objects = Vec::new();
    let mut allowed_entries = BTreeMap::new();
    for (object, entry) in entries {
        match check_entry(kernel, &object, &entry.original) {
            Ok(()) => {
                allowed_entries.insert(object, entry);
            }
            Err(reason) => {
                let outcome = if may_exist(kernel, &object) {
                    RestoreOutcome::Failed(reason)
                } else {
                    RestoreOutcome::Gone
                };
                refused_objects.push(RestoredObject { object, outcome });
            }
        }
    }
    (allowed_entries, refused_objects)
}

/// Does the object still exist? If a mount is missing, so are its files.
fn may_exist(kernel: &dyn Kernel, object: &JournalObject) -> bool {
    let path = match object {
        JournalObject::File { path }
        | JournalObject::Schemata { path }
        | JournalObject::Directory { path } => path,
        JournalObject::Membership { hierarchy, .. } => hierarchy,
        JournalObject::Affinity { .. }
        | JournalObject::Nice { .. }
        | JournalObject::Policy { .. } => return true,
    };
    // The file's content is not read, because the path is not one of ours and may be a device or a FIFO.
    kernel.exists(path).unwrap_or(true)
}

/// Checks that cachemate can have changed the object, and that the original is a possible state.
fn check_entry(
    kernel: &dyn Kernel,
    object: &JournalObject,
    original: &ObjectState,
) -> Result<(), String> {
    let mismatch = |expectation: &str| Err(format!("found {original:?}, expected {expectation}"));
    match object {
        JournalObject::Affinity { .. } => match original {
            ObjectState::Cpus(cpus) if !cpus.is_empty() => Ok(()),
            _ => mismatch("CPUs"),
        },
        JournalObject::Nice { .. } => match original {
            ObjectState::Nice(-20..=19) => Ok(()),
            _ => mismatch("a nice value"),
        },
        JournalObject::Policy { .. } => match original {
            ObjectState::Policy(_) | ObjectState::Scheduling(_) => Ok(()),
            _ => mismatch("a scheduling policy"),
        },
        JournalObject::Membership { hierarchy, .. } => {
            let is_known = [resctrl_mount(kernel), cpuset_mount(kernel)]
                .into_iter()
                .flatten()
                .any(|mount| mount == *hierarchy);
            match original {
                ObjectState::Group(group) if is_known && is_plain(group) => Ok(()),
                _ => mismatch("a group of resctrl or of the cpuset controller"),
            }
        }
        JournalObject::File { path } if path.starts_with(reference_set::BASE) => {
            let is_wanted_file =
                is_plain(path) && path.file_name().is_some_and(|name| name == "wanted");
            if is_wanted_file {
                Ok(())
            } else {
                mismatch("a program's wanted colors")
            }
        }
        JournalObject::File { path } => {
            let is_cpu_list =
                |text: &str| text.trim().is_empty() || text.trim().parse::<CpuSet>().is_ok();
            let is_below_mount =
                cpuset_mount(kernel).is_some_and(|mount| is_below(path, &mount, 2));
            let is_cpuset_file = path.file_name().is_some_and(|name| name == CPUSET_FILE);
            match original {
                ObjectState::Text(text)
                    if is_below_mount && is_cpuset_file && is_cpu_list(text) =>
                {
                    Ok(())
                }
                _ => mismatch("the CPUs of a group below the mount of the cpuset controller"),
            }
        }
        JournalObject::Schemata { path } => {
            let is_in_our_group = path
                .parent()
                .is_some_and(|group| is_our_group(kernel, group));
            match original {
                ObjectState::Text(text)
                    if is_in_our_group
                        && path.ends_with("schemata")
                        && Schemata::parse(text).is_ok() =>
                {
                    Ok(())
                }
                _ => mismatch("the masks of a group of ours in resctrl"),
            }
        }
        JournalObject::Directory { path } => match original {
            ObjectState::Absent if is_our_group(kernel, path) => Ok(()),
            _ => mismatch("a group of ours in resctrl"),
        },
    }
}

fn resctrl_mount(kernel: &dyn Kernel) -> Option<PathBuf> {
    mount_point(kernel).ok()
}

fn cpuset_mount(kernel: &dyn Kernel) -> Option<PathBuf> {
    match cpusets::find_hierarchy(kernel)? {
        cpusets::Cpusets::V1(mount) | cpusets::Cpusets::V2(mount) => Some(mount),
    }
}

fn is_our_group(kernel: &dyn Kernel, path: &Path) -> bool {
    let has_prefix = path
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(groups::GROUP_PREFIX));
    let mounts = [resctrl_mount(kernel), cpuset_mount(kernel)]
        .into_iter()
        .flatten();
    has_prefix
        && mounts
            .into_iter()
            .any(|mount| is_plain(path) && path.parent() == Some(&mount))
}

/// Does the path have at least `min_components` components below the mount?
fn is_below(path: &Path, mount: &Path, min_components: usize) -> bool {
    is_plain(path)
        && path
            .strip_prefix(mount)
            .is_ok_and(|relative_path| relative_path.components().count() >= min_components)
}

/// Whether the path is absolute and has only plain names.
fn is_plain(path: &Path) -> bool {
    path.is_absolute()
        && path
            .components()
            .all(|component| matches!(component, Component::RootDir | Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::{FakeHost, journal_entry};
    use crate::kernel::ThreadKey;

    /// Are the objects that cachemate changes accepted, and all others that a file could name left unchanged?
    #[test]
    fn only_objects_that_cachemate_changes_are_restored() {
        let host = FakeHost::default();
        host.set_file("/proc/mounts", "cgroup /cg cgroup rw,cpuset 0 0\n");
        host.set_file(
            "/proc/self/mountinfo",
            "28 26 0:24 / /rc rw,relatime - resctrl resctrl rw\n",
        );
        let thread = ThreadKey {
            tid: 5,
            start_ticks: 50,
        };
        let file = |path: &str| JournalObject::File { path: path.into() };
        let directory = |path: &str| JournalObject::Directory { path: path.into() };
        let schemata = |path: &str| JournalObject::Schemata { path: path.into() };
        let member = |path: &str| JournalObject::Membership {
            hierarchy: path.into(),
            pid: 5,
            thread,
        };
        let text = |text: &str| ObjectState::Text(text.into());
        let masks = || text("L3:0=ff");
        let good = [
            (file("/cg/batch/cpuset.cpus"), text("0-3")),
            (file("/cg/batch/cpuset.cpus"), text("")),
            (
                file(&format!("{}/s1-0/5/wanted", reference_set::BASE)),
                text("ff 1"),
            ),
            (directory("/rc/cachemate-5-50-0"), ObjectState::Absent),
            (schemata("/rc/cachemate-5-50-0/schemata"), masks()),
            (member("/rc"), ObjectState::Group("/".into())),
            (
                JournalObject::Nice { pid: 5, thread },
                ObjectState::Nice(-20),
            ),
        ];
        let bad = [
            (file("/etc/shadow"), text("root::0:0:::::")),
            (file("/cg/cpuset.cpus"), text("0-3")),
            (file("/cg/../etc/batch/cpuset.cpus"), text("0-3")),
            (file("/cg/batch/cpuset.cpus"), text("0-3; rm")),
            (file("/cg/batch/release_agent"), text("0-3")),
            (file("cg/batch/cpuset.cpus"), text("0-3")),
            (
                file(&format!("{}/../../etc/wanted", reference_set::BASE)),
                text(""),
            ),
            (
                file(&format!("{}/s1-0/5/status", reference_set::BASE)),
                text(""),
            ),
            (directory("/rc/db"), ObjectState::Absent),
            (directory("/rc/cachemate-5-50-0"), ObjectState::Present),
            (directory("/home/cachemate-x"), ObjectState::Absent),
            (schemata("/rc/db/schemata"), masks()),
            (schemata("/rc/schemata"), masks()),
            (schemata("/rc/cachemate-5-50-0/tasks"), masks()),
            (member("/home"), ObjectState::Group("/".into())),
            (member("/rc"), ObjectState::Group("/../../home".into())),
            (
                JournalObject::Nice { pid: 5, thread },
                ObjectState::Nice(99),
            ),
            (JournalObject::Affinity { pid: 5, thread }, text("0")),
        ];
        for (object, original) in good {
            assert_eq!(check_entry(&host, &object, &original), Ok(()), "{object:?}");
        }
        for (object, original) in bad {
            assert!(
                check_entry(&host, &object, &original).is_err(),
                "{object:?} {original:?}"
            );
        }
    }

    /// Does an object that no longer exists count as gone, and not as refused?
    #[test]
    fn a_missing_object_counts_as_gone_and_not_as_refused() {
        let host = FakeHost::default();
        host.set_file("/etc/shadow", "");
        let entry = |path: &str| {
            (
                JournalObject::File { path: path.into() },
                journal_entry(ObjectState::Text("0".into())),
            )
        };
        let (allowed, refused) = split_entries(
            &host,
            BTreeMap::from([entry("/etc/shadow"), entry("/cg/a/cpuset.cpus")]),
        );
        let outcomes: Vec<&RestoreOutcome> = refused.iter().map(|line| &line.outcome).collect();
        assert!(
            allowed.is_empty()
                && *outcomes[0] == RestoreOutcome::Gone
                && matches!(outcomes[1], RestoreOutcome::Failed(_))
        );
    }

    /// If a journal names an endless device, or a FIFO that has no writer: is it refused at once, unread, and is no
    /// file read beyond a bound?
    #[test]
    fn a_journal_that_names_a_device_is_refused_unread() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let entry = journal_entry(ObjectState::Text("0".into()));
            let objects = ["/dev/zero".into(), fifo]
                .map(|path: PathBuf| (JournalObject::File { path }, entry.clone()));
            let host = crate::kernel::LinuxHost::new("/");
            let (allowed, refused) = split_entries(&host, objects.into());
            let endless = host.read(Path::new("/dev/zero")).unwrap_err().to_string();
            sender.send((allowed.len(), refused, endless)).unwrap();
        });
        let patience = std::time::Duration::from_secs(60);
        let (allowed, refused, endless) = receiver
            .recv_timeout(patience)
            .expect("nothing waits for the FIFO");
        let failed = refused.iter().filter(|line| line.has_failed()).count();
        assert_eq!((allowed, failed), (0, 2), "{refused:?}");
        assert!(endless.contains("found more than"), "{endless}");
    }
}
