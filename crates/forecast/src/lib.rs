//! Forecasts how much programs that share a cache slow each other down, with intervals: for
//! `predict`, `plan` and `report` unless they are asked for a paper's scheme, for the wheel, and
//! for programs of interval scenarios.
//!
//! A miss ratio says little about run time, because misses overlap, wait for bandwidth, and are
//! fetched ahead. So a program's cycles, misses, overlap and prefetches follow from a walk of the
//! machine's window over a sample of its accesses ([`walked`]), and the interval machine composes
//! the programs ([`forecast_placed`]). A sample without dependences is taken for one whose misses
//! are independent, and the interval includes programs of which every second load waits for the one
//! before. Without a sample, cycles and overlap are drawn from a prior ([`prior`]), and the
//! forecast is the median of the draws. The 90 % interval adds the model's own error, as measured
//! on other programs (docs/simulators/interval.md, accuracy against the cycle-level machine). In a
//! shared cache, rates are means over sets ([`set_means`]). The interval also adds the slowdowns
//! with a little more and less space, because a working set that nearly fits may hit or miss
//! always, depending on how pages fall into sets.
//!
//! For example, a chase over 3 MB and a stream share 4 MB. The walk says that the chase takes 0.4
//! cycles an instruction with all of the cache and 60 with half of it, the stream takes its share
//! of the cache at its rate of fills, and the interval machine finds the sizes at which both rates
//! agree.
//!
//! Why not run the pair on the cycle-level machine? It would need 25 to 60 CPU seconds a program,
//! and its answer would hold for one choice of page frames.
//!
//! # Invariants
//! - No co-run is an input, and nothing is fitted to one.
//! - More uncertain inputs give wider intervals.
//! - A recording and its profile file give the same digits.
//! - Only [`TimedProgram::from_recording`] reads a file; the rest is pure.

#![warn(missing_docs)]

mod composition;
pub mod plan_search;
pub mod prior;
pub mod set_means;
mod timed_program;
pub mod walked;

pub use composition::{
    MemberForecast, SoloForecast, costs_of_pairs, forecast_alone, forecast_pairs, forecast_placed,
    forecast_together, group_miss_ratio, place_programs, slowdown_with_error,
};
pub use timed_program::{TimedProgram, TimingBasis};

use cachemate_papers::placement::PlacementError;

/// The reason why there is no forecast.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{subject}: {reason}")]
pub struct ForecastFailure {
    /// The program, or the machine.
    pub subject: String,
    /// What was found, and what was expected.
    pub reason: String,
}

/// The result of a part of a forecast.
pub type ForecastResult<T> = Result<T, ForecastFailure>;

/// Converts any error to a forecast's error about `subject`.
fn failed<E: std::fmt::Display>(subject: &str) -> impl Fn(E) -> ForecastFailure {
    let subject = subject.to_string();
    move |error| ForecastFailure {
        subject: subject.clone(),
        reason: error.to_string(),
    }
}

impl From<PlacementError> for ForecastFailure {
    fn from(error: PlacementError) -> Self {
        failed("placement")(error)
    }
}
