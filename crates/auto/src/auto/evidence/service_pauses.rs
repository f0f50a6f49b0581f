//! Choice of the service that a probe pauses, in order to measure how much it slows others down.
//!
//! Problem: services that run in every window cannot be separated by watching them. Method: on the caches of a service
//! with a promised slowdown, the co-runner that fetched most lines waits for a few tenths of a second, while all other
//! tasks run on and are counted. Then all run for as long under the same conditions, as the reference: a probe keeps
//! every CPU awake, which alone changes the speed of tasks that sleep. The pause comes first, because programs that a
//! paused service starts are not known to the probe. Properties: a service with a `max_slowdown` never waits; each
//! other one waits at most once in five minutes, and only if it fetches a tenth of all lines of the cache; after three
//! pauses within five minutes, further ones wait until all probes are paid for.

use std::collections::BTreeMap;

use cachemate_core::{
    Ability, Cache, CounterEvent, ProbeKind, ServiceIdentity, TaskId, TaskSample, View,
};

use crate::service_losses::{ServiceActivity, activities_by_service};

/// Length of a row. The cache fills during the first one with each set of tasks.
const ROW_NS: u64 = 100_000_000;
/// Number of rows without the service, and with it.
const ROWS: usize = 4;
/// Time after which a service is paused again.
const REPEAT_NS: u64 = 300_000_000_000;
/// Number of pauses within that time that are part of the initial profiling.
const INITIAL_PAUSES: usize = 3;
/// Smallest share of the lines fetched into a cache with which a service is suspected.
const MIN_FETCH_SHARE: f64 = 0.1;

/// Pauses of services.
#[derive(Clone, Debug, Default)]
pub struct ServicePauses {
    /// Times at which services were paused.
    paused_ns: BTreeMap<ServiceIdentity, u64>,
    /// The service that was paused last.
    pub last_service: Option<ServiceIdentity>,
}

impl ServicePauses {
    /// Forgets the last pause, because its probe has ended without a result.
    pub fn withdraw(&mut self) {
        if let Some(service) = self.last_service.take() {
            self.paused_ns.remove(&service);
        }
    }

    /// The probe that pauses the next service; `None` if none is due.
    pub fn next_pause(
        &mut self,
        view: &View<'_>,
        is_within_budget: bool,
        now_ns: u64,
    ) -> Option<ProbeKind> {
        self.paused_ns
            .retain(|_, paused_ns| now_ns.saturating_sub(*paused_ns) < REPEAT_NS);
        let can_pause = [Ability::ProbeFromOutside, Ability::Gangs]
            .iter()
            .all(|a| view.capabilities.has_ability(*a));
        if !can_pause
            || !view.live_tasks().any(is_promised)
            || !(is_within_budget || self.paused_ns.len() < INITIAL_PAUSES)
        {
            return None;
        }

        let windows = activities_by_service(view.observation, view.topology);
        let level = view.topology.last_level()?;
        let has_promise = |activity: &ServiceActivity<'_>| activity.live_tasks().any(is_promised);

        let (cache, service, _) = view
            .topology
            .last_level_caches()
            .filter_map(|cache| {
                let fetched = |activity: &ServiceActivity<'_>| {
                    let tasks = activity.tasks.iter().filter(|task| runs_on(task, cache));
                    tasks
                        .filter_map(|task| task.counts.get(CounterEvent::Misses(level)))
                        .sum::<f64>()
                };
                let runs_with_promise = |activity: &ServiceActivity<'_>| {
                    has_promise(activity)
                        && activity
                            .tasks
                            .iter()
                            .any(|task| task.has_run() && runs_on(task, cache))
                };

                let total: f64 = windows.values().map(fetched).sum();
                let suspects = windows.iter().filter(|(service, activity)| {
                    let is_movable = activity.live_tasks().any(|task| !task.unmovable);
                    is_movable
                        && !has_promise(activity)
                        && !self.paused_ns.contains_key(&***service)
                });
                let (service, lines) = suspects
                    .map(|(service, activity)| (service, fetched(activity)))
                    .max_by(|a, b| a.1.total_cmp(&b.1))
                    .filter(|(_, lines)| *lines > MIN_FETCH_SHARE * total)?;
                windows
                    .values()
                    .any(runs_with_promise)
                    .then_some((cache, service, lines))
            })
            .max_by(|a, b| a.2.total_cmp(&b.2))?;

        self.paused_ns.insert((**service).clone(), now_ns);
        self.last_service = Some((**service).clone());
        // Tasks that did not run may run during the probe.
        let mut tasks: Vec<&TaskSample> = view
            .live_tasks()
            .filter(|task| runs_on(task, cache))
            .collect();
        tasks.sort_by_key(|task| std::cmp::Reverse(task.ran_ns()));
        let row_of = |runs: &dyn Fn(&TaskSample) -> bool| -> Vec<TaskId> {
            tasks
                .iter()
                .filter(|task| runs(task))
                .map(|task| task.task)
                .collect()
        };
        let (pause, reference) = (
            row_of(&|task| task.service_or_command() != *service),
            row_of(&|_| true),
        );
        let rows = [vec![pause; ROWS], vec![reference; ROWS]].concat();
        Some(ProbeKind::CoRunRows {
            cache: cache.id,
            rows,
            total_ns: ROW_NS,
            settle_ns: 0,
            boost: true,
        })
    }
}

/// A promised rate does not count, because a pause measures slowdowns.
pub fn is_promised(task: &TaskSample) -> bool {
    task.goal.is_some_and(|goal| goal.max_slowdown.is_some())
}

/// Whether a task ran on this cache, or nowhere.
fn runs_on(task: &TaskSample, cache: &Cache) -> bool {
    !task.has_run()
        || task
            .on_cpu_ns
            .iter()
            .any(|(cpu, ns)| *ns > 0 && cache.cpus.contains(cpu.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches,
    };
    use cachemate_core::{CacheLevel, CpuId, EventCounts, Goal};

    /// Is the service with most lines paused first, each at most once in five minutes, a fourth one only if probes are
    /// paid for, and never a service with a promise or with few lines?
    #[test]
    fn a_promised_service_is_never_paused_and_others_seldom() {
        let topology = last_level_caches(1, 8, CacheLevel::L3, 1 << 23);
        let capabilities = capabilities_fixture(&[Ability::ProbeFromOutside, Ability::Gangs]);
        let mut fixture = ViewFixture::new(topology, capabilities, 6);
        let lines = [9_000, 1_500, 2_000, 2_500, 3_000, 10];
        for (index, (task, lines)) in fixture.observation.tasks.iter_mut().zip(lines).enumerate() {
            task.name = format!("s{index}");
            task.on_cpu_ns = vec![(CpuId(index as u32), 1_000)];
            task.counts = EventCounts::exact([(CounterEvent::Misses(CacheLevel::L3), lines)]);
        }

        fixture.observation.tasks[0].goal = Some(Goal {
            max_slowdown: Some(0.05),
            ..Goal::default()
        });
        let view = fixture.view(&NullPredictor);
        let mut pauses = ServicePauses::default();
        let mut paused_task =
            |is_within_budget, now_ns| match pauses.next_pause(&view, is_within_budget, now_ns)? {
                ProbeKind::CoRunRows { rows, .. } => {
                    assert!(
                        rows[ROWS..].iter().all(|row| row.len() == 6),
                        "all tasks run in the reference"
                    );
                    view.observation
                        .tasks
                        .iter()
                        .map(|task| task.task)
                        .find(|task| !rows[0].contains(task))
                }
                kind => panic!("{kind:?}"),
            };
        assert_eq!(
            [4, 3, 2].map(|id| Some(TaskId(id))),
            [0, 1, 2].map(|now_ns| paused_task(false, now_ns))
        );
        assert_eq!(paused_task(true, 3), None, "the next has less than a tenth");
        assert_eq!(paused_task(true, REPEAT_NS), Some(TaskId(4)));
    }
}
