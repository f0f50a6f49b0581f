//! Runs one mix under one policy on the interval machine, with all costs of the policy.

use std::collections::BTreeMap;

use cachemate_core::{
    CounterEvent, Machine, MachineSpec, Observation, PolicyConfig, ProcessId, WindowLength,
};
use cachemate_interval::{IntervalJob, IntervalMachine, Options};
use cachemate_pipeline::{Pipeline, StandardPipeline, miss_penalty_of_machine};

use crate::setup::failed;
use crate::{Result, store};

/// A policy with its parameters, as a contender.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct AutoContender {
    /// Title of the contender in tables.
    pub title: &'static str,
    /// Name of the policy in the registry.
    pub policy: &'static str,
    /// Parameters as TOML; empty for the policy's defaults.
    pub parameters: String,
}

impl AutoContender {
    /// `parameters` as TOML.
    pub fn new(title: &'static str, policy: &'static str, parameters: &str) -> Self {
        AutoContender {
            title,
            policy,
            parameters: parameters.to_string(),
        }
    }
}

/// Outcome of one run.
#[derive(Clone, PartialEq, Debug)]
pub struct ContenderRun {
    /// Instructions per second of each job, over all its threads, from its arrival to the end of the run.
    pub instr_per_s: Vec<f64>,
    /// Seconds at the end of each window, and instructions of all jobs by then.
    pub instr_by_second: Vec<(f64, f64)>,
    /// Speed of each job in each window of the run's second half.
    pub second_half_speeds: Vec<Vec<f64>>,
}

/// Minimum number of instructions for which a counter reading is used: about a tenth of a second.
const COUNTED_INSTRUCTIONS: f64 = 1e8;

/// Runs a mix to its end.
pub fn run(
    machine: &MachineSpec,
    jobs: &[IntervalJob],
    contender: &AutoContender,
    seed: u64,
    length_ns: u64,
) -> Result<ContenderRun> {
    store::allow_simulation()?;
    let options = Options {
        seed,
        length_ns: Some(length_ns),
        ..Options::default()
    };
    let contender_error = failed(contender.title);
    let mut interval_machine =
        IntervalMachine::new(machine, options, jobs.to_vec()).map_err(failed(contender.title))?;
    let first_window = WindowLength::Time { ns: 1_000_000_000 };
    interval_machine.set_first_window(first_window);

    let standard = StandardPipeline {
        policy: PolicyConfig {
            name: contender.policy.to_string(),
            parameters: contender.parameters.clone(),
            seed,
        },
        guard: None,
        counted_instructions: COUNTED_INSTRUCTIONS,
        predictor: miss_penalty_of_machine(machine),
        watches_code: false,
        first_window,
    };
    let config = standard.for_machine(interval_machine.topology(), interval_machine.capabilities());
    let pipeline = Pipeline::build(config).map_err(contender_error)?;
    let mut instruction_totals = InstructionTotals::new(jobs);
    pipeline
        .run(interval_machine, |_, record| {
            instruction_totals.add_window(&record.observation, length_ns);
            true
        })
        .map_err(failed(contender.title))?;
    Ok(instruction_totals.into_run(jobs, length_ns))
}

/// Instructions by job, from the machine's observations, which are exact.
struct InstructionTotals {
    job_by_process: BTreeMap<ProcessId, usize>,
    names: Vec<String>,
    instructions: Vec<f64>,
    instr_by_second: Vec<(f64, f64)>,
    window_instr_by_job: Vec<Vec<f64>>,
}

impl InstructionTotals {
    fn new(jobs: &[IntervalJob]) -> Self {
        InstructionTotals {
            job_by_process: BTreeMap::new(),
            names: jobs.iter().map(|job| job.name.clone()).collect(),
            instructions: vec![0.0; jobs.len()],
            instr_by_second: Vec::new(),
            window_instr_by_job: Vec::new(),
        }
    }

    fn add_window(&mut self, observation: &Observation, length_ns: u64) {
        let mut window_instr = vec![0.0; self.names.len()];
        for task in &observation.tasks {
            let process_job = self.job_by_process.get(&task.process).copied();
            let named_job = || self.names.iter().position(|name| *name == task.name);
            let Some(job) = process_job.or_else(named_job) else {
                continue;
            };
            self.job_by_process.insert(task.process, job);
            window_instr[job] += task.counts.get(CounterEvent::Instructions).unwrap_or(0.0);
        }
        self.instructions
            .iter_mut()
            .zip(&window_instr)
            .for_each(|(sum, added)| *sum += added);
        let end_ns = observation.span.start_ns + observation.span.elapsed_ns;
        self.instr_by_second
            .push((end_ns as f64 / 1e9, self.instructions.iter().sum()));

        if observation.span.start_ns > length_ns / 2 {
            let seconds = observation.span.elapsed_ns.max(1) as f64 / 1e9;
            self.window_instr_by_job.push(
                window_instr
                    .into_iter()
                    .map(|instructions| instructions / seconds)
                    .collect(),
            );
        }
    }

    fn into_run(self, jobs: &[IntervalJob], length_ns: u64) -> ContenderRun {
        let present_seconds =
            |job: &IntervalJob| length_ns.saturating_sub(job.start_ns).max(1) as f64 / 1e9;
        let job_instr_per_s =
            |(instructions, job): (&f64, &IntervalJob)| instructions / present_seconds(job);
        ContenderRun {
            instr_per_s: self
                .instructions
                .iter()
                .zip(jobs)
                .map(job_instr_per_s)
                .collect(),
            instr_by_second: self.instr_by_second,
            second_half_speeds: self.window_instr_by_job,
        }
    }
}
