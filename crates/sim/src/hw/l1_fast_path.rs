//! The fast path of a request: the L1 lacks the line or writes through, and only the next cache is involved.
//!
//! With small L1s, short lines or write-through stores, most requests end there, without involving any other cache.
//! Here everything is done in one step, and in the same order as on the slow path (`access_slow`); a test runs machines
//! both ways.

use cachemate_core::{CacheLevel, WritePolicy};

use super::cache_unit::{CacheUnit, DataOrigin, ROOT};
use super::caches::{CacheRequest, CacheResponse, Caches};
use super::core_kind::CoreKind;
use super::counters::TaskCounters;
use super::store::{EXCLUSIVE, LineMeta, MODIFIED, PENDING, SHARED, SHARER_BITS, SLOW_PATH_BITS};

impl CacheUnit {
    /// Whether a hit by this child affects no other cache.
    #[inline]
    pub fn is_plain_hit(&self, meta: LineMeta, bit: u32, is_store: bool) -> bool {
        // Without branches, because a branch on stores cannot be predicted.
        let has_other_sharers =
            (meta.sharers() & !bit != 0) | (self.children.len() > SHARER_BITS as usize);
        let needs_other_caches = has_other_sharers & (is_store | self.can_children_own);
        let needs_upgrade =
            is_store & ((meta.state() == SHARED) | (self.write_policy == WritePolicy::Through));
        !((meta.0 & SLOW_PATH_BITS != 0) | needs_other_caches | needs_upgrade | self.is_victim())
    }

    /// Handles a hit that affects no other cache. The line goes to the child with this line length and sharer bit;
    /// `None` stands for a store that is written through. The line's data may still be in transit.
    #[inline(always)]
    pub fn serve_plain_line(
        &mut self,
        line: u64,
        tag_index: usize,
        child_line_and_bit: Option<(u64, u32)>,
        tick: u64,
    ) -> CacheResponse {
        let mut meta = self.store.line_meta(tag_index);
        let (mut ready_tick, mut origin) = (tick + self.latency_ticks, DataOrigin::Hit(self.level));
        let is_exclusive = meta.state() >= EXCLUSIVE;
        if meta.0 & PENDING != 0 {
            match self.pending_fills.pending_fill(line) {
                Some((arrival, fill_origin)) if arrival > ready_tick => {
                    (ready_tick, origin) = (arrival, fill_origin)
                }
                _ => meta.0 &= !PENDING,
            }
        }

        let mut queue_ticks = 0;
        match child_line_and_bit {
            Some((bytes, bit)) => {
                queue_ticks = self.transfer_out(tick, bytes);
                meta = meta.with_sharers(meta.sharers() | bit);
            }
            None => meta = meta.after_hit(true),
        }
        self.store.set_meta(tag_index, meta);

        CacheResponse {
            ready_tick: ready_tick + queue_ticks,
            queue_ticks,
            origin,
            is_exclusive,
            is_dirty: false,
        }
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

    /// Whether the core's own second level serves the request, so that no other core can observe
    /// it. The second level must be private and have the line, and a dirty line evicted from the L1
    /// must be present behind it.
    pub fn can_next_level_serve(
        &self,
        l1: usize,
        tag_index: Option<usize>,
        address: u64,
        is_store: bool,
    ) -> bool {
        let l1_unit = &self.units[l1];
        #[cfg(test)]
        if self.uses_slow_path_only || self.forbids_running_ahead {
            return false;
        }
        if tag_index.is_some() || !l1_unit.is_next_level_private {
            return false;
        }

        let l2_unit = &self.units[l1_unit.parent];
        let Some(l2_tag_index) = l2_unit.store.find(address >> l2_unit.line_shift) else {
            return false;
        };
        if !l2_unit.is_plain_hit(
            l2_unit.store.line_meta(l2_tag_index),
            l1_unit.sharer_bit,
            is_store,
        ) {
            return false;
        }

        let victim_line = l1_unit.store.next_victim(address >> l1_unit.line_shift);
        victim_line.is_none_or(|evicted| {
            let l2_line = evicted.line << l1_unit.line_shift >> l2_unit.line_shift;
            evicted.meta.state() != MODIFIED || l2_unit.store.find(l2_line).is_some()
        })
    }

    /// Handles a request whose line the L1 lacks, or a plain store that goes through the L1. Returns `None`, and
    /// changes nothing, if the request must take the slow path.
    #[inline(always)]
    pub fn try_access_next_level<K: CoreKind>(
        &mut self,
        l1: usize,
        tag_index: Option<usize>,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> Option<CacheResponse> {
        #[cfg(test)]
        if self.uses_slow_path_only {
            return None;
        }

        let l2 = self.units[l1].parent;
        let [l1_unit, l2_unit] = self.units.get_disjoint_mut([l1, l2]).ok()?;
        let writes_through =
            K::WRITE_POLICY.unwrap_or(l1_unit.write_policy) == WritePolicy::Through;
        let is_through_store = request.is_store & writes_through;
        if tag_index.is_some_and(|index| {
            !is_through_store | (l1_unit.store.line_meta(index).0 & SLOW_PATH_BITS != 0)
        }) {
            return None;
        }

        let (l2_line, line) = (
            request.address >> l2_unit.line_shift,
            request.address >> l1_unit.line_shift,
        );
        let l2_tag_index = l2_unit.store.find(l2_line);
        let is_plain_hit = |hit_index| {
            l2_unit.is_plain_hit(
                LineMeta(l2_unit.store.line_meta(hit_index).0 & !PENDING),
                l1_unit.sharer_bit,
                request.is_store,
            )
        };
        if !l2_tag_index.map_or(tag_index.is_none() & !l2_unit.is_victim(), is_plain_hit) {
            return None;
        }
        counters.levels[l1_unit.level as usize].references += 1;
        l1_unit.counters.demand.references += 1;
        counters.levels[l2_unit.level as usize].references += 1;
        l2_unit.counters.demand.references += 1;
        if tag_index.is_none() {
            l1_unit.count_miss(line, request.task, counters);
        }
        let mut response = match l2_tag_index {
            Some(at) => {
                l2_unit.store.touch(l2_line, at);
                let (bytes, bit) = (1 << l1_unit.line_shift, l1_unit.sharer_bit);
                l2_unit.serve_plain_line(
                    l2_line,
                    at,
                    (!is_through_store).then_some((bytes, bit)),
                    request.tick,
                )
            }
            None => {
                let was_cached = l2_unit.count_miss(l2_line, request.task, counters);
                self.fetch_missed_line(
                    l2,
                    l1,
                    l2_line,
                    was_cached,
                    &CacheRequest {
                        is_write_through: is_through_store,
                        ..*request
                    },
                    counters,
                )
            }
        };
        let l1_unit = &mut self.units[l1];
        if let Some(tag_index) = tag_index {
            l1_unit.store.touch(line, tag_index);
            response.ready_tick = response
                .ready_tick
                .max(request.tick + l1_unit.latency_ticks);
            return Some(response);
        }
        if !is_through_store {
            self.fill_first_level::<K>(l1, line, &response, request, counters);
        }
        if self.units[l1].prefetcher.is_some() {
            self.record_prefetches(l1, line, request);
        }
        if !self.due_prefetches.is_empty() {
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
        let l1_unit = &mut self.units[l1];
        let writes_through =
            K::WRITE_POLICY.unwrap_or(l1_unit.write_policy) == WritePolicy::Through;
        let state = match () {
            () if request.is_store => MODIFIED,
            () if l1_unit.level == CacheLevel::L1Instruction || writes_through => SHARED,
            () if response.is_dirty => MODIFIED,
            () if response.is_exclusive => EXCLUSIVE,
            () => SHARED,
        };

        let filled_meta = LineMeta(LineMeta::new(state, 0, request.task).0 | PENDING);
        let evicted_line = l1_unit.store.insert(
            line,
            filled_meta,
            l1_unit.mask_of(request.class),
            K::DATA_SHAPE,
        );
        l1_unit.record_arrival(request.task);
        l1_unit
            .pending_fills
            .add(line, response.ready_tick, response.origin, request.tick);
        let Some(evicted) = evicted_line else { return };
        let is_clean = writes_through || evicted.meta.state() != MODIFIED;
        let l2 = l1_unit.parent;
        if is_clean && !self.units.get(l2).is_some_and(CacheUnit::is_victim) {
            self.units[l1].record_eviction(evicted.line, evicted.meta, Some(request.task));
        } else {
            self.evict(l1, evicted, request, counters);
        }
    }
}
