//! Facilities of resctrl on this host: the caches that it can partition, their units, the limits of memory bandwidth,
//! and its counters.
//!
//! Problem: resctrl may be mounted anywhere, read-only, twice, or not at all; the kernel's ids of its caches are
//! neither dense nor unique; each resource has its own limits, and the smallest number of classes applies to all;
//! devices fill some of the ways, and since Linux 6.19 may have a class of their own (`io_alloc`).
//! Method: the mount is found in `/proc/self/mountinfo`; `info/` is read resource by resource; a domain becomes a cache
//! of the topology by level and kernel id. Properties: read-only; a file with unexpected content is named; a missing
//! facility is reported with its remedy.
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, "Info directory".

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cachemate_core::{
    BandwidthSupport, CacheId, CacheLevel, IndexSet, MaskConstraints, PartitionSupport,
};

use super::bandwidth::{BandwidthResource, read_bandwidth};
use super::groups;
use super::masks::{MEMORY_BANDWIDTH, Schemata, parse_domain_list, parse_mask, resource_level};
use super::monitors::{CounterAssignment, read_counter_assignment};
use super::mount::{mount_point, read_number};
use crate::MissingFacility;
use crate::kernel::{Kernel, none_if_missing};
use crate::sense::topology::HostTopology;

/// A cache that can be divided.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResctrlCache {
    /// The topology's number of the cache.
    pub cache: CacheId,
    /// L2 or L3.
    pub level: CacheLevel,
    /// The kernel's id of the cache, as in schemata.
    pub domain: u32,
    /// Number of bits in a full mask.
    pub ways: u32,
    /// Minimum number of ways in a mask.
    pub min_ways: u32,
    /// Whether masks must be contiguous.
    pub must_be_contiguous: bool,
    /// Ways that devices fill too (Intel's DDIO, AMD's SDCIAE), whose lines do not belong to the group alone.
    pub shared_with_io: IndexSet,
    /// The class of service of devices.
    pub io_alloc: IoAlloc,
    /// Whether code and data have separate masks (CDP), so that a class has two.
    pub is_code_separate: bool,
    /// Size of the cache; `None` if the kernel does not report it.
    pub size_bytes: Option<u64>,
}

/// State of the class of service in which devices fill a cache (`io_alloc`, Linux 6.19).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IoAlloc {
    /// The processor or the kernel has no such class.
    #[default]
    Absent,
    /// Devices fill the ways that the hardware chooses.
    Disabled,
    /// Devices fill the ways of `io_alloc_cbm`, and the highest class of service is theirs.
    Enabled,
}

/// Events that are counted per group and last-level cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MonitoredEvents {
    /// Bytes that the lines of a group occupy (CMT, `llc_occupancy`).
    pub has_occupancy: bool,
    /// Memory traffic (MBM, `mbm_total_bytes`).
    pub has_total_bytes: bool,
    /// Memory traffic with the cache's own node (MBM, `mbm_local_bytes`).
    pub has_local_bytes: bool,
}

/// A mounted resctrl.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resctrl {
    /// The directory of the root group.
    pub mount: PathBuf,
    /// Caches that can be divided, in ascending order.
    pub caches: Vec<ResctrlCache>,
    /// Number of classes of service, including those of the root group and of other tools; 0 if nothing can be divided.
    pub class_count: u32,
    /// Number of classes that other tools used when this was read.
    pub other_group_count: u32,
    /// Limits of memory bandwidth, by resource (`MB`, or `SMBA` for slow memory), or the reason why a resource cannot
    /// be used; empty if there are none.
    pub bandwidth: BTreeMap<String, Result<BandwidthResource, MissingFacility>>,
    /// Counters that the monitors have.
    pub counted_events: MonitoredEvents,
    /// Caches of the topology by domain of the monitors.
    pub monitored_caches: BTreeMap<u32, CacheId>,
    /// Whether an L3 has several memory nodes (sub-NUMA clusters) of which the kernel knows nothing. Before Linux 6.11,
    /// a monitor then shows a multiple of what one of them counted, so that no such cache counts as monitored.
    pub has_unknown_clusters: bool,
    /// Number of groups that can be monitored at a time, including the root group; `None` if nothing is monitored.
    pub monitor_count: Option<u32>,
    /// Counters of traffic that are assigned to groups; `None` if every group has its own.
    pub counter_assignment: Option<CounterAssignment>,
    /// Events that are counted per group and package, by the kernel's names (`core_energy`); empty if there are none.
    pub package_events: Vec<String>,
    /// The last-level cache of each package that has one, by domain of these events. A package with several is missing,
    /// because its events cannot be attributed to one of them.
    pub package_caches: BTreeMap<u32, CacheId>,
}

/// Finds and reads resctrl.
///
/// # Errors
/// Resctrl is unsupported, not mounted, mounted read-only, or has a file with unexpected content: the reason, with its
/// remedy.
pub fn find(kernel: &dyn Kernel, host: &HostTopology) -> Result<Resctrl, MissingFacility> {
    let mount = mount_point(kernel)?;
    let mut caches = Vec::new();
    let mut min_class_count = None;
    // Without control, as on processors that only monitor, no group has the file.
    let root_path = mount.join("schemata");
    let root_text = none_if_missing(kernel.read(&root_path))
        .map_err(|error| {
            MissingFacility::unusable(format!("{}: {error}", root_path.display()), None)
        })?
        .unwrap_or_default();
    let root_schemata = Schemata::parse(&root_text).map_err(|problem| {
        MissingFacility::unusable(format!("{}/{problem}", mount.display()), None)
    })?;
    let mut has_io_class = false;
    for (resource, domains) in &root_schemata.masks {
        let dir = mount.join("info").join(resource);
        let Some(level) = resource_level(resource) else {
            continue;
        };
        let (constraints, class_count) = read_constraints(kernel, &dir)?;
        min_class_count =
            Some(min_class_count.map_or(class_count, |smallest: u32| smallest.min(class_count)));
        let shareable_ways = read_mask(kernel, &dir.join("shareable_bits")).unwrap_or_default();
        let (io_alloc, io_ways) = read_io_alloc(kernel, &dir);
        has_io_class |= io_alloc == IoAlloc::Enabled;
        for &domain in domains.keys() {
            let Some(cache) = host.cache_of_domain(level, domain) else {
                continue;
            };
            if caches
                .iter()
                .any(|other: &ResctrlCache| other.cache == cache)
            {
                continue; // with separate masks for code and data, two resources belong to one cache
            }
            let size_bytes = host
                .topology
                .caches
                .iter()
                .find(|c| c.id == cache)
                .and_then(|c| c.size_bytes);
            let MaskConstraints {
                ways,
                min_ways: at_least,
                must_be_contiguous: contiguous,
                ..
            } = constraints;
            let shared_with_io = match (io_alloc, io_ways.get(&domain)) {
                (IoAlloc::Enabled, Some(ways)) => shareable_ways.union(ways),
                _ => shareable_ways.clone(),
            };
            caches.push(ResctrlCache {
                cache,
                level,
                domain,
                ways,
                min_ways: at_least,
                must_be_contiguous: contiguous,
                shared_with_io,
                io_alloc,
                is_code_separate: resource.ends_with("CODE") || resource.ends_with("DATA"),
                size_bytes,
            });
        }
    }
    caches.sort_by_key(|divided| divided.cache);
    let bandwidth = read_bandwidth(kernel, &mount, host, &root_schemata);
    // All resources use up the same classes, also one that cannot be used, and that of devices is the last one of them.
    let class_counts = bandwidth.keys().filter_map(|name| {
        read_number(kernel, &mount.join("info").join(name).join("num_closids")).ok()
    });
    let class_count = class_counts.chain(min_class_count).min().unwrap_or(0);
    let class_count = class_count.saturating_sub(u32::from(has_io_class));
    let group_names = groups::list_groups(kernel, &mount).map_err(|error| {
        MissingFacility::unusable(format!("{}: {error}", mount.display()), None)
    })?;
    let other_group_count = group_names
        .iter()
        .filter(|name| !name.starts_with(groups::GROUP_PREFIX))
        .count() as u32;
    let counted_events = monitored_events(kernel, &mount);
    let mut monitored_caches = monitored_domains(kernel, &mount, host);
    let all_monitored = monitored_caches.len();
    monitored_caches
        .retain(|domain, cache| !has_unknown_clusters(kernel, &mount, *domain, host, *cache));
    let has_unknown_clusters = monitored_caches.len() < all_monitored;
    let monitors = ["L3_MON", "PERF_PKG_MON"].map(|name| mount.join("info").join(name));
    let monitor_counts = monitors
        .iter()
        .filter_map(|dir| read_number(kernel, &dir.join("num_rmids")).ok());
    let package_events = read_lines(kernel, &monitors[1].join("mon_features"));
    Ok(Resctrl {
        caches,
        class_count,
        other_group_count,
        bandwidth,
        counted_events,
        monitored_caches,
        has_unknown_clusters,
        monitor_count: monitor_counts.min(),
        counter_assignment: read_counter_assignment(kernel, &monitors[0]),
        package_events,
        package_caches: package_caches(kernel, &mount, host),
        mount,
    })
}

fn read_constraints(
    kernel: &dyn Kernel,
    dir: &Path,
) -> Result<(MaskConstraints, u32), MissingFacility> {
    let mask_path = dir.join("cbm_mask");
    let mask = read_mask(kernel, &mask_path)
        .filter(|mask| !mask.is_empty())
        .ok_or_else(|| {
            let reason = format!("{}: expected a hexadecimal mask", mask_path.display());
            MissingFacility::unusable(reason, None)
        })?;
    let ways = mask.iter().last().map_or(0, |last| last + 1);
    // Before Linux 6.6, the kernel does not report whether it accepts gaps; contiguous masks are accepted everywhere.
    let must_be_contiguous = read_number(kernel, &dir.join("sparse_masks")) != Ok(1);
    let limits = MaskConstraints {
        ways,
        min_ways: read_number(kernel, &dir.join("min_cbm_bits"))?,
        must_be_contiguous,
        reserved_ways: IndexSet::default(),
    };
    Ok((limits, read_number(kernel, &dir.join("num_closids"))?))
}

/// `1 cache`, `2 caches`.
pub(crate) fn count_text(count: usize, name: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {name}{plural}")
}

/// The class of devices, and its ways by domain.
fn read_io_alloc(kernel: &dyn Kernel, dir: &Path) -> (IoAlloc, BTreeMap<u32, IndexSet>) {
    let state = match kernel
        .read(&dir.join("io_alloc"))
        .unwrap_or_default()
        .trim()
    {
        "enabled" => IoAlloc::Enabled,
        "disabled" => IoAlloc::Disabled,
        _ => IoAlloc::Absent,
    };
    let text = kernel.read(&dir.join("io_alloc_cbm")).unwrap_or_default();
    (
        state,
        parse_domain_list(&text, parse_mask).unwrap_or_default(),
    )
}

fn monitored_events(kernel: &dyn Kernel, mount: &Path) -> MonitoredEvents {
    let features = read_lines(kernel, &mount.join("info/L3_MON/mon_features"));
    let has_feature = |name: &str| features.iter().any(|line| line == name);
    MonitoredEvents {
        has_occupancy: has_feature("llc_occupancy"),
        has_total_bytes: has_feature("mbm_total_bytes"),
        has_local_bytes: has_feature("mbm_local_bytes"),
    }
}

/// Domains that the root group's monitors report.
fn monitored_domains(
    kernel: &dyn Kernel,
    mount: &Path,
    host: &HostTopology,
) -> BTreeMap<u32, CacheId> {
    let names = kernel.list(&mount.join("mon_data")).unwrap_or_default();
    let domains = names
        .iter()
        .filter_map(|name| name.strip_prefix("mon_L3_")?.parse().ok());
    domains
        .filter_map(|domain: u32| Some((domain, host.cache_of_domain(CacheLevel::L3, domain)?)))
        .collect()
}

/// Whether a cache has several memory nodes, and no monitor of each of them (`mon_sub_L3_00`).
fn has_unknown_clusters(
    kernel: &dyn Kernel,
    mount: &Path,
    domain: u32,
    host: &HostTopology,
    cache: CacheId,
) -> bool {
    let caches = &host.topology.caches;
    let Some(cache) = caches.iter().find(|known| known.id == cache) else {
        return false;
    };
    let own_cpus = host.topology.cpus.iter();
    let nodes: BTreeSet<u32> = own_cpus
        .filter(|cpu| cache.cpus.contains(cpu.id.0))
        .map(|cpu| cpu.memory_node)
        .collect();
    let dir = mount.join(format!("mon_data/mon_L3_{domain:02}"));
    let names = kernel.list(&dir).unwrap_or_default();
    nodes.len() > 1 && !names.iter().any(|name| name.starts_with("mon_sub_L3_"))
}

/// The caches of packages that have one, by domain. The kernel numbers packages as the processors do, and the topology
/// without gaps, but in the same order.
fn package_caches(
    kernel: &dyn Kernel,
    mount: &Path,
    host: &HostTopology,
) -> BTreeMap<u32, CacheId> {
    let names = kernel.list(&mount.join("mon_data")).unwrap_or_default();
    let domains: BTreeSet<u32> = names
        .iter()
        .filter_map(|name| name.strip_prefix("mon_PERF_PKG_")?.parse().ok())
        .collect();
    let packages: BTreeSet<u32> = host.topology.cpus.iter().map(|cpu| cpu.package).collect();
    if domains.len() != packages.len() {
        return BTreeMap::new();
    }
    let only_cache = |package: u32| {
        let is_below = |cache: &&cachemate_core::Cache| {
            let mut cpus = host.topology.cpus.iter();
            cpus.any(|cpu| cpu.package == package && cache.cpus.contains(cpu.id.0))
        };
        let mut caches = host.topology.last_level_caches().filter(is_below);
        let first = caches.next()?.id;
        caches.next().is_none().then_some(first)
    };
    domains
        .into_iter()
        .zip(packages)
        .filter_map(|(domain, package)| Some((domain, only_cache(package)?)))
        .collect()
}

/// The lines of a file; none if it is missing.
fn read_lines(kernel: &dyn Kernel, path: &Path) -> Vec<String> {
    let text = kernel.read(path).unwrap_or_default();
    text.lines().map(|line| line.trim().to_string()).collect()
}

fn read_mask(kernel: &dyn Kernel, path: &Path) -> Option<IndexSet> {
    parse_mask(&kernel.read(path).ok()?)
}

impl Resctrl {
    /// Caches that policies may partition: none if the root group's class is the only one.
    pub fn partitions(&self) -> Vec<(CacheId, PartitionSupport)> {
        let max_groups = self.class_count.saturating_sub(self.other_group_count);
        let partition_entry = |resctrl_cache: &ResctrlCache| {
            let ResctrlCache {
                cache,
                ways,
                min_ways,
                must_be_contiguous: contiguous,
                ref shared_with_io,
                ..
            } = *resctrl_cache;
            let device_ways = shared_with_io.iter().filter(|way| *way < u64::BITS);
            (
                cache,
                PartitionSupport::Ways {
                    ways,
                    min_ways,
                    contiguous,
                    max_groups,
                    device_ways: device_ways.fold(0, |mask, way| mask | 1 << way),
                },
            )
        };
        if max_groups > 1 {
            self.caches.iter().map(partition_entry).collect()
        } else {
            Vec::new()
        }
    }

    /// Limits of memory bandwidth that policies may set: none if the root group's class is the only one.
    pub fn bandwidth_limits(&self) -> Vec<(CacheId, BandwidthSupport)> {
        let max_groups = self.class_count.saturating_sub(self.other_group_count);
        let memory = self.memory_bandwidth().filter(|_| max_groups > 1);
        let caches = memory.into_iter().flat_map(|resource| {
            let support = BandwidthSupport {
                max_groups,
                ..resource.support
            };
            resource
                .domains
                .values()
                .map(move |cache| (*cache, support))
        });
        caches.collect()
    }

    /// The limits of the bandwidth of ordinary memory.
    pub fn memory_bandwidth(&self) -> Option<&BandwidthResource> {
        self.bandwidth.get(MEMORY_BANDWIDTH)?.as_ref().ok()
    }

    /// The entry of a cache that can be divided.
    pub fn cache(&self, cache: CacheId) -> Option<&ResctrlCache> {
        self.caches
            .iter()
            .find(|resctrl_cache| resctrl_cache.cache == cache)
    }

    /// The caches that can be partitioned, as a sentence.
    ///
    /// # Errors
    /// No cache can be partitioned; the reason is included.
    pub fn describe_ways(&self) -> Result<String, MissingFacility> {
        if self.caches.is_empty() {
            let remedy = "a processor with Intel CAT, AMD QoS or Arm MPAM";
            return Err(MissingFacility::absent(
                format!("{}: no cache can be divided", self.mount.display()),
                Some(remedy),
            ));
        }
        let free_groups = self.free_groups()?;

        let mut kinds: BTreeMap<(String, String), usize> = BTreeMap::new();
        for cache in &self.caches {
            let contiguity = match cache.must_be_contiguous {
                true => " in one piece",
                false => "",
            };
            let separate_code = match cache.is_code_separate {
                true => ", code and data alike (CDP)",
                false => "",
            };
            let limits = format!(
                "of {} ways, {} or more{contiguity} a group{separate_code}",
                cache.ways, cache.min_ways
            );
            *kinds
                .entry((format!("{:?} cache", cache.level), limits))
                .or_default() += 1;
        }
        let kinds: Vec<String> = kinds
            .iter()
            .map(|((name, limits), count)| format!("{} {limits}", count_text(*count, name)))
            .collect();
        Ok(format!(
            "at {}: {}, {}",
            self.mount.display(),
            kinds.join("; "),
            count_text(free_groups as usize, "group")
        ))
    }

    /// Number of groups that cachemate could create.
    ///
    /// # Errors
    /// There is none; the reason is included.
    pub fn free_groups(&self) -> Result<u32, MissingFacility> {
        let (classes, other_groups) = (self.class_count, self.other_group_count);
        match classes.saturating_sub(other_groups) {
            0 | 1 => Err(MissingFacility::unusable(
                format!(
                    "{}: {classes} classes of service, others hold {other_groups}, the root group has one",
                    self.mount.display()
                ),
                Some("remove others' groups, or a processor with more classes"),
            )),
            free => Ok(free - 1),
        }
    }
}
