//! Animal classes with sensitive devils (Xie and Loh 2008; CA 2.2.2).
//!
//! Problem: a rough estimate is wanted from a few classes of programs. Method: a turtle makes little use of the cache.
//! A sheep has a low miss rate and is insensitive to ways. A rabbit has a low miss rate and is sensitive. A devil has a
//! high miss rate. A symbiosis table gives the mutual cost of two classes.
//!
//! CA publishes two cells, turtle + turtle = 0 and devil + devil = 8, and states that all others lie between. The other
//! cells are our own choice ([`SYMBIOSIS`]): they are symmetric and grow with each class. Two unlike pairs never cost
//! more than the two like pairs of the same four programs, so that the table spreads devils and rabbits as CA's best
//! schedules do. Properties: the table is the mutual cost; each of the two programs bears half of it.

use cachemate_core::Profile;
use cachemate_locality::animal::{Animal, AnimalThresholds, classify};

use super::shared_cache::{SharedCache, stack_positions_on};
use super::{GroupCosts, MissingEvidence, Scheme, gather_evidence};
use crate::matrix::CostKind;

/// Mutual cost of two classes, from 0 to 8, in the order turtle, sheep, rabbit, devil.
pub const SYMBIOSIS: [[f64; 4]; 4] = [
    [0.0, 1.0, 1.0, 2.0],
    [1.0, 2.0, 3.0, 4.0],
    [1.0, 3.0, 4.0, 5.0],
    [2.0, 4.0, 5.0, 8.0],
];

fn row_of_animal(animal: Animal) -> usize {
    match animal {
        Animal::Turtle => 0,
        Animal::Sheep => 1,
        Animal::Rabbit => 2,
        Animal::Devil => 3,
    }
}

/// The mutual cost of two classes.
pub fn symbiosis(a: Animal, b: Animal) -> f64 {
    SYMBIOSIS[row_of_animal(a)][row_of_animal(b)]
}

/// The scheme that pairs programs by their animal classes.
#[derive(Default)]
pub struct AnimalClasses {
    /// Rates that separate the classes.
    pub thresholds: AnimalThresholds,
}

impl Scheme for AnimalClasses {
    fn name(&self) -> &'static str {
        "animal"
    }

    fn group_costs(
        &self,
        members: &[&Profile],
        cache: &SharedCache,
    ) -> Result<GroupCosts, MissingEvidence> {
        let animals = gather_evidence(
            self,
            members,
            "stack positions of a cache with as many ways",
            |profile| classify(stack_positions_on(profile, cache)?, &self.thresholds),
        )?;
        Ok(GroupCosts::sum_of_pairs(
            CostKind::Weight,
            members.len(),
            |i, j| 0.5 * symbiosis(animals[i], animals[j]),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::with_positions;
    use super::*;

    const ALL: [Animal; 4] = [Animal::Turtle, Animal::Sheep, Animal::Rabbit, Animal::Devil];

    /// Does the table contain CA's published cells, and do the other cells lie between them?
    #[test]
    fn the_table_has_the_published_cells_and_others_between_them() {
        assert_eq!(symbiosis(Animal::Turtle, Animal::Turtle), 0.0);
        assert_eq!(symbiosis(Animal::Devil, Animal::Devil), 8.0);
        for (i, a) in ALL.into_iter().enumerate() {
            for (j, b) in ALL.into_iter().enumerate() {
                assert_eq!(symbiosis(a, b), symbiosis(b, a));
                if i + j > 0 && i + j < 6 {
                    assert!(symbiosis(a, b) > 0.0 && symbiosis(a, b) < 8.0);
                }
                if j > 0 {
                    assert!(symbiosis(a, b) >= symbiosis(a, ALL[j - 1]), "{a:?} {b:?}");
                }
            }
        }
    }

    /// Do unlike pairs never cost more than like pairs?
    #[test]
    fn unlike_pairs_never_cost_more_than_like_pairs() {
        for a in ALL {
            for b in ALL {
                assert!(
                    2.0 * symbiosis(a, b) <= symbiosis(a, a) + symbiosis(b, b),
                    "{a:?} {b:?}"
                );
            }
        }
    }

    /// Are programs classified and paired by the table?
    #[test]
    fn programs_are_classified_and_paired_by_the_table() {
        let cache = SharedCache::new(4 * 64, 4, 64, 100.0);
        let devil = with_positions(&[1000.0, 500.0, 100.0, 100.0, 30_000.0]);
        let turtle = with_positions(&[10.0, 5.0, 1.0, 1.0, 3.0]);
        let costs = AnimalClasses::default()
            .pair_costs(&[&devil, &devil, &turtle, &turtle], &cache)
            .unwrap();
        assert_eq!(
            (
                costs.mutual_cost(0, 1),
                costs.mutual_cost(2, 3),
                costs.mutual_cost(0, 2)
            ),
            (8.0, 0.0, 2.0)
        );
    }
}
