//! What only the complete command has: programs and traces, simulated machines, clusters.
//!
//! The daemon's package is small because it leaves this folder out, with the crates that only this
//! folder uses.

pub mod cluster_args;
pub mod commands;
mod goal_plan;
mod input;
mod interval_programs;
mod pinning;
mod prediction;
mod programs;
mod repro_run;
mod repro_store;
mod run_store;
mod shards;
mod size_list;
mod traces;
