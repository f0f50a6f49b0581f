//! The path of one request: L1, the further levels, other caches, memory.

use cachemate_core::{CacheLevel, Inclusion, WritePolicy};

use super::cache_unit::{DataOrigin, ROOT};
use super::caches::{CacheRequest, CacheResponse, Caches, SnoopAction, SnoopResult};
use super::core_kind::{AnyCore, CoreKind};
use super::counters::TaskCounters;
use super::store::{ALL_SHARERS, EXCLUSIVE, LineMeta, MODIFIED, PENDING, PREFETCHED, SHARED, SHARER_BITS, SPECIAL};

/// Number of bytes of a write-through store.
const STORE_BYTES: u64 = 8;

impl Caches {
    /// Handles a request at an L1 that is not a plain hit there. Counts the reference and its consequences. `place` is
    /// the line's position in the L1.
    #[inline(always)]
    pub fn first_level<K: CoreKind>(
        &mut self,
        l1: usize,
        place: Option<usize>,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        self.first_level_prefetches = 0;
        if let Some(response) = self.access_next_level::<K>(l1, place, request, counters) {
            return response;
        }
        self.access_slow(l1, place, request, counters)
    }

    /// Handles a request on the slow path, if the fast path does not handle it.
    #[inline(never)]
    fn access_slow(
        &mut self,
        l1: usize,
        place: Option<usize>,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let response = self.access_hierarchy(l1, place, request, counters);
        if !self.due.is_empty() {
            self.start_prefetches(request, counters);
        }
        response
    }

    fn access_hierarchy(
        &mut self,
        l1: usize,
        place: Option<usize>,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &mut self.units[l1];
        let (level, line, parent) = (unit.level, request.address >> unit.line_shift, unit.parent);
        let stores_through = request.store && unit.write == WritePolicy::Through;
        counters.levels[level as usize].references += 1;
        unit.counters.demand.references += 1;
        if let Some(place) = place {
            unit.store.touch(line, place);
            let meta = unit.store.line_meta(place);
            let mut response = self.wait_for_fill(l1, line, place, request, counters);
            if stores_through {
                let next_answer = self.fetch(parent, l1, &CacheRequest { through: true, ..*request }, counters);
                response = CacheResponse { ready_tick: response.ready_tick.max(next_answer.ready_tick), ..next_answer };
            } else if request.store {
                if meta.state() == SHARED {
                    response.ready_tick =
                        response.ready_tick.max(request.tick + self.invalidate_other_copies(l1, request));
                    response.served = DataOrigin::RemoteCache;
                }
                let store = &mut self.units[l1].store;
                if let Some(place) = store.find(line) {
                    let meta = store.line_meta(place);
                    store.set_meta(place, meta.with_state(MODIFIED));
                }
            }
            return response;
        }
        self.units[l1].count_miss(line, request.task, counters);
        let response = self.fetch(parent, l1, &CacheRequest { through: stores_through, ..*request }, counters);
        if !stores_through {
            self.fill_first_level::<AnyCore>(l1, line, &response, request, counters);
        }
        self.note_prefetches(l1, line, request);
        response
    }

    /// Handles a hit: returns when the data arrives, which is later if the line is still being filled. Records the
    /// first demand for a prefetched line.
    fn wait_for_fill(
        &mut self,
        at: usize,
        line: u64,
        place: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &mut self.units[at];
        let mut meta = unit.store.line_meta(place);
        let mut response = CacheResponse {
            ready_tick: request.tick + unit.latency,
            queue: 0,
            served: DataOrigin::Hit(unit.level),
            exclusive: meta.state() >= EXCLUSIVE,
            dirty: false,
        };
        if meta.0 & SPECIAL == 0 {
            return response;
        }
        if meta.0 & PENDING != 0 {
            match unit.pending.pending_fill(line) {
                Some((done, served)) if done > response.ready_tick => {
                    (response.ready_tick, response.served) = (done, served)
                }
                _ => meta.0 &= !PENDING,
            }
        }
        let first_use = meta.0 & PREFETCHED != 0 && !request.prefetch;
        if first_use {
            meta.0 &= !PREFETCHED;
            counters.levels[unit.level as usize].prefetch_hits += 1;
            unit.counters.demand.prefetch_hits += 1;
        }
        unit.store.set_meta(place, meta);
        if first_use {
            self.note_prefetches(at, line, request);
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
        if !request.prefetch {
            counters.levels[unit.level as usize].references += 1;
            unit.counters.demand.references += 1;
        }
        let victim = unit.is_victim();
        let place = unit.store.find(line);
        if let Some(place) = place
            && let Some(response) = self.serve_plain_hit(index, child, line, place, request)
        {
            return response;
        }
        let unit = &self.units[index];
        let sector = unit.sector_mask(request.address, child_shift);
        match place.filter(|&place| !victim || unit.store.line_meta(place).sharers() & sector != 0) {
            Some(place) if victim => self.hit_victim(index, child, place, request, counters),
            Some(place) => self.serve_hit(index, child, line, place, request, counters),
            None => {
                if !request.prefetch {
                    self.units[index].count_miss(line, request.task, counters);
                }
                let was_cached = self.units[index].was_cached(line);
                self.fetch_missed_line(index, child, line, was_cached, request, counters)
            }
        }
    }

    /// Handles a hit that involves no other cache above this one, as most hits do. `None` for another kind of hit; in
    /// that case nothing was done.
    #[inline]
    fn serve_plain_hit(
        &mut self,
        at: usize,
        child: usize,
        line: u64,
        place: usize,
        request: &CacheRequest,
    ) -> Option<CacheResponse> {
        let (child_shift, bit) = (self.units[child].line_shift, self.units[child].bit);
        let unit = &mut self.units[at];
        let meta = unit.store.line_meta(place);
        if !unit.is_plain(meta, bit, request.store) {
            return None;
        }
        unit.store.touch(line, place);
        Some(unit.serve_plain_line(line, place, (!request.through).then_some((1 << child_shift, bit)), request.tick))
    }

    fn serve_hit(
        &mut self,
        at: usize,
        child: usize,
        line: u64,
        place: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let (child_shift, bit) = (self.units[child].line_shift, self.units[child].bit);
        self.units[at].store.touch(line, place);
        let mut response = self.wait_for_fill(at, line, place, request, counters);
        let mut meta = self.units[at].store.line_meta(place);
        if !request.through {
            response.queue = self.units[at].transfer_out(request.tick, 1 << child_shift);
            response.ready_tick += response.queue;
        }
        let unit = &self.units[at];
        let crowded = unit.children.len() > SHARER_BITS as usize;
        if (crowded || meta.sharers() & !bit != 0) && (request.store || unit.children_own) {
            let action = if request.store { SnoopAction::Invalidate } else { SnoopAction::Share };
            let copies = self.snoop_siblings(at, child, meta.sharers(), request, child_shift, action);
            if copies.dirty {
                meta = meta.with_state(MODIFIED);
                response.ready_tick =
                    response.ready_tick.max(request.tick + self.same_package.unwrap_or(0) + response.queue);
                response.served = DataOrigin::RemoteCache;
                counters.remote_cache_hits += u64::from(!request.prefetch);
            }
            response.exclusive &= !copies.is_present || request.store;
            if child_shift == self.units[at].line_shift && !crowded && (request.store || !copies.is_present) {
                meta = meta.with_sharers(meta.sharers() & bit);
            }
        }
        if request.store && meta.state() == SHARED {
            response.ready_tick = response.ready_tick.max(request.tick + self.invalidate_other_copies(at, request));
            response.exclusive = true;
            meta = meta.with_state(EXCLUSIVE);
        }
        if request.through {
            match self.units[at].write {
                WritePolicy::Back => meta = meta.with_state(MODIFIED),
                WritePolicy::Through => response = self.pass_store(at, request, counters),
            }
        } else {
            meta = meta.with_sharers(meta.sharers() | bit);
        }
        self.units[at].store.set_meta(place, meta);
        response
    }

    /// Passes a store on from a cache that writes through.
    fn pass_store(&mut self, index: usize, request: &CacheRequest, counters: &mut TaskCounters) -> CacheResponse {
        let parent = self.units[index].parent;
        if parent != ROOT {
            return self.fetch(parent, index, request, counters);
        }
        let copies = self.snoop_other_roots(index, request, SnoopAction::Invalidate);
        counters.memory_write_bytes += STORE_BYTES;
        self.dram.write(request.address, request.package, STORE_BYTES, request.tick);
        let latency = if copies.is_present { self.remote_latency(request, copies) } else { self.units[index].latency };
        CacheResponse {
            ready_tick: request.tick + latency,
            queue: 0,
            served: DataOrigin::Hit(self.units[index].level),
            exclusive: true,
            dirty: false,
        }
    }

    /// Removes a sector from a victim cache. Returns the state that it had, or 0 if it was not there.
    fn take_victim_sector(&mut self, index: usize, request: &CacheRequest, child_shift: u32) -> u32 {
        let unit = &mut self.units[index];
        let (line, sector) = (request.address >> unit.line_shift, unit.sector_mask(request.address, child_shift));
        let Some(place) = unit.store.find(line) else { return 0 };
        let meta = unit.store.line_meta(place);
        if meta.sharers() & sector == 0 {
            return 0;
        }
        let remaining_sharers = meta.sharers() & !sector;
        if remaining_sharers == 0 {
            unit.store.remove(place);
            unit.record_removal(line, meta, Some(request.task));
        } else {
            unit.store.set_meta(place, meta.with_sharers(remaining_sharers));
        }
        meta.state()
    }

    /// Moves the line back to the level above.
    fn hit_victim(
        &mut self,
        at: usize,
        child: usize,
        place: usize,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let bytes = 1 << self.units[child].line_shift;
        let unit = &mut self.units[at];
        let meta = unit.store.line_meta(place);
        self.take_victim_sector(at, request, self.units[child].line_shift);
        let unit = &mut self.units[at];
        let queue = unit.transfer_out(request.tick, bytes);
        let mut response = CacheResponse {
            ready_tick: request.tick + unit.latency + queue,
            queue,
            served: DataOrigin::Hit(unit.level),
            exclusive: meta.state() >= EXCLUSIVE,
            dirty: meta.state() == MODIFIED,
        };
        // Other caches above this one may share the line, or may have kept it when the level between evicted it.
        let span = self.units[child].line_shift;
        let action = if request.store { SnoopAction::Invalidate } else { SnoopAction::Share };
        let copies = self.snoop_siblings(at, child, !0, request, span, action);
        response.exclusive &= !copies.is_present || request.store;
        // Dirty implies owned, so a line that becomes shared is written back.
        if (copies.dirty && !request.store) || (response.dirty && !response.exclusive) {
            self.write_back(self.units[at].parent, bytes, request, counters);
            response.dirty = false;
        }
        if request.store && meta.state() == SHARED && !copies.exclusive {
            response.ready_tick = response.ready_tick.max(request.tick + self.invalidate_other_copies(at, request));
        }
        response.exclusive |= request.store;
        response
    }

    /// Fetches a line that the cache at `at` lacks too; the miss has been counted. `was_cached` is the result of
    /// [`CacheUnit::was_cached`].
    pub fn fetch_missed_line(
        &mut self,
        at: usize,
        child: usize,
        line: u64,
        was_cached: bool,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &self.units[at];
        let (span, victim, parent) = (unit.line_shift, unit.is_victim(), unit.parent);
        if request.through && unit.write == WritePolicy::Through {
            return self.pass_store(at, request, counters);
        }
        let mut sharers = self.units[child].bit;
        let child_shift = self.units[child].line_shift;
        let mut copies = SnoopResult::default();
        if unit.inclusion != Inclusion::Inclusive && unit.children.len() > 1 && was_cached {
            let action = if request.store { SnoopAction::Invalidate } else { SnoopAction::Share };
            copies = self.snoop_siblings(at, child, !0, request, if victim { child_shift } else { span }, action);
        }
        let mut response = if copies.is_present {
            let latency = self.remote_latency(request, copies);
            counters.remote_cache_hits += u64::from(!request.prefetch);
            if !victim && parent != ROOT && self.units[parent].is_victim() {
                // The sector must not remain in the victim cache once a nearer cache has it again.
                let state = self.take_victim_sector(parent, request, span);
                copies.exclusive |= state >= EXCLUSIVE;
                copies.dirty |= state == MODIFIED;
            }
            if request.store && !copies.exclusive {
                self.invalidate_other_copies(at, request);
            }
            if victim && copies.dirty && !request.store {
                self.write_back(parent, 1 << child_shift, request, counters);
                copies.dirty = false;
            }
            if !request.store {
                sharers = !0;
            }
            let exclusive = copies.exclusive || request.store;
            CacheResponse {
                ready_tick: request.tick + latency,
                queue: 0,
                served: DataOrigin::RemoteCache,
                exclusive,
                dirty: copies.dirty,
            }
        } else {
            self.fetch(parent, at, &CacheRequest { through: false, ..*request }, counters)
        };
        if !victim {
            let state = match () {
                () if request.through || response.dirty => MODIFIED,
                () if response.exclusive => EXCLUSIVE,
                () => SHARED,
            };
            response.dirty = false;
            let meta = LineMeta::new(state, sharers & ALL_SHARERS, request.task);
            self.fill(at, LineMeta(meta.0 | PENDING), request, counters);
            self.units[at].pending.add(line, response.ready_tick, response.served, request.tick);
        }
        if !request.through {
            let queue = self.units[at].transfer_out(request.tick + response.queue, 1 << child_shift);
            response.queue += queue;
            response.ready_tick += queue;
        }
        response.exclusive &= !copies.is_present || request.store;
        if !request.prefetch {
            self.note_prefetches(at, line, request);
        }
        response
    }

    /// Handles a request that no cache on the path can serve: other roots, or memory.
    fn access_memory(&mut self, root: usize, request: &CacheRequest, counters: &mut TaskCounters) -> CacheResponse {
        let bytes = 1u64 << self.units[root].line_shift.min(self.directory_shift);
        let copies = self.snoop_other_roots(
            root,
            request,
            if request.store { SnoopAction::Invalidate } else { SnoopAction::Share },
        );
        if copies.is_present {
            if copies.dirty && !request.store {
                counters.memory_write_bytes += bytes;
                self.dram.write(request.address, request.package, bytes, request.tick);
            }
            counters.remote_cache_hits += u64::from(!request.prefetch);
            return CacheResponse {
                ready_tick: request.tick + self.remote_latency(request, copies),
                queue: 0,
                served: DataOrigin::RemoteCache,
                exclusive: request.store,
                dirty: copies.dirty && request.store,
            };
        }
        let (latency, queue, served) =
            self.dram.read(request.address, request.package, bytes, request.tick, request.prefetch);
        counters.memory_read_bytes += bytes;
        CacheResponse { ready_tick: request.tick + latency + queue, queue, served, exclusive: true, dirty: false }
    }

    /// Records the lines that the prefetchers expect next after a demand miss, or after the first hit on a prefetched
    /// line.
    pub fn note_prefetches(&mut self, index: usize, line: u64, request: &CacheRequest) {
        if let Some(fetcher) = &mut self.units[index].prefetcher {
            let room = || self.dram.free_room_permille(request.address, request.package, request.tick);
            fetcher.observe_demand(line, room, |line| self.due.push((index, line)));
        }
    }

    /// Starts prefetches, as far as bus and memory have room for them.
    #[inline(never)]
    pub fn start_prefetches(&mut self, request: &CacheRequest, counters: &mut TaskCounters) {
        let due = std::mem::take(&mut self.due);
        for &(at, line) in &due {
            let unit = &self.units[at];
            let address = line << unit.line_shift;
            let next = CacheRequest { address, store: false, through: false, prefetch: true, ..*request };
            if unit.store.find(line).is_some() || !self.dram.has_free_room(address, request.package, request.tick) {
                continue;
            }
            let response = self.fetch(unit.parent, at, &next, counters);
            let unit = &mut self.units[at];
            unit.counters.prefetches += 1;
            self.first_level_prefetches += u32::from(unit.level == CacheLevel::L1Data);
            let owns = unit.level != CacheLevel::L1Instruction && unit.write == WritePolicy::Back;
            let state = match () {
                () if response.dirty => MODIFIED,
                () if response.exclusive && owns => EXCLUSIVE,
                () => SHARED,
            };
            let sharers = if unit.inclusion == Inclusion::Inclusive { 0 } else { ALL_SHARERS };
            let meta = LineMeta(LineMeta::new(state, sharers, request.task).0 | PENDING | PREFETCHED);
            unit.pending.add(line, response.ready_tick, response.served, request.tick);
            self.fill(at, meta, &next, counters);
        }
        self.due = due;
        self.due.clear();
    }
}
