//! Exact LRU stack distances.
//!
//! The stack distance of an access is the number of *other* distinct lines touched since its line was last touched. It
//! is 0 for an immediate repeat; a first touch has none (cold). A fully associative LRU cache of `s` lines hits exactly
//! the accesses with a distance below `s`, so one histogram of distances is the miss-rate curve for every size at once.

//!
//! [`StackDistances`] is the single-threaded engine. A *finder* finds the time slot of the line's last access
//! (`dense.rs`, `sparse.rs`). A *counter* provides the number of slots since then that are dead because their lines
//! occurred again (`counter.rs`). The distance is the number of the other slots. Properties: one pass over a stream;
//! memory in proportion to the distinct lines, not to the length; no recursion; nothing to tune; the same result with
//! every instruction set.

mod batch;
mod counter;
mod dense;
mod exact;
mod finder;
mod histogram;
mod parallel;
mod rename;
mod slot_allocator;
mod sparse;
mod split;
mod tally;
#[cfg(test)]
mod tests;

pub(crate) use counter::DeadSlotCounter;
pub use exact::StackDistances;
pub use histogram::{DistanceHistogram, ParseHistogramError};
pub use parallel::ParallelStackDistances;
pub use split::{SplitStackDistances, StackScope, StackUnit};

/// The error for more distinct lines than the engine can number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("stack distances: found more than {limit_lines} distinct lines, expected at most that many")]
pub struct StackError {
    /// Number of distinct lines that the engine can distinguish.
    pub limit_lines: u64,
}
