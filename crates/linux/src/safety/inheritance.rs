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
use std::io;
use std::path::{Path, PathBuf};

use crate::kernel::{Kernel, ThreadStat, none_if_missing};
use crate::safety::journal::{JournalEntry, JournalObject, ProcessFamily};

/// Maximum length of a chain of parents: it protects against a tree that changes while it is read.
const MAX_CHAIN: usize = 1_000;

/// The family of a process; `None` if it has exited.
///
/// # Errors
/// It exists and cannot be read.
pub(crate) fn read_family(kernel: &dyn Kernel, pid: i32) -> io::Result<Option<ProcessFamily>> {
    let Some(stat) = none_if_missing(kernel.stat(pid))? else {
        return Ok(None);
    };
    let cgroups = none_if_missing(kernel.read(&PathBuf::from(format!("/proc/{pid}/cgroup"))))?;
    Ok(Some(ProcessFamily {
        session: stat.session,
        group: stat.group,
        cgroups: cgroups.map(|text| xxhash_rust::xxh3::xxh3_64(text.as_bytes())),
    }))
}

/// Reads a process; `None` if it does not exist.
pub(crate) type StatReader<'a> = &'a dyn Fn(i32) -> io::Result<Option<ThreadStat>>;

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

    /// What a process may have inherited, the nearest ancestor's first.
    ///
    /// # Errors
    /// A process of its family exists and cannot be read, so that it is unknown whether it is an heir.
    pub fn objects_for(
        &self,
        kernel: &dyn Kernel,
        pid: i32,
        stat_of: StatReader<'_>,
    ) -> io::Result<Vec<&InheritableObject<'a>>> {
        let Some(stat) = stat_of(pid)? else {
            return Ok(Vec::new());
        };
        let recorded = kernel.recorded_ancestry(pid);
        let is_complete = recorded.as_ref().is_some_and(|record| {
            record
                .complete_since_ticks
                .is_some_and(|since| since <= self.since_ticks)
        });

        let present = present_ancestors(pid, stat_of)?;
        let recorded = recorded.map_or(Vec::new(), |record| record.ancestors);
        let ancestors = std::iter::once(pid).chain(recorded).chain(present);
        let mut objects = self.objects_of(ancestors);
        if objects.is_empty()
            && !is_complete
            && stat.key.start_ticks >= self.since_ticks
            && self.is_orphan(kernel, stat, stat_of)?
        {
            objects = self.objects_of(self.relatives_of(kernel, pid)?);
        }
        Ok(objects)
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
        stat_of: StatReader<'_>,
    ) -> io::Result<bool> {
        let mut child = stat;
        for _ in 0..MAX_CHAIN {
            let Some(parent) = stat_of(child.parent)? else {
                return Ok(true);
            };
            let is_other_session = parent.session != child.session;
            if parent.key.start_ticks < self.since_ticks {
                return Ok(is_other_session || is_init(kernel, parent.key.tid)?);
            }
            if is_other_session && is_init(kernel, parent.key.tid)? {
                return Ok(true);
            }
            child = parent;
        }
        Ok(true)
    }

    /// The journaled processes with which a process shares its session, its group or its control groups, in this order.
    fn relatives_of(&self, kernel: &dyn Kernel, pid: i32) -> io::Result<Vec<i32>> {
        let Some(family) = read_family(kernel, pid)? else {
            return Ok(Vec::new());
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
        Ok(relatives)
    }
}

/// The living ancestors of a process, nearest first.
fn present_ancestors(pid: i32, stat_of: StatReader<'_>) -> io::Result<Vec<i32>> {
    let (mut ancestors, mut next) = (Vec::new(), pid);
    while ancestors.len() < MAX_CHAIN
        && let Some(stat) = stat_of(next)?
        && stat.parent > 0
    {
        ancestors.push(stat.parent);
        next = stat.parent;
    }
    Ok(ancestors)
}

/// Is a process the first one of its PID namespace, which adopts the orphans in it?
fn is_init(kernel: &dyn Kernel, pid: i32) -> io::Result<bool> {
    if pid == 1 {
        return Ok(true);
    }
    let status = none_if_missing(kernel.read(Path::new(&format!("/proc/{pid}/status"))))?;
    let innermost_pid = status.as_deref().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        line.split_ascii_whitespace().last()
    });
    Ok(innermost_pid == Some("1"))
}
