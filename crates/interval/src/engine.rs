//! The engine of the interval machine: its state, and how the state advances in time.
//!
//! A run covers hours, and what a program does to a cache is settled within a millisecond or so. So
//! between two changes (of a phase, a turn or a plan) occupancies and speeds only approach a steady
//! state, and the engine follows them in steps that begin at a fraction of the cache's turnover and
//! grow as the changes fade. Every cache has its own steps, and the progress of its tasks is booked
//! at each of them. All caches of a memory node share its controller, so a change of the
//! controller's load is propagated to all of them at once.
//!
//! For example, a cache of 65,536 lines into which its programs fetch 0.02 lines a cycle turns over
//! in 3.3 million cycles, a millisecond at 3 GHz. After a change the first step is an eighth of
//! that. Once the occupancies stand still, each step is six times as long as the one before, up to
//! a second. Steps of an eighth of a millisecond would be seven million for a quarter of an hour in
//! which nothing happens.
//!
//! A step allocates nothing, and the same calls give the same bits.

use cachemate_core::{CoreModel, CpuSet, LineLifetimes, MachineSpec};

use crate::curve::PhaseCurves;
use crate::memory::{MemoryDemand, MemorySystem, Prefetch, QueueServer};
use crate::occupancy::OccupancyModel;
use crate::program::PhasedProgram;
use crate::run_queues::RunQueues;
use crate::sharing::Regions;
use crate::smt;
use crate::synthetic_trace::DistanceDistribution;

/// Index into [`TaskTotals::counts`]: demand references of the contended cache.
pub const REFERENCES: usize = 0;
/// Index into [`TaskTotals::counts`]: demand misses of the contended cache.
pub const DEMAND: usize = 1;
/// Index into [`TaskTotals::counts`]: lines brought into the contended cache, by demand or by prefetchers.
pub const FILLS: usize = 2;
/// Index into [`TaskTotals::counts`]: lines written back to memory.
pub const WRITEBACKS: usize = 3;
/// Index into [`TaskTotals::counts`]: cycles spent waiting for memory, as in a solo run with the same occupancy.
pub const STALL_CYCLES: usize = 4;
/// Index into [`TaskTotals::counts`]: cycles in the queues of buses and controllers.
pub const QUEUE_CYCLES: usize = 5;
/// Index into [`TaskTotals::counts`]: lines that came from another cache.
pub const REMOTE_HITS: usize = 6;
/// Index into [`TaskTotals::counts`]: cycles spent on lines from another cache.
pub const REMOTE_CYCLES: usize = 7;
/// Index into [`TaskTotals::counts`]: cycles that the task's instructions would have taken alone with the whole
/// cache.
pub const SOLO_CYCLES: usize = 8;
/// Index into [`TaskTotals::counts`]: the part of [`STALL_CYCLES`] that is spent waiting for memory of another node.
pub const FAR_CYCLES: usize = 9;
const COUNT_KINDS: usize = 10;

/// Cache index of a task that is on no cache.
pub(crate) const NO_CACHE: u32 = u32::MAX;
/// Occupancies count as steady if none of them changes by more than this share of the capacity in a step.
const STEADY_CHANGE: f32 = 1e-3;
const STEADY_STEP_GROWTH: f64 = 6.0;
const TARGET_CHANGE: f32 = 0.04;
/// Length of the first step after a change, in turnovers of the cache.
const FIRST_STEP: f64 = 1.0 / 8.0;
/// Length of the first step after the arrival of a task without lines in the cache, in turnovers.
const FIRST_STEP_OF_NEWCOMER: f64 = 1.0 / 32.0;
/// Change of a controller's load below which only the cache that causes the change is updated.
const MIN_REPORTED_LOAD_CHANGE: f32 = 0.003;
const MAX_STEP_NS: f64 = 1e9;
const MIN_STEP_CYCLES: f64 = 1_000.0;
/// Shortest step as a share of the time in which neighbors fill a cache: what a program holds does not follow them
/// faster.
const MIN_STEP_LIFETIMES: f64 = 0.01;

/// All work of a task since its arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TaskTotals {
    /// Number of instructions, with a fraction for the instruction in progress.
    pub instructions: f64,
    /// Cycles on a processor.
    pub cycles: f64,
    /// Cycles in which the task was runnable but had no processor.
    pub wait_cycles: f64,
    /// Context switches.
    pub switches: f64,
    /// Events by the indices [`REFERENCES`] to [`FAR_CYCLES`].
    pub counts: [f64; COUNT_KINDS],
}

/// A program in the engine's representation.
struct CompiledProgram {
    program: PhasedProgram,
    first_curve: u32,
    /// The regions used in each phase: the region's position, and reads and writes per instruction.
    regions: Vec<Vec<(usize, f64, f64)>>,
}

/// The state of all tasks by slot, as parallel arrays.
#[derive(Default)]
struct Slots {
    program: Vec<u32>,
    phase: Vec<u32>,
    phase_left_instr: Vec<f64>,
    /// Whether the profile includes the task's first touches, and the task still has all lines that it has brought in
    /// since its start.
    starts_from_empty_cache: Vec<bool>,
    /// Instructions until the task ends, whatever its phases; infinite if its phases decide.
    work_left_instr: Vec<f64>,
    model_index: Vec<u32>,
    model_entry: Vec<u32>,
    memory_demand: Vec<MemoryDemand>,
    /// Share of the task's prefetches that are dropped.
    dropped_prefetch_share: Vec<f32>,
    /// Extra cycles per instruction because of shared issue slots, halved private caches and remote lines.
    extra_cycles_per_instr: Vec<f32>,
    counts_per_instr: Vec<[f32; COUNT_KINDS]>,
    totals: Vec<TaskTotals>,
    /// Instructions per cycle of external traffic, which needs no CPU; 0 for tasks.
    external_rate: Vec<f64>,
    /// Whether the program has ended or the task was removed.
    is_finished: Vec<bool>,
    /// The task's rate as registered with each region, kept so that it can be removed.
    registered_rate: Vec<f64>,
    registered_phase: Vec<u32>,
    /// Context switches per cycle.
    switches: Vec<f64>,
    /// Share of the task's processor time that is taken for other work.
    stolen_share: Vec<f32>,
    /// The process's position in [`IntervalEngine::memory_nodes`].
    memory_index: Vec<u32>,
}

impl Slots {
    #[inline]
    fn is_off_cpu(&self, index: usize) -> bool {
        self.memory_demand[index].cpu_share <= 0.0 && self.external_rate[index] <= 0.0
    }
}

/// The simulated machine and the tasks that run on it.
pub struct IntervalEngine {
    divisible_lines: f32,
    /// Cycles per second of every core.
    pub hertz: f64,
    min_step_cycles: f64,
    curves: PhaseCurves,
    line_bytes: f64,
    programs: Vec<CompiledProgram>,
    slots: Slots,
    free_slots: Vec<u32>,
    occupancy_models: Vec<OccupancyModel>,
    package_of_model: Vec<u32>,
    node_of_model: Vec<usize>,
    /// First CPU of each core that uses the cache, by cache.
    cores_of_model: Vec<Vec<u32>>,
    /// Position of each cache in the topology; for a separated cache, that of the cache from which it was separated.
    topology_cache_of_model: Vec<usize>,
    cache_count: usize,
    /// Number of unused models at the end of `occupancy_models`.
    spare_models: usize,
    memory: MemorySystem,
    /// Node of each process's pages, which is the node where the process first ran (first touch).
    memory_nodes: Vec<Option<usize>>,
    shared_regions: Regions,
    pub(crate) run_queues: RunQueues,
    now: f64,
    /// Cycle at which each cache's next step is due.
    next_step_at: Vec<f64>,
    step_length: Vec<f64>,
    /// Number of steps of all caches so far.
    pub step_count: u64,
    /// Length of each cache's first step after a change, in turnovers; 0 if nothing has changed since its last step.
    first_step_turnovers: Vec<f64>,
    /// Time at which the first of a cache's current phases ends, by cache.
    phase_ends_at: Vec<f64>,
    /// Load of each node's controller when it was last propagated to all caches.
    reported_load: Vec<f32>,
    /// Lines per cycle to and from memory, by cache.
    traffic: Vec<f32>,
    /// Slots whose programs have ended since this list was last emptied.
    pub(crate) ended_slots: Vec<u32>,
    issue_slot_cycles: f32,
    contexts_per_core: u32,
    core_wait_share: Vec<f32>,
    same_package_cycles: f64,
    other_package_cycles: f64,
    domain_members: Vec<Vec<(u32, u8)>>,
    /// Limits of traffic to memory, by cache.
    bandwidth_limits: Vec<Vec<TrafficLimit>>,
}

/// The largest traffic to memory of some tasks on one cache.
#[derive(Clone, Debug, PartialEq)]
pub struct TrafficLimit {
    /// The largest traffic.
    pub cap: TrafficCap,
    /// Slots of the tasks.
    pub slots: Vec<u32>,
}

/// The unit of a [`TrafficLimit`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TrafficCap {
    /// Lines per cycle of all tasks together.
    LinesPerCycle(f32),
    /// Share of the lines that each task's core can request at most.
    RequestShare(f32),
}

impl IntervalEngine {
    /// Creates a machine without tasks from a checked specification. Returns `None` if the machine has no data cache
    /// that can be shared.
    pub fn new(spec: &MachineSpec, is_explicit: bool) -> Option<Self> {
        Self::with_spares(spec, is_explicit, 0)
    }

    /// Like [`IntervalEngine::new`], with spare caches for [`IntervalEngine::move_to_spare_cache`].
    pub(crate) fn with_spares(
        spec: &MachineSpec,
        is_explicit: bool,
        spare_models: usize,
    ) -> Option<Self> {
        let last_level = spec.last_level_cache()?;
        let (cache_count, hertz) = (spec.instance_count(last_level) as usize, spec.hertz as f64);
        let model_count = cache_count + spare_models;
        let line_bytes = f64::from(last_level.line_bytes);
        let capacity = last_level.attainable_bytes() as f64 / line_bytes;
        let neighbor_bytes_per_cycle = last_level.neighbor_bytes_per_cycle.unwrap_or(0.0);
        let cpus_per_cache = last_level.shared_by_cores * spec.contexts_per_core;
        let cpus_per_package = spec.cores_per_package * spec.contexts_per_core;
        let cycles_of_ns = |ns: u64| ns as f64 * hertz / 1e9;
        let memory = MemorySystem::new(spec, line_bytes);
        let width = match spec.pipeline {
            CoreModel::InOrder { issue_width, .. } | CoreModel::OutOfOrder { issue_width, .. } => {
                issue_width
            }
        };

        let latency = f64::from(spec.memory.local_latency_cycles);
        let latency_or_memory =
            |latency_cycles: Option<u32>| latency_cycles.map_or(latency, f64::from);
        let cache_of_model: Vec<usize> = (0..model_count)
            .map(|index| if index < cache_count { index } else { 0 })
            .collect();
        let package_of_cache = |&cache: &usize| cache as u32 * cpus_per_cache / cpus_per_package;
        let package_of_model: Vec<u32> = cache_of_model.iter().map(package_of_cache).collect();
        let cores_of_cache = |at: u32| {
            (at * cpus_per_cache..(at + 1) * cpus_per_cache)
                .step_by(spec.contexts_per_core as usize)
        };

        let mut occupancy_model = OccupancyModel::new(capacity as f32, last_level.replacement);
        occupancy_model.set_neighbors(neighbor_bytes_per_cycle / line_bytes);

        Some(IntervalEngine {
            hertz,
            min_step_cycles: MIN_STEP_CYCLES.max(if neighbor_bytes_per_cycle > 0.0 {
                MIN_STEP_LIFETIMES * capacity * line_bytes / neighbor_bytes_per_cycle
            } else {
                0.0
            }),
            divisible_lines: (last_level.size_bytes as f64 / line_bytes) as f32,
            curves: PhaseCurves::new(capacity)
                .with_private_bytes(spec.private_bytes() as f64)
                .with_stream_insertion(last_level.effective_stream_insertion())
                .with_lifetimes(
                    last_level
                        .pool_bytes
                        .and(last_level.probation_share)
                        .map(LineLifetimes::new),
                ),
            line_bytes,
            programs: Vec::new(),
            slots: Slots::default(),
            free_slots: Vec::new(),
            occupancy_models: vec![occupancy_model; model_count],
            node_of_model: package_of_model
                .iter()
                .map(|&package| memory.node_of(package))
                .collect(),
            package_of_model,
            cores_of_model: (0..model_count)
                .map(|index| {
                    if index < cache_count {
                        cores_of_cache(index as u32).collect()
                    } else {
                        Vec::new()
                    }
                })
                .collect(),
            topology_cache_of_model: cache_of_model,
            cache_count,
            spare_models,
            shared_regions: Regions::new(model_count),
            run_queues: RunQueues::new(
                cycles_of_ns(spec.os.time_slice_ns),
                spec.os.context_switch_cycles as f64,
                is_explicit,
                (0..spec.cpus()).map(|cpu| cpu / cpus_per_cache).collect(),
                (0..spec.cpus())
                    .map(|cpu| cpu / spec.contexts_per_core)
                    .collect(),
            ),
            now: 0.0,
            next_step_at: vec![f64::INFINITY; model_count],
            step_length: vec![MAX_STEP_NS * hertz / 1e9; model_count],
            step_count: 0,
            first_step_turnovers: vec![0.0; model_count],
            phase_ends_at: vec![f64::INFINITY; model_count],
            reported_load: vec![0.0; memory.controllers.len()],
            memory,
            memory_nodes: Vec::new(),
            traffic: vec![0.0; model_count],
            ended_slots: Vec::new(),
            issue_slot_cycles: 1.0 / width as f32,
            contexts_per_core: spec.contexts_per_core,
            core_wait_share: vec![0.0; spec.cpus() as usize],
            same_package_cycles: latency_or_memory(spec.coherence.same_package_cycles),
            other_package_cycles: latency_or_memory(spec.coherence.other_package_cycles),
            domain_members: vec![Vec::new(); model_count],
            bandwidth_limits: vec![Vec::new(); model_count],
        })
    }

    /// The program must have been checked ([`PhasedProgram::check`]); the number is for adding its
    /// tasks.
    pub fn add_program(&mut self, program: PhasedProgram) -> u32 {
        let latency = f64::from(self.memory.latency_cycles);
        let mut first_curve = u32::MAX;
        for phase in &program.phases {
            let curve = self.curves.add(phase, self.line_bytes, latency);
            first_curve = first_curve.min(curve);
        }

        let regions = program.phases.iter().map(|phase| {
            let indexed_region = |region_use: &crate::program::RegionUse| {
                (
                    self.shared_regions.find_or_add_region(region_use.region),
                    region_use.reads_per_instr,
                    region_use.writes_per_instr,
                )
            };
            phase.sharing.iter().map(indexed_region).collect()
        });
        let regions = regions.collect();
        self.programs.push(CompiledProgram {
            program,
            first_curve,
            regions,
        });
        self.programs.len() as u32 - 1
    }

    /// Adds a task at the start of a program and returns its slot. The task runs from the next call of
    /// [`IntervalEngine::run`] on.
    pub fn start_task(&mut self, program: u32, allowed_cpus: CpuSet) -> u32 {
        let slot = self.take_slot(program);
        let demand = self.programs[program as usize].program.demand;
        let period = demand.period_ns as f64 * self.hertz / 1e9;
        self.run_queues
            .add(slot, allowed_cpus, demand.cpu_share, period);
        slot
    }

    /// Sets the CPUs that a task may use from now on.
    pub fn set_allowed_cpus(&mut self, slot: u32, allowed_cpus: CpuSet) {
        self.run_queues.set_allowed_cpus(slot, allowed_cpus);
    }

    /// Makes a task end after this many instructions, whatever its phases.
    pub(crate) fn set_work(&mut self, slot: u32, instructions: f64) {
        self.slots.work_left_instr[slot as usize] = instructions.max(1.0);
    }

    /// Moves these CPUs of one cache to another, empty cache of the same size. Returns `false` if no spare cache is
    /// left.
    pub(crate) fn move_to_spare_cache(&mut self, cpus: &CpuSet) -> bool {
        let Some(first_cpu) = cpus.first().filter(|_| self.spare_models > 0) else {
            return false;
        };
        let old_index = self.run_queues.cache_of(first_cpu) as usize;
        let new_index = self.occupancy_models.len() - self.spare_models;
        self.spare_models -= 1;
        let topology_cache = self.topology_cache_of_model[old_index];
        self.topology_cache_of_model[new_index] = topology_cache;
        (
            self.package_of_model[new_index],
            self.node_of_model[new_index],
        ) = (
            self.package_of_model[topology_cache],
            self.node_of_model[topology_cache],
        );
        let is_moved = |core: &u32| cpus.contains(*core);
        self.cores_of_model[new_index] = self.cores_of_model[old_index]
            .iter()
            .copied()
            .filter(is_moved)
            .collect();
        self.cores_of_model[old_index].retain(|core| !is_moved(core));
        self.advance_model(old_index);
        self.occupancy_models[new_index].advanced_to = self.now;
        let old_model = self.occupancy_models[old_index].clone();
        self.occupancy_models[new_index].copy_division(&old_model);
        self.domain_members[new_index] = self.domain_members[old_index].clone();
        cpus.iter()
            .for_each(|cpu| self.run_queues.set_cache(cpu, new_index as u32));
        true
    }

    /// Starts external traffic, which uses one cache at a fixed speed and no CPU; returns its slot.
    pub(crate) fn start_external(
        &mut self,
        program: u32,
        cache: usize,
        instr_per_cycle: f64,
    ) -> u32 {
        let slot = self.take_slot(program);
        self.run_queues.add(slot, CpuSet::default(), 0.0, 1.0);
        self.slots.external_rate[slot as usize] = instr_per_cycle;
        self.move_to(slot, cache as u32);
        self.schedule_step(cache, FIRST_STEP_OF_NEWCOMER);
        slot
    }

    fn take_slot(&mut self, program: u32) -> u32 {
        let slots = &mut self.slots;
        let slot = self.free_slots.pop().unwrap_or(slots.program.len() as u32);
        if slot as usize == slots.program.len() {
            slots.program.push(0);
            slots.phase.push(0);
            slots.phase_left_instr.push(0.0);
            slots.work_left_instr.push(0.0);
            slots.starts_from_empty_cache.push(false);
            slots.model_index.push(NO_CACHE);
            slots.model_entry.push(0);
            slots.memory_demand.push(MemoryDemand::default());
            slots.dropped_prefetch_share.push(0.0);
            slots.extra_cycles_per_instr.push(0.0);
            slots.counts_per_instr.push([0.0; COUNT_KINDS]);
            slots.totals.push(TaskTotals::default());
            slots.external_rate.push(0.0);
            slots.is_finished.push(false);
            slots.registered_rate.push(0.0);
            slots.registered_phase.push(0);
            slots.switches.push(0.0);
            slots.stolen_share.push(0.0);
            slots.memory_index.push(0);
        }

        let index = slot as usize;
        slots.program[index] = program;
        slots.phase[index] = 0;
        slots.phase_left_instr[index] = self.programs[program as usize].program.phases[0]
            .instructions
            .unwrap_or(f64::INFINITY);
        slots.work_left_instr[index] = f64::INFINITY;
        slots.starts_from_empty_cache[index] =
            self.programs[program as usize].program.from_empty_cache;
        slots.model_index[index] = NO_CACHE;
        slots.memory_demand[index] = MemoryDemand::default();
        (
            slots.registered_phase[index],
            slots.switches[index],
            slots.stolen_share[index],
        ) = (0, 0.0, 0.0);

        slots.memory_index[index] = self.memory_nodes.len() as u32;
        self.memory_nodes.push(None);
        (
            slots.dropped_prefetch_share[index],
            slots.extra_cycles_per_instr[index],
            slots.external_rate[index],
            slots.registered_rate[index],
        ) = (0.0, 0.0, 0.0, 0.0);
        (
            slots.counts_per_instr[index],
            slots.totals[index],
            slots.is_finished[index],
        ) = ([0.0; COUNT_KINDS], TaskTotals::default(), false);
        slot
    }

    /// Removes a task for good. Its lines stay until others need the space; its slot is reused.
    pub(crate) fn remove_task(&mut self, slot: u32) {
        self.slots.is_finished[slot as usize] = true;
        let model_index = self.slots.model_index[slot as usize];
        self.unregister_rate(slot as usize);
        self.occupancy_models
            .iter_mut()
            .for_each(|occupancy_model| occupancy_model.remove_task(slot));
        self.slots.model_index[slot as usize] = NO_CACHE;
        self.run_queues.remove(slot);
        self.run_queues
            .changed_slots
            .retain(|changed_slot| *changed_slot != slot);
        self.free_slots.push(slot);
        if model_index != NO_CACHE {
            self.schedule_step(model_index as usize, FIRST_STEP);
        }
    }

    /// Cycles since the machine started.
    pub(crate) fn now_cycles(&self) -> f64 {
        self.now
    }
    /// Totals since the task's arrival, complete up to the last call of [`IntervalEngine::run`].
    pub fn task_totals(&self, slot: u32) -> &TaskTotals {
        &self.slots.totals[slot as usize]
    }
    pub(crate) fn phase_index(&self, slot: u32) -> u32 {
        self.slots.phase[slot as usize]
    }
    pub(crate) fn program_of(&self, slot: u32) -> &PhasedProgram {
        &self.programs[self.slots.program[slot as usize] as usize].program
    }
    /// A position among the caches of the contended level; `None` if the task runs on none.
    pub fn cache_of(&self, slot: u32) -> Option<usize> {
        let model_index = self.slots.model_index[slot as usize];
        (model_index != NO_CACHE).then(|| self.topology_cache_of_model[model_index as usize])
    }
    fn occupancy_models(&self, cache: usize) -> impl Iterator<Item = &OccupancyModel> {
        self.occupancy_models
            .iter()
            .zip(&self.topology_cache_of_model)
            .filter(move |(_, home)| **home == cache)
            .map(|(occupancy_model, _)| occupancy_model)
    }
    pub(crate) fn occupied_bytes(&self, slot: u32, cache: usize) -> f64 {
        let lines_of_task = |occupancy_model: &OccupancyModel| -> f64 {
            (0..occupancy_model.len())
                .filter(|&index| occupancy_model.task[index] == slot)
                .map(|index| f64::from(occupancy_model.lines[index]))
                .sum()
        };
        self.occupancy_models(cache).map(lines_of_task).sum::<f64>() * self.line_bytes
    }
    pub(crate) fn line_bytes(&self) -> f64 {
        self.line_bytes
    }
    /// Caches of the contended level.
    pub(crate) fn cache_count(&self) -> usize {
        self.cache_count
    }
    pub(crate) fn node_of_cache(&self, cache: usize) -> usize {
        self.node_of_model[cache]
    }

    /// Divides a cache among domains, each given by its capacity in lines and its group. Domains that overlap belong
    /// to one group, and `groups` holds the number of lines of each group. `members` assigns tasks to domains; tasks
    /// that it omits are in the first domain.
    pub fn divide(
        &mut self,
        cache: usize,
        domains: &[(f32, u8)],
        groups: &[f32],
        members: Vec<(u32, u8)>,
    ) {
        self.advance_model(cache);
        let domain_of = |slot: u32| {
            members
                .iter()
                .find(|(task, _)| *task == slot)
                .map_or(0, |member| member.1)
        };
        self.occupancy_models[cache].divide(domains, groups, domain_of);
        self.domain_members[cache] = members;
        self.schedule_step(cache, FIRST_STEP);
    }

    /// Like [`IntervalEngine::divide`], but does nothing if the cache (with those separated from it) is already
    /// divided in this way.
    pub(crate) fn divide_if_changed(
        &mut self,
        cache: usize,
        domains: &[(f32, u8)],
        groups: &[f32],
        members: &[(u32, u8)],
    ) {
        for index in 0..self.occupancy_models.len() - self.spare_models {
            let occupancy_model = &self.occupancy_models[index];
            let is_same = occupancy_model.domains.len() == domains.len()
                && occupancy_model
                    .domains
                    .iter()
                    .zip(domains)
                    .all(|(a, b)| (a.capacity_lines, a.group) == *b);

            if self.topology_cache_of_model[index] == cache
                && (!is_same || self.domain_members[index] != members)
            {
                self.divide(index, domains, groups, members.to_vec());
            }
        }
    }

    /// Limits the traffic of tasks on a cache (and on those separated from it) from now on; the limits before end.
    pub(crate) fn limit_traffic(&mut self, cache: usize, limits: &[TrafficLimit]) {
        for index in 0..self.occupancy_models.len() - self.spare_models {
            if self.topology_cache_of_model[index] == cache
                && self.bandwidth_limits[index] != limits
            {
                self.advance_model(index);
                self.bandwidth_limits[index] = limits.to_vec();
                self.schedule_step(index, FIRST_STEP);
            }
        }
    }

    /// Changes from now on the traffic with which other systems fill each cache, in bytes per cycle.
    pub fn set_neighbor_traffic(&mut self, bytes_per_cycle: f64) {
        for index in 0..self.occupancy_models.len() {
            self.advance_model(index);
            self.occupancy_models[index].set_neighbors(bytes_per_cycle / self.line_bytes);
            self.schedule_step(index, FIRST_STEP);
        }
    }

    /// Takes a share of a task's processor time for other work, until a call with a share of 0.
    pub(crate) fn take_processor_time(&mut self, slot: u32, share: f64) {
        self.slots.stolen_share[slot as usize] = share.clamp(0.0, 1.0) as f32;
        self.run_queues.changed_slots.push(slot);
    }

    /// `None` if the task has not run yet.
    pub(crate) fn memory_node(&self, slot: u32) -> Option<usize> {
        self.memory_nodes[self.slots.memory_index[slot as usize] as usize]
    }
    /// Makes a task use the pages of another task.
    pub(crate) fn share_memory(&mut self, slot: u32, sibling: u32) {
        self.slots.memory_index[slot as usize] = self.slots.memory_index[sibling as usize];
    }

    /// Speed on a processor; time off it does not count.
    pub(crate) fn running_instr_per_cycle(&self, slot: u32) -> f64 {
        let demand = &self.slots.memory_demand[slot as usize];
        if demand.cycles > 0.0 {
            f64::from(demand.speed())
        } else {
            0.0
        }
    }
    /// Lines that currently come from another cache, for each instruction.
    pub(crate) fn remote_per_instr(&self, slot: u32) -> f64 {
        f64::from(self.slots.counts_per_instr[slot as usize][REMOTE_HITS])
    }

    fn curve_of(&self, slot: u32) -> u32 {
        let program = &self.programs[self.slots.program[slot as usize] as usize];
        program.first_curve + self.slots.phase[slot as usize]
    }

    /// Distances of the task's present phase.
    pub(crate) fn distance_distribution(&self, slot: u32) -> DistanceDistribution {
        self.curves.distance_distribution(
            self.curve_of(slot),
            self.slots.dropped_prefetch_share[slot as usize],
        )
    }
    /// Instructions in which the task touches this many lines.
    pub(crate) fn window_instr(&self, slot: u32, lines: f32) -> f64 {
        self.curves.window_instr(self.curve_of(slot), lines)
    }

    /// Size in lines, of which neighbors of this system may fill a part.
    pub fn capacity_lines(&self) -> f32 {
        self.curves.capacity_lines()
    }

    /// Lines that partitions divide. Neighbors do not respect partitions, so these are the lines that this system finds
    /// free.
    pub fn divisible_lines(&self) -> f32 {
        self.divisible_lines
    }

    /// Drops a share of a task's lines, because its pages have moved.
    pub(crate) fn drop_lines(&mut self, slot: u32, share: f64) {
        let model_index = self.slots.model_index[slot as usize];
        if model_index != NO_CACHE {
            let cache = model_index as usize;
            self.advance_model(cache);
            self.occupancy_models[cache].drop_share(
                self.slots.model_entry[slot as usize] as usize,
                share,
                &self.curves,
            );
            self.schedule_step(cache, FIRST_STEP_OF_NEWCOMER);
        }
    }

    /// Runs until a cycle, or until programs end; `ended_slots` then lists their slots.
    pub fn run(&mut self, end_cycle: f64) {
        self.update_turns();
        while self.ended_slots.is_empty() {
            let mut next_time = self.run_queues.next_event();
            let mut first_cache = usize::MAX;
            for index in 0..self.occupancy_models.len() {
                let due_time = self.next_step_at[index].min(self.phase_ends_at[index]);
                if due_time < next_time {
                    (next_time, first_cache) = (due_time, index);
                }
            }

            if next_time > end_cycle {
                break;
            }
            self.now = self.now.max(next_time);
            if first_cache == usize::MAX {
                self.update_turns()
            } else {
                self.advance_cache(first_cache)
            }
        }
        if self.ended_slots.is_empty() {
            self.now = end_cycle;
        }

        for index in 0..self.occupancy_models.len() {
            self.advance_model(index);
        }
    }

    /// Ends turns that are over, and moves tasks to the CPUs that the queues assign.
    fn update_turns(&mut self) {
        self.run_queues.update(self.now);
        let mut changed_slots = std::mem::take(&mut self.run_queues.changed_slots);
        for &slot in &changed_slots {
            let index = slot as usize;
            if self.slots.is_finished[index] || self.slots.external_rate[index] > 0.0 {
                continue;
            }
            let queue_entry = &self.run_queues.tasks[index];
            let (share, cpu) = (
                queue_entry.share * (1.0 - self.slots.stolen_share[index]),
                queue_entry.cpu,
            );
            let model_index = cpu.map(|cpu| self.run_queues.cache_of(cpu) as usize);
            self.slots.switches[index] = self.run_queues.switches_per_cycle(slot);
            let (old_model_index, new_model_index) = (
                self.slots.model_index[index],
                model_index.map_or(NO_CACHE, |flow| flow as u32),
            );
            if old_model_index != new_model_index {
                if old_model_index != NO_CACHE {
                    self.schedule_step(old_model_index as usize, FIRST_STEP);
                }
                self.move_to(slot, new_model_index);
            }
            if let Some(model_index) = model_index.filter(|_| {
                self.slots.memory_demand[index].cpu_share != share
                    || old_model_index != new_model_index
            }) {
                self.advance_model(model_index);
                self.slots.memory_demand[index].cpu_share = share;
                self.schedule_step(
                    model_index,
                    if old_model_index == new_model_index {
                        FIRST_STEP
                    } else {
                        FIRST_STEP_OF_NEWCOMER
                    },
                );
            }
            if model_index.is_none() {
                self.slots.memory_demand[index].cpu_share = 0.0;
            }
        }
        changed_slots.clear();
        self.run_queues.changed_slots = changed_slots;
    }

    fn move_to(&mut self, slot: u32, model_index: u32) {
        let index = slot as usize;
        let old_model_index = self.slots.model_index[index];
        if old_model_index != NO_CACHE {
            self.slots.starts_from_empty_cache[index] = false;
            self.advance_model(old_model_index as usize);
            self.unregister_rate(index);
            self.occupancy_models[old_model_index as usize]
                .stop_task(self.slots.model_entry[index] as usize);
        }
        self.slots.model_index[index] = model_index;
        if model_index != NO_CACHE {
            let node = self.node_of_model[model_index as usize];
            self.memory_nodes[self.slots.memory_index[index] as usize].get_or_insert(node);
            self.advance_model(model_index as usize);
            let slots = &mut self.slots;
            self.occupancy_models[model_index as usize].remove_empty_entries(
                |moved_slot, entry| slots.model_entry[moved_slot as usize] = entry as u32,
            );
            let curve =
                self.programs[slots.program[index] as usize].first_curve + slots.phase[index];
            let entry = self.occupancy_models[model_index as usize].add_task(slot, curve, self.now);
            // The task left its lines here in an earlier phase, and has changed phase since then.
            if self.occupancy_models[model_index as usize].curve[entry] != curve {
                self.occupancy_models[model_index as usize].start_phase(
                    entry,
                    curve,
                    0.0,
                    &self.curves,
                );
            }
            slots.model_entry[index] = entry as u32;
            let domain = self.domain_members[model_index as usize]
                .iter()
                .find(|(task, _)| *task == slot)
                .map_or(0, |member| member.1);
            self.occupancy_models[model_index as usize].set_domain(entry, domain);
        }
    }

    /// Schedules a short step of a cache now, because its state has changed.
    fn schedule_step(&mut self, model_index: usize, turnovers: f64) {
        let pending_turnovers = self.first_step_turnovers[model_index];
        self.first_step_turnovers[model_index] = if pending_turnovers > 0.0 {
            pending_turnovers.min(turnovers)
        } else {
            turnovers
        };
        self.next_step_at[model_index] = self.now;
    }

    /// Adds the work of a cache's tasks since the cache's last step to their totals, and updates its occupancies.
    /// The result is the largest change of an occupancy, as a share of the capacity.
    fn advance_model(&mut self, model_index: usize) -> f32 {
        let elapsed = self.now - self.occupancy_models[model_index].advanced_to;
        if elapsed <= 0.0 {
            return 0.0;
        }
        let occupancy_model = &self.occupancy_models[model_index];
        let slots = &mut self.slots;

        for entry in 0..occupancy_model.len() {
            if !occupancy_model.is_running[entry] {
                continue;
            }
            let index = occupancy_model.task[entry] as usize;
            let instructions = occupancy_model.rate[entry] * elapsed;
            let share = f64::from(slots.memory_demand[index].cpu_share);
            let totals = &mut slots.totals[index];
            if instructions <= 0.0 && share <= 0.0 {
                totals.wait_cycles += self.run_queues.tasks[index].demand * elapsed;
                continue;
            }

            totals.instructions += instructions;
            totals.cycles += share * elapsed;
            totals.wait_cycles += (self.run_queues.tasks[index].demand - share).max(0.0) * elapsed;
            totals.switches += slots.switches[index] * elapsed;
            for (sum, per_instr) in totals.counts.iter_mut().zip(&slots.counts_per_instr[index]) {
                *sum += f64::from(*per_instr) * instructions;
            }
            slots.phase_left_instr[index] -= instructions;
            slots.work_left_instr[index] -= instructions;
        }

        self.occupancy_models[model_index].advance(self.now, &self.curves)
    }
}

mod step;

#[cfg(test)]
pub(crate) mod tests;
