//! Capabilities of the interval machine, in the form in which a host reports its own.

use std::collections::BTreeMap;

use cachemate_core::{Ability, Capabilities, MachineSpec, PartitionSupport, Support, Topology};

fn supported_with_note(note: &str) -> Support {
    Support::Yes { note: (!note.is_empty()).then(|| note.to_string()) }
}
fn unsupported_because(reason: &str) -> Support {
    Support::No { reason: reason.to_string(), remedy: None }
}

/// Returns the capabilities of this model, which has no sets, no single addresses and no penalties.
pub fn model_capabilities(spec: &MachineSpec, topology: &Topology) -> Capabilities {
    let has_ways = spec.caches.iter().any(|cache| cache.way_partitions.is_some());
    let supported_if = |is_supported: bool, reason: &str| {
        if is_supported { supported_with_note("") } else { unsupported_because(reason) }
    };
    let counters = format!("{} at once", spec.counters.count);
    let abilities = BTreeMap::from([
        (Ability::CountPerTask, supported_with_note(&counters)),
        (Ability::CountPerCache, supported_with_note("")),
        (Ability::CacheOccupancy, supported_if(has_ways, "no cache of this machine has monitoring")),
        (Ability::TraceAddresses, supported_with_note("addresses are drawn from the program's curve")),
        (Ability::SampleAccesses, supported_with_note("of shared regions")),
        (Ability::SampleReuses, supported_with_note("")),
        (Ability::CountSuperSets, unsupported_because("the interval machine has no sets")),
        (Ability::ProbeFromOutside, supported_with_note("")),
        (Ability::Affinity, supported_with_note("")),
        (Ability::Weights, supported_with_note("")),
        (Ability::Gangs, supported_with_note("")),
        (Ability::Penalties, unsupported_because("time sharing is averaged, so no task is picked individually")),
        (Ability::Colors, supported_if(spec.pages.colors.is_some(), "this machine's kernel does not color pages")),
        (Ability::Ways, supported_if(has_ways, "no cache of this machine can be divided by ways")),
    ]);
    let mut partitions = Vec::new();
    for cache in &topology.caches {
        if let Some(colors) = spec.pages.colors.filter(|_| cache.last_level) {
            let move_page_ns = spec.pages.migration_cycles as f64 * 1e9 / spec.hertz as f64;
            let page_bytes = spec.pages.page_bytes;
            partitions
                .push((cache.id, PartitionSupport::Colors { colors, page_bytes, page_migration_ns: move_page_ns }));
        }
        let cache_spec =
            spec.caches.iter().find(|candidate_spec| candidate_spec.level == cache.level && cache.last_level);
        if let Some((described, ways)) = cache_spec.and_then(|described| Some((described, described.way_partitions?))) {
            let partition = PartitionSupport::Ways {
                ways: described.ways,
                min_ways: ways.min_ways,
                contiguous: ways.contiguous,
                max_groups: ways.groups,
            };
            partitions.push((cache.id, partition));
        }
    }
    Capabilities { abilities, partitions, min_window_ns: 1_000_000, min_slice_ns: Some(100_000) }
}
