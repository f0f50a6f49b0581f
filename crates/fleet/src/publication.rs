//! When a node writes an object to the API server: a minimum interval, which is shorter after a change.
//!
//! A thousand nodes share one API server, and a state is fresh for a minute. So an unchanged state is repeated every 30
//! s, and one that has changed by a tenth follows earlier, but not more often than every 10 s. A change is relative to
//! what the quantity can be, not to its last value: a hundredth of a busy CPU instead of two is no news.

use crate::profile::WorkloadProfile;
use crate::scorer::{CacheState, NodeCacheState};

/// Seconds between two writes of an object that has not changed.
const UNCHANGED_SECONDS: f64 = 30.0;
/// Seconds between two writes of an object that has changed.
const CHANGED_SECONDS: f64 = 10.0;
/// Smallest difference that counts as a change, relative to the scale of the quantity.
const MIN_CHANGE: f64 = 0.1;

/// Whether an object is to be written, if its last write is `elapsed_seconds` ago.
pub fn is_write_due(elapsed_seconds: Option<f64>, has_changed: bool) -> bool {
    let min_seconds = if has_changed {
        CHANGED_SECONDS
    } else {
        UNCHANGED_SECONDS
    };
    elapsed_seconds.is_none_or(|seconds| seconds >= min_seconds)
}

impl NodeCacheState {
    /// Whether a state differs from a published one by a tenth.
    pub fn has_changed_since(&self, published: &NodeCacheState) -> bool {
        let has_same_hardware = self.policy == published.policy
            && self.caches.len() == published.caches.len()
            && self.memory_bytes_per_second == published.memory_bytes_per_second;
        let bandwidth = self.memory_bytes_per_second.unwrap_or(0.0);
        let mut caches = self.caches.iter().zip(&published.caches);
        !has_same_hardware || caches.any(|(now, before)| now.has_changed_since(before, bandwidth))
    }

    /// The state moved toward `newest` by a weight, so that one short window does not decide what is published.
    #[must_use]
    pub fn smoothed(&self, newest: &NodeCacheState, weight: f64) -> NodeCacheState {
        let mut state = newest.clone();
        for (cache, before) in state.caches.iter_mut().zip(&self.caches) {
            let blend = |newest: f64, before: f64| before + weight * (newest - before);
            let blend_known = |newest: Option<f64>, before: Option<f64>| {
                newest.map(|newest| before.map_or(newest, |before| blend(newest, before)))
            };
            cache.busy_cpus = blend(cache.busy_cpus, before.busy_cpus);
            cache.fill_bytes_per_second =
                blend_known(cache.fill_bytes_per_second, before.fill_bytes_per_second);
            cache.bandwidth_left_bytes_per_second = blend_known(
                cache.bandwidth_left_bytes_per_second,
                before.bandwidth_left_bytes_per_second,
            );
        }
        state
    }
}

impl CacheState {
    fn has_changed_since(&self, published: &CacheState, bandwidth: f64) -> bool {
        let differs = |now: f64, before: f64, scale: f64| (now - before).abs() > MIN_CHANGE * scale;
        let differs_if_known =
            |now: Option<f64>, before: Option<f64>, scale: f64| match (now, before) {
                (Some(now), Some(before)) => differs(now, before, scale),
                (now, before) => now.is_some() != before.is_some(),
            };

        let fills = |cache: &CacheState| cache.fill_bytes_per_second.unwrap_or(0.0);
        // Fills that need more than a second to replace the cache are compared with those that need a second.
        let fill_scale = fills(self).max(fills(published)).max(self.size_bytes);
        let effects_differ = || {
            let mut effects = self.effects.iter().zip(&published.effects);
            effects.any(|(now, before)| {
                now.broken_limits != before.broken_limits
                    || differs(now.slowdown_percent, before.slowdown_percent, 100.0)
            })
        };

        self.size_bytes != published.size_bytes
            || self.free_classes != published.free_classes
            || self.effects.len() != published.effects.len()
            || differs(self.busy_cpus, published.busy_cpus, self.cpus)
            || differs(
                self.occupancy_bytes,
                published.occupancy_bytes,
                self.size_bytes,
            )
            || differs_if_known(
                self.fill_bytes_per_second,
                published.fill_bytes_per_second,
                fill_scale,
            )
            || differs_if_known(
                self.bandwidth_left_bytes_per_second,
                published.bandwidth_left_bytes_per_second,
                bandwidth,
            )
            || effects_differ()
    }
}

impl WorkloadProfile {
    /// Whether a profile differs from a published one by a tenth of its cycles or of its references.
    pub fn has_changed_since(&self, published: &WorkloadProfile) -> bool {
        let differs = |now: f64, before: f64| (now - before).abs() > MIN_CHANGE * now.max(before);
        let max_misses = self
            .references_per_kilo_instr
            .max(published.references_per_kilo_instr)
            / 1000.0;
        let mut sizes = self
            .curve
            .iter()
            .chain(&published.curve)
            .map(|point| point.bytes);

        differs(self.base_cycles_per_instr, published.base_cycles_per_instr)
            || differs(self.stall_cycles_per_miss, published.stall_cycles_per_miss)
            || differs(
                self.references_per_kilo_instr,
                published.references_per_kilo_instr,
            )
            || sizes.any(|bytes| {
                let difference = self.misses_per_instr(bytes) - published.misses_per_instr(bytes);
                difference.abs() > MIN_CHANGE * max_misses
            })
    }

    /// Whether a profile may replace one that another node published: only if it is more certain by a tenth, so that
    /// nodes that measure the same image do not overwrite one another in turn.
    pub fn is_more_certain_than(&self, published: &WorkloadProfile) -> bool {
        self.certainty.unwrap_or(0.0) > published.certainty.unwrap_or(0.0) + MIN_CHANGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::tests::mix_of;
    use crate::scorer::tests::empty_node;

    /// Is every object written at once, then every 30 s, and no more often than every 10 s if it changes?
    #[test]
    fn an_object_is_written_every_thirty_seconds_or_ten_after_a_change() {
        let due = |seconds: f64| {
            (
                is_write_due(Some(seconds), false),
                is_write_due(Some(seconds), true),
            )
        };
        assert!(is_write_due(None, false));
        assert_eq!(
            [9.9, 10.0, 29.9, 30.0].map(due),
            [(false, false), (false, true), (false, true), (true, true)]
        );
    }

    /// Does a tenth of what a quantity can be count as a change, whichever quantity it is, and less not?
    #[test]
    fn a_tenth_is_a_change() {
        let before = NodeCacheState {
            caches: vec![empty_node(1).caches[0].clone(); 2],
            ..empty_node(1)
        };
        let changes_with = |change: fn(&mut CacheState)| {
            let mut state = before.clone();
            change(&mut state.caches[1]);
            state.has_changed_since(&before)
        };
        assert!(!changes_with(|_| ()));
        // The cache has 16 CPUs and 32 MiB; its memory has 200 GB/s.
        assert!(
            !changes_with(|cache| cache.busy_cpus += 1.5)
                && changes_with(|cache| cache.busy_cpus += 1.7)
        );
        assert!(
            !changes_with(|cache| cache.fill_bytes_per_second = Some(3e6)),
            "a tenth of the cache in a second"
        );
        assert!(changes_with(|cache| cache.fill_bytes_per_second = Some(4e6)));
        assert!(changes_with(|cache| cache.fill_bytes_per_second = None));
        assert!(!changes_with(|cache| cache
            .bandwidth_left_bytes_per_second =
            Some(181e9)));
        assert!(changes_with(|cache| cache
            .bandwidth_left_bytes_per_second =
            Some(179e9)));
        assert!(
            changes_with(|cache| cache.occupancy_bytes += 4e6)
                && changes_with(|cache| cache.free_classes = Some(3))
        );
        assert!(
            NodeCacheState {
                caches: before.caches[..1].to_vec(),
                ..before.clone()
            }
            .has_changed_since(&before)
        );
    }

    /// Does a burst reach the published state in part only, and an unknown value at once?
    #[test]
    fn a_burst_is_smoothed() {
        let before = empty_node(1);
        let mut burst = before.clone();
        burst.caches[0].busy_cpus = 10.0;
        burst.caches[0].fill_bytes_per_second = Some(1e9);
        let smoothed = before.smoothed(&burst, 0.25);
        assert_eq!(
            (
                smoothed.caches[0].busy_cpus,
                smoothed.caches[0].fill_bytes_per_second
            ),
            (2.5, Some(2.5e8))
        );
        burst.caches[0].fill_bytes_per_second = None;
        assert_eq!(
            before.smoothed(&burst, 0.25).caches[0].fill_bytes_per_second,
            None
        );
    }

    /// Is a profile written again after a change of a tenth, and over another node's only if it is more certain?
    #[test]
    fn a_profile_is_replaced_by_another_or_a_more_certain_one() {
        let before = mix_of(20.0, &[(8.0 * 1024.0 * 1024.0, 1.0)]).profile();
        assert!(!before.has_changed_since(&before));
        let slower = WorkloadProfile {
            base_cycles_per_instr: 1.2 * before.base_cycles_per_instr,
            ..before.clone()
        };
        let mut steeper = before.clone();
        steeper
            .curve
            .iter_mut()
            .for_each(|point| point.misses_per_kilo_instr = 0.0);

        assert!(slower.has_changed_since(&before) && steeper.has_changed_since(&before));
        let with_certainty = |certainty: Option<f64>| WorkloadProfile {
            certainty,
            ..before.clone()
        };
        assert!(with_certainty(Some(0.9)).is_more_certain_than(&with_certainty(Some(0.7))));
        assert!(!with_certainty(Some(0.9)).is_more_certain_than(&with_certainty(Some(0.85))));
        assert!(with_certainty(Some(0.5)).is_more_certain_than(&with_certainty(None)));
    }
}
