//! From traces to curves, profiles, predictions and plans as answers.
//!
//! Problem: every front end answers the same questions, and must answer the same. Method: the engines
//! are the libraries'; here they are fed together, and what they found is put under the names of files and answers.
//! Properties: no file is opened and nothing is printed here; callers bring records and show answers.

#![warn(missing_docs)]

mod curve;
mod kernel_footprint;
mod prediction;
mod profiling;

pub use curve::{
    DistanceEngine, PartTotals, check_line_bytes, check_rate, counted, counted_from_sample, sizes_in_equal_ratios,
    usual_sizes, whole_curve,
};
pub use kernel_footprint::KernelFootprint;
pub use prediction::{USUAL_SCHEME, cache_summary, matrix_of, pair_costs, plan_picture, unit_of};
pub use profiling::{ProfilePass, ProfileTarget, on_target};

use cachemate_locality::cachesim::GeometryError;
use cachemate_locality::stack::StackError;

/// A question that cannot be answered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StudyError {
    /// Nothing to share.
    #[error("machine '{0}' has no data cache to share")]
    NoSharedCache(String),
    /// The profiled cache cannot be.
    #[error(transparent)]
    Shape(#[from] GeometryError),
    /// More distinct lines than stack distances can be told of.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// A profile that was made for other lines.
    #[error(
        "profile of '{program}': found stack distances for lines of {found} bytes, expected {expected}: profile its recording with --machine"
    )]
    OtherLines {
        /// Whose profile.
        program: String,
        /// Line sizes that it has, in words.
        found: String,
        /// The target's.
        expected: u32,
    },
    /// A scheme needs what a profile does not have.
    #[error(
        "scheme '{scheme}' needs {what}, which the profile of '{program}' does not have; recordings with instruction counts \
         (cachemate record) have it"
    )]
    Without {
        /// The scheme's name.
        scheme: &'static str,
        /// The evidence.
        what: &'static str,
        /// Whose profile.
        program: String,
    },
}
