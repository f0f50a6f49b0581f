//! Makes programs for hours of nominal time, from solo runs on the cycle-level machine.

use cachemate_core::MachineSpec;
use cachemate_interval::PhasedProgram;
use cachemate_sim::machine::SimOptions;

use crate::Result;
use crate::phased_profile::{self, ProfilingLengths};
use crate::setup::WorkloadJob;

/// Cycles of a program's run at full size for hours of nominal time.
pub const HOUR_PROFILE_CYCLES: u64 = 16_000_000;
/// Number of phases that are kept.
const PHASE_COUNT: u64 = 6;
const COUNTER_READING_CYCLES: u64 = 100_000;

/// A job measured alone on the cycle-level machine for `cycles`; its phases last `stretch` times
/// longer, and repeat. The first quarter is start-up, which is not repeated.
pub fn measure(
    job: &WorkloadJob,
    machine: &MachineSpec,
    cycles: u64,
    stretch: f64,
) -> Result<PhasedProgram> {
    let until_instr =
        phased_profile::count_instructions_in(job, machine, &solo_options(job), cycles)?;
    let mut program =
        measure_instructions(job, machine, until_instr - until_instr * 3 / 4, until_instr)?;
    stretch_phases(&mut program, stretch);
    Ok(program)
}

/// Makes each phase last `stretch` times longer.
pub fn stretch_phases(program: &mut PhasedProgram, stretch: f64) {
    for phase in &mut program.phases {
        phase.instructions = phase.instructions.map(|length| length * stretch);
    }
}

/// Hours of nominal time repeat no first touches.
fn solo_options(job: &WorkloadJob) -> SimOptions {
    SimOptions {
        seed: job.seed,
        is_resident: true,
        ..SimOptions::default()
    }
}

/// A job measured alone on the cycle-level machine for `until_instr` instructions, of which the
/// first `start_up_instr` are not part of the program. Its phases repeat.
pub fn measure_instructions(
    job: &WorkloadJob,
    machine: &MachineSpec,
    start_up_instr: u64,
    until_instr: u64,
) -> Result<PhasedProgram> {
    let phase_instr = ((until_instr - start_up_instr) / PHASE_COUNT).max(1);
    let lengths = ProfilingLengths {
        until_instr,
        phase_instr,
        reading_cycles: COUNTER_READING_CYCLES,
    };
    let mut program = phased_profile::measure_profile(job, machine, &solo_options(job), lengths)?;
    let start_up_phases = program.phases.len().saturating_sub(PHASE_COUNT as usize);
    program.phases.drain(..start_up_phases);
    program.repeats_from = Some(0);
    program.from_empty_cache = false;
    Ok(program)
}
