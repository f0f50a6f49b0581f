//! Capabilities of the simulated machine, derived from its specification alone, as a host survey would find them.

use std::collections::BTreeMap;

use cachemate_core::{Ability, Cache, Capabilities, MachineSpec, PartitionSupport, SamplerModel, Support, Topology};

use super::setup::NominalClock;

/// Minimum length of windows and slices, in cycles; shorter ones would consist of overhead only.
const SHORTEST_WINDOW_CYCLES: u64 = 10_000;
const SHORTEST_SLICE_CYCLES: u64 = 1_000;

fn supported(note: impl Into<String>) -> Support {
    let note: String = note.into();
    Support::Yes { note: (!note.is_empty()).then_some(note) }
}
fn unsupported(reason: &str) -> Support {
    Support::No { reason: reason.to_string(), remedy: None }
}

/// Returns the capabilities that a machine really has.
pub fn true_capabilities(spec: &MachineSpec, topology: &Topology, clock: NominalClock) -> Capabilities {
    let sampler = spec.counters.sampler;
    let ways = spec.caches.iter().any(|cache| cache.way_partitions.is_some());
    let (sampling, tracing) = match sampler {
        SamplerModel::Ideal => ("every event, exactly", "every miss, exactly"),
        SamplerModel::LastAddress => {
            ("the last address only; stale after prefetches", "events between two traps are lost")
        }
        SamplerModel::Tagged => ("tagged accesses with source and latency", "accesses in flight together are lost"),
    };
    let abilities = BTreeMap::from([
        (Ability::CountPerTask, supported(format!("{} at once", spec.counters.count))),
        (Ability::CountPerCache, supported("")),
        (
            Ability::CacheOccupancy,
            if ways { supported("") } else { unsupported("no cache of this machine has monitoring") },
        ),
        (Ability::TraceAddresses, supported(tracing)),
        (Ability::SampleAccesses, supported(sampling)),
        (Ability::SampleReuses, supported("")),
        (
            Ability::CountSuperSets,
            if sampler == SamplerModel::Ideal {
                supported("")
            } else {
                unsupported("this machine's counters do not count super sets")
            },
        ),
        (Ability::ProbeFromOutside, supported("")),
        (Ability::Affinity, supported("")),
        (Ability::Weights, supported("")),
        (Ability::Gangs, supported("")),
        (Ability::Penalties, supported("")),
        (
            Ability::Colors,
            if spec.pages.colors.is_some() {
                supported("")
            } else {
                unsupported("this machine's kernel does not color pages")
            },
        ),
        (
            Ability::Ways,
            if ways { supported("") } else { unsupported("no cache of this machine can be divided by ways") },
        ),
    ]);
    let partitions = topology.caches.iter().flat_map(|cache| partitions_of(spec, cache)).collect();
    Capabilities {
        abilities,
        partitions,
        min_window_ns: clock.nominal_ns(SHORTEST_WINDOW_CYCLES),
        min_slice_ns: Some(clock.nominal_ns(SHORTEST_SLICE_CYCLES)),
    }
}

fn partitions_of(spec: &MachineSpec, cache: &Cache) -> Vec<(cachemate_core::CacheId, PartitionSupport)> {
    let mut partitions = Vec::new();
    if let Some(colors) = spec.pages.colors.filter(|_| cache.last_level) {
        let move_page_ns = spec.pages.migration_cycles as f64 * 1e9 / spec.hertz as f64;
        partitions.push((
            cache.id,
            PartitionSupport::Colors { colors, page_bytes: spec.pages.page_bytes, page_migration_ns: move_page_ns },
        ));
    }
    let of_level = spec.caches.iter().find(|described| described.level == cache.level);
    if let Some((described, ways)) = of_level.and_then(|described| Some((described, described.way_partitions?))) {
        let partition = PartitionSupport::Ways {
            ways: described.ways,
            min_ways: ways.min_ways,
            contiguous: ways.contiguous,
            max_groups: ways.groups,
        };
        partitions.push((cache.id, partition));
    }
    partitions
}
