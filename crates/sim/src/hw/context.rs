//! One hardware context: its thread, the events for which it waits, and the attribution of its ticks.

use cachemate_core::{CpuId, TaskId};

use super::Charge;
use super::cache_unit::DataOrigin;
use super::counters::{CpuCounters, Stalls, TaskCounters};
use super::deferred::DeferredAccess;
use super::thread::HwThread;

/// The cause for which a context waits, and the part of the wait that is queueing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StallSource {
    pub served: DataOrigin,
    pub queue: u64,
    /// Whether another miss of the context brings the line, so that no additional miss register is used.
    pub joined: bool,
}

/// A miss for which the context did not wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutstandingMiss {
    pub returns_at: u64,
    /// Instruction number; `None` for stores, which occupy no place in the window once issued.
    pub instruction: Option<u64>,
    pub wait: StallSource,
}

/// Ticks of one run of a context that were spent neither on instructions nor on waits.
#[derive(Clone, Copy, Default)]
pub(crate) struct UnattributedTicks {
    /// Ticks of waiting with the issue slot kept; they are already attributed.
    pub in_place: u64,
    /// Ticks of the operating system, charged at the end of the run.
    pub faults: u64,
    pub interrupts: u64,
}

/// The value if no load is in flight.
const NONE: (u64, u64) = (u64::MAX, u64::MAX);

pub(crate) struct HwContext {
    pub cpu: CpuId,
    pub thread: Option<Box<HwThread>>,
    /// Tick from which the context could issue.
    pub ready: u64,
    /// Tick before which all ticks are attributed.
    pub accounted: u64,
    pub wait: Option<StallSource>,
    /// Outstanding misses, oldest first. Those that have returned stay until their places are needed.
    pub outstanding: Vec<OutstandingMiss>,
    /// Number of miss registers (in order: entries of the store buffer) that they occupy.
    pub mshrs_in_use: usize,
    /// Tick at which the first outstanding miss returns; `u64::MAX` if there are none.
    pub soonest: u64,
    /// The oldest load that may still be outstanding: the tick at which it returns, and its instruction; both
    /// `u64::MAX` if there is none.
    oldest: (u64, u64),
    /// Tick at which the value of the last load arrives, and its origin.
    pub value_at: u64,
    pub value_from: DataOrigin,
    /// Deferred accesses, by instruction, and the first tick at which one of them is due (`u64::MAX` if there are
    /// none).
    pub parked: Vec<DeferredAccess>,
    pub next_parked: u64,
    /// The deferred access whose value is that of the last load, if `value_at` is `u64::MAX`.
    pub parked_value: u64,
    /// Number of instructions issued on this context since the start.
    pub issued: u64,
    pub counters: CpuCounters,
}

impl HwContext {
    pub fn new(cpu: CpuId, nearest: DataOrigin) -> Self {
        HwContext {
            cpu,
            thread: None,
            ready: 0,
            accounted: 0,
            wait: None,
            outstanding: Vec::new(),
            mshrs_in_use: 0,
            soonest: u64::MAX,
            oldest: NONE,
            value_at: 0,
            value_from: nearest,
            parked: Vec::new(),
            next_parked: u64::MAX,
            parked_value: 0,
            issued: 0,
            counters: CpuCounters::default(),
        }
    }

    /// Returns the tick from which its thread could issue; `u64::MAX` if there is no thread.
    #[inline(always)]
    pub fn ready_tick(&self) -> u64 {
        if self.thread.is_some() { self.ready } else { u64::MAX }
    }

    pub fn task(&self) -> Option<TaskId> {
        self.thread.as_ref().map(|thread| thread.task)
    }

    /// Attributes every tick before `until`: first to the wait of the context, then to the issue slot that it did not
    /// get.
    pub fn account(&mut self, until: u64) {
        let Some(thread) = &mut self.thread else { return };
        if until <= self.accounted {
            return;
        }
        let waited = self.ready.min(until).saturating_sub(self.accounted);
        if waited > 0 {
            match &mut self.wait {
                Some(wait) => {
                    let queued = waited.min(wait.queue);
                    wait.queue -= queued;
                    thread.counters.stalls.queue += queued;
                    *stall_counter(&mut thread.counters.stalls, wait.served) += waited - queued;
                }
                None => thread.counters.stalls.issue += waited,
            }
        }
        let ticks = until - self.accounted;
        thread.counters.stalls.issue += ticks - waited;
        thread.counters.ticks += ticks;
        self.counters.loaded_ticks += ticks;
        self.accounted = until;
        if self.ready <= until {
            self.wait = None;
        }
    }

    /// Charges `ticks` of the operating system, starting now, and delays the thread's other work by as much.
    pub fn charge_ticks(&mut self, now: u64, ticks: u64, charge: Charge) {
        self.counters.charged_ticks[charge as usize] += ticks;
        self.account(now);
        if let Some(thread) = &mut self.thread {
            thread.counters.stalls.system += ticks;
            thread.counters.ticks += ticks;
            self.counters.loaded_ticks += ticks;
            self.accounted += ticks;
            self.ready += ticks;
        } else {
            self.ready = self.ready.max(now) + ticks;
        }
    }

    /// Attributes a run of `ticks` that ended at `now`: all ticks except those in `spent` were instructions.
    pub fn account_run(&mut self, counters: &mut TaskCounters, ticks: u64, now: u64, spent: UnattributedTicks) {
        let instructions = ticks - spent.in_place;
        let system = spent.faults + spent.interrupts;
        counters.instructions += instructions;
        counters.ticks += instructions + system;
        counters.stalls.system += system;
        self.counters.instructions += instructions;
        self.counters.loaded_ticks += ticks + system;
        self.counters.charged_ticks[Charge::Fault as usize] += spent.faults;
        self.counters.charged_ticks[Charge::Interrupt as usize] += spent.interrupts;
        self.accounted = now + system;
        self.ready = self.ready.max(self.accounted);
    }

    /// Returns the stall source of the wait for the last load's value.
    pub fn value_wait(&self) -> StallSource {
        StallSource { served: self.value_from, queue: 0, joined: false }
    }

    /// Counts `ticks` of waiting with the issue slot kept.
    pub fn count_stall(counters: &mut TaskCounters, ticks: u64, wait: StallSource) {
        let queued = ticks.min(wait.queue);
        counters.stalls.queue += queued;
        *stall_counter(&mut counters.stalls, wait.served) += ticks - queued;
        counters.ticks += ticks;
    }

    /// Sends a miss for which the context does not wait.
    #[inline(always)]
    pub fn send(&mut self, miss: OutstandingMiss) {
        if let (NONE, Some(instruction)) = (self.oldest, miss.instruction) {
            self.oldest = (miss.returns_at, instruction);
        }
        self.soonest = self.soonest.min(miss.returns_at);
        self.mshrs_in_use += usize::from(!miss.wait.joined);
        self.outstanding.push(miss);
    }

    /// The same as [`HwContext::send`], for a load that is older than others in flight.
    pub fn send_in_order(&mut self, miss: OutstandingMiss) {
        let Some(instruction) = miss.instruction else { return self.send(miss) };
        let is_younger = |other: &OutstandingMiss| other.instruction.is_some_and(|other| other > instruction);
        let index = self.outstanding.iter().position(is_younger).unwrap_or(self.outstanding.len());
        if instruction < self.oldest.1 {
            self.oldest = (miss.returns_at, instruction);
        }
        self.soonest = self.soonest.min(miss.returns_at);
        self.mshrs_in_use += usize::from(!miss.wait.joined);
        self.outstanding.insert(index, miss);
    }

    /// Does an outstanding miss of this context bring a line at this tick?
    #[inline]
    pub fn has_miss_for(&self, arrival: u64) -> bool {
        self.outstanding.iter().rev().any(|miss| miss.returns_at == arrival && !miss.wait.joined)
    }

    /// Returns the number of instructions that still fit into a window of this size, which the oldest load in flight
    /// keeps from advancing.
    #[inline(always)]
    pub fn remaining_window(&mut self, window: u64, now: u64) -> u64 {
        if self.oldest.0 <= now {
            let loads = self.outstanding.iter().filter(|miss| miss.returns_at > now);
            self.oldest = loads.filter_map(|miss| Some((miss.returns_at, miss.instruction?))).next().unwrap_or(NONE);
        }
        let oldest = self.parked.first().map_or(self.oldest.1, |parked| parked.instruction.min(self.oldest.1));
        oldest.saturating_add(window).saturating_sub(self.issued)
    }

    /// Clears the state, because the thread has left the context, and its misses with it.
    pub fn forget(&mut self) {
        self.outstanding.clear();
        self.mshrs_in_use = 0;
        self.parked.clear();
        self.next_parked = u64::MAX;
        self.soonest = u64::MAX;
        self.oldest = NONE;
    }

    /// Drops misses that have returned.
    pub fn retire(&mut self, now: u64) {
        if self.soonest > now {
            return;
        }
        let (mut soonest, mut mshrs) = (u64::MAX, 0);
        self.outstanding.retain(|miss| {
            let stays = miss.returns_at > now;
            mshrs += usize::from(stays && !miss.wait.joined);
            soonest = soonest.min(if stays { miss.returns_at } else { u64::MAX });
            stays
        });
        (self.soonest, self.mshrs_in_use) = (soonest, mshrs);
    }
}

fn stall_counter(stalls: &mut Stalls, served: DataOrigin) -> &mut u64 {
    match served {
        DataOrigin::Hit(level) => &mut stalls.hit[level as usize],
        DataOrigin::RemoteCache => &mut stalls.remote_cache,
        DataOrigin::LocalMemory => &mut stalls.local_memory,
        DataOrigin::RemoteMemory => &mut stalls.remote_memory,
    }
}
