//! Pain (CA 2.2.4), the product of one program's sensitivity and the other's intensity.
//!
//! Problem: the loss of A beside B is to be estimated. Method: a hit at LRU position i of n is lost with probability i
//! / (1 + n), so A's sensitivity, its likely extra misses, is S(A) = 1 / (1 + n) · Σ i · h(i). B's intensity Z(B) is
//! the number of its accesses to the cache. Both are per million instructions, so that programs of different length can
//! be compared. A's cost is S(A) · Z(B), and the pair's cost is the sum of both. Properties: the cost of a pair is
//! symmetric, and 0 beside a program that does not use the cache. For printing, the product is scaled to accesses per
//! instruction squared x 10^6; only its order has a meaning.

use cachemate_core::Profile;

use super::shared_cache::{SharedCache, refs_per_mega_instr, stack_positions_on};
use super::{GroupCosts, MissingEvidence, Scheme, gather_evidence};
use crate::matrix::CostKind;

/// The scheme that multiplies sensitivity and intensity.
pub struct Pain;

/// S, the likely extra misses per million instructions in a shared cache (CA equation 1), from hits by LRU
/// position.
pub fn pain_sensitivity(hits: &[f64]) -> f64 {
    let weighted_sum: f64 = hits
        .iter()
        .enumerate()
        .map(|(index, hits)| (index + 1) as f64 * hits)
        .sum();
    weighted_sum / (1 + hits.len()) as f64
}

impl Scheme for Pain {
    fn name(&self) -> &'static str {
        "pain"
    }

    fn group_costs(
        &self,
        members: &[&Profile],
        cache: &SharedCache,
    ) -> Result<GroupCosts, MissingEvidence> {
        let missing_fact = "stack positions of a cache with as many ways";
        let positions = gather_evidence(self, members, missing_fact, |profile| {
            stack_positions_on(profile, cache)
        })?;
        let intensities = gather_evidence(
            self,
            members,
            "references per instruction",
            refs_per_mega_instr,
        )?;

        let sensitivities: Vec<f64> = positions
            .iter()
            .map(|p| pain_sensitivity(&p[..cache.ways as usize]))
            .collect();
        let pair_cost = |i: usize, j: usize| sensitivities[i] * intensities[j] * 1e-6;
        Ok(GroupCosts::sum_of_pairs(
            CostKind::Weight,
            members.len(),
            pair_cost,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::with_positions;
    use super::*;
    use proptest::prelude::*;

    /// Does the sensitivity follow equation 1?
    #[test]
    fn sensitivity_weighs_hits_by_position() {
        assert_eq!(
            pain_sensitivity(&[4.0, 3.0, 2.0, 1.0]),
            (4.0 + 6.0 + 6.0 + 4.0) / 5.0
        );
    }

    proptest! {
        /// Is pain symmetric as a pair, and worse beside a program that uses the cache more?
        #[test]
        fn pain_is_symmetric_and_grows_with_the_neighbor(
            a in prop::collection::vec(0.0f64..1e4, 9), b in prop::collection::vec(0.0f64..1e4, 9), more in 1.0f64..5.0,
        ) {
            let cache = SharedCache::new(8 * 64, 8, 64, 100.0);
            let louder: Vec<f64> = b.iter().map(|hits| hits * more).collect();
            let (a, b, louder) = (with_positions(&a), with_positions(&b), with_positions(&louder));
            let costs = Pain.pair_costs(&[&a, &b, &louder], &cache).unwrap();
            prop_assert!((costs.mutual_cost(0, 1) - costs.mutual_cost(1, 0)).abs() < 1e-9);
            prop_assert!(costs.cost[0][2] >= costs.cost[0][1] - 1e-9);
        }
    }
}
