//! Classification schemes, which estimate the mutual effects of programs on a shared cache from their profiles.
//!
//! Each scheme is one file, and is listed in [`all_schemes`]. A scheme returns either each program's slowdown
//! ([`CostKind::Degradation`]) or a weight that only orders pairs ([`CostKind::Weight`]); a matching can use both.

mod animal;
mod pain;
mod rates;
mod sdc;
mod shared_cache;
mod statcc;
#[cfg(test)]
mod testing;

pub use animal::{AnimalClasses, SYMBIOSIS, symbiosis};
pub use pain::{Pain, pain_sensitivity};
pub use rates::{RateKind, RateScheme, miss_rate};
pub use sdc::{Sdc, effective_ways};
pub use shared_cache::{
    SharedCache, SoloRates, misses_on_share_per_mega_instr, refs_per_mega_instr,
    solo_misses_per_mega_instr, stack_positions_on,
};
pub use statcc::StatCc;

use cachemate_core::{Profile, nearest_name, suggestion};

use crate::matrix::{CostKind, PairCosts};

/// The error for a profile that lacks evidence that the scheme requires.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("scheme '{scheme}' needs {what} of program {program}, which its profile does not have")]
pub struct MissingEvidence {
    /// Name of the scheme.
    pub scheme: &'static str,
    /// Index of the program in the given list.
    pub program: usize,
    /// Description of the missing evidence.
    pub what: &'static str,
}

/// The costs of the members of one group on one cache.
#[derive(Clone, PartialEq, Debug)]
pub struct GroupCosts {
    /// Meaning and unit of `costs`.
    pub kind: CostKind,
    /// Cost of each member, in the order given.
    pub costs: Vec<f64>,
    /// Misses per access of each member (0 to 1); `None` if the scheme does not compute them.
    pub miss_ratios: Option<Vec<f64>>,
    /// Miss ratio of all accesses of the group together.
    pub group_miss_ratio: Option<f64>,
}

impl GroupCosts {
    /// Builds the costs for schemes that only compare pairs: each member bears the sum over the others.
    pub(crate) fn sum_of_pairs(
        kind: CostKind,
        members: usize,
        pair_cost: impl Fn(usize, usize) -> f64,
    ) -> Self {
        let cost_of_member = |i: usize| {
            (0..members)
                .filter(|&j| j != i)
                .map(|j| pair_cost(i, j))
                .sum()
        };
        GroupCosts {
            kind,
            costs: (0..members).map(cost_of_member).collect(),
            miss_ratios: None,
            group_miss_ratio: None,
        }
    }
}

/// A classification scheme, whose results depend on the arguments only.
pub trait Scheme {
    /// The scheme's name on the command line.
    fn name(&self) -> &'static str;

    /// The cost of each member if the whole group runs at once and has the cache to itself.
    ///
    /// # Errors
    /// Names the first program without the required evidence.
    fn group_costs(
        &self,
        members: &[&Profile],
        cache: &SharedCache,
    ) -> Result<GroupCosts, MissingEvidence>;

    /// The cost of each program beside each other one, on a cache that the two have to themselves.
    fn pair_costs(
        &self,
        profiles: &[&Profile],
        cache: &SharedCache,
    ) -> Result<PairCosts, MissingEvidence> {
        let program_count = profiles.len();
        let (mut kind, mut cost) = (
            self.group_costs(&[], cache)?.kind,
            vec![vec![0.0; program_count]; program_count],
        );
        for i in 0..program_count {
            for j in i..program_count {
                let with_group_index = |missing: MissingEvidence| MissingEvidence {
                    program: [i, j][missing.program],
                    ..missing
                };
                let pair = self
                    .group_costs(&[profiles[i], profiles[j]], cache)
                    .map_err(with_group_index)?;
                kind = pair.kind;
                (cost[i][j], cost[j][i]) = (pair.costs[0], pair.costs[1]);
            }
        }
        Ok(PairCosts { kind, cost })
    }
}

/// The evidence of every member, or an error for the first member without it.
pub(crate) fn gather_evidence<'a, T>(
    scheme: &dyn Scheme,
    members: &[&'a Profile],
    subject: &'static str,
    fact_of: impl Fn(&'a Profile) -> Option<T>,
) -> Result<Vec<T>, MissingEvidence> {
    let missing_evidence = |program| MissingEvidence {
        scheme: scheme.name(),
        program,
        what: subject,
    };
    members
        .iter()
        .enumerate()
        .map(|(index, profile)| fact_of(profile).ok_or_else(|| missing_evidence(index)))
        .collect()
}

/// All schemes, in the order of their names.
pub fn all_schemes() -> Vec<Box<dyn Scheme>> {
    let rate_scheme = |rate, sum| {
        Box::new(RateScheme {
            rate,
            uses_sum: sum,
        })
    };

    vec![
        rate_scheme(RateKind::Access, false),
        Box::new(AnimalClasses::default()),
        Box::new(StatCc {
            solves_jointly: false,
        }),
        rate_scheme(RateKind::Cpi, false),
        rate_scheme(RateKind::Miss, false),
        rate_scheme(RateKind::Miss, true),
        Box::new(Pain),
        rate_scheme(RateKind::Pcmr, false),
        Box::new(Sdc {
            reports_run_time: true,
        }),
        Box::new(Sdc {
            reports_run_time: false,
        }),
        Box::new(StatCc {
            solves_jointly: true,
        }),
    ]
}

/// The error for an unknown scheme name.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("no scheme '{name}'; there are {known}{meant}")]
pub struct UnknownScheme {
    /// The requested name.
    pub name: String,
    /// The known names, as a list.
    pub known: String,
    meant: String,
}

/// The scheme called `name`.
///
/// # Errors
/// There is no such scheme; the error has the known names and the most similar one.
pub fn find_scheme(name: &str) -> Result<Box<dyn Scheme>, UnknownScheme> {
    let schemes = all_schemes();
    let known_names: Vec<&str> = schemes.iter().map(|scheme| scheme.name()).collect();
    let meant = suggestion(nearest_name(name, known_names.iter().copied()));
    let unknown = UnknownScheme {
        name: name.to_string(),
        known: known_names.join(", "),
        meant,
    };
    schemes
        .into_iter()
        .find(|scheme| scheme.name() == name)
        .ok_or(unknown)
}

#[cfg(test)]
mod tests {
    use super::testing::with_positions;
    use super::*;
    use cachemate_core::{Fact, FactSource};
    use proptest::prelude::*;

    /// Is every scheme found by its name, in order, and is the most similar one named in the error for an unknown name?
    #[test]
    fn schemes_are_found_by_name() {
        let names: Vec<&str> = all_schemes().iter().map(|scheme| scheme.name()).collect();
        assert!(names.is_sorted());
        names.iter().for_each(|name| {
            assert_eq!(
                find_scheme(name).map(|scheme| scheme.name()).ok(),
                Some(*name)
            )
        });
        let error = find_scheme("pane")
            .err()
            .map(|error| error.to_string())
            .unwrap();
        assert!(
            error.starts_with("no scheme 'pane'; there are access-rate, animal,"),
            "{error}"
        );
        assert!(error.ends_with("(did you mean 'pain'?)"), "{error}");
    }

    fn any_profile() -> impl Strategy<Value = Profile> {
        let positions = prop::collection::vec(1.0f64..5000.0, 5);
        let times = prop::collection::vec((0u32..12, 0.1f64..1.0), 1..6);
        (positions, times, 0.1f64..1.0, 0.2f64..2.0, 0.0f64..50.0).prop_map(
            |(positions, times, cold_weight, ipc, pcmr)| {
                let mut reuse = cachemate_locality::reuse::ReuseTimes::new();
                times
                    .iter()
                    .for_each(|&(log, weight)| reuse.add_weighted(Some(1 << log), weight));
                reuse.add_weighted(None, cold_weight);
                let mut profile = with_positions(&positions);
                profile.locality.reuse_times = reuse
                    .to_profile()
                    .map(|times| Fact::new(times, FactSource::Oracle, 0));
                profile.rates.solo_instr_per_cycle = Some(Fact::oracle(ipc));
                profile.rates.pcmr = Some(Fact::oracle(pcmr));
                profile
            },
        )
    }

    const CACHE_LINES: u64 = 64;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// For every scheme: does renaming programs rename the costs, is every cost finite and not negative, and does a
        /// group of two have the costs of its pair?
        #[test]
        fn renaming_programs_renames_the_costs(profiles in prop::collection::vec(any_profile(), 3)) {
            let cache = SharedCache { hit_latency_cycles: 10.0, ..SharedCache::new(CACHE_LINES * 64, 4, 64, 100.0) };
            let ordered_profiles: Vec<&Profile> = profiles.iter().collect();
            let reversed_profiles: Vec<&Profile> = profiles.iter().rev().collect();
            for scheme in all_schemes() {
                let (a, b) = (scheme.pair_costs(&ordered_profiles, &cache).unwrap(), scheme.pair_costs(&reversed_profiles, &cache).unwrap());
                for i in 0..3 {
                    for j in 0..3 {
                        let (original_cost, renamed) = (a.cost[i][j], b.cost[2 - i][2 - j]);
                        prop_assert!((original_cost - renamed).abs() <= 1e-6 * (1.0 + original_cost.abs()), "{} {original_cost} {renamed}", scheme.name());
                        prop_assert!(original_cost.is_finite() && original_cost >= -1e-9, "{} {original_cost}", scheme.name());
                    }
                }
                let pair = scheme.group_costs(&ordered_profiles[..2], &cache).unwrap();
                prop_assert_eq!(pair.costs, vec![a.cost[0][1], a.cost[1][0]]);
            }
        }

        /// Is a group never better off with a third member, for every scheme?
        #[test]
        fn more_co_runners_never_help(profiles in prop::collection::vec(any_profile(), 3)) {
            let cache = SharedCache::new(CACHE_LINES * 64, 4, 64, 100.0);
            let members: Vec<&Profile> = profiles.iter().collect();
            for scheme in all_schemes() {
                let two = scheme.group_costs(&members[..2], &cache).unwrap().costs;
                let three = scheme.group_costs(&members, &cache).unwrap().costs;
                prop_assert!(three[0] >= two[0] - 1e-6 * (1.0 + two[0].abs()), "{} {two:?} {three:?}", scheme.name());
            }
        }
    }

    /// Does missing evidence give an error that names the program?
    #[test]
    fn absent_evidence_is_an_error_that_names_the_program() {
        let cache = SharedCache::new(CACHE_LINES * 64, 4, 64, 100.0);
        let (known_profile, unknown_profile) = (
            with_positions(&[1.0, 1.0, 1.0, 1.0, 1.0]),
            Profile::default(),
        );
        for scheme in all_schemes() {
            let error = scheme
                .pair_costs(&[&unknown_profile, &unknown_profile], &cache)
                .unwrap_err();
            assert_eq!(error.program, 0, "{}", scheme.name());
        }
        let error = Pain
            .pair_costs(&[&known_profile, &known_profile, &unknown_profile], &cache)
            .unwrap_err();
        let expected = "scheme 'pain' needs stack positions of a cache with as many ways of program 2, which its profile does not have";
        assert_eq!(error.to_string(), expected);
    }
}
