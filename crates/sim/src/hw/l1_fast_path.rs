//! The fast path of a request: the L1 lacks the line, or writes through, and the cache behind serves it alone.
//!
//! With small L1s, short lines or write-through stores, most requests end there, without involving any other cache.
//! Here everything is done in one step, and in the same order as on the slow path (`walk`); a test runs machines both
//! ways.

use cachemate_core::{CacheLevel, WritePolicy};

use super::cache_unit::{CacheUnit, DataOrigin, ROOT};
use super::caches::{CacheRequest, CacheResponse, Caches};
use super::core_kind::CoreKind;
use super::counters::TaskCounters;
use super::store::{EXCLUSIVE, LineMeta, MODIFIED, PENDING, SHARED, SHARER_BITS, SPECIAL};

impl CacheUnit {
    /// Does a hit by this child affect only the child?
    #[inline]
    pub fn is_plain(&self, meta: LineMeta, bit: u32, store: bool) -> bool {
        // Without branches, because a branch on stores cannot be predicted.
        let has_others = (meta.sharers() & !bit != 0) | (self.children.len() > SHARER_BITS as usize);
        let asks_others = has_others & (store | self.children_own);
        let upgrades = store & ((meta.state() == SHARED) | (self.write == WritePolicy::Through));
        !((meta.0 & SPECIAL != 0) | asks_others | upgrades | self.is_victim())
    }

    /// Handles a hit that affects no other cache: gives the line to a child, whose line length and bit are `to`, or takes
    /// a store that goes through (`None`). The line's data may still be in transit.
    #[inline(always)]
    pub fn serve_plain_line(&mut self, line: u64, place: usize, to: Option<(u64, u32)>, tick: u64) -> CacheResponse {
        let mut meta = self.store.line_meta(place);
        let (mut ready_tick, mut served) = (tick + self.latency, DataOrigin::Hit(self.level));
        let exclusive = meta.state() >= EXCLUSIVE;
        if meta.0 & PENDING != 0 {
            match self.pending.pending_fill(line) {
                Some((done, from)) if done > ready_tick => (ready_tick, served) = (done, from),
                _ => meta.0 &= !PENDING,
            }
        }
        let mut queue = 0;
        match to {
            Some((bytes, bit)) => {
                queue = self.transfer_out(tick, bytes);
                meta = meta.with_sharers(meta.sharers() | bit);
            }
            None => meta = meta.as_store(true),
        }
        self.store.set_meta(place, meta);
        CacheResponse { ready_tick: ready_tick + queue, queue, served, exclusive, dirty: false }
    }
}

impl Caches {
    /// Prefetches the host lines that a held request at this address of an L1 will read on its way to memory.
    #[inline(never)]
    pub fn prefetch_host_path(&self, l1: usize, address: u64) {
        let mut cache_index = l1;
        while cache_index != ROOT {
            let unit = &self.units[cache_index];
            unit.prefetch_host_line(address >> unit.line_shift, cache_index != l1);
            cache_index = unit.parent;
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
        if !second.is_plain(second.store.line_meta(at), first.bit, store) {
            return false;
        }
        let leaving = first.store.next_victim(address >> first.line_shift);
        leaving.is_none_or(|out| {
            let second_line = out.line << first.line_shift >> second.line_shift;
            out.meta.state() != MODIFIED || second.store.find(second_line).is_some()
        })
    }

    /// Handles a request whose line the L1 lacks, or a plain store that goes through the L1. `None` if the request must
    /// take the slow path; in that case nothing was done.
    #[inline(always)]
    pub fn access_next_level<K: CoreKind>(
        &mut self,
        l1: usize,
        place: Option<usize>,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> Option<CacheResponse> {
        #[cfg(test)]
        if self.long_way_only {
            return None;
        }
        let l2 = self.units[l1].parent;
        let [first, second] = self.units.get_disjoint_mut([l1, l2]).ok()?;
        let writes_through = K::WRITE.unwrap_or(first.write) == WritePolicy::Through;
        let stores_through = request.store & writes_through;
        if place.is_some_and(|place| !stores_through | (first.store.line_meta(place).0 & SPECIAL != 0)) {
            return None;
        }
        let (second_line, line) = (request.address >> second.line_shift, request.address >> first.line_shift);
        let place_behind = second.store.find(second_line);
        let is_plain_hit =
            |at| second.is_plain(LineMeta(second.store.line_meta(at).0 & !PENDING), first.bit, request.store);
        if !place_behind.map_or(place.is_none() & !second.is_victim(), is_plain_hit) {
            return None;
        }
        counters.levels[first.level as usize].references += 1;
        first.counters.demand.references += 1;
        counters.levels[second.level as usize].references += 1;
        second.counters.demand.references += 1;
        if place.is_none() {
            first.count_miss(line, request.task, counters);
        }
        let mut response = match place_behind {
            Some(at) => {
                second.store.touch(second_line, at);
                let (bytes, bit) = (1 << first.line_shift, first.bit);
                second.serve_plain_line(second_line, at, (!stores_through).then_some((bytes, bit)), request.tick)
            }
            None => {
                let was_cached = second.count_miss(second_line, request.task, counters);
                self.fetch_missed_line(
                    l2,
                    l1,
                    second_line,
                    was_cached,
                    &CacheRequest { through: stores_through, ..*request },
                    counters,
                )
            }
        };
        let first = &mut self.units[l1];
        if let Some(place) = place {
            first.store.touch(line, place);
            response.ready_tick = response.ready_tick.max(request.tick + first.latency);
            return Some(response);
        }
        if !stores_through {
            self.fill_first_level::<K>(l1, line, &response, request, counters);
        }
        if self.units[l1].prefetcher.is_some() {
            self.note_prefetches(l1, line, request);
        }
        if !self.due.is_empty() {
            self.start_prefetches(request, counters);
        }
        Some(response)
    }

    /// Puts the line that an L1 lacked into it, and handles the line that it displaces.
    #[inline(always)]
    pub fn fill_first_level<K: CoreKind>(
        &mut self,
        l1: usize,
        line: u64,
        response: &CacheResponse,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) {
        let first = &mut self.units[l1];
        let writes_through = K::WRITE.unwrap_or(first.write) == WritePolicy::Through;
        let state = match () {
            () if request.store => MODIFIED,
            () if first.level == CacheLevel::L1Instruction || writes_through => SHARED,
            () if response.dirty => MODIFIED,
            () if response.exclusive => EXCLUSIVE,
            () => SHARED,
        };
        let filled = LineMeta(LineMeta::new(state, 0, request.task).0 | PENDING);
        let evicted = first.store.insert(line, filled, first.mask_of(request.class), K::DATA);
        first.record_arrival(request.task);
        first.pending.add(line, response.ready_tick, response.served, request.tick);
        let Some(evicted) = evicted else { return };
        let is_clean = writes_through || evicted.meta.state() != MODIFIED;
        let l2 = first.parent;
        if is_clean && !self.units.get(l2).is_some_and(CacheUnit::is_victim) {
            self.units[l1].record_eviction(evicted.line, evicted.meta, Some(request.task));
        } else {
            self.evict(l1, evicted, request, counters);
        }
    }
}
