//! Searches placements and partitions for the plan that best keeps all promises, as evaluated by the interval machine.
//!
//! Problem: whether a promise can be kept depends on the possible plans, not on a policy. Method: each program has its
//! own core, and either exclusive units of its cache or the shared rest. From the packed plan and several random
//! starts, the search moves or exchanges jobs and changes partitions. It keeps a change that reduces the shortfall from
//! the promises or, at equal shortfall, raises the mean speed. Properties: the search does not use any policy's model,
//! the same seed gives the same plan, and no plan is simulated twice. Turns and CPU shares are not searched, so another
//! plan may keep a promise that no found plan keeps.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cachemate_core::{CpuSet, MachineSpec, SplitMix64};
use cachemate_interval::IntervalJob;
use cachemate_interval::engine::{DEMAND, IntervalEngine};

use crate::composition::window_rates;
use crate::{ForecastResult, failed};

/// Plans tried from each start, and number of starts.
const PLANS_PER_START: u32 = 80;
const START_COUNT: u64 = 3;
/// Cycles in which running jobs touch their memory before a plan moves them.
const MEMORY_TOUCH_CYCLES: f64 = 1e6;
/// Cycles after which a plan's speeds are steady, and cycles over which they are then measured.
const SETTLING_CYCLES: f64 = 6e8;
const MEASURED_CYCLES: f64 = 2e8;

/// The promised maximum slowdown of a job; `None` without a promise.
pub fn max_slowdown(job: &IntervalJob) -> Option<f64> {
    job.goal?.max_slowdown
}

/// A plan that assigns each job a CPU, and a number of exclusive units of its cache.
#[derive(Clone, PartialEq, Debug)]
pub struct StaticPlan {
    /// The CPU of each job.
    pub cpu_by_job: Vec<u32>,
    /// Exclusive units of each job; 0 if the job uses the shared rest.
    pub units_by_job: Vec<u32>,
}

/// A plan with its forecast.
#[derive(Clone, PartialEq, Debug)]
pub struct EvaluatedPlan {
    /// The plan.
    pub plan: StaticPlan,
    /// Run time divided by solo run time, minus one, of each job.
    pub slowdowns: Vec<f64>,
    /// Sum of the shortfalls from all promises.
    pub total_shortfall: f64,
    /// Mean over jobs of speed divided by solo speed.
    pub mean_speed: f64,
    /// Whether the plan keeps all promises.
    pub keeps_all_promises: bool,
}

/// Evaluates static plans exactly, by simulating them on one machine.
pub struct PlanEvaluator<'a> {
    spec: &'a MachineSpec,
    jobs: &'a [IntervalJob],
    /// Number of units of a cache; 1 if it cannot be partitioned.
    pub units_per_cache: u32,
    cpus: Vec<u32>,
    cpus_per_cache: u32,
    has_running_jobs: bool,
    /// Slowdowns of the plans evaluated so far, by what distinguishes them.
    known_slowdowns: Mutex<BTreeMap<Vec<JobSite>, Vec<f64>>>,
}

/// What matters of a job's place: its cache, and its exclusive units of it. The cores of a cache are alike.
type JobSite = (u32, u32);

impl<'a> PlanEvaluator<'a> {
    /// # Errors
    /// If the machine has no data cache to share.
    pub fn new(spec: &'a MachineSpec, jobs: &'a [IntervalJob]) -> ForecastResult<Self> {
        let last_level = spec
            .last_level_cache()
            .ok_or_else(|| failed(&spec.name)("no data cache to share"))?;
        let units_per_cache = last_level
            .way_partitions
            .map(|_| last_level.ways)
            .or(spec.pages.colors)
            .unwrap_or(1);

        let contexts = spec.contexts_per_core;
        let cores = spec.cores();
        if jobs.is_empty() || jobs.len() > cores as usize {
            return Err(failed(&spec.name)(format!(
                "found {} programs, expected 1 to {cores}, one for each core",
                jobs.len()
            )));
        }

        Ok(PlanEvaluator {
            spec,
            jobs,
            units_per_cache,
            cpus: (0..cores).map(|core| core * contexts).collect(),
            cpus_per_cache: last_level.shared_by_cores * contexts,
            has_running_jobs: false,
            known_slowdowns: Mutex::default(),
        })
    }

    /// The truth for jobs that already run under the default placement: their memory is on the nodes on which they
    /// started, and no plan moves it. Otherwise, a plan places jobs before they touch their memory.
    #[must_use]
    pub fn with_running_jobs(self) -> Self {
        PlanEvaluator {
            has_running_jobs: true,
            ..self
        }
    }

    /// Plans that put the same jobs together are solved once.
    pub fn evaluate_plan(&self, plan: StaticPlan) -> ForecastResult<EvaluatedPlan> {
        let sites = self.sites_of(&plan);
        let lock_known = || {
            self.known_slowdowns
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let known_slowdowns = lock_known().get(&sites).cloned();
        let slowdowns = match known_slowdowns {
            Some(slowdowns) => slowdowns,
            None => {
                let slowdowns = self.solve_slowdowns(&plan)?;
                lock_known().insert(sites, slowdowns.clone());
                slowdowns
            }
        };

        let shortfall =
            |(job, slowdown): (&IntervalJob, &f64)| Some((slowdown - max_slowdown(job)?).max(0.0));
        let total_shortfall = self
            .jobs
            .iter()
            .zip(&slowdowns)
            .filter_map(shortfall)
            .sum::<f64>();

        let speeds = slowdowns.iter().map(|slowdown| 1.0 / (1.0 + slowdown));
        let mean_speed = speeds.sum::<f64>() / slowdowns.len() as f64;
        Ok(EvaluatedPlan {
            plan,
            slowdowns,
            total_shortfall,
            mean_speed,
            keeps_all_promises: total_shortfall <= 0.0,
        })
    }

    /// Searches for the best plan: the fastest that keeps all promises, or otherwise the one with the smallest
    /// shortfall.
    pub fn search_best_plan(&self, seed: u64) -> ForecastResult<EvaluatedPlan> {
        let mut generator = SplitMix64::new(seed ^ 0xbe57);
        let mut best_plan = self.climb_from_cpu_order(&self.cpus, &mut generator)?;
        for _ in 1..START_COUNT {
            let mut cpu_order = self.cpus.clone();
            generator.shuffle(&mut cpu_order);
            let climbed_plan = self.climb_from_cpu_order(&cpu_order, &mut generator)?;
            if is_better(&climbed_plan, &best_plan) {
                best_plan = climbed_plan;
            }
        }
        Ok(best_plan)
    }

    /// Climbs from one start to the best plan in reach.
    fn climb_from_cpu_order(
        &self,
        cpu_order: &[u32],
        generator: &mut SplitMix64,
    ) -> ForecastResult<EvaluatedPlan> {
        let unpartitioned_plan = StaticPlan {
            cpu_by_job: cpu_order[..self.jobs.len()].to_vec(),
            units_by_job: vec![0; self.jobs.len()],
        };
        let mut current_plan = self.evaluate_plan(unpartitioned_plan)?;
        for _ in 0..PLANS_PER_START {
            let neighbor_plan =
                self.evaluate_plan(self.draw_neighbor(&current_plan.plan, generator))?;
            if is_better(&neighbor_plan, &current_plan) {
                current_plan = neighbor_plan;
            }
        }
        Ok(current_plan)
    }

    /// CPUs are numbered cache by cache.
    pub fn cache_of(&self, cpu: u32) -> u32 {
        cpu / self.cpus_per_cache
    }

    /// The sites of a plan's jobs. On one package, whose caches share bus and memory, they are alike as well, and are
    /// numbered by the first job on them.
    fn sites_of(&self, plan: &StaticPlan) -> Vec<JobSite> {
        let are_caches_alike = self.spec.packages == 1;
        let mut seen_caches = Vec::new();
        let places = plan.cpu_by_job.iter().zip(&plan.units_by_job);
        places
            .map(|(&cpu, &units)| {
                let cache = self.cache_of(cpu);
                if !are_caches_alike {
                    return (cache, units);
                }
                let known_index = seen_caches.iter().position(|seen| *seen == cache);
                let index = known_index.unwrap_or_else(|| {
                    seen_caches.push(cache);
                    seen_caches.len() - 1
                });
                (index as u32, units)
            })
            .collect()
    }

    /// Draws a changed plan: a job on another CPU, whose job takes its place, or another partition for one job.
    pub fn draw_neighbor(&self, plan: &StaticPlan, generator: &mut SplitMix64) -> StaticPlan {
        let mut changed_plan = plan.clone();
        let job = generator.draw_below(plan.cpu_by_job.len() as u64) as usize;
        if self.units_per_cache > 1 && generator.draw_below(2) == 0 {
            let cache_of = |index: usize| self.cache_of(changed_plan.cpu_by_job[index]);
            let used_units: u32 = (0..plan.units_by_job.len())
                .filter(|&index| index != job && cache_of(index) == cache_of(job))
                .map(|index| plan.units_by_job[index])
                .sum();
            // At least one unit remains shared.
            let free_units = self.units_per_cache.saturating_sub(used_units + 1);
            changed_plan.units_by_job[job] = generator.draw_below(u64::from(free_units) + 1) as u32;
            return changed_plan;
        }

        let cpu = self.cpus[generator.draw_below(self.cpus.len() as u64) as usize];
        if let Some(occupant) = plan
            .cpu_by_job
            .iter()
            .position(|&occupied_cpu| occupied_cpu == cpu)
        {
            changed_plan.cpu_by_job[occupant] = plan.cpu_by_job[job];
        }

        changed_plan.cpu_by_job[job] = cpu;
        // Partitions are reset, because they belong to the previous placement.
        changed_plan
            .units_by_job
            .iter_mut()
            .for_each(|units| *units = 0);
        changed_plan
    }

    /// The run time relative to running alone, minus one, of each job, once caches have filled.
    fn solve_slowdowns(&self, plan: &StaticPlan) -> ForecastResult<Vec<f64>> {
        let (spec, units_per_cache) = (self.spec, self.units_per_cache);
        let placed_jobs: Vec<(&IntervalJob, u32)> = self
            .jobs
            .iter()
            .zip(plan.cpu_by_job.iter().copied())
            .collect();

        let mut engine = IntervalEngine::new(spec, false)
            .ok_or_else(|| failed(&spec.name)("no data cache to share"))?;
        let mut slots = Vec::new();
        for &(job, cpu) in &placed_jobs {
            let program = engine.add_program((*job.program).clone());
            let first_touch_cpus = if self.has_running_jobs {
                self.cpus.iter().copied().collect()
            } else {
                CpuSet::from_iter([cpu])
            };
            slots.push(engine.start_task(program, first_touch_cpus));
        }

        if self.has_running_jobs {
            engine.run(MEMORY_TOUCH_CYCLES);
            for (&slot, &(_, cpu)) in slots.iter().zip(&placed_jobs) {
                engine.set_allowed_cpus(slot, CpuSet::from_iter([cpu]));
            }
        }
        let cache_count = spec.cpus() / self.cpus_per_cache.max(1);

        for cache in 0..cache_count {
            let jobs_on_cache: Vec<usize> = (0..placed_jobs.len())
                .filter(|&index| self.cache_of(placed_jobs[index].1) == cache)
                .collect();
            let own_units = |index: usize| plan.units_by_job.get(index).copied().unwrap_or(0);
            let used_units: u32 = jobs_on_cache.iter().map(|&index| own_units(index)).sum();
            if used_units == 0 {
                continue;
            }

            let lines_of_units =
                |units: u32| engine.divisible_lines() * units as f32 / units_per_cache as f32;
            let mut domain_lines = vec![lines_of_units(units_per_cache - used_units)];
            let mut slot_domains = Vec::new();
            for &index in &jobs_on_cache {
                let domain_index = if own_units(index) > 0 {
                    domain_lines.len()
                } else {
                    0
                };
                if own_units(index) > 0 {
                    domain_lines.push(lines_of_units(own_units(index)));
                }
                slot_domains.push((slots[index], domain_index as u8));
            }
            let domains: Vec<(f32, u8)> = domain_lines
                .iter()
                .enumerate()
                .map(|(index, &size)| (size, index as u8))
                .collect();
            engine.divide(cache as usize, &domains, &domain_lines, slot_domains);
        }

        let rates = window_rates(
            &mut engine,
            &slots,
            &vec![DEMAND; slots.len()],
            SETTLING_CYCLES,
            MEASURED_CYCLES,
        );
        Ok(rates.iter().map(|rates| rates.slowdown).collect())
    }
}

fn is_better(candidate_plan: &EvaluatedPlan, other_plan: &EvaluatedPlan) -> bool {
    candidate_plan.total_shortfall < other_plan.total_shortfall - 1e-9
        || candidate_plan.total_shortfall <= other_plan.total_shortfall + 1e-9
            && candidate_plan.mean_speed > other_plan.mean_speed
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::Goal;
    use cachemate_interval::closed_form::{reusing_job, streaming_job};

    /// Is a program alone on the machine not slowed, does a co-runner slow it, and does a partition restore most of its
    /// speed?
    #[test]
    fn a_co_runner_slows_a_program_and_a_partition_restores_it() {
        let spec =
            cachemate_spec::load_machine("epyc-7742?cores_per_package=8&contexts_per_core=1")
                .unwrap();
        let jobs = [
            reusing_job("reuser", &spec, 0.7, 0.02),
            streaming_job(&spec, 0.02),
        ];

        let truth = PlanEvaluator::new(&spec, &jobs).unwrap();
        let solved_slowdown = |cpus: [u32; 2], units: u32| {
            truth
                .evaluate_plan(StaticPlan {
                    cpu_by_job: cpus.to_vec(),
                    units_by_job: vec![units, 0],
                })
                .unwrap()
                .slowdowns[0]
        };
        let (apart, shared, divided) = (
            solved_slowdown([0, 4], 0),
            solved_slowdown([0, 1], 0),
            solved_slowdown([0, 1], truth.units_per_cache - 1),
        );
        assert!(
            apart < 0.02 && shared > 0.1 && divided < shared / 3.0,
            "{apart} {shared} {divided}"
        );
    }

    /// Are plans that differ only in alike cores and caches one plan, with the slowdowns of each, and do packages keep
    /// caches apart?
    #[test]
    fn plans_that_differ_in_alike_cores_and_caches_are_solved_once() {
        let spec = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let jobs = [
            reusing_job("reuser", &spec, 0.7, 0.02),
            streaming_job(&spec, 0.02),
        ];
        let truth = PlanEvaluator::new(&spec, &jobs).unwrap();
        let plan = |cpus: [u32; 2]| StaticPlan {
            cpu_by_job: cpus.to_vec(),
            units_by_job: vec![0; 2],
        };
        for (given, alike) in [([0, 1], [3, 2]), ([0, 2], [3, 1])] {
            assert_eq!(truth.sites_of(&plan(given)), truth.sites_of(&plan(alike)));
            assert_eq!(
                truth.solve_slowdowns(&plan(given)).unwrap(),
                truth.solve_slowdowns(&plan(alike)).unwrap()
            );
        }
        assert_ne!(truth.sites_of(&plan([0, 1])), truth.sites_of(&plan([0, 2])));

        let spec = cachemate_spec::load_machine("xeon-x5365-4?packages=2").unwrap();
        let truth = PlanEvaluator::new(&spec, &jobs).unwrap();
        assert_ne!(truth.sites_of(&plan([0, 1])), truth.sites_of(&plan([4, 5])));
    }

    /// Does the search keep a promise that a partition or another placement can keep, and report one that none can?
    #[test]
    fn the_search_keeps_promises_that_can_be_kept() {
        let spec = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let search_with_limit = |max_slowdown: f64| {
            let promised_job = |name: &str| IntervalJob {
                goal: Some(Goal {
                    max_slowdown: Some(max_slowdown),
                    ..Goal::default()
                }),
                ..reusing_job(name, &spec, 0.9, 0.01)
            };
            let jobs = [
                promised_job("a"),
                promised_job("b"),
                streaming_job(&spec, 0.002),
                reusing_job("small", &spec, 0.02, 0.01),
            ];
            PlanEvaluator::new(&spec, &jobs)
                .unwrap()
                .search_best_plan(1)
                .unwrap()
        };

        let loosely_promised_plan = search_with_limit(0.6);
        assert!(
            loosely_promised_plan.keeps_all_promises
                && loosely_promised_plan.plan.cpu_by_job[0] / 2
                    != loosely_promised_plan.plan.cpu_by_job[1] / 2,
            "{loosely_promised_plan:?}"
        );
        assert!(!search_with_limit(0.0).keeps_all_promises);
    }
}
