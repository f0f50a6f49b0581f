//! Accesses deferred until a load returns its value, while independent accesses proceed (out of order).
//!
//! Problem: an access whose address is the value of a load cannot be issued before that value arrives; the independent
//! misses that follow it can, and overlap with both.
//!
//! Method: the access is deferred until the tick at which its value arrives, or behind another deferred access. It is
//! issued at that tick, in order of time like every event that others can see. Until then it occupies its place in the
//! window. Waits for a first-level hit are too short for deferral; the context waits for them in place.

use cachemate_core::{Access, AccessKind, CacheLevel};

use super::burst::{Burst, BurstOutcome, translate, wait_for_value};
use super::cache_unit::DataOrigin;
use super::context::{HwContext, OutstandingMiss, StallSource};
use super::pipeline::{CoreEnvironment, CoreFrontEnd};
use super::thread::HwThread;

/// Largest number of accesses that a context defers; the size of a reservation station (Core microarchitecture: 32
/// entries).
const MAX_PARKED: usize = 32;

#[derive(Clone, Copy)]
pub(crate) struct DeferredAccess {
    access: Access,
    pub instruction: u64,
    /// Tick at which the address is known; `u64::MAX` if it depends on another deferred access.
    ready: u64,
    /// Instruction of the access on which this one depends.
    depends_on: u64,
}

impl HwContext {
    /// Can the access that depends on the last load be deferred?
    fn can_park(&self) -> bool {
        let is_l1_hit = self.value_at < u64::MAX && self.value_from == DataOrigin::Hit(CacheLevel::L1Data);
        !is_l1_hit && self.parked.len() < MAX_PARKED
    }

    /// Defers the access that was just given an issue slot.
    fn park(&mut self, access: Access) {
        let instruction = self.issued - 1;
        self.parked.push(DeferredAccess { access, instruction, ready: self.value_at, depends_on: self.parked_value });
        self.next_parked = self.next_parked.min(self.value_at);
        if access.kind() == AccessKind::Load {
            (self.value_at, self.parked_value) = (u64::MAX, instruction);
        }
    }

    fn renew_next(&mut self) {
        self.next_parked = self.parked.iter().map(|parked| parked.ready).min().unwrap_or(u64::MAX);
    }

    /// Waits for the next deferred access, because nothing can proceed before it.
    fn wait_for_parked(&mut self) -> Option<BurstOutcome> {
        (self.ready, self.wait) = (self.next_parked, Some(self.value_wait()));
        Some(BurstOutcome::Blocked)
    }

    /// Returns the first deferred access that is due.
    fn first_due(&self, now: u64) -> Option<usize> {
        self.parked.iter().position(|parked| parked.ready <= now)
    }

    /// Informs the accesses that depend on an issued one of the tick at which its value arrives.
    fn wake_dependents(&mut self, parked: DeferredAccess, arrival: u64, is_late: bool, wait: StallSource) {
        let store = parked.access.kind() == AccessKind::Store;
        if is_late {
            self.send_in_order(OutstandingMiss {
                returns_at: arrival,
                instruction: (!store).then_some(parked.instruction),
                wait,
            });
        }
        if !store {
            let is_dependent =
                |access: &&mut DeferredAccess| access.ready == u64::MAX && access.depends_on == parked.instruction;
            self.parked.iter_mut().filter(is_dependent).for_each(|access| access.ready = arrival);
            if self.value_at == u64::MAX && self.parked_value == parked.instruction {
                (self.value_at, self.value_from) = (arrival, wait.served);
            }
        }
        self.renew_next();
    }
}

impl CoreFrontEnd {
    /// Handles an access that needs the value of a pending load: defers it, or waits if it cannot be deferred.
    pub fn defer_access(
        &mut self,
        access: Access,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.nth];
        if !self.loads_pass {
            return wait_for_value(burst, thread, context);
        }
        if context.can_park() {
            burst.skip_one(thread, context);
            context.park(access);
            return None;
        }
        if context.value_at < u64::MAX && context.next_parked >= context.value_at {
            return wait_for_value(burst, thread, context);
        }
        if context.next_parked <= burst.now {
            return self.unpark(burst, thread, environment);
        }
        context.wait_for_parked()
    }

    /// Issues all deferred accesses before the operating system is called.
    pub fn drain(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.nth];
        if context.next_parked <= burst.now {
            return self.unpark(burst, thread, environment);
        }
        context.wait_for_parked()
    }

    /// Issues deferred accesses that are due. `Some` if the run ends.
    pub fn unpark(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let (nth, t) = (burst.run.nth, burst.now);
        let due = self.contexts[nth].first_due(t)?;
        if burst.must_wait(&mut self.contexts[nth]) {
            return Some(BurstOutcome::Held);
        }
        let parked = self.contexts[nth].parked[due];
        let page = parked.access.address() >> environment.page_shift;
        let Some(frame) = thread.tlb.find(page) else {
            let store = parked.access.kind() == AccessKind::Store;
            let context = &mut self.contexts[nth];
            let cost = translate(thread, page, context, store, environment, self.l1d, t);
            burst.spent.faults += cost;
            context.ready = t + cost;
            return (cost > 0).then_some(BurstOutcome::Blocked);
        };
        let frame = frame << environment.page_shift;
        let physical = frame | parked.access.address() & ((1 << environment.page_shift) - 1);
        let joined = self.can_join_miss(nth, physical, t, environment.caches);
        if !joined
            && self.contexts[nth].mshrs_in_use >= burst.room
            && let Some(first) = self.first_blocking_miss(nth, t)
        {
            let context = &mut self.contexts[nth];
            context.parked[due].ready = first.returns_at;
            context.renew_next();
            return None;
        }
        burst.room = self.free_mshrs(nth);
        self.contexts[nth].parked.remove(due);
        let nearest = t + environment.caches.units[self.l1d].latency;
        let prior_counts = burst.probed.then_some(thread.counters.levels);
        let slow_access = self.access_caches(parked.access, frame, burst, thread, environment);
        let wait = StallSource { served: slow_access.response.served, queue: slow_access.response.queue, joined };
        self.contexts[nth].wake_dependents(
            parked,
            slow_access.response.ready_tick,
            slow_access.response.ready_tick > nearest,
            wait,
        );
        self.report_access(parked.access, &slow_access, &prior_counts, false, burst, thread, environment)
    }
}
