//! Hardware counters: per task, per cache, per processor, per memory node.
//!
//! Time is counted in *ticks*, the issue slots of a core: one cycle has as many ticks as the core's issue width. Every
//! tick that a task is on a processor is attributed to exactly one owner (an instruction, a stall cause, or the
//! system), and every miss to exactly one cause; the tests check these sums.

use cachemate_core::{CacheLevel, CounterEvent, EventCounts, StallCause};

/// Number of [`CacheLevel`]s; arrays by level are indexed with `level as usize`.
pub const LEVEL_COUNT: usize = 5;

/// All levels, in the order of the arrays.
pub const ALL_LEVELS: [CacheLevel; LEVEL_COUNT] = [
    CacheLevel::L1Instruction,
    CacheLevel::L1Data,
    CacheLevel::L2,
    CacheLevel::L3,
    CacheLevel::L4,
];

/// The reason why a requested line was not in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum MissCause {
    /// The line was never in this cache.
    Cold,
    /// The task itself evicted the line (capacity or conflict).
    Own,
    /// Another task evicted the line.
    InterTask,
    /// A store of another cache invalidated the line.
    Coherence,
}

/// Demand accesses of one cache (or of one task at one level). Prefetches are not references.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LevelCounts {
    /// Hits and misses together.
    pub references: u64,
    /// Misses by [`MissCause`].
    pub misses: [u64; 4],
    /// Demand hits on lines that a prefetcher brought; only the first hit on each line counts.
    pub prefetch_hits: u64,
}

impl LevelCounts {
    /// The sum over the causes, because each miss has one.
    pub fn all_misses(&self) -> u64 {
        self.misses.iter().sum()
    }
    /// The part of one cause in [`Self::all_misses`].
    pub fn misses_from(&self, cause: MissCause) -> u64 {
        self.misses[cause as usize]
    }
    pub(crate) fn add(&mut self, other: &Self, sign: i64) {
        let add_signed =
            |sum: &mut u64, change: u64| *sum = sum.wrapping_add_signed(sign * change as i64);
        add_signed(&mut self.references, other.references);
        add_signed(&mut self.prefetch_hits, other.prefetch_hits);
        self.misses
            .iter_mut()
            .zip(other.misses)
            .for_each(|(sum, change)| add_signed(sum, change));
    }
}

/// Ticks on a processor that were not used for instructions, by owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stalls {
    /// Ready, but another context used the issue slot.
    pub issue: u64,
    /// Waiting for a hit, by level.
    pub hit: [u64; LEVEL_COUNT],
    /// Waiting for a line from another cache.
    pub remote_cache: u64,
    /// Waiting for memory of the local node.
    pub local_memory: u64,
    /// Waiting for memory of another node.
    pub remote_memory: u64,
    /// The part of any wait that was spent in queues for bandwidth.
    pub queue: u64,
    /// Used by the operating system (faults, interrupts, switches) during the task's time.
    pub system: u64,
}

impl Stalls {
    /// Stalls for data from beyond the first level, including queues.
    pub fn data_stalls(&self) -> u64 {
        let hits: u64 = self.hit[CacheLevel::L2 as usize..].iter().sum();
        hits + self.remote_cache + self.local_memory + self.remote_memory + self.queue
    }
    /// Stalls of all causes; together with the issue slots of instructions, these are the ticks on
    /// a processor.
    pub fn sum(&self) -> u64 {
        self.issue
            + self.hit.iter().sum::<u64>()
            + self.remote_cache
            + self.local_memory
            + self.remote_memory
            + self.queue
            + self.system
    }
}

/// All counts of one task since it began. The counts are raw and complete; the multiplexer models the limits of a
/// counter unit.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TaskCounters {
    /// Ticks of one cycle; 0 until the task first ran.
    pub ticks_per_cycle: u64,
    /// Number of instructions that the task has issued.
    pub instructions: u64,
    /// Ticks on a processor.
    pub ticks: u64,
    /// Ticks on a processor that no instruction used.
    pub stalls: Stalls,
    /// Counts, indexed by `level as usize`.
    pub levels: [LevelCounts; LEVEL_COUNT],
    /// Demand accesses that another cache answered.
    pub remote_cache_hits: u64,
    /// Bytes that the task's requests read from memory, including prefetches.
    pub memory_read_bytes: u64,
    /// Bytes that the task's requests wrote to memory: stores written through, and dirty lines that they displace or
    /// that become shared.
    pub memory_write_bytes: u64,
    /// Number of context switches, counted by the operating system.
    pub context_switches: u64,
    /// Number of faults that the operating system handled for the task.
    pub page_faults: u64,
    /// Number of batches that the task ended with a request to the operating system.
    pub system_calls: u64,
}

impl TaskCounters {
    /// Cycles on a processor, rounded down.
    pub fn cycles(&self) -> u64 {
        self.ticks / self.ticks_per_cycle.max(1)
    }

    /// The raw count; `None` if the event is not counted per task.
    pub fn event_count(&self, event: CounterEvent) -> Option<u64> {
        let cycles_of = |ticks: u64| ticks / self.ticks_per_cycle.max(1);

        Some(match event {
            CounterEvent::Instructions => self.instructions,
            CounterEvent::Cycles => self.cycles(),
            CounterEvent::References(level) => self.levels[level as usize].references,
            CounterEvent::Misses(level) => self.levels[level as usize].all_misses(),
            CounterEvent::InterTaskMisses(level) => {
                self.levels[level as usize].misses_from(MissCause::InterTask)
            }
            CounterEvent::RemoteCacheHits => self.remote_cache_hits,
            CounterEvent::MemoryReadBytes => self.memory_read_bytes,
            CounterEvent::MemoryWriteBytes => self.memory_write_bytes,
            CounterEvent::StallCycles(StallCause::Issue) => cycles_of(self.stalls.issue),
            CounterEvent::StallCycles(StallCause::Hit(level)) => {
                cycles_of(self.stalls.hit[level as usize])
            }
            CounterEvent::StallCycles(StallCause::RemoteCache) => {
                cycles_of(self.stalls.remote_cache)
            }
            CounterEvent::StallCycles(StallCause::LocalMemory) => {
                cycles_of(self.stalls.local_memory)
            }
            CounterEvent::StallCycles(StallCause::RemoteMemory) => {
                cycles_of(self.stalls.remote_memory)
            }
            CounterEvent::StallCycles(StallCause::BusQueue) => cycles_of(self.stalls.queue),
            CounterEvent::ContextSwitches => self.context_switches,
            CounterEvent::PageFaults => self.page_faults,
            CounterEvent::SystemCalls => self.system_calls,
            CounterEvent::MemoryBytes => self.memory_read_bytes + self.memory_write_bytes,
            CounterEvent::LocalMemoryBytes | CounterEvent::CoreEnergyMicrojoules => return None,
        })
    }

    /// Events as an ideal counter unit reads them: sorted, without multiplexing. `levels` are the
    /// machine's levels; events of other levels are left out rather than reported as zeros.
    pub fn all_event_counts(&self, levels: &[CacheLevel]) -> EventCounts {
        let events = counted_events(levels);
        EventCounts::exact(
            events
                .into_iter()
                .filter_map(|event| Some((event, self.event_count(event)?))),
        )
    }

    /// `earlier_counters` is an older copy of these counters.
    pub fn since(&self, earlier_counters: &Self) -> Self {
        let mut levels = self.levels;
        levels
            .iter_mut()
            .zip(&earlier_counters.levels)
            .for_each(|(now, earlier_level)| now.add(earlier_level, -1));
        let (stalls, earlier_stalls) = (&self.stalls, &earlier_counters.stalls);

        TaskCounters {
            ticks_per_cycle: self.ticks_per_cycle,
            instructions: self.instructions - earlier_counters.instructions,
            ticks: self.ticks - earlier_counters.ticks,
            stalls: Stalls {
                issue: stalls.issue - earlier_stalls.issue,
                hit: std::array::from_fn(|level| stalls.hit[level] - earlier_stalls.hit[level]),
                remote_cache: stalls.remote_cache - earlier_stalls.remote_cache,
                local_memory: stalls.local_memory - earlier_stalls.local_memory,
                remote_memory: stalls.remote_memory - earlier_stalls.remote_memory,
                queue: stalls.queue - earlier_stalls.queue,
                system: stalls.system - earlier_stalls.system,
            },
            levels,
            remote_cache_hits: self.remote_cache_hits - earlier_counters.remote_cache_hits,
            memory_read_bytes: self.memory_read_bytes - earlier_counters.memory_read_bytes,
            memory_write_bytes: self.memory_write_bytes - earlier_counters.memory_write_bytes,
            context_switches: self.context_switches - earlier_counters.context_switches,
            page_faults: self.page_faults - earlier_counters.page_faults,
            system_calls: self.system_calls - earlier_counters.system_calls,
        }
    }
}

/// Events in ascending order.
pub fn counted_events(levels: &[CacheLevel]) -> Vec<CounterEvent> {
    let mut events = vec![
        CounterEvent::Instructions,
        CounterEvent::Cycles,
        CounterEvent::RemoteCacheHits,
    ];
    events.extend([
        CounterEvent::MemoryReadBytes,
        CounterEvent::MemoryWriteBytes,
    ]);
    events.extend([
        CounterEvent::ContextSwitches,
        CounterEvent::PageFaults,
        CounterEvent::SystemCalls,
    ]);
    for &level in levels {
        events.extend([
            CounterEvent::References(level),
            CounterEvent::Misses(level),
            CounterEvent::InterTaskMisses(level),
        ]);
        events.push(CounterEvent::StallCycles(StallCause::Hit(level)));
    }

    let causes = [
        StallCause::Issue,
        StallCause::RemoteCache,
        StallCause::LocalMemory,
        StallCause::RemoteMemory,
        StallCause::BusQueue,
    ];
    events.extend(causes.map(CounterEvent::StallCycles));
    events.sort();
    events
}

/// The counts of one cache, over all its users.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheCounters {
    /// Demand accesses of all tasks.
    pub demand: LevelCounts,
    /// Lines displaced by a task's fill, in this cache or in an inclusive cache of a further level.
    pub evictions: u64,
    /// Dirty lines written outward.
    pub writebacks: u64,
    /// Copies lost to stores of other caches.
    pub invalidations: u64,
    /// Prefetches started by this cache's prefetcher.
    pub prefetches: u64,
    /// Bytes that this cache sent toward the cores.
    pub bytes_out: u64,
    /// Ticks that requests queued for the path to the cores.
    pub queue_ticks: u64,
}

/// The counts of one memory controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryCounters {
    /// Bytes read, including prefetches.
    pub read_bytes: u64,
    /// Bytes written, as lines or stores.
    pub write_bytes: u64,
    /// Ticks for which the controller was busy.
    pub busy_ticks: u64,
    /// Ticks that requests queued, summed over the requests.
    pub queue_ticks: u64,
}

/// The counts of one package bus.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BusCounters {
    /// Bytes passed, in both directions.
    pub bytes: u64,
    /// Ticks in which the bytes were passed.
    pub busy_ticks: u64,
    /// Ticks that requests queued, summed over the requests.
    pub queue_ticks: u64,
}

/// The counts of one hardware context.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuCounters {
    /// Instructions of all tasks that ran on the context.
    pub instructions: u64,
    /// Ticks with a task on the context.
    pub loaded_ticks: u64,
    /// Ticks charged by the operating system, by [`super::Charge`].
    pub charged_ticks: [u64; 5],
}
