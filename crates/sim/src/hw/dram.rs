//! Memory controllers and package buses: local and remote latency, bandwidth, queueing.

use cachemate_core::MachineSpec;

use super::counters::{BusCounters, MemoryCounters};
use super::page_index::PageIndex;
use super::server::Server;
use super::unit::Served;

pub(crate) struct Dram {
    local: u64,
    remote: u64,
    /// Frames of a node are consecutive: addresses of one node.
    node_bytes: u64,
    /// Bits of an address that are the memory's.
    physical: u64,
    packages_per_node: u32,
    controllers: Vec<(Server, MemoryCounters)>,
    /// Per package, where packages have a bus.
    buses: Vec<(Server, BusCounters)>,
}

impl Dram {
    pub fn new(spec: &MachineSpec, ticks_per_cycle: u64) -> Self {
        let memory = &spec.memory;
        let controller = Server::new(memory.bytes_per_cycle, ticks_per_cycle);
        let bus = memory.package_bus_bytes_per_cycle.map(|bytes| Server::new(bytes, ticks_per_cycle));
        let buses = bus.map_or(Vec::new(), |bus| vec![(bus, BusCounters::default()); spec.packages as usize]);
        Dram {
            local: u64::from(memory.local_latency_cycles) * ticks_per_cycle,
            remote: u64::from(memory.remote_latency_cycles) * ticks_per_cycle,
            node_bytes: memory.size_bytes.div_ceil(u64::from(memory.nodes)),
            physical: match PageIndex::page_bits(spec) {
                0 => u64::MAX,
                _ => memory.size_bytes.next_power_of_two() - 1,
            },
            packages_per_node: spec.packages / memory.nodes,
            controllers: vec![(controller, MemoryCounters::default()); memory.nodes as usize],
            buses,
        }
    }

    /// The address without what `PageIndex` put above it.
    pub fn physical(&self, address: u64) -> u64 {
        address & self.physical
    }

    pub fn node_of(&self, address: u64) -> usize {
        ((self.physical(address) / self.node_bytes) as usize).min(self.controllers.len() - 1)
    }

    /// Passes `bytes` between a package and the address' node; ticks queued at the bus and at the controller.
    fn pass(&mut self, address: u64, package: u32, bytes: u64, at: u64, write: bool) -> u64 {
        let mut queued = 0;
        if let Some((bus, counters)) = self.buses.get_mut(package as usize) {
            queued = bus.pass(at, bytes);
            counters.bytes += bytes;
            counters.busy_ticks += bus.busy_ticks(bytes);
            counters.queue_ticks += queued;
        }
        let node = self.node_of(address);
        let (controller, counters) = &mut self.controllers[node];
        let waited = controller.pass(at + queued, bytes);
        counters.busy_ticks += controller.busy_ticks(bytes);
        counters.queue_ticks += waited;
        *(if write { &mut counters.write_bytes } else { &mut counters.read_bytes }) += bytes;
        queued + waited
    }

    /// Latency without and with queueing apart, and whether it was local.
    pub fn read(&mut self, address: u64, package: u32, bytes: u64, at: u64) -> (u64, u64, Served) {
        let queued = self.pass(address, package, bytes, at, false);
        match self.is_local(address, package) {
            true => (self.local, queued, Served::LocalMemory),
            false => (self.remote, queued, Served::RemoteMemory),
        }
    }

    pub fn write(&mut self, address: u64, package: u32, bytes: u64, at: u64) {
        self.pass(address, package, bytes, at, true);
    }

    pub fn is_local(&self, address: u64, package: u32) -> bool {
        self.node_of(address) == (package / self.packages_per_node) as usize
    }

    pub fn latency(&self, address: u64, package: u32) -> u64 {
        if self.is_local(address, package) { self.local } else { self.remote }
    }

    /// More work waits than one access takes: prefetchers hold back.
    pub fn is_crowded(&self, address: u64, package: u32, at: u64) -> bool {
        let (controller, _) = &self.controllers[self.node_of(address)];
        let bus = self.buses.get(package as usize).map_or(0, |(bus, _)| bus.backlog(at));
        controller.backlog(at).max(bus) > self.local
    }

    pub fn memory_counters(&self, node: u32) -> Option<MemoryCounters> {
        self.controllers.get(node as usize).map(|(_, counters)| *counters)
    }
    pub fn bus_counters(&self, package: u32) -> Option<BusCounters> {
        self.buses.get(package as usize).map(|(_, counters)| *counters)
    }
}
