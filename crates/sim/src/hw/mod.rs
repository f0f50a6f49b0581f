//! The machine's hardware: cores, caches, coherence, prefetchers, buses, memory, counters.
//!
//! The operating system loads threads onto contexts, lets time pass with [`Hardware::run`], and is told when a thread
//! wants something of it. It answers translations through [`Frames`]. Nothing here decides who runs where.

pub mod counters;
#[allow(dead_code)]
pub mod probe;
#[allow(dead_code)]
mod thread;

use cachemate_core::{CacheId, CpuId, ImpossibleMachine, IndexSet, MachineSpec, ProcessId, TaskId, Turn};

pub use counters::*;
pub use probe::*;
pub use thread::Thread;

/// Choices that are not the machine's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HwOptions {
    pub seed: u64,
    /// False switches every prefetcher off.
    pub prefetch: bool,
}

impl Default for HwOptions {
    fn default() -> Self {
        HwOptions { seed: 1, prefetch: true }
    }
}

/// A translation, and what the operating system took for it (a fault, a page moved lazily).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Framed {
    /// Physical page number, below memory size / page size.
    pub frame: u64,
    pub cost_cycles: u64,
}

/// Asked when a thread's translation is not at hand; the operating system allocates, colours and charges.
pub trait Frames {
    /// `page` is a virtual page number; code pages are asked for like data pages, as loads.
    fn frame(&mut self, process: ProcessId, page: u64, cpu: CpuId, store: bool) -> Framed;
}

/// Why [`Hardware::run`] came back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// The time asked for is reached on every CPU.
    Time,
    /// The thread on `cpu` ended a batch with something other than [`Turn::More`]. It stays loaded, and goes on with
    /// its next batch if the operating system just runs the machine again.
    Turn { cpu: CpuId, turn: Turn, at_cycle: u64 },
    /// A probe of the task on `cpu` is full or overflowed.
    Interrupt { cpu: CpuId, task: TaskId, at_cycle: u64 },
}

/// What the operating system spends a CPU's time on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Charge {
    Switch,
    Migration,
    PageCopy,
    Fault,
    Interrupt,
}

/// The request cannot be met by this hardware.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what}: found {found}, expected {expected}")]
pub struct BadRequest {
    pub what: String,
    pub found: String,
    pub expected: String,
}

/// A machine's hardware, running.
pub struct Hardware {
    spec: MachineSpec,
    now: u64,
    contexts: Vec<(u64, Option<Thread>)>,
}

impl Hardware {
    /// # Errors
    /// The first field that makes the machine impossible.
    pub fn new(spec: &MachineSpec, _options: HwOptions) -> Result<Self, ImpossibleMachine> {
        spec.check()?;
        let contexts = (0..spec.cpus()).map(|_| (0, None)).collect();
        Ok(Hardware { spec: spec.clone(), now: 0, contexts })
    }

    /// The cycle up to which every CPU has run.
    pub fn now_cycles(&self) -> u64 {
        self.now
    }

    /// Puts a thread on an idle context from `at_cycle` on. A thread that is there already is given back.
    pub fn load(&mut self, cpu: CpuId, thread: Thread, at_cycle: u64) -> Option<Thread> {
        let context = &mut self.contexts[cpu.0 as usize];
        context.0 = context.0.max(at_cycle);
        context.1.replace(thread)
    }

    /// Takes the thread off, in the middle of whatever it does.
    pub fn unload(&mut self, cpu: CpuId) -> Option<Thread> {
        self.contexts[cpu.0 as usize].1.take()
    }

    pub fn thread(&self, cpu: CpuId) -> Option<&Thread> {
        self.contexts[cpu.0 as usize].1.as_ref()
    }

    pub fn thread_mut(&mut self, cpu: CpuId) -> Option<&mut Thread> {
        self.contexts[cpu.0 as usize].1.as_mut()
    }

    /// The operating system works on this CPU for so long; a thread on it waits, and the time is its `system` time.
    pub fn charge(&mut self, cpu: CpuId, cycles: u64, _what: Charge) {
        self.contexts[cpu.0 as usize].0 += cycles;
    }

    /// Runs until every CPU has reached `until_cycle` or a thread wants the operating system. Idle CPUs just wait.
    pub fn run(&mut self, until_cycle: u64, frames: &mut dyn Frames) -> Stop {
        let page_bytes = self.spec.pages.page_bytes;
        loop {
            let loaded =
                self.contexts.iter().enumerate().filter(|(_, (at, thread))| *at < until_cycle && thread.is_some());
            let Some(cpu) = loaded.min_by_key(|(index, (at, _))| (*at, *index)).map(|(index, _)| index) else {
                self.now = self.now.max(until_cycle);
                return Stop::Time;
            };
            let (at, Some(thread)) = &mut self.contexts[cpu] else { continue };
            self.now = self.now.max(*at);
            if let Some(&access) = thread.batch.get(thread.position) {
                thread.position += 1;
                thread.counters.instructions += access.instructions();
                *at += access.instructions();
                if access.kind() != cachemate_core::AccessKind::Compute {
                    let page = access.address() / page_bytes;
                    if thread.tlb.find(page).is_none() {
                        let framed = frames.frame(thread.process, page, CpuId(cpu as u32), false);
                        thread.tlb.insert(page, framed.frame);
                        *at += framed.cost_cycles;
                    }
                }
            } else {
                let turn = std::mem::replace(&mut thread.turn, Turn::More);
                if turn != Turn::More {
                    return Stop::Turn { cpu: CpuId(cpu as u32), turn, at_cycle: *at };
                }
                thread.batch.clear();
                thread.position = 0;
                thread.turn = thread.source.fill(&mut thread.batch);
            }
        }
    }

    /// The page's frame changes: its translation is dropped everywhere among loaded threads (threads that are off
    /// drop theirs with [`Thread::shoot_down`]), and the old frame's lines are flushed from every cache.
    pub fn shoot_down(&mut self, process: ProcessId, page: u64) {
        for (_, thread) in &mut self.contexts {
            if let Some(thread) = thread.as_mut().filter(|thread| thread.process == process) {
                thread.shoot_down(page);
            }
        }
    }

    /// Drops all lines of a frame from every cache, unwritten, and forgets its history: the frame is given to somebody
    /// else, whose first misses on it are cold.
    pub fn flush_frame(&mut self, _frame: u64) {}

    /// Lets a class of service allocate in these ways of one cache only; hits are not restricted.
    ///
    /// # Errors
    /// The cache cannot be partitioned, or the mask or class is outside its limits.
    pub fn set_way_mask(&mut self, _cache: CacheId, _class: u8, _mask: &IndexSet) -> Result<(), BadRequest> {
        Ok(())
    }

    pub fn cpu_counters(&self, _cpu: CpuId) -> CpuCounters {
        CpuCounters::default()
    }
    pub fn cache_counters(&self, _cache: CacheId) -> CacheCounters {
        CacheCounters::default()
    }
    pub fn memory_counters(&self, _node: u32) -> MemoryCounters {
        MemoryCounters::default()
    }
    pub fn bus_counters(&self, _package: u32) -> BusCounters {
        BusCounters::default()
    }

    /// Lines of the cache that each task brought and that are still there, in bytes; ascending tasks, none with zero.
    pub fn occupancy_bytes(&self, _cache: CacheId) -> Vec<(TaskId, u64)> {
        Vec::new()
    }

    /// Who evicted whom in one cache: (evictor, victim, lines), ascending, none with zero. Own evictions included.
    pub fn evictions(&self, _cache: CacheId) -> Vec<(TaskId, TaskId, u64)> {
        Vec::new()
    }
}
