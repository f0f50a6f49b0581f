//! Limits of memory bandwidth: Intel's MBA, in percent or in MiB/s; AMD's, in eighths of a GB/s; and those of slow
//! memory.
//!
//! Problem: one file, `schemata`, has a number whose unit depends on the processor and on the mount, and nothing in
//! resctrl says which: `50` is half of a core's requests on Intel, 50 MiB/s there with the option `mba_MBps`, and 6.25
//! GB/s on AMD. Method: the mount's options tell `mba_MBps`; the processor's vendor tells AMD; and where the vendor is
//! unknown, a number above 100 cannot be a percentage. Properties: read-only; a resource with unexpected content is
//! left out, with an error that names the file or the line, and the ways of caches are divided without it.
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, "Memory bandwidth Allocation".

use std::collections::BTreeMap;
use std::path::Path;

use cachemate_core::{BandwidthSupport, BandwidthUnit, CacheId, CacheLevel};

use super::count_text;
use super::masks::Schemata;
use super::mount::{has_mount_option, read_number};
use crate::MissingFacility;
use crate::kernel::Kernel;
use crate::kernel::text_files::field;
use crate::sense::topology::HostTopology;

/// The limit of a group without one on AMD, if no group shows it.
const AMD_MAX_LEVEL: u32 = 2048;
/// Steps of limits in MiB/s; the kernel adjusts percentages until the traffic fits.
const MIB_STEP: u32 = 1;

/// A resource that limits bandwidth.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BandwidthResource {
    /// Unit and range of its limits.
    pub support: BandwidthSupport,
    /// Caches of the topology by domain; a domain without a cache that the topology knows is missing.
    pub domains: BTreeMap<u32, CacheId>,
    /// Whether two threads of a core get the smaller of their limits (Intel's `thread_throttle_mode` is `max`).
    pub limits_whole_cores: bool,
}

/// Every resource that limits bandwidth by its name, by the lines of the root group, or the reason why it cannot be
/// used.
pub(super) fn read_bandwidth(
    kernel: &dyn Kernel,
    mount: &Path,
    host: &HostTopology,
    root: &Schemata,
) -> BTreeMap<String, Result<BandwidthResource, MissingFacility>> {
    let read_resource = |name: &str, levels: &BTreeMap<u32, u32>| {
        let dir = mount.join("info").join(name);
        let require_number = |file: &str| read_number(kernel, &dir.join(file));
        let largest_level = levels.values().copied().max().unwrap_or(0);
        let unit = find_unit(kernel, largest_level);
        let (step, max_level) = match unit {
            BandwidthUnit::Percent => (require_number("bandwidth_gran")?, 100),
            BandwidthUnit::MebibytesPerSecond => (MIB_STEP, u32::MAX),
            BandwidthUnit::EighthsOfGigabytePerSecond => (
                require_number("bandwidth_gran")?,
                largest_level.max(AMD_MAX_LEVEL),
            ),
        };
        let min_level = match unit {
            // The file has the smallest percentage.
            BandwidthUnit::MebibytesPerSecond => 1,
            _ => require_number("min_bandwidth")?.max(1),
        };
        let throttle_mode = kernel
            .read(&dir.join("thread_throttle_mode"))
            .unwrap_or_default();
        Ok(BandwidthResource {
            support: BandwidthSupport {
                unit,
                min_level: min_level.min(max_level),
                step: step.max(1),
                max_level,
                max_groups: 0,
            },
            domains: levels
                .keys()
                .filter_map(|&domain| Some((domain, host.cache_of_domain(CacheLevel::L3, domain)?)))
                .collect(),
            limits_whole_cores: throttle_mode.trim() == "max",
        })
    };
    let resources = root.levels.iter().map(|(name, levels)| {
        let resource = match levels {
            Ok(levels) => read_resource(name, levels),
            Err(problem) => Err(MissingFacility::unusable(
                format!("{}/{problem}", mount.display()),
                None,
            )),
        };
        (name.clone(), resource)
    });
    resources.collect()
}

fn find_unit(kernel: &dyn Kernel, largest_level: u32) -> BandwidthUnit {
    if has_mount_option(kernel, "mba_MBps") {
        return BandwidthUnit::MebibytesPerSecond;
    }
    let text = kernel.read(Path::new("/proc/cpuinfo")).unwrap_or_default();
    match field(&text, "vendor_id") {
        Some("AuthenticAMD" | "HygonGenuine") => BandwidthUnit::EighthsOfGigabytePerSecond,
        _ if largest_level > 100 => BandwidthUnit::EighthsOfGigabytePerSecond,
        _ => BandwidthUnit::Percent,
    }
}

impl BandwidthResource {
    /// Range and unit of the limits, as a sentence.
    pub fn describe(&self) -> String {
        let support = &self.support;
        let range = match support.unit {
            BandwidthUnit::Percent => format!(
                "{} to 100 % of what a core can request, in steps of {} %",
                support.min_level, support.step
            ),
            BandwidthUnit::MebibytesPerSecond => {
                "MiB/s by the kernel's feedback (mba_MBps)".to_string()
            }
            BandwidthUnit::EighthsOfGigabytePerSecond => format!(
                "{} and more, in steps of {}",
                support.unit.describe(support.min_level),
                support.unit.describe(support.step)
            ),
        };
        let whole_cores = match self.limits_whole_cores {
            true => "; two threads of a core get the smaller of their limits",
            false => "",
        };
        format!(
            "{}, {range}{whole_cores}",
            count_text(self.domains.len(), "cache")
        )
    }
}
