//! Running: a machine by itself, to its end; many runs at once; solo runs remembered.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cachemate_core::{Decision, Machine, MachineSpec, MachineSpecError, Plan, Policy, View, WindowLength};
use rayon::prelude::*;

use crate::machine::{SimMachine, SimOptions, SimProgram};
use crate::results::RunResults;

/// Changes nothing: the machine's default scheduler decides alone.
pub struct NullPolicy {
    /// Length of every window.
    pub window: WindowLength,
}

impl Policy for NullPolicy {
    fn decide(&mut self, _view: &View<'_>) -> Decision {
        Decision::new(Plan::idle(self.window), Vec::new())
    }
}

/// Runs to the end under the default scheduler, without a loop: for baselines and solo runs.
///
/// # Errors
/// As [`SimMachine`]'s `observe`.
pub fn run_alone(machine: &mut SimMachine) -> Result<RunResults, cachemate_core::MachineError> {
    while machine.observe()?.is_some() {}
    Ok(machine.results())
}

/// The jobs' results in the jobs' order, on all host cores. Runs share nothing, so their results do not depend on how
/// many cores there are.
pub fn run_in_parallel<I: Send, T: Send>(jobs: Vec<I>, run: impl Fn(I) -> T + Sync + Send) -> Vec<T> {
    jobs.into_par_iter().map(run).collect()
}

/// Why a solo run failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SoloError {
    /// This machine cannot be simulated.
    #[error(transparent)]
    Impossible(#[from] MachineSpecError),
    /// The run could not go on.
    #[error(transparent)]
    Machine(#[from] cachemate_core::MachineError),
}

/// Runs of single programs, each made once: by machine, options, and whatever the caller tells programs apart by.
#[derive(Default)]
pub struct SoloRuns(Mutex<BTreeMap<String, Arc<RunResults>>>);

impl SoloRuns {
    /// # Errors
    /// An impossible machine, or one too small for the program.
    pub fn get(
        &self,
        spec: &MachineSpec,
        options: &SimOptions,
        program: &str,
        make: impl FnOnce() -> SimProgram,
    ) -> Result<Arc<RunResults>, SoloError> {
        let key = format!("{spec:?} {options:?} {program}");
        let known = || self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(stored) = known().get(&key) {
            return Ok(Arc::clone(stored));
        }
        let mut machine = SimMachine::new(spec, options, vec![make()])?;
        let results = Arc::new(run_alone(&mut machine)?);
        Ok(Arc::clone(known().entry(key).or_insert(results)))
    }
}
