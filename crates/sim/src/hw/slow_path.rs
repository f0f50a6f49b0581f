//! Accesses that go beyond the first level or wait there, and their observation by probes.

use cachemate_core::{Access, AccessKind, WritePolicy};

use super::burst::{Burst, BurstOutcome};
use super::caches::{CacheRequest, CacheResponse, Caches};
use super::context::StallSource;
use super::core_kind::AnyCore;
use super::counters::{LEVEL_COUNT, LevelCounts};
use super::front_end::{CoreEnvironment, CoreFrontEnd};
use super::sampling::{ObservedMiss, SampleEffect};
use super::thread::HwThread;

/// The result of an access that left the fast path.
pub(crate) struct SlowAccess {
    request: CacheRequest,
    pub response: CacheResponse,
}

/// A task's counters before an access, if probes observe the access.
pub(super) type PriorCounts = Option<[LevelCounts; LEVEL_COUNT]>;

impl CoreFrontEnd {
    /// Handles an access that goes beyond the L1, or waits there.
    #[inline(never)]
    pub fn access_beyond_l1(
        &mut self,
        access: Access,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context_index = burst.run.context_index;
        self.contexts[context_index].ready_at = burst.tick;
        let physical_address =
            burst.frame_address | access.address() & ((1 << environment.page_shift) - 1);
        let is_joined = self.can_join_miss(
            context_index,
            physical_address,
            burst.tick,
            environment.caches,
        );
        if !is_joined
            && self.contexts[context_index].mshrs_in_use >= burst.max_outstanding
            && let Some(first_return) = self.find_blocking_miss(context_index, burst.tick)
        {
            if burst.wait_in_place(
                burst.tick,
                first_return.returns_at,
                first_return.stall_source,
                thread,
            ) {
                burst.tick = first_return.returns_at;
                return None;
            }
            let context = &mut self.contexts[context_index];
            (context.ready_at, context.stall_source) =
                (first_return.returns_at, Some(first_return.stall_source));
            return Some(BurstOutcome::Blocked);
        }
        burst.max_outstanding = self.max_outstanding(context_index);
        let hit_tick = burst.tick + environment.caches.units[self.l1d].latency_ticks;
        let prior_counts = burst.has_probes.then_some(thread.counters.levels);
        let slow_access =
            self.access_caches(access, burst.frame_address, burst, thread, environment);
        let context = &mut self.contexts[context_index];
        burst.issue_access(thread, context);
        let wait = StallSource {
            origin: slow_access.response.origin,
            queue_ticks: slow_access.response.queue_ticks,
            is_joined,
        };
        let is_posted = access.kind() == AccessKind::Store && !self.stores_block;
        let is_blocked = context.complete_access(
            slow_access.response.ready_tick,
            wait,
            hit_tick,
            burst.tick,
            is_posted,
            self.is_in_order,
        );
        self.report_access(
            access,
            &slow_access,
            &prior_counts,
            is_blocked,
            burst,
            thread,
            environment,
        )
    }

    /// Accesses to a line that an outstanding miss of the context brings wait in the register of
    /// that miss, as in Intel's line fill buffers (Optimization Reference Manual). In an in-order
    /// core, each store needs its own entry.
    pub(super) fn can_join_miss(
        &self,
        context_index: usize,
        physical_address: u64,
        tick: u64,
        caches: &Caches,
    ) -> bool {
        let unit = &caches.units[self.l1d];
        let line = physical_address >> unit.line_shift;
        let Some((arrival, _)) = unit
            .pending_fills
            .pending_fill(line)
            .filter(|_| !self.is_in_order)
        else {
            return false;
        };
        arrival > tick + unit.latency_ticks
            && unit.store.find(line).is_some()
            && self.contexts[context_index].has_miss_for(arrival)
    }

    /// Sends the access to the L1 and beyond, at the burst's tick. `frame_address` is the first address of its frame.
    pub(super) fn access_caches(
        &mut self,
        access: Access,
        frame_address: u64,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> SlowAccess {
        let request = self.build_request(
            frame_address | access.address() & ((1 << environment.page_shift) - 1),
            burst.tick,
            access.kind() == AccessKind::Store,
            thread,
        );
        let unit = &environment.caches.units[self.l1d];
        if burst.is_watched {
            let line = request.address >> unit.line_shift;
            let (set, set_count) = (unit.store.set_of(line), unit.store.total_sets());
            thread.probes.observe_access(
                access.address() >> unit.line_shift,
                burst.tick,
                set,
                set_count,
                environment.sampling,
            );
        }
        let tag_index = unit.store.find(request.address >> unit.line_shift);
        let response = environment.caches.access_first_level::<AnyCore>(
            self.l1d,
            tag_index,
            &request,
            &mut thread.counters,
        );
        SlowAccess { request, response }
    }

    /// Reports the result of an access to the probes. Returns `Some` if the run ends.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn report_access(
        &mut self,
        access: Access,
        slow_access: &SlowAccess,
        prior_counts: &PriorCounts,
        mut is_blocked: bool,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        if let Some(prior_counts) = prior_counts {
            thread.probes.observe_path(
                self.l1d,
                slow_access.request.address,
                prior_counts,
                &thread.counters.levels,
                environment.caches,
            );
            let has_missed = thread.counters.levels[1].all_misses() > prior_counts[1].all_misses();
            if has_missed || environment.caches.first_level_prefetches > 0 {
                let effect = self.report_miss(
                    access,
                    &slow_access.request,
                    &slow_access.response,
                    has_missed,
                    burst,
                    thread,
                    environment,
                );
                is_blocked |= effect.ticks > 0;
                if effect.is_full {
                    return Some(BurstOutcome::Interrupt);
                }
            }
        }
        is_blocked.then_some(BurstOutcome::Blocked)
    }

    /// Reports a miss of the L1 to the probes, or the prefetches into the L1 that a first hit caused.
    #[cold]
    #[allow(clippy::too_many_arguments)]
    fn report_miss(
        &mut self,
        access: Access,
        request: &CacheRequest,
        response: &CacheResponse,
        has_missed: bool,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> SampleEffect {
        let context = &mut self.contexts[burst.run.context_index];
        let prefetch_count = environment.caches.first_level_prefetches;
        let miss = ObservedMiss {
            virtual_address: access.address(),
            physical_address: environment.caches.dram.physical_address(request.address),
            line_shift: environment.caches.units[self.l1d].line_shift,
            tick: request.tick,
            latency_ticks: response.ready_tick - request.tick,
            origin: response.origin,
            instruction: context.issued_count,
            is_traced: access.kind() != AccessKind::Store
                || environment.caches.units[self.l1d].write_policy == WritePolicy::Back,
            is_dependent: access.is_dependent(),
            l1_prefetches: prefetch_count,
        };

        let effect = if has_missed {
            thread
                .probes
                .observe_miss(&miss, thread.task, environment.sampling)
        } else {
            thread
                .probes
                .observe_prefetches(prefetch_count, environment.sampling)
        };
        thread.probes.cost_ticks += effect.ticks;
        burst.unattributed.interrupts += effect.ticks;
        context.ready_at += effect.ticks;
        effect
    }
}
