//! The types that cross rooms, and the one loop in which the stages meet.
//!
//! Rules that the types carry: absent evidence is a missing entry or `None`, never zero; units stand last in a name;
//! ids are dense, given by the machine in order of arrival and never reused within a run; every `Vec` of tasks is in
//! order of arrival, and ties are broken by that order, never by the id's value.

#![warn(missing_docs)]

mod access;
mod applied;
mod changes;
mod check;
mod decide;
mod fact;
mod machine;
mod machine_spec;
mod names;
mod nearest;
mod percent_matrix;
mod pipeline_config;
mod plan;
mod profile;
mod random;
mod room;
mod run_loop;
mod seen;
pub mod test_kit;

pub use access::*;
pub use applied::*;
pub use changes::*;
pub use check::*;
pub use decide::*;
pub use fact::*;
pub use machine::*;
pub use machine_spec::*;
pub use names::*;
pub use nearest::*;
pub use percent_matrix::*;
pub use pipeline_config::*;
pub use plan::*;
pub use profile::*;
pub use random::*;
pub use room::*;
pub use run_loop::*;
pub use seen::*;

#[cfg(test)]
mod carries_tests;
