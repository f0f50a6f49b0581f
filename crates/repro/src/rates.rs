//! The speed of a program, in the measures from which all results are computed.

use serde::{Deserialize, Serialize};

/// Rates of one program over its work.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProgramRates {
    /// Instructions per elapsed cycle.
    pub instr_per_cycle: f64,
    /// Demand misses of the last-level cache per thousand instructions.
    pub misses_per_kilo_instr: f64,
    /// Cycles per thousand instructions in which it waited for data from beyond the first level.
    pub data_stalls_per_kilo_instr: f64,
    /// Time on a processor as a share of the time that the work took.
    pub run_time_share: f64,
    /// Whether the work was finished. Otherwise the rates are those of the part that was finished when the run was
    /// abandoned, or of the whole run if the program did not reach the beginning of the work.
    pub finished: bool,
}
