//! Exact LRU stack distances.
//!
//! The stack distance of an access is the number of *other* distinct lines touched since its line was last touched. It
//! is 0 for an immediate repeat; a first touch has none (cold). A fully associative LRU cache of `s` lines hits exactly
//! the accesses with a distance below `s`, so one histogram of distances is the miss-rate curve for every size at once.
//!
//! [`StackDistances`] is the single-threaded engine. A *finder* finds the time slot of the line's last access
//! (`dense.rs`, `sparse.rs`). A *counter* counts the later slots that are dead because their lines have occurred again
//! (`counter.rs`). The distance is the number of the other later slots. A [`Segment`] is an engine for a stretch of a
//! stream, which merges with that of the next stretch (`segment.rs`), so that several threads can share the work
//! (`parallel.rs`).
//!
//! Properties: the engine reads a stream once, without recursion. Its memory grows with the number of distinct lines,
//! up to a cap if distances beyond it need not be told apart, and not with the length of the stream. It has no
//! parameters to tune, and every instruction set gives the same result.

mod batch;
mod counter;
mod dense;
mod exact;
mod finder;
mod histogram;
mod parallel;
mod rename;
mod segment;
mod slot_allocator;
mod sparse;
mod tally;
#[cfg(test)]
mod tests;

pub(crate) use counter::DeadSlotCounter;
pub use exact::{COLD, StackDistances};
pub use histogram::{DistanceHistogram, ParseHistogramError};
pub use parallel::{MeasuredRange, SegmentMeter, SegmentStream, measure_ranges};
pub use segment::{Segment, SegmentDistances, SegmentParts, StackLimits};

/// The error for a trace with more distinct lines than the engine can number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "stack distances: found more than {limit_lines} distinct lines, expected at most that many"
)]
pub struct StackError {
    /// Maximum number of distinct lines.
    pub limit_lines: u64,
}
