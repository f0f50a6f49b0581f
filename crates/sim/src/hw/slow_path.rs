//! Accesses that go beyond the first level or wait there, and their observation by probes.

use cachemate_core::{Access, AccessKind, WritePolicy};

use super::burst::{Burst, BurstOutcome};
use super::caches::{CacheRequest, CacheResponse, Caches};
use super::context::StallSource;
use super::core_kind::AnyCore;
use super::counters::{LEVELS, LevelCounts};
use super::pipeline::{CoreEnvironment, CoreFrontEnd};
use super::sampling::{Miss, SampleEffect};
use super::thread::HwThread;

/// The result of an access that left the fast path.
pub(crate) struct SlowAccess {
    request: CacheRequest,
    pub response: CacheResponse,
}

/// A task's counters before an access, if probes observe the access.
pub(super) type PriorCounts = Option<[LevelCounts; LEVELS]>;

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
        let nth = burst.run.nth;
        self.contexts[nth].ready = burst.now;
        let physical = burst.frame | access.address() & ((1 << environment.page_shift) - 1);
        let joined = self.can_join_miss(nth, physical, burst.now, environment.caches);
        if !joined
            && self.contexts[nth].mshrs_in_use >= burst.room
            && let Some(first) = self.first_blocking_miss(nth, burst.now)
        {
            if burst.wait_in_place(burst.now, first.returns_at, first.wait, thread) {
                burst.now = first.returns_at;
                return None;
            }
            let context = &mut self.contexts[nth];
            (context.ready, context.wait) = (first.returns_at, Some(first.wait));
            return Some(BurstOutcome::Blocked);
        }
        burst.room = self.free_mshrs(nth);
        let nearest = burst.now + environment.caches.units[self.l1d].latency;
        let prior_counts = burst.probed.then_some(thread.counters.levels);
        let slow_access = self.access_caches(access, burst.frame, burst, thread, environment);
        let context = &mut self.contexts[nth];
        burst.skip_one(thread, context);
        let wait = StallSource { served: slow_access.response.served, queue: slow_access.response.queue, joined };
        let store = access.kind() == AccessKind::Store;
        let blocked =
            context.complete_access(slow_access.response.ready_tick, wait, nearest, burst.now, store, self.in_order);
        self.report_access(access, &slow_access, &prior_counts, blocked, burst, thread, environment)
    }

    /// Does an outstanding miss of the context already bring this line? Loads and stores to it wait in the register of
    /// that miss, as in the line fill buffers of Intel's cores (Optimization Reference Manual). A store buffer has an
    /// entry for each store.
    pub(super) fn can_join_miss(&self, nth: usize, physical: u64, tick: u64, caches: &Caches) -> bool {
        let unit = &caches.units[self.l1d];
        let line = physical >> unit.line_shift;
        let Some((done, _)) = unit.pending.pending_fill(line).filter(|_| !self.in_order) else { return false };
        done > tick + unit.latency && unit.store.find(line).is_some() && self.contexts[nth].has_miss_for(done)
    }

    /// Sends the access to the L1 and beyond, at the burst's tick. `frame` is the address of its frame.
    pub(super) fn access_caches(
        &mut self,
        access: Access,
        frame: u64,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> SlowAccess {
        let request = self.build_request(
            frame | access.address() & ((1 << environment.page_shift) - 1),
            burst.now,
            access.kind() == AccessKind::Store,
            thread,
        );
        let unit = &environment.caches.units[self.l1d];
        if burst.watched {
            let line = request.address >> unit.line_shift;
            let (set, sets) = (unit.store.set_of(line), unit.store.all_sets());
            thread.probes.observe_access(
                access.address() >> unit.line_shift,
                burst.now,
                set,
                sets,
                environment.sampling,
            );
        }
        let place = unit.store.find(request.address >> unit.line_shift);
        let response = environment.caches.first_level::<AnyCore>(self.l1d, place, &request, &mut thread.counters);
        SlowAccess { request, response }
    }

    /// Reports the result of an access to the probes. `Some` if the run ends.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn report_access(
        &mut self,
        access: Access,
        slow_access: &SlowAccess,
        prior_counts: &PriorCounts,
        mut blocked: bool,
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
            let missed = thread.counters.levels[1].all_misses() > prior_counts[1].all_misses();
            if missed || environment.caches.first_level_prefetches > 0 {
                let effect =
                    self.probe(access, &slow_access.request, &slow_access.response, missed, burst, thread, environment);
                blocked |= effect.ticks > 0;
                if effect.full {
                    return Some(BurstOutcome::Interrupt);
                }
            }
        }
        blocked.then_some(BurstOutcome::Blocked)
    }

    /// Reports a miss of the L1 to the probes, or the prefetches into the L1 that a first hit caused.
    #[cold]
    #[allow(clippy::too_many_arguments)]
    fn probe(
        &mut self,
        access: Access,
        request: &CacheRequest,
        response: &CacheResponse,
        missed: bool,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> SampleEffect {
        let context = &mut self.contexts[burst.run.nth];
        let prefetches = environment.caches.first_level_prefetches;
        let miss = Miss {
            virtual_address: access.address(),
            physical_address: environment.caches.dram.physical_address(request.address),
            line_shift: environment.caches.units[self.l1d].line_shift,
            tick: request.tick,
            latency: response.ready_tick - request.tick,
            served: response.served,
            instruction: context.issued,
            traced: access.kind() != AccessKind::Store || environment.caches.units[self.l1d].write == WritePolicy::Back,
            dependent: access.is_dependent(),
            prefetches,
        };
        let effect = if missed {
            thread.probes.observe_miss(&miss, thread.task, environment.sampling)
        } else {
            thread.probes.observe_prefetches(prefetches, environment.sampling)
        };
        thread.probes.cost_ticks += effect.ticks;
        burst.spent.interrupts += effect.ticks;
        context.ready += effect.ticks;
        effect
    }
}
