//! The fast path through a run: the loop through which nearly all accesses pass, and the step
//! beyond the L1.
//!
//! An L1 hit takes a handful of host instructions, whereas the bookkeeping around it takes many
//! times as many. So there is one loop per kind of core (`core_kind`), whose state stays in
//! registers from the first access of a run to the last. `run_plain_hits` compares every access
//! with one bound for time, window and code; `handle_non_plain_access` handles a single access that
//! is not a plain hit, and leaves accesses that wait for others or that probes observe to the slow
//! path (`burst`).
//!
//! For example, a context may issue until tick 8,000, its window has room for 60 instructions, and
//! its next fetch of code is 40 instructions ahead. The bound is the nearest of the three, and each
//! of the hits before it costs one comparison.
//!
//! The bound may be outdated, because a load has returned; the slow path checks it again at the
//! same tick.

use cachemate_core::{Access, AccessKind, CacheLevel, WritePolicy};

use super::burst::{Burst, SlowPathCause, try_fetch_present_line};
use super::cache_unit::{CacheUnit, DataOrigin};
use super::context::{OutstandingMiss, StallSource};
use super::core_kind::{ANY_SHAPE, CoreKind, SPECIALIZED_PAGE_SHIFT};
use super::front_end::{CoreEnvironment, CoreFrontEnd};
use super::store::{LineMeta, PENDING, SHARED, SLOW_PATH_BITS};
use super::thread::HwThread;

/// Value of `last_load_tick` if the last load was not a plain hit, or if there was none.
const NO_TICK: u64 = u64::MAX;

/// The state of a run on the fast path, in registers.
struct FastPathState {
    tick: u64,
    position: usize,
    /// Tick at which the instructions of the fetched line are used up.
    code_end: u64,
    /// Tick at which the first instruction of the current record was issued.
    record_start: u64,
    page: u64,
    frame_address: u64,
    /// Tick up to which time and window allow instructions to issue.
    stop_tick: u64,
    /// Tick of the last load if it was a plain hit; `NO_TICK` otherwise.
    last_load_tick: u64,
    /// Tick up to which the context has counted its instructions.
    counted_until: u64,
    /// Number of accesses that were not L1 hits.
    slow_accesses: u64,
}

/// An access that is not a plain hit: its line, and the line's position in the L1.
struct NonPlainAccess {
    access: Access,
    line: u64,
    tag_index: Option<usize>,
}

/// The outcome of an access that is not a plain hit.
enum NonPlainOutcome {
    /// The access must be tried again: it has become a plain hit, or the wait for a register has ended.
    Retry,
    /// The access is issued: the tick at which its data is present, and the source.
    Issued(u64, StallSource),
    /// The fast path ends before the access.
    FastPathEnd(SlowPathCause),
}

impl CoreFrontEnd {
    /// Continues while accesses need only time, window, L1 hits, present code and (when it is the core's turn) the
    /// caches behind. On return, all instructions before the current access have been issued.
    #[inline(always)]
    pub fn run_fast_path<K: CoreKind>(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> SlowPathCause {
        #[cfg(test)]
        if environment.caches.skips_fast_path {
            return self.step(burst, thread, environment);
        }
        let (context_index, is_in_order) = (
            burst.run.context_index,
            K::IS_IN_ORDER.unwrap_or(self.is_in_order),
        );
        let mut cursor = FastPathState {
            tick: burst.tick,
            position: thread.position,
            code_end: burst.tick.saturating_add(thread.instructions_until_fetch),
            record_start: burst.tick.wrapping_sub(burst.issued_in_record),
            page: burst.page,
            frame_address: burst.frame_address,
            stop_tick: burst.find_issue_limit(
                is_in_order,
                burst.tick,
                &mut self.contexts[context_index],
            ),
            last_load_tick: NO_TICK,
            counted_until: burst.tick,
            slow_accesses: 0,
        };
        let mut is_resumed = std::mem::take(&mut burst.was_held);
        let cause = loop {
            let non_plain_access = if is_resumed {
                is_resumed = false;
                self.resumed_access::<K>(&cursor, thread, environment)
            } else {
                match self.run_plain_hits::<K>(&mut cursor, burst, thread, environment) {
                    Ok(slow) => slow,
                    Err(event) => break event,
                }
            };
            let is_store = non_plain_access.access.is_store();
            let hit_tick = cursor.tick + environment.caches.units[self.l1d].latency_ticks;
            let (arrival, wait) = match self.handle_non_plain_access::<K>(
                &non_plain_access,
                hit_tick,
                &mut cursor,
                burst,
                thread,
                environment,
            ) {
                NonPlainOutcome::Retry => continue,
                NonPlainOutcome::Issued(arrival, wait) => (arrival, wait),
                NonPlainOutcome::FastPathEnd(event) => break event,
            };
            cursor.position += 1;
            cursor.tick += 1;
            cursor.record_start = cursor.tick;
            let is_posted = is_store && !self.stores_block;
            let context = &mut self.contexts[context_index];
            context.issued_count += cursor.tick - cursor.counted_until;
            cursor.counted_until = cursor.tick;
            cursor.last_load_tick = if is_store {
                cursor.last_load_tick
            } else {
                NO_TICK
            };
            if context.complete_access(arrival, wait, hit_tick, cursor.tick, is_posted, is_in_order)
            {
                break SlowPathCause::PendingValue;
            }
            if !is_in_order {
                cursor.stop_tick = burst.find_issue_limit(false, cursor.tick, context);
            }
        };
        self.leave_fast_path(cursor, burst, thread, environment);
        cause
    }

    /// Stores a run's state where the slow path reads it.
    #[inline(always)]
    fn leave_fast_path(
        &mut self,
        cursor: FastPathState,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &CoreEnvironment<'_>,
    ) {
        let FastPathState {
            tick,
            position,
            code_end,
            ..
        } = cursor;
        burst.hits += (position - thread.position) as u64 - cursor.slow_accesses;
        thread.position = position;
        thread.instructions_until_fetch = if code_end == u64::MAX {
            u64::MAX
        } else {
            code_end - tick
        };

        let context = &mut self.contexts[burst.run.context_index];
        context.issued_count += tick - cursor.counted_until;
        if cursor.last_load_tick != NO_TICK {
            let latency = environment.caches.units[self.l1d].latency_ticks;
            (context.value_tick, context.value_origin) = (
                cursor.last_load_tick + latency,
                DataOrigin::Hit(CacheLevel::L1Data),
            );
        }
        (burst.page, burst.frame_address, burst.stop_tick) =
            (cursor.page, cursor.frame_address, cursor.stop_tick);
        (burst.tick, burst.issued_in_record) = (tick, tick.wrapping_sub(cursor.record_start));
    }

    /// The access that was held. Its line may have been taken away in the meantime.
    #[inline(always)]
    fn resumed_access<K: CoreKind>(
        &self,
        cursor: &FastPathState,
        thread: &HwThread,
        environment: &CoreEnvironment<'_>,
    ) -> NonPlainAccess {
        let page_shift = if K::DATA_SHAPE == ANY_SHAPE {
            environment.page_shift
        } else {
            SPECIALIZED_PAGE_SHIFT
        };

        let data = &environment.caches.units[self.l1d];
        let access = thread.batch[cursor.position];
        let line =
            (cursor.frame_address | access.address() & ((1 << page_shift) - 1)) >> data.line_shift;
        NonPlainAccess {
            access,
            line,
            tag_index: data.store.find(line),
        }
    }

    /// Handles plain hits of data and code, up to the first access of another kind.
    #[inline(always)]
    fn run_plain_hits<K: CoreKind>(
        &mut self,
        cursor: &mut FastPathState,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Result<NonPlainAccess, SlowPathCause> {
        let page_shift = if K::DATA_SHAPE == ANY_SHAPE {
            environment.page_shift
        } else {
            SPECIALIZED_PAGE_SHIFT
        };

        loop {
            let issue_bound = cursor.stop_tick.min(cursor.code_end);
            let data = &mut environment.caches.units[self.l1d];
            let writes_through =
                K::WRITE_POLICY.unwrap_or(data.write_policy) == WritePolicy::Through;
            let context = &self.contexts[burst.run.context_index];
            let (cause, tick) = loop {
                let Some(&access) = thread.batch.get(cursor.position) else {
                    break (
                        SlowPathCause::BatchEnd,
                        cursor.tick.max(cursor.record_start),
                    );
                };
                if !access.is_data() {
                    let is_jump = access.kind() == AccessKind::Jump;
                    let event = if is_jump {
                        SlowPathCause::Jump
                    } else {
                        SlowPathCause::Compute
                    };
                    break (event, cursor.tick.max(cursor.record_start));
                }
                let issue_tick = cursor.record_start.wrapping_add(u64::from(access.gap()));
                if issue_tick >= issue_bound {
                    break (SlowPathCause::Budget, issue_bound);
                }
                if access.is_dependent() {
                    let has_hit = cursor.last_load_tick != NO_TICK;
                    let value_tick = if has_hit {
                        cursor.last_load_tick + data.latency_ticks
                    } else {
                        context.value_tick
                    };
                    if value_tick > issue_tick {
                        break (SlowPathCause::PendingAddress, issue_tick);
                    }
                }
                // The next page cannot be predicted, so both entries are looked up.
                let (address, store) = (access.address(), access.is_store());
                let page = address >> page_shift;
                let (is_mapped, frame) = thread.tlb.probe_entry(page);
                if page != cursor.page && !is_mapped {
                    break (SlowPathCause::TranslationMiss, issue_tick);
                }
                cursor.frame_address = if page == cursor.page {
                    cursor.frame_address
                } else {
                    frame << page_shift
                };
                cursor.page = page;
                let line =
                    (cursor.frame_address | address & ((1 << page_shift) - 1)) >> data.line_shift;
                if let Err(tag_index) =
                    data.store
                        .record_hit(line, store, writes_through, K::DATA_SHAPE)
                {
                    let has_arrived =
                        |tag_index| data.try_arrived_hit(line, tag_index, store, issue_tick);
                    if K::IS_WATCHED
                        || store & writes_through
                        || !tag_index.is_some_and(has_arrived)
                    {
                        cursor.tick = issue_tick;
                        return Ok(NonPlainAccess {
                            access,
                            line,
                            tag_index,
                        });
                    }
                }
                cursor.last_load_tick = if store {
                    cursor.last_load_tick
                } else {
                    issue_tick
                };
                if K::IS_WATCHED {
                    let (set, set_count) = (data.store.set_of(line), data.store.total_sets());
                    thread.probes.observe_access(
                        address >> data.line_shift,
                        issue_tick,
                        set,
                        set_count,
                        environment.sampling,
                    );
                }
                cursor.record_start = issue_tick + 1;
                cursor.position += 1;
            };
            cursor.tick = tick;
            if cause != SlowPathCause::Budget || cursor.code_end > tick {
                return Err(cause);
            }
            let Some(l1i) = self.l1i else {
                return Err(SlowPathCause::Fetch);
            };
            let l1i_unit = &mut environment.caches.units[l1i];
            if !try_fetch_present_line(
                l1i_unit,
                thread,
                page_shift,
                tick,
                K::CODE_SHAPE,
                K::IS_WATCHED,
            ) {
                return Err(SlowPathCause::Fetch);
            }
            burst.fetches += 1;
            if K::IS_WATCHED {
                thread.report_code_line(l1i_unit.line_shift, tick, environment.sampling);
            }
            cursor.code_end = tick + thread.instructions_until_fetch;
        }
    }

    #[inline(always)]
    fn handle_non_plain_access<K: CoreKind>(
        &mut self,
        non_plain_access: &NonPlainAccess,
        hit_tick: u64,
        cursor: &mut FastPathState,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> NonPlainOutcome {
        let (context_index, is_in_order) = (
            burst.run.context_index,
            K::IS_IN_ORDER.unwrap_or(self.is_in_order),
        );
        let page_shift = if K::DATA_SHAPE == ANY_SHAPE {
            environment.page_shift
        } else {
            SPECIALIZED_PAGE_SHIFT
        };
        let (tag_index, store) = (
            non_plain_access.tag_index,
            non_plain_access.access.is_store(),
        );
        let data = &mut environment.caches.units[self.l1d];
        let writes_through = K::WRITE_POLICY.unwrap_or(data.write_policy) == WritePolicy::Through;
        if let Some(tag_index) = tag_index
            && !K::IS_WATCHED
        {
            let meta = data.store.line_meta(tag_index);
            let needs_other_caches = store & (writes_through | (meta.state() == SHARED));
            if !needs_other_caches & (meta.0 & SLOW_PATH_BITS == PENDING) {
                let Some((arrival, served)) = data
                    .pending_fills
                    .pending_fill(non_plain_access.line)
                    .filter(|&(arrival, _)| arrival > hit_tick)
                else {
                    data.store.set_meta(tag_index, LineMeta(meta.0 & !PENDING));
                    return NonPlainOutcome::Retry;
                };
                // The access needs a miss register unless an earlier miss of the context brings its line.
                let is_joined = !is_in_order && self.contexts[context_index].has_miss_for(arrival);
                if !is_joined && self.contexts[context_index].mshrs_in_use >= burst.max_outstanding
                {
                    return NonPlainOutcome::FastPathEnd(SlowPathCause::Memory);
                }
                data.store.touch(non_plain_access.line, tag_index);
                data.store.set_meta(tag_index, meta.after_hit(store));
                return NonPlainOutcome::Issued(
                    arrival,
                    StallSource {
                        origin: served,
                        queue_ticks: 0,
                        is_joined,
                    },
                );
            }
        }
        let address =
            cursor.frame_address | non_plain_access.access.address() & ((1 << page_shift) - 1);
        if cursor.tick > burst.run.shared_bound
            && !(self.is_next_level_private
                && environment
                    .caches
                    .can_next_level_serve(self.l1d, tag_index, address, store))
        {
            if self.uses_host_hints {
                environment.caches.prefetch_host_path(self.l1d, address);
            }
            burst.was_held = true;
            return NonPlainOutcome::FastPathEnd(SlowPathCause::ObservableAccess);
        }
        // Probes observe accesses beyond the L1, which only the slow path handles.
        if burst.has_probes {
            return NonPlainOutcome::FastPathEnd(SlowPathCause::Memory);
        }
        let mut is_joined = false;
        if self.contexts[context_index].mshrs_in_use >= burst.max_outstanding {
            is_joined = !is_in_order
                && tag_index.is_some()
                && self.can_join_miss(context_index, address, cursor.tick, environment.caches);
            if !is_joined && let Some(first) = self.find_blocking_miss(context_index, cursor.tick) {
                return self.wait_for_register(&first, is_in_order, cursor, burst, thread);
            }
            burst.max_outstanding = self.max_outstanding(context_index);
        }
        let request = self.build_request(address, cursor.tick, store, thread);
        let response = environment.caches.access_first_level::<K>(
            self.l1d,
            tag_index,
            &request,
            &mut thread.counters,
        );
        cursor.slow_accesses += 1;
        let wait = StallSource {
            origin: response.origin,
            queue_ticks: response.queue_ticks,
            is_joined,
        };
        NonPlainOutcome::Issued(response.ready_tick, wait)
    }

    /// Waits for the return of the miss whose register (or entry of the store buffer) the access needs: in place, if no
    /// other context could use the time.
    #[inline(always)]
    fn wait_for_register(
        &mut self,
        first_return: &OutstandingMiss,
        is_in_order: bool,
        cursor: &mut FastPathState,
        burst: &mut Burst,
        thread: &mut HwThread,
    ) -> NonPlainOutcome {
        let context = &mut self.contexts[burst.run.context_index];
        if !burst.wait_in_place(
            cursor.tick,
            first_return.returns_at,
            first_return.stall_source,
            thread,
        ) {
            (context.ready_at, context.stall_source) =
                (first_return.returns_at, Some(first_return.stall_source));
            return NonPlainOutcome::FastPathEnd(SlowPathCause::PendingValue);
        }

        let waited_ticks = first_return.returns_at - cursor.tick;
        context.issued_count += cursor.tick - cursor.counted_until;
        (cursor.tick, cursor.counted_until, cursor.record_start) = (
            first_return.returns_at,
            first_return.returns_at,
            cursor.record_start.wrapping_add(waited_ticks),
        );
        cursor.code_end = if cursor.code_end == u64::MAX {
            u64::MAX
        } else {
            cursor.code_end + waited_ticks
        };
        cursor.stop_tick = burst.find_issue_limit(is_in_order, cursor.tick, context);
        NonPlainOutcome::Retry
    }
}

impl CacheUnit {
    /// Handles the access as a plain hit if the data of its line has arrived. Returns whether it did; otherwise,
    /// nothing has changed.
    #[inline(never)]
    fn try_arrived_hit(&mut self, line: u64, tag_index: usize, is_store: bool, tick: u64) -> bool {
        let meta = self.store.line_meta(tag_index);
        let filled_meta = LineMeta(meta.0 & !PENDING);
        if filled_meta.needs_slow_path(is_store, self.write_policy == WritePolicy::Through)
            || !self
                .pending_fills
                .has_arrived(line, tick + self.latency_ticks)
        {
            return false;
        }
        self.store
            .set_meta(tag_index, filled_meta.after_hit(is_store));
        self.store.touch(line, tag_index);
        true
    }
}
