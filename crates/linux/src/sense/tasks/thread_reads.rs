//! Threads of the processes that ran since the last refresh.
//!
//! Problem: one thread of ten thousand runs, and reading all of them takes as long as a window. Method: a large process
//! has an account: its processor time is that of its live threads and of those that ended. Threads are read that ran
//! last, and then others until the account is settled. Property: a thread that ran is read in the same refresh, unless
//! running threads hide its time for now, or hundreds of others are tried before it; then one of the next refreshes adds
//! its time.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{CpuId, TaskId};

use super::{ManagedThread, TaskTable, ThreadUsage};
use crate::kernel::{Kernel, ThreadKey, ThreadStat, is_gone};
use crate::sense::thread_counts::{read_calls, read_schedstat};

/// Maximum number of threads of a process that are all read whenever it ran.
const MAX_READ_THREADS: usize = 32;
/// Number of refreshes over which every thread of a larger process is read once, whatever its account says.
const THREAD_TURNS: u32 = 128;
/// Maximum number of threads that are read in one refresh to find those that ran.
const MAX_SEARCHED_THREADS: usize = 500;

impl TaskTable {
    /// Reads the threads of the processes that ran, and marks those that have ended.
    pub(super) fn read_threads(&mut self, kernel: &dyn Kernel, now_ns: u64) {
        let mut earlier_threads: BTreeMap<i32, Vec<ThreadKey>> = BTreeMap::new();
        let processes = self.processes.iter().filter(|(_, process)| process.id.is_some());
        let managed: BTreeSet<i32> = processes.map(|(&pid, _)| pid).collect();
        for task in self.by_thread.values_mut().filter(|task| !task.has_exited) {
            if !managed.contains(&task.pid) {
                task.has_exited = true;
            } else if !self.asleep.contains(&task.pid) {
                earlier_threads.entry(task.pid).or_default().push(task.thread);
            }
        }
        for pid in managed.into_iter().filter(|pid| !self.asleep.contains(pid)).collect::<Vec<_>>() {
            self.read_process(kernel, pid, &earlier_threads.remove(&pid).unwrap_or_default(), now_ns);
        }
    }

    fn read_process(&mut self, kernel: &dyn Kernel, pid: i32, earlier: &[ThreadKey], now_ns: u64) {
        let Some(process) = self.processes.get(&pid) else { return };
        let is_unchanged = earlier.contains(&process.leader) && !self.births.is_rethreaded(pid);
        let is_single = self.leaders.get(&pid).is_some_and(|stat| stat.threads == 1);
        if is_unchanged
            && earlier.len() > MAX_READ_THREADS
            && let Some(ended_ran_ns) = process.ended_ran_ns
        {
            return self.read_active_threads(kernel, pid, earlier, ended_ran_ns, now_ns);
        }
        let tids = match () {
            () if is_single => vec![pid],
            () if is_unchanged => earlier.iter().map(|thread| thread.tid).collect(),
            () => match kernel.threads(pid) {
                Ok(tids) => tids,
                Err(error) if is_gone(&error) => Vec::new(),
                // A thread that cannot be read has not necessarily exited.
                Err(_) => return,
            },
        };
        let mut ended: BTreeSet<ThreadKey> = earlier.iter().copied().collect();
        let mut live_ran_ns = Some(0u64);
        for &tid in &tids {
            match self.read_thread(kernel, pid, tid, now_ns) {
                ThreadReadOutcome::Live { thread, usage } => {
                    ended.remove(&thread);
                    live_ran_ns = live_ran_ns.zip(usage.ran_ns).and_then(|(sum, ran_ns)| sum.checked_add(ran_ns));
                }
                ThreadReadOutcome::Ended => {}
                ThreadReadOutcome::Unknown => ended.retain(|thread| thread.tid != tid),
            }
        }
        self.mark_exited(ended);
        if tids.len() > MAX_READ_THREADS
            && let Some(process) = self.processes.get_mut(&pid)
        {
            // Read after the threads, so that it includes their time.
            let ran_ns = kernel.run_time_ns(pid).ok();
            process.ended_ran_ns = ran_ns.zip(live_ran_ns).and_then(|(ran_ns, live_ns)| ran_ns.checked_sub(live_ns));
        }
    }

    /// Reads the threads of a large process that ran last, and others until its processor time is accounted for.
    fn read_active_threads(
        &mut self,
        kernel: &dyn Kernel,
        pid: i32,
        threads: &[ThreadKey],
        ended_ran_ns: u64,
        now_ns: u64,
    ) {
        let turn = self.refreshes % THREAD_TURNS;
        let mut accounted_ns = ended_ran_ns;
        let (mut due, mut others) = (Vec::new(), Vec::new());
        for thread in threads {
            let Some(task) = self.by_thread.get(thread) else { continue };
            accounted_ns = accounted_ns.saturating_add(task.usage.ran_ns.unwrap_or(0));
            let ran_last = self.refreshes.wrapping_sub(task.ran_in_refresh) <= 1 || task.cpu.is_some();
            let list = if ran_last || thread.tid as u32 % THREAD_TURNS == turn { &mut due } else { &mut others };
            list.push(*thread);
        }
        let ran_ns = self.processes.get(&pid).and_then(|process| process.ran_ns).unwrap_or(0);
        let mut missing_ns = ran_ns.saturating_sub(accounted_ns);
        let first = (self.refreshes as usize * MAX_SEARCHED_THREADS).checked_rem(others.len()).unwrap_or(0);
        others.rotate_left(first);
        let searched = due.len() + MAX_SEARCHED_THREADS.min(others.len());
        for (index, thread) in due.iter().chain(&others).take(searched).enumerate() {
            if index >= due.len() && missing_ns == 0 {
                break;
            }
            let earlier_ns = self.by_thread.get(thread).and_then(|task| task.usage.ran_ns).unwrap_or(0);
            match self.read_thread(kernel, pid, thread.tid, now_ns) {
                ThreadReadOutcome::Live { thread: live, usage } if live == *thread => {
                    missing_ns = missing_ns.saturating_sub(usage.ran_ns.unwrap_or(0).saturating_sub(earlier_ns));
                }
                ThreadReadOutcome::Unknown => {}
                ThreadReadOutcome::Live { .. } | ThreadReadOutcome::Ended => self.mark_exited([*thread]),
            }
        }
    }

    fn mark_exited(&mut self, ended: impl IntoIterator<Item = ThreadKey>) {
        for thread in ended {
            self.by_thread.get_mut(&thread).into_iter().for_each(|task| task.has_exited = true);
        }
    }

    fn read_thread(&mut self, kernel: &dyn Kernel, pid: i32, tid: i32, now_ns: u64) -> ThreadReadOutcome {
        let stat = match self.leaders.remove(&tid).map_or_else(|| kernel.stat(tid), Ok) {
            Ok(stat) => stat,
            Err(error) if is_gone(&error) => return ThreadReadOutcome::Ended,
            Err(_) => return ThreadReadOutcome::Unknown,
        };
        let is_task = !matches!(stat.state, 'Z' | 'X')
            && self.processes.get(&pid).is_some_and(|process| !process.emulates(&stat));
        let usage = if is_task { self.upsert(kernel, pid, &stat, now_ns) } else { None };
        usage.map_or(ThreadReadOutcome::Ended, |usage| ThreadReadOutcome::Live { thread: stat.key, usage })
    }

    /// Records a thread's state, and reads its usage.
    fn upsert(&mut self, kernel: &dyn Kernel, pid: i32, stat: &ThreadStat, now_ns: u64) -> Option<ThreadUsage> {
        let process = self.processes.get(&pid)?;
        let id = process.id?;
        let next_task = &mut self.next_task;
        let task = self.by_thread.entry(stat.key).or_insert_with(|| {
            *next_task += 1;
            ManagedThread {
                task: TaskId(*next_task - 1),
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
                nice: stat.nice,
                has_exited: false,
                ran_in_refresh: self.refreshes,
            }
        });
        if task.name != stat.name {
            task.name.clone_from(&stat.name);
        }
        task.last_cpu = Some(CpuId(stat.cpu));
        task.cpu = task.last_cpu.filter(|_| stat.state == 'R');
        let earlier = task.usage;
        let (ran_ns, waited_ns, slices) = read_schedstat(kernel, pid, stat.key.tid);
        let faults = stat.minor_faults.saturating_add(stat.major_faults);
        // A thread that has not run since the last refresh has made no calls either.
        let has_slept = ran_ns.is_some() && earlier.ran_ns == ran_ns;
        let calls = if !self.counts_calls || has_slept { earlier.calls } else { read_calls(kernel, pid, stat.key.tid) };
        task.usage = ThreadUsage { ran_ns, waited_ns, slices, faults, calls };
        if !has_slept {
            task.ran_in_refresh = self.refreshes;
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
