//! A deterministic simulated multicore: hardware, an operating system on it, and programs for it.
//!
//! It serves as the machine if a host has no counters, no partitions or only one cache, and as the reference by which
//! every policy is scored. The same seed gives the same bits on any host.
#![warn(missing_docs)]

mod baseline;
pub mod hw;
pub mod kernels;
pub mod machine;
pub mod metrics;
pub mod os;
pub mod results;
pub mod run;
