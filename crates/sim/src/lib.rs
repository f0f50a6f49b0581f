//! A deterministic cycle-level simulator of a multicore: its hardware, an operating system, and
//! programs to run on it.
//!
//! A policy has to be tried on hardware that is not there: a Niagara, four L2s on two front-side
//! buses, a Power5 with colored pages. A table of miss rates would not do, because it reacts to
//! nothing: what a placement changes is who evicts whom, in which set, and how long the bus is busy
//! afterward. So every access of real algorithms passes through caches, coherence, prefetchers,
//! buses and an operating system ([`hw`], [`os`], [`kernels`]), slowly enough that runs are
//! milliseconds long, and exactly enough that every cycle and every miss has one owner.
//!
//! For example, after 20 million cycles of four programs on `xeon-x5365-4`, 38 % of mcf's misses
//! were cold, 58 % were on lines that it evicted itself and 4 % on lines that others evicted. No
//! host counts that, and it is what a policy that separates mcf from the others can gain.
//!
//! Branch prediction, functional units and TLB misses are left out, because a policy for caches
//! cannot tell them from a slower core. docs/simulators/cycle.md states what is modeled, and how it
//! compares with real machines.
//!
//! # Invariants
//! - The same seed gives the same bits on any host, and on any number of host threads.
//! - Counters add up: every cycle and every miss has one owner.
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
