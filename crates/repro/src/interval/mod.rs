//! Validates the interval machine by comparing its predictions with the cycle-level machine, for the same programs
//! and work.
//!
//! Every program is measured alone, phase by phase, at seven sizes of the contended cache ([`crate::phased_profile`]).
//! Co-runs are drawn from the seed and measured on the cycle-level machine ([`draw`]). The interval machine predicts
//! them from the profiles alone, and the two are compared ([`score`]). Nothing is fitted to a co-run.

mod conflict_free;
mod conformance;
pub mod draw;
pub mod forecast;
pub mod nominal;
pub mod offline;
mod online;
pub mod plan;
pub mod plan_search;
pub mod predict;
pub mod scenario;
pub mod score;
pub mod speed;
pub mod trade_offs;
pub mod whatif;

use serde::{Deserialize, Serialize};

use crate::{Experiment, ExperimentContext, ReproError};

/// Experiments that are not from a paper.
pub(crate) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            ids: &["INTERVAL-1"],
            title: "every policy for 10 000 windows: starvation, changes an hour, memory",
            full_minutes: 5.0,
            run: conformance::run,
        },
        Experiment {
            ids: &["INTERVAL-2"],
            title: "sizing online at nominal time (RM-4): once settled, and its price",
            full_minutes: 5.0,
            run: online::sizing::run,
        },
        Experiment {
            ids: &["INTERVAL-3"],
            title: "DIO at nominal time (CA-6): once settled, and its price",
            full_minutes: 5.0,
            run: online::placing::run,
        },
        Experiment {
            ids: &["INTERVAL-4"],
            title: "four and eight programs sized online at nominal time (MULTI)",
            full_minutes: 10.0,
            run: online::many::run,
        },
        Experiment {
            ids: &["INTERVAL-5"],
            title: "a floor and fairness at nominal time (GOALS)",
            full_minutes: 2.0,
            run: online::goals::run,
        },
        Experiment {
            ids: &["INTERVAL-6"],
            title: "what CASC's measuring costs at nominal time (CASC-7)",
            full_minutes: 2.0,
            run: online::measuring::run,
        },
        Experiment {
            ids: &["INTERVAL-7"],
            title: "a level of service for each client at nominal time (CP-5)",
            full_minutes: 1.0,
            run: online::serving::run,
        },
    ]
}

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
    mut on_bench: impl FnMut(&ValidationTruth) -> Result<(), ReproError>,
) -> Result<ValidationTruth, ReproError> {
    let seed = context.seeds[0];
    let mut truth = known_truth.unwrap_or(ValidationTruth { seed, quick: context.quick, benches: Vec::new() });
    for setup in draw::setups(truth.quick) {
        if truth.benches.iter().all(|bench| bench.machine != setup.machine) {
            truth.benches.push(draw::measure(context, &setup, truth.seed)?);
            on_bench(&truth)?;
        }
    }
    Ok(truth)
}
