//! Scheduling domains, which are the resources that CPUs share, from near to far; placement and balancing go through
//! their levels.

use cachemate_core::Topology;

/// The scheduling domains of a machine: core, last-level cache, package, machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Domains {
    /// Group of each CPU at every level, from near to far; the last level has one group.
    levels: Vec<Vec<u32>>,
}

/// Index of the level of contexts of one core.
pub const CORE: usize = 0;
/// Index of the level of CPUs below one last-level cache.
pub const SHARED_CACHE: usize = 1;

impl Domains {
    pub fn new(topology: &Topology) -> Self {
        let cpus = topology.cpus.len();
        let cores = topology.cpus.iter().map(|cpu| cpu.core).collect();
        // A CPU that no last-level cache covers forms its own group.
        let mut cache_of: Vec<u32> = (0..cpus as u32).map(|cpu| cpu + topology.caches.len() as u32).collect();
        for cache in topology.last_level_caches() {
            cache.cpus.iter().for_each(|cpu| cache_of[cpu as usize] = cache.id.0);
        }
        let packages = topology.cpus.iter().map(|cpu| cpu.package).collect();
        Domains { levels: vec![cores, cache_of, packages, vec![0; cpus]] }
    }

    pub fn level_count(&self) -> usize {
        self.levels.len()
    }
    pub fn cpu_count(&self) -> u32 {
        self.levels[0].len() as u32
    }
    pub fn group_of(&self, level: usize, cpu: u32) -> u32 {
        self.levels[level][cpu as usize]
    }
    pub fn share_group(&self, level: usize, a: u32, b: u32) -> bool {
        self.group_of(level, a) == self.group_of(level, b)
    }
    /// Returns the CPUs of the group that contains `cpu`, in ascending order.
    pub fn group_members(&self, level: usize, cpu: u32) -> impl Iterator<Item = u32> + '_ {
        (0..self.cpu_count()).filter(move |&other| self.share_group(level, cpu, other))
    }
    /// Returns the nearest level at which the two CPUs are in one group; 0 means the same core.
    pub fn meeting_level(&self, a: u32, b: u32) -> usize {
        (0..self.levels.len()).find(|&level| self.share_group(level, a, b)).unwrap_or(self.levels.len())
    }
}
