//! CASC (papers CASC): 18 threads on two cores of four contexts, from 48 to 768 KB of L2.

mod comparison;
mod estimates;
mod overhead;

use crate::ExperimentRun;

/// All experiments of the paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("CASC-1 CASC-2 CASC-3 CASC-6", comparison::run),
    ("CASC-4 CASC-5", estimates::run),
    ("CASC-7 CASC-8", overhead::run),
];
