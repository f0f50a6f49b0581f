//! CP: cache partitioning by page coloring, and sizing the partitions (thesis ch. 4 and 5.7).
//!
//! One chip of the thesis's machine, one program to a core (4.5). Its runs measured 60·10^9 cycles; one time scale
//! divides these, the windows, and all costs of the operating system alike. The warm-up is the exception: caches are
//! as large as the thesis's and fill no faster, so it is what filling takes, whatever the scale.

mod choices;
mod colors;
pub(crate) mod goals;
mod isolation;
pub(crate) mod mixes;
mod pairs;
mod resize;
pub(crate) mod serve;

pub(crate) use choices::sizing;

use cachemate_core::{CacheLevel, PipelineConfig, WindowLength};
use cachemate_pipeline::Pipeline;
use cachemate_sim::machine::SimOptions;

use crate::setup::{Workload, WorkloadJob, built};
use crate::{Experiment, ReproError};

/// Page colors of the machine.
pub(crate) const COLORS: u32 = 16;
/// One chip, one program to a core, memory for the largest mix (thesis 4.5: "we use only 1 chip of the system").
const CHIP: &str = "power5-2x2x2?packages=1&memory.nodes=1&contexts_per_core=1&memory.size=2G";
const MEASURED_CYCLES: u64 = 60_000_000_000;

/// A warehouse and its client's buffers (TC 3.5.2 gives 25 MB).
pub(crate) const WAREHOUSE_BYTES: u64 = 25_300_000;

/// How long runs are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct RunScale {
    /// Divides the measured part.
    pub scale: u64,
    pub warm_up_cycles: u64,
}

impl RunScale {
    pub fn measured_cycles(self) -> u64 {
        MEASURED_CYCLES / self.scale
    }
}

/// All experiments of the paper.
pub(crate) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            ids: &["CP-1"],
            title: "run time against 1-16 colors, every program",
            full_minutes: 4.0,
            run: colors::run,
        },
        Experiment {
            ids: &["CP-2", "CP-3", "CP-4", "RM-4"],
            title: "pairs at all splits against sharing; splits chosen from curves, offline and online",
            full_minutes: 60.0,
            run: choices::run,
        },
        Experiment {
            ids: &["CP-6"],
            title: "cost of resizing against the interval",
            full_minutes: 3.0,
            run: resize::run,
        },
        Experiment {
            ids: &["CP-5"],
            title: "a service level held by resizing while clients come",
            full_minutes: 3.0,
            run: serve::run,
        },
        Experiment {
            ids: &["MULTI"],
            title: "four and eight programs on one cache, sized online",
            full_minutes: 50.0,
            run: mixes::run,
        },
        Experiment {
            ids: &["GOALS"],
            title: "a floor for one program and fairness for all, in colors and in ways, and what they cost the others",
            full_minutes: 3.0,
            run: goals::run,
        },
    ]
}

/// Programs on the chip. `cores` beyond the thesis's two are for more programs on the same cache.
pub(crate) fn on_chip(
    jobs: Vec<WorkloadJob>,
    cores: u32,
    l3: bool,
    pace: RunScale,
    seed: u64,
) -> Result<Workload, ReproError> {
    let mut workload = Workload::on(CHIP, jobs, seed)?.lasting(pace.warm_up_cycles, pace.measured_cycles());
    workload.options = SimOptions { scale: pace.scale, ..workload.options };
    let spec = &mut workload.machine;
    spec.cores_per_package = cores;
    spec.caches
        .iter_mut()
        .filter(|cache| cache.level >= CacheLevel::L2)
        .for_each(|cache| cache.shared_by_cores = cores);
    if !l3 {
        spec.caches.retain(|cache| cache.level != CacheLevel::L3);
    }
    Ok(workload)
}

/// The thesis's SPECjbb2000: one warehouse, one client (4.5).
pub(crate) fn job(name: &str, seed: u64) -> WorkloadJob {
    let mut job = WorkloadJob::new(name, seed);
    if name == "warehouses" {
        (job.options.threads, job.options.groups) = (Some(1), Some(1));
        job.options.footprint_bytes = Some(WAREHOUSE_BYTES);
    }
    job
}

/// Interval between two decisions of a policy with a fixed plan.
const TOLD_CYCLES: u64 = 50_000;

/// Colors of each program, in order, from the start on.
pub(crate) fn told(workload: &Workload, shares: &[String]) -> Result<Pipeline, ReproError> {
    let shares: Vec<String> = shares.iter().map(|share| format!("'{share}'")).collect();
    let window_ns = nominal_ns(workload, TOLD_CYCLES);
    let parameters = format!("window_ns = {window_ns}\nsteps = [{{ shares = [{}] }}]", shares.join(", "));
    // Before the first plan nothing but the first few pages are touched.
    let first = WindowLength::Cycles { cycles: 1_000 * workload.options.scale };
    built(decided_by(workload, "static-partition", &parameters, first))
}

/// Simulated cycles as policies see them: unscaled.
pub(crate) fn nominal_ns(workload: &Workload, cycles: u64) -> u64 {
    cycles * workload.options.scale * 1_000 / (workload.machine.hertz / 1_000_000)
}

/// A policy under its own name.
pub(crate) fn decided_by(
    workload: &Workload,
    name: &str,
    parameters: &str,
    first_window: WindowLength,
) -> PipelineConfig {
    workload.pipeline(name, parameters, Vec::new(), first_window)
}

/// The first program gets `first` colors, the second the rest.
pub(crate) fn split(first: u32) -> Vec<String> {
    vec![format!("0-{}", first - 1), format!("{first}-{}", COLORS - 1)]
}
