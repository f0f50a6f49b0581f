//! The management of the live host, without a command line: the daemon, and the parts that the commands for a live host
//! share.
//!
//! A command parses its arguments and calls [`daemon::run`]; other commands query the running daemon through
//! [`socket`], test the host with [`host::survey_host`], or start programs with [`programs`] and [`colored_program`]. A
//! process that acts starts its own executable again as `guardian --state-dir FOLDER`, so a program that uses this
//! crate to act must provide that command.

#![warn(missing_docs)]

#[cfg(feature = "chaos")]
mod chaos_policies;
pub mod colored_program;
pub mod daemon;
pub mod dry_run;
mod endpoints;
pub mod guardian;
pub mod host;
mod host_means;
mod http;
pub mod loss_history;
mod metrics;
pub mod path_checks;
pub mod paths;
pub mod programs;
pub mod rule_report;
pub mod service_profiles;
mod service_watch;
pub mod socket;
pub mod status;

pub use cachemate_trace::end_with_parent;
pub use metrics::OPEN_METRICS;
