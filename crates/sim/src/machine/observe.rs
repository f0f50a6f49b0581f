//! Builds observations of the whole state at the end of a window.

use cachemate_core::{
    CacheId, CounterEvent, CounterScope, CpuId, EventCounts, Observation, TaskId, TaskSample,
    TimeSpan, WindowEnd,
};

use super::SimMachine;
use crate::hw::{CacheCounters, CpuCounters, MemoryCounters};
use crate::os::queues::RunState;

/// Shared counters at the time of the last observation.
#[derive(Default)]
pub struct LastSharedCounts {
    caches: Vec<CacheCounters>,
    nodes: Vec<MemoryCounters>,
    cpus: Vec<CpuCounters>,
}

impl SimMachine {
    pub(crate) fn build_observation(
        &mut self,
        start: u64,
        end_reason: WindowEnd,
        window: u64,
    ) -> Observation {
        let elapsed = self.system.now() - start;
        let span = TimeSpan {
            start_ns: self.clock.to_nominal_ns(start),
            elapsed_ns: self.clock.to_nominal_ns(elapsed),
            elapsed_cycles: Some(elapsed),
        };
        self.system.dispatcher.account_to(self.system.now());
        self.read_counters();
        let unreported_tasks: Vec<usize> = (0..self.tasks.len())
            .filter(|&index| !self.tasks[index].is_exit_reported)
            .collect();
        let tasks = unreported_tasks
            .into_iter()
            .map(|index| self.sample_task(index))
            .collect();

        let counts_by_scope = self.take_scope_counts();
        let (probe_results, stopped_probes) = self.take_results();
        let mut applied_plan = self.read_back();
        applied_plan.refused = stopped_probes;
        applied_plan.add_refusals(std::mem::take(&mut self.refused));
        Observation {
            window,
            span,
            end_reason,
            tasks,
            shared_counts: counts_by_scope,
            probe_results,
            applied: applied_plan,
        }
    }

    fn sample_task(&mut self, index: usize) -> TaskSample {
        let slot = self.tasks[index].slot;
        let dispatch_task = self.system.dispatcher.task(slot);
        let cpu = match dispatch_task.state {
            RunState::Running(cpu) => Some(CpuId(cpu)),
            _ => None,
        };
        let (on_cpu_cycles, wait_cycles) = (
            dispatch_task.on_cpu_cycles.clone(),
            dispatch_task.wait_cycles,
        );
        let task = self.system.task(slot);
        let (process, has_exited, arrival_cycle) = (
            task.process,
            task.exited_cycle.is_some(),
            task.arrived_cycle,
        );
        let progress = self
            .system
            .thread(slot)
            .and_then(|thread| thread.progress());
        let counts = self.counter_multiplexer.take_counts(slot);
        let has_colors = self.spec.pages.colors.is_some();
        let pages_per_color =
            has_colors.then(|| self.system.memory.pages_per_color(process).to_vec());
        let pages_per_node = (self.spec.memory.nodes > 1)
            .then(|| self.system.memory.pages_per_node(process).to_vec());
        let process_id = self.process_id(process);
        let sim_task = &mut self.tasks[index];
        let on_cpu_ns = on_cpu_cycles
            .iter()
            .zip(&sim_task.reported_on_cpu_cycles)
            .enumerate()
            .filter(|(_, (now, previous))| now > previous);
        let on_cpu_ns = on_cpu_ns
            .map(|(cpu, (now, previous))| {
                (CpuId(cpu as u32), self.clock.to_nominal_ns(now - previous))
            })
            .collect();
        let wait_ns = self
            .clock
            .to_nominal_ns(wait_cycles - sim_task.reported_wait_cycles);
        let new_progress = progress.map(|progress| progress - sim_task.reported_progress);
        sim_task.reported_on_cpu_cycles = on_cpu_cycles;
        sim_task.reported_wait_cycles = wait_cycles;
        sim_task.reported_progress = progress.unwrap_or(0.0);
        sim_task.is_exit_reported = has_exited;
        TaskSample {
            task: TaskId(index as u32),
            process: process_id,
            user: None,
            name: sim_task.name.clone(),
            service: None,
            arrival_ns: self.clock.to_nominal_ns(arrival_cycle),
            exited: has_exited,
            unmovable: sim_task.is_pinned,
            goal: sim_task.goal,
            cpu,
            on_cpu_ns,
            run_queue_wait_ns: Some(wait_ns),
            counts,
            progress: new_progress,
            pages_per_color,
            pages_per_node,
            stored_profile: None,
        }
    }

    /// Counts of caches, memory controllers and CPUs in the window.
    fn take_scope_counts(&mut self) -> Vec<(CounterScope, EventCounts)> {
        let current_counts = LastSharedCounts {
            caches: self
                .topology
                .caches
                .iter()
                .map(|cache| self.cache_counters(cache.id))
                .collect(),
            nodes: (0..self.spec.memory.nodes)
                .map(|node| self.system.hw.memory_counters(node))
                .collect(),
            cpus: self
                .topology
                .cpus
                .iter()
                .map(|cpu| self.system.hw.cpu_counters(cpu.id))
                .collect(),
        };

        let previous_counts = std::mem::take(&mut self.last_shared);
        let mut counts_by_scope = Vec::new();
        for (index, cpu) in current_counts.cpus.iter().enumerate() {
            let previous_cpu = previous_counts.cpus.get(index).copied().unwrap_or_default();
            let counts = EventCounts::exact([(
                CounterEvent::Instructions,
                cpu.instructions - previous_cpu.instructions,
            )]);
            counts_by_scope.push((CounterScope::Cpu(CpuId(index as u32)), counts));
        }

        for (index, cache) in current_counts.caches.iter().enumerate() {
            let previous_cache = previous_counts
                .caches
                .get(index)
                .copied()
                .unwrap_or_default();
            let level = self.topology.caches[index].level;
            let counts = EventCounts::exact([
                (
                    CounterEvent::References(level),
                    cache.demand.references - previous_cache.demand.references,
                ),
                (
                    CounterEvent::Misses(level),
                    cache.demand.all_misses() - previous_cache.demand.all_misses(),
                ),
            ]);
            counts_by_scope.push((CounterScope::Cache(CacheId(index as u32)), counts));
        }

        for (index, node) in current_counts.nodes.iter().enumerate() {
            let previous_node = previous_counts
                .nodes
                .get(index)
                .copied()
                .unwrap_or_default();
            let counts = EventCounts::exact([
                (
                    CounterEvent::MemoryReadBytes,
                    node.read_bytes - previous_node.read_bytes,
                ),
                (
                    CounterEvent::MemoryWriteBytes,
                    node.write_bytes - previous_node.write_bytes,
                ),
            ]);
            counts_by_scope.push((CounterScope::MemoryNode(index as u32), counts));
        }

        self.last_shared = current_counts;
        counts_by_scope
    }
}
