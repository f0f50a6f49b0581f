//! The machine's hardware: cores, caches, coherence, prefetchers, buses, memory, counters.
//!
//! The operating system loads threads onto contexts, lets time pass with [`Hardware::run`], and is told when a thread
//! wants something of it. It answers translations through [`FrameProvider`]. Nothing here decides who runs where.

mod burst;
mod cache_unit;
mod caches;
mod context;
mod counters;
mod deferred;
mod dram;
mod fast_path;
mod first_touch;
mod host_prefetch;
mod l1_fast_path;
mod l1_variant;
mod line_table;
mod page_index;
mod pipeline;
mod prefetch;
mod probe;
mod queue;
mod request;
mod sampling;
mod scan;
mod server;
mod slow_path;
mod store;
mod thread;

use cachemate_core::{
    BatchEnd, CacheId, CacheLevel, CoreModel, CpuId, IndexSet, MachineSpec, MachineSpecError, ProcessId, TaskId,
};

use cache_unit::CacheUnit;
use caches::Caches;
use context::HwContext;
use pipeline::{Core, CoreEnvironment, RUN_AHEAD_CYCLES, RunBounds};
use queue::CoreQueue;
use sampling::SamplingUnit;

pub use counters::*;
pub use first_touch::FirstTouchFrames;
pub(crate) use probe::*;
pub use thread::HwThread;

/// Choices that are not the machine's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HwOptions {
    /// Decides random replacement.
    pub seed: u64,
    /// False switches every prefetcher off.
    pub prefetch: bool,
    /// True: the first miss on a line counts as one on a line that its thread had before.
    pub is_resident: bool,
}

impl Default for HwOptions {
    fn default() -> Self {
        HwOptions { seed: 1, prefetch: true, is_resident: false }
    }
}

/// A translation, and what the operating system took for it (a fault, a page moved lazily).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameLookup {
    /// Physical page number, below memory size / page size.
    pub frame: u64,
    /// Time that it took of the CPU; 0 = it was known.
    pub cost_cycles: u64,
    /// The page has just been copied there.
    pub copied: bool,
}

/// Asked when a thread's translation is not at hand; the operating system allocates, colors and charges.
pub trait FrameProvider {
    /// `page` is a virtual page number; code pages are asked for like data pages, as loads.
    fn find_frame(&mut self, process: ProcessId, page: u64, cpu: CpuId, store: bool) -> FrameLookup;
}

/// Why [`Hardware::run`] came back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopReason {
    /// The time asked for is reached on every CPU.
    Time,
    /// The thread on `cpu` ended a batch with something other than [`BatchEnd::More`]. It stays loaded, and goes on with
    /// its next batch if the operating system just runs the machine again.
    Turn {
        /// Where the thread is.
        cpu: CpuId,
        /// The request at the end of the batch.
        turn: BatchEnd,
        /// When the batch ended.
        at_cycle: u64,
    },
    /// A probe of the task on `cpu` is full or overflowed.
    Interrupt {
        /// Where the thread is.
        cpu: CpuId,
        /// The thread's task.
        task: TaskId,
        /// When the probe raised it.
        at_cycle: u64,
    },
}

/// The kind of work on which the operating system spends a CPU's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Charge {
    /// Another thread is loaded.
    Switch,
    /// The thread that is loaded ran elsewhere before.
    Migration,
    /// Pages are copied to frames of other colors.
    PageCopy,
    /// A page had no frame, or a lazy move was due.
    Fault,
    /// A probe's entry, or the counters' turn.
    Interrupt,
}

/// The request cannot be met by this hardware.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what}: found {found}, expected {expected}")]
pub struct RequestError {
    /// The request.
    pub what: String,
    /// Its value.
    pub found: String,
    /// Values that this hardware takes.
    pub expected: String,
}

/// A machine's hardware, running.
pub struct Hardware {
    spec: MachineSpec,
    cores: Vec<Core>,
    /// Tick of the next event of each core.
    next: CoreQueue,
    caches: Caches,
    sampling: SamplingUnit,
    ticks_per_cycle: u64,
    page_shift: u32,
    now: u64,
}

/// Bytes that each line of a simulated cache takes: tag, age, state.
const LINE_STATE_BYTES: u64 = 12;

/// A machine whose caches this host has no memory for is an error, not the end of the process.
fn check_room(spec: &MachineSpec) -> Result<(), MachineSpecError> {
    let mut all = 0u64;
    for (index, cache) in spec.caches.iter().enumerate() {
        let lines = cache.size_bytes / u64::from(cache.line_bytes);
        let state = lines.saturating_mul(LINE_STATE_BYTES).saturating_mul(u64::from(spec.instances(cache)));
        all = all.saturating_add(state);
        if !cachemate_core::can_allocate(all) {
            return Err(MachineSpecError {
                machine: spec.name.clone(),
                field: format!("caches[{index}].size_bytes"),
                found: cache.size_bytes.to_string(),
                expected: format!("caches that this host can simulate: their state would take {all} bytes"),
            });
        }
    }
    Ok(())
}

impl Hardware {
    /// # Errors
    /// The first field that makes the machine impossible, or beyond what is modeled.
    pub fn new(spec: &MachineSpec, options: HwOptions) -> Result<Self, MachineSpecError> {
        spec.check()?;
        check_room(spec)?;
        let issue_width = match spec.pipeline {
            CoreModel::InOrder { issue_width } | CoreModel::OutOfOrder { issue_width, .. } => issue_width,
        };
        let ticks_per_cycle = u64::from(issue_width);
        let caches = Caches::new(spec, options, ticks_per_cycle)?;
        let first = |level| {
            let before = spec.caches.iter().take_while(|cache| cache.level != level);
            let has_level = spec.caches.iter().any(|cache| cache.level == level);
            has_level.then(|| before.map(|cache| spec.instances(cache) as usize).sum::<usize>())
        };
        // The caches checked that there is one.
        let l1d = first(CacheLevel::L1Data).unwrap_or_default();
        let l1i = first(CacheLevel::L1Instruction);
        let core = |at: u32| {
            let mut core = Core::new(spec, at, l1d + at as usize, l1i.map(|l1i| l1i + at as usize));
            core.front.owns_next = caches.units[core.front.l1d].owns_next;
            core
        };
        let cores: Vec<Core> = (0..spec.cores()).map(core).collect();
        Ok(Hardware {
            next: CoreQueue::new(cores.len()),
            cores,
            caches,
            sampling: SamplingUnit::new(&spec.counters, spec.pipeline, spec.hertz, ticks_per_cycle),
            ticks_per_cycle,
            page_shift: spec.pages.page_bytes.trailing_zeros(),
            now: 0,
            spec: spec.clone(),
        })
    }

    /// As it was given to [`Hardware::new`].
    pub fn spec(&self) -> &MachineSpec {
        &self.spec
    }

    /// Ticks of one cycle, for counters that are kept in ticks.
    pub fn ticks_per_cycle(&self) -> u64 {
        self.ticks_per_cycle
    }

    /// The cycle up to which every CPU has run.
    pub fn now_cycles(&self) -> u64 {
        self.now / self.ticks_per_cycle
    }

    fn context_index(&self, cpu: CpuId) -> (usize, usize) {
        let per_core = self.spec.contexts_per_core as usize;
        (cpu.0 as usize / per_core, cpu.0 as usize % per_core)
    }

    fn context_mut(&mut self, cpu: CpuId) -> &mut HwContext {
        let (core, at) = self.context_index(cpu);
        &mut self.cores[core].front.contexts[at]
    }

    fn renew_key(&mut self, cpu: CpuId) {
        let (core, _) = self.context_index(cpu);
        self.cores[core].renew();
        self.next.set(core, self.cores[core].next_tick());
    }

    /// Puts a thread on an idle context from `at_cycle` on. If the context has a thread already, the new one is
    /// returned.
    pub fn load(&mut self, cpu: CpuId, mut thread: HwThread, at_cycle: u64) -> Option<HwThread> {
        let before = self.unload(cpu);
        thread.counters.ticks_per_cycle = self.ticks_per_cycle;
        let at = at_cycle * self.ticks_per_cycle;
        let context = self.context_mut(cpu);
        context.ready = context.ready.max(at);
        context.accounted = context.ready;
        context.thread = Some(Box::new(thread));
        self.renew_key(cpu);
        before
    }

    /// Takes the thread off, in the middle of whatever it does.
    pub fn unload(&mut self, cpu: CpuId) -> Option<HwThread> {
        let now = self.now;
        let context = self.context_mut(cpu);
        context.account(now);
        let thread = context.thread.take();
        if thread.is_some() {
            context.ready = context.accounted.max(now);
            context.wait = None;
            context.value_at = 0;
            context.forget();
        }
        self.renew_key(cpu);
        thread.map(|thread| *thread)
    }

    /// Its counters are complete up to the last stop of [`Hardware::run`] for time, or for this CPU.
    pub fn thread(&self, cpu: CpuId) -> Option<&HwThread> {
        let (core, at) = self.context_index(cpu);
        self.cores[core].front.contexts[at].thread.as_deref()
    }

    /// The thread on a CPU; `None` = there is none.
    pub fn thread_mut(&mut self, cpu: CpuId) -> Option<&mut HwThread> {
        self.context_mut(cpu).thread.as_deref_mut()
    }

    /// The operating system works on this CPU for so long; a thread on it waits, and the time is its `system` time.
    /// Other contexts of the core are not slowed by it.
    pub fn charge_cycles(&mut self, cpu: CpuId, cycles: u64, what: Charge) {
        let (now, ticks) = (self.now, cycles * self.ticks_per_cycle);
        self.context_mut(cpu).charge_ticks(now, ticks, what);
        self.renew_key(cpu);
    }

    /// Runs until every CPU has reached `until_cycle` or a thread wants the operating system. Idle CPUs just wait.
    pub fn run(&mut self, until_cycle: u64, frames: &mut dyn FrameProvider) -> StopReason {
        let end = until_cycle * self.ticks_per_cycle;
        let stop = self.run_cores(end, frames);
        self.cores.iter_mut().for_each(|core| core.end_run(&mut self.caches));
        if stop == StopReason::Time {
            self.now = self.now.max(end);
            let contexts = self.cores.iter_mut().flat_map(|core| &mut core.front.contexts);
            contexts.for_each(|context| context.account(end));
        }
        stop
    }

    fn run_cores(&mut self, end: u64, frames: &mut dyn FrameProvider) -> StopReason {
        let ahead = RUN_AHEAD_CYCLES * self.ticks_per_cycle;
        let mut around = CoreEnvironment {
            caches: &mut self.caches,
            frames,
            page_shift: self.page_shift,
            ticks_per_cycle: self.ticks_per_cycle,
            sampling: self.sampling,
        };
        loop {
            let ((key, at), next) = self.next.two_earliest();
            if key >= end {
                return StopReason::Time;
            }
            self.now = self.now.max(key);
            // Of equal ticks the lower core's comes first.
            let shared = next.0.saturating_sub(u64::from(at > next.1));
            let core = &mut self.cores[at];
            let stop = core.advance(RunBounds { shared, end: end.min(next.0.saturating_add(ahead)) }, &mut around);
            self.next.set(at, core.next);
            if let Some(stop) = stop {
                return stop;
            }
        }
    }

    /// The page's frame changes: its translation is dropped among loaded threads. Threads that are off drop theirs
    /// with [`HwThread::shoot_down`]; lines of the old frame stay until they are evicted or flushed.
    pub fn shoot_down(&mut self, process: ProcessId, page: u64) {
        let contexts = self.cores.iter_mut().flat_map(|core| &mut core.front.contexts);
        for thread in contexts.filter_map(|context| context.thread.as_mut()) {
            if thread.process == process {
                thread.shoot_down(page);
            }
        }
    }

    /// Drops all lines of a frame from every cache, without writing them, and clears its history: the frame gets
    /// another owner, whose first misses on it are cold.
    pub fn flush_frame(&mut self, frame: u64) {
        let named = self.caches.pages.forget(frame);
        self.caches.flush(named << self.page_shift, 1 << self.page_shift);
    }

    /// A virtual page has just been copied to a frame by this CPU, on a task's time: see [`Caches::insert_copied`].
    pub fn insert_copied(&mut self, cpu: CpuId, page: u64, frame: u64, task: TaskId) {
        let core = (cpu.0 / self.spec.contexts_per_core) as usize;
        let (l1d, address) = (self.cores[core].front.l1d, self.caches.pages.name(frame, page) << self.page_shift);
        let task = task.0.min(u32::from(u16::MAX) - 2) as u16;
        self.caches.insert_copied(l1d, address, 1 << self.page_shift, task, self.now);
    }

    fn find_cache_unit(&self, cache: CacheId) -> Result<&CacheUnit, RequestError> {
        let caches = self.caches.units.len();
        self.caches.units.get(cache.0 as usize).ok_or_else(|| RequestError {
            what: "cache".to_string(),
            found: cache.0.to_string(),
            expected: format!("below {caches}"),
        })
    }

    /// Lets a class of service allocate in these ways of one cache only; hits are not restricted.
    ///
    /// # Errors
    /// The cache cannot be partitioned, or the mask or class is outside its limits.
    pub fn set_way_mask(&mut self, cache: CacheId, class: u8, mask: &IndexSet) -> Result<(), RequestError> {
        let bad =
            |what: &str, found: String, expected: String| RequestError { what: what.to_string(), found, expected };
        let level = self.find_cache_unit(cache)?.level;
        let spec = self.spec.caches.iter().find(|spec| spec.level == level);
        let Some((ways, parts)) = spec.and_then(|spec| Some((spec.ways, spec.way_partitions?))) else {
            return Err(bad("cache", format!("{level:?}"), "a cache with way_partitions".to_string()));
        };
        if u32::from(class) >= parts.groups {
            return Err(bad("class of service", class.to_string(), format!("below {}", parts.groups)));
        }
        let (low, high) = (mask.first().unwrap_or(0), mask.iter().last().unwrap_or(0));
        if mask.count() < parts.min_ways || high >= ways {
            let expected = format!("{} ways or more, below {ways}", parts.min_ways);
            return Err(bad("way mask", mask.to_string(), expected));
        }
        if parts.contiguous && high - low + 1 != mask.count() {
            return Err(bad("way mask", mask.to_string(), "contiguous ways".to_string()));
        }
        let masks = &mut self.caches.units[cache.0 as usize].masks;
        masks.resize(masks.len().max(usize::from(class) + 1), None);
        masks[usize::from(class)] = Some(mask.iter().fold(0, |word, way| word | 1 << way));
        Ok(())
    }

    /// Ends all way masks of a cache.
    pub fn clear_way_masks(&mut self, cache: CacheId) {
        if let Some(unit) = self.caches.units.get_mut(cache.0 as usize) {
            unit.masks.clear();
        }
    }

    /// Counters of one hardware context, since the start.
    pub fn cpu_counters(&self, cpu: CpuId) -> CpuCounters {
        let (core, at) = self.context_index(cpu);
        self.cores[core].front.contexts[at].counters
    }
    /// Counters of a cache of this machine; another id has counted nothing.
    pub fn cache_counters(&self, cache: CacheId) -> CacheCounters {
        self.find_cache_unit(cache).map(|unit| unit.counters).unwrap_or_default()
    }
    /// Counters of a node of this machine; another number has counted nothing.
    pub fn memory_counters(&self, node: u32) -> MemoryCounters {
        self.caches.dram.memory_counters(node).unwrap_or_default()
    }
    /// `None` where packages have no bus.
    pub fn bus_counters(&self, package: u32) -> Option<BusCounters> {
        self.caches.dram.bus_counters(package)
    }

    /// Lines of the cache that each task brought and that are still there, in bytes; ascending tasks, none with zero.
    pub fn occupancy_bytes(&self, cache: CacheId) -> Vec<(TaskId, u64)> {
        let Ok(unit) = self.find_cache_unit(cache) else { return Vec::new() };
        let lines = unit.occupancy.iter().enumerate().filter(|(_, lines)| **lines > 0);
        lines.map(|(task, &lines)| (TaskId(task as u32), u64::from(lines) << unit.line_shift)).collect()
    }

    /// The set and the bringer of every line in a cache.
    #[cfg(test)]
    pub(crate) fn sets_in_use(&self, cache: CacheId) -> Vec<(u64, TaskId)> {
        let store = &self.caches.units[cache.0 as usize].store;
        store.lines().map(|(line, meta)| (store.set_of(line), TaskId(u32::from(meta.owner())))).collect()
    }

    /// Evictions in one cache: (evictor, victim, lines), ascending, without zeros, including a task's own.
    pub fn evictions(&self, cache: CacheId) -> Vec<(TaskId, TaskId, u64)> {
        let Ok(unit) = self.find_cache_unit(cache) else { return Vec::new() };
        let task = |slot: u16| TaskId(u32::from(slot));
        unit.matrix.nonzero().map(|(evictor, owner, lines)| (task(evictor), task(owner), lines)).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
