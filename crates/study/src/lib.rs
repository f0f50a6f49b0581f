//! Turns traces into curves, profiles, predictions and plans.
//!
//! The command, the report and the Python package answer the same questions, and two of them that
//! differ in the last digit would leave users to find out which is right. So the engines are in
//! other crates, the front ends only parse and print, and what lies between is here: this crate
//! feeds the engines and converts their output to the types of files and results.
//!
//! For example, `cachemate mrc gzip.cmt` and `cachemate.mrc(trace)` both make a [`CurveRequest`] for
//! the records and ask for the curve at [`default_sizes`]; a recording in bursts goes through
//! [`BurstDistances`], which knows how far it can see, so neither front end can draw the part of a
//! curve that nothing was measured for.
//!
//! # Invariants
//! - This crate opens no file and prints nothing; callers supply records and show results.
//! - A total is known only if the value of every part is.
//! - A curve ends where its data do.

#![warn(missing_docs)]

mod bursts;
mod curve;
mod curve_measurement;
mod kernel_footprint;
mod prediction;
mod profiling;

pub use bursts::{BurstDistances, BurstSample, MeasuredDistances, refuse_late_bursts};
pub use curve::{
    PartTotals, check_line_bytes, check_rate, curve_counts, curve_counts_from_sample,
    default_sizes, drop_filtered_sizes, sizes_in_equal_ratios, whole_curve,
};
pub use curve_measurement::{
    CurveMeasurement, CurveRequest, CurveSubject, MeasureError, MeasuredCurves, StoredSegment,
    TraceOpener, WholeCurve, cpu_count, limits_for_sizes, to_lines,
};
pub use kernel_footprint::KernelFootprint;
pub use prediction::{
    DEFAULT_SCHEME, cache_summary, cost_table, cost_unit, pair_costs, plan_result,
};
pub use profiling::{
    ProfilePass, ProfileTarget, burst_reach_bytes, profile_for_target, whole_distances,
};

use cachemate_locality::stack::StackError;

/// The reason why a study cannot be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StudyError {
    /// The machine has no shared cache.
    #[error("machine '{0}' has no data cache to share")]
    NoSharedCache(String),
    /// The profiled cache is invalid.
    #[error(transparent)]
    Shape(#[from] cachemate_core::FieldError),
    /// More distinct lines than stack distances support.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// A recording in bursts was read as a stream, where the bursts are known only at its end.
    #[error(
        "found a recording in bursts that cannot be read from its end, expected a plain .cmt file: distances would cross its pauses"
    )]
    LateBursts,
    /// The trace cannot tell lines of this size.
    #[error("{0}: {1}")]
    SmallLines(String, String),
    /// The profile was made for another line size.
    #[error(
        "profile of '{program}': found stack distances for lines of {found} bytes, expected {expected}: profile its recording with --machine"
    )]
    OtherLines {
        /// The program of the profile.
        program: String,
        /// Line sizes of the profile.
        found: String,
        /// The target's line size.
        expected: u32,
    },
    /// The profile lacks data that the model needs.
    #[error(
        "scheme '{scheme}' needs {what}, which the profile of '{program}' does not have; recordings with instruction counts \
         (cachemate record) have it"
    )]
    Without {
        /// The model's name.
        scheme: &'static str,
        /// The missing data.
        what: &'static str,
        /// The program of the profile.
        program: String,
    },
}
