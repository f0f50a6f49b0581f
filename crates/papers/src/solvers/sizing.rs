//! Partitions one cache among several programs.
//!
//! Problem: a cache consists of `units` (colors or ways). Each claimant has a cost for every number of units (misses,
//! stalled cycles or lost speed, as the caller chooses), and gets at least its floor. All units are allocated so that
//! the sum of the costs, or the largest of them, is as small as possible. With cliffs in the curves, the general
//! problem is hard for heuristics, but the number of units is small enough for exact dynamic programming.
//!
//! Method:
//! - [`allocate_exactly`]: `rows[n][u]` is the best allocation of u units to the first n claimants; for two claimants,
//!   that is thesis equation 5.3. O(claimants · units²).
//! - [`allocate_by_lookahead`]: Qureshi and Patt's greedy rule (MICRO 2006; named in thesis 5.4). All claimants start
//!   at the floor. The claimant with the largest saving per unit, over any number of further units, gets that many,
//!   repeatedly. This looks across plateaus before a cliff. A claimant's best offer is stored until it wins or the
//!   remainder becomes too small for it.
//!
//! Properties: results are deterministic, all units are allocated, and floors are met. Among equal totals,
//! [`allocate_exactly`] chooses the most even allocation, so that indifferent claimants share equally. If every curve
//! is convex, [`allocate_by_lookahead`] is exact too.

/// A claimant of units: one program, or several programs in one partition.
#[derive(Clone, PartialEq, Debug)]
pub struct UnitClaim {
    /// Cost with 1, 2, ... units; the length is the number of units of the cache.
    pub costs: Vec<f64>,
    /// Minimum number of units for the claimant; at least 1.
    pub min_units: u32,
}

impl UnitClaim {
    fn cost_of_units(&self, units: u32) -> f64 {
        self.costs[units as usize - 1]
    }
    fn floor(&self) -> u32 {
        self.min_units.max(1)
    }
}

/// The quantity that an allocation minimizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CostAggregate {
    /// The sum of the costs.
    Sum,
    /// The largest cost; among equal ones, the sum.
    Worst,
}

/// The error if units cannot be allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClaimError {
    /// There are no claims.
    #[error("there is no claim")]
    NoClaims,
    /// A claim does not have one cost for each number of units.
    #[error("claim {claim} has {found} costs, expected {expected}: one for every number of units")]
    Costs {
        /// Index of the claim in the list.
        claim: usize,
        /// Number of costs that the claim has.
        found: usize,
        /// Number of units of the cache.
        expected: u32,
    },
    /// A cost is infinite or not a number.
    #[error("claim {claim} has a cost that is not finite")]
    NoNumber {
        /// Index of the claim in the list.
        claim: usize,
    },
    /// The sum of the floors exceeds the number of units.
    #[error("the floors need {floors} units of {units}")]
    Floors {
        /// Sum of the floors.
        floors: u32,
        /// Number of units of the cache.
        units: u32,
    },
}

fn check_claims(claims: &[UnitClaim], units: u32) -> Result<(), ClaimError> {
    if claims.is_empty() {
        return Err(ClaimError::NoClaims);
    }

    for (claim, UnitClaim { costs, .. }) in claims.iter().enumerate() {
        if costs.len() != units as usize {
            return Err(ClaimError::Costs {
                claim,
                found: costs.len(),
                expected: units,
            });
        }
        if !costs.iter().all(|cost| cost.is_finite()) {
            return Err(ClaimError::NoNumber { claim });
        }
    }

    let floors = claims
        .iter()
        .map(UnitClaim::floor)
        .fold(0u32, u32::saturating_add);
    if floors > units {
        Err(ClaimError::Floors { floors, units })
    } else {
        Ok(())
    }
}

/// The cost of a partial allocation, and the evenness that decides among equal costs.
#[derive(Clone, Copy)]
struct PartialAllocation {
    worst_cost: f64,
    sum: f64,
    /// Sum of squared numbers of units; smaller values are more even.
    square_sum: u64,
    /// Number of units that the last claimant gets.
    units: u32,
}

impl PartialAllocation {
    fn is_better_than(
        &self,
        other: &PartialAllocation,
        aggregate: CostAggregate,
        tolerance: f64,
    ) -> bool {
        let worst_difference = self.worst_cost - other.worst_cost;
        let sum_difference = self.sum - other.sum;
        if aggregate == CostAggregate::Worst && worst_difference.abs() > tolerance {
            worst_difference < 0.0
        } else if sum_difference.abs() > tolerance {
            sum_difference < 0.0
        } else {
            self.square_sum < other.square_sum
        }
    }
}

/// The best allocation of all `units`, in the order of the claims. O(claimants · units²).
///
/// # Errors
/// A claim is invalid, or the floors exceed the units.
pub fn allocate_exactly(
    claims: &[UnitClaim],
    units: u32,
    aggregate: CostAggregate,
) -> Result<Vec<u32>, ClaimError> {
    check_claims(claims, units)?;
    let unit_count = units as usize;
    // Costs that differ only by rounding count as equal, so that evenness decides rather than the order of additions.
    let scale = claims
        .iter()
        .flat_map(|claim| &claim.costs)
        .fold(0.0f64, |largest_cost, cost| largest_cost.max(cost.abs()));
    let tolerance = scale * claims.len() as f64 * 1e-12;
    let mut rows: Vec<Vec<Option<PartialAllocation>>> = Vec::with_capacity(claims.len());
    let empty_allocation = PartialAllocation {
        worst_cost: f64::NEG_INFINITY,
        sum: 0.0,
        square_sum: 0,
        units: 0,
    };
    let mut previous_row: Vec<Option<PartialAllocation>> = vec![None; unit_count + 1];
    previous_row[0] = Some(empty_allocation);

    let mut remaining_floors: u32 = claims.iter().map(UnitClaim::floor).sum();
    for (index, claim) in claims.iter().enumerate() {
        remaining_floors -= claim.floor();
        let is_last = index + 1 == claims.len();
        let mut row: Vec<Option<PartialAllocation>> = vec![None; unit_count + 1];
        let max_used_units = units - remaining_floors;

        // The last claimant gets all remaining units, because only complete allocations matter.
        for used_units in if is_last {
            max_used_units..=max_used_units
        } else {
            0..=max_used_units
        } {
            let mut best_allocation: Option<PartialAllocation> = None;
            for claim_units in claim.floor()..=used_units {
                let Some(previous_allocation) = previous_row[(used_units - claim_units) as usize]
                else {
                    continue;
                };

                let cost = claim.cost_of_units(claim_units);
                let candidate = PartialAllocation {
                    worst_cost: previous_allocation.worst_cost.max(cost),
                    sum: previous_allocation.sum + cost,
                    square_sum: previous_allocation.square_sum
                        + u64::from(claim_units) * u64::from(claim_units),
                    units: claim_units,
                };
                if best_allocation
                    .as_ref()
                    .is_none_or(|best| candidate.is_better_than(best, aggregate, tolerance))
                {
                    best_allocation = Some(candidate);
                }
            }
            row[used_units as usize] = best_allocation;
        }

        rows.push(std::mem::replace(&mut previous_row, row));
    }

    rows.push(previous_row);
    let mut allocation = vec![0; claims.len()];
    let mut remaining_units = unit_count;
    for index in (0..claims.len()).rev() {
        let best_allocation = rows[index + 1][remaining_units]
            .expect("checked: the floors fit, so every prefix has a best allocation");
        allocation[index] = best_allocation.units;
        remaining_units -= best_allocation.units as usize;
    }
    Ok(allocation)
}

/// The number of further units, at most `max_units`, that saves the claimant most per unit, and that saving.
fn best_offer(claim: &UnitClaim, units: u32, max_units: u32) -> (u32, f64) {
    let current_cost = claim.cost_of_units(units);
    let mut best_units_and_gain = (max_units, f64::NEG_INFINITY);
    for added_units in 1..=max_units {
        let saving =
            (current_cost - claim.cost_of_units(units + added_units)) / f64::from(added_units);
        if saving > best_units_and_gain.1 {
            best_units_and_gain = (added_units, saving);
        }
    }
    best_units_and_gain
}

/// Allocates all `units` by Qureshi and Patt's lookahead, in the order of the claims.
pub fn allocate_by_lookahead(claims: &[UnitClaim], units: u32) -> Result<Vec<u32>, ClaimError> {
    check_claims(claims, units)?;
    let mut allocation: Vec<u32> = claims.iter().map(UnitClaim::floor).collect();
    let mut remaining_units = units - allocation.iter().sum::<u32>();
    let mut offers: Vec<(u32, f64)> = claims
        .iter()
        .zip(&allocation)
        .map(|(c, &held_units)| best_offer(c, held_units, remaining_units))
        .collect();

    while remaining_units > 0 {
        let mut winner = 0;
        for (index, claim) in claims.iter().enumerate() {
            if offers[index].0 > remaining_units {
                offers[index] = best_offer(claim, allocation[index], remaining_units);
            }
            // With equal savings, the claimant with the fewest units wins, so that claimants without savings share the
            // remainder equally.
            let (saving, best_saving) = (offers[index].1, offers[winner].1);
            if saving > best_saving
                || (saving == best_saving && allocation[index] < allocation[winner])
            {
                winner = index;
            }
        }

        // If no savings are left, units are allocated one at a time.
        let added_units = if offers[winner].1 > 0.0 {
            offers[winner].0
        } else {
            1
        };
        allocation[winner] += added_units;
        remaining_units -= added_units;
        offers[winner] = best_offer(&claims[winner], allocation[winner], remaining_units);
    }

    Ok(allocation)
}

/// `allocation` has the units of each claim, in the order of `claims`.
pub fn total_cost(claims: &[UnitClaim], allocation: &[u32], aggregate: CostAggregate) -> f64 {
    aggregate.aggregate(
        claims
            .iter()
            .zip(allocation)
            .map(|(claim, &units)| claim.cost_of_units(units)),
    )
}

impl CostAggregate {
    /// The sum or the largest of several costs.
    pub fn aggregate(self, costs: impl Iterator<Item = f64>) -> f64 {
        match self {
            CostAggregate::Sum => costs.sum(),
            CostAggregate::Worst => costs.fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

/// The smallest number of units with which a claimant's cost does not exceed `max_cost`; `None` if no number suffices.
pub fn min_units_for_cost(costs: &[f64], max_cost: f64) -> Option<u32> {
    costs
        .iter()
        .position(|&cost| cost <= max_cost)
        .map(|index| index as u32 + 1)
}

/// The costs of several claimants in one partition, by its size, if each fills an equal share of it. The costs are
/// summed, or the largest counts.
pub fn pool_costs(costs: &[&[f64]], units: u32, aggregate: CostAggregate) -> Vec<f64> {
    let members = costs.len().max(1) as f64;
    let cost_at = |costs: &[f64], unit_count: f64| {
        // Less than one unit counts as one, because the cost of less is unknown.
        let position = (unit_count - 1.0).clamp(0.0, costs.len() as f64 - 1.0);
        let (low, fraction) = (position as usize, position - libm::floor(position));
        costs[low] + fraction * (costs[(low + 1).min(costs.len() - 1)] - costs[low])
    };
    (1..=units)
        .map(|unit_count| {
            aggregate.aggregate(
                costs
                    .iter()
                    .map(|costs| cost_at(costs, f64::from(unit_count) / members)),
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unit_claims(costs: &[&[f64]]) -> Vec<UnitClaim> {
        costs
            .iter()
            .map(|costs| UnitClaim {
                costs: costs.to_vec(),
                min_units: 1,
            })
            .collect()
    }

    /// Every allocation of all units that meets the floors.
    fn all_allocations(claims: &[UnitClaim], units: u32) -> Vec<Vec<u32>> {
        let Some((first, rest)) = claims.split_first() else {
            return if units == 0 {
                vec![Vec::new()]
            } else {
                Vec::new()
            };
        };
        let allocations_with = |share: u32| {
            all_allocations(rest, units - share)
                .into_iter()
                .map(move |allocation| [vec![share], allocation].concat())
                .collect::<Vec<_>>()
        };
        (first.floor()..=units).flat_map(allocations_with).collect()
    }

    /// Computes thesis equation 5.3 as it is written.
    fn size_selection(a: &[f64], b: &[f64], units: usize) -> f64 {
        (1..units)
            .map(|x| a[x - 1] + b[units - x - 1])
            .fold(f64::INFINITY, f64::min)
    }

    /// Do the solvers find a cliff behind a plateau?
    #[test]
    fn solvers_find_a_cliff_behind_a_plateau() {
        let cliff = [10.0, 10.0, 10.0, 10.0, 1.0, 1.0, 1.0, 1.0];
        let slope = [8.0, 7.5, 7.0, 6.5, 6.0, 5.5, 5.0, 4.5];
        let two_claims = unit_claims(&[&cliff, &slope]);
        assert_eq!(
            allocate_exactly(&two_claims, 8, CostAggregate::Sum),
            Ok(vec![5, 3])
        );
        assert_eq!(allocate_by_lookahead(&two_claims, 8), Ok(vec![5, 3]));
    }

    /// Do indifferent claimants share equally, in any order?
    #[test]
    fn indifferent_claimants_share_equally() {
        let flat = [3.0; 16];
        let equal_claims = unit_claims(&[&flat, &flat, &flat, &flat]);
        assert_eq!(
            allocate_exactly(&equal_claims, 16, CostAggregate::Sum),
            Ok(vec![4; 4])
        );
        assert_eq!(
            allocate_exactly(&equal_claims, 16, CostAggregate::Worst),
            Ok(vec![4; 4])
        );
        assert_eq!(allocate_by_lookahead(&equal_claims, 16), Ok(vec![4; 4]));
    }

    /// Does the objective of the largest cost take units from many claimants for one?
    #[test]
    fn the_largest_cost_objective_takes_units_from_many_claimants() {
        let needy = [9.0, 8.0, 7.0, 6.0];
        let greedy = [5.0, 2.0, 1.0, 0.5];
        let two_claims = unit_claims(&[&needy, &greedy]);
        assert_eq!(
            allocate_exactly(&two_claims, 4, CostAggregate::Sum),
            Ok(vec![2, 2])
        );
        assert_eq!(
            allocate_exactly(&two_claims, 4, CostAggregate::Worst),
            Ok(vec![3, 1])
        );
    }

    /// Are claims that cannot be met rejected, with the reason?
    #[test]
    fn impossible_claims_are_rejected_with_the_reason() {
        let mut two_claims = unit_claims(&[&[1.0; 4], &[1.0; 4]]);
        two_claims[1].min_units = 4;
        assert_eq!(
            allocate_exactly(&two_claims, 4, CostAggregate::Sum),
            Err(ClaimError::Floors {
                floors: 5,
                units: 4
            })
        );
        two_claims[1].costs[2] = f64::NAN;
        assert_eq!(
            allocate_by_lookahead(&two_claims, 4),
            Err(ClaimError::NoNumber { claim: 1 })
        );
        two_claims[0].costs.pop();
        assert_eq!(
            allocate_exactly(&two_claims, 4, CostAggregate::Sum),
            Err(ClaimError::Costs {
                claim: 0,
                found: 3,
                expected: 4
            })
        );
        assert_eq!(allocate_by_lookahead(&[], 4), Err(ClaimError::NoClaims));
    }

    /// Does a pool cost what equal shares cost, and a pool of one what the program itself costs?
    #[test]
    fn a_pool_costs_as_much_as_equal_shares() {
        let curve = [8.0, 6.0, 4.0, 2.0];
        assert_eq!(pool_costs(&[&curve], 4, CostAggregate::Sum), curve);
        assert_eq!(
            pool_costs(&[&curve, &curve], 4, CostAggregate::Sum),
            [16.0, 16.0, 14.0, 12.0]
        );
        assert_eq!(
            pool_costs(&[&curve, &[1.0; 4]], 4, CostAggregate::Worst),
            [8.0, 8.0, 7.0, 6.0],
            "the worst cost counts"
        );
        assert_eq!(min_units_for_cost(&curve, 4.5), Some(3));
        assert_eq!(min_units_for_cost(&curve, 1.0), None);
    }

    fn any_claims() -> impl Strategy<Value = (Vec<UnitClaim>, u32)> {
        (1usize..5, 5u32..13).prop_flat_map(|(count, units)| {
            let claim = (
                prop::collection::vec(0.0f64..100.0, units as usize),
                0u32..3,
            )
                .prop_map(|(costs, min_units)| UnitClaim { costs, min_units });
            (prop::collection::vec(claim, count), Just(units))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Is no allocation better than the exact one, and does every result meet the floors and allocate all units?
        #[test]
        fn no_allocation_is_better_than_the_exact_one((claims, units) in any_claims()) {
            let floors: u32 = claims.iter().map(UnitClaim::floor).sum();
            prop_assume!(floors <= units);
            for aggregate in [CostAggregate::Sum, CostAggregate::Worst] {
                let allocation = allocate_exactly(&claims, units, aggregate).unwrap();
                let best = all_allocations(&claims, units).iter().map(|allocation| total_cost(&claims, allocation, aggregate))
                    .fold(f64::INFINITY, f64::min);
                prop_assert!(total_cost(&claims, &allocation, aggregate) <= best + 1e-9);
                prop_assert_eq!(allocation.iter().sum::<u32>(), units);
                prop_assert!(allocation.iter().zip(&claims).all(|(&given, claim)| given >= claim.floor()));
            }
            if let [a, b] = claims.as_slice() {
                let allocation = allocate_exactly(&claims, units, CostAggregate::Sum).unwrap();
                if a.floor() == 1 && b.floor() == 1 {
                    let paper = size_selection(&a.costs, &b.costs, units as usize);
                    prop_assert!((total_cost(&claims, &allocation, CostAggregate::Sum) - paper).abs() < 1e-9);
                }
            }
        }

        /// Is lookahead exact on convex curves, and does it meet the floors and allocate all units on others?
        #[test]
        fn lookahead_is_exact_on_convex_curves((claims, units) in any_claims()) {
            let floors: u32 = claims.iter().map(UnitClaim::floor).sum();
            prop_assume!(floors <= units);
            let allocation = allocate_by_lookahead(&claims, units).unwrap();
            prop_assert_eq!(allocation.iter().sum::<u32>(), units);
            prop_assert!(allocation.iter().zip(&claims).all(|(&given, claim)| given >= claim.floor()));
            let convex: Vec<UnitClaim> = claims.iter().map(|claim| {
                let mut savings = claim.costs.clone();
                savings.sort_by(f64::total_cmp);
                // Descending savings, summed from the right, give a convex and falling curve.
                let mut costs: Vec<f64> = Vec::new();
                savings.iter().for_each(|saving| costs.push(costs.last().unwrap_or(&0.0) + saving));
                costs.reverse();
                UnitClaim { costs, min_units: claim.min_units }
            }).collect();
            let fast = total_cost(&convex, &allocate_by_lookahead(&convex, units).unwrap(), CostAggregate::Sum);
            let best = total_cost(&convex, &allocate_exactly(&convex, units, CostAggregate::Sum).unwrap(), CostAggregate::Sum);
            prop_assert!((fast - best).abs() < 1e-9, "lookahead {fast}, exact {best}");
        }
    }
}
