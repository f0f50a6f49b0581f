//! Places programs on a machine by pairwise slowdowns, and compares the plan with the best, the worst and random
//! placements.
//!
//! Problem: solvers count the CPUs of each cache, but users want named CPUs and reasons. Method: programs are placed on
//! the online CPUs of every last-level cache. While the programs fit on the cores, each core takes one program, so that
//! no two programs share a core needlessly. The solver's assignment is then translated into CPUs. The reason for a
//! program's placement is the comparison that decided it: the cost beside the neighbor that the program avoids, and
//! beside its actual neighbor. Properties: programs are identified by index, and ties go to the earlier program. The
//! reasons contain the numbers that decided.

use std::collections::BTreeMap;

use cachemate_core::{CacheId, CacheLevel, CpuId, CpuSet, Estimate, Reason, TaskId, Topology};
use serde::{Deserialize, Serialize};

use crate::matrix::{CostKind, PairCosts};
use crate::reasons::{explain_placement, render};
use crate::solvers::{self, Seating, Seats, SolverMethod};

/// The CPUs that share a last-level cache; CPUs of different cores come first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheSeats {
    /// The shared cache; `None` if the CPU has no known shared cache.
    pub cache: Option<CacheId>,
    /// CPUs that take programs.
    pub cpus: Vec<CpuId>,
}

/// The error if no placement is possible.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlacementError {
    /// The machine has no online CPU.
    #[error("the machine has no online CPU")]
    NoCpus,
    /// The size of the matrix does not match the number of names.
    #[error(
        "{names} programs but {what} of {rows} rows: expected a square matrix of finite numbers, one row for each"
    )]
    Shape {
        /// Number of names.
        names: usize,
        /// Description of the part of the matrix that does not fit.
        what: &'static str,
        /// Number of rows of the matrix.
        rows: usize,
    },
}

/// The CPUs for this number of programs: one CPU per core while that is enough, otherwise every hardware thread.
///
/// # Errors
/// The machine has no online CPU.
pub fn cache_seats(
    topology: &Topology,
    programs: usize,
) -> Result<Vec<CacheSeats>, PlacementError> {
    let mut online_cpus: Vec<_> = topology.cpus.iter().filter(|cpu| cpu.online).collect();
    online_cpus.sort_by_key(|cpu| cpu.id);
    if online_cpus.is_empty() {
        return Err(PlacementError::NoCpus);
    }

    // Rank of a CPU within its core; the CPUs of rank 0 of all cores come first.
    let mut used_by_core: BTreeMap<u32, usize> = BTreeMap::new();
    let mut rank_in_core = |core: u32| {
        let next_rank = used_by_core.entry(core).or_default();
        *next_rank += 1;
        *next_rank - 1
    };
    let mut ranked_cpus: Vec<(usize, &cachemate_core::Cpu)> = online_cpus
        .iter()
        .map(|cpu| (rank_in_core(cpu.core), *cpu))
        .collect();
    if programs <= ranked_cpus.iter().filter(|(rank, _)| *rank == 0).count() {
        ranked_cpus.retain(|(rank, _)| *rank == 0);
    }

    ranked_cpus.sort_by_key(|(rank, cpu)| (*rank, cpu.id));
    let mut seats: Vec<CacheSeats> = Vec::new();
    let mut covered_cpus = CpuSet::default();
    for cache in topology.last_level_caches() {
        let is_new_in_cache =
            |cpu: &CpuId| cache.cpus.contains(cpu.0) && !covered_cpus.contains(cpu.0);
        let cpus: Vec<CpuId> = ranked_cpus
            .iter()
            .map(|(_, cpu)| cpu.id)
            .filter(is_new_in_cache)
            .collect();
        covered_cpus.extend(cpus.iter().map(|cpu| cpu.0));

        if !cpus.is_empty() {
            seats.push(CacheSeats {
                cache: Some(cache.id),
                cpus,
            });
        }
    }

    for (_, cpu) in ranked_cpus
        .iter()
        .filter(|(_, cpu)| !covered_cpus.contains(cpu.id.0))
    {
        seats.push(CacheSeats {
            cache: None,
            cpus: vec![cpu.id],
        });
    }
    Ok(seats)
}

/// The mean cost over all programs, in the one field that fits the kind of matrix; none if it is unknown.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct PlacementCost {
    /// Mean slowdown in percent of the solo time; `None` for weights.
    pub mean_slowdown_percent: Option<f64>,
    /// Mean weight, which has no unit and serves only to compare placements.
    pub mean_weight: Option<f64>,
}

/// The placement of one program.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PlacedProgram {
    /// Name of the program.
    pub name: String,
    /// CPU of the program.
    pub cpu: CpuId,
    /// The last-level cache of its CPU; `None` if unknown.
    pub cache: Option<CacheId>,
    /// Programs on other CPUs of its cache.
    pub co_runners: Vec<String>,
    /// Programs on the same CPU.
    pub shares_cpu_with: Vec<String>,
    /// Expected slowdown in percent of the solo time; `None` if the matrix contains weights.
    pub slowdown_percent: Option<f64>,
    /// The slowdown as a share, with its 90 % interval; `None` if pairs were added up.
    #[serde(skip)]
    pub forecast: Option<Estimate>,
    /// Expected weight, without a unit; `None` if the matrix contains slowdowns.
    pub weight: Option<f64>,
    /// Reason for the placement, as text.
    pub reason: String,
}

/// One cache with the programs on it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PlacedCache {
    /// The cache; `None` for a CPU without a known shared cache.
    pub cache: Option<CacheId>,
    /// Level of the cache, if known.
    pub level: Option<CacheLevel>,
    /// Size of the cache in bytes, if known.
    pub size_bytes: Option<u64>,
    /// CPUs on which programs are placed, with their programs.
    pub cpus: Vec<(CpuId, Vec<String>)>,
}

/// A placement: the CPU of each program, the expected slowdown, and the reasons.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Placement {
    /// Programs in the order given.
    pub programs: Vec<PlacedProgram>,
    /// The same placement by cache.
    pub caches: Vec<PlacedCache>,
    /// Are all costs forecasts of all programs at once on the whole machine? Otherwise they add up pairs on one cache.
    pub covers_machine: bool,
    /// Expected cost of this placement.
    pub plan: PlacementCost,
    /// Expected cost of the best placement found; see [`Placement::lower_bound`].
    pub best: PlacementCost,
    /// Expected cost of the worst placement found.
    pub worst: PlacementCost,
    /// Mean over all assignments with even loads: exact for pairs, over a seeded sample for forecasts.
    pub random: PlacementCost,
    /// 5th percentile of the costs in a seeded sample of random assignments.
    pub random_low_5_percent: PlacementCost,
    /// 95th percentile of the costs in the same sample.
    pub random_high_5_percent: PlacementCost,
    /// Method of the solver.
    pub method: SolverMethod,
    /// Lower bound of the cost of any assignment, by the matrix that decided; equal to the plan's cost if the method is
    /// exact. Unknown for a local search over forecasts.
    pub lower_bound: PlacementCost,
    /// Upper bound of the distance between the plan and the optimum, in the same unit; 0 means that the plan is proven
    /// optimal.
    pub gap: PlacementCost,
    /// Reasons with their numbers; `TaskId(n)` is program n.
    pub reasons: Vec<Reason>,
}

impl Placement {
    /// Gives every CPU another number: that at its position in `numbers`. CPUs beyond them keep their numbers.
    pub fn renumber_cpus(&mut self, numbers: &[u32]) {
        let renumber = |cpu: &mut CpuId| {
            if let Some(&number) = numbers.get(cpu.0 as usize) {
                *cpu = CpuId(number);
            }
        };
        self.programs
            .iter_mut()
            .for_each(|program| renumber(&mut program.cpu));
        for cache in &mut self.caches {
            cache.cpus.iter_mut().for_each(|(cpu, _)| renumber(cpu));
        }
    }
}

/// Checks that the matrix has one finite entry for each pair of programs.
pub(crate) fn check_costs(names: &[String], costs: &PairCosts) -> Result<(), PlacementError> {
    let rows = costs.cost.len();
    let shape_error = |problem| {
        Err(PlacementError::Shape {
            names: names.len(),
            what: problem,
            rows,
        })
    };
    if rows != names.len() || costs.cost.iter().any(|row| row.len() != rows) {
        return shape_error("a matrix");
    }
    if costs.cost.iter().flatten().any(|cost| !cost.is_finite()) {
        return shape_error("an entry that is not finite in a matrix");
    }
    Ok(())
}

/// Places `names` on the machine with the smallest total of `decision_costs`.
///
/// The placement, the best, the worst and random ones are evaluated by `evaluation_costs`, which is the same matrix, or
/// a measured one to validate a scheme.
///
/// # Errors
/// There is no online CPU, or a matrix is not square, not finite, or of another size than `names`.
pub fn place(
    names: &[String],
    decision_costs: &PairCosts,
    evaluation_costs: &PairCosts,
    topology: &Topology,
    seed: u64,
) -> Result<Placement, PlacementError> {
    check_costs(names, decision_costs)?;
    check_costs(names, evaluation_costs)?;
    let names = number_names(names);
    let cache_seats = cache_seats(topology, names.len())?;
    let shape = shape_of(&cache_seats);
    let solution = solvers::best_assignment(&decision_costs.cost, &shape);
    let reasons = explain_placement(&solution.seating, decision_costs);
    let mean_cost = |total: f64, pair_costs: &PairCosts| {
        placement_cost(total / names.len().max(1) as f64, pair_costs.kind)
    };
    let random_totals = solvers::random_totals(&evaluation_costs.cost, &shape, seed);
    let evaluated_costs = solution.seating.costs_by_program(&evaluation_costs.cost);

    Ok(Placement {
        programs: build_programs(
            &names,
            &cache_seats,
            &solution.seating,
            &evaluated_costs,
            evaluation_costs.kind,
            &reasons,
        ),
        caches: build_caches(&names, &cache_seats, &solution.seating, topology),
        covers_machine: false,
        plan: mean_cost(
            solution.seating.total_cost(&evaluation_costs.cost),
            evaluation_costs,
        ),
        best: mean_cost(
            solvers::best_assignment(&evaluation_costs.cost, &shape).total,
            evaluation_costs,
        ),
        worst: mean_cost(
            solvers::worst_assignment(&evaluation_costs.cost, &shape).total,
            evaluation_costs,
        ),
        random: mean_cost(random_totals.mean, evaluation_costs),
        random_low_5_percent: mean_cost(random_totals.low_5_percent, evaluation_costs),
        random_high_5_percent: mean_cost(random_totals.high_5_percent, evaluation_costs),
        method: solution.method,
        lower_bound: mean_cost(solution.lower_bound, decision_costs),
        gap: mean_cost(solution.total - solution.lower_bound, decision_costs),
        reasons,
    })
}

pub(crate) fn shape_of(seats_by_cache: &[CacheSeats]) -> Seats {
    Seats {
        cpus_per_cache: seats_by_cache
            .iter()
            .map(|cache| cache.cpus.len() as u32)
            .collect(),
    }
}

/// Makes repeated names unique: the second program of the same name gets `#2`.
pub fn number_names(names: &[String]) -> Vec<String> {
    let copy_number = |index: usize| {
        names[..index]
            .iter()
            .filter(|earlier_name| **earlier_name == names[index])
            .count()
            + 1
    };
    let unique_name = |nth: usize| {
        if copy_number(nth) == 1 {
            names[nth].clone()
        } else {
            format!("{}#{}", names[nth], copy_number(nth))
        }
    };
    (0..names.len()).map(unique_name).collect()
}

/// Rounds to 10 decimals, so that sums of printed percentages match the printed sum.
pub(crate) fn placement_cost(mean_cost: f64, kind: CostKind) -> PlacementCost {
    let round_cost = |value: f64| libm::round(value * 1e10) / 1e10;
    match kind {
        CostKind::Degradation => PlacementCost {
            mean_slowdown_percent: Some(round_cost(100.0 * mean_cost)),
            mean_weight: None,
        },
        CostKind::Weight => PlacementCost {
            mean_slowdown_percent: None,
            mean_weight: Some(round_cost(mean_cost)),
        },
    }
}

pub(crate) fn build_programs(
    names: &[String],
    seats_by_cache: &[CacheSeats],
    seating: &Seating,
    costs: &[f64],
    kind: CostKind,
    reasons: &[Reason],
) -> Vec<PlacedProgram> {
    let names_of = |members: &[usize]| {
        members
            .iter()
            .map(|&member| names[member].clone())
            .collect::<Vec<String>>()
    };

    let mut placed_programs: Vec<(usize, PlacedProgram)> = Vec::new();
    for (cache, cpus) in seating.by_cache.iter().enumerate() {
        for (index, members) in cpus.iter().enumerate() {
            let mut co_runners: Vec<usize> = cpus
                .iter()
                .enumerate()
                .filter(|(other_cpu, _)| *other_cpu != index)
                .flat_map(|(_, cpu)| cpu)
                .copied()
                .collect();
            co_runners.sort_unstable();

            for &program in members {
                let cpu_sharers: Vec<usize> = members
                    .iter()
                    .copied()
                    .filter(|&other| other != program)
                    .collect();
                let concerns_program =
                    |reason: &&Reason| reason.tasks.first() == Some(&TaskId(program as u32));
                let explanations: Vec<String> = reasons
                    .iter()
                    .filter(concerns_program)
                    .map(|reason| render(reason, names))
                    .collect();

                let program_cost = placement_cost(costs[program], kind);
                placed_programs.push((
                    program,
                    PlacedProgram {
                        name: names[program].clone(),
                        cpu: seats_by_cache[cache].cpus[index],
                        cache: seats_by_cache[cache].cache,
                        co_runners: names_of(&co_runners),
                        shares_cpu_with: names_of(&cpu_sharers),
                        slowdown_percent: program_cost.mean_slowdown_percent,
                        forecast: None,
                        weight: program_cost.mean_weight,
                        reason: explanations.join("; "),
                    },
                ));
            }
        }
    }

    placed_programs.sort_by_key(|(program, _)| *program);
    placed_programs
        .into_iter()
        .map(|(_, program)| program)
        .collect()
}

pub(crate) fn build_caches(
    names: &[String],
    seats_by_cache: &[CacheSeats],
    seating: &Seating,
    topology: &Topology,
) -> Vec<PlacedCache> {
    let placed_cache = |(cache_seats, cpus): (&CacheSeats, &Vec<Vec<usize>>)| {
        let cache = topology
            .caches
            .iter()
            .find(|cache| Some(cache.id) == cache_seats.cache);
        let member_names = |members: &Vec<usize>| {
            members
                .iter()
                .map(|&member| names[member].clone())
                .collect()
        };

        PlacedCache {
            cache: cache_seats.cache,
            level: cache.map(|cache| cache.level),
            size_bytes: cache.and_then(|cache| cache.size_bytes),
            cpus: cache_seats
                .cpus
                .iter()
                .copied()
                .zip(cpus.iter().map(member_names))
                .collect(),
        }
    };

    seats_by_cache
        .iter()
        .zip(&seating.by_cache)
        .map(placed_cache)
        .collect()
}
