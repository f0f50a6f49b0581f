//! Runs workloads under a policy, and compares runs.
//!
//! Managed runs use `core::ControlLoop`, so a policy sees only observations. Results come from the simulator's own
//! accounting, which no policy sees.

use cachemate_core::{
    ControlLoopError, PipelineConfig, PolicyConfig, ProfilerConfig, WindowLength, WindowRecord,
};
use cachemate_pipeline::{Pipeline, miss_penalty_of_machine};
use cachemate_sim::machine::SimMachine;
use cachemate_sim::metrics;
use cachemate_sim::results::{RunResults, TaskResults};

use crate::error::Result;
pub use crate::error::failed;
use crate::rates::ProgramRates;
pub(crate) use crate::workload::load_machine;
pub use crate::workload::{Workload, WorkloadJob};

/// Results of a managed run, and every record of the loop, including the warm-up.
pub struct ManagedRun {
    /// Results of the measured part.
    pub results: RunResults,
    /// One record per window.
    pub records: Vec<WindowRecord>,
}

impl Workload {
    /// Runs the workload under a policy, from the start of the warm-up on.
    ///
    /// # Errors
    /// The loop rejects a plan, or [`Workload::build_machine`] fails.
    pub fn run_managed(&self, pipeline: Pipeline) -> Result<ManagedRun> {
        run_to_end(self.build_machine()?, pipeline)
    }

    /// A pipeline around a policy of the registry, as in the experiments: these profilers, no
    /// guard, and a miss cost of the memory's latency beyond a hit of the last level.
    pub fn pipeline(
        &self,
        name: &str,
        parameters: &str,
        profilers: Vec<ProfilerConfig>,
        first_window: WindowLength,
    ) -> PipelineConfig {
        let seed = self.options.seed;
        PipelineConfig {
            policy: PolicyConfig {
                name: name.to_string(),
                parameters: parameters.to_string(),
                seed,
            },
            guard: None,
            profilers,
            predictor: miss_penalty_of_machine(&self.machine),
            first_window,
        }
    }
}

/// Builds the pipeline that a configuration describes.
///
/// # Errors
/// The policy is unknown, or does not accept the parameters.
pub fn build_pipeline(config: PipelineConfig) -> Result<Pipeline> {
    let name = config.policy.name.clone();
    Pipeline::build(config).map_err(failed(&name))
}

/// Runs a simulated machine under a pipeline to its end, and keeps the record of every window.
///
/// # Errors
/// The loop rejects a plan.
pub fn run_to_end(machine: SimMachine, pipeline: Pipeline) -> Result<ManagedRun> {
    let policy_name = pipeline.config().policy.name.clone();
    let mut records = Vec::new();
    let on_window = |_: &mut SimMachine, record| {
        records.push(record);
        true
    };
    let results = run_under(machine, pipeline, on_window).map_err(failed(&policy_name))?;
    Ok(ManagedRun { results, records })
}

/// Runs a simulated machine under a pipeline to its end, or until `on_window` returns `false`.
///
/// # Errors
/// The errors of the control loop.
pub fn run_under(
    mut machine: SimMachine,
    pipeline: Pipeline,
    on_window: impl FnMut(&mut SimMachine, WindowRecord) -> bool,
) -> Result<RunResults, ControlLoopError> {
    machine.set_first_window(pipeline.config().first_window);
    Ok(pipeline.run(machine, on_window)?.collect_results())
}

/// Comparison of two runs of the same jobs: per instruction, per time, and in fairness.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Comparison {
    /// Instructions per elapsed cycle divided by the baseline's, minus one.
    pub throughput_gain: f64,
    /// The part that comes from other shares of time, at the baseline's speeds ("mix").
    pub mix_gain: f64,
    /// The part that comes from other speeds, at the new shares ("contention").
    pub contention_gain: f64,
    /// Number of busy CPUs divided by the baseline's, minus one.
    pub busy_gain: f64,
}

impl Comparison {
    /// Splits the gain exactly: (1 + throughput) = (1 + mix)(1 + contention), with mix the change of Σ share·speed from
    /// new shares at old speeds. Shares are processor time over elapsed time, speeds are instructions per cycle on a
    /// processor; idle time affects the shares and `busy_gain`. Mix and contention are NaN if a task never ran in the
    /// baseline, so that it has no speed.
    pub fn compare(new: &RunResults, baseline: &RunResults) -> Self {
        let tasks = new.tasks.iter().zip(&baseline.tasks);
        let ipc_at_old_speeds: f64 = tasks
            .map(|(new_task, old_task)| new_task.run_time_share * instr_per_cpu_cycle(old_task))
            .sum();
        let (new_ipc, old_ipc) = (
            new.instructions_per_cycle(),
            baseline.instructions_per_cycle(),
        );
        Comparison {
            throughput_gain: new_ipc / old_ipc - 1.0,
            mix_gain: ipc_at_old_speeds / old_ipc - 1.0,
            contention_gain: new_ipc / ipc_at_old_speeds - 1.0,
            busy_gain: new.busy_share / baseline.busy_share - 1.0,
        }
    }

    /// Compares runs over equal work ([`crate::work`]); `None` if a program never ran.
    pub fn compare_rates(new: &[ProgramRates], baseline: &[ProgramRates]) -> Option<Self> {
        let sum_of_rates = |rates: &[ProgramRates], value: fn(&ProgramRates) -> f64| {
            rates.iter().map(value).sum::<f64>()
        };
        let (new_ipc, old_ipc) = (
            sum_of_rates(new, |rates| rates.instr_per_cycle),
            sum_of_rates(baseline, |rates| rates.instr_per_cycle),
        );
        let ipc_at_old_speed = |(new_rates, old_rates): (&ProgramRates, &ProgramRates)| {
            (old_rates.run_time_share > 0.0).then(|| {
                new_rates.run_time_share * old_rates.instr_per_cycle / old_rates.run_time_share
            })
        };
        let ipc_at_old_speeds = new
            .iter()
            .zip(baseline)
            .map(ipc_at_old_speed)
            .sum::<Option<f64>>()?;
        let run_time_sum =
            |rates: &[ProgramRates]| sum_of_rates(rates, |rates| rates.run_time_share);
        Some(Comparison {
            throughput_gain: new_ipc / old_ipc - 1.0,
            mix_gain: ipc_at_old_speeds / old_ipc - 1.0,
            contention_gain: new_ipc / ipc_at_old_speeds - 1.0,
            busy_gain: run_time_sum(new) / run_time_sum(baseline) - 1.0,
        })
    }
}

/// NaN for a task that never ran.
fn instr_per_cpu_cycle(task: &TaskResults) -> f64 {
    let on_cpu_cycles: u64 = task.on_cpu_cycles.iter().map(|(_, cycles)| cycles).sum();
    task.instructions as f64 / on_cpu_cycles as f64
}

/// Scores relative to solo runs. Rates are per elapsed time, so starving a program lowers the scores.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SpeedupScores {
    /// Sum of speeds divided by solo speeds (Snavely and Tullsen).
    pub weighted_speedup: f64,
    /// Harmonic mean of speeds divided by solo speeds (Luo, Gummaraju and Franklin).
    pub harmonic_mean: f64,
    /// Largest solo speed divided by the speed in the run.
    pub worst_slowdown: f64,
    /// Mean over tasks of run time divided by solo run time, minus one.
    pub mean_degradation: f64,
}

/// Scores of a run. `solo_speeds` holds instructions per elapsed cycle of each task alone, in the order of the tasks.
/// `None` if a task never ran.
pub fn score_results(run: &RunResults, solo_speeds: &[f64]) -> Option<SpeedupScores> {
    let elapsed_cycles = run.elapsed_cycles as f64;
    let rates: Vec<f64> = run
        .tasks
        .iter()
        .map(|task| task.instructions as f64 / elapsed_cycles)
        .collect();
    SpeedupScores::from_rates(&rates, solo_speeds)
}

impl SpeedupScores {
    /// Scores from instructions per elapsed cycle together and alone; `None` if a task never ran.
    pub fn from_rates(rates: &[f64], solo_speeds: &[f64]) -> Option<Self> {
        Some(SpeedupScores {
            weighted_speedup: metrics::weighted_speedup(rates, solo_speeds)?,
            harmonic_mean: metrics::harmonic_mean(rates, solo_speeds)?,
            worst_slowdown: metrics::worst_slowdown(rates, solo_speeds)?,
            mean_degradation: metrics::mean_slowdown(rates, solo_speeds)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_sim::machine::SimOptions;

    fn sample_workload(kernels: &[&str]) -> Workload {
        let jobs = kernels
            .iter()
            .enumerate()
            .map(|(index, kernel)| WorkloadJob::new(kernel, index as u64))
            .collect();
        Workload::from_machine_name("xeon-x5365-4", jobs, 1)
            .unwrap()
            .with_length(200_000, 2_000_000)
    }

    /// Does a repeated run give the same bits, and does it cover only the measured span?
    #[test]
    fn runs_are_repeatable_and_cover_the_measured_span() {
        let workload = sample_workload(&["mcf", "swim"]);
        let first = workload.unmanaged_run().unwrap();
        assert_eq!(first, workload.unmanaged_run().unwrap());
        let deviation = first.elapsed_cycles.abs_diff(2_000_000) as f64;
        assert!(
            deviation < 20_000.0,
            "measured {} cycles",
            first.elapsed_cycles
        );
    }

    /// Does a managed run under the policy that changes nothing equal an unmanaged one?
    #[test]
    fn an_idle_policys_run_equals_an_unmanaged_one() {
        let workload = sample_workload(&["mcf", "swim"]);
        let window = cachemate_core::WindowLength::Cycles { cycles: 200_000 };
        let pipeline =
            build_pipeline(workload.pipeline("default", "", Vec::new(), window)).unwrap();
        let managed = workload.run_managed(pipeline).unwrap().results;
        let unmanaged = workload.unmanaged_run().unwrap();
        let gain = Comparison::compare(&managed, &unmanaged);
        assert!(gain.throughput_gain.abs() < 0.01, "{gain:?}");
    }

    /// Is a gain split without a remainder?
    #[test]
    fn mix_times_contention_is_the_gain() {
        let results = sample_workload(&["mcf", "swim"]).unmanaged_run().unwrap();
        let other_seed = Workload {
            options: SimOptions {
                seed: 2,
                ..SimOptions::default()
            },
            ..sample_workload(&["mcf", "swim"])
        };
        let gain = Comparison::compare(&other_seed.unmanaged_run().unwrap(), &results);
        let product = (1.0 + gain.mix_gain) * (1.0 + gain.contention_gain);
        assert!((product - 1.0 - gain.throughput_gain).abs() < 1e-9);
    }
}
