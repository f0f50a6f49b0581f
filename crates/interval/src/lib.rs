//! A second simulated machine: hours of nominal time in seconds.
//!
//! Programs are profiles: phases with rates by size of the contended cache. The machine composes them by theory alone;
//! nothing in it is fitted on programs that run together. docs/interval.md says how true it is.

#![warn(missing_docs)]

pub mod by_hand;
mod cores;
mod curve;
pub mod engine;
mod flow;
mod machine;
mod memory;
mod program;
mod sharing;
mod stack;
mod turns;

pub use machine::{BadMachine, Defects, Event, IntervalMachine, Job, JobResults, Options, Results};
pub use program::{BadProgram, Demand, Phase, Point, PrivateLevel, Program, RegionUse, Unaided};
