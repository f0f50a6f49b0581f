//! Changes of the host during a window: CPUs that go offline or online, and time in which the host was suspended.
//!
//! Problem: plans must use online CPUs only, and figures from before and after such a change cannot be compared.
//! Method: one file of the kernel is read per window, and the clocks with and without suspended time are compared.
//! Properties: a CPU that was offline at the start joins the last-level cache that it shares with known CPUs, and stays
//! unused if it shares none; if a file cannot be read or understood, the topology stays as it was.

use std::path::Path;
use std::time::Duration;

use cachemate_core::{CacheLevel, CpuSet, Topology};
use rustix::time::ClockId;

use crate::kernel::{KeptFile, Kernel, clock_ns};

/// File with the online CPUs.
pub(crate) const ONLINE_CPUS_PATH: &str = "/sys/devices/system/cpu/online";
/// Upper bound of the number of cache directories of one CPU.
const MAX_CACHE_INDICES: u32 = 16;
/// Shorter differences come from the time between the two clocks' reads.
const MIN_SUSPENDED_TIME: Duration = Duration::from_millis(10);

/// Updates the set of online CPUs from the file [`ONLINE_CPUS_PATH`]; returns whether it has changed.
pub(crate) fn refresh_online(
    kernel: &dyn Kernel,
    online_file: &KeptFile,
    topology: &mut Topology,
) -> bool {
    let Ok(text) = kernel.read_kept(online_file) else {
        return false;
    };
    let Ok(online) = text.trim().parse::<CpuSet>() else {
        return false;
    };
    let known_cpus: CpuSet = topology
        .last_level_caches()
        .flat_map(|cache| cache.cpus.iter())
        .collect();
    online
        .iter()
        .filter(|&cpu| !known_cpus.contains(cpu))
        .for_each(|cpu| join_cache(kernel, topology, cpu));
    let cpus_with_cache: CpuSet = topology
        .last_level_caches()
        .flat_map(|cache| cache.cpus.iter())
        .collect();
    let usable_cpus = online.intersection(&cpus_with_cache);
    if usable_cpus.is_empty() || usable_cpus == topology.online() {
        return false;
    }
    topology
        .cpus
        .iter_mut()
        .for_each(|cpu| cpu.online = usable_cpus.contains(cpu.id.0));
    true
}

/// Adds a CPU without a known cache to the last-level cache that it shares according to the kernel.
fn join_cache(kernel: &dyn Kernel, topology: &mut Topology, cpu: u32) {
    for index in 0..MAX_CACHE_INDICES {
        let file_path =
            |name: &str| format!("/sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}");
        let read_text = |name: &str| {
            kernel
                .read(Path::new(&file_path(name)))
                .map(|text| text.trim().to_string())
        };
        let (Ok(level), Ok(shared_list)) = (read_text("level"), read_text("shared_cpu_list"))
        else {
            return;
        };
        let Ok(shared_cpus) = shared_list.parse::<CpuSet>() else {
            continue;
        };
        let last_level = topology.caches.iter_mut().filter(|cache| cache.last_level);
        let mut matching_caches = last_level.filter(|cache| {
            level_digit(cache.level) == level && cache.cpus.intersects(&shared_cpus)
        });
        if let Some(cache) = matching_caches.next() {
            cache.cpus.insert(cpu);
        }
    }
}

/// The number of a cache level in the kernel's files.
fn level_digit(level: CacheLevel) -> &'static str {
    match level {
        CacheLevel::L1Instruction | CacheLevel::L1Data => "1",
        CacheLevel::L2 => "2",
        CacheLevel::L3 => "3",
        CacheLevel::L4 => "4",
    }
}

/// Suspended time of the host since its boot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SuspendClock(Duration);

impl SuspendClock {
    pub(crate) fn read_clocks() -> Self {
        let monotonic_ns = clock_ns(ClockId::Monotonic);
        let suspended_ns = clock_ns(ClockId::Boottime).saturating_sub(monotonic_ns);
        SuspendClock(Duration::from_nanos(suspended_ns))
    }

    /// Whether the host was suspended since the last call. Steps of the wall clock change neither clock.
    pub(crate) fn advance(&mut self, now: SuspendClock) -> bool {
        let previous = std::mem::replace(self, now);
        now.0.saturating_sub(previous.0) >= MIN_SUSPENDED_TIME
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;
    use cachemate_core::test_support::{last_level_caches, topology_fixture};

    /// Two last-level caches of two CPUs, and a CPU 4 that was offline at the start.
    fn topology() -> Topology {
        let mut topology = Topology {
            cpus: topology_fixture(5).cpus,
            ..last_level_caches(2, 2, CacheLevel::L3, 8 << 20)
        };
        topology.cpus[4].online = false;
        topology
    }

    /// Are CPUs that go offline and online tracked, with the domains that they share, and reported once?
    #[test]
    fn cpus_that_turn_offline_and_online_are_tracked() {
        let (host, mut topology) = (FakeHost::default(), topology());
        assert!(
            !refresh_online(
                &host,
                &KeptFile::new(ONLINE_CPUS_PATH.into()),
                &mut topology
            ),
            "no such file"
        );
        for (text, online, domains, changed) in [
            ("0-3\n", "0-3", 2, false),
            ("0-1,3\n", "0-1,3", 2, true),
            ("0-1,3\n", "0-1,3", 2, false),
            ("0\n", "0", 1, true),
            ("0-4\n", "0-3", 2, true),
        ] {
            host.set_file(ONLINE_CPUS_PATH, text);
            assert_eq!(
                refresh_online(
                    &host,
                    &KeptFile::new(ONLINE_CPUS_PATH.into()),
                    &mut topology
                ),
                changed,
                "{text}"
            );
            assert_eq!(topology.online().to_string(), online, "{text}");
            assert_eq!(topology.last_level_domains().len(), domains, "{text}");
        }
    }

    /// Is a CPU that was offline at the start used from then on when it comes, on the cache that it shares, and one
    /// that shares no known cache left alone?
    #[test]
    fn a_cpu_that_comes_online_later_joins_its_cache() {
        let (host, mut topology) = (FakeHost::default(), topology());
        for (index, level, shared) in [(0, "1", "4"), (1, "2", "2,4"), (2, "3", "2-4")] {
            let dir = format!("/sys/devices/system/cpu/cpu4/cache/index{index}");
            host.set_file(&format!("{dir}/level"), level);
            host.set_file(&format!("{dir}/shared_cpu_list"), shared);
        }
        host.set_file(ONLINE_CPUS_PATH, "0-4\n");
        assert!(refresh_online(
            &host,
            &KeptFile::new(ONLINE_CPUS_PATH.into()),
            &mut topology
        ));
        assert_eq!(topology.online().to_string(), "0-4");
        assert_eq!(topology.caches[1].cpus.to_string(), "2-4");
        host.set_file(ONLINE_CPUS_PATH, "0-3\n");
        assert!(refresh_online(
            &host,
            &KeptFile::new(ONLINE_CPUS_PATH.into()),
            &mut topology
        ));
        let mut topology = self::topology();
        host.set_file(
            "/sys/devices/system/cpu/cpu4/cache/index2/shared_cpu_list",
            "4-5",
        );
        host.set_file(ONLINE_CPUS_PATH, "0-4\n");
        assert!(!refresh_online(
            &host,
            &KeptFile::new(ONLINE_CPUS_PATH.into()),
            &mut topology
        ));
        assert_eq!(topology.online().to_string(), "0-3");
    }

    /// Does a file that names no usable CPU, or is not understood, change nothing?
    #[test]
    fn a_file_without_a_usable_cpu_changes_nothing() {
        let (host, mut topology) = (FakeHost::default(), topology());
        for text in ["", "4\n", "3-1\n", "none\n"] {
            host.set_file(ONLINE_CPUS_PATH, text);
            assert!(
                !refresh_online(
                    &host,
                    &KeptFile::new(ONLINE_CPUS_PATH.into()),
                    &mut topology
                ),
                "{text}"
            );
            assert_eq!(topology.online().to_string(), "0-3");
        }
    }

    /// Is a suspension noticed once, and a difference in the clocks' read times ignored?
    #[test]
    fn a_suspension_is_reported_once() {
        let mut clock = SuspendClock(Duration::from_secs(5));
        assert!(!clock.advance(SuspendClock(Duration::from_millis(5_009))));
        assert!(clock.advance(SuspendClock(Duration::from_secs(35))));
        assert!(!clock.advance(SuspendClock(Duration::from_secs(35))));
        assert!(
            !clock.advance(SuspendClock(Duration::from_secs(34))),
            "clocks are not read at once"
        );
        assert!(!SuspendClock::read_clocks().advance(SuspendClock::read_clocks()));
    }
}
