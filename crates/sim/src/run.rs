//! Running: a machine under the loop, to its end; many runs at once; solo runs remembered.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cachemate_core::{
    Decision, ImpossibleMachine, Loop, LoopError, Machine, MachineSpec, Plan, Policy, Predictor, Profiler, Record,
    RunHeader, View, Window,
};
use rayon::prelude::*;

use crate::machine::{Program, SimMachine, SimOptions};
use crate::results::RunResults;

/// Who decides, and what stands between it and the machine.
pub struct Deciding {
    pub profilers: Vec<Box<dyn Profiler>>,
    pub yardstick: Box<dyn Predictor>,
    pub name: String,
    pub policy: Box<dyn Policy>,
    /// Until the policy's first plan.
    pub first_window: Window,
}

/// A boxed policy as a policy.
struct Boxed(Box<dyn Policy>);

impl Policy for Boxed {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.0.decide(view)
    }
}

/// Changes nothing: the machine's default scheduler decides alone.
pub struct LeaveAlone {
    pub window: Window,
}

impl Policy for LeaveAlone {
    fn decide(&mut self, _view: &View<'_>) -> Decision {
        Decision { plan: Plan::idle(self.window), why: Vec::new() }
    }
}

/// First line of the run's recording.
pub fn run_header(machine: &SimMachine, format: u32, policy: &str, parameters: &str, seed: u64) -> RunHeader {
    RunHeader {
        format,
        topology: machine.topology().clone(),
        capabilities: machine.capabilities().clone(),
        policy: policy.to_string(),
        parameters: parameters.to_string(),
        seed,
    }
}

/// Runs the loop to the machine's end; `each` gets every record and ends the run with `false`.
///
/// # Errors
/// As [`Loop::step`].
pub fn run(
    mut machine: SimMachine,
    deciding: Deciding,
    mut each: impl FnMut(&mut SimMachine, Record) -> bool,
) -> Result<RunResults, LoopError> {
    machine.set_first_window(deciding.first_window);
    let Deciding { profilers, yardstick, name, policy, first_window } = deciding;
    let mut turning = Loop::new(machine, profilers, yardstick, name, Boxed(policy), first_window);
    while let Some(record) = turning.step()? {
        if !each(&mut turning.machine, record) {
            break;
        }
    }
    Ok(turning.machine.results())
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
pub fn in_parallel<I: Send, T: Send>(jobs: Vec<I>, run: impl Fn(I) -> T + Sync + Send) -> Vec<T> {
    jobs.into_par_iter().map(run).collect()
}

/// Why a solo run failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SoloError {
    #[error(transparent)]
    Impossible(#[from] ImpossibleMachine),
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
        make: impl FnOnce() -> Program,
    ) -> Result<Arc<RunResults>, SoloError> {
        let key = format!("{spec:?} {options:?} {program}");
        let known = || self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(found) = known().get(&key) {
            return Ok(Arc::clone(found));
        }
        let mut machine = SimMachine::new(spec, options, vec![make()])?;
        let results = Arc::new(run_alone(&mut machine)?);
        Ok(Arc::clone(known().entry(key).or_insert(results)))
    }
}
