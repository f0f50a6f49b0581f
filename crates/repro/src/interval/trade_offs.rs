//! Pareto front of plans: no plan on it is at least as good as another one in every objective.
//!
//! Problem: the plan with the best mean may sacrifice one program, and a plan on fewer caches lets the others sleep;
//! which of them is right is the user's choice. Method: Pareto local search (Paquete, Chiarandini and Stützle, 2004)
//! over the neighbors of [`PlanEvaluator`], with an archive in which plans differ by at least [`MIN_SLOWDOWN_DIFFERENCE`]
//! in one objective (Laumanns et al., 2002). Among plans that break promises, the one with the smaller shortfall
//! dominates (Deb et al., 2002). Properties: the front contains the best plan for the mean speed that
//! [`PlanEvaluator::search_best_plan`] finds; the same seed gives the same front.

use cachemate_core::SplitMix64;

use super::plan_search::{EvaluatedPlan, PlanEvaluator};
use crate::Result;
use crate::greatest;

/// Plans tried in the neighborhood of the front.
const TRIED_PLANS: u32 = 240;
/// Smallest difference of slowdowns at which two plans count as different.
pub const MIN_SLOWDOWN_DIFFERENCE: f64 = 0.005;

/// The objectives of a plan; all are to be small.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlanObjectives {
    /// Mean over the programs of run time divided by solo run time, minus one.
    pub mean_slowdown: f64,
    /// The largest slowdown of a program.
    pub worst_slowdown: f64,
    /// Number of caches on which programs run. The other caches can be turned off or left to other work.
    pub caches_in_use: usize,
}

impl PlanObjectives {
    /// Returns whether this plan is at most `tolerance` worse in the slowdowns, and no worse in the number of caches.
    fn is_no_worse_than(self, other: PlanObjectives, tolerance: f64) -> bool {
        self.mean_slowdown <= other.mean_slowdown + tolerance
            && self.worst_slowdown <= other.worst_slowdown + tolerance
            && self.caches_in_use <= other.caches_in_use
    }
}

/// A plan of the front, with its objectives.
#[derive(Clone, PartialEq, Debug)]
pub struct TradeOff {
    /// The plan, with the slowdowns of its programs.
    pub plan: EvaluatedPlan,
    /// Its objectives.
    pub objectives: PlanObjectives,
}

/// Computes the Pareto front, by mean slowdown.
///
/// # Errors
/// Returns an error if the machine has no data cache.
pub fn pareto_front(truth: &PlanEvaluator<'_>, seed: u64) -> Result<Vec<TradeOff>> {
    let mut generator = SplitMix64::new(seed ^ 0x9a2e70);
    let trade_off = |plan: EvaluatedPlan| TradeOff {
        objectives: evaluate_objectives(truth, &plan),
        plan,
    };
    let mut front = vec![trade_off(truth.search_best_plan(seed)?)];
    for start_plan in [truth.packed_plan(), truth.spread_plan()] {
        insert_into_front(&mut front, trade_off(truth.evaluate_plan(start_plan)?));
    }
    for _ in 0..TRIED_PLANS {
        let base_plan = &front[generator.draw_below(front.len() as u64) as usize]
            .plan
            .plan;
        let neighbor = truth.draw_neighbor(base_plan, &mut generator);
        insert_into_front(&mut front, trade_off(truth.evaluate_plan(neighbor)?));
    }
    front.sort_by(|a, b| {
        a.objectives
            .mean_slowdown
            .total_cmp(&b.objectives.mean_slowdown)
    });
    Ok(front)
}

fn evaluate_objectives(truth: &PlanEvaluator<'_>, plan: &EvaluatedPlan) -> PlanObjectives {
    let mut used_caches: Vec<u32> = plan
        .plan
        .cpu_by_job
        .iter()
        .map(|&cpu| truth.cache_of(cpu))
        .collect();
    used_caches.sort_unstable();
    used_caches.dedup();
    PlanObjectives {
        mean_slowdown: crate::mean(&plan.slowdowns),
        worst_slowdown: greatest(plan.slowdowns.iter()),
        caches_in_use: used_caches.len(),
    }
}

/// Adds a plan unless a plan of the front covers it, and removes the plans that it dominates.
fn insert_into_front(front: &mut Vec<TradeOff>, candidate: TradeOff) {
    let dominates =
        |candidate_plan: &TradeOff, other_plan: &TradeOff, slack: f64| match candidate_plan
            .plan
            .total_shortfall
            .total_cmp(&other_plan.plan.total_shortfall)
        {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal => candidate_plan
                .objectives
                .is_no_worse_than(other_plan.objectives, slack),
            std::cmp::Ordering::Greater => false,
        };
    if front
        .iter()
        .any(|stored| dominates(stored, &candidate, MIN_SLOWDOWN_DIFFERENCE))
    {
        return;
    }
    front.retain(|stored| !dominates(&candidate, stored, 0.0));
    front.push(candidate);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interval::fixtures::{reuser, stream};

    fn plan(missing: f64, slowdowns: [f64; 2], cpus: [u32; 2]) -> TradeOff {
        let caches_in_use = if cpus[0] / 4 == cpus[1] / 4 { 1 } else { 2 };
        let objectives = PlanObjectives {
            mean_slowdown: slowdowns.iter().sum::<f64>() / 2.0,
            worst_slowdown: slowdowns[0].max(slowdowns[1]),
            caches_in_use,
        };
        let plan = super::super::plan_search::StaticPlan {
            cpu_by_job: cpus.to_vec(),
            units_by_job: vec![0, 0],
        };
        let keeps_all = missing <= 0.0;
        let plan = EvaluatedPlan {
            plan,
            slowdowns: slowdowns.to_vec(),
            total_shortfall: missing,
            mean_speed: 1.0,
            keeps_all_promises: keeps_all,
        };
        TradeOff { plan, objectives }
    }

    /// Does the archive keep exactly the plans that nothing covers, whatever the order of insertion?
    #[test]
    fn the_archive_keeps_exactly_the_plans_that_nothing_covers() {
        let (balanced, best_mean, dominated) = (
            plan(0.0, [0.2, 0.2], [0, 4]),
            plan(0.0, [0.3, 0.0], [0, 4]),
            plan(0.0, [0.3, 0.25], [0, 4]),
        );
        let (packed, equal) = (
            plan(0.0, [0.5, 0.5], [0, 1]),
            plan(0.0, [0.201, 0.202], [0, 4]),
        );
        for order in [[0, 1, 2, 3, 4], [2, 3, 0, 1, 4], [3, 2, 1, 0, 4]] {
            let all = [&balanced, &best_mean, &dominated, &packed, &equal];
            let mut front = Vec::new();
            order
                .iter()
                .for_each(|&index| insert_into_front(&mut front, all[index].clone()));
            front.sort_by(|a, b| {
                a.objectives
                    .mean_slowdown
                    .total_cmp(&b.objectives.mean_slowdown)
            });
            assert_eq!(
                front,
                [best_mean.clone(), balanced.clone(), packed.clone()],
                "{order:?}"
            );
        }
        let mut front = vec![packed];
        insert_into_front(&mut front, plan(0.01, [0.0, 0.0], [0, 4]));
        assert_eq!(front.len(), 1, "a broken promise is no trade-off");
    }

    /// Do two programs that disturb each other give a front of "apart on two caches" and "together on one"?
    #[test]
    fn a_front_has_the_plan_on_one_cache_and_the_plan_on_two() {
        let spec =
            cachemate_spec::load_machine("epyc-7742?cores_per_package=8&contexts_per_core=1")
                .unwrap();
        let jobs = [reuser("reuser", &spec, 0.7, 0.02), stream(&spec, 0.02)];
        let truth = PlanEvaluator::new(&spec, &jobs).unwrap();
        let front = pareto_front(&truth, 1).unwrap();
        let caches: Vec<usize> = front
            .iter()
            .map(|trade_off| trade_off.objectives.caches_in_use)
            .collect();
        assert!(caches.starts_with(&[2]) && caches.contains(&1), "{front:?}");
        for (better_mean, next) in front.iter().zip(&front[1..]) {
            let (a, b) = (better_mean.objectives, next.objectives);
            assert!(
                b.worst_slowdown < a.worst_slowdown || b.caches_in_use < a.caches_in_use,
                "{a:?} {b:?}"
            );
        }
    }
}
