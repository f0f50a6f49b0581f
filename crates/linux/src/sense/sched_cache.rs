//! The kernel's own cache-aware scheduling (`SCHED_CACHE`, Linux 7.2 and later): its settings, and affinities that
//! counteract it.
//!
//! Its knobs are files in debugfs; the cache that it prefers for a process is not visible. It measures a process's
//! footprint by the faults of NUMA balancing, so footprints are not considered without NUMA balancing or a second
//! memory node. Source: Linux 7.2, `kernel/sched/debug.c` and `kernel/sched/fair.c`.

use std::io;
use std::path::Path;

use cachemate_core::{CpuSet, Topology};
use serde::{Deserialize, Serialize};

use crate::kernel::Kernel;

/// Directory of its knobs.
pub const KNOBS_DIR: &str = "/sys/kernel/debug/sched/llc_balancing";

/// The scheduler's settings. A setting that cannot be read is `None`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SchedCacheStatus {
    /// Whether it is enabled; `None` if this kernel lacks it, or does not report it.
    pub enabled: Option<bool>,
    /// Tolerance: 0 = no threads are aggregated; 1 = threads and footprint must fit; 100 = neither is considered.
    pub aggr_tolerance: Option<u32>,
    /// Are footprints counted, by NUMA balancing over two memory nodes or more?
    pub counts_footprints: Option<bool>,
    /// The settings as a sentence, or the reason why they cannot be read.
    pub detail: String,
}

impl SchedCacheStatus {
    /// Does the kernel aggregate processes on this host, according to its settings?
    pub fn is_aggregating(&self) -> bool {
        self.enabled == Some(true) && self.aggr_tolerance != Some(0)
    }
}

/// Reads the settings.
pub fn read_status(kernel: &dyn Kernel) -> SchedCacheStatus {
    let read_number = |name: &str| -> Option<u32> {
        read_text(kernel, &Path::new(KNOBS_DIR).join(name))?
            .parse()
            .ok()
    };
    let enabled = match read_text(kernel, &Path::new(KNOBS_DIR).join("enabled")).as_deref() {
        Some("Y" | "1") => Some(true),
        Some("N" | "0") => Some(false),
        _ => None,
    };
    let Some(is_enabled) = enabled else {
        return SchedCacheStatus {
            detail: describe_absence(kernel),
            ..SchedCacheStatus::default()
        };
    };
    let aggr_tolerance = read_number("aggr_tolerance");
    let balances_numa =
        read_text(kernel, Path::new("/proc/sys/kernel/numa_balancing")).map(|text| text != "0");
    let online_nodes = read_text(kernel, Path::new("/sys/devices/system/node/online"));
    let has_several_nodes = online_nodes.map(|nodes| nodes.contains(['-', ',']));
    let counts_footprints = match (balances_numa, has_several_nodes) {
        (Some(balancing), Some(several)) => Some(balancing && several),
        (Some(false), None) | (None, Some(false)) => Some(false),
        _ => None,
    };
    let footprint_clause = match counts_footprints {
        Some(true) => "footprints are counted by NUMA balancing",
        Some(false) => {
            "footprints are ignored, because NUMA balancing is off or there is one memory node"
        }
        None => "whether footprints are counted is not known",
    };
    let detail = match (is_enabled, aggr_tolerance) {
        (false, _) => "off".to_string(),
        (true, Some(tolerance)) => format!("on, tolerance {tolerance}; {footprint_clause}"),
        (true, None) => format!("on, its tolerance cannot be read; {footprint_clause}"),
    };
    SchedCacheStatus {
        enabled,
        aggr_tolerance,
        counts_footprints,
        detail,
    }
}

fn read_text(kernel: &dyn Kernel, path: &Path) -> Option<String> {
    Some(kernel.read(path).ok()?.trim().to_string())
}

fn describe_absence(kernel: &dyn Kernel) -> String {
    let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    match kernel.list(Path::new("/sys/kernel/debug/sched")) {
        Ok(_) => "this kernel has none (Linux 7.2 or later with CONFIG_SCHED_CACHE)".to_string(),
        Err(error) if is_denied(&error) => "not known: debugfs is root's".to_string(),
        Err(_) => {
            "not known: debugfs is not mounted, or shows nothing of the scheduler".to_string()
        }
    }
}

/// The placement of a managed thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacedThread {
    /// Its process.
    pub pid: i32,
    /// CPUs that the plan in force allows it; `None` if it allows all.
    pub allowed_cpus: Option<CpuSet>,
}

/// Conflicts between the plan's affinities and the kernel's preferred cache for one process, one sentence each.
pub fn find_conflicts(
    status: &SchedCacheStatus,
    topology: &Topology,
    pid: i32,
    threads: &[PlacedThread],
) -> Vec<String> {
    let own_threads: Vec<&PlacedThread> =
        threads.iter().filter(|thread| thread.pid == pid).collect();
    // The kernel aggregates nothing if it is off, and neither a process of one thread nor on one cache.
    if !status.is_aggregating() || own_threads.len() < 2 || topology.last_level_caches().count() < 2
    {
        return Vec::new();
    }
    let caches_of = |cpus: &CpuSet| -> Vec<u32> {
        let caches = topology
            .last_level_caches()
            .filter(|cache| cache.cpus.intersects(cpus));
        caches.map(|cache| cache.id.0).collect()
    };
    let allowed_caches: Vec<Vec<u32>> = own_threads
        .iter()
        .filter_map(|thread| thread.allowed_cpus.as_ref().map(caches_of))
        .collect();
    let mut confining_caches: Vec<u32> = allowed_caches
        .iter()
        .filter(|caches| caches.len() == 1)
        .flatten()
        .copied()
        .collect();
    confining_caches.sort_unstable();
    confining_caches.dedup();
    let free_count = own_threads.len()
        - allowed_caches
            .iter()
            .filter(|caches| caches.len() == 1)
            .count();
    let cache_list = confining_caches
        .iter()
        .map(u32::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    match (confining_caches.len(), free_count) {
        (0, _) | (1, 0) => Vec::new(),
        (1, free) => vec![format!(
            "the kernel gathers this process on the cache where it runs most; {free} of its threads are free to follow, the \
             others are tied to cache {cache_list}: if that is another cache, the kernel pulls the free ones away from them"
        )],
        (_, free) => vec![format!(
            "the kernel prefers one cache for this process; the plan ties its threads to caches {cache_list}, which the kernel \
             cannot change: it asks in vain for those that are elsewhere, and pulls the {free} free ones to one side"
        )],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::act::resctrl::fake_tests::topology;
    use crate::fake_tests::FakeHost;

    fn host(enabled: &str, tolerance: &str, balancing: &str, nodes: &str) -> FakeHost {
        let host = FakeHost::default();
        host.set_file(&format!("{KNOBS_DIR}/enabled"), enabled);
        host.set_file(&format!("{KNOBS_DIR}/aggr_tolerance"), tolerance);
        host.set_file("/proc/sys/kernel/numa_balancing", balancing);
        host.set_file("/sys/devices/system/node/online", nodes);
        host
    }

    /// Is the state read from the kernel's files, and are missing settings absent?
    #[test]
    fn the_state_is_read_from_the_kernels_files() {
        let on = read_status(&host("Y\n", "1\n", "1\n", "0-1\n"));
        assert_eq!(
            (on.enabled, on.aggr_tolerance, on.counts_footprints),
            (Some(true), Some(1), Some(true))
        );
        assert_eq!(
            on.detail,
            "on, tolerance 1; footprints are counted by NUMA balancing"
        );
        assert!(on.is_aggregating());
        let one_node = read_status(&host("Y\n", "3\n", "1\n", "0\n"));
        assert_eq!(
            (one_node.counts_footprints, one_node.is_aggregating()),
            (Some(false), true)
        );
        assert!(!read_status(&host("N\n", "1\n", "0\n", "0\n")).is_aggregating());
        assert!(!read_status(&host("Y\n", "0\n", "0\n", "0\n")).is_aggregating());
        let odd = read_status(&host("Y\n", "x\n", "0\n", "0\n"));
        assert_eq!(odd.aggr_tolerance, None);
        assert!(
            odd.detail.contains("its tolerance cannot be read"),
            "{}",
            odd.detail
        );
    }

    /// Is a kernel without cache-aware scheduling distinguished from one that does not report it?
    #[test]
    fn an_absent_scheduler_is_distinguished_from_an_unreported_one() {
        let none = FakeHost::default();
        none.set_file("/sys/kernel/debug/sched/features", "GENTLE_FAIR_SLEEPERS\n");
        assert!(read_status(&none).detail.contains("CONFIG_SCHED_CACHE"));
        assert!(read_status(&FakeHost::default()).detail.contains("debugfs"));
        none.reads_fail.set(Some(libc::EACCES));
        assert_eq!(read_status(&none).enabled, None);
    }

    /// Is a conflict reported exactly if threads of one process are confined to several caches, or only some of them
    /// are confined?
    #[test]
    fn conflicts_are_reported_exactly_if_threads_are_split() {
        let topology = topology().topology; // two caches of two CPUs
        let on = read_status(&host("Y\n", "1\n", "0\n", "0\n"));
        let thread = |pid, allowed: &str| PlacedThread {
            pid,
            allowed_cpus: (!allowed.is_empty()).then(|| allowed.parse().unwrap()),
        };
        let conflict_text = |state: &SchedCacheStatus, threads: &[PlacedThread]| {
            find_conflicts(state, &topology, 7, threads).join("\n")
        };
        assert!(
            conflict_text(&on, &[thread(7, "0"), thread(7, "2-3")])
                .contains("ties its threads to caches")
        );
        assert!(
            conflict_text(&on, &[thread(7, "0"), thread(7, "")])
                .contains("1 of its threads are free")
        );
        for quiet in [
            vec![thread(7, "0")],
            vec![thread(7, "0"), thread(7, "1")],
            vec![thread(7, ""), thread(7, "0-3")],
        ] {
            assert_eq!(conflict_text(&on, &quiet), "", "{quiet:?}");
        }
        assert_eq!(conflict_text(&on, &[thread(7, "0"), thread(9, "2")]), "");
        let off = read_status(&host("N\n", "1\n", "0\n", "0\n"));
        assert_eq!(conflict_text(&off, &[thread(7, "0"), thread(7, "2-3")]), "");
    }
}
