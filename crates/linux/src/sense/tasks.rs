//! The managed threads of the host, with dense ids in order of arrival.
//!
//! Problem: pids are reused, threads come and go between two refreshes, and a refresh costs time: with hundreds of
//! threads and windows of a second, reading every `/proc` file of every thread would itself be a load. Method: one
//! listing of `/proc` per refresh; the properties that rules test are read when a process is new, in each of the next
//! refreshes (a shell may be about to become its program), when it runs under another name, and later in every tenth
//! refresh; its control groups are read in every second refresh, or less often if there are hundreds of programs. Per
//! refresh a thread costs one small read (`schedstat`, a file that stays open). Everything else is reread only for
//! processes that ran since the last refresh: a process that did not run was not created, did not exit, has no new
//! threads, and is the same program of the same user. A sixteenth of the unmanaged processes is checked per refresh for a
//! reused pid.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use cachemate_core::{CpuId, Goal, ProcessId, ProfileKey, ServiceIdentity, ServiceKind, TaskId, is_virtual_cpu};

use crate::act::rules::{ManageAction, ManageRule};
use crate::kernel::{CachedFile, Kernel, ThreadKey, ThreadStat, is_gone};
use crate::sense::process_properties::{PropertyReader, RuleProperties, own_service};
use crate::sense::service_directory::ServiceDirectory;
use crate::sense::thread_counts::{SchedstatTimes, calls, parse_times, schedstat, schedstat_path};

/// Number of refreshes over which every unmanaged process is checked once for a reused pid.
const TURNS: u32 = 16;
/// Rules are matched in each refresh up to this age of a process, in refreshes; most programs replace a shell at once.
const YOUNG_REFRESHES: u32 = 10;
/// Number of refreshes in which an older process is matched once.
const MATCH_PERIOD: u32 = 10;
/// Maximum number of files that stay open, because descriptors are few (1024 by default), and counters need some.
const MAX_OPEN_FILES: usize = 400;
/// Number of older processes whose control groups are read in one refresh, if there are too many to read all of them in
/// every second refresh.
const GROUPS_PER_REFRESH: usize = 125;

/// A managed (or observed) thread.
#[derive(Clone, PartialEq, Debug)]
pub struct ManagedThread {
    /// Dense, in order of arrival; never used again.
    pub task: TaskId,
    /// Id of its process, dense as well.
    pub process: ProcessId,
    /// Real user of the process when it was new; `None` = its status could not be read.
    pub user: Option<u32>,
    /// The kernel's id of the process.
    pub pid: i32,
    /// The kernel's id of the thread, with its start time.
    pub thread: ThreadKey,
    /// Parent of the process; if it is managed as well, its originals are inherited.
    pub parent: i32,
    /// Command name at the last refresh since which it ran: 15 bytes at most.
    pub name: String,
    /// Command name of the process, whatever its threads are called.
    pub program: String,
    /// The service of the process; `None` = its command.
    pub service: Option<ServiceIdentity>,
    /// Digest of the image that the program comes from, if a container runtime reports it.
    pub image: Option<String>,
    /// Time of the refresh that found it, since the machine's start.
    pub arrived_ns: u64,
    /// Its goal by the operator's rule; `None` = none.
    pub goal: Option<Goal>,
    /// Whether it is only observed, and never moved.
    pub is_fixed: bool,
    /// Totals at the last refresh.
    pub usage: ThreadUsage,
    /// CPU at the last refresh; `None` = not running.
    pub cpu: Option<CpuId>,
    /// Last CPU, running or not.
    pub last_cpu: Option<CpuId>,
    /// Nice value when the thread was new.
    pub nice: i32,
    /// Whether it had exited by the last refresh; it is kept until this has been reported.
    pub has_exited: bool,
}

/// Totals since the thread's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ThreadUsage {
    /// Time on a processor; `None` = the kernel does not report it.
    pub ran_ns: Option<u64>,
    /// Time runnable without a processor; `None` as above.
    pub waited_ns: Option<u64>,
    /// Number of times that it was given a processor; `None` as above.
    pub slices: Option<u64>,
    /// Page faults, both with and without disk access.
    pub faults: u64,
    /// Read and write calls, counted only without a better measure of speed.
    pub calls: Option<u64>,
}

impl ManagedThread {
    /// The service of its process: the command, if there is no other.
    pub fn service_or_command(&self) -> ServiceIdentity {
        self.service.clone().unwrap_or_else(|| ServiceIdentity::command(&self.program))
    }

    /// The service in the form of an observation: absent if it equals the thread's own name.
    pub fn service_of_sample(&self) -> Option<ServiceIdentity> {
        let command_service = || (self.program != self.name).then(|| ServiceIdentity::command(&self.program));
        self.service.clone().or_else(command_service)
    }

    /// The key under which its program's profile is stored.
    pub fn profile_key(&self) -> ProfileKey {
        ProfileKey::new(&self.service_or_command(), &self.program, self.image.as_deref(), self.user)
    }
}

/// Table of all managed threads. Ids are never reused within a run.
#[derive(Debug, Default)]
pub struct TaskTable {
    by_thread: BTreeMap<ThreadKey, ManagedThread>,
    /// Examined processes: the leader's key and the rule's decision.
    processes: BTreeMap<i32, ManagedProcess>,
    next_task: u32,
    next_process: u32,
    /// Managed processes that have not run since the previous refresh.
    asleep: BTreeSet<i32>,
    refreshes: u32,
    /// Whether calls are counted as well, which costs one more small file for every thread that ran.
    counts_calls: bool,
    /// Open `schedstat` files of threads, at most [`MAX_OPEN_FILES`].
    open_files: BTreeMap<ThreadKey, CachedFile>,
    /// Times that [`TaskTable::forget_reused`] has read for the next refresh.
    times: BTreeMap<ThreadKey, SchedstatTimes>,
    leaders: BTreeMap<i32, ThreadStat>,
    /// Unmanaged processes, examined in the last refresh, that a managed process created: pid and parent.
    unmanaged_children: Vec<(i32, i32)>,
    /// Threads that rules no longer allow to be moved, because their process has changed.
    released: Vec<ManagedThread>,
    /// Process id of the guardian, which is never managed, whatever the rules are.
    guardian: Option<i32>,
    /// Containers that a runtime reports.
    directory: ServiceDirectory,
    /// The service of this process, once it was read.
    own_service: Option<Option<ServiceIdentity>>,
    /// Tasks whose program or service has changed since the refresh before.
    renamed: BTreeSet<TaskId>,
}

#[derive(Clone, Debug)]
struct ManagedProcess {
    leader: ThreadKey,
    id: Option<ProcessId>,
    action: ManageAction,
    properties: RuleProperties,
    /// The refresh that found the process, or its current program.
    since_refresh: u32,
}

impl ManagedProcess {
    fn goal(&self) -> Option<Goal> {
        if let ManageAction::Manage(goal) = self.action { goal } else { None }
    }
    fn is_fixed(&self) -> bool {
        self.action == ManageAction::Observe
    }
    /// Whether a guest's thread emulates devices; only the threads of virtual CPUs are tasks.
    fn emulates(&self, thread: &ThreadStat) -> bool {
        let service = self.properties.service.as_ref();
        service.is_some_and(|service| service.kind == ServiceKind::Guest) && !is_virtual_cpu(&thread.name)
    }
}

impl TaskTable {
    /// A new table; `counts_calls` = for most threads, proxies are the best available measure of speed.
    pub fn new(counts_calls: bool) -> Self {
        TaskTable { counts_calls, ..TaskTable::default() }
    }

    /// Excludes the guardian, which must not be slowed down whatever the rules are. To be called before each refresh.
    pub fn set_guardian(&mut self, pid: Option<u32>) {
        self.guardian = pid.and_then(|pid| i32::try_from(pid).ok());
    }

    /// Sets the directory that the names of containers are taken from.
    pub fn set_directory(&mut self, directory: ServiceDirectory) {
        self.directory = directory;
    }

    /// Reads the host once: new threads get ids, missing ones are marked as exited, and usage is read.
    ///
    /// # Errors
    /// `/proc` itself cannot be listed. A thread that exits meanwhile is not an error.
    pub fn refresh(&mut self, kernel: &dyn Kernel, rules: &[ManageRule], now_ns: u64) -> io::Result<()> {
        let pids = kernel.processes()?;
        let own_pids = [Some(std::process::id() as i32), self.guardian];
        self.processes.retain(|pid, _| pids.binary_search(pid).is_ok());
        self.unmanaged_children.clear();
        self.renamed.clear();
        let own_service = self.own_service.get_or_insert_with(|| own_service(kernel)).clone();
        let directory = self.directory.clone();
        let reader = PropertyReader { kernel, rules, directory: &directory, own_service: own_service.as_ref() };
        let programs = self.processes.values().filter(|process| !process.properties.is_kernel_thread).count();
        let group_period = (programs.div_ceil(GROUPS_PER_REFRESH) as u32).clamp(2, MATCH_PERIOD);
        for &pid in pids.iter().filter(|&&pid| !own_pids.contains(&Some(pid))) {
            if !self.processes.contains_key(&pid) {
                self.examine(&reader, pid);
            } else if self.is_match_due(&reader, pid, group_period) {
                self.rematch(&reader, pid);
            }
        }
        let asleep = std::mem::take(&mut self.asleep);
        let is_awake = |(pid, process): &(&i32, &ManagedProcess)| process.id.is_some() && !asleep.contains(pid);
        let awake: Vec<(i32, ManagedProcess)> =
            self.processes.iter().filter(is_awake).map(|(&pid, process)| (pid, process.clone())).collect();
        let sleeping_tasks = self.by_thread.values().filter(|task| asleep.contains(&task.pid));
        let mut live_threads: BTreeSet<ThreadKey> = sleeping_tasks.map(|task| task.thread).collect();
        for (pid, process) in awake {
            let is_single = self.leaders.get(&pid).is_some_and(|stat| stat.threads == 1);
            let tids = match if is_single { Ok(vec![pid]) } else { kernel.threads(pid) } {
                Ok(tids) => tids,
                Err(error) if is_gone(&error) => continue,
                // A thread that cannot be read has not necessarily exited.
                Err(_) => {
                    live_threads.extend(self.by_thread.values().filter(|task| task.pid == pid).map(|task| task.thread));
                    continue;
                }
            };
            for tid in tids {
                match self.leaders.remove(&tid).map_or_else(|| kernel.stat(tid), Ok) {
                    Ok(stat) if matches!(stat.state, 'Z' | 'X') || process.emulates(&stat) => {}
                    Ok(stat) => {
                        live_threads.insert(stat.key);
                        self.upsert(kernel, pid, &process, &stat, now_ns);
                    }
                    Err(error) if is_gone(&error) => {}
                    Err(_) => live_threads.extend(self.by_thread.keys().filter(|thread| thread.tid == tid)),
                }
            }
        }
        self.times.clear();
        self.leaders.clear();
        self.by_thread
            .values_mut()
            .filter(|task| !live_threads.contains(&task.thread))
            .for_each(|task| task.has_exited = true);
        Ok(())
    }

    /// Reads the properties that rules test, and decides about the process. A reused pid has a new leader and is
    /// examined again. If a property cannot be read, the next refresh tries again instead of deciding, because a rule
    /// with the action "ignore" must not be missed.
    fn examine(&mut self, reader: &PropertyReader<'_>, pid: i32) {
        let Ok(stat) = reader.kernel.stat(pid) else { return };
        let Ok(properties) = reader.read(&stat, None) else { return };
        let action = properties.decide(reader.rules);
        self.insert(pid, &stat, action, properties, None, self.refreshes);
        self.leaders.insert(pid, stat);
    }

    /// Whether the properties of a process are to be read in this refresh. A process that ran under another name than
    /// before is due at once, because it has become another program; one that did not run, only if it was moved.
    fn is_match_due(&self, reader: &PropertyReader<'_>, pid: i32, group_period: u32) -> bool {
        let Some(process) = self.processes.get(&pid).filter(|process| !process.properties.is_kernel_thread) else {
            return false;
        };
        let is_renamed = self.leaders.get(&pid).is_some_and(|stat| stat.name != process.properties.command);
        let is_young = self.refreshes.wrapping_sub(process.since_refresh) < YOUNG_REFRESHES;
        let turn = self.refreshes.wrapping_add(pid as u32);
        if !self.asleep.contains(&pid) && (is_renamed || is_young || turn.is_multiple_of(MATCH_PERIOD)) {
            return true;
        }
        (is_young || turn.is_multiple_of(group_period)) && reader.is_moved(pid, &process.properties)
    }

    /// Decides again about a process whose command, user or control group has changed.
    fn rematch(&mut self, reader: &PropertyReader<'_>, pid: i32) {
        let Some(old_process) = self.processes.get(&pid).cloned() else { return };
        let read = self.leaders.get(&pid).cloned();
        let Ok(stat) = read.map_or_else(|| reader.kernel.stat(pid), Ok) else { return };
        if stat.key != old_process.leader {
            return; // another process with the same number: as in a refresh that finds it
        }
        let Ok(properties) = reader.read(&stat, Some(&old_process.properties)) else { return };
        if properties == old_process.properties {
            return;
        }
        let action = properties.decide(reader.rules);
        let (name, user) = (stat.name.clone(), properties.user);
        let (service, image) = (properties.service.clone(), properties.image().map(str::to_string));
        let is_other_program =
            properties.command != old_process.properties.command || service != old_process.properties.service;
        let since_refresh = if is_other_program { self.refreshes } else { old_process.since_refresh };
        self.insert(pid, &stat, action, properties, old_process.id, since_refresh);
        // A sleeping process may have been moved to another control group, and is listed nevertheless.
        self.asleep.remove(&pid);
        let is_ended = action == ManageAction::Ignore;
        for task in self.by_thread.values_mut().filter(|task| task.pid == pid) {
            if is_ended || action == ManageAction::Observe && !task.is_fixed {
                self.released.push(task.clone());
            }
            if is_ended {
                continue; // it counts as exited, because no refresh lists it any more
            }
            task.user = user;
            task.goal = if let ManageAction::Manage(goal) = action { goal } else { None };
            task.is_fixed = action == ManageAction::Observe;
            task.program.clone_from(&name);
            task.service.clone_from(&service);
            task.image.clone_from(&image);
            if is_other_program {
                self.renamed.insert(task.task);
            }
            if task.thread.tid == pid {
                task.name.clone_from(&name);
            }
        }
    }

    fn insert(
        &mut self,
        pid: i32,
        stat: &ThreadStat,
        action: ManageAction,
        properties: RuleProperties,
        id: Option<ProcessId>,
        since_refresh: u32,
    ) {
        if action == ManageAction::Ignore && self.processes.get(&stat.parent).is_some_and(|parent| parent.id.is_some())
        {
            self.unmanaged_children.push((pid, stat.parent));
        }
        let id = (action != ManageAction::Ignore).then(|| {
            id.unwrap_or_else(|| {
                self.next_process += 1;
                ProcessId(self.next_process - 1)
            })
        });
        self.processes.insert(pid, ManagedProcess { leader: stat.key, id, action, properties, since_refresh });
    }

    /// Takes the threads that rules no longer allow to be moved, because their process has changed since the previous
    /// refresh; their originals must be restored.
    pub fn take_released(&mut self) -> Vec<ManagedThread> {
        std::mem::take(&mut self.released)
    }

    fn upsert(&mut self, kernel: &dyn Kernel, pid: i32, process: &ManagedProcess, stat: &ThreadStat, now_ns: u64) {
        let Some(id) = process.id else { return };
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
            }
        });
        if task.name != stat.name {
            task.name.clone_from(&stat.name);
        }
        task.last_cpu = Some(CpuId(stat.cpu));
        task.cpu = task.last_cpu.filter(|_| stat.state == 'R');
        let previous_usage = task.usage;
        let times = self.times.remove(&stat.key);
        if times.is_none() && previous_usage.ran_ns.is_none() && self.open_files.len() < MAX_OPEN_FILES {
            // If the thread has exited or descriptors have run out, its file is read by its path, if at all.
            self.open_files
                .extend(kernel.open_cached(&schedstat_path(pid, stat.key.tid)).ok().map(|file| (stat.key, file)));
        }
        task.usage = usage(times.unwrap_or_else(|| schedstat(kernel, pid, stat.key.tid)), stat);
        if self.counts_calls {
            // A thread that has not run since the last refresh has made no calls either.
            let is_idle = previous_usage.ran_ns.is_some() && previous_usage.ran_ns == task.usage.ran_ns;
            task.usage.calls = if is_idle { previous_usage.calls } else { calls(kernel, pid, stat.key.tid) };
        }
    }

    /// To be called before each refresh: a process whose pid has been reused (shown by the start time) must be examined
    /// again, and a process that has not run since then need not be examined.
    pub fn forget_reused(&mut self, kernel: &dyn Kernel) {
        self.refreshes = self.refreshes.wrapping_add(1);
        let turn = self.refreshes % TURNS;
        let mut awake = BTreeSet::new();
        let mut asleep = BTreeSet::new();
        self.times.clear();
        self.leaders.clear();
        for task in self.by_thread.values().filter(|task| !task.has_exited) {
            // A thread that was on a processor may be waiting for one now, which only its state shows.
            let slept = task.cpu.is_none() && task.usage.ran_ns.is_some();
            let now = match self.open_files.get(&task.thread) {
                Some(cached) => kernel.read_cached(cached).map(|text| parse_times(&text)).unwrap_or_default(),
                None => schedstat(kernel, task.pid, task.thread.tid),
            };
            let is_unchanged = now == (task.usage.ran_ns, task.usage.waited_ns, task.usage.slices);
            let list = if slept && is_unchanged { &mut asleep } else { &mut awake };
            list.insert(task.pid);
            self.times.insert(task.thread, now);
        }
        asleep.retain(|pid| !awake.contains(pid));
        let leaders = &mut self.leaders;
        self.processes.retain(|&pid, process| {
            let is_trusted = asleep.contains(&pid) || process.id.is_none() && pid as u32 % TURNS != turn;
            if is_trusted {
                return true;
            }
            let stat = match kernel.stat(pid) {
                Ok(stat) => stat,
                Err(error) => return !is_gone(&error),
            };
            let is_same = stat.key == process.leader;
            leaders.insert(pid, stat);
            is_same
        });
        self.asleep = asleep;
    }

    /// Tasks whose program or service has changed since the refresh before.
    pub fn renamed_tasks(&self) -> &BTreeSet<TaskId> {
        &self.renamed
    }

    /// The id of the next new thread.
    pub fn next_task(&self) -> TaskId {
        TaskId(self.next_task)
    }

    /// Was the thread alive at the last refresh?
    pub fn is_alive(&self, thread: ThreadKey) -> bool {
        self.by_thread.get(&thread).is_some_and(|task| !task.has_exited)
    }

    /// Unmanaged processes that the last refresh found for the first time and that a managed process created, with
    /// their parents: the settings that they inherited are ours.
    pub fn unmanaged_children(&self) -> &[(i32, i32)] {
        &self.unmanaged_children
    }

    /// Decides again about every process, because the rules have changed. Returns the threads that are no longer
    /// managed.
    pub fn reexamine(&mut self, kernel: &dyn Kernel, rules: &[ManageRule]) -> Vec<ManagedThread> {
        self.asleep.clear();
        let previous_processes = std::mem::take(&mut self.processes);
        let own_service = self.own_service.get_or_insert_with(|| own_service(kernel)).clone();
        let directory = self.directory.clone();
        let reader = PropertyReader { kernel, rules, directory: &directory, own_service: own_service.as_ref() };
        for (pid, old_process) in previous_processes {
            self.examine(&reader, pid);
            if let Some(new_process) =
                self.processes.get_mut(&pid).filter(|new_process| new_process.leader == old_process.leader)
                && new_process.id.is_some()
            {
                new_process.id = old_process.id.or(new_process.id);
            }
        }
        let mut released = Vec::new();
        self.by_thread.retain(|_, task| match self.processes.get(&task.pid) {
            Some(process @ ManagedProcess { id: Some(_), .. }) => {
                task.user = process.properties.user;
                task.goal = process.goal();
                let is_fixed = process.is_fixed();
                if is_fixed && !task.is_fixed {
                    released.push(task.clone());
                }
                task.is_fixed = is_fixed;
                true
            }
            _ => {
                released.push(task.clone());
                false
            }
        });
        released
    }

    /// Managed tasks in order of arrival.
    pub fn all(&self) -> Vec<&ManagedThread> {
        let mut threads: Vec<&ManagedThread> = self.by_thread.values().collect();
        threads.sort_by_key(|task| task.task);
        threads
    }

    /// `None` = no such task, or one that was dropped.
    pub fn get(&self, task: TaskId) -> Option<&ManagedThread> {
        self.by_thread.values().find(|managed| managed.task == task)
    }

    /// Closes the files that are kept open, because their descriptors are needed.
    pub fn close(&mut self) {
        self.open_files.clear();
    }

    /// Drops the exited threads; to be called once they have been reported.
    pub fn drop_exited(&mut self) {
        self.by_thread.retain(|_, task| !task.has_exited);
        self.open_files.retain(|thread, _| self.by_thread.contains_key(thread));
    }
}

fn usage((ran_ns, waited_ns, slices): SchedstatTimes, stat: &ThreadStat) -> ThreadUsage {
    ThreadUsage { ran_ns, waited_ns, slices, faults: stat.minor_faults.saturating_add(stat.major_faults), calls: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;

    fn everything() -> Vec<ManageRule> {
        vec![ManageRule { action: ManageAction::Manage(None), ..ManageRule::default() }]
    }

    fn ids(tasks: &TaskTable) -> Vec<(u32, i32, bool)> {
        tasks.all().iter().map(|task| (task.task.0, task.thread.tid, task.has_exited)).collect()
    }

    /// Do threads get ids in order of arrival, keep them, and lose them for good at their exit, also if a pid is
    /// reused?
    #[test]
    fn ids_are_dense_and_never_reused() {
        let host = FakeHost::default();
        let mut tasks = TaskTable::default();
        host.thread(5, 5, 1, "0");
        host.thread(5, 6, 1, "0");
        tasks.refresh(&host, &everything(), 0).unwrap();
        assert_eq!(ids(&tasks), [(0, 5, false), (1, 6, false)]);
        host.threads.borrow_mut().remove(&6);
        host.threads.borrow_mut().get_mut(&5).unwrap().start_ticks += 1; // another program under the same pid
        tasks.forget_reused(&host);
        tasks.refresh(&host, &everything(), 1).unwrap();
        assert_eq!(ids(&tasks), [(0, 5, true), (1, 6, true), (2, 5, false)]);
        tasks.drop_exited();
        assert_eq!(ids(&tasks), [(2, 5, false)]);
        assert_ne!(tasks.all()[0].process, ProcessId(0));
    }

    /// Is a process that has not run assumed to be the same, and examined again as soon as it has?
    #[test]
    fn who_sleeps_is_not_looked_at() {
        let host = FakeHost::default();
        let set_run_time = |ns: u64| {
            for tid in [5, 6] {
                host.file(&format!("/proc-schedstat/{tid}"), &format!("{ns} 2 3\n"));
            }
        };
        set_run_time(10);
        host.thread(5, 5, 1, "0");
        let mut tasks = TaskTable::default();
        let look = |tasks: &mut TaskTable| {
            tasks.forget_reused(&host);
            tasks.refresh(&host, &everything(), 0).unwrap();
            ids(tasks)
        };
        assert_eq!(look(&mut tasks), [(0, 5, false)]);
        host.thread(5, 6, 1, "0"); // cannot be: a thread is born by one that runs
        assert_eq!(look(&mut tasks), [(0, 5, false)]);
        set_run_time(11);
        assert_eq!(look(&mut tasks), [(0, 5, false), (1, 6, false)]);
        host.threads.borrow_mut().remove(&6);
        host.files.borrow_mut().remove(std::path::Path::new("/proc-schedstat/6"));
        assert_eq!(look(&mut tasks), [(0, 5, false), (1, 6, true)]);
    }

    /// Are programs that no rule matches left out completely?
    #[test]
    fn unmatched_programs_do_not_appear() {
        let host = FakeHost::default();
        host.thread(5, 5, 1, "0");
        let mut tasks = TaskTable::default();
        let rule =
            ManageRule { command: Some("other".into()), action: ManageAction::Manage(None), ..ManageRule::default() };
        tasks.refresh(&host, &[rule], 0).unwrap();
        assert!(tasks.all().is_empty());
    }

    /// Is every thread reported with the real user of its process, and without one if the kernel does not report it?
    #[test]
    fn threads_carry_their_process_user() {
        let host = FakeHost::default();
        host.file("/proc/5/status", "Name:\tx\nUid:\t1000\t0\t0\t0\n");
        for (pid, tid) in [(5, 5), (5, 6), (7, 7)] {
            host.thread(pid, tid, 1, "0");
        }
        let mut tasks = TaskTable::default();
        tasks.refresh(&host, &everything(), 0).unwrap();
        let users: Vec<_> = tasks.all().iter().map(|task| (task.thread.tid, task.user)).collect();
        assert_eq!(users, [(5, Some(1000)), (6, Some(1000)), (7, None)]);
    }

    /// Is the guardian never managed, even by rules that match every program?
    #[test]
    fn the_guardian_is_never_managed() {
        let host = FakeHost::default();
        host.thread(5, 5, 1, "0");
        host.thread(6, 6, std::process::id() as i32, "0");
        let mut tasks = TaskTable::default();
        tasks.set_guardian(Some(6));
        tasks.refresh(&host, &everything(), 0).unwrap();
        assert_eq!(ids(&tasks), [(0, 5, false)]);
    }

    fn wait_for_command(pid: i32, command: &str) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let name = || crate::kernel::LinuxHost::new("/").stat(pid).unwrap().name;
        while name() != command {
            assert!(std::time::Instant::now() < deadline, "{} is not {command}", name());
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// If a shell becomes another program (`bash -c 'sleep 2; exec prog'`): is that program managed within two
    /// refreshes if a rule names it, and is a program that was managed under its shell's name released if a rule
    /// ignores it?
    #[test]
    fn an_exec_neither_escapes_a_rule_nor_misses_one() {
        let dir = tempfile::tempdir().unwrap();
        let host = crate::kernel::LinuxHost::new("/");
        let rule =
            |command: &str, action| ManageRule { command: Some(command.into()), action, ..ManageRule::default() };
        let manage = ManageAction::Manage(None);
        let late = |rules: &[ManageRule], program: &str, refreshes_before: u32, refreshes_after: u32| {
            let path = dir.path().join(program);
            assert!(std::process::Command::new("cp").arg("/bin/sleep").arg(&path).status().unwrap().success());
            let (reader, writer) = std::io::pipe().unwrap();
            let mut shell = std::process::Command::new("bash");
            shell.args(["-c", "read -r; exec -a sleep \"$0\" 100"]).arg(&path).stdin(reader);
            let mut child = shell.spawn().unwrap();
            let pid = child.id() as i32;
            wait_for_command(pid, "bash");
            let mut tasks = TaskTable::default();
            let mut refresh = |refreshes: u32| {
                for _ in 0..refreshes {
                    tasks.forget_reused(&host);
                    tasks.refresh(&host, rules, 0).unwrap();
                }
                let released = tasks.take_released().len();
                let live = tasks.all().into_iter().filter(|task| task.pid == pid && !task.has_exited);
                (live.map(|task| task.name.clone()).collect::<Vec<_>>(), released)
            };
            let before = refresh(refreshes_before);
            std::io::Write::write_all(&mut { writer }, b"\n").unwrap();
            wait_for_command(pid, program);
            let after = refresh(refreshes_after);
            child.kill().unwrap();
            child.wait().unwrap();
            (before, after)
        };
        let none = || (Vec::<String>::new(), 0);
        let managed = |name: &str| (vec![name.to_string()], 0);
        assert_eq!(late(&[rule("managed-late", manage)], "managed-late", 2, 2), (none(), managed("managed-late")));
        assert_eq!(late(&[rule("managed-old", manage)], "managed-old", 20, 10), (none(), managed("managed-old")));
        let rules = [rule("ignored-late", ManageAction::Ignore), rule("bash", manage), rule("*-late", manage)];
        assert_eq!(late(&rules, "ignored-late", 2, 2), (managed("bash"), (Vec::new(), 1)));
        let rules = [rule("fixed-late", ManageAction::Observe), rule("bash", manage)];
        assert_eq!(late(&rules, "fixed-late", 2, 2), (managed("bash"), (vec!["fixed-late".to_string()], 1)));
    }

    /// If a process joins another control group, or changes its user, when it is old and asleep: does the rule for these
    /// hold within ten refreshes?
    #[test]
    fn a_process_that_joins_a_control_group_later_is_matched() {
        let host = FakeHost::default();
        for pid in [5, 6] {
            host.thread(pid, pid, 1, "0");
            host.file(&format!("/proc/{pid}/cgroup"), "0::/user.slice\n");
            host.file(&format!("/proc/{pid}/status"), "Uid:\t1000\t0\t0\t0\n");
            host.file(&format!("/proc-schedstat/{pid}"), "1 2 3\n");
        }
        let rule = |cgroup: Option<&str>, user, action| ManageRule {
            cgroup: cgroup.map(str::to_string),
            user,
            action,
            ..ManageRule::default()
        };
        let rules = [
            rule(Some("/protected"), None, ManageAction::Ignore),
            rule(Some("/batch"), None, ManageAction::Manage(None)),
            rule(None, Some(7), ManageAction::Manage(None)),
        ];
        let mut tasks = TaskTable::default();
        let mut look = |refreshes: u32| {
            for _ in 0..refreshes {
                tasks.forget_reused(&host);
                tasks.refresh(&host, &rules, 0).unwrap();
            }
            let live = tasks.all().into_iter().filter(|task| !task.has_exited).map(|task| (task.pid, task.user));
            (live.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>(), tasks.take_released().len())
        };
        assert_eq!(look(20), (vec![], 0));
        host.file("/proc/5/cgroup", "0::/batch/job\n");
        host.file("/proc/6/status", "Uid:\t7\t0\t0\t0\n");
        assert_eq!(look(MATCH_PERIOD), (vec![(5, Some(1000)), (6, Some(7))], 0));
        host.file("/proc/5/cgroup", "0::/protected\n");
        assert_eq!(look(MATCH_PERIOD), (vec![(6, Some(7))], 1));
    }
}
