//! Processes that began, changed and ended since the last refresh, as far as the kernel's events tell.
//!
//! Problem: on a host with a thousand short programs a second, reading each of them costs more than managing all others.
//! Method: events are recorded as they arrive. A process that ends before a refresh has read it is only counted, for the
//! nearest ancestor that was read. A child has its parent's user until an event tells otherwise. Property: after a loss of
//! events the ledger is incomplete, until a listing of all processes completes it again.

use std::collections::{BTreeMap, BTreeSet};

use crate::kernel::process_events::ProcessEvent;

/// Number of entries beyond which a listing is cheaper, and memory is bounded.
const MAX_ENTRIES: usize = 100_000;

/// A live process that no refresh has read yet.
#[derive(Clone, Copy, Debug)]
struct UnreadProcess {
    /// The nearest ancestor that is not unread itself.
    ancestor: i32,
    live_threads: u32,
    /// Whether it has the user that its ancestor had at the last refresh.
    has_ancestors_user: bool,
    /// Whether a refresh has left it to the next one.
    is_deferred: bool,
}

/// Threads of one process that began and ended since the last refresh.
#[derive(Clone, Debug, Default)]
pub struct ThreadChanges {
    /// Threads that began, and have not ended.
    pub born: BTreeSet<i32>,
    /// Threads that ended, and had begun before.
    pub ended: BTreeSet<i32>,
}

/// Births, changes and exits since the last refresh.
#[derive(Debug, Default)]
pub struct BirthLedger {
    unread: BTreeMap<i32, UnreadProcess>,
    ended_unread: BTreeMap<i32, u64>,
    changed: BTreeSet<i32>,
    users_changed: BTreeSet<i32>,
    rethreaded: BTreeMap<i32, ThreadChanges>,
    /// Number of entries of `rethreaded`.
    thread_changes: usize,
    ended_leaders: BTreeSet<i32>,
    is_complete: bool,
}

impl BirthLedger {
    /// Records an event.
    pub fn record(&mut self, event: ProcessEvent) {
        match event {
            ProcessEvent::Birth { parent, pid } => {
                let (ancestor, has_ancestors_user) = match self.unread.get(&parent) {
                    Some(parent) => (parent.ancestor, parent.has_ancestors_user),
                    None => (parent, true),
                };
                self.unread
                    .insert(pid, UnreadProcess { ancestor, live_threads: 1, has_ancestors_user, is_deferred: false });
            }
            ProcessEvent::ThreadBirth { pid, tid } => match self.unread.get_mut(&pid) {
                Some(process) => process.live_threads += 1,
                None => {
                    self.thread_changes += 1;
                    self.rethreaded.entry(pid).or_default().born.insert(tid);
                }
            },
            ProcessEvent::Change { pid } => _ = self.changed.insert(pid),
            ProcessEvent::UserChange { pid } => {
                self.changed.insert(pid);
                self.users_changed.insert(pid);
                self.unread.get_mut(&pid).into_iter().for_each(|process| process.has_ancestors_user = false);
            }
            ProcessEvent::Exit { pid, tid } => match self.unread.get_mut(&pid) {
                Some(process) if process.live_threads > 1 => process.live_threads -= 1,
                Some(_) => self.count_ended(pid),
                None => {
                    self.thread_changes += 1;
                    let threads = self.rethreaded.entry(pid).or_default();
                    if !threads.born.remove(&tid) {
                        threads.ended.insert(tid);
                    }
                    if tid == pid {
                        self.ended_leaders.insert(pid);
                    }
                }
            },
        }
        let sets = self.changed.len() + self.users_changed.len() + self.thread_changes + self.ended_leaders.len();
        if self.unread.len() + self.ended_unread.len() + sets > MAX_ENTRIES {
            self.forget();
        }
    }

    /// Counts an unread process as ended.
    pub fn count_ended(&mut self, pid: i32) {
        self.changed.remove(&pid);
        if let Some(process) = self.unread.remove(&pid) {
            *self.ended_unread.entry(process.ancestor).or_default() += 1;
        }
    }

    /// Forgets everything, because events were lost.
    pub fn forget(&mut self) {
        *self = BirthLedger::default();
    }

    /// Whether every birth since the last listing is known.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Adds the processes of a listing that no refresh has read. `is_followed` = events will tell of all later ones.
    pub fn add_listed(&mut self, pids: impl IntoIterator<Item = i32>, is_followed: bool) {
        for pid in pids {
            let listed = UnreadProcess { ancestor: 0, live_threads: 1, has_ancestors_user: false, is_deferred: true };
            self.unread.entry(pid).or_insert(listed);
        }
        self.is_complete = is_followed;
    }

    /// Processes to be read, ascending.
    pub fn unread(&self) -> Vec<i32> {
        self.unread.keys().copied().collect()
    }

    /// Leaves a process that was born since the last refresh to the next one, so that short programs that hardly run are only
    /// counted. It has the affinity and the control groups of its parent until then. Returns false if its turn has come.
    pub fn defer(&mut self, pid: i32) -> bool {
        self.unread.get_mut(&pid).is_some_and(|process| !std::mem::replace(&mut process.is_deferred, true))
    }

    /// Whether events tell that an unread process has a single thread.
    pub fn has_one_thread(&self, pid: i32) -> bool {
        self.is_complete
            && self.unread.get(&pid).is_some_and(|process| process.ancestor > 0 && process.live_threads == 1)
    }

    /// Takes a process that was read, or is not to be read, off the list.
    pub fn remove_read(&mut self, pid: i32) {
        self.unread.remove(&pid);
    }

    /// Whether a process has another program, user or name than at the last refresh.
    pub fn is_changed(&self, pid: i32) -> bool {
        self.changed.contains(&pid)
    }

    /// Whether a process may have another user than at the last refresh.
    pub fn is_user_changed(&self, pid: i32) -> bool {
        !self.is_complete || self.users_changed.contains(&pid)
    }

    /// The process whose user, as the last refresh read it, is that of this unread process; `None` = unknown.
    pub fn ancestor_with_user(&self, pid: i32) -> Option<i32> {
        let process = self.unread.get(&pid).filter(|process| process.has_ancestors_user)?;
        (!self.is_user_changed(process.ancestor)).then_some(process.ancestor)
    }

    /// Whether a process may have other threads than at the last refresh.
    pub fn is_rethreaded(&self, pid: i32) -> bool {
        !self.is_complete || self.rethreaded.contains_key(&pid)
    }

    /// The threads of a process that began and ended since the last refresh; `None` = unknown.
    pub fn thread_changes(&self, pid: i32) -> Option<ThreadChanges> {
        self.is_complete.then(|| self.rethreaded.get(&pid).cloned().unwrap_or_default())
    }

    /// Takes the processes whose first thread has ended; others of their threads may live on.
    pub fn take_ended_leaders(&mut self) -> BTreeSet<i32> {
        std::mem::take(&mut self.ended_leaders)
    }

    /// Takes the numbers of programs that ended unread, by their ancestors.
    pub fn take_ended_unread(&mut self) -> BTreeMap<i32, u64> {
        std::mem::take(&mut self.ended_unread)
    }

    /// Forgets the changes that this refresh has read.
    pub fn finish_refresh(&mut self) {
        for process in self.unread.values_mut() {
            process.has_ancestors_user &= !self.users_changed.contains(&process.ancestor);
        }
        self.changed.clear();
        self.users_changed.clear();
        self.rethreaded.clear();
        self.thread_changes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn birth_event(parent: i32, pid: i32) -> ProcessEvent {
        ProcessEvent::Birth { parent, pid }
    }

    fn exit_event(pid: i32, tid: i32) -> ProcessEvent {
        ProcessEvent::Exit { pid, tid }
    }

    fn ledger_after(events: &[ProcessEvent]) -> BirthLedger {
        let mut ledger = BirthLedger::default();
        ledger.add_listed([], true);
        events.iter().for_each(|event| ledger.record(*event));
        ledger
    }

    /// Are short programs counted for the program that started them, also through a shell that ended before them?
    #[test]
    fn short_programs_count_for_their_ancestor() {
        let mut ledger = ledger_after(&[
            birth_event(5, 10),
            birth_event(10, 11),
            birth_event(10, 12),
            exit_event(10, 10),
            exit_event(11, 11),
            birth_event(5, 13),
        ]);
        assert_eq!(ledger.unread(), [12, 13]);
        assert_eq!(ledger.take_ended_unread(), BTreeMap::from([(5, 2)]));
        assert_eq!(ledger.take_ended_unread(), BTreeMap::new());
    }

    /// Does a child have its ancestor's user, unless an event says that one of them, or one between them, changed its own?
    #[test]
    fn a_child_has_its_ancestors_user() {
        let mut ledger =
            ledger_after(&[birth_event(5, 10), birth_event(10, 11), birth_event(6, 12), birth_event(7, 14)]);
        ledger.record(ProcessEvent::UserChange { pid: 10 });
        for event in [birth_event(10, 13), ProcessEvent::UserChange { pid: 7 }] {
            ledger.record(event);
        }
        let users = [10, 11, 12, 13, 14].map(|pid| ledger.ancestor_with_user(pid));
        assert_eq!(users, [None, Some(5), Some(6), None, None]);
        assert!(ledger.is_changed(10) && ledger.is_user_changed(7) && !ledger.is_user_changed(6));
        ledger.finish_refresh();
        assert!(!ledger.is_user_changed(7));
    }

    /// Is a newborn process left to the next refresh once, and a listed one never; and does a child not get the user that its
    /// ancestor took on before the child was read?
    #[test]
    fn a_newborn_process_is_deferred_once() {
        let mut ledger = ledger_after(&[birth_event(5, 10), birth_event(7, 11), ProcessEvent::UserChange { pid: 7 }]);
        ledger.add_listed([12], true);
        assert_eq!([10, 11, 12].map(|pid| ledger.defer(pid)), [true, true, false]);
        ledger.finish_refresh();
        assert_eq!([10, 11].map(|pid| ledger.ancestor_with_user(pid)), [Some(5), None]);
        assert_eq!([10, 11].map(|pid| ledger.defer(pid)), [false, false]);
        assert_eq!(ledger.unread(), [10, 11, 12]);
        ledger.record(ProcessEvent::ThreadBirth { pid: 11, tid: 13 });
        assert_eq!([10, 11, 12].map(|pid| ledger.has_one_thread(pid)), [true, false, false]);
    }

    /// Does a process live until its last thread ends, and is the number of one that ended free for another?
    #[test]
    fn a_process_lives_as_long_as_a_thread() {
        let mut ledger =
            ledger_after(&[birth_event(5, 10), ProcessEvent::ThreadBirth { pid: 10, tid: 11 }, exit_event(10, 10)]);
        assert_eq!(ledger.unread(), [10]);
        ledger.record(exit_event(10, 11));
        assert_eq!((ledger.unread(), ledger.take_ended_leaders()), (Vec::new(), BTreeSet::new()));
        ledger.record(birth_event(5, 10));
        assert_eq!(ledger.unread(), [10]);
        ledger.remove_read(10);
        ledger.record(exit_event(10, 10));
        assert_eq!(ledger.take_ended_leaders(), BTreeSet::from([10]));
        assert!(ledger.is_rethreaded(10) && !ledger.is_rethreaded(5));
    }

    /// Are events beyond the bound forgotten, and the ledger incomplete until the next listing?
    #[test]
    fn too_many_events_need_a_listing() {
        let mut ledger = ledger_after(&[]);
        (1..=MAX_ENTRIES as i32 + 1).for_each(|pid| ledger.record(birth_event(1, pid)));
        assert!(!ledger.is_complete() && ledger.unread().is_empty() && ledger.is_rethreaded(5));
        ledger.add_listed([7], true);
        assert!(ledger.is_complete() && ledger.unread() == [7]);
    }
}
