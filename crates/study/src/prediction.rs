//! Predicts slowdowns and placements, in the form of results for tables, pictures and pages.

use cachemate_core::{CpuSet, Estimate, MachineSpec, Profile};
use cachemate_papers::matrix::{CostKind, PairCosts};
use cachemate_papers::placement::{Placement, PlacementCost};
use cachemate_papers::schemes::{Scheme, SharedCache};
use cachemate_papers::solvers::SolverMethod;
use cachemate_report::{
    Alternatives, CacheAssignment, CacheSummary, CostTable, PercentRange, PlacementRow, PlanResult,
    level_name,
};

use crate::StudyError;

/// The default scheme, which predicts run times for any number of programs on a cache from one recording of each.
pub const DEFAULT_SCHEME: &str = "statcc";

/// Slowdown of each program beside each other program on one cache.
///
/// # Errors
/// [`StudyError::Without`] if a profile lacks data that the model needs.
pub fn pair_costs(
    scheme: &dyn Scheme,
    names: &[String],
    profiles: &[&Profile],
    cache: &SharedCache,
) -> Result<PairCosts, StudyError> {
    scheme
        .pair_costs(profiles, cache)
        .map_err(|missing_evidence| StudyError::Without {
            scheme: missing_evidence.scheme,
            what: missing_evidence.what,
            program: names
                .get(missing_evidence.program)
                .cloned()
                .unwrap_or_else(|| "?".to_string()),
        })
}

/// The contended cache, as results show it.
pub fn cache_summary(machine: &MachineSpec) -> CacheSummary {
    let Some(cache) = machine.last_level_cache() else {
        return CacheSummary::default();
    };
    CacheSummary {
        level: level_name(cache.level).to_string(),
        size_bytes: cache.size_bytes,
        ways: cache.ways,
        line_bytes: cache.line_bytes,
        instances: machine.instance_count(cache),
        cpus_each: cache.shared_by_cores * machine.contexts_per_core,
    }
}

/// The spelling of results.
pub fn cost_unit(kind: CostKind) -> &'static str {
    match kind {
        CostKind::Degradation => "percent",
        CostKind::Weight => "weight",
    }
}

/// Converts costs, and their intervals if the model has them, to the unit of results: slowdowns to percent; weights stay
/// unchanged.
pub fn cost_table(
    names: &[String],
    model: &str,
    costs: &PairCosts,
    intervals: Option<&[Vec<Estimate>]>,
) -> CostTable {
    let interval_ends = |end: fn(&Estimate) -> f64| {
        let estimates = |row: &Vec<Estimate>| {
            row.iter()
                .map(|estimate| Some(100.0 * end(estimate)))
                .collect()
        };
        intervals.map(|rows| rows.iter().map(estimates).collect())
    };
    let scale = if costs.kind == CostKind::Degradation {
        100.0
    } else {
        1.0
    };
    let values = costs
        .cost
        .iter()
        .map(|row| row.iter().map(|cost| Some(cost * scale)).collect())
        .collect();
    CostTable {
        model: model.to_string(),
        unit: cost_unit(costs.kind).to_string(),
        names: names.to_vec(),
        values,
        low: interval_ends(|estimate| estimate.low),
        high: interval_ends(|estimate| estimate.high),
    }
}

fn mean_cost(outcome: &PlacementCost) -> Option<f64> {
    outcome.mean_slowdown_percent.or(outcome.mean_weight)
}

/// Converts a placement to the result that pictures and pages show.
pub fn plan_result(
    placement: &Placement,
    machine: &str,
    scheme: &str,
    kind: CostKind,
) -> PlanResult {
    let mut level_names = Vec::new();
    let mut caches = Vec::new();
    for cache in &placement.caches {
        let level = cache
            .level
            .map_or("no shared cache", level_name)
            .to_string();
        let level_index = level_names
            .iter()
            .filter(|earlier_level| **earlier_level == level)
            .count();
        let cpus: CpuSet = cache.cpus.iter().map(|(cpu, _)| cpu.0).collect();
        let programs_on_cache = placement
            .programs
            .iter()
            .filter(|program| cpus.contains(program.cpu.0));
        let rows_on_cache = programs_on_cache.map(|program| PlacementRow {
            name: program.name.clone(),
            cpu: Some(program.cpu.0),
            slowdown: program.slowdown_percent.or(program.weight),
            interval: program.forecast.map(PercentRange::from),
            reason: program.reason.clone(),
        });
        caches.push(CacheAssignment {
            cache: format!("{level} #{level_index}"),
            cpus: cpus.to_string(),
            programs: rows_on_cache.collect(),
        });
        level_names.push(level);
    }
    let gap = mean_cost(&placement.gap);
    PlanResult {
        machine: machine.to_string(),
        model: scheme.to_string(),
        unit: cost_unit(kind).to_string(),
        covers_machine: placement.covers_machine,
        solver: match placement.method {
            SolverMethod::Matching => "minimum-weight matching".to_string(),
            SolverMethod::DynamicProgramming => "dynamic programming".to_string(),
            SolverMethod::LocalSearch => "local search".to_string(),
            SolverMethod::Exhaustive => "all placements forecast".to_string(),
        },
        optimal: placement.method != SolverMethod::LocalSearch || gap.is_some_and(|gap| gap <= 0.0),
        gap,
        caches,
        expected: Alternatives {
            plan: mean_cost(&placement.plan),
            best: mean_cost(&placement.best),
            worst: mean_cost(&placement.worst),
            random: mean_cost(&placement.random),
        },
    }
}
