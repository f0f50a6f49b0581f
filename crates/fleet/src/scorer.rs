//! Ranks nodes for one service, from its profile and the nodes' published cache states.
//!
//! A scheduler needs the best of a thousand nodes within a millisecond, so a node cannot be
//! simulated for each pod. It publishes instead, for each of its caches, the lines that its
//! residents fill and the slowdown that they would have with less of the cache. The newcomer's
//! share of an LRU cache equals its share of all fills, and is solved for because fills depend on
//! the share. Its slowdown follows from its curve at that share, and that of the residents from
//! their published effects.
//!
//! For example, the residents of a cache of 32 MiB fill 70 million lines a second, and a pod alone
//! 10 million. With an eighth of the cache (10 of 80) its curve says 30 million, which is a share
//! of 30 of 100, with which it would fill fewer; the share that agrees with its own fills lies
//! between.
//!
//! A score is pure and allocates nothing per node. Without a profile all nodes have the same score,
//! and a node without a state has a medium score, so that missing knowledge never decides.

use cachemate_core::FieldError;
use serde::{Deserialize, Serialize};

use crate::profile::{LINE_BYTES, WorkloadProfile, check_range};

/// Highest score that a scheduler extender may give.
pub const MAX_SCORE: u8 = 10;
/// Score of a node without a state or a forecast.
pub const NEUTRAL_SCORE: u8 = 5;
/// Maximum number of caches that a node can publish.
pub const MAX_CACHES: usize = 256;
const MAX_EFFECTS: usize = 16;
/// Utilization of memory above which its users slow down in proportion to the excess.
const MAX_FREE_UTILIZATION: f64 = 0.85;
/// Cost in percent of a CPU that halves a node's score relative to the best node.
const HALF_PREFERENCE_PERCENT: f64 = 4.0;

/// Slowdown of a cache's residents with a fraction of their current space.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShareEffect {
    /// Fraction of the residents' current space, 0 to 1.
    pub share: f64,
    /// Mean slowdown of the residents relative to running alone, weighted by CPUs.
    pub slowdown_percent: f64,
    /// Number of residents that would exceed their limit.
    pub broken_limits: f64,
}

/// One contended cache of a node.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CacheState {
    /// Capacity of the cache.
    pub size_bytes: f64,
    /// Number of CPUs that share the cache.
    pub cpus: f64,
    /// Mean number of busy CPUs.
    pub busy_cpus: f64,
    /// Bytes per second that the residents fill; `None` if unknown, in which case nothing is forecast for the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fill_bytes_per_second: Option<f64>,
    /// Bytes of the cache in use.
    pub occupancy_bytes: f64,
    /// Memory bandwidth that is still available to users of the cache; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_left_bytes_per_second: Option<f64>,
    /// Unused classes of service; `None` if the cache cannot be partitioned, or if this is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_classes: Option<u32>,
    /// Effects of less space on the residents, in descending order of the share, from all of their current space.
    #[serde(default)]
    pub effects: Vec<ShareEffect>,
}

/// The policy that places services among a node's caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NodePolicy {
    /// The kernel alone, which uses the least busy cache.
    #[default]
    Off,
    /// cachemate's policy `auto`, which uses the forecast.
    Auto,
}

/// The published state of a node: the content of the custom resource `NodeCacheState`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeCacheState {
    /// Clock frequency of the node's cores.
    pub hertz: f64,
    /// Memory bandwidth that one cache can use; `None` if unknown, in which case no queueing for memory is forecast.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes_per_second: Option<f64>,
    /// The node's policy of placing services among its caches.
    #[serde(default)]
    pub policy: NodePolicy,
    /// Contended caches of the node.
    pub caches: Vec<CacheState>,
}

impl NodeCacheState {
    /// Checks that a node could have this state. Every number is checked, because states come over the network.
    ///
    /// # Errors
    /// The first field with an impossible value.
    pub fn check(&self) -> Result<(), FieldError> {
        check_range("hertz", self.hertz, 1e6, 1e11)?;
        check_known_range(
            "memoryBytesPerSecond",
            self.memory_bytes_per_second,
            1.0,
            1e15,
        )?;
        if self.caches.is_empty() || self.caches.len() > MAX_CACHES {
            let expected = format!("1 to {MAX_CACHES}");
            return Err(FieldError::new("caches", self.caches.len(), expected));
        }
        for (index, cache) in self.caches.iter().enumerate() {
            cache
                .check()
                .map_err(|error| error.with_path_prefix(&format!("caches[{index}]")))?;
        }
        Ok(())
    }
}

/// An unknown value passes.
fn check_known_range(
    field: &str,
    value: Option<f64>,
    low: f64,
    high: f64,
) -> Result<(), FieldError> {
    value.map_or(Ok(()), |value| check_range(field, value, low, high))
}

impl CacheState {
    fn check(&self) -> Result<(), FieldError> {
        check_range("sizeBytes", self.size_bytes, 1.0, 1e12)?;
        check_range("cpus", self.cpus, 1.0, 1e6)?;
        check_range("busyCpus", self.busy_cpus, 0.0, 1e6)?;
        check_known_range("fillBytesPerSecond", self.fill_bytes_per_second, 0.0, 1e15)?;
        check_range("occupancyBytes", self.occupancy_bytes, 0.0, 1e12)?;
        check_known_range(
            "bandwidthLeftBytesPerSecond",
            self.bandwidth_left_bytes_per_second,
            0.0,
            1e15,
        )?;
        if self.effects.len() > MAX_EFFECTS {
            return Err(FieldError::new("effects", self.effects.len(), "at most 16"));
        }

        for (index, effect) in self.effects.iter().enumerate() {
            check_range(&format!("effects[{index}].share"), effect.share, 0.0, 1.0)?;
            check_range(
                &format!("effects[{index}].slowdownPercent"),
                effect.slowdown_percent,
                0.0,
                1e6,
            )?;
            check_range(
                &format!("effects[{index}].brokenLimits"),
                effect.broken_limits,
                0.0,
                1e6,
            )?;
        }

        if !self.effects.is_sorted_by(|a, b| a.share > b.share) {
            return Err(FieldError::new(
                "effects",
                "shares out of order",
                "descending shares, each once",
            ));
        }
        Ok(())
    }

    /// The slowdown and the broken limits of the residents at a share. The slowdown is interpolated between the
    /// published shares.
    fn share_effect(&self, share: f64) -> (f64, f64) {
        let lower = self.effects.partition_point(|effect| effect.share > share);
        let effect_values = |effect: &ShareEffect| (effect.slowdown_percent, effect.broken_limits);

        match (
            lower
                .checked_sub(1)
                .and_then(|index| self.effects.get(index)),
            self.effects.get(lower),
        ) {
            (Some(high), Some(low)) => {
                let fraction = (high.share - share) / (high.share - low.share);
                let interpolate = |high: f64, low: f64| high + fraction * (low - high);
                // A limit is either broken or kept, so the count is not interpolated: that of the nearer published
                // share applies.
                let broken_limits = if fraction >= 0.5 {
                    low.broken_limits
                } else {
                    high.broken_limits
                };
                (
                    interpolate(high.slowdown_percent, low.slowdown_percent),
                    broken_limits,
                )
            }
            (Some(nearest), None) | (None, Some(nearest)) => effect_values(nearest),
            (None, None) => (0.0, 0.0),
        }
    }
}

/// A service to place.
#[derive(Clone, Copy, Debug)]
pub struct ServiceDemand<'a> {
    /// Profile of the service; `None` if it was never measured.
    pub profile: Option<&'a WorkloadProfile>,
    /// CPUs that it will keep busy.
    pub busy_cpus: f64,
    /// Limit that was promised to the service; `None` without a promise.
    pub max_slowdown_percent: Option<f64>,
}

/// Forecast for a service on one cache.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PlacementForecast {
    /// The newcomer's slowdown relative to running alone.
    pub slowdown_percent: f64,
    /// Additional slowdown of the residents, in percent of a CPU.
    pub harm_cpu_percent: f64,
    /// Number of limits that the placement breaks, including the newcomer's.
    pub broken_limits: f64,
    /// Cost by which placements are ranked: the newcomer's slowdown plus the residents' harm, in percent of a CPU.
    pub cost_cpu_percent: f64,
}

/// Number of steps into which a table divides the capacity.
const SHARE_STEPS: usize = 32;

/// Behavior of a service on a cache of one size, tabulated by its space, so that a forecast takes only nanoseconds.
#[derive(Clone, Debug)]
struct ShareTable {
    hertz: f64,
    size_bytes: f64,
    /// Bytes per second that the service fills, by its space.
    fill_rates: [f64; SHARE_STEPS + 1],
    /// Bytes per second that the residents must fill for the service to have exactly this space; descending.
    resident_fills: [f64; SHARE_STEPS + 1],
    /// Cycles per instruction, and the part of these cycles that waits for memory.
    cycles: [f64; SHARE_STEPS + 1],
    wait_cycles: [f64; SHARE_STEPS + 1],
    footprint_bytes: f64,
}

impl ShareTable {
    fn new(profile: &WorkloadProfile, busy_cpus: f64, hertz: f64, size_bytes: f64) -> Self {
        let size_at = |step: usize| size_bytes * step as f64 / SHARE_STEPS as f64;
        let fill_rates: [f64; SHARE_STEPS + 1] = std::array::from_fn(|step| {
            profile.fills_per_cycle(size_at(step)) * hertz * busy_cpus * LINE_BYTES
        });
        // A program's share of the space is its share of the fills: s / C = own / (own + others).
        let pressure_at = |step: usize| fill_rates[step] * (SHARE_STEPS as f64 / step as f64 - 1.0);

        ShareTable {
            hertz,
            size_bytes,
            resident_fills: std::array::from_fn(|step| {
                if step == 0 {
                    f64::INFINITY
                } else {
                    pressure_at(step)
                }
            }),
            cycles: std::array::from_fn(|step| profile.cycles_per_instr(size_at(step))),
            wait_cycles: std::array::from_fn(|step| {
                profile.stall_cycles_per_miss * profile.misses_per_instr(size_at(step))
            }),
            fill_rates,
            footprint_bytes: profile.footprint_bytes(),
        }
    }

    /// The space that the service has beside residents with this many fills.
    fn remaining_space(&self, other_fills: f64) -> f64 {
        let step = self
            .resident_fills
            .partition_point(|pressure| *pressure >= other_fills)
            .clamp(1, SHARE_STEPS)
            - 1;
        if step == 0 {
            let all_fills = self.fill_rates[0] + other_fills;
            let first_space = if all_fills > 0.0 {
                self.size_bytes * self.fill_rates[0] / all_fills
            } else {
                self.size_bytes
            };
            return first_space.min(self.size_bytes / SHARE_STEPS as f64);
        }

        let (high_fills, low_fills) = (self.resident_fills[step], self.resident_fills[step + 1]);
        let fraction = if high_fills > low_fills {
            ((high_fills - other_fills) / (high_fills - low_fills)).clamp(0.0, 1.0)
        } else {
            1.0
        };
        self.size_bytes * (step as f64 + fraction) / SHARE_STEPS as f64
    }

    fn interpolate(&self, values: &[f64; SHARE_STEPS + 1], bytes: f64) -> f64 {
        let position =
            (bytes / self.size_bytes * SHARE_STEPS as f64).clamp(0.0, SHARE_STEPS as f64);
        let low = (position as usize).min(SHARE_STEPS - 1);
        values[low] + (position - low as f64) * (values[low + 1] - values[low])
    }
}

/// Forecasts of one service for many nodes. Nodes with equal caches share a table.
pub struct ServiceForecaster<'a> {
    service: &'a ServiceDemand<'a>,
    table: Option<ShareTable>,
}

impl<'a> ServiceForecaster<'a> {
    /// Solves nothing yet: a table of shares is built for the first cache.
    pub fn new(service: &'a ServiceDemand<'a>) -> Self {
        ServiceForecaster {
            service,
            table: None,
        }
    }

    /// The forecast on one cache of a node; `None` if the service has no profile, or the cache no known fills.
    pub fn forecast_cache(
        &mut self,
        node: &NodeCacheState,
        cache: &CacheState,
    ) -> Option<PlacementForecast> {
        let (profile, resident_fills) = (self.service.profile?, cache.fill_bytes_per_second?);
        let fits_table =
            |table: &ShareTable| table.hertz == node.hertz && table.size_bytes == cache.size_bytes;
        if !self.table.as_ref().is_some_and(fits_table) {
            self.table = Some(ShareTable::new(
                profile,
                self.service.busy_cpus,
                node.hertz,
                cache.size_bytes,
            ));
        }
        self.table
            .as_ref()
            .map(|table| table_forecast(self.service, profile, table, node, cache, resident_fills))
    }

    /// The cache that the node would choose, and the forecast there; `None` without a cache whose fills are known, or
    /// without a profile.
    pub fn forecast_node(&mut self, node: &NodeCacheState) -> Option<(usize, PlacementForecast)> {
        if node.policy == NodePolicy::Off {
            let cache = least_busy_cache(node)?;
            return Some((cache, self.forecast_cache(node, &node.caches[cache])?));
        }
        let mut best: Option<(usize, PlacementForecast)> = None;
        for (index, cache) in node.caches.iter().enumerate() {
            let Some(forecast) = self.forecast_cache(node, cache) else {
                continue;
            };
            if best
                .as_ref()
                .is_none_or(|(_, best_forecast)| is_better(&forecast, best_forecast))
            {
                best = Some((index, forecast));
            }
        }
        best
    }
}

fn table_forecast(
    service: &ServiceDemand<'_>,
    profile: &WorkloadProfile,
    table: &ShareTable,
    node: &NodeCacheState,
    cache: &CacheState,
    resident_fills: f64,
) -> PlacementForecast {
    let free_bytes = (cache.size_bytes - cache.occupancy_bytes).max(0.0);
    let bytes = table
        .remaining_space(resident_fills)
        .max(free_bytes)
        .min(table.footprint_bytes);
    let own_traffic = table.interpolate(&table.fill_rates, bytes) * (1.0 + profile.write_share);
    let bandwidths = node
        .memory_bytes_per_second
        .zip(cache.bandwidth_left_bytes_per_second);
    let wait_factor = bandwidths.map_or(1.0, |(bandwidth, bandwidth_left)| {
        let total_traffic = (bandwidth - bandwidth_left).max(0.0) + own_traffic;
        (total_traffic / (MAX_FREE_UTILIZATION * bandwidth)).max(1.0)
    });

    // Only the cycles that wait for memory grow with its utilization.
    let cycles_per_instr = table.interpolate(&table.cycles, bytes)
        + table.interpolate(&table.wait_cycles, bytes) * (wait_factor - 1.0);
    let slowdown_percent = (cycles_per_instr / table.cycles[SHARE_STEPS] - 1.0).max(0.0) * 100.0;
    let taken_bytes = (bytes - free_bytes).max(0.0);
    let remaining_share = if cache.occupancy_bytes > 0.0 {
        (1.0 - taken_bytes / cache.occupancy_bytes).clamp(0.0, 1.0)
    } else {
        1.0
    };

    let (slowdown_before, broken_limits_before) = cache.share_effect(1.0);
    let (slowdown_after, broken_limits_after) = cache.share_effect(remaining_share);
    let harm_cpu_percent = (slowdown_after - slowdown_before).max(0.0) * cache.busy_cpus;
    let exceeds_own_limit = service
        .max_slowdown_percent
        .is_some_and(|limit| slowdown_percent > limit);
    let broken_limits = (broken_limits_after - broken_limits_before).max(0.0)
        + f64::from(u8::from(exceeds_own_limit));
    let crowded_cpus = (cache.busy_cpus + service.busy_cpus - cache.cpus).max(0.0);
    let cost_cpu_percent =
        slowdown_percent * service.busy_cpus + harm_cpu_percent + 100.0 * crowded_cpus;
    PlacementForecast {
        slowdown_percent,
        harm_cpu_percent,
        broken_limits,
        cost_cpu_percent,
    }
}

/// Whether forecast `a` is better than `b`: fewer broken limits decide, then the lower cost.
fn is_better(a: &PlacementForecast, b: &PlacementForecast) -> bool {
    a.broken_limits < b.broken_limits
        || (a.broken_limits == b.broken_limits && a.cost_cpu_percent < b.cost_cpu_percent)
}

/// The least busy cache of a node, by its share of busy CPUs; the first among equals.
pub fn least_busy_cache(node: &NodeCacheState) -> Option<usize> {
    let load_of = |cache: &CacheState| cache.busy_cpus / cache.cpus.max(1.0);
    let indices = 0..node.caches.len();
    indices.min_by(|&a, &b| load_of(&node.caches[a]).total_cmp(&load_of(&node.caches[b])))
}

/// The forecasts of a service for every node; `None` for a node without a state.
pub fn forecast_nodes<'a>(
    service: &ServiceDemand<'_>,
    nodes: impl Iterator<Item = Option<&'a NodeCacheState>>,
) -> Vec<Option<PlacementForecast>> {
    let mut forecaster = ServiceForecaster::new(service);
    nodes
        .map(|node| {
            forecaster
                .forecast_node(node?)
                .map(|(_, forecast)| forecast)
        })
        .collect()
}

/// For each node, whether it remains after filtering: only nodes on which no limit breaks do. If every node
/// breaks a limit, all remain, because a forecast must never make a service unschedulable.
pub fn passes_filter(forecasts: &[Option<PlacementForecast>]) -> Vec<bool> {
    let keeps_limits_on = |forecast: &Option<PlacementForecast>| {
        forecast.is_none_or(|forecast| forecast.broken_limits <= 0.0)
    };
    let is_within_limits: Vec<bool> = forecasts.iter().map(keeps_limits_on).collect();
    if is_within_limits.contains(&true) {
        is_within_limits
    } else {
        vec![true; forecasts.len()]
    }
}

/// Scores from 0 to [`MAX_SCORE`]; [`NEUTRAL_SCORE`] for a node without a forecast. The best node has the highest one.
/// A cost that exceeds the best by `x` percent of the pod's CPUs, of which at least a quarter counts, divides the score
/// by `1 + x / 4`; `b` more broken limits than on the best node divide it by `1 + b`.
pub fn score_nodes(
    service: &ServiceDemand<'_>,
    forecasts: &[Option<PlacementForecast>],
) -> Vec<u8> {
    let known_forecasts = || forecasts.iter().flatten();
    let min_broken_limits = known_forecasts()
        .map(|forecast| forecast.broken_limits)
        .fold(f64::INFINITY, f64::min);
    let best_forecasts =
        known_forecasts().filter(|forecast| forecast.broken_limits <= min_broken_limits);
    let min_cost = best_forecasts
        .map(|forecast| forecast.cost_cpu_percent)
        .fold(f64::INFINITY, f64::min);

    let half_cost = HALF_PREFERENCE_PERCENT * service.busy_cpus.max(0.25);
    let score_of = |forecast: &Option<PlacementForecast>| match forecast {
        None => NEUTRAL_SCORE,
        Some(forecast) => {
            let excess_cost = (forecast.cost_cpu_percent - min_cost).max(0.0);
            let preference = half_cost
                / (half_cost + excess_cost)
                / (1.0 + forecast.broken_limits - min_broken_limits);
            libm::round(f64::from(MAX_SCORE) * preference) as u8
        }
    };
    forecasts.iter().map(score_of).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::profile::tests::mix_of;

    const MIB: f64 = 1024.0 * 1024.0;

    pub(crate) fn empty_node(caches: usize) -> NodeCacheState {
        let cache = CacheState {
            size_bytes: 32.0 * MIB,
            cpus: 16.0,
            fill_bytes_per_second: Some(0.0),
            bandwidth_left_bytes_per_second: Some(200e9),
            ..CacheState::default()
        };
        NodeCacheState {
            hertz: 2.5e9,
            memory_bytes_per_second: Some(200e9),
            policy: NodePolicy::Auto,
            caches: vec![cache; caches],
        }
    }

    fn crowded_cache(fills: f64) -> CacheState {
        CacheState {
            busy_cpus: 8.0,
            fill_bytes_per_second: Some(fills),
            occupancy_bytes: 32.0 * MIB,
            effects: vec![
                ShareEffect {
                    share: 1.0,
                    slowdown_percent: 2.0,
                    broken_limits: 0.0,
                },
                ShareEffect {
                    share: 0.5,
                    slowdown_percent: 20.0,
                    broken_limits: 1.0,
                },
            ],
            ..empty_node(1).caches[0].clone()
        }
    }

    fn sample_demand(profile: &WorkloadProfile) -> ServiceDemand<'_> {
        ServiceDemand {
            profile: Some(profile),
            busy_cpus: 2.0,
            max_slowdown_percent: Some(5.0),
        }
    }

    fn forecast_one(
        service: &ServiceDemand<'_>,
        node: &NodeCacheState,
        cache: &CacheState,
    ) -> PlacementForecast {
        ServiceForecaster::new(service)
            .forecast_cache(node, cache)
            .unwrap()
    }

    /// Is a service alone on a cache not slowed down, whatever its behavior?
    #[test]
    fn a_service_alone_on_a_cache_is_not_slowed_down() {
        for sets in [
            &[(8.0 * MIB, 1.0)][..],
            &[],
            &[(MIB, 0.5), (100.0 * MIB, 0.5)],
        ] {
            let profile = mix_of(20.0, sets).profile();
            let (_, forecast) = ServiceForecaster::new(&sample_demand(&profile))
                .forecast_node(&empty_node(2))
                .unwrap();
            assert!(
                forecast.slowdown_percent < 0.5 && forecast.harm_cpu_percent == 0.0,
                "{sets:?} {forecast:?}"
            );
        }
    }

    /// Does higher pressure by residents increase the cost, and does a stronger newcomer cause more harm?
    #[test]
    fn cost_rises_with_pressure_on_either_side() {
        let profile = mix_of(20.0, &[(24.0 * MIB, 1.0)]).profile();
        let node = empty_node(1);
        let slowdowns: Vec<f64> = [1e8, 1e9, 4e9, 2e10]
            .map(|fills| {
                forecast_one(&sample_demand(&profile), &node, &crowded_cache(fills))
                    .slowdown_percent
            })
            .to_vec();
        assert!(
            slowdowns.is_sorted() && slowdowns[3] > slowdowns[0] + 20.0,
            "{slowdowns:?}"
        );
        let harms: Vec<f64> = [1.0, 5.0, 20.0, 40.0]
            .map(|references| {
                let stream = mix_of(references, &[]).profile();
                forecast_one(&sample_demand(&stream), &node, &crowded_cache(2e9)).harm_cpu_percent
            })
            .to_vec();
        assert!(harms.is_sorted() && harms[3] > harms[0], "{harms:?}");
    }

    /// Do streams of equal rates share the cache equally, as theory predicts?
    #[test]
    fn streams_of_equal_rates_share_the_cache_equally() {
        let profile = mix_of(20.0, &[]).profile();
        let node = empty_node(1);
        let service = sample_demand(&profile);
        let own_fills = profile.fills_per_cycle(0.0) * node.hertz * service.busy_cpus * LINE_BYTES;
        let cache = CacheState {
            effects: vec![
                ShareEffect {
                    share: 1.0,
                    slowdown_percent: 0.0,
                    broken_limits: 0.0,
                },
                ShareEffect {
                    share: 0.0,
                    slowdown_percent: 100.0,
                    broken_limits: 0.0,
                },
            ],
            ..crowded_cache(own_fills)
        };

        // Half of the cache is lost, so the residents lose half of 100 percent on eight CPUs. The stream loses nothing.
        let stream = forecast_one(&service, &node, &cache);
        assert!(stream.slowdown_percent < 1e-9, "{stream:?}");
        assert!(
            (stream.harm_cpu_percent / 8.0 - 50.0).abs() < 1.0,
            "{stream:?}"
        );
        let reuse = mix_of(20.0, &[(1000.0 * MIB, 1.0)]).profile();
        let own_fills = reuse.fills_per_cycle(16.0 * MIB) * node.hertz * 2.0 * LINE_BYTES;
        let halved = forecast_one(
            &sample_demand(&reuse),
            &node,
            &CacheState {
                fill_bytes_per_second: Some(own_fills),
                ..cache
            },
        );
        assert!(
            (halved.harm_cpu_percent / 8.0 - 50.0).abs() < 1.0,
            "{halved:?}"
        );
    }

    /// Do all nodes have the same score without a profile, and does a node without a state have a medium one?
    #[test]
    fn nodes_score_equally_without_a_profile() {
        let unknown = ServiceDemand {
            profile: None,
            busy_cpus: 1.0,
            max_slowdown_percent: None,
        };

        let nodes = [
            empty_node(1),
            NodeCacheState {
                caches: vec![crowded_cache(1e9)],
                ..empty_node(1)
            },
        ];
        let neutral = forecast_nodes(&unknown, nodes.iter().map(Some));
        assert_eq!(score_nodes(&unknown, &neutral), [NEUTRAL_SCORE; 2]);
        assert_eq!(passes_filter(&neutral), [true, true]);
        let profile = mix_of(20.0, &[(24.0 * MIB, 1.0)]).profile();
        let node_forecasts = forecast_nodes(
            &sample_demand(&profile),
            [Some(&nodes[0]), None, Some(&nodes[1])].into_iter(),
        );
        let ranks = score_nodes(&sample_demand(&profile), &node_forecasts);
        assert!(ranks[0] == 10 && ranks[1] == 5 && ranks[2] < 5, "{ranks:?}");
        assert_eq!(passes_filter(&node_forecasts), [true, true, false]);
        assert_eq!(
            passes_filter(&node_forecasts[2..]),
            [true],
            "a forecast makes no service unschedulable"
        );
        let unmeasured = CacheState {
            fill_bytes_per_second: None,
            ..crowded_cache(0.0)
        };
        let half_known = NodeCacheState {
            caches: vec![unmeasured, crowded_cache(1e9)],
            ..empty_node(1)
        };
        let mut forecaster_demand = sample_demand(&profile);
        forecaster_demand.max_slowdown_percent = None;
        let chosen = ServiceForecaster::new(&forecaster_demand).forecast_node(&half_known);
        assert_eq!(
            chosen.map(|(cache, _)| cache),
            Some(1),
            "an unmeasured cache is not taken for an idle one"
        );
        let unmeasured_node = NodeCacheState {
            caches: half_known.caches[..1].to_vec(),
            ..half_known
        };
        assert!(
            ServiceForecaster::new(&forecaster_demand)
                .forecast_node(&unmeasured_node)
                .is_none()
        );
    }

    /// Are forged states rejected with the field?
    #[test]
    fn forged_states_are_rejected_with_the_field() {
        let refused_field = |change: fn(&mut NodeCacheState)| {
            let mut damaged = NodeCacheState {
                caches: vec![crowded_cache(1e9)],
                ..empty_node(1)
            };
            damaged.check().unwrap();
            change(&mut damaged);
            damaged.check().unwrap_err().field
        };
        assert_eq!(refused_field(|bad| bad.hertz = f64::NAN), "hertz");
        assert_eq!(refused_field(|bad| bad.caches.clear()), "caches");
        assert_eq!(
            refused_field(|bad| bad.caches[0].busy_cpus = -1.0),
            "caches[0].busyCpus"
        );
        assert_eq!(
            refused_field(|bad| bad.caches[0].effects[1].share = f64::INFINITY),
            "caches[0].effects[1].share"
        );
        assert_eq!(
            refused_field(|bad| bad.caches[0].effects.reverse()),
            "caches[0].effects"
        );
    }
}
