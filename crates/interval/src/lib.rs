//! A second simulated machine: hours of nominal time in seconds.
//!
//! Programs are profiles: phases with rates by size of the contended cache. The machine composes them by theory alone;
//! nothing in it is fitted on programs that run together. docs/interval.md says how true it is.

pub mod by_hand;
mod cores;
pub mod curve;
pub mod engine;
pub mod flow;
pub mod machine;
pub mod memory;
pub mod program;
mod sharing;
pub mod stack;
pub mod turns;

pub use machine::{Defects, Event, IntervalMachine, Job, JobResults, Options, Results};
pub use program::{BadProgram, Demand, Phase, Point, PrivateLevel, Program, RegionUse, Unaided};
