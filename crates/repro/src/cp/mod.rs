//! CP: cache partitioning by page coloring, and sizing of the partitions (thesis ch. 4 and 5.7).
//!
//! Runs use one chip of the thesis's machine, with one program per core (4.5). The thesis measured 60·10^9 cycles;
//! one time scale divides these, the windows, and all costs of the operating system. The warm-up is not scaled,
//! because the caches are as large as the thesis's and fill no faster.
//!
//! The streams of the programs contain no branches, and dependences through memory only, so that at POWER5's width of
//! five they execute 2 to 4 instructions per cycle. The thesis measured 0.2 to 1.3 (Table 5.5, column d, eight colors),
//! so a core here issues one per cycle. Its window keeps the time for which it hides a miss: 100 instructions at five
//! per cycle are 20 cycles, in which dispatch fills the window (Karkhanis and Smith, ISCA 2004), and thus 20
//! instructions. Over 22 programs, the mean factor between simulated and published rates falls from 3.1 to 1.4 by the
//! width, and to 1.25 by the window.

mod choices;
mod colors;
mod goals;
mod isolation;
pub(crate) mod mixes;
mod pairs;
mod resize;
mod serve;

pub(crate) use choices::sizing_policy;

use cachemate_core::{
    CacheLevel, CacheShare, GroupId, IndexSet, PageMigration, Plan, ProcessId, ShareMember, Units,
    WindowLength,
};
use cachemate_papers::solvers::sizing::{CostAggregate, UnitClaim, allocate_exactly};
use serde::Serialize;

use crate::setup::{Workload, WorkloadJob, failed};
use crate::work::FixedPlan;
use crate::{ExperimentContext, ExperimentRun, Result};

/// Number of page colors of the machine.
pub(crate) const COLORS: u32 = 16;
/// One chip with one program per core and memory for the largest mix (thesis 4.5: "we use only 1 chip of the system"),
/// whose cores are as fast as the thesis measured them on its programs alone.
pub(crate) const CHIP_MACHINE: &str = concat!(
    "power5-2x2x2?packages=1&memory.nodes=1&contexts_per_core=1&memory.size=2G&",
    "pipeline.issue_width=1&pipeline.window=20"
);
const MEASURED_CYCLES: u64 = 60_000_000_000;

/// Size of a warehouse and its client's buffers (TC 3.5.2 gives 25 MB).
pub(crate) const WAREHOUSE_BYTES: u64 = 25_300_000;

/// Lengths of runs on the chip, and whether it has its L3.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct RunScale {
    /// Divisor of the measured part.
    pub scale: u64,
    pub warm_up_cycles: u64,
    pub with_l3: bool,
}

impl RunScale {
    /// The runs of pairs. A full run warms up until the L3 is full and every program has passed over
    /// its data once (ammp's speed changes for the last time after 45 million cycles). It then
    /// measures for as long as the programs' own phases, which no time scale shortens.
    pub fn of_pairs(context: &ExperimentContext<'_>) -> Self {
        let (scale, warm_up_cycles) = context.pick((30_000, 6_000_000), (2_500, 50_000_000));
        RunScale {
            scale,
            warm_up_cycles,
            with_l3: true,
        }
    }

    pub fn measured_cycles(self) -> u64 {
        MEASURED_CYCLES / self.scale
    }
}

/// All experiments of the paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("CP-1", colors::run),
    ("CP-2 CP-3 CP-4 RM-4", choices::run),
    ("CP-6", resize::run),
    ("CP-5", serve::run),
    ("MULTI", mixes::run),
    ("GOALS", goals::run),
];

/// A workload of programs on the chip. More `cores` than the thesis's two are for more programs on
/// the same cache.
pub(crate) fn chip_workload(
    jobs: Vec<WorkloadJob>,
    cores: u32,
    scale: RunScale,
    seed: u64,
) -> Result<Workload> {
    let mut workload = Workload::from_machine_name(CHIP_MACHINE, jobs, seed)?
        .with_length(scale.warm_up_cycles, scale.measured_cycles());
    workload.options.scale = scale.scale;
    let spec = &mut workload.machine;
    spec.cores_per_package = cores;
    spec.caches
        .iter_mut()
        .filter(|cache| cache.level >= CacheLevel::L2)
        .for_each(|cache| cache.shared_by_cores = cores);
    if !scale.with_l3 {
        spec.caches.retain(|cache| cache.level != CacheLevel::L3);
    }

    Ok(workload)
}

/// The thesis's SPECjbb2000: one warehouse, one client (4.5).
pub(crate) fn thesis_job(name: &str, seed: u64) -> WorkloadJob {
    let mut job = WorkloadJob::new(name, seed);
    if name == "warehouses" {
        (job.options.threads, job.options.groups) = (Some(1), Some(1));
        job.options.footprint_bytes = Some(WAREHOUSE_BYTES);
    }
    job
}

/// Time between two decisions of a policy with a fixed plan.
const FIXED_PLAN_WINDOW_CYCLES: u64 = 50_000;

/// A policy that assigns these colors to the programs, in order, from the start.
pub(crate) fn fixed_plan_policy(workload: &Workload, shares: &[String]) -> Result<FixedPlan> {
    let topology = workload.machine.topology();
    let shared_cache = topology
        .last_level_caches()
        .next()
        .ok_or_else(|| failed(CHIP_MACHINE)("no cache to share"))?;
    let mut plan = Plan::idle(WindowLength::Time {
        ns: nominal_ns(workload, FIXED_PLAN_WINDOW_CYCLES),
    });
    for (number, colors) in (0u32..).zip(shares) {
        let allowed: IndexSet = colors.parse().map_err(failed("colors"))?;
        plan.shares.push(CacheShare {
            group: GroupId(number),
            members: vec![ShareMember::Process(ProcessId(number))],
            cache: shared_cache.id,
            units: Units::Colors {
                allowed,
                migration: PageMigration::All,
            },
        });
    }

    // Before the plan, only the first few pages are touched.
    let first_window = WindowLength::Cycles {
        cycles: 1_000 * workload.options.scale,
    };
    Ok(FixedPlan { plan, first_window })
}

/// Converts simulated cycles to nominal time as policies see it (unscaled).
pub(crate) fn nominal_ns(workload: &Workload, cycles: u64) -> u64 {
    cycles * workload.options.scale * 1_000 / (workload.machine.hertz / 1_000_000)
}

/// The numbers of colors that minimize the sum of the programs' costs with 1, 2, ... colors.
pub(crate) fn colors_of_least_cost(costs: impl IntoIterator<Item = Vec<f64>>) -> Vec<u32> {
    let claims: Vec<UnitClaim> = costs
        .into_iter()
        .map(|costs| UnitClaim {
            costs,
            min_units: 1,
        })
        .collect();
    allocate_exactly(&claims, COLORS, CostAggregate::Sum)
        .expect("sixteen colors for at most eight programs, and measured costs")
}

/// Gives the first program `first_colors` colors, and the second program all others.
pub(crate) fn split_shares(first_colors: u32) -> Vec<String> {
    vec![
        format!("0-{}", first_colors - 1),
        format!("{first_colors}-{}", COLORS - 1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::build_pipeline;
    use crate::work::InstructionRange;
    use crate::{steered, work};

    /// Is the run with a fixed split, applied without a policy, identical to the bit to one with the policy of stated
    /// partitions?
    #[test]
    fn a_fixed_split_run_equals_the_stated_partition_policys_run() {
        let scale = RunScale {
            scale: 60_000,
            warm_up_cycles: 300_000,
            with_l3: true,
        };
        let workload = chip_workload(
            vec![thesis_job("mcf", 1), thesis_job("art", 2)],
            2,
            scale,
            1,
        )
        .unwrap();

        let works = [InstructionRange {
            from_instr: 40_000.0,
            to_instr: 200_000.0,
        }; 2];
        let plan = fixed_plan_policy(&workload, &split_shares(4)).unwrap();
        let fixed = work::measure_joint(&workload, &works, Some(&plan)).unwrap();
        let window_ns = nominal_ns(&workload, FIXED_PLAN_WINDOW_CYCLES);
        let parameters =
            format!("window_ns = {window_ns}\nsteps = [{{ shares = ['0-3', '4-15'] }}]");
        let config = workload.pipeline(
            "static-partition",
            &parameters,
            Vec::new(),
            plan.first_window,
        );
        let stated =
            steered::run_together(&workload, &works, build_pipeline(config).unwrap()).unwrap();
        assert_eq!((fixed.rates, fixed.results), (stated.rates, stated.results));
    }
}
