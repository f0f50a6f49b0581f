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
use super::context::{DeferredAccess, HwContext, OutstandingMiss, StallSource};
use super::front_end::{CoreEnvironment, CoreFrontEnd};
use super::thread::HwThread;

/// Largest number of accesses that a context defers; the size of a reservation station (Core microarchitecture: 32
/// entries).
const MAX_DEFERRED: usize = 32;

impl HwContext {
    /// Whether the access that depends on the last load can be deferred.
    fn can_defer(&self) -> bool {
        let is_l1_hit =
            self.value_tick < u64::MAX && self.value_origin == DataOrigin::Hit(CacheLevel::L1Data);
        !is_l1_hit && self.deferred_accesses.len() < MAX_DEFERRED
    }

    /// Defers the access that was just given an issue slot.
    fn defer(&mut self, access: Access) {
        let instruction = self.issued_count - 1;
        self.deferred_accesses.push(DeferredAccess {
            access,
            instruction,
            ready_at: self.value_tick,
            dependency_instruction: self.value_instruction,
        });
        self.next_deferred_tick = self.next_deferred_tick.min(self.value_tick);
        if access.kind() == AccessKind::Load {
            (self.value_tick, self.value_instruction) = (u64::MAX, instruction);
        }
    }

    fn update_next_deferred(&mut self) {
        self.next_deferred_tick = self
            .deferred_accesses
            .iter()
            .map(|parked| parked.ready_at)
            .min()
            .unwrap_or(u64::MAX);
    }

    /// Waits for the next deferred access, because nothing can proceed before it.
    fn wait_for_deferred(&mut self) -> Option<BurstOutcome> {
        (self.ready_at, self.stall_source) = (self.next_deferred_tick, Some(self.value_wait()));
        Some(BurstOutcome::Blocked)
    }

    fn first_due_index(&self, now: u64) -> Option<usize> {
        self.deferred_accesses
            .iter()
            .position(|parked| parked.ready_at <= now)
    }

    /// Informs the accesses that depend on an issued one of the tick at which its value arrives.
    fn wake_dependents(
        &mut self,
        issued_access: DeferredAccess,
        arrival: u64,
        is_late: bool,
        wait: StallSource,
    ) {
        let is_store = issued_access.access.kind() == AccessKind::Store;
        if is_late {
            self.add_outstanding_in_order(OutstandingMiss {
                returns_at: arrival,
                instruction: (!is_store).then_some(issued_access.instruction),
                stall_source: wait,
            });
        }

        if !is_store {
            let is_dependent = |access: &&mut DeferredAccess| {
                access.ready_at == u64::MAX
                    && access.dependency_instruction == issued_access.instruction
            };
            self.deferred_accesses
                .iter_mut()
                .filter(is_dependent)
                .for_each(|access| access.ready_at = arrival);
            if self.value_tick == u64::MAX && self.value_instruction == issued_access.instruction {
                (self.value_tick, self.value_origin) = (arrival, wait.origin);
            }
        }
        self.update_next_deferred();
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
        let context = &mut self.contexts[burst.run.context_index];
        if !self.can_overtake_loads {
            return wait_for_value(burst, thread, context);
        }
        if context.can_defer() {
            burst.issue_access(thread, context);
            context.defer(access);
            return None;
        }
        if context.value_tick < u64::MAX && context.next_deferred_tick >= context.value_tick {
            return wait_for_value(burst, thread, context);
        }
        if context.next_deferred_tick <= burst.tick {
            return self.issue_due_access(burst, thread, environment);
        }

        context.wait_for_deferred()
    }

    /// Issues the next deferred access, or waits for it; called until none is left, before the operating system is
    /// called.
    pub fn issue_all_deferred(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.context_index];
        if context.next_deferred_tick <= burst.tick {
            return self.issue_due_access(burst, thread, environment);
        }
        context.wait_for_deferred()
    }

    /// Issues the first deferred access that is due. Returns `Some` if the run ends.
    pub fn issue_due_access(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let (context_index, tick) = (burst.run.context_index, burst.tick);
        let due_index = self.contexts[context_index].first_due_index(tick)?;
        if burst.should_hold_access(&mut self.contexts[context_index]) {
            return Some(BurstOutcome::AheadOfCores);
        }

        let due_access = self.contexts[context_index].deferred_accesses[due_index];
        let page = due_access.access.address() >> environment.page_shift;
        let Some(frame) = thread.tlb.find(page) else {
            let is_store = due_access.access.kind() == AccessKind::Store;
            let context = &mut self.contexts[context_index];
            let cost = translate(thread, page, context, is_store, environment, self.l1d, tick);
            burst.unattributed.faults += cost;
            context.ready_at = tick + cost;
            return (cost > 0).then_some(BurstOutcome::Blocked);
        };
        let frame_address = frame << environment.page_shift;
        let physical_address =
            frame_address | due_access.access.address() & ((1 << environment.page_shift) - 1);
        let is_joined =
            self.can_join_miss(context_index, physical_address, tick, environment.caches);
        if !is_joined
            && self.contexts[context_index].mshrs_in_use >= burst.max_outstanding
            && let Some(first_return) = self.find_blocking_miss(context_index, tick)
        {
            let context = &mut self.contexts[context_index];
            context.deferred_accesses[due_index].ready_at = first_return.returns_at;
            context.update_next_deferred();
            return None;
        }

        burst.max_outstanding = self.max_outstanding(context_index);
        self.contexts[context_index]
            .deferred_accesses
            .remove(due_index);
        let hit_tick = tick + environment.caches.units[self.l1d].latency_ticks;
        let prior_counts = burst.has_probes.then_some(thread.counters.levels);
        let slow_access =
            self.access_caches(due_access.access, frame_address, burst, thread, environment);
        let wait = StallSource {
            origin: slow_access.response.origin,
            queue_ticks: slow_access.response.queue_ticks,
            is_joined,
        };
        self.contexts[context_index].wake_dependents(
            due_access,
            slow_access.response.ready_tick,
            slow_access.response.ready_tick > hit_tick,
            wait,
        );
        self.report_access(
            due_access.access,
            &slow_access,
            &prior_counts,
            false,
            burst,
            thread,
            environment,
        )
    }
}
