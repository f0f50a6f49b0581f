//! Evidence about the tasks, from all windows so far: which tasks are live, their sites, their speeds and their phases.

pub mod arrivals;
pub mod curves;
pub mod measured_sizes;
pub mod phases;
pub mod probe_planner;
pub mod service_pauses;
pub mod speeds;
mod thread_clusters;

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    CacheLevel, CounterEvent, Plan, ProcessId, StallCause, TaskId, TaskSample, View,
};

use self::arrivals::TaskArrivals;
use self::curves::CurveChecks;
use self::measured_sizes::{CoRunners, MeasuredSizes, phase_key};
use self::phases::PhaseId;
use self::probe_planner::ProbePlanner;
use self::speeds::SpeedTracker;
use super::model::layout::SiteLayout;
use super::model::problem::{PlanningProblem, ProblemTask};
use super::model::sites::{CacheSite, CpuSites, cache_sites};

/// Number of windows for which the tasks must be the same before a search.
pub const MIN_KNOWN_WINDOWS: u64 = 3;
/// Number of windows after which a decision is made even if new tasks or new phases are still unknown.
pub const PATIENCE_WINDOWS: u64 = 40;

/// Evidence about the tasks; see the module's documentation.
#[derive(Default)]
pub struct TaskEvidence {
    /// The caches in the last window.
    pub sites: Vec<CacheSite>,
    pub speeds: SpeedTracker,
    pub probe_planner: ProbePlanner,
    /// Site on which the machine's own scheduler ran each task.
    pub default_sites: BTreeMap<TaskId, usize>,
    /// Tasks that ran on another cache than a thread of their process while their waits for other caches were counted.
    pub split_tasks: BTreeSet<TaskId>,
    pub arrivals: TaskArrivals,
    pub curves: CurveChecks,
    pub measured_sizes: MeasuredSizes,
    /// Tasks whose phase has changed or whose curve was dropped, with the window of that; searches do not change
    /// their caches.
    pub phase_changed_at: BTreeMap<TaskId, u64>,
    /// The plan in force in the last window in which placements, gangs or shares changed, without probes and penalties.
    last_plan: Option<Plan>,
}

impl TaskEvidence {
    /// Observes a window in which events were counted. Returns whether tasks arrived or exited.
    pub fn observe(&mut self, view: &View<'_>, level: CacheLevel) -> bool {
        let sites = cache_sites(view);
        let cpu_sites = CpuSites::from_sites(&sites);
        let replanned = self.replanned_tasks(view, &sites, &cpu_sites);
        let live_tasks: BTreeSet<TaskId> = view.live_tasks().map(|sample| sample.task).collect();
        let has_changed = self.arrivals.observe(view);
        if sites != self.sites {
            self.renumber_default_sites(&sites);
        }
        if has_changed {
            self.speeds.retain(&live_tasks);
            self.curves.retain(&live_tasks);
            self.default_sites
                .retain(|task, _| live_tasks.contains(task));
            self.split_tasks.retain(|task| live_tasks.contains(task));
        }
        self.speeds.observe(
            view.observation,
            view.previous_plan,
            level,
            |task| phases::current_phase(view, task),
            |task| replanned.contains(&task),
        );
        self.measured_sizes
            .retain(&live_tasks, |task| phases::current_phase(view, task));
        self.record_default_sites(view, &cpu_sites);
        self.record_split_tasks(view, &cpu_sites);
        self.sites = sites;
        has_changed
    }

    /// Keeps each task's default site on the same cache, although sites are numbered anew in each window. The site of a
    /// cache that has gone offline is unknown.
    fn renumber_default_sites(&mut self, sites: &[CacheSite]) {
        let new_position = |old: usize| {
            let cache = self.sites.get(old)?.cache;
            sites.iter().position(|site| site.cache == cache)
        };
        let old_sites = std::mem::take(&mut self.default_sites).into_iter();
        self.default_sites = old_sites
            .filter_map(|(task, site)| Some((task, new_position(site)?)))
            .collect();
    }

    /// Records the misses that tasks have with partitions of their own, or beside the tasks with which they share a
    /// cache, if the speeds are those under this layout.
    pub fn record_counts(
        &mut self,
        view: &View<'_>,
        problem: &PlanningProblem,
        layout: &SiteLayout,
    ) {
        let count_of = |speeds: &SpeedTracker, task: TaskId| {
            let speed = speeds
                .observed_speed(task)
                .filter(|speed| speed.is_current)?;
            Some((speed.misses_per_instr?, speed.windows))
        };

        let fetches_of = |task: TaskId| {
            let speed = self.speeds.observed_speed(task)?;
            Some(speed.misses_per_instr? / speed.elapsed_cycles_per_instr)
        };
        let sizes = problem.exclusive_bytes(layout, fetches_of);
        for (problem_task, bytes) in problem.tasks.iter().zip(sizes) {
            let Some(bytes) = bytes else {
                continue;
            };
            if let Some(count) = count_of(&self.speeds, problem_task.task) {
                self.measured_sizes.record(
                    problem_task.task,
                    phases::current_phase(view, problem_task.task),
                    bytes,
                    count,
                );
            }
        }
        let can_divide = |site: usize| problem.sites[site].partition_units.is_some();
        let is_shared =
            |site: usize| layout.partitions[site].is_empty() && layout.rotations[site].is_none();
        for (site, tasks) in co_runners(view, problem, layout, |site| {
            can_divide(site) && is_shared(site)
        }) {
            let counts: Vec<(TaskId, (f64, u32))> = tasks
                .iter()
                .filter_map(|(task, _)| Some((*task, count_of(&self.speeds, *task)?)))
                .collect();
            let bytes = problem.sites[site].bytes;
            self.measured_sizes.record_shared(bytes, tasks, &counts);
        }
    }

    /// The tasks on sites for which shares, pins or gangs have changed since the last window. A pin or a gang belongs to the
    /// site of its first CPU.
    fn replanned_tasks(
        &mut self,
        view: &View<'_>,
        sites: &[CacheSite],
        cpu_sites: &CpuSites,
    ) -> BTreeSet<TaskId> {
        let plan = view.previous_plan;
        let is_same = |previous: &Plan| {
            (&previous.affinity, &previous.gangs, &previous.shares)
                == (&plan.affinity, &plan.gangs, &plan.shares)
        };
        if self.last_plan.as_ref().is_some_and(is_same) {
            return BTreeSet::new();
        }

        let new_plan = Plan {
            probes: Vec::new(),
            penalties: Vec::new(),
            ..plan.clone()
        };
        let Some(old_plan) = self.last_plan.replace(new_plan) else {
            return BTreeSet::new();
        };

        let mut changed_sites: BTreeSet<usize> = BTreeSet::new();
        for (first_plan, second_plan) in [(&old_plan, plan), (plan, &old_plan)] {
            let shares = first_plan
                .shares
                .iter()
                .filter(|share| !second_plan.shares.contains(share));
            changed_sites.extend(
                shares.filter_map(|share| sites.iter().position(|site| site.cache == share.cache)),
            );
            let pins = first_plan
                .affinity
                .iter()
                .filter(|(task, cpus)| second_plan.affinity.get(task) != Some(cpus));
            let gangs = first_plan
                .gangs
                .iter()
                .filter(|schedule| !second_plan.gangs.contains(schedule));
            let cpus = pins
                .map(|(_, cpus)| cpus)
                .chain(gangs.map(|schedule| &schedule.cpus));
            changed_sites
                .extend(cpus.filter_map(|cpus| cpu_sites.site_of_cpu(cpus.iter().next()?)));
        }
        let is_replanned = |sample: &&TaskSample| {
            cpu_sites
                .site_of_task(sample)
                .is_some_and(|site| changed_sites.contains(&site))
        };
        view.live_tasks()
            .filter(is_replanned)
            .map(|sample| sample.task)
            .collect()
    }

    /// Records the sites of tasks that no plan pins.
    fn record_default_sites(&mut self, view: &View<'_>, cpu_sites: &CpuSites) {
        for sample in view
            .live_tasks()
            .filter(|sample| !view.previous_plan.affinity.contains_key(&sample.task))
        {
            if let Some(site) = cpu_sites.site_of_task(sample) {
                self.default_sites.insert(sample.task, site);
            }
        }
    }

    /// Records tasks that run on another cache than threads of their process and whose waits for shared data would
    /// show.
    fn record_split_tasks(&mut self, view: &View<'_>, cpu_sites: &CpuSites) {
        if !view.live_tasks().any(has_remote_stalls) {
            return;
        }

        // One cache of each process, and whether the process also ran on others.
        let mut process_sites: BTreeMap<ProcessId, (usize, bool)> = BTreeMap::new();
        let sited_samples = || {
            view.live_tasks()
                .filter_map(|sample| Some((sample, cpu_sites.site_of_task(sample)?)))
        };
        for (sample, site) in sited_samples() {
            let (first_site, ran_elsewhere) =
                process_sites.entry(sample.process).or_insert((site, false));
            *ran_elsewhere |= *first_site != site;
        }
        let is_split = |(sample, _): &(&TaskSample, usize)| {
            process_sites[&sample.process].1 && has_remote_stalls(sample)
        };
        self.split_tasks.extend(
            sited_samples()
                .filter(is_split)
                .map(|(sample, _)| sample.task),
        );
    }
}

fn has_remote_stalls(sample: &TaskSample) -> bool {
    let remote_stalls = CounterEvent::StallCycles(StallCause::RemoteCache);
    sample.counts.get(remote_stalls).is_some()
}

/// The tasks on each of the included sites, with their phases.
pub fn co_runners(
    view: &View<'_>,
    problem: &PlanningProblem,
    layout: &SiteLayout,
    is_included: impl Fn(usize) -> bool,
) -> BTreeMap<usize, CoRunners> {
    let mut tasks_by_site: BTreeMap<usize, CoRunners> = BTreeMap::new();
    for (task, task_site) in problem.tasks.iter().zip(&layout.site_by_task) {
        if let Some(site) = task_site.filter(|&site| is_included(site)) {
            tasks_by_site
                .entry(site)
                .or_default()
                .push(with_phase(view, task));
        }
    }
    tasks_by_site
}

fn with_phase(view: &View<'_>, task: &ProblemTask) -> (TaskId, PhaseId) {
    (task.task, phase_key(phases::current_phase(view, task.task)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{
        NullPredictor, capabilities_fixture, last_level_caches, observation_fixture,
    };
    use cachemate_core::{CpuId, EventCount, EventCounts, Plan, Profiles, WindowLength};

    /// Are the caches of unpinned tasks recorded, and the processes that ran on two caches with their waits counted?
    #[test]
    fn task_caches_and_split_tasks_are_recorded() {
        let (topology, can) = (
            last_level_caches(2, 2, CacheLevel::L3, 1 << 20),
            capabilities_fixture(&[]),
        );
        let mut observation = observation_fixture(1, 3);
        for (task, cpu) in observation.tasks.iter_mut().zip([0, 2, 3]) {
            task.process = ProcessId(task.task.0.min(1));
            task.on_cpu_ns = vec![(CpuId(cpu), 1_000_000)];
        }
        observation.tasks[2].process = ProcessId(0);
        let reading = EventCount {
            event: CounterEvent::StallCycles(StallCause::RemoteCache),
            count: 0,
            enabled_share: 1.0,
        };
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
        assert_eq!(
            evidence.default_sites,
            [(TaskId(0), 0), (TaskId(2), 1)].into(),
            "task 1 is pinned"
        );
        assert_eq!(
            evidence.split_tasks,
            [TaskId(0)].into(),
            "the waits of task 2 are not counted"
        );
    }
}
