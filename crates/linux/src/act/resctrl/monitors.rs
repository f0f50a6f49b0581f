//! Who counts what in resctrl: groups that hold a monitoring id (RMID), and counters of traffic that must be assigned.
//!
//! Problem: a processor can tell some hundred groups apart, and container runtimes (runc, crun), nri-plugins and `pqos`
//! create groups of their own; when the ids run out, no group can be created, and the kernel's message names nobody. On
//! AMD with assigned counters (ABMC, `mbm_event`), a group without a counter has no traffic, although its file is
//! there. Method: all groups are listed with their threads and their probable owner; the modes and numbers of counters
//! are read from `info/L3_MON`; counters that are free, or that groups of ours can spare, go to those groups of ours
//! that need them most. Property: groups of others are only read.
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, "mbm_assign_mode" and "mon_groups".

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use super::groups::{GROUP_PREFIX, group_dirs, read_members};
use super::masks::parse_domain_list;
use crate::kernel::{Kernel, none_if_missing};

/// Counters of traffic that must be assigned to groups (`mbm_event`).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CounterAssignment {
    /// Number of counters, by domain.
    pub counters: BTreeMap<u32, u32>,
    /// Number of counters that no group has, by domain.
    pub free_counters: BTreeMap<u32, u32>,
}

/// The counters of traffic; `None` if each group has its own, because the processor or the mode is another.
pub(super) fn read_counter_assignment(
    kernel: &dyn Kernel,
    monitor_info: &Path,
) -> Option<CounterAssignment> {
    let modes = kernel.read(&monitor_info.join("mbm_assign_mode")).ok()?;
    if !modes.lines().any(|line| line.trim() == "[mbm_event]") {
        return None;
    }
    let read_counts = |name: &str| {
        let text = kernel.read(&monitor_info.join(name)).unwrap_or_default();
        parse_domain_list(&text, |count| count.trim().parse().ok()).unwrap_or_default()
    };
    Some(CounterAssignment {
        counters: read_counts("num_mbm_cntrs"),
        free_counters: read_counts("available_mbm_cntrs"),
    })
}

/// The file of a group that assigns counters to its events.
const ASSIGNMENTS_FILE: &str = "mbm_L3_assignments";
/// All memory traffic of a group.
pub(super) const TOTAL_EVENT: &str = "mbm_total_bytes";
/// The traffic of a group with the memory of its own node.
pub(super) const LOCAL_EVENT: &str = "mbm_local_bytes";

/// Domains in which an event of a group has no counter; `None` if the file tells nothing about the event.
fn unassigned_domains(kernel: &dyn Kernel, group: &Path, event: &str) -> Option<BTreeSet<u32>> {
    let text = kernel.read(&group.join(ASSIGNMENTS_FILE)).ok()?;
    let domains = text
        .lines()
        .find_map(|line| line.trim().strip_prefix(event)?.strip_prefix(':'))?;
    let states = parse_domain_list(domains, |state| Some(state.trim() == "_"))?;
    let unassigned = states
        .into_iter()
        .filter(|(_, is_unassigned)| *is_unassigned);
    Some(unassigned.map(|(domain, _)| domain).collect())
}

/// Gives counters of all traffic to these groups of ours, the most important ones first. Counters come from those that
/// are free, then from the local traffic of the groups, then from all traffic of the least important ones; groups of
/// others keep theirs. The assignments end with the groups, so that the journal's entry of a group restores them.
pub fn assign_counters(kernel: &dyn Kernel, groups: &[PathBuf]) {
    let set = |group: &Path, event: &str, domain: u32, state: &str| {
        let text = format!("{event}:{domain}={state}\n");
        kernel.write(&group.join(ASSIGNMENTS_FILE), &text)
    };
    let has_counter = |group: &Path, event: &str, domain: u32| {
        unassigned_domains(kernel, group, event)
            .is_some_and(|unassigned| !unassigned.contains(&domain))
    };
    for (index, group) in groups.iter().enumerate() {
        let unassigned = unassigned_domains(kernel, group, TOTAL_EVENT).unwrap_or_default();
        for domain in unassigned {
            let local = groups.iter().map(|other| (other, LOCAL_EVENT));
            let less_important = groups[index + 1..].iter().rev();
            let donors = local.chain(less_important.map(|other| (other, TOTAL_EVENT)));
            let mut donors = donors.filter(|(other, event)| has_counter(other, event, domain));
            let has_none_left = || {
                let error = set(group, TOTAL_EVENT, domain, "e").err();
                error.is_some_and(|error| error.raw_os_error() == Some(libc::ENOSPC))
            };
            // After each counter that is given up, the group tries again. No counter of another helps against other
            // errors.
            while has_none_left() {
                let Some((donor, event)) = donors.next() else {
                    break;
                };
                if set(donor, event, domain, "_").is_err() {
                    break;
                }
            }
        }
    }
}

/// A group that holds a monitoring id.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MonitorGroup {
    /// Its path below the mount; `/` is the root group.
    pub path: PathBuf,
    /// Whether it also has masks and limits of its own.
    pub has_class: bool,
    /// Number of its threads; `None` if they cannot be read.
    pub threads: Option<usize>,
}

impl MonitorGroup {
    /// The probable creator, by the names that it gives to groups; `None` if the name tells nothing.
    pub fn owner(&self) -> Option<&'static str> {
        let name = self.path.file_name()?.to_string_lossy();
        let is_hex = |text: &str| text.len() >= 32 && text.chars().all(|c| c.is_ascii_hexdigit());
        // goresctrl names groups after their Kubernetes pods, runc and crun after container ids.
        if name.starts_with(GROUP_PREFIX) {
            Some("cachemate")
        } else if name.starts_with("goresctrl.") {
            Some("goresctrl (nri-plugins, containerd, CRI-O)")
        } else if is_hex(&name) {
            Some("a container runtime (runc, crun)")
        } else if name.starts_with("qemu-") {
            Some("libvirt")
        } else {
            None
        }
    }
}

/// All groups that hold a monitoring id, the root group first, each class before the groups below it.
///
/// # Errors
/// The mount cannot be listed.
pub fn list_monitor_groups(kernel: &dyn Kernel, mount: &Path) -> io::Result<Vec<MonitorGroup>> {
    let mut groups = Vec::new();
    for class_dir in group_dirs(kernel, mount)? {
        let class = class_dir.strip_prefix(mount).unwrap_or(&class_dir);
        let monitors = none_if_missing(kernel.list(&class_dir.join("mon_groups")))?;
        let monitor_dirs = monitors
            .into_iter()
            .flatten()
            .map(|name| Path::new("mon_groups").join(name));
        for below in std::iter::once(PathBuf::new()).chain(monitor_dirs) {
            groups.push(MonitorGroup {
                path: Path::new("/").join(class).join(&below),
                has_class: below.as_os_str().is_empty(),
                threads: read_members(kernel, &class_dir.join(&below))
                    .ok()
                    .map(|members| members.len()),
            });
        }
    }
    Ok(groups)
}

/// The groups that hold most monitoring ids, by owner, as text such as `runc 12, cachemate 3`.
pub fn describe_holders(groups: &[MonitorGroup]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for group in groups.iter().filter(|group| group.path != Path::new("/")) {
        *counts.entry(group.owner().unwrap_or("others")).or_default() += 1;
    }
    let mut counts: Vec<(&str, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let texts: Vec<String> = counts
        .into_iter()
        .map(|(owner, count)| format!("{owner} {count}"))
        .collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cachemate_core::CpuSet;

    use super::*;
    use crate::fake_tests::FakeHost;
    use crate::kernel::DirLock;
    use crate::kernel::scheduling::SchedParams;

    /// Are counters of traffic assigned only in the mode in which they are, and how many are free?
    #[test]
    fn counters_are_assigned_in_one_mode_only() {
        let host = FakeHost::default();
        let dir = Path::new("/r/info/L3_MON");
        assert_eq!(read_counter_assignment(&host, dir), None);
        host.set_file("/r/info/L3_MON/mbm_assign_mode", "mbm_event\n[default]\n");
        assert_eq!(read_counter_assignment(&host, dir), None);
        host.set_file("/r/info/L3_MON/mbm_assign_mode", "[mbm_event]\ndefault\n");
        host.set_file("/r/info/L3_MON/num_mbm_cntrs", "0=32;1=32\n");
        host.set_file("/r/info/L3_MON/available_mbm_cntrs", "0=0;1=30\n");
        let expected = CounterAssignment {
            counters: BTreeMap::from([(0, 32), (1, 32)]),
            free_counters: BTreeMap::from([(0, 0), (1, 30)]),
        };
        assert_eq!(read_counter_assignment(&host, dir), Some(expected));
    }

    /// A host with two counters in the only domain, and the groups' lines of all and of local traffic.
    struct CounterHost {
        host: FakeHost,
        counters: usize,
        /// The kernel's answer if all counters are in use.
        error: i32,
    }

    impl CounterHost {
        fn new(counters: usize, groups: &[(&str, [bool; 2])]) -> Self {
            let host = FakeHost::default();
            for (group, [total, local]) in groups {
                let state = |is_assigned: &bool| if *is_assigned { "e" } else { "_" };
                let text = format!(
                    "mbm_total_bytes:0={}\nmbm_local_bytes:0={}\n",
                    state(total),
                    state(local)
                );
                host.set_file(&format!("/r/{group}/mbm_L3_assignments"), &text);
            }
            CounterHost {
                host,
                counters,
                error: libc::ENOSPC,
            }
        }
        fn texts(&self) -> Vec<String> {
            let files = self.host.files.borrow();
            files
                .values()
                .flatten()
                .map(|text| text.trim().replace("mbm_", "").replace('\n', " "))
                .collect()
        }
    }

    impl Kernel for CounterHost {
        fn read(&self, path: &Path) -> io::Result<String> {
            self.host.read(path)
        }
        fn write(&self, path: &Path, text: &str) -> io::Result<()> {
            let (event, state) = text.trim().split_once(":0=").unwrap();
            let in_use: usize = self
                .texts()
                .iter()
                .map(|text| text.matches("=e").count())
                .sum();
            if state == "e" && in_use >= self.counters {
                return Err(io::Error::from_raw_os_error(self.error));
            }
            let old = self.host.read(path)?;
            let new: Vec<String> = old
                .lines()
                .map(|line| match line.starts_with(event) {
                    true => format!("{event}:0={state}"),
                    false => line.to_string(),
                })
                .collect();
            self.host
                .set_file(path.to_str().unwrap(), &(new.join("\n") + "\n"));
            Ok(())
        }
        fn make_dir(&self, path: &Path) -> io::Result<()> {
            self.host.make_dir(path)
        }
        fn remove_dir(&self, path: &Path) -> io::Result<()> {
            self.host.remove_dir(path)
        }
        fn list(&self, path: &Path) -> io::Result<Vec<String>> {
            self.host.list(path)
        }
        fn lock_dir(&self, path: &Path, patience: Duration) -> io::Result<DirLock> {
            self.host.lock_dir(path, patience)
        }
        fn set_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<()> {
            self.host.set_affinity(tid, cpus)
        }
        fn set_nice(&self, tid: i32, nice: i32) -> io::Result<()> {
            self.host.set_nice(tid, nice)
        }
        fn set_scheduling(&self, tid: i32, params: &SchedParams) -> io::Result<()> {
            self.host.set_scheduling(tid, params)
        }
    }

    /// Do counters go to the groups that need them most: free ones first, then those of local traffic, then those of
    /// the least important group, and never those of others?
    #[test]
    fn counters_go_to_the_groups_that_need_them_most() {
        let groups = ["/r/a", "/r/b"].map(PathBuf::from);
        let assign = |counters, states: [[bool; 2]; 3]| {
            let names = ["a", "b", "others"];
            let groups_and_states: Vec<(&str, [bool; 2])> = names.into_iter().zip(states).collect();
            let host = CounterHost::new(counters, &groups_and_states);
            assign_counters(&host, &groups);
            host.texts()
        };
        let none = [false, false];
        let total = |state| format!("total_bytes:0={state} local_bytes:0=_");
        assert_eq!(assign(3, [none; 3]), [total("e"), total("e"), total("_")]);
        let both = "total_bytes:0=e local_bytes:0=e".to_string();
        assert_eq!(
            assign(3, [none, [false, true], [true, true]]),
            [total("e"), total("_"), both.clone()]
        );
        assert_eq!(
            assign(3, [none, [true, false], [true, true]]),
            [total("e"), total("_"), both]
        );
    }

    /// If a counter cannot be assigned for another reason than that none is free, do all groups keep theirs?
    #[test]
    fn counters_are_given_up_only_if_none_is_free() {
        let groups = [("/r/a", [false, true]), ("/r/b", [true, true])];
        let states = |error| {
            let named = groups.map(|(path, states)| (&path[3..], states));
            let mut host = CounterHost::new(3, &named);
            host.error = error;
            let before = host.texts();
            assign_counters(&host, &groups.map(|(path, _)| PathBuf::from(path)));
            (before, host.texts())
        };
        let (before, after) = states(libc::EINVAL);
        assert_eq!(after, before);
        let (before, after) = states(libc::ENOSPC);
        assert_ne!(after, before);
    }

    /// Is a creator recognized by its names, and no other?
    #[test]
    fn creators_are_recognized_by_their_names() {
        let owner = |path: &str| {
            let group = MonitorGroup {
                path: path.into(),
                has_class: false,
                threads: Some(0),
            };
            group.owner()
        };
        assert_eq!(owner("/cachemate-7-5-0"), Some("cachemate"));
        let container = format!("/mon_groups/{}", "0123456789abcdef".repeat(4));
        assert_eq!(owner(&container), Some("a container runtime (runc, crun)"));
        assert_eq!(owner("/mon_groups/deadbeef"), None);
        assert_eq!(owner("/"), None);
    }
}
