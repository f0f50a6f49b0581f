//! Threads of large processes that have not run for a while.
//!
//! Problem: of a server's ten thousand threads only a few run, but every stage of the loop costs time for each task.
//! Method: a thread of a large process that does not run is set aside. It is no task, but its identity and its times
//! are kept. Property: the refresh that finds that it has run makes it a task with a new id; when it is set aside
//! again, the task counts as exited. Its originals stay in the journal.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{ProcessId, ServiceIdentity};

use super::{ManagedThread, TaskTable, ThreadUsage};
use crate::kernel::ThreadKey;

/// Maximum number of threads of a process that are all tasks.
pub(super) const MAX_LISTED_THREADS: usize = 32;
/// Number of refreshes after which a thread that has not run is set aside.
const IDLE_REFRESHES: u32 = 50;

/// Idle threads of all processes.
#[derive(Clone, Debug, Default)]
pub(super) struct IdleThreads {
    by_process: BTreeMap<i32, BTreeMap<i32, ManagedThread>>,
    idle_keys: BTreeSet<ThreadKey>,
    /// Processor time of the idle threads of each process.
    ran_ns: BTreeMap<i32, u64>,
    /// Threads that this refresh has found for the first time and set aside: process and thread.
    arrivals: Vec<(i32, i32)>,
    /// Threads that run again since this refresh, with the totals from before.
    woken_threads: Vec<(ThreadKey, ThreadUsage)>,
}

impl IdleThreads {
    pub(super) fn begin_refresh(&mut self) {
        self.arrivals.clear();
        self.woken_threads.clear();
    }

    pub(super) fn insert(&mut self, thread: ManagedThread, is_new: bool) {
        let (pid, tid) = (thread.pid, thread.thread.tid);
        self.remove(pid, tid);
        if is_new {
            self.arrivals.push((pid, tid));
        }
        self.idle_keys.insert(thread.thread);
        *self.ran_ns.entry(pid).or_default() += thread.usage.ran_ns.unwrap_or(0);
        self.by_process.entry(pid).or_default().insert(tid, thread);
    }

    pub(super) fn find(&self, pid: i32, tid: i32) -> Option<&ManagedThread> {
        self.by_process.get(&pid)?.get(&tid)
    }

    pub(super) fn remove(&mut self, pid: i32, tid: i32) -> Option<ManagedThread> {
        let threads = self.by_process.get_mut(&pid)?;
        let thread = threads.remove(&tid)?;
        self.idle_keys.remove(&thread.thread);
        if let Some(ran_ns) = self.ran_ns.get_mut(&pid) {
            *ran_ns = ran_ns.saturating_sub(thread.usage.ran_ns.unwrap_or(0));
        }
        if threads.is_empty() {
            self.remove_process(pid);
        }
        Some(thread)
    }

    /// Removes a thread that becomes a task, and returns its totals; `None` if it was not idle, or another thread had
    /// its id.
    pub(super) fn wake(&mut self, pid: i32, thread: ThreadKey) -> Option<ThreadUsage> {
        let idle_thread = self
            .remove(pid, thread.tid)
            .filter(|idle| idle.thread == thread)?;
        self.woken_threads.push((thread, idle_thread.usage));
        Some(idle_thread.usage)
    }

    /// Drops the threads of a process, and returns them.
    pub(super) fn remove_process(&mut self, pid: i32) -> Vec<ManagedThread> {
        self.ran_ns.remove(&pid);
        let threads: Vec<ManagedThread> = self
            .by_process
            .remove(&pid)
            .into_iter()
            .flat_map(BTreeMap::into_values)
            .collect();
        threads
            .iter()
            .for_each(|thread| _ = self.idle_keys.remove(&thread.thread));
        threads
    }

    /// Drops the threads of all other processes.
    pub(super) fn retain_processes(&mut self, is_retained: impl Fn(i32, ProcessId) -> bool) {
        let dropped_pid = |(pid, threads): (&i32, &BTreeMap<i32, ManagedThread>)| {
            threads
                .values()
                .next()
                .is_none_or(|thread| !is_retained(*pid, thread.process))
                .then_some(*pid)
        };
        let dropped_pids: Vec<i32> = self.by_process.iter().filter_map(dropped_pid).collect();
        dropped_pids
            .into_iter()
            .for_each(|pid| _ = self.remove_process(pid));
    }

    pub(super) fn threads_mut(&mut self, pid: i32) -> impl Iterator<Item = &mut ManagedThread> {
        self.by_process
            .get_mut(&pid)
            .into_iter()
            .flat_map(BTreeMap::values_mut)
    }

    /// The threads of a process, in ascending order.
    pub(super) fn tids(&self, pid: i32) -> Vec<i32> {
        self.by_process
            .get(&pid)
            .into_iter()
            .flat_map(BTreeMap::keys)
            .copied()
            .collect()
    }

    pub(super) fn thread_count(&self, pid: i32) -> usize {
        self.by_process.get(&pid).map_or(0, BTreeMap::len)
    }

    pub(super) fn pids(&self) -> Vec<i32> {
        self.by_process.keys().copied().collect()
    }

    pub(super) fn ran_ns(&self, pid: i32) -> u64 {
        self.ran_ns.get(&pid).copied().unwrap_or(0)
    }

    pub(super) fn contains(&self, thread: ThreadKey) -> bool {
        self.idle_keys.contains(&thread)
    }
}

impl TaskTable {
    /// Makes idle those threads of large processes that have not run for a while. Each leaves as an exited task.
    pub(super) fn retire_idle_threads(&mut self) {
        let mut active_counts: BTreeMap<i32, usize> = BTreeMap::new();
        for task in self.by_thread.values().filter(|task| !task.has_exited) {
            *active_counts.entry(task.pid).or_default() += 1;
        }
        active_counts.retain(|pid, count| {
            *count + self.idle_threads.thread_count(*pid) > MAX_LISTED_THREADS
        });
        if active_counts.is_empty() {
            return;
        }
        for task in self
            .by_thread
            .values_mut()
            .filter(|task| !task.has_exited && active_counts.contains_key(&task.pid))
        {
            let is_idle = self.refresh_count.wrapping_sub(task.ran_in_refresh) >= IDLE_REFRESHES;
            if is_idle && task.cpu.is_none() && task.thread.tid != task.pid {
                self.idle_threads.insert(task.clone(), false);
                task.has_exited = true;
            }
        }
    }

    /// Threads that the last refresh found for the first time and set aside at once. They may have inherited settings
    /// of cachemate.
    pub fn new_idle_threads(&self) -> Vec<&ManagedThread> {
        let arrivals = self.idle_threads.arrivals.iter();
        arrivals
            .filter_map(|(pid, tid)| self.idle_threads.by_process.get(pid)?.get(tid))
            .collect()
    }

    /// All threads that are set aside.
    pub fn idle_threads(&self) -> impl Iterator<Item = &ManagedThread> {
        self.idle_threads
            .by_process
            .values()
            .flat_map(BTreeMap::values)
    }

    /// Threads that have run again, with their totals from before.
    pub fn woken_usage(&self) -> &[(ThreadKey, ThreadUsage)] {
        &self.idle_threads.woken_threads
    }

    /// Number of threads of each service that are set aside.
    pub fn idle_counts(&self) -> BTreeMap<ServiceIdentity, u32> {
        let mut counts = BTreeMap::new();
        for threads in self.idle_threads.by_process.values() {
            if let Some(thread) = threads.values().next() {
                *counts.entry(thread.service_or_command()).or_default() += threads.len() as u32;
            }
        }
        counts
    }
}
