//! Capabilities of the simulated machine, derived from its specification alone, as a host survey would find them.

use std::collections::BTreeMap;

use cachemate_core::{
    Ability, Capabilities, MachineSpec, PartitionSupport, SamplerModel, Support, Topology,
};

use super::setup::NominalClock;

/// Minimum length of windows and slices, in cycles; shorter ones would consist of overhead only.
const MIN_WINDOW_CYCLES: u64 = 10_000;
const MIN_SLICE_CYCLES: u64 = 1_000;

/// What the simulated machine really can do.
pub fn true_capabilities(
    spec: &MachineSpec,
    topology: &Topology,
    clock: NominalClock,
) -> Capabilities {
    let sampler = spec.counters.sampler;
    let has_way_partitions = spec
        .caches
        .iter()
        .any(|cache| cache.way_partitions.is_some());

    let (sampling_note, tracing_note) = match sampler {
        SamplerModel::Ideal => ("every event, exactly", "every miss, exactly"),
        SamplerModel::LastAddress => (
            "the last address only; stale after prefetches",
            "events between two traps are lost",
        ),
        SamplerModel::Tagged => (
            "tagged accesses with source and latency",
            "accesses in flight together are lost",
        ),
    };

    let abilities = BTreeMap::from([
        (
            Ability::CountPerTask,
            Support::with_note(format!("{} at once", spec.counters.count)),
        ),
        (Ability::CountPerCache, Support::with_note("")),
        (
            Ability::CacheOccupancy,
            Support::provided(
                has_way_partitions,
                "no cache of this machine has monitoring",
            ),
        ),
        (Ability::TraceAddresses, Support::with_note(tracing_note)),
        (Ability::SampleAccesses, Support::with_note(sampling_note)),
        (Ability::SampleReuses, Support::with_note("")),
        (
            Ability::CountSuperSets,
            Support::provided(
                sampler == SamplerModel::Ideal,
                "this machine's counters do not count super sets",
            ),
        ),
        (Ability::ProbeFromOutside, Support::with_note("")),
        (Ability::Affinity, Support::with_note("")),
        (Ability::Weights, Support::with_note("")),
        (Ability::Gangs, Support::with_note("")),
        (Ability::Penalties, Support::with_note("")),
        (
            Ability::Colors,
            Support::provided(
                spec.pages.colors.is_some(),
                "this machine's kernel does not color pages",
            ),
        ),
        (
            Ability::Ways,
            Support::provided(
                has_way_partitions,
                "no cache of this machine can be divided by ways",
            ),
        ),
        (
            Ability::Bandwidth,
            Support::provided(false, "the cycle-level machine limits no bandwidth"),
        ),
    ]);

    let partitions = topology
        .caches
        .iter()
        .flat_map(|cache| PartitionSupport::of_modeled_cache(spec, cache))
        .collect();
    Capabilities {
        abilities,
        partitions,
        bandwidth: Vec::new(),
        min_window_ns: clock.to_nominal_ns(MIN_WINDOW_CYCLES),
        min_slice_ns: Some(clock.to_nominal_ns(MIN_SLICE_CYCLES)),
    }
}
