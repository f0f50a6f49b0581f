//! RM: RapidMRC, miss-rate curves of running programs from short logs, and phases (thesis ch. 5). RM-4 is
//! here as in the thesis, and with the partitions (`cp`) as online choices.

mod accuracy;
mod aggregate;
mod alternating;
mod overhead;
mod phases;
mod remeasure;
mod sensitivity;
mod solo;

use crate::ExperimentRun;

/// All experiments of the paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("RM-1", accuracy::run),
    ("RM-2 RM-3", sensitivity::run),
    ("RM-4", aggregate::run),
    ("RM-5", phases::run),
];
