//! Run queues and turns: the CPU of each task, and the share of the CPU's time that the task gets.
//!
//! Method, as in common schedulers: every CPU has a queue. A task that arrives, or is no longer allowed on its CPU,
//! goes to the least loaded of its allowed CPUs, preferably one near its cache. If a queue has at least two tasks
//! more than another, it gives one up. Within a queue, time is divided by weight. In *averaged* mode, every task of a
//! queue runs all the time at its share, and the other tasks use the time that sleeping tasks leave. In *explicit*
//! mode, tasks take turns of a slice. The CPUs of gangs always take explicit turns, because gangs determine which
//! tasks run together. Properties: ties go to the lower CPU and the earlier task.

use cachemate_core::{CpuSet, IndexSet};

/// The state of a task in the queues.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedTask {
    pub allowed: CpuSet,
    pub weight: f64,
    /// Share of a CPU that the task would use, and the length of one period of running and sleeping, in cycles.
    pub demand: f64,
    pub period_cycles: f64,
    /// The CPU in whose queue the task is; `None` if the task is in no queue.
    pub cpu: Option<u32>,
    /// Share of elapsed time on that CPU; 0 if the task waits or sleeps.
    pub share: f32,
    asleep_until: f64,
    burst_left: f64,
    /// Time on a CPU divided by the weight, so that tasks of a queue can be compared.
    virtual_time: f64,
    /// Whether the task is a member of a gang.
    in_gang: bool,
    /// Whether the slot is in use.
    alive: bool,
}

/// A rotation of gangs, which take turns on the same CPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueRotation {
    pub cpus: CpuSet,
    pub slice_cycles: f64,
    /// The gangs. Each has its members with their required CPUs, and its number of consecutive slices.
    pub gangs: Vec<(Vec<(u32, Option<u32>)>, u32)>,
    current_gang: usize,
    ends_at: f64,
    /// Whether CPUs without a member stay idle.
    is_exclusive: bool,
}

impl QueueRotation {
    pub fn new(cpus: CpuSet, slice_cycles: f64, gangs: Vec<(Vec<(u32, Option<u32>)>, u32)>) -> Self {
        QueueRotation {
            cpus,
            slice_cycles,
            gangs,
            current_gang: usize::MAX,
            ends_at: f64::NEG_INFINITY,
            is_exclusive: false,
        }
    }

    /// Creates a rotation that consists of one gang with these tasks.
    pub fn single_gang(cpus: CpuSet, slice_cycles: f64, members: Vec<(u32, Option<u32>)>) -> Self {
        QueueRotation { is_exclusive: true, ..QueueRotation::new(cpus, slice_cycles, vec![(members, 1)]) }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
struct RunQueue {
    online: bool,
    /// Slots in the order in which they joined this queue.
    tasks: Vec<u32>,
    turn_ends: f64,
    turn_began: f64,
}

/// Load assigned to a CPU that has no turn for a task; it exceeds the load of any queue.
const NO_TURN_LOAD: f64 = 1e12;

/// All queues of a machine.
#[derive(Clone, Debug)]
pub struct RunQueues {
    pub explicit: bool,
    slice_cycles: f64,
    switch_cycles: f64,
    queues: Vec<RunQueue>,
    cache_of_cpu: Vec<u32>,
    core_of_cpu: Vec<u32>,
    pub tasks: Vec<SchedTask>,
    rotations: Vec<QueueRotation>,
    /// Slots whose CPU or share has changed since this list was last emptied.
    pub changed_slots: Vec<u32>,
    /// Whether each queue has changed and must be recomputed.
    stale: Vec<bool>,
}

impl RunQueues {
    pub fn new(
        slice_cycles: f64,
        switch_cycles: f64,
        explicit: bool,
        cache_of_cpu: Vec<u32>,
        core_of_cpu: Vec<u32>,
    ) -> Self {
        let queue = RunQueue { online: true, turn_ends: f64::INFINITY, ..RunQueue::default() };
        RunQueues {
            explicit,
            slice_cycles,
            switch_cycles: switch_cycles.min(0.5 * slice_cycles),
            queues: vec![queue; cache_of_cpu.len()],
            stale: vec![false; cache_of_cpu.len()],
            cache_of_cpu,
            core_of_cpu,
            tasks: Vec::new(),
            rotations: Vec::new(),
            changed_slots: Vec::new(),
        }
    }

    /// Adds a task in a free or a new slot.
    pub fn add(&mut self, slot: u32, allowed: CpuSet, demand: f64, period_cycles: f64) {
        let sched = SchedTask {
            allowed,
            weight: 1.0,
            demand,
            period_cycles,
            cpu: None,
            share: 0.0,
            asleep_until: 0.0,
            burst_left: demand * period_cycles,
            virtual_time: 0.0,
            in_gang: false,
            alive: true,
        };
        if slot as usize == self.tasks.len() {
            self.tasks.push(sched)
        } else {
            self.tasks[slot as usize] = sched
        }
        self.assign_cpu(slot);
    }

    pub fn remove(&mut self, slot: u32) {
        self.unqueue(slot);
        let task = &mut self.tasks[slot as usize];
        (task.share, task.in_gang, task.alive) = (0.0, false, false);
        for (members, _) in self.rotations.iter_mut().flat_map(|rotation| &mut rotation.gangs) {
            members.retain(|(member, _)| *member != slot);
        }
        self.changed_slots.push(slot);
        self.balance();
    }

    /// Sets the CPUs that the task may use, and moves the task if its present CPU is not among them.
    pub fn allow(&mut self, slot: u32, allowed: CpuSet) {
        let task = &mut self.tasks[slot as usize];
        if task.allowed == allowed {
            return;
        }
        task.allowed = allowed;
        let (cpu, in_gang) = (task.cpu, task.in_gang);
        let no_turn = |cpu: u32| !in_gang && self.gang_only_cpus().contains(cpu);
        if cpu.is_none_or(|cpu| !self.may_run(slot, cpu) || no_turn(cpu)) {
            self.unqueue(slot);
            self.assign_cpu(slot);
        }
    }

    pub fn set_weight(&mut self, slot: u32, weight: f64) {
        let task = &mut self.tasks[slot as usize];
        if task.weight != weight {
            task.weight = weight;
            if let Some(cpu) = task.cpu {
                self.stale[cpu as usize] = true;
            }
        }
    }

    /// Takes a CPU offline or online.
    pub fn set_online(&mut self, cpu: u32, online: bool) {
        self.queues[cpu as usize].online = online;
        if !online {
            for slot in std::mem::take(&mut self.queues[cpu as usize].tasks) {
                self.tasks[slot as usize].cpu = None;
                self.assign_cpu(slot);
            }
            self.stale[cpu as usize] = true;
        } else {
            let is_unplaced = |slot: &u32| self.tasks[*slot as usize].alive && self.tasks[*slot as usize].cpu.is_none();
            let unqueued_tasks: Vec<u32> = (0..self.tasks.len() as u32).filter(is_unplaced).collect();
            unqueued_tasks.into_iter().for_each(|slot| self.assign_cpu(slot));
        }
        self.balance();
    }

    pub fn set_rotations(&mut self, rotations: Vec<QueueRotation>) {
        self.tasks.iter_mut().for_each(|task| task.in_gang = false);
        let cpus = self.rotations.iter().chain(&rotations).flat_map(|rotation| rotation.cpus.iter());
        cpus.for_each(|cpu| self.stale[cpu as usize] = true);
        for (members, _) in rotations.iter().flat_map(|rotation| &rotation.gangs) {
            members.iter().for_each(|(slot, _)| self.tasks[*slot as usize].in_gang = true);
        }
        self.rotations = rotations;
        self.spread_over_seats();
    }

    /// Returns the CPUs with a gang member in every turn, on which no task without a gang can run.
    fn gang_only_cpus(&self) -> CpuSet {
        let is_full = |rotation: &&QueueRotation| {
            let seats = rotation.cpus.count() as usize;
            !rotation.gangs.is_empty() && rotation.gangs.iter().all(|(members, _)| members.len() >= seats)
        };
        self.rotations.iter().filter(is_full).flat_map(|rotation| rotation.cpus.iter()).collect()
    }

    /// Assigns gang members to queues: a member with a required CPU to that CPU, any other member to a CPU without a
    /// member of the gang.
    fn spread_over_seats(&mut self) {
        let rotations = std::mem::take(&mut self.rotations);
        for rotation in &rotations {
            for (members, _) in &rotation.gangs {
                let mut free_cpus: IndexSet = rotation.cpus.clone();
                members.iter().filter_map(|(_, seat)| *seat).for_each(|cpu| free_cpus.remove(cpu));
                for &(slot, seat) in members {
                    let current_cpu = self.tasks[slot as usize].cpu;
                    let keeps = current_cpu.filter(|cpu| free_cpus.contains(*cpu) && self.may_run(slot, *cpu));
                    let allowed_cpu = || free_cpus.iter().find(|&cpu| self.may_run(slot, cpu));
                    let Some(cpu) = seat.or(keeps).or_else(allowed_cpu).or(free_cpus.first()) else { continue };
                    free_cpus.remove(cpu);
                    if current_cpu != Some(cpu) {
                        self.unqueue(slot);
                        self.enqueue(slot, cpu);
                    }
                }
            }
        }
        self.rotations = rotations;
    }

    fn may_run(&self, slot: u32, cpu: u32) -> bool {
        self.queues[cpu as usize].online && self.tasks[slot as usize].allowed.contains(cpu)
    }

    fn load(&self, cpu: u32) -> f64 {
        let load_of = |&slot: &u32| self.tasks[slot as usize].weight * self.tasks[slot as usize].demand;
        self.queues[cpu as usize].tasks.iter().map(load_of).sum()
    }

    fn core_load(&self, cpu: u32) -> f64 {
        let core = self.core_of_cpu[cpu as usize];
        let is_on_core = |sibling: &u32| self.core_of_cpu[*sibling as usize] == core;
        (0..self.queues.len() as u32).filter(is_on_core).map(|sibling| self.load(sibling)).sum()
    }

    /// Moves a task to the least loaded CPU that it may use: CPUs with a turn for it first, then by load of the queue,
    /// load of the core, and distance from its previous CPU.
    fn assign_cpu(&mut self, slot: u32) {
        let previous_cache = self.tasks[slot as usize].cpu.map(|cpu| self.cache_of_cpu[cpu as usize]);
        let closed = if self.tasks[slot as usize].in_gang { CpuSet::default() } else { self.gang_only_cpus() };
        let mut best: Option<((bool, f64, f64, bool), u32)> = None;
        for cpu in (0..self.queues.len() as u32).filter(|&cpu| self.may_run(slot, cpu)) {
            let changes_cache = previous_cache.is_some_and(|was| was != self.cache_of_cpu[cpu as usize]);
            let key = (closed.contains(cpu), self.load(cpu), self.core_load(cpu), changes_cache);
            if best.is_none_or(|(best_key, _)| key < best_key) {
                best = Some((key, cpu));
            }
        }
        if let Some((_, cpu)) = best {
            self.enqueue(slot, cpu);
        } else {
            self.changed_slots.push(slot);
        }
    }

    fn enqueue(&mut self, slot: u32, cpu: u32) {
        let virtual_time_of = |queued: &u32| self.tasks[*queued as usize].virtual_time;
        let minimum = self.queues[cpu as usize].tasks.iter().map(virtual_time_of).fold(f64::INFINITY, f64::min);
        self.queues[cpu as usize].tasks.push(slot);
        let task = &mut self.tasks[slot as usize];
        (task.cpu, task.virtual_time) = (Some(cpu), if minimum.is_finite() { minimum } else { 0.0 });
        self.stale[cpu as usize] = true;
        self.changed_slots.push(slot);
    }

    fn unqueue(&mut self, slot: u32) {
        let Some(cpu) = self.tasks[slot as usize].cpu.take() else { return };
        let queue = &mut self.queues[cpu as usize];
        if let Some(at) = queue.tasks.iter().position(|&queued| queued == slot) {
            queue.tasks.remove(at);
        }
        self.stale[cpu as usize] = true;
    }

    /// Moves tasks from queues with at least two tasks more than another, until no move evens the lengths out. A task
    /// without a turn on its CPU moves first.
    pub fn balance(&mut self) {
        for _ in 0..self.tasks.len() {
            let Some((slot, to)) = self.best_move() else { return };
            self.unqueue(slot);
            self.enqueue(slot, to);
        }
    }

    fn best_move(&self) -> Option<(u32, u32)> {
        let mut best: Option<(f64, u32, u32)> = None;
        let closed = self.gang_only_cpus();
        let loads: Vec<f64> = (0..self.queues.len() as u32).map(|cpu| self.load(cpu)).collect();
        for source in 0..self.queues.len() as u32 {
            let load = if closed.contains(source) { NO_TURN_LOAD } else { loads[source as usize] };
            for &slot in &self.queues[source as usize].tasks {
                let task = &self.tasks[slot as usize];
                let own_load = task.weight * task.demand;
                if task.in_gang {
                    continue;
                }
                let may_take =
                    |target: &u32| *target != source && !closed.contains(*target) && self.may_run(slot, *target);
                for target in (0..self.queues.len() as u32).filter(may_take) {
                    let gain = load - own_load - loads[target as usize];
                    if gain > 0.01 && best.is_none_or(|(best_gain, _, _)| gain > best_gain) {
                        best = Some((gain, slot, target));
                    }
                }
            }
        }
        best.map(|(_, slot, target)| (slot, target))
    }

    /// Updates shares after changes, and ends turns that are over.
    pub fn update(&mut self, now: f64) {
        for index in 0..self.rotations.len() {
            if self.rotations[index].ends_at <= now {
                self.rotate(index, now);
            }
        }
        for cpu in 0..self.queues.len() {
            if self.is_gang_cpu(cpu as u32) {
                continue;
            }
            if !self.explicit {
                if self.stale[cpu] {
                    self.average_cpu_time(cpu);
                }
            } else if self.stale[cpu] || self.queues[cpu].turn_ends <= now {
                self.next_turn(cpu, now);
            }
            self.stale[cpu] = false;
        }
    }

    fn is_gang_cpu(&self, cpu: u32) -> bool {
        self.rotations.iter().any(|rotation| rotation.cpus.contains(cpu))
    }

    /// Returns the time of the next event: the end of a turn, the advance of a rotation, or the wake-up of a task.
    pub fn next_event(&self) -> f64 {
        let turns = self.queues.iter().map(|queue| queue.turn_ends);
        let rotations = self.rotations.iter().map(|rotation| rotation.ends_at);
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
    fn average_cpu_time(&mut self, cpu: usize) {
        let tasks = std::mem::take(&mut self.queues[cpu].tasks);
        self.queues[cpu].turn_ends = f64::INFINITY;
        let switches = if tasks.len() > 1 { self.switch_cycles / self.slice_cycles } else { 0.0 };
        let mut remaining = if self.queues[cpu].online { 1.0 } else { 0.0 };
        let mut open_weight: f64 = tasks.iter().map(|&slot| self.tasks[slot as usize].weight).sum();
        let mut order = tasks.clone();
        // The task with the least demand for its weight is served first, so that no remainder is distributed twice.
        order.sort_by(|&a, &b| {
            let demand_per_weight = |slot: u32| self.tasks[slot as usize].demand / self.tasks[slot as usize].weight;
            demand_per_weight(a).total_cmp(&demand_per_weight(b))
        });
        for slot in order {
            let task = &self.tasks[slot as usize];
            let share = if open_weight > 0.0 { (remaining * task.weight / open_weight).min(task.demand) } else { 0.0 };
            open_weight -= task.weight;
            remaining -= share;
            self.set_share(slot, share * (1.0 - switches));
        }
        self.queues[cpu].tasks = tasks;
    }

    /// Gives the CPU to the runnable task with the least time relative to its weight, until the task's slice ends or
    /// another task wakes.
    fn next_turn(&mut self, cpu: usize, now: f64) {
        let tasks = std::mem::take(&mut self.queues[cpu].tasks);
        let elapsed = now - self.queues[cpu].turn_began;
        for &slot in &tasks {
            let task = &mut self.tasks[slot as usize];
            if task.share > 0.0 {
                task.virtual_time += elapsed / task.weight;
                task.burst_left -= elapsed;
                if task.demand < 1.0 && task.burst_left <= 1.0 {
                    task.asleep_until = now + (1.0 - task.demand) * task.period_cycles;
                    task.burst_left = task.demand * task.period_cycles;
                }
            }
        }
        let is_awake = |slot: &&u32| self.tasks[**slot as usize].asleep_until <= now;
        let virtual_time_of = |slot: &u32| self.tasks[*slot as usize].virtual_time;
        let minimum = tasks.iter().filter(is_awake).map(virtual_time_of).fold(f64::INFINITY, f64::min);
        let next = tasks.iter().filter(is_awake).find(|slot| virtual_time_of(slot) <= minimum).copied();
        let next = next.filter(|_| self.queues[cpu].online);
        let asleep = tasks.iter().map(|&slot| self.tasks[slot as usize].asleep_until).filter(|wake| *wake > now);
        let mut ends = asleep.fold(f64::INFINITY, f64::min);
        for &slot in &tasks {
            let task = &mut self.tasks[slot as usize];
            // A task that slept catches up by at most one slice.
            task.virtual_time = if minimum.is_finite() {
                task.virtual_time.max(minimum - self.slice_cycles)
            } else {
                task.virtual_time
            };
            let mut share = 0.0;
            if Some(slot) == next {
                let burst = if task.demand < 1.0 { task.burst_left } else { f64::INFINITY };
                let slice = if tasks.len() > 1 { self.slice_cycles.min(burst) } else { burst };
                let switch = if tasks.len() > 1 { self.switch_cycles } else { 0.0 };
                share = 1.0 - (switch / slice.max(2.0 * switch)).min(0.5);
                ends = ends.min(now + slice);
            }
            self.set_share(slot, share);
        }
        let queue = &mut self.queues[cpu];
        queue.tasks = tasks;
        (queue.turn_began, queue.turn_ends) = (now, ends);
    }

    /// Starts the next gang's turn.
    fn rotate(&mut self, index: usize, now: f64) {
        let rotation = &mut self.rotations[index];
        let count = rotation.gangs.len().max(1);
        let next = if rotation.current_gang == usize::MAX { 0 } else { (rotation.current_gang + 1) % count };
        let slices = rotation.gangs.get(next).map_or(1, |(_, slices)| *slices);
        rotation.current_gang = next;
        rotation.ends_at = now + rotation.slice_cycles * f64::from(slices.max(1));
        let members: Vec<u32> =
            rotation.gangs.get(next).map_or(Vec::new(), |(members, _)| members.iter().map(|(slot, _)| *slot).collect());
        let switch = self.switch_cycles / (rotation.ends_at - now).max(2.0 * self.switch_cycles);
        for cpu in self.rotations[index].cpus.clone().iter() {
            let queue = &mut self.queues[cpu as usize];
            (queue.turn_ends, queue.turn_began) = (f64::INFINITY, now);
            let tasks = std::mem::take(&mut queue.tasks);
            let runs = tasks.iter().position(|slot| members.contains(slot));
            // A seat without a member goes to tasks without a gang.
            let is_exclusive = self.rotations[index].is_exclusive;
            let task_without_gang = || tasks.iter().position(|&slot| !self.tasks[slot as usize].in_gang);
            let runs = runs.or_else(|| task_without_gang().filter(|_| !is_exclusive));
            for (nth, &slot) in tasks.iter().enumerate() {
                self.set_share(slot, if Some(nth) == runs { 1.0 - switch } else { 0.0 });
            }
            self.queues[cpu as usize].tasks = tasks;
        }
    }

    /// Returns the contended cache of a CPU.
    pub fn cache_of(&self, cpu: u32) -> u32 {
        self.cache_of_cpu[cpu as usize]
    }
    /// Makes a CPU use another cache from now on.
    pub fn set_cache(&mut self, cpu: u32, cache: u32) {
        self.cache_of_cpu[cpu as usize] = cache;
        self.changed_slots.extend(&self.queues[cpu as usize].tasks);
    }
    /// Returns the tasks in one CPU's queue.
    pub fn queued_tasks(&self, cpu: u32) -> &[u32] {
        &self.queues[cpu as usize].tasks
    }
    pub fn is_online(&self, cpu: u32) -> bool {
        self.queues[cpu as usize].online
    }
    /// Returns the average number of slices per cycle that end on the CPU, each with a context switch.
    pub fn switches_per_cycle(&self, slot: u32) -> f64 {
        let Some(cpu) = self.tasks[slot as usize].cpu else { return 0.0 };
        let crowded = self.queues[cpu as usize].tasks.len() > 1;
        if crowded { f64::from(self.tasks[slot as usize].share) / self.slice_cycles } else { 0.0 }
    }
}

#[cfg(test)]
#[path = "turns_tests.rs"]
mod tests;
