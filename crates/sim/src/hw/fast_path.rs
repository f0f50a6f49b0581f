//! The fast path through a run: the loop through which nearly all accesses pass, and the step beyond the L1.
//!
//! Problem: an L1 hit takes a handful of host instructions, whereas the bookkeeping around it takes many times as many.
//! Method: one loop per kind of core (`core_kind`), whose state stays in registers from the first access of a run to
//! the last. `run_plain_hits` compares every access with one bound for time, window and code; `handle_slow_hit` handles
//! a single access that is not a plain hit, and leaves accesses that wait for others or that probes observe to the slow
//! path (`burst`). Properties: the bound may be outdated (a load has returned): the slow path checks again, at the same
//! tick.

use cachemate_core::{Access, AccessKind, CacheLevel, WritePolicy};

use super::burst::{Burst, SlowPathCause};
use super::cache_unit::{CacheUnit, DataOrigin};
use super::context::{OutstandingMiss, StallSource};
use super::core_kind::{ANY, CoreKind, PLAIN_PAGE_SHIFT};
use super::pipeline::{CoreEnvironment, CoreFrontEnd};
use super::store::{LineMeta, PENDING, PREFETCHED, SHARED, SPECIAL};
use super::thread::HwThread;

/// Tick of a load that has not been issued yet.
const NEVER: u64 = u64::MAX;

/// The state of a run on the fast path, in registers.
struct FastCursor {
    now: u64,
    position: usize,
    /// The tick at which the present code is used up, and the one at which the current record would have begun.
    code_end: u64,
    began: u64,
    page: u64,
    frame: u64,
    /// Tick up to which time and window allow instructions to issue.
    stop: u64,
    /// Tick of the last load, if it hit.
    last_load: u64,
    /// Tick up to which the context has counted its instructions.
    counted: u64,
    /// Number of accesses that were not L1 hits.
    slow_accesses: u64,
}

/// An access that is not a plain hit: its line, and the line's position in the L1.
struct SlowHit {
    access: Access,
    line: u64,
    place: Option<usize>,
}

/// The outcome of an access that is not a plain hit.
enum BeyondOutcome {
    /// The access has become a plain hit, or is looked at again after a wait.
    Again,
    /// The access is issued: the tick at which its data is present, and the source.
    Issued(u64, StallSource),
    /// The fast path ends before the access.
    Leaves(SlowPathCause),
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
        if environment.caches.step_by_step {
            return self.step(burst, thread, environment);
        }
        let (nth, in_order) = (burst.run.nth, K::IN_ORDER.unwrap_or(self.in_order));
        let mut cursor = FastCursor {
            now: burst.now,
            position: thread.position,
            code_end: burst.now.saturating_add(thread.fetch_left),
            began: burst.now.wrapping_sub(burst.skip),
            page: burst.page,
            frame: burst.frame,
            stop: burst.issue_limit(in_order, burst.now, &mut self.contexts[nth]),
            last_load: NEVER,
            counted: burst.now,
            slow_accesses: 0,
        };
        let mut resumed = std::mem::take(&mut burst.was_early);
        let event = loop {
            let slow = if resumed {
                resumed = false;
                self.resumed_access::<K>(&cursor, thread, environment)
            } else {
                match self.run_plain_hits::<K>(&mut cursor, burst, thread, environment) {
                    Ok(slow) => slow,
                    Err(event) => break event,
                }
            };
            let store = slow.access.is_store();
            let nearest = cursor.now + environment.caches.units[self.l1d].latency;
            let (arrival, wait) =
                match self.handle_slow_hit::<K>(&slow, nearest, &mut cursor, burst, thread, environment) {
                    BeyondOutcome::Again => continue,
                    BeyondOutcome::Issued(arrival, wait) => (arrival, wait),
                    BeyondOutcome::Leaves(event) => break event,
                };
            cursor.position += 1;
            cursor.now += 1;
            cursor.began = cursor.now;
            let context = &mut self.contexts[nth];
            context.issued += cursor.now - cursor.counted;
            cursor.counted = cursor.now;
            cursor.last_load = if store { cursor.last_load } else { NEVER };
            if context.complete_access(arrival, wait, nearest, cursor.now, store, in_order) {
                break SlowPathCause::Waits;
            }
            if !in_order {
                cursor.stop = burst.issue_limit(false, cursor.now, context);
            }
        };
        self.leave_fast_path(cursor, burst, thread, environment);
        event
    }

    /// Stores a run's state where the slow path reads it.
    #[inline(always)]
    fn leave_fast_path(
        &mut self,
        cursor: FastCursor,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &CoreEnvironment<'_>,
    ) {
        let FastCursor { now: t, position, code_end, .. } = cursor;
        burst.hits += (position - thread.position) as u64 - cursor.slow_accesses;
        thread.position = position;
        thread.fetch_left = if code_end == u64::MAX { u64::MAX } else { code_end - t };
        let context = &mut self.contexts[burst.run.nth];
        context.issued += t - cursor.counted;
        if cursor.last_load != NEVER {
            let latency = environment.caches.units[self.l1d].latency;
            (context.value_at, context.value_from) = (cursor.last_load + latency, DataOrigin::Hit(CacheLevel::L1Data));
        }
        (burst.page, burst.frame, burst.stop) = (cursor.page, cursor.frame, cursor.stop);
        (burst.now, burst.skip) = (t, t.wrapping_sub(cursor.began));
    }

    /// Returns the access that was held. Its line may have been taken away in the meantime.
    #[inline(always)]
    fn resumed_access<K: CoreKind>(
        &self,
        cursor: &FastCursor,
        thread: &HwThread,
        environment: &CoreEnvironment<'_>,
    ) -> SlowHit {
        let page_shift = if K::DATA == ANY { environment.page_shift } else { PLAIN_PAGE_SHIFT };
        let data = &environment.caches.units[self.l1d];
        let access = thread.batch[cursor.position];
        let line = (cursor.frame | access.address() & ((1 << page_shift) - 1)) >> data.line_shift;
        SlowHit { access, line, place: data.store.find(line) }
    }

    /// Handles plain hits of data and code, up to the first access of another kind.
    #[inline(always)]
    fn run_plain_hits<K: CoreKind>(
        &mut self,
        cursor: &mut FastCursor,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Result<SlowHit, SlowPathCause> {
        let page_shift = if K::DATA == ANY { environment.page_shift } else { PLAIN_PAGE_SHIFT };
        loop {
            let bound = cursor.stop.min(cursor.code_end);
            let data = &mut environment.caches.units[self.l1d];
            let writes_through = K::WRITE.unwrap_or(data.write) == WritePolicy::Through;
            let context = &self.contexts[burst.run.nth];
            let (ended, at) = loop {
                let Some(&access) = thread.batch.get(cursor.position) else {
                    break (SlowPathCause::BatchEnd, cursor.now.max(cursor.began));
                };
                if !access.is_data() {
                    let jump = access.kind() == AccessKind::Jump;
                    let event = if jump { SlowPathCause::Jump } else { SlowPathCause::Compute };
                    break (event, cursor.now.max(cursor.began));
                }
                let issue = cursor.began.wrapping_add(u64::from(access.gap()));
                if issue >= bound {
                    break (SlowPathCause::Budget, bound);
                }
                if access.is_dependent() {
                    let hit = cursor.last_load != NEVER;
                    let value_at = if hit { cursor.last_load + data.latency } else { context.value_at };
                    if value_at > issue {
                        break (SlowPathCause::Depends, issue);
                    }
                }
                // The next page cannot be predicted, so both entries are looked up.
                let (address, store) = (access.address(), access.is_store());
                let page = address >> page_shift;
                let (is_mapped, frame) = thread.tlb.probe_entry(page);
                if page != cursor.page && !is_mapped {
                    break (SlowPathCause::Translate, issue);
                }
                cursor.frame = if page == cursor.page { cursor.frame } else { frame << page_shift };
                cursor.page = page;
                let line = (cursor.frame | address & ((1 << page_shift) - 1)) >> data.line_shift;
                if let Err(place) = data.store.record_hit(line, store, writes_through, K::DATA) {
                    let is_filled = |place| data.is_filled_line_hit(line, place, store, issue);
                    if K::WATCHED || store & writes_through || !place.is_some_and(is_filled) {
                        cursor.now = issue;
                        return Ok(SlowHit { access, line, place });
                    }
                }
                cursor.last_load = if store { cursor.last_load } else { issue };
                if K::WATCHED {
                    let (set, sets) = (data.store.set_of(line), data.store.all_sets());
                    thread.probes.observe_access(address >> data.line_shift, issue, set, sets, environment.sampling);
                }
                cursor.began = issue + 1;
                cursor.position += 1;
            };
            cursor.now = at;
            if ended != SlowPathCause::Budget || cursor.code_end > at {
                return Err(ended);
            }
            let Some(l1i) = self.l1i else { return Err(SlowPathCause::Fetch) };
            let code = &mut environment.caches.units[l1i];
            if !quick_fetch(code, thread, page_shift, at, K::CODE, K::WATCHED) {
                return Err(SlowPathCause::Fetch);
            }
            burst.fetches += 1;
            if K::WATCHED {
                thread.report_code_line(code.line_shift, at, environment.sampling);
            }
            cursor.code_end = at + thread.fetch_left;
        }
    }

    /// Handles an access that is not a plain hit, at its tick.
    #[inline(always)]
    fn handle_slow_hit<K: CoreKind>(
        &mut self,
        slow: &SlowHit,
        nearest: u64,
        cursor: &mut FastCursor,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> BeyondOutcome {
        let (nth, in_order) = (burst.run.nth, K::IN_ORDER.unwrap_or(self.in_order));
        let page_shift = if K::DATA == ANY { environment.page_shift } else { PLAIN_PAGE_SHIFT };
        let (place, store) = (slow.place, slow.access.is_store());
        let data = &mut environment.caches.units[self.l1d];
        let writes_through = K::WRITE.unwrap_or(data.write) == WritePolicy::Through;
        if let Some(place) = place
            && !K::WATCHED
        {
            let meta = data.store.line_meta(place);
            let asks_others = store & (writes_through | (meta.state() == SHARED));
            if !asks_others & (meta.0 & SPECIAL == PENDING) {
                let Some((arrival, served)) =
                    data.pending.pending_fill(slow.line).filter(|&(arrival, _)| arrival > nearest)
                else {
                    data.store.set_meta(place, LineMeta(meta.0 & !PENDING));
                    return BeyondOutcome::Again;
                };
                // The access needs a miss register unless an earlier miss of the context brings its line.
                let joined = !in_order && self.contexts[nth].has_miss_for(arrival);
                if !joined && self.contexts[nth].mshrs_in_use >= burst.room {
                    return BeyondOutcome::Leaves(SlowPathCause::Memory);
                }
                data.store.touch(slow.line, place);
                data.store.set_meta(place, meta.as_store(store));
                return BeyondOutcome::Issued(arrival, StallSource { served, queue: 0, joined });
            }
        }
        let address = cursor.frame | slow.access.address() & ((1 << page_shift) - 1);
        if cursor.now > burst.run.shared
            && !(self.owns_next && environment.caches.is_own(self.l1d, place, address, store))
        {
            if self.hints {
                environment.caches.prefetch_host_path(self.l1d, address);
            }
            burst.was_early = true;
            return BeyondOutcome::Leaves(SlowPathCause::Early);
        }
        // Probes observe accesses beyond the L1, which only the slow path handles.
        if burst.probed {
            return BeyondOutcome::Leaves(SlowPathCause::Memory);
        }
        let mut joined = false;
        if self.contexts[nth].mshrs_in_use >= burst.room {
            joined = !in_order && place.is_some() && self.can_join_miss(nth, address, cursor.now, environment.caches);
            if !joined && let Some(first) = self.first_blocking_miss(nth, cursor.now) {
                return self.wait_for_register(&first, in_order, cursor, burst, thread);
            }
            burst.room = self.free_mshrs(nth);
        }
        let request = self.build_request(address, cursor.now, store, thread);
        let response = environment.caches.first_level::<K>(self.l1d, place, &request, &mut thread.counters);
        cursor.slow_accesses += 1;
        let wait = StallSource { served: response.served, queue: response.queue, joined };
        BeyondOutcome::Issued(response.ready_tick, wait)
    }

    /// Waits for the return of the miss whose register (or entry of the store buffer) the access needs: in place, if no
    /// other context could use the time.
    #[inline(always)]
    fn wait_for_register(
        &mut self,
        first: &OutstandingMiss,
        in_order: bool,
        cursor: &mut FastCursor,
        burst: &mut Burst,
        thread: &mut HwThread,
    ) -> BeyondOutcome {
        let context = &mut self.contexts[burst.run.nth];
        if !burst.wait_in_place(cursor.now, first.returns_at, first.wait, thread) {
            (context.ready, context.wait) = (first.returns_at, Some(first.wait));
            return BeyondOutcome::Leaves(SlowPathCause::Waits);
        }
        let waited = first.returns_at - cursor.now;
        context.issued += cursor.now - cursor.counted;
        (cursor.now, cursor.counted, cursor.began) =
            (first.returns_at, first.returns_at, cursor.began.wrapping_add(waited));
        cursor.code_end = if cursor.code_end == u64::MAX { u64::MAX } else { cursor.code_end + waited };
        cursor.stop = burst.issue_limit(in_order, cursor.now, context);
        BeyondOutcome::Again
    }
}

impl CacheUnit {
    /// The line at `place` was being filled when it was last checked: has it arrived, so that the access is a plain
    /// hit?
    #[inline(never)]
    fn is_filled_line_hit(&mut self, line: u64, place: usize, store: bool, tick: u64) -> bool {
        let meta = self.store.line_meta(place);
        let filled_meta = LineMeta(meta.0 & !PENDING);
        if filled_meta.needs_slow_path(store, self.write == WritePolicy::Through)
            || !self.pending.has_arrived(line, tick + self.latency)
        {
            return false;
        }
        self.store.set_meta(place, filled_meta.as_store(store));
        self.store.touch(line, place);
        true
    }
}

/// Fetches the next line of code if page and line are present.
#[inline(always)]
pub(super) fn quick_fetch(
    code: &mut CacheUnit,
    thread: &mut HwThread,
    page_shift: u32,
    now: u64,
    shape: usize,
    watched: bool,
) -> bool {
    let page_shift = if shape == ANY { page_shift } else { PLAIN_PAGE_SHIFT };
    let address = thread.next_code;
    let (is_mapped, frame) = thread.tlb.probe_entry(address >> page_shift);
    if !is_mapped {
        return false;
    }
    let line = (frame << page_shift | address & ((1 << page_shift) - 1)) >> code.line_shift;
    if let Err(place) = code.store.record_hit(line, false, false, shape) {
        let Some(place) = place else { return false };
        let meta = code.store.line_meta(place);
        if meta.0 & PREFETCHED != 0 || !code.pending.has_arrived(line, now + code.latency) {
            return false;
        }
        code.store.set_meta(place, LineMeta(meta.0 & !PENDING));
        code.store.touch(line, place);
    }
    if watched {
        thread.probes.observe_fetch(code.store.set_of(line), code.store.all_sets());
    }
    thread.charge_fetch(1 << code.line_shift);
    true
}
