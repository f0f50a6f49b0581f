//! SDC, stack distance competition (Chandra, Guo, Kim, Solihin 2005; CA 2.2.1).
//!
//! Problem: the number of ways that each program gets on a shared cache is to be estimated. Method: stack distance
//! profiles are merged. At each of the cache's A positions, the program with the most hits at its own pointer wins the
//! position, and only its pointer advances. The effective ways of a program are the positions that it won. Hits beyond
//! them become misses, and these extra misses are the program's cost. Properties: effective ways add up to A. In a tie,
//! programs share the remaining ways equally, so the order of programs does not matter.
//!
//! `sdc` converts extra misses into run time; `sdc-misses` reports them as in the paper, per million instructions.

use cachemate_core::Profile;

use super::shared_cache::{SharedCache, SoloRates, stack_positions_on};
use super::{GroupCosts, MissingEvidence, Scheme, gather_evidence};
use crate::matrix::CostKind;

/// The scheme of stack distance competition, with costs in run time or in extra misses.
pub struct Sdc {
    /// Whether costs are slowdowns; otherwise, they are extra misses per million instructions.
    pub reports_run_time: bool,
}

/// The effective ways of each program: the number of its positions in the merged profile. `profiles` are hits by LRU
/// position, optionally followed by the misses. The sum of the result is `ways`.
pub fn effective_ways(profiles: &[&[f64]], ways: u32) -> Vec<f64> {
    let mut won_positions = vec![0usize; profiles.len()];
    let mut ways_by_program = vec![0.0; profiles.len()];

    let mut remaining_ways = ways as usize;
    while remaining_ways > 0 && !profiles.is_empty() {
        let hits: Vec<f64> = profiles
            .iter()
            .zip(&won_positions)
            .map(|(p, &position)| {
                if position < ways as usize {
                    p[position]
                } else {
                    f64::MIN
                }
            })
            .collect();
        let max_hits = hits.iter().copied().fold(f64::MIN, f64::max);
        let winners: Vec<usize> = (0..hits.len())
            .filter(|&index| hits[index] == max_hits)
            .collect();
        if winners.len() > remaining_ways {
            winners.iter().for_each(|&index| {
                ways_by_program[index] += remaining_ways as f64 / winners.len() as f64
            });
            break;
        }

        for index in winners {
            won_positions[index] += 1;
            ways_by_program[index] += 1.0;
            remaining_ways -= 1;
        }
    }

    ways_by_program
}

/// The hits beyond the effective ways, in which a fraction of a way has that fraction of its hits.
fn hits_beyond(hits: &[f64], ways: f64) -> f64 {
    hits.iter()
        .enumerate()
        .map(|(index, hits)| hits * (1.0 - (ways - index as f64).clamp(0.0, 1.0)))
        .sum()
}

impl Scheme for Sdc {
    fn name(&self) -> &'static str {
        if self.reports_run_time {
            "sdc"
        } else {
            "sdc-misses"
        }
    }

    fn group_costs(
        &self,
        members: &[&Profile],
        cache: &SharedCache,
    ) -> Result<GroupCosts, MissingEvidence> {
        let subject = "stack positions of a cache with as many ways";
        let positions = gather_evidence(self, members, subject, |profile| {
            stack_positions_on(profile, cache)
        })?;
        let subject = "references per instruction";
        let solo_rates = gather_evidence(self, members, subject, |profile| {
            SoloRates::from_profile(profile, cache)
        })?;
        let ways = cache.ways as usize;
        let effective_ways_by_program = effective_ways(&positions, cache.ways);
        let extra_misses_by_program = positions
            .iter()
            .zip(&effective_ways_by_program)
            .map(|(positions, &effective_ways)| hits_beyond(&positions[..ways], effective_ways));

        let (mut costs, mut miss_ratios) = (Vec::new(), Vec::new());
        for ((extra_misses, positions), solo) in
            extra_misses_by_program.zip(&positions).zip(&solo_rates)
        {
            costs.push(if self.reports_run_time {
                solo.slowdown_from_misses(extra_misses * 1e-6)
            } else {
                extra_misses
            });
            miss_ratios.push((positions[ways] + extra_misses) / positions.iter().sum::<f64>());
        }

        let kind = if self.reports_run_time {
            CostKind::Degradation
        } else {
            CostKind::Weight
        };
        let has_miss_ratios = miss_ratios.iter().all(|ratio| ratio.is_finite());
        Ok(GroupCosts {
            kind,
            costs,
            miss_ratios: has_miss_ratios.then_some(miss_ratios),
            group_miss_ratio: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::with_positions;
    use super::*;
    use proptest::prelude::*;

    /// Does the merge match the paper's example, worked out by hand?
    #[test]
    fn the_higher_counter_wins_and_only_its_pointer_advances() {
        // A wins 10 against 9, B wins 9 against 8, A wins 8 against 2, and B wins 2 against 1.
        assert_eq!(
            effective_ways(&[&[10.0, 8.0, 1.0, 0.0], &[9.0, 2.0, 1.0, 1.0]], 4),
            [2.0, 2.0]
        );
        assert_eq!(
            effective_ways(&[&[10.0, 8.0, 7.0, 6.0], &[5.0, 2.0, 1.0, 1.0]], 4),
            [4.0, 0.0]
        );
        assert_eq!(effective_ways(&[&[1.0; 5], &[1.0; 5]], 5), [2.5, 2.5]);
    }

    /// Are the extra misses the hits beyond the remaining ways?
    #[test]
    fn extra_misses_are_the_hits_beyond_the_remaining_ways() {
        let cache = SharedCache::new(4 * 64, 4, 64, 100.0);
        let (a, b) = (
            with_positions(&[10.0, 8.0, 1.0, 0.5, 3.0]),
            with_positions(&[9.0, 2.0, 1.0, 1.0, 0.0]),
        );
        let costs = Sdc {
            reports_run_time: false,
        }
        .pair_costs(&[&a, &b], &cache)
        .unwrap();
        assert_eq!((costs.cost[0][1], costs.cost[1][0]), (1.5, 2.0));
    }

    proptest! {
        /// Do effective ways add up to the associativity, whatever the order of programs?
        #[test]
        fn effective_ways_sum_to_the_associativity(
            profiles in prop::collection::vec(prop::collection::vec((0u32..20).prop_map(f64::from), 8), 1..5),
        ) {
            let slices: Vec<&[f64]> = profiles.iter().map(Vec::as_slice).collect();
            let ways = effective_ways(&slices, 8);
            prop_assert!((ways.iter().sum::<f64>() - 8.0).abs() < 1e-9);
            let reversed: Vec<&[f64]> = slices.iter().rev().copied().collect();
            let mut restored_ways = effective_ways(&reversed, 8);
            restored_ways.reverse();
            for (a, b) in ways.iter().zip(&restored_ways) {
                prop_assert!((a - b).abs() < 1e-9);
            }
        }
    }
}
