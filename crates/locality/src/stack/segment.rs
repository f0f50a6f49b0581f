//! Stretches of a stream as a monoid: any stretch can be measured by itself, and neighbors merge to exactly what one
//! pass over both would have found.
//!
//! The stack distance of an access depends on nothing before the last touch of its line. So of a stretch only its first
//! touches remain open, and for those of the next stretch only the order of its last touches counts. A [`Segment`]
//! therefore holds the lines in order of first touch, the lines in order of last touch, and the histogram of all
//! distances within. To merge A and B, the ordinary engine runs over B's first touches alone, on a stack that starts as
//! A's last touches: between a line's last touch in A and its first one in B lie the lines that A touched later and
//! those that B touched before, each once, however often B repeats them. Lines that A does not have become first touches
//! of both; the last touches are A's without the lines of B, then B's. "Local infinities" of PARDA (Niu, Dinan, Lu,
//! Sadayappan, IPDPS 2012) are the same idea with one tree per process and a chain of processes.
//!
//! For example, A = x y x and B = y z: A has first touches x y, last touches y x, and one distance of 1. Merging finds y
//! under x, so y has distance 1, and z is new: first touches x y z, last touches x y z, two distances of 1.
//!
//! Properties: merging is associative, so every division of a stream and every order of merges gives the same bits. The
//! cost of a merge is that of the distinct lines of both, not of their accesses. With a cap of K lines, lists have at
//! most K lines and distances of K or more are one number, so that memory is bounded for every stream.

use std::sync::atomic::{AtomicU32, Ordering};

use super::batch::{BATCH_ACCESSES, SlotPairs};
use super::counter::DeadSlotCounter;
use super::exact::FirstTouches;
use super::finder::SlotFinder;
use super::slot_allocator::{FinderLimits, keep_newest};
use super::tally::Tally;
use super::{DistanceHistogram, StackDistances, StackError};
use crate::hash::scatter;
use crate::simd::{Lanes, Simd, dispatch};

/// Bounds of the memory that distances may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StackLimits {
    /// Number of lines of the largest cache of interest: larger distances are not told apart.
    pub cap_lines: Option<usize>,
    /// Number of distinct lines that are an error; `None` stands for the engine's own limit, 2^31.
    pub max_lines: Option<usize>,
}

impl StackLimits {
    pub(super) fn finder_limits(self) -> FinderLimits {
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

/// What a stretch of a stream means to the stretches before and after it.
#[derive(Debug)]
pub struct Segment {
    simd: Simd,
    limits: FinderLimits,
    /// Distinct lines in order of first touch; with a cap, the first ones.
    first_touches: Vec<u64>,
    /// Distinct lines in order of last touch; with a cap, the last ones.
    last_touches: Vec<u64>,
    /// Distances that are known.
    tally: Tally,
    /// Accesses at a distance of at least the cap, and first touches after the first `cap_lines` lines.
    beyond_count: u64,
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

/// Measures one segment: push line addresses, then [`finish`](Self::finish).
#[derive(Debug)]
pub struct SegmentBuilder {
    simd: Simd,
    limits: FinderLimits,
    engine: StackDistances,
}

impl SegmentBuilder {
    /// Builds an empty segment with the widest vector instructions of this processor.
    pub fn new(limits: StackLimits) -> Self {
        SegmentBuilder::with_limits(Simd::detect_best(), limits.finder_limits())
    }

    pub(super) fn with_limits(simd: Simd, limits: FinderLimits) -> Self {
        let engine = StackDistances::with_limits(simd, limits).with_first_touches();
        SegmentBuilder {
            simd,
            limits,
            engine,
        }
    }

    /// Adds the next accesses, as line addresses.
    ///
    /// # Errors
    /// Returns an error if there are more distinct lines than the limit; the builder cannot be used afterward.
    pub fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        self.engine.push(lines)
    }

    /// Returns the segment of all accesses.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(self) -> Result<Segment, StackError> {
        let SegmentBuilder {
            simd,
            limits,
            engine,
        } = self;
        let (first_touches, mut tally, last_touches) = engine.finish_segment()?;
        let FirstTouches {
            lines,
            beyond_count,
        } = first_touches;
        let beyond_count = beyond_count + tally.remove_beyond(limits.cap_lines);
        Ok(Segment {
            simd,
            limits,
            first_touches: lines,
            last_touches,
            tally,
            beyond_count,
        })
    }
}

impl Segment {
    /// Returns the number of lines on which the cost of a merge depends.
    pub fn line_count(&self) -> usize {
        self.first_touches.len()
    }

    /// Returns the segment of this stretch and the `next` one together, which is searched on this number of threads.
    ///
    /// # Errors
    /// Both together have more distinct lines than the limit.
    pub fn merge(self, next: Segment, threads: usize) -> Result<Segment, StackError> {
        let Segment {
            simd,
            limits,
            mut first_touches,
            mut last_touches,
            mut tally,
            mut beyond_count,
        } = self;
        let stack_len = last_touches.len();
        let line_count = stack_len + next.first_touches.len();
        let limit_error = StackError {
            limit_lines: limits.max_lines as u64,
        };
        if line_count >= u32::MAX as usize {
            return Err(limit_error);
        }
        let old_slots = find_slots(simd, limits, &last_touches, &next.first_touches, threads);

        let new_lines = next.first_touches.iter().zip(&old_slots);
        let new_lines = new_lines.filter(|(_, slot)| slot.load(Ordering::Relaxed) == 0);
        first_touches.extend(new_lines.map(|(&line, _)| line));
        if first_touches.len().min(limits.cap_lines) > limits.max_lines {
            return Err(limit_error);
        }
        let surplus = first_touches.len().saturating_sub(limits.cap_lines);
        first_touches.truncate(limits.cap_lines);

        let mut counter = DeadSlotCounter::new(line_count + 1);
        {
            let (counter, tally, old_slots) = (&mut counter, &mut tally, &old_slots[..]);
            dispatch!(simd, count_found(
                counter: &mut DeadSlotCounter, tally: &mut Tally, old_slots: &[AtomicU32], stack_len: usize
            ));
        }
        tally.add(next.tally);
        beyond_count += next.beyond_count + surplus as u64;
        beyond_count += tally.remove_beyond(limits.cap_lines);

        let dead_bits = counter.dead_bits();
        let mut slot = 0;
        last_touches.retain(|_| {
            slot += 1;
            dead_bits[slot / 64] >> (slot % 64) & 1 == 0
        });
        last_touches.extend_from_slice(&next.last_touches);
        keep_newest(&mut last_touches, limits.cap_lines);
        Ok(Segment {
            simd,
            limits,
            first_touches,
            last_touches,
            tally,
            beyond_count,
        })
    }

    /// Returns the histogram of all accesses, if nothing comes before this segment. Accesses beyond the cap count as first
    /// touches.
    pub fn into_histogram(self) -> DistanceHistogram {
        let cold_count = self.first_touches.len() as u64 + self.beyond_count;
        drop((self.first_touches, self.last_touches));
        self.tally.finish(cold_count)
    }

    /// Returns the number of accesses that the cap keeps from being told apart.
    pub fn beyond_count(&self) -> u64 {
        self.beyond_count
    }

    /// Returns the segment as plain data.
    pub fn into_parts(self) -> SegmentParts {
        SegmentParts {
            first_touches: self.first_touches,
            last_touches: self.last_touches,
            counts: self.tally.finish(0).counts().to_vec(),
            beyond_count: self.beyond_count,
        }
    }

    /// Builds a segment from stored data; `None` if no stream has such a segment under these limits.
    pub fn from_parts(parts: SegmentParts, limits: StackLimits) -> Option<Segment> {
        let limits = limits.finder_limits();
        let sort_distinct = |lines: &[u64]| {
            let mut sorted_lines = lines.to_vec();
            sorted_lines.sort_unstable();
            sorted_lines
                .is_sorted_by(|a, b| a < b)
                .then_some(sorted_lines)
        };
        let first_lines = sort_distinct(&parts.first_touches)?;
        let last_lines = sort_distinct(&parts.last_touches)?;
        let line_count = first_lines.len();
        let is_whole = line_count < limits.cap_lines;
        let has_same_lines = first_lines == last_lines;
        let is_within_limits = line_count <= limits.cap_lines.min(limits.max_lines);
        if !is_within_limits || last_lines.len() != line_count || is_whole && !has_same_lines {
            return None;
        }
        let is_distance = |&(distance, _): &(u64, u64)| distance < line_count as u64;
        if !parts.counts.iter().all(is_distance) || is_whole && parts.beyond_count > 0 {
            return None;
        }
        Some(Segment {
            simd: Simd::detect_best(),
            limits,
            first_touches: parts.first_touches,
            last_touches: parts.last_touches,
            tally: Tally::from_histogram(&DistanceHistogram::new(0, parts.counts)),
            beyond_count: parts.beyond_count,
        })
    }
}

/// Returns for each of `lines` its slot in `stack`, counted from 1; 0 if it is not there. Each thread searches the
/// lines of its own pages.
fn find_slots(
    simd: Simd,
    limits: FinderLimits,
    stack: &[u64],
    lines: &[u64],
    threads: usize,
) -> Vec<AtomicU32> {
    let mut found_slots = Vec::with_capacity(lines.len());
    found_slots.resize_with(lines.len(), || AtomicU32::new(0));
    let found = &found_slots[..];
    let search_part = |part: usize| {
        let mut search = PartSearch::new(limits, stack.len(), found);
        search.run_part(simd, stack, 1, (part, threads.max(1)));
        search.run_part(simd, lines, stack.len() as u32 + 1, (part, threads.max(1)));
    };
    if threads < 2 {
        search_part(0);
        return found_slots;
    }
    std::thread::scope(|scope| {
        for part in 0..threads {
            scope.spawn(move || search_part(part));
        }
    });
    found_slots
}

/// The search of one thread.
struct PartSearch<'a> {
    finder: SlotFinder,
    pairs: SlotPairs,
    stack_len: usize,
    found: &'a [AtomicU32],
}

impl<'a> PartSearch<'a> {
    fn new(limits: FinderLimits, stack_len: usize, found: &'a [AtomicU32]) -> Self {
        PartSearch {
            finder: SlotFinder::new(limits.kind),
            pairs: SlotPairs::new(),
            stack_len,
            found,
        }
    }

    /// Searches the lines of `list` that belong to part I of N; slots are counted from `first_slot`.
    fn run_part(
        &mut self,
        simd: Simd,
        list: &[u64],
        first_slot: u32,
        (part, part_count): (usize, usize),
    ) {
        let (mut lines, mut slots) = ([0; BATCH_ACCESSES], [0; BATCH_ACCESSES]);
        let mut len = 0;
        for (&line, slot) in list.iter().zip(first_slot..) {
            (lines[len], slots[len]) = (line, slot);
            let is_own = part_count == 1 || part_of_line(line, part_count) == part;
            len += usize::from(is_own);
            if len == BATCH_ACCESSES {
                self.run_batch(simd, &lines, &slots);
                len = 0;
            }
        }
        self.run_batch(simd, &lines[..len], &slots[..len]);
    }

    fn run_batch(&mut self, simd: Simd, lines: &[u64], slots: &[u32]) {
        let (finder, pairs) = (&mut self.finder, &mut self.pairs);
        dispatch!(simd, replace_slots(finder: &mut SlotFinder, lines: &[u64], slots: &[u32], pairs: &mut SlotPairs));
        let (old_slots, new_slots) = self.pairs.get();
        for (&old_slot, &new_slot) in old_slots.iter().zip(new_slots) {
            let index = new_slot as usize - self.stack_len - 1;
            self.found[index].store(old_slot, Ordering::Relaxed);
        }
    }
}

/// Returns the part to which a line's page belongs.
fn part_of_line(line: u64, part_count: usize) -> usize {
    ((scatter(line / 64) >> 32) as usize * part_count) >> 32
}

#[inline(always)]
unsafe fn replace_slots<L: Lanes>(
    finder: &mut SlotFinder,
    lines: &[u64],
    slots: &[u32],
    pairs: &mut SlotPairs,
) {
    // SAFETY: the caller guarantees that the processor has `L`.
    unsafe { finder.replace_slots::<L>(lines, slots.iter().copied(), pairs) };
}

/// Counts the distances of lines whose old slots in a stack of `stack_len` lines are known; 0 stands for a new line.
#[inline(always)]
unsafe fn count_found<L: Lanes>(
    counter: &mut DeadSlotCounter,
    tally: &mut Tally,
    old_slots: &[AtomicU32],
    stack_len: usize,
) {
    let mut pairs = SlotPairs::new();
    let mut new_slot = stack_len as u32 + 1;
    // An upper bound of the distances: each line that is not in the stack adds one.
    let mut line_count = stack_len;
    for batch in old_slots.chunks(BATCH_ACCESSES) {
        pairs.clear();
        for old_slot in batch {
            pairs.push_known(old_slot.load(Ordering::Relaxed), new_slot);
            new_slot += 1;
        }
        line_count += batch.len() - pairs.len;
        tally.reserve(line_count);
        let (old_slots, new_slots) = pairs.get();
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe { counter.kill_and_count::<L>(old_slots, new_slots, tally) };
    }
}
