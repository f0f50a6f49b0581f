//! A second simulated machine: hours of nominal time in seconds.
//!
//! Programs are profiles: phases with rates by size of the contended cache. The machine composes them by theory alone;
//! nothing in it is fitted on programs that run together. docs/interval.md says how true it is.

pub mod by_hand;
pub mod curve;
pub mod flow;
pub mod program;

pub use program::{BadProgram, Demand, Phase, Point, PrivateLevel, Program, RegionUse, Unaided};
