//! The machine's hardware: cores, caches, coherence, prefetchers, buses, memory, counters.
//!
//! Hardware executes what it is given, and never chooses. So the operating system loads threads
//! onto contexts, lets time pass with [`Hardware::run`], and is informed when a thread requests
//! something from it; it provides translations through [`FrameProvider`]. Both sides can then be
//! tested alone: caches without a scheduler, and the scheduler without caches.
//!
//! For example, a thread touches a page for the first time. The access stops the run with the
//! page's number; the operating system allocates a frame of an allowed color, charges the fault to
//! the thread, and runs on.

mod burst;
mod cache_unit;
mod caches;
mod context;
mod core_kind;
mod counters;
mod deferred;
mod dram;
mod fast_path;
mod first_touch;
mod front_end;
mod host_prefetch;
mod l1_fast_path;

mod line_table;
mod page_index;
mod pipeline;
mod probe;
mod queue;
mod request;
mod rrip;
mod sampling;
mod scan;
mod server;
mod slow_path;
mod store;
mod thread;

use cachemate_core::{
    BatchEnd, CacheId, CacheLevel, CoreModel, CpuId, FieldError, IndexSet, MachineSpec,
    MachineSpecError, ProcessId, TaskId,
};

use cache_unit::CacheUnit;
use caches::Caches;
use context::HwContext;
use front_end::CoreEnvironment;
use pipeline::{Core, RUN_AHEAD_CYCLES, RunBounds};
use queue::CoreQueue;
use sampling::SamplingUnit;

pub use caches::check_machine;
pub use counters::*;
pub use first_touch::FirstTouchFrames;
pub(crate) use probe::*;
pub use thread::HwThread;

/// Options that are not part of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HwOptions {
    /// Seed of random replacement.
    pub seed: u64,
    /// Whether prefetchers are enabled.
    pub is_prefetch_enabled: bool,
    /// Whether programs begin with resident memory, so that the first miss on a line does not count as cold.
    pub is_resident: bool,
}

impl Default for HwOptions {
    fn default() -> Self {
        HwOptions {
            seed: 1,
            is_prefetch_enabled: true,
            is_resident: false,
        }
    }
}

/// A translation, and the time that the operating system took for it (a fault, or a page moved lazily).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameLookup {
    /// Physical page number, below memory size / page size.
    pub frame: u64,
    /// CPU time that the lookup took, in cycles; 0 if the translation was known.
    pub cost_cycles: u64,
    /// Whether the page has just been copied to the frame.
    pub is_copied: bool,
}

/// Provides missing translations; the operating system allocates frames, colors them and charges the time.
pub trait FrameProvider {
    /// `page` is a virtual page number. Code pages are requested like data pages, as loads.
    fn find_frame(
        &mut self,
        process: ProcessId,
        page: u64,
        cpu: CpuId,
        is_store: bool,
    ) -> FrameLookup;
}

/// The reason why [`Hardware::run`] returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopReason {
    /// Every CPU has reached the requested time.
    Time,
    /// The thread on `cpu` ended a batch with something other than [`BatchEnd::More`]. It stays loaded, and continues
    /// with its next batch if the operating system simply runs the machine again.
    BatchEnd {
        /// The thread's CPU.
        cpu: CpuId,
        /// The request at the end of the batch.
        batch_end: BatchEnd,
        /// Cycle at which the batch ended.
        end_cycle: u64,
    },
    /// A probe of the task on `cpu` is full or has overflowed.
    Interrupt {
        /// The thread's CPU.
        cpu: CpuId,
        /// The thread's task.
        task: TaskId,
        /// Cycle at which the probe raised the interrupt.
        interrupt_cycle: u64,
    },
}

/// The kind of work on which the operating system spends a CPU's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Charge {
    /// Loading another thread.
    Switch,
    /// Loading a thread that ran on another CPU before.
    Migration,
    /// Copying pages to frames of other colors.
    PageCopy,
    /// Assigning a frame to a page, or moving a page lazily.
    Fault,
    /// Recording a probe's entry, or rotating the counters.
    Interrupt,
}

/// A running machine's hardware.
pub struct Hardware {
    spec: MachineSpec,
    cores: Vec<Core>,
    /// Tick of the next event of each core.
    core_queue: CoreQueue,
    caches: Caches,
    sampling: SamplingUnit,
    ticks_per_cycle: u64,
    page_shift: u32,
    now_tick: u64,
}

/// Bytes of state for each line of a simulated cache: tag, age, state.
const LINE_STATE_BYTES: u64 = 12;

/// An error, rather than the end of the process, if this host lacks the memory for the machine's
/// caches.
fn check_host_memory(spec: &MachineSpec) -> Result<(), MachineSpecError> {
    let mut state_bytes = 0u64;
    for (index, cache) in spec.caches.iter().enumerate() {
        let lines = cache.size_bytes / u64::from(cache.line_bytes);
        let cache_state_bytes = lines
            .saturating_mul(LINE_STATE_BYTES)
            .saturating_mul(u64::from(spec.instance_count(cache)));
        state_bytes = state_bytes.saturating_add(cache_state_bytes);
        if !cachemate_core::can_allocate(state_bytes) {
            return Err(MachineSpecError {
                machine: spec.name.clone(),
                field: format!("caches[{index}].size_bytes"),
                found: cache.size_bytes.to_string(),
                expected: format!(
                    "caches that this host can simulate: their state would take {state_bytes} bytes"
                ),
            });
        }
    }

    Ok(())
}

impl Hardware {
    /// Builds the hardware of a machine.
    ///
    /// # Errors
    /// The first field that makes the machine impossible, or that exceeds the model.
    pub fn new(spec: &MachineSpec, options: HwOptions) -> Result<Self, MachineSpecError> {
        spec.check()?;
        check_host_memory(spec)?;
        let issue_width = match spec.pipeline {
            CoreModel::InOrder { issue_width, .. } | CoreModel::OutOfOrder { issue_width, .. } => {
                issue_width
            }
        };
        let ticks_per_cycle = u64::from(issue_width);
        let caches = Caches::new(spec, options, ticks_per_cycle)?;
        let first_unit_index = |level| {
            let earlier_caches = spec.caches.iter().take_while(|cache| cache.level != level);
            let has_level = spec.caches.iter().any(|cache| cache.level == level);
            has_level.then(|| {
                earlier_caches
                    .map(|cache| spec.instance_count(cache) as usize)
                    .sum::<usize>()
            })
        };

        // The caches were checked, so there is one.
        let l1d = first_unit_index(CacheLevel::L1Data).unwrap_or_default();
        let l1i = first_unit_index(CacheLevel::L1Instruction);
        let build_core = |core_number: u32| {
            let mut core = Core::new(
                spec,
                core_number,
                l1d + core_number as usize,
                l1i.map(|l1i| l1i + core_number as usize),
            );
            core.front_end.is_next_level_private =
                caches.units[core.front_end.l1d].is_next_level_private;
            core
        };
        let cores: Vec<Core> = (0..spec.cores()).map(build_core).collect();
        Ok(Hardware {
            core_queue: CoreQueue::new(cores.len()),
            cores,
            caches,
            sampling: SamplingUnit::new(&spec.counters, spec.pipeline, spec.hertz, ticks_per_cycle),
            ticks_per_cycle,
            page_shift: spec.pages.page_bytes.trailing_zeros(),
            now_tick: 0,
            spec: spec.clone(),
        })
    }

    /// The specification given to [`Hardware::new`].
    pub fn spec(&self) -> &MachineSpec {
        &self.spec
    }

    /// Counters are in ticks.
    pub fn ticks_per_cycle(&self) -> u64 {
        self.ticks_per_cycle
    }

    /// The cycle that every CPU has reached.
    pub fn now_cycles(&self) -> u64 {
        self.now_tick / self.ticks_per_cycle
    }

    fn context_index(&self, cpu: CpuId) -> (usize, usize) {
        let contexts_per_core = self.spec.contexts_per_core as usize;
        (
            cpu.0 as usize / contexts_per_core,
            cpu.0 as usize % contexts_per_core,
        )
    }

    fn context_mut(&mut self, cpu: CpuId) -> &mut HwContext {
        let (core, context_index) = self.context_index(cpu);
        &mut self.cores[core].front_end.contexts[context_index]
    }

    fn update_core_key(&mut self, cpu: CpuId) {
        let (core, _) = self.context_index(cpu);
        self.cores[core].update_contexts();
        self.core_queue.set(core, self.cores[core].next_tick());
    }

    /// Loads a thread onto a context, to run from `start_cycle` on. Returns the thread that the context had before.
    pub fn load(&mut self, cpu: CpuId, mut thread: HwThread, start_cycle: u64) -> Option<HwThread> {
        let previous_thread = self.unload(cpu);
        thread.counters.ticks_per_cycle = self.ticks_per_cycle;
        let tick = start_cycle * self.ticks_per_cycle;
        let context = self.context_mut(cpu);
        context.ready_at = context.ready_at.max(tick);
        context.accounted_until = context.ready_at;
        context.thread = Some(Box::new(thread));
        self.update_core_key(cpu);
        previous_thread
    }

    /// Removes and returns the thread on a context, even in the middle of an access.
    pub fn unload(&mut self, cpu: CpuId) -> Option<HwThread> {
        let now = self.now_tick;
        let context = self.context_mut(cpu);
        context.attribute_ticks(now);
        let thread = context.thread.take();
        if thread.is_some() {
            context.ready_at = context.accounted_until.max(now);
            context.stall_source = None;
            context.value_tick = 0;
            context.clear_in_flight();
        }
        self.update_core_key(cpu);
        thread.map(|thread| *thread)
    }

    /// Its counters are complete up to the last stop of [`Hardware::run`] for time, or for this
    /// CPU.
    pub fn thread(&self, cpu: CpuId) -> Option<&HwThread> {
        let (core, context_index) = self.context_index(cpu);
        self.cores[core].front_end.contexts[context_index]
            .thread
            .as_deref()
    }

    /// `None` if the CPU has no thread.
    pub fn thread_mut(&mut self, cpu: CpuId) -> Option<&mut HwThread> {
        self.context_mut(cpu).thread.as_deref_mut()
    }

    /// Charges this CPU with work of the operating system. A thread on it waits, and the time counts as its `system`
    /// time. Other contexts of the core are not slowed by it.
    pub fn charge_cycles(&mut self, cpu: CpuId, cycles: u64, charge: Charge) {
        let (now, ticks) = (self.now_tick, cycles * self.ticks_per_cycle);
        self.context_mut(cpu).charge_ticks(now, ticks, charge);
        self.update_core_key(cpu);
    }

    /// Runs until every CPU has reached `until_cycle` or a thread needs the operating system. Idle CPUs just wait.
    pub fn run(&mut self, until_cycle: u64, frames: &mut dyn FrameProvider) -> StopReason {
        let end_tick = until_cycle * self.ticks_per_cycle;
        let stop = self.run_cores(end_tick, frames);
        self.cores
            .iter_mut()
            .for_each(|core| core.end_run(&mut self.caches));
        if stop == StopReason::Time {
            self.now_tick = self.now_tick.max(end_tick);
            let contexts = self
                .cores
                .iter_mut()
                .flat_map(|core| &mut core.front_end.contexts);
            contexts.for_each(|context| context.attribute_ticks(end_tick));
        }
        stop
    }

    fn run_cores(&mut self, end_tick: u64, frames: &mut dyn FrameProvider) -> StopReason {
        let max_ahead_ticks = RUN_AHEAD_CYCLES * self.ticks_per_cycle;
        let mut environment = CoreEnvironment {
            caches: &mut self.caches,
            frames,
            page_shift: self.page_shift,
            ticks_per_cycle: self.ticks_per_cycle,
            sampling: self.sampling,
        };

        loop {
            let ((tick, core_number), second_earliest) = self.core_queue.find_two_earliest();
            if tick >= end_tick {
                return StopReason::Time;
            }
            self.now_tick = self.now_tick.max(tick);
            // At equal ticks, the core with the lower number comes first.
            let shared_bound = second_earliest
                .0
                .saturating_sub(u64::from(core_number > second_earliest.1));
            let core = &mut self.cores[core_number];
            let stop = core.advance(
                RunBounds {
                    shared_bound,
                    end_tick: end_tick.min(second_earliest.0.saturating_add(max_ahead_ticks)),
                },
                &mut environment,
            );
            self.core_queue.set(core_number, core.next_advance_tick);
            if let Some(stop) = stop {
                return stop;
            }
        }
    }

    /// Drops the translation of a page whose frame changes from all loaded threads. Threads that are not loaded drop
    /// theirs with [`HwThread::shoot_down`]; lines of the old frame stay until they are evicted or flushed.
    pub fn shoot_down(&mut self, process: ProcessId, page: u64) {
        let contexts = self
            .cores
            .iter_mut()
            .flat_map(|core| &mut core.front_end.contexts);
        for thread in contexts.filter_map(|context| context.thread.as_mut()) {
            if thread.process == process {
                thread.shoot_down(page);
            }
        }
    }

    /// Drops all lines of a frame from every cache, without writing them back, and clears its history: the frame gets
    /// another owner, whose first misses on it are cold.
    pub fn flush_frame(&mut self, frame: u64) {
        let frame_name = self.caches.pages.take_name(frame);
        self.caches
            .drop_frame_lines(frame_name << self.page_shift, 1 << self.page_shift);
    }

    /// Records that this CPU has just copied a virtual page to a frame, in a task's time: see
    /// [`Caches::insert_copied`].
    pub fn insert_copied(&mut self, cpu: CpuId, page: u64, frame: u64, task: TaskId) {
        let core = (cpu.0 / self.spec.contexts_per_core) as usize;
        let (l1d, address) = (
            self.cores[core].front_end.l1d,
            self.caches.pages.name_frame(frame, page) << self.page_shift,
        );
        let task = task.0.min(u32::from(u16::MAX) - 2) as u16;
        self.caches
            .insert_copied(l1d, address, 1 << self.page_shift, task, self.now_tick);
    }

    fn find_cache_unit(&self, cache: CacheId) -> Result<&CacheUnit, FieldError> {
        let cache_count = self.caches.units.len();
        self.caches
            .units
            .get(cache.0 as usize)
            .ok_or_else(|| FieldError::new("cache", cache.0, format!("below {cache_count}")))
    }

    /// Restricts a class of service to allocating in these ways of one cache; hits are not restricted.
    ///
    /// # Errors
    /// The cache cannot be partitioned, or the mask or class is outside its limits.
    pub fn set_way_mask(
        &mut self,
        cache: CacheId,
        class: u8,
        mask: &IndexSet,
    ) -> Result<(), FieldError> {
        let level = self.find_cache_unit(cache)?.level;
        let spec = self.spec.caches.iter().find(|spec| spec.level == level);
        let Some((ways, partition_spec)) =
            spec.and_then(|spec| Some((spec.ways, spec.way_partitions?)))
        else {
            return Err(FieldError::new(
                "cache",
                format!("{level:?}"),
                "a cache with way_partitions",
            ));
        };
        if u32::from(class) >= partition_spec.groups {
            return Err(FieldError::new(
                "class of service",
                class,
                format!("below {}", partition_spec.groups),
            ));
        }

        let (lowest_way, highest_way) =
            (mask.first().unwrap_or(0), mask.iter().last().unwrap_or(0));
        if mask.count() < partition_spec.min_ways || highest_way >= ways {
            let expected = format!("{} ways or more, below {ways}", partition_spec.min_ways);
            return Err(FieldError::new("way mask", mask, expected));
        }
        if partition_spec.contiguous && highest_way - lowest_way + 1 != mask.count() {
            return Err(FieldError::new("way mask", mask, "contiguous ways"));
        }

        let way_masks = &mut self.caches.units[cache.0 as usize].way_masks_by_class;
        way_masks.resize(way_masks.len().max(usize::from(class) + 1), None);
        way_masks[usize::from(class)] = Some(mask.iter().fold(0, |word, way| word | 1 << way));
        Ok(())
    }

    /// Counts of one hardware context since the start.
    pub fn cpu_counters(&self, cpu: CpuId) -> CpuCounters {
        let (core, context_index) = self.context_index(cpu);
        self.cores[core].front_end.contexts[context_index].counters
    }
    /// An unknown id has zeros.
    pub fn cache_counters(&self, cache: CacheId) -> CacheCounters {
        self.find_cache_unit(cache)
            .map(|unit| unit.counters)
            .unwrap_or_default()
    }
    /// An unknown node has zeros.
    pub fn memory_counters(&self, node: u32) -> MemoryCounters {
        self.caches.dram.memory_counters(node).unwrap_or_default()
    }
    /// `None` if packages have no bus.
    pub fn bus_counters(&self, package: u32) -> Option<BusCounters> {
        self.caches.dram.bus_counters(package)
    }

    /// Bytes of the lines that each task brought into the cache and that are still there, by
    /// ascending task, without zeros.
    pub fn occupancy_bytes(&self, cache: CacheId) -> Vec<(TaskId, u64)> {
        let Ok(unit) = self.find_cache_unit(cache) else {
            return Vec::new();
        };
        let lines = unit
            .lines_by_owner
            .iter()
            .enumerate()
            .filter(|(_, lines)| **lines > 0);
        lines
            .map(|(task, &lines)| (TaskId(task as u32), u64::from(lines) << unit.line_shift))
            .collect()
    }

    /// The set of every line in a cache, and the task that brought it.
    #[cfg(test)]
    pub(crate) fn lines_by_set(&self, cache: CacheId) -> Vec<(u64, TaskId)> {
        let store = &self.caches.units[cache.0 as usize].store;
        store
            .lines()
            .map(|(line, meta)| (store.set_of(line), TaskId(u32::from(meta.owner()))))
            .collect()
    }

    /// Entries are (evictor, victim, lines), ascending, without zeros, including a task's own.
    pub fn evictions(&self, cache: CacheId) -> Vec<(TaskId, TaskId, u64)> {
        let Ok(unit) = self.find_cache_unit(cache) else {
            return Vec::new();
        };
        let task_of_slot = |slot: u16| TaskId(u32::from(slot));
        unit.eviction_matrix
            .nonzero_counts()
            .map(|(evictor, owner, lines)| (task_of_slot(evictor), task_of_slot(owner), lines))
            .collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
