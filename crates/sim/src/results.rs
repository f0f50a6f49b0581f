//! The results of a run, complete and exact: per task, per cache, per memory node.
//!
//! Policies never use this: they get observations, with the limits of a counter unit. Results are scored by this.
//! All times are simulated cycles; counts cover the measured part of the run (after [`SimMachine::begin_measuring`]).

use std::collections::BTreeMap;

use cachemate_core::{CacheId, CacheLevel, CpuId, ProcessId, TaskId};
use serde::{Deserialize, Serialize};

use crate::baseline::{Baseline, TaskBaseline};
use crate::hw::{LevelCounts, MissCause, Stalls};
use crate::machine::SimMachine;

/// Everything measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunResults {
    /// Name of the machine's specification.
    pub machine: String,
    /// Clock of the cores.
    pub hertz: u64,
    /// [`crate::machine::SimOptions::scale`]; 1 = as published.
    pub scale: u64,
    /// Length of the measured part.
    pub elapsed_cycles: u64,
    /// In order of arrival, ended ones included.
    pub tasks: Vec<TaskResults>,
    /// As the topology numbers them.
    pub caches: Vec<CacheResults>,
    /// By node.
    pub memory: Vec<MemoryResults>,
    /// Share of all CPUs' time with a task on them.
    pub busy_share: f64,
    /// How often the default scheduler had a choice.
    pub dispatcher: DispatcherResults,
}

/// The results of one task.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TaskResults {
    /// Dense, in order of arrival.
    pub task: TaskId,
    /// The same for all threads of one run of a program.
    pub process: ProcessId,
    /// Name of its program.
    pub name: String,
    /// It has ended, before the measured part or within.
    pub exited: bool,
    /// Instructions issued.
    pub instructions: u64,
    /// Cycles on the processor.
    pub cycles: u64,
    /// Absent where it never ran.
    pub instructions_per_cycle: Option<f64>,
    /// Share of the elapsed time on the processor.
    pub run_time_share: f64,
    /// Cycles on each CPU, ascending CPUs; those that it never ran on are left out.
    pub on_cpu_cycles: Vec<(CpuId, u64)>,
    /// Cycles runnable without a CPU, whether queued or kept off by a gang's turn.
    pub wait_cycles: u64,
    /// Times that it was put on a CPU.
    pub context_switches: u64,
    /// Times that it was put on another CPU than its last one.
    pub migrations: u64,
    /// Faults that the operating system answered for it.
    pub page_faults: u64,
    /// Progress in its own unit, where it has one.
    pub progress: Option<f64>,
    /// Each level that the machine has, with the task's accesses in any of its caches.
    pub levels: Vec<MissBreakdown>,
    /// Demand accesses that another cache answered.
    pub remote_cache_hits: u64,
    /// Bytes that its requests brought from memory, prefetches included.
    pub memory_read_bytes: u64,
    /// Bytes that its requests sent to memory.
    pub memory_write_bytes: u64,
    /// Cycles that no instruction used.
    pub stall_cycles: StallCycles,
}

/// Demand accesses at one level and why they missed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MissBreakdown {
    /// Where the accesses came by.
    pub level: CacheLevel,
    /// Hits and misses together; prefetches are neither.
    pub references: u64,
    /// Misses of all causes.
    pub misses: u64,
    /// The line was never in this cache before.
    pub cold: u64,
    /// Capacity and conflict: the task itself had evicted the line.
    pub own: u64,
    /// Another task had evicted the line.
    pub inter_task: u64,
    /// A store elsewhere had invalidated the line.
    pub coherence: u64,
    /// Hits on lines that a prefetcher brought, the first on each.
    pub prefetch_hits: u64,
}

/// Where the cycles on processor went that no instruction used.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct StallCycles {
    /// Ready, but another context of the core had the issue slot.
    pub issue: f64,
    /// Waiting for hits, by the level that answered; first-level hits too.
    pub hit: Vec<(CacheLevel, f64)>,
    /// Waiting for a line out of another cache.
    pub remote_cache: f64,
    /// Waiting for memory of the own node.
    pub local_memory: f64,
    /// Waiting for memory of another node.
    pub remote_memory: f64,
    /// The part of any wait that went to queues for bandwidth; it is in no other field.
    pub queue: f64,
    /// The operating system on the task's time: faults, switches, interrupts, page copies.
    pub system: f64,
}

/// The results of one cache, over all its users.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CacheResults {
    /// As the topology numbers it.
    pub cache: CacheId,
    /// Level of the hierarchy.
    pub level: CacheLevel,
    /// Demand accesses of all tasks.
    pub demand: MissBreakdown,
    /// Lines that a task's fill pushed out, here or in an inclusive cache behind.
    pub evictions: u64,
    /// Dirty lines passed outwards.
    pub writebacks: u64,
    /// Copies lost to stores elsewhere.
    pub invalidations: u64,
    /// Prefetches that this cache's prefetcher started.
    pub prefetches: u64,
    /// Bytes given towards the cores, per elapsed cycle.
    pub bytes_per_cycle: f64,
    /// Lines that the first task evicted of the second.
    #[serde(alias = "who_evicted_whom")]
    pub evictions_by_pair: Vec<(TaskId, TaskId, u64)>,
    /// Bytes held at the end.
    pub occupancy_bytes: Vec<(TaskId, u64)>,
}

/// The results of one memory controller.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MemoryResults {
    /// Its node.
    pub node: u32,
    /// Bytes read, prefetches included.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Both directions together, per elapsed cycle.
    pub bytes_per_cycle: f64,
    /// Share of the elapsed time in which it passed bytes.
    pub busy_share: f64,
}

/// How often the default scheduler chose, and what moving pages took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DispatcherResults {
    /// Tasks chosen for a CPU that no gang or measurement held.
    pub picks: u64,
    /// More than one task was waiting (AV-9).
    #[serde(alias = "picks_with_a_choice")]
    pub contested_picks: u64,
    /// Penalties changed the choice.
    #[serde(alias = "picks_swayed")]
    pub picks_overridden: u64,
    /// Cycles spent on copying pages to other frames, of all CPUs together.
    pub page_copy_cycles: u64,
}

impl SimMachine {
    /// Begins the measurement: earlier counts (a warm-up) are excluded from the results.
    pub fn begin_measuring(&mut self) {
        let now = self.system.now();
        self.system.dispatcher.account_to(now);
        self.programs.iter_mut().for_each(|program| program.completions_before = program.completions);
        let task = |index: usize| {
            let slot = self.known[index].slot;
            let state = self.system.dispatcher.task(slot);
            TaskBaseline {
                counters: self.system.counters(slot),
                on_cpu_cycles: state.on_cpu_cycles.clone(),
                wait_cycles: state.wait_cycles,
                migrations: state.migrations,
                progress: self.system.thread(slot).and_then(|thread| thread.progress()).unwrap_or(0.0),
            }
        };
        self.baseline = Baseline {
            cycle: now,
            tasks: (0..self.known.len()).map(task).collect(),
            caches: self.topology.caches.iter().map(|cache| self.cache_counters(cache.id)).collect(),
            memory: (0..self.spec.memory.nodes).map(|node| self.system.hw.memory_counters(node)).collect(),
            evictions: self.topology.caches.iter().map(|cache| self.evictions(cache.id)).collect(),
            picks: self.system.dispatcher.picks,
            page_copy_cycles: self.system.page_copy_cycles,
        };
    }

    /// Everything measured so far.
    pub fn results(&mut self) -> RunResults {
        let now = self.system.now();
        self.system.dispatcher.account_to(now);
        let elapsed_cycles = now - self.baseline.cycle;
        let tasks: Vec<TaskResults> =
            (0..self.known.len()).map(|index| self.task_results(index, elapsed_cycles)).collect();
        let busy: u64 = tasks.iter().flat_map(|task| &task.on_cpu_cycles).map(|(_, cycles)| cycles).sum();
        let whole = (elapsed_cycles * u64::from(self.spec.cpus())).max(1);
        let (picks, before) = (self.system.dispatcher.picks, self.baseline.picks);
        RunResults {
            machine: self.spec.name.clone(),
            hertz: self.spec.hertz,
            scale: self.clock.scale,
            elapsed_cycles,
            tasks,
            caches: (0..self.topology.caches.len()).map(|index| self.cache_results(index, elapsed_cycles)).collect(),
            memory: (0..self.spec.memory.nodes).map(|node| self.memory_results(node, elapsed_cycles)).collect(),
            busy_share: busy as f64 / whole as f64,
            dispatcher: DispatcherResults {
                picks: picks.all - before.all,
                contested_picks: picks.contested - before.contested,
                picks_overridden: picks.overridden_by_penalty - before.overridden_by_penalty,
                page_copy_cycles: self.system.page_copy_cycles - self.baseline.page_copy_cycles,
            },
        }
    }

    fn task_results(&self, index: usize, elapsed_cycles: u64) -> TaskResults {
        let known = &self.known[index];
        let slot = known.slot;
        let before = self.baseline.tasks.get(index).cloned().unwrap_or_default();
        let counters = self.system.counters(slot).subtract_earlier(&before.counters);
        let state = self.system.dispatcher.task(slot);
        let on_cpu =
            state.on_cpu_cycles.iter().enumerate().map(|(cpu, &cycles)| {
                (CpuId(cpu as u32), cycles - before.on_cpu_cycles.get(cpu).copied().unwrap_or(0))
            });
        let on_cpu_cycles: Vec<(CpuId, u64)> = on_cpu.filter(|(_, cycles)| *cycles > 0).collect();
        let ran_cycles: u64 = on_cpu_cycles.iter().map(|(_, cycles)| cycles).sum();
        let cycles = counters.cycles();
        let progress = self.system.thread(slot).and_then(|thread| thread.progress());
        TaskResults {
            task: TaskId(index as u32),
            process: self.process_id(self.system.task(slot).process),
            name: known.name.clone(),
            exited: self.system.task(slot).exited_cycle.is_some(),
            instructions: counters.instructions,
            cycles,
            instructions_per_cycle: (cycles > 0).then(|| counters.instructions as f64 / cycles as f64),
            run_time_share: ran_cycles as f64 / elapsed_cycles.max(1) as f64,
            on_cpu_cycles,
            wait_cycles: state.wait_cycles - before.wait_cycles,
            context_switches: counters.context_switches,
            migrations: state.migrations - before.migrations,
            page_faults: counters.page_faults,
            progress: progress.map(|progress| progress - before.progress),
            levels: self.levels.iter().map(|&level| misses_by(level, &counters.levels[level as usize])).collect(),
            remote_cache_hits: counters.remote_cache_hits,
            memory_read_bytes: counters.memory_read_bytes,
            memory_write_bytes: counters.memory_write_bytes,
            stall_cycles: stall_cycles(&counters.stalls, counters.ticks_per_cycle, &self.levels),
        }
    }

    fn cache_results(&self, index: usize, elapsed_cycles: u64) -> CacheResults {
        let cache = &self.topology.caches[index];
        let (now, before) =
            (self.cache_counters(cache.id), self.baseline.caches.get(index).copied().unwrap_or_default());
        let mut demand = now.demand;
        demand.add(&before.demand, -1);
        let task = |task: TaskId| self.task_of_slot.get(&(task.0 as usize)).copied();
        let earlier = self.baseline.evictions.get(index);
        let since = |pair, lines| lines - earlier.and_then(|earlier| earlier.get(&pair)).copied().unwrap_or(0);
        let evictions = self.evictions(cache.id).into_iter();
        let evictions = evictions.map(|((evictor, victim), lines)| (evictor, victim, since((evictor, victim), lines)));
        let occupancy = self.system.hw.occupancy_bytes(cache.id).into_iter();
        CacheResults {
            cache: cache.id,
            level: cache.level,
            demand: misses_by(cache.level, &demand),
            evictions: now.evictions - before.evictions,
            writebacks: now.writebacks - before.writebacks,
            invalidations: now.invalidations - before.invalidations,
            prefetches: now.prefetches - before.prefetches,
            bytes_per_cycle: (now.bytes_out - before.bytes_out) as f64 / elapsed_cycles.max(1) as f64,
            evictions_by_pair: evictions.filter(|(_, _, lines)| *lines > 0).collect(),
            occupancy_bytes: occupancy.filter_map(|(owner, bytes)| Some((task(owner)?, bytes))).collect(),
        }
    }

    /// Evictions by the outside's tasks; the machine's own threads are left out.
    fn evictions(&self, cache: CacheId) -> BTreeMap<(TaskId, TaskId), u64> {
        let task = |task: TaskId| self.task_of_slot.get(&(task.0 as usize)).copied();
        let all = self.system.hw.evictions(cache).into_iter();
        all.filter_map(|(evictor, victim, lines)| Some(((task(evictor)?, task(victim)?), lines))).collect()
    }

    fn memory_results(&self, node: u32, elapsed_cycles: u64) -> MemoryResults {
        let now = self.system.hw.memory_counters(node);
        let before = self.baseline.memory.get(node as usize).copied().unwrap_or_default();
        let (read_bytes, write_bytes) = (now.read_bytes - before.read_bytes, now.write_bytes - before.write_bytes);
        let cycles = elapsed_cycles.max(1) as f64;
        MemoryResults {
            node,
            read_bytes,
            write_bytes,
            bytes_per_cycle: (read_bytes + write_bytes) as f64 / cycles,
            busy_share: (now.busy_ticks - before.busy_ticks) as f64 / (cycles * self.ticks_per_cycle() as f64),
        }
    }
}

fn misses_by(level: CacheLevel, counts: &LevelCounts) -> MissBreakdown {
    MissBreakdown {
        level,
        references: counts.references,
        misses: counts.all_misses(),
        cold: counts.misses_from(MissCause::Cold),
        own: counts.misses_from(MissCause::Own),
        inter_task: counts.misses_from(MissCause::InterTask),
        coherence: counts.misses_from(MissCause::Coherence),
        prefetch_hits: counts.prefetch_hits,
    }
}

fn stall_cycles(stalls: &Stalls, ticks_per_cycle: u64, levels: &[CacheLevel]) -> StallCycles {
    let cycles = |ticks: u64| ticks as f64 / ticks_per_cycle.max(1) as f64;
    StallCycles {
        issue: cycles(stalls.issue),
        hit: levels.iter().map(|&level| (level, cycles(stalls.hit[level as usize]))).collect(),
        remote_cache: cycles(stalls.remote_cache),
        local_memory: cycles(stalls.local_memory),
        remote_memory: cycles(stalls.remote_memory),
        queue: cycles(stalls.queue),
        system: cycles(stalls.system),
    }
}

impl RunResults {
    /// Instructions of all tasks per elapsed cycle.
    pub fn instructions_per_cycle(&self) -> f64 {
        let all: u64 = self.tasks.iter().map(|task| task.instructions).sum();
        all as f64 / self.elapsed_cycles.max(1) as f64
    }

    /// Demand counts of all caches of one level together; `None` where the machine has none.
    pub fn level(&self, level: CacheLevel) -> Option<MissBreakdown> {
        let add = |a: MissBreakdown, b: MissBreakdown| MissBreakdown {
            level,
            references: a.references + b.references,
            misses: a.misses + b.misses,
            cold: a.cold + b.cold,
            own: a.own + b.own,
            inter_task: a.inter_task + b.inter_task,
            coherence: a.coherence + b.coherence,
            prefetch_hits: a.prefetch_hits + b.prefetch_hits,
        };
        self.caches.iter().filter(|cache| cache.level == level).map(|cache| cache.demand.clone()).reduce(add)
    }
}

impl MissBreakdown {
    /// Misses over references; `None` without references.
    pub fn miss_ratio(&self) -> Option<f64> {
        (self.references > 0).then(|| self.misses as f64 / self.references as f64)
    }
}
