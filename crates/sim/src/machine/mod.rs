//! The simulated machine as a `core::Machine`, which policies cannot distinguish from a host.
//!
//! A window runs the operating system until its time is over, a probe has a result, or tasks arrive
//! or exit. The machine then reports the values that a host could read, although it counts
//! everything: a policy that worked with exact counts would not be the one that runs on a host.
//!
//! For example, with a time scale of 100 a plan that asks for windows of 10 ms gets them after
//! 300,000 cycles of 3 GHz, and a thread that ran half of that is reported with 5 ms. It executed a
//! hundredth of the instructions that a host would have counted, however: times in nanoseconds are
//! nominal, that is, without the run's time scale; counts and cycles are those of the simulated
//! machine.

mod apply;
mod capabilities;
mod counter_multiplexing;
mod observe;
mod probes;
mod progress_log;
mod setup;

#[cfg(test)]
mod probe_tests;
#[cfg(test)]
mod proof_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cachemate_core::{
    AppliedPlan, CacheId, CacheLevel, Capabilities, ClassLimits, CoRunPenalty, CpuId, CpuSet,
    GangSchedule, Goal, Machine, MachineError, MachineSpec, MachineSpecError, Observation, Plan,
    ProbeId, RefusedItem, ServiceClassId, TaskId, Topology, WindowEnd, WindowLength,
};

pub use cachemate_core::RunLimit;
use counter_multiplexing::CounterMultiplexer;
pub use progress_log::{ProgressSample, TaskProgress};
pub use setup::{NominalClock, SharedMemory, SimOptions, SimProgram, ThreadBuilder};

use crate::baseline::Baseline;
use crate::hw::{CacheCounters, Charge, Hardware, HwOptions};
use crate::os::dispatch::Dispatcher;
use crate::os::domains::Domains;
use crate::os::frames::{FrameAllocator, FrameAllocatorSpec};
use crate::os::memory::VirtualMemory;
use crate::os::queues::Slot;
use crate::os::schedulers::{SchedulerTimes, build_scheduler};
use crate::os::system::{OsCosts, System, SystemEvent};

/// Nominal interval at which multiplexed counters are switched, as by a kernel's timer.
pub const COUNTER_ROTATION_NS: u64 = 4_000_000;
/// Approximate nominal length of a burst of page moves.
const PAGE_MOVE_BURST_NS: u64 = 100_000;
/// Nominal time for which touches are observed before pages move, if hot pages move first.
const TOUCH_WATCH_NS: u64 = 10_000_000;
/// Index of the process of the machine's own probe threads; programs follow it.
const PROBE_PROCESS: usize = 0;

/// A task with the values that were last reported to the outside.
pub(crate) struct SimTask {
    pub slot: Slot,
    pub program: usize,
    pub name: String,
    pub goal: Option<Goal>,
    pub is_pinned: bool,
    /// Cycles on each CPU at the last observation.
    pub reported_on_cpu_cycles: Vec<u64>,
    /// Cycles that it had waited for a CPU at the last observation.
    pub reported_wait_cycles: u64,
    /// Its progress at the last observation.
    pub reported_progress: f64,
    /// Whether the task's exit has been reported.
    pub is_exit_reported: bool,
}

pub(crate) struct RunningProgram {
    pub program: SimProgram,
    pub arrival_cycle: Option<u64>,
    pub run_count: u32,
    /// Number of threads of the present run that have not exited.
    pub live_threads: u32,
    pub completions: u32,
    /// Number of completions during the warm-up.
    pub warm_up_completions: u32,
}

/// A simulated machine with programs on it.
pub struct SimMachine {
    pub(crate) spec: MachineSpec,
    pub(crate) clock: NominalClock,
    pub(crate) topology: Topology,
    pub(crate) capabilities: Capabilities,
    pub(crate) levels: Vec<CacheLevel>,
    pub(crate) system: System,
    pub(crate) counter_multiplexer: CounterMultiplexer,
    /// Tasks by their id.
    pub(crate) tasks: Vec<SimTask>,
    pub(crate) task_of_slot: BTreeMap<Slot, TaskId>,
    pub(crate) programs: Vec<RunningProgram>,
    segment_by_number: BTreeMap<u32, usize>,
    pub(crate) plan: Plan,
    pub(crate) penalties: Vec<CoRunPenalty>,
    /// Refused items of the last plan, until the next observation reports them.
    pub(crate) refused: Vec<RefusedItem>,
    /// Gang schedules in force, in ascending order of their CPUs.
    pub(crate) gangs: Vec<GangSchedule>,
    /// Way masks of the classes of service; tasks without one are in the hardware's class 0, which has all ways.
    pub(crate) classes: BTreeMap<ServiceClassId, ClassLimits>,
    measured_length: Option<RunLimit>,
    /// Length of the warm-up; `None` once it is over.
    warm_up_length: Option<RunLimit>,
    pub(crate) baseline: Baseline,
    is_finished: bool,
    /// Cycle at which multiplexed counters are switched next.
    next_rotation_cycle: u64,
    /// Cost of switching the counters on one CPU, in scaled cycles.
    rotation_cost_cycles: u64,
    window_count: u64,
    pub(crate) last_shared: observe::LastSharedCounts,
    probes: Vec<probes::ActiveProbe>,
    /// Probe that has exclusive use of CPUs, if any.
    cpu_holder: Option<ProbeId>,
    stop_flag: Arc<AtomicBool>,
    progress_log: Option<progress_log::ProgressLog>,
}

impl SimMachine {
    /// Builds a machine with these programs.
    ///
    /// # Errors
    /// The first field of the specification that cannot be simulated.
    pub fn new(
        spec: &MachineSpec,
        options: &SimOptions,
        programs: Vec<SimProgram>,
    ) -> Result<Self, MachineSpecError> {
        spec.check()?;
        let clock = NominalClock::new(spec, options.scale);
        let topology = spec.topology();
        let mut scaled_spec = spec.clone();
        scaled_spec.counters.interrupt_cycles = clock.scale_down(spec.counters.interrupt_cycles);
        let &SimOptions {
            seed,
            prefetch,
            is_resident,
            ..
        } = options;
        let hw = Hardware::new(
            &scaled_spec,
            HwOptions {
                seed,
                is_prefetch_enabled: prefetch,
                is_resident,
            },
        )?;

        let times = SchedulerTimes {
            slice_cycles: clock.to_cycles(spec.os.time_slice_ns),
            millisecond_cycles: clock.to_cycles(1_000_000),
        };
        let dispatcher = Dispatcher::new(
            build_scheduler(options.scheduler, times),
            Domains::new(&topology),
        );
        let node_of_cpu: Vec<u32> = topology.cpus.iter().map(|cpu| cpu.memory_node).collect();
        let frames = FrameAllocator::new(FrameAllocatorSpec {
            frame_count: spec.memory.size_bytes / spec.pages.page_bytes,
            node_count: spec.memory.nodes,
            color_count: spec.pages.colors.unwrap_or(1),
            node_of_cpu: &node_of_cpu,
            max_piece_order: options.max_piece_order,
            seed: options.seed,
        });
        let costs = OsCosts {
            context_switch_cycles: clock.scale_down(spec.os.context_switch_cycles),
            migration_cycles: clock.scale_down(spec.os.migration_cycles),
            fault_cycles: (!is_resident).then(|| clock.scale_down(spec.pages.fault_cycles)),
            move_page_cycles: clock.scale_down(spec.pages.migration_cycles),
            hertz: spec.hertz,
            move_burst_cycles: clock.to_cycles(PAGE_MOVE_BURST_NS),
            touch_watch_cycles: clock.to_cycles(TOUCH_WATCH_NS),
        };
        let mut system = System::new(hw, dispatcher, VirtualMemory::new(frames), costs);
        let probe_process = system.add_process();
        debug_assert_eq!(probe_process, PROBE_PROCESS);
        let levels: Vec<CacheLevel> = spec.caches.iter().map(|cache| cache.level).collect();
        let to_running_program = |program: SimProgram| RunningProgram {
            arrival_cycle: Some(clock.to_unscaled_cycles(program.start_ns)),
            program,
            run_count: 0,
            live_threads: 0,
            completions: 0,
            warm_up_completions: 0,
        };
        let mut machine = SimMachine {
            capabilities: capabilities::true_capabilities(spec, &topology, clock),
            counter_multiplexer: CounterMultiplexer::new(
                &levels,
                spec.counters.count,
                spec.counters.sampler,
            ),
            last_shared: observe::LastSharedCounts::default(),
            spec: spec.clone(),
            clock,
            topology,
            levels,
            system,
            tasks: Vec::new(),
            task_of_slot: BTreeMap::new(),
            programs: programs.into_iter().map(to_running_program).collect(),
            segment_by_number: BTreeMap::new(),
            plan: Plan::idle(WindowLength::Time { ns: 1_000_000_000 }),
            penalties: Vec::new(),
            refused: Vec::new(),
            gangs: Vec::new(),
            classes: BTreeMap::new(),
            measured_length: options.ends,
            warm_up_length: options.warm_up,
            baseline: Baseline::default(),
            is_finished: false,
            next_rotation_cycle: clock.to_cycles(COUNTER_ROTATION_NS),
            rotation_cost_cycles: clock.scale_down(options.counter_turn_cycles),
            window_count: 0,
            probes: Vec::new(),
            cpu_holder: None,
            stop_flag: Arc::new(AtomicBool::new(false)),
            progress_log: None,
        };
        machine.admit_arrivals();
        Ok(machine)
    }

    /// Other threads may set it to true; the run then ends with the current window, with the
    /// results so far.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop_flag)
    }
    /// Simulated cycles, and not nominal ones.
    pub fn now_cycles(&self) -> u64 {
        self.system.now()
    }
    /// Between this run's cycles and nominal times.
    pub fn clock(&self) -> NominalClock {
        self.clock
    }

    /// Sets the length of the next observation's window, unless a plan sets another.
    pub fn set_first_window(&mut self, window: WindowLength) {
        self.plan.window = window;
    }

    /// Starts the programs that are due, and returns whether any started.
    fn admit_arrivals(&mut self) -> bool {
        let now = self.system.now();
        let due_programs: Vec<usize> = (0..self.programs.len())
            .filter(|&index| {
                self.programs[index]
                    .arrival_cycle
                    .is_some_and(|cycle| cycle <= now)
            })
            .collect();
        due_programs
            .iter()
            .for_each(|&index| self.start_program(index));
        !due_programs.is_empty()
    }

    fn start_program(&mut self, index: usize) {
        let process = self.system.add_process();
        let page_bytes = self.spec.pages.page_bytes;
        let running_program = &mut self.programs[index];
        running_program.arrival_cycle = None;
        let sources = (running_program.program.build_threads)(running_program.run_count);
        running_program.run_count += 1;
        running_program.live_threads = sources.len() as u32;
        let all_cpus: CpuSet = (0..self.spec.cpus()).collect();
        let pinned = running_program
            .program
            .pinned_cpus
            .clone()
            .map(|cpus| cpus.intersection(&all_cpus))
            .filter(|cpus| !cpus.is_empty());
        let shared = running_program.program.shared_memory.clone();
        let (name, goal) = (
            running_program.program.name.clone(),
            running_program.program.goal,
        );
        for memory in shared {
            let (first_page, end_page) = (
                memory.first_byte / page_bytes,
                (memory.first_byte + memory.bytes).div_ceil(page_bytes),
            );
            let system = &mut self.system;
            let segment = *self
                .segment_by_number
                .entry(memory.segment)
                .or_insert_with(|| system.memory.add_segment(first_page, end_page - first_page));
            self.system.memory.map_segment(process, segment);
        }
        for source in sources {
            let allowed_cpus = pinned.clone().unwrap_or_else(|| all_cpus.clone());
            let slot = self
                .system
                .add_task(process, source, allowed_cpus, 1.0, false);
            let task = TaskId(self.tasks.len() as u32);
            self.task_of_slot.insert(slot, task);
            self.tasks.push(SimTask {
                slot,
                program: index,
                name: name.clone(),
                goal,
                is_pinned: pinned.is_some(),
                reported_on_cpu_cycles: vec![0; self.spec.cpus() as usize],
                reported_wait_cycles: 0,
                reported_progress: 0.0,
                is_exit_reported: false,
            });
        }
    }

    /// Records that a thread of a program has exited. After the last one, the program may start again.
    fn record_exit(&mut self, slot: Slot) {
        let Some(task) = self.task_of_slot.get(&slot) else {
            return;
        };
        let running_program = &mut self.programs[self.tasks[task.0 as usize].program];
        running_program.live_threads -= 1;
        if running_program.live_threads == 0 {
            running_program.completions += 1;
            if running_program.program.restarts {
                running_program.arrival_cycle = Some(self.system.now());
            }
        }
    }

    fn window_cycles(&self) -> u64 {
        match self.plan.window {
            WindowLength::Time { ns } => self.clock.to_cycles(ns),
            WindowLength::Cycles { cycles } => (cycles / self.clock.scale).max(1),
        }
    }

    /// Whether the run has reached its length, or no program is left to run.
    fn is_over(&self) -> bool {
        let has_reached_length = self.warm_up_length.is_none()
            && self
                .measured_length
                .is_some_and(|length| self.has_reached(length));
        let has_no_program = self
            .programs
            .iter()
            .all(|program| program.live_threads == 0 && program.arrival_cycle.is_none());
        has_reached_length
            || has_no_program
            || self.has_reached_instruction_limits()
            || self.stop_flag.load(Ordering::Relaxed)
    }

    /// The length counts from the start of the measured part, or of the run during the warm-up.
    fn has_reached(&self, length: RunLimit) -> bool {
        match length {
            RunLimit::Cycles(_) | RunLimit::Ns(_) => {
                self.system.now() >= self.cycle_of_limit(length)
            }
            RunLimit::Instructions(count) => {
                self.total_instructions() - self.baseline.instructions() >= count
            }
            RunLimit::Completions(count) => self
                .programs
                .iter()
                .all(|program| program.completions - program.warm_up_completions >= count),
        }
    }

    /// The cycle by which a limit is certainly reached; `u64::MAX` if the limit is not a time.
    fn cycle_of_limit(&self, length: RunLimit) -> u64 {
        match length {
            RunLimit::Cycles(cycles) => self.baseline.cycle + cycles,
            RunLimit::Ns(ns) => self.baseline.cycle + self.clock.to_unscaled_cycles(ns),
            _ => u64::MAX,
        }
    }

    fn total_instructions(&self) -> u64 {
        self.tasks
            .iter()
            .map(|sim_task| {
                self.system
                    .thread(sim_task.slot)
                    .map_or(0, |thread| thread.counters.instructions)
            })
            .sum()
    }

    /// The cycle by which the warm-up or the run is certainly over.
    fn end_cycle(&self) -> u64 {
        self.warm_up_length
            .or(self.measured_length)
            .map_or(u64::MAX, |length| self.cycle_of_limit(length))
    }

    fn run_window(&mut self) -> Result<WindowEnd, MachineError> {
        let window_end = self.system.now().saturating_add(self.window_cycles());

        loop {
            if self
                .warm_up_length
                .is_some_and(|length| self.has_reached(length))
            {
                self.warm_up_length = None;
                self.begin_measuring();
            }
            // The warm-up stops the hardware, but ends no window.
            let is_warming_up = self.warm_up_length.is_some();
            let report_cycle = if is_warming_up {
                window_end
            } else {
                window_end.min(self.end_cycle())
            };

            let next_arrival = self
                .programs
                .iter()
                .filter_map(|program| program.arrival_cycle)
                .min()
                .unwrap_or(u64::MAX);
            let next_stop = report_cycle
                .min(self.end_cycle())
                .min(next_arrival)
                .min(self.next_rotation_cycle)
                .min(self.next_sample_cycle())
                .min(self.next_probe_check())
                .max(self.system.now());

            let mut have_tasks_changed = false;
            match self.system.run(next_stop, self.must_watch_switches()) {
                None => return Err(self.out_of_memory_error()),
                Some(SystemEvent::Exited(slot)) => {
                    self.record_exit(slot);
                    have_tasks_changed = true;
                }
                Some(SystemEvent::Time | SystemEvent::Switched(_) | SystemEvent::Interrupt(_)) => {}
            }

            let now = self.system.now();
            if now >= self.next_rotation_cycle {
                self.next_rotation_cycle = now + self.clock.to_cycles(COUNTER_ROTATION_NS);
                self.rotate_counters();
            }

            if now >= self.next_sample_cycle() {
                self.record_sample();
            }

            have_tasks_changed |= self.admit_arrivals();
            let has_probe_result = self.poll_probes();
            let is_over = self.is_over();
            if now >= report_cycle {
                return Ok(WindowEnd::Elapsed);
            } else if has_probe_result {
                return Ok(WindowEnd::ProbeAnswered);
            } else if have_tasks_changed {
                return Ok(WindowEnd::TasksChanged);
            } else if is_over {
                let is_stopped = self.stop_flag.load(Ordering::Relaxed);
                return Ok(if is_stopped {
                    WindowEnd::Interrupted
                } else {
                    WindowEnd::Elapsed
                });
            }
        }
    }

    fn rotate_counters(&mut self) {
        if self.counter_multiplexer.is_multiplexed() {
            self.read_counters();
            self.counter_multiplexer.rotate_group();
            for cpu in (0..self.spec.cpus()).map(CpuId) {
                if self.rotation_cost_cycles > 0 && self.system.hw.thread(cpu).is_some() {
                    self.system
                        .hw
                        .charge_cycles(cpu, self.rotation_cost_cycles, Charge::Interrupt);
                }
            }
        }
    }

    pub(crate) fn read_counters(&mut self) {
        for sim_task in self
            .tasks
            .iter()
            .filter(|sim_task| !sim_task.is_exit_reported)
        {
            self.counter_multiplexer
                .add_counts(sim_task.slot, self.system.task_counters(sim_task.slot));
        }
    }

    pub(crate) fn ticks_per_cycle(&self) -> u64 {
        self.system.hw.ticks_per_cycle()
    }
    pub(crate) fn cache_counters(&self, cache: CacheId) -> CacheCounters {
        self.system.hw.cache_counters(cache)
    }

    fn out_of_memory_error(&self) -> MachineError {
        let bytes = self.spec.memory.size_bytes;
        let machine = &self.spec.name;
        MachineError(format!(
            "machine '{machine}': the programs need more than its memory.size_bytes = {bytes}"
        ))
    }

    /// The number by which policies know the process.
    pub(crate) fn process_id(&self, process: usize) -> cachemate_core::ProcessId {
        cachemate_core::ProcessId((process - PROBE_PROCESS - 1) as u32)
    }
    /// The machine's own probe process has no number outside.
    pub(crate) fn process_index(&self, process: cachemate_core::ProcessId) -> usize {
        process.0 as usize + PROBE_PROCESS + 1
    }
    pub(crate) fn slot_of(&self, task: TaskId) -> Option<Slot> {
        self.tasks
            .get(task.0 as usize)
            .map(|sim_task| sim_task.slot)
    }
    pub(crate) fn has_exited(&self, task: TaskId) -> bool {
        self.slot_of(task)
            .is_none_or(|slot| self.system.task(slot).exited_cycle.is_some())
    }
}

impl Machine for SimMachine {
    fn topology(&self) -> &Topology {
        &self.topology
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        if self.is_finished {
            return Ok(None);
        }
        let start = self.system.now();
        let end_reason = self.run_window()?;
        self.is_finished = self.is_over();
        self.window_count += 1;
        Ok(Some(self.build_observation(
            start,
            end_reason,
            self.window_count - 1,
        )))
    }

    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        Ok(self.apply_plan(plan))
    }
}
