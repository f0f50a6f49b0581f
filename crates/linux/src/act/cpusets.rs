//! Cpusets: CPUs of groups of processes, through cgroup v1 or v2.
//!
//! Problem: affinity is per thread and threads are created all the time, whereas a group's cpuset applies to all its
//! present and future threads. Method: the hierarchy is found in `/proc/mounts` (v1 `cpuset`, else v2 with the
//! controller enabled below the root); a group is named by its path as `/proc/PID/cgroup` shows it; its `cpuset.cpus`
//! is a file like any other that the actuator journals, writes and reads back. Narrowing a group narrows the
//! affinities of its threads, and kernels before 6.2 widen all of them to the whole group afterwards, so narrower
//! affinities are journaled, too, and restored after the group. Properties: an empty v2 `cpuset.cpus` means "as the
//! parent" and is restored as empty, or as the parent's CPUs if the group has processes; the root group is never
//! touched.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Component, Path, PathBuf};

pub use cachemate_core::CpusetGroup;
use cachemate_core::{CpuSet, PlanItem, RefusalReason, RefusedItem, TrackedObject};

use crate::act::desired_state::{DesiredState, refusal};
use crate::kernel::group_dirs::{CPUSET_FILE, list_all_members};
use crate::kernel::systemd_units::is_run_by_systemd;
use crate::kernel::text_files::{group_hierarchies, status_field};
use crate::kernel::{Kernel, none_if_missing};
use crate::safety::journal::{JournalObject, ObjectState};
use crate::safety::object_state::{ObjectAccess, partition_kind, read_state};

/// State of the groups that are confined now or were confined before.
#[derive(Default, Debug)]
pub struct CpusetGroups {
    /// CPUs of each group by its path below the root of the hierarchy, with a leading slash.
    pub cpus: BTreeMap<String, TrackedObject<CpuSet>>,
    /// The control file of each, by the same names.
    pub files: BTreeMap<String, PathBuf>,
    /// Groups that the configuration confines, by the same names.
    pub confined_groups: Vec<CpusetGroup>,
    /// The innermost of these groups that contains each thread, which cannot leave its CPUs.
    pub threads: BTreeMap<i32, String>,
    /// For each group, affinities that narrowing it will change, and the states that the kernel may give them.
    pub pending_states: BTreeMap<String, Vec<DesiredState>>,
    /// Groups that cannot be confined or read, with the reasons.
    pub refused_items: Vec<RefusedItem>,
}

/// Reads the groups to confine, and previously confined groups that the configuration no longer names.
pub fn read_groups(
    kernel: &dyn Kernel,
    groups: &[CpusetGroup],
    originals: &BTreeMap<JournalObject, ObjectState>,
) -> CpusetGroups {
    let mut cpuset_groups = CpusetGroups::default();
    let is_cpuset_file = |object: &&JournalObject| matches!(object, JournalObject::File { path } if path.ends_with(CPUSET_FILE));
    let changed_objects: Vec<&JournalObject> = originals.keys().filter(is_cpuset_file).collect();
    let hierarchy = if groups.is_empty() && changed_objects.is_empty() {
        None
    } else {
        find_hierarchy(kernel)
    };
    let mut outermost_first: Vec<&CpusetGroup> = groups.iter().collect();
    outermost_first.sort_by_key(|group| group.cgroup.trim_matches('/').split('/').count());
    for group in outermost_first {
        let file = match &hierarchy {
            None => Err("no cpuset controller, neither cgroup v1 nor v2".to_string()),
            Some(cpusets) => cpusets.control_file(&group.cgroup),
        };
        let add_result = file.and_then(|file| {
            if let Some(kind) = partition_kind(kernel, &file).map_err(|error| error.to_string())? {
                return Err(format!(
                    "group '{}': found a cpuset partition ({kind}), expected a member: its CPUs are its owner's",
                    group.cgroup
                ));
            }
            let threads_error = |error| format!("group '{}': its threads cannot be read: {error}", group.cgroup);
            cpuset_groups.add_confined(kernel, group, file, originals).map_err(threads_error)
        });
        if let Err(message) = add_result {
            cpuset_groups.refused_items.push(RefusedItem {
                item: PlanItem::Plan,
                reason: RefusalReason::NotSupported,
                message,
            });
        }
    }
    for object in changed_objects {
        let JournalObject::File { path } = object else {
            continue;
        };
        // A group that its owner has turned into a partition is restored once it is a member again.
        if cpuset_groups.files.values().any(|file| file == path)
            || !matches!(partition_kind(kernel, path), Ok(None))
        {
            continue;
        }
        let mount = hierarchy
            .as_ref()
            .map(|(Cpusets::V1(mount) | Cpusets::V2(mount))| mount.as_path());
        let dir = path.parent().unwrap_or(Path::new("/"));
        let group_path = mount
            .and_then(|mount| dir.strip_prefix(mount).ok())
            .unwrap_or(dir);
        cpuset_groups.try_add(
            kernel,
            format!("/{}", group_path.display()),
            path.clone(),
            originals,
        );
    }
    cpuset_groups
}

/// The CPUs in a group's control file.
pub(crate) fn cpus_in_state(state: &ObjectState) -> Option<CpuSet> {
    match state {
        ObjectState::Text(text) => text.trim().parse().ok(),
        _ => None,
    }
}

impl CpusetGroups {
    /// Drops a group: it is neither confined nor restored, and its threads count as free.
    pub(crate) fn remove(&mut self, name: &str) {
        self.cpus.remove(name);
        self.files.remove(name);
        self.pending_states.remove(name);
        self.threads.retain(|_, group| group != name);
    }

    /// Adds a group. Returns false if the group cannot be read and is therefore left unchanged.
    fn try_add(
        &mut self,
        kernel: &dyn Kernel,
        name: String,
        file: PathBuf,
        originals: &BTreeMap<JournalObject, ObjectState>,
    ) -> bool {
        let object = JournalObject::File { path: file.clone() };
        let read_result = read_state(kernel, &object);
        let current_cpus = match read_result.as_ref().map(cpus_in_state) {
            Ok(Some(now)) => now,
            Ok(None) => return false,
            Err(error) => {
                self.refused_items.push(refusal(
                    kernel,
                    &PlanItem::Plan,
                    &object,
                    ObjectAccess::Read,
                    error,
                ));
                return false;
            }
        };
        let original = originals
            .get(&object)
            .and_then(cpus_in_state)
            .unwrap_or_else(|| current_cpus.clone());
        self.cpus.insert(
            name.clone(),
            TrackedObject {
                current: current_cpus,
                original,
            },
        );
        self.files.insert(name, file);
        true
    }

    /// Adds a group unless its threads cannot be read, because then their affinities could not be journaled.
    fn add_confined(
        &mut self,
        kernel: &dyn Kernel,
        group: &CpusetGroup,
        file: PathBuf,
        originals: &BTreeMap<JournalObject, ObjectState>,
    ) -> io::Result<()> {
        let name = format!("/{}", group.cgroup.trim_matches('/'));
        let dir = file.parent().unwrap_or(Path::new("/")).to_path_buf();
        let read_cpus = |file: &Path| -> io::Result<Option<CpuSet>> {
            let text = none_if_missing(kernel.read(file))?;
            Ok(text
                .and_then(|text| text.trim().parse().ok())
                .filter(|cpus: &CpuSet| !cpus.is_empty()))
        };
        let current_cpus = match read_cpus(&file)? {
            Some(cpus) => Some(cpus),
            None => dir
                .ancestors()
                .find_map(|dir| read_cpus(&dir.join("cpuset.cpus.effective")).transpose())
                .transpose()?,
        };
        let is_first_change = !originals.contains_key(&JournalObject::File { path: file.clone() });
        let threads = list_all_members(kernel, &dir)?;
        let mut pending_states = Vec::new();
        if let Some(effective) = current_cpus.as_ref().filter(|_| is_first_change) {
            for &tid in &threads {
                pending_states.extend(possible_states(kernel, tid, [&group.cpus, effective])?);
            }
        }
        if self.try_add(kernel, name.clone(), file, originals) {
            self.confined_groups.push(CpusetGroup {
                cgroup: name.clone(),
                cpus: group.cpus.clone(),
            });
            self.threads
                .extend(threads.into_iter().map(|tid| (tid, name.clone())));
            self.pending_states.insert(name, pending_states);
        }
        Ok(())
    }
}

/// The states that the kernel may give a thread whose affinity is narrower than its group, if the group's CPUs change.
fn possible_states(
    kernel: &dyn Kernel,
    tid: i32,
    possible_cpus: [&CpuSet; 2],
) -> io::Result<Vec<DesiredState>> {
    let read_thread = || {
        Ok((
            kernel.stat(tid)?.key,
            process_id(kernel, tid)?,
            kernel.affinity(tid)?,
        ))
    };
    let Some((thread, pid, cpus)) = none_if_missing(read_thread())? else {
        return Ok(Vec::new());
    };
    if cpus == *possible_cpus[1] {
        return Ok(Vec::new());
    }
    let desired_state = |cpus: &CpuSet| {
        let object = JournalObject::Affinity { pid, thread };
        DesiredState::journaled(object, ObjectState::Cpus(cpus.clone()))
    };
    // If a parent and a child group both change, a group first gets the union of its old and its new CPUs.
    let union_cpus = possible_cpus[0].union(possible_cpus[1]);
    Ok(possible_cpus
        .into_iter()
        .chain([&union_cpus])
        .map(desired_state)
        .collect())
}

/// Process of a thread.
fn process_id(kernel: &dyn Kernel, tid: i32) -> io::Result<i32> {
    let process = status_field(kernel, tid, "Tgid")?;
    Ok(process.and_then(|pid| pid.parse().ok()).unwrap_or(tid))
}

/// A mounted hierarchy with the cpuset controller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cpusets {
    /// cgroup v1, mounted at this path.
    V1(PathBuf),
    /// cgroup v2, mounted at this path; the controller is enabled below the root.
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
pub fn find_hierarchy(kernel: &dyn Kernel) -> Option<Cpusets> {
    try_find_hierarchy(kernel).ok().flatten()
}

/// The CPUs that a thread's cpuset allows; `None` if this host has no cpusets, or if the thread's group is not
/// visible to this process.
///
/// # Errors
/// One of the files exists and cannot be read.
pub(crate) fn effective_cpus(kernel: &dyn Kernel, tid: i32) -> io::Result<Option<CpuSet>> {
    let Some(cpusets) = try_find_hierarchy(kernel)? else {
        return Ok(None);
    };
    let Some(group) = cpuset_group(kernel, tid, &cpusets)? else {
        return Ok(None);
    };
    let (mount, file) = match &cpusets {
        Cpusets::V1(mount) => (mount, "cpuset.effective_cpus"),
        Cpusets::V2(mount) => (mount, "cpuset.cpus.effective"),
    };
    let group_path = PathBuf::from(group.trim().trim_matches('/'));
    if group_path
        .components()
        .any(|component| component == Component::ParentDir)
    {
        return Ok(None); // beyond this namespace's root
    }
    // In v2 the controller may be disabled below an ancestor of the group.
    for dir in group_path.ancestors() {
        if let Some(text) = none_if_missing(kernel.read(&mount.join(dir).join(file)))? {
            return Ok(text.trim().parse().ok());
        }
    }
    Ok(None)
}

/// The group of a thread in the hierarchy with the controller. Kernels without cgroup v1 have no `/proc/PID/cpuset`.
fn cpuset_group(kernel: &dyn Kernel, tid: i32, cpusets: &Cpusets) -> io::Result<Option<String>> {
    if let Some(group) =
        none_if_missing(kernel.read(&PathBuf::from(format!("/proc/{tid}/cpuset"))))?
    {
        return Ok(Some(group));
    }
    let groups = none_if_missing(kernel.read(&PathBuf::from(format!("/proc/{tid}/cgroup"))))?
        .unwrap_or_default();
    let group = groups.lines().find_map(|line| {
        let (number, controllers_and_group) = line.split_once(':')?;
        let (controllers, group) = controllers_and_group.split_once(':')?;
        let has_cpusets = match cpusets {
            Cpusets::V1(_) => controllers
                .split(',')
                .any(|controller| controller == "cpuset"),
            Cpusets::V2(_) => number == "0",
        };
        has_cpusets.then(|| group.to_string())
    });
    Ok(group)
}

fn try_find_hierarchy(kernel: &dyn Kernel) -> io::Result<Option<Cpusets>> {
    let mut v1_cpusets = None;
    for hierarchy in group_hierarchies(kernel)? {
        if hierarchy.is_v2() {
            let mount = hierarchy.mount;
            let lists_cpuset = |file: &str| -> io::Result<bool> {
                let controllers =
                    none_if_missing(kernel.read(&mount.join(file)))?.unwrap_or_default();
                Ok(controllers
                    .split_ascii_whitespace()
                    .any(|controller| controller == "cpuset"))
            };
            // systemd enables the controller for the first unit that gets CPUs.
            if lists_cpuset("cgroup.subtree_control")?
                || is_run_by_systemd(kernel) && lists_cpuset("cgroup.controllers")?
            {
                return Ok(Some(Cpusets::V2(mount)));
            }
        } else if hierarchy.controllers.iter().any(|name| name == "cpuset") {
            v1_cpusets = Some(Cpusets::V1(hierarchy.mount));
        }
    }
    Ok(v1_cpusets)
}

impl Cpusets {
    /// The control file of the group with this path.
    ///
    /// # Errors
    /// The root group, or a path that leaves the hierarchy.
    pub fn control_file(&self, group: &str) -> Result<PathBuf, String> {
        let relative_path = group.trim_matches('/');
        if relative_path.is_empty()
            || relative_path
                .split('/')
                .any(|component| component == ".." || component == ".")
        {
            return Err(format!(
                "found group '{group}', expected a path below the root of the hierarchy"
            ));
        }
        let (Cpusets::V1(mount) | Cpusets::V2(mount)) = self;
        Ok(mount.join(relative_path).join(CPUSET_FILE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::act::actuator::Actuator;
    use crate::act::changes::fixture::{self, ApplyFixture};
    use crate::fake_tests::{waiting_guardian, write_tree};
    use crate::kernel::LinuxHost;
    use crate::sense::tasks::TaskTable;
    use cachemate_core::{Plan, WindowLength};

    fn host_with_files(mounts: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, LinuxHost) {
        let dir = tempfile::tempdir().unwrap();
        write_tree(
            dir.path(),
            [
                ("proc/mounts", mounts),
                ("proc/sys/kernel/random/boot_id", "boot\n"),
            ],
        );
        write_tree(dir.path(), files.iter().copied());
        let host = LinuxHost::new(dir.path());
        (dir, host)
    }

    const V1: &str = "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset,noprefix 0 0\n";
    const V2: &str = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";

    /// Is the controller found on v1, on v2 only where it is enabled, and v2 preferred on mixed hosts?
    #[test]
    fn the_hierarchy_with_the_controller_is_found() {
        let enabled = [("sys/fs/cgroup/cgroup.subtree_control", "cpu cpuset io\n")];
        assert_eq!(
            find_hierarchy(&host_with_files(V1, &[]).1),
            Some(Cpusets::V1("/sys/fs/cgroup/cpuset".into()))
        );
        assert_eq!(find_hierarchy(&host_with_files(V2, &[]).1), None);
        assert_eq!(
            find_hierarchy(&host_with_files(V2, &enabled).1),
            Some(Cpusets::V2("/sys/fs/cgroup".into()))
        );
        assert_eq!(
            find_hierarchy(&host_with_files(&format!("{V1}{V2}"), &enabled).1),
            Some(Cpusets::V2("/sys/fs/cgroup".into()))
        );
        assert_eq!(
            find_hierarchy(&host_with_files("proc /proc proc rw 0 0\n", &[]).1),
            None
        );
    }

    /// Are narrower threads journaled with their group, and is a dropped group still read?
    #[test]
    fn groups_are_journaled_with_their_narrower_threads() {
        let host = crate::fake_tests::FakeHost::default();
        host.set_file("/proc/mounts", V1);
        let base = "/sys/fs/cgroup/cpuset";
        for (file, text) in [
            ("a/cpuset.cpus", "0-7\n"),
            ("a/tasks", "5\n"),
            ("a/b/cpuset.cpus", "0-7\n"),
            ("a/b/tasks", "6\n7\n"),
        ] {
            host.set_file(&format!("{base}/{file}"), text);
        }
        let narrow = host.add_thread(6, 6, 1, "3");
        host.add_thread(5, 5, 1, "0-7");
        host.add_thread(7, 7, 1, "0-7");
        let group = |path: &str, cpus: &str| CpusetGroup {
            cgroup: path.into(),
            cpus: cpus.parse().unwrap(),
        };
        let both = [group("/a/b/", "0-1"), group("a", "0-3")];
        let cpusets = read_groups(&host, &both, &BTreeMap::new());
        let all: CpuSet = (0..8).collect();
        assert_eq!(
            cpusets.cpus,
            ["/a", "/a/b"]
                .map(|name| (name.to_string(), TrackedObject::new(all.clone())))
                .into()
        );
        let threads =
            [(5, "/a"), (6, "/a/b"), (7, "/a/b")].map(|(tid, name)| (tid, name.to_string()));
        assert_eq!(cpusets.threads, threads.into());
        for name in ["/a", "/a/b"] {
            let to_come = &cpusets.pending_states[name];
            assert!(
                to_come.len() == 3
                    && to_come
                        .iter()
                        .all(|want| want.object.thread() == Some(narrow)),
                "{name}"
            );
        }
        let file = |path: &str| JournalObject::File {
            path: format!("{base}/{path}").into(),
        };
        let originals =
            BTreeMap::from([(file("a/b/cpuset.cpus"), ObjectState::Text("0-5".into()))]);
        let dropped = read_groups(&host, &both[1..], &originals);
        let original: CpuSet = (0..6).collect();
        assert_eq!(
            dropped.cpus["/a/b"],
            TrackedObject {
                current: all,
                original
            }
        );
        assert_eq!(dropped.confined_groups.len(), 1);
        assert!(read_groups(&host, &[], &BTreeMap::new()).cpus.is_empty());
        let nowhere = read_groups(
            &crate::fake_tests::FakeHost::default(),
            &both,
            &BTreeMap::new(),
        );
        assert_eq!((nowhere.refused_items.len(), nowhere.cpus.len()), (2, 0));
    }

    /// Are the CPUs of a thread's cpuset found with and without `/proc/PID/cpuset`, also above its group?
    #[test]
    fn the_cpuset_of_a_thread_is_found() {
        let cpus = |host: &dyn Kernel| {
            effective_cpus(host, 7)
                .unwrap()
                .map(|cpus| cpus.to_string())
        };
        for (of_thread, text) in [
            ("cpuset", "/a/b\n"),
            ("cgroup", "0::/a/b\n"),
            ("cgroup", "9:cpu:/x\n0::/a/b\n"),
        ] {
            let host = crate::fake_tests::FakeHost::default();
            host.set_file("/proc/mounts", V2);
            host.set_file("/sys/fs/cgroup/cgroup.subtree_control", "cpuset\n");
            host.set_file(&format!("/proc/7/{of_thread}"), text);
            assert_eq!(cpus(&host), None);
            host.set_file("/sys/fs/cgroup/cpuset.cpus.effective", "0-7\n");
            assert_eq!(
                cpus(&host).as_deref(),
                Some("0-7"),
                "{text}: the root's, as the group has no controller"
            );
            host.set_file("/sys/fs/cgroup/a/b/cpuset.cpus.effective", "2-3\n");
            assert_eq!(cpus(&host).as_deref(), Some("2-3"), "{text}");
            host.set_file(
                &format!("/proc/7/{of_thread}"),
                &text.replace("/a/b", "/../other"),
            );
            assert_eq!(cpus(&host), None, "outside this namespace");
        }
        let host = crate::fake_tests::FakeHost::default();
        host.set_file("/proc/mounts", V1);
        host.set_file("/proc/7/cgroup", "9:cpu:/x\n5:cpuset,cpuacct:/db\n");
        host.set_file("/sys/fs/cgroup/cpuset/db/cpuset.effective_cpus", "1\n");
        assert_eq!(cpus(&host).as_deref(), Some("1"));
    }

    /// Is a partition refused by its name and kind, valid or not, and a member confined?
    #[test]
    fn a_partition_is_refused_by_name_and_kind() {
        let (base, group) = (
            "/sys/fs/cgroup",
            CpusetGroup {
                cgroup: "/part".into(),
                cpus: "0-1".parse().unwrap(),
            },
        );
        for (kind, is_confined) in [
            ("member\n", true),
            ("root\n", false),
            ("isolated\n", false),
            ("root invalid (Cpu list in use)\n", false),
        ] {
            let host = crate::fake_tests::FakeHost::default();
            host.set_file("/proc/mounts", V2);
            host.set_file(&format!("{base}/cgroup.subtree_control"), "cpuset\n");
            host.set_file(&format!("{base}/part/cpuset.cpus"), "0-3\n");
            host.set_file(&format!("{base}/part/cgroup.procs"), "");
            host.set_file(&format!("{base}/part/cgroup.threads"), "");
            host.set_file(&format!("{base}/part/cpuset.cpus.partition"), kind);
            let cpusets = read_groups(&host, std::slice::from_ref(&group), &BTreeMap::new());
            assert_eq!(
                cpusets.confined_groups.len() == 1,
                is_confined,
                "{kind}: {:?}",
                cpusets.refused_items
            );
            let message = cpusets
                .refused_items
                .first()
                .map(|refused| refused.message.clone())
                .unwrap_or_default();
            assert_eq!(
                message.contains(&format!(
                    "'/part': found a cpuset partition ({})",
                    kind.trim()
                )),
                !is_confined,
                "{message}"
            );
        }
    }

    /// Is a group confined and restored, and the root never changed?
    #[test]
    fn a_group_is_confined_and_restored_and_the_root_unchanged() {
        let original = "0-7";
        let (dir, host) = host_with_files(V1, &[("sys/fs/cgroup/cpuset/db/cpuset.cpus", original)]);
        let path = dir.path().join("sys/fs/cgroup/cpuset/db/cpuset.cpus");
        let state = tempfile::tempdir().unwrap();
        let mut actuator = Actuator::new(state.path(), waiting_guardian());
        let groups = [CpusetGroup {
            cgroup: "/db".to_string(),
            cpus: "2-3".parse().unwrap(),
        }];
        let (tasks, capabilities) = (TaskTable::default(), fixture::sample_capabilities());
        let bench = ApplyFixture {
            host: &host,
            actuator: &mut actuator,
            ways: None,
            tasks: &tasks,
            capabilities: &capabilities,
            groups: &groups,
        };
        let (applied, derived) = bench.apply(&Plan::idle(WindowLength::Time { ns: 1 }));
        let lines: Vec<String> = derived.changes.iter().map(ToString::to_string).collect();
        assert_eq!(lines, ["confine group '/db' to CPUs 2-3 (was CPUs 0-7)"]);
        assert_eq!(applied.write_calls, 1, "{applied:?}");
        // A plain file keeps the bytes beyond a shorter write; the kernel's files do not.
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("2-3"));
        actuator.restore_all(&host).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().trim_end(), original);
        let cpusets = Cpusets::V1("/x".into());
        assert!(cpusets.control_file("/").is_err() && cpusets.control_file("/a/../..").is_err());
        assert_eq!(
            cpusets.control_file("/a/b").unwrap(),
            Path::new("/x/a/b/cpuset.cpus")
        );
    }
}
