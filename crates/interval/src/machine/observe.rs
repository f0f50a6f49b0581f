//! Reading all counters at the end of a window.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheId, CacheLevel, CounterEvent, CounterScope, CpuId, EventCount, EventCounts, Observation, StallCause,
    TaskSample, TimeSpan, Topology, WindowEnd,
};

use super::counter_noise::readings;
use super::{IntervalMachine, IntervalTask};
use crate::engine::{
    DEMAND, FAR_CYCLES, FILLS, QUEUE_CYCLES, REFERENCES, REMOTE_CYCLES, REMOTE_HITS, STALL_CYCLES, TaskTotals,
    WRITEBACKS,
};

/// Positions of the shared counters.
#[derive(Clone, Debug)]
pub struct CounterPlaces {
    /// Contended caches, in the topology's order.
    pub caches: Vec<CacheId>,
    pub level: CacheLevel,
    nodes: u32,
}

impl CounterPlaces {
    pub fn new(topology: &Topology, nodes: u32) -> Self {
        let contended = || topology.caches.iter().filter(|cache| cache.last_level);
        CounterPlaces {
            caches: contended().map(|cache| cache.id).collect(),
            level: contended().next().map_or(CacheLevel::L2, |cache| cache.level),
            nodes,
        }
    }
}

/// The difference between the totals `now` and `before`.
pub(super) fn subtract_totals(now: &TaskTotals, before: &TaskTotals) -> TaskTotals {
    let mut totals = TaskTotals {
        instructions: now.instructions - before.instructions,
        cycles: now.cycles - before.cycles,
        wait_cycles: now.wait_cycles - before.wait_cycles,
        switches: now.switches - before.switches,
        counts: now.counts,
    };
    totals.counts.iter_mut().zip(&before.counts).for_each(|(count, before)| *count -= before);
    totals
}

fn is_node(place: &CounterScope) -> bool {
    matches!(place, CounterScope::MemoryNode(_))
}

impl IntervalMachine {
    pub(super) fn observation(&mut self, start_ns: u64, ended: WindowEnd, window: u64) -> Observation {
        let elapsed_ns = self.now_ns - start_ns;
        let elapsed_cycles = Some(self.cycles_of(elapsed_ns) as u64);
        let span = TimeSpan { start_ns, elapsed_ns, elapsed_cycles };
        let truths: Vec<TaskTotals> =
            self.known.iter().map(|known| subtract_totals(self.engine.task_totals(known.slot), &known.seen)).collect();
        let places = self.scope_counts(&truths);
        let skewed = self.skew(&truths);
        let mut tasks = Vec::with_capacity(self.known.len());
        for (index, done) in truths.iter().enumerate() {
            let seen = self.sample_task(index, done, &skewed[index], elapsed_ns);
            self.known[index].seen = *self.engine.task_totals(self.known[index].slot);
            self.known[index].slowdown = Self::slowdown_of(done);
            tasks.push(seen);
        }
        let answers = self.answers();
        let mut in_force = self.read_back();
        in_force.refused.append(&mut self.refused);
        for (sum, (_, counts)) in self.node_bytes.iter_mut().zip(places.iter().filter(|(place, _)| is_node(place))) {
            *sum += counts.0.iter().map(|reading| reading.count as f64).sum::<f64>();
        }
        for known in self.known.iter().filter(|known| known.exited) {
            self.jobs[known.job].book.add(&subtract_totals(self.engine.task_totals(known.slot), &known.measured_from));
        }
        let exited_slots: Vec<u32> = self.known.iter().filter(|known| known.exited).map(|known| known.slot).collect();
        self.known.retain(|known| !known.exited);
        let known = &self.known;
        self.colors.retain(|process, _| known.iter().any(|known| known.process == *process));
        exited_slots.into_iter().for_each(|slot| self.engine.stop(slot));
        Observation {
            window,
            span,
            end_reason: ended,
            tasks,
            shared_counts: places,
            probe_results: answers,
            applied: in_force,
        }
    }

    /// Events as booked with skew: a share of each task's events goes to the next task on its CPU.
    fn skew(&self, truths: &[TaskTotals]) -> Vec<TaskTotals> {
        let mut booked = truths.to_vec();
        let skew = self.options.defects.skew;
        if skew <= 0.0 {
            return booked;
        }
        for (index, known) in self.known.iter().enumerate() {
            let Some(cpu) = self.engine.turns.tasks[known.slot as usize].cpu else { continue };
            let queue = self.engine.turns.queue(cpu);
            let Some(own) = queue.iter().position(|slot| *slot == known.slot) else { continue };
            let next = queue[(own + 1) % queue.len()];
            let Some(to) = self.known.iter().position(|other| other.slot == next).filter(|to| *to != index) else {
                continue;
            };
            for count in 0..truths[index].counts.len() {
                let moved = skew * truths[index].counts[count];
                booked[index].counts[count] -= moved;
                booked[to].counts[count] += moved;
            }
        }
        booked
    }

    fn exact_counts(&self, known: &IntervalTask, done: &TaskTotals) -> Vec<(CounterEvent, f64)> {
        let (line, level) = (self.engine.line_bytes(), self.places.level);
        let counts = &done.counts;
        let mut truth = vec![
            (CounterEvent::Instructions, done.instructions),
            (CounterEvent::Cycles, done.cycles),
            (CounterEvent::References(level), counts[REFERENCES]),
            (CounterEvent::Misses(level), counts[DEMAND]),
            (CounterEvent::MemoryReadBytes, counts[FILLS] * line),
            (CounterEvent::MemoryWriteBytes, counts[WRITEBACKS] * line),
            (CounterEvent::RemoteCacheHits, counts[REMOTE_HITS]),
            (CounterEvent::StallCycles(StallCause::LocalMemory), counts[STALL_CYCLES] - counts[FAR_CYCLES]),
            (CounterEvent::StallCycles(StallCause::BusQueue), counts[QUEUE_CYCLES]),
            (CounterEvent::StallCycles(StallCause::RemoteCache), counts[REMOTE_CYCLES]),
            (CounterEvent::ContextSwitches, done.switches),
        ];
        if self.spec.memory.nodes > 1 {
            truth.push((CounterEvent::StallCycles(StallCause::RemoteMemory), counts[FAR_CYCLES]));
        }
        let phase = &self.engine.program(known.slot).phases[self.engine.phase(known.slot) as usize];
        for private in phase.private_levels.iter().filter(|private| private.level != level) {
            truth.push((CounterEvent::References(private.level), private.references_per_instr * done.instructions));
            truth.push((CounterEvent::Misses(private.level), private.misses_per_instr * done.instructions));
        }
        truth
    }

    fn sample_task(&mut self, index: usize, done: &TaskTotals, booked: &TaskTotals, elapsed_ns: u64) -> TaskSample {
        let booked = TaskTotals { counts: booked.counts, ..*done };
        let truth = self.exact_counts(&self.known[index], &booked);
        let (at_once, defects) = (self.spec.counters.count, self.options.defects);
        let known = &mut self.known[index];
        let counts = readings(&truth, at_once, elapsed_ns as f64, defects, &mut known.noise);
        let known = &self.known[index];
        let to_ns = 1e9 / self.spec.hertz as f64;
        let sched = &self.engine.turns.tasks[known.slot as usize];
        let cpu = sched.cpu.map(CpuId);
        let job = &self.jobs[known.job].job;
        let ran_ns = (done.cycles * to_ns) as u64;
        let pages_per_color = self.spec.pages.colors.map(|colors| self.pages_by_color(known, colors));
        TaskSample {
            name: job.name.clone(),
            arrival_ns: known.arrived_ns,
            exited: known.exited,
            unmovable: known.fixed,
            goal: job.goal,
            cpu: cpu.filter(|_| !known.exited && sched.share > 0.0),
            on_cpu_ns: cpu.filter(|_| ran_ns > 0).map(|cpu| (cpu, ran_ns)).into_iter().collect(),
            run_queue_wait_ns: Some((done.wait_cycles * to_ns) as u64),
            counts,
            progress: job.program.progress_per_instr.map(|each| each * done.instructions),
            pages_per_color,
            pages_per_node: (self.spec.memory.nodes > 1).then(|| self.pages_by_node(known)).flatten(),
            ..TaskSample::new(known.task, known.process)
        }
    }

    /// Pages of a program in its present phase; if its profile does not state them, as many as fill the cache four
    /// times.
    fn pages(&self, known: &IntervalTask) -> f64 {
        let four_caches = 4.0 * f64::from(self.engine.capacity_lines()) * self.engine.line_bytes();
        let phase = &self.engine.program(known.slot).phases[self.engine.phase(known.slot) as usize];
        phase.footprint_bytes.unwrap_or(four_caches) / self.spec.pages.page_bytes as f64
    }

    fn pages_by_node(&self, known: &IntervalTask) -> Option<Vec<u64>> {
        let lies_on = self.engine.memory_node(known.slot)?;
        let pages_on_node = |node: usize| if node == lies_on { self.pages(known) as u64 } else { 0 };
        Some((0..self.spec.memory.nodes as usize).map(pages_on_node).collect())
    }

    fn pages_by_color(&self, known: &IntervalTask, colors: u32) -> Vec<u64> {
        let pages = self.pages(known);
        let share = self.colors.get(&known.process).map(|held| &held.allowed);
        let count = share.map_or(colors, |allowed| allowed.count()).max(1);
        let is_allowed = |color: u32| share.is_none_or(|allowed| allowed.contains(color));
        (0..colors).map(|color| if is_allowed(color) { (pages / f64::from(count)) as u64 } else { 0 }).collect()
    }

    fn scope_counts(&self, truths: &[TaskTotals]) -> Vec<(CounterScope, EventCounts)> {
        let line = self.engine.line_bytes();
        let mut cpus: BTreeMap<u32, f64> = BTreeMap::new();
        let mut caches = vec![(0.0, 0.0); self.places.caches.len()];
        let mut nodes = vec![(0.0, 0.0); self.places.nodes as usize];
        for (known, done) in self.known.iter().zip(truths) {
            if let Some(cpu) = self.engine.turns.tasks[known.slot as usize].cpu {
                *cpus.entry(cpu).or_default() += done.instructions;
            }
            let Some(cache) = self.engine.cache_of(known.slot) else { continue };
            caches[cache].0 += done.counts[REFERENCES];
            caches[cache].1 += done.counts[DEMAND];
            let node = self.engine.node_of_cache(cache);
            nodes[node].0 += done.counts[FILLS] * line;
            nodes[node].1 += done.counts[WRITEBACKS] * line;
        }
        let exact = |event_values: &[(CounterEvent, f64)]| {
            let reading =
                |&(event, count): &(CounterEvent, f64)| EventCount { event, count: count as u64, enabled_share: 1.0 };
            EventCounts(event_values.iter().map(reading).collect())
        };
        let level = self.places.level;
        let cpu = |cpu: u32| {
            (CounterScope::Cpu(CpuId(cpu)), exact(&[(CounterEvent::Instructions, *cpus.get(&cpu).unwrap_or(&0.0))]))
        };
        let mut shared_counts: Vec<(CounterScope, EventCounts)> = (0..self.spec.cpus()).map(cpu).collect();
        for (id, (references, misses)) in self.places.caches.iter().zip(caches) {
            let counts = exact(&[(CounterEvent::References(level), references), (CounterEvent::Misses(level), misses)]);
            shared_counts.push((CounterScope::Cache(*id), counts));
        }
        for (node, (read, written)) in nodes.into_iter().enumerate() {
            let counts = exact(&[(CounterEvent::MemoryReadBytes, read), (CounterEvent::MemoryWriteBytes, written)]);
            shared_counts.push((CounterScope::MemoryNode(node as u32), counts));
        }
        shared_counts
    }
}
