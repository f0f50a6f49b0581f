//! Published evidence of a node, from measurements of its daemon: the state of its caches, and profiles of its
//! services.
//!
//! Problem: a daemon measures threads by whatever its host offers, and the scorer needs rates and effects per cache.
//! Method: the fills of a cache are its counted memory traffic or, without such counters, the sum over its threads. The
//! effect of less space follows from a thread's profile or, without one, from its slowdown beside a full stream, which
//! leaves it almost no space. Properties: pure. An unknown value stays unknown, except for the occupancy: a cache in
//! use is full in its steady state.

use cachemate_core::Estimate;

use crate::profile::{MAX_CURVE_POINTS, MissPoint, WorkloadProfile};
use crate::scorer::{CacheState, ShareEffect};

/// Shares of the residents' space for which a node publishes their slowdown.
pub(crate) const EFFECT_SHARES: [f64; 5] = [1.0, 0.875, 0.75, 0.5, 0.25];
/// Busy CPUs below which a cache counts as idle: kernel threads and timers use about this much of a quiet host.
const MAX_IDLE_CPUS: f64 = 0.1;
/// Share of the busy CPUs whose fills must be known. With less, most of the pressure would be a guess.
const MIN_MEASURED_SHARE: f64 = 0.5;

/// The loss of one resident with less space.
pub(crate) struct ResidentLoss {
    pub(crate) slowdown_percent: f64,
    pub(crate) busy_cpus: f64,
    pub(crate) max_slowdown_percent: Option<f64>,
}

/// Sums up the losses of a cache's residents at one share of their space.
pub(crate) fn share_effect(share: f64, losses: impl Iterator<Item = ResidentLoss>) -> ShareEffect {
    let (mut slowdown_sum, mut busy_sum, mut broken_limits) = (0.0, 0.0, 0.0);
    for loss in losses {
        slowdown_sum += loss.slowdown_percent.max(0.0) * loss.busy_cpus;
        busy_sum += loss.busy_cpus;
        let is_broken = loss
            .max_slowdown_percent
            .is_some_and(|limit| loss.slowdown_percent > limit);
        broken_limits += f64::from(u8::from(is_broken));
    }

    let slowdown_percent = if busy_sum > 0.0 {
        slowdown_sum / busy_sum
    } else {
        0.0
    };
    ShareEffect {
        share,
        slowdown_percent,
        broken_limits,
    }
}

/// A thread on a cache, as its daemon has measured it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ResidentEvidence {
    /// Its share of a CPU's time.
    pub busy_cpus: f64,
    /// Bytes per second that it fills; `None` if neither counted nor probed.
    pub fill_bytes_per_second: Option<f64>,
    /// Its profile; `None` without a measured curve.
    pub profile: Option<WorkloadProfile>,
    /// Slowdown beside a full stream, as a fraction; `None` if it was not measured.
    pub sensitivity: Option<f64>,
    /// The limit that was promised to it.
    pub max_slowdown_percent: Option<f64>,
}

/// A cache with its residents, as its daemon has measured it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheEvidence {
    /// Capacity of the cache.
    pub size_bytes: f64,
    /// Number of CPUs that share the cache.
    pub cpus: f64,
    /// Mean number of busy CPUs, whoever uses them.
    pub busy_cpus: f64,
    /// Memory traffic of the cache, in both directions; `None` without such counters.
    pub memory_bytes_per_second: Option<f64>,
    /// Bytes in use; `None` without such counters.
    pub occupancy_bytes: Option<f64>,
    /// Unused classes of service; `None` if the cache cannot be partitioned, or if this is unknown.
    pub free_classes: Option<u32>,
    /// Threads on the cache that the daemon observes.
    pub residents: Vec<ResidentEvidence>,
}

impl CacheEvidence {
    /// The state to be published, with the bandwidth that users of the cache have left.
    pub fn state(&self, bandwidth_left_bytes_per_second: Option<f64>) -> CacheState {
        let fills = self.fill_bytes_per_second();
        let loss_at = |resident: &ResidentEvidence, share: f64| {
            let slowdown_percent = match &resident.profile {
                Some(profile) => profile.slowdown_percent(
                    self.space_bytes(resident, profile, fills) * share,
                    self.size_bytes,
                ),
                None => resident.sensitivity? * (1.0 - share) * 100.0,
            };
            let (busy_cpus, max_slowdown_percent) =
                (resident.busy_cpus, resident.max_slowdown_percent);
            Some(ResidentLoss {
                slowdown_percent,
                busy_cpus,
                max_slowdown_percent,
            })
        };
        let has_known_losses = self
            .residents
            .iter()
            .any(|resident| loss_at(resident, 1.0).is_some());

        let effect_at = |share: f64| {
            share_effect(
                share,
                self.residents
                    .iter()
                    .filter_map(|resident| loss_at(resident, share)),
            )
        };

        CacheState {
            size_bytes: self.size_bytes,
            cpus: self.cpus,
            busy_cpus: self.busy_cpus,
            fill_bytes_per_second: fills,
            occupancy_bytes: self
                .occupancy_bytes
                .unwrap_or(self.size_bytes)
                .min(self.size_bytes),
            bandwidth_left_bytes_per_second,
            free_classes: self.free_classes,
            effects: if has_known_losses {
                EFFECT_SHARES.map(effect_at).to_vec()
            } else {
                Vec::new()
            },
        }
    }

    /// The fills of all users: the counted traffic, whose lines written back make it an upper bound, or else the sum
    /// over the threads, if those with known fills use most of the busy CPUs.
    fn fill_bytes_per_second(&self) -> Option<f64> {
        if self.memory_bytes_per_second.is_some() {
            return self.memory_bytes_per_second;
        }
        let known_fills = self
            .residents
            .iter()
            .filter_map(|resident| Some((resident.busy_cpus, resident.fill_bytes_per_second?)));
        let (measured_cpus, fills) =
            known_fills.fold((0.0, 0.0), |sum, known| (sum.0 + known.0, sum.1 + known.1));
        let is_measured =
            self.busy_cpus <= MAX_IDLE_CPUS || measured_cpus >= MIN_MEASURED_SHARE * self.busy_cpus;
        is_measured.then_some(fills)
    }

    /// The space of a resident: its share of the fills, or of the busy CPUs if these are unknown, and at most its
    /// footprint.
    fn space_bytes(
        &self,
        resident: &ResidentEvidence,
        profile: &WorkloadProfile,
        fills: Option<f64>,
    ) -> f64 {
        let share_of_fills = resident
            .fill_bytes_per_second
            .zip(fills)
            .and_then(|(own, all)| (all > 0.0).then(|| own / all));
        let share = share_of_fills
            .unwrap_or_else(|| resident.busy_cpus / self.busy_cpus.max(resident.busy_cpus));
        let share = if share.is_finite() {
            share.min(1.0)
        } else {
            1.0
        };
        (share * self.size_bytes).min(profile.footprint_bytes())
    }
}

/// Counted behavior of one thread of a service.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ThreadCounts<'a> {
    /// Instructions per cycle.
    pub instr_per_cycle: f64,
    /// Misses per thousand instructions, counted over the same time.
    pub misses_per_kilo_instr: f64,
    /// Cycles that a miss adds on this host.
    pub miss_penalty_cycles: f64,
    /// Misses per thousand instructions by the bytes that the thread has of the cache, ascending.
    pub curve: &'a [(u64, Estimate)],
}

/// The profile of a service with `threads` busy threads that all behave like the counted one, each with an equal part
/// of the service's memory; `None` if the counts describe no possible program. References that no point of the curve
/// shows are unknown, so the largest known rate of misses stands for them.
pub fn measured_profile(counts: &ThreadCounts<'_>, threads: u32) -> Option<WorkloadProfile> {
    let rates = counts
        .curve
        .iter()
        .map(|(_, misses)| misses.value)
        .chain([counts.misses_per_kilo_instr]);
    let references_per_kilo_instr = rounded(rates.fold(0.0, f64::max));
    let stall_cycles = counts.miss_penalty_cycles * counts.misses_per_kilo_instr / 1000.0;
    let step = counts.curve.len().div_ceil(MAX_CURVE_POINTS).max(1);

    // The last point is kept: it says whether the service fits at all.
    let kept_points = counts.curve.iter().rev().step_by(step).rev();
    let points = kept_points.map(|(bytes, misses)| MissPoint {
        bytes: *bytes as f64 * f64::from(threads.max(1)),
        misses_per_kilo_instr: rounded(misses.value.max(0.0)).min(references_per_kilo_instr),
    });
    let profile = WorkloadProfile {
        base_cycles_per_instr: rounded((1.0 / counts.instr_per_cycle - stall_cycles).max(0.05)),
        stall_cycles_per_miss: rounded(counts.miss_penalty_cycles),
        references_per_kilo_instr,
        // As the interval machine assumes without a count of lines written back.
        write_share: 0.3,
        curve: points.collect(),
        certainty: Some(curve_certainty(counts.curve)),
    };
    profile.check().is_ok().then_some(profile)
}

/// One minus the mean half width of the curve's intervals relative to its largest value.
fn curve_certainty(curve: &[(u64, Estimate)]) -> f64 {
    let largest = curve
        .iter()
        .map(|(_, misses)| misses.value)
        .fold(0.0, f64::max);
    let half_widths: f64 = curve
        .iter()
        .map(|(_, misses)| 0.5 * (misses.high - misses.low))
        .sum();
    let mean_width = half_widths / curve.len().max(1) as f64;
    if largest > 0.0 {
        rounded((1.0 - mean_width / largest).clamp(0.0, 1.0))
    } else {
        1.0
    }
}

/// Rounds to a ten-thousandth, so that objects stay short.
fn rounded(value: f64) -> f64 {
    libm::round(value * 1e4) / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = 1024.0 * 1024.0;

    fn idle_cache() -> CacheEvidence {
        CacheEvidence {
            size_bytes: 32.0 * MIB,
            cpus: 8.0,
            ..CacheEvidence::default()
        }
    }

    fn resident(busy_cpus: f64, fills: Option<f64>) -> ResidentEvidence {
        ResidentEvidence {
            busy_cpus,
            fill_bytes_per_second: fills,
            ..ResidentEvidence::default()
        }
    }

    /// Are the fills of a cache known only if it is idle, its traffic is counted, or most of its busy CPUs were
    /// measured?
    #[test]
    fn fills_are_unknown_unless_most_of_them_were_measured() {
        let fills_of = |busy_cpus: f64, traffic: Option<f64>, residents: Vec<ResidentEvidence>| {
            let cache = CacheEvidence {
                busy_cpus,
                memory_bytes_per_second: traffic,
                residents,
                ..idle_cache()
            };
            cache.state(None).fill_bytes_per_second
        };
        assert_eq!(fills_of(0.05, None, vec![]), Some(0.0), "an idle cache");
        assert_eq!(fills_of(2.0, None, vec![]), None, "nobody was measured");
        assert_eq!(
            fills_of(
                2.0,
                None,
                vec![resident(0.9, Some(5e8)), resident(1.0, None)]
            ),
            None
        );
        assert_eq!(
            fills_of(
                2.0,
                None,
                vec![resident(1.0, Some(5e8)), resident(0.2, Some(1e8))]
            ),
            Some(6e8)
        );
        assert_eq!(
            fills_of(2.0, Some(7e8), vec![resident(1.0, Some(5e8))]),
            Some(7e8),
            "counted traffic"
        );
    }

    /// Does less space cost a resident what its curve states, or a part of its slowdown beside a stream, and do
    /// residents without either cost nothing that is known?
    #[test]
    fn effects_follow_from_curves_or_from_streams() {
        let curve: Vec<(u64, Estimate)> = [(8, 20.0), (16, 10.0), (32, 0.0)]
            .map(|(mib, mpki)| (mib << 20, Estimate::exact(mpki)))
            .to_vec();
        let counts = ThreadCounts {
            instr_per_cycle: 0.5,
            misses_per_kilo_instr: 10.0,
            miss_penalty_cycles: 100.0,
            curve: &curve,
        };
        let profile = measured_profile(&counts, 1).unwrap();
        // 1 / 0.5 cycles, of which ten misses of a thousand instructions take 1.
        assert_eq!(
            (
                profile.base_cycles_per_instr,
                profile.references_per_kilo_instr
            ),
            (1.0, 20.0)
        );
        let curved = ResidentEvidence {
            profile: Some(profile),
            ..resident(1.0, Some(1e9))
        };
        let probed = ResidentEvidence {
            sensitivity: Some(0.4),
            max_slowdown_percent: Some(5.0),
            ..resident(1.0, Some(0.0))
        };
        let state_of = |residents: Vec<ResidentEvidence>| {
            CacheEvidence {
                busy_cpus: 2.0,
                residents,
                ..idle_cache()
            }
            .state(None)
        };
        let effects = state_of(vec![curved.clone()]).effects;
        // Half of the space: 1 + 10 * 100 / 1000 cycles instead of 1.
        assert!(
            (effects[3].slowdown_percent - 100.0).abs() < 1e-6
                && effects[0].slowdown_percent == 0.0,
            "{effects:?}"
        );
        let effects = state_of(vec![probed, resident(0.5, None)]).effects;
        assert!(
            (effects[3].slowdown_percent - 20.0).abs() < 1e-9,
            "{effects:?}"
        );
        assert_eq!(
            effects
                .iter()
                .map(|effect| effect.broken_limits)
                .collect::<Vec<_>>(),
            [0.0, 0.0, 1.0, 1.0, 1.0]
        );
        assert_eq!(state_of(vec![resident(2.0, Some(1e9))]).effects, []);
        let state = state_of(vec![curved]);
        assert_eq!(state.occupancy_bytes, 32.0 * MIB, "a cache in use is full");
    }

    /// Do a service's threads share its memory, does a wide interval lower the certainty, and is a long curve thinned?
    #[test]
    fn a_measured_profile_describes_all_threads() {
        let wide = |mpki: f64| Estimate {
            value: mpki,
            low: 0.5 * mpki,
            high: 1.5 * mpki,
        };
        let curve: Vec<(u64, Estimate)> = (1..=100)
            .map(|mib| (mib << 20, wide(100.0 / mib as f64)))
            .collect();

        let counts = ThreadCounts {
            instr_per_cycle: 1.0,
            misses_per_kilo_instr: 2.0,
            miss_penalty_cycles: 90.0,
            curve: &curve,
        };
        let profile = measured_profile(&counts, 4).unwrap();
        assert_eq!(
            profile
                .curve
                .last()
                .map(|point| (point.bytes, point.misses_per_kilo_instr)),
            Some((400.0 * MIB, 1.0))
        );
        assert!(
            profile.curve.len() <= MAX_CURVE_POINTS
                && profile.certainty.is_some_and(|sure| sure < 0.99)
        );
        assert_eq!(
            measured_profile(
                &ThreadCounts {
                    instr_per_cycle: 0.0,
                    ..counts
                },
                1
            ),
            None
        );
        assert_eq!(
            measured_profile(
                &ThreadCounts {
                    curve: &[],
                    ..counts
                },
                1
            ),
            None
        );
    }
}
