//! One step of one resource at a time for programs with promises (PARTIES: Chen, Delimitrou and Martínez, ASPLOS 2019).
//!
//! Problem: several services on one cache have promises, and which resource each of them lacks is not known. Method: in
//! every window, the service that misses its promise by most grows by one step of its resource, at the expense of the
//! programs without a promise. If two steps do not help, its next resource is tried. If every service has more than a
//! fifth of its promise to spare, the one with most to spare gives one step back; a step whose return breaks the
//! promise is taken again at once, and is not returned again for twenty windows. The resources are units of the cache,
//! and CPUs of the cache on which programs without a promise must not run; the paper also steps frequency, memory, disk
//! and network.
//!
//! Properties: no model and no curve, only the measured promise. Many small changes, which are cheap with ways and
//! dear with colors. At most one service grows in a window. Without promises, nothing changes.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheShare, CpuSet, Decision, GroupId, PageMigration, Plan, Policy, ProcessId, Reason, View,
    WindowLength,
};
use serde::Deserialize;

use super::{ParameterError, ParameterRange, parse_parameters};
use crate::partition::partitioned_cache::{
    CacheProcess, HomeCaches, PartitionedCache, SharingGroup, tasks_of,
};
use crate::solo_speeds::{SoloSpeeds, promise_slack};

/// Parameters of `parties`, which the policy's page explains.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Part of a promise that must be to spare before a step is returned.
    pub spare_from: f64,
    /// Number of steps of one resource that may be taken in vain before the next one is tried.
    pub steps_in_vain: u32,
    /// Number of windows for which a step is not returned after its return broke the promise.
    pub hold_windows: u64,
    pub page_migration: PageMigration,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 500_000_000,
            spare_from: 0.2,
            steps_in_vain: 2,
            hold_windows: 20,
            page_migration: PageMigration::All,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StepResource {
    CacheUnits,
    Cpus,
}

impl StepResource {
    fn next(self) -> Self {
        match self {
            StepResource::CacheUnits => StepResource::Cpus,
            StepResource::Cpus => StepResource::CacheUnits,
        }
    }
}

/// The steps that a service has taken.
struct ServiceSteps {
    resource: StepResource,
    /// Units of the cache; 0 as long as it shares all of them.
    units: u32,
    /// CPUs that programs without a promise must leave.
    cpus: u32,
    /// Steps of the present resource since the slack last grew.
    in_vain: u32,
    slack_before: f64,
    returned: Option<StepResource>,
    held_until: u64,
}

struct Parties {
    parameters: Parameters,
    home_caches: HomeCaches,
    solo_speeds: SoloSpeeds,
    services: BTreeMap<ProcessId, ServiceSteps>,
}

impl Policy for Parties {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        self.solo_speeds.observe(view.observation);
        self.services
            .retain(|process, _| view.live_tasks().any(|task| task.process == *process));
        let current = view.plan_to_keep();

        for domain in self.home_caches.collect(view) {
            let current_shares = domain.surviving_shares(&current.shares);
            if !domain.processes.iter().any(CacheProcess::is_promised) {
                let migration = self.parameters.page_migration;
                plan.shares.extend(if domain.is_undivided(&current_shares) {
                    current_shares
                } else {
                    domain.undivided_shares(migration)
                });
                continue;
            }

            if let Some(slacks) = self.measure_slacks(view, &domain) {
                self.step(view, &domain, &slacks, &mut reasons);
            }
            plan.shares.extend(self.shares(&domain, &current_shares));
            self.confine(view, &domain, &mut plan);
        }

        Decision::new(plan, reasons)
    }
}

impl Parties {
    /// The slack of each service: the part of its limit, or of its rate, that is to spare; negative if the promise is
    /// missed. `None` if any is unknown, or the plan of this window is not in force yet.
    fn measure_slacks(
        &self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
    ) -> Option<Vec<(ProcessId, f64)>> {
        if !view.observation.applied.pending.is_empty() {
            return None;
        }
        domain
            .processes
            .iter()
            .filter(|cache_process| cache_process.is_promised())
            .map(|cache_process| {
                let slack = promise_slack(view, cache_process, &self.solo_speeds)?;
                Some((cache_process.process, slack))
            })
            .collect()
    }

    /// At most one step: growth for the service that misses its promise by most, or a return by the one with most to
    /// spare.
    fn step(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        slacks: &[(ProcessId, f64)],
        reasons: &mut Vec<Reason>,
    ) {
        let window = view.observation.window;
        let Some(&(worst, worst_slack)) =
            slacks.iter().reduce(|a, b| if b.1 < a.1 { b } else { a })
        else {
            return;
        };
        if worst_slack < 0.0 {
            self.grow(view, domain, worst, worst_slack, reasons);
            return;
        }

        for (process, slack) in slacks {
            if let Some(service) = self.services.get_mut(process) {
                service.returned = None;
                service.in_vain = 0;
                service.slack_before = *slack;
            }
        }
        if worst_slack <= self.parameters.spare_from {
            return;
        }
        let may_return = |process: &ProcessId| {
            self.services.get(process).is_some_and(|service| {
                service.held_until <= window && (service.units > 0 || service.cpus > 0)
            })
        };
        let richest = slacks
            .iter()
            .filter(|(process, _)| may_return(process))
            .reduce(|a, b| if b.1 > a.1 { b } else { a });
        let Some(&(process, slack)) = richest else {
            return;
        };
        let Some(service) = self.services.get_mut(&process) else {
            return;
        };
        let min_units = domain.partition_units.min_units();
        if service.cpus > 0 {
            service.cpus -= 1;
            service.returned = Some(StepResource::Cpus);
        } else {
            service.units = service.units.saturating_sub(1);
            service.units = if service.units < min_units {
                0
            } else {
                service.units
            };
            service.returned = Some(StepResource::CacheUnits);
        }
        let text = format!(
            "{{0}} has to spare and returns a step: {} units, {} CPUs of its own",
            service.units, service.cpus
        );
        reasons.push(explain(domain, process, text, slack));
    }

    /// Takes one step for the service that misses its promise by most.
    fn grow(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        process: ProcessId,
        slack: f64,
        reasons: &mut Vec<Reason>,
    ) {
        let units = domain.partition_units.units();
        let min_units = domain.partition_units.min_units();
        let others = domain.processes.iter().any(|other| !other.is_promised());
        let held = |services: &BTreeMap<ProcessId, ServiceSteps>, cpus: bool| -> u32 {
            let on_cache = |process: &ProcessId| {
                domain
                    .processes
                    .iter()
                    .any(|cache_process| cache_process.process == *process)
            };
            services
                .iter()
                .filter(|(process, _)| on_cache(process))
                .map(|(_, service)| if cpus { service.cpus } else { service.units })
                .sum()
        };
        let free_units = units
            .saturating_sub(if others { min_units } else { 0 })
            .saturating_sub(held(&self.services, false));
        let online = view.online().intersection(&domain.cache.cpus).count();
        let free_cpus = if others {
            online.saturating_sub(1 + held(&self.services, true))
        } else {
            0
        };

        let parameters = &self.parameters;
        let service = self.services.entry(process).or_insert(ServiceSteps {
            resource: StepResource::CacheUnits,
            units: 0,
            cpus: 0,
            in_vain: 0,
            slack_before: slack,
            returned: None,
            held_until: 0,
        });
        if let Some(resource) = service.returned.take() {
            service.resource = resource;
            service.held_until = view.observation.window + parameters.hold_windows;
        } else if service.in_vain > 0 && slack > service.slack_before {
            service.in_vain = 0;
        }
        if service.in_vain >= parameters.steps_in_vain {
            service.resource = service.resource.next();
            service.in_vain = 0;
        }
        let first_units = min_units.max(units / 2).min(free_units);
        let can_take = |resource: StepResource, service: &ServiceSteps| match resource {
            StepResource::CacheUnits if service.units == 0 => first_units >= min_units,
            StepResource::CacheUnits => free_units > 0,
            StepResource::Cpus => free_cpus > 0,
        };
        if !can_take(service.resource, service) {
            service.resource = service.resource.next();
        }
        if !can_take(service.resource, service) {
            return;
        }
        match service.resource {
            StepResource::CacheUnits if service.units == 0 => service.units = first_units,
            StepResource::CacheUnits => service.units += 1,
            StepResource::Cpus => service.cpus += 1,
        }
        service.in_vain += 1;
        service.slack_before = slack;
        let text = format!(
            "{{0}} misses its promise and takes a step: {} units, {} CPUs of its own",
            service.units, service.cpus
        );
        reasons.push(explain(domain, process, text, slack));
    }

    /// The shares: one for each service that has units, and one for the rest of the cache.
    fn shares(
        &self,
        domain: &PartitionedCache<'_>,
        current_shares: &[CacheShare],
    ) -> Vec<CacheShare> {
        let migration = self.parameters.page_migration;
        let units_of = |cache_process: &CacheProcess<'_>| {
            self.services
                .get(&cache_process.process)
                .map_or(0, |service| service.units)
        };
        let max_groups = domain.partition_units.max_shares() as usize;
        let mut rest = SharingGroup {
            id: GroupId(0),
            members: Vec::new(),
            units: domain.partition_units.units(),
        };

        let mut groups = Vec::new();
        for cache_process in &domain.processes {
            let units = units_of(cache_process);
            if units == 0 || groups.len() + 1 >= max_groups {
                rest.members.push(cache_process.process);
                continue;
            }
            rest.units = rest.units.saturating_sub(units);
            groups.push(SharingGroup {
                id: GroupId(cache_process.process.0 + 1),
                members: vec![cache_process.process],
                units,
            });
        }

        if groups.is_empty() {
            return if current_shares.is_empty() {
                Vec::new()
            } else {
                domain.undivided_shares(migration)
            };
        }

        if !rest.members.is_empty() {
            groups.push(rest);
        }
        domain.divide(&groups, current_shares, migration)
    }

    /// Keeps programs without a promise off the CPUs that services have taken.
    fn confine(&self, view: &View<'_>, domain: &PartitionedCache<'_>, plan: &mut Plan) {
        let taken: u32 = domain
            .processes
            .iter()
            .filter_map(|cache_process| self.services.get(&cache_process.process))
            .map(|service| service.cpus)
            .sum();
        let online = view.online().intersection(&domain.cache.cpus);
        if taken == 0 || taken >= online.count() {
            return;
        }

        let left: CpuSet = online.iter().skip(taken as usize).collect();
        for cache_process in domain
            .processes
            .iter()
            .filter(|process| !process.is_promised())
        {
            for task in &cache_process.tasks {
                plan.affinity.insert(task.task, left.clone());
            }
        }
    }
}

fn explain(domain: &PartitionedCache<'_>, process: ProcessId, text: String, slack: f64) -> Reason {
    let numbers = vec![("slack".to_string(), slack)];
    Reason::new(tasks_of(&domain.processes, process), text, numbers)
}

pub(super) fn build(text: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters: Parameters = parse_parameters(text)?;
    ParameterRange::OneOrMore.check([
        ("window_ns", parameters.window_ns as f64),
        ("steps_in_vain", f64::from(parameters.steps_in_vain)),
    ])?;
    ParameterRange::FromZero.check([("spare_from", parameters.spare_from)])?;
    Ok(Box::new(Parties {
        parameters,
        home_caches: HomeCaches::default(),
        solo_speeds: SoloSpeeds::default(),
        services: BTreeMap::new(),
    }))
}

#[cfg(test)]
mod tests {
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches, observation_of,
    };
    use cachemate_core::{
        CacheId, CacheLevel, CounterEvent, CpuId, EventCounts, Fact, Goal, PartitionSupport,
        Profile, RateFacts, TaskId, TaskSample,
    };

    use super::*;

    /// Runs a service that may be 10 % slower than alone beside a program without a promise; `slowdown` is that of the
    /// service with these units and CPUs of its own. Returns units and CPUs after each window.
    fn run(windows: u64, slowdown: fn(u32, u32) -> f64) -> Vec<(u32, u32)> {
        let ways = PartitionSupport::Ways {
            ways: 16,
            min_ways: 1,
            contiguous: true,
            max_groups: 8,
            device_ways: 0,
        };
        let topology = last_level_caches(1, 4, CacheLevel::L3, 16 << 20);
        let capabilities = capabilities_fixture(&[]).with_partition(CacheId(0), ways);
        let mut fixture = ViewFixture::new(topology, capabilities, 0);

        let solo = RateFacts {
            solo_instr_per_cycle: Some(Fact::oracle(1.0)),
            ..RateFacts::default()
        };
        fixture
            .profiles
            .insert(TaskId(0), Profile::default().with_rates(solo));

        let mut policy = build("", 1).unwrap();
        let mut state = (0, 0);
        let mut states = Vec::new();
        for window in 0..windows {
            let speed = 1.0 / (1.0 + slowdown(state.0, state.1));
            let task = |index: u32| TaskSample {
                on_cpu_ns: vec![(CpuId(index), 9)],
                counts: EventCounts::exact([
                    (CounterEvent::Instructions, (speed * 1e9) as u64),
                    (CounterEvent::Cycles, 1_000_000_000),
                ]),
                goal: (index == 0).then(|| Goal {
                    max_slowdown: Some(0.1),
                    ..Goal::default()
                }),
                ..TaskSample::new(TaskId(index), ProcessId(index))
            };
            fixture.observation = observation_of(window, 1_000_000_000, (0..2).map(task));
            let plan = fixture.decide(policy.as_mut(), &NullPredictor).plan;
            let own_share = plan.shares.iter().find(|share| share.group == GroupId(1));
            let own_cpus = plan
                .affinity
                .get(&TaskId(1))
                .map_or(0, |cpus| 4 - cpus.count());
            state = (
                own_share.map_or(0, |share| share.units.set().count()),
                own_cpus,
            );
            states.push(state);
        }
        states
    }

    /// Does a service grow until its promise holds, return one step, and keep it after the promise broke?
    #[test]
    fn a_service_grows_until_its_promise_holds() {
        let states = run(12, |units, _| match units {
            0..=7 => 0.30,
            8 => 0.20,
            9 => 0.12,
            _ => 0.05,
        });
        let units: Vec<u32> = states.iter().map(|state| state.0).collect();
        assert_eq!(units, [8, 9, 10, 9, 10, 10, 10, 10, 10, 10, 10, 10]);
    }

    /// Is the next resource tried if the first does not help?
    #[test]
    fn cpus_are_taken_if_units_do_not_help() {
        let states = run(8, |_, cpus| if cpus >= 2 { 0.09 } else { 0.40 });
        assert_eq!(states.last().unwrap().1, 2, "{states:?}");
        assert!(states.last().unwrap().0 <= 10, "{states:?}");
    }

    /// Does a service with room to spare return everything in time?
    #[test]
    fn what_is_not_needed_is_returned() {
        let states = run(30, |_, _| 0.01);
        assert_eq!(states.last(), Some(&(0, 0)));
    }
}
