//! The interval machine: a simulator that runs hours of nominal time in seconds.
//!
//! Programs are profiles: sequences of phases, each with its rates at several sizes of the contended cache. The
//! machine combines profiles by theory alone; no parameter is fitted to co-runs. docs/simulators/interval.md states
//! the accuracy.

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
    IntervalJob, IntervalMachine, IntervalMachineError, IntervalResults, JobResults, Options,
};
pub use program::{
    Demand, PhasedProgram, PrivateLevel, ProgramPhase, RegionUse, SizePoint, UnprefetchedRates,
};
