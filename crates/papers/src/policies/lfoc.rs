//! Few ways for streams, and the rest by lookahead (LFOC: Garcia-Garcia, Saez, Castro and Prieto-Matias, ICPP 2019).
//!
//! Problem: a partition for each program needs more ways than a cache has, and most programs do not need one. Method:
//! each program is in one of three classes by its curve. *Streaming*: it misses much at every size and is not slowed
//! down by a small one. *Sensitive*: it is slowed down by a small size. *Light*: neither. At most two partitions of one
//! way hold the streams, five in each; each takes up to three light programs besides. Every sensitive program gets a
//! partition of its own, sized by lookahead (UCP: Qureshi and Patt, MICRO 2006) on the curves of slowdowns, so that the
//! programs slow down alike. The remaining light programs join the sensitive ones in turn.
//!
//! Properties: deterministic, one pass, no search; a partition is never judged by its effect. A curve is needed for
//! every program of the cache; until then nothing changes. The paper measures curves by running a program with each
//! number of ways in turn, which takes Cache Allocation Technology; here they come from the traces that `cache-sizing`
//! uses. Where a cache has other units than their eleven ways, a *way* is an eleventh of the cache.

use std::collections::BTreeMap;

use cachemate_core::{
    Decision, GroupId, PageMigration, Plan, Policy, ProbeEvidence, ProbeId, ProbeKind,
    ProbeRequest, ProcessId, Reason, TaskId, View, WindowLength,
};
use serde::Deserialize;

use super::{ParameterError, ParameterRange, parse_parameters};
use crate::partition::demand_curve::{DemandCurve, MeasuredSpeed};
use crate::partition::partitioned_cache::{
    CacheProcess, HomeCaches, PartitionedCache, SharingGroup,
};
use crate::solvers::sizing::{UnitClaim, allocate_by_lookahead};

/// Parameters of `lfoc`, which the policy's page explains.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Misses per thousand cycles from which a program may be streaming.
    pub streaming_from_misses: f64,
    /// Slowdown on one way up to which a program may be streaming.
    pub streaming_max_slowdown: f64,
    /// Slowdown on two ways from which a program is sensitive.
    pub sensitive_from_slowdown: f64,
    pub streams_per_partition: u32,
    /// Light programs that a partition of streams takes besides.
    pub light_per_partition: u32,
    pub trace_entries: u32,
    pub trace_budget_ns: u64,
    pub page_migration: PageMigration,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 100_000_000,
            streaming_from_misses: 10.0,
            streaming_max_slowdown: 0.03,
            sensitive_from_slowdown: 0.05,
            streams_per_partition: 5,
            light_per_partition: 3,
            trace_entries: 163_840,
            trace_budget_ns: 1_000_000_000,
            page_migration: PageMigration::All,
        }
    }
}

/// Number of ways of the caches for which the paper's limits were chosen.
const PUBLISHED_WAYS: u32 = 11;
/// Maximum number of partitions for streams.
const STREAM_PARTITIONS: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SharingClass {
    Streaming,
    Sensitive,
    Light,
}

struct Lfoc {
    parameters: Parameters,
    home_caches: HomeCaches,
    /// The trace that was requested of each task without a curve.
    traces: BTreeMap<TaskId, ProbeRequest>,
    next_probe: u32,
}

impl Policy for Lfoc {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        let is_live = |task: TaskId| view.movable_tasks().any(|sample| sample.task == task);
        self.traces.retain(|task, _| is_live(*task));
        for result in &view.observation.probe_results {
            if let ProbeEvidence::Trace { task, .. } = &result.evidence
                && result.complete
            {
                self.traces.remove(task);
            }
        }

        for domain in self.home_caches.collect(view) {
            let current_shares = domain.surviving_shares(&view.plan_to_keep().shares);
            let demands: Option<Vec<DemandCurve>> = domain
                .processes
                .iter()
                .map(|cache_process| demand_of(view, &domain, cache_process))
                .collect();
            plan.probes.extend(self.request_traces(view, &domain));
            let Some(demands) = demands else {
                plan.shares.extend(current_shares);
                continue;
            };
            let migration = self.parameters.page_migration;
            match self.divide(&domain, &demands) {
                Some(groups) => {
                    let shares = domain.divide(&groups, &current_shares, migration);
                    if shares != current_shares {
                        self.explain(&domain, &demands, &groups, &mut reasons);
                    }
                    plan.shares.extend(shares);
                }
                None if current_shares.is_empty() => {}
                None => plan.shares.extend(domain.undivided_shares(migration)),
            }
        }
        Decision::new(plan, reasons)
    }
}

impl Lfoc {
    fn classify(&self, demand: &DemandCurve) -> SharingClass {
        let units = demand.units();
        let way_units = units.div_ceil(PUBLISHED_WAYS);
        let at = |held: u32| held.min(units) as usize - 1;
        let slowdown_on =
            |held: u32| demand.cycles_per_instr[at(held)] / demand.whole_cache_cycles() - 1.0;
        let misses_per_kilo_cycle = demand.misses_per_kilo_instr[units as usize - 1]
            / demand.cycles_per_instr[units as usize - 1];

        if misses_per_kilo_cycle >= self.parameters.streaming_from_misses
            && slowdown_on(way_units) <= self.parameters.streaming_max_slowdown
        {
            SharingClass::Streaming
        } else if slowdown_on(2 * way_units) >= self.parameters.sensitive_from_slowdown {
            SharingClass::Sensitive
        } else {
            SharingClass::Light
        }
    }

    /// The partitions of a cache; `None` if all programs share it.
    fn divide(
        &self,
        domain: &PartitionedCache<'_>,
        demands: &[DemandCurve],
    ) -> Option<Vec<SharingGroup>> {
        let units = domain.partition_units.units();
        let min_units = domain.partition_units.min_units();
        let classes: Vec<SharingClass> =
            demands.iter().map(|demand| self.classify(demand)).collect();
        let classes = &classes;
        let members_of = |class| (0..classes.len()).filter(move |&at| classes[at] == class);
        let streams: Vec<usize> = members_of(SharingClass::Streaming).collect();
        let mut light: Vec<usize> = members_of(SharingClass::Light).collect();
        let mut sensitive: Vec<usize> = members_of(SharingClass::Sensitive).collect();
        if sensitive.is_empty() || classes.len() < 2 {
            return None;
        }

        // Each stream partition is one way; the streams are dealt out in order of arrival.
        let way_units = units.div_ceil(PUBLISHED_WAYS).max(min_units);
        let wanted = streams
            .len()
            .div_ceil(self.parameters.streams_per_partition as usize);
        let partitions = wanted.min(STREAM_PARTITIONS);
        let mut groups: Vec<(Vec<usize>, u32)> = vec![(Vec::new(), way_units); partitions];
        for (position, stream) in streams.into_iter().enumerate() {
            groups[position % partitions].0.push(stream);
        }
        for (members, _) in &mut groups {
            let joining = light
                .len()
                .min(self.parameters.light_per_partition as usize);
            members.extend(light.drain(..joining));
        }

        // What hardware has no group for shares one: the programs that lose least.
        let remaining = units.checked_sub(way_units * partitions as u32)?;
        let max_groups = (domain.partition_units.max_shares() as usize)
            .saturating_sub(partitions)
            .min((remaining / min_units) as usize);
        if max_groups == 0 {
            return None;
        }
        sensitive.sort_by(|&a, &b| {
            let by_loss = demands[b]
                .sensitivity()
                .total_cmp(&demands[a].sensitivity());
            by_loss.then(a.cmp(&b))
        });
        let mut claimants: Vec<Vec<usize>> = Vec::new();
        for at in sensitive {
            if claimants.len() < max_groups {
                claimants.push(vec![at]);
            } else if let Some(last) = claimants.last_mut() {
                last.push(at);
            }
        }
        let claim_of = |members: &Vec<usize>| UnitClaim {
            costs: (0..remaining as usize)
                .map(|held| {
                    let slowdown = |&at: &usize| {
                        demands[at].cycles_per_instr[held] / demands[at].whole_cache_cycles()
                    };
                    members.iter().map(slowdown).sum()
                })
                .collect(),
            min_units,
        };
        let claims: Vec<UnitClaim> = claimants.iter().map(claim_of).collect();
        let sizes = allocate_by_lookahead(&claims, remaining).ok()?;
        let count = claimants.len();
        for (position, at) in light.into_iter().enumerate() {
            claimants[position % count].push(at);
        }
        groups.extend(claimants.into_iter().zip(sizes));

        let build_group = |(members, units): (Vec<usize>, u32)| {
            let members: Vec<ProcessId> = members
                .into_iter()
                .map(|at| domain.processes[at].process)
                .collect();
            SharingGroup {
                id: GroupId(members[0].0 + 1),
                members,
                units,
            }
        };
        Some(groups.into_iter().map(build_group).collect())
    }

    fn explain(
        &self,
        domain: &PartitionedCache<'_>,
        demands: &[DemandCurve],
        groups: &[SharingGroup],
        reasons: &mut Vec<Reason>,
    ) {
        for (cache_process, demand) in domain.processes.iter().zip(demands) {
            let class = match self.classify(demand) {
                SharingClass::Streaming => "streams",
                SharingClass::Sensitive => "is sensitive",
                SharingClass::Light => "needs little",
            };
            let Some(group) = groups
                .iter()
                .find(|group| group.members.contains(&cache_process.process))
            else {
                continue;
            };

            let text = format!("{{0}} {class}: {} units", group.units);
            let numbers = vec![("sensitivity".to_string(), demand.sensitivity())];
            reasons.push(Reason::new(
                vec![cache_process.tasks[0].task],
                text,
                numbers,
            ));
        }
    }

    /// A trace request for the first thread of every process without a curve.
    fn request_traces(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
    ) -> Vec<ProbeRequest> {
        if self.parameters.trace_entries == 0 || domain.processes.len() < 2 {
            return Vec::new();
        }

        let mut requests = Vec::new();
        for cache_process in domain
            .processes
            .iter()
            .filter(|process| !process.has_curve(view))
        {
            let task = cache_process.tasks[0].task;
            let request = self.traces.entry(task).or_insert_with(|| {
                self.next_probe += 1;
                ProbeRequest {
                    id: ProbeId(self.next_probe),
                    kind: ProbeKind::MissTrace {
                        task,
                        entries: self.parameters.trace_entries,
                        includes_code: true,
                    },
                    budget_ns: self.parameters.trace_budget_ns,
                }
            });
            requests.push(request.clone());
        }
        requests
    }
}

/// The demand of a process as the mean of its threads'; `None` without a curve or a speed.
fn demand_of(
    view: &View<'_>,
    domain: &PartitionedCache<'_>,
    cache_process: &CacheProcess<'_>,
) -> Option<DemandCurve> {
    let bytes = domain.cache.size_bytes?;
    let penalty = view.predictor.miss_penalty_cycles()?;
    let demand_of_task = |task: TaskId| {
        let profile = view.profiles.get(&task)?;
        let speed = profile
            .rates
            .observed_instr_per_cycle
            .filter(|speed| speed.value > 0.0)
            .map(|speed| MeasuredSpeed {
                cycles_per_instr: 1.0 / speed.value,
                misses_per_kilo_instr: profile
                    .rates
                    .observed_misses_per_kilo_instr
                    .map(|misses| misses.value),
                stall_cycles_per_miss: None,
            });
        let units = domain.partition_units.units();
        DemandCurve::from_profile(profile, speed, penalty, bytes, units)
    };

    let demands: Vec<DemandCurve> = cache_process
        .tasks
        .iter()
        .filter_map(|task| demand_of_task(task.task))
        .collect();
    DemandCurve::mean_of_curves(&demands)
}

pub(super) fn build(text: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters: Parameters = parse_parameters(text)?;
    ParameterRange::OneOrMore.check([
        ("window_ns", parameters.window_ns as f64),
        (
            "streams_per_partition",
            f64::from(parameters.streams_per_partition),
        ),
    ])?;

    ParameterRange::FromZero.check([
        ("streaming_from_misses", parameters.streaming_from_misses),
        ("streaming_max_slowdown", parameters.streaming_max_slowdown),
        (
            "sensitive_from_slowdown",
            parameters.sensitive_from_slowdown,
        ),
    ])?;

    Ok(Box::new(Lfoc {
        parameters,
        home_caches: HomeCaches::default(),
        traces: BTreeMap::new(),
        next_probe: 0,
    }))
}

#[cfg(test)]
mod tests {
    use cachemate_core::{Cache, CacheId, CacheLevel, PartitionSupport, TaskSample, Topology};

    use super::*;

    const WAYS: u32 = 11;

    /// A program that is as fast as alone from this number of ways on, and loses half of its speed on one.
    fn demand(enough_ways: u32, misses: f64) -> DemandCurve {
        let cycles = |ways: u32| {
            let missing = f64::from(enough_ways.saturating_sub(ways));
            1.0 + missing / f64::from(enough_ways.max(2) - 1)
        };
        DemandCurve {
            misses_per_kilo_instr: vec![misses; WAYS as usize],
            cycles_per_instr: (1..=WAYS).map(cycles).collect(),
        }
    }

    fn policy() -> Lfoc {
        Lfoc {
            parameters: Parameters::default(),
            home_caches: HomeCaches::default(),
            traces: BTreeMap::new(),
            next_probe: 0,
        }
    }

    /// The members and the units of each partition of a cache with these programs.
    fn partitions(demands: &[DemandCurve], max_groups: u32) -> Option<Vec<(Vec<u32>, u32)>> {
        let topology: Topology =
            cachemate_core::test_support::last_level_caches(1, 8, CacheLevel::L3, 11 << 20);
        let cache: &Cache = topology
            .caches
            .iter()
            .find(|cache| cache.id == CacheId(0))
            .unwrap();
        let samples: Vec<TaskSample> = (0..demands.len() as u32)
            .map(|index| TaskSample::new(TaskId(index), ProcessId(index)))
            .collect();

        let support = PartitionSupport::Ways {
            ways: WAYS,
            min_ways: 1,
            contiguous: true,
            max_groups,
            device_ways: 0,
        };
        let mut domain = PartitionedCache::new(cache, support);
        domain.processes = samples
            .iter()
            .map(|sample| CacheProcess {
                process: sample.process,
                tasks: vec![sample],
                phase: Default::default(),
            })
            .collect();
        let groups = policy().divide(&domain, demands)?;
        let describe = |group: SharingGroup| {
            let members = group.members.iter().map(|process| process.0).collect();
            (members, group.units)
        };
        Some(groups.into_iter().map(describe).collect())
    }

    /// Does the page's example get the partitions that the page states?
    #[test]
    fn streams_get_a_way_and_lookahead_sizes_the_others() {
        let (stream, light) = (demand(1, 30.0), demand(1, 0.1));
        let demands = [stream, demand(6, 5.0), demand(4, 5.0), light.clone()];
        let expected = vec![(vec![0, 3], 1), (vec![1], 6), (vec![2], 4)];
        assert_eq!(partitions(&demands, 8), Some(expected));
        // Light programs alone are not divided.
        assert_eq!(partitions(&[light.clone(), light], 8), None);
    }

    /// Do more programs than hardware has groups share the last one, with every unit in use?
    #[test]
    fn programs_without_a_group_of_their_own_share_the_last() {
        let demands = [
            demand(1, 30.0),
            demand(9, 5.0),
            demand(5, 5.0),
            demand(3, 5.0),
        ];
        let found = partitions(&demands, 4).unwrap();
        assert_eq!(found.iter().map(|(_, units)| units).sum::<u32>(), WAYS);
        let members: Vec<usize> = found.iter().map(|(members, _)| members.len()).collect();
        assert_eq!(members, [1, 1, 2]);
    }
}
