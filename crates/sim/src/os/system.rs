//! The operating system, which loads the tasks that the dispatcher selects, handles page faults,
//! and advances time.
//!
//! Policies act through an operating system, and its own actions (slices, wake-ups, balancing,
//! faults) decide what a plan comes to. They are rare beside memory accesses, so the hardware runs
//! on its own until the next of them is due (a slice ends, a task wakes, a gang's turn is over, a
//! page must be moved), or until a thread makes a request.
//!
//! For example, two tasks with slices of 10 ms share a CPU of 3 GHz at a time scale of 100. The
//! hardware runs for 300,000 cycles, the dispatcher picks the other task, 30 cycles are charged for
//! the context switch (3,000 over the scale), and the newcomer finds what the first one left in the
//! caches.
//!
//! All times are cycles of the simulated machine; all costs are scaled in [`OsCosts`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use cachemate_core::{
    AccessSource, BatchEnd, CpuId, CpuSet, IndexSet, PageMigration, ProcessId, TaskId,
};

use super::dispatch::{ContextSwitch, Dispatcher};
use super::gangs::SlotRotation;
use super::memory::{PageLookup, VirtualMemory};
use super::queues::{Seat, Slot};
use crate::hw::{Charge, FrameLookup, FrameProvider, Hardware, HwThread, StopReason, TaskCounters};

/// Costs of the operating system's own work, scaled, in cycles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OsCosts {
    pub context_switch_cycles: u64,
    pub migration_cycles: u64,
    /// Cost of a page's first touch; `None` if every page counts as resident, so that its frame is chosen without a
    /// fault.
    pub fault_cycles: Option<u64>,
    pub move_page_cycles: u64,
    /// Clock frequency of the cores, for sleeps, which programs request in nanoseconds.
    pub hertz: u64,
    /// Approximate length of a burst of page moves.
    pub move_burst_cycles: u64,
    /// Time for which touches are observed before pages move, if hot pages move first.
    pub touch_watch_cycles: u64,
}

/// A thread of a program.
pub struct OsTask {
    /// Index of the thread's process, which is also the hardware's process id.
    pub process: usize,
    pub arrived_cycle: u64,
    pub exited_cycle: Option<u64>,
    /// Hardware thread of the task while it is on no CPU; `None` while it is loaded.
    unloaded_thread: Option<HwThread>,
    page_faults: u64,
    system_calls: u64,
}

#[derive(Default)]
struct OsProcess {
    tasks: Vec<Slot>,
    /// Number of posts for which no thread has waited yet, by channel.
    pending_posts: BTreeMap<u32, u64>,
    waiters_by_channel: BTreeMap<u32, VecDeque<Slot>>,
    is_migrating: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Timer {
    Wake(Slot),
    EndSampling(usize),
    MovePages(usize),
}

/// An event that the caller may want to handle before time continues.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SystemEvent {
    /// The requested time was reached.
    Time,
    /// The tasks of some CPUs have changed.
    Switched(Vec<ContextSwitch>),
    /// A task has exited.
    Exited(Slot),
    /// A probe of the task has a result.
    Interrupt(Slot),
}

/// CPU assignments for a measurement, which override gangs and queues.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeatHold {
    pub cpus: CpuSet,
    pub seats: Vec<(u32, Slot)>,
}

/// The whole system: hardware, memory and tasks.
pub struct System {
    pub hw: Hardware,
    pub dispatcher: Dispatcher,
    pub memory: VirtualMemory,
    costs: OsCosts,
    tasks: Vec<OsTask>,
    processes: Vec<OsProcess>,
    gang_rotations: Vec<SlotRotation>,
    seat_hold: Option<SeatHold>,
    have_seats_changed: bool,
    timers: BinaryHeap<Reverse<(u64, u64, Timer)>>,
    timer_count: u64,
    now: u64,
    /// Number of cycles spent on copying pages.
    pub page_copy_cycles: u64,
}

/// The handler of the hardware's requests for frames.
struct PageFaultHandler<'a> {
    memory: &'a mut VirtualMemory,
    costs: &'a OsCosts,
    fault_cpus: Vec<u32>,
}

impl FrameProvider for PageFaultHandler<'_> {
    fn find_frame(
        &mut self,
        process: ProcessId,
        page: u64,
        cpu: CpuId,
        _is_store: bool,
    ) -> FrameLookup {
        let (frame, cost_cycles, is_copied) =
            match self.memory.look_up(process.0 as usize, page, cpu.0) {
                PageLookup::Resident(frame) => (frame, 0, false),
                PageLookup::Fault(frame) => {
                    self.fault_cpus
                        .extend(self.costs.fault_cycles.map(|_| cpu.0));
                    (frame, self.costs.fault_cycles.unwrap_or(0), false)
                }
                PageLookup::Moved(frame, _) => (frame, self.costs.move_page_cycles, true),
            };

        FrameLookup {
            frame: u64::from(frame),
            cost_cycles,
            is_copied,
        }
    }
}

impl System {
    pub fn new(
        hw: Hardware,
        dispatcher: Dispatcher,
        memory: VirtualMemory,
        costs: OsCosts,
    ) -> Self {
        System {
            hw,
            dispatcher,
            memory,
            costs,
            tasks: Vec::new(),
            processes: Vec::new(),
            gang_rotations: Vec::new(),
            seat_hold: None,
            have_seats_changed: false,
            timers: BinaryHeap::new(),
            timer_count: 0,
            now: 0,
            page_copy_cycles: 0,
        }
    }

    pub fn now(&self) -> u64 {
        self.now
    }
    pub fn task(&self, slot: Slot) -> &OsTask {
        &self.tasks[slot]
    }

    /// Adds an empty process, and returns its index.
    pub fn add_process(&mut self) -> usize {
        self.processes.push(OsProcess::default());
        self.memory.add_process()
    }

    /// Adds a thread to a process; the thread is runnable immediately.
    pub fn add_task(
        &mut self,
        process: usize,
        source: Box<dyn AccessSource>,
        allowed_cpus: CpuSet,
        weight: f64,
        is_seated: bool,
    ) -> Slot {
        let slot = self.tasks.len();
        let thread = HwThread::new(TaskId(slot as u32), ProcessId(process as u32), 0, source);
        self.tasks.push(OsTask {
            process,
            arrived_cycle: self.now,
            exited_cycle: None,
            unloaded_thread: Some(thread),
            page_faults: 0,
            system_calls: 0,
        });
        self.processes[process].tasks.push(slot);

        let dispatcher_slot = self
            .dispatcher
            .add_task(self.now, allowed_cpus, weight, is_seated);
        debug_assert_eq!(dispatcher_slot, slot);
        slot
    }

    /// The thread need not be on a CPU; `None` once the task has exited.
    pub fn thread(&self, slot: Slot) -> Option<&HwThread> {
        let unloaded_thread = self.tasks[slot].unloaded_thread.as_ref();
        unloaded_thread.or_else(|| {
            self.loaded_cpu(slot)
                .and_then(|cpu| self.hw.thread(CpuId(cpu)))
        })
    }
    pub fn thread_mut(&mut self, slot: Slot) -> Option<&mut HwThread> {
        match self.loaded_cpu(slot) {
            Some(cpu) => self.hw.thread_mut(CpuId(cpu)),
            None => self.tasks[slot].unloaded_thread.as_mut(),
        }
    }
    fn loaded_cpu(&self, slot: Slot) -> Option<u32> {
        let runs_slot = |cpu: &u32| {
            self.hw
                .thread(CpuId(*cpu))
                .is_some_and(|thread| thread.task.0 as usize == slot)
        };
        (0..self.dispatcher.cpu_count()).find(runs_slot)
    }

    /// Includes page faults, system calls and switches, which the operating system counts.
    pub fn task_counters(&self, slot: Slot) -> TaskCounters {
        let mut counters = self
            .thread(slot)
            .map(|thread| thread.counters.clone())
            .unwrap_or_default();
        let task = &self.tasks[slot];
        counters.page_faults = task.page_faults;
        counters.system_calls = task.system_calls;
        counters.context_switches = self.dispatcher.task(slot).switches;
        counters
    }

    /// Replaces the gang schedules; a schedule that is also in the new list keeps its turn.
    pub fn set_rotations(&mut self, mut rotations: Vec<SlotRotation>) {
        for new_rotation in &mut rotations {
            if let Some(current) = self
                .gang_rotations
                .iter()
                .find(|old_rotation| old_rotation.is_same_schedule(new_rotation))
            {
                *new_rotation = current.clone();
            }
        }

        self.gang_rotations = rotations;
        let is_gang_member = |slot: Slot| {
            let gangs = self
                .gang_rotations
                .iter()
                .flat_map(|rotation| &rotation.gangs);
            gangs
                .flat_map(|gang| &gang.members)
                .any(|&(member, _)| member == slot)
        };
        let seated_by_slot: Vec<bool> = (0..self.tasks.len()).map(is_gang_member).collect();
        for (slot, seated) in seated_by_slot.into_iter().enumerate() {
            self.dispatcher.set_seated(self.now, slot, seated);
        }
        self.have_seats_changed = true;
    }

    /// Sets a measurement's CPU assignments, which override all others; `None` releases the CPUs.
    pub fn set_hold(&mut self, seat_hold: Option<SeatHold>) {
        self.have_seats_changed |= self.seat_hold != seat_hold;
        self.seat_hold = seat_hold;
    }

    /// Sets the colors of a process, and starts to move its pages.
    pub fn set_colors(
        &mut self,
        process: usize,
        allowed_colors: &IndexSet,
        migration: PageMigration,
    ) {
        if self.memory.set_colors(process, allowed_colors, migration) {
            let pages: Vec<u64> = self.memory.pages(process).map(|(page, _)| page).collect();
            pages
                .into_iter()
                .for_each(|page| self.drop_translation(process, page));
        }
        let Some(coloring) = self.memory.coloring(process) else {
            return;
        };
        if coloring.is_sampling {
            self.set_timer(
                self.now + self.costs.touch_watch_cycles,
                Timer::EndSampling(process),
            );
        } else if coloring.pending_pages() > 0 {
            self.start_moving(process);
        }
    }

    fn start_moving(&mut self, process: usize) {
        if !std::mem::replace(&mut self.processes[process].is_migrating, true) {
            self.set_timer(self.now, Timer::MovePages(process));
        }
    }

    /// Runs until `end` or until an event that the caller may want to handle; if `watches_switches` is set, these
    /// include switches. Returns `None` if memory is exhausted.
    pub fn run(&mut self, end: u64, watches_switches: bool) -> Option<SystemEvent> {
        loop {
            let switches = self.settle_switches();
            if watches_switches && !switches.is_empty() {
                return Some(SystemEvent::Switched(switches));
            }
            let next_stop = self.next_event_cycle().min(end);

            if next_stop > self.now {
                let mut fault_handler = PageFaultHandler {
                    memory: &mut self.memory,
                    costs: &self.costs,
                    fault_cpus: Vec::new(),
                };
                let stop_reason = self.hw.run(next_stop, &mut fault_handler);
                let fault_cpus = fault_handler.fault_cpus;
                self.count_faults(&fault_cpus);
                self.flush_moved_pages();
                if self.memory.is_exhausted {
                    return None;
                }

                match stop_reason {
                    StopReason::Time => self.now = next_stop,
                    StopReason::BatchEnd {
                        cpu,
                        batch_end: turn,
                        end_cycle: at_cycle,
                    } => {
                        if let Some(slot) = self.handle_batch_end(cpu, turn, at_cycle) {
                            return Some(SystemEvent::Exited(slot));
                        }
                        continue;
                    }
                    StopReason::Interrupt {
                        task,
                        interrupt_cycle: at_cycle,
                        ..
                    } => {
                        self.now = self.now.max(at_cycle.min(next_stop));
                        return Some(SystemEvent::Interrupt(task.0 as usize));
                    }
                }
            }

            self.fire_timers();
            self.dispatcher.advance(self.now);
            if self.now >= end {
                let switches = self.settle_switches();
                if watches_switches && !switches.is_empty() {
                    return Some(SystemEvent::Switched(switches));
                }
                self.dispatcher.account_to(self.now);
                return Some(SystemEvent::Time);
            }
        }
    }

    fn next_event_cycle(&self) -> u64 {
        let next_timer = self
            .timers
            .peek()
            .map_or(u64::MAX, |Reverse((cycle, _, _))| *cycle);
        let next_turn_end = self
            .gang_rotations
            .iter()
            .map(SlotRotation::turn_end_cycle)
            .min()
            .unwrap_or(u64::MAX);
        next_timer
            .min(next_turn_end)
            .min(self.dispatcher.next_event_cycle())
    }

    fn set_timer(&mut self, cycle: u64, timer: Timer) {
        self.timer_count += 1;
        self.timers.push(Reverse((cycle, self.timer_count, timer)));
    }

    fn fire_timers(&mut self) {
        while let Some(&Reverse((cycle, _, timer))) = self.timers.peek() {
            if cycle > self.now {
                break;
            }
            self.timers.pop();
            match timer {
                Timer::Wake(slot) => self.dispatcher.wake(self.now, slot),
                Timer::EndSampling(process) => {
                    self.memory.end_sampling(process);
                    self.start_moving(process);
                }
                Timer::MovePages(process) => self.move_pages(process),
            }
        }
    }

    /// Updates the turns of gangs, then the CPU assignments, then the dispatcher, and finally the hardware. Returns the
    /// switches.
    fn settle_switches(&mut self) -> Vec<ContextSwitch> {
        for rotation in &mut self.gang_rotations {
            let previous_gang = rotation.active_gang_index();
            rotation.advance(self.now, &self.dispatcher);
            self.have_seats_changed |= rotation.active_gang_index() != previous_gang;
        }
        if std::mem::take(&mut self.have_seats_changed) {
            let seats = self.build_seats();
            self.dispatcher.set_seats(self.now, &seats);
        }

        let switches = self.dispatcher.settle_switches(self.now);
        for switch in &switches {
            if let Some(thread) = self.hw.unload(CpuId(switch.cpu)) {
                let slot = thread.task.0 as usize;
                self.tasks[slot].unloaded_thread = Some(thread);
            }
        }

        for switch in &switches {
            let Some(thread) = switch
                .incoming
                .and_then(|slot| self.tasks[slot].unloaded_thread.take())
            else {
                continue;
            };

            let cpu = CpuId(switch.cpu);
            self.hw.load(cpu, thread, self.now);
            self.hw
                .charge_cycles(cpu, self.costs.context_switch_cycles, Charge::Switch);
            if switch.is_migrated {
                self.hw
                    .charge_cycles(cpu, self.costs.migration_cycles, Charge::Migration);
            }
        }

        switches
    }

    fn build_seats(&self) -> Vec<Seat> {
        let mut seats = vec![Seat::Open; self.dispatcher.cpu_count() as usize];
        for rotation in &self.gang_rotations {
            rotation
                .cpus
                .iter()
                .for_each(|cpu| seats[cpu as usize] = Seat::Reserved(None));
            for (cpu, slot) in rotation.active_assignments(&self.dispatcher) {
                seats[cpu as usize] = Seat::Reserved(Some(slot));
            }
        }

        if let Some(seat_hold) = &self.seat_hold {
            let is_held_seat = |seat: &Seat| matches!(seat, Seat::Reserved(Some(slot)) if seat_hold.seats.iter().any(|(_, s)| s == slot));
            seats
                .iter_mut()
                .filter(|seat| is_held_seat(seat))
                .for_each(|seat| *seat = Seat::Reserved(None));
            seat_hold
                .cpus
                .iter()
                .for_each(|cpu| seats[cpu as usize] = Seat::Reserved(None));
            seat_hold
                .seats
                .iter()
                .for_each(|&(cpu, slot)| seats[cpu as usize] = Seat::Reserved(Some(slot)));
        }

        seats
    }

    /// Handles a thread's request at the end of a batch; if the thread exits, returns its slot.
    fn handle_batch_end(
        &mut self,
        cpu: CpuId,
        batch_end: BatchEnd,
        end_cycle: u64,
    ) -> Option<Slot> {
        self.now = self.now.max(end_cycle);
        let slot = self.hw.thread(cpu)?.task.0 as usize;
        let process = self.tasks[slot].process;
        self.tasks[slot].system_calls += u64::from(batch_end != BatchEnd::More);

        match batch_end {
            BatchEnd::More => {}
            BatchEnd::Sleep { ns } => {
                let cycles = self.sleep_cycles(ns);
                self.dispatcher.block(self.now, slot);
                self.set_timer(self.now + cycles, Timer::Wake(slot));
            }
            BatchEnd::Wait { channel } => {
                let post_count = self.processes[process]
                    .pending_posts
                    .entry(channel)
                    .or_default();
                if *post_count > 0 {
                    *post_count -= 1;
                } else {
                    self.processes[process]
                        .waiters_by_channel
                        .entry(channel)
                        .or_default()
                        .push_back(slot);
                    self.dispatcher.block(self.now, slot);
                }
            }
            BatchEnd::Post { channel } => {
                let first_waiter = self.processes[process]
                    .waiters_by_channel
                    .get_mut(&channel)
                    .and_then(VecDeque::pop_front);
                match first_waiter {
                    Some(waiter) => self.dispatcher.wake(self.now, waiter),
                    None => {
                        *self.processes[process]
                            .pending_posts
                            .entry(channel)
                            .or_default() += 1
                    }
                }
            }
            BatchEnd::Exit => {
                self.end_task(slot, self.now);
                return Some(slot);
            }
        }

        None
    }

    fn end_task(&mut self, slot: Slot, now: u64) {
        self.dispatcher.exit(now, slot);
        self.tasks[slot].exited_cycle = Some(now);
        self.settle_switches();
        let process = self.tasks[slot].process;
        let have_all_exited = self.processes[process]
            .tasks
            .iter()
            .all(|&slot| self.tasks[slot].exited_cycle.is_some());
        if have_all_exited {
            self.flush_moved_pages();
            let freed_frames = self.memory.release_process(process, 0);
            freed_frames
                .into_iter()
                .for_each(|frame| self.hw.flush_frame(u64::from(frame)));
        }
    }

    fn sleep_cycles(&self, ns: u64) -> u64 {
        // A program's own sleep is not scaled, because it is part of the program's behavior, like its instructions.
        (u128::from(ns) * u128::from(self.costs.hertz) / 1_000_000_000).max(1) as u64
    }

    fn count_faults(&mut self, cpus: &[u32]) {
        for &cpu in cpus {
            if let Some(thread) = self.hw.thread(CpuId(cpu)) {
                let slot = thread.task.0 as usize;
                self.tasks[slot].page_faults += 1;
            }
        }
    }

    fn drop_translation(&mut self, process: usize, page: u64) {
        self.hw.shoot_down(ProcessId(process as u32), page);
        for &slot in &self.processes[process].tasks {
            if let Some(thread) = &mut self.tasks[slot].unloaded_thread {
                thread.shoot_down(page);
            }
        }
    }

    /// Drops all references to frames that pages have left.
    fn flush_moved_pages(&mut self) {
        for page in self.memory.take_moved_pages(0) {
            self.drop_translation(page.process, page.page);
            self.hw.flush_frame(u64::from(page.old_frame));
        }
    }

    /// Runs one burst of page moves. The time is charged to a CPU that runs the process; if there is none, to the first
    /// idle CPU, and otherwise to the first CPU.
    fn move_pages(&mut self, process: usize) {
        let cpus = self.dispatcher.cpu_count();
        let running_cpu = (0..cpus).find(|&cpu| {
            self.dispatcher
                .running_task(cpu)
                .is_some_and(|slot| self.tasks[slot].process == process)
        });

        let idle_cpu = || (0..cpus).find(|&cpu| self.dispatcher.running_task(cpu).is_none());
        let cpu = running_cpu.or_else(idle_cpu).unwrap_or(0);
        let page_cycles = self.costs.move_page_cycles.max(1);
        let moves_per_burst = (self.costs.move_burst_cycles / page_cycles).max(1);
        let moved_pages: Vec<(u64, u32)> = (0..moves_per_burst)
            .map_while(|_| self.memory.move_next_page(process, cpu))
            .map(|moved_page| (moved_page.page, moved_page.frame))
            .collect();
        let page_count = moved_pages.len() as u64;
        self.flush_moved_pages();

        if let Some(slot) = self.dispatcher.running_task(cpu) {
            let task = TaskId(slot as u32);
            for (page, frame) in moved_pages {
                self.hw
                    .insert_copied(CpuId(cpu), page, u64::from(frame), task);
            }
        }

        self.page_copy_cycles += page_count * page_cycles;
        if page_count > 0 {
            self.hw
                .charge_cycles(CpuId(cpu), page_count * page_cycles, Charge::PageCopy);
        }

        let has_pending = self
            .memory
            .coloring(process)
            .is_some_and(|coloring| coloring.pending_pages() > 0);
        self.processes[process].is_migrating = has_pending;
        if has_pending {
            self.set_timer(
                self.now + page_count.max(1) * page_cycles,
                Timer::MovePages(process),
            );
        }
    }
}
