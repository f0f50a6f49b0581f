//! Measures slowdowns: every program alone, and every pair on one shared cache (CA 2.1.2).
//!
//! Speeds are over equal work ([`crate::solo_work`]), and each run is made only once ([`crate::store`]). A pair is
//! pinned to two cores of the first last-level cache; a program is paired with itself as two copies with different
//! inputs.

use cachemate_core::{CpuId, CpuSet, MachineSpec, Topology};
use cachemate_papers::matrix::{CostKind, PairCosts};
use cachemate_papers::placement;
use cachemate_sim::machine::SimOptions;

pub use crate::rates::ProgramRates;
use crate::run_request;
use crate::setup::{Workload, WorkloadJob, failed};
use crate::work::{self, InstructionRange};
use crate::{ExperimentContext, Result};

/// A machine on which programs are measured, with the lengths of the runs.
#[derive(Clone, Debug)]
pub struct CoRunBench {
    /// The machine, with all its caches and CPUs even if a run uses only some.
    pub machine: MachineSpec,
    /// Seed, scale and scheduler of every run.
    pub options: SimOptions,
    /// Cycles before the measurement starts; may be 0.
    pub warm_up_cycles: u64,
    /// Measured cycles. The instructions that a program executes in them when it runs alone are its work.
    pub measured_cycles: u64,
}

impl CoRunBench {
    /// `machine` is the name of a bundled one.
    pub fn load(
        machine: &str,
        seed: u64,
        warm_up_cycles: u64,
        measured_cycles: u64,
    ) -> Result<Self> {
        let Workload {
            machine,
            mut options,
            ..
        } = Workload::from_machine_name(machine, Vec::new(), seed)?;

        // Programs start resident, as if they had run for minutes. In runs of milliseconds, first touches would
        // otherwise take up to half of the solo time, and hide the cost of a co-runner.
        options.is_resident = true;
        Ok(CoRunBench {
            machine,
            options,
            warm_up_cycles,
            measured_cycles,
        })
    }

    /// On the bench's machine, over its warm-up and its measured cycles.
    pub fn build_workload(&self, options: SimOptions, jobs: Vec<WorkloadJob>) -> Workload {
        let (warm_up_cycles, measured_cycles) = (self.warm_up_cycles, self.measured_cycles);
        Workload {
            machine: self.machine.clone(),
            options,
            jobs,
            warm_up_cycles,
            measured_cycles,
        }
    }

    /// Runs the jobs together, each on its CPU, over the work that each does [alone](CoRunBench::solo_rates).
    pub fn run(&self, jobs: &[(WorkloadJob, CpuId)]) -> Result<Vec<ProgramRates>> {
        self.run_with_options(self.options.clone(), jobs)
    }

    /// Runs jobs as [`CoRunBench::run`] does, but under other options; the work is still that under the bench's
    /// options.
    pub fn run_with_options(
        &self,
        options: SimOptions,
        jobs: &[(WorkloadJob, CpuId)],
    ) -> Result<Vec<ProgramRates>> {
        let rates = self.run_until_stopped(options, jobs)?;
        match jobs.iter().zip(&rates).find(|(_, rates)| !rates.finished) {
            None => Ok(rates),
            Some(((job, _), _)) => Err(failed(&job.name)(format!(
                "it did not finish its work in {} times the time it took alone",
                work::MAX_SOLO_TIME_MULTIPLE
            ))),
        }
    }

    fn run_until_stopped(
        &self,
        options: SimOptions,
        jobs: &[(WorkloadJob, CpuId)],
    ) -> Result<Vec<ProgramRates>> {
        let all_jobs: Vec<WorkloadJob> = jobs.iter().map(|(job, _)| job.clone()).collect();
        let work = self.solo_work(&all_jobs)?;
        let workload = self.build_workload(options, jobs.iter().map(pin_job).collect());
        Ok(run_request::joint_run(&workload, &work, None)?.rates)
    }

    /// Runs a job alone on the first core of the first last-level cache.
    pub fn solo_rates(&self, job: &WorkloadJob) -> Result<ProgramRates> {
        Ok(self.measure_solo_work(job)?.1)
    }

    /// The instructions that each program executes in the measured cycles when it runs alone.
    pub fn solo_work(&self, jobs: &[WorkloadJob]) -> Result<Vec<InstructionRange>> {
        jobs.iter()
            .map(|job| Ok(self.measure_solo_work(job)?.0))
            .collect()
    }

    fn measure_solo_work(&self, job: &WorkloadJob) -> Result<(InstructionRange, ProgramRates)> {
        run_request::solo_run(&self.build_workload(
            self.options.clone(),
            vec![pin_job(&(job.clone(), self.pick_cpu_pair()?[0]))],
        ))
    }

    /// Two CPUs on different cores of one last-level cache.
    fn pick_cpu_pair(&self) -> Result<[CpuId; 2]> {
        let caches = cpus_by_cache(&self.machine.topology())?;
        let pair = caches
            .iter()
            .find(|cpus| cpus.len() >= 2)
            .map(|cpus| [cpus[0], cpus[1]]);
        pair.ok_or_else(|| failed(&self.machine.name)("no last-level cache that two cores share"))
    }
}

fn pin_job((job, cpu): &(WorkloadJob, CpuId)) -> WorkloadJob {
    job.clone()
        .with_cpus([cpu.0].into_iter().collect::<CpuSet>())
}

/// One CPU per core, by last-level cache.
pub fn cpus_by_cache(topology: &Topology) -> Result<Vec<Vec<CpuId>>> {
    let seats_by_cache = placement::cache_seats(topology, 1).map_err(failed("machine"))?;
    Ok(seats_by_cache.into_iter().map(|cache| cache.cpus).collect())
}

/// Rates of programs alone and in pairs.
#[derive(Clone, PartialEq, Debug)]
pub struct CoRunMatrix {
    /// Names of the programs, in the given order.
    pub names: Vec<String>,
    /// Solo rates on the first core of the first last-level cache, in the order of `names`.
    pub solo_rates: Vec<ProgramRates>,
    /// `pair_rates[i][j]`: rates of program i beside program j.
    pub pair_rates: Vec<Vec<ProgramRates>>,
}

impl CoRunMatrix {
    /// Measures the missing runs; n programs take n + n (n + 1) / 2 runs. Unless `with_copies` is set, no program is
    /// measured beside a copy of itself, and the diagonal contains the solo rates.
    pub fn measure(
        context: &ExperimentContext<'_>,
        bench: &CoRunBench,
        programs: &[WorkloadJob],
        with_copies: bool,
    ) -> Result<Self> {
        let cpus = bench.pick_cpu_pair()?;
        let count = programs.len();
        // Solo runs come first, because they define the work of the pairs.
        context.run_all(programs, |job| bench.solo_rates(job))?;
        let mut requests: Vec<(usize, Option<usize>)> = (0..count).map(|i| (i, None)).collect();
        let first_partner_of = |i: usize| if with_copies { i } else { i + 1 };
        requests.extend(
            (0..count).flat_map(|i| (first_partner_of(i)..count).map(move |j| (i, Some(j)))),
        );
        let runs = context.run_all(&requests, |&(i, partner)| {
            let Some(j) = partner else {
                return Ok(vec![bench.solo_rates(&programs[i])?]);
            };
            let mut second_job = programs[j].clone();
            // The copy gets a different input.
            second_job.seed += if i == j { 1_000_003 } else { 0 };
            bench.run_until_stopped(
                bench.options.clone(),
                &[(programs[i].clone(), cpus[0]), (second_job, cpus[1])],
            )
        })?;
        let solo_rates: Vec<ProgramRates> = runs[..count].iter().map(|rates| rates[0]).collect();
        let mut pair_rates: Vec<Vec<ProgramRates>> =
            solo_rates.iter().map(|&rates| vec![rates; count]).collect();
        for (&(i, partner), rates) in requests.iter().zip(&runs) {
            let Some(j) = partner else { continue };
            pair_rates[i][j] = rates[0];
            if i != j {
                pair_rates[j][i] = rates[1];
            }
        }
        Ok(CoRunMatrix {
            names: programs.iter().map(|job| job.name.clone()).collect(),
            solo_rates,
            pair_rates,
        })
    }

    /// The run time beside the other program divided by solo run time, minus one.
    pub fn slowdown_beside(&self, program: usize, co_runner: usize) -> f64 {
        self.solo_rates[program].instr_per_cycle
            / self.pair_rates[program][co_runner].instr_per_cycle
            - 1.0
    }

    /// Costs in the form that solvers take.
    pub fn costs(&self) -> PairCosts {
        let indices = 0..self.names.len();
        let row = |i: usize| {
            indices
                .clone()
                .map(|j| self.slowdown_beside(i, j))
                .collect()
        };
        PairCosts {
            kind: CostKind::Degradation,
            cost: indices.clone().map(row).collect(),
        }
    }

    /// Rows and columns follow `programs`, which are indexes.
    pub fn pair_costs(&self, programs: &[usize]) -> PairCosts {
        let row = |&i: &usize| {
            programs
                .iter()
                .map(|&j| self.slowdown_beside(i, j))
                .collect()
        };
        PairCosts {
            kind: CostKind::Degradation,
            cost: programs.iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::quick_context;
    /// Do two streaming programs slow each other down, quiet ones not, and does a repeated query give the same result?
    #[test]
    fn streaming_programs_slow_each_other_and_quiet_ones_do_not() {
        let context = quick_context();
        let bench = CoRunBench::load("xeon-x5365-4", 1, 4_000_000, 4_000_000).unwrap();
        let programs = ["milc", "lbm", "gamess"].map(|name| WorkloadJob::new(name, 1));
        let matrix = CoRunMatrix::measure(&context, &bench, &programs, true).unwrap();
        // Short runs show contention for the bus, but not for the caches, which take longer to fill.
        assert!(
            matrix.slowdown_beside(0, 1) > 0.02 && matrix.slowdown_beside(1, 0) > 0.01,
            "{matrix:?}"
        );
        assert!(
            matrix.slowdown_beside(0, 1) > 2.0 * matrix.slowdown_beside(0, 2),
            "{matrix:?}"
        );
        assert!(matrix.slowdown_beside(2, 2).abs() < 0.02, "{matrix:?}");
        assert_eq!(
            matrix,
            CoRunMatrix::measure(&context, &bench, &programs, true).unwrap()
        );
        assert_eq!(matrix.costs().cost[1][0], matrix.slowdown_beside(1, 0));
    }

    /// Is a machine without a shared cache refused by name?
    #[test]
    fn a_machine_without_a_shared_cache_is_refused() {
        let mut bench = CoRunBench::load("xeon-x5365-4", 1, 0, 1_000).unwrap();
        bench
            .machine
            .caches
            .iter_mut()
            .for_each(|cache| cache.shared_by_cores = 1);
        assert!(
            bench
                .solo_rates(&WorkloadJob::new("mcf", 1))
                .unwrap_err()
                .to_string()
                .contains("share")
        );
    }
}
