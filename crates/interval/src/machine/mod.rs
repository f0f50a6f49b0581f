//! The interval machine as a `core::Machine`: policies see the same interface as on a host.
//!
//! The engine knows everything exactly, and a policy that saw it would be better here than anywhere
//! else. So a window runs the engine until its time is over, a probe has a result, or tasks arrive
//! or exit, and then reports the values that a host could read: counts with the errors of a limited
//! counter unit, and the state in force.
//!
//! For example, a task missed 12,345 times in a window. With four counters for eight events its
//! misses were counted for half of the time, so the observation has about half of them, with the
//! noise that the scenario states, and the share of time in which they were counted.

mod apply;
mod cache_parts;
mod capabilities;
mod counter_noise;
mod observe;
mod probes;
mod results;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use cachemate_core::{
    AppliedPlan, CacheResize, Capabilities, ClassLimits, ColorAssignment, CounterNoise, CpuSet,
    ExternalTraffic, FieldError, GangSchedule, Goal, Machine, MachineError, MachineEvent,
    MachineSpec, MachineSpecError, Observation, Plan, ProbeId, ProcessId, ServiceClassId, TaskId,
    Topology, WindowEnd, WindowLength,
};

pub use results::{IntervalResults, JobResults};

use crate::engine::{IntervalEngine, TaskTotals};
use crate::program::PhasedProgram;
use counter_noise::NoiseState;

/// One program to run: a process with equal threads.
#[derive(Clone, PartialEq, Debug)]
pub struct IntervalJob {
    /// Name used in results.
    pub name: String,
    /// The program; jobs that share a program store it once.
    pub program: Arc<PhasedProgram>,
    /// Number of equal threads, each a task.
    pub threads: u32,
    /// Number of instructions after which each thread ends; `None` if the program's phases decide.
    pub instructions: Option<f64>,
    /// Nominal time of arrival.
    pub start_ns: u64,
    /// Whether the job starts again when all its threads have ended.
    pub restarts: bool,
    /// CPUs to which the job's owner pinned it; no policy may move the job.
    pub pinned: Option<CpuSet>,
    /// The operator's goal for the job.
    pub goal: Option<Goal>,
}

impl IntervalJob {
    /// Creates a job of one thread that starts at time 0 and may run anywhere.
    pub fn new(program: impl Into<Arc<PhasedProgram>>) -> Self {
        let program = program.into();
        let name = program.name.clone();
        IntervalJob {
            name,
            program,
            threads: 1,
            instructions: None,
            start_ns: 0,
            restarts: false,
            pinned: None,
            goal: None,
        }
    }
}

/// Settings of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Seed of the counters' noise and of the probes.
    pub seed: u64,
    /// Whether turns are simulated one by one instead of averaged.
    pub has_explicit_turns: bool,
    /// Errors of the counters.
    pub counter_noise: CounterNoise,
    /// Nominal length of the run; `None` if it ends when no job is left.
    pub length_ns: Option<u64>,
    /// Events of the machine, in any order.
    pub events: Vec<MachineEvent>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            seed: 1,
            has_explicit_turns: false,
            counter_noise: CounterNoise::default(),
            length_ns: None,
            events: Vec::new(),
        }
    }
}

/// An error that occurs while a machine is built.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum IntervalMachineError {
    /// An invalid machine.
    #[error(transparent)]
    Machine(#[from] MachineSpecError),
    /// An invalid program, or an event that is invalid for this machine.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// A machine without a contended cache; contains the machine's name.
    #[error("machine '{0}' has no data cache to share")]
    NoCache(String),
}

/// A task as policies and the operator see it.
#[derive(Clone, Debug)]
struct IntervalTask {
    task: TaskId,
    process: ProcessId,
    job: usize,
    slot: u32,
    arrived_ns: u64,
    is_pinned: bool,
    /// `None` for the default class.
    class: Option<ServiceClassId>,
    exited: bool,
    /// Totals at the last observation.
    last_totals: TaskTotals,
    /// Totals of the task when the measurement started.
    totals_at_start: TaskTotals,
    /// Slowdowns in the last window: of the time in which the task was runnable, and of its time on a processor.
    slowdown: Option<(f64, f64)>,
    noise: NoiseState,
}

struct RunningJob {
    job: IntervalJob,
    program: u32,
    arrives_ns: Option<u64>,
    live_threads: u32,
    totals: results::JobTotals,
}

/// A simulated machine with programs on it.
pub struct IntervalMachine {
    spec: MachineSpec,
    topology: Topology,
    capabilities: Capabilities,
    engine: IntervalEngine,
    options: Options,
    jobs: Vec<RunningJob>,
    /// Tasks not yet reported as exited, in order of arrival.
    tasks: Vec<IntervalTask>,
    next_task: u32,
    next_process: u32,
    /// Events that have not been applied yet, by time.
    events: Vec<MachineEvent>,
    external_slots: BTreeMap<u32, u32>,
    remaining_shares: BTreeMap<u32, f64>,
    plan: Plan,
    /// Ways and bandwidth of each class of service.
    classes: BTreeMap<ServiceClassId, ClassLimits>,
    /// Colors of the processes that are confined to some colors.
    colors: BTreeMap<ProcessId, ColorAssignment>,
    /// Gangs, in ascending order of their CPUs.
    gangs: Vec<GangSchedule>,
    /// Refused items of the last plan, until the next observation reports them.
    refused: Vec<cachemate_core::RefusedItem>,
    page_moves: Vec<apply::PageMove>,
    cost_ns: f64,
    probes: Vec<probes::OngoingProbe>,
    answered_probes: Vec<ProbeId>,
    window_count: u64,
    now_ns: u64,
    counter_scopes: observe::CounterScopes,
    measurement_start_ns: u64,
    /// Bytes to and from memory since the start of the measurement, by node.
    node_bytes: Vec<f64>,
    is_finished: bool,
}

impl IntervalMachine {
    /// Creates a machine at time 0, whose jobs arrive at their start times.
    ///
    /// # Errors
    /// An invalid machine, program or event.
    pub fn new(
        spec: &MachineSpec,
        options: Options,
        jobs: Vec<IntervalJob>,
    ) -> Result<Self, IntervalMachineError> {
        spec.check()?;
        let no_cache = || IntervalMachineError::NoCache(spec.name.clone());
        let spare_count = options
            .events
            .iter()
            .filter(|event| event.split_cpus.is_some())
            .count();
        let mut engine = IntervalEngine::with_spares(spec, options.has_explicit_turns, spare_count)
            .ok_or_else(no_cache)?;
        for (index, event) in options.events.iter().enumerate() {
            event
                .check(spec)
                .map_err(|error| error.with_path_prefix(&format!("events[{index}]")))?;
        }

        let mut running_jobs: Vec<RunningJob> = Vec::new();
        for job in jobs {
            let earlier_job = running_jobs
                .iter()
                .find(|earlier| Arc::ptr_eq(&earlier.job.program, &job.program));
            let program = match earlier_job {
                Some(earlier) => earlier.program,
                None => {
                    job.program.check()?;
                    engine.add_program(PhasedProgram::clone(&job.program))
                }
            };
            running_jobs.push(RunningJob {
                arrives_ns: Some(job.start_ns),
                program,
                live_threads: 0,
                totals: results::JobTotals::default(),
                job,
            });
        }

        let mut events = options.events.clone();
        events.sort_by_key(|event| event.at_ns);
        let topology = spec.topology();
        let mut machine = IntervalMachine {
            capabilities: capabilities::model_capabilities(spec, &topology),
            counter_scopes: observe::CounterScopes::new(&topology, spec.memory.nodes),
            spec: spec.clone(),
            topology,
            engine,
            options,
            jobs: running_jobs,
            tasks: Vec::new(),
            next_task: 0,
            next_process: 0,
            events,
            external_slots: BTreeMap::new(),
            remaining_shares: BTreeMap::new(),
            plan: Plan::idle(WindowLength::Time { ns: 1_000_000_000 }),
            classes: BTreeMap::new(),
            colors: BTreeMap::new(),
            gangs: Vec::new(),
            refused: Vec::new(),
            page_moves: Vec::new(),
            cost_ns: 0.0,
            probes: Vec::new(),
            answered_probes: Vec::new(),
            window_count: 0,
            now_ns: 0,
            measurement_start_ns: 0,
            node_bytes: vec![0.0; spec.memory.nodes as usize],
            is_finished: false,
        };
        machine.start_due_jobs();
        Ok(machine)
    }

    /// Sets the length of the next observation, unless a plan sets another one.
    pub fn set_first_window(&mut self, window: WindowLength) {
        self.plan.window = window;
    }
    /// Nominal time since the start.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }
    /// The engine has results that are hidden from policies.
    pub fn engine(&self) -> &IntervalEngine {
        &self.engine
    }
    fn task(&self, task: TaskId) -> Option<&IntervalTask> {
        self.tasks
            .iter()
            .find(|interval_task| interval_task.task == task)
    }
    /// `None` if the task has been reported as exited.
    pub fn slot_of(&self, task: TaskId) -> Option<u32> {
        self.task(task).map(|interval_task| interval_task.slot)
    }
    /// A task's time relative to a solo run in the last window, and the same for its time on a
    /// processor. `None` if the task did no work or has exited.
    pub fn task_slowdown(&self, task: TaskId) -> Option<(f64, f64)> {
        self.task(task)?.slowdown
    }
    /// A position in the list of jobs.
    pub fn job_of(&self, task: TaskId) -> Option<usize> {
        self.task(task).map(|interval_task| interval_task.job)
    }
    /// One number for each contended cache.
    pub fn occupied_bytes(&self, task: TaskId) -> Vec<f64> {
        let slot = self.slot_of(task);
        (0..self.engine.cache_count())
            .map(|index| slot.map_or(0.0, |slot| self.engine.occupied_bytes(slot, index)))
            .collect()
    }

    fn cycles_of(&self, ns: u64) -> f64 {
        ns as f64 * self.spec.hertz as f64 / 1e9
    }

    /// Applies the events and starts the threads that are due. Returns whether tasks arrived.
    fn start_due_jobs(&mut self) -> bool {
        while self
            .events
            .first()
            .is_some_and(|event| event.at_ns <= self.now_ns)
        {
            let event = self.events.remove(0);
            self.apply_event(&event);
        }

        let is_due = |at: &usize| {
            self.jobs[*at]
                .arrives_ns
                .is_some_and(|arrives| arrives <= self.now_ns)
        };
        let due_jobs: Vec<usize> = (0..self.jobs.len()).filter(is_due).collect();
        due_jobs.iter().for_each(|&index| self.start_job(index));
        !due_jobs.is_empty()
    }

    fn start_job(&mut self, index: usize) {
        let process = ProcessId(self.next_process);
        self.next_process += 1;
        let job = &mut self.jobs[index];
        job.arrives_ns = None;
        job.live_threads = job.job.threads.max(1);
        job.totals.tasks += u64::from(job.live_threads);

        let all_cpus: CpuSet = (0..self.spec.cpus()).collect();
        let job = &self.jobs[index];
        let pinned = job
            .job
            .pinned
            .clone()
            .map(|cpus| cpus.intersection(&all_cpus))
            .filter(|cpus| !cpus.is_empty());
        for _ in 0..job.live_threads {
            let slot = self.engine.start_task(
                job.program,
                pinned.clone().unwrap_or_else(|| all_cpus.clone()),
            );
            if let Some(instructions) = job.job.instructions {
                self.engine.set_work(slot, instructions);
            }
            if let Some(sibling) = self
                .tasks
                .iter()
                .find(|interval_task| interval_task.process == process && !interval_task.exited)
            {
                self.engine.share_memory(slot, sibling.slot);
            }
            let task = TaskId(self.next_task);
            self.next_task += 1;
            self.tasks.push(IntervalTask {
                task,
                process,
                job: index,
                slot,
                arrived_ns: self.now_ns,
                is_pinned: pinned.is_some(),
                class: None,
                exited: false,
                last_totals: TaskTotals::default(),
                totals_at_start: TaskTotals::default(),
                slowdown: None,
                noise: NoiseState::new(self.options.seed, task.0),
            });
        }
    }

    fn apply_event(&mut self, event: &MachineEvent) {
        for (cpu, is_online) in [(event.offline, false), (event.online, true)] {
            let Some(cpu) = cpu else { continue };
            self.engine.run_queues.set_online(cpu, is_online);
            if let Some(cpu) = self
                .topology
                .cpus
                .iter_mut()
                .find(|described| described.id.0 == cpu)
            {
                cpu.online = is_online;
            }
        }

        if let Some(ExternalTraffic {
            cache,
            lines_per_second,
        }) = event.external_traffic
        {
            if let Some(slot) = self.external_slots.remove(&cache) {
                self.engine.remove_task(slot);
            }
            if lines_per_second > 0.0 {
                let (line_bytes, capacity_lines) = (
                    self.engine.line_bytes(),
                    f64::from(self.engine.capacity_lines()),
                );
                let stream = crate::closed_form::stream_phase(line_bytes, capacity_lines, 1.0);
                let program = self
                    .engine
                    .add_program(PhasedProgram::endless_program("outside", stream));
                let lines_per_cycle = lines_per_second / self.spec.hertz as f64;
                let slot = self
                    .engine
                    .start_external(program, cache as usize, lines_per_cycle);
                self.external_slots.insert(cache, slot);
            }
        }
        if let Some(cpus) = &event.split_cpus {
            self.engine.move_to_spare_cache(cpus);
        }
        if let Some(CacheResize { cache, size_share }) = event.resize_cache {
            self.remaining_shares.insert(cache, size_share);
            self.divide_caches();
        }
    }

    fn window_ns(&self) -> u64 {
        match self.plan.window {
            WindowLength::Time { ns } => ns.max(1),
            WindowLength::Cycles { cycles } => {
                (cycles as f64 * 1e9 / self.spec.hertz as f64) as u64 + 1
            }
        }
    }

    fn run_window(&mut self) -> WindowEnd {
        let mut window_end = self.now_ns + self.window_ns();
        if let Some(length) = self.options.length_ns {
            window_end = window_end.min(length.max(self.now_ns + 1));
        }

        loop {
            let arrivals = self.jobs.iter().filter_map(|job| job.arrives_ns);
            let next_arrival_ns = arrivals.min().unwrap_or(u64::MAX);
            let next_event_ns = self.events.first().map_or(u64::MAX, |event| event.at_ns);
            let earliest_ns = [
                window_end,
                next_arrival_ns,
                next_event_ns,
                self.next_move_end_ns(),
                self.next_probe_ns(),
            ]
            .into_iter()
            .min();
            let due_ns = earliest_ns.unwrap_or(window_end).max(self.now_ns);
            self.engine.run(self.cycles_of(due_ns));
            self.now_ns = (self.engine.now_cycles() * 1e9 / self.spec.hertz as f64).round() as u64;
            let ended_slots = std::mem::take(&mut self.engine.ended_slots);
            let mut have_tasks_changed = !ended_slots.is_empty();
            for slot in ended_slots {
                self.record_exit(slot);
            }

            if !have_tasks_changed {
                self.now_ns = due_ns;
            }

            self.finish_moves();
            have_tasks_changed |= self.start_due_jobs();
            if have_tasks_changed {
                return WindowEnd::TasksChanged;
            }
            if self.run_probes() {
                return WindowEnd::ProbeAnswered;
            }
            if self.now_ns >= window_end {
                return WindowEnd::Elapsed;
            }
        }
    }

    fn record_exit(&mut self, slot: u32) {
        let now_ns = self.now_ns;
        let is_ending =
            |interval_task: &&mut IntervalTask| interval_task.slot == slot && !interval_task.exited;
        let Some(interval_task) = self.tasks.iter_mut().find(is_ending) else {
            return;
        };
        interval_task.exited = true;
        let job = &mut self.jobs[interval_task.job];
        job.live_threads -= 1;
        if job.live_threads == 0 {
            job.totals.completions += 1;
            if job.job.restarts {
                job.arrives_ns = Some(now_ns);
            }
        }
    }

    fn is_over(&self) -> bool {
        let has_reached_length = self
            .options
            .length_ns
            .is_some_and(|length| self.now_ns >= length);
        let has_work = self
            .jobs
            .iter()
            .any(|job| job.live_threads > 0 || job.arrives_ns.is_some());
        has_reached_length || !has_work
    }
}

impl Machine for IntervalMachine {
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
        if self.is_over() {
            self.is_finished = true;
            return Ok(None);
        }
        let start_ns = self.now_ns;
        let end_reason = self.run_window();
        let window = self.window_count;
        self.window_count += 1;
        Ok(Some(self.build_observation(start_ns, end_reason, window)))
    }

    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        Ok(self.apply_plan(plan))
    }
}
