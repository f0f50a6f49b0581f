//! Distributed Intensity (CA 4.1): even out the programs' own miss rates over the caches.
//!
//! Problem: bus, controller, prefetchers and space are all strained most where misses come together. Method: the miss
//! rate of each task *alone* on the machine's last-level cache, from its profile (its miss-rate curve at the cache's size,
//! or the misses of its stack-distance profile); sort, deal out so that the sums per cache are even; or the same by
//! exchanges between pairs of caches ([`crate::intensity`], [`crate::evening`]).
//!
//! Properties: tasks without a profile stay where they are; nothing moves while rates hold still; priorities count.

use cachemate_core::{Decision, Policy, TaskId, Topology, View};

use crate::intensity::{Intensity, Parameters};
use crate::schemes::{SharedCache, solo_misses_per_mega_instr};

struct Di(Intensity);

impl Policy for Di {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.0.decide(view, rate_alone(view))
    }
}

/// Misses per thousand instructions of a task alone, from its profile.
pub(super) fn rate_alone(view: &View<'_>) -> impl Fn(TaskId) -> Option<f64> {
    let cache = contended(view.topology);
    move |task| {
        let misses = solo_misses_per_mega_instr(view.profiles.get(&task)?, cache.as_ref()?)?;
        Some(misses / 1000.0)
    }
}

/// The first last-level cache of known size: caches of one level are alike on every machine that we know of.
fn contended(topology: &Topology) -> Option<SharedCache> {
    let cache = topology.caches.iter().find(|cache| cache.last_level && cache.size_bytes.is_some())?;
    // Only its shape matters for a miss rate, not what a miss costs.
    Some(SharedCache::new(cache.size_bytes?, cache.ways.unwrap_or(16), cache.line_bytes.unwrap_or(64), 0.0))
}

/// See the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, String> {
    Ok(Box::new(Di(Intensity::new(Parameters::parse(parameters)?))))
}
