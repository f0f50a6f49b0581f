//! What stands between a machine and a policy in every run and replay alike: profilers and the yardstick.
//!
//! They follow from the run's header alone (topology, capabilities), so that a replay has the same ones.

use cachemate_core::{Capabilities, Level, Partition, Profiler, Topology};
use cachemate_locality::profilers::{
    ActivityProfiler, BesideProfiler, CountersProfiler, KnownProfiler, RapidMrcProfiler, RowParameters, RowProfiler,
    SharingProfiler, TracedCache,
};
use cachemate_policy::yardstick::Yardstick;

/// A reading of counters is folded into averages once it covers so many instructions.
const COUNTED_INSTRUCTIONS: f64 = 1e6;

/// Every profiler that the machine's last level has use for.
pub fn profilers(topology: &Topology, capabilities: &Capabilities) -> Vec<Box<dyn Profiler>> {
    profilers_counting(COUNTED_INSTRUCTIONS, topology, capabilities)
}

/// The same where windows are much shorter, so that a program that misses much executes few instructions in one.
pub fn profilers_counting(
    counted_instructions: f64,
    topology: &Topology,
    capabilities: &Capabilities,
) -> Vec<Box<dyn Profiler>> {
    let last = topology.caches.iter().find(|cache| cache.last_level);
    let level = last.map_or(Level::L2, |cache| cache.level);
    let mut profilers: Vec<Box<dyn Profiler>> = vec![
        Box::new(CountersProfiler::new(level, counted_instructions)),
        Box::new(RowProfiler::new(level, RowParameters::default())),
        Box::new(SharingProfiler::new(Default::default())),
        Box::new(ActivityProfiler),
        Box::new(BesideProfiler::default()),
    ];
    if let Some((size_bytes, ways)) = last.and_then(|cache| Some((cache.size_bytes?, cache.ways?))) {
        let of_cache = |partition: &Partition| match partition {
            Partition::Colours { colours, .. } => Some(*colours),
            Partition::Ways { .. } => None,
        };
        let colours = capabilities.partitions.iter().find_map(|(_, partition)| of_cache(partition)).unwrap_or(1);
        let traced = TracedCache { level, size_bytes, colours, ways, points: colours.max(ways).max(16) };
        profilers.push(Box::new(RapidMrcProfiler::new(traced)));
    }
    profilers.push(Box::new(KnownProfiler::default()));
    profilers
}

/// The one predictor that scores every policy. A topology knows no latencies: a miss counts 200 cycles, about what
/// the described machines' memory takes.
pub fn yardstick() -> Yardstick {
    Yardstick { miss_penalty_cycles: 200.0 }
}
