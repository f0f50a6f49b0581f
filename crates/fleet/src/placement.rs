//! Policies that choose a host for a service.
//!
//! A host can take a service if the service's requests fit. As in kube-scheduler, the scores of the scheduler and of
//! the extender are then added; the extender's score counts ten times its weight, which is 2 here.

use crate::host::FleetHost;
pub use crate::placement_policy::PlacementPolicy;
use crate::scorer::{MAX_SCORE, ServiceDemand, forecast_nodes, passes_filter, score_nodes};
use crate::spec::FleetService;

/// Weight of the extender beside the scheduler's own score.
const EXTENDER_WEIGHT: f64 = 2.0;

/// Capacity of a host for requests.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HostCapacity {
    /// Number of CPUs.
    pub cpus: f64,
    /// Bytes of memory.
    pub memory_bytes: f64,
}

impl HostCapacity {
    fn has_room_for(&self, host: &FleetHost, kind: &FleetService) -> bool {
        host.requested_cpus + kind.cpus <= self.cpus + 1e-9
            && host.requested_bytes + kind.memory_bytes <= self.memory_bytes + 0.5
    }

    /// Mean of the shares of CPUs and memory once the service is added; above 1 only if it does not fit.
    fn requested_share(&self, host: &FleetHost, kind: &FleetService) -> f64 {
        let cpu_share = (host.requested_cpus + kind.cpus) / self.cpus;
        let memory_share = (host.requested_bytes + kind.memory_bytes) / self.memory_bytes;
        0.5 * (cpu_share + memory_share)
    }
}

/// Chooses the host for a service; `None` if it fits on no host. `excluded_host` is the host that the service leaves.
/// Among equal hosts, the first is chosen.
pub fn choose_host(
    policy: PlacementPolicy,
    hosts: &[FleetHost],
    capacity: &HostCapacity,
    kind: &FleetService,
    service: &ServiceDemand<'_>,
    count_same_kind: &dyn Fn(usize) -> u32,
    excluded_host: Option<usize>,
) -> Option<usize> {
    let fitting_hosts: Vec<usize> = (0..hosts.len())
        .filter(|&index| Some(index) != excluded_host && capacity.has_room_for(&hosts[index], kind))
        .collect();
    let free_percent = |index: usize| 100.0 * (1.0 - capacity.requested_share(&hosts[index], kind));
    let best_by = |score: &dyn Fn(usize) -> f64| {
        let mut best: Option<(f64, usize)> = None;
        for (position, &index) in fitting_hosts.iter().enumerate() {
            let host_score = score(position);
            if best.is_none_or(|(best_score, _)| host_score > best_score) {
                best = Some((host_score, index));
            }
        }
        best.map(|(_, index)| index)
    };

    match policy {
        PlacementPolicy::Requests => best_by(&|candidate| free_percent(fitting_hosts[candidate])),
        PlacementPolicy::BinPack => best_by(&|candidate| -free_percent(fitting_hosts[candidate])),
        PlacementPolicy::Spread => best_by(&|candidate| {
            let index = fitting_hosts[candidate];
            -f64::from(count_same_kind(index)) * 1e6 - f64::from(hosts[index].services)
        }),
        PlacementPolicy::Misses => {
            let fill_rate = |index: usize| hosts[index].fill_bytes_per_second();
            let max_rate = fitting_hosts
                .iter()
                .map(|&index| fill_rate(index))
                .fold(0.0, f64::max);
            let miss_score = |index: usize| {
                if max_rate > 0.0 {
                    f64::from(MAX_SCORE) * (1.0 - fill_rate(index) / max_rate)
                } else {
                    0.0
                }
            };
            best_by(&|candidate| {
                free_percent(fitting_hosts[candidate])
                    + 10.0 * EXTENDER_WEIGHT * libm::round(miss_score(fitting_hosts[candidate]))
            })
        }
        PlacementPolicy::Forecast => {
            let node_forecasts = forecast_nodes(
                service,
                fitting_hosts.iter().map(|&index| Some(&hosts[index].state)),
            );
            let keeps_known_limits = passes_filter(&node_forecasts);
            let scores = score_nodes(service, &node_forecasts);
            best_by(&|candidate| {
                let extender_score = 10.0 * EXTENDER_WEIGHT * f64::from(scores[candidate]);
                if keeps_known_limits[candidate] {
                    free_percent(fitting_hosts[candidate]) + extender_score
                } else {
                    f64::NEG_INFINITY
                }
            })
        }
    }
}
