//! Runs simulated machines: to the end without a policy, in parallel with other machines, or solo with stored results.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cachemate_core::{Decision, Machine, MachineSpec, MachineSpecError, Plan, Policy, View, WindowLength};
use rayon::prelude::*;

use crate::machine::{SimMachine, SimOptions, SimProgram};
use crate::results::RunResults;

/// A policy that changes nothing, so that the machine's default scheduler decides alone.
pub struct NullPolicy {
    /// Length of every window.
    pub window: WindowLength,
}

impl Policy for NullPolicy {
    fn decide(&mut self, _view: &View<'_>) -> Decision {
        Decision::new(Plan::idle(self.window), Vec::new())
    }
}

/// Runs a machine to its end under the default scheduler, without a control loop, for baselines and solo runs.
///
/// # Errors
/// Returns an error if [`SimMachine`]'s `observe` fails.
pub fn run_alone(machine: &mut SimMachine) -> Result<RunResults, cachemate_core::MachineError> {
    while machine.observe()?.is_some() {}
    Ok(machine.collect_results())
}

/// Runs the jobs on all host cores, and returns their results in the order of the jobs. Runs share no state, so their
/// results do not depend on the number of cores.
pub fn run_in_parallel<I: Send, T: Send>(jobs: Vec<I>, run: impl Fn(I) -> T + Sync + Send) -> Vec<T> {
    jobs.into_par_iter().map(run).collect()
}

/// The reason why a solo run failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SoloError {
    /// The machine cannot be simulated.
    #[error(transparent)]
    Impossible(#[from] MachineSpecError),
    /// The run could not continue.
    #[error(transparent)]
    Machine(#[from] cachemate_core::MachineError),
}

/// A store of the results of solo runs. The machine, the options, and the caller's name for the program identify a run.
#[derive(Default)]
pub struct SoloRuns(Mutex<BTreeMap<String, Arc<RunResults>>>);

impl SoloRuns {
    /// Returns the results of a solo run, which is executed if no result is stored yet.
    ///
    /// # Errors
    /// Returns an error if the machine cannot be simulated or is too small for the program.
    pub fn get_or_run(
        &self,
        spec: &MachineSpec,
        options: &SimOptions,
        program: &str,
        build_program: impl FnOnce() -> SimProgram,
    ) -> Result<Arc<RunResults>, SoloError> {
        let key = format!("{spec:?} {options:?} {program}");
        let stored_runs = || self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(stored_results) = stored_runs().get(&key) {
            return Ok(Arc::clone(stored_results));
        }
        let mut machine = SimMachine::new(spec, options, vec![build_program()])?;
        let results = Arc::new(run_alone(&mut machine)?);
        Ok(Arc::clone(stored_runs().entry(key).or_insert(results)))
    }
}
