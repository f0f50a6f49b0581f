//! Validates the interval machine by comparing its predictions with the cycle-level machine, for the same programs
//! and work.
//!
//! Every program is measured alone, phase by phase, at eight sizes of the contended cache ([`crate::phased_profile`]).
//! Co-runs are drawn from the seed and measured on the cycle-level machine ([`draw`]). The interval machine predicts
//! them from the profiles alone, and the two are compared ([`score`]). Nothing is fitted to a co-run.

mod conformance;
mod day;
pub mod draw;
#[cfg(test)]
mod forecast_tests;
pub mod nominal;
pub mod offline;
mod online;
pub mod predict;
pub mod score;
pub mod speed;
pub mod whatif;

use serde::{Deserialize, Serialize};

use crate::{ExperimentContext, ExperimentRun, Result};

/// Experiments that are not from a paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("INTERVAL-1", conformance::run),
    ("INTERVAL-2", online::sizing::run),
    ("INTERVAL-3", online::placing::run),
    ("INTERVAL-4", online::many::run),
    ("INTERVAL-5", online::goals::run),
    ("INTERVAL-6", online::measuring::run),
    ("INTERVAL-7", online::serving::run),
    ("INTERVAL-8", day::run),
];

/// All measurements of a validation: the inputs of predictions, and the truth.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ValidationTruth {
    /// Seed of the draw.
    pub seed: u64,
    /// Whether this is a quick validation, with few programs and short runs.
    pub quick: bool,
    /// Measurements of each machine.
    pub benches: Vec<draw::MachineTruth>,
}

/// Measures programs and co-runs on all machines that `known_truth` lacks. `on_bench` is called with the results so
/// far.
///
/// # Errors
/// A run fails, `on_bench` returns an error, or the user interrupts.
pub fn measure_truth(
    context: &ExperimentContext<'_>,
    known_truth: Option<ValidationTruth>,
    mut on_bench: impl FnMut(&ValidationTruth) -> Result<()>,
) -> Result<ValidationTruth> {
    let seed = context.seeds[0];
    let mut truth = known_truth.unwrap_or(ValidationTruth {
        seed,
        quick: context.quick,
        benches: Vec::new(),
    });
    for setup in draw::setups(truth.quick) {
        if truth
            .benches
            .iter()
            .all(|bench| bench.machine != setup.machine)
        {
            truth
                .benches
                .push(draw::measure(context, &setup, truth.seed)?);
            on_bench(&truth)?;
        }
    }
    Ok(truth)
}
