//! Events that change a simulated machine during a run.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{CpuSet, FieldError, MachineSpec};

/// An event of the machine; exactly one kind is given.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineEvent {
    /// Time of the event, from the start of the run.
    pub at_ns: u64,
    /// Programs outside the run fill lines of a cache from now on.
    pub external_traffic: Option<ExternalTraffic>,
    /// A cache shrinks to a fraction of its full size, as if another tool reserved ways of it.
    pub resize_cache: Option<CacheResize>,
    /// These CPUs leave their cache and share another one of the same size. The topology that policies see stays the
    /// same, as on a host whose firmware or hypervisor misreports it.
    pub split_cpus: Option<CpuSet>,
    /// The CPU with this number goes offline; its tasks move to CPUs that they may use, or wait if there is none.
    pub offline: Option<u32>,
    /// The CPU with this number comes online again.
    pub online: Option<u32>,
}

/// Traffic of programs outside the run in one cache.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExternalTraffic {
    /// The cache by its number among the contended caches.
    pub cache: u32,
    /// Lines filled per second; 0 ends the traffic.
    pub lines_per_second: f64,
}

/// The new size of one cache.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheResize {
    /// The cache by its number among the contended caches.
    pub cache: u32,
    /// Fraction of its full size from now on; greater than 0, at most 1.
    pub size_share: f64,
}

impl MachineEvent {
    /// Checks that the event has one kind, and that `machine` has its caches and CPUs.
    ///
    /// # Errors
    /// The invalid field; an empty path stands for the event itself.
    pub fn check(&self, machine: &MachineSpec) -> Result<(), FieldError> {
        let kinds = [
            self.external_traffic.is_some(),
            self.resize_cache.is_some(),
            self.split_cpus.is_some(),
            self.offline.is_some(),
            self.online.is_some(),
        ];
        let kind_count = kinds.iter().filter(|is_given| **is_given).count();
        if kind_count != 1 {
            let expected = "exactly one of 'external_traffic', 'resize_cache', 'split_cpus', 'offline', 'online'";
            return Err(FieldError::new(
                "",
                format!("{kind_count} kinds of event"),
                expected,
            ));
        }

        let caches = machine
            .last_level_cache()
            .map_or(0, |cache| machine.instance_count(cache));
        let cpus = machine.cpus();

        for (field, cache) in [
            (
                "external_traffic.cache",
                self.external_traffic.map(|traffic| traffic.cache),
            ),
            (
                "resize_cache.cache",
                self.resize_cache.map(|resize| resize.cache),
            ),
        ] {
            if let Some(cache) = cache.filter(|cache| *cache >= caches) {
                let expected = format!(
                    "0 to {}, a contended cache of {}",
                    caches.max(1) - 1,
                    machine.name
                );
                return Err(FieldError::new(field, cache, expected));
            }
        }
        for (field, cpu) in [("offline", self.offline), ("online", self.online)] {
            if let Some(cpu) = cpu.filter(|cpu| *cpu >= cpus) {
                return Err(FieldError::new(
                    field,
                    cpu,
                    format!("0 to {}, a CPU of {}", cpus - 1, machine.name),
                ));
            }
        }
        if let Some(lines) = self
            .external_traffic
            .map(|traffic| traffic.lines_per_second)
            && !(lines.is_finite() && lines >= 0.0)
        {
            return Err(FieldError::new(
                "external_traffic.lines_per_second",
                lines,
                "0 or more",
            ));
        }
        if let Some(share) = self.resize_cache.map(|resize| resize.size_share)
            && !(share > 0.0 && share <= 1.0)
        {
            return Err(FieldError::new(
                "resize_cache.size_share",
                share,
                "more than 0, at most 1",
            ));
        }
        if let Some(split_cpus) = &self.split_cpus {
            let cpus_per_cache = machine
                .last_level_cache()
                .map_or(1, |cache| cache.shared_by_cores)
                * machine.contexts_per_core;
            let cache_numbers = split_cpus
                .iter()
                .map(|cpu| cpu / cpus_per_cache)
                .collect::<BTreeSet<_>>();
            if split_cpus.iter().any(|cpu| cpu >= cpus) || cache_numbers.len() != 1 {
                return Err(FieldError::new(
                    "split_cpus",
                    format!("'{split_cpus}'"),
                    "CPUs of one contended cache",
                ));
            }
        }
        Ok(())
    }
}
