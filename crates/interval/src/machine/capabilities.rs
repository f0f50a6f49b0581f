//! Capabilities of the interval machine, in the form in which a host reports its own.

use std::collections::BTreeMap;

use cachemate_core::{Ability, Capabilities, MachineSpec, PartitionSupport, Support, Topology};

/// This model has no sets, no single addresses and no penalties.
pub fn model_capabilities(spec: &MachineSpec, topology: &Topology) -> Capabilities {
    let has_ways = spec
        .caches
        .iter()
        .any(|cache| cache.way_partitions.is_some());
    let counters = format!("{} at once", spec.counters.count);

    let abilities = BTreeMap::from([
        (Ability::CountPerTask, Support::with_note(&counters)),
        (Ability::CountPerCache, Support::with_note("")),
        (
            Ability::CacheOccupancy,
            Support::provided(has_ways, "no cache of this machine has monitoring"),
        ),
        (
            Ability::TraceAddresses,
            Support::with_note("addresses are drawn from the program's curve"),
        ),
        (
            Ability::SampleAccesses,
            Support::with_note("of shared regions"),
        ),
        (Ability::SampleReuses, Support::with_note("")),
        (
            Ability::CountSuperSets,
            Support::provided(false, "the interval machine has no sets"),
        ),
        (Ability::ProbeFromOutside, Support::with_note("")),
        (Ability::Affinity, Support::with_note("")),
        (Ability::Weights, Support::with_note("")),
        (Ability::Gangs, Support::with_note("")),
        (
            Ability::Penalties,
            Support::provided(
                false,
                "time sharing is averaged, so no task is picked individually",
            ),
        ),
        (
            Ability::Colors,
            Support::provided(
                spec.pages.colors.is_some(),
                "this machine's kernel does not color pages",
            ),
        ),
        (
            Ability::Ways,
            Support::provided(has_ways, "no cache of this machine can be divided by ways"),
        ),
        (
            Ability::Bandwidth,
            Support::provided(
                spec.memory.bandwidth_limits.is_some(),
                "this machine limits no bandwidth",
            ),
        ),
    ]);

    let last_level_caches = topology.caches.iter().filter(|cache| cache.last_level);
    let partitions = last_level_caches
        .flat_map(|cache| PartitionSupport::of_modeled_cache(spec, cache))
        .collect();
    Capabilities {
        abilities,
        partitions,
        bandwidth: topology
            .last_level_caches()
            .filter_map(|cache| Some((cache.id, spec.memory.bandwidth_limits?)))
            .collect(),
        min_window_ns: 1_000_000,
        min_slice_ns: Some(100_000),
    }
}
