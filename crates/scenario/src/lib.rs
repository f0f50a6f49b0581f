//! Builds the simulated machine of a scenario with its programs, and the pipeline that decides for
//! it.
//!
//! A comparison of two policies is fair only if everything else is equal, and the command, sweeps
//! and shards each start runs of their own. If each built its machine itself, a difference between
//! them would look like a difference between policies. So this crate alone turns a scenario into
//! its parts: scheduler, workload kernels, bundled recordings, and for [`interval`] jobs and
//! events.
//!
//! For example, each entry of a scenario for the interval machine draws its arrivals and lengths
//! from a generator of its own. Changing the third entry therefore leaves the draws of the others
//! as they are, and what changes in the result is the third entry's effect.
//!
//! # Invariants
//! - The same scenario and seed build the same machine, bit for bit.
//! - An entry draws from its own generator; changing it changes no other entry's draws.
//! - Every error names the field.

#![warn(missing_docs)]

pub mod interval;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cachemate_core::{
    AccessSource, Machine, MachineSpec, MachineSpecError, PipelineConfig, PolicyConfig,
};
use cachemate_pipeline::{
    CYCLE_COUNTED_INSTRUCTIONS, INTERVAL_COUNTED_INSTRUCTIONS, StandardPipeline,
};
use cachemate_sim::kernels::{self, Options};
use cachemate_sim::machine::{SimMachine, SimOptions, SimProgram, ThreadBuilder};
use cachemate_sim::os::schedulers::SchedulerKind;
use cachemate_spec::{Scenario, ScenarioProgram, SimModel};
use cachemate_trace::{CmtReader, CmtSource, TraceError, TraceReader, find_recording};
use serde::Deserialize;

/// The reason why a scenario's machine cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The scenario is for the interval machine, whose programs are profiles ([`interval::build_machine`]).
    #[error(
        "model: found 'interval', expected 'cycle': only 'cachemate sim' runs the interval machine"
    )]
    Interval,
    /// The scheduler is unknown.
    #[error("scheduler.name: found '{0}', expected linux (the default), solaris or round-robin")]
    Scheduler(String),
    /// The scheduler does not accept these parameters.
    #[error("scheduler.parameters: {0}")]
    SchedulerParameters(toml::de::Error),
    /// A program cannot be built.
    #[error("programs[{at}]: {what}")]
    Program {
        /// Index of the program in the list.
        at: usize,
        /// The reason.
        what: String,
    },
    /// The machine is invalid.
    #[error(transparent)]
    Machine(#[from] MachineSpecError),
}

/// Parameters of the simulated operating system's scheduler.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct SchedulerParameters {
    prefetch: Option<bool>,
    max_piece_order: Option<u32>,
}

/// The standard pipeline for the scenario's machine, whether simulated exactly or by intervals.
pub fn pipeline_config(
    scenario: &Scenario,
    spec: &MachineSpec,
    machine: &impl Machine,
) -> PipelineConfig {
    let policy = PolicyConfig {
        name: scenario.policy.name.clone(),
        parameters: scenario.policy.parameters.to_string(),
        seed: scenario.seed,
    };
    let counted_instructions = match scenario.simulator {
        SimModel::Cycle => CYCLE_COUNTED_INSTRUCTIONS,
        SimModel::Interval => INTERVAL_COUNTED_INSTRUCTIONS,
    };
    let standard =
        StandardPipeline::for_simulation(policy, scenario.guard, spec, counted_instructions);
    standard.for_machine(machine.topology(), machine.capabilities())
}

/// Builds the machine of a scenario, with its programs.
///
/// # Errors
/// A scheduler, program or option is unknown, a recording is unreadable, or the machine is invalid.
pub fn build(scenario: &Scenario, spec: &MachineSpec) -> Result<SimMachine, ScenarioError> {
    if scenario.simulator == SimModel::Interval {
        return Err(ScenarioError::Interval);
    }

    let scheduler = match scenario.scheduler.name.as_str() {
        "default" | "linux" => SchedulerKind::Linux,
        "solaris" => SchedulerKind::Solaris,
        "round-robin" => SchedulerKind::RoundRobin,
        other => return Err(ScenarioError::Scheduler(other.to_string())),
    };
    let parameters: SchedulerParameters = scenario
        .scheduler
        .parameters
        .clone()
        .try_into()
        .map_err(ScenarioError::SchedulerParameters)?;

    let defaults = SimOptions::default();
    let options = SimOptions {
        seed: scenario.seed,
        scale: scenario.scale,
        scheduler,
        prefetch: parameters.prefetch.unwrap_or(defaults.prefetch),
        max_piece_order: parameters
            .max_piece_order
            .unwrap_or(defaults.max_piece_order),
        warm_up: scenario.warm_up,
        ends: Some(scenario.length),
        ..defaults
    };

    let mut programs = Vec::new();
    for (index, program) in scenario.programs.iter().enumerate() {
        for _ in 0..program.count {
            let seed = scenario
                .seed
                .wrapping_mul(1_000_003)
                .wrapping_add(programs.len() as u64);
            programs.push(build_program(program, seed).map_err(|problem| {
                ScenarioError::Program {
                    at: index,
                    what: problem,
                }
            })?);
        }
    }
    Ok(SimMachine::new(spec, &options, programs)?)
}

fn build_program(program: &ScenarioProgram, seed: u64) -> Result<SimProgram, String> {
    let mut options: Options = program
        .parameters
        .clone()
        .try_into()
        .map_err(|error: toml::de::Error| format!("parameters: {error}"))?;
    options.threads = program.threads.or(options.threads);

    let thread_builder: ThreadBuilder = if let Some(path) = recording_of_program(&program.program)?
    {
        let trace_error_message = |error: TraceError| error.to_string();
        let threads = recorded_threads(&path).map_err(trace_error_message)?;
        let mut first_threads =
            Some(open_threads(&path, &threads, seed).map_err(trace_error_message)?);
        Box::new(move |_| {
            first_threads
                .take()
                .or_else(|| open_threads(&path, &threads, seed).ok())
                .unwrap_or_default()
        })
    } else {
        let name = program.program.clone();
        // The program is built here once, so that an invalid option is reported before the run.
        kernels::build_threads(&name, seed, &options).map_err(|error| error.to_string())?;
        Box::new(move |run| {
            kernels::build_threads(&name, seed.wrapping_add(u64::from(run) << 32), &options)
                .unwrap_or_default()
        })
    };

    Ok(SimProgram {
        start_ns: program.start_ns,
        restarts: program.restart,
        pinned_cpus: program.cpus.clone(),
        goal: program.goal,
        ..SimProgram::new(program.program.clone(), thread_builder)
    })
}

/// A file or a bundled recording ([`find_recording`]); `None` for a simulated program.
///
/// # Errors
/// Neither a simulated program nor a recording has this name; the message lists those that exist.
pub fn recording_of_program(name: &str) -> Result<Option<PathBuf>, String> {
    if kernels::programs().any(|known| known.name == name) {
        return Ok(None);
    }
    find_recording(name).map(Some).map_err(|lookup_error| {
        match kernels::build_threads(name, 1, &Options::default()) {
            Ok(_) => lookup_error.to_string(),
            Err(unknown) => format!("{unknown}; nor is it a bundled recording: {lookup_error}"),
        }
    })
}

/// Says which program is meant by the name of both a simulated program and a bundled recording, which take other
/// times; `None` for any other name.
pub fn namesake_note(name: &str) -> Option<String> {
    let is_simulated = recording_of_program(name) == Ok(None);
    let recording = find_recording(name).ok().filter(|_| is_simulated)?;
    Some(format!(
        "note: '{name}' is the simulated program; the recording of that name is {}",
        recording.display()
    ))
}

/// Ids of the threads that have records in the recording, ascending.
fn recorded_threads(path: &Path) -> Result<Vec<u32>, TraceError> {
    let mut reader = CmtReader::open(path)?;
    let (mut batch, mut threads) = (Vec::new(), BTreeSet::new());
    while reader.read_batch(&mut batch)? {
        threads.extend(batch.iter().map(|record| record.thread));
    }
    Ok(threads.into_iter().collect())
}

/// Opens the threads of a recording as endless loops. Copies start at different positions of the loop.
fn open_threads(
    path: &Path,
    threads: &[u32],
    seed: u64,
) -> Result<Vec<Box<dyn AccessSource>>, TraceError> {
    let open_source = |&thread: &u32| {
        let source = CmtSource::open(path, thread, 0, 0)?;
        let skip = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) % source.records_per_round().max(1);
        Ok(Box::new(CmtSource::open(path, thread, 0, skip)?) as Box<dyn AccessSource>)
    };
    threads.iter().map(open_source).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: &str = "name = \"s\"\ndescription = \"\"\nmachine = \"xeon-x5365-4\"\nseed = 1\nscale = 100\n\
                         length = { cycles = 1_000_000 }\n";

    fn parse_fixture(lines: &str) -> (Scenario, MachineSpec) {
        cachemate_spec::parse_scenario("s.toml", &format!("{START}{lines}")).unwrap()
    }

    /// Does every error name its field, the value found and the values expected?
    #[test]
    fn errors_name_their_field() {
        let cases = [
            (
                "scheduler = { name = \"fifo\" }\n[[programs]]\nprogram = \"mcf\"\n",
                "scheduler.name: found 'fifo', expected",
            ),
            (
                "scheduler = { name = \"linux\", parameters = { prefech = true } }\n[[programs]]\nprogram = \"mcf\"\n",
                "scheduler.parameters: unknown field `prefech`",
            ),
            (
                "[[programs]]\nprogram = \"mcf\"\n[[programs]]\nprogram = \"nobody\"\n",
                "programs[1]: ",
            ),
            (
                "[[programs]]\nprogram = \"./nowhere.cmt\"\n",
                "programs[0]: ./nowhere.cmt",
            ),
            (
                "[[programs]]\nprogram = \"mcf\"\nparameters = { nothing = 1 }\n",
                "programs[0]: parameters: ",
            ),
        ];

        for (lines, expected) in cases {
            let (scenario, spec) = parse_fixture(lines);
            let message = build(&scenario, &spec).err().expect(lines).to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }

    /// Do equal scenarios build machines with equal results, and other seeds different ones?
    #[test]
    fn a_scenario_and_its_seed_determine_the_results() {
        let run = |seed: u64| {
            let (mut scenario, spec) = parse_fixture(
                "[[programs]]\nprogram = \"mcf\"\n[[programs]]\nprogram = \"gamess\"\n",
            );
            scenario.seed = seed;
            let machine = build(&scenario, &spec).unwrap();
            let config = pipeline_config(&scenario, &spec, &machine);
            let mut machine = cachemate_pipeline::Pipeline::build(config)
                .unwrap()
                .run(machine, |_, _| true)
                .unwrap();
            format!("{:?}", machine.collect_results())
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }
}
