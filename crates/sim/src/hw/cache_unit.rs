//! One cache of the tree: its tags and its state beyond the tags (fills in transit, prefetchers, history, counters).

use cachemate_core::{CacheLevel, CacheSpec, Inclusion, MachineSpec, PrefetcherSpec, WritePolicy};
use cachemate_locality::prefetch::Prefetcher;

use super::counters::{CacheCounters, MissCause, TaskCounters};
use super::line_table::LineTable;
use super::page_index::SetBits;
use super::server::BandwidthServer;
use super::store::{LineMeta, SHARER_BITS, TagStore};

/// Parent index of a cache whose next level is memory.
pub(crate) const ROOT: usize = usize::MAX;

/// The source of a request's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DataOrigin {
    Hit(CacheLevel),
    RemoteCache,
    LocalMemory,
    RemoteMemory,
}

/// Fills in progress: line, tick of arrival, and origin. The table is small; old entries are dropped when it is full.
#[derive(Default)]
pub(crate) struct PendingFills {
    fills: Vec<(u64, u64, DataOrigin)>,
    /// Number of entries above which the next insertion first drops the fills that have arrived.
    sweep_threshold: usize,
    /// Bit `line % 64` of every line in `fills`, because most lines that are looked up are not in it.
    line_bits: u64,
}

const MAX_PENDING: usize = 64;
const MIN_SWEEP_THRESHOLD: usize = 12;

impl PendingFills {
    /// Records that the line is being filled; an earlier fill of the line is replaced.
    #[inline]
    pub fn add(&mut self, line: u64, arrival: u64, origin: DataOrigin, now: u64) {
        let bit = 1 << (line % 64);
        if self.line_bits & bit != 0
            && let Some(earlier) = self.fills.iter_mut().rev().find(|entry| entry.0 == line)
        {
            *earlier = (line, arrival, origin);
            return;
        }
        if self.fills.len() >= self.sweep_threshold {
            self.drop_arrived_fills(now);
        }
        self.line_bits |= bit;
        self.fills.push((line, arrival, origin));
    }
    #[inline(never)]
    fn drop_arrived_fills(&mut self, now: u64) {
        self.fills.retain(|&(_, arrival, _)| arrival > now);
        if self.fills.len() >= MAX_PENDING {
            self.fills.remove(0);
        }
        self.line_bits = self
            .fills
            .iter()
            .fold(0, |bits, entry| bits | 1 << (entry.0 % 64));
        self.sweep_threshold = (2 * self.fills.len()).clamp(MIN_SWEEP_THRESHOLD, MAX_PENDING);
    }
    /// A line without a pending fill has arrived.
    #[inline]
    pub fn has_arrived(&self, line: u64, tick: u64) -> bool {
        self.pending_fill(line)
            .is_none_or(|(arrival, _)| arrival <= tick)
    }
    #[inline]
    pub fn pending_fill(&self, line: u64) -> Option<(u64, DataOrigin)> {
        if self.line_bits & 1 << (line % 64) == 0 {
            return None;
        }
        self.fills
            .iter()
            .rev()
            .find(|entry| entry.0 == line)
            .map(|&(_, arrival, origin)| (arrival, origin))
    }
}

/// Numbers of evicted lines by (evictor, owner); it grows with the task numbers.
#[derive(Default)]
pub(crate) struct EvictionMatrix {
    side_length: usize,
    counts: Vec<u64>,
}

impl EvictionMatrix {
    #[inline]
    pub fn add(&mut self, evictor: u16, owner: u16) {
        let (row, column) = (usize::from(evictor), usize::from(owner));
        if row.max(column) >= self.side_length {
            self.grow((row.max(column) + 1).next_power_of_two());
        }
        self.counts[row * self.side_length + column] += 1;
    }
    fn grow(&mut self, side_length: usize) {
        let mut counts = vec![0; side_length * side_length];
        for row in 0..self.side_length {
            let source_row = &self.counts[row * self.side_length..(row + 1) * self.side_length];
            counts[row * side_length..row * side_length + self.side_length]
                .copy_from_slice(source_row);
        }
        (self.side_length, self.counts) = (side_length, counts);
    }
    pub fn nonzero_counts(&self) -> impl Iterator<Item = (u16, u16, u64)> + '_ {
        let entries = self
            .counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0);
        entries.map(|(index, &count)| {
            (
                (index / self.side_length) as u16,
                (index % self.side_length) as u16,
                count,
            )
        })
    }
}

/// History word of a line that a store in another cache invalidated. The word is 0 if the line was never in the cache,
/// and the evictor + 2 if a task evicted it.
const LOST_TO_STORE: u16 = 1;

pub(crate) struct CacheUnit {
    pub level: CacheLevel,
    pub line_shift: u32,
    pub latency_ticks: u64,
    pub write_policy: WritePolicy,
    pub inclusion: Inclusion,
    /// Index of the cache behind this one, or [`ROOT`].
    pub parent: usize,
    /// This cache's bit in its parent's sharer masks.
    pub sharer_bit: u32,
    pub children: Vec<usize>,
    /// Whether a child can own a line; false if all children write through.
    pub can_children_own: bool,
    pub package: u32,
    /// Number of cores that share the cache.
    pub core_count: u32,
    /// Whether the next level serves all requests of this L1 without affecting other caches.
    pub is_next_level_private: bool,
    pub store: TagStore,
    pub pending_fills: PendingFills,
    pub output_server: Option<BandwidthServer>,
    pub prefetcher: Option<Prefetcher>,
    /// Way masks by class of service; `None` allows all ways.
    pub way_masks_by_class: Vec<Option<u64>>,
    pub counters: CacheCounters,
    /// Number of lines by owner.
    pub lines_by_owner: Vec<u32>,
    pub eviction_matrix: EvictionMatrix,
    /// The cause of the first miss on a line.
    pub first_miss_cause: MissCause,
    history: LineTable,
}

impl CacheUnit {
    pub fn new(
        machine: &MachineSpec,
        spec: &CacheSpec,
        instance: u32,
        ticks_per_cycle: u64,
        seed: u64,
    ) -> Self {
        let line_shift = spec.line_bytes.trailing_zeros();
        let page_shift = machine.pages.page_bytes.trailing_zeros();
        let prefetcher_specs =
            machine
                .prefetchers
                .iter()
                .copied()
                .filter(|fetcher| match fetcher {
                    PrefetcherSpec::Stride { level, .. }
                    | PrefetcherSpec::NextLine { level, .. }
                    | PrefetcherSpec::Streamer { level, .. }
                    | PrefetcherSpec::AdjacentLine { level } => *level == spec.level,
                });

        CacheUnit {
            level: spec.level,
            line_shift,
            latency_ticks: u64::from(spec.latency_cycles) * ticks_per_cycle,
            write_policy: spec.write,
            inclusion: spec.inclusion,
            parent: ROOT,
            sharer_bit: 1,
            children: Vec::new(),
            can_children_own: false,
            package: instance * spec.shared_by_cores / machine.cores_per_package,
            core_count: spec.shared_by_cores,
            is_next_level_private: false,
            store: TagStore::new(spec, SetBits::new(machine, spec), seed),
            pending_fills: PendingFills::default(),
            output_server: spec
                .bandwidth_bytes_per_cycle
                .map(|bytes| BandwidthServer::new(bytes, ticks_per_cycle)),
            prefetcher: Prefetcher::new(prefetcher_specs, page_shift.saturating_sub(line_shift)),
            way_masks_by_class: Vec::new(),
            counters: CacheCounters::default(),
            lines_by_owner: Vec::new(),
            eviction_matrix: EvictionMatrix::default(),
            first_miss_cause: MissCause::Cold,
            history: LineTable::new(page_shift.saturating_sub(line_shift)),
        }
    }

    pub fn is_victim(&self) -> bool {
        self.inclusion == Inclusion::Victim
    }

    /// Bits of `address` (a line of a cache with shorter lines) within this cache's line, which
    /// select its sector.
    pub fn sector_mask(&self, address: u64, child_line_shift: u32) -> u32 {
        1 << ((address >> child_line_shift & ((1 << (self.line_shift - child_line_shift)) - 1))
            as u32
            % SHARER_BITS)
    }

    /// If the line was not in this cache before, none of the caches above has a part of it either,
    /// because their lines came through this cache. For a victim cache, the result is always true.
    pub fn was_cached(&self, line: u64) -> bool {
        self.is_victim() || self.history.get(line) != 0
    }

    /// Counts a demand miss of a task, with its cause, for the task and for the cache. Returns whether the line has
    /// been here before.
    #[inline(always)]
    pub fn count_miss(&mut self, line: u64, task: u16, counters: &mut TaskCounters) -> bool {
        let last_loss = self.history.get(line);
        let cause = match last_loss {
            0 => self.first_miss_cause,
            LOST_TO_STORE => MissCause::Coherence,
            evictor if evictor - 2 == task => MissCause::Own,
            _ => MissCause::InterTask,
        } as usize;
        counters.levels[self.level as usize].misses[cause] += 1;
        self.counters.demand.misses[cause] += 1;
        last_loss != 0
    }

    /// Records that the line has just left. If `evictor` is `None`, a store elsewhere took it.
    #[inline(always)]
    pub fn record_eviction(&mut self, line: u64, meta: LineMeta, evictor: Option<u16>) {
        self.lines_by_owner[usize::from(meta.owner())] -= 1;
        *self.history.word_mut(line) = evictor.map_or(LOST_TO_STORE, |task| task + 2);
        match evictor {
            Some(task) => {
                self.counters.evictions += 1;
                self.eviction_matrix.add(task, meta.owner());
            }
            None => self.counters.invalidations += 1,
        }
    }

    /// Records that the line leaves without an eviction (a victim cache returned it, or its frame was reused).
    /// If `next_evictor` is set, the next miss on the line counts as if that task had evicted it.
    pub fn record_removal(&mut self, line: u64, meta: LineMeta, next_evictor: Option<u16>) {
        self.lines_by_owner[usize::from(meta.owner())] -= 1;
        *self.history.word_mut(line) = next_evictor.map_or(0, |task| task + 2);
    }

    /// Hints to the host that the line's history, and its set if requested, will be read.
    #[inline(always)]
    pub fn prefetch_host_line(&self, line: u64, prefetches_set: bool) {
        self.history.prefetch_host_entry(line);
        if prefetches_set {
            self.store.prefetch_host_set(line);
        }
    }

    pub fn clear_history(&mut self, line: u64) {
        *self.history.word_mut(line) = 0;
    }

    #[inline]
    pub fn record_arrival(&mut self, owner: u16) {
        let owner_index = usize::from(owner);
        if self.lines_by_owner.len() <= owner_index {
            self.lines_by_owner.resize(owner_index + 1, 0);
        }
        self.lines_by_owner[owner_index] += 1;
    }

    #[inline]
    pub fn mask_of(&self, class: u8) -> Option<u64> {
        self.way_masks_by_class
            .get(usize::from(class))
            .copied()
            .flatten()
    }

    /// Ticks that `bytes` queue on their way toward the core.
    #[inline]
    pub fn transfer_out(&mut self, tick: u64, bytes: u64) -> u64 {
        self.counters.bytes_out += bytes;
        let queue_ticks = self
            .output_server
            .as_mut()
            .map_or(0, |server| server.transfer(tick, bytes));
        self.counters.queue_ticks += queue_ticks;
        queue_ticks
    }
}
