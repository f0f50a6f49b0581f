//! Which CPUs share what, from near to far: the ladder that placement and balancing climb.

use cachemate_core::Topology;

/// Scheduling domains: core, last-level cache, package, machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Domains {
    /// Near to far; per level the group of each CPU. The last level is one group.
    levels: Vec<Vec<u32>>,
}

/// Index into the levels: contexts of one core.
pub const CORE: usize = 0;
/// Index into the levels: CPUs below one last-level cache.
pub const SHARED_CACHE: usize = 1;

impl Domains {
    pub fn new(topology: &Topology) -> Self {
        let cpus = topology.cpus.len();
        let cores = topology.cpus.iter().map(|cpu| cpu.core).collect();
        // Where caches of the last level do not cover a CPU it stands for itself.
        let mut cache_of: Vec<u32> = (0..cpus as u32).map(|cpu| cpu + topology.caches.len() as u32).collect();
        for cache in topology.last_level_caches() {
            cache.cpus.iter().for_each(|cpu| cache_of[cpu as usize] = cache.id.0);
        }
        let packages = topology.cpus.iter().map(|cpu| cpu.package).collect();
        Domains { levels: vec![cores, cache_of, packages, vec![0; cpus]] }
    }

    pub fn levels(&self) -> usize {
        self.levels.len()
    }
    pub fn cpus(&self) -> u32 {
        self.levels[0].len() as u32
    }
    pub fn group(&self, level: usize, cpu: u32) -> u32 {
        self.levels[level][cpu as usize]
    }
    pub fn share_group(&self, level: usize, a: u32, b: u32) -> bool {
        self.group(level, a) == self.group(level, b)
    }
    /// CPUs of the group that `cpu` is in, ascending.
    pub fn members(&self, level: usize, cpu: u32) -> impl Iterator<Item = u32> + '_ {
        (0..self.cpus()).filter(move |&other| self.share_group(level, cpu, other))
    }
    /// Nearest level at which the two meet: 0 = same core.
    pub fn distance(&self, a: u32, b: u32) -> usize {
        (0..self.levels.len()).find(|&level| self.share_group(level, a, b)).unwrap_or(self.levels.len())
    }
}
