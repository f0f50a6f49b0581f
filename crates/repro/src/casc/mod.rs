//! CASC (papers CASC): 18 threads on two cores of four contexts, from 48 to 768 KB of L2.

mod comparison;
mod estimates;
mod overhead;

use crate::Experiment;

/// All experiments of the paper.
pub(crate) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            ids: &["CASC-1", "CASC-2", "CASC-3", "CASC-6"],
            title: "misses, throughput and fairness of CASC against the default scheduler, over L2 sizes",
            full_minutes: 12.0,
            run: comparison::run,
        },
        Experiment {
            ids: &["CASC-4", "CASC-5"],
            title: "which threads are put on the right side, and how well groups are expected",
            full_minutes: 6.0,
            run: estimates::run,
        },
        Experiment {
            ids: &["CASC-7", "CASC-8"],
            title: "what measuring costs, and what identical threads get",
            full_minutes: 2.0,
            run: overhead::run,
        },
    ]
}
