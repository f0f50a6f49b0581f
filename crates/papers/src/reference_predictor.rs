//! The predictor by which every policy is scored, which forecasts the effects of a plan on each task's misses and
//! speed.
//!
//! Problem: miss ratios, IPC and slowdown under a plan are to be predicted before it is tried, for any mix of affinity,
//! gangs and shares. Method, which is StatCC's idea (papers BS 2b) on miss-rate curves:
//! 1. *Co-residency.* Tasks in gangs run while their gang does. Schedules on other CPUs are out of step, so their tasks
//!    are met in proportion to their CPU share. The other tasks are spread over their allowed CPUs by load, as by a
//!    balancing scheduler, and take turns if a CPU has several.
//! 2. *Occupancy.* On a shared cache, a task's space is proportional to the lines that it brings in, and it brings in
//!    fewer lines the more it has: space_i = space * f_i / sum of f, f_i = presence_i * misses_i(space_i) per cycle.
//!    Misses slow a task down, so its rate depends on the result too. Both are solved together, with damping.
//! 3. *Shares.* Ways or colors limit the space for which a task competes; tasks of other shares compete in the overlap
//!    only.
//!
//! Curves come from the profile, or from its reuse times by StatStack. Speed: CPI = solo CPI + stalls per instruction,
//! from the stall curve if there is one (papers CP-4), otherwise added misses times the penalty.
//!
//! Properties: the predictor is pure. A task alone on a cache has no slowdown. A task without a curve or a solo IPC is
//! listed as unknown, and tasks that meet it have no forecast of misses and speed.

use std::collections::BTreeMap;

use cachemate_core::{
    Cache, CacheId, CacheShare, CpuId, CpuSet, Estimate, Forecast, IndexSet, Plan, Predictor,
    ProcessId, Profile, Profiles, ShareMember, TaskForecast, TaskId, Topology, Units, View,
};
use cachemate_locality::reuse::ReuseTimes;
use cachemate_locality::statstack::StackModel;

/// The reference predictor, as the module's documentation describes it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReferencePredictor {
    /// Cost of a last-level miss in cycles, for tasks without a stall curve: latency beyond a hit, divided by the
    /// number of misses that overlap.
    pub miss_penalty_cycles: f64,
}

/// Number of iterations toward the fixed point; each halves the remaining difference.
const ITERATIONS: usize = 80;

impl Predictor for ReferencePredictor {
    fn miss_penalty_cycles(&self) -> Option<f64> {
        Some(self.miss_penalty_cycles)
    }

    fn forecast(&self, view: &View<'_>, plan: &Plan) -> Forecast {
        let (topology, profiles) = (view.topology, view.profiles);
        let tasks: Vec<TaskId> = profiles.keys().copied().collect();
        let known_curves: BTreeMap<TaskId, TaskCurve<'_>> = profiles
            .iter()
            .filter_map(|(&task, profile)| {
                Some((task, TaskCurve::from_profile(profile, topology)?))
            })
            .collect();
        // Co-residency is computed for known tasks only, because all pairs of hundreds of tasks would take too long.
        let known_tasks: Vec<TaskId> = known_curves.keys().copied().collect();
        let co_residency = CoResidency::new(topology, &tasks, &known_tasks, plan);

        let mut forecast = Forecast::default();
        for &task in &tasks {
            let mut task_forecast = TaskForecast {
                cpu_share: co_residency
                    .cpu_share
                    .get(&task)
                    .map(|&s| Estimate::exact(s)),
                ..TaskForecast::default()
            };
            match known_curves.get(&task) {
                None => forecast.unknown.push(task),
                Some(curve) => {
                    if let Some(cache) = co_residency.cache_of(topology, task) {
                        self.forecast_task(
                            task,
                            curve,
                            cache,
                            &co_residency,
                            &known_curves,
                            view,
                            plan,
                            &mut task_forecast,
                        );
                    }
                }
            }
            if task_forecast != TaskForecast::default() {
                forecast.tasks.insert(task, task_forecast);
            }
        }
        forecast.cache_miss_ratio = miss_ratios(topology, profiles, &co_residency, &forecast);
        forecast
    }
}

impl ReferencePredictor {
    #[allow(clippy::too_many_arguments)]
    fn forecast_task(
        &self,
        task: TaskId,
        own_curve: &TaskCurve<'_>,
        cache: &Cache,
        co_residency: &CoResidency,
        known_curves: &BTreeMap<TaskId, TaskCurve<'_>>,
        view: &View<'_>,
        plan: &Plan,
        task_forecast: &mut TaskForecast,
    ) {
        let Some(size) = cache.size_bytes else { return };
        let Some(own_mask) = fill_mask(task, own_curve.profile.process, cache, view, plan) else {
            return;
        };
        let mut competitors = vec![SpaceCompetitor {
            curve: own_curve,
            presence: 1.0,
            bytes_outside: 0.0,
        }];

        for (&co_runner, &meeting_share) in
            co_residency.meeting_shares.get(&task).into_iter().flatten()
        {
            let Some(co_runner_curve) = known_curves.get(&co_runner) else {
                return;
            };
            let Some(co_runner_mask) = fill_mask(
                co_runner,
                co_runner_curve.profile.process,
                cache,
                view,
                plan,
            ) else {
                return;
            };
            let presence = meeting_share * co_runner_mask.overlapping_share(&own_mask);
            if presence > 0.0 {
                competitors.push(SpaceCompetitor {
                    curve: co_runner_curve,
                    presence,
                    bytes_outside: co_runner_mask.share_outside(&own_mask) * size as f64,
                });
            }
        }

        let space = size as f64 * own_mask.fraction();
        let own_bytes = self.solve_occupancy(&competitors, space, size as f64);
        let misses = own_curve.misses_at(own_bytes);
        let solo_misses = own_curve.misses_at(size as f64);
        let added_stalls = own_curve.added_stalls(own_bytes, size as f64);
        let degradation_of = |misses: f64, solo_misses: f64| {
            let added_cycles =
                added_stalls.unwrap_or((misses - solo_misses) / 1000.0 * self.miss_penalty_cycles);
            (added_cycles / own_curve.solo_cycles_per_instr).max(-0.99)
        };
        let value = degradation_of(misses.value, solo_misses.value);
        let bounds = [
            degradation_of(misses.low, solo_misses.low),
            degradation_of(misses.high, solo_misses.high),
            value,
        ];
        let (low, high) = bounds
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &b| {
                (l.min(b), h.max(b))
            });

        let instr_per_cycle =
            |degradation: f64| 1.0 / (own_curve.solo_cycles_per_instr * (1.0 + degradation));
        task_forecast.misses_per_kilo_instr = Some(misses);
        task_forecast.degradation = Some(Estimate { value, low, high });
        task_forecast.instr_per_cycle = Some(Estimate {
            value: instr_per_cycle(value),
            low: instr_per_cycle(high),
            high: instr_per_cycle(low),
        });
    }

    /// The number of bytes of `space` that the first competitor occupies. Solo speeds refer to the whole cache, of
    /// `cache_bytes`.
    fn solve_occupancy(
        &self,
        competitors: &[SpaceCompetitor<'_, '_>],
        space: f64,
        cache_bytes: f64,
    ) -> f64 {
        if competitors.len() == 1 {
            return space;
        }
        let mut occupancies = vec![space / competitors.len() as f64; competitors.len()];

        for _ in 0..ITERATIONS {
            let line_rates: Vec<f64> = competitors
                .iter()
                .zip(&occupancies)
                .map(
                    |(
                        SpaceCompetitor {
                            curve: task,
                            presence,
                            bytes_outside: outside,
                        },
                        &occupancy,
                    )| {
                        // Lines that the task has elsewhere reduce the number of lines that it brings in here.
                        let resident_bytes = (occupancy + outside).min(cache_bytes);
                        let misses = task.misses_at(resident_bytes).value.max(0.0) / 1000.0;
                        let stalls_by_misses = || {
                            (misses - task.misses_at(cache_bytes).value / 1000.0)
                                * self.miss_penalty_cycles
                        };
                        let stalls = task
                            .added_stalls(resident_bytes, cache_bytes)
                            .unwrap_or_else(stalls_by_misses);
                        let cycles = task.solo_cycles_per_instr + stalls.max(0.0);
                        presence * misses / cycles
                    },
                )
                .collect();

            let total_line_rate: f64 = line_rates.iter().sum();
            if total_line_rate <= 0.0 {
                return space;
            }

            for (occupancy, line_rate) in occupancies.iter_mut().zip(&line_rates) {
                *occupancy = 0.5 * *occupancy + 0.5 * space * line_rate / total_line_rate;
            }
        }

        occupancies[0]
    }
}

/// A task that competes for space in a cache.
struct SpaceCompetitor<'k, 'p> {
    curve: &'k TaskCurve<'p>,
    /// Fraction of the time for which the competitor is present, times the fraction of its lines that fall into the
    /// space.
    presence: f64,
    /// Number of bytes that the competitor may fill elsewhere.
    bytes_outside: f64,
}

/// A task with sufficient evidence for a forecast.
struct TaskCurve<'a> {
    profile: &'a Profile,
    /// Points of the miss-rate curve, with ascending sizes; at least one.
    curve: Vec<(u64, Estimate)>,
    solo_cycles_per_instr: f64,
}

impl<'a> TaskCurve<'a> {
    fn from_profile(profile: &'a Profile, topology: &Topology) -> Option<Self> {
        let instr_per_cycle = profile.rates.solo_instr_per_cycle?.value;
        if !(instr_per_cycle.is_finite() && instr_per_cycle > 0.0) {
            return None;
        }
        let measured_curve = profile
            .misses_per_kilo_instr()
            .cloned()
            .filter(|curve| !curve.is_empty());
        let curve = measured_curve.or_else(|| curve_of_reuses(profile, topology))?;
        Some(TaskCurve {
            profile,
            curve,
            solo_cycles_per_instr: 1.0 / instr_per_cycle,
        })
    }

    fn misses_at(&self, bytes: f64) -> Estimate {
        value_at(&self.curve, bytes)
    }

    /// The cycles per instruction by which the task stalls longer with a part of the cache than with
    /// all of it; `None` if stalls were not measured.
    fn added_stalls(&self, bytes: f64, cache_bytes: f64) -> Option<f64> {
        let curve = self
            .profile
            .stalls_per_kilo_instr()
            .filter(|curve| !curve.is_empty())?;
        Some((value_at(curve, bytes).value - value_at(curve, cache_bytes).value) / 1000.0)
    }
}

/// Computes StatStack's curve over a grid of sizes up to the largest cache; `None` without reuse times.
fn curve_of_reuses(profile: &Profile, topology: &Topology) -> Option<Vec<(u64, Estimate)>> {
    let reuse = ReuseTimes::from_profile(profile.reuse_times()?)?;
    let refs = profile.rates.llc_refs_per_mega_instr?.estimate();
    let model = StackModel::new(&reuse)?;
    let largest_cache_bytes = topology
        .caches
        .iter()
        .filter_map(|cache| cache.size_bytes)
        .max()?;
    let line_bytes = topology
        .caches
        .iter()
        .rev()
        .find_map(|cache| cache.line_bytes)
        .unwrap_or(64);

    let sizes = (1..=64u64).map(|step| largest_cache_bytes * step / 64);
    let curve_point = |size: u64| {
        let ratio = model.miss_ratio(size / u64::from(line_bytes));
        let mpki_of_refs = |refs: f64| refs / 1000.0 * ratio;
        (
            size,
            Estimate {
                value: mpki_of_refs(refs.value),
                low: mpki_of_refs(refs.low),
                high: mpki_of_refs(refs.high),
            },
        )
    };
    Some(sizes.map(curve_point).collect())
}

/// Interpolates linearly between the points; the curve is constant beyond its ends.
fn value_at(curve: &[(u64, Estimate)], bytes: f64) -> Estimate {
    let upper_index = curve.partition_point(|(size, _)| (*size as f64) < bytes);
    if upper_index == 0 || upper_index == curve.len() {
        return curve[upper_index.min(curve.len() - 1)].1;
    }
    let ((low_size, low), (high_size, high)) = (curve[upper_index - 1], curve[upper_index]);
    let fraction = (bytes - low_size as f64) / (high_size - low_size).max(1) as f64;
    let interpolate = |a: f64, b: f64| a + (b - a) * fraction;
    Estimate {
        value: interpolate(low.value, high.value),
        low: interpolate(low.low, high.low),
        high: interpolate(low.high, high.high),
    }
}

/// The units of one cache that a task may fill, with their total number; `None` means all units.
struct FillMask(Option<(IndexSet, u32)>);

impl FillMask {
    fn fraction(&self) -> f64 {
        self.0.as_ref().map_or(1.0, |(units, unit_count)| {
            f64::from(units.count().min(*unit_count)) / f64::from((*unit_count).max(1))
        })
    }
    /// The fraction of the cache that this mask may fill and the other may not.
    fn share_outside(&self, other: &Self) -> f64 {
        match (&self.0, &other.0) {
            (_, None) => 0.0,
            (None, Some(_)) => 1.0 - other.fraction(),
            (Some((a, unit_count)), Some((b, _))) => {
                f64::from(a.count().saturating_sub(a.intersection(b).count()))
                    / f64::from((*unit_count).max(1))
            }
        }
    }
    /// The fraction of this mask's lines that fall where the other may fill.
    fn overlapping_share(&self, other: &Self) -> f64 {
        match (&self.0, &other.0) {
            (_, None) => 1.0,
            (None, Some(_)) => other.fraction(),
            (Some((a, _)), Some((b, _))) => {
                f64::from(a.intersection(b).count()) / f64::from(a.count().max(1))
            }
        }
    }
}

/// The units of `cache` that a task may fill under the plan; `None` if the machine does not report their number.
fn fill_mask(
    task: TaskId,
    process: Option<ProcessId>,
    cache: &Cache,
    view: &View<'_>,
    plan: &Plan,
) -> Option<FillMask> {
    let is_member = |member: &ShareMember| match member {
        ShareMember::Task(id) => *id == task,
        ShareMember::Process(id) => process == Some(*id),
    };
    // Colors apply to every cache of the level, ways only to the named one.
    let holds_task = |share: &&CacheShare| {
        let is_concerned = share.cache == cache.id || matches!(share.units, Units::Colors { .. });
        is_concerned && share.members.iter().any(is_member)
    };
    let Some(share) = plan.shares.iter().find(holds_task) else {
        return Some(FillMask(None));
    };

    match &share.units {
        Units::Ways { mask } => Some(FillMask(Some((mask.clone(), cache.ways?)))),
        Units::Colors { allowed, .. } => {
            let colors = view
                .capabilities
                .colors_of(cache.id)
                .or_else(|| view.capabilities.colors_of(share.cache))?;
            Some(FillMask(Some((allowed.clone(), colors))))
        }
    }
}

/// The CPU of each task, its share of the time there, and its co-runners.
struct CoResidency {
    cpu_by_task: BTreeMap<TaskId, CpuId>,
    cpu_share: BTreeMap<TaskId, f64>,
    /// For each known task, the fraction of its own run time during which each other task runs on another CPU of its
    /// cache.
    meeting_shares: BTreeMap<TaskId, BTreeMap<TaskId, f64>>,
}

impl CoResidency {
    fn new(topology: &Topology, tasks: &[TaskId], known_tasks: &[TaskId], plan: &Plan) -> Self {
        let mut co_residency = CoResidency {
            cpu_by_task: BTreeMap::new(),
            cpu_share: BTreeMap::new(),
            meeting_shares: BTreeMap::new(),
        };

        let mut gang_shares: BTreeMap<TaskId, (usize, BTreeMap<usize, f64>)> = BTreeMap::new();
        let mut taken_cpus = CpuSet::default();
        for (schedule_index, schedule) in plan.gangs.iter().enumerate() {
            taken_cpus = taken_cpus.union(&schedule.cpus);
            let rotation_slices: f64 = schedule
                .gangs
                .iter()
                .map(|gang| f64::from(gang.slices))
                .sum();

            for (gang_index, gang) in schedule.gangs.iter().enumerate() {
                let named_cpus: CpuSet = gang
                    .members
                    .iter()
                    .filter_map(|(_, cpu)| cpu.map(|cpu| cpu.0))
                    .collect();
                let mut free_cpus = schedule
                    .cpus
                    .iter()
                    .filter(|&cpu| !named_cpus.contains(cpu));

                for &(task, cpu) in &gang.members {
                    let Some(cpu) = cpu.or_else(|| free_cpus.next().map(CpuId)) else {
                        continue;
                    };
                    co_residency.cpu_by_task.entry(task).or_insert(cpu);
                    let slice_share = f64::from(gang.slices) / rotation_slices.max(1.0);
                    *co_residency.cpu_share.entry(task).or_insert(0.0) += slice_share;
                    gang_shares
                        .entry(task)
                        .or_insert_with(|| (schedule_index, BTreeMap::new()))
                        .1
                        .insert(gang_index, slice_share);
                }
            }
        }

        co_residency.assign_free_tasks(topology, tasks, plan, &taken_cpus);
        co_residency.compute_meeting_shares(topology, tasks, known_tasks, &gang_shares);
        co_residency
    }

    /// Assigns tasks outside gangs to the least loaded of their CPUs, starting with the tasks that have the fewest CPUs
    /// to choose from.
    fn assign_free_tasks(
        &mut self,
        topology: &Topology,
        tasks: &[TaskId],
        plan: &Plan,
        occupied_cpus: &CpuSet,
    ) {
        let online = topology.online();
        let cpu_choice = |task: &TaskId| {
            let allowed_cpus = plan
                .affinity
                .get(task)
                .map_or(online.clone(), |cpus| cpus.intersection(&online));
            let free_cpus: CpuSet = allowed_cpus
                .iter()
                .filter(|&cpu| !occupied_cpus.contains(cpu))
                .collect();
            if free_cpus.is_empty() {
                allowed_cpus
            } else {
                free_cpus
            }
        };
        let mut free_tasks: Vec<(TaskId, CpuSet)> = tasks
            .iter()
            .filter(|task| !self.cpu_by_task.contains_key(task))
            .map(|task| (*task, cpu_choice(task)))
            .collect();
        free_tasks.sort_by_key(|(task, cpus)| (cpus.count(), *task));
        let mut cpu_loads: BTreeMap<u32, f64> = BTreeMap::new();
        let weight_of = |task: &TaskId| plan.weights.get(task).copied().unwrap_or(1.0);

        let last_level_caches: Vec<&Cache> = topology
            .caches
            .iter()
            .filter(|cache| cache.last_level)
            .collect();
        let caches_of = |cpu: u32| {
            (0..last_level_caches.len())
                .filter(|&index| last_level_caches[index].cpus.contains(cpu))
                .collect::<Vec<_>>()
        };
        let caches: BTreeMap<u32, Vec<usize>> =
            online.iter().map(|cpu| (cpu, caches_of(cpu))).collect();

        for (task, cpus) in &free_tasks {
            // Loads are summed once for each task; with a hundred CPUs on one cache, these sums otherwise took nine
            // tenths of a forecast.
            let load_of_cache = |cache: &&Cache| {
                cache
                    .cpus
                    .iter()
                    .map(|cpu| cpu_loads.get(&cpu).copied().unwrap_or(0.0))
                    .sum::<f64>()
            };
            let loads: Vec<f64> = last_level_caches.iter().map(load_of_cache).collect();
            let load_of_caches = |cpu: u32| {
                caches
                    .get(&cpu)
                    .into_iter()
                    .flatten()
                    .map(|&index| loads[index])
                    .sum::<f64>()
            };
            let load_key = |cpu: u32| {
                (
                    cpu_loads.get(&cpu).copied().unwrap_or(0.0),
                    load_of_caches(cpu),
                )
            };
            let least_loaded = cpus
                .iter()
                .map(|cpu| (load_key(cpu), cpu))
                .reduce(|a, b| if b.0 < a.0 { b } else { a });
            if let Some((_, cpu)) = least_loaded {
                *cpu_loads.entry(cpu).or_insert(0.0) += weight_of(task);
                self.cpu_by_task.insert(*task, CpuId(cpu));
            }
        }

        for (task, _) in &free_tasks {
            if let Some(cpu) = self.cpu_by_task.get(task) {
                self.cpu_share
                    .insert(*task, weight_of(task) / cpu_loads[&cpu.0]);
            }
        }
    }

    fn compute_meeting_shares(
        &mut self,
        topology: &Topology,
        tasks: &[TaskId],
        known_tasks: &[TaskId],
        gang_shares: &BTreeMap<TaskId, (usize, BTreeMap<usize, f64>)>,
    ) {
        for &task in known_tasks {
            let Some(cache) = self.cache_of(topology, task) else {
                continue;
            };

            let mut shares = BTreeMap::new();
            for &other_task in tasks.iter().filter(|&&other| other != task) {
                let (Some(own_cpu), Some(other_cpu)) = (
                    self.cpu_by_task.get(&task),
                    self.cpu_by_task.get(&other_task),
                ) else {
                    continue;
                };
                if !cache.cpus.contains(other_cpu.0) {
                    continue;
                }

                let meeting_share = match (gang_shares.get(&task), gang_shares.get(&other_task)) {
                    (Some((a, own_gangs)), Some((b, other_gangs))) if a == b => {
                        let common_slices: f64 = own_gangs
                            .iter()
                            .filter(|(gang, _)| other_gangs.contains_key(gang))
                            .map(|(_, slice_share)| slice_share)
                            .sum();
                        common_slices / own_gangs.values().sum::<f64>()
                    }
                    _ if own_cpu == other_cpu => 0.0,
                    _ => self.cpu_share.get(&other_task).copied().unwrap_or(0.0),
                };
                if meeting_share > 0.0 {
                    shares.insert(other_task, meeting_share);
                }
            }
            self.meeting_shares.insert(task, shares);
        }
    }

    fn cache_of<'t>(&self, topology: &'t Topology, task: TaskId) -> Option<&'t Cache> {
        let cpu = self.cpu_by_task.get(&task)?;
        topology
            .caches
            .iter()
            .find(|cache| cache.last_level && cache.cpus.contains(cpu.0))
    }
}

/// The misses over references of each cache, for caches whose tasks all have both.
fn miss_ratios(
    topology: &Topology,
    profiles: &Profiles,
    co_residency: &CoResidency,
    forecast: &Forecast,
) -> BTreeMap<CacheId, Estimate> {
    let mut ratios = BTreeMap::new();

    for cache in topology.last_level_caches() {
        let runs_on_cache = |task: &&TaskId| {
            co_residency
                .cpu_by_task
                .get(task)
                .is_some_and(|cpu| cache.cpus.contains(cpu.0))
        };
        let rates = profiles.keys().filter(runs_on_cache).map(|task| {
            let task_forecast = forecast.tasks.get(task)?;
            let speed = task_forecast.instr_per_cycle?.value * task_forecast.cpu_share?.value;
            let (misses, refs) = (
                task_forecast.misses_per_kilo_instr?,
                profiles[task].rates.llc_refs_per_mega_instr?,
            );
            Some(
                [misses.value, misses.low, misses.high, refs.value / 1000.0]
                    .map(|rate| rate * speed),
            )
        });
        let Some(rates) = rates.collect::<Option<Vec<[f64; 4]>>>() else {
            continue;
        };
        let sum_of_rate = |index: usize| rates.iter().map(|rate| rate[index]).sum::<f64>();
        if sum_of_rate(3) > 0.0 {
            let ratio_of_rate = |which: usize| (sum_of_rate(which) / sum_of_rate(3)).min(1.0);
            ratios.insert(
                cache.id,
                Estimate {
                    value: ratio_of_rate(0),
                    low: ratio_of_rate(1),
                    high: ratio_of_rate(2),
                },
            );
        }
    }
    ratios
}
