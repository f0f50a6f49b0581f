//! Threads of the processes that ran since the last refresh.
//!
//! Problem: one thread of ten thousand runs, and reading all of them takes as long as a window. Method: a large process
//! has an account: its processor time is that of its live threads and of those that ended. The threads that ran last
//! are read first, and then others until the account balances. Property: a thread that ran is read in the same refresh,
//! unless running threads hide its time for now, or hundreds of others are tried before it; then one of the next
//! refreshes adds its time.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{CpuId, TaskId};

use super::idle_threads::MAX_LISTED_THREADS;
use super::{HARDLY_RUNS_DIVISOR, ManagedThread, TaskTable, ThreadUsage};
use crate::kernel::{Kernel, ThreadKey, ThreadStat, is_gone};
use crate::sense::births::ThreadChanges;
use crate::sense::thread_counts::{read_calls, read_schedstat};

/// Number of refreshes over which every thread of a larger process is read once, whatever its account says.
const THREAD_READ_PERIOD: u32 = 128;
/// A thread that runs or waits to run for at least this part of the time is busy. It is half of what a measure of speed
/// needs, so that its first total is known by then.
const BUSY_DIVISOR: u64 = 4;
/// Maximum number of threads that are read in one refresh to find those that ran.
const MAX_SEARCHED_THREADS: usize = 500;

impl TaskTable {
    /// Reads the threads of the processes that ran, and marks those that have ended.
    pub(super) fn read_threads(&mut self, kernel: &dyn Kernel, now_ns: u64) {
        let mut earlier_threads: BTreeMap<i32, Vec<ThreadKey>> = BTreeMap::new();
        let processes = self
            .processes
            .iter()
            .filter(|(_, process)| process.id.is_some());
        let managed_pids: BTreeSet<i32> = processes.map(|(&pid, _)| pid).collect();
        for task in self.by_thread.values_mut().filter(|task| !task.has_exited) {
            if !managed_pids.contains(&task.pid) {
                task.has_exited = true;
            } else if !self.sleeping_pids.contains(&task.pid) {
                earlier_threads
                    .entry(task.pid)
                    .or_default()
                    .push(task.thread);
            }
        }
        // A process with another first thread is another one, whose threads are read below.
        self.idle_threads.retain_processes(|pid, process| {
            self.processes
                .get(&pid)
                .is_some_and(|current| current.id == Some(process))
        });
        for pid in managed_pids
            .into_iter()
            .filter(|pid| !self.sleeping_pids.contains(pid))
            .collect::<Vec<_>>()
        {
            self.read_process(
                kernel,
                pid,
                &earlier_threads.remove(&pid).unwrap_or_default(),
                now_ns,
            );
        }
        self.retire_idle_threads();
    }

    fn read_process(
        &mut self,
        kernel: &dyn Kernel,
        pid: i32,
        earlier_threads: &[ThreadKey],
        now_ns: u64,
    ) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let leader = process.leader;
        let idle_count = self.idle_threads.thread_count(pid);
        let is_large = earlier_threads.len() + idle_count > MAX_LISTED_THREADS;
        if is_large
            && earlier_threads.contains(&leader)
            && let Some(ended_ran_ns) = process.exited_threads_ns
            && let Some(changes) = self.births.thread_changes(pid)
        {
            return self.read_active_threads(
                kernel,
                pid,
                earlier_threads,
                &changes,
                ended_ran_ns,
                now_ns,
            );
        }
        let is_unchanged = idle_count == 0
            && earlier_threads.contains(&leader)
            && !self.births.may_have_new_threads(pid);
        let is_single = self
            .leader_stats
            .get(&pid)
            .is_some_and(|stat| stat.threads == 1);
        let tids = match () {
            () if is_single => vec![pid],
            () if is_unchanged => earlier_threads.iter().map(|thread| thread.tid).collect(),
            () => match kernel.threads(pid) {
                Ok(tids) => tids,
                Err(error) if is_gone(&error) => Vec::new(),
                // A thread that cannot be read has not necessarily exited.
                Err(_) => return,
            },
        };
        let mut missing_threads: BTreeSet<ThreadKey> = earlier_threads.iter().copied().collect();
        let mut live_ran_ns = Some(0u64);
        for &tid in &tids {
            match self.read_thread(kernel, pid, tid, now_ns) {
                ThreadReadOutcome::Live { thread, usage } => {
                    missing_threads.remove(&thread);
                    live_ran_ns = live_ran_ns
                        .zip(usage.ran_ns)
                        .and_then(|(sum, ran_ns)| sum.checked_add(ran_ns));
                }
                ThreadReadOutcome::Ended => {}
                ThreadReadOutcome::Unknown => missing_threads.retain(|thread| thread.tid != tid),
            }
        }
        self.mark_exited(missing_threads);
        for tid in self
            .idle_threads
            .tids(pid)
            .into_iter()
            .filter(|tid| tids.binary_search(tid).is_err())
        {
            self.idle_threads.remove(pid, tid);
        }
        if tids.len() > MAX_LISTED_THREADS
            && let Some(process) = self.processes.get_mut(&pid)
        {
            // Read after the threads, so that it includes their time.
            let ran_ns = kernel.run_time_ns(pid).ok();
            process.exited_threads_ns = ran_ns
                .zip(live_ran_ns)
                .and_then(|(ran_ns, live_ns)| ran_ns.checked_sub(live_ns));
        }
    }

    /// Reads the threads of a large process that are new or ran last, and others until its processor time is accounted
    /// for.
    fn read_active_threads(
        &mut self,
        kernel: &dyn Kernel,
        pid: i32,
        threads: &[ThreadKey],
        changes: &ThreadChanges,
        ended_ran_ns: u64,
        now_ns: u64,
    ) {
        self.mark_exited(
            threads
                .iter()
                .copied()
                .filter(|thread| changes.ended_tids.contains(&thread.tid)),
        );
        changes
            .ended_tids
            .iter()
            .for_each(|tid| _ = self.idle_threads.remove(pid, *tid));
        let read_phase = self.refresh_count % THREAD_READ_PERIOD;
        let is_read_due = |tid: i32| tid as u32 % THREAD_READ_PERIOD == read_phase;
        let mut due_tids: BTreeSet<i32> = changes.started_tids.clone();
        let mut other_tids = Vec::new();
        for thread in threads {
            let Some(task) = self.by_thread.get(thread).filter(|task| !task.has_exited) else {
                continue;
            };
            let has_run_recently =
                self.refresh_count.wrapping_sub(task.ran_in_refresh) <= 1 || task.cpu.is_some();
            if has_run_recently || is_read_due(thread.tid) {
                due_tids.insert(thread.tid);
            } else {
                other_tids.push(thread.tid);
            }
        }
        let (idle_due, idle_others) = self
            .idle_threads
            .tids(pid)
            .into_iter()
            .partition::<Vec<i32>, _>(|tid| is_read_due(*tid));
        due_tids.extend(idle_due);
        other_tids.extend(idle_others);
        let start_index = (self.refresh_count as usize * MAX_SEARCHED_THREADS)
            .checked_rem(other_tids.len())
            .unwrap_or(0);
        other_tids.rotate_left(start_index);
        let keys_by_tid: BTreeMap<i32, ThreadKey> =
            threads.iter().map(|thread| (thread.tid, *thread)).collect();
        for tid in &due_tids {
            self.reread_thread(kernel, pid, *tid, keys_by_tid.get(tid).copied(), now_ns);
        }
        let ran_ns = self
            .processes
            .get(&pid)
            .and_then(|process| process.ran_ns)
            .unwrap_or(0);
        let live_tasks = self
            .by_thread
            .values()
            .filter(|task| task.pid == pid && !task.has_exited);
        let live_ns: u64 = live_tasks.filter_map(|task| task.usage.ran_ns).sum::<u64>()
            + self.idle_threads.ran_ns(pid);
        if !changes.ended_tids.is_empty() {
            // The final run time of exited threads cannot be read, so all missing time is attributed to them.
            if let Some(process) = self.processes.get_mut(&pid) {
                process.exited_threads_ns = Some(ran_ns.saturating_sub(live_ns).max(ended_ran_ns));
            }
            return;
        }
        let mut missing_ns = ran_ns.saturating_sub(ended_ran_ns.saturating_add(live_ns));
        for tid in other_tids.into_iter().take(MAX_SEARCHED_THREADS) {
            if missing_ns == 0 {
                break;
            }
            let added_ns =
                self.reread_thread(kernel, pid, tid, keys_by_tid.get(&tid).copied(), now_ns);
            missing_ns = missing_ns.saturating_sub(added_ns);
        }
    }

    /// Reads one thread of a large process, and returns its processor time since it was read before. `task` is its key
    /// if it is a task.
    fn reread_thread(
        &mut self,
        kernel: &dyn Kernel,
        pid: i32,
        tid: i32,
        task: Option<ThreadKey>,
        now_ns: u64,
    ) -> u64 {
        let usage = match task {
            Some(thread) => self.by_thread.get(&thread).map(|task| task.usage),
            None => self.idle_threads.find(pid, tid).map(|idle| idle.usage),
        };
        let earlier_ns = usage.and_then(|usage| usage.ran_ns);
        // For an idle thread, the smaller file shows whether it has run.
        if task.is_none()
            && earlier_ns.is_some()
            && read_schedstat(kernel, pid, tid).0 == earlier_ns
        {
            return 0;
        }
        match self.read_thread(kernel, pid, tid, now_ns) {
            ThreadReadOutcome::Live { thread, usage } => {
                self.mark_exited(task.filter(|task| *task != thread));
                return usage
                    .ran_ns
                    .unwrap_or(0)
                    .saturating_sub(earlier_ns.unwrap_or(0));
            }
            ThreadReadOutcome::Unknown => {}
            ThreadReadOutcome::Ended => {
                self.mark_exited(task);
                self.idle_threads.remove(pid, tid);
            }
        }
        0
    }

    fn mark_exited(&mut self, exited_threads: impl IntoIterator<Item = ThreadKey>) {
        for thread in exited_threads {
            self.by_thread
                .get_mut(&thread)
                .into_iter()
                .for_each(|task| task.has_exited = true);
        }
    }

    fn read_thread(
        &mut self,
        kernel: &dyn Kernel,
        pid: i32,
        tid: i32,
        now_ns: u64,
    ) -> ThreadReadOutcome {
        let stat = match self
            .leader_stats
            .remove(&tid)
            .map_or_else(|| kernel.stat(tid), Ok)
        {
            Ok(stat) => stat,
            Err(error) if is_gone(&error) => return ThreadReadOutcome::Ended,
            Err(_) => return ThreadReadOutcome::Unknown,
        };
        let is_task = !matches!(stat.state, 'Z' | 'X')
            && self
                .processes
                .get(&pid)
                .is_some_and(|process| !process.is_emulator_thread(&stat));
        let usage = if is_task {
            self.record_thread(kernel, pid, &stat, now_ns)
        } else {
            None
        };
        usage.map_or(ThreadReadOutcome::Ended, |usage| ThreadReadOutcome::Live {
            thread: stat.key,
            usage,
        })
    }

    /// Has a thread that is no task hardly run? `idle_thread` is its record if it was idle before.
    fn is_idle(
        &self,
        stat: &ThreadStat,
        pid: i32,
        idle_thread: Option<&ManagedThread>,
        ran_ns: Option<u64>,
    ) -> bool {
        if let Some(idle) = idle_thread {
            return ran_ns.is_some() && ran_ns == idle.usage.ran_ns;
        }
        // A thread that no event has announced may have used its time long ago.
        let changes = self.births.thread_changes(pid);
        let is_new = changes.is_some_and(|threads| threads.started_tids.contains(&stat.key.tid));
        let has_run =
            is_new && ran_ns.is_some_and(|ran_ns| ran_ns > self.elapsed_ns / HARDLY_RUNS_DIVISOR);
        stat.threads as usize > MAX_LISTED_THREADS && !has_run
    }

    /// Records a thread's state, and reads its usage.
    fn record_thread(
        &mut self,
        kernel: &dyn Kernel,
        pid: i32,
        stat: &ThreadStat,
        now_ns: u64,
    ) -> Option<ThreadUsage> {
        let process = self.processes.get(&pid)?;
        let id = process.id?;
        let is_leader = stat.key == process.leader;
        let is_new = self
            .by_thread
            .get(&stat.key)
            .is_none_or(|task| task.has_exited);
        let (ran_ns, waited_ns, slices) = match process.ran_ns {
            // For a new program that hardly ran, its clock suffices.
            ran_ns if is_new && is_leader && stat.threads == 1 && self.has_hardly_run(ran_ns) => {
                (ran_ns, None, None)
            }
            _ => read_schedstat(kernel, pid, stat.key.tid),
        };
        let faults = stat.minor_faults.saturating_add(stat.major_faults);
        if is_new {
            let new_thread = ManagedThread {
                task: TaskId(self.next_task),
                process: id,
                user: process.properties.user,
                pid,
                thread: stat.key,
                parent: stat.parent,
                name: stat.name.clone(),
                program: process.properties.command.clone(),
                service: process.properties.service.clone(),
                image: process.properties.image().map(str::to_string),
                arrived_ns: now_ns,
                goal: process.goal(),
                is_fixed: process.is_fixed(),
                usage: ThreadUsage::default(),
                cpu: None,
                last_cpu: None,
                initial_nice: stat.nice,
                has_exited: false,
                ran_in_refresh: self.refresh_count,
            };
            let idle_thread = self
                .idle_threads
                .find(pid, stat.key.tid)
                .filter(|idle| idle.thread == stat.key);
            if stat.state != 'R' && !is_leader && self.is_idle(stat, pid, idle_thread, ran_ns) {
                let usage = ThreadUsage {
                    ran_ns,
                    waited_ns,
                    slices,
                    faults,
                    calls: None,
                };
                if idle_thread.is_none() {
                    self.idle_threads.insert(
                        ManagedThread {
                            usage,
                            ..new_thread
                        },
                        true,
                    );
                }
                return Some(usage);
            }
            self.next_task += 1;
            let nice = idle_thread.map_or(new_thread.initial_nice, |idle| idle.initial_nice);
            let usage = self.idle_threads.wake(pid, stat.key).unwrap_or_default();
            self.by_thread.insert(
                stat.key,
                ManagedThread {
                    initial_nice: nice,
                    usage,
                    ..new_thread
                },
            );
        }
        let task = self.by_thread.get_mut(&stat.key)?;
        if task.name != stat.name {
            task.name.clone_from(&stat.name);
        }
        task.last_cpu = Some(CpuId(stat.cpu));
        task.cpu = task.last_cpu.filter(|_| stat.state == 'R');
        let previous_usage = task.usage;
        // A thread that has not run since the last refresh has made no calls either. Calls are a measure of speed only
        // for a thread that wants a processor most of the time.
        let has_slept = ran_ns.is_some() && previous_usage.ran_ns == ran_ns;
        let count_since = |now: Option<u64>, earlier: Option<u64>| {
            now.unwrap_or(0).saturating_sub(earlier.unwrap_or(0))
        };
        let runnable_ns = count_since(ran_ns, previous_usage.ran_ns)
            .saturating_add(count_since(waited_ns, previous_usage.waited_ns));
        let calls = match () {
            () if !self.counts_calls || has_slept => previous_usage.calls,
            () if runnable_ns >= self.elapsed_ns / BUSY_DIVISOR => {
                read_calls(kernel, pid, stat.key.tid)
            }
            () => None,
        };
        task.usage = ThreadUsage {
            ran_ns,
            waited_ns,
            slices,
            faults,
            calls,
        };
        if !has_slept {
            task.ran_in_refresh = self.refresh_count;
        }
        Some(task.usage)
    }
}

/// The result of reading a thread.
enum ThreadReadOutcome {
    Live {
        thread: ThreadKey,
        usage: ThreadUsage,
    },
    Ended,
    /// It could not be read.
    Unknown,
}
