//! The operating system, which loads the tasks that the dispatcher selects, handles page faults, and advances time.
//!
//! Method: the hardware runs until the next action of the operating system (a slice ends, a task wakes, a gang's turn
//! is over, a page must be moved) or until a thread makes a request. All times are cycles of the simulated machine; all
//! costs are scaled in [`OsCosts`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use cachemate_core::{AccessSource, BatchEnd, CpuId, CpuSet, IndexSet, PageMigration, ProcessId, TaskId};

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
    /// Hardware thread while it is on no CPU.
    parked_thread: Option<HwThread>,
    page_faults: u64,
    system_calls: u64,
}

#[derive(Default)]
struct OsProcess {
    tasks: Vec<Slot>,
    /// Number of posts for which no thread has waited yet, by channel.
    posted: BTreeMap<u32, u64>,
    waiters: BTreeMap<u32, VecDeque<Slot>>,
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
    rotations: Vec<SlotRotation>,
    hold: Option<SeatHold>,
    seats_changed: bool,
    timers: BinaryHeap<Reverse<(u64, u64, Timer)>>,
    timers_set: u64,
    now: u64,
    /// Number of cycles spent on copying pages.
    pub page_copy_cycles: u64,
}

/// The handler of the hardware's requests for frames.
struct PageFaultHandler<'a> {
    memory: &'a mut VirtualMemory,
    costs: &'a OsCosts,
    faults: Vec<u32>,
}

impl FrameProvider for PageFaultHandler<'_> {
    fn find_frame(&mut self, process: ProcessId, page: u64, cpu: CpuId, _store: bool) -> FrameLookup {
        let (frame, cost_cycles, copied) = match self.memory.look_up(process.0 as usize, page, cpu.0) {
            PageLookup::Resident(frame) => (frame, 0, false),
            PageLookup::Fault(frame) => {
                self.faults.extend(self.costs.fault_cycles.map(|_| cpu.0));
                (frame, self.costs.fault_cycles.unwrap_or(0), false)
            }
            PageLookup::Moved(frame, _) => (frame, self.costs.move_page_cycles, true),
        };
        FrameLookup { frame: u64::from(frame), cost_cycles, copied }
    }
}

impl System {
    pub fn new(hw: Hardware, dispatcher: Dispatcher, memory: VirtualMemory, costs: OsCosts) -> Self {
        System {
            hw,
            dispatcher,
            memory,
            costs,
            tasks: Vec::new(),
            processes: Vec::new(),
            rotations: Vec::new(),
            hold: None,
            seats_changed: false,
            timers: BinaryHeap::new(),
            timers_set: 0,
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
        allowed: CpuSet,
        weight: f64,
        seated: bool,
    ) -> Slot {
        let slot = self.tasks.len();
        let thread = HwThread::new(TaskId(slot as u32), ProcessId(process as u32), 0, source);
        self.tasks.push(OsTask {
            process,
            arrived_cycle: self.now,
            exited_cycle: None,
            parked_thread: Some(thread),
            page_faults: 0,
            system_calls: 0,
        });
        self.processes[process].tasks.push(slot);
        let dispatcher_slot = self.dispatcher.add_task(self.now, allowed, weight, seated);
        debug_assert_eq!(dispatcher_slot, slot);
        slot
    }

    /// Returns the hardware thread of a task, on a CPU or not; `None` once it has exited.
    pub fn thread(&self, slot: Slot) -> Option<&HwThread> {
        let aside = self.tasks[slot].parked_thread.as_ref();
        aside.or_else(|| self.load_of(slot).and_then(|cpu| self.hw.thread(CpuId(cpu))))
    }
    pub fn thread_mut(&mut self, slot: Slot) -> Option<&mut HwThread> {
        match self.load_of(slot) {
            Some(cpu) => self.hw.thread_mut(CpuId(cpu)),
            None => self.tasks[slot].parked_thread.as_mut(),
        }
    }
    fn load_of(&self, slot: Slot) -> Option<u32> {
        let runs_slot = |cpu: &u32| self.hw.thread(CpuId(*cpu)).is_some_and(|thread| thread.task.0 as usize == slot);
        (0..self.dispatcher.cpu_count()).find(runs_slot)
    }

    /// Returns all counts of a task so far.
    pub fn task_counters(&self, slot: Slot) -> TaskCounters {
        let mut counters = self.thread(slot).map(|thread| thread.counters.clone()).unwrap_or_default();
        let task = &self.tasks[slot];
        counters.page_faults = task.page_faults;
        counters.system_calls = task.system_calls;
        counters.context_switches = self.dispatcher.task(slot).switches;
        counters
    }

    /// Replaces the gang schedules; a schedule that is also in the new list keeps its turn.
    pub fn set_rotations(&mut self, mut rotations: Vec<SlotRotation>) {
        for fresh in &mut rotations {
            if let Some(current) = self.rotations.iter().find(|old_rotation| old_rotation.is_same_schedule(fresh)) {
                *fresh = current.clone();
            }
        }
        self.rotations = rotations;
        let members = |slot: Slot| {
            let gangs = self.rotations.iter().flat_map(|rotation| &rotation.gangs);
            gangs.flat_map(|gang| &gang.members).any(|&(member, _)| member == slot)
        };
        let seated: Vec<bool> = (0..self.tasks.len()).map(members).collect();
        for (slot, seated) in seated.into_iter().enumerate() {
            self.dispatcher.set_seated(self.now, slot, seated);
        }
        self.seats_changed = true;
    }

    /// Sets a measurement's CPU assignments, which override all others; `None` releases the CPUs.
    pub fn set_hold(&mut self, hold: Option<SeatHold>) {
        self.seats_changed |= self.hold != hold;
        self.hold = hold;
    }

    /// Stops or resumes a task that never blocks by itself, such as a measurement's own thread.
    pub fn set_asleep(&mut self, slot: Slot, asleep: bool) {
        if asleep {
            self.dispatcher.block(self.now, slot);
        } else {
            self.dispatcher.wake(self.now, slot);
        }
    }

    /// Ends a task that belongs to the operating system.
    pub fn kill(&mut self, slot: Slot) {
        self.end_task(slot, self.now);
    }

    /// Sets the colors of a process, and starts to move its pages.
    pub fn set_colors(&mut self, process: usize, allowed: &IndexSet, migration: PageMigration) {
        if self.memory.set_colors(process, allowed, migration) {
            let pages: Vec<u64> = self.memory.pages(process).map(|(page, _)| page).collect();
            pages.into_iter().for_each(|page| self.drop_translation(process, page));
        }
        let Some(coloring) = self.memory.coloring(process) else { return };
        if coloring.sampling {
            self.set_timer(self.now + self.costs.touch_watch_cycles, Timer::EndSampling(process));
        } else if coloring.pending_pages() > 0 {
            self.start_moving(process);
        }
    }

    fn start_moving(&mut self, process: usize) {
        if !std::mem::replace(&mut self.processes[process].is_migrating, true) {
            self.set_timer(self.now, Timer::MovePages(process));
        }
    }

    /// Runs until `end` or until an event that the caller may want to handle; with `watch_switches`, these include
    /// switches. Returns `None` if memory is exhausted.
    pub fn run(&mut self, end: u64, watch_switches: bool) -> Option<SystemEvent> {
        loop {
            let switches = self.settle_switches();
            if watch_switches && !switches.is_empty() {
                return Some(SystemEvent::Switched(switches));
            }
            let due = self.next_due().min(end);
            if due > self.now {
                let mut paging = PageFaultHandler { memory: &mut self.memory, costs: &self.costs, faults: Vec::new() };
                let stop = self.hw.run(due, &mut paging);
                let faults = paging.faults;
                self.count_faults(&faults);
                self.flush_moved_pages();
                if self.memory.exhausted {
                    return None;
                }
                match stop {
                    StopReason::Time => self.now = due,
                    StopReason::Turn { cpu, turn, at_cycle } => {
                        if let Some(slot) = self.handle_batch_end(cpu, turn, at_cycle) {
                            return Some(SystemEvent::Exited(slot));
                        }
                        continue;
                    }
                    StopReason::Interrupt { task, at_cycle, .. } => {
                        self.now = self.now.max(at_cycle.min(due));
                        return Some(SystemEvent::Interrupt(task.0 as usize));
                    }
                }
            }
            self.fire_timers();
            self.dispatcher.advance(self.now);
            if self.now >= end {
                let switches = self.settle_switches();
                if watch_switches && !switches.is_empty() {
                    return Some(SystemEvent::Switched(switches));
                }
                self.dispatcher.account_to(self.now);
                return Some(SystemEvent::Time);
            }
        }
    }

    fn next_due(&self) -> u64 {
        let timer = self.timers.peek().map_or(u64::MAX, |Reverse((cycle, _, _))| *cycle);
        let turns = self.rotations.iter().map(SlotRotation::turn_end_cycle).min().unwrap_or(u64::MAX);
        timer.min(turns).min(self.dispatcher.next_event_cycle())
    }

    fn set_timer(&mut self, cycle: u64, timer: Timer) {
        self.timers_set += 1;
        self.timers.push(Reverse((cycle, self.timers_set, timer)));
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
        for rotation in &mut self.rotations {
            let previous_gang = rotation.active_gang();
            rotation.advance(self.now, &self.dispatcher);
            self.seats_changed |= rotation.active_gang() != previous_gang;
        }
        if std::mem::take(&mut self.seats_changed) {
            let seats = self.dispatcher_seats();
            self.dispatcher.set_seats(self.now, &seats);
        }
        let switches = self.dispatcher.settle_switches(self.now);
        for switch in &switches {
            if let Some(thread) = self.hw.unload(CpuId(switch.cpu)) {
                let slot = thread.task.0 as usize;
                self.tasks[slot].parked_thread = Some(thread);
            }
        }
        for switch in &switches {
            let Some(thread) = switch.into.and_then(|slot| self.tasks[slot].parked_thread.take()) else { continue };
            let cpu = CpuId(switch.cpu);
            self.hw.load(cpu, thread, self.now);
            self.hw.charge_cycles(cpu, self.costs.context_switch_cycles, Charge::Switch);
            if switch.migrated {
                self.hw.charge_cycles(cpu, self.costs.migration_cycles, Charge::Migration);
            }
        }
        switches
    }

    fn dispatcher_seats(&self) -> Vec<Seat> {
        let mut seats = vec![Seat::Open; self.dispatcher.cpu_count() as usize];
        for rotation in &self.rotations {
            rotation.cpus.iter().for_each(|cpu| seats[cpu as usize] = Seat::Reserved(None));
            for (cpu, slot) in rotation.active_seats(&self.dispatcher) {
                seats[cpu as usize] = Seat::Reserved(Some(slot));
            }
        }
        if let Some(hold) = &self.hold {
            let is_held_seat =
                |seat: &Seat| matches!(seat, Seat::Reserved(Some(slot)) if hold.seats.iter().any(|(_, s)| s == slot));
            seats.iter_mut().filter(|seat| is_held_seat(seat)).for_each(|seat| *seat = Seat::Reserved(None));
            hold.cpus.iter().for_each(|cpu| seats[cpu as usize] = Seat::Reserved(None));
            hold.seats.iter().for_each(|&(cpu, slot)| seats[cpu as usize] = Seat::Reserved(Some(slot)));
        }
        seats
    }

    /// Handles a thread's request at the end of a batch; if the thread exits, returns its slot.
    fn handle_batch_end(&mut self, cpu: CpuId, turn: BatchEnd, at_cycle: u64) -> Option<Slot> {
        self.now = self.now.max(at_cycle);
        let slot = self.hw.thread(cpu)?.task.0 as usize;
        let process = self.tasks[slot].process;
        self.tasks[slot].system_calls += u64::from(turn != BatchEnd::More);
        match turn {
            BatchEnd::More => {}
            BatchEnd::Sleep { ns } => {
                let cycles = self.sleep_cycles(ns);
                self.dispatcher.block(self.now, slot);
                self.set_timer(self.now + cycles, Timer::Wake(slot));
            }
            BatchEnd::Wait { channel } => {
                let posted = self.processes[process].posted.entry(channel).or_default();
                if *posted > 0 {
                    *posted -= 1;
                } else {
                    self.processes[process].waiters.entry(channel).or_default().push_back(slot);
                    self.dispatcher.block(self.now, slot);
                }
            }
            BatchEnd::Post { channel } => {
                let first = self.processes[process].waiters.get_mut(&channel).and_then(VecDeque::pop_front);
                match first {
                    Some(woken) => self.dispatcher.wake(self.now, woken),
                    None => *self.processes[process].posted.entry(channel).or_default() += 1,
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
        let all_gone = self.processes[process].tasks.iter().all(|&slot| self.tasks[slot].exited_cycle.is_some());
        if all_gone {
            self.flush_moved_pages();
            let freed = self.memory.release(process, 0);
            freed.into_iter().for_each(|frame| self.hw.flush_frame(u64::from(frame)));
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
            if let Some(thread) = &mut self.tasks[slot].parked_thread {
                thread.shoot_down(page);
            }
        }
    }

    /// Drops all references to frames that pages have left.
    fn flush_moved_pages(&mut self) {
        for page in self.memory.take_moved(0) {
            self.drop_translation(page.process, page.page);
            self.hw.flush_frame(u64::from(page.old_frame));
        }
    }

    /// Runs one burst of page moves. The time is charged to a CPU that runs the process; if there is none, to the first
    /// idle CPU, and otherwise to the first CPU.
    fn move_pages(&mut self, process: usize) {
        let cpus = self.dispatcher.cpu_count();
        let running_cpu =
            (0..cpus).find(|&cpu| self.dispatcher.running(cpu).is_some_and(|slot| self.tasks[slot].process == process));
        let idle_cpu = || (0..cpus).find(|&cpu| self.dispatcher.running(cpu).is_none());
        let cpu = running_cpu.or_else(idle_cpu).unwrap_or(0);
        let page_cycles = self.costs.move_page_cycles.max(1);
        let burst = (self.costs.move_burst_cycles / page_cycles).max(1);
        let pages: Vec<(u64, u32)> = (0..burst)
            .map_while(|_| self.memory.move_next(process, cpu))
            .map(|moved_page| (moved_page.page, moved_page.frame))
            .collect();
        let page_count = pages.len() as u64;
        self.flush_moved_pages();
        if let Some(slot) = self.dispatcher.running(cpu) {
            let task = TaskId(slot as u32);
            for (page, frame) in pages {
                self.hw.insert_copied(CpuId(cpu), page, u64::from(frame), task);
            }
        }
        self.page_copy_cycles += page_count * page_cycles;
        if page_count > 0 {
            self.hw.charge_cycles(CpuId(cpu), page_count * page_cycles, Charge::PageCopy);
        }
        let has_pending = self.memory.coloring(process).is_some_and(|coloring| coloring.pending_pages() > 0);
        self.processes[process].is_migrating = has_pending;
        if has_pending {
            self.set_timer(self.now + page_count.max(1) * page_cycles, Timer::MovePages(process));
        }
    }
}
