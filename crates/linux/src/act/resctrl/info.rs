//! Facilities of resctrl on this host: the caches that it can partition, their units, and its counters.
//!
//! Problem: resctrl may be mounted anywhere, read-only, twice, or not at all; the kernel's ids of its caches are
//! neither dense nor unique; each resource has its own limits, and the smallest number of classes applies to all.
//! Method: the mount is found in `/proc/self/mountinfo`; `info/` is read resource by resource; a domain becomes a cache
//! of the topology by level and kernel id. Properties: read-only; a file with unexpected content is named; a missing
//! facility is reported with its remedy.
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, "Info directory".

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cachemate_core::{CacheId, CacheLevel, IndexSet, MaskConstraints, PartitionSupport};

use super::groups;
use super::masks::{Schemata, parse_mask, resource_level};
use super::mount::{ResctrlUnavailable, mount_point, unavailable};
use crate::kernel::Kernel;
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
    /// Ways that the hardware also uses for input and output (DDIO), whose lines do not belong to the group alone.
    pub shared_with_io: IndexSet,
    /// Size of the cache; `None` if the kernel does not report it.
    pub size_bytes: Option<u64>,
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
    /// Counters that the monitors have.
    pub counted_events: MonitoredEvents,
    /// Caches of the topology by domain of the monitors.
    pub monitored_caches: BTreeMap<u32, CacheId>,
}

/// Finds and reads resctrl.
///
/// # Errors
/// Resctrl is unsupported, not mounted, mounted read-only, or has a file with unexpected content: the reason, with its
/// remedy.
pub fn find(kernel: &dyn Kernel, host: &HostTopology) -> Result<Resctrl, ResctrlUnavailable> {
    let mount = mount_point(kernel)?;
    let mut caches = Vec::new();
    let mut min_class_count = None;
    let root_text = read_file(kernel, &mount.join("schemata"))?;
    let root_schemata = Schemata::parse(&root_text)
        .map_err(|problem| unavailable(format!("{}/{problem}", mount.display()), None))?;
    for (resource, domains) in &root_schemata.0 {
        let dir = mount.join("info").join(resource);
        let Some(level) = resource_level(resource) else {
            continue;
        };
        let (constraints, class_count) = read_constraints(kernel, &dir)?;
        min_class_count =
            Some(min_class_count.map_or(class_count, |smallest: u32| smallest.min(class_count)));
        let shared_with_io = read_mask(kernel, &dir.join("shareable_bits")).unwrap_or_default();
        for &domain in domains.keys() {
            let Some(cache) = find_cache(host, level, domain) else {
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
            let shared_with_io = shared_with_io.clone();
            caches.push(ResctrlCache {
                cache,
                level,
                domain,
                ways,
                min_ways: at_least,
                must_be_contiguous: contiguous,
                shared_with_io,
                size_bytes,
            });
        }
    }
    caches.sort_by_key(|divided| divided.cache);
    // Bandwidth limits use up the same classes.
    let bandwidth_class_count = read_number(kernel, &mount.join("info/MB/num_closids"));
    let class_count = min_class_count.map_or(0, |classes| {
        bandwidth_class_count.map_or(classes, |number| number.min(classes))
    });
    let group_names = groups::list_groups(kernel, &mount)
        .map_err(|error| unavailable(format!("{}: {error}", mount.display()), None))?;
    let other_group_count = group_names
        .iter()
        .filter(|name| !name.starts_with(groups::GROUP_PREFIX))
        .count() as u32;
    let counted_events = monitored_events(kernel, &mount);
    let monitored_caches = monitored_domains(kernel, &mount, host);
    Ok(Resctrl {
        mount,
        caches,
        class_count,
        other_group_count,
        counted_events,
        monitored_caches,
    })
}

fn read_constraints(
    kernel: &dyn Kernel,
    dir: &Path,
) -> Result<(MaskConstraints, u32), ResctrlUnavailable> {
    let info_path = |name: &str| dir.join(name);
    let mask = read_mask(kernel, &info_path("cbm_mask"));
    let missing_file = |name: &str, expected: &str| {
        unavailable(
            format!("{}: expected {expected}", info_path(name).display()),
            None,
        )
    };
    let mask = mask
        .filter(|mask| !mask.is_empty())
        .ok_or_else(|| missing_file("cbm_mask", "a hexadecimal mask"))?;
    let require_number = |name: &str| {
        read_number(kernel, &info_path(name)).ok_or_else(|| missing_file(name, "a whole number"))
    };
    let ways = mask.iter().last().map_or(0, |last| last + 1);
    // Before Linux 6.6, the kernel does not report whether it accepts gaps; contiguous masks are accepted everywhere.
    let must_be_contiguous = read_number(kernel, &info_path("sparse_masks")) != Some(1);
    let limits = MaskConstraints {
        ways,
        min_ways: require_number("min_cbm_bits")?,
        must_be_contiguous,
        reserved_ways: IndexSet::default(),
    };
    Ok((limits, require_number("num_closids")?))
}

fn monitored_events(kernel: &dyn Kernel, mount: &Path) -> MonitoredEvents {
    let features = kernel
        .read(&mount.join("info/L3_MON/mon_features"))
        .unwrap_or_default();
    let has_feature = |name: &str| features.lines().any(|line| line.trim() == name);
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
        .filter_map(|domain: u32| Some((domain, find_cache(host, CacheLevel::L3, domain)?)))
        .collect()
}

fn find_cache(host: &HostTopology, level: CacheLevel, domain: u32) -> Option<CacheId> {
    let is_match = |cache: &&cachemate_core::Cache| {
        let id = host
            .kernel_cache_ids
            .get(cache.id.0 as usize)
            .copied()
            .flatten();
        cache.level == level && id == Some(domain)
    };
    host.topology
        .caches
        .iter()
        .find(is_match)
        .map(|cache| cache.id)
}

fn read_file(kernel: &dyn Kernel, path: &Path) -> Result<String, ResctrlUnavailable> {
    kernel
        .read(path)
        .map_err(|error| unavailable(format!("{}: {error}", path.display()), None))
}

fn read_number(kernel: &dyn Kernel, path: &Path) -> Option<u32> {
    kernel.read(path).ok()?.trim().parse().ok()
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
                ..
            } = *resctrl_cache;
            (
                cache,
                PartitionSupport::Ways {
                    ways,
                    min_ways,
                    contiguous,
                    max_groups,
                },
            )
        };
        if max_groups > 1 {
            self.caches.iter().map(partition_entry).collect()
        } else {
            Vec::new()
        }
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
    pub fn describe_ways(&self) -> Result<String, ResctrlUnavailable> {
        let Some(first_cache) = self.caches.first() else {
            let remedy = "a processor with Intel CAT, AMD QoS or Arm MPAM";
            return Err(unavailable(
                format!("{}: no cache can be divided", self.mount.display()),
                Some(remedy),
            ));
        };
        let ResctrlCache {
            ways,
            min_ways,
            must_be_contiguous,
            ..
        } = first_cache;
        let (cache_count, mount) = (self.caches.len(), self.mount.display());
        let contiguity = if *must_be_contiguous {
            " in one piece"
        } else {
            ""
        };
        let (classes, other_groups) = (self.class_count, self.other_group_count);
        if classes.saturating_sub(other_groups) < 2 {
            let reason = format!(
                "{mount}: {classes} classes of service, others hold {other_groups}, the root group has one"
            );
            return Err(unavailable(
                reason,
                Some("remove others' groups, or a processor with more classes"),
            ));
        }
        Ok(format!(
            "at {mount}: {cache_count} caches of {ways} ways, {min_ways} or more{contiguity} a group, {} groups",
            classes - other_groups - 1
        ))
    }
}
