//! A deterministic cycle-level simulator of a multicore: its hardware, an operating system, and programs to run on
//! it.
//!
//! The simulator replaces the host if the host has no counters, no partitions or only one cache, and it is the
//! reference on which every policy is scored. The same seed gives the same bits on any host.
#![warn(missing_docs)]

mod baseline;
pub mod hw;
pub mod kernels;
pub mod machine;
pub mod metrics;
pub mod os;
pub mod results;
pub mod run;

pub use hw::check_machine;
