//! The setup of every experiment: a simulated machine, programs on it, a policy above it, and the results.
//!
//! A [`Workload`] is complete and exact: the same workload gives the same bits. Runs warm up first; what is reported
//! covers the measured span only. Managed runs go through `core::ControlLoop`, so a policy sees observations and nothing
//! else; results come from the simulator's own books, which no policy sees.

use std::path::PathBuf;

use cachemate_core::{
    Access, AccessSource, BatchEnd, ControlLoopError, CpuSet, Goal, MachineSpec, PipelineConfig, PolicyConfig,
    ProfilerConfig, WindowLength, WindowRecord,
};
use cachemate_pipeline::{Pipeline, miss_penalty_of_machine};
use cachemate_sim::kernels;
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};
use cachemate_sim::metrics;
use cachemate_sim::results::{RunResults, TaskResults};
use cachemate_sim::run::run_alone;
use cachemate_trace::{CmtReader, CmtSource, TraceReader};
use serde::{Deserialize, Serialize};

use crate::ReproError;
use crate::rates::ProgramRates;

/// One program of a workload: a process of its own.
#[derive(Clone, Debug)]
pub struct WorkloadJob {
    /// Shown, and unique where results are looked up by it.
    pub name: String,
    /// In `cachemate_sim::kernels`.
    pub kernel: String,
    /// Footprint, threads and groups; for kernels only.
    pub options: kernels::Options,
    /// Input and layout of this copy.
    pub seed: u64,
    /// The goal that its owner sets; `None` = no goal.
    pub goal: Option<Goal>,
    /// Fixed there, whatever a policy or the machine's scheduler says.
    pub pinned: Option<CpuSet>,
    /// Every thread ends after so many instructions; `None` = it never does (our kernels are endless).
    pub instructions: Option<u64>,
    /// Every thread has run so many instructions when the run begins: programs are under way, and copies of one are not in
    /// step. For programs whose threads do not wait for each other.
    pub under_way_instructions: u64,
    /// A recorded program's first thread, in a loop, instead of a kernel; the seed says where in the loop it begins.
    pub recording: Option<PathBuf>,
}

/// A program that ends.
struct LimitedSource {
    source: Box<dyn AccessSource>,
    left: u64,
}

impl AccessSource for LimitedSource {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        let begin = batch.len();
        let turn = self.source.next_batch(batch);
        for index in begin..batch.len() {
            let instructions = batch[index].instructions();
            if instructions >= self.left {
                batch.truncate(index + 1);
                self.left = 0;
                return BatchEnd::Exit;
            }
            self.left -= instructions;
        }
        turn
    }
    fn progress(&self) -> Option<f64> {
        self.source.progress()
    }
}

fn ending(source: Box<dyn AccessSource>, left: u64) -> Box<dyn AccessSource> {
    Box::new(LimitedSource { source, left })
}

/// The source after so many instructions, or where it first waited for something.
fn under_way(mut source: Box<dyn AccessSource>, instructions: u64) -> Box<dyn AccessSource> {
    let (mut past, mut batch) = (0, Vec::new());
    while past < instructions {
        batch.clear();
        if source.next_batch(&mut batch) != BatchEnd::More || batch.is_empty() {
            break;
        }
        past += batch.iter().map(|access| access.instructions()).sum::<u64>();
    }
    source
}

impl WorkloadJob {
    /// A kernel as it is in the table of programs.
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

    /// A recorded program.
    pub fn recorded(name: &str, path: PathBuf, seed: u64) -> Self {
        WorkloadJob { recording: Some(path), ..WorkloadJob::new(name, seed) }
    }

    /// `count` copies with seeds of their own, named `kernel-0`, `kernel-1`, ...
    pub fn copies(kernel: &str, count: u64, seed: u64) -> Vec<Self> {
        (0..count)
            .map(|index| WorkloadJob {
                name: format!("{kernel}-{index}"),
                ..WorkloadJob::new(kernel, seed * 1_000 + index)
            })
            .collect()
    }

    /// Fixed to these CPUs.
    #[must_use]
    pub fn on_cpus(self, cpus: CpuSet) -> Self {
        WorkloadJob { pinned: Some(cpus), ..self }
    }

    /// Its threads, at their start, for the n-th run of the program.
    ///
    /// # Errors
    /// An unknown kernel, an option that it does not take, a recording that cannot be read.
    pub fn threads(&self, run: u32) -> Result<Vec<Box<dyn AccessSource>>, ReproError> {
        let seed = self.seed + (u64::from(run) << 32);
        let sources: Vec<Box<dyn AccessSource>> = match &self.recording {
            None => {
                let program = kernels::build(&self.kernel, seed, &self.options).map_err(failed(&self.name))?;
                program.threads
            }
            Some(path) => {
                let what = failed(&self.name);
                let mut first = Vec::new();
                CmtReader::open(path).map_err(&what)?.read_batch(&mut first).map_err(&what)?;
                let thread = first.first().map_or(0, |record| record.thread);
                let source = CmtSource::open(path, thread, 0, 0).map_err(&what)?;
                let skip = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % source.records_per_round().max(1);
                vec![Box::new(CmtSource::open(path, thread, 0, skip).map_err(&what)?)]
            }
        };
        let begun = |source| under_way(source, self.under_way_instructions);
        let sources: Vec<Box<dyn AccessSource>> = sources.into_iter().map(begun).collect();
        Ok(match self.instructions {
            None => sources,
            Some(left) => sources.into_iter().map(|source| ending(source, left)).collect(),
        })
    }

    /// As the machine takes it.
    ///
    /// # Errors
    /// As [`WorkloadJob::threads`].
    pub fn program(&self) -> Result<SimProgram, ReproError> {
        // Built once to have errors now; the maker builds it anew for every further run of the program.
        let mut first = Some(self.threads(0)?);
        let job = self.clone();
        let maker = move |run: u32| match first.take() {
            Some(threads) if run == 0 => threads,
            _ => job.threads(run).expect("built with these options before"),
        };
        let mut program = SimProgram::new(self.name.clone(), Box::new(maker));
        program.goal = self.goal;
        program.pinned = self.pinned.clone();
        Ok(program)
    }
}

/// A machine, programs, and for how long.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The machine on which it runs.
    pub machine: MachineSpec,
    /// Seed, scale and scheduler. [`Workload::simulated`] replaces its lengths.
    pub options: SimOptions,
    /// In the order in which they arrive.
    pub jobs: Vec<WorkloadJob>,
    /// Not measured.
    pub warm_up_cycles: u64,
    /// Length of the measured part, after the warm-up.
    pub measured_cycles: u64,
}

/// The results of a managed run, and every record of the loop, including the warm-up.
pub struct ManagedRun {
    /// Results of the measured part.
    pub results: RunResults,
    /// One for each window.
    pub records: Vec<WindowRecord>,
}

impl Workload {
    /// On a machine by name (overrides allowed, as in `niagara-2core?l2.size_bytes=98304`).
    ///
    /// # Errors
    /// There is no such machine.
    pub fn on(machine: &str, jobs: Vec<WorkloadJob>, seed: u64) -> Result<Self, ReproError> {
        let spec = cachemate_spec::load_machine(machine)
            .map_err(|error| ReproError::Failed(machine.to_string(), error.to_string()))?;
        let options = SimOptions { seed, ..SimOptions::default() };
        Ok(Workload { machine: spec, options, jobs, warm_up_cycles: 0, measured_cycles: 0 })
    }

    /// The same workload with this length.
    #[must_use]
    pub fn lasting(mut self, warm_up_cycles: u64, measured_cycles: u64) -> Self {
        (self.warm_up_cycles, self.measured_cycles) = (warm_up_cycles, measured_cycles);
        self
    }

    /// The machine at its start.
    ///
    /// # Errors
    /// A program or machine that cannot be.
    pub fn simulated(&self) -> Result<SimMachine, ReproError> {
        let warm_up = (self.warm_up_cycles > 0).then_some(RunLimit::Cycles(self.warm_up_cycles));
        let ends = Some(RunLimit::Cycles(self.measured_cycles));
        self.simulated_with(SimOptions { warm_up, ends, ..self.options.clone() })
    }

    /// The machine at its start with lengths of its own: the same work instead of the same time.
    ///
    /// # Errors
    /// As [`Workload::simulated`].
    pub fn simulated_with(&self, options: SimOptions) -> Result<SimMachine, ReproError> {
        let programs = self.jobs.iter().map(WorkloadJob::program).collect::<Result<Vec<_>, _>>()?;
        SimMachine::new(&self.machine, &options, programs).map_err(failed("machine"))
    }

    /// Under the machine's own scheduler alone.
    ///
    /// # Errors
    /// As [`Workload::simulated`], and the machine's own.
    pub fn unmanaged(&self) -> Result<RunResults, ReproError> {
        run_alone(&mut self.simulated()?).map_err(failed("unmanaged run"))
    }

    /// One job alone on the same machine, for as long.
    ///
    /// # Errors
    /// As [`Workload::unmanaged`].
    pub fn solo(&self, job: usize) -> Result<RunResults, ReproError> {
        Workload { jobs: vec![self.jobs[job].clone()], ..self.clone() }.unmanaged()
    }

    /// Under a policy, from the start of the warm-up on.
    ///
    /// # Errors
    /// As [`Workload::simulated`], and whatever the loop refuses.
    pub fn managed(&self, by: Pipeline) -> Result<ManagedRun, ReproError> {
        let what = by.config().policy.name.clone();
        let mut records = Vec::new();
        let each = |_: &mut SimMachine, record| {
            records.push(record);
            true
        };
        let results = run_under(self.simulated()?, by, each).map_err(failed(&what))?;
        Ok(ManagedRun { results, records })
    }

    /// A pipeline around a policy of the registry, as experiments have it: these profilers, no guard, and a miss that
    /// costs memory's latency beyond a hit of the last level.
    pub fn pipeline(
        &self,
        name: &str,
        parameters: &str,
        profilers: Vec<ProfilerConfig>,
        first_window: WindowLength,
    ) -> PipelineConfig {
        let seed = self.options.seed;
        PipelineConfig {
            policy: PolicyConfig { name: name.to_string(), parameters: parameters.to_string(), seed },
            guard: None,
            profilers,
            predictor: miss_penalty_of_machine(&self.machine),
            first_window,
        }
    }
}

/// Everything that a configuration names.
///
/// # Errors
/// An unknown policy, or parameters that it does not take.
pub fn built(config: PipelineConfig) -> Result<Pipeline, ReproError> {
    let name = config.policy.name.clone();
    Pipeline::build(config).map_err(failed(&name))
}

/// Runs a simulated machine under a pipeline to its end, or until `each` says `false`.
///
/// # Errors
/// As the loop.
pub fn run_under(
    mut machine: SimMachine,
    by: Pipeline,
    each: impl FnMut(&mut SimMachine, WindowRecord) -> bool,
) -> Result<RunResults, ControlLoopError> {
    machine.set_first_window(by.config().first_window);
    Ok(by.run(machine, each)?.results())
}

/// An error of any kind as the experiment's.
pub fn failed<E: std::fmt::Display>(what: &str) -> impl Fn(E) -> ReproError {
    let what = what.to_string();
    move |error| ReproError::Failed(what.clone(), error.to_string())
}

/// How one run compares with another of the same jobs, per instruction, per time and per fairness.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// Instructions per elapsed cycle, over the baseline's, minus one.
    pub throughput_gain: f64,
    /// The part of it that other shares of time at the baseline's speeds would have brought ("mix").
    pub mix_gain: f64,
    /// The part that other speeds at the new shares bring ("contention").
    pub contention_gain: f64,
    /// CPUs with a task on them: new over baseline, minus one.
    pub busy_gain: f64,
}

impl Comparison {
    /// Splits the gain exactly: (1 + throughput) = (1 + mix)(1 + contention), with mix the change of
    /// Σ share·speed from new shares at old speeds. Shares are of elapsed time on processor, speeds are instructions
    /// per cycle on processor; idle time shows in the shares and in `busy_gain`. `None` where a task never ran in
    /// either run, so that it has no speed.
    pub fn of(new: &RunResults, baseline: &RunResults) -> Option<Self> {
        let mut at_old_speeds = 0.0;
        for (now, before) in new.tasks.iter().zip(&baseline.tasks) {
            at_old_speeds += now.run_time_share * speed(before)?;
        }
        let (now, before) = (new.instructions_per_cycle(), baseline.instructions_per_cycle());
        Some(Comparison {
            throughput_gain: now / before - 1.0,
            mix_gain: at_old_speeds / before - 1.0,
            contention_gain: now / at_old_speeds - 1.0,
            busy_gain: new.busy_share / baseline.busy_share - 1.0,
        })
    }

    /// The same of runs over equal work ([`crate::work`]); `None` where a program never ran.
    pub fn of_rates(new: &[ProgramRates], baseline: &[ProgramRates]) -> Option<Self> {
        let sum = |rates: &[ProgramRates], of: fn(&ProgramRates) -> f64| rates.iter().map(of).sum::<f64>();
        let (now, before) = (sum(new, |rates| rates.instr_per_cycle), sum(baseline, |rates| rates.instr_per_cycle));
        let at_old_speed = |(now, before): (&ProgramRates, &ProgramRates)| {
            (before.run_time_share > 0.0).then(|| now.run_time_share * before.instr_per_cycle / before.run_time_share)
        };
        let at_old_speeds = new.iter().zip(baseline).map(at_old_speed).sum::<Option<f64>>()?;
        let busy = |rates: &[ProgramRates]| sum(rates, |rates| rates.run_time_share);
        Some(Comparison {
            throughput_gain: now / before - 1.0,
            mix_gain: at_old_speeds / before - 1.0,
            contention_gain: now / at_old_speeds - 1.0,
            busy_gain: busy(new) / busy(baseline) - 1.0,
        })
    }
}

fn speed(task: &TaskResults) -> Option<f64> {
    let on_cpu: u64 = task.on_cpu_cycles.iter().map(|(_, cycles)| cycles).sum();
    (on_cpu > 0).then(|| task.instructions as f64 / on_cpu as f64)
}

/// Scores against solo runs. Rates are per elapsed time, so starving a program counts against a run.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct SpeedupScores {
    /// Sum of speeds over those alone (Snavely and Tullsen).
    pub weighted_speedup: f64,
    /// Harmonic mean of speeds over those alone (Luo, Gummaraju and Franklin).
    pub harmonic_mean: f64,
    /// Largest speed alone over speed together.
    pub worst_slowdown: f64,
    /// Mean of time together over time alone, minus one.
    pub mean_degradation: f64,
}

/// `solo` holds instructions per elapsed cycle of each task alone, in the order of the tasks. `None` where a task
/// never ran.
pub fn scores(run: &RunResults, solo: &[f64]) -> Option<SpeedupScores> {
    let elapsed = run.elapsed_cycles as f64;
    let rates: Vec<f64> = run.tasks.iter().map(|task| task.instructions as f64 / elapsed).collect();
    SpeedupScores::of(&rates, solo)
}

impl SpeedupScores {
    /// From instructions per elapsed cycle together and alone; `None` where a task never ran.
    pub fn of(rates: &[f64], solo: &[f64]) -> Option<Self> {
        Some(SpeedupScores {
            weighted_speedup: metrics::weighted_speedup(rates, solo)?,
            harmonic_mean: metrics::harmonic_mean(rates, solo)?,
            worst_slowdown: metrics::worst_slowdown(rates, solo)?,
            mean_degradation: metrics::mean_slowdown(rates, solo)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(kernels: &[&str]) -> Workload {
        let jobs = kernels.iter().enumerate().map(|(index, kernel)| WorkloadJob::new(kernel, index as u64)).collect();
        Workload::on("xeon-x5365-4", jobs, 1).unwrap().lasting(200_000, 2_000_000)
    }

    /// Is a run the same to the bit when it is run again, and does it cover the measured span only?
    #[test]
    fn runs_are_repeatable_and_cover_the_measured_span() {
        let workload = workload(&["mcf", "swim"]);
        let first = workload.unmanaged().unwrap();
        assert_eq!(first, workload.unmanaged().unwrap());
        let off = first.elapsed_cycles.abs_diff(2_000_000) as f64;
        assert!(off < 20_000.0, "measured {} cycles", first.elapsed_cycles);
    }

    /// Does a managed run under the policy that changes nothing give what an unmanaged one gives?
    #[test]
    fn managing_nothing_changes_nothing() {
        let workload = workload(&["mcf", "swim"]);
        let window = cachemate_core::WindowLength::Cycles { cycles: 200_000 };
        let by = built(workload.pipeline("default", "", Vec::new(), window)).unwrap();
        let managed = workload.managed(by).unwrap().results;
        let unmanaged = workload.unmanaged().unwrap();
        let gain = Comparison::of(&managed, &unmanaged).unwrap();
        assert!(gain.throughput_gain.abs() < 0.01, "{gain:?}");
    }

    /// Is a gain split without a rest?
    #[test]
    fn mix_times_contention_is_the_gain() {
        let both = workload(&["mcf", "swim"]).unmanaged().unwrap();
        let other = Workload { options: SimOptions { seed: 2, ..SimOptions::default() }, ..workload(&["mcf", "swim"]) };
        let gain = Comparison::of(&other.unmanaged().unwrap(), &both).unwrap();
        let product = (1.0 + gain.mix_gain) * (1.0 + gain.contention_gain);
        assert!((product - 1.0 - gain.throughput_gain).abs() < 1e-9);
    }

    /// Does a job with an end run just so many instructions, and is it over then?
    #[test]
    fn a_job_with_an_end_ends() {
        let mut job = WorkloadJob::new("mcf", 1);
        job.instructions = Some(100_000);
        let workload = Workload::on("xeon-x5365-4", vec![job], 1).unwrap().lasting(0, 1_000_000_000);
        let results = workload.unmanaged().unwrap();
        assert!(results.tasks[0].exited);
        let off = results.tasks[0].instructions.abs_diff(100_000);
        assert!(off < 100, "{} instructions", results.tasks[0].instructions);
    }

    /// Does a job that is under way go on where the program is after so many instructions?
    #[test]
    fn a_job_under_way_goes_on_where_the_program_is() {
        let stream = |under_way_instructions: u64| {
            let job = WorkloadJob { under_way_instructions, ..WorkloadJob::new("art", 1) };
            let (mut source, mut batch) = (job.threads(0).unwrap().remove(0), Vec::new());
            (0..40).for_each(|_| assert_eq!(source.next_batch(&mut batch), BatchEnd::More));
            batch
        };
        let (from_start, later) = (stream(0), stream(5_000));
        let mut past = 0;
        let of_start = |access: &Access| {
            past += access.instructions();
            past
        };
        let passed: Vec<u64> = from_start.iter().map(of_start).collect();
        let skipped = (0..from_start.len()).find(|&at| from_start[at..].starts_with(&later[..100])).unwrap();
        let instructions = passed[skipped - 1];
        assert!((5_000..20_000).contains(&instructions), "{instructions}");
    }

    /// Is a program that does not exist an error with its name?
    #[test]
    fn an_unknown_kernel_is_named() {
        let workload = Workload::on("xeon-x5365-4", vec![WorkloadJob::new("mfc", 1)], 1).unwrap();
        let error = workload.simulated().err().unwrap().to_string();
        assert!(error.contains("'mfc'") && error.contains("did you mean 'mcf'"), "{error}");
    }
}
