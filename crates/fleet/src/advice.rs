//! Advice before services start: which of them should not share a cache, and the settings that keep them apart.
//!
//! The interval machine solves every pair of services on one cache, with all threads as busy as requested. A pair is
//! bad if one of the two services exceeds its limit or, without a limit, the default slowdown.

use serde::Serialize;

use crate::corun::{CoRunKey, CoRunMember, CoRunSolver, LOAD_LEVELS};
use crate::spec::FleetService;

/// Maximum slowdown of a service without a limit of its own.
pub const DEFAULT_LIMIT_PERCENT: f64 = 10.0;
/// Maximum number of services per advice, because the number of pairs grows with its square.
pub const MAX_SERVICES: usize = 200;

/// A service about which advice is requested.
#[derive(Clone, PartialEq, Debug)]
pub struct AdvisedService {
    /// Requests, limit and profile of the service.
    pub kind: FleetService,
    /// Whether the requested CPUs are whole numbers and the requests equal the limits, so that a static CPU manager
    /// gives the service exclusive CPUs.
    pub has_whole_cpus: bool,
}

/// Forecast for two services on one cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServicePair {
    /// The service that exceeds its limit, or loses more.
    pub victim: String,
    /// The other service.
    pub aggressor: String,
    /// Slowdown of the victim.
    pub victim_slowdown_percent: f64,
    /// Slowdown of the aggressor.
    pub aggressor_slowdown_percent: f64,
    /// Limit of the victim; [`DEFAULT_LIMIT_PERCENT`] if it has none.
    pub limit_percent: f64,
    /// Whether the two services should not share a cache.
    pub is_bad: bool,
}

/// Advice about one service.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServiceAdvice {
    /// The service.
    pub name: String,
    /// `victim`, `aggressor`, `both` or `neutral`; `None` without a profile.
    pub role: Option<&'static str>,
    /// Services that should not share its cache.
    pub keep_apart: Vec<String>,
    /// Whether the service should have a cache of its own, because it forms bad pairs with most other services.
    pub wants_own_cache: bool,
    /// Recommended settings, as text.
    pub settings: Vec<String>,
}

/// Advice about a list of services.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FleetAdvice {
    /// Kind of the hosts.
    pub machine: String,
    /// All pairs: bad pairs first, ordered by how far the victim exceeds its limit.
    pub pairs: Vec<ServicePair>,
    /// Services in the order given.
    pub services: Vec<ServiceAdvice>,
}

fn corun_member(service: &FleetService, profile: u16, solver: &CoRunSolver) -> CoRunMember {
    let threads = service
        .threads
        .clamp(1, (solver.cpus_per_cache() / 2).max(1) as u16);
    let load = libm::round(service.busy_cpus / f64::from(service.threads) * f64::from(LOAD_LEVELS));
    CoRunMember {
        kind: profile,
        load: load.clamp(1.0, f64::from(LOAD_LEVELS)) as u8,
        threads,
        is_confined: false,
    }
}

/// Slowdowns of two services on one cache in percent: of `member`, then of `other_member`.
fn pair_slowdowns(
    solver: &CoRunSolver,
    member: CoRunMember,
    other_member: CoRunMember,
) -> (f64, f64) {
    let is_swapped = other_member < member;
    let members = if is_swapped {
        vec![other_member, member]
    } else {
        vec![member, other_member]
    };
    let speeds = solver.member_speeds(&CoRunKey {
        members: members.clone(),
        ..CoRunKey::default()
    });
    let slowdown_percent = |index: usize| {
        let solo_cycles = f64::from(solver.solo_cycles_per_instr(members[index]));
        ((f64::from(speeds[index].cycles_per_instr) / solo_cycles - 1.0) * 100.0).max(0.0)
    };
    if is_swapped {
        (slowdown_percent(1), slowdown_percent(0))
    } else {
        (slowdown_percent(0), slowdown_percent(1))
    }
}

/// Returns advice about services on hosts of one kind. `solver` must have the profiles of those services that have
/// one, in the same order.
pub fn advise(solver: &CoRunSolver, services: &[AdvisedService]) -> FleetAdvice {
    let mut next_profile = 0;
    let profiled_services: Vec<(usize, CoRunMember)> = (0..services.len())
        .filter(|&index| services[index].kind.profile.is_some())
        .map(|index| {
            next_profile += 1;
            (
                index,
                corun_member(&services[index].kind, next_profile - 1, solver),
            )
        })
        .collect();
    let limit_percent = |index: usize| {
        services[index]
            .kind
            .max_slowdown_percent
            .unwrap_or(DEFAULT_LIMIT_PERCENT)
    };
    let mut pairs: Vec<(f64, usize, usize, ServicePair)> = Vec::new();
    for (position, &(one, member)) in profiled_services.iter().enumerate() {
        for &(other_service, other_member) in &profiled_services[position + 1..] {
            let (own_slowdown, other_slowdown) = pair_slowdowns(solver, member, other_member);
            let (excess, other_excess) = (
                own_slowdown - limit_percent(one),
                other_slowdown - limit_percent(other_service),
            );
            let ((victim, victim_slowdown), (aggressor, aggressor_slowdown)) =
                if excess >= other_excess {
                    ((one, own_slowdown), (other_service, other_slowdown))
                } else {
                    ((other_service, other_slowdown), (one, own_slowdown))
                };
            let pair = ServicePair {
                victim: services[victim].kind.name.clone(),
                aggressor: services[aggressor].kind.name.clone(),
                victim_slowdown_percent: victim_slowdown,
                aggressor_slowdown_percent: aggressor_slowdown,
                limit_percent: limit_percent(victim),
                is_bad: victim_slowdown > limit_percent(victim),
            };
            pairs.push((excess.max(other_excess), victim, aggressor, pair));
        }
    }
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let service_advice = |(index, service): (usize, &AdvisedService)| {
        let bad_pairs = || pairs.iter().filter(|pair| pair.3.is_bad);
        let (is_victim, is_aggressor) = (
            bad_pairs().any(|pair| pair.1 == index),
            bad_pairs().any(|pair| pair.2 == index),
        );
        let bad_co_runners = bad_pairs().filter(|pair| pair.1 == index || pair.2 == index);
        let keep_apart: Vec<String> = bad_co_runners
            .map(|pair| {
                services[if pair.1 == index { pair.2 } else { pair.1 }]
                    .kind
                    .name
                    .clone()
            })
            .collect();
        let wants_own_cache =
            is_victim && 2 * keep_apart.len() > profiled_services.len().saturating_sub(1);
        let role = service
            .kind
            .profile
            .as_ref()
            .map(|_| match (is_victim, is_aggressor) {
                (true, true) => "both",
                (true, false) => "victim",
                (false, true) => "aggressor",
                (false, false) => "neutral",
            });
        ServiceAdvice {
            name: service.kind.name.clone(),
            role,
            wants_own_cache,
            settings: recommended_settings(service, is_victim, is_aggressor, wants_own_cache),
            keep_apart,
        }
    };
    let service_advices = services.iter().enumerate().map(service_advice).collect();
    let pairs = pairs.into_iter().map(|(.., pair)| pair).collect();
    FleetAdvice {
        machine: solver.host().name.clone(),
        pairs,
        services: service_advices,
    }
}

fn recommended_settings(
    service: &AdvisedService,
    is_victim: bool,
    is_aggressor: bool,
    wants_own_cache: bool,
) -> Vec<String> {
    let mut settings = Vec::new();
    if service.kind.profile.is_none() {
        settings.push("measure it first: without a profile there is no forecast".to_string());
        return settings;
    }
    if is_victim {
        let limit = service
            .kind
            .max_slowdown_percent
            .unwrap_or(DEFAULT_LIMIT_PERCENT);
        settings.push(format!(
            "annotations: cachemate.io/class: victim, cachemate.io/max-slowdown: \"{limit}%\""
        ));
        settings.push(match service.has_whole_cpus {
            true => "kubelet: cpuManagerPolicy static with prefer-align-cpus-by-uncorecache".to_string(),
            false => {
                "whole CPUs with requests equal to limits, so that the kubelet can align them to one cache".to_string()
            }
        });
    }
    if is_aggressor {
        settings.push(
            "annotation: cachemate.io/class: aggressor (a small part of the cache by RDT)"
                .to_string(),
        );
    }
    if wants_own_cache {
        settings.push("a cache of its own: request all CPUs of one".to_string());
    } else if is_victim {
        settings.push(
            "podAntiAffinity on kubernetes.io/hostname against the services to keep apart"
                .to_string(),
        );
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a service without a profile reported as unmeasured, and never called neutral?
    #[test]
    fn services_without_a_profile_are_reported_as_unmeasured() {
        let kind = FleetService {
            cpus: 1.0,
            threads: 1,
            busy_cpus: 1.0,
            weight: 1.0,
            ..FleetService::default()
        };
        let unknown = AdvisedService {
            kind,
            has_whole_cpus: true,
        };
        assert!(recommended_settings(&unknown, false, false, false)[0].contains("measure"));
    }
}
