//! CA: contention-aware scheduling (Zhuravlev, Blagodurov, Fedorova, ASPLOS 2010).
//!
//! Choices that the paper leaves open were made before any run. The ten representative programs are those that the
//! text names (mcf, milc, gamess, namd, soplex, sphinx, gcc) and, in the order of Table 2, gobmk, libquantum and
//! povray. Because the kernels do not end, run times are cycles per instruction over equal work ([`crate::work`]).
//! Seeds change the order of arrival, the frames and, except where run-to-run deviation is measured, the inputs.

mod factors;
mod online;
mod run_to_run;
mod schemes;

use crate::setup::WorkloadJob;
use crate::{ExperimentContext, ExperimentRun};

/// The ten programs; see the module's documentation.
const TEN_PROGRAMS: [&str; 10] = [
    "mcf-2006",
    "milc",
    "gamess",
    "namd",
    "soplex",
    "sphinx",
    "gcc",
    "gobmk",
    "libquantum",
    "povray",
];

/// The single time scale of a run, by which windows, slices and costs are divided.
///
/// Caches do not shrink with it: a program with few misses takes some 20 million cycles to fill 4 MB, whatever the
/// scale. On the paper's machine that was 2 % of a window of 10^9 cycles. At 1/200, a refill took four windows, so the
/// runs measured refilling (swaps that would have paid off cost more than they gained). At 1/50 a refill takes about
/// one window, and measuring starts one refill after the first decision; the second scale shows that the result does
/// not depend on it.
fn time_scale(context: &ExperimentContext<'_>) -> u64 {
    context.pick(100, 50)
}

const SECOND_SCALE: u64 = 20;

/// All experiments of the paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("CA-1 CA-4 CA-5", schemes::compare_schemes),
    ("CA-2", factors::run),
    ("CA-3", schemes::published_findings),
    ("CA-6", online::four_core_results),
    ("CA-7", online::eight_core_results),
    ("CA-8", run_to_run::findings),
];

/// The programs of a run: all ten, or six in a quick run. Four would not suffice, because they form
/// only one workload of four.
fn program_names(context: &ExperimentContext<'_>) -> &'static [&'static str] {
    context.pick_by_length(&TEN_PROGRAMS[..4], &TEN_PROGRAMS[..6], &TEN_PROGRAMS)
}

fn program_jobs(names: &[&str], seed: u64) -> Vec<WorkloadJob> {
    names
        .iter()
        .map(|name| WorkloadJob::new(name, seed))
        .collect()
}
