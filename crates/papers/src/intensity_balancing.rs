//! Converts a view to bins and weights, and an assignment to a plan, for the policies DI and DIO (CA 4).
//!
//! A priority adds (priority - 1) mean miss rates to a task's weight. The task is therefore placed earlier, two such
//! tasks go to different caches, and each gets quieter co-runners, whereas the method and its bounds stay the same. A
//! priority below 1 makes a task lighter.

use cachemate_core::{CpuSet, Decision, Plan, Reason, TaskId, View, WindowLength};
use serde::Deserialize;

use crate::load_balance::{CacheCapacity, TaskLoad, balance_centrally, exchange};
use crate::placement;
use crate::policies::{ParameterError, ParameterRange};

/// The algorithm that balances the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalancingForm {
    /// All tasks are sorted in one list.
    Central,
    /// Pairs of caches exchange tasks.
    Distributed,
}

/// The cache size for which recorded rates are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordedCache {
    /// The whole cache, as in CA 4.1.
    Whole,
    /// A task's share of the cache if all tasks share it evenly.
    Share,
}

/// The counted rate that DIO balances.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalancedRate {
    /// Misses, as in the paper.
    Misses,
    /// Reads from memory, including prefetches. A program whose prefetchers are always ahead misses rarely, but fills
    /// the cache and the bus all the same.
    MemoryReads,
}

/// Parameters of the policies `di` and `dio`.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    /// Minimum number of cycles between decisions (CA 4.2: 10^9).
    pub window_cycles: u64,
    pub form: BalancingForm,
    /// Minimum improvement for a move, as a fraction of the mean sum: tasks move only if that evens out the sums by
    /// more.
    pub worth_moving: f64,
    /// Number of rounds per window in which pairs of caches exchange tasks; used by the distributed form only.
    pub rounds_per_window: u32,
    /// Whether operators' priorities change the weights.
    pub priorities: bool,
    /// Cache size for which recorded rates are used.
    pub recorded_on: RecordedCache,
    pub counted: BalancedRate,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_cycles: 1_000_000_000,
            form: BalancingForm::Central,
            worth_moving: 0.05,
            rounds_per_window: 1,
            priorities: true,
            recorded_on: RecordedCache::Share,
            counted: BalancedRate::Misses,
        }
    }
}

impl Parameters {
    /// Parses parameters from TOML.
    ///
    /// # Errors
    /// A parameter is unknown or has the wrong type, the window or the number of rounds is 0, or `worth_moving` is not
    /// between 0 and 10.
    pub fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = crate::policies::parse_parameters(text)?;
        ParameterRange::OneOrMore.check([
            ("window_cycles", parameters.window_cycles as f64),
            ("rounds_per_window", parameters.rounds_per_window.into()),
        ])?;
        ParameterRange::UpTo(10.0).check([("worth_moving", parameters.worth_moving)])?;
        Ok(parameters)
    }
}

/// The balancer of rates over last-level caches.
pub struct IntensityBalancer {
    pub parameters: Parameters,
    round: u64,
}

/// The CPUs of a cache, with its capacity.
struct CacheBin {
    cpus: CpuSet,
    capacity: CacheCapacity,
}

impl IntensityBalancer {
    pub fn new(parameters: Parameters) -> Self {
        IntensityBalancer {
            parameters,
            round: 0,
        }
    }

    /// Decides for a window. `rate` returns a task's miss rate, in the same unit for all tasks. A task for which it
    /// returns `None` is not moved, and counts with the mean rate.
    pub fn decide(&mut self, view: &View<'_>, rate: impl Fn(TaskId) -> Option<f64>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Cycles {
            cycles: self.parameters.window_cycles,
        });
        let movable_tasks: Vec<TaskId> = view.movable_tasks().map(|task| task.task).collect();
        plan.affinity = view.previous_plan.affinity.clone();
        plan.affinity.retain(|task, _| {
            movable_tasks.binary_search(task).is_ok() || movable_tasks.contains(task)
        });

        let bins = cache_bins(view);
        let is_usable = |rate: &f64| rate.is_finite() && *rate >= 0.0;
        let rates: Vec<Option<f64>> = view
            .observation
            .tasks
            .iter()
            .map(|task| rate(task.task).filter(is_usable).filter(|_| !task.exited))
            .collect();
        let known_rates: Vec<f64> = rates.iter().flatten().copied().collect();
        let has_movable_rate = view
            .observation
            .tasks
            .iter()
            .zip(&rates)
            .any(|(task, rate)| !task.unmovable && !task.exited && rate.is_some());
        if bins.is_empty() || !has_movable_rate {
            return Decision::new(plan, Vec::new());
        }

        let mean_rate = known_rates.iter().sum::<f64>() / known_rates.len() as f64;
        let weighed_tasks = self.weigh_tasks(view, &rates, mean_rate, &bins);
        let task_loads: Vec<TaskLoad> = weighed_tasks.iter().map(|(_, load)| *load).collect();

        let capacities: Vec<CacheCapacity> = bins.iter().map(|domain| domain.capacity).collect();
        let bin_by_task = self.balance(&capacities, task_loads.clone());
        let mut reasons = Vec::new();
        for (index, (task, _)) in weighed_tasks
            .iter()
            .enumerate()
            .filter(|(_, (_, load))| !load.is_unmovable)
        {
            let cpus = &bins[bin_by_task[index]].cpus;
            if view.previous_plan.affinity.get(task) != Some(cpus) {
                reasons.push(placement_reason(
                    index,
                    &task_loads,
                    mean_rate,
                    &bin_by_task,
                    *task,
                    cpus,
                ));
            }
            plan.affinity.insert(*task, cpus.clone());
        }
        Decision::new(plan, reasons)
    }

    fn balance(
        &mut self,
        capacities: &[CacheCapacity],
        mut task_loads: Vec<TaskLoad>,
    ) -> Vec<usize> {
        let worth_moving = self.parameters.worth_moving;
        if self.parameters.form == BalancingForm::Central {
            return balance_centrally(capacities, &task_loads, worth_moving);
        }

        for _ in 0..self.parameters.rounds_per_window {
            let bins = exchange(capacities, &task_loads, self.round, worth_moving);
            task_loads
                .iter_mut()
                .zip(&bins)
                .for_each(|(task_load, &bin)| task_load.current_bin = Some(bin));
            self.round += 1;
        }

        task_loads
            .into_iter()
            .map(|task_load| task_load.current_bin.unwrap_or(0))
            .collect()
    }

    /// The tasks that need a CPU, with their weights and the bins of their previous CPUs.
    fn weigh_tasks(
        &self,
        view: &View<'_>,
        rates: &[Option<f64>],
        mean_rate: f64,
        bins: &[CacheBin],
    ) -> Vec<(TaskId, TaskLoad)> {
        let mut weighed_tasks = Vec::new();

        for (task, rate) in view
            .observation
            .tasks
            .iter()
            .zip(rates)
            .filter(|(task, _)| !task.exited)
        {
            let previous_cpus = view
                .previous_plan
                .affinity
                .get(&task.task)
                .filter(|_| !task.unmovable);
            let bin = match previous_cpus {
                Some(cpus) => bins.iter().position(|domain| cpus.is_subset(&domain.cpus)),
                None => task
                    .cpu
                    .and_then(|cpu| bins.iter().position(|domain| domain.cpus.contains(cpu.0))),
            };
            let is_movable = !task.unmovable && rate.is_some();
            if !is_movable && bin.is_none() {
                continue;
            }

            let priority_excess = task
                .goal
                .filter(|_| self.parameters.priorities)
                .map_or(0.0, |goal| goal.priority - 1.0);
            let raw_weight = (rate.unwrap_or(mean_rate) + priority_excess * mean_rate).max(0.0);
            let weight = if raw_weight.is_finite() {
                raw_weight
            } else {
                mean_rate
            };
            let load = TaskLoad {
                weight,
                current_bin: bin,
                is_unmovable: !is_movable,
            };
            weighed_tasks.push((task.task, load));
        }

        weighed_tasks
    }
}

fn cache_bins(view: &View<'_>) -> Vec<CacheBin> {
    let online = view.topology.online();
    let task_count = view
        .observation
        .tasks
        .iter()
        .filter(|task| !task.exited)
        .count();
    let Ok(cache_seats) = placement::cache_seats(view.topology, task_count) else {
        return Vec::new();
    };

    let build_bin = |seats: &placement::CacheSeats| {
        let cache = view
            .topology
            .caches
            .iter()
            .find(|cache| Some(cache.id) == seats.cache)?;
        let first_cpu = seats.cpus.first()?;
        let package = view
            .topology
            .cpus
            .iter()
            .find(|cpu| cpu.id == *first_cpu)?
            .package;
        let capacity = CacheCapacity {
            cpus: seats.cpus.len(),
            package,
        };
        Some(CacheBin {
            cpus: cache.cpus.intersection(&online),
            capacity,
        })
    };

    cache_seats.iter().filter_map(build_bin).collect()
}

/// Explains the place of a task. Rates are given as multiples of the mean rate, because their unit depends on the
/// evidence.
fn placement_reason(
    index: usize,
    task_loads: &[TaskLoad],
    mean_rate: f64,
    bins: &[usize],
    task: TaskId,
    cpus: &CpuSet,
) -> Reason {
    let relative_to_mean = |rate: f64| {
        if mean_rate > 0.0 {
            rate / mean_rate
        } else {
            0.0
        }
    };
    let sum_of_bin = |target_bin: usize| -> f64 {
        let bin_tasks = task_loads
            .iter()
            .zip(bins)
            .filter(|(_, bin)| **bin == target_bin);
        relative_to_mean(bin_tasks.map(|(task_load, _)| task_load.weight).sum())
    };

    let (bin, own_rate) = (bins[index], relative_to_mean(task_loads[index].weight));
    let co_runner_sum = (sum_of_bin(bin) - own_rate).max(0.0);
    let co_runners = format!("beside programs with {co_runner_sum:.1} times the mean miss rate");
    let text = match task_loads[index].current_bin {
        Some(previous_bin) if previous_bin != bin => {
            format!(
                "{{0}} goes to CPUs {cpus}, {co_runners} instead of {:.1}",
                sum_of_bin(previous_bin)
            )
        }
        Some(_) => format!("{{0}} stays on CPUs {cpus}, {co_runners}"),
        None => format!("{{0}} is placed on CPUs {cpus}, {co_runners}"),
    };
    let numbers = vec![
        ("own_rate_over_mean".to_string(), own_rate),
        ("neighbors_rate_over_mean".to_string(), co_runner_sum),
    ];
    Reason::new(vec![task], text, numbers)
}
