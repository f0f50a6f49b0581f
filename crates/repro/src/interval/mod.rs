//! Is the interval machine true? Its predictions against the cycle-level machine: same programs, same work.
//!
//! Every program is measured alone, phase by phase, at five sizes of the contended cache ([`measure`]). Co-runs are drawn
//! from the seed and measured on the cycle-level machine ([`draw`]). The interval machine predicts them from the profiles
//! alone, and the two are compared ([`score`]). Nothing is fitted on a co-run.

pub mod draw;
pub mod measure;
pub mod predict;
pub mod score;
pub mod speed;

use serde::{Deserialize, Serialize};

use crate::{Context, ReproError};

/// All that was measured: what predictions start from, and what they are held against.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Truth {
    pub seed: u64,
    pub quick: bool,
    pub benches: Vec<draw::Measured>,
}

/// Measures programs and co-runs on all machines.
///
/// # Errors
/// A run that fails, or the interruption.
pub fn truth(context: &Context<'_>) -> Result<Truth, ReproError> {
    let seed = context.seeds[0];
    let benches: Result<Vec<draw::Measured>, ReproError> =
        draw::setups(context.quick).iter().map(|setup| draw::measured(context, setup, seed)).collect();
    Ok(Truth { seed, quick: context.quick, benches: benches? })
}
