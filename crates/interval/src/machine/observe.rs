//! Reading of all counters at the end of a window.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheId, CacheLevel, CounterEvent, CounterScope, CpuId, EventCounts, Observation, StallCause,
    TaskSample, TimeSpan, Topology, WindowEnd,
};

use super::counter_noise::draw_readings;
use super::{IntervalMachine, IntervalTask};
use crate::engine::{
    DEMAND, FAR_CYCLES, FILLS, QUEUE_CYCLES, REFERENCES, REMOTE_CYCLES, REMOTE_HITS, STALL_CYCLES,
    TaskTotals, WRITEBACKS,
};

/// Positions of the shared counters.
#[derive(Clone, Debug)]
pub struct CounterScopes {
    /// Contended caches, in the topology's order.
    pub caches: Vec<CacheId>,
    pub level: CacheLevel,
    nodes: u32,
}

impl CounterScopes {
    pub fn new(topology: &Topology, nodes: u32) -> Self {
        let last_level_caches = || topology.caches.iter().filter(|cache| cache.last_level);
        CounterScopes {
            caches: last_level_caches().map(|cache| cache.id).collect(),
            level: last_level_caches()
                .next()
                .map_or(CacheLevel::L2, |cache| cache.level),
            nodes,
        }
    }
}

pub(super) fn subtract_totals(now: &TaskTotals, before: &TaskTotals) -> TaskTotals {
    let mut totals = TaskTotals {
        instructions: now.instructions - before.instructions,
        cycles: now.cycles - before.cycles,
        wait_cycles: now.wait_cycles - before.wait_cycles,
        switches: now.switches - before.switches,
        counts: now.counts,
    };
    totals
        .counts
        .iter_mut()
        .zip(&before.counts)
        .for_each(|(count, before)| *count -= before);
    totals
}

fn is_node(scope: &CounterScope) -> bool {
    matches!(scope, CounterScope::MemoryNode(_))
}

impl IntervalMachine {
    pub(super) fn build_observation(
        &mut self,
        start_ns: u64,
        end_reason: WindowEnd,
        window: u64,
    ) -> Observation {
        let elapsed_ns = self.now_ns - start_ns;
        let elapsed_cycles = Some(self.cycles_of(elapsed_ns) as u64);
        let span = TimeSpan {
            start_ns,
            elapsed_ns,
            elapsed_cycles,
        };

        let totals_since = |task: &IntervalTask| {
            subtract_totals(self.engine.task_totals(task.slot), &task.last_totals)
        };
        let true_totals: Vec<TaskTotals> = self.tasks.iter().map(totals_since).collect();
        let shared_counts = self.scope_counts(&true_totals);
        let booked_totals = self.apply_skew(&true_totals);
        let mut tasks = Vec::with_capacity(self.tasks.len());
        for (index, truth) in true_totals.iter().enumerate() {
            let sample = self.sample_task(index, truth, &booked_totals[index], elapsed_ns);
            self.tasks[index].last_totals = *self.engine.task_totals(self.tasks[index].slot);
            self.tasks[index].slowdown = Self::slowdown_of(truth);
            tasks.push(sample);
        }

        let probe_results = self.take_results();
        let mut applied_plan = self.read_back();
        applied_plan.add_refusals(std::mem::take(&mut self.refused));
        for (sum, (_, counts)) in self
            .node_bytes
            .iter_mut()
            .zip(shared_counts.iter().filter(|(scope, _)| is_node(scope)))
        {
            *sum += counts
                .0
                .iter()
                .map(|reading| reading.count as f64)
                .sum::<f64>();
        }

        let exited_tasks = || {
            self.tasks
                .iter()
                .filter(|interval_task| interval_task.exited)
        };
        for task in exited_tasks() {
            let totals = subtract_totals(self.engine.task_totals(task.slot), &task.totals_at_start);
            self.jobs[task.job].totals.add(&totals);
        }

        let exited_slots: Vec<u32> = exited_tasks()
            .map(|interval_task| interval_task.slot)
            .collect();
        self.tasks.retain(|interval_task| !interval_task.exited);
        let remaining_tasks = &self.tasks;
        self.colors.retain(|process, _| {
            remaining_tasks
                .iter()
                .any(|interval_task| interval_task.process == *process)
        });
        exited_slots
            .into_iter()
            .for_each(|slot| self.engine.remove_task(slot));

        Observation {
            window,
            span,
            end_reason,
            tasks,
            shared_counts,
            probe_results,
            applied: applied_plan,
        }
    }

    /// Events as booked with skew: a share of each task's goes to the next task on its CPU.
    fn apply_skew(&self, true_totals: &[TaskTotals]) -> Vec<TaskTotals> {
        let mut booked_totals = true_totals.to_vec();
        let skew = self.options.counter_noise.skew;
        if skew <= 0.0 {
            return booked_totals;
        }

        for (index, interval_task) in self.tasks.iter().enumerate() {
            let Some(cpu) = self.engine.run_queues.tasks[interval_task.slot as usize].cpu else {
                continue;
            };
            let queue = self.engine.run_queues.queued_tasks(cpu);
            let Some(queue_index) = queue.iter().position(|slot| *slot == interval_task.slot)
            else {
                continue;
            };
            let next_slot = queue[(queue_index + 1) % queue.len()];
            let next_index = self
                .tasks
                .iter()
                .position(|candidate| candidate.slot == next_slot);
            let Some(next_index) = next_index.filter(|next_index| *next_index != index) else {
                continue;
            };

            for count in 0..true_totals[index].counts.len() {
                let skewed_count = skew * true_totals[index].counts[count];
                booked_totals[index].counts[count] -= skewed_count;
                booked_totals[next_index].counts[count] += skewed_count;
            }
        }

        booked_totals
    }

    fn exact_counts(
        &self,
        interval_task: &IntervalTask,
        totals: &TaskTotals,
    ) -> Vec<(CounterEvent, f64)> {
        let (line_bytes, level) = (self.engine.line_bytes(), self.counter_scopes.level);
        let counts = &totals.counts;
        let mut exact_counts = vec![
            (CounterEvent::Instructions, totals.instructions),
            (CounterEvent::Cycles, totals.cycles),
            (CounterEvent::References(level), counts[REFERENCES]),
            (CounterEvent::Misses(level), counts[DEMAND]),
            (CounterEvent::MemoryReadBytes, counts[FILLS] * line_bytes),
            (
                CounterEvent::MemoryWriteBytes,
                counts[WRITEBACKS] * line_bytes,
            ),
            (CounterEvent::RemoteCacheHits, counts[REMOTE_HITS]),
            (
                CounterEvent::StallCycles(StallCause::LocalMemory),
                counts[STALL_CYCLES] - counts[FAR_CYCLES],
            ),
            (
                CounterEvent::StallCycles(StallCause::BusQueue),
                counts[QUEUE_CYCLES],
            ),
            (
                CounterEvent::StallCycles(StallCause::RemoteCache),
                counts[REMOTE_CYCLES],
            ),
            (CounterEvent::ContextSwitches, totals.switches),
        ];
        if self.spec.memory.nodes > 1 {
            exact_counts.push((
                CounterEvent::StallCycles(StallCause::RemoteMemory),
                counts[FAR_CYCLES],
            ));
        }

        let phase = &self.engine.program_of(interval_task.slot).phases
            [self.engine.phase_index(interval_task.slot) as usize];
        for private_level in phase
            .private_levels
            .iter()
            .filter(|private| private.level != level)
        {
            let at_level = private_level.level;
            let (references, misses) = (
                private_level.references_per_instr,
                private_level.misses_per_instr,
            );
            exact_counts.push((
                CounterEvent::References(at_level),
                references * totals.instructions,
            ));
            exact_counts.push((CounterEvent::Misses(at_level), misses * totals.instructions));
        }
        exact_counts
    }

    fn sample_task(
        &mut self,
        index: usize,
        totals: &TaskTotals,
        booked_totals: &TaskTotals,
        elapsed_ns: u64,
    ) -> TaskSample {
        let booked = TaskTotals {
            counts: booked_totals.counts,
            ..*totals
        };
        let exact_counts = self.exact_counts(&self.tasks[index], &booked);

        let (counter_count, counter_noise) = (self.spec.counters.count, self.options.counter_noise);
        let interval_task = &mut self.tasks[index];
        let counts = draw_readings(
            &exact_counts,
            counter_count,
            elapsed_ns as f64,
            counter_noise,
            &mut interval_task.noise,
        );
        let interval_task = &self.tasks[index];
        let to_ns = 1e9 / self.spec.hertz as f64;
        let queue_entry = &self.engine.run_queues.tasks[interval_task.slot as usize];
        let cpu = queue_entry.cpu.map(CpuId);
        let job = &self.jobs[interval_task.job].job;
        let ran_ns = (totals.cycles * to_ns) as u64;
        let pages_per_color = self
            .spec
            .pages
            .colors
            .map(|colors| self.pages_by_color(interval_task, colors));
        TaskSample {
            name: job.name.clone(),
            arrival_ns: interval_task.arrived_ns,
            exited: interval_task.exited,
            unmovable: interval_task.is_pinned,
            goal: job.goal,
            cpu: cpu.filter(|_| !interval_task.exited && queue_entry.share > 0.0),
            on_cpu_ns: cpu
                .filter(|_| ran_ns > 0)
                .map(|cpu| (cpu, ran_ns))
                .into_iter()
                .collect(),
            run_queue_wait_ns: Some((totals.wait_cycles * to_ns) as u64),
            counts,
            progress: job
                .program
                .progress_per_instr
                .map(|per_instr| per_instr * totals.instructions),
            pages_per_color,
            pages_per_node: (self.spec.memory.nodes > 1)
                .then(|| self.pages_by_node(interval_task))
                .flatten(),
            ..TaskSample::new(interval_task.task, interval_task.process)
        }
    }

    /// Pages of a program in its present phase; if the profile does not state it, as many as fill
    /// the cache four times.
    pub(super) fn program_pages(&self, slot: u32) -> f64 {
        let four_caches = 4.0 * f64::from(self.engine.capacity_lines()) * self.engine.line_bytes();
        let phase = &self.engine.program_of(slot).phases[self.engine.phase_index(slot) as usize];
        phase.footprint_bytes.unwrap_or(four_caches) / self.spec.pages.page_bytes as f64
    }

    fn pages_by_node(&self, interval_task: &IntervalTask) -> Option<Vec<u64>> {
        let memory_node = self.engine.memory_node(interval_task.slot)?;
        let pages_on_node = |node: usize| {
            if node == memory_node {
                self.program_pages(interval_task.slot) as u64
            } else {
                0
            }
        };
        Some(
            (0..self.spec.memory.nodes as usize)
                .map(pages_on_node)
                .collect(),
        )
    }

    fn pages_by_color(&self, interval_task: &IntervalTask, colors: u32) -> Vec<u64> {
        let pages = self.program_pages(interval_task.slot);
        let allowed_colors = self
            .colors
            .get(&interval_task.process)
            .map(|assignment| &assignment.allowed);
        let color_count = allowed_colors
            .map_or(colors, |allowed| allowed.count())
            .max(1);
        let is_allowed = |color: u32| allowed_colors.is_none_or(|allowed| allowed.contains(color));
        (0..colors)
            .map(|color| {
                if is_allowed(color) {
                    (pages / f64::from(color_count)) as u64
                } else {
                    0
                }
            })
            .collect()
    }

    fn scope_counts(&self, true_totals: &[TaskTotals]) -> Vec<(CounterScope, EventCounts)> {
        let line_bytes = self.engine.line_bytes();
        let mut cpus: BTreeMap<u32, f64> = BTreeMap::new();
        let mut caches = vec![(0.0, 0.0); self.counter_scopes.caches.len()];
        let mut nodes = vec![(0.0, 0.0); self.counter_scopes.nodes as usize];
        for (interval_task, truth) in self.tasks.iter().zip(true_totals) {
            if let Some(cpu) = self.engine.run_queues.tasks[interval_task.slot as usize].cpu {
                *cpus.entry(cpu).or_default() += truth.instructions;
            }
            let Some(cache) = self.engine.cache_of(interval_task.slot) else {
                continue;
            };
            caches[cache].0 += truth.counts[REFERENCES];
            caches[cache].1 += truth.counts[DEMAND];
            let node = self.engine.node_of_cache(cache);
            nodes[node].0 += truth.counts[FILLS] * line_bytes;
            nodes[node].1 += truth.counts[WRITEBACKS] * line_bytes;
        }

        let exact_readings = |event_values: &[(CounterEvent, f64)]| {
            EventCounts::exact(
                event_values
                    .iter()
                    .map(|&(event, count)| (event, count as u64)),
            )
        };

        let level = self.counter_scopes.level;
        let counts_of_cpu = |cpu: u32| {
            let instructions = *cpus.get(&cpu).unwrap_or(&0.0);
            (
                CounterScope::Cpu(CpuId(cpu)),
                exact_readings(&[(CounterEvent::Instructions, instructions)]),
            )
        };
        let mut shared_counts: Vec<(CounterScope, EventCounts)> =
            (0..self.spec.cpus()).map(counts_of_cpu).collect();
        for (id, (references, misses)) in self.counter_scopes.caches.iter().zip(caches) {
            let counts = exact_readings(&[
                (CounterEvent::References(level), references),
                (CounterEvent::Misses(level), misses),
            ]);
            shared_counts.push((CounterScope::Cache(*id), counts));
        }

        for (node, (read, written)) in nodes.into_iter().enumerate() {
            let counts = exact_readings(&[
                (CounterEvent::MemoryReadBytes, read),
                (CounterEvent::MemoryWriteBytes, written),
            ]);
            shared_counts.push((CounterScope::MemoryNode(node as u32), counts));
        }
        shared_counts
    }
}
