//! The fast path of a request: the L1 lacks the line, or writes through, and the cache behind serves it alone.
//!
//! With small L1s, short lines or write-through stores, most requests end there, without involving any other cache.
//! Here everything is done in one step, and in the same order as on the slow path (`walk`); a test runs machines both
//! ways.

use cachemate_core::{CacheLevel, WritePolicy};

use super::cache_unit::{CacheUnit, DataOrigin, ROOT};
use super::caches::{CacheRequest, CacheResponse, Caches};
use super::counters::TaskCounters;
use super::store::{EXCLUSIVE, LineMeta, MODIFIED, PENDING, SHARED, SHARER_BITS, SPECIAL};

impl CacheUnit {
    /// Does a hit by this child affect only the child?
    #[inline]
    pub fn is_plain(&self, meta: LineMeta, bit: u32, store: bool) -> bool {
        // Without branches, because a branch on stores cannot be predicted.
        let others = (meta.sharers() & !bit != 0) | (self.children.len() > SHARER_BITS as usize);
        let asks_others = others & (store | self.children_own);
        let upgrades = store & ((meta.state() == SHARED) | (self.write == WritePolicy::Through));
        !((meta.0 & SPECIAL != 0) | asks_others | upgrades | self.is_victim())
    }
}

impl Caches {
    /// Prefetches the host lines that a held request at this address of an L1 will read on its way to memory.
    #[inline(never)]
    pub fn prefetch_host_path(&self, l1: usize, address: u64) {
        let mut at = l1;
        while at != ROOT {
            let unit = &self.units[at];
            unit.prefetch_host_line(address >> unit.line_shift, at != l1);
            at = unit.parent;
        }
        if let Some(directory) = &self.directory {
            directory.prefetch_host_entry(address >> self.directory_shift);
        }
    }

    /// Does the core's own second level serve the request, so that no other core can observe it? The second level must
    /// be private to the core and have the line, the L1 must have no prefetcher, and lines evicted from the L1 must be
    /// present behind it.
    pub fn is_own(&self, l1: usize, place: Option<usize>, address: u64, store: bool) -> bool {
        let first = &self.units[l1];
        #[cfg(test)]
        if self.long_way_only || self.in_order_only {
            return false;
        }
        if place.is_some() || !first.owns_next {
            return false;
        }
        let second = &self.units[first.parent];
        let Some(at) = second.store.find(address >> second.line_shift) else { return false };
        if !second.is_plain(second.store.meta(at), first.bit, store) {
            return false;
        }
        let leaving = first.store.next_victim(address >> first.line_shift);
        leaving.is_none_or(|out| {
            let behind = out.line << first.line_shift >> second.line_shift;
            out.meta.state() != MODIFIED || second.store.find(behind).is_some()
        })
    }

    /// The part of [`Caches::first_level`] that the next cache serves. `None` if the request must take the slow path;
    /// in that case nothing was done.
    #[inline(always)]
    pub fn access_next_level(
        &mut self,
        l1: usize,
        place: Option<usize>,
        ask: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> Option<CacheResponse> {
        #[cfg(test)]
        if self.long_way_only {
            return None;
        }
        let behind = self.units[l1].parent;
        let [first, second] = self.units.get_disjoint_mut([l1, behind]).ok()?;
        let through = ask.store & (first.write == WritePolicy::Through);
        if place.is_some_and(|place| !through | (first.store.meta(place).0 & SPECIAL != 0)) {
            return None;
        }
        let far = ask.address >> second.line_shift;
        let at = second.store.find(far)?;
        let meta = second.store.meta(at);
        if !second.is_plain(meta, first.bit, ask.store) {
            return None;
        }
        let line = ask.address >> first.line_shift;
        counters.levels[first.level as usize].references += 1;
        first.counters.demand.references += 1;
        counters.levels[second.level as usize].references += 1;
        second.counters.demand.references += 1;
        second.store.touch(far, at);
        let exclusive = meta.state() >= EXCLUSIVE;
        let mut answer = CacheResponse {
            ready_tick: ask.at + second.latency,
            queue: 0,
            served: DataOrigin::Hit(second.level),
            exclusive,
            dirty: false,
        };
        if through {
            second.store.set_meta(at, meta.as_store(true));
            if let Some(place) = place {
                first.store.touch(line, place);
                answer.ready_tick = answer.ready_tick.max(ask.at + first.latency);
                return Some(answer);
            }
            first.miss(line, ask.task, counters);
        } else {
            first.miss(line, ask.task, counters);
            answer.queue = second.transfer_out(ask.at, 1 << first.line_shift);
            answer.ready_tick += answer.queue;
            second.store.set_meta(at, meta.with_sharers(meta.sharers() | first.bit));
            let state = match () {
                () if ask.store => MODIFIED,
                () if first.level == CacheLevel::L1Instruction || first.write == WritePolicy::Through => SHARED,
                () if exclusive => EXCLUSIVE,
                () => SHARED,
            };
            let filled = LineMeta(LineMeta::new(state, 0, ask.task).0 | PENDING);
            let evicted = first.store.insert(line, filled, first.mask_of(ask.class));
            first.record_arrival(ask.task);
            first.pending.add(line, answer.ready_tick, answer.served, ask.at);
            if let Some(evicted) = evicted {
                if evicted.meta.state() == MODIFIED {
                    self.evict(l1, evicted, ask, counters);
                } else {
                    first.record_eviction(evicted.line, evicted.meta, Some(ask.task));
                }
            }
        }
        if self.units[l1].prefetcher.is_some() {
            self.prefetch_after(l1, line, ask, counters);
        }
        Some(answer)
    }
}
