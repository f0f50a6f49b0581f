//! Accesses deferred until a load returns its value, while independent accesses proceed (out of order).
//!
//! Problem: an access whose address is the value of a load cannot be issued before that value is there; the independent
//! misses behind it can, and overlap with both.
//!
//! Method: the access is put aside with the tick at which its value will be there, or behind another one put aside. It
//! is issued at that tick, in order of time like everything that others see. Until then it holds its place in the
//! window. Waits for a first-level hit are too short for that, and are waited for in place.

use cachemate_core::{Access, AccessKind, CacheLevel};

use super::burst::{Burst, BurstOutcome, translate, wait_for_value};
use super::cache_unit::DataOrigin;
use super::context::{HwContext, OutstandingMiss, StallSource};
use super::pipeline::{CoreEnvironment, CoreFrontEnd};
use super::thread::HwThread;

/// Accesses that a context puts aside at most; a reservation station's size (Core microarchitecture: 32 entries).
const MAX_PARKED: usize = 32;

#[derive(Clone, Copy)]
pub(crate) struct DeferredAccess {
    access: Access,
    pub instruction: u64,
    /// Tick at which its address is known; `u64::MAX` = behind another one.
    ready: u64,
    /// That one's instruction.
    behind: u64,
}

impl HwContext {
    /// Can the access that depends on the last load be put aside?
    fn can_park(&self) -> bool {
        let near = self.value_at < u64::MAX && self.value_from == DataOrigin::Hit(CacheLevel::L1Data);
        !near && self.parked.len() < MAX_PARKED
    }

    /// Puts the access that was just given an issue slot aside.
    fn park(&mut self, access: Access) {
        let instruction = self.issued - 1;
        self.parked.push(DeferredAccess { access, instruction, ready: self.value_at, behind: self.parked_value });
        self.next_parked = self.next_parked.min(self.value_at);
        if access.kind() == AccessKind::Load {
            (self.value_at, self.parked_value) = (u64::MAX, instruction);
        }
    }

    fn renew_next(&mut self) {
        self.next_parked = self.parked.iter().map(|parked| parked.ready).min().unwrap_or(u64::MAX);
    }

    /// Nothing can go on before the next that was put aside.
    fn wait_for_parked(&mut self) -> Option<BurstOutcome> {
        (self.ready, self.wait) = (self.next_parked, Some(self.value_wait()));
        Some(BurstOutcome::Blocked)
    }

    /// The first that is due.
    fn first_due(&self, t: u64) -> Option<usize> {
        self.parked.iter().position(|parked| parked.ready <= t)
    }

    /// Tells the accesses that depend on an issued one when its value arrives.
    fn wake_dependents(&mut self, parked: DeferredAccess, done: u64, late: bool, wait: StallSource) {
        let store = parked.access.kind() == AccessKind::Store;
        if late {
            self.send_in_order(OutstandingMiss { done, instruction: (!store).then_some(parked.instruction), wait });
        }
        if !store {
            let behind = |other: &&mut DeferredAccess| other.ready == u64::MAX && other.behind == parked.instruction;
            self.parked.iter_mut().filter(behind).for_each(|other| other.ready = done);
            if self.value_at == u64::MAX && self.parked_value == parked.instruction {
                (self.value_at, self.value_from) = (done, wait.served);
            }
        }
        self.renew_next();
    }
}

impl CoreFrontEnd {
    /// The value of a load is needed that is not there: the access is put aside, or waited for where that cannot be.
    pub fn defer_access<const WATCHED: bool>(
        &mut self,
        access: Access,
        burst: &mut Burst,
        thread: &mut HwThread,
        around: &mut CoreEnvironment<'_>,
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
        if context.next_parked <= burst.t {
            return self.unpark::<WATCHED>(burst, thread, around);
        }
        context.wait_for_parked()
    }

    /// Before the operating system is called all that was put aside is issued.
    pub fn drain<const WATCHED: bool>(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        around: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.nth];
        if context.next_parked <= burst.t {
            return self.unpark::<WATCHED>(burst, thread, around);
        }
        context.wait_for_parked()
    }

    /// Issues what was put aside and is due. `Some` = the run ends.
    pub fn unpark<const WATCHED: bool>(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        around: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let (nth, t) = (burst.run.nth, burst.t);
        let at = self.contexts[nth].first_due(t)?;
        if burst.must_wait(&mut self.contexts[nth]) {
            return Some(BurstOutcome::Held);
        }
        let parked = self.contexts[nth].parked[at];
        let page = parked.access.address() >> around.page_shift;
        let Some(frame) = thread.tlb.find(page) else {
            let store = parked.access.kind() == AccessKind::Store;
            let context = &mut self.contexts[nth];
            let cost = translate(thread, page, context, store, around, self.l1d, t);
            burst.spent.faults += cost;
            context.ready = t + cost;
            return (cost > 0).then_some(BurstOutcome::Blocked);
        };
        let frame = frame << around.page_shift;
        let physical = frame | parked.access.address() & ((1 << around.page_shift) - 1);
        let joined = self.can_join_miss(nth, physical, t, around.caches);
        if !joined
            && self.contexts[nth].mshrs_in_use >= burst.room
            && let Some(first) = self.first_blocking_miss(nth, t)
        {
            let context = &mut self.contexts[nth];
            context.parked[at].ready = first.done;
            context.renew_next();
            return None;
        }
        burst.room = self.free_mshrs(nth);
        self.contexts[nth].parked.remove(at);
        let nearest = t + around.caches.units[self.l1d].latency;
        let before = burst.probed.then_some(thread.counters.levels);
        let seen = self.access_caches::<WATCHED>(parked.access, frame, burst, thread, around);
        let wait = StallSource { served: seen.answer.served, queue: seen.answer.queue, joined };
        self.contexts[nth].wake_dependents(parked, seen.answer.ready_tick, seen.answer.ready_tick > nearest, wait);
        self.report_access(parked.access, &seen, &before, false, burst, thread, around)
    }
}
