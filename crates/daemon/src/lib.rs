//! The management of the live host, without a command line: the daemon, and the parts that the
//! commands for a live host share.
//!
//! A loop that decides once a second must not wait for anybody who looks at it, and each viewer,
//! scraper and client could make it wait. So the loop makes one value of each window ([`status`]),
//! and threads with limits of their own (connections, seconds, bytes) hand it out. A command parses
//! its arguments and calls [`daemon::run`]; other commands query the running daemon through
//! [`socket`], test the host with [`host::survey_host`], or start programs with [`programs`] and
//! [`colored_program`].
//!
//! For example, a user opens a thousand connections to the socket and sends nothing. He keeps 16 of
//! them, each for at most 5 s. Root connects to a socket of its own and is answered at once, and
//! the next window begins when it would have begun.
//!
//! A process that acts starts its own executable again as `guardian --state-dir FOLDER`, so a
//! program that uses this crate to act must provide that command.
//!
//! # Invariants
//! - Nothing is changed unless the configuration says `mode = "act"`.
//! - No client delays a window, and no user another user's answer.
//! - The history of losses has at most 50 MB, and a crash or a wrong clock costs little of it.
//! - An invalid configuration leaves the one in force.

#![warn(missing_docs)]

// Tests without the feature only compile them.
#[cfg(any(test, feature = "chaos"))]
#[cfg_attr(not(feature = "chaos"), allow(dead_code))]
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
pub mod unit_sandbox;

pub use cachemate_trace::end_with_parent;
pub use metrics::OPEN_METRICS;
