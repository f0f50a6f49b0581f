//! Use of the host's caches by all programs, for the status: busy CPUs, memory traffic, occupancy, free classes, and the
//! lines that each thread fills.

use std::collections::BTreeMap;

use cachemate_core::{
    Cache, ContentionFacts, CounterEvent, CounterScope, ProbeEvidence, TaskSample, WindowRecord,
};
use cachemate_linux::act::resctrl::CacheUse;
use cachemate_linux::kernel::Kernel;
use cachemate_linux::sense::cpu_load::CpuLoadReader;
use serde::{Deserialize, Serialize};

/// Use of one cache by all programs; a reading that this host lacks is `None`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CacheReadings {
    /// Mean number of busy CPUs in the last second.
    pub busy_cpus: Option<f64>,
    /// Memory traffic in both directions.
    pub memory_bytes_per_second: Option<f64>,
    /// Bytes that lines occupy.
    pub occupancy_bytes: Option<u64>,
    /// Classes of service that no group uses.
    pub free_classes: Option<u32>,
}

/// Latest readings of the host.
#[derive(Default)]
pub(crate) struct HostUse {
    loads: CpuLoadReader,
    busy_share_by_cpu: BTreeMap<u32, f64>,
    cache_use: Vec<CacheUse>,
    /// Bytes per second that a program fills if a probe finds all of its lines evicted.
    full_probe_rate: Option<f64>,
}

impl HostUse {
    /// Reads what changes slowly.
    pub(crate) fn refresh(&mut self, kernel: &dyn Kernel, cache_use: Vec<CacheUse>) {
        self.busy_share_by_cpu = self.loads.read(kernel);
        self.cache_use = cache_use;
    }

    /// Observes the probes of one window.
    pub(crate) fn observe(&mut self, record: &WindowRecord) {
        for result in &record.observation.probe_results {
            if let ProbeEvidence::PrimeProbe {
                buffer_bytes,
                wait_ns,
                ..
            } = result.evidence
                && wait_ns > 0
            {
                self.full_probe_rate = Some(buffer_bytes as f64 * 1e9 / wait_ns as f64);
            }
        }
    }

    /// Bytes per second that a thread fills into the last level: its counted misses or, without counters, the lines that
    /// it evicts while a probe waits.
    pub(crate) fn fill_bytes_per_second(
        &self,
        sample: &TaskSample,
        cache: &Cache,
        elapsed_ns: u64,
        contention: &ContentionFacts,
    ) -> Option<f64> {
        if elapsed_ns == 0 {
            return None;
        }
        if let Some(misses) = sample.counts.get(CounterEvent::Misses(cache.level)) {
            return Some(misses * f64::from(cache.line_bytes?) * 1e9 / elapsed_ns as f64);
        }
        let evicted_share = contention.intensity.as_ref()?.value.clamp(0.0, 1.0);
        Some(evicted_share * self.full_probe_rate? * sample.ran_ns() as f64 / elapsed_ns as f64)
    }

    /// The readings of a cache. Its busy CPUs are known only if the load of each of them is.
    pub(crate) fn cache_readings(&self, cache: &Cache, record: &WindowRecord) -> CacheReadings {
        let busy_shares: Option<Vec<f64>> = cache
            .cpus
            .iter()
            .map(|cpu| self.busy_share_by_cpu.get(&cpu).copied())
            .collect();
        let span_ns = record.observation.span.elapsed_ns;
        let counts = record
            .observation
            .shared_counts
            .iter()
            .find(|(scope, _)| *scope == CounterScope::Cache(cache.id));
        let traffic = counts
            .and_then(|(_, counts)| counts.get(CounterEvent::MemoryBytes))
            .filter(|_| span_ns > 0);
        let cache_use = self.cache_use.iter().find(|used| used.cache == cache.id);
        CacheReadings {
            busy_cpus: busy_shares.map(|shares| shares.iter().sum()),
            memory_bytes_per_second: traffic.map(|bytes| bytes * 1e9 / span_ns as f64),
            occupancy_bytes: cache_use.and_then(|used| used.occupancy_bytes),
            free_classes: cache_use.and_then(|used| used.free_classes),
        }
    }
}
