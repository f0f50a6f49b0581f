//! Evidence about the tasks, from all windows so far: which tasks are live, their sites, their speeds and their phases.

pub mod arrivals;
pub mod curves;
pub mod measured_sizes;
pub mod phases;
pub mod probe_planner;
pub mod speeds;
mod thread_clusters;

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{CacheLevel, CounterEvent, ProcessId, StallCause, TaskId, TaskSample, View};

use self::arrivals::TaskArrivals;
use self::curves::CurveChecks;
use self::measured_sizes::MeasuredSizes;
use self::probe_planner::ProbePlanner;
use self::speeds::SpeedTracker;
use super::model::problem::{CpuSites, cache_sites};

/// Number of windows for which speeds must be known.
pub const KNOWN_WINDOWS: u64 = 3;
/// Number of windows after which a decision is made even if new tasks or new phases are still unknown.
pub const PATIENCE_WINDOWS: u64 = 40;

/// Evidence about the tasks; see the module's documentation.
#[derive(Default)]
pub struct TaskEvidence {
    pub speeds: SpeedTracker,
    pub probe_planner: ProbePlanner,
    /// Site on which the machine's own scheduler ran each task.
    pub default_site: BTreeMap<TaskId, usize>,
    /// Tasks that ran on another cache than a thread of their process while their waits for other caches were counted.
    pub split_processes: BTreeSet<TaskId>,
    pub arrivals: TaskArrivals,
    pub curves: CurveChecks,
    pub sizes: MeasuredSizes,
    /// Tasks whose phase has changed or whose curve was dropped, with the window of that; searches wait for them.
    pub phase_changed_at: BTreeMap<TaskId, u64>,
}

impl TaskEvidence {
    /// Observes a window in which events were counted. Returns whether tasks arrived or exited.
    pub fn observe(&mut self, view: &View<'_>, level: CacheLevel) -> bool {
        self.speeds.observe(view.observation, view.previous_plan, level, |task| phases::current_phase(view, task));
        let cpu_sites = CpuSites::from_sites(&cache_sites(view));
        let live_tasks: BTreeSet<TaskId> = view.live_tasks().map(|sample| sample.task).collect();
        self.sizes.retain(&live_tasks, |task| phases::current_phase(view, task));
        self.record_homes(view, &cpu_sites);
        self.record_split_processes(view, &cpu_sites);
        self.arrivals.observe(view)
    }

    /// Records the sites of tasks that no plan pins.
    fn record_homes(&mut self, view: &View<'_>, cpu_sites: &CpuSites) {
        let live_tasks: BTreeSet<TaskId> = view.live_tasks().map(|sample| sample.task).collect();
        self.default_site.retain(|task, _| live_tasks.contains(task));
        for sample in view.live_tasks().filter(|sample| !view.previous_plan.affinity.contains_key(&sample.task)) {
            if let Some(site) = cpu_sites.site_of_task(sample) {
                self.default_site.insert(sample.task, site);
            }
        }
    }

    /// Records tasks that run on another cache than threads of their process and whose waits for shared data would
    /// show.
    fn record_split_processes(&mut self, view: &View<'_>, cpu_sites: &CpuSites) {
        let live_tasks: BTreeSet<TaskId> = view.live_tasks().map(|sample| sample.task).collect();
        self.split_processes.retain(|task| live_tasks.contains(task));
        // One cache of each process, and whether the process also ran on others.
        let mut process_sites: BTreeMap<ProcessId, (usize, bool)> = BTreeMap::new();
        let sited_samples = || view.live_tasks().filter_map(|sample| Some((sample, cpu_sites.site_of_task(sample)?)));
        for (seen, site) in sited_samples() {
            let (first, ran_elsewhere) = process_sites.entry(seen.process).or_insert((site, false));
            *ran_elsewhere |= *first != site;
        }
        let has_remote_stalls =
            |sample: &TaskSample| sample.counts.get(CounterEvent::StallCycles(StallCause::RemoteCache)).is_some();
        let is_split = |(seen, _): &(&TaskSample, usize)| process_sites[&seen.process].1 && has_remote_stalls(seen);
        self.split_processes.extend(sited_samples().filter(is_split).map(|(seen, _)| seen.task));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{NullPredictor, capabilities_fixture, last_level_caches, observation_fixture};
    use cachemate_core::{CpuId, EventCount, EventCounts, Plan, Profiles, WindowLength};

    /// Are the caches of unpinned tasks recorded, and the processes that ran on two caches with their waits counted?
    #[test]
    fn homes_and_split_processes_are_recorded() {
        let (topology, can) = (last_level_caches(2, 2, CacheLevel::L3, 1 << 20), capabilities_fixture(&[]));
        let mut observation = observation_fixture(1, 3);
        for (task, cpu) in observation.tasks.iter_mut().zip([0, 2, 3]) {
            task.process = ProcessId(task.task.0.min(1));
            task.on_cpu_ns = vec![(CpuId(cpu), 1_000_000)];
        }
        observation.tasks[2].process = ProcessId(0);
        let reading =
            EventCount { event: CounterEvent::StallCycles(StallCause::RemoteCache), count: 0, enabled_share: 1.0 };
        observation.tasks[0].counts = EventCounts(vec![reading]);
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        plan.affinity.insert(TaskId(1), "2-3".parse().unwrap());
        let mut evidence = TaskEvidence::default();
        let profiles = Profiles::new();
        let observe = |evidence: &mut TaskEvidence| {
            let view = View {
                topology: &topology,
                capabilities: &can,
                observation: &observation,
                profiles: &profiles,
                previous_plan: &plan,
                predictor: &NullPredictor,
                verdicts: &(),
            };
            evidence.observe(&view, CacheLevel::L3)
        };
        assert!(observe(&mut evidence), "all of them arrived");
        assert!(!observe(&mut evidence), "no other task");
        assert_eq!(evidence.default_site, [(TaskId(0), 0), (TaskId(2), 1)].into(), "task 1 is pinned");
        assert_eq!(evidence.split_processes, [TaskId(0)].into(), "the waits of task 2 are not counted");
    }
}
