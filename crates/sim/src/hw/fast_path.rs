//! The fast path through a run: the loop through which nearly all accesses pass, and the step beyond the L1.
//!
//! Problem: an L1 hit takes a handful of host instructions, and everything around it many times as many. Method: `hits`
//! keeps only the state of a hit in registers; time, window and code are combined into one bound with which every
//! access is compared. `beyond` handles a single access that is not a plain hit, and leaves accesses that wait for
//! others or that probes observe to the slow path (`burst`). Properties: the bound may be outdated (a load has
//! returned): the slow path checks again, at the same tick.

use cachemate_core::{AccessKind, CacheLevel, WritePolicy};

use super::burst::{Burst, SlowPathCause};
use super::cache_unit::{CacheUnit, DataOrigin};
use super::caches::CacheRequest;
use super::context::StallSource;
use super::l1_variant::{ANY, LRU_2, LRU_4, LRU_8, PLAIN_PAGE_SHIFT, RANDOM_4};
use super::pipeline::{CoreEnvironment, CoreFrontEnd};
use super::store::{LineMeta, PENDING, PREFETCHED, SHARED, SPECIAL};
use super::thread::HwThread;

/// No load has been issued yet.
const NEVER: u64 = u64::MAX;

impl CoreFrontEnd {
    /// Continues while accesses need only time, window, L1 hits, present code and (when it is the core's turn) the
    /// cache behind.
    #[inline]
    pub fn run_fast_path<const WATCHED: bool>(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        around: &mut CoreEnvironment<'_>,
    ) -> SlowPathCause {
        #[cfg(test)]
        if around.caches.step_by_step {
            burst.was_early = false;
            return self.step(burst, thread, around);
        }
        loop {
            if std::mem::take(&mut burst.was_early) {
                // The line may have been taken away in the meantime.
                let line = self.address(burst, thread, around) >> around.caches.units[self.l1d].line_shift;
                burst.place = around.caches.units[self.l1d].store.find(line);
            } else {
                let event = match (WATCHED, self.shape) {
                    (false, LRU_2) => self.hits::<WATCHED, LRU_2>(burst, thread, around),
                    (false, LRU_4) => self.hits::<WATCHED, LRU_4>(burst, thread, around),
                    (false, RANDOM_4) => self.hits::<WATCHED, RANDOM_4>(burst, thread, around),
                    (false, LRU_8) => self.hits::<WATCHED, LRU_8>(burst, thread, around),
                    _ => self.hits::<WATCHED, ANY>(burst, thread, around),
                };
                if event != SlowPathCause::Beyond {
                    return event;
                }
                if burst.place.is_none() && burst.t > burst.run.shared && !self.owns_next {
                    return self.classify_early_exit(burst, thread, around);
                }
            }
            if let Some(event) = self.leave_fast_path::<WATCHED>(burst, thread, around) {
                return event;
            }
        }
    }

    /// Classifies an access that affects more than the L1, while cores that are behind come first.
    fn classify_early_exit(&self, burst: &mut Burst, thread: &HwThread, around: &CoreEnvironment<'_>) -> SlowPathCause {
        if self.hints {
            around.caches.prefetch_host_path(self.l1d, self.address(burst, thread, around));
        }
        burst.was_early = true;
        SlowPathCause::Early
    }

    /// Handles plain hits of data and code. On return, all instructions before the current access have been issued.
    /// `SHAPE` is that of the data cache.
    #[inline(never)]
    fn hits<const WATCHED: bool, const SHAPE: usize>(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        around: &mut CoreEnvironment<'_>,
    ) -> SlowPathCause {
        let context = &mut self.contexts[burst.run.nth];
        let stop = burst.issue_limit(self.in_order, burst.t, context);
        burst.stop = stop;
        let page_shift = if SHAPE == ANY { around.page_shift } else { PLAIN_PAGE_SHIFT };
        // The tick at which the present code is used up, and the tick at which the current record would have begun.
        let mut code_end = burst.t.saturating_add(thread.fetch_left);
        let mut began = burst.t.wrapping_sub(burst.skip);
        let (mut t, mut position) = (burst.t, thread.position);
        let mut last_load = NEVER;
        let event = loop {
            let bound = stop.min(code_end);
            let data = &mut around.caches.units[self.l1d];
            let mut rest = thread.batch.get(position..).unwrap_or_default().iter();
            let (ended, at) = loop {
                let Some(&access) = rest.as_slice().first() else { break (SlowPathCause::BatchEnd, t.max(began)) };
                if !access.is_data() {
                    let event =
                        if access.kind() == AccessKind::Jump { SlowPathCause::Jump } else { SlowPathCause::Compute };
                    break (event, t.max(began));
                }
                let issue = began.wrapping_add(u64::from(access.gap()));
                if issue >= bound {
                    break (SlowPathCause::Budget, bound);
                }
                if access.is_dependent() {
                    let value_at = if last_load == NEVER { context.value_at } else { last_load + data.latency };
                    if value_at > issue {
                        break (SlowPathCause::Depends, issue);
                    }
                }
                // The next page cannot be predicted, so both entries are looked up.
                let (address, store) = (access.address(), access.is_store());
                let wanted = address >> page_shift;
                let (known, found) = thread.tlb.probe_entry(wanted);
                if wanted != burst.page && !known {
                    break (SlowPathCause::Translate, issue);
                }
                let frame = if wanted == burst.page { burst.frame } else { found << page_shift };
                (burst.page, burst.frame) = (wanted, frame);
                let line = (frame | address & ((1 << page_shift) - 1)) >> data.line_shift;
                if let Err(place) = data.store.hit::<SHAPE>(line, store, data.write == WritePolicy::Through)
                    && (WATCHED || !place.is_some_and(|place| data.is_filled_line_hit(line, place, store, issue)))
                {
                    burst.place = place;
                    break (SlowPathCause::Beyond, issue);
                }
                last_load = if store { last_load } else { issue };
                if WATCHED {
                    let (set, sets) = (data.store.set_of(line), data.store.all_sets());
                    thread.probes.observe_access(address >> data.line_shift, issue, set, sets, around.sampling);
                }
                began = issue + 1;
                rest.next();
            };
            t = at;
            position = thread.batch.len() - rest.len();
            if ended != SlowPathCause::Budget || code_end > t {
                break ended;
            }
            let Some(l1i) = self.l1i else { break SlowPathCause::Fetch };
            let code = &mut around.caches.units[l1i];
            let place = match (WATCHED, self.code_shape) {
                (false, LRU_2) => quick_fetch::<WATCHED, LRU_2>(code, thread, page_shift, t),
                (false, LRU_4) => quick_fetch::<WATCHED, LRU_4>(code, thread, page_shift, t),
                (false, LRU_8) => quick_fetch::<WATCHED, LRU_8>(code, thread, page_shift, t),
                _ => quick_fetch::<WATCHED, ANY>(code, thread, page_shift, t),
            };
            if !place {
                break SlowPathCause::Fetch;
            }
            burst.fetches += 1;
            if WATCHED {
                thread.report_code_line(code.line_shift, t, around.sampling);
            }
            code_end = t + thread.fetch_left;
        };
        burst.hits += (position - thread.position) as u64;
        thread.position = position;
        thread.fetch_left = if code_end == u64::MAX { u64::MAX } else { code_end - t };
        context.issued += t - burst.t;
        if last_load != NEVER {
            let latency = around.caches.units[self.l1d].latency;
            (context.value_at, context.value_from) = (last_load + latency, DataOrigin::Hit(CacheLevel::L1Data));
        }
        (burst.t, burst.skip) = (t, t.wrapping_sub(began));
        event
    }

    /// Handles an access that is not a plain hit, at its tick. `Some` if the fast path ends.
    #[inline(never)]
    pub(super) fn leave_fast_path<const WATCHED: bool>(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        around: &mut CoreEnvironment<'_>,
    ) -> Option<SlowPathCause> {
        let (issue, store) = (burst.t, thread.batch[thread.position].is_store());
        let (address, place) = (self.address(burst, thread, around), burst.place);
        let unit = &mut around.caches.units[self.l1d];
        let (line, nearest) = (address >> unit.line_shift, issue + unit.latency);
        if let Some(place) = place
            && !WATCHED
        {
            let meta = unit.store.meta(place);
            let asks_others = store & ((unit.write == WritePolicy::Through) | (meta.state() == SHARED));
            if !asks_others & (meta.0 & SPECIAL == PENDING) {
                if let Some((done, served)) = unit.pending.pending_fill(line).filter(|&(done, _)| done > nearest) {
                    return self.hit_arriving_line(burst, thread, around, (line, place), (done, served));
                }
                // The access has become a plain hit.
                unit.store.set_meta(place, LineMeta(meta.0 & !PENDING));
                return None;
            }
        }
        if issue > burst.run.shared && !around.caches.is_own(self.l1d, place, address, store) {
            return Some(self.classify_early_exit(burst, thread, around));
        }
        // Probes observe accesses beyond the L1, which only the slow path handles.
        if burst.probed {
            return Some(SlowPathCause::Memory);
        }
        let mut joined = false;
        if self.contexts[burst.run.nth].mshrs_in_use >= burst.room {
            joined = self.can_join_miss(burst.run.nth, address, issue, around.caches);
            if !joined && !self.reclaim_mshrs(burst.run.nth, issue) {
                return Some(SlowPathCause::Memory);
            }
            burst.room = self.free_mshrs(burst.run.nth);
        }
        let ask = CacheRequest {
            address,
            at: issue,
            store,
            through: false,
            prefetch: false,
            task: thread.slot(),
            class: thread.class,
            package: self.package,
        };
        let answer = around.caches.first_level(self.l1d, place, &ask, &mut thread.counters);
        let wait = StallSource { served: answer.served, queue: answer.queue, joined };
        self.complete_access(burst, thread, answer.ready_tick, wait, nearest)
    }

    /// Returns the physical address of the current access, whose frame is known.
    #[inline(always)]
    fn address(&self, burst: &Burst, thread: &HwThread, around: &CoreEnvironment<'_>) -> u64 {
        burst.frame | thread.batch[thread.position].address() & ((1 << around.page_shift) - 1)
    }

    /// Handles a hit that waits for the rest of a fill; it occupies a register unless an earlier miss does.
    #[inline(always)]
    fn hit_arriving_line(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        around: &mut CoreEnvironment<'_>,
        (line, place): (u64, usize),
        (done, served): (u64, DataOrigin),
    ) -> Option<SlowPathCause> {
        let (nth, issue) = (burst.run.nth, burst.t);
        let store = thread.batch[thread.position].is_store();
        let joined = !self.in_order && self.contexts[nth].has_miss_for(done);
        if !joined && self.contexts[nth].mshrs_in_use >= burst.room {
            return Some(SlowPathCause::Memory);
        }
        let unit = &mut around.caches.units[self.l1d];
        unit.store.touch(line, place);
        let meta = unit.store.meta(place);
        unit.store.set_meta(place, meta.as_store(store));
        let nearest = issue + unit.latency;
        burst.hits += 1;
        self.complete_access(burst, thread, done, StallSource { served, queue: 0, joined }, nearest)
    }

    /// Completes the current access, which has been issued and whose data arrives at `done`. `Some` if the context
    /// waits for it.
    #[inline(always)]
    fn complete_access(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        done: u64,
        wait: StallSource,
        nearest: u64,
    ) -> Option<SlowPathCause> {
        let store = thread.batch[thread.position].is_store();
        let context = &mut self.contexts[burst.run.nth];
        burst.skip_one(thread, context);
        context.issued_miss(done, wait, nearest, burst.t, store, self.in_order).then_some(SlowPathCause::Waits)
    }
}

impl CacheUnit {
    /// The line at `place` was being filled when it was last checked: has it arrived, so that the access is a plain
    /// hit?
    #[inline(never)]
    fn is_filled_line_hit(&mut self, line: u64, place: usize, store: bool, tick: u64) -> bool {
        let meta = self.store.meta(place);
        let back = LineMeta(meta.0 & !PENDING);
        if back.needs_slow_path(store, self.write == WritePolicy::Through)
            || !self.pending.has_arrived(line, tick + self.latency)
        {
            return false;
        }
        self.store.set_meta(place, back.as_store(store));
        self.store.touch(line, place);
        true
    }
}

/// Fetches the next line of code if page and line are present.
#[inline(never)]
pub(super) fn quick_fetch<const WATCHED: bool, const SHAPE: usize>(
    code: &mut CacheUnit,
    thread: &mut HwThread,
    page_shift: u32,
    t: u64,
) -> bool {
    let page_shift = if SHAPE == ANY { page_shift } else { PLAIN_PAGE_SHIFT };
    let address = thread.next_code;
    let (known, frame) = thread.tlb.probe_entry(address >> page_shift);
    if !known {
        return false;
    }
    let line = (frame << page_shift | address & ((1 << page_shift) - 1)) >> code.line_shift;
    if let Err(place) = code.store.hit::<SHAPE>(line, false, false) {
        let Some(place) = place else { return false };
        let meta = code.store.meta(place);
        if meta.0 & PREFETCHED != 0 || !code.pending.has_arrived(line, t + code.latency) {
            return false;
        }
        code.store.set_meta(place, LineMeta(meta.0 & !PENDING));
        code.store.touch(line, place);
    }
    if WATCHED {
        thread.probes.observe_fetch(code.store.set_of(line), code.store.all_sets());
    }
    thread.charge_fetch(1 << code.line_shift);
    true
}
