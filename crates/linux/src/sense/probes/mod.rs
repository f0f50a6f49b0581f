//! Measurements of caches without a PMU: by timing, from a thread of our own on a CPU nearby.
//!
//! Every probe limits its own duration, runs at normal priority and reports its processor time.

pub mod intensity;
pub mod neighbor;
pub mod ping_pong;
pub(crate) mod pinned;
pub mod watch_candidates;
pub mod watchpoint;

pub use pinned::{PinnedThread, cycles_now};
pub(crate) use pinned::{flush_line, thread_time_ns};
