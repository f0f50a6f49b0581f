//! Searches the best plan for promises over placements and partitions, with the interval machine as the judge.
//!
//! Problem: whether a promise can be kept depends on the possible plans, not on a policy. Method: each program has
//! its own core, and either exclusive units of its cache or the shared rest. From several random starts, the search
//! exchanges cores and changes partitions. It keeps a change that reduces the shortfall from the promises or, at
//! equal shortfall, raises the mean speed. Properties: the search does not use any policy's model, and the same seed
//! gives the same plan. Turns and CPU shares are not searched, so another plan may keep a promise that no found plan
//! keeps.

use cachemate_core::{CpuSet, MachineSpec, SplitMix64};
use cachemate_interval::IntervalJob;
use cachemate_interval::engine::IntervalEngine;

use super::forecast::window_rates;
use crate::setup::failed;
use crate::{ReproError, mean};

/// Plans tried from each start, and number of starts.
const TRIED: u32 = 80;
const STARTS: u64 = 3;
/// Cycles in which running jobs touch their memory before a plan moves them.
const TOUCHED_CYCLES: f64 = 1e6;
/// Cycles after which a plan's speeds are steady, and cycles over which they are then measured.
const SETTLED_CYCLES: f64 = 6e8;
const READ_CYCLES: f64 = 2e8;

/// The promised maximum slowdown of a job; `None` without a promise.
pub fn max_slowdown(job: &IntervalJob) -> Option<f64> {
    job.goal?.max_slowdown
}

/// A plan that assigns each job a CPU, and a number of exclusive units of its cache.
#[derive(Clone, PartialEq, Debug)]
pub struct StaticPlan {
    /// The CPU of each job.
    pub cpu_of: Vec<u32>,
    /// Exclusive units of each job; 0 if the job uses the shared rest.
    pub units: Vec<u32>,
}

/// A plan with its forecast.
#[derive(Clone, PartialEq, Debug)]
pub struct SearchedPlan {
    /// The plan.
    pub plan: StaticPlan,
    /// Run time divided by solo run time, minus one, of each job.
    pub slowdowns: Vec<f64>,
    /// Sum of the shortfalls from all promises.
    pub missing: f64,
    /// Mean over jobs of speed divided by solo speed.
    pub mean_speed: f64,
    /// Whether the plan keeps all promises.
    pub keeps_all: bool,
}

/// Solver that determines the truth about static plans on one machine.
pub struct PlanTruth<'a> {
    spec: &'a MachineSpec,
    jobs: &'a [IntervalJob],
    /// Number of units of a cache; 1 if it cannot be partitioned.
    pub parts: u32,
    cpus: Vec<u32>,
    cpus_each: u32,
    are_jobs_running: bool,
}

impl<'a> PlanTruth<'a> {
    /// The truth for these jobs on this machine.
    pub fn new(spec: &'a MachineSpec, jobs: &'a [IntervalJob]) -> Result<Self, ReproError> {
        let last = spec.last_level().ok_or_else(|| failed(&spec.name)("no data cache to share"))?;
        let parts = last.way_partitions.map(|_| last.ways).or(spec.pages.colors).unwrap_or(1);
        let contexts = spec.contexts_per_core;
        let cores = spec.cores();
        if jobs.is_empty() || jobs.len() > cores as usize {
            return Err(failed(&spec.name)(format!(
                "found {} programs, expected 1 to {cores}, one for each core",
                jobs.len()
            )));
        }
        Ok(PlanTruth {
            spec,
            jobs,
            parts,
            cpus: (0..cores).map(|core| core * contexts).collect(),
            cpus_each: last.shared_by_cores * contexts,
            are_jobs_running: false,
        })
    }

    /// The truth for jobs that already run under the default placement: their memory is on the nodes on which they
    /// started, and no plan moves it. Otherwise, a plan places jobs before they touch their memory.
    #[must_use]
    pub fn of_running_jobs(self) -> Self {
        PlanTruth { are_jobs_running: true, ..self }
    }

    /// Forecasts a plan.
    pub fn solve(&self, plan: StaticPlan) -> Result<SearchedPlan, ReproError> {
        let slowdowns = self.solve_slowdowns(&plan)?;
        let shortfall = |(job, slowdown): (&IntervalJob, &f64)| Some((slowdown - max_slowdown(job)?).max(0.0));
        let missing = self.jobs.iter().zip(&slowdowns).filter_map(shortfall).sum::<f64>();
        let mean_speed = mean(&slowdowns.iter().map(|slowdown| 1.0 / (1.0 + slowdown)).collect::<Vec<f64>>());
        Ok(SearchedPlan { plan, slowdowns, missing, mean_speed, keeps_all: missing <= 0.0 })
    }

    /// Searches for the best plan: the fastest that keeps all promises, or otherwise the one with the smallest
    /// shortfall.
    pub fn search(&self, seed: u64) -> Result<SearchedPlan, ReproError> {
        let mut generator = SplitMix64::new(seed ^ 0xbe57);
        let mut best = self.climb(&self.cpus, &mut generator)?;
        for _ in 1..STARTS {
            let mut cpus = self.cpus.clone();
            generator.shuffle(&mut cpus);
            let climbed = self.climb(&cpus, &mut generator)?;
            if is_better(&climbed, &best) {
                best = climbed;
            }
        }
        Ok(best)
    }

    /// Climbs from one start to the best plan in reach.
    fn climb(&self, cpus: &[u32], generator: &mut SplitMix64) -> Result<SearchedPlan, ReproError> {
        let mut current = self.solve(self.undivided_plan(cpus.iter().copied()))?;
        for _ in 0..TRIED {
            let next = self.solve(self.draw_neighbor(&current.plan, generator))?;
            if is_better(&next, &current) {
                current = next;
            }
        }
        Ok(current)
    }

    /// The cache of a CPU.
    pub fn cache_of(&self, cpu: u32) -> u32 {
        cpu / self.cpus_each
    }

    /// A plan without partitions on as few caches as possible.
    pub fn packed_plan(&self) -> StaticPlan {
        self.undivided_plan(self.cpus.iter().copied())
    }

    /// The plan without partitions in which the jobs take these CPUs in turn.
    fn undivided_plan(&self, cpus: impl Iterator<Item = u32>) -> StaticPlan {
        StaticPlan { cpu_of: cpus.take(self.jobs.len()).collect(), units: vec![0; self.jobs.len()] }
    }

    /// A plan without partitions that gives the caches turns, so that as many as possible are in use.
    pub fn spread_plan(&self) -> StaticPlan {
        let mut cpus: Vec<(usize, u32)> = Vec::new();
        for &cpu in &self.cpus {
            let earlier_on_cache = cpus.iter().filter(|(_, other)| self.cache_of(*other) == self.cache_of(cpu)).count();
            cpus.push((earlier_on_cache, cpu));
        }
        cpus.sort_unstable();
        self.undivided_plan(cpus.into_iter().map(|(_, cpu)| cpu))
    }

    /// Draws a changed plan: two CPUs exchanged, or another partition for one job.
    pub fn draw_neighbor(&self, plan: &StaticPlan, generator: &mut SplitMix64) -> StaticPlan {
        let mut next = plan.clone();
        let job = generator.draw_below(plan.cpu_of.len() as u64) as usize;
        if self.parts > 1 && generator.draw_below(2) == 0 {
            let cache_of = |index: usize| self.cache_of(next.cpu_of[index]);
            let used_parts: u32 = (0..plan.units.len())
                .filter(|&index| index != job && cache_of(index) == cache_of(job))
                .map(|index| plan.units[index])
                .sum();
            // At least one unit remains shared.
            let remaining = self.parts.saturating_sub(used_parts + 1);
            next.units[job] = generator.draw_below(u64::from(remaining) + 1) as u32;
            return next;
        }
        let cpu = self.cpus[generator.draw_below(self.cpus.len() as u64) as usize];
        if let Some(occupant) = plan.cpu_of.iter().position(|&occupied_cpu| occupied_cpu == cpu) {
            next.cpu_of[occupant] = plan.cpu_of[job];
        }
        next.cpu_of[job] = cpu;
        // Partitions are reset, because they belong to the previous placement.
        next.units.iter_mut().for_each(|units| *units = 0);
        next
    }

    /// Run time relative to running alone, minus one, of each job, once caches have filled.
    fn solve_slowdowns(&self, plan: &StaticPlan) -> Result<Vec<f64>, ReproError> {
        let (spec, parts) = (self.spec, self.parts);
        let placed_jobs: Vec<(&IntervalJob, u32)> = self.jobs.iter().zip(plan.cpu_of.iter().copied()).collect();
        let mut engine =
            IntervalEngine::new(spec, false).ok_or_else(|| failed(&spec.name)("no data cache to share"))?;
        let mut slots = Vec::new();
        for &(job, cpu) in &placed_jobs {
            let program = engine.add_program((*job.program).clone());
            let first_cpus =
                if self.are_jobs_running { self.cpus.iter().copied().collect() } else { CpuSet::from_iter([cpu]) };
            slots.push(engine.start(program, first_cpus));
        }
        if self.are_jobs_running {
            engine.run(TOUCHED_CYCLES);
            for (&slot, &(_, cpu)) in slots.iter().zip(&placed_jobs) {
                engine.allow(slot, CpuSet::from_iter([cpu]));
            }
        }
        let caches = spec.cpus() / self.cpus_each.max(1);
        for cache in 0..caches {
            let on_it: Vec<usize> =
                (0..placed_jobs.len()).filter(|&index| self.cache_of(placed_jobs[index].1) == cache).collect();
            let own_units = |index: usize| plan.units.get(index).copied().unwrap_or(0);
            let used_parts: u32 = on_it.iter().map(|&index| own_units(index)).sum();
            if used_parts == 0 {
                continue;
            }
            let lines_of_units = |units: u32| engine.capacity_lines() * units as f32 / parts as f32;
            let mut sizes = vec![lines_of_units(parts - used_parts)];
            let mut members_of = Vec::new();
            for &index in &on_it {
                let group = if own_units(index) > 0 { sizes.len() } else { 0 };
                if own_units(index) > 0 {
                    sizes.push(lines_of_units(own_units(index)));
                }
                members_of.push((slots[index], group as u8));
            }
            let domains: Vec<(f32, u8)> = sizes.iter().enumerate().map(|(index, &size)| (size, index as u8)).collect();
            engine.divide(cache as usize, &domains, &sizes, members_of);
        }
        let rates = window_rates(&mut engine, &slots, SETTLED_CYCLES, READ_CYCLES);
        Ok(rates.iter().map(|[slowdown, ..]| *slowdown).collect())
    }
}

fn is_better(a: &SearchedPlan, b: &SearchedPlan) -> bool {
    a.missing < b.missing - 1e-9 || a.missing <= b.missing + 1e-9 && a.mean_speed > b.mean_speed
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::Goal;

    /// Is a program alone on the machine not slowed, does a co-runner slow it, and does a partition restore most of its
    /// speed?
    #[test]
    fn the_truth_about_a_plan_follows_the_engine() {
        let spec = cachemate_spec::load_machine("epyc-7742?cores_per_package=8&contexts_per_core=1").unwrap();
        let lines = spec.last_level().map_or(0.0, |cache| cache.size_bytes as f64 / 64.0);
        let steady_job =
            |name: &str, phase| IntervalJob::new(cachemate_interval::PhasedProgram::endless_program(name, phase));
        let reuser =
            steady_job("reuser", cachemate_interval::closed_form::uniform_phase(64.0, lines, 0.7 * lines, 0.02));
        let stream = steady_job("stream", cachemate_interval::closed_form::stream_phase(64.0, lines, 0.02));
        let jobs = [reuser, stream];
        let truth = PlanTruth::new(&spec, &jobs).unwrap();
        let solved_slowdown = |cpus: [u32; 2], units: u32| {
            truth.solve(StaticPlan { cpu_of: cpus.to_vec(), units: vec![units, 0] }).unwrap().slowdowns[0]
        };
        let (apart, shared, divided) =
            (solved_slowdown([0, 4], 0), solved_slowdown([0, 1], 0), solved_slowdown([0, 1], truth.parts - 1));
        assert!(apart < 0.02 && shared > 0.1 && divided < shared / 3.0, "{apart} {shared} {divided}");
    }

    /// Does the search keep a promise that a partition or another placement can keep, and report one that none can?
    #[test]
    fn the_search_keeps_promises_that_can_be_kept() {
        let spec = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let lines = spec.last_level().map_or(0.0, |cache| cache.size_bytes as f64 / 64.0);
        let promised_job = |name: &str, share: f64, max: Option<f64>| {
            let phase = match share > 0.0 {
                true => cachemate_interval::closed_form::uniform_phase(64.0, lines, share * lines, 0.01),
                false => cachemate_interval::closed_form::stream_phase(64.0, lines, 0.002),
            };
            let goal = max.map(|max| Goal { max_slowdown: Some(max), ..Goal::default() });
            IntervalJob { goal, ..IntervalJob::new(cachemate_interval::PhasedProgram::endless_program(name, phase)) }
        };
        let search_with_floor = |max: f64| {
            let jobs = [
                promised_job("a", 0.9, Some(max)),
                promised_job("b", 0.9, Some(max)),
                promised_job("stream", 0.0, None),
                promised_job("small", 0.02, None),
            ];
            PlanTruth::new(&spec, &jobs).unwrap().search(1).unwrap()
        };
        let loose = search_with_floor(0.6);
        assert!(loose.keeps_all && loose.plan.cpu_of[0] / 2 != loose.plan.cpu_of[1] / 2, "{loose:?}");
        assert!(!search_with_floor(0.0).keeps_all);
    }
}
