//! Schemes that use one rate per program: miss rate, access rate, IPC, PCMR (CA 2.2.3; CASC 4.1).
//!
//! Problem: the cheapest evidence is one number per program. Method: balance the sum of the rates over the caches. The
//! plain sum of two rates cannot serve as an edge weight, because its total is the same for every matching. The product
//! is the convex weight with the same goal: over a perfect matching, Σ (x_i + x_j)² = constant + 2 Σ x_i x_j, so the
//! matching with the smallest products has the most even sums. The plain sum is provided for comparison
//! (`miss-rate-sum`).
//!
//! The rates are:
//! - LLC misses per thousand instructions, solo if known, otherwise as observed (CA-5 finds that co-running hardly
//!   changes the order);
//! - LLC accesses per thousand instructions;
//! - cycles per instruction (a low IPC means that the program waits for memory);
//! - CASC's PCMR, whose mean is the group's miss rate per 100 references.
//!
//! Properties: costs are symmetric. A program with a rate of 0 costs nothing beside any program. A solved PCMR may be
//! negative, and so may a cost.

use cachemate_core::Profile;

use super::shared_cache::{SharedCache, refs_per_mega_instr, solo_misses_per_mega_instr};
use super::{GroupCosts, MissingEvidence, Scheme, gather_evidence};
use crate::matrix::CostKind;

/// The rate that a scheme uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateKind {
    /// Misses per thousand instructions.
    Miss,
    /// References per thousand instructions.
    Access,
    /// Cycles per instruction.
    Cpi,
    /// Misses per 100 references on a share of the cache.
    Pcmr,
}

/// A scheme that uses one rate; each of two programs bears half of the pair's weight.
pub struct RateScheme {
    /// Rate by which programs are compared.
    pub rate: RateKind,
    /// Whether the plain sum is used instead of the product.
    pub uses_sum: bool,
}

impl RateScheme {
    fn required_fact(&self) -> &'static str {
        match self.rate {
            RateKind::Miss => "a miss rate at the cache's size, or an observed one",
            RateKind::Access => "references per instruction",
            RateKind::Cpi => "instructions per cycle",
            RateKind::Pcmr => "a partial-cache miss rate",
        }
    }

    fn rate_of(&self, profile: &Profile, cache: &SharedCache) -> Option<f64> {
        match self.rate {
            RateKind::Miss => miss_rate(profile, cache),
            RateKind::Access => refs_per_mega_instr(profile).map(|refs| refs / 1000.0),
            RateKind::Cpi => {
                let ipc = profile
                    .rates
                    .solo_instr_per_cycle
                    .or(profile.rates.observed_instr_per_cycle)?
                    .value;
                (ipc > 0.0).then_some(1.0 / ipc)
            }
            RateKind::Pcmr => profile.rates.pcmr.map(|pcmr| pcmr.value),
        }
    }
}

/// LLC misses per thousand instructions: alone on the cache if known, otherwise as observed.
pub fn miss_rate(profile: &Profile, cache: &SharedCache) -> Option<f64> {
    let solo_mpki = solo_misses_per_mega_instr(profile, cache).map(|misses| misses / 1000.0);
    solo_mpki.or(profile
        .rates
        .observed_misses_per_kilo_instr
        .map(|observed_mpki| observed_mpki.value))
}

impl Scheme for RateScheme {
    fn name(&self) -> &'static str {
        match (self.rate, self.uses_sum) {
            (RateKind::Miss, false) => "miss-rate",
            (RateKind::Miss, true) => "miss-rate-sum",
            (RateKind::Access, _) => "access-rate",
            (RateKind::Cpi, _) => "ipc",
            (RateKind::Pcmr, _) => "pcmr",
        }
    }

    fn group_costs(
        &self,
        members: &[&Profile],
        cache: &SharedCache,
    ) -> Result<GroupCosts, MissingEvidence> {
        let rates = gather_evidence(self, members, self.required_fact(), |profile| {
            self.rate_of(profile, cache)
        })?;
        let pair_cost = |i: usize, j: usize| {
            if self.uses_sum {
                rates[j]
            } else {
                0.5 * rates[i] * rates[j]
            }
        };
        let mut costs = GroupCosts::sum_of_pairs(CostKind::Weight, members.len(), pair_cost);
        if self.rate == RateKind::Pcmr && !rates.is_empty() {
            // The group's miss rate is the mean of its members' PCMRs, which are per 100 references (CASC 4.1).
            costs.group_miss_ratio = Some(rates.iter().sum::<f64>() / rates.len() as f64 / 100.0);
        }

        Ok(costs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{CacheLevel, Estimate, Fact, FactSource, RateFacts};
    use proptest::prelude::*;

    const CACHE: SharedCache = SharedCache {
        size_bytes: 1 << 20,
        ways: 16,
        line_bytes: 64,
        replacement: cachemate_core::ReplacementPolicy::Lru,
        miss_penalty_cycles: 100.0,
        hit_latency_cycles: 0.0,
        issue_width: 1.0,
        window_instructions: 1.0,
        max_overlapping_misses: 1.0,
    };

    fn with_pcmr(value: f64) -> Profile {
        Profile::default().with_rates(RateFacts {
            pcmr: Some(Fact::oracle(value)),
            ..RateFacts::default()
        })
    }

    /// Is a solo rate preferred to an observed one, and is there no rate without evidence?
    #[test]
    fn a_solo_rate_is_preferred_to_an_observed_one() {
        let mut profile = Profile::default();
        assert_eq!(miss_rate(&profile, &CACHE), None);
        profile.rates.observed_misses_per_kilo_instr = Some(Fact::oracle(7.0));
        assert_eq!(miss_rate(&profile, &CACHE), Some(7.0));
        let curve = vec![(1 << 20, Estimate::exact(3.0))];
        let profile = profile.with_misses(CacheLevel::L2, curve, FactSource::Oracle);
        assert_eq!(miss_rate(&profile, &CACHE), Some(3.0));
        let error = RateScheme {
            rate: RateKind::Cpi,
            uses_sum: false,
        }
        .pair_costs(&[&profile], &CACHE)
        .unwrap_err();
        assert_eq!((error.scheme, error.program), ("ipc", 0));
    }

    /// Is the group's miss rate CASC's mean of PCMRs?
    #[test]
    fn a_groups_miss_rate_is_the_mean_of_its_pcmrs() {
        let profiles = [with_pcmr(2.0), with_pcmr(28.0), with_pcmr(30.0)];
        let members: Vec<&Profile> = profiles.iter().collect();
        let costs = RateScheme {
            rate: RateKind::Pcmr,
            uses_sum: false,
        }
        .group_costs(&members, &CACHE)
        .unwrap();
        assert!((costs.group_miss_ratio.unwrap() - 0.2).abs() < 1e-12);
    }

    proptest! {
        /// Does the product rank matchings by evenness, whereas the sum ranks all the same?
        #[test]
        fn the_product_ranks_matchings_by_evenness(rates in prop::collection::vec(0.0f64..100.0, 4)) {
            let profiles: Vec<Profile> = rates.iter().map(|&rate| with_pcmr(rate)).collect();
            let members: Vec<&Profile> = profiles.iter().collect();
            let costs = |sum| RateScheme { rate: RateKind::Pcmr, uses_sum: sum }.pair_costs(&members, &CACHE).unwrap();
            let matchings = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]];
            let (products, sums) = (costs(false), costs(true));
            let weigh = |costs: &crate::matrix::PairCosts, m: &[(usize, usize); 2]| costs.mutual_cost(m[0].0, m[0].1) + costs.mutual_cost(m[1].0, m[1].1);
            let uneven = |m: &[(usize, usize); 2]| m.iter().map(|&(a, b)| (rates[a] + rates[b]) * (rates[a] + rates[b])).sum::<f64>();
            for m in &matchings {
                for other_matching in &matchings {
                    prop_assert!((2.0 * (weigh(&products, m) - weigh(&products, other_matching)) - (uneven(m) - uneven(other_matching))).abs() < 1e-6);
                    prop_assert!((weigh(&sums, m) - weigh(&sums, other_matching)).abs() < 1e-9);
                }
            }
        }
    }
}
