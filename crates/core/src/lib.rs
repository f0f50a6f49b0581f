//! The types that crates share, and the one loop that connects the stages.
//!
//! A policy that was tried on a simulator can be trusted on a host only if nothing but data passes
//! between the two, because code that reaches into a machine behaves differently on another one. So
//! machines, profilers, policies and the verifier meet here, in plain values: an [`Observation`] of
//! a window, [`Profiles`] of tasks, a [`Plan`] for the next window, and the changes that lead from
//! the state in force to that plan. [`ControlLoop`] passes them on, and is the only code that knows
//! the order.
//!
//! For example, the counters of window 41 say that task 7 missed 30 times per thousand
//! instructions. The profile of task 7 then has a [`Fact`] with the value 30, its source and the
//! window 41. Task 9, whose misses were not counted because its counters were multiplexed away, has
//! no such fact, so no policy takes it for a program that never misses. The plan gives task 9 four
//! of sixteen ways; the list of changes has one new group, one mask and one moved thread, and each
//! knows its inverse.
//!
//! A plan is a whole state and not a list of commands, because a list cannot be compared with what
//! is in force after a daemon died half-way, and a state can.
//!
//! # Invariants
//! - Missing evidence is a missing entry or `None`, and never zero.
//! - The unit stands last in a name: `latency_cycles`, `size_bytes`.
//! - Ids are dense, assigned by the machine in order of arrival and never reused within a run.
//!   Every `Vec` of tasks is in order of arrival, and that order, never the id's value, breaks
//!   ties.
//! - No machine receives a plan that starves a task or overcommits a cache (`check_plan`).
//! - Applying the list of changes of a plan gives the plan, applying it twice changes nothing, and
//!   any prefix of it can be undone.
//! - Nothing here opens a file or reads a clock; random numbers follow from a seed.

#![warn(missing_docs)]

mod access;
mod allocation;
mod applied;
mod changes;
mod check;
mod fact;
mod field_error;
mod host_report;
mod ids;
mod line_lifetime;
mod machine;
mod machine_event;
mod machine_spec;
mod measured_matrix;
mod observation;
mod pipeline_config;
mod plan;
mod policy;
mod profile;
mod promise;
mod random;
mod run_loop;
mod run_settings;
mod sample_quantiles;
mod service;
mod service_profiles;
mod stream_sample;
mod suggestion;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;

pub use access::*;
pub use allocation::*;
pub use applied::*;
pub use changes::*;
pub use check::*;
pub use fact::*;
pub use field_error::*;
pub use host_report::*;
pub use ids::*;
pub use line_lifetime::*;
pub use machine::*;
pub use machine_event::*;
pub use machine_spec::*;
pub use measured_matrix::*;
pub use observation::*;
pub use pipeline_config::*;
pub use plan::*;
pub use policy::*;
pub use profile::*;
pub use promise::*;
pub use random::*;
pub use run_loop::*;
pub use run_settings::*;
pub use sample_quantiles::*;
pub use service::*;
pub use service_profiles::*;
pub use stream_sample::*;
pub use suggestion::*;

#[cfg(test)]
mod mechanism_tests;
