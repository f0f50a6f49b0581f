//! What the commands of the live host share: paths, the host as a machine, the daemon, and its socket.

pub mod colored;
mod crowd;
pub mod daemon;
pub mod dry_run;
pub mod host;
mod http;
pub mod metrics;
pub mod paths;
pub mod picture;
pub mod places;
pub mod programs;
pub mod shake;
pub mod sharing;
pub mod show;
pub mod socket;
pub mod status;
pub mod view;
