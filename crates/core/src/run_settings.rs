//! Settings of a simulated run, which scenarios state and simulators follow.

use serde::{Deserialize, Serialize};

/// The limit of a run, in the unit of the variant. No time scale divides it, because it is that of the actual run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunLimit {
    /// Cycles of the machine's CPUs.
    Cycles(u64),
    /// Time on the machine.
    Ns(u64),
    /// Instructions of all programs together.
    Instructions(u64),
    /// Completions that every program must reach; finished ones restart (CA: three).
    Completions(u32),
}

/// The errors of counters, as shares of a reading.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CounterNoise {
    /// Standard deviation of a reading.
    pub noise: f64,
    /// Autocorrelation of the noise, from one window to the next.
    pub autocorrelation: f64,
    /// Standard deviation of a count in one turn of a multiplexed group.
    pub multiplexing_noise: f64,
    /// Share of a task's events that are booked to the next task on its CPU.
    pub skew: f64,
}

impl Default for CounterNoise {
    fn default() -> Self {
        CounterNoise {
            noise: 0.01,
            autocorrelation: 0.5,
            multiplexing_noise: 0.1,
            skew: 0.0,
        }
    }
}
