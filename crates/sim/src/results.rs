//! Complete and exact results of a run: per task, per cache, and per memory node.
//!
//! Policies never use these results, because they get observations, with the limits of a counter unit; the results
//! serve to score a run. All times are simulated cycles; counts cover the measured part of the run (after
//! [`SimMachine::begin_measuring`]).

use std::collections::BTreeMap;

use cachemate_core::{CacheId, CacheLevel, CpuId, ProcessId, TaskId};
use serde::{Deserialize, Serialize};

use crate::baseline::{Baseline, TaskBaseline};
use crate::hw::{LevelCounts, MissCause, Stalls};
use crate::machine::SimMachine;

/// All results of one run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunResults {
    /// Name of the machine's specification.
    pub machine: String,
    /// Clock frequency of the cores.
    pub hertz: u64,
    /// Time scale of the run ([`crate::machine::SimOptions::scale_down`]); 1 is as published.
    pub scale: u64,
    /// Length of the measured part.
    pub elapsed_cycles: u64,
    /// Tasks in order of arrival, including exited ones.
    pub tasks: Vec<TaskResults>,
    /// Caches, numbered as in the topology.
    pub caches: Vec<CacheResults>,
    /// Memory controllers by node.
    pub memory: Vec<MemoryResults>,
    /// Fraction of the time of all CPUs in which a task was on them.
    pub busy_share: f64,
    /// Number of choices of the default scheduler, and cost of page moves.
    pub dispatcher: DispatcherResults,
}

/// The results of one task.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TaskResults {
    /// Number of the task: dense, in order of arrival.
    pub task: TaskId,
    /// Number of the process, which is the same for all threads of one run of a program.
    pub process: ProcessId,
    /// Name of the task's program.
    pub name: String,
    /// Whether the task has exited, before or during the measured part.
    pub exited: bool,
    /// Number of instructions issued.
    pub instructions: u64,
    /// Number of cycles on a processor.
    pub cycles: u64,
    /// Instructions over cycles on a processor; `None` if the task never ran.
    pub instructions_per_cycle: Option<f64>,
    /// Fraction of the elapsed time for which the task was on a processor.
    pub run_time_share: f64,
    /// Cycles on each CPU, in ascending order; CPUs on which the task never ran are left out.
    pub on_cpu_cycles: Vec<(CpuId, u64)>,
    /// Number of cycles in which the task was runnable without a CPU, whether queued or kept off by a gang's turn.
    pub wait_cycles: u64,
    /// Number of times that the task was put on a CPU.
    pub context_switches: u64,
    /// Number of times that the task was put on another CPU than its last one.
    pub migrations: u64,
    /// Number of faults that the operating system handled for the task.
    pub page_faults: u64,
    /// Progress in the task's own unit, if it has one.
    pub progress: Option<f64>,
    /// Accesses of the task at each level of the machine, in any cache of that level.
    pub levels: Vec<MissBreakdown>,
    /// Number of demand accesses that another cache answered.
    pub remote_cache_hits: u64,
    /// Number of bytes that the task's requests read from memory, including prefetches.
    pub memory_read_bytes: u64,
    /// Number of bytes that the task's requests wrote to memory.
    pub memory_write_bytes: u64,
    /// Cycles that no instruction used.
    pub stall_cycles: StallCycles,
}

/// Demand accesses at one level, with the causes of their misses.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MissBreakdown {
    /// Level of the accesses.
    pub level: CacheLevel,
    /// Number of hits and misses together, without prefetches.
    pub references: u64,
    /// Number of misses of all causes.
    pub misses: u64,
    /// Number of misses on lines that were never in this cache before.
    pub cold: u64,
    /// Number of misses on lines that the task itself had evicted (capacity and conflict misses).
    pub own: u64,
    /// Number of misses on lines that another task had evicted.
    pub inter_task: u64,
    /// Number of misses on lines that a store elsewhere had invalidated.
    pub coherence: u64,
    /// Number of hits on lines that a prefetcher brought; only the first hit on each line counts.
    pub prefetch_hits: u64,
}

/// Cycles on a processor that no instruction used, by cause.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct StallCycles {
    /// The task was ready, but another context of the core used the issue slot.
    pub issue: f64,
    /// The task waited for hits, by the level that served them, including the first level.
    pub hit: Vec<(CacheLevel, f64)>,
    /// The task waited for a line from another cache.
    pub remote_cache: f64,
    /// The task waited for memory of the local node.
    pub local_memory: f64,
    /// The task waited for memory of another node.
    pub remote_memory: f64,
    /// Part of any wait that was spent in queues for bandwidth, which no other field includes.
    pub queue: f64,
    /// The operating system used the task's time for faults, switches, interrupts and page copies.
    pub system: f64,
}

/// The results of one cache, over all its users.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CacheResults {
    /// Number of the cache, as in the topology.
    pub cache: CacheId,
    /// Level of the cache in the hierarchy.
    pub level: CacheLevel,
    /// Demand accesses of all tasks.
    pub demand: MissBreakdown,
    /// Number of lines that a task's fill displaced, here or in an inclusive cache behind.
    pub evictions: u64,
    /// Number of dirty lines written outward.
    pub writebacks: u64,
    /// Number of copies lost to stores elsewhere.
    pub invalidations: u64,
    /// Number of prefetches that this cache's prefetcher started.
    pub prefetches: u64,
    /// Number of bytes sent toward the cores, per elapsed cycle.
    pub bytes_per_cycle: f64,
    /// Number of lines of the second task that the first task evicted.
    pub evictions_by_pair: Vec<(TaskId, TaskId, u64)>,
    /// Number of bytes that each task occupies at the end.
    pub occupancy_bytes: Vec<(TaskId, u64)>,
}

/// The results of one memory controller.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MemoryResults {
    /// Memory node of the controller.
    pub node: u32,
    /// Number of bytes read, including prefetches.
    pub read_bytes: u64,
    /// Number of bytes written.
    pub write_bytes: u64,
    /// Number of bytes in both directions together, per elapsed cycle.
    pub bytes_per_cycle: f64,
    /// Fraction of the elapsed time in which the controller transferred bytes.
    pub busy_share: f64,
}

/// The number of choices of the default scheduler, and the cost of page moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DispatcherResults {
    /// Number of tasks chosen for a CPU that no gang or measurement held.
    pub picks: u64,
    /// Number of choices with more than one waiting task (AV-9).
    pub contested_picks: u64,
    /// Number of choices that penalties changed.
    pub picks_overridden: u64,
    /// Number of cycles spent on copying pages to other frames, summed over all CPUs.
    pub page_copy_cycles: u64,
}

impl SimMachine {
    /// Begins the measured part: earlier counts (a warm-up) are excluded from the results.
    pub fn begin_measuring(&mut self) {
        let now = self.system.now();
        self.system.dispatcher.account_to(now);
        self.programs
            .iter_mut()
            .for_each(|program| program.warm_up_completions = program.completions);

        let to_baseline = |index: usize| {
            let slot = self.tasks[index].slot;
            let dispatch_task = self.system.dispatcher.task(slot);
            TaskBaseline {
                counters: self.system.task_counters(slot),
                on_cpu_cycles: dispatch_task.on_cpu_cycles.clone(),
                wait_cycles: dispatch_task.wait_cycles,
                migrations: dispatch_task.migrations,
                progress: self
                    .system
                    .thread(slot)
                    .and_then(|thread| thread.progress())
                    .unwrap_or(0.0),
            }
        };

        self.baseline = Baseline {
            cycle: now,
            tasks: (0..self.tasks.len()).map(to_baseline).collect(),
            caches: self
                .topology
                .caches
                .iter()
                .map(|cache| self.cache_counters(cache.id))
                .collect(),
            memory: (0..self.spec.memory.nodes)
                .map(|node| self.system.hw.memory_counters(node))
                .collect(),
            evictions: self
                .topology
                .caches
                .iter()
                .map(|cache| self.evictions_by_task(cache.id))
                .collect(),
            picks: self.system.dispatcher.picks,
            page_copy_cycles: self.system.page_copy_cycles,
        };
    }

    /// Results of the measured part so far.
    pub fn collect_results(&mut self) -> RunResults {
        let now = self.system.now();
        self.system.dispatcher.account_to(now);
        let elapsed_cycles = now - self.baseline.cycle;
        let tasks: Vec<TaskResults> = (0..self.tasks.len())
            .map(|index| self.task_results(index, elapsed_cycles))
            .collect();
        let busy_cycles: u64 = tasks
            .iter()
            .flat_map(|task| &task.on_cpu_cycles)
            .map(|(_, cycles)| cycles)
            .sum();
        let total_cycles = (elapsed_cycles * u64::from(self.spec.cpus())).max(1);
        let (picks, picks_before) = (self.system.dispatcher.picks, self.baseline.picks);

        RunResults {
            machine: self.spec.name.clone(),
            hertz: self.spec.hertz,
            scale: self.clock.scale,
            elapsed_cycles,
            tasks,
            caches: (0..self.topology.caches.len())
                .map(|index| self.cache_results(index, elapsed_cycles))
                .collect(),
            memory: (0..self.spec.memory.nodes)
                .map(|node| self.memory_results(node, elapsed_cycles))
                .collect(),
            busy_share: busy_cycles as f64 / total_cycles as f64,
            dispatcher: DispatcherResults {
                picks: picks.total_picks - picks_before.total_picks,
                contested_picks: picks.contested_picks - picks_before.contested_picks,
                picks_overridden: picks.penalized_picks - picks_before.penalized_picks,
                page_copy_cycles: self.system.page_copy_cycles - self.baseline.page_copy_cycles,
            },
        }
    }

    fn task_results(&self, index: usize, elapsed_cycles: u64) -> TaskResults {
        let sim_task = &self.tasks[index];
        let slot = sim_task.slot;
        let baseline = self.baseline.tasks.get(index).cloned().unwrap_or_default();
        let counters = self.system.task_counters(slot).since(&baseline.counters);
        let dispatch_task = self.system.dispatcher.task(slot);
        let cycles_by_cpu = dispatch_task
            .on_cpu_cycles
            .iter()
            .enumerate()
            .map(|(cpu, &cycles)| {
                (
                    CpuId(cpu as u32),
                    cycles - baseline.on_cpu_cycles.get(cpu).copied().unwrap_or(0),
                )
            });
        let on_cpu_cycles: Vec<(CpuId, u64)> =
            cycles_by_cpu.filter(|(_, cycles)| *cycles > 0).collect();
        let run_cycles: u64 = on_cpu_cycles.iter().map(|(_, cycles)| cycles).sum();
        let cycles = counters.cycles();
        let progress = self
            .system
            .thread(slot)
            .and_then(|thread| thread.progress());

        TaskResults {
            task: TaskId(index as u32),
            process: self.process_id(self.system.task(slot).process),
            name: sim_task.name.clone(),
            exited: self.system.task(slot).exited_cycle.is_some(),
            instructions: counters.instructions,
            cycles,
            instructions_per_cycle: (cycles > 0)
                .then(|| counters.instructions as f64 / cycles as f64),
            run_time_share: run_cycles as f64 / elapsed_cycles.max(1) as f64,
            on_cpu_cycles,
            wait_cycles: dispatch_task.wait_cycles - baseline.wait_cycles,
            context_switches: counters.context_switches,
            migrations: dispatch_task.migrations - baseline.migrations,
            page_faults: counters.page_faults,
            progress: progress.map(|progress| progress - baseline.progress),
            levels: self
                .levels
                .iter()
                .map(|&level| to_breakdown(level, &counters.levels[level as usize]))
                .collect(),
            remote_cache_hits: counters.remote_cache_hits,
            memory_read_bytes: counters.memory_read_bytes,
            memory_write_bytes: counters.memory_write_bytes,
            stall_cycles: to_stall_cycles(&counters.stalls, counters.ticks_per_cycle, &self.levels),
        }
    }

    fn cache_results(&self, index: usize, elapsed_cycles: u64) -> CacheResults {
        let cache = &self.topology.caches[index];
        let (counters, baseline) = (
            self.cache_counters(cache.id),
            self.baseline.caches.get(index).copied().unwrap_or_default(),
        );
        let mut demand = counters.demand;
        demand.add(&baseline.demand, -1);
        let task_number = |task: TaskId| self.task_of_slot.get(&(task.0 as usize)).copied();
        let evictions_before = self.baseline.evictions.get(index);
        let lines_since = |pair, lines| {
            lines
                - evictions_before
                    .and_then(|earlier| earlier.get(&pair))
                    .copied()
                    .unwrap_or(0)
        };
        let evictions = self.evictions_by_task(cache.id).into_iter();
        let evictions = evictions.map(|((evictor, victim), lines)| {
            (evictor, victim, lines_since((evictor, victim), lines))
        });
        let bytes_by_owner = self.system.hw.occupancy_bytes(cache.id).into_iter();
        CacheResults {
            cache: cache.id,
            level: cache.level,
            demand: to_breakdown(cache.level, &demand),
            evictions: counters.evictions - baseline.evictions,
            writebacks: counters.writebacks - baseline.writebacks,
            invalidations: counters.invalidations - baseline.invalidations,
            prefetches: counters.prefetches - baseline.prefetches,
            bytes_per_cycle: (counters.bytes_out - baseline.bytes_out) as f64
                / elapsed_cycles.max(1) as f64,
            evictions_by_pair: evictions.filter(|(_, _, lines)| *lines > 0).collect(),
            occupancy_bytes: bytes_by_owner
                .filter_map(|(owner, bytes)| Some((task_number(owner)?, bytes)))
                .collect(),
        }
    }

    /// Tasks have the numbers under which they are reported; evictions by or of the machine's own
    /// threads are left out.
    fn evictions_by_task(&self, cache: CacheId) -> BTreeMap<(TaskId, TaskId), u64> {
        let task_number = |task: TaskId| self.task_of_slot.get(&(task.0 as usize)).copied();
        let evictions = self.system.hw.evictions(cache).into_iter();
        evictions
            .filter_map(|(evictor, victim, lines)| {
                Some(((task_number(evictor)?, task_number(victim)?), lines))
            })
            .collect()
    }

    fn memory_results(&self, node: u32, elapsed_cycles: u64) -> MemoryResults {
        let counters = self.system.hw.memory_counters(node);
        let baseline = self
            .baseline
            .memory
            .get(node as usize)
            .copied()
            .unwrap_or_default();
        let (read_bytes, write_bytes) = (
            counters.read_bytes - baseline.read_bytes,
            counters.write_bytes - baseline.write_bytes,
        );
        let cycles = elapsed_cycles.max(1) as f64;
        MemoryResults {
            node,
            read_bytes,
            write_bytes,
            bytes_per_cycle: (read_bytes + write_bytes) as f64 / cycles,
            busy_share: (counters.busy_ticks - baseline.busy_ticks) as f64
                / (cycles * self.ticks_per_cycle() as f64),
        }
    }
}

fn to_breakdown(level: CacheLevel, counts: &LevelCounts) -> MissBreakdown {
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

fn to_stall_cycles(stalls: &Stalls, ticks_per_cycle: u64, levels: &[CacheLevel]) -> StallCycles {
    let to_cycles = |ticks: u64| ticks as f64 / ticks_per_cycle.max(1) as f64;
    StallCycles {
        issue: to_cycles(stalls.issue),
        hit: levels
            .iter()
            .map(|&level| (level, to_cycles(stalls.hit[level as usize])))
            .collect(),
        remote_cache: to_cycles(stalls.remote_cache),
        local_memory: to_cycles(stalls.local_memory),
        remote_memory: to_cycles(stalls.remote_memory),
        queue: to_cycles(stalls.queue),
        system: to_cycles(stalls.system),
    }
}

impl RunResults {
    /// Instructions of all tasks for each elapsed cycle of the machine.
    pub fn instructions_per_cycle(&self) -> f64 {
        let instructions: u64 = self.tasks.iter().map(|task| task.instructions).sum();
        instructions as f64 / self.elapsed_cycles.max(1) as f64
    }

    /// Demand counts of all caches of one level together; `None` if the machine has no such cache.
    pub fn level_breakdown(&self, level: CacheLevel) -> Option<MissBreakdown> {
        let add_breakdowns = |a: MissBreakdown, b: MissBreakdown| MissBreakdown {
            level,
            references: a.references + b.references,
            misses: a.misses + b.misses,
            cold: a.cold + b.cold,
            own: a.own + b.own,
            inter_task: a.inter_task + b.inter_task,
            coherence: a.coherence + b.coherence,
            prefetch_hits: a.prefetch_hits + b.prefetch_hits,
        };
        self.caches
            .iter()
            .filter(|cache| cache.level == level)
            .map(|cache| cache.demand.clone())
            .reduce(add_breakdowns)
    }
}

impl MissBreakdown {
    /// Misses over references; `None` without references.
    pub fn miss_ratio(&self) -> Option<f64> {
        (self.references > 0).then(|| self.misses as f64 / self.references as f64)
    }
}
