//! Runs simulated machines to the end without a policy.

use cachemate_core::{Machine, MachineError};

use crate::machine::SimMachine;
use crate::results::RunResults;

/// Runs a machine to its end under the default scheduler, without a control loop, for baselines and solo runs.
///
/// # Errors
/// Those of [`SimMachine`]'s `observe`.
pub fn run_alone(machine: &mut SimMachine) -> Result<RunResults, MachineError> {
    while machine.observe()?.is_some() {}
    Ok(machine.collect_results())
}
