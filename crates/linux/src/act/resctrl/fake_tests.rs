//! A fake host with resctrl: classes run out, masks are checked, and `last_cmd_status` holds the kernel's messages,
//! as on the lab guest.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cachemate_core::test_support::last_level_caches;
use cachemate_core::{CacheLevel, CpuSet, IndexSet};

use crate::act::resctrl::masks::{format_mask, parse_mask};
use crate::fake_tests::FakeHost;
use crate::kernel::scheduling::SchedParams;
use crate::kernel::{DirLock, Kernel};
use crate::sense::topology::HostTopology;

pub(crate) const MOUNT: &str = "/sys/fs/resctrl";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FakeGroup {
    /// Way masks by domain.
    pub masks: BTreeMap<u32, IndexSet>,
    /// Limits of bandwidth in percent by domain; empty if the host has none.
    pub levels: BTreeMap<u32, u32>,
    pub tasks: BTreeSet<i32>,
}

impl FakeGroup {
    /// A group of another tool, with these threads and without masks and limits of its own.
    pub fn with_threads(threads: impl IntoIterator<Item = i32>) -> Self {
        FakeGroup {
            masks: BTreeMap::new(),
            levels: BTreeMap::new(),
            tasks: threads.into_iter().collect(),
        }
    }
}

/// A host in which caches 0 and 1 are the domains 0 and 8, of eight ways each; masks are contiguous and have at least
/// two ways.
pub(crate) struct FakeCat {
    pub host: FakeHost,
    pub groups: RefCell<BTreeMap<String, FakeGroup>>,
    pub classes: Cell<usize>,
    pub status: RefCell<String>,
    /// Directories that another process has locked.
    pub locked: RefCell<BTreeSet<PathBuf>>,
    /// Whether bandwidth can be limited, from 10 to 100 % in steps of 10.
    pub has_bandwidth: Cell<bool>,
    /// Bytes per group and domain: occupancy, traffic.
    pub counted: RefCell<BTreeMap<(String, u32), (u64, u64)>>,
}

pub(crate) fn topology() -> HostTopology {
    let mut topology = last_level_caches(2, 2, CacheLevel::L3, 8 << 20);
    topology
        .cpus
        .iter_mut()
        .for_each(|cpu| cpu.package = cpu.id.0 / 2);
    topology
        .caches
        .iter_mut()
        .for_each(|cache| cache.ways = Some(8));
    HostTopology {
        topology,
        kernel_cache_ids: vec![Some(0), Some(8)],
        warnings: Vec::new(),
    }
}

fn os_error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl FakeCat {
    /// A host with four classes of service and the threads 5 to 8, each a separate process.
    pub fn new() -> Self {
        let host = FakeHost::default();
        host.set_file(
            "/proc/self/mountinfo",
            &format!("28 26 0:24 / {MOUNT} rw,relatime - resctrl resctrl rw\n"),
        );
        for (name, text) in [
            ("cbm_mask", "ff"),
            ("min_cbm_bits", "2"),
            ("num_closids", "4"),
            ("shareable_bits", "c0"),
            ("bit_usage", "0=XXSSSSSS;8=XXSSSSSS"),
            ("sparse_masks", "0"),
        ] {
            host.set_file(&format!("{MOUNT}/info/L3/{name}"), &format!("{text}\n"));
        }
        host.set_file(
            &format!("{MOUNT}/info/L3_MON/mon_features"),
            "llc_occupancy\nmbm_total_bytes\n",
        );
        for tid in 5..9 {
            host.add_thread(tid, tid, 1, "0-3");
        }
        FakeCat {
            host,
            groups: RefCell::default(),
            classes: Cell::new(4),
            status: RefCell::new("ok".to_string()),
            locked: RefCell::default(),
            has_bandwidth: Cell::new(false),
            counted: RefCell::default(),
        }
    }

    /// A host that can also limit bandwidth.
    pub fn with_bandwidth() -> Self {
        let cat = FakeCat::new();
        cat.has_bandwidth.set(true);
        for (name, text) in [
            ("num_closids", "4"),
            ("min_bandwidth", "10"),
            ("bandwidth_gran", "10"),
        ] {
            cat.host
                .set_file(&format!("{MOUNT}/info/MB/{name}"), &format!("{text}\n"));
        }
        cat
    }

    /// A group as the kernel creates it.
    fn new_group(&self) -> FakeGroup {
        let all: IndexSet = (0..8).collect();
        let levels = [(0, 100), (8, 100)];
        FakeGroup {
            masks: BTreeMap::from([(0, all.clone()), (8, all)]),
            levels: BTreeMap::from_iter(levels.into_iter().filter(|_| self.has_bandwidth.get())),
            tasks: BTreeSet::new(),
        }
    }

    /// Groups by thread; threads of the root group are not listed.
    pub fn groups_by_thread(&self) -> BTreeMap<i32, String> {
        let groups = self.groups.borrow();
        let members = |(name, group): (&String, &FakeGroup)| {
            group
                .tasks
                .iter()
                .map(|&tid| (tid, name.clone()))
                .collect::<Vec<_>>()
        };
        groups.iter().flat_map(members).collect()
    }

    /// The masks of each thread, as text: "5:0=ff,8=3".
    pub fn mask_texts(&self) -> Vec<String> {
        let groups = self.groups.borrow();
        let text = |group: &FakeGroup| {
            let masks: Vec<String> = group
                .masks
                .iter()
                .map(|(id, mask)| format!("{id}={}", format_mask(mask)))
                .collect();
            masks.join(",")
        };
        self.groups_by_thread()
            .iter()
            .map(|(tid, name)| format!("{tid}:{}", text(&groups[name])))
            .collect()
    }

    /// Creates a child in the group of its parent.
    pub fn fork_child(&self, parent: i32, tid: i32) {
        self.host.add_thread(tid, tid, parent, "0-3");
        if let Some(name) = self.groups_by_thread().get(&parent) {
            self.groups
                .borrow_mut()
                .get_mut(name)
                .unwrap()
                .tasks
                .insert(tid);
        }
    }

    /// The group's name and the file in it; the root group's name is empty.
    fn split_group_path<'a>(&self, path: &'a Path) -> Option<(String, &'a str)> {
        let below = path.strip_prefix(MOUNT).ok()?;
        let parts: Vec<&str> = below.iter().map(|part| part.to_str().unwrap()).collect();
        match parts[..] {
            // Monitoring groups are files of the host, which never change by themselves.
            ["info" | "mon_groups", ..] | [_, "mon_groups", ..] => None,
            [] => Some((String::new(), "")),
            [file @ ("tasks" | "schemata" | "mon_data")] => Some((String::new(), file)),
            [group] => Some((group.to_string(), "")),
            ["mon_data", ..] => Some((String::new(), "mon_data")),
            [group, file, ..] => Some((group.to_string(), file)),
        }
    }

    fn fail_with<T>(&self, number: i32, words: &str) -> io::Result<T> {
        *self.status.borrow_mut() = words.to_string();
        Err(os_error(number))
    }

    fn write_schemata(&self, name: &str, text: &str) -> io::Result<()> {
        let invalid = || os_error(libc::EINVAL);
        let mut groups = self.groups.borrow_mut();
        let group = groups.get_mut(name).ok_or_else(|| os_error(libc::ENOENT))?;
        // The kernel checks a whole line before it applies it, and applies line after line.
        for line in text.trim().lines() {
            let (resource, domains) = line.split_once(':').ok_or_else(invalid)?;
            let (mut masks, mut levels) = (group.masks.clone(), group.levels.clone());
            for part in domains.split(';') {
                let (domain, value) = part.split_once('=').ok_or_else(invalid)?;
                let domain = domain.parse().unwrap();
                if resource == "MB" {
                    let level: u32 = value.trim().parse().map_err(|_| invalid())?;
                    if !(10..=100).contains(&level) {
                        return self.fail_with(libc::EINVAL, "MB value out of range [10,100]");
                    }
                    *levels.get_mut(&domain).ok_or_else(invalid)? = level.div_ceil(10) * 10;
                    continue;
                }
                let mask = parse_mask(value)
                    .filter(|_| resource == "L3")
                    .ok_or_else(invalid)?;
                let (first, last) = (mask.first().unwrap_or(0), mask.iter().last().unwrap_or(0));
                if last > 7 || last - first + 1 != mask.count() || mask.count() < 2 {
                    return self.fail_with(libc::EINVAL, "The mask has less than 2 bits or a gap");
                }
                *masks.get_mut(&domain).ok_or_else(invalid)? = mask;
            }
            (group.masks, group.levels) = (masks, levels);
        }
        Ok(())
    }
}

impl Kernel for FakeCat {
    fn own_pid(&self) -> i32 {
        self.host.own_pid()
    }
    fn read(&self, path: &Path) -> io::Result<String> {
        if path == Path::new(MOUNT).join("info/last_cmd_status") {
            return Ok(format!("{}\n", self.status.borrow()));
        }
        if path
            .file_name()
            .is_some_and(|name| name == "cpu_resctrl_groups")
        {
            let tid: i32 = path
                .iter()
                .nth(2)
                .unwrap()
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            self.host.stat(tid)?;
            let group = self
                .groups_by_thread()
                .get(&tid)
                .cloned()
                .unwrap_or_else(|| "/".to_string());
            return Ok(format!("res:{group}\nmon:\n"));
        }
        let Some((name, file)) = self.split_group_path(path) else {
            return self.host.read(path);
        };
        let groups = self.groups.borrow();
        let root = FakeGroup {
            tasks: self
                .host
                .threads
                .borrow()
                .keys()
                .copied()
                .filter(|t| !self.groups_by_thread().contains_key(t))
                .collect(),
            ..self.new_group()
        };
        let group = if name.is_empty() {
            &root
        } else {
            groups.get(&name).ok_or_else(|| os_error(libc::ENOENT))?
        };
        match file {
            "tasks" => Ok(group.tasks.iter().map(|tid| format!("{tid}\n")).collect()),
            "schemata" => {
                let masks: Vec<String> = group
                    .masks
                    .iter()
                    .map(|(d, m)| format!("{d}={:0>2}", format_mask(m)))
                    .collect();
                let levels: Vec<String> = group
                    .levels
                    .iter()
                    .map(|(d, level)| format!("{d}={level:>5}"))
                    .collect();
                let bandwidth = match levels.is_empty() {
                    true => String::new(),
                    false => format!("    MB:{}\n", levels.join(";")),
                };
                Ok(format!("{bandwidth}    L3:{}\n", masks.join(";")))
            }
            "mon_data" => {
                let domain = path
                    .iter()
                    .rev()
                    .nth(1)
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .strip_prefix("mon_L3_")
                    .unwrap();
                let counted = self
                    .counted
                    .borrow()
                    .get(&(name, domain.parse().unwrap()))
                    .copied();
                let (occupancy, traffic) = counted.ok_or_else(|| os_error(libc::ENOENT))?;
                let occupied = path.ends_with("llc_occupancy");
                Ok(format!("{}\n", if occupied { occupancy } else { traffic }))
            }
            _ => Err(os_error(libc::EISDIR)),
        }
    }
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let Some((name, file)) = self.split_group_path(path) else {
            return self.host.write(path, text);
        };
        if let Err(error) = self.host.begin_change().and_then(|outcome| outcome) {
            *self.status.borrow_mut() = "a seeded fault".to_string();
            return Err(error);
        }
        *self.status.borrow_mut() = "ok".to_string();
        if file == "schemata" {
            return self.write_schemata(&name, text);
        }
        let tid: i32 = text.trim().parse().unwrap();
        if !self.host.threads.borrow().contains_key(&tid) {
            return self.fail_with(libc::ESRCH, "No task");
        }
        let mut groups = self.groups.borrow_mut();
        if !name.is_empty() && !groups.contains_key(&name) {
            return Err(os_error(libc::ENOENT));
        }
        groups
            .values_mut()
            .for_each(|group| group.tasks.retain(|other| *other != tid));
        if let Some(group) = groups.get_mut(&name) {
            group.tasks.insert(tid);
        }
        Ok(())
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.host.begin_change()??;
        let name = path
            .strip_prefix(MOUNT)
            .unwrap()
            .to_str()
            .unwrap()
            .to_string();
        if self.groups.borrow().len() + 1 >= self.classes.get() {
            return self.fail_with(libc::ENOSPC, "Out of CLOSIDs");
        }
        *self.status.borrow_mut() = "ok".to_string();
        let group = self.new_group();
        self.groups.borrow_mut().insert(name, group);
        Ok(())
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.host.begin_change()??;
        let name = path.strip_prefix(MOUNT).unwrap().to_str().unwrap();
        self.groups
            .borrow_mut()
            .remove(name)
            .map(drop)
            .ok_or_else(|| os_error(libc::ENOENT))
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        match self.split_group_path(path) {
            Some((name, "")) if name.is_empty() => {
                let fixed =
                    ["info", "mon_data", "mon_groups", "schemata", "tasks"].map(str::to_string);
                Ok(fixed
                    .into_iter()
                    .chain(self.groups.borrow().keys().cloned())
                    .collect())
            }
            Some((name, "")) => {
                let is_there = self.groups.borrow().contains_key(&name);
                if is_there {
                    Ok(vec!["schemata".into(), "tasks".into()])
                } else {
                    Err(os_error(libc::ENOENT))
                }
            }
            Some((_, "mon_data")) => Ok(vec!["mon_L3_00".into(), "mon_L3_08".into()]),
            _ => self.host.list(path),
        }
    }
    fn lock_dir(&self, path: &Path, _: Duration) -> io::Result<DirLock> {
        if self.locked.borrow().contains(path) {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(DirLock::default())
        }
    }
    fn set_fence(&self, fence: Option<std::sync::Arc<crate::safety::fence::Fence>>) {
        self.host.set_fence(fence);
    }
    fn set_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<()> {
        self.host.set_affinity(tid, cpus)
    }
    fn set_nice(&self, tid: i32, nice: i32) -> io::Result<()> {
        self.host.set_nice(tid, nice)
    }
    fn set_scheduling(&self, tid: i32, wanted: &SchedParams) -> io::Result<()> {
        self.host.set_scheduling(tid, wanted)
    }
}
