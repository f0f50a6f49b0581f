//! Intervals of a run: changes of the miss rate and the locality over time.
//!
//! RapidMRC monitors the miss rate per interval of 10^9 instructions (thesis 5.6.2). Here, an interval ends with the
//! first access at or past its length, so it is never cut inside an access; a recording without instruction counts is
//! cut by accesses instead, and has no rate per instruction.

use crate::reuse::ReuseTimes;

/// The length of an interval, with its unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IntervalLength {
    /// Number of instructions, of all threads together.
    Instructions(u64),
    /// Number of accesses, for recordings without instruction counts.
    Accesses(u64),
}

/// One interval of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RunInterval {
    /// Instructions executed; `None` if not recorded.
    pub instructions: Option<u64>,
    /// Accesses to the cache.
    pub accesses: u64,
    /// Accesses that missed the cache.
    pub misses: u64,
}

impl RunInterval {
    /// Returns the misses per thousand instructions; `None` if instructions were not recorded, or none were executed.
    pub fn misses_per_kilo_instr(&self) -> Option<f64> {
        self.instructions.filter(|&count| count > 0).map(|count| 1000.0 * self.misses as f64 / count as f64)
    }
}

/// Collects intervals of a given length.
#[derive(Clone, Debug)]
pub struct IntervalCounter {
    length: IntervalLength,
    current: RunInterval,
}

impl IntervalCounter {
    /// Builds a counter of intervals of this length; a length of 0 counts as 1.
    pub fn new(length: IntervalLength) -> Self {
        IntervalCounter { length, current: Self::empty(length) }
    }

    fn empty(length: IntervalLength) -> RunInterval {
        let instructions = matches!(length, IntervalLength::Instructions(_)).then_some(0);
        RunInterval { instructions, ..RunInterval::default() }
    }

    /// Adds one access with its instructions, which are ignored if intervals count accesses. Returns `true` if this
    /// fills the interval, which the caller must then [`close`](Self::close).
    #[inline]
    pub fn add_access(&mut self, instructions: u64) -> bool {
        self.current.accesses += 1;
        if let Some(count) = &mut self.current.instructions {
            *count += instructions;
        }
        match self.length {
            IntervalLength::Instructions(length) => self.current.instructions >= Some(length.max(1)),
            IntervalLength::Accesses(length) => self.current.accesses >= length.max(1),
        }
    }

    /// Returns the interval, full or not, with the misses in it, and begins the next one.
    pub fn close(&mut self, misses: u64) -> RunInterval {
        let closed_interval = std::mem::replace(&mut self.current, Self::empty(self.length));
        RunInterval { misses, ..closed_interval }
    }

    /// Returns the number of accesses since the last interval was closed.
    pub fn accesses(&self) -> u64 {
        self.current.accesses
    }
}

/// Returns the reuse times of one interval in comparable form: references per thousand instructions whose line does not
/// recur within 1, 2, 4, ... 2^(n−1) accesses.
///
/// Each entry is about the miss rate of an LRU cache of one size, and together they cover all sizes: two intervals
/// whose signatures are close have close miss-rate curves *at every size*. The signature does not depend on the cache
/// that the program has, so a phase found in it is the program's own, and not the effect of a changed allocation.
pub fn locality_signature(reuse: &ReuseTimes, refs_per_kilo_instr: f64) -> Option<Vec<f64>> {
    let samples = reuse.samples();
    if samples <= 0.0 || !refs_per_kilo_instr.is_finite() {
        return None;
    }
    let mut unrecurred_counts = vec![samples; SIGNATURE_LENGTH];
    for bucket in reuse.buckets() {
        for (doubling, unrecurred_count) in unrecurred_counts.iter_mut().enumerate() {
            if bucket.high < 1 << doubling {
                *unrecurred_count -= bucket.weight;
            }
        }
    }
    Some(unrecurred_counts.iter().map(|&later_count| later_count.max(0.0) / samples * refs_per_kilo_instr).collect())
}

/// Number of entries of a [`locality_signature`]: up to 2^31 accesses.
pub const SIGNATURE_LENGTH: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Do the intervals and the rest contain every access, miss and instruction, and does each interval end as soon
        /// as it is full?
        #[test]
        fn nothing_is_lost_between_intervals(
            accesses in prop::collection::vec((1u64..40, any::<bool>()), 0..200), length in 1u64..200,
        ) {
            let mut counter = IntervalCounter::new(IntervalLength::Instructions(length));
            let (mut intervals, mut misses): (Vec<RunInterval>, u64) = (Vec::new(), 0);
            for &(instructions, missed) in &accesses {
                misses += u64::from(missed);
                if counter.add_access(instructions) {
                    let interval = counter.close(std::mem::take(&mut misses));
                    let count = interval.instructions.unwrap();
                    prop_assert!(count >= length && count - instructions < length);
                    intervals.push(interval);
                }
            }
            intervals.push(counter.close(misses));
            prop_assert_eq!(intervals.iter().map(|i| i.accesses).sum::<u64>(), accesses.len() as u64);
            let misses = accesses.iter().filter(|(_, missed)| *missed).count() as u64;
            prop_assert_eq!(intervals.iter().map(|i| i.misses).sum::<u64>(), misses);
            let instructions: u64 = accesses.iter().map(|(count, _)| count).sum();
            prop_assert_eq!(intervals.iter().filter_map(|i| i.instructions).sum::<u64>(), instructions);
        }
    }

    /// Is there a rate per instruction only if instructions were recorded?
    #[test]
    fn intervals_by_accesses_have_no_rate_per_instruction() {
        let mut counter = IntervalCounter::new(IntervalLength::Accesses(2));
        assert!(!counter.add_access(5) && counter.add_access(5));
        let interval = counter.close(1);
        assert_eq!((interval.accesses, interval.misses, interval.misses_per_kilo_instr()), (2, 1, None));
        let counted_interval = RunInterval { instructions: Some(500), accesses: 9, misses: 3 };
        assert_eq!(counted_interval.misses_per_kilo_instr(), Some(6.0));
    }

    /// Does a signature hold the references that recur late, per thousand instructions, and is there none without
    /// samples?
    #[test]
    fn a_signature_counts_the_references_that_come_back_late() {
        let mut reuse = ReuseTimes::new();
        assert_eq!(locality_signature(&reuse, 50.0), None);
        reuse.add_weighted(Some(0), 2.0);
        reuse.add_weighted(Some(3), 1.0);
        reuse.add(None);
        let signature = locality_signature(&reuse, 40.0).unwrap();
        assert_eq!(signature[..4], [20.0, 20.0, 10.0, 10.0]);
        assert_eq!(signature.len(), SIGNATURE_LENGTH);
    }
}
