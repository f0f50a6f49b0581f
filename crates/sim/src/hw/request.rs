//! The path of one request: L1, the caches behind it, other caches, memory.

use cachemate_core::{CacheLevel, Inclusion, WritePolicy};

use super::cache_unit::{DataOrigin, ROOT};
use super::caches::{CacheRequest, CacheResponse, Caches, SnoopAction, SnoopResult};
use super::core_kind::CoreKind;
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
        ask: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        self.first_level_prefetches = 0;
        if let Some(answer) = self.access_next_level::<K>(l1, place, ask, counters) {
            return answer;
        }
        self.access_slow(l1, place, ask, counters)
    }

    /// The slow path, for everything that the fast one does not handle.
    #[inline(never)]
    fn access_slow(
        &mut self,
        l1: usize,
        place: Option<usize>,
        ask: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let answer = self.demand(l1, place, ask, counters);
        if !self.due.is_empty() {
            self.start_prefetches(ask, counters);
        }
        answer
    }

    fn demand(
        &mut self,
        l1: usize,
        place: Option<usize>,
        ask: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &mut self.units[l1];
        let (level, line, parent) = (unit.level, ask.address >> unit.line_shift, unit.parent);
        let through = ask.store && unit.write == WritePolicy::Through;
        counters.levels[level as usize].references += 1;
        unit.counters.demand.references += 1;
        if let Some(place) = place {
            unit.store.touch(line, place);
            let meta = unit.store.meta(place);
            let mut answer = self.wait_for_fill(l1, line, place, ask, counters);
            if through {
                let beyond = self.fetch(parent, l1, &CacheRequest { through: true, ..*ask }, counters);
                answer = CacheResponse { ready_tick: answer.ready_tick.max(beyond.ready_tick), ..beyond };
            } else if ask.store {
                if meta.state() == SHARED {
                    answer.ready_tick = answer.ready_tick.max(ask.at + self.upgrade(l1, ask));
                    answer.served = DataOrigin::RemoteCache;
                }
                let store = &mut self.units[l1].store;
                if let Some(place) = store.find(line) {
                    let meta = store.meta(place);
                    store.set_meta(place, meta.with_state(MODIFIED));
                }
            }
            return answer;
        }
        self.units[l1].miss(line, ask.task, counters);
        let answer = self.fetch(parent, l1, &CacheRequest { through, ..*ask }, counters);
        if !through {
            let state = match () {
                () if ask.store => MODIFIED,
                () if level == CacheLevel::L1Instruction || self.units[l1].write == WritePolicy::Through => SHARED,
                () if answer.dirty => MODIFIED,
                () if answer.exclusive => EXCLUSIVE,
                () => SHARED,
            };
            self.fill(l1, LineMeta(LineMeta::new(state, 0, ask.task).0 | PENDING), ask, counters);
            self.units[l1].pending.add(line, answer.ready_tick, answer.served, ask.at);
        }
        self.note_prefetches(l1, line, ask);
        answer
    }

    /// Handles a hit: returns when the data arrives, which is later if the line is still being filled. Records the
    /// first demand for a prefetched line.
    fn wait_for_fill(
        &mut self,
        at: usize,
        line: u64,
        place: usize,
        ask: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &mut self.units[at];
        let mut meta = unit.store.meta(place);
        let mut answer = CacheResponse {
            ready_tick: ask.at + unit.latency,
            queue: 0,
            served: DataOrigin::Hit(unit.level),
            exclusive: meta.state() >= EXCLUSIVE,
            dirty: false,
        };
        if meta.0 & SPECIAL == 0 {
            return answer;
        }
        if meta.0 & PENDING != 0 {
            match unit.pending.pending_fill(line) {
                Some((done, served)) if done > answer.ready_tick => (answer.ready_tick, answer.served) = (done, served),
                _ => meta.0 &= !PENDING,
            }
        }
        let first_use = meta.0 & PREFETCHED != 0 && !ask.prefetch;
        if first_use {
            meta.0 &= !PREFETCHED;
            counters.levels[unit.level as usize].prefetch_hits += 1;
            unit.counters.demand.prefetch_hits += 1;
        }
        unit.store.set_meta(place, meta);
        if first_use {
            self.note_prefetches(at, line, ask);
        }
        answer
    }

    /// Requests a line that `child` lacks (or writes through) from the cache behind it.
    fn fetch(&mut self, index: usize, child: usize, ask: &CacheRequest, counters: &mut TaskCounters) -> CacheResponse {
        if index == ROOT {
            return self.access_memory(child, ask, counters);
        }
        let below = self.units[child].line_shift;
        let unit = &mut self.units[index];
        let line = ask.address >> unit.line_shift;
        if !ask.prefetch {
            counters.levels[unit.level as usize].references += 1;
            unit.counters.demand.references += 1;
        }
        let victim = unit.is_victim();
        let place = unit.store.find(line);
        if let Some(place) = place
            && let Some(answer) = self.serve_plain_hit(index, child, line, place, ask)
        {
            return answer;
        }
        let unit = &self.units[index];
        let sector = unit.sector(ask.address, below);
        match place.filter(|&place| !victim || unit.store.meta(place).sharers() & sector != 0) {
            Some(place) if victim => self.hit_victim(index, child, place, ask, counters),
            Some(place) => self.hit(index, child, line, place, ask, counters),
            None => {
                if !ask.prefetch {
                    self.units[index].miss(line, ask.task, counters);
                }
                let known = self.units[index].was_cached(line);
                self.miss(index, child, line, known, ask, counters)
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
        ask: &CacheRequest,
    ) -> Option<CacheResponse> {
        let (below, bit) = (self.units[child].line_shift, self.units[child].bit);
        let unit = &mut self.units[at];
        let meta = unit.store.meta(place);
        if !unit.is_plain(meta, bit, ask.store) {
            return None;
        }
        unit.store.touch(line, place);
        let mut queue = 0;
        if ask.through {
            unit.store.set_meta(place, meta.with_state(MODIFIED));
        } else {
            queue = unit.transfer_out(ask.at, 1 << below);
            unit.store.set_meta(place, meta.with_sharers(meta.sharers() | bit));
        }
        Some(CacheResponse {
            ready_tick: ask.at + unit.latency + queue,
            queue,
            served: DataOrigin::Hit(unit.level),
            exclusive: meta.state() >= EXCLUSIVE,
            dirty: false,
        })
    }

    fn hit(
        &mut self,
        at: usize,
        child: usize,
        line: u64,
        place: usize,
        ask: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let (below, bit) = (self.units[child].line_shift, self.units[child].bit);
        self.units[at].store.touch(line, place);
        let mut answer = self.wait_for_fill(at, line, place, ask, counters);
        let mut meta = self.units[at].store.meta(place);
        if !ask.through {
            answer.queue = self.units[at].transfer_out(ask.at, 1 << below);
            answer.ready_tick += answer.queue;
        }
        let unit = &self.units[at];
        let crowded = unit.children.len() > SHARER_BITS as usize;
        if (crowded || meta.sharers() & !bit != 0) && (ask.store || unit.children_own) {
            let action = if ask.store { SnoopAction::Take } else { SnoopAction::Share };
            let held = self.siblings(at, child, meta.sharers(), ask, below, action);
            if held.dirty {
                meta = meta.with_state(MODIFIED);
                answer.ready_tick = answer.ready_tick.max(ask.at + self.same_package.unwrap_or(0) + answer.queue);
                answer.served = DataOrigin::RemoteCache;
                counters.remote_cache_hits += u64::from(!ask.prefetch);
            }
            answer.exclusive &= !held.any || ask.store;
            if below == self.units[at].line_shift && !crowded && (ask.store || !held.any) {
                meta = meta.with_sharers(meta.sharers() & bit);
            }
        }
        if ask.store && meta.state() == SHARED {
            answer.ready_tick = answer.ready_tick.max(ask.at + self.upgrade(at, ask));
            answer.exclusive = true;
            meta = meta.with_state(EXCLUSIVE);
        }
        if ask.through {
            match self.units[at].write {
                WritePolicy::Back => meta = meta.with_state(MODIFIED),
                WritePolicy::Through => answer = self.pass_store(at, ask, counters),
            }
        } else {
            meta = meta.with_sharers(meta.sharers() | bit);
        }
        self.units[at].store.set_meta(place, meta);
        answer
    }

    /// Passes a store on from a cache that writes through.
    fn pass_store(&mut self, index: usize, ask: &CacheRequest, counters: &mut TaskCounters) -> CacheResponse {
        let parent = self.units[index].parent;
        if parent != ROOT {
            return self.fetch(parent, index, ask, counters);
        }
        let held = self.other_roots(index, ask, SnoopAction::Take);
        counters.memory_write_bytes += STORE_BYTES;
        self.dram.write(ask.address, ask.package, STORE_BYTES, ask.at);
        let latency = if held.any { self.remote_latency(ask, held) } else { self.units[index].latency };
        CacheResponse {
            ready_tick: ask.at + latency,
            queue: 0,
            served: DataOrigin::Hit(self.units[index].level),
            exclusive: true,
            dirty: false,
        }
    }

    /// Removes a sector from a victim cache. Returns the state that it had, or 0 if it was not there.
    fn withdraw(&mut self, index: usize, ask: &CacheRequest, below: u32) -> u32 {
        let unit = &mut self.units[index];
        let (line, sector) = (ask.address >> unit.line_shift, unit.sector(ask.address, below));
        let Some(place) = unit.store.find(line) else { return 0 };
        let meta = unit.store.meta(place);
        if meta.sharers() & sector == 0 {
            return 0;
        }
        let remaining_sharers = meta.sharers() & !sector;
        if remaining_sharers == 0 {
            unit.store.remove(place);
            unit.record_removal(line, meta, Some(ask.task));
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
        ask: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let bytes = 1 << self.units[child].line_shift;
        let unit = &mut self.units[at];
        let meta = unit.store.meta(place);
        self.withdraw(at, ask, self.units[child].line_shift);
        let unit = &mut self.units[at];
        let queue = unit.transfer_out(ask.at, bytes);
        let mut answer = CacheResponse {
            ready_tick: ask.at + unit.latency + queue,
            queue,
            served: DataOrigin::Hit(unit.level),
            exclusive: meta.state() >= EXCLUSIVE,
            dirty: meta.state() == MODIFIED,
        };
        // Other caches above this one may share the line, or may have kept it when the level between evicted it.
        let span = self.units[child].line_shift;
        let action = if ask.store { SnoopAction::Take } else { SnoopAction::Share };
        let held = self.siblings(at, child, !0, ask, span, action);
        answer.exclusive &= !held.any || ask.store;
        // Dirty implies owned, so a line that becomes shared is written back.
        if (held.dirty && !ask.store) || (answer.dirty && !answer.exclusive) {
            self.write_back(self.units[at].parent, bytes, ask, counters);
            answer.dirty = false;
        }
        if ask.store && meta.state() == SHARED && !held.exclusive {
            answer.ready_tick = answer.ready_tick.max(ask.at + self.upgrade(at, ask));
        }
        answer.exclusive |= ask.store;
        answer
    }

    /// Fetches a line that the cache at `at` lacks too; the miss has been counted. `was_cached` is the result of
    /// [`CacheUnit::was_cached`].
    pub fn miss(
        &mut self,
        at: usize,
        child: usize,
        line: u64,
        was_cached: bool,
        ask: &CacheRequest,
        counters: &mut TaskCounters,
    ) -> CacheResponse {
        let unit = &self.units[at];
        let (span, victim, parent) = (unit.line_shift, unit.is_victim(), unit.parent);
        if ask.through && unit.write == WritePolicy::Through {
            return self.pass_store(at, ask, counters);
        }
        let mut sharers = self.units[child].bit;
        let below = self.units[child].line_shift;
        let mut held = SnoopResult::default();
        if unit.inclusion != Inclusion::Inclusive && unit.children.len() > 1 && was_cached {
            let action = if ask.store { SnoopAction::Take } else { SnoopAction::Share };
            held = self.siblings(at, child, !0, ask, if victim { below } else { span }, action);
        }
        let mut answer = if held.any {
            let latency = self.remote_latency(ask, held);
            counters.remote_cache_hits += u64::from(!ask.prefetch);
            if !victim && parent != ROOT && self.units[parent].is_victim() {
                // The sector must not remain behind a cache that has it again.
                let state = self.withdraw(parent, ask, span);
                held.exclusive |= state >= EXCLUSIVE;
                held.dirty |= state == MODIFIED;
            }
            if ask.store && !held.exclusive {
                self.upgrade(at, ask);
            }
            if victim && held.dirty && !ask.store {
                self.write_back(parent, 1 << below, ask, counters);
                held.dirty = false;
            }
            if !ask.store {
                sharers = !0;
            }
            let exclusive = held.exclusive || ask.store;
            CacheResponse {
                ready_tick: ask.at + latency,
                queue: 0,
                served: DataOrigin::RemoteCache,
                exclusive,
                dirty: held.dirty,
            }
        } else {
            self.fetch(parent, at, &CacheRequest { through: false, ..*ask }, counters)
        };
        if !victim {
            let state = match () {
                () if ask.through || answer.dirty => MODIFIED,
                () if answer.exclusive => EXCLUSIVE,
                () => SHARED,
            };
            answer.dirty = false;
            let meta = LineMeta::new(state, sharers & ALL_SHARERS, ask.task);
            self.fill(at, LineMeta(meta.0 | PENDING), ask, counters);
            self.units[at].pending.add(line, answer.ready_tick, answer.served, ask.at);
        }
        if !ask.through {
            let queue = self.units[at].transfer_out(ask.at + answer.queue, 1 << below);
            answer.queue += queue;
            answer.ready_tick += queue;
        }
        answer.exclusive &= !held.any || ask.store;
        if !ask.prefetch {
            self.note_prefetches(at, line, ask);
        }
        answer
    }

    /// Handles a request that no cache on the path can serve: other roots, or memory.
    fn access_memory(&mut self, root: usize, ask: &CacheRequest, counters: &mut TaskCounters) -> CacheResponse {
        let bytes = 1u64 << self.units[root].line_shift.min(self.directory_shift);
        let held = self.other_roots(root, ask, if ask.store { SnoopAction::Take } else { SnoopAction::Share });
        if held.any {
            if held.dirty && !ask.store {
                counters.memory_write_bytes += bytes;
                self.dram.write(ask.address, ask.package, bytes, ask.at);
            }
            counters.remote_cache_hits += u64::from(!ask.prefetch);
            return CacheResponse {
                ready_tick: ask.at + self.remote_latency(ask, held),
                queue: 0,
                served: DataOrigin::RemoteCache,
                exclusive: ask.store,
                dirty: held.dirty && ask.store,
            };
        }
        let (latency, queue, served) = self.dram.read(ask.address, ask.package, bytes, ask.at, ask.prefetch);
        counters.memory_read_bytes += bytes;
        CacheResponse { ready_tick: ask.at + latency + queue, queue, served, exclusive: true, dirty: false }
    }

    /// Records the lines that the prefetchers expect next after a demand miss, or after the first hit on a prefetched
    /// line.
    pub fn note_prefetches(&mut self, index: usize, line: u64, ask: &CacheRequest) {
        if let Some(fetcher) = &mut self.units[index].prefetcher {
            let room = if fetcher.is_adaptive() {
                self.dram.free_room_permille(ask.address, ask.package, ask.at)
            } else {
                1000
            };
            fetcher.observe_demand(line, room, |line| self.due.push((index, line)));
        }
    }

    /// Starts prefetches, as far as bus and memory have room for them.
    #[inline(never)]
    pub fn start_prefetches(&mut self, ask: &CacheRequest, counters: &mut TaskCounters) {
        let due = std::mem::take(&mut self.due);
        for &(at, line) in &due {
            let unit = &self.units[at];
            let address = line << unit.line_shift;
            let next = CacheRequest { address, store: false, through: false, prefetch: true, ..*ask };
            if unit.store.find(line).is_some() || self.dram.free_room_permille(address, ask.package, ask.at) == 0 {
                continue;
            }
            let answer = self.fetch(unit.parent, at, &next, counters);
            let unit = &mut self.units[at];
            unit.counters.prefetches += 1;
            self.first_level_prefetches += u32::from(unit.level == CacheLevel::L1Data);
            let owns = unit.level != CacheLevel::L1Instruction && unit.write == WritePolicy::Back;
            let state = match () {
                () if answer.dirty => MODIFIED,
                () if answer.exclusive && owns => EXCLUSIVE,
                () => SHARED,
            };
            let sharers = if unit.inclusion == Inclusion::Inclusive { 0 } else { ALL_SHARERS };
            let meta = LineMeta(LineMeta::new(state, sharers, ask.task).0 | PENDING | PREFETCHED);
            unit.pending.add(line, answer.ready_tick, answer.served, ask.at);
            self.fill(at, meta, &next, counters);
        }
        self.due = due;
        self.due.clear();
    }
}
