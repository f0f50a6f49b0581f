//! Whose settings may a process have inherited?
//!
//! Problem: a child has the CPUs and the class that its parent had at its birth. If the parent had them from us, the
//! child keeps them for ever unless we find it; and after a double fork (`daemon`, `setsid`, `nohup`) its parent is
//! process 1. Method: a process is an heir of every ancestor, present or recorded ([`Kernel::recorded_ancestry`]).
//! Where the record does not reach back to the journal's beginning, a process younger than the journal whose parents
//! have ended is an heir of the programs in whose session, process group or control groups it is. An heir is only
//! corrected if it has exactly a state that we set. Properties: `SCHED_RESET_ON_FORK` cannot replace this, because the
//! kernel resets real-time and deadline policies and negative nice values, and an idle task's child is an idle task; a
//! process with a living parent that is no heir is no heir either.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use crate::kernel::text_files::status_field;
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

/// What members of one family have in common.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum FamilyTie {
    Session(i32),
    Group(i32),
    Cgroups(u64),
}

/// The ties of a family, the closest first.
fn family_ties(family: ProcessFamily) -> impl Iterator<Item = FamilyTie> {
    let session = FamilyTie::Session(family.session);
    let group = FamilyTie::Group(family.group);
    let cgroups = family.cgroups.map(FamilyTie::Cgroups);
    [session, group].into_iter().chain(cgroups)
}

/// Everything that processes may have inherited from journaled ones: by the journaled process, and merged by what its
/// family has in common, so that a thousand members with the same original cost as much as one.
#[derive(Debug, Default)]
pub(crate) struct Inheritance<'a> {
    objects_by_pid: BTreeMap<i32, Vec<InheritableObject<'a>>>,
    objects_by_tie: BTreeMap<FamilyTie, Vec<InheritableObject<'a>>>,
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
            add_object(
                inheritance.objects_by_pid.entry(pid).or_default(),
                object,
                entry,
            );
            for tie in entry.family.into_iter().flat_map(family_ties) {
                let objects = inheritance.objects_by_tie.entry(tie).or_default();
                add_object(objects, object, entry);
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
        let inherited = self.objects_of(recorded.into_iter().chain(present));
        let mut objects = self.objects_of([pid]);
        // The entries of the process itself say nothing of what it inherited and we did not change since.
        let has_known_ancestor = !inherited.is_empty();
        objects.extend(inherited);
        if !has_known_ancestor
            && !is_complete
            && stat.key.start_ticks >= self.since_ticks
            && self.is_orphan(kernel, stat, stat_of)?
            && let Some(family) = read_family(kernel, pid)?
        {
            let by_tie = family_ties(family).filter_map(|tie| self.objects_by_tie.get(&tie));
            objects.extend(by_tie.flatten());
        }
        Ok(objects)
    }

    /// What these processes can pass on, each process once.
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

    /// Has one of the parents through which a process could have inherited ended? Then the youngest ancestor that is
    /// still younger than the journal was adopted: by the first process of a PID namespace, or by one of another
    /// session.
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
}

/// Adds an object, unless one of the same property with the same original is there, whose states are then complemented.
fn add_object<'a>(
    objects: &mut Vec<InheritableObject<'a>>,
    object: &'a JournalObject,
    entry: &JournalEntry,
) {
    let is_same = |(first_object, first_entry): &InheritableObject<'_>| {
        let moved_object = |(pid, thread)| object.for_thread(pid, thread);
        first_object.owner().map(moved_object).as_ref() == Some(*first_object)
            && first_entry.original == entry.original
    };
    match objects.iter_mut().find(|other| is_same(other)) {
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
    let pids = status_field(kernel, pid, "NSpid")?.unwrap_or_default();
    Ok(pids.split_ascii_whitespace().last() == Some("1"))
}
