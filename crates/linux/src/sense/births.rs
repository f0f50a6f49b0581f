//! Processes that started, changed or ended since the last refresh, according to the kernel's events.
//!
//! Problem: on a host with a thousand short programs a second, reading each of them costs more than managing all
//! others. Method: events are recorded as they arrive. A process that ends before a refresh has read it is only
//! counted, for the nearest ancestor that was read. A child is assumed to have its parent's user until an event reports
//! a change. Property: after a loss of events the ledger is incomplete, until a listing of all processes completes it
//! again.

use std::collections::{BTreeMap, BTreeSet};

use crate::kernel::process_events::ProcessEvent;

/// Maximum number of entries: beyond it, a listing is cheaper, and memory must stay bounded.
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
    /// Threads that started after the last refresh and are still alive.
    pub started_tids: BTreeSet<i32>,
    /// Threads that ended, and had started before the last refresh.
    pub ended_tids: BTreeSet<i32>,
}

/// Births, changes and exits since the last refresh.
#[derive(Debug, Default)]
pub struct BirthLedger {
    unread_processes: BTreeMap<i32, UnreadProcess>,
    ended_unread_counts: BTreeMap<i32, u64>,
    changed_pids: BTreeSet<i32>,
    user_changed_pids: BTreeSet<i32>,
    thread_changes_by_pid: BTreeMap<i32, ThreadChanges>,
    /// Number of thread births and exits in `thread_changes_by_pid`.
    thread_change_count: usize,
    ended_leader_pids: BTreeSet<i32>,
    is_complete: bool,
}

impl BirthLedger {
    /// Records an event.
    pub fn record(&mut self, event: ProcessEvent) {
        match event {
            ProcessEvent::ProcessStart {
                parent_pid: parent,
                pid,
            } => {
                let (ancestor, has_ancestors_user) = match self.unread_processes.get(&parent) {
                    Some(parent) => (parent.ancestor, parent.has_ancestors_user),
                    None => (parent, true),
                };
                self.unread_processes.insert(
                    pid,
                    UnreadProcess {
                        ancestor,
                        live_threads: 1,
                        has_ancestors_user,
                        is_deferred: false,
                    },
                );
            }
            ProcessEvent::ThreadStart { pid, tid } => match self.unread_processes.get_mut(&pid) {
                Some(process) => process.live_threads += 1,
                None => {
                    self.thread_change_count += 1;
                    self.thread_changes_by_pid
                        .entry(pid)
                        .or_default()
                        .started_tids
                        .insert(tid);
                }
            },
            ProcessEvent::ProgramChange { pid } => _ = self.changed_pids.insert(pid),
            ProcessEvent::UserChange { pid } => {
                self.changed_pids.insert(pid);
                self.user_changed_pids.insert(pid);
                self.unread_processes
                    .get_mut(&pid)
                    .into_iter()
                    .for_each(|process| process.has_ancestors_user = false);
            }
            ProcessEvent::Exit { pid, tid } => match self.unread_processes.get_mut(&pid) {
                Some(process) if process.live_threads > 1 => process.live_threads -= 1,
                Some(_) => self.count_ended(pid),
                None => {
                    self.thread_change_count += 1;
                    let changes = self.thread_changes_by_pid.entry(pid).or_default();
                    if !changes.started_tids.remove(&tid) {
                        changes.ended_tids.insert(tid);
                    }
                    if tid == pid {
                        self.ended_leader_pids.insert(pid);
                    }
                }
            },
        }
        let change_count = self.changed_pids.len()
            + self.user_changed_pids.len()
            + self.thread_change_count
            + self.ended_leader_pids.len();
        if self.unread_processes.len() + self.ended_unread_counts.len() + change_count > MAX_ENTRIES
        {
            self.forget();
        }
    }

    /// Counts an unread process as ended.
    pub fn count_ended(&mut self, pid: i32) {
        self.changed_pids.remove(&pid);
        if let Some(process) = self.unread_processes.remove(&pid) {
            *self
                .ended_unread_counts
                .entry(process.ancestor)
                .or_default() += 1;
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

    /// Adds the listed processes that no refresh has read yet. `has_events` states whether events will report all later
    /// ones.
    pub fn add_listed(&mut self, pids: impl IntoIterator<Item = i32>, has_events: bool) {
        for pid in pids {
            let unread_process = UnreadProcess {
                ancestor: 0,
                live_threads: 1,
                has_ancestors_user: false,
                is_deferred: true,
            };
            self.unread_processes.entry(pid).or_insert(unread_process);
        }
        self.is_complete = has_events;
    }

    /// Processes to be read, ascending.
    pub fn unread_pids(&self) -> Vec<i32> {
        self.unread_processes.keys().copied().collect()
    }

    /// Leaves a process that was born since the last refresh to the next one, so that short programs that hardly run
    /// are only counted. It has the affinity and the control groups of its parent until then. Returns false if its turn
    /// has come.
    pub fn defer(&mut self, pid: i32) -> bool {
        self.unread_processes
            .get_mut(&pid)
            .is_some_and(|process| !std::mem::replace(&mut process.is_deferred, true))
    }

    /// Whether events show that an unread process has a single thread.
    pub fn has_one_thread(&self, pid: i32) -> bool {
        self.is_complete
            && self
                .unread_processes
                .get(&pid)
                .is_some_and(|process| process.ancestor > 0 && process.live_threads == 1)
    }

    /// Removes a process that was read, or that must not be read, from the unread processes.
    pub fn remove_unread(&mut self, pid: i32) {
        self.unread_processes.remove(&pid);
    }

    /// Whether a process has another program, user or name than at the last refresh.
    pub fn is_changed(&self, pid: i32) -> bool {
        self.changed_pids.contains(&pid)
    }

    /// Whether a process may have another user than at the last refresh.
    pub fn may_have_new_user(&self, pid: i32) -> bool {
        !self.is_complete || self.user_changed_pids.contains(&pid)
    }

    /// The ancestor whose user, as read by the last refresh, is also the user of this unread process; `None` if
    /// unknown.
    pub fn ancestor_with_user(&self, pid: i32) -> Option<i32> {
        let process = self
            .unread_processes
            .get(&pid)
            .filter(|process| process.has_ancestors_user)?;
        (!self.may_have_new_user(process.ancestor)).then_some(process.ancestor)
    }

    /// Whether a process may have other threads than at the last refresh.
    pub fn may_have_new_threads(&self, pid: i32) -> bool {
        !self.is_complete || self.thread_changes_by_pid.contains_key(&pid)
    }

    /// The threads of a process that began and ended since the last refresh; `None` if unknown.
    pub fn thread_changes(&self, pid: i32) -> Option<ThreadChanges> {
        self.is_complete.then(|| {
            self.thread_changes_by_pid
                .get(&pid)
                .cloned()
                .unwrap_or_default()
        })
    }

    /// Takes the processes whose first thread has ended; their other threads may still be alive.
    pub fn take_ended_leaders(&mut self) -> BTreeSet<i32> {
        std::mem::take(&mut self.ended_leader_pids)
    }

    /// Takes the numbers of programs that ended unread, by their ancestors.
    pub fn take_ended_unread(&mut self) -> BTreeMap<i32, u64> {
        std::mem::take(&mut self.ended_unread_counts)
    }

    /// Forgets the changes that this refresh has read.
    pub fn finish_refresh(&mut self) {
        for process in self.unread_processes.values_mut() {
            process.has_ancestors_user &= !self.user_changed_pids.contains(&process.ancestor);
        }
        self.changed_pids.clear();
        self.user_changed_pids.clear();
        self.thread_changes_by_pid.clear();
        self.thread_change_count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn birth_event(parent: i32, pid: i32) -> ProcessEvent {
        ProcessEvent::ProcessStart {
            parent_pid: parent,
            pid,
        }
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
        assert_eq!(ledger.unread_pids(), [12, 13]);
        assert_eq!(ledger.take_ended_unread(), BTreeMap::from([(5, 2)]));
        assert_eq!(ledger.take_ended_unread(), BTreeMap::new());
    }

    /// Does a child have its ancestor's user, unless one of them, or a process between them, has changed its user?
    #[test]
    fn a_child_has_its_ancestors_user() {
        let mut ledger = ledger_after(&[
            birth_event(5, 10),
            birth_event(10, 11),
            birth_event(6, 12),
            birth_event(7, 14),
        ]);
        ledger.record(ProcessEvent::UserChange { pid: 10 });
        for event in [birth_event(10, 13), ProcessEvent::UserChange { pid: 7 }] {
            ledger.record(event);
        }
        let users = [10, 11, 12, 13, 14].map(|pid| ledger.ancestor_with_user(pid));
        assert_eq!(users, [None, Some(5), Some(6), None, None]);
        assert!(
            ledger.is_changed(10) && ledger.may_have_new_user(7) && !ledger.may_have_new_user(6)
        );
        ledger.finish_refresh();
        assert!(!ledger.may_have_new_user(7));
    }

    /// Is a newborn process left to the next refresh once, and a listed one never; and does a child not get the user
    /// that its ancestor took on before the child was read?
    #[test]
    fn a_newborn_process_is_deferred_once() {
        let mut ledger = ledger_after(&[
            birth_event(5, 10),
            birth_event(7, 11),
            ProcessEvent::UserChange { pid: 7 },
        ]);
        ledger.add_listed([12], true);
        assert_eq!(
            [10, 11, 12].map(|pid| ledger.defer(pid)),
            [true, true, false]
        );
        ledger.finish_refresh();
        assert_eq!(
            [10, 11].map(|pid| ledger.ancestor_with_user(pid)),
            [Some(5), None]
        );
        assert_eq!([10, 11].map(|pid| ledger.defer(pid)), [false, false]);
        assert_eq!(ledger.unread_pids(), [10, 11, 12]);
        ledger.record(ProcessEvent::ThreadStart { pid: 11, tid: 13 });
        assert_eq!(
            [10, 11, 12].map(|pid| ledger.has_one_thread(pid)),
            [true, false, false]
        );
    }

    /// Does a process live until its last thread ends, and can another process then reuse its pid?
    #[test]
    fn a_process_lives_until_its_last_thread_ends() {
        let mut ledger = ledger_after(&[
            birth_event(5, 10),
            ProcessEvent::ThreadStart { pid: 10, tid: 11 },
            exit_event(10, 10),
        ]);
        assert_eq!(ledger.unread_pids(), [10]);
        ledger.record(exit_event(10, 11));
        assert_eq!(
            (ledger.unread_pids(), ledger.take_ended_leaders()),
            (Vec::new(), BTreeSet::new())
        );
        ledger.record(birth_event(5, 10));
        assert_eq!(ledger.unread_pids(), [10]);
        ledger.remove_unread(10);
        ledger.record(exit_event(10, 10));
        assert_eq!(ledger.take_ended_leaders(), BTreeSet::from([10]));
        assert!(ledger.may_have_new_threads(10) && !ledger.may_have_new_threads(5));
    }

    /// Are events beyond the bound forgotten, and the ledger incomplete until the next listing?
    #[test]
    fn events_beyond_the_bound_require_a_new_listing() {
        let mut ledger = ledger_after(&[]);
        (1..=MAX_ENTRIES as i32 + 1).for_each(|pid| ledger.record(birth_event(1, pid)));
        assert!(
            !ledger.is_complete()
                && ledger.unread_pids().is_empty()
                && ledger.may_have_new_threads(5)
        );
        ledger.add_listed([7], true);
        assert!(ledger.is_complete() && ledger.unread_pids() == [7]);
    }
}
