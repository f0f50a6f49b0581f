//! Loads programs for the interval machine from files of phases, profiles or recordings, or measures simulated ones
//! alone on the cycle-level machine.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use cachemate_core::MachineSpec;
use cachemate_forecast::TimedProgram;
use cachemate_forecast::prior::from_file;
use cachemate_interval::PhasedProgram;
use cachemate_repro::interval::nominal::{HOUR_PROFILE_CYCLES, measure, stretch_phases};
use cachemate_repro::setup;
use cachemate_scenario::recording_of_program;
use cachemate_sim::kernels::Options;
use cachemate_trace::{ProfileFile, bundled_recording};

use crate::session::Session;

/// A program that a command line or scenario requests.
#[derive(Clone, PartialEq, Debug)]
pub struct ProgramRequest {
    /// File of phases (TOML or JSON), profile file, program of the cycle-level machine, or recording.
    pub program: String,
    /// Parameters of a program of the cycle-level machine.
    pub parameters: toml::Table,
}

/// Maximum size of a file.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Loads the programs; equal requests share one program. Programs of the cycle-level machine are measured alone on the
/// given machine. Their phases, and those of recordings, are stretched by `phase_scale`.
pub fn load(
    session: &Session,
    requests: &[ProgramRequest],
    machine: &MachineSpec,
    seed: u64,
    phase_scale: f64,
) -> anyhow::Result<Vec<Arc<PhasedProgram>>> {
    let bar = session.progress_bar("programs", Some(requests.len() as u64));
    let mut programs: Vec<Arc<PhasedProgram>> = Vec::with_capacity(requests.len());
    for (index, request) in requests.iter().enumerate() {
        let program = match requests[..index].iter().position(|other| other == request) {
            Some(earlier_index) => Arc::clone(&programs[earlier_index]),
            None => {
                bar.set_message(request.program.clone());
                let program =
                    load_program(session, request, machine, (seed, index as u64), phase_scale)?;
                Arc::new(program)
            }
        };
        programs.push(program);
        bar.inc(1);
        if session
            .interrupt_flag()
            .load(std::sync::atomic::Ordering::Relaxed)
        {
            return Err(crate::exit::InterruptedError("nothing was run".to_string()).into());
        }
    }
    bar.finish_and_clear();
    Ok(programs)
}

/// Loads one program. Simulated programs draw their inputs from the seed and their index.
fn load_program(
    session: &Session,
    request: &ProgramRequest,
    machine: &MachineSpec,
    (seed, index): (u64, u64),
    phase_scale: f64,
) -> anyhow::Result<PhasedProgram> {
    let name = &request.program;
    if name.ends_with(".toml") || name.ends_with(".json") {
        return load_program_file(session, name, machine, phase_scale);
    }
    // Neither programs of the cycle-level machine nor bundled recordings have a dot or a slash in their names.
    if name.contains(['.', '/']) && !name.ends_with(".cmt") {
        bail!(
            "'{name}': expected a file of phases or a profile (.toml, .json), a recording (.cmt), or a program's name"
        );
    }
    let options: Options = request
        .parameters
        .clone()
        .try_into()
        .context("parameters")?;
    let Some(path) = recording_of_program(name).map_err(anyhow::Error::msg)? else {
        let job = setup::WorkloadJob {
            options,
            ..setup::WorkloadJob::new(name, seed.wrapping_add(index))
        };
        let thread_count = job.start_threads(0)?.len();
        if thread_count != 1 {
            bail!(
                "'{name}': found {thread_count} threads, expected one: programs with several threads cannot be measured alone"
            );
        }
        if bundled_recording(name).is_ok() {
            session.note(&format!(
                "{name}: the simulated program; '{name}.cmt' is the bundled recording of that name"
            ));
        }
        return Ok(measure(&job, machine, HOUR_PROFILE_CYCLES, phase_scale)?);
    };
    // The same timing as for `predict`, so that both commands forecast the same slowdowns.
    let timed_program = TimedProgram::from_recording(name, &path, machine)?;
    Ok(stretched_program(&timed_program, machine, phase_scale))
}

fn stretched_program(
    timed_program: &TimedProgram,
    machine: &MachineSpec,
    phase_scale: f64,
) -> PhasedProgram {
    let mut program = timed_program.sharing_program(timed_program.median_draw(), machine);
    stretch_phases(&mut program, phase_scale);
    program
}

fn load_program_file(
    session: &Session,
    path: &str,
    machine: &MachineSpec,
    phase_scale: f64,
) -> anyhow::Result<PhasedProgram> {
    let size = std::fs::metadata(path)
        .with_context(|| format!("{path}: cannot be read"))?
        .len();
    if size > MAX_FILE_BYTES {
        bail!("{path}: found {size} bytes, expected a program of at most {MAX_FILE_BYTES}");
    }
    let text = crate::files::read_text(path.as_ref(), MAX_FILE_BYTES)?;
    if path.ends_with(".toml") {
        let program: PhasedProgram = cachemate_spec::parse_toml(path, &text)?;
        program.check().with_context(|| path.to_string())?;
        return Ok(program);
    }
    let value: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{path}: not JSON"))?;
    if value.get("format").is_none() {
        let program: PhasedProgram =
            serde_json::from_str(&text).with_context(|| format!("{path}: not a program"))?;
        program.check().with_context(|| path.to_string())?;
        return Ok(program);
    }
    let file = ProfileFile::read(Path::new(path))?;
    if let Some(sample) = &file.sample {
        let timed_program = TimedProgram::from_sample(&file.program, sample, machine)?;
        return Ok(stretched_program(&timed_program, machine, phase_scale));
    }
    session.note(&format!(
        "{path}: has no sample of its accesses, so cycles are derived from its misses and the machine (docs/simulators/interval.md)"
    ));
    from_file(&file, machine).with_context(|| path.to_string())
}
