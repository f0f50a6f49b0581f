//! Memory's bandwidth: the time that fills wait for the fills of others at the buses and controllers.
//!
//! Problem: a fill waits for those before it, and the wait slows the programs down, which shortens the queue. Method: a
//! server that transfers a line in `S` cycles and is busy for a share `rho` of the time has a queue of `D S rho / 2(1 -
//! rho)` cycles (deterministic service; Pollaczek-Khinchine). `D` is the variance of the number of lines that arrive,
//! relative to single random arrivals. A program that overlaps `K` misses when alone, and waits for memory for a share `p`
//! of the time, has `K` lines on their way or none, so that `D = K(1 - p)` (a binomial number; Engset 1918). A program that
//! always waits for memory sends a line as another returns, and causes no queue until the server is full: others wait for the
//! line in service only, `p S rho / 2`. With first come, first served, every line waits that long. If demand goes first, a
//! demand read passes all other lines and waits `D S rho / 2(1 - rho_demand)` (Cobham 1954), plus the
//! backlog beyond [`MAX_PASSED_LINES`] lines. A bus with at most `c` outstanding reads is a queue with `c` servers,
//! each busy for the latency and the waits behind it (deterministic service, which waits half as long as exponential
//! service; Sakasegawa 1977). A program's solo profile already contains the waits for its own lines, so only the wait
//! beyond that of its solo load is added. It is added once for every miss that the program actually waits for, which is
//! its solo stall over the latency. `rho` is the root of "traffic at these speeds = rho", searched from the previous
//! root. If the queue is longer than one access takes, prefetches are dropped. A streamer runs less far ahead the fewer
//! entries are free. The number of dropped prefetches interpolates the program's cost between those with and without
//! prefetchers. A prefetch that is not dropped has found a free slot, and a queue shorter than one access. Its wait is
//! the mean of exponential waits below that limit. Properties: without co-runners, speeds are those of the profile;
//! traffic never exceeds a server's bandwidth.

use cachemate_core::{MachineSpec, PrefetcherSpec};

/// Number of waiting lines that a demand read may pass. Lines beyond this number are served first, because write
/// queues have this length and are drained when full.
const MAX_PASSED_LINES: f32 = 32.0;
/// Lines that a controller writes between two turnarounds of the bus.
const WRITE_BATCH: f32 = 16.0;
/// Maximum load of a server.
const MAX_LOAD: f32 = 0.99999;
/// Maximum load that one task alone causes. It is lower than [`MAX_LOAD`], so that two such tasks still slow each
/// other down.
const MAX_SOLO_LOAD: f32 = 0.99;
const MAX_ITERATIONS: u32 = 24;
/// Minimum share of a task's time in which it does not wait for memory, so that the wait at the maximum load is as long as
/// any traffic requires.
const MIN_BUSY_SHARE: f32 = 0.02;
/// Tolerance of the solution for `rho`.
const LOAD_TOLERANCE: f32 = 2e-4;

/// The demand of one running task on memory at its present occupancy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryDemand {
    /// Cycles per instruction without queueing.
    pub cycles: f32,
    /// Demand misses per instruction that the task waits for one after another.
    pub serial_misses: f32,
    /// Late prefetched lines per instruction that the task waits for one after another.
    pub serial_late_lines: f32,
    /// Lines per instruction in both directions.
    pub lines: f32,
    /// Lines per instruction that have priority (demand misses).
    pub demand_lines: f32,
    /// Written lines per instruction.
    pub written_lines: f32,
    /// Number of lines that arrive at once because their misses overlap, averaged over lines.
    pub burst_lines: f32,
    /// Cycles per instruction without queueing in which the task waits for memory.
    pub stall_cycles: f32,
    /// Share of elapsed time on a processor.
    pub cpu_share: f32,
    /// Cycles per instruction spent in queues: the result of [`MemorySystem::update_queue_wait`].
    pub queued_cycles: f32,
}

impl MemoryDemand {
    /// Returns the instructions per cycle on a processor.
    #[inline]
    pub fn speed(&self) -> f32 {
        1.0 / (self.cycles + self.queued_cycles)
    }

    /// Returns the share of its time on a processor in which the task does not wait for memory.
    #[inline]
    fn busy_share(&self) -> f32 {
        ((self.cycles - self.stall_cycles) * self.speed()).clamp(MIN_BUSY_SHARE, 1.0)
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

/// Cycles that a line waits per unit of the load that other tasks cause.
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
    pub load: f32,
    /// Whether demand reads have priority over other lines.
    has_demand_priority: bool,
    /// Whether prefetched reads have the same priority, because reads hold slots and are served in their order.
    are_reads_in_order: bool,
    /// Share of the server's time that is used for lines with priority.
    demand_share: f32,
    /// Cost of a written line beyond that of a read line, in lines.
    write_turnaround_lines: f32,
    /// Maximum number of outstanding reads; 0 if the server transfers one line after another, in both directions.
    slots: f32,
    /// Number of lines that arrive at once, averaged over all lines.
    burst: f32,
    /// Share of its time in which a task does not wait for memory, averaged over all lines.
    busy_share: f32,
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
            busy_share: 1.0,
            max_prefetch_wait: f32::INFINITY,
            ..QueueServer::default()
        }
    }

    /// Returns the waits at a load of `utilization`.
    #[inline]
    fn waits_at_load(&self, utilization: f32) -> Waits {
        let busy = utilization.min(MAX_LOAD);
        let standing_wait = self.cycles_per_line / (2.0 * (1.0 - busy));
        if !self.has_demand_priority {
            return Waits {
                demand: standing_wait,
                prefetched: standing_wait,
                other: standing_wait,
            };
        }
        let backlog_share = busy * self.tail_probability(busy, MAX_PASSED_LINES);
        let priority_wait = self.cycles_per_line / (2.0 * (1.0 - busy * self.demand_share));
        let demand = (priority_wait + backlog_share * standing_wait).min(standing_wait);
        let prefetched = if self.are_reads_in_order {
            demand
        } else {
            standing_wait
        };
        Waits {
            demand,
            prefetched,
            other: standing_wait,
        }
    }

    /// Returns the lines per instruction with which a task uses this server.
    #[inline]
    pub fn lines_per_instr(&self, demand: &MemoryDemand) -> f32 {
        if self.slots > 0.0 {
            demand.lines - demand.written_lines
        } else {
            demand.lines + self.write_turnaround_lines * demand.written_lines
        }
    }

    /// Returns the load that the task would cause without queueing, as in its profile.
    #[inline]
    fn unqueued_load(&self, demand: &MemoryDemand) -> f32 {
        (self.lines_per_instr(demand) * demand.cpu_share * self.cycles_per_line / demand.cycles)
            .min(MAX_SOLO_LOAD)
    }

    /// Returns the cycles per instruction that a task queues here at this load and with these waits.
    #[inline]
    fn queue_wait(&self, utilization: f32, waits: Waits, demand: &MemoryDemand) -> f32 {
        let excess_load = match self.slots > 0.0 {
            true => {
                self.saturation_probability(utilization)
                    - self.saturation_probability(self.unqueued_load(demand))
            }
            false => self.burst * utilization - demand.burst_lines * self.unqueued_load(demand),
        };
        let others_load = excess_load.max(0.0);
        let wait_behind = |wait_per_load: f32| self.mean_wait(wait_per_load, others_load);
        let prefetch_wait = mean_below_limit(self.max_prefetch_wait, wait_behind(waits.prefetched));
        demand.serial_misses * wait_behind(waits.demand) + demand.serial_late_lines * prefetch_wait
    }

    /// Returns the wait behind lines of which a share arrives at random and the others as earlier lines return. Those never
    /// form a queue, so that only the line in service is waited for.
    #[inline]
    fn mean_wait(&self, wait_per_load: f32, load: f32) -> f32 {
        let paced_load = (1.0 - self.busy_share) * load / self.burst.max(1.0);
        self.busy_share * wait_per_load * load + 0.5 * self.cycles_per_line * paced_load
    }

    /// Returns the probability that all slots are taken.
    #[inline]
    fn saturation_probability(&self, utilization: f32) -> f32 {
        libm::powf(utilization, libm::sqrtf(2.0 * (self.slots + 1.0)) - 1.0)
    }

    /// Returns the probability that more than `lines` lines wait if any line does; it decays exponentially (heavy
    /// traffic).
    #[inline]
    fn tail_probability(&self, utilization: f32, lines: f32) -> f32 {
        let exponent =
            2.0 * (1.0 - utilization) / (utilization.max(1e-3) * self.dispersion()) * lines;
        if exponent > 20.0 {
            0.0
        } else {
            libm::expf(-exponent)
        }
    }

    /// Returns the variance of the number of lines that arrive, relative to single random arrivals.
    #[inline]
    fn dispersion(&self) -> f32 {
        self.burst * self.busy_share
    }

    fn set_load(&mut self, utilization: f32) {
        self.load = utilization;
        self.current_waits = self.waits_at_load(utilization);
    }
}

/// Returns the mean of those values of an exponential distribution with mean `mean` that lie below `upper_limit`.
#[inline]
fn mean_below_limit(upper_limit: f32, mean: f32) -> f32 {
    // Far below its mean, the distribution is uniform.
    if upper_limit < 0.01 * mean {
        0.5 * upper_limit
    } else if upper_limit < 20.0 * mean {
        mean - upper_limit / libm::expm1f(upper_limit / mean)
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
    pub remote_extra_cycles: f32,
    /// Prefetch distance in lines, if the prefetcher adapts to the number of free entries.
    prefetch_distance_lines: Option<f32>,
    /// Maximum number of misses that a core overlaps.
    max_overlap: f32,
}

impl MemorySystem {
    /// Builds the memory system of a checked machine.
    pub fn new(spec: &MachineSpec, line_bytes: f64) -> Self {
        let (memory, scheduling_spec) = (&spec.memory, &spec.memory.scheduling);
        let server = |bytes_per_cycle: f64| QueueServer {
            are_reads_in_order: scheduling_spec.requests_in_flight.is_some(),
            max_prefetch_wait: memory.local_latency_cycles as f32,
            ..QueueServer::new(bytes_per_cycle, line_bytes, scheduling_spec.demand_priority)
        };
        let bus = memory.package_bus_bytes_per_cycle.map(server);
        let mut controller = server(memory.bytes_per_cycle);
        controller.write_turnaround_lines =
            scheduling_spec.turnaround_cycles as f32 / (WRITE_BATCH * controller.cycles_per_line);
        let latency_cycles = memory.local_latency_cycles as f32;
        let slot_server = scheduling_spec.requests_in_flight.map(|slots| QueueServer {
            slots: slots as f32,
            cycles_per_line: latency_cycles / slots as f32,
            burst: 1.0,
            busy_share: 1.0,
            ..QueueServer::default()
        });
        let slot_groups = if bus.is_some() {
            spec.packages
        } else {
            memory.nodes
        };
        let prefetch_distance_lines =
            spec.prefetchers
                .iter()
                .find_map(|prefetcher| match prefetcher {
                    PrefetcherSpec::Streamer { ahead_lines, .. } => Some(*ahead_lines as f32),
                    _ => None,
                });
        MemorySystem {
            controllers: vec![controller; memory.nodes as usize],
            buses: bus.map_or(Vec::new(), |bus| vec![bus; spec.packages as usize]),
            read_slots: slot_server.map_or(Vec::new(), |slot_server| {
                vec![slot_server; slot_groups as usize]
            }),
            packages_per_node: spec.packages / memory.nodes,
            latency_cycles,
            remote_extra_cycles: memory.remote_latency_cycles as f32 - latency_cycles,
            prefetch_distance_lines: prefetch_distance_lines
                .filter(|_| scheduling_spec.demand_priority),
            max_overlap: spec.pipeline.max_misses_in_flight() as f32,
        }
    }

    pub fn node_of(&self, package: u32) -> usize {
        (package / self.packages_per_node) as usize
    }

    /// Returns the share of its prefetches that a task loses because of its co-runners, beyond the loss when it runs
    /// alone. This is the larger of the share of prefetches that find no free slot, and the share of the speed that
    /// later prefetches cost.
    pub fn dropped_share(
        &self,
        node: usize,
        package: u32,
        demand: &MemoryDemand,
        prefetch: &Prefetch,
    ) -> f32 {
        let mut max_loss = 0.0f32;
        let mut record_loss = |current_loss: f32, solo_loss: f32| {
            max_loss = max_loss.max((current_loss - solo_loss) / (1.0 - solo_loss))
        };
        for server in self.servers_on_path(node, package) {
            let drop_probability = |utilization: f32| {
                utilization
                    * server
                        .tail_probability(utilization, self.latency_cycles / server.cycles_per_line)
            };
            record_loss(
                drop_probability(server.load.min(MAX_LOAD)),
                drop_probability(server.unqueued_load(demand)),
            );
        }
        if let Some(slot_server) = self.slot_server(node, package) {
            record_loss(
                slot_server.saturation_probability(slot_server.load),
                slot_server.saturation_probability(slot_server.unqueued_load(demand)),
            );
        }
        match self.prefetch_distance_lines {
            Some(lines) if prefetch.late_share > 0.0 => {
                max_loss.max(self.late_prefetch_loss(node, package, demand, prefetch, lines))
            }
            _ => max_loss,
        }
    }

    /// Returns the share of the benefit of prefetching that a task loses because its prefetches start late. A stream
    /// advances by its prefetch distance in each memory latency. That distance is proportional to the number of free
    /// entries, which is sampled now and a moment ago; the larger sample counts. Between the samples, the outstanding
    /// requests of others change (mean of the larger of two normal numbers). The loss is relative to the
    /// range from aided to unaided cycles, and weighted by the share of the stall that is due to late lines.
    fn late_prefetch_loss(
        &self,
        node: usize,
        package: u32,
        demand: &MemoryDemand,
        prefetch: &Prefetch,
        lines: f32,
    ) -> f32 {
        let slot_server = self.slot_server(node, package);
        let free_slot_share = |utilization_of: &dyn Fn(&QueueServer) -> f32| {
            let backlog_of = |server: &QueueServer| {
                server.waits_at_load(utilization_of(server)).other
                    * server.dispersion()
                    * utilization_of(server)
                    / self.latency_cycles
            };
            1.0 - self
                .servers_on_path(node, package)
                .map(backlog_of)
                .fold(slot_server.map_or(0.0, utilization_of), f32::max)
        };
        let sampling_gain = slot_server.map_or(0.0, |slot_server| {
            libm::sqrtf(
                slot_server.dispersion()
                    * (slot_server.load - slot_server.unqueued_load(demand)).max(0.0)
                    * slot_server.slots
                    / core::f32::consts::PI,
            ) / slot_server.slots
        });
        // Whole lines, rounded up on average.
        let lines_at_free_share = |free_share: f32| lines * free_share.clamp(0.0, 1.0) + 0.5;
        let (current_lines, solo_lines) = (
            lines_at_free_share(free_slot_share(&|server| server.load) + sampling_gain),
            lines_at_free_share(free_slot_share(&|server| server.unqueued_load(demand))),
        );
        let fills = (demand.lines - demand.written_lines) * self.latency_cycles;
        let excess = fills / current_lines - prefetch.aided_cycles.max(fills / solo_lines);
        let max_excess = prefetch.unaided_cycles - prefetch.aided_cycles;
        if excess > 0.0 && max_excess > 0.0 {
            prefetch.late_share * (excess / max_excess).min(1.0)
        } else {
            0.0
        }
    }

    /// Returns the number of lines that arrive at once if the task's misses overlap. Misses that are waited for as
    /// one stall arrive together, up to the number that a core overlaps; all other lines arrive one by one. If slots
    /// are limited, lines arrive as slots become free.
    pub fn burst_lines(&self, demand: &MemoryDemand) -> f32 {
        if !self.read_slots.is_empty() || demand.serial_misses <= 0.0 || demand.lines <= 0.0 {
            return 1.0;
        }
        1.0 + ((demand.demand_lines / demand.serial_misses).clamp(1.0, self.max_overlap) - 1.0)
            * (demand.demand_lines / demand.lines).min(1.0)
    }

    /// Returns whether a prefetcher runs less far ahead if fewer entries are free.
    pub fn can_throttle_prefetch(&self) -> bool {
        self.prefetch_distance_lines.is_some()
    }

    fn servers_on_path(&self, node: usize, package: u32) -> impl Iterator<Item = &QueueServer> {
        self.buses
            .get(package as usize)
            .into_iter()
            .chain(self.controllers.get(node))
    }

    fn slot_server(&self, node: usize, package: u32) -> Option<&QueueServer> {
        self.read_slots.get(if self.buses.is_empty() {
            node
        } else {
            package as usize
        })
    }

    /// Computes the load of a node's controller and of its packages' buses, and the waiting times there.
    /// `for_each_demand` must call the function that it receives once for every task, with the task's package and
    /// demand; `solve_node` invokes `for_each_demand` repeatedly.
    pub fn solve_node(
        &mut self,
        node: usize,
        for_each_demand: &mut dyn FnMut(&mut dyn FnMut(u32, &mut MemoryDemand)),
    ) {
        let packages = self.packages_per_node;
        let first_package = node as u32 * packages;
        // A bus and its controller see each other's delay; two sweeps suffice, because every time step solves again.
        let sweeps = if self.buses.is_empty() && self.read_slots.is_empty() {
            1
        } else {
            2
        };
        for _ in 0..sweeps {
            for package in first_package..first_package + packages {
                self.solve_server(node, Some(package), ServerKind::Bus, for_each_demand);
            }
            self.solve_server(node, None, ServerKind::Controller, for_each_demand);
            if self.read_slots.is_empty() {
                continue;
            }
            let slot_groups = if self.buses.is_empty() {
                first_package..first_package + 1
            } else {
                first_package..first_package + packages
            };
            for package in slot_groups {
                let queued_cycles = |server: &QueueServer| {
                    let (share, waits) = (server.demand_share, server.current_waits);
                    let wait_per_load = share * waits.demand + (1.0 - share) * waits.prefetched;
                    server.mean_wait(wait_per_load, server.burst * server.load)
                };
                let held_cycles = self.latency_cycles
                    + self
                        .servers_on_path(node, package)
                        .map(queued_cycles)
                        .sum::<f32>();
                let index = if self.buses.is_empty() {
                    node
                } else {
                    package as usize
                };
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
        for_each_demand(&mut |package, demand| {
            demand.queued_cycles = memory.queue_wait(node, package, demand)
        });
    }

    /// Solves for the load of one server while the other servers on its users' paths stay unchanged.
    fn solve_server(
        &mut self,
        node: usize,
        only_package: Option<u32>,
        server_kind: ServerKind,
        for_each_demand: &mut dyn FnMut(&mut dyn FnMut(u32, &mut MemoryDemand)),
    ) {
        let Some(server) = self.server_mut(node, only_package, server_kind).copied() else {
            return;
        };
        let (mut priority_lines, mut all_lines, mut weighted_bursts, mut weighted_shares) =
            (0.0, 0.0, 0.0, 0.0);
        for_each_demand(&mut |package, demand| {
            if only_package.is_none_or(|only_package| only_package == package)
                && demand.cycles > 0.0
            {
                let speed = demand.cpu_share * demand.speed();
                priority_lines += if server.are_reads_in_order {
                    demand.lines - demand.written_lines
                } else {
                    demand.demand_lines
                } * speed;
                all_lines += server.lines_per_instr(demand) * speed;
                weighted_bursts += server.lines_per_instr(demand) * speed * demand.burst_lines;
                weighted_shares += server.lines_per_instr(demand) * speed * demand.busy_share();
            }
        });
        let share_of_lines = |lines: f32| {
            if all_lines > 0.0 {
                lines / all_lines
            } else {
                1.0
            }
        };
        let mut server = QueueServer {
            demand_share: share_of_lines(priority_lines).min(1.0),
            burst: share_of_lines(weighted_bursts),
            busy_share: share_of_lines(weighted_shares),
            ..server
        };
        // The wait of a demand includes all servers on its path; the wait at this server is subtracted.
        let (memory, old_server) = (&*self, server);
        let is_only_server = self.buses.is_empty() && self.read_slots.is_empty();
        let wait_elsewhere = |package: u32, demand: &MemoryDemand| match is_only_server {
            true => 0.0,
            false => (memory.queue_wait(node, package, demand)
                - old_server.queue_wait(old_server.load, old_server.current_waits, demand))
            .max(0.0),
        };
        let utilization = solve_load(&server, &mut |visit| {
            for_each_demand(&mut |package, demand| {
                if only_package.is_none_or(|only_package| only_package == package) {
                    visit(wait_elsewhere(package, demand), demand);
                }
            });
        });
        server.set_load(utilization);
        if let Some(target) = self.server_mut(node, only_package, server_kind) {
            *target = server;
        }
    }

    fn server_mut(
        &mut self,
        node: usize,
        package: Option<u32>,
        server_kind: ServerKind,
    ) -> Option<&mut QueueServer> {
        let index = package.map_or(node, |package| package as usize);
        match server_kind {
            ServerKind::Bus => self.buses.get_mut(index),
            ServerKind::Controller => self.controllers.get_mut(node),
            ServerKind::ReadSlots => self.read_slots.get_mut(index),
        }
    }

    /// Computes how long one task waits at the servers' present load.
    pub fn update_queue_wait(&self, node: usize, package: u32, demand: &mut MemoryDemand) {
        demand.queued_cycles = self.queue_wait(node, package, demand);
    }

    #[inline]
    fn queue_wait(&self, node: usize, package: u32, demand: &MemoryDemand) -> f32 {
        let wait_at_server =
            |server: &QueueServer| server.queue_wait(server.load, server.current_waits, demand);
        self.servers_on_path(node, package)
            .chain(self.slot_server(node, package))
            .map(wait_at_server)
            .sum()
    }
}

/// Kinds of servers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ServerKind {
    Bus,
    Controller,
    ReadSlots,
}

/// Returns the tolerance of the solution, which is finer close to saturation, where waits depend on the rest of the load.
#[inline]
fn load_tolerance(load: f32) -> f32 {
    LOAD_TOLERANCE.min(0.05 * (1.0 - load)).max(f32::EPSILON)
}

/// Finds the load at which the tasks' traffic, slowed by this server and all others on their paths, causes exactly
/// that load.
fn solve_load(
    server: &QueueServer,
    for_each_demand: &mut dyn FnMut(&mut dyn FnMut(f32, &mut MemoryDemand)),
) -> f32 {
    let mut traffic_at_load = |utilization: f32| {
        let (mut sum, waits) = (0.0, server.waits_at_load(utilization));
        for_each_demand(&mut |wait_elsewhere, demand| {
            let queued_cycles = server.queue_wait(utilization, waits, demand) + wait_elsewhere;
            sum +=
                server.lines_per_instr(demand) * demand.cpu_share / (demand.cycles + queued_cycles);
        });
        sum * server.cycles_per_line
    };
    // Traffic falls as `utilization` rises, so the difference has one root. Regula falsi (Illinois), from the last
    // root.
    let (mut low, mut high) = (0.0f32, MAX_LOAD);
    let mut root = server.load.min(MAX_LOAD);
    let mut excess = traffic_at_load(root) - root;
    if excess.abs() <= load_tolerance(root) {
        return root;
    }
    let (mut low_excess, mut high_excess) = if excess > 0.0 {
        low = root;
        (excess, traffic_at_load(high) - high)
    } else {
        high = root;
        (traffic_at_load(low), excess)
    };
    if high_excess >= 0.0 {
        return MAX_LOAD;
    }
    let mut last_side = 0i8;
    for _ in 0..MAX_ITERATIONS {
        root = (low * high_excess - high * low_excess) / (high_excess - low_excess);
        excess = traffic_at_load(root) - root;
        if excess.abs() <= load_tolerance(root) || high - low <= load_tolerance(root) {
            break;
        }
        if excess > 0.0 {
            (low, low_excess) = (root, excess);
            if last_side == 1 {
                high_excess *= 0.5;
            }
            last_side = 1;
        } else {
            (high, high_excess) = (root, excess);
            if last_side == -1 {
                low_excess *= 0.5;
            }
            last_side = -1;
        }
    }
    root
}

#[cfg(test)]
mod tests;
