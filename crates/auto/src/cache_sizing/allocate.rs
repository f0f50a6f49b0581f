//! Allocates a cache: which groups share a partition, and how large each partition is.
//!
//! Problem: the programs on one cache (possibly more than it has CPUs), their demand for space and the operator's goals
//! are given; the groups and their numbers of units are to be found. Method:
//! 1. *Pool.* Programs whose speed hardly depends on space go into one partition (thesis 5.4, footnote 9).
//! 2. *Lanes.* With more programs than CPUs, programs that never run together may have the same units. Programs of
//!    similar demand form a time-share group, with a penalty for running together (thesis 7.3).
//! 3. *Sizes* come from the exact solver, or from lookahead if the solver would take too long; floors follow from the
//!    goals.
//!
//! Properties: results are deterministic, and ties break by order of arrival. Floors that do not fit together are
//! lowered, largest first. Lowered floors are reported, and so is the cost of floors to other programs.

use cachemate_papers::partition::demand_curve::DemandCurve;
use cachemate_papers::solvers::sizing::{
    ClaimError, CostAggregate, UnitClaim, allocate_by_lookahead, allocate_exactly, pool_costs,
};

use serde::Deserialize;

/// The quantity that sizing optimizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SizingObjective {
    /// Maximizes the sum of speeds relative to the solo speeds.
    #[default]
    WeightedSpeedup,
    /// Minimizes the largest slowdown.
    Fairness,
}

/// A process that claims space.
#[derive(Clone, PartialEq, Debug)]
pub struct Claimant {
    pub demand: DemandCurve,
    pub priority: f64,
    pub max_slowdown: Option<f64>,
    /// Minimum number of units, because measurements show that fewer do not meet the goal; 1 without such a
    /// measurement.
    pub min_units: u32,
}

impl Claimant {
    fn min_required_units(&self) -> u32 {
        self.max_slowdown.map_or(1, |limit| {
            self.demand.min_units_within(limit).max(self.min_units)
        })
    }
    /// Whether the program, at this many cycles per instruction, is slower than its goal allows.
    pub fn misses_goal(&self, cycles: f64, max_slowdown: f64) -> bool {
        cycles / self.demand.whole_cache_cycles() - 1.0 > max_slowdown + 1e-9
    }
    fn cost_of_size(&self, objective: SizingObjective, cycles: f64) -> f64 {
        let whole_cache_cycles = self.demand.whole_cache_cycles();
        match objective {
            SizingObjective::WeightedSpeedup => -self.priority * whole_cache_cycles / cycles,
            // A slowdown of a program of priority 2 counts twice.
            SizingObjective::Fairness => self.priority * (cycles / whole_cache_cycles - 1.0),
        }
    }
    fn costs_by_size(&self, objective: SizingObjective) -> Vec<f64> {
        let cycles_by_size = self.demand.cycles_per_instr.iter();
        cycles_by_size
            .map(|&cycles| self.cost_of_size(objective, cycles))
            .collect()
    }
}

impl SizingObjective {
    pub fn cost_aggregate(self) -> CostAggregate {
        if self == SizingObjective::Fairness {
            CostAggregate::Worst
        } else {
            CostAggregate::Sum
        }
    }
    /// The cost of a plan under which programs run like this; smaller is better.
    pub fn cost(self, claimants: &[Claimant], paces: &[ProgramPace]) -> f64 {
        let costs = claimants
            .iter()
            .zip(paces)
            .map(|(claimant, pace)| claimant.cost_of_size(self, pace.cycles_per_instr));
        self.cost_aggregate().aggregate(costs)
    }
}

/// How a program runs under some shares.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ProgramPace {
    pub misses_per_kilo_instr: f64,
    pub cycles_per_instr: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PartitionKind {
    /// One process that has its own units.
    Own,
    /// Programs that are insensitive to space and share units.
    Pool,
    /// Programs that take turns on the same units, and should not run together.
    TimeShare,
}

/// The claimants that share a partition, by index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartitionGroup {
    pub kind: PartitionKind,
    pub members: Vec<usize>,
    pub units: u32,
}

/// The limits of the partitions of a cache.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AllocationLimits {
    pub objective: SizingObjective,
    pub units: u32,
    /// Minimum number of units of a group that the machine allows.
    pub min_units: u32,
    pub max_groups: u32,
    /// A program is pooled if running on one unit slows it down by at most this fraction, compared with the whole
    /// cache.
    pub pool_max_slowdown: f64,
    /// Maximum number of programs that can run concurrently on this cache.
    pub concurrent_programs: u32,
}

/// The groups with their sizes, and the goals that could not be met.
#[derive(Clone, PartialEq, Debug)]
pub struct Allocation {
    pub groups: Vec<PartitionGroup>,
    /// Claimants whose floor was lowered because it did not fit.
    pub lowered_floors: Vec<usize>,
    /// Cost of the floors to the other programs: the objective's total of programs without a floor, minus the same
    /// total without floors.
    pub floor_cost_to_others: Option<f64>,
}

/// Number of steps above which lookahead replaces the exact solver.
const MAX_EXACT_STEPS: u64 = 4_000_000;
/// Slowdown, as a fraction, by which claimants are ordered: the demand of a program is the smallest number of units
/// with at most this slowdown.
const DEMAND_SLOWDOWN: f64 = 0.05;

/// Allocates the units of the cache to the claimants.
///
/// # Errors
/// There are no claimants, or the machine allows no group.
pub fn allocate(
    claimants: &[Claimant],
    limits: &AllocationLimits,
) -> Result<Allocation, ClaimError> {
    let mut groups = group_claimants(claimants, limits);
    let mut claims: Vec<UnitClaim> = groups
        .iter()
        .map(|group| build_claim(claimants, group, limits))
        .collect();
    let lowered_floors = fit_floors(claimants, &groups, &mut claims, limits);
    let sizes = size_partitions(&claims, limits)?;
    let floors_cost = floors_cost(claimants, &groups, &claims, &sizes, limits);
    groups
        .iter_mut()
        .zip(sizes)
        .for_each(|(group, units)| group.units = units);

    Ok(Allocation {
        groups,
        lowered_floors,
        floor_cost_to_others: floors_cost,
    })
}

/// Groups the claimants into the pool and the lanes of all others, each in order of arrival.
fn group_claimants(claimants: &[Claimant], limits: &AllocationLimits) -> Vec<PartitionGroup> {
    let has_floor = |at: &usize| claimants[*at].max_slowdown.is_some();
    let claimant_indices = || 0..claimants.len();
    let pool: Vec<usize> = claimant_indices()
        .filter(|index| {
            !has_floor(index) && claimants[*index].demand.sensitivity() <= limits.pool_max_slowdown
        })
        .collect();
    let mut unpooled_claimants: Vec<usize> = claimant_indices()
        .filter(|index| !pool.contains(index))
        .collect();

    let max_groups = limits
        .max_groups
        .min(limits.units / limits.min_units.max(1))
        .max(1) as usize;
    // A pool of one program is an ordinary program with a small demand.
    let lane_count = (limits.concurrent_programs.max(1) as usize)
        .min(max_groups - usize::from(!pool.is_empty() && max_groups > 1));
    let mut groups: Vec<PartitionGroup> = Vec::new();

    if unpooled_claimants.len() > lane_count.max(1) {
        unpooled_claimants.sort_by_key(|&index| {
            std::cmp::Reverse(claimants[index].demand.min_units_within(DEMAND_SLOWDOWN))
        });
        let lane_size = unpooled_claimants.len().div_ceil(lane_count.max(1));
        for group in unpooled_claimants.chunks(lane_size) {
            let mut members = group.to_vec();
            members.sort_unstable();
            let kind = if members.len() > 1 {
                PartitionKind::TimeShare
            } else {
                PartitionKind::Own
            };
            groups.push(PartitionGroup {
                kind,
                members,
                units: 0,
            });
        }
        groups.sort_by_key(|group| group.members[0]);
    } else {
        groups.extend(unpooled_claimants.into_iter().map(|at| PartitionGroup {
            kind: PartitionKind::Own,
            members: vec![at],
            units: 0,
        }));
    }

    if !pool.is_empty() {
        if groups.len() < max_groups {
            groups.push(PartitionGroup {
                kind: PartitionKind::Pool,
                members: pool,
                units: 0,
            });
        } else if let Some(last_group) = groups.last_mut() {
            last_group.members.extend(pool);
            last_group.kind = PartitionKind::Pool;
        }
    }
    groups
}

fn build_claim(
    claimants: &[Claimant],
    group: &PartitionGroup,
    limits: &AllocationLimits,
) -> UnitClaim {
    let costs: Vec<Vec<f64>> = group
        .members
        .iter()
        .map(|&index| claimants[index].costs_by_size(limits.objective))
        .collect();
    let costs = match group.kind {
        PartitionKind::Own => costs.into_iter().next().unwrap_or_default(),
        PartitionKind::Pool => {
            let costs: Vec<&[f64]> = costs.iter().map(Vec::as_slice).collect();
            pool_costs(&costs, limits.units, limits.objective.cost_aggregate())
        }
        // Each member has all units of the group while it runs.
        PartitionKind::TimeShare => {
            let aggregate = limits.objective.cost_aggregate();
            (0..limits.units as usize)
                .map(|units| aggregate.aggregate(costs.iter().map(|costs| costs[units])))
                .collect()
        }
    };

    let min_units = group
        .members
        .iter()
        .map(|&index| claimants[index].min_required_units())
        .max()
        .unwrap_or(1);
    UnitClaim {
        costs,
        min_units: min_units.max(limits.min_units),
    }
}

/// Lowers floors that do not fit together, the largest first. Returns the claimants whose floors were lowered.
fn fit_floors(
    claimants: &[Claimant],
    groups: &[PartitionGroup],
    claims: &mut [UnitClaim],
    limits: &AllocationLimits,
) -> Vec<usize> {
    let mut lowered_claimants = Vec::new();
    let min_units = limits.min_units.max(1);
    while claims.iter().map(|claim| claim.min_units).sum::<u32>() > limits.units {
        let Some(largest_index) = (0..claims.len())
            .rev()
            .max_by_key(|&index| claims[index].min_units)
        else {
            break;
        };
        if claims[largest_index].min_units <= min_units {
            break;
        }

        claims[largest_index].min_units -= 1;
        for &index in groups[largest_index]
            .members
            .iter()
            .filter(|&&claimant| claimants[claimant].max_slowdown.is_some())
        {
            if !lowered_claimants.contains(&index) {
                lowered_claimants.push(index);
            }
        }
    }

    lowered_claimants
}

fn size_partitions(
    claims: &[UnitClaim],
    limits: &AllocationLimits,
) -> Result<Vec<u32>, ClaimError> {
    let steps = claims.len() as u64 * u64::from(limits.units) * u64::from(limits.units);
    // Lookahead adds up savings, so the objective of the slowest program requires the exact solver.
    if steps <= MAX_EXACT_STEPS || limits.objective.cost_aggregate() == CostAggregate::Worst {
        allocate_exactly(claims, limits.units, limits.objective.cost_aggregate())
    } else {
        allocate_by_lookahead(claims, limits.units)
    }
}

/// The cost of the goals to the other programs: the total cost of the programs without a floor, with the floors in
/// force minus without them.
fn floors_cost(
    claimants: &[Claimant],
    groups: &[PartitionGroup],
    claims: &[UnitClaim],
    sizes: &[u32],
    limits: &AllocationLimits,
) -> Option<f64> {
    let has_floor = |group: &PartitionGroup| {
        group
            .members
            .iter()
            .any(|&index| claimants[index].max_slowdown.is_some())
    };
    if !groups.iter().any(has_floor) || groups.iter().all(has_floor) {
        return None;
    }

    let unfloored_claims: Vec<UnitClaim> = claims
        .iter()
        .map(|claim| UnitClaim {
            min_units: limits.min_units.max(1),
            ..claim.clone()
        })
        .collect();
    let unfloored_sizes = size_partitions(&unfloored_claims, limits).ok()?;
    let cost_of_others = |sizes: &[u32]| -> f64 {
        let other_claims = groups
            .iter()
            .zip(claims)
            .zip(sizes)
            .filter(|((group, _), _)| !has_floor(group));
        other_claims
            .map(|((_, claim), &units)| claim.costs[units as usize - 1])
            .sum()
    };
    Some(cost_of_others(sizes) - cost_of_others(&unfloored_sizes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A claimant with these cycles per instruction by units, and one miss per instruction for each cycle above one.
    fn claimant_fixture(cycles: &[f64]) -> Claimant {
        let misses = cycles.iter().map(|cycles| (cycles - 1.0) * 10.0).collect();
        let demand = DemandCurve {
            misses_per_kilo_instr: misses,
            cycles_per_instr: cycles.to_vec(),
        };
        Claimant {
            demand,
            priority: 1.0,
            max_slowdown: None,
            min_units: 1,
        }
    }
    fn sensitive_claimant(steps: u32) -> Claimant {
        claimant_fixture(
            &(1..=16)
                .map(|units| if units >= steps { 1.0 } else { 2.0 })
                .collect::<Vec<_>>(),
        )
    }
    fn flat_claimant() -> Claimant {
        claimant_fixture(&[1.5; 16])
    }
    fn allocation_limits(objective: SizingObjective) -> AllocationLimits {
        AllocationLimits {
            objective,
            units: 16,
            min_units: 1,
            max_groups: 16,
            pool_max_slowdown: 0.02,
            concurrent_programs: 4,
        }
    }
    fn group_sizes(allocation: &Allocation) -> Vec<(Vec<usize>, u32)> {
        allocation
            .groups
            .iter()
            .map(|group| (group.members.clone(), group.units))
            .collect()
    }

    /// Are programs that are insensitive to space pooled, so that the others get more?
    #[test]
    fn insensitive_programs_are_pooled() {
        let claimants = [
            flat_claimant(),
            sensitive_claimant(14),
            flat_claimant(),
            flat_claimant(),
        ];
        let allocation = allocate(
            &claimants,
            &allocation_limits(SizingObjective::WeightedSpeedup),
        )
        .unwrap();
        assert_eq!(allocation.groups[1].kind, PartitionKind::Pool);
        let (own_group, pool) = (&group_sizes(&allocation)[0], &group_sizes(&allocation)[1]);
        assert!(
            own_group.0 == [1] && own_group.1 >= 14 && pool.0 == [0, 2, 3],
            "{allocation:?}"
        );
    }

    /// With more programs than CPUs, do programs of similar demand share a lane?
    #[test]
    fn programs_of_similar_demand_share_a_lane() {
        let claimants = [
            sensitive_claimant(12),
            sensitive_claimant(4),
            sensitive_claimant(12),
            sensitive_claimant(4),
        ];
        let allocation = allocate(
            &claimants,
            &AllocationLimits {
                concurrent_programs: 2,
                ..allocation_limits(SizingObjective::WeightedSpeedup)
            },
        )
        .unwrap();

        assert!(
            allocation
                .groups
                .iter()
                .all(|group| group.kind == PartitionKind::TimeShare)
        );
        assert_eq!(
            group_sizes(&allocation),
            [(vec![0, 2], 12), (vec![1, 3], 4)]
        );
    }

    /// Is a goal met, and its cost to the others reported?
    #[test]
    fn a_goal_is_met_and_its_cost_reported() {
        let mut promised = claimant_fixture(
            &(0..16)
                .map(|held| 2.0 - f64::from(held) * 0.05)
                .collect::<Vec<_>>(),
        );
        let greedy = sensitive_claimant(12);
        let unpromised_allocation = allocate(
            &[promised.clone(), greedy.clone()],
            &allocation_limits(SizingObjective::WeightedSpeedup),
        )
        .unwrap();
        assert_eq!(
            group_sizes(&unpromised_allocation),
            [(vec![0], 4), (vec![1], 12)]
        );
        promised.max_slowdown = Some(0.2);
        let allocation = allocate(
            &[promised.clone(), greedy.clone()],
            &allocation_limits(SizingObjective::WeightedSpeedup),
        )
        .unwrap();
        let units = allocation.groups[0].units;
        let slowed = promised.demand.cycles_per_instr[units as usize - 1]
            / promised.demand.whole_cache_cycles()
            - 1.0;
        assert!(
            slowed <= 0.2 + 1e-9 && units >= 11,
            "{units} units, slowed by {slowed}"
        );
        assert_eq!(allocation.floor_cost_to_others, Some(0.5));
        assert_eq!(unpromised_allocation.floor_cost_to_others, None);
    }

    /// Are goals that do not fit together lowered and reported?
    #[test]
    fn goals_that_do_not_fit_are_lowered() {
        let promised = Claimant {
            max_slowdown: Some(0.0),
            ..sensitive_claimant(12)
        };
        let allocation = allocate(
            &[promised.clone(), promised],
            &allocation_limits(SizingObjective::WeightedSpeedup),
        )
        .unwrap();
        assert_eq!(allocation.lowered_floors.len(), 2);
        assert_eq!(
            allocation
                .groups
                .iter()
                .map(|group| group.units)
                .sum::<u32>(),
            16
        );
    }

    /// Does a program that gains little speed from much space stay small, and does fairness help the slowest?
    #[test]
    fn each_objective_leads_to_the_allocation_of_its_name() {
        let curve = |start: f64, step: f64| {
            claimant_fixture(
                &(1..=16)
                    .map(|units| start - f64::from(units) * step)
                    .collect::<Vec<_>>(),
            )
        };
        let claimants = [curve(1.2, 0.01), curve(4.0, 0.15)];
        for objective in [SizingObjective::WeightedSpeedup, SizingObjective::Fairness] {
            let allocation = allocate(&claimants, &allocation_limits(objective)).unwrap();
            assert_eq!(allocation.groups[0].units, 1, "{objective:?}");
        }
    }

    /// Are there as many groups as the machine allows, but no more?
    #[test]
    fn groups_stay_within_the_limit_of_the_machine() {
        let claimants: Vec<Claimant> = (0..6)
            .map(|index| {
                if index < 2 {
                    flat_claimant()
                } else {
                    sensitive_claimant(2 * index)
                }
            })
            .collect();

        for max_groups in 1..8 {
            let allocation = allocate(
                &claimants,
                &AllocationLimits {
                    max_groups,
                    concurrent_programs: 8,
                    ..allocation_limits(SizingObjective::WeightedSpeedup)
                },
            )
            .unwrap();
            assert!(allocation.groups.len() <= max_groups as usize);
            let mut members: Vec<usize> = allocation
                .groups
                .iter()
                .flat_map(|group| group.members.clone())
                .collect();
            members.sort_unstable();
            assert_eq!(members, [0, 1, 2, 3, 4, 5]);
        }
    }
}
