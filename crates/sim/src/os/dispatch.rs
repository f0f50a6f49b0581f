//! The dispatcher, which assigns tasks to CPUs: queues, slices, affinity, pinned CPUs, and co-run
//! penalties.
//!
//! Default scheduling, gangs, and measurements that need certain tasks together all choose tasks
//! for CPUs, the hardware needs one choice per CPU, and no task may be lost between them. So a CPU
//! is *open* (the default scheduler fills it from the queues) or *reserved* (it is assigned to one
//! task, or to none). Events only flag CPUs; [`Dispatcher::settle_switches`] then fills the flagged
//! ones, reserved before open, and passes the difference to the hardware. Runnable tasks of a gang
//! schedule wait *parked* for their assigned CPU.
//!
//! For example, a gang of two takes CPUs 0 and 1 for 20 ms. What ran there goes to the queues of
//! the CPUs 2 and 3, which are open, or waits if it is allowed nowhere else. At the end of the turn
//! the gang's members are parked, and CPUs 0 and 1 are reserved for the next gang before anything
//! else may have them.
//!
//! A task is on at most one CPU and, except for assignments, only on allowed ones. An open CPU
//! idles only if no runnable task may use it. A runnable task is on a CPU, in exactly one queue, or
//! parked. The dispatcher is independent of the hardware, and its tests use their own timeline.

use cachemate_core::{CoRunPenalty, CpuSet};

use super::domains::{Domains, SHARED_CACHE};
use super::queues::{CpuState, DispatchTask, RunState, SchedulerView, Seat, Slot};
use super::schedulers::{CpuScheduler, EnqueueReason};

/// A switch of tasks on one CPU, for the hardware. All outgoing tasks come before all incoming ones, because tasks may
/// swap CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ContextSwitch {
    pub cpu: u32,
    pub outgoing: Option<Slot>,
    pub incoming: Option<Slot>,
    /// Whether the incoming task was on another CPU before.
    pub is_migrated: bool,
}

/// The number of times that the dispatcher picked a task, and that it had a choice (AV-9).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Picks {
    pub total_picks: u64,
    pub contested_picks: u64,
    /// Number of picks that penalties changed.
    pub penalized_picks: u64,
}

/// Maximum number of candidates whose penalties are compared, and number of times in a row that the first of them may
/// be passed over.
const MAX_CANDIDATES: usize = 8;
const MAX_TIMES_PASSED_OVER: u8 = 4;

/// The state of all CPUs and of all tasks.
pub struct Dispatcher {
    scheduler: Box<dyn CpuScheduler>,
    domains: Domains,
    cpus: Vec<CpuState>,
    tasks: Vec<DispatchTask>,
    /// Penalties of pairs of slots, in both orders.
    penalties: Vec<(Slot, Slot, f64)>,
    now: u64,
    enqueue_count: u64,
    pub picks: Picks,
}

/// Builds a [`SchedulerView`] that borrows only what the scheduler does not.
macro_rules! scheduler_view {
    ($self:ident) => {
        SchedulerView {
            now: $self.now,
            cpus: &$self.cpus,
            tasks: &$self.tasks,
            domains: &$self.domains,
        }
    };
}

impl Dispatcher {
    pub fn new(scheduler: Box<dyn CpuScheduler>, domains: Domains) -> Self {
        let cpus = vec![CpuState::default(); domains.cpu_count() as usize];
        let (tasks, penalties) = (Vec::new(), Vec::new());
        Dispatcher {
            scheduler,
            domains,
            cpus,
            tasks,
            penalties,
            now: 0,
            enqueue_count: 0,
            picks: Picks::default(),
        }
    }

    pub fn cpu_count(&self) -> u32 {
        self.cpus.len() as u32
    }
    pub fn task(&self, slot: Slot) -> &DispatchTask {
        &self.tasks[slot]
    }
    pub fn running_task(&self, cpu: u32) -> Option<Slot> {
        self.cpus[cpu as usize].running_task
    }
    #[cfg(test)]
    pub(crate) fn seat_of_cpu(&self, cpu: u32) -> Seat {
        self.cpus[cpu as usize].seat
    }
    pub fn is_runnable(&self, slot: Slot) -> bool {
        !matches!(self.tasks[slot].state, RunState::Blocked | RunState::Exited)
    }

    /// Adds the time up to `now` to each task's time on its CPU or waiting.
    pub fn account_to(&mut self, now: u64) {
        self.now = self.now.max(now);
        for slot in 0..self.tasks.len() {
            self.account_time(slot);
        }
    }

    /// Adds a task, which is runnable at once, and returns its slot. A seated task runs only on CPUs that are assigned
    /// to it.
    pub fn add_task(
        &mut self,
        now: u64,
        allowed_cpus: CpuSet,
        weight: f64,
        is_seated: bool,
    ) -> Slot {
        self.now = self.now.max(now);
        let slot = self.tasks.len();
        self.tasks.push(DispatchTask {
            state: RunState::Blocked,
            allowed_cpus,
            weight,
            is_seated,
            last_cpu: None,
            on_cpu_cycles: vec![0; self.cpus.len()],
            wait_cycles: 0,
            switches: 0,
            migrations: 0,
            accounted_until: self.now,
            enqueue_number: 0,
            times_passed_over: 0,
        });

        self.make_runnable(slot, EnqueueReason::New);
        slot
    }

    pub fn wake(&mut self, now: u64, slot: Slot) {
        self.now = self.now.max(now);
        if self.tasks[slot].state == RunState::Blocked {
            self.tasks[slot].accounted_until = self.now;
            self.make_runnable(slot, EnqueueReason::Woken);
        }
    }

    pub fn block(&mut self, now: u64, slot: Slot) {
        self.stop_task(now, slot, RunState::Blocked);
    }
    pub fn exit(&mut self, now: u64, slot: Slot) {
        self.stop_task(now, slot, RunState::Exited);
    }

    fn stop_task(&mut self, now: u64, slot: Slot, state: RunState) {
        self.now = self.now.max(now);
        self.deschedule(slot);
        self.tasks[slot].state = state;
    }

    /// Changes the CPUs on which a task may run; the empty set means every CPU.
    pub fn set_allowed(&mut self, now: u64, slot: Slot, allowed_cpus: CpuSet) {
        self.now = self.now.max(now);
        let allowed_cpus = if allowed_cpus.is_empty() {
            (0..self.cpu_count()).collect()
        } else {
            allowed_cpus
        };
        if self.tasks[slot].allowed_cpus == allowed_cpus {
            return;
        }
        self.tasks[slot].allowed_cpus = allowed_cpus;
        self.requeue_task(slot);
    }

    pub fn set_weight(&mut self, now: u64, slot: Slot, weight: f64) {
        self.now = self.now.max(now);
        self.account_time(slot);
        self.tasks[slot].weight = weight;
    }

    /// Sets whether a task runs only on CPUs that are assigned to it, and moves the task accordingly.
    pub fn set_seated(&mut self, now: u64, slot: Slot, is_seated: bool) {
        self.now = self.now.max(now);
        if self.tasks[slot].is_seated != is_seated {
            self.tasks[slot].is_seated = is_seated;
            self.requeue_task(slot);
        }
    }

    /// Moves a task after its allowed CPUs have changed. A queued task goes to a new queue; the CPU of a running task,
    /// and all idle CPUs, are flagged.
    fn requeue_task(&mut self, slot: Slot) {
        match self.tasks[slot].state {
            RunState::Running(cpu) => self.flag_cpu(cpu),
            RunState::Queued(_) | RunState::Parked => {
                self.deschedule(slot);
                self.make_runnable(slot, EnqueueReason::Displaced);
            }
            RunState::Blocked | RunState::Exited => {}
        }
        let idle_cpus =
            (0..self.cpu_count()).filter(|&cpu| self.cpus[cpu as usize].running_task.is_none());
        idle_cpus
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|cpu| self.flag_cpu(cpu));
    }

    /// Sets the assigned tasks of all CPUs at once. Assignments override affinity, because rows are measured regardless
    /// of their members' masks.
    pub fn set_seats(&mut self, now: u64, seats: &[Seat]) {
        self.now = self.now.max(now);
        for (cpu, &seat) in seats.iter().enumerate() {
            if self.cpus[cpu].seat != seat {
                self.cpus[cpu].seat = seat;
                self.flag_cpu(cpu as u32);
            }
        }
        // Tasks that wait for reserved CPUs, or for an assignment that has ended, may find an open CPU now.
        let is_misplaced = |slot: &Slot| match self.tasks[*slot].state {
            RunState::Queued(cpu) => self.cpus[cpu as usize].seat != Seat::Open,
            RunState::Parked => !self.tasks[*slot].is_seated,
            _ => false,
        };
        let misplaced_tasks: Vec<Slot> = (0..self.tasks.len()).filter(is_misplaced).collect();
        misplaced_tasks
            .into_iter()
            .for_each(|slot| self.requeue_task(slot));
    }

    pub fn set_penalties(
        &mut self,
        penalties: &[CoRunPenalty],
        slot_of: impl Fn(cachemate_core::TaskId) -> Option<Slot>,
    ) {
        let slot_pair = |penalty: &CoRunPenalty| {
            Some((
                slot_of(penalty.tasks.0)?,
                slot_of(penalty.tasks.1)?,
                penalty.penalty,
            ))
        };
        let pairs: Vec<_> = penalties.iter().filter_map(slot_pair).collect();
        self.penalties = pairs
            .iter()
            .flat_map(|&(a, b, penalty)| [(a, b, penalty), (b, a, penalty)])
            .collect();
    }

    /// When the next slice ends or queues must be balanced.
    pub fn next_event_cycle(&self) -> u64 {
        let open_cpus = self
            .cpus
            .iter()
            .filter(|cpu| cpu.seat == Seat::Open && cpu.running_task.is_some());
        let next_slice_end = open_cpus.map(|cpu| cpu.slice_end).min().unwrap_or(u64::MAX);
        next_slice_end.min(self.scheduler.next_balance_cycle())
    }

    /// Advances the time to `now`: ends slices, and balances queues.
    pub fn advance(&mut self, now: u64) {
        self.now = self.now.max(now);
        for cpu in 0..self.cpus.len() {
            let state = &mut self.cpus[cpu];
            if state.seat == Seat::Open
                && state.running_task.is_some()
                && state.slice_end <= self.now
            {
                state.is_slice_expired = true;
                self.flag_cpu(cpu as u32);
            }
        }

        if self.scheduler.next_balance_cycle() <= self.now {
            for (slot, target) in self.scheduler.plan_moves(&scheduler_view!(self)) {
                if let RunState::Queued(source) = self.tasks[slot].state {
                    self.cpus[source as usize]
                        .queue
                        .retain(|&queued_slot| queued_slot != slot);
                    self.enqueue(slot, target, EnqueueReason::Balanced);
                }
            }
        }
    }

    /// Fills the flagged CPUs, and returns the switches for the hardware, by ascending CPU.
    pub fn settle_switches(&mut self, now: u64) -> Vec<ContextSwitch> {
        self.now = self.now.max(now);

        loop {
            let flagged_cpus: Vec<u32> = (0..self.cpu_count())
                .filter(|&cpu| self.cpus[cpu as usize].is_flagged)
                .collect();
            flagged_cpus
                .iter()
                .for_each(|&cpu| self.vacate_if_unassigned(cpu));
            flagged_cpus
                .iter()
                .for_each(|&cpu| self.start_assigned_task(cpu));

            // CPUs that have been flagged in the meantime are handled below.
            flagged_cpus
                .iter()
                .for_each(|&cpu| self.cpus[cpu as usize].is_flagged = false);
            for &cpu in &flagged_cpus {
                if self.is_vacant(cpu) && !self.cpus[cpu as usize].queue.is_empty() {
                    self.pick_task(cpu);
                }
            }

            let has_waiting_task = self.cpus.iter().any(|cpu| !cpu.queue.is_empty());
            for cpu in 0..self.cpu_count() {
                if has_waiting_task && self.is_vacant(cpu) {
                    self.pick_task(cpu);
                }
            }

            if !self.cpus.iter().any(|cpu| cpu.is_flagged) {
                break;
            }
        }

        self.take_switches()
    }

    fn is_vacant(&self, cpu: u32) -> bool {
        let state = &self.cpus[cpu as usize];
        state.seat == Seat::Open && state.running_task.is_none()
    }

    fn take_switches(&mut self) -> Vec<ContextSwitch> {
        let mut switches = Vec::new();
        for (cpu, state) in self.cpus.iter_mut().enumerate() {
            if state.loaded_task != state.running_task {
                let (cpu, incoming) = (cpu as u32, state.running_task);
                let is_migrated = incoming.is_some_and(|slot| {
                    self.tasks[slot]
                        .last_cpu
                        .is_some_and(|last_cpu| last_cpu != cpu)
                });
                switches.push(ContextSwitch {
                    cpu,
                    outgoing: state.loaded_task,
                    incoming,
                    is_migrated,
                });
                state.loaded_task = incoming;

                if let Some(slot) = incoming {
                    let task = &mut self.tasks[slot];
                    task.switches += 1;
                    task.migrations += u64::from(is_migrated);
                    task.last_cpu = Some(cpu);
                }
            }
        }

        switches
    }

    fn flag_cpu(&mut self, cpu: u32) {
        self.cpus[cpu as usize].is_flagged = true;
    }

    fn account_time(&mut self, slot: Slot) {
        let now = self.now;
        let task = &mut self.tasks[slot];
        let elapsed_cycles = now.saturating_sub(task.accounted_until);
        match task.state {
            RunState::Running(cpu) => {
                task.on_cpu_cycles[cpu as usize] += elapsed_cycles;
                self.scheduler
                    .charge_cycles(slot, elapsed_cycles, task.weight);
            }
            RunState::Queued(_) | RunState::Parked => task.wait_cycles += elapsed_cycles,
            RunState::Blocked | RunState::Exited => {}
        }
        task.accounted_until = task.accounted_until.max(now);
    }

    /// Removes a task from its CPU or queue and accounts its time; the caller sets the new state.
    fn deschedule(&mut self, slot: Slot) {
        self.account_time(slot);
        match self.tasks[slot].state {
            RunState::Running(cpu) => {
                self.cpus[cpu as usize].running_task = None;
                self.cpus[cpu as usize].is_slice_expired = false;
                self.flag_cpu(cpu);
            }
            RunState::Queued(cpu) => self.cpus[cpu as usize]
                .queue
                .retain(|&queued_slot| queued_slot != slot),
            RunState::Parked | RunState::Blocked | RunState::Exited => {}
        }
    }

    fn make_runnable(&mut self, slot: Slot, reason: EnqueueReason) {
        let assigned_cpu = (0..self.cpu_count())
            .find(|&cpu| self.cpus[cpu as usize].seat == Seat::Reserved(Some(slot)));
        if self.tasks[slot].is_seated || assigned_cpu.is_some() {
            self.tasks[slot].state = RunState::Parked;
            assigned_cpu.into_iter().for_each(|cpu| self.flag_cpu(cpu));
            return;
        }
        let cpu = self
            .scheduler
            .choose_queue(slot, reason, &scheduler_view!(self));
        self.enqueue(slot, cpu, reason);
    }

    fn enqueue(&mut self, slot: Slot, cpu: u32, reason: EnqueueReason) {
        self.account_time(slot);
        self.tasks[slot].state = RunState::Queued(cpu);
        self.tasks[slot].enqueue_number = self.enqueue_count;
        self.enqueue_count += 1;
        self.scheduler
            .enqueue(slot, cpu, reason, &scheduler_view!(self));
        self.cpus[cpu as usize].queue.push(slot);
        match self.cpus[cpu as usize].running_task {
            _ if self.cpus[cpu as usize].seat != Seat::Open => {}
            None => self.flag_cpu(cpu),
            Some(running_slot) => {
                self.account_time(running_slot);
                if self.scheduler.should_preempt(slot, running_slot) {
                    self.flag_cpu(cpu);
                }
            }
        }
    }

    /// Removes the task from a flagged CPU unless the CPU is still assigned to it.
    fn vacate_if_unassigned(&mut self, cpu: u32) {
        let state = &mut self.cpus[cpu as usize];
        let Some(slot) = state.running_task else {
            return;
        };
        if state.seat == Seat::Reserved(Some(slot)) {
            return;
        }

        let reason = if std::mem::take(&mut state.is_slice_expired) {
            EnqueueReason::Expired
        } else {
            EnqueueReason::Displaced
        };
        self.deschedule(slot);
        let is_allowed_here = self.cpus[cpu as usize].seat == Seat::Open
            && self.tasks[slot].allowed_cpus.contains(cpu);
        if is_allowed_here && reason == EnqueueReason::Displaced && !self.tasks[slot].is_seated {
            self.enqueue(slot, cpu, reason);
        } else {
            self.make_runnable(slot, reason);
        }
    }

    fn start_assigned_task(&mut self, cpu: u32) {
        let Seat::Reserved(Some(slot)) = self.cpus[cpu as usize].seat else {
            return;
        };
        if !self.is_runnable(slot) || self.tasks[slot].state == RunState::Running(cpu) {
            return;
        }
        self.deschedule(slot);
        self.start_task(slot, cpu, u64::MAX);
    }

    fn start_task(&mut self, slot: Slot, cpu: u32, slice_end: u64) {
        self.tasks[slot].state = RunState::Running(cpu);
        self.tasks[slot].times_passed_over = 0;
        let state = &mut self.cpus[cpu as usize];
        (state.running_task, state.slice_end, state.is_slice_expired) =
            (Some(slot), slice_end, false);
    }

    fn pick_task(&mut self, cpu: u32) {
        let mut candidates: Vec<Slot> = if self.scheduler.has_single_queue() {
            self.cpus
                .iter()
                .flat_map(|state| state.queue.iter().copied())
                .collect()
        } else {
            self.cpus[cpu as usize].queue.clone()
        };
        candidates.retain(|&slot| self.tasks[slot].allowed_cpus.contains(cpu));
        candidates.sort_by_key(|&slot| {
            (
                self.scheduler.queue_key(slot),
                self.tasks[slot].enqueue_number,
            )
        });
        let chosen_task = match candidates.first() {
            None => self.scheduler.steal(cpu, &scheduler_view!(self)),
            Some(&first) => Some(self.choose_least_penalized(first, &candidates, cpu)),
        };
        let Some(slot) = chosen_task else { return };

        self.picks.total_picks += 1;
        self.picks.contested_picks += u64::from(candidates.len() > 1);
        let RunState::Queued(source_cpu) = self.tasks[slot].state else {
            return;
        };

        self.deschedule(slot);
        if source_cpu != cpu {
            // The task changes queues, so its virtual time is adjusted to the new one.
            self.scheduler
                .enqueue(slot, cpu, EnqueueReason::Balanced, &scheduler_view!(self));
        }
        let slice_cycles = self
            .scheduler
            .slice_cycles(slot, cpu, &scheduler_view!(self));
        self.start_task(slot, cpu, self.now.saturating_add(slice_cycles));
    }

    /// Chooses the task to run as in AV's Linux version.
    ///
    /// This is the scheduler's choice, unless another waiting task has a lower penalty with those that run below the
    /// same cache. That task must be allowed to overtake, and the first must not have been passed over too often.
    fn choose_least_penalized(
        &mut self,
        first_choice: Slot,
        candidates: &[Slot],
        cpu: u32,
    ) -> Slot {
        if self.penalties.is_empty()
            || self.tasks[first_choice].times_passed_over >= MAX_TIMES_PASSED_OVER
        {
            return first_choice;
        }

        let co_runners: Vec<Slot> = self
            .domains
            .group_members(SHARED_CACHE, cpu)
            .filter_map(|cpu| self.running_task(cpu))
            .collect();
        let penalty_of = |slot: Slot| -> f64 {
            let slot_penalties = self
                .penalties
                .iter()
                .filter(|(a, b, _)| *a == slot && co_runners.contains(b));
            slot_penalties.map(|(_, _, penalty)| penalty).sum()
        };

        let overtaking_candidates = candidates
            .iter()
            .take(MAX_CANDIDATES)
            .copied()
            .filter(|&slot| self.scheduler.may_overtake(slot, first_choice));
        let least_penalized_candidate =
            overtaking_candidates.min_by(|&a, &b| penalty_of(a).total_cmp(&penalty_of(b)));
        let choice = least_penalized_candidate
            .filter(|&slot| penalty_of(slot) < penalty_of(first_choice))
            .unwrap_or(first_choice);
        if choice != first_choice {
            self.picks.penalized_picks += 1;
            self.tasks[first_choice].times_passed_over += 1;
        }

        choice
    }
}
