//! The planning problem: the caches, their tasks, and the model of each task.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{ProcessId, TaskId, TaskSample, View};
use cachemate_papers::gang_quantum::cycles_per_ns;

use super::bus::MemoryPathModel;
use super::program_model::{MemoryDistance, ModelInputs, ProgramModel};
use super::sites::{CacheSite, CpuSites};
use crate::auto::evidence::curves::CurveChecks;
use crate::auto::evidence::speeds::SpeedTracker;

/// A live task, identified by its position in the order of arrival.
#[derive(Clone, Debug)]
pub struct ProblemTask {
    pub task: TaskId,
    pub process: ProcessId,
    pub is_movable: bool,
    /// Model of the task; without a model, the task has no forecast.
    pub program: Option<ProgramModel>,
    /// Cluster of tasks that share data with this one.
    pub cluster: Option<usize>,
    /// Site on which the task was observed; `None` if it did not run.
    pub last_site: Option<usize>,
    /// Whether the task stays on its site. Either the site is closed, or other threads of its process are on the same
    /// cache and the task has never run on another one, so that its waits there are unknown.
    pub stays_on_site: bool,
}

/// The planning problem; see the module's documentation.
#[derive(Clone, Debug)]
pub struct PlanningProblem {
    pub sites: Vec<CacheSite>,
    pub tasks: Vec<ProblemTask>,
    pub cycles_per_ns: f64,
    /// Cost of waiting for memory, if the queue was measured.
    pub bus: Option<MemoryPathModel>,
    pub min_slice_ns: Option<u64>,
    /// Whether a task without a model is running on each site, so that no task of the site has a forecast. Empty means
    /// no site.
    pub closed_sites: Vec<bool>,
}

/// The evidence of earlier windows from which models are computed.
pub struct PriorObservations<'a> {
    pub sites: &'a [CacheSite],
    pub speeds: &'a SpeedTracker,
    pub clusters: &'a BTreeMap<TaskId, usize>,
    pub default_sites: &'a BTreeMap<TaskId, usize>,
    pub split_tasks: &'a BTreeSet<TaskId>,
    pub curves: &'a CurveChecks,
}

impl PriorObservations<'_> {
    /// The distance of the task's pages from each node, if it is known for all pages.
    fn memory_distance(
        view: &View<'_>,
        task: &TaskSample,
        site: Option<&CacheSite>,
    ) -> MemoryDistance {
        let Some((site, pages)) = site.zip(task.pages_per_node.as_deref()) else {
            return MemoryDistance::default();
        };

        let factor_of_node = |node: usize| {
            view.topology
                .memory_factor(node as u32, pages)
                .unwrap_or(0.0)
        };
        let factors = (0..view.topology.memory_latency.len())
            .map(factor_of_node)
            .collect();
        MemoryDistance {
            factors,
            current_node: site.memory_node as usize,
        }
    }
}

impl PlanningProblem {
    /// Builds the problem. `previous_model` returns the models that need not be computed again.
    pub fn new(
        view: &View<'_>,
        prior: &PriorObservations<'_>,
        mut previous_model: impl FnMut(TaskId) -> Option<ProgramModel>,
    ) -> Option<Self> {
        let PriorObservations {
            speeds,
            clusters,
            default_sites,
            split_tasks,
            ..
        } = *prior;
        let sites = prior.sites.to_vec();
        let cpu_sites = CpuSites::from_sites(&sites);
        let largest_cache_bytes = sites.iter().map(|site| site.bytes).fold(0.0, f64::max);

        let line_bytes = view
            .topology
            .last_level_caches()
            .find_map(|cache| cache.line_bytes);
        let line_bytes = f64::from(line_bytes.unwrap_or(64));
        let current_site = |task: &TaskSample| {
            cpu_sites
                .site_of_task(task)
                .or(default_sites.get(&task.task).copied())
        };
        let sited_tasks: Vec<(&TaskSample, Option<usize>)> = view
            .live_tasks()
            .map(|task| (task, current_site(task)))
            .collect();
        // The number of tasks of each cluster, on all sites and on each.
        let mut cluster_sizes: BTreeMap<usize, u32> = BTreeMap::new();
        let mut local_sizes: BTreeMap<(usize, Option<usize>), u32> = BTreeMap::new();
        for (task, site) in &sited_tasks {
            if let Some(&cluster) = clusters.get(&task.task) {
                *cluster_sizes.entry(cluster).or_default() += 1;
                *local_sizes.entry((cluster, *site)).or_default() += 1;
            }
        }
        let local_partner_share = |task: &TaskSample, site: Option<usize>| {
            let cluster = *clusters.get(&task.task)?;
            let partners = cluster_sizes[&cluster] - 1;
            let local_partners = local_sizes[&(cluster, site)] - 1;
            Some(f64::from(local_partners) / f64::from(partners.max(1)))
        };

        let mut process_sites: Vec<(ProcessId, Option<usize>)> = sited_tasks
            .iter()
            .map(|(task, site)| (task.process, *site))
            .collect();
        process_sites.sort_unstable();
        // Processes with several threads on one site.
        let thread_sites: BTreeSet<(ProcessId, Option<usize>)> = process_sites
            .windows(2)
            .filter(|pair| pair[0] == pair[1])
            .map(|pair| pair[0])
            .collect();

        let build_problem_task = |&(task, site): &(&TaskSample, Option<usize>)| {
            let model_inputs = |profile, speed| ModelInputs {
                memory: PriorObservations::memory_distance(
                    view,
                    task,
                    site.map(|site| &sites[site]),
                ),
                profile,
                speed,
                goal: task.goal,
                penalty_cycles: view.predictor.miss_penalty_cycles(),
                largest_cache_bytes,
                line_bytes,
                local_partner_share: local_partner_share(task, site).unwrap_or(0.0),
            };

            let profile_and_speed = || {
                prior
                    .curves
                    .usable_profile(view, task.task)
                    .zip(speeds.observed_speed(task.task))
            };
            let build_model = || {
                profile_and_speed().and_then(|(profile, speed)| {
                    ProgramModel::from_inputs(&model_inputs(profile, speed))
                })
            };

            ProblemTask {
                task: task.task,
                process: task.process,
                is_movable: !task.unmovable,
                program: previous_model(task.task).or_else(build_model),
                cluster: clusters.get(&task.task).copied(),
                last_site: site,
                stays_on_site: !clusters.contains_key(&task.task)
                    && !split_tasks.contains(&task.task)
                    && thread_sites.contains(&(task.process, site)),
            }
        };

        let tasks: Vec<ProblemTask> = sited_tasks.iter().map(build_problem_task).collect();
        let cycles_per_ns = cycles_per_ns(view).unwrap_or(1.0);
        let min_slice_ns = view.capabilities.min_slice_ns;
        let speed_on_package = |task: &ProblemTask| {
            let package = sites[task.last_site?].package;
            Some((package, speeds.observed_speed(task.task)?))
        };
        let bus = MemoryPathModel::new(tasks.iter().filter_map(speed_on_package), line_bytes);
        (!sites.is_empty() && !tasks.is_empty()).then_some(PlanningProblem {
            sites,
            tasks,
            cycles_per_ns,
            bus,
            min_slice_ns,
            closed_sites: Vec::new(),
        })
    }

    /// Closes the sites of unknown tasks whose evidence is pending, because forecasts of those caches would leave these
    /// tasks out. Tasks of a closed site stay, and no task joins them.
    pub fn close_sites(&mut self, is_pending: impl Fn(TaskId) -> bool) {
        let is_unknown = |problem_task: &&ProblemTask| {
            problem_task.program.is_none() && is_pending(problem_task.task)
        };
        let sites: BTreeSet<usize> = self
            .tasks
            .iter()
            .filter(is_unknown)
            .filter_map(|problem_task| problem_task.last_site)
            .collect();
        if sites.is_empty() {
            return;
        }

        self.closed_sites = (0..self.sites.len())
            .map(|site| sites.contains(&site))
            .collect();
        let is_on_closed_site = |problem_task: &&mut ProblemTask| {
            problem_task
                .last_site
                .is_some_and(|site| sites.contains(&site))
        };
        self.tasks
            .iter_mut()
            .filter(is_on_closed_site)
            .for_each(|problem_task| problem_task.stays_on_site = true);
    }

    /// The tasks in order of arrival.
    pub fn task_ids(&self) -> impl Iterator<Item = TaskId> + '_ {
        self.tasks.iter().map(|problem_task| problem_task.task)
    }

    /// Whether the site is excluded from decisions.
    pub fn is_closed(&self, site: usize) -> bool {
        self.closed_sites.get(site).copied().unwrap_or(false)
    }

    /// The task then counts as unknown.
    pub fn drop_model(&mut self, task: TaskId) {
        self.tasks
            .iter_mut()
            .filter(|problem_task| problem_task.task == task)
            .for_each(|problem_task| problem_task.program = None);
    }

    /// Whether the task may be moved. Threads that may share data are not separated without evidence.
    pub fn can_move(&self, index: usize) -> bool {
        self.tasks[index].is_movable && !self.tasks[index].stays_on_site
    }

    pub fn index_by_task(&self) -> BTreeMap<TaskId, usize> {
        self.tasks
            .iter()
            .enumerate()
            .map(|(index, problem_task)| (problem_task.task, index))
            .collect()
    }

    /// The positions of the tasks that have a forecast.
    pub fn known_tasks(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.tasks.len()).filter(|&index| self.tasks[index].program.is_some())
    }
}

#[cfg(test)]
impl PlanningProblem {
    /// A problem at 2 GHz in which sites do not wait for one another and gangs are not possible.
    pub fn undisturbed_problem(sites: Vec<CacheSite>, tasks: Vec<ProblemTask>) -> Self {
        let (min_slice_ns, closed_sites) = (None, Vec::new());
        PlanningProblem {
            sites,
            tasks,
            cycles_per_ns: 2.0,
            bus: None,
            min_slice_ns,
            closed_sites,
        }
    }
}
