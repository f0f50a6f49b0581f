//! Counters of resctrl: occupancy (CMT), memory traffic (MBM), energy and stalls (AET), and the reasons why an occupancy
//! differs from the mask.
//!
//! Problem: users see a group occupy more than its mask allows, or less, and mistake this for a defect. Both are normal: a
//! mask limits where new lines are placed, and existing lines elsewhere stay until they are evicted; ways may be shared
//! with other groups or with input and output; the counters are estimates of a monitor with its own delay. Method:
//! occupancy is read together with the mask, and every reason that applies is reported as a sentence. A counter that
//! the hardware marks as unavailable, or that is assigned to no group, is absent with this reason; traffic is the difference
//! of two readings. Energy is a decimal number of joules (Linux 7.0).
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, `mon_data`, `bit_usage`, "Cache Pseudo-Locking".

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use cachemate_core::{
    CacheLevel, CacheShare, CounterEvent, EventCounts, IndexSet, StallCause, Units,
};

use super::info::{IoAlloc, MonitoredEvents, ResctrlCache};
use crate::kernel::Kernel;

fn monitor_path(group: &Path, domain: u32, name: &str) -> PathBuf {
    group.join(format!("mon_data/mon_L3_{domain:02}/{name}"))
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
    read_counter(kernel, &monitor_path(group, domain, "llc_occupancy")).ok()
}

/// The reason why a group's traffic is unknown; `None` if it is known, or if traffic is not counted at all.
pub fn missing_traffic(
    kernel: &dyn Kernel,
    group: &Path,
    domain: u32,
    counted_events: MonitoredEvents,
) -> Option<MissingReading> {
    let path = monitor_path(group, domain, "mbm_total_bytes");
    counted_events
        .has_total_bytes
        .then(|| read_counter::<u64>(kernel, &path).err())
        .flatten()
}

/// Counters of a group in a package since the group's creation (`mon_PERF_PKG_00`).
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PackageReadings {
    /// Energy of the cores while they ran the group, in joules.
    pub core_joules: Option<f64>,
    /// Cycles without an instruction while a miss of the last level was outstanding.
    pub miss_stall_cycles: Option<u64>,
}

impl PackageReadings {
    /// Reads those of a group and a package, as far as they are counted.
    pub fn read(kernel: &dyn Kernel, group: &Path, package: u32) -> Self {
        let path = |event| group.join(format!("mon_data/mon_PERF_PKG_{package:02}/{event}"));
        let joules: Option<f64> = read_counter(kernel, &path("core_energy")).ok();
        PackageReadings {
            core_joules: joules.filter(|joules| joules.is_finite() && *joules >= 0.0),
            miss_stall_cycles: read_counter(kernel, &path("stalls_llc_miss")).ok(),
        }
    }

    /// The events since `earlier`; a counter that was reset between the two is absent.
    pub fn counts_since(self, earlier: PackageReadings) -> EventCounts {
        let joules = self.core_joules.zip(earlier.core_joules);
        let microjoules = joules
            .map(|(now, before)| (now - before) * 1e6)
            .filter(|count| *count >= 0.0);
        let stalls = self.miss_stall_cycles.zip(earlier.miss_stall_cycles);
        let stalls = stalls.and_then(|(now, before)| now.checked_sub(before));
        EventCounts::exact(
            [
                (
                    CounterEvent::CoreEnergyMicrojoules,
                    microjoules.map(|count| count.round() as u64),
                ),
                (CounterEvent::StallCycles(StallCause::LocalMemory), stalls),
            ]
            .into_iter()
            .filter_map(|(event, count)| Some((event, count?))),
        )
    }
}

/// Traffic since the group's creation, as the monitors count it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    pub total_bytes: Option<u64>,
    pub local_bytes: Option<u64>,
}

impl Traffic {
    pub fn read(
        kernel: &dyn Kernel,
        group: &Path,
        domain: u32,
        counted_events: MonitoredEvents,
    ) -> Self {
        let read_if_monitored = |is_monitored, name| {
            if is_monitored {
                read_counter(kernel, &monitor_path(group, domain, name)).ok()
            } else {
                None
            }
        };
        Traffic {
            total_bytes: read_if_monitored(counted_events.has_total_bytes, "mbm_total_bytes"),
            local_bytes: read_if_monitored(counted_events.has_local_bytes, "mbm_local_bytes"),
        }
    }

    /// The traffic since `earlier`; `None` for a counter that was reset between the two.
    pub fn difference(self, earlier: Traffic) -> Traffic {
        let count_since =
            |now: Option<u64>, earlier_count: Option<u64>| now?.checked_sub(earlier_count?);
        Traffic {
            total_bytes: count_since(self.total_bytes, earlier.total_bytes),
            local_bytes: count_since(self.local_bytes, earlier.local_bytes),
        }
    }

    /// The sum of both traffics; absent if either is.
    pub fn sum(self, other: Traffic) -> Traffic {
        let sum = |a: Option<u64>, b: Option<u64>| Some(a? + b?);
        Traffic {
            total_bytes: sum(self.total_bytes, other.total_bytes),
            local_bytes: sum(self.local_bytes, other.local_bytes),
        }
    }

    pub fn counts(self) -> EventCounts {
        let counts = [
            (CounterEvent::MemoryBytes, self.total_bytes),
            (CounterEvent::LocalMemoryBytes, self.local_bytes),
        ];
        EventCounts::exact(
            counts
                .into_iter()
                .filter_map(|(event, count)| Some((event, count?))),
        )
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
        let group = Path::new("/r/g");
        let set = |energy: &str, stalls: &str| {
            let dir = "/r/g/mon_data/mon_PERF_PKG_01";
            host.set_file(&format!("{dir}/core_energy"), energy);
            host.set_file(&format!("{dir}/stalls_llc_miss"), stalls);
            PackageReadings::read(&host, group, 1)
        };
        let (before, after) = (
            set("42.375\n", "100\n"),
            set("43.000001\n", "Unavailable\n"),
        );
        assert_eq!(before.core_joules, Some(42.375));
        let counts = after.counts_since(before);
        assert_eq!(
            counts.get(CounterEvent::CoreEnergyMicrojoules),
            Some(625_001.0)
        );
        let stalls = CounterEvent::StallCycles(StallCause::LocalMemory);
        assert_eq!(counts.get(stalls), None, "unavailable is not zero");
        let later = set("43.5", "150");
        assert_eq!(later.counts_since(before).get(stalls), Some(50.0));
        assert!(
            before.counts_since(after).0.is_empty(),
            "a reset is no count"
        );
        assert_eq!(set("nan", "1").core_joules, None);
        assert_eq!(
            PackageReadings::read(&host, group, 0),
            PackageReadings::default()
        );
    }

    /// Is an unavailable reading absent, and a difference present only if both readings are?
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
        let now = Traffic::read(&host, group, 1, all);
        assert_eq!(
            now,
            Traffic {
                total_bytes: Some(500),
                local_bytes: None
            }
        );
        let then = Traffic {
            total_bytes: Some(200),
            local_bytes: Some(100),
        };
        assert_eq!(
            now.difference(then).counts().get(CounterEvent::MemoryBytes),
            Some(300.0)
        );
        assert_eq!(
            now.difference(then)
                .counts()
                .get(CounterEvent::LocalMemoryBytes),
            None
        );
        assert_eq!(
            then.difference(now),
            Traffic::default(),
            "a counter that began anew says nothing"
        );
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
