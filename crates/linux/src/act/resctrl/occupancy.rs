//! Counters of resctrl: occupancy (CMT), memory traffic (MBM), energy and stalls (AET), and the reasons why an
//! occupancy differs from the mask.
//!
//! Problem: users see a group occupy more than its mask allows, or less, and mistake this for a defect. Both are
//! normal: a mask limits where new lines are placed, and existing lines elsewhere stay until they are evicted; ways may
//! be shared with other groups or with input and output; the counters are estimates of a monitor with its own delay.
//! Method: occupancy is read together with the mask, and every reason that applies is reported as a sentence. A counter
//! that the hardware marks as unavailable, or that is assigned to no group, is absent with this reason; traffic is the
//! difference of two readings. Energy is a decimal number of joules (Linux 7.0).
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, `mon_data`, `bit_usage`, "Cache Pseudo-Locking".

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use cachemate_core::{CacheLevel, CacheShare, CounterEvent, IndexSet, StallCause, Units};

use super::info::{IoAlloc, MonitoredEvents, ResctrlCache};
use super::monitors::{LOCAL_EVENT, TOTAL_EVENT};
use crate::kernel::Kernel;

/// The directory of a group's counters in a last-level cache.
pub fn cache_dir(group: &Path, domain: u32) -> PathBuf {
    group.join(format!("mon_data/mon_L3_{domain:02}"))
}

/// The reason why a counter has no value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum MissingReading {
    /// The file is missing or cannot be read.
    Unreadable,
    /// No hardware counter is assigned to the group (AMD's `mbm_event`).
    Unassigned,
    /// The hardware has no value at present, such as after a counter has moved to another group.
    Unavailable,
    /// The hardware reports an error.
    Failed,
    /// The file has no number.
    Unexpected,
}

impl MissingReading {
    /// The reason as a clause.
    pub fn describe(self) -> &'static str {
        match self {
            MissingReading::Unreadable => "its file cannot be read",
            MissingReading::Unassigned => {
                "no counter is assigned to the group: all are taken, or mbm_assign_on_mkdir is 0"
            }
            MissingReading::Unavailable => "the hardware has no value at present",
            MissingReading::Failed => "the hardware reports an error",
            MissingReading::Unexpected => "its file has no number",
        }
    }
}

/// A counter's value.
///
/// # Errors
/// The reason why there is none, which is not zero.
pub fn read_counter<T: FromStr>(kernel: &dyn Kernel, path: &Path) -> Result<T, MissingReading> {
    let text = kernel.read(path).map_err(|_| MissingReading::Unreadable)?;
    match text.trim() {
        "Unassigned" => Err(MissingReading::Unassigned),
        "Unavailable" => Err(MissingReading::Unavailable),
        "Error" => Err(MissingReading::Failed),
        value => value.parse().map_err(|_| MissingReading::Unexpected),
    }
}

/// Bytes of the last level that the group's lines occupy.
pub fn occupancy_bytes(kernel: &dyn Kernel, group: &Path, domain: u32) -> Option<u64> {
    read_counter(kernel, &cache_dir(group, domain).join("llc_occupancy")).ok()
}

/// The reason why a group's traffic is unknown; `None` if it is known, or if traffic is not counted at all.
pub fn missing_traffic(
    kernel: &dyn Kernel,
    group: &Path,
    domain: u32,
    counted_events: MonitoredEvents,
) -> Option<MissingReading> {
    let path = cache_dir(group, domain).join(TOTAL_EVENT);
    counted_events
        .has_total_bytes
        .then(|| read_counter::<u64>(kernel, &path).err())
        .flatten()
}

/// Counters of a group in a cache or a package since the group's creation. Those that have no value are missing.
pub type Readings = BTreeMap<CounterEvent, u64>;

/// The directory of a group's counters in a package.
pub fn package_dir(group: &Path, package: u32) -> PathBuf {
    group.join(format!("mon_data/mon_PERF_PKG_{package:02}"))
}

/// Energy of the cores while they ran the group, and cycles without an instruction while a miss of the last level was
/// outstanding, from the directory of a package.
pub fn read_package(kernel: &dyn Kernel, package_dir: &Path) -> Readings {
    let joules: Option<f64> = read_counter(kernel, &package_dir.join("core_energy")).ok();
    let joules = joules.filter(|joules| joules.is_finite() && *joules >= 0.0);
    let stalls = read_counter(kernel, &package_dir.join("stalls_llc_miss")).ok();
    let energy = joules.map(|joules| (joules * 1e6).round() as u64);
    Readings::from_iter(
        energy
            .map(|microjoules| (CounterEvent::CoreEnergyMicrojoules, microjoules))
            .into_iter()
            .chain(
                stalls.map(|cycles| (CounterEvent::StallCycles(StallCause::LocalMemory), cycles)),
            ),
    )
}

/// Memory traffic from the directory of a cache, as far as the monitors count it.
pub fn read_traffic(
    kernel: &dyn Kernel,
    cache_dir: &Path,
    counted_events: MonitoredEvents,
) -> Readings {
    let events = [
        (
            counted_events.has_total_bytes,
            TOTAL_EVENT,
            CounterEvent::MemoryBytes,
        ),
        (
            counted_events.has_local_bytes,
            LOCAL_EVENT,
            CounterEvent::LocalMemoryBytes,
        ),
    ];
    let counted = events.into_iter().filter(|(is_counted, ..)| *is_counted);
    counted
        .filter_map(|(_, name, event)| {
            Some((event, read_counter(kernel, &cache_dir.join(name)).ok()?))
        })
        .collect()
}

/// The events since `earlier`. A counter that was reset between the two is missing.
pub fn counts_since(now: &Readings, earlier: &Readings) -> Readings {
    let count_since = |(event, count): (&CounterEvent, &u64)| {
        Some((*event, count.checked_sub(*earlier.get(event)?)?))
    };
    now.iter().filter_map(count_since).collect()
}

/// Adds to a sum, from which events disappear that one of its parts does not count.
pub fn add_readings(sum: &mut Option<Readings>, part: &Readings) {
    match sum {
        None => *sum = Some(part.clone()),
        Some(sum) => sum.retain(|event, total| match part.get(event) {
            Some(count) => {
                *total += count;
                true
            }
            None => false,
        }),
    }
}

/// Ways per domain that a group uses exclusively (`E`) or that are pseudo-locked (`P`), from `bit_usage`, which has one
/// letter per way, the highest way first.
pub fn exclusive_ways(
    kernel: &dyn Kernel,
    mount: &Path,
    level: CacheLevel,
) -> BTreeMap<u32, IndexSet> {
    let mut ways_by_domain: BTreeMap<u32, IndexSet> = BTreeMap::new();
    let resources = if level == CacheLevel::L2 {
        ["L2", "L2CODE", "L2DATA"]
    } else {
        ["L3", "L3CODE", "L3DATA"]
    };
    for resource in resources {
        let bit_usage = kernel
            .read(&mount.join("info").join(resource).join("bit_usage"))
            .unwrap_or_default();
        for (domain, way_usage) in bit_usage
            .trim()
            .split(';')
            .filter_map(|domain_text| domain_text.split_once('='))
        {
            let Ok(domain) = domain.trim().parse() else {
                continue;
            };
            let exclusive_letters = way_usage
                .chars()
                .rev()
                .zip(0..)
                .filter(|(letter, _)| matches!(letter, 'E' | 'P'));
            ways_by_domain
                .entry(domain)
                .or_default()
                .extend(exclusive_letters.map(|(_, way)| way));
        }
    }
    ways_by_domain
}

/// Masks of the other groups in one cache, by name; the root group is `/`.
pub type OtherGroupMasks = BTreeMap<String, IndexSet>;

/// All reasons why the group's lines may differ from its mask, one sentence each.
pub fn explain_occupancy(
    share: &CacheShare,
    occupancy_bytes: Option<u64>,
    resctrl_cache: &ResctrlCache,
    other_masks: &OtherGroupMasks,
) -> Vec<String> {
    let Units::Ways { mask } = &share.units else {
        return Vec::new();
    };
    let mut reasons = Vec::new();
    let mask_bytes = resctrl_cache
        .size_bytes
        .map(|size| size / u64::from(resctrl_cache.ways.max(1)) * u64::from(mask.count()));
    if let Some((held_bytes, room)) = occupancy_bytes
        .zip(mask_bytes)
        .filter(|(held_bytes, room)| held_bytes > room)
    {
        reasons.push(format!(
            "holds {held_bytes} bytes where its ways have {room}: lines from before its mask stay until they are evicted"
        ));
    }
    let io_ways = mask.intersection(&resctrl_cache.shared_with_io);
    if !io_ways.is_empty() {
        reasons.push(format!(
            "ways {io_ways} are filled by input and output too{}",
            match resctrl_cache.io_alloc {
                IoAlloc::Enabled => " (io_alloc)",
                IoAlloc::Disabled | IoAlloc::Absent => "",
            }
        ));
    }
    for (name, other_mask) in other_masks {
        let shared_ways = mask.intersection(other_mask);
        if !shared_ways.is_empty() {
            reasons.push(format!(
                "ways {shared_ways} may also be filled by group {name}"
            ));
        }
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;
    use cachemate_core::{CacheId, GroupId};

    /// Does every word that the kernel writes instead of a number give its reason, and never a zero?
    #[test]
    fn words_instead_of_numbers_give_their_reason_and_never_zero() {
        let host = FakeHost::default();
        let path = Path::new("/r/g/mon_data/mon_L3_00/mbm_total_bytes");
        let read = |text: &str| {
            host.set_file("/r/g/mon_data/mon_L3_00/mbm_total_bytes", text);
            read_counter::<u64>(&host, path)
        };
        assert_eq!(read("17\n"), Ok(17));
        assert_eq!(read("Unassigned\n"), Err(MissingReading::Unassigned));
        assert_eq!(read("Unavailable\n"), Err(MissingReading::Unavailable));
        assert_eq!(read("Error\n"), Err(MissingReading::Failed));
        assert_eq!(read("42.375\n"), Err(MissingReading::Unexpected));
        assert_eq!(read(""), Err(MissingReading::Unexpected));
        let missing = read_counter::<u64>(&host, Path::new("/r/none"));
        assert_eq!(missing, Err(MissingReading::Unreadable));
        let all = MonitoredEvents {
            has_total_bytes: true,
            ..MonitoredEvents::default()
        };
        read("Unassigned\n").unwrap_err();
        let group = Path::new("/r/g");
        assert_eq!(
            missing_traffic(&host, group, 0, all),
            Some(MissingReading::Unassigned)
        );
        let uncounted = MonitoredEvents::default();
        assert_eq!(missing_traffic(&host, group, 0, uncounted), None);
    }

    /// Are decimals of energy read as the kernel writes them, and counted in microjoules?
    #[test]
    fn energy_is_read_with_decimals() {
        let host = FakeHost::default();
        let dir = Path::new("/r/g/mon_data/mon_PERF_PKG_01");
        assert_eq!(package_dir(Path::new("/r/g"), 1), dir);
        let set = |energy: &str, stalls: &str| {
            host.set_file(&format!("{}/core_energy", dir.display()), energy);
            host.set_file(&format!("{}/stalls_llc_miss", dir.display()), stalls);
            read_package(&host, dir)
        };
        let (before, after) = (
            set("42.375\n", "100\n"),
            set("43.000001\n", "Unavailable\n"),
        );
        let energy = CounterEvent::CoreEnergyMicrojoules;
        let stalls = CounterEvent::StallCycles(StallCause::LocalMemory);
        assert_eq!(before.get(&energy), Some(&42_375_000));
        let counts = counts_since(&after, &before);
        assert_eq!(counts.get(&energy), Some(&625_001));
        assert_eq!(counts.get(&stalls), None, "unavailable is not zero");
        let later = set("43.5", "150");
        assert_eq!(counts_since(&later, &before).get(&stalls), Some(&50));
        assert!(
            counts_since(&before, &after).is_empty(),
            "a reset is no count"
        );
        assert_eq!(set("nan", "1").get(&energy), None);
        let absent_dir = Path::new("/r/g/mon_data/mon_PERF_PKG_00");
        assert_eq!(read_package(&host, absent_dir), Readings::new());
    }

    /// Is an unavailable reading absent, and a difference or a sum present only if both readings are?
    #[test]
    fn unavailable_readings_and_their_differences_are_absent() {
        let host = FakeHost::default();
        host.set_file("/r/g/mon_data/mon_L3_01/llc_occupancy", "Unavailable\n");
        host.set_file("/r/g/mon_data/mon_L3_01/mbm_total_bytes", "500\n");
        host.set_file("/r/g/mon_data/mon_L3_01/mbm_local_bytes", "Error\n");
        let group = Path::new("/r/g");
        let all = MonitoredEvents {
            has_occupancy: true,
            has_total_bytes: true,
            has_local_bytes: true,
        };
        assert_eq!(occupancy_bytes(&host, group, 1), None);
        let now = read_traffic(&host, &cache_dir(group, 1), all);
        let total = |bytes| (CounterEvent::MemoryBytes, bytes);
        assert_eq!(now, Readings::from([total(500)]));
        let then = Readings::from([total(200), (CounterEvent::LocalMemoryBytes, 100)]);
        assert_eq!(counts_since(&now, &then), Readings::from([total(300)]));
        assert_eq!(
            counts_since(&then, &now),
            Readings::new(),
            "a counter that began anew says nothing"
        );
        let mut sum = None;
        add_readings(&mut sum, &then);
        add_readings(&mut sum, &now);
        assert_eq!(sum, Some(Readings::from([total(700)])));
    }

    /// Are exclusive and locked ways found, in the kernel's order with the highest way first, also with separate code
    /// and data?
    #[test]
    fn exclusive_and_locked_ways_are_read_from_bit_usage() {
        let host = FakeHost::default();
        host.set_file("/r/info/L3CODE/bit_usage", "0=XXSSSSSE;1=HH0000PP\n");
        host.set_file("/r/info/L3DATA/bit_usage", "0=XXSSESSS;1=HH000000\n");
        let ways = exclusive_ways(&host, Path::new("/r"), CacheLevel::L3);
        assert_eq!(
            (ways[&0].to_string(), ways[&1].to_string()),
            ("0,3".into(), "0-1".into())
        );
        assert!(super::exclusive_ways(&host, Path::new("/r"), CacheLevel::L2).is_empty());
    }

    /// Are exactly those reasons reported that apply?
    #[test]
    fn occupancy_beyond_the_mask_is_explained() {
        let share = |mask: &str| CacheShare {
            group: GroupId(1),
            members: Vec::new(),
            cache: CacheId(0),
            units: Units::Ways {
                mask: mask.parse().unwrap(),
            },
        };
        let divided = ResctrlCache {
            cache: CacheId(0),
            level: CacheLevel::L3,
            domain: 0,
            ways: 16,
            min_ways: 1,
            must_be_contiguous: true,
            shared_with_io: "14-15".parse().unwrap(),
            io_alloc: IoAlloc::Absent,
            is_code_separate: false,
            size_bytes: Some(16 << 20),
        };
        let others = BTreeMap::from([("/".to_string(), "4-15".parse().unwrap())]);
        assert_eq!(
            explain_occupancy(&share("0-3"), Some(4 << 20), &divided, &others),
            Vec::<String>::new()
        );
        assert_eq!(
            explain_occupancy(&share("3-14"), Some(13 << 20), &divided, &others),
            [
                "holds 13631488 bytes where its ways have 12582912: lines from before its mask stay until they are evicted",
                "ways 14 are filled by input and output too",
                "ways 4-14 may also be filled by group /",
            ]
        );
        assert_eq!(
            explain_occupancy(&share("0-3"), None, &divided, &others),
            Vec::<String>::new()
        );
    }
}
