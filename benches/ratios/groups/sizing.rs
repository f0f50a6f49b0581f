//! Sizing of partitions: 32 programs on 256 colors, by the exact solver and by lookahead.
//!
//! The targets are at most 50 ms (exact) and 1 ms (lookahead) for one assignment: 0.00002 and 0.001 million assignments
//! per second. Curves are steep, flat, or have cliffs, drawn from a seed; the two results may differ.

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_core::SplitMix64;
use cachemate_papers::solvers::sizing::{
    CostAggregate, UnitClaim, allocate_by_lookahead, allocate_exactly,
};

pub const GROUP: BenchGroup = BenchGroup {
    name: "sizing",
    about: "dealing 256 colors to 32 programs: exact against lookahead",
    run,
};

const PROGRAMS: usize = 32;
const UNITS: u32 = 256;
const ALLOCATIONS: usize = 20;

fn random_claims(seed: u64) -> Vec<UnitClaim> {
    let mut generator = SplitMix64::new(seed);
    let claim = |_| {
        let max_cost = 5.0 + 60.0 * generator.draw_unit();
        let (cliff, kind) = (
            1 + generator.draw_below(u64::from(UNITS)) as u32,
            generator.draw_below(3),
        );
        let cost_of_units = |units: u32| match kind {
            0 => max_cost,
            1 => max_cost / (1.0 + f64::from(units) / 16.0),
            _ if units < cliff => max_cost,
            _ => 0.1 * max_cost,
        };
        let costs = (1..=UNITS)
            .map(|units| cost_of_units(units) + 0.01 * generator.draw_unit())
            .collect();
        UnitClaim {
            costs,
            min_units: 1,
        }
    };
    (0..PROGRAMS).map(claim).collect()
}

fn run(options: &Options) -> Vec<ResultRow> {
    let claim_sets: Vec<Vec<UnitClaim>> = (0..ALLOCATIONS as u64).map(random_claims).collect();
    let sum = |allocation: Vec<u32>| {
        u64::from(
            allocation
                .iter()
                .enumerate()
                .map(|(index, units)| index as u32 * units)
                .sum::<u32>(),
        )
    };
    let run_solver = |solve: fn(&[UnitClaim]) -> Vec<u32>| {
        let claim_sets = &claim_sets;
        move || claim_sets.iter().map(|claims| sum(solve(claims))).sum()
    };
    let contenders = vec![
        Contender::new(
            "exact",
            run_solver(|claims| {
                allocate_exactly(claims, UNITS, CostAggregate::Sum).expect("floors of one fit")
            }),
        ),
        Contender::new(
            "lookahead",
            run_solver(|claims| allocate_by_lookahead(claims, UNITS).expect("floors of one fit")),
        )
        .compare_with(0, None),
    ];
    compare(
        "sizing",
        "32 programs, 256 colors",
        ALLOCATIONS,
        options.rounds,
        BenchClock::Thread,
        false,
        contenders,
    )
}
