//! One step of one cache: it ends phases, computes speeds at the present occupancies, queues at memory, and schedules
//! the next step.

use super::*;

/// Returns the ratio of the next step's length to that of the last step, in which occupancies changed by this share
/// of the capacity. Steps aim at changes of a few percent each.
fn step_growth(change: f32) -> f64 {
    if change < STEADY { STEADY_GROWTH } else { (f64::from(CHANGE_AIMED_AT) / f64::from(change)).clamp(0.5, 2.0) }
}

impl IntervalEngine {
    /// Advances a cache to the present.
    pub(super) fn refresh(&mut self, flow: usize) {
        let change = self.integrate_to_now(flow);
        let new_phase = self.end_phases(flow);
        let fresh = std::mem::replace(&mut self.fresh[flow], 0.0);
        let growth = if fresh > 0.0 || new_phase { 0.0 } else { step_growth(change) };
        self.compute_demand(flow, 0.5 * growth.min(2.0) as f32);
        let node = self.node_of_flow[flow];
        let old_traffic = self.traffic[flow];
        let controller = &mut self.memory.controllers[node];
        let new_traffic = memory_traffic(&self.flows[flow], &self.slots, controller);
        self.traffic[flow] = new_traffic;
        let shift = (new_traffic - old_traffic) * controller.cycles_per_line;
        controller.busy = (controller.busy + shift).clamp(0.0, 1.0);
        let change = (controller.busy - self.reported_busy[node]).abs();
        if change > MIN_REPORTED_LOAD_CHANGE * (1.0 - controller.busy).max(0.05) * 4.0 || !self.memory.buses.is_empty()
        {
            self.settle_node(node, flow);
        } else {
            self.update_cache_waits(node, flow);
        }
        self.set_speeds(flow);
        self.next_step(flow, growth, fresh);
    }

    /// Schedules the next step. If `growth` is 0, the state has changed, so the first step lasts `fresh` turnovers.
    fn next_step(&mut self, flow: usize, growth: f64, fresh: f64) {
        let longest = LONGEST_STEP_NS * self.hertz / 1e9;
        if growth > 0.0 {
            self.step_length[flow] *= growth;
        } else {
            let turnover = self.flows[flow].turnover_cycles(&self.curves).min(longest);
            self.step_length[flow] = turnover * if fresh > 0.0 { fresh } else { FIRST_STEP };
        }
        self.step_length[flow] = self.step_length[flow].clamp(SHORTEST_STEP_CYCLES, longest);
        self.next_step_at[flow] = self.now + self.step_length[flow];
        self.steps += 1;
    }

    /// Starts the next phase of tasks whose phase is over, and reports programs that have ended.
    fn end_phases(&mut self, flow: usize) -> bool {
        let mut any = false;
        for entry in 0..self.flows[flow].len() {
            if !self.flows[flow].is_running[entry] {
                continue;
            }
            let slot = self.flows[flow].task[entry] as usize;
            if self.slots.work_left_instr[slot] < 0.5 && !self.slots.finished[slot] {
                self.slots.finished[slot] = true;
                (self.slots.left_instr[slot], self.slots.work_left_instr[slot]) = (f64::INFINITY, f64::INFINITY);
                self.ended.push(slot as u32);
            }
            while self.slots.left_instr[slot] < 0.5 && !self.slots.finished[slot] {
                let compiled = &self.programs[self.slots.program[slot] as usize];
                let next = self.slots.phase[slot] + 1;
                let next = if (next as usize) < compiled.program.phases.len() {
                    Some(next)
                } else {
                    compiled.program.repeats_from
                };
                let Some(next) = next else {
                    self.slots.finished[slot] = true;
                    self.slots.left_instr[slot] = f64::INFINITY;
                    self.ended.push(slot as u32);
                    break;
                };
                let length = compiled.program.phases[next as usize].instructions.unwrap_or(f64::INFINITY);
                let curve = compiled.first_curve + next;
                self.slots.phase[slot] = next;
                self.slots.left_instr[slot] += length;
                let rate = self.flows[flow].rate[entry];
                self.flows[flow].change_curve(entry, curve, rate, &self.curves);
                any = true;
            }
        }
        any
    }

    /// Computes the memory demand of every task of the cache. Occupancies keep changing during the step; rates are
    /// those at its middle, which is `ahead` steps of the last length away.
    fn compute_demand(&mut self, flow: usize, ahead: f32) {
        let node = self.node_of_flow[flow];
        let package = self.package_of_flow[flow];
        let state = &mut self.flows[flow];
        for entry in 0..state.len() {
            let lines = state.lines[entry];
            let middle = (lines + ahead * (lines - state.lines_before[entry])).max(0.0);
            state.lines_before[entry] = lines;
            if !state.is_running[entry] {
                continue;
            }
            let slot = state.task[entry] as usize;
            let slots = &mut self.slots;
            // A task that waits for its turn has no demand; it is examined again when it runs.
            if slots.is_off_cpu(slot) {
                continue;
            }
            let dropped = slots.dropped[slot];
            // The profile contains first touches: as long as the task has lost no line, it misses as often as alone.
            slots.fresh[slot] &= state.is_intact(entry);
            let size = if slots.fresh[slot] { state.size_lines(entry) } else { middle };
            let rates = self.curves.rates_at(state.curve[entry], size, dropped);
            let demand = &mut slots.memory_demand[slot];
            demand.cycles = rates.cycles_per_instr + slots.extra[slot];
            let stall = self.curves.demand_stall_per_instr(state.curve[entry], &rates);
            demand.waits = stall / self.memory.latency_cycles;
            demand.late = (rates.stall_per_instr - stall) / self.memory.latency_cycles;
            demand.lines = rates.fills_per_instr + rates.writebacks_per_instr;
            (demand.first, demand.written) = (rates.demand_per_instr, rates.writebacks_per_instr);
            demand.burst = self.memory.burst_lines(demand);
            if slots.external_rate[slot] > 0.0 {
                demand.share = slots.external_rate[slot] as f32 * (demand.cycles + demand.queued);
            }
            let aid = match self.memory.can_throttle_prefetch() && demand.late > 0.0 {
                true => {
                    self.curves.prefetch_benefit(state.curve[entry], size, demand.late / (demand.late + demand.waits))
                }
                false => Prefetch::default(),
            };
            let crowd = self.memory.dropped_share(node, package, demand, &aid);
            slots.dropped[slot] = dropped + 0.5 * (crowd - dropped);
            let booked = &mut slots.per_instr[slot];
            booked[DEMAND] = rates.demand_per_instr;
            booked[FILLS] = rates.fills_per_instr;
            booked[WRITEBACKS] = rates.writebacks_per_instr;
            booked[STALL_CYCLES] = rates.stall_per_instr;
            booked[ALONE_CYCLES] = self.curves.alone_cycles_per_instr(state.curve[entry]);
        }
        if self.contexts_per_core > 1 {
            self.share_cores(flow);
        }
        for entry in 0..self.flows[flow].len() {
            let slot = self.flows[flow].task[entry] as usize;
            if self.flows[flow].is_running[entry] && !self.slots.is_off_cpu(slot) {
                self.update_core_stalls(flow, slot);
            }
        }
    }

    /// Updates the extra cycles per instruction that the core's other contexts and remote lines cause.
    fn update_core_stalls(&mut self, flow: usize, slot: usize) {
        let compiled = &self.programs[self.slots.program[slot] as usize];
        let phase = self.slots.phase[slot] as usize;
        self.slots.per_instr[slot][REFERENCES] = compiled.program.phases[phase].references_per_instr as f32;
        let mut extra = 0.0;
        if self.contexts_per_core > 1
            && let Some(cpu) = self.turns.tasks[slot].cpu
        {
            extra += self.core_waits[cpu as usize];
            let halved = compiled.program.phases[phase].half_private_extra_cycles_per_instr as f32;
            if halved > 0.0 {
                let core = cpu / self.contexts_per_core * self.contexts_per_core;
                let siblings = (core..core + self.contexts_per_core).filter(|sibling| *sibling != cpu);
                let sibling_load: f32 = siblings.map(|sibling| cpu_load(&self.turns, &self.slots, sibling)).sum();
                extra += halved * sibling_load.min(1.0);
            }
        }
        let (mut hits, mut cycles) = (0.0, 0.0);
        for &(place, reads, writes) in &compiled.regions[phase] {
            let package = self.package_of_flow[flow];
            let same_package = |cache: usize| self.package_of_flow[cache] == package;
            let remote = self.regions.remote_transfers(place, flow, same_package);
            let transfers = reads * remote.per_read + writes * remote.per_write;
            let near_share = remote.from_same_package;
            hits += transfers;
            cycles +=
                transfers * (near_share * self.same_package_cycles + (1.0 - near_share) * self.other_package_cycles);
        }
        (self.slots.per_instr[slot][REMOTE_HITS], self.slots.per_instr[slot][REMOTE_CYCLES]) =
            (hits as f32, cycles as f32);
        extra += cycles as f32;
        extra += self.remote_memory_cycles(flow, slot);
        self.slots.memory_demand[slot].cycles += extra - self.slots.extra[slot];
        self.slots.extra[slot] = extra;
    }

    /// Returns the extra cycles per instruction if the task's pages are on another node: memory waits grow in
    /// proportion to the latency.
    fn remote_memory_cycles(&mut self, flow: usize, slot: usize) -> f32 {
        let slots = &mut self.slots;
        let is_local = self.memories[slots.memory[slot] as usize].is_none_or(|node| node == self.node_of_flow[flow]);
        let latencies = slots.memory_demand[slot].waits + slots.memory_demand[slot].late;
        let longer = if is_local { 0.0 } else { latencies * self.memory.farther_cycles };
        slots.per_instr[slot][STALL_CYCLES] += longer;
        slots.per_instr[slot][FAR_CYCLES] = if is_local { 0.0 } else { slots.per_instr[slot][STALL_CYCLES] };
        longer
    }

    /// Computes how long contexts wait for issue slots that other contexts use.
    fn share_cores(&mut self, flow: usize) {
        let per_core = self.contexts_per_core;
        let mut contexts = [(0.0f32, 0.0f32); 16];
        let mut waits = [0.0f32; 16];
        for index in 0..self.cores_of_flow[flow].len() {
            let core = self.cores_of_flow[flow][index];
            let mut count = 0;
            for cpu in core..core + per_core {
                let (mut share, mut speed) = (0.0, 0.0);
                for &slot in self.turns.queued_tasks(cpu) {
                    let demand = &self.slots.memory_demand[slot as usize];
                    let own_cycles = demand.cycles + demand.queued - self.slots.extra[slot as usize];
                    share += demand.share;
                    speed += if demand.cycles > 0.0 { demand.share / own_cycles.max(self.slot_cycles) } else { 0.0 };
                }
                if speed > 0.0 {
                    contexts[count] = (share / speed, share.min(1.0));
                    count += 1;
                }
            }
            smt::compute_slot_waits(self.slot_cycles, &contexts[..count], &mut waits[..count]);
            let mut next = waits[..count].iter();
            for cpu in core..core + per_core {
                let is_busy = cpu_load(&self.turns, &self.slots, cpu) > 0.0;
                self.core_waits[cpu as usize] = if is_busy { next.next().copied().unwrap_or(0.0) } else { 0.0 };
            }
        }
    }

    /// Updates the waits of this cache's tasks only, because the node's load has hardly changed.
    fn update_cache_waits(&mut self, node: usize, flow: usize) {
        let package = self.package_of_flow[flow];
        let state = &self.flows[flow];
        for entry in 0..state.len() {
            let slot = state.task[entry] as usize;
            if state.is_running[entry] && !self.slots.is_off_cpu(slot) {
                self.memory.update_queue_wait(node, package, &mut self.slots.memory_demand[slot]);
            }
        }
    }

    /// Advances all tasks of the node to the present and updates their waiting times, because the node's load has
    /// changed.
    fn settle_node(&mut self, node: usize, but: usize) {
        for neighbor_flow in 0..self.flows.len() {
            if neighbor_flow != but && self.node_of_flow[neighbor_flow] == node {
                self.integrate_to_now(neighbor_flow);
                if self.end_phases(neighbor_flow) {
                    self.next_step_at[neighbor_flow] = self.now;
                }
                self.compute_demand(neighbor_flow, 0.0);
            }
        }
        let (flows, slots) = (&self.flows, &mut self.slots);
        let (packages, nodes) = (&self.package_of_flow, &self.node_of_flow);
        self.memory.solve(node, &mut |visit| {
            for (index, state) in flows.iter().enumerate() {
                if nodes[index] != node {
                    continue;
                }
                for entry in 0..state.len() {
                    let task = state.task[entry] as usize;
                    if state.is_running[entry] && !slots.is_off_cpu(task) {
                        visit(packages[index], &mut slots.memory_demand[task]);
                    }
                }
            }
        });
        let busy = self.memory.controllers[node].busy;
        let is_large_change = (busy - self.reported_busy[node]).abs() > 10.0 * MIN_REPORTED_LOAD_CHANGE;
        self.reported_busy[node] = busy;
        for neighbor_flow in 0..self.flows.len() {
            if self.node_of_flow[neighbor_flow] != node {
                continue;
            }
            self.traffic[neighbor_flow] =
                memory_traffic(&self.flows[neighbor_flow], &self.slots, &self.memory.controllers[node]);
            if neighbor_flow != but {
                self.set_speeds(neighbor_flow);
                if is_large_change {
                    let soon = self.now + 0.5 * self.step_length[neighbor_flow];
                    self.next_step_at[neighbor_flow] = self.next_step_at[neighbor_flow].min(soon);
                }
            }
        }
    }

    /// Sets the present speeds, and the time at which the first of the tasks' phases will end.
    fn set_speeds(&mut self, flow: usize) {
        let state = &mut self.flows[flow];
        let mut ends = f64::INFINITY;
        for entry in 0..state.len() {
            if !state.is_running[entry] {
                continue;
            }
            let slot = state.task[entry] as usize;
            let demand = &self.slots.memory_demand[slot];
            let external_rate = self.slots.external_rate[slot];
            let is_finished = self.slots.finished[slot];
            let rate =
                if external_rate > 0.0 { external_rate } else { f64::from(demand.share) * f64::from(demand.speed()) };
            // A task that has never run has no speed yet.
            let rate = if is_finished || self.slots.is_off_cpu(slot) { 0.0 } else { rate };
            state.rate[entry] = rate;
            self.slots.per_instr[slot][QUEUE_CYCLES] = demand.queued;
            if rate > 0.0 {
                let remaining_instr = self.slots.left_instr[slot].min(self.slots.work_left_instr[slot]);
                ends = ends.min(self.now + remaining_instr.max(0.0) / rate);
            }
        }
        self.phase_ends_at[flow] = ends;
        if !self.regions.is_empty() {
            for entry in 0..self.flows[flow].len() {
                if self.flows[flow].is_running[entry] {
                    let (slot, rate) = (self.flows[flow].task[entry] as usize, self.flows[flow].rate[entry]);
                    self.register_rate(slot, flow, rate);
                }
            }
        }
    }

    /// Registers with each region the rate at which a task uses the region from this cache.
    fn register_rate(&mut self, slot: usize, flow: usize, rate: f64) {
        let compiled = &self.programs[self.slots.program[slot] as usize];
        let phase = self.slots.phase[slot] as usize;
        if self.slots.registered_phase[slot] != phase as u32 {
            for &(place, reads, writes) in &compiled.regions[self.slots.registered_phase[slot] as usize] {
                self.regions.add(
                    place,
                    flow,
                    -self.slots.registered_rate[slot] * reads,
                    -self.slots.registered_rate[slot] * writes,
                );
            }
            self.slots.registered_rate[slot] = 0.0;
            self.slots.registered_phase[slot] = phase as u32;
        }
        let rate_change = rate - self.slots.registered_rate[slot];
        for &(place, reads, writes) in &compiled.regions[phase] {
            self.regions.add(place, flow, rate_change * reads, rate_change * writes);
        }
        self.slots.registered_rate[slot] = rate;
    }

    pub(super) fn unregister_rate(&mut self, slot: usize) {
        let flow = self.slots.flow[slot];
        if flow != NOWHERE && !self.regions.is_empty() {
            self.register_rate(slot, flow as usize, 0.0);
        }
    }
}

fn cpu_load(turns: &RunQueues, slots: &Slots, cpu: u32) -> f32 {
    turns.queued_tasks(cpu).iter().map(|&slot| slots.memory_demand[slot as usize].share).sum()
}

/// Returns the lines per cycle between a cache's tasks and memory, at the tasks' present speeds.
fn memory_traffic(flow: &OccupancyModel, slots: &Slots, controller: &QueueServer) -> f32 {
    let mut sum = 0.0;
    for entry in 0..flow.len() {
        if flow.is_running[entry] {
            let demand = &slots.memory_demand[flow.task[entry] as usize];
            if demand.share > 0.0 && demand.cycles > 0.0 {
                sum += controller.lines_per_instr(demand) * demand.share * demand.speed();
            }
        }
    }
    sum
}
