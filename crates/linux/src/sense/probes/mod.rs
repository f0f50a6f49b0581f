//! Measurements of caches without a PMU: by timing, from a thread of our own on a CPU nearby.
//!
//! Every probe is bounded in the program itself, runs at normal priority and reports the processor time it took.

pub mod intensity;
pub mod neighbor;
pub mod ping_pong;
mod pinned;
pub mod watch_candidates;
pub mod watchpoint;

pub(crate) use pinned::thread_time_ns;
pub use pinned::{PinnedThread, cycles_now};
