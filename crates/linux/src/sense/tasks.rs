//! The managed threads of the host, with dense ids in order of arrival.
//!
//! Pids are reused, threads come and go between two refreshes, and a refresh costs time: to read
//! one file of each of 10,000 threads five times a second would be 50,000 reads a second. So a
//! refresh asks only for what can have changed. Births, changes and exits of processes come from
//! the kernel's events ([`BirthLedger`]). Where these are not allowed, each refresh lists `/proc`,
//! and checks a sixteenth of the unmanaged processes for a reused pid.
//!
//! For example, of 10,000 threads 50 ran in the last window. A process costs one call, which reads
//! its processor time, and only the threads of those that ran are reread: a process that did not
//! run was not created, did not exit, has no new threads, and is the same program of the same user.
//! A process that hardly ran in the window of its birth is read in the next one.
//!
//! The properties that rules test are read when a process is new and when it changes; without
//! events also in every tenth refresh and in each of the first ones, because a new shell may soon
//! execute another program. Control groups are read when the kernel reports a move
//! ([`GroupMoves`]), and rarely otherwise; without reports in each of the first refreshes, then in
//! every second one, or less often if there are hundreds of programs.

mod idle_threads;
#[cfg(test)]
mod tests;
mod thread_reads;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use cachemate_core::{
    CpuId, Goal, ProcessId, ProfileKey, ServiceIdentity, ServiceKind, TaskId, is_virtual_cpu,
};

use crate::act::rules::{ManageAction, ManageRule, find_rule};
use crate::kernel::group_moves::GroupMoves;
use crate::kernel::process_events::ProcessEventSubscription;
use crate::kernel::{KeptFile, Kernel, ThreadKey, ThreadStat, is_gone};
use crate::sense::births::BirthLedger;
use crate::sense::process_properties::{
    KnownProperties, PropertyReader, RuleProperties, read_own_service,
};
use crate::sense::service_directory::ServiceDirectory;
use idle_threads::IdleThreads;

/// Number of refreshes over which every unmanaged process is checked once for a reused pid.
const PID_CHECK_PERIOD: u32 = 16;
/// Age, in refreshes, up to which a process is matched in every refresh, because most programs soon replace the shell
/// that started them.
const YOUNG_REFRESHES: u32 = 10;
/// Number of refreshes in which an older process is matched once, if no events report its changes.
const MATCH_PERIOD: u32 = 10;
/// Number of refreshes after which a listing, and a match of each process, correct for changes that the events did not
/// report.
const LISTING_PERIOD: u32 = 64;
/// Number of refreshes for which a process that hardly runs is not read.
const MAX_UNREAD_REFRESHES: u32 = 10;
/// A process hardly runs if the CPU that it used since it was read is less than this part of the time since the last
/// refresh: one percent.
const HARDLY_RUNS_DIVISOR: u64 = 100;
/// Maximum number of services whose short programs are counted.
const MAX_COUNTED_SERVICES: usize = 1_000;
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
    /// Real user of the process when it was new; `None` if its status could not be read.
    pub user: Option<u32>,
    /// The kernel's id of the process.
    pub pid: i32,
    /// The kernel's id of the thread, with its start time.
    pub thread: ThreadKey,
    /// Parent of the process; if it is managed as well, its originals are inherited.
    pub parent: i32,
    /// Command name, as read after the thread last ran; at most 15 bytes.
    pub name: String,
    /// Command name of the process, whatever its threads are called.
    pub program: String,
    /// The service of the process; `None` if it is named by its command.
    pub service: Option<ServiceIdentity>,
    /// Digest of the image that the program comes from, if a container runtime reports it.
    pub image: Option<String>,
    /// Time of the refresh that found it, since the machine's start.
    pub arrived_ns: u64,
    /// Its goal by the operator's rule, if any.
    pub goal: Option<Goal>,
    /// Whether it is only observed, and never moved.
    pub is_fixed: bool,
    /// Totals at the last refresh.
    pub usage: ThreadUsage,
    /// CPU at the last refresh; `None` if it was not running.
    pub cpu: Option<CpuId>,
    /// Last CPU, running or not.
    pub last_cpu: Option<CpuId>,
    /// Nice value when the thread was new.
    pub initial_nice: i32,
    /// Whether it had exited by the last refresh; it is kept until this has been reported.
    pub has_exited: bool,
    /// The refresh that found that it had run since the one before.
    ran_in_refresh: u32,
}

/// Totals since the thread's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ThreadUsage {
    /// Time on a processor; `None` if the kernel does not report it.
    pub ran_ns: Option<u64>,
    /// Time runnable without a processor; `None` as above.
    pub waited_ns: Option<u64>,
    /// Number of times that it was given a processor; `None` as above.
    pub slices: Option<u64>,
    /// Page faults, both with and without disk access.
    pub faults: u64,
    /// Read and write calls, counted only without a better measure of speed; `None` if they are not counted, or the
    /// thread was runnable for little of the time.
    pub calls: Option<u64>,
}

impl ManagedThread {
    /// The service of its process: the command, if there is no other.
    pub fn service_or_command(&self) -> ServiceIdentity {
        self.service
            .clone()
            .unwrap_or_else(|| ServiceIdentity::command(&self.program))
    }

    /// The service in the form of an observation: absent if it equals the thread's own name.
    pub fn service_of_sample(&self) -> Option<ServiceIdentity> {
        let command_service =
            || (self.program != self.name).then(|| ServiceIdentity::command(&self.program));
        self.service.clone().or_else(command_service)
    }

    /// The key under which its program's profile is stored.
    pub fn profile_key(&self) -> ProfileKey {
        ProfileKey::new(
            &self.service_or_command(),
            &self.program,
            self.image.as_deref(),
            self.user,
        )
    }
}

/// Table of all managed threads. Ids are never reused within a run.
#[derive(Debug, Default)]
pub struct TaskTable {
    by_thread: BTreeMap<ThreadKey, ManagedThread>,
    /// Threads of large processes that have not run for a while; they are no tasks.
    idle_threads: IdleThreads,
    /// Every examined process by its pid, also those that rules ignore.
    processes: BTreeMap<i32, ExaminedProcess>,
    next_task: u32,
    next_process: u32,
    /// Managed processes that have not run between the last two refreshes.
    sleeping_pids: BTreeSet<i32>,
    refresh_count: u32,
    /// Time of the last refresh, and the time that had passed since the one before.
    refreshed_ns: u64,
    elapsed_ns: u64,
    /// Whether calls are counted as well, which costs one more small file for every busy thread.
    counts_calls: bool,
    /// The kernel's events; `None` if they are not allowed, so that every refresh lists `/proc`.
    process_events: Option<ProcessEventSubscription>,
    births: BirthLedger,
    /// Moves between control groups, as the kernel reports them; `None` if the groups of processes are read in turn.
    group_moves: Option<GroupMoves>,
    /// Changes of the directory of containers that have been taken into account.
    directory_changes: u64,
    /// Whether events were lost, so that any process may have changed.
    has_lost_events: bool,
    /// Programs of each service that ended before they were read.
    unread_programs: BTreeMap<ServiceIdentity, u64>,
    /// Stat lines of first threads that this refresh has read, by process.
    leader_stats: BTreeMap<i32, ThreadStat>,
    /// Unmanaged processes that the last refresh has examined for the first time.
    new_unmanaged_pids: Vec<i32>,
    /// Threads that rules no longer allow to be moved, because their process has changed.
    released_threads: Vec<ManagedThread>,
    /// Process id of the guardian, which is never managed, whatever the rules are.
    guardian: Option<i32>,
    /// Containers that a runtime reports.
    directory: ServiceDirectory,
    /// The service of this process, once it was read.
    own_service: Option<Option<ServiceIdentity>>,
    /// Tasks whose program or service has changed since the refresh before.
    renamed_tasks: BTreeSet<TaskId>,
}

/// The processes and threads that the rules select, with which [`TaskTable::restore_selection`] undoes a reexamination.
#[derive(Debug)]
pub(crate) struct TaskSelection {
    by_thread: BTreeMap<ThreadKey, ManagedThread>,
    idle_threads: IdleThreads,
    processes: BTreeMap<i32, ExaminedProcess>,
}

/// The processes whose control groups a refresh reads.
#[derive(Clone, Copy, Debug)]
enum GroupReadSchedule {
    /// All, because one of them was moved.
    All,
    /// Each process once in this number of refreshes.
    Every(u32),
    /// Each process once in this number of refreshes, and young ones in every refresh.
    YoungAndEvery(u32),
}

/// A process, with what rules decided about it.
#[derive(Clone, Debug)]
struct ExaminedProcess {
    leader: ThreadKey,
    /// `None` if rules ignore it.
    id: Option<ProcessId>,
    action: ManageAction,
    properties: RuleProperties,
    cgroup_file: KeptFile,
    /// The refresh that found the process, or its current program.
    found_in_refresh: u32,
    /// The last refresh that read its threads.
    read_in_refresh: u32,
    /// Processor time of all its threads, read before the threads themselves; `None` if unknown.
    ran_ns: Option<u64>,
    /// Part of `ran_ns` that belongs to ended threads; `None` if it must be computed by reading all live threads.
    exited_threads_ns: Option<u64>,
}

impl ExaminedProcess {
    fn goal(&self) -> Option<Goal> {
        if let ManageAction::Manage(goal) = self.action {
            goal
        } else {
            None
        }
    }
    fn is_fixed(&self) -> bool {
        self.action == ManageAction::Observe
    }
    /// Whether a guest's thread emulates devices; only the threads of virtual CPUs are tasks.
    fn is_emulator_thread(&self, thread: &ThreadStat) -> bool {
        let service = self.properties.service.as_ref();
        service.is_some_and(|service| service.kind == ServiceKind::Guest)
            && !is_virtual_cpu(&thread.name)
    }
}

impl TaskTable {
    /// A new table. `counts_calls` states whether proxies are the best available measure of speed for most threads.
    pub fn new(counts_calls: bool) -> Self {
        TaskTable {
            counts_calls,
            ..TaskTable::default()
        }
    }

    /// Follows these events from now on.
    pub fn set_events(&mut self, events: ProcessEventSubscription) {
        self.process_events = Some(events);
        self.births.forget();
    }

    /// Follows the moves of processes between control groups from now on.
    pub fn set_group_moves(&mut self, moves: GroupMoves) {
        self.group_moves = Some(moves);
    }

    /// The order in which this refresh reads the control groups of processes.
    fn update_group_schedule(&mut self) -> GroupReadSchedule {
        let changes = self.directory.change_count();
        let is_directory_changed =
            std::mem::replace(&mut self.directory_changes, changes) != changes;
        match self.group_moves.as_mut().map(GroupMoves::poll_moves) {
            Some(Ok(has_moved)) if has_moved || is_directory_changed => GroupReadSchedule::All,
            Some(Ok(_)) => GroupReadSchedule::Every(LISTING_PERIOD),
            move_report => {
                if move_report.is_some() {
                    self.group_moves = None;
                }
                let program_count = self
                    .processes
                    .values()
                    .filter(|process| !process.properties.is_kernel_thread)
                    .count();
                GroupReadSchedule::YoungAndEvery(
                    (program_count.div_ceil(GROUPS_PER_REFRESH) as u32).clamp(2, MATCH_PERIOD),
                )
            }
        }
    }

    /// Takes the events that have come since the last call. To be called several times in a long window, because their
    /// buffer is bounded.
    pub fn take_events(&mut self) {
        let Some(events) = &mut self.process_events else {
            return;
        };
        if events
            .deliver_events(|event| self.births.record(event))
            .is_err()
        {
            self.births.forget();
        }
    }

    /// Programs of each service that ended before any refresh read them; `None` if events are not allowed.
    pub fn unread_programs(&self) -> Option<&BTreeMap<ServiceIdentity, u64>> {
        self.process_events
            .is_some()
            .then_some(&self.unread_programs)
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
    pub fn refresh(
        &mut self,
        kernel: &dyn Kernel,
        rules: &[ManageRule],
        now_ns: u64,
    ) -> io::Result<()> {
        self.refresh_count = self.refresh_count.wrapping_add(1);
        self.elapsed_ns = now_ns.saturating_sub(std::mem::replace(&mut self.refreshed_ns, now_ns));
        self.new_unmanaged_pids.clear();
        self.renamed_tasks.clear();
        self.leader_stats.clear();
        self.idle_threads.begin_refresh();

        self.find_births_and_exits(kernel)?;
        self.find_sleepers(kernel);

        let own_service = self
            .own_service
            .get_or_insert_with(|| read_own_service(kernel))
            .clone();
        let group_schedule = self.update_group_schedule();
        let directory = self.directory.clone();
        let reader = PropertyReader::new(kernel, rules, &directory, own_service.as_ref());
        // Known processes first: a new one takes over properties of its parent.
        for pid in self.processes.keys().copied().collect::<Vec<_>>() {
            if self.is_match_due(&reader, pid, group_schedule) {
                self.rematch(&reader, pid);
            }
        }

        let excluded_pids = [Some(kernel.own_pid()), self.guardian];
        for pid in self.births.unread_pids() {
            let ran_ns = kernel.run_time_ns(pid).ok();
            if self.has_hardly_run(ran_ns) && self.births.defer(pid) {
                continue;
            }
            if excluded_pids.contains(&Some(pid)) || self.examine(&reader, pid, ran_ns) {
                self.births.remove_unread(pid);
            }
        }

        self.read_threads(kernel, now_ns);
        self.births.finish_refresh();
        Ok(())
    }

    /// Drops the processes that have ended, and lists those that are to be read.
    fn find_births_and_exits(&mut self, kernel: &dyn Kernel) -> io::Result<()> {
        self.take_events();
        self.has_lost_events = false;
        for (ancestor, program_count) in self.births.take_ended_unread() {
            self.count_unread_programs(ancestor, program_count);
        }
        if self.births.is_complete() && !self.refresh_count.is_multiple_of(LISTING_PERIOD) {
            for pid in self.births.take_ended_leaders() {
                let Some(process) = self.processes.get(&pid) else {
                    continue;
                };
                // Reading a process's CPU clock costs less than reading a file, and fails if the process no longer
                // exists.
                if kernel
                    .run_time_ns(pid)
                    .is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
                {
                    self.processes.remove(&pid);
                    continue;
                }
                match kernel.stat(pid) {
                    Ok(stat) if stat.key == process.leader && !has_process_exited(&stat) => {}
                    Err(error) if !is_gone(&error) => {}
                    _ => _ = self.processes.remove(&pid),
                }
            }
            return Ok(());
        }

        self.has_lost_events = self.process_events.is_some() && !self.births.is_complete();
        // Events that come during the listing wait for the next refresh.
        let pids = kernel.processes()?;
        self.processes
            .retain(|pid, _| pids.binary_search(pid).is_ok());
        let unread_pids = pids
            .into_iter()
            .filter(|pid| !self.processes.contains_key(pid));
        self.births
            .add_listed(unread_pids, self.process_events.is_some());
        Ok(())
    }

    /// Finds the processes that have not run since the last refresh, and drops those whose pid was reused.
    fn find_sleepers(&mut self, kernel: &dyn Kernel) {
        // A thread that was on a processor may be waiting for one now, which only its state shows.
        let was_on_cpu = |task: &&ManagedThread| !task.has_exited && task.cpu.is_some();
        let running_pids: BTreeSet<i32> = self
            .by_thread
            .values()
            .filter(was_on_cpu)
            .map(|task| task.pid)
            .collect();
        let check_phase = self.refresh_count % PID_CHECK_PERIOD;
        let has_events = self.births.is_complete();

        self.sleeping_pids.clear();
        let mut reused_pids = Vec::new();
        self.processes.retain(|&pid, process| {
            let is_managed = process.id.is_some();
            if !is_managed && (has_events || pid as u32 % PID_CHECK_PERIOD != check_phase) {
                return true;
            }

            if is_managed {
                let ran_ns = kernel.run_time_ns(pid).ok();
                let has_slept = ran_ns.is_some() && ran_ns == process.ran_ns;
                let hardly_runs = || {
                    let unread_ns = ran_ns
                        .zip(process.ran_ns)
                        .map(|(now, read)| now.saturating_sub(read));
                    has_events
                        && unread_ns.is_some_and(|ns| ns < self.elapsed_ns / HARDLY_RUNS_DIVISOR)
                        && self.refresh_count.wrapping_sub(process.read_in_refresh)
                            < MAX_UNREAD_REFRESHES
                        && !self.births.is_changed(pid)
                        && !self.births.may_have_new_threads(pid)
                };
                if !running_pids.contains(&pid) && (has_slept || hardly_runs()) {
                    self.sleeping_pids.insert(pid);
                    return true;
                }
                process.ran_ns = ran_ns;
                process.read_in_refresh = self.refresh_count;
            }

            let stat = match kernel.stat(pid) {
                Ok(stat) => stat,
                Err(error) => return !is_gone(&error),
            };
            if stat.key != process.leader {
                reused_pids.push(pid);
                return false;
            }
            self.leader_stats.insert(pid, stat);
            true
        });
        self.births.add_listed(reused_pids, has_events);
    }

    /// Counts programs that ended before they were read, for the service of the process that started them.
    fn count_unread_programs(&mut self, ancestor: i32, program_count: u64) {
        let Some(process) = self
            .processes
            .get(&ancestor)
            .filter(|process| process.id.is_some())
        else {
            return;
        };
        let service = process.properties.service_or_command();
        if self.unread_programs.len() >= MAX_COUNTED_SERVICES
            && !self.unread_programs.contains_key(&service)
        {
            self.unread_programs.clear();
        }
        *self.unread_programs.entry(service).or_default() += program_count;
    }

    /// Whether a process with this processor time has hardly run since the last refresh; false if the time is unknown.
    fn has_hardly_run(&self, ran_ns: Option<u64>) -> bool {
        ran_ns.is_some_and(|ran_ns| ran_ns < self.elapsed_ns / HARDLY_RUNS_DIVISOR)
    }

    /// Reads the properties that rules test, and decides about the process, which has run for `ran_ns` so far. A reused
    /// pid has a new leader and is examined again. Returns false if a property cannot be read: the next refresh tries
    /// again, because a rule with the action "ignore" must not be missed.
    fn examine(&mut self, reader: &PropertyReader<'_>, pid: i32, ran_ns: Option<u64>) -> bool {
        let is_single = self.births.has_one_thread(pid);
        let stat_result = if is_single {
            reader.kernel.process_stat(pid)
        } else {
            reader.kernel.stat(pid)
        };
        let stat = match stat_result {
            Ok(stat) if !has_process_exited(&stat) => stat,
            Err(error) if !is_gone(&error) => return false,
            _ => {
                self.births.count_ended(pid);
                return true;
            }
        };
        if self
            .processes
            .get(&pid)
            .is_some_and(|process| process.leader == stat.key)
        {
            return true;
        }

        let parent = self
            .processes
            .get(&stat.parent)
            .map(|parent| &parent.properties);
        let user_source = self
            .births
            .ancestor_with_user(pid)
            .and_then(|ancestor| self.processes.get(&ancestor));
        // A source that is not older than the process may be another process that reused the ancestor's pid.
        let user_source =
            user_source.filter(|source| source.leader.start_ticks < stat.key.start_ticks);
        let user = user_source.and_then(|source| source.properties.user);
        let cgroup_file = reader.open_cgroup_file(&stat);
        let known_properties = KnownProperties {
            parent,
            user,
            ..KnownProperties::default()
        };
        let Ok(properties) = reader.read(&stat, &cgroup_file, &known_properties) else {
            return false;
        };
        let action = properties.decide(reader.rules);

        // A process that starts in its parent's control groups usually stays in them, so it counts as being as old as
        // its parent.
        let same_group_parent = self
            .processes
            .get(&stat.parent)
            .filter(|parent| parent.properties.cgroups == properties.cgroups);
        let found_in_refresh = match same_group_parent {
            Some(parent) if self.births.is_complete() => parent.found_in_refresh,
            _ => self.refresh_count,
        };
        let process = ExaminedProcess {
            leader: stat.key,
            id: None,
            action,
            properties,
            cgroup_file,
            found_in_refresh,
            read_in_refresh: self.refresh_count,
            ran_ns,
            exited_threads_ns: None,
        };
        self.insert(&stat, process);
        self.leader_stats.insert(pid, stat);
        true
    }

    /// Whether the properties of a process are to be read in this refresh. A process that ran under another name than
    /// before is due at once, because it has become another program; one that did not run, only if it was moved.
    fn is_match_due(
        &self,
        reader: &PropertyReader<'_>,
        pid: i32,
        group_schedule: GroupReadSchedule,
    ) -> bool {
        let Some(process) = self
            .processes
            .get(&pid)
            .filter(|process| !process.properties.is_kernel_thread)
        else {
            return false;
        };
        let has_events = self.births.is_complete();
        let is_renamed = self
            .leader_stats
            .get(&pid)
            .is_some_and(|stat| stat.name != process.properties.command);
        let is_changed = is_renamed || self.births.is_changed(pid);
        let is_young = self.refresh_count.wrapping_sub(process.found_in_refresh) < YOUNG_REFRESHES;
        let refresh_phase = self.refresh_count.wrapping_add(pid as u32);
        let match_period = if has_events {
            LISTING_PERIOD
        } else {
            MATCH_PERIOD
        };
        let is_periodic_due = refresh_phase.is_multiple_of(match_period)
            || is_young && !has_events
            || self.has_lost_events;
        if !self.sleeping_pids.contains(&pid) && (is_changed || is_periodic_due) {
            return true;
        }
        let is_group_due = match group_schedule {
            GroupReadSchedule::All => true,
            GroupReadSchedule::Every(period) => refresh_phase.is_multiple_of(period),
            GroupReadSchedule::YoungAndEvery(period) => {
                is_young || refresh_phase.is_multiple_of(period)
            }
        };
        is_group_due && reader.has_moved(&process.cgroup_file, &process.properties)
    }

    /// Decides again about a process whose command, user or control group has changed.
    fn rematch(&mut self, reader: &PropertyReader<'_>, pid: i32) {
        let Some(old_process) = self.processes.get(&pid).cloned() else {
            return;
        };
        let known_stat = self.leader_stats.get(&pid).cloned();
        let Ok(stat) = known_stat.map_or_else(|| reader.kernel.stat(pid), Ok) else {
            return;
        };
        if stat.key != old_process.leader {
            return; // another process reused the pid, and a refresh will find it
        }

        let is_full_match_due = self
            .refresh_count
            .wrapping_add(pid as u32)
            .is_multiple_of(LISTING_PERIOD);
        let is_user_known =
            !is_full_match_due && !self.has_lost_events && !self.births.may_have_new_user(pid);
        let known_user = if is_user_known {
            old_process.properties.user
        } else {
            None
        };
        let known_properties = KnownProperties {
            previous: Some(&old_process.properties),
            user: known_user,
            ..KnownProperties::default()
        };
        let Ok(properties) = reader.read(&stat, &old_process.cgroup_file, &known_properties) else {
            return;
        };
        if properties == old_process.properties {
            return;
        }

        let action = properties.decide(reader.rules);
        let command = stat.name.clone();
        let user = properties.user;
        let service = properties.service.clone();
        let image = properties.image().map(str::to_string);
        let is_other_program = properties.command != old_process.properties.command
            || service != old_process.properties.service;
        let found_in_refresh = if is_other_program {
            self.refresh_count
        } else {
            old_process.found_in_refresh
        };

        let process = ExaminedProcess {
            action,
            properties,
            found_in_refresh,
            ..old_process
        };
        let goal = process.goal();
        let is_fixed = process.is_fixed();
        let is_ignored = action == ManageAction::Ignore;
        self.insert(&stat, process);
        // Its control group may have changed while it slept, so this refresh must read its threads nevertheless.
        self.sleeping_pids.remove(&pid);

        let tasks = self.by_thread.values_mut().filter(|task| task.pid == pid);
        for task in tasks.chain(self.idle_threads.threads_mut(pid)) {
            if is_ignored || is_fixed && !task.is_fixed {
                self.released_threads.push(task.clone());
            }
            if is_ignored {
                continue; // it counts as exited, because no refresh lists it any more
            }
            task.user = user;
            task.goal = goal;
            task.is_fixed = is_fixed;
            task.program.clone_from(&command);
            task.service.clone_from(&service);
            task.image.clone_from(&image);
            if task.thread.tid == pid {
                task.name.clone_from(&command);
            }
        }
        if is_other_program && !is_ignored {
            let tasks = self.by_thread.values().filter(|task| task.pid == pid);
            self.renamed_tasks.extend(tasks.map(|task| task.task));
        }
    }

    fn insert(&mut self, stat: &ThreadStat, process: ExaminedProcess) {
        let is_ignored = process.action == ManageAction::Ignore;
        if is_ignored && !process.properties.is_kernel_thread {
            self.new_unmanaged_pids.push(stat.key.tid);
        }
        let id = (!is_ignored).then(|| {
            process.id.unwrap_or_else(|| {
                self.next_process += 1;
                ProcessId(self.next_process - 1)
            })
        });
        self.processes
            .insert(stat.key.tid, ExaminedProcess { id, ..process });
    }

    /// Takes the threads that rules no longer allow to be moved, because their process has changed since the previous
    /// refresh; their originals must be restored.
    pub fn take_released(&mut self) -> Vec<ManagedThread> {
        std::mem::take(&mut self.released_threads)
    }

    /// Tasks whose program or service has changed since the refresh before.
    pub fn renamed_tasks(&self) -> &BTreeSet<TaskId> {
        &self.renamed_tasks
    }

    /// The id of the next new thread.
    pub fn next_task(&self) -> TaskId {
        TaskId(self.next_task)
    }

    /// Was the thread alive at the last refresh?
    pub fn is_alive(&self, thread: ThreadKey) -> bool {
        self.by_thread
            .get(&thread)
            .is_some_and(|task| !task.has_exited)
            || self.idle_threads.contains(thread)
    }

    /// Unmanaged processes that the last refresh found for the first time: if they descend from a managed one, the
    /// settings that they inherited are ours.
    pub fn new_unmanaged_pids(&self) -> &[i32] {
        &self.new_unmanaged_pids
    }

    /// The processes and threads that the rules select now.
    pub(crate) fn selection(&self) -> TaskSelection {
        let (by_thread, idle_threads) = (self.by_thread.clone(), self.idle_threads.clone());
        TaskSelection {
            by_thread,
            idle_threads,
            processes: self.processes.clone(),
        }
    }

    /// Makes this selection the current one again.
    pub(crate) fn restore_selection(&mut self, selection: TaskSelection) {
        TaskSelection {
            by_thread: self.by_thread,
            idle_threads: self.idle_threads,
            processes: self.processes,
        } = selection;
    }

    /// Decides again about every process, because the rules have changed. Returns the threads that are no longer
    /// managed.
    pub fn reexamine(&mut self, kernel: &dyn Kernel, rules: &[ManageRule]) -> Vec<ManagedThread> {
        self.sleeping_pids.clear();
        let previous_processes = std::mem::take(&mut self.processes);
        let own_service = self
            .own_service
            .get_or_insert_with(|| read_own_service(kernel))
            .clone();
        let directory = self.directory.clone();
        let reader = PropertyReader::new(kernel, rules, &directory, own_service.as_ref());
        for (pid, old_process) in previous_processes {
            self.examine(&reader, pid, kernel.run_time_ns(pid).ok());
            if let Some(new_process) = self
                .processes
                .get_mut(&pid)
                .filter(|new_process| new_process.leader == old_process.leader)
                && new_process.id.is_some()
            {
                new_process.id = old_process.id.or(new_process.id);
            }
        }
        let mut released_threads = Vec::new();
        let mut update_or_release = |task: &mut ManagedThread| match self.processes.get(&task.pid) {
            Some(process @ ExaminedProcess { id: Some(_), .. }) => {
                task.user = process.properties.user;
                task.goal = process.goal();
                let is_fixed = process.is_fixed();
                if is_fixed && !task.is_fixed {
                    released_threads.push(task.clone());
                }
                task.is_fixed = is_fixed;
                true
            }
            _ => {
                released_threads.push(task.clone());
                false
            }
        };
        self.by_thread.retain(|_, task| update_or_release(task));
        for pid in self.idle_threads.pids() {
            let mut are_all_retained = true;
            for thread in self.idle_threads.threads_mut(pid) {
                are_all_retained &= update_or_release(thread);
            }
            if !are_all_retained {
                self.idle_threads.remove_process(pid);
            }
        }
        released_threads
    }

    /// The files of rules that count the work of all their processes, each with the first task of these processes.
    pub(crate) fn processes_by_progress_file<'a>(
        &self,
        rules: &'a [ManageRule],
    ) -> BTreeMap<&'a Path, Vec<&ManagedThread>> {
        let mut processes_by_file: BTreeMap<&Path, Vec<&ManagedThread>> = BTreeMap::new();
        if rules.iter().all(|rule| rule.progress_file.is_none()) {
            return processes_by_file;
        }

        let mut seen_pids = BTreeSet::new();
        for task in self.tasks() {
            if task.has_exited || !seen_pids.insert(task.pid) {
                continue;
            }
            let subject = self
                .processes
                .get(&task.pid)
                .and_then(|process| process.properties.subject());
            let rule = subject.and_then(|subject| find_rule(rules, &subject));
            if let Some(file) = rule.and_then(|rule| rule.progress_file.as_deref()) {
                processes_by_file.entry(file).or_default().push(task);
            }
        }
        processes_by_file
    }

    /// Managed tasks in order of arrival.
    pub fn tasks(&self) -> Vec<&ManagedThread> {
        let mut threads: Vec<&ManagedThread> = self.by_thread.values().collect();
        threads.sort_by_key(|task| task.task);
        threads
    }

    /// The task with this id; `None` if it never existed, or was dropped.
    pub fn get(&self, task: TaskId) -> Option<&ManagedThread> {
        self.by_thread.values().find(|managed| managed.task == task)
    }

    /// Drops the exited threads; to be called once they have been reported.
    pub fn drop_exited(&mut self) {
        self.by_thread.retain(|_, task| !task.has_exited);
    }
}

/// Whether the last thread of a process has ended, as its first thread's state shows.
fn has_process_exited(stat: &ThreadStat) -> bool {
    matches!(stat.state, 'Z' | 'X') && stat.threads <= 1
}
