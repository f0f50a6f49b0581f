//! A second simulated machine: hours of nominal time in seconds.
//!
//! Programs are profiles: phases with rates by size of the contended cache. The machine composes them by theory alone;
//! nothing in it is fitted to co-runs. docs/simulators/interval.md states its accuracy.

#![warn(missing_docs)]

pub mod closed_form;
mod curve;
pub mod engine;
mod machine;
mod memory;
mod occupancy;
mod program;
mod run_queues;
mod sharing;
mod smt;
mod synthetic_trace;

pub use machine::{
    CounterNoise, IntervalJob, IntervalMachine, IntervalMachineError, IntervalResults, JobResults, MachineEvent,
    Options,
};
pub use program::{
    Demand, PhasedProgram, PhasedProgramError, PrivateLevel, ProgramPhase, RegionUse, SizePoint, UnprefetchedRates,
};
