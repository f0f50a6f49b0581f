//! Activity vectors, which show the regions of a cache that a task uses (AV 2.2 to 2.4, 4.2).
//!
//! Problem: two tasks with the same miss rate may coexist in a cache if they use different parts of it. Method: the
//! sets of the cache are grouped into super sets, and the accesses to each and the misses in each are counted over a
//! sample. A super set's bit is set if its count exceeds a threshold. The overlap of two tasks is the number of bits
//! set in both, and the next sample is expected to equal the last one.
//!
//! The paper leaves open the number of super sets and the thresholds. It describes both "contiguous groups of sets"
//! (2.2) and "the low order bits of the set" (4.2); the machine that counts chooses. Because an absolute threshold
//! depends on the length of the sample, a threshold relative to the mean of the vector is offered too.

use cachemate_core::{IndexSet, SuperSetCount};

/// The threshold above which a super set counts as active.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ActivityThreshold {
    /// A super set is active above this number of events in a sample.
    Count(u64),
    /// A super set is active above this multiple of the vector's mean.
    MeanTimes(f64),
}

/// The kind of event from whose counts a vector is computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ActivityKind {
    /// Accesses.
    Accesses,
    /// Misses.
    Misses,
}

/// One bit per super set, set if its count of the given kind exceeds the threshold; `MeanTimes` compares with the mean
/// over all super sets, idle ones included.
pub fn activity_vector(
    counts: &[SuperSetCount],
    kind: ActivityKind,
    threshold: ActivityThreshold,
) -> IndexSet {
    let event_count = |super_set: &SuperSetCount| match kind {
        ActivityKind::Accesses => super_set.accesses,
        ActivityKind::Misses => super_set.misses,
    };
    let mean =
        counts.iter().map(|c| event_count(c) as f64).sum::<f64>() / counts.len().max(1) as f64;
    let is_active = |events: u64| match threshold {
        ActivityThreshold::Count(limit) => events > limit,
        ActivityThreshold::MeanTimes(times) => events as f64 > times * mean,
    };
    counts
        .iter()
        .enumerate()
        .filter(|(_, c)| is_active(event_count(c)))
        .map(|(index, _)| index as u32)
        .collect()
}

/// Number of super sets that are active in both vectors, which AV's scheduler minimizes.
pub fn common_active_count(a: &IndexSet, b: &IndexSet) -> u32 {
    a.common_count(b)
}

/// A predictor that expects each activity vector to equal the last one, with its accuracy bit by bit (AV Table 2).
#[derive(Clone, Debug, Default)]
pub struct LastVectorPredictor {
    last_vector: Option<IndexSet>,
    correct_bits: u64,
    predicted_bits: u64,
}

impl LastVectorPredictor {
    /// The prediction for the next vector, which is the last one; `None` before the first.
    pub fn predicted_set(&self) -> Option<&IndexSet> {
        self.last_vector.as_ref()
    }

    /// Adds the next vector, which has `super_sets` bits.
    pub fn push(&mut self, vector: IndexSet, super_sets: u32) {
        if let Some(last) = &self.last_vector {
            let is_unchanged = |bit: &u32| last.contains(*bit) == vector.contains(*bit);
            self.correct_bits += (0..super_sets).filter(is_unchanged).count() as u64;
            self.predicted_bits += u64::from(super_sets);
        }
        self.last_vector = Some(vector);
    }

    /// Share of the bits predicted correctly so far, 0 to 1; `None` before the second vector.
    pub fn predictability(&self) -> Option<f64> {
        (self.predicted_bits > 0).then(|| self.correct_bits as f64 / self.predicted_bits as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Is overlap symmetric, no larger than either vector, and equal to the vector for a vector with itself?
        #[test]
        fn overlap_is_an_intersection(a in prop::collection::vec(0u32..128, 0..40), b in prop::collection::vec(0u32..128, 0..40)) {
            let (a, b): (IndexSet, IndexSet) = (a.into_iter().collect(), b.into_iter().collect());
            prop_assert_eq!(common_active_count(&a, &b), a.intersection(&b).count());
            prop_assert_eq!(common_active_count(&a, &b), common_active_count(&b, &a));
            prop_assert!(common_active_count(&a, &b) <= a.count().min(b.count()));
            prop_assert_eq!(common_active_count(&a, &a), a.count());
        }
    }

    /// Does each threshold set the bits that exceed it, and no others?
    #[test]
    fn each_threshold_sets_the_bits_that_exceed_it() {
        let counts: Vec<SuperSetCount> = [(10, 1), (40, 0), (2, 2), (40, 9)]
            .map(|(accesses, misses)| SuperSetCount { accesses, misses })
            .to_vec();
        let format_vector = |size, above| activity_vector(&counts, size, above).to_string();
        assert_eq!(
            format_vector(ActivityKind::Accesses, ActivityThreshold::Count(10)),
            "1,3"
        );
        assert_eq!(
            format_vector(ActivityKind::Accesses, ActivityThreshold::MeanTimes(1.0)),
            "1,3"
        );
        assert_eq!(
            format_vector(ActivityKind::Misses, ActivityThreshold::Count(0)),
            "0,2-3"
        );
        assert_eq!(
            format_vector(ActivityKind::Misses, ActivityThreshold::MeanTimes(1.0)),
            "3"
        );
    }

    /// Is predictability the share of bits that did not change?
    #[test]
    fn predictability_is_the_share_of_unchanged_bits() {
        let mut last = LastVectorPredictor::default();
        assert_eq!((last.predicted_set(), last.predictability()), (None, None));
        last.push([0, 1].into_iter().collect(), 4);
        assert_eq!(last.predictability(), None);
        last.push([1, 2].into_iter().collect(), 4);
        assert_eq!(last.predictability(), Some(0.5));
        assert_eq!(
            last.predicted_set().map(ToString::to_string),
            Some("1-2".to_string())
        );
    }
}
