//! Experiments at nominal time, and the validation of the interval machine by the cycle-level machine, for the same
//! programs and work ([`validation`]).
//!
//! Every program is measured alone, phase by phase, at eight sizes of the contended cache ([`crate::phased_profile`]).
//! Co-runs are drawn from the seed and measured on the cycle-level machine ([`draw`]). The interval machine predicts
//! them from the profiles alone, and the two are compared ([`score`]). Nothing is fitted to a co-run.

mod conformance;
mod day;
mod draw;
#[cfg(test)]
mod forecast_tests;
pub mod nominal;
pub(crate) mod offline;
mod online;
mod predict;
mod score;
mod speed;
mod validation;
pub(crate) mod whatif;

use crate::ExperimentRun;

/// Experiments that are not from a paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("INTERVAL-1", conformance::run),
    ("INTERVAL-2", online::sizing::run),
    ("INTERVAL-4", online::many::run),
    ("INTERVAL-8", day::run),
    ("VALIDATION-1", validation::run_machine),
    ("VALIDATION-2", validation::run_forecasts),
];
