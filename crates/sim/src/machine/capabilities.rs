//! Capabilities of the simulated machine, derived from its specification alone, as a host survey would find them.

use std::collections::BTreeMap;

use cachemate_core::{Ability, Cache, Capabilities, MachineSpec, PartitionSupport, SamplerModel, Support, Topology};

use super::setup::NominalClock;

/// Minimum length of windows and slices, in cycles; shorter ones would consist of overhead only.
const MIN_WINDOW_CYCLES: u64 = 10_000;
const MIN_SLICE_CYCLES: u64 = 1_000;

fn support_with_note(note: impl Into<String>) -> Support {
    let note: String = note.into();
    Support::Yes { note: (!note.is_empty()).then_some(note) }
}
fn no_support(reason: &str) -> Support {
    Support::No { reason: reason.to_string(), remedy: None }
}

/// Returns the capabilities that a machine really has.
pub fn true_capabilities(spec: &MachineSpec, topology: &Topology, clock: NominalClock) -> Capabilities {
    let sampler = spec.counters.sampler;
    let has_way_partitions = spec.caches.iter().any(|cache| cache.way_partitions.is_some());
    let (sampling_note, tracing_note) = match sampler {
        SamplerModel::Ideal => ("every event, exactly", "every miss, exactly"),
        SamplerModel::LastAddress => {
            ("the last address only; stale after prefetches", "events between two traps are lost")
        }
        SamplerModel::Tagged => ("tagged accesses with source and latency", "accesses in flight together are lost"),
    };
    let abilities = BTreeMap::from([
        (Ability::CountPerTask, support_with_note(format!("{} at once", spec.counters.count))),
        (Ability::CountPerCache, support_with_note("")),
        (
            Ability::CacheOccupancy,
            if has_way_partitions {
                support_with_note("")
            } else {
                no_support("no cache of this machine has monitoring")
            },
        ),
        (Ability::TraceAddresses, support_with_note(tracing_note)),
        (Ability::SampleAccesses, support_with_note(sampling_note)),
        (Ability::SampleReuses, support_with_note("")),
        (
            Ability::CountSuperSets,
            if sampler == SamplerModel::Ideal {
                support_with_note("")
            } else {
                no_support("this machine's counters do not count super sets")
            },
        ),
        (Ability::ProbeFromOutside, support_with_note("")),
        (Ability::Affinity, support_with_note("")),
        (Ability::Weights, support_with_note("")),
        (Ability::Gangs, support_with_note("")),
        (Ability::Penalties, support_with_note("")),
        (
            Ability::Colors,
            if spec.pages.colors.is_some() {
                support_with_note("")
            } else {
                no_support("this machine's kernel does not color pages")
            },
        ),
        (
            Ability::Ways,
            if has_way_partitions {
                support_with_note("")
            } else {
                no_support("no cache of this machine can be divided by ways")
            },
        ),
    ]);
    let partitions = topology.caches.iter().flat_map(|cache| partitions_of(spec, cache)).collect();
    Capabilities {
        abilities,
        partitions,
        min_window_ns: clock.to_nominal_ns(MIN_WINDOW_CYCLES),
        min_slice_ns: Some(clock.to_nominal_ns(MIN_SLICE_CYCLES)),
    }
}

fn partitions_of(spec: &MachineSpec, cache: &Cache) -> Vec<(cachemate_core::CacheId, PartitionSupport)> {
    let mut partitions = Vec::new();
    if let Some(colors) = spec.pages.colors.filter(|_| cache.last_level) {
        let page_migration_ns = spec.pages.migration_cycles as f64 * 1e9 / spec.hertz as f64;
        partitions.push((
            cache.id,
            PartitionSupport::Colors { colors, page_bytes: spec.pages.page_bytes, page_migration_ns },
        ));
    }
    let level_spec = spec.caches.iter().find(|candidate_spec| candidate_spec.level == cache.level);
    if let Some((cache_spec, way_partitions)) =
        level_spec.and_then(|candidate_spec| Some((candidate_spec, candidate_spec.way_partitions?)))
    {
        let partition = PartitionSupport::Ways {
            ways: cache_spec.ways,
            min_ways: way_partitions.min_ways,
            contiguous: way_partitions.contiguous,
            max_groups: way_partitions.groups,
        };
        partitions.push((cache.id, partition));
    }
    partitions
}
