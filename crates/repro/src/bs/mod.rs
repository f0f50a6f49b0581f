//! BS (papers BS): the caches and throughput of a multithreaded chip, and scheduling by group miss ratios.
//!
//! The paper calls its workload "SPEC CPU"; the runs here use one copy of every SPEC CPU2000 program in the table.

mod balance_sets;
mod first_level;
mod model;
mod stretch;

use crate::ExperimentRun;

/// All experiments of the paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("BS-1", first_level::run),
    ("BS-2 BS-3 BS-4 BS-6", balance_sets::run),
    ("BS-5", model::run),
];
