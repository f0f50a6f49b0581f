//! The caches of a machine, as the places between which tasks move.

use std::cmp::Reverse;

use cachemate_core::{CacheId, CpuSet, PartitionSupport, TaskSample, View};

/// A last-level cache with its online CPUs.
#[derive(Clone, PartialEq, Debug)]
pub struct CacheSite {
    pub cache: CacheId,
    pub cpus: CpuSet,
    /// Number of tasks that fit on the site without sharing a core.
    pub cores: usize,
    /// The site's package; sites of one package share a path to memory.
    pub package: u32,
    /// The memory node nearest to the site.
    pub memory_node: u32,
    pub bytes: f64,
    pub partition_units: Option<PartitionSupport>,
}

/// The sites of a machine; none if cache sizes are unknown.
pub fn cache_sites(view: &View<'_>) -> Vec<CacheSite> {
    let online = view.online();
    let caches = view
        .topology
        .last_level_caches()
        .filter(|cache| cache.cpus.intersects(&online));
    let topology_cpus = &view.topology.cpus;
    let find_cpu = |id: u32| {
        topology_cpus
            .binary_search_by_key(&id, |cpu| cpu.id.0)
            .ok()
            .map(|index| &topology_cpus[index])
    };

    let build_site = |cache: &cachemate_core::Cache| {
        let cpus = cache.cpus.intersection(&online);
        let mut cores: Vec<u32> = cpus
            .iter()
            .filter_map(find_cpu)
            .map(|cpu| cpu.core)
            .collect();
        cores.sort_unstable();
        cores.dedup();

        Some(CacheSite {
            cache: cache.id,
            cpus,
            cores: cores.len(),
            package: cache
                .cpus
                .iter()
                .find_map(find_cpu)
                .map_or(0, |cpu| cpu.package),
            memory_node: cache
                .cpus
                .iter()
                .find_map(find_cpu)
                .map_or(0, |cpu| cpu.memory_node),
            bytes: cache.size_bytes.filter(|&bytes| bytes > 0)? as f64,
            partition_units: PartitionSupport::preferred(view.partitions_of(cache.id)),
        })
    };

    caches
        .map(build_site)
        .collect::<Option<Vec<CacheSite>>>()
        .unwrap_or_default()
}

/// The site of each CPU.
pub struct CpuSites {
    sites: Vec<Option<usize>>,
}

impl CpuSites {
    pub fn from_sites(sites: &[CacheSite]) -> Self {
        let cpu_count = sites
            .iter()
            .flat_map(|site| site.cpus.iter())
            .max()
            .map_or(0, |last| last as usize + 1);
        let mut site_by_cpu = vec![None; cpu_count];
        for (index, site) in sites.iter().enumerate() {
            site.cpus
                .iter()
                .for_each(|cpu| site_by_cpu[cpu as usize] = Some(index));
        }
        CpuSites { sites: site_by_cpu }
    }

    /// `None` for an offline CPU.
    pub fn site_of_cpu(&self, cpu: u32) -> Option<usize> {
        self.sites.get(cpu as usize).copied().flatten()
    }

    /// The site on which a task spent most of its time; ties go to the first site.
    pub fn site_of_task(&self, task: &TaskSample) -> Option<usize> {
        let runs = || {
            let runs = task.on_cpu_ns.iter().filter(|(_, ns)| *ns > 0);
            runs.filter_map(|(cpu, ns)| Some((self.site_of_cpu(cpu.0)?, *ns)))
        };
        let time_on = |site: usize| -> u64 {
            let runs = runs().filter(|(other, _)| *other == site);
            runs.map(|(_, ns)| ns).sum()
        };
        let sites = runs().map(|(site, _)| site);
        sites.max_by_key(|&site| (time_on(site), Reverse(site)))
    }
}
