//! Whose settings may a process have inherited?
//!
//! Problem: a child has the CPUs and the class that its parent had at its birth. If the parent had them from us, the child
//! keeps them for ever unless we find it; and after a double fork (`daemon`, `setsid`, `nohup`) its parent is process 1.
//! Method: a process is an heir of every ancestor, present or recorded ([`Kernel::recorded_ancestry`]). Where the record
//! does not reach back to the journal's beginning, a process younger than the journal whose parents have ended is an heir
//! of the programs in whose session, process group or control groups it is. An heir is only corrected if it has exactly a
//! state that we set. Properties: `SCHED_RESET_ON_FORK` cannot replace this, because the kernel resets real-time classes
//! only, and an idle task's child is an idle task; a process with a living parent that is no heir is no heir either.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::kernel::{Kernel, ThreadStat};
use crate::safety::journal::{JournalEntry, JournalObject, ProcessFamily};

/// Maximum length of a chain of parents: it protects against a tree that changes while it is read.
const MAX_CHAIN: usize = 1_000;

/// The family of a process; `None` if it has exited or cannot be read.
pub(crate) fn read_family(kernel: &dyn Kernel, pid: i32) -> Option<ProcessFamily> {
    let stat = kernel.stat(pid).ok()?;
    let cgroups = kernel
        .read(&PathBuf::from(format!("/proc/{pid}/cgroup")))
        .ok();
    Some(ProcessFamily {
        session: stat.session,
        group: stat.group,
        cgroups: cgroups.map(|text| xxhash_rust::xxh3::xxh3_64(text.as_bytes())),
    })
}

/// A property of a process that may be inherited: its object, and its first original with all states that we set.
pub(crate) type InheritableObject<'a> = (&'a JournalObject, JournalEntry);

/// Everything that processes may have inherited from journaled ones, by the journaled process.
#[derive(Debug, Default)]
pub(crate) struct Inheritance<'a> {
    objects_by_pid: BTreeMap<i32, Vec<InheritableObject<'a>>>,
    families: Vec<(ProcessFamily, i32)>,
    since_ticks: u64,
}

impl<'a> Inheritance<'a> {
    /// Collects what the entries of a journal can pass on.
    pub fn new(entries: &'a BTreeMap<JournalObject, JournalEntry>) -> Self {
        let mut inheritance = Inheritance {
            since_ticks: u64::MAX,
            ..Inheritance::default()
        };
        for (object, entry) in entries {
            let Some((pid, _)) = object.owner() else {
                continue;
            };
            inheritance.since_ticks = inheritance.since_ticks.min(entry.since_ticks);
            if let Some(family) = entry.family
                && !inheritance.families.contains(&(family, pid))
            {
                inheritance.families.push((family, pid));
            }

            let objects = inheritance.objects_by_pid.entry(pid).or_default();
            let for_first_thread = |thread| object.for_thread(pid, thread);
            let is_same_object = |other: &&mut InheritableObject<'_>| {
                let (first_object, first_entry) = &**other;
                first_object.thread().map(for_first_thread).as_ref() == Some(first_object)
                    && first_entry.original == entry.original
            };
            match objects.iter_mut().find(is_same_object) {
                Some((_, first)) => {
                    for state in &entry.applied_states {
                        if !first.applied_states.contains(state) {
                            first.applied_states.push(state.clone());
                        }
                    }
                }
                None => objects.push((object, entry.clone())),
            }
        }
        inheritance
    }

    /// One of the objects; `None` if nothing can be inherited.
    pub fn first_object(&self) -> Option<&'a JournalObject> {
        let (object, _) = self.objects_by_pid.values().flatten().next()?;
        Some(object)
    }

    /// What a process may have inherited, the nearest ancestor's first. `stat_of` reads a process.
    pub fn objects_for(
        &self,
        kernel: &dyn Kernel,
        pid: i32,
        stat_of: &dyn Fn(i32) -> Option<ThreadStat>,
    ) -> Vec<&InheritableObject<'a>> {
        let Some(stat) = stat_of(pid) else {
            return Vec::new();
        };
        let recorded = kernel.recorded_ancestry(pid);
        let is_complete = recorded.as_ref().is_some_and(|record| {
            record
                .complete_since_ticks
                .is_some_and(|since| since <= self.since_ticks)
        });

        let present = present_ancestors(pid, stat_of);
        let recorded = recorded.map_or(Vec::new(), |record| record.ancestors);
        let ancestors = std::iter::once(pid).chain(recorded).chain(present);
        let mut objects = self.objects_of(ancestors);
        if objects.is_empty()
            && !is_complete
            && stat.key.start_ticks >= self.since_ticks
            && self.is_orphan(kernel, stat, stat_of)
        {
            objects = self.objects_of(self.relatives_of(kernel, pid));
        }
        objects
    }

    fn objects_of(&self, pids: impl IntoIterator<Item = i32>) -> Vec<&InheritableObject<'a>> {
        let mut seen_pids = Vec::new();
        let mut objects = Vec::new();
        for pid in pids {
            if let Some(own_objects) = self.objects_by_pid.get(&pid)
                && !seen_pids.contains(&pid)
            {
                seen_pids.push(pid);
                objects.extend(own_objects);
            }
        }
        objects
    }

    /// Has one of the parents through which a process could have inherited ended? Then the youngest ancestor that is still
    /// younger than the journal was adopted: by the first process of a PID namespace, or by one of another session.
    fn is_orphan(
        &self,
        kernel: &dyn Kernel,
        stat: ThreadStat,
        stat_of: &dyn Fn(i32) -> Option<ThreadStat>,
    ) -> bool {
        let mut child = stat;
        for _ in 0..MAX_CHAIN {
            let Some(parent) = stat_of(child.parent) else {
                return true;
            };
            if parent.key.start_ticks < self.since_ticks {
                return parent.session != child.session || is_init(kernel, parent.key.tid);
            }
            if parent.session != child.session && is_init(kernel, parent.key.tid) {
                return true;
            }
            child = parent;
        }
        true
    }

    /// The journaled processes with which a process shares its session, its group or its control groups, in this order.
    fn relatives_of(&self, kernel: &dyn Kernel, pid: i32) -> Vec<i32> {
        let Some(family) = read_family(kernel, pid) else {
            return Vec::new();
        };
        let shares: [fn(&ProcessFamily, &ProcessFamily) -> bool; 3] = [
            |one, other| one.session == other.session,
            |one, other| one.group == other.group,
            |one, other| one.cgroups.is_some() && one.cgroups == other.cgroups,
        ];
        let mut relatives = Vec::new();
        for is_shared in shares {
            let sharing = self
                .families
                .iter()
                .filter(|(other, _)| is_shared(&family, other));
            relatives.extend(sharing.map(|(_, pid)| *pid));
        }
        relatives
    }
}

/// The living ancestors of a process, nearest first.
fn present_ancestors(pid: i32, stat_of: &dyn Fn(i32) -> Option<ThreadStat>) -> Vec<i32> {
    let parent_of = |pid: &i32| {
        let stat = stat_of(*pid)?;
        (stat.parent > 0).then_some(stat.parent)
    };
    std::iter::successors(parent_of(&pid), parent_of)
        .take(MAX_CHAIN)
        .collect()
}

/// Is a process the first one of its PID namespace, which adopts the orphans in it?
fn is_init(kernel: &dyn Kernel, pid: i32) -> bool {
    if pid == 1 {
        return true;
    }
    let status = kernel.read(Path::new(&format!("/proc/{pid}/status")));
    status.is_ok_and(|text| {
        text.lines()
            .find_map(|line| line.strip_prefix("NSpid:"))
            .and_then(|pids| pids.split_ascii_whitespace().last())
            == Some("1")
    })
}
