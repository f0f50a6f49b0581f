//! Run queues, which the dispatcher maintains and schedulers read.

use cachemate_core::CpuSet;

use super::domains::Domains;

/// Index of a task in the operating system's own table, for tasks and injected probes alike.
pub type Slot = usize;

/// The tasks that a CPU may run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Seat {
    /// Any task from the queues.
    #[default]
    Open,
    /// Only this task, or no task.
    Reserved(Option<Slot>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunState {
    Running(u32),
    Queued(u32),
    /// The task is runnable, but only on an assigned CPU, and none is assigned now.
    Parked,
    Blocked,
    Exited,
}

/// A task as the dispatcher represents it.
#[derive(Clone, Debug)]
pub struct DispatchTask {
    pub state: RunState,
    pub allowed_cpus: CpuSet,
    pub weight: f64,
    /// Whether the task runs only on CPUs that are assigned to it.
    pub is_seated: bool,
    pub last_cpu: Option<u32>,
    pub on_cpu_cycles: Vec<u64>,
    pub wait_cycles: u64,
    pub switches: u64,
    pub migrations: u64,
    pub(super) accounted_until: u64,
    pub(super) enqueue_number: u64,
    pub(super) times_passed_over: u8,
}

#[derive(Clone, Debug, Default)]
pub(super) struct CpuState {
    pub(super) seat: Seat,
    pub(super) running_task: Option<Slot>,
    /// Task that was last loaded into the hardware.
    pub(super) loaded_task: Option<Slot>,
    pub(super) queue: Vec<Slot>,
    pub(super) slice_end: u64,
    pub(super) is_flagged: bool,
    pub(super) is_slice_expired: bool,
}

/// The state that schedulers may read.
pub struct SchedulerView<'a> {
    pub(super) now: u64,
    pub(super) cpus: &'a [CpuState],
    pub(super) tasks: &'a [DispatchTask],
    pub(super) domains: &'a Domains,
}

impl SchedulerView<'_> {
    pub fn now_cycles(&self) -> u64 {
        self.now
    }
    pub fn domains(&self) -> &Domains {
        self.domains
    }
    pub fn running_task(&self, cpu: u32) -> Option<Slot> {
        self.cpus[cpu as usize].running_task
    }
    pub fn waiting_tasks(&self, cpu: u32) -> &[Slot] {
        &self.cpus[cpu as usize].queue
    }
    pub fn count_waiting(&self, cpu: u32) -> usize {
        self.waiting_tasks(cpu).len()
    }
    /// Tasks that wait on `queue_cpu` and are allowed on `cpu`.
    pub fn count_waiting_for(&self, queue_cpu: u32, cpu: u32) -> usize {
        self.waiting_tasks(queue_cpu)
            .iter()
            .filter(|&&slot| self.is_allowed_on(slot, cpu))
            .count()
    }
    pub fn queued_tasks(&self) -> impl Iterator<Item = Slot> + '_ {
        self.cpus.iter().flat_map(|cpu| cpu.queue.iter().copied())
    }
    pub fn is_open(&self, cpu: u32) -> bool {
        self.cpus[cpu as usize].seat == Seat::Open
    }
    pub fn is_idle(&self, cpu: u32) -> bool {
        let cpu = &self.cpus[cpu as usize];
        cpu.seat == Seat::Open && cpu.running_task.is_none() && cpu.queue.is_empty()
    }
    /// A closed CPU may be allowed.
    pub fn is_allowed_on(&self, slot: Slot, cpu: u32) -> bool {
        self.tasks[slot].allowed_cpus.contains(cpu)
    }
    pub fn last_cpu(&self, slot: Slot) -> Option<u32> {
        self.tasks[slot].last_cpu
    }
    pub fn weight(&self, slot: Slot) -> f64 {
        self.tasks[slot].weight
    }
    pub fn enqueue_number(&self, slot: Slot) -> u64 {
        self.tasks[slot].enqueue_number
    }
    /// Weight of all tasks that run or wait on the CPU.
    pub fn load(&self, cpu: u32) -> f64 {
        let state = &self.cpus[cpu as usize];
        state
            .queue
            .iter()
            .chain(&state.running_task)
            .map(|&slot| self.tasks[slot].weight)
            .sum()
    }
    pub fn load_milli(&self, cpu: u32) -> u64 {
        (self.load(cpu) * 1000.0) as u64
    }
    /// The allowed CPU with the smallest key, open ones first; CPU 0 if none is allowed, to which
    /// checked plans never lead.
    pub fn best_cpu<K: Ord>(&self, slot: Slot, key: impl Fn(u32) -> K) -> u32 {
        let allowed_cpus = (0..self.cpus.len() as u32).filter(|&cpu| self.is_allowed_on(slot, cpu));
        allowed_cpus
            .min_by_key(|&cpu| (!self.is_open(cpu), key(cpu)))
            .unwrap_or(0)
    }
}
