//! The default policy `auto`, the verifier that judges every policy's changes, and the losses of services.
//!
//! It uses parts of the published policies (`cachemate-papers`: solvers, clusters, units of a cache, parameters), because
//! `auto` combines their mechanisms; nothing there uses anything here.
//! - `auto`: evidence, one model of a task, one search over placements, partitions and gangs.
//! - `cache_sizing`: sizes the shares of each cache online; it proposes, and the verifier judges.
//! - [`service_losses`]: finds the services that slow each other down.
//! - [`verifier`]: measures the effect of plan changes, and rolls back changes that made programs slower.
//!
//! # Invariants
//! - No I/O, no clock, seeded random numbers: the same input gives the same bits.
//! - A policy returns plans and never acts; without evidence it keeps the plan in force.
//! - A change that made programs slower beyond noise is taken back, whichever policy made it. The verifier answers a
//!   decision with a plan of its own, and never changes what a policy returned.
//! - No service is named as the cause of a loss of another cache, and none that only takes CPUs for the cache.

#![warn(missing_docs)]

mod auto;
mod cache_sizing;
pub mod service_losses;
pub mod verifier;

use cachemate_core::EvidenceKind::{MissTraces, ReuseSamples, StoredProfiles, TaskCounters};
use cachemate_locality::profilers::PhaseCurveRecall;
use cachemate_papers::policies::PolicyEntry;

/// The policies of this crate, in the order of their names.
pub const ENTRIES: &[PolicyEntry] = &[
    PolicyEntry::new(
        "auto",
        auto::build,
        &[&[ReuseSamples, MissTraces, StoredProfiles], &[TaskCounters]],
        "combines placement, sharing clusters, gangs and cache partitions by one forecast, checked by measurement",
    )
    .with_recall(|| Box::new(PhaseCurveRecall::with_fast_phase_average())),
    PolicyEntry::new(
        "cache-sizing",
        cache_sizing::build,
        &[
            &[MissTraces, ReuseSamples, StoredProfiles],
            &[TaskCounters, StoredProfiles],
        ],
        "sizes shares of each cache online from miss-rate curves, checked by measured speeds",
    )
    .with_recall(|| Box::new(PhaseCurveRecall::default())),
];

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_papers::conformance::check_policy;
    use cachemate_papers::policies::PolicyRegistry;

    /// Do the policies of this crate obey the rules for all policies?
    #[test]
    fn auto_and_cache_sizing_conform() {
        for entry in ENTRIES {
            let registry = PolicyRegistry(&[ENTRIES]);
            check_policy(&|seed| registry.build(entry.name, "", seed).unwrap(), 40)
                .unwrap_or_else(|broken| panic!("policy '{}': {broken}", entry.name));
        }
    }
}
