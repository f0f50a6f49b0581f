//! Run queues and turns: the CPU of each task, and the share of the CPU's time that the task gets.
//!
//! Forecasts of caches need to know who runs beside whom and for how long, but not the accidents of
//! one kernel's balancer. So this is what common schedulers agree on. Every CPU has a queue. A task
//! that arrives, or is no longer allowed on its CPU, goes to the least loaded of its allowed CPUs,
//! preferably one near its cache. If a queue has at least two tasks more than another, it gives one
//! up. Within a queue, time is divided by weight.
//!
//! For example, two tasks of the weights 1 and 3 are on one CPU. In *averaged* mode both run all
//! the time, at a quarter and three quarters of the CPU, which is what a window of a second sees of
//! turns of some milliseconds; if one of them sleeps, the other uses its time. In *explicit* mode
//! they take turns of a slice, which costs a step of the engine each. The CPUs of gangs always take
//! explicit turns, because gangs determine which tasks run together.
//!
//! Ties go to the lower CPU and the earlier task.

use cachemate_core::{CpuSet, IndexSet};

/// The state of a task in the queues.
#[derive(Clone, Debug, PartialEq)]
pub struct QueuedTask {
    pub allowed_cpus: CpuSet,
    pub weight: f64,
    /// Share of a CPU that the task would use, and the length of one period of running and sleeping, in cycles.
    pub demand: f64,
    pub period_cycles: f64,
    /// The CPU in whose queue the task is; `None` if the task is in no queue.
    pub cpu: Option<u32>,
    /// Share of elapsed time on that CPU; 0 if the task waits or sleeps.
    pub share: f32,
    wake_cycle: f64,
    burst_left_cycles: f64,
    /// Time on a CPU divided by the weight, so that tasks of a queue can be compared.
    virtual_time: f64,
    /// Whether the task is a member of a gang.
    is_in_gang: bool,
    /// Whether the slot is in use.
    is_alive: bool,
}

/// A rotation of gangs, which take turns on the same CPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueRotation {
    pub cpus: CpuSet,
    pub slice_cycles: f64,
    /// The gangs. Each has its members with their required CPUs, and its number of consecutive slices.
    pub gangs: Vec<(Vec<(u32, Option<u32>)>, u32)>,
    current_gang: usize,
    turn_end: f64,
    /// Whether CPUs without a member stay idle.
    is_exclusive: bool,
}

impl QueueRotation {
    pub fn new(
        cpus: CpuSet,
        slice_cycles: f64,
        gangs: Vec<(Vec<(u32, Option<u32>)>, u32)>,
    ) -> Self {
        QueueRotation {
            cpus,
            slice_cycles,
            gangs,
            current_gang: usize::MAX,
            turn_end: f64::NEG_INFINITY,
            is_exclusive: false,
        }
    }

    /// Creates a rotation that consists of one gang with these tasks.
    pub fn single_gang(cpus: CpuSet, slice_cycles: f64, members: Vec<(u32, Option<u32>)>) -> Self {
        QueueRotation {
            is_exclusive: true,
            ..QueueRotation::new(cpus, slice_cycles, vec![(members, 1)])
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
struct RunQueue {
    is_online: bool,
    /// Slots in the order in which they joined this queue.
    tasks: Vec<u32>,
    turn_end: f64,
    turn_start: f64,
}

/// Load assigned to a CPU that has no turn for a task; it exceeds the load of any queue.
const NO_TURN_LOAD: f64 = 1e12;

/// All queues of a machine.
#[derive(Clone, Debug)]
pub struct RunQueues {
    pub is_explicit: bool,
    slice_cycles: f64,
    context_switch_cycles: f64,
    queues: Vec<RunQueue>,
    cache_of_cpu: Vec<u32>,
    core_of_cpu: Vec<u32>,
    pub tasks: Vec<QueuedTask>,
    rotations: Vec<QueueRotation>,
    /// Slots whose CPU or share has changed since this list was last emptied.
    pub changed_slots: Vec<u32>,
    /// Whether a queue has changed, so that its shares must be recomputed; by CPU.
    is_stale: Vec<bool>,
}

impl RunQueues {
    pub fn new(
        slice_cycles: f64,
        switch_cycles: f64,
        is_explicit: bool,
        cache_of_cpu: Vec<u32>,
        core_of_cpu: Vec<u32>,
    ) -> Self {
        let queue = RunQueue {
            is_online: true,
            turn_end: f64::INFINITY,
            ..RunQueue::default()
        };

        RunQueues {
            is_explicit,
            slice_cycles,
            context_switch_cycles: switch_cycles.min(0.5 * slice_cycles),
            queues: vec![queue; cache_of_cpu.len()],
            is_stale: vec![false; cache_of_cpu.len()],
            cache_of_cpu,
            core_of_cpu,
            tasks: Vec::new(),
            rotations: Vec::new(),
            changed_slots: Vec::new(),
        }
    }

    /// `slot` is free, or the next after the last.
    pub fn add(&mut self, slot: u32, allowed_cpus: CpuSet, demand: f64, period_cycles: f64) {
        let task = QueuedTask {
            allowed_cpus,
            weight: 1.0,
            demand,
            period_cycles,
            cpu: None,
            share: 0.0,
            wake_cycle: 0.0,
            burst_left_cycles: demand * period_cycles,
            virtual_time: 0.0,
            is_in_gang: false,
            is_alive: true,
        };

        if slot as usize == self.tasks.len() {
            self.tasks.push(task)
        } else {
            self.tasks[slot as usize] = task
        }
        self.assign_cpu(slot);
    }

    pub fn remove(&mut self, slot: u32) {
        self.remove_from_queue(slot);
        let task = &mut self.tasks[slot as usize];
        (task.share, task.is_in_gang, task.is_alive) = (0.0, false, false);
        for (members, _) in self
            .rotations
            .iter_mut()
            .flat_map(|rotation| &mut rotation.gangs)
        {
            members.retain(|(member, _)| *member != slot);
        }
        self.changed_slots.push(slot);
        self.balance();
    }

    /// Sets the CPUs that the task may use, and moves the task if its present CPU is not among them.
    pub fn set_allowed_cpus(&mut self, slot: u32, allowed_cpus: CpuSet) {
        let task = &mut self.tasks[slot as usize];
        if task.allowed_cpus == allowed_cpus {
            return;
        }
        task.allowed_cpus = allowed_cpus;
        let (cpu, is_in_gang) = (task.cpu, task.is_in_gang);
        let lacks_turn = |cpu: u32| !is_in_gang && self.gang_only_cpus().contains(cpu);
        if cpu.is_none_or(|cpu| !self.may_run(slot, cpu) || lacks_turn(cpu)) {
            self.remove_from_queue(slot);
            self.assign_cpu(slot);
        }
    }

    pub fn set_weight(&mut self, slot: u32, weight: f64) {
        let task = &mut self.tasks[slot as usize];
        if task.weight != weight {
            task.weight = weight;
            if let Some(cpu) = task.cpu {
                self.is_stale[cpu as usize] = true;
            }
        }
    }

    /// Tasks of a CPU that goes offline move elsewhere, and tasks without a CPU take one that comes
    /// back.
    pub fn set_online(&mut self, cpu: u32, is_online: bool) {
        self.queues[cpu as usize].is_online = is_online;
        if !is_online {
            for slot in std::mem::take(&mut self.queues[cpu as usize].tasks) {
                self.tasks[slot as usize].cpu = None;
                self.assign_cpu(slot);
            }
            self.is_stale[cpu as usize] = true;
        } else {
            let is_unqueued = |slot: &u32| {
                self.tasks[*slot as usize].is_alive && self.tasks[*slot as usize].cpu.is_none()
            };
            let unqueued_tasks: Vec<u32> =
                (0..self.tasks.len() as u32).filter(is_unqueued).collect();
            unqueued_tasks
                .into_iter()
                .for_each(|slot| self.assign_cpu(slot));
        }
        self.balance();
    }

    pub fn set_rotations(&mut self, rotations: Vec<QueueRotation>) {
        self.tasks
            .iter_mut()
            .for_each(|task| task.is_in_gang = false);
        let cpus = self
            .rotations
            .iter()
            .chain(&rotations)
            .flat_map(|rotation| rotation.cpus.iter());
        cpus.for_each(|cpu| self.is_stale[cpu as usize] = true);
        for (members, _) in rotations.iter().flat_map(|rotation| &rotation.gangs) {
            members
                .iter()
                .for_each(|(slot, _)| self.tasks[*slot as usize].is_in_gang = true);
        }
        self.rotations = rotations;
        self.assign_gang_members();
    }

    /// CPUs that have a gang member in every turn, so that no task without a gang can run there.
    fn gang_only_cpus(&self) -> CpuSet {
        let is_full = |rotation: &&QueueRotation| {
            let cpu_count = rotation.cpus.count() as usize;
            !rotation.gangs.is_empty()
                && rotation
                    .gangs
                    .iter()
                    .all(|(members, _)| members.len() >= cpu_count)
        };
        self.rotations
            .iter()
            .filter(is_full)
            .flat_map(|rotation| rotation.cpus.iter())
            .collect()
    }

    /// Assigns gang members to queues: a member with a required CPU to that CPU, any other member to a CPU without a
    /// member of the gang.
    fn assign_gang_members(&mut self) {
        let rotations = std::mem::take(&mut self.rotations);
        for rotation in &rotations {
            for (members, _) in &rotation.gangs {
                let mut free_cpus: IndexSet = rotation.cpus.clone();
                members
                    .iter()
                    .filter_map(|(_, seat)| *seat)
                    .for_each(|cpu| free_cpus.remove(cpu));

                for &(slot, seat) in members {
                    let current_cpu = self.tasks[slot as usize].cpu;
                    let kept_cpu = current_cpu
                        .filter(|cpu| free_cpus.contains(*cpu) && self.may_run(slot, *cpu));
                    let allowed_cpu = || free_cpus.iter().find(|&cpu| self.may_run(slot, cpu));
                    let Some(cpu) = seat.or(kept_cpu).or_else(allowed_cpu).or(free_cpus.first())
                    else {
                        continue;
                    };
                    free_cpus.remove(cpu);

                    if current_cpu != Some(cpu) {
                        self.remove_from_queue(slot);
                        self.enqueue(slot, cpu);
                    }
                }
            }
        }

        self.rotations = rotations;
    }

    fn may_run(&self, slot: u32, cpu: u32) -> bool {
        self.queues[cpu as usize].is_online && self.tasks[slot as usize].allowed_cpus.contains(cpu)
    }

    fn queue_load(&self, cpu: u32) -> f64 {
        let load_of =
            |&slot: &u32| self.tasks[slot as usize].weight * self.tasks[slot as usize].demand;
        self.queues[cpu as usize].tasks.iter().map(load_of).sum()
    }

    fn core_load(&self, cpu: u32) -> f64 {
        let core = self.core_of_cpu[cpu as usize];
        let is_on_core = |sibling: &u32| self.core_of_cpu[*sibling as usize] == core;
        (0..self.queues.len() as u32)
            .filter(is_on_core)
            .map(|sibling| self.queue_load(sibling))
            .sum()
    }

    /// Moves a task to the least loaded CPU that it may use: CPUs with a turn for it first, then by load of the queue,
    /// load of the core, and distance from its previous CPU.
    fn assign_cpu(&mut self, slot: u32) {
        let previous_cache = self.tasks[slot as usize]
            .cpu
            .map(|cpu| self.cache_of_cpu[cpu as usize]);
        let gang_only_cpus = if self.tasks[slot as usize].is_in_gang {
            CpuSet::default()
        } else {
            self.gang_only_cpus()
        };
        let mut best_key_and_cpu: Option<((bool, f64, f64, bool), u32)> = None;
        for cpu in (0..self.queues.len() as u32).filter(|&cpu| self.may_run(slot, cpu)) {
            let changes_cache =
                previous_cache.is_some_and(|previous| previous != self.cache_of_cpu[cpu as usize]);
            let key = (
                gang_only_cpus.contains(cpu),
                self.queue_load(cpu),
                self.core_load(cpu),
                changes_cache,
            );
            if best_key_and_cpu.is_none_or(|(best_key, _)| key < best_key) {
                best_key_and_cpu = Some((key, cpu));
            }
        }
        if let Some((_, cpu)) = best_key_and_cpu {
            self.enqueue(slot, cpu);
        } else {
            self.changed_slots.push(slot);
        }
    }

    fn enqueue(&mut self, slot: u32, cpu: u32) {
        let virtual_time_of = |queued_slot: &u32| self.tasks[*queued_slot as usize].virtual_time;
        let min_virtual_time = self.queues[cpu as usize]
            .tasks
            .iter()
            .map(virtual_time_of)
            .fold(f64::INFINITY, f64::min);
        self.queues[cpu as usize].tasks.push(slot);
        let task = &mut self.tasks[slot as usize];
        (task.cpu, task.virtual_time) = (
            Some(cpu),
            if min_virtual_time.is_finite() {
                min_virtual_time
            } else {
                0.0
            },
        );
        self.is_stale[cpu as usize] = true;
        self.changed_slots.push(slot);
    }

    fn remove_from_queue(&mut self, slot: u32) {
        let Some(cpu) = self.tasks[slot as usize].cpu.take() else {
            return;
        };
        let queue = &mut self.queues[cpu as usize];
        if let Some(position) = queue.tasks.iter().position(|&queued| queued == slot) {
            queue.tasks.remove(position);
        }
        self.is_stale[cpu as usize] = true;
    }

    /// Moves tasks from queues with at least two tasks more than another, until no move evens the lengths out. A task
    /// without a turn on its CPU moves first.
    pub fn balance(&mut self) {
        for _ in 0..self.tasks.len() {
            let Some((slot, target_cpu)) = self.find_best_move() else {
                return;
            };
            self.remove_from_queue(slot);
            self.enqueue(slot, target_cpu);
        }
    }

    fn find_best_move(&self) -> Option<(u32, u32)> {
        let mut best_move: Option<(f64, u32, u32)> = None;
        let gang_only_cpus = self.gang_only_cpus();
        let loads: Vec<f64> = (0..self.queues.len() as u32)
            .map(|cpu| self.queue_load(cpu))
            .collect();

        for source in 0..self.queues.len() as u32 {
            let load = if gang_only_cpus.contains(source) {
                NO_TURN_LOAD
            } else {
                loads[source as usize]
            };

            for &slot in &self.queues[source as usize].tasks {
                let task = &self.tasks[slot as usize];
                let task_load = task.weight * task.demand;
                if task.is_in_gang {
                    continue;
                }

                let can_receive = |target: &u32| {
                    *target != source
                        && !gang_only_cpus.contains(*target)
                        && self.may_run(slot, *target)
                };
                for target in (0..self.queues.len() as u32).filter(can_receive) {
                    let gain = load - task_load - loads[target as usize];
                    if gain > 0.01 && best_move.is_none_or(|(best_gain, _, _)| gain > best_gain) {
                        best_move = Some((gain, slot, target));
                    }
                }
            }
        }

        best_move.map(|(_, slot, target)| (slot, target))
    }

    /// Updates shares after changes, and ends turns that are over.
    pub fn update(&mut self, now: f64) {
        for index in 0..self.rotations.len() {
            if self.rotations[index].turn_end <= now {
                self.start_next_gang(index, now);
            }
        }
        for cpu in 0..self.queues.len() {
            if self.is_gang_cpu(cpu as u32) {
                continue;
            }
            if !self.is_explicit {
                if self.is_stale[cpu] {
                    self.divide_cpu_time(cpu);
                }
            } else if self.is_stale[cpu] || self.queues[cpu].turn_end <= now {
                self.start_turn(cpu, now);
            }
            self.is_stale[cpu] = false;
        }
    }

    fn is_gang_cpu(&self, cpu: u32) -> bool {
        self.rotations
            .iter()
            .any(|rotation| rotation.cpus.contains(cpu))
    }

    /// The end of a turn, the advance of a rotation, or the wake-up of a task, whichever is first.
    pub fn next_event(&self) -> f64 {
        let turns = self.queues.iter().map(|queue| queue.turn_end);
        let rotations = self.rotations.iter().map(|rotation| rotation.turn_end);
        turns.chain(rotations).fold(f64::INFINITY, f64::min)
    }

    fn set_share(&mut self, slot: u32, share: f64) {
        let task = &mut self.tasks[slot as usize];
        if task.share != share as f32 {
            task.share = share as f32;
            self.changed_slots.push(slot);
        }
    }

    /// Divides the CPU's time by weight, but gives no task more than its demand; the other tasks share the remainder.
    fn divide_cpu_time(&mut self, cpu: usize) {
        let tasks = std::mem::take(&mut self.queues[cpu].tasks);
        self.queues[cpu].turn_end = f64::INFINITY;
        let switch_share = if tasks.len() > 1 {
            self.context_switch_cycles / self.slice_cycles
        } else {
            0.0
        };
        let mut remaining_share = if self.queues[cpu].is_online { 1.0 } else { 0.0 };
        let mut remaining_weight: f64 = tasks
            .iter()
            .map(|&slot| self.tasks[slot as usize].weight)
            .sum();

        let mut ordered_tasks = tasks.clone();
        // The task with the least demand for its weight is served first, so that no remainder is distributed twice.
        ordered_tasks.sort_by(|&a, &b| {
            let demand_per_weight =
                |slot: u32| self.tasks[slot as usize].demand / self.tasks[slot as usize].weight;
            demand_per_weight(a).total_cmp(&demand_per_weight(b))
        });
        for slot in ordered_tasks {
            let task = &self.tasks[slot as usize];
            let share = if remaining_weight > 0.0 {
                (remaining_share * task.weight / remaining_weight).min(task.demand)
            } else {
                0.0
            };
            remaining_weight -= task.weight;
            remaining_share -= share;
            self.set_share(slot, share * (1.0 - switch_share));
        }
        self.queues[cpu].tasks = tasks;
    }

    /// The runnable task with the least time relative to its weight runs until its slice ends or
    /// another task wakes.
    fn start_turn(&mut self, cpu: usize, now: f64) {
        let tasks = std::mem::take(&mut self.queues[cpu].tasks);
        let elapsed = now - self.queues[cpu].turn_start;
        for &slot in &tasks {
            let task = &mut self.tasks[slot as usize];
            if task.share > 0.0 {
                task.virtual_time += elapsed / task.weight;
                task.burst_left_cycles -= elapsed;
                if task.demand < 1.0 && task.burst_left_cycles <= 1.0 {
                    task.wake_cycle = now + (1.0 - task.demand) * task.period_cycles;
                    task.burst_left_cycles = task.demand * task.period_cycles;
                }
            }
        }

        let is_awake = |slot: &&u32| self.tasks[**slot as usize].wake_cycle <= now;
        let virtual_time_of = |slot: &u32| self.tasks[*slot as usize].virtual_time;
        let min_virtual_time = tasks
            .iter()
            .filter(is_awake)
            .map(virtual_time_of)
            .fold(f64::INFINITY, f64::min);
        let first_awake_slot = tasks
            .iter()
            .filter(is_awake)
            .find(|slot| virtual_time_of(slot) <= min_virtual_time)
            .copied();
        let next_slot = first_awake_slot.filter(|_| self.queues[cpu].is_online);
        let wake_cycles = tasks
            .iter()
            .map(|&slot| self.tasks[slot as usize].wake_cycle)
            .filter(|wake| *wake > now);

        let mut turn_end = wake_cycles.fold(f64::INFINITY, f64::min);
        for &slot in &tasks {
            let task = &mut self.tasks[slot as usize];
            // A task that slept catches up by at most one slice.
            task.virtual_time = if min_virtual_time.is_finite() {
                task.virtual_time.max(min_virtual_time - self.slice_cycles)
            } else {
                task.virtual_time
            };

            let mut share = 0.0;
            if Some(slot) == next_slot {
                let burst = if task.demand < 1.0 {
                    task.burst_left_cycles
                } else {
                    f64::INFINITY
                };
                let slice = if tasks.len() > 1 {
                    self.slice_cycles.min(burst)
                } else {
                    burst
                };

                let switch_cycles = if tasks.len() > 1 {
                    self.context_switch_cycles
                } else {
                    0.0
                };
                share = 1.0 - (switch_cycles / slice.max(2.0 * switch_cycles)).min(0.5);
                turn_end = turn_end.min(now + slice);
            }
            self.set_share(slot, share);
        }

        let queue = &mut self.queues[cpu];
        queue.tasks = tasks;
        (queue.turn_start, queue.turn_end) = (now, turn_end);
    }

    /// After the last gang comes the first.
    fn start_next_gang(&mut self, index: usize, now: f64) {
        let rotation = &mut self.rotations[index];
        let gang_count = rotation.gangs.len().max(1);
        let next_gang = if rotation.current_gang == usize::MAX {
            0
        } else {
            (rotation.current_gang + 1) % gang_count
        };
        let slices = rotation
            .gangs
            .get(next_gang)
            .map_or(1, |(_, slices)| *slices);

        rotation.current_gang = next_gang;
        rotation.turn_end = now + rotation.slice_cycles * f64::from(slices.max(1));
        let members: Vec<u32> = rotation
            .gangs
            .get(next_gang)
            .map_or(Vec::new(), |(members, _)| {
                members.iter().map(|(slot, _)| *slot).collect()
            });
        let switch_share = self.context_switch_cycles
            / (rotation.turn_end - now).max(2.0 * self.context_switch_cycles);

        for cpu in self.rotations[index].cpus.clone().iter() {
            let queue = &mut self.queues[cpu as usize];
            (queue.turn_end, queue.turn_start) = (f64::INFINITY, now);
            let tasks = std::mem::take(&mut queue.tasks);
            let running_index = tasks.iter().position(|slot| members.contains(slot));
            // A seat without a member goes to tasks without a gang.
            let is_exclusive = self.rotations[index].is_exclusive;
            let task_without_gang = || {
                tasks
                    .iter()
                    .position(|&slot| !self.tasks[slot as usize].is_in_gang)
            };
            let running_index =
                running_index.or_else(|| task_without_gang().filter(|_| !is_exclusive));
            for (nth, &slot) in tasks.iter().enumerate() {
                self.set_share(
                    slot,
                    if Some(nth) == running_index {
                        1.0 - switch_share
                    } else {
                        0.0
                    },
                );
            }
            self.queues[cpu as usize].tasks = tasks;
        }
    }

    /// The contended one.
    pub fn cache_of(&self, cpu: u32) -> u32 {
        self.cache_of_cpu[cpu as usize]
    }
    /// Makes a CPU use another cache from now on.
    pub fn set_cache(&mut self, cpu: u32, cache: u32) {
        self.cache_of_cpu[cpu as usize] = cache;
        self.changed_slots.extend(&self.queues[cpu as usize].tasks);
    }
    pub fn queued_tasks(&self, cpu: u32) -> &[u32] {
        &self.queues[cpu as usize].tasks
    }
    pub fn is_online(&self, cpu: u32) -> bool {
        self.queues[cpu as usize].is_online
    }
    /// The mean over time; each slice ends with a switch.
    pub fn switches_per_cycle(&self, slot: u32) -> f64 {
        let Some(cpu) = self.tasks[slot as usize].cpu else {
            return 0.0;
        };
        let is_shared = self.queues[cpu as usize].tasks.len() > 1;
        if is_shared {
            f64::from(self.tasks[slot as usize].share) / self.slice_cycles
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests;
