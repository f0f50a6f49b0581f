//! Who hurts whom, measured: every program alone and every pair on one shared cache (CA 2.1.2).
//!
//! Runs are made once per process, whatever asks for them: the same machine, options, lengths and programs give the same
//! bits, so a run is its own name. A pair is pinned to two cores of the first last-level cache; a program beside itself
//! is two copies with inputs of their own.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cachemate_core::{CpuId, CpuSet, Level, MachineSpec, Topology};
use cachemate_policy::matrix::{CostKind, PairCosts};
use cachemate_policy::placement;
use cachemate_sim::machine::SimOptions;
use cachemate_sim::results::{RunResults, TaskResults};

use crate::setup::{Job, Workload, failed};
use crate::{Context, ReproError};

/// What one program did in one run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rates {
    /// Per elapsed cycle.
    pub instr_per_cycle: f64,
    /// Demand misses of the last-level cache.
    pub misses_per_kilo_instr: f64,
}

impl Rates {
    /// `None` where it never ran.
    fn of(task: &TaskResults, elapsed_cycles: u64, last_level: Level) -> Option<Self> {
        let misses = task.levels.iter().find(|by| by.level == last_level)?.misses as f64;
        let instructions = (task.instructions > 0).then_some(task.instructions as f64)?;
        Some(Rates {
            instr_per_cycle: instructions / elapsed_cycles.max(1) as f64,
            misses_per_kilo_instr: 1000.0 * misses / instructions,
        })
    }
}

/// Instructions per elapsed cycle and misses of every job of a run, in the order of the jobs.
///
/// # Errors
/// A job that never ran, or a machine without a shared cache.
pub fn rates(results: &RunResults, machine: &MachineSpec) -> Result<Vec<Rates>, ReproError> {
    let last = machine.last_level().ok_or_else(|| failed(&machine.name)("no data cache to share"))?.level;
    let of = |task: &TaskResults| {
        Rates::of(task, results.elapsed_cycles, last).ok_or_else(|| failed(&task.name)("it never ran"))
    };
    results.tasks.iter().map(of).collect()
}

/// Where and for how long programs are measured.
#[derive(Clone, Debug)]
pub struct Bench {
    pub machine: MachineSpec,
    pub options: SimOptions,
    pub warm_up_cycles: u64,
    pub measured_cycles: u64,
}

static RUNS: Mutex<BTreeMap<String, Vec<Rates>>> = Mutex::new(BTreeMap::new());

impl Bench {
    /// # Errors
    /// There is no such machine.
    pub fn on(machine: &str, seed: u64, warm_up_cycles: u64, measured_cycles: u64) -> Result<Self, ReproError> {
        let Workload { machine, options, .. } = Workload::on(machine, Vec::new(), seed)?;
        Ok(Bench { machine, options, warm_up_cycles, measured_cycles })
    }

    /// The jobs together, each on its CPU.
    ///
    /// # Errors
    /// As [`Workload::unmanaged`].
    pub fn run(&self, jobs: &[(Job, CpuId)]) -> Result<Vec<Rates>, ReproError> {
        let pinned = |(job, cpu): &(Job, CpuId)| job.clone().on_cpus([cpu.0].into_iter().collect::<CpuSet>());
        let workload = Workload {
            machine: self.machine.clone(),
            options: self.options.clone(),
            jobs: jobs.iter().map(pinned).collect(),
            warm_up_cycles: self.warm_up_cycles,
            measured_cycles: self.measured_cycles,
        };
        let name = format!("{workload:?}");
        let runs = || RUNS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = runs().get(&name) {
            return Ok(found.clone());
        }
        let found = rates(&workload.unmanaged()?, &self.machine)?;
        runs().insert(name, found.clone());
        Ok(found)
    }

    /// On the first core of the first last-level cache.
    ///
    /// # Errors
    /// As [`Bench::run`].
    pub fn alone(&self, job: &Job) -> Result<Rates, ReproError> {
        Ok(self.run(&[(job.clone(), self.pair_of_cpus()?[0])])?[0])
    }

    /// Two cores of one last-level cache.
    fn pair_of_cpus(&self) -> Result<[CpuId; 2], ReproError> {
        let caches = caches(&self.machine.topology())?;
        let found = caches.iter().find(|cpus| cpus.len() >= 2).map(|cpus| [cpus[0], cpus[1]]);
        found.ok_or_else(|| failed(&self.machine.name)("no last-level cache that two cores share"))
    }
}

/// CPUs by last-level cache, one of every core.
///
/// # Errors
/// A machine without any.
pub fn caches(topology: &Topology) -> Result<Vec<Vec<CpuId>>, ReproError> {
    let seats = placement::seats(topology, 1).map_err(failed("machine"))?;
    Ok(seats.into_iter().map(|cache| cache.cpus).collect())
}

/// Programs alone and in pairs.
#[derive(Clone, PartialEq, Debug)]
pub struct Matrix {
    pub names: Vec<String>,
    pub alone: Vec<Rates>,
    /// `beside[i][j]`: program i beside program j.
    pub beside: Vec<Vec<Rates>>,
}

impl Matrix {
    /// Measures what is not yet known: n programs take n + n (n + 1) / 2 runs. Without `copies`, nobody is measured
    /// beside a copy of itself, and the diagonal holds the rates alone.
    ///
    /// # Errors
    /// As [`Bench::run`], or the interruption.
    pub fn measure(context: &Context<'_>, bench: &Bench, programs: &[Job], copies: bool) -> Result<Self, ReproError> {
        let cpus = bench.pair_of_cpus()?;
        let count = programs.len();
        let mut asked: Vec<(usize, Option<usize>)> = (0..count).map(|i| (i, None)).collect();
        let from = |i: usize| if copies { i } else { i + 1 };
        asked.extend((0..count).flat_map(|i| (from(i)..count).map(move |j| (i, Some(j)))));
        let found = context.run_all(&asked, |&(i, other)| {
            let Some(j) = other else { return Ok(vec![bench.alone(&programs[i])?]) };
            let mut second = programs[j].clone();
            // A copy's input is its own.
            second.seed += if i == j { 1_000_003 } else { 0 };
            bench.run(&[(programs[i].clone(), cpus[0]), (second, cpus[1])])
        })?;
        let alone: Vec<Rates> = found[..count].iter().map(|rates| rates[0]).collect();
        let mut beside: Vec<Vec<Rates>> = alone.iter().map(|&rates| vec![rates; count]).collect();
        for (&(i, other), rates) in asked.iter().zip(&found) {
            let Some(j) = other else { continue };
            beside[i][j] = rates[0];
            if i != j {
                beside[j][i] = rates[1];
            }
        }
        Ok(Matrix { names: programs.iter().map(|job| job.name.clone()).collect(), alone, beside })
    }

    /// Run time beside over run time alone, minus one.
    pub fn degradation(&self, program: usize, other: usize) -> f64 {
        self.alone[program].instr_per_cycle / self.beside[program][other].instr_per_cycle - 1.0
    }

    /// As the solvers take it.
    pub fn costs(&self) -> PairCosts {
        let all = 0..self.names.len();
        let row = |i: usize| all.clone().map(|j| self.degradation(i, j)).collect();
        PairCosts { kind: CostKind::Degradation, cost: all.clone().map(row).collect() }
    }

    /// Of just these programs.
    pub fn costs_of(&self, programs: &[usize]) -> PairCosts {
        let row = |&i: &usize| programs.iter().map(|&j| self.degradation(i, j)).collect();
        PairCosts { kind: CostKind::Degradation, cost: programs.iter().map(row).collect() }
    }
}

/// Mean of matrices of the same programs, one per seed.
pub fn mean_costs(matrices: &[Matrix]) -> Vec<Vec<f64>> {
    let costs: Vec<PairCosts> = matrices.iter().map(Matrix::costs).collect();
    let programs = costs.first().map_or(0, PairCosts::len);
    let mean = |i: usize, j: usize| costs.iter().map(|costs| costs.cost[i][j]).sum::<f64>() / costs.len() as f64;
    (0..programs).map(|i| (0..programs).map(|j| mean(i, j)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Do two programs that stream hurt each other, a quiet one neither, and does asking again give the same?
    #[test]
    fn heavy_programs_hurt_each_other_and_quiet_ones_do_not() {
        let stop = AtomicBool::new(false);
        let context = Context { quick: true, seeds: vec![1], stop: &stop, progress: &|_| () };
        let bench = Bench::on("xeon-x5365-4", 1, 500_000, 1_000_000).unwrap();
        let programs = ["milc", "lbm", "gamess"].map(|name| Job::new(name, 1));
        let matrix = Matrix::measure(&context, &bench, &programs, true).unwrap();
        // Short runs see the bus, not the caches, which take longer to fill.
        assert!(matrix.degradation(0, 1) > 0.02 && matrix.degradation(1, 0) > 0.01, "{matrix:?}");
        assert!(matrix.degradation(0, 1) > 2.0 * matrix.degradation(0, 2), "{matrix:?}");
        assert!(matrix.degradation(2, 2).abs() < 0.02, "{matrix:?}");
        assert_eq!(matrix, Matrix::measure(&context, &bench, &programs, true).unwrap());
        assert_eq!(matrix.costs().cost[1][0], matrix.degradation(1, 0));
    }

    /// Is a machine without a shared cache refused by name?
    #[test]
    fn a_machine_without_a_shared_cache_is_refused() {
        let mut bench = Bench::on("xeon-x5365-4", 1, 0, 1_000).unwrap();
        bench.machine.caches.iter_mut().for_each(|cache| cache.shared_by_cores = 1);
        assert!(bench.alone(&Job::new("mcf", 1)).unwrap_err().to_string().contains("share"));
    }
}
