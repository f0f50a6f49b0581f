//! One hardware context: its thread, the events for which it waits, and the attribution of its ticks.

use cachemate_core::{Access, CpuId, TaskId};

use super::Charge;
use super::cache_unit::DataOrigin;
use super::counters::{CpuCounters, Stalls, TaskCounters};
use super::thread::HwThread;

/// The cause for which a context waits, and the part of the wait that is queueing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StallSource {
    pub origin: DataOrigin,
    pub queue_ticks: u64,
    /// Whether another miss of the context brings the line, so that no additional miss register is used.
    pub is_joined: bool,
}

/// A miss for which the context did not wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutstandingMiss {
    pub returns_at: u64,
    /// Instruction number; `None` for stores, which occupy no place in the window once issued.
    pub instruction: Option<u64>,
    pub stall_source: StallSource,
}

/// Ticks of one run of a context that were not spent on instructions.
#[derive(Clone, Copy, Default)]
pub(crate) struct UnattributedTicks {
    /// Ticks of waiting with the issue slot kept; they are already attributed.
    pub in_place: u64,
    /// Ticks of the operating system, charged at the end of the run.
    pub faults: u64,
    pub interrupts: u64,
}

/// An access that waits for the value of a load.
#[derive(Clone, Copy)]
pub(crate) struct DeferredAccess {
    pub access: Access,
    pub instruction: u64,
    /// Tick at which the address is known; `u64::MAX` if it depends on another deferred access.
    pub ready_at: u64,
    /// Instruction of the access on which this one depends.
    pub dependency_instruction: u64,
}

/// Value of `oldest_load` if no load is in flight.
const NO_LOAD: (u64, u64) = (u64::MAX, u64::MAX);

pub(crate) struct HwContext {
    pub cpu: CpuId,
    pub thread: Option<Box<HwThread>>,
    /// Tick from which the context could issue.
    pub ready_at: u64,
    /// Tick before which all ticks are attributed.
    pub accounted_until: u64,
    pub stall_source: Option<StallSource>,
    /// Outstanding misses, oldest first. Those that have returned stay until their places are needed.
    pub outstanding_misses: Vec<OutstandingMiss>,
    /// Number of miss registers (in order: entries of the store buffer) that they occupy.
    pub mshrs_in_use: usize,
    /// Tick at which the first outstanding miss returns; `u64::MAX` if there are none.
    pub first_return_tick: u64,
    /// The oldest load that may still be outstanding: the tick at which it returns, and its instruction; both
    /// `u64::MAX` if there is none.
    oldest_load: (u64, u64),
    /// Tick at which the value of the last load arrives (`u64::MAX` if that load is deferred), and its origin.
    pub value_tick: u64,
    pub value_origin: DataOrigin,
    /// Deferred accesses, by instruction, and the first tick at which one of them is due (`u64::MAX` if there are
    /// none).
    pub deferred_accesses: Vec<DeferredAccess>,
    pub next_deferred_tick: u64,
    /// Instruction of the deferred access whose value is that of the last load, if `value_tick` is `u64::MAX`.
    pub value_instruction: u64,
    /// Number of instructions issued on this context since the start.
    pub issued_count: u64,
    pub counters: CpuCounters,
}

impl HwContext {
    pub fn new(cpu: CpuId, l1d_origin: DataOrigin) -> Self {
        HwContext {
            cpu,
            thread: None,
            ready_at: 0,
            accounted_until: 0,
            stall_source: None,
            outstanding_misses: Vec::new(),
            mshrs_in_use: 0,
            first_return_tick: u64::MAX,
            oldest_load: NO_LOAD,
            value_tick: 0,
            value_origin: l1d_origin,
            deferred_accesses: Vec::new(),
            next_deferred_tick: u64::MAX,
            value_instruction: 0,
            issued_count: 0,
            counters: CpuCounters::default(),
        }
    }

    /// The tick from which its thread could issue; `u64::MAX` if there is no thread.
    #[inline(always)]
    pub fn ready_tick(&self) -> u64 {
        if self.thread.is_some() {
            self.ready_at
        } else {
            u64::MAX
        }
    }

    pub fn task(&self) -> Option<TaskId> {
        self.thread.as_ref().map(|thread| thread.task)
    }

    /// Attributes every tick before `until_tick`: first to the wait of the context, then to the issue slot that it did
    /// not get.
    pub fn attribute_ticks(&mut self, until_tick: u64) {
        let Some(thread) = &mut self.thread else {
            return;
        };
        if until_tick <= self.accounted_until {
            return;
        }

        let waited_ticks = self
            .ready_at
            .min(until_tick)
            .saturating_sub(self.accounted_until);
        if waited_ticks > 0 {
            match &mut self.stall_source {
                Some(wait) => {
                    let queued_ticks = waited_ticks.min(wait.queue_ticks);
                    wait.queue_ticks -= queued_ticks;
                    thread.counters.stalls.queue += queued_ticks;
                    *stall_counter_mut(&mut thread.counters.stalls, wait.origin) +=
                        waited_ticks - queued_ticks;
                }
                None => thread.counters.stalls.issue += waited_ticks,
            }
        }

        let ticks = until_tick - self.accounted_until;
        thread.counters.stalls.issue += ticks - waited_ticks;
        thread.counters.ticks += ticks;
        self.counters.loaded_ticks += ticks;
        self.accounted_until = until_tick;
        if self.ready_at <= until_tick {
            self.stall_source = None;
        }
    }

    /// Charges `ticks` of the operating system, starting now, and delays the thread's other work by as much.
    pub fn charge_ticks(&mut self, now: u64, ticks: u64, charge: Charge) {
        self.counters.charged_ticks[charge as usize] += ticks;
        self.attribute_ticks(now);
        if let Some(thread) = &mut self.thread {
            thread.counters.stalls.system += ticks;
            thread.counters.ticks += ticks;
            self.counters.loaded_ticks += ticks;
            self.accounted_until += ticks;
            self.ready_at += ticks;
        } else {
            self.ready_at = self.ready_at.max(now) + ticks;
        }
    }

    /// Attributes a run of `ticks` that ended at `now`: all ticks except `unattributed_ticks.in_place` were
    /// instructions. Faults and interrupts are charged in addition.
    pub fn attribute_run(
        &mut self,
        counters: &mut TaskCounters,
        ticks: u64,
        now: u64,
        unattributed_ticks: UnattributedTicks,
    ) {
        let instructions = ticks - unattributed_ticks.in_place;
        let system = unattributed_ticks.faults + unattributed_ticks.interrupts;
        counters.instructions += instructions;
        counters.ticks += instructions + system;
        counters.stalls.system += system;
        self.counters.instructions += instructions;
        self.counters.loaded_ticks += ticks + system;
        self.counters.charged_ticks[Charge::Fault as usize] += unattributed_ticks.faults;
        self.counters.charged_ticks[Charge::Interrupt as usize] += unattributed_ticks.interrupts;
        self.accounted_until = now + system;
        self.ready_at = self.ready_at.max(self.accounted_until);
    }

    /// What the wait for the last load's value is charged to.
    pub fn value_wait(&self) -> StallSource {
        StallSource {
            origin: self.value_origin,
            queue_ticks: 0,
            is_joined: false,
        }
    }

    /// Counts `ticks` of waiting with the issue slot kept.
    pub fn count_stall(counters: &mut TaskCounters, ticks: u64, wait: StallSource) {
        let queued_ticks = ticks.min(wait.queue_ticks);
        counters.stalls.queue += queued_ticks;
        *stall_counter_mut(&mut counters.stalls, wait.origin) += ticks - queued_ticks;
        counters.ticks += ticks;
    }

    /// Sends a miss for which the context does not wait.
    #[inline(always)]
    pub fn add_outstanding(&mut self, miss: OutstandingMiss) {
        if let (NO_LOAD, Some(instruction)) = (self.oldest_load, miss.instruction) {
            self.oldest_load = (miss.returns_at, instruction);
        }
        self.first_return_tick = self.first_return_tick.min(miss.returns_at);
        self.mshrs_in_use += usize::from(!miss.stall_source.is_joined);
        self.outstanding_misses.push(miss);
    }

    /// Does the same as [`HwContext::add_outstanding`], for a load that is older than others in flight.
    pub fn add_outstanding_in_order(&mut self, miss: OutstandingMiss) {
        let Some(instruction) = miss.instruction else {
            return self.add_outstanding(miss);
        };
        let is_younger_miss =
            |other: &OutstandingMiss| other.instruction.is_some_and(|other| other > instruction);
        let index = self
            .outstanding_misses
            .iter()
            .position(is_younger_miss)
            .unwrap_or(self.outstanding_misses.len());
        if instruction < self.oldest_load.1 {
            self.oldest_load = (miss.returns_at, instruction);
        }
        self.first_return_tick = self.first_return_tick.min(miss.returns_at);
        self.mshrs_in_use += usize::from(!miss.stall_source.is_joined);
        self.outstanding_misses.insert(index, miss);
    }

    /// Whether an outstanding miss of this context brings a line at this tick.
    #[inline]
    pub fn has_miss_for(&self, arrival: u64) -> bool {
        self.outstanding_misses
            .iter()
            .rev()
            .any(|miss| miss.returns_at == arrival && !miss.stall_source.is_joined)
    }

    /// Instructions that still fit into a window of this size, which the oldest load in flight
    /// keeps from advancing.
    #[inline(always)]
    pub fn update_remaining_window(&mut self, window: u64, now: u64) -> u64 {
        if self.oldest_load.0 <= now {
            let loads = self
                .outstanding_misses
                .iter()
                .filter(|miss| miss.returns_at > now);
            self.oldest_load = loads
                .filter_map(|miss| Some((miss.returns_at, miss.instruction?)))
                .next()
                .unwrap_or(NO_LOAD);
        }

        let oldest_instruction = self
            .deferred_accesses
            .first()
            .map_or(self.oldest_load.1, |parked| {
                parked.instruction.min(self.oldest_load.1)
            });
        oldest_instruction
            .saturating_add(window)
            .saturating_sub(self.issued_count)
    }

    /// Drops all misses and deferred accesses, because the thread has left the context.
    pub fn clear_in_flight(&mut self) {
        self.outstanding_misses.clear();
        self.mshrs_in_use = 0;
        self.deferred_accesses.clear();
        self.next_deferred_tick = u64::MAX;
        self.first_return_tick = u64::MAX;
        self.oldest_load = NO_LOAD;
    }

    /// Frees the MSHRs of misses that have returned by `now`.
    pub fn drop_returned_misses(&mut self, now: u64) {
        if self.first_return_tick > now {
            return;
        }
        let (mut first_return_tick, mut mshrs_in_use) = (u64::MAX, 0);
        self.outstanding_misses.retain(|miss| {
            let is_outstanding = miss.returns_at > now;
            mshrs_in_use += usize::from(is_outstanding && !miss.stall_source.is_joined);
            first_return_tick = first_return_tick.min(if is_outstanding {
                miss.returns_at
            } else {
                u64::MAX
            });
            is_outstanding
        });
        (self.first_return_tick, self.mshrs_in_use) = (first_return_tick, mshrs_in_use);
    }
}

fn stall_counter_mut(stalls: &mut Stalls, origin: DataOrigin) -> &mut u64 {
    match origin {
        DataOrigin::Hit(level) => &mut stalls.hit[level as usize],
        DataOrigin::RemoteCache => &mut stalls.remote_cache,
        DataOrigin::LocalMemory => &mut stalls.local_memory,
        DataOrigin::RemoteMemory => &mut stalls.remote_memory,
    }
}
