//! What the commands of the live host show: the daemon's status in words and on a screen, shared caches, live benchmarks.

pub mod live_bench;
pub mod picture;
pub mod sharing;
pub mod view;
