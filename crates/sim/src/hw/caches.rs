//! All caches of a machine as one tree, and the parts that the walks below share.
//!
//! Machines differ in who shares what (a private L2 behind each core, one for two cores, a victim
//! cache behind both), so the caches are a tree, and one walk serves all shapes. The leaves are the
//! L1s; the roots are the caches with memory behind them. A request walks from a leaf outward until
//! a cache has the line. Every cache on the way is updated at once: the state is exact at the tick
//! of the request, and only the data arrives later (`PendingFills`). A protocol with messages in
//! flight would be closer to hardware, and would need transient states and retries, which cost far
//! more time than they change.
//!
//! For example, core 0 loads a line that core 2, below another root, has modified. The request
//! misses in the L1 and the L2 of core 0; the directory names the other root, whose copy is no
//! longer exclusive from this tick on; and the load waits for the latency of a remote hit, while a
//! second load of the same line finds it in the L1, and waits for the rest.
//!
//! MESI: if a cache has a line in E or M, no cache off its path to memory has it. A parent's sharer
//! bits show which children may hold the line, and a directory per line of memory shows which roots
//! may. Both are supersets: a copy that was dropped silently is found missing when it is looked up.

use cachemate_core::{CacheLevel, MachineSpec, MachineSpecError, SplitMix64, WritePolicy};

use super::HwOptions;
use super::cache_unit::{CacheUnit, DataOrigin, ROOT};
use super::core_kind::ANY_SHAPE;
use super::counters::{MissCause, TaskCounters};
use super::dram::{Dram, MemoryReader};
use super::line_table::LineTable;
use super::page_index::{PageIndex, SetBits};
use super::store::{EXCLUSIVE, EvictedLine, LineMeta, MODIFIED, SHARED, SHARER_BITS, TagStore};

/// A request on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheRequest {
    pub address: u64,
    pub tick: u64,
    /// Whether ownership is requested.
    pub is_store: bool,
    /// Whether the request carries the data of a store and the requesting cache keeps no line for it (write-through).
    pub is_write_through: bool,
    pub is_prefetch: bool,
    pub task: u16,
    pub class: u8,
    pub package: u32,
    pub core: u32,
}

impl CacheRequest {
    pub fn reader(&self) -> MemoryReader {
        MemoryReader {
            package: self.package,
            core: self.core,
        }
    }
}

/// The response to a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheResponse {
    /// Tick at which the data arrives.
    pub ready_tick: u64,
    /// The part of the time until `ready_tick` that is spent in queues.
    pub queue_ticks: u64,
    pub origin: DataOrigin,
    /// Whether no other cache off the path holds the line.
    pub is_exclusive: bool,
    /// Whether the data differs from memory, and the requester becomes responsible for it.
    pub is_dirty: bool,
}

/// The result of a snoop of other caches.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct SnoopResult {
    pub is_present: bool,
    pub is_exclusive: bool,
    pub is_dirty: bool,
    /// Package of a holder; the requester's own if possible.
    pub package: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SnoopAction {
    /// Other caches keep a shared copy.
    Share,
    /// Removes all copies for a store of another cache.
    Invalidate,
    /// Drops the line because this task evicted it from an inclusive cache of a further level.
    Drop(u16),
}

pub(crate) struct Caches {
    pub units: Vec<CacheUnit>,
    pub pages: PageIndex,
    pub dram: Dram,
    pub same_package_ticks: Option<u64>,
    pub other_package_ticks: Option<u64>,
    /// The caches whose next level is memory.
    pub roots: Vec<usize>,
    /// For each unit that is a root, its position in `roots`.
    root_position: Vec<usize>,
    pub directory: Option<LineTable>,
    /// Line size of the directory, as a shift.
    pub directory_shift: u32,
    /// Prefetches that the current request caused, as cache and line. They start when the request is complete.
    pub due_prefetches: Vec<(usize, u64)>,
    /// Number of L1 prefetches of the last request, for a sampler that misreads them.
    pub first_level_prefetches: u32,
    /// If true, all requests take the slow path, so that a test can compare both paths.
    #[cfg(test)]
    pub uses_slow_path_only: bool,
    /// If true, no core runs ahead with hits in its own second level.
    #[cfg(test)]
    pub forbids_running_ahead: bool,
    /// If true, no core takes the fast path.
    #[cfg(test)]
    pub skips_fast_path: bool,
}

/// Number of bits in a directory word; if there are more roots, they share bits.
const DIRECTORY_BITS: usize = 16;

impl Caches {
    pub fn new(
        spec: &MachineSpec,
        options: HwOptions,
        ticks_per_cycle: u64,
    ) -> Result<Self, MachineSpecError> {
        let mut machine = spec.clone();
        if !options.is_prefetch_enabled {
            machine.prefetchers.clear();
        }
        check_machine(&machine)?;
        let mut units = Vec::new();
        let mut first_unit_by_cache = Vec::new();
        for (cache_index, cache) in machine.caches.iter().enumerate() {
            first_unit_by_cache.push(units.len());
            for instance in 0..machine.instance_count(cache) {
                let seed = SplitMix64::scatter(
                    options.seed ^ (cache_index as u64) << 32 ^ u64::from(instance),
                );
                let mut unit = CacheUnit::new(&machine, cache, instance, ticks_per_cycle, seed);
                unit.first_miss_cause = if options.is_resident {
                    MissCause::Own
                } else {
                    MissCause::Cold
                };
                units.push(unit);
            }
        }
        for (cache_index, cache) in machine.caches.iter().enumerate() {
            let outer_index = (cache_index + 1..machine.caches.len())
                .find(|&outer| machine.caches[outer].level > CacheLevel::L1Data);
            let Some(outer_index) = outer_index else {
                continue;
            };
            for instance in 0..machine.instance_count(cache) {
                let child = first_unit_by_cache[cache_index] + instance as usize;
                let children_per_parent =
                    machine.caches[outer_index].shared_by_cores / cache.shared_by_cores;
                let parent =
                    first_unit_by_cache[outer_index] + (instance / children_per_parent) as usize;
                units[child].parent = parent;
                units[child].sharer_bit = 1 << (units[parent].children.len() as u32 % SHARER_BITS);
                let can_own_lines =
                    cache.level != CacheLevel::L1Instruction && cache.write == WritePolicy::Back;
                units[parent].can_children_own |= can_own_lines || units[child].can_children_own;
                units[parent].children.push(child);
            }
        }
        // Determined before the first request: the L1s whose second level is their own and evicts predictably.
        for index in 0..units.len() {
            let Some(second_level) = units.get(units[index].parent) else {
                continue;
            };
            let is_private = second_level.level == CacheLevel::L2
                && second_level.core_count == 1
                && second_level.write_policy == WritePolicy::Back;
            let is_plain_pair = !second_level.is_victim()
                && units[index].prefetcher.is_none()
                && units[index].write_policy == WritePolicy::Back;
            units[index].is_next_level_private = units[index].level == CacheLevel::L1Data
                && is_private
                && is_plain_pair
                && units[index].store.is_lru();
        }
        let roots: Vec<usize> = (0..units.len())
            .filter(|&index| units[index].parent == ROOT)
            .collect();
        let mut root_position = vec![0; units.len()];
        roots
            .iter()
            .enumerate()
            .for_each(|(position, &root)| root_position[root] = position);
        let inclusive_caches = machine
            .caches
            .iter()
            .filter(|cache| cache.inclusion != cachemate_core::Inclusion::Victim);
        let directory_shift = inclusive_caches
            .map(|cache| cache.line_bytes.trailing_zeros())
            .max()
            .unwrap_or(6);
        let page_shift = machine.pages.page_bytes.trailing_zeros();
        let new_table = || LineTable::new(page_shift.saturating_sub(directory_shift));
        let to_ticks =
            |cycles: Option<u32>| cycles.map(|cycles| u64::from(cycles) * ticks_per_cycle);
        Ok(Caches {
            dram: Dram::new(&machine, ticks_per_cycle),
            pages: PageIndex::new(&machine),
            same_package_ticks: to_ticks(machine.coherence.same_package_cycles),
            other_package_ticks: to_ticks(machine.coherence.other_package_cycles),
            directory: (roots.len() > 1).then(new_table),
            units,
            roots,
            root_position,
            directory_shift,
            due_prefetches: Vec::new(),
            first_level_prefetches: 0,
            #[cfg(test)]
            uses_slow_path_only: false,
            #[cfg(test)]
            forbids_running_ahead: false,
            #[cfg(test)]
            skips_fast_path: false,
        })
    }

    /// Ticks until a copy of the line in another cache arrives.
    pub fn remote_latency_ticks(&self, request: &CacheRequest, copies: SnoopResult) -> u64 {
        let transfer_ticks = if copies.package == Some(request.package) {
            self.same_package_ticks
        } else {
            self.other_package_ticks
        };
        transfer_ticks.unwrap_or_else(|| self.dram.latency_ticks(request.address, request.package))
    }

    /// Looks for copies of the bytes `address` .. + 2^`requester_shift` in a cache and all caches above it, and applies
    /// the action to them.
    pub fn snoop(
        &mut self,
        index: usize,
        address: u64,
        requester_shift: u32,
        action: SnoopAction,
    ) -> SnoopResult {
        let mut copies = SnoopResult::default();
        let mut sharers = 0;
        let unit = &mut self.units[index];
        let span_shift = requester_shift.max(unit.line_shift);
        let first_line = address >> span_shift << (span_shift - unit.line_shift);
        let is_victim = unit.is_victim();
        // Only the overlapping sectors of a victim cache's line are affected.
        let requested_sectors = if is_victim {
            self.overlapping_sectors(index, address, requester_shift)
        } else {
            0
        };
        let unit = &mut self.units[index];

        for line in first_line..first_line + (1 << (span_shift - unit.line_shift)) {
            let Some(tag_index) = unit.store.find(line) else {
                continue;
            };
            let meta = unit.store.line_meta(tag_index);
            if is_victim && meta.sharers() & requested_sectors == 0 {
                continue;
            }
            copies.is_present = true;
            copies.package = Some(unit.package);
            copies.is_exclusive |= meta.state() >= EXCLUSIVE;
            copies.is_dirty |= meta.state() == MODIFIED;
            sharers |= meta.sharers();
            match action {
                SnoopAction::Share if meta.state() > SHARED => {
                    unit.store.set_meta(tag_index, meta.with_state(SHARED))
                }
                SnoopAction::Share => {}
                SnoopAction::Invalidate | SnoopAction::Drop(_)
                    if is_victim && meta.sharers() & !requested_sectors != 0 =>
                {
                    unit.store.set_meta(
                        tag_index,
                        meta.with_sharers(meta.sharers() & !requested_sectors),
                    );
                }
                SnoopAction::Invalidate | SnoopAction::Drop(_) => {
                    unit.store.remove(tag_index);
                    let evictor = if let SnoopAction::Drop(task) = action {
                        Some(task)
                    } else {
                        None
                    };
                    unit.record_eviction(line, meta, evictor);
                }
            }
        }
        let is_inclusive = unit.inclusion == cachemate_core::Inclusion::Inclusive;
        if unit.children.is_empty() || (is_inclusive && !copies.is_present) {
            return copies;
        }
        if is_victim || !copies.is_present {
            sharers = !0;
        }
        for nth in 0..self.units[index].children.len() {
            let child = self.units[index].children[nth];
            if sharers & self.units[child].sharer_bit != 0 {
                copies =
                    copies.merge_with(self.snoop(child, address, requester_shift, action), None);
            }
        }
        copies
    }

    /// Sectors of a victim cache's line that overlap the bytes `address` .. + 2^`span_shift`.
    fn overlapping_sectors(&self, index: usize, address: u64, span_shift: u32) -> u32 {
        let (unit, child_shift) = (&self.units[index], self.child_line_shift(index));
        let start = address >> span_shift << span_shift;
        let sectors = 1u64 << span_shift.clamp(child_shift, unit.line_shift) >> child_shift;
        (0..sectors).fold(0, |mask, nth| {
            mask | unit.sector_mask(start + (nth << child_shift), child_shift)
        })
    }

    /// Snoops the children of `parent_index` other than `requesting_child` that have a bit in `sharers`.
    pub fn snoop_siblings(
        &mut self,
        parent_index: usize,
        requesting_child: usize,
        sharers: u32,
        request: &CacheRequest,
        span_shift: u32,
        action: SnoopAction,
    ) -> SnoopResult {
        let mut copies = SnoopResult::default();
        for nth in 0..self.units[parent_index].children.len() {
            let child = self.units[parent_index].children[nth];
            if child != requesting_child && sharers & self.units[child].sharer_bit != 0 {
                copies = copies.merge_with(
                    self.snoop(child, request.address, span_shift, action),
                    Some(request.package),
                );
            }
        }
        copies
    }

    /// Snoops the other roots that may hold the line, and records `requesting_root` as a holder.
    pub fn snoop_other_roots(
        &mut self,
        requesting_root: usize,
        request: &CacheRequest,
        action: SnoopAction,
    ) -> SnoopResult {
        let mut copies = SnoopResult::default();
        let Some(directory) = &mut self.directory else {
            return copies;
        };

        let root_position = self.root_position[requesting_root];
        let own_bit = 1u16 << (root_position % DIRECTORY_BITS);
        let line = request.address >> self.directory_shift;
        let word = directory.word_mut(line);
        let mut candidate_bits = *word;
        *word |= own_bit;
        if self.roots.len() <= DIRECTORY_BITS {
            candidate_bits &= !own_bit;
        }

        let mut holder_bits = own_bit;
        while candidate_bits != 0 {
            let bit = candidate_bits.trailing_zeros() as usize;
            candidate_bits &= candidate_bits - 1;
            for nth in (bit..self.roots.len())
                .step_by(DIRECTORY_BITS)
                .filter(|&nth| nth != root_position)
            {
                let snoop_result = self.snoop(
                    self.roots[nth],
                    request.address,
                    self.directory_shift,
                    action,
                );
                copies = copies.merge_with(snoop_result, Some(request.package));
                if snoop_result.is_present && action == SnoopAction::Share {
                    holder_bits |= 1 << bit;
                }
            }
        }
        if let Some(directory) = &mut self.directory {
            *directory.word_mut(line) = holder_bits;
        }
        copies
    }

    /// Removes all copies off the path of the cache `requesting_index`, which has the line shared and wants to write
    /// it. The result is the ticks that this takes.
    pub fn invalidate_other_copies(
        &mut self,
        requesting_index: usize,
        request: &CacheRequest,
    ) -> u64 {
        let (mut latency, mut current_index) =
            (self.units[requesting_index].latency_ticks, requesting_index);

        loop {
            let parent = self.units[current_index].parent;
            if parent == ROOT {
                let copies =
                    self.snoop_other_roots(current_index, request, SnoopAction::Invalidate);
                return if copies.is_present {
                    latency.max(self.remote_latency_ticks(request, copies))
                } else {
                    latency
                };
            }
            let (span_shift, bit) = (
                self.units[current_index].line_shift,
                self.units[current_index].sharer_bit,
            );
            let unit = &mut self.units[parent];
            latency = unit.latency_ticks;
            let tag_index = unit
                .store
                .find(request.address >> unit.line_shift)
                .filter(|_| !unit.is_victim());
            if let Some(tag_index) = tag_index {
                let meta = unit.store.line_meta(tag_index);
                let is_exclusive = meta.state() >= EXCLUSIVE;
                self.snoop_siblings(
                    parent,
                    current_index,
                    meta.sharers(),
                    request,
                    span_shift,
                    SnoopAction::Invalidate,
                );
                let unit = &mut self.units[parent];
                let sharers = if span_shift == unit.line_shift {
                    bit
                } else {
                    meta.sharers()
                };
                unit.store.set_meta(
                    tag_index,
                    meta.with_sharers(sharers)
                        .with_state(meta.state().max(EXCLUSIVE)),
                );
                if is_exclusive {
                    return latency;
                }
            } else if self.units[parent].inclusion != cachemate_core::Inclusion::Inclusive {
                self.snoop_siblings(
                    parent,
                    current_index,
                    !0,
                    request,
                    span_shift,
                    SnoopAction::Invalidate,
                );
            }
            current_index = parent;
        }
    }

    /// Inserts a line into a cache, and handles the line that it displaces.
    pub fn fill(
        &mut self,
        index: usize,
        meta: LineMeta,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) {
        let unit = &mut self.units[index];
        let mask = unit.mask_of(request.class);
        let evicted_line =
            unit.store
                .insert(request.address >> unit.line_shift, meta, mask, ANY_SHAPE);
        unit.record_arrival(meta.owner());
        if let Some(evicted) = evicted_line {
            self.evict(index, evicted, request, counters);
        }
    }

    pub fn evict(
        &mut self,
        index: usize,
        evicted_line: EvictedLine,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) {
        let unit = &mut self.units[index];
        unit.record_eviction(evicted_line.line, evicted_line.meta, Some(request.task));
        let (address, span_shift, parent) = (
            evicted_line.line << unit.line_shift,
            unit.line_shift,
            unit.parent,
        );
        let mut state = evicted_line.meta.state();
        if unit.inclusion == cachemate_core::Inclusion::Inclusive
            && evicted_line.meta.sharers() != 0
        {
            let evicted_request = CacheRequest {
                address,
                ..*request
            };
            let copies = self.snoop_siblings(
                index,
                ROOT,
                evicted_line.meta.sharers(),
                &evicted_request,
                span_shift,
                SnoopAction::Drop(request.task),
            );
            state = if copies.is_dirty { MODIFIED } else { state };
        }
        let writeback_request = CacheRequest {
            address,
            ..*request
        };
        if parent != ROOT && self.units[parent].is_victim() {
            let meta = LineMeta::new(state, 0, evicted_line.meta.owner());
            self.insert_victim(parent, span_shift, meta, &writeback_request, counters);
        } else if state == MODIFIED {
            self.units[index].counters.writebacks += 1;
            let bytes = if self.units[index].is_victim() {
                // Only the sectors that are present.
                u64::from(evicted_line.meta.sharers().count_ones()) << self.child_line_shift(index)
            } else {
                1 << span_shift
            };
            self.write_back(parent, bytes, &writeback_request, counters);
        }
    }

    /// Line length of the caches above, as a shift; for a victim cache, that of its sectors.
    pub fn child_line_shift(&self, index: usize) -> u32 {
        self.units[index]
            .children
            .first()
            .map_or(self.units[index].line_shift, |&child| {
                self.units[child].line_shift
            })
    }

    /// Writes a dirty line back to the first cache outward that has it, or to memory.
    pub fn write_back(
        &mut self,
        mut index: usize,
        bytes: u64,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) {
        while index != ROOT {
            let unit = &mut self.units[index];
            let line = request.address >> unit.line_shift;
            let tag_index = unit
                .store
                .find(line)
                .filter(|_| !unit.is_victim() && unit.write_policy == WritePolicy::Back);
            if let Some(tag_index) = tag_index {
                let meta = unit.store.line_meta(tag_index);
                unit.store.set_meta(tag_index, meta.with_state(MODIFIED));
                return;
            }
            index = unit.parent;
        }

        counters.memory_write_bytes += bytes;
        self.dram
            .write(request.address, request.package, bytes, request.tick);
    }

    /// Inserts a line that the level above evicted. `meta` has no sharers; `child_shift` is the line size of that
    /// level, as a power of two.
    fn insert_victim(
        &mut self,
        index: usize,
        child_shift: u32,
        meta: LineMeta,
        request: &CacheRequest,
        counters: &mut TaskCounters,
    ) {
        let unit = &mut self.units[index];
        let line = request.address >> unit.line_shift;
        let sector = unit.sector_mask(request.address, child_shift);
        let Some(tag_index) = unit.store.find(line) else {
            return self.fill(index, meta.with_sharers(sector), request, counters);
        };

        let old_meta = unit.store.line_meta(tag_index);
        let state = if old_meta.state().min(meta.state()) == SHARED {
            SHARED
        } else {
            old_meta.state().max(meta.state())
        };
        unit.store.set_meta(
            tag_index,
            old_meta
                .with_sharers(old_meta.sharers() | sector)
                .with_state(state),
        );
        unit.store.touch(line, tag_index);
        // Sectors share one state, so a dirty one is written back if it joins a shared one.
        if state == SHARED && old_meta.state().max(meta.state()) == MODIFIED {
            let parent = unit.parent;
            self.write_back(parent, 1 << child_shift, request, counters);
        }
    }

    /// Inserts the lines of a page that was just copied on the core of this L1 into the last cache on the core's way to
    /// memory. The lines are clean, because the machine's stated cost of a copied page (CP 4.6.5) includes the traffic
    /// of copying.
    pub fn insert_copied(
        &mut self,
        l1: usize,
        first_address: u64,
        bytes: u64,
        task: u16,
        now: u64,
    ) {
        let find_parent = |unit_index: usize| {
            Some(self.units[unit_index].parent).filter(|&parent| parent != ROOT)
        };
        let path: Vec<usize> =
            std::iter::successors(find_parent(l1), |&index| find_parent(index)).collect();
        let Some(&target) = path.iter().rev().find(|&&at| !self.units[at].is_victim()) else {
            return;
        };

        let root = path[path.len() - 1];
        let (shift, package) = (self.units[target].line_shift, self.units[target].package);
        // The counts belong to no task, because the operating system copies the page.
        let mut counters = TaskCounters::default();
        for line in first_address >> shift..(first_address + bytes) >> shift {
            if self.units[target].store.find(line).is_some() {
                continue;
            }
            let address = line << shift;
            let request = CacheRequest {
                address,
                tick: now,
                is_store: true,
                is_write_through: false,
                is_prefetch: true,
                task,
                class: 0,
                package,
                // Nothing is read from memory.
                core: 0,
            };
            self.snoop_other_roots(root, &request, SnoopAction::Invalidate);
            self.fill(
                target,
                LineMeta::new(EXCLUSIVE, 0, task),
                &request,
                &mut counters,
            );
        }
    }

    /// Removes a frame's lines from all caches, and deletes their history.
    pub fn drop_frame_lines(&mut self, first_address: u64, bytes: u64) {
        for unit in &mut self.units {
            let lines = first_address >> unit.line_shift
                ..(first_address + bytes).div_ceil(1 << unit.line_shift);
            for line in lines {
                if let Some(tag_index) = unit.store.find(line) {
                    let meta = unit.store.line_meta(tag_index);
                    unit.store.remove(tag_index);
                    unit.record_removal(line, meta, None);
                }
                unit.clear_history(line);
            }
        }
    }
}

impl SnoopResult {
    fn merge_with(self, other: SnoopResult, preferred_package: Option<u32>) -> SnoopResult {
        let package = match (self.package, other.package) {
            (Some(mine), Some(others)) => Some(if preferred_package == Some(others) {
                others
            } else {
                mine
            }),
            (mine, others) => mine.or(others),
        };
        SnoopResult {
            is_present: self.is_present | other.is_present,
            is_exclusive: self.is_exclusive | other.is_exclusive,
            is_dirty: self.is_dirty | other.is_dirty,
            package,
        }
    }
}

/// Checks what the cycle-level machine cannot model, beyond [`MachineSpec::check`].
///
/// # Errors
/// The field, the value found and the values expected.
pub fn check_machine(machine: &MachineSpec) -> Result<(), MachineSpecError> {
    let spec_error = |field: String, found: String, expected: &str| {
        Err(MachineSpecError {
            machine: machine.name.clone(),
            field,
            found,
            expected: expected.to_string(),
        })
    };
    let Some(data) = machine
        .caches
        .iter()
        .find(|cache| cache.level == CacheLevel::L1Data)
    else {
        return spec_error(
            "caches".to_string(),
            "no l1-data".to_string(),
            "an L1 data cache",
        );
    };
    if data.shared_by_cores != 1 {
        return spec_error(
            "caches.shared_by_cores".to_string(),
            data.shared_by_cores.to_string(),
            "1 for L1 caches",
        );
    }
    for (cache_index, cache) in machine.caches.iter().enumerate() {
        let cache_field = |name: &str| format!("caches[{cache_index}].{name}");
        if PageIndex::page_bits(machine) > PageIndex::MAX_PAGE_BITS {
            return spec_error(
                cache_field("index"),
                format!("{:?}", cache.index),
                "at most 128 pages in a way of an L1",
            );
        }
        // Frames have longer names if an L1 derives its sets from virtual addresses.
        let bytes = match PageIndex::page_bits(machine) {
            0 => machine.memory.size_bytes,
            bits => machine.memory.size_bytes.next_power_of_two() << bits,
        };
        let lines = bytes / u64::from(cache.line_bytes);
        let frames = bytes / machine.pages.page_bytes.max(cache.line_bytes.into());
        if lines >> TagStore::tag_shift(cache, SetBits::new(machine, cache)) >= u64::from(u32::MAX)
            || frames >= u64::from(u32::MAX)
        {
            let found = machine.memory.size_bytes.to_string();
            return spec_error(
                "memory.size_bytes".to_string(),
                found,
                "fewer than 2^32 lines per set and 2^32 pages",
            );
        }
        if cache.level <= CacheLevel::L1Data
            && (cache.shared_by_cores != 1 || cache.inclusion != Default::default())
        {
            return spec_error(
                cache_field("inclusion"),
                format!("{:?}", cache.inclusion),
                "an L1 of one core that holds no others",
            );
        }
        if cache.inclusion == cachemate_core::Inclusion::Victim {
            let previous_level = machine.caches[..cache_index]
                .iter()
                .rfind(|nearer_cache| nearer_cache.level != CacheLevel::L1Instruction);
            let sectors =
                previous_level.map_or(1, |previous| cache.line_bytes / previous.line_bytes);
            if sectors > SHARER_BITS {
                return spec_error(
                    cache_field("line_bytes"),
                    cache.line_bytes.to_string(),
                    "at most 8 lines of the level before",
                );
            }
        }
        if cache.way_partitions.is_some() && cache.ways > 64 {
            return spec_error(
                cache_field("ways"),
                cache.ways.to_string(),
                "at most 64 where ways can be partitioned",
            );
        }
    }
    Ok(())
}
