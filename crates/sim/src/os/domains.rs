//! Scheduling domains, which are the resources that CPUs share, from near to far; placement and balancing go through
//! their levels.

use cachemate_core::Topology;

/// The scheduling domains of a machine: core, last-level cache, package, machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Domains {
    /// Group of each CPU at every level, from near to far; the last level has one group.
    groups_by_level: Vec<Vec<u32>>,
}

/// Index of the level of contexts of one core.
pub const CORE: usize = 0;
/// Index of the level of CPUs below one last-level cache.
pub const SHARED_CACHE: usize = 1;

impl Domains {
    pub fn new(topology: &Topology) -> Self {
        let cpus = topology.cpus.len();
        let core_by_cpu = topology.cpus.iter().map(|cpu| cpu.core).collect();
        // A CPU that no last-level cache covers forms its own group.
        let mut cache_by_cpu: Vec<u32> = (0..cpus as u32)
            .map(|cpu| cpu + topology.caches.len() as u32)
            .collect();
        for cache in topology.last_level_caches() {
            cache
                .cpus
                .iter()
                .for_each(|cpu| cache_by_cpu[cpu as usize] = cache.id.0);
        }
        let package_by_cpu = topology.cpus.iter().map(|cpu| cpu.package).collect();
        Domains {
            groups_by_level: vec![core_by_cpu, cache_by_cpu, package_by_cpu, vec![0; cpus]],
        }
    }

    pub fn level_count(&self) -> usize {
        self.groups_by_level.len()
    }
    pub fn cpu_count(&self) -> u32 {
        self.groups_by_level[0].len() as u32
    }
    pub fn group_of(&self, level: usize, cpu: u32) -> u32 {
        self.groups_by_level[level][cpu as usize]
    }
    pub fn are_in_one_group(&self, level: usize, a: u32, b: u32) -> bool {
        self.group_of(level, a) == self.group_of(level, b)
    }
    /// CPUs in ascending order, `cpu` included.
    pub fn group_members(&self, level: usize, cpu: u32) -> impl Iterator<Item = u32> + '_ {
        (0..self.cpu_count()).filter(move |&other| self.are_in_one_group(level, cpu, other))
    }
    /// The nearest level at which the two CPUs are in one group; 0 means the same core.
    pub fn nearest_common_level(&self, a: u32, b: u32) -> usize {
        (0..self.groups_by_level.len())
            .find(|&level| self.are_in_one_group(level, a, b))
            .unwrap_or(self.groups_by_level.len())
    }
}
