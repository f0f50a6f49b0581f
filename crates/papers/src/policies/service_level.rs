//! Keeps one program at a rate of work per client, with the smallest sufficient share of the cache (thesis 4.6.4).
//!
//! Problem: a static share is too small while the load is high, and wastes space while it is low. Method: the floor is
//! the rule's `min_rate`, counted in the same work as under `auto` ([`promised_work`]), but it is met by feedback
//! alone, without a forecast. If the program's clients get less than the floor in a window, its share grows in
//! proportion to the shortfall, by at least one unit. After several windows that met the floor, the share shrinks by
//! one unit, but never below a size that has failed with as many clients. All other programs share the remaining units.
//!
//! Properties: no curve is needed. A size that failed is tried again only with fewer clients. Windows in which pages
//! migrate are ignored. Without a goal, or without work by which to measure it, nothing changes.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheId, CacheShare, Decision, GroupId, IndexSet, PageMigration, PartitionSupport, Plan,
    PlanItem, Policy, ProcessId, Reason, ShareMember, TaskId, TaskSample, View, WindowLength,
};
use serde::Deserialize;

use super::{ParameterError, ParameterRange, parse_parameters};
use crate::partition::units::assign;
use crate::partition::units::partitionable_caches;
use crate::work_metric::ServiceRate;

/// Parameters of `service-level`, which the policy's page explains.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Index of the process in order of arrival, from 0. If `rate_per_s` is 0, the first process with a promised rate
    /// is used instead.
    pub process: u32,
    /// Required work per second for each thread that ran; 0 selects the rule's `min_rate`.
    pub rate_per_s: f64,
    /// Number of windows that must meet the floor before the share shrinks by one unit; 0 disables shrinking.
    pub shrink_after: u32,
    /// Initial number of units.
    pub units: u32,
    pub page_migration: PageMigration,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 100_000_000,
            process: 0,
            rate_per_s: 0.0,
            shrink_after: 3,
            units: 1,
            page_migration: PageMigration::All,
        }
    }
}

struct ServiceLevel {
    parameters: Parameters,
    processes: Vec<ProcessId>,
    units: u32,
    satisfied_windows: u32,
    /// Minimum number of units that has not failed, by number of clients.
    min_units_by_clients: BTreeMap<usize, u32>,
}

impl Policy for ServiceLevel {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        for task in &view.observation.tasks {
            if !self.processes.contains(&task.process) {
                self.processes.push(task.process);
            }
        }

        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        let caches = partitionable_caches(view);
        let (Some(&(cache, partition_units)), Some((process, min_rate))) =
            (caches.first(), self.goal_process(view))
        else {
            return Decision::new(plan, reasons);
        };

        let tasks: Vec<&TaskSample> = view
            .movable_tasks()
            .filter(|task| task.process == process)
            .collect();
        if tasks.is_empty() {
            return Decision::new(plan, reasons);
        }
        self.update_units(view, &tasks, min_rate, &partition_units, &mut reasons);
        plan.shares = self.build_shares(view, process, cache, &partition_units);
        Decision::new(plan, reasons)
    }
}

impl ServiceLevel {
    /// The process that has a floor, and the rate that it promises to each client; `None` if there is no floor.
    fn goal_process(&self, view: &View<'_>) -> Option<(ProcessId, f64)> {
        if self.parameters.rate_per_s > 0.0 {
            return Some((
                *self.processes.get(self.parameters.process as usize)?,
                self.parameters.rate_per_s,
            ));
        }
        view.movable_tasks()
            .find_map(|task| Some((task.process, task.goal?.min_rate?)))
    }

    fn update_units(
        &mut self,
        view: &View<'_>,
        tasks: &[&TaskSample],
        min_rate: f64,
        partition_units: &PartitionSupport,
        reasons: &mut Vec<Reason>,
    ) {
        let min_units = partition_units.min_units();
        self.units = self.units.clamp(min_units, partition_units.units());
        let is_share = |item: &PlanItem| matches!(item, PlanItem::Share(..));
        let has_pending_shares = view
            .observation
            .applied
            .pending
            .iter()
            .any(|pending| is_share(&pending.item));

        // A window counts only if the share was in force during it.
        let is_in_force = view
            .plan_in_force()
            .shares
            .iter()
            .any(|share| share.group == SERVICE_GROUP);

        let is_measured = tasks.iter().all(|task| !task.counts.0.is_empty());
        let Some(service_rate) = ServiceRate::measure(view.observation, tasks)
            .filter(|_| !has_pending_shares && is_in_force && is_measured)
        else {
            return;
        };
        let min_sufficient_units = self
            .min_units_by_clients
            .entry(service_rate.clients)
            .or_insert(min_units);
        let units_before = self.units;

        if service_rate.rate_per_s < min_rate {
            *min_sufficient_units =
                (*min_sufficient_units).max((self.units + 1).min(partition_units.units()));
            let missing_units = (min_rate / service_rate.rate_per_s.max(min_rate / 16.0) - 1.0)
                * f64::from(self.units);
            let needed_units = self.units + (libm::ceil(missing_units) as u32).max(1);
            self.units = needed_units
                .max(*min_sufficient_units)
                .min(partition_units.units());
            self.satisfied_windows = 0;
        } else {
            self.satisfied_windows += 1;
            let may_shrink = self.parameters.shrink_after > 0
                && self.satisfied_windows >= self.parameters.shrink_after;
            if may_shrink && self.units > *min_sufficient_units {
                self.units -= 1;
                self.satisfied_windows = 0;
            }
        }

        if self.units != units_before {
            let ids: Vec<TaskId> = tasks.iter().map(|task| task.task).collect();
            let text = format!(
                "{{0}} and its {} clients get {} units instead of {units_before}",
                service_rate.clients, self.units
            );
            let numbers = vec![
                ("rate_per_s".to_string(), service_rate.rate_per_s),
                ("level_per_s".to_string(), min_rate),
            ];
            reasons.push(Reason::new(ids, text, numbers));
        }
    }

    fn build_shares(
        &self,
        view: &View<'_>,
        process: ProcessId,
        cache: CacheId,
        partition_units: &PartitionSupport,
    ) -> Vec<CacheShare> {
        let is_unmovable = |process: ProcessId| {
            view.observation
                .tasks
                .iter()
                .any(|task| task.process == process && task.unmovable)
        };
        let mut co_runners: Vec<ShareMember> = Vec::new();
        for task in view
            .movable_tasks()
            .filter(|task| task.process != process && !is_unmovable(task.process))
        {
            if !co_runners.contains(&ShareMember::Process(task.process)) {
                co_runners.push(ShareMember::Process(task.process));
            }
        }

        let mut groups = vec![(
            SERVICE_GROUP,
            vec![ShareMember::Process(process)],
            self.units,
        )];
        let remaining_units = partition_units.units() - self.units;
        if !co_runners.is_empty()
            && remaining_units >= partition_units.min_units()
            && partition_units.max_shares() > 1
        {
            groups.push((CO_RUNNER_GROUP, co_runners, remaining_units));
        }

        let current_units = |group: GroupId| {
            let share = view
                .previous_plan
                .shares
                .iter()
                .find(|share| share.group == group);
            share
                .map(|share| share.units.set().clone())
                .unwrap_or_default()
        };
        let current_sets: Vec<IndexSet> = groups
            .iter()
            .map(|(group, ..)| current_units(*group))
            .collect();

        let sizes: Vec<u32> = groups.iter().map(|(.., units)| *units).collect();
        let units = assign(&current_sets, &sizes, partition_units);
        let build_share = |((group, members, _), units)| CacheShare {
            group,
            members,
            cache,
            units: partition_units.to_units(units, self.parameters.page_migration),
        };
        groups.into_iter().zip(units).map(build_share).collect()
    }
}

const SERVICE_GROUP: GroupId = GroupId(1);
const CO_RUNNER_GROUP: GroupId = GroupId(0);

pub(super) fn build(text: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters: Parameters = parse_parameters(text)?;
    ParameterRange::OneOrMore.check([("window_ns", parameters.window_ns as f64)])?;
    ParameterRange::FromZero.check([("rate_per_s", parameters.rate_per_s)])?;
    let units = parameters.units;
    let (processes, min_units_by_clients) = (Vec::new(), BTreeMap::new());
    Ok(Box::new(ServiceLevel {
        parameters,
        processes,
        units,
        satisfied_windows: 0,
        min_units_by_clients,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::check_policy;
    use cachemate_core::test_support::*;
    use cachemate_core::*;

    /// Runs windows with these numbers of clients, each of which gets `rate(units, clients)` per second. Returns the
    /// units after each window. The floor comes from the parameter, or from the rule if `promised` is set.
    fn run(
        windows: &[usize],
        promised: Option<f64>,
        reports: bool,
        rate: fn(u32, usize) -> f64,
    ) -> Vec<u32> {
        let level = if promised.is_some() {
            ""
        } else {
            "rate_per_s = 100.0\n"
        };
        let mut policy = build(&format!("window_ns = 1000000000\n{level}units = 4"), 1).unwrap();
        let topology = last_level_caches(1, 4, CacheLevel::L2, 1 << 20);
        let colors = PartitionSupport::Colors {
            colors: 16,
            page_bytes: 4096,
            page_migration_ns: 7_000.0,
        };
        let capabilities = capabilities_fixture(&[]).with_partition(CacheId(0), colors);

        let mut fixture = ViewFixture::new(topology, capabilities, 0);
        let mut units = 4;
        let mut all_units = Vec::new();
        for (window, &clients) in windows.iter().enumerate() {
            let count = if reports {
                1
            } else {
                rate(units, clients) as u64
            };
            let task = |index: usize| TaskSample {
                name: "served".to_string(),
                on_cpu_ns: if index < clients {
                    vec![(CpuId(index as u32), 9)]
                } else {
                    Vec::new()
                },
                counts: EventCounts::exact([(CounterEvent::Instructions, count)]),
                progress: reports.then(|| {
                    if index < clients {
                        rate(units, clients)
                    } else {
                        0.0
                    }
                }),
                goal: promised.map(|rate| Goal {
                    min_rate: Some(rate),
                    ..Goal::default()
                }),
                ..TaskSample::new(TaskId(index as u32), ProcessId(0))
            };
            fixture.observation = observation_of(window as u64, 1_000_000_000, (0..4).map(task));
            let plan = fixture.decide(policy.as_mut(), &NullPredictor).plan;
            units = plan.shares[0].units.set().count();
            all_units.push(units);
        }

        all_units
    }

    /// Does the share shrink to the size that serves two clients, grow when two more arrive, and shrink again when they
    /// leave?
    #[test]
    fn the_share_follows_the_load() {
        let rate = |units: u32, clients: usize| 40.0 * f64::from(units) / clients as f64 + 20.0;
        // Two clients need 4 units for 100 per second each, four clients need 8.
        let windows = [vec![2; 14], vec![4; 14], vec![2; 30]].concat();
        let units = run(&windows, None, true, rate);
        assert_eq!(units[13], 4, "{units:?}");
        assert_eq!(units[27], 8, "{units:?}");
        assert_eq!(units[57], 4, "{units:?}");
        // A size that failed with this number of clients is not tried again.
        let failed = units
            .windows(2)
            .filter(|pair| pair[0] == 4 && pair[1] == 3)
            .count();
        assert_eq!(failed, 1, "{units:?}");
    }

    /// Is a rule's floor met equally in reported work and, if work is not reported, in instructions?
    #[test]
    fn a_rules_floor_is_met_in_reported_work_or_instructions() {
        let rate = |units: u32, clients: usize| 40.0 * f64::from(units) / clients as f64 + 20.0;
        let windows = [vec![2; 14], vec![4; 14], vec![2; 30]].concat();
        let named = run(&windows, None, true, rate);
        assert_eq!(run(&windows, Some(100.0), true, rate), named);
        assert_eq!(run(&windows, Some(100.0), false, rate), named);
    }

    /// Does the policy conform with a floor that some programs reach and others do not?
    #[test]
    fn the_policy_conforms_with_reached_and_missed_floors() {
        check_policy(&|seed| build("rate_per_s = 1000.0", seed).unwrap(), 24).unwrap();
    }

    /// Are invalid parameters rejected?
    #[test]
    fn invalid_parameters_are_rejected() {
        assert!(
            build("rate_per_s = -1.0", 1)
                .err()
                .unwrap()
                .to_string()
                .contains("rate_per_s")
        );
        assert!(
            build("window_ns = 0", 1)
                .err()
                .unwrap()
                .to_string()
                .contains("window_ns")
        );
    }
}
