//! The interval machine: a simulator that runs hours of nominal time in seconds.
//!
//! An online policy acts over minutes, and at some million accesses a second such a run would take
//! weeks on the cycle-level machine. But between two changes of plan nothing happens that theory
//! could not sum up: programs fill a cache at their miss rates, wait in a queue for memory, and
//! share time. So this machine advances from one change to the next by solving equations. Programs
//! are profiles, which are sequences of phases with rates at several sizes of the contended cache,
//! each measured alone; what programs do to each other is computed, and no parameter is fitted to
//! co-runs. That makes the machine's error a fair measure of the theory, which forecasts use too.
//!
//! For example, a chase of 3 MiB and a stream share 4 MiB under LRU. The cache holds what was
//! touched since a cut-off time, the same for both. If the stream touches 2 MiB in the time in
//! which the chase goes once around, 5 MiB do not fit, so the cut-off falls short of a round and
//! the chase always misses; its misses slow it down, so the stream touches even more. The fixed
//! point is the state in which both run until something changes.
//!
//! Sets are not simulated, because a sample of them would need addresses and profiles have none;
//! conflict misses are therefore missing here. docs/simulators/interval.md states the accuracy.
//!
//! # Invariants
//! - The same calls give the same bits.
//! - A program alone runs as its profile states.
//! - A line waits for no more than the others' lines in flight, and no server transfers more than
//!   it can.
//! - Steps of any length end in the same state.

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
