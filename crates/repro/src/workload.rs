//! A simulated machine with programs and a length: everything that defines a run without a policy.
//!
//! A [`Workload`] is complete and exact: the same workload gives the same bits. Runs warm up first; results cover only
//! the measured span.

use std::path::PathBuf;

use cachemate_core::{Access, AccessSource, BatchEnd, CpuSet, Goal, MachineSpec};
use cachemate_sim::kernels;
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};
use serde::{Deserialize, Serialize};

use crate::error::{Result, failed};
use crate::{recordings, store};

/// One program of a workload, as a separate process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WorkloadJob {
    /// Name in results, unique if results are looked up by it.
    pub name: String,
    /// Name in `cachemate_sim::kernels`.
    pub kernel: String,
    /// Footprint, threads and groups; for kernels only.
    pub options: kernels::Options,
    /// Input and layout of this copy.
    pub seed: u64,
    /// The goal that its owner sets; `None` for no goal.
    pub goal: Option<Goal>,
    /// CPUs to which it is pinned, whatever a policy or the machine's scheduler decides.
    pub pinned: Option<CpuSet>,
    /// Number of instructions after which every thread ends; `None` if never (our kernels are endless).
    pub instructions: Option<u64>,
    /// Instructions that every thread has already executed when the run begins, so that programs are in progress and
    /// copies are not in step. For programs whose threads do not wait for each other.
    pub under_way_instructions: u64,
    /// A recorded program, whose first thread runs in a loop instead of a kernel; the seed determines where in the loop
    /// it begins.
    pub recording: Option<PathBuf>,
}

/// A program that ends.
struct LimitedSource {
    source: Box<dyn AccessSource>,
    remaining_instr: u64,
}

impl AccessSource for LimitedSource {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        let first_new_index = batch.len();
        let batch_end = self.source.next_batch(batch);
        for index in first_new_index..batch.len() {
            let instructions = batch[index].instructions();
            if instructions >= self.remaining_instr {
                batch.truncate(index + 1);
                self.remaining_instr = 0;
                return BatchEnd::Exit;
            }
            self.remaining_instr -= instructions;
        }
        batch_end
    }
    fn progress(&self) -> Option<f64> {
        self.source.progress()
    }
}

fn limit_source(source: Box<dyn AccessSource>, remaining_instr: u64) -> Box<dyn AccessSource> {
    Box::new(LimitedSource {
        source,
        remaining_instr,
    })
}

/// Advances the source by this many instructions, or to where it first waits for something.
fn advance_source(mut source: Box<dyn AccessSource>, instructions: u64) -> Box<dyn AccessSource> {
    let (mut executed_instr, mut batch) = (0, Vec::new());
    while executed_instr < instructions {
        batch.clear();
        if source.next_batch(&mut batch) != BatchEnd::More || batch.is_empty() {
            break;
        }
        executed_instr += batch
            .iter()
            .map(|access| access.instructions())
            .sum::<u64>();
    }
    source
}

impl WorkloadJob {
    /// Builds a kernel with its options from the table of programs.
    pub fn new(kernel: &str, seed: u64) -> Self {
        let options = kernels::Options::default();
        WorkloadJob {
            name: kernel.to_string(),
            kernel: kernel.to_string(),
            options,
            seed,
            goal: None,
            pinned: None,
            instructions: None,
            under_way_instructions: 0,
            recording: None,
        }
    }

    /// A program that replays a recording instead of running an algorithm.
    pub fn from_recording(name: &str, path: PathBuf, seed: u64) -> Self {
        WorkloadJob {
            recording: Some(path),
            ..WorkloadJob::new(name, seed)
        }
    }

    /// `count` copies with different seeds, named `kernel-0`, `kernel-1`, ...
    pub fn copies(kernel: &str, count: u64, seed: u64) -> Vec<Self> {
        (0..count)
            .map(|index| WorkloadJob {
                name: format!("{kernel}-{index}"),
                ..WorkloadJob::new(kernel, seed * 1_000 + index)
            })
            .collect()
    }

    /// No policy may move it.
    #[must_use]
    pub fn with_cpus(self, cpus: CpuSet) -> Self {
        WorkloadJob {
            pinned: Some(cpus),
            ..self
        }
    }

    /// The job's threads at their start, for the n-th run of the program.
    pub fn start_threads(&self, run_number: u32) -> Result<Vec<Box<dyn AccessSource>>> {
        let seed = self.seed + (u64::from(run_number) << 32);
        let sources: Vec<Box<dyn AccessSource>> = match &self.recording {
            None => {
                let program = kernels::build_program(&self.kernel, seed, &self.options)
                    .map_err(failed(&self.name))?;
                program.threads
            }
            Some(path) => vec![recordings::open_source(&self.name, path, seed)?],
        };

        let advance_to_start = |source| advance_source(source, self.under_way_instructions);
        let sources: Vec<Box<dyn AccessSource>> =
            sources.into_iter().map(advance_to_start).collect();
        Ok(match self.instructions {
            None => sources,
            Some(remaining) => sources
                .into_iter()
                .map(|source| limit_source(source, remaining))
                .collect(),
        })
    }

    /// Converts the job to a program of the machine.
    pub fn program(&self) -> Result<SimProgram> {
        // Built once to detect errors now; the maker builds it again for every further run of the program.
        let mut first_threads = Some(self.start_threads(0)?);
        let job = self.clone();
        let make_threads = move |run: u32| match first_threads.take() {
            Some(threads) if run == 0 => threads,
            _ => job
                .start_threads(run)
                .expect("built with these options before"),
        };
        let mut program = SimProgram::new(self.name.clone(), Box::new(make_threads));
        program.goal = self.goal;
        program.pinned_cpus = self.pinned.clone();
        Ok(program)
    }
}

/// A machine, its programs, and the length of the run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Workload {
    /// The machine on which it runs.
    pub machine: MachineSpec,
    /// Seed, scale and scheduler. [`Workload::build_machine`] replaces its lengths.
    pub options: SimOptions,
    /// Jobs in the order in which they arrive.
    pub jobs: Vec<WorkloadJob>,
    /// Length of the warm-up, which is not measured.
    pub warm_up_cycles: u64,
    /// Length of the measured part, after the warm-up.
    pub measured_cycles: u64,
}

/// A machine by name or file; overrides are allowed, as in `niagara-2core?l2.size_bytes=98304`.
pub(crate) fn load_machine(name: &str) -> Result<MachineSpec> {
    cachemate_spec::load_machine(name).map_err(failed(name))
}

impl Workload {
    /// Builds a workload on a machine by name (overrides allowed, as in `niagara-2core?l2.size_bytes=98304`).
    pub fn from_machine_name(machine: &str, jobs: Vec<WorkloadJob>, seed: u64) -> Result<Self> {
        let spec = load_machine(machine)?;
        let options = SimOptions {
            seed,
            ..SimOptions::default()
        };
        Ok(Workload {
            machine: spec,
            options,
            jobs,
            warm_up_cycles: 0,
            measured_cycles: 0,
        })
    }

    /// In cycles, in place of the present lengths.
    #[must_use]
    pub fn with_length(mut self, warm_up_cycles: u64, measured_cycles: u64) -> Self {
        (self.warm_up_cycles, self.measured_cycles) = (warm_up_cycles, measured_cycles);
        self
    }

    /// Before its first window.
    pub fn build_machine(&self) -> Result<SimMachine> {
        let warm_up_limit =
            (self.warm_up_cycles > 0).then_some(RunLimit::Cycles(self.warm_up_cycles));
        let run_limit = Some(RunLimit::Cycles(self.measured_cycles));
        self.build_machine_with(SimOptions {
            warm_up: warm_up_limit,
            ends: run_limit,
            ..self.options.clone()
        })
    }

    /// Creates the machine with the lengths in `options`, for equal work instead of equal time.
    pub fn build_machine_with(&self, options: SimOptions) -> Result<SimMachine> {
        store::allow_simulation()?;
        let programs = self
            .jobs
            .iter()
            .map(WorkloadJob::program)
            .collect::<Result<Vec<_>, _>>()?;
        SimMachine::new(&self.machine, &options, programs).map_err(failed("machine"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a job with a limit run exactly this many instructions, and is it over then?
    #[test]
    fn a_job_with_a_limit_runs_exactly_this_many_instructions() {
        let mut job = WorkloadJob::new("mcf", 1);
        job.instructions = Some(100_000);
        let workload = Workload::from_machine_name("xeon-x5365-4", vec![job], 1)
            .unwrap()
            .with_length(0, 1_000_000_000);
        let results = workload.unmanaged_run().unwrap();
        assert!(results.tasks[0].exited);
        let deviation = results.tasks[0].instructions.abs_diff(100_000);
        assert!(
            deviation < 100,
            "{} instructions",
            results.tasks[0].instructions
        );
    }

    /// Does a job in progress continue at the program's position after that many instructions?
    #[test]
    fn a_job_in_progress_continues_at_the_programs_position() {
        let stream_of = |under_way_instructions: u64| {
            let job = WorkloadJob {
                under_way_instructions,
                ..WorkloadJob::new("art", 1)
            };
            let (mut source, mut batch) = (job.start_threads(0).unwrap().remove(0), Vec::new());
            (0..40).for_each(|_| assert_eq!(source.next_batch(&mut batch), BatchEnd::More));
            batch
        };
        let (from_start, later) = (stream_of(0), stream_of(5_000));

        let mut passed_instr = 0;
        let of_start = |access: &Access| {
            passed_instr += access.instructions();
            passed_instr
        };
        let passed: Vec<u64> = from_start.iter().map(of_start).collect();
        let skipped = (0..from_start.len())
            .find(|&at| from_start[at..].starts_with(&later[..100]))
            .unwrap();
        let instructions = passed[skipped - 1];
        assert!((5_000..20_000).contains(&instructions), "{instructions}");
    }

    /// Is an unknown kernel an error with its name?
    #[test]
    fn an_unknown_kernel_is_named() {
        let workload =
            Workload::from_machine_name("xeon-x5365-4", vec![WorkloadJob::new("mfc", 1)], 1)
                .unwrap();
        let error = workload.build_machine().err().unwrap().to_string();
        assert!(
            error.contains("'mfc'") && error.contains("did you mean 'mcf'"),
            "{error}"
        );
    }
}
