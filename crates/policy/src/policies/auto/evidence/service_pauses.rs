//! Choice of the service that a probe pauses, in order to measure how much it slows others down.
//!
//! Problem: services that run in every window cannot be separated by watching them. Method: on the caches of a service
//! with a promised slowdown, the co-runner that fetched most lines waits for a few tenths of a second, while all other
//! tasks run on and are counted. Properties: a service with a promise never waits; each other one waits at most once in
//! five minutes, and only if it fetches a tenth of all lines of the cache; after three pauses within five minutes,
//! further ones wait until all probes are paid for.

use std::collections::BTreeMap;

use cachemate_core::{Ability, Cache, CounterEvent, ProbeKind, ServiceIdentity, TaskId, TaskSample, View};

use crate::service_losses::{ServiceActivity, service_windows};

/// Length of a row. The cache fills during the first one.
const ROW_NS: u64 = 100_000_000;
const ROWS: usize = 4;
/// Time after which a service is paused again.
const REPEAT_NS: u64 = 300_000_000_000;
/// Number of pauses within that time that are part of the initial profiling.
const INITIAL_PAUSES: usize = 3;
/// Smallest share of the lines fetched into a cache with which a service is suspected.
const MIN_FETCH_SHARE: f64 = 0.1;

/// Times at which services were paused.
#[derive(Clone, Debug, Default)]
pub struct ServicePauses(BTreeMap<ServiceIdentity, u64>);

impl ServicePauses {
    /// Returns the probe that pauses the next service; `None` if none is due.
    pub fn next_pause(&mut self, view: &View<'_>, is_paid: bool, now_ns: u64) -> Option<ProbeKind> {
        self.0.retain(|_, paused_ns| now_ns.saturating_sub(*paused_ns) < REPEAT_NS);
        let can_pause = [Ability::ProbeFromOutside, Ability::Gangs].iter().all(|a| view.capabilities.has_ability(*a));
        if !can_pause || !(is_paid || self.0.len() < INITIAL_PAUSES) {
            return None;
        }
        let windows = service_windows(view.observation, view.topology);
        let level = view.topology.last_level()?;
        let is_promised = |activity: &ServiceActivity<'_>| {
            activity.live_tasks().any(|task| task.goal.is_some_and(|goal| goal.max_slowdown.is_some()))
        };
        let (cache, service, _) = view
            .topology
            .last_level_caches()
            .filter_map(|cache| {
                let fetched = |activity: &ServiceActivity<'_>| {
                    let tasks = activity.tasks.iter().filter(|task| runs_on(task, cache));
                    tasks.filter_map(|task| task.counts.get(CounterEvent::Misses(level))).sum::<f64>()
                };
                let has_promise = |activity: &ServiceActivity<'_>| {
                    is_promised(activity) && activity.tasks.iter().any(|task| task.has_run() && runs_on(task, cache))
                };
                let total: f64 = windows.values().map(fetched).sum();
                let suspects = windows.iter().filter(|(service, activity)| {
                    let is_movable = activity.live_tasks().any(|task| !task.unmovable);
                    is_movable && !is_promised(activity) && !self.0.contains_key(&***service)
                });
                let (service, lines) = suspects
                    .map(|(service, activity)| (service, fetched(activity)))
                    .max_by(|a, b| a.1.total_cmp(&b.1))
                    .filter(|(_, lines)| *lines > MIN_FETCH_SHARE * total)?;
                windows.values().any(has_promise).then_some((cache, service, lines))
            })
            .max_by(|a, b| a.2.total_cmp(&b.2))?;
        self.0.insert((**service).clone(), now_ns);
        // Tasks that did not run may run during the probe.
        let runs = |task: &&TaskSample| task.service_or_command() != *service && runs_on(task, cache);
        let mut row: Vec<&TaskSample> = view.live_tasks().filter(runs).collect();
        row.sort_by_key(|task| (std::cmp::Reverse(task.ran_ns()), task.task));
        let row: Vec<TaskId> = row.into_iter().map(|task| task.task).collect();
        let rows = vec![row; ROWS];
        Some(ProbeKind::CoRunRows { cache: cache.id, rows, total_ns: ROW_NS, settle_ns: 0, boost: true })
    }
}

/// Returns whether a task ran on this cache, or nowhere.
fn runs_on(task: &TaskSample, cache: &Cache) -> bool {
    !task.has_run() || task.on_cpu_ns.iter().any(|(cpu, ns)| *ns > 0 && cache.cpus.contains(cpu.0))
}
