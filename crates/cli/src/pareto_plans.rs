//! `cachemate plan --pareto`: the plans between which only the user can choose.

use cachemate_report::text::format_fixed;
use cachemate_repro::interval::plan_search::PlanEvaluator;
use cachemate_repro::interval::trade_offs::{MIN_SLOWDOWN_DIFFERENCE, TradeOff, pareto_front};
use serde::Serialize;

use crate::goal_plan::{PlannedPlacement, StaticPlanSearch, placements};

/// The Pareto front over mean slowdown, worst slowdown and number of caches in use.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ParetoPlans {
    /// Number of ways or colors of each cache; 1 if the cache cannot be partitioned.
    units_per_cache: u32,
    plans: Vec<ParetoPlan>,
}

/// One plan of the front.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct ParetoPlan {
    mean_slowdown: f64,
    worst_slowdown: f64,
    caches_in_use: usize,
    /// Whether the forecast keeps all promises under the plan.
    keeps_all: bool,
    placement: Vec<ParetoPlacement>,
}

/// Place of one program, with its cache.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct ParetoPlacement {
    cache: u32,
    #[serde(flatten)]
    placement: PlannedPlacement,
}

impl ParetoPlans {
    /// Searches the plans that no other plan beats in all objectives.
    ///
    /// # Errors
    /// There are more programs than cores.
    pub fn plan_search(search: &StaticPlanSearch) -> anyhow::Result<Self> {
        let truth = PlanEvaluator::new(&search.machine, &search.jobs)?;
        let plan_of = |TradeOff { plan, objectives }: &TradeOff| ParetoPlan {
            mean_slowdown: objectives.mean_slowdown,
            worst_slowdown: objectives.worst_slowdown,
            caches_in_use: objectives.caches_in_use,
            keeps_all: plan.keeps_all_promises,
            placement: placements(&search.names, plan)
                .into_iter()
                .map(|placement| ParetoPlacement {
                    cache: truth.cache_of(placement.cpu),
                    placement,
                })
                .collect(),
        };
        let plans = pareto_front(&truth, search.seed)?
            .iter()
            .map(plan_of)
            .collect();
        Ok(ParetoPlans {
            units_per_cache: truth.units_per_cache,
            plans,
        })
    }

    /// Formats the front as a table, a line per plan, with its caches.
    pub fn describe(&self) -> String {
        let mut text = format!(
            "\nplans that no other beats in mean slowdown, worst slowdown and caches in use (to {} points);\n\
             above, speeds are over whole rounds of the programs, here over a fixed time\n",
            format_fixed(100.0 * MIN_SLOWDOWN_DIFFERENCE, 1)
        );
        text += "    mean    worst  caches  programs of each cache\n";
        for plan in &self.plans {
            let percent_text = |share: f64| format!("{} %", format_fixed(100.0 * share, 1));
            let broken_note = if plan.keeps_all {
                ""
            } else {
                "  (breaks a promise)"
            };
            text += &format!(
                "{:>8} {:>8}  {:>6}  {}{broken_note}\n",
                percent_text(plan.mean_slowdown),
                percent_text(plan.worst_slowdown),
                plan.caches_in_use,
                self.describe_caches(plan)
            );
        }
        text
    }

    fn describe_caches(&self, plan: &ParetoPlan) -> String {
        let mut caches: Vec<u32> = plan
            .placement
            .iter()
            .map(|placement| placement.cache)
            .collect();
        caches.sort_unstable();
        caches.dedup();
        let program_text = |placement: &ParetoPlacement| match placement.placement.exclusive_units {
            0 => placement.placement.program.clone(),
            units => format!(
                "{} ({units} of {} parts alone)",
                placement.placement.program, self.units_per_cache
            ),
        };
        let cache_text = |cache: &u32| {
            let members = plan
                .placement
                .iter()
                .filter(|placement| placement.cache == *cache);
            members.map(program_text).collect::<Vec<_>>().join(", ")
        };
        caches
            .iter()
            .map(cache_text)
            .collect::<Vec<_>>()
            .join(" | ")
    }
}
