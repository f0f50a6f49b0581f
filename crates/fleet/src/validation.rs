//! Validates a fleet's slowdowns: some of its hosts run on the cycle-level machine, with the same services on the same
//! caches.
//!
//! Method: hosts are placed as at the start of the fleet's run. Each thread is a [`CurveProgram`] of its service's
//! profile. Caches and curves are divided by a scale, because a large cache takes longer to reach its steady state than
//! a cycle-level run can afford; rates, latencies and bandwidths stay. A service alone on an idle machine of the same
//! scale gives its slowdown. Properties: nothing is fitted to a co-run; the same seed gives the same bits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use cachemate_core::{
    CacheLevel, CoreModel, MachineError, MachineSpec, MachineSpecError, SplitMix64, median,
    nearest_rank,
};
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};
use cachemate_sim::run::run_alone;
use serde::Serialize;

use crate::corun::{CoRunKey, CoRunMember, CoRunSolver, LOAD_LEVELS};
use crate::curve_program::{CoreTiming, CurveProgram};
use crate::study::{FleetStudy, RunControl, run_parallel};

/// Minimum numbers of instructions and of misses in flight on a core of the cycle-level machine.
const MIN_WINDOW_INSTR: u32 = 512;
const MIN_MISSES_IN_FLIGHT: u32 = 32;

/// The part of a host's time that the cycle-level machine runs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ValidationSlice {
    /// Factor by which caches and curves are divided, unless a cache has too few sets; a power of two.
    pub cache_scale: u32,
    /// Cycles until caches are steady; speeds are measured after them.
    pub settling_cycles: u64,
    /// Cycles over which speeds are measured.
    pub measured_cycles: u64,
}

/// Reason why a validation has no result.
#[derive(Debug, thiserror::Error)]
pub enum ValidationError {
    /// The machine cannot be simulated.
    #[error(transparent)]
    Machine(#[from] MachineSpecError),
    /// The run could not continue.
    #[error(transparent)]
    Run(#[from] MachineError),
    /// The hosts have no service with a profile.
    #[error("found no service with a profile on the validated hosts, expected at least one")]
    NoServices,
}

/// Comparison of one host.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ValidatedHost {
    /// Number of the host in its cell.
    pub host: u32,
    /// Number of compared services; a service with threads on several caches counts once for each.
    pub services: usize,
    /// Mean slowdown on the cycle-level machine.
    pub measured_slowdown_percent: f64,
    /// Mean slowdown on the interval machine.
    pub forecast_slowdown_percent: f64,
    /// Mean absolute difference of the services' slowdowns.
    pub mean_absolute_error_points: f64,
}

/// Comparison of all validated hosts.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FleetValidation {
    /// Name of the machine.
    pub machine: String,
    /// Factor by which caches and curves were divided.
    pub cache_scale: u32,
    /// Cycles that each host ran.
    pub cycles_per_host: u64,
    /// Time at the machine's clock that each host ran.
    pub nominal_ms_per_host: f64,
    /// Number of compared services.
    pub services: usize,
    /// Mean slowdown on the cycle-level machine.
    pub measured_slowdown_percent: f64,
    /// Mean absolute error of the interval machine's slowdowns.
    pub mean_absolute_error_points: f64,
    /// 90th percentile of the absolute errors.
    pub p90_error_points: f64,
    /// Mean of forecast minus measured slowdown.
    pub mean_signed_error_points: f64,
    /// Mean absolute error of the forecast that nothing is slowed down.
    pub error_of_predicting_nothing_points: f64,
    /// Share of the services with a limit about which both machines agree whether it is kept; `None` without limits.
    pub same_verdict_share: Option<f64>,
    /// Median of the cycles that services take alone, on the cycle-level machine over those of their profiles.
    pub solo_cycles_ratio: f64,
    /// Comparison by host.
    pub hosts: Vec<ValidatedHost>,
}

/// Slowdowns of one service on one cache, in percent.
struct ComparedService {
    measured_percent: f64,
    forecast_percent: f64,
    /// Cycles of the service alone: those of its program on the cycle-level machine over those of its profile.
    solo_ratio: f64,
    max_slowdown_percent: Option<f64>,
}

/// A machine with caches divided by a scale, and the profiles to run on it.
struct ScaledMachine<'a> {
    solver: &'a CoRunSolver,
    machine: MachineSpec,
    scale: u32,
    timing: CoreTiming,
    time_slice: ValidationSlice,
}

/// Runs up to `count` hosts of a fleet on both machines; `None` if stopped.
///
/// # Errors
/// The machine cannot be simulated, or no host has a service with a profile.
pub fn validate(
    fleet_study: &FleetStudy<'_>,
    count: u32,
    slice: ValidationSlice,
    seed: u64,
    control: &RunControl<'_>,
) -> Result<Option<FleetValidation>, ValidationError> {
    let (model, mut hosts) = fleet_study.initial_hosts();
    hosts.truncate(count as usize);
    let forecasts: Vec<_> = hosts
        .iter_mut()
        .map(|host| host.evaluate_caches(&model))
        .collect();
    let keys: Vec<Vec<CoRunKey>> = hosts.iter().map(|host| host.corun_keys(&model)).collect();
    let Some(machine) = ScaledMachine::new(model.solver, slice) else {
        return Err(ValidationError::NoServices);
    };

    let members: BTreeSet<CoRunMember> = keys
        .iter()
        .flatten()
        .flat_map(|key| key.members.iter().copied())
        .collect();
    let members: Vec<CoRunMember> = members.into_iter().collect();
    let total_count = members.len() + hosts.len();
    let finished_count = AtomicUsize::new(0);
    let report_progress = || {
        (control.report_progress)(
            finished_count.fetch_add(1, Ordering::Relaxed) + 1,
            total_count,
        );
    };
    let solo_runs = run_parallel(control.workers, members.len(), &|index| {
        if (control.should_stop)() {
            return None;
        }
        let key = CoRunKey {
            members: vec![members[index]],
            ..CoRunKey::default()
        };
        let cycles_by_cache = machine.run(std::slice::from_ref(&key), SplitMix64::scatter(seed));
        report_progress();
        Some(cycles_by_cache)
    });
    let Some(solo_runs) = solo_runs else {
        return Ok(None);
    };
    let mut solo_cycles: BTreeMap<CoRunMember, f64> = BTreeMap::new();
    for (member, run) in members.iter().zip(solo_runs) {
        solo_cycles.insert(*member, run?[0][0]);
    }
    let runs = run_parallel(control.workers, hosts.len(), &|index| {
        if (control.should_stop)() {
            return None;
        }
        let cycles_by_cache =
            machine.run(&keys[index], SplitMix64::scatter(seed ^ (index as u64 + 1)));
        report_progress();
        Some(cycles_by_cache)
    });
    let Some(runs) = runs else { return Ok(None) };
    let mut services_by_host = Vec::new();
    for (index, run) in runs.into_iter().enumerate() {
        let mut compared_services = Vec::new();
        for ((key, cycles_by_member), part_slowdowns) in
            keys[index].iter().zip(run?).zip(&forecasts[index])
        {
            for ((member, cycles), part_slowdown) in
                key.members.iter().zip(cycles_by_member).zip(part_slowdowns)
            {
                let kind_index = model
                    .profiles
                    .iter()
                    .position(|profile| *profile == Some(member.kind));
                let profile = &model.solver.profiles()[usize::from(member.kind)];
                let forecast_solo_cycles = f64::from(model.solver.solo_cycles_per_instr(*member));
                compared_services.push(ComparedService {
                    measured_percent: (cycles / solo_cycles[member] - 1.0) * 100.0,
                    forecast_percent: (part_slowdown.ratio - 1.0) * 100.0,
                    solo_ratio: solo_cycles[member] * profile.base_cycles_per_instr
                        / forecast_solo_cycles,
                    max_slowdown_percent: kind_index
                        .and_then(|kind| model.kinds[kind].max_slowdown_percent),
                });
            }
        }
        services_by_host.push(compared_services);
    }
    machine
        .summary(&services_by_host)
        .map(Some)
        .ok_or(ValidationError::NoServices)
}

impl<'a> ScaledMachine<'a> {
    fn new(solver: &'a CoRunSolver, slice: ValidationSlice) -> Option<Self> {
        let mut machine = solver.host().clone();
        let last_level = machine.last_level_cache()?.level;
        let min_data_sets = |machine: &MachineSpec| {
            let sets = machine
                .caches
                .iter()
                .filter(|cache| cache.level != CacheLevel::L1Instruction);
            sets.map(|cache| cache.sets_per_slice()).min()
        };

        let mut scale = slice.cache_scale.max(1);
        while scale > 1
            && min_data_sets(&machine).is_some_and(|sets| !sets.is_multiple_of(u64::from(scale)))
        {
            scale /= 2;
        }
        for cache in machine
            .caches
            .iter_mut()
            .filter(|cache| cache.level != CacheLevel::L1Instruction)
        {
            cache.size_bytes /= u64::from(scale);
        }

        machine.pages.colors = None;
        // Profiles state cycles, not instructions. So every CPU is a core that executes one instruction in each cycle,
        // waits for a value where it is needed, and continues past every other miss.
        for cache in &mut machine.caches {
            cache.shared_by_cores *= if cache.level == last_level {
                machine.contexts_per_core
            } else {
                1
            };
        }

        machine.cores_per_package *= machine.contexts_per_core;
        machine.contexts_per_core = 1;
        machine.os.context_switch_cycles = 0;
        machine.pipeline = CoreModel::OutOfOrder {
            issue_width: 1,
            window: MIN_WINDOW_INSTR.max(2 * machine.memory.remote_latency_cycles),
            mshrs: MIN_MISSES_IN_FLIGHT,
            loads_pass: false,
        };
        let timing = CoreTiming::new(&machine)?;
        Some(ScaledMachine {
            solver,
            machine,
            scale,
            timing,
            time_slice: slice,
        })
    }

    /// Runs the services of all caches of one machine. Returns the cycles per base cycle, by cache and member.
    fn run(&self, keys: &[CoRunKey], seed: u64) -> Result<Vec<Vec<f64>>, ValidationError> {
        let mut generator = SplitMix64::new(seed);
        let mut programs = Vec::new();
        let mut cache_and_member = Vec::new();
        let cpus_per_cache = self.solver.cpus_per_cache();

        for (cache, key) in keys.iter().enumerate() {
            let speeds = self.solver.member_speeds(key);
            for (index, cpus) in self.solver.member_cpus(&key.members) {
                let member = key.members[index];
                let profile = &self.solver.profiles()[usize::from(member.kind)];
                for cpu in cpus {
                    let busy_share = f64::from(member.load) / f64::from(LOAD_LEVELS);
                    let cycles = f64::from(speeds[index].cycles_per_instr);
                    let (timing, scale, seed) = (self.timing, self.scale, generator.next_u64());
                    let profile = profile.clone();
                    let build_sources =
                        Box::new(move |_| -> Vec<Box<dyn cachemate_core::AccessSource>> {
                            let thread = CurveProgram::new(
                                &profile,
                                member.threads,
                                scale,
                                timing,
                                busy_share,
                                cycles,
                                seed,
                            );
                            vec![Box::new(thread)]
                        });
                    let mut program = SimProgram::new("service", build_sources);
                    program.pinned_cpus =
                        Some(std::iter::once(cache as u32 * cpus_per_cache + cpu).collect());
                    programs.push(program);
                    cache_and_member.push((cache, index));
                }
            }
        }
        let options = SimOptions {
            seed: generator.next_u64(),
            // A profile states its misses with all prefetches included.
            prefetch: false,
            is_resident: true,
            warm_up: Some(RunLimit::Cycles(self.time_slice.settling_cycles)),
            ends: Some(RunLimit::Cycles(self.time_slice.measured_cycles)),
            ..SimOptions::default()
        };
        let results = run_alone(&mut SimMachine::new(&self.machine, &options, programs)?)?;
        let mut sums: Vec<Vec<(f64, f64)>> = keys
            .iter()
            .map(|key| vec![(0.0, 0.0); key.members.len()])
            .collect();
        for ((cache, member), task) in cache_and_member.into_iter().zip(&results.tasks) {
            let sum = &mut sums[cache][member];
            sum.0 += task.cycles as f64;
            sum.1 += task.instructions as f64;
        }
        let cycles_per_base_cycle = |sums: Vec<(f64, f64)>| {
            sums.into_iter()
                .map(|(cycles, instr)| cycles / instr.max(1.0))
                .collect()
        };
        Ok(sums.into_iter().map(cycles_per_base_cycle).collect())
    }

    fn summary(&self, services_by_host: &[Vec<ComparedService>]) -> Option<FleetValidation> {
        let all_services: Vec<&ComparedService> = services_by_host.iter().flatten().collect();
        let mut errors: Vec<f64> = all_services
            .iter()
            .map(|service| (service.forecast_percent - service.measured_percent).abs())
            .collect();
        // A sum of ascending numbers loses the fewest digits.
        errors.sort_by(f64::total_cmp);
        let solo_ratios: Vec<f64> = all_services
            .iter()
            .map(|service| service.solo_ratio)
            .collect();

        let limited_services: Vec<(f64, &&ComparedService)> = all_services
            .iter()
            .filter_map(|service| Some((service.max_slowdown_percent?, service)))
            .collect();
        let agreement_count = limited_services
            .iter()
            .filter(|(limit, service)| {
                (service.measured_percent > *limit) == (service.forecast_percent > *limit)
            })
            .count();

        let summarize_host = |(index, services): (usize, &Vec<ComparedService>)| ValidatedHost {
            host: index as u32,
            services: services.len(),
            measured_slowdown_percent: mean(
                services.iter().map(|service| service.measured_percent),
            ),
            forecast_slowdown_percent: mean(
                services.iter().map(|service| service.forecast_percent),
            ),
            mean_absolute_error_points: mean(
                services
                    .iter()
                    .map(|service| (service.forecast_percent - service.measured_percent).abs()),
            ),
        };
        let cycles_per_host = self.time_slice.settling_cycles + self.time_slice.measured_cycles;

        Some(FleetValidation {
            machine: self.machine.name.clone(),
            cache_scale: self.scale,
            cycles_per_host,
            nominal_ms_per_host: cycles_per_host as f64 / self.machine.hertz as f64 * 1e3,
            services: all_services.len(),
            measured_slowdown_percent: mean(
                all_services.iter().map(|service| service.measured_percent),
            ),
            mean_absolute_error_points: mean(errors.iter().copied()),
            p90_error_points: nearest_rank(&errors, 0.9)?,
            mean_signed_error_points: mean(
                all_services
                    .iter()
                    .map(|service| service.forecast_percent - service.measured_percent),
            ),
            error_of_predicting_nothing_points: mean(
                all_services
                    .iter()
                    .map(|service| service.measured_percent.abs()),
            ),
            same_verdict_share: (!limited_services.is_empty())
                .then(|| agreement_count as f64 / limited_services.len() as f64),
            solo_cycles_ratio: median(&solo_ratios)?,
            hosts: services_by_host
                .iter()
                .enumerate()
                .map(summarize_host)
                .collect(),
        })
    }
}

/// The mean of the values; 0 if there are none.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count.max(1))
}
