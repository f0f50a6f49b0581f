//! The planning problem: the caches, their tasks, and the model of each task.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{CacheId, CpuSet, PartitionSupport, ProcessId, TaskId, TaskSample, View};

use super::bus::MemoryPathModel;
use super::layout::SiteLayout;
use super::program_model::{MemoryDistance, ModelInputs, ProgramModel, PromisedRate};
use super::score::forecast_speeds;
use super::score_cache::ScoreCache;
use crate::gang_quantum::cycles_per_ns;
use crate::policies::auto::evidence::curves::CurveChecks;
use crate::policies::auto::evidence::speeds::SpeedTracker;
use crate::work_metric::WorkMetric;

/// A last-level cache with its online CPUs.
#[derive(Clone, PartialEq, Debug)]
pub struct CacheSite {
    pub cache: CacheId,
    pub cpus: CpuSet,
    /// Number of tasks that fit on the site without sharing a core.
    pub cores: usize,
    /// The site's package; sites of one package share a path to memory.
    pub package: u32,
    /// The memory node nearest to the site.
    pub memory_node: u32,
    pub bytes: f64,
    pub partition_units: Option<PartitionSupport>,
}

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
    pub must_stay: bool,
}

/// With more tasks than this, no partition is explored, because the effect of one curve is lost in those of the others.
const MAX_EXPLORED_TASKS: usize = 24;

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

/// Returns the sites of a machine; none if cache sizes are unknown.
pub fn cache_sites(view: &View<'_>) -> Vec<CacheSite> {
    let online = view.online();
    let caches = view
        .topology
        .last_level_caches()
        .filter(|cache| cache.cpus.intersects(&online));
    let topology_cpus = &view.topology.cpus;
    let find_cpu = |id: u32| {
        topology_cpus
            .binary_search_by_key(&id, |cpu| cpu.id.0)
            .ok()
            .map(|index| &topology_cpus[index])
    };
    let build_site = |cache: &cachemate_core::Cache| {
        let cpus = cache.cpus.intersection(&online);
        let mut cores: Vec<u32> = cpus
            .iter()
            .filter_map(find_cpu)
            .map(|cpu| cpu.core)
            .collect();
        cores.sort_unstable();
        cores.dedup();
        Some(CacheSite {
            cache: cache.id,
            cpus,
            cores: cores.len(),
            package: cache
                .cpus
                .iter()
                .find_map(find_cpu)
                .map_or(0, |cpu| cpu.package),
            memory_node: cache
                .cpus
                .iter()
                .find_map(find_cpu)
                .map_or(0, |cpu| cpu.memory_node),
            bytes: cache.size_bytes.filter(|&bytes| bytes > 0)? as f64,
            partition_units: PartitionSupport::preferred(view.partitions_of(cache.id)),
        })
    };
    caches
        .map(build_site)
        .collect::<Option<Vec<CacheSite>>>()
        .unwrap_or_default()
}

/// The site of each CPU.
pub struct CpuSites {
    sites: Vec<Option<usize>>,
}

impl CpuSites {
    pub fn from_sites(sites: &[CacheSite]) -> Self {
        let cpu_count = sites
            .iter()
            .flat_map(|site| site.cpus.iter())
            .max()
            .map_or(0, |last| last as usize + 1);
        let mut site_by_cpu = vec![None; cpu_count];
        for (index, site) in sites.iter().enumerate() {
            site.cpus
                .iter()
                .for_each(|cpu| site_by_cpu[cpu as usize] = Some(index));
        }
        CpuSites { sites: site_by_cpu }
    }

    /// Returns the site of an online CPU.
    pub fn site_of_cpu(&self, cpu: u32) -> Option<usize> {
        self.sites.get(cpu as usize).copied().flatten()
    }

    /// Returns the site on which a task spent most of its time; ties go to the first site.
    pub fn site_of_task(&self, task: &TaskSample) -> Option<usize> {
        let mut site_times: Vec<(usize, u64)> = Vec::with_capacity(task.on_cpu_ns.len());
        for (cpu, ns) in task.on_cpu_ns.iter().filter(|(_, ns)| *ns > 0) {
            let Some(site) = self.site_of_cpu(cpu.0) else {
                continue;
            };
            match site_times
                .iter_mut()
                .find(|(known_site, _)| *known_site == site)
            {
                Some((_, sum)) => *sum += ns,
                None => site_times.push((site, *ns)),
            }
        }
        let longest_residency = site_times
            .into_iter()
            .reduce(|a, b| if (b.1, a.0) > (a.1, b.0) { b } else { a })?;
        Some(longest_residency.0)
    }
}

/// The evidence of earlier windows from which models are computed.
pub struct PriorObservations<'a> {
    pub speeds: &'a SpeedTracker,
    pub clusters: &'a BTreeMap<TaskId, usize>,
    pub default_sites: &'a BTreeMap<TaskId, usize>,
    pub split_tasks: &'a BTreeSet<TaskId>,
    pub curves: &'a CurveChecks,
}

impl PriorObservations<'_> {
    /// Returns the distance of the task's pages from each node, if it is known for all pages.
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
        let sites = cache_sites(view);
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
        let local_partner_share = |task: &TaskSample| {
            let own_cluster = clusters.get(&task.task)?;
            let partners: Vec<&TaskSample> = view
                .live_tasks()
                .filter(|partner| {
                    partner.task != task.task && clusters.get(&partner.task) == Some(own_cluster)
                })
                .collect();
            let local_partners = partners
                .iter()
                .filter(|partner| current_site(partner) == current_site(task))
                .count();
            Some(local_partners as f64 / partners.len().max(1) as f64)
        };
        let mut thread_counts: BTreeMap<(ProcessId, Option<usize>), usize> = BTreeMap::new();
        for task in view.live_tasks() {
            *thread_counts
                .entry((task.process, current_site(task)))
                .or_default() += 1;
        }
        let build_problem_task = |task: &TaskSample| {
            let site = current_site(task);
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
                local_partner_share: local_partner_share(task).unwrap_or(0.0),
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
                must_stay: !clusters.contains_key(&task.task)
                    && !split_tasks.contains(&task.task)
                    && thread_counts[&(task.process, site)] > 1,
            }
        };
        let tasks: Vec<ProblemTask> = view.live_tasks().map(build_problem_task).collect();
        let cycles_per_ns = cycles_per_ns(view).unwrap_or(1.0);
        let min_slice_ns = view.capabilities.min_slice_ns;
        let bus = MemoryPathModel::new(&sites, &tasks, line_bytes, |task| {
            speeds.observed_speed(task)
        });
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
            .for_each(|problem_task| problem_task.must_stay = true);
    }

    /// Returns the problem with all curves as low as their errors allow for more space than under this layout. `None`
    /// if no cache can be divided, or there are too many tasks to explore their curves.
    pub fn with_lowest_curves(&self, current_layout: &SiteLayout) -> Option<Self> {
        let can_divide = self.sites.iter().any(|site| site.partition_units.is_some());
        if !can_divide || self.tasks.len() > MAX_EXPLORED_TASKS {
            return None;
        }
        let mut lowest = self.clone();
        for (task, speed) in lowest.tasks.iter_mut().zip(forecast_speeds(
            self,
            current_layout,
            &ScoreCache::default(),
        )) {
            if let Some((program, speed)) = task.program.as_mut().zip(speed) {
                *program = program.with_lowest_curve(speed.occupancy_bytes);
            }
        }
        Some(lowest)
    }

    /// Returns the tasks in order of arrival.
    pub fn task_ids(&self) -> impl Iterator<Item = TaskId> + '_ {
        self.tasks.iter().map(|problem_task| problem_task.task)
    }

    /// Returns whether the site is excluded from decisions.
    pub fn is_closed(&self, site: usize) -> bool {
        self.closed_sites.get(site).copied().unwrap_or(false)
    }

    /// Returns the layout with closed sites as in `current_layout`.
    #[must_use]
    pub fn with_closed_sites(
        &self,
        mut layout: SiteLayout,
        current_layout: &SiteLayout,
    ) -> SiteLayout {
        if self.closed_sites.is_empty() {
            return layout;
        }
        let is_closed = |home: Option<usize>| home.is_some_and(|site| self.is_closed(site));
        for index in 0..self.tasks.len() {
            if is_closed(current_layout.site_by_task[index])
                || is_closed(layout.site_by_task[index])
            {
                (layout.site_by_task[index], layout.is_pinned[index]) = (
                    current_layout.site_by_task[index],
                    current_layout.is_pinned[index],
                );
            }
        }
        for site in (0..self.sites.len()).filter(|&site| self.is_closed(site)) {
            layout.partitions[site].clone_from(&current_layout.partitions[site]);
            layout.rotations[site].clone_from(&current_layout.rotations[site]);
        }
        layout
    }

    /// Returns the size of a task's partition in bytes; `None` if its site is unknown, or if it takes turns.
    fn partition_bytes(&self, layout: &SiteLayout, index: usize) -> Option<f64> {
        let site = layout.site_by_task[index].filter(|&site| layout.rotations[site].is_none())?;
        let partition = layout.partitions[site]
            .iter()
            .find(|group| group.members.contains(&index));
        let units = self.sites[site]
            .partition_units
            .map_or(1, |partition_units| partition_units.units());
        Some(
            self.sites[site].bytes
                * partition.map_or(1.0, |group| f64::from(group.units) / f64::from(units)),
        )
    }

    /// Returns the bytes of the partition that a task has to itself; `None` if it shares its space or takes turns.
    pub fn exclusive_bytes(&self, layout: &SiteLayout, index: usize) -> Option<f64> {
        let site = layout.site_by_task[index]?;
        let partitions = &layout.partitions[site];
        let is_alone = partitions.iter().any(|group| group.members == [index]);
        // Tasks outside of all partitions may use every partition.
        let is_outside = |task: usize| {
            layout.site_by_task[task] == Some(site)
                && !partitions.iter().any(|group| group.members.contains(&task))
        };
        self.partition_bytes(layout, index)
            .filter(|_| is_alone && !(0..self.tasks.len()).any(is_outside))
    }

    /// Returns the tasks whose misses were measured under this layout, each with whether the measurement contradicts
    /// its curve.
    pub fn check_curves(
        &self,
        current_layout: &SiteLayout,
        measured_misses_of: impl Fn(TaskId) -> Option<f64>,
    ) -> Vec<(TaskId, bool)> {
        let check_task = |index: usize| {
            let problem_task = &self.tasks[index];
            let (bytes, misses) = self
                .partition_bytes(current_layout, index)
                .zip(measured_misses_of(problem_task.task))?;
            Some((
                problem_task.task,
                problem_task
                    .program
                    .as_ref()?
                    .is_contradicted(bytes, misses),
            ))
        };
        (0..self.tasks.len()).filter_map(check_task).collect()
    }

    /// Drops the model of a task.
    pub fn drop_model(&mut self, task: TaskId) {
        self.tasks
            .iter_mut()
            .filter(|problem_task| problem_task.task == task)
            .for_each(|problem_task| problem_task.program = None);
    }

    /// Shifts every curve to the value measured under the layout in force. Gangs are left out, because occupancies are
    /// not steady within their turns.
    pub fn calibrate(
        &mut self,
        current_layout: &SiteLayout,
        measured_misses_of: impl Fn(TaskId) -> Option<f64>,
    ) {
        let forecasts = forecast_speeds(self, current_layout, &ScoreCache::default());
        for (index, forecast) in forecasts.into_iter().enumerate() {
            let Some((bytes, forecast_speed)) =
                self.partition_bytes(current_layout, index).zip(forecast)
            else {
                continue;
            };
            let problem_task = &mut self.tasks[index];
            if let Some((program, misses)) = problem_task
                .program
                .as_mut()
                .zip(measured_misses_of(problem_task.task))
            {
                program.calibrate(forecast_speed.occupancy_bytes, bytes, misses);
            }
            let site = current_layout.site_by_task[index].map(|site| &self.sites[site]);
            if let Some((program, site)) = self.tasks[index].program.as_mut().zip(site) {
                let queue_cycles = self
                    .bus
                    .as_ref()
                    .map_or(0.0, |bus| bus.current_wait_cycles(site.package));
                program.calibrate_solo(forecast_speed.occupancy_bytes, site.bytes, queue_cycles);
            }
        }
    }

    /// Adjusts the cycles that tasks do not wait for memory, so that the forecast of the layout in force equals the
    /// measured cycles per instruction. The composition and the queue are modeled, and their errors would otherwise look
    /// like gains of other layouts.
    pub fn calibrate_cycles(
        &mut self,
        current_layout: &SiteLayout,
        measured_cycles_of: impl Fn(TaskId) -> Option<f64>,
    ) {
        let forecasts = forecast_speeds(self, current_layout, &ScoreCache::default());
        for (index, forecast) in forecasts.into_iter().enumerate() {
            let Some((_, forecast_speed)) =
                self.partition_bytes(current_layout, index).zip(forecast)
            else {
                continue;
            };
            let problem_task = &mut self.tasks[index];
            if let Some((program, measured_cycles)) = problem_task
                .program
                .as_mut()
                .zip(measured_cycles_of(problem_task.task))
            {
                program
                    .shift_base_cycles(forecast_speed.cycles_per_instr(program), measured_cycles);
            }
        }
    }

    /// Relates promised rates to the rates measured under the layout in force, so that the bias of the model cancels.
    pub fn calibrate_rates(
        &mut self,
        current_layout: &SiteLayout,
        measured_rate_of: impl Fn(TaskId) -> Option<(WorkMetric, f64)>,
    ) {
        let has_promised_rate = |index: usize| {
            self.tasks[index]
                .program
                .as_ref()
                .is_some_and(|model| model.goal.min_rate.is_some())
        };
        if !self.known_tasks().any(has_promised_rate) {
            return;
        }
        let forecast = forecast_speeds(self, current_layout, &ScoreCache::default());
        for (problem_task, speed) in self.tasks.iter_mut().zip(forecast) {
            let Some((program, speed)) = problem_task.program.as_mut().zip(speed) else {
                continue;
            };
            let is_calibrated = program.goal.min_rate.is_some() && speed.instr_per_cycle > 0.0;
            program.rate = is_calibrated
                .then(|| measured_rate_of(problem_task.task))
                .flatten()
                .map(|(work, per_s)| PromisedRate {
                    work,
                    per_instr_per_cycle: per_s / speed.instr_per_cycle,
                });
        }
    }

    /// Returns whether the task may be moved. Threads that may share data are not separated without evidence.
    pub fn can_move(&self, index: usize) -> bool {
        self.tasks[index].is_movable && !self.tasks[index].must_stay
    }

    /// Returns the positions of all tasks.
    pub fn index_by_task(&self) -> BTreeMap<TaskId, usize> {
        self.tasks
            .iter()
            .enumerate()
            .map(|(index, problem_task)| (problem_task.task, index))
            .collect()
    }

    /// Returns the positions of the tasks that have a forecast.
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
