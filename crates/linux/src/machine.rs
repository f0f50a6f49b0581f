//! The live host as a [`Machine`], with the interface that the simulator also implements.
//!
//! A decision that was tried on a simulator is the same decision on a host only if both are asked
//! and answered alike, so everything that is special about a host (files that vanish, counters that
//! are taken, changes by others) ends here, as an absent value or a refused item. `observe` waits
//! for the end of the window, then reads the managed threads and all counters once. `apply` reads
//! the state of the host, derives the list of changes (`cachemate_core::changes`), and executes it.
//!
//! For example, a plan moves task 7 to CPUs 2-3 and gives it a quarter of the ways. The thread has
//! exited meanwhile, so the kernel answers `ESRCH`: these items are refused, and the changes that
//! depend on none of them go on. What is in force is read back from the kernel and never assumed.
//!
//! Unless the configuration sets `act`, the machine only observes, and `apply` refuses each line of
//! the plan that would change something with [`OBSERVE_ONLY_REASON`].

mod apply;
mod lifecycle;
mod probing;
mod report;
mod starts;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cachemate_core::{
    ActiveShare, AppliedPlan, CacheShare, Capabilities, Change, CounterEvent, CounterScope,
    EventCount, EventCounts, Goal, Machine, MachineError, Observation, Plan, ProbeKind, ProcessId,
    Profile, Profiles, ServiceProfiles, TaskId, TaskSample, TimeSpan, Topology, Units, WindowEnd,
    WindowLength,
};

use crate::act::actuator::{Actuator, ApplyReport, GuardianCommand};
use crate::act::colors::shares::ColorShares;
use crate::act::cpusets::CpusetGroup;
use crate::act::gangs::GangRunners;
use crate::act::group_overrides::GroupOverrides;
use crate::act::resctrl::{Resctrl, WayController};
use crate::act::rules::{ManageRule, bind_to_processes};
use crate::kernel::{KeptFile, Kernel, ThreadKey, lock};
use crate::nri::ContainerStarts;
use crate::safety::actuation_lock::ActuationLock;
use crate::safety::journal::{JournalObject, ObjectState};
use crate::safety::restore::RestoredObject;
use crate::sense::continuity::{ONLINE_CPUS_PATH, SuspendClock, refresh_online};
use crate::sense::counter_table::{CounterTable, CpuUse};
use crate::sense::counters::EventSurvey;
use crate::sense::memory_nodes::MemoryNodes;
use crate::sense::miss_trace::find_tracer;
use crate::sense::probe_runner::ProbeRunner;
use crate::sense::progress::{ProgressReports, read_work_file};
use crate::sense::service_directory::ServiceDirectory;
use crate::sense::tasks::{ManagedThread, TaskTable, ThreadUsage};
use report::SlowReadings;
use starts::StartPlacements;

/// The reason for refusing every change while the machine only observes.
pub const OBSERVE_ONLY_REASON: &str =
    "observing only: nothing is changed unless the configured mode is act";

/// Windows between two checks of the profile of a long-lived program.
const LEARNING_PERIOD: u64 = 10;

/// Maximum time for which a window is not attended to.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// Time between two heartbeats within a window, which may last longer than a watchdog's timeout.
const HEARTBEAT_PERIOD: Duration = Duration::from_secs(1);

/// Minimum time by which a stop is recognized: waits last at most a tenth of a second, so after a longer one, a
/// hypervisor has paused the virtual machine, or a signal has stopped the daemon. The kernel's clocks do not show such
/// a pause.
const MIN_STOP_TIME: Duration = Duration::from_secs(2);

/// Options of the live machine.
#[derive(Clone, Default, Debug)]
pub struct LiveOptions {
    /// Rules that select programs, tried in order; the first match decides.
    pub rules: Vec<ManageRule>,
    /// Groups that are confined to certain CPUs, whatever the policy decides.
    pub cpusets: Vec<CpusetGroup>,
    /// Does the machine act? If not, it changes nothing on the host.
    pub should_act: bool,
    /// Directory of the restore journal.
    pub state_dir: std::path::PathBuf,
    /// The guardian, which is started before the first change.
    pub guardian: GuardianCommand,
    /// Length of the windows until a plan sets another length.
    pub first_window: Duration,
    /// Maximum share of the time for probes.
    pub probe_share: f64,
    /// Programs' reports of their work.
    pub progress: ProgressReports,
    /// The resctrl file system, which partitions caches by ways and counts occupancy and traffic; `None` if it is not
    /// mounted.
    pub resctrl: Option<Resctrl>,
    /// Socket of the gang scheduler; `None` if gangs always use idle turns.
    pub gang_scheduler_socket: Option<std::path::PathBuf>,
    /// Previously recorded profiles, by command name.
    pub known_profiles: BTreeMap<String, Profile>,
    /// Profiles of services' programs, from earlier runs.
    pub learned_profiles: ServiceProfiles,
    /// Containers that a runtime reports.
    pub directory: ServiceDirectory,
    /// Containers that a runtime is about to start.
    pub starts: ContainerStarts,
    /// The right to act; `None` in tests without other processes.
    pub actuation_lock: Option<Arc<ActuationLock>>,
    /// If set, ends the run within a tenth of a second.
    pub stop_flag: Arc<AtomicBool>,
    /// If set, ends the window early, with the measurements so far.
    pub wake_flag: Arc<AtomicBool>,
}

/// A live host as a machine.
pub struct LiveMachine<K> {
    kernel: Arc<Mutex<K>>,
    options: LiveOptions,
    topology: Topology,
    capabilities: Capabilities,
    tasks: TaskTable,
    counters: CounterTable,
    previous_usage: BTreeMap<ThreadKey, ThreadUsage>,
    previous_progress: BTreeMap<ThreadKey, u64>,
    /// The numbers in the rules' progress files at the end of the previous window.
    previous_file_totals: BTreeMap<PathBuf, u64>,
    memory_nodes: MemoryNodes,
    probe_runner: ProbeRunner,
    probe_credit_ns: f64,
    /// Profiles of the programs that were recognized since the last window.
    recognized_profiles: BTreeMap<TaskId, Profile>,
    actuator: Actuator,
    way_controller: Option<WayController>,
    color_shares: ColorShares,
    gang_runners: GangRunners<K>,
    /// The weight that each nice value set by cachemate represents.
    weights: BTreeMap<ThreadKey, (f64, i32)>,
    placements: StartPlacements,
    /// The changes that the last plan required, including those that were not made.
    planned_changes: Vec<Change>,
    /// Confined groups, as last read back.
    confined_groups: Vec<CpusetGroup>,
    overrides: GroupOverrides,
    slow_readings: SlowReadings,
    applied_plan: AppliedPlan,
    /// Objects that were restored because root began to act, kept until they are reported.
    overruled_objects: Vec<RestoredObject>,
    suspend_clock: SuspendClock,
    online_file: KeptFile,
    /// The daemon was stopped during this window.
    was_stopped: bool,
    /// Clock ticks since the boot at the last three observations, the oldest one first.
    observation_ticks: [Option<u64>; 3],
    start_time: Instant,
    window_start: Instant,
    window: Duration,
    window_count: u64,
    /// Called at least once in [`HEARTBEAT_PERIOD`] while a window lasts.
    on_heartbeat: Option<Box<dyn FnMut() + Send>>,
}

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// A machine over this kernel. Constructing it changes nothing on the host.
    pub fn new(
        kernel: K,
        topology: Topology,
        capabilities: Capabilities,
        event_surveys: Vec<EventSurvey>,
        mut options: LiveOptions,
    ) -> Self {
        bind_to_processes(&mut options.rules, &kernel);
        let now = Instant::now();
        let pid = kernel.own_pid();
        // If the start time cannot be read, only the names of our groups are less specific.
        let owner = kernel.stat(pid).map_or(
            ThreadKey {
                tid: pid,
                start_ticks: 0,
            },
            |stat| stat.key,
        );
        let work_events = [CounterEvent::Instructions, CounterEvent::Cycles]
            .map(|event| crate::sense::counters::working_event(&event_surveys, event));
        let facility = crate::sense::sampling::find_facility(&kernel);
        let probe_runner =
            ProbeRunner::new(facility, find_tracer(&kernel, &event_surveys), work_events);
        let online_file = kernel.keep_open(ONLINE_CPUS_PATH.into());
        let kernel = Arc::new(Mutex::new(kernel));
        let mut actuator = Actuator::new(&options.state_dir, options.guardian.clone());
        options
            .actuation_lock
            .iter()
            .for_each(|acting| actuator.set_actuation_lock(acting.clone()));
        let mut tasks = TaskTable::new(work_events[0].is_none());
        tasks.set_directory(options.directory.clone());
        // Where events are not allowed, every refresh lists the processes.
        lock(&kernel)
            .process_events()
            .into_iter()
            .for_each(|events| tasks.set_events(events));
        // Where groups cannot be watched, the refreshes read them in turn.
        lock(&kernel)
            .group_moves()
            .into_iter()
            .for_each(|moves| tasks.set_group_moves(moves));
        LiveMachine {
            way_controller: options
                .resctrl
                .clone()
                .map(|resctrl| WayController::new(resctrl, owner)),
            gang_runners: GangRunners::new(
                kernel.clone(),
                options.gang_scheduler_socket.as_deref(),
            ),
            kernel,
            actuator,
            window: options.first_window,
            options,
            topology,
            capabilities,
            tasks,
            counters: CounterTable::new(event_surveys),
            previous_usage: BTreeMap::new(),
            previous_progress: BTreeMap::new(),
            previous_file_totals: BTreeMap::new(),
            memory_nodes: MemoryNodes::default(),
            probe_runner,
            probe_credit_ns: 0.0,
            recognized_profiles: BTreeMap::new(),
            color_shares: ColorShares::default(),
            weights: BTreeMap::new(),
            placements: StartPlacements::default(),
            planned_changes: Vec::new(),
            confined_groups: Vec::new(),
            overrides: GroupOverrides::default(),
            slow_readings: SlowReadings::default(),
            applied_plan: AppliedPlan::default(),
            overruled_objects: Vec::new(),
            suspend_clock: SuspendClock::read_clocks(),
            online_file,
            was_stopped: false,
            observation_ticks: [None; 3],
            start_time: now,
            window_start: now,
            window_count: 0,
            on_heartbeat: None,
        }
    }

    /// Sets a function that is called regularly while a window lasts, so that a watchdog does not treat the wait as a
    /// hang. The function is not called at any other time.
    pub fn set_heartbeat(&mut self, heartbeat: impl FnMut() + Send + 'static) {
        self.on_heartbeat = Some(Box::new(heartbeat));
    }

    pub(crate) fn kernel(&self) -> Arc<Mutex<K>> {
        self.kernel.clone()
    }

    /// Adds the profiles of this window to the profiles of their services' programs. Returns whether any profile is
    /// new. A short-lived program is checked in every window. A long-lived program is checked every
    /// [`LEARNING_PERIOD`] windows, because comparing curves takes time.
    pub fn learn(&mut self, profiles: &Profiles) -> bool {
        let mut has_new_profile = false;
        let now_ns = self.start_time.elapsed().as_nanos() as u64;
        let max_young_age_ns = LEARNING_PERIOD * self.window.as_nanos() as u64;
        for task in self.tasks.tasks() {
            let is_check_due =
                (self.window_count + u64::from(task.task.0)).is_multiple_of(LEARNING_PERIOD);
            if !is_check_due && now_ns.saturating_sub(task.arrived_ns) > max_young_age_ns {
                continue;
            }
            if let Some(profile) = profiles.get(&task.task) {
                has_new_profile |= self
                    .options
                    .learned_profiles
                    .learn(&task.profile_key(), profile);
            }
        }
        has_new_profile
    }

    /// Profiles of services' programs, of this run and of earlier ones.
    pub fn learned_profiles(&self) -> &ServiceProfiles {
        &self.options.learned_profiles
    }

    /// Access to the underlying host, for tests.
    #[cfg(test)]
    pub(crate) fn with_kernel<T>(&self, action: impl FnOnce(&K) -> T) -> T {
        action(&*lock(&self.kernel))
    }

    fn wait_for_window_end(&mut self) -> Option<WindowEnd> {
        let deadline = self.window_start + self.window;
        // If a probe took longer than its share of the time, later windows have less time for probes.
        self.probe_credit_ns += self.window.as_nanos() as f64 * self.options.probe_share;
        self.probe_credit_ns = self.probe_credit_ns.min(self.window.as_nanos() as f64);
        let mut last_heartbeat = Instant::now();
        let mut last_iteration = Instant::now();
        loop {
            if last_heartbeat.elapsed() >= HEARTBEAT_PERIOD {
                last_heartbeat = Instant::now();
                self.actuator.send_heartbeat(self.window);
                self.on_heartbeat.iter_mut().for_each(|beat| beat());
            }
            if self.options.stop_flag.load(Ordering::Relaxed) {
                return None;
            }
            if self.options.wake_flag.swap(false, Ordering::Relaxed) {
                return Some(WindowEnd::Interrupted);
            }
            // The check is repeated during the window, because two daemons that act at the same time would take each
            // other's settings for originals.
            if self.is_overruled() {
                return Some(WindowEnd::Interrupted);
            }
            self.tasks.take_events();
            if self.actuator.guardian_pid().is_some() {
                lock(&self.kernel()).record_births();
            }
            self.was_stopped |= last_iteration.elapsed() >= MIN_STOP_TIME;
            last_iteration = Instant::now();
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Some(WindowEnd::Elapsed);
            }
            let start = Instant::now();
            let next_probe = self
                .probe_runner
                .next_probe()
                .filter(|_| self.probe_credit_ns > 0.0);
            let is_row_next =
                next_probe.is_some_and(|probe| matches!(probe.kind, ProbeKind::CoRunRows { .. }));
            let span_wait =
                self.counters
                    .poll(self.window_start.elapsed(), self.window, is_row_next);
            let has_probed = self.probe_credit_ns > 0.0 && self.run_probe_step();
            if has_probed {
                self.probe_credit_ns -= start.elapsed().as_nanos() as f64;
            }
            let max_wait = if has_probed {
                Duration::ZERO
            } else {
                MAX_WAIT.min(remaining).min(span_wait)
            };
            if let Some(start_request) = self.options.starts.wait_for_start(max_wait) {
                self.place_start(start_request);
            }
        }
    }

    fn refresh_tasks(&mut self) -> Result<(), MachineError> {
        self.maintain_guardian()?;
        let now_ns = self.start_time.elapsed().as_nanos() as u64;
        let kernel = self.kernel();
        let first_new_task = self.tasks.next_task();
        self.tasks.set_guardian(self.actuator.guardian_pid());
        {
            let kernel = lock(&kernel);
            self.observation_ticks = [
                self.observation_ticks[1],
                self.observation_ticks[2],
                kernel.ticks_since_boot().ok(),
            ];
            let refresh_result = self.tasks.refresh(&*kernel, &self.options.rules, now_ns);
            refresh_result.map_err(|error| MachineError(format!("/proc: {error}")))?;
        }
        let released_threads = self.tasks.take_released();
        // An object that cannot be restored here stays in the journal and is retried at the end.
        self.release(&released_threads)?;
        let kernel = lock(&kernel);
        let new_threads: Vec<&ManagedThread> = self
            .tasks
            .tasks()
            .into_iter()
            .filter(|task| task.task >= first_new_task)
            .collect();
        for task in &new_threads {
            let cpu_use = task.usage.ran_ns.zip(task.usage.slices);
            let cpu_use = cpu_use.map(|(ran_ns, switches)| CpuUse { switches, ran_ns });
            // The kernel counts this in 100 ticks a second (`USER_HZ`).
            let age = self.observation_ticks[2].map(|now| {
                Duration::from_millis(10 * now.saturating_sub(task.thread.start_ticks))
                    .max(self.window)
            });
            self.counters.insert(task.thread, cpu_use.zip(age));
        }
        let renamed_tasks = self.tasks.renamed_tasks();
        let is_renamed = |task: &&ManagedThread| {
            renamed_tasks.contains(&task.task) && task.task < first_new_task
        };
        let tasks_to_recognize = new_threads
            .iter()
            .copied()
            .chain(self.tasks.tasks().into_iter().filter(is_renamed));
        for task in tasks_to_recognize {
            // A profile recorded by the operator takes precedence over a profile learned from observation.
            let recorded_profile = self
                .options
                .known_profiles
                .get(&task.program)
                .or_else(|| self.options.known_profiles.get(&task.name));
            if let Some(profile) =
                recorded_profile.or_else(|| self.options.learned_profiles.get(&task.profile_key()))
            {
                self.recognized_profiles.insert(task.task, profile.clone());
            }
        }
        let is_earlier_unread = |task: &&ManagedThread| {
            self.actuator.has_unread_settings(task.thread) && task.task < first_new_task
        };
        let due_threads: Vec<&ManagedThread> = new_threads
            .iter()
            .copied()
            .chain(self.tasks.tasks().into_iter().filter(is_earlier_unread))
            .chain(self.tasks.new_idle_threads())
            .chain(
                self.tasks
                    .idle_threads()
                    .filter(|thread| self.actuator.has_unread_settings(thread.thread)),
            )
            .collect();
        let restore_result = self.actuator.restore_inherited(
            &*kernel,
            &due_threads,
            self.tasks.new_unmanaged_pids(),
        );
        let is_alive = |thread| self.tasks.is_alive(thread);
        // If the journal cannot be rewritten, the old one remains and nothing is lost, so the daemon continues.
        let _ = self.actuator.forget_dead_threads(&*kernel, &is_alive);
        restore_result.map_err(|error| MachineError(error.to_string()))
    }

    /// Work done since the last observation, attributed to the first thread of each process.
    fn read_progress(&mut self) -> BTreeMap<ThreadKey, f64> {
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        self.options.progress.forget_ended(&*kernel);
        let is_reporter = |task: &&ManagedThread| task.pid == task.thread.tid && !task.has_exited;
        let leaders = self.tasks.tasks().into_iter().filter(is_reporter);
        let thread_total = |task: &ManagedThread| {
            Some((
                task.thread,
                self.options.progress.read_total(&*kernel, task.pid)?,
            ))
        };
        let totals: BTreeMap<ThreadKey, u64> = leaders.filter_map(thread_total).collect();
        let previous_totals = std::mem::replace(&mut self.previous_progress, totals);
        let progress_since = |(thread, total): (&ThreadKey, &u64)| {
            Some((
                *thread,
                total.checked_sub(*previous_totals.get(thread)?)? as f64,
            ))
        };
        self.previous_progress
            .iter()
            .filter_map(progress_since)
            .collect()
    }

    /// Adds the growth of the rules' progress files to the work of the first process of each, which stands for all.
    /// The result is the other processes.
    fn add_work_in_files(
        &mut self,
        progress: &mut BTreeMap<ThreadKey, f64>,
    ) -> BTreeSet<ProcessId> {
        let mut represented_processes = BTreeSet::new();
        let mut totals = BTreeMap::new();
        for (file, processes) in self.tasks.processes_by_progress_file(&self.options.rules) {
            represented_processes.extend(processes[1..].iter().map(|task| task.process));
            progress.retain(|thread, _| processes.iter().all(|task| task.thread != *thread));

            let Some(total) = read_work_file(file) else {
                continue;
            };
            let previous_total = self.previous_file_totals.get(file);
            if let Some(work) = previous_total.and_then(|previous| total.checked_sub(*previous)) {
                progress.insert(processes[0].thread, work as f64);
            }
            totals.insert(file.to_path_buf(), total);
        }
        self.previous_file_totals = totals;
        represented_processes
    }

    /// The tasks in the window that ends now and has lasted this long.
    fn sample_tasks(&mut self, window: Duration) -> Vec<TaskSample> {
        let mut samples = Vec::new();
        let is_movable = |task: &&ManagedThread| !task.is_fixed && !task.has_exited;
        let movable_processes = || {
            self.tasks
                .tasks()
                .into_iter()
                .filter(is_movable)
                .map(|task| (task.process, task.pid))
                .collect()
        };
        self.memory_nodes
            .refresh(&*lock(&self.kernel), &self.topology, movable_processes);
        let mut progress = self.read_progress();
        let represented_processes = self.add_work_in_files(&mut progress);
        self.previous_usage
            .extend(self.tasks.woken_usage().iter().copied());
        let mut recognized_profiles = std::mem::take(&mut self.recognized_profiles);
        for task in self.tasks.tasks() {
            let previous_usage = self.previous_usage.get(&task.thread).copied();
            // If the thread was created in this window, its whole total belongs to the window. The same holds if it was
            // created in the window before and hardly ran there, so that the refresh left it to this one. For an older
            // thread without an earlier observation, the window's part of the total is unknown.
            let [before_last, last, _] = self.observation_ticks;
            let has_started_in_window = before_last
                .or(last)
                .is_some_and(|ticks| task.thread.start_ticks >= ticks);
            let count_since = |select_total: fn(&ThreadUsage) -> Option<u64>| {
                let current_total = select_total(&task.usage)?;
                match &previous_usage {
                    Some(previous) => Some(current_total.saturating_sub(select_total(previous)?)),
                    None => has_started_in_window.then_some(current_total),
                }
            };
            let (ran_ns, switches) = (
                count_since(|usage| usage.ran_ns),
                count_since(|usage| usage.slices),
            );
            let cpu_use = ran_ns
                .zip(switches)
                .map(|(ran_ns, switches)| CpuUse { switches, ran_ns });
            let mut counts = self.counters.read(task.thread, cpu_use, window);
            for (event, count) in [
                (CounterEvent::ContextSwitches, switches),
                (CounterEvent::SystemCalls, count_since(|usage| usage.calls)),
                (
                    CounterEvent::PageFaults,
                    count_since(|usage| Some(usage.faults)),
                ),
            ] {
                counts.extend(count.map(|count| EventCount {
                    event,
                    count,
                    enabled_share: 1.0,
                }));
            }
            counts.sort_by_key(|reading| reading.event);
            // The first process of a progress file answers for the rate of all.
            let is_represented = represented_processes.contains(&task.process);
            let goal = task.goal.map(|goal| Goal {
                min_rate: goal.min_rate.filter(|_| !is_represented),
                ..goal
            });
            samples.push(TaskSample {
                task: task.task,
                process: task.process,
                user: task.user,
                name: task.name.clone(),
                service: task.service_of_sample(),
                arrival_ns: task.arrived_ns,
                exited: task.has_exited,
                unmovable: task.is_fixed,
                goal,
                cpu: task.cpu,
                on_cpu_ns: task
                    .last_cpu
                    .zip(ran_ns)
                    .into_iter()
                    .filter(|(_, ns)| *ns > 0)
                    .collect(),
                run_queue_wait_ns: count_since(|usage| usage.waited_ns),
                counts: EventCounts(counts),
                progress: progress.get(&task.thread).copied(),
                pages_per_color: None,
                pages_per_node: self.memory_nodes.node_pages(task.process),
                stored_profile: recognized_profiles.remove(&task.task).map(Box::new),
            });
        }
        self.previous_usage = self
            .tasks
            .tasks()
            .iter()
            .map(|task| (task.thread, task.usage))
            .collect();
        self.counters
            .begin_window(|thread| self.previous_usage.contains_key(thread));
        samples
    }

    fn record_confined_groups(&mut self, report: &ApplyReport) {
        let find_current_group =
            |group: &CpusetGroup| {
                let file_suffix = Path::new(group.cgroup.trim_matches('/'))
                    .join(crate::kernel::group_dirs::CPUSET_FILE);
                let state = report.read_back_states.iter().find_map(|(object, state)| {
                    match (object, state) {
                        (JournalObject::File { path }, ObjectState::Text(text))
                            if path.ends_with(&file_suffix) =>
                        {
                            text.parse().ok()
                        }
                        _ => None,
                    }
                });
                Some(CpusetGroup {
                    cgroup: group.cgroup.clone(),
                    cpus: state?,
                })
            };
        self.confined_groups = self
            .options
            .cpusets
            .iter()
            .filter_map(find_current_group)
            .collect();
    }

    /// Current occupancy of the shares in force, and the traffic of this window.
    fn refresh_way_shares(&mut self) -> Vec<(CounterScope, EventCounts)> {
        let Some(ways) = &mut self.way_controller else {
            return Vec::new();
        };
        let kernel = lock(&self.kernel);
        let shares: Vec<CacheShare> = self
            .applied_plan
            .shares
            .iter()
            .map(|active_share| active_share.share.clone())
            .collect();
        let tasks = self.tasks.tasks();
        self.applied_plan.shares = ways.read_back(&*kernel, &shares, &tasks);
        let limits = std::mem::take(&mut self.applied_plan.bandwidth);
        self.applied_plan.bandwidth = ways.read_back_bandwidth(&*kernel, &limits, &tasks);
        ways.traffic_counts(&*kernel)
    }

    /// Adds the memory traffic of processes that a group of resctrl counts apart to the first sample of each.
    fn add_process_traffic(&mut self, samples: &mut [TaskSample]) {
        let Some(ways) = &mut self.way_controller else {
            return;
        };
        let bytes_by_process = ways.process_traffic(&*lock(&self.kernel), &self.tasks.tasks());
        for (process, bytes) in bytes_by_process {
            let mut live = samples.iter_mut().filter(|sample| !sample.exited);
            if let Some(sample) = live.find(|sample| sample.process == process) {
                let counts = &mut sample.counts;
                let traffic = EventCounts::exact([(CounterEvent::MemoryBytes, bytes)]);
                counts.0.extend(traffic.0);
                counts.0.sort_by_key(|count| count.event);
            }
        }
    }

    /// Current progress of recoloring, which continues between two plans.
    fn read_color_shares(&mut self) -> Vec<ActiveShare> {
        let is_colored = |share: &CacheShare| matches!(share.units, Units::Colors { .. });
        let shares: Vec<CacheShare> = self
            .applied_plan
            .shares
            .iter()
            .map(|active_share| active_share.share.clone())
            .filter(is_colored)
            .collect();
        if shares.is_empty() {
            return Vec::new();
        }
        let (active_shares, pending_items) =
            self.color_shares
                .read_back(&*lock(&self.kernel), &shares, &self.tasks.tasks());
        self.applied_plan.pending = pending_items;
        active_shares
    }
}

impl<K: Kernel + Send + 'static> Machine for LiveMachine<K> {
    fn topology(&self) -> &Topology {
        &self.topology
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        let Some(mut end_reason) = self.wait_for_window_end() else {
            return Ok(None);
        };
        let have_cpus_changed =
            refresh_online(&*lock(&self.kernel), &self.online_file, &mut self.topology);
        let was_stopped = std::mem::take(&mut self.was_stopped);
        if self.suspend_clock.advance(SuspendClock::read_clocks())
            || have_cpus_changed
            || was_stopped
        {
            end_reason = WindowEnd::HostChanged;
        }
        self.refresh_tasks()?;
        let now = Instant::now();
        let elapsed = now - self.window_start;
        let span = TimeSpan {
            start_ns: (self.window_start - self.start_time).as_nanos() as u64,
            elapsed_ns: elapsed.as_nanos() as u64,
            elapsed_cycles: None,
        };
        self.window_start = now;
        let mut tasks = self.sample_tasks(elapsed);
        self.tasks.drop_exited();
        let window = self.window_count;
        self.window_count += 1;
        // Color shares are read first, because reading the way shares covers only the latter.
        let color_shares = self.read_color_shares();
        let shared_counts = self.refresh_way_shares();
        self.add_process_traffic(&mut tasks);
        self.applied_plan
            .shares
            .retain(|active_share| !matches!(active_share.share.units, Units::Colors { .. }));
        self.applied_plan.shares.extend(color_shares);
        let applied_plan = self.applied_plan.clone();
        let probe_results = std::mem::take(&mut self.probe_runner.results);
        Ok(Some(Observation {
            window,
            span,
            end_reason,
            tasks,
            shared_counts,
            probe_results,
            applied: applied_plan,
        }))
    }

    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        self.window = match plan.window {
            WindowLength::Time { ns } => Duration::from_nanos(ns),
            WindowLength::Cycles { cycles } => {
                let hertz = self
                    .topology
                    .cpus
                    .iter()
                    .find_map(|cpu| cpu.hertz)
                    .unwrap_or(1_000_000_000);
                Duration::from_secs_f64(cycles as f64 / hertz as f64)
            }
        };
        self.window = self
            .window
            .max(Duration::from_nanos(self.capabilities.min_window_ns));
        self.probe_runner.set_requests(&plan.probes);
        let start = Instant::now();
        let mut applied_plan = AppliedPlan::default();
        if self.options.should_act {
            self.update_gang_scheduler(plan, &mut applied_plan);
        }
        let (snapshot, change_list, resctrl_lock) = self.derive_change_list(plan);
        self.planned_changes.clone_from(&change_list.changes);
        if !self.options.should_act {
            self.applied_plan = self.refuse_changes(snapshot, change_list);
            return Ok(self.applied_plan.clone());
        }
        let report = self.execute(&snapshot, change_list, &mut applied_plan);
        if let Some(ways) = &self.way_controller {
            ways.assign_counters(&*lock(&self.kernel));
        }
        drop(resctrl_lock);
        self.record_confined_groups(&report);
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        let tasks = self.tasks.tasks();
        if let Some(ways) = &mut self.way_controller {
            applied_plan.shares = ways.read_back(&*kernel, &plan.shares, &tasks);
            applied_plan.bandwidth = ways.read_back_bandwidth(&*kernel, &plan.bandwidth, &tasks);
        }
        for task in &tasks {
            let thread = task.thread;
            if let Some(ObjectState::Cpus(cpus)) =
                report.read_back_states.get(&JournalObject::Affinity {
                    pid: task.pid,
                    thread,
                })
                && plan.affinity.contains_key(&task.task)
            {
                applied_plan.affinity.insert(task.task, cpus.clone());
            }
            if let Some(weight) = plan.weights.get(&task.task)
                && let Some(ObjectState::Nice(nice)) =
                    report.read_back_states.get(&JournalObject::Nice {
                        pid: task.pid,
                        thread,
                    })
                && self.weights.get(&thread) == Some(&(*weight, *nice))
            {
                applied_plan.weights.insert(task.task, *weight);
            }
        }
        let (active_shares, pending_items) =
            self.color_shares.read_back(&*kernel, &plan.shares, &tasks);
        applied_plan.shares.extend(active_shares);
        applied_plan.pending = pending_items;
        applied_plan.gangs = self.gang_runners.schedules();
        if self.gang_runners.can_separate_clashes() {
            applied_plan.penalties.clone_from(&plan.penalties);
        }
        applied_plan.probes = self.probe_runner.probe_ids();
        applied_plan
            .refused
            .append(&mut self.probe_runner.refused_items);
        applied_plan.cost_ns = start.elapsed().as_nanos() as u64;
        self.actuator.send_heartbeat(self.window);
        self.applied_plan = applied_plan.clone();
        drop(kernel);
        self.record_placements(&report);
        Ok(applied_plan)
    }
}
