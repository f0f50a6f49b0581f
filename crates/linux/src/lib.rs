//! The live host as a machine that policies can observe and change.
//!
//! Everything that can harm a host is in this crate, and a daemon is killed without notice, so two
//! rules hold for all of it: nothing is changed before its original is on the disk, and a second
//! process, the guardian, restores the originals if the first one dies. What a host lacks (counters
//! in a guest, ways on a desktop, a kernel's scheduler extension) is found by trying, and reported
//! as a missing ability with its reason, so that a policy never waits for what cannot come.
//!
//! For example, a plan gives a stream a quarter of the ways. The journal has the thread's old
//! group, the guardian runs, and a group `cachemate-PID-START-N` is made, gets its mask, and then
//! its thread. The mask that the kernel then shows goes into the applied plan; if another tool has
//! taken the last class of service meanwhile, the item is refused with the kernel's message, and
//! all else goes on.
//!
//! All paths are below an injected root, so that tests can use artificial trees.
//!
//! # Invariants
//! - Before the first change, the original is in the journal and a guardian is running.
//! - A fault at any call loses no original.
//! - What is in force is read back. Changes by others are reported, and never undone.
//! - No program is stopped; members of a gang that has no turn run as idle tasks.
//! - Real-time and deadline threads are left alone.
#![warn(missing_docs)]

pub mod act;
pub mod kernel;
pub mod machine;
mod missing_facility;
pub mod nri;
pub mod safety;
pub mod sense;

pub use missing_facility::MissingFacility;

#[cfg(test)]
mod fake_tests;
#[cfg(test)]
mod faults_tests;
#[cfg(test)]
mod skip_test;
#[cfg(test)]
mod stranger_tests;
