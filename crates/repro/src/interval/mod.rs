//! Is the interval machine true? Its predictions against the cycle-level machine: same programs, same work.
//!
//! Every program is measured alone, phase by phase, at five sizes of the contended cache ([`measure`]). Co-runs are drawn
//! from the seed and measured on the cycle-level machine ([`draw`]). The interval machine predicts them from the profiles
//! alone, and the two are compared ([`score`]). Nothing is fitted on a co-run.

mod conformance;
pub mod draw;
pub mod measure;
pub mod nominal;
mod online;
pub mod planned;
pub mod predict;
pub mod scenario;
pub mod score;
pub mod speed;
pub mod whatif;

use serde::{Deserialize, Serialize};

use crate::{Context, Experiment, ReproError};

/// Results of our own, beside the papers'.
pub fn experiments() -> Vec<Experiment> {
    vec![
        ours(
            &["INTERVAL-1"],
            "every policy for 10 000 windows: nobody starves, changes an hour, memory",
            5.0,
            conformance::run,
        ),
        ours(&["INTERVAL-2"], "sizing online at nominal time (RM-4): once settled, and its price", 5.0, online::sizing),
        ours(&["INTERVAL-3"], "DIO at nominal time (CA-6): once settled, and its price", 5.0, online::placing),
        ours(&["INTERVAL-4"], "four and eight programs sized online at nominal time (MULTI)", 10.0, online::many),
        ours(&["INTERVAL-5"], "a floor and fairness at nominal time (GOALS)", 2.0, online::goals),
        ours(&["INTERVAL-6"], "what CASC's measuring costs at nominal time (CASC-7)", 2.0, online::measuring),
    ]
}

type Run = fn(&Context<'_>) -> Result<Vec<crate::Finding>, ReproError>;

fn ours(ids: &'static [&'static str], what: &'static str, full_minutes: f64, run: Run) -> Experiment {
    Experiment { ids, what, full_minutes, run }
}

/// All that was measured: what predictions start from, and what they are held against.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Truth {
    /// Seed of the draw.
    pub seed: u64,
    /// Few programs and short runs.
    pub quick: bool,
    /// One for each machine.
    pub benches: Vec<draw::Measured>,
}

/// Measures programs and co-runs on all machines that `known` has not; `each` keeps what there is after every machine.
///
/// # Errors
/// A run that fails, what `each` says, or the interruption.
pub fn truth(
    context: &Context<'_>,
    known: Option<Truth>,
    mut each: impl FnMut(&Truth) -> Result<(), ReproError>,
) -> Result<Truth, ReproError> {
    let seed = context.seeds[0];
    let mut found = known.unwrap_or(Truth { seed, quick: context.quick, benches: Vec::new() });
    for setup in draw::setups(found.quick) {
        if found.benches.iter().all(|bench| bench.machine != setup.machine) {
            found.benches.push(draw::measured(context, &setup, found.seed)?);
            each(&found)?;
        }
    }
    Ok(found)
}
