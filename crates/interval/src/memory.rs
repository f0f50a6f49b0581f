//! Memory's bandwidth: the time that fills wait for the fills of others at the buses and controllers.
//!
//! Problem: a fill waits for those before it, and the wait slows the programs down, which shortens the queue. Method: a
//! server that transfers a line in `S` cycles and is busy for a share `rho` of the time has a queue of `K S rho / 2(1 -
//! rho)` cycles (deterministic service, random arrivals of `K` lines at once; Pollaczek-Khinchine). `K` is the number
//! of misses that a program overlaps when alone. With first come, first served, every line waits that long. If demand
//! goes first, a demand read passes all other lines and waits `K S rho / 2(1 - rho_demand)` (Cobham 1954), plus the
//! backlog beyond [`STANDING_BACK`] lines. A bus with at most `c` outstanding reads is a queue with `c` servers, each
//! busy for the latency and the waits behind it (deterministic service, which waits half as long as exponential
//! service; Sakasegawa 1977). A program's solo profile already contains the waits for its own lines, so only the wait
//! beyond that of its solo load is added. It is added once for every miss that the program actually waits for, which is
//! its solo stall over the latency. `rho` is the root of "traffic at these speeds = rho", searched from the previous
//! root. If the queue is longer than one access takes, prefetches are dropped. A streamer runs less far ahead the fewer
//! entries are free. The number of dropped prefetches interpolates the program's cost between those with and without
//! prefetchers. A prefetch that is not dropped has found a free slot, and a queue shorter than one access. Its wait is the
//! mean of exponential waits below that limit. Properties: without co-runners, speeds are those of the profile; traffic
//! never exceeds a server's bandwidth.

use cachemate_core::{MachineSpec, PrefetcherSpec};

/// Number of waiting lines that a demand read may pass. Lines beyond this number are served first, because write
/// queues have this length and are drained when full.
const STANDING_BACK: f32 = 32.0;
/// Lines that a controller writes between two turnarounds of the bus.
const WRITE_BATCH: f32 = 16.0;
/// Maximum load of a server.
const BUSIEST: f32 = 0.9999;
/// Maximum load that one task alone causes. It is lower than [`BUSIEST`], so that two such tasks still slow each
/// other down.
const BUSIEST_ALONE: f32 = 0.99;
const MAX_ITERATIONS: u32 = 24;
/// Tolerance of the solution for `rho`.
const CLOSE_ENOUGH: f32 = 2e-4;

/// The demand of one running task on memory at its present occupancy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryDemand {
    /// Cycles per instruction without queueing.
    pub cycles: f32,
    /// Demand misses per instruction that the task waits for one after another.
    pub waits: f32,
    /// Late prefetched lines per instruction that the task waits for one after another.
    pub late: f32,
    /// Lines per instruction in both directions.
    pub lines: f32,
    /// Lines per instruction that have priority (demand misses).
    pub first: f32,
    /// Written lines per instruction.
    pub written: f32,
    /// Number of lines that arrive at once because their misses overlap, averaged over lines.
    pub burst: f32,
    /// Share of elapsed time on a processor.
    pub share: f32,
    /// Cycles per instruction spent in queues: the result of [`MemorySystem::update_queue_wait`].
    pub queued: f32,
}

impl MemoryDemand {
    /// Returns the instructions per cycle on a processor.
    #[inline]
    pub fn speed(&self) -> f32 {
        1.0 / (self.cycles + self.queued)
    }
}

/// The effect of prefetchers on a task at its present occupancy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prefetch {
    /// Cycles per instruction with prefetchers and without queueing.
    pub aided_cycles: f32,
    /// Cycles per instruction without prefetchers and without queueing.
    pub unaided_cycles: f32,
    /// Share of the stall that is due to late prefetched lines.
    pub late_share: f32,
}

/// Cycles that a line waits, per share of a server's time that other tasks use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Waits {
    demand: f32,
    /// The wait of prefetched lines.
    prefetched: f32,
    other: f32,
}

/// A bus, a controller, or the slots of a bus for outstanding reads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueServer {
    pub cycles_per_line: f32,
    /// Share of time in which the server transfers lines.
    pub busy: f32,
    /// Whether demand reads have priority over other lines.
    has_demand_priority: bool,
    /// Whether prefetched reads have the same priority, because reads hold slots and are served in their order.
    are_reads_in_order: bool,
    /// Share of the server's time that is used for lines with priority.
    demand_share: f32,
    /// Cost of a written line beyond that of a read line, in lines.
    turn_lines: f32,
    /// Maximum number of outstanding reads; 0 if the server transfers one line after another, in both directions.
    slots: f32,
    /// Number of lines that arrive at once, averaged over all lines.
    burst: f32,
    /// Wait from which on prefetches are dropped; 0 if they need a free slot.
    max_prefetch_wait: f32,
    /// The waits at the server's present load.
    current_waits: Waits,
}

impl QueueServer {
    fn new(bytes_per_cycle: f64, line_bytes: f64, has_demand_priority: bool) -> Self {
        QueueServer {
            cycles_per_line: (line_bytes / bytes_per_cycle) as f32,
            has_demand_priority,
            burst: 1.0,
            max_prefetch_wait: f32::INFINITY,
            ..QueueServer::default()
        }
    }

    /// Returns the waits at a load of `busy`.
    #[inline]
    fn waits_at_load(&self, busy: f32) -> Waits {
        let busy = busy.min(BUSIEST);
        let standing_wait = self.cycles_per_line / (2.0 * (1.0 - busy));
        if !self.has_demand_priority {
            return Waits { demand: standing_wait, prefetched: standing_wait, other: standing_wait };
        }
        let left_over = busy * self.tail_probability(busy, STANDING_BACK);
        let passed_by = self.cycles_per_line / (2.0 * (1.0 - busy * self.demand_share));
        let demand = (passed_by + left_over * standing_wait).min(standing_wait);
        let prefetched = if self.are_reads_in_order { demand } else { standing_wait };
        Waits { demand, prefetched, other: standing_wait }
    }

    /// Returns the lines per instruction with which a task uses this server.
    #[inline]
    pub fn lines_per_instr(&self, demand: &MemoryDemand) -> f32 {
        if self.slots > 0.0 { demand.lines - demand.written } else { demand.lines + self.turn_lines * demand.written }
    }

    /// Returns the load that the task would cause without queueing, as in its profile.
    #[inline]
    fn unqueued_load(&self, demand: &MemoryDemand) -> f32 {
        (self.lines_per_instr(demand) * demand.share * self.cycles_per_line / demand.cycles).min(BUSIEST_ALONE)
    }

    /// Returns the cycles per instruction that a task queues here at this load and with these waits.
    #[inline]
    fn queue_wait(&self, busy: f32, waits: Waits, demand: &MemoryDemand) -> f32 {
        let others_load = match self.slots > 0.0 {
            true => self.saturation_probability(busy) - self.saturation_probability(self.unqueued_load(demand)),
            false => self.burst * busy - demand.burst * self.unqueued_load(demand),
        };
        let others_load = others_load.max(0.0);
        let prefetch_wait = mean_below(self.max_prefetch_wait, waits.prefetched * others_load);
        demand.waits * waits.demand * others_load + demand.late * prefetch_wait
    }

    /// Returns the probability that all slots are taken.
    #[inline]
    fn saturation_probability(&self, busy: f32) -> f32 {
        libm::powf(busy, libm::sqrtf(2.0 * (self.slots + 1.0)) - 1.0)
    }

    /// Returns the probability that more than `lines` lines wait if any line does; it decays exponentially (heavy
    /// traffic).
    #[inline]
    fn tail_probability(&self, busy: f32, lines: f32) -> f32 {
        let exponent = 2.0 * (1.0 - busy) / (busy.max(1e-3) * self.burst) * lines;
        if exponent > 20.0 { 0.0 } else { libm::expf(-exponent) }
    }

    fn settle(&mut self, busy: f32) {
        self.busy = busy;
        self.current_waits = self.waits_at_load(busy);
    }
}

/// Returns the mean of an exponential distribution with this mean, below a limit.
#[inline]
fn mean_below(limit: f32, mean: f32) -> f32 {
    // Far below its mean, the distribution is uniform.
    if limit < 0.01 * mean {
        0.5 * limit
    } else if limit < 20.0 * mean {
        mean - limit / libm::expm1f(limit / mean)
    } else {
        mean
    }
}

/// The buses and the controllers of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct MemorySystem {
    /// Controllers by node.
    pub controllers: Vec<QueueServer>,
    /// Buses by package; empty if packages have no bus.
    pub buses: Vec<QueueServer>,
    /// Slots for outstanding reads, by package, or by node if packages have no bus; empty if unlimited.
    read_slots: Vec<QueueServer>,
    packages_per_node: u32,
    pub latency_cycles: f32,
    /// Latency of another node's memory beyond that of the local node.
    pub farther_cycles: f32,
    /// Prefetch distance in lines, if the prefetcher adapts to the number of free entries.
    ahead_lines: Option<f32>,
    /// Maximum number of misses that a core overlaps.
    max_overlap: f32,
}

impl MemorySystem {
    /// Builds the memory system of a checked machine.
    pub fn new(spec: &MachineSpec, line_bytes: f64) -> Self {
        let (memory, rules) = (&spec.memory, &spec.memory.scheduling);
        let server = |bytes_per_cycle: f64| QueueServer {
            are_reads_in_order: rules.requests_in_flight.is_some(),
            max_prefetch_wait: memory.local_latency_cycles as f32,
            ..QueueServer::new(bytes_per_cycle, line_bytes, rules.demand_priority)
        };
        let bus = memory.package_bus_bytes_per_cycle.map(server);
        let mut controller = server(memory.bytes_per_cycle);
        controller.turn_lines = rules.turnaround_cycles as f32 / (WRITE_BATCH * controller.cycles_per_line);
        let latency_cycles = memory.local_latency_cycles as f32;
        let slot_server = rules.requests_in_flight.map(|slots| QueueServer {
            slots: slots as f32,
            cycles_per_line: latency_cycles / slots as f32,
            ..QueueServer::default()
        });
        let slot_groups = if bus.is_some() { spec.packages } else { memory.nodes };
        let lines_ahead = spec.prefetchers.iter().find_map(|prefetcher| match prefetcher {
            PrefetcherSpec::Streamer { ahead_lines, .. } => Some(*ahead_lines as f32),
            _ => None,
        });
        MemorySystem {
            controllers: vec![controller; memory.nodes as usize],
            buses: bus.map_or(Vec::new(), |bus| vec![bus; spec.packages as usize]),
            read_slots: slot_server.map_or(Vec::new(), |slot_server| vec![slot_server; slot_groups as usize]),
            packages_per_node: spec.packages / memory.nodes,
            latency_cycles,
            farther_cycles: memory.remote_latency_cycles as f32 - latency_cycles,
            ahead_lines: lines_ahead.filter(|_| rules.demand_priority),
            max_overlap: spec.pipeline.max_misses_in_flight() as f32,
        }
    }

    pub fn node_of(&self, package: u32) -> usize {
        (package / self.packages_per_node) as usize
    }

    /// Returns the share of its prefetches that a task loses because of its co-runners, beyond the loss when it runs
    /// alone. This is the larger of the share of prefetches that find no free slot, and the share of the speed that
    /// later prefetches cost.
    pub fn dropped_share(&self, node: usize, package: u32, demand: &MemoryDemand, prefetch: &Prefetch) -> f32 {
        let mut dropped = 0.0f32;
        let mut record_loss = |now: f32, alone: f32| dropped = dropped.max((now - alone) / (1.0 - alone));
        for server in self.servers_on_path(node, package) {
            let crowded =
                |busy: f32| busy * server.tail_probability(busy, self.latency_cycles / server.cycles_per_line);
            record_loss(crowded(server.busy.min(BUSIEST)), crowded(server.unqueued_load(demand)));
        }
        if let Some(slot_server) = self.slot_server(node, package) {
            record_loss(
                slot_server.saturation_probability(slot_server.busy),
                slot_server.saturation_probability(slot_server.unqueued_load(demand)),
            );
        }
        match self.ahead_lines {
            Some(lines) if prefetch.late_share > 0.0 => {
                dropped.max(self.lost_prefetch_share(node, package, demand, prefetch, lines))
            }
            _ => dropped,
        }
    }

    /// Returns the share of the benefit of prefetching that a task loses because its prefetches start later. A stream
    /// advances by its prefetch distance in each memory latency. That distance is proportional to the number of free
    /// entries, which is sampled now and a moment ago; the larger sample counts. Between the samples, the outstanding
    /// requests of others change (Poisson; mean of the larger of two normal numbers). The loss is relative to the
    /// range from aided to unaided cycles, and weighted by the share of the stall that is due to late lines.
    fn lost_prefetch_share(
        &self,
        node: usize,
        package: u32,
        demand: &MemoryDemand,
        prefetch: &Prefetch,
        lines: f32,
    ) -> f32 {
        let slot_server = self.slot_server(node, package);
        let free_slot_share = |busy: &dyn Fn(&QueueServer) -> f32| {
            let backlog_of = |server: &QueueServer| {
                server.waits_at_load(busy(server)).other * server.burst * busy(server) / self.latency_cycles
            };
            1.0 - self.servers_on_path(node, package).map(backlog_of).fold(slot_server.map_or(0.0, busy), f32::max)
        };
        let spread = slot_server.map_or(0.0, |slot_server| {
            libm::sqrtf(
                (slot_server.busy - slot_server.unqueued_load(demand)).max(0.0) * slot_server.slots
                    / core::f32::consts::PI,
            ) / slot_server.slots
        });
        // Whole lines, rounded up on average.
        let lines_at_free_share = |free_share: f32| lines * free_share.clamp(0.0, 1.0) + 0.5;
        let (now, alone) = (
            lines_at_free_share(free_slot_share(&|server| server.busy) + spread),
            lines_at_free_share(free_slot_share(&|server| server.unqueued_load(demand))),
        );
        let fills = (demand.lines - demand.written) * self.latency_cycles;
        let excess = fills / now - prefetch.aided_cycles.max(fills / alone);
        let max_excess = prefetch.unaided_cycles - prefetch.aided_cycles;
        if excess > 0.0 && max_excess > 0.0 { prefetch.late_share * (excess / max_excess).min(1.0) } else { 0.0 }
    }

    /// Returns the number of lines that arrive at once if the task's misses overlap. Misses that are waited for as
    /// one stall arrive together, up to the number that a core overlaps; all other lines arrive one by one. If slots
    /// are limited, lines arrive as slots become free.
    pub fn burst_lines(&self, demand: &MemoryDemand) -> f32 {
        if !self.read_slots.is_empty() || demand.waits <= 0.0 || demand.lines <= 0.0 {
            return 1.0;
        }
        1.0 + ((demand.first / demand.waits).clamp(1.0, self.max_overlap) - 1.0)
            * (demand.first / demand.lines).min(1.0)
    }

    /// Does a prefetcher run less far ahead if fewer entries are free?
    pub fn can_throttle_prefetch(&self) -> bool {
        self.ahead_lines.is_some()
    }

    fn servers_on_path(&self, node: usize, package: u32) -> impl Iterator<Item = &QueueServer> {
        self.buses.get(package as usize).into_iter().chain(self.controllers.get(node))
    }

    fn slot_server(&self, node: usize, package: u32) -> Option<&QueueServer> {
        self.read_slots.get(if self.buses.is_empty() { node } else { package as usize })
    }

    /// Computes the load of a node's controller and of its packages' buses, and the waiting times there.
    /// `for_each_demand` must call the function that it receives once for every task, with the task's package and
    /// demand; `solve` invokes `for_each_demand` repeatedly.
    pub fn solve(&mut self, node: usize, for_each_demand: &mut dyn FnMut(&mut dyn FnMut(u32, &mut MemoryDemand))) {
        let packages = self.packages_per_node;
        let first = node as u32 * packages;
        // A bus and its controller see each other's delay; two sweeps suffice, because every time step solves again.
        let sweeps = if self.buses.is_empty() && self.read_slots.is_empty() { 1 } else { 2 };
        for _ in 0..sweeps {
            for package in first..first + packages {
                self.solve_server(node, Some(package), ServerKind::Bus, for_each_demand);
            }
            self.solve_server(node, None, ServerKind::Controller, for_each_demand);
            if self.read_slots.is_empty() {
                continue;
            }
            let users = if self.buses.is_empty() { first..first + 1 } else { first..first + packages };
            for package in users {
                let queued_cycles = |server: &QueueServer| {
                    let share = server.demand_share;
                    server.burst
                        * server.busy
                        * (share * server.current_waits.demand + (1.0 - share) * server.current_waits.prefetched)
                };
                let held_cycles =
                    self.latency_cycles + self.servers_on_path(node, package).map(queued_cycles).sum::<f32>();
                let index = if self.buses.is_empty() { node } else { package as usize };
                self.read_slots[index].cycles_per_line = held_cycles / self.read_slots[index].slots;
                self.solve_server(
                    node,
                    (!self.buses.is_empty()).then_some(package),
                    ServerKind::ReadSlots,
                    for_each_demand,
                );
            }
        }
        let memory = &*self;
        for_each_demand(&mut |package, demand| demand.queued = memory.queue_wait(node, package, demand));
    }

    /// Solves for the load of one server while the other servers on its users' paths stay unchanged.
    fn solve_server(
        &mut self,
        node: usize,
        only_package: Option<u32>,
        server_kind: ServerKind,
        for_each_demand: &mut dyn FnMut(&mut dyn FnMut(u32, &mut MemoryDemand)),
    ) {
        let Some(server) = self.server_mut(node, only_package, server_kind).copied() else { return };
        let (mut priority_lines, mut all_lines, mut bursts) = (0.0, 0.0, 0.0);
        for_each_demand(&mut |package, demand| {
            if only_package.is_none_or(|only_package| only_package == package) && demand.cycles > 0.0 {
                let speed = demand.share * demand.speed();
                priority_lines +=
                    if server.are_reads_in_order { demand.lines - demand.written } else { demand.first } * speed;
                all_lines += server.lines_per_instr(demand) * speed;
                bursts += server.lines_per_instr(demand) * speed * demand.burst;
            }
        });
        let share_of_lines = |lines: f32| if all_lines > 0.0 { lines / all_lines } else { 1.0 };
        let mut server = QueueServer {
            demand_share: share_of_lines(priority_lines).min(1.0),
            burst: share_of_lines(bursts),
            ..server
        };
        // The queueing so far covers all servers on the path.
        let (memory, old_server) = (&*self, server);
        let is_only_server = self.buses.is_empty() && self.read_slots.is_empty();
        let added_wait = |package: u32, demand: &MemoryDemand| match is_only_server {
            true => 0.0,
            false => (memory.queue_wait(node, package, demand)
                - old_server.queue_wait(old_server.busy, old_server.current_waits, demand))
            .max(0.0),
        };
        let busy = solve_load(&server, &mut |visit| {
            for_each_demand(&mut |package, demand| {
                if only_package.is_none_or(|only_package| only_package == package) {
                    visit(added_wait(package, demand), demand);
                }
            });
        });
        server.settle(busy);
        if let Some(target) = self.server_mut(node, only_package, server_kind) {
            *target = server;
        }
    }

    fn server_mut(&mut self, node: usize, package: Option<u32>, server_kind: ServerKind) -> Option<&mut QueueServer> {
        let index = package.map_or(node, |package| package as usize);
        match server_kind {
            ServerKind::Bus => self.buses.get_mut(index),
            ServerKind::Controller => self.controllers.get_mut(node),
            ServerKind::ReadSlots => self.read_slots.get_mut(index),
        }
    }

    /// Computes how long one task waits at the servers' present load.
    pub fn update_queue_wait(&self, node: usize, package: u32, demand: &mut MemoryDemand) {
        demand.queued = self.queue_wait(node, package, demand);
    }

    #[inline]
    fn queue_wait(&self, node: usize, package: u32, demand: &MemoryDemand) -> f32 {
        let wait_at_server = |server: &QueueServer| server.queue_wait(server.busy, server.current_waits, demand);
        self.servers_on_path(node, package).chain(self.slot_server(node, package)).map(wait_at_server).sum()
    }
}

/// Kinds of servers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ServerKind {
    Bus,
    Controller,
    ReadSlots,
}

/// Finds the load at which the tasks' traffic, slowed by this server and all others on their paths, causes exactly
/// that load.
fn solve_load(server: &QueueServer, for_each_demand: &mut dyn FnMut(&mut dyn FnMut(f32, &mut MemoryDemand))) -> f32 {
    let mut traffic_at_load = |busy: f32| {
        let (mut sum, waits) = (0.0, server.waits_at_load(busy));
        for_each_demand(&mut |elsewhere, demand| {
            let queued = server.queue_wait(busy, waits, demand) + elsewhere;
            sum += server.lines_per_instr(demand) * demand.share / (demand.cycles + queued);
        });
        sum * server.cycles_per_line
    };
    // Traffic falls as `busy` rises, so the difference has one root. Regula falsi (Illinois), from the last root.
    let (mut low, mut high) = (0.0f32, BUSIEST);
    let mut root = server.busy.min(BUSIEST);
    let mut excess = traffic_at_load(root) - root;
    if excess.abs() <= CLOSE_ENOUGH {
        return root;
    }
    let (mut over_low, mut over_high) = if excess > 0.0 {
        low = root;
        (excess, traffic_at_load(high) - high)
    } else {
        high = root;
        (traffic_at_load(low), excess)
    };
    if over_high >= 0.0 {
        return BUSIEST;
    }
    let mut side = 0i8;
    for _ in 0..MAX_ITERATIONS {
        root = (low * over_high - high * over_low) / (over_high - over_low);
        excess = traffic_at_load(root) - root;
        if excess.abs() <= CLOSE_ENOUGH || high - low <= CLOSE_ENOUGH {
            break;
        }
        if excess > 0.0 {
            (low, over_low) = (root, excess);
            if side == 1 {
                over_high *= 0.5;
            }
            side = 1;
        } else {
            (high, over_high) = (root, excess);
            if side == -1 {
                over_low *= 0.5;
            }
            side = -1;
        }
    }
    root
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_memory(bytes_per_cycle: f64, bus: Option<f64>) -> MemorySystem {
        MemorySystem {
            controllers: vec![QueueServer::new(bytes_per_cycle, 64.0, false)],
            buses: bus.map_or(Vec::new(), |bus| vec![QueueServer::new(bus, 64.0, false)]),
            read_slots: Vec::new(),
            packages_per_node: 1,
            latency_cycles: 200.0,
            farther_cycles: 0.0,
            ahead_lines: None,
            max_overlap: 8.0,
        }
    }

    /// Solves repeatedly until the loads have settled, as the machine does over its steps.
    fn settle_demands(memory: &mut MemorySystem, demands: &mut [MemoryDemand]) {
        for _ in 0..60 {
            memory.solve(0, &mut |visit| demands.iter_mut().for_each(|demand| visit(0, demand)));
        }
    }

    fn stream_demand(cycles: f32, waits: f32, lines: f32) -> MemoryDemand {
        MemoryDemand { cycles, waits, lines, burst: 1.0, share: 1.0, ..MemoryDemand::default() }
    }

    /// Is a task alone as fast as in its profile, however busy it keeps memory?
    #[test]
    fn a_task_alone_waits_for_nobody() {
        for lines in [0.001, 0.02, 0.031] {
            let mut memory = sample_memory(2.0, Some(2.5));
            let mut demands = [stream_demand(1.0, 0.01, lines)];
            settle_demands(&mut memory, &mut demands);
            assert!(demands[0].queued < 3e-3, "{lines}: {demands:?}");
            assert!((memory.controllers[0].busy - lines * 32.0).abs() < 3e-3);
        }
    }

    /// Do streams that want more than the bandwidth get exactly the bandwidth, in equal parts?
    #[test]
    fn streams_beyond_the_bandwidth_share_it() {
        for count in [2, 4, 8] {
            let mut memory = sample_memory(2.0, None);
            let mut demands = vec![stream_demand(1.0, 0.01, 0.025); count];
            settle_demands(&mut memory, &mut demands);
            let lines: f32 = demands.iter().map(|demand| demand.lines * demand.speed()).sum();
            let max_lines = 2.0 / 64.0;
            assert!(lines <= max_lines * 1.001, "{count}: {lines} of {max_lines}");
            let demanded = 0.025 * count as f32;
            assert!(lines > 0.9 * max_lines.min(demanded), "{count}: {lines} of {max_lines}");
            let speeds: Vec<f32> = demands.iter().map(MemoryDemand::speed).collect();
            assert!(speeds.iter().all(|speed| (speed / speeds[0] - 1.0).abs() < 1e-3), "{speeds:?}");
        }
    }

    /// At a light load, is the wait the closed form of a queue with deterministic service?
    #[test]
    fn a_light_load_waits_as_the_formula_says() {
        let mut memory = sample_memory(2.0, None);
        let mut demands = [stream_demand(1.0, 0.001, 0.000_01), stream_demand(1.0, 0.0, 0.015)];
        settle_demands(&mut memory, &mut demands);
        let busy = 0.015 * 32.0 + 0.000_32;
        let expected = 0.001 * 32.0 * busy / (2.0 * (1.0 - busy));
        assert!((demands[0].queued / expected - 1.0).abs() < 0.02, "{} {expected}", demands[0].queued);
        assert!(demands[1].queued == 0.0);
    }

    /// Does the slower of bus and controller limit the traffic?
    #[test]
    fn the_narrower_server_limits() {
        for (controller, bus) in [(4.0, 1.0), (1.0, 4.0)] {
            let mut memory = sample_memory(controller, Some(bus));
            let mut demands = vec![stream_demand(1.0, 0.02, 0.03); 3];
            settle_demands(&mut memory, &mut demands);
            let lines: f32 = demands.iter().map(|demand| demand.lines * demand.speed()).sum();
            assert!((lines * 64.0 - 1.0).abs() < 0.05, "{controller} {bus}: {}", lines * 64.0);
        }
    }

    /// Are prefetches dropped only if other tasks crowd memory?
    #[test]
    fn prefetches_are_dropped_in_a_crowd_only() {
        let mut memory = sample_memory(2.0, None);
        let demand = stream_demand(1.0, 0.001, 0.01);
        memory.controllers[0].busy = 0.32;
        assert_eq!(memory.dropped_share(0, 0, &demand, &Prefetch::default()), 0.0);
        memory.controllers[0].busy = 0.97;
        assert!(memory.dropped_share(0, 0, &demand, &Prefetch::default()) > 0.3);
    }

    /// With demand priority, does a miss wait as Cobham's formula predicts, and does a late line wait as long as
    /// without priority?
    #[test]
    fn demand_waits_as_cobham_says() {
        let mut memory = sample_memory(2.0, None);
        memory.controllers[0].has_demand_priority = true;
        let (demand, background) =
            (MemoryDemand { first: 0.01, ..stream_demand(1.0, 0.0, 0.01) }, stream_demand(1.0, 0.0, 0.009));
        let light = MemoryDemand { late: 0.001, ..stream_demand(1.0, 0.001, 1e-6) };
        let mut demands =
            [demand, background, MemoryDemand { late: 0.0, ..light }, MemoryDemand { waits: 0.0, ..light }];
        settle_demands(&mut memory, &mut demands);
        let (first, busy) = (0.01 * 32.0, 0.019 * 32.0);
        let cobham = 0.001 * 32.0 * busy / 2.0 / (1.0 - first);
        assert!((demands[2].queued / cobham - 1.0).abs() < 0.02, "{} {cobham}", demands[2].queued);
        let behind_all = 0.001 * 32.0 * busy / 2.0 / (1.0 - busy);
        assert!((demands[3].queued / behind_all - 1.0).abs() < 0.02, "{} {behind_all}", demands[3].queued);
        // A prefetch that would wait longer than the mean wait is dropped.
        memory.controllers[0].max_prefetch_wait = 1000.0 * behind_all;
        settle_demands(&mut memory, &mut demands);
        let below = behind_all * (1.0 - 1.0 / (std::f32::consts::E - 1.0));
        assert!((demands[3].queued / below - 1.0).abs() < 0.02, "{} {below}", demands[3].queued);
    }

    /// Do lines that arrive eight at once make others wait eight times as long, as in theory for batch arrivals?
    #[test]
    fn lines_that_come_at_once_make_others_wait() {
        let mut memory = sample_memory(2.0, None);
        let mut demands =
            [stream_demand(1.0, 0.001, 1e-6), MemoryDemand { burst: 8.0, ..stream_demand(1.0, 0.0, 0.015) }];
        settle_demands(&mut memory, &mut demands);
        let busy = 0.015 * 32.0;
        let expected = 0.001 * 8.0 * 32.0 * busy / (2.0 * (1.0 - busy));
        assert!((demands[0].queued / expected - 1.0).abs() < 0.02, "{} {expected}", demands[0].queued);
        let demand = MemoryDemand { first: 0.01, ..stream_demand(1.0, 0.002, 0.02) };
        assert!((memory.burst_lines(&demand) - (1.0 + 4.0 * 0.5)).abs() < 1e-5, "half of the lines come five at once");
        memory.read_slots = vec![QueueServer::default()];
        assert_eq!(memory.burst_lines(&demand), 1.0);
    }

    /// Do the slots limit the number of reads per latency, and does a single slot behave like an ordinary queue?
    #[test]
    fn reads_on_their_way_are_limited() {
        for slots in [1.0, 4.0, 12.0] {
            let mut memory = sample_memory(64.0, None);
            memory.read_slots = vec![QueueServer { slots, cycles_per_line: 200.0 / slots, ..QueueServer::default() }];
            let mut demands = vec![stream_demand(1.0, 0.02, 0.03); 3];
            settle_demands(&mut memory, &mut demands);
            let lines: f32 = demands.iter().map(|demand| demand.lines * demand.speed()).sum();
            let max_lines = slots / 200.0;
            assert!(
                lines <= max_lines * 1.001 && lines > 0.85 * max_lines.min(0.09),
                "{slots}: {lines} of {max_lines}"
            );
        }
        let mut memory = sample_memory(64.0, None);
        memory.read_slots = vec![QueueServer { slots: 1.0, cycles_per_line: 200.0, ..QueueServer::default() }];
        let mut demands = [stream_demand(1.0, 0.001, 1e-6), stream_demand(1.0, 0.0, 0.002)];
        settle_demands(&mut memory, &mut demands);
        let expected = 0.001 * 200.0 * 0.4 / (2.0 * 0.6);
        assert!((demands[0].queued / expected - 1.0).abs() < 0.03, "{} {expected}", demands[0].queued);
    }

    /// Does a stream whose prefetches start later slow down in proportion to its shorter distance, and a stream with
    /// spare time not at all?
    #[test]
    fn a_stream_is_as_fast_as_it_is_ahead() {
        let mut memory = sample_memory(64.0, None);
        memory.read_slots = vec![QueueServer { slots: 12.0, cycles_per_line: 200.0 / 12.0, ..QueueServer::default() }];
        memory.ahead_lines = Some(8.0);
        // 8 x (1 - 5/12) + 0.5 lines ahead when alone: five outstanding, one every 40 cycles.
        let demand = stream_demand(40.0, 0.0, 1.0);
        let prefetch = Prefetch { aided_cycles: 40.0, unaided_cycles: 200.0, late_share: 1.0 };
        memory.read_slots[0].busy = memory.read_slots[0].unqueued_load(&demand);
        assert_eq!(memory.dropped_share(0, 0, &demand, &prefetch), 0.0, "alone");
        memory.read_slots[0].busy = 0.7;
        let others_load = (0.7 - 5.0 / 12.0) * 12.0 / std::f32::consts::PI;
        let lines_ahead = 8.0 * (0.3 + others_load.sqrt() / 12.0) + 0.5;
        let expected = (200.0 / lines_ahead - 40.0) / 160.0;
        let found = memory.lost_prefetch_share(0, 0, &demand, &prefetch, 8.0);
        assert!((found / expected - 1.0).abs() < 0.02, "{found} {expected}");
        let slow = Prefetch { aided_cycles: 400.0, unaided_cycles: 500.0, ..prefetch };
        assert_eq!(memory.lost_prefetch_share(0, 0, &stream_demand(400.0, 0.0, 1.0), &slow, 8.0), 0.0);
        let without_room = memory.dropped_share(0, 0, &stream_demand(400.0, 0.0, 1.0), &slow);
        assert!(without_room > 0.1, "{without_room}");
    }
}
