//! Counters of resctrl: occupancy (CMT) and memory traffic (MBM), and the reasons why an occupancy differs from the
//! mask.
//!
//! Problem: users see a group occupy more than its mask allows, or less, and mistake this for a defect. Both are normal: a
//! mask limits where new lines are placed, and existing lines elsewhere stay until they are evicted; ways may be shared
//! with other groups or with input and output; the counters are estimates of a monitor with its own delay. Method:
//! occupancy is read together with the mask, and every reason that applies is reported as a sentence. A counter that
//! the hardware marks as unavailable is absent; traffic is the difference of two readings.
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, `mon_data`, `bit_usage`, "Cache Pseudo-Locking".

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cachemate_core::{CacheLevel, CacheShare, CounterEvent, EventCounts, IndexSet, Units};

use super::info::{MonitoredEvents, ResctrlCache};
use crate::kernel::Kernel;

fn monitor_path(group: &Path, domain: u32, name: &str) -> PathBuf {
    group.join(format!("mon_data/mon_L3_{domain:02}/{name}"))
}

/// A counter's value; the kernel writes `Unavailable` or `Error` if the hardware has no reading.
fn read_counter(kernel: &dyn Kernel, path: &Path) -> Option<u64> {
    kernel.read(path).ok()?.trim().parse().ok()
}

/// Bytes of the last level that the group's lines occupy.
pub fn occupancy_bytes(kernel: &dyn Kernel, group: &Path, domain: u32) -> Option<u64> {
    read_counter(kernel, &monitor_path(group, domain, "llc_occupancy"))
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
                read_counter(kernel, &monitor_path(group, domain, name))
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
        reasons.push(format!("ways {io_ways} are filled by input and output too"));
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
