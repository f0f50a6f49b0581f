//! Stretches of a stream as a monoid: any stretch can be measured by itself, and neighbors merge to exactly what one
//! pass over both would have found.
//!
//! The stack distance of an access depends on nothing before the last touch of its line. So of a stretch only its first
//! touches remain open, and for those of the next stretch only the order of its last touches counts. A [`Segment`] is
//! therefore an engine that also lists its lines in order of first touch. To merge B into A, the engine of A looks up
//! B's first touches alone, each of which kills its slot in A: between a line's last touch in A and its first one in B
//! lie the lines that A touched later and those that B touched before, each once, however often B repeats them. Lines
//! that A does not know become first touches of both. B's lines get the next slots of A, in order of their last
//! touches, when accesses or another segment follow; the last merge of a stream ends without it. "Local infinities" of
//! PARDA (Niu, Dinan, Lu, Sadayappan, IPDPS 2012) are the same idea with one tree per process and a chain of processes.
//!
//! For example, A = x y x and B = y z: A has first touches x y, last touches y x, and one distance of 1. Merging finds
//! y under x, so y has distance 1, and z is new: first touches x y z, last touches x y z, two distances of 1.
//!
//! Properties: merging is associative, so every division of a stream and every order of merges gives the same bits. The
//! cost of a merge is that of the second segment's distinct lines, whatever the first one holds: its table is used as
//! it is. With a cap of K lines, a segment holds at most 2 K lines, and distances of K or more are one number, so that
//! memory is bounded for every stream.

use super::exact::FirstTouches;
use super::slot_allocator::FinderLimits;
use super::tally::Tally;
use super::{DistanceHistogram, StackDistances, StackError};
use crate::simd::Simd;

/// Bounds of the memory that distances may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StackLimits {
    /// Number of lines of the largest cache of interest: larger distances are not told apart.
    pub cap_lines: Option<usize>,
    /// Number of distinct lines that are an error; `None` stands for the engine's own limit, 2^31.
    pub max_lines: Option<usize>,
}

impl StackLimits {
    fn finder_limits(self) -> FinderLimits {
        let defaults = FinderLimits::default();
        FinderLimits {
            cap_lines: self.cap_lines.unwrap_or(defaults.cap_lines),
            max_lines: self
                .max_lines
                .map_or(defaults.max_lines, |lines| lines.min(defaults.max_lines)),
            ..defaults
        }
    }
}

/// The distances of a stretch of a stream, and what it means to the stretches before and after it. Push line addresses
/// or merge the next stretch, in any order.
#[derive(Debug)]
pub struct Segment {
    engine: StackDistances,
}

/// The distances of a segment to which nothing is added.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentDistances {
    /// All accesses by distance. Those that the cap does not tell apart count as first touches.
    pub histogram: DistanceHistogram,
    /// Number of accesses that the cap does not tell apart. If it is above 0, the number of distinct lines is unknown.
    pub beyond_count: u64,
}

/// A segment as plain data, for storage.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SegmentParts {
    /// Distinct lines in order of first touch; with a cap, the first ones.
    pub first_touches: Vec<u64>,
    /// Distinct lines in order of last touch; with a cap, the last ones.
    pub last_touches: Vec<u64>,
    /// Distances within the segment, without first touches.
    pub counts: Vec<(u64, u64)>,
    /// Accesses beyond the cap.
    pub beyond_count: u64,
}

impl Segment {
    /// Builds an empty segment with the widest vector instructions of this processor.
    pub fn new(limits: StackLimits) -> Self {
        Segment::with_limits(Simd::detect_best(), limits.finder_limits())
    }

    /// Like [`Self::new`] without limits, but with the given vector instructions, which do not affect the result.
    pub(crate) fn with_simd(simd: Simd) -> Self {
        Segment::with_limits(simd, FinderLimits::default())
    }

    pub(super) fn with_limits(simd: Simd, limits: FinderLimits) -> Self {
        Segment {
            engine: StackDistances::with_limits(simd, limits).with_first_touches(),
        }
    }

    /// Adds the next accesses, as line addresses.
    ///
    /// # Errors
    /// There are more distinct lines than the limit; the segment cannot be used afterward.
    pub fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        self.engine.push(lines)
    }

    /// Adds the accesses of `next`, which follow those of this segment, on up to this number of threads.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn merge(&mut self, next: Segment, threads: usize) -> Result<(), StackError> {
        self.engine.merge(next.engine, threads)
    }

    /// Lines that the segment holds, on which the cost of merging it depends.
    pub fn line_count(&self) -> usize {
        self.engine.lines()
    }

    /// Distances of all accesses, if nothing comes before this segment.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(self) -> Result<SegmentDistances, StackError> {
        let (tally, lines_below_cap, beyond_count) = self.engine.finish_counts()?;
        Ok(SegmentDistances {
            histogram: tally.finish(lines_below_cap + beyond_count),
            beyond_count,
        })
    }

    /// The segment as plain data, from which it can be built again elsewhere.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn into_parts(self) -> Result<SegmentParts, StackError> {
        let (first_touches, tally, last_touches) = self.engine.finish_segment()?;
        Ok(SegmentParts {
            first_touches: first_touches.lines,
            last_touches,
            counts: tally.finish(0).counts().to_vec(),
            beyond_count: first_touches.beyond_count,
        })
    }

    /// Builds a segment from stored data; `None` if no stream has such a segment under these limits.
    pub fn from_parts(parts: SegmentParts, limits: StackLimits) -> Option<Segment> {
        let limits = limits.finder_limits();
        let first_lines = sort_distinct(&parts.first_touches)?;
        let last_lines = sort_distinct(&parts.last_touches)?;
        let line_count = first_lines.len();
        let is_whole = line_count < limits.cap_lines;
        let is_within_limits = line_count <= limits.cap_lines.min(limits.max_lines);
        if !is_within_limits || last_lines.len() != line_count {
            return None;
        }
        if is_whole && (first_lines != last_lines || parts.beyond_count > 0) {
            return None;
        }
        let is_distance = |&(distance, _): &(u64, u64)| distance < line_count as u64;
        if !parts.counts.iter().all(is_distance) {
            return None;
        }

        let first_touches = FirstTouches {
            lines: parts.first_touches,
            beyond_count: parts.beyond_count,
        };
        let tally = Tally::from_histogram(&DistanceHistogram::new(0, parts.counts));
        let last_touches = &parts.last_touches;
        let engine = StackDistances::from_segment(limits, first_touches, tally, last_touches);
        Some(Segment {
            engine: engine.ok()?,
        })
    }
}

/// `None` if a line repeats.
fn sort_distinct(lines: &[u64]) -> Option<Vec<u64>> {
    let mut sorted_lines = lines.to_vec();
    sorted_lines.sort_unstable();
    let is_distinct = sorted_lines.is_sorted_by(|a, b| a < b);
    is_distinct.then_some(sorted_lines)
}
