//! The facilities of resctrl, one by one: each is usable, there but unusable, or absent.
//!
//! Problem: one file system has eight facilities, of which each processor has others, and what is missing shows as an
//! unrelated error later: a group that cannot be created, a file without a number, ways whose lines vanish. Method:
//! each facility is read on its own. A facility that others have used up is unusable, and the check names who holds it;
//! ways that devices fill are compared with the masks of all groups. Property: read-only.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cachemate_core::{Ability, IndexSet};

use super::{CapabilityCheck, build_check};
use crate::MissingFacility;
use crate::act::resctrl::{
    IoAlloc, MEMORY_BANDWIDTH, MonitorGroup, Resctrl, count_text, describe_holders, groups,
    list_monitor_groups, missing_traffic,
};
use crate::kernel::Kernel;

type FoundResctrl = Result<Resctrl, MissingFacility>;

/// Builds the check of a facility whose state depends on resctrl.
fn check_with(
    name: &str,
    abilities: &'static [Ability],
    resctrl: &FoundResctrl,
    consequence: &str,
    outcome: impl FnOnce(&Resctrl) -> Result<String, MissingFacility>,
) -> CapabilityCheck {
    let outcome = match resctrl {
        Ok(found) => outcome(found),
        Err(missing) => Err(missing.clone()),
    };
    build_check(name, abilities, outcome, consequence)
}

/// Adds a remedy to a facility that works with a limit.
fn with_remedy(check: CapabilityCheck, remedy: Option<String>) -> CapabilityCheck {
    CapabilityCheck {
        remedy: check.remedy.or(remedy),
        ..check
    }
}

pub(super) fn check_monitoring(kernel: &dyn Kernel, resctrl: &FoundResctrl) -> CapabilityCheck {
    let mut remedy = None;
    let check = check_with(
        "cache occupancy and bandwidth (resctrl)",
        &[Ability::CacheOccupancy],
        resctrl,
        "occupancy is inferred, not read",
        |resctrl| {
            let events = resctrl.counted_events;
            let names: Vec<&str> = [
                ("occupancy", events.has_occupancy),
                ("traffic", events.has_total_bytes),
                ("traffic of the own node", events.has_local_bytes),
            ]
            .into_iter()
            .filter_map(|(name, is_counted)| is_counted.then_some(name))
            .collect();
            let mount = resctrl.mount.display();
            if resctrl.has_unknown_clusters {
                let reason = format!(
                    "{mount}: a cache has several memory nodes (sub-NUMA clusters), which this kernel counts wrongly"
                );
                let remedy = "Linux 6.11 or later, or firmware without sub-NUMA clusters";
                return Err(MissingFacility::unusable(reason, Some(remedy)));
            }
            if names.is_empty() {
                let reason = format!("{mount}: nothing is counted");
                return Err(MissingFacility::absent(reason, Some("Intel CMT and MBM")));
            }
            let names = names.join(", ");
            if resctrl.monitored_caches.is_empty() {
                let reason = format!(
                    "{mount}: {names}, but mon_data has no L3 cache that the kernel describes"
                );
                let remedy = "a kernel that lists its L3 caches in /sys/devices/system/cpu";
                return Err(MissingFacility::unusable(reason, Some(remedy)));
            }
            let mut text = format!(
                "at {mount}: {names} of {}",
                count_text(resctrl.monitored_caches.len(), "cache")
            );
            if let Some(assignment) = &resctrl.counter_assignment {
                let sum = |counts: &BTreeMap<u32, u32>| counts.values().sum::<u32>();
                text += &format!(
                    "; counters of traffic are assigned to groups (mbm_event), {} of {} are free",
                    sum(&assignment.free_counters),
                    sum(&assignment.counters)
                );
            }
            let missing = resctrl
                .monitored_caches
                .keys()
                .find_map(|&domain| missing_traffic(kernel, &resctrl.mount, domain, events));
            if let Some(missing) = missing {
                text += &format!(
                    "; traffic of the root group is unknown: {}",
                    missing.describe()
                );
                remedy = resctrl.counter_assignment.as_ref().map(|_| {
                    format!("echo 'mbm_total_bytes:*=e' > {mount}/mbm_L3_assignments, once a counter is free")
                });
            }
            Ok(text)
        },
    );
    with_remedy(check, remedy)
}

pub(super) fn check_package_events(resctrl: &FoundResctrl) -> CapabilityCheck {
    check_with(
        "energy and stalls of groups (resctrl, PERF_PKG)",
        &[],
        resctrl,
        "the energy of a program is not known",
        |resctrl| match resctrl.package_events.as_slice() {
            [] => Err(MissingFacility::absent(
                format!("{}: no events of packages", resctrl.mount.display()),
                Some(
                    "Linux 7.0 or later, and an Intel processor with application energy telemetry",
                ),
            )),
            events => Ok(format!(
                "{} of {} packages",
                events.join(", "),
                resctrl.package_caches.len()
            )),
        },
    )
}

pub(super) fn check_monitor_groups(kernel: &dyn Kernel, resctrl: &FoundResctrl) -> CapabilityCheck {
    let mut remedy = None;
    let check = check_with(
        "monitoring ids (resctrl)",
        &[],
        resctrl,
        "no group can be created, neither to count nor to divide a cache",
        |resctrl| {
            let Some(limit) = resctrl.monitor_count else {
                let reason = format!("{}: nothing is monitored", resctrl.mount.display());
                return Err(MissingFacility::absent(reason, None));
            };
            let groups = list_monitor_groups(kernel, &resctrl.mount)
                .map_err(|error| MissingFacility::unusable(error.to_string(), None))?;
            let (used, holders) = (groups.len(), describe_holders(&groups));
            let by_holder = match holders.is_empty() {
                true => String::new(),
                false => format!(" (besides the root group: {holders})"),
            };
            let is_left = |group: &&MonitorGroup| !group.has_class && group.threads == Some(0);
            let left: Vec<&MonitorGroup> = groups.iter().filter(is_left).collect();
            if let Some(first) = left.first() {
                remedy = Some(format!(
                    "without threads: {}; if their owner has ended: rmdir {}{}",
                    left.len(),
                    resctrl.mount.display(),
                    first.path.display()
                ));
            }
            match used < limit as usize {
                true => Ok(format!("{used} of {limit} are in use{by_holder}")),
                false => Err(MissingFacility::unusable(
                    format!("all {limit} are in use{by_holder}"),
                    remedy
                        .as_deref()
                        .or(Some("remove groups of others that are not needed")),
                )),
            }
        },
    );
    with_remedy(check, remedy)
}

pub(super) fn check_ways(resctrl: &FoundResctrl) -> CapabilityCheck {
    check_with(
        "way masks (resctrl)",
        &[Ability::Ways],
        resctrl,
        "caches are divided by colors or not at all",
        Resctrl::describe_ways,
    )
}

/// Tests whether groups share ways with devices, which fill them with lines of input and output.
pub(super) fn check_io_ways(kernel: &dyn Kernel, resctrl: &FoundResctrl) -> CapabilityCheck {
    let mut remedy = None;
    let check = check_with(
        "ways of devices (shareable_bits, io_alloc)",
        &[],
        resctrl,
        "devices fill all ways alike, or the kernel does not tell which",
        |resctrl| {
            let with_devices: Vec<_> = resctrl
                .caches
                .iter()
                .filter(|cache| !cache.shared_with_io.is_empty())
                .collect();
            let io_alloc = resctrl.caches.iter().map(|cache| cache.io_alloc);
            let io_alloc = io_alloc.max_by_key(|state| match state {
                IoAlloc::Absent => 0,
                IoAlloc::Disabled => 1,
                IoAlloc::Enabled => 2,
            });
            let switch = format!("{}/info/L3/io_alloc", resctrl.mount.display());
            if with_devices.is_empty() {
                return Err(match io_alloc {
                    Some(IoAlloc::Disabled) => MissingFacility::unusable(
                        "io_alloc is disabled: the hardware chooses the ways of devices",
                        Some(&format!(
                            "echo 1 > {switch}, if no group needs the last class of service"
                        )),
                    ),
                    _ => MissingFacility::absent(
                        format!(
                            "{}: no way is marked as shared with devices",
                            resctrl.mount.display()
                        ),
                        None,
                    ),
                });
            }
            let shares_ways = |group: &Path| {
                let schemata = groups::read_schemata(kernel, group);
                schemata.is_some_and(|schemata| {
                    with_devices.iter().any(|cache| {
                        let mask = schemata.mask_of(cache.level, cache.domain);
                        mask.is_some_and(|mask| mask.intersects(&cache.shared_with_io))
                    })
                })
            };
            let names = groups::list_groups(kernel, &resctrl.mount).unwrap_or_default();
            let sharers: BTreeSet<String> = names
                .into_iter()
                .filter(|name| shares_ways(&resctrl.mount.join(name)))
                .map(|name| format!("/{name}"))
                .collect();
            let ways: BTreeSet<&IndexSet> = with_devices
                .iter()
                .map(|cache| &cache.shared_with_io)
                .collect();
            let ways: Vec<String> = ways.into_iter().map(IndexSet::to_string).collect();
            let source = match io_alloc {
                Some(IoAlloc::Enabled) => "io_alloc is enabled: devices fill",
                _ => "devices fill",
            };
            let noun = match ways.iter().all(|text| text.parse::<u32>().is_ok()) {
                true => "way",
                false => "ways",
            };
            let mut text = format!(
                "{source} {noun} {} of {}",
                ways.join(" or "),
                count_text(with_devices.len(), "cache")
            );
            text += match with_devices
                .iter()
                .all(|cache| cache.shared_with_io.count() >= cache.ways)
            {
                true => ", which leaves none for groups alone",
                false => ", which plans give out last",
            };
            if sharers.is_empty() {
                text += match shares_ways(&resctrl.mount) {
                    true => "; of all groups, only the root group may share them",
                    false => "; no group's mask has them",
                };
            } else {
                const MAX_NAMES: usize = 5;
                let names: Vec<&str> = sharers.iter().map(String::as_str).take(MAX_NAMES).collect();
                let more = match sharers.len().saturating_sub(MAX_NAMES) {
                    0 => String::new(),
                    count => format!(" and {count} more"),
                };
                text += &format!("; so may {}{more}", names.join(", "));
                remedy = Some(
                    "leave these ways out of the masks of groups that must keep their lines"
                        .to_string(),
                );
            }
            Ok(text)
        },
    );
    with_remedy(check, remedy)
}

pub(super) fn check_bandwidth(resctrl: &FoundResctrl) -> CapabilityCheck {
    check_with(
        "limits of memory bandwidth (resctrl, MB)",
        &[Ability::Bandwidth],
        resctrl,
        "a program that fills the path to memory is not limited, or gets fewer CPUs with bandwidth = \"limits-or-cpus\"",
        |resctrl| {
            let Some(memory) = resctrl
                .bandwidth
                .get(MEMORY_BANDWIDTH)
                .cloned()
                .transpose()?
            else {
                return Err(MissingFacility::absent(
                    format!("{}: no bandwidth can be limited", resctrl.mount.display()),
                    Some("a processor with Intel MBA, AMD QoS or Arm MPAM"),
                ));
            };
            if memory.domains.is_empty() {
                let reason = "no domain of MB is a last-level cache that the kernel describes";
                return Err(MissingFacility::unusable(reason, None));
            }
            resctrl.free_groups()?;
            Ok(memory.describe())
        },
    )
}

pub(super) fn check_slow_bandwidth(resctrl: &FoundResctrl) -> CapabilityCheck {
    check_with(
        "limits of slow memory's bandwidth (resctrl, SMBA)",
        &[],
        resctrl,
        "traffic to CXL memory is not limited apart",
        |resctrl| match resctrl.bandwidth.get("SMBA").cloned().transpose()? {
            Some(resource) => Ok(format!("{}; read and left as it is", resource.describe())),
            None => Err(MissingFacility::absent(
                format!("{}: no SMBA", resctrl.mount.display()),
                Some("an AMD processor with slow memory bandwidth allocation"),
            )),
        },
    )
}

#[cfg(test)]
mod tests;
