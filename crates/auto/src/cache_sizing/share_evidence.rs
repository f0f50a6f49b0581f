//! What was measured about the shares of one cache: speeds, sizes that are too small for a goal, and bounds of curves.
//!
//! A measured speed with units of its own bounds a process's curve from then on ([`DemandCurve::apply_bound`]), also in
//! later phases of the same kind, so that shares that failed are not proposed again. Properties: evidence about other
//! co-runners or phases is dropped.

use std::collections::BTreeMap;

use cachemate_core::{CacheShare, ProcessId, ShareMember, View};
use cachemate_papers::partition::demand_curve::{DemandCurve, MeasuredSpeed};
use cachemate_papers::partition::partitioned_cache::ProcessPhase;
use cachemate_papers::partition::partitioned_cache::{CacheProcess, PartitionedCache};

use super::share_speeds::ShareSpeeds;

/// Number of undisturbed windows that determine a speed.
pub const MIN_MEASURED_WINDOWS: u32 = 3;

/// The evidence about one cache; see the module's documentation.
#[derive(Default)]
pub struct ShareEvidence {
    /// Speeds under the shares in force.
    pub speeds: ShareSpeeds,
    /// Sizes with which a goal was measured to be missed with these co-runners, by process.
    pub insufficient_sizes: BTreeMap<ProcessId, InsufficientSize>,
    /// Window of the last proposal with these co-runners.
    pub last_proposal: Option<u64>,
    /// Whether a partition may still be in the colors of pages.
    pub was_divided: bool,
    bounds: Vec<MeasuredBound>,
    /// The processes with their phases.
    co_runners: Vec<(ProcessId, u32)>,
    shares: Vec<CacheShare>,
    /// Number of windows that do not count after a change of the shares.
    settling_windows: u32,
    phase_stability: PhaseStability,
}

/// A size with which a process was measured to miss its goal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InsufficientSize {
    /// The largest such number of units.
    pub units: u32,
    /// The last window in which the goal was missed with any such number.
    pub window: u64,
}

/// Number of windows without a miss after which a size is tried again. A trial takes a few windows.
const SIZE_RETRY_WINDOWS: u64 = 600;

/// The measured speed of a process in a phase with a number of units of its own.
struct MeasuredBound {
    process: ProcessId,
    phase: ProcessPhase,
    units: u32,
    speed: MeasuredSpeed,
}

/// The number of windows for which the same programs stay in the same phases.
#[derive(Clone, Copy, Debug, Default)]
struct PhaseStability {
    windows: u32,
    /// Mean of earlier durations, with the latest weighted by a quarter; `None` before the first change.
    mean_windows: Option<f64>,
}

impl PhaseStability {
    fn record_change(&mut self) {
        let elapsed_windows = f64::from(std::mem::replace(&mut self.windows, 0));
        self.mean_windows = Some(self.mean_windows.map_or(elapsed_windows, |mean| {
            mean + 0.25 * (elapsed_windows - mean)
        }));
    }
}

impl ShareEvidence {
    /// Observes a window. `warmup_windows` do not count after a change of the shares.
    pub fn observe(&mut self, view: &View<'_>, domain: &PartitionedCache<'_>, warmup_windows: u32) {
        self.phase_stability.windows += 1;
        let co_runners: Vec<(ProcessId, u32)> = domain
            .processes
            .iter()
            .map(|process| (process.process, process.phase.number))
            .collect();
        if co_runners != self.co_runners {
            self.phase_stability.record_change();
            self.forget_co_runners(co_runners);
        }

        let window = view.observation.window;
        self.insufficient_sizes
            .retain(|_, size| window < size.window + SIZE_RETRY_WINDOWS);

        let shares = domain.surviving_shares(&view.plan_in_force().shares);
        self.was_divided |= !shares.is_empty();
        if shares != self.shares {
            self.speeds.clear();
            (self.shares, self.settling_windows) = (shares, warmup_windows);
        }
        if self.settling_windows > 0 {
            self.settling_windows -= 1;
            return;
        }
        let probes = &view.previous_plan.probes;
        self.speeds
            .add(view.observation, domain.cache.level, probes);
        if self.speeds.windows >= MIN_MEASURED_WINDOWS {
            self.record_bounds(domain);
        }
    }

    /// Records that a process misses its goal with this number of units. Returns whether no larger one was known.
    pub fn record_insufficient(&mut self, process: ProcessId, units: u32, window: u64) -> bool {
        let known = self.insufficient_sizes.get(&process);
        let known_units = known.map_or(0, |size| size.units);
        let size = InsufficientSize {
            units: known_units.max(units),
            window,
        };
        self.insufficient_sizes.insert(process, size);
        units > known_units
    }

    /// Drops the evidence about other co-runners and phases. What a process measured with its own units does not
    /// depend on the phases of others.
    fn forget_co_runners(&mut self, co_runners: Vec<(ProcessId, u32)>) {
        self.speeds.clear();
        self.insufficient_sizes.clear();
        self.last_proposal = None;
        self.bounds.retain(|bound| {
            co_runners.iter().any(|&(process, phase)| {
                bound.process == process
                    && (bound.phase.kind.is_some() || bound.phase.number == phase)
            })
        });
        self.co_runners = co_runners;
    }

    /// Records the speeds of processes that have units of their own.
    fn record_bounds(&mut self, domain: &PartitionedCache<'_>) {
        for share in &self.shares {
            let units = share.units.set().count();
            let [ShareMember::Process(process)] = share.members[..] else {
                continue;
            };

            let cache_process = domain
                .processes
                .iter()
                .find(|other| other.process == process);
            let Some((cache_process, speed)) =
                cache_process.zip(self.speeds.measured_speed(process))
            else {
                continue;
            };

            let phase = cache_process.phase;
            self.bounds.retain(|bound| {
                (bound.process, bound.units) != (process, units)
                    || !bound.phase.is_comparable(phase)
            });
            self.bounds.push(MeasuredBound {
                process,
                phase,
                units,
                speed,
            });
        }
    }

    /// The demand curve of a process, bounded by the measurements of that process in phases of this kind.
    pub fn apply_bounds(
        &self,
        cache_process: &CacheProcess<'_>,
        mut demand: DemandCurve,
    ) -> DemandCurve {
        for bound in &self.bounds {
            if bound.process == cache_process.process
                && bound.phase.is_comparable(cache_process.phase)
            {
                demand = demand.apply_bound(bound.units, bound.speed);
            }
        }
        demand
    }

    /// The time for which the present evidence is likely to apply, in nanoseconds; infinite before the first change.
    pub fn expected_lifetime_ns(&self, window_ns: u64) -> f64 {
        let PhaseStability {
            windows,
            mean_windows,
        } = self.phase_stability;
        mean_windows.map_or(f64::INFINITY, |mean| {
            mean.max(f64::from(windows)) * window_ns as f64
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If a goal is missed with fewer units than before, as after its floor was lowered: does the larger number stay?
    #[test]
    fn is_the_largest_insufficient_size_kept() {
        let (mut evidence, process) = (ShareEvidence::default(), ProcessId(1));
        let results = [(5, 10), (9, 11), (7, 12), (9, 13)]
            .map(|(units, window)| evidence.record_insufficient(process, units, window));
        assert_eq!(results, [true, true, false, false]);
        let (units, window) = (9, 13);
        assert_eq!(
            evidence.insufficient_sizes[&process],
            InsufficientSize { units, window }
        );
    }
}
