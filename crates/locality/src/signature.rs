//! Signatures of a program's locality, which distinguish its phases.

use crate::reuse::ReuseTimes;

/// Reuse times of one interval in comparable form: references per thousand instructions whose line does not recur
/// within 1, 2, 4, ... 2^(n−1) accesses. `None` without samples, or if the rate is not finite.
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
    Some(
        unrecurred_counts
            .iter()
            .map(|&later_count| later_count.max(0.0) / samples * refs_per_kilo_instr)
            .collect(),
    )
}

/// Number of entries of a [`locality_signature`]: up to 2^31 accesses.
pub const SIGNATURE_LENGTH: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

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
