//! Memory controllers and package buses: local and remote latency, bandwidth, queueing.

use cachemate_core::{MachineSpec, MemorySchedulingSpec};

use super::cache_unit::DataOrigin;
use super::counters::{BusCounters, MemoryCounters};
use super::page_index::PageIndex;
use super::server::BandwidthServer;

/// Number of lines that a controller writes in a row before it returns to reads.
const WRITE_BATCH: u64 = 16;

/// The purpose of a transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransferPurpose {
    Demand,
    Prefetch,
    Write,
}

/// Slots for requests in flight, each with the tick at which its request returns. A new request takes the slot that
/// becomes free first.
#[derive(Clone)]
struct RequestSlots {
    return_ticks: Vec<u64>,
}

impl RequestSlots {
    /// The slot's number, and the ticks until it is free, 0 if it is.
    fn first_free_slot(&self, tick: u64) -> (usize, u64) {
        let first_return = self
            .return_ticks
            .iter()
            .enumerate()
            .min_by_key(|&(_, &free_tick)| free_tick);
        first_return.map_or((0, 0), |(slot, &free_tick)| {
            (slot, free_tick.saturating_sub(tick))
        })
    }

    fn taken_slots_permille(&self, tick: u64) -> u64 {
        let used_slots = self
            .return_ticks
            .iter()
            .filter(|&&free_tick| free_tick > tick)
            .count() as u64;
        used_slots * 1000 / self.return_ticks.len().max(1) as u64
    }
}

/// Who reads from memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryReader {
    pub package: u32,
    pub core: u32,
}

pub(crate) struct Dram {
    local_latency_ticks: u64,
    remote_latency_ticks: u64,
    /// Number of addresses of one node; the frames of a node are consecutive.
    node_bytes: u64,
    /// Mask of the physical address bits.
    physical_mask: u64,
    packages_per_node: u32,
    controllers: Vec<(BandwidthServer, MemoryCounters)>,
    /// Bus of each package; empty if packages have no bus.
    buses: Vec<(BandwidthServer, BusCounters)>,
    scheduling_spec: MemorySchedulingSpec,
    /// Ticks for turning from reads to writes or back.
    turnaround_ticks: u64,
    /// Request slots by package, or by node if packages have no bus; empty if requests in flight are not limited.
    request_slots: Vec<RequestSlots>,
    /// Request slots by core; empty if a core's requests in flight are not limited.
    core_slots: Vec<RequestSlots>,
    /// Number of lines of each node that were written since the start.
    written_lines: Vec<u64>,
}

impl Dram {
    pub fn new(spec: &MachineSpec, ticks_per_cycle: u64) -> Self {
        let memory = &spec.memory;
        let controller = BandwidthServer::new(memory.bytes_per_cycle, ticks_per_cycle);
        let bus = memory
            .package_bus_bytes_per_cycle
            .map(|bytes| BandwidthServer::new(bytes, ticks_per_cycle));
        let buses = bus.map_or(Vec::new(), |bus| {
            vec![(bus, BusCounters::default()); spec.packages as usize]
        });

        let slots_of_groups = |depth: Option<u32>, group_count: u32| {
            let empty_slots = depth.map(|depth| RequestSlots {
                return_ticks: vec![0; depth as usize],
            });
            empty_slots.map_or(Vec::new(), |slots| vec![slots; group_count as usize])
        };
        let group_count = if buses.is_empty() {
            memory.nodes
        } else {
            spec.packages
        };

        Dram {
            request_slots: slots_of_groups(memory.scheduling.requests_in_flight, group_count),
            core_slots: slots_of_groups(
                memory.scheduling.core_requests_in_flight,
                spec.packages * spec.cores_per_package,
            ),
            scheduling_spec: memory.scheduling,
            turnaround_ticks: u64::from(memory.scheduling.turnaround_cycles) * ticks_per_cycle,
            written_lines: vec![0; memory.nodes as usize],
            local_latency_ticks: u64::from(memory.local_latency_cycles) * ticks_per_cycle,
            remote_latency_ticks: u64::from(memory.remote_latency_cycles) * ticks_per_cycle,
            node_bytes: memory.size_bytes.div_ceil(u64::from(memory.nodes)),
            physical_mask: match PageIndex::page_bits(spec) {
                0 => u64::MAX,
                _ => memory.size_bytes.next_power_of_two() - 1,
            },
            packages_per_node: spec.packages / memory.nodes,
            controllers: vec![(controller, MemoryCounters::default()); memory.nodes as usize],
            buses,
        }
    }

    /// The address without the bits that `PageIndex` added above it.
    pub fn physical_address(&self, address: u64) -> u64 {
        address & self.physical_mask
    }

    pub fn node_of(&self, address: u64) -> usize {
        // A division would take the host as long as the rest of the request.
        if self.controllers.len() == 1 {
            return 0;
        }
        ((self.physical_address(address) / self.node_bytes) as usize)
            .min(self.controllers.len() - 1)
    }

    /// Passes `bytes` between a package and the address's node. Returns the ticks queued at the bus and at the
    /// controller.
    fn transfer_to_node(
        &mut self,
        address: u64,
        package: u32,
        bytes: u64,
        tick: u64,
        purpose: TransferPurpose,
    ) -> u64 {
        let is_first_come = !self.scheduling_spec.demand_priority;
        // Reads that occupy a slot are in order. Demand requests already have priority, because prefetches do not start
        // if no slot is free.
        let is_in_order = !self.request_slots.is_empty();
        let queue = |server: &mut BandwidthServer, at| match purpose {
            _ if is_first_come => server.transfer(at, bytes),
            TransferPurpose::Prefetch if is_in_order => server.transfer_priority(at, bytes),
            TransferPurpose::Demand => server.transfer_priority(at, bytes),
            TransferPurpose::Prefetch | TransferPurpose::Write => {
                server.transfer_background(at, bytes)
            }
        };

        let mut bus_queue_ticks = 0;
        if let Some((bus, counters)) = self.buses.get_mut(package as usize) {
            bus_queue_ticks = queue(bus, tick);
            counters.bytes += bytes;
            counters.busy_ticks += bus.busy_ticks(bytes);
            counters.queue_ticks += bus_queue_ticks;
        }

        let node = self.node_of(address);
        let (controller, counters) = &mut self.controllers[node];
        let controller_queue_ticks = queue(controller, tick + bus_queue_ticks);
        counters.busy_ticks += controller.busy_ticks(bytes);
        counters.queue_ticks += controller_queue_ticks;
        if purpose == TransferPurpose::Write {
            counters.write_bytes += bytes;
            self.written_lines[node] += 1;
            if self.turnaround_ticks > 0 && self.written_lines[node].is_multiple_of(WRITE_BATCH) {
                controller.pause(self.turnaround_ticks, !is_first_come);
                counters.busy_ticks += self.turnaround_ticks;
            }
        } else {
            counters.read_bytes += bytes;
        }

        bus_queue_ticks + controller_queue_ticks
    }

    fn slots_index(&self, address: u64, package: u32) -> usize {
        if self.buses.is_empty() {
            self.node_of(address)
        } else {
            package as usize
        }
    }

    /// Latency without queueing, the queueing time, and whether the read was local.
    pub fn read(
        &mut self,
        address: u64,
        reader: MemoryReader,
        bytes: u64,
        tick: u64,
        is_prefetch: bool,
    ) -> (u64, u64, DataOrigin) {
        let MemoryReader { package, core } = reader;
        let slots_index = self.slots_index(address, package);
        let free_slot_of = |slots: Option<&RequestSlots>, tick: u64| {
            slots.map_or((0, 0), |slots| slots.first_free_slot(tick))
        };
        let (core_slot, core_wait) = free_slot_of(self.core_slots.get(core as usize), tick);
        let (slot, bus_wait) = free_slot_of(self.request_slots.get(slots_index), tick + core_wait);
        let slot_wait = core_wait + bus_wait;
        let purpose = if is_prefetch {
            TransferPurpose::Prefetch
        } else {
            TransferPurpose::Demand
        };
        let queued_ticks =
            slot_wait + self.transfer_to_node(address, package, bytes, tick + slot_wait, purpose);
        let (latency, origin) = match self.is_local(address, package) {
            true => (self.local_latency_ticks, DataOrigin::LocalMemory),
            false => (self.remote_latency_ticks, DataOrigin::RemoteMemory),
        };
        let return_tick = tick + queued_ticks + latency;
        if let Some(slots) = self.core_slots.get_mut(core as usize) {
            slots.return_ticks[core_slot] = return_tick;
        }
        if let Some(slots) = self.request_slots.get_mut(slots_index) {
            slots.return_ticks[slot] = return_tick;
        }

        if bus_wait > 0
            && let Some((_, counters)) = self.buses.get_mut(package as usize)
        {
            counters.queue_ticks += bus_wait;
        }
        (latency, queued_ticks, origin)
    }

    pub fn write(&mut self, address: u64, package: u32, bytes: u64, tick: u64) {
        self.transfer_to_node(address, package, bytes, tick, TransferPurpose::Write);
    }

    pub fn is_local(&self, address: u64, package: u32) -> bool {
        self.node_of(address) == (package / self.packages_per_node) as usize
    }

    pub fn latency_ticks(&self, address: u64, package: u32) -> u64 {
        if self.is_local(address, package) {
            self.local_latency_ticks
        } else {
            self.remote_latency_ticks
        }
    }

    /// Share of the path that is free for prefetches, in thousandths: 1000 if no request is waiting
    /// or in flight, 0 if more is waiting than one access takes, or all requests are in flight.
    /// With first come, first served, it is either 0 or 1000.
    pub fn free_room_permille(&self, address: u64, reader: MemoryReader, tick: u64) -> u64 {
        let backlog = self.backlog_ticks(address, reader.package, tick);
        if !self.scheduling_spec.demand_priority {
            return if backlog > self.local_latency_ticks {
                0
            } else {
                1000
            };
        }
        let waiting_permille = (backlog * 1000 / self.local_latency_ticks.max(1)).min(1000);
        let taken_permille = self
            .slots_on_path(address, reader)
            .map(|slots| slots.taken_slots_permille(tick))
            .max()
            .unwrap_or(0);
        1000 - waiting_permille.max(taken_permille)
    }

    /// Whether [`Dram::free_room_permille`] is above 0.
    pub fn has_free_room(&self, address: u64, reader: MemoryReader, tick: u64) -> bool {
        let backlog = self.backlog_ticks(address, reader.package, tick);
        if !self.scheduling_spec.demand_priority {
            return backlog <= self.local_latency_ticks;
        }
        backlog < self.local_latency_ticks.max(1)
            && self.slots_on_path(address, reader).all(|slots| {
                slots
                    .return_ticks
                    .iter()
                    .any(|&free_tick| free_tick <= tick)
            })
    }

    fn slots_on_path(
        &self,
        address: u64,
        reader: MemoryReader,
    ) -> impl Iterator<Item = &RequestSlots> {
        let shared_slots = self
            .request_slots
            .get(self.slots_index(address, reader.package));
        shared_slots
            .into_iter()
            .chain(self.core_slots.get(reader.core as usize))
    }

    /// Ticks that a request would wait after all others, at the bus or the controller.
    fn backlog_ticks(&self, address: u64, package: u32, tick: u64) -> u64 {
        let (controller, _) = &self.controllers[self.node_of(address)];
        let bus = self
            .buses
            .get(package as usize)
            .map_or(0, |(bus, _)| bus.backlog_ticks(tick));
        controller.backlog_ticks(tick).max(bus)
    }

    pub fn memory_counters(&self, node: u32) -> Option<MemoryCounters> {
        self.controllers
            .get(node as usize)
            .map(|(_, counters)| *counters)
    }
    pub fn bus_counters(&self, package: u32) -> Option<BusCounters> {
        self.buses
            .get(package as usize)
            .map(|(_, counters)| *counters)
    }
}
