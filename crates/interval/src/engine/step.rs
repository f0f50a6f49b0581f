//! One step of one cache: it ends phases, computes speeds at the present occupancies, queues at
//! memory, and schedules the next step.
//!
//! The order matters, because each of these needs the one before: a new phase has other rates,
//! rates at the present occupancy give the traffic, the traffic gives the wait for memory, and the
//! wait gives the speed with which the next step begins. The controller's other caches are only
//! told if its load has changed noticeably; a step of one cache would otherwise be a step of all.
//!
//! For example, a step in which an occupancy moved by 8 % of the cache is followed by one of half
//! the length, and one in which nothing moved by more than a thousandth by one of six times the
//! length. Steps thus aim at changes of 4 %.

use super::*;

/// Ratio of the next step's length to that of the last step, in which an occupancy changed by at
/// most this share of the capacity. Steps aim at changes of a few percent each.
fn step_growth(change: f32) -> f64 {
    if change < STEADY_CHANGE {
        STEADY_STEP_GROWTH
    } else {
        (f64::from(TARGET_CHANGE) / f64::from(change)).clamp(0.5, 2.0)
    }
}

impl IntervalEngine {
    /// One step to the present: what its tasks did since the last, then their demand and waits
    /// until the next.
    pub(super) fn advance_cache(&mut self, model_index: usize) {
        let change = self.advance_model(model_index);
        let has_new_phase = self.advance_phases(model_index);
        let first_step_turnovers =
            std::mem::replace(&mut self.first_step_turnovers[model_index], 0.0);
        let growth = if first_step_turnovers > 0.0 || has_new_phase {
            0.0
        } else {
            step_growth(change)
        };
        self.compute_demand(model_index, 0.5 * growth.min(2.0) as f32);

        let node = self.node_of_model[model_index];
        let old_traffic = self.traffic[model_index];
        let controller = &mut self.memory.controllers[node];
        let new_traffic =
            memory_traffic(&self.occupancy_models[model_index], &self.slots, controller);
        self.traffic[model_index] = new_traffic;
        let load_shift = (new_traffic - old_traffic) * controller.cycles_per_line();
        // More traffic than a full server transfers must be noticed too, because its queue then grows.
        controller.load = (controller.load + load_shift).max(0.0);
        let load_change = (controller.load - self.reported_load[node]).abs();
        if load_change > MIN_REPORTED_LOAD_CHANGE * (1.0 - controller.load).max(0.05) * 4.0
            || !self.memory.buses.is_empty()
        {
            self.solve_node(node, model_index);
        } else {
            self.update_cache_waits(node, model_index);
        }
        self.set_speeds(model_index);
        self.schedule_next_step(model_index, growth, first_step_turnovers);
    }

    /// Schedules the next step. If `growth` is 0, the state has changed, so the first step lasts `first_step_turnovers`
    /// turnovers.
    fn schedule_next_step(&mut self, model_index: usize, growth: f64, first_step_turnovers: f64) {
        let max_step_cycles = MAX_STEP_NS * self.hertz / 1e9;
        if growth > 0.0 {
            self.step_length[model_index] *= growth;
        } else {
            let turnover = self.occupancy_models[model_index]
                .turnover_cycles(&self.curves)
                .min(max_step_cycles);
            self.step_length[model_index] = turnover
                * if first_step_turnovers > 0.0 {
                    first_step_turnovers
                } else {
                    FIRST_STEP
                };
        }
        self.step_length[model_index] = self.step_length[model_index]
            .clamp(self.min_step_cycles.min(max_step_cycles), max_step_cycles);
        self.next_step_at[model_index] = self.now + self.step_length[model_index];
        self.step_count += 1;
    }

    /// Starts the next phase of tasks whose phase is over, and records programs that have ended. Returns whether any
    /// phase changed.
    fn advance_phases(&mut self, model_index: usize) -> bool {
        let mut has_changed_phase = false;

        for entry in 0..self.occupancy_models[model_index].len() {
            if !self.occupancy_models[model_index].is_running[entry] {
                continue;
            }

            let slot = self.occupancy_models[model_index].task[entry] as usize;
            if self.slots.work_left_instr[slot] < 0.5 && !self.slots.is_finished[slot] {
                self.slots.is_finished[slot] = true;
                (
                    self.slots.phase_left_instr[slot],
                    self.slots.work_left_instr[slot],
                ) = (f64::INFINITY, f64::INFINITY);
                self.ended_slots.push(slot as u32);
            }

            while self.slots.phase_left_instr[slot] < 0.5 && !self.slots.is_finished[slot] {
                let compiled_program = &self.programs[self.slots.program[slot] as usize];
                let next_phase = self.slots.phase[slot] + 1;
                let next_phase = if (next_phase as usize) < compiled_program.program.phases.len() {
                    Some(next_phase)
                } else {
                    compiled_program.program.repeats_from
                };
                let Some(next_phase) = next_phase else {
                    self.slots.is_finished[slot] = true;
                    self.slots.phase_left_instr[slot] = f64::INFINITY;
                    self.ended_slots.push(slot as u32);
                    break;
                };

                let length = compiled_program.program.phases[next_phase as usize]
                    .instructions
                    .unwrap_or(f64::INFINITY);
                let curve = compiled_program.first_curve + next_phase;
                self.slots.phase[slot] = next_phase;
                self.slots.phase_left_instr[slot] += length;
                let rate = self.occupancy_models[model_index].rate[entry];
                self.occupancy_models[model_index].start_phase(entry, curve, rate, &self.curves);
                has_changed_phase = true;
            }
        }

        has_changed_phase
    }

    /// Computes the memory demand of every task of the cache. Occupancies keep changing during the step; rates are
    /// those at its middle, which is `steps_ahead` steps of the last length away.
    fn compute_demand(&mut self, model_index: usize, steps_ahead: f32) {
        let node = self.node_of_model[model_index];
        let package = self.package_of_model[model_index];
        let occupancy_model = &mut self.occupancy_models[model_index];

        for entry in 0..occupancy_model.len() {
            let lines = occupancy_model.lines[entry];
            let middle_lines =
                (lines + steps_ahead * (lines - occupancy_model.previous_lines[entry])).max(0.0);
            occupancy_model.previous_lines[entry] = lines;
            if !occupancy_model.is_running[entry] {
                continue;
            }

            let slot = occupancy_model.task[entry] as usize;
            let slots = &mut self.slots;
            // A task that waits for its turn has no demand; it is examined again when it runs.
            if slots.is_off_cpu(slot) {
                continue;
            }
            let dropped_share = slots.dropped_prefetch_share[slot];

            // The profile contains first touches: as long as the task has lost no line, it misses as often as alone.
            slots.starts_from_empty_cache[slot] &= occupancy_model.has_all_lines(entry);
            let size = if slots.starts_from_empty_cache[slot] {
                occupancy_model.max_lines(entry)
            } else {
                middle_lines
            };
            let rates = self
                .curves
                .rates_at(occupancy_model.curve[entry], size, dropped_share);

            let demand = &mut slots.memory_demand[slot];
            demand.cycles = rates.cycles_per_instr + slots.extra_cycles_per_instr[slot];
            let demand_stall = self
                .curves
                .demand_stall_per_instr(occupancy_model.curve[entry], &rates);
            demand.serial_misses = demand_stall / self.memory.latency_cycles;
            demand.serial_late_lines =
                (rates.stall_per_instr - demand_stall) / self.memory.latency_cycles;
            demand.lines = rates.fills_per_instr + rates.writebacks_per_instr;
            (demand.demand_lines, demand.written_lines) =
                (rates.demand_per_instr, rates.writebacks_per_instr);
            demand.stall_cycles = rates.stall_per_instr;
            if slots.external_rate[slot] > 0.0 {
                demand.cpu_share =
                    slots.external_rate[slot] as f32 * (demand.cycles + demand.queued_cycles);
            }

            let prefetch = match self.memory.can_throttle_prefetch()
                && demand.serial_late_lines > 0.0
            {
                true => self.curves.prefetch_benefit(
                    occupancy_model.curve[entry],
                    size,
                    demand.serial_late_lines / (demand.serial_late_lines + demand.serial_misses),
                ),
                false => Prefetch::default(),
            };
            let new_dropped_share = self.memory.dropped_share(node, package, demand, &prefetch);
            slots.dropped_prefetch_share[slot] =
                dropped_share + 0.5 * (new_dropped_share - dropped_share);
            let counts_per_instr = &mut slots.counts_per_instr[slot];
            let phase = &self.programs[slots.program[slot] as usize].program.phases
                [slots.phase[slot] as usize];

            // The line of a dropped prefetch is referenced by demand instead, and misses.
            let aided_misses = if dropped_share > 0.0 {
                self.curves
                    .rates_at(occupancy_model.curve[entry], size, 0.0)
                    .demand_per_instr
            } else {
                rates.demand_per_instr
            };
            let unprefetched_references = (rates.demand_per_instr - aided_misses).max(0.0);
            counts_per_instr[REFERENCES] =
                phase.references_per_instr as f32 + unprefetched_references;
            counts_per_instr[DEMAND] = rates.demand_per_instr;
            counts_per_instr[FILLS] = rates.fills_per_instr;
            counts_per_instr[WRITEBACKS] = rates.writebacks_per_instr;
            counts_per_instr[STALL_CYCLES] = rates.stall_per_instr;
            counts_per_instr[SOLO_CYCLES] = self
                .curves
                .solo_cycles_per_instr(occupancy_model.curve[entry]);
        }

        if self.contexts_per_core > 1 {
            self.compute_core_waits(model_index);
        }

        for entry in 0..self.occupancy_models[model_index].len() {
            let slot = self.occupancy_models[model_index].task[entry] as usize;
            if self.occupancy_models[model_index].is_running[entry] && !self.slots.is_off_cpu(slot)
            {
                self.update_core_stalls(model_index, slot);
            }
        }
        self.limit_bandwidth(model_index);
    }

    /// Delays the tasks whose traffic is limited, so that they stay within their limits with the present waits at
    /// memory.
    ///
    /// Every line of a group is delayed by the same number of cycles. A longer delay gives less traffic, so the number
    /// is found by halving an interval: at `tasks / cap` cycles a line, tasks that did nothing but fetch would just
    /// reach the cap.
    fn limit_bandwidth(&mut self, model_index: usize) {
        for limit in &self.bandwidth_limits[model_index] {
            let is_here = |slot: &u32| {
                self.slots.model_index[*slot as usize] == model_index as u32
                    && !self.slots.is_off_cpu(*slot as usize)
                    && self.slots.memory_demand[*slot as usize].lines > 0.0
            };
            let slots: Vec<u32> = limit.slots.iter().copied().filter(is_here).collect();
            let groups: Vec<(&[u32], f32)> = match limit.cap {
                TrafficCap::LinesPerCycle(cap) => vec![(&slots, cap)],
                TrafficCap::RequestShare(share) => slots
                    .chunks(1)
                    .map(|slot| {
                        let cpu_share = self.slots.memory_demand[slot[0] as usize].cpu_share;
                        (slot, share * cpu_share * self.memory.max_lines_per_cycle())
                    })
                    .collect(),
            };

            for (slots, cap) in groups {
                let delay = line_delay(&self.slots, slots, cap);
                for &slot in slots {
                    let slot = slot as usize;
                    let delay_cycles = delay * self.slots.memory_demand[slot].lines;
                    self.slots.memory_demand[slot].cycles += delay_cycles;
                    self.slots.extra_cycles_per_instr[slot] += delay_cycles;
                }
            }
        }
    }

    /// Updates the extra cycles per instruction that the core's other contexts and remote lines cause.
    fn update_core_stalls(&mut self, model_index: usize, slot: usize) {
        let compiled_program = &self.programs[self.slots.program[slot] as usize];
        let phase = self.slots.phase[slot] as usize;
        let mut extra_cycles = 0.0;
        if self.contexts_per_core > 1
            && let Some(cpu) = self.run_queues.tasks[slot].cpu
        {
            extra_cycles += self.core_wait_share[cpu as usize];
            let half_private_cycles =
                compiled_program.program.phases[phase].half_private_extra_cycles_per_instr as f32;
            if half_private_cycles > 0.0 {
                let core = cpu / self.contexts_per_core * self.contexts_per_core;
                let siblings =
                    (core..core + self.contexts_per_core).filter(|sibling| *sibling != cpu);
                let sibling_load: f32 = siblings
                    .map(|sibling| cpu_load(&self.run_queues, &self.slots, sibling))
                    .sum();
                extra_cycles += half_private_cycles * sibling_load.min(1.0);
            }
        }

        let (mut hits, mut cycles) = (0.0, 0.0);
        for &(region, reads, writes) in &compiled_program.regions[phase] {
            let package = self.package_of_model[model_index];
            let is_same_package = |cache: usize| self.package_of_model[cache] == package;
            let remote_transfers =
                self.shared_regions
                    .remote_transfers(region, model_index, is_same_package);
            let transfers = reads * remote_transfers.per_read + writes * remote_transfers.per_write;
            let near_share = remote_transfers.same_package_share;
            hits += transfers;
            cycles += transfers
                * (near_share * self.same_package_cycles
                    + (1.0 - near_share) * self.other_package_cycles);
        }

        (
            self.slots.counts_per_instr[slot][REMOTE_HITS],
            self.slots.counts_per_instr[slot][REMOTE_CYCLES],
        ) = (hits as f32, cycles as f32);
        extra_cycles += cycles as f32;
        extra_cycles += self.add_far_memory_cycles(model_index, slot);
        self.slots.memory_demand[slot].cycles +=
            extra_cycles - self.slots.extra_cycles_per_instr[slot];
        self.slots.extra_cycles_per_instr[slot] = extra_cycles;
    }

    /// Adds the extra cycles of memory on another node to the task's counts, and returns them per instruction. Waits
    /// for memory grow in proportion to the latency.
    fn add_far_memory_cycles(&mut self, model_index: usize, slot: usize) -> f32 {
        let slots = &mut self.slots;
        let is_local = self.memory_nodes[slots.memory_index[slot] as usize]
            .is_none_or(|node| node == self.node_of_model[model_index]);
        let latencies =
            slots.memory_demand[slot].serial_misses + slots.memory_demand[slot].serial_late_lines;
        let far_cycles = if is_local {
            0.0
        } else {
            latencies * self.memory.remote_extra_cycles
        };
        slots.counts_per_instr[slot][STALL_CYCLES] += far_cycles;
        slots.counts_per_instr[slot][FAR_CYCLES] = if is_local {
            0.0
        } else {
            slots.counts_per_instr[slot][STALL_CYCLES]
        };
        far_cycles
    }

    /// Computes how long contexts wait for issue slots that other contexts use.
    fn compute_core_waits(&mut self, model_index: usize) {
        let contexts_per_core = self.contexts_per_core;
        let mut contexts = [(0.0f32, 0.0f32); 16];
        let mut waits = [0.0f32; 16];

        for index in 0..self.cores_of_model[model_index].len() {
            let core = self.cores_of_model[model_index][index];
            let mut count = 0;
            for cpu in core..core + contexts_per_core {
                let (mut share, mut speed) = (0.0, 0.0);
                for &slot in self.run_queues.queued_tasks(cpu) {
                    let demand = &self.slots.memory_demand[slot as usize];
                    let own_cycles = demand.cycles + demand.queued_cycles
                        - self.slots.extra_cycles_per_instr[slot as usize];
                    share += demand.cpu_share;
                    speed += if demand.cycles > 0.0 {
                        demand.cpu_share / own_cycles.max(self.issue_slot_cycles)
                    } else {
                        0.0
                    };
                }

                if speed > 0.0 {
                    contexts[count] = (share / speed, share.min(1.0));
                    count += 1;
                }
            }
            smt::compute_slot_waits(
                self.issue_slot_cycles,
                &contexts[..count],
                &mut waits[..count],
            );
            let mut next_wait = waits[..count].iter();
            for cpu in core..core + contexts_per_core {
                let is_busy = cpu_load(&self.run_queues, &self.slots, cpu) > 0.0;
                self.core_wait_share[cpu as usize] = if is_busy {
                    next_wait.next().copied().unwrap_or(0.0)
                } else {
                    0.0
                };
            }
        }
    }

    /// Updates the waits of this cache's tasks only, because the node's load has hardly changed.
    fn update_cache_waits(&mut self, node: usize, model_index: usize) {
        let package = self.package_of_model[model_index];
        let occupancy_model = &self.occupancy_models[model_index];
        for entry in 0..occupancy_model.len() {
            let slot = occupancy_model.task[entry] as usize;
            if occupancy_model.is_running[entry] && !self.slots.is_off_cpu(slot) {
                self.memory
                    .update_queue_wait(node, package, &mut self.slots.memory_demand[slot]);
            }
        }
    }

    /// Advances all tasks of the node to the present and updates their waiting times, because the node's load has
    /// changed.
    fn solve_node(&mut self, node: usize, excluded_index: usize) {
        for neighbor_index in 0..self.occupancy_models.len() {
            if neighbor_index != excluded_index && self.node_of_model[neighbor_index] == node {
                self.advance_model(neighbor_index);
                if self.advance_phases(neighbor_index) {
                    self.next_step_at[neighbor_index] = self.now;
                }
                self.compute_demand(neighbor_index, 0.0);
            }
        }

        let (occupancy_models, slots) = (&self.occupancy_models, &mut self.slots);
        let (packages, nodes) = (&self.package_of_model, &self.node_of_model);
        self.memory.solve_node(node, &mut |visit| {
            for (index, occupancy_model) in occupancy_models.iter().enumerate() {
                if nodes[index] != node {
                    continue;
                }
                for entry in 0..occupancy_model.len() {
                    let task = occupancy_model.task[entry] as usize;
                    if occupancy_model.is_running[entry] && !slots.is_off_cpu(task) {
                        visit(packages[index], &mut slots.memory_demand[task]);
                    }
                }
            }
        });
        let utilization = self.memory.controllers[node].load;
        let is_large_change =
            (utilization - self.reported_load[node]).abs() > 10.0 * MIN_REPORTED_LOAD_CHANGE;
        self.reported_load[node] = utilization;

        for neighbor_index in 0..self.occupancy_models.len() {
            if self.node_of_model[neighbor_index] != node {
                continue;
            }
            self.traffic[neighbor_index] = memory_traffic(
                &self.occupancy_models[neighbor_index],
                &self.slots,
                &self.memory.controllers[node],
            );
            if neighbor_index != excluded_index {
                self.set_speeds(neighbor_index);
                if is_large_change {
                    let middle_of_step = self.now + 0.5 * self.step_length[neighbor_index];
                    self.next_step_at[neighbor_index] =
                        self.next_step_at[neighbor_index].min(middle_of_step);
                }
            }
        }
    }

    /// Sets the present speeds, and the time at which the first of the tasks' phases will end.
    fn set_speeds(&mut self, model_index: usize) {
        let occupancy_model = &mut self.occupancy_models[model_index];
        let mut phase_end = f64::INFINITY;
        for entry in 0..occupancy_model.len() {
            if !occupancy_model.is_running[entry] {
                continue;
            }

            let slot = occupancy_model.task[entry] as usize;
            let demand = &self.slots.memory_demand[slot];
            let external_rate = self.slots.external_rate[slot];
            let is_finished = self.slots.is_finished[slot];
            let rate = if external_rate > 0.0 {
                external_rate
            } else {
                f64::from(demand.cpu_share) * f64::from(demand.speed())
            };

            // A task that has never run has no speed yet.
            let rate = if is_finished || self.slots.is_off_cpu(slot) {
                0.0
            } else {
                rate
            };
            occupancy_model.rate[entry] = rate;
            self.slots.counts_per_instr[slot][QUEUE_CYCLES] = demand.queued_cycles;
            if rate > 0.0 {
                let remaining_instr =
                    self.slots.phase_left_instr[slot].min(self.slots.work_left_instr[slot]);
                phase_end = phase_end.min(self.now + remaining_instr.max(0.0) / rate);
            }
        }
        self.phase_ends_at[model_index] = phase_end;

        if !self.shared_regions.is_empty() {
            for entry in 0..self.occupancy_models[model_index].len() {
                if self.occupancy_models[model_index].is_running[entry] {
                    let (slot, rate) = (
                        self.occupancy_models[model_index].task[entry] as usize,
                        self.occupancy_models[model_index].rate[entry],
                    );
                    self.register_rate(slot, model_index, rate);
                }
            }
        }
    }

    /// Registers with each region the rate at which a task uses the region from this cache.
    fn register_rate(&mut self, slot: usize, model_index: usize, rate: f64) {
        let compiled_program = &self.programs[self.slots.program[slot] as usize];
        let phase = self.slots.phase[slot] as usize;
        if self.slots.registered_phase[slot] != phase as u32 {
            for &(region, reads, writes) in
                &compiled_program.regions[self.slots.registered_phase[slot] as usize]
            {
                self.shared_regions.add(
                    region,
                    model_index,
                    -self.slots.registered_rate[slot] * reads,
                    -self.slots.registered_rate[slot] * writes,
                );
            }
            self.slots.registered_rate[slot] = 0.0;
            self.slots.registered_phase[slot] = phase as u32;
        }
        let rate_change = rate - self.slots.registered_rate[slot];
        for &(region, reads, writes) in &compiled_program.regions[phase] {
            self.shared_regions.add(
                region,
                model_index,
                rate_change * reads,
                rate_change * writes,
            );
        }
        self.slots.registered_rate[slot] = rate;
    }

    pub(super) fn unregister_rate(&mut self, slot: usize) {
        let model_index = self.slots.model_index[slot];
        if model_index != NO_CACHE && !self.shared_regions.is_empty() {
            self.register_rate(slot, model_index as usize, 0.0);
        }
    }
}

/// Number of halvings that find the delay of a line, to a millionth of its largest value.
const DELAY_HALVINGS: u32 = 20;

/// The delay of each line in cycles with which these tasks transfer no more than `cap` lines per cycle.
fn line_delay(slots: &Slots, tasks: &[u32], cap: f32) -> f32 {
    let traffic = |delay: f32| -> f32 {
        let of_task = |slot: &u32| {
            let demand = &slots.memory_demand[*slot as usize];
            let cycles = demand.cycles + demand.queued_cycles + delay * demand.lines;
            demand.cpu_share * demand.lines / cycles
        };
        tasks.iter().map(of_task).sum()
    };
    if traffic(0.0) <= cap {
        return 0.0;
    }

    let shares = tasks
        .iter()
        .map(|slot| slots.memory_demand[*slot as usize].cpu_share);
    let (mut low, mut high) = (0.0, shares.sum::<f32>() / cap.max(1e-9));
    for _ in 0..DELAY_HALVINGS {
        let middle = 0.5 * (low + high);
        if traffic(middle) > cap {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

fn cpu_load(run_queues: &RunQueues, slots: &Slots, cpu: u32) -> f32 {
    run_queues
        .queued_tasks(cpu)
        .iter()
        .map(|&slot| slots.memory_demand[slot as usize].cpu_share)
        .sum()
}

/// Lines per cycle between a cache's tasks and memory, at the tasks' present speeds.
fn memory_traffic(
    occupancy_model: &OccupancyModel,
    slots: &Slots,
    controller: &QueueServer,
) -> f32 {
    let mut sum = 0.0;
    for entry in 0..occupancy_model.len() {
        if occupancy_model.is_running[entry] {
            let demand = &slots.memory_demand[occupancy_model.task[entry] as usize];
            if demand.cpu_share > 0.0 && demand.cycles > 0.0 {
                sum += controller.lines_per_instr(demand) * demand.cpu_share * demand.speed();
            }
        }
    }
    sum
}
