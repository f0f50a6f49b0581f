//! The path of one request: L1, the further levels, other caches, memory.
//!
//! Every miss of every core takes this path, so it decides what a miss costs and to whom it is
//! counted. Latencies in machine descriptions are those from the core's request to the data,
//! because that is what is measured and published; the levels before are part of them and are not
//! added.
//!
//! For example, on `xeon-x5365-4` a load hits in the L2 after 14 cycles, and comes from memory
//! after 360 and not after 3 + 14 + 360. To these 360 are added the waits for the front-side bus
//! and the controller, whose ends are known at once, because each is a server with a queue that is
//! ordered by time.

use cachemate_core::{CacheLevel, Inclusion, WritePolicy};

use super::cache_unit::{DataOrigin, ROOT};
use super::caches::{CacheRequest, CacheResponse, Caches, SnoopAction, SnoopResult};
use super::core_kind::{AnyCore, CoreKind};
use super::counters::TaskCounters;
use super::store::{
    ALL_SHARERS, EXCLUSIVE, LineMeta, MODIFIED, PENDING, PREFETCHED, SHARED, SHARER_BITS,
    SLOW_PATH_BITS,
};

/// Number of bytes of a write-through store.
const STORE_BYTES: u64 = 8;

impl Caches {
    /// Handles a request at an L1 that is not a plain hit there. Counts the reference and its consequences. `tag_index`
    /// is the line's position in the L1.
    #[inline(always)]
    pub fn access_first_level<K: CoreKind>(
        &mut self,
        l1: usize,
        tag_index: Option<usize>,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        self.first_level_prefetches = 0;
        if let Some(response) = self.try_access_next_level::<K>(l1, tag_index, request, counters) {
            return response;
        }
        self.access_slow(l1, tag_index, request, counters)
    }

    /// Handles a request on the slow path, if the fast path does not handle it.
    #[inline(never)]
    fn access_slow(
        &mut self,
        l1: usize,
        tag_index: Option<usize>,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let response = self.access_hierarchy(l1, tag_index, request, counters);
        if !self.due_prefetches.is_empty() {
            self.start_prefetches(request, counters);
        }
        response
    }

    fn access_hierarchy(
        &mut self,
        l1: usize,
        tag_index: Option<usize>,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &mut self.units[l1];
        let (level, line, parent) = (unit.level, request.address >> unit.line_shift, unit.parent);
        let is_through_store = request.is_store && unit.write_policy == WritePolicy::Through;
        counters.levels[level as usize].references += 1;
        unit.counters.demand.references += 1;

        if let Some(tag_index) = tag_index {
            unit.store.touch(line, tag_index);
            let meta = unit.store.line_meta(tag_index);
            let mut response = self.wait_for_fill(l1, line, tag_index, request, counters);
            if is_through_store {
                let next_response = self.fetch(
                    parent,
                    l1,
                    &CacheRequest {
                        is_write_through: true,
                        ..*request
                    },
                    counters,
                );
                response = CacheResponse {
                    ready_tick: response.ready_tick.max(next_response.ready_tick),
                    ..next_response
                };
            } else if request.is_store {
                if meta.state() == SHARED {
                    response.ready_tick = response
                        .ready_tick
                        .max(request.tick + self.invalidate_other_copies(l1, request));
                    response.origin = DataOrigin::RemoteCache;
                }
                let store = &mut self.units[l1].store;
                if let Some(tag_index) = store.find(line) {
                    let meta = store.line_meta(tag_index);
                    store.set_meta(tag_index, meta.with_state(MODIFIED));
                }
            }
            return response;
        }
        self.units[l1].count_miss(line, request.task, counters);
        let response = self.fetch(
            parent,
            l1,
            &CacheRequest {
                is_write_through: is_through_store,
                ..*request
            },
            counters,
        );
        if !is_through_store {
            self.fill_first_level::<AnyCore>(l1, line, &response, request, counters);
        }
        self.record_prefetches(l1, line, request);
        response
    }

    /// Handles a hit: returns when the data arrives, which is later if the line is still being filled. Records the
    /// first demand for a prefetched line.
    fn wait_for_fill(
        &mut self,
        unit_index: usize,
        line: u64,
        tag_index: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &mut self.units[unit_index];
        let mut meta = unit.store.line_meta(tag_index);
        let mut response = CacheResponse {
            ready_tick: request.tick + unit.latency_ticks,
            queue_ticks: 0,
            origin: DataOrigin::Hit(unit.level),
            is_exclusive: meta.state() >= EXCLUSIVE,
            is_dirty: false,
        };
        if meta.0 & SLOW_PATH_BITS == 0 {
            return response;
        }

        if meta.0 & PENDING != 0 {
            match unit.pending_fills.pending_fill(line) {
                Some((arrival, served)) if arrival > response.ready_tick => {
                    (response.ready_tick, response.origin) = (arrival, served)
                }
                _ => meta.0 &= !PENDING,
            }
        }

        let is_first_use = meta.0 & PREFETCHED != 0 && !request.is_prefetch;
        if is_first_use {
            meta.0 &= !PREFETCHED;
            counters.levels[unit.level as usize].prefetch_hits += 1;
            unit.counters.demand.prefetch_hits += 1;
        }
        unit.store.set_meta(tag_index, meta);
        if is_first_use {
            self.record_prefetches(unit_index, line, request);
        }

        response
    }

    /// Requests a line that `child` lacks (or writes through) from the next level.
    fn fetch(
        &mut self,
        index: usize,
        child: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        if index == ROOT {
            return self.access_memory(child, request, counters);
        }
        let child_shift = self.units[child].line_shift;
        let unit = &mut self.units[index];
        let line = request.address >> unit.line_shift;
        if !request.is_prefetch {
            counters.levels[unit.level as usize].references += 1;
            unit.counters.demand.references += 1;
        }

        let is_victim = unit.is_victim();
        let tag_index = unit.store.find(line);
        if let Some(tag_index) = tag_index
            && let Some(response) = self.try_serve_plain_hit(index, child, line, tag_index, request)
        {
            return response;
        }

        let unit = &self.units[index];
        let sector = unit.sector_mask(request.address, child_shift);
        match tag_index.filter(|&hit_index| {
            !is_victim || unit.store.line_meta(hit_index).sharers() & sector != 0
        }) {
            Some(hit_index) if is_victim => {
                self.serve_victim_hit(index, child, hit_index, request, counters)
            }
            Some(hit_index) => self.serve_hit(index, child, line, hit_index, request, counters),
            None => {
                if !request.is_prefetch {
                    self.units[index].count_miss(line, request.task, counters);
                }
                let was_cached = self.units[index].was_cached(line);
                self.fetch_missed_line(index, child, line, was_cached, request, counters)
            }
        }
    }

    /// Handles a hit that involves no other cache above this one, as most hits do. For another kind of hit, does
    /// nothing and returns `None`.
    #[inline]
    fn try_serve_plain_hit(
        &mut self,
        unit_index: usize,
        child: usize,
        line: u64,
        tag_index: usize,
        request: &CacheRequest,
    ) -> Option<CacheResponse> {
        let (child_shift, bit) = (self.units[child].line_shift, self.units[child].sharer_bit);
        let unit = &mut self.units[unit_index];
        let meta = unit.store.line_meta(tag_index);
        if !unit.is_plain_hit(meta, bit, request.is_store) {
            return None;
        }

        unit.store.touch(line, tag_index);
        Some(unit.serve_plain_line(
            line,
            tag_index,
            (!request.is_write_through).then_some((1 << child_shift, bit)),
            request.tick,
        ))
    }

    fn serve_hit(
        &mut self,
        unit_index: usize,
        child: usize,
        line: u64,
        tag_index: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let (child_shift, bit) = (self.units[child].line_shift, self.units[child].sharer_bit);
        self.units[unit_index].store.touch(line, tag_index);
        let mut response = self.wait_for_fill(unit_index, line, tag_index, request, counters);
        let mut meta = self.units[unit_index].store.line_meta(tag_index);
        if !request.is_write_through {
            response.queue_ticks =
                self.units[unit_index].transfer_out(request.tick, 1 << child_shift);
            response.ready_tick += response.queue_ticks;
        }

        let unit = &self.units[unit_index];
        let has_shared_bits = unit.children.len() > SHARER_BITS as usize;
        if (has_shared_bits || meta.sharers() & !bit != 0)
            && (request.is_store || unit.can_children_own)
        {
            let action = if request.is_store {
                SnoopAction::Invalidate
            } else {
                SnoopAction::Share
            };
            let copies = self.snoop_siblings(
                unit_index,
                child,
                meta.sharers(),
                request,
                child_shift,
                action,
            );
            if copies.is_dirty {
                meta = meta.with_state(MODIFIED);
                response.ready_tick = response.ready_tick.max(
                    request.tick + self.same_package_ticks.unwrap_or(0) + response.queue_ticks,
                );
                response.origin = DataOrigin::RemoteCache;
                counters.remote_cache_hits += u64::from(!request.is_prefetch);
            }
            response.is_exclusive &= !copies.is_present || request.is_store;
            if child_shift == self.units[unit_index].line_shift
                && !has_shared_bits
                && (request.is_store || !copies.is_present)
            {
                meta = meta.with_sharers(meta.sharers() & bit);
            }
        }
        if request.is_store && meta.state() == SHARED {
            response.ready_tick = response
                .ready_tick
                .max(request.tick + self.invalidate_other_copies(unit_index, request));
            response.is_exclusive = true;
            meta = meta.with_state(EXCLUSIVE);
        }
        if request.is_write_through {
            match self.units[unit_index].write_policy {
                WritePolicy::Back => meta = meta.with_state(MODIFIED),
                WritePolicy::Through => {
                    response = self.forward_store(unit_index, request, counters)
                }
            }
        } else {
            meta = meta.with_sharers(meta.sharers() | bit);
        }
        self.units[unit_index].store.set_meta(tag_index, meta);
        response
    }

    /// Forwards a store from a cache that writes through.
    fn forward_store(
        &mut self,
        index: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let parent = self.units[index].parent;
        if parent != ROOT {
            return self.fetch(parent, index, request, counters);
        }

        let copies = self.snoop_other_roots(index, request, SnoopAction::Invalidate);
        counters.memory_write_bytes += STORE_BYTES;
        self.dram
            .write(request.address, request.package, STORE_BYTES, request.tick);
        let latency = if copies.is_present {
            self.remote_latency_ticks(request, copies)
        } else {
            self.units[index].latency_ticks
        };
        CacheResponse {
            ready_tick: request.tick + latency,
            queue_ticks: 0,
            origin: DataOrigin::Hit(self.units[index].level),
            is_exclusive: true,
            is_dirty: false,
        }
    }

    /// Removes a sector from a victim cache. Returns the state that it had, or 0 if it was not there.
    fn remove_victim_sector(
        &mut self,
        index: usize,
        request: &CacheRequest,
        child_shift: u32,
    ) -> u32 {
        let unit = &mut self.units[index];
        let (line, sector) = (
            request.address >> unit.line_shift,
            unit.sector_mask(request.address, child_shift),
        );
        let Some(tag_index) = unit.store.find(line) else {
            return 0;
        };
        let meta = unit.store.line_meta(tag_index);
        if meta.sharers() & sector == 0 {
            return 0;
        }
        let remaining_sharers = meta.sharers() & !sector;
        if remaining_sharers == 0 {
            unit.store.remove(tag_index);
            unit.record_removal(line, meta, Some(request.task));
        } else {
            unit.store
                .set_meta(tag_index, meta.with_sharers(remaining_sharers));
        }
        meta.state()
    }

    /// Moves the line back to the level above.
    fn serve_victim_hit(
        &mut self,
        unit_index: usize,
        child: usize,
        tag_index: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let bytes = 1 << self.units[child].line_shift;
        let unit = &mut self.units[unit_index];
        let meta = unit.store.line_meta(tag_index);
        self.remove_victim_sector(unit_index, request, self.units[child].line_shift);
        let unit = &mut self.units[unit_index];
        let queue_ticks = unit.transfer_out(request.tick, bytes);
        let mut response = CacheResponse {
            ready_tick: request.tick + unit.latency_ticks + queue_ticks,
            queue_ticks,
            origin: DataOrigin::Hit(unit.level),
            is_exclusive: meta.state() >= EXCLUSIVE,
            is_dirty: meta.state() == MODIFIED,
        };

        // Other caches above this one may share the line, or may have kept it when the level between evicted it.
        let span_shift = self.units[child].line_shift;
        let action = if request.is_store {
            SnoopAction::Invalidate
        } else {
            SnoopAction::Share
        };
        let copies = self.snoop_siblings(unit_index, child, !0, request, span_shift, action);
        response.is_exclusive &= !copies.is_present || request.is_store;
        // Dirty implies owned, so a line that becomes shared is written back.
        if (copies.is_dirty && !request.is_store) || (response.is_dirty && !response.is_exclusive) {
            self.write_back(self.units[unit_index].parent, bytes, request, counters);
            response.is_dirty = false;
        }

        if request.is_store && meta.state() == SHARED && !copies.is_exclusive {
            response.ready_tick = response
                .ready_tick
                .max(request.tick + self.invalidate_other_copies(unit_index, request));
        }
        response.is_exclusive |= request.is_store;
        response
    }

    /// Fetches a line that the cache at `unit_index` lacks too; the miss has been counted. `was_cached` is the result
    /// of [`CacheUnit::was_cached`].
    pub fn fetch_missed_line(
        &mut self,
        unit_index: usize,
        child: usize,
        line: u64,
        was_cached: bool,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &self.units[unit_index];
        let (span_shift, is_victim, parent) = (unit.line_shift, unit.is_victim(), unit.parent);
        if request.is_write_through && unit.write_policy == WritePolicy::Through {
            return self.forward_store(unit_index, request, counters);
        }

        let mut sharers = self.units[child].sharer_bit;
        let child_shift = self.units[child].line_shift;
        let mut copies = SnoopResult::default();
        if unit.inclusion != Inclusion::Inclusive && unit.children.len() > 1 && was_cached {
            let action = if request.is_store {
                SnoopAction::Invalidate
            } else {
                SnoopAction::Share
            };
            copies = self.snoop_siblings(
                unit_index,
                child,
                !0,
                request,
                if is_victim { child_shift } else { span_shift },
                action,
            );
        }
        let mut response = if copies.is_present {
            let latency = self.remote_latency_ticks(request, copies);
            counters.remote_cache_hits += u64::from(!request.is_prefetch);
            if !is_victim && parent != ROOT && self.units[parent].is_victim() {
                // The sector must not remain in the victim cache once a nearer cache has it again.
                let state = self.remove_victim_sector(parent, request, span_shift);
                copies.is_exclusive |= state >= EXCLUSIVE;
                copies.is_dirty |= state == MODIFIED;
            }
            if request.is_store && !copies.is_exclusive {
                self.invalidate_other_copies(unit_index, request);
            }
            if is_victim && copies.is_dirty && !request.is_store {
                self.write_back(parent, 1 << child_shift, request, counters);
                copies.is_dirty = false;
            }
            if !request.is_store {
                sharers = !0;
            }
            let is_exclusive = copies.is_exclusive || request.is_store;
            CacheResponse {
                ready_tick: request.tick + latency,
                queue_ticks: 0,
                origin: DataOrigin::RemoteCache,
                is_exclusive,
                is_dirty: copies.is_dirty,
            }
        } else {
            self.fetch(
                parent,
                unit_index,
                &CacheRequest {
                    is_write_through: false,
                    ..*request
                },
                counters,
            )
        };
        if !is_victim {
            let state = match () {
                () if request.is_write_through || response.is_dirty => MODIFIED,
                () if response.is_exclusive => EXCLUSIVE,
                () => SHARED,
            };
            response.is_dirty = false;
            let meta = LineMeta::new(state, sharers & ALL_SHARERS, request.task);
            self.fill(unit_index, LineMeta(meta.0 | PENDING), request, counters);
            self.units[unit_index].pending_fills.add(
                line,
                response.ready_tick,
                response.origin,
                request.tick,
            );
        }
        if !request.is_write_through {
            let queue_ticks = self.units[unit_index]
                .transfer_out(request.tick + response.queue_ticks, 1 << child_shift);
            response.queue_ticks += queue_ticks;
            response.ready_tick += queue_ticks;
        }
        response.is_exclusive &= !copies.is_present || request.is_store;
        if !request.is_prefetch {
            self.record_prefetches(unit_index, line, request);
        }
        response
    }

    /// Handles a request that no cache on the path can serve: other roots, or memory.
    fn access_memory(
        &mut self,
        root: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let bytes = 1u64 << self.units[root].line_shift.min(self.directory_shift);
        let copies = self.snoop_other_roots(
            root,
            request,
            if request.is_store {
                SnoopAction::Invalidate
            } else {
                SnoopAction::Share
            },
        );
        if copies.is_present {
            if copies.is_dirty && !request.is_store {
                counters.memory_write_bytes += bytes;
                self.dram
                    .write(request.address, request.package, bytes, request.tick);
            }
            counters.remote_cache_hits += u64::from(!request.is_prefetch);
            return CacheResponse {
                ready_tick: request.tick + self.remote_latency_ticks(request, copies),
                queue_ticks: 0,
                origin: DataOrigin::RemoteCache,
                is_exclusive: request.is_store,
                is_dirty: copies.is_dirty && request.is_store,
            };
        }
        let (latency_ticks, queued_ticks, origin) = self.dram.read(
            request.address,
            request.reader(),
            bytes,
            request.tick,
            request.is_prefetch,
        );
        counters.memory_read_bytes += bytes;
        CacheResponse {
            ready_tick: request.tick + latency_ticks + queued_ticks,
            queue_ticks: queued_ticks,
            origin,
            is_exclusive: true,
            is_dirty: false,
        }
    }

    /// Records the lines that the prefetchers expect next after a demand miss, or after the first hit on a prefetched
    /// line.
    pub fn record_prefetches(&mut self, index: usize, line: u64, request: &CacheRequest) {
        if let Some(prefetcher) = &mut self.units[index].prefetcher {
            let free_room_permille = || {
                self.dram
                    .free_room_permille(request.address, request.reader(), request.tick)
            };
            prefetcher.observe_demand(line, free_room_permille, |line| {
                self.due_prefetches.push((index, line))
            });
        }
    }

    /// Starts prefetches, as far as bus and memory have room for them.
    #[inline(never)]
    pub fn start_prefetches(&mut self, request: &CacheRequest, counters: &mut TaskCounters) {
        let due_prefetches = std::mem::take(&mut self.due_prefetches);

        for &(unit_index, line) in &due_prefetches {
            let unit = &self.units[unit_index];
            let address = line << unit.line_shift;
            let prefetch_request = CacheRequest {
                address,
                is_store: false,
                is_write_through: false,
                is_prefetch: true,
                ..*request
            };

            if unit.store.find(line).is_some()
                || !self
                    .dram
                    .has_free_room(address, request.reader(), request.tick)
            {
                continue;
            }

            let response = self.fetch(unit.parent, unit_index, &prefetch_request, counters);
            let unit = &mut self.units[unit_index];
            unit.counters.prefetches += 1;
            self.first_level_prefetches += u32::from(unit.level == CacheLevel::L1Data);
            let can_own_lines =
                unit.level != CacheLevel::L1Instruction && unit.write_policy == WritePolicy::Back;
            let state = match () {
                () if response.is_dirty => MODIFIED,
                () if response.is_exclusive && can_own_lines => EXCLUSIVE,
                () => SHARED,
            };

            let sharers = if unit.inclusion == Inclusion::Inclusive {
                0
            } else {
                ALL_SHARERS
            };
            let meta =
                LineMeta(LineMeta::new(state, sharers, request.task).0 | PENDING | PREFETCHED);
            unit.pending_fills
                .add(line, response.ready_tick, response.origin, request.tick);
            self.fill(unit_index, meta, &prefetch_request, counters);
        }

        self.due_prefetches = due_prefetches;
        self.due_prefetches.clear();
    }
}
