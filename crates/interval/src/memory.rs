//! Memory's bandwidth: the time that fills wait for the fills of others at the buses and
//! controllers.
//!
//! A fill waits for those before it, and the wait slows the programs down, which shortens the
//! queue; a formula for an open queue, whose sources never slow down, predicts waits without end.
//! So programs, buses and controllers are the closed network of
//! [`cachemate_locality::memory_queue`], solved for one server after another. A program's solo
//! profile already contains the waits for its own lines, so only the wait beyond that is added,
//! once for every miss that the program actually waits for, which is its solo stall over the
//! latency. Its number of lines in flight is the number of reads for each of these waits, and at
//! most what a core and its prefetchers have on their way. Lines of overlapped misses are sent
//! together, unless the program always waits for memory and sends one as another returns.
//!
//! For example, eight programs each wait for one line at a time, at a server that takes 20 cycles
//! for one and a memory that takes 200. Alone, each would fetch a line in 220 cycles; together they
//! ask for eight in the time of eleven, so waits are short. With sixteen programs the server is
//! busy without a pause, and each waits until a line comes back in 320 cycles.
//!
//! With first come, first served, every line waits equally long. If demand goes first, a demand
//! read passes all other lines (Cobham 1954). A bus with at most `c` outstanding reads is a queue
//! with `c` servers, each busy for the latency and the waits behind it. If the queue is longer than
//! one access takes, prefetches are dropped. A streamer runs less far ahead the fewer entries are
//! free. The number of dropped prefetches interpolates the program's cost between those with and
//! without prefetchers. A prefetch that is not dropped has found a free slot, and a queue shorter
//! than one access. Its wait is the mean of exponential waits below that limit.
//!
//! Without co-runners, speeds are those of the profile; traffic never exceeds a server's bandwidth;
//! no wait exceeds the others' lines in flight times the time of a line.

use cachemate_core::{MachineSpec, PrefetcherSpec};
use cachemate_locality::memory_queue::{LineSource, QueueSolution, QueueStation};

/// Lines that a controller writes between two turnarounds of the bus.
const WRITE_BATCH: f32 = 16.0;
/// Sweeps over the servers of a machine whose bus has slots.
const SLOT_SWEEPS: u32 = 4;
/// Lines ahead below which a queue behind slots counts as empty.
const EMPTY_QUEUE_LINES: f64 = 0.05;
/// Minimum share of a task's time in which it does not wait for memory.
const MIN_BUSY_SHARE: f32 = 0.02;

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
    /// Cycles per instruction without queueing in which the task waits for memory.
    pub stall_cycles: f32,
    /// Share of elapsed time on a processor.
    pub cpu_share: f32,
    /// Cycles per instruction spent in queues: the result of [`MemorySystem::update_queue_wait`].
    pub queued_cycles: f32,
}

impl MemoryDemand {
    /// Instructions per cycle on a processor.
    #[inline]
    pub fn speed(&self) -> f32 {
        1.0 / (self.cycles + self.queued_cycles)
    }

    /// Share of its time on a processor in which the task does not wait for memory.
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

/// A bus, a controller, or the slots of a bus for outstanding reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueServer {
    station: QueueStation,
    /// Share of time in which the server transfers lines.
    pub load: f32,
    solution: QueueSolution,
    /// Whether demand reads have priority over other lines.
    has_demand_priority: bool,
    /// Whether only reads use this server, because they hold its slots.
    has_slots: bool,
    /// Cost of a written line beyond that of a read line, in lines.
    write_turnaround_lines: f32,
}

impl QueueServer {
    fn new(bytes_per_cycle: f64, line_bytes: f64, has_demand_priority: bool) -> Self {
        QueueServer {
            station: QueueStation {
                do_prefetches_pass: !has_demand_priority,
                ..QueueStation::in_order(line_bytes / bytes_per_cycle)
            },
            load: 0.0,
            solution: QueueSolution::default(),
            has_demand_priority,
            has_slots: false,
            write_turnaround_lines: 0.0,
        }
    }

    /// The slots of a bus, each busy for the latency. A prefetch finds a free slot or is dropped.
    fn of_slots(slots: f64, latency_cycles: f64) -> Self {
        let server = QueueServer::new(slots, latency_cycles, false);
        QueueServer {
            station: QueueStation {
                servers: slots,
                max_prefetch_wait_cycles: 0.0,
                ..server.station
            },
            has_slots: true,
            ..server
        }
    }

    /// Time in which the server transfers a line.
    #[inline]
    pub fn cycles_per_line(&self) -> f32 {
        self.station.cycles_per_line as f32
    }

    /// Lines per instruction with which a task uses this server.
    #[inline]
    pub fn lines_per_instr(&self, demand: &MemoryDemand) -> f32 {
        if self.has_slots {
            demand.lines - demand.written_lines
        } else {
            demand.lines + self.write_turnaround_lines * demand.written_lines
        }
    }

    /// Lines per instruction that pass all others at this server.
    fn priority_lines_per_instr(&self, demand: &MemoryDemand) -> f32 {
        if self.station.do_prefetches_pass {
            demand.lines - demand.written_lines
        } else {
            demand.demand_lines
        }
    }

    fn solved(self, solution: QueueSolution) -> Self {
        QueueServer {
            load: solution.load as f32,
            solution,
            ..self
        }
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
    /// Maximum number of lines that a core and its prefetchers have in flight.
    max_in_flight: f32,
    /// The programs at a server, kept so that a step allocates nothing.
    sources: Vec<LineSource>,
}

impl MemorySystem {
    /// The machine must have been checked.
    pub fn new(spec: &MachineSpec, line_bytes: f64) -> Self {
        let (memory, scheduling_spec) = (&spec.memory, &spec.memory.scheduling);
        let latency_cycles = memory.local_latency_cycles as f32;
        let server = |bytes_per_cycle: f64| {
            let mut server =
                QueueServer::new(bytes_per_cycle, line_bytes, scheduling_spec.demand_priority);
            server.station.max_prefetch_wait_cycles = f64::from(latency_cycles);
            server.station.do_prefetches_pass |= scheduling_spec.requests_in_flight.is_some();
            server
        };
        let bus = memory.package_bus_bytes_per_cycle.map(server);
        let mut controller = server(memory.bytes_per_cycle);
        controller.write_turnaround_lines =
            scheduling_spec.turnaround_cycles as f32 / (WRITE_BATCH * controller.cycles_per_line());
        let slot_server = scheduling_spec
            .requests_in_flight
            .map(|slots| QueueServer::of_slots(f64::from(slots), f64::from(latency_cycles)));

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

        let max_overlap = spec.pipeline.max_misses_in_flight() as f32;
        let max_in_flight = match scheduling_spec.core_requests_in_flight {
            Some(count) => count as f32,
            None if spec.prefetchers.is_empty() => max_overlap,
            // A cache's prefetchers have about as many places of their own.
            None => 2.0 * max_overlap,
        };

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
            max_overlap,
            max_in_flight,
            sources: Vec::new(),
        }
    }

    /// Lines per cycle that a core and its prefetchers can request at most.
    pub fn max_lines_per_cycle(&self) -> f32 {
        self.max_in_flight / self.latency_cycles
    }

    pub fn node_of(&self, package: u32) -> usize {
        (package / self.packages_per_node) as usize
    }

    /// What a task asks of a server while its waits elsewhere add these cycles per instruction.
    fn source_at(
        &self,
        server: &QueueServer,
        demand: &MemoryDemand,
        added_elsewhere_cycles: f32,
    ) -> LineSource {
        let together_lines = if server.has_slots {
            1.0
        } else {
            1.0 + (self.burst_lines(demand) - 1.0) * demand.busy_share()
        };

        LineSource {
            cycles: f64::from(demand.cycles),
            has_own_waits: true,
            added_elsewhere_cycles: f64::from(added_elsewhere_cycles),
            lines: f64::from(server.lines_per_instr(demand)),
            reads: f64::from(demand.lines - demand.written_lines),
            demand_reads: f64::from(demand.demand_lines),
            demand_waits: f64::from(demand.serial_misses),
            late_waits: f64::from(demand.serial_late_lines),
            max_in_flight: f64::from(self.max_in_flight),
            round_trip_cycles: f64::from(self.latency_cycles),
            together_lines: f64::from(together_lines),
            random_share: f64::from(demand.busy_share()),
            time_share: f64::from(demand.cpu_share),
        }
    }

    /// Share of its prefetches that a task loses because of its co-runners, beyond the loss when it
    /// runs alone. This is the larger of the share of prefetches that find no free slot, and the
    /// share of the speed that later prefetches cost.
    pub fn dropped_share(
        &self,
        node: usize,
        package: u32,
        demand: &MemoryDemand,
        prefetch: &Prefetch,
    ) -> f32 {
        let mut max_loss = 0.0f32;
        let mut record_loss = |current_loss: f64, solo_loss: f64| {
            max_loss = max_loss.max(((current_loss - solo_loss) / (1.0 - solo_loss)) as f32)
        };

        for server in self.servers_on_path(node, package) {
            let (station, source) = (&server.station, self.source_at(server, demand, 0.0));
            let latency_lines = f64::from(self.latency_cycles) / station.cycles_per_line;
            let drop_probability = |lines_ahead: f64, load: f64| {
                station.tail_probability(lines_ahead, load, latency_lines)
            };
            record_loss(
                drop_probability(server.solution.lines_ahead, f64::from(server.load)),
                drop_probability(station.solo_lines_ahead(&source), station.own_load(&source)),
            );
        }
        if let Some(slot_server) = self.slot_server(node, package) {
            let (station, source) = (
                &slot_server.station,
                self.source_at(slot_server, demand, 0.0),
            );
            record_loss(
                station.busy_probability(f64::from(slot_server.load)),
                station.busy_probability(station.own_load(&source)),
            );
        }
        match self.prefetch_distance_lines {
            Some(lines) if prefetch.late_share > 0.0 => {
                max_loss.max(self.late_prefetch_loss(node, package, demand, prefetch, lines))
            }
            _ => max_loss,
        }
    }

    /// The share of the benefit of prefetching that a task loses because its prefetches start late.
    /// A stream advances by its prefetch distance in each memory latency. That distance is
    /// proportional to the number of free entries, which is sampled now and a moment ago; the
    /// larger sample counts. Between the samples, the outstanding requests of others change (mean
    /// of the larger of two normal numbers). The loss is relative to the range from aided to
    /// unaided cycles, and weighted by the share of the stall that is due to late lines.
    fn late_prefetch_loss(
        &self,
        node: usize,
        package: u32,
        demand: &MemoryDemand,
        prefetch: &Prefetch,
        lines: f32,
    ) -> f32 {
        let slot_server = self.slot_server(node, package);
        let own_slot_load = |server: &QueueServer| {
            server
                .station
                .own_load(&self.source_at(server, demand, 0.0)) as f32
        };
        let mut taken_shares = (
            slot_server.map_or(0.0, |server| server.load),
            slot_server.map_or(0.0, own_slot_load),
        );
        for server in self.servers_on_path(node, package) {
            let source = self.source_at(server, demand, 0.0);
            let backlog_share = |lines_ahead: f64| {
                lines_ahead as f32 * server.cycles_per_line() / self.latency_cycles
            };
            taken_shares.0 = taken_shares
                .0
                .max(backlog_share(server.solution.lines_ahead));
            taken_shares.1 = taken_shares
                .1
                .max(backlog_share(server.station.solo_lines_ahead(&source)));
        }
        let sampling_gain = slot_server.map_or(0.0, |slot_server| {
            let slots = slot_server.station.servers as f32;
            let others_load = (slot_server.load - own_slot_load(slot_server)).max(0.0);
            libm::sqrtf(others_load * slots / core::f32::consts::PI) / slots
        });
        // Whole lines, rounded up on average.
        let lines_at_free_share = |free_share: f32| lines * free_share.clamp(0.0, 1.0) + 0.5;
        let (current_lines, solo_lines) = (
            lines_at_free_share(1.0 - taken_shares.0 + sampling_gain),
            lines_at_free_share(1.0 - taken_shares.1),
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

    /// The number of lines that arrive at once if the task's misses overlap. Misses that are waited
    /// for as one stall arrive together, up to the number that a core overlaps; all other lines
    /// arrive one by one. If slots are limited, lines arrive as slots become free.
    fn burst_lines(&self, demand: &MemoryDemand) -> f32 {
        if !self.read_slots.is_empty() || demand.serial_misses <= 0.0 || demand.lines <= 0.0 {
            return 1.0;
        }
        1.0 + ((demand.demand_lines / demand.serial_misses).clamp(1.0, self.max_overlap) - 1.0)
            * (demand.demand_lines / demand.lines).min(1.0)
    }

    /// Whether a prefetcher runs less far ahead if fewer entries are free.
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
        // Servers see each other's delay; few sweeps suffice, because every time step solves again.
        let sweeps = match (self.buses.is_empty(), self.read_slots.is_empty()) {
            (true, true) => 1,
            (false, true) => 2,
            _ => SLOT_SWEEPS,
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
                let queue_cycles = |server: &QueueServer| {
                    let station = &server.station;
                    station.cycles_per_line * server.solution.lines_ahead
                };
                let held_cycles = f64::from(self.latency_cycles)
                    + self
                        .servers_on_path(node, package)
                        .map(queue_cycles)
                        .sum::<f64>();
                let index = if self.buses.is_empty() {
                    node
                } else {
                    package as usize
                };
                let station = &mut self.read_slots[index].station;
                station.cycles_per_line = held_cycles / station.servers;
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

    /// Solves one server while the other servers on its users' paths stay unchanged.
    fn solve_server(
        &mut self,
        node: usize,
        only_package: Option<u32>,
        server_kind: ServerKind,
        for_each_demand: &mut dyn FnMut(&mut dyn FnMut(u32, &mut MemoryDemand)),
    ) {
        let Some(mut server) = self.server_mut(node, only_package, server_kind).copied() else {
            return;
        };

        let mut sources = std::mem::take(&mut self.sources);
        sources.clear();
        let (mut priority_lines, mut all_lines) = (0.0, 0.0);
        let memory = &*self;
        let is_only_server = self.buses.is_empty() && self.read_slots.is_empty();
        for_each_demand(&mut |package, demand| {
            let is_here = only_package.is_none_or(|only_package| only_package == package);
            if !is_here || demand.cycles <= 0.0 || demand.lines <= 0.0 {
                return;
            }
            let speed = demand.cpu_share * demand.speed();
            priority_lines += server.priority_lines_per_instr(demand) * speed;
            all_lines += server.lines_per_instr(demand) * speed;

            // The wait of a demand includes all servers on its path; the wait at this server is subtracted.
            let added_elsewhere_cycles = if is_only_server {
                0.0
            } else {
                let here = memory.wait_at_server(&server, demand);
                (memory.queue_wait(node, package, demand) - here).max(0.0)
            };
            sources.push(memory.source_at(&server, demand, added_elsewhere_cycles));
        });

        if server.has_demand_priority && all_lines > 0.0 {
            server.station.priority_share = f64::from((priority_lines / all_lines).min(1.0));
        }
        let solution = server.station.solve(&sources, server.solution.lines_ahead);
        let solution = match self.slots_before(node, only_package) {
            Some(slots) if server_kind != ServerKind::ReadSlots => {
                behind_slots(slots, solution, server.solution)
            }
            _ => solution,
        };
        self.sources = sources;
        if let Some(target) = self.server_mut(node, only_package, server_kind) {
            *target = server.solved(solution);
        }
    }

    /// Slots that the reads at a package's bus or, without a package, at the node's controller hold; `None` if there is
    /// no limit.
    fn slots_before(&self, node: usize, package: Option<u32>) -> Option<f64> {
        let groups = match package {
            Some(package) => package as usize..package as usize + 1,
            None if self.buses.is_empty() => node..node + 1,
            None => {
                let packages = self.packages_per_node as usize;
                node * packages..(node + 1) * packages
            }
        };
        let slot_servers = self.read_slots.get(groups)?;
        Some(
            slot_servers
                .iter()
                .map(|server| server.station.servers)
                .sum(),
        )
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

    fn wait_at_server(&self, server: &QueueServer, demand: &MemoryDemand) -> f32 {
        let source = self.source_at(server, demand, 0.0);
        server.station.added_cycles(&source, &server.solution) as f32
    }

    fn queue_wait(&self, node: usize, package: u32, demand: &MemoryDemand) -> f32 {
        self.servers_on_path(node, package)
            .chain(self.slot_server(node, package))
            .map(|server| self.wait_at_server(server, demand))
            .sum()
    }
}

/// A queue in which no more reads wait than there are slots: the others wait for a slot, and not here as well. The
/// longer lines wait here, the longer they hold their slots, and the fewer arrive; so half of the way to the new
/// solution, in orders of magnitude, is taken at once, because the whole way leads from an empty queue to a full one
/// and back.
fn behind_slots(slots: f64, solution: QueueSolution, before: QueueSolution) -> QueueSolution {
    let lines_ahead = solution.lines_ahead.min(slots).max(EMPTY_QUEUE_LINES);
    QueueSolution {
        lines_ahead: libm::sqrt(lines_ahead * before.lines_ahead.max(EMPTY_QUEUE_LINES)),
        load: 0.5 * (solution.load + before.load),
        in_flight: solution.in_flight.min(slots),
    }
}

/// Kinds of servers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ServerKind {
    Bus,
    Controller,
    ReadSlots,
}

#[cfg(test)]
mod tests;
