//! BS (papers BS): the caches and throughput of a multithreaded chip, and scheduling by group miss ratios.
//!
//! The paper calls its workload "SPEC CPU"; the runs here use one copy of every SPEC CPU2000 program in the table.

mod balance_sets;
mod first_level;
mod model;
mod stretch;

use crate::Experiment;

/// All experiments of the paper.
pub(crate) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            ids: &["BS-1"],
            title: "throughput of four copies of one program over the size of the L1",
            full_minutes: 3.0,
            run: first_level::run,
        },
        Experiment {
            ids: &["BS-2", "BS-3", "BS-4", "BS-6"],
            title: "a mix on two cores over the size of the L2, under the default scheduler and balance sets",
            full_minutes: 12.0,
            run: balance_sets::run,
        },
        Experiment {
            ids: &["BS-5"],
            title: "how well the miss ratio of a group is expected",
            full_minutes: 6.0,
            run: model::run,
        },
    ]
}
