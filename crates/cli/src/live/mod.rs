//! What the commands of the live host share: paths, the host as a machine, the daemon, and its socket.

pub mod chaos_policies;
pub mod colored;
pub mod daemon;
pub mod dry_run;
pub mod host;
mod http;
pub mod live_bench;
pub mod metrics;
pub mod page;
pub mod paths;
pub mod picture;
pub mod places;
pub mod programs;
pub mod sharing;
pub mod socket;
pub mod status;
pub mod view;
