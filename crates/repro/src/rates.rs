//! How fast a program was, by the measures that all results are made of.

use serde::{Deserialize, Serialize};

/// Rates of one program over its work.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProgramRates {
    /// Per elapsed cycle.
    pub instr_per_cycle: f64,
    /// Demand misses of the last-level cache.
    pub misses_per_kilo_instr: f64,
    /// Cycles that it waited for data from beyond the first level.
    pub data_stalls_per_kilo_instr: f64,
    /// Time on a processor, of the time that the work took.
    pub run_time_share: f64,
    /// The work was finished. Otherwise the rates are those of the part that was done when the run was abandoned, or of the
    /// whole run if the program did not reach the beginning of the work.
    pub finished: bool,
}
