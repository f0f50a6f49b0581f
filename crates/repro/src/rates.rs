//! Speeds of programs, from which all results are computed.

use serde::{Deserialize, Serialize};

/// Rates of one program over its work.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProgramRates {
    /// Instructions divided by elapsed cycles.
    pub instr_per_cycle: f64,
    /// Demand misses of the last-level cache per thousand instructions.
    pub misses_per_kilo_instr: f64,
    /// Cycles per thousand instructions in which the program waited for data from beyond the first level.
    pub data_stalls_per_kilo_instr: f64,
    /// Time on a CPU divided by the time that the work took.
    pub run_time_share: f64,
    /// Whether the work was finished. Otherwise the rates cover the part that was finished when the run was abandoned,
    /// or the whole run if the program did not reach the beginning of its work.
    pub finished: bool,
}

/// Instructions per cycle of each program.
pub(crate) fn speeds(rates: &[ProgramRates]) -> Vec<f64> {
    rates.iter().map(|rates| rates.instr_per_cycle).collect()
}
