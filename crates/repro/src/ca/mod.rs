//! CA: contention-aware scheduling (Zhuravlev, Blagodurov, Fedorova, ASPLOS 2010).
//!
//! Choices that the paper leaves open were made before any run. The ten representative programs are those that the
//! text names (mcf, milc, gamess, namd, soplex, sphinx, gcc) and, in the order of Table 2, gobmk, libquantum and
//! povray. Because the kernels do not end, run times are cycles per instruction over equal work ([`crate::work`]).
//! Seeds change the order of arrival, the frames and, except where run-to-run deviation is measured, the inputs.

mod factors;
mod online;
mod schemes;

use crate::setup::WorkloadJob;
use crate::{Experiment, ExperimentContext};

/// The ten programs; see the module's documentation.
const TEN: [&str; 10] =
    ["mcf-2006", "milc", "gamess", "namd", "soplex", "sphinx", "gcc", "gobmk", "libquantum", "povray"];

/// The single time scale of a run, by which windows, slices and costs are divided.
///
/// Caches do not shrink with it: a program with few misses takes some 20 million cycles to fill 4 MB, whatever the
/// scale. On the paper's machine that was 2 % of a window of 10^9 cycles. At 1/200, a refill took four windows, so the
/// runs measured refilling (swaps that would have paid off cost more than they gained). At 1/50 a refill takes about
/// one window, and measuring starts one refill after the first decision; the second scale shows that the result does
/// not depend on it.
struct TimeScale {
    quick: u64,
    full: u64,
}

impl TimeScale {
    fn scale_of(&self, context: &ExperimentContext<'_>) -> u64 {
        context.pick(self.quick, self.full)
    }
}

const SCALE: TimeScale = TimeScale { quick: 100, full: 50 };
const SECOND_SCALE: u64 = 20;

/// All experiments of the paper.
pub(crate) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            ids: &["CA-1", "CA-4", "CA-5"],
            title: "classification schemes against optimal, gain by make-up, order by miss rate",
            full_minutes: 2.5,
            run: schemes::compare,
        },
        Experiment { ids: &["CA-2"], title: "where slowdowns come from", full_minutes: 2.0, run: factors::run },
        Experiment {
            ids: &["CA-3"],
            title: "the published slowdowns through the solvers",
            full_minutes: 0.01,
            run: schemes::published_findings,
        },
        Experiment {
            ids: &["CA-6"],
            title: "DI and DIO against all schedules of four programs",
            full_minutes: 35.0,
            run: online::four_cores,
        },
        Experiment {
            ids: &["CA-7"],
            title: "DI and DIO against the default scheduler on eight cores",
            full_minutes: 9.0,
            run: online::eight_cores,
        },
        Experiment {
            ids: &["CA-8"],
            title: "single programs' worst case and deviation over 20 orders of arrival",
            full_minutes: 4.0,
            run: online::run_to_run_findings,
        },
    ]
}

/// Programs of a run: all ten, or six in a quick run. Four would not suffice, because they form only one workload of
/// four.
fn program_names(context: &ExperimentContext<'_>) -> &'static [&'static str] {
    context.pick_of_three(&TEN[..4], &TEN[..6], &TEN)
}

fn program_jobs(names: &[&str], seed: u64) -> Vec<WorkloadJob> {
    names.iter().map(|name| WorkloadJob::new(name, seed)).collect()
}
